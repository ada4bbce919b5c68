"""Adversarial training: how far it widens the basin around clean images, and at what sharpness.

Twins with the same initial weights and order of the data are trained with and without a PGD
attack on every batch, and walked along the same kind of l2 path.
"""

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatbook.adversarial import first_step, pgd, walk
from flatbook.data import load
from flatbook.experiments import Outcome, gather
from flatbook.experiments.robustness import QUARTILES, prepared, quantiles
from flatbook.models import Classifier
from flatbook.runtime import device
from flatbook.sharpness import hessian_trace
from flatbook.training import evaluate, fit
from flatbook.units import units

TWINS = ("clean", "adversarial")
RISE = 0.1
"""The rise of the loss, in nats, that ends a basin."""


@dataclass(frozen=True)
class Config:
    """What the outcome depends on.

    Attributes:
        dataset: A name of ``flatbook.data``.
        n_train: Training images; None takes all.
        n_attack: Test images walked from.
        model: A name of ``flatbook.models``.
        width: Its width; None is the architecture's own.
        epochs: Passes over the training images.
        seeds: Pairs of twins.
        batch_size: Images a step.
        lr: Highest learning rate.
        weight_decay: As in ``TrainConfig``.
        precision: As in ``TrainConfig``; also of the attack while training.
        augment: As in ``TrainConfig``.
        warmup: As in ``TrainConfig``.
    """

    dataset: str
    n_train: int | None
    n_attack: int
    model: str
    width: int | None
    epochs: int
    seeds: int
    batch_size: int = 128
    lr: float = 0.1
    weight_decay: float = 1e-4
    precision: str = "bfloat16"
    augment: str | None = None
    warmup: float = 0.5


CONFIGS = {
    "quick": Config(
        "fashion-mnist", 1000, 100, "small-cnn", 8, epochs=4, seeds=2, precision="float32"
    ),
    "laptop": Config("cifar10", 10_000, 500, "resnet18", 8, epochs=5, seeds=3),
    "gpu": Config("cifar10", None, 2000, "resnet18", None, 100, seeds=1, augment="crop-flip"),
}


def run(config: Config, *, checkpoint=None, progress: bool = False, workers: int = 0) -> Outcome:
    """Train the twins and return their measurements, one list entry a seed."""
    tasks = {
        f"{twin}-{seed}": (config, twin, seed)
        for twin in reversed(TWINS)  # the long ones first
        for seed in range(config.seeds)
    }
    options = {"config": config, "workers": workers, "progress": progress}
    found = units(checkpoint, tasks, measure, label="twins", **options)
    values = {
        twin: gather([found[f"{twin}-{seed}"] for seed in range(config.seeds)]) for twin in TWINS
    }
    data = load(config.dataset, n_train=config.n_train)
    return Outcome(values, seeds=range(config.seeds), data={data.name: data.checksum})


@dataclass(frozen=True)
class Adversary:
    """The attack on a batch: PGD in linf from a random start, 10 steps of 2/255 within 8/255."""

    precision: str
    epsilon: float = 8 / 255
    step_size: float = 2 / 255
    steps: int = 10

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Return the attacked batch."""
        half = self.precision != "float32"
        kind = getattr(torch, self.precision)
        with torch.autocast(x.device.type, kind) if half else contextlib.nullcontext():
            return pgd(
                model,
                x,
                y,
                norm="linf",
                epsilon=self.epsilon,
                step_size=self.step_size,
                steps=self.steps,
                random_start=True,
            ).x_adv


def measure(task) -> dict:
    """Train one twin and return its accuracy, the width of its basins and its curvature."""
    config, twin, seed = task
    data = load(config.dataset, n_train=config.n_train)
    model, settings = prepared(config, data, config.model, config.width, config.epochs, seed)
    adversary = Adversary(config.precision) if twin == "adversarial" else None
    fit(model, data.train.x, data.train.y, settings, adversary=adversary, progress=False)
    model.eval()
    train_accuracy = evaluate(model, data.train.x[:5000], data.train.y[:5000])[1]
    test_loss, test_accuracy = evaluate(model, data.test.x, data.test.y)
    x, y = data.test.x[: config.n_attack].to(device()), data.test.y[: config.n_attack].to(device())
    strong = {"norm": "linf", "epsilon": 8 / 255, "step_size": 2 / 255, "steps": 10}
    x_adv = pgd(model, x, y, **strong).x_adv
    return {
        "train_accuracy": train_accuracy,
        "test_accuracy": test_accuracy,
        "test_loss": test_loss,
        "robust_accuracy": evaluate(model, x_adv, y)[1],
    } | basin(model, x, y)


def basin(model: Classifier, x: Tensor, y: Tensor) -> dict:
    """Walk an l2 attack of 50 steps of 0.01 from each input that is classified right.

    The width of a basin is the number of steps until the loss has risen by ``RISE``; a path that
    never rises so far counts as one step longer than the walk.
    """
    l2 = {"norm": "l2", "epsilon": 0.5, "step_size": 0.01, "steps": 50}
    path = pgd(model, x, y, record=True, **l2).path
    seen = walk(model, path, y)
    right = seen.right[0]
    rise = (seen.loss - seen.loss[0])[:, right].double()
    width = first_step(rise > RISE)
    flip = seen.flipped[right]
    beyond = len(path)
    with torch.no_grad():
        features = model.features(x)
        trace = hessian_trace(features, model.head(features))
    return {
        "basin_width": quantiles(torch.where(width < 0, beyond, width), QUARTILES),
        "basin_beyond": (width < 0).double().mean().item(),
        "flip_step": quantiles(torch.where(flip < 0, beyond, flip), QUARTILES),
        "flip_beyond": (flip < 0).double().mean().item(),
        "trace": quantiles(trace, QUARTILES),
        "mean_trace": trace.double().mean().item(),
        "mean_sharpness": seen.sharpness[0].double().mean().item(),
        "doubt": quantiles(seen.doubt[0], QUARTILES),
        "rise_by_step": [quantiles(row, QUARTILES) for row in rise],
        "sharpness_by_step": [quantiles(row[right], QUARTILES) for row in seen.sharpness],
        "accuracy_by_step": [row.double().mean().item() for row in seen.right],
    }
