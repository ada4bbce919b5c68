"""KKT networks against plain sums, symbols and autograd; multipliers against other solvers."""

import itertools
import math

import numpy as np
import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize
from torch import nn

from flatbook.reconstruction import (
    continue_kkt,
    contraction,
    exact_kkt,
    find_z_eigenvectors,
    fit_multipliers,
    kkt_conditions,
    kkt_residual,
    model_multipliers,
    moment_tensor,
    polarize,
    polynomial_network,
    relu_multipliers,
    z_eigenvalues,
)
from flatbook.reconstruction.clarke import _onto_cone

close = np.testing.assert_allclose
few = settings(max_examples=25)


def data(seed=0, *, n=3, d=4, m=5):
    random = np.random.default_rng(seed)
    return (
        random.normal(size=(m, d)),
        random.normal(size=m),
        random.normal(size=(n, d)),
        random.normal(size=n),
    )


def turned(n, d, seed=0):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(d, n)))[0].T


# --- the definitions ---------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [2, 3, 4, 5])
def test_network_tensor_and_contraction_are_plain_sums(degree):
    W, a, X, b = data()
    plain = [sum(a[j] * float(W[j] @ x) ** degree for j in range(5)) for x in X]
    close(polynomial_network(W, a, X, degree=degree), plain, rtol=1e-12)
    T = moment_tensor(X, b, degree=degree)
    assert T.shape == (4,) * degree
    for index in itertools.product(range(4), repeat=degree):
        plain = sum(b[i] * np.prod([X[i, k] for k in index]) for i in range(3))
        close(T[index], plain, rtol=1e-10, atol=1e-12)
    w = W[0]
    contracted = T
    for _ in range(degree - 1):
        contracted = contracted @ w
    close(contraction(X, b, W, degree=degree)[0], contracted, rtol=1e-10)


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_residual_is_that_of_autograd(degree):
    W, a, X, b = (torch.from_numpy(v) for v in data())
    theta = torch.cat([W.flatten(), a]).requires_grad_()

    def output(x):
        return (theta[:20].reshape(5, 4) @ x).pow(degree) @ theta[20:]

    total = sum(b[i] * torch.autograd.grad(output(X[i]), theta)[0] for i in range(3))
    expected = float(((theta - total).norm() / theta.norm()).detach())
    assert kkt_residual(W, a, X, b, degree=degree) == pytest.approx(expected, rel=1e-12)


