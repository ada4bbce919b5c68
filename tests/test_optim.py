"""The SAM family against its papers' formulas, and against all that a training loop does to it."""

import copy
import io
import math
import pickle
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from flatbook import runtime
from flatbook.optim import ASAM, GSAM, SAM, LookSAM, MicroBatchSAM, SharpnessMax
from flatbook.runtime import forked_seed, generator
from flatbook.wrapper import ParameterVector

METHODS = [SAM, ASAM, GSAM, LookSAM, SharpnessMax]
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def mlp(seed=0, dtype=torch.float64):
    with forked_seed(seed):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def normed(seed=0):
    with forked_seed(seed):
        return nn.Sequential(
            nn.Conv1d(2, 4, 2),
            nn.BatchNorm1d(4),
            nn.ReLU(),
            nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
            nn.Flatten(),
            nn.Linear(8, 3),
        )


def batch(model, n=16, seed=1):
    random = generator(seed)
    shape = (n, 2, 3) if isinstance(model[0], nn.Conv1d) else (n, 6)
    x = torch.randn(shape, generator=random, dtype=torch.float64)
    return x.to(next(model.parameters()).dtype), torch.randint(0, 3, (n,), generator=random)


def closure_for(optimizer, model, data, scaler=None, autocast=False):
    x, y = data

    def closure():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = cross_entropy(model(x).float() if autocast else model(x), y)
        (loss if scaler is None else scaler.scale(loss)).backward()
        return loss

    return closure


def take(optimizer, model, data, **options):
    """One step of any method; the micro-batch one gets two halves."""
    if isinstance(optimizer, MicroBatchSAM):
        x, y = data
        half = len(x) // 2
        parts = [(x[:half], y[:half]), (x[half:], y[half:])]
        return optimizer.step([closure_for(optimizer, model, part, **options) for part in parts])
    return optimizer.step(closure_for(optimizer, model, data, **options))


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def identical(a, b):
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


# --- the papers' formulas, written again on one flat vector -------------------------------------


class ByHand:
    """The same training, from the definitions: flat vectors, autograd.grad, SGD with momentum."""

    def __init__(self, model, update, *, lr=0.3, momentum=0.9, decay=0.01):
        self.model = copy.deepcopy(model)
        self.shapes = [p.shape for p in model.parameters()]
        self.w = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        self.v = torch.zeros_like(self.w)
        self.update, self.lr, self.momentum, self.decay = update, lr, momentum, decay

    def grad(self, w, data):
        w = w.clone().requires_grad_()
        pieces = w.split([s.numel() for s in self.shapes])
        names = [name for name, _ in self.model.named_parameters()]
        named = {n: p.view(s) for n, p, s in zip(names, pieces, self.shapes, strict=True)}
        loss = cross_entropy(torch.func.functional_call(self.model, named, data[0]), data[1])
        return torch.autograd.grad(loss, w)[0], loss.detach()

    def step(self, data):
        u, loss = self.update(self, data)
        self.v = self.momentum * self.v + u + self.decay * self.w
        self.w = self.w - self.lr * self.v
        return loss


def sam(rho):
    def update(run, data):
        g, loss = run.grad(run.w, data)
        return run.grad(run.w + rho * g / g.norm(), data)[0], loss

    return update


def asam(rho, eta):
    def update(run, data):
        g, loss = run.grad(run.w, data)
        is_weight = torch.cat([torch.full((s.numel(),), len(s) > 1) for s in run.shapes])
        t = torch.where(is_weight, run.w.abs() + eta, 1.0)
        return run.grad(run.w + rho * t**2 * g / (t * g).norm(), data)[0], loss

    return update


def gsam(rho_max, rho_min, lr_max, lr_min, alpha):
    def update(run, data):
        rho = rho_min + (rho_max - rho_min) * (run.lr - lr_min) / (lr_max - lr_min)
        g, loss = run.grad(run.w, data)
        g_s = run.grad(run.w + rho * g / g.norm(), data)[0]
        unit = g_s / g_s.norm()
        return g_s - alpha * (g - torch.dot(g, unit) * unit), loss

    return update


def looksam(rho, k, alpha):
    memory = {"t": 0}

    def update(run, data):
        g, loss = run.grad(run.w, data)
        if memory["t"] % k == 0:
            u = run.grad(run.w + rho * g / g.norm(), data)[0]
            cosine = torch.dot(g, u) / (g.norm() * u.norm())
            memory["g_v"] = u - u.norm() * cosine * g / g.norm()
        else:
            u = g + alpha * g.norm() / memory["g_v"].norm() * memory["g_v"]
        memory["t"] += 1
        return u, loss

    return update


def sharpness_max(rho, lam):
    def update(run, data):
        g, loss = run.grad(run.w, data)
        g_s = run.grad(run.w + rho * g / g.norm(), data)[0]
        return g - lam * (g_s - g), loss

    return update


