"""Write the output-free .ipynb beside each chapter's .md, or check that it matches.

The .md is always the source, so an edit made there is never overwritten. The repository's
address, which stands in _config.yml, is carried into the set-up cells first.
"""

import argparse
import re
import sys
from pathlib import Path

import jupytext
import nbformat
import yaml

ROOT = Path(__file__).resolve().parents[1]
ADDRESS = re.compile(r'^REPOSITORY = ".*"$', re.MULTILINE)


def chapters() -> list[Path]:
    """Return every MyST notebook of the book."""
    return sorted(
        path
        for path in (ROOT / "book").rglob("*.md")
        if path.read_text(encoding="utf-8").startswith("---\njupytext:")
    )


def address() -> str:
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    return config["repository"]["url"]


def with_address(text: str) -> str:
    return ADDRESS.sub(f'REPOSITORY = "{address()}"', text)


def notebook(text: str, stem: str) -> str:
    """Return the .ipynb of a chapter's MyST text, the same each time."""
    book = jupytext.reads(text, fmt="md:myst")
    for number, cell in enumerate(book.cells):
        cell["id"] = f"{stem}-{number:03d}"
    book.metadata.pop("jupytext", None)
    book.metadata["language_info"] = {"name": "python"}
    book.nbformat, book.nbformat_minor = 4, 5
    nbformat.validate(book)
    return nbformat.writes(book) + "\n"


def stale() -> dict[Path, str]:
    """Return the files whose content should be another, with that content."""
    wanted = {}
    for path in chapters():
        text = with_address(path.read_text(encoding="utf-8"))
        wanted[path] = text
        wanted[path.with_suffix(".ipynb")] = notebook(text, path.stem)
    return {
        path: text
        for path, text in wanted.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }


def settle(changed: dict[Path, str], *, verb: str) -> None:
    """Write files that should have another content or, asked by ``--check``, refuse them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true", help="only report what is out of step")
    check = parser.parse_args().check
    for path, text in changed.items():
        print(f"not {verb}: {path}" if check else f"{verb} {path}")
        if not check:
            path.write_text(text, encoding="utf-8")
    if check and changed:
        sys.exit("run: make notebooks")


if __name__ == "__main__":
    settle(stale(), verb="wrote")
