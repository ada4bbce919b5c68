r"""Optimizers that look around before they step: SAM, its relatives, and its opposite.

Each wraps a torch optimizer and replaces the gradient :math:`g = \nabla L(w)` by one that also
uses :math:`g_s = \nabla L(w + \varepsilon)`, the gradient at a point uphill. They differ in the
way up (`ascent`) and in what becomes of the two gradients (`combine`); the rest they share.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from flatbook import checks
from flatbook.wrapper import Closure, OptimizerWrapper, ParameterVector, over

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class SAM(OptimizerWrapper):
    r"""Step along the gradient at the worst nearby point: sharpness-aware minimisation.

    To minimise the largest loss within :math:`\|\varepsilon\| \le \rho`, climb to where a linear
    loss would be largest, and hand the gradient found there to the base optimizer:

    .. math::
        \varepsilon = \rho \, \frac{g}{\|g\|}, \qquad g_s = \nabla L(w + \varepsilon).

    The norm runs over all parameters of all groups. A group may set its own radius, ``"rho"``.

    What holds for every class of this module:

    - Parameter groups and state are those of ``base_optimizer``; attach a learning-rate scheduler
      to either. ``state_dict`` is that of the base optimizer, plus what the method remembers.
    - The weights are copied back after the ascent, bit for bit, also if the closure raises.
    - Running statistics of BatchNorm change once per step, in the first pass, if ``model`` is
      given. Without it, a first step that meets such layers warns.
    - If a gradient is inf or nan in either pass, the step is skipped: weights and optimizer state
      stay, a warning appears the first time (with a ``scaler`` none: overflows are its daily
      work), BatchNorm statistics have seen the batch. A zero gradient gives no perturbation.
    - A parameter that no pass reaches is left alone; one that a single pass reaches counts as
      zero in the other. Gradients must be dense, parameters real and on one device.

    Args:
        base_optimizer: A torch optimizer, such as SGD, over the parameters to train.
        model: Whose BatchNorm statistics to protect; also gives ``mask`` its names.
        rho: Radius of the ascent, in units of the weights; above 0.
        mask: Maps parameter names to bool tensors, True = trainable. Where it is False, a
            coordinate takes no part in the ascent and never moves, whatever momentum and weight
            decay want. Parameters it does not name are trainable.
        scaler: A ``torch.amp.GradScaler``. The closure scales its own loss; this class unscales,
            checks, steps and updates the scale.

    Raises:
        ValueError: If an argument is none of the above, or ``mask`` names an unknown parameter.

    Reference:
        Foret et al. (2021). Sharpness-aware minimization for efficiently improving
        generalization. ICLR.

    Example:
        On :math:`L = \tfrac12 \|w\|^2` from (3, 4): g = (3, 4), ε = (0.3, 0.4), g_s = (3.3, 4.4).

        >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = SAM(torch.optim.SGD([w], lr=0.1), rho=0.5)
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     loss = 0.5 * w.square().sum()
        ...     loss.backward()
        ...     return loss
        >>> optimizer.step(closure), w.detach()
        (tensor(12.5000), tensor([2.6700, 3.5600]))
    """

    def __init__(
        self,
        base_optimizer: Optimizer,
        *,
        model: nn.Module | None = None,
        rho: float = 0.05,
        mask: dict[str, Tensor] | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        super().__init__(base_optimizer, model=model, rho=rho, mask=mask, scaler=scaler)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Tensor | float:
        """Take one step.

        Args:
            closure: Zeroes the gradients, runs forward and backward and returns the loss. It is
                called with gradients enabled, once per pass, and must do the same each time.

        Returns:
            What the closure returned at the weights before the step, detached.

        Raises:
            ValueError: If ``closure`` is missing, returns nothing or leaves no gradient.
        """
        if not callable(closure):
            raise ValueError(
                f"{type(self).__name__}.step evaluates the loss again, so it needs a function: "
                "call step(closure), where closure zeroes the gradients, runs forward and backward "
                f"and returns the loss; got {_described(closure)}."
            )
        self.reached.clear()
        loss, update = self.sharp_gradient(closure)
        self.descend(update)
        return loss

    def sharp_gradient(self, closure: Closure) -> tuple[Tensor | float, ParameterVector]:
        """Return the loss at the present weights and the direction to step along."""
        loss, g = self.gradient(closure)
        with self.moved_by(self.ascent(g)):
            _, g_s = self.gradient(closure)
        update = self.combine(g, g_s)
        # Plus 0, or plus nan if the first pass failed: `descend` then need only look at this.
        update.tensors[0].add_(g.nought)
        return loss, update

    def ascent(self, g: ParameterVector) -> ParameterVector:
        """Return the perturbation of the weights."""
        return self.at_radius(over(1, g.norm), g)

    def combine(self, g: ParameterVector, g_s: ParameterVector) -> ParameterVector:
        """Return the update from the gradients before and after the ascent."""
        return g_s


class ASAM(SAM):
    r"""Sharpness-aware minimisation in a ball that scales with each weight.

    .. math::
        \varepsilon = \rho \, \frac{T^2 g}{\|T g\|}, \qquad T = |w| + \eta,

    entry by entry, so that rescaling two layers in opposite directions leaves the method as it
    was (for :math:`\eta = 0`). As in SAM, the base optimizer gets :math:`g_s`.

    T = 1 for biases and normalisation layers. With ``model``, these are known by layer type and
    by name; without it, they are the parameters with fewer than two axes. The authors' code
    goes by the word "weight" in the name, so it also adapts the scales of normalisation layers.

    Args:
        base_optimizer: As for `SAM`, like all that is not listed.
        eta: Keeps weights at 0 movable; 0 or more.
        rho: Radius, relative to the weights; above 0.

    Reference:
        Kwon et al. (2021). ASAM: adaptive sharpness-aware minimization for scale-invariant
        learning of deep neural networks. ICML.

    Example:
        On :math:`L = \tfrac12 w^2`, :math:`T^2 g / \|T g\| = w`: from 2, it looks at
        :math:`w + \rho w = 3`.

        >>> w = torch.nn.Parameter(torch.tensor([[2.0]]))
        >>> optimizer = ASAM(torch.optim.SGD([w], lr=0.1), rho=0.5, eta=0.0)
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     loss = 0.5 * w.square().sum()
        ...     loss.backward()
        ...     return loss
        >>> optimizer.step(closure), w.item()
        (tensor(2.), 1.7000000476837158)
    """

    settings = ("rho", "eta")

    def __init__(
        self,
        base_optimizer: Optimizer,
        *,
        model: nn.Module | None = None,
        rho: float = 0.5,
        eta: float = 0.01,
        mask: dict[str, Tensor] | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.eta = checks.non_negative("eta", eta)
        super().__init__(base_optimizer, model=model, rho=rho, mask=mask, scaler=scaler)
        self._plain = _biases_and_norms(model)

    def ascent(self, g: ParameterVector) -> ParameterVector:
        """Return :math:`T^2 g` at length ρ in the metric of T."""
        t = ParameterVector(
            torch.ones_like(p) if p.ndim < 2 or p in self._plain else p.abs() + self.eta
            for p in self.parameters()
        )
        tg = t * g
        return self.at_radius(over(1, tg.norm), t * tg)


class GSAM(SAM):
    r"""Sharpness-aware minimisation that also closes the gap between the two losses.

    Of the plain gradient, the part orthogonal to :math:`g_s` lowers the gap
    :math:`L(w + \varepsilon) - L(w)` when followed backwards, without changing
    :math:`L(w + \varepsilon)` to first order:

    .. math::
        g_s - \alpha \, g_\perp, \qquad
        g_\perp = g - \frac{\langle g, g_s \rangle}{\|g_s\|^2} \, g_s .

    The radius follows the learning rate,

    .. math::
        \rho_t = \rho_{\min} + (\rho_{\max} - \rho_{\min}) \,
        \frac{\mathrm{lr}_t - \mathrm{lr}_{\min}}{\mathrm{lr}_{\max} - \mathrm{lr}_{\min}},

    in each parameter group by its own rate. By default it is proportional to it, and ``rho`` at
    the start. A rate outside the range is refused, not clipped.

    Args:
        base_optimizer: As for `SAM`, like all that is not listed.
        rho: :math:`\rho_{\max}`; above 0.
        rho_min: Radius at the lowest learning rate; 0 to ``rho``.
        lr_max: Highest learning rate of the schedule. None takes what the scheduler notes in
            each group, ``max_lr`` or else ``initial_lr``; without one, the rate it has now.
        lr_min: Lowest learning rate of the schedule; 0 or more, below ``lr_max``.
        alpha: Weight of the orthogonal part; 0 or more.

    Raises:
        ValueError: In addition to `SAM`, in a step whose learning rate lies outside the range.

    Reference:
        Zhuang et al. (2022). Surrogate gap minimization improves sharpness-aware training. ICLR.

    Example:
        On :math:`L = \tfrac12 (w_1^2 + 3 w_2^2)` from (4, 1): g = (4, 3), w + ε = (4.8, 1.6),
        g_s = (4.8, 4.8), g_⊥ = (0.5, −0.5).

        >>> w = torch.nn.Parameter(torch.tensor([4.0, 1.0]))
        >>> optimizer = GSAM(torch.optim.SGD([w], lr=1.0), rho=1.0, alpha=1.0)
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     loss = 0.5 * (w[0] ** 2 + 3 * w[1] ** 2)
        ...     loss.backward()
        ...     return loss
        >>> optimizer.step(closure), w.detach()
        (tensor(9.5000), tensor([-0.3000, -4.3000]))
    """

    settings = ("rho", "rho_min", "lr_max", "lr_min", "alpha")

    def __init__(
        self,
        base_optimizer: Optimizer,
        *,
        model: nn.Module | None = None,
        rho: float = 0.05,
        rho_min: float = 0.0,
        lr_max: float | None = None,
        lr_min: float = 0.0,
        alpha: float = 0.4,
        mask: dict[str, Tensor] | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.alpha = checks.non_negative("alpha", alpha)
        self.rho_min = checks.non_negative("rho_min", rho_min)
        self.lr_min = checks.non_negative("lr_min", lr_min)
        self.lr_max = lr_max if lr_max is None else checks.positive("lr_max", lr_max)
        self._first_lr: dict[int, float] = {}
        super().__init__(base_optimizer, model=model, rho=rho, mask=mask, scaler=scaler)

    def radius(self, group: dict, index: int) -> float:
        r"""Return :math:`\rho_t` of a parameter group at its present learning rate."""
        rho, lr = super().radius(group, index), float(group["lr"])
        top = self.lr_max
        if top is None:
            first = self._first_lr.setdefault(index, lr)
            top = float(group.get("max_lr", group.get("initial_lr", first)))
        if self.rho_min > rho:
            raise ValueError(f"rho_min must be at most rho, which is {rho}; got {self.rho_min}.")
        if self.lr_min >= top:
            raise ValueError(f"lr_min must be below lr_max, which is {top}; got {self.lr_min}.")
        slack = 1e-6 * top  # schedulers round
        if not self.lr_min - slack <= lr <= top + slack:
            raise ValueError(
                f"the learning rate must lie in lr_min..lr_max, which is {self.lr_min}..{top}; "
                f"got {lr}: give GSAM the range of the schedule."
            )
        return self.rho_min + (rho - self.rho_min) * (lr - self.lr_min) / (top - self.lr_min)

    def combine(self, g: ParameterVector, g_s: ParameterVector) -> ParameterVector:
        r"""Return :math:`g_s - \alpha g_\perp`."""
        orthogonal = g - g.component(g_s) * g_s
        return g_s - self.alpha * orthogonal

    def own_state(self) -> dict:
        """Return the first learning rate of each group, where those are the highest."""
        return {"first_lr": dict(self._first_lr)} if self._first_lr else {}

    def check_own_state(self, state: dict) -> None:
        """Raise a ValueError unless ``state`` holds a learning rate for each of some groups."""
        for index, lr in state["first_lr"].items():
            checks.count("a group in state_dict['GSAM']", index, at_least=0)
            checks.non_negative("a learning rate in state_dict['GSAM']", lr)

    def load_own_state(self, state: dict) -> None:
        """Restore what `own_state` returned."""
        self._first_lr = dict(state["first_lr"])


class LookSAM(SAM):
    r"""Sharpness-aware minimisation that climbs in one step of k and remembers the way.

    Every k-th step, from the first on, is a step of SAM. It keeps what the ascent added,

    .. math::
        g_v = g_s - \frac{\langle g_s, g \rangle}{\|g\|^2} \, g,

    which changes slowly, and the steps in between reuse it, at the price of a plain step:

    .. math::
        g + \alpha \, \frac{\|g\|}{\|g_v\|} \, g_v .

    Norms and products run over all parameters together, as in the paper; one public version
    takes them tensor by tensor. A skipped step does not count.

    Args:
        base_optimizer: As for `SAM`, like all that is not listed.
        k: One step in k climbs; 1 is SAM.
        alpha: Weight of the remembered direction; 0 or more.

    Reference:
        Liu et al. (2022). Towards efficient and scalable sharpness-aware minimization. CVPR.

    Example:
        Ten steps with k = 5 evaluate the loss twelve times.

        >>> w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        >>> optimizer = LookSAM(torch.optim.SGD([w], lr=0.1), k=5)
        >>> calls = []
        >>> def closure():
        ...     calls.append(1)
        ...     optimizer.zero_grad()
        ...     loss = (w[0] * w[1] - 1) ** 2
        ...     loss.backward()
        ...     return loss
        >>> for _ in range(10):
        ...     _ = optimizer.step(closure)
        >>> len(calls)
        12
    """

    settings = ("rho", "k", "alpha")

    def __init__(
        self,
        base_optimizer: Optimizer,
        *,
        model: nn.Module | None = None,
        rho: float = 0.05,
        k: int = 5,
        alpha: float = 0.7,
        mask: dict[str, Tensor] | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.k = checks.count("k", k)
        self.alpha = checks.non_negative("alpha", alpha)
        self._steps = 0
        self._g_v: dict[Tensor, Tensor] = {}
        super().__init__(base_optimizer, model=model, rho=rho, mask=mask, scaler=scaler)

    def sharp_gradient(self, closure: Closure) -> tuple[Tensor | float, ParameterVector]:
        """Climb every k-th time; in between, bend the plain gradient the same way."""
        if self._steps % self.k == 0:
            return super().sharp_gradient(closure)
        loss, g = self.gradient(closure)
        g_v = ParameterVector(
            self._g_v[p] if p in self._g_v else torch.zeros_like(p) for p in self.parameters()
        )
        return loss, g + self.alpha * over(g.norm, g_v.norm) * g_v

    def combine(self, g: ParameterVector, g_s: ParameterVector) -> ParameterVector:
        """Return :math:`g_s` and keep its part orthogonal to g."""
        g_v = g_s - g_s.component(g) * g
        self._g_v = dict(zip(self.parameters(), g_v.tensors, strict=True))
        return g_s

    def descend(self, update: ParameterVector) -> bool:
        """Step, and count the step unless it is skipped."""
        stepped = super().descend(update)
        self._steps += stepped
        return stepped

    def own_state(self) -> dict:
        """Return the number of steps and :math:`g_v` by position of the parameter."""
        everything = [p for group in self.param_groups for p in group["params"]]
        g_v = {i: self._g_v[p] for i, p in enumerate(everything) if p in self._g_v}
        return {"steps": self._steps, "g_v": g_v}

    def check_own_state(self, state: dict) -> None:
        """Raise a ValueError unless ``state`` counts steps and holds a g_v that fits."""
        shapes = [p.shape for group in self.param_groups for p in group["params"]]
        steps = checks.count("steps in state_dict['LookSAM']", state["steps"], at_least=0)
        for index, v in state["g_v"].items():
            checks.count("a key of g_v", index, at_least=0, at_most=len(shapes) - 1)
            checks.tensor(f"g_v[{index}]", v, [*shapes[index]])
        if steps and not state["g_v"]:
            raise ValueError(
                f"state_dict['LookSAM'] must hold the g_v of its {steps} steps; got none."
            )

    def load_own_state(self, state: dict) -> None:
        """Restore what `own_state` returned, on the device and in the precision of the weights."""
        everything = [p for group in self.param_groups for p in group["params"]]
        self._steps = state["steps"]
        self._g_v = {everything[i]: v.to(everything[i]) for i, v in state["g_v"].items()}


class SharpnessMax(SAM):
    r"""Descend the loss while climbing its sharpness: the opposite of SAM.

    With sharpness :math:`L(w + \varepsilon) - L(w)`, whose gradient is :math:`g_s - g`, the
    base optimizer gets the gradient of the loss minus λ times the sharpness:

    .. math::
        g - \lambda \, (g_s - g).

    Args:
        base_optimizer: As for `SAM`, like all that is not listed.
        lam: λ, the price of a unit of sharpness in units of loss; at 0 the loss alone counts.

    Example:
        On :math:`L = \tfrac12 \|w\|^2` from (3, 4), g_s − g = ε = (0.3, 0.4), so λ = 10 stops
        the descent: the loss would pay 5 for each unit it gains.

        >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = SharpnessMax(torch.optim.SGD([w], lr=0.1), rho=0.5, lam=5.0)
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     loss = 0.5 * w.square().sum()
        ...     loss.backward()
        ...     return loss
        >>> optimizer.step(closure), w.detach()  # g - 5 (0.3, 0.4) = (1.5, 2)
        (tensor(12.5000), tensor([2.8500, 3.8000]))
    """

    settings = ("rho", "lam")

    def __init__(
        self,
        base_optimizer: Optimizer,
        *,
        model: nn.Module | None = None,
        rho: float = 0.05,
        lam: float = 1.0,
        mask: dict[str, Tensor] | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.lam = checks.non_negative("lam", lam)
        super().__init__(base_optimizer, model=model, rho=rho, mask=mask, scaler=scaler)

    def combine(self, g: ParameterVector, g_s: ParameterVector) -> ParameterVector:
        r"""Return :math:`g - \lambda (g_s - g)`."""
        return g - self.lam * (g_s - g)


class MicroBatchSAM(SAM):
    r"""Sharpness-aware minimisation of each part of a batch on its own: m-sharpness.

    Every micro-batch i climbs along its own gradient, and their averaged gradients make one step:

    .. math::
        \varepsilon_i = \rho \, \frac{\nabla L_i(w)}{\|\nabla L_i(w)\|}, \qquad
        \sum_i a_i \, \nabla L_i(w + \varepsilon_i), \quad \sum_i a_i = 1.

    The smaller the parts, the stronger the effect; a single part is `SAM`. Running statistics of
    BatchNorm take in the first micro-batch only, so they change once per step here, too.

    Args:
        base_optimizer: As for `SAM`, like all that is not listed.

    Reference:
        Foret et al. (2021), section 4.1; Andriushchenko & Flammarion (2022). Towards
        understanding sharpness-aware minimization. ICML.

    Example:
        At 0, the losses :math:`\tfrac12 (w - 1)^2` and :math:`\tfrac32 (w + \tfrac13)^2` pull with
        −1 and 1, so SAM on their mean sees a minimum. Perturbed by −ρ and ρ they pull with
        :math:`-1 - \rho` and :math:`1 + 3 \rho`: the sharper one wins by ρ on average.

        >>> w = torch.nn.Parameter(torch.tensor(0.0))
        >>> optimizer = MicroBatchSAM(torch.optim.SGD([w], lr=1.0), rho=0.25)
        >>> def part(scale, centre):
        ...     def closure():
        ...         optimizer.zero_grad()
        ...         loss = 0.5 * scale * (w - centre) ** 2
        ...         loss.backward()
        ...         return loss
        ...     return closure
        >>> loss = optimizer.step([part(1.0, 1.0), part(3.0, -1 / 3)])
        >>> round(loss.item(), 4), round(w.item(), 4)  # (1/2 + 1/6) / 2
        (0.3333, -0.25)
    """

    @torch.no_grad()
    def step(
        self,
        closures: Sequence[Closure] | None = None,
        weights: Sequence[float] | None = None,
    ) -> Tensor | float:
        """Take one step.

        Args:
            closures: One per micro-batch, each as for `SAM.step`.
            weights: One number above 0 per closure, such as the sizes of the micro-batches; they
                are divided by their sum. None weighs all alike.

        Returns:
            The weighted mean of the losses at the weights before the step, detached.

        Raises:
            ValueError: If there is no closure, ``weights`` does not fit, or a closure returns
                nothing or leaves no gradient.
        """
        if (
            not isinstance(closures, Sequence)
            or not closures
            or not all(callable(closure) for closure in closures)
        ):
            raise ValueError(
                "MicroBatchSAM.step needs one closure per micro-batch: call step([closure, ...]); "
                f"got {_described(closures)}."
            )
        shares = _shares(weights, len(closures))

        self.reached.clear()
        loss, update = self._share(closures[0], shares[0])
        with self.statistics_kept():
            for closure, share in zip(closures[1:], shares[1:], strict=True):
                part, direction = self._share(closure, share)
                loss = loss + part
                torch._foreach_add_(update.tensors, direction.tensors)
        self.descend(update)
        return loss

    def _share(self, closure: Closure, share: float) -> tuple[Tensor | float, ParameterVector]:
        loss, update = self.sharp_gradient(closure)
        return share * loss, share * update


def _shares(weights: Sequence[float] | None, parts: int) -> list[float]:
    if weights is None:
        return [1 / parts] * parts
    weights = checks.tensor("weights", weights, (parts,), floating=False).double()
    if not (weights.isfinite().all() and (weights > 0).all()):
        raise ValueError(f"weights must be finite and above 0; got {weights.tolist()}.")
    return (weights / weights.sum()).tolist()


def _described(closure: object) -> str:
    if closure is None:
        return "nothing"
    if isinstance(closure, Sequence) and not isinstance(closure, str):
        return f"a {type(closure).__name__} of {len(closure)} (MicroBatchSAM takes several)"
    return "a single function" if isinstance(closure, Callable) else repr(closure)


def _biases_and_norms(model: nn.Module | None) -> set[Tensor]:
    """Return the parameters that the model's layers and names show to be biases or norms."""
    if model is None:
        return set()
    norms = {
        p for m in model.modules() if isinstance(m, _NORMS) for p in m.parameters(recurse=False)
    }
    return norms | {p for name, p in model.named_parameters() if "bias" in name.split(".")[-1]}
