"""The methods that are a loss and an optimizer: one small class each."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div
from torch.optim import Optimizer

from flatbook import checks, runtime
from flatbook.optim import SAM, MicroBatchSAM
from flatbook.unlearning.saliency import GradientMasked, masked, rebuilt, saliency_mask
from flatbook.unlearning.sets import Pair

Variant = Literal["paper", "released"]
Stream = Callable[..., Iterator[list[Pair]]]


class Task(NamedTuple):
    """What a method is given at the start.

    Attributes:
        retain: Inputs and labels to keep.
        forget: Inputs and labels to forget.
        classes: Number of classes.
        epochs: How many will be run.
        seed: Of what the method draws.
    """

    retain: Pair
    forget: Pair
    classes: int
    epochs: int
    seed: int


class Method:
    """What all methods share: batches go through a loss, and an optimizer steps on it.

    A method of your own overrides `passes` and has a loss for each pass; hand an instance of it to
    `flatbook.unlearning.unlearn`.
    """

    task: Task

    def start(self, model: nn.Module, task: Task) -> None:
        """Look at the model before it changes; draw what is random."""
        self.task = task

    def build(
        self, model: nn.Module, optimizer: Callable[[list], Optimizer], parameters: list
    ) -> list[Optimizer]:
        """Build the optimizers of the run."""
        built = optimizer(parameters)
        return [rebuilt(built, model) if isinstance(built, SAM) else built]

    def passes(self, epoch: int) -> list[tuple[tuple[Pair, ...], Callable[..., Tensor]]]:
        """Return what to go through in an epoch, and the loss of each batch of it.

        An epoch ends with the first of the sets; further ones are repeated as often as need be.
        """
        raise NotImplementedError

    def epoch(
        self, model: nn.Module, optimizers: list[Optimizer], epoch: int, stream: Stream
    ) -> Iterator[Tensor]:
        """Take the steps of an epoch; yield the loss before each."""
        for sets, loss in self.passes(epoch):
            for batches in stream(sets):
                yield step(optimizers[0], lambda: loss(model, *batches))  # noqa: B023 -- used at once


def step(optimizer: Optimizer, loss: Callable[[], Tensor]) -> Tensor:
    """Step on a loss; return it as it was before."""

    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    return optimizer.step([closure] if isinstance(optimizer, MicroBatchSAM) else closure).detach()


def ce(model: nn.Module, batch: Pair) -> Tensor:
    """Return the mean cross-entropy of a batch."""
    return cross_entropy(model(batch[0]), batch[1])


@dataclass(eq=False)
class FineTune(Method):
    """Train on: CE(R). What is not rehearsed may fade."""

    def passes(self, epoch):
        """Go through R."""
        return [((self.task.retain,), self.loss)]

    def loss(self, model, retain):
        """Return CE(R)."""
        return ce(model, retain)


@dataclass(eq=False)
class NegGrad(Method):
    """Descend on R and ascend on F: α·CE(R) − (1−α)·CE(F).

    The second term has no lower bound, so the method diverges where α is small. Elsewhere it is
    called NegGrad+, and NegGrad is the ascent alone, α = 0.

    Args:
        alpha: α, in [0, 1].

    Reference:
        Kurmanji et al. (2023). Towards unbounded machine unlearning. NeurIPS.
    """

    alpha: float = 0.99

    def __post_init__(self):
        checks.fraction("alpha", self.alpha)

    def passes(self, epoch):
        """Go through R, and through F as often as that takes."""
        return [((self.task.retain, self.task.forget), self.loss)]

    def loss(self, model, retain, forget):
        """Return α·CE(R) − (1−α)·CE(F)."""
        return self.alpha * ce(model, retain) - (1 - self.alpha) * ce(model, forget)


@dataclass(eq=False)
class RandomLabel(Method):
    """Fine-tune on R and F together, with labels of F drawn from all classes alike.

    A label is right by chance once in as many times as there are classes.

    Args:
        redraw: Draw new labels in every epoch, as public code does; then F is pulled to the
            uniform prediction rather than to one wrong label.

    Reference:
        Graves et al. (2021). Amnesiac machine learning. AAAI.
    """

    redraw: bool = False

    def __post_init__(self):
        checks.flag("redraw", self.redraw)

    def start(self, model, task):
        """Put R and F together."""
        super().start(model, task)
        self.x = torch.cat([task.retain[0], task.forget[0]])

    def labels(self, epoch: int) -> Tensor:
        """Return the labels of F in an epoch."""
        y = self.task.forget[1]
        random = runtime.generator(self.task.seed)
        for _ in range(1 + epoch * self.redraw):
            drawn = torch.randint(self.task.classes, y.shape, generator=random)
        return drawn.to(y.device)

    def passes(self, epoch):
        """Go through R and the relabelled F, shuffled together."""
        return [(((self.x, torch.cat([self.task.retain[1], self.labels(epoch)])),), self.loss)]

    def loss(self, model, batch):
        """Return CE on the batch."""
        return ce(model, batch)


@dataclass(eq=False)
class SalUn(RandomLabel):
    r"""Random labels, but only the weights that matter most to F move.

    .. math:: \theta \leftarrow m \odot (\theta + \Delta\theta) + (1 - m) \odot \theta

    with the mask m of `flatbook.unlearning.saliency_mask`, so that the others stay bit for bit.

    Args:
        redraw: As for `RandomLabel`.
        fraction: Share of the weights that move.
        variant: ``"released"`` masks the gradient alone, as early public code did, and lets
            momentum and decay move the others. It needs a plain optimizer.

    Reference:
        Fan et al. (2024). SalUn: empowering machine unlearning via gradient-based weight saliency.
        ICLR.
    """

    fraction: float = 0.5
    variant: Variant = "paper"

    def __post_init__(self):
        super().__post_init__()
        checks.fraction("fraction", self.fraction)
        checks.choice("variant", self.variant, ("paper", "released"))

    def start(self, model, task):
        """Choose the weights."""
        super().start(model, task)
        self.mask = saliency_mask(model, task.forget, fraction=self.fraction)

    def build(self, model, optimizer, parameters):
        """Freeze the weights outside the mask, or their gradients."""
        built = optimizer(parameters)
        if self.variant == "paper":
            return [masked(built, model, self.mask)]
        if isinstance(built, SAM):
            raise ValueError(
                'optimizer must build a plain optimizer for variant="released", which masks its '
                f"gradient; got {type(built).__name__}."
            )
        return [GradientMasked(built, model, self.mask)]


@dataclass(eq=False)
class L1Sparse(Method):
    """Fine-tune under a penalty on the weights: CE(R) + γ_t·‖θ‖₁.

    γ_t falls linearly, from γ in the first of T epochs to γ/T in the last. The norm runs over all
    trainable parameters.

    Args:
        gamma: γ, 0 or more.

    Reference:
        Jia et al. (2023). Model sparsity can simplify machine unlearning. NeurIPS.
    """

    gamma: float = 5e-4

    def __post_init__(self):
        checks.non_negative("gamma", self.gamma)

    def passes(self, epoch):
        """Go through R, under a penalty that depends on the epoch."""
        weight = self.gamma * (1 - epoch / self.task.epochs)
        return [((self.task.retain,), lambda model, retain: self.loss(model, retain, weight))]

    def loss(self, model, retain, weight):
        """Return CE(R) + γ_t·‖θ‖₁."""
        norm = sum(p.abs().sum() for p in model.parameters() if p.requires_grad)
        return ce(model, retain) + weight * norm


@dataclass(eq=False)
class Scrub(Method):
    r"""Obey the old model on R and defy it on F, in turn.

    An epoch first goes through F, maximizing :math:`T^2\,\mathrm{KL}(p^{old}_T \| p_T)`, with both
    softmaxes at temperature T, and then through R, minimizing γ·CE + β·T²·KL. After the first
    ``max_epochs`` epochs, R alone remains.

    At the start, student and teacher agree and the divergence has gradient 0: without dropout or
    batch statistics, the first pass through F does nothing.

    Args:
        gamma: γ, the weight of the labels, 0 or more.
        beta: β, the weight of the old model on R, 0 or more.
        temperature: T, above 0. At 1 it is the paper's; public code takes 4.
        max_epochs: Epochs with a pass through F.

    Reference:
        Kurmanji et al. (2023). Towards unbounded machine unlearning. NeurIPS.
    """

    gamma: float = 0.99
    beta: float = 0.001
    temperature: float = 1.0
    max_epochs: int = 2

    def __post_init__(self):
        checks.non_negative("gamma", self.gamma)
        checks.non_negative("beta", self.beta)
        checks.positive("temperature", self.temperature)
        checks.count("max_epochs", self.max_epochs, at_least=0)

    def start(self, model, task):
        """Keep the old model as the teacher."""
        super().start(model, task)
        self.teacher = deepcopy(model).eval().requires_grad_(False)

    def passes(self, epoch):
        """Go through F at first, and through R always."""
        away = [((self.task.forget,), self.max_loss)] if epoch < self.max_epochs else []
        return [*away, ((self.task.retain,), self.min_loss)]

    def divergence(self, model, x):
        """Return T²·KL(old ‖ new), averaged over the batch."""
        t = self.temperature
        old, new = ((m(x.clone()) / t).log_softmax(1) for m in (self.teacher, model))
        return t**2 * kl_div(new, old, reduction="batchmean", log_target=True)

    def max_loss(self, model, forget):
        """Return −T²·KL(F)."""
        return -self.divergence(model, forget[0])

    def min_loss(self, model, retain):
        """Return γ·CE(R) + β·T²·KL(R)."""
        return self.gamma * ce(model, retain) + self.beta * self.divergence(model, retain[0])
