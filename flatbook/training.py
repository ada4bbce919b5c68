"""One training loop: schedule, mixed precision, progress, checkpoints, and a record of the run."""

import math
import os
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from flatbook import checkpoints, checks, runtime
from flatbook import progress as bars
from flatbook.archives import checksum
from flatbook.augmentation import crop_flip
from flatbook.checkpoints import CheckpointError
from flatbook.config import Adversary, TrainConfig, described, learning_rate
from flatbook.curvature import logits_of_one
from flatbook.models import evaluating
from flatbook.optim import ASAM, GSAM, SAM, LookSAM, MicroBatchSAM

_METHODS = {"sam": SAM, "asam": ASAM, "gsam": GSAM, "looksam": LookSAM, "msam": MicroBatchSAM}


class DivergenceError(RuntimeError):
    """Training broke down: the mean loss or a weight is infinite or not a number.

    Nothing after that would mean anything, so `fit` stops instead of recording it.

    Attributes:
        what: What is not finite.
        epoch: In which epoch, counted from 1.
        lr: The learning rate at its start.
    """

    def __init__(self, what: str, epoch: int, lr: float) -> None:
        super().__init__(what, epoch, lr)  # so that it passes from one process to another
        self.what, self.epoch, self.lr = what, epoch, lr

    def __str__(self) -> str:
        return (
            f"training diverged: {self.what} is not finite in epoch {self.epoch}, which started "
            f"at a learning rate of {self.lr:.3g}; a lower one, or a warm-up, may help."
        )


@dataclass(frozen=True)
class History:
    """What a run measured, one entry per epoch.

    Attributes:
        loss: Mean training loss of the epoch's batches, each before its step, in nats, with
            augmentation and label smoothing.
        accuracy: Share of right answers in the same forward passes.
        eval_loss: Mean loss on ``eval_data`` after the epoch, in nats; empty without.
        eval_accuracy: Share of right answers there; empty without.
        lr: Learning rate of the epoch's first step.
        epoch_seconds: Duration of the epoch, evaluations included.
        stopped_early: Whether training ended because every training sample was right.
    """

    loss: tuple[float, ...] = ()
    accuracy: tuple[float, ...] = ()
    eval_loss: tuple[float, ...] = ()
    eval_accuracy: tuple[float, ...] = ()
    lr: tuple[float, ...] = ()
    epoch_seconds: tuple[float, ...] = ()
    stopped_early: bool = False

    @property
    def epochs_run(self) -> int:
        """Number of epochs trained, those before a resume included."""
        return len(self.loss)

    @property
    def seconds(self) -> float:
        """Duration of all epochs."""
        return sum(self.epoch_seconds)

    def extended(self, **entries: float) -> "History":
        """Return the history with one more epoch."""
        return replace(self, **{name: (*getattr(self, name), v) for name, v in entries.items()})


def make_optimizer(
    model: nn.Module, config: TrainConfig, *, scaler: torch.amp.GradScaler | None = None
) -> Optimizer:
    """Build the optimizer that ``config`` names, over the trainable parameters of ``model``.

    Args:
        model: What to train.
        config: Its ``optimizer``, ``base`` and their hyper-parameters count.
        scaler: Handed to the methods that wrap ``base``.

    Raises:
        ValueError: If no parameter of ``model`` requires a gradient, or ``config`` is none.

    Example:
        >>> config = TrainConfig(optimizer="sam", base="adamw", lr=1e-3)
        >>> type(make_optimizer(nn.Linear(2, 2), config).base_optimizer).__name__
        'AdamW'
    """
    _check_config(config)
    parameters = [p for p in checks.module("model", model).parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("model must have a parameter that requires a gradient; it has none.")
    kind = config.base if config.optimizer in _METHODS else config.optimizer
    common = {"lr": config.lr, "weight_decay": config.weight_decay}
    if kind == "sgd":
        base = torch.optim.SGD(parameters, momentum=config.momentum, **common)
    else:
        base = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind](parameters, **common)
    if config.optimizer not in _METHODS:
        return base
    options = {"rho": config.rho}
    if config.optimizer in ("gsam", "looksam"):
        options["alpha"] = config.alpha
    if config.optimizer == "gsam":
        options["lr_max"] = config.lr
    if config.optimizer == "looksam":
        options["k"] = config.look_every
    given = {name: value for name, value in options.items() if value is not None}
    return _METHODS[config.optimizer](base, model=model, scaler=scaler, **given)


