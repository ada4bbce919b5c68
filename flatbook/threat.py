"""What every attack shares: the ball and the box it must stay in, and what it may be given."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from flatbook import checks, runtime
from flatbook.curvature import refused_by_name

Norm = Literal["linf", "l2"]


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
        losses = loss(model(x.clone()), y)  # a copy, for the model may work in place
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
    if any(p.is_inference() for p in trainable):
        raise ValueError(
            "model must have been made outside torch.inference_mode; its weights allow no gradient."
        )
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


def _box(box) -> tuple[float, float]:
    try:
        low, high = (float(edge) for edge in box)
        fits = low < high and math.isfinite(low) and math.isfinite(high)
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ValueError(f"box must be two finite numbers, the least first; got {box!r}.")
    return low, high
