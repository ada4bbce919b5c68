"""Memorization and influence against loops, exact leave-one-out, and simulated models."""

import itertools
import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from flatbook.memorization import buckets, influence, influence_entropy, memorization


def drawn(seed, *, models=12, points=7, evaluated=5):
    """Draw a design with at least two models in and two out of each point, and answers."""
    random = np.random.default_rng(seed)
    design = random.random((models, points)) < 0.6
    design[:2], design[2:4] = True, False
    design = random.permuted(design, axis=0)
    correct = random.random((models, points)) < np.where(design, 0.9, 0.4)
    return correct, random.random((models, evaluated)) < 0.7, design, random


def difference(values, seen):
    """Compute a difference of means and its standard error, in plain words."""
    a, b = values[seen].astype(float), values[~seen].astype(float)
    error = math.sqrt(a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b))
    return a.mean() - b.mean(), error


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.booleans())
def test_both_are_the_longhand(seed, soft):
    correct, eval_correct, design, random = drawn(seed)
    if soft:
        correct, eval_correct = (random.random(array.shape) for array in (correct, eval_correct))
    values, errors = memorization(correct, design, standard_error=True)
    np.testing.assert_array_equal(memorization(correct, design), values)
    for i in range(7):
        expected = difference(correct[:, i], design[:, i])
        assert (values[i], errors[i]) == pytest.approx(expected, rel=1e-12, abs=1e-14)
    values, errors = influence(correct, eval_correct, design, standard_error=True)
    np.testing.assert_array_equal(influence(correct, eval_correct, design), values)
    for i, j in itertools.product(range(7), range(5)):
        expected = difference(eval_correct[:, j], design[:, i])
        assert (values[i, j], errors[i, j]) == pytest.approx(expected, rel=1e-12, abs=1e-14)


