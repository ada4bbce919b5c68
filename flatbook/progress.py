"""One progress bar for terminals, notebooks and logs."""

import importlib.util
import os
import sys

from tqdm.std import tqdm

from flatbook import checks


def bar(
    total: int, *, label: str, unit: str = "it", done: int = 0, show: bool | None = None
) -> tqdm:
    """Return a tqdm bar: a widget in a notebook that has them, text elsewhere, else silence.

    Args:
        total: How many units there are.
        label: What is being done.
        unit: What is counted.
        done: How many units were done before, and take no time now.
        show: None shows the bar in notebooks and where stderr is a terminal, unless
            ``FLATBOOK_PROGRESS`` is 0. True and False are obeyed.

    Raises:
        ValueError: If ``show``, which callers take as ``progress``, is none of these.

    Example:
        >>> with bar(3, label="stirring", show=False) as steps:
        ...     steps.update(3)
        >>> steps.disable
        True
    """
    kind = tqdm
    if _in_notebook() and importlib.util.find_spec("ipywidgets"):
        from tqdm.notebook import tqdm as kind  # needs ipywidgets, and complains without
    shown = wanted() if show is None else checks.flag("progress", show)
    return kind(total=total, initial=done, desc=label, unit=unit, disable=not shown)


def wanted() -> bool:
    """Return whether bars show by default: someone is likely to look and has not declined."""
    if os.environ.get("FLATBOOK_PROGRESS") == "0":
        return False
    return _in_notebook() or sys.stderr.isatty()


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")  # if we are in one, it is loaded
    shell = ipython.get_ipython() if ipython else None
    return type(shell).__name__ == "ZMQInteractiveShell"
