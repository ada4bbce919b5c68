"""Membership attacks and influence beside their definitions, and ensembles beside a plain loop."""

import tracemalloc

import joblib
import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch.nn.functional import cross_entropy

from flatbook import TrainConfig, balanced_design, build, influence, train_ensemble
from flatbook.data import load
from flatbook.likelihood import _beaten, lira, rmia

POINTS, POPULATION, REFERENCES = 20_000, 20_000, 8
COUNTING = "RMIA's counting, 20,000 × 20,000"
WHOLE = "RMIA, 20,000 × 20,000, 8 references"
LIRA = "LiRA, 64 models × 20,000 points × 2 queries"
INFLUENCE = "influence, 400 models × 5,000 × 1,000"
CNNS, MLPS = "64 small CNNs", "4 tiny MLPs"
_ROWS = 32  # of the pairwise matrix at a time: few enough to fit a cache, which is twice as fast


@pytest.fixture
def measured(compare, benchmark):
    """Time a function; then call it once more for the most memory that its arrays took."""

    def measured(group, name, function, *, rounds, warmup=1):
        found = compare(group, name, function, rounds=rounds, warmup=warmup)
        tracemalloc.start()
        function()
        benchmark.extra_info["peak_bytes"] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    return measured


# RMIA


def confidences():
    """Return confidences of rounded logits, so that ratios are tied in places."""
    random = np.random.default_rng(0)
    design = balanced_design(REFERENCES, POINTS)

    def softened(*shape):
        return 1 / (1 + np.exp(-random.normal(1, 1.5, shape).round(2)))

    return (
        softened(POINTS),
        softened(REFERENCES, POINTS),
        design,
        softened(POPULATION),
        softened(REFERENCES, POPULATION),
    )


def pairwise(x, z, gamma):
    """Compare each ratio with each of the population, some rows of the matrix at a time."""
    counts = np.empty(len(x), dtype=np.intp)
    for start in range(0, len(x), _ROWS):
        rows = x[start : start + _ROWS, None]
        counts[start : start + _ROWS] = np.count_nonzero(rows / z > gamma, axis=1)
    return counts


def ratios(target, references, design, population, ref_population):
    out = ~design
    of_x = target / ((references * out).sum(axis=0) / out.sum(axis=0))
    return of_x, population / ref_population.mean(axis=0)


@pytest.mark.parametrize("name", ["flatbook", "pairwise"])
def bench_rmia_counting(measured, name):
    x, z = ratios(*confidences())
    count = {"flatbook": _beaten, "pairwise": pairwise}[name]
    rounds = 3 if name == "pairwise" else 30
    found = measured(COUNTING, name, lambda: count(x, z, 1.2), rounds=rounds, warmup=rounds > 3)
    np.testing.assert_array_equal(found, _beaten(x, z, 1.2))


@pytest.mark.parametrize("name", ["flatbook", "pairwise"])
def bench_rmia(measured, name):
    """At a = 1 and γ = 1 both take the same ratios, so that scores agree to the last bit."""
    data = confidences()

    def longhand():
        return pairwise(*ratios(*data), 1.0) / POPULATION

    attack = longhand if name == "pairwise" else lambda: rmia(*data)
    rounds = 3 if name == "pairwise" else 20
    found = measured(WHOLE, name, attack, rounds=rounds, warmup=rounds > 3)
    np.testing.assert_array_equal(found, rmia(*data))


# LiRA


def gathered_medians(phi, shadows, design):
    """Do as the code published with the paper does, its loops over points vectorised."""
    scores = 0
    for sign, chosen in ((1, design), (-1, ~design)):
        models = np.argsort(~chosen, axis=0, kind="stable")[: chosen.sum(axis=0).min()]
        kept = np.take_along_axis(shadows, models[..., None], axis=0)
        law = np.median(kept, axis=0), kept.std(axis=0) + 1e-30
        scores = scores + sign * norm.logpdf(phi, *law)
    return scores.mean(axis=1)


def masked_means(phi, shadows, design):
    """Do as the paper writes, with nan for models on the other side."""
    scores = 0
    for sign, chosen in ((1, design), (-1, ~design)):
        kept = np.where(chosen[..., None], shadows, np.nan)
        law = np.nanmean(kept, axis=0), np.nanstd(kept, axis=0)
        scores = scores + sign * norm.logpdf(phi, *law)
    return scores.mean(axis=1)


LIRAS = {
    "flatbook": lambda *data: lira(*data),
    "masked means": masked_means,
    "flatbook, reference": lambda *data: lira(*data, variant="reference"),
    "gathered medians": gathered_medians,
}