def evaluate(
    model: nn.Module, x: Tensor, y: Tensor, *, batch_size: int = 512
) -> tuple[float, float]:
    """Measure a classifier in evaluation mode.

    Args:
        model: Maps inputs to logits ``(samples, classes)``; its layers keep their modes.
        x: Inputs, tensor or array. Shape ``(samples, ...)``.
        y: Labels, tensor or array. Shape ``(samples,)``.
        batch_size: Samples per forward pass.

    Returns:
        The mean cross-entropy in nats and the share of right answers.

    Raises:
        ValueError: If the data are empty, not finite, or do not fit each other or the model.

    Example:
        >>> model = nn.Linear(2, 2, bias=False)
        >>> with torch.no_grad():
        ...     _ = model.weight.copy_(torch.eye(2))
        >>> evaluate(model, torch.tensor([[0.0, 0.0], [100.0, 0.0]]), torch.tensor([1, 0]))
        (0.3465735912322998, 0.5)
    """
    checks.count("batch_size", batch_size)
    x, y = _checked(model, x, y)
    return _evaluate(model, x, y, batch_size)


def fit(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    config: TrainConfig,
    *,
    eval_data: tuple[Tensor, Tensor] | None = None,
    checkpoint: str | os.PathLike | None = None,
    checkpoint_every: int = 1,
    progress: bool | None = None,
    device: torch.device | str | None = None,
    adversary: Adversary | None = None,
) -> History:
    """Train a classifier with cross-entropy, in place.

    The data go to the device once and stay there. Order, augmentation and dropout follow from
    the seed and the number of the epoch alone, and the global generators are left as they were.
    So a run that was killed at any moment and called again with the same ``checkpoint`` ends
    with the same weights bit for bit, on a CPU with as many threads; on a GPU, if its kernels are
    deterministic.

    Args:
        model: Maps inputs to logits ``(samples, classes)``. Moves to ``device`` and is left in
            evaluation mode.
        x: Inputs, tensor or array; taken in the precision of the model. Shape
            ``(samples, ...)``.
        y: Labels, tensor or array. Shape ``(samples,)``.
        config: The hyper-parameters.
        eval_data: Inputs and labels to evaluate on after every epoch.
        checkpoint: A file to resume from if it exists, and to write. It belongs to this
            configuration, these data and this architecture; any other run is refused. Of a
            finished run it holds the final weights, and `fit` only loads them.
        checkpoint_every: Epochs between writes; the end is always written.
        progress: Whether to show a bar; None decides by where it would appear.
        device: Where to train; None is `flatbook.runtime.device`.
        adversary: Replaces each batch before the step: a function of the model, in evaluation
            mode, the inputs and the labels that returns inputs. With one that calls
            `flatbook.adversarial.pgd`, this is adversarial training. A checkpoint knows it by
            name, a callable dataclass or a `functools.partial` by its options as well.

    Returns:
        The history, epochs before a resume included.

    Raises:
        ValueError: If the data are empty, not finite, or do not fit each other or the model.
        CheckpointError: If ``checkpoint`` is damaged or of another run.
        DivergenceError: If an epoch's mean loss or a weight after it is not finite. The
            checkpoint, if any, is that of an earlier epoch.

    Example:
        >>> x = torch.tensor([[-1.0], [1.0]]).repeat(8, 1)
        >>> y = (x[:, 0] > 0).long()
        >>> config = TrainConfig(epochs=50, batch_size=16, stop_at_interpolation=True)
        >>> history = fit(nn.Linear(1, 2), x, y, config)
        >>> history.stopped_early, history.epochs_run < 50
        (True, True)
    """
    _check_config(config)
    checks.module("model", model)
    checks.count("checkpoint_every", checkpoint_every)
    if adversary is not None and not callable(adversary):
        raise ValueError(
            "adversary must be a function of the model, the inputs and the labels, or None; "
            f"got {adversary!r:.80}."
        )
    model.to(_resolved(device))
    x, y = _checked(model, x, y)
    if config.channels_last:  # not before the first pass, in which lazy layers get their weights
        model.to(memory_format=torch.channels_last)
    if config.augment == "crop-flip" and x.ndim != 4:
        raise ValueError(f'augment="crop-flip" needs images, four axes; got {tuple(x.shape)}.')
    tests = ()
    if eval_data is not None:
        tests = _checked(model, *_pair(eval_data), names=("x of eval_data", "y of eval_data"))
    _refuse_single_samples(model, x, config)
    scaler = torch.amp.GradScaler(x.device.type) if config.precision == "float16" else None
    optimizer = make_optimizer(model, config, scaler=scaler)
    parts = {"model": model, "optimizer": optimizer} | ({"scaler": scaler} if scaler else {})
    history = History()
    if checkpoint is not None:
        identity = config.described() | {
            "adversary": None if adversary is None else described(adversary),
            "data": checksum(*(_wide(t) for t in (x, *tests[:1])), y, *tests[1:]),
            "model": checkpoints.layout(model),
        }
        saved = checkpoints.load(checkpoint, identity)
        if saved is not None:
            history = _restored(checkpoint, saved, parts, config)

    steps = math.ceil(len(x) / config.batch_size)
    with bars.bar(
        config.epochs * steps,
        label=config.optimizer,
        unit="step",
        done=history.epochs_run * steps,
        show=progress,
    ) as bar:
        while history.epochs_run < config.epochs and not history.stopped_early:
            start = time.perf_counter()
            entry = _epoch(
                model, optimizer, x, y, config, history.epochs_run, scaler, bar, adversary
            )
            _show(bar, entry["loss"], entry["accuracy"])
            if tests:
                entry["eval_loss"], entry["eval_accuracy"] = _evaluate(model, *tests)
            done = config.stop_at_interpolation and _evaluate(model, x, y)[1] == 1.0
            entry["epoch_seconds"] = time.perf_counter() - start
            history = replace(history.extended(**entry), stopped_early=done)
            over = done or history.epochs_run == config.epochs
            if checkpoint is not None and (over or history.epochs_run % checkpoint_every == 0):
                state = {name: part.state_dict() for name, part in parts.items()}
                checkpoints.save(checkpoint, identity, state | asdict(history))
    optimizer.zero_grad()
    model.eval()
    return history


