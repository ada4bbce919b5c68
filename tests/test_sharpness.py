"""Closed forms of the last layer against autograd, against 400 digits, and as theorems."""

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.functional import hessian
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from flatbook import models, sharpness
from flatbook.sharpness import (
    hessian_eigenvalues,
    hessian_trace,
    last_layer_hessian,
    last_layer_top_eigenvalue,
    relative_sharpness,
    sharpness_of,
)

KINDS = ("neuronwise", "frobenius")


def layer(seed=0, *, samples=5, classes=3, width=4, scale=1.0, dtype=torch.float64):
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(classes, width, generator=random, dtype=torch.float64)
    bias = torch.randn(classes, generator=random, dtype=torch.float64)
    features = torch.randn(samples, width, generator=random, dtype=torch.float64)
    labels = torch.randint(classes, (samples,), generator=random)
    return scale * weight.to(dtype), scale * bias.to(dtype), features.to(dtype), labels


@st.composite
def layers(draw):
    sizes = {
        "samples": draw(st.integers(1, 6)),
        "classes": draw(st.integers(2, 6)),
        "width": draw(st.integers(1, 5)),
        "scale": draw(st.sampled_from([0.01, 0.3, 1.0, 3.0, 20.0])),
    }
    return layer(draw(st.integers(0, 2**32)), **sizes)


# --- the definition: autograd's Hessian --------------------------------------------------------


def autograd_hessian(weight, bias, features, labels):
    def loss(w):
        return cross_entropy(features @ w.T + bias, labels)

    return hessian(loss, weight)


@given(layers())
def test_last_layer_hessian_is_autograds(case):
    weight, bias, features, _ = case
    expected = autograd_hessian(*case).reshape(weight.numel(), weight.numel())
    got = last_layer_hessian(features, features @ weight.T + bias)
    assert_close(got, expected, rtol=1e-12, atol=1e-12 * expected.abs().max().item() + 1e-14)


@given(layers())
def test_last_layer_hessian_with_bias_is_autograds(case):
    weight, bias, features, labels = case

    def loss(extended):
        return cross_entropy(features @ extended[:, :-1].T + extended[:, -1], labels)

    extended = torch.cat([weight, bias[:, None]], dim=1)
    expected = hessian(loss, extended).reshape(extended.numel(), extended.numel())
    got = last_layer_hessian(features, features @ weight.T + bias, bias=True)
    assert_close(got, expected, rtol=1e-12, atol=1e-12 * expected.abs().max().item() + 1e-14)


def trained_network():
    model = models.build("mlp", num_classes=3, width=6, input_shape=(4,), seed=0).double()
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    assert loss < 0.1  # the head is confident, so cancellation would show
    return model, x, y


def test_trained_network_to_twelve_digits():
    model, x, y = trained_network()
    with torch.no_grad():
        features = model.features(x)
        logits = model.head(features)
    weight, bias = model.head.weight.detach(), model.head.bias.detach()
    blocks = autograd_hessian(weight, bias, features, y)
    order = weight.numel()
    assert_close(
        last_layer_hessian(features, logits), blocks.view(order, order), rtol=1e-12, atol=1e-12
    )
    traces = torch.einsum("sdtd->st", blocks)
    assert_close(hessian_trace(features, logits).mean(), traces.trace(), rtol=1e-12, atol=0)
    kappa = relative_sharpness(weight, features, logits)
    assert_close(kappa.mean(), (weight @ weight.T * traces).sum(), rtol=1e-11, atol=0)
    kappa = relative_sharpness(weight, features, logits, kind="frobenius")
    assert_close(kappa.mean(), weight.square().sum() * traces.trace(), rtol=1e-12, atol=0)
    assert_close(sharpness_of(model, x), relative_sharpness(weight, features, logits))


@given(layers(), st.booleans())
def test_trace_and_eigenvalues_are_those_of_the_matrix(case, bias):
    weight, offset, features, _ = case
    logits = features @ weight.T + offset
    traces = hessian_trace(features, logits, bias=bias)
    values = hessian_eigenvalues(features, logits, bias=bias)
    classes = len(weight)
    for i in range(len(features)):
        matrix = last_layer_hessian(features[i : i + 1], logits[i : i + 1], bias=bias)
        assert_close(traces[i], matrix.trace(), rtol=1e-12, atol=1e-300)
        spectrum = torch.linalg.eigvalsh(matrix)
        scale = spectrum.abs().max().item() + 1e-300
        rest = len(spectrum) - classes
        assert_close(values[i], spectrum[rest:], rtol=0, atol=1e-12 * scale)
        assert (spectrum[:rest].abs() <= 1e-12 * scale).all()
    assert (values[:, 0] == 0).all()
    assert (values >= 0).all()
    assert (values.diff(dim=1) >= 0).all()
    assert_close(values.sum(dim=1), traces, rtol=1e-10, atol=1e-300)


