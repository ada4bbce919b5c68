"""Recovery of samples: every step against its definition, and refusals."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatbook.reconstruction import (
    IdentifiabilityError,
    continue_kkt,
    contraction,
    exact_kkt,
    fit_multipliers,
    moment_tensor,
    monomial_count,
    polarize,
    recover,
)
from flatbook.reconstruction.gram import largest_eigenvalue, solve_gram
from flatbook.reconstruction.interpolation import (
    fit_map,
    monomials,
    most_variables,
)
from flatbook.reconstruction.symmetric import fit_symmetric

close = np.testing.assert_allclose
few = settings(max_examples=25)


def aligned(found, truth):
    """Match recovered samples to the truth up to order and sign; return order and signs."""
    products = found @ truth.T
    order = products.abs().argmax(dim=0)
    assert len(set(order.tolist())) == len(truth)
    return order, products[order, range(len(truth))].sign()


def error(found, k):
    X, truth = torch.as_tensor(found.X), torch.as_tensor(k.X)
    order, sign = aligned(X, truth)
    gap = (sign[:, None] * X[order] - truth).norm(dim=1) / truth.norm(dim=1)
    return float(gap.max())


def independent(n, d, seed, size=0.1):
    random = np.random.default_rng(seed)
    X = np.linalg.qr(random.normal(size=(d, n)))[0].T + size * random.normal(size=(n, d)) / n
    return X * random.uniform(0.7, 1.5), random.choice([-1.0, 1.0], size=n)


# --- the steps ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("variables", "power"), [(1, 3), (3, 1), (3, 2), (4, 3), (2, 5)])
def test_monomials_make_the_polynomial_kernel(variables, power):
    random = torch.Generator().manual_seed(0)
    u, v = torch.randn(2, 6, variables, generator=random, dtype=torch.float64)
    left, right = monomials(u, power), monomials(v, power)
    assert left.shape[1] == monomial_count(variables, power)
    close(left @ right.T, (u @ v.T) ** power, rtol=1e-10, atol=1e-12)


@given(st.integers(1, 5000), st.integers(1, 4))
def test_most_variables_is_the_largest_that_fits(points, power):
    s = most_variables(points, power)
    assert monomial_count(s, power) <= points or s == 1
    assert monomial_count(s + 1, power) > points


@pytest.mark.parametrize("degree", [3, 4, 5])
@pytest.mark.parametrize("extra", [0, 7])
def test_map_through_values_is_the_contraction(degree, extra):
    # Any N points in general position do, not only Z-eigenvectors.
    random = np.random.default_rng(degree)
    X, b = random.normal(size=(3, 3)), random.normal(size=3)
    points = random.normal(size=(monomial_count(3, degree - 1) + extra, 3))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    values = contraction(X, b, points, degree=degree)
    fitted = fit_map(*(torch.from_numpy(v) for v in (points, values)), degree - 1, 2.2e-16)
    assert fitted.determined
    elsewhere = random.normal(size=(4, 3))
    close(
        fitted.values(torch.from_numpy(elsewhere)),
        contraction(X, b, elsewhere, degree=degree),
        rtol=1e-6,
        atol=1e-8,
    )
    T = moment_tensor(X, b, degree=degree)
    for _ in range(degree - 2):
        T = T @ elsewhere[0]
    close(fitted.slope(torch.from_numpy(elsewhere[0])), T, rtol=1e-6, atol=1e-8)


def test_map_measures_rank_and_condition():
    random = np.random.default_rng(0)
    points = random.normal(size=(10, 4))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    points = torch.from_numpy(points)
    fitted = fit_map(points, points, 2, 2.2e-16)
    exact = torch.linalg.cond((points @ points.T) ** 2)
    assert fitted.rank == fitted.needed == 10
    assert fitted.condition == pytest.approx(float(exact), rel=0.01)
    assert fit_map(points[:7], points[:7], 2, 2.2e-16).rank == 7
    twice = torch.cat([points[:9], points[:1]])
    repeated = fit_map(twice, twice, 2, 2.2e-16)
    assert (repeated.rank, repeated.needed) == (9, 10)
    assert repeated.condition > 1e14
    close(fit_map(points[:7], points[:7], 2, 2.2e-16).values(points[:7]), points[:7], atol=1e-10)


@pytest.mark.parametrize("power", [1, 2, 3])
def test_both_factorizations_solve_the_system(power):
    from flatbook.reconstruction import gram

    random = torch.Generator().manual_seed(power)
    rows = torch.randn(4 if power == 1 else 9, 5, generator=random, dtype=torch.float64)
    rows = rows / rows.norm(dim=1, keepdim=True)
    target = torch.randn(len(rows), 2, generator=random, dtype=torch.float64)
    matrix = (rows @ rows.T) ** power
    expected = torch.linalg.solve(matrix, target)
    for factor in (gram._lapack, gram._torch):
        solve, top = factor(rows, power)
        close(solve(target), expected, rtol=1e-9)
        assert top == pytest.approx(float(torch.linalg.matrix_norm(matrix, 2)))
    solved, rank, condition = solve_gram(rows, power, target, 2.2e-16, len(rows))
    close(solved, expected, rtol=1e-9)
    assert rank == len(rows)
    assert condition == pytest.approx(float(torch.linalg.cond(matrix)), rel=0.01)
    # Too many rows for their dimension: the least solution
    many = torch.cat([rows, rows[:2]])
    matrix = (many @ many.T) ** power
    solved, found, condition = solve_gram(many, power, matrix[:, :2], 2.2e-16, len(rows))
    close(solved, torch.linalg.pinv(matrix, hermitian=True) @ matrix[:, :2], atol=1e-8)
    assert found == len(rows)
    assert condition < 1e6


def test_largest_eigenvalue_comes_from_below():
    random = torch.Generator().manual_seed(0)
    root = torch.randn(40, 40, generator=random, dtype=torch.float64)
    matrix = root @ root.T
    exact = float(torch.linalg.eigvalsh(matrix)[-1])
    found = largest_eigenvalue(lambda v: matrix @ v, 40, matrix)
    assert 0.9 * exact < found <= exact * (1 + 1e-12)
    assert largest_eigenvalue(lambda v: 3 * v, 40, matrix) == pytest.approx(3)
    assert largest_eigenvalue(lambda v: matrix[:5, :5] @ v, 5, matrix) == pytest.approx(
        float(torch.linalg.eigvalsh(matrix[:5, :5])[-1])
    )
    few = root[:, :3] @ root[:, :3].T
    top = float(torch.linalg.eigvalsh(few)[-1])
    assert largest_eigenvalue(lambda v: few @ v, 40, matrix) == pytest.approx(top)


# --- exact recovery ----------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "d"), [(1, 1), (1, 6), (2, 2), (5, 30), (12, 50), (20, 100)])
def test_cubic_fixture_is_recovered(n, d):
    k = exact_kkt(n, d=d, seed=n)
    found = recover(k.W, k.a)
    assert found.X.shape == (n, d)
    assert error(found, k) < 1e-13
    order, sign = aligned(found.X, k.X)
    close(sign * found.y[order], k.y)  # for odd degrees (x, y) and (-x, -y) are one
    close(found.multipliers[order], k.multipliers, rtol=1e-12)
    assert found.residual < 1e-14
    assert found.rank == n
    assert found.gram_rank == found.needed == n * (n + 1) // 2
    assert (found.X.sum(dim=1) >= 0).all()
    U = k.W / k.W.norm(dim=1, keepdim=True)
    assert found.condition == pytest.approx(float(torch.linalg.cond((U @ U.T) ** 2)), rel=0.02)


@pytest.mark.parametrize("label", [-1, 1])
def test_quartic_fixture_is_recovered_with_its_labels(label):
    k = exact_kkt(4, d=7, degree=4, labels=[label] * 4)
    found = recover(k.W, k.a, degree=4)
    assert len(k.W) == 32 > found.needed == 20  # more neurons than needed: least squares
    assert error(found, k) < 1e-13
    close(found.y, label)


@given(st.integers(1, 7), st.integers(0, 4), st.integers(0, 10**6))
@few
def test_recovery_is_exact_for_any_draw(n, more, seed):
    k = exact_kkt(n, d=n + more, seed=seed)
    found = recover(k.W, k.a, seed=seed)
    assert error(found, k) < 1e-12
    assert found.residual < 1e-12


@pytest.mark.parametrize("seed", range(4))
def test_independent_samples_are_recovered_in_true_scale(seed):
    X, y = independent(4, 9, seed)
    end = continue_kkt(X, y)
    assert end.reached == 1
    found = recover(end.network.W, end.network.a)
    assert isinstance(found.X, np.ndarray)
    assert error(found, end.network) < 1e-11
    order, sign = aligned(torch.from_numpy(found.X), torch.from_numpy(X))
    close(sign.numpy() * found.y[order], y)
    close(found.multipliers[order], end.network.multipliers, rtol=1e-9)


def test_neurons_may_repeat_and_come_in_any_order():
    k = exact_kkt(4, d=9, seed=1)
    pick = torch.cat(
        [torch.randperm(10, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 5, 5])]
    )
    silent = torch.zeros(2, 9).double()
    W, a = torch.cat([k.W[pick], silent]), torch.cat([k.a[pick], torch.zeros(2).double()])
    found = recover(W, a)
    order, _ = aligned(found.X, k.X)
    # Directions do not depend on how often a neuron stands there; the scale does, by the margins.
    found_unit = found.X / found.X.norm(dim=1, keepdim=True)
    close((found_unit[order] * k.X).sum(dim=1).abs(), 1, rtol=1e-12)


def test_precision_kind_and_repeatability():
    k = exact_kkt(6, d=20, seed=3)
    single = recover(k.W.float(), k.a.float())
    assert single.X.dtype == single.y.dtype == single.multipliers.dtype == torch.float32
    assert error(single._replace(X=single.X.double()), k) < 1e-6
    arrays = recover(k.W.numpy(), k.a.numpy())
    assert all(isinstance(part, np.ndarray) for part in arrays[:3])
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one, two, other = (recover(k.W, k.a, seed=s) for s in (5, 5, 6))
    assert torch.equal(one.X, two.X)
    assert not torch.equal(one.X, other.X)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_recovers_the_same():
    k = exact_kkt(8, d=30)
    found = recover(k.W.cuda(), k.a.cuda())
    assert found.X.device.type == "cuda"
    assert error(found._replace(X=found.X.cpu()), k) < 1e-12


# --- noise -------------------------------------------------------------------------------------


def test_error_grows_in_proportion_to_the_noise():
    k = exact_kkt(5, d=12, seed=0)
    random = torch.Generator().manual_seed(0)
    noise = torch.randn(k.W.shape, generator=random, dtype=torch.float64)
    sizes = [1e-10, 1e-8, 1e-6, 1e-4]
    errors = [error(recover(k.W + s * noise, k.a, rank=5, tolerance=1e-12), k) for s in sizes]
    ratios = np.array(errors) / sizes
    assert ratios.max() < 30
    close(ratios / ratios[0], 1, rtol=0.05)
    found = recover(k.W + 1e-4 * noise, k.a, rank=5)
    assert 1e-6 < found.residual < 1e-2  # and it says so itself


# --- refusals ----------------------------------------------------------------------------------


def test_too_few_neurons_are_refused_with_numbers():
    k = exact_kkt(5, d=20, seed=1)
    with pytest.raises(IdentifiabilityError) as caught:
        recover(k.W[:-1], k.a[:-1])
    assert str(caught.value) == (
        "W and a must determine the tensor of the samples (rank of the Gram matrix: measured 14, "
        "needed 15; condition number inf)."
    )
    assert isinstance(caught.value, ValueError)
    assert (caught.value.measured, caught.value.needed) == (14, 15)
    assert caught.value.condition == math.inf


def test_rank_is_sufficient_and_not_necessary():
    # Without the neurons of pairs, exact samples of orthonormal data come out all the same.
    k = exact_kkt(5, d=20, subsets=[(i,) for i in range(5)], seed=1)
    with pytest.raises(IdentifiabilityError, match="measured 5, needed 15"):
        recover(k.W, k.a)
    found = recover(k.W, k.a, force=True)
    assert error(found, k) < 1e-12
    assert (found.gram_rank, found.needed) == (5, 15)
    assert found.condition == math.inf


@pytest.mark.parametrize(
    ("degree", "size", "more"), [(3, 4, 0), (4, 2, 0), (5, 3, 0), (3, 5, 1), (4, 3, 1), (4, 4, 1)]
)
def test_symmetric_fit_needs_fewer_points(degree, size, more):
    # Alexander and Hirschowitz: as many as have one equation for each entry, with four exceptions.
    random = np.random.default_rng(degree)
    X, b = random.normal(size=(size, size)), random.normal(size=size)
    entries = math.comb(size + degree - 1, degree)
    points = random.normal(size=(-(-entries // size) + more, size))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    values = contraction(X, b, points, degree=degree)
    pair = [torch.from_numpy(v) for v in (points, values)]
    assert not fit_map(*pair, degree - 1, 2.2e-16).determined
    fitted = fit_symmetric(*pair, degree - 1, 2.2e-16)
    assert fitted.rank == fitted.needed == entries
    elsewhere = random.normal(size=(3, size))
    tolerance = 1e-12 * fitted.condition
    at = torch.from_numpy(elsewhere)
    expected = contraction(X, b, elsewhere, degree=degree)
    close(fitted.values(at), expected, atol=tolerance)
    T = moment_tensor(X, b, degree=degree)
    for _ in range(degree - 2):
        T = T @ elsewhere[0]
    close(fitted.slope(at[0]), T, atol=tolerance)
    less = fit_symmetric(pair[0][:-1], pair[1][:-1], degree - 1, 2.2e-16)
    assert less.rank == less.needed - 1 if more else less.rank < less.needed
    close(less.values(pair[0][:-1]), pair[1][:-1], atol=1e-9)


def test_half_of_the_neurons_determine_a_symmetric_tensor():
    # Two cliques: of any three samples, two share a neuron.
    sets = [(i,) for i in range(6)] + [(0, 1), (0, 2), (1, 2), (3, 4), (3, 5), (4, 5)]
    k = exact_kkt(6, d=9, subsets=sets, seed=2)
    with pytest.raises(IdentifiabilityError, match="measured 12, needed 21"):
        recover(k.W, k.a)
    found = recover(k.W, k.a, symmetric=True)
    assert error(found, k) < 1e-12
    assert found.gram_rank == found.needed == 56
    assert found.condition < 1e3
    fewer = exact_kkt(6, d=9, subsets=sets[:-1], seed=2)
    with pytest.raises(IdentifiabilityError, match="measured 53, needed 56"):
        recover(fewer.W, fewer.a, symmetric=True)


def test_margin_sets_the_common_scale():
    k = exact_kkt(3, d=5, seed=1)
    grown = recover(2 * k.W, 2 * k.a, margin=16.0)
    assert error(grown, k) < 1e-13
    assert grown.residual < 1e-14
    plain = recover(2 * k.W, 2 * k.a)
    close(plain.X.norm(dim=1), 16 ** (-1 / 3), rtol=1e-12)
    assert plain.residual < 1e-14


def test_repeated_neurons_do_not_count():
    k = exact_kkt(3, d=5, seed=1)
    pick = [0, 1, 2, 3, 4, 4, 3]
    with pytest.raises(IdentifiabilityError, match=r"measured 5, needed 6; condition number \S+e"):
        recover(k.W[pick], k.a[pick])


@pytest.mark.parametrize(("degree", "labels"), [(5, [1, 1]), (4, [1, -1])])
def test_higher_degrees_of_orthonormal_samples_are_refused(degree, labels):
    k = exact_kkt(2, d=3, degree=degree, labels=labels)
    with pytest.raises(IdentifiabilityError, match="W and a must determine the tensor"):
        recover(k.W, k.a, degree=degree)


@pytest.mark.parametrize("seed", range(8))
def test_dependent_samples_are_refused_or_give_themselves_away(seed):
    # Weights that agree with a tensor of five samples in four dimensions, at N points
    random = np.random.default_rng(seed)
    X, b = random.normal(size=(5, 4)), random.choice([-1.0, 1.0], size=5)
    points = random.normal(size=(10, 4))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    values = contraction(X, b, points)
    fitted = fit_map(torch.from_numpy(points), torch.from_numpy(values), 2, 2.2e-16)
    from flatbook.reconstruction.tensor import _cuts, _polish

    cut = _cuts(fitted, 4, 0)[0]
    if cut.imaginary == 0:
        directions, _ = _polish(fitted, cut.directions())
        truth = torch.from_numpy(X / np.linalg.norm(X, axis=1, keepdims=True))
        assert (directions @ truth.T).abs().max(dim=0).values.min() < 0.999


def test_random_weights_do_not_pass_for_data():
    random = np.random.default_rng(0)
    W, a = random.normal(size=(10, 4)), random.normal(size=10)
    forced = recover(W, a, force=True)
    assert forced.residual > 0.1
    assert fit_multipliers(W, a, forced.X, forced.y).residual > 0.1


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([[1.0]], [1.0]), {"degree": 2}, "degree must be a whole number of at least 3; got 2."),
        (
            ([[1.0]], [1.0]),
            {"rank": 2},
            "rank must be a whole number from 1 to 1; got 2.",
        ),
        (([[1.0]], [1.0]), {"seed": -1}, "seed must be a whole number of at least 0; got -1."),
        (
            ([[1.0]], [1.0]),
            {"margin": 0},
            "margin must be a finite number above 0; got 0.",
        ),
        (
            ([[1.0]], [1.0]),
            {"symmetric": None},
            "symmetric must be True or False; got None.",
        ),
        (([[1.0]], [1.0]), {"force": 1}, "force must be True or False; got 1."),
        (
            ([[1.0]], [1.0]),
            {"tolerance": 0.0},
            "tolerance must be a finite number above 0; got 0.0.",
        ),
        (([[1.0]], [1.0, 2.0]), {}, "a must have shape (1); got (2,)."),
        (([[np.nan]], [1.0]), {}, "W must be finite; got inf or nan."),
        (
            ([[0.0]], [1.0]),
            {},
            "W and a must hold a neuron with weights in both layers; got none.",
        ),
        (
            ([[1.0], [2.0, 3.0]], [1.0, 1.0]),
            {},
            "W must be a tensor or array of numbers; got an array of object, which torch lacks.",
        ),
    ],
)
def test_bad_input_is_named(arguments, options, message):
    with pytest.raises(ValueError) as caught:
        recover(*arguments, **options)
    assert str(caught.value) == message


def test_counting_needs_whole_numbers():
    with pytest.raises(
        ValueError, match=r"^variables must be a whole number of at least 1; got 0\.$"
    ):
        monomial_count(0, 2)


def test_a_tolerance_that_leaves_nothing_is_refused():
    network = exact_kkt(2)
    with pytest.raises(
        ValueError, match=r"^tolerance must be below 1, or nothing is left; got 1\.5"
    ):
        recover(network.W, network.a, tolerance=1.5)
    with pytest.raises(ValueError, match=r"^form must be a function of points; got str\.$"):
        polarize("x", [[1.0]])
