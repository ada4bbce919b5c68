"""Samples out of weights beside least squares and CP decompositions; searches beside autograd."""

import itertools

import numpy as np
import pytest
import torch
from tensorly.decomposition import parafac, symmetric_parafac_power_iteration
from torch import nn
from torch.profiler import ProfilerActivity, profile

from flatbook.reconstruction import (
    NetworkObjective,
    ShallowObjective,
    TwoLayer,
    exact_kkt,
    least_curvatures,
    match,
    recover,
)
from flatbook.reconstruction.interpolation import monomials

PIXELS, WIDTH = 784, 1000
SMALL, MIDDLE, LARGE = (f"{n} samples of {PIXELS} pixels from weights" for n in (40, 60, 100))
SAMPLES = {SMALL: 40, MIDDLE: 60, LARGE: 100}
KKT_STEP = "KKT loss and gradients, 40 candidates, width 1,000"
KKT_DEEP = "KKT loss and gradients, 40 candidates, 784-1000-1000-1"
SPLITTING = "splitting directions, 100 candidates, width 1,000"
TENSORS = {n: f"tensor of {n} samples, whitened" for n in (10, 20)}
CANDIDATES, SPLIT, LANCZOS = 40, 100, 20


# From weights to samples


def error(found, samples) -> float:
    """Return how far the worst direction of a sample is from the nearest found, either way."""
    found, samples = (
        torch.as_tensor(part, dtype=torch.float64) / torch.as_tensor(part).norm(dim=1, keepdim=True)
        for part in (found, samples)
    )
    return float(match(found, samples, measure="distance", signed=False).score.max())


def least_squares(W, a):
    """Fit the map in all monomials by least squares and take the eigenvectors of two slices."""
    _, values, rows = torch.linalg.svd(W, full_matrices=False)
    rows = rows[values > 1e-10 * values[0]]
    u = W @ rows.T
    size = u.norm(dim=1, keepdim=True)
    u = u / size
    goal = u / (3 * size * a[:, None])
    found = torch.linalg.lstsq(monomials(u, 2), goal, driver="gelsd").solution
    s = len(rows)
    first, second = torch.triu_indices(s, s)
    tensor = torch.zeros(s, s, s, dtype=W.dtype)
    half = torch.where(first == second, 1.0, 0.5).to(W).sqrt()
    tensor[first, second] = tensor[second, first] = half[:, None] * found
    random, widest = torch.Generator().manual_seed(0), -1.0
    for _ in range(5):
        pair = torch.randn(2, s, generator=random, dtype=W.dtype)
        one, two = (torch.einsum("i,ijk->jk", v, tensor) for v in pair)
        values, vectors = torch.linalg.eig(torch.linalg.solve(two, one).T)
        gap = float(values.real.arctan().sort().values.diff().min())
        if gap > widest:
            widest, best = gap, vectors.real.T
    return best @ rows


@pytest.mark.parametrize(
    ("group", "name"),
    [(SMALL, "flatbook"), (SMALL, "least squares"), (MIDDLE, "flatbook"), (LARGE, "flatbook")],
)
def bench_recovery(compare, benchmark, group, name):
    network = exact_kkt(SAMPLES[group], d=PIXELS)
    contenders = {
        "flatbook": lambda: recover(network.W, network.a).X,
        "least squares": lambda: least_squares(network.W, network.a),
    }
    rounds = {SMALL: 9, MIDDLE: 5, LARGE: 3}[group] if name == "flatbook" else 3
    found = compare(group, name, contenders[name], rounds=rounds)
    benchmark.extra_info["relative_error"] = error(found, network.X)


@pytest.mark.parametrize("n", TENSORS)
@pytest.mark.parametrize("name", ["flatbook", "power iteration", "alternating least squares"])
def bench_tensor(compare, benchmark, n, name):
    """Time flatbook from the weights on; the others are given the tensor, with orthonormal rows."""
    network = exact_kkt(n)
    b = network.multipliers * network.y
    X = network.X
    tensor = torch.einsum("n,ni,nj,nk->ijk", b, X, X, X).numpy()

    def power():
        np.random.seed(0)  # noqa: NPY002 -- tensorly draws from the global generator
        return symmetric_parafac_power_iteration(tensor, rank=n)[1].T

    def alternating():
        """Start again until the tensor is met, for most starts miss some of its terms."""
        for seed in range(100):
            fit, errors = parafac(
                tensor,
                rank=n,
                init="random",
                random_state=seed,
                n_iter_max=1000,
                tol=1e-14,
                orthogonalise=True,
                return_errors=True,
            )
            if errors[-1] < 1e-6:
                return fit.factors[0].T
        raise RuntimeError("no start met the tensor")

    contenders = {
        "flatbook": lambda: recover(network.W, network.a).X,
        "power iteration": power,
        "alternating least squares": alternating,
    }
    rounds = 9 if name == "flatbook" else 3
    found = compare(TENSORS[n], name, contenders[name], rounds=rounds)
    benchmark.extra_info["relative_error"] = error(found, X)


