"""Format the code cells of the chapters with ruff, or check that they are formatted."""

import argparse
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only report")
    check = parser.parse_args().check
    changed = [
        p
        for p in sync_notebooks.chapters()
        if formatted(p.read_text("utf-8")) != p.read_text("utf-8")
    ]
    for path in changed:
        print(("would format " if check else "formatted ") + str(path))
        if not check:
            path.write_text(formatted(path.read_text("utf-8")), encoding="utf-8")
    if check and changed:
        sys.exit("run: make notebooks")


if __name__ == "__main__":
    main()
