"""The training loop: it computes what a loop by hand would, and survives what happens to runs."""

import dataclasses
import functools
import itertools
import math
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy, pad
from torch.testing import assert_close

from flatbook import checkpoints, progress
from flatbook.adversarial import pgd
from flatbook.augmentation import crop_flip
from flatbook.checkpoints import CheckpointError
from flatbook.config import TrainConfig, learning_rate
from flatbook.data import Split
from flatbook.models import build
from flatbook.optim import ASAM, GSAM, SAM, LookSAM, MicroBatchSAM
from flatbook.runtime import forked_seed, generator
from flatbook.training import DivergenceError, History, evaluate, fit, make_optimizer

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIMIZERS = ["sgd", "adam", "adamw", "sam", "asam", "gsam", "looksam", "msam"]


def images(n=60, seed=0, noise=0.3):
    """Three classes of 8×8 images, each a bright row of its own under noise."""
    random = generator(seed)
    y = torch.arange(n) % 3
    x = noise * torch.randn(n, 1, 8, 8, generator=random)
    x[torch.arange(n), :, 2 * y + 1] += 1.0
    return x, y


def network(seed=0, dropout=0.0):
    with forked_seed(seed):
        return nn.Sequential(
            nn.Conv2d(1, 6, 3, stride=2),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(54, 3),
        )


def settings_for(optimizer, **options):
    lr = 0.02 if optimizer in ("adam", "adamw") else 0.1
    base = {"epochs": 3, "batch_size": 16, "optimizer": optimizer, "lr": lr, "micro_batch": 8}
    return TrainConfig(**(base | options))


