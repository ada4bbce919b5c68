"""The recorded attacks: sets that are as they should be, arms that compare like with like."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from flatbook.data import load
from flatbook.experiments import execute, reconstruction
from flatbook.reconstruction import TwoLayer

TINY = reconstruction.Config(
    seeds=1, starts=2, data=("fashion-mnist",), pictures="fashion-mnist", n=10, smaller=(),
    larger=(12,), width=60, training=300, steps=60, deep=20,
)  # fmt: skip


@pytest.fixture
def tiny(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setitem(reconstruction.CONFIGS, "quick", TINY)


def test_training_sets_are_balanced_and_centred():
    for classes, kinds in ((False, {-1: 10, 1: 10}), (True, dict.fromkeys(range(10), 2))):
        problem = reconstruction.Problem("fashion-mnist", 20, 0, classes)
        values, counts = problem.y.unique(return_counts=True)
        assert dict(zip(values.tolist(), counts.tolist(), strict=True)) == kinds
        assert problem.X.mean(dim=0).abs().max() < 1e-12
        images = load("fashion-mnist").train
        at = {int(row): k for k, row in enumerate(images.indices)}
        truth = images.x[[at[int(row)] for row in problem.rows]].double().flatten(1)
        assert torch.allclose(problem.X + problem.mean, truth)
        assert len(problem.held) == 2000


def test_photographs_are_vehicles_or_animals():
    label = torch.arange(10)
    assert reconstruction.binary("cifar10", label).nonzero()[:, 0].tolist() == [0, 1, 8, 9]
    assert reconstruction.binary("mnist", label).tolist() == [0, 1] * 5


def test_the_truth_explains_a_network_made_of_it():
    """A network whose weights are a sum of its samples' gradients leaves no residual."""
    problem = reconstruction.Problem("fashion-mnist", 10, 0, False)
    zero = TwoLayer(torch.zeros(40, 784), torch.zeros(40), torch.zeros(1, 40))
    random = torch.Generator().manual_seed(0)
    network = TwoLayer(*(torch.randn(p.shape, generator=random) / 10 for p in zero))
    X = problem.X.float()
    multipliers = torch.rand(10, generator=random)
    slopes = torch.autograd.functional.jacobian(
        lambda *parts: made_of(TwoLayer(*parts), X, multipliers, problem.y), tuple(network)
    )
    start = TwoLayer(*(p - s for p, s in zip(network, slopes, strict=True)))
    objective = reconstruction.ShallowObjective(network, start=start, sharpness=5.0)
    assert reconstruction._truth(objective, problem) < 1e-2
    other = reconstruction.Problem("fashion-mnist", 10, 1, False)
    assert reconstruction._truth(objective, other) > 0.1


def made_of(network, X, multipliers, y):
    z = torch.nn.functional.softplus(X @ network.W.T + network.bias, beta=5.0, threshold=40.0)
    return (multipliers * y) @ (z @ network.V.T)[:, 0]


def test_arms_grow_to_the_same_number():
    config = replace(TINY, n=50, steps=2000)
    rule = reconstruction.growth(config, "random", 60)
    count = 25
    for _ in range(int(rule.until * config.steps) // rule.every):
        count = min(60, count + int(rule.share * count))
    assert 55 <= count <= 60
    assert rule.share <= 0.5


def test_a_tiny_run(tiny, tmp_path):
    run = execute("reconstruction", "quick", out=tmp_path / "whole.json", workers=0)
    values = run.values
    assert {key.split("-")[0] for key in values} == {*reconstruction.ATTACKS, "init", "deep"}
    arms = values["start-fashion-mnist-0"]
    assert set(arms["arms"]) == set(reconstruction.ARMS)
    for rows in arms["arms"].values():
        assert len(rows) == TINY.starts
        assert all(len(row["scores"]) == 10 for row in rows)
    assert arms["arms"]["none"][0]["candidates"] == 5
    assert arms["arms"]["fixed"][0]["candidates"] == 12
    assert np.median(arms["wrong start"]["scores"]) < 0.3  # nothing is found without the start
    assert arms["wrong start"]["residual"] > 0.9
    assert {"plain", "clarke", "kinks"} <= set(values["margin-fashion-mnist-0"])
    assert "pictures" in values["margin-pictures-0"]
    kept = np.array(values["margin-pictures-0"]["pictures"]["none"])
    assert 0 <= kept.min() <= kept.max() <= 255
    assert kept.shape[1] == 784
    for key, unit in values.items():
        stored = "pictures" in unit
        assert stored == ("arms" in unit and not key.startswith("deep"))
    json.dumps(values)
