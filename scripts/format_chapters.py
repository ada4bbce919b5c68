"""Format the code cells of the chapters with ruff, or check that they are formatted."""

import re
import subprocess
import sys
from pathlib import Path

import sync_notebooks

CELL = re.compile(
    r"(?P<head>^```\{code-cell\}[^\n]*\n(?:---\n.*?\n---\n|(?::[^\n]*\n)*)\n?)(?P<code>.*?)(?P<end>^```$)",
    re.MULTILINE | re.DOTALL,
)
RUFF = [Path(sys.executable).with_name("ruff"), "format", "--line-length", "80", "-"]


def formatted(text: str) -> str:
    def cell(match: re.Match) -> str:
        done = subprocess.run(
            RUFF, input=match["code"], capture_output=True, text=True, check=True
        ).stdout
        return match["head"] + done + match["end"]

    return CELL.sub(cell, text)


def unformatted() -> dict[Path, str]:
    """Return the chapters that ruff would write differently, with what it would write."""
    texts = {path: path.read_text(encoding="utf-8") for path in sync_notebooks.chapters()}
    done = {path: formatted(text) for path, text in texts.items()}
    return {path: text for path, text in done.items() if text != texts[path]}


if __name__ == "__main__":
    sync_notebooks.settle(unformatted(), verb="formatted")
