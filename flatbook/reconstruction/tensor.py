r"""From the weights of a KKT network to its training samples.

1. **Values.** The unit vectors :math:`u_j = w_j / \|w_j\|` satisfy :math:`f(u_j) = \mu_j u_j` with
   :math:`\mu_j = \|w_j\|^{2-\alpha} / (\alpha a_j)`.
2. **Map.** In the span of W, of dimension s, these values determine f if the Gram matrix
   :math:`K_{jk} = (u_j^\top u_k)^{\alpha-1}` has rank :math:`N = \binom{s+\alpha-2}{\alpha-1}`.
   Over all inputs the rank would never do: W lies in the span of the samples.
3. **Slices.** The matrices :math:`M(v) = T(\cdot, \cdot, v, \ldots, v) = \sum_i b_i
   (x_i^\top v)^{\alpha-2} x_i x_i^\top` share their factors. If the samples are independent, the
   eigenvectors of :math:`M(v_1) M(v_2)^{-1}` are the samples, and their eigenvalues
   :math:`(x_i^\top v_1 / x_i^\top v_2)^{\alpha-2}` differ for almost every :math:`v_1, v_2`, if
   :math:`\alpha \ge 3`.
4. **Polish.** With the dual basis, :math:`\langle d_i, x_k \rangle = \delta_{ik}`, the vector
   :math:`f(d_i) = b_i x_i` is free of the gaps between eigenvalues. An error ε in the samples
   makes one of order :math:`\varepsilon^{\alpha-1}` there.
5. **Scale.** Complementary slackness gives active samples margin 1, and :math:`|\Phi(x_i)| = 1`
   their length.

For odd α nothing tells (x, y) from (−x, −y), for even α x from −x.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flatbook import checks
from flatbook.reconstruction.inputs import degree as checked_degree
from flatbook.reconstruction.inputs import network
from flatbook.reconstruction.interpolation import PolynomialMap, fit_map, most_variables
from flatbook.reconstruction.kkt import contracted, outputs, stationarity
from flatbook.reconstruction.symmetric import SymmetricMap, fit_symmetric
from flatbook.runtime import generator

_DRAWS = 5  # pairs of slices to choose from
_COMPLEX = 0.01  # an imaginary part that noise does not make
_NOISE = 1e-6  # a relative error above which the values are not those of one tensor


class IdentifiabilityError(ValueError):
    """The weights do not determine the samples.

    Attributes:
        measured: Rank of the Gram matrix.
        needed: The rank that determines the samples in the span of the weights.
        condition: Largest over needed-th eigenvalue of the Gram matrix; infinite where there are
            fewer.
    """

    def __init__(self, reason: str, *, measured: int, needed: int, condition: float) -> None:
        super().__init__(
            f"{reason} (rank of the Gram matrix: measured {measured}, needed {needed}; condition "
            f"number {condition:.3g})."
        )
        self.measured, self.needed, self.condition = measured, needed, condition


class Recovery(NamedTuple):
    """Samples recovered from weights, and how well they explain them.

    Attributes:
        X: Samples in true scale, each with a sum of at least 0. Shape ``(samples, inputs)``.
        y: Labels, −1 and 1, for samples of this sign. Shape ``(samples,)``.
        multipliers: λ; below 0 only if the recovery failed. Shape ``(samples,)``.
        residual: As of `flatbook.reconstruction.kkt_residual`; near 1, the samples explain nothing.
        condition: Largest over N-th eigenvalue of the Gram matrix, estimated; infinite where
            there are fewer.
        rank: Number of samples: the dimension of the span and the rank of the tensor.
        gram_rank: Measured rank of the Gram matrix.
        needed: N, what it must be.
        gap: Least chordal distance of two eigenvalues of the slices used.
    """

    X: Tensor
    y: Tensor
    multipliers: Tensor
    residual: float
    condition: float
    rank: int
    gram_rank: int
    needed: int
    gap: float


def recover(
    W,
    a,
    *,
    degree: int = 3,
    rank: int | None = None,
    seed: int = 0,
    margin: float = 1.0,
    tolerance: float | None = None,
    symmetric: bool = False,
    force: bool = False,
) -> Recovery:
    r"""Recover the training samples of a polynomial network at a KKT point from its weights.

    The steps are those of this module. Only samples with a multiplier above 0 leave a trace. The
    weights must be those of a KKT point: nothing else makes :math:`f(u_j) = \mu_j u_j` true. Look
    at ``residual``, which says how well the samples found explain the weights.

    Args:
        W: First layer, a row for each neuron. Shape ``(neurons, inputs)``.
        a: Second layer. Shape ``(neurons,)``.
        degree: α, from 3.
        rank: Number of samples; give it if the weights are noisy. None counts the singular values
            of W above ``tolerance``.
        seed: Of the directions in which the tensor is cut.
        margin: Of the active samples. Training in direction alone leaves any; a wrong one stretches
            all samples alike.
        tolerance: Singular values and neurons smaller than this share of the largest count as 0.
            None takes the precision of W times its longer side.
        symmetric: Fit a symmetric tensor (`flatbook.reconstruction.symmetric`), for which fewer
            neurons will do, but whose Gram matrix is larger by the number of samples in each
            direction. The ranks are then those of this matrix.
        force: Go on where the samples are not determined, with the least map that fits and real
            parts of complex eigenvalues.

    Returns:
        The samples, of the kind of ``W``, with labels, multipliers and measures of trust.

    Raises:
        IdentifiabilityError: If the Gram matrix has too low a rank, or no real samples fit.
        ValueError: If shapes disagree, a number is not finite, or all neurons are 0.

    Reference:
        Harshman (1970). Foundations of the PARAFAC procedure. UCLA Working Papers in Phonetics;
        Leurgans, Ross and Abel (1993). A decomposition for three-way arrays. SIAM Journal on Matrix
        Analysis and Applications.

    Example:
        >>> from flatbook.reconstruction import exact_kkt
        >>> network = exact_kkt(2, X=[[0.6, 0.8], [0.8, -0.6]], labels=[1, -1])
        >>> found = recover(network.W, network.a)
        >>> order = found.y.argsort()  # samples come in no particular order
        >>> found.X[order].round(6), found.y[order]
        (array([[ 0.8, -0.6],
               [ 0.6,  0.8]]), array([-1.,  1.]))
        >>> try:
        ...     recover(network.W[:2], network.a[:2])
        ... except IdentifiabilityError as refusal:
        ...     refusal.measured, refusal.needed
        (2, 3)
    """
    W, a, kind = network(W, a)
    alpha = checked_degree(degree, at_least=3)
    limit = (
        max(W.shape) * kind.eps if tolerance is None else checks.positive("tolerance", tolerance)
    )
    if limit >= 1:
        raise ValueError(f"tolerance must be below 1, or nothing is left; got {limit:g}.")
    if rank is not None:
        checks.count("rank", rank, at_most=min(W.shape))
    checks.count("seed", seed, at_least=0)
    margin = checks.positive("margin", margin)
    checks.flag("symmetric", symmetric)
    checks.flag("force", force)

    points, basis, norms, heads = _active(W, a, alpha, rank, limit, seed)
    values = norms.pow(2 - alpha) / (alpha * heads)
    fit = fit_symmetric if symmetric else fit_map
    fitted = fit(points, values[:, None] * points, alpha - 1, kind.eps)
    trust = {"measured": fitted.rank, "needed": fitted.needed, "condition": fitted.condition}
    if not (fitted.determined or force):
        raise IdentifiabilityError("W and a must determine the tensor of the samples", **trust)

    cuts = _cuts(fitted, len(basis), seed)
    gap, imaginary = cuts[0].gap, cuts[0].imaginary
    if imaginary > _COMPLEX and not force:
        raise IdentifiabilityError(
            "W and a must be those of a KKT point with independent samples; the slices of their "
            f"tensor have complex eigenvalues, {imaginary:.2g} off the real line",
            **trust,
        )
    goal, best = values[:, None] * points, math.inf
    for cut in cuts:
        directions, strengths = _polish(fitted, cut.directions())
        missed = float((contracted(directions, strengths, points, alpha) - goal).norm())
        if missed < best or best == math.inf:
            best, gap, X, b = missed, cut.gap, directions @ basis, strengths
        if best < _NOISE * float(goal.norm()):  # else the next cut may be luckier
            break
    strengths = b
    X, strengths = _oriented(X, strengths, alpha)
    reached = outputs(W, a, X, alpha)
    stretch = (margin / reached.abs()).pow(1 / alpha)
    X, b = stretch[:, None] * X, strengths * reached.abs() / margin
    y = torch.where(reached < 0, -1.0, 1.0).to(X)
    residual = stationarity(W, a, X, b, alpha)
    X, y, multipliers = (kind.back(t) for t in (X, y, b * y))
    return Recovery(
        X, y, multipliers, residual, fitted.condition, len(basis), fitted.rank, fitted.needed, gap
    )


def _active(W, a, alpha, rank, tolerance, seed):
    """Return unit rows in coordinates of their span, its basis, norms and second layer."""
    sizes = torch.minimum(W.norm(dim=1), math.sqrt(alpha) * a.abs())
    if not sizes.max() > 0:
        raise ValueError("W and a must hold a neuron with weights in both layers; got none.")
    active = sizes > tolerance * sizes.max()
    if not active.all():
        W, a = W[active], a[active]
    basis, coordinates = _span(W, rank, tolerance, most_variables(len(W), alpha - 1), seed)
    norms = coordinates.norm(dim=1)
    seen = norms > tolerance * norms.max()  # a given rank may leave a neuron outside the span
    return coordinates[seen] / norms[seen, None], basis, norms[seen], a[seen]


def _span(W: Tensor, rank: int | None, tolerance: float, likely: int, seed: int):
    """Return an orthonormal basis of the rows' span and their coordinates.

    The span comes from a sketch if that can hold it.
    """
    size = min(W.shape)
    width = min(size, max(likely, rank or 0) + 10)
    if width < size:
        sketch = torch.randn(len(W), width, generator=generator(seed), dtype=torch.float64).to(W)
        frame = torch.linalg.qr(W.T @ sketch).Q
        seen = W @ frame
        _, values, rows = torch.linalg.svd(seen, full_matrices=False)
        if values[-1] <= tolerance * values[0]:  # the sketch had room to spare
            count = int((values > tolerance * values[0]).sum()) if rank is None else rank
            return rows[:count] @ frame.T, seen @ rows[:count].T
    _, values, rows = torch.linalg.svd(W, full_matrices=False)
    rows = rows[: int((values > tolerance * values[0]).sum()) if rank is None else rank]
    return rows, W @ rows.T


class _Cut(NamedTuple):
    product: Tensor
    gap: float
    imaginary: float

    def directions(self) -> Tensor:
        """Return the unit eigenvectors, or their real parts."""
        vectors = torch.linalg.eig(self.product).eigenvectors.real.T
        return vectors / vectors.norm(dim=1, keepdim=True)


def _cuts(fitted: PolynomialMap | SymmetricMap, size: int, seed: int) -> list[_Cut]:
    """Return some pairs of slices, those with real eigenvalues and the widest gap first."""
    random, cuts = generator(seed), []
    for _ in range(_DRAWS):
        pair = torch.randn(2, size, generator=random, dtype=torch.float64)
        pair = (pair / pair.norm(dim=1, keepdim=True)).to(fitted.coefficients)
        first, second = (fitted.slope(v) for v in pair)
        first, second = first + first.T, second + second.T
        product, failed = torch.linalg.solve_ex(second, first)
        if not failed and product.isfinite().all():
            cuts.append(_Cut(product.T, *_spread(torch.linalg.eigvals(product))))
    if not cuts:  # every slice is singular: whatever is there, it is not as many samples
        return [_Cut(torch.eye(size).to(fitted.coefficients), 0.0, math.inf)]
    return sorted(cuts, key=lambda cut: (cut.imaginary, -cut.gap))


def _spread(values: Tensor) -> tuple[float, float]:
    """Return the least chordal distance of eigenvalues, and how far they are off the real line.

    Noise, up to the hundredth that is let through, counts as none, so that the gap decides.
    """
    size = (1 + values.abs().square()).sqrt()
    off = float((values.imag.abs() / size.square()).max())
    apart = (values[:, None] - values[None, :]).abs() / (size[:, None] * size[None, :])
    apart.fill_diagonal_(1.0)
    return float(apart.min()), off if off > _COMPLEX else 0.0


def _polish(fitted: PolynomialMap | SymmetricMap, directions: Tensor) -> tuple[Tensor, Tensor]:
    """Return directions and strengths b‖x‖^α from f at the dual basis, while that still helps."""
    strengths, before = _strengths(fitted, directions), math.inf
    for _ in range(6):
        dual, failed = torch.linalg.inv_ex(directions)
        if failed or not dual.isfinite().all():
            break
        moved = fitted.values(dual.T)
        sign = (moved * directions).sum(dim=1, keepdim=True).sign()
        moved = sign * moved / moved.norm(dim=1, keepdim=True)
        change = float((moved - directions).norm(dim=1).max())
        if not change < before:
            break
        directions, before = moved, change
        strengths = _strengths(fitted, directions)
    return directions, strengths


def _strengths(fitted: PolynomialMap | SymmetricMap, directions: Tensor) -> Tensor:
    dual = torch.linalg.pinv(directions).T
    return (fitted.values(dual) * directions).sum(dim=1)


def _oriented(X: Tensor, strengths: Tensor, alpha: int) -> tuple[Tensor, Tensor]:
    sign = torch.where(X.sum(dim=1) < 0, -1.0, 1.0).to(X)
    return sign[:, None] * X, strengths * sign.pow(alpha)
