"""Classifiers that split into a feature map and a linear head, for images in [0, 1]."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from numbers import Integral, Real
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torchvision.models.densenet import DenseNet
from torchvision.models.resnet import BasicBlock, conv1x1, conv3x3
from torchvision.models.vgg import cfgs as vgg_layouts
from torchvision.models.vgg import make_layers

from flatbook import checks, runtime

ModelName = Literal["mlp", "small-cnn", "resnet18", "wrn28-4", "densenet121", "vgg11-bn"]

# Mean and standard deviation of the pixels of each channel: Fashion-MNIST's for grey images,
# CIFAR-10's for colour ones. Any other number of channels gets the middle of [0, 1].
_PIXELS = {
    1: ((0.2860,), (0.3530,)),
    3: ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}


class Normalise(nn.Module):
    """Shift and scale each channel: ``(x - mean) / std``.

    It is the first layer of every model here, so attacks and certificates work in the units of
    the data. The numbers are buffers: they move and save with the model and are not trained.

    Args:
        channels: Number of channels of an image.
        mean: One number, or one per channel; the default is that of the usual data sets.
        std: Likewise, above 0.

    Inputs with two axes, ``(samples, features)``, have no channels: they take ``mean`` and
    ``std`` as one number or one per feature, and pass unchanged by default.

    Example:
        >>> Normalise(1, mean=0.5, std=0.25)(torch.ones(1, 1, 1, 1)).item()
        2.0
    """

    def __init__(
        self,
        channels: int,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
    ):
        super().__init__()
        self.channels = channels
        self.images_only = mean is None and std is None
        usual = _PIXELS.get(channels, ((0.5,), (0.25,)))
        for name, given, default in (("mean", mean, usual[0]), ("std", std, usual[1])):
            try:
                value = torch.as_tensor(default if given is None else given, dtype=torch.float32)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ValueError(
                    f"{name} must be one number, or one per channel; got {given!r}."
                ) from error
            value = checks.tensor(name, value.reshape(-1), ("channels",))
            if name == "std" and not (value > 0).all():
                raise ValueError(f"std must be above 0; got {value.tolist()}.")
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` normalised, in the same shape."""
        if x.ndim == 2 and self.images_only:
            return x
        axes = x.shape[1] if x.ndim == 2 else self.channels
        for name, value in self.named_buffers():
            if len(value) not in (1, axes):
                raise ValueError(f"{name} must hold 1 or {axes} numbers; got {len(value)}.")
        shape = (-1,) if x.ndim == 2 else (-1, 1, 1)
        return (x - self.mean.view(shape)) / self.std.view(shape)