@pytest.mark.parametrize(
    ("method", "options", "update"),
    [
        (SAM, {"rho": 0.2}, sam(0.2)),
        (ASAM, {"rho": 0.7, "eta": 0.02}, asam(0.7, 0.02)),
        (GSAM, {"rho": 0.2, "alpha": 0.6}, gsam(0.2, 0.0, 0.3, 0.0, 0.6)),
        (LookSAM, {"rho": 0.2, "k": 4, "alpha": 0.5}, looksam(0.2, 4, 0.5)),
        (SharpnessMax, {"rho": 0.2, "lam": 0.8}, sharpness_max(0.2, 0.8)),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_steps_are_those_of_the_paper(method, options, update):
    model = mlp()
    run = ByHand(model, update)
    base = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)
    optimizer = method(base, **options)
    for seed in range(9):  # two cycles of LookSAM, and one step of the third
        data = batch(model, seed=seed)
        assert_close(optimizer.step(closure_for(optimizer, model, data)), run.step(data), **EXACT)
        assert_close(nn.utils.parameters_to_vector(model.parameters()).detach(), run.w, **EXACT)


def test_the_radius_of_gsam_follows_the_scheduler():
    model = mlp()
    base = torch.optim.SGD(model.parameters(), lr=0.3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(base, T_max=6, eta_min=0.03)
    optimizer = GSAM(base, rho=0.4, rho_min=0.1, lr_min=0.03, alpha=0.5)
    run = ByHand(model, gsam(0.4, 0.1, 0.3, 0.03, 0.5), momentum=0.0, decay=0.0)
    radii = []
    for t in range(7):
        radii.append(optimizer.radii()[0])
        run.lr = 0.03 + 0.27 * (1 + math.cos(math.pi * t / 6)) / 2
        data = batch(model, seed=t)
        optimizer.step(closure_for(optimizer, model, data))
        run.step(data)
        scheduler.step()
        assert_close(nn.utils.parameters_to_vector(model.parameters()).detach(), run.w, **EXACT)
    assert radii[0] == pytest.approx(0.4)
    assert radii[3] == pytest.approx(0.25)
    assert radii[6] == pytest.approx(0.1)


def test_gsam_knows_the_peak_of_a_schedule_that_starts_low():
    model = mlp()
    base = torch.optim.SGD(model.parameters(), lr=0.3)
    scheduler = torch.optim.lr_scheduler.LinearLR(base, start_factor=0.1, total_iters=3)
    optimizer = GSAM(base, rho=0.4)
    radii = []
    for _ in range(4):
        radii.append(optimizer.radii()[0])
        take(optimizer, model, batch(model))
        scheduler.step()
    assert radii == pytest.approx([0.04, 0.16, 0.28, 0.4])


def test_gsam_knows_the_peak_that_one_cycle_notes():
    model = mlp()
    base = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = GSAM(base, rho=0.4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=8)
    radii = []
    for _ in range(7):
        radii.append(optimizer.radii()[0] / base.param_groups[0]["lr"])
        take(optimizer, model, batch(model))
        scheduler.step()
    assert radii == pytest.approx([0.4 / 0.5] * 7)


def test_gsam_goes_on_bit_for_bit_when_rebuilt_at_another_rate():
    model = mlp(dtype=torch.float32)
    optimizer = GSAM(torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9), rho=0.3)
    for t in range(6):
        if t == 3:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        optimizer.param_groups[0]["lr"] = 0.4 / (1 + t)
        take(optimizer, model, batch(model, seed=t))
    resumed = mlp(seed=9, dtype=torch.float32)
    optimizer = GSAM(torch.optim.SGD(resumed.parameters(), lr=0.07, momentum=0.9), rho=0.3)
    resumed.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    for t in range(3, 6):
        optimizer.param_groups[0]["lr"] = 0.4 / (1 + t)
        take(optimizer, resumed, batch(resumed, seed=t))
    assert identical(weights(resumed), weights(model))
    assert "GSAM" not in GSAM(optimizer.base_optimizer, lr_max=0.5).state_dict()


def test_gsam_refuses_a_learning_rate_outside_its_range():
    model = mlp()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = GSAM(base)
    base.param_groups[0]["lr"] = 0.5
    with pytest.raises(ValueError, match=r"must lie in lr_min..lr_max, which is 0.0..0.1; got 0.5"):
        take(optimizer, model, batch(model))
    GSAM(base, lr_max=0.5)
    with pytest.raises(ValueError, match=r"rho_min must be at most rho, which is 0.05; got 0.1"):
        GSAM(base, rho_min=0.1)
    with pytest.raises(ValueError, match=r"lr_min must be below lr_max, which is 0.5; got 0.7"):
        GSAM(base, lr_min=0.7)


def test_gsam_descends_the_perturbed_loss_as_sam_does_and_the_gap_more():
    model = mlp()
    optimizer = GSAM(torch.optim.SGD(model.parameters(), lr=1e-4), rho=0.5, alpha=2.0)
    data = batch(model)
    run = ByHand(model, None)
    g, _ = run.grad(run.w, data)
    g_s, _ = run.grad(run.w + 0.5 * g / g.norm(), data)
    optimizer.step(closure_for(optimizer, model, data))
    u = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    assert_close(torch.dot(u, g_s), torch.dot(g_s, g_s), **EXACT)
    gap = g_s - g
    assert torch.dot(u, gap) > torch.dot(g_s, gap)


def test_micro_batches_are_perturbed_one_by_one_and_averaged():
    model = mlp()
    parts = [batch(model, n, seed=n) for n in (8, 8, 5)]
    total = 21

    def update(run, _):
        pulls = []
        for part in parts:
            g, loss = run.grad(run.w, part)
            pulls.append(
                (len(part[0]) / total, run.grad(run.w + 0.3 * g / g.norm(), part)[0], loss)
            )
        return sum(a * u for a, u, _ in pulls), sum(a * loss for a, _, loss in pulls)

    run = ByHand(model, update)
    base = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)
    optimizer = MicroBatchSAM(base, rho=0.3)
    closures = [closure_for(optimizer, model, part) for part in parts]
    for sizes in ([8, 8, 5], torch.tensor([16.0, 16.0, 10.0])):
        assert_close(optimizer.step(closures, weights=sizes), run.step(None), **EXACT)
        assert_close(nn.utils.parameters_to_vector(model.parameters()).detach(), run.w, **EXACT)


