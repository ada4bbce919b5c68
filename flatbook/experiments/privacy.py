"""Membership inference against SGD and the SAM family, by data, architecture and how well it fits.

Every pool of points has an inclusion design that its cells share: each model of each optimizer is
trained on the same half as its twin, from the same initial weights. Each model is attacked with the
help of the others of its cell.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flatbook.audit import attack_each, in_turn
from flatbook.comparison import (
    Estimate,
    Resamples,
    mean_auc,
    mean_rate,
    over_points,
    point_resamples,
    pooled_tpr,
    resamples,
)
from flatbook.data import Dataset, load
from flatbook.ensembles import Ensemble, balanced_design, train_ensemble
from flatbook.experiments import Outcome
from flatbook.membership import balanced_accuracy, lira, logit_signal, roc
from flatbook.memorization import memorization
from flatbook.models import build
from flatbook.registry import SETS
from flatbook.training import DivergenceError, TrainConfig, evaluate, fit
from flatbook.units import units

RATES = (0.001, 0.01)
"""The false positive rates at which true ones are recorded."""

SHARES = {
    "low": lambda memorized: memorized < 0.1,
    "middle": lambda memorized: (memorized >= 0.6) & (memorized <= 0.85),
    "high": lambda memorized: memorized > 0.85,
    "mean": lambda memorized: memorized,
}
"""What is recorded of memorization: shares of points in a range, the middle one the source's."""

_BLOCK = 16  # models in which each point is in exactly half
_PROBABILITY = {"gamma": 2.0, "a": 0.3}  # of RMIA


@dataclass(frozen=True)
class Pool:
    """Points of which each model is trained on half, and the network it is.

    Attributes:
        dataset: A name of ``flatbook.data``.
        points: How many.
        model: A name of ``flatbook.models``.
        width: Its width.
        lr: Highest learning rate.
        batch_size: Points a step.
        weight_decay: As in ``TrainConfig``.
        warmup: As in ``TrainConfig``.
    """

    dataset: str
    points: int
    model: str
    width: int
    lr: float
    batch_size: int = 64
    weight_decay: float = 5e-4
    warmup: float = 1.0


@dataclass(frozen=True)
class Cell:
    """An ensemble: a pool, an optimizer, and for how long.

    Attributes:
        pool: The pool's name.
        optimizer: As in ``TrainConfig``.
        rho: As in ``TrainConfig``.
        epochs: Passes over the half of the pool.
        models: How many.
    """

    pool: str
    optimizer: str
    rho: float | None
    epochs: int
    models: int

    @property
    def name(self) -> str:
        """What it is called in records."""
        radius = "" if self.rho is None else f"{self.rho:g}"
        return f"{self.pool}-{self.optimizer}{radius}-{self.epochs}"


@dataclass(frozen=True)
class Config:
    """What the outcome depends on.

    Attributes:
        pools: By name. The first is the headline.
        cells: The ensembles.
        n_eval: Test points for accuracy and as RMIA's population, at most.
        draws: Resamples for intervals.
        tuning: Learning rates tried in the headline pool, with SGD and the second cell's optimizer.
        tuning_seeds: Models for each.
    """

    pools: dict[str, Pool]
    cells: tuple[Cell, ...]
    n_eval: int
    draws: int = 200
    tuning: tuple[float, ...] = ()
    tuning_seeds: int = 3


def grid(pool: str, models: int, epochs: Sequence[int], radii: Sequence[float]) -> list[Cell]:
    """Return the cells of a map: SGD and SAM with every radius, for every number of epochs."""
    return [
        Cell(pool, "sgd" if rho is None else "sam", rho, length, models)
        for length in sorted(epochs, reverse=True)
        for rho in (None, *radii)
    ]