@given(st.integers(0, 2**32), st.sampled_from([2, 3, 4]))
@few
def test_polarization_gives_back_the_tensor(seed, degree):
    W, _, X, b = data(seed, m=degree)
    T = moment_tensor(X, b, degree=degree)
    for w in W:
        T = T @ w
    form = lambda w: (np.asarray(w) @ X.T) ** degree @ b  # noqa: E731
    close(polarize(form, W), T, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("degree", [3, 4])
def test_kkt_identities_in_symbols(degree):
    # One gradient: w = α a f(w) and a = <w, f(w)>, so that |w|² = α a².
    b = sympy.symbols("b1:3", real=True)
    w = sympy.Matrix(sympy.symbols("w1:3", real=True))
    x = [sympy.Matrix([1, 2]), sympy.Matrix([-1, 3])]
    a = sympy.Symbol("a", real=True)
    phi = [a * (v.T * w)[0] ** degree for v in x]
    f = sum((b[i] * (x[i].T * w)[0] ** (degree - 1) * x[i] for i in range(2)), sympy.zeros(2, 1))
    for k in range(2):
        slope = sum(b[i] * sympy.diff(phi[i], w[k]) for i in range(2))
        assert sympy.expand(slope - degree * a * f[k]) == 0
    second = sum(b[i] * sympy.diff(phi[i], a) for i in range(2))
    assert sympy.expand(second - (w.T * f)[0]) == 0
    # Euler: <w, ∂Φ/∂w> = α a ∂Φ/∂a
    first = sum(w[k] * sum(b[i] * sympy.diff(phi[i], w[k]) for i in range(2)) for k in range(2))
    assert sympy.expand(first - degree * a * second) == 0


def test_conditions_each_see_their_own_breach():
    k = exact_kkt(3, d=5, labels=[1, -1, 1])
    exact = kkt_conditions(k.W, k.a, k.X, k.y, k.multipliers)
    assert max(exact) < 1e-14
    shrunk = kkt_conditions(0.9 * k.W, k.a, k.X, k.y, k.multipliers)
    close(shrunk.primal, 1 - 0.9**3, rtol=1e-12)
    close(shrunk.slackness, (1 - 0.9**3) * float(k.multipliers[0]), rtol=1e-12)
    grown = kkt_conditions(1.1 * k.W, k.a, k.X, k.y, k.multipliers)
    assert grown.primal == 0 < grown.slackness
    negative = kkt_conditions(k.W, k.a, k.X, k.y, -k.multipliers)
    close(negative.dual, float(k.multipliers[0]), rtol=1e-12)
    close(negative.stationarity, 2, rtol=1e-12)


# --- the fixture -------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 8, 20])
def test_cubic_fixture_is_the_closed_form(n):
    X = turned(n, n + 3)
    y = np.random.default_rng(1).choice([-1.0, 1.0], size=n)
    k = exact_kkt(n, X=X, labels=y)
    assert k.W.shape == (n * (n + 1) // 2, n + 3)
    beta = math.sqrt((1 + (n - 1) / math.sqrt(2)) / (3 * math.sqrt(3)))
    close(k.multipliers, beta, rtol=1e-13)
    b = beta * y
    sets = [(i,) for i in range(n)] + list(itertools.combinations(range(n), 2))
    for row, A in enumerate(sets):
        mu = sum(b[i] ** -2 for i in A) ** -0.5
        v = mu * sum(X[i] / b[i] for i in A)
        rho = (1 / (math.sqrt(3) * mu)) ** 0.5
        close(k.W[row], rho * v, atol=1e-13)
        close(k.a[row], rho / math.sqrt(3), atol=1e-13)
    assert kkt_residual(k.W, k.a, X, b) < 3e-15
    close(k.y * polynomial_network(k.W, k.a, X), 1, rtol=1e-13)


@given(st.integers(1, 5), st.integers(3, 7), st.integers(0, 1000))
@few
def test_fixture_of_any_degree_meets_all_conditions(n, degree, seed):
    k = exact_kkt(n, d=n + 1, degree=degree, seed=seed)
    assert max(kkt_conditions(k.W, k.a, k.X, k.y, k.multipliers, degree=degree)) < 1e-11
    assert (k.multipliers > 0).all()
    close((k.W**2).sum(dim=1), degree * k.a**2, rtol=1e-12)
    found = z_eigenvalues(k.X, k.multipliers * k.y, k.W, degree=degree)
    assert found.residuals.max() < 1e-12
    norms = k.W.norm(dim=1)
    close(found.values, norms ** (2 - degree) / (degree * k.a), rtol=1e-10)


@given(st.integers(2, 5), st.integers(3, 7), st.integers(0, 1000))
@few
def test_orthonormal_samples_meet_the_rank_condition_only_for_low_degrees(n, degree, seed):
    # All neurons there can be: one for each set of samples, up to signs.
    sets = [s for size in range(1, n + 1) for s in itertools.combinations(range(n), size)]
    y = np.random.default_rng(seed).choice([-1.0, 1.0], size=n)
    if degree % 2 == 0:
        sets = [s for s in sets if len({y[i] for i in s}) == 1]
    k = exact_kkt(n, labels=y, degree=degree, seed=seed, subsets=sets)
    U = k.W / k.W.norm(dim=1, keepdim=True)
    rank = torch.linalg.matrix_rank((U @ U.T) ** (degree - 1), hermitian=True, rtol=1e-9)
    needed = math.comb(n + degree - 2, degree - 1)
    possible = degree == 3 or (degree == 4 and abs(y.sum()) == n)
    assert (rank == needed) == possible


def test_fixture_takes_other_families_of_neurons():
    chain = [(i,) for i in range(4)] + [(0, 1), (1, 2), (2, 3), (0, 1, 2, 3)]
    k = exact_kkt(4, d=6, subsets=chain, seed=3)
    assert k.W.shape == (8, 6)
    assert max(kkt_conditions(k.W, k.a, k.X, k.y, k.multipliers)) < 1e-13
    assert k.multipliers.std() > 1e-3
    only_all = exact_kkt(3, subsets=[(0, 1, 2)])
    assert max(kkt_conditions(*only_all[:2], *only_all[2:])) < 1e-13


def test_fixture_keeps_the_kind_of_its_samples():
    X = turned(2, 3)
    assert isinstance(exact_kkt(2, X=X).W, np.ndarray)
    single = exact_kkt(2, X=torch.from_numpy(X).float())
    assert single.W.dtype == single.y.dtype == torch.float32
    assert kkt_residual(single.W, single.a, single.X, single.multipliers * single.y) < 1e-6
    drawn, again = exact_kkt(3, d=5, seed=4), exact_kkt(3, d=5, seed=4)
    assert all(torch.equal(p, q) for p, q in zip(drawn, again, strict=True))
    assert not torch.equal(drawn.X, exact_kkt(3, d=5, seed=5).X)


# --- eigenvectors ------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "degree"), [(1, 3), (2, 3), (3, 3), (4, 3), (3, 5)])
def test_orthonormal_samples_have_an_eigenvector_for_each_set(n, degree):
    b = np.linspace(0.7, 1.4, n) * (-1.0) ** np.arange(n)
    X = turned(n, n + 2)
    found = find_z_eigenvectors(X, b, degree=degree, starts=300)
    assert found.shape == (2**n - 1, n + 2)
    assert z_eigenvalues(X, b, found, degree=degree).residuals.max() < 1e-12
    overlap = np.abs(found @ found.T) - np.eye(len(found))
    assert overlap.max() < 1 - 1e-6


@pytest.mark.parametrize("seed", range(6))
def test_eigenvectors_of_two_samples_are_the_roots_of_a_cubic(seed):
    random = np.random.default_rng(seed)
    X, b = random.normal(size=(2, 2)), random.choice([-1.0, 1.0], size=2)
    T = moment_tensor(X, b)
    # u = (1, t): f1(u) t - f2(u) = 0; (0, 1) is none for random data
    f = [[T[k, 0, 0], 2 * T[k, 0, 1], T[k, 1, 1]] for k in range(2)]
    roots = np.polynomial.Polynomial([0, *f[0]]) - np.polynomial.Polynomial(f[1])
    real = sum(abs(r.imag) < 1e-9 for r in roots.roots())
    assert len(find_z_eigenvectors(X, b, starts=200)) == real


def test_search_leaves_no_trace():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    X, b = turned(3, 3), np.ones(3)
    close(find_z_eigenvectors(X, b, starts=20), find_z_eigenvectors(X, b, starts=20), atol=0)
    assert torch.equal(torch.get_rng_state(), before)


# --- continuation ------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "degree"), [(2, 3), (4, 3), (3, 4)])
def test_continuation_leaves_orthogonality_exactly(n, degree):
    random = np.random.default_rng(n)
    X = 2.5 * turned(n, 6) + 0.1 * random.normal(size=(n, 6))
    y = np.ones(n) if degree == 4 else random.choice([-1.0, 1.0], size=n)
    end = continue_kkt(X, y, degree=degree)
    assert end.reached == 1
    close(end.network.X, X, atol=1e-14)
    k = end.network
    assert max(kkt_conditions(k.W, k.a, X, y, k.multipliers, degree=degree)) < 1e-12
    found = fit_multipliers(k.W, k.a, X, y, degree=degree)
    close(found.values, k.multipliers, rtol=1e-9)


def test_continuation_of_orthonormal_samples_is_the_fixture():
    X, y = turned(3, 4), np.array([1.0, -1.0, 1.0])
    end, k = continue_kkt(3 * X, y).network, exact_kkt(3, X=X, labels=y)
    # Samples three times as long shrink all weights by 3^(-3/4).
    close(end.W, 3**-0.75 * k.W, atol=1e-12)
    close(end.a, 3**-0.75 * k.a, atol=1e-12)


@pytest.mark.parametrize("length", [1.0, 1.3])
def test_continuation_stops_where_neurons_meet(length):
    # As two samples near each other, their own neurons meet the one between them: all three at
    # once if the samples are alike, two and then nothing if not.
    angle = 0.5
    X = np.array([[1.0, 0.0], [length * math.cos(angle), length * math.sin(angle)]])
    end = continue_kkt(X, [1.0, 1.0])
    assert 0.1 < end.reached < 1
    assert end.distance < 0.1
    k = end.network
    assert max(kkt_conditions(k.W, k.a, k.X, k.y, k.multipliers)) < 1e-11
    found = find_z_eigenvectors(k.X, k.multipliers * k.y, starts=400)
    assert len(found) == 3
    b = fit_multipliers(k.W, k.a, X, [1.0, 1.0]).values
    assert len(find_z_eigenvectors(X, b, starts=400)) == 1


# --- multipliers -------------------------------------------------------------------------------


def test_multipliers_of_a_fixture_are_its_own():
    k = exact_kkt(5, d=9, seed=2)
    found = fit_multipliers(k.W, k.a, k.X, k.y)
    close(found.values, k.multipliers, rtol=1e-12)
    assert found.residual < 1e-14
    wrong = fit_multipliers(k.W, k.a, k.X, -k.y)
    close(wrong.values, 0, atol=1e-14)
    assert wrong.residual == 1
    more = torch.cat([k.X, torch.ones(1, 9).double() / 3])
    close(fit_multipliers(k.W, k.a, more, [*k.y.tolist(), 1.0]).values[-1], 0, atol=1e-12)


@given(st.integers(0, 2**32))
@few
def test_multipliers_are_the_best(seed):
    W, a, X, _ = data(seed)
    y = np.array([1.0, -1.0, 1.0])
    found = fit_multipliers(W, a, X, y)
    assert (found.values >= 0).all()
    close(found.residual, kkt_residual(W, a, X, found.values * y), rtol=1e-9)
    for step in (*np.eye(3), *-np.eye(3)):
        other = np.maximum(found.values + 1e-3 * step, 0)
        assert kkt_residual(W, a, X, other * y) >= found.residual - 1e-12


class Cubes(nn.Module):
    def __init__(self, W, a):
        super().__init__()
        self.W, self.a = nn.Parameter(torch.tensor(W)), nn.Parameter(torch.tensor(a))
        self.unused = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x):
        return (x @ self.W.T) ** 3 @ self.a[:, None]


def test_multipliers_of_a_module_are_those_of_its_weights():
    W, a, X, _ = data(4)
    y = np.array([1.0, 1.0, -1.0])
    model = Cubes(W, a)
    expected, found = fit_multipliers(W, a, X, y), model_multipliers(model, X, y)
    close(found.values, expected.values, rtol=1e-9, atol=1e-12)
    close(found.residual, expected.residual, rtol=1e-10)
    assert all(p.grad is None for p in model.parameters())


def relu_case(seed, n=3, m=4, d=5):
    """A network with one exact kink for each neuron, and a bias."""
    random = np.random.default_rng(seed)
    X, y = random.normal(size=(n, d)), random.choice([-1.0, 1.0], size=n)
    W, a = random.normal(size=(m, d)), random.normal(size=m)
    c = np.array([-W[j] @ X[j % n] for j in range(m)])
    return W, c, a, X, y


def brute_clarke(W, c, a, X, y):
    theta = np.concatenate([np.c_[W, c].ravel(), a])
    V, Z = np.c_[X, np.ones(len(X))], X @ W.T + c
    kinks = [tuple(p) for p in np.argwhere(np.abs(Z) < 1e-9)]
    n = len(X)

    def columns():
        for i in range(n):
            on = (Z[i] > 1e-9) * 1.0
            yield y[i] * np.concatenate([(a * on)[:, None] * V[i], np.maximum(Z[i], 0)[:, None]], 1)
        for i, j in kinks:
            block = np.zeros((len(a), V.shape[1] + 1))
            block[j, :-1] = y[i] * a[j] * V[i]
            yield block

    A = np.stack([np.concatenate([b[:, :-1].ravel(), b[:, -1]]) for b in columns()], 1)
    bounds = [
        {
            "type": "ineq",
            "fun": lambda v, k=k, i=i: v[i] - v[n + k],
            "jac": lambda v, k=k, i=i: np.eye(len(v))[i] - np.eye(len(v))[n + k],
        }
        for k, (i, _) in enumerate(kinks)
    ]
    best = optimize.minimize(
        lambda v: ((theta - A @ v) ** 2).sum(),
        np.ones(A.shape[1]),
        method="SLSQP",
        jac=lambda v: -2 * A.T @ (theta - A @ v),
        bounds=[(0, None)] * A.shape[1],
        constraints=bounds,
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    return math.sqrt(best.fun) / np.linalg.norm(theta)


@pytest.mark.parametrize("seed", range(6))
def test_clarke_residual_is_that_of_another_solver(seed):
    W, c, a, X, y = relu_case(seed)
    found = relu_multipliers(W, a, X, y, bias=c, kink=1e-9)
    assert found.kinks == pytest.approx(4 / 12)
    residual = brute_clarke(W, c, a, X, y)
    assert found.residual == pytest.approx(residual, abs=1e-6)
    assert found.residual <= found.plain_residual
    assert (found.multipliers >= 0).all()


@given(st.floats(0.2, 1.0), st.floats(0.1, 3.0))
@few
def test_clarke_sees_a_kkt_point_that_plain_derivatives_miss(overlap, height):
    # w = λ (x1 + q x2) with x2 orthogonal to w, a = λ wᵀx1 = 1
    x1, x2 = np.array([1.0, 0.0]), np.array([-overlap, height])
    q = overlap / (x2 @ x2)
    direction = x1 + q * x2
    size = 1 / math.sqrt(direction @ x1)
    found = relu_multipliers([size * direction], [1.0], [x1, x2], [1.0, 1.0])
    assert found.kinks == 0.5
    assert found.residual < 1e-6
    # Rounding may put the sample on the one side of the kink where autograd gets it right.
    assert found.plain_residual > 0.01 or size * direction @ x2 > 0
    close(found.multipliers[0], size, rtol=1e-5)
    assert found.multipliers[1] > q * size * (1 - 1e-5)  # a derivative of at most 1


@given(st.integers(0, 2**32), st.sampled_from([0.2, 1.0, 30.0]))
@few
def test_projection_onto_the_cone_is_the_nearest_point(seed, weight):
    random = torch.Generator().manual_seed(seed)
    lam = torch.randn(2, generator=random, dtype=torch.float64)
    q = torch.randn(2, 4, generator=random, dtype=torch.float64)
    free = torch.rand(2, 4, generator=random) < 0.7
    got, held = _onto_cone(lam, q, free, weight)
    assert (got >= 0).all()
    assert ((held >= 0) & (held <= got[:, None])).all()
    assert (held[~free] == 0).all()

    def cost(value, i):
        parts = (q[i].clamp(0, value) - q[i])[free[i]]
        return weight * (value - lam[i]) ** 2 + parts.square().sum()

    for i in range(2):
        grid = torch.linspace(0, 4, 801, dtype=torch.float64)
        assert cost(got[i], i) <= min(cost(value, i) for value in grid) + 1e-12


def test_plain_relu_residual_is_that_of_the_module():
    W, c, a, X, y = relu_case(0)
    layers = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1, bias=False)).double()
    shifted = c + 0.1  # no kink
    for layer, values in (
        (layers[0].weight, W),
        (layers[0].bias, shifted),
        (layers[2].weight, a[None]),
    ):
        layer.data = torch.tensor(values)
    found = relu_multipliers(W, a, X, y, bias=shifted, kink=0.0)
    expected = model_multipliers(layers, X, y)
    assert found.kinks == 0
    close(found.residual, expected.residual, rtol=1e-10)
    close(found.plain_multipliers, expected.values, rtol=1e-8, atol=1e-10)


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: exact_kkt(0), r"n must be a whole number of at least 1; got 0\."),
        (lambda: exact_kkt(3, d=2), r"d must be a whole number of at least 3; got 2\."),
        (
            lambda: exact_kkt(2, X=np.ones((2, 3))),
            r"X must have orthonormal rows; got inner products that are off by up to 3\.",
        ),
        (
            lambda: exact_kkt(2, labels=[0, 1]),
            r"labels must hold -1 and 1 only; got 0\.",
        ),
        (
            lambda: exact_kkt(3, subsets=[(0,), (1,)]),
            r"subsets must hold each sample once at least; sample 2 is in none\.",
        ),
        (
            lambda: exact_kkt(2, subsets=[(0, 0), (1,)]),
            r"subsets must hold sets of samples that are not empty; got \[0, 0\]\.",
        ),
        (
            lambda: exact_kkt(2, labels=[1, -1], degree=4, subsets=[(0, 1)]),
            r"subsets must not mix labels if the degree is even, since no such neuron exists; got "
            r"\[0, 1\]\.",
        ),
        (lambda: exact_kkt(2, degree=2), r"degree must be a whole number of at least 3; got 2\."),
        (
            lambda: kkt_residual([[0.0]], [0.0], [[1.0]], [1.0]),
            r"W and a must not all be 0; got zeros only\.",
        ),
        (
            lambda: kkt_residual([[1.0]], [1.0], [[1.0, 2.0]], [1.0]),
            r"X must have shape \(samples, 1\); got \(1, 2\)\.",
        ),
        (
            lambda: moment_tensor(np.ones((1, 100)), [1.0], degree=4),
            r"X and degree must give a tensor of at most 10000000 entries; got 100 inputs and "
            r"degree 4\.",
        ),
        (
            lambda: z_eigenvalues([[1.0]], [1.0], [[1.0], [0.0]]),
            r"w must have no row of zeros, which has no direction; row 1 is one\.",
        ),
        (
            lambda: continue_kkt(np.ones((2, 3)), [1, 1]),
            r"X must have independent rows; got 2 rows of rank 1\.",
        ),
        (
            lambda: fit_multipliers([[1.0]], [1.0], [[1.0]], [2.0]),
            r"y must hold -1 and 1 only; got 2\.",
        ),
        (
            lambda: fit_multipliers([["w"]], [1.0], [[1.0]], [1.0]),
            r"W must be a tensor or array of numbers; got an array of <U1, which torch lacks\.",
        ),
        (
            lambda: model_multipliers(nn.Linear(2, 3), np.ones((1, 2), np.float32), [1.0]),
            r"model must return one number for each sample; got an output of shape \(1, 3\) for "
            r"one\.",
        ),
        (
            lambda: model_multipliers(nn.ReLU(), np.ones((1, 2)), [1.0]),
            r"model must have parameters that require a gradient; got none\.",
        ),
        (
            lambda: relu_multipliers([[0.0]], [0.0], [[1.0]], [1.0]),
            r"W and a must not all be 0; got zeros only\.",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=rf"^{message}$"):
        call()


@pytest.mark.parametrize("subsets", [3, [3]])
def test_subsets_are_sets(subsets):
    with pytest.raises(ValueError, match=r"^subsets must .*; got (int|3)\.$"):
        exact_kkt(2, subsets=subsets)
