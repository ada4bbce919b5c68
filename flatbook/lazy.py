"""Packages that import nothing until a name is used (PEP 562)."""

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def attach(
    package: str, names: Mapping[str, Iterable[str]], modules: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package.

    Args:
        package: Its ``__name__``.
        names: What each of its modules offers under the package's own name.
        modules: Further modules that can be had as attributes.

    Example:
        >>> get, listed, names = attach("flatbook", {"rates": ["roc"]}, ["checks"])
        >>> get("roc").__module__, get("checks").__name__, listed()
        ('flatbook.rates', 'flatbook.checks', ['checks', 'rates', 'roc'])
    """
    home = {name: module for module, offered in names.items() for name in offered}
    modules = (*names, *modules)
    offered = [*home, *modules]

    def get(name: str):
        if name in home:
            return getattr(importlib.import_module(f"{package}.{home[name]}"), name)
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, lambda: sorted(offered), offered
