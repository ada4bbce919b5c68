"""What every chapter's hidden set-up cell calls."""

from typing import Any

from flatbook import plotting, runtime


def setup() -> runtime.Scale:
    """Set the book's figure style and return the scale the chapter runs at."""
    plotting.use_style()
    return runtime.scale()


def glue(name: str, value: Any) -> None:
    """Keep a number of the run under a name, so that prose can print it.

    Outside the book's build, where MyST-NB may not be installed, the value is only printed.
    """
    try:
        from myst_nb import glue as keep
    except ImportError:
        print(f"{name} = {value}")
        return
    # A NumPy or torch scalar would be kept as its repr, which formats cannot read.
    keep(name, value.item() if hasattr(value, "item") else value, display=False)
