r"""Search for training samples: Adam on the objective, with or without sample splitting.

The whole objective is

.. math:: L(x, \lambda) + r \sum_i \bigl( \|[x_i - 1]_+\|^2 + \|[-1 - x_i]_+\|^2 \bigr)
    + 5 \sum_i [\lambda_{\min} - \lambda_i]_+^2 :

pixels stay in their range, and multipliers above a least value, so that candidates do not die.
"""

import math
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flatbook import checkpoints, checks
from flatbook.progress import bar
from flatbook.reconstruction.splitting import SampleSplitting, given_labels
from flatbook.runtime import generator

_LEAST_WEIGHT = 5.0
_CHECK = 100  # steps between two looks at the loss
_KEEP = 1000  # and between two checkpoints


class SplitEvent(NamedTuple):
    """A split on the way.

    Attributes:
        step: After so many steps.
        before: Candidates before.
        after: Candidates after.
        curvature: Least eigenvalue of a splitting matrix.
        loss_before: L before, relative to the squared norm of the target.
        loss_after: L after.
    """

    step: int
    before: int
    after: int
    curvature: float
    loss_before: float
    loss_after: float


class Reconstruction(NamedTuple):
    """Candidates at the end of a search. They need not look like any sample.

    Attributes:
        X: Shape ``(candidates, inputs)``.
        multipliers: Shape ``(candidates,)``.
        labels: Shape ``(candidates,)``.
        losses: L relative to the squared norm of the target, every hundred steps and at the end.
        events: The splits.
        steps: Steps made: fewer than asked for if the loss had settled.
    """

    X: Tensor
    multipliers: Tensor
    labels: Tensor
    losses: Tensor
    events: list[SplitEvent]
    steps: int

    @property
    def residual(self) -> float:
        """Distance of the target from what the candidates make of it, relative to its norm."""
        return math.sqrt(max(0.0, float(self.losses[-1])))


def reconstruct(
    objective,
    labels: Tensor,
    *,
    inputs: int,
    steps: int = 4000,
    lr: float = 0.02,
    lr_multipliers: float = 0.002,
    least: float | None = 0.01,
    range_weight: float = 1.0,
    spread: float = 0.01,
    first: float = 0.1,
    splitting: SampleSplitting | None = None,
    basis: Tensor | None = None,
    settled: float = 0.0,
    seed: int = 0,
    checkpoint=None,
    progress: bool | None = False,
) -> Reconstruction:
    r"""Search for the training samples of a network.

    Args:
        objective: A `ShallowObjective` or `NetworkObjective`, whose target and network say which
            attack it is.
        labels: One for each candidate: −1 and 1 for one output, classes for several; ones for
            multipliers of any sign. Shape ``(candidates,)``.
        inputs: Length of a sample.
        steps: Steps of Adam, with a cosine schedule.
        lr: Learning rate of the candidates.
        lr_multipliers: Learning rate of the multipliers.
        least: :math:`\lambda_{\min}`; None lets multipliers have any sign.
        range_weight: r.
        spread: Standard deviation of a candidate at the start.
        first: Multipliers at the start; drawn from both signs if they may have any.
        splitting: When and how candidates split; None never.
        basis: Orthonormal rows; candidates then stay in their span. Shape
            ``(dimensions, inputs)``.
        settled: Stop when the loss has fallen by less than this share in 500 steps, and no split
            is to come; 0 never.
        seed: Of the start and of random directions.
        checkpoint: A file to carry on from, if it is there, and to keep the state in.
        progress: As `flatbook.progress.bar`.

    Returns:
        The candidates, of the precision of the objective, and how they got there.

    Raises:
        ValueError: If an argument is none of the above, or the search diverges.
        CheckpointError: If ``checkpoint`` is damaged or of another run.

    Reference:
        Haim et al. (2022). Reconstructing training data from trained neural networks. NeurIPS;
        Buzaglo et al. (2023). Deconstructing data reconstruction. NeurIPS; Loo et al. (2024).
        Understanding reconstruction attacks with the neural tangent kernel. ICLR.

    Example:
        Two samples of four pixels, from the weights of a network trained on them.

        >>> from flatbook.reconstruction import ShallowObjective, train_two_layer
        >>> X = torch.tensor([[1.0, -1.0, 1.0, 0.0], [-1.0, 1.0, 0.0, 0.0]]).double()
        >>> y = torch.tensor([1, -1])
        >>> network = train_two_layer(X, y, width=50, init=1e-3, lr=0.1, steps=2000).network
        >>> found = reconstruct(ShallowObjective(network), y, inputs=4, steps=1000)
        >>> bool((found.X - X).abs().max() < 0.1)
        True
    """
    labels = given_labels(labels, "candidates")
    options = _Options(
        inputs=checks.count("inputs", inputs),
        steps=checks.count("steps", steps),
        lr=checks.positive("lr", lr),
        lr_multipliers=checks.positive("lr_multipliers", lr_multipliers),
        least=None if least is None else checks.non_negative("least", least),
        range_weight=checks.non_negative("range_weight", range_weight),
        spread=checks.positive("spread", spread),
        first=checks.positive("first", first),
        settled=checks.fraction("settled", settled),
        seed=checks.count("seed", seed, at_least=0),
    )
    if splitting is not None:
        checks.instance("splitting", splitting, SampleSplitting, "SampleSplitting(...)")
    like = _target(objective, inputs)
    if basis is not None:
        basis = checks.tensor("basis", basis, ("dimensions", inputs)).detach().to(like)
        objective = objective.within(basis)
    search = _Search(objective, labels.to(like.device), options, splitting, basis)
    identity = options._asdict() | {
        "splitting": repr(splitting),
        "labels": str(labels.tolist()),
        "target": float(objective.square),
        "sharpness": getattr(objective, "sharpness", None),
        "precision": str(like.dtype),
        "basis": "" if basis is None else sha256(basis.cpu().numpy().tobytes()).hexdigest(),
    }
    if checkpoint is not None and (kept := checkpoints.load(checkpoint, identity)):
        search.restore(kept)
    with bar(steps, label="reconstruction", unit="step", done=search.step, show=progress) as shown:
        while search.step < steps and not search.settled():
            search.advance()
            shown.update()
            if checkpoint is not None and search.step % _KEEP == 0:
                checkpoints.save(checkpoint, identity, search.state())
    found = search.result()
    if checkpoint is not None:
        Path(checkpoint).unlink(missing_ok=True)
    return found