def tensors(model):
    return {name: t.clone() for name, t in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def timeless(history):
    return dataclasses.replace(history, epoch_seconds=())


# --- what it computes ---------------------------------------------------------------------------


def test_it_is_the_loop_one_would_write():
    x, y = images()
    order = []

    def spy(batch, _):
        order.append(batch)
        return batch

    config = settings_for("sgd", augment=spy, weight_decay=0.01, warmup=0.5)
    model = network()
    history = fit(model, x, y, config, device="cpu")

    by_hand = network()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    losses, right = [], []
    for step, batch in enumerate(order):
        labels = (batch[:, 0, 1::2].mean(2)[:, :3]).argmax(1)  # the bright row
        rows = [int((x == image).all((1, 2, 3)).nonzero()) for image in batch]
        assert_close(labels, y[rows])
        rise, total = 2, 12
        gone = (step - rise) / (total - rise)
        lr = 0.05 * (step + 1) if step < rise else 0.05 * (1 + math.cos(math.pi * gone))
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        logits = by_hand(batch)
        loss = cross_entropy(logits, y[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item() * len(rows))
        right.append((logits.argmax(1) == y[rows]).sum().item())
    assert_close(tensors(model), tensors(by_hand))
    for epoch in range(3):
        part = slice(4 * epoch, 4 * epoch + 4)
        assert sum(losses[part]) / 60 == pytest.approx(history.loss[epoch], rel=1e-6)
        assert sum(right[part]) / 60 == pytest.approx(history.accuracy[epoch])
    assert history.lr == pytest.approx(
        (0.05, 0.05 * (1 + math.cos(0.2 * math.pi)), 0.05 * (1 + math.cos(0.6 * math.pi)))
    )


def test_every_sample_is_seen_once_per_epoch_the_last_batch_included():
    x, y = images(50)
    seen = []
    config = settings_for("sgd", augment=lambda batch, _: seen.append(batch) or batch)
    fit(network(), x, y, config)
    assert [len(batch) for batch in seen] == [16, 16, 16, 2] * 3
    orders = []
    for epoch in range(3):
        epoch_x = torch.cat(seen[4 * epoch : 4 * epoch + 4])
        orders.append([int((x == image).all((1, 2, 3)).nonzero()) for image in epoch_x])
        assert sorted(orders[-1]) == list(range(50))
    assert len(set(map(tuple, orders))) == 3


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_learns(optimizer):
    x, y = images(120)
    test_x, test_y = images(90, seed=1)
    model = network()
    assert evaluate(model, test_x, test_y)[1] < 0.6  # the control: there is something to learn
    history = fit(model, x, y, settings_for(optimizer, epochs=6), eval_data=(test_x, test_y))
    assert history.loss[-1] < 0.5 * history.loss[0]
    assert history.eval_accuracy[-1] > 0.9
    loss, accuracy = evaluate(model, test_x, test_y)
    assert (history.eval_loss[-1], history.eval_accuracy[-1]) == (loss, accuracy)
    assert history.epochs_run == len(history.loss) == len(history.lr) == len(history.eval_loss) == 6
    assert history.seconds == sum(history.epoch_seconds) > 0
    assert not history.stopped_early
    assert not model.training
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("optimizer", ["sgd", "sam", "msam"])
def test_accuracy_is_that_before_the_step_in_training_mode(optimizer):
    x, y = images(noise=1.0)
    model = network().eval()  # the mode that training finds does not matter
    config = settings_for(optimizer, epochs=1, batch_size=60, micro_batch=60, rho=2.0)
    history = fit(model, x, y, config)
    before = network()
    assert history.accuracy == ((before(x).argmax(1) == y).double().mean().item(),)
    assert 0 < history.accuracy[0] < 1
    assert_close(model[1].running_mean, before[1].running_mean)


def test_micro_batches_are_slices_of_the_batch():
    x, y = images(22)
    config = settings_for("msam", epochs=1, batch_size=22, micro_batch=8, rho=0.3)
    model, by_hand = network(), network()
    seen = []
    history = fit(
        model, x, y, dataclasses.replace(config, augment=lambda b, _: seen.append(b) or b)
    )
    (batch,) = seen
    labels = torch.stack([y[(x == image).all((1, 2, 3))][0] for image in batch])
    base = torch.optim.SGD(by_hand.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    optimizer = MicroBatchSAM(base, model=by_hand, rho=0.3)

    def part(rows):
        def closure():
            optimizer.zero_grad()
            loss = cross_entropy(by_hand(batch[rows]), labels[rows])
            loss.backward()
            return loss

        return closure

    slices = [slice(0, 8), slice(8, 16), slice(16, 22)]
    loss = optimizer.step([part(s) for s in slices], weights=[8, 8, 6])
    assert_close(tensors(model), tensors(by_hand))
    assert history.loss[0] == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("options", "kind", "expected"),
    [
        ({"optimizer": "sam"}, SAM, {"rho": 0.05}),
        ({"optimizer": "sam", "rho": 0.2, "base": "adamw"}, SAM, {"rho": 0.2}),
        ({"optimizer": "asam"}, ASAM, {"rho": 0.5}),
        ({"optimizer": "gsam", "alpha": 0.1, "lr": 0.3}, GSAM, {"alpha": 0.1, "lr_max": 0.3}),
        ({"optimizer": "looksam", "look_every": 7}, LookSAM, {"k": 7, "alpha": 0.7}),
        ({"optimizer": "msam", "rho": 0.3}, MicroBatchSAM, {"rho": 0.3}),
        ({"optimizer": "adam", "weight_decay": 0.1}, torch.optim.Adam, {}),
        ({"optimizer": "adamw"}, torch.optim.AdamW, {}),
    ],
)
def test_the_config_names_the_optimizer(options, kind, expected):
    config = TrainConfig(**options)
    model = network()
    model[0].bias.requires_grad_(False)
    optimizer = make_optimizer(model, config)
    assert type(optimizer) is kind
    assert {name: getattr(optimizer, name) for name in expected} == expected
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (config.lr, config.weight_decay)
    assert len(group["params"]) == 5
    if config.base == "adamw":
        assert type(optimizer.base_optimizer) is torch.optim.AdamW


def test_the_schedule_is_that_of_torch():
    for schedule, warmup in itertools.product(("cosine", "constant"), (0, 2)):
        config = TrainConfig(epochs=5, lr=0.3, schedule=schedule, warmup=warmup)
        sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
        schedulers = [torch.optim.lr_scheduler.ConstantLR(sgd, 1.0)]
        if schedule == "cosine":
            schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(sgd, 4 * (5 - warmup))]
        if warmup:
            rise = torch.optim.lr_scheduler.LinearLR(sgd, 1 / 8, total_iters=7)
            schedulers.insert(0, rise)
        theirs = torch.optim.lr_scheduler.SequentialLR(sgd, schedulers, [8] * bool(warmup))
        for step in range(20):
            rate = sgd.param_groups[0]["lr"]
            assert learning_rate(config, step, 4) == pytest.approx(rate, abs=1e-9), (step, warmup)
            sgd.step()
            theirs.step()


def test_training_stops_at_interpolation_by_its_definition(monkeypatch):
    x, y = images(noise=0.1)
    config = settings_for("sgd", epochs=30, stop_at_interpolation=True)
    model = network(dropout=0.2)
    history = fit(model, x, y, config)
    assert history.stopped_early
    assert 1 <= history.epochs_run < 30
    assert evaluate(model, x, y)[1] == 1.0
    shorter = dataclasses.replace(config, stop_at_interpolation=False)
    full = fit(network(dropout=0.2), x, y, shorter)
    assert full.epochs_run == 30
    assert not full.stopped_early
    assert full.loss[: history.epochs_run] == history.loss  # stopping changes nothing before it
    # Two equal images of different classes: nobody interpolates, and nobody stops.
    y = y.clone()
    x[0], y[0] = x[1], (y[1] + 1) % 3
    history = fit(network(), x, y, dataclasses.replace(config, epochs=5))
    assert history.epochs_run == 5
    assert not history.stopped_early


def test_label_smoothing_is_in_the_training_loss_only():
    x, y = images()
    config = settings_for("sgd", epochs=1, batch_size=60, label_smoothing=0.3)
    model = network()
    fresh = network()(x)
    history = fit(model, x, y, config, eval_data=(x, y))
    smooth = cross_entropy(fresh, y, label_smoothing=0.3)
    assert history.loss[0] == pytest.approx(smooth.item(), rel=1e-5)
    assert history.eval_loss[0] == pytest.approx(cross_entropy(model(x), y).item(), rel=1e-5)


# --- precision and layout -----------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("optimizer", ["sgd", "sam", "looksam", "msam"])
def test_mixed_precision_runs_low_and_lands_near(precision, optimizer):
    x, y = images()
    dtypes = set()
    model = network()
    model[0].register_forward_hook(lambda *a: dtypes.add(a[-1].dtype) if model.training else None)
    history = fit(model, x, y, settings_for(optimizer, precision=precision))
    assert dtypes == {getattr(torch, precision)}
    assert all(p.dtype == torch.float32 for p in model.parameters())
    exact = fit(network(), x, y, settings_for(optimizer))
    assert history.loss == pytest.approx(exact.loss, rel=0.05, abs=0.02)


@pytest.mark.parametrize("optimizer", ["sgd", "sam"])
def test_an_overflowing_scale_only_costs_steps_and_is_remembered(tmp_path, monkeypatch, optimizer):
    """Gradients behind weights near 30 overflow half precision at a scale of 65,536."""
    x, y = images()

    def sharp():
        model = network()
        with torch.no_grad():
            model[5].weight.mul_(300)
        return model

    scales = []
    real = torch.amp.GradScaler.update
    monkeypatch.setattr(
        torch.amp.GradScaler,
        "update",
        lambda scaler: (real(scaler), scales.append(scaler.get_scale()))[0],
    )
    config = settings_for(optimizer, epochs=4, precision="float16", lr=0.01)
    whole, resumed = sharp(), sharp()
    history = fit(whole, x, y, config)
    assert all(map(math.isfinite, history.loss))
    assert scales[0] == 2.0**15  # there was an overflow
    assert scales[-1] == scales[-4]  # and an end to them
    path = tmp_path / "run.pt"
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            fit(sharp(), x, y, config, checkpoint=path)
    fit(resumed, x, y, config, checkpoint=path)
    assert same(tensors(resumed), tensors(whole))


def test_channels_last_reaches_the_model():
    x, y = images()
    x = x.repeat(1, 2, 1, 1)
    layouts = set()
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(108, 3))

    def note(module, args):
        if module.training:
            layouts.add(args[0].is_contiguous(memory_format=torch.channels_last))

    model[0].register_forward_pre_hook(note)
    fit(model, x, y, settings_for("sam", channels_last=True, augment="crop-flip"))
    assert layouts == {True}
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_double_precision_models_take_what_comes():
    x, y = images()
    model = network().double()
    fit(model, x.numpy(), y.numpy(), settings_for("sam"))
    assert model[5].weight.dtype == torch.float64
    model32, model64 = network(), network()
    frozen = x.numpy().astype(np.float64)
    frozen.setflags(write=False)
    fit(model32, x, y, settings_for("sgd"))
    fit(model64, frozen, y.numpy(), settings_for("sgd"))
    assert same(tensors(model32), tensors(model64))


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("optimizer", ["sgd", "sam"])
def test_it_trains_wherever_it_is_called(precision, optimizer):
    x, y = images()
    config = settings_for(optimizer, precision=precision)
    inside, outside = network(), network()
    with torch.no_grad():
        fit(inside, x.requires_grad_(), y, config)
    fit(outside, x.detach(), y, config)
    assert same(tensors(inside), tensors(outside))
    assert x.grad is None


