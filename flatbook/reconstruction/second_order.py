"""Gradient descent in the candidates, with a split wherever it comes to rest."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flatbook import checks
from flatbook.reconstruction.splitting import SampleSplitting, given


class SecondOrderPoint(NamedTuple):
    """Where gradient descent with splitting stopped.

    Attributes:
        X: Candidates. Shape ``(candidates, inputs)``.
        multipliers: Shape ``(candidates,)``.
        labels: Shape ``(candidates,)``.
        gradient: Norm of the gradient in X.
        curvature: Least eigenvalue of a splitting matrix, which bounds that of the Hessian.
        steps: Gradient steps in all.
        splits: Rounds of splitting.
        losses: After every step. Shape ``(steps + 1,)``.
        reached: Whether both bounds hold.
    """

    X: Tensor
    multipliers: Tensor
    labels: Tensor
    gradient: float
    curvature: float
    steps: int
    splits: int
    losses: Tensor
    reached: bool


def second_order_point(
    objective,
    X: Tensor,
    multipliers: Tensor,
    labels: Tensor,
    *,
    epsilon: float,
    smoothness: float,
    hessian_lipschitz: float,
    max_steps: int = 100_000,
    lanczos: int = 40,
    seed: int = 0,
) -> SecondOrderPoint:
    r"""Descend in the candidates, and split where that has stopped, to a second-order point.

    Gradient steps of :math:`1 / l` until :math:`\|\nabla_x L\| \le \varepsilon`; then every
    candidate with :math:`\lambda_{\min}(S_i) < -\sqrt{\rho \varepsilon}` splits (at most half of
    them at once) by :math:`\eta = \sqrt{\varepsilon / \rho}`; and so on until none does. Then
    :math:`\lambda_{\min}(\nabla_x^2 L) \ge -\sqrt{\rho \varepsilon}` too. The multipliers stay but
    for being halved.

    Args:
        objective: As for `splitting_matrix`.
        X: Candidates. Shape ``(candidates, inputs)``.
        multipliers: λ. Shape ``(candidates,)``.
        labels: Shape ``(candidates,)``.
        epsilon: ε.
        smoothness: l, a bound on the curvature of L.
        hessian_lipschitz: ρ, a Lipschitz constant of its Hessian.
        max_steps: Gradient steps in all.
        lanczos: As of `least_curvatures`.
        seed: Of Lanczos' start.

    Returns:
        The candidates and how they got there.

    Raises:
        ValueError: If shapes disagree or a constant is not above 0; or if the loss rises, so that
            ``smoothness`` or ``hessian_lipschitz`` is too small.
    """
    X, multipliers, labels = given(objective, X, multipliers, labels)
    epsilon = checks.positive("epsilon", epsilon)
    rate = 1 / checks.positive("smoothness", smoothness)
    rho = checks.positive("hessian_lipschitz", hessian_lipschitz)
    max_steps = checks.count("max_steps", max_steps)
    bound, apart = -math.sqrt(rho * epsilon), math.sqrt(epsilon / rho)
    steps, splits, losses, split = 0, 0, [], False
    while True:
        loss, slope, _ = objective.gradients(X, multipliers, labels)
        if losses and not loss <= losses[-1] + 1e-12 * max(1.0, abs(losses[-1])):
            bad = (
                f"hessian_lipschitz must bound how fast the curvature changes; with {rho:g} a split"
                if split
                else f"smoothness must be a bound on the curvature; with {smoothness:g} a step"
            )
            raise ValueError(f"{bad} raised the loss from {losses[-1]:.6g} to {loss:.6g}.")
        losses.append(loss)
        size = float(slope.norm())
        if size > epsilon and steps < max_steps:
            X, steps, split = X - rate * slope, steps + 1, False
            continue
        share = max(0.5, 1 / len(X))  # a single candidate too
        rule = SampleSplitting(threshold=bound, step=apart, share=share, lanczos=lanczos)
        after = rule.split(objective, X, multipliers, labels, seed=seed)
        least = float(after.curvatures[0])
        if least >= bound or steps >= max_steps:
            reached = size <= epsilon and least >= bound
            break
        X, multipliers, labels = after.X, after.multipliers, after.labels
        splits, split = splits + 1, True
    losses = torch.tensor(losses, dtype=torch.float64)
    return SecondOrderPoint(X, multipliers, labels, size, least, steps, splits, losses, reached)
