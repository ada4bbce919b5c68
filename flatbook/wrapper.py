"""Optimizers around an optimizer: what the methods of `flatbook.optim` share but no paper names.

`ParameterVector` is the vector space the papers compute in. `OptimizerWrapper` takes gradients,
moves the weights and puts them back, keeps BatchNorm statistics, masks, gradient scaling and
non-finite gradients in order, and shares its parameter groups and state with the optimizer inside.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from flatbook import checks, runtime

Closure = Callable[[], Tensor | float]

_INTERNAL = ("flatbook", "torch", "contextlib", "functools")


class ParameterVector:
    """A point or direction in parameter space: one tensor per parameter, a few kernels per sum.

    ``v + w``, ``v - w`` and ``v * w`` act entry by entry, ``v * c`` takes a number, a scalar
    tensor or one number per parameter, and ``v @ w`` is the inner product. Norms and inner
    products are taken in float64, where the squares of float32 neither overflow nor vanish; a
    device without it (MPS) gets norms and components from entries divided by the largest.

    Args:
        tensors: One tensor per parameter.

    Example:
        >>> v = ParameterVector([torch.tensor([3.0]), torch.tensor([[0.0, 4.0]])])
        >>> v.norm, (2 * v - v) @ v
        (tensor(5., dtype=torch.float64), tensor(25., dtype=torch.float64))
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = list(tensors)

    def __add__(self, other: "ParameterVector") -> "ParameterVector":
        return ParameterVector(torch._foreach_add(self.tensors, other.tensors))

    def __sub__(self, other: "ParameterVector") -> "ParameterVector":
        return ParameterVector(torch._foreach_sub(self.tensors, other.tensors))

    def __mul__(self, other) -> "ParameterVector":
        factor = other.tensors if isinstance(other, ParameterVector) else other
        return ParameterVector(torch._foreach_mul(self.tensors, factor))

    __rmul__ = __mul__

    def __matmul__(self, other: "ParameterVector") -> Tensor:
        pairs = zip(self.tensors, other.tensors, strict=True)
        return torch.stack([torch.dot(_flat(a), _flat(b)) for a, b in pairs]).sum()

    @cached_property
    def norm(self) -> Tensor:
        """Euclidean length, a tensor without dimensions; do not change the tensors after it."""
        if not self._in_double:
            return self._largest * (self._unit @ self._unit).sqrt()
        if self.tensors[0].device.type == "cpu":  # there, a norm in another type is not vectorised
            return (self @ self).sqrt()
        norms = torch._foreach_norm(self.tensors, 2, dtype=torch.float64)
        return torch.linalg.vector_norm(torch.stack(norms))

    def component(self, other: "ParameterVector") -> Tensor:
        """Return the number c for which ``self - c * other`` is orthogonal to ``other``."""
        if self._in_double:
            return over(self @ other, other @ other)
        unit = other._unit
        return over(self._unit @ unit, unit @ unit) * (self._largest / other._largest)

    @property
    def nought(self) -> Tensor:
        """Zero, or nan if an entry is inf or nan; entries of any size cannot overflow it."""
        return torch.stack(torch._foreach_norm(torch._foreach_mul(self.tensors, 0))).sum()

    @property
    def _in_double(self) -> bool:
        return runtime.widened(self.tensors[0].new_empty(0)).dtype == torch.float64

    @cached_property
    def _largest(self) -> Tensor:
        """The largest absolute value; 1 if that is 0 or not finite."""
        norms = torch._foreach_norm(self.tensors, float("inf"), dtype=torch.float32)
        largest = torch.stack(norms).max()
        return torch.where((largest > 0) & largest.isfinite(), largest, 1.0)

    @cached_property
    def _unit(self) -> "ParameterVector":
        return ParameterVector(t.float() / self._largest for t in self.tensors)


def _flat(tensor: Tensor) -> Tensor:
    return runtime.widened(tensor.flatten())


def over(numerator: Tensor | float, denominator: Tensor) -> Tensor:
    """Divide, with 0 where the denominator is not above 0: no direction, no step, no NaN."""
    return torch.where(denominator > 0, numerator / denominator, 0.0)


