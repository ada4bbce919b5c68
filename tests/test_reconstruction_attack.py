"""Objectives, splitting and search against autograd, dense matrices and plain descent."""

import math
import resource
import subprocess
import sys
import textwrap
import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flatbook.checkpoints import CheckpointError
from flatbook.reconstruction import (
    NetworkObjective,
    SampleSplitting,
    ShallowObjective,
    TwoLayer,
    attack,
    least_curvatures,
    match,
    reconstruct,
    row_space,
    second_order_point,
    splitting_matrix,
    train_two_layer,
)
from flatbook.reconstruction.objectives import codes

pytestmark = pytest.mark.usefixtures("one_thread")
close = torch.testing.assert_close
few = settings(max_examples=25)
FLAT = math.inf
ONE = torch.ones(1, dtype=torch.float64)
HALVES = torch.full((2,), 0.5, dtype=torch.float64)
grad, hessian = torch.autograd.grad, torch.autograd.functional.hessian


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(d=5, m=7, outputs=1, seed=0):
    return TwoLayer(
        normal(m, d, seed=seed), normal(m, seed=seed + 1), normal(outputs, m, seed=seed + 2)
    )


def candidates(n=4, d=5, outputs=1, seed=0):
    X, multipliers = normal(n, d, seed=seed + 7), normal(n, seed=seed + 8).abs() + 0.1
    return (
        X,
        multipliers,
        torch.arange(n) % 2 * 2 - 1 if outputs == 1 else torch.arange(n) % outputs,
    )


def as_module(weights: TwoLayer) -> nn.Sequential:
    m, d = weights.W.shape
    model = nn.Sequential(nn.Linear(d, m), nn.ReLU(), nn.Linear(m, len(weights.V), bias=False))
    for parameter, value in zip(model.parameters(), weights, strict=True):
        parameter.data = value.clone()
    return model


def mlp(outputs):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, outputs)
    ).double()


def conv(outputs):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 3, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(3, 2, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8, outputs),
    ).double()


class Soft(nn.Module):
    """log(1 + exp(τz)) / τ, written out."""

    def __init__(self, tau):
        super().__init__()
        self.tau = tau

    def forward(self, z):
        return torch.logaddexp(self.tau * z, torch.zeros(()).to(z)) / self.tau


def softened(model, tau):
    layers = [Soft(tau) if isinstance(m, nn.ReLU) and tau < FLAT else m for m in model]
    return nn.Sequential(*layers)


def margin(out, label):
    """The margin of one sample, with the hard maximum over the other classes."""
    if len(out) == 1:
        return label * out[0]
    return out[label] - torch.cat([out[:label], out[label + 1 :]]).max()


def plain_sum(model, X, multipliers, labels):
    """Σ λ ∇θ⟨c, Φ(x)⟩, a sample at a time, as one long differentiable vector."""
    parameters, total = list(model.parameters()), 0
    for x, weight, label in zip(X, multipliers, labels, strict=True):
        parts = grad(margin(model(x[None])[0], label), parameters, create_graph=True)
        total = total + weight * torch.cat([part.flatten() for part in parts])
    return total


def flat(parts):
    return torch.cat([part.detach().flatten() for part in parts])


def plain_loss(model, target, X, multipliers, labels):
    return (target - plain_sum(model, X, multipliers, labels)).square().sum()


def cases(function):
    for name, values in (("tau", [FLAT, 2.0]), ("outputs", [1, 3]), ("known", [False, True])):
        function = pytest.mark.parametrize(name, values)(function)
    return function


def shallow(outputs, known, tau):
    weights, start = network(outputs=outputs), network(outputs=outputs, seed=50)
    target = weights.minus(start) if known else weights
    objective = ShallowObjective(weights, start=start if known else None, sharpness=tau)
    return objective, softened(as_module(weights), tau), flat(target)


# --- the objectives ----------------------------------------------------------------------------


@cases
def test_kernel_form_is_the_squared_distance_and_its_derivatives(outputs, known, tau):
    objective, model, target = shallow(outputs, known, tau)
    X, multipliers, labels = candidates(outputs=outputs)
    X.requires_grad_()
    multipliers.requires_grad_()
    plain = plain_loss(model, target, X, multipliers, labels)
    loss = objective.loss(X, multipliers, labels)
    close(loss, plain, rtol=1e-12, atol=1e-12)
    value, dX, dm = objective.gradients(X.detach(), multipliers.detach(), labels)
    assert value == pytest.approx(float(plain.detach()), rel=1e-12)
    for found in (grad(plain, (X, multipliers)), grad(loss, (X, multipliers))):
        close(found, (dX, dm), rtol=1e-10, atol=1e-10)
    assert dX.norm() > 1
    assert dm.norm() > 1
    close(objective.outputs(X), model(X), rtol=1e-12, atol=1e-12)


@cases
def test_coordinates_of_a_subspace_change_nothing(outputs, known, tau):
    objective, *_ = shallow(outputs, known, tau)
    basis = torch.linalg.qr(normal(5, 3, seed=3)).Q.T
    C, multipliers, labels = candidates(d=3, outputs=outputs)
    inside = objective.within(basis)
    assert inside.inputs == 3
    loss, dC, dm = inside.gradients(C, multipliers, labels)
    full = objective.gradients(C @ basis, multipliers, labels)
    assert loss == pytest.approx(full[0], rel=1e-12)
    close((dC, dm), (full[1] @ basis.T, full[2]), rtol=1e-11, atol=1e-11)
    close(inside.loss(C, multipliers, labels), objective.loss(C @ basis, multipliers, labels))
    S = splitting_matrix(objective, C @ basis, multipliers, labels)
    close(splitting_matrix(inside, C, multipliers, labels), basis @ S @ basis.T)
    other = NetworkObjective(as_module(objective.network), sharpness=tau)
    case = C, multipliers, labels
    if not known:
        close(other.within(basis).gradients(*case), inside.gradients(*case))
        close(splitting_matrix(other.within(basis), *case), basis @ S @ basis.T)


