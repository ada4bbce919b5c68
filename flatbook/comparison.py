"""Are two attacks different? Intervals by resampling models and points together."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flatbook import checks
from flatbook.arrays import as_array, flags_array, listed

__all__ = [
    "Estimate",
    "Resamples",
    "mean_auc",
    "mean_rate",
    "over_points",
    "point_resamples",
    "pooled_tpr",
    "resamples",
]

_ENTRIES = 2**20  # of the weights of pooled scores held at once


@dataclass(frozen=True, eq=False)
class Resamples:
    """How often each model and each point is drawn in each resample.

    A pair of a model and a point counts as often as the two numbers' product. The first row is the
    sample as it is, all ones.

    Attributes:
        models: Shape ``(1 + draws, models)``.
        points: Shape ``(1 + draws, points)``.
    """

    models: np.ndarray
    points: np.ndarray


@dataclass(frozen=True, eq=False)
class Estimate:
    """A number and what it was in each resample.

    ``a - b``, and :meth:`of` for any other function, take the two resample by resample: what a
    resample does to both cancels, so the interval of a difference is narrower than those of its
    parts suggest. Both must come from equal resamples.

    Attributes:
        value: Of the sample itself.
        draws: Of its resamples; nan where one left nothing to compute. Shape ``(draws,)``.
    """

    value: float
    draws: np.ndarray

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Return the percentile interval: quantiles of the draws.

        Args:
            level: Its nominal coverage.

        Returns:
            The lower and the upper end; nan if a draw is.

        Raises:
            ValueError: If ``level`` is not strictly between 0 and 1.
        """
        if not 0 < checks.fraction("level", level) < 1:
            raise ValueError(f"level must lie strictly between 0 and 1; got {level}.")
        low, high = np.quantile(self.draws, [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)

    def __sub__(self, other: "Estimate") -> "Estimate":
        if len(self.draws) != len(other.draws):
            raise ValueError(
                "estimates must come from the same resamples to be subtracted; "
                f"got {len(self.draws)} and {len(other.draws)} draws."
            )
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

    Returns:
        How often each model and each point is drawn.

    Raises:
        ValueError: If a number is out of range.

    Reference:
        Owen (2007). The pigeonhole bootstrap. Annals of Applied Statistics.

    Example:
        >>> resamples(4, 100, draws=2).points.sum(axis=1)
        array([100, 100, 100])
    """
    of_models, of_points = _streams(seed)
    return Resamples(
        _counts("num_models", num_models, draws, of_models),
        _counts("num_points", num_points, draws, of_points),
    )


def point_resamples(num_points: int, *, draws: int = 400, seed: int = 0) -> np.ndarray:
    """Draw the points of :func:`resamples` alone, for what has one number a point.

    Args:
        num_points: At least 2.
        draws: How many.
        seed: Of the draws.

    Returns:
        How often each point is drawn; all ones in the first row. Shape ``(1 + draws, points)``.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> np.array_equal(point_resamples(9, draws=3), resamples(4, 9, draws=3).points)
        True
    """
    return _counts("num_points", num_points, draws, _streams(seed)[1])


def _streams(seed):
    return np.random.default_rng(checks.count("seed", seed, at_least=0)).spawn(2)


def _counts(name, size, draws, stream):
    size = checks.count(name, size, at_least=2)
    drawn = stream.multinomial(size, np.full(size, 1 / size), checks.count("draws", draws))
    return np.concatenate([np.ones((1, size), dtype=np.int64), drawn])


def mean_auc(scores, members, drawn: Resamples) -> Estimate:
    """Average over models the area under the curve of an attack on each.

    Scores of different models are never compared, so they need no common scale. In a resample
    each area is that of its points, repeated as often as they were drawn; a model that has then
    no member or no other left is left out of the mean.

    Args:
        scores: Higher for members; may be infinite. Shape ``(models, points)``.
        members: Which point was a member for which model. Shape ``(models, points)``.
        drawn: See :func:`resamples`.

    Returns:
        The mean of `flatbook.membership.roc`'s areas; a draw is nan if it left out every model.

    Raises:
        ValueError: If the shapes disagree, a score is nan, or a model has only members or none.

    Example:
        >>> scores, members = np.array([[3, 1, 2], [3, 1, 2]]), np.array([[1, 0, 0], [0, 0, 1]])
        >>> mean_auc(scores, members, resamples(2, 3)).value
        0.75
    """
    scores, flags = _paired(scores, members, drawn)
    areas = np.empty(drawn.models.shape)
    drawn_points = np.ascontiguousarray(drawn.points.T, dtype=np.float64)  # whole numbers: exact
    outside = np.empty((scores.shape[1] + 1, len(areas)))
    for model, (own, mask) in enumerate(zip(scores, flags, strict=True)):
        others = np.flatnonzero(~mask)
        others = others[np.argsort(own[others])]
        below = outside[: len(others) + 1]  # how many draws of others lie below each place
        below[0] = 0
        np.cumsum(drawn_points[others], axis=0, out=below[1:])
        weights = drawn_points[mask]
        first, last = (np.searchsorted(own[others], own[mask], side=s) for s in ("left", "right"))
        won = np.einsum("pr,pr->r", weights, below[first])
        tied = first != last
        if tied.any():  # an other with the same score is half below
            level = below[last[tied]] - below[first[tied]]
            won += np.einsum("pr,pr->r", weights[tied], level) / 2
        with np.errstate(invalid="ignore", divide="ignore"):
            areas[:, model] = won / (weights.sum(axis=0) * below[-1])
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
        fpr: The false positive rate not to be exceeded, in [0, 1].
        drawn: See :func:`resamples`.

    Returns:
        The rate of `flatbook.membership.roc` over all pairs of a model and a point; in a
        resample the threshold is chosen anew. A draw without members or without others is nan.

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
    all_hits, all_alarms = _drawn_pairs(drawn, flags), _drawn_pairs(drawn, ~flags)
    rates = np.empty(len(drawn.models))
    step = max(1, _ENTRIES // order.size)
    for start in range(0, len(rates), step):
        rows = slice(start, start + step)
        size = max(64, round(4 * fpr * order.size))
        while True:  # the strictest scores decide, unless few non-members were drawn among them
            last = ends[: np.searchsorted(ends, size) + 1]
            kept = slice(last[-1] + 1)
            weights = drawn.models[rows][:, model[kept]] * drawn.points[rows][:, point[kept]]
            hits = np.cumsum(weights * mask[kept], axis=1)[:, last]
            alarms = np.cumsum(weights * ~mask[kept], axis=1)[:, last]
            with np.errstate(invalid="ignore"):
                # The quotient itself, as in `roc`: 0.29 of 100 rounds to less than 29.
                allowed = alarms / all_alarms[rows, None] <= fpr
                if len(last) == len(ends) or not allowed[:, -1].any():
                    break
            size *= 4
        with np.errstate(invalid="ignore"):
            rates[rows] = np.where(allowed, hits, 0).max(axis=1) / all_hits[rows]
    rates[all_alarms == 0] = np.nan
    return _estimate(rates)


def mean_rate(flags, chosen, drawn: Resamples) -> Estimate:
    """Compute the share of chosen pairs of a model and a point that have a property.

    Args:
        flags: Which pairs have it, or any number to be averaged. Shape ``(models, points)``.
        chosen: Which pairs count. Shape ``(models, points)``.
        drawn: See :func:`resamples`.

    Returns:
        The mean over chosen pairs; a draw is nan if it has none.

    Raises:
        ValueError: If the shapes disagree, a number is not finite, or no pair is chosen.

    Example:
        >>> mean_rate(np.eye(2), np.ones((2, 2)), resamples(2, 2)).value
        0.5
    """
    shape = _shape_of(drawn)
    values = as_array("flags", flags, shape).astype(np.float64)
    counted = flags_array("chosen", chosen, shape).astype(np.float64)
    if not counted.any():
        raise ValueError("chosen must choose a pair; got none.")
    with np.errstate(invalid="ignore"):
        return _estimate(_drawn_pairs(drawn, values * counted) / _drawn_pairs(drawn, counted))


def over_points(values, points) -> Estimate:
    """Average one number a point.

    Args:
        values: Shape ``(points,)``.
        points: How often each is drawn, from :func:`point_resamples`. Shape
            ``(1 + draws, points)``.

    Returns:
        The mean.

    Raises:
        ValueError: If the shapes disagree or a number is not finite.

    Example:
        >>> over_points([1.0, 0.0, 0.0, 0.0], point_resamples(4, draws=2)).value
        0.25
    """
    points = as_array("points", points, ("draws", "points"))
    numbers = as_array("values", values, (points.shape[1],)).astype(np.float64)
    return _estimate(points @ numbers / points.sum(axis=1))


def _shape_of(drawn) -> tuple[int, int]:
    checks.instance("drawn", drawn, Resamples, "resamples")
    return drawn.models.shape[1], drawn.points.shape[1]


def _drawn_pairs(drawn, values):
    """Return the sum of values in each resample."""
    return ((drawn.models @ values.astype(np.float64)) * drawn.points).sum(axis=1)


def _paired(scores, members, drawn):
    shape = _shape_of(drawn)
    value = checks.tensor("scores", listed("scores", scores), shape, floating=False).detach().cpu()
    if value.is_complex():
        raise ValueError(f"scores must be real; got {value.dtype}.")
    if value.isnan().any():
        raise ValueError("scores must be numbers or infinite; got nan.")
    flags = flags_array("members", members, shape)
    one_sided = flags.all(axis=1) | ~flags.any(axis=1)
    if one_sided.any():
        raise ValueError(
            "members must hold both members and non-members of each model; "
            f"model {one_sided.argmax()} has only one kind."
        )
    return value.double().numpy(), flags


def _estimate(values) -> Estimate:
    return Estimate(float(values[0]), values[1:])
