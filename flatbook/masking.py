"""Tell masked gradients from robustness: the same network under attacks that see through masks."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatbook import checks
from flatbook.attacks import pgd, zero_gradient_share
from flatbook.blackbox import random_search
from flatbook.threat import Norm, ball, checked, refuse_probabilities


@dataclass(frozen=True)
class MaskingReport:
    """Accuracies of one classifier under attacks that gradients can and cannot mislead.

    Attributes:
        clean: The accuracy without attack.
        zero_gradient_share: Share of inputs at which the gradient of the cross-entropy is exactly
            zero in the model's own precision.
        saturated_share: Share of inputs at which that gradient has lost the label's own part,
            because the label's probability rounds to 1; see :func:`saturated`.
        robust: The accuracy under each attack, by name: ``ce``, ``ce float64``, ``log-odds``,
            ``dlr``, ``transfer`` and ``random search``.
        temperature: What the surrogate of ``transfer`` divides the logits by.
    """

    clean: float
    zero_gradient_share: float
    saturated_share: float
    robust: Mapping[str, float]
    temperature: float

    @property
    def strongest(self) -> str:
        """The name of the attack that leaves the least accuracy."""
        return min(self.robust, key=lambda name: self.robust[name])

    @property
    def masked(self) -> float:
        """What the plain attack overstates: its accuracy less that of the strongest."""
        return self.robust["ce"] - min(self.robust.values())

    def table(self) -> str:
        """Return the report as a Markdown table."""
        rows = [("no attack", self.clean), *self.robust.items()]
        lines = ["| attack | accuracy, % |", "|---|---|"]
        lines += [f"| {name} | {100 * value:.1f} |" for name, value in rows]
        return "\n".join(lines)


def masking_report(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    norm: Norm,
    epsilon: float,
    steps: int,
    step_size: float | None = None,
    queries: int = 200,
    seed: int = 0,
    box: tuple[float, float] = (0.0, 1.0),
    batch_size: int = 128,
) -> MaskingReport:
    r"""Attack a classifier with and without what masks gradients, and compare.

    The plain attack, :func:`pgd` on the cross-entropy, stands beside the same attack in float64,
    with :func:`dlr_loss` and :func:`log_odds`, on a surrogate that divides the logits by the
    median gap between the first two (**transfer**: the same classifier, so what fools it fools the
    model), and beside :func:`random_search`. If any of them leaves much less accuracy, gradients
    are masked.

    Args:
        model: As for :func:`pgd`. With 2 classes DLR is left out, and the attack in float64 if a
            copy of the model cannot compute in it.
        x: As for :func:`pgd`.
        y: Their labels. Shape ``(samples,)``.
        norm: ``"linf"`` or ``"l2"``.
        epsilon: Radius of the ball.
        steps: Number of steps of each attack.
        step_size: Of each attack; the default is 2.5 · epsilon / steps.
        queries: Proposals of the random search.
        seed: Of the random search.
        box: The least and greatest value of an input.
        batch_size: Samples attacked at a time.

    Returns:
        The report; its ``masked`` is how much the plain attack overstates the accuracy.

    Raises:
        ValueError: As for :func:`pgd`.

    Example:
        >>> from flatbook import build, scaled
        >>> model = build("mlp", num_classes=3, input_shape=(4,), seed=0).eval()
        >>> x = torch.rand(20, 4)
        >>> y = model(x).argmax(dim=1)
        >>> report = masking_report(
        ...     scaled(model, 1e4), x, y, norm="linf", epsilon=0.2, steps=10
        ... )
        >>> report.clean, report.masked > 0.1
        (1.0, True)
    """
    x, y, low, high = checked(model, x, y, norm=norm, epsilon=epsilon, box=box)
    epsilon = float(epsilon)
    checks.count("steps", steps)
    checks.count("batch_size", batch_size)
    if step_size is None:
        step_size = 2.5 * epsilon / steps if epsilon else 1.0
    common = {"norm": norm, "epsilon": epsilon, "box": box}
    climb = {**common, "step_size": step_size, "steps": steps, "batch_size": batch_size}

    def rounded(inputs: Tensor) -> Tensor:  # rounding alone could leave the ball
        inputs = inputs.to(x.dtype)
        return inputs if epsilon == 0 else ball(x, norm, epsilon, low, high)(inputs)

    @torch.no_grad()
    def logits_of(inputs: Tensor) -> Tensor:  # a copy, for the model may work in place
        return torch.cat([model(part.clone()) for part in inputs.split(batch_size)])

    def accuracy(inputs: Tensor) -> float:
        logits = logits_of(inputs)
        refuse_probabilities(logits)
        return (logits.argmax(dim=1) == y).double().mean().item()

    logits = logits_of(x)
    top = logits.double().topk(2, dim=1).values
    temperature = (top[:, 0] - top[:, 1]).median().item() or 1.0
    losses = ("ce", "log-odds", "dlr") if logits.shape[1] > 2 else ("ce", "log-odds")
    wide = _doubled(model, x)
    robust = {}
    for loss in losses:
        robust[loss] = accuracy(pgd(model, x, y, loss=loss, **climb).x_adv)
        if wide is not None and loss == "ce":
            attacked = pgd(wide, x.double(), y, loss=loss, **climb).x_adv
            robust[f"{loss} float64"] = accuracy(rounded(attacked))
    surrogate = _Tempered(model, temperature)
    robust["transfer"] = accuracy(pgd(surrogate, x, y, **climb).x_adv)
    robust["random search"] = accuracy(
        random_search(model, x, y, queries=queries, seed=seed, **common).x_adv
    )
    return MaskingReport(
        clean=accuracy(x),
        zero_gradient_share=zero_gradient_share(model, x, y, box=box, batch_size=batch_size),
        saturated_share=saturated(logits, y).double().mean().item(),
        robust=robust,
        temperature=temperature,
    )


def saturated(logits: Tensor, y: Tensor) -> Tensor:
    r"""Tell where the cross-entropy's gradient has lost the label's own part.

    In the logits that gradient is :math:`p - e_y`. Once :math:`p_y` rounds to 1 its entry at the
    label is 0, while the others live on: from a margin of about 17 nats in float32 and 37 in
    float64 a first-order attack climbs :math:`\sum_{j \ne y} p_j z_j` and has forgotten what it
    is to leave. From about 103 and 745 nats there is no gradient at all.

    Args:
        logits: In the precision of the model. Shape ``(samples, classes)``.
        y: Labels. Shape ``(samples,)``.

    Returns:
        True or False. Shape ``(samples,)``.

    Example:
        >>> logits, y = torch.tensor([[16.0, 0.0], [18.0, 0.0]]), torch.tensor([0, 0])
        >>> saturated(logits, y), saturated(logits.double(), y)
        (tensor([False,  True]), tensor([False, False]))
    """
    logits = checks.tensor("logits", logits, ("samples", "classes"))
    y = checks.labels("y", y, logits.shape[1], samples=len(logits)).to(logits.device)
    return logits.log_softmax(dim=1).gather(1, y[:, None])[:, 0].exp() == 1


class _Tempered(nn.Module):
    """The same classifier, its logits divided by a temperature."""

    def __init__(self, model: nn.Module, temperature: float):
        super().__init__()
        self.model, self.temperature = model, temperature
        self.training = False  # the model's parts are in evaluation mode already

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) / self.temperature


def _doubled(model: nn.Module, x: Tensor) -> nn.Module | None:
    """Return the model in float64; None if it is so already or cannot be."""
    if x.dtype == torch.float64 or x.device.type == "mps":
        return None
    try:
        twin = copy.deepcopy(model).double()
        with torch.no_grad():
            twin(x[:1].double())
    except (RuntimeError, TypeError):  # such as a model that rounds its inputs to float32
        return None
    return twin