@cases
def test_two_derivatives_give_what_the_kernel_gives(outputs, known, tau):
    objective, *_ = shallow(outputs, known, tau)
    start = None
    if known:
        start = dict(as_module(network(outputs=outputs, seed=50)).named_parameters())
    other = NetworkObjective(as_module(objective.network), start=start, sharpness=tau)
    case = candidates(outputs=outputs)
    assert other.square == pytest.approx(objective.square, rel=1e-14)
    close(other.gradients(*case), objective.gradients(*case), rtol=1e-10, atol=1e-10)
    v = normal(4, 5, seed=4)
    close(other.splitting(*case)(v), objective.splitting(*case)(v), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("build", [mlp, conv])
@cases
def test_any_network_has_the_plain_definition(build, outputs, known, tau):
    model = build(outputs)
    start = {name: p + 0.1 * normal(*p.shape) for name, p in model.named_parameters()}
    target = flat(model.parameters()) - (flat(start.values()) if known else 0)
    objective = NetworkObjective(model, start=start if known else None, sharpness=tau)
    X, multipliers, labels = candidates(d=16 if build is conv else 5, outputs=outputs)
    X.requires_grad_()
    multipliers.requires_grad_()
    plain = plain_loss(softened(model, tau), target, X, multipliers, labels)
    loss, dX, dm = objective.gradients(X, multipliers, labels)
    assert loss == pytest.approx(float(plain.detach()), rel=1e-12)
    close(grad(plain, (X, multipliers)), (dX, dm), rtol=1e-10, atol=1e-10)
    assert [p.grad for p in model.parameters()] == [None] * len(start)
    assert any(isinstance(m, nn.ReLU) for m in model)  # it was copied


def test_relu_modules_are_smoothed_at_every_depth():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(5, 5), nn.ReLU())
            self.act = nn.ReLU()

        def forward(self, x):
            return self.act(self.inner(x) + x).sum(dim=1)  # a number for each sample

    model = Block().double()
    x, one = normal(3, 5), torch.ones(3, dtype=torch.float64)
    smooth = NetworkObjective(model, sharpness=2.0)
    assert not any(isinstance(m, nn.ReLU) for m in smooth.model.modules())
    soft = Soft(2.0)
    inner = soft(model.inner[0](x))
    close(smooth.outputs(x)[:, 0], soft(inner + x).sum(dim=1))
    assert splitting_matrix(smooth, x, one, one).abs().max() > 1e-3


def test_frozen_parameters_are_no_part_of_the_target():
    weights = network()
    model = as_module(weights)
    model[2].weight.requires_grad_(False)
    X, multipliers, labels = candidates()
    found = NetworkObjective(model, sharpness=2.0).loss(X, multipliers, labels)
    total = plain_sum(softened(as_module(weights), 2.0), X, multipliers, labels)
    close(found, (flat(weights) - total)[: 7 * 6].square().sum())


def test_codes_pick_the_margin():
    out = normal(6, 4)
    labels = torch.tensor([0, 1, 2, 3, 0, 1])
    found = (codes(out, labels) * out).sum(dim=1)
    close(found, torch.stack([margin(o, k) for o, k in zip(out, labels, strict=True)]))
    weights = torch.tensor([1.0, -1.0, 0.5])
    close(codes(out[:3, :1], weights), weights.double()[:, None])


def test_the_kernel_is_of_inner_products_of_gradients():
    objective, model, target = shallow(3, True, 2.0)
    X, _, labels = candidates(outputs=3)
    g = torch.stack(
        [plain_sum(model, x[None], ONE, k[None]) for x, k in zip(X, labels, strict=True)]
    )
    close(objective.kernel(X, labels), (g @ g.T, g @ target))


def test_smoothing_goes_to_relu():
    weights, case = network(outputs=3), candidates(outputs=3)
    goal = ShallowObjective(weights, sharpness=FLAT).loss(*case)
    off = [
        float((ShallowObjective(weights, sharpness=t).loss(*case) - goal).abs())
        for t in (3, 30, 3e3)
    ]
    assert off[0] > 10 * off[1] > 100 * off[2]
    assert off[2] < 1e-3 * goal


# --- splitting matrices ------------------------------------------------------------------------


@pytest.mark.parametrize("build", [None, mlp, conv])
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("known", [False, True])
def test_splitting_matrices_are_hessians_along_the_rest(build, outputs, known):
    if build is None:
        objective, model, target = shallow(outputs, known, 2.0)
    else:
        model = build(outputs)
        start = {name: 0.5 * p.detach() for name, p in model.named_parameters()}
        objective = NetworkObjective(model, start=start if known else None, sharpness=2.0)
        target = flat(model.parameters()) * (0.5 if known else 1)
        model = softened(model, 2.0)
    X, multipliers, labels = candidates(n=3, d=16 if build is conv else 5, outputs=outputs)
    rest = (target - plain_sum(model, X, multipliers, labels)).detach()
    S = splitting_matrix(objective, X, multipliers, labels)
    for i in range(3):

        def along(x, i=i):
            return -2 * rest @ plain_sum(model, x[None], multipliers[[i]], labels[[i]])

        close(S[i], hessian(along, X[i]), rtol=1e-9, atol=1e-9)
    assert S.abs().max() > 0.01
    v = normal(*X.shape, seed=9)
    close(objective.splitting(X, multipliers, labels)(v), torch.einsum("nij,nj->ni", S, v))


def decomposed(outputs, tau, seed, n=3, d=3, m=4):
    """A random problem: its Hessian in all candidates, the Jacobian's part and the matrices."""
    weights = network(d=d, m=m, outputs=outputs, seed=seed)
    objective = ShallowObjective(weights, sharpness=tau)
    X, multipliers, labels = candidates(n=n, d=d, outputs=outputs, seed=seed)

    def flattened(x):
        return objective.loss(x.reshape(n, d), multipliers, labels)

    def summed(x):
        return plain_sum(softened(as_module(weights), tau), x.reshape(n, d), multipliers, labels)

    H = hessian(flattened, X.flatten())
    J = torch.autograd.functional.jacobian(summed, X.flatten())
    return H, J, splitting_matrix(objective, X, multipliers, labels)


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_hessian_is_a_gram_matrix_and_the_blocks(outputs):
    H, J, S = decomposed(outputs, 2.0, seed=1)
    close(H, 2 * J.T @ J + torch.block_diag(*S), rtol=1e-10, atol=1e-10)


@given(st.integers(0, 2**31), st.sampled_from([1, 3]), st.floats(0.5, 20))
@few
def test_the_hessian_is_bounded_by_the_least_block(seed, outputs, tau):
    torch.set_num_threads(1)
    H, _, S = decomposed(outputs, tau, seed)
    least = float(torch.linalg.eigvalsh(S).min())
    assert float(torch.linalg.eigvalsh(H)[0]) >= least - 1e-9 * float(H.abs().max())