def _target(objective, inputs: int) -> Tensor:
    """Return a tensor like the candidates, of an objective that can have some."""
    if not (hasattr(objective, "gradients") and hasattr(objective, "like")):
        raise ValueError(
            "objective must be a ShallowObjective or a NetworkObjective; got "
            f"{type(objective).__name__}."
        )
    if not objective.square > 0:
        raise ValueError("objective must have a target that is not 0; got one that is.")
    try:
        objective.outputs(torch.zeros(1, inputs).to(objective.like))
    except RuntimeError as error:
        raise ValueError(
            f"inputs must be the length of a sample of the network; got {inputs}."
        ) from error
    return objective.like


class _Options(NamedTuple):
    inputs: int
    steps: int
    lr: float
    lr_multipliers: float
    least: float | None
    range_weight: float
    spread: float
    first: float
    settled: float
    seed: int


class _Search:
    """A search on its way: what a step needs and changes."""

    def __init__(self, objective, labels, options: _Options, splitting, basis) -> None:
        self.objective, self.options, self.splitting = objective, options, splitting
        self.basis, self.labels, self.step = basis, labels, 0
        self.losses: list[float] = []
        self.events: list[SplitEvent] = []
        random, like = generator(options.seed), objective.like
        size = options.inputs if basis is None else len(basis)
        shape = (len(labels), size)
        X = torch.randn(shape, generator=random, dtype=torch.float64) * options.spread
        multipliers = torch.full((len(labels),), options.first, dtype=torch.float64)
        if options.least is None:
            multipliers *= torch.randn(len(labels), generator=random, dtype=torch.float64)
        self._watch(X.to(like), multipliers.to(like))

    def _watch(self, X: Tensor, multipliers: Tensor, moments: dict | None = None) -> None:
        """Hand candidates and multipliers to an optimizer, with the moments of their parents."""
        self.X, self.multipliers = X.contiguous(), multipliers.contiguous()
        self.optimizer = torch.optim.Adam(
            [
                {"params": [self.X], "lr": self.options.lr},
                {"params": [self.multipliers], "lr": self.options.lr_multipliers},
            ]
        )
        for tensor in (self.X, self.multipliers):
            tensor.requires_grad_(False)
            if moments is not None:
                self.optimizer.state[tensor] = moments[tensor.ndim]

    def _moments(self, parents: Tensor | None = None) -> dict:
        found = {}
        for tensor in (self.X, self.multipliers):
            own = self.optimizer.state.get(tensor)
            if own:
                chosen = {k: v if v.ndim == 0 or parents is None else v[parents].clone()
                          for k, v in own.items()}  # fmt: skip
                found[tensor.ndim] = chosen
        return found

    def advance(self) -> None:
        """Make one step, after a split if one is due."""
        options = self.options
        if self._may_split() and self.step and self.step % self.splitting.every == 0:
            self._split()
        loss, dX, dm = self.objective.gradients(self.X, self.multipliers, self.labels)
        if not math.isfinite(loss):
            raise ValueError(
                f"lr must let the search converge; {options.lr:g} diverged at step {self.step}."
            )
        if self.step % _CHECK == 0:
            self.losses.append(loss / self.objective.square)
        if options.range_weight:
            pixels = self.X if self.basis is None else self.X @ self.basis
            beyond = 2 * options.range_weight * (pixels - pixels.clamp(-1, 1))
            dX = dX + (beyond if self.basis is None else beyond @ self.basis.T)
        if options.least is not None:
            short = (options.least - self.multipliers).clamp(min=0)
            dm = dm - 2 * _LEAST_WEIGHT * short
        self.X.grad, self.multipliers.grad = dX, dm
        fade = 0.5 * (1 + math.cos(math.pi * self.step / options.steps))
        for group, rate in zip(
            self.optimizer.param_groups, (options.lr, options.lr_multipliers), strict=True
        ):
            group["lr"] = rate * fade
        self.optimizer.step()
        self.step += 1

    def _may_split(self) -> bool:
        return self.splitting is not None and self.step <= self.splitting.until * self.options.steps

    def _split(self) -> None:
        loss = self._loss()
        after = self.splitting.split(
            self.objective, self.X, self.multipliers, self.labels,
            seed=1_000_003 * self.options.seed + self.step, spread=self.options.spread,
        )  # fmt: skip
        before = len(self.X)
        if len(after.X) > before:
            self._watch(after.X, after.multipliers, self._moments(after.parents))
            self.labels = after.labels
        self.events.append(
            SplitEvent(
                self.step, before, len(self.X), float(after.curvatures[0]), loss, self._loss()
            )
        )

    def _loss(self) -> float:
        found = self.objective.gradients(self.X, self.multipliers, self.labels)[0]
        return found / self.objective.square

    def settled(self) -> bool:
        """Return whether the loss hardly falls any more, and no split is to come."""
        if not self.options.settled or len(self.losses) < 6 or self._may_split():
            return False
        return self.losses[-6] - self.losses[-1] < self.options.settled * abs(self.losses[-6])

    def state(self) -> dict:
        """Return all that a later process needs to carry on."""
        return {
            "step": self.step,
            "X": self.X.cpu(),
            "multipliers": self.multipliers.cpu(),
            "labels": self.labels.cpu(),
            "moments": self._moments(),
            "losses": self.losses,
            "events": [list(event) for event in self.events],
        }

    def restore(self, kept: dict) -> None:
        """Carry on from such a state."""
        like = self.objective.like
        self.step, self.losses = kept["step"], list(kept["losses"])
        self.events = [SplitEvent(*event) for event in kept["events"]]
        self.labels = kept["labels"].to(like.device)
        moments = {
            ndim: {k: v if v.ndim == 0 else v.to(like) for k, v in own.items()}
            for ndim, own in kept["moments"].items()
        }
        self._watch(kept["X"].to(like), kept["multipliers"].to(like), moments)

    def result(self) -> Reconstruction:
        """Return the candidates as they are now."""
        losses = torch.tensor([*self.losses, self._loss()], dtype=torch.float64)
        X = self.X if self.basis is None else self.X @ self.basis
        return Reconstruction(
            X.clone(), self.multipliers.clone(), self.labels, losses, self.events, self.step
        )
