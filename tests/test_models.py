"""Architectures: sizes derived by hand, the split into features and head, and the door."""

import copy
from itertools import pairwise
from typing import get_args

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torchvision.models import resnet18

from flatbook.models import ModelName, Normalise, build, evaluating

NAMES = get_args(ModelName)
NARROW = dict.fromkeys(NAMES, 0.125)


def narrow(name, **options):
    options = {"num_classes": 5, "width": NARROW[name], "seed": 0} | options
    shape = (options.get("in_channels", 3), 32, 32)
    return build(name, input_shape=shape, **options)


def parameters(model):
    return sum(p.numel() for p in model.parameters())


# --- sizes, each from its own count ------------------------------------------------------------


def conv(before, after, size, *, bias=False):
    return before * after * size**2 + bias * after


def norm(channels):
    return 2 * channels


def linear(before, after):
    return (before + 1) * after


def count_mlp(w, k, c=3, pixels=32 * 32):
    return linear(c * pixels, w) + linear(w, w) + linear(w, k)


def count_small_cnn(w, k, c=3):
    sizes = (c, w, 2 * w, 4 * w)
    convs = sum(conv(a, b, 3, bias=True) for a, b in pairwise(sizes))
    return convs + linear(4 * w, k)


def count_resnet18(w, k, c=3):
    total = conv(c, w, 3) + norm(w)
    before = w
    for after in (w, 2 * w, 4 * w, 8 * w):
        for _ in range(2):
            total += conv(before, after, 3) + conv(after, after, 3) + 2 * norm(after)
            total += (before != after) * (conv(before, after, 1) + norm(after))
            before = after
    return total + linear(8 * w, k)


