"""Who was in the training set: signals, attacks and their scores.

Everything is a function of arrays: logits, or one signal per point, of the model under attack (the
target) and of models trained on known subsets of the same points (the shadows or references). The
higher a score, the more likely its point is a member. Inputs may be NumPy arrays or torch tensors;
one number per point comes back in float64, as a tensor on the CPU if any input was a tensor and as
an array otherwise.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from scipy.special import betaincinv, log_ndtr, ndtr
from torch import Tensor

from flatbook import checks

__all__ = [
    "Mode",
    "Rate",
    "Roc",
    "Variance",
    "Variant",
    "balanced_accuracy",
    "class_thresholds",
    "clopper_pearson",
    "confidence",
    "lira",
    "logit_signal",
    "modified_entropy",
    "rmia",
    "roc",
    "threshold_attack",
]

Mode = Literal["online", "offline"]
Variance = Literal["per-example", "pooled"]
Variant = Literal["paper", "reference"]

_BLOCK = 16_384  # predictions taken at a time
_LEAST_SPREAD = 1e-30  # stands for a spread of 0, so that scores keep their sign and stay finite


# --- signals -----------------------------------------------------------------------------------


def logit_signal(logits, labels):
    r"""Compute the log-odds of the label, the signal that is closest to normal across models.

    .. math:: \phi = \log \frac{p_y}{1 - p_y} = z_y - \log \sum_{i \ne y} e^{z_i}

    Probabilities are never formed: 1 − p rounds to 0 once a model is certain.

    Args:
        logits: Shape ``(points, classes)``, ``(points, queries, classes)``,
            ``(models, points, classes)`` or ``(models, points, queries, classes)``. Three axes are
            models first if the second is as long as ``labels``.
        labels: The true classes. Shape ``(points,)``, or that of the logits less the classes.

    Returns:
        In nats. The shape of the logits less the classes.

    Raises:
        ValueError: If the shapes disagree, there is a single class, a label is not one, or a logit
            is infinite or nan.

    Reference:
        Carlini et al. (2022). Membership inference attacks from first principles. IEEE S&P.

    Example:
        >>> logit_signal(np.array([[0.0, 0.0], [60.0, 0.0]]), np.array([1, 0]))
        array([ 0., 60.])
    """

    def log_odds(z, y):
        return z.gather(1, y)[:, 0] - _log_sum_without(z, y)

    return _by_rows(log_odds, logits, labels)


def confidence(logits, labels):
    """Compute the probability of the label, from the logits and in float64.

    Args:
        logits: As for :func:`logit_signal`.
        labels: As for :func:`logit_signal`.

    Returns:
        Between 0 and 1. The shape of the logits less the classes.

    Raises:
        ValueError: As for :func:`logit_signal`.

    Example:
        >>> confidence(np.zeros((1, 4)), np.array([2]))
        array([0.25])
    """

    def own_probability(z, y):
        return z.log_softmax(1).gather(1, y)[:, 0].exp()

    return _by_rows(own_probability, logits, labels)


def modified_entropy(logits, labels):
    r"""Compute the entropy of a prediction, modified so that it knows the label.

    .. math::
        -(1 - p_y) \log p_y - \sum_{i \ne y} p_i \log (1 - p_i)

    It is 0 for a prediction that is certain and right, and grows without bound for one that is
    certain and wrong. Higher is more uncertain: the score of its attack is the negative.

    Args:
        logits: As for :func:`logit_signal`.
        labels: As for :func:`logit_signal`.

    Returns:
        In nats, at least 0. The shape of the logits less the classes.

    Raises:
        ValueError: As for :func:`logit_signal`.

    Reference:
        Song and Mittal (2021). Systematic evaluation of privacy risks of machine learning models.
        USENIX Security.

    Example:
        Two classes, undecided: each term is log(2) / 2.

        >>> modified_entropy(np.zeros((1, 2)), np.array([0])) / np.log(2)
        array([1.])
    """

    def entropy(z, y):
        log_p = z.log_softmax(1)
        # For the top class the complement is the sum of the others, and p is one less that sum.
        top = z.argmax(1, keepdim=True)
        doubt = (_log_sum_without(z, top) - z.logsumexp(1))[:, None]
        log_rest = (-log_p.exp()).log1p().scatter(1, top, doubt)
        log_p = log_p.scatter(1, top, (-doubt.exp()).log1p())
        own = log_rest.gather(1, y).exp() * log_p.gather(1, y)
        others = (log_p.exp() * log_rest).scatter(1, y, 0.0)
        return -(own[:, 0] + others.sum(1))

    return _by_rows(entropy, logits, labels)


# --- attacks -----------------------------------------------------------------------------------


def class_thresholds(shadow_signals, design, labels):
    r"""Choose for each class the threshold that tells members best on the shadow models.

    .. math::
        \tau_c = \arg\max_\tau \; \Pr[\phi \ge \tau \mid \text{in}]
            - \Pr[\phi \ge \tau \mid \text{out}]

    over all pairs of a shadow model and a point of class c. The candidates are the signals
    themselves and ∞, which calls nobody a member; of equally good ones the greatest wins.

    Args:
        shadow_signals: Higher for members, such as :func:`logit_signal` or the negative of
            :func:`modified_entropy`. Queries are averaged. Shape ``(models, points)`` or
            ``(models, points, queries)``.
        design: Which model was trained on which point. Shape ``(models, points)``.
        labels: The classes of the points. Shape ``(points,)``.

    Returns:
        nan for a class without points. Shape ``(classes,)``, up to the greatest label.

    Raises:
        ValueError: If the shapes disagree, a signal is not finite, or a class is never in or never
            out of the shadows' training sets.

    Reference:
        Song and Mittal (2021). Systematic evaluation of privacy risks of machine learning models.
        USENIX Security.

    Example:
        >>> signals = np.array([[4.0, 1.0], [1.5, 2.0]])
        >>> class_thresholds(signals, np.array([[True, False], [False, True]]), np.zeros(2, int))
        array([2.])
    """
    shadows = _signals("shadow_signals", shadow_signals, ("models", "points"), queries=True)
    included = checked_design(design, *shadows.shape[:2], least=0)
    classes = whole("labels", labels, (shadows.shape[1],))
    if classes.min() < 0:
        raise ValueError(f"labels must not be negative; got {classes.min()}.")
    shadows = _query_mean(shadows, axes=2)
    thresholds = np.full(classes.max() + 1, np.nan)
    for c in np.unique(classes):
        own = classes == c
        flags = included[:, own]
        if flags.all() or not flags.any():
            side = "left out of" if flags.all() else "included in"
            raise ValueError(
                f"design must have points of each class in and out; class {c} is "
                f"{side} no shadow model."
            )
        values, hits, alarms = _cumulated(shadows[:, own].ravel(), flags.ravel())
        thresholds[c] = values[np.argmax(hits * alarms[-1] - alarms * hits[-1])]
    return returned(thresholds, shadow_signals, design, labels)


def threshold_attack(target_signal, shadow_signals, design, labels):
    r"""Score points by how far their signal exceeds the threshold of their class.

    .. math:: s = \phi - \tau_y

    with the thresholds of :func:`class_thresholds`, which never saw the target. A point is called a
    member if its score is at least 0; :func:`balanced_accuracy` of that is an honest figure, unlike
    :attr:`Roc.balanced_accuracy`.

    Args:
        target_signal: Signals of the model under attack. Shape ``(points,)`` or
            ``(points, queries)``.
        shadow_signals: Those of the shadow models. Shape ``(models, points)`` or
            ``(models, points, queries)``.
        design: Which model was trained on which point. Shape ``(models, points)``.
        labels: The classes of the points. Shape ``(points,)``.

    Returns:
        −∞ where the class has threshold ∞. Shape ``(points,)``.

    Raises:
        ValueError: As for :func:`class_thresholds`.

    Example:
        >>> signals = np.array([[4.0, 1.0], [1.5, 2.0]])
        >>> design = np.array([[True, False], [False, True]])
        >>> threshold_attack(np.array([3.0, 1.0]), signals, design, np.zeros(2, int)) >= 0
        array([ True, False])
    """
    target = _signals("target_signal", target_signal, ("points",), queries=True)
    _signals("shadow_signals", shadow_signals, ("models", *target.shape))
    thresholds = np.asarray(class_thresholds(shadow_signals, design, labels))
    scores = _query_mean(target, axes=1) - thresholds[whole("labels", labels, (len(target),))]
    return returned(scores, target_signal, shadow_signals, design, labels)


def lira(
    target_signal,
    shadow_signals,
    design,
    *,
    mode: Mode = "online",
    variance: Variance = "per-example",
    variant: Variant = "paper",
    log: bool = False,
):
    r"""Score each point by a likelihood ratio: was this signal made by a model that saw it?

    Normal laws are fitted, for each point and query, to the signals of the shadow models that were
    trained on the point, :math:`N(\mu_{\text{in}}, \sigma_{\text{in}}^2)`, and of the others,
    :math:`N(\mu_{\text{out}}, \sigma_{\text{out}}^2)`. With the mean over queries,

    .. math::
        s_{\text{online}} &= \log N(\phi; \mu_{\text{in}}, \sigma_{\text{in}}^2)
            - \log N(\phi; \mu_{\text{out}}, \sigma_{\text{out}}^2), \\
        s_{\text{offline}} &= 1 - \Pr[N(\mu_{\text{out}}, \sigma_{\text{out}}^2) > \phi].

    Spreads are those of maximum likelihood, dividing by the number of models. The pooled one is
    one number for all points, but still one for *in* and one for *out*: the root of the mean
    squared distance from each point's own mean.

    The ``reference`` variant does what the code published with the paper does. It centres each law
    at the median; keeps no more shadow models for a point than the least frequent point has, the
    first ones; adds :math:`10^{-30}` to each spread; pools by one standard deviation of all signals
    around their *common* mean, so that differences between points count as spread; takes the *in*
    one for both laws when pooling online; and offline scores by
    :math:`-\log N(\phi; \mu_{\text{out}}, \sigma_{\text{out}}^2)`, for which a signal far *below*
    the others is a sign of membership too.

    Where all signals of a law agree, :math:`10^{-30}` stands for its spread of 0: a score then has
    the sign of its limit, and a constant signal scores 0.

    Args:
        target_signal: Signals of the model under attack, usually :func:`logit_signal`. Shape
            ``(points,)`` or ``(points, queries)``.
        shadow_signals: Those of the shadow models. Shape ``(models, points)`` or
            ``(models, points, queries)``.
        design: Which model was trained on which point. Shape ``(models, points)``.
        mode: Whether shadow models that saw the point may be used.
        variance: Whether each point has its own spread; with few models pool it.
        variant: As the paper writes it, or as its code computes it.
        log: Return the offline score of the paper as :math:`-\log \Pr[N > \phi]`, which keeps
            apart what rounds to 1 beyond eight spreads; the other scores are logarithms anyway.

    Returns:
        Shape ``(points,)``.

    Raises:
        ValueError: If the shapes disagree, a signal is not finite, an option is unknown, or a
            point is in or out of too few shadow models: a spread of its own needs two.

    Reference:
        Carlini et al. (2022). Membership inference attacks from first principles. IEEE S&P.

    Example:
        Means 4 and 0, spreads 1, and a signal of 4: half of 4².

        >>> shadows = np.array([[3.0], [5.0], [-1.0], [1.0]])
        >>> design = np.array([[True], [True], [False], [False]])
        >>> lira(np.array([4.0]), shadows, design)
        array([8.])
        >>> lira(np.array([0.0]), shadows, design, mode="offline")
        array([0.5])
    """
    checks.choice("mode", mode, get_args(Mode))
    checks.choice("variance", variance, get_args(Variance))
    checks.choice("variant", variant, get_args(Variant))
    phi = _signals("target_signal", target_signal, ("points",), queries=True)
    shadows = _signals("shadow_signals", shadow_signals, ("models", *phi.shape))
    pooled, online = variance == "pooled", mode == "online"
    included = checked_design(
        design, *shadows.shape[:2], least=1 if pooled else 2, sides=("in", "out")[not online :]
    )
    if phi.ndim == 1:
        phi, shadows = phi[:, None], shadows[..., None]
    fit = _fitted if variant == "paper" else _fitted_as_released
    from_out, spread_out = fit(phi, shadows, ~included, pooled)
    if online:
        from_in, spread_in = fit(phi, shadows, included, pooled)
        if pooled and variant == "reference":
            spread_out = spread_in
        z_in, z_out = from_in / spread_in, from_out / spread_out
        scores = (z_out**2 - z_in**2) / 2 + np.log(spread_out / spread_in)
    else:
        z_out = from_out / spread_out
        if variant == "reference":
            scores = z_out**2 / 2 + np.log(spread_out) + np.log(2 * np.pi) / 2
        else:
            scores = -log_ndtr(-z_out) if log else ndtr(z_out)
    return returned(scores.mean(axis=1), target_signal, shadow_signals, design)


def _fitted(phi, shadows, chosen, pooled):
    """Return how far phi is from the chosen models' mean, and their spread, in one pass."""
    counts = chosen.sum(axis=0)
    if pooled and counts.max() < 2:
        raise ValueError(
            "design must have a point that two models share, in and out, to pool a variance; "
            "got one model at most."
        )
    # Measured from one of their own number, equal signals differ by exactly 0, and the squares
    # lose no more digits than there are models.
    anchor = shadows[chosen.argmax(axis=0), np.arange(len(counts))].astype(np.float64).ravel()
    own = phi.ravel() - anchor  # a mean far from 0 would round
    total, squares, distance = np.zeros((3, anchor.size))
    for signals, mask in zip(shadows, chosen, strict=True):
        np.subtract(signals.ravel(), anchor, out=distance)
        distance *= np.repeat(mask, phi.shape[1])
        total += distance
        distance *= distance
        squares += distance
    counts = np.repeat(counts, phi.shape[1])
    mean = total / counts
    scatter = squares - total * mean
    variance = scatter.sum() / counts.sum() if pooled else (scatter / counts).reshape(phi.shape)
    spread = np.sqrt(np.maximum(variance, 0))
    return (own - mean).reshape(phi.shape), np.maximum(spread, _LEAST_SPREAD)


