"""Many models trained on known subsets of the same points, and what they answer about all."""

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import joblib
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flatbook import checks, crews, keeping, runtime
from flatbook import progress as bars
from flatbook.arrays import flags_array
from flatbook.config import TrainConfig
from flatbook.designs import balanced_design, subset_design
from flatbook.members import Answers, Plan, asked
from flatbook.vectorised import obstacle

__all__ = ["Backend", "Ensemble", "balanced_design", "subset_design", "train_ensemble"]

Backend = Literal["auto", "loop", "joblib", "vmap", "dask"]

# On a CPU: weights of models so small that vmap beats two processes, as measured; and how many
# floating-point operations one core makes in the time of a step's overhead, and while processes
# start.
_FEW_WEIGHTS = 30_000
_PER_STEP = 2e7
_START_UP = 1e11


@dataclass(frozen=True, eq=False)
class Ensemble:
    """What an ensemble answered; tensors on the CPU, logits in float32.

    Attributes:
        logits: On all points. Shape ``(models, points, classes)``, or
            ``(models, points, queries, classes)``.
        eval_logits: On the evaluation points, in the same order of axes; None without.
        design: Which model was trained on which point, booleans. Shape ``(models, points)``.
        seeds: The seed of each model: of its weights, data order and augmentation.
        epochs: How many epochs each was trained for.
        backend: The one that trained them.
    """

    logits: Tensor
    eval_logits: Tensor | None
    design: Tensor
    seeds: tuple[int, ...]
    epochs: tuple[int, ...]
    backend: str