def descending(seed=0, tau=2.0):
    """Two candidates of which the first wants to split, and its least eigenpair."""
    objective = ShallowObjective(network(seed=seed), sharpness=tau)
    X, multipliers, labels = candidates(n=2, seed=seed)
    values, vectors = torch.linalg.eigh(splitting_matrix(objective, X, multipliers, labels)[0])
    assert values[0] < -0.1
    return objective, X, multipliers, labels, float(values[0]), vectors[:, 0]


def divided(problem, steps, shares):
    """The loss after the first candidate has become several, of unequal weights."""
    objective, X, multipliers, labels, *_ = problem
    after = torch.cat([X[:1] + steps, X[1:]])
    weights = torch.cat([multipliers[0] * shares, multipliers[1:]])
    first = labels[:1].expand(len(steps))
    return float(objective.loss(after, weights, torch.cat([first, labels[1:]])))


def test_a_split_changes_the_loss_by_half_the_curvature():
    problem = descending()
    least, v = problem[-2:]
    whole = divided(problem, torch.zeros(1, 5), ONE)
    off = {}
    for step in (1e-3, 1e-2):
        change = divided(problem, step * torch.stack([v, -v]), HALVES) - whole
        off[step] = abs(change / (0.5 * step**2 * least) - 1)
    assert off[1e-3] < 1e-5
    assert 50 < off[1e-2] / off[1e-3] < 200
    # The formula along any direction, with the product alone
    u = normal(1, 5, seed=5)[0]
    objective, X, multipliers, labels, *_ = problem
    bend = float(objective.splitting(X, multipliers, labels)(torch.stack([u, 0 * u]))[0] @ u)
    change = divided(problem, 1e-3 * torch.stack([u, -u]), HALVES) - whole
    assert change == pytest.approx(0.5e-6 * bend, rel=1e-4)


@pytest.mark.parametrize("seed", [0, 2])
def test_no_split_does_better_than_the_least_eigenvector(seed):
    problem = descending(seed)
    least, v = problem[-2:]
    whole, step = divided(problem, torch.zeros(1, 5), ONE), 1e-3

    def second_order(directions, shares):
        """What is left of the change over η² when the part of first order is cancelled."""
        both = sum(divided(problem, s * step * directions, shares) - whole for s in (1, -1))
        return both / (2 * step**2)

    best = second_order(torch.stack([v, -v]), HALVES)
    assert best == pytest.approx(0.5 * least, rel=1e-4)
    random = torch.Generator().manual_seed(seed)
    found = []
    for trial in range(400):
        pieces = 2 + trial % 2
        shares = torch.rand(pieces, generator=random, dtype=torch.float64)
        directions = torch.randn(pieces, 5, generator=random, dtype=torch.float64)
        if trial % 4 == 0:  # two ways along one line, equal or not
            directions[1] = -directions[0]
        if trial % 8 < 4:  # near the best
            directions = 0.3 * directions + v * directions.sign()[:, :1]
        directions = directions / directions.norm(dim=1, keepdim=True)
        found.append(second_order(directions, shares / shares.sum()))
    assert min(found) >= best - 1e-4 * abs(best)
    assert min(found) < 0.5 * best  # the search came near


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("known", [False, True])
def test_plain_relu_never_splits(outputs, known):
    objective, _, _ = shallow(outputs, known, FLAT)
    X, multipliers, labels = candidates(outputs=outputs)
    for each in (objective, NetworkObjective(mlp(outputs), sharpness=FLAT)):
        assert torch.count_nonzero(splitting_matrix(each, X, multipliers, labels)) == 0
        eager = SampleSplitting(threshold=-1e-300, share=1.0)
        assert len(eager.split(each, X, multipliers, labels).X) == 4
    found = reconstruct(
        objective, labels, inputs=5, steps=30, splitting=replace(eager, every=10), spread=1.0
    )
    assert [(e.before, e.after, e.curvature) for e in found.events] == [(4, 4, 0.0)] * 2


# --- Lanczos -----------------------------------------------------------------------------------


class Dense:
    """An objective of which only the splitting matrices are known."""

    def __init__(self, S):
        self.S = S

    def splitting(self, X, multipliers, labels):
        return lambda v: torch.einsum("nij,nj->ni", self.S, v)


def spectrum(*rows, seed=0):
    values = torch.tensor(rows, dtype=torch.float64)
    Q = torch.linalg.qr(normal(*values.shape, values.shape[1], seed=seed)).Q
    return Q @ torch.diag_embed(values) @ Q.mT


def least(S, **options):
    n, d, _ = S.shape
    ones = torch.ones(n, dtype=S.dtype)
    return least_curvatures(Dense(S), torch.zeros(n, d, dtype=S.dtype), ones, ones, **options)


SPECTRA = {
    "distinct": [[-2.0, -1, 0, 3, 5, 7], [1.0, 2, 3, 4, 5, 6]],
    "deficient": [[0.0, 0, 0, 0, 3, 5], [-4.0, 0, 0, 0, 0, 0]],
    "zero": [[0.0] * 6, [-1.0, 0, 1, 2, 3, 4]],
    "repeated": [[-1.0] * 3 + [2.0] * 3, [2.0] * 6],
    "scales": [[-3e-12, 1e-12, 2e-12, 3e-12, 4e-12, 5e-12], [-1e9, 1, 2, 3, 4, 1e12]],
}


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_as_many_steps_as_inputs_are_exact(name, dtype):
    S = spectrum(*SPECTRA[name])
    found = least(S.to(dtype), steps=50)
    values, eps = torch.tensor(SPECTRA[name], dtype=torch.float64), torch.finfo(dtype).eps
    size = values.abs().amax(dim=1).clamp(min=1e-300)
    assert ((found.values.double() - values[:, 0]).abs() <= 1e3 * eps * size).all()
    v = found.directions.double()
    close(v.norm(dim=1), torch.ones(2).double(), rtol=0, atol=100 * eps)
    rest = torch.einsum("nij,nj->ni", S, v) - values[:, :1] * v
    assert (rest.norm(dim=1) <= 5e3 * eps * size).all()
    assert (found.errors.double() <= 5e3 * eps * size).all()


