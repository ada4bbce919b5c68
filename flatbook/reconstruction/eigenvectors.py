"""Z-eigenvectors of the tensor of the data: the directions that neurons can have."""

from typing import NamedTuple

import torch
from torch import Tensor

from flatbook import checks
from flatbook.reconstruction.inputs import degree as checked_degree
from flatbook.reconstruction.inputs import real
from flatbook.reconstruction.kkt import contracted
from flatbook.runtime import generator


class ZEigenvalues(NamedTuple):
    """What the unit vectors along given rows are to a tensor.

    Attributes:
        values: :math:`\\mu = \\langle u, f(u) \\rangle`. Shape ``(points,)``.
        residuals: :math:`\\|f(u) - \\mu u\\|`, 0 for a Z-eigenvector. Shape ``(points,)``.
    """

    values: Tensor
    residuals: Tensor


def z_eigenvalues(X, b, w, *, degree: int = 3) -> ZEigenvalues:
    r"""Check which directions are Z-eigenvectors of the tensor of the data.

    A unit vector u is a **Z-eigenvector** of T with Z-eigenvalue μ if :math:`f(u) = \mu u`. At a
    KKT point the direction of each neuron is one, and
    :math:`\mu = \|w\|^{2-\alpha} / (\alpha a)`: the weights give away the values of f.

    Args:
        X: Samples. Shape ``(samples, inputs)``.
        b: Their signed multipliers. Shape ``(samples,)``.
        w: Vectors other than 0, of any length. Shape ``(points, inputs)``.
        degree: α, from 2.

    Returns:
        Values and residuals, a number for each row.

    Raises:
        ValueError: If shapes disagree, a number is not finite, or a row is 0.

    Reference:
        Qi (2005). Eigenvalues of a real supersymmetric tensor. Journal of Symbolic Computation.

    Example:
        The axes and, since the weights are equal, the diagonal: :math:`f = (1, 1)/2`.

        >>> X, b = [[1.0, 0.0], [0.0, 1.0]], [1.0, 1.0]
        >>> found = z_eigenvalues(X, b, [[1.0, 0.0], [2.0, 2.0], [1.0, 2.0]])
        >>> found.values.round(4)
        array([1.    , 0.7071, 0.805 ])
        >>> found.residuals.round(4)
        array([0.    , 0.    , 0.1789])
    """
    X, kind = real("X", X, ("samples", "inputs"))
    b, _ = real("b", b, (len(X),), like=X)
    w, _ = real("w", w, ("points", X.shape[1]), like=X)
    norms = w.norm(dim=1, keepdim=True)
    if not norms.all():
        raise ValueError(
            f"w must have no row of zeros, which has no direction; row "
            f"{int((norms[:, 0] == 0).int().argmax())} is one."
        )
    u = w / norms
    f = contracted(X, b, u, checked_degree(degree))
    values = (u * f).sum(dim=1)
    residuals = (f - values[:, None] * u).norm(dim=1)
    return ZEigenvalues(kind.back(values), kind.back(residuals))


def find_z_eigenvectors(X, b, *, degree: int = 3, starts: int = 1000, seed: int = 0):
    r"""Search for the real Z-eigenvectors of the tensor of the data, by Newton's method.

    A KKT network has no neurons in other directions, and distinct ones are needed for `recover`,
    so at least :math:`N = \binom{s+\alpha-2}{\alpha-1}` of these vectors must exist. Over the
    complex numbers a generic tensor has :math:`((\alpha-1)^s - 1)/(\alpha-2)`, counting ±u once;
    how many are real depends on the data. The search starts from random points, so what it finds is
    a lower bound.

    The search runs in the span of the samples, outside which no eigenvalue but 0 lies.

    Args:
        X: Samples. Shape ``(samples, inputs)``.
        b: Their signed multipliers. Shape ``(samples,)``.
        degree: α, from 3.
        starts: Random points from which to start.
        seed: Of these.

    Returns:
        Unit vectors with Z-eigenvalues other than 0, one of each pair ±u. Shape
        ``(found, inputs)``.

    Raises:
        ValueError: If an argument is none of the above.

    Reference:
        Cartwright and Sturmfels (2013). The number of eigenvalues of a tensor. Linear Algebra and
        its Applications.

    Example:
        Orthonormal samples have one for each set of samples: 2² − 1.

        >>> find_z_eigenvectors([[1.0, 0.0], [0.0, 1.0]], [1.0, 1.0], starts=50).shape
        (3, 2)
    """
    X, kind = real("X", X, ("samples", "inputs"))
    b, _ = real("b", b, (len(X),), like=X)
    alpha = checked_degree(degree, at_least=3)
    starts = checks.count("starts", starts)
    _, values, rows = torch.linalg.svd(X, full_matrices=False)
    basis = rows[values > max(X.shape) * kind.eps * values[0]]
    found = _newton(X @ basis.T, b, alpha, starts, seed)
    return kind.back(found @ basis)


def _newton(X: Tensor, b: Tensor, alpha: int, starts: int, seed: int, steps: int = 60) -> Tensor:
    random = generator(seed)
    size = X.shape[1]
    u = torch.randn(starts, size, generator=random, dtype=torch.float64).to(X)
    u = u / u.norm(dim=1, keepdim=True)
    scale = float(b.abs() @ X.norm(dim=1).pow(alpha))
    mu = (u * contracted(X, b, u, alpha)).sum(dim=1)
    for _ in range(steps):
        # f(u) = μ u and uᵀu = 1, linearized
        slopes = (alpha - 1) * torch.einsum("si,ns,sk->nik", X, b * (u @ X.T).pow(alpha - 2), X)
        matrix = torch.zeros(len(u), size + 1, size + 1).to(X)
        matrix[:, :size, :size] = slopes - mu[:, None, None] * torch.eye(size).to(X)
        matrix[:, :size, size], matrix[:, size, :size] = -u, u
        gap = torch.cat([contracted(X, b, u, alpha) - mu[:, None] * u, 0 * mu[:, None]], dim=1)
        step, info = torch.linalg.solve_ex(matrix, gap)
        step[(info != 0) | ~step.isfinite().all(dim=1)] = 0
        u = u - step[:, :size]
        u = u / u.norm(dim=1, keepdim=True)
        mu = (u * contracted(X, b, u, alpha)).sum(dim=1)
    gap = (contracted(X, b, u, alpha) - mu[:, None] * u).norm(dim=1)
    kept = u[(gap < 1e-12 * scale) & (mu.abs() > 1e-9 * scale)]
    distinct = kept[:0]
    while len(kept):
        distinct = torch.cat([distinct, kept[:1]])
        kept = kept[(kept @ kept[0]).abs() < 1 - 1e-10]
    return distinct
