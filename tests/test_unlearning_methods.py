"""Each method's loss and first steps against the formula, written out in float64."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from flatbook.optim import ASAM, GSAM, SAM
from flatbook.runtime import forked_seed, generator
from flatbook.unlearning import saliency_mask, unlearn, woodfisher
from flatbook.unlearning.influence import Influence, sample_gradients
from flatbook.unlearning.methods import Task

pytestmark = pytest.mark.usefixtures("one_thread")
RATE = 0.3


def network(seed=0):
    with forked_seed(seed):
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def data(n=12, seed=1):
    random = generator(seed)
    x = torch.randn(n, 3, generator=random, dtype=torch.float64)
    return x, torch.randint(3, (n,), generator=random)


X, Y = data()
R, F = (X[:8], Y[:8]), (X[8:], Y[8:])


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=RATE)


def heavy(parameters):
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9, weight_decay=0.1)


def logits(weights, x):
    w1, b1, w2, b2 = weights
    return (x @ w1.T + b1).tanh() @ w2.T + b2


def ce(weights, x, y):
    z = logits(weights, x)
    return -(z[torch.arange(len(y)), y] - z.exp().sum(1).log()).mean()


def kl(old, new, x, t=1.0):
    p, q = (
        (logits(w, x) / t).exp() / (logits(w, x) / t).exp().sum(1, keepdim=True) for w in (old, new)
    )
    return t**2 * (p * (p / q).log()).sum(1).mean()


def weights_of(model):
    return [p.detach().clone() for p in model.parameters()]


def slope(loss, weights):
    weights = [w.clone().requires_grad_() for w in weights]
    return torch.autograd.grad(loss(weights), weights)


def descended(weights, loss, rate=RATE):
    return [w - rate * g for w, g in zip(weights, slope(loss, weights), strict=True)]


def after(method, *, epochs=1, optimizer=sgd, **options):
    model = network()
    done = unlearn(model, R, F, method=method, epochs=epochs, optimizer=optimizer, **options)
    return weights_of(model), weights_of(done.model), done


# --- losses -------------------------------------------------------------------------------------


def test_finetune():
    start, end, done = after("finetune", epochs=2)
    middle = descended(start, lambda w: ce(w, *R))
    assert_close(end, descended(middle, lambda w: ce(w, *R)))
    assert [e["loss"] for e in done.history] == pytest.approx(
        [float(ce(w, *R)) for w in (start, middle)]
    )


def test_neg_grad():
    start, end, done = after("neg_grad", alpha=0.7)
    loss = lambda w: 0.7 * ce(w, *R) - 0.3 * ce(w, *F)  # noqa: E731
    assert_close(end, descended(start, loss))
    assert done.history[0]["loss"] == pytest.approx(float(loss(start)))


def test_random_label():
    start, end, _ = after("random_label", seed=5)
    drawn = torch.randint(3, (4,), generator=generator(5))
    assert not torch.equal(drawn, F[1])
    assert_close(end, descended(start, lambda w: ce(w, X, torch.cat([R[1], drawn]))))


def test_random_labels_can_be_drawn_anew_in_each_epoch():
    start, end, _ = after("random_label", seed=5, epochs=2, redraw=True)
    random = generator(5)
    for _ in range(2):
        y = torch.cat([R[1], torch.randint(3, (4,), generator=random)])
        start = descended(start, lambda w: ce(w, X, y))  # noqa: B023
    assert_close(end, start)


def test_l1_sparse_relaxes_its_penalty_linearly():
    start, end, _ = after("l1_sparse", epochs=4, gamma=0.1)
    for weight in (0.1, 0.075, 0.05, 0.025):
        start = descended(
            start,
            lambda w: ce(w, *R) + weight * sum(p.abs().sum() for p in w),  # noqa: B023
        )
    assert_close(end, start)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_scrub(temperature):
    options = {"gamma": 0.6, "beta": 0.4, "temperature": temperature, "max_epochs": 2}
    old, end, _ = after("scrub", epochs=3, **options)
    new = old
    for epoch in range(3):
        if epoch < 2:
            new = descended(new, lambda w: -kl(old, w, F[0], temperature))
        if epoch == 0:  # student and teacher agree, and the divergence is flat there
            assert_close(new, old)
        new = descended(new, lambda w: 0.6 * ce(w, *R) + 0.4 * kl(old, w, R[0], temperature))
    assert_close(end, new)


# --- saliency -----------------------------------------------------------------------------------


def test_saliency_is_the_top_share_of_the_summed_gradient():
    model = network()
    mask = saliency_mask(model, F, fraction=0.4, batch_size=3)
    weights = weights_of(model)
    total = [torch.zeros_like(w) for w in weights]
    for x, y in zip(*F, strict=True):
        for part, g in zip(total, slope(lambda w: ce(w, x[None], y[None]), weights), strict=True):  # noqa: B023
            part += g
    size = torch.cat([g.abs().flatten() for g in total])
    marked = torch.cat([m.flatten() for m in mask.values()])
    assert list(mask) == [name for name, _ in model.named_parameters()]
    assert marked.sum() == round(0.4 * 31)
    assert size[marked].min() > size[~marked].max()
    least = saliency_mask(model, F, fraction=0.4, largest=False)
    assert size[torch.cat([m.flatten() for m in least.values()])].max() <= size[marked].min()


def test_saliency_at_its_ends_and_under_ties():
    model = network()
    assert not any(m.any() for m in saliency_mask(model, F, fraction=0).values())
    assert all(m.all() for m in saliency_mask(model, F, fraction=1).values())
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()  # then only the last bias has a gradient
    mask = saliency_mask(model, F, fraction=0.5)
    assert mask["2.bias"].all()
    earlier = torch.cat([m.flatten() for m in mask.values()])[:-3]
    assert earlier[:13].all() and not earlier[13:].any()  # noqa: PT018
    model[2].bias.requires_grad_(False)
    assert "2.bias" not in saliency_mask(model, F, fraction=0.5)


def test_salun_moves_the_marked_weights_alone():
    mask = list(saliency_mask(network(), F, fraction=0.3).values())
    start, end, _ = after("salun", fraction=0.3)
    y = torch.cat([R[1], torch.randint(3, (4,), generator=generator(0))])
    plain = descended(start, lambda w: ce(w, X, y))
    assert_close(end, [torch.where(m, a, b) for m, a, b in zip(mask, plain, start, strict=True)])
    for optimizer in (heavy, lambda p: ASAM(heavy(p)), lambda p: torch.optim.AdamW(p, lr=0.1)):
        start, end, _ = after("salun", fraction=0.3, epochs=5, batch_size=3, optimizer=optimizer)
        for m, a, b in zip(mask, start, end, strict=True):
            assert torch.equal(a[~m], b[~m])
            assert m.sum() == 0 or not torch.equal(a[m], b[m])


def test_released_salun_lets_decay_leak():
    mask = list(saliency_mask(network(), F, fraction=0.3).values())
    decay = lambda p: torch.optim.SGD(p, lr=RATE, weight_decay=0.1)  # noqa: E731
    start, end, _ = after("salun", fraction=0.3, optimizer=decay, variant="released")
    for m, a, b in zip(mask, start, end, strict=True):
        assert_close(b[~m], a[~m] * (1 - RATE * 0.1))
    with pytest.raises(ValueError, match=r'^optimizer must .* variant="released", .*; got SAM\.$'):
        after("salun", variant="released", optimizer=lambda p: SAM(sgd(p)))


# --- influence ----------------------------------------------------------------------------------


def test_woodfisher_is_the_inverse_of_the_damped_fisher():
    random = generator(0)
    g = torch.randn(20, 7, generator=random, dtype=torch.float64)
    v = torch.randn(7, generator=random, dtype=torch.float64)
    for damping in (1e-4, 0.1, 10.0):
        fisher = damping * torch.eye(7, dtype=torch.float64) + g.T @ g / 20
        ours = woodfisher(g, v, damping=damping)
        assert_close(ours, torch.linalg.solve(fisher, v), rtol=1e-8, atol=1e-8)
        few = damping * torch.eye(7, dtype=torch.float64) + g[:3].T @ g[:3] / 3
        ours = woodfisher(g[:3], v, damping=damping)
        assert_close(ours, torch.linalg.solve(few, v), rtol=1e-8, atol=1e-8)


def test_released_recursion_moves_along_the_first_gradient_alone():
    random = generator(0)
    g = torch.randn(20, 7, generator=random, dtype=torch.float64)
    v = torch.randn(7, generator=random, dtype=torch.float64)
    change = woodfisher(g, v, variant="released") - v
    assert change.norm() > 1e-3
    along = (change @ g[0]) / (g[0] @ g[0]) * g[0]
    assert_close(change, along)


def test_influence_is_a_newton_step():
    start, end, _ = after("influence", damping=0.2, scale=1.5)
    rows = [
        torch.cat([g.flatten() for g in slope(lambda w: ce(w, x[None], y[None]), start)])  # noqa: B023
        for x, y in zip(*R, strict=True)
    ]
    g = torch.stack(rows)
    fisher = 0.2 * torch.eye(31, dtype=torch.float64) + g.T @ g / 8
    on_all, on_r = (
        torch.cat([p.flatten() for p in slope(lambda w: ce(w, *s), start)])  # noqa: B023
        for s in ((X, Y), R)
    )
    step = 1.5 * torch.linalg.solve(fisher, on_all - on_r)  # mean losses: the two forms agree
    flat = [torch.cat([p.flatten() for p in w]) for w in (start, end)]
    assert_close(flat[1] - flat[0], step)


def test_influence_direction_is_written_in_sums():
    method, model = Influence(), network()
    method.start(model, Task(R, F, 3, 1, 0))
    sums = [sample_gradients(model, s).sum(0) for s in (F, R)]
    assert_close(method.direction(model), (sums[0] - 4 / 8 * sums[1]) / 12)


def test_influence_finds_the_retrained_model_of_a_quadratic_problem():
    """Where the Fisher matrix is the Hessian, one step is nearly all there is to do."""
    random = generator(3)
    x = torch.randn(400, 2, generator=random, dtype=torch.float64)
    y = (torch.rand(400, generator=random) < x.sum(1).sigmoid()).long()  # the model is right
    kept, gone = (x[:380], y[:380]), (x[380:], y[380:])

    def optimum(x, y):
        model = nn.Linear(2, 2, bias=False).double()
        nn.init.zeros_(model.weight)
        lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=200, tolerance_grad=1e-12)

        def closure():
            lbfgs.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        lbfgs.step(closure)
        return model

    old, new = optimum(x, y), optimum(*kept)
    options = {"damping": 1e-9, "samples": 380}
    done = unlearn(old, kept, gone, method="influence", epochs=1, **options)
    before, left = ((m.weight - new.weight).norm() for m in (old, done.model))
    assert left < 0.4 * before


# --- sharp minmax -------------------------------------------------------------------------------


def norm(tensors):
    return sum(t.square().sum() for t in tensors).sqrt()


def two_gradients(loss, weights, mask, rho=0.05):
    """Return g and g_s, both masked, with an ascent over the masked weights alone."""
    g = [m * s for m, s in zip(mask, slope(loss, weights), strict=True)]
    size = norm(g)
    up = [w + rho * s / size if size > 0 else w for w, s in zip(weights, g, strict=True)]
    return g, [m * s for m, s in zip(mask, slope(loss, up), strict=True)]


@pytest.mark.parametrize("objective", ["ascent", "descent"])
def test_sharp_minmax_as_described(objective):
    options = {"alpha": 0.8, "fraction": 0.4, "lam": 0.7, "forget_objective": objective}
    start, end, done = after("sharp_minmax", rho=0.1, **options)
    own = [m.double() for m in saliency_mask(network(), F, fraction=0.4).values()]
    sign = -1 if objective == "ascent" else 1
    on_r = lambda w: 0.8 * ce(w, *R)  # noqa: E731
    on_f = lambda w: sign * 0.2 * ce(w, *F)  # noqa: E731
    _, g_s = two_gradients(on_r, start, [1 - m for m in own], rho=0.1)
    middle = [w - RATE * s for w, s in zip(start, g_s, strict=True)]
    g, g_s = two_gradients(on_f, middle, own, rho=0.1)
    by_hand = [w - RATE * (a - 0.7 * (b - a)) for w, a, b in zip(middle, g, g_s, strict=True)]
    assert_close(end, by_hand)
    assert done.history[0]["loss"] == pytest.approx(float(on_r(start) + on_f(middle)))


def test_sharp_minmax_as_released():
    start, end, _ = after("sharp_minmax", alpha=0.8, fraction=0.4, variant="released", lam=0.7)
    least = saliency_mask(network(), F, fraction=0.4, largest=False)
    own = [m.double() for m in least.values()]
    everything = [torch.ones_like(m) for m in own]
    _, g_s = two_gradients(lambda w: 0.8 * ce(w, *R), start, everything)
    middle = [w - RATE * (1 - m) * s for w, m, s in zip(start, own, g_s, strict=True)]
    g, g_s = two_gradients(lambda w: -0.2 * ce(w, *F), middle, everything)
    by_hand = [
        w - RATE * (a - 0.7 * (m * b - a)) for w, m, a, b in zip(middle, own, g, g_s, strict=True)
    ]
    assert_close(end, by_hand)
    # The weights meant to stay have moved by (1 + lam) times the first gradient.
    for w, m, a, b in zip(middle, own, g, end, strict=True):
        assert_close((b - w)[m == 0], -RATE * 1.7 * a[m == 0])


HALVES = {
    "momentum and decay": heavy,
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.5),
    "SAM": lambda p: SAM(heavy(p), rho=0.2),
    "ASAM": lambda p: ASAM(heavy(p), rho=0.2, eta=0.1),
}


@pytest.mark.parametrize("optimizer", HALVES.values(), ids=HALVES)
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_each_half_of_sharp_minmax_freezes_the_other(optimizer, fraction, monkeypatch):
    """After any number of steps, a half has moved by its own optimizer's steps and no other's."""
    from flatbook.unlearning import sharp_minmax

    mask = list(saliency_mask(network(), F, fraction=fraction).values())
    calls, model = [], None

    def spy(optimizer, loss):
        before = weights_of(model)
        value = plain(optimizer, loss)
        calls.append((before, weights_of(model)))
        return value

    plain = sharp_minmax.step
    monkeypatch.setattr(sharp_minmax, "step", spy)
    model = network()
    unlearn(
        *(model, R, F),
        method="sharp_minmax",
        epochs=4,
        fraction=fraction,
        optimizer=optimizer,
        batch_size=3,
        inplace=True,
        alpha=0.7,
    )
    assert len(calls) == 24
    for number, (before, end) in enumerate(calls):
        for m, a, b in zip(mask, before, end, strict=True):
            frozen = m if number % 2 == 0 else ~m
            assert torch.equal(a[frozen], b[frozen])
    moved = [
        any(not torch.equal(a, b) for a, b in zip(*calls[n], strict=True))
        for n in range(len(calls))
    ]
    assert all(moved[0::2]) == (fraction < 1)
    assert all(moved[1::2]) == (fraction > 0)


def test_adaptive_ascent_of_both_halves():
    """With ASAM the perturbation is rho * t^2 g / |t g|, masked, on either half."""
    optimizer = lambda p: ASAM(sgd(p), rho=0.4, eta=0.2)  # noqa: E731
    options = {"alpha": 0.8, "fraction": 0.4, "lam": 0.7, "optimizer": optimizer}
    start, end, _ = after("sharp_minmax", **options)
    own = [m.double() for m in saliency_mask(network(), F, fraction=0.4).values()]

    def two(loss, weights, mask):
        g = [m * s for m, s in zip(mask, slope(loss, weights), strict=True)]
        t = [w.abs() + 0.2 if w.ndim == 2 else torch.ones_like(w) for w in weights]
        size = norm([a * b for a, b in zip(t, g, strict=True)])
        up = [w + 0.4 * a**2 * b / size for w, a, b in zip(weights, t, g, strict=True)]
        return g, [m * s for m, s in zip(mask, slope(loss, up), strict=True)]

    _, g_s = two(lambda w: 0.8 * ce(w, *R), start, [1 - m for m in own])
    middle = [w - RATE * s for w, s in zip(start, g_s, strict=True)]
    g, g_s = two(lambda w: -0.2 * ce(w, *F), middle, own)
    assert_close(
        end, [w - RATE * (a - 0.7 * (b - a)) for w, a, b in zip(middle, g, g_s, strict=True)]
    )


def test_sharp_minmax_refuses_other_methods():
    with pytest.raises(
        ValueError,
        match=r"^optimizer must build a plain optimizer, a SAM or an ASAM for sharp_minmax; "
        r"got GSAM\.$",
    ):
        after("sharp_minmax", optimizer=lambda p: GSAM(sgd(p)))