def test_fewer_steps_come_from_above_and_know_how_far_they_are_off():
    S = torch.stack([normal(40, 40, seed=s) for s in range(4)])
    S = S + S.mT
    exact = torch.linalg.eigvalsh(S)[:, 0]
    before = torch.full((4,), math.inf).double()
    for steps in (1, 5, 10, 20, 30):
        found = least(S, steps=steps, seed=1)
        assert (found.values <= before + 1e-12).all()
        assert (found.values >= exact - 1e-12).all()
        rest = torch.einsum("nij,nj->ni", S, found.directions)
        rest = (rest - found.values[:, None] * found.directions).norm(dim=1)
        close(found.errors, rest, rtol=1e-8, atol=1e-12)
        near = (torch.linalg.eigvalsh(S) - found.values[:, None]).abs().amin(dim=1)
        assert (near <= found.errors + 1e-12).all()
        before = found.values
    assert (found.values - exact < 1e-3 * exact.abs()).all()
    assert torch.equal(least(S, steps=5, seed=1).values, least(S, steps=5, seed=1).values)


@pytest.mark.parametrize("outputs", [1, 3])
def test_lanczos_finds_the_least_eigenpairs_of_an_objective(outputs):
    objective, *_ = shallow(outputs, True, 2.0)
    case = candidates(n=6, outputs=outputs)
    values, vectors = torch.linalg.eigh(splitting_matrix(objective, *case))
    found = least_curvatures(objective, *case)
    close(found.values, values[:, 0], rtol=1e-9, atol=1e-12)
    close((found.directions * vectors[:, :, 0]).sum(dim=1).abs(), torch.ones(6).double())
    model = NetworkObjective(as_module(objective.network), sharpness=2.0)
    close(
        least_curvatures(model, *case).values,
        torch.linalg.eigvalsh(splitting_matrix(model, *case))[:, 0],
    )


def test_no_matrix_is_ever_formed():
    d = 20_000  # one matrix would take 3.2 GB
    W = normal(20, d) / math.sqrt(d)
    objective = ShallowObjective(TwoLayer(W, normal(20), normal(1, 20)), sharpness=3.0)
    X, labels = normal(3, d), torch.tensor([1, -1, 1])
    case = X, torch.ones(3).double(), labels
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = least_curvatures(objective, *case)
    SampleSplitting(threshold=-1e-6).split(objective, *case)
    risen = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert risen * (1 if sys.platform == "darwin" else 1024) < 300e6
    # The matrices live in the span of the rows of W and of the other candidates
    basis = torch.linalg.qr(torch.cat([W, X]).T).Q.T
    inside = splitting_matrix(objective.within(basis), X @ basis.T, *case[1:])
    close(found.values, torch.linalg.eigvalsh(inside)[:, 0], rtol=1e-6, atol=1e-9)
    with pytest.raises(ValueError, match=r"X must .*; got 3 of 20000 by 20000\.$"):
        splitting_matrix(objective, *case)


# --- the rule ----------------------------------------------------------------------------------

CURVES = [-0.5, 0.3, -2.0, -0.05, -1.0, 0.0]


def split(**options):
    rule = SampleSplitting(**({"threshold": -0.1, "share": 1.0} | options))
    S = torch.stack([value * torch.eye(4).double() for value in CURVES])
    S[:, 1, 1] += 5  # the least eigenvalue has vectors that avoid the second axis
    multipliers = torch.tensor([1.0, -2, 3, 4, 5, 6]).double()
    X = normal(6, 4)
    return X, multipliers, rule, rule.split(Dense(S), X, multipliers, torch.arange(6), seed=3)


@pytest.mark.parametrize(
    ("options", "parents"),
    [
        ({}, [2, 4, 0]),
        ({"threshold": -0.01}, [2, 4, 0, 3]),
        ({"threshold": -3.0}, []),
        ({"share": 0.34}, [2, 4]),
        ({"share": 0.1}, []),
        ({"most": 7}, [2]),
        ({"most": 3}, []),
        ({"most": 100, "share": 0.5}, [2, 4, 0]),
    ],
)
@pytest.mark.parametrize("direction", ["eigenvector", "random", "fresh"])
def test_the_rule_splits_the_worst_it_may(options, parents, direction):
    X, multipliers, rule, found = split(**options, direction=direction)
    assert found.parents.tolist() == [*range(6), *parents]
    assert found.labels.tolist() == [*range(6), *parents]
    close(found.curvatures, torch.tensor(sorted(CURVES)).double())
    stayed = [i for i in range(6) if i not in parents]
    assert torch.equal(found.X[stayed], X[stayed])
    assert torch.equal(found.multipliers[stayed], multipliers[stayed])
    new = found.X[6:]
    if direction == "fresh":
        assert torch.equal(found.X[:6], X)
        assert torch.equal(found.multipliers[:6], multipliers)
        assert (new.abs() < 0.05).all()
        assert (new != 0).all()
        return
    totals = torch.zeros(6).double().index_add_(0, found.parents, found.multipliers)
    assert torch.equal(totals, multipliers)
    assert torch.equal(found.multipliers[6:], multipliers[parents] / 2)
    close((found.X[parents] + new) / 2, X[parents])
    apart = found.X[parents] - new
    close(apart.norm(dim=1), torch.full((len(parents),), 2 * rule.step).double())
    if direction == "eigenvector":
        assert (apart[:, 1].abs() < 1e-10).all()
    else:
        assert (apart[:, 1].abs() > 1e-5).all()


def test_random_directions_are_those_of_their_seed():
    S = Dense(-torch.eye(4).double().expand(3, 4, 4))
    case = torch.zeros(3, 4).double(), torch.ones(3).double(), torch.ones(3)
    for direction in ("random", "fresh", "eigenvector"):
        rule = SampleSplitting(direction=direction, share=1.0)
        one, same, other = (rule.split(S, *case, seed=s).X for s in (0, 0, 1))
        assert torch.equal(one, same)
        assert not torch.equal(one, other)
    wide = SampleSplitting(direction="fresh", share=1.0).split(S, *case, spread=100.0)
    assert wide.X[3:].abs().max() > 10


# --- second-order points -----------------------------------------------------------------------


def mirrored(n=1):
    """Two samples ±a, and candidates at 0, where by symmetry the gradient is 0.

    The network is the same at x and −x, so the distance of the target is too.
    """
    half = normal(5, 3, seed=2)
    bias, V = normal(5, seed=3), normal(1, 5, seed=4)
    net = TwoLayer(torch.cat([half, -half]), bias.repeat(2), V.repeat(1, 2))
    samples = normal(1, 3, seed=6)
    samples = torch.cat([samples, -samples])
    ones = torch.ones(2).double()
    smooth = ShallowObjective(net, sharpness=2.0)
    goal = plain_sum(softened(as_module(net), 2.0), samples, ones, ones).detach()
    start = torch.cat([part.flatten() for part in net]) - goal
    parts = start.split([p.numel() for p in net])
    start = TwoLayer(*(p.reshape(q.shape) for p, q in zip(parts, net, strict=True)))
    objective = ShallowObjective(net, start=start, sharpness=2.0)
    assert objective.loss(samples, ones, ones) < 1e-20 < smooth.loss(samples, ones, ones)
    return objective, samples, torch.zeros(n, 3).double(), torch.full((n,), 2.0 / n).double()


