"""Sharpness of the last layer, exact and per sample, from its features and logits.

With cross-entropy and p = softmax(z), the Hessian of the loss in the weights W of a linear
layer z = Wφ is (diag p − ppᵀ) ⊗ φφᵀ whatever the label. Everything here follows from that. The
estimators for whole networks, in ``flatbook.curvature`` and ``flatbook.landscape``, are
offered here as well.
"""

from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from flatbook import checks, runtime
from flatbook.curvature import (
    Eigenvalue,
    Estimate,
    extreme_eigenvalue,
    full_trace,
    refused_by_name,
    top_eigenvalue,
)
from flatbook.landscape import Landscape, loss_landscape
from flatbook.models import Classifier, evaluating, headed

__all__ = [
    "Eigenvalue",
    "Estimate",
    "Landscape",
    "SharpnessKind",
    "doubt",
    "full_trace",
    "hessian_eigenvalues",
    "hessian_trace",
    "last_layer_hessian",
    "last_layer_top_eigenvalue",
    "loss_landscape",
    "relative_sharpness",
    "sharpness_of",
    "top_eigenvalue",
]

SharpnessKind = Literal["neuronwise", "frobenius"]

_MOST_BYTES = 8 * 10**9  # what a dense matrix may take before we refuse to build it


def last_layer_hessian(features: Tensor, logits: Tensor, *, bias: bool = False) -> Tensor:
    r"""Build the Hessian of the mean loss in the weights of the last layer.

    .. math::
        H = \frac1n \sum_{i=1}^n \bigl(\operatorname{diag} p_i - p_i p_i^\top\bigr)
            \otimes \phi_i \phi_i^\top

    in the order of ``weight.flatten()``: entry ``s * width + a`` is the weight of class s and
    feature a. It is positive semidefinite, and every shift of all rows of W by the same vector
    lies in its kernel.

    Args:
        features: Inputs of the layer. Shape ``(samples, width)``.
        logits: Its outputs, bias included. Shape ``(samples, classes)``.
        bias: Whether to count the bias as a last column of W, that is, append a 1 to each
            feature vector.

    Returns:
        Shape ``(classes * width, classes * width)``; with ``bias``, width is one more.

    Raises:
        ValueError: If the shapes disagree, there is a single class, a number is not finite or
            not floating point, or the matrix would need more than 8 GB.

    Example:
        Two classes, undecided: p(1 − p) = 1/4.

        >>> last_layer_hessian(torch.tensor([[2.0]]), torch.zeros(1, 2))
        tensor([[ 1., -1.],
                [-1.,  1.]])
    """
    dtype, phi, z = _checked(features=features, logits=logits)
    phi = _with_ones(phi) if bias else phi
    (n, m), k = phi.shape, z.shape[1]
    _refuse_above_budget((k * m) ** 2, f"a Hessian of order {k} * {m}")
    p, q, _ = _softmax(z)
    hessian = phi.new_empty(k, m, k, m)
    for s in range(k):
        for t in range(s + 1):
            curvature = p[:, s] * (q[:, s] if s == t else -p[:, t])
            hessian[s, :, t] = hessian[t, :, s] = phi.T @ (curvature[:, None] * phi) / n
    return hessian.view(k * m, k * m).to(dtype)


def hessian_trace(features: Tensor, logits: Tensor, *, bias: bool = False) -> Tensor:
    r"""Compute the trace of the last layer's Hessian for each sample.

    .. math:: \operatorname{Tr} H = \|\phi\|^2 \sum_s p_s (1 - p_s)

    It is largest, :math:`\|\phi\|^2 (1 - 1/k)`, for a uniform prediction, and falls to 0 with
    confidence, right or wrong.

    Args:
        features: Inputs of the layer. Shape ``(samples, width)``.
        logits: Its outputs, bias included. Shape ``(samples, classes)``.
        bias: Whether to count the bias, which adds 1 to each :math:`\|\phi\|^2`.

    Returns:
        In nats. Shape ``(samples,)``.

    Raises:
        ValueError: If the shapes disagree, there is a single class, or a number is not finite
            or not floating point.

    Example:
        >>> hessian_trace(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.zeros(2, 4))
        tensor([3.0000, 0.7500])
    """
    dtype, phi, z = _checked(features=features, logits=logits)
    p, q, _ = _softmax(z)
    return ((phi.square().sum(dim=1) + bias) * (p * q).sum(dim=1)).to(dtype)