@given(layers(), st.booleans())
def test_top_eigenvalue_of_the_layer_is_that_of_the_matrix(case, bias):
    weight, offset, features, _ = case
    logits = features @ weight.T + offset
    matrix = last_layer_hessian(features, logits, bias=bias)
    expected = torch.linalg.eigvalsh(matrix)[-1].item()
    top = last_layer_top_eigenvalue(features, logits, bias=bias)
    assert top.value == pytest.approx(expected, rel=1e-9)
    assert top.residual <= 1e-5 * expected
    again = last_layer_top_eigenvalue(features, logits, bias=bias)
    assert again == top


# --- 400 digits --------------------------------------------------------------------------------


def exact(weight, features, logits):
    """Return trace, κ neuronwise and κ frobenius of one sample, computed with 400 digits."""
    with mpmath.workdps(400):
        rows = [[mpmath.mpf(v) for v in row] for row in weight.tolist()]
        z = [mpmath.mpf(v) for v in logits.tolist()]
        terms = [mpmath.exp(v - max(z)) for v in z]
        p = [t / mpmath.fsum(terms) for t in terms]
        norm = mpmath.fsum(mpmath.mpf(v) ** 2 for v in features.tolist())
        trace = norm * mpmath.fsum(v * (1 - v) for v in p)
        centre = [
            mpmath.fsum(v * r[a] for v, r in zip(p, rows, strict=True)) for a in range(len(rows[0]))
        ]
        spread = mpmath.fsum(
            v * mpmath.fsum((r - c) ** 2 for r, c in zip(row, centre, strict=True))
            for v, row in zip(p, rows, strict=True)
        )
        frobenius = mpmath.fsum(v**2 for row in rows for v in row)
        return float(trace), float(norm * spread), float(frobenius * trace)


HEADS = {
    "ordinary": lambda w: w,
    "shifted by a long vector": lambda w: w + 1e8 * torch.ones_like(w[0]),
    "rows almost alike": lambda w: w[0] + 1e-4 * w,
    "tiny": lambda w: 1e-9 * w,
}


@pytest.mark.parametrize("gap", [0.0, 1.0, 20.0, 60.0, 300.0])
@pytest.mark.parametrize("head", HEADS)
def test_float64_is_right_to_ten_digits_however_confident(head, gap):
    weight, _, features, _ = layer(1, samples=4, classes=6, width=5)
    weight = HEADS[head](weight)
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    logits[torch.arange(4), torch.tensor([0, 3, 5, 3])] += gap
    got = torch.stack(
        [
            hessian_trace(features, logits),
            *(relative_sharpness(weight, features, logits, kind=kind) for kind in KINDS),
        ],
        dim=1,
    )
    for i in range(4):
        expected = exact(weight, features[i], logits[i])
        assert min(expected) > 0
        assert got[i].tolist() == pytest.approx(expected, rel=1e-10, abs=0)


@pytest.mark.parametrize("distance", [1e-2, 1e-5])
def test_two_classes_almost_alike_among_others(distance):
    """What separates the two likely rows must survive beside the length of the others."""
    weight, _, features, _ = layer(1, samples=1, classes=6, width=5)
    weight[3] = weight[0] + distance * weight[1]
    logits = torch.tensor([[200.0, 0.0, 1.0, 199.0, 2.0, 3.0]], dtype=torch.float64)
    _, expected, _ = exact(weight, features[0], logits[0])
    got = relative_sharpness(weight, features, logits)
    assert got.item() == pytest.approx(expected, rel=1e-10, abs=0)


@pytest.mark.parametrize("spread", [1.0, 1e-1, 1e-2, 1e-3, 1e-5])
def test_many_rows_near_and_far_keep_ten_digits(spread):
    """Two tight clusters: inner products serve between them, and would fail within."""
    random = torch.Generator().manual_seed(5)
    centres = torch.randn(2, 30, generator=random, dtype=torch.float64).repeat(20, 1)
    weight = centres + spread * torch.randn(40, 30, generator=random, dtype=torch.float64)
    features = torch.randn(6, 30, generator=random, dtype=torch.float64)
    logits = torch.randn(6, 40, generator=random, dtype=torch.float64)
    logits[3:, ::2] += 40.0  # the far cluster has no weight: only distances within count
    got = relative_sharpness(weight, features, logits)
    for i in range(6):
        _, expected, _ = exact(weight, features[i], logits[i])
        assert got[i].item() == pytest.approx(expected, rel=1e-10, abs=0)


