"""The G-norm path against brute force, exact fractions and 60 digits; attacks against sampling."""

import fractions
import itertools
import math

import mpmath
import numpy as np
import pytest
import sympy
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from scipy import integrate, linalg, optimize, stats

import flatbook
from flatbook.theory import linear
from flatbook.theory.linear import (
    interpolant_path,
    likelihood_ratio_advantage,
    min_norm_interpolant,
    output_variance,
    threshold_fpr,
    variance_path,
    variance_slope,
)

close = np.testing.assert_allclose


def problem(seed=0, *, n=4, d=9, decay=1.0, rank=None, null=0):
    """Draw X, consistent y and Sigma; ``rank`` makes rows dependent, ``null`` makes it singular."""
    random = np.random.default_rng(seed)
    X = random.normal(size=(n, d))
    if rank is not None:
        X = random.normal(size=(n, rank)) @ random.normal(size=(rank, d))
    turn = np.linalg.qr(random.normal(size=(d, d)))[0]
    values = np.arange(1.0, d + 1) ** -decay
    values[d - null :] = 0
    return X, X @ random.normal(size=d), (turn * values) @ turn.T


@st.composite
def problems(draw):
    d = draw(st.integers(1, 8))
    n = draw(st.integers(1, 10))
    return problem(
        draw(st.integers(0, 2**32)),
        n=n,
        d=d,
        decay=draw(st.sampled_from([0.0, 0.5, 2.0, 6.0])),
        rank=draw(st.integers(1, min(n, d))),
        null=draw(st.integers(0, d - 1)),
    )


ETAS = np.array([0.0, 1e-3, 0.3, 1.0, 10.0, 1e4, np.inf])


# --- the definition ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_interpolant_is_the_constrained_minimum(seed):
    X, y, Sigma = problem(seed, n=3, d=6)
    G = np.eye(6) + 4 * Sigma
    found = optimize.minimize(
        lambda w: w @ G @ w,
        np.zeros(6),
        jac=lambda w: 2 * G @ w,
        constraints={"type": "eq", "fun": lambda w: X @ w - y, "jac": lambda w: X},
        options={"ftol": 1e-15, "maxiter": 500},
    )
    assert found.success
    close(min_norm_interpolant(X, y, G), found.x, rtol=1e-6, atol=1e-8)
    close(interpolant_path(X, y, Sigma, [4.0])[0], found.x, rtol=1e-6, atol=1e-8)


def test_interpolant_is_the_closed_form():
    X, y, Sigma = problem(1)
    for eta in ETAS[:-1]:
        G = np.eye(9) + eta * Sigma
        lifted = linalg.solve(G, X.T, assume_a="pos")
        expected = lifted @ linalg.solve(X @ lifted, y, assume_a="pos")
        close(min_norm_interpolant(X, y, G), expected, rtol=1e-10)
        close(interpolant_path(X, y, Sigma, [eta])[0], expected, rtol=1e-10)
        close(variance_path(X, y, Sigma, [eta]), expected @ Sigma @ expected, rtol=1e-10)
    close(min_norm_interpolant(X, y), np.linalg.pinv(X) @ y, rtol=1e-12)
    close(min_norm_interpolant(X, y, 7.0 * np.eye(9)), np.linalg.pinv(X) @ y, rtol=1e-12)


def test_one_row_in_exact_fractions():
    # w = G⁻¹x y / xᵀG⁻¹x with everything rational.
    x, y, curvature, eta = (1, 2, -1), 3, (1, 4, 9), fractions.Fraction(1, 2)
    weighed = [fractions.Fraction(a) / (1 + eta * s) for a, s in zip(x, curvature, strict=True)]
    scale = y / sum(a * b for a, b in zip(x, weighed, strict=True))
    w = [scale * b for b in weighed]
    Sigma = np.diag([1.0, 4.0, 9.0])
    close(interpolant_path([list(x)], [y], Sigma, [0.5])[0], [float(v) for v in w], rtol=1e-14)
    variance = float(sum(s * v * v for s, v in zip(curvature, w, strict=True)))
    close(variance_path([list(x)], [y], Sigma, [0.5]), variance, rtol=1e-14)


