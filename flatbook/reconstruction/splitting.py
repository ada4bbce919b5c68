r"""Sample splitting: where a candidate should become two, and what that does to the objective.

For :math:`L = \|\vartheta - F\|^2` with :math:`F = \sum_i \lambda_i g(x_i)`, replace candidate i by
:math:`x_i \pm \eta v` with half its multiplier each. To second order that changes L by

.. math:: \tfrac12 \eta^2 \, v^\top S_i v , \qquad
    S_i = -2 \lambda_i \langle \vartheta - F, \nabla_x^2 g(x_i) \rangle ,

the **splitting matrix**, and no pair of directions does better than the least eigenvector, both
ways. The Hessian of L in all candidates together is :math:`2 J^\top J +
\operatorname{blockdiag}(S_i)`, with the Jacobian J of F, so

.. math:: \lambda_{\min}(\nabla_x^2 L) \ge \min_i \lambda_{\min}(S_i) :

where no candidate wants to split, L has no direction of much negative curvature. The converse is
false: a negative eigenvalue of :math:`S_i` need not make a saddle, for a split adds parameters.

The matrices are never formed: the least eigenvectors of all candidates come from one run of
Lanczos' method on the products :math:`S_i v_i`.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flatbook import checks
from flatbook.runtime import generator

Direction = Literal["eigenvector", "random", "fresh"]
_LARGEST = 10**7  # entries of all dense matrices together


def splitting_matrix(objective, X: Tensor, multipliers: Tensor, labels: Tensor) -> Tensor:
    r"""Compute the matrices :math:`S_i` of all candidates, for short candidates only.

    Args:
        objective: A `ShallowObjective`, `NetworkObjective` or anything with their three methods.
        X: Candidates. Shape ``(candidates, inputs)``.
        multipliers: λ. Shape ``(candidates,)``.
        labels: Shape ``(candidates,)``.

    Returns:
        Symmetric. Shape ``(candidates, inputs, inputs)``.

    Raises:
        ValueError: If shapes disagree, a number is not finite, or there are more than ten million
            entries.

    Example:
        Along one eigenvector the loss falls when the candidate splits, along the other it rises.

        >>> from flatbook.reconstruction import ShallowObjective, TwoLayer
        >>> one = torch.ones(1)
        >>> network = TwoLayer(torch.tensor([[1.0, 0.0]]), 0 * one, torch.ones(1, 1))
        >>> objective = ShallowObjective(network, sharpness=1.0)
        >>> S = splitting_matrix(objective, torch.tensor([[0.0, 1.0]]), one, one)
        >>> torch.linalg.eigvalsh(S[0]).round(decimals=3)
        tensor([-1.2050,  0.0520])
    """
    X, multipliers, labels = given(objective, X, multipliers, labels)
    n, d = X.shape
    if n * d * d > _LARGEST:
        raise ValueError(
            f"X must give matrices of at most {_LARGEST} entries together; got {n} of {d} by {d}."
        )
    apply = objective.splitting(X, multipliers, labels)
    columns = [apply(axis.expand(n, d).contiguous()) for axis in torch.eye(d).to(X)]
    S = torch.stack(columns, dim=2)
    return (S + S.mT) / 2


class Curvatures(NamedTuple):
    """Least eigenpairs of the splitting matrices.

    Attributes:
        values: The least eigenvalue of each, from above. Shape ``(candidates,)``.
        directions: Unit eigenvectors. Shape ``(candidates, inputs)``.
        errors: Norms of :math:`S v - \\mu v`; an eigenvalue lies that near. Shape
            ``(candidates,)``.
    """

    values: Tensor
    directions: Tensor
    errors: Tensor


@torch.no_grad()
def least_curvatures(
    objective, X: Tensor, multipliers: Tensor, labels: Tensor, *, steps: int = 20, seed: int = 0
) -> Curvatures:
    """Find the least eigenvector of each splitting matrix by Lanczos' method, all at once.

    Args:
        objective: As for `splitting_matrix`.
        X: Candidates. Shape ``(candidates, inputs)``.
        multipliers: λ. Shape ``(candidates,)``.
        labels: Shape ``(candidates,)``.
        steps: Products with every matrix; as many as inputs are exact.
        seed: Of the start.

    Returns:
        Eigenvalues, eigenvectors and how far they are off.

    Raises:
        ValueError: If shapes disagree or ``steps`` is no count.

    Reference:
        Lanczos (1950). An iteration method for the solution of the eigenvalue problem of linear
        differential and integral operators. Journal of Research of the National Bureau of
        Standards.
    """
    X, multipliers, labels = given(objective, X, multipliers, labels)
    steps = min(checks.count("steps", steps), X.shape[1])
    apply, random = objective.splitting(X, multipliers, labels), generator(seed)

    def fresh():
        return torch.randn(X.shape, generator=random, dtype=torch.float64).to(X)

    start = fresh()
    basis = (start / start.norm(dim=1, keepdim=True))[None]  # (steps, candidates, inputs)
    diagonal, beside = [], []
    for _ in range(steps):
        v = apply(basis[-1])
        diagonal.append((v * basis[-1]).sum(dim=1))
        scale = v.norm(dim=1)
        v = _orthogonal(_orthogonal(v, basis), basis)
        size = v.norm(dim=1)
        # An invariant subspace is complete: go on outside it, uncoupled.
        ended = size <= 1e3 * torch.finfo(X.dtype).eps * scale.clamp(min=1e-300)
        beside.append(torch.where(ended, 0.0, size))
        if len(diagonal) < steps:
            if ended.any():
                other = _orthogonal(_orthogonal(fresh(), basis), basis)
                v = torch.where(ended[:, None], other, v)
            v = v / v.norm(dim=1, keepdim=True).clamp(min=1e-300)
            basis = torch.cat([basis, v[None]])
    off = torch.stack(beside, dim=1)
    T = torch.diag_embed(torch.stack(diagonal, dim=1))
    T = T + torch.diag_embed(off[:, :-1], 1) + torch.diag_embed(off[:, :-1], -1)
    values, vectors = torch.linalg.eigh(T)
    least = vectors[:, :, 0]
    directions = torch.einsum("nk,knd->nd", least, basis)
    directions = directions / directions.norm(dim=1, keepdim=True)
    return Curvatures(values[:, 0], directions, (off[:, -1] * least[:, -1]).abs())


class Split(NamedTuple):
    """Candidates after a split.

    Attributes:
        X: Those that stayed, then their new halves. Shape ``(candidates, inputs)``.
        multipliers: Shape ``(candidates,)``.
        labels: Shape ``(candidates,)``.
        parents: Which candidate each was. Shape ``(candidates,)``.
        curvatures: The least eigenvalues before, ascending. Shape ``(candidates before,)``.
    """

    X: Tensor
    multipliers: Tensor
    labels: Tensor
    parents: Tensor
    curvatures: Tensor


@dataclass(frozen=True)
class SampleSplitting:
    r"""When and how a search splits its candidates.

    Attributes:
        every: Steps between two checks.
        until: Share of the steps after which none is made.
        threshold: Only candidates with a least eigenvalue below this one split.
        step: η, by which the halves move apart.
        share: Of all candidates, at most so many split at once, those with the least first.
        most: Never more candidates than this; None for any number.
        direction: ``"eigenvector"``; ``"random"`` moves the halves of the same candidates along a
            random line; ``"fresh"`` leaves them whole and adds as many new candidates, drawn as
            the first ones were, each with the multiplier of one that would have split.
        lanczos: Products with every splitting matrix for a check.

    Raises:
        ValueError: If an argument is none of the above.
    """

    every: int = 1000
    until: float = 0.75
    threshold: float = -0.1
    step: float = 0.01
    share: float = 0.5
    most: int | None = None
    direction: Direction = "eigenvector"
    lanczos: int = 20

    def __post_init__(self) -> None:
        checks.count("every", self.every)
        checks.fraction("until", self.until)
        checks.finite("threshold", self.threshold)
        checks.positive("step", self.step)
        checks.fraction("share", self.share)
        if self.most is not None:
            checks.count("most", self.most)
        checks.choice("direction", self.direction, ("eigenvector", "random", "fresh"))
        checks.count("lanczos", self.lanczos)

    def split(
        self,
        objective,
        X: Tensor,
        multipliers: Tensor,
        labels: Tensor,
        *,
        seed: int = 0,
        spread: float = 0.01,
    ) -> Split:
        r"""Split the candidates that are due.

        Args:
            objective: As for `splitting_matrix`.
            X: Candidates. Shape ``(candidates, inputs)``.
            multipliers: λ. Shape ``(candidates,)``.
            labels: Shape ``(candidates,)``.
            seed: Of random directions.
            spread: Standard deviation of a fresh candidate.

        Returns:
            All candidates; each that split is replaced by one half and the other comes last.

        Raises:
            ValueError: If shapes disagree.
        """
        X, multipliers, labels = given(objective, X, multipliers, labels)
        found = least_curvatures(objective, X, multipliers, labels, steps=self.lanczos, seed=seed)
        count = math.floor(self.share * len(X))
        if self.most is not None:
            count = min(count, max(0, self.most - len(X)))
        due = found.values.argsort()[:count]
        due = due[found.values[due] < self.threshold]
        parents = torch.cat([torch.arange(len(X), device=X.device), due])
        after, weights = X[parents].clone(), multipliers[parents].clone()
        new = slice(len(X), None)
        random = torch.randn(
            len(due), X.shape[1], generator=generator(seed + 1), dtype=torch.float64
        ).to(X)
        if self.direction == "fresh":
            after[new] = spread * random
        else:
            v = found.directions[due]
            if self.direction == "random":
                v = random / random.norm(dim=1, keepdim=True)
            after[due] += self.step * v
            after[new] -= self.step * v
            weights[due] /= 2
            weights[new] /= 2
        return Split(after, weights, labels[parents], parents, found.values.sort().values)


def _orthogonal(v: Tensor, basis: Tensor) -> Tensor:
    """Return rows less their parts along earlier ones."""
    return v - torch.einsum("kn,knd->nd", torch.einsum("knd,nd->kn", basis, v), basis)


def given(objective, X, multipliers, labels) -> tuple[Tensor, Tensor, Tensor]:
    """Return what was given, in the precision and on the device of the objective."""
    if not hasattr(objective, "splitting"):
        raise ValueError(
            "objective must be a ShallowObjective, a NetworkObjective or have their methods; got "
            f"{type(objective).__name__}."
        )
    X = checks.tensor("X", X, ("candidates", getattr(objective, "inputs", "inputs"))).detach()
    X = X.to(getattr(objective, "like", X))
    multipliers = checks.tensor("multipliers", multipliers, (len(X),)).detach().to(X)
    return X, multipliers, given_labels(labels, len(X)).to(X.device)


def given_labels(labels, count: int | str) -> Tensor:
    """Return labels, one for each candidate; what they may be depends on the outputs."""
    labels = checks.tensor("labels", labels, (count,), floating=False)
    return checks.tensor("labels", labels, (count,), floating=labels.is_floating_point())