@pytest.mark.parametrize("gap", [0.0, 1.0, 20.0, 60.0])
def test_float32_is_right_to_six_digits(gap):
    weight, _, features, _ = layer(3, samples=4, classes=6, width=5, dtype=torch.float32)
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    logits[:, 2] += gap
    results = [
        hessian_trace(features, logits),
        *(relative_sharpness(weight, features, logits, kind=kind) for kind in KINDS),
    ]
    assert all(result.dtype == torch.float32 for result in results)
    for i in range(4):
        got = [result[i].item() for result in results]
        assert got == pytest.approx(exact(weight, features[i], logits[i]), rel=1e-6, abs=0)


def test_top_eigenvalue_of_a_certain_sample_is_not_lost():
    # Two classes: the matrix of the prediction has the eigenvalue 2 p (1 - p).
    logits, features = torch.tensor([[60.0, 0.0]]).double(), torch.tensor([[3.0, 4.0]]).double()
    expected = 25 * 2 * math.exp(-60)
    assert hessian_eigenvalues(features, logits)[0, 1].item() == pytest.approx(expected, rel=1e-10)
    top = last_layer_top_eigenvalue(features, logits)
    assert top.value == pytest.approx(expected, rel=1e-10)


# --- theorems ----------------------------------------------------------------------------------


def sharpnesses(weight, features, logits):
    return {kind: relative_sharpness(weight, features, logits, kind=kind) for kind in KINDS}


@given(layers(), st.floats(0.01, 100))
def test_rescaling_layers_changes_nothing(case, c):
    weight, bias, features, _ = case
    logits = features @ weight.T + bias
    expected = sharpnesses(weight, features, logits)
    for kind, value in sharpnesses(weight / c, c * features, logits).items():
        assert_close(value, expected[kind], rtol=1e-9, atol=0)


@given(layers(), st.integers(0, 2**32))
def test_rotating_features_changes_nothing(case, seed):
    weight, bias, features, _ = case
    random = torch.Generator().manual_seed(seed)
    width = weight.shape[1]
    square = torch.randn(width, width, generator=random, dtype=torch.float64)
    rotation = torch.linalg.qr(square).Q
    logits = features @ weight.T + bias
    expected = sharpnesses(weight, features, logits)
    for kind, value in sharpnesses(weight @ rotation, features @ rotation, logits).items():
        assert_close(value, expected[kind], rtol=1e-9, atol=0)


@given(layers(), st.floats(-10, 10))
def test_adding_a_vector_to_every_row_spares_only_neuronwise(case, length):
    weight, bias, features, _ = case
    vector = length * torch.ones(weight.shape[1], dtype=torch.float64)
    before = sharpnesses(weight, features, features @ weight.T + bias)
    shifted = weight + vector
    after = sharpnesses(shifted, features, features @ shifted.T + bias)
    assert_close(after["neuronwise"], before["neuronwise"], rtol=1e-6, atol=0)
    ratio = shifted.square().sum() / weight.square().sum()
    assert_close(after["frobenius"], ratio * before["frobenius"], rtol=1e-6, atol=0)


@given(layers(), st.floats(-1e6, 1e6))
def test_shifting_logits_changes_nothing(case, shift):
    weight, bias, features, _ = case
    logits = (features @ weight.T + bias).float().double()  # so that the shift does not round
    shift = float(torch.tensor(shift).float())
    spectrum = hessian_eigenvalues(features, logits)
    tolerance = {"rtol": 1e-7, "atol": 1e-12 * spectrum.max().item()}
    assert_close(hessian_eigenvalues(features, logits + shift), spectrum, **tolerance)
    expected = hessian_trace(features, logits)
    assert_close(hessian_trace(features, logits + shift), expected, rtol=1e-7, atol=0)


@given(layers())
def test_neuronwise_never_exceeds_frobenius(case):
    weight, bias, features, _ = case
    values = sharpnesses(weight, features, features @ weight.T + bias)
    assert (values["neuronwise"] >= 0).all()
    assert (values["neuronwise"] <= values["frobenius"] * (1 + 1e-12)).all()


@given(layers())
def test_the_label_does_not_matter(case):
    weight, bias, features, _ = case
    first, last = torch.zeros(len(features)).long(), torch.full((len(features),), len(weight) - 1)
    assert_close(
        autograd_hessian(weight, bias, features, first),
        autograd_hessian(weight, bias, features, last),
        rtol=0,
        atol=1e-12 * (1 + features.square().sum().item()),
    )


