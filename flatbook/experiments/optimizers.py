"""The family of sharpness-aware optimizers on real images: accuracy, flatness and cost.

Every method gets the same number of configurations to choose from (the learning rate for SGD, the
radius at SGD's learning rate for the others), judged on held-out training images with seeds that
are not used again. The chosen configuration is then trained on all training images, from the same
initial weights and in the same order of the data for every method.
"""

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flatbook.data import Dataset, load
from flatbook.experiments import Outcome, gather
from flatbook.landscape import loss_landscape
from flatbook.models import Classifier, build
from flatbook.runtime import device
from flatbook.sharpness import (
    doubt,
    full_trace,
    hessian_trace,
    relative_sharpness,
    top_eigenvalue,
)
from flatbook.training import TrainConfig, evaluate, fit
from flatbook.units import units

METHODS = ("SGD", "SAM", "ASAM", "GSAM", "LookSAM", "m-SAM")
"""Names of the methods in the record."""

_OPTIMIZER = {name: name.lower().replace("-", "") for name in METHODS}
_MEASURED = 2000  # training images on which flatness is measured


@dataclass(frozen=True)
class Config:
    """What the outcome depends on.

    Attributes:
        dataset: A name of ``flatbook.data``.
        n_train: Training images.
        n_test: Test images.
        model: A name of ``flatbook.models``.
        width: Its width.
        epochs: Passes over the training images.
        batch_size: Images a step.
        micro_batch: Images that share an ascent step in m-SAM.
        lrs: Learning rates that SGD may choose from.
        radii: Radii that SAM, GSAM, LookSAM and m-SAM may choose from.
        adaptive_radii: Radii that ASAM may choose from.
        tuning_seeds: Seeds a configuration is judged on.
        seeds: Seeds of the comparison.
        probes: Random probes for the trace of the whole network.
        precision: As in ``TrainConfig``.
        augment: As in ``TrainConfig``.
    """

    dataset: str
    n_train: int
    n_test: int
    model: str
    width: int
    epochs: int
    seeds: int
    tuning_seeds: int = 2
    batch_size: int = 64
    micro_batch: int = 16
    lrs: tuple[float, ...] = (0.05, 0.1, 0.2)
    radii: tuple[float, ...] = (0.05, 0.1, 0.2)
    adaptive_radii: tuple[float, ...] = (0.25, 0.5, 1.0)
    probes: int = 100
    precision: str = "float32"
    augment: str | None = None


CONFIGS = {
    "quick": Config(
        "fashion-mnist", 1000, 500, "small-cnn", 8, epochs=8, seeds=2, tuning_seeds=1, probes=20
    ),
    "laptop": Config("fashion-mnist", 4_000, 2_000, "small-cnn", 16, epochs=40, seeds=6),
    "gpu": Config(
        "cifar10",
        50_000,
        10_000,
        "resnet18",
        64,
        epochs=100,
        seeds=5,
        batch_size=128,
        precision="bfloat16",
        augment="crop-flip",
    ),
}