def test_one_micro_batch_is_sam_and_equal_weights_are_the_default():
    finals = []
    for make in (
        lambda opt, model, data: opt(SAM).step(closure_for(opt.made, model, data)),
        lambda opt, model, data: opt(MicroBatchSAM).step([closure_for(opt.made, model, data)]),
        lambda opt, model, data: opt(MicroBatchSAM).step(
            [closure_for(opt.made, model, data)] * 2, weights=[3, 3]
        ),
        lambda opt, model, data: opt(MicroBatchSAM).step([closure_for(opt.made, model, data)] * 2),
    ):
        model = mlp()

        def opt(method, model=model):
            opt.made = method(torch.optim.SGD(model.parameters(), lr=0.1))
            return opt.made

        make(opt, model, batch(model))
        finals.append(weights(model))
    for other in finals[1:]:
        assert_close(finals[0], other, **EXACT)


# --- theorems and controls ----------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), method=st.sampled_from([SAM, ASAM, SharpnessMax, LookSAM]))
def test_a_tiny_radius_is_the_base_optimizer(seed, method):
    plain, model = mlp(seed), mlp(seed)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    optimizer = method(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rho=1e-9)
    if method is LookSAM:
        optimizer.alpha = 0.0  # the remembered direction is rescaled, however short it is
    for step in range(3):
        data = batch(model, seed=seed + step)
        reference.step(closure_for(reference, plain, data))
        optimizer.step(closure_for(optimizer, model, data))
    assert_close(weights(model), weights(plain), rtol=1e-7, atol=1e-7)


@settings(max_examples=30, deadline=None)
@given(rho=st.floats(1e-3, 10), seed=st.integers(0, 1000))
def test_the_ascent_has_length_rho(rho, seed):
    model = mlp(seed)
    optimizer = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=rho)
    _, g = optimizer.gradient(closure_for(optimizer, model, batch(model)))
    epsilon = optimizer.ascent(g)
    assert_close(epsilon.norm.item(), rho, rtol=1e-12, atol=0)
    assert_close((epsilon @ g).item(), rho * g.norm.item(), rtol=1e-12, atol=0)


def test_asam_does_not_see_a_rescaling_of_layers():
    """W1 / c and c W2 make the same ReLU network: ASAM moves its function alike, SAM does not."""

    def function_change(method, c):
        with forked_seed(0):
            model = nn.Sequential(
                nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False)
            )
        model = model.double()
        with torch.no_grad():
            model[0].weight.div_(c)
            model[2].weight.mul_(c)
        options = {"eta": 0.0} if method is ASAM else {}
        optimizer = method(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.5, **options)
        data = batch(model)
        _, g = optimizer.gradient(closure_for(optimizer, model, data))
        with optimizer.moved_by(optimizer.ascent(g)):
            return model(data[0]).detach()

    assert_close(function_change(ASAM, 1.0), function_change(ASAM, 7.0))
    assert not torch.allclose(function_change(SAM, 1.0), function_change(SAM, 7.0), rtol=0.1)


def valley(method, steps=400, **options):
    """Run on (u v - 1)² / 2, whose minima u v = 1 have curvature u² + v²; return that."""
    u, v = (nn.Parameter(torch.tensor(a, dtype=torch.float64)) for a in (2.0, 0.6))
    optimizer = torch.optim.SGD([u, v], lr=0.02)
    if method is not None:
        optimizer = method(optimizer, **options)

    def closure():
        optimizer.zero_grad()
        loss = 0.5 * (u * v - 1) ** 2
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return (u**2 + v**2).item()


def test_sam_lowers_the_curvature_of_a_valley_and_its_opposite_raises_it():
    plain = valley(None)
    for method in (SAM, GSAM, ASAM, LookSAM):
        assert valley(method, rho=0.2) < plain - 0.1
    assert valley(SharpnessMax, rho=0.2, lam=1.0) > plain + 0.1


# --- one step leaves nothing behind that it should not ------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fails_in", [1, 2])
def test_weights_come_back_bit_for_bit_when_the_closure_raises(method, fails_in):
    model = mlp(dtype=torch.float32)
    optimizer = method(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.37)
    before, inside = weights(model), []
    closure = closure_for(optimizer, model, batch(model))

    def failing():
        inside.append(weights(model))
        if len(inside) == fails_in:
            raise KeyboardInterrupt
        return closure()

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(failing)
    assert identical(weights(model), before)
    assert identical(inside[-1], before) is (fails_in == 1)


