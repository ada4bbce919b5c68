"""Loss bounds and radii against 400 digits, against attacks, and as theorems."""

import math

import mpmath
import numpy as np
import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from flatbook import certificates
from flatbook.certificates import certified_radius, loss_bound, margin_radius
from flatbook.lipschitz import lipschitz_bound
from flatbook.models import Normalise
from flatbook.sharpness import relative_sharpness

SOUND = ("flat", "poly", "lse", "best")
KINDS = (*SOUND, "claimed")


def layer(seed=0, *, samples=5, classes=3, width=4, scale=1.0):
    random = torch.Generator().manual_seed(seed)
    options = {"generator": random, "dtype": torch.float64}
    weight = scale * torch.randn(classes, width, **options)
    bias = scale * torch.randn(classes, **options)
    features = torch.randn(samples, width, **options)
    labels = torch.randint(classes, (samples,), generator=random)
    return weight, features, labels, bias


# --- the definitions, with 400 digits ----------------------------------------------------------


def exact(kind, weight, features, label, bias, radius, lipschitz):
    """Return the bound of one sample, computed with 400 digits."""
    with mpmath.workdps(400):
        rows = [[mpmath.mpf(v) for v in row] for row in weight.tolist()]
        phi = [mpmath.mpf(v) for v in features.tolist()]
        k, m = len(rows), len(phi)
        offsets = [mpmath.mpf(v) for v in bias.tolist()]
        z = [mpmath.fdot(row, phi) + b for row, b in zip(rows, offsets, strict=True)]
        terms = [mpmath.exp(v - max(z)) for v in z]
        p = [term / mpmath.fsum(terms) for term in terms]

        def distance(one, other):
            return mpmath.sqrt(mpmath.fsum((a - b) ** 2 for a, b in zip(one, other, strict=True)))

        delta, constant = mpmath.mpf(radius), mpmath.mpf(lipschitz)
        t = delta * constant
        if kind == "lse":
            rises = [v * mpmath.exp(t * distance(row, rows[label])) for v, row in zip(p, rows)]  # noqa: B905
            return mpmath.log(mpmath.fsum(rises))
        norm = mpmath.fsum(v**2 for v in phi)
        if kind == "claimed":
            frobenius = mpmath.fsum(v**2 for row in rows for v in row)
            kappa = frobenius * norm * mpmath.fsum(v * (1 - v) for v in p)
            last = delta**3 * k * m * constant**6 / (24 * norm ** mpmath.mpf(1.5))
            return t**2 * kappa / (2 * norm) + last
        mean = [mpmath.fdot(p, [row[a] for row in rows]) for a in range(m)]
        first = t * distance(mean, rows[label])
        variance = mpmath.fsum(v * distance(row, mean) ** 2 for v, row in zip(p, rows, strict=True))
        reach = t * max(distance(a, b) for a in rows for b in rows)
        if kind == "flat":
            return first + t**2 * variance * (mpmath.exp(reach) - reach - 1) / reach**2
        return first + t**2 * variance / 2 + reach**3 / (36 * mpmath.sqrt(3))


def best_of(kind, *arguments):
    kinds = ("flat", "lse") if kind == "best" else (kind,)
    return min(exact(kind, *arguments) for kind in kinds)


