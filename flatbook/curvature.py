"""Curvature of a whole network by Hessian–vector products: trace and extreme eigenvalue."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Literal, get_args

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flatbook import checks, runtime
from flatbook.models import evaluating
from flatbook.progress import bar

Extreme = Literal["algebraic", "magnitude"]

_MOST_PROBE_BYTES = 2**28  # probes beyond this are drawn again for each batch


@dataclass(frozen=True)
class Estimate:
    """A mean over random probes.

    Attributes:
        value: The mean.
        standard_error: Standard deviation of the mean over the probes.
        probes: How many there were.
    """

    value: float
    standard_error: float
    probes: int


@dataclass(frozen=True)
class Eigenvalue:
    r"""An eigenvalue and the proof of it.

    Attributes:
        value: The Rayleigh quotient :math:`\lambda = v^\top H v` of a unit vector v.
        residual: :math:`\|Hv - \lambda v\|`; H has an eigenvalue within this distance.
        iterations: Hessian–vector products spent.
    """

    value: float
    residual: float
    iterations: int


def full_trace(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    probes: int = 100,
    batch_size: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Estimate:
    r"""Estimate the trace of the Hessian of the loss in all trainable parameters.

    For a vector v of independent random signs :math:`\mathbb{E}[v v^\top] = I`, hence

    .. math::
        \operatorname{Tr} H = \mathbb{E}[v^\top H v],
        \qquad
        \operatorname{Var}[v^\top H v] = 2 \sum_{i \ne j} H_{ij}^2,

    where H is the Hessian of the mean cross-entropy. Each probe costs one Hessian–vector
    product. The graph of the gradient is built once per batch and serves every probe, and the
    probes are the same for all batches, so batches change nothing but rounding.

    The model runs in evaluation mode, and is as it was afterwards: modes, gradients, batch
    norm's statistics and the global generators.

    Args:
        model: Maps inputs to logits ``(samples, classes)``. Parameters that do not require a
            gradient stay out of H.
        x: Inputs. Shape ``(samples, ...)``.
        y: Labels. Shape ``(samples,)``.
        probes: Number of random vectors, at least 2.
        batch_size: Samples whose graph is held at once. By default as many as are fast: at
            least 64, and on a CPU as many as have activations that fit its caches.
        seed: Of the probes.
        progress: Show a bar.

    Returns:
        The mean over the probes, in nats, and its standard error.

    Raises:
        ValueError: If a shape, a label or a number is out of range, the loss is not finite,
            nothing is trainable or what is has no part in the loss, or the parameters are half
            precision.

    Reference:
        Hutchinson (1990). A stochastic estimator of the trace of the influence matrix.
        Yao et al. (2020). PyHessian: neural networks through the lens of the Hessian.

    Example:
        One weight on each of two classes, both undecided: H = [[1, -1], [-1, 1]] / 4. Two equal
        signs give 0 and two opposite ones give 1, so half on average.

        >>> model = nn.Linear(1, 2, bias=False)
        >>> _ = nn.init.zeros_(model.weight)
        >>> estimate = full_trace(model, torch.ones(1, 1), torch.zeros(1).long(), probes=400)
        >>> abs(estimate.value - 0.5) < 3 * estimate.standard_error < 0.1
        True
    """
    checks.count("probes", probes, at_least=2)
    named, x, y = checked_problem(model, x, y)
    parameters = list(named.values())
    device = parameters[0].device
    if batch_size is None:
        batch_size = _fast_batch(model, x, device)
    rounds = math.ceil(len(x) / checks.count("batch_size", batch_size))
    gradients = _gradients(model, parameters, x, y, batch_size)

    def draw() -> Iterator[list[Tensor]]:
        random = runtime.generator(seed, device)
        return ([_signs(p, random) for p in parameters] for _ in range(probes))

    needed = probes * sum(p.nbytes for p in parameters)
    kept = list(draw()) if needed <= _MOST_PROBE_BYTES else None
    forms = runtime.widened(torch.zeros(probes, device=device))
    steps = bar(rounds * probes, label="trace", unit="product", show=progress)
    with evaluating(model), torch.enable_grad(), steps:
        for gradient in gradients:
            for i, probe in enumerate(kept or draw()):
                product = _hessian_product(gradient, parameters, probe)
                forms[i] += sum((v * hv).sum() for v, hv in zip(probe, product, strict=True))
                steps.update()
    if not forms.isfinite().all():
        raise ValueError("Hessian–vector products must be finite; got inf or nan.")
    error = forms.std() / math.sqrt(probes)
    return Estimate(forms.mean().item(), error.item(), probes)


def top_eigenvalue(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    kind: Extreme = "algebraic",
    tolerance: float = 1e-3,
    max_iterations: int = 500,
    batch_size: int | None = None,
    seed: int = 0,
) -> Eigenvalue:
    r"""Find the largest eigenvalue of the Hessian of the loss in all trainable parameters.

    Lanczos' method with restarts (ARPACK through SciPy) needs only Hessian–vector products.
    The model runs in evaluation mode and is as it was afterwards.

    Args:
        model: Maps inputs to logits ``(samples, classes)``.
        x: Inputs. Shape ``(samples, ...)``.
        y: Labels. Shape ``(samples,)``.
        kind: ``"algebraic"`` for the largest eigenvalue, the sharpest direction uphill;
            ``"magnitude"`` for the one farthest from 0, which may be negative.
        tolerance: Stop once the residual falls below this share of the eigenvalue.
        max_iterations: Hessian–vector products after which to give up.
        batch_size: Samples whose graph is held at once. By default all, and their graph serves
            every product; smaller batches save memory and rebuild it each time.
        seed: Of the start vector.

    Returns:
        The eigenvalue in nats, its residual, and the products spent.

    Raises:
        ValueError: As for :func:`full_trace`.
        RuntimeError: If ``max_iterations`` products do not reach the tolerance.

    Example:
        One weight on each of two classes, both undecided: H = [[1, -1], [-1, 1]] / 4.

        >>> model = nn.Linear(1, 2, bias=False)
        >>> _ = nn.init.zeros_(model.weight)
        >>> round(top_eigenvalue(model, torch.ones(1, 1), torch.zeros(1).long()).value, 6)
        0.5
    """
    named, x, y = checked_problem(model, x, y)
    parameters = list(named.values())
    sizes = [p.numel() for p in parameters]

    def product(vector: Tensor) -> Tensor:
        pieces = vector.to(parameters[0].device).split(sizes)
        pieces = [v.view_as(p) for v, p in zip(pieces, parameters, strict=True)]
        total = torch.zeros_like(vector, device=parameters[0].device)
        for gradient in kept or _gradients(model, parameters, x, y, batch_size):
            products = _hessian_product(gradient, parameters, pieces)
            total += torch.cat([hv.flatten() for hv in products])
        return total

    with evaluating(model), torch.enable_grad():
        kept = None
        if batch_size is None:
            size = _fast_batch(model, x, parameters[0].device)
            kept = list(_gradients(model, parameters, x, y, size))
        return extreme_eigenvalue(
            product,
            sum(sizes),
            dtype=parameters[0].dtype,
            kind=kind,
            tolerance=tolerance,
            max_iterations=max_iterations,
            seed=seed,
        )


def extreme_eigenvalue(
    product: Callable[[Tensor], Tensor],
    size: int,
    *,
    dtype: torch.dtype = torch.float64,
    kind: Extreme = "algebraic",
    tolerance: float = 1e-3,
    max_iterations: int = 500,
    seed: int = 0,
) -> Eigenvalue:
    r"""Find the largest eigenvalue of a symmetric matrix known by its products.

    Args:
        product: Maps a vector v, shape ``(size,)``, to Hv.
        size: Order of the matrix.
        dtype: Of the vectors.
        kind: ``"algebraic"`` or ``"magnitude"``; see :func:`top_eigenvalue`.
        tolerance: Stop once the residual falls below this share of the eigenvalue.
        max_iterations: Products after which to give up.
        seed: Of the start vector.

    Returns:
        The eigenvalue, its residual, and the products spent.

    Raises:
        ValueError: If an option is out of range or a product is not finite.
        RuntimeError: If ``max_iterations`` products do not reach the tolerance.

    Example:
        >>> diagonal = torch.tensor([1.0, -3.0, 2.0], dtype=torch.float64)
        >>> round(extreme_eigenvalue(lambda v: diagonal * v, 3).value, 6)
        2.0
        >>> round(extreme_eigenvalue(lambda v: diagonal * v, 3, kind="magnitude").value, 6)
        -3.0
    """
    which = {"algebraic": "LA", "magnitude": "LM"}[checks.choice("kind", kind, get_args(Extreme))]
    checks.positive("tolerance", tolerance)
    checks.count("max_iterations", max_iterations)
    spent = 0

    def multiply(vector: np.ndarray) -> np.ndarray:
        nonlocal spent
        spent += 1
        result = product(torch.from_numpy(vector.copy())).detach().cpu().numpy()
        if not np.isfinite(result).all():
            raise ValueError("Hessian–vector products must be finite; got inf or nan.")
        return result

    def within_budget(vector: np.ndarray) -> np.ndarray:
        if spent >= max_iterations:
            raise RuntimeError(
                f"No eigenvalue within tolerance={tolerance:g} after "
                f"max_iterations={max_iterations} products; raise either."
            )
        return multiply(vector)

    start = torch.randn(size, dtype=dtype, generator=runtime.generator(seed)).numpy()
    start /= np.linalg.norm(start)
    image = multiply(start)
    if size == 1 or not image.any():  # ARPACK refuses a single dimension and the zero matrix
        return Eigenvalue(float(start @ image), 0.0, spent)
    operator = LinearOperator((size, size), matvec=within_budget, dtype=start.dtype)
    # An invariant subspace makes ARPACK draw a new vector, with SciPy's generator since 1.17.
    drawn = {"rng": seed} if "rng" in signature(eigsh).parameters else {}
    _, vectors = eigsh(
        operator, 1, which=which, v0=start, tol=tolerance, maxiter=max_iterations, **drawn
    )
    vector = vectors[:, 0] / np.linalg.norm(vectors)
    image = multiply(vector)
    value = float(vector @ image)
    return Eigenvalue(value, float(np.linalg.norm(image - value * vector)), spent)


def checked_problem(
    model: nn.Module, x: Tensor, y: Tensor
) -> tuple[dict[str, nn.Parameter], Tensor, Tensor]:
    """Check a model against labelled data before work that may take long.

    Args:
        model: Maps inputs to logits ``(samples, classes)``.
        x: Inputs. Shape ``(samples, ...)``.
        y: Labels. Shape ``(samples,)``.

    Returns:
        The trainable parameters by name, the inputs in their dtype, and the labels as int64.

    Raises:
        ValueError: If a shape or a label is out of range, nothing is trainable, or the
            parameters are not all float32 or all float64.
    """
    checks.module("model", model)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ValueError("model must have a parameter that requires a gradient; got none.")
    dtypes = {p.dtype for p in parameters.values()}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:
        raise ValueError(
            "model must hold its parameters all in float32 or all in float64; "
            f"got {', '.join(sorted(map(str, dtypes)))}."
        )
    first = next(iter(parameters.values()))
    x = checks.tensor("x", x, ("samples", *(None,) * (np.ndim(x) - 1))).to(first.dtype)
    classes = logits_of_one(model, x[:1].to(first.device), size=len(x)).shape[1]
    if classes < 2:
        raise ValueError(
            "model must return logits of shape (samples, classes), two classes or more; got (1, 1)."
        )
    return parameters, x, checks.labels("y", y, classes, samples=len(x))


def logits_of_one(model: nn.Module, one: Tensor, *, name: str = "x", size: int = 1) -> Tensor:
    """Return what a classifier says to a single input, so that misfits show before long work.

    Args:
        model: Maps inputs to logits ``(samples, classes)``; run in evaluation mode.
        one: The input, on the model's device. Shape ``(1, ...)``.
        name: What to call the inputs in messages.
        size: How many inputs there are, for messages.

    Returns:
        Shape ``(1, classes)``, without gradients.

    Raises:
        ValueError: If the model refuses the input, or returns another shape.
    """
    with evaluating(model):
        logits = refused_by_name(model, one, name=name, size=size)
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != 1:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"model must return logits of shape (samples, classes); got {got} for one sample."
        )
    return logits


def refused_by_name(
    function: Callable[[Tensor], Tensor], one: Tensor, *, name: str = "x", size: int = 1
) -> Tensor:
    """Return ``function(one)`` without gradients; if it fails, blame ``name`` in a ValueError."""
    try:
        with torch.no_grad():
            return function(one.clone())  # for it may work in place
    except (RuntimeError, ValueError, IndexError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{name} must fit the model, which refuses shape {(size, *one.shape[1:])}: {reason}"
        ) from error


def batches(
    x: Tensor, y: Tensor, batch_size: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield consecutive batches of samples and labels on ``device``."""
    checks.count("batch_size", batch_size)
    for inputs, labels in zip(x.split(batch_size), y.split(batch_size), strict=True):
        yield inputs.to(device), labels.to(device)