@pytest.mark.parametrize("method", [*METHODS, MicroBatchSAM])
def test_running_statistics_change_once_per_step(method):
    model, reference = normed(), normed()
    optimizer = method(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    data = batch(model)
    take(optimizer, model, data)
    reference(data[0][: len(data[0]) // 2] if method is MicroBatchSAM else data[0])
    for (name, ours), theirs in zip(model.named_buffers(), reference.buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    assert int(model[1].num_batches_tracked) == 1
    assert model[1].track_running_stats
    assert model[3].track_running_stats


def test_without_the_model_the_perturbed_pass_is_counted_too():
    """The control: protection is what makes the difference above."""
    model = normed()
    optimizer = SAM(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.warns(
        UserWarning, match="SAM was not given a model, but the closure runs BatchNorm"
    ):
        take(optimizer, model, batch(model))
    assert int(model[1].num_batches_tracked) == 2
    assert not nn.modules.module._global_forward_pre_hooks
    take(optimizer, model, batch(model))  # once is enough


def test_frozen_or_absent_norm_layers_do_not_warn():
    model = normed()
    model[1].eval()
    model[3].eval()
    take(SAM(torch.optim.SGD(model.parameters(), lr=0.1)), model, batch(model))
    model = mlp()
    take(SAM(torch.optim.SGD(model.parameters(), lr=0.1)), model, batch(model))


def test_a_frozen_norm_layer_stays_frozen():
    model = normed()
    model[1].eval()
    take(SAM(torch.optim.SGD(model.parameters(), lr=0.1), model=model), model, batch(model))
    assert torch.equal(model[1].running_mean, torch.zeros(4))
    assert not torch.equal(model[3].running_mean, torch.zeros(4))


@pytest.mark.parametrize("zero", [True, False])
def test_it_does_not_matter_how_the_closure_zeroes(zero):
    finals = []
    for set_to_none in (True, zero):
        model = mlp()
        optimizer = LookSAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), k=2)
        x, y = batch(model)

        def closure(optimizer=optimizer, model=model, x=x, y=y, none=set_to_none):
            optimizer.zero_grad(set_to_none=none)
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        for _ in range(4):
            optimizer.step(closure)
        finals.append(weights(model))
    assert identical(*finals)


def test_a_parameter_that_is_not_reached_stays():
    used, unused = (nn.Parameter(torch.ones(2)) for _ in range(2))
    base = torch.optim.AdamW([used, unused], lr=0.1, weight_decay=0.5)
    optimizer = SAM(base)

    def closure():
        optimizer.zero_grad()
        loss = used.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert torch.equal(unused, torch.ones(2))
    assert unused not in base.state
    assert not torch.equal(used, torch.ones(2))


def test_a_step_that_failed_does_not_haunt_the_next():
    used, once = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = SAM(torch.optim.AdamW([used, once], lr=0.1, weight_decay=0.5))
    calls = []

    def closure():
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        optimizer.zero_grad()
        loss = used.square().sum() + (once.sum() if len(calls) == 1 else 0.0)
        loss.backward()
        return loss

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    optimizer.step(closure)
    assert torch.equal(once, torch.ones(2))


@pytest.mark.parametrize("method", METHODS)
def test_a_parameter_reached_in_one_pass_only_counts_as_zero_in_the_other(method):
    for first in (True, False):
        a, b = (nn.Parameter(torch.ones(2, 2, dtype=torch.float64)) for _ in range(2))
        optimizer = method(torch.optim.SGD([a, b], lr=0.1))
        calls = []

        def closure(optimizer=optimizer, a=a, b=b, calls=calls, first=first):
            optimizer.zero_grad()
            loss = a.square().sum()
            if (len(calls) == 0) == first:
                loss = loss + b.square().sum()
            calls.append(1)
            loss.backward()
            return loss

        optimizer.step(closure)
        assert b.isfinite().all()
        assert b.grad is not None


def test_groups_may_have_their_own_radius():
    model = mlp()
    groups = [{"params": model[0].parameters(), "rho": 0.4}, {"params": model[2].parameters()}]
    optimizer = SAM(torch.optim.SGD(groups, lr=0.1), rho=0.1)
    _, g = optimizer.gradient(closure_for(optimizer, model, batch(model)))
    epsilon = optimizer.ascent(g)
    for e, t, rho in zip(epsilon.tensors, g.tensors, [0.4, 0.4, 0.1, 0.1], strict=True):
        assert_close(e, rho * t / g.norm, **EXACT)
    optimizer.param_groups[1]["rho"] = -1.0
    with pytest.raises(ValueError, match=r'"rho" of a parameter group must be .* got -1.0'):
        take(optimizer, model, batch(model))


def test_asam_leaves_biases_and_norms_at_their_own_scale():
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm((1, 6)), nn.Linear(6, 3)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(3.0)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    g = ParameterVector(torch.ones_like(p) for p in model.parameters())
    for given_model, norms in ((model, 1.0), (None, 9.0)):  # two axes: the type must tell
        t2 = ASAM(base, model=given_model, eta=0.0, rho=1.0).ascent(g)
        ratios = [t.mean() / t2.tensors[1].mean() for t in t2.tensors]
        assert_close(torch.stack(ratios).tolist(), [9.0, 1.0, norms, norms, 9.0, 1.0])


# --- precision, scaling, non-finite gradients ---------------------------------------------------


@pytest.mark.parametrize("outside", [False, True])
def test_autocast_sees_the_perturbed_weights(outside):
    """Autocast caches half-precision weights, which must not outlive the ascent."""
    model = mlp(dtype=torch.float32)
    optimizer = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=5.0)
    data = batch(model)
    losses = []
    inner = closure_for(optimizer, model, data, autocast=True)

    def closure():
        losses.append(inner())
        return losses[-1]

    with torch.autocast("cpu", torch.bfloat16, enabled=outside):
        optimizer.step(closure)
        optimizer.step(closure)
    assert losses[1] > losses[0] + 0.5
    assert losses[2] < losses[0]
    assert model[0].weight.dtype == torch.float32


def test_norms_and_products_are_taken_in_double():
    tensors = [torch.full((1000,), 0.1, dtype=torch.bfloat16), torch.ones(3, dtype=torch.float16)]
    for some in (tensors, tensors[:1], tensors[1:]):
        v = ParameterVector(some)
        exact = sum(t.double().square().sum() for t in some)
        assert v.norm.dtype == (v @ v).dtype == torch.float64
        assert_close(v.norm.double(), exact.sqrt(), rtol=1e-6, atol=0)
        assert_close((v @ v).double(), exact, rtol=1e-6, atol=0)


@pytest.fixture(params=["double", "single"])
def widest(request, monkeypatch):
    """Let the device have float64, or not, as MPS."""
    if request.param == "single":
        monkeypatch.setattr(runtime, "widened", lambda value: value.float())


@pytest.mark.usefixtures("widest")
@pytest.mark.parametrize("size", [1e-25, 1.0, 1e20, 1e37])
def test_vectors_of_any_size_have_a_norm_and_a_component(size):
    a, b = (torch.randn(50, generator=generator(seed), dtype=torch.float64) for seed in (1, 2))
    v, w = (ParameterVector((size * t).float().split([20, 30])) for t in (a, b))
    assert_close(v.norm.double() / size, a.norm(), rtol=1e-6, atol=0)
    exact = (a @ b) / (b @ b)
    assert_close(v.component(w).double(), exact, rtol=1e-5, atol=0)
    assert v.nought == 0
    nothing = ParameterVector([torch.zeros(3)])
    assert nothing.norm == nothing.component(nothing) == 0


@pytest.mark.usefixtures("widest")
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_only_entries_that_are_not_finite_make_nought_nan(bad, dtype):
    most = torch.full((9,), torch.finfo(dtype).max, dtype=dtype)
    assert ParameterVector([most, most]).nought == 0
    assert ParameterVector([most, torch.tensor([1.0, bad], dtype=dtype)]).nought.isnan()


@pytest.mark.usefixtures("widest")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1e-25, 1e20])
def test_the_size_of_the_loss_only_scales_the_step(method, size):
    """Every method looks at unit directions, so c L is stepped along as L with c times the rate."""
    finals = []
    for scale in (1.0, size):
        model = mlp(dtype=torch.float32)
        optimizer = method(torch.optim.SGD(model.parameters(), lr=0.1 / scale), rho=0.1)
        for seed in range(3):
            data = batch(model, seed=seed)

            def closure(optimizer=optimizer, model=model, data=data, scale=scale):
                optimizer.zero_grad()
                loss = scale * cross_entropy(model(data[0]), data[1])
                loss.backward()
                return loss

            optimizer.step(closure)
        finals.append(weights(model))
    for one, other in zip(*finals, strict=True):
        assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", [*METHODS, MicroBatchSAM])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_train(method, dtype):
    model, exact = mlp(dtype=torch.float32).to(dtype), mlp()
    pairs = []
    for net in (model, exact):
        optimizer = method(torch.optim.SGD(net.parameters(), lr=0.2), rho=0.3)
        pairs.append([take(optimizer, net, batch(net)) for _ in range(8)])
    assert all(p.dtype == dtype for p in model.parameters())
    assert_close(torch.stack(pairs[0]).double(), torch.stack(pairs[1]), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("method", [*METHODS, MicroBatchSAM])
def test_a_scaler_changes_nothing_but_the_scale(method):
    """Scales are powers of two, so every method must give the very same weights."""
    finals = []
    for scaled in (False, True):
        model = mlp(dtype=torch.float32)
        scaler = torch.amp.GradScaler("cpu", growth_interval=4) if scaled else None
        base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = method(base, scaler=scaler)
        for seed in range(6):
            take(optimizer, model, batch(model, seed=seed), scaler=scaler)
        finals.append(weights(model))
    assert identical(*finals)
    assert scaler.get_scale() == 2.0**17


class Explodes:
    """A closure whose gradient is bad in the passes listed."""

    def __init__(self, closure, parameters, bad, value=float("nan")):
        self.closure, self.parameters, self.bad, self.value = closure, parameters, bad, value
        self.calls = 0

    def __call__(self):
        loss = self.closure()
        if self.calls in self.bad:
            self.parameters[-1].grad[0] = self.value
        self.calls += 1
        return loss


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [{0}, {1}])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_gradient_in_either_pass_skips_the_step(method, bad, value):
    model = mlp()
    base = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = method(base)
    parameters = list(model.parameters())
    data = batch(model)
    if method is LookSAM:
        optimizer.k = 1
    take(optimizer, model, data)
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    closure = closure_for(optimizer, model, data)
    with pytest.warns(RuntimeWarning, match=f"{method.__name__} skipped a step") as caught:
        optimizer.step(Explodes(closure, parameters, bad, value))
    optimizer.step(Explodes(closure, parameters, bad, value))  # a second warning would be an error
    assert caught[0].filename == __file__
    assert identical(weights(model), before)
    after = optimizer.state_dict()
    for key, entry in state["state"].items():
        for name, tensor in entry.items():
            assert torch.equal(after["state"][key][name], tensor), name
    take(optimizer, model, data)
    assert not identical(weights(model), before)


