r"""The polynomial map behind a KKT network, from its values at the neurons.

The map :math:`f(w) = T(\cdot, w, \ldots, w)` has for coordinates homogeneous polynomials of power
:math:`p = \alpha - 1` in s variables: :math:`N = \binom{s+p-1}{p}` monomials. Scaled by the roots
of their multinomial coefficients, they make a feature map φ with
:math:`\langle \varphi(u), \varphi(v) \rangle = (u^\top v)^p`. The values of f at m points
determine it exactly if the :math:`m \times m` Gram matrix K of this kernel has rank N. With N
points f is a sum of kernels,

.. math:: f(w) = \sum_j \beta_j (z_j^\top w)^p , \qquad K \beta = F ,

with more it is fitted by least squares in the monomials, whose Gram matrix has the same
eigenvalues other than 0. With fewer, the former is the map of least norm among those that fit.
"""

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from flatbook import checks
from flatbook.reconstruction.gram import Fitted, solve_gram
from flatbook.reconstruction.inputs import real


def monomial_count(variables: int, power: int) -> int:
    r"""Count the monomials of a power, :math:`\binom{s+p-1}{p}`.

    A cubic network (p = 2) needs as many neurons as this, for s samples, to be recovered.

    Args:
        variables: s, from 1.
        power: p, from 0.

    Returns:
        At least 1.

    Raises:
        ValueError: If an argument is not such a whole number.

    Example:
        In the span of 20 samples, and in all 784 pixels.

        >>> monomial_count(20, 2), monomial_count(784, 2)
        (210, 307720)
    """
    s = checks.count("variables", variables)
    p = checks.count("power", power, at_least=0)
    return math.comb(s + p - 1, p)


def most_variables(points: int, power: int) -> int:
    """Return the largest number of variables that has no more monomials than points."""
    s = 1
    while math.comb(s + power, power) <= points:
        s += 1
    return s


def monomials(w: Tensor, power: int) -> Tensor:
    """Return φ of each row, shape ``(points, monomials)``, with inner products (uᵀv)ᵖ."""
    index, weight = exponents(w.shape[1], power, w)
    features = weight.expand(len(w), -1)
    for column in index.T:
        features = features * w[:, column]
    return features


def exponents(variables: int, power: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of each monomial, ``(monomials, power)``, and the root of its weight."""
    index = list(itertools.combinations_with_replacement(range(variables), power))
    index = torch.tensor(index, dtype=torch.long).reshape(-1, power)
    # The multinomial coefficient, from the lengths of the runs of equal factors
    run, repeats = torch.ones(len(index)), torch.ones(len(index), dtype=torch.float64)
    for k in range(1, power):
        run = torch.where(index[:, k] == index[:, k - 1], run + 1, torch.ones(()))
        repeats = repeats * run
    weight = (math.factorial(power) / repeats).sqrt()
    return index.to(like.device), weight.to(like)


class PolynomialMap(Fitted):
    """A map fitted coordinate by coordinate, as a sum of kernels or of monomials."""

    def values(self, w: Tensor) -> Tensor:
        """Return f at the rows of w, shape ``(rows, outputs)``."""
        if self.points is None:
            return monomials(w, self.power) @ self.coefficients
        return (w @ self.points.T).pow(self.power) @ self.coefficients

    def slope(self, v: Tensor) -> Tensor:
        r"""Return :math:`Df(v)^\top / p`, for a tensor its slice :math:`T(\cdot,\cdot,v,…)`."""
        p = self.power
        if self.points is not None:
            weight = (self.points @ v).pow(p - 1)
            return self.points.T @ (weight[:, None] * self.coefficients)
        index, weight = exponents(len(v), p, v)
        factors = v[index]
        total = torch.zeros(len(v), self.coefficients.shape[1]).to(v)
        for k in range(p):  # the product rule, one factor after the other
            others = weight * torch.cat([factors[:, :k], factors[:, k + 1 :]], dim=1).prod(dim=1)
            total.index_add_(0, index[:, k], others[:, None] * self.coefficients)
        return total / p


def fit_map(points: Tensor, values: Tensor, power: int, eps: float) -> PolynomialMap:
    """Fit a homogeneous polynomial map to its values at unit vectors.

    Args:
        points: Unit rows in float64. Shape ``(points, variables)``.
        values: The map there. Shape ``(points, outputs)``.
        power: p, from 1.
        eps: Unit roundoff of the numbers; eigenvalues below it, times the size, count as 0.

    Returns:
        The map: the one, the best or, with too few points, the least that fits.
    """
    count, needed = len(points), math.comb(points.shape[1] + power - 1, power)
    if count <= needed:
        rows, exponent, target = points, power, values
    else:
        features = monomials(points, power)
        rows, exponent, target = features.T, 1, features.T @ values
    solved, rank, condition = solve_gram(rows, exponent, target, eps, needed)
    kernels = points if count <= needed else None
    return PolynomialMap(solved, kernels, power, rank, needed, condition)


def polarize(form: Callable[[Tensor], Tensor], vectors):
    r"""Recover a symmetric multilinear form from its diagonal: the polarization identity.

    .. math::
        T(v_1, \ldots, v_\alpha) = \frac{1}{2^\alpha \alpha!}
        \sum_{\varepsilon \in \{\pm 1\}^\alpha} \varepsilon_1 \cdots \varepsilon_\alpha \,
        p(\varepsilon_1 v_1 + \cdots + \varepsilon_\alpha v_\alpha),
        \qquad p(w) = T(w, \ldots, w)

    Args:
        form: p: takes points, shape ``(points, inputs)``, and returns a number for each.
        vectors: The arguments of T; there are α of them. Shape ``(degree, inputs)``.

    Returns:
        A number of type float.

    Raises:
        ValueError: If ``form`` is no function, or ``vectors`` not a matrix of finite numbers.

    Example:
        For :math:`p(w) = w_1 w_2`, the form is half of the permanent.

        >>> polarize(lambda w: w[:, 0] * w[:, 1], [[1.0, 2.0], [3.0, 4.0]])
        5.0
    """
    if not callable(form):
        raise ValueError(f"form must be a function of points; got {type(form).__name__}.")
    vectors, kind = real("vectors", vectors, ("degree", "inputs"))
    order = len(vectors)
    signed = torch.tensor(list(itertools.product((1.0, -1.0), repeat=order)))
    signed = signed.to(vectors)
    values, _ = real("form", form(kind.back(signed @ vectors)), (len(signed),), like=vectors)
    return float(signed.prod(dim=1) @ values / (2**order * math.factorial(order)))
