"""The same objective for any network, by differentiating twice."""

import copy
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from flatbook import checks
from flatbook.reconstruction.objectives import codes, frame, sharpness_of


class SmoothReLU(nn.Module):
    r"""The activation :math:`\sigma_\tau(z) = \log(1 + e^{\tau z}) / \tau`."""

    def __init__(self, sharpness: float) -> None:
        super().__init__()
        self.sharpness = sharpness

    def forward(self, z: Tensor) -> Tensor:
        """Apply the activation."""
        return nn.functional.softplus(z, beta=self.sharpness, threshold=40.0)


class NetworkObjective:
    r"""The objective of any network, by differentiating twice.

    Args:
        model: Returns a number, or one for each class, for each sample. Every ReLU module is
            replaced by the smooth one in a copy; a ReLU that is a function stays, without its
            second derivative.
        start: The parameters at initialization, by name, if the attacker knows them.
        sharpness: τ of the smooth ReLU; infinite keeps ReLU.

    Raises:
        ValueError: If the model has no parameter that requires a gradient, or ``start`` does not
            fit.

    Example:
        The example of `ShallowObjective` again.

        >>> model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1, bias=False))
        >>> with torch.no_grad():
        ...     for parameter, value in zip(model.parameters(), (2.0, 0.0, 1.0), strict=True):
        ...         _ = parameter.fill_(value)
        >>> objective = NetworkObjective(model, sharpness=float("inf"))
        >>> x, one = torch.ones(1, 1), torch.ones(1)
        >>> objective.loss(x, one, one).item()
        3.0
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        start: Mapping[str, Tensor] | None = None,
        sharpness: float = 300.0,
    ) -> None:
        self.sharpness = sharpness_of(sharpness)
        self.model = smoothed(checks.module("model", model), self.sharpness)
        self.weights = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        if not self.weights:
            raise ValueError("model must have parameters that require a gradient; got none.")
        self.target = {name: p.detach().clone() for name, p in self.weights.items()}
        if start is not None:
            if not isinstance(start, Mapping) or (missing := set(self.target) - set(start)):
                got = f"no {min(missing)}" if isinstance(start, Mapping) else type(start).__name__
                raise ValueError(f"start must map every parameter's name to its start; got {got}.")
            for name, own in self.target.items():
                begin = checks.tensor(f"start[{name!r}]", start[name], own.shape)
                self.target[name] = own - begin.detach().to(own)
        self.square = float(sum(p.double().square().sum() for p in self.target.values()))
        self.basis = None

    @property
    def like(self) -> Tensor:
        """A tensor whose precision and device the candidates should have."""
        return next(iter(self.target.values()))

    def within(self, basis: Tensor) -> "NetworkObjective":
        """Return the same objective for candidates in coordinates of a subspace.

        Args:
            basis: Orthonormal rows. Shape ``(dimensions, inputs)``.

        Raises:
            ValueError: If they are not.
        """
        inside = copy.copy(self)
        inside.basis = frame(basis, "inputs", self.like)
        return inside

    def outputs(self, X: Tensor) -> Tensor:
        """Return the outputs of the smooth network. Shape ``(candidates, outputs)``."""
        out = self.model(X if self.basis is None else X @ self.basis)
        return out[:, None] if out.ndim == 1 else out

    def _sum(self, X, multipliers, labels) -> tuple[Tensor, ...]:
        """Return what the candidates make of the target, differentiable."""
        out = self.outputs(X)
        total = multipliers @ (codes(out, labels) * out).sum(dim=1)
        return torch.autograd.grad(total, list(self.weights.values()), create_graph=True)

    def loss(self, X: Tensor, multipliers: Tensor, labels: Tensor) -> Tensor:
        """Compute L, differentiable in candidates and multipliers."""
        found = self._sum(X, multipliers, labels)
        return sum(
            (goal - g).square().sum() for goal, g in zip(self.target.values(), found, strict=True)
        )

    def gradients(
        self, X: Tensor, multipliers: Tensor, labels: Tensor
    ) -> tuple[float, Tensor, Tensor]:
        """Compute L and its gradients in candidates and multipliers."""
        X, multipliers = (t.detach().requires_grad_() for t in (X, multipliers))
        loss = self.loss(X, multipliers, labels)
        dX, dm = torch.autograd.grad(loss, (X, multipliers))
        return float(loss.detach()), dX, dm

    def splitting(self, X: Tensor, multipliers: Tensor, labels: Tensor):
        """Return the map from directions, a row for each candidate, to :math:`S_i v_i`."""
        X = X.detach().requires_grad_()
        with torch.enable_grad():  # whoever only wants products may have turned it off
            found = self._sum(X, multipliers.detach(), labels)
            rest = [goal - g.detach() for goal, g in zip(self.target.values(), found, strict=True)]
            along = sum((r * g).sum() for r, g in zip(rest, found, strict=True))
            (slope,) = torch.autograd.grad(-2 * along, X, create_graph=True, materialize_grads=True)

        def apply(v: Tensor) -> Tensor:
            if not slope.requires_grad:  # a network of ReLU is flat between its kinks
                return torch.zeros_like(v)
            options = {"retain_graph": True, "materialize_grads": True}
            return torch.autograd.grad(slope, X, v, **options)[0]

        return apply


def smoothed(model: nn.Module, sharpness: float) -> nn.Module:
    """Return a copy of a model whose ReLU modules are smooth."""
    model = copy.deepcopy(model).eval()
    if sharpness == math.inf:
        return model
    if isinstance(model, nn.ReLU):
        return SmoothReLU(sharpness)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, SmoothReLU(sharpness))
    return model