def train_ensemble(
    make_model: Callable[[int], nn.Module],
    x: Tensor,
    y: Tensor,
    design,
    config: TrainConfig,
    *,
    eval_x: Tensor | None = None,
    backend: Backend = "auto",
    cluster=None,
    augment: Literal["flip"] | Callable | Sequence[Callable] | None = None,
    out: str | os.PathLike | None = None,
    workers: int | None = None,
    progress: bool | None = None,
) -> Ensemble:
    r"""Train a model for each row of a design and ask each about all points.

    Each model has a seed of its own, drawn from ``config.seed`` and its number. Within a backend
    the logits are the same bit for bit, however many processes there are and however often the
    work was interrupted; between backends they agree up to rounding, which training amplifies.

    ========== ==================================================================================
    backend    trains
    ========== ==================================================================================
    ``loop``   here, one model after another, with the threads torch has
    ``joblib`` in processes of one torch thread each, images channels last
    ``vmap``   64 models at once: plain SGD, without batch norm, dropout or augmentation
    ``dask``   on a Dask cluster, one model at a time in each process, as ``joblib`` does
    ``auto``   with ``dask`` if there is a cluster; with ``vmap`` where it can, on a GPU or without
               convolutions and with few weights; else on a CPU with ``joblib`` if that saves more
               than processes take to start; else with ``loop``
    ========== ==================================================================================

    Memory: besides the data, the logits, 4 · models · (points + evaluated) · queries · classes
    bytes, once; and those of one model in every process, with its share of the data.

    Args:
        make_model: Returns a new model, given a seed; a lambda will do. torch's global generators
            are seeded meanwhile, so it may draw from them.
        x: Inputs, tensor or array. Shape ``(points, ...)``.
        y: Labels, tensor or array. Shape ``(points,)``.
        design: Which model is trained on which point, from :func:`balanced_design`, say. Shape
            ``(models, points)``.
        config: The hyper-parameters of all, see `flatbook.training.fit`.
        eval_x: Inputs of further points to ask about. Shape ``(evaluated, ...)``.
        backend: See the table.
        cluster: For ``dask``: the address of a scheduler, such as ``"tcp://10.0.0.1:8786"``, or
            a Dask cluster or client.
        augment: Ask about several views of each point: ``"flip"`` for an image and its mirror
            image; a function that turns inputs ``(points, ...)`` into views
            ``(points, queries, ...)``; or a sequence of functions that return one view each. This
            is not the augmentation of training, which is ``config.augment``.
        out: A folder that takes each model's logits, in a file of its own, as soon as it is
            trained. After a kill at any moment the same call trains only what is missing; a call
            for another ensemble is refused. With ``vmap``, 64 models are finished at a time.
        workers: How many processes ``joblib`` starts; None is one for each processor.
        progress: Whether to show a bar; None decides by where it would appear.

    Returns:
        The logits.

    Raises:
        ValueError: If the data, the design and the model do not fit each other, a row of the
            design is empty, or the backend cannot do what is asked.
        CheckpointError: If ``out`` holds logits of another ensemble, or damaged ones.
        DivergenceError: If a model's loss or a weight is not finite; a note says which model's.
        ImportError: If ``dask`` is asked for and not installed.
        RuntimeError: If a worker process dies; with ``dask``, if several do over the same model.
        OSError: If no scheduler answers at ``cluster``, or it is lost. Nothing is asked of it if
            ``out`` holds all members.

    Example:
        The label of the last point can only be remembered, and the second model never saw it.

        >>> x, y = torch.eye(4), torch.tensor([0, 0, 0, 1])
        >>> design = np.array([[1, 1, 1, 1], [1, 1, 1, 0]])
        >>> config = TrainConfig(epochs=60, batch_size=4)
        >>> fitted = train_ensemble(lambda seed: nn.Linear(4, 2), x, y, design, config)
        >>> fitted.logits.argmax(2)
        tensor([[0, 0, 0, 1],
                [0, 0, 0, 0]])
    """
    checks.choice("backend", backend, get_args(Backend))
    workers = joblib.cpu_count() if workers is None else checks.count("workers", workers)
    plan, model, shape = _planned(make_model, x, y, design, config, eval_x, augment)
    backend = _chosen(backend, cluster, model, plan, workers)
    if backend in ("joblib", "dask") and _convolves(model):
        plan = replace(plan, config=replace(config, channels_last=True))
    models, points = plan.design.shape
    logits = torch.empty(models, points, *shape)
    evaluated = None if eval_x is None else torch.empty(models, len(plan.eval_x), *shape)
    epochs = [0] * models

    def keep(member: int, answers: Answers) -> None:
        logits[member] = torch.from_numpy(answers.logits)
        if evaluated is not None:
            evaluated[member] = torch.from_numpy(answers.eval_logits)
        epochs[member] = answers.epochs

    missing = set(range(models))
    if out is not None:
        whose = keeping.identity(plan, model, backend)
        for member, answers in keeping.finished(Path(out), whose):
            keep(member, answers)
            missing.remove(member)
    length = config.epochs  # the bar counts epochs, for vmap finishes models all at once
    done = (models - len(missing)) * length
    label = f"{models} models ({backend})"
    with bars.bar(models * length, label=label, unit="epoch", done=done, show=progress) as bar:
        outcomes = _trained(plan, sorted(missing), backend, cluster, workers, bar.update)
        with closing(outcomes):
            for member, answers in outcomes:
                if out is not None:
                    keeping.keep(Path(out), whose, member, answers)
                keep(member, answers)
                bar.update(0 if backend == "vmap" else length)
    included = torch.from_numpy(plan.design)
    return Ensemble(logits, evaluated, included, plan.seeds, tuple(epochs), backend)