def test_half_precision_parameters_and_extra_state_are_fine(tmp_path):
    class Noted(nn.Linear):
        def get_extra_state(self):
            return {"note": 1}

        def set_extra_state(self, state):
            pass

    x, y = images()
    with forked_seed(0):
        model = nn.Sequential(nn.Flatten(), Noted(64, 3)).to(torch.bfloat16)
    config = settings_for("sam", epochs=5)
    history = fit(model, x, y, config, checkpoint=tmp_path / "run.pt")
    assert history.loss[-1] < history.loss[0]
    assert fit(model, x, y, config, checkpoint=tmp_path / "run.pt") == history


# --- randomness ---------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "sam", "msam"])
def test_the_seed_decides_and_the_global_generator_neither_matters_nor_moves(optimizer):
    x, y = images()

    def run(seed, global_seed):
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        model = network(dropout=0.3)
        fit(model, x, y, settings_for(optimizer, seed=seed, augment="crop-flip"))
        assert torch.equal(torch.get_rng_state(), before)
        return tensors(model)

    assert same(run(0, 1), run(0, 2))
    assert not same(run(0, 1), run(1, 1))


def test_crop_flip_cuts_windows_and_mirrors_half_of_them():
    x = torch.rand(400, 2, 5, 6, generator=generator(0)) + 0.1
    out = crop_flip(x, generator(1), padding=2)
    padded = pad(x, (2, 2, 2, 2))
    counts = {}
    for image, result in zip(padded, out, strict=True):
        found = [
            (top, left, mirror)
            for top, left, mirror in itertools.product(range(5), range(5), (False, True))
            for window in [image[:, top : top + 5, left : left + 6]]
            if torch.equal(result, window.flip(2) if mirror else window)
        ]
        assert len(found) == 1
        counts[found[0]] = counts.get(found[0], 0) + 1
    assert len(counts) == 50  # every shift and flip occurs among 400 draws of 50
    mirrored = sum(n for (_, _, mirror), n in counts.items() if mirror)
    assert abs(mirrored - 200) < 50  # five standard deviations
    assert torch.equal(out, crop_flip(x, generator(1), padding=2))
    assert not torch.equal(out, crop_flip(x, generator(2), padding=2))


def test_both_passes_of_sam_see_the_same_batch():
    x, y = images(32)
    model = network()
    inputs = []
    model[0].register_forward_pre_hook(lambda m, a: inputs.append(a[0]) if m.training else None)
    fit(model, x, y, settings_for("sam", epochs=1, augment="crop-flip"))
    assert len(inputs) == 4
    assert torch.equal(inputs[0], inputs[1])
    assert torch.equal(inputs[2], inputs[3])
    assert not torch.equal(inputs[0], inputs[2])


# --- adversaries --------------------------------------------------------------------------------


def climb(model, x, y):
    """Attack pixels with a strength that noise of the same size does not have."""
    return pgd(
        model,
        x.clamp(0, 1),
        y,
        norm="linf",
        epsilon=0.2,
        step_size=0.1,
        steps=4,
        random_start=True,
    ).x_adv


