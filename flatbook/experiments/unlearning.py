"""Eight ways to unlearn, three optimizers, three forget sets: each tuned alike, then compared.

Forget sets are chosen by memorization, which an ensemble on random halves of the images estimates.
For each set, method and optimizer, settings are tried on a model of a seed of its own; the best is
then applied to the models of the other seeds. The reference is always the model retrained without
the set, from the same initial weights and by the optimizer that trained the original.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from flatbook.curvature import full_trace, top_eigenvalue
from flatbook.data import Dataset, load
from flatbook.designs import balanced_design
from flatbook.ensembles import train_ensemble
from flatbook.experiments import Outcome
from flatbook.landscape import loss_landscape
from flatbook.membership import confidence, roc
from flatbook.memorization import memorization
from flatbook.models import build
from flatbook.optim import ASAM, SAM
from flatbook.runtime import device
from flatbook.training import TrainConfig, fit
from flatbook.units import units
from flatbook.unlearning import (
    Assessment,
    accuracies,
    assess,
    by_memorization,
    relearning_time,
    tug_of_war,
    u_lira,
    unlearn,
)

RADII = {"sgd": None, "sam": 0.1, "asam": 1.0}
"""The optimizers and their radii, the source's."""

SETS = ("high", "mid", "low")


def _rates(*rates: float) -> tuple[dict, ...]:
    return tuple({"lr": rate} for rate in rates)


def _ascents(*pairs: tuple[float, float]) -> tuple[dict, ...]:
    return tuple({"lr": rate, "alpha": alpha} for rate, alpha in pairs)


def _product(rates: tuple[float, ...], **option: tuple[float, float]) -> tuple[dict, ...]:
    ((name, values),) = option.items()
    return tuple({"lr": rate, name: value} for rate in rates for value in values)


_MINMAX = _ascents(
    (0.01, 0.98), (0.03, 0.97), (0.03, 0.85), (0.01, 0.99), (0.03, 0.99), (0.03, 0.93)
)
TRIALS: dict[str, tuple[dict, ...]] = {
    "finetune": _rates(0.03, 0.1, 0.2, 0.01, 0.06, 0.14),
    "neg_grad": _ascents((0.03, 0.9), (0.01, 0.9), (0.03, 0.8), (0.01, 0.7), (0.03, 0.95),
                         (0.03, 0.85)),
    "random_label": _rates(0.01, 0.03, 0.05, 0.02, 0.08, 0.12),
    "salun": _product((0.03, 0.06, 0.1), fraction=(0.3, 0.7)),
    "l1_sparse": _product((0.03, 0.06, 0.1), gamma=(1e-4, 5e-4)),
    "scrub": _product((0.01, 0.03, 0.06), max_epochs=(1, 2)),
    "influence": tuple(
        {"scale": c, "damping": d}
        for c, d in ((1, 0.01), (1, 0.03), (3, 0.03), (1, 0.005), (3, 0.1), (1, 0.1))
    ),
    "sharp_minmax": _MINMAX,
    "minmax_descent": _MINMAX,
    "minmax_retain_only": _MINMAX,
    "minmax_released": _MINMAX,
    "minmax_released_descent": _MINMAX,
}  # fmt: skip
"""The settings each method is tuned over: equally many for all."""

VARIANTS: dict[str, dict[str, Any]] = {
    "minmax_descent": {"forget_objective": "descent"},
    "minmax_retain_only": {"lam": 0.0},
    "minmax_released": {"variant": "released"},
    "minmax_released_descent": {"variant": "released", "forget_objective": "descent"},
}
"""Forms of Sharp MinMax, by what they change: what F descends, no sharpness of F, public code."""

METHODS = tuple(name for name in TRIALS if name not in VARIANTS)


