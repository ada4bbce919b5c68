"""`unlearn` itself: what it leaves alone, repeats, resumes, survives and refuses."""

import copy
import math
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from flatbook.checkpoints import CheckpointError
from flatbook.optim import SAM, MicroBatchSAM
from flatbook.runtime import forked_seed, generator
from flatbook.unlearning import Method, saliency_mask, unlearn
from flatbook.unlearning.loop import METHODS
from flatbook.unlearning.methods import ce
from flatbook.unlearning.sets import batches, shared_rows, streamed

pytestmark = pytest.mark.usefixtures("one_thread")


def network(seed=0, dropout=0.2):
    with forked_seed(seed):
        return nn.Sequential(
            nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(dropout), nn.Linear(6, 3)
        )


random = generator(1)
X = torch.randn(30, 3, generator=random)
Y = torch.randint(3, (30,), generator=random)
R, F = (X[:21], Y[:21]), (X[21:], Y[21:])


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.02)


def state(model):
    return {name: t.clone() for name, t in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def run(method="neg_grad", model=None, **options):
    options = {"epochs": 3, "optimizer": adam, "batch_size": 8} | options
    return unlearn(model or network(), R, F, method=method, **options)


# --- what it leaves alone -----------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_model_passed_in_is_not_touched(method):
    model = network()
    model.train()
    model[1].eval()
    nn.functional.cross_entropy(model(X), Y).backward()
    before = state(model)
    grads = [p.grad.clone() for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    numbers = torch.random.get_rng_state()
    done = run(method, model)
    assert same(state(model), before)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), numbers)
    assert not same(state(done.model), before)
    assert not any(m.training for m in done.model.modules())
    assert all(p.grad is None for p in done.model.parameters())


def test_in_place_it_is_the_very_model():
    model, apart = network(), run()
    done = run(model=model, inplace=True)
    assert done.model is model
    assert same(state(model), state(apart.model))


def test_saliency_leaves_the_model_alone():
    model = network()
    before, grads = state(model), [p.grad for p in model.parameters()]
    saliency_mask(model, F, fraction=0.5)
    assert same(state(model), before)
    assert [p.grad for p in model.parameters()] == grads
    assert all(m.training for m in model.modules())


# --- what it repeats and resumes ----------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_runs_are_seeded(method):
    first, again, other = run(method), run(method), run(method, seed=1)
    assert same(state(first.model), state(again.model))
    assert [e["loss"] for e in first.history] == [e["loss"] for e in again.history]
    if method != "influence":  # which draws nothing while R is this small
        assert not same(state(first.model), state(other.model))


def timeless(history):
    return [{k: v for k, v in entry.items() if k != "seconds"} for entry in history]


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_run_ends_as_if_it_had_not_been(method, tmp_path):
    def measure(model):
        if kill.pop("now", False):
            raise KeyboardInterrupt
        return {"norm": sum(float(p.norm()) for p in model.parameters())}

    kill = {}
    whole = run(method, measure=measure)
    for epoch in range(3):
        file, count = tmp_path / f"{epoch}.pt", []

        def until(model, count=count, epoch=epoch):
            count.append(1)
            kill["now"] = len(count) == epoch + 1
            return measure(model)

        with pytest.raises(KeyboardInterrupt):
            run(method, measure=until, checkpoint=file)
        resumed = run(method, measure=measure, checkpoint=file)
        assert same(state(resumed.model), state(whole.model))
        assert timeless(resumed.history) == timeless(whole.history)
    finished = run(method, measure=None, checkpoint=file)
    assert same(state(finished.model), state(whole.model))
    assert finished.history == resumed.history


def test_a_checkpoint_belongs_to_its_run(tmp_path):
    file = tmp_path / "run.pt"
    run(checkpoint=file, alpha=0.9)
    for change in (
        {"alpha": 0.8},
        {"method": "finetune"},
        {"seed": 1},
        {"epochs": 4},
        {"batch_size": 7},
        {"model": network(seed=1)},
        {"optimizer": lambda p: torch.optim.AdamW(p, lr=0.03)},
    ):
        options = {"alpha": 0.9} | change
        if "method" in change:
            del options["alpha"]
        with pytest.raises(CheckpointError, match=r"^checkpoint .* is of a run with "):
            run(checkpoint=file, **options)
    file.write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"is damaged or no checkpoint; delete it"):
        run(checkpoint=file, alpha=0.9)


# --- what it survives ---------------------------------------------------------------------------


def wild(parameters):
    return torch.optim.SGD(parameters, lr=1e3)


def test_divergence_is_reported_and_the_last_sound_model_kept():
    model = network(dropout=0.0)
    done = run(model=model, alpha=0.1, optimizer=wild, epochs=50)
    assert done.diverged
    assert re.fullmatch(
        r"neg_grad diverged in epoch \d+: the loss of step \d+ was .*, beyond ±10000; the model is "
        r"that of before the epoch\. A lower learning rate may help\.",
        done.divergence,
    )
    assert len(done.history) < 50
    assert all(t.isfinite().all() for t in done.model.state_dict().values())
    again = run(model=model, alpha=0.1, optimizer=wild, epochs=max(len(done.history), 1))
    if done.history:
        assert same(state(again.model), state(done.model))
    calm = run(model=done.model, alpha=0.9)
    assert not calm.diverged


