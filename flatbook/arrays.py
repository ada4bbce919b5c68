"""Arrays at the door of attacks and audits: lists, NumPy arrays or tensors in, NumPy inside."""

import numpy as np
import torch
from torch import Tensor

from flatbook import checks


def checked_design(design, models, points, *, least=1, sides=("in", "out")) -> np.ndarray:
    """Return a design as booleans in which each point has ``least`` models on each side."""
    included = flags_array("design", design, (models, points))
    for side in sides:
        counts = (included if side == "in" else ~included).sum(axis=0)
        if counts.min() < least:
            raise ValueError(
                f"design must have at least {least} model{'s' * (least > 1)} {side} for each "
                f"point; got {counts.min()} for point {counts.argmin()} (in: trained on it, out: "
                "not)."
            )
    return included


def as_array(name, value, shape) -> np.ndarray:
    """Return finite real numbers as an array of float32 or float64 of a given shape."""
    value = checks.tensor(name, listed(name, value), shape, floating=False).detach().cpu()
    if value.is_complex():
        raise ValueError(f"{name} must be real; got {value.dtype}.")
    if not value.is_floating_point():
        value = value.double()
    elif value.dtype not in (torch.float32, torch.float64):
        value = value.float()
    if not value.sum().isfinite() and not value.isfinite().all():
        raise ValueError(f"{name} must be finite; got inf or nan.")
    return value.numpy()


def listed(name, value):
    """Make an array of a list, whose floats torch would round to float32."""
    try:
        return np.asarray(value) if isinstance(value, list | tuple) else value
    except ValueError as error:
        raise ValueError(
            f"{name} must be a tensor or array of numbers; got ragged rows."
        ) from error


def signal_array(name, value, shape, *, queries=False) -> np.ndarray:
    """Return finite numbers of a given shape, with an axis of queries too where that may be."""
    if queries and np.ndim(listed(name, value)) == len(shape) + 1:
        shape = (*shape, "queries")
    return as_array(name, value, shape)


def confidence_array(name, value, shape, *, queries=False) -> np.ndarray:
    """Return probabilities of a given shape, with an axis of queries too where that may be."""
    value = signal_array(name, value, shape, queries=queries)
    if value.min() < 0 or value.max() > 1:
        raise ValueError(
            f"{name} must lie in [0, 1]; got {value.min():.4g} to {value.max():.4g}. "
            "Take flatbook.membership.confidence of logits."
        )
    return value


def flags_array(name, value, shape) -> np.ndarray:
    """Return booleans, or ones and zeros, as booleans of a given shape."""
    value = checks.tensor(name, listed(name, value), shape, floating=False).detach().cpu()
    if value.dtype != torch.bool:
        flags = value != 0
        if not (flags == value).all():
            raise ValueError(f"{name} must hold True and False, or 1 and 0; got other numbers.")
        value = flags
    return value.numpy()


def whole(name, value, shape) -> np.ndarray:
    """Return whole numbers, such as labels, as an array of int64."""
    value = checks.tensor(name, listed(name, value), shape, floating=False)
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise ValueError(f"{name} must hold whole numbers; got {value.dtype}.")
    return value.cpu().numpy().astype(np.int64)


def query_mean(value, *, axes) -> np.ndarray:
    """Average over queries, the axis beyond the first ``axes``, if there is one."""
    return value.mean(axis=-1, dtype=np.float64) if value.ndim > axes else value


def returned(result, *given):
    """Return an array as a tensor if any input was one."""
    return torch.from_numpy(result) if any(isinstance(g, Tensor) for g in given) else result