def doubt(logits: Tensor) -> Tensor:
    r"""Compute one minus the confidence: :math:`\varepsilon = 1 - \max_s p_s`.

    It is the sum of the other probabilities, so it does not round to 0 for confident samples.
    The trace of the last layer's Hessian lies between :math:`2 \varepsilon (1 - \varepsilon)`
    and :math:`2 \varepsilon` times :math:`\|\phi\|^2`.

    Args:
        logits: Outputs of the last layer. Shape ``(samples, classes)``.

    Returns:
        Between 0 and 1 − 1/classes. Shape ``(samples,)``.

    Raises:
        ValueError: If there is a single class, or a number is not finite or not floating point.

    Example:
        >>> doubt(torch.tensor([[0.0, 0.0], [0.0, 60.0]], dtype=torch.float64))
        tensor([5.0000e-01, 8.7565e-27], dtype=torch.float64)
    """
    logits = checks.tensor("logits", logits, ("samples", "classes"))
    dtype, _, z = _checked(features=logits.new_ones(len(logits), 1), logits=logits)
    _, rest, top = _softmax(z)
    return rest.gather(1, top)[:, 0].to(dtype)


def hessian_eigenvalues(features: Tensor, logits: Tensor, *, bias: bool = False) -> Tensor:
    r"""Compute the eigenvalues of each sample's last-layer Hessian that can differ from 0.

    The Hessian is a Kronecker product whose second factor has rank one, so they are

    .. math:: \|\phi\|^2 \, \lambda_j\bigl(\operatorname{diag} p - p p^\top\bigr),
        \qquad j = 1, \dots, k.

    The first is always 0, because a shift of all logits changes nothing. The remaining
    classes * (width − 1) eigenvalues of the Hessian are 0 too.

    Args:
        features: Inputs of the layer. Shape ``(samples, width)``.
        logits: Its outputs, bias included. Shape ``(samples, classes)``.
        bias: Whether to count the bias as a last column of W.

    Returns:
        In nats, ascending. Shape ``(samples, classes)``.

    Raises:
        ValueError: If the shapes disagree, there is a single class, a number is not finite or
            not floating point, or samples * classes² numbers would need more than 8 GB.

    Example:
        >>> hessian_eigenvalues(torch.tensor([[2.0, 0.0]]), torch.zeros(1, 4))
        tensor([[0., 1., 1., 1.]])
    """
    dtype, phi, z = _checked(features=features, logits=logits)
    n, k = z.shape
    _refuse_above_budget(n * k**2, f"{n} matrices of order {k}")
    p, q, _ = _softmax(z)
    diagonal = torch.eye(k, dtype=torch.bool, device=p.device)
    spread = torch.where(diagonal, (p * q)[:, :, None], -p[:, :, None] * p[:, None, :])
    # The first is 0 and none is negative: rounding knows neither.
    values = pad(torch.linalg.eigvalsh(spread)[:, 1:].clamp(min=0), (1, 0))
    return ((phi.square().sum(dim=1) + bias)[:, None] * values).to(dtype)