def test_divergence_in_the_first_epoch_returns_the_start(tmp_path):
    model = network()
    done = run(model=model, loss_limit=1e-9, checkpoint=tmp_path / "run.pt")
    assert done.diverged
    assert done.history == ()
    assert same(state(done.model), state(model))
    assert done.seconds > 0
    assert not (tmp_path / "run.pt").exists()
    assert run(model=model, loss_limit=1e-9, inplace=True).model is model
    assert same(state(done.model), state(model))


def test_weights_that_break_in_the_last_step_are_seen():
    class Break(Method):
        def passes(self, epoch):
            return [((self.task.retain,), self.loss)]

        def loss(self, model, batch):
            loss = ce(model, batch)
            with torch.no_grad():
                model[4].bias.add_(torch.inf)  # behind the back of the loss
            return loss

    done = run(Break(), batch_size=21, epochs=1, loss_limit=math.inf)
    assert done.divergence.startswith("Break diverged in epoch 1: a weight or running statistic")
    assert done.model[4].bias.isfinite().all()


# --- batches ------------------------------------------------------------------------------------


def test_an_epoch_is_one_pass_through_r_beside_as_many_through_f():
    r = torch.arange(10.0)[:, None], torch.arange(10)
    f = torch.arange(4.0)[:, None], torch.arange(4)
    pairs = list(streamed((r, f), 3, (generator(0), generator(1))))
    assert [len(a[0]) for a, _ in pairs] == [3, 3, 4]  # a last row alone joins the others
    assert sorted(torch.cat([a[1] for a, _ in pairs]).tolist()) == list(range(10))
    assert [len(b[0]) for _, b in pairs] == [4, 4, 4]
    for (x, y), (u, v) in pairs:
        assert torch.equal(x[:, 0].long(), y)
        assert torch.equal(u[:, 0].long(), v)
    orders = [b[1].tolist() for _, b in pairs]
    assert orders[0] != orders[1] or orders[1] != orders[2]


def test_batches_cover_everything_once():
    for size in (1, 2, 7, 8, 9):
        for batch_size in (1, 2, 4, 100):
            rows = batches(size, batch_size, generator(0))
            assert sorted(torch.cat(list(rows)).tolist()) == list(range(size))
            assert batch_size == 1 or size == 1 or min(map(len, rows)) > 1


def test_steps_and_losses_are_counted():
    done = run(measure=lambda model: {"two": 2})
    assert [set(e) for e in done.history] == [{"loss", "steps", "seconds", "two"}] * 3
    assert {e["steps"] for e in done.history} == {3}
    assert done.seconds == pytest.approx(sum(e["seconds"] for e in done.history))


@pytest.mark.parametrize("method", METHODS)
def test_the_optimizer_is_built_once_for_each_half(method):
    calls = []

    def build(parameters):
        calls.append(len(parameters))
        return SAM(adam(parameters))

    run(method, optimizer=build, epochs=1)
    assert calls == [6] * {"sharp_minmax": 2, "influence": 0}.get(method, 1)


def test_one_micro_batch_is_sam():
    first, second = (
        run(optimizer=lambda p, kind=kind: kind(adam(p)), model=network(dropout=0.0))
        for kind in (SAM, MicroBatchSAM)
    )
    assert same(state(first.model), state(second.model))


def test_sets_come_in_many_shapes():
    class Split:
        x, y = R

    as_pair = run()
    for retain, forget in (
        (TensorDataset(*R), TensorDataset(*F)),
        (Split, [F[0].numpy(), F[1].numpy().astype(np.uint8)]),
        ((R[0].double(), R[1]), F),
    ):
        options = {"method": "neg_grad", "epochs": 3, "optimizer": adam, "batch_size": 8}
        assert same(
            state(unlearn(network(), retain, forget, **options).model), state(as_pair.model)
        )


def test_frozen_parameters_stay():
    model = network()
    model[0].requires_grad_(False)
    for method in METHODS:
        done = run(method, model)
        assert torch.equal(done.model[0].weight, model[0].weight)


# --- what it refuses ----------------------------------------------------------------------------


def refused(match, retain=R, forget=F, model=None, **options):
    options = {"method": "neg_grad", "epochs": 1} | options
    with pytest.raises(ValueError, match=match):
        unlearn(model or network(), retain, forget, **options)


