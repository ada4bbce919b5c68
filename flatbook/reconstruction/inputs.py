"""What comes in, in float64 and on its own device; what goes out, as it came."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatbook import checks


class Kind(NamedTuple):
    """How an argument came, so that results can go back the same way."""

    array: bool
    dtype: torch.dtype
    device: torch.device

    @property
    def eps(self) -> float:
        """The unit roundoff of the precision in which the numbers came."""
        return torch.finfo(self.dtype).eps

    def back(self, value: Tensor):
        """Return a result in the precision, on the device and of the type of the argument."""
        value = value.to(self.device, self.dtype)
        return value.numpy() if self.array else value


def real(name: str, value, shape, *, like: Tensor | None = None) -> tuple[Tensor, Kind]:
    """Return finite real numbers in float64, and how they came.

    Lists count as NumPy arrays, whole numbers as float64. Apple's MPS has no float64, so what
    comes from there is computed on the CPU.
    """
    array = not isinstance(value, Tensor)
    if array and not hasattr(value, "dtype"):
        try:
            value = np.asarray(value)  # Python's numbers are doubles, which torch would round
        except ValueError:  # rows of different lengths
            value = np.asarray(value, dtype=object)
    given = checks.tensor(name, value, shape, floating=False).detach()
    if given.is_complex() or given.dtype == torch.bool:
        raise ValueError(f"{name} must hold real numbers; got {given.dtype}.")
    dtype = given.dtype if given.is_floating_point() else torch.float64
    kind = Kind(array, dtype, given.device)
    device = given.device if given.device.type != "mps" else torch.device("cpu")
    device = device if like is None else like.device
    return checks.tensor(name, given.to(device).double(), shape), kind


def network(W, a) -> tuple[Tensor, Tensor, Kind]:
    """Return the weights of a two-layer network in float64, and how they came."""
    W, kind = real("W", W, ("neurons", "inputs"))
    a, _ = real("a", a, (len(W),), like=W)
    return W, a, kind


def weights_norm(*parts: Tensor, name: str = "W and a") -> float:
    """Return the norm of all weights together, by which residuals are measured."""
    size = float(sum(part.square().sum() for part in parts)) ** 0.5
    if size == 0:
        raise ValueError(f"{name} must not all be 0; got zeros only.")
    return size


def in_span(W: Tensor, X: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return W in coordinates of the span of the rows of X, those of X, and what W has outside.

    Gradients at samples X lie in their span.
    """
    frame, coordinates = torch.linalg.qr(X.T)
    inside = W @ frame
    return inside, coordinates, float((W - inside @ frame.T).norm())


def signs(name: str, value, samples: int, *, like: Tensor) -> Tensor:
    """Return labels of −1 and 1 in float64."""
    value, _ = real(name, value, (samples,), like=like)
    if not (value.abs() == 1).all():
        raise ValueError(f"{name} must hold -1 and 1 only; got {value[value.abs() != 1][0]:g}.")
    return value


def degree(value, *, at_least: int = 2) -> int:
    """Return the degree of the activation."""
    return checks.count("degree", value, at_least=at_least)
