"""The book's integrity: pairs in step, claims checked, figures described, exercises solved."""

import ast
import json
import re
import sys
from pathlib import Path

import jupytext
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
BOOK = ROOT / "book"
sys.path.insert(0, str(ROOT / "scripts"))

import sync_notebooks  # noqa: E402

CHAPTERS = sync_notebooks.chapters()
LESSONS = [path for path in CHAPTERS if path.parent != BOOK]
NAMES = [path.relative_to(BOOK).with_suffix("").as_posix() for path in CHAPTERS]
LEDGER = yaml.safe_load((BOOK / "claims.yml").read_text(encoding="utf-8"))
VERDICTS = {
    "holds",
    "holds after correction",
    "fails",
    "reproduced",
    "not reproduced",
    "open",
}


def cells(path):
    return jupytext.read(path).cells


def code(path):
    return [cell for cell in cells(path) if cell.cell_type == "code"]


def tags(cell):
    return cell.metadata.get("tags", [])


each_chapter = pytest.mark.parametrize("path", CHAPTERS, ids=NAMES)
each_lesson = pytest.mark.parametrize(
    "path", LESSONS, ids=[p.relative_to(BOOK).as_posix() for p in LESSONS]
)


def test_there_are_chapters():
    assert {"index", "flatness/hessian", "flatness/invariance", "flatness/optimizers"} <= set(NAMES)


def test_every_notebook_is_in_step_with_its_source():
    assert not [str(path) for path in sync_notebooks.stale()]


def test_an_edit_of_the_source_is_noticed(tmp_path):
    path = CHAPTERS[0]
    edited = path.read_text(encoding="utf-8") + "\nAn edit.\n"
    assert sync_notebooks.notebook(edited, path.stem) != path.with_suffix(".ipynb").read_text(
        encoding="utf-8"
    )


@each_chapter
def test_notebook_holds_the_same_cells_and_no_output(path):
    pair = json.loads(path.with_suffix(".ipynb").read_text(encoding="utf-8"))
    assert ["".join(c["source"]) for c in pair["cells"]] == [c.source for c in cells(path)]
    assert not any(c.get("outputs") or c.get("execution_count") for c in pair["cells"])


@each_chapter
def test_chapter_opens_with_the_hidden_set_up_cell(path):
    first = code(path)[0]
    assert "remove-cell" in tags(first)
    assert first.source == code(CHAPTERS[0])[0].source
    assert f'REPOSITORY = "{sync_notebooks.address()}"' in first.source


def test_the_address_stands_in_one_place():
    config = (ROOT / "_config.yml").read_text(encoding="utf-8")
    assert config.count(sync_notebooks.address()) == 1


def test_set_up_cell_clones_and_installs_where_the_package_is_missing(monkeypatch):
    source = code(CHAPTERS[0])[0].source
    commands = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("subprocess.run", lambda command, check: commands.append(command))
    monkeypatch.setattr(sys, "path", list(sys.path))
    exec(compile(source, "set-up", "exec"), {})
    clone, install = commands
    assert clone[:2] == ["git", "clone"]
    assert sync_notebooks.address() in clone
    assert install[1:4] == ["-m", "pip", "install"]


def test_table_of_contents_names_sources_and_misses_none():
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    listed = [toc["root"]] + [c["file"] for part in toc["parts"] for c in part["chapters"]]
    assert all(name.endswith(".md") and (ROOT / name).exists() for name in listed)
    assert set(listed) == {p.relative_to(ROOT).as_posix() for p in BOOK.rglob("*.md")}


@pytest.mark.parametrize("claim", LEDGER, ids=[c["id"] for c in LEDGER])
def test_claim_is_complete_and_checked_by_one_cell_with_an_assert(claim):
    assert set(claim) == {"id", "source", "statement", "verdict", "chapter"}
    assert claim["verdict"] in VERDICTS
    tag = f"claim-{claim['id']}"
    found = [(path, cell) for path in CHAPTERS for cell in code(path) if tag in tags(cell)]
    assert len(found) == 1
    path, cell = found[0]
    assert path == BOOK / f"{claim['chapter']}.md"
    assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(cell.source)))
    assert path.read_text(encoding="utf-8").count(f"```{{claim}} {claim['id']}\n") == 1


def test_claims_are_unique_and_every_claim_tag_is_in_the_ledger():
    ids = [claim["id"] for claim in LEDGER]
    assert len(ids) == len(set(ids))
    used = {t for path in CHAPTERS for c in code(path) for t in tags(c) if t.startswith("claim-")}
    assert used == {f"claim-{name}" for name in ids}


@each_chapter
def test_every_figure_has_alt_text_and_a_caption_that_states_a_finding(path):
    text = path.read_text(encoding="utf-8")
    solutions = "".join(re.findall(r"\{solution-start\}.*?\{solution-end\}", text, re.S))
    for cell in code(path):
        if "plt.show()" not in cell.source:
            continue
        shown = cell.metadata.get("mystnb", {})
        assert len(shown["image"]["alt"].split()) >= 8, cell.source[:80]
        assert "title(" not in cell.source
        if cell.source not in solutions:
            assert shown["figure"]["caption"].startswith("**"), cell.source[:80]
            assert shown["figure"]["name"].startswith("fig-")


@each_lesson
def test_chapter_closes_with_summary_solved_exercises_and_references(path):
    text = path.read_text(encoding="utf-8")
    for heading in ("## Summary", "## Exercises", "## References"):
        assert heading in text
    exercises = re.findall(r"\{exercise-start\}.*\n:label: (\S+)", text)
    assert len(exercises) >= 3
    assert exercises == re.findall(r"\{solution-start\} (\S+)\n:class: dropdown", text)
    for body in re.findall(r"\{solution-start\}.*?\{solution-end\}", text, re.S):
        assert re.search(r"\{code-cell\}.*?\bassert\b", body, re.S), body[:60]


@each_lesson
def test_shown_cells_are_short(path):
    for cell in code(path):
        if not {"hide-input", "remove-cell"} & set(tags(cell)):
            assert len(cell.source.splitlines()) <= 40, cell.source[:80]


@each_chapter
def test_tables_write_norms_so_that_markdown_keeps_them(path):
    rows = [r for r in path.read_text(encoding="utf-8").splitlines() if r.startswith("|")]
    assert not [row for row in rows if r"\|" in row], r"a table reads \| as |: write \lVert"


@each_chapter
def test_prose_quotes_every_glued_number(path):
    text = path.read_text(encoding="utf-8")
    made = set(re.findall(r'^glue\(\s*"([^"]+)"', text, re.M))
    used = set(re.findall(r"\{glue:text\}`([^`:]+)", text))
    assert used <= made
    assert made <= used, "glued and never printed"
