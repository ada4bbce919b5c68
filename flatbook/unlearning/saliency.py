"""Which weights matter to the data to forget, and optimizers that move those alone."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from flatbook import checks
from flatbook.models import evaluating
from flatbook.optim import SAM
from flatbook.unlearning.sets import Pair, checked
from flatbook.wrapper import OptimizerWrapper


def saliency_mask(
    model: nn.Module, forget, *, fraction: float, largest: bool = True, batch_size: int = 512
) -> dict[str, Tensor]:
    r"""Mark the weights with the greatest gradients on the data to forget.

    .. math:: s = \Bigl| \sum_{(x, y) \in F} \nabla_\theta \, \mathrm{CE}(x, y) \Bigr|

    The weights of all tensors are ranked together, and exactly the nearest whole number to
    ``fraction`` of them is marked. Of equal ones, those of earlier parameters come first.

    Args:
        model: Maps inputs to logits; taken in evaluation mode and left untouched.
        forget: A TensorDataset or a pair (x, y).
        fraction: Share of the trainable weights to mark, in [0, 1].
        largest: False marks the weights with the *least* gradients instead, as the public code of
            Sharp MinMax does.
        batch_size: Samples per pass; it does not change the result but for rounding.

    Returns:
        True = among them; one bool tensor per trainable parameter, by name.

    Raises:
        ValueError: If ``fraction`` is out of range, or the data do not fit the model.

    Reference:
        Fan et al. (2024). SalUn: empowering machine unlearning via gradient-based weight saliency.
        ICLR.

    Example:
        The first input is 0, so its weights have no gradient; the two classes pull equally.

        >>> model = nn.Linear(2, 2, bias=False)
        >>> forget = torch.tensor([[0.0, 1.0]]), torch.tensor([0])
        >>> saliency_mask(model, forget, fraction=0.5)["weight"].tolist()
        [[False, True], [False, True]]
    """
    share = checks.fraction("fraction", fraction)
    checks.count("batch_size", batch_size)
    (x, y), _ = checked(checks.module("model", model), "forget", forget)
    sizes = [g.abs() for g in summed_gradient(model, (x, y), batch_size)]
    everything = torch.cat([size.flatten() for size in sizes])
    order = everything.argsort(descending=largest, stable=True)
    marked = torch.zeros_like(everything, dtype=torch.bool)
    marked[order[: round(share * len(everything))]] = True
    parts = marked.split([size.numel() for size in sizes])
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    return {
        name: part.view(size.shape) for name, part, size in zip(names, parts, sizes, strict=True)
    }


def summed_gradient(model: nn.Module, data: Pair, batch_size: int = 512) -> list[Tensor]:
    """Return the gradient of the summed cross-entropy, one tensor per trainable parameter."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("model must have a parameter that requires a gradient; it has none.")
    total = [torch.zeros_like(p) for p in parameters]
    with evaluating(model), torch.enable_grad():
        for x, y in zip(*(part.split(batch_size) for part in data), strict=True):
            loss = cross_entropy(model(x.clone()), y, reduction="sum")
            slope = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            torch._foreach_add_(total, slope)
    return total


class Masked(OptimizerWrapper):
    """An optimizer that leaves masked weights alone, whatever momentum and decay want.

    Args:
        base_optimizer: Takes the step.
        model: Gives ``mask`` its names.
        mask: Maps parameter names to bool tensors, True = trainable.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> before = model.weight[0, 0].item()
        >>> sgd = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
        >>> optimizer = Masked(sgd, model, {"weight": torch.tensor([[False, True]])})
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     loss = model.weight.sum()
        ...     loss.backward()
        ...     return loss
        >>> _ = optimizer.step(closure)
        >>> model.weight[0, 0].item() == before
        True
    """

    settings = ()

    def __init__(self, base_optimizer: Optimizer, model: nn.Module, mask: dict[str, Tensor]):
        super().__init__(base_optimizer, model=model, rho=1.0, mask=mask)  # rho has no use here

    @torch.no_grad()
    def step(self, closure) -> Tensor:
        """Take one step; return the loss before it."""
        self.reached.clear()
        loss, g = self.gradient(closure)
        self.descend(g)
        return loss


class GradientMasked(Masked):
    """A plain optimizer whose gradient is masked, while momentum and decay act everywhere."""

    def descend(self, update):
        """Let the base optimizer step, and restore nothing."""
        masks, self._masks = self._masks, []
        try:
            return super().descend(update)
        finally:
            self._masks = masks


def builder(optimizer: Callable[[list], Optimizer] | None) -> Callable[[list], Optimizer]:
    """Return what builds the optimizer; it refuses what is none. None builds the default."""
    if optimizer is not None and not callable(optimizer):
        raise ValueError(f"optimizer must be a function or None; got {optimizer!r:.80}.")

    def build(parameters: list) -> Optimizer:
        if optimizer is None:
            return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
        built = optimizer(parameters)
        if not isinstance(built, Optimizer):
            raise ValueError(
                f"optimizer must return a torch optimizer; got {type(built).__name__}."
            )
        return built

    return build


def masked(optimizer: Optimizer, model: nn.Module, mask: dict[str, Tensor]) -> Optimizer:
    """Return an optimizer that moves only where ``mask`` is True and knows its model."""
    if isinstance(optimizer, SAM):
        return rebuilt(optimizer, model, mask=mask)
    return Masked(optimizer, model, mask)


def rebuilt(optimizer: SAM, model: nn.Module, kind: type | None = None, **options) -> SAM:
    """Return a SAM like this one, over the same base optimizer, that knows its model."""
    kind = kind or type(optimizer)
    given = {name: getattr(optimizer, name) for name in optimizer.settings} | options
    return kind(optimizer.base_optimizer, model=model, scaler=optimizer.scaler, **given)