def last_layer_top_eigenvalue(
    features: Tensor,
    logits: Tensor,
    *,
    bias: bool = False,
    tolerance: float = 1e-6,
    max_iterations: int = 1000,
    seed: int = 0,
) -> Eigenvalue:
    r"""Find the largest eigenvalue of the last layer's Hessian over a whole data set.

    It is that of :func:`last_layer_hessian`, from products alone, so that classes * width may
    be large:

    .. math::
        H V = \frac1n \sum_i p_i \odot (V\phi_i - \langle p_i, V\phi_i \rangle) \, \phi_i^\top.

    Args:
        features: Inputs of the layer. Shape ``(samples, width)``.
        logits: Its outputs, bias included. Shape ``(samples, classes)``.
        bias: Whether to count the bias as a last column of W.
        tolerance: Stop once the residual falls below this share of the eigenvalue.
        max_iterations: Products after which to give up.
        seed: Of the start vector.

    Returns:
        The eigenvalue in nats, its residual, and the products spent.

    Raises:
        ValueError: As for :func:`hessian_trace`, or if an option is out of range.
        RuntimeError: If ``max_iterations`` products do not reach the tolerance.

    Example:
        >>> round(last_layer_top_eigenvalue(torch.tensor([[2.0]]), torch.zeros(1, 2)).value, 6)
        2.0
    """
    _, phi, z = _checked(features=features, logits=logits)
    phi = _with_ones(phi) if bias else phi
    (n, m), k = phi.shape, z.shape[1]
    p, _, top = _softmax(z)

    def product(vector: Tensor) -> Tensor:
        change = phi @ vector.to(phi.device).view(k, m).T
        change = change - change.gather(1, top)  # the mean must not cancel against the top class
        change = p * (change - (p * change).sum(dim=1, keepdim=True))
        return (change.T @ phi / n).flatten()

    return extreme_eigenvalue(
        product,
        k * m,
        dtype=phi.dtype,
        tolerance=tolerance,
        max_iterations=max_iterations,
        seed=seed,
    )


def relative_sharpness(
    weight: Tensor,
    features: Tensor,
    logits: Tensor,
    *,
    kind: SharpnessKind = "neuronwise",
) -> Tensor:
    r"""Measure how sharply the loss bends in the last layer, relative to its weights.

    With :math:`\bar w = \sum_s p_s w_s` and the blocks :math:`H_{st}` of the Hessian between
    the weights of classes s and t,

    .. math::
        \kappa_{\text{neuronwise}}
        &= \sum_{s,t} \langle w_s, w_t \rangle \operatorname{Tr} H_{st}
        = \|\phi\|^2 \sum_s p_s \|w_s - \bar w\|^2, \\
        \kappa_{\text{frobenius}}
        &= \|W\|_F^2 \operatorname{Tr} H
        = \|\phi\|^2 \|W\|_F^2 \sum_s p_s (1 - p_s).

    The first is the variance of the rows of W under the prediction, the second bounds it from
    above. Both are the same for (W / c, cφ) as for (W, φ) and for rotated features; only the
    first is the same for W with one vector added to every row, which changes no prediction.
    Average over samples to get the sharpness of a data set.

    Gradients flow to all three arguments, so it can serve as a penalty.

    Args:
        weight: One row per class. Shape ``(classes, width)``.
        features: Inputs of the layer. Shape ``(samples, width)``.
        logits: Its outputs, bias included. Shape ``(samples, classes)``.
        kind: Which of the two.

    Returns:
        Sharpness of each sample, in nats. Shape ``(samples,)``.

    Raises:
        ValueError: If ``kind`` is unknown, the shapes disagree, there is a single class, or a
            number is not finite or not floating point.

    Reference:
        Petzka et al. (2021). Relative flatness and generalization. NeurIPS.

    Example:
        Opposite rows and one undecided prediction: :math:`\bar w = 0`, so κ = ‖φ‖² ‖w‖².

        >>> weight = torch.tensor([[3.0, 0.0], [-3.0, 0.0]])
        >>> features = torch.tensor([[0.0, 2.0]])
        >>> relative_sharpness(weight, features, features @ weight.T)
        tensor([36.])
        >>> relative_sharpness(weight, features, features @ weight.T, kind="frobenius")
        tensor([36.])
    """
    checks.choice("kind", kind, get_args(SharpnessKind))
    dtype, phi, z, w = _checked(features=features, logits=logits, weight=weight)
    p, q, top = _softmax(z)
    if kind == "frobenius":
        spread = w.square().sum() * (p * q).sum(dim=1)
    else:
        # Measured from the row of the top class, the variance keeps what the mean would round
        # away once a sample is certain. Only classes that come top need distances.
        w = w - w.mean(dim=0)
        tops, place = top[:, 0].unique(return_inverse=True)
        distance = _squared_distances(w, tops)
        rest = p.scatter(1, top, 0.0)
        drift = rest @ w - rest.sum(dim=1, keepdim=True) * w[top[:, 0]]
        spread = (rest * distance[place]).sum(dim=1) - drift.square().sum(dim=1)
    return (phi.square().sum(dim=1) * spread).to(dtype)


