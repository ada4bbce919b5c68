"""Stochastic trace, top eigenvalue and landscapes against the dense Hessian of a small network."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from flatbook import models
from flatbook.sharpness import (
    full_trace,
    last_layer_hessian,
    loss_landscape,
    top_eigenvalue,
)


def problem(seed=0, samples=12):
    """Return a smooth float64 network with few weights, inputs and labels."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 3, generator=random, dtype=torch.float64)
    y = torch.randint(3, (samples,), generator=random)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
        parameter.data.copy_(values)
    model[2].running_mean.normal_(generator=random)
    return model, x, y


def dense_hessian(model, x, y):
    weights = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    sizes = [w.numel() for w in weights.values()]

    def loss(vector):
        pieces = zip(weights.items(), vector.split(sizes), strict=True)
        moved = {name: piece.view_as(w) for (name, w), piece in pieces}
        return cross_entropy(functional_call(model, moved, (x,)), y)

    with models.evaluating(model):
        return hessian(loss, torch.cat([w.flatten() for w in weights.values()]))


def snapshot(model):
    state = {key: value.clone() for key, value in model.state_dict().items()}
    return state, [module.training for module in model.modules()]


def unchanged(model, before):
    state, modes = before
    return (
        all(torch.equal(state[key], value) for key, value in model.state_dict().items())
        and modes == [module.training for module in model.modules()]
        and all(parameter.grad is None for parameter in model.parameters())
    )


# --- trace -------------------------------------------------------------------------------------


def test_trace_converges_to_the_dense_one_with_the_error_of_the_theory():
    model, x, y = problem()
    matrix = dense_hessian(model, x, y)
    estimate = full_trace(model, x, y, probes=2000)
    assert abs(estimate.value - matrix.trace()) < 3 * estimate.standard_error
    variance = 2 * (matrix.square().sum() - matrix.diagonal().square().sum())
    assert estimate.standard_error == pytest.approx(math.sqrt(variance / 2000), rel=0.1)
    assert estimate.standard_error < 0.05 * matrix.trace()
    assert estimate.probes == 2000


def test_intervals_cover_the_truth_as_often_as_they_say():
    model, x, y = problem(1)
    truth = dense_hessian(model, x, y).trace().item()
    runs = 120
    covered = 0
    for seed in range(runs):
        estimate = full_trace(model, x, y, probes=30, seed=seed)
        covered += abs(estimate.value - truth) <= 2.045 * estimate.standard_error  # t, 29 degrees
    # 0.95 ± 0.02 is one standard deviation of the count.
    assert 0.88 <= covered / runs <= 0.995


def test_more_probes_shrink_the_error_by_their_root():
    model, x, y = problem()
    few, many = (full_trace(model, x, y, probes=n).standard_error for n in (100, 900))
    assert few / many == pytest.approx(3, rel=0.25)


