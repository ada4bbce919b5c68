"""The Lipschitz bound against dense matrices, against Jacobians, and where it is refused."""

import copy
import math
from typing import get_args

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torchvision.models.densenet import _DenseBlock, _Transition
from torchvision.models.resnet import BasicBlock

from flatbook import convolution
from flatbook.lipschitz import lipschitz_bound
from flatbook.models import ModelName, Normalise, _PreActivationBlock, build


def seeded(make, seed=0):
    """Make a module in float64 whose batch norms have seen something."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make().double()
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
                layer.running_mean.normal_()
                layer.running_var.uniform_(0.2, 4)
                layer.weight.data.normal_(std=2)
                layer.bias.data.normal_()
    return model.eval()


def random_points(shape, points, seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.rand(points, *shape, generator=random, dtype=torch.float64)


def jacobian(function, x):
    """Return the matrix of the derivatives at one input."""
    rows = torch.autograd.functional.jacobian(lambda x: function(x[None]).flatten(), x)
    return rows.reshape(len(rows), -1)


def steepest(function, shape, points=3):
    """Return the largest singular value of the Jacobian at some points: no bound is below it."""
    return max(
        torch.linalg.svdvals(jacobian(function, x))[0].item() for x in random_points(shape, points)
    )


# --- linear layers -----------------------------------------------------------------------------


def test_linear_layer_is_its_largest_singular_value():
    for shape in ((3, 40), (40, 3), (1, 1)):
        layer = seeded(lambda shape=shape: nn.Linear(*shape))
        expected = torch.linalg.svdvals(layer.weight.detach())[0].item()
        got = lipschitz_bound(layer, shape[:1])
        assert expected <= got <= expected * (1 + 1e-12)
        for scale in (1e-170, 1e170):
            layer.weight.data *= scale
            assert lipschitz_bound(layer, shape[:1]) == pytest.approx(scale * got, rel=1e-12)
            layer.weight.data /= scale
    layer.weight.data.zero_()
    assert lipschitz_bound(layer, (1,)) == 0


CONVOLUTIONS = [
    {"kernel_size": kernel, "stride": stride, "padding": padding}
    for kernel in (1, 3, 5)
    for stride in (1, 2)
    for padding in (0, 1)
] + [
    {"kernel_size": 3, "padding": 4},
    {"kernel_size": 3, "padding": 2, "dilation": 2},
    {"kernel_size": 3, "stride": 3, "padding": 1, "dilation": (1, 3)},
    {"kernel_size": (2, 3), "stride": (1, 2), "padding": (1, 0)},
    {"kernel_size": (4, 2), "padding": "same"},
    {"kernel_size": 3, "padding": "valid"},
    {"kernel_size": 3, "padding": 1, "groups": 2},
    {"kernel_size": 3, "padding": 1, "groups": 4, "stride": 2},
    {"kernel_size": 4, "stride": 4},
    {"kernel_size": (10, 11)},
    {"kernel_size": 1, "padding": 2},
    {"kernel_size": 2, "stride": 5, "padding": 1},
]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_convolution_is_its_dense_matrix(options, monkeypatch):
    shape = (4, 10, 11)
    layer = seeded(lambda: nn.Conv2d(4, 8, **options))
    expected = torch.linalg.svdvals(jacobian(layer, torch.zeros(shape).double()))[0].item()
    got = lipschitz_bound(layer, shape)
    assert expected <= got <= expected * (1 + 1e-9)
    # Large ones go by way of the Fourier transform, whose circular image has no border.
    monkeypatch.setattr(convolution, "_MOST_ORDER", 0)
    got = lipschitz_bound(layer, shape)
    assert expected <= got <= expected * 1.25
    if options["kernel_size"] in (1, 2, 4, (10, 11)):  # no pixel is in two windows
        assert got == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("padding", [0, 1, 2, 5])
def test_fourier_bound_is_never_below(size, kernel, stride, padding, monkeypatch):
    if size + 2 * padding < kernel:
        return
    monkeypatch.setattr(convolution, "_MOST_ORDER", 0)
    for dilation in (1, 2):
        if size + 2 * padding < dilation * (kernel - 1) + 1:
            continue
        layer = seeded(lambda d=dilation: nn.Conv2d(2, 2, kernel, stride, padding, d), size)
        # Positive taps add up in the middle, where nothing is lost at the border.
        for weight in (layer.weight.data.clone(), layer.weight.data.abs()):
            layer.weight.data = weight
            matrix = jacobian(layer, torch.zeros(2, size, size).double())
            assert lipschitz_bound(layer, (2, size, size)) >= torch.linalg.svdvals(matrix)[0]


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (5, 1), (5, 2)])
def test_border_costs_little_on_images_of_the_usual_size(kernel, stride):
    layer = seeded(lambda: nn.Conv2d(4, 8, kernel, stride, padding=1, bias=False))
    v = random_points((4, 32, 32), 1).requires_grad_()
    for _ in range(100):
        (v,) = torch.autograd.grad(layer(v).square().sum() / 2, v)
        v = (v / v.norm()).requires_grad_()
    reached = layer(v).norm().item()
    assert reached <= lipschitz_bound(layer, (4, 32, 32)) <= 1.04 * reached


def test_positive_filter_reaches_its_sum_on_a_large_image():
    layer = nn.Conv2d(1, 1, 3, padding=1, bias=False)
    layer.weight.data.fill_(1.0)
    got = lipschitz_bound(layer, (1, 64, 64))
    assert got == pytest.approx(9, rel=1e-9)  # Sedghi et al.: the symbol at frequency 0
    dense = (1 + 2 * math.cos(math.pi / 65)) ** 2  # of the tridiagonal matrix of ones, squared
    assert dense < got < 1.003 * dense


# --- what needs no matrix ----------------------------------------------------------------------


def normed(layer):
    """Return the matrix diagonal of a batch norm."""
    return (layer.weight / (layer.running_var + layer.eps).sqrt()).detach()


def test_batch_norm_is_its_largest_factor():
    for make, shape in (
        (lambda: nn.BatchNorm1d(5), (5,)),
        (lambda: nn.BatchNorm1d(5), (5, 3)),
        (lambda: nn.BatchNorm2d(5), (5, 3, 3)),
    ):
        layer = seeded(make)
        expected = normed(layer).abs().max().item()
        assert lipschitz_bound(layer, shape) == pytest.approx(expected, rel=1e-12)
    plain = nn.BatchNorm1d(5, affine=False, eps=0.0)
    plain.running_var.copy_(torch.tensor([4.0, 1.0, 0.25, 9.0, 1.0]))
    assert lipschitz_bound(plain, (5,)) == pytest.approx(2, rel=1e-12)


def test_batch_norm_is_one_with_the_linear_layer_beside_it():
    after = seeded(lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)))
    weight = normed(after[1])[:, None] * after[0].weight.detach()
    expected = torch.linalg.svdvals(weight)[0].item()
    assert lipschitz_bound(after, (6,)) == pytest.approx(expected, rel=1e-12)
    before = seeded(lambda: nn.Sequential(nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5)))
    weight = before[2].weight.detach() * normed(before[0])
    expected = torch.linalg.svdvals(weight)[0].item()
    assert lipschitz_bound(before, (6,)) == pytest.approx(expected, rel=1e-12)
    assert expected >= steepest(before, (6,))
    images = seeded(
        lambda: nn.Sequential(
            nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.BatchNorm2d(6)
        )
    )
    expected = torch.linalg.svdvals(jacobian(images, random_points((4, 5, 5), 1)[0]))[0].item()
    assert lipschitz_bound(images, (4, 5, 5)) == pytest.approx(expected, rel=1e-9)


def test_channels_of_a_sequence_are_not_those_of_a_linear_layer():
    """Linear acts on the last axis, and the batch norm on the second."""
    model = seeded(lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)))
    bound = lipschitz_bound(model, (4, 4))
    parts = [normed(model[0]).abs().max(), normed(model[2]).abs().max()]
    parts.append(torch.linalg.svdvals(model[1].weight.detach())[0])
    assert bound == pytest.approx(math.prod(float(part) for part in parts), rel=1e-9)
    assert bound >= steepest(model, (4, 4))


def test_normalise_counts():
    assert lipschitz_bound(Normalise(2, 0.1, [0.5, 0.2]).double(), (2, 3, 3)) == pytest.approx(5)
    assert lipschitz_bound(Normalise(3), (7,)) == pytest.approx(1)  # no images, no change
    assert lipschitz_bound(Normalise(1, std=0.5), (7,)) == pytest.approx(2)
    model = nn.Sequential(Normalise(1, std=0.25), nn.Flatten(), nn.Linear(4, 2))
    expected = 4 * torch.linalg.svdvals(model[2].weight.detach().double())[0].item()
    assert lipschitz_bound(model, (1, 2, 2)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.ReLU(), 1),
        (nn.Tanh(), 1),
        (nn.Sigmoid(), 0.25),
        (nn.LeakyReLU(0.1), 1),
        (nn.LeakyReLU(-3.0), 3),
        (nn.ELU(2.0), 2),
        (nn.Hardtanh(-5, 5), 1),
        (nn.Dropout(0.5).train(), 1),
        (nn.Identity(), 1),
        (nn.Flatten(), 1),
    ],
)
def test_activations(layer, expected):
    assert lipschitz_bound(layer, (3, 4, 4)) == expected
    x = torch.linspace(-3, 3, 1_000_001, dtype=torch.float64)
    slope = (layer.eval()(x[None])[0].diff() / x.diff()).abs().max().item()
    assert 0.999 * expected <= slope <= expected * (1 + 1e-6)


POOLS = [
    (nn.MaxPool2d(2), 1),
    (nn.MaxPool2d(3, 2), 2),
    (nn.MaxPool2d(3, 2, padding=1), 2),
    (nn.MaxPool2d(3, 1), 3),
    (nn.MaxPool2d((3, 1), 1), math.sqrt(3)),
    (nn.MaxPool2d(2, 3, ceil_mode=True), 1),
    (nn.MaxPool2d(2, 1, dilation=2), 2),
]


@pytest.mark.parametrize(("layer", "expected"), POOLS, ids=str)
def test_max_pool_reaches_its_bound_where_one_pixel_fills_every_window(layer, expected):
    assert lipschitz_bound(layer, (2, 8, 8)) == pytest.approx(expected)
    moved = []
    for pixel in range(64):
        x = torch.zeros(1, 1, 64, dtype=torch.float64)
        x[0, 0, pixel] = 1
        moved.append(layer(x.view(1, 1, 8, 8)).norm().item())
    assert max(moved) == pytest.approx(expected)


AVERAGES = [
    nn.AvgPool2d(2),
    nn.AvgPool2d(3, 2, padding=1),
    nn.AvgPool2d(3, 2, padding=1, count_include_pad=False),
    nn.AvgPool2d((2, 3), 1),
    nn.AvgPool2d(3, 3, ceil_mode=True),
    nn.AvgPool2d(2, divisor_override=1),
    nn.AdaptiveAvgPool2d(1),
    nn.AdaptiveAvgPool2d(3),
    nn.AdaptiveAvgPool2d((5, None)),
    nn.AdaptiveAvgPool2d(16),
]


@pytest.mark.parametrize("layer", AVERAGES, ids=str)
def test_averages_are_their_dense_matrix(layer):
    shape = (2, 8, 7)
    expected = torch.linalg.svdvals(jacobian(layer, torch.zeros(shape).double()))[0].item()
    assert expected * (1 - 1e-12) <= lipschitz_bound(layer, shape) <= 1.02 * expected


def test_global_average_is_exact():
    got = lipschitz_bound(nn.AdaptiveAvgPool2d(1), (5, 8, 7))
    assert got == pytest.approx(1 / math.sqrt(56), rel=1e-12)
    assert lipschitz_bound(nn.AvgPool2d(2), (5, 8, 8)) == pytest.approx(0.5, rel=1e-12)


# --- blocks and whole networks -----------------------------------------------------------------


def basic(before, after, stride):
    shortcut = None
    if stride != 1 or before != after:
        shortcut = nn.Sequential(
            nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
        )
    return BasicBlock(before, after, stride, shortcut)


BLOCKS = {
    "basic": lambda: basic(4, 4, 1),
    "basic, halving": lambda: basic(4, 6, 2),
    "pre-activation": lambda: _PreActivationBlock(4, 4, 1),
    "pre-activation, halving": lambda: _PreActivationBlock(4, 6, 2),
    "dense": lambda: _DenseBlock(3, 4, bn_size=2, growth_rate=3, drop_rate=0.5),
    "transition": lambda: _Transition(4, 2),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_no_block_is_steeper_than_its_bound(name):
    block = seeded(BLOCKS[name])
    bound, steep = lipschitz_bound(block, (4, 6, 6)), steepest(block, (4, 6, 6), points=5)
    assert steep <= bound <= 40 * steep


def test_block_that_adds_its_input_doubles_it():
    """With the branch an identity and every unit active, x + x: the bound is reached."""
    block = basic(2, 2, 1).double().eval()
    for layer in (block.conv1, block.conv2):
        nn.init.dirac_(layer.weight)
    for norm in (block.bn1, block.bn2):
        norm.running_var.fill_(1 - norm.eps)
    assert lipschitz_bound(block, (2, 5, 5)) == pytest.approx(2)
    assert steepest(block, (2, 5, 5)) == pytest.approx(2)


def test_dense_block_appends():
    """One layer whose output is twice its input beside that input: √(1 + 2²)."""
    block = _DenseBlock(1, 1, bn_size=1, growth_rate=1, drop_rate=0.0).double().eval()
    layer = block["denselayer1"]
    for norm in (layer.norm1, layer.norm2):
        norm.running_var.fill_(1 - norm.eps)
    nn.init.constant_(layer.conv1.weight, 2.0)
    nn.init.dirac_(layer.conv2.weight)
    assert lipschitz_bound(block, (1, 4, 4)) == pytest.approx(math.sqrt(5))
    assert steepest(block, (1, 4, 4)) == pytest.approx(math.sqrt(5))


WIDTHS = {"mlp": 8, "small-cnn": 2, "resnet18": 2, "wrn28-4": 2, "densenet121": 2, "vgg11-bn": 4}
LOOSE = {"mlp": 3, "small-cnn": 10}  # over deep networks the product is astronomical


@pytest.mark.parametrize("name", get_args(ModelName))
def test_no_architecture_is_steeper_than_its_bound(name):
    shape = (3, 16, 16)
    model = seeded(
        lambda: build(name, num_classes=3, width=WIDTHS[name], input_shape=shape, seed=0)
    )
    steep = steepest(model.features, shape, points=2)
    bound = lipschitz_bound(model, shape)
    assert math.isfinite(bound)
    assert 0 < steep <= bound
    if name in LOOSE:
        assert bound <= LOOSE[name] * steep


def test_classifier_is_bounded_by_its_features_alone():
    model = build("mlp", num_classes=3, width=5, input_shape=(4,), seed=0)
    bound = lipschitz_bound(model, (4,))
    model.head.weight.data *= 100
    assert lipschitz_bound(model, (4,)) == bound
    assert lipschitz_bound(model.body, [4]) == pytest.approx(bound, rel=1e-12)


def test_distances_of_a_trained_network():
    """The definition itself: no pair of inputs, near or far, is stretched more."""
    shape = (1, 8, 8)
    model = build("small-cnn", num_classes=3, in_channels=1, width=4, seed=0)
    x = random_points(shape, 100).float()
    y = (x[:, 0, :4].mean((1, 2)) > x[:, 0, 4:].mean((1, 2))).long()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    bound = lipschitz_bound(model, shape)
    model = model.double()
    with torch.no_grad():
        x = x.double()
        far = torch.pdist(model.features(x)) / torch.pdist(x.flatten(1))
        step = 1e-5 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).double()
        moved = (model.features(x + step) - model.features(x)).norm(dim=1)
    assert far.max() < bound
    assert (moved < bound * step.flatten(1).norm(dim=1)).all()
    assert bound < 50 * steepest(model.features, shape)


# --- weights that are computed -----------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.*:FutureWarning")
def test_parametrized_weights_are_those_in_use():
    for wrap in (
        parametrizations.spectral_norm,
        parametrizations.weight_norm,
        nn.utils.spectral_norm,
    ):
        for make, shape in (
            (lambda: nn.Linear(5, 4), (5,)),
            (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 4, 4)),
        ):
            layer = seeded(lambda wrap=wrap, make=make: wrap(make()))
            model = nn.Sequential(layer, nn.ReLU()).train()
            before = copy.deepcopy(model.state_dict())
            bound = lipschitz_bound(model, shape)
            after = model.state_dict()
            assert all(torch.equal(before[name], after[name]) for name in before)
            matrix = jacobian(layer.eval(), torch.zeros(shape).double())
            assert bound == pytest.approx(torch.linalg.svdvals(matrix)[0].item(), rel=1e-9)


# --- leaves no trace ---------------------------------------------------------------------------


def test_model_in_training_is_left_alone():
    model = build("resnet18", num_classes=3, width=2, seed=0)
    model.body[1].eval()
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    generator = torch.get_rng_state()
    first = lipschitz_bound(model, (3, 8, 8))
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert lipschitz_bound(model.eval(), (3, 8, 8)) == first
    with pytest.raises(ValueError, match="input_shape must fit"):
        lipschitz_bound(model.train(), (2, 8, 8))
    assert model.training


def test_half_precision_weights():
    layer = nn.Linear(4, 3).bfloat16()
    expected = torch.linalg.svdvals(layer.weight.detach().double())[0].item()
    assert lipschitz_bound(layer, (4,)) == pytest.approx(expected, rel=1e-12)


# --- refusals ----------------------------------------------------------------------------------


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def hooked():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_hook(lambda layer, inputs, output: 5 * output)
    return model


def infinite():
    layer = nn.Linear(4, 4)
    layer.weight.data[0, 0] = math.inf
    return nn.Sequential(layer)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.GELU()), r"known bound; 1 \(GELU\) is not one\.$"),
        (nn.GELU(), r"known bound; the model itself \(GELU\) is not one"),
        (nn.Sequential(nn.Sequential(nn.LayerNorm(4))), r"known bound; 0\.0 \(LayerNorm\)"),
        (Doubled(4, 4), r"the model itself \(Doubled\) is not one"),
        (nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False).eval()),
         r"0 \(BatchNorm1d\) normalises by the batch, so it has none"),
        (hooked(), r"model must have no hooks, .*; 0 \(Linear\) has one"),
        (infinite(), r"model must hold finite numbers; 0\.weight has inf or nan"),
        (nn.Sequential(nn.LazyLinear(3)), r"model must have seen an input; 0 \(LazyLinear\)"),
        (lambda x: x, "model must be a torch module; got function"),
    ],
)  # fmt: skip
def test_unknown_models_are_refused(model, message):
    with pytest.raises(ValueError, match=message):
        lipschitz_bound(model, (4,))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), "pads with reflect, not zeros"),
        (nn.MaxPool2d(2, return_indices=True), "also returns indices"),
        (nn.Conv2d(2, 2, 3).register_forward_pre_hook, "model must be a torch module"),
        (nn.BatchNorm2d(2, track_running_stats=False), "normalises by the batch"),
    ],
)
def test_unknown_options_are_refused(layer, message):
    with pytest.raises(ValueError, match=message):
        lipschitz_bound(layer, (2, 6, 6))


def test_unknown_layer_within_a_block_is_named():
    model = build("resnet18", num_classes=3, width=2, seed=0)
    model.body[4][1].bn2 = nn.GroupNorm(1, 4)
    with pytest.raises(ValueError, match=r"body\.4\.1\.bn2 \(GroupNorm\) is not one"):
        lipschitz_bound(model, (3, 8, 8))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((5,), r"input_shape must fit the model, which refuses \(5,\): mat1 and mat2"),
        (4, "input_shape must be a sequence of sizes; got 4"),
        ("4", "input_shape must be a sequence of sizes; got '4'"),
        ((0,), "input_shape must be a whole number of at least 1; got 0"),
        ((4.0,), "input_shape must be a whole number"),
    ],
)
def test_bad_shapes_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        lipschitz_bound(nn.Linear(4, 4), shape)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 3, 3),
        nn.MaxPool2d(2),
        nn.AvgPool2d(2, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Sequential(Normalise(2, 0.5, [0.25, 0.5])),
    ],
)
def test_samples_are_not_taken_for_channels(layer):
    # With three axes torch reads the first as channels: here it holds the samples.
    with pytest.raises(ValueError, match=r"input_shape must lead to .* \(8, 8\)|gets \(8, 8\)"):
        lipschitz_bound(layer, (8, 8))


@pytest.mark.parametrize(
    ("layer", "shape", "message"),
    [
        (Normalise(3), (1, 8, 8), r"\(Normalise\) has 3 channels, but gets \(1, 8, 8\)"),
        (nn.Sequential(nn.Flatten(0)), (4,), "mixes the samples of a batch"),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, eps=0.0)), (2,), "not above 0"),
        (nn.Linear(2, 2), (), "input_shape must hold at least one size; got none"),
        (nn.Linear(2, 2, device="meta"), (2,), "weight is on the meta device"),
    ],
)
def test_what_has_no_bound_is_refused(layer, shape, message):
    for norm in layer.modules():
        if isinstance(norm, nn.BatchNorm1d):
            norm.running_var.zero_()
    with pytest.raises(ValueError, match=message):
        lipschitz_bound(layer, shape)


def test_replaced_functions_and_hooks_in_a_block_are_refused():
    patched = nn.Linear(2, 2)
    patched.forward = lambda x: 100 * x
    with pytest.raises(ValueError, match=r"0 \(Linear\) has a forward of its own"):
        lipschitz_bound(nn.Sequential(patched), (2,))
    model = build("mlp", num_classes=3, input_shape=(4,))
    model.features = lambda x: 100 * x
    with pytest.raises(ValueError, match=r"\(Classifier\) has a features of its own"):
        lipschitz_bound(model, (4,))
    dense = build("densenet121", num_classes=3, width=2)
    dense.body[1].denselayer2.register_forward_hook(lambda layer, inputs, output: 100 * output)
    with pytest.raises(ValueError, match=r"hooks, .*; body\.1\.denselayer2 \(_DenseLayer\) has"):
        lipschitz_bound(dense, (3, 8, 8))


def test_no_product_rounds_to_zero():
    tiny = nn.Linear(1, 1).double()
    nn.init.constant_(tiny.weight, 1e-200)
    assert 0 < lipschitz_bound(nn.Sequential(tiny, tiny), (1,)) < 1e-300
    nought, huge = nn.Linear(1, 1).double(), nn.Linear(1, 1).double()
    nn.init.zeros_(nought.weight)
    nn.init.constant_(huge.weight, 1e200)
    assert lipschitz_bound(nn.Sequential(huge, huge), (1,)) == math.inf
    assert lipschitz_bound(nn.Sequential(huge, huge, nought), (1,)) == 0


def test_inference_mode_does_no_harm():
    model = seeded(lambda: nn.Sequential(nn.AvgPool2d(2, 1), nn.Conv2d(1, 2, 3), nn.MaxPool2d(2)))
    expected = lipschitz_bound(model, (1, 8, 8))
    with torch.inference_mode():
        assert lipschitz_bound(model, (1, 8, 8)) == expected


def test_windows_that_see_no_pixel_count_for_nothing():
    # The outer windows lie in the padding, the middle one sees the single pixel.
    assert lipschitz_bound(nn.MaxPool2d(2, 1, 1, dilation=2), (1, 1, 1)) == 0
    assert lipschitz_bound(nn.MaxPool2d(3, 1, 1), (1, 1, 1)) == 1
