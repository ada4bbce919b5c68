"""Projected gradient attacks, their losses, and the test for gradients that are zero."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flatbook import checks, runtime
from flatbook.threat import Attack, Norm, ball, checked, frozen, input_gradient

AttackLoss = Literal["ce", "dlr", "log-odds"]


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

    Raises:
        ValueError: If the shapes disagree, there are fewer than 3 classes, or a logit is not
            finite.

    Reference:
        Croce & Hein (2020). Reliable evaluation of adversarial robustness with an ensemble of
        diverse parameter-free attacks. ICML.

    Example:
        >>> dlr_loss(torch.tensor([[4.0, 1.0, 0.0]]), torch.tensor([0]))
        tensor([-0.7500])
    """
    return _dlr(*_checked_logits(logits, labels))


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

    Raises:
        ValueError: If the shapes disagree, there is a single class, or a logit is not finite.

    Example:
        >>> log_odds(torch.tensor([[200.0, 0.0, 0.0]]), torch.tensor([0]))
        tensor([-199.3069])
    """
    return _log_odds(*_checked_logits(logits, labels))


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Compute the margin :math:`z_y - \max_{i \ne y} z_i`, positive where the label is right.

    Args:
        logits: Shape ``(samples, classes)``.
        labels: Shape ``(samples,)``.

    Returns:
        In the units of the logits. Shape ``(samples,)``.

    Raises:
        ValueError: If the shapes disagree, there is a single class, or a logit is not finite.

    Example:
        >>> margin(torch.tensor([[4.0, 1.0], [4.0, 1.0]]), torch.tensor([0, 1]))
        tensor([ 3., -3.])
    """
    return margins(*_checked_logits(logits, labels))


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


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels, reduction="none")


def _dlr(logits: Tensor, labels: Tensor) -> Tensor:
    if logits.shape[1] < 3:
        raise ValueError(f'loss="dlr" needs a model of at least 3 classes; got {logits.shape[1]}.')
    top = logits.topk(3, dim=1).values
    span = top[:, 0] - top[:, 2]
    return -margins(logits, labels) / span.masked_fill(span == 0, 1.0)


def _log_odds(logits: Tensor, labels: Tensor) -> Tensor:
    own = labels[:, None]
    return logits.scatter(1, own, -math.inf).logsumexp(dim=1) - logits.gather(1, own)[:, 0]


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """Return :func:`margin` of logits that may be anything, unchecked."""
    own = labels[:, None]
    others = logits.scatter(1, own, -math.inf)
    return logits.gather(1, own)[:, 0] - others.amax(dim=1)


_LOSSES = {"ce": _cross_entropy, "dlr": _dlr, "log-odds": _log_odds}


def _checked_logits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = checks.tensor("logits", logits, ("samples", "classes"))
    n, k = logits.shape
    if k < 2:
        raise ValueError(f"logits must have at least 2 columns, one per class; got {k}.")
    return logits, checks.labels("labels", labels, k, samples=n).to(logits.device)


def _finite(amount: float, dtype: torch.dtype) -> float:
    """Return ``amount``, or a number beyond any ball from which the projection leads back."""
    return min(amount, torch.finfo(dtype).max / 4, 1e150)


def _ascent(slope: Tensor, norm: Norm, step_size: float) -> Tensor:
    step_size = _finite(step_size, slope.dtype)
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
    epsilon = _finite(epsilon, x.dtype)
    if norm == "linf":
        return (epsilon * (2 * torch.rand(x.shape, generator=random) - 1)).to(x)
    noise = torch.randn(x.shape, generator=random, dtype=torch.float64).flatten(1)
    reach = epsilon * torch.rand(len(x), 1, generator=random, dtype=torch.float64)
    return (reach * noise / noise.norm(dim=1, keepdim=True)).view(x.shape).to(x)