def run(config: Config, *, checkpoint=None, progress: bool = False, workers: int = 0) -> Outcome:
    """Tune every method, compare them over the seeds, and return the measurements by method."""
    options = {"config": config, "workers": workers, "progress": progress}

    def best(method: str, candidates: list[TrainConfig]) -> tuple[TrainConfig, list[float]]:
        seeds = range(1000, 1000 + config.tuning_seeds)
        tasks = {
            f"tune-{method}-{i}-{seed}": (config, replace(candidate, seed=seed))
            for i, candidate in enumerate(candidates)
            for seed in seeds
        }
        scores = units(checkpoint, tasks, judge, label=f"tuning {method}", **options)
        table = torch.tensor(list(scores.values())).reshape(len(candidates), len(seeds)).mean(1)
        return candidates[int(table.argmax())], table.tolist()

    plain = TrainConfig(
        epochs=config.epochs,
        batch_size=config.batch_size,
        optimizer="sgd",
        momentum=0.9,
        weight_decay=5e-4,
        precision=config.precision,
        augment=config.augment,
        micro_batch=config.micro_batch,
    )
    chosen, tuning = {}, {}
    chosen["SGD"], tuning["SGD"] = best("SGD", [replace(plain, lr=lr) for lr in config.lrs])
    for method in METHODS[1:]:
        radii = config.adaptive_radii if method == "ASAM" else config.radii
        wrapped = replace(chosen["SGD"], optimizer=_OPTIMIZER[method])
        chosen[method], tuning[method] = best(method, [replace(wrapped, rho=r) for r in radii])

    tasks = {
        f"run-{method}-{seed}": (config, replace(chosen[method], seed=seed))
        for seed in range(config.seeds)
        for method in METHODS
    }
    runs = units(checkpoint, tasks, measure, label="comparison", **options)
    values = {
        method: gather([runs[f"run-{method}-{seed}"] for seed in range(config.seeds)])
        | {
            "chosen": {"lr": chosen[method].lr, "rho": chosen[method].rho},
            "validation_accuracy": tuning[method],
        }
        for method in METHODS
    }
    data = _data(config)
    return Outcome({"methods": values}, seeds=range(config.seeds), data={data.name: data.checksum})


def _data(config: Config) -> Dataset:
    return load(config.dataset, n_train=config.n_train, n_test=config.n_test)


def _train(config: Config, settings: TrainConfig, x: Tensor, y: Tensor, classes: int) -> Classifier:
    model = build(
        config.model,
        num_classes=classes,
        in_channels=x.shape[1],
        width=config.width,
        seed=settings.seed,
    ).to(device())
    fit(model, x, y, settings, progress=False)
    return model.eval()


def judge(task) -> float:
    """Return a configuration's accuracy on a fifth of the training images, held out."""
    config, settings = task
    data = _data(config)
    held = torch.arange(len(data.train.x)) % 5 == 0
    model = _train(config, settings, data.train.x[~held], data.train.y[~held], data.num_classes)
    return evaluate(model, data.train.x[held], data.train.y[held])[1]


def measure(task) -> dict:
    """Train once and return accuracy, loss, flatness, cost and a slice of the landscape."""
    config, settings = task
    data = _data(config)
    start = time.process_time()
    model = _train(config, settings, data.train.x, data.train.y, data.num_classes)
    seconds = time.process_time() - start
    train_loss, train_accuracy = evaluate(model, data.train.x, data.train.y)
    test_loss, test_accuracy = evaluate(model, data.test.x, data.test.y)
    x, y = data.train.x[:_MEASURED].to(device()), data.train.y[:_MEASURED].to(device())
    trace = full_trace(model, x, y, probes=config.probes, seed=settings.seed)
    landscape = loss_landscape(model, x, y, steps=21, span=1.0, seed=settings.seed)
    return {
        "train_accuracy": train_accuracy,
        "test_accuracy": test_accuracy,
        "train_loss": train_loss,
        "test_loss": test_loss,
        "full_trace": trace.value,
        "full_trace_error": trace.standard_error,
        "top_eigenvalue": top_eigenvalue(model, x, y, seed=settings.seed).value,
        "cpu_seconds": seconds,
        "landscape": {"alphas": landscape.alphas.tolist(), "loss": landscape.loss.tolist()},
    } | flatness(model, x)


@torch.no_grad()
def flatness(model: Classifier, x: Tensor) -> dict[str, float]:
    """Return the mean of each measure of the last layer over the inputs."""
    features = model.features(x)
    logits, weight = model.head(features), model.head.weight
    trace = hessian_trace(features, logits).mean().item()
    return {
        "last_layer_trace": trace,
        "kappa": relative_sharpness(weight, features, logits).mean().item(),
        "kappa_frobenius": relative_sharpness(weight, features, logits, kind="frobenius")
        .mean()
        .item(),
        "norm_trace": weight.norm().item() * trace,
        "doubt": doubt(logits).mean().item(),
    }