@pytest.mark.parametrize("optimizer", ["sgd", "sam", "msam"])
def test_the_adversary_replaces_the_batch_as_augmentation_would(optimizer):
    x, y = images()
    modes, labels = set(), []

    def shift(model, batch, own):
        modes.update(part.training for part in model.modules())
        labels.append((batch, own))
        model(batch)  # leaves no trace in the statistics of BatchNorm
        return (batch * 0.5 + 0.1).requires_grad_()

    moved, expected = network(), network()
    history = fit(moved, x, y, settings_for(optimizer), adversary=shift)
    config = settings_for(optimizer, augment=lambda batch, _: batch * 0.5 + 0.1)
    other = fit(expected, x, y, config)
    assert same(tensors(moved), tensors(expected))
    assert timeless(history) == timeless(other)
    assert modes == {False}
    assert len(labels) == 12
    for batch, own in labels:
        rows = [int((x == image).all((1, 2, 3)).nonzero()) for image in batch]
        assert torch.equal(y[rows], own)


def test_the_adversary_sees_augmented_images_and_training_goes_on_in_training_mode():
    x, y = images()
    model, modes = network(dropout=0.5), []
    model[4].register_forward_hook(lambda layer, *_: modes.append(layer.training))
    seen = []

    def look(model, batch, own):
        seen.append(batch)
        model(batch)
        return batch

    config = settings_for("sgd", epochs=1, augment=lambda batch, _: batch + 5, channels_last=True)
    modes.clear()
    fit(model, x, y, config, adversary=look)
    assert modes[-8:] == [False, True] * 4
    assert all(batch.mean() > 4 for batch in seen)
    assert all(batch.is_contiguous(memory_format=torch.channels_last) for batch in seen)


def test_adversarial_training_hardens():
    x, y = (part.clone() for part in images(120))
    x = x.clamp(0, 1)
    test_x, test_y = images(90, seed=1)
    test_x = test_x.clamp(0, 1)
    config = settings_for("sgd", epochs=8)
    clean, hard = network(), network()
    fit(clean, x, y, config)
    history = fit(hard, x, y, config, adversary=climb)
    options = {"norm": "linf", "epsilon": 0.2, "step_size": 0.05, "steps": 10}
    robust = [
        evaluate(model, pgd(model, test_x, test_y, **options).x_adv, test_y)[0]
        for model in (clean, hard)
    ]
    assert robust[1] < 0.7 * robust[0]
    assert evaluate(hard, test_x, test_y)[1] > 0.9
    assert history.loss[-1] > evaluate(hard, x, y)[0]  # the loss on attacked batches
    # Trained without an adversary, nothing is different from before there were any.
    again = network()
    fit(again, x, y, config, adversary=None)
    assert same(tensors(again), tensors(clean))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_adversarial_training_follows_from_the_seed_and_resumes(tmp_path, monkeypatch, precision):
    x, y = images()
    config = settings_for("sgd", epochs=4, augment="crop-flip", precision=precision)
    whole = network(dropout=0.3)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    expected = fit(whole, x, y, config, adversary=climb)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    path = tmp_path / "run.pt"
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            fit(network(dropout=0.3), x, y, config, adversary=climb, checkpoint=path)
    resumed = network(seed=9, dropout=0.3)
    history = fit(resumed, x, y, config, adversary=climb, checkpoint=path)
    assert same(tensors(resumed), tensors(whole))
    assert timeless(history) == timeless(expected)
    other = network(dropout=0.3)
    fit(other, x, y, dataclasses.replace(config, seed=1), adversary=climb)
    assert not same(tensors(other), tensors(whole))


def test_a_checkpoint_belongs_to_its_adversary(tmp_path):
    x, y = images()
    config = settings_for("sgd", epochs=1)
    path, plain = tmp_path / "run.pt", tmp_path / "plain.pt"
    fit(network(), x, y, config, adversary=climb, checkpoint=path)
    fit(network(), x, y, config, checkpoint=plain)
    for file, adversary, message in (
        (path, None, "adversary='test_training.climb', not None|another adversary"),
        (path, other_adversary, "another adversary|not 'test_training.other_adversary'"),
        (plain, climb, "adversary=None, not 'test_training.climb'|another adversary"),
    ):
        with pytest.raises(CheckpointError, match=f"is of a run with .*({message})"):
            fit(network(), x, y, config, adversary=adversary, checkpoint=file)


def other_adversary(model, x, y):
    return x


def test_an_adversary_that_breaks_down_is_noticed():
    x, y = images()
    model = network()
    with pytest.raises(DivergenceError, match="the mean loss is not finite in epoch 1"):
        fit(model, x, y, settings_for("sgd"), adversary=lambda model, x, y: x * math.nan)

    def failing(model, x, y):
        raise RuntimeError("no power")

    model = network()
    with pytest.raises(RuntimeError, match="no power"):
        fit(model, x, y, settings_for("sgd"), adversary=failing)
    assert all(p.requires_grad for p in model.parameters())


# --- checkpoints --------------------------------------------------------------------------------


