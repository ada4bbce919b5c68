"""Attacks against their plain definitions, exact optima and positive controls."""

import copy
import itertools
import math
import random
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from flatbook import attacks
from flatbook.adversarial import (
    auto_attack,
    detect,
    dlr_loss,
    first_step,
    input_gradient,
    log_odds,
    margin,
    masking_report,
    pgd,
    random_search,
    saturated,
    scaled,
    walk,
    zero_gradient_share,
)
from flatbook.data import load
from flatbook.models import build
from flatbook.runtime import generator
from flatbook.sharpness import doubt, relative_sharpness
from flatbook.threat import ball
from flatbook.training import TrainConfig, fit

pytestmark = pytest.mark.usefixtures("one_thread")
NORMS = ("linf", "l2")
LOSSES = ("ce", "dlr", "log-odds")


@pytest.fixture(scope="module")
def digits():
    """Return an MLP that knows the digits, and a hundred of them that it was not shown."""
    data = load("digits")
    model = build("mlp", num_classes=10, in_channels=1, width=64, input_shape=(1, 8, 8), seed=0)
    fit(model, data.train.x, data.train.y, TrainConfig(epochs=20, batch_size=64), progress=False)
    return model, data.test.x[:100], data.test.y[:100]


def linear(weight, bias=None):
    """Return a linear classifier of features with these weights, in evaluation mode."""
    weight = torch.as_tensor(weight)
    model = nn.Linear(weight.shape[1], len(weight), bias=bias is not None, dtype=weight.dtype)
    model.weight.data = weight.clone()
    if bias is not None:
        model.bias.data = torch.as_tensor(bias).to(weight.dtype)
    return model.eval()