def test_diagonal_hessian_needs_two_probes():
    class Uncoupled(nn.Module):
        """Two classes, one weight each, on disjoint samples: the Hessian is diagonal."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))

        def forward(self, x):
            first = (x * self.weight).sum(dim=1)
            return torch.stack([first, torch.zeros_like(first)], dim=1)

    x, y = torch.eye(2, dtype=torch.float64), torch.tensor([0, 1])
    estimate = full_trace(Uncoupled(), x, y, probes=2)
    assert estimate.value == pytest.approx(0.25, rel=1e-12)  # two samples of p (1 - p) / 2
    assert estimate.standard_error == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("batch_size", [1, 5, 12, 100])
def test_batches_change_nothing(batch_size):
    model, x, y = problem()
    whole, parts = (full_trace(model, x, y, probes=5, batch_size=b) for b in (None, batch_size))
    assert parts.value == pytest.approx(whole.value, rel=1e-12)
    assert parts.standard_error == pytest.approx(whole.standard_error, rel=1e-10)


def test_trace_of_the_head_alone_is_the_closed_form():
    """Two independent algorithms: all but the head frozen, against the exact last layer."""
    model = models.build("small-cnn", num_classes=4, in_channels=1, width=2, seed=0).double()
    x = torch.rand(20, 1, 12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.arange(20) % 4
    model.body.requires_grad_(False)
    with torch.no_grad():
        features = model.features(x)
        matrix = last_layer_hessian(features, model.head(features), bias=True)
    estimate = full_trace(model, x, y, probes=500)
    assert abs(estimate.value - matrix.trace()) < 4 * estimate.standard_error
    top = top_eigenvalue(model, x, y, tolerance=1e-8)
    assert top.value == pytest.approx(torch.linalg.eigvalsh(matrix)[-1].item(), rel=1e-10)
    model.head.bias.requires_grad_(False)
    top = top_eigenvalue(model, x, y, tolerance=1e-8)
    matrix = last_layer_hessian(features, model.head(features))
    assert top.value == pytest.approx(torch.linalg.eigvalsh(matrix)[-1].item(), rel=1e-10)


@pytest.mark.parametrize("name", ["mlp", "small-cnn", "resnet18", "vgg11-bn"])
def test_trace_of_a_piecewise_linear_network_is_the_gauss_newton_trace(name):
    """Each weight enters the logits of a ReLU network linearly, so only JᵀSJ has a diagonal."""
    width = {"mlp": 8, "small-cnn": 3}.get(name, 2)
    model = models.build(
        name, num_classes=3, in_channels=1, width=width, input_shape=(1, 8, 8), seed=0
    ).double()
    model.head.weight.data.mul_(0.1)  # nobody is certain, so every term counts
    x = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parameters = list(model.parameters())
    trace = 0.0
    with models.evaluating(model):
        for logits in model(x):
            jacobian = [
                torch.cat(
                    [g.flatten() for g in torch.autograd.grad(z, parameters, retain_graph=True)]
                )
                for z in logits
            ]
            gram = torch.stack(jacobian) @ torch.stack(jacobian).T
            p = logits.softmax(0)
            trace += ((p.diag() - p.outer(p)) * gram).sum().item() / len(x)
    estimate = full_trace(model, x, torch.arange(3), probes=60)
    assert abs(estimate.value - trace) < 4 * estimate.standard_error
    assert estimate.standard_error < 0.5 * trace


# --- top eigenvalue ----------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [None, 5])
@pytest.mark.parametrize("seed", range(3))
def test_top_eigenvalue_is_the_dense_one(seed, batch_size):
    model, x, y = problem(seed)
    spectrum = torch.linalg.eigvalsh(dense_hessian(model, x, y))
    top = top_eigenvalue(model, x, y, tolerance=1e-6, batch_size=batch_size)
    assert top.value == pytest.approx(spectrum[-1].item(), rel=1e-9)
    assert (spectrum - top.value).abs().min() <= top.residual + 1e-12
    assert top.residual <= 1e-4 * abs(top.value)
    assert 2 <= top.iterations <= 500


def test_largest_magnitude_may_be_negative():
    class Saddle(nn.Module):
        """Logit 3a² − b² of the true class: H = diag(−3, 1) at a = b = 0."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))

        def forward(self, x):
            first = x[:, 0] * (3 * self.weight[0] ** 2 - self.weight[1] ** 2)
            return torch.stack([first, torch.zeros_like(first)], dim=1)

    x, y = torch.ones(1, 1), torch.tensor([0])
    assert top_eigenvalue(Saddle(), x, y).value == pytest.approx(1)
    assert top_eigenvalue(Saddle(), x, y, kind="magnitude").value == pytest.approx(-3)


def test_single_weight_and_flat_loss():
    class One(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(scale.shape, dtype=torch.float64))
            self.scale = scale

        def forward(self, x):
            first = x[:, 0] * (self.weight * self.scale).sum()
            return torch.stack([first, torch.zeros_like(first)], dim=1)

    x, y = torch.ones(1, 1), torch.tensor([0])
    one = top_eigenvalue(One(torch.ones(1, dtype=torch.float64)), x, y)
    assert one.value == pytest.approx(0.25)
    flat = top_eigenvalue(One(torch.zeros(3, dtype=torch.float64)), x, y)
    assert (flat.value, flat.residual, flat.iterations) == (0.0, 0.0, 1)


def test_exhausted_budget_is_said():
    model, x, y = problem()
    with pytest.raises(RuntimeError, match="tolerance=1e-12 after max_iterations=4 products"):
        top_eigenvalue(model, x, y, tolerance=1e-12, max_iterations=4)


# --- landscapes --------------------------------------------------------------------------------