class OptimizerWrapper(Optimizer):
    """The plumbing of an optimizer that computes its own gradient and lets another one step.

    Parameter groups and state *are* those of ``base_optimizer``, also after ``load_state_dict``
    on either, so a learning-rate scheduler may be attached to the one or the other.

    Args:
        base_optimizer: Takes the step, with the gradient computed here.
        model: Whose BatchNorm statistics to protect, and whose names ``mask`` uses.
        rho: Radius; a parameter group with its own ``"rho"`` overrides it.
        mask: Which coordinates are trainable, by parameter name; the others never move.
        scaler: The GradScaler with which the closure scales its loss.
    """

    settings: tuple[str, ...] = ("rho",)
    """Names of the attributes that `repr` shows."""

    def __init__(
        self,
        base_optimizer: Optimizer,
        *,
        model: nn.Module | None = None,
        rho: float,
        mask: Mapping[str, Tensor] | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        needs_closure = isinstance(base_optimizer, OptimizerWrapper | torch.optim.LBFGS)
        if needs_closure or not isinstance(base_optimizer, Optimizer):
            kind = base_optimizer if isinstance(base_optimizer, type) else type(base_optimizer)
            raise ValueError(
                "base_optimizer must be a torch optimizer that steps without a closure, such as "
                f"torch.optim.SGD(model.parameters(), lr=0.1); got {kind.__name__}"
                f"{' itself, not an instance of it' if kind is base_optimizer else ''}."
            )
        if model is not None and not isinstance(model, nn.Module):
            raise ValueError(f"model must be a torch module or None; got {type(model).__name__}.")
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise ValueError(
                f"scaler must be a torch.amp.GradScaler or None; got {type(scaler).__name__}."
            )
        # Optimizer.__init__ would copy the parameter groups. Its __setstate__, by which torch
        # revives pickled optimizers, sets up hooks and profiling alone.
        self.base_optimizer = base_optimizer
        super().__setstate__({"defaults": dict(base_optimizer.defaults)})
        self.model = model
        self.rho = checks.positive("rho", rho)
        self.scaler = scaler
        self._masks = _masks_by_parameter(mask, model)
        self.reached: set[Tensor] = set()  # parameters with a gradient in the present step
        self._looked_for_norms = model is not None
        self._warned = False
        self.radii()

    @property
    def param_groups(self) -> list[dict]:
        """Those of the base optimizer."""
        return self.base_optimizer.param_groups

    @property
    def state(self) -> dict:
        """That of the base optimizer."""
        return self.base_optimizer.state

    def add_param_group(self, param_group: dict) -> None:
        """Add a group to the base optimizer; it may carry its own ``"rho"``."""
        if isinstance(param_group, dict) and "rho" in param_group:
            checks.positive('"rho" of a parameter group', param_group["rho"])
        self.base_optimizer.add_param_group(param_group)

    def state_dict(self) -> dict:
        """Return the state of the base optimizer, with ours under a key of its own if we have any.

        A wrapper without state of its own returns what the base optimizer would.
        """
        own = self.own_state()
        return self.base_optimizer.state_dict() | ({type(self).__name__: own} if own else {})

    def load_state_dict(self, state_dict: dict) -> None:
        """Restore what `state_dict` returned, after which steps continue bit for bit.

        Raises:
            ValueError: If it lacks what this method remembers, or comes from other parameters.
        """
        name = type(self).__name__
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
            raise ValueError(f"state_dict must be what {name}.state_dict() returned.")
        rest = {key: value for key, value in state_dict.items() if key != name}
        if self.own_state() and name not in state_dict:
            raise ValueError(f"state_dict must come from {name}; got one without the key {name!r}.")
        if name in state_dict:
            try:
                self.check_own_state(state_dict[name])
            except (KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"state_dict[{name!r}] must be what {name} remembers; "
                    f"got {state_dict[name]!r:.80}."
                ) from error
        self.base_optimizer.load_state_dict(rest)
        if name in state_dict:
            self.load_own_state(state_dict[name])

    def own_state(self) -> dict:
        """Return what this method remembers beyond the base optimizer; nothing by default."""
        return {}

    def check_own_state(self, state: dict) -> None:
        """Raise a ValueError unless `own_state` of these parameters may have returned ``state``."""

    def load_own_state(self, state: dict) -> None:
        """Restore what `own_state` returned."""

    def __getstate__(self) -> dict:
        # Hooks, and the `step` that a scheduler patches in, belong to the original.
        return {
            key: value
            for key, value in self.__dict__.items()
            if key != "step" and not key.startswith("_optimizer_")
        }

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)}" for name in self.settings)
        return f"{type(self).__name__}({values}) around {self.base_optimizer!r}"

    def parameters(self) -> list[Tensor]:
        """Return the parameters that may have a gradient, in the order of the groups."""
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    def radius(self, group: dict, index: int) -> float:
        """Return the radius of a parameter group: its own ``"rho"`` or the common one."""
        return checks.positive('"rho" of a parameter group', group.get("rho", self.rho))

    def radii(self) -> list[float]:
        """Return one radius per parameter, in the order of `parameters`."""
        return [
            radius
            for index, group in enumerate(self.param_groups)
            for radius in [self.radius(group, index)]
            for p in group["params"]
            if p.requires_grad
        ]

    def at_radius(self, scale: Tensor, direction: ParameterVector) -> ParameterVector:
        """Return ``scale * direction`` times the radius of each parameter."""
        radii = self.radii()
        if len(set(radii)) == 1:  # nearly always, and one kernel less
            return radii[0] * scale * direction
        return scale * direction * radii

    def gradient(self, closure: Closure) -> tuple[Tensor | float, ParameterVector]:
        """Run a closure and take the gradients it leaves away from the parameters.

        A parameter without a gradient counts as zero; masked coordinates are zero.
        """
        with torch.enable_grad(), self._norms_looked_for():
            loss = closure()
        if loss is None:
            raise ValueError("closure must return the loss; got None.")
        # Taken, not copied: a closure that zeroes in place must not find them in the second pass.
        found = {}
        for p in self.parameters():
            found[p], p.grad = p.grad, None
        self.reached.update(p for p, g in found.items() if g is not None)
        if all(g is None for g in found.values()):
            raise ValueError(
                "closure must call backward() on the loss; no parameter has a gradient after it."
            )
        if any(g is not None and g.layout != torch.strided for g in found.values()):
            raise ValueError("gradients must be dense; got a sparse one (an nn.Embedding's?).")
        for p, keep in self._masks:
            if found.get(p) is not None:
                found[p].masked_fill_(~keep.to(p.device), 0)
        g = ParameterVector(torch.zeros_like(p) if g is None else g for p, g in found.items())
        return loss.detach() if isinstance(loss, Tensor) else loss, g

    @contextmanager
    def moved_by(self, epsilon: ParameterVector) -> Iterator[None]:
        """Move the weights inside the block; put the very same bits back after it, come what may.

        Inside, BatchNorm layers in training mode normalise by the batch as usual but leave their
        running statistics alone.
        """
        parameters = self.parameters()
        before = [p.detach().clone() for p in parameters]
        # Where a gradient is not finite the step will be skipped. That is decided once, at the
        # end, so as to wait for the device once; until then NaN must not reach the closure.
        for e in epsilon.tensors:
            e.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        try:
            with torch.no_grad():
                torch._foreach_add_(parameters, epsilon.tensors)
            torch.clear_autocast_cache()  # it may hold half-precision copies of the old weights
            with self.statistics_kept():
                yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(parameters, before)
            torch.clear_autocast_cache()

    def descend(self, update: ParameterVector) -> bool:
        """Let the base optimizer step along ``update``, unless that is not finite; say whether."""
        finite = bool(update.nought == 0)  # the one wait for the device in a step
        scaled = self.scaler is not None and self.scaler.is_enabled()
        if not finite and not scaled:
            self._warn_once()
        for p, u in zip(self.parameters(), update.tensors, strict=True):
            p.grad = u if p in self.reached else None
        frozen = [(p, keep.to(p.device), p.detach().clone()) for p, keep in self._masks]
        if scaled:
            if not finite:  # an overflow of the first pass alone must lower the scale, too
                torch._foreach_mul_(update.tensors, float("nan"))
            self._step_scaled()
        elif finite:
            self.base_optimizer.step()
        # Momentum and weight decay move a coordinate even where its gradient is zero.
        for p, keep, before in frozen:
            p.copy_(torch.where(keep, p, before))
        torch.clear_autocast_cache()
        return finite

    def _step_scaled(self) -> None:
        try:
            self.scaler.unscale_(self.base_optimizer)
        except AssertionError as error:  # torch's way to say that scale() was never called
            raise ValueError(
                "closure must call scaler.scale(loss).backward() when a scaler is given."
            ) from error
        self.scaler.step(self.base_optimizer)
        self.scaler.update()

    def _warn_once(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{type(self).__name__} skipped a step because a gradient was inf or nan; weights "
                "and optimizer state are as before, and further skips will be silent.",
                RuntimeWarning,
                stacklevel=_callers_level(),
            )

    @contextmanager
    def statistics_kept(self) -> Iterator[None]:
        """Let normalisation layers of ``model`` use a batch's statistics without keeping them."""
        layers = [m for m in self.model.modules() if _updates(m)] if self.model is not None else []
        deaf = [  # InstanceNorm ignores the flag; without buffers it has nothing to change
            (m, m.running_mean, m.running_var) for m in layers if isinstance(m, _InstanceNorm)
        ]
        for layer in layers:
            layer.track_running_stats = False
        for layer, *_ in deaf:
            layer.running_mean = layer.running_var = None
        try:
            yield
        finally:
            for layer, mean, var in deaf:
                layer.running_mean, layer.running_var = mean, var
            for layer in layers:
                layer.track_running_stats = True

    @contextmanager
    def _norms_looked_for(self) -> Iterator[None]:
        if self._looked_for_norms:
            yield
            return
        self._looked_for_norms = True
        seen = []
        handle = register_module_forward_pre_hook(
            lambda module, _: seen.append(type(module).__name__) if _updates(module) else None
        )
        try:
            yield
        finally:
            handle.remove()
        if seen:
            warnings.warn(
                f"{type(self).__name__} was not given a model, but the closure runs {seen[0]} in "
                "training mode: its running statistics will also take in the perturbed passes; "
                "pass model=... to keep them out.",
                UserWarning,
                stacklevel=_callers_level(),
            )


