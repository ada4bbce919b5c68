"""What SGD and SAM remember: memorization, influence, and who is found by the attack.

Both optimizers train the same number of models on the same random halves of a pool; SGD does so a
second time for half as long, so that SAM can be compared at equal training accuracy. Beside them, a
small set on which leaving one point out can be done exactly, to check the estimates against.
"""

import tempfile
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.stats import spearmanr

from flatbook.audit import attack_each
from flatbook.comparison import Estimate, mean_rate, over_points, point_resamples, resamples
from flatbook.data import Dataset
from flatbook.ensembles import Ensemble, subset_design, train_ensemble
from flatbook.experiments import Outcome
from flatbook.experiments.privacy import (
    SHARES,
    Cell,
    Pool,
    at_equal_fit,
    ensemble,
    on_cluster,
    points_of,
)
from flatbook.membership import confidence, roc
from flatbook.memorization import buckets, influence, influence_entropy, memorization
from flatbook.models import build
from flatbook.training import TrainConfig
from flatbook.units import units

BINS = np.linspace(-0.2, 1.0, 25)
SHOWN = 24
"""How many images of each kind are named."""

_FPR = 0.01
_BUCKETS = 5
_LEAST = 10  # models, so that each point is in and out of some


@dataclass(frozen=True)
class Config:
    """What the outcome depends on.

    Attributes:
        pools: The pool, in a mapping with its one name.
        models: Of each optimizer; a multiple of 4.
        epochs: Passes over half of the pool.
        rho: Of SAM.
        n_eval: Test points that influence is measured on.
        exact_points: Of the small set.
        exact_seeds: Models without each of its points; with all of them 100, or as many if more.
        exact_epochs: Passes over the small set.
        fractions: Shares of the small set that models of the estimates see.
        draws: Resamples for intervals.
    """

    pools: dict[str, Pool]
    models: int
    epochs: int
    rho: float
    n_eval: int
    exact_points: int
    exact_seeds: int
    exact_epochs: int
    fractions: tuple[float, ...] = (0.5, 0.7, 0.9)
    draws: int = 400


_MLP = Pool("fashion-mnist", 2400, "mlp", 64, lr=0.05)
CONFIGS = {
    "quick": Config({"fashion-mnist": Pool("fashion-mnist", 300, "mlp", 32, 0.05)}, 40, 15, 0.05,
                    n_eval=200, exact_points=20, exact_seeds=4, exact_epochs=10, draws=50),
    "laptop": Config({"fashion-mnist": _MLP}, 200, 30, 0.05, n_eval=1000,
                     exact_points=60, exact_seeds=20, exact_epochs=30),
    "gpu": Config({"cifar100": Pool("cifar100", 50_000, "resnet18", 64, 0.1, batch_size=128)}, 400,
                  100, 0.05, n_eval=10_000, exact_points=200, exact_seeds=50, exact_epochs=30),
}  # fmt: skip


