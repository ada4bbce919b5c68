"""Attacks by likelihood ratios: LiRA and RMIA."""

from typing import Literal, get_args

import numpy as np
from scipy.special import log_ndtr, ndtr

from flatbook import checks
from flatbook.arrays import checked_design, confidence_array, query_mean, returned, signal_array

__all__ = ["Mode", "Variance", "Variant", "lira", "rmia"]

Mode = Literal["online", "offline"]
Variance = Literal["per-example", "pooled"]
Variant = Literal["paper", "reference"]

_LEAST_SPREAD = 1e-30  # stands for a spread of 0, so that scores keep their sign and stay finite


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
    phi = signal_array("target_signal", target_signal, ("points",), queries=True)
    shadows = signal_array("shadow_signals", shadow_signals, ("models", *phi.shape))
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
    target = confidence_array("target_conf", target_conf, ("points",), queries=True)
    refs = confidence_array("ref_conf", ref_conf, ("models", *target.shape))
    included = checked_design(design, *refs.shape[:2], sides=("out",))
    population = confidence_array("population_conf", population_conf, ("population",), queries=True)
    ref_population = confidence_array(
        "ref_population_conf", ref_population_conf, (len(refs), *population.shape)
    )

    def ratio(name, own, references, out):
        total = np.zeros(len(own))
        for row, mask in zip(references, out, strict=True):
            total += query_mean(row, axes=1) * mask
        mean = 0.5 * ((1 + a) * (total / out.sum(axis=0)) + (1 - a))
        if not mean.min() > 0:
            raise ValueError(
                f"{name} must give each point a mean confidence above 0; got 0 for point "
                f"{mean.argmin()}. Compute confidences from logits in float64, or take a below 1."
            )
        return query_mean(own, axes=1) / mean

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