def sharpness_of(
    model: Classifier,
    x: Tensor,
    *,
    kind: SharpnessKind = "neuronwise",
    batch_size: int = 512,
) -> Tensor:
    """Measure the relative sharpness of a classifier at each input.

    Runs the features once, in evaluation mode and without gradients.

    Args:
        model: Has ``features`` and a linear ``head``.
        x: Inputs. Shape ``(samples, ...)``.
        kind: See :func:`relative_sharpness`.
        batch_size: Samples per forward pass.

    Returns:
        In nats, on the model's device. Shape ``(samples,)``.

    Raises:
        ValueError: If ``model`` has no features and head, ``x`` is empty, not finite or does not
            fit it, or an option is unknown.

    Example:
        >>> from flatbook.models import build
        >>> model = build("mlp", num_classes=3, input_shape=(4,), seed=0)
        >>> sharpness_of(model, torch.rand(5, 4)).shape
        torch.Size([5])
    """
    checks.count("batch_size", batch_size)
    checks.choice("kind", kind, get_args(SharpnessKind))
    weight = headed(model).head.weight.detach()
    x = checks.tensor("x", x, ("samples", *(None,) * (np.ndim(x) - 1)))
    values = []
    with evaluating(model), torch.no_grad():
        one = x[:1].to(weight.device, weight.dtype)
        refused_by_name(lambda x: model.head(model.features(x)), one, size=len(x))
        for batch in x.split(batch_size):
            phi = model.features(batch.to(weight.device, weight.dtype))
            values.append(relative_sharpness(weight, phi, model.head(phi), kind=kind))
    return torch.cat(values)


def _checked(**arrays: Tensor) -> tuple:
    """Check the arrays of one layer; return the dtype of results and the arrays, widened."""
    features = checks.tensor("features", arrays["features"], ("samples", "width"))
    n, m = features.shape
    logits = checks.tensor("logits", arrays["logits"], (n, "classes"))
    k = logits.shape[1]
    if k < 2:
        raise ValueError(f"logits must have at least 2 classes; got {k}.")
    checked = [features, logits]
    if "weight" in arrays:
        checked.append(checks.tensor("weight", arrays["weight"], (k, m)))
    # A half-precision result would lose the small values, and those are the confident samples.
    dtype = torch.float32
    for array in checked:
        dtype = torch.promote_types(dtype, array.dtype)
    return dtype, *map(runtime.widened, checked)


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return p, 1 − p and the top classes, shape ``(samples, 1)``.

    The complement of the top class is the sum of the others: 1 − p would round to 0.
    """
    p = logits.softmax(dim=1)
    top = logits.argmax(dim=1, keepdim=True)
    doubt = p.scatter(1, top, 0.0).sum(dim=1, keepdim=True)
    return p, (1 - p).scatter(1, top, doubt), top


def _squared_distances(w: Tensor, tops: Tensor) -> Tensor:
    """Return ‖w_t − w_s‖² for each t of ``tops`` and every row s, to eleven digits.

    Inner products are quick, and their error is at most 2 (width + 3) u (‖w_t‖² + ‖w_s‖²) with the
    unit roundoff u. So pairs whose distance is a small share of that are taken entry by entry; in
    single precision those are all.
    """
    squares = w.square().sum(dim=1)
    scale = squares[tops, None] + squares
    distance = scale - 2 * w[tops] @ w.T
    share = (w.shape[1] + 3) * torch.finfo(w.dtype).eps / 1e-11
    near = distance.detach() <= share * scale.detach()
    rows = []
    for t, close, row in zip(tops, near, distance, strict=True):
        close = close.nonzero()[:, 0]
        rows.append(row.index_put((close,), (w[close] - w[t]).square().sum(dim=1)))
    return torch.stack(rows)


def _with_ones(features: Tensor) -> Tensor:
    return pad(features, (0, 1), value=1.0)


def _refuse_above_budget(numbers: int, what: str) -> None:
    needed = 8 * numbers
    if needed > _MOST_BYTES:
        raise ValueError(
            f"features and logits ask for {what}, {needed / 1e9:.3g} GB, where at most "
            f"{_MOST_BYTES / 1e9:g} GB are allowed; hessian_trace and "
            "last_layer_top_eigenvalue need no matrix."
        )