HEADS = {
    "ordinary": lambda w: w,
    "shifted by a long vector": lambda w: (2.0**10 * w).round() / 2.0**10 + 2.0**26,
    "rows almost alike": lambda w: w[0] + 1e-4 * w,
    "tiny": lambda w: 1e-200 * w,
    "huge": lambda w: 2.0**490 * w,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("gap", [0.0, 20.0, 60.0, 900.0])
def test_float64_is_right_to_ten_digits_however_confident(kind, head, gap):
    weight, features, labels, bias = layer(1, samples=4, classes=4, width=3)
    weight = HEADS[head](weight)
    features = features.bfloat16().double()  # so that logits do not round under the shift
    if head == "huge":
        features = 2.0**-490 * features
    bias[2] += gap
    labels = torch.tensor([2, 2, 0, 1])  # confident and right, confident and wrong
    size = (weight - weight[0]).abs().max().item()
    for reach in (1e-90, 1e-3, 0.3, 2.0, 30.0):
        lipschitz = 1.5
        radius = reach / size / lipschitz
        got = loss_bound(weight, features, labels, radius, lipschitz, bias=bias, kind=kind)
        for i in range(4):
            case = (weight, features[i], labels[i].item(), bias, radius, lipschitz)
            expected = float(best_of(kind, *case))
            assert got[i].item() == pytest.approx(expected, rel=1e-10, abs=1e-300)


@pytest.mark.parametrize("kind", SOUND)
def test_no_radius_is_too_small_or_too_large(kind):
    case = layer(2, samples=6)
    weight, features, labels, bias = case
    tiny = loss_bound(weight, features, labels, 1e-300, 2.0, bias=bias, kind=kind)
    p = (features @ weight.T + bias).softmax(1)
    first = (p @ weight - weight[labels]).norm(dim=1)
    if kind == "lse":
        first = (p * torch.cdist(weight, weight)[labels]).sum(1)
    assert_close(tiny, 2e-300 * first, rtol=1e-11, atol=0)
    assert (loss_bound(weight, features, labels, 0.0, 2.0, bias=bias, kind=kind) == 0).all()
    last = tiny
    for power in (-30, -8, -2, 0, 1, 2, 3, 6, 100, 150, 290, 307):
        value = loss_bound(weight, features, labels, 10.0**power, 2.0, bias=bias, kind=kind)
        assert (value >= last).all()
        last = value
    assert loss_bound(weight, features, labels, math.inf, 2.0, bias=bias, kind=kind).isinf().all()


def test_flat_is_smooth_where_the_series_takes_over():
    weight, features, labels, _ = layer(3, samples=2)
    diameter = torch.cdist(weight, weight).max().item()
    below, above = (
        loss_bound(weight, features, labels, r / diameter, 1.0, kind="flat")
        for r in (1 - 1e-15, 1 + 1e-15)
    )
    assert_close(below, above, rtol=2e-14, atol=0)


def test_flat_bound_has_the_relative_sharpness_for_its_curvature():
    weight, features, labels, bias = layer(4, samples=20)
    logits = features @ weight.T + bias
    first = (logits.softmax(1) @ weight - weight[labels]).norm(dim=1)
    curvature = relative_sharpness(weight, features, logits) / features.square().sum(1)
    t, diameter = 0.7, torch.cdist(weight, weight).max()
    reach = t * diameter
    expected = t * first + t**2 * curvature * (reach.exp() - reach - 1) / reach**2
    got = loss_bound(weight, features, labels, t, 1.0, bias=bias, kind="flat")
    assert_close(got, expected, rtol=1e-12, atol=0)
    expected = t * first + t**2 * curvature / 2 + reach**3 / (36 * math.sqrt(3))
    got = loss_bound(weight, features, labels, t, 1.0, bias=bias, kind="poly")
    assert_close(got, expected, rtol=1e-12, atol=0)


# --- the lemmas behind them --------------------------------------------------------------------


def test_third_central_moment_on_an_interval():
    """At a given mean the maximum is at two points, and of those at weight (3 − √3)/6."""
    p, length = sympy.symbols("p R", positive=True)
    mean = p * length
    variance = sympy.factor(p * (length - mean) ** 2 + (1 - p) * mean**2)
    moment = sympy.factor(p * (length - mean) ** 3 - (1 - p) * mean**3)
    assert sympy.simplify(moment / variance - length * (1 - 2 * p)) == 0  # at most R times it
    largest = moment.subs(p, (3 - sympy.sqrt(3)) / 6)
    assert set(sympy.solve(sympy.diff(moment, p), p)) == {
        (3 - sympy.sqrt(3)) / 6,
        (3 + sympy.sqrt(3)) / 6,
    }
    assert sympy.simplify(largest - length**3 / (6 * sympy.sqrt(3))) == 0


@given(st.integers(0, 2**32), st.integers(2, 6))
def test_third_central_moment_of_random_distributions(seed, points):
    random = np.random.default_rng(seed)
    p, x = random.dirichlet(np.full(points, 0.3), 200), random.random((200, points)) ** 3
    centred = x - (p * x).sum(1, keepdims=True)
    moment, variance = (p * centred**3).sum(1), (p * centred**2).sum(1)
    length = np.ptp(x, axis=1)
    assert (np.abs(moment) <= length**3 / (6 * math.sqrt(3)) + 1e-16).all()
    assert (np.abs(moment) <= length * variance + 1e-16).all()


def test_remainders_integrate_to_the_bounds():
    s, r = sympy.symbols("s R", positive=True)
    grown = sympy.integrate((1 - s) * sympy.exp(r * s), (s, 0, 1))
    assert sympy.simplify(grown - (sympy.exp(r) - r - 1) / r**2) == 0
    third = sympy.integrate((1 - s) ** 2 / 2, (s, 0, 1)) * r**3 / (6 * sympy.sqrt(3))
    assert sympy.simplify(third - r**3 / (36 * sympy.sqrt(3))) == 0


# --- no change of the features breaks them -----------------------------------------------------


def rise(weight, log_p, labels, u):
    """Return the exact rise of the loss for the change u of the features, and its rounding."""
    change = (weight[None] - weight[labels][:, None]) @ u[:, :, None]
    change = change[:, :, 0]
    terms = log_p.exp() * torch.expm1(change)
    small = change.amax(dim=1) < 600
    value = torch.where(
        small, torch.log1p(terms.sum(1).clamp(min=-1)), (log_p + change).logsumexp(dim=1)
    )
    return value, torch.where(small, 1e-13 * terms.abs().sum(1), 1e-13 * value.abs())


def directions(weight, log_p, labels, t, random):
    """Yield changes of length t: random ones, towards a class, away, and steepest ascent."""
    n, k = log_p.shape

    def stretched(u):
        return t[:, None] * u / u.norm(dim=1, keepdim=True).clamp(min=1e-300)

    yield stretched(torch.randn(n, weight.shape[1], generator=random, dtype=torch.float64))
    other = (labels + torch.randint(1, k, (n,), generator=random)) % k
    yield stretched(weight[other] - weight[labels])
    yield stretched(weight[labels] - weight[other])
    u = stretched(weight[other] - weight[labels])
    for start in (u, 1e-3 * u):
        u = start
        # The rise is convex in u, so going all the way along the gradient never lowers it.
        for _ in range(6):
            q = (log_p + u @ weight.T).softmax(dim=1)
            u = stretched(q @ weight - weight[labels])
            yield u


def random_layers(random):
    """Yield many layers of wildly different scales, with samples from certain to undecided."""
    for _ in range(110):
        k = int(torch.randint(2, 9, (), generator=random))
        m = int(torch.randint(1, 7, (), generator=random))
        options = {"generator": random, "dtype": torch.float64}
        weight = torch.randn(k, m, **options) * 10 ** (4 * torch.rand(k, 1, **options) - 2)
        weight *= 10 ** (4 * torch.rand((), **options) - 2)
        features = torch.randn(1000, m, **options) * 10 ** (6 * torch.rand(1000, 1, **options) - 4)
        bias = torch.randn(k, **options) * 3
        labels = torch.randint(k, (1000,), generator=random)
        top = (features @ weight.T + bias).argmax(dim=1)
        labels[::2] = top[::2]
        reach = 10 ** (5 * torch.rand(1000, **options) - 3.5) / weight.norm(dim=1).max()
        yield weight, features, labels, bias, reach


def test_a_hundred_thousand_attacks_on_the_features_break_no_bound():
    random = torch.Generator().manual_seed(0)
    draws, tight, wrong = 0, [], []
    for weight, features, labels, bias, t in random_layers(random):
        logits = features @ weight.T + bias
        log_p = logits.log_softmax(dim=1)
        bounds = {
            kind: loss_bound(weight, features, labels, t / 2, 2.0, bias=bias, kind=kind)
            for kind in SOUND
        }
        assert torch.equal(bounds["best"], torch.minimum(bounds["flat"], bounds["lse"]))
        worst = torch.zeros_like(t)
        # Logits of size z round by z · eps, and so do, relatively, small probabilities.
        slack = 1 + 1e-11 + 1e-14 * (features.abs() @ weight.abs().T).amax(dim=1)
        for u in directions(weight, log_p, labels, t, random):
            value, rounding = rise(weight, log_p, labels, u)
            for kind in SOUND:
                excess = value - bounds[kind] * slack - rounding - 1e-300
                assert (excess <= 0).all(), (kind, excess.max())
            worst = torch.maximum(worst, value)
        draws += len(t)
        felt = bounds["best"] > 1e-300
        tight.append((worst / bounds["best"])[felt])
        wrong.append(logits.argmax(dim=1) != labels)
    tight, wrong = torch.cat(tight), torch.cat(wrong)
    assert draws >= 100_000
    assert 0.1 < wrong.double().mean() < 0.9
    # The attacks are strong, or the test would be weak: many bounds are reached.
    assert tight.quantile(0.5) > 0.8
    assert (tight > 0.999).double().mean() > 0.2


@given(st.integers(0, 2**32), st.floats(0.01, 30))
def test_with_two_classes_one_step_reaches_lse(seed, t):
    weight, features, labels, bias = layer(seed, classes=2)
    log_p = (features @ weight.T + bias).log_softmax(dim=1)
    step = weight[1 - labels] - weight[labels]
    u = t * step / step.norm(dim=1, keepdim=True)
    value, _ = rise(weight, log_p, labels, u)
    got = loss_bound(weight, features, labels, t, 1.0, bias=bias, kind="lse")
    assert_close(got, value, rtol=1e-9, atol=0)


def network(seed, *, classes=3, scale=1.0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        body = nn.Sequential(
            Normalise(1, 0.5, 0.25), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.Tanh()
        )
        head = nn.Linear(5, classes)
    for p in head.parameters():
        p.data *= scale
    return body.double(), head.double()


@given(st.integers(0, 2**32), st.floats(-3, 2), st.sampled_from([0.1, 1.0, 10.0]))
@settings(max_examples=60)
def test_no_random_network_and_perturbation_break_them(seed, power, scale):
    body, head = network(seed, scale=scale)
    lipschitz = lipschitz_bound(body, (4,))
    random = torch.Generator().manual_seed(seed)
    x = torch.rand(50, 4, generator=random, dtype=torch.float64)
    y = torch.randint(3, (50,), generator=random)
    shift = 10**power * torch.randn(50, 4, generator=random, dtype=torch.float64)
    with torch.no_grad():
        phi = body(x)
        before = cross_entropy(head(phi), y, reduction="none")
        after = cross_entropy(head(body(x + shift)), y, reduction="none")
    for kind in SOUND:
        bound = loss_bound(
            head.weight, phi, y, shift.norm(dim=1), lipschitz, bias=head.bias, kind=kind
        )
        assert not bound.requires_grad
        assert (after - before <= bound * (1 + 1e-12) + 1e-14 * (1 + before)).all()


def attack(model, x, y, radius, *, steps=40):
    """Ascend the loss within the ball around each input, from a random start."""
    start = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    shift = 0.1 * radius[:, None] * start / start.norm(dim=1, keepdim=True)
    for _ in range(steps):
        shift.requires_grad_()
        loss = cross_entropy(model(x + shift), y, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, shift)
        gradient = gradient / gradient.norm(dim=1, keepdim=True).clamp(min=1e-300)
        shift = shift.detach() + 0.2 * radius[:, None] * gradient
        shift = shift * (radius / shift.norm(dim=1).clamp(min=1e-300)).clamp(max=1)[:, None]
    return x + shift.detach()


def trained_network():
    body, head = network(0)
    model = nn.Sequential(body, head)
    x = torch.rand(200, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = (x[:, 0] > 0.5).long() + (x[:, 1] > 0.5).long()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(200):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    assert loss < 0.3
    return body, head, x, y


def test_no_attack_on_a_trained_network_beats_its_certificate():
    body, head, x, y = trained_network()
    model = nn.Sequential(body, head)
    lipschitz = lipschitz_bound(body, (4,))
    with torch.no_grad():
        phi = body(x)
        before = cross_entropy(head(phi), y, reduction="none")
    layer = (head.weight, phi, y)

    def risen(radius):
        adversarial = attack(model, x, y, radius)
        assert ((adversarial - x).norm(dim=1) <= radius * (1 + 1e-12)).all()
        with torch.no_grad():
            return cross_entropy(model(adversarial), y, reduction="none") - before

    for kind in SOUND:
        for epsilon in (0.01, 0.5, 3.0):
            radius = certified_radius(*layer, epsilon, lipschitz, bias=head.bias, kind=kind)
            assert (radius > 0).all()
            assert (risen(radius) <= epsilon).all()
    right = head(phi).argmax(1) == y
    margin = margin_radius(*layer, lipschitz, bias=head.bias)
    assert ((margin > 0) == right).all()
    flipped = model(attack(model, x, y, margin.clamp(min=1e-9) * (1 - 1e-9))).argmax(1) != y
    assert not flipped[right].any()
    # Control: the same attack goes past epsilon as soon as it has room.
    assert (risen(torch.full_like(before, 0.3)) > 0.5).double().mean() > 0.6


# --- the claim ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("s", "delta", "true", "claimed", "corrected"),
    [
        (1, 0.01, 0.002699, 9.9e-6, 0.002699),
        (20, 1, 0.693, 0.0833, 1.00),
        (20, 1.5, 10, 0.281, 2.2e4),
    ],
)
def test_claimed_bound_fails_in_one_dimension(s, delta, true, claimed, corrected):
    weight = torch.tensor([[s / 2], [-s / 2]], dtype=torch.float64)
    phi, labels = torch.ones(1, 1, dtype=torch.float64), torch.tensor([0])
    loss = [cross_entropy((x * weight.T).view(1, 2), labels).item() for x in (1.0, 1.0 - delta)]
    risen = loss[1] - loss[0]
    assert risen == pytest.approx(true, rel=5e-3)
    got = {kind: loss_bound(weight, phi, labels, delta, 1.0, kind=kind).item() for kind in KINDS}
    assert got["claimed"] == pytest.approx(claimed, rel=5e-3)
    assert got["claimed"] < risen
    assert got["flat"] == pytest.approx(corrected, rel=2e-2)
    assert all(got[kind] >= risen * (1 - 1e-12) for kind in SOUND)
    assert got["lse"] == pytest.approx(risen, rel=1e-9)  # the attack is the worst case


# --- radii -------------------------------------------------------------------------------------


@st.composite
def certificates_asked(draw):
    case = layer(
        draw(st.integers(0, 2**32)),
        samples=draw(st.integers(1, 6)),
        classes=draw(st.integers(2, 6)),
        width=draw(st.integers(1, 5)),
        scale=draw(st.sampled_from([1e-120, 0.01, 1.0, 30.0, 1e4])),
    )
    epsilon = 10.0 ** draw(st.floats(-20, 6))
    return case, epsilon, draw(st.sampled_from([1e-6, 1.0, 7.0, 1e40]))


@given(certificates_asked(), st.sampled_from(KINDS))
@settings(max_examples=300)
def test_radius_is_the_last_at_which_the_bound_holds(asked, kind):
    (weight, features, labels, bias), epsilon, lipschitz = asked
    arguments = {"bias": bias, "kind": kind}
    radius = certified_radius(weight, features, labels, epsilon, lipschitz, **arguments)
    assert radius.isfinite().all()
    assert (radius > 0).all()
    at = loss_bound(weight, features, labels, radius, lipschitz, **arguments)
    assert (at <= epsilon).all()
    beyond = loss_bound(weight, features, labels, radius * (1 + 1e-9), lipschitz, **arguments)
    assert (beyond > epsilon).all()


def test_radius_is_found_by_bisection_too():
    weight, features, labels, bias = layer(5, samples=8)
    epsilon = torch.linspace(0.001, 3, 8, dtype=torch.float64)
    for kind in KINDS:
        low, high = torch.zeros(8).double(), torch.full((8,), 1e3).double()
        for _ in range(100):
            middle = (low + high) / 2
            value = loss_bound(weight, features, labels, middle, 0.5, bias=bias, kind=kind)
            low = torch.where(value <= epsilon, middle, low)
            high = torch.where(value <= epsilon, high, middle)
        got = certified_radius(weight, features, labels, epsilon, 0.5, bias=bias, kind=kind)
        assert_close(got, low, rtol=1e-12, atol=0)


def test_best_radius_is_the_larger_and_both_win_somewhere():
    weight, features, labels, _ = layer(6, samples=200, classes=6)
    radii = {k: certified_radius(weight, features, labels, 0.5, 1.0, kind=k) for k in SOUND}
    assert_close(radii["best"], torch.maximum(radii["flat"], radii["lse"]), rtol=1e-12, atol=0)
    assert (radii["flat"] > radii["lse"]).any()
    assert (radii["flat"] < radii["lse"]).any()


@pytest.mark.parametrize("kind", KINDS)
def test_edges_of_the_radius(kind):
    weight, features, labels, bias = layer(7, samples=5)
    options = {"bias": bias, "kind": kind}
    assert (certified_radius(weight, features, labels, 0, 1.0, **options) == 0).all()
    assert (certified_radius(weight, features, labels, 0.3, 0, **options) == math.inf).all()
    assert (loss_bound(weight, features, labels, math.inf, 0.0, **options) == 0).all()
    radius = certified_radius(
        weight, features, labels, np.array([0, 1e-320, 1e-3, 1e305, math.inf]), 1.0, **options
    )
    assert radius[0] == 0 < radius[2] < radius[3] < radius[4] == math.inf
    assert loss_bound(weight, features, labels, radius, 1.0, **options)[1] <= 1e-320
    each = [
        certified_radius(weight, features[i : i + 1], labels[i : i + 1], e, 1.0, **options)
        for i, e in enumerate((0.1, 0.2, 0.3, 0.4, 0.5))
    ]
    epsilon = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5], dtype=torch.float64)
    together = certified_radius(weight, features, labels, epsilon, 1.0, **options)
    assert_close(together, torch.cat(each), rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", SOUND)
def test_nothing_can_change_if_all_rows_coincide(kind):
    _, features, labels, bias = layer(8)
    for row in (0.1, 0.0, 1e9 / 3):
        weight = torch.full((3, 4), row, dtype=torch.float64)
        options = {"bias": bias, "kind": kind}
        assert (loss_bound(weight, features, labels, 1e9, 3.0, **options) == 0).all()
        assert (certified_radius(weight, features, labels, 0.0, 3.0, **options) == math.inf).all()
    two = torch.tensor([[1.0], [1.0], [5.0]], dtype=torch.float64)
    features, labels = torch.tensor([[2.0]], dtype=torch.float64), torch.tensor([0])
    got = loss_bound(two, features, labels, 0.3, 1.0, kind=kind).item()
    zero = torch.zeros(3, dtype=torch.float64)
    assert got == pytest.approx(float(best_of(kind, two, features[0], 0, zero, 0.3, 1.0)))


def test_features_of_length_zero():
    weight, _, labels, bias = layer(9)
    features = torch.zeros(5, 4, dtype=torch.float64)
    for kind in SOUND:
        expected = float(best_of(kind, weight, features[0], labels[0].item(), bias, 0.2, 3.0))
        got = loss_bound(weight, features, labels, 0.2, 3.0, bias=bias, kind=kind)
        assert got[0].item() == pytest.approx(expected, rel=1e-12)
    assert (loss_bound(weight, features, labels, 0.2, 3.0, kind="claimed") == math.inf).all()
    assert (loss_bound(weight, features, labels, 0.0, 3.0, kind="claimed") == 0).all()
    assert (certified_radius(weight, features, labels, 0.2, 3.0, kind="claimed") == 0).all()


# --- what leaves the bounds alone --------------------------------------------------------------


@given(st.integers(0, 2**32), st.floats(0.01, 100), st.sampled_from(SOUND))
def test_rescaling_layers_changes_nothing(seed, c, kind):
    weight, features, labels, bias = layer(seed)
    bound = loss_bound(weight, features, labels, 0.4, 2.0, bias=bias, kind=kind)
    same = loss_bound(weight / c, c * features, labels, 0.4, 2.0 * c, bias=bias, kind=kind)
    assert_close(same, bound, rtol=1e-10, atol=0)
    radius = certified_radius(weight, features, labels, 0.4, 2.0, bias=bias, kind=kind)
    same = certified_radius(weight / c, c * features, labels, 0.4, 2.0 * c, bias=bias, kind=kind)
    assert_close(same, radius, rtol=1e-10, atol=0)


@given(st.integers(0, 2**32), st.floats(-10, 10), st.sampled_from(SOUND))
def test_adding_a_vector_to_every_row_changes_nothing(seed, length, kind):
    weight, features, labels, bias = layer(seed)
    bound = loss_bound(weight, features, labels, 0.4, 2.0, bias=bias, kind=kind)
    same = loss_bound(weight + length, features, labels, 0.4, 2.0, bias=bias, kind=kind)
    assert_close(same, bound, rtol=1e-10, atol=0)


def test_claimed_bound_lacks_both():
    weight, features, labels, bias = layer(10)
    arguments = {"bias": bias, "kind": "claimed"}
    bound = loss_bound(weight, features, labels, 0.4, 2.0, **arguments)
    other = loss_bound(weight / 3, 3 * features, labels, 0.4, 6.0, **arguments)
    assert (other > 1.1 * bound).all()  # its remainder lacks a factor of the weights
    assert (loss_bound(weight + 5, features, labels, 0.4, 2.0, **arguments) > 1.1 * bound).all()


# --- the margin --------------------------------------------------------------------------------


def scaled_radius(case, s, lipschitz):
    """Return the radius that keeps the label by way of the loss, with the last layer times s."""
    weight, features, labels, bias = case
    logits = s * (features @ weight.T + bias)
    epsilon = (math.log(2) - cross_entropy(logits, labels, reduction="none")).clamp(min=0)
    return certified_radius(
        s * weight, features, labels, epsilon, lipschitz, bias=s * bias, kind="lse"
    )


def test_radius_tends_to_the_margin_as_the_head_is_scaled():
    case = layer(11, samples=300, classes=5)
    weight, features, labels, bias = case
    right = (features @ weight.T + bias).argmax(1) == labels
    margin = margin_radius(weight, features, labels, 3.0, bias=bias)
    assert ((margin > 0) == right).all()
    assert 20 < right.sum() < 280
    least = torch.cdist(weight, weight).fill_diagonal_(math.inf).amin(1)[labels]
    for s in (1.0, 10.0, 1e3, 1e6):
        radius = scaled_radius(case, s, 3.0)
        assert (radius <= margin * (1 + 1e-9)).all()
        # At distance log(k − 1) / s to go, k − 1 rivals at the margin weigh no more than the label.
        assert (radius >= (margin - math.log(4) / (3 * s * least)) * (1 - 1e-9)).all()
    assert_close(radius[right], margin[right], rtol=1e-3, atol=1e-6)
    assert (radius[~right] == 0).all()


def test_with_two_classes_it_is_the_margin_at_every_scale():
    weight, features, labels, bias = case = layer(12, samples=50, classes=2)
    margin = margin_radius(weight, features, labels, 0.5, bias=bias)
    assert 0 < (margin > 0).double().mean() < 1
    for s in (0.01, 1.0, 30.0):
        assert_close(scaled_radius(case, s, 0.5), margin, rtol=1e-9, atol=1e-12)


def test_margin_by_its_definition():
    weight, features, labels, bias = layer(13, samples=40, classes=4)
    labels[::2] = (features @ weight.T + bias).argmax(1)[::2]
    got = margin_radius(weight, features, labels, 1.7, bias=bias)
    for i, y in enumerate(labels.tolist()):
        z = weight @ features[i] + bias
        ratios = [
            ((z[y] - z[j]) / (1.7 * (weight[j] - weight[y]).norm())).item()
            for j in range(4)
            if j != y
        ]
        assert got[i].item() == pytest.approx(max(0.0, min(ratios)), rel=1e-12)


def test_margin_where_rows_coincide():
    weight = torch.tensor([[1.0], [1.0], [-1.0]], dtype=torch.float64)
    features = torch.tensor([[2.0], [2.0], [2.0]], dtype=torch.float64)
    labels, bias = torch.tensor([0, 1, 2]), torch.tensor([0.5, 0.0, 0.0], dtype=torch.float64)
    # Class 1 stays half a nat behind class 0 wherever the features go.
    assert margin_radius(weight, features, labels, 1.0, bias=bias).tolist() == [2.25, 0, 0]
    assert margin_radius(weight, features, labels, 1.0).tolist() == [0, 0, 0]  # a tie
    alike = torch.ones(3, 1, dtype=torch.float64)
    assert margin_radius(alike, features, labels, 1.0, bias=bias).tolist() == [math.inf, 0, 0]
    assert margin_radius(weight, features, labels, 0, bias=bias).tolist() == [math.inf, 0, 0]


# --- sizes, dtypes, other arrays ---------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_float64_rounded_to_the_safe_side(kind):
    wide = layer(14, samples=50)
    narrow = [part.float() if part.is_floating_point() else part for part in wide]
    weight, features, labels, bias = narrow
    exact = [part.double() if part.is_floating_point() else part for part in narrow]
    options = {"kind": kind, "bias": bias}
    doubles = {"kind": kind, "bias": exact[3]}
    bound = loss_bound(weight, features, labels, 0.3, 2.0, **options)
    expected = loss_bound(*exact[:3], 0.3, 2.0, **doubles)
    assert bound.dtype == torch.float32
    assert (bound.double() >= expected).all()
    assert_close(bound.double(), expected, rtol=1e-6, atol=0)
    radius = certified_radius(weight, features, labels, 0.3, 2.0, **options)
    expected = certified_radius(*exact[:3], 0.3, 2.0, **doubles)
    assert radius.dtype == torch.float32
    assert (radius.double() <= expected).all()
    assert_close(radius.double(), expected, rtol=1e-6, atol=0)
    half = loss_bound(weight.half(), features.half(), labels, 0.3, 2.0, kind=kind)
    assert half.dtype == torch.float32


@pytest.mark.parametrize("epsilon", [0.1, 1e-8, 1.0 / 3, 7.3, 1e-30])
def test_bound_at_the_radius_keeps_to_epsilon_in_float32(epsilon):
    narrow = [part.float() if part.is_floating_point() else part for part in layer(17, samples=50)]
    weight, features, labels, bias = narrow
    for kind in KINDS:
        options = {"bias": bias, "kind": kind}
        radius = certified_radius(weight, features, labels, epsilon, 2.0, **options)
        assert (radius > 0).all()
        bound = loss_bound(weight, features, labels, radius, 2.0, **options)
        assert (bound.double() <= epsilon).all()
        bound = loss_bound(weight, features, labels, radius * (1 + 1e-5), 2.0, **options)
        assert (bound.double() > epsilon).all()


def test_numpy_arrays_are_as_good():
    weight, features, labels, bias = layer(15)
    arrays = (weight.numpy(), features.numpy()[::-1], labels.numpy()[::-1])
    expected = certified_radius(weight, features, labels, 0.3, 2.0, bias=bias).flip(0)
    epsilon = np.full(5, 0.3)[::-1]
    assert_close(certified_radius(*arrays, epsilon, 2.0, bias=bias.numpy()), expected)
    assert_close(
        loss_bound(*arrays, expected.numpy(), 2.0, bias=bias.numpy()),
        torch.full((5,), 0.3, dtype=torch.float64),
        rtol=1e-12,
        atol=0,
    )


def test_parameters_and_many_classes():
    weight, features, labels, _ = layer(16, samples=3, classes=3000, width=8)
    radius = certified_radius(nn.Parameter(weight), features, labels, 0.5, 1.0)
    assert not radius.requires_grad
    log_p = (features @ weight.T).log_softmax(1)
    random = torch.Generator().manual_seed(0)
    for u in directions(weight, log_p, labels, radius, random):
        assert (rise(weight, log_p, labels, u)[0] <= 0.5).all()


# --- refusals ----------------------------------------------------------------------------------

GOOD = {
    "weight": torch.ones(4, 3),
    "features": torch.ones(2, 3),
    "labels": torch.tensor([0, 3]),
    "lipschitz": 1.0,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(4, 2)}, r"weight must have shape \(classes, 3\); got \(4, 2\)"),
        ({"weight": torch.ones(1, 3)}, "weight must have at least 2 rows, one per class; got 1"),
        ({"weight": torch.full((4, 3), math.nan)}, "weight must be finite; got inf or nan"),
        ({"weight": 1e308 * torch.eye(4, 3).double(), "features": torch.full((2, 3), 1e5)},
         "weight and features must give finite logits"),
        ({"features": torch.ones(3)}, r"features must have shape \(samples, width\)"),
        ({"features": torch.ones(2, 3).long()}, "features must hold floating-point numbers"),
        ({"labels": torch.tensor([0, 4])}, r"labels must lie in 0\.\.3.*got 0\.\.4"),
        ({"labels": torch.tensor([0])}, r"labels must have shape \(2\)"),
        ({"labels": torch.zeros(2)}, "labels must hold whole numbers; got torch.float32"),
        ({"lipschitz": -1.0}, "lipschitz must be a finite number of at least 0; got -1.0"),
        ({"lipschitz": math.inf}, "lipschitz must be a finite number of at least 0; got inf"),
        ({"bias": torch.ones(3)}, r"bias must have shape \(4\); got \(3,\)"),
    ],
)  # fmt: skip
def test_bad_layers_are_refused(change, message):
    arguments = {**GOOD, **change}
    with pytest.raises(ValueError, match=message):
        loss_bound(**arguments, radius=1.0)
    with pytest.raises(ValueError, match=message):
        certified_radius(**arguments, epsilon=1.0)
    with pytest.raises(ValueError, match=message):
        margin_radius(**arguments)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1e-9, "{} must be at least 0; got -1e-09"),
        (math.nan, "{} must be at least 0; got nan"),
        (torch.tensor([0.1, -2.0]), "{} must be at least 0; got -2"),
        (torch.ones(3), r"{} must have shape \(2\); got \(3,\)"),
        (torch.ones(2, 1), r"{} must have shape \(2\); got \(2, 1\)"),
        (True, "{} must hold real numbers; got torch.bool"),
        (1j, "{} must hold real numbers; got torch.complex"),
        ("0.1", "{} must be a number of at least 0, or one for each sample; got '0.1'"),
        (None, "{} must be a number of at least 0, or one for each sample; got None"),
        ([0.1, "0.2"], "{} must be a number of at least 0, or one for each sample; got"),
    ],
)
def test_bad_amounts_are_refused(value, message):
    with pytest.raises(ValueError, match=message.format("radius")):
        loss_bound(**GOOD, radius=value)
    with pytest.raises(ValueError, match=message.format("epsilon")):
        certified_radius(**GOOD, epsilon=value)


def test_unknown_kinds_are_refused():
    message = "kind must be one of best, flat, poly, lse, claimed; got 'falt'. Did you mean 'flat'"
    with pytest.raises(ValueError, match=message):
        loss_bound(**GOOD, radius=1.0, kind="falt")
    with pytest.raises(ValueError, match=message):
        certified_radius(**GOOD, epsilon=1.0, kind="falt")


def test_every_measure_of_this_module_is_offered():
    assert set(certificates.__all__) >= {
        name
        for name, thing in vars(certificates).items()
        if getattr(thing, "__module__", "") == certificates.__name__ and not name.startswith("_")
    }
