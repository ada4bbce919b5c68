"""Sharp MinMax: one half of the weights keeps, on flat ground; the other forgets, on sharp."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from flatbook import checks
from flatbook.optim import ASAM, SAM, SharpnessMax
from flatbook.unlearning.methods import Method, Variant, ce, step
from flatbook.unlearning.saliency import rebuilt, saliency_mask
from flatbook.wrapper import ParameterVector

Objective = Literal["ascent", "descent"]


class AdaptiveSharpnessMax(SharpnessMax, ASAM):
    """Maximize sharpness in the ball of ASAM, which scales with each weight.

    Args:
        base_optimizer: As for `SharpnessMax`, like all that is not listed.
        eta: As for `ASAM`.
    """

    settings = ("rho", "lam", "eta")

    def __init__(self, base_optimizer, *, eta: float = 0.01, **options):
        super().__init__(base_optimizer, **options)
        self.eta = checks.non_negative("eta", eta)


@dataclass(eq=False)
class SharpMinMax(Method):
    r"""Minimize the sharpness of R over half of the weights, maximize that of F over the others.

    The weights :math:`W_F` are those with the greatest gradients on F, see
    `flatbook.unlearning.saliency_mask`, and :math:`W_R` the rest. On each pair of batches two
    optimizers step, one after the other:

    - over :math:`W_R`, `SAM` on :math:`\alpha\,\mathrm{CE}(R)`;
    - over :math:`W_F`, `SharpnessMax` on :math:`\mp(1 - \alpha)\,\mathrm{CE}(F)`.

    The weights of the other half take no part in an ascent and stay bit for bit, whatever momentum
    and weight decay want. ``optimizer`` is called twice. If it builds a plain optimizer, SAM goes
    around it; if it builds `SAM` or `ASAM`, that is the kind of both ascents.

    Args:
        alpha: α, in [0, 1].
        fraction: Share of the weights in :math:`W_F`.
        forget_objective: ``"ascent"`` raises the loss on F, as the released code does;
            ``"descent"`` lowers it, as the method is written: :math:`\min_{W_F} L - S`, which
            overfits F on purpose. The sign of the loss is opposite, the sharpness that of the loss
            so signed.
        rho: Radius around a plain optimizer; otherwise that of the optimizer holds.
        lam: λ, the weight of the sharpness of F, 0 or more. At 0 the half that forgets follows the
            loss alone, and only the other is aware of sharpness.
        variant: ``"released"`` does what public code does. :math:`W_F` are the weights with the
            *least* gradients; both ascents move all weights; and of the two gradients, only the
            second is masked. With g before and :math:`g_s` after the ascent, and the mask m, the
            steps are :math:`m g_s` on R, but
            :math:`g - \lambda (m g_s - g)` on F, which moves the weights meant to be frozen by
            :math:`(1 + \lambda) g`. Momentum and decay act on all of them, too.

    Reference:
        Tang and Khanna (2025). Sharpness-aware machine unlearning. arXiv:2506.13715.
    """

    alpha: float = 0.99
    fraction: float = 0.5
    forget_objective: Objective = "ascent"
    rho: float = 0.05
    lam: float = 1.0
    variant: Variant = "paper"

    def __post_init__(self):
        checks.fraction("alpha", self.alpha)
        checks.fraction("fraction", self.fraction)
        checks.choice("forget_objective", self.forget_objective, ("ascent", "descent"))
        checks.positive("rho", self.rho)
        checks.non_negative("lam", self.lam)
        checks.choice("variant", self.variant, ("paper", "released"))

    def start(self, model, task):
        """Split the weights."""
        super().start(model, task)
        self.mask = saliency_mask(
            model, task.forget, fraction=self.fraction, largest=self.variant == "paper"
        )

    def build(self, model, optimizer, parameters):
        """Build an optimizer for each half."""
        retain, forget = (self._sam(optimizer(parameters)) for _ in range(2))
        rest = {name: ~part for name, part in self.mask.items()}
        sharp = AdaptiveSharpnessMax if isinstance(forget, ASAM) else SharpnessMax
        if self.variant == "paper":
            return [
                rebuilt(retain, model, mask=rest),
                rebuilt(forget, model, sharp, mask=self.mask, lam=self.lam),
            ]
        return [
            _leaking(rebuilt(retain, model, _LEAKING[type(retain)]), model, rest),
            _leaking(rebuilt(forget, model, _LEAKING[sharp], lam=self.lam), model, self.mask),
        ]

    def _sam(self, built):
        if not isinstance(built, SAM):
            return SAM(built, rho=self.rho)
        if type(built) not in (SAM, ASAM):
            raise ValueError(
                "optimizer must build a plain optimizer, a SAM or an ASAM for sharp_minmax; "
                f"got {type(built).__name__}."
            )
        return built

    def epoch(self, model, optimizers, epoch, stream):
        """Step on each half in turn; yield the sum of the two losses."""
        for retain, forget in stream((self.task.retain, self.task.forget)):
            kept = step(optimizers[0], lambda: self.retain_loss(model, retain))  # noqa: B023
            gone = step(optimizers[1], lambda: self.forget_loss(model, forget))  # noqa: B023
            yield kept + gone

    def retain_loss(self, model, retain):
        """Return α·CE(R)."""
        return self.alpha * ce(model, retain)

    def forget_loss(self, model, forget):
        """Return −(1−α)·CE(F), or its negative for ``forget_objective="descent"``."""
        sign = -1 if self.forget_objective == "ascent" else 1
        return sign * (1 - self.alpha) * ce(model, forget)


class _Leaking:
    """Mask the second gradient alone, in whatever the class after this one makes of the two."""

    kept: ParameterVector

    def combine(self, g, g_s):
        return super().combine(g, self.kept * g_s)


class _LeakingSAM(_Leaking, SAM):
    pass


class _LeakingASAM(_Leaking, ASAM):
    pass


class _LeakingMax(_Leaking, SharpnessMax):
    pass


class _LeakingAdaptiveMax(_Leaking, AdaptiveSharpnessMax):
    pass


_LEAKING = {
    SAM: _LeakingSAM,
    ASAM: _LeakingASAM,
    SharpnessMax: _LeakingMax,
    AdaptiveSharpnessMax: _LeakingAdaptiveMax,
}


def _leaking(optimizer: _Leaking, model: nn.Module, mask) -> _Leaking:
    by_parameter = {p: mask[name] for name, p in model.named_parameters() if name in mask}
    optimizer.kept = ParameterVector(by_parameter[p].to(p.dtype) for p in optimizer.parameters())
    return optimizer
