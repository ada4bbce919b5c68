"""Forget in one Newton step, with a Fisher matrix that is never formed."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flatbook import checks, runtime
from flatbook.models import evaluating
from flatbook.unlearning.methods import Method, Stream, Task, Variant
from flatbook.unlearning.saliency import summed_gradient
from flatbook.unlearning.sets import Pair

_RELEASED_COUNT = 1000  # what public code divides by, however many gradients there are


def woodfisher(
    gradients: Tensor, vector: Tensor, *, damping: float = 0.01, variant: Variant = "paper"
) -> Tensor:
    r"""Multiply a vector by the inverse of the damped empirical Fisher matrix.

    .. math:: H = \lambda I + \frac1N \sum_{n=1}^N g_n g_n^\top

    Starting from :math:`H_0 = \lambda I`, each gradient changes the inverse by a matrix of rank 1
    (Sherman and Morrison),

    .. math::
        H_n^{-1} = H_{n-1}^{-1} - \frac{o_n o_n^\top}{N + g_n^\top o_n},
        \qquad o_n = H_{n-1}^{-1} g_n,

    so the :math:`o_n` are all that need be kept: N numbers per weight, and N² products per weight.

    Args:
        gradients: One row per sample. Shape ``(samples, weights)``.
        vector: Shape ``(weights,)``.
        damping: λ, above 0.
        variant: ``"released"`` is the recursion of public code. It keeps a single :math:`o`, only
            ever shortens it, and takes λ = 1 and N = 1000: whatever the data, the vector changes
            along the *first* gradient alone.

    Returns:
        :math:`H^{-1} v`, in float64 (float32 on a device that has none). Shape ``(weights,)``.

    Raises:
        ValueError: If the shapes disagree, a number is not finite, or ``damping`` is not above 0.

    Reference:
        Singh and Alistarh (2020). WoodFisher: efficient second-order approximation for neural
        network compression. NeurIPS.

    Example:
        With one gradient (2, 0), H is diagonal: 1 + 4 and 1.

        >>> woodfisher(torch.tensor([[2.0, 0.0]]), torch.tensor([5.0, 3.0]), damping=1.0)
        tensor([1., 3.], dtype=torch.float64)
    """
    g = runtime.widened(checks.tensor("gradients", gradients, ("samples", "weights")).detach())
    v = runtime.widened(checks.tensor("vector", vector, (g.shape[1],)).detach()).to(g.device)
    checks.choice("variant", variant, ("paper", "released"))
    if variant == "released":
        return _as_released(g, v)
    scale = checks.positive("damping", damping)
    kept, weights = torch.zeros_like(g), g.new_zeros(len(g))

    def apply(x: Tensor, n: int) -> Tensor:
        return x / scale - kept[:n].T @ (weights[:n] * (kept[:n] @ x))

    for n, row in enumerate(g):
        kept[n] = apply(row, n)
        weights[n] = 1 / (len(g) + row @ kept[n])
    return apply(v, len(g))


def _as_released(g: Tensor, v: Tensor) -> Tensor:
    result, o = v.clone(), g[0].clone()
    for row in g[1:]:
        product = o @ row
        result -= (result @ row) / (_RELEASED_COUNT + product) * o
        o -= product / (_RELEASED_COUNT + product) * o
    return result


@dataclass(eq=False)
class Influence(Method):
    r"""Undo the pull of F by a Newton step; each epoch is one.

    .. math::
        \theta \leftarrow \theta + c \, H^{-1} v, \qquad
        v = \frac{1}{n_F + n_R} \Bigl(\sum_F \nabla - \frac{n_F}{n_R} \sum_R \nabla\Bigr),

    with sums, not means, of gradients. Since :math:`v = \nabla L_{R \cup F} - \nabla L_R` in mean
    losses, c = 1 is the Newton step on R less the one on all: at a minimum of the latter, where
    that vanishes, simply the Newton step to what retraining would find. H is the damped empirical
    Fisher matrix of `woodfisher` on R, in evaluation mode. It takes no optimizer.

    Args:
        scale: c, above 0.
        damping: λ, above 0. Where the model fits R, gradients vanish and H is hardly more than λI.
        samples: Gradients in the Fisher matrix at most, drawn from R. They are kept twice, in
            float64.
        variant: As for `woodfisher`.

    Reference:
        Koh and Liang (2017). Understanding black-box predictions via influence functions. ICML;
        Izzo et al. (2021). Approximate data deletion from machine learning models. AISTATS.
    """

    scale: float = 1.0
    damping: float = 0.01
    samples: int = 256
    variant: Variant = "paper"

    def __post_init__(self):
        checks.positive("scale", self.scale)
        checks.positive("damping", self.damping)
        checks.count("samples", self.samples)
        checks.choice("variant", self.variant, ("paper", "released"))

    def start(self, model: nn.Module, task: Task) -> None:
        """Draw the samples of the Fisher matrix."""
        super().start(model, task)
        x, y = task.retain
        rows = torch.randperm(len(x), generator=runtime.generator(task.seed))[: self.samples]
        self.drawn = x[rows.to(x.device)], y[rows.to(y.device)]

    def build(self, model, optimizer, parameters) -> list:
        """Build no optimizer."""
        return []

    def direction(self, model: nn.Module) -> Tensor:
        """Return v, in the order of the trainable parameters. Shape ``(weights,)``."""
        n_f, n_r = len(self.task.forget[0]), len(self.task.retain[0])
        of_f, of_r = (
            _flat(summed_gradient(model, s)) for s in (self.task.forget, self.task.retain)
        )
        return (of_f - n_f / n_r * of_r) / (n_f + n_r)

    def epoch(self, model: nn.Module, optimizers: list, epoch: int, stream: Stream) -> Iterator:
        """Take the step; yield the loss on the drawn samples before it."""
        with evaluating(model), torch.no_grad():
            loss = cross_entropy(model(self.drawn[0].clone()), self.drawn[1])
        if loss.isfinite():
            gradients = sample_gradients(model, self.drawn)
            update = woodfisher(
                gradients, self.direction(model), damping=self.damping, variant=self.variant
            )
            parameters = [p for p in model.parameters() if p.requires_grad]
            parts = update.split([p.numel() for p in parameters])
            with torch.no_grad():
                for p, part in zip(parameters, parts, strict=True):
                    p.add_(part.view(p.shape).to(p.dtype), alpha=self.scale)
        yield loss


def sample_gradients(model: nn.Module, data: Pair) -> Tensor:
    """Return the gradient of each sample's cross-entropy, a row each, in float64."""
    rows = [_flat(summed_gradient(model, (x[None], y[None]))) for x, y in zip(*data, strict=True)]
    return torch.stack(rows)


def _flat(gradient: list[Tensor]) -> Tensor:
    return torch.cat([runtime.widened(part).flatten() for part in gradient])