def test_landscape_passes_through_the_model():
    model, x, y = problem()
    with models.evaluating(model), torch.no_grad():
        logits = model(x)
    line = loss_landscape(model, x, y, steps=7, span=0.5)
    assert line.betas is None
    assert line.alphas.tolist() == pytest.approx(np.linspace(-0.5, 0.5, 7).tolist())
    assert line.alphas[3] == 0
    assert line.loss[3].item() == pytest.approx(cross_entropy(logits, y).item(), rel=1e-12)
    assert line.accuracy[3].item() == (logits.argmax(1) == y).double().mean().item()
    plane = loss_landscape(model, x, y, dimensions=2, steps=7, span=0.5)
    assert plane.loss.shape == plane.accuracy.shape == (7, 7)
    assert_close(plane.loss[:, 3], line.loss)  # the plane's first direction is the line's
    assert not torch.allclose(plane.loss[3], line.loss)


def test_directions_have_the_norm_of_the_filters_they_move():
    """Recover the direction from a model that records the weights it is run with."""
    seen = []

    class Recorder(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 3)
            self.norm = nn.BatchNorm2d(3)
            self.head = nn.Linear(3, 4)

        def forward(self, x):
            seen.append({name: p.detach().clone() for name, p in self.named_parameters()})
            return self.head(self.norm(self.conv(x)).mean(dim=(2, 3)))

    model = Recorder().double()
    model.head.bias.requires_grad_(False)
    x, y = torch.rand(4, 2, 5, 5, dtype=torch.float64), torch.arange(4)
    loss_landscape(model, x, y, steps=3)
    before, middle, after = seen[-3:]
    for name in before:
        step = (after[name] - before[name]) / 2
        if name in ("conv.weight", "head.weight"):
            assert_close(step.flatten(1).norm(dim=1), middle[name].flatten(1).norm(dim=1))
            assert step.std() > 0
        else:
            assert not step.any()


def test_landscape_ignores_rescaled_layers():
    """Positive scales of a hidden ReLU layer, undone in the next, leave function and cut alike."""
    random = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.ReLU(), nn.Linear(5, 3)).double()
    x = torch.randn(9, 3, generator=random, dtype=torch.float64)
    y = torch.arange(9) % 3
    scaled = copy.deepcopy(model)
    scaled[0].weight.data.mul_(7)
    scaled[2].weight.data.div_(7)
    first, second = (loss_landscape(m, x, y, dimensions=2, steps=4) for m in (model, scaled))
    assert_close(first.loss, second.loss)


def test_curvature_of_the_cut_is_that_of_the_hessian():
    """The second difference along d is dᵀHd: the landscape and the products agree."""
    model, x, y = problem()
    model[2].requires_grad_(False)
    model[0].bias.requires_grad_(False)
    model[3].bias.requires_grad_(False)
    matrix = dense_hessian(model, x, y)
    span = 1e-3
    line = loss_landscape(model, x, y, steps=3, span=span)
    random = torch.Generator().manual_seed(0)
    parts = []
    for weight in (model[0].weight, model[3].weight):
        d = torch.randn(weight.shape, generator=random, dtype=torch.float64)
        parts.append((d * (weight.norm(dim=1) / d.norm(dim=1))[:, None]).flatten())
    direction = torch.cat(parts).detach()
    second = (line.loss[0] - 2 * line.loss[1] + line.loss[2]) / span**2
    assert second.item() == pytest.approx((direction @ matrix @ direction).item(), rel=1e-4)


# --- what all three promise --------------------------------------------------------------------

RUNS = {
    "trace": lambda *problem, **options: full_trace(*problem, probes=3, **options),
    "top": top_eigenvalue,
    "landscape": lambda *problem, **options: loss_landscape(*problem, steps=3, **options),
}