@given(layers())
def test_trace_is_largest_for_a_uniform_prediction(case):
    weight, bias, features, _ = case
    traces = hessian_trace(features, features @ weight.T + bias)
    uniform = hessian_trace(features, torch.zeros(len(features), len(weight), dtype=torch.float64))
    assert_close(uniform, features.square().sum(1) * (1 - 1 / len(weight)))
    assert (traces <= uniform * (1 + 1e-12)).all()


def test_sharpness_is_not_monotone_in_the_logit_scale():
    weight, _, features, _ = layer(4, samples=50, classes=10, width=8)
    kappa = [
        relative_sharpness(s * weight, features, s * features @ weight.T).mean()
        for s in (0.01, 3.0, 1e5)
    ]
    assert kappa[0] < kappa[1] > kappa[2]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_right_so_it_can_be_a_penalty(kind):
    weight, bias, features, _ = layer(5)

    def penalty(w, phi):
        return relative_sharpness(w, phi, phi @ w.T + bias, kind=kind)

    inputs = (weight.requires_grad_(), features.requires_grad_())
    assert torch.autograd.gradcheck(penalty, inputs)


# --- sizes, dtypes, other arrays ---------------------------------------------------------------


def peak_numbers(function):
    """Return the largest allocation of a call, in numbers of eight bytes."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        function()
    return max(event.cpu_memory_usage for event in profile.events()) / 8


def test_language_model_head_needs_no_large_array():
    classes, width, samples = 49_152, 64, 8
    weight, bias, features, _ = layer(6, samples=samples, classes=classes, width=width)
    logits = features @ weight.T + bias
    for kind in KINDS:
        peak = peak_numbers(
            lambda kind=kind: relative_sharpness(weight, features, logits, kind=kind)
        )
        assert peak <= 1.1 * classes * max(samples, width)
    # The reference: a loop over samples with the definition's plain sum.
    p = logits.softmax(1)
    centre = p @ weight
    for i in range(2):
        spread = (p[i] * (weight - centre[i]).square().sum(1)).sum()
        got = relative_sharpness(weight, features[i : i + 1], logits[i : i + 1])
        assert_close(got[0], features[i].square().sum() * spread, rtol=1e-9, atol=0)


def test_numpy_arrays_and_mixed_precision():
    weight, bias, features, _ = layer(7)
    logits = features @ weight.T + bias
    expected = relative_sharpness(weight, features, logits)
    arrays = (a.numpy() for a in (weight, features, logits))
    assert torch.equal(relative_sharpness(*arrays), expected)
    assert hessian_trace(features.float(), logits).dtype == torch.float64
    halves = hessian_trace(features.bfloat16(), logits.half())
    assert halves.dtype == torch.float32  # a half would round confident samples to 0
    wide = hessian_trace(features.bfloat16().double(), logits.half().double())
    assert_close(halves.double(), wide, rtol=1e-6, atol=0)
    assert np.allclose(
        last_layer_hessian(features.numpy(), logits.numpy()).numpy().trace(),
        hessian_trace(features, logits).mean().item(),
    )


# --- whole classifiers -------------------------------------------------------------------------


def test_sharpness_of_a_model_leaves_it_alone():
    model = models.build("resnet18", num_classes=4, width=4, seed=0)
    x = torch.rand(7, 3, 16, 16)
    model(x)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    values = sharpness_of(model, x, batch_size=3)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert model.training
    assert values.shape == (7,)
    assert not values.requires_grad
    assert_close(sharpness_of(model, x.numpy(), kind="neuronwise", batch_size=7), values)
    with models.evaluating(model), torch.no_grad():
        features = model.features(x)
        expected = relative_sharpness(
            model.head.weight, features, model.head(features), kind="frobenius"
        )
    assert_close(sharpness_of(model, x, kind="frobenius"), expected)


def test_estimators_are_at_hand():
    for name in ("full_trace", "top_eigenvalue", "loss_landscape"):
        assert callable(getattr(sharpness, name))


# --- the door ----------------------------------------------------------------------------------

GOOD = torch.ones(2, 3), torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("features", "logits", "message"),
    [
        (GOOD[0], torch.full((2, 4), math.nan), "logits must be finite; got inf or nan"),
        (GOOD[0], torch.tensor([[0.0, math.inf], [0.0, 0.0]]), "logits must be finite"),
        (torch.full((2, 3), -math.inf), GOOD[1], "features must be finite"),
        (GOOD[0], torch.zeros(3, 4), r"logits must have shape \(2, classes\); got \(3, 4\)"),
        (torch.ones(3), GOOD[1], r"features must have shape \(samples, width\); got \(3,\)"),
        (torch.ones(2, 3, 1), GOOD[1], r"features must have shape"),
        (torch.ones(0, 3), torch.ones(0, 4), "features must not be empty"),
        (torch.ones(2, 0), GOOD[1], "features must not be empty"),
        (GOOD[0], torch.zeros(2, 1), "logits must have at least 2 classes; got 1"),
        (GOOD[0], torch.zeros(2, 4).long(), "logits must hold floating-point numbers; got"),
        (np.ones((2, 3), dtype=int), GOOD[1], "features must hold floating-point numbers"),
        (torch.ones(2, 3).bool(), GOOD[1], "features must hold floating-point numbers"),
        ("features", GOOD[1], "features must be a tensor or array of numbers; got str"),
    ],
)
@pytest.mark.parametrize(
    "function",
    [last_layer_hessian, hessian_trace, hessian_eigenvalues, last_layer_top_eigenvalue],
)
def test_bad_layers_are_refused(function, features, logits, message):
    with pytest.raises(ValueError, match=message):
        function(features, logits)


@pytest.mark.parametrize(
    ("weight", "options", "message"),
    [
        (torch.ones(4, 3), {"kind": "frobenius norm"}, "kind must be one of .* Did you mean 'frob"),
        (torch.ones(4, 3), {"kind": None}, "kind must be one of neuronwise, frobenius; got None"),
        (torch.ones(5, 3), {}, r"weight must have shape \(4, 3\); got \(5, 3\)"),
        (torch.ones(3, 4), {}, r"weight must have shape \(4, 3\); got \(3, 4\)"),
        (torch.full((4, 3), math.nan), {}, "weight must be finite"),
        (torch.ones(4, 3).long(), {}, "weight must hold floating-point numbers"),
    ],
)
def test_bad_heads_are_refused(weight, options, message):
    with pytest.raises(ValueError, match=message):
        relative_sharpness(weight, *GOOD, **options)


def test_matrices_beyond_memory_are_refused():
    features, logits = torch.ones(1, 4096), torch.zeros(1, 1000)
    with pytest.raises(
        ValueError, match=r"a Hessian of order 1000 \* 4096, .* GB, where at most 8"
    ):
        last_layer_hessian(features, logits)
    with pytest.raises(ValueError, match="1 matrices of order 50000"):
        hessian_eigenvalues(features, torch.zeros(1, 50_000))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": 0.0}, "tolerance must be a finite number above 0"),
        ({"max_iterations": 0}, "max_iterations must be a whole number of at least 1"),
        ({"seed": -1}, "seed must be a whole number"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        last_layer_top_eigenvalue(*GOOD, **options)


def test_exhausted_budget_is_said():
    _, _, features, _ = layer(8, samples=50, width=20)
    logits = torch.zeros(50, 10, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="after max_iterations=5 products"):
        last_layer_top_eigenvalue(features, logits, max_iterations=5, tolerance=1e-12)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.full((2, 4), math.nan), {}, "x must be finite"),
        (torch.ones(0, 4), {}, "x must not be empty"),
        (torch.ones(2, 4).long(), {}, "x must hold floating-point numbers"),
        (torch.ones(2, 4), {"batch_size": 0}, "batch_size must be a whole number"),
        (torch.ones(2, 4), {"kind": "neuron"}, "kind must be one of .* Did you mean 'neuronwise'"),
    ],
)
def test_sharpness_of_refuses(x, options, message):
    model = models.build("mlp", num_classes=3, width=4, input_shape=(4,))
    with pytest.raises(ValueError, match=message):
        sharpness_of(model, x, **options)


def test_sharpness_of_refuses_what_it_cannot_take_apart():
    model = models.build("mlp", num_classes=3, width=4, input_shape=(4,))
    with pytest.raises(ValueError, match=r"x must fit the model, which refuses shape \(2, 5\): "):
        sharpness_of(model, torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"model must have features and a linear head.*got Linear"):
        sharpness_of(torch.nn.Linear(2, 2), torch.ones(2, 2))
    with pytest.raises(ValueError, match="model must be a torch module; got NoneType"):
        sharpness_of(None, torch.ones(2, 2))


def test_every_measure_of_this_module_is_offered():
    defined = {
        name
        for name, thing in vars(sharpness).items()
        if getattr(thing, "__module__", "") == sharpness.__name__ and not name.startswith("_")
    }
    assert defined <= set(sharpness.__all__)
