"""Attacks against their longhand definitions, as properties, and on members that do stand out."""

import itertools
import math
import tracemalloc

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import roc_auc_score

from flatbook import likelihood, signals
from flatbook.membership import (
    balanced_accuracy,
    class_thresholds,
    clopper_pearson,
    confidence,
    lira,
    logit_signal,
    modified_entropy,
    rmia,
    roc,
    threshold_attack,
)

FORMS = list(
    itertools.product(("online", "offline"), ("per-example", "pooled"), ("paper", "reference"))
)


def balanced(random, models, points):
    return np.argsort(random.random((models, points)), axis=0) < models // 2


def ragged(random, models, points):
    """Draw a design whose points have at least two models in and two out, in varying number."""
    design = random.random((models, points)) < 0.5
    design[:2], design[2:4] = True, False
    return random.permuted(design, axis=0)


def shadows_and_target(random, *, models=32, points=600, queries=2, gap=2.0):
    """Draw signals that are higher by ``gap`` for members; a point has its own level and scale."""
    level, scale = random.normal(0, 3, (points, 1)), random.uniform(0.5, 2, (points, 1))
    design, members = balanced(random, models, points), random.random(points) < 0.5
    noise = random.normal(size=(models + 1, points, queries))
    included = np.concatenate([design, members[None]])[..., None]
    signals = level + scale * (gap * included + noise)
    return signals[-1], signals[:-1], design, members


# --- signals -----------------------------------------------------------------------------------


def exact_signals(z, y):
    """Return log-odds, probability and modified entropy of one sample to 400 digits."""
    with mpmath.workdps(400):
        odds = [mpmath.exp(mpmath.mpf(float(value))) for value in z]
        p = [value / sum(odds) for value in odds]
        q = [sum(odds[:i] + odds[i + 1 :]) / sum(odds) for i in range(len(odds))]
        entropy = -q[y] * mpmath.log(p[y]) - sum(
            p[i] * mpmath.log(q[i]) for i in range(len(p)) if i != y
        )
        return float(mpmath.log(p[y] / q[y])), float(p[y]), float(entropy)


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(2, 6), st.sampled_from([0.1, 1.0, 10.0, 100.0]))
def test_signals_are_exact_whatever_the_confidence(seed, classes, scale):
    random = np.random.default_rng(seed)
    logits, labels = scale * random.normal(size=(3, classes)), random.integers(classes, size=3)
    got = zip(
        logit_signal(logits, labels),
        confidence(logits, labels),
        modified_entropy(logits, labels),
        strict=True,
    )
    for i, (odds, p, entropy) in enumerate(got):
        expected = exact_signals(logits[i], labels[i])
        assert odds == pytest.approx(expected[0], rel=1e-12, abs=1e-13 * scale)
        assert p == pytest.approx(expected[1], rel=1e-12, abs=0)
        assert entropy == pytest.approx(expected[2], rel=1e-12, abs=0)


def test_signals_of_certain_models_keep_apart():
    logits = np.array([[50.0, 0.0, 0.0], [60.0, 0.0, 0.0]], dtype=np.float32)
    labels = np.zeros(2, dtype=int)
    assert confidence(logits, labels).tolist() == [1.0, 1.0]  # rounding has lost the difference
    assert np.diff(logit_signal(logits, labels)) == pytest.approx(10)
    assert modified_entropy(logits, labels)[1] > 0
    wrong = modified_entropy(logits, labels + 1)
    assert wrong == pytest.approx([100 - np.log(2), 120 - np.log(2)])


def test_modified_entropy_is_not_the_version_with_log_p():
    # Certain and wrong: the released mistake gives 0 where the definition is unbounded.
    logits, labels = np.array([[40.0, 0.0]]), np.array([1])
    p = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    mistaken = -(1 - p[0, 1]) * np.log(p[0, 1]) - p[0, 0] * np.log(p[0, 0])
    assert modified_entropy(logits, labels)[0] == pytest.approx(80)
    assert mistaken < 41


@pytest.mark.parametrize("function", [logit_signal, confidence, modified_entropy])
def test_signals_take_models_and_queries(function):
    random = np.random.default_rng(0)
    logits, labels = random.normal(size=(3, 5, 2, 4)), random.integers(4, size=5)
    got = function(logits, labels)
    assert got.shape == (3, 5, 2)
    for s, q in itertools.product(range(3), range(2)):
        np.testing.assert_array_equal(got[s, :, q], function(logits[s, :, q], labels))
    np.testing.assert_array_equal(function(logits[0], labels), got[0])  # points, queries
    np.testing.assert_array_equal(function(logits[:, :, 0], labels), got[:, :, 0])  # models, points
    everywhere = np.broadcast_to(labels[:, None], (3, 5, 2))
    np.testing.assert_array_equal(function(logits, everywhere), got)


def test_signals_by_blocks_are_the_same(monkeypatch):
    logits = np.random.default_rng(0).normal(size=(3, 7, 4))
    labels = np.arange(7) % 4
    expected = [f(logits, labels) for f in (logit_signal, confidence, modified_entropy)]
    monkeypatch.setattr(signals, "_BLOCK", 2)
    got = [f(logits, labels) for f in (logit_signal, confidence, modified_entropy)]
    np.testing.assert_array_equal(got, expected)