def _gradients(
    model: nn.Module, parameters: Sequence[Tensor], x: Tensor, y: Tensor, batch_size: int
) -> Iterator[tuple[Tensor, ...]]:
    """Yield each batch's share of the gradient of the mean loss, with the graph behind it."""
    for inputs, labels in batches(x, y, batch_size, parameters[0].device):
        loss = cross_entropy(model(inputs), labels, reduction="sum") / len(x)
        if not loss.isfinite():
            raise ValueError(f"The loss of model on x and y must be finite; got {loss.item()}.")
        if not loss.requires_grad:
            raise ValueError("model must use a trainable parameter; its loss depends on none.")
        yield torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)


def _hessian_product(
    gradient: Sequence[Tensor], parameters: Sequence[Tensor], vector: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Differentiate the inner product of gradient and vector; keeps the graph for the next."""
    # A parameter that the loss does not use has a constant gradient and no graph.
    live = [(g, v) for g, v in zip(gradient, vector, strict=True) if g.requires_grad]
    if not live:
        return tuple(map(torch.zeros_like, parameters))
    outputs, directions = zip(*live, strict=True)
    return torch.autograd.grad(
        outputs, parameters, directions, retain_graph=True, materialize_grads=True
    )


def _fast_batch(model: nn.Module, x: Tensor, device: torch.device) -> int:
    """Choose a batch whose activations fit a CPU's caches, or a modest part of a GPU's memory.

    On a small CNN that is a fifth faster than one batch of 512. Below 64 samples the overhead
    of every operation outweighs it.
    """
    saved = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with evaluating(model), torch.enable_grad(), hooks:
        logits = model(x[:1].to(device))  # while it lives, no address is used twice
        weights = {p.data_ptr() for p in model.parameters()}
        each = sum(size for address, size in saved.items() if address not in weights)
        del logits
    return max(64, (2**23 if device.type == "cpu" else 2**30) // max(each, 1))


def _signs(like: Tensor, random: torch.Generator) -> Tensor:
    options = {"dtype": like.dtype, "device": like.device}
    return torch.randint(0, 2, like.shape, generator=random, **options).mul_(2).sub_(1)
