"""How well an attack does: its curve, rates with intervals, and honest accuracy."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv

from flatbook import checks
from flatbook.arrays import flags_array, listed

__all__ = ["Rate", "Roc", "balanced_accuracy", "clopper_pearson", "roc"]


@dataclass(frozen=True)
class Rate:
    """A true positive rate read off a curve, with its interval; unpacks to value, low and high.

    Attributes:
        value: The share of members found.
        low: Lower end of the Clopper–Pearson interval for it, given the threshold.
        high: Its upper end.
        threshold: Scores of at least this are called members.
        fpr: The false positive rate that this threshold has, at most the one asked for.
        fpr_high: Upper end of the Clopper–Pearson interval for that. With few non-members it lies
            far above the rate asked for: below one in their number, no single false positive can
            be shown, and what is measured is the rate at no false positive at all.
    """

    value: float
    low: float
    high: float
    threshold: float
    fpr: float
    fpr_high: float

    @property
    def interval(self) -> tuple[float, float]:
        """The lower and the upper end."""
        return self.low, self.high

    def __float__(self) -> float:
        return self.value

    def __iter__(self) -> Iterator[float]:
        return iter((self.value, self.low, self.high))


@dataclass(frozen=True, eq=False)
class Roc:
    """What an attack achieves at each threshold; arrays are NumPy's, from the strictest on.

    Attributes:
        thresholds: ∞, then the distinct scores, descending. Shape ``(thresholds,)``.
        fpr: Share of non-members that score at least that. Shape ``(thresholds,)``.
        tpr: Share of members that do. Shape ``(thresholds,)``.
        members: How many there are.
        non_members: How many of the others.
        auc: Probability that a member scores above a non-member, ties counting half.
        balanced_accuracy: The greatest (tpr + 1 − fpr) / 2. An **oracle** figure: its threshold
            saw who is a member.
    """

    thresholds: np.ndarray
    fpr: np.ndarray
    tpr: np.ndarray
    members: int
    non_members: int
    auc: float
    balanced_accuracy: float

    def tpr_at(self, fpr: float, *, level: float = 0.95) -> Rate:
        """Return the greatest true positive rate whose false positive rate is at most ``fpr``.

        Between two thresholds the curve is a step: nothing is interpolated. The interval covers
        the chance of which members were drawn, not that of the threshold; see :class:`Rate` for
        what few non-members mean, and pool several targets to have more.

        Args:
            fpr: In [0, 1], such as 0.001.
            level: Coverage of the interval, strictly between 0 and 1.

        Raises:
            ValueError: If an argument is out of range.

        Example:
            >>> curve = roc([4, 3, 2, 1], [True, True, False, True])
            >>> value, low, high = curve.tpr_at(0)
            >>> print(f"{value:.3f} in {low:.3f} to {high:.3f}")
            0.667 in 0.094 to 0.992
        """
        fpr = checks.fraction("fpr", fpr)
        at = np.searchsorted(self.fpr, fpr, side="right") - 1
        hits = round(float(self.tpr[at]) * self.members)
        alarms = round(float(self.fpr[at]) * self.non_members)
        return Rate(
            float(self.tpr[at]),
            *clopper_pearson(hits, self.members, level=level),
            threshold=float(self.thresholds[at]),
            fpr=float(self.fpr[at]),
            fpr_high=clopper_pearson(alarms, self.non_members, level=level)[1],
        )


def roc(scores, members) -> Roc:
    """Trace how many members and non-members score at least each threshold.

    Args:
        scores: Higher for members; may be infinite. Any shape: several targets are pooled.
        members: True or 1 for members. The same shape.

    Returns:
        The curve, its area, and its rates at small false positive rates.

    Raises:
        ValueError: If the shapes disagree, a score is nan, or all or none are members.

    Example:
        Of the three pairs of a member and a non-member, two are in order.

        >>> curve = roc([4, 3, 2, 1], [True, True, False, True])
        >>> round(curve.auc, 4), round(curve.balanced_accuracy, 4)
        (0.6667, 0.8333)
    """
    scores = listed("scores", scores)
    value = checks.tensor("scores", scores, (None,) * max(np.ndim(scores), 1), floating=False)
    if value.is_complex():
        raise ValueError(f"scores must be real; got {value.dtype}.")
    if value.isnan().any():
        raise ValueError("scores must be numbers or infinite; got nan.")
    flags = _both_kinds(members, tuple(value.shape)).ravel()
    thresholds, hits, alarms = cumulated(value.detach().cpu().double().numpy().ravel(), flags)
    n, m = int(hits[-1]), int(alarms[-1])
    pairs = int((np.diff(alarms) * (hits[1:] + hits[:-1])).sum())  # exact, twice the ordered ones
    best = int((hits * m - alarms * n).max())
    return Roc(
        thresholds, alarms / m, hits / n, n, m, pairs / (2 * n * m), 0.5 + best / (2 * n * m)
    )


def balanced_accuracy(predicted, members) -> float:
    """Compute the mean of the shares of members and of non-members that are called right.

    Args:
        predicted: True or 1 where a member is suspected. Any shape.
        members: True or 1 for members. The same shape.

    Raises:
        ValueError: If the shapes disagree, or all or none are members.

    Example:
        >>> balanced_accuracy([True, True, False, False], [True, True, True, False])
        0.8333333333333333
    """
    called = flags_array(
        "predicted", predicted, (None,) * max(np.ndim(listed("predicted", predicted)), 1)
    )
    flags = _both_kinds(members, called.shape)
    return float((called[flags].mean() + 1 - called[~flags].mean()) / 2)


def clopper_pearson(successes: int, trials: int, *, level: float = 0.95) -> tuple[float, float]:
    r"""Bound a probability by the interval that covers it at least ``level`` of the time.

    With k successes in n trials and α = 1 − level the ends are the p at which seeing k or more,
    and k or fewer, has probability α/2:

    .. math:: B^{-1}_{\alpha/2}(k, n - k + 1), \qquad B^{-1}_{1 - \alpha/2}(k + 1, n - k),

    quantiles of beta laws; 0 if k = 0, and 1 if k = n.

    Args:
        successes: From 0 to ``trials``.
        trials: At least 1.
        level: Strictly between 0 and 1.

    Returns:
        The lower and the upper end.

    Raises:
        ValueError: If an argument is out of range.

    Reference:
        Clopper and Pearson (1934). The use of confidence or fiducial limits. Biometrika.

    Example:
        None in n: the upper end solves (1 − p)ⁿ = α/2.

        >>> low, high = clopper_pearson(0, 2, level=0.5)
        >>> low, round(high, 6)
        (0.0, 0.5)
    """
    n = checks.count("trials", trials)
    k = checks.count("successes", successes, at_least=0, at_most=n)
    if not 0 < checks.fraction("level", level) < 1:
        raise ValueError(f"level must lie strictly between 0 and 1; got {level}.")
    tail = (1 - level) / 2
    low = float(betaincinv(k, n - k + 1, tail)) if k else 0.0
    high = float(betaincinv(k + 1, n - k, 1 - tail)) if k < n else 1.0
    return low, high


def cumulated(scores, flags):
    """Return ∞ and the distinct scores, descending, with how many flagged and others reach each."""
    order = np.argsort(-scores, kind="stable")
    scores, flags = scores[order], flags[order]
    last = np.flatnonzero(np.append(scores[1:] != scores[:-1], True))
    hits = np.cumsum(flags)[last]
    values, hits, alarms = scores[last], hits, last + 1 - hits
    return np.append(np.inf, values), np.append(0, hits), np.append(0, alarms)


def _both_kinds(members, shape):
    flags = flags_array("members", members, shape)
    if flags.all() or not flags.any():
        raise ValueError(
            "members must hold both members and non-members; "
            f"got {flags.sum()} and {(~flags).sum()}."
        )
    return flags