def run(
    config: Config,
    *,
    checkpoint=None,
    progress: bool = False,
    workers: int = 0,
    cluster: str | None = None,
) -> Outcome:
    """Train the ensembles and measure what their models remember.

    A cluster trains the ensembles; all else is computed here.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(checkpoint or scratch)
        common = {"config": config, "progress": progress}
        pool = next(iter(config.pools))
        cells = {
            "sgd": Cell(pool, "sgd", None, config.epochs, config.models),
            "sam": Cell(pool, "sam", config.rho, config.epochs, config.models),
            "sgd-short": Cell(pool, "sgd", None, config.epochs // 2, config.models),
        }
        tasks = {
            f"train-{name}": (config, c, folder, workers, progress) for name, c in cells.items()
        }
        units(
            checkpoint,
            tasks,
            on_cluster(trained, cluster),
            label="ensembles",
            workers=0,  # processes within
            **common,
        )
        parts = {
            "memorization": memorized,
            "convergence": converged,
            "buckets": divided,
            "attack": attacked,
            "exact": exact,
        }
        found = units(
            checkpoint,
            {name: (part, config, cells, folder) for name, part in parts.items()},
            on_cluster(_measured, cluster),
            label="measurements",
            workers=workers,
            **common,
        )
    data = points_of(config.pools[pool], config.n_eval)
    return Outcome(found, seeds=range(config.models), data={data.name: data.checksum})


def trained(task, cluster: str | None = None) -> int:
    """Train the models of one optimizer."""
    config, cell, folder, workers, progress = task
    options = {"cluster": cluster, "workers": workers, "show": progress}
    return len(ensemble(config, cell, folder, **options)[1].seeds)


def _measured(task, cluster: str | None = None) -> dict:
    part, config, cells, folder = task
    trained_cell = partial(ensemble, config, folder=folder, cluster=cluster)
    return part(config, cells, trained_cell)


class Answers(NamedTuple):
    """What the models of one optimizer answered.

    Attributes:
        right: Whether each model is right at each point of the pool. Shape ``(models, points)``.
        sure: Its probability of the label there. Shape ``(models, points)``.
        eval_right: Whether it is right at each test point. Shape ``(models, evaluated)``.
        design: Which model was trained on which point. Shape ``(models, points)``.
    """

    right: np.ndarray
    sure: np.ndarray
    eval_right: np.ndarray
    design: np.ndarray


def answers(data: Dataset, models: Ensemble) -> tuple[Dataset, Answers]:
    """Return the data and what the models of a cell answered about them."""
    right = models.logits.argmax(2) == data.train.y
    tested = models.eval_logits.argmax(2) == data.test.y
    sure = confidence(models.logits, data.train.y)
    return data, Answers(*(t.numpy() for t in (right, sure, tested, models.design)))


def memorized(config, cells, trained_cell) -> dict:
    """Estimate memorization of every point, and name the points worth looking at."""
    found, scores, inside = {}, {}, {}
    for name, cell in cells.items():
        data, own = answers(*trained_cell(cell))
        values, errors = memorization(own.right, own.design, standard_error=True)
        scores[name] = values
        inside[name] = _mean_where(own.right, own.design)
        table = influence(own.right, own.eval_right, own.design)
        found[name] = {
            "train_accuracy": inside[name].mean(),
            "stranger_accuracy": own.right[~own.design].mean(),
            "test_accuracy": own.eval_right.mean(),
            "memorization": values.round(4),
            "error": errors.round(4),
            "by_confidence": memorization(own.sure, own.design).round(4),
            "strangers_right": _mean_where(own.right, ~own.design).round(4),
            "counts": np.histogram(values.clip(BINS[0], BINS[-1]), BINS)[0],
            "influence_above": [(table > t).mean() for t in (0.1, 0.2, 0.3)],
            "pairs": _strongest(table),
        }
    drawn = point_resamples(len(inside["sgd"]), draws=config.draws)
    estimates = {
        name: {"train_accuracy": over_points(inside[name], drawn)}
        | {key: over_points(share(values), drawn) for key, share in SHARES.items()}
        for name, values in scores.items()
    }
    sam, *curve = (estimates[name] for name in ("sam", "sgd-short", "sgd"))
    within = (
        curve[0]["train_accuracy"].value
        <= sam["train_accuracy"].value
        <= curve[1]["train_accuracy"].value
    )
    found |= {"difference": {}, "matched": {}}
    for key in SHARES:
        for name, values in estimates.items():
            found[name][key] = values[key].recorded()
        found["difference"][key] = (sam[key] - curve[1][key]).recorded()
        if within:
            found["matched"][key] = (sam[key] - at_equal_fit(sam, curve, key)).recorded()
    found["rank_correlation"] = spearmanr(scores["sgd"], scores["sam"]).statistic
    found["train_indices"] = data.train.indices
    found["test_indices"] = data.test.indices
    found["bins"] = BINS.round(4)
    return found


def _mean_where(values, chosen) -> np.ndarray:
    return (values * chosen).sum(axis=0) / chosen.sum(axis=0)


def _strongest(table) -> list[dict]:
    """Return the strongest pairs of a training and a test point, one for each test point."""
    best = table.argmax(axis=0)
    values = table[best, np.arange(table.shape[1])]
    order = np.argsort(-values)[:SHOWN]
    return [{"train": best[j], "test": j, "influence": round(values[j], 4)} for j in order]


def converged(config, cells, trained_cell) -> dict:
    """Measure how estimates settle as models are added: errors, agreement of halves."""
    found = {}
    for name, cell in cells.items():
        data, own = answers(*trained_cell(cell))
        found[name] = []
        half = config.models // 2
        for count in sorted({half // k for k in (1, 2, 4, 8) if half // k >= _LEAST}):
            ours, theirs = slice(count), slice(half, half + count)
            a, error = memorization(own.right[ours], own.design[ours], standard_error=True)
            b = memorization(own.right[theirs], own.design[theirs])
            table = influence(own.right[ours], own.eval_right[ours], own.design[ours])
            entropy = influence_entropy(table, data.train.y.numpy(), data.test.y.numpy())
            found[name].append(
                {
                    "models": count,
                    "error": float(np.sqrt((error**2).mean())),
                    "difference": float(np.sqrt(((a - b) ** 2).mean())),
                    "correlation": np.corrcoef(a, b)[0, 1],
                    "entropy": entropy.mean(),
                    "greatest_entropy": float(np.log(np.bincount(data.train.y).mean())),
                }
            )
    return found


def divided(config, cells, trained_cell) -> dict:
    """Compare accuracy in buckets of atypical to typical test points.

    Bucket 1 holds the least influence entropy or, more robust against noise, the largest single
    influence. Influence is averaged over both optimizers, so that neither chooses; and over each
    half of the models, while accuracy is that of the other half: on the same models, noise would
    put points into the first bucket that happened to be wrong there. That is recorded beside.
    """
    both = {name: answers(*trained_cell(cell)) for name, cell in cells.items()}
    data = both["sgd"][0]
    labels, tested = data.train.y.numpy(), data.test.y.numpy()
    same_class = labels[:, None] == tested
    half = config.models // 2
    halves = slice(0, half), slice(half, config.models)

    def influences(rows, names=("sgd", "sam")):
        tables = [
            influence(own.right[rows], own.eval_right[rows], own.design[rows])
            for own in (both[name][1] for name in names)
        ]
        return np.mean(tables, axis=0)

    def entropy(table):
        return influence_entropy(table, labels, tested)

    def less_largest(table):
        return -np.abs(table * same_class).max(axis=0)

    drawn = resamples(half, len(tested), draws=config.draws)

    def accuracy(name, k, places):
        own = both[name][1].eval_right
        folds = [
            mean_rate(own[rows], np.broadcast_to(place == k, own[rows].shape), drawn)
            for place, rows in zip(places, reversed(halves), strict=True)
        ]
        return Estimate.of(lambda a, b: (a + b) / 2, *folds)

    tables = [influences(rows) for rows in halves]
    whole, by_sgd = influences(slice(None)), influences(slice(None), ("sgd",))
    found = {}
    for measure in (entropy, less_largest):
        places = [buckets(measure(table), _BUCKETS) for table in tables]
        own_place = buckets(measure(by_sgd), _BUCKETS)
        rows, differences = [], []
        for k in range(1, _BUCKETS + 1):
            accuracies = {name: accuracy(name, k, places) for name in cells}
            differences.append(accuracies["sam"] - accuracies["sgd"])
            rows.append(
                {name: value.recorded() for name, value in accuracies.items()}
                | {
                    "difference": differences[-1].recorded(),
                    "same_models_by_sgd": both["sam"][1].eval_right[:, own_place == k].mean()
                    - both["sgd"][1].eval_right[:, own_place == k].mean(),
                }
            )
        found[measure.__name__] = {
            "buckets": rows,
            "first_less_last": (differences[0] - differences[-1]).recorded(),
            "agreement": (places[0] == places[1]).mean(),
            "rank_correlation": spearmanr(*map(measure, tables)).statistic,
            "mean": measure(whole).mean(),
            "order": np.argsort(measure(whole)),
        }
    return found


def attacked(config, cells, trained_cell) -> dict:
    """Attack every model and relate each point's detection to its memorization."""
    found = {}
    edges = (-1, 0.1, 0.25, 0.5, 0.75, 1.01)
    for name, cell in cells.items():
        data, models = trained_cell(cell)
        _, own = answers(data, models)
        design = own.design
        scores = attack_each(
            models.logits,
            data.train.y,
            design,
            models.eval_logits,
            data.test.y,
            attacks=["lira"],
        )["lira"]
        curve = roc(scores, design)
        found_at = scores >= curve.tpr_at(_FPR).threshold
        detected, alarmed = _mean_where(found_at, design), _mean_where(found_at, ~design)
        values = memorization(own.right, design)
        drawn = resamples(*design.shape, draws=config.draws)
        rows = []
        for low, high in pairwise(edges):
            inside = (values >= low) & (values < high)
            rate = mean_rate(found_at, design & inside, drawn).recorded() if inside.any() else None
            rows.append({"below": high, "share": inside.mean(), "detected": rate})
        found[name] = {
            "auc": curve.auc,
            "tpr_0.001": list(curve.tpr_at(0.001)),
            "detected": detected.round(3),
            "false_alarms": alarmed.round(3),
            "rank_correlation": spearmanr(values, detected).statistic,
            "by_memorization": rows,
        }
    return found


