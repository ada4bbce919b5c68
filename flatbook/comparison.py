"""Are two attacks different? Intervals by resampling models and points together."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flatbook import checks
from flatbook.arrays import as_array, flags_array

__all__ = ["Estimate", "Resamples", "mean_auc", "mean_rate", "pooled_tpr", "resamples"]

_ENTRIES = 2**22  # of the weights of pooled scores held at once


@dataclass(frozen=True, eq=False)
class Resamples:
    """How often each model and each point is drawn in each resample.

    The first row is the sample as it is, all ones.

    Attributes:
        models: Shape ``(1 + draws, models)``.
        points: Shape ``(1 + draws, points)``.
    """

    models: np.ndarray
    points: np.ndarray


@dataclass(frozen=True, eq=False)
class Estimate:
    """A number and what it was in each resample; differences and other functions keep the pairing.

    Attributes:
        value: Of the sample.
        draws: Of its resamples. Shape ``(draws,)``.
    """

    value: float
    draws: np.ndarray

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Return the percentile interval, nan if a resample gave none.

        Raises:
            ValueError: If ``level`` is not strictly between 0 and 1.
        """
        if not 0 < checks.fraction("level", level) < 1:
            raise ValueError(f"level must lie strictly between 0 and 1; got {level}.")
        low, high = np.quantile(self.draws, [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)

    def __sub__(self, other: "Estimate") -> "Estimate":
        return Estimate(self.value - other.value, self.draws - other.draws)

    def recorded(self) -> list[float]:
        """Return the value and the ends of the 95 % interval, as records keep them."""
        return [float(self.value), *self.interval()]

    @classmethod
    def of(cls, function: Callable[..., float], *estimates: "Estimate") -> "Estimate":
        """Apply a function to the values of estimates, and to those of each resample.

        Example:
            >>> double = Estimate.of(lambda a: 2 * a, Estimate(1.0, np.array([1.0, 2.0])))
            >>> double.value, double.draws
            (2.0, array([2., 4.]))
        """
        draws = [function(*values) for values in zip(*(e.draws for e in estimates), strict=True)]
        return cls(function(*(e.value for e in estimates)), np.array(draws, dtype=np.float64))


def resamples(num_models: int, num_points: int, *, draws: int = 400, seed: int = 0) -> Resamples:
    """Draw models and, independently, points with replacement.

    Scores of one model depend on each other, and so do those of one point under different models:
    a resample keeps or drops whole rows and columns. Intervals of such two-way resampling err on
    the wide side (Owen 2007). Equal arguments give equal draws, so that ensembles over the same
    points and designs are compared pair by pair.

    Args:
        num_models: At least 2.
        num_points: At least 2.
        draws: How many.
        seed: Of the draws.

    Raises:
        ValueError: If a number is out of range.

    Reference:
        Owen (2007). The pigeonhole bootstrap. Annals of Applied Statistics.

    Example:
        >>> resamples(4, 100, draws=2).points.sum(axis=1)
        array([100, 100, 100])
    """
    counts = []
    streams = np.random.default_rng(checks.count("seed", seed, at_least=0)).spawn(2)
    for name, size, stream in (
        ("num_models", num_models, streams[0]),
        ("num_points", num_points, streams[1]),
    ):
        size = checks.count(name, size, at_least=2)
        drawn = stream.multinomial(size, np.full(size, 1 / size), checks.count("draws", draws))
        counts.append(np.concatenate([np.ones((1, size), dtype=np.int64), drawn]))
    return Resamples(*counts)


def mean_auc(scores, members, drawn: Resamples) -> Estimate:
    """Average over models the area under the curve of an attack on each.

    Args:
        scores: Higher for members; may be infinite. Shape ``(models, points)``.
        members: Which point was a member for which model. Shape ``(models, points)``.
        drawn: See :func:`resamples`.

    Returns:
        The mean of `flatbook.membership.roc`'s areas.

    Raises:
        ValueError: If the shapes disagree, a score is nan, or a model has only members or none.

    Example:
        >>> scores, members = np.array([[3, 1, 2], [3, 1, 2]]), np.array([[1, 0, 0], [0, 0, 1]])
        >>> mean_auc(scores, members, resamples(2, 3)).value
        0.75
    """
    scores, flags = _paired(scores, members, drawn)
    areas = np.empty(drawn.models.shape)
    for model, (own, mask) in enumerate(zip(scores, flags, strict=True)):
        order = np.argsort(own, kind="stable")
        weights, mask = drawn.points[:, order], mask[order]
        starts = np.flatnonzero(np.append(True, np.diff(own[order]) != 0))
        inside = np.add.reduceat(weights * mask, starts, axis=1)
        outside = np.add.reduceat(weights * ~mask, starts, axis=1)
        below = np.cumsum(outside, axis=1) - outside
        pairs = inside.sum(axis=1) * outside.sum(axis=1)
        won = (inside * (below + outside / 2)).sum(axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            areas[:, model] = won / pairs
    missing = np.isnan(areas)  # a resample without members of a model leaves that model out
    weights = drawn.models * ~missing
    total = (weights * np.where(missing, 0, areas)).sum(axis=1)
    with np.errstate(invalid="ignore"):
        return _estimate(total / weights.sum(axis=1))


def pooled_tpr(scores, members, fpr: float, drawn: Resamples) -> Estimate:
    """Pool the scores of all models and read off the true positive rate at a false positive rate.

    Args:
        scores: Comparable between models, as likelihood ratios are. Shape ``(models, points)``.
        members: Which point was a member for which model. Shape ``(models, points)``.
        fpr: The false positive rate not to be exceeded.
        drawn: See :func:`resamples`.

    Returns:
        The rate of `flatbook.membership.roc` over all pairs of a model and a point.

    Raises:
        ValueError: As for :func:`mean_auc`, or if ``fpr`` is out of range.

    Example:
        >>> scores, members = np.array([[3, 1, 2], [3, 1, 2]]), np.array([[1, 0, 0], [0, 0, 1]])
        >>> pooled_tpr(scores, members, 0.25, resamples(2, 3)).value
        0.5
    """
    fpr = checks.fraction("fpr", fpr)
    scores, flags = _paired(scores, members, drawn)
    order = np.argsort(-scores.ravel(), kind="stable")
    ordered, mask = scores.ravel()[order], flags.ravel()[order]
    model, point = np.unravel_index(order, scores.shape)
    ends = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))
    all_hits = ((drawn.models @ flags.astype(np.int64)) * drawn.points).sum(axis=1)
    all_alarms = ((drawn.models @ (~flags).astype(np.int64)) * drawn.points).sum(axis=1)
    rates = np.empty(len(drawn.models))
    step = max(1, _ENTRIES // order.size)
    for start in range(0, len(rates), step):
        rows = slice(start, start + step)
        limit = fpr * all_alarms[rows, None]
        size = max(64, round(4 * fpr * order.size))
        while True:  # the strictest scores decide, unless few non-members were drawn among them
            last = ends[: np.searchsorted(ends, size) + 1]
            kept = slice(last[-1] + 1)
            weights = drawn.models[rows][:, model[kept]] * drawn.points[rows][:, point[kept]]
            hits = np.cumsum(weights * mask[kept], axis=1)[:, last]
            alarms = np.cumsum(weights * ~mask[kept], axis=1)[:, last]
            if len(last) == len(ends) or (alarms[:, -1:] > limit).all():
                break
            size *= 4
        with np.errstate(invalid="ignore"):
            rates[rows] = np.where(alarms <= limit, hits, 0).max(axis=1) / all_hits[rows]
    return _estimate(rates)


def mean_rate(flags, chosen, drawn: Resamples) -> Estimate:
    """Compute the share of chosen pairs of a model and a point that have a property.

    Args:
        flags: Which pairs have it, or any number to be averaged. Shape ``(models, points)``.
        chosen: Which pairs count. Shape ``(models, points)``.
        drawn: See :func:`resamples`.

    Raises:
        ValueError: If the shapes disagree or no pair is chosen.

    Example:
        >>> mean_rate(np.eye(2), np.ones((2, 2)), resamples(2, 2)).value
        0.5
    """
    shape = drawn.models.shape[1], drawn.points.shape[1]
    values = as_array("flags", flags, shape).astype(np.float64)
    counted = flags_array("chosen", chosen, shape).astype(np.float64)
    if not counted.any():
        raise ValueError("chosen must choose a pair; got none.")
    total = ((drawn.models @ (values * counted)) * drawn.points).sum(axis=1)
    with np.errstate(invalid="ignore"):
        return _estimate(total / ((drawn.models @ counted) * drawn.points).sum(axis=1))


def _paired(scores, members, drawn):
    shape = drawn.models.shape[1], drawn.points.shape[1]
    value = checks.tensor("scores", scores, shape, floating=False).detach().cpu().double()
    if value.isnan().any():
        raise ValueError("scores must be numbers or infinite; got nan.")
    flags = flags_array("members", members, shape)
    one_sided = flags.all(axis=1) | ~flags.any(axis=1)
    if one_sided.any():
        raise ValueError(
            "members must hold both members and non-members of each model; "
            f"model {one_sided.argmax()} has only one kind."
        )
    return value.numpy(), flags


def _estimate(values) -> Estimate:
    return Estimate(float(values[0]), values[1:])