@torch.enable_grad()
def _epoch(model, optimizer, x, y, config, epoch, scaler, bar, adversary) -> dict[str, float]:
    """Train for one epoch; return its mean loss, accuracy and first learning rate."""
    order_seed, augment_seed, dropout_seed = epoch_seeds(config.seed, epoch)
    order = torch.randperm(len(x), generator=runtime.generator(order_seed)).to(x.device)
    random = runtime.generator(augment_seed, x.device)
    augment = crop_flip if config.augment == "crop-flip" else config.augment
    losses, hits, sizes = [], [], []
    batches = order.split(config.batch_size)
    model.train()
    with runtime.forked_seed(dropout_seed):
        for number, rows in enumerate(batches):
            lr = learning_rate(config, epoch * len(batches) + number, len(batches))
            for group in optimizer.param_groups:
                group["lr"] = lr
            inputs, labels = x.index_select(0, rows), y.index_select(0, rows)
            if augment is not None:
                inputs = augment(inputs, random)
            if config.channels_last and inputs.ndim == 4:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            if adversary is not None:
                with evaluating(model):
                    attacked = adversary(model, inputs, labels)
                inputs = _as_given(attacked, inputs).detach()
            losses.append(_step(model, optimizer, inputs, labels, config, scaler, hits))
            sizes.append(len(rows))
            if bar.update(1):  # it was redrawn: show how the last batch went, too
                _show(bar, float(losses[-1]), float(hits[-1]) / len(rows))
    loss = np.average(torch.stack(losses).cpu().double().numpy(), weights=sizes)
    start = learning_rate(config, epoch * len(batches), len(batches))
    if not math.isfinite(loss):
        raise DivergenceError("the mean loss", epoch + 1, start)
    if not torch.stack([t.isfinite().all() for t in (*model.parameters(), *model.buffers())]).all():
        raise DivergenceError("a weight or running statistic", epoch + 1, start)
    return {"loss": float(loss), "accuracy": int(torch.stack(hits).sum()) / len(x), "lr": start}


