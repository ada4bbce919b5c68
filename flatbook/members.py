"""One member of an ensemble: trained on its share of the data, asked about all of them."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from flatbook import checks, runtime
from flatbook.config import TrainConfig
from flatbook.curvature import logits_of_one
from flatbook.models import evaluating
from flatbook.training import fit

_BLOCK = 512  # inputs per forward pass

# torch's global generators and number of threads belong to the process: one member at a time.
_ALONE = threading.Lock()


class Answers(NamedTuple):
    """What is kept of a member: arrays of float32, and how long it trained.

    Attributes:
        logits: On all training points. Shape ``(points, classes)`` or
            ``(points, queries, classes)``.
        eval_logits: On the evaluation points, or None.
        epochs: How many epochs it was trained for.
    """

    logits: np.ndarray
    eval_logits: np.ndarray | None
    epochs: int


@dataclass(frozen=True, eq=False)
class Plan:
    """What the members of an ensemble have in common. It passes from process to process.

    Attributes:
        make_model: Returns a new model, given a seed.
        x: Inputs of all points. Shape ``(points, ...)``.
        y: Their labels. Shape ``(points,)``.
        design: Which member is trained on which point. Shape ``(models, points)``.
        seeds: One for each member. Shape ``(models,)``.
        config: The hyper-parameters, but for the seed.
        eval_x: Inputs of evaluation points, or None.
        queries: What to ask about each input, see :func:`asked`.
        device: Where to compute; None lets each process choose.
    """

    make_model: Callable[[int], nn.Module]
    x: np.ndarray
    y: np.ndarray
    design: np.ndarray
    seeds: Sequence[int]
    config: TrainConfig
    eval_x: np.ndarray | None = None
    queries: str | Callable | Sequence[Callable] | None = None
    device: str | None = None

    def configured(self, member: int) -> TrainConfig:
        """Return the hyper-parameters of a member."""
        return replace(self.config, seed=self.seeds[member])

    def made(self, member: int) -> nn.Module:
        """Return the untrained model of a member, the same whenever and wherever it is made."""
        with runtime.forked_seed(self.seeds[member]):
            model = checks.module("make_model(seed)", self.make_model(self.seeds[member]))
            self.probe(model)  # lazy layers draw their weights now
            return model

    def probe(self, model: nn.Module) -> Tensor:
        """Return the logits of the first point; a ValueError says why there are none."""
        like = _like(model)
        one = torch.tensor(self.x[:1], dtype=like.dtype, device=like.device)
        return logits_of_one(model, one, size=len(self.x))

    def answers(self, model: nn.Module, epochs: int) -> Answers:
        """Ask a trained model about all points."""
        some = None if self.eval_x is None else ask(model, self.eval_x, self.queries)
        return Answers(ask(model, self.x, self.queries), some, epochs)


def train_member(plan: Plan, member: int) -> Answers:
    """Train a member with `flatbook.training.fit` and ask it about all points."""
    try:
        model = plan.made(member)
        rows = np.flatnonzero(plan.design[member])
        history = fit(
            model,
            plan.x[rows],
            plan.y[rows],
            plan.configured(member),
            progress=False,
            device=plan.device,
        )
        return plan.answers(model, history.epochs_run)
    except Exception as error:
        error.add_note(f"This was member {member}.")
        raise


def train_member_on_one_thread(plan: Plan, member: int) -> Answers:
    """Do as :func:`train_member` with one torch thread, whose sums always round alike."""
    with _ALONE:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return train_member(plan, member)
        finally:
            torch.set_num_threads(threads)


@torch.no_grad()
def ask(model: nn.Module, x: np.ndarray, queries=None) -> np.ndarray:
    """Return the logits of a model in evaluation mode, a block of inputs at a time.

    Args:
        model: Maps inputs to logits ``(samples, classes)``.
        x: Shape ``(points, ...)``.
        queries: See :func:`asked`.

    Returns:
        In float32. Shape ``(points, classes)``, or ``(points, queries, classes)``.
    """
    like = _like(model)
    pieces = []
    with evaluating(model):
        for start in range(0, len(x), _BLOCK):
            block = torch.tensor(x[start : start + _BLOCK], dtype=like.dtype)
            if queries is None:
                pieces.append(model(block.to(like.device)).float().cpu())
                continue
            views = asked(queries, block, seed=start).to(like.device)
            logits = [model(part) for part in views.flatten(0, 1).split(_BLOCK)]
            pieces.append(torch.cat(logits).float().cpu().unflatten(0, views.shape[:2]))
    return torch.cat(pieces).numpy()


def asked(queries, x: Tensor, *, seed: int = 0) -> Tensor:
    """Return the views of inputs that every model is asked about.

    Args:
        queries: ``"flip"`` for an image and its mirror image; a function that turns inputs
            ``(points, ...)`` into views ``(points, queries, ...)``; or a sequence of functions
            that return one view each, of the shape of the inputs.
        x: Shape ``(points, ...)``.
        seed: Of torch's global generator meanwhile, so that random views are the same for all.

    Returns:
        Shape ``(points, queries, ...)``.

    Raises:
        ValueError: If the views have another shape.

    Example:
        >>> asked([torch.clone, torch.neg], torch.ones(1, 1)).tolist()
        [[[1.0], [-1.0]]]
    """
    if queries == "flip":
        if x.ndim != 4:
            raise ValueError(f'augment="flip" needs images, four axes; got {tuple(x.shape)}.')
        return torch.stack((x, x.flip(3)), dim=1)
    with runtime.forked_seed(seed):
        if callable(queries):
            views = queries(x)
            wanted = f"views of shape (points, queries, {', '.join(map(str, x.shape[1:]))})"
        else:
            views = [one(x) for one in queries]
            wanted = f"views of shape (points, {', '.join(map(str, x.shape[1:]))})"
            if all(isinstance(v, Tensor) and v.shape == x.shape for v in views):
                views = torch.stack(views, dim=1)
    whole = isinstance(views, Tensor) and views.ndim == x.ndim + 1 and views.shape[1] > 0
    if not whole or (len(views), *views.shape[2:]) != tuple(x.shape):
        got = views if isinstance(views, Tensor) else next(iter(views), None)
        got = tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__
        raise ValueError(f"augment must return {wanted}; got {got} for {len(x)} points.")
    return views.to(x.dtype)


def _like(model: nn.Module) -> Tensor:
    """Return a tensor of the precision and the device of a model."""
    return next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
