"""How far an input can move before its loss can rise: bounds from the last layer alone.

If the features move by at most ``lipschitz * radius``, the loss can rise by no more than what the
rows of the last layer allow. The constant itself comes from ``flatbook.lipschitz`` and is offered
here as well.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, cdist

from flatbook import checks, runtime
from flatbook.lipschitz import lipschitz_bound
from flatbook.rise import Flat, LogSumExp, Polynomial, distances, moments, root
from flatbook.sharpness import hessian_trace

__all__ = ["BoundKind", "certified_radius", "lipschitz_bound", "loss_bound", "margin_radius"]

BoundKind = Literal["best", "flat", "poly", "lse", "claimed"]


@torch.no_grad()
def loss_bound(
    weight: Tensor,
    features: Tensor,
    labels: Tensor,
    radius: float | Tensor,
    lipschitz: float,
    *,
    bias: Tensor | None = None,
    kind: BoundKind = "best",
) -> Tensor:
    r"""Bound how much the cross-entropy can rise when the input moves by at most a radius.

    With the rows :math:`w_j` of the last layer, the prediction p at the input, its mean row
    :math:`\bar w = \sum_j p_j w_j`, the label y, the reach :math:`t = L \delta` of the features,
    the variance :math:`V = \sum_j p_j \|w_j - \bar w\|^2`, which is the neuronwise relative
    sharpness divided by :math:`\|\phi\|^2`, the widest distance D of two rows and
    :math:`R = tD`,

    .. math::
        \text{flat:} \quad & t \, \|\bar w - w_y\| + t^2 V \, \frac{e^R - R - 1}{R^2}, \\
        \text{poly:} \quad & t \, \|\bar w - w_y\| + \tfrac12 t^2 V + \frac{R^3}{36 \sqrt 3}, \\
        \text{lse:} \quad & \log \sum_j p_j \, e^{t \|w_j - w_y\|}.

    Each holds at every input, trained or not, right or wrong. Along a straight line of logits
    the third derivative of the loss is a third central moment on an interval of length R: at
    most R times the variance, which gives the first, and at most :math:`R^3 / (6 \sqrt 3)`,
    which gives the second. The last bounds each exponent of the exact change. ``best`` is the
    lesser of flat and lse. None changes with (W / c, cφ, cL) for (W, φ, L), nor with one vector
    added to every row.

    ``claimed`` is the bound that a published argument arrives at, with
    :math:`\kappa = \|W\|_F^2 \operatorname{Tr} H`, k classes and m features:

    .. math:: \delta^2 L^2 \frac{\kappa}{2 \|\phi\|^2} + \delta^3 \frac{k m L^6}{24 \|\phi\|^3}.

    It lacks the first-order term and is **no bound**; it is here to be compared.

    Args:
        weight: One row per class. Shape ``(classes, width)``.
        features: Inputs of the last layer. Shape ``(samples, width)``.
        labels: The class whose loss is meant. Shape ``(samples,)``.
        radius: How far the input moves, one number or one per sample; may be infinite.
        lipschitz: Of the features, as from :func:`lipschitz_bound`.
        bias: Of the last layer. Shape ``(classes,)``.
        kind: Which bound.

    Returns:
        In nats; infinite where the number is too large. Shape ``(samples,)``.

    Raises:
        ValueError: If the shapes disagree, there is a single class, ``kind`` is unknown, a radius
            is negative, or a number is not finite or not floating point.

    Reference:
        Bach (2010). Self-concordant analysis for logistic regression. Electronic Journal of
        Statistics.

    Example:
        Undecided between opposite rows, the worst step makes the logits −1 and 1, and the loss
        log(1 + e²) from log 2; a second class certain to be wrong lets it rise by nothing.

        >>> weight = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
        >>> features = torch.tensor([[0.0], [400.0]], dtype=torch.float64)
        >>> loss_bound(weight, features, torch.tensor([0, 0]), 1.0, 1.0, kind="lse")
        tensor([1.4338, 0.0000], dtype=torch.float64)
        >>> round(math.log(1 + math.exp(2)) - math.log(2), 4)
        1.4338
    """
    checks.choice("kind", kind, get_args(BoundKind))
    dtype, layer = _checked(weight, features, labels, lipschitz, bias)
    radius = _amounts("radius", radius, layer.logits)
    rate, bounds = _bounds(kind, layer)
    return _rounded(_least(bounds, rate, radius), dtype, math.inf)


@torch.no_grad()
def certified_radius(
    weight: Tensor,
    features: Tensor,
    labels: Tensor,
    epsilon: float | Tensor,
    lipschitz: float,
    *,
    bias: Tensor | None = None,
    kind: BoundKind = "best",
) -> Tensor:
    r"""Find how far the input can move while the loss provably rises by at most ``epsilon``.

    .. math:: \sup \{ \delta \ge 0 : \text{bound}(\delta) \le \varepsilon \}

    for the bound of that kind in :func:`loss_bound`. It is 0 for ``epsilon`` = 0 and infinite if
    all rows of W coincide or nothing moves the features.

    A loss below log 2 proves that the label is predicted. So for a sample of loss
    :math:`\ell \le \log 2`, ``epsilon`` = :math:`\log 2 - \ell` certifies that no input within
    the radius is misclassified. As the last layer is scaled up, that radius of kind lse rises to
    :func:`margin_radius`, and with two classes it is equal to it at every scale.

    All bounds are convex in δ, so Newton's method from above falls onto the root. The result is
    then rounded down until the bound, as computed, holds.

    Args:
        weight: One row per class. Shape ``(classes, width)``.
        features: Inputs of the last layer. Shape ``(samples, width)``.
        labels: The class whose loss is meant. Shape ``(samples,)``.
        epsilon: Largest rise allowed, in nats, at least 0; one number or one per sample. Clamp
            log 2 − ℓ at 0 for samples without a certificate.
        lipschitz: Of the features, as from :func:`lipschitz_bound`.
        bias: Of the last layer. Shape ``(classes,)``.
        kind: Which bound; ``claimed`` certifies nothing.

    Returns:
        In units of the input. Shape ``(samples,)``.

    Raises:
        ValueError: If the shapes disagree, there is a single class, ``kind`` is unknown, an
            epsilon is negative, or a number is not finite or not floating point.

    Example:
        Two classes with logits 3 and −3, that is, a loss of log(1 + e⁻⁶), and features that move
        twice as fast as the input: the logits meet at a distance of 3 / 2.

        >>> weight = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
        >>> features = torch.tensor([[3.0]], dtype=torch.float64)
        >>> epsilon = math.log(2) - math.log1p(math.exp(-6))
        >>> certified_radius(weight, features, torch.tensor([0]), epsilon, 2.0)
        tensor([1.5000], dtype=torch.float64)
    """
    checks.choice("kind", kind, get_args(BoundKind))
    dtype, layer = _checked(weight, features, labels, lipschitz, bias)
    # First as it is in the precision of the outcome, so that a bound of that precision keeps to it.
    epsilon = _rounded(_amounts("epsilon", epsilon, layer.logits), dtype, 0.0).to(layer.logits)
    rate, bounds = _bounds(kind, layer)
    if not bounds:
        return torch.full_like(epsilon, math.inf, dtype=dtype)
    limits = torch.finfo(epsilon.dtype)
    radius = torch.zeros_like(epsilon)
    for bound in bounds:
        reach = root(bound, epsilon.clamp(limits.tiny, math.sqrt(limits.max)))
        radius = torch.maximum(radius, (reach / rate).clamp(max=limits.max))
    for power in range(4, 53):  # down to 0 at the latest; it takes a few steps
        above = _least(bounds, rate, radius) > epsilon
        if not above.any():
            break
        radius = torch.where(above, radius * (1 - 2.0 ** (power - 52)), radius)
    radius = radius.masked_fill(epsilon == 0, 0.0).masked_fill(epsilon.isinf(), math.inf)
    return _rounded(radius, dtype, 0.0)


@torch.no_grad()
def margin_radius(
    weight: Tensor,
    features: Tensor,
    labels: Tensor,
    lipschitz: float,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    r"""Find how far the input can move while the predicted label provably stays.

    .. math:: \min_{j \ne y} \frac{z_y - z_j}{L \, \|w_j - w_y\|}

    with the logits z. It is 0 for a sample that is misclassified or tied, and does not change
    when the last layer is scaled. A class whose row coincides with that of the label never
    catches up.

    Args:
        weight: One row per class. Shape ``(classes, width)``.
        features: Inputs of the last layer. Shape ``(samples, width)``.
        labels: The right classes. Shape ``(samples,)``.
        lipschitz: Of the features, as from :func:`lipschitz_bound`.
        bias: Of the last layer. Shape ``(classes,)``.

    Returns:
        In units of the input. Shape ``(samples,)``.

    Raises:
        ValueError: If the shapes disagree, there is a single class, or a number is not finite or
            not floating point.

    Reference:
        Tsuzuku, Sato & Sugiyama (2018). Lipschitz-margin training. NeurIPS.

    Example:
        >>> weight = torch.tensor([[1.0], [-1.0]])
        >>> features = torch.tensor([[3.0], [-3.0]])
        >>> margin_radius(weight, features, torch.tensor([0, 0]), 2.0)
        tensor([1.5000, 0.0000])
    """
    dtype, layer = _checked(weight, features, labels, lipschitz, bias)
    label = layer.labels[:, None]
    gap = layer.logits.gather(1, label) - layer.logits
    distance = distances(layer.weight, layer.labels)
    others = torch.ones_like(gap, dtype=torch.bool).scatter(1, label, False)
    reach = torch.where(others & (distance > 0), gap / distance, math.inf).amin(dim=1)
    lost = (others & (gap <= 0)).any(dim=1)
    radius = reach / layer.rate if layer.rate > 0 else torch.full_like(reach, math.inf)
    return _rounded(radius.masked_fill(lost, 0.0), dtype, 0.0)


@dataclass(frozen=True)
class _Layer:
    """A last layer, checked and widened, in units in which its rows differ by about 1."""

    weight: Tensor
    alike: bool  # whether all rows coincide
    length: Tensor  # of the features
    logits: Tensor
    labels: Tensor
    lipschitz: float
    rate: float  # reach of the features, in these units, per radius


def _checked(weight, features, labels, lipschitz, bias) -> tuple[torch.dtype, _Layer]:
    features = checks.tensor("features", features, ("samples", "width"))
    n, m = features.shape
    weight = checks.tensor("weight", weight, ("classes", m))
    k = len(weight)
    if k < 2:
        raise ValueError(f"weight must have at least 2 rows, one per class; got {k}.")
    labels = checks.labels("labels", labels, k, samples=n).to(features.device)
    lipschitz = checks.non_negative("lipschitz", lipschitz)
    dtype = torch.promote_types(torch.float32, torch.promote_types(features.dtype, weight.dtype))
    phi, w = runtime.widened(features), runtime.widened(weight).to(features.device)
    # What the rows share changes no loss, but would round away what tells them apart.
    centred = w - w[0]
    centred -= centred.mean(dim=0)
    logits = phi @ centred.T
    if bias is not None:
        bias = checks.tensor("bias", bias, (k,))
        dtype = torch.promote_types(dtype, bias.dtype)
        logits = logits + runtime.widened(bias).to(features.device)
    if not logits.isfinite().all():
        raise ValueError("weight and features must give finite logits; got inf or nan.")
    alike = not centred.any()
    scale = 1.0 if alike else 2.0 ** math.frexp(centred.abs().max().item())[1]
    rate = max(lipschitz * scale, torch.finfo(w.dtype).tiny) if lipschitz > 0 else 0.0
    return dtype, _Layer(w / scale, alike, scale * phi.norm(dim=1), logits, labels, lipschitz, rate)


def _amounts(name: str, value, like: Tensor) -> Tensor:
    """Return ``value`` as one number of at least 0 per sample; it may be infinite."""
    n = len(like)
    if not isinstance(value, Tensor):
        array = np.asarray(value)  # torch would round Python's numbers to float32
        if array.dtype.kind not in "biufc":
            raise ValueError(
                f"{name} must be a number of at least 0, or one for each sample; got {value!r:.80}."
            )
        value = array
    amounts = checks.tensor(name, value, (n,) if np.ndim(value) else (), floating=False)
    if amounts.dtype == torch.bool or amounts.is_complex():
        raise ValueError(f"{name} must hold real numbers; got {amounts.dtype}.")
    if not (amounts >= 0).all():
        raise ValueError(f"{name} must be at least 0; got {amounts.min().item():g}.")
    return amounts.to(like).expand(n)


def _bounds(kind: BoundKind, layer: _Layer) -> tuple[float, list]:
    """Return what turns a radius into a reach, and the bounds; none if nothing can change."""
    if layer.lipschitz == 0 or (layer.alike and kind != "claimed"):
        return layer.rate, []
    if kind == "claimed":
        (k, m), norm = layer.weight.shape, layer.length
        trace = hessian_trace(torch.ones_like(norm)[:, None], layer.logits)  # for ‖φ‖ = 1
        second = layer.weight.norm() * (trace / 2).sqrt()
        third = (k * m / 24) ** (1 / 3) * layer.lipschitz / norm
        return layer.rate, [Polynomial(torch.zeros_like(norm), second, third)]
    log_p = layer.logits.log_softmax(dim=1)
    w, bounds = layer.weight, []
    if kind in ("lse", "best"):
        bounds.append(LogSumExp(log_p, distances(w, layer.labels)))
    if kind != "lse":
        log_first, log_variance = moments(w, log_p, layer.labels)
        top = log_p.argmax(dim=1)
        wrong = (top != layer.labels).nonzero()[:, 0]
        if len(wrong):
            log_variance[wrong] = moments(w, log_p[wrong], top[wrong])[1]
        centred = w - w[0]  # or the squares of what all rows share would cancel
        diameter = max(cdist(part, centred).max().item() for part in centred.split(1024))
        first, d = log_first.exp(), torch.full_like(log_first, diameter)
        if kind == "poly":
            second, third = (
                (log_variance / 2).exp() / math.sqrt(2),
                d / (36 * math.sqrt(3)) ** (1 / 3),
            )
            bounds.append(Polynomial(first, second, third))
        else:
            bounds.append(Flat(first, log_variance - 2 * d.log(), diameter))
    return layer.rate, bounds


def _least(bounds: list, rate: float, radius: Tensor) -> Tensor:
    """Return the least of the bounds at each radius."""
    if not bounds:
        return torch.zeros_like(radius)
    t = radius * rate
    far = torch.finfo(t.dtype).max * 1e-8
    value = torch.stack([bound.at(t.clamp(max=far))[0] for bound in bounds]).amin(dim=0)
    return value.masked_fill(radius == 0, 0.0).masked_fill(t > far, math.inf)


def _rounded(value: Tensor, dtype: torch.dtype, towards: float) -> Tensor:
    """Return ``value`` in ``dtype``, no nearer to 0 or no farther from it than it was."""
    narrow = value.to(dtype)
    over = narrow.to(value.dtype) > value if towards == 0 else narrow.to(value.dtype) < value
    return torch.where(over, narrow.nextafter(torch.full_like(narrow, towards)), narrow)
