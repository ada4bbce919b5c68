r"""Three attacks on trained networks, with and without sample splitting, beside their baselines.

- ``margin``: a binary network trained toward a KKT point, from its weights alone.
- ``decay``: a network of ten classes trained with weight decay, from its weights alone.
- ``start``: a binary network, from its weights and their initialization.

Each unit trains one network and attacks it in every way, so that arms share network and start.
Candidates live in the row space of the first layer (`row_space`) but where ``pixels`` says so.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import nn

from flatbook.data import load
from flatbook.experiments import Outcome, rounded
from flatbook.reconstruction import (
    NetworkObjective,
    SampleSplitting,
    ShallowObjective,
    TwoLayer,
    distance,
    match,
    model_multipliers,
    reconstruct,
    relu_multipliers,
    row_space,
    ssim,
    train_two_layer,
)
from flatbook.units import units

ATTACKS = ("margin", "decay", "start")
ARMS = ("none", "split", "random", "fresh", "fixed")
"""No split; along the least eigenvector; along a random line; added candidates; the final number
of candidates from the beginning."""

VEHICLES = (0, 1, 8, 9)  # of CIFAR-10; the others are animals
_HELD = 2000  # images of the test split, for baselines
_SETTINGS = {
    "margin": {"init": 1e-3, "head": 0.1, "lr": 0.01, "boost": 1e4},
    "decay": {"init": 1e-2, "lr": 0.1, "weight_decay": 1e-3},
    "start": {"init": None, "lr": 0.005, "loss": "squared"},  # None: one over the root of inputs
}
_STEPS = {"margin": 1.0, "decay": 2.0, "start": 0.4}  # of training, times the configuration's


@dataclass(frozen=True)
class Config:
    """What the outcome depends on.

    Attributes:
        seeds: Training sets for every attack and data set.
        starts: Searches from different starts for each, in the arms that grow from few candidates.
        data: Data sets in which all arms run.
        pictures: A data set whose reconstructions may be shown; arms from one start, fewer seeds.
        n: Samples.
        smaller: Further numbers of samples for all arms, on the first data set.
        larger: Numbers of samples for a single search with candidates to spare, on the first data
            set, for three seeds; without ``decay``.
        width: Neurons; twice as many for ``start``.
        training: Steps of training.
        steps: Steps of a search.
        few: Candidates for each sample at first, where they grow.
        grown: And at the end.
        many: Candidates for each sample where there are more than enough.
        deep: Steps for a network of two hidden layers; 0 leaves it out.
    """

    seeds: int
    starts: int
    data: tuple[str, ...]
    pictures: str
    n: int
    smaller: tuple[int, ...]
    larger: tuple[int, ...]
    width: int
    training: int
    steps: int
    few: float = 0.5
    grown: float = 1.2
    many: float = 2.0
    deep: int = 0


CONFIGS = {
    "quick": Config(1, 1, ("fashion-mnist",), "fashion-mnist", 10, (), (), 200, 2000, 400),
    "laptop": Config(5, 3, ("mnist", "cifar10"), "fashion-mnist", 50, (20,), (100,), 1000, 10_000,
                     2000, deep=1000),
    "gpu": Config(5, 3, ("mnist", "cifar10"), "fashion-mnist", 500, (100,), (), 1000, 1_000_000,
                  50_000, deep=50_000),
}  # fmt: skip

SEARCH = {
    "lr": 0.02, "lr_multipliers": 0.001, "least": 0.005, "range_weight": 0.1, "spread": 0.3,
    "first": 0.02,
}  # fmt: skip
"""Settings of every search, chosen on a training set that is in no result."""

SHARPNESS = 100.0

_short = partial(rounded, digits=4)  # more than their errors allow


def run(config: Config, *, checkpoint=None, progress: bool = False, workers: int = 0) -> Outcome:
    """Train and attack every network."""
    tasks = {}
    three = range(min(3, config.seeds))
    for attack in ATTACKS:
        for name in config.data:
            for seed in range(config.seeds):
                tasks[f"{attack}-{name}-{seed}"] = ("arms", config, attack, name, seed)
        first, few = config.data[0], replace(config, starts=1)
        for n in config.smaller:
            for seed in range(config.seeds):
                other = replace(config, n=n)
                tasks[f"{attack}-{first}-n{n}-{seed}"] = ("arms", other, attack, first, seed)
        for seed in three:
            tasks[f"{attack}-pictures-{seed}"] = ("arms", few, attack, config.pictures, seed)
            for n in config.larger if attack != "decay" else ():
                other = replace(config, n=n)
                tasks[f"{attack}-{first}-n{n}-{seed}"] = ("size", other, attack, first, seed)
    for seed in three:
        for init in (1e-4, 1e-3, 1e-2):
            for decay in (0.0, 1e-3):
                tasks[f"init-{init:g}-{decay:g}-{seed}"] = ("init", config, init, decay, seed)
        if config.deep:
            tasks[f"deep-{seed}"] = ("deep", config, seed)
    found = units(
        checkpoint, tasks, _unit, config=config, workers=workers, progress=progress, label="nets"
    )
    checksums = {name: load(name).checksum for name in {*config.data, config.pictures}}
    return Outcome(found, seeds=range(config.seeds), data=checksums)


def _unit(task) -> dict:
    kind, *rest = task
    return {"arms": _arms, "size": _size, "init": _init, "deep": _deep}[kind](*rest)


# --- data and networks ------------------------------------------------------------------------


class Problem:
    """A training set with its mean taken off, and images that were not trained on."""

    def __init__(self, name: str, n: int, seed: int, classes: bool) -> None:
        data = load(name, n_train=2000 if n <= 100 else 10 * n, n_test=_HELD)
        label = data.train.y if classes else binary(name, data.train.y)
        random = np.random.default_rng(seed)
        kinds = range(int(label.max()) + 1)
        rows = np.concatenate(
            [
                random.choice(np.flatnonzero(label.numpy() == kind), n // len(kinds), replace=False)
                for kind in kinds
            ]
        )
        images = data.train.x[rows].double()
        self.shape, self.rows = tuple(images.shape[1:]), data.train.indices[rows]
        images = images.flatten(1)
        self.mean = images.mean(dim=0)
        self.X = images - self.mean
        self.y = label[rows] if classes else 2 * label[rows] - 1
        self.held = data.test.x.double().flatten(1) - self.mean


def binary(name: str, label: torch.Tensor) -> torch.Tensor:
    """Return 0 and 1: odd classes against even ones; in CIFAR-10 vehicles against animals."""
    if name == "cifar10":
        return torch.isin(label, torch.tensor(VEHICLES)).long()
    return label % 2


def trained(problem: Problem, attack: str, config: Config, seed: int, **changed):
    """Train the network that an attack is aimed at."""
    settings = _SETTINGS[attack] | changed
    settings["init"] = settings["init"] or problem.X.shape[1] ** -0.5
    return train_two_layer(
        problem.X, problem.y, width=config.width * (2 if attack == "start" else 1), seed=seed,
        steps=round(_STEPS[attack] * config.training), **settings,
    )  # fmt: skip


def aimed(run, attack: str, start: TwoLayer | None = None):
    """Return the objective of an attack in float32, and the directions to search in."""
    start = (start or run.start) if attack == "start" else None
    objective = ShallowObjective(
        _single(run.network), start=start and _single(start), sharpness=SHARPNESS
    )
    moved = run.network if start is None else run.network.minus(start)
    return objective, row_space(moved.W)


def _single(network: TwoLayer) -> TwoLayer:
    return TwoLayer(*(part.float() for part in network))


def candidates(problem: Problem, attack: str, count: int) -> torch.Tensor:
    """Return labels for so many candidates, each as often as the others."""
    kinds = torch.arange(10) if attack == "decay" else torch.tensor([-1, 1])
    return kinds.repeat(count // len(kinds) + 1)[:count]


def growth(config: Config, direction: str, most: int) -> SampleSplitting:
    """Return the rule by which candidates grow in number."""
    return SampleSplitting(
        every=max(1, config.steps * 4 // 25), until=0.7, threshold=0.0, step=0.01, share=0.25,
        most=most, direction=direction,
    )  # fmt: skip


# --- attacks ----------------------------------------------------------------------------------


def _search(objective, basis, problem, attack, config, count, seed, splitting=None, **changed):
    options = SEARCH | {"steps": config.steps} | changed
    if attack == "start":
        options["least"] = None
    return reconstruct(
        objective, candidates(problem, attack, count), inputs=problem.X.shape[1], basis=basis,
        splitting=splitting, seed=seed, **options,
    )  # fmt: skip


def _scores(found, problem: Problem, full: bool = False) -> dict:
    X = found.X.double()
    best = match(X, problem.X)
    row = {
        "scores": _short(best.score),
        "found": best.found(0.9),
        "distinct": best.distinct,
        "residual": _short(found.residual),
        "candidates": len(X),
        "placebo": _short(match(X, problem.held[: len(problem.X)]).median()),
    }
    if full:
        guess = X[best.guess]
        shown = (guess + problem.mean).clamp(0, 1).reshape(-1, *problem.shape)
        truth = (problem.X + problem.mean).reshape(-1, *problem.shape)
        row |= {
            "ssim": _short(ssim(shown, truth)),
            "distance": _short(distance(guess, problem.X).diagonal()),
            "losses": _short(found.losses),
            "events": [_short(list(event)) for event in found.events],
        }
    return row


def _arms(config: Config, attack: str, name: str, seed: int) -> dict:
    problem = Problem(name, config.n, seed, attack == "decay")
    run = trained(problem, attack, config, seed)
    objective, basis = aimed(run, attack)
    n = config.n
    few, grown, many = (round(share * n) for share in (config.few, config.grown, config.many))
    result = _facts(run, attack, problem, objective, basis)
    result["arms"] = {arm: [] for arm in ARMS}
    guesses = {}
    for start in range(config.starts):
        for arm in ARMS:
            count = grown if arm == "fixed" else few
            rule = None
            if arm not in ("none", "fixed"):
                direction = {"split": "eigenvector"}.get(arm, arm)
                rule = growth(config, direction, grown)
            found = _search(objective, basis, problem, attack, config, count, start, rule)
            result["arms"][arm].append(_scores(found, problem, full=start == 0))
            if start == 0:
                guesses[arm] = found
    result["many"] = {}
    for arm in ("none", "split"):
        rule = growth(config, "eigenvector", 3 * n) if arm == "split" else None
        found = _search(objective, basis, problem, attack, config, many, 0, rule)
        result["many"][arm] = _scores(found, problem, full=True)
        guesses[f"many {arm}"] = found
    if attack == "start":
        wrong = trained(problem, attack, replace(config, training=10), seed + 1000).start
        other, directions = aimed(run, attack, wrong)
        # An attacker with a wrong start has no better basis than the row space of what he sees.
        found = _search(other, directions[: len(basis)], problem, attack, config, grown, 0)
        result["wrong start"] = _scores(found, problem)
    if attack == "margin":
        found = _search(objective, None, problem, attack, config, many, 0, spread=0.05)
        result["pixels"] = _scores(found, problem, full=True)
    if name == config.pictures:
        result["pictures"] = _pictures(problem, guesses)
    return result


def _facts(run, attack, problem, objective, basis) -> dict:
    """Describe the network, the truth under its own objective, and what needs no attack."""
    held, moved = problem.held, run.network if attack != "start" else run.network.minus(run.start)
    facts = {
        "rows": problem.rows,
        "margin": _short(run.margins.min()),
        "loss": float(f"{float(run.losses[-1]):.3g}"),
        "moved": _short(moved.size() / run.network.size()),
        "dimensions": len(basis),
        "singular values": _short(torch.linalg.svdvals(moved.W)[: len(problem.X) + 5]),
        "truth": _short(_truth(objective, problem)),
        "truth with kinks": _short(_truth(objective.with_sharpness(math.inf), problem)),
        "baselines": {
            "rows": _short(match(moved.W, problem.X, signed=False).score),
            "held out": _short(match(held, problem.X).score),
            "few held out": _short(match(held[: len(problem.X)], problem.X).score),
        },
    }
    if attack == "margin":
        network = run.network
        fit = relu_multipliers(
            network.W, network.V[0], problem.X, problem.y.double(), bias=network.bias, steps=2000
        )
        facts |= {
            "plain": _short(fit.plain_residual),
            "clarke": _short(fit.residual),
            "kinks": _short(fit.kinks),
            "multipliers": _short(fit.multipliers),
        }
    return facts


def _truth(objective, problem: Problem) -> float:
    """Return the residual of the true samples with the best multipliers of any sign."""
    X = problem.X.to(objective.like)
    kernel, along = (t.double() for t in objective.kernel(X, problem.y))
    left = objective.square - float(along @ torch.linalg.lstsq(kernel, along[:, None])[0][:, 0])
    return math.sqrt(max(0.0, left) / objective.square)


def _pictures(problem: Problem, guesses: dict) -> dict:
    """Return the matched guesses of every sample as bytes."""
    kept = {}
    for arm in ("none", "split", "fixed", "many none", "many split"):
        X = guesses[arm].X.double()
        guess = X[match(X, problem.X).guess]
        low, high = (guess.quantile(q, dim=1, keepdim=True) for q in (0.01, 0.99))
        grey = ((guess - low) / (high - low).clamp(min=1e-9)).clamp(0, 1)
        kept[arm] = (255 * grey[:: max(1, len(grey) // 20)]).round().int().tolist()
    return kept


def _size(config: Config, attack: str, name: str, seed: int) -> dict:
    """Attack a network of another number of samples, with candidates to spare."""
    problem = Problem(name, config.n, seed, attack == "decay")
    run = trained(problem, attack, config, seed)
    objective, basis = aimed(run, attack)
    result = _facts(run, attack, problem, objective, basis)
    count = round(config.many * config.n)
    found = _search(objective, basis, problem, attack, config, count, 0)
    return result | {"attack": _scores(found, problem, full=True)}


def _init(config: Config, init: float, decay: float, seed: int) -> dict:
    """Attack binary networks by the size of their start, with and without weight decay."""
    small = replace(config, n=min(20, config.n), training=2 * config.training)
    problem = Problem(config.data[0], small.n, seed, False)
    settings = {"init": init, "head": 1.0, "weight_decay": decay}
    settings |= {"lr": 0.1, "boost": 1.0} if decay else {}
    run = trained(problem, "margin", small, seed, **settings)
    objective, basis = aimed(run, "margin")
    result = _facts(run, "margin", problem, objective, basis)
    found = _search(objective, basis, problem, "margin", small, 2 * small.n, 0)
    return result | {"attack": _scores(found, problem)}


def _deep(config: Config, seed: int) -> dict:
    """Attack a binary network of two hidden layers, by differentiating twice."""
    small = replace(config, n=min(20, config.n), steps=config.deep)
    problem = Problem(config.data[0], small.n, seed, False)
    torch.manual_seed(seed)
    width = config.width
    model = nn.Sequential(
        nn.Linear(problem.X.shape[1], width), nn.ReLU(), nn.Linear(width, width, bias=False),
        nn.ReLU(), nn.Linear(width, 1, bias=False),
    )  # fmt: skip
    for parameter in model[0].parameters():
        nn.init.normal_(parameter, std=1e-4)
    X, y = problem.X.float(), problem.y.float()
    for _ in range(min(3000, config.training)):
        loss = nn.functional.softplus(-y * model(X)[:, 0]).mean()
        rate = 0.01 * min(1e4, 1 / max(loss.item(), 1e-30))
        slopes = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, slope in zip(model.parameters(), slopes, strict=True):
                parameter -= rate * slope
    W = model[0].weight.detach()
    basis, objective = row_space(W), NetworkObjective(model, sharpness=SHARPNESS)
    result = {
        "margin": _short((y * model(X)[:, 0]).min()),
        "plain": _short(model_multipliers(model, X, y).residual),
        "dimensions": len(basis),
        "baselines": {
            "rows": _short(match(W.double(), problem.X, signed=False).score),
            "held out": _short(match(problem.held, problem.X).score),
        },
        "arms": {},
    }
    for arm, count in (("none", small.n), ("split", small.n), ("fixed", round(1.5 * small.n))):
        rule = growth(small, "eigenvector", round(1.5 * small.n)) if arm == "split" else None
        found = _search(objective, basis, problem, "margin", small, count, 0, rule)
        result["arms"][arm] = _scores(found, problem, full=True)
    return result
