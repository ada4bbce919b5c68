"""A proven Lipschitz bound of a feature map: layer by layer, in the Euclidean norm."""

import math
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.utils import _pair
from torch.nn.utils.parametrize import type_before_parametrizations
from torchvision.models.densenet import _DenseBlock
from torchvision.models.resnet import BasicBlock

from flatbook import checks
from flatbook.convolution import Axis, convolution_norm, largest_singular_value
from flatbook.models import Classifier, Normalise, _PreActivationBlock, evaluating

__all__ = ["lipschitz_bound"]

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
_ELEMENTWISE: dict[type, Callable[[nn.Module], float]] = {
    **dict.fromkeys(
        (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout), lambda layer: 1.0
    ),
    **dict.fromkeys((nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.Tanh), lambda layer: 1.0),
    nn.LeakyReLU: lambda layer: max(1.0, abs(layer.negative_slope)),
    nn.ELU: lambda layer: max(1.0, abs(layer.alpha)),
    nn.Sigmoid: lambda layer: 0.25,
}


def lipschitz_bound(model: nn.Module, input_shape: Sequence[int]) -> float:
    r"""Bound from above how much faster than its input a feature map can move.

    Returns L with

    .. math:: \|\phi(x) - \phi(x')\|_2 \le L \, \|x - x'\|_2 \quad \text{for all } x, x',

    for the features of a classifier in evaluation mode, normalisation of the pixels included.
    It is proven, not estimated: the product of the layers' constants, sums where a block adds
    its shortcut, :math:`\sqrt{1 + L^2}` where it appends its output to its input. A batch norm is
    a diagonal matrix and is multiplied into the linear layer before it, or into the one after
    the activation.

    A linear layer's constant is its largest singular value. So is a convolution's while it is
    small. Else, note that no output of a zero-padded convolution mixes two ends of the image
    once this lies on a larger grid; there the convolution is a part of a circular one, which
    the Fourier transform takes to one small matrix a frequency:

    .. math::
        \|\text{conv}\| \le \max_\omega \, \sigma_1\Bigl(\sum_a w_a e^{i \omega \cdot a}\Bigr),
        \qquad w_a \in \mathbb R^{\text{out} \times \text{in}},

    and with stride s the frequencies that coincide on the coarse grid stand side by side in one
    matrix, divided by s.

    The product over a deep network is far above the true constant. It holds for exact
    arithmetic; each factor is rounded up by more than the float64 error of computing it.

    Args:
        model: A classifier of :mod:`flatbook.models`, or a feature map made of the layers above,
            pooling and activations, such as an ``nn.Sequential``. Left as it is.
        input_shape: Shape of one input, such as ``(channels, height, width)``.

    Returns:
        Units of the features per unit of the input; infinite if that is too large a number.

    Raises:
        ValueError: If a layer is unknown, has a forward function of its own or a hook, has no
            weights yet or holds inf or nan, or the shape does not fit.

    Reference:
        Sedghi, Gupta & Long (2019). The singular values of convolutional layers. ICLR.

    Example:
        Each pixel is divided by 1/4, then the rotation by 90° is stretched threefold.

        >>> turn = nn.Linear(2, 2, bias=False)
        >>> _ = turn.weight.data.copy_(torch.tensor([[0.0, -3.0], [3.0, 0.0]]))
        >>> model = nn.Sequential(Normalise(1, 0.5, 0.25), nn.Flatten(), turn, nn.ReLU())
        >>> round(lipschitz_bound(model, (1, 1, 2)), 9)
        12.0
    """
    checks.module("model", model)
    if not isinstance(input_shape, Sequence) or isinstance(input_shape, str):
        raise ValueError(f"input_shape must be a sequence of sizes; got {input_shape!r}.")
    shape = tuple(checks.count("input_shape", size) for size in input_shape)
    if not shape:
        raise ValueError("input_shape must hold at least one size; got none.")
    names = {layer: name for name, layer in model.named_modules()}
    for layer in names:
        if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
            raise ValueError(
                f"model must have seen an input; {_name(layer, names)} has no weights."
            )
        for method in ("forward", "features"):
            if method in vars(layer) and callable(vars(layer)[method]):
                raise _unknown(layer, names, f"has a {method} of its own")
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in state.items():
        if value.is_meta:
            raise ValueError(f"model must hold numbers; {name} is on the meta device.")
        if not value.isfinite().all():
            raise ValueError(f"model must hold finite numbers; {name} has inf or nan.")
    split = isinstance(model, Classifier) and type(model).features is Classifier.features
    layers = [model.normalise, model.body] if split else [model]
    like = next((value for value in state.values() if value.is_floating_point()), torch.zeros(()))
    with torch.inference_mode(False), evaluating(model), torch.no_grad():
        x = like.new_zeros(2, *shape)
        try:
            (model.features if split else model)(x.clone())
        except Exception as error:
            raise ValueError(
                f"input_shape must fit the model, which refuses {shape}: {error}"
            ) from error
        return _chain(layers, x, names)[0]


