"""Three ways to bound the rise of a loss, each a convex function of how far the features move.

A bound gives its value and slope ``at`` a reach t of the features, and a reach ``beyond`` which
it exceeds epsilon, of the right order, from where Newton's method falls onto the root.
``flatbook.certificates`` makes certificates of them.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, cdist


@dataclass(frozen=True)
class Flat:
    """First order, and the variance grown by e^R: the third derivative is at most R times it."""

    first: Tensor  # ‖w̄ − w_y‖
    log_curvature: Tensor  # log(V / D²), for V may be below the least float
    diameter: float

    def at(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return value and slope at the reach t."""
        r = self.diameter * t
        near, far = r.clamp(max=1.0), r.clamp(min=1.0)
        series = torch.ones_like(r)
        for n in range(18, 2, -1):  # 2 (eʳ − r − 1) / r² = 1 + r/3 (1 + r/4 (1 + …))
            series = 1 + near / n * series
        log_far = far + torch.log1p(-(1 + far) * torch.exp(-far))
        second = torch.where(
            r < 1,
            self.log_curvature.exp() * near.square() / 2 * series,
            (self.log_curvature + log_far).exp(),
        )
        slope = self.first + self.diameter * (self.log_curvature + _log_expm1(r)).exp()
        return self.first * t + second, slope

    def beyond(self, epsilon: Tensor) -> Tensor:
        """Return a reach of no less than the root."""
        # With c = eʳ − r − 1 ≥ r²/2, eʳ ≤ 1 + c + √(2c).
        log_c = epsilon.log() - self.log_curvature
        r = _softplus(torch.logaddexp(log_c, (log_c + math.log(2)) / 2))
        return torch.minimum(epsilon / self.first, r / self.diameter)


@dataclass(frozen=True)
class Polynomial:
    """Three powers of the reach, each of a rate of its own."""

    first: Tensor
    second: Tensor
    third: Tensor

    def at(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return value and slope at the reach t."""
        two, three = self.second * t, self.third * t
        value = self.first * t + two**2 + three**3
        return value, self.first + 2 * self.second * two + 3 * self.third * three**2

    def beyond(self, epsilon: Tensor) -> Tensor:
        """Return a reach of no less than the root."""
        root = torch.minimum(epsilon / self.first, epsilon.sqrt() / self.second)
        return torch.minimum(root, epsilon ** (1 / 3) / self.third)


@dataclass(frozen=True)
class LogSumExp:
    """The exact rise with each exponent at its largest."""

    log_p: Tensor
    distance: Tensor  # of each row from that of the label

    @cached_property
    def first(self) -> Tensor:
        """Return the slope at 0."""
        return (self.log_p.exp() * self.distance).sum(dim=1)

    def at(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return value and slope at the reach t."""
        terms = self.log_p + _log_expm1(t[:, None] * self.distance)
        log_sum = terms.logsumexp(dim=1)
        value = _softplus(log_sum)
        mean = (terms.softmax(dim=1) * self.distance).sum(dim=1)
        return value, (log_sum - value).exp() * mean + self.first * (-value).exp()

    def beyond(self, epsilon: Tensor) -> Tensor:
        """Return a reach of no less than the root."""
        alone = _softplus(_log_expm1(epsilon)[:, None] - self.log_p) / self.distance
        return torch.where(self.distance > 0, alone, math.inf).amin(dim=1)


def _log_expm1(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))


def _softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def root(bound: Flat | Polynomial | LogSumExp, epsilon: Tensor) -> Tensor:
    """Return the reach at which the bound is epsilon, which is above 0.

    On a convex function Newton's steps from above the root stay above it.
    """
    t = bound.beyond(epsilon)
    for _ in range(100):
        value, slope = bound.at(t)
        closer = torch.fmin(t, t - (value - epsilon) / slope)  # not a nan, as of 0/0
        if (closer >= t * (1 - 1e-14)).all():
            break
        t = closer
    return t


def distances(weight: Tensor, classes: Tensor) -> Tensor:
    """Return how far every row lies from that of each sample's class, (samples, classes)."""
    classes, place = classes.unique(return_inverse=True)
    # Row by row, not from inner products, because rows may differ by little.
    return cdist(weight[classes], weight, compute_mode="donot_use_mm_for_euclid_dist")[place]


def moments(weight: Tensor, log_p: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logs of ‖w̄ − w_c‖ and of the variance of the rows under the prediction.

    Sums run over the classes other than c, so that certainty leaves them their precision. The
    variance keeps it where c is the most likely class.
    """
    log_distance = distances(weight, classes).log()  # −∞ for c itself
    log_sum = (log_p + log_distance).logsumexp(dim=1)
    share = (log_p + log_distance - log_sum[:, None]).exp()
    drift = torch.empty_like(log_sum)
    for c in classes.unique():
        members = (classes == c).nonzero()[:, 0]
        step = weight - weight[c]
        step /= step.norm(dim=1, keepdim=True).clamp(min=torch.finfo(step.dtype).tiny)
        if len(step) < step.shape[1]:  # the same vectors, turned into fewer dimensions
            step = torch.linalg.qr(step.T, mode="r").R.T
        drift[members] = (share[members] @ step).norm(dim=1)
    log_first = log_sum + drift.log()
    log_second = (log_p + 2 * log_distance).logsumexp(dim=1)
    return log_first, log_second + torch.log1p(-(2 * log_first - log_second).exp().clamp(max=1.0))