def _fitted_as_released(phi, shadows, chosen, pooled):
    models = np.argsort(~chosen, axis=0, kind="stable")[: chosen.sum(axis=0).min()]
    kept = np.take_along_axis(shadows, models[..., None], axis=0).astype(np.float64)
    centre = np.median(kept, axis=0)
    kept -= kept[:1, :1, :1] if pooled else kept[:1].copy()  # equal signals have a spread of 0
    return phi - centre, kept.std(axis=None if pooled else 0) + _LEAST_SPREAD


def rmia(
    target_conf,
    ref_conf,
    design,
    population_conf,
    ref_population_conf,
    *,
    gamma: float = 1.0,
    a: float = 1.0,
):
    r"""Score each point by the share of a population that it beats in a likelihood ratio.

    .. math::
        s(x) = \frac1M \sum_z 1\!\left[\frac{r(x)}{r(z)} > \gamma\right],
        \qquad r(x) = \frac{p(x)}{\bar p(x)},
        \qquad \bar p(x) = \tfrac12 \bigl[(1 + a) \, \bar p_{\text{out}}(x) + (1 - a)\bigr]

    with the mean :math:`\bar p_{\text{out}}` over the reference models that were not trained on x;
    the population points z are in no training set, so for them it runs over all references. This
    is the offline form. Sorting the r(z) makes it cost N log M instead of N M, and the search
    evaluates the quotient r(x)/r(z) itself, so that ties come out as in the definition.

    Args:
        target_conf: Probability of the label under the model attacked, from :func:`confidence`.
            Queries are averaged. Shape ``(points,)`` or ``(points, queries)``.
        ref_conf: Under each reference model. Shape ``(models, points)`` or
            ``(models, points, queries)``.
        design: Which reference was trained on which point. Shape ``(models, points)``.
        population_conf: Under the model attacked, of fresh points. Shape ``(population,)`` or
            ``(population, queries)``.
        ref_population_conf: Under each reference. Shape ``(models, population)`` or
            ``(models, population, queries)``.
        gamma: By how much a point must beat a population point; above 0, usually at least 1.
        a: From 0 to 1. Models that saw a point are taken to give it
            :math:`a \, \bar p_{\text{out}} + 1 - a`, and :math:`\bar p` averages over both kinds.

    Returns:
        Multiples of 1/M, from 0 to 1. Shape ``(points,)``.

    Raises:
        ValueError: If the shapes disagree, a confidence is outside [0, 1], an option is out of
            range, a point is in all references, or a mean confidence is 0, as rounded softmax
            outputs may be.

    Reference:
        Zarifzadeh et al. (2024). Low-cost high-power membership inference attacks. ICML.

    Example:
        r(x) = 3, and r(z) is 1 and 5.

        >>> rmia([0.9], [[0.3]], [[False]], [0.5, 0.5], [[0.5, 0.1]])
        array([0.5])
    """
    gamma, a = checks.positive("gamma", gamma), checks.fraction("a", a)
    target = _confidences("target_conf", target_conf, ("points",), queries=True)
    refs = _confidences("ref_conf", ref_conf, ("models", *target.shape))
    included = checked_design(design, *refs.shape[:2], sides=("out",))
    population = _confidences("population_conf", population_conf, ("population",), queries=True)
    ref_population = _confidences(
        "ref_population_conf", ref_population_conf, (len(refs), *population.shape)
    )

    def ratio(name, own, references, out):
        total = np.zeros(len(own))
        for row, mask in zip(references, out, strict=True):
            total += _query_mean(row, axes=1) * mask
        mean = 0.5 * ((1 + a) * (total / out.sum(axis=0)) + (1 - a))
        if not mean.min() > 0:
            raise ValueError(
                f"{name} must give each point a mean confidence above 0; got 0 for point "
                f"{mean.argmin()}. Compute confidences from logits in float64, or take a below 1."
            )
        return _query_mean(own, axes=1) / mean

    of_x = ratio("ref_conf", target, refs, ~included)
    everywhere = np.ones((len(refs), 1), dtype=bool)
    of_z = ratio("ref_population_conf", population, ref_population, everywhere)
    return returned(
        _beaten(of_x, of_z, gamma) / len(of_z),
        *(target_conf, ref_conf, design, population_conf, ref_population_conf),
    )


