"""Checks at the door: each refuses bad input in one sentence and returns what it learnt.

Every message names the argument, what came and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # torch loads with the first tensor, so that the command line stays quick
    from torch import Tensor, nn

T = TypeVar("T")


def shown(value: object) -> str:
    """Return what Python calls a value, on one line: arrays have several."""
    return " ".join(repr(value).splitlines())


def choice(name: str, value: object, allowed: Collection[str]) -> str:
    """Return ``value`` if it is one of ``allowed``; else name the nearest."""
    if isinstance(value, str) and value in allowed:
        return value
    spelt = {option.lower(): option for option in allowed}
    near = get_close_matches(str(value).lower(), spelt, n=1)
    hint = f" Did you mean {spelt[near[0]]!r}?" if near else ""
    raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {shown(value)}.{hint}")


def flag(name: str, value: bool) -> bool:
    """Return ``value`` if it is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False; got {shown(value)}.")
    return value


def positive(name: str, value: float) -> float:
    """Return ``value`` as a float if it is finite and above zero."""
    return _number(name, value, "a finite number above 0", lambda v: v > 0)


def non_negative(name: str, value: float) -> float:
    """Return ``value`` as a float if it is finite and not below zero."""
    return _number(name, value, "a finite number of at least 0", lambda v: v >= 0)


def finite(name: str, value: float) -> float:
    """Return ``value`` as a float if it is finite."""
    return _number(name, value, "a finite number", lambda v: True)


def fraction(name: str, value: float) -> float:
    """Return ``value`` as a float if it lies in [0, 1]."""
    return _number(name, value, "a number in [0, 1]", lambda v: 0 <= v <= 1)


def _number(name, value, allowed, holds) -> float:
    try:
        number = (
            float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
        )
    except OverflowError:  # an int beyond the largest float
        number = math.nan
    if not (math.isfinite(number) and holds(number)):
        raise ValueError(f"{name} must be {allowed}; got {shown(value)}.")
    return number


def count(name: str, value: int, *, at_least: int = 1, at_most: int | None = None) -> int:
    """Return ``value`` as an int if it is a whole number in ``at_least`` to ``at_most``."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or value < at_least or (at_most is not None and value > at_most):
        allowed = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise ValueError(f"{name} must be a whole number {allowed}; got {shown(value)}.")
    return int(value)


def instance(name: str, value: object, kind: type[T], made_by: str) -> T:
    """Check that ``value`` is of a class of the package, which ``made_by`` returns."""
    if not isinstance(value, kind):
        raise ValueError(
            f"{name} must be what {made_by} returns, {kind.__name__}; got {type(value).__name__}."
        )
    return value


def words(name: str, value: object, allowed: Collection[str]) -> list[str]:
    """Check that ``value`` is a list of some of ``allowed``, without repetition."""
    if not isinstance(value, list | tuple):
        raise ValueError(
            f"{name} must be a list of {', '.join(allowed)}; got {type(value).__name__}."
        )
    found = [choice(name, word, allowed) for word in value]
    if len(set(found)) < len(found):
        raise ValueError(f"{name} must not repeat itself; got {', '.join(found)}.")
    return found


def module(name: str, value: object) -> nn.Module:
    """Return ``value`` if it is a torch module."""
    from torch import nn

    if not isinstance(value, nn.Module):
        got = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise ValueError(f"{name} must be a torch module; got {got}.")
    return value


def tensor(name: str, value, shape: Sequence[str | int | None], *, floating: bool = True) -> Tensor:
    """Return ``value`` as a finite tensor whose shape fits ``shape``.

    Accepts NumPy arrays. In ``shape`` an int fixes a dimension; a word or None leaves it free
    and names it in the message. ``(..., )``-like open shapes are not supported: check by hand.
    """
    import numpy as np
    import torch

    described = (
        f"an array of {value.dtype}, which torch lacks" if isinstance(value, np.ndarray) else None
    )
    try:
        if isinstance(value, np.ndarray):  # torch takes neither reversed nor read-only arrays
            value = np.require(value, requirements=("C", "W"))
        value = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = described or type(value).__name__
        raise ValueError(f"{name} must be a tensor or array of numbers; got {kind}.") from error
    fits = value.ndim == len(shape) and all(
        want == got for want, got in zip(shape, value.shape, strict=True) if isinstance(want, int)
    )
    if not fits:
        words = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} must have shape ({words}); got {tuple(value.shape)}.")
    if value.numel() == 0:
        raise ValueError(f"{name} must not be empty; got shape {tuple(value.shape)}.")
    if floating and not value.is_floating_point():
        raise ValueError(f"{name} must hold floating-point numbers; got {value.dtype}.")
    # Infs and nans survive a sum, which is read ten times faster than each number is tested;
    # finite numbers may overflow it, so then they are.
    if floating and not value.sum().isfinite() and not value.isfinite().all():
        raise ValueError(f"{name} must be finite; got inf or nan.")
    return value


def labels(name: str, value, classes: int, *, samples: int | None = None) -> Tensor:
    """Return ``value`` as int64 class labels in [0, ``classes``), shape ``(samples,)``."""
    import torch

    value = tensor(name, value, (samples if samples is not None else "samples",), floating=False)
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise ValueError(f"{name} must hold whole numbers; got {value.dtype}.")
    value = value.long()
    low, high = int(value.min()), int(value.max())
    if low < 0 or high >= classes:
        raise ValueError(
            f"{name} must lie in 0..{classes - 1}, one label per sample; got {low}..{high}."
        )
    return value