# --- likelihood ratio --------------------------------------------------------------------------


def longhand_lira(target, shadows, design, mode, variance, variant):
    """Compute the scores with a loop over points and SciPy's normal law."""
    points, queries = target.shape
    groups = [[shadows[design[:, i] == side, i] for i in range(points)] for side in (True, False)]
    if variant == "reference":
        least = [min(len(group) for group in side) for side in groups]
        groups = [[g[:n] for g in side] for side, n in zip(groups, least, strict=True)]
    centre = np.median if variant == "reference" else np.mean
    means = [[centre(group, axis=0) for group in side] for side in groups]
    spreads = [[group.std(axis=0) for group in side] for side in groups]
    if variance == "pooled":
        for side in range(2):
            if variant == "reference":
                common = np.std(np.concatenate(groups[side]))
            else:
                residual = [g - m for g, m in zip(groups[side], means[side], strict=True)]
                common = np.sqrt(np.mean(np.concatenate(residual) ** 2))
            spreads[side] = [np.full(queries, common)] * points
        if variant == "reference" and mode == "online":
            spreads[1] = spreads[0]
    scores = []
    for i in range(points):
        law_in, law_out = (stats.norm(means[s][i], spreads[s][i]) for s in range(2))
        if mode == "online":
            score = law_in.logpdf(target[i]) - law_out.logpdf(target[i])
        elif variant == "paper":
            score = 1 - law_out.sf(target[i])
        else:
            score = -law_out.logpdf(target[i])
        scores.append(score.mean())
    return np.array(scores)


@pytest.mark.parametrize(("mode", "variance", "variant"), FORMS)
@pytest.mark.parametrize("design_of", [balanced, ragged])
def test_lira_is_the_longhand(mode, variance, variant, design_of):
    random = np.random.default_rng(1)
    target, shadows, _, _ = shadows_and_target(random, models=12, points=40, queries=3)
    design = design_of(random, 12, 40)
    form = {"mode": mode, "variance": variance, "variant": variant}
    expected = longhand_lira(target, shadows, design, *form.values())
    np.testing.assert_allclose(
        lira(target, shadows, design, **form), expected, rtol=1e-11, atol=1e-12
    )
    single = longhand_lira(target[:, :1], shadows[..., :1], design, *form.values())
    np.testing.assert_allclose(
        lira(target[:, 0], shadows[..., 0], design, **form), single, rtol=1e-11, atol=1e-12
    )


@pytest.mark.parametrize(("mode", "variance", "variant"), FORMS)
def test_lira_finds_members_and_shuffled_labels_do_not(mode, variance, variant):
    random = np.random.default_rng(2)
    target, shadows, design, members = shadows_and_target(random, gap=4.0, queries=1)
    scores = lira(target, shadows, design, mode=mode, variance=variance, variant=variant)
    floor = 0.9 if variance == "per-example" or variant == "paper" else 0.8
    assert roc(scores, members).auc > floor
    assert abs(roc(scores, random.permutation(members)).auc - 0.5) < 0.1


def test_lira_adapts_to_each_point_as_a_threshold_cannot():
    random = np.random.default_rng(3)
    target, shadows, design, members = shadows_and_target(random, queries=1, gap=3.0)
    assert roc(lira(target, shadows, design), members).auc > 0.95
    assert roc(target, members[:, None]).auc < 0.85


@given(
    st.integers(0, 2**32),
    st.sampled_from([-3.0, 0.01, 1.0, 40.0]),
    st.floats(-50, 50),
    st.sampled_from(["per-example", "pooled"]),
)
def test_online_lira_ignores_affine_changes_of_the_signal(seed, slope, offset, variance):
    random = np.random.default_rng(seed)
    target, shadows, _, _ = shadows_and_target(random, models=8, points=5)
    design = ragged(random, 8, 5)
    got = lira(slope * target + offset, slope * shadows + offset, design, variance=variance)
    expected = lira(target, shadows, design, variance=variance)
    np.testing.assert_allclose(got, expected, rtol=1e-7, atol=1e-7)


@given(st.integers(0, 2**32))
def test_lira_ignores_the_order_of_models_and_other_points(seed):
    random = np.random.default_rng(seed)
    target, shadows, _, _ = shadows_and_target(random, models=8, points=5)
    design = ragged(random, 8, 5)
    expected = lira(target, shadows, design)
    order = random.permutation(8)
    np.testing.assert_allclose(lira(target, shadows[order], design[order]), expected, rtol=1e-9)
    some = random.permutation(5)[:2]
    np.testing.assert_allclose(
        lira(target[some], shadows[:, some], design[:, some]), expected[some], rtol=1e-12
    )


def test_lira_does_not_cancel_far_from_zero():
    random = np.random.default_rng(4)
    shadows = random.integers(-999, 999, (16, 30)) / 2.0**20
    target, design = random.integers(-999, 999, 30) / 2.0**20, ragged(random, 16, 30)
    for variance in ("per-example", "pooled"):
        near = lira(target, shadows, design, variance=variance)
        far = lira(target + 2.0**30, shadows + 2.0**30, design, variance=variance)
        np.testing.assert_allclose(far, near, rtol=1e-10)


