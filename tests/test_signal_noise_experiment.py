"""The recorded experiment on signal and noise: its parts by hand, and a tiny run."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from flatbook.experiments import _signal_unlearning as unlearning
from flatbook.experiments import execute, rounded, signal_noise
from flatbook.theory.coordinates import outputs
from flatbook.theory.population import evaluate
from flatbook.theory.settings import Setting, along, crossing
from flatbook.theory.signal_noise import memorization_ratio
from flatbook.theory.wishart import sample_problems

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = replace(
    signal_noise.CONFIGS["quick"],
    seeds=2,
    dims=(100, 200),
    samples=(5, 10),
    map_size=2,
    map_steps=20,
    strengths=4,
    ratios=2,
    long=20,
    budgets=(10, 20),
    alphas=6,
    alpha_seeds=1,
    alpha_dims=(10, 20),
    alpha_samples=(10, 20),
    unlearning=40,
    draws=20,
)


# --- settings ----------------------------------------------------------------------------------


def test_a_setting_draws_one_problem_with_several_signals():
    setting = Setting(n=4, d=30, patches=3, noise=2.0, filters=2, init=0.5)
    problems = setting.problems([1.0, 5.0], seed=3)
    expected = sample_problems(
        4, d=[30], patches=3, signal=5.0, noise=2.0, filters=2, init=0.25 / math.sqrt(30), seed=3
    )
    assert torch.equal(problems.gram[0], problems.gram[1])
    for name in ("gram", "response", "y", "true_y", "signal", "noise", "patches"):
        torch.testing.assert_close(getattr(problems[[1]], name), getattr(expected, name))


def test_rates_and_radii_are_as_they_say():
    setting = Setting(n=40, d=2000, patches=3, noise=2.0, filters=5, init=0.2, batch=10)
    noise = 2**2 * 2**2 * 2000 / 10
    assert setting.rate(1.0) == pytest.approx(2.5 / noise)
    assert setting.rate(60.0) == pytest.approx(2.5 / 3600)
    assert setting.scale() == pytest.approx(50**0.25 * 2 * 2)
    init = 0.2 / 2 / math.sqrt(2000)
    radius = setting.radius(np.array([3.0, 4.0]))
    np.testing.assert_allclose(memorization_ratio(radius, init, 5, 10), [3.0, 4.0])
    assert replace(setting, batch=None).size == 40


def test_training_goes_on_from_budget_to_budget():
    setting = Setting(n=5, d=50, signal=2.0, filters=2)
    problems = setting.problems([2.0], seed=0)
    path = list(along(setting, problems, (3, 10), 4.0))
    for budget, at in zip((3, 10), path, strict=True):
        once = setting.train(problems, budget, 4.0)
        torch.testing.assert_close(at.zeta, once.zeta)
        torch.testing.assert_close(at.kappa, once.kappa)
    assert not torch.equal(path[1].zeta, setting.train(problems, 10).zeta)


def test_curves_cross_where_they_are_last_above():
    assert crossing([0, 1, 2, 3], [5, 0, 4, 2], 3) == 2.5
    assert math.isnan(crossing([0, 1], [0, 0], 1))
    assert math.isnan(crossing([0, 1], [0, 2], 1))


# --- unlearning --------------------------------------------------------------------------------


def test_fresh_margins_are_those_of_the_population():
    problems = sample_problems(6, d=[40, 80], patches=3, signal=1.0, noise=1.0, filters=3)
    run = Setting().train(problems, 20, every=10)
    margins = unlearning.fresh_margins(problems, run.path_kappa, run.path_zeta, 20_000)
    ours = evaluate(problems, run.path_kappa, run.path_zeta, draws=20_000)
    assert margins.shape == (20_000, 3, 2)
    for values, expected, std in (
        (margins, ours.margin, 0 * ours.error_std),
        (margins < 0, ours.error, ours.error_std),
        (np.logaddexp(0, -margins), ours.loss, ours.loss_std),
    ):
        spread = np.hypot(std.numpy(), values.std(axis=0) / math.sqrt(20_000))
        assert (np.abs(values.mean(axis=0) - expected.numpy()) < 4.5 * spread).all()


def test_networks_are_described_by_their_margins():
    setting = Setting(n=10, d=200, signal=3.0)
    problems, forget = setting.problems([3.0] * 2, seed=1), unlearning.forgotten(10)
    assert forget.tolist() == [True] * 2 + [False] * 8
    run = setting.train(problems, 40, torch.tensor([0.0, 4.0]))
    found = unlearning.described(TINY, problems, forget, run.kappa, run.zeta)
    margins = (outputs(problems, run.kappa, run.zeta) * problems.y).numpy()
    np.testing.assert_allclose(found["forget_margin"], margins[:, :2].mean(axis=1))
    np.testing.assert_allclose(found["retain_margin"], margins[:, 2:].mean(axis=1))
    np.testing.assert_allclose(found["retain_right"], (margins[:, 2:] > 0).mean(axis=1))
    np.testing.assert_allclose(found["gap"], found["forget_margin"] - found["test_margin"])
    fresh = unlearning.fresh_margins(problems, run.kappa, run.zeta, TINY.draws)
    wins = (margins[None, :, :2] > fresh[:, :, None]).mean(axis=(0, 2))
    np.testing.assert_allclose(found["auc"], wins)
    assert wins[0] > 0.9  # GD has memorized


def test_noise_is_counted_by_class():
    problems = Setting(n=10).problems([1.0], seed=0)
    forget = unlearning.forgotten(10)
    zeta0 = torch.ones(1, 2, 10, 10).double()
    zeta = zeta0.clone()
    for i, y in enumerate(problems.y[0].tolist()):
        own = 0 if y > 0 else 1
        zeta[0, own, :, i] += 1.0 if forget[i] else 2.0
        zeta[0, 1 - own, :, i] += 3.0 if forget[i] else 4.0
    assert unlearning.changed(problems, forget, zeta, zeta0) == {
        "forget_own": [1.0],
        "retain_own": [2.0],
        "forget_opposite": [3.0],
        "retain_opposite": [4.0],
    }


def test_alpha_is_searched_up_to_one():
    grid = unlearning.alpha_grid(signal_noise.CONFIGS["laptop"])
    assert len(grid) == signal_noise.CONFIGS["laptop"].alphas
    assert (np.diff(grid) > 0).all()
    assert grid[-1] == 1
    assert unlearning._from(np.array([0.2, 0.5, 1.0]), np.array([0.3, 0.2, 0.0])) == 0.75
    assert unlearning._from(np.array([0.2, 0.5, 1.0]), np.array([0.0, 0.1, 0.0])) == 0.2
    assert math.isnan(unlearning._from(np.array([0.2, 1.0]), np.array([0.0, 0.2])))


# --- runs --------------------------------------------------------------------------------------


def test_thresholds_are_found_where_they_are():
    """A positive control: just above the threshold GD errs less than it may, just below more."""
    config = replace(TINY, dims=(2000,), samples=(20,), strengths=15, draws=500)
    found = signal_noise.thresholds(config, 0)["gd"]["d-2000"]
    setting = Setting()
    problems = setting.problems([0.93 * found, 1.07 * found], 0)
    at = setting.train(problems, 6000, stop_loss=0.05)
    low, high = unlearning.error(config, problems, at)
    assert high < 0.1 < low
    assert 0.8 < found / setting.scale() < 1.2


def test_short_numbers():
    value = {"a": np.array([[1.23456789]]), "b": (1, 2.0), "c": float("nan")}
    short = rounded(value, 5)
    assert short["a"] == [[1.2346]]
    assert short["b"] == [1, 2.0]
    assert math.isnan(short["c"])


def test_a_tiny_run(monkeypatch, tmp_path):
    monkeypatch.setitem(signal_noise.CONFIGS, "quick", TINY)
    monkeypatch.setattr(signal_noise, "LABEL_STEPS", 10)
    monkeypatch.setattr(signal_noise, "WHEN", {"early": 2, "late": 4})
    for module in (signal_noise, unlearning):
        monkeypatch.setattr(module, "STEPS", 10)
    values = execute("signal-noise", out=tmp_path, workers=0).values
    assert list(values) == list(signal_noise.STUDIES)
    maps = values["phase"]["maps"]
    assert np.shape(maps["gd"]) == np.shape(maps["sam"]) == (2, 2)
    assert len(maps["dims"]) == len(maps["signals"]) == 2
    again = signal_noise.phase(TINY, 0)["maps"]["gd"], signal_noise.phase(TINY, 1)["maps"]["gd"]
    np.testing.assert_allclose(maps["gd"], np.mean(again, axis=0), atol=1e-4)
    for found in values["thresholds"]["gd"].values():
        assert len(found) == 2
    assert set(values["ratios"]["share"]) == {"u", "early", "late"}
    for setting in values["panels"].values():
        assert {*unlearning.WAYS, "steps", "retrained"} < set(setting)
        for way in unlearning.WAYS:
            assert len(setting[way]) == 2
            assert len(setting[way][0]["path"]["gap"]) == len(setting["steps"][0]) == 9
            assert setting[way][0]["path"]["forget_opposite"][0] == 0
    assert set(values["alphas"]) == {"10-10", "10-20", "20-10", "batch"}
    assert len(values["labels"]) == 9


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((3, [1.0], 0), "x"), (([1.0], None, 0), "values"), (([1.0], [1.0], "a"), "level")],
)
def test_crossing_refuses(arguments, name):
    with pytest.raises(ValueError, match=rf"^{name} must"):
        crossing(*arguments)
