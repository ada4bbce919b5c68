"""Two-way resampling against literally repeated data, as properties, and its coverage."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from flatbook import comparison
from flatbook.comparison import (
    Estimate,
    Resamples,
    mean_auc,
    mean_rate,
    over_points,
    pooled_tpr,
    resamples,
)
from flatbook.membership import roc

KINDS = ("distinct", "ties", "infinite", "constant")


def scored(seed, models, points, kind="distinct"):
    """Draw scores, and members of which each model has some and leaves some out."""
    random = np.random.default_rng(seed)
    members = random.random((models, points)) < 0.5
    members[:, 0], members[:, 1] = True, False
    members = random.permuted(members, axis=1)
    scores = random.normal(size=(models, points)) + members
    if kind == "ties":
        scores = scores.round()
    elif kind == "infinite":
        scores = np.where(random.random(scores.shape) < 0.3, np.inf, scores.round())
        scores = np.where(random.random(scores.shape) < 0.3, -np.inf, scores)
    elif kind == "constant":
        scores = np.full_like(scores, 0.25)
    return scores, members


def repeated(array, drawn, draw):
    """Repeat rows and columns literally, as often as a resample says; row 0 is the sample."""
    return array.repeat(drawn.models[draw], axis=0).repeat(drawn.points[draw], axis=1)


def every(estimate):
    return [estimate.value, *estimate.draws]


def plain_auc(scores, members):
    areas = [
        roc(own, seen).auc
        for own, seen in zip(scores, members, strict=True)
        if seen.any() and not seen.all()
    ]
    return np.mean(areas) if areas else np.nan


def plain_tpr(scores, members, fpr):
    if members.all() or not members.any():
        return np.nan
    return roc(scores, members).tpr_at(fpr).value


def plain_rate(values, chosen):
    return values[chosen].mean() if chosen.any() else np.nan


cases = given(st.integers(0, 2**32), st.integers(2, 5), st.integers(2, 12), st.sampled_from(KINDS))


# --- definition --------------------------------------------------------------------------------


@settings(max_examples=40)
@cases
def test_mean_auc_is_the_mean_of_areas_of_repeated_data(seed, models, points, kind):
    scores, members = scored(seed, models, points, kind)
    drawn = resamples(models, points, draws=6, seed=seed)
    expected = [
        plain_auc(repeated(scores, drawn, draw), repeated(members, drawn, draw))
        for draw in range(7)
    ]
    np.testing.assert_allclose(every(mean_auc(scores, members, drawn)), expected, rtol=1e-14)


@settings(max_examples=40)
@given(
    st.integers(0, 2**32),
    st.integers(2, 5),
    st.integers(2, 12),
    st.sampled_from(KINDS),
    st.sampled_from([0, 1e-9, 0.1, 0.29, 1 / 3, 0.5, 0.7, 1 - 1e-9, 1]),
)
def test_pooled_tpr_is_the_rate_of_repeated_data(seed, models, points, kind, fpr):
    scores, members = scored(seed, models, points, kind)
    drawn = resamples(models, points, draws=6, seed=seed)
    expected = [
        plain_tpr(repeated(scores, drawn, draw), repeated(members, drawn, draw), fpr)
        for draw in range(7)
    ]
    np.testing.assert_array_equal(every(pooled_tpr(scores, members, fpr, drawn)), expected)


@settings(max_examples=20)
@cases
def test_mean_rate_is_the_mean_over_repeated_data(seed, models, points, kind):
    values, chosen = scored(seed, models, points)
    if kind == "ties":
        values = values > 0
    drawn = resamples(models, points, draws=6, seed=seed)
    expected = [
        plain_rate(repeated(values, drawn, draw), repeated(chosen, drawn, draw))
        for draw in range(7)
    ]
    got = every(mean_rate(values, chosen, drawn))
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fpr", [0, 0.001, 0.01, 0.2, 0.9, 1])
def test_many_pairs_in_blocks_are_the_same(monkeypatch, kind, fpr):
    """The strictest scores alone decide, however many of them are tied or are members."""
    scores, members = scored(1, 6, 300, kind)
    drawn = resamples(6, 300, draws=9)
    expected = [
        plain_tpr(repeated(scores, drawn, draw), repeated(members, drawn, draw), fpr)
        for draw in range(10)
    ]
    for entries in (2**20, 1, 4 * scores.size):
        monkeypatch.setattr(comparison, "_ENTRIES", entries)
        np.testing.assert_array_equal(every(pooled_tpr(scores, members, fpr, drawn)), expected)


def test_a_perfect_attack_makes_the_search_go_on():
    """All of the strictest scores belong to members: no false alarm among them ends it."""
    _, members = scored(2, 8, 400)
    scores = members + np.random.default_rng(0).random(members.shape) / 2
    drawn = resamples(8, 400, draws=5)
    assert every(pooled_tpr(scores, members, 0, drawn)) == [1.0] * 6
    assert every(mean_auc(scores, members, drawn)) == [1.0] * 6
    assert every(pooled_tpr(-scores, members, 0.999, drawn)) == [0.0] * 6
    assert every(mean_auc(-scores, members, drawn)) == [0.0] * 6


def test_rates_that_decimals_cannot_hold_exactly():
    """29 of 100 are allowed at 0.29, though 0.29 · 100 rounds to less than 29."""
    scores = np.arange(200.0)[::-1].reshape(2, 100)
    members = np.zeros((2, 100), dtype=bool)
    members[:, ::2] = True  # 100 others, in turn with 100 members
    drawn = resamples(2, 100, draws=1)
    for percent in range(101):
        fpr = percent / 100
        expected = roc(scores, members).tpr_at(fpr).value
        assert pooled_tpr(scores, members, fpr, drawn).value == expected


def test_infinite_scores_are_tied_with_each_other():
    scores = np.array([[np.inf, np.inf, -np.inf, -np.inf]] * 2)
    members = np.array([[True, False, True, False]] * 2)
    drawn = resamples(2, 4, draws=2)
    assert mean_auc(scores, members, drawn).value == 0.5
    assert pooled_tpr(scores, members, 0.4, drawn).value == 0
    assert pooled_tpr(scores, members, 0.5, drawn).value == 0.5


def test_constant_scores_tell_nothing():
    scores, members = scored(3, 4, 30, "constant")
    drawn = resamples(4, 30, draws=20)
    assert every(mean_auc(scores, members, drawn)) == [0.5] * 21
    assert every(pooled_tpr(scores, members, 0.99, drawn)) == [0.0] * 21
    assert every(pooled_tpr(scores, members, 1, drawn)) == [1.0] * 21


def test_lists_tensors_and_single_precision_are_taken_as_they_are():
    """A list keeps the digits that float32 would round away."""
    scores = [[1 + 1e-12, 1.0, 0.0], [1 + 1e-12, 1.0, 0.0]]
    members = [[1, 0, 0], [1, 0, 0]]
    drawn = resamples(2, 3, draws=2)
    assert mean_auc(scores, members, drawn).value == 1.0
    assert pooled_tpr(scores, members, 0, drawn).value == 1.0
    tensor = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    assert mean_auc(tensor, torch.tensor(members), drawn).value == 1.0
    assert mean_auc(tensor.float(), torch.tensor(members), drawn).value == 0.75
    flags = torch.tensor([[True, False], [False, False]])
    assert mean_rate(flags, torch.ones(2, 2), resamples(2, 2, draws=2)).value == 0.25


def test_arguments_are_left_alone():
    scores, members = scored(4, 4, 20, "ties")
    drawn = resamples(4, 20, draws=3)
    before = [a.copy() for a in (scores, members, drawn.models, drawn.points)]
    mean_auc(scores, members, drawn)
    pooled_tpr(scores, members, 0.1, drawn)
    mean_rate(scores, members, drawn)
    for old, now in zip(before, (scores, members, drawn.models, drawn.points), strict=True):
        np.testing.assert_array_equal(now, old)


# --- resamples without one kind ----------------------------------------------------------------


def test_resamples_that_lack_a_kind():
    scores = np.array([[2.0, 1.0, 3.0], [0.0, 1.0, 3.0]])
    members = np.array([[True, False, True], [True, False, False]])
    drawn = Resamples(
        np.array([[1, 1], [2, 0], [2, 0], [0, 2], [1, 1]]),
        np.array([[1, 1, 1], [3, 0, 0], [0, 3, 0], [0, 1, 2], [1, 0, 2]]),
    )
    # Only members; only others; only others; and no other of the first model.
    auc = mean_auc(scores, members, drawn)
    assert auc.value == 0.5
    np.testing.assert_array_equal(auc.draws, [np.nan, np.nan, np.nan, 0.0])
    tpr = pooled_tpr(scores, members, 0.5, drawn)
    assert tpr.value == 2 / 3  # from 2 on, where one of three others is
    np.testing.assert_array_equal(tpr.draws, [np.nan, np.nan, np.nan, 0.0])
    assert all(np.isnan(auc.interval()))
    rate = mean_rate(scores, members, drawn)
    np.testing.assert_allclose(rate.draws, [2.0, np.nan, np.nan, (2 + 2 * 3 + 0) / 4])


# --- properties --------------------------------------------------------------------------------


def test_equal_arguments_give_equal_draws():
    first, again, other = (resamples(8, 50, draws=30, seed=seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first.models, again.models)
    np.testing.assert_array_equal(first.points, again.points)
    assert (first.models[1:] != other.models[1:]).any()
    assert (first.points[1:] != other.points[1:]).any()
    # The draws of models do not depend on how many points there are.
    np.testing.assert_array_equal(first.models, resamples(8, 70, draws=30, seed=3).models)


def test_draws_are_those_of_drawing_with_replacement():
    drawn = resamples(8, 50, draws=4000)
    for counts, size in ((drawn.models, 8), (drawn.points, 50)):
        assert (counts[0] == 1).all()
        assert (counts.sum(axis=1) == size).all()
        assert counts[1:].mean(axis=0) == pytest.approx(1, abs=0.1)
        assert counts[1:].var(axis=0) == pytest.approx(1 - 1 / size, abs=0.15)
    both = np.corrcoef(drawn.models[1:, 0], drawn.points[1:, 0])[0, 1]
    assert abs(both) < 5 / np.sqrt(4000)  # independent


@pytest.mark.parametrize("kind", KINDS)
def test_a_difference_with_itself_is_exactly_nothing(kind):
    scores, members = scored(5, 6, 40, kind)
    estimates = [
        [
            mean_auc(scores, members, drawn),
            pooled_tpr(scores, members, 0.1, drawn),
            mean_rate(members, np.ones_like(members), drawn),
        ]
        for drawn in (resamples(6, 40, draws=50), resamples(6, 40, draws=50))
    ]
    for one, same in zip(*estimates, strict=True):
        assert (one - same).recorded() == [0.0, 0.0, 0.0]


def test_a_paired_difference_is_narrower():
    """Both share the luck of models and points; a small constant gain stays visible."""
    scores, members = scored(6, 8, 200)
    better = scores + 0.3 * members
    drawn, other = (resamples(8, 200, draws=200, seed=seed) for seed in (0, 1))
    first, second = mean_auc(scores, members, drawn), mean_auc(better, members, drawn)
    low, high = (second - first).interval()
    assert 0 < low < second.value - first.value < high
    unpaired = mean_auc(better, members, other) - first
    assert high - low < 0.5 * np.subtract(*unpaired.interval()[::-1])


@settings(max_examples=20)
@cases
def test_monotone_changes_and_the_order_of_models_change_nothing(seed, models, points, kind):
    scores, members = scored(seed, models, points, kind)
    drawn = resamples(models, points, draws=5)
    shift = 10.0 * np.arange(models)[:, None]  # areas compare within a model alone
    np.testing.assert_array_equal(
        mean_auc(np.arctan(scores) + shift, members, drawn).draws,
        mean_auc(np.arctan(scores), members, drawn).draws,
    )
    order = np.random.default_rng(seed).permutation(models)
    turned = Resamples(drawn.models[:, order], drawn.points)
    for fpr in (0, 0.3):
        np.testing.assert_array_equal(
            pooled_tpr(np.arctan(scores)[order], members[order], fpr, turned).draws,
            pooled_tpr(scores, members, fpr, drawn).draws,
        )
    np.testing.assert_allclose(
        every(mean_auc(-scores, members, drawn)),
        1 - np.array(every(mean_auc(scores, members, drawn))),
        atol=1e-14,
    )


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_pooled_tpr_grows_with_the_rate_allowed(seed):
    scores, members = scored(seed, 3, 15, "ties")
    drawn = resamples(3, 15, draws=5)
    curves = [pooled_tpr(scores, members, fpr, drawn).draws for fpr in np.linspace(0, 1, 9)]
    assert (np.diff(curves, axis=0) >= 0).all()
    assert (curves[-1] == 1).all()


# --- intervals ---------------------------------------------------------------------------------


def test_interval_is_that_of_the_quantiles():
    estimate = Estimate(3.0, np.arange(101.0))
    assert estimate.interval(0.9) == pytest.approx((5, 95))
    assert estimate.recorded() == pytest.approx([3, 2.5, 97.5])


def test_functions_keep_the_pairing():
    first, second = Estimate(1.0, np.array([1.0, 2.0])), Estimate(4.0, np.array([5.0, 7.0]))
    product = Estimate.of(lambda a, b: a * b, first, second)
    assert every(product) == [4.0, 5.0, 14.0]
    assert every(second - first) == [3.0, 4.0, 5.0]


@pytest.mark.parametrize("gap", [0.0, 1.0])
def test_intervals_cover(gap):
    """Normal scores with effects of models, of points and of pairs: the area is known exactly.

    The pigeonhole bootstrap errs on the wide side; below are 3 deviations of the Monte Carlo error.
    """
    models, points, trials, level = 10, 60, 200, 0.9
    half = np.arange(models)[:, None] < models // 2
    truth = norm.cdf(gap / np.sqrt(2 * (1 + 0.5**2)))
    covered = 0
    for trial in range(trials):
        random = np.random.default_rng(trial)
        members = random.permuted(np.repeat(half, points, axis=1), axis=0)
        level_of_point = random.normal(0, 0.5, points)
        level_of_model = random.normal(0, 3, (models, 1))
        noise = random.normal(size=members.shape)
        scores = level_of_model + level_of_point + gap * members + noise
        drawn = resamples(models, points, draws=100, seed=trial)
        low, high = mean_auc(scores, members, drawn).interval(level)
        covered += low <= truth <= high
    assert covered / trials >= level - 3 * np.sqrt(level * (1 - level) / trials)


def test_intervals_of_rates_cover():
    models, points, trials, level = 12, 60, 200, 0.9
    covered = 0
    for trial in range(trials):
        random = np.random.default_rng(trial)
        chance = random.normal(0, 0.5, (models, 1)) + random.normal(0, 0.5, points)
        right = chance + random.normal(size=(models, points)) > 1
        truth = norm.sf(1 / np.sqrt(1.5))
        drawn = resamples(models, points, draws=100, seed=trial)
        low, high = mean_rate(right, np.ones_like(right), drawn).interval(level)
        covered += low <= truth <= high
    assert covered / trials >= level - 3 * np.sqrt(level * (1 - level) / trials)


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "members", "message"),
    [
        (np.zeros((2, 4)), np.eye(2, 3), r"^scores must have shape \(2, 3\); got \(2, 4\)\.$"),
        (np.zeros((2, 3)), np.eye(3, 2), r"^members must have shape \(2, 3\); got \(3, 2\)\.$"),
        (np.zeros(3), np.eye(2, 3), r"^scores must have shape \(2, 3\); got \(3,\)\.$"),
        (np.full((2, 3), np.nan), np.eye(2, 3), r"^scores must be numbers or infinite; got nan\.$"),
        (
            np.zeros((2, 3), complex),
            np.eye(2, 3),
            r"^scores must be real; got torch\.complex128\.$",
        ),
        (
            np.zeros((2, 3)),
            2 * np.eye(2, 3),
            r"^members must hold True and False, or 1 and 0; got other numbers\.$",
        ),
        (
            np.zeros((2, 3)),
            np.ones((2, 3)),
            "^members must hold both members and non-members of each model; "
            r"model 0 has only one kind\.$",
        ),
        (
            np.zeros((2, 3)),
            np.array([[1, 0, 0], [0, 0, 0]]),
            "^members must hold both members and non-members of each model; "
            r"model 1 has only one kind\.$",
        ),
        ([[1.0], [1.0, 2.0]], np.eye(2, 3), r"^scores must be a tensor or array of numbers; got "),
    ],
)
def test_scores_refused(scores, members, message):
    drawn = resamples(2, 3, draws=2)
    with pytest.raises(ValueError, match=message):
        mean_auc(scores, members, drawn)
    with pytest.raises(ValueError, match=message):
        pooled_tpr(scores, members, 0.1, drawn)


@pytest.mark.parametrize(
    ("flags", "chosen", "message"),
    [
        (np.eye(2), np.zeros((2, 2)), r"^chosen must choose a pair; got none\.$"),
        (np.eye(3), np.ones((2, 2)), r"^flags must have shape \(2, 2\); got \(3, 3\)\.$"),
        (np.eye(2), np.ones((2, 3)), r"^chosen must have shape \(2, 2\); got \(2, 3\)\.$"),
        (np.full((2, 2), np.inf), np.ones((2, 2)), r"^flags must be finite; got inf or nan\.$"),
    ],
)
def test_rates_refused(flags, chosen, message):
    with pytest.raises(ValueError, match=message):
        mean_rate(flags, chosen, resamples(2, 2, draws=2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: resamples(1, 5),
            r"^num_models must be a whole number of at least 2; got 1\.$",
        ),
        (
            lambda: resamples(2, 1),
            r"^num_points must be a whole number of at least 2; got 1\.$",
        ),
        (
            lambda: resamples(2, 2, draws=0),
            r"^draws must be a whole number of at least 1; got 0\.$",
        ),
        (
            lambda: resamples(2, 2, seed=-1),
            r"^seed must be a whole number of at least 0; got -1\.$",
        ),
        (
            lambda: pooled_tpr(np.eye(2), np.eye(2), 1.5, resamples(2, 2)),
            r"^fpr must be a number in \[0, 1\]; got 1\.5\.$",
        ),
        (
            lambda: Estimate(0.0, np.zeros(3)).interval(1),
            r"^level must lie strictly between 0 and 1; got 1\.$",
        ),
        (
            lambda: Estimate(0.0, np.zeros(3)) - Estimate(0.0, np.zeros(1)),
            "^estimates must come from the same resamples to be subtracted; "
            r"got 3 and 1 draws\.$",
        ),
    ],
)
def test_other_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "function", [mean_auc, lambda *a: pooled_tpr(*a[:2], 0.1, a[2]), mean_rate]
)
def test_drawn_must_be_resamples(function):
    flags = np.eye(2, dtype=bool)
    with pytest.raises(ValueError, match=r"^drawn must be what resamples returns"):
        function(flags * 1.0, flags, 3)
    with pytest.raises(ValueError, match=r"^points must"):
        over_points([1.0, 2.0], 3)