@given(st.integers(0, 2**32), st.booleans())
def test_own_influence_is_memorization(seed, soft):
    correct, _, design, random = drawn(seed)
    correct = random.random(correct.shape) if soft else correct
    for got, expected in zip(
        influence(correct, None, design, standard_error=True),
        memorization(correct, design, standard_error=True),
        strict=True,
    ):
        np.testing.assert_allclose(np.diag(got), expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(
        influence(correct, None, design), influence(correct, correct, design)
    )


@given(st.integers(0, 2**32))
def test_signs_and_order(seed):
    correct, _, design, random = drawn(seed)
    values, errors = memorization(correct, design, standard_error=True)
    assert (np.abs(values) <= 1).all()
    opposite = memorization(correct, ~design, standard_error=True)
    np.testing.assert_allclose(opposite, (-values, errors), atol=1e-15)
    wrong = memorization(~correct, design, standard_error=True)
    np.testing.assert_allclose(wrong, (-values, errors), atol=1e-15)
    order = random.permutation(len(design))
    np.testing.assert_array_equal(memorization(correct[order], design[order]), values)


def nearest_neighbour_is_right(x, y, subset, point):
    """Say whether the nearest point of a subset has the label; an empty one answers wrong."""
    if not subset:
        return False
    nearest = min(subset, key=lambda i: (abs(x[i] - x[point]), i))
    return y[nearest] == y[point]


@pytest.mark.parametrize("seed", range(3))
def test_all_subsets_give_exact_leave_one_out(seed):
    # Each subset without i pairs with the same one and i: the mean difference is then, exactly,
    # that of leaving i out, averaged over what else was there.
    random = np.random.default_rng(seed)
    n, fresh = 7, 3
    x, y = random.normal(size=n + fresh), random.integers(0, 2, n + fresh)
    subsets = [s for size in range(n + 1) for s in itertools.combinations(range(n), size)]
    design = np.array([[i in s for i in range(n)] for s in subsets])
    right = np.array(
        [[nearest_neighbour_is_right(x, y, s, j) for j in range(n + fresh)] for s in subsets]
    )
    table = influence(right[:, :n], right, design)
    scores = memorization(right[:, :n], design)
    for i in range(n):
        without = [s for s in subsets if i not in s]
        for j in range(n + fresh):
            left_out = np.mean(
                [
                    float(nearest_neighbour_is_right(x, y, tuple(sorted({*s, i})), j))
                    - float(nearest_neighbour_is_right(x, y, s, j))
                    for s in without
                ]
            )
            assert table[i, j] == pytest.approx(left_out, abs=1e-14)
        assert scores[i] == table[i, i]


def test_estimates_find_what_was_memorized():
    # Point 0 is remembered only; point 1 helps the evaluation point, which otherwise is a toss.
    random = np.random.default_rng(1)
    design = random.random((400, 20)) < 0.7
    correct = np.ones((400, 20), dtype=bool)
    correct[:, 0] = design[:, 0]
    eval_correct = (design[:, 1] | (random.random(400) < 0.5))[:, None]
    values, errors = memorization(correct, design, standard_error=True)
    assert values.tolist() == [1.0, *[0.0] * 19]
    assert errors.tolist() == [0.0] * 20  # all agree
    table, errors = influence(correct, eval_correct, design, standard_error=True)
    assert table.argmax() == 1
    assert abs(table[1, 0] - 0.5) < 4 * errors[1, 0]
    assert (np.abs(np.delete(table, 1)) < 5 * np.delete(errors, 1)).all()
    shuffled = influence(correct, eval_correct, random.permutation(design), standard_error=True)
    assert (np.abs(shuffled[0]) < 5 * shuffled[1]).all()


@pytest.mark.parametrize("soft", [False, True])
def test_standard_errors_are_those_of_repeated_runs(soft):
    random = np.random.default_rng(2)
    models, runs = 40, 4000
    seen = np.arange(models) < 28
    chance = np.where(seen, 0.8, 0.3)[:, None]
    right = random.random((models, runs)) < chance  # a run a column
    if soft:
        right = np.clip(chance + random.normal(0, 0.1, right.shape), 0, 1)
    design = np.repeat(seen[:, None], runs, axis=1)
    values, errors = memorization(right, design, standard_error=True)
    assert values.mean() == pytest.approx(0.5, abs=0.01)
    assert (errors**2).mean() == pytest.approx(values.var(), rel=0.1)
    covered = np.abs(values - 0.5) < stats.norm.isf(0.025) * errors
    assert 0.92 < covered.mean() < 0.97


def test_standard_errors_are_those_of_the_bootstrap():
    random = np.random.default_rng(3)
    models = 300
    design = random.random((models, 2)) < 0.7
    right = random.random((models, 3)) < 0.2 + 0.5 * design[:, :1]
    table, errors = influence(design, right, design, standard_error=True)
    again = random.integers(models, size=(600, models))
    resampled = [influence(design[t], right[t], design[t]) for t in again]
    np.testing.assert_allclose(np.std(resampled, axis=0), errors, rtol=0.15)
    assert table[0].min() > 4 * errors[0].max()


def test_influence_by_blocks_of_points():
    correct, eval_correct, design, _ = drawn(4, points=600, evaluated=11)
    table, errors = influence(correct, eval_correct, design, standard_error=True)
    assert table.shape == errors.shape == (600, 11)
    for i in (0, 255, 256, 511, 512, 599):
        for j in (0, 10):
            expected = difference(eval_correct[:, j], design[:, i])
            assert (table[i, j], errors[i, j]) == pytest.approx(expected, abs=1e-14)


def test_influence_builds_only_what_it_returns():
    correct, eval_correct, design, _ = drawn(5, points=4000, evaluated=1000)
    tracemalloc.start()
    table = influence(correct, eval_correct, design)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert table.nbytes == 8 * 4000 * 1000
    assert peak < 1.3 * table.nbytes


def test_errors_do_not_cancel_far_from_zero():
    correct, eval_correct, design, random = drawn(8)
    soft, eval_soft = (random.random(array.shape) for array in (correct, eval_correct))
    for function, outcomes in ((memorization, (soft,)), (influence, (soft, eval_soft))):
        near = function(*outcomes, design, standard_error=True)
        far = function(*(1e6 + one for one in outcomes), design, standard_error=True)
        np.testing.assert_allclose(far, near, rtol=1e-7, atol=1e-8)
        constant = function(*(0 * one + 0.1 for one in outcomes), design, standard_error=True)
        np.testing.assert_allclose(constant, 0, atol=1e-16)


def test_counts_are_exact():
    # Float32 products would round the shares of 0.1; counts of models they hold exactly.
    design = np.arange(30)[:, None] < 10
    right = (np.arange(30) % 10 < 1)[:, None]
    assert influence(design, right, design).item() == 0.1 - 2 / 20
    table = influence(design, right * 1.0, design), influence(design, right * 1, design)
    assert table[0] == table[1] == 0.1 - 2 / 20


# --- influence entropy and buckets -------------------------------------------------------------


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from([1e-300, 1.0, 1e300]))
def test_influence_entropy_is_scipys_over_the_same_class(seed, scale):
    random = np.random.default_rng(seed)
    labels, eval_labels = np.array([0, 1, 2, 0, 1, 2, 2]), random.integers(0, 3, 6)
    table = np.round(random.normal(size=(7, 6)), random.integers(0, 4))
    got = influence_entropy(table * scale, labels, eval_labels)
    for j, c in enumerate(eval_labels):
        weights = np.abs(table[labels == c, j])
        expected = stats.entropy(weights) if weights.any() else math.log(len(weights))
        assert got[j] == pytest.approx(expected, abs=1e-12)
        assert -1e-15 <= got[j] <= math.log(len(weights)) + 1e-12
    np.testing.assert_allclose(
        influence_entropy(-table, labels + 5, eval_labels + 5), got, atol=1e-12
    )


def test_points_that_nothing_influences_are_typical():
    table = np.array([[0.0, 0.2], [0.0, 0.0], [0.0, 0.0], [0.7, 0.7]])
    got = influence_entropy(table, [0, 0, 0, 1], [0, 0])
    assert got == pytest.approx([math.log(3), 0])


