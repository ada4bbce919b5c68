r"""Data made of one signal and much noise, a two-layer network, and what it learns of either.

A sample has P patches of d numbers. One patch is :math:`\tilde y \varphi`, the **signal** with the
sign of the true label; the other :math:`P - 1` all hold the same **noise** vector :math:`\xi`,
orthogonal to :math:`\varphi`. Every gradient of the network lies in the span of
:math:`\varphi` and the noise of the training set, and so does the way of each filter from its
start,

.. math::
    w_{j,r} - w_{j,r}^{(0)} = j \, \kappa_{j,r} \frac{\varphi}{\|\varphi\|^2}
    + \frac{1}{P - 1} \sum_{i=1}^{n} \zeta_{j,r,i} \frac{\xi_i}{\|\xi_i\|^2} ,
    \qquad j = \pm 1, \; r = 1, \ldots, m .

Here :math:`\kappa` counts what the filter learned of the signal, and :math:`\zeta_{j,r,i}` what it
memorized of sample i. Whatever follows sums of such gradients keeps this form: gradient descent,
SAM, ascent on a part of the data, momentum. Weight decay does not.

``flatbook.theory.coordinates`` writes the whole problem in these numbers, in which
``flatbook.theory.descent`` trains and ``flatbook.theory.population`` tests, at a cost free of d.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from flatbook import checks
from flatbook.runtime import generator
from flatbook.theory.decomposition import Decomposition, SignalNoiseData, compose, decompose

__all__ = [
    "Decomposition",
    "SignalNoiseData",
    "TwoLayerCNN",
    "compose",
    "decompose",
    "logistic_loss",
    "memorization_ratio",
    "sample",
]

Activation = Literal["relu", "squared_relu", "softplus"]

# Values and derivatives, at 0 as torch has them.
VALUE = {
    "relu": torch.relu,
    "squared_relu": lambda z: torch.relu(z).square(),
    "softplus": softplus,
}
SLOPE = {
    "relu": lambda z: (z > 0).to(z.dtype),
    "squared_relu": lambda z: 2 * torch.relu(z),
    "softplus": torch.sigmoid,
}


def sample(
    n: int,
    *,
    d: int,
    patches: int,
    signal: float | Tensor,
    noise: float,
    flip: float = 0.0,
    seed: int = 0,
) -> SignalNoiseData:
    r"""Draw samples of the signal–noise model.

    The true label is −1 or 1 with equal chance. The patch that holds :math:`\tilde y \varphi` is
    drawn anew for each sample. The others hold

    .. math:: \xi \sim N\Bigl( 0, \sigma_p^2 \bigl( I - \varphi\varphi^\top / \|\varphi\|^2 \bigr)
        \Bigr) .

    The observed label differs from the true one with probability ``flip``.

    Args:
        n: Number of samples.
        d: Length of a patch, from 2.
        patches: P, from 2.
        signal: The norm of :math:`\varphi`, which then lies along the first axis; or
            :math:`\varphi` itself, shape ``(d,)``, so that fresh samples share it.
        noise: :math:`\sigma_p`, above 0.
        flip: Probability of a wrong label, in [0, 1].
        seed: Of labels, noise and positions.

    Returns:
        The data, in float64.

    Raises:
        ValueError: If an argument is none of the above.

    Reference:
        Chen et al. (2023). Why does sharpness-aware minimization generalize better than SGD?
        NeurIPS. Label flips: Kou et al. (2023). Benign overfitting in two-layer ReLU
        convolutional neural networks. ICML.

    Example:
        Against the signal, noise counts nothing, and the signal its norm squared.

        >>> data = sample(5, d=50, patches=3, signal=3.0, noise=1.0)
        >>> data.x.shape
        torch.Size([5, 3, 50])
        >>> ((data.x @ data.signal).sum(dim=1) * data.true_y).tolist()
        [9.0, 9.0, 9.0, 9.0, 9.0]
    """
    n, d = checks.count("n", n), checks.count("d", d, at_least=2)
    patches = checks.count("patches", patches, at_least=2)
    noise, flip = checks.positive("noise", noise), checks.fraction("flip", flip)
    phi = _signal(signal, d)
    random = generator(seed)

    true_y = 2.0 * torch.randint(2, (n,), generator=random).double() - 1
    flipped = torch.rand(n, generator=random, dtype=torch.float64) < flip
    xi = noise * torch.randn(n, d, generator=random, dtype=torch.float64)
    for _ in range(2):  # the second pass removes what rounding left of the first
        xi = xi - torch.outer(xi @ phi, phi) / phi.square().sum()
    where = torch.randint(patches, (n,), generator=random)

    x = xi[:, None].repeat(1, patches, 1)
    x[torch.arange(n), where] = true_y[:, None] * phi
    y = torch.where(flipped, -true_y, true_y)
    return SignalNoiseData(x, y, true_y, flipped, phi, xi, noise)


class TwoLayerCNN(nn.Module):
    r"""The two-layer convolutional network of the signal–noise model.

    .. math::
        f(x) = F_{+}(x) - F_{-}(x), \qquad
        F_j(x) = \frac{1}{m} \sum_{r=1}^{m} \sum_{p=1}^{P}
        \sigma\bigl( \langle w_{j,r}, x^{(p)} \rangle \bigr) .

    Only the filters are trained; they start as :math:`N(0, \sigma_0^2 I)`. The sum over patches
    makes f blind to where the signal is.

    Args:
        d: Length of a patch.
        filters: m, filters of each class.
        init: :math:`\sigma_0`; None takes :math:`0.1 / \sqrt d`.
        activation: :math:`\sigma`: ``"relu"``, ``"squared_relu"`` or ``"softplus"``.
        seed: Of the filters.
        dtype: Of the filters.

    Attributes:
        weight: The filters, those of :math:`F_{+}` first. Shape ``(2, filters, d)``.

    Raises:
        ValueError: If an argument is none of the above.

    Example:
        >>> net = TwoLayerCNN(2, filters=1)
        >>> net.weight.data = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]).double()
        >>> net(torch.tensor([[[3.0, 0.0], [0.0, 1.0]]]).double()).tolist()  # 3 − 1
        [2.0]
    """

    def __init__(
        self,
        d: int,
        *,
        filters: int = 10,
        init: float | None = None,
        activation: Activation = "relu",
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        d, filters = checks.count("d", d, at_least=2), checks.count("filters", filters)
        self.activation = checks.choice("activation", activation, get_args(Activation))
        self.init = 0.1 / math.sqrt(d) if init is None else checks.positive("init", init)
        start = torch.randn(2, filters, d, generator=generator(seed), dtype=torch.float64)
        self.weight = nn.Parameter((self.init * start).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return f, whose sign is the label. Shape ``(samples,)``.

        Args:
            x: The patches. Shape ``(samples, patches, d)``.
        """
        plus, minus = self.scores(x).unbind(dim=1)
        return plus - minus

    def scores(self, x: Tensor) -> Tensor:
        r"""Return :math:`F_{+}` and :math:`F_{-}`. Shape ``(samples, 2)``.

        Args:
            x: The patches. Shape ``(samples, patches, d)``.
        """
        checks.tensor("x", x, ("samples", "patches", self.weight.shape[-1]))
        responses = torch.einsum("npd,jmd->njpm", x, self.weight)
        return VALUE[self.activation](responses).sum(dim=2).mean(dim=2)


