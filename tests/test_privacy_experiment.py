"""The recorded experiment on privacy: its designs and comparisons by hand, and tiny runs."""

import dataclasses

import numpy as np
import pytest
import torch

from flatbook import experiments
from flatbook.audit import attack_each
from flatbook.checkpoints import CheckpointError
from flatbook.experiments import execute, privacy
from flatbook.experiments.privacy import Cell, Config, Pool, compared, shared_design, twins
from flatbook.membership import roc

pytestmark = pytest.mark.usefixtures("one_thread")

# LiRA with a spread for each point needs three models on each side.
POOL = Pool("fashion-mnist", 60, "mlp", 8, lr=0.05, batch_size=16)
TINY = Config(
    {"fashion": POOL, "digits": dataclasses.replace(POOL, dataset="digits", points=50)},
    (
        Cell("fashion", "sgd", None, 2, 6),
        Cell("fashion", "sam", 0.05, 2, 6),
        Cell("fashion", "sgd", None, 1, 6),
        Cell("digits", "sgd", None, 2, 4),
        Cell("digits", "sam", 0.05, 2, 4),
    ),
    n_eval=30,
    draws=20,
    tuning=(0.05,),
    tuning_seeds=2,
)
WORK = ("trained", "audited", "lira_forms", "tuned")
UNITS = 5 + 5 + 2 + 4