@given(problems())
@example(problem(599818473, n=4, d=4, decay=6.0, rank=1, null=3))  # y cancels
def test_every_point_of_the_path_fits_and_is_stationary(case):
    X, y, Sigma = case
    path = interpolant_path(X, y, Sigma, ETAS)
    null = linalg.null_space(X, rcond=1e-10)
    scale = np.abs(path).max() + 1e-300
    close(path @ X.T, np.broadcast_to(y, (len(ETAS), len(y))), atol=1e-9 * np.abs(X).sum() * scale)
    for eta, w in zip(ETAS, path, strict=True):
        # Stationary in the metric divided by its largest part; of the limit only Sigma is left.
        G = Sigma if np.isinf(eta) else (np.eye(len(w)) + eta * Sigma) / (1 + eta)
        close(null.T @ G @ w, 0, atol=1e-9 * scale)


@given(problems())
def test_path_variance_and_slope_agree(case):
    X, y, Sigma = case
    variance = variance_path(X, y, Sigma, ETAS)
    path = interpolant_path(X, y, Sigma, ETAS)
    size = np.square(path).sum(axis=1).max() + 1e-300
    close(variance, output_variance(path, Sigma), atol=1e-10 * size)
    close(variance, np.einsum("ei,ij,ej->e", path, Sigma, path), atol=1e-10 * size)
    slope = variance_slope(X, y, Sigma, ETAS)
    null = linalg.null_space(X, rcond=1e-10)
    for eta, w, got in zip(ETAS[:-1], path[:-1], slope[:-1], strict=True):
        pull = null.T @ Sigma @ w
        metric = np.eye(null.shape[1]) + eta * null.T @ Sigma @ null
        expected = -2 * pull @ linalg.solve(metric, pull) if len(pull) else 0.0
        close(got, expected, atol=1e-9 * size)
    assert slope[-1] == 0


@pytest.mark.parametrize("eta", [0.05, 1.0, 20.0])
def test_slope_is_that_of_finite_differences(eta):
    X, y, Sigma = problem(2)
    step = 1e-4 * eta
    before, after = variance_path(X, y, Sigma, [eta - step, eta + step])
    close(variance_slope(X, y, Sigma, [eta]), (after - before) / (2 * step), rtol=1e-6)


def test_slope_in_symbols():
    eta = sympy.Symbol("eta", positive=True)
    y = sympy.Symbol("y", real=True)
    X, Sigma = sympy.Matrix([[1, 2, 1]]), sympy.diag(1, 2, 5)
    G = sympy.eye(3) + eta * Sigma
    w = G.LUsolve(X.T) * y / (X * G.LUsolve(X.T))[0]
    variance = (w.T * Sigma * w)[0]
    for value in (0, sympy.Rational(1, 3), 4):
        at = {eta: value, y: 2}
        numbers = ([[1.0, 2.0, 1.0]], [2.0], np.diag([1.0, 2.0, 5.0]), [float(value)])
        close(variance_path(*numbers), float(variance.subs(at)), rtol=1e-13)
        close(variance_slope(*numbers), float(variance.diff(eta).subs(at)), rtol=1e-13)


# --- theorems ----------------------------------------------------------------------------------


@given(problems())
def test_variance_never_rises_and_is_convex(case):
    X, y, Sigma = case
    etas = np.linspace(0, 8, 41)
    variance = variance_path(X, y, Sigma, etas)
    rounding = 1e-13 * variance[0]
    assert (np.diff(variance) <= rounding).all()
    assert (np.diff(variance, 2) >= -rounding).all()
    limit = variance_path(X, y, Sigma, [np.inf])[0]
    assert limit <= variance[-1] + rounding
    assert (variance_slope(X, y, Sigma, etas) <= 0).all()


@given(problems(), st.integers(0, 2**32))
def test_the_limit_has_the_least_variance_of_all_interpolants(case, seed):
    X, y, Sigma = case
    limit = interpolant_path(X, y, Sigma, [np.inf])[0]
    null = linalg.null_space(X, rcond=1e-10)
    others = limit + np.random.default_rng(seed).normal(size=(20, null.shape[1])) @ null.T
    size = np.square(others).sum(axis=1).max()
    assert (output_variance(others, Sigma) >= output_variance(limit, Sigma) - 1e-10 * size).all()