def interrupt_after(monkeypatch, saves):
    """Let the run die right after its n-th write."""
    real = checkpoints.save
    count = itertools.count(1)

    def save(*args):
        real(*args)
        if next(count) == saves:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "save", save)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(name, {}) for name in OPTIMIZERS]
    + [
        ("looksam", {"base": "adamw", "lr": 0.01, "look_every": 3}),
        ("sgd", {"precision": "float16"}),
        ("sam", {"precision": "float16", "warmup": 1.5}),
        ("gsam", {"precision": "bfloat16", "schedule": "constant"}),
    ],
)
def test_an_interrupted_run_ends_with_the_same_bits(tmp_path, monkeypatch, optimizer, options):
    x, y = images()
    config = settings_for(optimizer, **({"epochs": 4, "augment": "crop-flip"} | options))
    eval_data = images(30, seed=5)
    whole = network(dropout=0.3)
    expected = fit(whole, x, y, config, eval_data=eval_data)

    path = tmp_path / "deep" / "run.pt"
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            fit(network(dropout=0.3), x, y, config, eval_data=eval_data, checkpoint=path)
    resumed = network(seed=9, dropout=0.3)  # whose own weights do not matter
    history = fit(resumed, x, y, config, eval_data=eval_data, checkpoint=path)
    assert same(tensors(resumed), tensors(whole))
    assert timeless(history) == timeless(expected)
    assert len(history.epoch_seconds) == 4

    again = network(seed=10, dropout=0.3)  # a finished run is loaded, not repeated
    assert fit(again, x, y, config, eval_data=eval_data, checkpoint=path) == history
    assert same(tensors(again), tensors(whole))
    assert [p.name for p in path.parent.iterdir()] == ["run.pt"]


def test_checkpoints_are_as_rare_as_asked_and_the_end_is_always_there(tmp_path, monkeypatch):
    x, y = images()
    epochs = []
    monkeypatch.setattr(
        checkpoints, "save", lambda path, identity, state: epochs.append(len(state["loss"]))
    )
    config = settings_for("sgd", epochs=7)
    fit(network(), x, y, config, checkpoint=tmp_path / "a", checkpoint_every=3)
    assert epochs == [3, 6, 7]
    epochs.clear()
    early = settings_for("sgd", epochs=30, stop_at_interpolation=True)
    history = fit(network(), x, y, early, checkpoint=tmp_path / "b", checkpoint_every=30)
    assert epochs == [history.epochs_run]


def test_an_early_stop_survives_the_checkpoint(tmp_path):
    x, y = images(noise=0.1)
    config = settings_for("sgd", epochs=30, stop_at_interpolation=True)
    path = tmp_path / "run.pt"
    first = fit(network(), x, y, config, checkpoint=path)
    assert first.stopped_early
    assert fit(network(), x, y, config, checkpoint=path) == first


SCRIPT = """
import sys, time, torch
sys.path.insert(0, sys.argv[2])
torch.set_num_threads(1)
from test_training import images, network, settings_for
from flatbook.training import fit
model = network(dropout=0.3)
model.register_forward_pre_hook(lambda *_: time.sleep(0.01))
config = settings_for("looksam", epochs=12, augment="crop-flip")
fit(model, *images(), config, checkpoint=sys.argv[1])
"""


def test_a_killed_run_ends_with_the_same_bits(tmp_path, repository):
    x, y = images()
    config = settings_for("looksam", epochs=12, augment="crop-flip")
    whole = network(dropout=0.3)
    expected = fit(whole, x, y, config)
    path = tmp_path / "run.pt"
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(path), str(repository / "tests")]
    child = subprocess.Popen(command)
    deadline = time.monotonic() + 120
    while not path.exists() and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(random.random() * 0.15)  # any moment must do
    child.kill()
    assert child.wait() == -signal.SIGKILL
    done = len(torch.load(path, weights_only=True)["state"]["loss"])
    assert 1 <= done < 12
    resumed = network(seed=9, dropout=0.3)
    assert timeless(fit(resumed, x, y, config, checkpoint=path)) == timeless(expected)
    assert same(tensors(resumed), tensors(whole))


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    x, y = images()
    config = settings_for("sgd", epochs=1)
    path = tmp_path / "run.pt"
    fit(network(), x, y, config, checkpoint=path)
    written = path.read_bytes()
    half_frozen = network()
    half_frozen[0].requires_grad_(False)
    wider = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    change = dataclasses.replace
    cases = [
        ((network(), x, y, change(config, lr=0.2)), {}, "lr=0.1, not 0.2"),
        ((network(), x, y, change(config, epochs=2)), {}, "epochs=1, not 2"),
        (
            (network(), x, y, change(config, augment="crop-flip")),
            {},
            "augment=None, not 'crop-flip'",
        ),
        ((network(), x, y, change(config, optimizer="sam")), {}, "optimizer='sgd', not 'sam'"),
        ((network(), x + 1e-6, y, config), {}, "another data"),
        ((network(), x, y.flip(0), config), {}, "another data"),
        ((network(), x, y, config), {"eval_data": (x, y)}, "another data"),
        ((wider, x, y, config), {}, "another model"),
        ((half_frozen, x, y, config), {}, "another model"),
    ]
    for arguments, options, message in cases:
        with pytest.raises(CheckpointError, match=f"run.pt is of a run with {message}"):
            fit(*arguments, checkpoint=path, **options)
    assert path.read_bytes() == written


