"""Systems with the Gram matrix of a polynomial kernel, which may be large or singular."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.linalg import blas, lapack
from torch import Tensor

from flatbook.runtime import generator

_BLOCK, _STEPS = 8, 3  # of the Krylov spaces behind a condition number

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Fitted:
    """A map fitted to values through a Gram matrix.

    Attributes:
        coefficients: What the system was solved for, a row for each kernel or monomial.
        points: Where the kernels sit; None for monomials. Shape ``(points, variables)``.
        power: Degree of the map.
        rank: Measured rank of the Gram matrix.
        needed: The rank that determines the map.
        condition: Largest over needed-th eigenvalue of the Gram matrix, perhaps estimated; infinite
            where there are fewer.
    """

    coefficients: Tensor
    points: Tensor | None
    power: int
    rank: int
    needed: int
    condition: float

    @property
    def determined(self) -> bool:
        """Whether the values determine the map."""
        return self.rank == self.needed


def solve_gram(
    rows: Tensor, power: int, target: Tensor, eps: float, needed: int
) -> tuple[Tensor, int, float]:
    r"""Solve a system with the matrix of all inner products of rows, each to a power.

    By Cholesky's factors where they exist and are good enough; else by the eigenvalues.

    Args:
        rows: Shape ``(rows, variables)``.
        power: Exponent of the inner products.
        target: Right-hand sides. Shape ``(rows, columns)``.
        eps: Unit roundoff of the numbers; eigenvalues below it, times the size, count as 0.
        needed: Which eigenvalue to compare with the largest.

    Returns:
        The solution, the least one if there are many, the rank, and the largest over the
        ``needed``-th eigenvalue, estimated; infinite where there are fewer.
    """
    size = len(rows)
    factor = _lapack if rows.device.type == "cpu" else _torch
    solve, top = factor(rows, power)
    if solve is not None:
        condition = top * largest_eigenvalue(solve, size, rows)
        if condition * size * eps < 1:
            return solve(target), size, condition if size >= needed else math.inf
    return pseudo_solve((rows @ rows.T).pow_(power), target, size * eps, needed)


def _lapack(rows: Tensor, power: int) -> tuple[Map | None, float]:
    """Factor half of the matrix in place, in half of the time that torch takes, which copies it."""
    gram = blas.dsyrk(1.0, rows.numpy().T, trans=1, lower=1)
    if power != 1:
        gram **= power
    size = len(gram)
    top = largest_eigenvalue(
        lambda v: torch.from_numpy(blas.dsymm(1.0, gram, v.numpy(), lower=1)), size, rows
    )
    factor, failed = lapack.dpotrf(gram, lower=1, clean=0, overwrite_a=1)
    if failed:
        return None, top
    return lambda v: torch.from_numpy(lapack.dpotrs(factor, v.numpy(), lower=1)[0]), top


def _torch(rows: Tensor, power: int) -> tuple[Map | None, float]:
    gram = (rows @ rows.T).pow_(power)
    top = largest_eigenvalue(lambda v: gram @ v, len(gram), rows)
    factor, failed = torch.linalg.cholesky_ex(gram)
    return (None if failed else lambda v: torch.cholesky_solve(v, factor)), top


def pseudo_solve(
    gram: Tensor, target: Tensor, tolerance: float, needed: int
) -> tuple[Tensor, int, float]:
    """Solve a system that may be singular.

    Returns:
        The least solution, the rank, and the largest over the ``needed``-th eigenvalue.
    """
    values, vectors = torch.linalg.eigh(gram)
    kept = values > tolerance * values[-1]
    solved = vectors[:, kept] @ ((vectors[:, kept].T @ target) / values[kept, None])
    last = float(values[-needed]) if needed <= len(values) else 0.0
    condition = float(values[-1]) / last if last > 0 else math.inf
    return solved, int(kept.sum()), condition


def largest_eigenvalue(apply: Callable[[Tensor], Tensor], size: int, like: Tensor) -> float:
    """Estimate the largest eigenvalue of a positive semidefinite map, from below.

    A few block Krylov steps: a block costs little more than a vector, since the matrix behind the
    map has to be read once for either.
    """
    block = torch.randn(size, _BLOCK, generator=generator(0), dtype=torch.float64).to(like)
    basis, images = torch.zeros(size, 0).to(like), []
    for _ in range(_STEPS):
        for _ in range(2):  # the second pass removes what rounding left of the first
            block = block - basis @ (basis.T @ block)
        block, triangle = torch.linalg.qr(block)
        heights = triangle.diagonal().abs()
        block = block[:, heights > 1e-10 * heights.max()][:, : size - basis.shape[1]]
        if block.shape[1] == 0:
            break
        basis = torch.cat([basis, block], dim=1)
        images.append(apply(block))
        block = images[-1]
    matrix = basis.T @ torch.cat(images, dim=1)
    return float(torch.linalg.eigvalsh((matrix + matrix.T) / 2)[-1])
