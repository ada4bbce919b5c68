"""Attacks on classifiers of inputs in a box: projected gradients, random search, AutoAttack.

``flatbook.adversarial`` offers everything here as well.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flatbook import checks, runtime
from flatbook.curvature import refused_by_name

Norm = Literal["linf", "l2"]
AttackLoss = Literal["ce", "dlr", "log-odds"]


@dataclass(frozen=True)
class Attack:
    """What an attack found.

    Attributes:
        x_adv: The attacked inputs. Shape ``(samples, ...)``.
        path: The iterates that were recorded, the start among them. Shape
            ``(recorded, samples, ...)``; None without ``record``.
        steps: The number of steps taken before each of them.
    """

    x_adv: Tensor
    path: Tensor | None = None
    steps: tuple[int, ...] = ()


def dlr_loss(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Compute the difference-of-logits ratio, the attack loss that scaling cannot change.

    With the logits sorted as :math:`z_{\pi_1} \ge z_{\pi_2} \ge \dots`,

    .. math:: -\frac{z_y - \max_{i \ne y} z_i}{z_{\pi_1} - z_{\pi_3}} .

    It is positive exactly where the label's logit is not the largest. Where the label's is the
    third it is 1 and has no gradient; where the three largest are equal, 1 takes the place of the
    denominator.

    Args:
        logits: Shape ``(samples, classes)``, at least 3 classes.
        labels: Shape ``(samples,)``.

    Returns:
        Shape ``(samples,)``.

    Reference:
        Croce & Hein (2020). Reliable evaluation of adversarial robustness with an ensemble of
        diverse parameter-free attacks. ICML.

    Example:
        >>> dlr_loss(torch.tensor([[4.0, 1.0, 0.0]]), torch.tensor([0]))
        tensor([-0.7500])
    """
    if logits.shape[1] < 3:
        raise ValueError(f'loss="dlr" needs a model of at least 3 classes; got {logits.shape[1]}.')
    top = logits.topk(3, dim=1).values
    span = top[:, 0] - top[:, 2]
    return -margin(logits, labels) / span.masked_fill(span == 0, 1.0)


