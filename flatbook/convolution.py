"""Spectral norms of matrices and zero-padded convolutions, rounded up."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

_EPS = torch.finfo(torch.float64).eps
_MOST_ORDER, _MOST_NUMBERS = 512, 2**22  # up to here a convolution is written out as a matrix


def largest_singular_value(matrices: Tensor) -> float:
    """Bound the largest singular value of any of the matrices, shape ``(..., rows, columns)``.

    It comes from the smaller Gram matrix, which float64 forms and solves with an error below
    rows · columns · eps of its largest eigenvalue.
    """
    size = matrices.abs().max().item()
    if size == 0:
        return 0.0
    matrices = matrices / size  # squares must neither overflow nor vanish
    rows, columns = matrices.shape[-2:]
    adjoint = matrices.mH
    gram = matrices @ adjoint if rows <= columns else adjoint @ matrices
    largest = torch.linalg.eigvalsh(gram)[..., -1].max().item()
    return size * math.sqrt(largest) * (1 + (rows * columns + 8) * _EPS)


class Axis(NamedTuple):
    """A convolution along one axis: output h sees pixels h * stride + tap * step - padding."""

    size: int
    out: int
    taps: int
    stride: int
    step: int
    padding: int

    @classmethod
    def of(cls, layer: nn.Conv2d, axis: int, x_shape, y_shape) -> "Axis":
        taps, step, padding = layer.kernel_size[axis], layer.dilation[axis], layer.padding
        if isinstance(padding, str):
            padding = step * (taps - 1) // 2 if padding == "same" else 0
        else:
            padding = padding[axis]
        if taps == 1:  # one matrix at every pixel it sees, so that one is enough
            return cls(1, 1, 1, 1, 1, 0)
        size, out = x_shape[axis + 2], y_shape[axis + 2]
        return cls(size, out, taps, layer.stride[axis], step, padding)

    def places(self) -> Tensor:
        """Return which pixel each output sees through each tap, shape ``(taps, out, size)``."""
        seen = torch.arange(self.out) * self.stride - self.padding
        seen = seen + torch.arange(self.taps)[:, None] * self.step
        return (seen[..., None] == torch.arange(self.size)).double()

    def waves(self) -> Tensor:
        """Return the Fourier coefficients of the taps, shape ``(stride, frequencies, taps)``.

        The first axis holds the frequencies that are one on the grid of the outputs.
        """
        # What sticks out on either side must fall on zeros, and outputs on places of their own.
        last = (self.out - 1) * self.stride
        beyond = last + (self.taps - 1) * self.step - self.padding - (self.size - 1)
        grid = max(self.size + max(self.padding, beyond), last + 1)
        stride = self.stride if self.out > 1 else grid  # a single output has no next one
        coarse = math.ceil(grid / stride)
        turns = torch.arange(coarse * stride, dtype=torch.float64) / (coarse * stride)
        angle = 2 * math.pi * turns[:, None] * torch.arange(self.taps) * self.step
        return torch.polar(torch.ones_like(angle), angle).view(stride, coarse, self.taps)


def convolution_norm(weight: Tensor, axes: list[Axis]) -> float:
    """Bound the spectral norm of a convolution, ``(groups, out, in, height, width)`` in float64.

    Exact up to rounding for small ones and for single taps. Otherwise the bound of
    Sedghi, Gupta & Long (2019) on the smallest grid where no output mixes two ends of the image.
    """
    inputs = weight.shape[2] * math.prod(axis.size for axis in axes)
    outputs = weight.shape[1] * math.prod(axis.out for axis in axes)
    if min(inputs, outputs) <= _MOST_ORDER and inputs * outputs <= _MOST_NUMBERS:
        rows, columns = (axis.places() for axis in axes)
        matrix = torch.einsum("goikl,lwy->goikwy", weight, columns)
        matrix = torch.einsum("goikwy,khx->gohwixy", matrix, rows)
        return largest_singular_value(matrix.reshape(-1, outputs, inputs))
    rows, columns = (axis.waves() for axis in axes)
    columns = columns[:, : columns.shape[1] // 2 + 1]  # the others are complex conjugates
    shrink = math.sqrt(len(rows) * len(columns))
    norm = 0.0
    for n in range(rows.shape[1]):  # a row of frequencies at a time, for memory
        partial = torch.einsum("goikl,ak->goial", weight.to(rows.dtype), rows[:, n])
        transfer = torch.einsum("goial,bfl->fgoiab", partial, columns).flatten(3)
        norm = max(norm, largest_singular_value(transfer / shrink))
    taps = math.prod(axis.taps * axis.step for axis in axes)
    return norm * (1 + 16 * taps**2 * _EPS)  # of the angles and sums