def rand(*shape, seed=0, dtype=torch.float64):
    return torch.rand(shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def cnn(dtype=torch.float64, classes=4, channels=2):
    model = build("small-cnn", num_classes=classes, in_channels=channels, width=4, seed=0)
    return model.eval().to(dtype)


def images(samples=9, dtype=torch.float64, channels=2, classes=4):
    return rand(samples, channels, 8, 8, dtype=dtype), torch.arange(samples) % classes


def states():
    """Return the states of the global generators."""
    _, words, place, *rest = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().tolist(), words.tolist(), place, rest, random.getstate()


def accuracy(model, x, y):
    with torch.no_grad():
        return (model(x).argmax(dim=1) == y).double().mean().item()


def length(delta):
    return delta.flatten(1).norm(dim=1)


def assert_within(x_adv, x, norm, epsilon, low=0.0, high=1.0):
    """Measure in the precision of the input, in every way that torch offers."""
    assert x_adv.dtype == x.dtype
    assert x_adv.shape[-x.ndim :] == x.shape
    assert x_adv.min() >= low
    assert x_adv.max() <= high
    for moved in x_adv.reshape(-1, *x.shape):
        delta = moved - x
        if norm == "linf":
            sizes = [delta.abs().max()]
        else:
            axes = tuple(range(1, x.ndim))
            sizes = [
                torch.linalg.vector_norm(delta.flatten(1), dim=1),
                torch.linalg.vector_norm(delta, dim=axes),
                torch.stack([torch.linalg.vector_norm(one) for one in delta]),
                delta.flatten(1).norm(dim=1),
            ]
            if x.dtype in (torch.float32, torch.float64):  # squares vanish in half precision
                sizes += [delta.square().sum(dim=axes).sqrt()]
        for size in sizes:
            assert (size <= epsilon).all(), (size.max().item(), epsilon)
            assert size.max().item() <= epsilon
            assert (size <= torch.tensor(epsilon, dtype=x.dtype)).all()


# --- margins and losses -------------------------------------------------------------------------


def plain_margin(logits, label):
    return logits[label] - max(z for i, z in enumerate(logits) if i != label)


def plain_dlr(logits, label):
    first, _, third = sorted(logits, reverse=True)[:3]
    return -plain_margin(logits, label) / (first - third)


def plain_log_odds(logits, label):
    others = torch.stack([torch.as_tensor(z) for i, z in enumerate(logits) if i != label])
    return others.exp().sum().log() - logits[label]


@pytest.mark.parametrize("classes", [3, 4, 10])
def test_losses_are_their_definitions(classes):
    logits, labels = randn(60, classes), torch.randint(classes, (60,), generator=generator(1))
    rows = logits.tolist()
    margins = [plain_margin(*pair) for pair in zip(rows, labels.tolist(), strict=True)]
    ratios = [plain_dlr(*pair) for pair in zip(rows, labels.tolist(), strict=True)]
    assert margin(logits, labels).tolist() == margins
    assert_close(dlr_loss(logits, labels), torch.tensor(ratios, dtype=torch.float64))
    odds = [float(plain_log_odds(z.double(), int(i))) for z, i in zip(logits, labels, strict=True)]
    assert_close(log_odds(logits, labels), torch.tensor(odds, dtype=torch.float64))
    assert_close(
        cross_entropy(logits, labels, reduction="none"), log_odds(logits, labels).exp().log1p()
    )
    wrong = logits.argmax(dim=1) != labels
    assert 0 < wrong.sum() < 60
    assert torch.equal(dlr_loss(logits, labels) > 0, wrong)
    assert torch.equal(margin(logits, labels) < 0, wrong)


def test_ties():
    logits = torch.tensor([[2.0, 2.0, 1.0], [2.0, 1.0, 1.0], [2.0, 2.0, 2.0], [5.0, 5.0, 5.0]])
    labels = torch.tensor([0, 1, 0, 2])
    assert margin(logits, labels).tolist() == [0, -1, 0, 0]
    assert dlr_loss(logits, labels).tolist() == [0, 1, 0, 0]
    behind = torch.tensor([[2.0, 2.0, 2.0, 0.5]])
    assert dlr_loss(behind, torch.tensor([3])).tolist() == [1.5]
    logits.requires_grad_()
    dlr_loss(logits, labels).sum().backward()
    assert logits.grad.isfinite().all()


@given(st.integers(0, 2**32), st.floats(1e-6, 1e6), st.floats(-100, 100))
def test_dlr_ignores_scale_and_shift(seed, scale, shift):
    logits, labels = randn(8, 5, seed=seed), torch.arange(8) % 5
    assert_close(dlr_loss(scale * logits, labels), dlr_loss(logits, labels), rtol=1e-9, atol=1e-9)
    assert_close(dlr_loss(logits + shift, labels), dlr_loss(logits, labels), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("loss", [margin, dlr_loss, log_odds])
def test_losses_take_arrays_and_check_them(loss):
    logits, labels = rand(4, 3), torch.tensor([0, 1, 2, 0])
    found = loss(logits.numpy(), labels.int().numpy())
    assert torch.equal(found, loss(logits, labels))
    for wrong, message in (
        ((logits, labels + 1), r"labels must lie in 0\.\.2"),
        ((logits, labels[:2]), r"labels must have shape \(4\)"),
        ((logits[0], labels), r"logits must have shape \(samples, classes\)"),
        ((logits[:, :1], labels * 0), "logits must have at least 2 columns"),
        ((logits / 0, labels), "logits must be finite"),
    ):
        with pytest.raises(ValueError, match=message):
            loss(*wrong)


def test_dlr_needs_three_classes():
    model, x, y = linear(randn(2, 3)), rand(4, 3), torch.zeros(4).long()
    message = r'loss="dlr" needs a model of at least 3 classes; got 2'
    with pytest.raises(ValueError, match=message):
        pgd(model, x, y, norm="linf", epsilon=0.1, step_size=0.1, steps=1, loss="dlr")
    with pytest.raises(ValueError, match=message):
        zero_gradient_share(model, x, y, loss="dlr")


# --- the ball and the box -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("epsilon", [1e-7, 1e-3, 8 / 255, 0.3, 2.0, 1e5])
def test_every_iterate_is_in_the_ball_and_in_the_box(dtype, norm, epsilon):
    x = rand(12, 3, 6, 6, dtype=dtype)
    x[0], x[1] = 0.0, 1.0
    x[2, :, ::2], x[3, :, :, 1] = 0.0, 1.0
    x[4] = torch.nextafter(torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype))
    x[5] = torch.nextafter(torch.ones((), dtype=dtype), torch.zeros((), dtype=dtype))
    x[6] = 0.5
    bias = [0.0, 0.2, 0.5, -0.3]
    model = nn.Sequential(nn.Flatten(), linear(randn(4, 108, dtype=dtype), bias)).eval()
    for share, loss, start in ((0.3, "ce", False), (0.7, "dlr", True), (10, "log-odds", True)):
        step_size = min(share * epsilon, 1e4)
        attack = pgd(
            model,
            x,
            torch.arange(12) % 4,
            norm=norm,
            epsilon=epsilon,
            step_size=step_size,
            steps=5,
            loss=loss,
            random_start=start,
            record=True,
            seed=0,
        )
        assert_within(attack.path, x, norm, epsilon)
        assert_within(attack.x_adv, x, norm, epsilon)
    moved = (attack.x_adv - x).flatten(1).abs().amax(dim=1)
    assert (moved[x[:, 0, 0, 0] < 0.5] > 0).any() or epsilon < 1e-3


@pytest.mark.parametrize("size", [28, 32, 64, 128])
@pytest.mark.parametrize("epsilon", [8 / 255, 0.5, 3.0])
def test_equal_changes_everywhere_stay_in_the_ball(size, epsilon):
    """The worst case of a sum of squares: each addition errs to the same side."""
    x = torch.full((6, 3, size, size), 0.5) + torch.tensor([0.0, 0.1, -0.1, 1e-3, 0.2, 0.3]).view(
        -1, 1, 1, 1
    )
    weight = torch.ones(2, x[0].numel())
    weight[1] = -1
    model = nn.Sequential(nn.Flatten(), linear(weight / len(weight[0]))).eval()
    attack = pgd(model, x, torch.zeros(6).long(), norm="l2", epsilon=epsilon, step_size=1, steps=3)
    assert_within(attack.x_adv, x, "l2", epsilon)
    assert (length(attack.x_adv - x) > 0.99 * epsilon).all()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_another_box(norm, dtype):
    x = 6 * rand(20, 5, dtype=dtype) - 3
    x[0], x[1] = -3, 3
    options = {"norm": norm, "epsilon": 1.5, "box": (-3, 3)}
    climb = {"step_size": 0.4, "steps": 6, "random_start": True, "seed": 0, "record": True}
    model, y = linear(randn(3, 5, dtype=dtype)), torch.arange(20) % 3
    path = pgd(model, x, y, **options, **climb).path
    assert_within(path, x, norm, 1.5, -3, 3)
    assert path.min() < -1
    found = random_search(model, x, y, queries=20, **options).x_adv
    assert_within(found, x, norm, 1.5, -3, 3)
    with pytest.raises(ValueError, match=r"x must lie in the box, 0 to 1; got -3\.0 to 3\.0"):
        pgd(model, x, y, norm=norm, epsilon=1.5, **climb)


@given(
    st.sampled_from(NORMS),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    st.integers(0, 2**32),
    st.floats(1e-9, 100),
    st.floats(1e-6, 100),
)
def test_projection(norm, dtype, seed, epsilon, reach):
    """It lands inside, leaves what is inside alone, and is next to the exact projection."""
    x = rand(3, 7, seed=seed, dtype=dtype)
    x = torch.where(rand(3, 7, seed=seed + 1) < 0.3, x.round(), x)
    point = x + reach * randn(3, 7, seed=seed + 2, dtype=dtype)
    project = ball(x, norm, epsilon, 0.0, 1.0)
    inside = project(point)
    assert_within(inside, x, norm, epsilon)
    assert torch.equal(project(x), x)
    again = project(inside)
    tolerance = 64 * torch.finfo(dtype).eps
    assert_close(again, inside, rtol=tolerance, atol=tolerance)
    if norm == "linf":
        assert torch.equal(again, inside)
    if dtype == torch.float64:
        delta = point - x
        if norm == "linf":
            exact = delta.clamp(-epsilon, epsilon)
        else:
            exact = delta * (epsilon / length(delta)[:, None]).clamp(max=1.0)
        assert_close(inside, (x + exact).clamp(0, 1), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_a_radius_of_zero_returns_the_input_bit_for_bit(norm, dtype):
    x = rand(4, 3, dtype=dtype)
    model, y = linear(randn(3, 3, dtype=dtype)), torch.arange(4) % 3
    attack = pgd(
        model, x, y, norm=norm, epsilon=0, step_size=1, steps=2, record=True, random_start=True
    )
    found = random_search(model, x, y, norm=norm, epsilon=0.0)
    for copied in (attack.x_adv, *attack.path, found.x_adv):
        assert torch.equal(copied, x)
        assert copied.data_ptr() != x.data_ptr()
    assert attack.path.shape == (3, 4, 3)
    assert attack.steps == (0, 1, 2)
    attack.path[0, 0, 0] = 5  # each entry is its own
    assert attack.path[1, 0, 0] == x[0, 0]


def test_a_step_of_the_least_size_is_possible():
    x = torch.tensor([[0.5, 0.6]])
    attack = pgd(
        linear([[1.0, 0.0], [0.0, 1.0]]),
        x,
        torch.tensor([0]),
        norm="linf",
        epsilon=1e-7,
        step_size=1e-7,
        steps=1,
    )
    assert 0.4999998 < attack.x_adv[0, 0] < x[0, 0]
    assert x[0, 1] < attack.x_adv[0, 1] < 0.6000002


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_steps_and_balls_of_any_size_give_numbers(norm, dtype):
    # An infinite step would turn the entries of the gradient that are zero into nan.
    model, x = linear([[1.0, 0.0], [-1.0, 0.0]]).to(dtype), torch.full((2, 2), 0.5, dtype=dtype)
    y = torch.tensor([0, 1])
    options = {"norm": norm, "epsilon": 0.25, "steps": 1}
    attack = pgd(model, x, y, step_size=1e300, **options)
    expected = torch.tensor([[0.25, 0.5], [0.75, 0.5]], dtype=torch.float64)
    assert_close(attack.x_adv.double(), expected, rtol=0, atol=20 * torch.finfo(dtype).eps)
    options["epsilon"] = 1e300
    for start in (False, True):
        attack = pgd(model, x, y, step_size=1e300, random_start=start, seed=0, **options)
        assert ((attack.x_adv >= 0) & (attack.x_adv <= 1)).all()


# --- the steps ----------------------------------------------------------------------------------


def plain_pgd(gradient, x, *, norm, epsilon, step_size, steps, start=None):
    """Projected gradients sample by sample, as one would write them."""
    path = [x if start is None else start]
    for _ in range(steps):
        rows = []
        for clean, now, slope in zip(x, path[-1], gradient(path[-1]), strict=True):
            if norm == "linf":
                delta = (now + step_size * slope.sign() - clean).clamp(-epsilon, epsilon)
            else:
                delta = now + step_size * slope / slope.square().sum().sqrt() - clean
                if (size := delta.square().sum().sqrt()) > epsilon:
                    delta = delta * epsilon / size
            rows.append((clean + delta).clamp(0, 1))
        path.append(torch.stack(rows))
    return torch.stack(path)


def plain_gradient(function, y, loss):
    def gradient(x):
        x = x.clone().requires_grad_()
        logits = function(x)
        if loss == "ce":
            total = cross_entropy(logits, y, reduction="sum")
        else:
            plain = {"dlr": plain_dlr, "log-odds": plain_log_odds}[loss]
            total = sum(plain(list(z), int(label)) for z, label in zip(logits, y, strict=True))
        return torch.autograd.grad(total, x)[0]

    return gradient


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("norm", NORMS)
def test_the_path_is_that_of_the_plain_loop(norm, loss):
    model, (x, _) = cnn(), images()
    y = model(x).argmax(dim=1)  # of a label that comes third, DLR has no gradient but rounding
    options = {"norm": norm, "epsilon": 0.3, "step_size": 0.11, "steps": 3}
    attack = pgd(model, x, y, loss=loss, record=True, **options)
    expected = plain_pgd(plain_gradient(model, y, loss), x, **options)
    assert_close(attack.path, expected, rtol=1e-9, atol=1e-9)
    begun = pgd(model, x, y, loss=loss, record=True, random_start=True, seed=3, **options)
    expected = plain_pgd(plain_gradient(model, y, loss), x, start=begun.path[0], **options)
    assert_close(begun.path, expected, rtol=1e-9, atol=1e-9)


def test_normalisation_inside_the_model_is_respected():
    inner = cnn()
    mean, std = torch.tensor([0.4, 0.7]), torch.tensor([0.1, 2.0])
    model = build("small-cnn", num_classes=4, in_channels=2, width=4, mean=mean, std=std, seed=0)
    model.eval().double()
    x, y = images()

    def by_hand(pixels):
        shift, scale = (part.double().view(1, -1, 1, 1) for part in (mean, std))
        return inner.head(inner.body((pixels - shift) / scale))

    for norm in NORMS:
        options = {"norm": norm, "epsilon": 0.2, "step_size": 0.2, "steps": 1}
        attack = pgd(model, x, y, record=True, **options)
        expected = plain_pgd(plain_gradient(by_hand, y, "ce"), x, **options)
        assert_close(attack.path, expected, rtol=1e-9, atol=1e-9)
    # In l2 the standard deviation turns the step: without normalisation it is another one.
    ignored = plain_pgd(plain_gradient(lambda p: inner.head(inner.body(p)), y, "ce"), x, **options)
    assert (ignored[1] - attack.x_adv).abs().max() > 0.01


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_first_step_of_a_linear_model_by_hand(dtype):
    """The gradient of the cross-entropy is W^T (p - e_y)."""
    weight, bias = randn(4, 6, dtype=dtype), randn(4, seed=1, dtype=dtype)
    x, y = 0.3 + 0.4 * rand(5, 6, dtype=dtype), torch.arange(5) % 4
    p = (x @ weight.T + bias).softmax(dim=1)
    slope = (p - torch.eye(4, dtype=dtype)[y]) @ weight
    model = linear(weight, bias)
    common = {"epsilon": 0.2, "step_size": 0.05, "steps": 1}
    assert_close(pgd(model, x, y, norm="linf", **common).x_adv, x + 0.05 * slope.sign())
    expected = x + 0.05 * slope / length(slope)[:, None]
    assert_close(pgd(model, x, y, norm="l2", **common).x_adv, expected)


@given(st.integers(0, 2**32), st.sampled_from(["ce", "log-odds"]))
@settings(max_examples=25)
def test_the_worst_case_of_a_linear_model_is_reached(seed, loss):
    """Of two classes, the gap of the logits moves by ε ‖w_a - w_b‖ in the dual norm."""
    weight, x, y = randn(2, 6, seed=seed), 0.5 + 0.01 * randn(4, 6, seed=seed + 1), [0, 1, 0, 1]
    model, y = linear(weight), torch.tensor(y)
    difference = weight[0] - weight[1]
    for norm, reach in (("linf", difference.abs().sum()), ("l2", difference.norm())):
        options = {"norm": norm, "epsilon": 0.1, "step_size": 0.03, "steps": 6, "loss": loss}
        attacked = pgd(model, x, y, **options).x_adv
        change = margin(model(x), y) - margin(model(attacked), y)
        assert_close(change, (0.1 * reach).expand(4), rtol=1e-9, atol=0)


def test_the_worst_case_in_the_corner_of_the_box_is_reached():
    weight, x = randn(2, 40), rand(8, 40)
    y = torch.arange(8) % 2
    direction = (weight[1] - weight[0]).sign() * torch.where(y == 0, 1.0, -1.0)[:, None]
    worst = (x + 0.3 * direction).clamp(0, 1)
    options = {"norm": "linf", "epsilon": 0.3, "step_size": 0.1, "steps": 4}
    assert_close(pgd(linear(weight), x, y, **options).x_adv, worst)


def test_dlr_finds_the_worst_case_where_one_other_class_matters():
    weight = torch.tensor([[1.0, 2.0], [-1.0, 0.5], [0.0, 0.0]], dtype=torch.float64)
    model = linear(weight, [0.0, 0.0, -50.0])
    x, y = torch.full((1, 2), 0.5, dtype=torch.float64), torch.tensor([0])
    options = {"norm": "linf", "epsilon": 0.25, "step_size": 0.1, "steps": 3, "loss": "dlr"}
    attacked = pgd(model, x, y, **options).x_adv
    assert_close(margin(model(attacked), y), margin(model(x), y) - 0.25 * 3.5)


@pytest.mark.parametrize("scale", [1e-200, 1e-30, 1.0, 1e150])
def test_steps_have_their_length_whatever_that_of_the_gradient(scale):
    slope = scale * randn(3, 2, 4, 4)
    step = attacks._ascent(slope, "l2", 0.25)
    assert_close(length(step), torch.full((3,), 0.25, dtype=torch.float64))
    assert_close(
        step / length(step).view(-1, 1, 1, 1),
        slope / scale / length(slope / scale).view(-1, 1, 1, 1),
    )
    assert torch.equal(attacks._ascent(slope, "linf", 0.25), 0.25 * slope.sign())
    assert not attacks._ascent(torch.zeros_like(slope), "l2", 0.25).any()
    slope[0, 0, 0, 0] = -math.inf
    step = attacks._ascent(slope, "l2", 0.25)
    assert_close(length(step), torch.full((3,), 0.25, dtype=torch.float64))
    assert step[0, 0, 0, 0] == -0.25


def test_steps_in_half_precision_do_not_overflow():
    slope = torch.full((1, 70_000), 1e-3, dtype=torch.float16)
    step = attacks._ascent(slope, "l2", 30.0)
    assert step.dtype == torch.float16
    assert length(step.double()).item() == pytest.approx(30, rel=1e-2)


# --- the start ----------------------------------------------------------------------------------

START = {"step_size": 0.1, "steps": 0, "random_start": True, "record": True}


@pytest.mark.parametrize("norm", NORMS)
def test_the_seed_decides_the_start_and_the_global_generator_stays(norm):
    model, x, y = linear(randn(2, 5)), rand(7, 5), torch.zeros(7).long()
    state = torch.get_rng_state()
    options = {"norm": norm, "epsilon": 0.2} | START
    first, second = (pgd(model, x, y, seed=4, **options).x_adv for _ in range(2))
    other = pgd(model, x, y, seed=5, **options)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first, second)
    assert ((first - other.x_adv).abs() > 0).any(dim=1).all()
    assert torch.equal(other.path, other.x_adv[None])
    assert (other.x_adv != x).any(dim=1).all()
    assert_within(first, x, norm, 0.2)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        drawn = [pgd(model, x, y, **options).x_adv for _ in range(2)]
        torch.manual_seed(1)
        assert torch.equal(pgd(model, x, y, **options).x_adv, drawn[0])
    assert not torch.equal(*drawn)


def test_the_start_is_uniform():
    x, y = torch.full((4000, 20), 0.5, dtype=torch.float64), torch.zeros(4000).long()
    model = linear(randn(2, 20))
    delta = pgd(model, x, y, norm="linf", epsilon=0.2, seed=0, **START).x_adv - x
    shares = torch.linspace(0.1, 0.9, 9, dtype=torch.float64)
    assert_close(delta.quantile(shares), 0.4 * shares - 0.2, atol=3e-3, rtol=0)
    delta = pgd(model, x, y, norm="l2", epsilon=0.2, seed=0, **START).x_adv - x
    assert_close(length(delta).quantile(shares), 0.2 * shares, atol=6e-3, rtol=0)
    directions = delta / length(delta)[:, None]
    assert directions.mean(dim=0).abs().max() < 0.02
    assert_close(directions.T @ directions / 4000, torch.eye(20).double() / 20, atol=6e-3, rtol=0)


# --- the record ---------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
def test_the_record_holds_what_was_asked(norm):
    model, (x, y) = cnn(torch.float32), images(5, torch.float32)
    options = {"norm": norm, "epsilon": 0.2, "step_size": 0.05, "steps": 7, "batch_size": 2}
    plain = pgd(model, x, y, **options)
    assert (plain.path, plain.steps) == (None, ())
    whole = pgd(model, x, y, record=True, **options)
    assert whole.path.shape == (8, *x.shape)
    assert whole.steps == tuple(range(8))
    assert torch.equal(whole.path[0], x)
    assert torch.equal(whole.path[-1], whole.x_adv)
    assert torch.equal(whole.x_adv, plain.x_adv)
    for every, steps in ((1, tuple(range(8))), (3, (0, 3, 6, 7)), (7, (0, 7)), (50, (0, 7))):
        some = pgd(model, x, y, record=every, **options)
        assert some.steps == steps
        assert torch.equal(some.path, whole.path[list(steps)])
        assert some.path.untyped_storage().nbytes() == len(steps) * x.numel() * 4
    still = pgd(model, x, y, record=True, **(options | {"steps": 0}))
    assert torch.equal(still.path, x[None])
    for wrong in (0, -1, 1.5, None, "yes"):
        with pytest.raises(ValueError, match="record must be a whole number of at least 1"):
            pgd(model, x, y, record=wrong, **options)


# --- what must not matter, and what must not change ---------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
def test_batches_and_memory_do_not_matter(norm):
    model, (x, y) = cnn(), images(11)
    options = {"norm": norm, "epsilon": 0.2, "step_size": 0.05, "steps": 5, "record": True}
    options |= {"random_start": True, "seed": 0}
    expected = pgd(model, x, y, **options).path
    for batch_size in (1, 4, 11):
        path = pgd(model, x, y, batch_size=batch_size, **options).path
        assert_close(path, expected, rtol=1e-9, atol=1e-9)
    twisted = x.transpose(2, 3).contiguous().transpose(2, 3)
    spread = torch.stack([x, -x], dim=-1)[..., 0]
    for other in (x.to(memory_format=torch.channels_last), twisted, spread, x.flip(0).flip(0)):
        assert_close(pgd(model, other, y, **options).path, expected, rtol=1e-9, atol=1e-9)
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    assert_close(pgd(last, x, y, **options).path, expected, rtol=1e-9, atol=1e-9)
    one = x[:1].expand(5, -1, -1, -1)
    path = pgd(model, one, y[:1].expand(5), **(options | {"random_start": False})).path
    assert_close(path[:, 0], path[:, 4], rtol=1e-9, atol=1e-9)


def test_arrays_gradients_and_modes_of_autograd_do_not_matter():
    model, (x, y) = cnn(torch.float32), images(4, torch.float32)
    options = {"norm": "linf", "epsilon": 0.2, "step_size": 0.1, "steps": 2}
    expected = pgd(model, x, y, **options).x_adv
    assert torch.equal(pgd(model, x.numpy(), y.numpy(), **options).x_adv, expected)
    numbers = options | {"epsilon": np.float64(0.2), "step_size": np.float64(0.1)}
    assert torch.equal(pgd(model, x, y.int(), **numbers).x_adv, expected)
    tracked = x.clone().requires_grad_()
    attacked = pgd(model, tracked, y, **options).x_adv
    assert torch.equal(attacked, expected)
    assert not attacked.requires_grad
    assert tracked.grad is None
    with torch.no_grad():
        assert torch.equal(pgd(model, x, y, **options).x_adv, expected)
    with (
        torch.inference_mode(),
        pytest.raises(ValueError, match=r"call this outside torch\.inference_mode"),
    ):
        pgd(model, x, y, **options)


def norm_network():
    """Return a network with every kind of state that an attack could disturb."""
    torch_model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(144, 4)
    )
    torch_model[0].bias.requires_grad_(False)
    return torch_model.eval()


