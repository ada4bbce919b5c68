"""Random changes to images that leave their class alone."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from flatbook import checks


def crop_flip(x: Tensor, generator: torch.Generator, *, padding: int = 4) -> Tensor:
    """Shift each image by up to ``padding`` pixels either way and mirror every other one.

    The usual augmentation of CIFAR: pad with zeros, cut out at a random place, flip with
    probability 1/2. Each image has its own draw, all in one indexing operation.

    Args:
        x: Images. Shape ``(samples, channels, height, width)``.
        generator: Source of randomness, on the device of ``x``.
        padding: Largest shift, in pixels.

    Returns:
        Images of the same shape.

    Raises:
        ValueError: If ``x`` has not four axes or ``padding`` is negative.

    Example:
        >>> x = torch.ones(100, 1, 6, 6)
        >>> kept = crop_flip(x, torch.Generator().manual_seed(0), padding=1).mean((1, 2, 3))
        >>> sorted({round(share.item(), 4) for share in kept})  # 36, 30 or 25 pixels of 36
        [0.6944, 0.8333, 1.0]
    """
    if x.ndim != 4:
        raise ValueError(f"x must have shape (samples, channels, height, width); got {x.shape}.")
    checks.count("padding", padding, at_least=0)
    n, channels, height, width = x.shape

    def draw(below: int) -> Tensor:
        return torch.randint(below, (n, 1), generator=generator, device=x.device)

    rows = draw(2 * padding + 1) + torch.arange(height, device=x.device)
    columns = torch.arange(width, device=x.device)
    mirrored = torch.where(draw(2).bool(), columns.flip(0), columns)
    columns = draw(2 * padding + 1) + mirrored
    image = torch.arange(n, device=x.device)[:, None, None, None]
    channel = torch.arange(channels, device=x.device)[:, None, None]
    padded = pad(x, (padding,) * 4)
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]
