"""Save the figure of the home page for the README, by running that page's cells."""

import os
from pathlib import Path

import jupytext
import matplotlib
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "book" / "_static" / "walk.svg"


def main() -> None:
    os.environ["FLATBOOK_PROGRESS"] = "0"
    matplotlib.use("agg")
    plt.show = lambda: plt.gcf().savefig(TARGET)
    scope: dict = {}
    for cell in jupytext.read(ROOT / "book" / "index.md").cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, "index.md", "exec"), scope)
    print(TARGET.relative_to(ROOT))


if __name__ == "__main__":
    main()