def log_odds(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Compute the log-odds against the label, :math:`u = \log \sum_{j \ne y} e^{z_j} - z_y`.

    The cross-entropy is :math:`\log(1 + e^u)`, so its gradient is that of u times a positive
    number: projected gradient steps, which use the direction alone, are the same for both in exact
    arithmetic. But where the label is all but certain that number rounds to nothing, and u does
    not care.

    Args:
        logits: Shape ``(samples, classes)``.
        labels: Shape ``(samples,)``.

    Returns:
        In nats. Shape ``(samples,)``.

    Example:
        >>> log_odds(torch.tensor([[200.0, 0.0, 0.0]]), torch.tensor([0]))
        tensor([-199.3069])
    """
    own = labels[:, None]
    return logits.scatter(1, own, -math.inf).logsumexp(dim=1) - logits.gather(1, own)[:, 0]


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Compute the margin :math:`z_y - \max_{i \ne y} z_i`, positive where the label is right.

    Args:
        logits: Shape ``(samples, classes)``.
        labels: Shape ``(samples,)``.

    Returns:
        In the units of the logits. Shape ``(samples,)``.

    Example:
        >>> margin(torch.tensor([[4.0, 1.0], [4.0, 1.0]]), torch.tensor([0, 1]))
        tensor([ 3., -3.])
    """
    own = labels[:, None]
    others = logits.scatter(1, own, -math.inf)
    return logits.gather(1, own)[:, 0] - others.amax(dim=1)


def pgd(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    norm: Norm,
    epsilon: float,
    step_size: float,
    steps: int,
    loss: AttackLoss = "ce",
    random_start: bool = False,
    record: bool | int = False,
    seed: int | None = None,
    box: tuple[float, float] = (0.0, 1.0),
    batch_size: int = 128,
) -> Attack:
    r"""Climb the loss by projected gradient steps from each input.

    With :math:`\Pi` the projection onto the ball around x and onto the box,

    .. math::
        x_{t+1} = \Pi\bigl(x_t + \alpha\, \operatorname{sign} \nabla \ell(x_t)\bigr)
        \quad\text{or}\quad
        \Pi\Bigl(x_t + \alpha \frac{\nabla \ell(x_t)}{\|\nabla \ell(x_t)\|_2}\Bigr) .

    Every iterate lies in the box and in the ball exactly, as measured in the precision of ``x``.
    An input whose gradient is zero stays where it is: :func:`zero_gradient_share` tells how many.

    Args:
        model: Maps inputs to logits ``(samples, classes)``, in evaluation mode. Normalisation
            belongs inside it.
        x: Inputs in the box, in the precision of the model, on its device. Shape
            ``(samples, ...)``.
        y: Their labels. Shape ``(samples,)``.
        norm: ``"linf"`` or ``"l2"``.
        epsilon: Radius of the ball, in units of the inputs; 0 returns the inputs.
        step_size: Length :math:`\alpha` of a step in ``norm``.
        steps: Number of steps.
        loss: Cross-entropy, :func:`dlr_loss`, or :func:`log_odds`, whose steps are those of
            the cross-entropy without its rounding.
        random_start: Whether to start at a random point: uniform in the ball of ``linf``; in a
            uniform direction at a uniform distance for ``l2``.
        record: Whether to keep the path; k keeps every k-th step, the first and the last. The
            memory grows with the number kept.
        seed: Of the start; None draws from torch's global generator.
        box: The least and greatest value of an input.
        batch_size: Samples attacked at a time.

    Returns:
        The attacked inputs and, with ``record``, the path.

    Raises:
        ValueError: If an option is out of range; if ``x`` leaves the box or does not fit the
            model; or if the model is in training mode, returns probabilities, cannot be
            differentiated, or has a gradient that is not a number.

    Reference:
        Madry et al. (2018). Towards deep learning models resistant to adversarial attacks. ICLR.

    Example:
        The logits of ``nn.Identity`` are the inputs: raise the wrong one, lower the right one.

        >>> x, y = torch.tensor([[0.9, 0.5, 0.5]]), torch.tensor([0])
        >>> attack = pgd(
        ...     nn.Identity().eval(), x, y, norm="linf", epsilon=0.25, step_size=0.25, steps=1
        ... )
        >>> attack.x_adv
        tensor([[0.6500, 0.7500, 0.7500]])
    """
    x, y, low, high = checked(model, x, y, norm=norm, epsilon=epsilon, box=box)
    epsilon, step_size = float(epsilon), checks.positive("step_size", step_size)
    checks.count("steps", steps, at_least=0)
    checks.count("batch_size", batch_size)
    checks.choice("loss", loss, get_args(AttackLoss))
    kept = _recorded(record, steps)
    climb = _LOSSES[loss]
    start = x
    if random_start and epsilon > 0:
        project = ball(x, norm, epsilon, low, high)
        start = project(x + _random_offsets(x, norm, epsilon, seed))
    if epsilon == 0:
        path = x.expand(len(kept), *x.shape).clone() if kept else None
        return Attack(x.clone(), path, kept)
    path = x.new_empty(len(kept), *x.shape) if kept else None
    ends = []
    with frozen(model):
        for first in range(0, len(x), batch_size):
            rows = slice(first, first + batch_size)
            # Convolutions on a CPU are fastest with the channels last.
            layout = torch.channels_last if x.ndim == 4 else torch.contiguous_format
            clean, now = (part[rows].contiguous(memory_format=layout) for part in (x, start))
            labels, place = y[rows], 0
            project = ball(clean, norm, epsilon, low, high)
            for step in range(steps + 1):
                if step:
                    slope = input_gradient(model, now, labels, climb)
                    now = project(now + _ascent(slope, norm, step_size))
                if kept and kept[place] == step:
                    path[place, rows] = now
                    place += 1
            ends.append(now)
    return Attack(torch.cat(ends).contiguous(), path, kept)


def random_search(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    norm: Norm,
    epsilon: float,
    queries: int = 200,
    seed: int = 0,
    box: tuple[float, float] = (0.0, 1.0),
) -> Attack:
    r"""Attack without gradients: propose random changes and keep those that lower the margin.

    A proposal redraws, in a random patch, the change of every pixel: for ``linf`` to plus or minus
    ``epsilon`` channel by channel, for ``l2`` to noise, and all is scaled back into the ball. The
    patch shrinks from half of the inputs' size to a single pixel. It is a short form of the Square
    attack, and a floor: what it finds is there, what it misses may be there as well.

    Args:
        model: As for :func:`pgd`.
        x: As for :func:`pgd`; images ``(samples, channels, height, width)`` or features
            ``(samples, features)``.
        y: Their labels. Shape ``(samples,)``.
        norm: ``"linf"`` or ``"l2"``.
        epsilon: Radius of the ball.
        queries: Proposals for each input.
        seed: Of the proposals.
        box: The least and greatest value of an input.

    Returns:
        The inputs with the least margin found.

    Raises:
        ValueError: As for :func:`pgd`.

    Reference:
        Andriushchenko et al. (2020). Square Attack. ECCV.

    Example:
        >>> x, y = torch.full((1, 3), 0.5), torch.tensor([0])
        >>> found = random_search(nn.Identity().eval(), x, y, norm="linf", epsilon=0.25)
        >>> found.x_adv[0, 0].item(), found.x_adv[0, 1:].max().item()
        (0.25, 0.75)
    """
    x, y, low, high = checked(model, x, y, norm=norm, epsilon=epsilon, box=box)
    epsilon = float(epsilon)
    checks.count("queries", queries)
    random = runtime.generator(seed)
    if epsilon == 0:
        return Attack(x.clone())
    images = x if x.ndim == 4 else x.flatten(1)[:, None, None, :]
    project = ball(images, norm, epsilon, low, high)
    height, width = images.shape[2:]

    def margins(candidates: Tensor) -> Tensor:
        logits = [model(part.reshape(-1, *x.shape[1:])) for part in candidates.split(512)]
        return margin(torch.cat(logits), y)

    with torch.no_grad():
        best, least = images, margins(images)
        if least.isnan().any():
            raise ValueError("model must return finite logits; got inf or nan.")
        for query in range(queries):
            share = 0.5 * (1 - query / queries)
            size = [max(1, round(side * math.sqrt(share))) for side in (height, width)]
            patch = _patches(len(images), (height, width), size, random).to(x.device)
            noise = torch.randn(images.shape, generator=random).to(images)
            if norm == "linf":
                signs = noise[..., :1, :1].sign() if x.ndim == 4 else noise.sign()
                change = epsilon * signs.expand_as(images)
            else:
                # Twice the radius, so that the projection lands on the sphere.
                noise = noise * patch
                change = 2 * epsilon * noise / noise.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
            proposal = project(torch.where(patch, images + change, best))
            reached = margins(proposal)
            better = reached < least
            best = torch.where(better.view(-1, 1, 1, 1), proposal, best)
            least = torch.where(better, reached, least)
    return Attack(best.reshape(x.shape).clone())


def auto_attack(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    norm: Norm,
    epsilon: float,
    seed: int = 0,
    batch_size: int = 250,
    box: tuple[float, float] = (0.0, 1.0),
) -> Attack:
    """Run AutoAttack, the field's referee: APGD-CE, targeted APGD-DLR and FAB, and Square.

    Needs the optional package: ``pip install flatbook[attacks]``.

    Args:
        model: As for :func:`pgd`, with at least 4 classes, in float32.
        x: As for :func:`pgd`; images ``(samples, channels, height, width)``.
        y: Their labels. Shape ``(samples,)``.
        norm: ``"linf"`` or ``"l2"``.
        epsilon: Radius of the ball.
        seed: Of its random parts.
        batch_size: Samples attacked at a time.
        box: Must be 0 to 1, which AutoAttack assumes.

    Returns:
        The attacked inputs, in the ball and in the box.

    Raises:
        ImportError: If ``pyautoattack`` is not installed.
        ValueError: As for :func:`pgd`, or if AutoAttack cannot take the model or the inputs.

    Reference:
        Croce & Hein (2020). Reliable evaluation of adversarial robustness with an ensemble of
        diverse parameter-free attacks. ICML.
    """
    x, y, low, high = checked(model, x, y, norm=norm, epsilon=epsilon, box=box)
    checks.count("batch_size", batch_size)
    if (low, high) != (0.0, 1.0):
        raise ValueError(f"box must be (0.0, 1.0) for AutoAttack; got {box!r}.")
    if x.ndim != 4 or x.dtype != torch.float32:
        raise ValueError(
            "x must be images in float32 for AutoAttack, (samples, channels, height, width); "
            f"got {x.dtype} of shape {tuple(x.shape)}."
        )
    with torch.no_grad():
        classes = model(x[:1]).shape[1]
    if classes < 4:
        raise ValueError(f"model must have at least 4 classes for AutoAttack; got {classes}.")
    try:
        from pyautoattack import AutoAttack
    except ImportError as error:
        raise ImportError(
            "auto_attack needs pyautoattack, which is not installed: pip install flatbook[attacks]"
        ) from error
    if epsilon == 0:
        return Attack(x.clone())
    referee = AutoAttack(
        _PlainLayout(model).eval(),
        norm={"linf": "Linf", "l2": "L2"}[norm],
        eps=float(epsilon),
        seed=checks.count("seed", seed, at_least=0),
        device=x.device,
    )
    for part in (referee.apgd_targeted, referee.fab):  # 9 unless there are fewer other classes
        part.n_target_classes = min(9, classes - 1)
    with frozen(model), runtime.forked_seed(seed):
        found = referee.run_standard_evaluation(x.contiguous(), y, batch_size=batch_size)
    found = found[0] if isinstance(found, tuple) else found
    return Attack(ball(x, norm, epsilon, low, high)(found.to(x)))


class _PlainLayout(nn.Module):
    """The same model, whose input gradient has its channels first in memory, as AutoAttack needs.

    Weights with the channels last would hand it a gradient that it cannot view as rows.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(_ContiguousGradient.apply(x))


class _ContiguousGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, slope: Tensor) -> Tensor:
        return slope.contiguous()


def zero_gradient_share(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    loss: AttackLoss = "ce",
    box: tuple[float, float] = (0.0, 1.0),
    batch_size: int = 128,
) -> float:
    """Measure the share of inputs at which the gradient of the loss is zero in every entry.

    A first-order attack leaves them where they are, so they count as robust whatever the truth:
    the one-line test for masked gradients.

    Args:
        model: As for :func:`pgd`.
        x: Inputs. Shape ``(samples, ...)``.
        y: Their labels. Shape ``(samples,)``.
        loss: Of which loss.
        box: The least and greatest value of an input.
        batch_size: Samples per pass.

    Returns:
        In [0, 1].

    Raises:
        ValueError: As for :func:`pgd`.

    Example:
        A margin of 200 nats leaves nothing of the gradient in float32.

        >>> x, y = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([0, 0])
        >>> sharp = nn.Linear(2, 2, bias=False)
        >>> _ = sharp.weight.data.copy_(200 * torch.eye(2))
        >>> zero_gradient_share(sharp.eval(), x, y)
        0.5
    """
    checks.choice("loss", loss, get_args(AttackLoss))
    checks.count("batch_size", batch_size)
    x, y, *_ = checked(model, x, y, norm="linf", epsilon=0.0, box=box)
    climb = _LOSSES[loss]
    with frozen(model):
        still = [
            (input_gradient(model, *part, climb) == 0).flatten(1).all(dim=1)
            for part in zip(x.split(batch_size), y.split(batch_size), strict=True)
        ]
    return torch.cat(still).double().mean().item()


def input_gradient(
    model: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return the gradient of each sample's loss in its input, in the shape of ``x``.

    Raises:
        ValueError: If there is none, or an entry is nan: taken for 0, it would pass for robustness.
    """
    if torch.is_inference_mode_enabled() or x.is_inference():
        raise ValueError(
            "x must have a gradient: call this outside torch.inference_mode, on inputs that were "
            "made outside; torch.no_grad does no harm."
        )
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        losses = loss(model(x), y)
        slope = None
        if losses.requires_grad:
            (slope,) = torch.autograd.grad(losses.sum(), x, allow_unused=True)
    if slope is None:
        raise ValueError(
            "model must be differentiable: its logits do not depend on x in a way that autograd "
            "can follow. random_search needs no gradient."
        )
    if slope.isnan().any() or losses.isnan().any():
        broken = int((slope.isnan().flatten(1).any(dim=1) | losses.isnan()).sum())
        raise ValueError(
            f"model must have a loss and a gradient that are numbers; got nan at {broken} of "
            f"{len(x)} inputs, as from infinite logits or the root of 0. random_search needs no "
            "gradient."
        )
    return slope


def ball(
    x: Tensor, norm: Norm, epsilon: float, low: float, high: float
) -> Callable[[Tensor], Tensor]:
    """Return the projection onto the ball around ``x`` and the box.

    Its values satisfy both constraints as computed in the precision of ``x``: where rounding
    would carry a point out of the ball, it is pulled in by a few units in the last place.
    """
    eps = torch.finfo(x.dtype).eps
    radius = torch.tensor(epsilon, dtype=x.dtype, device=x.device)
    if radius.item() > epsilon:
        radius = torch.nextafter(radius, torch.zeros_like(radius))
    if norm == "linf":
        floor, ceiling = x - radius, x + radius
        for bound in (floor, ceiling):
            while (over := (bound - x).abs() > radius).any():
                bound[over] = torch.nextafter(bound[over], x[over])
        floor, ceiling = floor.clamp_(low, high), ceiling.clamp_(low, high)
        return lambda point: torch.minimum(torch.maximum(point, floor), ceiling)

    def length(delta: Tensor) -> Tensor:
        return runtime.widened(delta).flatten(1).norm(dim=1).view(-1, *[1] * (x.ndim - 1))

    # Sums of squares in the precision of x err either way: the true length keeps a distance from
    # the radius, and what torch makes of it counts as well, for its sum of many equal squares is
    # off by more.
    allowed = epsilon * (1 - 16 * eps)
    bar = radius * (1 - 4 * eps)

    def outside(delta: Tensor) -> Tensor:
        rounded = torch.linalg.vector_norm(delta.flatten(1), dim=1)
        return (length(delta) > allowed) | (rounded > bar).view(-1, *[1] * (x.ndim - 1))

    def project(point: Tensor) -> Tensor:
        delta = point - x
        share = (allowed / length(delta)).clamp(max=1.0)  # 0 / 0 does not occur: allowed > 0
        slack = float(eps)
        while True:
            inside = (x + delta * share.to(x.dtype)).clamp(low, high)
            over = outside(inside - x)
            if not over.any():
                return inside
            share = torch.where(over, share * (1 - slack), share)
            slack = min(1.0, 4 * slack)

    return project


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Spare the weights their gradients inside the block."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


def checked(
    model: nn.Module, x, y, *, norm: str, epsilon: float, box: tuple[float, float]
) -> tuple[Tensor, Tensor, float, float]:
    """Check what every attack is given; return the inputs, the labels and the box."""
    checks.module("model", model)
    checks.choice("norm", norm, get_args(Norm))
    checks.non_negative("epsilon", epsilon)
    low, high = _box(box)
    refuse_training(model)
    x = checks.tensor("x", x, ("samples", *[None] * (max(getattr(x, "ndim", 2), 2) - 1))).detach()
    if x.min() < low or x.max() > high:
        raise ValueError(
            f"x must lie in the box, {low:g} to {high:g}; got {x.min().item()} to "
            f"{x.max().item()}. Put normalisation inside the model, or name another box."
        )
    refuse_another_type(model, x)
    logits = refused_by_name(model, x[:128], size=len(x))
    refuse_probabilities(logits)
    if len(logits) != len(x[:128]):
        raise ValueError(
            "model must return logits of shape (samples, classes); "
            f"got {len(logits)} rows for {len(x[:128])} inputs."
        )
    return x, checks.labels("y", y, logits.shape[1], samples=len(x)).to(x.device), low, high


def refuse_another_type(model: nn.Module, x: Tensor, *, name: str = "x") -> None:
    """Raise a ValueError unless inputs are in the precision of the model and on its device."""
    like = next((p for p in model.parameters() if p.is_floating_point()), x)
    if (like.dtype, like.device) != (x.dtype, x.device):
        raise ValueError(
            f"{name} must be of the model's type and on its device, {like.dtype} on "
            f"{like.device}; got {x.dtype} on {x.device}."
        )


def refuse_training(model: nn.Module) -> None:
    """Raise a ValueError unless the model and all its parts are in evaluation mode."""
    training = [type(part).__name__ for part in model.modules() if part.training]
    if training:
        raise ValueError(
            f"model must be in evaluation mode, call model.eval(); its {training[0]} is in "
            "training mode."
        )


def refuse_probabilities(logits: Tensor) -> None:
    """Raise a ValueError unless these can be the logits of several classes."""
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < 2:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"model must return logits of shape (samples, classes), 2 or more; got {got}."
        )
    if not logits.isfinite().all():
        raise ValueError("model must return finite logits; got inf or nan.")
    sums = runtime.widened(logits).sum(dim=1)
    rounding = max(1e-3, torch.finfo(logits.dtype).eps)
    if (logits >= 0).all() and ((sums - 1).abs() < rounding).all():
        raise ValueError(
            "model must return logits; its outputs are probabilities, positive with sum 1. Take "
            "the softmax off, or attack the logarithm of its outputs."
        )


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels, reduction="none")