@pytest.mark.parametrize("name", LIRAS)
def bench_lira(measured, name):
    random = np.random.default_rng(0)
    design = balanced_design(64, POINTS)
    shadows = random.normal(size=(64, POINTS, 2)) + design[..., None]
    phi = random.normal(size=(POINTS, 2))
    found = measured(LIRA, name, lambda: LIRAS[name](phi, shadows, design), rounds=7)
    variant = "paper" if name in ("flatbook", "masked means") else "reference"
    np.testing.assert_allclose(
        found, lira(phi, shadows, design, variant=variant), rtol=1e-9, atol=1e-9
    )


# Influence


def one_by_one(eval_correct, design):
    """Average over models with and without each training point in turn."""
    found = np.empty((design.shape[1], eval_correct.shape[1]))
    for point, seen in enumerate(design.T):
        found[point] = eval_correct[seen].mean(axis=0) - eval_correct[~seen].mean(axis=0)
    return found


@pytest.mark.parametrize("name", ["flatbook", "loop over training points"])
def bench_influence(measured, name):
    random = np.random.default_rng(0)
    design = balanced_design(400, 5_000)
    correct, eval_correct = random.random((400, 5_000)) < 0.8, random.random((400, 1_000)) < 0.8
    ours = name == "flatbook"

    def estimate():
        if ours:
            return influence(correct, eval_correct, design)
        return one_by_one(eval_correct, design)

    found = measured(INFLUENCE, name, estimate, rounds=9 if ours else 1, warmup=ours)
    np.testing.assert_allclose(found, influence(correct, eval_correct, design), atol=1e-12)


# Ensembles


@pytest.fixture
def default_threads():
    """Give torch a thread for each processor, as it does by itself, and take them away again."""
    torch.set_num_threads(joblib.cpu_count())
    yield
    torch.set_num_threads(1)


def plain_loop(make, x, y, design, config, eval_x):
    """Train by hand: torch's SGD on minibatches, then ask about all points in blocks."""
    logits, eval_logits = [], []
    for seed, row in enumerate(design):
        model = make(seed).train()
        own = torch.from_numpy(np.flatnonzero(row))
        optimizer = torch.optim.SGD(
            model.parameters(),
            lr=config.lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
        )
        for _ in range(config.epochs):
            for batch in own[torch.randperm(len(own))].split(config.batch_size):
                optimizer.zero_grad()
                cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
        model.eval()
        with torch.no_grad():
            logits.append(torch.cat([model(part) for part in x.split(512)]))
            eval_logits.append(torch.cat([model(part) for part in eval_x.split(512)]))
    return torch.stack(logits), torch.stack(eval_logits)


def contest(compare, group, name, options, problem, *, rounds):
    """Train an ensemble anew in each round."""
    data, make, design, config, least = problem
    x, y, eval_x = data.train.x, data.train.y, data.test.x
    if name.startswith("plain"):

        def train():
            with torch.random.fork_rng():
                torch.manual_seed(0)
                return plain_loop(make, x, y, design, config, eval_x)[0]

    else:

        def train():
            return train_ensemble(
                make, x, y, design, config, eval_x=eval_x, progress=False, **options
            ).logits

    logits = compare(group, name, train, rounds=rounds, warmup=0)
    assert logits.shape == (*design.shape, 10)
    right = (logits.argmax(2) == y).numpy()
    assert right[design].mean() > least  # it learnt something


CNN_WORK = {
    "plain loop": {},
    "joblib, 2 workers": {"backend": "joblib", "workers": 2},
}
MLP_WORK = {"plain loop": {}, "auto": {"backend": "auto"}}


@pytest.mark.parametrize("name", CNN_WORK)
def bench_cnns(compare, default_threads, name):
    """The only round: the start of the two processes, which stay for a second one, counts."""
    data = load("fashion-mnist", n_train=600, n_test=200)
    config = TrainConfig(epochs=20, batch_size=64, lr=0.05)

    def make(seed):
        return build("small-cnn", num_classes=10, in_channels=1, width=16, seed=seed)

    problem = data, make, balanced_design(64, 600), config, 0.3
    contest(compare, CNNS, name, CNN_WORK[name], problem, rounds=1)


@pytest.mark.parametrize("name", MLP_WORK)
def bench_mlps(compare, default_threads, name):
    data = load("fashion-mnist", n_train=400, n_test=100)
    config = TrainConfig(epochs=5, batch_size=32, lr=0.05)

    def make(seed):
        options = {"in_channels": 1, "input_shape": (1, 28, 28), "width": 16}
        return build("mlp", num_classes=10, seed=seed, **options)

    problem = data, make, balanced_design(4, 400), config, 0.4
    contest(compare, MLPS, name, MLP_WORK[name], problem, rounds=9)