_CNN = Pool("cifar10", 1600, "small-cnn", 12, lr=0.1, warmup=3.0)
_MLP = Pool("fashion-mnist", 1600, "mlp", 64, lr=0.05)
CONFIGS = {
    "quick": Config(
        {"fashion-mnist": replace(_MLP, points=400, width=32)},
        tuple(grid("fashion-mnist", 8, (5, 20), (0.05,))),
        n_eval=200,
        draws=50,
        tuning=(0.02, 0.05),
        tuning_seeds=2,
    ),
    "laptop": Config(
        {
            "cifar10": _CNN,
            "fashion-800": replace(_MLP, points=800),
            "fashion-1600": _MLP,
            "fashion-3200": replace(_MLP, points=3200),
            "vgg": replace(_CNN, points=800, model="vgg11-bn", width=8, lr=0.1),
            "resnet": replace(_CNN, points=600, model="resnet18", width=8, lr=0.1),
            "cifar100": replace(_CNN, dataset="cifar100-subset"),
            "location": Pool("location30", 3000, "mlp", 64, lr=0.05),
            "adult": Pool("adult", 3000, "mlp", 64, lr=0.05),
        },
        (
            Cell("cifar10", "sgd", None, 50, 64),
            Cell("cifar10", "sam", 0.05, 50, 64),
            *(Cell("cifar10", name, None, 50, 16) for name in ("asam", "gsam", "looksam", "msam")),
            *grid("cifar10", 16, (15, 28), (0.05,)),
            Cell("cifar10", "sam", 0.1, 50, 16),
            *(
                cell
                for size in (800, 1600, 3200)
                for cell in grid(f"fashion-{size}", 16, (4, 10, 30), (0.02, 0.05, 0.1))
            ),
            *grid("vgg", 8, (20,), (0.05,)),
            *grid("resnet", 8, (15,), (0.05,)),
            *grid("cifar100", 8, (50,), (0.05,)),
            *grid("location", 16, (30,), (0.05,)),
            *grid("adult", 16, (30,), (0.05,)),
        ),
        n_eval=2000,
        tuning=(0.05, 0.1, 0.15),
    ),
    "gpu": Config(
        {
            name: Pool(name, 50_000, "resnet18", 64, lr=0.1, batch_size=128, warmup=0.0)
            for name in ("cifar10", "cifar100")
        },
        tuple(
            Cell(name, optimizer, rho, 200, 64)
            for name in ("cifar10", "cifar100")
            for optimizer, rho in (("sgd", None), ("sam", 0.05), ("asam", 0.5), ("gsam", 0.05))
        ),
        n_eval=10_000,
    ),
}