_LOSSES = {"ce": _cross_entropy, "dlr": dlr_loss, "log-odds": log_odds}


def _ascent(slope: Tensor, norm: Norm, step_size: float) -> Tensor:
    if norm == "linf":
        return step_size * slope.sign()
    axes, dtype, number = tuple(range(1, slope.ndim)), slope.dtype, torch.finfo(slope.dtype)
    # Squares of tiny entries would vanish before their root is taken, those of infinite ones would
    # hide the others, and a sum of many overflows in half precision.
    slope = slope.clamp(number.min, number.max)
    slope = slope / slope.abs().amax(dim=axes, keepdim=True).clamp(min=number.smallest_normal)
    slope = slope.to(torch.promote_types(dtype, torch.float32))
    length = slope.square().sum(dim=axes, keepdim=True).sqrt()
    return (step_size * slope / length.masked_fill(length == 0, 1.0)).to(dtype)


def _recorded(record: bool | int, steps: int) -> tuple[int, ...]:
    if record is False:
        return ()
    every = 1 if record is True else checks.count("record", record)
    return tuple(step for step in range(steps + 1) if step % every == 0 or step == steps)


def _random_offsets(x: Tensor, norm: Norm, epsilon: float, seed: int | None) -> Tensor:
    random = None if seed is None else runtime.generator(seed)
    if norm == "linf":
        return (epsilon * (2 * torch.rand(x.shape, generator=random) - 1)).to(x)
    noise = torch.randn(x.shape, generator=random, dtype=torch.float64).flatten(1)
    reach = epsilon * torch.rand(len(x), 1, generator=random, dtype=torch.float64)
    return (reach * noise / noise.norm(dim=1, keepdim=True)).view(x.shape).to(x)


def _patches(samples: int, sides, size, random: torch.Generator) -> Tensor:
    """Return one rectangle of pixels per sample, True inside. Shape ``(samples, 1, h, w)``."""
    inside = []
    for side, extent in zip(sides, size, strict=True):
        first = torch.randint(side - extent + 1, (samples, 1), generator=random)
        place = torch.arange(side)
        inside.append((place >= first) & (place < first + extent))
    return inside[0][:, None, :, None] & inside[1][:, None, None, :]


def _box(box) -> tuple[float, float]:
    try:
        low, high = (float(edge) for edge in box)
        fits = low < high and math.isfinite(low) and math.isfinite(high)
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ValueError(f"box must be two finite numbers, the least first; got {box!r}.")
    return low, high