def _planned(make_model, x, y, design, config, eval_x, augment):
    """Return the plan, the untrained first model and the shape of its answers to a point."""
    if not isinstance(config, TrainConfig):
        raise ValueError(f"config must be a TrainConfig; got {type(config).__name__}.")
    if not callable(make_model) or isinstance(make_model, nn.Module):
        raise ValueError(
            "make_model must be a function of a seed that returns a model; "
            f"got {type(make_model).__name__}."
        )
    x = _inputs("x", x)
    included = flags_array("design", design, ("models", len(x)))
    sizes = included.sum(axis=1)
    if not sizes.all():
        raise ValueError(
            f"design must give each model a point to train on; model {sizes.argmin()} has none."
        )
    seeds = tuple(
        int(np.random.SeedSequence((config.seed, member)).generate_state(1)[0])
        for member in range(len(included))
    )
    plan = Plan(
        make_model, x.numpy(), None, included, seeds, config, None, augment, str(runtime.device())
    )
    model = plan.made(0)
    classes = plan.probe(model).shape[1]
    plan = replace(plan, y=checks.labels("y", y, classes, samples=len(x)).cpu().numpy())
    if eval_x is not None:
        eval_x = _inputs("eval_x", eval_x)
        if eval_x.shape[1:] != x.shape[1:]:
            raise ValueError(
                f"eval_x must hold inputs like x, {tuple(x.shape[1:])} each; "
                f"got {tuple(eval_x.shape[1:])}."
            )
        plan = replace(plan, eval_x=eval_x.numpy())
    if augment is None:
        return plan, model, (classes,)
    if isinstance(augment, str):
        checks.choice("augment", augment, ("flip",))
    elif not callable(augment) and not (
        isinstance(augment, Sequence) and augment and all(map(callable, augment))
    ):
        raise ValueError(
            "augment must be 'flip', a function of inputs, or a sequence of such; "
            f"got {augment!r:.60}."
        )
    return plan, model, (asked(augment, x[:2]).shape[1], classes)


def _inputs(name: str, value) -> Tensor:
    axes = max(getattr(value, "ndim", 2), 2)
    value = checks.tensor(name, value, ("samples", *["size"] * (axes - 1))).detach().cpu()
    return value.float() if value.dtype == torch.bfloat16 else value  # which NumPy lacks


def _chosen(backend: str, cluster, model: nn.Module, plan: Plan, workers: int) -> str:
    """Return the backend to use, after checking that it can be."""
    hindrance = obstacle(model, plan.config)
    if backend == "vmap" and hindrance is not None:
        raise ValueError(f'backend="vmap" cannot train models at once with {hindrance}.')
    if backend == "dask" and cluster is None:
        raise ValueError(
            'cluster must be the address of a Dask scheduler, such as "tcp://10.0.0.1:8786", for '
            'backend="dask"; got None.'
        )
    if cluster is not None and backend not in ("auto", "dask"):
        raise ValueError(f'cluster is for backend="dask"; got backend={backend!r}.')
    if backend != "auto":
        return backend
    if cluster is not None:
        return "dask"
    if plan.device != "cpu":
        return "loop" if hindrance else "vmap"
    weights = sum(p.numel() for p in model.parameters())
    if hindrance is None and weights < _FEW_WEIGHTS and not _convolves(model):
        return "vmap"
    with FlopCounterMode(display=False) as counter:
        plan.probe(model)
    sizes = plan.design.sum(axis=1)
    steps = np.ceil(sizes / plan.config.batch_size).sum()
    passes = 3 * counter.get_total_flops() * sizes.sum()  # forward, and twice that backward
    work = plan.config.epochs * (passes + _PER_STEP * steps)
    saved = work * (1 - 1 / min(workers, len(sizes)))
    return "joblib" if saved > _START_UP else "loop"


def _convolves(model: nn.Module) -> bool:
    return any(isinstance(layer, nn.Conv2d) for layer in model.modules())


def _trained(plan, members, backend, cluster, workers, tick) -> crews.Outcomes:
    if backend == "vmap":
        return crews.at_once(plan, members, tick)
    if backend == "loop" or not members:
        return crews.in_turn(plan, members)
    if backend == "dask":
        return crews.by_dask(replace(plan, device=None), members, cluster)
    return crews.by_joblib(plan, members, min(workers, len(members)))
