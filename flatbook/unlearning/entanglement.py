"""How entangled two sets are in feature space. Higher is more entangled: harder to tell apart."""

from typing import Literal

import numpy as np

from flatbook import checks
from flatbook.arrays import as_array

_PIVOTS = 10**8  # of the network simplex, beyond any problem that fits into memory


def variance_entanglement(
    retain_features,
    forget_features,
    *,
    center: Literal["midpoint", "pooled"] = "midpoint",
    normalise: bool = False,
) -> float:
    r"""Compare the spread within the sets to that between their means.

    .. math::
        E_{\mathrm{Var}} = \frac{\overline{\|\varphi_R - \mu_R\|^2}
            + \overline{\|\varphi_F - \mu_F\|^2}}
            {\tfrac12 \bigl(\|\mu_R - \mu\|^2 + \|\mu_F - \mu\|^2\bigr)},
        \qquad \mu = \tfrac12 (\mu_R + \mu_F)

    Around the midpoint the denominator is :math:`\tfrac14 \|\mu_R - \mu_F\|^2`, whatever the sizes
    of the sets. Higher is more entangled; 0 for two points, infinite for equal means.

    Args:
        retain_features: Shape ``(retained, features)``.
        forget_features: Shape ``(forgotten, features)``.
        center: ``"pooled"`` takes for μ the mean of all rows, as public code does. A set that is
            small lies far from it, a large one close, and the value depends on their sizes.
        normalise: Scale each row to length 1 first, as public code does.

    Returns:
        At least 0; may be infinite.

    Raises:
        ValueError: If an array is empty or not finite, widths differ, or a row to normalise is 0.

    Reference:
        Goldblum et al. (2020). Unraveling meta-learning: understanding feature representations for
        few-shot tasks. ICML; Zhao et al. (2024). What makes unlearning hard and what to do about
        it. NeurIPS.

    Example:
        Spreads of 1 and 1, and means that lie 4 apart.

        >>> variance_entanglement([[-1.0], [1.0]], [[3.0], [5.0]])
        0.5
    """
    checks.choice("center", center, ("midpoint", "pooled"))
    r, f = _features(retain_features, forget_features, normalise)
    mean_r, mean_f = r.mean(axis=0), f.mean(axis=0)
    pooled = (mean_r * len(r) + mean_f * len(f)) / (len(r) + len(f))
    mean = (mean_r + mean_f) / 2 if center == "midpoint" else pooled
    within = ((r - mean_r) ** 2).sum(axis=1).mean() + ((f - mean_f) ** 2).sum(axis=1).mean()
    between = (((mean_r - mean) ** 2).sum() + ((mean_f - mean) ** 2).sum()) / 2
    return float(within / between) if between > 0 else float("inf")


def wasserstein_entanglement(
    retain_features, forget_features, *, max_points: int | None = None, seed: int = 0
) -> float:
    r"""Measure how little it takes to carry one set onto the other.

    .. math:: E_W = 1 - \tfrac12 W_1

    with the exact Wasserstein distance between the rows, each scaled to length 1 and weighing
    alike, at Euclidean cost. No two unit vectors are farther apart than 2, so the value lies in
    [0, 1]: 1 for equal sets, 0 for opposite points. Features behind a ReLU are never negative and
    :math:`\sqrt2` apart at most, so theirs are at least 0.29. Public code divides the costs by the
    greatest that occurs instead, which makes values of different models incomparable.

    Higher is more entangled. Finite samples of one law are some distance apart as well: compare
    sets of the same sizes.

    Args:
        retain_features: Shape ``(retained, features)``.
        forget_features: Shape ``(forgotten, features)``.
        max_points: Draw as many rows of a larger set; time grows a little less than cubically.
        seed: Of that.

    Returns:
        In [0, 1].

    Raises:
        ValueError: If an array is empty or not finite, widths differ, or a row is 0.
        RuntimeError: If the solver gives up.

    Reference:
        Flamary et al. (2021). POT: Python optimal transport. JMLR.

    Example:
        Directions a right angle apart.

        >>> round(1 - wasserstein_entanglement([[2.0, 0.0]], [[0.0, 5.0]]), 6)  # half of root 2
        0.707107
    """
    from ot import emd2  # a second or two to import

    if max_points is not None:
        checks.count("max_points", max_points)
    random = np.random.default_rng(checks.count("seed", seed, at_least=0))
    r, f = (
        part
        if max_points is None or len(part) <= max_points
        else part[random.choice(len(part), max_points, replace=False)]
        for part in _features(retain_features, forget_features, True)
    )
    # From differences: the expanded square loses half the digits of small distances.
    cost = np.stack([np.sqrt(((row - f) ** 2).sum(axis=1)) for row in r])
    weights = [np.full(len(part), 1 / len(part)) for part in (r, f)]
    distance, log = emd2(*weights, cost, numItermax=_PIVOTS, log=True)
    if log["warning"] is not None:
        raise RuntimeError(f"the transport problem was not solved: {log['warning']}")
    return float(np.clip(1 - distance / 2, 0, 1))


def _features(retain, forget, normalise) -> tuple[np.ndarray, np.ndarray]:
    """Return both sets in float64, scaled to unit length where asked to."""
    r = as_array("retain_features", retain, ("retained", "features")).astype(np.float64)
    f = as_array("forget_features", forget, ("forgotten", r.shape[1])).astype(np.float64)
    if not normalise:
        return r, f
    scaled = []
    for name, rows in (("retain_features", r), ("forget_features", f)):
        largest = np.abs(rows).max(axis=1, keepdims=True)  # squares neither overflow nor vanish
        if not largest.all():
            raise ValueError(
                f"{name} must have no row of zeros, which has no direction; row "
                f"{int((largest[:, 0] == 0).argmax())} is one."
            )
        rows = rows / largest
        scaled.append(rows / np.sqrt((rows**2).sum(axis=1, keepdims=True)))
    return scaled[0], scaled[1]