def every_attack(model, x, y):
    yield lambda: pgd(model, x, y, norm="l2", epsilon=0.2, step_size=0.1, steps=2, seed=0)
    yield lambda: pgd(
        model, x, y, norm="linf", epsilon=0.2, step_size=0.1, steps=2, random_start=True, seed=0
    )
    yield lambda: random_search(model, x, y, norm="linf", epsilon=0.2, queries=3)
    yield lambda: zero_gradient_share(model, x, y)
    yield lambda: masking_report(model, x, y, norm="linf", epsilon=0.2, steps=2, queries=3)


def test_nothing_else_changes():
    model, (x, y) = norm_network(), images(6, torch.float32)
    model[3].train(False)
    state, kept = copy.deepcopy(model.state_dict()), x.clone()
    flags = [p.requires_grad for p in model.parameters()]
    before = states()
    for attack in every_attack(model, x, y):
        attack()
        assert [p.requires_grad for p in model.parameters()] == flags
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(part.training for part in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(x, kept)
    assert states() == before


class Breaking(nn.Module):
    """Fails at the n-th pass."""

    def __init__(self, inner, passes):
        super().__init__()
        self.inner, self.passes = inner, passes
        self.eval()

    def forward(self, x):
        self.passes -= 1
        if self.passes < 0:
            raise RuntimeError("no power")
        return self.inner(x)


@pytest.mark.parametrize("passes", [1, 2])
def test_the_weights_thaw_after_a_failure(passes):
    model, (x, y) = norm_network(), images(6, torch.float32)
    flags = [p.requires_grad for p in model.parameters()]
    assert len(set(flags)) == 2
    with pytest.raises(RuntimeError, match="no power"):
        pgd(Breaking(model, passes), x, y, norm="l2", epsilon=1, step_size=1, steps=4)
    assert [p.requires_grad for p in model.parameters()] == flags


class InPlace(nn.Module):
    """Normalises its inputs in place, as torch allows."""

    def __init__(self, inner):
        super().__init__()
        self.head, self.copies = inner, False

    def features(self, x):
        return x - 0.5 if self.copies else x.sub_(0.5)

    def forward(self, x):
        return self.head(self.features(x))


def test_models_that_work_in_place_change_no_inputs():
    model = InPlace(linear([[1.0, 0.0, 2.0], [0.0, 1.0, 0.0], [1.0, 1.0, 0.0]])).eval()
    x, y = rand(6, 3).float(), torch.arange(6) % 3
    common = {"norm": "linf", "epsilon": 0.25}
    outcomes = []
    for copies in (False, True):
        model.copies, given_x = copies, x.clone()
        attack = pgd(model, given_x, y, step_size=0.125, steps=3, record=True, **common)
        path = attack.path.clone()
        seen = walk(model, attack.path, y)
        found = random_search(model, given_x, y, queries=20, **common).x_adv
        report = masking_report(model, given_x, y, steps=3, queries=5, **common)
        share = zero_gradient_share(model, given_x, y)
        assert torch.equal(given_x, x)
        assert torch.equal(attack.path, path)
        outcomes.append((path, seen.loss, found, report, share))
    for one, other in zip(*outcomes, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_weights_from_inference_mode_are_named():
    with torch.inference_mode():
        model = nn.Linear(2, 2).eval()
    x, y = torch.rand(2, 2), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"made outside torch\.inference_mode"):
        pgd(model, x, y, norm="linf", epsilon=0.1, step_size=0.1, steps=1)
    assert all(p.requires_grad for p in model.parameters())


def test_weights_are_frozen_inside_and_spared_their_gradients():
    model, (x, y) = norm_network(), images(6, torch.float32)
    seen = set()
    model[4].register_forward_hook(
        lambda layer, *_: seen.add((layer.weight.requires_grad, torch.is_grad_enabled()))
    )
    pgd(model, x, y, norm="l2", epsilon=1, step_size=1, steps=1)
    assert (False, True) in seen
    assert (True, True) not in seen


# --- refusals -----------------------------------------------------------------------------------


class Answers(nn.Module):
    """Says what a function makes of the inputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.eval()

    def forward(self, x):
        return self.function(x)


def refusals():
    model, (x, y) = cnn(torch.float32), images(6, torch.float32)
    deep = norm_network()
    deep[1].train()
    dropping = norm_network()
    dropping.append(nn.AlphaDropout())
    dropping[-1].train()
    nan, infinite, outside = x.clone(), x.clone(), x.clone()
    nan[1, 0, 3, 3], infinite[2, 1, 0, 0], outside[0, 0, 0, 0] = math.nan, math.inf, 1.0 + 1e-6
    soft = nn.Sequential(cnn(torch.float32), nn.Softmax(dim=1)).eval()
    half = nn.Sequential(nn.Flatten(), linear(randn(10, 128, dtype=torch.bfloat16)), nn.Softmax(1))
    broken = Answers(lambda x: model(x) / 0)
    meta = copy.deepcopy(model).to("meta")
    return [
        (cnn(torch.float32).train(), x, y, {}, r"evaluation mode, call model\.eval\(\); its Class"),
        (deep, x, y, {}, "its BatchNorm2d is in training mode"),
        (dropping, x, y, {}, "its AlphaDropout is in training mode"),
        (soft, x, y, {}, "model must return logits; its outputs are probabilities"),
        (half.eval(), x.bfloat16(), y, {}, "its outputs are probabilities"),
        (broken, x, y, {}, "model must return finite logits; got inf or nan"),
        (
            Answers(lambda x: x),
            x,
            y,
            {},
            r"logits of shape \(samples, classes\), 2 or more; got \(",
        ),
        (Answers(lambda x: (model(x),)), x, y, {}, "2 or more; got tuple"),
        (Answers(lambda x: model(x)[:, :1]), x, y, {}, r"2 or more; got \(6, 1\)"),
        (Answers(lambda x: model(x)[:2]), x, y, {}, "got 2 rows for 6 inputs"),
        (None, x, y, {}, "model must be a torch module; got NoneType"),
        (nn.Linear, x, y, {}, "model must be a torch module; got the class Linear"),
        (lambda x: x, x, y, {}, "model must be a torch module; got function"),
        (model, x * 2, y, {}, r"x must lie in the box, 0 to 1; got \S+ to 1\.9\S+\. Put normal"),
        (model, x - 0.5, y, {}, r"x must lie in the box, 0 to 1; got -0\.\d+ to"),
        (model, outside, y, {}, r"got \S+ to 1\.00000\d+\. Put"),
        (model, x, y, {"box": (0.2, 1)}, r"x must lie in the box, 0\.2 to 1"),
        (model, nan, y, {}, "x must be finite; got inf or nan"),
        (model, infinite, y, {}, "x must be finite; got inf or nan"),
        (
            model,
            x.double(),
            y,
            {},
            r"of the model's type and .* torch\.float32 on cpu; got torch\.float64",
        ),
        (meta, x, y, {}, r"on its device, torch\.float32 on meta; got torch\.float32 on cpu"),
        (model, (255 * x).byte(), y, {}, "x must hold floating-point numbers; got torch.uint8"),
        (model, x[:0], y[:0], {}, "x must not be empty"),
        (model, x[:, :1], y, {}, r"x must fit the model, which refuses shape \(6, 1, 8, 8\): "),
        (model, x[0], y[:2], {}, r"x must fit the model, which refuses shape \(2, 8, 8\): "),
        (model, x.flatten(), y, {}, r"x must have shape \(samples, any\); got \(768,\)"),
        (model, "x", y, {}, "x must be a tensor or array of numbers; got str"),
        (model, x, y[:-1], {}, r"y must have shape \(6\); got \(5,\)"),
        (model, x, y[:, None], {}, r"y must have shape \(6\); got \(6, 1\)"),
        (model, x, y + 1, {}, r"y must lie in 0\.\.3, one label per sample; got 1\.\.4"),
        (model, x, y - 1, {}, r"y must lie in 0\.\.3, one label per sample; got -1\.\.2"),
        (model, x, y.float(), {}, "y must hold whole numbers; got torch.float32"),
        (model, x, y, {"box": (1, 0)}, r"box must be two finite numbers.* got \(1, 0\)"),
        (model, x, y, {"box": (0, math.inf)}, "box must be two finite numbers, the least first"),
        (model, x, y, {"box": (0, 1, 2)}, "box must be two finite numbers"),
        (model, x, y, {"box": 1}, "box must be two finite numbers, the least first; got 1"),
    ]


@pytest.mark.parametrize(("model", "x", "y", "options", "message"), refusals())
def test_what_every_attack_refuses(model, x, y, options, message):
    common = {"norm": "linf", "epsilon": 0.1} | options
    for call in (
        lambda: pgd(model, x, y, step_size=0.1, steps=1, **common),
        lambda: random_search(model, x, y, queries=1, **common),
        lambda: zero_gradient_share(model, x, y, **options),
        lambda: masking_report(model, x, y, steps=1, queries=1, **common),
        lambda: auto_attack(model, x, y, **common),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "Linf"}, r"norm must be one of linf, l2; got 'Linf'\. Did you mean 'linf'\?"),
        ({"norm": 2}, "norm must be one of linf, l2; got 2"),
        ({"epsilon": -0.1}, r"epsilon must be a finite number of at least 0; got -0\.1"),
        ({"epsilon": math.inf}, "epsilon must be a finite number of at least 0; got inf"),
        ({"epsilon": math.nan}, "epsilon must be a finite number of at least 0; got nan"),
        ({"epsilon": "8/255"}, "epsilon must be a finite number of at least 0; got '8/255'"),
        ({"step_size": 0}, "step_size must be a finite number above 0; got 0"),
        ({"step_size": math.nan}, "step_size must be a finite number above 0; got nan"),
        ({"steps": -1}, "steps must be a whole number of at least 0; got -1"),
        ({"steps": 1.5}, r"steps must be a whole number of at least 0; got 1\.5"),
        ({"loss": "cw"}, "loss must be one of ce, dlr, log-odds; got 'cw'"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1; got 0"),
        ({"random_start": True, "seed": -1}, "seed must be a whole number"),
    ],
)
def test_options_of_pgd_are_checked(options, message):
    model, (x, y) = cnn(torch.float32), images(2, torch.float32)
    with pytest.raises(ValueError, match=message):
        pgd(model, x, y, **({"norm": "l2", "epsilon": 1, "step_size": 1, "steps": 1} | options))


def test_other_options_are_checked():
    model, (x, y) = cnn(torch.float32), images(2, torch.float32)
    for options, message in (
        ({"queries": 0}, "queries must be a whole number of at least 1; got 0"),
        (
            {"seed": -1},
            "seed must be a whole number of at least 0|seed must be a whole number from",
        ),
        ({"seed": None}, "seed must be a whole number"),
    ):
        with pytest.raises(ValueError, match=message):
            random_search(model, x, y, **({"norm": "l2", "epsilon": 1} | options))
    for options, message in (
        ({"steps": 0}, "steps must be a whole number of at least 1; got 0"),
        ({"step_size": -1}, "step_size must be a finite number above 0; got -1"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1; got 0"),
        ({"queries": 0}, "queries must be a whole number of at least 1; got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            masking_report(model, x, y, **({"norm": "l2", "epsilon": 1, "steps": 1} | options))
    with pytest.raises(ValueError, match="loss must be one of ce, dlr"):
        zero_gradient_share(model, x, y, loss="l1")


# --- gradients that are not there ---------------------------------------------------------------


def rooted(weight):
    """Take the root of features before a linear layer: at 0 its slope is not a number."""
    head = linear(weight)
    return Answers(lambda x: head((x - x.clamp(max=0.5)).square().sum(1, keepdim=True).sqrt() * x))


def test_a_gradient_that_is_not_a_number_is_an_error_not_robustness():
    model, y = rooted(randn(3, 2)), torch.tensor([0, 1, 2])
    x = torch.tensor([[0.9, 0.9], [0.2, 0.3], [0.8, 0.1]], dtype=torch.float64)
    common = {"norm": "linf", "epsilon": 0.1}
    message = "model must have a loss and a gradient that are numbers; got nan at 1 of 3 inputs"
    for norm in NORMS:
        with pytest.raises(ValueError, match=message):
            pgd(model, x, y, norm=norm, epsilon=0.1, step_size=0.1, steps=1)
    with pytest.raises(ValueError, match=message):
        zero_gradient_share(model, x, y)
    assert_within(random_search(model, x, y, **common).x_adv, x, "linf", 0.1)
    healthy = pgd(model, x[[0, 2]], y[[0, 2]], step_size=0.1, steps=1, **common)
    assert (healthy.x_adv != x[[0, 2]]).any(dim=1).all()


def test_logits_that_break_down_behind_the_first_inputs_are_noticed():
    model = Answers(lambda x: torch.where(x > 0.9, math.inf, x) * 2)
    x = torch.full((200, 3), 0.5)
    x[170] = 0.95
    y = torch.zeros(200).long()
    with pytest.raises(ValueError, match="got nan at 1 of 72 inputs"):
        pgd(model, x, y, norm="linf", epsilon=0.1, step_size=0.1, steps=1)
    with pytest.raises(ValueError, match="finite logits"):
        random_search(model, x, y, norm="linf", epsilon=0.1)
    with pytest.raises(ValueError, match=r"finite logits|got nan at 1"):
        masking_report(model, x, y, norm="linf", epsilon=0.1, steps=1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.from_numpy(3 * x.detach().numpy()),
        lambda x: torch.arange(4.0).expand(len(x), 4),
        lambda x: torch.arange(4.0, requires_grad=True).expand(len(x), 4),
    ],
)
def test_a_model_without_gradients_is_named(function):
    x, y = rand(3, 4, dtype=torch.float32), torch.zeros(3).long()
    with pytest.raises(ValueError, match="model must be differentiable"):
        pgd(Answers(function), x, y, norm="linf", epsilon=0.1, step_size=0.1, steps=1)
    with pytest.raises(ValueError, match="model must be differentiable"):
        zero_gradient_share(Answers(function), x, y)
    found = random_search(Answers(function), x, y, norm="linf", epsilon=0.1, queries=2)
    assert_within(found.x_adv, x, "linf", 0.1)


def test_the_gradient_is_that_of_autograd():
    model, (x, y) = cnn(), images()
    expected = plain_gradient(model, y, "ce")(x)
    got = input_gradient(model, x, y, lambda z, t: cross_entropy(z, t, reduction="none"))
    assert_close(got, expected)
    assert not got.requires_grad


@pytest.mark.parametrize(("dtype", "edge"), [(torch.float32, 16.6), (torch.float64, 36.7)])
def test_a_label_is_saturated_where_its_part_of_the_gradient_is_zero(dtype, edge):
    gaps = torch.linspace(0, 2 * edge, 400, dtype=torch.float64).to(dtype)
    logits = torch.stack([gaps, torch.zeros_like(gaps), -gaps], dim=1)
    y = torch.zeros(400).long()
    logits.requires_grad_()
    (slope,) = torch.autograd.grad(cross_entropy(logits, y, reduction="sum"), logits)
    found = saturated(logits.detach(), y)
    assert torch.equal(found, slope[:, 0] == 0)
    assert torch.equal(found, gaps > gaps[~found].max())  # all beyond some gap
    assert gaps[found].min().item() == pytest.approx(edge, abs=0.2)
    assert (slope[found, 1] > 0).all()  # the others live on
    assert not saturated(logits.detach(), y + 1)[1:].any()
    with pytest.raises(ValueError, match=r"y must have shape \(400\); got \(3,\)"):
        saturated(logits.detach(), y[:3])
    with pytest.raises(ValueError, match="logits must be finite"):
        saturated(logits.detach() / 0, y)


def test_the_share_of_zero_gradients():
    x = torch.tensor([[1.0, 0.0], [0.9, 0.2], [0.6, 0.5], [0.5, 0.5], [0.0, 1.0]])
    y = torch.zeros(5).long()
    # p_wrong vanishes in float32 where the gap of 200 Δx exceeds 104 nats, in float64 at 746.
    model = linear(200 * torch.eye(2))
    assert zero_gradient_share(model, x, y) == 0.4
    assert zero_gradient_share(model, x, y, batch_size=2) == 0.4
    assert zero_gradient_share(model.double(), x.double(), y) == 0
    assert zero_gradient_share(linear(800 * torch.eye(2).double()), x.double(), y) == 0.2
    attack = pgd(model.float(), x, y, norm="linf", epsilon=0.1, step_size=0.1, steps=3)
    assert torch.equal(
        (attack.x_adv == x).all(dim=1), torch.tensor([1, 1, 0, 0, 1]).bool()
    )  # the last is in its corner
    steps = Answers(lambda x: (4 * x).round() + 0 * x)
    assert zero_gradient_share(steps, x, y) == 1
    several = linear(1e4 * torch.eye(3))
    x3 = rand(50, 3, dtype=torch.float32)
    y3 = several(x3).argmax(dim=1)
    assert zero_gradient_share(several, x3, y3) > 0.9
    assert zero_gradient_share(several, x3, y3, loss="dlr") == 0
    assert zero_gradient_share(several, x3, y3, loss="log-odds") == 0


# --- on a trained network -----------------------------------------------------------------------

STRONG = {"epsilon": 0.1, "step_size": 0.025, "steps": 10}


def test_attacks_succeed_on_a_trained_network(digits):
    """The positive control: the attack fools it, noise of the same size does not."""
    model, x, y = digits
    assert accuracy(model, x, y) > 0.95
    signs = 0.1 * randn(*x.shape).sign().float()
    assert accuracy(model, (x + signs).clamp(0, 1), y) > 0.9
    for loss in LOSSES:
        attacked = pgd(model, x, y, norm="linf", loss=loss, **STRONG).x_adv
        assert accuracy(model, attacked, y) < 0.6
        assert_within(attacked, x, "linf", 0.1)
    stronger = STRONG | {"epsilon": 0.3, "step_size": 0.075}
    attacked = pgd(model, x, y, norm="linf", **stronger).x_adv
    assert accuracy(model, attacked, y) < 0.05
    attacked = pgd(model, x, y, norm="l2", epsilon=1.0, step_size=0.25, steps=10).x_adv
    assert accuracy(model, attacked, y) < 0.3
    noise = randn(*x.shape, dtype=torch.float32)
    noise /= length(noise).view(-1, 1, 1, 1)
    assert accuracy(model, (x + noise).clamp(0, 1), y) > 0.9


def test_the_loss_rises_along_the_path(digits):
    model, x, y = digits
    path = pgd(model, x, y, norm="l2", epsilon=1, step_size=0.05, steps=15, record=True).path
    loss = walk(model, path, y).loss.mean(dim=1)
    assert (loss.diff() > 0).all()
    assert loss[-1] > 10 * loss[0]


def test_confidence_masks_the_gradient_and_nothing_else(digits):
    """The table of the chapter on masking in small."""
    model, x, y = digits
    found = {}
    for s in (1, 10, 100):
        twin, wide = scaled(model, s), scaled(model, s).double()
        common = {"norm": "linf"} | STRONG
        found[s] = {
            "clean": accuracy(twin, x, y),
            "ce": accuracy(twin, pgd(twin, x, y, **common).x_adv, y),
            "ce64": accuracy(wide, pgd(wide, x.double(), y, **common).x_adv, y),
            "dlr": accuracy(twin, pgd(twin, x, y, loss="dlr", **common).x_adv, y),
            "odds": accuracy(twin, pgd(twin, x, y, loss="log-odds", **common).x_adv, y),
            "odds64": accuracy(wide, pgd(wide, x.double(), y, loss="log-odds", **common).x_adv, y),
            "transfer": accuracy(twin, pgd(model, x, y, **common).x_adv, y),
            "zero": zero_gradient_share(twin, x, y),
        }
    assert len({row["clean"] for row in found.values()}) == 1
    assert found[1]["ce"] == found[1]["ce64"] == found[1]["transfer"] < 0.6
    assert found[1]["ce"] + 0.1 < found[10]["ce"] < found[100]["ce"] - 0.1
    assert found[100]["ce"] > 0.95 * found[100]["clean"]
    assert found[10]["ce64"] < found[10]["ce"]
    assert found[1]["ce"] + 0.1 < found[100]["ce64"] < found[100]["ce"] - 0.1
    for row in found.values():
        assert row["odds"] == pytest.approx(row["odds64"], abs=0.011)
    assert found[1]["odds"] == found[1]["ce"]
    assert found[100]["odds"] == pytest.approx(found[10]["odds"], abs=0.05)
    assert found[100]["odds"] < found[100]["ce64"] - 0.1
    assert len({row["dlr"] for row in found.values()}) == 1
    assert len({row["transfer"] for row in found.values()}) == 1
    assert found[1]["zero"] == 0 < found[10]["zero"] < found[100]["zero"]
    assert found[100]["zero"] > 0.9


@pytest.mark.parametrize("norm", NORMS)
def test_the_path_of_dlr_is_that_of_the_scaled_classifier(digits, norm):
    model, x, y = digits
    options = {"norm": norm, "loss": "dlr", "record": True} | STRONG
    path = pgd(model, x, y, **options).path
    assert (path[-1] != x).any()
    # A power of two rounds nothing.
    assert torch.equal(pgd(scaled(model, 64), x, y, **options).path, path)
    wide = copy.deepcopy(model).double()
    path = pgd(wide, x.double(), y, **options).path
    assert_close(pgd(scaled(wide, 0.3), x.double(), y, **options).path, path, rtol=0, atol=1e-9)


# --- scaled -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "small-cnn", "resnet18"])
@pytest.mark.parametrize("s", [1e-3, 1, 7, 1e3])
def test_scaled_multiplies_the_logits(name, s):
    model = build(name, num_classes=5, in_channels=1, width=4, input_shape=(1, 8, 8), seed=0)
    model.eval().double()
    model.head.bias.data = randn(5)
    before = copy.deepcopy(model.state_dict())
    x = rand(20, 1, 8, 8)
    state = torch.get_rng_state()
    twin = scaled(model, s)
    assert torch.equal(state, torch.get_rng_state())
    assert_close(twin(x), s * model(x), rtol=1e-12, atol=1e-12 * s)
    assert torch.equal(twin(x).argmax(dim=1), model(x).argmax(dim=1))
    assert torch.equal(twin.features(x), model.features(x))
    assert list(twin.state_dict()) == list(before)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    shared = {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in twin.parameters()}
    assert not shared
    assert (twin.training, twin.head.training) == (False, False)
    assert scaled(model.train(), s).head.training
    assert isinstance(twin.head, nn.Linear)
    assert (twin.head.in_features, twin.head.out_features) == (model.head.in_features, 5)
    clone = build(name, num_classes=5, in_channels=1, width=4, input_shape=(1, 8, 8)).double()
    clone.load_state_dict(twin.state_dict())
    assert_close(clone.eval()(x), s * model.eval()(x), rtol=1e-12, atol=1e-12 * s)


def test_scaled_heads_of_every_make():
    x = rand(6, 4)
    model = build("mlp", num_classes=3, width=5, input_shape=(4,), seed=0).eval().double()
    model.head.weight.requires_grad_(False)
    flags = {name: p.requires_grad for name, p in scaled(model, 2).named_parameters()}
    assert flags == {name: p.requires_grad for name, p in model.named_parameters()}
    model.head = nn.Linear(5, 3, bias=False).double().eval()
    twin = scaled(model, np.float32(2))
    assert twin.head.bias is None
    assert_close(twin(x), 2 * model(x))
    model.head = nn.utils.parametrizations.weight_norm(nn.Linear(5, 3).double()).eval()
    twin = scaled(model, 3.0)
    assert_close(twin(x), 3 * model(x))
    assert not nn.utils.parametrize.is_parametrized(twin.head)
    assert nn.utils.parametrize.is_parametrized(model.head)

    class Cosine(nn.Linear):
        def forward(self, features):
            return features @ nn.functional.normalize(self.weight).T

    model.head = Cosine(5, 3).double()
    with pytest.raises(
        ValueError, match=r"model must have a head that is linear.* Cosine has a fo"
    ):
        scaled(model, 2)
    with pytest.raises(ValueError, match="model must have a linear head to scale; got Linear"):
        scaled(nn.Linear(2, 2), 2)
    for wrong in (0, -1, math.nan, math.inf, "2", True):
        with pytest.raises(ValueError, match="s must be a finite number above 0"):
            scaled(build("mlp", num_classes=3, input_shape=(4,)), wrong)
    with pytest.raises(ValueError, match="model must be a torch module"):
        scaled(None, 2)


@pytest.mark.parametrize("s", [1e300, 1e39, 1e-300])
def test_scaled_heads_must_stay_numbers(s):
    model = build("mlp", num_classes=3, width=5, input_shape=(4,), seed=0).eval()
    with pytest.raises(ValueError, match="s must neither make the weight of the head infinite in"):
        scaled(model, s)
    nn.init.zeros_(model.head.bias)
    assert scaled(model, 1e30)(rand(2, 4).float()).isfinite().all()
    assert scaled(model.double(), 1e300).head.weight.isfinite().all()


# --- random search ------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 6, 5), (7,), (4, 3)])
def test_random_search_proposes_inside_and_never_loses(norm, dtype, shape):
    x, y = rand(8, *shape, dtype=dtype), torch.arange(8) % 3
    x[0], x[1] = 0, 1
    inner = linear(randn(3, x[0].numel(), dtype=dtype))
    asked = []
    model = Answers(lambda x: inner((asked.append(x), x)[1].flatten(1)))
    found = random_search(model, x, y, norm=norm, epsilon=0.1, queries=30).x_adv
    proposals = [batch for batch in asked if len(batch) == 8]
    assert len(proposals) == 32  # the check at the door, the start, and one a query
    for proposal in proposals:
        assert proposal.shape == x.shape
        assert_within(proposal, x, norm, 0.1)
    assert_within(found, x, norm, 0.1)
    margins = torch.stack([margin(inner(batch.flatten(1)), y) for batch in proposals])
    assert torch.equal(margin(inner(found.flatten(1)), y), margins.amin(dim=0))
    assert (margins[-1] > margins.amin(dim=0)).any()
    assert (margins.amin(dim=0) < margins[0]).sum() >= 6


def test_random_search_finds_the_worst_case_of_features():
    weight, x, y = randn(2, 5), 0.5 + 0.05 * randn(6, 5), torch.arange(6) % 2
    difference = weight[0] - weight[1]
    found = random_search(linear(weight), x, y, norm="linf", epsilon=0.2, queries=400).x_adv
    change = margin(linear(weight)(x), y) - margin(linear(weight)(found), y)
    assert_close(change, (0.2 * difference.abs().sum()).expand(6))
    found = random_search(linear(weight), x, y, norm="l2", epsilon=0.2, queries=1000).x_adv
    change = margin(linear(weight)(x), y) - margin(linear(weight)(found), y)
    assert (change > 0.85 * 0.2 * difference.norm()).all()
    assert (change <= 0.2 * difference.norm() + 1e-12).all()


def test_random_search_finds_the_worst_case_of_images():
    """Pixel by pixel, for a weight that differs in sign from channel to channel."""
    weight, x, y = randn(3, 18), 0.5 + 0.05 * randn(4, 2, 3, 3), torch.arange(4) % 2
    weight[2] = 0
    model = nn.Sequential(nn.Flatten(), linear(weight, [0.0, 0.0, -100.0])).eval()
    found = random_search(model, x, y, norm="linf", epsilon=0.2, queries=1500).x_adv
    change = margin(model(x), y) - margin(model(found), y)
    assert_close(change, (0.2 * (weight[0] - weight[1]).abs().sum()).expand(4))


def test_random_search_is_fixed_by_its_seed(digits):
    model, x, y = digits
    options = {"norm": "linf", "epsilon": 0.2, "queries": 150}
    first = random_search(model, x, y, **options).x_adv
    assert torch.equal(random_search(model, x, y, **options).x_adv, first)
    assert not torch.equal(random_search(model, x, y, seed=1, **options).x_adv, first)
    last = x.to(memory_format=torch.channels_last)
    assert_close(random_search(model, last, y, **options).x_adv, first)
    assert accuracy(model, first, y) < 0.5
    # What hides the gradient hides nothing from a search.
    hidden = scaled(model, 1000)
    assert zero_gradient_share(hidden, x, y) > 0.9
    assert accuracy(hidden, random_search(hidden, x, y, **options).x_adv, y) < 0.5


# --- along a path -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["neuronwise", "frobenius"])
def test_a_walk_is_the_plain_computation(kind):
    model, path, y = cnn(classes=3), rand(4, 5, 2, 8, 8), torch.tensor([0, 1, 2, 0, 1])
    seen = walk(model, path, y, kind=kind)
    with torch.no_grad():
        for step, sample in np.ndindex(4, 5):
            x = path[step, sample][None]
            phi, z = model.features(x), model(x)
            expected = {
                "loss": cross_entropy(z, y[sample : sample + 1]),
                "sharpness": relative_sharpness(model.head.weight, phi, z, kind=kind)[0],
                "doubt": doubt(z)[0],
                "predicted": z.argmax(),
                "right": z.argmax() == y[sample],
            }
            for name, value in expected.items():
                assert_close(getattr(seen, name)[step, sample], value)
    for name in expected:
        assert getattr(seen, name).shape == (4, 5)
    for batch_size in (1, 3, 20):
        again = walk(model, path, y, kind=kind, batch_size=batch_size)
        assert_close(vars(again), vars(seen))
    assert not seen.loss.requires_grad
    assert_close(vars(walk(model, path.numpy(), y.numpy(), kind=kind)), vars(seen))
    assert torch.equal(seen.flipped, first_step(seen.predicted != y))
    assert torch.equal(seen.peak, seen.sharpness.argmax(dim=0))


def test_a_walk_refuses_what_it_cannot_take():
    model, path, y = cnn(classes=3), rand(4, 5, 2, 8, 8), torch.tensor([0, 1, 2, 0, 1])
    nan = path.clone()
    nan[2, 1] = math.nan
    resting = build("resnet18", num_classes=3, in_channels=2, width=2, seed=0).double().eval()
    resting.body[1].train()
    for arguments, options, message in (
        ((model, path[..., :1, :, :], y), {}, r"path must fit .* refuses shape \(5, 1, 8, 8\): "),
        ((model, path[0, 0, 0], y), {}, r"path must have shape \(steps, samples, any\)"),
        ((model, path, y[:4]), {}, r"y must have shape \(5\); got \(4,\)"),
        ((model, path, y + 1), {}, r"y must lie in 0\.\.2"),
        ((model, nan, y), {}, "path must be finite"),
        (
            (model, path.float(), y),
            {},
            r"path must be of the model's type .* torch\.float64 on cpu; got torch\.float32",
        ),
        ((cnn(classes=3).train(), path, y), {}, r"call model\.eval\(\); its Classifier is in trai"),
        ((resting, path, y), {}, "its BatchNorm2d is in training mode"),
        ((nn.Linear(2, 2), path, y), {}, "model must have features and a linear head; got Linear"),
        ((None, path, y), {}, "model must be a torch module; got NoneType"),
        ((model, path, y), {"kind": "flat"}, "kind must be one of neuronwise, frobenius"),
        ((model, path, y), {"batch_size": 0}, "batch_size must be a whole number"),
    ):
        with pytest.raises(ValueError, match=message):
            walk(*arguments, **options)


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 5))
@settings(max_examples=40)
def test_the_first_step(seed, steps, samples):
    happened = rand(steps, samples, seed=seed) < 0.3
    expected = [next((t for t in range(steps) if happened[t, i]), -1) for i in range(samples)]
    assert first_step(happened).tolist() == expected
    assert first_step(happened.numpy()).tolist() == expected
    assert first_step(happened.long()).tolist() == expected


def test_the_first_step_needs_steps_of_samples():
    with pytest.raises(ValueError, match=r"happened must have shape \(steps, samples\); got \(3,"):
        first_step(torch.zeros(3).bool())


# --- detection ----------------------------------------------------------------------------------


def stump(values, truth):
    """Return the threshold of least Gini impurity and the answer on each side of it."""
    levels = sorted(set(values))
    best = (math.inf, None)
    for low, high in itertools.pairwise(levels):
        cut = (low + high) / 2
        sides = [
            [t for v, t in zip(values, truth, strict=True) if (v > cut) == up] for up in (0, 1)
        ]
        impurity = sum(2 * sum(side) * (len(side) - sum(side)) / len(side) for side in sides)
        answers = [sum(side) > len(side) / 2 for side in sides]
        best = min(best, (impurity, (cut, answers)), key=lambda pair: pair[0])
    return best[1]


def test_detection_is_a_stump_whose_folds_keep_twins_together():
    from sklearn.model_selection import GroupKFold

    clean, attacked = randn(37), randn(37, seed=1) + 0.8
    found = detect(clean, attacked, folds=4, seed=3)
    values, truth = torch.cat([clean, attacked]).tolist(), [0] * 37 + [1] * 37
    groups = [*range(37), *range(37)]
    ranks = [sorted(values).index(value) for value in values]
    expected = []
    split = GroupKFold(4, shuffle=True, random_state=3).split(values, truth, groups)
    for train, test in split:
        assert not {groups[i] for i in train} & {groups[i] for i in test}
        cut, answers = stump([ranks[i] for i in train], [truth[i] for i in train])
        right = [answers[ranks[i] > cut] == truth[i] for i in test]
        expected.append(sum(right) / len(right))
    assert found.accuracies == pytest.approx(expected)
    pairs = [(a > c) + 0.5 * (a == c) for a in values[37:] for c in values[:37]]
    assert found.auc == pytest.approx(sum(pairs) / len(pairs))
    assert detect(clean, attacked, folds=4, seed=3) == found
    assert detect(clean.numpy(), attacked.float(), folds=4, seed=3).auc == pytest.approx(found.auc)
    assert detect(attacked, clean).auc == pytest.approx(1 - found.auc)


def test_detection_sees_what_single_precision_would_round_away():
    clean, attacked = 1e-60 * (1 + rand(20)), 1e-50 * (1 + rand(20))
    near = 1 + 1e-12 * rand(20)
    for pair in ((clean, attacked), (near, near + 2e-12)):
        assert detect(*pair).auc == 1
        # A threshold among ranks can miss the one input next to it in a fold.
        assert min(detect(*pair).accuracies) >= 0.875
        assert np.mean(detect(*pair).accuracies) >= 0.95
    noise = detect(randn(500), randn(500, seed=1))  # the negative control
    assert abs(np.mean(noise.accuracies) - 0.5) < 0.08
    assert abs(noise.auc - 0.5) < 0.08


def test_detection_takes_numbers_that_have_a_gradient():
    clean = torch.zeros(10, requires_grad=True)
    assert detect(clean, torch.ones(10)).auc == 1


def test_detection_leaves_the_global_generators_alone():
    before = states()
    detect(randn(20), randn(20, seed=1))
    assert states() == before


def test_detection_refuses_what_it_cannot_take():
    for arguments, options, message in (
        ((randn(5), randn(6)), {}, r"attacked must have shape \(5\); got \(6,\)"),
        ((randn(5, 1), randn(5)), {}, r"clean must have shape \(samples\)"),
        ((randn(5), randn(5).log()), {}, "attacked must be finite"),
        ((randn(4), randn(4)), {}, "folds must be a whole number from 2 to 4; got 5"),
        ((randn(4), randn(4)), {"folds": 1}, "folds must be a whole number from 2 to 4; got 1"),
        ((randn(9), randn(9)), {"seed": -1}, "seed must be a whole number"),
    ):
        with pytest.raises(ValueError, match=message):
            detect(*arguments, **options)


# --- the report ---------------------------------------------------------------------------------

NAMES = ["ce", "ce float64", "log-odds", "dlr", "transfer", "random search"]


def test_the_report_tells_masked_gradients_from_robustness(digits):
    model, x, y = digits
    options = {"norm": "linf", "epsilon": 0.1, "steps": 10}
    open_, hidden = (masking_report(scaled(model, s), x, y, **options) for s in (1, 100))
    assert list(open_.robust) == list(hidden.robust) == NAMES
    assert open_.clean == hidden.clean == accuracy(model, x, y)
    # The negative control: nothing is masked, and the plain attack is as good as any.
    assert open_.zero_gradient_share == 0
    assert open_.masked < 0.05
    assert open_.robust["ce"] == open_.robust["ce float64"]
    # The positive control.
    assert hidden.zero_gradient_share > 0.9
    assert hidden.masked > 0.4
    assert hidden.robust["ce"] > 0.9
    assert hidden.robust["ce float64"] < hidden.robust["ce"] - 0.05
    assert hidden.strongest == "log-odds"
    assert (open_.saturated_share, hidden.saturated_share) == pytest.approx((0, 0.98), abs=0.1)
    assert hidden.robust["log-odds"] < hidden.robust["ce"] - 0.1
    for name in ("dlr", "transfer", "random search"):
        assert hidden.robust[name] == pytest.approx(open_.robust[name], abs=0.011)
    assert hidden.temperature == pytest.approx(100 * open_.temperature, rel=1e-3)
    assert hidden.masked == hidden.robust["ce"] - min(hidden.robust.values())


def test_the_report_is_made_of_the_attacks(digits):
    model, x, y = digits
    model, x, y = scaled(model, 3), x[:40], y[:40]
    options = {"norm": "l2", "epsilon": 0.5}
    climb = {"step_size": 2.5 * 0.5 / 8, "steps": 8} | options
    report = masking_report(model, x, y, steps=8, queries=20, seed=4, **options)
    with torch.no_grad():
        first, second = model(x).double().topk(2, dim=1).values.T
    assert report.temperature == pytest.approx((first - second).median().item(), rel=1e-6)
    cooler = scaled(model, 1 / report.temperature)
    wide = copy.deepcopy(model).double()
    search = random_search(model, x, y, queries=20, seed=4, **options).x_adv
    expected = {
        "ce": pgd(model, x, y, **climb).x_adv,
        "ce float64": pgd(wide, x.double(), y, **climb).x_adv.float(),
        "log-odds": pgd(model, x, y, loss="log-odds", **climb).x_adv,
        "dlr": pgd(model, x, y, loss="dlr", **climb).x_adv,
        "transfer": pgd(cooler, x, y, **climb).x_adv,
        "random search": search,
    }
    assert report.robust == {name: accuracy(model, found, y) for name, found in expected.items()}
    assert report.zero_gradient_share == zero_gradient_share(model, x, y)
    assert report.saturated_share == saturated(model(x), y).double().mean().item()
    own = masking_report(model, x, y, steps=8, step_size=0.01, queries=20, batch_size=7, **options)
    assert own.robust["ce"] > report.robust["ce"]
    lines = report.table().splitlines()
    assert lines[:3] == [
        "| attack | accuracy, % |",
        "|---|---|",
        f"| no attack | {100 * report.clean:.1f} |",
    ]
    assert lines[3:] == [f"| {name} | {100 * v:.1f} |" for name, v in report.robust.items()]


class Watching(nn.Module):
    """Notes what it is asked; copies note it for themselves."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.asked = inner, []
        self.eval()

    def forward(self, x):
        self.asked.append(x.detach())
        return self.inner(x)


@pytest.mark.parametrize(("norm", "epsilon"), [("linf", 0.1), ("l2", 0.7)])
def test_the_report_judges_inputs_inside_the_ball(digits, norm, epsilon):
    """Those of the attack in float64 too, though rounding them alone could leave it."""
    model, x, y = digits
    model, x, y = Watching(model), x[:20], y[:20]
    masking_report(model, x, y, norm=norm, epsilon=epsilon, steps=3, queries=3)
    assert len(model.asked) > 20
    for asked in model.asked:
        assert_within(asked, x, norm, epsilon)


def test_the_report_of_a_model_that_knows_no_float64():
    class Rounding(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x):
            return self.inner(x.float())

    x, y = torch.rand(5, 4, generator=generator(0)), torch.arange(5) % 3
    report = masking_report(Rounding().eval(), x, y, norm="linf", epsilon=0.1, steps=2, queries=2)
    assert list(report.robust) == ["ce", "log-odds", "dlr", "transfer", "random search"]


def test_the_report_of_other_models(digits):
    model, x, y = digits
    wide = copy.deepcopy(model).double()
    options = {"norm": "linf", "epsilon": 0.1, "steps": 5, "queries": 5}
    report = masking_report(wide, x.double(), y, **options)
    assert list(report.robust) == ["ce", "log-odds", "dlr", "transfer", "random search"]
    two = linear(randn(2, 6, dtype=torch.float32))
    features = rand(30, 6, dtype=torch.float32)
    labels = two(features).argmax(dim=1)
    report = masking_report(two, features, labels, **options)
    assert list(report.robust) == ["ce", "ce float64", "log-odds", "transfer", "random search"]
    assert (report.clean, report.masked) == (1, 0)
    reach = 0.1 * (two.weight[0] - two.weight[1]).abs().sum()
    exact = (margin(two(features), labels) > reach).double().mean().item()
    assert exact <= report.robust["ce"] <= exact + 0.15  # the box holds some of them back
    still = masking_report(two, features, labels, **(options | {"epsilon": 0}))
    assert set(still.robust.values()) == {1.0}
    equal = linear(torch.zeros(3, 6), [0.0, 0.0, 0.0])  # no gap to divide by
    assert masking_report(equal, features, labels, **options).temperature == 1


# --- AutoAttack ---------------------------------------------------------------------------------


@pytest.fixture
def referee():
    return pytest.importorskip("pyautoattack")


@pytest.mark.parametrize("norm", NORMS)
def test_autoattack_is_no_weaker_than_pgd_and_stays_inside(digits, referee, norm):
    model, x, y = digits
    epsilon = {"linf": 0.15, "l2": 0.7}[norm]
    options = {"norm": norm, "epsilon": epsilon}
    attacked = pgd(model, x, y, step_size=epsilon / 4, steps=20, **options).x_adv
    # Some inputs that PGD reaches, and for linf, where it is quick, one that it does not.
    held = model(attacked).argmax(dim=1) == y
    spared = 1 if norm == "linf" else 0
    chosen = torch.cat([held.nonzero()[:spared, 0], (~held).nonzero()[: 6 - spared, 0]])
    assert len(chosen) == 6
    before = states()
    flags = [p.requires_grad for p in model.parameters()]
    found = auto_attack(model, x[chosen], y[chosen], **options).x_adv
    assert_within(found, x[chosen], norm, epsilon)
    assert accuracy(model, found, y[chosen]) <= spared / 6
    assert states() == before
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())