# Searches


def problem(candidates):
    random = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    weights = TwoLayer(
        normal(WIDTH, PIXELS) / PIXELS**0.5, 0.1 * normal(WIDTH), normal(1, WIDTH) / WIDTH**0.5
    )
    X, multipliers = 0.5 * normal(candidates, PIXELS), normal(candidates).abs()
    return weights, (X, multipliers, torch.arange(candidates) % 2 * 2 - 1)


def mlp(*widths, bias=True):
    layers = []
    for k, (before, after) in enumerate(itertools.pairwise(widths)):
        last = k == len(widths) - 2
        layers += [nn.Linear(before, after, bias=bias or not last), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double()


@pytest.mark.parametrize("name", ["kernel form", "kernel form in a span", "double backward"])
def bench_step(compare, benchmark, name):
    """Time the gradients; a span is what training leaves a search to look in."""
    weights, (X, *rest) = problem(CANDIDATES)
    basis = torch.linalg.qr(X.T).Q.T
    model = mlp(PIXELS, WIDTH, 1, bias=False)
    for parameter, value in zip(model.parameters(), weights, strict=True):
        parameter.data = value.clone()
    kernel, double = ShallowObjective(weights), NetworkObjective(model)
    objective = double if name == "double backward" else kernel
    candidates = X, *rest
    if name.endswith("span"):
        objective, candidates = kernel.within(basis), (X @ basis.T, *rest)
    _, dX, dm = compare(KKT_STEP, name, lambda: objective.gradients(*candidates), rounds=30)
    other = kernel if name == "double backward" else double
    if name.endswith("span"):
        other = double.within(basis)
    plain = other.gradients(*candidates)[1:]
    off = max(float((f - o).norm() / o.norm()) for f, o in zip((dX, dm), plain, strict=True))
    benchmark.extra_info["relative_error"] = off


@pytest.mark.parametrize("name", ["flatbook", "by hand"])
def bench_deep_step(compare, benchmark, name):
    torch.manual_seed(0)
    model = mlp(PIXELS, WIDTH, WIDTH, 1)
    objective = NetworkObjective(model)
    _, candidates = problem(CANDIDATES)
    parameters = list(objective.model.parameters())
    goal = [p.detach().clone() for p in parameters]

    def by_hand():
        X, multipliers = (t.clone().requires_grad_() for t in candidates[:2])
        out = objective.model(X)[:, 0]
        total = (multipliers * candidates[2]) @ out
        found = torch.autograd.grad(total, parameters, create_graph=True)
        loss = sum((p - g).square().sum() for p, g in zip(goal, found, strict=True))
        return float(loss.detach()), *torch.autograd.grad(loss, (X, multipliers))

    contenders = {"flatbook": lambda: objective.gradients(*candidates), "by hand": by_hand}
    found = compare(KKT_DEEP, name, contenders[name], rounds=15)
    plain = by_hand()
    off = max(float((f - o).norm() / o.norm()) for f, o in zip(found[1:], plain[1:], strict=True))
    benchmark.extra_info["relative_error"] = off


def dense(objective, candidates):
    """Form every splitting matrix, column by column, and find its least eigenpair."""
    n, d = candidates[0].shape
    apply = objective.splitting(*candidates)
    S = torch.empty(n, d, d, dtype=torch.float64)
    for k in range(d):
        axis = torch.zeros(n, d, dtype=torch.float64)
        axis[:, k] = 1
        S[:, k] = apply(axis)
    found = []
    for matrix in S:
        values, vectors = torch.linalg.eigh(matrix)
        found.append((values[0], vectors[:, 0].clone()))
    return torch.stack([value for value, _ in found])


def peak(function) -> int:
    """Return the most memory that torch held beyond what it held before a call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        function()
    events = watched.profiler.kineto_results.events()
    moves = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(0, int(np.cumsum([size for _, size in moves]).max()))


@pytest.mark.parametrize("name", ["Lanczos", "dense matrices"])
def bench_splitting(compare, benchmark, name):
    weights, candidates = problem(SPLIT)
    objective = ShallowObjective(weights, sharpness=10.0)
    lanczos = lambda: least_curvatures(objective, *candidates, steps=LANCZOS).values  # noqa: E731
    if name == "Lanczos":
        compare(SPLITTING, name, lanczos, rounds=5)
        benchmark.extra_info["peak_bytes"] = peak(lanczos)
        return
    exact = []
    benchmark.extra_info["peak_bytes"] = peak(lambda: exact.append(dense(objective, candidates)))
    compare(SPLITTING, name, lambda: dense(objective, candidates), rounds=1, warmup=0)
    benchmark.extra_info["relative_error"] = float(((lanczos() - exact[0]) / exact[0]).abs().max())