@pytest.mark.parametrize("n", [1, 2])
def test_splits_lead_out_of_a_saddle(n):
    objective, samples, X, multipliers = mirrored(n)
    loss, slope, _ = objective.gradients(X, multipliers, torch.ones(n))
    assert slope.norm() < 1e-12
    assert loss > 1
    constants = {"epsilon": 1e-2, "smoothness": 200.0, "hessian_lipschitz": 100.0}
    found = second_order_point(objective, X, multipliers, torch.ones(n), **constants)
    bound = -math.sqrt(100 * 1e-2)
    assert found.reached
    assert found.splits >= 1
    assert found.steps == len(found.losses) - 1 - found.splits
    assert found.gradient <= 1e-2
    assert found.curvature >= bound
    where = found.X, found.multipliers, found.labels
    value, slope, _ = objective.gradients(*where)
    assert float(slope.norm()) == found.gradient
    assert value == found.losses[-1]
    blocks = torch.linalg.eigvalsh(splitting_matrix(objective, *where))
    assert float(blocks.min()) == pytest.approx(found.curvature, abs=1e-8)
    flattened = lambda x: objective.loss(x.reshape(-1, 3), *where[1:])  # noqa: E731
    H = hessian(flattened, found.X.flatten())
    assert float(torch.linalg.eigvalsh(H)[0]) >= bound
    assert (found.losses.diff() <= 1e-12).all()
    assert found.losses[-1] < 1e-3 * loss
    assert float(found.multipliers.sum()) == pytest.approx(2.0)
    assert torch.cdist(found.X, samples).amin(dim=1).max() < (1e-3 if n == 1 else 0.6)


def test_descent_alone_reaches_a_point_that_does_not_want_to_split():
    objective, samples, *_ = mirrored()
    start, ones = samples + 0.01 * normal(2, 3), torch.ones(2).double()
    constants = {"epsilon": 1e-2, "smoothness": 200.0, "hessian_lipschitz": 100.0}
    found = second_order_point(objective, start, ones, ones, **constants)
    assert found.reached
    assert found.splits == 0
    assert len(found.X) == 2
    short = second_order_point(objective, start + 0.3, ones, ones, **constants, max_steps=3)
    assert not short.reached
    assert short.steps == 3
    assert len(short.losses) == 4


def test_constants_that_are_too_small_are_noticed():
    objective, samples, X, multipliers = mirrored(2)
    ones = torch.ones(2)
    constants = {"epsilon": 1e-4, "smoothness": 200.0, "hessian_lipschitz": 100.0}
    with pytest.raises(ValueError, match=r"^smoothness must be a bound .* with 0.1 a step raised"):
        second_order_point(
            objective, samples + 0.3, multipliers, ones, **constants | {"smoothness": 0.1}
        )
    with pytest.raises(ValueError, match=r"^hessian_lipschitz must .* with 1e-05 a split raised"):
        second_order_point(
            objective, X, multipliers, ones, **constants | {"hessian_lipschitz": 1e-5}
        )


# --- training ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 9), (9, 4)])
@pytest.mark.parametrize("kind", ["binary", "classes", "squared"])
@pytest.mark.parametrize("boost", [1.0, 4.0])
def test_training_is_plain_gradient_descent(kind, shape, boost):
    X = normal(*shape)
    n = len(X)
    y = torch.arange(n) % 3 if kind == "classes" else torch.arange(n) % 2 * 2 - 1
    X[-1] = X[0] - X[1]  # more samples than their span has dimensions
    decay, rate, steps = 0.03, 0.1 if boost == 1 and kind != "squared" else 0.02, 60
    loss = "squared" if kind == "squared" else "logistic"
    options = {"width": 12, "init": 0.3, "lr": rate, "weight_decay": decay, "boost": boost}
    run = train_two_layer(X, y, steps=steps, loss=loss, **options)
    model = as_module(run.start)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, weight_decay=decay)
    losses = []
    for _ in range(steps):
        out = model(X)
        if kind == "classes":
            value = nn.functional.cross_entropy(out, y)
        elif kind == "squared":
            value = (out[:, 0] - y).square().mean()
        else:
            value = nn.functional.softplus(-y * out[:, 0]).mean()
        optimizer.zero_grad()
        value.backward()
        losses.append(float(value.detach()))
        optimizer.param_groups[0]["lr"] = rate * (min(boost, 1 / losses[-1]) if boost > 1 else 1)
        optimizer.step()
    close(tuple(run.network), tuple(p.data for p in model.parameters()), rtol=1e-10, atol=1e-10)
    close(run.losses, torch.tensor(losses, dtype=torch.float64), rtol=1e-10, atol=0)
    assert losses[-1] < 0.95 * losses[0]
    out = model(X).detach()
    margins = torch.stack([margin(o, int(k)) for o, k in zip(out, y, strict=True)])
    close(run.margins, margins, rtol=1e-9, atol=1e-10)


def test_the_start_is_as_said():
    X, y = normal(4, 30), torch.tensor([1, -1, 1, -1])
    run = train_two_layer(X, y, width=400, init=0.2, head=3.0, steps=1, seed=5)
    assert float(run.start.W.std()) == pytest.approx(0.2, rel=0.03)
    assert float(run.start.bias.std()) == pytest.approx(0.2, rel=0.15)
    assert 0.9 < float(run.start.V.abs().max()) / (3.0 / 20) <= 1
    again, other = (train_two_layer(X, y, width=400, steps=1, seed=s).start for s in (5, 6))
    assert not torch.equal(again.V, other.V)
    same = train_two_layer(X.float(), y, width=400, init=0.2, head=3.0, steps=1, seed=5)
    close(same.start.W, run.start.W.float())
    assert same.network.W.dtype == torch.float32