# Every function below returns a bound and the layer's output for x, of which only the shape counts.


def _chain(layers: list[nn.Module], x: Tensor, names: dict) -> tuple[float, Tensor]:
    layers = _flat(layers, names)
    bound, pending = 1.0, None  # factors of a diagonal layer, one a channel, not yet counted
    while layers:
        layer = layers.pop(0)
        kind = type_before_parametrizations(layer)
        if kind is Normalise or kind in _NORMS:
            factors = _diagonal(layer, x, names)
            pending = factors if pending is None else pending * factors
            x = layer(x)
        elif kind in _ELEMENTWISE:
            # It multiplies each difference by a number in [-c, c]; such diagonal matrices
            # commute with the pending one, which may therefore wait for the next linear layer.
            bound = _times(bound, _ELEMENTWISE[kind](layer))
            x = layer(x)
        elif kind in _IMAGES and x.ndim != 4:
            raise ValueError(
                "input_shape must lead to (channels, height, width) at "
                f"{_name(layer, names)}; got {tuple(x.shape[1:])} there."
            )
        elif kind in _LINEAR:
            axes, norm = _LINEAR[kind]
            before = after = None
            if pending is not None and x.ndim == axes:
                before, pending = pending, None
            y = layer(x)
            if layers and type(layers[0]) in _NORMS and y.ndim == axes:
                after = _diagonal(layers[0], y, names)
            factor = norm(layer, x.shape, y.shape, before, after, names)
            bound = _times(bound, _largest(pending), factor)
            pending, x = None, y if after is None else layers.pop(0)(y)
        elif kind in _OTHERS:
            factor, x = _OTHERS[kind](layer, x, names)
            bound, pending = _times(bound, _largest(pending), factor), None
        else:
            raise _unknown(layer, names)
    return _times(bound, _largest(pending)), x


def _times(*factors: float) -> float:
    """Return the product; above 0 if they are, for a bound must not round to nothing."""
    if 0.0 in factors:  # though another may be infinite
        return 0.0
    product = 1.0
    for factor in factors:
        product = max(product * factor, sys.float_info.min)
    return product


def _largest(pending: Tensor | None) -> float:
    return 1.0 if pending is None else pending.max().item()


def _flat(layers: list[nn.Module], names: dict) -> list[nn.Module]:
    flat = []
    for layer in layers:
        _refuse_hooks(layer, names)
        nested = type(layer).forward is nn.Sequential.forward
        flat += _flat(list(layer), names) if nested else [layer]
    return flat


def _refuse_hooks(layer: nn.Module, names: dict) -> None:
    hooks = [*layer._forward_pre_hooks.values(), *layer._forward_hooks.values()]
    # Those of torch compute the weight, before a pass as during it.
    if not all(type(hook).__module__.startswith("torch.nn.utils") for hook in hooks):
        raise ValueError(
            "model must have no hooks, which may change its outputs; "
            f"{_name(layer, names)} has one."
        )


def _name(layer: nn.Module, names: dict) -> str:
    kind = type_before_parametrizations(layer).__name__
    return f"{names.get(layer) or 'the model itself'} ({kind})"


def _unknown(layer: nn.Module, names: dict, why: str = "is not one") -> ValueError:
    return ValueError(
        f"model must be made of layers with a known bound; {_name(layer, names)} {why}."
    )


def _diagonal(layer: nn.Module, x: Tensor, names: dict) -> Tensor:
    """Return the factor by which the layer stretches each channel."""
    if isinstance(layer, Normalise):
        unchanged = x.ndim == 2 and layer.images_only
        factors = torch.ones(1) if unchanged else 1 / layer.std.cpu().double()
        values = max(len(layer.mean), len(factors))
        if not unchanged and values > 1 and (x.ndim not in (2, 4) or values != x.shape[1]):
            raise _unknown(layer, names, f"has {values} channels, but gets {tuple(x.shape[1:])}")
    else:
        if layer.running_var is None:
            raise _unknown(layer, names, "normalises by the batch, so it has none")
        gain = 1.0 if layer.weight is None else layer.weight.cpu().double().abs()
        variance = layer.running_var.cpu().double() + layer.eps
        if not (variance > 0).all():
            raise _unknown(layer, names, "divides by a variance that is not above 0")
        factors = gain / variance.sqrt()
    return factors.double().expand(x.shape[1]) * (1 + 4 * torch.finfo(torch.float64).eps)