def test_a_damaged_checkpoint_says_so(tmp_path):
    x, y = images()
    config = settings_for("sgd", epochs=1)
    path = tmp_path / "run.pt"
    fit(network(), x, y, config, checkpoint=path)
    written = path.read_bytes()
    middle = len(written) // 2
    for damaged in (b"", written[:middle], b"garbage", written[:20] + bytes(40) + written[60:]):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"run.pt is damaged or no checkpoint; delete it"):
            fit(network(), x, y, config, checkpoint=path)
    torch.save({"weights": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match=r"run\.pt has another format than this version"):
        fit(network(), x, y, config, checkpoint=path)


def test_no_flipped_bit_of_a_checkpoint_passes_unseen(tmp_path):
    x, y = images(30)
    config = settings_for("gsam", epochs=1)
    path = tmp_path / "run.pt"
    small = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    history = fit(small, x, y, config, checkpoint=path)
    written = path.read_bytes()
    refused = 0
    for place in np.random.default_rng(0).integers(8 * len(written), size=150).tolist():
        flipped = bytearray(written)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
        try:
            assert fit(model, x, y, config, checkpoint=path) == history
            assert same(tensors(model), tensors(small))  # the bit was in the padding
        except CheckpointError:
            refused += 1
    assert refused > 30


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: None,
        lambda state: [],
        lambda state: {},
        lambda state: state | {"model": None},
        lambda state: state | {"model": {"0.weight": torch.zeros(1)}},
        lambda state: state | {"optimizer": 3},
        lambda state: state | {"optimizer": {}},
        lambda state: state | {"loss": None},
        lambda state: state | {"loss": ["low"]},
        lambda state: state | {"lr": ()},
        lambda state: state | {"loss": (0.1, 0.1), "lr": (0.1, 0.1)},
        lambda state: state | {"stopped_early": "no"},
        lambda state: {key: value for key, value in state.items() if key != "accuracy"},
    ],
)
def test_a_checkpoint_without_its_parts_is_damaged(tmp_path, spoil):
    x, y = images()
    config = settings_for("sgd", epochs=1)
    path = tmp_path / "run.pt"
    fit(network(), x, y, config, checkpoint=path)
    content = torch.load(path, weights_only=True)
    torch.save(content | {"state": spoil(content["state"])}, path)
    with pytest.raises(CheckpointError, match=r"run\.pt is damaged|run\.pt has another format"):
        fit(network(), x, y, config, checkpoint=path)


def test_numpy_numbers_in_a_config_do_not_spoil_the_checkpoint(tmp_path):
    x, y = images()
    config = settings_for("sgd", epochs=np.int64(1), lr=np.float32(0.125), seed=np.uint8(3))
    assert type(config.epochs) is int
    assert type(config.lr) is float
    first = fit(network(), x, y, config, checkpoint=tmp_path / "run.pt")
    again = settings_for("sgd", epochs=1, lr=0.125, seed=3)
    assert fit(network(), x, y, again, checkpoint=tmp_path / "run.pt") == first


# --- divergence ---------------------------------------------------------------------------------


def test_divergence_is_named_and_the_last_good_checkpoint_stays(tmp_path):
    x, y = images()
    path = tmp_path / "run.pt"

    def poison(batch, _, calls=itertools.count(1)):
        return batch * math.nan if next(calls) > 8 else batch

    config = settings_for("sgd", epochs=5, augment=poison)
    with pytest.raises(DivergenceError, match="diverged: the mean loss is not finite in epoch 3"):
        fit(network(), x, y, config, checkpoint=path)
    assert len(torch.load(path, weights_only=True)["state"]["loss"]) == 2
    with pytest.raises(DivergenceError, match=r"in epoch 1, which started at .* 1e.30") as caught:
        fit(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), x, y, settings_for("sgd", lr=1e30))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.epoch, copy.lr, str(copy)) == (1, 1e30, str(caught.value))


def test_weights_that_break_in_the_last_step_are_noticed():
    x, y = images(8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    config = settings_for("sgd", epochs=1, lr=3e38, weight_decay=1.0)
    with torch.no_grad():
        model[1].weight.fill_(10.0)
    with pytest.raises(DivergenceError, match="a weight or running statistic is not finite"):
        fit(model, x, y, config)


# --- evaluation ---------------------------------------------------------------------------------


@settings(max_examples=20)
@given(n=st.integers(1, 40), batch_size=st.integers(1, 50))
def test_evaluation_is_the_mean_over_samples_whatever_the_batches(n, batch_size):
    x, y = images(n)
    model = network(dropout=0.5)
    model[1].eval()
    loss, accuracy = evaluate(model, x, y, batch_size=batch_size)
    assert model.training  # as it was, layer by layer
    assert not model[1].training
    assert int(model[1].num_batches_tracked) == 0
    model.eval()
    logits = model(x)
    assert loss == pytest.approx(cross_entropy(logits, y).item(), rel=1e-5)
    assert accuracy == pytest.approx((logits.argmax(1) == y).float().mean().item())


# --- wrong input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("epochs", 0, "epochs must be a whole number of at least 1; got 0"),
        ("epochs", 2.0, "epochs must be a whole number of at least 1; got 2.0"),
        ("batch_size", -1, "batch_size must be a whole number of at least 1; got -1"),
        ("optimizer", "SAM", "optimizer must be one of sgd, .* got 'SAM'. Did you mean 'sam'"),
        ("optimizer", "lbfgs", "optimizer must be one of sgd, .* got 'lbfgs'"),
        ("base", "sam", "base must be one of sgd, adam, adamw; got 'sam'"),
        ("lr", 0.0, "lr must be a finite number above 0; got 0.0"),
        ("lr", math.nan, "lr must be a finite number above 0; got nan"),
        ("momentum", 1.0, "momentum must be below 1; got 1"),
        ("momentum", -0.1, r"momentum must be a number in \[0, 1\]; got -0.1"),
        ("weight_decay", -1e-4, "weight_decay must be a finite number of at least 0; got -0.0001"),
        ("rho", 0, "rho must be a finite number above 0; got 0"),
        ("rho", -0.05, "rho must be a finite number above 0; got -0.05"),
        ("alpha", -1, "alpha must be a finite number of at least 0; got -1"),
        ("look_every", 0, "look_every must be a whole number of at least 1; got 0"),
        ("micro_batch", 0, "micro_batch must be a whole number of at least 1; got 0"),
        ("schedule", "linear", "schedule must be one of cosine, constant; got 'linear'"),
        ("warmup", -1, "warmup must be a finite number of at least 0; got -1"),
        ("warmup", 11, "warmup must be at most epochs, 10; got 11"),
        ("precision", "half", "precision must be one of float32, bfloat16, float16; got 'half'"),
        ("channels_last", 1, "channels_last must be True or False; got 1"),
        ("augment", "crop", "augment must be one of crop-flip; got 'crop'"),
        ("label_smoothing", 1, "label_smoothing must be below 1; got 1"),
        ("stop_at_interpolation", None, "stop_at_interpolation must be True or False; got None"),
        ("seed", -1, "seed must be a whole number of at least 0; got -1"),
        ("seed", 0.5, "seed must be a whole number of at least 0; got 0.5"),
    ],
)
def test_every_field_of_the_config_is_checked(field, value, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**{field: value})


