"""Two-layer ReLU networks trained by full-batch gradient descent, fast enough to converge."""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flatbook import checks
from flatbook.progress import bar
from flatbook.reconstruction.objectives import TwoLayer, codes
from flatbook.runtime import generator

Loss = Literal["logistic", "squared"]


class Training(NamedTuple):
    """A trained network and where it came from.

    Attributes:
        network: The weights at the end.
        start: The weights at the beginning.
        losses: The mean loss before each step. Shape ``(steps,)``.
        margins: Of the samples at the end: label times output, or the class's output less the
            largest other. Shape ``(samples,)``.
    """

    network: TwoLayer
    start: TwoLayer
    losses: Tensor
    margins: Tensor


def train_two_layer(
    X: Tensor,
    y: Tensor,
    *,
    width: int = 1000,
    init: float = 1e-4,
    head: float = 1.0,
    lr: float = 0.01,
    steps: int = 10_000,
    boost: float = 1.0,
    weight_decay: float = 0.0,
    loss: Loss = "logistic",
    seed: int = 0,
    progress: bool | None = False,
) -> Training:
    r"""Train :math:`\Phi(x) = V [W x + c]_+` on all samples at each step.

    Every gradient of W lies in the span of the samples, so W is trained in coordinates of that
    span; the rest of its start only decays. That is the same descent, at a cost free of the length
    of a sample.

    Plain descent slows down as the loss falls, for its gradient falls too. With ``boost`` the
    learning rate is divided by the loss, up to that factor: the path is the same up to its speed,
    and reaches a stationary direction in far fewer steps.

    Args:
        X: Samples. Shape ``(samples, inputs)``.
        y: −1 and 1 for one output, or classes. Shape ``(samples,)``.
        width: Number of neurons.
        init: Standard deviation of W and c at the start.
        head: V starts uniform within ``head / sqrt(width)``. What remains of the start is no sum of
            gradients, so a smaller one brings the network nearer to a KKT point.
        lr: Learning rate.
        steps: Number of steps.
        boost: The largest factor on the learning rate, from 1.
        weight_decay: Its strength, in the same units as the mean loss.
        loss: ``"logistic"`` (with classes, cross-entropy) or ``"squared"``, for one output.
        seed: Of the start.
        progress: As `flatbook.progress.bar`.

    Returns:
        The trained network, of the precision of ``X``, its start, losses and margins.

    Raises:
        ValueError: If shapes disagree, a number is not finite or an argument is none of the above;
            or if training diverges.

    Reference:
        Lyu and Li (2020). Gradient descent maximizes the margin of homogeneous neural networks.
        ICLR.

    Example:
        >>> X, y = torch.eye(2).double(), torch.tensor([1, -1])
        >>> run = train_two_layer(X, y, width=20, init=0.1, lr=0.1, steps=500)
        >>> (run.margins > 1).all().item(), run.losses[-1].item() < 0.2
        (True, True)
    """
    X = checks.tensor("X", X, ("samples", "inputs"))
    y = checks.tensor("y", y, (len(X),), floating=False).to(X.device)
    width, steps = checks.count("width", width), checks.count("steps", steps)
    lr, init = checks.positive("lr", lr), checks.positive("init", init)
    if checks.positive("boost", boost) < 1:
        raise ValueError(f"boost must be at least 1; got {boost:g}.")
    weight_decay = checks.non_negative("weight_decay", weight_decay)
    squared = checks.choice("loss", loss, ("logistic", "squared")) == "squared"
    y, outputs = _labels(y, squared)
    start = _start(X, width, outputs, init, checks.positive("head", head), seed)

    frame = torch.linalg.qr(X.T).Q.T  # orthonormal rows that span the samples
    inner = X @ frame.T
    inside = start.W @ frame.T
    outside = start.W - inside @ frame
    bias, V = start.bias.clone(), start.V.clone()
    kept, losses = 1.0, []
    with bar(steps, label="training", unit="step", show=progress) as shown:
        for step in range(steps):
            z = torch.addmm(bias, inner, inside.T)
            h = z.clamp(min=0)
            out = h @ V.T
            value, pull = _loss(out, y, squared)
            if not math.isfinite(value):
                raise ValueError(f"lr must let training converge; {lr:g} diverged at step {step}.")
            losses.append(value)
            rate = lr * min(boost, 1 / max(value, 1e-300)) if boost > 1 else lr
            back = (pull @ V).mul_(z > 0)
            shrink = 1 - rate * weight_decay
            kept *= shrink
            V = shrink * V - rate * (pull.T @ h)
            inside = shrink * inside - rate * (back.T @ inner)
            bias = shrink * bias - rate * back.sum(dim=0)
            shown.update()
    network = TwoLayer(kept * outside + inside @ frame, bias, V)
    out = network(X)
    margins = (codes(out, y) * out).sum(dim=1)
    if not margins.isfinite().all():
        raise ValueError(f"lr must let training converge; {lr:g} diverged at step {steps}.")
    return Training(network, start, torch.tensor(losses, dtype=torch.float64), margins)