def test_nan_never_reaches_the_weights_of_the_second_pass():
    model = mlp()
    optimizer = SAM(torch.optim.SGD(model.parameters(), lr=0.1))
    finite = []
    closure = closure_for(optimizer, model, batch(model))

    def watched():
        finite.append(all(p.isfinite().all() for p in model.parameters()))
        return closure()

    with pytest.warns(RuntimeWarning, match="skipped"):
        optimizer.step(Explodes(watched, list(model.parameters()), {0}))
    assert finite == [True, True]


@pytest.mark.parametrize("method", [SAM, LookSAM, MicroBatchSAM])
@pytest.mark.parametrize("bad", [{0}, {1}])
def test_an_overflow_in_either_pass_lowers_the_scale_and_skips(method, bad):
    model = mlp(dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = method(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), scaler=scaler)
    before = weights(model)
    closure = closure_for(optimizer, model, batch(model), scaler=scaler)
    exploding = Explodes(closure, list(model.parameters()), bad, float("inf"))
    optimizer.step([exploding] if method is MicroBatchSAM else exploding)
    assert scaler.get_scale() == 512.0
    assert identical(weights(model), before)
    assert not optimizer.state
    optimizer.step([closure] if method is MicroBatchSAM else closure)
    assert scaler.get_scale() == 512.0
    assert not identical(weights(model), before)


def test_an_overflow_is_noticed_whichever_parameters_are_reached():
    unused, w = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = SAM(torch.optim.SGD([unused, w], lr=0.1), scaler=scaler)

    def closure():
        optimizer.zero_grad()
        loss = w.square().sum()
        scaler.scale(loss).backward()
        return loss

    optimizer.step(Explodes(closure, [w], {0}))
    assert scaler.get_scale() == 512.0
    assert torch.equal(w, torch.ones(2))