def test_the_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().lr = 1.0


class Idle(nn.Module):
    """A classifier whose only trainable parameter has no part in what it says."""

    def __init__(self):
        super().__init__()
        self.live = nn.Linear(64, 3).requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.live(x.flatten(1))


def bad_calls():
    x, y = images()
    config = settings_for("sgd")
    nan = x.clone()
    nan[3, 0, 2, 2] = math.nan
    frozen = network().requires_grad_(False)
    return [
        ((x, y, {"lr": 0.1}), {}, "config must be a TrainConfig; got dict"),
        ((x[:0], y[:0], config), {}, r"x must not be empty; got shape \(0, 1, 8, 8\)"),
        ((nan, y, config), {}, "x must be finite; got inf or nan"),
        ((x.byte(), y, config), {}, "x must hold floating-point numbers; got torch.uint8"),
        ((x[:, 0], y, config), {}, r"x must fit the model, which refuses shape \(60, 8, 8\): "),
        ((x[:, :, :4], y, config), {}, r"x must fit the model, which refuses shape \(60, 1, 4, 8"),
        ((x.flatten(), y, config), {}, r"x must have shape \(samples, size\); got \(3840,\)"),
        (("x", y, config), {}, "x must be a tensor or array of numbers; got str"),
        (
            (x.numpy().astype(">f4"), y, config),
            {},
            "numbers; got an array of >f4, which torch lacks",
        ),
        ((x, y, config), {"model": Idle()}, "model must use a trainable parameter"),
        ((x, y[:-1], config), {}, r"y must have shape \(60\); got \(59,\)"),
        ((x, y + 1, config), {}, r"y must lie in 0..2, one label per sample; got 1..3"),
        ((x, y - 1, config), {}, r"y must lie in 0..2, one label per sample; got -1..1"),
        ((x, y.float(), config), {}, "y must hold whole numbers; got torch.float32"),
        ((x, y, config), {"checkpoint_every": 0}, "checkpoint_every must be a whole number"),
        ((x, y, config), {"device": "gpu9"}, "device must name a device of this machine.* 'gpu9'"),
        ((x, y, config), {"eval_data": x}, r"eval_data must be a pair \(x, y\); got Tensor"),
        ((x, y, config), {"eval_data": (x, y + 9)}, r"y of eval_data must lie in 0..2"),
        ((x, y, config), {"eval_data": (x[:, :, 4:], y)}, "x of eval_data must fit the model"),
        ((x, y, config), {"model": frozen}, "model must have a parameter that requires a gradient"),
        (
            (x, y, config),
            {"model": nn.Conv2d(1, 3, 3)},
            r"model must return logits of shape \(samples, classes\); got \(1, 3, 6, 6\) for one",
        ),
        (
            (x.flatten(1), y, settings_for("sgd", augment="crop-flip")),
            {"model": nn.Linear(64, 3)},
            r'augment="crop-flip" needs images, four axes; got \(60, 64\)',
        ),
    ]


@pytest.mark.parametrize(("arguments", "options", "message"), bad_calls())
def test_wrong_calls_are_refused_in_a_sentence(arguments, options, message):
    options = dict(options)
    model = options.pop("model", None) or network()
    before = tensors(model)
    with pytest.raises(ValueError, match=message):
        fit(model, *arguments, **options)
    assert same(tensors(model), before)


def test_wrong_evaluations_are_refused_in_a_sentence():
    x, y = images()
    with pytest.raises(ValueError, match="batch_size must be a whole number"):
        evaluate(network(), x, y, batch_size=0)
    with pytest.raises(ValueError, match=r"y must have shape \(60\)"):
        evaluate(network(), x, y[:3])
    with pytest.raises(ValueError, match="x must have shape"):
        crop_flip(x[:, 0], generator(0))


def test_none_is_neither_a_model_nor_a_config():
    x, y = images()
    for call in (lambda: evaluate(None, x, y), lambda: fit(None, x, y, settings_for("sgd"))):
        with pytest.raises(ValueError, match="model must be a torch module; got NoneType"):
            call()
    with pytest.raises(ValueError, match="model must be a torch module; got the class Linear"):
        fit(nn.Linear, x, y, settings_for("sgd"))
    with pytest.raises(ValueError, match="config must be a TrainConfig; got NoneType"):
        make_optimizer(network(), None)
    with pytest.raises(ValueError, match="model must be a torch module; got NoneType"):
        make_optimizer(None, settings_for("sgd"))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", [(1, 8, 8), (64,)])
def test_lazy_layers_get_their_weights_from_the_data(shape, channels_last):
    x, y = images()
    x = x.reshape(-1, *shape)
    model = build("mlp", num_classes=3, in_channels=1, width=np.float32(0.125), seed=0)
    ready = build("mlp", num_classes=3, in_channels=1, width=32, input_shape=shape, seed=0)
    config = settings_for("sgd", channels_last=channels_last)
    history = fit(model, x, y, config)
    assert history.epochs_run == config.epochs
    assert [p.shape for p in model.parameters()] == [p.shape for p in ready.parameters()]
    assert evaluate(model, x, y)[1] > 0.9


