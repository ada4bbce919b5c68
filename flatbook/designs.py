"""Inclusion designs: which model is trained on which point."""

import numpy as np

from flatbook import checks

__all__ = ["balanced_design", "subset_design"]


def balanced_design(num_models: int, num_points: int, *, seed: int = 0) -> np.ndarray:
    """Draw which model is trained on which point, each point in exactly half of the models.

    The models of each point are drawn uniformly and independently of other points, so the sizes
    of training sets vary a little around half of the points.

    Args:
        num_models: Even.
        num_points: At least 1.
        seed: Of the draw.

    Returns:
        Booleans. Shape ``(models, points)``.

    Raises:
        ValueError: If a number is out of range or ``num_models`` is odd.

    Example:
        >>> balanced_design(4, 3).sum(axis=0)
        array([2, 2, 2])
    """
    models = checks.count("num_models", num_models, at_least=2)
    if models % 2:
        raise ValueError(
            f"num_models must be even, so that each point is in half of them; got {models}."
        )
    points = checks.count("num_points", num_points)
    half = np.arange(models) < models // 2
    return _generator(seed).permuted(np.repeat(half[:, None], points, axis=1), axis=0)


def subset_design(
    num_models: int, num_points: int, fraction: float, *, seed: int = 0
) -> np.ndarray:
    """Draw which model is trained on which point, each model on the same number of points.

    The points of each model are drawn uniformly and independently of other models, as for
    `flatbook.memorization`.

    Args:
        num_models: At least 1.
        num_points: At least 1.
        fraction: The share of the points that a model is trained on, rounded to whole points.
        seed: Of the draw.

    Returns:
        Booleans. Shape ``(models, points)``.

    Raises:
        ValueError: If a number is out of range or the share is less than half a point.

    Example:
        >>> subset_design(3, 10, 0.7).sum(axis=1)
        array([7, 7, 7])
    """
    models = checks.count("num_models", num_models)
    points = checks.count("num_points", num_points)
    size = round(checks.fraction("fraction", fraction) * points)
    if size == 0:
        raise ValueError(
            f"fraction must leave each model a point; got {fraction} of {points} points."
        )
    chosen = np.arange(points) < size
    return _generator(seed).permuted(np.repeat(chosen[None], models, axis=0), axis=1)


def _generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(checks.count("seed", seed, at_least=0))