def run(
    config: Config,
    *,
    checkpoint=None,
    progress: bool = False,
    workers: int = 0,
    cluster: str | None = None,
) -> Outcome:
    """Train the ensembles, attack every model, and compare each cell with its SGD twin.

    A cluster trains the ensembles; all else is computed here.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(checkpoint or scratch)
        options = {"config": config, "progress": progress}

        def each(stage: str, work, cells: dict, workers: int) -> dict:
            tasks = {f"{stage}-{name}": task for name, task in cells.items()}
            found = units(checkpoint, tasks, work, label=stage, workers=workers, **options)
            return {name: found[f"{stage}-{name}"] for name in cells}

        train = {c.name: (config, c, folder, workers, progress) for c in config.cells}
        training = each("train", on_cluster(trained, cluster), train, 0)  # processes within
        rows = {
            f"{cell.name}-{count}": (config, cell, folder, count)
            for cell in config.cells
            for count in sorted({cell.models, min(cell.models, _BLOCK)}, reverse=True)
        }
        audits = each("audit", on_cluster(audited, cluster), rows, workers)
        forms = {cell.name: (config, cell, folder) for cell in config.cells[:2]}
        values = {
            "cells": {
                c.name: training[c.name] | audits[f"{c.name}-{c.models}"]["found"]
                for c in config.cells
            },
            "against_sgd": {
                c.name: compared(config, c, audits) for c in config.cells if c.optimizer != "sgd"
            },
            "lira_forms": each("forms", on_cluster(lira_forms, cluster), forms, workers),
        }
        if config.tuning:
            rates = {
                f"{cell.optimizer}-{lr:g}-{seed}": (config, cell, lr, seed)
                for cell in config.cells[:2]
                for lr in config.tuning
                for seed in range(config.tuning_seeds)
            }
            values["tuning"] = each("tune", tuned, rates, workers)
    sets = {pool.dataset for pool in config.pools.values()}
    data = [load(name) for name in sorted(sets)]
    seeds = range(max(cell.models for cell in config.cells))
    return Outcome(values, seeds=seeds, data={d.name: d.checksum for d in data})


def on_cluster(work, cluster: str | None):
    """Return the work of a unit, told where ensembles are trained if that is not here."""
    return work if cluster is None else partial(work, cluster=cluster)


def points_of(pool: Pool, n_eval: int) -> Dataset:
    """Load the pool and the points for evaluation."""
    sizes = SETS[pool.dataset].sizes
    return load(pool.dataset, n_train=pool.points, n_test=min(n_eval, sizes[1]))


def shared_design(points: int, models: int) -> np.ndarray:
    """Draw a design in which each point is in half of the models, and of each block of 16.

    So an ensemble of 16 shares its training sets with the first 16 models of a larger one. If 16
    does not divide the models, the largest even number below it that does takes its place.
    """
    size = next(s for s in range(_BLOCK, 1, -2) if models % s == 0)
    blocks = [balanced_design(size, points, seed=seed) for seed in range(models // size)]
    return np.concatenate(blocks)


def ensemble(
    config: Config,
    cell: Cell,
    folder: Path,
    *,
    cluster: str | None = None,
    workers: int = 0,
    show: bool = False,
) -> tuple[Dataset, Ensemble]:
    """Return the data and the ensemble of a cell, trained now as far as it was not before.

    What is kept belongs to the backend: load what a cluster has trained with ``cluster``, too,
    which need not answer any more once all is finished.
    """
    pool = config.pools[cell.pool]
    data = points_of(pool, config.n_eval)
    make = _Maker(pool.model, pool.width, data.num_classes, tuple(data.train.x.shape[1:]))
    models = train_ensemble(
        make,
        data.train.x,
        data.train.y,
        shared_design(pool.points, cell.models),
        _settings(pool, cell),
        eval_x=data.test.x,
        backend="joblib" if cluster is None else "dask",
        cluster=cluster,
        out=folder / "ensembles" / cell.name,
        workers=max(workers, 1),
        progress=show,
    )
    return data, models


@dataclass(frozen=True)
class _Maker:
    model: str
    width: int
    classes: int
    shape: tuple[int, ...]

    def __call__(self, seed: int):
        shape = self.shape if self.model == "mlp" else None
        channels = self.shape[0] if len(self.shape) == 3 else 3
        options = {"in_channels": channels, "input_shape": shape, "width": self.width, "seed": seed}
        return build(self.model, num_classes=self.classes, **options)


def _settings(pool: Pool, cell: Cell) -> TrainConfig:
    return TrainConfig(
        epochs=cell.epochs,
        batch_size=pool.batch_size,
        optimizer=cell.optimizer,
        rho=cell.rho,
        lr=pool.lr,
        weight_decay=pool.weight_decay,
        warmup=pool.warmup,
    )


def trained(task, cluster: str | None = None) -> dict:
    """Train an ensemble and return how well its models fit and generalize, one entry a model."""
    config, cell, folder, workers, progress = task
    options = {"cluster": cluster, "workers": workers, "show": progress}
    data, models = ensemble(config, cell, folder, **options)
    right = models.logits.argmax(2) == data.train.y
    test = (models.eval_logits.argmax(2) == data.test.y).double().mean(1)
    pairs = zip(right, models.design, strict=True)
    return {
        "models": cell.models,
        "train_accuracy": [own[seen].double().mean() for own, seen in pairs],
        "test_accuracy": test,
    }


def audited(task, cluster: str | None = None) -> dict:
    """Attack each of the first models of a cell and return how well every attack does.

    Besides what is recorded come the values in every resample, by which cells are compared.
    """
    config, cell, folder, rows = task
    data, models = ensemble(config, cell, folder, cluster=cluster)
    design = models.design[:rows].numpy()
    logits, eval_logits = models.logits[:rows], models.eval_logits[:rows]
    drawn = resamples(*design.shape, draws=config.draws)
    tests = point_resamples(eval_logits.shape[1], draws=config.draws, seed=1)
    right = (logits.argmax(2) == data.train.y).numpy()
    tested = (eval_logits.argmax(2) == data.test.y).numpy()
    estimates = {
        "train_accuracy": mean_rate(right, design, drawn),
        "test_accuracy": mean_rate(tested, np.ones_like(tested), Resamples(drawn.models, tests)),
    }
    memorized = memorization(right, design)
    estimates |= {
        f"memorization {key}": over_points(share(memorized), drawn.points)
        for key, share in SHARES.items()
    }
    attacks = {}
    for name, scores in attack(data, models, rows).items():
        attacks[name], own = success(scores, design, drawn)
        estimates |= {f"{name} {key}": value for key, value in own.items()}
        if name in ("confidence", "entropy"):
            attacks[name]["accuracy"] = balanced_accuracy(scores >= 0, design)
    signals = np.asarray(logit_signal(logits, data.train.y))
    top = logits.double().softmax(2).amax(2).numpy()
    return {
        "found": {
            "attacks": attacks,
            "log_odds": _by_side(signals, design),
            "top_probability": _by_side(top, design),
            "memorization": {key: estimates[f"memorization {key}"].recorded() for key in SHARES},
        },
        "resampled": {key: [e.value, *e.draws] for key, e in estimates.items()},
    }


def attack(data: Dataset, models: Ensemble, rows: int) -> dict[str, np.ndarray]:
    """Return the scores of every attack on the first models of an ensemble."""
    attacks = ("confidence", "entropy", "rmia", "lira-pooled", "lira-offline")
    if rows >= _BLOCK:  # fewer shadows than 15 say little about the spread at a point
        attacks = (*attacks, "lira")
    return attack_each(
        models.logits[:rows],
        data.train.y.numpy(),
        models.design[:rows],
        models.eval_logits[:rows],
        data.test.y.numpy(),
        attacks=attacks,
        **_PROBABILITY,
    )


def success(scores, design, drawn: Resamples) -> tuple[dict, dict[str, Estimate]]:
    """Summarise an attack: its mean area, and rates of the scores pooled over targets."""
    estimates = {"auc": mean_auc(scores, design, drawn)}
    estimates |= {f"tpr_{rate:g}": pooled_tpr(scores, design, rate, drawn) for rate in RATES}
    areas = [roc(own, seen).auc for own, seen in zip(scores, design, strict=True)]
    found = {key: value.recorded() for key, value in estimates.items()}
    oracle = roc(scores, design).balanced_accuracy
    return found | {"auc_by_model": areas, "oracle_accuracy": oracle}, estimates


def _by_side(values, design) -> dict:
    """Return the mean and the spread over points, inside and outside, averaged over models."""
    inside = [own[seen] for own, seen in zip(values, design, strict=True)]
    outside = [own[~seen] for own, seen in zip(values, design, strict=True)]
    return {
        "member_mean": np.mean([own.mean() for own in inside]),
        "member_spread": np.mean([own.std() for own in inside]),
        "stranger_mean": np.mean([own.mean() for own in outside]),
        "stranger_spread": np.mean([own.std() for own in outside]),
    }


def twins(config: Config, cell: Cell) -> list[Cell]:
    """Return the SGD cells of the same pool, the one of as many epochs first."""
    plain = [c for c in config.cells if c.pool == cell.pool and c.optimizer == "sgd"]
    return sorted(plain, key=lambda c: abs(c.epochs - cell.epochs))


def compared(config: Config, cell: Cell, audits: dict) -> dict:
    """Compare a cell with SGD: at equal epochs, and at equal training accuracy.

    Both are attacked with equally many shadow models, on the same points and the same halves. SGD
    at another training accuracy is interpolated linearly between its cells, all cut to the number
    of models of the smallest.
    """

    def measured(cells, rows):
        return [
            {
                key: Estimate(values[0], np.array(values[1:]))
                for key, values in audits[f"{c.name}-{rows}"]["resampled"].items()
            }
            for c in cells
        ]

    plain = twins(config, cell)
    rows = min(cell.models, plain[0].models)
    own, twin = measured((cell, plain[0]), rows)
    fewest = min(c.models for c in (cell, *plain))
    found = {
        "models": rows,
        "epochs": plain[0].epochs,
        "difference": {key: (value - twin[key]).recorded() for key, value in own.items()},
        "matched_models": fewest,
        "matched": {},
    }
    own, *curve = measured((cell, *plain), fewest)
    curve.sort(key=lambda e: e["train_accuracy"].value)
    reach = [e["train_accuracy"].value for e in curve]
    if len(curve) > 1 and reach[0] <= own["train_accuracy"].value <= reach[-1]:
        found["matched"] = {
            key: (value - at_equal_fit(own, curve, key)).recorded()
            for key, value in own.items()
            if key != "train_accuracy"
        }
    return found


def at_equal_fit(own: dict, curve: list[dict], key: str) -> Estimate:
    """Interpolate a measure of SGD at another's training accuracy, in every resample.

    Args:
        own: Estimates of the other ensemble, by name, ``"train_accuracy"`` among them.
        curve: Those of SGD's ensembles.
        key: The name of the measure.
    """

    def at(accuracy, *both):
        known, values = np.reshape(both, (2, -1))
        order = np.argsort(known)
        return np.interp(accuracy, known[order], values[order])

    known, values = [e["train_accuracy"] for e in curve], [e[key] for e in curve]
    return Estimate.of(at, own["train_accuracy"], *known, *values)


def lira_forms(task, cluster: str | None = None) -> dict:
    """Compare what LiRA's paper writes with what its code computes, by the number of shadows."""
    config, cell, folder = task
    data, models = ensemble(config, cell, folder, cluster=cluster)
    signals = np.asarray(logit_signal(models.logits, data.train.y))
    design = models.design.numpy()
    forms = [
        (mode, variance, variant)
        for mode in ("online", "offline")
        for variance in ("per-example", "pooled")
        for variant in ("paper", "reference")
    ]
    found: dict[str, dict] = {}
    for count in sorted({c for c in (_BLOCK, 32, 64) if c <= cell.models}) or [cell.models]:
        by_form = {"-".join(form): [] for form in forms}
        for target, others in in_turn(count):
            for mode, variance, variant in forms:
                options = {"mode": mode, "variance": variance, "variant": variant, "log": True}
                scores = lira(signals[target], signals[others], design[others], **options)
                by_form[f"{mode}-{variance}-{variant}"].append(scores)
        drawn = resamples(count, design.shape[1], draws=config.draws)
        found[str(count)] = {
            form: success(np.array(scores), design[:count], drawn)[0]
            for form, scores in by_form.items()
        }
    return found


def tuned(task) -> dict:
    """Train a model of the headline pool with another learning rate."""
    config, cell, lr, seed = task
    pool = replace(config.pools[cell.pool], lr=lr)
    data = points_of(pool, config.n_eval)
    half = torch.from_numpy(shared_design(pool.points, 2)[0])
    x, y = data.train.x[half], data.train.y[half]
    make = _Maker(pool.model, pool.width, data.num_classes, tuple(x.shape[1:]))
    model = make(seed)
    try:
        fit(model, x, y, replace(_settings(pool, cell), seed=seed), progress=False)
    except DivergenceError:
        return {"diverged": True, "train": None, "test": None}
    train, test = _accuracy(model, x, y), _accuracy(model, data.test.x, data.test.y)
    return {"diverged": False, "train": train, "test": test}


def _accuracy(model, x: Tensor, y: Tensor) -> float:
    return evaluate(model, x, y)[1]