def _beaten(x, z, gamma):
    """Count for each x the z with x / z > gamma, which are the least ones, by halving."""
    size = 1 << len(z).bit_length()
    ascending = np.full(size - 1, np.inf)  # no x beats infinity
    ascending[: len(z)] = np.sort(z)
    count = np.zeros(len(x), dtype=np.intp)
    # A quotient of 0 or infinity by itself is nan and beats nothing, here as in the definition.
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        while size := size >> 1:
            count += size * (x / ascending.take(count + (size - 1)) > gamma)
    return count


# --- how well an attack does -------------------------------------------------------------------


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
    scores = _listed("scores", scores)
    value = checks.tensor("scores", scores, (None,) * max(np.ndim(scores), 1), floating=False)
    if value.is_complex():
        raise ValueError(f"scores must be real; got {value.dtype}.")
    if value.isnan().any():
        raise ValueError("scores must be numbers or infinite; got nan.")
    flags = _both_kinds(members, tuple(value.shape)).ravel()
    thresholds, hits, alarms = _cumulated(value.detach().cpu().double().numpy().ravel(), flags)
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
    called = _flags(
        "predicted", predicted, (None,) * max(np.ndim(_listed("predicted", predicted)), 1)
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


def _cumulated(scores, flags):
    """Return ∞ and the distinct scores, descending, with how many flagged and others reach each."""
    order = np.argsort(-scores, kind="stable")
    scores, flags = scores[order], flags[order]
    last = np.flatnonzero(np.append(scores[1:] != scores[:-1], True))
    hits = np.cumsum(flags)[last]
    values, hits, alarms = scores[last], hits, last + 1 - hits
    return np.append(np.inf, values), np.append(0, hits), np.append(0, alarms)


# --- the door ----------------------------------------------------------------------------------


def checked_design(design, models, points, *, least=1, sides=("in", "out")) -> np.ndarray:
    """Return a design as booleans in which each point has ``least`` models on each side."""
    included = _flags("design", design, (models, points))
    for side in sides:
        counts = (included if side == "in" else ~included).sum(axis=0)
        if counts.min() < least:
            raise ValueError(
                f"design must have at least {least} model{'s' * (least > 1)} {side} for each "
                f"point; got {counts.min()} for point {counts.argmin()} (in: trained on it, out: "
                "not)."
            )
    return included


def as_array(name, value, shape) -> np.ndarray:
    """Return finite real numbers as an array of float32 or float64 of a given shape."""
    value = checks.tensor(name, _listed(name, value), shape, floating=False).detach().cpu()
    if value.is_complex():
        raise ValueError(f"{name} must be real; got {value.dtype}.")
    if not value.is_floating_point():
        value = value.double()
    elif value.dtype not in (torch.float32, torch.float64):
        value = value.float()
    if not value.sum().isfinite() and not value.isfinite().all():
        raise ValueError(f"{name} must be finite; got inf or nan.")
    return value.numpy()


def _listed(name, value):
    """Make an array of a list, whose floats torch would round to float32."""
    try:
        return np.asarray(value) if isinstance(value, list | tuple) else value
    except ValueError as error:
        raise ValueError(
            f"{name} must be a tensor or array of numbers; got ragged rows."
        ) from error


def _signals(name, value, shape, *, queries=False):
    if queries and np.ndim(_listed(name, value)) == len(shape) + 1:
        shape = (*shape, "queries")
    return as_array(name, value, shape)


def _confidences(name, value, shape, *, queries=False):
    value = _signals(name, value, shape, queries=queries)
    if value.min() < 0 or value.max() > 1:
        raise ValueError(
            f"{name} must lie in [0, 1]; got {value.min():.4g} to {value.max():.4g}. "
            "Take flatbook.membership.confidence of logits."
        )
    return value


def _flags(name, value, shape):
    value = checks.tensor(name, _listed(name, value), shape, floating=False).detach().cpu()
    if value.dtype != torch.bool:
        flags = value != 0
        if not (flags == value).all():
            raise ValueError(f"{name} must hold True and False, or 1 and 0; got other numbers.")
        value = flags
    return value.numpy()


def _both_kinds(members, shape):
    flags = _flags("members", members, shape)
    if flags.all() or not flags.any():
        raise ValueError(
            "members must hold both members and non-members; "
            f"got {flags.sum()} and {(~flags).sum()}."
        )
    return flags


def whole(name, value, shape) -> np.ndarray:
    """Return whole numbers, such as labels, as an array of int64."""
    value = checks.tensor(name, _listed(name, value), shape, floating=False)
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise ValueError(f"{name} must hold whole numbers; got {value.dtype}.")
    return value.cpu().numpy().astype(np.int64)


def _query_mean(value, *, axes):
    return value.mean(axis=-1, dtype=np.float64) if value.ndim > axes else value


def _by_rows(function, logits, labels):
    """Apply a function of float64 logits and labels a block at a time; the logits may be many."""
    z, labels_given = _listed("logits", logits), _listed("labels", labels)
    axes = np.ndim(z)
    z = checks.tensor("logits", z, (*(None,) * (min(max(axes, 2), 4) - 2), "points", "classes"))
    z = z.detach().cpu()
    *shape, classes = z.shape
    if classes < 2:
        raise ValueError(f"logits must have at least 2 classes; got {classes}.")
    if np.ndim(labels_given) == axes - 1:
        y = checks.tensor("labels", labels_given, tuple(shape), floating=False)
        y = checks.labels("labels", y.reshape(-1), classes)
    else:
        models_first = axes == 4 or np.shape(labels_given) == (shape[1],)
        points = shape[models_first]
        y = checks.labels("labels", labels_given, classes, samples=points)
        y = y.view(*(1,) * models_first, points, *(1,) * (axes - 2 - models_first))
        y = y.expand(shape).reshape(-1)
    values = [
        function(some.double(), own[:, None])
        for some, own in zip(
            z.reshape(-1, classes).split(_BLOCK), y.cpu().split(_BLOCK), strict=True
        )
    ]
    return returned(torch.cat(values).view(shape).numpy(), logits, labels)


def _log_sum_without(z: Tensor, index: Tensor) -> Tensor:
    return z.scatter(1, index, -torch.inf).logsumexp(1)


def returned(result, *given):
    """Return an array as a tensor if any input was one."""
    return torch.from_numpy(result) if any(isinstance(g, Tensor) for g in given) else result