def test_the_rows_of_a_trained_layer_show_the_span_of_the_samples():
    X, y = normal(4, 60), torch.tensor([1, -1, 1, -1])
    run = train_two_layer(X, y, width=100, init=1e-3, lr=0.01, steps=2000)
    basis = row_space(run.network.W)
    close(basis @ basis.T, torch.eye(len(basis)).double())
    assert len(basis) == 4
    assert (X - X @ basis.T @ basis).norm() < 0.02 * X.norm()
    assert len(row_space(run.start.W)) == 1  # nothing but noise, of which one is always kept
    with pytest.raises(ValueError, match="W must have shape"):
        row_space(normal(3))


# --- the search --------------------------------------------------------------------------------


def simplex(n, d, size, seed=0):
    """Samples whose sum is 0, at equal angles: no neuron is at its kink on any."""
    X = torch.linalg.qr(normal(d, n, seed=seed)).Q.T
    X = X - X.mean(dim=0)
    return size * X / X.norm(dim=1, keepdim=True)


def test_samples_are_found_in_a_trained_network():
    X, y = simplex(4, 30, 4.0), torch.tensor([1, -1, 1, -1])
    run = train_two_layer(X, y, width=400, lr=0.0125, steps=3000, boost=1e3)
    objective = ShallowObjective(run.network, sharpness=20.0)
    options = {"steps": 1000, "spread": 0.3, "range_weight": 0.0, "seed": 1}
    found = reconstruct(objective, y, inputs=30, **options)
    assert (match(found.X, X, one_to_one=True).score > 0.99).all()
    assert (
        match(found.X, X, one_to_one=True).guess.remainder(2) == torch.tensor([0, 1, 0, 1])
    ).all()
    assert match(found.X, simplex(4, 30, 4.0, seed=1)).score.max() < 0.7
    assert found.residual < 0.1 < 0.9 < math.sqrt(float(found.losses[0]))
    # Where they are searched for in the span of the weights, they are the same
    basis = torch.linalg.svd(run.network.W, full_matrices=False).Vh[:4]
    inside = reconstruct(objective, y, inputs=30, basis=basis, **options)
    assert (match(inside.X, X).score > 0.99).all()
    close(inside.X @ basis.T @ basis, inside.X)


def test_knowing_the_start_helps_and_a_wrong_one_does_not():
    n, d = 3, 100
    X = normal(n, d)
    X = X / X.norm(dim=1, keepdim=True)
    y = torch.arange(n) % 2 * 2 - 1
    options = {"width": 3000, "init": 0.2, "lr": 0.02}
    run = train_two_layer(X, y, steps=200, **options)
    wrong = train_two_layer(X, y, steps=1, seed=9, **options).start

    def attacked(start):
        objective = ShallowObjective(run.network, start=start)
        ones = torch.ones(2 * n)
        found = reconstruct(objective, ones, inputs=d, steps=800, least=None, seed=1)
        return match(found.X, X).score, found

    score, found = attacked(run.start)
    assert score.min() > 0.99
    assert found.multipliers.min() < 0 < found.multipliers.max()
    score, found = attacked(wrong)
    assert score.max() < 0.75
    assert score.median() < 0.55
    assert found.residual > 0.9


def problem(**options):
    weights = network(d=6, m=20)
    defaults = {
        "objective": ShallowObjective(weights, sharpness=3.0),
        "labels": torch.tensor([1, -1, 1]),
        "inputs": 6,
        "steps": 1300,
        "spread": 0.5,
        "splitting": SampleSplitting(every=300, threshold=-1e-3, step=0.05, most=8),
    }
    return defaults | options


def same(one, other):
    for mine, theirs in zip(one, other, strict=True):
        if isinstance(mine, torch.Tensor):
            assert torch.equal(mine, theirs)
        else:
            assert mine == theirs


@pytest.mark.parametrize("direction", ["eigenvector", "random", "fresh"])
def test_a_killed_search_carries_on_to_the_same_bits(tmp_path, monkeypatch, direction):
    case = problem()
    case["splitting"] = replace(case["splitting"], direction=direction)
    whole = reconstruct(**case)
    assert len(whole.X) > 3
    assert len(whole.events) == 3
    path, advance = tmp_path / "state.pt", attack._Search.advance

    def killed(search):
        if search.step == 1150:
            raise KeyboardInterrupt
        advance(search)

    monkeypatch.setattr(attack._Search, "advance", killed)
    with pytest.raises(KeyboardInterrupt):
        reconstruct(**case, checkpoint=path)
    steps = []
    monkeypatch.setattr(
        attack._Search, "advance", lambda search: (steps.append(search.step), advance(search))
    )
    same(whole, reconstruct(**case, checkpoint=path))
    assert steps[0] == 1000
    assert not path.exists()