def _callers_level() -> int:
    """Return the ``stacklevel`` at which a warning points at the code that called `step`."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals["__name__"].split(".")[0] in _INTERNAL:
        frame, level = frame.f_back, level + 1
    return level


def _updates(module: nn.Module) -> bool:
    """Whether a forward pass would change the module's running statistics."""
    return (
        isinstance(module, _NormBase)
        and module.training
        and module.track_running_stats
        and module.running_mean is not None
    )


def _masks_by_parameter(mask, model) -> list[tuple[Tensor, Tensor]]:
    """Return (parameter, trainable coordinates) for each parameter with a frozen one."""
    if mask is None:
        return []
    if model is None:
        raise ValueError("mask names parameters, so model must be given along with it; got None.")
    if not isinstance(mask, Mapping):
        raise ValueError(
            "mask must map parameter names to bool tensors, True = trainable; "
            f"got {type(mask).__name__}."
        )
    named = dict(model.named_parameters(remove_duplicate=False))
    trainable: dict[Tensor, Tensor] = {}
    for name, keep in mask.items():
        p = named[checks.choice("a name in mask", name, named)]
        try:
            keep = torch.as_tensor(keep)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"mask[{name!r}] must be a bool tensor of shape {tuple(p.shape)}; got {keep!r:.80}."
            ) from error
        if keep.dtype != torch.bool or keep.shape != p.shape:
            raise ValueError(
                f"mask[{name!r}] must be a bool tensor of shape {tuple(p.shape)}; "
                f"got {keep.dtype} of shape {tuple(keep.shape)}."
            )
        # Tied weights may appear under two names; a coordinate frozen under either is frozen.
        keep = keep.to(p.device, copy=True)
        trainable[p] = keep & trainable[p] if p in trainable else keep
    return [(p, keep) for p, keep in trainable.items() if not keep.all()]
