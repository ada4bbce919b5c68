"""Trained polynomial networks, minima of the norm, survivors, and the recorded experiment."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from flatbook.experiments import execute, rounded, trained_nets
from flatbook.reconstruction import (
    active_neurons,
    coverage,
    exact_kkt,
    fit_multipliers,
    gram_spectrum,
    isolation,
    kkt_conditions,
    moment_tensor,
    norm_cost,
    one_neuron,
    polynomial_network,
    power_modes,
    prune_neurons,
    recover,
    train_polynomial,
    weighted_kkt,
)
from flatbook.reconstruction.interpolation import fit_map

pytestmark = pytest.mark.usefixtures("one_thread")


def problem(n=4, m=6, d=5, seed=0, scale=0.5):
    random = torch.Generator().manual_seed(seed)
    X = torch.randn(n, d, generator=random, dtype=torch.float64)
    y = torch.randint(0, 2, (n,), generator=random).double() * 2 - 1
    W = scale * torch.randn(m, d, generator=random, dtype=torch.float64)
    return W, scale * torch.randn(m, generator=random, dtype=torch.float64), X, y


# --- training ----------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [(0, 0, 0, 1.0), (0.5, -1.0, 0.3, 2.0), (0, 0, 1.0)])
def test_a_plain_step_is_the_gradient_of_the_exponential_loss(activation):
    W, a, X, y = problem()
    V, b = W.clone().requires_grad_(), a.clone().requires_grad_()
    z = X @ V.T
    out = sum(c * z**k for k, c in enumerate(activation)) @ b
    torch.exp(-y * out).sum().backward()
    end = train_polynomial(W, a, X, y, activation=activation, steps=1, rate=1e-3, scaled=False)
    torch.testing.assert_close(end.W[-1], W - 1e-3 * V.grad)
    torch.testing.assert_close(end.a[-1], a - 1e-3 * b.grad)


def test_a_scaled_step_is_along_the_gradient_and_bounded():
    W, a, X, y = problem()
    V, b = W.clone().requires_grad_(), a.clone().requires_grad_()
    margins = y * ((X @ V.T) ** 3 @ b)
    margins.neg().logsumexp(dim=0).backward()
    for rate in (0.01, 0.5):
        path = train_polynomial(W, a, X, y, steps=1, rate=rate, at=[0])
        moved = torch.cat([(path.W[1] - W).flatten(), path.a[1] - a])
        slope = -torch.cat([V.grad.flatten(), b.grad])
        assert torch.nn.functional.cosine_similarity(moved, slope, dim=0) > 1 - 1e-12
        assert moved.norm() <= rate * torch.cat([W.flatten(), a]).norm() / 3
        assert path.margins[0] == pytest.approx(float(margins.detach().min()))


def test_scaled_and_plain_descent_follow_the_same_path():
    W, a, X, y = problem(scale=0.3)
    fast = train_polynomial(W, a, X, y, steps=4000, rate=0.01, at=range(0, 4000, 5))
    slow = train_polynomial(W, a, X, y, steps=150, rate=2e-3, scaled=False)
    norms = (fast.W.square().sum((1, 2)) + fast.a.square().sum(1)).sqrt()
    goal = (slow.W[-1].square().sum() + slow.a[-1].square().sum()).sqrt()
    k = int((norms - goal).abs().argmin())
    assert norms[0] < 0.8 * goal  # it moved, and the other went further
    assert goal < 0.95 * norms[-1]
    gap = (fast.W[k] - slow.W[-1]).norm() / goal
    assert gap < 0.01 < (W - slow.W[-1]).norm() / goal


def test_runs_side_by_side_are_those_alone():
    one, two = problem(seed=1), problem(seed=2)
    both = [torch.stack(pair) for pair in zip(one, two, strict=True)]
    path = train_polynomial(*both, steps=40, at=[3])
    assert path.steps == [3, 40]
    assert path.W.shape == (2, 2, 6, 5)
    for k, case in enumerate((one, two)):
        alone = train_polynomial(*case, steps=40, at=[3])
        torch.testing.assert_close(path.W[:, k], alone.W)
        torch.testing.assert_close(path.margins[:, k], alone.margins)
    shared = train_polynomial(both[0], both[1], one[2], one[3], steps=40)
    torch.testing.assert_close(shared.W[-1, 0], path.W[-1, 0])


def test_training_stays_in_the_start_and_the_span_of_the_samples():
    W, a, X, y = problem(n=3, d=6)
    end = train_polynomial(W, a, X, y, steps=50)
    moved = end.W[-1] - W
    inside = moved @ torch.linalg.pinv(X) @ X
    torch.testing.assert_close(inside, moved)
    basis = torch.linalg.qr(X.T).Q
    W = W @ basis @ basis.T
    end = train_polynomial(W, a, X, y, steps=50)
    inner = train_polynomial(W @ basis, a, X @ basis, y, steps=50)
    torch.testing.assert_close(end.W[-1] @ basis, inner.W[-1], atol=1e-10, rtol=0)


def test_training_nears_a_kkt_point():
    X, y = trained_nets.draw("gaussian", 4, 3)
    W, a = trained_nets.start(20, 4, 1e-3, 3)
    path = train_polynomial(W, a, X, y, steps=4000, at=[0])
    before, after = (
        fit_multipliers(V, b, X, y).residual for V, b in zip(path.W, path.a, strict=True)
    )
    assert after < 0.01 < 0.5 < before
    wrong = fit_multipliers(path.W[-1], path.a[-1], X, -y).residual
    assert wrong > 0.9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": torch.tensor([1.0, 0.5, 1.0, 1.0])}, "y must hold -1 and 1"),
        ({"activation": (0.0, 1.0)}, "three at least"),
        ({"activation": (0.0, 0.0, 1.0, 0.0)}, "end with a coefficient other than 0"),
        ({"at": [99]}, "at must be a whole number from 0 to 5"),
        ({"at": 3}, "at must list numbers of steps or be None; got 3"),
        ({"at": torch.tensor(3)}, "at must list numbers of steps or be None; got tensor"),
        ({"W": [[1.0], [1.0, 2.0]]}, "W must be a tensor or array of numbers"),
        ({"W": torch.zeros(6, 5), "a": torch.zeros(6)}, "W and a must not all be 0"),
        ({"W": torch.full((6, 5), 1e200, dtype=torch.float64)}, "outputs that are finite"),
        ({"rate": 0.0}, "rate must be a finite number above 0"),
        ({"a": torch.ones(3)}, "a must have shape"),
        ({"rate": 1e9, "scaled": False, "steps": 50}, "small enough for plain descent"),
    ],
)
def test_training_refuses(change, message):
    W, a, X, y = problem()
    given = {"W": W, "a": a, "X": X, "y": y, "steps": 5} | change
    with pytest.raises(ValueError, match=message):
        train_polynomial(**given)


def test_training_takes_arrays_of_steps_and_coefficients():
    W, a, X, y = problem()
    cubic = np.array([0.0, 0.0, 0.0, 1.0])
    for at in (np.array([1, 2]), torch.tensor([1, 2]), iter([1, 2])):
        path = train_polynomial(W, a, X, y, activation=cubic, steps=3, at=at)
        assert path.steps == [1, 2, 3]
        torch.testing.assert_close(path.W[-1], train_polynomial(W, a, X, y, steps=3).W[-1])


def test_nothing_moves_where_there_is_no_gradient():
    W, a, X, y = problem()
    for V, samples in ((W, 0 * X), (0 * W, X)):
        end = train_polynomial(V, a, samples, y, steps=3)
        assert torch.equal(end.W[-1], V)
        assert torch.equal(end.a[-1], a)


# --- what is left ------------------------------------------------------------------------------


def test_active_neurons_merge_up_to_sign_and_add_up():
    u, v = torch.tensor([0.6, 0.8]).double(), torch.tensor([1.0, 0.0]).double()
    W = torch.stack([2 * u, -u, v, 1e-3 * v])
    a = torch.tensor([1.0, 2.0, -4.0, 1.0]).double()
    found = active_neurons(W, a)
    torch.testing.assert_close(found.directions, torch.stack([u, v]))
    assert found.strengths.tolist() == pytest.approx([8 - 2, -4])
    assert found.neurons.tolist() == [0, 2, 1]
    even = active_neurons(W, a, degree=4)
    assert even.strengths.tolist() == pytest.approx([16 + 2, -4])
    x = torch.randn(7, 2, generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(
        polynomial_network(found.directions, found.strengths, x),
        polynomial_network(W[:3], a[:3], x),
    )
    assert len(active_neurons(W, a, share=0.7).directions) == 1
    with pytest.raises(ValueError, match="weights in both layers"):
        active_neurons(W, 0 * a)
    with pytest.raises(ValueError, match="share must be below 1"):
        active_neurons(W, a, share=1.0)


@pytest.mark.parametrize("degree", [3, 4])
def test_the_spectrum_is_that_of_the_gram_matrix(degree):
    W = problem(m=9, d=3)[0]
    gram = (W @ W.T) ** (degree - 1)
    N = math.comb(3 + degree - 2, degree - 1)
    wanted = torch.linalg.eigvalsh(gram).flip(0)[:N]
    torch.testing.assert_close(gram_spectrum(W, degree=degree)[:9], wanted[:9])


def test_the_spectrum_needs_coordinates_of_the_span():
    exact = exact_kkt(3, d=7, seed=0)
    full = gram_spectrum(exact.W, rank=3)
    assert len(full) == 6
    assert full[-1] > 0.01 * full[0]
    assert len(gram_spectrum(exact.W)) == 28
    assert gram_spectrum(exact.W)[6] < 1e-12 * full[0]


# --- minima of the norm ------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
def test_the_norm_cost_is_the_minimum(degree):
    def cost(log_a, c):
        a = math.exp(log_a[0])
        return 0.5 * (a**2 + (c / a) ** (2 / degree))

    for c in (0.1, 1.0, 7.0):
        least = minimize(cost, [0.0], args=(c,), tol=1e-12).fun
        assert float(norm_cost([c], degree=degree)[0]) == pytest.approx(least, rel=1e-7)
        assert norm_cost([-c], degree=degree) == norm_cost([c], degree=degree)


@pytest.mark.parametrize(("n", "m", "degree"), [(2, 9, 3), (5, 20, 3), (4, 15, 2), (3, 8, 1)])
def test_pruning_keeps_outputs_and_does_not_raise_the_norm(n, m, degree):
    for seed in range(5):
        W, a, X, _ = problem(n=n, m=m, seed=seed)
        V, b = prune_neurons(W, a, X, degree=degree)
        assert 1 <= len(b) <= n
        torch.testing.assert_close(
            polynomial_network(V, b, X, degree=degree), polynomial_network(W, a, X, degree=degree)
        )
        before, after = (float(w.square().sum() + v.square().sum()) for w, v in ((W, a), (V, b)))
        assert after < before * (1 + 1e-12)
        directions = V / V.norm(dim=1, keepdim=True)  # each is one that was there
        known = W / W.norm(dim=1, keepdim=True)
        assert (directions @ known.T).amax(dim=1).min() > 1 - 1e-12


def test_pruning_a_small_network_changes_nothing():
    W, a, X, _ = problem(n=6, m=6)
    V, b = prune_neurons(W, a, X)
    assert torch.equal(V, W)
    assert torch.equal(b, a)


def test_pruning_drops_all_that_go_at_once():
    """Two of these three neurons vanish together, and rounding must leave neither."""
    V, b = prune_neurons([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], [1.0, 1.0, 1.0], np.eye(2))
    assert len(b) == 1
    assert polynomial_network(V, b, np.eye(2)) == pytest.approx([2.0, 2.0])


def test_the_full_rank_network_is_no_minimum():
    exact = exact_kkt(4, seed=2)
    V, b = prune_neurons(exact.W, exact.a, exact.X)
    assert len(b) <= 4
    assert V.square().sum() + b.square().sum() < 0.7 * (
        exact.W.square().sum() + exact.a.square().sum()
    )


@pytest.mark.parametrize("degree", [3, 5])
def test_one_neuron_meets_the_conditions_and_is_the_shortest(degree):
    for seed in range(4):
        X, y = trained_nets.draw("gaussian", 5, seed)
        net = one_neuron(X, y, degree=degree)
        assert max(kkt_conditions(*net, degree=degree)) < 1e-10
        found = minimize(
            lambda u: u @ u,
            np.linalg.lstsq(X.numpy(), y.numpy(), rcond=None)[0],
            jac=lambda u: 2 * u,
            constraints={"type": "ineq", "fun": lambda u: y.numpy() * (X.numpy() @ u) - 1},  # noqa: B023
            tol=1e-12,
        ).x
        cosine = net.W[0] @ torch.from_numpy(found) / net.W[0].norm() / np.linalg.norm(found)
        assert cosine > 1 - 1e-8


def test_a_sample_beyond_the_margin_has_no_multiplier():
    """Though one along the neuron would explain it alone."""
    X, y = trained_nets.draw("gaussian", 3, 0)
    net = one_neuron(X, y)
    extra = 2 * net.W / (net.W @ net.W.T) / net.a ** (1 / 3)  # margin 8
    both = one_neuron(torch.cat([X, extra]), torch.cat([y, y.new_ones(1)]))
    torch.testing.assert_close(both.W, net.W)
    assert both.multipliers[-1] == 0
    assert max(kkt_conditions(*both)) < 1e-10


def test_one_neuron_is_a_local_minimum():
    """No feasible network nearby is shorter, the other neurons being anything small."""
    X, y = trained_nets.draw("gaussian", 4, 1)
    net = one_neuron(X, y)
    random = torch.Generator().manual_seed(0)
    base = net.W.square().sum() + net.a.square().sum()
    for size in (0.3, 0.1, 0.03):
        for _ in range(200):
            W = size * torch.randn(6, 4, generator=random).double()
            a = size * torch.randn(6, generator=random).double()
            W[0], a[0] = W[0] + net.W[0], a[0] + net.a[0]
            margin = float((y * polynomial_network(W, a, X)).min())
            if margin > 0:  # scaled to margin 1
                assert (W.square().sum() + a.square().sum()) / margin**0.5 > base


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1e9])
def test_one_neuron_does_not_depend_on_the_scale_of_the_samples(scale):
    X, y = trained_nets.draw("gaussian", 4, 1)
    net, scaled = one_neuron(X, y), one_neuron(scale * X, y)
    cosine = net.W[0] @ scaled.W[0] / net.W[0].norm() / scaled.W[0].norm()
    assert cosine > 1 - 1e-12
    fit = kkt_conditions(*scaled)  # multipliers have a scale, and so has their slackness
    assert max(fit.stationarity, fit.primal, fit.dual) < 1e-10


def test_one_neuron_refuses():
    with pytest.raises(ValueError, match="separated by a plane"):
        one_neuron([[1.0], [1.0]], [1.0, -1.0])
    with pytest.raises(ValueError, match="must be odd"):
        one_neuron([[1.0]], [1.0], degree=4)


# --- survivors ---------------------------------------------------------------------------------


def test_weighted_networks_have_the_spectrum_and_meet_the_conditions():
    strengths = [0.5, 1.0, 3.0, 2.0]
    net = weighted_kkt(torch.tensor(strengths).double(), seed=4)
    assert max(kkt_conditions(*net)) < 1e-12
    T = moment_tensor(net.X, net.multipliers * net.y)
    values = torch.linalg.svdvals(T.reshape(4, 16))
    torch.testing.assert_close(values, torch.tensor([3.0, 2.0, 1.0, 0.5]).double())
    found = recover(net.W, net.a)
    assert trained_nets.direction_errors(found.X, net.X).max() < 1e-10
    lengths = sorted(found.X.norm(dim=1).tolist())
    assert lengths == pytest.approx(sorted(net.X.norm(dim=1).tolist()))


def test_equal_weights_give_the_exact_network_up_to_scale():
    exact, net = (
        exact_kkt(3, labels=[1, -1, 1], X=np.eye(3)),
        weighted_kkt(torch.ones(3).double(), labels=[1, -1, 1]),
    )
    frame = net.X / net.X.norm(dim=1, keepdim=True)
    inner = net.W @ frame.T
    ratio = inner.norm(dim=1) / torch.from_numpy(exact.W).norm(dim=1)
    torch.testing.assert_close(ratio, ratio[0].expand(6))
    torch.testing.assert_close(inner, ratio[0] * torch.from_numpy(exact.W))


@pytest.mark.parametrize("neurons", [[0, 1, 2], [3, 5], [0, 4, 5]])
def test_fewer_neurons_still_meet_the_conditions(neurons):
    net = weighted_kkt([1.0, 2.0, 1.5], neurons=neurons)
    assert len(net.a) == len(neurons)
    assert max(kkt_conditions(*net)) < 1e-12


def test_weighted_networks_refuse():
    with pytest.raises(ValueError, match="strengths must be above 0"):
        weighted_kkt([1.0, 0.0])
    with pytest.raises(ValueError, match="2 is in none"):
        weighted_kkt([1.0, 1.0, 1.0], neurons=[0, 3])
    for neurons, got in (([6], "6"), ([0.5], "0.5"), ("012", "'0'"), ([True] * 3, "True")):
        with pytest.raises(ValueError, match=f"in neurons must be .* from 0 to 5; got {got}"):
            weighted_kkt([1.0, 1.0, 1.0], neurons=neurons)
    with pytest.raises(ValueError, match="neurons must list numbers"):
        weighted_kkt([1.0, 1.0, 1.0], neurons=3)


def test_coverage_is_the_share_that_a_projection_keeps():
    W, _, X, _ = problem(n=4, m=5, d=4)
    flat = torch.stack([torch.outer(w, w).flatten() for w in W])
    target = torch.stack([torch.outer(x, x).flatten() for x in X])
    kept = target @ torch.linalg.pinv(flat) @ flat
    wanted = kept.square().sum(dim=1) / target.square().sum(dim=1)
    torch.testing.assert_close(coverage(W, X), wanted)
    assert (wanted < 0.99).all()
    torch.testing.assert_close(coverage(problem(m=10, d=4)[0], X), torch.ones(4).double())


def test_the_least_map_is_what_coverage_says():
    """f-hat is the sum of b_i x_i times the projection of x_i x_i^T."""
    net = weighted_kkt(torch.tensor([1.0, 2.0, 0.7, 1.3]).double(), neurons=[0, 5, 7, 8], seed=1)
    points = net.W / net.W.norm(dim=1, keepdim=True)
    values = 1 / (3 * net.W.norm(dim=1) * net.a)
    fitted = fit_map(points, values[:, None] * points, 2, 1e-16)
    assert not fitted.determined
    flat = torch.stack([torch.outer(u, u).flatten() for u in points])
    project = torch.linalg.pinv(flat) @ flat
    w = problem(m=7, d=4)[0]
    squares = torch.stack([torch.outer(v, v).flatten() for v in w])
    total = torch.zeros_like(w)
    for x, b in zip(net.X, net.multipliers * net.y, strict=True):
        total += b * (squares @ (project @ torch.outer(x, x).flatten()))[:, None] * x
    torch.testing.assert_close(fitted.values(w), total)


def test_isolation_is_the_relative_gap():
    assert isolation([3.0, 1.0, 4.0]).tolist() == pytest.approx([0.25, 0.5, 0.25])
    assert isolation([1.0, 1.0, 2.0]).tolist() == pytest.approx([0.0, 0.0, 0.5])
    for strengths, message in (
        ([1.0], "two numbers or more; got 1"),
        ([1.0, -2.0], "at least 0; got -2"),
        ([0.0, 0.0], "must not all be 0"),
    ):
        with pytest.raises(ValueError, match=message):
            isolation(strengths)


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_power_method_finds_every_mode_of_a_determined_tensor(symmetric):
    net = weighted_kkt(torch.tensor([0.4, 1.0, 1.0, 2.4]).double(), seed=3)
    found = power_modes(net.W, net.a, 4, symmetric=symmetric)
    assert trained_nets.direction_errors(found.directions, net.X).max() < 1e-6
    assert sorted(found.values.tolist()) == pytest.approx([0.4, 1.0, 1.0, 2.4])
    with pytest.raises(ValueError, match="no neuron of zeros"):
        power_modes(0 * net.W, net.a, 4)
    with pytest.raises(ValueError, match="modes must be a whole number from 1 to 4; got 5"):
        power_modes(net.W, net.a, 5)


# --- the experiment ----------------------------------------------------------------------------

TINY = replace(
    trained_nets.CONFIGS["quick"],
    seeds=1,
    survivor_seeds=2,
    samples=(3,),
    widths=(12,),
    scales=(1e-3, 1.0),
    steps=800,
    release_steps=400,
    long=400,
    variables=(2,),
    ratios=(1,),
    draws=2,
    shares=(0.3, 1.0),
)


def test_direction_errors_ignore_sign_and_length():
    X = np.eye(3)
    guesses = np.array([[-5.0, 0, 0], [0, 3.0, 4.0]])
    errors = trained_nets.direction_errors(guesses, 2 * X)
    assert errors == pytest.approx([0.0, math.sqrt(2 - 1.2), math.sqrt(2 - 1.6)])
    assert trained_nets.direction_errors(np.zeros((0, 3)), X) == pytest.approx([math.sqrt(2)] * 3)


@pytest.mark.parametrize("kind", trained_nets.KINDS)
def test_drawn_samples_are_independent_unit_vectors(kind):
    X, _ = trained_nets.draw(kind, 5, 1)
    torch.testing.assert_close(X.norm(dim=1), torch.ones(5).double())
    assert torch.linalg.svdvals(X)[-1] > 0.05
    other, _ = trained_nets.draw(kind, 5, 2)
    assert torch.equal(X, other) == (kind == "orthonormal")


def test_a_report_knows_a_network_of_one_neuron():
    X, y = trained_nets.draw("gaussian", 4, 0)
    net = one_neuron(X, y)
    found = trained_nets.report(net.W, net.a, X, y, 0)
    assert (found["neurons"], found["directions"], found["rank"]) == (1, 1, 1)
    assert found["residual"] < 1e-10
    assert found["svm"] == pytest.approx(1.0)
    assert found["cost"] == pytest.approx(1.0)
    assert found["margin"] == pytest.approx(1.0)
    assert found["spectrum"] < 1e-20
    assert np.median(found["error"]) > 0.2
    assert found["tight"] == int((found["multipliers"] > 1e-9).sum())


def test_an_exact_network_passes_the_same_report():
    exact = exact_kkt(4, X=torch.eye(4, dtype=torch.float64), seed=0)
    found = trained_nets.report(exact.W, exact.a, exact.X, exact.y, 0)
    assert found["directions"] == 10
    assert found["spectrum"] > 0.01
    assert max(found["error"]) < 1e-9
    assert found["residual"] < 1e-12


@pytest.mark.parametrize("name", list(trained_nets.STUDIES))
def test_studies_do_not_depend_on_the_order_of_seeds(name):
    one, two = (rounded(trained_nets.STUDIES[name](TINY, 0), 4) for _ in range(2))
    assert one == two
    assert rounded(trained_nets.STUDIES[name](TINY, 1), 4) != one or name == "eigenvectors"


def test_released_networks_leave_if_pushed():
    config = replace(TINY, nudges=(0.0, 1e-4), release_steps=1500)
    found = trained_nets.instability(config, 0)
    still, gone = found["3-0"], found["3-0.0001"]
    assert max(still["distance"]) < 1e-5
    assert still["directions"] == 6
    assert gone["distance"][0] < 2e-4
    assert max(gone["distance"]) > 0.5
    assert gone["directions"] < 6


def test_the_push_grows_as_the_square_of_the_norm_up_to_the_steps():
    config = replace(TINY, nudges=(1e-8,), release_steps=1000)
    found = trained_nets.instability(config, 0)["3-1e-08"]
    growth, away = found["growth"].numpy(), found["distance"].numpy()
    inside = (growth > 10) & (away < 1e-3)
    slope = np.polyfit(np.log(growth[inside]), np.log(away[inside]), 1)[0]
    assert inside.sum() >= 3
    h = 0.1 / 3  # a step stretches the network by 1 + h and the push by 1 + 3h
    expected = math.log((1 + 3 * h) / (1 + h)) / math.log(1 + h)
    assert slope == pytest.approx(expected, abs=0.01)


def test_survivors_all_come_back_from_all_neurons():
    found = trained_nets.survivors(TINY, 0)
    for name, part in itertools.product(trained_nets.SPECTRA, ("slices", "symmetric", "power")):
        assert max(found[f"{name}-1"][part]) < 1e-6
        assert max(found[f"{name}-0.3"]["slices"]) > 0.05
    assert min(found["equal-1"]["coverage"]) == pytest.approx(1.0)
    assert min(found["isolated-1"]["chance"]) > 0.2


def test_a_tiny_run_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setitem(trained_nets.CONFIGS, "quick", TINY)
    run = execute("trained-nets", "quick", out=tmp_path, workers=0)
    assert set(run.values) == set(trained_nets.STUDIES)
    assert len(run.values["rank"]["gaussian-3-12-1"]["error"]) == 1
    assert len(run.values["survivors"]["equal-0.3"]["slices"]) == 2
    assert run.values["eigenvectors"]["needed-2"] == [3]
