"""Every model of an ensemble attacked in turn: against the single attacks, and on known answers."""

import numpy as np
import pytest
import torch

from flatbook.audit import ATTACKS, attack_each, in_turn
from flatbook.comparison import mean_auc, resamples
from flatbook.designs import balanced_design
from flatbook.membership import (
    confidence,
    lira,
    logit_signal,
    modified_entropy,
    rmia,
    roc,
    threshold_attack,
)

MODELS, POINTS, EVALUATED, CLASSES = 8, 60, 40, 3


def audited(seed=0, *, boost=2.0, level=1.0, models=MODELS, points=POINTS):
    """Draw logits with a level of their own at each point, higher by ``boost`` for members."""
    random = np.random.default_rng(seed)
    design = balanced_design(models, points, seed=seed)
    labels, eval_labels = random.permutation(points) % CLASSES, np.arange(EVALUATED) % CLASSES
    logits = random.normal(0, 1, (points, CLASSES)) + random.normal(
        0, 0.5, (models, points, CLASSES)
    )
    logits[:, np.arange(points), labels] += level + boost * design
    eval_logits = random.normal(size=(EVALUATED, CLASSES)) + random.normal(
        0, 0.5, (models, EVALUATED, CLASSES)
    )
    eval_logits[:, np.arange(EVALUATED), eval_labels] += 1
    return logits, labels, design, eval_logits, eval_labels


# --- definition --------------------------------------------------------------------------------


def by_hand(target, attack, logits, labels, design, eval_logits, eval_labels, gamma, a):
    """Attack one model with a loop's worth of plain calls."""
    others = [model for model in range(len(logits)) if model != target]
    seen = design[others]
    if attack == "confidence":
        signal = logit_signal(logits, labels)
        return threshold_attack(signal[target], signal[others], seen, labels)
    if attack == "entropy":
        signal = -modified_entropy(logits, labels)
        return threshold_attack(signal[target], signal[others], seen, labels)
    if attack == "rmia":
        return rmia(
            confidence(logits[target], labels),
            confidence(logits[others], labels),
            seen,
            confidence(eval_logits[target], eval_labels),
            confidence(eval_logits[others], eval_labels),
            gamma=gamma,
            a=a,
        )
    form = {
        "lira": {},
        "lira-pooled": {"variance": "pooled"},
        "lira-offline": {"variance": "pooled", "mode": "offline", "log": True},
    }[attack]
    return lira(
        logit_signal(logits[target], labels), logit_signal(logits[others], labels), seen, **form
    )


@pytest.mark.parametrize("attack", ATTACKS)
def test_each_attack_is_the_single_one_on_each_target(attack):
    data = audited()
    found = attack_each(*data, attacks=[attack], gamma=1.5, a=0.4)
    assert list(found) == [attack]
    assert found[attack].shape == (MODELS, POINTS)
    for target in range(MODELS):
        expected = by_hand(target, attack, *data, gamma=1.5, a=0.4)
        np.testing.assert_array_equal(found[attack][target], expected)


def test_attacks_do_not_disturb_each_other():
    data = audited()
    together = attack_each(*data)
    assert tuple(together) == ATTACKS
    some = attack_each(*data, attacks=("lira", "rmia"))
    assert list(some) == ["lira", "rmia"]
    for name, scores in some.items():
        np.testing.assert_array_equal(scores, together[name])


def test_arguments_are_left_alone_and_may_be_tensors_or_lists():
    data = audited()
    before = [array.copy() for array in data]
    expected = attack_each(*data)
    for old, now in zip(before, data, strict=True):
        np.testing.assert_array_equal(now, old)
    for kind in (torch.from_numpy, np.ndarray.tolist):
        found = attack_each(*map(kind, data))
        for name, scores in found.items():
            assert type(scores) is np.ndarray
            assert scores.dtype == np.float64
            np.testing.assert_array_equal(scores, expected[name])


def test_single_precision_is_widened():
    logits, labels, design, eval_logits, eval_labels = audited()
    single, eval_single = logits.astype(np.float32), eval_logits.astype(np.float32)
    got = attack_each(single, labels, design, eval_single, eval_labels)
    wide = attack_each(single.astype(float), labels, design, eval_single.astype(float), eval_labels)
    for name, scores in got.items():
        np.testing.assert_array_equal(scores, wide[name])


