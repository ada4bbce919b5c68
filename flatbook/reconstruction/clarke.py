r"""KKT residuals of ReLU networks, whose derivative at a kink is an interval.

The conditions for a network with kinks ask for *some* derivative out of Clarke's: where the
input z of a ReLU is 0, any number in [0, 1] will do. Training drives many inputs right there, so
the residual with autograd's choice of 0 may be large at a true KKT point.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flatbook import checks
from flatbook.reconstruction.gram import largest_eigenvalue
from flatbook.reconstruction.inputs import in_span, network, real, signs, weights_norm
from flatbook.reconstruction.multipliers import nonnegative_fit


class ClarkeFit(NamedTuple):
    """How well samples explain a ReLU network, with plain and with Clarke's derivatives.

    Attributes:
        multipliers: λ with Clarke's derivatives. Shape ``(samples,)``.
        residual: Relative, with Clarke's derivatives.
        plain_multipliers: λ with derivatives 0 and 1. Shape ``(samples,)``.
        plain_residual: Relative, with derivatives 0 and 1; never below ``residual``.
        kinks: Share of the pairs of neuron and sample that sit at a kink.
    """

    multipliers: Tensor
    residual: float
    plain_multipliers: Tensor
    plain_residual: float
    kinks: float


def relu_multipliers(
    W, a, X, y, *, bias=None, kink: float = 1e-3, steps: int = 20_000
) -> ClarkeFit:
    r"""Find the multipliers under which samples explain a two-layer ReLU network best.

    For :math:`\Phi(x) = \sum_j a_j [w_j^\top x + c_j]_+` the gradients in the first layer are
    :math:`a_j s_{ij} (x_i, 1)` with :math:`s_{ij} \in [0, 1]` free where the ReLU's input
    :math:`z_{ij}` is 0. In :math:`q_{ij} = \lambda_i s_{ij}` the problem is convex,

    .. math:: \min_{\lambda, q} \Bigl\| \theta - \sum_i \lambda_i y_i \nabla_\theta \Phi(x_i)
        \Bigr\| \quad \text{subject to} \quad 0 \le q_{ij} \le \lambda_i ,

    and solved by an accelerated projected gradient method with restarts.

    Args:
        W: First layer. Shape ``(neurons, inputs)``.
        a: Second layer. Shape ``(neurons,)``.
        X: Samples. Shape ``(samples, inputs)``.
        y: Labels, −1 and 1. Shape ``(samples,)``.
        bias: c, counted among the weights; None for a network without. Shape ``(neurons,)``.
        kink: Inputs up to this share of the largest count as 0.
        steps: At most so many iterations.

    Returns:
        Multipliers, of the kind of ``W``, and relative residuals of both kinds.

    Raises:
        ValueError: If shapes disagree, a number is not finite, a label is neither −1 nor 1, or all
            weights are 0.

    Reference:
        Clarke (1983). Optimization and nonsmooth analysis. Wiley; Beck and Teboulle (2009). A
        fast iterative shrinkage-thresholding algorithm. SIAM Journal on Imaging Sciences.

    Example:
        The second sample is orthogonal to w, and w is made of both with the derivatives 1 and 0.4
        to 1: :math:`w = \sqrt5 \lambda_1 (x_1 + 0.4 x_2)` with :math:`\lambda_1 = \sqrt5 / 2`.

        >>> X, W, a = [[1.0, 0.0], [-0.5, 1.0]], [[2.0, 1.0]], [5**0.5]
        >>> found = relu_multipliers(W, a, X, [1.0, 1.0])
        >>> found.kinks, round(found.residual, 6), round(found.plain_residual, 3)
        (0.5, 0.0, 0.333)
        >>> float(found.multipliers[0].round(6))  # half the root of 5
        1.118034
    """
    W, a, kind = network(W, a)
    X, _ = real("X", X, ("samples", W.shape[1]), like=W)
    y = signs("y", y, len(X), like=W)
    kink, steps = checks.non_negative("kink", kink), checks.count("steps", steps)
    if bias is not None:
        bias, _ = real("bias", bias, (len(W),), like=W)
        W = torch.cat([W, bias[:, None]], dim=1)
        X = torch.cat([X, torch.ones(len(X), 1).to(X)], dim=1)
    size = weights_norm(W, a)
    z = X @ W.T
    free = z.abs() <= kink * z.abs().max()
    inside, coordinates, outside = in_span(W, X)
    problem = _Problem(inside, a, coordinates.T, y, z, free)

    plain, missed = problem.plain()
    plain_residual = math.hypot(missed, outside) / size
    clarke, missed = problem.solve(plain, steps)
    residual = min(plain_residual, math.hypot(missed, outside) / size)
    return ClarkeFit(
        kind.back(clarke),
        residual,
        kind.back(plain),
        plain_residual,
        float(free.double().mean()),
    )


class _Problem(NamedTuple):
    target: Tensor  # (neurons, coordinates)
    a: Tensor
    X: Tensor  # (samples, coordinates)
    y: Tensor
    z: Tensor  # (samples, neurons)
    free: Tensor

    def plain(self) -> tuple[Tensor, float]:
        """Fit the multipliers with derivative 1 above 0 and 0 elsewhere."""
        slopes = (self.z > 0).to(self.z)
        first = (slopes * self.a).T[:, None, :] * self.X.T
        columns = self.y * torch.cat([first.flatten(0, 1), self.z.clamp(min=0).T])
        return nonnegative_fit(columns, torch.cat([self.target.flatten(), self.a]))

    def errors(self, multipliers: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is left of either layer."""
        on = torch.where(self.free, q, multipliers[:, None] * (self.z > 0))
        first = self.target - self.a[:, None] * ((self.y[:, None] * on).T @ self.X)
        second = self.a - (self.y * multipliers) @ self.z.clamp(min=0)
        return first, second

    def gradient(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of half the squared errors, in the multipliers and in q."""
        slope = -self.y[:, None] * self.a * (self.X @ first.T)
        fixed = torch.where(self.free | (self.z <= 0), 0.0, slope).sum(dim=1)
        outer = self.y * (self.z.clamp(min=0) @ second)
        return fixed - outer, torch.where(self.free, slope, 0.0)

    def curvatures(self) -> tuple[float, float]:
        """Bound the curvature in the multipliers and in q, alone and, by the factor 2, together."""
        zero = torch.zeros_like(self.z)
        start = self.gradient(*self.errors(zero[:, 0], zero))[0]

        def rise(block):
            columns = [self.gradient(*self.errors(v, zero))[0] - start for v in block.T]
            return torch.stack(columns, dim=1)

        lam = largest_eigenvalue(rise, len(zero), zero)
        q = float(self.a.abs().max() ** 2 * torch.linalg.eigvalsh(self.X @ self.X.T)[-1])
        return 2.1 * lam + 1e-300, 2.1 * q + 1e-300

    def solve(self, multipliers: Tensor, steps: int) -> tuple[Tensor, float]:
        """Minimize over multipliers and q, from the plain multipliers."""
        curve, curve_q = self.curvatures()
        now = (multipliers, torch.where(self.free & (self.z > 0), multipliers[:, None], 0.0))
        ahead, momentum, value = now, 1.0, _square(*self.errors(*now))
        enough, milestone = 1e-18 * _square(self.target, self.a), value
        for step in range(1, steps + 1):
            if step % 100 == 0:
                if milestone - value <= 1e-9 * value:
                    break
                milestone = value
            slopes = self.gradient(*self.errors(*ahead))
            new = _onto_cone(
                ahead[0] - slopes[0] / curve,
                ahead[1] - slopes[1] / curve_q,
                self.free,
                curve / curve_q,
            )
            reached = _square(*self.errors(*new))
            if reached > value:  # restart where the momentum overshoots
                if momentum == 1.0:
                    break
                ahead, momentum = now, 1.0
                continue
            following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
            weight = (momentum - 1) / following
            ahead = tuple(n + weight * (n - o) for n, o in zip(new, now, strict=True))
            now, momentum, value = new, following, reached
            if value <= enough:
                break
        return now[0], value**0.5


def _square(first: Tensor, second: Tensor) -> float:
    return float(first.square().sum() + second.square().sum())


def _onto_cone(multipliers: Tensor, q: Tensor, free: Tensor, weight: float):
    """Project onto 0 ≤ q ≤ λ where λ counts ``weight`` times as much as each q.

    With the k largest of the q held at λ, it is their weighted mean; the true k has the largest.
    """
    held = torch.where(free, q, -torch.inf).sort(dim=1, descending=True).values
    held = held[:, : int(free.sum(dim=1).max())]
    count = torch.arange(1, held.shape[1] + 1).to(q)
    means = (weight * multipliers[:, None] + held.cumsum(dim=1)) / (weight + count)
    means = torch.cat([multipliers[:, None], means], dim=1)
    multipliers = means.max(dim=1).values.clamp(min=0)
    return multipliers, torch.where(free, q.clamp(min=0).minimum(multipliers[:, None]), 0.0)
