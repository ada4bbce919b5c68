"""One call for every method: copy, check, run, and come back from a kill or a divergence."""

import math
import os
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatbook import checkpoints, checks, runtime
from flatbook.archives import checksum
from flatbook.checkpoints import CheckpointError
from flatbook.models import evaluating
from flatbook.training import epoch_seeds
from flatbook.unlearning.influence import Influence
from flatbook.unlearning.methods import (
    FineTune,
    L1Sparse,
    Method,
    NegGrad,
    RandomLabel,
    SalUn,
    Scrub,
    Task,
)
from flatbook.unlearning.saliency import builder
from flatbook.unlearning.sets import retain_and_forget, streamed
from flatbook.unlearning.sharp_minmax import SharpMinMax

METHODS = {
    "finetune": FineTune,
    "neg_grad": NegGrad,
    "random_label": RandomLabel,
    "salun": SalUn,
    "l1_sparse": L1Sparse,
    "scrub": Scrub,
    "influence": Influence,
    "sharp_minmax": SharpMinMax,
}
"""The classes behind the names of methods; their options are their fields."""


@dataclass(frozen=True, eq=False)
class Unlearned:
    """A model that was made to forget.

    Attributes:
        model: In evaluation mode. After a divergence, as it was at the end of the last epoch that
            was sound, or at the start.
        history: One entry per sound epoch: ``loss``, the mean over its steps of the method's loss
            before each; ``steps``; ``seconds``; and what ``measure`` returned.
        seconds: Duration of all epochs, those before a resume included; no measuring.
        divergence: What went wrong, in a sentence; None if nothing did.
    """

    model: nn.Module
    history: tuple[dict[str, float], ...]
    seconds: float
    divergence: str | None = None

    @property
    def diverged(self) -> bool:
        """Whether the run broke down before its last epoch."""
        return self.divergence is not None