def test_looksam_climbs_again_after_a_skipped_climb():
    model = mlp()
    optimizer = LookSAM(torch.optim.SGD(model.parameters(), lr=0.1), k=3)
    closure = closure_for(optimizer, model, batch(model))
    with pytest.warns(RuntimeWarning, match="LookSAM skipped"):
        optimizer.step(Explodes(closure, list(model.parameters()), {1}))
    counted = Explodes(closure, [], set())
    optimizer.step(counted)
    assert counted.calls == 2
    optimizer.step(counted)
    assert counted.calls == 3
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_disabled_scaler_is_none():
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = SAM(torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)
    before = weights(model)
    closure = closure_for(optimizer, model, batch(model), scaler=scaler)
    with pytest.warns(RuntimeWarning, match="skipped"):
        optimizer.step(Explodes(closure, list(model.parameters()), {1}))
    assert identical(weights(model), before)
    optimizer.step(closure)
    assert not identical(weights(model), before)


def test_a_closure_that_forgets_to_scale_is_told():
    model = mlp()
    optimizer = SAM(torch.optim.SGD(model.parameters()), scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match=r"closure must call scaler.scale\(loss\).backward\(\)"):
        take(optimizer, model, batch(model))


class CountsWaits(TorchDispatchMode):
    """Counts reads of a tensor's value, each of which waits for an accelerator."""

    waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.waits += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", [*METHODS, MicroBatchSAM])
