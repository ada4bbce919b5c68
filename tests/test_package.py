import ast
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import flatbook

PACKAGE = Path(flatbook.__file__).parent

# A module imports only from those before it.
# fmt: off
ORDER = [
    "lazy", "checks", "files", "jsonfile", "runtime", "progress", "provenance", "summaries",
    "archives", "vision", "registry", "data",
    "models",
    "curvature", "landscape", "sharpness",
    "wrapper", "optim",
    "config", "checkpoints", "augmentation", "training",
    "arrays", "designs", "members", "vectorised", "crews", "keeping", "ensembles",
    "threat", "attacks", "blackbox", "masking", "adversarial",
    "convolution", "lipschitz", "rise", "certificates",
    "signals", "rates", "likelihood", "membership", "memorization",
    "comparison", "audit",
    "unlearning", "theory", "reconstruction", "language", "prompts",
    "results", "plotting", "notebook", "units", "experiments", "cli",
]
# fmt: on

MODULES = sorted(
    module.name.removeprefix("flatbook.")
    for module in pkgutil.walk_packages([str(PACKAGE)], "flatbook.")
)


def run(code, *arguments):
    done = subprocess.run(
        [sys.executable, *arguments, "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


# Lightness


@pytest.mark.parametrize(
    "module",
    ["flatbook", "flatbook.cli", "flatbook.results", "flatbook.experiments", "flatbook.plotting"],
)
def test_import_is_light(module):
    heavy = ("torch", "torchvision", "scipy", "sklearn", "matplotlib", "tqdm", "numpy")
    loaded = run(f"import sys, {module}; print(*[n for n in {heavy} if n in sys.modules])")
    assert loaded == ""


def test_names_load_on_first_use():
    assert run("import flatbook, sys; flatbook.device; print('torch' in sys.modules)") == "True"


def seconds(*command, times=3):
    """Return the least processor time a command takes, to which a busy machine adds nothing."""
    taken = []
    for _ in range(times):
        before = os.times()
        subprocess.run(command, check=True, capture_output=True)
        after = os.times()
        taken.append(
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system
        )
    return min(taken)


def test_help_is_quick():
    assert seconds(sys.executable, "-m", "flatbook.cli", "--help") < 1


def test_import_is_quick():
    ours = seconds(sys.executable, "-c", "import flatbook")
    assert ours < 1.5 * seconds(sys.executable, "-c", "import torch", times=2)


# Names


def test_dir_lists_the_names():
    assert dir(flatbook) == sorted(flatbook.__all__)
    assert len(set(flatbook.__all__)) == len(flatbook.__all__)


@pytest.mark.parametrize("name", flatbook.__all__)
def test_every_name_resolves(name):
    assert getattr(flatbook, name) is not None


def test_unknown_name():
    with pytest.raises(AttributeError, match="module 'flatbook' has no attribute 'flatness'"):
        _ = flatbook.flatness
    with pytest.raises(ImportError):
        importlib.import_module("flatbook.flatness")


def test_version_is_that_of_the_distribution():
    from importlib.metadata import version

    assert flatbook.__version__ == version("flatbook")


# Layers


def imported(path):
    """Yield the modules of this package that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            if first == "flatbook" and rest:
                yield rest[0]


def test_every_module_has_its_place():
    assert {module.split(".")[0] for module in MODULES} <= set(ORDER)
    assert len(set(ORDER)) == len(ORDER)


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module):
    path = PACKAGE.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    layer = module.split(".")[0]
    for name in imported(path):
        if name not in ORDER:  # such as flatbook.__version__
            assert not (PACKAGE / f"{name}.py").exists()
            continue
        inside = name == layer and "." in module  # a part of a folder and the folder's own page
        assert inside or ORDER.index(name) < ORDER.index(layer), f"{module} imports {name}"


# Docstrings


def public(module):
    """Yield the public functions and classes that a module defines, and their public methods."""
    for name, thing in vars(module).items():
        if name.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(thing) or inspect.isclass(thing):
            yield name, thing
        if inspect.isclass(thing):
            for inner, method in vars(thing).items():
                method = getattr(method, "fget", method)
                if inspect.isfunction(method) and not inner.startswith("_"):
                    yield f"{name}.{inner}", method


def documented(module):
    module = importlib.import_module(f"flatbook.{module}")
    assert module.__doc__
    return dict(public(module))


@pytest.mark.parametrize("module", MODULES)
def test_everything_public_is_documented(module):
    names = documented(module)
    without = [name for name, thing in names.items() if not inspect.getdoc(thing)]
    assert not without


FACE = [
    *(name for names in flatbook._NAMES.values() for name in names),
    "results.Run",
    "results.Summary",
    "results.summarise",
    "results.paired_difference",
    "results.record",
    "experiments.execute",
    "experiments.get",
    "units.units",
    "plotting.use_style",
    "plotting.darken",
    "plotting.band",
    "plotting.dots_with_interval",
    "plotting.landscape",
    "plotting.save",
]


@pytest.mark.parametrize("name", FACE)
def test_the_face_of_the_package_is_a_page_of_the_book(name):
    thing = flatbook
    for part in name.split("."):
        thing = getattr(thing, part)
    page = inspect.getdoc(thing)
    if inspect.isclass(thing):
        # A subclass need not repeat what the page of its base says.
        bases = [base for base in thing.__mro__ if base.__module__.startswith("flatbook")]
        page = "\n".join(inspect.getdoc(base) for base in bases)
        parameters = inspect.signature(thing).parameters
        assert "Args:" in page or "Attributes:" in page
    else:
        signature = inspect.signature(thing)
        parameters = signature.parameters
        if parameters:
            assert "Args:" in page or len(parameters) == 1
        gives = signature.return_annotation not in (inspect.Signature.empty, None, "None")
        if gives:
            assert "Returns:" in page or "Yields:" in page or "eturn" in page.splitlines()[0]
    for parameter in parameters:
        assert parameter in page, f"{name} says nothing of {parameter}"