def unlearn(
    model: nn.Module,
    retain,
    forget,
    *,
    method: str | Method,
    epochs: int,
    optimizer: Callable[[list], Optimizer] | None = None,
    batch_size: int = 128,
    seed: int = 0,
    inplace: bool = False,
    checkpoint: str | os.PathLike | None = None,
    measure: Callable[[nn.Module], dict[str, float]] | None = None,
    loss_limit: float = 1e4,
    **options,
) -> Unlearned:
    """Make a copy of a model forget some of the data it was trained on.

    Methods that use both sets run as ``zip(R, cycle(F))``: an epoch is one pass through R, and F
    starts over, in a new order, as often as that takes. Orders and dropout follow from the seed
    and the number of the epoch alone, and the global generators are left as they were. So a run
    that was killed at any moment and is called again with the same ``checkpoint`` ends with the
    same weights bit for bit, on a CPU with as many threads; on a GPU, if its kernels are
    deterministic.

    A run diverges when the loss of a step is not finite or greater than ``loss_limit`` in
    absolute value, or a weight is not finite after an epoch. It then stops and says so in the
    result, which holds the last sound model; go on from there at a lower rate.

    Args:
        model: Maps inputs to logits ``(samples, classes)``. It is copied on its own device.
        retain: What to keep: a TensorDataset or a pair (x, y).
        forget: What to forget, likewise. It must share no row, same x and same y, with ``retain``.
        method: ``"finetune"``, ``"neg_grad"``, ``"random_label"``, ``"salun"``, ``"l1_sparse"``,
            ``"scrub"``, ``"influence"`` or ``"sharp_minmax"``; or a `Method` of your own.
        epochs: Passes through R; Newton steps of ``"influence"``.
        optimizer: Builds an optimizer over a list of parameters, such as
            ``lambda p: SAM(torch.optim.SGD(p, lr=0.01))``. It is called once, twice for
            ``"sharp_minmax"`` and never for ``"influence"``. Optimizers of `flatbook.optim` get to
            know the model, so that BatchNorm statistics change once per step. None is SGD at a
            rate of 0.01 with momentum 0.9.
        batch_size: Samples of each set per step.
        seed: Of everything random.
        inplace: Change ``model`` itself, and leave it in evaluation mode.
        checkpoint: A file to resume from if it exists, written after each sound epoch. It belongs
            to these arguments, data and initial weights; any other run is refused.
        measure: Called with the model, in evaluation mode, after each epoch; the numbers it
            returns join the history.
        loss_limit: See above; in nats, above 0, may be infinite.
        **options: Those of the method, the fields of its class in :data:`METHODS`: ``alpha`` of
            NegGrad, for instance.

    Returns:
        The model, its history, and whether and why it stopped early.

    Raises:
        ValueError: If a set is empty, they share a row or do not fit the model, or an argument or
            option is unknown or out of range.
        CheckpointError: If ``checkpoint`` is damaged or of another run.

    Example:
        >>> model = nn.Linear(1, 2)
        >>> x, y = torch.tensor([[-1.0], [1.0], [3.0]]), torch.tensor([0, 1, 0])
        >>> done = unlearn(
        ...     model, (x[:2], y[:2]), (x[2:], y[2:]), method="neg_grad", epochs=3, alpha=0.5
        ... )
        >>> len(done.history), done.diverged, done.model is model
        (3, False, False)
    """
    checks.module("model", model)
    retain, forget, classes = retain_and_forget(model, retain, forget)
    name, method = _chosen(method, options)
    checks.count("epochs", epochs)
    checks.count("batch_size", batch_size)
    checks.count("seed", seed, at_least=0)
    if loss_limit != math.inf:
        checks.positive("loss_limit", loss_limit)
    if measure is not None and not callable(measure):
        raise ValueError(f"measure must be a function or None; got {measure!r:.80}.")
    build = builder(optimizer)

    initial = checksum(*_tensors(model)) if checkpoint is not None else ""
    student = model if inplace else deepcopy(model)
    parameters = [p for p in student.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("model must have a parameter that requires a gradient; it has none.")
    method.start(student, Task(retain, forget, classes, epochs, seed))
    optimizers = method.build(student, build, parameters)

    history: list[dict[str, float]] = []
    if checkpoint is not None:
        identity = {
            "method": name,
            "options": repr(method) if is_dataclass(method) else name,
            "epochs": epochs,
            "batch_size": batch_size,
            "seed": seed,
            "optimizer": repr(optimizers),
            "data": checksum(*retain, *forget),
            "model": checkpoints.layout(student),
            "weights": initial,
        }
        history = _restored(checkpoint, identity, student, optimizers)

    divergence, lost = None, 0.0
    while len(history) < epochs and divergence is None:
        sound = [t.clone() for t in _tensors(student)]
        start = time.perf_counter()
        losses, divergence = _epoch(
            method, student, optimizers, len(history), (batch_size, seed, loss_limit)
        )
        seconds = time.perf_counter() - start
        if divergence is not None:
            with torch.no_grad():
                for tensor, value in zip(_tensors(student), sound, strict=True):
                    tensor.copy_(value)
            divergence, lost = f"{name} diverged in epoch {len(history) + 1}: {divergence}", seconds
            break
        entry = {"loss": float(np.mean(losses)), "steps": len(losses), "seconds": seconds}
        if measure is not None:
            with evaluating(student), torch.no_grad():
                entry |= {key: float(value) for key, value in measure(student).items()}
        history.append(entry)
        if checkpoint is not None:
            state = {
                "model": student.state_dict(),
                "optimizers": [o.state_dict() for o in optimizers],
                "history": history,
            }
            checkpoints.save(checkpoint, identity, state)
    student.zero_grad(set_to_none=True)
    student.eval()
    total = sum(entry["seconds"] for entry in history) + lost
    return Unlearned(student, tuple(history), total, divergence)


@torch.enable_grad()
def _epoch(method, model, optimizers, epoch, run) -> tuple[list[float], str | None]:
    """Run one epoch; return the losses of its steps, and what went wrong."""
    batch_size, seed, limit = run
    *order_seeds, dropout_seed = epoch_seeds(seed, epoch)
    randoms = [runtime.generator(s) for s in order_seeds]
    losses = []
    model.train()
    with runtime.forked_seed(dropout_seed):
        stream = lambda sets: streamed(sets, batch_size, randoms)  # noqa: E731
        for value in method.epoch(model, optimizers, epoch, stream):
            losses.append(float(value))
            if not abs(losses[-1]) <= limit or not math.isfinite(losses[-1]):
                return losses, (
                    f"the loss of step {len(losses)} was {losses[-1]:.3g}, beyond ±{limit:g}; the "
                    "model is that of before the epoch. A lower learning rate may help."
                )
    if not torch.stack([t.isfinite().all() for t in _tensors(model)]).all():
        return losses, (
            "a weight or running statistic was inf or nan at its end; the model is that of before "
            "the epoch. A lower learning rate may help."
        )
    return losses, None


def _chosen(method, options) -> tuple[str, Method]:
    """Return the name of a method and a fresh instance of it."""
    if isinstance(method, Method):
        if options:
            first = next(iter(options))
            raise ValueError(
                f"options of a method given as an instance go to its class; got {first!r}."
            )
        return type(method).__name__, method
    name = checks.choice("method", method, METHODS)
    known = [field.name for field in fields(METHODS[name])]
    for option in options:
        if not known:
            raise ValueError(f"{name} has no options; got {option!r}.")
        checks.choice(f"an option of {name}", option, known)
    return name, METHODS[name](**options)


def _tensors(model: nn.Module) -> list[Tensor]:
    """Return all parameters and buffers."""
    return [*model.parameters(), *model.buffers()]


def _restored(path, identity, model, optimizers) -> list[dict[str, float]]:
    """Load the parts of a run from its checkpoint, if there is one, and return its history."""
    saved = checkpoints.load(path, identity)
    if saved is None:
        return []
    try:
        model.load_state_dict(saved["model"])
        for part, state in zip(optimizers, saved["optimizers"], strict=True):
            part.load_state_dict(state)
        return [dict(entry) for entry in saved["history"]]
    except CheckpointError:
        raise
    except Exception as error:  # each kind of part has its own ways to refuse a state
        raise checkpoints.damaged(path) from error