def _as_given(attacked: object, inputs: Tensor) -> Tensor:
    """Return what an adversary made of ``inputs``, if they can take their place."""
    if isinstance(attacked, Tensor):
        if (attacked.shape, attacked.dtype) == (inputs.shape, inputs.dtype):
            return attacked
        got = f"{attacked.dtype} of shape {tuple(attacked.shape)}"
    else:
        got = type(attacked).__name__
    raise ValueError(
        f"adversary must return inputs of the shape it was given, {tuple(inputs.shape)}, in "
        f"{inputs.dtype}, such as the x_adv of an attack; got {got}."
    )


def _step(model, optimizer, inputs, labels, config, scaler, hits) -> Tensor:
    """Take one step; return the loss before it and append the number of right answers."""
    half = None if config.precision == "float32" else getattr(torch, config.precision)
    right = []

    def closure_on(inputs, labels):
        first = True  # methods that look around call it again elsewhere

        def closure():
            nonlocal first
            optimizer.zero_grad()
            with torch.autocast(inputs.device.type, half) if half else nullcontext():
                logits = model(inputs)
            loss = cross_entropy(_wide(logits), labels, label_smoothing=config.label_smoothing)
            if not loss.requires_grad:
                raise ValueError("model must use a trainable parameter; its loss depends on none.")
            (loss if scaler is None else scaler.scale(loss)).backward()
            if first:
                right.append((logits.detach().argmax(dim=1) == labels).sum())
                first = False
            return loss

        return closure

    if isinstance(optimizer, MicroBatchSAM):
        parts = list(
            zip(inputs.split(config.micro_batch), labels.split(config.micro_batch), strict=True)
        )
        closures = [closure_on(*part) for part in parts]
        loss = optimizer.step(closures, weights=[len(part) for _, part in parts])
    elif scaler is not None and not isinstance(optimizer, SAM):
        loss = closure_on(inputs, labels)()
        scaler.step(optimizer)
        scaler.update()
    else:
        loss = optimizer.step(closure_on(inputs, labels))
    hits.append(right[0] if len(right) == 1 else torch.stack(right).sum())
    return loss.detach()


@torch.no_grad()
def _evaluate(model: nn.Module, x: Tensor, y: Tensor, batch_size: int = 512) -> tuple[float, float]:
    losses, hits = [], []
    with evaluating(model):
        for inputs, labels in zip(x.split(batch_size), y.split(batch_size), strict=True):
            logits = model(inputs.clone())  # for it may work in place
            losses.append(cross_entropy(_wide(logits), labels, reduction="sum"))
            hits.append((logits.argmax(dim=1) == labels).sum())
    loss = torch.stack(losses).cpu().double().sum() / len(x)
    return float(loss), int(torch.stack(hits).sum()) / len(x)


