# make book   build the book          make test       every check, as CI runs it
# make lab    open it in JupyterLab   make bench      timings beside public peers
# make notebooks  write the .ipynb beside each chapter's .md
# make data   prepare larger data sets (see README)   make clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A set of versions the tests passed with; `make LOCK= ...` takes the newest releases instead.
LOCK ?= requirements.lock
CONSTRAINT := $(if $(LOCK),--constraint $(LOCK))
JOBS ?= 2

export FLATBOOK_DATA ?= $(CURDIR)/_build/data
export FLATBOOK_PROGRESS ?= 1
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 FLATBOOK_PROGRESS=0 $(BIN)/python -m pytest

.PHONY: book test lint unit nbval strict-book site lab notebooks bench data lock clean

book: $(VENV)/.installed
	$(BIN)/python scripts/build_book.py --workers $(JOBS)

test: lint unit nbval strict-book site

$(VENV)/.installed: requirements.txt pyproject.toml $(wildcard requirements.lock)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; this is " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --requirement requirements.txt --editable . $(CONSTRAINT)
	touch $@

lint: $(VENV)/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python scripts/format_chapters.py --check
	$(BIN)/python scripts/sync_notebooks.py --check

unit: $(VENV)/.installed data
	$(PYTEST) -n $(JOBS) -m "not site"

nbval: $(VENV)/.installed
	$(PYTEST) --nbval-lax --nbval-current-env --nbval-cell-timeout 300 \
	  -n $(JOBS) --dist loadscope -v -p no:doctest -o addopts="" book

strict-book: $(VENV)/.installed
	$(BIN)/python scripts/build_book.py --strict --workers $(JOBS)

site: strict-book
	$(PYTEST) -m site tests/test_site.py

lab: $(VENV)/.installed
	$(BIN)/jupyter lab book $(ARGS)

notebooks: $(VENV)/.installed
	$(BIN)/python scripts/format_chapters.py
	$(BIN)/python scripts/sync_notebooks.py

data: $(VENV)/.installed
	$(BIN)/python scripts/prepare_data.py

bench: $(VENV)/.installed
	$(MAKE) -C benchmarks

lock: $(VENV)/.installed
	$(BIN)/python -m pip freeze --exclude-editable > requirements.lock

clean:
	rm -rf _build .pytest_cache .ruff_cache .hypothesis .benchmarks