def test_noise_of_few_models_raises_entropy():
    random = np.random.default_rng(6)

    def entropy(models):
        design = balanced = np.argsort(random.random((models, 40)), axis=0) < models // 2
        right = balanced[:, :1] | (random.random((models, 30)) < 0.5)  # point 0 alone matters
        table = influence(design, right, design)
        return influence_entropy(table, np.zeros(40, int), np.zeros(30, int)).mean()

    few, some, many = (entropy(models) for models in (10, 100, 10_000))
    assert many < some < few
    assert many < 2.5 < few


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.data())
def test_buckets_are_equal_and_ordered(values, data):
    k = data.draw(st.integers(1, len(values)))
    got = buckets(np.array(values), k)
    sizes = np.bincount(got, minlength=k + 1)[1:]
    assert got.min() == 1
    assert got.max() == k
    assert sizes.max() - sizes.min() <= 1
    assert sizes.tolist() == sorted(sizes, reverse=True)
    for number in range(1, k):
        here, next_up = (np.array(values)[got == b] for b in (number, number + 1))
        assert here.max() <= next_up.min()


def test_buckets_of_equal_values_go_by_position():
    assert buckets(np.zeros(6), 3).tolist() == [1, 1, 2, 2, 3, 3]
    assert buckets(np.arange(10.0)).tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


# --- what goes in and comes out ----------------------------------------------------------------


def test_tensors_come_out_where_tensors_went_in():
    correct, eval_correct, design, random = drawn(7)
    table, labels, eval_labels = random.normal(size=(4, 3)), [0, 1, 0, 1], [1, 0, 1]
    for function, arrays in (
        (memorization, (correct, design)),
        (influence, (correct, eval_correct, design)),
        (influence_entropy, (table, np.array(labels), np.array(eval_labels))),
        (buckets, (table[:, 0], 2)),
    ):
        expected = function(*arrays)
        assert isinstance(expected, np.ndarray)
        tensors = [torch.tensor(a) if isinstance(a, np.ndarray) else a for a in arrays]
        got = function(*tensors)
        assert isinstance(got, torch.Tensor)
        assert got.dtype == (torch.int64 if function is buckets else torch.float64)
        np.testing.assert_array_equal(got.numpy(), expected)
        lists = [a.tolist() if isinstance(a, np.ndarray) else a for a in arrays]
        np.testing.assert_array_equal(function(*lists), expected)
    pair = memorization(torch.tensor(correct).float(), design, standard_error=True)
    assert all(isinstance(one, torch.Tensor) for one in pair)
    np.testing.assert_array_equal(pair[0].numpy(), memorization(correct, design))


CORRECT, DESIGN = np.ones((4, 2), dtype=bool), np.array([[1, 1], [1, 1], [0, 0], [0, 0]])


@pytest.mark.parametrize(
    ("design", "errors", "message"),
    [
        (DESIGN * [1, 0], False, "at least 1 model in for each point; got 0 for point 1"),
        (DESIGN | [0, 1], False, "at least 1 model out for each point; got 0 for point 1"),
        (DESIGN & [[1, 1], [1, 0], [1, 1], [1, 1]], True, "at least 2 models in .* got 1 for po"),
        (DESIGN[:3], False, r"design must have shape \(4, 2\); got \(3, 2\)"),
        (DESIGN * 0.5, False, "design must hold True and False, or 1 and 0"),
    ],
)
def test_designs_are_refused(design, errors, message):
    for function, outcomes in ((memorization, (CORRECT,)), (influence, (CORRECT, CORRECT))):
        with pytest.raises(ValueError, match=message):
            function(*outcomes, design, standard_error=errors)


def test_other_refusals():
    with pytest.raises(ValueError, match=r"eval_correct must have shape \(4, evaluated\); got"):
        influence(CORRECT, CORRECT[:3], DESIGN)
    with pytest.raises(ValueError, match="eval_correct must be finite; got inf or nan"):
        influence(CORRECT, np.full((4, 1), np.nan), DESIGN)
    with pytest.raises(ValueError, match=r"correct must have shape \(models, points\); got"):
        memorization(CORRECT[:, 0], DESIGN)
    with pytest.raises(ValueError, match="correct must not be empty"):
        memorization(CORRECT[:, :0], DESIGN[:, :0])
    table = np.ones((3, 2))
    with pytest.raises(ValueError, match="labels must hold each class of eval_labels; got no 2"):
        influence_entropy(table, [0, 1, 1], [1, 2])
    with pytest.raises(ValueError, match=r"eval_labels must have shape \(2\); got \(3,\)"):
        influence_entropy(table, [0, 1, 1], [1, 1, 1])
    with pytest.raises(ValueError, match="labels must hold whole numbers; got"):
        influence_entropy(table, [0.0, 1.0, 1.0], [1, 1])
    with pytest.raises(ValueError, match="influence must be finite"):
        influence_entropy(table * np.inf, [0, 1, 1], [1, 1])
    with pytest.raises(ValueError, match="k must be a whole number from 1 to 3; got 4"):
        buckets([1.0, 2.0, 3.0], 4)
    with pytest.raises(ValueError, match="k must be a whole number from 1 to 3; got 0"):
        buckets([1.0, 2.0, 3.0], 0)
    with pytest.raises(ValueError, match="values must be finite"):
        buckets([1.0, np.nan])
