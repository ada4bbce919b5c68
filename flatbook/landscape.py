"""The loss along filter-normalised random directions through a trained network."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from flatbook import checks, runtime
from flatbook.curvature import batches, checked_problem
from flatbook.models import evaluating
from flatbook.progress import bar


@dataclass(frozen=True)
class Landscape:
    """The loss on a line or a square grid of weights.

    Attributes:
        alphas: Positions along the first direction; 0 is the model. Shape ``(steps,)``.
        betas: Positions along the second, or None for a line. Shape ``(steps,)``.
        loss: Mean cross-entropy in nats. Shape ``(steps,)``, or ``(steps, steps)`` with
            alphas down and betas across.
        accuracy: Share of samples classified correctly, in the same shape.
    """

    alphas: Tensor
    betas: Tensor | None
    loss: Tensor
    accuracy: Tensor


def loss_landscape(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    dimensions: int = 1,
    span: float = 1.0,
    steps: int = 21,
    seed: int = 0,
    batch_size: int = 512,
    progress: bool = False,
) -> Landscape:
    r"""Cut the loss along one or two random directions, scaled to the weights.

    The cut is :math:`L(\theta + \alpha d + \beta e)` with Gaussian directions d and e in which
    each filter (each row, in a linear layer) has the norm of the filter it moves,

    .. math:: d_f \leftarrow \frac{\|\theta_f\|}{\|d_f\|} d_f,

    so that a network whose layers are rescaled without changing its function shows the same
    landscape. Parameters with one axis, the biases and the normalisation layers, stay put, and
    so do frozen ones. At :math:`\alpha = 1` every moved filter has changed by its own norm.

    The model itself is never written to: the moved weights are copies.

    Args:
        model: Maps inputs to logits ``(samples, classes)``.
        x: Inputs. Shape ``(samples, ...)``.
        y: Labels. Shape ``(samples,)``.
        dimensions: 1 for a line, 2 for a plane.
        span: Positions run from ``-span`` to ``span``.
        steps: Number of positions per direction; an odd number meets the model in the middle.
        seed: Of the directions. The plane's first direction is the line's.
        batch_size: Samples per forward pass.
        progress: Show a bar.

    Returns:
        Positions, losses and accuracies, on the CPU.

    Raises:
        ValueError: If a shape, a label or a number is out of range, nothing is trainable, the
            parameters are half precision, or the loss is not finite somewhere on the cut.

    Reference:
        Li et al. (2018). Visualizing the loss landscape of neural nets. NeurIPS.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> x, y = torch.eye(2), torch.tensor([0, 1])
        >>> cut = loss_landscape(model, x, y, steps=3)
        >>> cut.alphas
        tensor([-1.,  0.,  1.])
        >>> torch.isclose(cut.loss[1], cross_entropy(model(x), y)).item()
        True
    """
    if dimensions not in (1, 2):
        raise ValueError(f"dimensions must be 1 or 2; got {dimensions!r}.")
    checks.positive("span", span)
    checks.count("steps", steps, at_least=2)
    parameters, x, y = checked_problem(model, x, y)
    weights = {name: p.detach() for name, p in parameters.items()}
    random = runtime.generator(seed)
    directions = [
        {name: _filter_normalised(w, random) for name, w in weights.items()}
        for _ in range(dimensions)
    ]
    device = next(iter(weights.values())).device
    # Built from its middle, so that it is symmetric and an odd one contains an exact 0.
    positions = span * (2 * torch.arange(steps, dtype=x.dtype) - (steps - 1)) / (steps - 1)
    places = torch.cartesian_prod(*[positions] * dimensions).reshape(-1, dimensions)
    losses, accuracies = torch.zeros(2, len(places), dtype=torch.float64)
    points = bar(len(places), label="landscape", unit="point", show=progress)
    with evaluating(model), torch.no_grad(), points:
        for i, place in enumerate(places.tolist()):
            moved = {
                name: w + sum(a * d[name] for a, d in zip(place, directions, strict=True))
                for name, w in weights.items()
            }
            for inputs, labels in batches(x, y, batch_size, device):
                logits = functional_call(model, moved, (inputs,))
                losses[i] += cross_entropy(logits, labels, reduction="sum").item()
                accuracies[i] += (logits.argmax(dim=1) == labels).sum().item()
            if not math.isfinite(losses[i]):
                raise ValueError(
                    f"The loss must be finite on the whole cut; got {losses[i].item()} at "
                    f"{tuple(place)} with span={span:g}."
                )
            points.update()
    shape = (steps,) * dimensions
    return Landscape(
        alphas=positions,
        betas=positions if dimensions == 2 else None,
        loss=(losses / len(x)).reshape(shape).to(x.dtype),
        accuracy=(accuracies / len(x)).reshape(shape).to(x.dtype),
    )


def _filter_normalised(weight: Tensor, random: torch.Generator) -> Tensor:
    if weight.ndim < 2:
        return torch.zeros_like(weight)
    direction = torch.randn(weight.shape, generator=random, dtype=weight.dtype).to(weight.device)
    rows = (-1, *(1,) * (weight.ndim - 1))
    scale = weight.flatten(1).norm(dim=1) / direction.flatten(1).norm(dim=1)
    return direction * scale.view(rows)