def test_limit_in_closed_form():
    X, y, Sigma = problem(3)
    inner = X @ linalg.solve(Sigma, X.T, assume_a="pos")
    expected = y @ linalg.solve(inner, y, assume_a="pos")
    close(variance_path(X, y, Sigma, [np.inf]), expected, rtol=1e-10)
    close(variance_path(X, y, Sigma, [1e12]), expected, rtol=1e-10)
    close(min_norm_interpolant(X, y, Sigma), interpolant_path(X, y, Sigma, [np.inf])[0], rtol=1e-12)


@given(problems())
def test_strict_at_one_strength_is_strict_at_all(case):
    X, y, Sigma = case
    pull = linalg.null_space(X, rcond=1e-10).T @ Sigma @ min_norm_interpolant(X, y)
    strength = np.linalg.norm(pull) / (np.linalg.norm(np.linalg.pinv(X) @ y) + 1e-300)
    assume(strength > 1e-3 or strength < 1e-12)
    variance = variance_path(X, y, Sigma, [0.0, 1.0, 2.0])
    if strength > 1e-3:
        assert variance[0] > variance[1] > variance[2]
    else:
        close(variance, variance[0], rtol=1e-9, atol=1e-14)


def test_nothing_shrinks_when_the_row_space_is_invariant():
    X, y, Sigma = problem(4)
    values, vectors = np.linalg.eigh(Sigma)
    rows = np.random.default_rng(0).normal(size=(4, 4)) @ vectors[:, 2:6].T
    for curvature, data in (
        (np.eye(9), X),  # no direction is special
        (X.T @ X / len(X), X),  # the empirical covariance: every interpolant pays |y|²/n
        (Sigma, rows),  # rows within eigenvectors
    ):
        path = interpolant_path(data, y, curvature, ETAS)
        close(path, np.broadcast_to(path[0], path.shape), rtol=1e-8, atol=1e-10)
        close(variance_slope(data, y, curvature, [0.0]), 0, atol=1e-20)
    close(variance_path(X, y, X.T @ X / len(X), ETAS), y @ y / len(y), rtol=1e-12)
    assert values[0] < values[-1]