def test_a_target_does_not_help_to_attack_itself():
    """The thresholds come from the others: another target has others, not another threshold."""
    logits, *rest = audited()
    before = attack_each(logits, *rest, attacks=["confidence", "lira"])
    changed = logits.copy()
    changed[0] += np.random.default_rng(1).normal(size=changed[0].shape)
    after = attack_each(changed, *rest, attacks=["confidence", "lira"])
    labels, design = rest[:2]
    move = logit_signal(changed[0], labels) - logit_signal(logits[0], labels)
    np.testing.assert_allclose(after["confidence"][0] - before["confidence"][0], move, atol=1e-12)
    assert (after["lira"][1:] != before["lira"][1:]).any()  # it was a shadow of the others
    assert design[0].any()


def test_in_turn_leaves_out_each_once():
    assert [(t, o.tolist()) for t, o in in_turn(3)] == [(0, [1, 2]), (1, [0, 2]), (2, [0, 1])]
    assert [(t, o.tolist()) for t, o in in_turn(1)] == [(0, [])]


def test_only_rmia_reads_the_population():
    logits, labels, design, *_ = audited()
    names = [name for name in ATTACKS if name != "rmia"]
    assert list(attack_each(logits, labels, design, None, None, attacks=names)) == names


# --- controls ----------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", ATTACKS)
def test_members_that_stand_out_are_found(attack):
    """RMIA finds fewer: a member cannot beat by more than 1 / p what others give it p."""
    data = audited(boost=12.0, level=-2.0, points=200)
    scores = attack_each(*data, attacks=[attack])[attack]
    area = mean_auc(scores, data[2], resamples(MODELS, 200, draws=100))
    floor = 0.85 if attack == "rmia" else 0.98
    assert floor < area.interval()[0] <= area.value
    assert all(roc(own, seen).auc > floor for own, seen in zip(scores, data[2], strict=True))
    apart = np.random.default_rng(1).permuted(data[2], axis=0)  # of the truth
    low, high = mean_auc(scores, apart, resamples(MODELS, 200, draws=200)).interval()
    assert low < 0.5 < high < 0.6


@pytest.mark.parametrize("attack", ATTACKS)
def test_logits_that_ignore_the_design_tell_nothing(attack):
    logits, labels, _, *population = audited(boost=0.0, models=32, points=100)
    design = np.random.default_rng(1).random((32, 100)) < 0.5  # no model's row tells another's
    scores = attack_each(logits, labels, design, *population, attacks=[attack])[attack]
    low, high = mean_auc(scores, design, resamples(32, 100, draws=200)).interval()
    assert low < 0.5 < high
    assert high - low < 0.1


def test_balanced_designs_bias_likelihood_ratios_with_few_shadows_down():
    """A member has one shadow less inside than outside, and of fewer the spread comes out less."""
    below = {8: [], 32: []}
    for models, areas in below.items():
        for seed in range(3):
            data = audited(seed, boost=0.0, models=models, points=200)
            scores = attack_each(*data, attacks=["lira"])["lira"]
            areas += [roc(own, seen).auc for own, seen in zip(scores, data[2], strict=True)]
    assert np.mean(below[8]) < 0.47
    assert np.mean(below[8]) < np.mean(below[32]) < 0.51


# --- degenerate input --------------------------------------------------------------------------


def test_constant_logits_tell_nothing():
    logits, labels, design, eval_logits, eval_labels = audited()
    found = attack_each(
        np.zeros_like(logits), labels, design, np.zeros_like(eval_logits), eval_labels
    )
    drawn = resamples(MODELS, POINTS, draws=20)
    for name, scores in found.items():
        if name == "lira-offline":
            np.testing.assert_allclose(scores, np.log(2))  # nobody above or below: one half
        elif name in ("confidence", "entropy"):
            assert (scores == -np.inf).all()  # no threshold tells anything: nobody is a member
        else:
            assert (scores == 0).all()
        area = mean_auc(scores, design, drawn)
        assert [area.value, *area.draws] == [0.5] * 21


def test_logits_that_are_certain_stay_finite():
    logits, labels, design, eval_logits, eval_labels = audited()
    found = attack_each(1e4 * logits, labels, design, eval_logits, eval_labels, a=0.3)
    for scores in found.values():
        assert np.isfinite(scores).all()


def changed(**parts):
    """Return arguments with some of them replaced."""
    names = ("logits", "labels", "design", "eval_logits", "eval_labels")
    return list((dict(zip(names, audited(), strict=True)) | parts).values())


def with_value(array, place, value):
    array = array.copy()
    array[place] = value
    return array