@dataclass(frozen=True)
class Config:
    """What the outcome depends on.

    Attributes:
        seeds: Models of each kind; tuning has one more.
        dataset: A name of ``flatbook.data``.
        images: Of the training set.
        tests: Of the test set.
        share: Of the images that is forgotten.
        model: A name of ``flatbook.models``.
        width: Its width.
        epochs: Passes of training.
        lr: Of training, at most.
        batch_size: Images a step, in training and in unlearning.
        unlearn_epochs: Passes of unlearning through the retained images.
        trials: Settings tried for each method, the first of :data:`TRIALS`.
        scorers: Models of the ensemble that estimates memorization; even.
        scorer: Name and width of its network.
        scorer_epochs: Their passes through half of the images.
        methods: In the grid.
        optimizers: In the grid.
        sets: Forget sets of the grid.
        pretraining: Optimizers of the original model, when that varies.
        pretraining_sets: Forget sets for that; none leaves it out.
        variants: Forms of Sharp MinMax, under ASAM.
        alphas: Weights of R, in a sweep on the middle set.
        fractions: Shares of weights in the half that forgets, likewise.
        flatness: Images, and probes of the trace, where curvature is measured.
        relearn_epochs: When to give up on learning the set again.
    """

    seeds: int
    dataset: str
    images: int
    tests: int
    share: float
    model: str
    width: int
    epochs: int
    lr: float
    batch_size: int
    unlearn_epochs: int
    trials: int
    scorers: int
    scorer: tuple[str, int]
    scorer_epochs: int
    methods: tuple[str, ...] = METHODS
    optimizers: tuple[str, ...] = tuple(RADII)
    sets: tuple[str, ...] = SETS
    pretraining: tuple[str, ...] = tuple(RADII)
    pretraining_sets: tuple[str, ...] = ()
    variants: tuple[str, ...] = tuple(VARIANTS)
    alphas: tuple[float, ...] = ()
    fractions: tuple[float, ...] = ()
    flatness: tuple[int, int] = (256, 10)
    relearn_epochs: int = 20