@given(problems(), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_units(case, unit, curvature):
    # Targets in other units scale the weights; curvature in other units scales the strength.
    X, y, Sigma = case
    size = np.square(min_norm_interpolant(X, y)).sum()
    close(
        variance_path(X, unit * y, Sigma, [1.0]) / unit**2,
        variance_path(X, y, Sigma, [1.0]),
        atol=1e-11 * size,
    )
    close(
        variance_path(X, y, curvature * Sigma, [1.0]) / curvature,
        variance_path(X, y, Sigma, [curvature]),
        atol=1e-11 * size,
    )


# --- hard numbers ------------------------------------------------------------------------------


def in_sixty_digits(X, y, Sigma, eta):
    with mpmath.workdps(60):
        X, Sigma, y = mpmath.matrix(X), mpmath.matrix(Sigma), mpmath.matrix(y)
        G = mpmath.eye(Sigma.rows) + mpmath.mpf(eta) * Sigma
        lifted = mpmath.inverse(G) * X.T
        w = lifted * mpmath.lu_solve(X * lifted, y)
        return np.array(w.tolist(), dtype=float)[:, 0], float((w.T * Sigma * w)[0])


@pytest.mark.parametrize("eta", [0.0, 1e-6, 1.0, 1e6, 1e12])
@pytest.mark.parametrize("decay", [2.0, 6.0, 10.0])
def test_curvature_over_ten_orders_of_magnitude(eta, decay):
    random = np.random.default_rng(5)
    X, Sigma = random.normal(size=(3, 10)), np.diag(np.arange(1.0, 11) ** -decay)
    y = random.normal(size=3)
    w, variance = in_sixty_digits(X, y, Sigma, eta)
    close(interpolant_path(X, y, Sigma, [eta])[0], w, rtol=1e-9, atol=1e-11 * np.abs(w).max())
    close(variance_path(X, y, Sigma, [eta]), variance, rtol=1e-9)
    G = np.eye(10) + eta * Sigma
    close(min_norm_interpolant(X, y, G), w, rtol=1e-7, atol=1e-9 * np.abs(w).max())


def test_rows_that_nearly_repeat():
    random = np.random.default_rng(6)
    x = random.normal(size=8)
    X, Sigma = np.stack([x, x + 1e-9 * random.normal(size=8)]), problem(6, d=8)[2]
    y = X @ random.normal(size=8)
    w, variance = in_sixty_digits(X, y, Sigma, 3.0)
    # The data leave seven of sixteen digits.
    close(interpolant_path(X, y, Sigma, [3.0])[0], w, rtol=1e-5, atol=1e-5 * np.abs(w).max())
    close(variance_path(X, y, Sigma, [3.0]), variance, rtol=1e-5)
    close(X @ interpolant_path(X, y, Sigma, [3.0])[0], y, rtol=1e-12)


def test_repeated_rows_change_nothing():
    X, y, Sigma = problem(7)
    doubled, twice = np.vstack([X, X[:2], X[0] + X[1]]), np.append(y, [y[0], y[1], y[0] + y[1]])
    close(
        interpolant_path(doubled, twice, Sigma, ETAS),
        interpolant_path(X, y, Sigma, ETAS),
        rtol=1e-9,
        atol=1e-12,
    )
    G = np.eye(9) + Sigma
    close(min_norm_interpolant(doubled, twice, G), min_norm_interpolant(X, y, G), rtol=1e-10)
    close(variance_slope(doubled, twice, Sigma, ETAS), variance_slope(X, y, Sigma, ETAS), rtol=1e-9)


def test_as_many_samples_as_weights_leave_no_choice():
    X, y, Sigma = problem(8, n=6, d=6)
    assert (variance_slope(X, y, Sigma, ETAS) == 0).all()
    path = interpolant_path(X, y, Sigma, ETAS)
    close(path, np.broadcast_to(linalg.solve(X, y), path.shape), rtol=1e-10)
    tall, targets, Sigma = problem(8, n=12, d=6)
    only = linalg.lstsq(tall, targets)[0]
    close(variance_path(tall, targets, Sigma, [0, 1]), output_variance(only, Sigma), rtol=1e-10)


def test_singular_curvature_breaks_ties_by_the_norm():
    # Sigma sees only the first weight; the row can be fitted without it.
    X, y, Sigma = [[1.0, 1.0, 1.0]], [2.0], np.diag([1.0, 0.0, 0.0])
    close(interpolant_path(X, y, Sigma, [np.inf])[0], [0, 1, 1], atol=1e-15)
    close(min_norm_interpolant(X, y, Sigma), [0, 1, 1], atol=1e-15)
    close(variance_path(X, y, Sigma, [np.inf]), 0, atol=1e-30)
    X, y, Sigma = problem(9, null=3)
    limit = interpolant_path(X, y, Sigma, [np.inf])[0]
    close(interpolant_path(X, y, Sigma, [1e9])[0], limit, rtol=1e-6, atol=1e-8)
    close(min_norm_interpolant(X, y, Sigma + 1e-9 * np.eye(9)), limit, rtol=1e-6, atol=1e-8)
    # Of what has no curvature, nothing is moved.
    assert (variance_path(X, y, 0 * Sigma, ETAS) == 0).all()
    close(min_norm_interpolant(X, y, 0 * Sigma), min_norm_interpolant(X, y), rtol=1e-12)


def test_data_of_zeros():
    zeros = np.zeros((2, 3))
    close(interpolant_path(zeros, np.zeros(2), np.eye(3), ETAS), 0)
    with pytest.raises(ValueError, match=r"X and y must agree.* rank 0"):
        min_norm_interpolant(zeros, [0.0, 1.0])


def test_sizes_far_from_one():
    X, y, Sigma = problem(10)
    for unit in (1e-120, 1e120):
        close(variance_path(unit * X, unit * y, Sigma, ETAS), variance_path(X, y, Sigma, ETAS))
        close(
            variance_path(X, y, unit * Sigma, ETAS / unit) / unit, variance_path(X, y, Sigma, ETAS)
        )


def test_tensors_lists_and_single_precision():
    X, y, Sigma = problem(11)
    expected = variance_path(X, y, Sigma, ETAS)
    tensors = [torch.from_numpy(a) for a in (X, y, Sigma, ETAS)]
    tensors[0].requires_grad_()
    for got in (variance_path(*tensors), variance_path(*(a.tolist() for a in (X, y, Sigma, ETAS)))):
        assert isinstance(got, np.ndarray)
        assert got.dtype == np.float64
        assert np.array_equal(got, expected)
    single = [a.astype(np.float32) for a in (X, y, Sigma)]
    close(variance_path(*single, ETAS), expected, rtol=1e-4)
    widened = [a.astype(np.float64) for a in single]
    widened[2] = (widened[2] + widened[2].T) / 2
    close(variance_path(*single, ETAS), variance_path(*widened, ETAS), rtol=1e-6)
    labels = np.array([1, -1, 1, -1])
    close(variance_path(X, labels, Sigma, [1.0]), variance_path(X, 1.0 * labels, Sigma, [1.0]))
    assert isinstance(output_variance(y, np.eye(4)), float)
    assert output_variance(torch.eye(4), np.eye(4)).tolist() == [1, 1, 1, 1]


def test_rows_that_repeat_up_to_single_precision_are_one_row():
    random = np.random.default_rng(12)
    X = random.normal(size=(2, 6)).astype(np.float32)
    X = np.vstack([X, X[0] + X[1]])  # rounded: independent in the seventh digit
    y = X @ random.normal(size=6).astype(np.float32)
    assert np.linalg.matrix_rank(X.astype(float), rtol=1e-15) == 3
    close(min_norm_interpolant(X, y), min_norm_interpolant(X[:2], y[:2]), rtol=1e-4)


# --- attacks -----------------------------------------------------------------------------------


def test_threshold_fpr_counts_what_lies_beyond():
    draws = np.random.default_rng(0).normal(0.4, 0.7, size=400_000)
    for threshold in (1.0, 0.2):
        got = threshold_fpr(0.4, 0.7, threshold=threshold)
        assert abs(got - (draws >= threshold).mean()) < 4 * math.sqrt(got * (1 - got) / len(draws))
    close(threshold_fpr([0.4, 0.0], [0.7, 2.0]), stats.norm.sf(1, [0.4, 0.0], [0.7, 2.0]))


def test_threshold_fpr_without_spread():
    assert threshold_fpr(0.99, 0.0) == 0
    assert threshold_fpr(1.0, 0.0) == 1  # "at least" the threshold
    assert threshold_fpr(1.5, 0.0) == 1
    assert threshold_fpr(1.0, 1e-300) == 0.5


def total_variation(gap, std, noise):
    """Integrate the positive part of the difference of the densities, piece by piece."""
    member, other = stats.norm(0, noise), stats.norm(gap, std)
    ends = np.unique([
        centre + k * width
        for centre, width in ((0, noise), (gap, std))
        for k in np.linspace(-9, 9, 37)
    ])  # fmt: skip
    return sum(
        integrate.quad(lambda x: max(member.pdf(x) - other.pdf(x), 0), a, b, epsabs=1e-13)[0]
        for a, b in itertools.pairwise(ends)
    )


@pytest.mark.filterwarnings("ignore::scipy.integrate.IntegrationWarning")  # kinks
@pytest.mark.parametrize(
    ("gap", "std", "noise"),
    [
        (0.5, 1.0, 0.1),
        (0.5, 0.1, 1.0),
        (0.2, 0.2, 0.1),
        (-0.7, 0.6, 0.3),
        (0.0, 1.0, 0.4),
        (1.3, 0.5, 0.5),
        (2.0, 0.5001, 0.5),
        (3.0, 0.05, 0.02),
    ],
)
def test_likelihood_ratio_advantage_is_the_total_variation(gap, std, noise):
    got = likelihood_ratio_advantage(gap, std, noise)
    close(got, total_variation(gap, std, noise), atol=1e-8)
    close(got, likelihood_ratio_advantage(gap, noise, std), atol=1e-15)
    close(got, likelihood_ratio_advantage(1e150 * gap, 1e150 * std, 1e150 * noise), atol=1e-14)


def test_no_test_beats_the_likelihood_ratio():
    random = np.random.default_rng(1)
    gap, std, noise = 0.4, 0.6, 0.15
    members, others = random.normal(0, noise, 50_000), random.normal(gap, std, 50_000)

    def advantage(test):
        return test(members).mean() - test(others).mean()

    ratio = advantage(lambda x: stats.norm.pdf(x, 0, noise) > stats.norm.pdf(x, gap, std))
    assert abs(ratio - likelihood_ratio_advantage(gap, std, noise)) < 0.012
    for low in np.linspace(-1, 0.2, 25):
        for high in (*np.linspace(low, 1, 25), np.inf):
            tried = advantage(lambda x, low=low, high=high: (x >= low) & (x <= high))
            assert tried < likelihood_ratio_advantage(gap, std, noise) + 0.012


@given(st.floats(0, 5), st.floats(1e-3, 5), st.floats(1e-3, 5))
@example(5e-324, 2.0, 2.0)
def test_advantage_is_a_share_and_grows_with_the_gap(gap, std, noise):
    values = likelihood_ratio_advantage([gap, gap + 0.1, gap + 1], std, noise)
    assert (values >= 0).all()
    assert (values <= 1).all()
    assert (np.diff(values) >= -1e-14).all()


def test_limits_of_the_advantage():
    assert likelihood_ratio_advantage(0.0, 1.0, 0.0) == 1  # a point against a density
    assert likelihood_ratio_advantage(0.3, 0.0, 0.0) == 1
    assert likelihood_ratio_advantage(0.0, 0.0, 0.0) == 0
    assert likelihood_ratio_advantage(0.0, 0.7, 0.7) == 0
    close(likelihood_ratio_advantage(0.0, 0.7, 0.7 * (1 + 1e-12)), 0, atol=1e-11)
    close(likelihood_ratio_advantage(1e300, 1.0, 1e-10), 1)
    assert likelihood_ratio_advantage(0.5, 1e300, 1e-300) == 1  # the ratio underflows
    assert likelihood_ratio_advantage(0.0, 1e-300, 1e300) == 1
    near = likelihood_ratio_advantage(1.4, 0.7, 0.7 * (1 + np.array([-1e-9, 0, 1e-9])))
    close(near, 2 * stats.norm.cdf(1) - 1, rtol=1e-8)
    assert likelihood_ratio_advantage([[0.1], [0.2]], [1.0, 2.0, 3.0], 0.1).shape == (2, 3)


@pytest.mark.parametrize("gap", [0.2, 0.5, 1.0])
def test_least_advantage_is_where_the_spread_equals_the_gap(gap):
    spreads = gap * np.geomspace(0.2, 5, 4001)
    for noise, allowed in ((1e-4, 1e-3), (0.01, 1e-3), (0.1, 2e-3), (0.3, 0.04)):
        advantage = likelihood_ratio_advantage(gap, spreads, noise * gap)
        lowest = advantage.argmin()
        assert abs(spreads[lowest] / gap - 1) < allowed
        beyond = spreads > gap * noise  # on the way to equal spreads it falls again
        assert (np.diff(advantage[lowest:]) > 0).all()
        assert (np.diff(advantage[: lowest + 1][beyond[: lowest + 1]]) < 0).all()
    rough = spreads[likelihood_ratio_advantage(gap, spreads, 0.7 * gap).argmin()]
    assert rough > 1.2 * gap  # the rule is for little noise


# --- the door ----------------------------------------------------------------------------------

GOOD = np.array([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]), np.array([1.0, 2.0]), np.eye(3)
INCONSISTENT = np.array([[1.0, 1.0], [2.0, 2.0]]), np.array([1.0, 3.0])


@pytest.mark.parametrize("function", [variance_path, variance_slope, interpolant_path])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"X": np.ones(3)}, r"X must have shape \(samples, weights\); got \(3,\)"),
        ({"X": np.ones((0, 3))}, "X must not be empty"),
        ({"X": np.full((2, 3), np.nan)}, "X must be finite; got inf or nan"),
        ({"X": "data"}, "X must be a tensor or array of numbers; got"),
        ({"X": [[1.0, 2.0, 3.0], [1.0]]}, "X must be a tensor or array of numbers; got"),
        ({"X": np.ones((2, 3), dtype=complex)}, "X must hold real numbers; got torch.complex128"),
        ({"y": np.ones(3)}, r"y must have shape \(2\); got \(3,\)"),
        ({"y": [1.0, np.inf]}, "y must be finite"),
        ({"y": [True, False]}, "y must hold real numbers; got torch.bool"),
        ({"Sigma": np.eye(2)}, r"Sigma must have shape \(3, 3\); got \(2, 2\)"),
        ({"Sigma": np.triu(np.ones((3, 3)))}, "Sigma must be symmetric; got .* up to 1"),
        ({"Sigma": np.diag([1.0, -0.5, 1.0])}, "Sigma must be positive semidefinite.* -0.5"),
        ({"etas": [-1.0, 0.0]}, "etas must be a non-empty row of numbers of at least 0"),
        ({"etas": [np.nan]}, "etas must be a non-empty row"),
        ({"etas": []}, "etas must be a non-empty row"),
        ({"etas": 1.0}, "etas must be a non-empty row"),
        ({"etas": ["much"]}, "etas must hold real numbers; got list"),
    ],
)
def test_bad_problems_are_refused(function, change, message):
    given = {"X": GOOD[0], "y": GOOD[1], "Sigma": GOOD[2], "etas": [0.0, 1.0]}
    with pytest.raises(ValueError, match=message):
        function(**(given | change))