def test_a_step_waits_for_the_device_once(method):
    model = mlp()
    optimizer = method(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for _ in range(2):
        with CountsWaits() as counter:
            take(optimizer, model, batch(model))
        assert counter.waits == 1


@pytest.mark.parametrize("method", [*METHODS, MicroBatchSAM])
def test_a_zero_gradient_means_no_perturbation_and_no_nan(method):
    w = nn.Parameter(torch.zeros(2, 2))
    optimizer = method(torch.optim.SGD([w], lr=0.1))
    seen = []

    def closure():
        optimizer.zero_grad()
        seen.append(w.detach().clone())
        loss = w.square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step([closure] if method is MicroBatchSAM else closure)
    assert all(torch.equal(s, torch.zeros(2, 2)) for s in seen)
    assert torch.equal(w, torch.zeros(2, 2))


# --- masks --------------------------------------------------------------------------------------


def some_mask(model, seed=3):
    random = generator(seed)
    return {
        name: torch.rand(p.shape, generator=random) < 0.5
        for name, p in model.named_parameters()
        if name != "2.bias"
    }


@pytest.mark.parametrize("method", [*METHODS, MicroBatchSAM])
@pytest.mark.parametrize(
    "base",
    [
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    ],
    ids=["adamw", "sgd"],
)
def test_frozen_coordinates_never_move(method, base):
    model = mlp(dtype=torch.float32)
    mask = some_mask(model)
    # Momentum from before the freeze pushes on.
    optimizer = base(model.parameters())
    optimizer.step(closure_for(optimizer, model, batch(model)))
    optimizer = method(optimizer, model=model, mask=mask)
    before = dict(zip(dict(model.named_parameters()), weights(model), strict=True))
    inside = []
    handle = model[0].register_forward_pre_hook(lambda *_: inside.append(weights(model)))
    for seed in range(50):
        take(optimizer, model, batch(model, seed=seed))
    handle.remove()
    names = list(before)
    for name, keep in mask.items():
        p = dict(model.named_parameters())[name]
        assert torch.equal(p[~keep], before[name][~keep])
        assert not torch.equal(p[keep], before[name][keep])
        for seen in inside:  # nor in the ascent
            assert torch.equal(seen[names.index(name)][~keep], before[name][~keep])
    assert not torch.equal(model[2].bias, before["2.bias"])


def test_a_mask_is_copied():
    model = mlp()
    keep = torch.zeros(3, dtype=torch.bool)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = SAM(base, model=model, mask={"2.bias": keep})
    keep.fill_(True)
    before = model[2].bias.detach().clone()
    take(optimizer, model, batch(model))
    assert torch.equal(model[2].bias, before)


def test_masked_coordinates_do_not_shorten_the_ascent():
    model = mlp()
    mask = some_mask(model)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = SAM(base, model=model, mask=mask, rho=0.3)
    _, g = optimizer.gradient(closure_for(optimizer, model, batch(model)))
    assert_close(optimizer.ascent(g).norm.item(), 0.3)
    assert_close(g.norm, torch.cat([t.reshape(-1) for t in g.tensors]).norm())


def test_a_bad_gradient_at_a_frozen_coordinate_does_not_matter():
    model = mlp()
    keep = torch.ones(3, dtype=torch.bool)
    keep[0] = False
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = SAM(base, model=model, mask={"2.bias": keep})
    before = weights(model)
    closure = closure_for(optimizer, model, batch(model))
    optimizer.step(Explodes(closure, list(model.parameters()), {0, 1}))
    assert not identical(weights(model), before)
    assert all(p.isfinite().all() for p in model.parameters())


def test_tied_weights_are_frozen_by_either_name():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = torch.ones(2, 3, 3, dtype=torch.bool)
    first[0], second[1] = False, False
    optimizer = SAM(base, model=model, mask={"0.weight": first, "1.weight": second})
    before = model[0].weight.detach().clone()

    def closure():
        optimizer.zero_grad()
        loss = model(torch.eye(3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    moved = model[0].weight != before
    assert moved.any(dim=1).tolist() == [False, False, True]


# --- an optimizer like any other ----------------------------------------------------------------


@pytest.mark.parametrize("method", [*METHODS, MicroBatchSAM])
@pytest.mark.parametrize("attach_to", ["wrapper", "base"])
@pytest.mark.parametrize("reload", ["nothing", "wrapper", "base"])
def test_a_scheduler_attaches_to_either(method, attach_to, reload):
    model = mlp()
    base = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
    optimizer = method(base)
    scheduler = torch.optim.lr_scheduler.StepLR(
        {"wrapper": optimizer, "base": base}[attach_to], step_size=1, gamma=0.5
    )
    rates = []
    for t in range(4):
        take(optimizer, model, batch(model))
        scheduler.step()
        rates.append((optimizer.param_groups[0]["lr"], base.param_groups[0]["lr"]))
        if t == 1 and reload == "wrapper":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if t == 1 and reload == "base":
            base.load_state_dict(copy.deepcopy(base.state_dict()))
    assert rates == [(0.2, 0.2), (0.1, 0.1), (0.05, 0.05), (0.025, 0.025)]
    assert optimizer.param_groups is base.param_groups
    assert optimizer.state is base.state
    assert "momentum_buffer" in optimizer.state[model[0].weight]


@pytest.mark.parametrize("method", [*METHODS, MicroBatchSAM])
@pytest.mark.parametrize(
    "base",
    [
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    ],
    ids=["adamw", "sgd"],
)
@pytest.mark.parametrize("at", [1, 3])
def test_a_resumed_optimizer_continues_bit_for_bit(method, base, at):
    def make(model):
        optimizer = method(base(model.parameters()))
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

    model = mlp(dtype=torch.float32)
    optimizer, scheduler = make(model)
    for t in range(7):
        if t == at:
            file = io.BytesIO()
            torch.save([o.state_dict() for o in (model, optimizer, scheduler)], file)
        take(optimizer, model, batch(model, seed=t))
        scheduler.step()

    file.seek(0)
    resumed = mlp(seed=99, dtype=torch.float32)
    optimizer, scheduler = make(resumed)
    states = torch.load(file, weights_only=True)
    for thing, state in zip((resumed, optimizer, scheduler), states, strict=True):
        thing.load_state_dict(state)
    for t in range(at, 7):
        take(optimizer, resumed, batch(resumed, seed=t))
        scheduler.step()
    assert identical(weights(resumed), weights(model))


def test_state_without_memory_is_that_of_the_base_and_foreign_state_is_refused():
    model = mlp()
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    take(SAM(base), model, batch(model))
    state = SAM(base).state_dict()
    assert state.keys() == base.state_dict().keys()
    with pytest.raises(ValueError, match="state_dict must come from LookSAM; got one without"):
        LookSAM(base).load_state_dict(state)
    with pytest.raises(ValueError, match=r"state_dict must be what SAM.state_dict\(\) returned"):
        SAM(base).load_state_dict({"weights": 1})
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ValueError, match="parameter group"):
        SAM(other).load_state_dict(state)


@pytest.mark.parametrize(
    ("method", "own", "message"),
    [
        (LookSAM, {}, "state_dict.'LookSAM'. must be what LookSAM remembers"),
        (LookSAM, None, "state_dict.'LookSAM'. must be what LookSAM remembers"),
        (LookSAM, {"steps": 1, "g_v": [1]}, "must be what LookSAM remembers"),
        (LookSAM, {"steps": -1, "g_v": {}}, "steps in .* must be a whole number"),
        (LookSAM, {"steps": 3, "g_v": {}}, "must hold the g_v of its 3 steps; got none"),
        (LookSAM, {"steps": 1, "g_v": {9: torch.ones(3)}}, "key of g_v must be .* 0 to 3; got 9"),
        (LookSAM, {"steps": 1, "g_v": {3: torch.ones(2)}}, r"g_v.3. must have shape \(3\)"),
        (LookSAM, {"steps": 1, "g_v": {3: "abc"}}, "g_v.3. must be a tensor"),
        (GSAM, {}, "state_dict.'GSAM'. must be what GSAM remembers"),
        (GSAM, {"first_lr": {0: "fast"}}, "a learning rate in .* must be a finite number"),
    ],
)
def test_state_that_does_not_fit_changes_nothing(method, own, message):
    model = mlp()
    optimizer = method(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    take(optimizer, model, batch(model))
    before = copy.deepcopy(optimizer.state_dict())
    bad = copy.deepcopy(before) | {method.__name__: own}
    bad["param_groups"][0]["lr"] = 9.0
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(bad)
    assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("method", [*METHODS, MicroBatchSAM])
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_are_independent_and_go_on_alike(method, clone):
    model = mlp()
    optimizer = method(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    take(optimizer, model, batch(model))
    model2, optimizer2 = clone((model, optimizer))
    assert optimizer2.param_groups is optimizer2.base_optimizer.param_groups
    before = weights(model)
    for _ in range(2):
        take(optimizer2, model2, batch(model2))
    assert identical(weights(model), before)
    for _ in range(2):
        take(optimizer, model, batch(model))
    assert identical(weights(model), weights(model2))


def test_step_hooks_zero_grad_and_new_groups_work():
    model = mlp()
    base = torch.optim.SGD(model[0].parameters(), lr=0.1)
    optimizer = LookSAM(base, k=2)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append("wrapper"))
    base.register_step_post_hook(lambda *_: seen.append("base"))
    take(optimizer, model, batch(model))
    assert seen == ["base", "wrapper"]
    assert model[0].weight.grad is not None
    optimizer.zero_grad()
    assert model[0].weight.grad is None
    before = weights(model)
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.2, "rho": 0.3})
    assert base.param_groups[1]["lr"] == 0.2
    for _ in range(2):  # in the first, the remembered direction does not know the new group
        take(optimizer, model, batch(model))
        assert not any(map(torch.equal, weights(model), before))
        before = weights(model)
    with pytest.raises(ValueError, match=r'"rho" of a parameter group must be'):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "rho": 0.0})
    assert len(base.param_groups) == 2


def test_repr_shows_the_method_and_the_base():
    text = repr(GSAM(torch.optim.SGD(mlp().parameters(), lr=0.25), rho=0.1))
    assert text.startswith(
        "GSAM(rho=0.1, rho_min=0.0, lr_max=None, lr_min=0.0, alpha=0.4) around SGD ("
    )
    assert "lr: 0.25" in text


