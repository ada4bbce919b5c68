"""Attacks on trained classifiers: sharpness along the path, scaled heads, masking, certificates.

Each network is trained once, in a unit of its own that leaves its weights beside the results; the
measurements are further units that load them.
"""

import functools
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flatbook.adversarial import (
    Walk,
    auto_attack,
    detect,
    pgd,
    random_search,
    saturated,
    scaled,
    walk,
    zero_gradient_share,
)
from flatbook.data import Dataset, load
from flatbook.experiments import Outcome, gather
from flatbook.models import Classifier, build
from flatbook.registry import SETS
from flatbook.runtime import device
from flatbook.sharpness import relative_sharpness, sharpness_of
from flatbook.training import TrainConfig, evaluate, fit
from flatbook.units import units

QUARTILES = (0.25, 0.5, 0.75)
SPREAD = (0.05, 0.25, 0.5, 0.75, 0.95)
OFFSETS = tuple(range(-6, 13))
"""Steps before and after the first wrong prediction, at which aligned curves are recorded."""

STOPS = (1, 2, 3, 5, 10, 20, 40)
"""Steps of the attack after which detection is measured, as far as the path goes."""


@dataclass(frozen=True)
class Network:
    """An architecture and how it is trained.

    Attributes:
        model: A name of ``flatbook.models``.
        width: Its width; None is the architecture's own.
        epochs: Passes over the training images of each data set.
    """

    model: str
    width: int | None
    epochs: dict[str, int]


@dataclass(frozen=True)
class Config:
    """What the outcome depends on.

    Attributes:
        datasets: Names of ``flatbook.data``. On the first, the headline, everything is measured;
            on the others half of the linf path alone.
        networks: The first is the headline: heads are scaled and gradients unmasked on it.
        n_train: Training images at most.
        n_attack: Test images that are attacked.
        n_slow: Test images for float64 and random search.
        n_referee: Test images for AutoAttack; 0 leaves it out.
        seeds: Networks of each kind.
        path_steps: Steps of the linf path.
        scales: Factors of the head in the weak attack.
        masks: Factors of the head in the strong attack.
        queries: Of the random search.
        lr: Highest learning rate.
        batch_size: Images a step.
        weight_decay: As in ``TrainConfig``.
        precision: As in ``TrainConfig``.
        augment: As in ``TrainConfig``.
        warmup: As in ``TrainConfig``.
    """

    datasets: tuple[str, ...]
    networks: tuple[Network, ...]
    n_train: int | None
    n_attack: int
    n_slow: int
    n_referee: int
    seeds: int
    path_steps: int = 40
    scales: tuple[float, ...] = (0.25, 0.5, 1, 2.5, 5, 10, 50)
    masks: tuple[float, ...] = (1, 3, 10, 30, 100)
    queries: int = 100
    lr: float = 0.1
    batch_size: int = 128
    weight_decay: float = 1e-4
    precision: str = "bfloat16"
    augment: str | None = None
    warmup: float = 0.5


def _networks(cifar10: dict, cifar100: dict, widths: dict) -> tuple[Network, ...]:
    return tuple(
        Network(name, widths[name], {"cifar10": cifar10[name], "cifar100-subset": cifar100[name]})
        for name in cifar10
    )


_FULL = ("resnet18", "wrn28-4", "densenet121", "vgg11-bn")
CONFIGS = {
    "quick": Config(
        ("fashion-mnist",),
        (Network("small-cnn", 8, {"fashion-mnist": 15}),),
        2000,
        n_attack=100,
        n_slow=50,
        n_referee=0,
        seeds=2,
        path_steps=20,
        masks=(1, 100),
        precision="float32",
    ),
    "laptop": Config(
        ("cifar10", "cifar100-subset"),
        _networks(
            {"resnet18": 5, "wrn28-4": 4, "densenet121": 2, "vgg11-bn": 4},
            {"resnet18": 3, "wrn28-4": 2, "densenet121": 1, "vgg11-bn": 3},
            {"resnet18": 16, "wrn28-4": 8, "densenet121": 4, "vgg11-bn": 32},
        ),
        20_000,
        n_attack=500,
        n_slow=200,
        n_referee=50,
        seeds=3,
        masks=(1, 10, 100),
    ),
    "gpu": Config(
        ("cifar10", "cifar100"),
        tuple(Network(name, None, {"cifar10": 100, "cifar100": 100}) for name in _FULL),
        None,
        n_attack=2000,
        n_slow=1000,
        n_referee=1000,
        seeds=1,
        augment="crop-flip",
        warmup=0.0,
    ),
}


