"""The recorded experiments on unlearning: their pieces by hand, and tiny runs."""

import dataclasses

import numpy as np
import pytest
import torch

from flatbook import experiments
from flatbook.experiments import execute, unlearning
from flatbook.experiments.unlearning import (
    METHODS,
    SETS,
    TRIALS,
    VARIANTS,
    Cell,
    Config,
    attacked_again,
    baselines,
    data_of,
    model_of,
    splits,
)
from flatbook.unlearning import tug_of_war
from flatbook.unlearning.loop import METHODS as KNOWN

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = Config(
    seeds=3, dataset="digits", images=60, tests=40, share=0.1, model="mlp", width=8, epochs=4,
    lr=0.1, batch_size=16, unlearn_epochs=1, trials=2, scorers=4, scorer=("mlp", 8),
    scorer_epochs=3, methods=("finetune", "neg_grad", "influence", "sharp_minmax"),
    optimizers=("sgd", "asam"), pretraining=("sgd", "asam"), pretraining_sets=("mid",),
    variants=("minmax_released",), alphas=(0.9,), fractions=(0.2,), flatness=(8, 2),
    relearn_epochs=2,
)  # fmt: skip


def test_every_method_has_equally_many_settings():
    assert set(METHODS) == set(KNOWN)
    assert set(TRIALS) == set(METHODS) | set(VARIANTS)
    assert {len(settings) for settings in TRIALS.values()} == {6}
    for name, settings in TRIALS.items():
        kind = KNOWN["sharp_minmax" if name in VARIANTS else name]
        options = {field.name for field in dataclasses.fields(kind)}
        for setting in settings:
            kind(**{k: v for k, v in setting.items() if k != "lr"} | VARIANTS.get(name, {}))
            assert set(setting) - {"lr"} <= options
        assert len({tuple(s.items()) for s in settings}) == len(settings)


def test_configurations_have_enough_seeds():
    for module in ("unlearning", "unlearning-resnet"):
        for config in experiments.get(module).CONFIGS.values():
            assert config.seeds >= 3
            assert config.trials <= 6


def test_models_without_a_set_never_saw_it(tmp_path):
    forget = {"high": [1, 3, 5]}
    data = data_of(TINY)
    model = model_of(TINY, tmp_path, forget, "sgd", "high", 0)
    again = model_of(TINY, tmp_path, forget, "sgd", "high", 0)  # from the file
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=1))
    config = dataclasses.replace(TINY)
    other = model_of(config, tmp_path / "else", {"high": [2, 3, 5]}, "sgd", "high", 0)
    assert not torch.equal(model.head.weight, other.head.weight)
    sets = splits(data, forget["high"])
    assert [len(s) for s in sets.values()] == [57, 3, 40]
    assert torch.equal(sets["forget"].tensors[0], data.train.x[[1, 3, 5]])


def entries(**values):
    return {"signals": [0.0, 1.0], "retain": 1.0, "forget": 1.0, "test": 1.0} | values


def test_baselines_are_of_doing_nothing_and_of_another_seed():
    config = dataclasses.replace(TINY, seeds=2, sets=("high",))
    originals = {
        "sgd-all-0": {"high": entries()},
        "sgd-all-1": {"high": entries(forget=0.5)},
        "sgd-high-0": {"high": entries(forget=0.5)},
        "sgd-high-1": {"high": entries(forget=0.25)},
    }
    assert baselines(config, originals) == {
        "high": {"none": [0.5, 0.75], "retrained": [0.75, 0.75]}
    }


def test_the_attack_finds_models_that_forgot_nothing():
    random = np.random.default_rng(0)
    config = dataclasses.replace(
        TINY, sets=("high",), methods=("finetune",), optimizers=("sgd",), variants=()
    )
    never, kept = random.normal(0, 1, (3, 40)), random.normal(5, 1, (3, 40))
    originals = {f"sgd-high-{s}": {"high": entries(signals=never[s])} for s in range(3)}
    originals |= {f"sgd-all-{s}": {"high": entries(signals=kept[s])} for s in range(3)}
    done = {
        f"grid-high-finetune-sgd-{s}": entries(signals=random.normal(0, 1, 40)) for s in range(3)
    }
    areas = attacked_again(config, originals, done)
    assert np.mean(areas["high-none-sgd"]) > 0.99
    assert abs(np.mean(areas["high-finetune-sgd"]) - 0.5) < 0.15


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setattr(unlearning, "CONFIGS", {"quick": TINY})
    folder = tmp_path_factory.mktemp("records")
    yield execute("unlearning", "quick", out=folder, workers=0)
    patch.undo()


def test_a_run_holds_every_cell(record):
    values = record.values
    keys = {
        f"{where}-{method}-{optimizer}"
        for where in SETS
        for method in TINY.methods
        for optimizer in (("sgd",) if method == "influence" else ("sgd", "asam"))
    }
    assert set(values["grid"]) == keys
    assert set(values["variants"]) == {f"{where}-minmax_released-asam" for where in SETS}
    assert set(values["tuned"]) == keys | set(values["variants"])
    assert set(values["pretraining"]) == {
        "mid-neg_grad-sgd", "mid-neg_grad-asam", "mid-neg_grad-sgd-from-asam",
        "mid-neg_grad-asam-from-asam",
    }  # fmt: skip
    assert len(values["alphas"]) == 4
    assert set(values["landscapes"]) == {"sgd", "asam"}
    assert set(values["u_lira"]) == set(values["grid"]) | set(values["variants"]) | {
        f"{where}-none-sgd" for where in SETS
    }


def test_the_tug_of_war_is_against_the_twin_without_the_set(record):
    values = record.values
    for key, cell in values["grid"].items():
        where = key.split("-")[0]
        for seed in range(3):
            own = {name: cell[name][seed] for name in ("retain", "forget", "test")}
            goal = values["originals"][f"sgd-{where}-{seed}"][where]
            assert cell["tow"][seed] == pytest.approx(tug_of_war(own, goal))


def test_the_tuned_setting_is_the_best_of_its_trials(record):
    for cell in record.values["tuned"].values():
        best = max(cell["trials"], key=lambda trial: trial["tow"])
        assert cell["best"].items() <= best.items()
        assert len(cell["trials"]) == TINY.trials


def test_nothing_private_is_recorded(record):
    assert "signals" not in str(record.values)


def test_originals_are_left_as_they_were(tmp_path):
    forget = {"high": [1, 3, 5]}
    before = model_of(TINY, tmp_path, forget, "sgd", None, 0)
    cell = Cell("high", "neg_grad", "sgd", settings=(("lr", 0.5), ("alpha", 0.5)))
    done, _ = unlearning.forgotten(TINY, tmp_path, cell, forget, 0)
    after = model_of(TINY, tmp_path, forget, "sgd", None, 0)
    assert torch.equal(before.head.weight, after.head.weight)
    assert not torch.equal(before.head.weight, done.model.head.weight)