def test_the_loss_is_detached_and_a_float_is_fine():
    model = mlp()
    optimizer = SAM(torch.optim.SGD(model.parameters(), lr=0.1))
    closure = closure_for(optimizer, model, batch(model))
    assert not optimizer.step(closure).requires_grad
    assert isinstance(optimizer.step(lambda: closure().item()), float)
    optimizer = MicroBatchSAM(torch.optim.SGD(model.parameters(), lr=0.1))
    assert isinstance(optimizer.step([lambda: closure().item()] * 2), float)


def test_gradients_are_enabled_for_the_closure():
    model = mlp()
    optimizer = SAM(torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        take(optimizer, model, batch(model))


# --- wrong calls --------------------------------------------------------------------------------


def test_sharpness_that_weighs_nothing_leaves_the_loss_alone():
    model = nn.Linear(2, 1, bias=False).double()
    plain = copy.deepcopy(model)
    optimizer = SharpnessMax(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.5, lam=0)
    base = torch.optim.SGD(plain.parameters(), lr=0.1)

    def loss(net):
        net.zero_grad()
        value = net.weight.square().square().sum()
        value.backward()
        return value

    for _ in range(3):
        optimizer.step(lambda: loss(model))
        base.step(lambda: loss(plain))
    assert torch.equal(model.weight, plain.weight)


def test_wrong_arguments_are_refused_in_a_sentence():
    model = mlp()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    ones = torch.ones(3, dtype=torch.bool)
    cases = [
        (lambda: SAM(torch.optim.SGD), "base_optimizer must be .* got SGD itself, not an instance"),
        (lambda: SAM(model.parameters()), "base_optimizer must be .* got generator"),
        (lambda: SAM(SAM(base)), "base_optimizer must be .* got SAM"),
        (lambda: SAM(torch.optim.LBFGS(model.parameters())), "without a closure.* got LBFGS"),
        (lambda: SAM(base, model="net"), "model must be a torch module or None; got str"),
        (lambda: SAM(base, scaler=2.0), "scaler must be a torch.amp.GradScaler or None; got float"),
        (lambda: SAM(base, rho=0), "rho must be a finite number above 0; got 0"),
        (lambda: SAM(base, rho=-0.1), "rho must be a finite number above 0; got -0.1"),
        (lambda: SAM(base, rho=float("nan")), "rho must be a finite number above 0; got nan"),
        (lambda: ASAM(base, eta=-1), "eta must be a finite number of at least 0; got -1"),
        (lambda: GSAM(base, alpha=-1), "alpha must be a finite number of at least 0; got -1"),
        (lambda: LookSAM(base, k=0), "k must be a whole number of at least 1; got 0"),
        (lambda: LookSAM(base, alpha="1"), "alpha must be a finite number of at least 0; got '1'"),
        (lambda: SharpnessMax(base, lam=-1), "lam must be a finite number of at least 0; got -1"),
        (lambda: SAM(base, mask={"2.bias": ones}), "mask names parameters, so model must be given"),
        (lambda: SAM(base, model=model, mask=[ones]), "mask must map parameter names.* got list"),
        (
            lambda: SAM(base, model=model, mask={"2.bia": ones}),
            "a name in mask must be one of .* got '2.bia'. Did you mean '2.bias'",
        ),
        (
            lambda: SAM(base, model=model, mask={"2.bias": ones.float()}),
            r"mask\['2.bias'\] must be a bool tensor of shape \(3,\); got torch.float32",
        ),
        (
            lambda: SAM(base, model=model, mask={"2.bias": None}),
            r"mask\['2.bias'\] must be a bool tensor of shape \(3,\); got None",
        ),
        (
            lambda: SAM(base, model=model, mask={"2.bias": "all"}),
            r"mask\['2.bias'\] must be a bool tensor of shape \(3,\); got 'all'",
        ),
        (
            lambda: SAM(base, model=model, mask={"2.bias": ones[:2]}),
            r"mask\['2.bias'\] must be .* shape \(3,\); got torch.bool of shape \(2,\)",
        ),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


def test_wrong_steps_are_told_the_right_one():
    model = mlp()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    sam, micro = SAM(base), MicroBatchSAM(base)
    closure = closure_for(sam, model, batch(model))
    before = weights(model)
    cases = [
        (lambda: sam.step(), r"SAM.step .* call step\(closure\), .* got nothing"),
        (lambda: sam.step(None), r"SAM.step .* call step\(closure\), .* got nothing"),
        (lambda: sam.step([closure]), "got a list of 1 .MicroBatchSAM takes several"),
        (lambda: sam.step(torch.tensor(1.0)), r"got tensor\(1.\)"),
        (lambda: micro.step(), r"MicroBatchSAM.step .* call step\(\[closure, ...\]\); got nothing"),
        (lambda: micro.step([]), "got a list of 0"),
        (lambda: micro.step(closure), "got a single function"),
        (lambda: micro.step([closure, 1]), "one closure per micro-batch"),
        (
            lambda: micro.step([closure], weights=[1, 2]),
            r"weights must have shape \(1\); got \(2,\)",
        ),
        (
            lambda: micro.step([closure], weights=[0]),
            r"weights must be finite and above 0; got \[0",
        ),
        (lambda: micro.step([closure], weights=["a"]), "weights must be a tensor or array"),
        (lambda: sam.step(lambda: None), "closure must return the loss; got None"),
        (lambda: sam.step(lambda: 1.0), r"closure must call backward\(\) on the loss"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    assert identical(weights(model), before)


def test_sparse_gradients_are_refused():
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = SAM(torch.optim.SGD(table.parameters(), lr=0.1))

    def closure():
        loss = table(torch.tensor([1])).sum()
        loss.backward()
        return loss

    with pytest.raises(ValueError, match="gradients must be dense; got a sparse one"):
        optimizer.step(closure)


def test_no_warning_is_left_to_chance():
    """The suite turns warnings into errors; a plain step with a scheduler must raise none."""
    model = normed()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = SAM(base, model=model)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        for _ in range(5):
            take(optimizer, model, batch(model))
            scheduler.step()