def row_space(W: Tensor) -> Tensor:
    r"""Find the directions in which a layer differs from a random start.

    Training moves the first layer within the span of the samples. What it left of an independent
    normal start has singular values below a noise level that the median one tells: those above
    :math:`\omega(\beta)` times the median count, with the ratio β of the sides and
    :math:`\omega(\beta) \approx 0.56 \beta^3 - 0.95 \beta^2 + 1.82 \beta + 1.43`.

    Args:
        W: Shape ``(neurons, inputs)``.

    Returns:
        Orthonormal rows, those of the largest singular values first; at least one. Shape
        ``(dimensions, inputs)``.

    Raises:
        ValueError: If W is not a finite matrix.

    Reference:
        Gavish and Donoho (2014). The optimal hard threshold for singular values is 4/√3. IEEE
        Transactions on Information Theory.

    Example:
        Two directions out of noise.

        >>> W = 1e-3 * torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
        >>> W[:2, :2] += torch.eye(2)
        >>> row_space(W).shape
        torch.Size([2, 30])
    """
    W = checks.tensor("W", W, ("neurons", "inputs")).detach()
    _, values, rows = torch.linalg.svd(W, full_matrices=False)
    beta = min(W.shape) / max(W.shape)
    level = 0.56 * beta**3 - 0.95 * beta**2 + 1.82 * beta + 1.43
    noise = max(level * values.median(), max(W.shape) * torch.finfo(W.dtype).eps * values[0])
    return rows[: max(1, int((values > noise).sum()))]


def _labels(y: Tensor, squared: bool) -> tuple[Tensor, int]:
    """Return labels as they are used, and the number of outputs."""
    if y.is_floating_point() or (y < 0).any():
        if not (y.abs() == 1).all():
            raise ValueError(
                f"y must hold -1 and 1, or classes; got {y[y.abs() != 1][0].item():g}."
            )
        return y.long(), 1
    outputs = int(y.max()) + 1
    if outputs < 2 or squared:
        raise ValueError(
            "y must hold -1 and 1 for one output, or two classes and more for the logistic loss; "
            f"got classes up to {outputs - 1}."
        )
    return y.long(), outputs


def _start(X: Tensor, width: int, outputs: int, init: float, head: float, seed: int) -> TwoLayer:
    random = generator(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(X)

    V = (2 * torch.rand(outputs, width, generator=random, dtype=torch.float64) - 1).to(X)
    V = head / math.sqrt(width) * V
    return TwoLayer(init * normal(width, X.shape[1]), init * normal(width), V)


def _loss(out: Tensor, y: Tensor, squared: bool) -> tuple[float, Tensor]:
    """Return the mean loss and its gradient in the outputs."""
    n = len(out)
    if squared:
        off = out - y[:, None]
        return float(off.square().mean()), 2 * off / n
    if out.shape[1] == 1:
        margin = out * y[:, None]
        value = torch.nn.functional.softplus(-margin).mean()
        return float(value), -y[:, None] * torch.sigmoid(-margin) / n
    log = out.log_softmax(dim=1)
    pull = log.exp()
    rows = torch.arange(n, device=out.device)
    pull[rows, y] -= 1
    return float(-log[rows, y].mean()), pull / n