def test_offline_log_scores_keep_the_order_that_rounding_loses():
    shadows, design = np.tile([[-1.0], [1.0]], (1, 3)), np.zeros((2, 3), dtype=bool)
    target = np.array([5.0, 20.0, 30.0])
    plain = lira(target, shadows, design, mode="offline")
    assert plain[1] == plain[2] == 1.0
    logs = lira(target, shadows, design, mode="offline", log=True)
    np.testing.assert_allclose(logs, -stats.norm.logsf(target), rtol=1e-13)
    assert -np.expm1(-logs[0]) == pytest.approx(plain[0])


def test_the_released_offline_form_is_two_sided():
    shadows, design = np.tile([[-1.0], [1.0]], (1, 3)), np.zeros((2, 3), dtype=bool)
    target = np.array([-5.0, 0.0, 5.0])
    paper = lira(target, shadows, design, mode="offline")
    released = lira(target, shadows, design, mode="offline", variant="reference")
    assert paper[0] < paper[1] < paper[2]
    assert released[0] == pytest.approx(released[2])
    assert released[1] < released[0]


@pytest.mark.parametrize(("mode", "variance", "variant"), FORMS)
@pytest.mark.parametrize("constant", [0.0, 0.1, -1e6 / 3])
def test_constant_signals_tell_nothing(mode, variance, variant, constant):
    shadows, design = np.full((9, 6), constant), np.arange(9)[:, None] < [2, 3, 4, 5, 6, 7]
    scores = lira(shadows[0], shadows, design, mode=mode, variance=variance, variant=variant)
    assert np.isfinite(scores).all()
    assert len(set(scores)) == 1
    if mode == "online":
        assert scores[0] == 0


@pytest.mark.parametrize("variant", ["paper", "reference"])
def test_signals_without_spread_score_by_their_limit(variant):
    # In always .1 and out always .7; then a law of spread 1 against a certain one.
    shadows = np.repeat([[0.1], [0.7]], 3, axis=0) * np.ones((6, 3))
    design = np.repeat([[True], [False]], 3, axis=0) * np.ones((6, 3), dtype=bool)
    scores = lira(np.array([0.1, 0.7, 0.4 - 1e-9]), shadows, design, variant=variant)
    assert np.isfinite(scores).all()
    assert scores[0] > 1e50
    assert scores[1] < -1e50
    assert scores[2] > 0
    mixed = np.array([[0.1], [0.1], [-1.0], [1.0]])
    sides = np.array([[True], [True], [False], [False]])
    assert lira(np.array([0.1]), mixed, sides, variant=variant)[0] > 60
    assert lira(np.array([0.2]), mixed, sides, variant=variant)[0] < -1e50


# --- RMIA --------------------------------------------------------------------------------------


def pairwise_rmia(target, refs, design, population, ref_population, gamma, a):
    """Compute the matrix of all quotients, each point's mean by a plain loop."""

    def ratio(own, columns):
        mean = np.array([sum(column.tolist()) / len(column) for column in columns])
        return own / (0.5 * ((1 + a) * mean + (1 - a)))

    x = ratio(target, [refs[~design[:, i], i] for i in range(len(target))])
    z = ratio(population, list(ref_population.T))
    with np.errstate(divide="ignore", invalid="ignore"):
        return (x[:, None] / z[None, :] > gamma).mean(axis=1)