LOGITS, LABELS, DESIGN, EVAL_LOGITS, EVAL_LABELS = audited()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"logits": with_value(LOGITS, (0, 1, 2), np.inf)},
            r"^logits must be finite; got inf or nan\.$",
        ),
        (
            {"logits": with_value(LOGITS, (0, 1, 2), np.nan)},
            r"^logits must be finite; got inf or nan\.$",
        ),
        (
            {"logits": LOGITS[0]},
            r"^logits must have shape \(models, points, classes\); got \(60, 3\)\.$",
        ),
        (
            {"logits": LOGITS[:, :, None]},
            r"^logits must have shape \(models, points, classes\); got \(8, 60, 1, 3\)\.$",
        ),
        ({"logits": LOGITS[..., :1]}, r"^logits must have at least 2 classes; got 1\.$"),
        ({"labels": LABELS[1:]}, r"^labels must have shape \(60\); got \(59,\)\.$"),
        (
            {"labels": np.tile(LABELS, (8, 1))},
            r"^labels must have shape \(60\); got \(8, 60\)\.$",
        ),
        ({"labels": LABELS + 0.5}, r"^labels must hold whole numbers; got torch\.float64\.$"),
        (
            {"labels": LABELS + 1},
            r"^labels must lie in 0\.\.2, one label per sample; got 1\.\.3\.$",
        ),
        ({"design": DESIGN[:, 1:]}, r"^design must have shape \(8, 60\); got \(8, 59\)\.$"),
        (
            {"design": 2 * DESIGN},
            r"^design must hold True and False, or 1 and 0; got other numbers\.$",
        ),
        (
            {"design": with_value(DESIGN, (slice(None), 7), False)},
            r"^design must have at least 3 models in for each point; got 0 for point 7 "
            r"\(in: trained on it, out: not\)\.$",
        ),
        (
            {"design": np.ones_like(DESIGN)},
            r"^design must have at least 3 models out for each point; got 0 for point 0 "
            r"\(in: trained on it, out: not\)\.$",
        ),
        (
            {"eval_logits": EVAL_LOGITS[1:]},
            r"^eval_logits must have shape \(8, evaluated, 3\); got \(7, 40, 3\)\.$",
        ),
        (
            {"eval_logits": EVAL_LOGITS[0]},
            r"^eval_logits must have shape \(8, evaluated, 3\); got \(40, 3\)\.$",
        ),
        (
            {"eval_logits": with_value(EVAL_LOGITS, (0, 1, 2), np.nan)},
            r"^eval_logits must be finite; got inf or nan\.$",
        ),
        (
            {"eval_labels": EVAL_LABELS[1:]},
            r"^eval_labels must have shape \(40\); got \(39,\)\.$",
        ),
        (
            {"eval_labels": EVAL_LABELS - 1},
            r"^eval_labels must lie in 0\.\.2, one label per sample; got -1\.\.1\.$",
        ),
    ],
)
def test_refusals(parts, message):
    with pytest.raises(ValueError, match=message):
        attack_each(*changed(**parts))


def test_options_refused():
    with pytest.raises(
        ValueError, match=r"^attacks must be one of confidence, entropy, rmia, lira, .*'lyra'\. Did"
    ):
        attack_each(*audited(), attacks=["lyra"])
    with pytest.raises(ValueError, match=r"^gamma must be a finite number above 0; got 0\.$"):
        attack_each(*audited(), gamma=0)
    with pytest.raises(ValueError, match=r"^a must be a number in \[0, 1\]; got 2\.$"):
        attack_each(*audited(), a=2)


def test_a_spread_for_each_point_needs_three_models_on_each_side():
    """Without the target two are left; the other attacks do with one."""
    data = audited(models=4)
    assert len(attack_each(*data, attacks=[name for name in ATTACKS if name != "lira"])) == 5
    with pytest.raises(ValueError, match=r"^design must have at least 3 models in for each point"):
        attack_each(*data)
    with pytest.raises(ValueError, match=r"^design must have at least 2 models in for each point"):
        attack_each(*audited(models=2), attacks=["confidence"])


def test_a_class_must_be_in_and_out_among_the_others():
    """One point of a class, in two models: without one of them the other remains."""
    logits, labels, design, eval_logits, eval_labels = audited()
    labels = with_value(np.zeros_like(labels), 5, 2)
    scores = attack_each(logits, labels, design, eval_logits, eval_labels, attacks=["confidence"])[
        "confidence"
    ]
    assert not np.isnan(scores).any()


@pytest.mark.parametrize("attacks", ["lira", 3, ["nobody"], [3], ["lira", "lira"]])
def test_attacks_are_a_list_of_names(attacks):
    with pytest.raises(ValueError, match=r"^attacks must"):
        attack_each(None, None, None, None, None, attacks=attacks)