def _linear(layer, x_shape, y_shape, before, after, names) -> float:
    weight = layer.weight.cpu().double()
    weight = weight if before is None else weight * before
    return largest_singular_value(weight if after is None else weight * after[:, None])


def _convolution(layer, x_shape, y_shape, before, after, names) -> float:
    if layer.padding_mode != "zeros":
        raise _unknown(layer, names, f"pads with {layer.padding_mode}, not zeros")
    weight = layer.weight.cpu().double()
    weight = weight.view(layer.groups, -1, *weight.shape[1:])  # groups, out, in, height, width
    if before is not None:
        weight = weight * before.view(layer.groups, 1, -1, 1, 1)
    if after is not None:
        weight = weight * after.view(layer.groups, -1, 1, 1, 1)
    return convolution_norm(weight, [Axis.of(layer, i, x_shape, y_shape) for i in (0, 1)])


def _flatten(layer, x, names):
    if layer.start_dim in (0, -x.ndim):
        raise _unknown(layer, names, "mixes the samples of a batch")
    return 1.0, layer(x)


def _max_pool(layer, x, names):
    # A maximum moves no more than one of its pixels, and a pixel lies in so many windows.
    y, windows = layer(x), 1
    if not isinstance(y, Tensor):
        raise _unknown(layer, names, "also returns indices")
    for axis in (0, 1):
        kernel, stride, padding, step = (
            _pair(option)[axis]
            for option in (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        )
        start = torch.arange(y.shape[axis + 2]) * stride - padding
        place = (start[:, None] + torch.arange(kernel) * step).flatten()
        seen = place[(place >= 0) & (place < x.shape[axis + 2])]  # none, if all lie in the padding
        windows *= seen.bincount(minlength=1).max().item()
    return math.sqrt(windows), y


def _averages(layer, x, names):
    # No entry of its matrix A is negative, so the largest eigenvalue of AᵀA is at most the largest
    # ratio of AᵀAv to v, for any positive v (Collatz and Wielandt); products improve v.
    v, square = torch.ones_like(x[:1, :1], dtype=torch.float64), math.inf
    for _ in range(30):
        with torch.enable_grad():
            mean = layer(v.requires_grad_())
            (product,) = torch.autograd.grad(mean, v, mean.detach())
        square = min(square, (product / v.detach()).max().item())
        v = (product / product.max()).clamp(min=1e-30)  # above 0 for pixels in no window
    return math.sqrt(square) * (1 + v.numel() * torch.finfo(torch.float64).eps), layer(x)


def _basic_block(block, x, names):
    main = [block.conv1, block.bn1, block.relu, block.conv2, block.bn2]
    change, y = _chain(main, x, names)
    shortcut = 1.0 if block.downsample is None else _chain([block.downsample], x, names)[0]
    last, y = _chain([block.relu], y, names)
    return (change + shortcut) * last, y


def _pre_activation_block(block, x, names):
    relu = nn.ReLU()
    main = [block.norm1, relu, block.conv1, block.norm2, relu, block.conv2]
    change, y = _chain(main, x, names)
    if block.shortcut is None:
        return change + 1.0, y
    return change + _chain([block.norm1, relu, block.shortcut], x, names)[0], y


def _dense_block(block, x, names):
    bound = 1.0
    for layer in block.values():
        _refuse_hooks(layer, names)
        parts = [layer.norm1, layer.relu1, layer.conv1, layer.norm2, layer.relu2, layer.conv2]
        new, y = _chain(parts, x, names)
        bound = _times(bound, math.hypot(1.0, new))
        x = torch.cat([x, y], dim=1)
    return bound, x


# The number of axes, the batch's included, for which channels are the second, and the norm.
_LINEAR = {nn.Linear: (2, _linear), nn.Conv2d: (4, _convolution)}
# With three axes these would take the samples for channels.
_IMAGES = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
_OTHERS = {
    nn.Flatten: _flatten,
    nn.MaxPool2d: _max_pool,
    nn.AvgPool2d: _averages,
    nn.AdaptiveAvgPool2d: _averages,
    BasicBlock: _basic_block,
    _PreActivationBlock: _pre_activation_block,
    _DenseBlock: _dense_block,
}