@pytest.mark.parametrize("call", [
    lambda: min_norm_interpolant(*INCONSISTENT),
    lambda: min_norm_interpolant(*INCONSISTENT, np.eye(2)),
    lambda: variance_path(*INCONSISTENT, np.eye(2), [1.0]),
    lambda: variance_slope(*INCONSISTENT, np.eye(2), [1.0]),
    lambda: interpolant_path(*INCONSISTENT, np.eye(2), [1.0]),
])  # fmt: skip
def test_data_that_nothing_fits_are_refused(call):
    message = r"X and y must agree.*shape \(2, 2\) and rank 1, whose range y misses by 0.45"
    with pytest.raises(ValueError, match=message):
        call()


def test_more_samples_than_weights_with_noise_are_refused():
    random = np.random.default_rng(0)
    with pytest.raises(ValueError, match="X and y must agree"):
        min_norm_interpolant(random.normal(size=(9, 4)), random.normal(size=9))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: min_norm_interpolant(*GOOD[:2], -np.eye(3)), "G must be positive semidefinite"),
        (lambda: output_variance(np.ones(2), np.eye(3)), r"Sigma must have shape \(2, 2\)"),
        (lambda: output_variance(np.ones((1, 1, 3)), np.eye(3)), r"w must have shape \(weights\)"),
        (lambda: threshold_fpr(0.0, -1.0), "std must be at least 0; got -1.0"),
        (lambda: threshold_fpr(np.nan, 1.0), "mean must be finite"),
        (lambda: threshold_fpr(0.0, 1.0, threshold=None), "threshold must be finite"),
        (lambda: likelihood_ratio_advantage(0.1, 1.0, -0.1), "noise must be at least 0"),
        (lambda: likelihood_ratio_advantage(0.1, -1.0, 0.1), "std must be at least 0"),
        (lambda: likelihood_ratio_advantage("far", 1.0, 0.1), "gap must hold real numbers"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_module_is_found_from_the_top():
    assert flatbook.theory.linear is linear
    assert "linear" in dir(flatbook.theory)
    with pytest.raises(AttributeError, match=r"flatbook.theory.* has no attribute 'quadratic'"):
        _ = flatbook.theory.quadratic
