"""Signal–noise coordinates against the full network, drawn problems against drawn vectors."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from flatbook import optim
from flatbook.theory.coordinates import Problems, by_class, of_network, outputs, responses
from flatbook.theory.decomposition import Decomposition
from flatbook.theory.descent import train
from flatbook.theory.objectives import sample_weights
from flatbook.theory.population import covariance, evaluate
from flatbook.theory.signal_noise import (
    TwoLayerCNN,
    compose,
    decompose,
    logistic_loss,
    memorization_ratio,
    sample,
)
from flatbook.theory.wishart import sample_problems

N = 12
FORGET = torch.arange(N) < 4
RADII = {"GD": 0.0, "SAM": 0.3}
OBJECTIVES = {
    "standard": {},
    "mini-batches": {"batch_size": 5, "seed": 3},
    "NegGrad": {"forget": FORGET, "alpha": 0.6},
    "NegGrad in mini-batches": {"forget": FORGET, "alpha": 0.6, "batch_size": 3, "seed": 3},
    "retraining": {"forget": FORGET},
}
cases = pytest.mark.parametrize("objective", OBJECTIVES)
optimizers = pytest.mark.parametrize("radius", RADII.values(), ids=RADII)


def given_problem(patches=2, *, flip=0.2, n=N, d=60, signal=2.0, activation="relu"):
    data = sample(n, d=d, patches=patches, signal=signal, noise=1.0, flip=flip, seed=4)
    return data, TwoLayerCNN(d, filters=4, seed=1, activation=activation)


def fit(net, data, steps, radius, *, lr=0.05, objective=None, **settings):
    """Train the full network with torch and flatbook.optim; return the filters at each step."""
    base = torch.optim.SGD(net.parameters(), lr=lr, **settings)
    optimizer = optim.SAM(base, rho=radius) if radius else base
    path = [net.weight.detach().clone()]
    for weights in sample_weights(len(data.y), steps, **(objective or {})):

        def closure(weights=weights):
            base.zero_grad()
            loss = logistic_loss(net(data.x), data.y, weights)
            loss.backward()
            return loss

        optimizer.step(closure)
        path.append(net.weight.detach().clone())
    return torch.stack(path)


def same(actual, expected, tolerance=1e-11):
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1)


# --- data and network --------------------------------------------------------------------------


def test_samples_are_what_they_say():
    data = sample(400, d=30, patches=3, signal=2.0, noise=0.5, flip=0.25, seed=1)
    assert data.x.shape == (400, 3, 30)
    assert data.x.dtype == data.y.dtype == torch.float64
    assert (data.noise @ data.signal).abs().max() < 1e-14
    assert torch.equal(data.flipped, data.y != data.true_y)
    assert set(data.y.tolist()) == {-1.0, 1.0}
    holds_signal = (data.x == (data.true_y[:, None] * data.signal)[:, None]).all(dim=2)
    assert (holds_signal.sum(dim=1) == 1).all()
    assert (holds_signal.sum(dim=0) > 90).all()  # each patch in turn
    assert torch.equal(data.x[~holds_signal], data.noise.repeat_interleave(2, dim=0))
    assert stats.binomtest(int(data.flipped.sum()), 400, 0.25).pvalue > 1e-3
    assert stats.binomtest(int((data.true_y > 0).sum()), 400, 0.5).pvalue > 1e-3
    assert stats.kstest(data.noise[:, 1:].flatten() / 0.5, "norm").pvalue > 1e-3


def test_a_given_signal_is_kept_and_no_state_is_left():
    phi = torch.randn(9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before = torch.get_rng_state()
    data = sample(5, d=9, patches=2, signal=phi, noise=1.0)
    again = sample(5, d=9, patches=2, signal=phi.numpy(), noise=1.0)
    TwoLayerCNN(9)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(data.signal, phi)
    assert torch.equal(data.x, again.x)
    assert not torch.equal(data.x, sample(5, d=9, patches=2, signal=phi, noise=1.0, seed=1).x)
    assert (data.noise @ phi).abs().max() < 1e-14


@pytest.mark.parametrize(
    ("activation", "value"),
    [
        ("relu", lambda z: max(z, 0.0)),
        ("squared_relu", lambda z: max(z, 0.0) ** 2),
        ("softplus", lambda z: math.log1p(math.exp(z))),
    ],
)
def test_the_network_is_its_definition(activation, value):
    data, net = given_problem(3, n=3, d=5, activation=activation)
    weight = net.weight.detach().numpy()
    for x, f in zip(data.x.numpy(), net(data.x).tolist(), strict=True):
        scores = [sum(value(w @ patch) for w in weight[j] for patch in x) / 4 for j in (0, 1)]
        assert f == pytest.approx(scores[0] - scores[1], abs=1e-14)


def test_the_network_is_blind_to_the_order_of_patches():
    data, net = given_problem(3)
    same(net(data.x.flip(1)), net(data.x), 1e-14)


def test_float32_networks_train_and_decompose():
    data, _ = given_problem()
    net = TwoLayerCNN(60, filters=4, dtype=torch.float32)
    net0 = net.weight.detach().clone()
    assert net(data.x.float()).dtype == torch.float32
    (net(data.x.float()) * data.y).mean().backward()
    with torch.no_grad():
        net.weight += net.weight.grad
    parts = decompose(net, net0, data)
    assert parts.zeta.dtype == torch.float64
    assert parts.residual < 1e-5


# --- the decomposition -------------------------------------------------------------------------


@cases
@optimizers
@pytest.mark.parametrize("patches", [2, 3])
def test_training_stays_in_the_span(patches, radius, objective):
    data, net = given_problem(patches)
    path = fit(net, data, 60, radius, objective=OBJECTIVES[objective])
    parts = decompose(path, path[0], data)
    assert parts.residual[0] == 0
    assert parts.residual.max() <= 1e-12
    assert parts.zeta[-1].abs().max() > 0.1  # it did train
    same(compose(parts.kappa, parts.zeta, path[0], data), path, 1e-12)


def test_momentum_stays_in_the_span_and_weight_decay_does_not():
    data, net = given_problem()
    path = fit(net, data, 40, 0.0, momentum=0.9)
    assert decompose(path, path[0], data).residual.max() <= 1e-12
    data, net = given_problem()
    path = fit(net, data, 40, 0.0, weight_decay=0.1)
    assert decompose(path, path[0], data).residual[-1] > 1e-3


@given(
    n=st.integers(1, 6),
    more=st.integers(2, 5),
    patches=st.integers(2, 4),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    seed=st.integers(0, 999),
)
@settings(max_examples=30, deadline=None)
def test_decompose_inverts_compose(n, more, patches, scale, seed):
    data = sample(n, d=n + more, patches=patches, signal=2.0, noise=scale, seed=seed)
    random = torch.Generator().manual_seed(seed)
    kappa = torch.randn(2, 3, generator=random, dtype=torch.float64)
    zeta = torch.randn(2, 3, n, generator=random, dtype=torch.float64)
    start = torch.zeros(2, 3, n + more)
    parts = decompose(compose(kappa, zeta, start, data), start, data)
    r = data.span.r
    tolerance = 1e-13 * float(torch.linalg.cond(r))
    # Against the plain formula: the signal and the noise vectors are orthogonal.
    same(parts.kappa, kappa, tolerance)
    norms = torch.linalg.vector_norm(data.noise, dim=1)
    same(parts.zeta / norms, zeta / norms, tolerance * float(norms.max() / norms.min()))
    assert parts.residual <= 1e-12


def test_decompose_takes_networks_filters_and_lists_of_either():
    data, net = given_problem()
    path = fit(net, data, 5, 0.0)
    many = decompose(path, path[0], data)
    assert isinstance(many, Decomposition)
    assert many.kappa.shape == (6, 2, 4)
    assert many.zeta.shape == (6, 2, 4, N)
    assert many.residual.shape == (6,)
    start = TwoLayerCNN(60, filters=4, seed=1)
    one = decompose(net, start, data)
    assert isinstance(one.residual, float)
    same(one.zeta, many.zeta[-1], 1e-13)
    same(decompose([start, net], start, data).zeta, many.zeta[[0, -1]], 1e-13)
    assert decompose(path.reshape(2, 3, 2, 4, 60), path[0], data).residual.shape == (2, 3)


def test_the_data_are_factored_once(monkeypatch):
    calls = []
    qr = torch.linalg.qr
    monkeypatch.setattr(torch.linalg, "qr", lambda *a, **k: calls.append(1) or qr(*a, **k))
    data, net = given_problem()
    for _ in range(3):
        decompose(net, TwoLayerCNN(60, filters=4), data)
    assert len(calls) == 1


def test_the_residual_needs_more_dimensions_than_vectors():
    for d, refused in ((N + 1, True), (N + 2, False)):
        data, net = given_problem(d=d)
        if refused:
            message = rf"^d must exceed n \+ 1, .*; got d = {d} and n = {N}\.$"
            with pytest.raises(ValueError, match=message):
                decompose(net, net, data)
        else:
            random = torch.randn(net.weight.shape, generator=torch.Generator().manual_seed(0))
            assert decompose(random, net, data).residual > 0.01


# --- the coordinates ---------------------------------------------------------------------------


@cases
@optimizers
@pytest.mark.parametrize("patches", [2, 3])
def test_coordinates_train_as_the_full_network_step_by_step(patches, radius, objective):
    data, net = given_problem(patches)
    assert data.flipped.any()
    problem = of_network(net, data)
    path = fit(net, data, 60, radius, objective=OBJECTIVES[objective])
    parts = decompose(path, path[0], data)
    ours = train(problem, steps=60, lr=0.05, radius=radius, every=1, **OBJECTIVES[objective])
    assert ours.path_steps.tolist() == list(range(61))
    same(ours.path_kappa[:, 0], parts.kappa)
    same(ours.path_zeta[:, 0], parts.zeta)
    same(compose(ours.kappa[0], ours.zeta[0], path[0], data), path[-1])
    same(outputs(problem, ours.kappa, ours.zeta)[0], net(data.x))
    fitted = ~FORGET if "forget" in OBJECTIVES[objective] else torch.ones(N, dtype=torch.bool)
    same(ours.loss[0], logistic_loss(net(data.x)[fitted], data.y[fitted]))


@optimizers
@pytest.mark.parametrize("activation", ["squared_relu", "softplus"])
def test_other_activations_train_as_the_full_network(radius, activation):
    data, net = given_problem(3, activation=activation)
    problem = of_network(net, data)
    path = fit(net, data, 40, radius, lr=0.1)
    ours = train(problem, steps=40, lr=0.1, radius=radius)
    same(compose(ours.kappa[0], ours.zeta[0], path[0], data), path[-1])


def test_training_goes_on_from_where_it_was():
    data, net = given_problem(flip=0.1)
    problem = of_network(net, data)
    path = fit(net, data, 20, 0.3)
    path = fit(net, data, 20, 0.0, objective=OBJECTIVES["NegGrad"])
    first = train(problem, steps=20, lr=0.05, radius=0.3)
    second = train(
        problem, steps=20, lr=0.05, start=(first.kappa, first.zeta), **OBJECTIVES["NegGrad"]
    )
    weight = compose(second.kappa[0], second.zeta[0], TwoLayerCNN(60, filters=4, seed=1), data)
    same(weight, path[-1])


def test_cells_do_not_mind_each_other():
    problems = sample_problems(
        6, d=[20, 40, 80], patches=[2, 3, 4], signal=[1.0, 2.0, 3.0], noise=[1.0, 0.5, 2.0]
    )
    lr, radius = torch.tensor([0.3, 0.2, 0.01]), torch.tensor([0.0, 0.2, 0.1])
    options = {"steps": 200, "stop_loss": 0.3, "every": 50}
    together = train(problems, lr=lr, radius=radius, **options)
    assert together.stopped.any()
    assert len(set(together.steps.tolist())) > 1
    for cell in range(3):
        alone = train(problems[[cell]], lr=lr[cell], radius=radius[cell], **options)
        same(together.zeta[[cell]], alone.zeta)
        same(together.kappa[[cell]], alone.kappa)
        same(together.loss[[cell]], alone.loss)
        assert together.steps[cell] == alone.steps[0]
        assert together.stopped[cell] == alone.stopped[0]
        f = outputs(problems[[cell]], alone.kappa, alone.zeta)
        same(logistic_loss(f, problems.y[[cell]]), alone.loss)
    same(together.path_zeta[-1], together.zeta)


def test_a_cell_stops_at_the_first_step_below_the_loss():
    problem = sample_problems(6, d=[40], patches=2, signal=2.0, noise=1.0)
    free = train(problem, steps=80, lr=1.0, every=1)
    losses = logistic_loss(outputs(problem, free.path_kappa, free.path_zeta), problem.y)[:, 0]
    first = int((losses <= 0.2).nonzero()[0])
    stopped = train(problem, steps=80, lr=1.0, stop_loss=0.2)
    assert (stopped.steps.item(), stopped.stopped.item()) == (first, True)
    same(stopped.zeta, free.path_zeta[first])
    assert not free.stopped
    assert free.steps == 80
    assert len(free.path_steps) == 81
    nothing = train(problem, steps=0, lr=1.0)
    assert not nothing.zeta.any()
    assert nothing.path_zeta.shape == (0, 1, 2, 10, 6)


def test_coordinates_do_not_mind_a_rotation():
    data, net = given_problem()
    turn = torch.linalg.qr(torch.randn(60, 60, generator=torch.Generator().manual_seed(0)).double())
    turned = sample(N, d=60, patches=2, signal=2.0, noise=1.0, flip=0.2, seed=4)
    parts = (data.x @ turn.Q, data.y, data.true_y, data.flipped, turn.Q.T @ data.signal)
    turned = type(data)(*parts, data.noise @ turn.Q, data.noise_std)
    net1 = TwoLayerCNN(60, filters=4)
    net1.weight.data = net.weight.detach() @ turn.Q
    one, other = of_network(net, data), of_network(net1, turned)
    same(one.gram, other.gram)
    ends = [train(problem, steps=30, lr=0.1, radius=0.3) for problem in (one, other)]
    same(ends[0].zeta, ends[1].zeta)
    same(ends[0].kappa, ends[1].kappa)


def test_units_cancel():
    """Signal and noise c times as long, filters c times shorter, rate and radius to match."""
    data, net = given_problem()
    c = 8.0
    parts = (c * data.x, data.y, data.true_y, data.flipped, c * data.signal, c * data.noise)
    longer = type(data)(*parts, c * data.noise_std)
    short = TwoLayerCNN(60, filters=4)
    short.weight.data = net.weight.detach() / c
    one = train(of_network(net, data), steps=30, lr=0.1, radius=0.3)
    other = train(of_network(short, longer), steps=30, lr=0.1 / c**2, radius=0.3 / c)
    same(one.zeta, other.zeta)
    same(one.kappa, other.kappa)


def test_swapped_classes_swap_the_filters():
    data, net = given_problem()
    parts = (-data.y, -data.true_y, data.flipped, -data.signal)
    swapped = type(data)(data.x, *parts, data.noise, data.noise_std)
    net1 = TwoLayerCNN(60, filters=4)
    net1.weight.data = net.weight.detach().flip(0)
    one = train(of_network(net, data), steps=30, lr=0.1, radius=0.3)
    other = train(of_network(net1, swapped), steps=30, lr=0.1, radius=0.3)
    same(one.zeta, other.zeta.flip(1))
    same(one.kappa, other.kappa.flip(1))


def test_no_gradient_gives_no_step():
    problem = sample_problems(3, d=[20], patches=2, signal=1.0, noise=1.0, filters=2)
    dead = Problems(*(getattr(problem, name) for name in problem.__dataclass_fields__))
    dead.gram.copy_(dead.gram.abs())
    dead.gram[:, 3:, :3] = -1.0
    dead.response.zero_()
    end = train(dead, steps=3, lr=0.1, radius=0.5)
    assert not end.zeta.any()
    assert not end.kappa.any()
    assert evaluate(dead, end.kappa, torch.zeros(1, 2, 2, 3)).margin == 0


def test_by_class_averages_each_class_alone():
    zeta = torch.arange(2 * 3 * 4.0).reshape(1, 2, 3, 4)
    y = torch.tensor([[1.0, -1.0, -1.0, 1.0]])
    own, opposite = by_class(zeta, y)
    for i, label in enumerate(y[0].tolist()):
        j = 0 if label > 0 else 1
        assert own[0, i] == zeta[0, j, :, i].mean()
        assert opposite[0, i] == zeta[0, 1 - j, :, i].mean()


# --- the objective -----------------------------------------------------------------------------


def test_weights_sum_to_the_objective():
    for name, objective in OBJECTIVES.items():
        weights = sample_weights(N, 50, **objective)
        alpha = objective.get("alpha", 1.0)
        forget = FORGET if "forget" in objective else torch.zeros(N, dtype=torch.bool)
        assert weights.shape == (50, N)
        close = {"rtol": 1e-12, "atol": 1e-12}
        torch.testing.assert_close(weights[:, ~forget].sum(1), alpha + 0 * weights[:, 0], **close)
        forgotten = weights[:, forget].sum(1)
        torch.testing.assert_close(forgotten, alpha - 1 + 0 * forgotten, **close)
        if "batch_size" in objective:
            assert ((weights > 0).sum(1) == objective["batch_size"]).all()
            assert len({tuple(row) for row in weights.tolist()}) > 10, name


def test_a_pass_takes_each_sample_once_and_both_halves_shuffle():
    weights = sample_weights(N, 8, forget=FORGET, alpha=0.5, batch_size=2, seed=1)
    assert (weights[:4, ~FORGET] > 0).sum(0).tolist() == [1] * 8
    assert (weights[4:, ~FORGET] > 0).sum(0).tolist() == [1] * 8
    assert (weights[:2, FORGET] < 0).sum(0).tolist() == [1] * 4
    assert not torch.equal(weights[:4], weights[4:])
    assert not torch.equal(weights, sample_weights(N, 8, forget=FORGET, alpha=0.5, batch_size=2))


# --- drawn problems ----------------------------------------------------------------------------


def drawn(cells=4000, *, d=9, n=3, filters=1):
    d = np.full(cells, d)
    return sample_problems(
        n, d=d, patches=2, signal=3.0, noise=2.0, init=0.5, filters=filters, flip=0.3, seed=5
    )


@pytest.mark.parametrize("d", [9, 4])  # as many dimensions as it takes, and fewer
def test_drawn_grams_have_the_moments_of_wishart_matrices(d):
    problems = drawn(d=d)
    k, size = d - 1, 5
    scale = torch.tensor([2.0, 2, 2, 0.5, 0.5]).double()
    gram = problems.gram / scale[:, None] / scale
    mean, var = gram.mean(0), gram.var(0)
    root = len(problems) ** 0.5
    one = torch.eye(size).double()
    assert ((mean - k * one).abs() < 4.5 * (k * (1 + one)).sqrt() / root).all()
    assert (var / (k * (1 + one)) - 1).abs().max() < 0.2  # of G_ij: k, and 2k on the diagonal
    # E det = k (k − 1) (k − 2) …, which is 0 from the dimension on
    expected = math.prod(k - i for i in range(size))
    dets = torch.linalg.det(gram)
    assert (dets.mean() - expected).abs() <= 4.5 * dets.std() / root + 1e-9
    assert torch.linalg.matrix_rank(gram[0], hermitian=True) == min(k, size)
    for i in range(size):
        assert stats.kstest(gram[:, i, i], "chi2", args=(k,)).pvalue > 1e-3


def test_drawn_grams_are_distributed_as_those_of_vectors():
    problems, taken = drawn(400), []
    for seed in range(400):
        data = sample(3, d=9, patches=2, signal=3.0, noise=2.0, seed=seed)
        net = TwoLayerCNN(9, filters=1, init=0.5, seed=10_000 + seed)
        taken.append(of_network(net, data).gram[0])
    taken = torch.stack(taken)
    for i, j in (0, 0), (0, 1), (0, 3), (3, 4), (4, 4):
        assert stats.ks_2samp(taken[:, i, j], problems.gram[:, i, j]).pvalue > 1e-3


def test_the_rest_of_a_drawn_problem():
    problems = drawn()
    assert stats.kstest(problems.response.flatten() / 1.5, "norm").pvalue > 1e-3
    flips = int((problems.y != problems.true_y).sum())
    assert stats.binomtest(flips, problems.y.numel(), 0.3).pvalue > 1e-3
    assert len(problems[:7]) == 7
    assert torch.equal(drawn().gram, problems.gram)
    default = sample_problems(2, d=10**6, patches=2, signal=1.0, noise=[5.0], filters=200)
    expected = 0.1 / 5 / 1000
    assert default.response.std().item() == pytest.approx(expected, rel=0.15)
    assert default.gram[0, 5, 5].item() == pytest.approx(expected**2 * 10**6, rel=0.02)


# --- fresh samples -----------------------------------------------------------------------------


@optimizers
@pytest.mark.parametrize("activation", ["relu", "squared_relu", "softplus"])
@pytest.mark.parametrize("patches", [2, 3])
def test_error_and_loss_are_those_on_fresh_samples(radius, activation, patches):
    data, net = given_problem(patches, signal=1.5, activation=activation)
    problem = of_network(net, data)
    fit(net, data, 40, radius, lr=0.1)
    parts = decompose(net, TwoLayerCNN(60, filters=4, seed=1), data)
    ours = evaluate(problem, parts.kappa[None], parts.zeta[None], draws=20_000)
    fresh = sample(20_000, d=60, patches=patches, signal=data.signal, noise=1.0, seed=99)
    with torch.no_grad():
        margins = fresh.true_y * net(fresh.x)
    root = len(margins) ** 0.5
    for value, std, measured in (
        (ours.error, ours.error_std, (margins < 0).double()),
        (ours.loss, ours.loss_std, torch.nn.functional.softplus(-margins)),
        (ours.margin, torch.zeros(1), margins),
    ):
        error = math.hypot(std.item(), measured.std().item() / root)
        assert abs(value.item() - measured.mean().item()) < 4 * error
    assert 0.01 < ours.error < 0.6
    sigma = covariance(problem, parts.kappa[None], parts.zeta[None])[0]
    across = net.weight.detach().flatten(0, 1).clone()
    across[:, 0] = 0  # where the signal lies
    same(sigma, across @ across.T)


def linear_network(kappa, size, degree="relu"):
    """One filter a class, each minus the other: for ReLU the output is linear in the patches."""
    net = TwoLayerCNN(20, filters=1, activation=degree)
    w = torch.zeros(20, dtype=torch.float64)
    w[0], w[1] = kappa, size
    net.weight.data = torch.stack([w, -w])[:, None]
    data = sample(3, d=20, patches=3, signal=1.0, noise=1.0)
    return of_network(net, data), torch.zeros(1, 2, 1), torch.zeros(1, 2, 1, 3)


@pytest.mark.parametrize("kappa", [0.0, 0.5, -0.5, 3.0, 20.0])
def test_the_error_of_a_linear_network_is_that_of_a_gaussian(kappa):
    expected = stats.norm.sf(kappa / 2)  # f = ỹ κ + (P − 1) z
    ours = evaluate(*linear_network(kappa, 1.0), draws=2000)
    assert abs(ours.error.item() - expected) < 4.5 * ours.error_std.item() + 1e-300
    assert ours.margin.item() == kappa
    assert ours.error_std.item() < 0.2 * expected or kappa == 20  # no draw errs at 6 deviations


def test_squared_activations_err_as_often_as_linear_ones():
    """Here f = sign(u) u² of each patch, so a sample errs where κ < √(P − 1) |z|."""
    ours = evaluate(*linear_network(2.0, 1.0, "squared_relu"), draws=4000)
    assert abs(ours.error.item() - stats.norm.sf(2 / 2**0.5)) < 4.5 * ours.error_std.item()


def test_a_network_without_output_is_right_half_of_the_time():
    ours = evaluate(*linear_network(0.0, 0.0))
    assert (ours.error.item(), ours.margin.item()) == (0.5, 0.0)
    assert ours.loss.item() == pytest.approx(math.log(2))


def test_paths_are_evaluated_at_once_and_blocks_do_not_show(monkeypatch):
    problems = sample_problems(5, d=[30, 60], patches=2, signal=1.0, noise=1.0)
    run = train(problems, steps=20, lr=0.5, every=10)
    path = evaluate(problems, run.path_kappa, run.path_zeta, draws=300)
    assert path.error.shape == path.loss_std.shape == path.margin.shape == (3, 2)
    monkeypatch.setattr("flatbook.theory.population._BLOCK", 1)
    one = evaluate(problems, run.kappa, run.zeta, draws=300)
    same(path.error[-1], one.error)
    same(path.loss[-1], one.loss)
    a, b = responses(problems, run.path_kappa, run.path_zeta)
    assert (a.shape, b.shape) == ((3, 2, 2, 10), (3, 2, 2, 10, 5))


# --- what the model is for ---------------------------------------------------------------------


def test_strong_signals_are_learned_and_weak_ones_drown():
    """The positive controls: benign and harmful overfitting, both with a small training loss."""
    problems = sample_problems(
        20, d=[200] * 5 + [20_000] * 5, patches=2, signal=[30.0] * 5 + [0.1] * 5, noise=1.0
    )
    d = torch.tensor([200.0] * 5 + [20_000.0] * 5)
    lr = 5.0 / torch.maximum(d / 20, problems.signal**2)
    run = train(problems, steps=2000, lr=lr, stop_loss=0.05)
    assert run.stopped.all()
    assert (outputs(problems, run.kappa, run.zeta) * problems.y > 0).all()
    error = evaluate(problems, run.kappa, run.zeta).error
    assert (error[:5] < 1e-3).all()
    assert (error[5:] > 0.45).all()


def test_the_ratio_decides_what_sam_memorizes():
    """At the same ratio SAM memorizes most of what GD does, or next to nothing, for any d."""
    d, n, m = torch.tensor([500.0, 4000.0]).double(), 20, 10
    problems = sample_problems(n, d=d.numpy(), patches=2, signal=2.0, noise=1.0, filters=m)
    init, lr = 0.1 / d.sqrt(), 0.5 * m * n / d
    shares = []
    plain = by_class(train(problems, steps=30, lr=lr).zeta, problems.y)[0].mean(1)
    for u in (0.5, 6.0):
        radius = u * init * (m * n) ** 0.5
        assert memorization_ratio(radius, init, m, n).tolist() == pytest.approx([u, u])
        run = train(problems, steps=30, lr=lr, radius=radius)
        shares.append(by_class(run.zeta, problems.y)[0].mean(1) / plain)
    assert (shares[0] > 0.5).all()
    assert (shares[1] < 0.05).all()
    assert shares[1][1] < shares[1][0]  # what remains falls with d


def test_ascent_memorizes_in_the_opposite_class():
    problem = sample_problems(N, d=[400], patches=2, signal=2.0, noise=1.0, seed=1)
    run = train(problem, steps=200, lr=0.1, forget=FORGET, alpha=0.5)
    own, opposite = by_class(run.zeta[0], problem.y[0])
    assert (own[~FORGET] > 0).all()
    assert (opposite[FORGET] > 0).all()
    assert (own[FORGET] <= 0).all()
    margins = (outputs(problem, run.kappa, run.zeta) * problem.y)[0]
    assert (margins[~FORGET] > 0).all()
    assert (margins[FORGET] < 0).all()


# --- bad input ---------------------------------------------------------------------------------

SAMPLE = {"n": 4, "d": 9, "patches": 2, "signal": 1.0, "noise": 1.0}
PROBLEM = sample_problems(4, d=[9, 9], patches=2, signal=1.0, noise=1.0, filters=2)


@pytest.mark.parametrize("draw", [sample, sample_problems])
@pytest.mark.parametrize("bad", [
    {"n": 0}, {"d": 1}, {"patches": 1}, {"signal": 0.0}, {"noise": -1.0}, {"flip": 1.5},
    {"noise": math.nan}, {"d": 2.5}, {"seed": -1},
])  # fmt: skip
def test_bad_data_are_refused(draw, bad):
    ((name, value),) = bad.items()
    number = str(float(value)) if draw is sample_problems else str(value)
    words = "hold|be"
    with pytest.raises(ValueError, match=rf"^{name} must ({words}) .*; got ({value}|{number})\.$"):
        draw(**(SAMPLE | bad))


def train_problem(**changes):
    return train(PROBLEM, **({"steps": 2, "lr": 0.1} | changes))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: sample(4, d=9, patches=2, signal=torch.zeros(9), noise=1.0),
            "signal must not be the zero vector, which no label can be read from.",
        ),
        (
            lambda: sample(4, d=9, patches=2, signal=torch.ones(8), noise=1.0),
            r"signal must have shape \(9\); got \(8,\)\.",
        ),
        (
            lambda: TwoLayerCNN(9, activation="relo"),
            "activation must be one of relu, squared_relu, softplus; got 'relo'.*",
        ),
        (
            lambda: TwoLayerCNN(9)(torch.zeros(3, 2, 8).double()),
            r"x must have shape \(samples, patches, 9\); got \(3, 2, 8\)\.",
        ),
        (
            lambda: decompose(torch.zeros(2, 3, 8), torch.zeros(2, 3, 9), sample(**SAMPLE)),
            r"net must be a TwoLayerCNN or filters of shape \(\.\.\., 2, filters, 9\); got "
            r"\(2, 3, 8\)\.",
        ),
        (
            lambda: decompose(torch.zeros(2, 3, 9), torch.zeros(2, 4, 9), sample(**SAMPLE)),
            r"net and net0 must have equally many filters, .*; got shapes \(2, 3, 9\) .*",
        ),
        (
            lambda: decompose("net", torch.zeros(2, 4, 9), sample(**SAMPLE)),
            r"net0? must be a TwoLayerCNN or filters of shape .*; got str\.",
        ),
        (
            lambda: compose(torch.zeros(2, 3), torch.zeros(2, 3, 5), torch.zeros(2, 3, 9),
                            sample(**SAMPLE)),
            r"kappa and zeta must have shapes \(\.\.\., 2, 3\) and \(\.\.\., 2, 3, 4\); got .*",
        ),
        (
            lambda: of_network(TwoLayerCNN(8), sample(**SAMPLE)),
            "net0 must have filters of length d = 9; got 8.",
        ),
        (
            lambda: sample_problems(4, d=[9, 9], patches=[2, 2, 2], signal=1.0, noise=1.0),
            r"d, patches, signal, noise, flip must hold numbers and broadcast together; got .*",
        ),
        (
            lambda: outputs(PROBLEM, torch.zeros(1, 2, 2), torch.zeros(1, 2, 2, 4)),
            r"kappa and zeta must have shapes \(\.\.\., 2, 2, 2\) and .*; got .*",
        ),
        (
            lambda: train_problem(lr=0.0),
            "lr must be a finite number above 0, or one for each of 2 cells; got 0.0.",
        ),
        (
            lambda: train_problem(radius=[0.1, 0.1, 0.1]),
            "radius must be a finite number of at least 0, or one for each of 2 cells; got .*",
        ),
        (
            lambda: train_problem(alpha=0.5),
            "alpha must be 1 where there is nothing to forget; got 0.5.",
        ),
        (
            lambda: sample_weights(4, 1, alpha=0.5),
            "alpha must be 1 where there is nothing to forget; got 0.5.",
        ),
        (
            lambda: train_problem(stop_loss=-0.1),
            "stop_loss must be a finite number above 0, or one for each of 2 cells; got -0.1.",
        ),
        (
            lambda: train_problem(forget=torch.ones(4) > 0),
            r"forget must hold 4 booleans, some True and some False; got torch.bool of .* 4 True\.",
        ),
        (
            lambda: train_problem(batch_size=5),
            "batch_size must be a whole number from 1 to 4; got 5.",
        ),
        (
            lambda: train_problem(start=(torch.zeros(1), torch.zeros(1))),
            r"start must hold kappa and zeta of shapes \(2, 2, 2\) and \(2, 2, 2, 4\); got .*",
        ),
        (
            lambda: evaluate(PROBLEM, torch.zeros(2, 2, 2), torch.zeros(2, 2, 2, 4), draws=1),
            "draws must be a whole number of at least 2; got 1.",
        ),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        call()


def test_dependent_noise_is_refused():
    data = sample(**SAMPLE)
    twice = type(data)(
        data.x, data.y, data.true_y, data.flipped, data.signal, data.noise[[0, 0, 1, 2]], 1.0
    )
    with pytest.raises(ValueError, match=r"^noise must hold linearly independent vectors; got .*"):
        decompose(TwoLayerCNN(9), TwoLayerCNN(9), twice)


def test_decompose_and_compose_want_data():
    filters = torch.zeros(2, 1, 9).double()
    with pytest.raises(ValueError, match=r"^data must be what sample returns"):
        decompose(filters, filters, {})
    with pytest.raises(ValueError, match=r"^data must be what sample returns"):
        compose(filters[..., 0], filters, filters, None)