def logistic_loss(outputs: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Compute the logistic loss :math:`\sum_i c_i \log(1 + e^{-y_i f_i})`.

    Args:
        outputs: f of each sample. Shape ``(..., samples)``.
        y: Labels, −1 or 1. Shape ``(..., samples)``.
        weights: :math:`c_i`, of either sign; None takes the mean.

    Returns:
        Shape ``(...)``.

    Example:
        Undecided on two samples, one to keep and one to forget: the terms cancel.

        >>> outputs, y = torch.zeros(2), torch.tensor([1.0, -1.0])
        >>> logistic_loss(outputs, y, torch.tensor([0.5, -0.5])).item()
        0.0
        >>> round(logistic_loss(outputs, y).item(), 6)  # ln 2
        0.693147
    """
    losses = softplus(-y * outputs)
    return losses.mean(dim=-1) if weights is None else (weights * losses).sum(dim=-1)


def memorization_ratio(radius, init, filters, batch_size):
    r"""Compute the ratio that decides whether SAM memorizes noise.

    .. math:: u = \frac{\tau}{\sigma_0 \sqrt{m B}} .

    Why: at the start about half of the filters answer to :math:`\xi_i`, and those of a batch of
    size B have gradients of norm :math:`\|g\| \approx (P - 1) \|\xi\| / (2 \sqrt{m B})` if noise
    dominates. The ascent :math:`\tau g / \|g\|` then lowers each active response
    :math:`\langle w_{y_i,r}, \xi_i \rangle` of the own class by :math:`\tau \|\xi\| / \sqrt{m B}`,
    and raises those of the opposite class, while the responses are :math:`N(0, \sigma_0^2
    \|\xi\|^2)`. Once u exceeds the largest of :math:`m n` standard normal numbers, roughly
    :math:`\sqrt{2 \ln (m n)}`, no response of the own class is left for the gradient to
    strengthen, except by inner products of different samples' noise, smaller by
    :math:`\sqrt{n / d}`. The numbers d, P and :math:`\sigma_p` cancel.

    Args:
        radius: :math:`\tau`, SAM's radius. A number or an array, like the rest.
        init: :math:`\sigma_0`.
        filters: m, of each class.
        batch_size: B; the number of samples in full batches.

    Returns:
        u, which has no unit.

    Example:
        >>> memorization_ratio(0.6, 0.01, 10, 40)
        3.0
    """
    return radius / init / (filters * batch_size) ** 0.5


def _signal(signal, d: int) -> Tensor:
    if isinstance(signal, int | float):
        phi = torch.zeros(d, dtype=torch.float64)
        phi[0] = checks.positive("signal", signal)
        return phi
    phi = checks.tensor("signal", signal, (d,)).detach().double()
    if not phi.any():
        raise ValueError("signal must not be the zero vector, which no label can be read from.")
    return phi