def test_a_lone_last_sample_is_refused_where_batch_norm_cannot_take_it(tmp_path):
    x, y = images(9)
    deep = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    spread = network()  # normalises over the positions of an image, too
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    for optimizer, options in [("sgd", {"batch_size": 4}), ("sam", {"batch_size": 1})]:
        config = settings_for(optimizer, epochs=1, **options)
        before = tensors(deep)
        with pytest.raises(
            ValueError, match=r"batch_size must not leave a batch of one sample.* 9"
        ):
            fit(deep, x, y, config)
        assert same(tensors(deep), before)
        assert fit(spread, x, y, config).epochs_run == 1
        assert fit(plain, x, y, config).epochs_run == 1
    micro = settings_for("msam", epochs=1, batch_size=9, micro_batch=4)
    with pytest.raises(
        ValueError, match="batch_size and micro_batch must not leave a batch of one"
    ):
        fit(deep, x, y, micro)
    assert fit(deep, x, y, settings_for("sgd", epochs=1, batch_size=7)).epochs_run == 1


def test_a_split_of_a_data_set_may_be_evaluated_on():
    x, y = images()
    split = Split(x, y, torch.arange(len(x)))
    history = fit(network(), x, y, settings_for("sgd"), eval_data=split)
    assert len(history.eval_accuracy) == 3


# --- progress -----------------------------------------------------------------------------------


def test_the_bar_shows_loss_accuracy_and_time_left(capsys):
    x, y = images()
    fit(network(), x, y, settings_for("sam", epochs=2), progress=True)
    shown = capsys.readouterr().err
    assert "sam: 100%" in shown
    assert "8/8" in shown
    assert "accuracy" in shown
    assert "loss" in shown
    assert "<00:00" in shown  # elapsed < left


@pytest.mark.parametrize(
    ("notebook", "terminal", "variable", "shown"),
    [
        (False, False, None, False),
        (False, True, None, True),
        (True, False, None, True),
        (False, True, "0", False),
        (True, False, "0", False),
        (False, True, "1", True),
    ],
)
def test_bars_show_where_someone_looks(monkeypatch, notebook, terminal, variable, shown):
    monkeypatch.setattr(progress, "_in_notebook", lambda: notebook)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("FLATBOOK_PROGRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("FLATBOOK_PROGRESS", variable)
    with progress.bar(1, label="x") as bar:
        assert bar.disable is not shown
    with progress.bar(1, label="x", show=not shown) as bar:
        assert bar.disable is shown


def test_silent_runs_print_nothing(capsys):
    x, y = images()
    fit(network(), x, y, settings_for("sgd"), progress=False)
    assert capsys.readouterr() == ("", "")


def test_an_empty_history_is_zero():
    assert (History().epochs_run, History().seconds) == (0, 0)


@dataclasses.dataclass(frozen=True)
class Nudge:
    size: float

    def __call__(self, model, x, y):
        return x + self.size


def test_a_checkpoint_knows_the_options_of_its_adversary(tmp_path):
    x, y = images()
    config, path = settings_for("sgd", epochs=1), tmp_path / "run.pt"
    fit(network(), x, y, config, adversary=Nudge(0.1), checkpoint=path)
    fit(network(), x, y, config, adversary=Nudge(0.1), checkpoint=path)
    with pytest.raises(CheckpointError, match=r"size=0\.1.* not .*size=0\.2"):
        fit(network(), x, y, config, adversary=Nudge(0.2), checkpoint=path)


def test_an_adversary_must_return_inputs():
    x, y = images()
    with pytest.raises(ValueError, match=r"adversary must return inputs .* x_adv .* got Attack"):
        fit(
            network(),
            x,
            y,
            settings_for("sgd"),
            adversary=lambda model, x, y: pgd(
                model, x, y, norm="linf", epsilon=0.1, step_size=0.1, steps=1, box=(-9, 9)
            ),
        )


def nudge(model, x, y, size):
    return x + size


def test_a_checkpoint_knows_the_arguments_of_a_partial(tmp_path):
    x, y = images()
    config, path = settings_for("sgd", epochs=1), tmp_path / "run.pt"
    for _ in range(2):
        fit(network(), x, y, config, adversary=functools.partial(nudge, size=1), checkpoint=path)
    other = functools.partial(nudge, size=2)
    with pytest.raises(CheckpointError, match=r"nudge\(size=1\)' *, not .*nudge\(size=2\)"):
        fit(network(), x, y, config, adversary=other, checkpoint=path)


@pytest.mark.parametrize(
    ("adversary", "message"),
    [
        ("pgd", "adversary must be a function of the model.*; got 'pgd'"),
        (lambda model, x, y: x.double(), r"float32, such .*; got torch\.float64 of shape \(16, 1"),
        (lambda model, x, y: x[:2], r"shape it was given, \(16, 1, .* of shape \(2, 1, 8, 8\)"),
    ],
)
def test_adversaries_that_return_something_else_are_named(adversary, message):
    with pytest.raises(ValueError, match=message):
        fit(network(), *images(), settings_for("sgd"), adversary=adversary)


def test_models_that_work_in_place_change_no_data():
    x, y = images()
    given = x.clone()
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3))
    fit(model, given, y, settings_for("sgd", epochs=1), eval_data=(given, y))
    evaluate(model, given, y)
    assert torch.equal(given, x)