def same(a, b):
    return all(
        torch.equal(u, v) if isinstance(u, torch.Tensor) else u == v
        for u, v in zip(vars(a).values(), vars(b).values(), strict=True)
    )


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_runs_leave_no_trace_and_repeat(run):
    model = models.build("resnet18", num_classes=3, in_channels=1, width=2, seed=0)
    model.body[1].eval()
    x = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(6) % 3
    before, global_state = snapshot(model), torch.get_rng_state()
    numpy_state = np.random.get_state()[1].copy()  # noqa: NPY002
    first = run(model, x, y)
    assert unchanged(model, before)
    assert torch.equal(torch.get_rng_state(), global_state)
    assert (np.random.get_state()[1] == numpy_state).all()  # noqa: NPY002
    with torch.no_grad():
        assert same(run(model, x.numpy(), y.numpy()), first)
    assert not same(run(model, x, y, seed=1), first)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_runs_leave_no_trace_when_they_fail(run):
    model, x, y = problem()
    before = snapshot(model)
    with pytest.raises(ValueError, match="must"):
        run(model, x, y, batch_size=0)
    assert unchanged(model, before)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_unused_and_frozen_parameters(run):
    model, x, y = problem()
    model.spare = nn.Linear(2, 2).double()
    model.forward = lambda x: model[3](model[2](model[1](model[0](x))))
    with_spare = run(model, x, y)
    assert all(
        torch.as_tensor(value).isfinite().all()
        for value in vars(with_spare).values()
        if value is not None
    )
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="model must have a parameter that requires a gradient"):
        run(model, x, y)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_lazy_models_are_completed_first(run):
    model = models.build("mlp", num_classes=3, width=4, seed=0)
    run(model, torch.rand(5, 4), torch.arange(5) % 3)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_refused(run, dtype):
    model, x, y = problem()
    with pytest.raises(ValueError, match=f"all in float32 or all in float64; got {dtype}"):
        run(model.to(dtype), x, y)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.full((12, 3), math.nan)}, "x must be finite"),
        ({"x": torch.ones(0, 3), "y": torch.ones(0).long()}, "x must not be empty"),
        ({"x": torch.ones(12, 3).long()}, "x must hold floating-point numbers; got torch.int64"),
        ({"y": torch.zeros(11).long()}, r"y must have shape \(12\); got \(11,\)"),
        ({"y": torch.full((12,), 3)}, "y must lie in 0..2, one label per sample; got 3..3"),
        ({"y": torch.full((12,), -1)}, "y must lie in 0..2, one label per sample; got -1..-1"),
        ({"y": torch.zeros(12)}, "y must hold whole numbers; got torch.float32"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1; got 0"),
        ({"seed": -1}, "seed must be a whole number .*; got -1"),
        ({"x": torch.ones(12, 4)}, r"x must fit the model, which refuses shape \(12, 4\): "),
    ],
)
def test_bad_problems_are_refused(run, change, message):
    model, x, y = problem()
    arguments = {"x": x, "y": y} | change
    with pytest.raises(ValueError, match=message):
        run(model, arguments.pop("x"), arguments.pop("y"), **arguments)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_models_without_logits_are_refused(run):
    x, y = torch.ones(2, 3), torch.zeros(2).long()
    with pytest.raises(ValueError, match=r"model must return logits of shape .*; got \(1, 1\)"):
        run(nn.Linear(3, 1), x, y)
    with pytest.raises(ValueError, match="model must return logits of shape"):
        run(nn.Sequential(nn.Linear(3, 2), nn.Unflatten(1, (2, 1))), x, y)
    with pytest.raises(ValueError, match="model must be a torch module; got NoneType"):
        run(None, x, y)


@pytest.mark.parametrize("run", [RUNS["trace"], RUNS["top"]], ids=["trace", "top"])
def test_a_loss_that_no_trainable_parameter_moves_is_refused(run):
    model, x, y = problem()
    model.requires_grad_(False)
    model.spare = nn.Linear(2, 2).double()
    model.forward = lambda x: model[3](model[2](model[1](model[0](x))))
    with pytest.raises(ValueError, match="model must use a trainable parameter"):
        run(model, x, y)


@pytest.mark.parametrize("run", [RUNS["trace"], RUNS["top"]], ids=["trace", "top"])
def test_infinite_losses_are_refused(run):
    model, x, y = problem()
    model[3].weight.data.fill_(math.nan)
    with pytest.raises(ValueError, match="The loss of model on x and y must be finite; got nan"):
        run(model, x, y)


def test_cuts_into_infinite_loss_are_refused():
    model, x, y = problem()
    message = r"The loss must be finite on the whole cut; got (nan|inf) at .* with span=3e\+38"
    with pytest.raises(ValueError, match=message):
        loss_landscape(model.float(), x, y, span=3e38)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (full_trace, {"probes": 1}, "probes must be a whole number of at least 2; got 1"),
        (top_eigenvalue, {"kind": "largest"}, "kind must be one of algebraic, magnitude"),
        (top_eigenvalue, {"tolerance": -1.0}, "tolerance must be a finite number above 0"),
        (top_eigenvalue, {"max_iterations": 0}, "max_iterations must be a whole number"),
        (loss_landscape, {"dimensions": 3}, "dimensions must be 1 or 2; got 3"),
        (loss_landscape, {"span": 0.0}, "span must be a finite number above 0; got 0.0"),
        (loss_landscape, {"steps": 1}, "steps must be a whole number of at least 2; got 1"),
    ],
)
def test_bad_options_are_refused(function, options, message):
    with pytest.raises(ValueError, match=message):
        function(*problem(), **options)