def test_a_search_survives_a_signal(tmp_path):
    path, steps = tmp_path / "state.pt", 4000
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import torch
        torch.set_num_threads(1)
        from test_reconstruction_attack import problem, reconstruct
        reconstruct(**problem(steps=int(sys.argv[2])), checkpoint=sys.argv[3])
    """
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", textwrap.dedent(code), here, str(steps), str(path)]
    process = subprocess.Popen(command)
    while not path.exists() and process.poll() is None:
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert path.exists()
    whole = reconstruct(**problem(steps=steps))
    same(whole, reconstruct(**problem(steps=steps), checkpoint=path))


def test_a_checkpoint_is_for_its_own_run_only(tmp_path, monkeypatch):
    path, advance = tmp_path / "state.pt", attack._Search.advance

    def killed(search):
        if search.step == 1000:
            raise KeyboardInterrupt
        advance(search)

    turned = torch.linalg.qr(normal(6, 6)).Q
    case = problem(basis=turned[:4])
    monkeypatch.setattr(attack._Search, "advance", killed)
    with pytest.raises(KeyboardInterrupt):
        reconstruct(**case, checkpoint=path)
    kept = path.read_bytes()
    for other, what in [
        ({"lr": 0.1}, r"lr=0\.02, not 0\.1"),
        ({"labels": torch.tensor([1, 1, 1])}, "labels="),
        ({"objective": ShallowObjective(network(d=6, m=20), sharpness=4.0)}, "sharpness=3"),
        ({"objective": ShallowObjective(network(d=6, m=20, seed=1), sharpness=3.0)}, "target="),
        ({"basis": turned[1:5]}, "another basis"),
        ({"basis": None}, "another basis"),
        ({"splitting": None}, "another splitting"),
        ({"seed": 1}, "seed=0, not 1"),
    ]:
        with pytest.raises(CheckpointError, match=f"is of a run with {what}"):
            reconstruct(**case | other, checkpoint=path)
        assert path.read_bytes() == kept
    spoilt = bytearray(kept)
    spoilt[len(spoilt) // 2] ^= 1
    for damaged in (kept[:-100], b"", b"none", bytes(spoilt)):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"state\.pt is damaged"):
            reconstruct(**case, checkpoint=path)


def test_a_search_stops_when_it_has_settled():
    case = problem(splitting=None, steps=3000)
    long, short = (reconstruct(**case, settled=share) for share in (0.0, 0.01))
    assert long.steps == 3000
    assert len(long.losses) == 31
    assert 500 < short.steps < 3000
    assert len(short.losses) == (short.steps - 1) // 100 + 2
    assert short.losses[-1] < 1.05 * long.losses[-1] + 1e-3
    close(short.losses[:-1], long.losses[: len(short.losses) - 1])
    waits = SampleSplitting(every=10_000, until=0.9)
    assert reconstruct(**case | {"splitting": waits}, settled=0.01).steps >= 2700


def test_losses_are_relative_and_penalties_are_kept():
    weights = network(d=6, m=20)
    objective = ShallowObjective(weights, sharpness=3.0)
    labels = torch.tensor([1, -1, 1])
    free = reconstruct(objective, labels, inputs=6, steps=600, range_weight=0.0, spread=0.5)
    tight = reconstruct(objective, labels, inputs=6, steps=600, range_weight=100.0, spread=0.5)
    assert free.X.abs().max() > 1.2
    assert tight.X.abs().max() < 1.1
    for found in (free, tight):
        loss = objective.loss(found.X, found.multipliers, labels) / weights.size() ** 2
        assert float(found.losses[-1]) == pytest.approx(float(loss), rel=1e-12)
        assert found.residual == pytest.approx(math.sqrt(float(loss)))


@pytest.mark.parametrize("dimensions", [None, 4])
def test_a_step_is_one_of_adam_on_the_whole_objective(dimensions):
    objective, labels = ShallowObjective(network(d=6), sharpness=3.0), torch.tensor([1, -1, 1])
    basis = None if dimensions is None else torch.linalg.qr(normal(6, dimensions)).Q.T
    frame = torch.eye(6, dtype=torch.float64) if basis is None else basis
    C = 2.0 * normal(3, len(frame))
    multipliers = torch.full((3,), 0.1, dtype=torch.float64).requires_grad_()
    C.requires_grad_()
    adam = torch.optim.Adam([{"params": [C], "lr": 0.02}, {"params": [multipliers], "lr": 0.002}])
    fade = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 3)
    for _ in range(3):
        adam.zero_grad()
        X = C @ frame
        beyond = (X - 1).clamp(min=0).square().sum() + (-1 - X).clamp(min=0).square().sum()
        short = (0.3 - multipliers).clamp(min=0).square().sum()
        (objective.loss(X, multipliers, labels) + 2 * beyond + 5 * short).backward()
        adam.step()
        fade.step()
    options = {"spread": 2.0, "first": 0.1, "least": 0.3, "range_weight": 2.0, "steps": 3}
    found = reconstruct(objective, labels, inputs=6, basis=basis, **options)
    here = ((C @ frame).detach(), multipliers.detach())
    close((found.X, found.multipliers), here, rtol=1e-10, atol=1e-12)


def test_halves_keep_the_momentum_of_their_parents(monkeypatch):
    seen, split = [], attack._Search._split

    def watched(search):
        before = deepcopy(search._moments())
        split(search)
        seen.append((before, deepcopy(search._moments()), len(search.X)))

    monkeypatch.setattr(attack._Search, "_split", watched)
    reconstruct(**problem(steps=400))
    ((before, after, count),) = seen
    assert count > 3
    for ndim in (1, 2):
        assert after[ndim]["step"] == before[ndim]["step"] == 300
        for key in ("exp_avg", "exp_avg_sq"):
            mine, old = after[ndim][key], before[ndim][key]
            assert torch.equal(mine[:3], old)
            assert all((row == old).reshape(3, -1).all(dim=1).any() for row in mine[3:])
            assert mine.abs().max() > 0


@pytest.mark.parametrize("kind", ["shallow", "network"])
def test_single_precision_works(kind):
    weights = network(d=6, m=20)
    single = TwoLayer(*(part.float() for part in weights))
    if kind == "shallow":
        objective, full = (ShallowObjective(w, sharpness=3.0) for w in (single, weights))
    else:
        pair = (as_module(weights).float(), as_module(weights))
        objective, full = (NetworkObjective(m, sharpness=3.0) for m in pair)
    rule = SampleSplitting(every=50, threshold=-1e-3, step=0.05, most=6)
    case = problem(steps=200, splitting=rule, basis=torch.eye(6) if kind == "shallow" else None)
    found, exact = (reconstruct(**case | {"objective": o}) for o in (objective, full))
    assert found.X.dtype == found.multipliers.dtype == torch.float32
    assert exact.X.dtype == torch.float64
    assert len(found.X) == len(exact.X) == 6
    close(found.losses, exact.losses, rtol=0.02, atol=1e-4)


def test_several_classes_and_networks_are_searched_too():
    objective = NetworkObjective(mlp(3), sharpness=3.0)
    labels = torch.tensor([0, 1, 2, 0])
    rule = SampleSplitting(every=100, threshold=-1e-4)
    found = reconstruct(objective, labels, inputs=5, steps=300, spread=0.5, splitting=rule)
    assert found.losses[-1] < 0.9 * found.losses[0]
    assert len(found.events) == 2
    assert set(found.labels.tolist()) == {0, 1, 2}
    assert len(found.X) > 4
    assert reconstruct(objective, labels, inputs=5, steps=20, settled=0.5).steps == 20


# --- refusals ----------------------------------------------------------------------------------

one, pair = torch.ones(2).double(), torch.tensor([1, -1])
classes = ShallowObjective(network(outputs=3))
single = ShallowObjective(network())
REFUSED = [
    (lambda: ShallowObjective("weights"), "network must be what train_two_layer returns"),
    (lambda: ShallowObjective(network()._replace(V=one[None])), r"network.V must have shape"),
    (lambda: ShallowObjective(network()._replace(bias=normal(7) / 0)), "network.bias must be fin"),
    (lambda: ShallowObjective(network(), start=network(m=8)), r"start.W must have shape \(7, 5\)"),
    (lambda: ShallowObjective(network(), start=network(outputs=3)), "start.V must have shape"),
    (lambda: ShallowObjective(network(), sharpness=-1), "sharpness must be a finite number above"),
    (
        lambda: ShallowObjective(network(), sharpness=math.nan),
        "sharpness must be a finite number above 0; got nan",
    ),
    (lambda: single.within(torch.ones(2, 5)), "basis must have orthonormal rows"),
    (lambda: single.within(torch.eye(4)), r"basis must have shape \(dimensions, 5\)"),
    (lambda: NetworkObjective("model"), "model must be a torch module"),
    (lambda: NetworkObjective(nn.ReLU()), "model must have parameters that require"),
    (lambda: NetworkObjective(mlp(1), start=[1]), "start must map every parameter.*; got list"),
    (lambda: NetworkObjective(mlp(1), start={}), r"start must map .*; got no 0\.bias"),
    (
        lambda: NetworkObjective(nn.Linear(1, 1), start={"weight": one, "bias": one}),
        r"start\['weight'\] must have shape \(1, 1\)",
    ),
    (lambda: splitting_matrix("objective", one[None], one[:1], one[:1]), "objective must be a"),
    (lambda: splitting_matrix(single, normal(2, 4), one, pair), r"X must have shape \(cand.*, 5\)"),
    (lambda: least_curvatures(single, normal(2, 5), one[:1], pair), "multipliers must have shape"),
    (lambda: least_curvatures(single, normal(2, 5), one, pair[:1]), "labels must have shape"),
    (lambda: least_curvatures(single, normal(2, 5), one, one / 0), "labels must be finite"),
    (lambda: least_curvatures(single, normal(2, 5), one, pair, steps=0), "steps must be a whole"),
    (lambda: least_curvatures(classes, normal(2, 5), one, pair), r"labels must lie in 0\.\.2"),
    (lambda: least_curvatures(classes, normal(2, 5), one, one), "labels must hold whole numbers"),
    (lambda: SampleSplitting(every=0), "every must be a whole number"),
    (lambda: SampleSplitting(until=1.5), "until must be a number in"),
    (lambda: SampleSplitting(threshold=math.nan), "threshold must be a finite number"),
    (lambda: SampleSplitting(step=-1), "step must be a finite number above 0"),
    (lambda: SampleSplitting(share=2), "share must be a number in"),
    (lambda: SampleSplitting(most=0), "most must be a whole number"),
    (lambda: SampleSplitting(direction="up"), "direction must be one of eigenvector, random, fre"),
    (lambda: SampleSplitting(lanczos=1.5), "lanczos must be a whole number"),
    (
        lambda: second_order_point(
            single, normal(2, 5), one, pair, epsilon=0, smoothness=1, hessian_lipschitz=1
        ),
        "epsilon must be a finite number above 0",
    ),
    (lambda: train_two_layer(normal(2, 5), torch.tensor([1, 2, 0])), r"y must have shape \(2\)"),
    (lambda: train_two_layer(normal(2, 5) / 0, pair), "X must be finite"),
    (lambda: train_two_layer(normal(2, 5), one / 2), "y must hold -1 and 1, or classes; got 0.5"),
    (lambda: train_two_layer(normal(2, 5), 0 * pair), "y must hold .*; got classes up to 0"),
    (lambda: train_two_layer(normal(2, 5), pair.clamp(0), loss="squared"), "y must hold -1 and 1"),
    (lambda: train_two_layer(normal(2, 5), pair, lr=-1), "lr must be a finite number above 0"),
    (lambda: train_two_layer(normal(2, 5), pair, boost=0.5), "boost must be at least 1; got 0.5"),
    (lambda: train_two_layer(normal(2, 5), pair, loss="hinge"), "loss must be one of logistic"),
    (lambda: train_two_layer(normal(2, 5), pair, weight_decay=-1), "weight_decay must be"),
    (lambda: train_two_layer(normal(2, 5), pair, lr=1e200, steps=3), "lr must let training conv"),
    (lambda: train_two_layer(normal(2, 5), pair, lr=1e200, steps=1), "lr must let training conv"),
    (lambda: reconstruct("objective", pair, inputs=5), "objective must be a ShallowObjective or"),
    (lambda: single.with_sharpness(torch.ones(2)), "sharpness must be a finite number above 0"),
    (lambda: train_two_layer(normal(2, 5), pair, progress="x"), "progress must be True"),
    (lambda: reconstruct(single, pair[None], inputs=5), "labels must have shape"),
    (lambda: reconstruct(single, one / 0, inputs=5), "labels must be finite"),
    (lambda: reconstruct(single, pair, inputs=4), "inputs must be the length of a sample of the"),
    (lambda: reconstruct(NetworkObjective(mlp(1)), pair, inputs=4), "inputs must be the length"),
    (lambda: reconstruct(single, pair, inputs=5.0), "inputs must be a whole number"),
    (lambda: reconstruct(single, pair, inputs=5, steps=0), "steps must be a whole number"),
    (lambda: reconstruct(single, pair, inputs=5, lr=-1), "lr must be a finite number above 0"),
    (lambda: reconstruct(single, pair, inputs=5, lr=1e300), "lr must let the search converge"),
    (lambda: reconstruct(single, pair, inputs=5, least=-1), "least must be a finite number of at"),
    (lambda: reconstruct(single, pair, inputs=5, settled=2), "settled must be a number in"),
    (lambda: reconstruct(single, pair, inputs=5, seed=-1), "seed must be a whole number"),
    (lambda: reconstruct(single, pair, inputs=5, splitting=True), "splitting must be what Sample"),
    (lambda: reconstruct(single, pair, inputs=5, basis=torch.eye(4)), "basis must have shape"),
    (lambda: reconstruct(single, pair, inputs=5, basis=torch.ones(2, 5)), "basis must have ortho"),
    (lambda: NetworkObjective(mlp(1)).within(torch.ones(2, 5)), "basis must have orthonormal"),
    (lambda: reconstruct(classes, torch.tensor([0, 3]), inputs=5), r"labels must lie in 0\.\.2"),
    (lambda: reconstruct(classes, pair, inputs=5), r"labels must lie in 0\.\.2.*; got -1\.\.1"),
    (lambda: reconstruct(classes, one, inputs=5), "labels must hold whole numbers"),
    (
        lambda: reconstruct(ShallowObjective(network(), start=network()), pair, inputs=5),
        "objective must have a target that is not 0",
    ),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_bad_input_gets_one_clear_sentence(number):
    call, message = REFUSED[number]
    with pytest.raises(ValueError, match=f"^{message}") as refusal:
        call()
    text = str(refusal.value)
    assert text.endswith(".")
    assert "\n" not in text
    assert len(text) < 200