def test_sets_that_cannot_be():
    none = X[:0], Y[:0]
    refused(r"^forget must hold a sample; with none, there is nothing to do\.$", forget=none)
    refused(
        r"^retain must hold a sample; with none, forget is everything: start from new weights\.$",
        retain=none,
    )
    overlap = torch.cat([F[0], R[0][3:5]]), torch.cat([F[1], R[1][3:5]])
    refused(
        r"^forget must share no row with retain, same x and same y; got 2, the first as "
        r"forget\[9\] and retain\[3\]\.$",
        forget=overlap,
    )
    refused(r"^forget must share no row with retain, .* got 21, ", forget=R)
    bad = X[21:].clone()
    bad[0, 0] = torch.nan
    refused(r"^x of forget must be finite; got inf or nan\.$", forget=(bad, Y[21:]))
    refused(r"^x of retain must be finite; got inf or nan\.$", retain=(bad, Y[21:]))
    refused(r"^y of forget must lie in 0\.\.2, one label per sample; got ", forget=(F[0], F[1] + 1))
    refused(r"^y of forget must have shape \(9\); got \(8,\)\.$", forget=(F[0], F[1][1:]))
    refused(
        r"^x of forget must fit the model, which refuses shape \(9, 2\)", forget=(F[0][:, 1:], F[1])
    )
    refused(r"^forget must be a TensorDataset of .* or a pair \(x, y\); got Tensor\.$", forget=F[0])
    refused(
        r"^retain must be a TensorDataset of .* or a pair \(x, y\); got 1 parts\.$",
        retain=TensorDataset(X),
    )


def test_a_shared_input_under_another_label_is_no_shared_row():
    x, y = torch.tensor([[0.0, 1.0], [1.0, 1.0]]), torch.tensor([0, 1])
    assert shared_rows((x, y), (x, 1 - y)) == []
    assert shared_rows((x, y), (x + 1e-7, y)) == []
    assert shared_rows((x, y), (-x * torch.tensor([1.0, -1.0]), y)) == [(0, 0)]  # -0 is 0
    assert shared_rows((x.bfloat16(), y), (x.bfloat16(), y)) == [(0, 0), (1, 1)]
    run_it = {"method": "neg_grad", "epochs": 1}
    assert unlearn(nn.Linear(2, 2), (x, y), (x, 1 - y), **run_it).history


def test_arguments_out_of_range():
    refused(
        r"^method must be one of .*; got 'neggrad'\. Did you mean 'neg_grad'\?$", method="neggrad"
    )
    refused(r"^model must be a torch module; got int\.$", model=3)
    refused(r"^epochs must be a whole number of at least 1; got 0\.$", epochs=0)
    refused(r"^batch_size must be a whole number of at least 1; got 0\.$", batch_size=0)
    refused(r"^seed must be a whole number of at least 0; got -1\.$", seed=-1)
    refused(r"^loss_limit must be a finite number above 0; got 0\.$", loss_limit=0)
    refused(r"^optimizer must be a function or None; got 'sgd'\.$", optimizer="sgd")
    refused(r"^optimizer must return a torch optimizer; got list\.$", optimizer=list)
    refused(r"^measure must be a function or None; got 1\.$", measure=1)
    frozen = network().requires_grad_(False)
    refused(r"^model must have a parameter that requires a gradient; it has none\.$", model=frozen)


@pytest.mark.parametrize(
    ("method", "options", "match"),
    [
        ("finetune", {"alpha": 0.5}, r"^finetune has no options; got 'alpha'\.$"),
        ("neg_grad", {"alfa": 0.5}, r"^an option of neg_grad must be one of alpha; got 'alfa'\."),
        ("neg_grad", {"alpha": 1.5}, r"^alpha must be a number in \[0, 1\]; got 1\.5\.$"),
        ("random_label", {"redraw": 1}, r"^redraw must be True or False; got 1\.$"),
        ("salun", {"fraction": -0.1}, r"^fraction must be a number in \[0, 1\]; got -0\.1\.$"),
        ("salun", {"variant": "p"}, r"^variant must be one of paper, released; got 'p'\."),
        ("l1_sparse", {"gamma": -1}, r"^gamma must be a finite number of at least 0; got -1\.$"),
        ("scrub", {"temperature": 0}, r"^temperature must be a finite number above 0; got 0\.$"),
        ("scrub", {"max_epochs": -1}, r"^max_epochs must be a whole number of at least 0; got -1"),
        ("influence", {"damping": 0.0}, r"^damping must be a finite number above 0; got 0\.0\.$"),
        ("influence", {"samples": 0}, r"^samples must be a whole number of at least 1; got 0\.$"),
        ("sharp_minmax", {"rho": 0}, r"^rho must be a finite number above 0; got 0\.$"),
        (
            "sharp_minmax",
            {"forget_objective": "up"},
            r"^forget_objective must be one of ascent, descent; got 'up'\.",
        ),
    ],
)
def test_options_out_of_range(method, options, match):
    refused(match, method=method, **options)


def test_options_of_an_instance_are_its_own():
    method = METHODS["neg_grad"](alpha=0.9)
    refused(
        r"^options of a method given as an instance go to its class; got 'alpha'\.$",
        method=method,
        alpha=0.5,
    )
    assert same(state(run(copy.copy(method)).model), state(run(alpha=0.9).model))


def test_saliency_refuses():
    with pytest.raises(ValueError, match=r"^fraction must be a number in \[0, 1\]; got 2\.$"):
        saliency_mask(network(), F, fraction=2)
    with pytest.raises(ValueError, match=r"^x of forget must not be empty; got shape \(0, 3\)\.$"):
        saliency_mask(network(), (X[:0], Y[:0]), fraction=0.5)