def count_wrn28(w, k, c=3):
    total, before = conv(c, 16, 3), 16
    for after in (w, 2 * w, 4 * w):
        for _ in range((28 - 4) // 6):
            total += norm(before) + conv(before, after, 3) + norm(after) + conv(after, after, 3)
            total += (before != after) * conv(before, after, 1)
            before = after
    return total + norm(4 * w) + linear(4 * w, k)


def count_densenet121(g, k, c=3):
    total, channels = conv(c, 2 * g, 3), 2 * g
    for stage, layers in enumerate((6, 12, 24, 16)):
        for _ in range(layers):
            total += norm(channels) + conv(channels, 4 * g, 1) + norm(4 * g) + conv(4 * g, g, 3)
            channels += g
        if stage < 3:
            total += norm(channels) + conv(channels, channels // 2, 1)
            channels //= 2
    return total + norm(channels) + linear(channels, k)


def count_vgg11(w, k, c=3):
    total, before = 0, c
    for after in (w, 2 * w, 4 * w, 4 * w, 8 * w, 8 * w, 8 * w, 8 * w):
        total += conv(before, after, 3, bias=True) + norm(after)
        before = after
    return total + linear(8 * w, k)


COUNTS = {
    "mlp": count_mlp,
    "small-cnn": count_small_cnn,
    "resnet18": count_resnet18,
    "wrn28-4": count_wrn28,
    "densenet121": count_densenet121,
    "vgg11-bn": count_vgg11,
}
DEFAULT_WIDTH = dict(zip(NAMES, (256, 32, 64, 64, 32, 64), strict=True))
FEATURES = dict(zip(NAMES, (256, 128, 512, 256, 1024, 512), strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("width", "scale"), [(None, 1), (0.25, 0.25), (8, None)])
def test_parameters_are_those_of_the_architecture(name, width, scale):
    w = 8 if scale is None else int(DEFAULT_WIDTH[name] * scale)
    model = build(name, num_classes=7, width=width, input_shape=(3, 32, 32))
    assert parameters(model) == COUNTS[name](w, 7)
    assert model.head.in_features == FEATURES[name] * w // DEFAULT_WIDTH[name]


def test_published_sizes():
    assert parameters(build("resnet18", num_classes=10)) == 11_173_962
    # Zagoruyko & Komodakis (2016), table 5: WRN-28-10 has 36.5 million.
    assert parameters(build("wrn28-4", num_classes=10, width=160)) == 36_479_194
    assert parameters(build("wrn28-4", num_classes=10)) == pytest.approx(5.85e6, rel=1e-3)


def test_resnet_is_torchvisions_behind_the_stem():
    ours, theirs = build("resnet18", num_classes=10), resnet18(num_classes=10)
    stages = [theirs.layer1, theirs.layer2, theirs.layer3, theirs.layer4]
    for mine, stage in zip(ours.body[3:7], stages, strict=True):
        mine.load_state_dict(stage.state_dict())
        x = torch.rand(1, mine[0].conv1.in_channels, 8, 8)
        with evaluating(mine), evaluating(stage), torch.no_grad():
            torch.testing.assert_close(mine(x), stage(x), rtol=0, atol=0)


def test_wide_blocks_activate_before_the_shortcut_only_where_the_shape_changes():
    stages = build("wrn28-4", num_classes=10, width=4, seed=0).body[1:4]
    negative = -torch.rand(2, 4, 8, 8)
    changing, keeping = stages[1][0], stages[0][1]
    with evaluating(changing), evaluating(keeping), torch.no_grad():  # fresh norms: identity
        assert torch.equal(changing(negative), torch.zeros(2, 8, 4, 4))
        assert torch.equal(keeping(negative), negative)
        assert changing(-negative).any()


# --- the contract of a classifier --------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [28, 32])
@pytest.mark.parametrize("name", NAMES)
def test_forward_is_head_of_features(name, size, channels):
    options = {"in_channels": channels, "num_classes": 5, "width": NARROW[name], "seed": 0}
    model = build(name, input_shape=(channels, size, size), **options)
    x = torch.rand(3, channels, size, size)
    with evaluating(model):
        features = model.features(x)
        assert features.shape == (3, model.head.in_features)
        assert torch.equal(model(x), model.head(features))
        assert torch.equal(model(x), model(x))
    assert isinstance(model.head, nn.Linear)
    assert model(x).shape == (3, 5)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_every_parameter_and_the_input(name):
    model = narrow(name)
    x = torch.rand(4, 3, 32, 32, requires_grad=True)
    cross_entropy(model(x), torch.arange(4)).backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.head.parameters())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert x.grad.any()


@pytest.mark.parametrize("name", NAMES)
def test_one_batch_can_be_learnt(name):
    """Sound initialisation: a few steps of plain SGD fit a small batch."""
    options = {"num_classes": 4, "width": NARROW[name], "seed": 0}
    model = build(name, input_shape=(3, 16, 16), **options)
    x = torch.rand(16, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    y = torch.arange(16) % 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first = cross_entropy(model(x), y).item()
    for _ in range(25):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2 * first


@pytest.mark.parametrize("name", ["mlp", "small-cnn"])
def test_he_initialisation_keeps_the_signal(name):
    """Mean squares neither vanish nor explode along the layers of a network without norm."""
    model = build(name, num_classes=10, in_channels=1, input_shape=(1, 28, 28), seed=0)
    x = torch.randn(64, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    with evaluating(model), torch.no_grad():
        for layer in model.body[:-2]:
            x = layer(x)
            if isinstance(layer, nn.ReLU):
                assert 0.2 < x.square().mean() < 5


@pytest.mark.parametrize("name", NAMES)
def test_copies_and_saved_states_agree(name):
    model = narrow(name)
    x = torch.rand(2, 3, 32, 32)
    model(x)  # batch norm now has statistics of its own
    twin = narrow(name, seed=1)
    twin.load_state_dict(model.state_dict())
    with evaluating(model), evaluating(twin), evaluating(copy.deepcopy(model)) as copied:
        assert torch.equal(twin(x), model(x))
        assert torch.equal(copied(x), model(x))


@pytest.mark.parametrize("name", NAMES)
def test_channels_last_gives_the_same(name):
    model = narrow(name).double().eval()
    x = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    expected = model(x)
    model = model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(x.to(memory_format=torch.channels_last)), expected)


@pytest.mark.parametrize("name", NAMES)
def test_seed_fixes_the_weights_and_leaves_no_trace(name):
    before = torch.get_rng_state()
    first, second, other = narrow(name), narrow(name), narrow(name, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    for key, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[key], value)
    assert not torch.equal(first.head.weight, other.head.weight)


# --- normalisation -----------------------------------------------------------------------------


def test_normalisation_lives_in_features_and_in_the_state():
    mean, std = [0.1, 0.2, 0.3], [0.5, 1.0, 2.0]
    model = narrow("small-cnn", mean=mean, std=std)
    x = torch.rand(2, 3, 32, 32)
    shifted = (x - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(model.features(x), model.body(shifted))
    assert model.state_dict()["normalise.std"].tolist() == std
    assert "normalise.std" not in dict(model.named_parameters())


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_default_normalisation_centres_images(channels):
    x = Normalise(channels)(torch.rand(64, channels, 8, 8))
    assert x.mean().abs() < 1
    assert 0.5 < x.std() < 2


def test_flat_inputs_pass_unless_told_otherwise():
    x = torch.rand(3, 4)
    assert Normalise(1)(x) is x
    told = Normalise(1, mean=[0.0, 1.0, 2.0, 3.0], std=2.0)
    torch.testing.assert_close(told(x), (x - torch.arange(4)) / 2)


# --- the MLP's first layer ---------------------------------------------------------------------


def test_mlp_learns_its_input_size():
    lazy = build("mlp", num_classes=3, in_channels=1, width=8, seed=0)
    ready = build("mlp", num_classes=3, in_channels=1, width=8, seed=0, input_shape=(1, 28, 28))
    copied = copy.deepcopy(lazy)
    x = torch.rand(2, 1, 28, 28)
    before = torch.get_rng_state()
    assert torch.equal(lazy(x), ready(x))
    assert torch.equal(copied(x), ready(x))
    assert torch.equal(torch.get_rng_state(), before)
    assert type(lazy.body[1]) is nn.Linear
    with pytest.raises(ValueError, match="x must hold 784 numbers per sample; got 4"):
        lazy(torch.rand(2, 4))


def test_mlp_takes_flat_features():
    model = build("mlp", num_classes=3, width=8, input_shape=(30,))
    assert model(torch.rand(5, 30)).shape == (5, 3)
    assert [type(layer) for layer in model.body] == [
        nn.Flatten,
        nn.Linear,
        nn.ReLU,
        nn.Linear,
        nn.ReLU,
    ]


def test_lipschitz_code_can_walk_plain_bodies():
    kinds = {type(layer) for layer in narrow("small-cnn").body}
    assert kinds == {nn.Conv2d, nn.ReLU, nn.AdaptiveAvgPool2d, nn.Flatten}
    assert {type(layer) for layer in narrow("vgg11-bn").body} == kinds | {
        nn.BatchNorm2d,
        nn.MaxPool2d,
    }


# --- modes -------------------------------------------------------------------------------------


def test_evaluating_restores_each_mode_even_after_an_error():
    model = narrow("resnet18")
    model.body[1].eval()
    modes = [module.training for module in model.modules()]

    def fail():
        with evaluating(model):
            assert not any(module.training for module in model.modules())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [module.training for module in model.modules()] == modes


# --- the door ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "resnet"}, "name must be one of mlp, .* Did you mean 'resnet18'"),
        ({"num_classes": 1}, "num_classes must be a whole number of at least 2; got 1"),
        ({"num_classes": 2.0}, "num_classes must be a whole number"),
        ({"in_channels": 0}, "in_channels must be a whole number of at least 1; got 0"),
        ({"width": 0}, "width must be a whole number of at least 1; got 0"),
        ({"width": -0.5}, "width must be a finite number above 0; got -0.5"),
        ({"width": 0.001}, "width must be a whole number of at least 1; got 0"),
        ({"width": True}, "width must be a whole number"),
        ({"width": "wide"}, "width must be a whole number .*'wide'"),
        ({"std": 0.0}, "std must be above 0"),
        ({"std": [1.0, 1.0]}, "std must hold 1 or 3 numbers; got 2"),
        ({"mean": [0.1, 0.2]}, "mean must hold 1 or 3 numbers; got 2"),
        ({"mean": float("nan")}, "mean must be finite"),
        ({"mean": "grey"}, "mean must be one number, or one per channel; got 'grey'"),
        ({"input_shape": 28}, "input_shape must be a sequence of sizes; got 28"),
        ({"input_shape": (1, 28, 28)}, r"input_shape must be \(3, height, width\); got"),
        ({"input_shape": (30,)}, r"input_shape must be \(3, height, width\); got \(30,\)"),
        ({"input_shape": (3, 0, 8)}, "input_shape must be a whole number"),
        ({"seed": -1}, "seed must be a whole number"),
    ],
)
def test_build_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        build(**{"name": "small-cnn", "num_classes": 10} | options)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.rand(2, 1, 8, 8), r"x must have shape \(samples, 3, height, width\); got \(2, 1,"),
        (torch.rand(3, 8, 8), r"x must have shape .*; got \(3, 8, 8\)"),
        (torch.rand(2, 192), r"x must have shape .*; got \(2, 192\)"),
        (torch.rand(0, 3, 8, 8), "x must not be empty"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), r"x must hold floating-point .* torch.uint8"),
    ],
)
def test_features_refuse(x, message):
    with pytest.raises(ValueError, match=message):
        build("small-cnn", num_classes=10, width=4)(x)


def test_mlp_names_both_shapes_it_takes():
    with pytest.raises(ValueError, match=r"\(samples, 3, height, width\) or \(samples, features\)"):
        build("mlp", num_classes=10)(torch.rand(2, 1, 8, 8))