def exact(config, cells, trained_cell) -> dict:
    """Leave out each point of a small set in turn, and estimate the same from random subsets."""
    pool = next(iter(config.pools.values()))
    data = points_of(Pool(pool.dataset, config.exact_points, "mlp", 32, pool.lr), 10)
    n = config.exact_points
    y = data.train.y.numpy()
    without = np.repeat(~np.eye(n, dtype=bool), config.exact_seeds, axis=0)
    whole = np.ones_like(without)

    def right(design, seed):
        config_ = TrainConfig(epochs=config.exact_epochs, batch_size=16, lr=pool.lr, seed=seed)
        models = train_ensemble(
            partial(_small, data.num_classes, tuple(data.train.x.shape[1:])),
            data.train.x, y, design, config_, backend="vmap", progress=False,
        )  # fmt: skip
        return models.logits.argmax(2).numpy() == y

    # The n · seeds models of each point are independent of those of any other; both sides of a
    # point's difference come from different seeds, too.
    left_out = right(without, 0).reshape(n, config.exact_seeds, n)
    present = right(whole[: max(config.exact_seeds, 100)], 1)
    own = left_out[np.arange(n), :, np.arange(n)]
    values = present.mean(axis=0) - own.mean(axis=1)
    error = np.sqrt(
        present.var(axis=0, ddof=1) / len(present) + own.var(axis=1, ddof=1) / own.shape[1]
    )
    estimates = {}
    for fraction in config.fractions:
        design = subset_design(20 * config.exact_seeds, n, fraction, seed=2)
        estimate, own_error = memorization(right(design, 3), design, standard_error=True)
        estimates[f"{fraction:g}"] = {
            "values": estimate.round(4),
            "error": own_error.round(4),
            "correlation": np.corrcoef(values, estimate)[0, 1],
            "bias": (estimate - values).mean(),
        }
    return {
        "values": values.round(4),
        "error": error.round(4),
        "models": len(without) + len(present),
        "estimates": estimates,
    }


def _small(classes: int, shape: tuple[int, ...], seed: int):
    return build(
        "mlp", num_classes=classes, in_channels=shape[0], input_shape=shape, width=32, seed=seed
    )
