"""Matching and similarity against loops, permutations and the definition; baselines by hand."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatbook.reconstruction import (
    Matches,
    baselines,
    correlation,
    distance,
    match,
    ssim,
    vote,
)

close = np.testing.assert_allclose
few = settings(max_examples=40)


def images(seed, count, shape=(3, 4)):
    return np.random.default_rng(seed).normal(size=(count, *shape))


# --- similarity --------------------------------------------------------------------------------


def test_correlation_and_distance_are_plain():
    x, other = images(0, 5), images(1, 3)
    for i, j in itertools.product(range(5), range(3)):
        a, b = x[i].ravel(), other[j].ravel()
        close(correlation(x, other)[i, j], np.corrcoef(a, b)[0, 1], rtol=1e-12)
        close(distance(x, other)[i, j], np.sqrt(((a - b) ** 2).sum()), rtol=1e-12)


@given(st.integers(0, 2**32), st.floats(1e-3, 1e3), st.floats(-10, 10))
@few
def test_correlation_is_blind_to_brightness_and_contrast(seed, contrast, brightness):
    x, other = images(seed, 3), images(seed + 1, 2)
    close(
        correlation(contrast * x + brightness, other), correlation(x, other), rtol=1e-6, atol=1e-9
    )
    close(correlation(-x, other), -correlation(x, other), rtol=1e-12)
    close(np.diag(correlation(x, x)), 1, rtol=1e-12)


def test_flat_images_correlate_with_nothing():
    flat = np.full((1, 12), 0.1)
    assert correlation(flat, images(0, 4, (12,))).tolist() == [[0.0] * 4]
    close(correlation(1e-200 * images(0, 1), images(0, 1)), 1, rtol=1e-12)


def plain_ssim(x, y, size=1.0):
    """One channel, one window after the other."""
    ticks = np.arange(-5, 6)
    window = np.exp(-(ticks**2) / (2 * 1.5**2))
    window = np.outer(window, window) / window.sum() ** 2
    c1, c2, values = (0.01 * size) ** 2, (0.03 * size) ** 2, []
    for i, j in itertools.product(range(x.shape[0] - 10), range(x.shape[1] - 10)):
        p, q = x[i : i + 11, j : j + 11], y[i : i + 11, j : j + 11]
        mp, mq = (window * p).sum(), (window * q).sum()
        vp, vq = (window * (p - mp) ** 2).sum(), (window * (q - mq) ** 2).sum()
        c = (window * (p - mp) * (q - mq)).sum()
        values.append((2 * mp * mq + c1) * (2 * c + c2) / ((mp**2 + mq**2 + c1) * (vp + vq + c2)))
    return np.mean(values)


def test_ssim_is_its_definition():
    x, y = np.random.default_rng(0).uniform(size=(2, 3, 2, 13, 14))
    found = ssim(x, y, data_range=2.0)
    assert found.shape == (3,)
    for i in range(3):
        expected = np.mean([plain_ssim(x[i, c], y[i, c], 2.0) for c in range(2)])
        close(found[i], expected, rtol=1e-10)
    close(
        ssim(x[:, 0], y[:, 0]), [plain_ssim(*pair) for pair in zip(x[:, 0], y[:, 0], strict=True)]
    )


def test_ssim_agrees_with_scikit_image():
    metrics = pytest.importorskip("skimage.metrics")
    x, y = np.random.default_rng(1).uniform(size=(2, 2, 28, 28))
    options = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
    expected = [
        metrics.structural_similarity(p, q, data_range=1.0, **options)
        for p, q in zip(x, y, strict=True)
    ]
    close(ssim(x, y), expected, rtol=1e-10)


@given(st.integers(0, 2**32))
@few
def test_ssim_is_symmetric_and_at_most_one(seed):
    x, y = np.random.default_rng(seed).uniform(size=(2, 2, 12, 12))
    close(ssim(x, y), ssim(y, x), rtol=1e-12)
    close(ssim(x, x), 1, rtol=1e-12)
    assert (ssim(x, y) < 1).all()


# --- matching ----------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", ["correlation", "distance"])
@pytest.mark.parametrize("signed", [True, False])
def test_nearest_guess_is_that_of_a_loop(measure, signed):
    guesses, samples = images(0, 7), images(1, 4)
    found = match(guesses, samples, measure=measure, signed=signed)
    for j, sample in enumerate(samples):
        scores = []
        for guess in guesses:
            either = [guess] if signed else [guess, -guess]
            if measure == "correlation":
                scores.append(max(np.corrcoef(g.ravel(), sample.ravel())[0, 1] for g in either))
            else:
                scores.append(-min(np.linalg.norm(g - sample) for g in either))
        assert found.guess[j] == np.argmax(scores)
        close(found.score[j], max(scores) if measure == "correlation" else -max(scores))
    assert found.distinct == len(set(found.guess.tolist()))


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 5))
@few
def test_one_to_one_is_the_best_of_all_assignments(seed, many, wanted):
    guesses, samples = images(seed, many, (6,)), images(seed + 1, wanted, (6,))
    table = correlation(guesses, samples)
    found = match(guesses, samples, one_to_one=True)
    given_out = found.guess[found.guess >= 0]
    assert len(set(given_out.tolist())) == len(given_out) == found.distinct == min(many, wanted)
    assert (found.score[found.guess < 0] == -1).all()
    reached = sum(table[g, j] for j, g in enumerate(found.guess) if g >= 0)
    if many >= wanted:
        every = (
            sum(table[g, j] for j, g in enumerate(p))
            for p in itertools.permutations(range(many), wanted)
        )
    else:
        every = (
            sum(table[i, j] for i, j in enumerate(p))
            for p in itertools.permutations(range(wanted), many)
        )
    close(reached, max(every), rtol=1e-10, atol=1e-12)
    free = match(guesses, samples)
    assert (free.score >= found.score - 1e-12).all()
    assert free.distinct <= min(many, wanted)


def test_shuffled_samples_are_all_found():
    samples = images(0, 9)
    order = np.random.default_rng(1).permutation(9)
    for one_to_one in (True, False):
        found = match(3 * samples[order] - 1, samples, one_to_one=one_to_one)
        assert (order[found.guess] == np.arange(9)).all()
        assert found.found(0.99) == found.distinct == 9
        assert found.median() == pytest.approx(1)
    assert match(-samples, samples).median() < 0.9
    assert match(-samples, samples, signed=False).median() == pytest.approx(1)


def test_one_blur_for_many_samples_counts_once():
    base = images(0, 1)
    samples = base + 0.1 * images(1, 6)
    found = match(base, samples)
    assert found.distinct == found.found(0.9) == 1
    assert (found.score > 0.9).all()
    alone = match(base, samples, one_to_one=True)
    assert (alone.guess >= 0).sum() == 1
    assert alone.found(0.9) == 1


def test_votes_average_near_ties_alone():
    sample, noise = images(0, 1, (400,)), images(1, 2, (400,))
    noise -= np.mean(noise, axis=0) * np.array([[1.0], [1.0]])  # the two cancel
    guesses = np.concatenate([sample + noise, -sample])
    voted = vote(guesses, sample, ratio=1.2)
    assert correlation(voted, sample)[0, 0] > correlation(guesses, sample).max() + 0.1
    single = vote(guesses, sample, ratio=1.0)
    close(correlation(single, sample)[0, 0], correlation(guesses, sample).max(), rtol=1e-9)
    assert vote(images(0, 3), images(1, 2)).shape == (2, 3, 4)
    close(np.linalg.norm(voted), 1)


def test_baselines_stand_beside_the_attack():
    samples, others = images(0, 5), images(1, 5)
    guesses = samples + 0.05 * images(2, 5)
    rows = np.concatenate([-samples[:2].reshape(2, -1), images(3, 4).reshape(4, -1)])
    table = baselines(guesses, samples, rows=rows, held_out=others, placebo=others)
    assert list(table) == ["attack", "rows", "held out", "placebo"]
    assert table["attack"].found(0.9) == 5
    assert table["rows"].found(0.99) == 2  # with either sign
    assert table["placebo"].found(0.9) == table["held out"].found(0.9) == 0
    assert list(baselines(guesses, samples)) == ["attack"]
    close(table["placebo"].score, match(guesses, others).score)


def test_kinds_go_out_as_they_came():
    guesses, samples = images(0, 3), images(1, 2)
    found = match(torch.from_numpy(guesses), samples)
    assert isinstance(found.guess, torch.Tensor)
    assert isinstance(vote(guesses, torch.from_numpy(samples)), torch.Tensor)
    assert isinstance(match(guesses, samples).score, np.ndarray)
    assert found.distinct == match(guesses, samples).distinct
    assert isinstance(found.median(), float)
    tensors = (torch.from_numpy(v) for v in (guesses, samples, guesses.reshape(3, -1), samples))
    table = baselines(*itertools.islice(tensors, 2), rows=torch.from_numpy(guesses.reshape(3, -1)))
    assert isinstance(table["rows"], Matches)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: match([[1.0, 2.0]], [[1.0, 2.0, 3.0]]),
            "samples must have shape (images, 2); got (1, 3).",
        ),
        (
            lambda: match([[1.0]], [[1.0]], measure="ncc"),
            "measure must be one of correlation, distance; got 'ncc'.",
        ),
        (
            lambda: match([[1.0]], [[1.0]], one_to_one="yes"),
            "one_to_one must be True or False; got 'yes'.",
        ),
        (lambda: match([[np.inf]], [[1.0]]), "guesses must be finite; got inf or nan."),
        (lambda: vote([[1.0]], [[1.0]], ratio=0.5), "ratio must be at least 1; got 0.5."),
        (
            lambda: baselines([[1.0]], [[1.0]], placebo=[[1.0], [2.0]]),
            "placebo must hold as many images as samples, 1; got 2.",
        ),
        (
            lambda: ssim(np.zeros((1, 10, 20)), np.zeros((1, 10, 20))),
            "images must be at least 11 pixels high and wide; got 10 × 20.",
        ),
        (
            lambda: ssim(np.zeros((1, 11, 11)), np.zeros((2, 11, 11))),
            "others must have shape (1, 11, 11); got (2, 11, 11).",
        ),
        (
            lambda: ssim(np.zeros((1, 11, 11)), np.zeros((1, 11, 11)), data_range=0),
            "data_range must be a finite number above 0; got 0.",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == message


def test_baselines_refuse_a_placebo_without_a_length():
    with pytest.raises(
        ValueError, match=r"^placebo must hold as many images as samples, 3; got int"
    ):
        baselines(np.eye(3), np.eye(3), placebo=3)
    with pytest.raises(ValueError, match=r"^others must|^guesses must|^samples must"):
        baselines(np.eye(3), np.eye(3), rows=np.ones((2, 2)))
