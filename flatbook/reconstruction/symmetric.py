r"""The symmetric tensor through the values that the weights give: fewer neurons will do.

Interpolation of f coordinate by coordinate, as in `flatbook.reconstruction.interpolation`, forgets
that f is a gradient: :math:`f = \nabla p / \alpha` with :math:`p(w) = T(w, \ldots, w)`. A
symmetric tensor has :math:`\binom{s+\alpha-1}{\alpha}` entries, and each neuron gives s equations
for them. As many neurons as that takes, some :math:`N (s + \alpha - 1) / (\alpha s)`, for α = 3 a
third of N, do determine it if their directions are generic, by a theorem of Alexander and
Hirschowitz (1995, Polynomial interpolation in several variables, Journal of Algebraic Geometry):
always but for (α, s) = (3, 5), (4, 3), (4, 4) and (4, 5), where one more is needed. The directions
of a KKT network are not generic. For the cubic one of orthonormal samples, T is determined if of
any three samples two share a neuron, which takes about half of N.

As a sum of kernels,

.. math::
    T = \sum_j \operatorname{sym}(\beta_j \otimes z_j^{\otimes (\alpha-1)}) , \qquad
    f(w) = \frac1\alpha \sum_j (z_j^\top w)^{\alpha-1} \beta_j
    + (\alpha-1) (z_j^\top w)^{\alpha-2} (\beta_j^\top w) \, z_j ,

whose Gram matrix has a block of size s for each pair of neurons.
"""

import math

import torch
from torch import Tensor

from flatbook.reconstruction.gram import Fitted, pseudo_solve


class SymmetricMap(Fitted):
    """The contraction of a symmetric tensor, of one degree more than the map, as kernels."""

    def values(self, w: Tensor) -> Tensor:
        """Return f at the rows of w, shape ``(rows, variables)``."""
        p, inner = self.power, w @ self.points.T
        own = inner.pow(p) @ self.coefficients
        others = (inner.pow(p - 1) * (w @ self.coefficients.T)) @ self.points
        return (own + p * others) / (p + 1)

    def slope(self, v: Tensor) -> Tensor:
        r"""Return the slice :math:`T(\cdot, \cdot, v, …)`."""
        p, inner = self.power, self.points @ v
        mixed = self.points.T @ (inner.pow(p - 1)[:, None] * self.coefficients)
        total = mixed + mixed.T
        if p > 1:
            weight = (p - 1) * inner.pow(p - 2) * (self.coefficients @ v)
            total = total + self.points.T @ (weight[:, None] * self.points)
        return total / (p + 1)


def fit_symmetric(points: Tensor, values: Tensor, power: int, eps: float) -> SymmetricMap:
    """Fit the contraction of a symmetric tensor to its values at unit vectors.

    Args:
        points: Unit rows in float64. Shape ``(points, variables)``.
        values: The map there. Shape ``(points, variables)``.
        power: α − 1, from 1.
        eps: Unit roundoff of the numbers; eigenvalues below it, times the size, count as 0.

    Returns:
        The map: the one, the best or, with too few points, the least that fits.
    """
    count, size = points.shape
    needed = math.comb(size + power, power + 1)
    inner = points @ points.T
    eye = torch.eye(size).to(points)
    cross = torch.einsum("jk,ka,jb->jakb", inner.pow(power - 1), points, points)
    gram = torch.einsum("jk,ab->jakb", inner.pow(power), eye) + power * cross
    gram = (gram / (power + 1)).reshape(count * size, count * size)
    solved, rank, condition = pseudo_solve(gram, values.reshape(-1, 1), count * size * eps, needed)
    return SymmetricMap(solved.reshape(count, size), points, power, rank, needed, condition)