CONFIGS = {
    "quick": Config(
        seeds=3, dataset="fashion-mnist", images=300, tests=200, share=0.05, model="mlp", width=32,
        epochs=20, lr=0.05, batch_size=32, unlearn_epochs=1, trials=2, scorers=10,
        scorer=("mlp", 32), scorer_epochs=15, pretraining_sets=("high",), alphas=(0.9, 0.7),
        fractions=(0.2, 0.8), flatness=(32, 2), relearn_epochs=5,
    ),
    "laptop": Config(
        seeds=3, dataset="cifar10", images=3000, tests=2000, share=0.05, model="small-cnn",
        width=16, epochs=35, lr=0.1, batch_size=64, unlearn_epochs=2, trials=6, scorers=24,
        scorer=("small-cnn", 16), scorer_epochs=50, pretraining_sets=("high", "mid"),
        alphas=(0.99, 0.95, 0.9, 0.8, 0.6, 0.4), fractions=(0.1, 0.3, 0.7, 0.9),
    ),
    "gpu": Config(
        seeds=3, dataset="cifar100", images=50_000, tests=10_000, share=0.05, model="resnet18",
        width=64, epochs=100, lr=0.1, batch_size=128, unlearn_epochs=5, trials=6, scorers=100,
        scorer=("resnet18", 64), scorer_epochs=60, pretraining_sets=SETS,
        alphas=(0.99, 0.95, 0.9, 0.8, 0.6, 0.4), fractions=(0.1, 0.3, 0.7, 0.9),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One way to unlearn one set.

    Attributes:
        where: The forget set.
        method: A key of :data:`TRIALS`.
        optimizer: Of unlearning, a key of :data:`RADII`.
        pretrained: The optimizer of the original.
        settings: Rate and options; None are the tuned ones.
    """

    where: str
    method: str
    optimizer: str
    pretrained: str = "sgd"
    settings: tuple[tuple[str, float], ...] | None = None


def run(config: Config, *, checkpoint=None, progress: bool = False, workers: int = 0) -> Outcome:
    """Score, train, tune, unlearn, and measure."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(checkpoint or scratch)
        options = {"config": config, "progress": progress}

        def each(stage: str, work, tasks: Mapping[str, Any], workers: int = workers) -> dict:
            named = {f"{stage}-{name}": (config, folder, task) for name, task in tasks.items()}
            found = units(checkpoint, named, work, label=stage, workers=workers, **options)
            return {name: found[f"{stage}-{name}"] for name in tasks}

        scores = each("score", scored, {"all": (workers, progress)}, 0)["all"]
        forget = scores["sets"]
        originals = each("train", trained, models_of(config, forget))
        common = {"forget": forget, "goals": _without_signals(originals)}
        tuned = each("tune", tune, {_key(c): common | {"cell": c} for c in tuning_cells(config)})
        work = {
            f"{part}-{_key(cell)}-{seed}": common
            | {"cell": _with_settings(cell, tuned), "seed": seed, "flat": part == "pretraining"}
            for part, cells in parts_of(config).items()
            for cell in cells
            for seed in range(config.seeds)
        }
        done = each("unlearn", measured, work)
        cuts = each("cut", cut, {c.optimizer: common | {"cell": _with_settings(c, tuned)}
                                 for c in cut_cells(config)})  # fmt: skip
    found = {
        part: {
            _key(cell): _gathered(done[f"{part}-{_key(cell)}-{s}"] for s in range(config.seeds))
            for cell in cells
        }
        for part, cells in parts_of(config).items()
    }
    values = {
        "forget_sets": scores,
        "originals": _without_signals(originals),
        "baselines": baselines(config, originals),
        "tuned": tuned,
        **found,
        "u_lira": attacked_again(config, originals, done),
        "landscapes": cuts,
    }
    data = data_of(config)
    return Outcome(values, seeds=range(config.seeds), data={data.name: data.checksum})


@cache
def data_of(config: Config) -> Dataset:
    """Load the images, once a process."""
    return load(config.dataset, n_train=config.images, n_test=config.tests)


def scored(task) -> dict:
    """Estimate memorization and choose the forget sets."""
    config, folder, (workers, progress) = task
    data = data_of(config)
    name, width = config.scorer
    models = train_ensemble(
        partial(network, replace(config, model=name, width=width), data),
        data.train.x,
        data.train.y,
        balanced_design(config.scorers, config.images),
        _recipe(config, "sgd", 0, epochs=config.scorer_epochs),
        backend="joblib",
        out=folder / "scorers",
        workers=max(workers, 1),
        progress=progress,
    )
    right, design = (models.logits.argmax(2) == data.train.y).numpy(), models.design.numpy()
    scores = memorization(right, design)
    sure = memorization(confidence(models.logits, data.train.y).numpy(), design)
    sets = by_memorization(scores, round(config.share * config.images), ties=sure)
    return {
        "sets": {name: rows.tolist() for name, rows in sets.items()},
        "memorization": scores.round(4),
        "mean": {name: scores[rows].mean() for name, rows in sets.items()},
        "counts": {
            name: np.bincount(data.train.y[rows], minlength=data.num_classes)
            for name, rows in sets.items()
        },
        "scorer_accuracy": [right[design].mean(), right[~design].mean()],
    }


def network(config: Config, data: Dataset, seed: int) -> torch.nn.Module:
    """Build the network of a seed."""
    shape = tuple(data.train.x.shape[1:])
    options = {"in_channels": shape[0], "input_shape": shape if config.model == "mlp" else None}
    return build(
        config.model, num_classes=data.num_classes, width=config.width, seed=seed, **options
    )


def _recipe(config: Config, optimizer: str, seed: int, epochs: int | None = None) -> TrainConfig:
    return TrainConfig(
        epochs=epochs or config.epochs,
        batch_size=config.batch_size,
        lr=config.lr,
        optimizer=optimizer,
        rho=RADII[optimizer],
        warmup=min(3.0, config.epochs / 4),
        seed=seed,
    )


def models_of(config: Config, forget: Mapping[str, list[int]]) -> dict[str, dict]:
    """Return which models are trained: on everything, and without each of the forget sets."""
    names = {}
    for optimizer in dict.fromkeys(["sgd", *config.pretraining]):
        sets = config.sets if optimizer == "sgd" else config.pretraining_sets
        if not sets:
            continue
        for seed in range(config.seeds + (optimizer == "sgd")):  # the last is for tuning
            for without in (None, *sets):
                name = f"{optimizer}-{without or 'all'}-{seed}"
                names[name] = {
                    "optimizer": optimizer, "without": without, "seed": seed, "forget": forget
                }  # fmt: skip
    return names


def model_of(config: Config, folder: Path, forget, optimizer: str, without: str | None, seed: int):
    """Return a model, trained now or loaded if it was before."""
    data = data_of(config)
    kept = np.ones(config.images, dtype=bool)
    if without is not None:
        kept[forget[without]] = False
    model = network(config, data, seed)
    path = folder / "models" / f"{optimizer}-{without or 'all'}-{seed}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    recipe = _recipe(config, optimizer, seed)
    fit(model, data.train.x[kept], data.train.y[kept], recipe, checkpoint=path, progress=False,
        checkpoint_every=config.epochs)  # fmt: skip
    return model


def splits(data: Dataset, rows) -> dict[str, TensorDataset]:
    """Return R, F and the test set."""
    chosen = np.zeros(len(data.train.y), dtype=bool)
    chosen[rows] = True
    x, y = data.train.x, data.train.y
    return {
        "retain": TensorDataset(x[~chosen], y[~chosen]),
        "forget": TensorDataset(x[chosen], y[chosen]),
        "test": TensorDataset(data.test.x, data.test.y),
    }


def trained(task) -> dict:
    """Train a model, and measure it on each of the forget sets, or on the one it was spared."""
    config, folder, spec = task
    data = data_of(config)
    model = model_of(config, folder, **spec)
    found = {}
    for where in config.sets if spec["without"] is None else (spec["without"],):
        sets = splits(data, spec["forget"][where])
        found[where] = _recorded(config, assess(model, **sets), model, sets)
    return found


def _recorded(config, found: Assessment, model, sets) -> dict:
    again = relearning_time(
        model, sets["forget"], accuracy=0.9, max_epochs=config.relearn_epochs, batch_size=32,
        optimizer=partial(torch.optim.SGD, lr=0.03, momentum=0.9),
    )  # fmt: skip
    return found.accuracy | {
        "mia": found.mia,
        "variance": found.variance if np.isfinite(found.variance) else None,
        "wasserstein": found.wasserstein if np.isfinite(found.wasserstein) else None,
        "relearn": again.epochs if np.isfinite(again.epochs) else None,
        "signals": found.signals.round(3).tolist(),
    }


def tuning_cells(config: Config) -> list[Cell]:
    """Return what is tuned: every cell of the grid, and the variants, on every set."""
    cells = [
        Cell(where, method, optimizer)
        for where in config.sets
        for method in config.methods
        for optimizer in (config.optimizers if method != "influence" else ("sgd",))
    ]
    return cells + [Cell(w, name, "asam") for w in config.sets for name in config.variants]


def parts_of(config: Config) -> dict[str, list[Cell]]:
    """Return the cells of each part of the outcome."""
    tuned = tuning_cells(config)
    sweep = [Cell("mid", m, o) for m in ("neg_grad", "sharp_minmax") for o in config.optimizers]
    return {
        "grid": [cell for cell in tuned if cell.method not in config.variants],
        "variants": [cell for cell in tuned if cell.method in config.variants],
        "pretraining": [
            Cell(where, "neg_grad", optimizer, pretrained)
            for where in config.pretraining_sets
            for pretrained in config.pretraining
            for optimizer in config.optimizers
        ],
        "alphas": [
            replace(c, settings=(("lr", 0.01), ("alpha", a))) for c in sweep for a in config.alphas
        ],
        "fractions": [
            Cell("mid", "sharp_minmax", "asam", settings=(("fraction", share),))
            for share in config.fractions
        ],
    }


def cut_cells(config: Config) -> list[Cell]:
    """Return what the landscapes are of: each optimizer before and after NegGrad."""
    if not config.pretraining_sets:
        return []
    where = config.pretraining_sets[-1]
    return [Cell(where, "neg_grad", name, name) for name in config.pretraining]


def _key(cell: Cell) -> str:
    words = [cell.where, cell.method, cell.optimizer]
    words += [] if cell.pretrained == "sgd" else [f"from-{cell.pretrained}"]
    words += [f"{name}-{value:g}" for name, value in cell.settings or () if name != "lr"]
    return "-".join(words)


def _with_settings(cell: Cell, tuned: Mapping[str, dict]) -> Cell:
    """Return the cell with the tuned settings of its method, below those of its own."""
    best = tuned[_key(Cell(cell.where, cell.method, cell.optimizer))]["best"]
    return replace(cell, settings=tuple((best | dict(cell.settings or ())).items()))


def forgotten(config: Config, folder: Path, cell: Cell, forget, seed: int):
    """Unlearn; return the run and its sets."""
    data = data_of(config)
    sets = splits(data, forget[cell.where])
    model = model_of(config, folder, forget, cell.pretrained, None, seed)
    settings = dict(cell.settings)
    lr = settings.pop("lr", 0.01)
    method = "sharp_minmax" if cell.method in VARIANTS else cell.method
    done = unlearn(
        model,
        sets["retain"],
        sets["forget"],
        method=method,
        epochs=1 if method == "influence" else config.unlearn_epochs,
        optimizer=partial(_optimizer, cell.optimizer, lr),
        batch_size=config.batch_size,
        seed=seed,
        **VARIANTS.get(cell.method, {}),
        **settings,
    )
    return done, sets


def _optimizer(name: str, lr: float, parameters):
    base = torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=5e-4)
    if name == "sgd":
        return base
    return {"sam": SAM, "asam": ASAM}[name](base, rho=RADII[name])


def tune(task) -> dict:
    """Try the settings of a cell on the model of the tuning seed."""
    config, folder, spec = task
    cell, forget = spec["cell"], spec["forget"]
    goal = _goal(spec, config.seeds)
    trials = []
    for settings in TRIALS[cell.method][: config.trials]:
        chosen = replace(cell, settings=tuple(settings.items()))
        done, sets = forgotten(config, folder, chosen, forget, config.seeds)
        own = accuracies(done.model, **sets)
        trials.append(settings | {"tow": tug_of_war(own, goal), "diverged": done.diverged})
    best = max(range(len(trials)), key=lambda i: trials[i]["tow"])
    return {"best": TRIALS[cell.method][best], "trials": trials}


def measured(task) -> dict:
    """Unlearn with one seed, and measure everything."""
    config, folder, spec = task
    cell, forget, seed = spec["cell"], spec["forget"], spec["seed"]
    done, sets = forgotten(config, folder, cell, forget, seed)
    found, goal = assess(done.model, **sets), _goal(spec, seed)
    values = _recorded(config, found, done.model, sets) | {
        "tow": tug_of_war(found.accuracy, goal),
        "tow_mia": tug_of_war(found.attacked, goal, forget="mia"),
        "seconds": round(done.seconds, 3),
        "diverged": done.diverged,
    }
    if spec["flat"]:
        before, reference = (
            model_of(config, folder, forget, cell.pretrained, without, seed)
            for without in (None, cell.where)
        )
        values |= {"before": _flatness(config, before, sets)}
        values |= {"after": _flatness(config, done.model, sets)}
        values |= {"retrained": _flatness(config, reference, sets)}
    return values


def _goal(spec, seed: int) -> dict:
    """Return what the model of a seed does that was retrained without the set."""
    cell = spec["cell"]
    return spec["goals"][f"{cell.pretrained}-{cell.where}-{seed}"][cell.where]


def _flatness(config, model, sets) -> dict:
    points, probes = config.flatness
    found = {}
    for name in ("retain", "forget"):
        x, y = (part[:points] for part in sets[name].tensors)
        x, y = x.to(device()), y.to(device())
        found[f"{name}_trace"] = full_trace(model, x, y, probes=probes).value
        found[f"{name}_top"] = top_eigenvalue(model, x, y, tolerance=0.01).value
    return found


def cut(task) -> dict:
    """Cut the loss along a random direction, before and after, on both sets."""
    config, folder, spec = task
    cell, forget = spec["cell"], spec["forget"]
    done, sets = forgotten(config, folder, cell, forget, 0)
    models = {
        "before": model_of(config, folder, forget, cell.pretrained, None, 0),
        "after": done.model,
        "retrained": model_of(config, folder, forget, cell.pretrained, cell.where, 0),
    }
    found = {}
    for when, model in models.items():
        for name in ("retain", "forget"):
            x, y = (part[: 2 * config.flatness[0]].to(device()) for part in sets[name].tensors)
            line = loss_landscape(model, x, y, steps=21, span=0.5)
            found[f"{when}_{name}"] = {"at": line.alphas.tolist(), "loss": line.loss.tolist()}
    return found


def _gathered(runs) -> dict:
    """Turn measurements of each seed into lists."""
    runs = [_without_signals(run) for run in runs]
    return {
        key: [r[key] for r in runs]
        if not isinstance(runs[0][key], dict)
        else _gathered(r[key] for r in runs)
        for key in runs[0]
    }


def attacked_again(config: Config, originals: Mapping, done: Mapping) -> dict[str, list[float]]:
    """Tell models that forgot from models that never knew, by the laws of the other seeds.

    Beside the methods stand the originals, which forgot nothing: the attack must find those.
    """

    def signals(name: str, where: str) -> np.ndarray:
        runs = [originals[f"sgd-{name}-{seed}"][where]["signals"] for seed in range(config.seeds)]
        return np.array(runs)

    found = {}
    for where in config.sets:
        never = signals(where, where)
        suspects = {f"{where}-none-sgd": signals("all", where)}
        for cell in parts_of(config)["grid"] + parts_of(config)["variants"]:
            if cell.where == where:
                runs = [done[f"{_part(cell)}-{_key(cell)}-{s}"] for s in range(config.seeds)]
                suspects[_key(cell)] = np.array([run["signals"] for run in runs])
        found |= {name: _areas(own, never) for name, own in suspects.items()}
    return found


def _part(cell: Cell) -> str:
    return "variants" if cell.method in VARIANTS else "grid"


def _areas(forgot: np.ndarray, never: np.ndarray) -> list[float]:
    found = []
    for seed in range(len(forgot)):
        others = np.arange(len(forgot)) != seed
        laws = {"unlearned_signals": forgot[others], "retrained_signals": never[others]}
        scores = [u_lira(own[seed], **laws, variance="pooled") for own in (forgot, never)]
        found.append(roc(np.concatenate(scores), np.repeat([True, False], forgot.shape[1])).auc)
    return found


def baselines(config: Config, originals: Mapping) -> dict[str, dict[str, list[float]]]:
    """Return the tug-of-war of doing nothing, and of retraining with the seed after."""
    found = {}
    for where in config.sets:
        kinds = {"none": ("all", 0), "retrained": (where, 1)}
        found[where] = {
            kind: [
                tug_of_war(
                    originals[f"sgd-{name}-{(seed + shift) % config.seeds}"][where],
                    originals[f"sgd-{where}-{seed}"][where],
                )
                for seed in range(config.seeds)
            ]
            for kind, (name, shift) in kinds.items()
        }
    return found


def _without_signals(tree):
    if not isinstance(tree, dict):
        return tree
    return {key: _without_signals(value) for key, value in tree.items() if key != "signals"}