class Classifier(nn.Module):
    r"""A classifier :math:`z = W \phi(x) + b`: a feature map and a linear head.

    Args:
        body: Maps normalised inputs to features ``(samples, width)``.
        width: Number of features.
        num_classes: Number of classes.
        normalise: Applied before ``body``.

    Attributes:
        normalise: The first step of :math:`\phi`.
        body: The rest of :math:`\phi`.
        head: The ``nn.Linear`` that holds W, shape ``(classes, width)``, and b.

    Example:
        >>> model = build("small-cnn", num_classes=10, in_channels=1, width=4, seed=0)
        >>> x = torch.rand(2, 1, 28, 28)
        >>> torch.equal(model(x), model.head(model.features(x)))
        True
    """

    def __init__(self, body: nn.Sequential, width: int, num_classes: int, normalise: Normalise):
        super().__init__()
        self.normalise = normalise
        self.body = body
        self.head = nn.Linear(width, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Return the inputs of the head.

        Args:
            x: Images in [0, 1], shape ``(samples, channels, height, width)``, or for the MLP
                also ``(samples, features)``.

        Returns:
            Shape ``(samples, width)``.

        Raises:
            ValueError: If ``x`` has another shape, no samples, or whole numbers.
        """
        flat = isinstance(self.body[0], nn.Flatten)
        channels = self.normalise.channels
        if not (x.ndim == 4 and x.shape[1] == channels) and not (flat and x.ndim == 2):
            also = " or (samples, features)" if flat else ""
            raise ValueError(
                f"x must have shape (samples, {channels}, height, width){also}; "
                f"got {tuple(x.shape)}."
            )
        if len(x) == 0:
            raise ValueError(f"x must not be empty; got shape {tuple(x.shape)}.")
        if not x.is_floating_point():
            raise ValueError(f"x must hold floating-point numbers in [0, 1]; got {x.dtype}.")
        if flat and self.body[1].in_features not in (0, x[0].numel()):  # 0: no input seen yet
            raise ValueError(
                f"x must hold {self.body[1].in_features} numbers per sample; got {x[0].numel()}."
            )
        return self.body(self.normalise(x))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, shape ``(samples, classes)``."""
        return self.head(self.features(x))


def build(
    name: ModelName,
    *,
    num_classes: int,
    in_channels: int = 3,
    width: int | float | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    input_shape: Sequence[int] | None = None,
    seed: int | None = None,
) -> Classifier:
    r"""Build a classifier for small images, with fresh weights.

    ============== =============================================== ======= ==================
    name           architecture                                    width   features
    ============== =============================================== ======= ==================
    mlp            two hidden ReLU layers                          256     width
    small-cnn      three 3×3 convolutions of stride 2, no norm     32      4 · width
    resnet18       He et al. (2016a), four stages                  64      8 · width
    wrn28-4        Zagoruyko & Komodakis (2016), three stages      64      4 · width
    densenet121    Huang et al. (2017), bottlenecks, halving       32      1024 at 32
    vgg11-bn       Simonyan & Zisserman (2015) with batch norm     64      8 · width
    ============== =============================================== ======= ==================

    The deep ones keep CIFAR's stem, a 3×3 convolution of stride 1 without pooling, and end in
    global average pooling, so 28×28 and 32×32 images both fit.

    Args:
        name: One of the table's names.
        num_classes: At least 2.
        in_channels: 3 for colour, 1 for grey.
        width: A whole number sets the channels of the first stage (DenseNet: the growth rate;
            WRN: 16 times its widening factor; MLP: its hidden units). A float multiplies the
            table's default: 0.25 makes a ResNet-18 of width 16, sixteen times cheaper.
        mean: Subtracted from each channel; see :class:`Normalise`.
        std: Divides each channel.
        input_shape: Shape of one input. Only the MLP needs to know: without it, its first layer
            takes its size from the first input.
        seed: Draws the weights without touching the global generators. Without it they come
            from torch's global generator.

    Returns:
        The model, in training mode, float32 on the CPU.

    Raises:
        ValueError: If the name is unknown or a number makes no sense.

    Example:
        >>> model = build("resnet18", num_classes=10)
        >>> sum(p.numel() for p in model.parameters())
        11173962
        >>> build("resnet18", num_classes=10, width=0.25).head.in_features
        128
    """
    plan = _PLANS[checks.choice("name", name, get_args(ModelName))]
    checks.count("num_classes", num_classes, at_least=2)
    checks.count("in_channels", in_channels)
    width = _resolve_width(width, plan.width)
    if input_shape is not None:
        input_shape = _input_shape(input_shape, name, in_channels)
    normalise = Normalise(in_channels, mean, std)
    if name != "mlp" or input_shape is not None:
        normalise(torch.zeros(1, *(input_shape or (in_channels, 1, 1))))  # do mean and std fit?
    with nullcontext() if seed is None else runtime.forked_seed(seed):
        model = Classifier(*plan.body(in_channels, width), num_classes, normalise)
        _initialise(model.body)
        if name == "mlp" and input_shape is not None:
            model.features(torch.zeros(1, *input_shape))
        return model


def headed(model: nn.Module) -> nn.Module:
    """Return ``model`` if it splits into features and a linear head, as classifiers here do.

    Raises:
        ValueError: If it does not.
    """
    checks.module("model", model)
    splits = callable(getattr(model, "features", None))
    if not splits or not isinstance(getattr(model, "head", None), nn.Linear):
        raise ValueError(
            f"model must have features and a linear head; got {type(model).__name__}. Those of "
            "flatbook.models.build have both."
        )
    return model


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """Put ``model`` in evaluation mode inside the block; after it every layer has its own mode.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm1d(2).eval(), nn.Dropout())
        >>> with evaluating(model):
        ...     model[1].training
        False
        >>> [layer.training for layer in model]
        [False, True]
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield model
    finally:
        for module, mode in modes.items():
            module.training = mode


def _resolve_width(width: int | float | None, default: int) -> int:
    if width is None:
        return default
    if isinstance(width, Real) and not isinstance(width, Integral):
        width = round(default * checks.positive("width", width))
    return checks.count("width", width)


def _input_shape(shape: Sequence[int], name: str, in_channels: int) -> tuple[int, ...]:
    if not isinstance(shape, Sequence):
        raise ValueError(f"input_shape must be a sequence of sizes; got {shape!r}.")
    shape = tuple(checks.count("input_shape", size) for size in shape)
    flat = name == "mlp" and len(shape) == 1
    if not flat and (len(shape) != 3 or shape[0] != in_channels):
        also = " or (features,)" if name == "mlp" else ""
        raise ValueError(
            f"input_shape must be ({in_channels}, height, width){also}; got {tuple(shape)}."
        )
    return shape


class _LazyHeLinear(nn.LazyLinear):
    """A linear layer that learns its input size from the first input.

    The seed of its weights is drawn when it is made, so the model is settled then.
    """

    seed: int | None = None

    def __init__(self, out_features: int):
        super().__init__(out_features)
        self.seed = int(torch.randint(2**62, ()))

    def reset_parameters(self) -> None:
        if self.seed is not None and not self.has_uninitialized_params():
            with runtime.forked_seed(self.seed):
                _he(self)


def _he(layer: nn.Module) -> None:
    # Fan-in keeps the scale of the signal from layer to layer, which is what a network without
    # normalisation needs; batch norm makes the others indifferent to the choice.
    nn.init.kaiming_normal_(layer.weight, mode="fan_in", nonlinearity="relu")
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def _initialise(body: nn.Module) -> None:
    for layer in body.modules():
        if isinstance(layer, nn.Conv2d) or type(layer) is nn.Linear:
            _he(layer)


def _mlp(channels: int, width: int) -> tuple[nn.Sequential, int]:
    layers = (nn.Flatten(), _LazyHeLinear(width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    return nn.Sequential(*layers), width


def _small_cnn(channels: int, width: int) -> tuple[nn.Sequential, int]:
    layers = []
    for before, after in ((channels, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
    return _pooled(*layers), 4 * width


def _resnet18(channels: int, width: int) -> tuple[nn.Sequential, int]:
    stem = (conv3x3(channels, width), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
    stages = _stages(_basic_block, width, [width, 2 * width, 4 * width, 8 * width], blocks=2)
    return _pooled(*stem, *stages), 8 * width


def _wrn28(channels: int, width: int) -> tuple[nn.Sequential, int]:
    stem = 16  # whatever the widening factor
    stages = _stages(_PreActivationBlock, stem, [width, 2 * width, 4 * width], blocks=4)
    last = (nn.BatchNorm2d(4 * width), nn.ReLU(inplace=True))
    return _pooled(conv3x3(channels, stem), *stages, *last), 4 * width


def _densenet121(channels: int, width: int) -> tuple[nn.Sequential, int]:
    net = DenseNet(growth_rate=width, block_config=(6, 12, 24, 16), num_init_features=2 * width)
    stem = conv3x3(channels, 2 * width)
    # Drop the ImageNet stem: a 7x7 convolution of stride 2, batch norm, ReLU and max-pooling.
    return _pooled(stem, *net.features[4:], nn.ReLU()), net.classifier.in_features


def _vgg11_bn(channels: int, width: int) -> tuple[nn.Sequential, int]:
    layout = [size if size == "M" else size * width // 64 for size in vgg_layouts["A"]]
    layers = make_layers(layout, batch_norm=True)
    layers[0] = nn.Conv2d(channels, width, kernel_size=3, padding=1)
    for layer in layers:
        if isinstance(layer, nn.MaxPool2d):
            layer.ceil_mode = True  # 28 pixels halve to 14, 7, 4, 2, 1
    return _pooled(*layers), layout[-2]


def _pooled(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _stages(
    block: Callable[[int, int, int], nn.Module], channels: int, widths: Sequence[int], blocks: int
) -> list[nn.Sequential]:
    """Stack residual stages; each but the first halves the image in its first block."""
    stages = []
    for width in widths:
        first = block(channels, width, 2 if stages else 1)
        stages.append(nn.Sequential(first, *(block(width, width, 1) for _ in range(1, blocks))))
        channels = width
    return stages


def _basic_block(before: int, after: int, stride: int) -> BasicBlock:
    if stride == 1 and before == after:
        return BasicBlock(before, after)
    shortcut = nn.Sequential(conv1x1(before, after, stride), nn.BatchNorm2d(after))
    return BasicBlock(before, after, stride, shortcut)


class _PreActivationBlock(nn.Module):
    """Normalise and activate before each convolution (He et al., 2016b).

    Where the shape changes, the shortcut is a 1×1 convolution of the activated input.
    """

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(before), conv3x3(before, after, stride)
        self.norm2, self.conv2 = nn.BatchNorm2d(after), conv3x3(after, after)
        same = stride == 1 and before == after
        self.shortcut = None if same else conv1x1(before, after, stride)

    def forward(self, x: Tensor) -> Tensor:
        active = self.norm1(x).relu()
        change = self.conv2(self.norm2(self.conv1(active)).relu())
        return change + (x if self.shortcut is None else self.shortcut(active))


class _Plan(NamedTuple):
    body: Callable[[int, int], tuple[nn.Sequential, int]]  # (channels, width) -> body, features
    width: int


_PLANS: dict[str, _Plan] = {
    "mlp": _Plan(_mlp, 256),
    "small-cnn": _Plan(_small_cnn, 32),
    "resnet18": _Plan(_resnet18, 64),
    "wrn28-4": _Plan(_wrn28, 64),
    "densenet121": _Plan(_densenet121, 32),
    "vgg11-bn": _Plan(_vgg11_bn, 64),
}