def _checked(model, x, y, *, names=("x", "y")) -> tuple[Tensor, Tensor]:
    """Return the data on the device and in the precision of the model, if they fit it."""
    checks.module("model", model)
    axes = max(getattr(x, "ndim", 2), 2)
    x = checks.tensor(names[0], x, ("samples", *["size"] * (axes - 1)))
    like = next((p for p in model.parameters() if p.is_floating_point()), x)
    x = x.detach().to(like.device, like.dtype)
    classes = logits_of_one(model, x[:1], name=names[0], size=len(x)).shape[1]
    return x, checks.labels(names[1], y, classes, samples=len(x)).to(x.device)


def _check_config(config: object) -> None:
    if not isinstance(config, TrainConfig):
        raise ValueError(f"config must be a TrainConfig; got {type(config).__name__}.")


def _refuse_single_samples(model: nn.Module, x: Tensor, config: TrainConfig) -> None:
    """Raise a ValueError if BatchNorm would meet a batch with one number per channel."""
    batches = {min(config.batch_size, len(x)), len(x) % config.batch_size} - {0}
    if config.optimizer == "msam":
        batches = {
            part
            for batch in batches
            for part in (min(config.micro_batch, batch), batch % config.micro_batch)
        }
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    if 1 not in batches or not layers:
        return
    starved = []

    def look(layer: nn.Module, arguments: tuple) -> None:
        if arguments[0].numel() == arguments[0].shape[1]:
            starved.append(layer)

    hooks = [layer.register_forward_pre_hook(look) for layer in layers]
    try:
        logits_of_one(model, x[:1])
    finally:
        for hook in hooks:
            hook.remove()
    if starved:
        sizes = "batch_size and micro_batch" if config.optimizer == "msam" else "batch_size"
        raise ValueError(
            f"{sizes} must not leave a batch of one sample, for which {type(starved[0]).__name__} "
            f"has no variance; got batch_size={config.batch_size} for {len(x)} samples."
        )


def _restored(path, saved: dict, parts: dict, config: TrainConfig) -> History:
    """Load the parts of a run from its checkpoint and return its history, if both are whole."""
    columns = [f.name for f in fields(History) if f.name != "stopped_early"]
    try:
        history = History(
            **{name: tuple(saved[name]) for name in columns}, stopped_early=saved["stopped_early"]
        )
        lengths = {len(getattr(history, name)) for name in columns} - {0}
        numbers = [value for name in columns for value in getattr(history, name)]
        if (
            type(history.stopped_early) is not bool
            or lengths != {history.epochs_run}
            or len(history.lr) != history.epochs_run
            or history.epochs_run > config.epochs
            or not all(isinstance(value, float | int) for value in numbers)
        ):
            raise checkpoints.damaged(path)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    except CheckpointError:
        raise
    except Exception as error:  # each kind of part has its own ways to refuse a state
        raise checkpoints.damaged(path) from error
    return history


def _pair(data) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of a pair or of a split of `flatbook.data`."""
    pair = (data.x, data.y) if hasattr(data, "x") and hasattr(data, "y") else data
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(f"eval_data must be a pair (x, y); got {type(data).__name__}.")
    return pair


def _resolved(device: torch.device | str | None) -> torch.device:
    if device is None:
        return runtime.device()
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise ValueError(
            f"device must name a device of this machine, such as 'cpu'; got {device!r}."
        ) from error


def epoch_seeds(seed: int, epoch: int) -> list[int]:
    """Return independent seeds for the order, the augmentation and dropout of an epoch."""
    return [int(s) for s in np.random.SeedSequence((seed, epoch)).generate_state(3, np.uint64)]


def _show(bar, loss: float, accuracy: float) -> None:
    bar.set_postfix_str(f"loss {loss:.3f}, accuracy {accuracy:.3f}")


def _wide(value: Tensor) -> Tensor:
    """Return ``value`` in single precision at least."""
    return value.to(torch.promote_types(value.dtype, torch.float32))