# --- designs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("models", "blocks"), [(2, 1), (6, 1), (16, 1), (32, 2), (64, 4), (20, 2), (34, 17), (40, 4)]
)
def test_each_point_is_in_half_of_each_block(models, blocks):
    design = shared_design(40, models)
    assert design.shape == (models, 40)
    for block in np.split(design, blocks):
        assert (block.sum(axis=0) == len(block) // 2).all()


def test_a_small_ensemble_shares_the_training_sets_of_a_large_one():
    large = shared_design(100, 64)
    for models in (16, 32, 48):
        np.testing.assert_array_equal(shared_design(100, models), large[:models])
    blocks = large.reshape(4, 16, 100)
    for i in range(4):
        for j in range(i):  # but blocks are drawn apart
            assert 0.4 < (blocks[i] == blocks[j]).mean() < 0.6


def test_cells_of_a_pool_share_designs_and_initial_weights(tmp_path):
    found = {cell.name: privacy.ensemble(TINY, cell, tmp_path)[1] for cell in TINY.cells}
    first, twin, short, digits, flat_digits = found.values()
    for other in (twin, short):
        assert torch.equal(first.design, other.design)
        assert first.seeds == other.seeds
        assert not torch.equal(first.logits, other.logits)
    assert torch.equal(digits.design, flat_digits.design)
    np.testing.assert_array_equal(first.design, shared_design(60, 6))
    assert first.eval_logits.shape == (6, 30, 10)
    assert digits.logits.shape == (4, 50, 10)


# --- summaries ---------------------------------------------------------------------------------


def test_success_is_that_of_the_curves():
    random = np.random.default_rng(0)
    members = shared_design(30, 4)
    scores = random.normal(size=(4, 30)) + members
    found, estimates = privacy.success(scores, members, privacy.resamples(4, 30, draws=10))
    areas = [roc(own, seen).auc for own, seen in zip(scores, members, strict=True)]
    assert found["auc_by_model"] == areas
    assert found["auc"][0] == pytest.approx(np.mean(areas))
    pooled = roc(scores, members)
    assert found["oracle_accuracy"] == pooled.balanced_accuracy
    for rate in privacy.RATES:
        assert found[f"tpr_{rate:g}"][0] == pooled.tpr_at(rate).value
    assert set(estimates) == {"auc", "tpr_0.001", "tpr_0.01"}


def test_by_side_averages_over_models():
    values = np.array([[1.0, 3.0, 5.0], [2.0, 2.0, 8.0]])
    design = np.array([[True, True, False], [True, False, False]])
    assert privacy._by_side(values, design) == {
        "member_mean": (2 + 2) / 2,
        "member_spread": (1 + 0) / 2,
        "stranger_mean": (5 + 5) / 2,
        "stranger_spread": (0 + 3) / 2,
    }


# --- comparison --------------------------------------------------------------------------------

FLAT = Cell("pool", "sam", 0.05, 20, 8)
GRID = Config(
    {"pool": POOL, "other": POOL},
    (
        FLAT,
        Cell("pool", "sgd", None, 5, 8),
        Cell("pool", "sgd", None, 10, 8),
        Cell("pool", "sgd", None, 20, 8),
        Cell("other", "sgd", None, 20, 8),
    ),
    n_eval=10,
)


def audit(accuracy, area):
    return {"resampled": {"train_accuracy": accuracy, "lira auc": area}}


def made_up(**changes):
    """Return audits of two resamples each, the sample's own value first."""
    audits = {
        "pool-sam0.05-20-8": audit([0.85, 0.75, 0.90], [0.60, 0.58, 0.62]),
        "pool-sgd-5-8": audit([0.60, 0.60, 0.60], [0.50, 0.50, 0.50]),
        "pool-sgd-10-8": audit([0.80, 0.70, 0.80], [0.60, 0.60, 0.64]),
        "pool-sgd-20-8": audit([0.90, 0.90, 1.00], [0.70, 0.72, 0.74]),
    }
    return audits | changes


def recorded(value, *draws):
    low, high = np.quantile(draws, [0.025, 0.975])
    return pytest.approx([value, low, high])


def test_a_cell_is_compared_with_sgd_at_equal_epochs():
    found = compared(GRID, FLAT, made_up())
    assert (found["models"], found["epochs"]) == (8, 20)
    assert found["difference"] == {
        "train_accuracy": recorded(-0.05, -0.15, -0.10),
        "lira auc": recorded(-0.10, -0.14, -0.12),
    }


def test_sgd_at_equal_training_accuracy_is_interpolated_in_each_resample():
    found = compared(GRID, FLAT, made_up())
    # Between 10 and 20 epochs, halfway; a quarter of the way; halfway.
    plain = 0.65, 0.60 + 0.12 / 4, 0.69
    assert found["matched"] == {
        "lira auc": recorded(0.60 - plain[0], 0.58 - plain[1], 0.62 - plain[2])
    }


def test_resamples_in_which_sgd_curves_cross_are_sorted_anew():
    """In the last resample 10 epochs fit better than 20."""
    crossed = audit([0.80, 0.70, 0.95], [0.60, 0.60, 0.80])
    twin = audit([0.90, 0.90, 0.85], [0.70, 0.72, 0.70])
    found = compared(GRID, FLAT, made_up(**{"pool-sgd-10-8": crossed, "pool-sgd-20-8": twin}))
    assert found["matched"]["lira auc"] == recorded(-0.05, -0.05, 0.62 - 0.75)


@pytest.mark.parametrize("accuracy", [0.55, 0.95])
def test_nothing_is_extrapolated(accuracy):
    beyond = audit([accuracy] * 3, [0.6] * 3)
    found = compared(GRID, FLAT, made_up(**{"pool-sam0.05-20-8": beyond}))
    assert found["matched"] == {}
    assert found["difference"]["train_accuracy"][0] == pytest.approx(accuracy - 0.9)
    alone = dataclasses.replace(GRID, cells=(GRID.cells[0], GRID.cells[3]))
    assert compared(alone, FLAT, made_up())["matched"] == {}


def test_the_reach_of_sgd_holds_its_ends():
    level = audit([0.9, 0.9, 1.0], [0.7, 0.7, 0.7])
    found = compared(GRID, FLAT, made_up(**{"pool-sam0.05-20-8": level}))
    assert found["matched"]["lira auc"] == recorded(0.0, -0.02, -0.04)


def test_twins_are_of_the_same_pool_the_nearest_in_epochs_first():
    assert [cell.epochs for cell in twins(GRID, FLAT)] == [20, 10, 5]
    assert {cell.pool for cell in twins(GRID, FLAT)} == {"pool"}
    assert FLAT.name == "pool-sam0.05-20"


def test_a_large_twin_is_cut_to_the_models_of_a_small_cell():
    large = dataclasses.replace(
        GRID,
        cells=(
            dataclasses.replace(FLAT, models=16),
            Cell("pool", "sgd", None, 20, 64),
        ),
    )
    audits = {
        "pool-sam0.05-20-16": audit([0.8] * 3, [0.6] * 3),
        "pool-sgd-20-64": audit([0.0] * 3, [0.0] * 3),
        "pool-sgd-20-16": audit([0.9] * 3, [0.5] * 3),
    }
    found = compared(large, large.cells[0], audits)
    assert found["models"] == 16
    assert found["difference"]["lira auc"] == recorded(0.1, 0.1)


def test_a_large_cell_is_matched_with_the_first_models_of_all():
    """The twin is as large, and SGD for fewer epochs is of 16 models alone."""
    cells = (
        dataclasses.replace(FLAT, models=32),
        Cell("pool", "sgd", None, 20, 32),
        Cell("pool", "sgd", None, 10, 16),
    )
    audits = {
        "pool-sam0.05-20-32": audit([0.5] * 3, [0.9] * 3),
        "pool-sgd-20-32": audit([0.6] * 3, [0.8] * 3),
        "pool-sam0.05-20-16": audit([0.85] * 3, [0.6] * 3),
        "pool-sgd-20-16": audit([0.9] * 3, [0.7] * 3),
        "pool-sgd-10-16": audit([0.8] * 3, [0.4] * 3),
    }
    found = compared(dataclasses.replace(GRID, cells=cells), cells[0], audits)
    assert (found["models"], found["matched_models"]) == (32, 16)
    assert found["difference"]["lira auc"] == recorded(0.1, 0.1)
    assert found["matched"]["lira auc"] == recorded(0.05, 0.05)


# --- configurations ----------------------------------------------------------------------------


@pytest.mark.parametrize("scale", privacy.CONFIGS)
def test_configurations_are_whole(scale):
    config = privacy.CONFIGS[scale]
    names = [cell.name for cell in config.cells]
    assert len(set(names)) == len(names)
    assert {cell.pool for cell in config.cells} == set(config.pools)
    assert config.cells[0].optimizer == "sgd"
    for cell in config.cells:
        assert cell.models % 2 == 0
        assert cell.models < 16 or cell.models % 16 == 0
    rows = {f"{c.name}-{n}" for c in config.cells for n in (c.models, min(c.models, 16))}
    audits = dict.fromkeys(rows, audit([0.5, 0.5], [0.5, 0.5]))
    for cell in config.cells:  # every audit that a comparison asks for is there
        if cell.optimizer != "sgd":
            assert compared(config, cell, audits)["difference"]["lira auc"] == [0.0] * 3
    for cell in config.cells[:2]:
        assert cell.models >= 6  # of LiRA's forms


# --- runs --------------------------------------------------------------------------------------


def test_runs_agree_also_when_stopped_or_robbed(monkeypatch, tmp_path):
    module = experiments.get("privacy")
    monkeypatch.setattr(module, "CONFIGS", {"quick": TINY})
    done = []

    def counted(work, limit):
        def count(task):
            if len(done) == limit:
                raise KeyboardInterrupt
            done.append(work.__name__)
            return work(task)

        return count

    real = {work: getattr(module, work) for work in WORK}

    def launch(limit=None):
        done.clear()
        for work, function in real.items():
            monkeypatch.setattr(module, work, counted(function, limit))
        return execute("privacy", workers=0, out=tmp_path / "run.json")

    whole = launch()
    assert len(done) == UNITS
    assert not list(tmp_path.glob(".*run"))  # logits and units are gone
    with pytest.raises(KeyboardInterrupt):
        launch(8)
    # Of what is kept, lose an audit, a summary of training and the logits of one model.
    kept = next(tmp_path.glob(".*run"))
    (kept / "audit-fashion-sgd-2-6.json").unlink()
    (kept / "train-fashion-sam0.05-2.json").unlink()
    lost = sorted((kept / "ensembles" / "fashion-sgd-2").glob("member-*.pt"))[1]
    lost.unlink()
    resumed = launch()
    assert len(done) == UNITS - 8 + 2
    assert repr(resumed.values) == repr(whole.values)
    assert resumed.seeds == list(range(6))
    assert set(resumed.data) == {"fashion-mnist", "digits"}
    values_are_whole(whole.values)


def values_are_whole(values):
    cells = [cell.name for cell in TINY.cells]
    assert list(values["cells"]) == cells
    assert list(values["against_sgd"]) == ["fashion-sam0.05-2", "digits-sam0.05-2"]
    assert list(values["lira_forms"]) == cells[:2]
    assert list(values["tuning"]) == ["sgd-0.05-0", "sgd-0.05-1", "sam-0.05-0", "sam-0.05-1"]
    for cell in TINY.cells:
        found = values["cells"][cell.name]
        assert found["models"] == cell.models
        assert len(found["train_accuracy"]) == len(found["test_accuracy"]) == cell.models
        assert set(found["attacks"]) == {
            "confidence",
            "entropy",
            "rmia",
            "lira-pooled",
            "lira-offline",
        }
        for attack in found["attacks"].values():
            assert len(attack["auc_by_model"]) == cell.models
            value, low, high = attack["auc"]
            assert low <= value <= high
            assert value == pytest.approx(np.mean(attack["auc_by_model"]))
    for name, against in values["against_sgd"].items():
        own, plain = values["cells"][name], values["cells"][f"{name.split('-')[0]}-sgd-2"]
        assert against["epochs"] == 2
        expected = np.mean(own["train_accuracy"]) - np.mean(plain["train_accuracy"])
        assert against["difference"]["test_accuracy"][0] == pytest.approx(
            np.mean(own["test_accuracy"]) - np.mean(plain["test_accuracy"])
        )
        # Pairs weigh alike there, and models here: training sets differ a little in size.
        assert against["difference"]["train_accuracy"][0] == pytest.approx(expected, abs=0.03)
        for attack, one in own["attacks"].items():
            change = one["auc"][0] - plain["attacks"][attack]["auc"][0]
            assert against["difference"][f"{attack} auc"][0] == pytest.approx(change)
    forms = values["lira_forms"]["fashion-sgd-2"]
    assert list(forms) == ["6"]
    assert len(forms["6"]) == 8
    both = (cell["attacks"]["lira-pooled"]["auc"] for cell in values["cells"].values())
    assert forms["6"]["online-pooled-paper"]["auc"] == next(both)


def test_the_attacks_are_those_on_the_ensemble(tmp_path):
    cell = TINY.cells[3]
    data, models = privacy.ensemble(TINY, cell, tmp_path)
    found = privacy.attack(data, models, 4)
    expected = attack_each(
        models.logits,
        data.train.y,
        models.design,
        models.eval_logits,
        data.test.y,
        attacks=list(found),
        gamma=2.0,
        a=0.3,
    )
    for name, scores in found.items():
        np.testing.assert_array_equal(scores, expected[name])
    audited = privacy.audited((TINY, cell, tmp_path, 4))["found"]
    for name, scores in found.items():
        assert audited["attacks"][name]["oracle_accuracy"] == pytest.approx(
            roc(scores, models.design).balanced_accuracy
        )


def test_logits_of_another_configuration_are_refused(tmp_path):
    cell = TINY.cells[3]
    privacy.ensemble(TINY, cell, tmp_path)
    other = {"digits": dataclasses.replace(TINY.pools["digits"], lr=0.1)}
    with pytest.raises(CheckpointError):
        privacy.ensemble(dataclasses.replace(TINY, pools=other), cell, tmp_path)
