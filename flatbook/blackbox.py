"""Attacks that do not rely on the gradient of the loss: random search, and AutoAttack."""

import math

import torch
from torch import Tensor, nn

from flatbook import checks, runtime
from flatbook.attacks import margins
from flatbook.threat import Attack, Norm, ball, checked, frozen


def random_search(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    norm: Norm,
    epsilon: float,
    queries: int = 200,
    seed: int = 0,
    box: tuple[float, float] = (0.0, 1.0),
) -> Attack:
    r"""Attack without gradients: propose random changes and keep those that lower the margin.

    A proposal redraws, in a random patch, the change of every pixel: for ``linf`` to plus or minus
    ``epsilon`` channel by channel, for ``l2`` to noise, and all is scaled back into the ball. The
    patch shrinks from half of the inputs' size to a single pixel. It is a short form of the Square
    attack, and a floor: what it finds is there, what it misses may be there as well.

    Args:
        model: As for :func:`pgd`.
        x: As for :func:`pgd`; images ``(samples, channels, height, width)`` or features
            ``(samples, features)``.
        y: Their labels. Shape ``(samples,)``.
        norm: ``"linf"`` or ``"l2"``.
        epsilon: Radius of the ball.
        queries: Proposals for each input.
        seed: Of the proposals.
        box: The least and greatest value of an input.

    Returns:
        The inputs with the least margin found.

    Raises:
        ValueError: As for :func:`pgd`.

    Reference:
        Andriushchenko et al. (2020). Square Attack. ECCV.

    Example:
        >>> x, y = torch.full((1, 3), 0.5), torch.tensor([0])
        >>> found = random_search(nn.Identity().eval(), x, y, norm="linf", epsilon=0.25)
        >>> found.x_adv[0, 0].item(), found.x_adv[0, 1:].max().item()
        (0.25, 0.75)
    """
    x, y, low, high = checked(model, x, y, norm=norm, epsilon=epsilon, box=box)
    epsilon = float(epsilon)
    checks.count("queries", queries)
    random = runtime.generator(seed)
    if epsilon == 0:
        return Attack(x.clone())
    images = x if x.ndim == 4 else x.flatten(1)[:, None, None, :]
    project = ball(images, norm, epsilon, low, high)
    height, width = images.shape[2:]

    def certainty(candidates: Tensor) -> Tensor:
        parts = candidates.clone().split(512)  # copied, for the model may work in place
        return margins(torch.cat([model(part.reshape(-1, *x.shape[1:])) for part in parts]), y)

    with torch.no_grad():
        best, least = images, certainty(images)
        if least.isnan().any():
            raise ValueError("model must return finite logits; got inf or nan.")
        for query in range(queries):
            share = 0.5 * (1 - query / queries)
            size = [max(1, round(side * math.sqrt(share))) for side in (height, width)]
            patch = _patches(len(images), (height, width), size, random).to(x.device)
            noise = torch.randn(images.shape, generator=random).to(images)
            if norm == "linf":
                signs = noise[..., :1, :1].sign() if x.ndim == 4 else noise.sign()
                change = epsilon * signs.expand_as(images)
            else:
                # Twice the radius, so that the projection lands on the sphere.
                noise = noise * patch
                change = 2 * epsilon * noise / noise.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
            proposal = project(torch.where(patch, images + change, best))
            reached = certainty(proposal)
            better = reached < least
            best = torch.where(better.view(-1, 1, 1, 1), proposal, best)
            least = torch.where(better, reached, least)
    return Attack(best.reshape(x.shape).clone())


def auto_attack(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    norm: Norm,
    epsilon: float,
    seed: int = 0,
    batch_size: int = 250,
    box: tuple[float, float] = (0.0, 1.0),
) -> Attack:
    """Run AutoAttack, the field's referee: APGD-CE, targeted APGD-DLR and FAB, and Square.

    Needs the optional package: ``pip install flatbook[attacks]``.

    Args:
        model: As for :func:`pgd`, with at least 4 classes, in float32.
        x: As for :func:`pgd`; images ``(samples, channels, height, width)``.
        y: Their labels. Shape ``(samples,)``.
        norm: ``"linf"`` or ``"l2"``.
        epsilon: Radius of the ball.
        seed: Of its random parts.
        batch_size: Samples attacked at a time.
        box: Must be 0 to 1, which AutoAttack assumes.

    Returns:
        The attacked inputs, in the ball and in the box.

    Raises:
        ImportError: If ``pyautoattack`` is not installed.
        ValueError: As for :func:`pgd`, or if AutoAttack cannot take the model or the inputs.

    Reference:
        Croce & Hein (2020). Reliable evaluation of adversarial robustness with an ensemble of
        diverse parameter-free attacks. ICML.
    """
    x, y, low, high = checked(model, x, y, norm=norm, epsilon=epsilon, box=box)
    checks.count("batch_size", batch_size)
    if (low, high) != (0.0, 1.0):
        raise ValueError(f"box must be (0.0, 1.0) for AutoAttack; got {box!r}.")
    if x.ndim != 4 or x.dtype != torch.float32:
        raise ValueError(
            "x must be images in float32 for AutoAttack, (samples, channels, height, width); "
            f"got {x.dtype} of shape {tuple(x.shape)}."
        )
    with torch.no_grad():
        classes = model(x[:1]).shape[1]
    if classes < 4:
        raise ValueError(f"model must have at least 4 classes for AutoAttack; got {classes}.")
    try:
        from pyautoattack import AutoAttack
    except ImportError as error:
        raise ImportError(
            "auto_attack needs pyautoattack, which is not installed: pip install flatbook[attacks]"
        ) from error
    if epsilon == 0:
        return Attack(x.clone())
    referee = AutoAttack(
        _PlainLayout(model).eval(),
        norm={"linf": "Linf", "l2": "L2"}[norm],
        eps=float(epsilon),
        seed=checks.count("seed", seed, at_least=0),
        device=x.device,
    )
    for part in (referee.apgd_targeted, referee.fab):  # 9 unless there are fewer other classes
        part.n_target_classes = min(9, classes - 1)
    with frozen(model), runtime.forked_seed(seed):
        found = referee.run_standard_evaluation(x.contiguous(), y, batch_size=batch_size)
    found = found[0] if isinstance(found, tuple) else found
    return Attack(ball(x, norm, epsilon, low, high)(found.to(x)))


class _PlainLayout(nn.Module):
    """The same model, whose input gradient has its channels first in memory, as AutoAttack needs.

    Weights with the channels last would hand it a gradient that it cannot view as rows.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(_ContiguousGradient.apply(x))


class _ContiguousGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()  # not a view, which no model could change in place

    @staticmethod
    def backward(ctx, slope: Tensor) -> Tensor:
        return slope.contiguous()


def _patches(samples: int, sides, size, random: torch.Generator) -> Tensor:
    """Return one rectangle of pixels per sample, True inside. Shape ``(samples, 1, h, w)``."""
    inside = []
    for side, extent in zip(sides, size, strict=True):
        first = torch.randint(side - extent + 1, (samples, 1), generator=random)
        place = torch.arange(side)
        inside.append((place >= first) & (place < first + extent))
    return inside[0][:, None, :, None] & inside[1][:, None, None, :]