def test_autoattack_takes_four_classes_and_sees_through_masks(referee):
    weight = randn(4, 12, dtype=torch.float32)
    model = nn.Sequential(nn.Flatten(), linear(weight)).eval()
    x = 0.4 + 0.2 * rand(8, 3, 2, 2, dtype=torch.float32)
    y = model(x).argmax(dim=1)
    for s in (1, 1000):
        model[1].weight.data = s * weight
        found = auto_attack(model, x, y, norm="linf", epsilon=0.3)
        assert (found.path, found.steps) == (None, ())
        assert accuracy(model, found.x_adv, y) == 0
        assert_within(found.x_adv, x, "linf", 0.3)
    assert torch.equal(auto_attack(model, x, y, norm="linf", epsilon=0).x_adv, x)


def test_autoattack_takes_weights_and_images_with_the_channels_last(referee):
    model = cnn(torch.float32).to(memory_format=torch.channels_last)
    x = rand(4, 2, 8, 8, dtype=torch.float32).contiguous(memory_format=torch.channels_last)
    y = model(x).argmax(dim=1)
    found = auto_attack(model, x, y, norm="linf", epsilon=0.5).x_adv
    assert_within(found, x, "linf", 0.5)
    assert accuracy(model, found, y) == 0


def test_autoattack_refuses_what_it_cannot_take(monkeypatch):
    model, (x, y) = cnn(torch.float32), images(4, torch.float32)
    common = {"norm": "linf", "epsilon": 0.1}
    three = cnn(torch.float32, classes=3)
    for arguments, options, message in (
        ((three, x, y % 3), {}, "model must have at least 4 classes for AutoAttack; got 3"),
        ((cnn(), x.double(), y), {}, r"x must be images in float32 for AutoAttack.* got torch\.fl"),
        ((linear(torch.ones(4, 5)), torch.rand(4, 5), y), {}, r"x must be images.* shape \(4, 5\)"),
        ((model, x, y), {"box": (-1, 1)}, r"box must be \(0\.0, 1\.0\) for AutoAttack"),
        ((model, x, y), {"batch_size": 0}, "batch_size must be a whole number"),
    ):
        with pytest.raises(ValueError, match=message):
            auto_attack(*arguments, **(common | options))
    monkeypatch.setitem(sys.modules, "pyautoattack", None)
    with pytest.raises(ImportError, match=r"needs pyautoattack.*pip install flatbook\[attacks\]"):
        auto_attack(model, x, y, **common)