def run(config: Config, *, checkpoint=None, progress: bool = False, workers: int = 0) -> Outcome:
    """Train every network, attack it, and return the measurements by data set and network."""
    if config.n_referee:
        import pyautoattack  # noqa: F401 -- fail now rather than after an hour
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(checkpoint or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        options = {"config": config, "workers": workers, "progress": progress}
        seeds = range(config.seeds)

        def stage(name: str, work, datasets, networks) -> dict[str, dict[str, dict]]:
            tasks = {
                f"{name}-{dataset}-{network.model}-{seed}": (config, dataset, network, seed, folder)
                for dataset in datasets
                for seed in seeds
                for network in networks
            }
            found = units(checkpoint, tasks, work, label=name, **options)
            return {
                dataset: {
                    network.model: gather(
                        [found[f"{name}-{dataset}-{network.model}-{seed}"] for seed in seeds]
                    )
                    for network in networks
                }
                for dataset in datasets
            }

        first, headline = config.datasets[:1], config.networks[:1]
        # The order is that of need: what most chapters read comes first.
        values = {
            "training": stage("train", train, first, config.networks),
            "scaling": stage("scale", scale_head, first, headline),
            "masking": stage("mask", unmask, first, headline),
            "paths": stage("walk", follow, first, config.networks),
            "certificates": stage("certify", certify, first, config.networks),
        }
        if config.n_referee:
            values["referee"] = stage("referee", judge, first, headline)
        if config.datasets[1:]:
            values["training"] |= stage("train", train, config.datasets[1:], config.networks)
            values["paths"] |= stage("walk", follow, config.datasets[1:], config.networks)
    data = [_data(config, dataset) for dataset in config.datasets]
    return Outcome(values, seeds=seeds, data={d.name: d.checksum for d in data})


def _data(config: Config, dataset: str) -> Dataset:
    most, _ = SETS[dataset].sizes
    return _loaded(dataset, config.n_train and min(config.n_train, most))


@functools.lru_cache(1)
def _loaded(dataset: str, n_train: int | None) -> Dataset:
    return load(dataset, n_train=n_train)


def prepared(
    config, data: Dataset, name: str, width: int | None, epochs: int, seed: int
) -> tuple[Classifier, TrainConfig]:
    """Return a fresh network and how to train it; both follow from the seed."""
    settings = TrainConfig(
        epochs=epochs,
        batch_size=config.batch_size,
        lr=config.lr,
        weight_decay=config.weight_decay,
        warmup=config.warmup,
        precision=config.precision,
        channels_last=True,
        augment=config.augment,
        seed=seed,
    )
    model = build(
        name,
        num_classes=data.num_classes,
        in_channels=data.train.x.shape[1],
        width=width,
        seed=seed,
    )
    return model, settings


def trained(task) -> Classifier:
    """Return the network of a task in evaluation mode, trained or loaded."""
    config, dataset, network, seed, folder = task
    data = _data(config, dataset)
    model, settings = prepared(
        config, data, network.model, network.width, network.epochs[dataset], seed
    )
    file = folder / f"weights-{dataset}-{network.model}-{seed}.pt"
    fit(model, data.train.x, data.train.y, settings, checkpoint=file, progress=False)
    return model.eval()


def attacked(task, count: int) -> tuple[Classifier, Tensor, Tensor]:
    """Return a trained network and the first test images and labels, on its device."""
    config, dataset, *_ = task
    model, data = trained(task), _data(config, dataset)
    x = data.test.x[:count].to(device()).contiguous(memory_format=torch.channels_last)
    return model, x, data.test.y[:count].to(device())


def train(task) -> dict:
    """Train a network and return its accuracy."""
    config, dataset, *_ = task
    model, data = trained(task), _data(config, dataset)
    train_loss, train_accuracy = evaluate(model, data.train.x[:5000], data.train.y[:5000])
    test_loss, test_accuracy = evaluate(model, data.test.x, data.test.y)
    return {
        "train_accuracy": train_accuracy,
        "train_loss": train_loss,
        "test_accuracy": test_accuracy,
        "test_loss": test_loss,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def follow(task) -> dict:
    """Attack and return the network's view along the path; on the first data set in both norms."""
    config, dataset, *_ = task
    model, x, y = attacked(task, config.n_attack)
    headline = dataset == config.datasets[0]
    steps = config.path_steps if headline else config.path_steps // 2
    linf = {"epsilon": 8 / 255, "step_size": 1 / 255, "steps": steps}
    path = pgd(model, x, y, norm="linf", record=True, **linf).path
    found = {"linf": {**along(walk(model, path, y)), **linf}}
    if headline:
        l2 = {"epsilon": 0.5, "step_size": 0.05, "steps": 10}
        path = pgd(model, x, y, norm="l2", record=True, **l2).path
        found["l2"] = {**along(walk(model, path, y)), **l2}
    return found


def along(seen: Walk) -> dict:
    """Summarise a walk over the inputs that start out right."""
    right = seen.right[0]
    loss, sharpness, doubt = (
        column[:, right].double() for column in (seen.loss, seen.sharpness, seen.doubt)
    )
    flipped, peak = seen.flipped[right], seen.peak[right]
    wrong = flipped >= 0
    last = len(loss) - 1
    start, end, top = sharpness[0], sharpness[-1], sharpness.amax(dim=0)
    # The boundary lies between the last right iterate and the first wrong one.
    near = ((peak == flipped) | (peak == flipped - 1))[wrong]
    inside = (peak < last)[wrong]
    stops = {str(step): torch.full_like(flipped, step) for step in STOPS if step <= last}
    stops["flip"] = torch.where(wrong, flipped, last)
    return {
        "right": int(right.sum()),
        "wrong_at_end": _mean(wrong),
        "flip_step": quantiles(flipped[wrong], QUARTILES),
        "peak_at_boundary": _mean(near),
        "peak_before_end": _mean(inside),
        "start_sharpness": quantiles(start[wrong], QUARTILES),
        "peak_over_start": quantiles((top / start)[wrong], QUARTILES),
        "end_over_peak": quantiles((end / top)[wrong], QUARTILES),
        "end_over_start": quantiles((end / start)[wrong], QUARTILES),
        "end_flatter_than_start": _mean((end < start)[wrong]),
        "end_doubt": quantiles(doubt[-1][wrong], QUARTILES),
        "start_doubt": quantiles(doubt[0][wrong], QUARTILES),
        "by_step": {
            "accuracy": [_mean(row) for row in seen.right],
            "loss": [quantiles(row, QUARTILES) for row in loss],
            "sharpness": [quantiles(row, QUARTILES) for row in sharpness],
            "doubt": [quantiles(row, QUARTILES) for row in doubt],
        },
        "by_offset": {
            "offsets": list(OFFSETS),
            "sharpness": aligned(sharpness, flipped),
            "doubt": aligned(doubt, flipped),
        },
        "detection": {
            name: detected(start, sharpness.gather(0, step[None])[0])
            for name, step in stops.items()
        },
    }


def aligned(values: Tensor, flipped: Tensor, *, fewest: int = 20) -> list[list[float] | None]:
    """Return quartiles at each of ``OFFSETS`` from the first wrong step, None where few paths go.

    Args:
        values: Shape ``(steps, samples)``.
        flipped: The step of the first wrong prediction, -1 for none. Shape ``(samples,)``.
        fewest: How many samples it takes.
    """
    found = []
    for offset in OFFSETS:
        step = flipped + offset
        there = (flipped >= 0) & (step >= 0) & (step < len(values))
        if there.sum() < fewest:
            found.append(None)
            continue
        chosen = values[:, there].gather(0, step[there][None])[0]
        found.append(quantiles(chosen, QUARTILES))
    return found


def detected(clean: Tensor, moved: Tensor) -> dict | None:
    """Return how well a threshold on the sharpness tells moved inputs, None of too few to fold."""
    if len(clean) < 5:
        return None
    found = detect(clean, moved)
    return {"accuracies": list(found.accuracies), "auc": found.auc}


def scale_head(task) -> dict:
    """Scale the head and return how much a weak attack raises the loss."""
    config, *_ = task
    model, x, y = attacked(task, config.n_attack)
    found = {}
    for s in config.scales:
        twin = scaled(model, s)
        weak = {"norm": "l2", "epsilon": 0.025, "step_size": 0.001, "steps": 25}
        seen = walk(twin, torch.stack([x, pgd(twin, x, y, **weak).x_adv]), y)
        frobenius = sharpness_of(twin, x, kind="frobenius")
        rise = (seen.loss[1] - seen.loss[0]).double()
        right = seen.right[0]
        found[f"{s:g}"] = {
            "accuracy": _mean(right),
            "robust_accuracy": _mean(seen.right[1]),
            "rise": quantiles(rise, SPREAD),
            "rise_right": quantiles(rise[right], SPREAD),
            "rise_wrong": quantiles(rise[~right], SPREAD),
            "mean_rise": rise.mean().item(),
            "sharpness": quantiles(seen.sharpness[0], QUARTILES),
            "mean_sharpness": seen.sharpness[0].double().mean().item(),
            "mean_frobenius": frobenius.double().mean().item(),
            "zero_gradient_share": zero_gradient_share(twin, x, y),
        }
    return found


def unmask(task) -> dict:
    """Scale the head and return the accuracy under attacks that this can and cannot mislead."""
    config, *_ = task
    model, x, y = attacked(task, config.n_attack)
    few = slice(config.n_slow)
    strong = {"norm": "linf", "epsilon": 8 / 255, "step_size": 2 / 255, "steps": 10}
    transferred = pgd(model, x, y, **strong).x_adv
    found = {}
    for s in config.masks:
        twin = scaled(model, s)

        def accuracy(inputs: Tensor, twin=twin, labels=y) -> float:
            with torch.no_grad():
                return _mean(twin(inputs).argmax(dim=1) == labels[: len(inputs)])

        wide = scaled(model, s).double()
        found[f"{s:g}"] = {
            "clean": accuracy(x),
            "ce": accuracy(pgd(twin, x, y, **strong).x_adv),
            "dlr": accuracy(pgd(twin, x, y, loss="dlr", **strong).x_adv),
            "log_odds": accuracy(pgd(twin, x, y, loss="log-odds", **strong).x_adv),
            "transfer": accuracy(transferred),
            "clean_few": accuracy(x[few]),
            "ce_few": accuracy(pgd(twin, x[few], y[few], **strong).x_adv),
            "ce_float64_few": accuracy(pgd(wide, x[few].double(), y[few], **strong).x_adv.float()),
            "saturated_share": _mean(saturated(logits(twin, x), y)),
            "saturated_share_float64_few": _mean(saturated(logits(wide, x[few].double()), y[few])),
            "zero_gradient_share": zero_gradient_share(twin, x, y),
            "zero_gradient_share_float64_few": zero_gradient_share(wide, x[few].double(), y[few]),
            "mean_sharpness": sharpness_of(twin, x).double().mean().item(),
        }
        if s in (config.masks[0], config.masks[-1]):
            search = {"norm": "linf", "epsilon": 8 / 255, "queries": config.queries}
            found[f"{s:g}"]["random_search_few"] = accuracy(
                random_search(twin, x[few], y[few], **search).x_adv
            )
    return found


@torch.no_grad()
def logits(model: Classifier, x: Tensor) -> Tensor:
    """Return the logits, a batch at a time."""
    return torch.cat([model(part) for part in x.split(256)])


def judge(task) -> dict:
    """Return the accuracy that AutoAttack leaves at the first and the last factor of the head."""
    config, *_ = task
    model, x, y = attacked(task, config.n_referee)
    found = {}
    for s in (config.masks[0], config.masks[-1]):
        twin = scaled(model, s)
        x_adv = auto_attack(twin, x, y, norm="linf", epsilon=8 / 255).x_adv
        with torch.no_grad():
            found[f"{s:g}"] = {
                "clean": _mean(twin(x).argmax(dim=1) == y),
                "autoattack": _mean(twin(x_adv).argmax(dim=1) == y),
            }
    return found


def certify(task) -> dict:
    """Return what certificates say of a network, beside what an l2 attack finds."""
    from flatbook.certificates import certified_radius, lipschitz_bound, margin_radius

    config, *_ = task
    model, x, y = attacked(task, config.n_slow)
    lipschitz = lipschitz_bound(model, tuple(x.shape[1:]))
    l2 = {"epsilon": 0.5, "step_size": 0.01, "steps": 50}
    path = pgd(model, x, y, norm="l2", record=True, **l2).path
    with torch.no_grad():
        # In float64, for the radii of the deepest networks lie below the least float32.
        features = model.features(x).double()
        logits = features @ model.head.weight.T.double() + model.head.bias.double()
        loss = torch.nn.functional.cross_entropy(logits, y, reduction="none")
        right = logits.argmax(dim=1) == y
        moved = (path[-1] - x).flatten(1).norm(dim=1)
        stretch = (model.features(path[-1]).double() - features).norm(dim=1) / moved.clamp(
            min=1e-12
        )
    head = {"bias": model.head.bias.detach().double()}
    weight = model.head.weight.detach().double()
    spare = (math.log(2) - loss).clamp(min=0)
    certified = certified_radius(weight, features, y, spare, lipschitz, **head)
    margins = margin_radius(weight, features, y, lipschitz, **head)
    seen = walk(model, path, y)
    wrong = right & (seen.flipped >= 0)
    flips = path.gather(0, seen.flipped.clamp(min=0).view(1, -1, 1, 1, 1).expand(1, *x.shape))[0]
    reached = (flips - x).flatten(1).norm(dim=1)
    sure = wrong & (certified > 0)  # no radius keeps the label of an image of loss above log 2
    return {
        "lipschitz_bound": float(lipschitz),
        "largest_stretch": stretch.max().item(),
        "certified_radius": quantiles(certified[right], QUARTILES),
        "margin_radius": quantiles(margins[right], QUARTILES),
        "attacked_radius": quantiles(reached[wrong], QUARTILES),
        "attacked_over_certified": quantiles((reached / certified)[sure], QUARTILES),
        "sure": _mean(certified[right] > 0),
        "never_violated": bool((reached[wrong] > certified[wrong]).all()),
        "kappa": relative_sharpness(weight, features, logits).double().mean().item(),
    }


def quantiles(values: Tensor, points: tuple[float, ...]) -> list[float] | None:
    """Return quantiles to five digits, or None of no values."""
    if values.numel() == 0:
        return None
    points = torch.tensor(points, dtype=torch.float64, device=values.device)
    return [float(f"{value:.5g}") for value in values.double().quantile(points)]


def _mean(truth: Tensor) -> float | None:
    return truth.double().mean().item() if truth.numel() else None
