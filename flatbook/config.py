"""Hyper-parameters of a training run, and the learning rate they imply."""

import functools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from flatbook import checks

BaseName = Literal["sgd", "adam", "adamw"]
OptimizerName = Literal["sgd", "adam", "adamw", "sam", "asam", "gsam", "looksam", "msam"]
Schedule = Literal["cosine", "constant"]
Precision = Literal["float32", "bfloat16", "float16"]
Augment = Callable[[Tensor, torch.Generator], Tensor]
Adversary = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class TrainConfig:
    """Hyper-parameters of a training run, all in one place.

    Attributes:
        epochs: Passes over the training data.
        batch_size: Samples per step; the last batch of an epoch may be smaller.
        optimizer: ``sgd``, ``adam`` and ``adamw`` are torch's; the others wrap ``base``:
            ``sam``, ``asam``, ``gsam``, ``looksam`` and ``msam`` (micro-batch SAM).
        base: The optimizer inside those others.
        lr: Highest learning rate, in weight per unit of gradient (``sgd``) or per step (Adam).
        momentum: Of ``sgd``: share of the last direction kept, 0 to below 1.
        weight_decay: L2 penalty in gradient per weight; decoupled in ``adamw``.
        rho: Radius of the ascent in units of the weights, relative to them for ``asam``; None is
            the default of the method.
        alpha: Weight of the orthogonal direction in ``gsam`` and ``looksam``; None is theirs.
        look_every: Steps from one ascent of ``looksam`` to the next.
        micro_batch: Samples per micro-batch of ``msam``.
        schedule: ``cosine`` lowers the learning rate step by step to 0; ``constant`` does not.
        warmup: Epochs in which the learning rate first rises from 0; fractions count.
        precision: Of the forward pass. Weights stay as they are; ``float16`` scales the loss.
        channels_last: Whether images lie channels last in memory, which suits GPUs.
        augment: ``"crop-flip"`` shifts by up to 4 pixels and mirrors, or a function of a batch
            and a generator on its device that returns a batch; None leaves inputs alone.
        label_smoothing: Share of the target spread evenly over all classes, 0 to below 1.
        stop_at_interpolation: Stop after the first epoch at whose end the model, in evaluation
            mode and without augmentation, gets every training sample right.
        seed: Of the data order, the augmentation and dropout; not of the initial weights.

    Raises:
        ValueError: If a value is out of range.

    Example:
        >>> TrainConfig(optimizer="looksam", rho=0.1).base
        'sgd'
    """

    epochs: int = 10
    batch_size: int = 128
    optimizer: OptimizerName = "sgd"
    base: BaseName = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    rho: float | None = None
    alpha: float | None = None
    look_every: int = 5
    micro_batch: int = 32
    schedule: Schedule = "cosine"
    warmup: float = 0.0
    precision: Precision = "float32"
    channels_last: bool = False
    augment: Literal["crop-flip"] | Augment | None = None
    label_smoothing: float = 0.0
    stop_at_interpolation: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        def check(name, test, *arguments, **options):
            # Stored as Python's own numbers, whatever came, so that checkpoints compare and load.
            value = test(name, getattr(self, name), *arguments, **options)
            object.__setattr__(self, name, value)

        for name in ("epochs", "batch_size", "look_every", "micro_batch"):
            check(name, checks.count)
        check("seed", checks.count, at_least=0)
        check("optimizer", checks.choice, get_args(OptimizerName))
        check("base", checks.choice, get_args(BaseName))
        check("schedule", checks.choice, get_args(Schedule))
        check("precision", checks.choice, get_args(Precision))
        check("lr", checks.positive)
        check("weight_decay", checks.non_negative)
        check("warmup", checks.non_negative)
        if self.warmup > self.epochs:
            raise ValueError(f"warmup must be at most epochs, {self.epochs}; got {self.warmup}.")
        for name in ("momentum", "label_smoothing"):
            check(name, checks.fraction)
            if getattr(self, name) == 1:
                raise ValueError(f"{name} must be below 1; got 1.")
        if self.rho is not None:
            check("rho", checks.positive)
        if self.alpha is not None:
            check("alpha", checks.non_negative)
        for name in ("channels_last", "stop_at_interpolation"):
            check(name, checks.flag)
        if self.augment is not None and not callable(self.augment):
            check("augment", checks.choice, ("crop-flip",))

    def described(self) -> dict[str, int | float | str | bool | None]:
        """Return the fields as plain values; a function goes by its module and name."""
        plain = asdict(replace(self, augment=None))
        plain["augment"] = described(self.augment) if callable(self.augment) else self.augment
        return plain


def described(function: Callable) -> str:
    """Return the module and name of a function, by which checkpoints know it.

    A dataclass that can be called is known by its fields, too, and a `functools.partial` by its
    arguments.

    Example:
        >>> described(math.hypot)
        'math.hypot'
        >>> described(functools.partial(math.hypot, 3.0))
        'math.hypot(3.0)'
    """
    if isinstance(function, functools.partial):
        options = [*map(_option, function.args)]
        options += [f"{name}={_option(value)}" for name, value in function.keywords.items()]
        return f"{described(function.func)}({', '.join(options)})"
    name = getattr(function, "__qualname__", None)
    if name is None:
        name = repr(function) if is_dataclass(function) else type(function).__qualname__
    return f"{getattr(function, '__module__', '')}.{name}"


def _option(value: object) -> str:
    """Return how a value is written, if it is the same in every process; else its type."""
    plain = value is None or isinstance(value, bool | int | float | str | tuple | list)
    return repr(value) if plain else described(value) if callable(value) else type(value).__name__


def learning_rate(config: TrainConfig, step: int, steps_per_epoch: int) -> float:
    """Return the learning rate of a step, counted from 0 over the whole run.

    It rises linearly for ``config.warmup`` epochs to ``config.lr``, then falls to 0 along half a
    cosine, or stays.

    Example:
        >>> config = TrainConfig(epochs=10, lr=1.0, warmup=2)
        >>> [learning_rate(config, step, 1) for step in (0, 1, 2, 6)]
        [0.5, 1.0, 1.0, 0.5]
    """
    rise = config.warmup * steps_per_epoch
    if step < rise:
        return config.lr * min(1.0, (step + 1) / rise)
    if config.schedule == "constant":
        return config.lr
    gone = (step - rise) / (config.epochs * steps_per_epoch - rise)
    return config.lr * (1 + math.cos(math.pi * gone)) / 2