@st.composite
def rmia_cases(draw):
    """Draw confidences from a coarse grid, so that quotients tie with each other and with γ."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    models, points, population = (draw(st.integers(1, n)) for n in (4, 12, 12))
    grid = draw(st.sampled_from([4, 10, 60, 2**40]))
    a = draw(st.sampled_from([0.0, 0.3, 1.0]))
    target, fresh = (random.integers(0, grid + 1, n) / grid for n in (points, population))
    refs, ref_fresh = (
        random.integers(1, grid + 1, (models, n)) / grid for n in (points, population)
    )
    design = random.random((models, points)) < 0.4
    design[random.integers(models)] = False
    gamma = draw(st.sampled_from([0.25, 1.0, 1.2, 1.5, 2.0, 1 / 3]))
    return (target, refs, design, fresh, ref_fresh), gamma, a


@given(rmia_cases())
def test_rmia_is_the_pairwise_form_also_at_ties(case):
    arrays, gamma, a = case
    got = rmia(*arrays, gamma=gamma, a=a)
    np.testing.assert_array_equal(got, pairwise_rmia(*arrays, gamma, a))


@given(
    st.lists(st.floats(0, math.inf), min_size=1, max_size=9),
    st.lists(st.floats(0, math.inf), min_size=1, max_size=9),
    st.floats(1e-3, 1e3),
)
def test_counting_by_halving_evaluates_the_quotient_itself(x, z, gamma):
    # Points an ulp or two around the tie, where dividing by γ instead would go wrong.
    x = np.array(x + [gamma * value for value in z if gamma * value < math.inf])
    z = np.array(z)
    with np.errstate(all="ignore"):
        x = np.concatenate([x, np.nextafter(x, 0), np.nextafter(x, math.inf)])
        expected = (x[:, None] / z > gamma).sum(axis=1)
    np.testing.assert_array_equal(likelihood._beaten(x, z, gamma), expected)


def test_searching_for_the_divided_value_would_be_wrong():
    random = np.random.default_rng(0)
    x, z = random.integers(1, 60, (2, 2000)) / random.integers(1, 60, (2, 2000))
    exact = (x[:, None] / z > 1.2).sum(axis=1)
    np.testing.assert_array_equal(likelihood._beaten(x, z, 1.2), exact)
    assert (np.searchsorted(np.sort(z), x / 1.2, side="left") != exact).any()


def some_rmia(seed, *, models=4, points=300, population=200, gap=2.0):
    random = np.random.default_rng(seed)
    design, members = random.random((models, points)) < 0.5, random.random(points) < 0.5
    design[0], design[1] = True, False
    levels = random.normal(-3, 2, points + population)

    def draw(included):
        z = levels + random.normal(size=len(levels))
        z[:points] += gap * included
        return 1 / (1 + np.exp(-z))

    target, refs = draw(members), np.array([draw(row) for row in design])
    arrays = target[:points], refs[:, :points], design, target[points:], refs[:, points:]
    return arrays, members, random


def test_rmia_finds_members_and_shuffled_labels_do_not():
    arrays, members, random = some_rmia(5, models=16, gap=4.0)
    scores = rmia(*arrays)
    assert roc(scores, members).auc > 0.95
    assert roc(arrays[0], members).auc < roc(scores, members).auc - 0.05
    assert abs(roc(scores, random.permutation(members)).auc - 0.5) < 0.1


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from([1.0, 1.2]))
def test_rmia_invariances(seed, gamma):
    arrays, _, random = some_rmia(seed, points=8, population=6)
    target, refs, design, population, ref_population = arrays
    expected = rmia(*arrays, gamma=gamma)
    # A common factor of the target's confidences cancels from r(x) / r(z).
    halved = rmia(target / 2, refs, design, population / 2, ref_population, gamma=gamma)
    np.testing.assert_array_equal(halved, expected)
    # Neither the order of the population nor seeing all of it twice matters.
    order = np.tile(random.permutation(6), 2)
    shuffled = rmia(target, refs, design, population[order], ref_population[:, order], gamma=gamma)
    np.testing.assert_array_equal(shuffled, expected)
    # A more confident target is more suspect, a greater γ asks more, and a = 0 forgets references.
    raised = rmia(target**0.5, refs, design, population, ref_population, gamma=gamma)
    assert (raised >= expected).all()
    assert (rmia(*arrays, gamma=2 * gamma) <= expected).all()
    flat = np.full((1, 1), 0.7)
    bare = rmia(
        target, flat * np.ones(8), np.zeros((1, 8)), population, flat * np.ones(6), gamma=gamma
    )
    np.testing.assert_array_equal(bare, (target[:, None] / population > gamma).mean(axis=1))


def test_rmia_averages_queries():
    (target, refs, design, population, ref_population), _, random = some_rmia(6)
    twice = [np.stack([v, v], axis=-1) for v in (target, refs, population, ref_population)]
    got = rmia(twice[0], twice[1], design, twice[2], twice[3])
    np.testing.assert_array_equal(got, rmia(target, refs, design, population, ref_population))
    jitter = random.uniform(-0.1, 0.1, len(target)) * np.minimum(target, 1 - target)
    around = np.stack([target - jitter, target + jitter], axis=-1)
    got = rmia(around, twice[1], design, twice[2], twice[3])
    expected = rmia(around.mean(-1), refs, design, population, ref_population)
    np.testing.assert_array_equal(got, expected)


def test_rmia_of_a_population_that_the_target_rules_out():
    # r(z) = 0 is beaten by all but 0 itself.
    got = rmia([0.5, 0.0], [[0.5, 0.5]], [[0, 0]], [0.0, 0.0], [[0.5, 0.5]])
    assert got.tolist() == [1.0, 0.0]


def test_rmia_builds_no_matrix():
    random = np.random.default_rng(0)
    n = 20_000
    arrays = random.random(n), random.random((2, n)), np.zeros((2, n), bool)
    population = random.random(n), random.random((2, n))
    tracemalloc.start()
    scores = rmia(*arrays, *population)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert scores.shape == (n,)
    assert peak < 20 * 8 * n  # a matrix of booleans alone would be 2,500 * 8 * n


# --- thresholds chosen on the shadows ----------------------------------------------------------


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.booleans())
def test_class_thresholds_are_the_best_by_trial(seed, coarse):
    random = np.random.default_rng(seed)
    design, labels = ragged(random, 6, 9), random.integers(0, 3, 9)
    shadows = random.normal(size=(6, 9)) + design
    shadows = np.round(shadows) if coarse else shadows
    got = class_thresholds(shadows, design, labels)
    assert len(got) == labels.max() + 1
    for c, threshold in enumerate(got):
        if c not in labels:
            assert np.isnan(threshold)
            continue
        values, flags = shadows[:, labels == c], design[:, labels == c]
        quality = {
            tau: balanced_accuracy(values >= tau, flags) for tau in [*values.ravel(), math.inf]
        }
        best = max(quality.values())
        assert threshold == max(tau for tau, q in quality.items() if q > best - 1e-12)


def test_threshold_attack_beats_one_threshold_where_classes_differ():
    random = np.random.default_rng(7)
    labels = random.integers(0, 5, 500)
    design, members = balanced(random, 8, 500), random.random(500) < 0.5
    offset = 10 * labels
    shadows = offset + 2 * design + 0.5 * random.normal(size=(8, 500))
    target = offset + 2 * members + 0.5 * random.normal(size=500)
    scores = threshold_attack(target, shadows, design, labels)
    thresholds = class_thresholds(shadows, design, labels)
    np.testing.assert_array_equal(scores, target - thresholds[labels])
    honest = balanced_accuracy(scores >= 0, members)
    assert honest > 0.95
    assert honest <= roc(scores, members).balanced_accuracy  # the oracle
    single = target - class_thresholds(shadows, design, 0 * labels)[0]
    assert balanced_accuracy(single >= 0, members) < 0.7
    shuffled = random.permutation(members)
    assert abs(balanced_accuracy(scores >= 0, shuffled) - 0.5) < 0.1
    queries = np.stack([target - 1, target + 1], -1), np.stack([shadows - 1, shadows + 1], -1)
    np.testing.assert_allclose(threshold_attack(*queries, design, labels), scores, atol=1e-12)


def test_modified_entropy_attack_from_logits():
    random = np.random.default_rng(8)
    labels, design = random.integers(0, 3, 300), balanced(random, 6, 300)
    members = random.random(300) < 0.5
    logits = random.normal(size=(7, 300, 3))
    included = np.concatenate([design, members[None]])
    np.put_along_axis(logits, np.tile(labels[:, None], (7, 1, 1)), 1 + 4.0 * included[..., None], 2)
    signals = -modified_entropy(logits, labels)
    scores = threshold_attack(signals[-1], signals[:-1], design, labels)
    assert balanced_accuracy(scores >= 0, members) > 0.85


def test_constant_signals_call_nobody_a_member():
    design = np.array([[True, False], [False, True]])
    scores = threshold_attack(np.ones(2), np.ones((2, 2)), design, np.zeros(2, int))
    assert scores.tolist() == [-math.inf, -math.inf]
    assert balanced_accuracy(scores >= 0, [True, False]) == 0.5
    assert roc(scores, [True, False]).auc == 0.5


# --- curves ------------------------------------------------------------------------------------


@st.composite
def scored(draw):
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = draw(st.integers(2, 40))
    scores = random.normal(size=n)
    if draw(st.booleans()):
        scores = np.round(2 * scores) / 2
    if draw(st.booleans()):
        scores[random.integers(n)] = random.choice([-math.inf, math.inf])
    members = random.random(n) < 0.5
    assume(0 < members.sum() < n)
    return scores, members


@given(scored())
def test_curve_is_what_counting_gives(case):
    scores, members = case
    curve = roc(scores, members)
    own, other = scores[members], scores[~members]
    with np.errstate(invalid="ignore"):
        pairs = (own[:, None] > other).mean() + (own[:, None] == other).mean() / 2
    assert curve.auc == pytest.approx(pairs, abs=1e-15)
    assert (curve.members, curve.non_members) == (len(own), len(other))
    assert (curve.fpr[0], curve.tpr[0], curve.fpr[-1], curve.tpr[-1]) == (0, 0, 1, 1)
    for threshold, fpr, tpr in zip(curve.thresholds[1:], curve.fpr[1:], curve.tpr[1:], strict=True):
        assert (fpr, tpr) == ((other >= threshold).mean(), (own >= threshold).mean())
    candidates = [*np.unique(scores)]
    best = max([0.5, *(balanced_accuracy(scores >= t, members) for t in candidates)])
    assert curve.balanced_accuracy == pytest.approx(best, abs=1e-15)
    for limit in (0.0, 0.1, 0.5, 1.0):
        reached = [0.0, *((own >= t).mean() for t in candidates if (other >= t).mean() <= limit)]
        rate = curve.tpr_at(limit)
        assert rate.value == max(reached)
        assert rate.low <= rate.value <= rate.high
        assert rate.fpr <= limit
        assert rate.interval == clopper_pearson(round(rate.value * len(own)), len(own))


@given(scored(), st.sampled_from([np.exp, np.arctan, lambda v: 3 * v - 7]))
def test_monotone_changes_keep_the_curve(case, change):
    scores, members = case
    curve, changed = roc(scores, members), roc(change(scores), members)
    assert changed.auc == curve.auc
    np.testing.assert_array_equal(changed.tpr, curve.tpr)
    np.testing.assert_array_equal(changed.fpr, curve.fpr)


@given(scored())
def test_complement_and_negative_flip_the_area(case):
    scores, members = case
    auc = roc(scores, members).auc
    assert roc(scores, ~members).auc == pytest.approx(1 - auc, abs=1e-15)
    assert roc(-scores, members).auc == pytest.approx(1 - auc, abs=1e-15)
    assert roc(-scores, ~members).auc == pytest.approx(auc, abs=1e-15)


def test_area_is_scikit_learns():
    random = np.random.default_rng(9)
    members = random.random(3000) < 0.3
    scores = np.round(random.normal(size=3000) + members, 1)
    assert roc(scores, members).auc == pytest.approx(roc_auc_score(members, scores), abs=1e-14)


def test_curve_of_constant_scores():
    curve = roc(np.zeros(10), np.arange(10) < 4)
    assert (curve.auc, curve.balanced_accuracy) == (0.5, 0.5)
    assert curve.tpr_at(0.999).value == 0
    assert curve.tpr_at(1).value == 1
    assert curve.tpr_at(0.5).threshold == math.inf


def test_curve_of_perfect_scores():
    curve = roc(np.arange(10), np.arange(10) >= 6)
    assert (curve.auc, curve.balanced_accuracy) == (1, 1)
    rate = curve.tpr_at(0)
    assert (rate.value, rate.threshold, rate.high) == (1, 6, 1)
    assert rate.low == pytest.approx(0.025 ** (1 / 4))


def test_rates_that_decimals_cannot_hold_exactly():
    # .29 * 100 rounds below 29, yet 29 false positives of 100 are a rate of .29.
    scores = np.concatenate([np.full(29, 2.0), np.full(71, 0.0), [1.0]])
    members = np.arange(101) == 100
    curve = roc(scores, members)
    assert curve.tpr_at(0.29).value == 1
    assert curve.tpr_at(0.2899).value == 0


def test_few_non_members_cannot_show_a_small_rate():
    scores, members = np.arange(200), np.arange(200) >= 100
    rate = roc(scores, members).tpr_at(0.001)
    assert (rate.value, rate.fpr) == (1, 0)
    # No false positive in 100 is compatible with a rate 36 times the one asked for.
    assert rate.fpr_high == pytest.approx(1 - 0.025 ** (1 / 100))
    assert rate.fpr_high > 0.036
    value, low, high = rate
    assert (float(rate), low, high) == (value, *rate.interval)


def test_targets_are_pooled():
    random = np.random.default_rng(10)
    scores, members = random.normal(size=(3, 50)), random.random((3, 50)) < 0.5
    curve = roc(scores, members)
    assert curve.auc == roc(scores.ravel(), members.ravel()).auc
    assert curve.members + curve.non_members == 150


def test_clopper_pearson_covers():
    n, level = 12, 0.9
    ends = [clopper_pearson(k, n, level=level) for k in range(n + 1)]
    for p in np.linspace(0, 1, 201):
        chance = stats.binom.pmf(np.arange(n + 1), n, p)
        covered = sum(c for c, (low, high) in zip(chance, ends, strict=True) if low <= p <= high)
        assert covered >= level - 1e-12
    for k, end in enumerate(ends):
        assert end == pytest.approx(
            tuple(stats.binomtest(k, n).proportion_ci(level, method="exact")), abs=1e-12
        )
        assert clopper_pearson(n - k, n, level=level) == pytest.approx((1 - end[1], 1 - end[0]))


# --- what goes in and comes out ----------------------------------------------------------------


def test_tensors_come_out_where_tensors_went_in():
    random = np.random.default_rng(11)
    target, shadows, design, members = shadows_and_target(random, models=6, points=8)
    labels = np.arange(8) % 2
    (conf, refs, seen, fresh, ref_fresh), _, _ = some_rmia(12, points=8, population=5)
    calls = [
        (logit_signal, (target, labels % 2)),
        (confidence, (target, labels % 2)),
        (modified_entropy, (target, labels % 2)),
        (lira, (target, shadows, design)),
        (rmia, (conf, refs, seen, fresh, ref_fresh)),
        (class_thresholds, (shadows, design, labels)),
        (threshold_attack, (target, shadows, design, labels)),
    ]
    for function, arrays in calls:
        expected = function(*arrays)
        tensors = [torch.tensor(array) for array in arrays]
        for given_arrays in (tensors, [tensors[0], *arrays[1:]], [*arrays[:-1], tensors[-1]]):
            got = function(*given_arrays)
            assert isinstance(got, torch.Tensor)
            assert got.dtype == torch.float64
            np.testing.assert_array_equal(got.numpy(), expected)
        from_lists = function(*(array.tolist() for array in arrays))
        assert isinstance(from_lists, np.ndarray)
        np.testing.assert_array_equal(from_lists, expected)
    scores = lira(target, shadows, design)
    curves = roc(scores, members), roc(torch.tensor(scores), torch.tensor(members).int())
    assert curves[0].auc == curves[1].auc
    assert balanced_accuracy(torch.tensor(members), members) == 1


def test_half_and_single_precision_are_widened():
    random = np.random.default_rng(13)
    target, shadows, design, _ = shadows_and_target(random, models=8, points=20)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        small = [torch.tensor(array).to(dtype) for array in (target, shadows)]
        got = lira(*small, design)
        expected = lira(*(array.double() for array in small), design)
        assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12)
    leaf = torch.tensor(target, requires_grad=True)
    assert not lira(leaf, shadows, design).requires_grad


def test_arguments_are_left_alone():
    random = np.random.default_rng(14)
    target, shadows, design, _ = shadows_and_target(random, models=8, points=20)
    before = target.copy(), shadows.copy(), design.copy()
    for array in (target, shadows, design):
        array.flags.writeable = False
    for mode, variance, variant in FORMS:
        lira(target, shadows, design, mode=mode, variance=variance, variant=variant)
    for array, copy in zip((target, shadows, design), before, strict=True):
        np.testing.assert_array_equal(array, copy)


# --- the door ----------------------------------------------------------------------------------

SIGNAL, SHADOWS = np.zeros(3), np.arange(12.0).reshape(4, 3)
DESIGN = np.array([[1, 1, 1], [1, 1, 1], [0, 0, 0], [0, 0, 0]], dtype=bool)
NEVER = DESIGN & np.array([True, False, True])
ALWAYS = DESIGN | np.array([False, False, True])
ONCE = np.array([[1, 1, 1], [1, 1, 0], [0, 0, 0], [0, 0, 0]], dtype=bool)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((SIGNAL, SHADOWS, NEVER), {}, r"design must have at least 2 models in for each point; "
         r"got 0 for point 1"),
        ((SIGNAL, SHADOWS, ALWAYS), {}, "at least 2 models out for each point; got 0 for point 2"),
        ((SIGNAL, SHADOWS, ALWAYS), {"mode": "offline"}, "at least 2 models out .* for point 2"),
        ((SIGNAL, SHADOWS, ONCE), {}, "at least 2 models in for each point; got 1 for point 2"),
        ((SIGNAL, SHADOWS, NEVER), {"variance": "pooled"}, "at least 1 model in .* got 0"),
        ((SIGNAL, SHADOWS[1:3], DESIGN[1:3]), {"variance": "pooled"},
         "design must have a point that two models share"),
        ((SIGNAL, SHADOWS, DESIGN[:, :2]), {}, r"design must have shape \(4, 3\); got \(4, 2\)"),
        ((SIGNAL, SHADOWS, 2 * DESIGN), {}, "design must hold True and False, or 1 and 0"),
        ((SIGNAL, SHADOWS, np.where(DESIGN, np.nan, 0)), {}, "design must hold True and False"),
        ((SIGNAL[:2], SHADOWS, DESIGN), {}, r"shadow_signals must have shape \(models, 2\)"),
        ((SIGNAL, SHADOWS[..., None], DESIGN), {}, r"must have shape \(models, 3\); got \(4, 3, 1"),
        ((np.zeros((3, 1)), SHADOWS, DESIGN), {}, r"must have shape \(models, 3, 1\)"),
        ((np.float64(1), SHADOWS, DESIGN), {}, r"target_signal must have shape \(points\)"),
        ((SIGNAL * np.nan, SHADOWS, DESIGN), {}, "target_signal must be finite; got inf or nan"),
        ((SIGNAL, SHADOWS + np.inf, DESIGN), {}, "shadow_signals must be finite; got inf or nan"),
        ((SIGNAL[:0], SHADOWS[:, :0], DESIGN[:, :0]), {}, "target_signal must not be empty"),
        ((SIGNAL * 1j, SHADOWS, DESIGN), {}, "target_signal must be real"),
        ((SIGNAL, SHADOWS, DESIGN), {"mode": "on-line"}, "mode must be .* Did you mean 'online'"),
        ((SIGNAL, SHADOWS, DESIGN), {"variance": "fixed"}, "variance must be one of per-example"),
        ((SIGNAL, SHADOWS, DESIGN), {"variant": None}, "variant must be one of paper, reference"),
    ],
)  # fmt: skip
def test_lira_refuses(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        lira(*arguments, **options)


CONF = [np.array([0.5, 0.6]), np.full((2, 2), 0.5), np.zeros((2, 2), bool)]
CONF += [np.array([0.5]), np.full((2, 1), 0.5)]


@pytest.mark.parametrize(
    ("place", "value", "options", "message"),
    [
        (0, np.array([0.5, 1.5]), {}, r"target_conf must lie in \[0, 1\]; got 0.5 to 1.5"),
        (1, np.full((2, 2), -0.5), {}, r"ref_conf must lie in \[0, 1\]; got -0.5 to -0.5"),
        (3, np.array([np.nan]), {}, "population_conf must be finite"),
        (
            1,
            np.array([[0.0, 0.5]] * 2),
            {},
            "ref_conf must give each point a mean .* 0 for point 0",
        ),
        (4, np.zeros((2, 1)), {}, "ref_population_conf must give each point a mean .* above 0"),
        (2, np.array([[0, 1], [0, 1]]), {}, "at least 1 model out for each point; got 0 for poi"),
        (1, np.full((2, 3), 0.5), {}, r"ref_conf must have shape \(models, 2\); got \(2, 3\)"),
        (4, np.full((3, 1), 0.5), {}, r"ref_population_conf must have shape \(2, 1\)"),
        (0, CONF[0], {"gamma": 0.0}, "gamma must be a finite number above 0"),
        (0, CONF[0], {"gamma": np.nan}, "gamma must be a finite number above 0"),
        (0, CONF[0], {"a": 1.5}, r"a must be a number in \[0, 1\]"),
    ],
)
def test_rmia_refuses(place, value, options, message):
    arguments = [*CONF]
    arguments[place] = value
    with pytest.raises(ValueError, match=message):
        rmia(*arguments, **options)


def test_zero_confidence_is_no_trouble_below_a_of_one():
    refs = np.array([[0.0, 0.5]] * 2)
    assert np.isfinite(rmia(CONF[0], refs, *CONF[2:], a=0.9)).all()


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (np.zeros((2, 1)), np.zeros(2, int), "logits must have at least 2 classes; got 1"),
        (np.zeros(3), np.zeros(3, int), r"logits must have shape \(points, classes\); got \(3,\)"),
        (np.zeros((1,) * 5), np.zeros(1, int), r"logits must have shape \(any, any, points, clas"),
        (np.array([[0.0, np.inf]]), [0], "logits must be finite; got inf or nan"),
        (np.array([[0.0, np.nan]]), [0], "logits must be finite; got inf or nan"),
        (np.zeros((2, 3), int), [0, 1], "logits must hold floating-point numbers"),
        (np.zeros((2, 3)), [0, 3], r"labels must lie in 0..2, one label per sample; got 0..3"),
        (np.zeros((2, 3)), [0], r"labels must have shape \(2\); got \(1,\)"),
        (np.zeros((4, 2, 3)), [0, 1, 2], r"labels must have shape \(4\); got \(3,\)"),
        (np.zeros((4, 2, 3)), np.zeros((4, 1), int), r"labels must have shape \(4, 2\)"),
        (np.zeros((2, 3)), [0.0, 1.0], "labels must hold whole numbers"),
    ],
)
def test_signals_refuse(logits, labels, message):
    for function in (logit_signal, confidence, modified_entropy):
        with pytest.raises(ValueError, match=message):
            function(logits, np.asarray(labels))


@pytest.mark.parametrize(
    ("scores", "members", "message"),
    [
        ([1.0, 2.0], [True, True], "members must hold both members and non-members; got 2 and 0"),
        ([1.0, 2.0], [0, 0], "members must hold both members and non-members; got 0 and 2"),
        ([1.0, np.nan], [0, 1], "scores must be numbers or infinite; got nan"),
        ([1.0, 2.0], [0, 1, 1], r"members must have shape \(2\); got \(3,\)"),
        ([1.0, 2.0], [0, 2], "members must hold True and False, or 1 and 0"),
        ([], [], "scores must not be empty"),
        ([1j, 2.0], [0, 1], "scores must be real"),
        ([[1.0], [1.0, 2.0]], [0, 1], "scores must be a tensor or array of numbers"),
        ("best", [0, 1], "scores must be a tensor or array of numbers"),
    ],
)
def test_roc_refuses(scores, members, message):
    with pytest.raises(ValueError, match=message):
        roc(scores, members)


def test_other_refusals():
    curve = roc([1, 2], [0, 1])
    with pytest.raises(ValueError, match=r"fpr must be a number in \[0, 1\]; got 1.5"):
        curve.tpr_at(1.5)
    with pytest.raises(ValueError, match="level must lie strictly between 0 and 1; got 1"):
        curve.tpr_at(0.1, level=1)
    with pytest.raises(ValueError, match="successes must be a whole number from 0 to 3; got 4"):
        clopper_pearson(4, 3)
    with pytest.raises(ValueError, match="trials must be a whole number of at least 1; got 0"):
        clopper_pearson(0, 0)
    with pytest.raises(ValueError, match="predicted must hold True and False"):
        balanced_accuracy([0.3, 1], [0, 1])
    with pytest.raises(ValueError, match="class 1 is included in no shadow model"):
        class_thresholds(SHADOWS, NEVER, [0, 1, 0])
    with pytest.raises(ValueError, match="class 1 is left out of no shadow model"):
        class_thresholds(SHADOWS, ALWAYS, [0, 0, 1])
    with pytest.raises(ValueError, match="labels must not be negative; got -1"):
        class_thresholds(SHADOWS, DESIGN, [0, 0, -1])
    with pytest.raises(ValueError, match="labels must hold whole numbers"):
        threshold_attack(SIGNAL, SHADOWS, DESIGN, [0.0, 0.0, 1.0])
    with pytest.raises(ValueError, match=r"shadow_signals must have shape \(models, 2\)"):
        threshold_attack(SIGNAL[:2], SHADOWS, DESIGN, [0, 0])


@pytest.mark.parametrize("function", [logit_signal, confidence, modified_entropy])
@pytest.mark.parametrize("labels", [None, "x", -1, np.nan, np.zeros((1, 3)), {}, True])
def test_labels_of_one_model_are_refused_by_name(function, labels):
    with pytest.raises(ValueError, match=r"^labels must "):
        function(np.zeros((8, 4)), labels)
