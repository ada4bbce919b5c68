r"""Polynomial two-layer networks trained by gradient descent, and what training leaves of them.

The network is :math:`\Phi(\theta; x) = \sum_j a_j \sigma(w_j^\top x)` with a polynomial σ of
degree α. `flatbook.reconstruction.minima` says why few neurons are left.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatbook import checks
from flatbook.reconstruction.inputs import degree as checked_degree
from flatbook.reconstruction.inputs import network, real, signs, weights_norm
from flatbook.reconstruction.interpolation import monomials

CUBIC = (0.0, 0.0, 0.0, 1.0)
"""The coefficients of t³."""


class Path(NamedTuple):
    """Weights along a training run.

    Attributes:
        steps: After how many steps. Shape ``(records,)``.
        W: First layers. Shape ``(records, …, neurons, inputs)``.
        a: Second layers. Shape ``(records, …, neurons)``.
        margins: The least :math:`y_i \\Phi(x_i)`. Shape ``(records, …)``.
    """

    steps: list[int]
    W: Tensor
    a: Tensor
    margins: Tensor


def train_polynomial(
    W,
    a,
    X,
    y,
    *,
    activation: Sequence[float] = CUBIC,
    steps: int = 10_000,
    rate: float = 0.5,
    scaled: bool = True,
    at: Iterable[int] | None = None,
) -> Path:
    r"""Train a two-layer network with a polynomial activation by full-batch gradient descent.

    The loss is :math:`L = \sum_i e^{-m_i}` of the margins :math:`m_i = y_i \Phi(x_i)`. As it
    falls its gradient vanishes, and plain descent needs exponential time. Divided by L,

    .. math:: \theta \leftarrow \theta + \eta \, g, \qquad
        g = -\nabla \log L = \sum_i p_i y_i \nabla \Phi(x_i), \qquad
        p_i = e^{-m_i} \Big/ \sum_k e^{-m_k},

    each step follows the same flow at another speed. With
    :math:`\eta^{-1} \propto \sum_i p_i \|\nabla\Phi(x_i)\|^2 + \|g\| \max_i \|\nabla\Phi(x_i)\|
    + \alpha \|g\| / \|\theta\|` no step changes a margin or the weights by more than a share
    ``rate``, to first order, and the margins grow in proportion to the steps.

    Full-batch training never leaves the start plus the span of the samples, so coordinates in
    this span will do for W and X if the start lies in it.

    Args:
        W: First layer at the start. Shape ``(neurons, inputs)``, or ``(runs, neurons, inputs)`` to
            train several networks side by side.
        a: Second layer. Shape ``(neurons,)`` or ``(runs, neurons)``.
        X: Samples. Shape ``(samples, inputs)``, or one set for each run.
        y: Labels, −1 and 1. Shape ``(samples,)``, or a row for each run.
        activation: Coefficients of :math:`t^0, t^1, \ldots, t^\alpha`, with α from 2.
        steps: Number of steps.
        rate: The share in the rule above; of plain gradient descent, the constant rate.
        scaled: False makes plain gradient descent on L.
        at: After which steps to keep the weights; the last is always kept. None keeps only this.

    Returns:
        The weights kept, of the kind of ``W``.

    Raises:
        ValueError: If shapes disagree, a number is not finite, all weights of a network are 0, or a
            label is neither −1 nor 1; or if plain descent diverges or outputs overflow.

    Example:
        One neuron and one sample end at :math:`w^2 = 3 a^2`, as KKT asks.

        >>> end = train_polynomial([[0.1]], [0.1], [[1.0]], [1.0], steps=500)
        >>> bool(end.margins[-1] > 50), round(float(end.W[-1, 0, 0] / end.a[-1, 0]), 2)
        (True, 1.73)
    """
    single, shared = _dimensions(W) != 3, _dimensions(X) == 2
    W, kind = real("W", W, ("neurons", "inputs") if single else ("runs", "neurons", "inputs"))
    a, _ = real("a", a, tuple(W.shape[:-1]), like=W)
    runs = () if single else (len(W),)
    X, _ = real("X", X, (*(() if shared else runs), "samples", W.shape[-1]), like=W)
    size = X.shape[-2]
    labels = () if _dimensions(y) == 1 else runs
    flat, _ = real("y", y, (*labels, size), like=W)
    y = signs("y", flat.flatten(), flat.numel(), like=W).reshape(flat.shape)
    coefficients = _activation(activation)
    steps, rate = checks.count("steps", steps), checks.positive("rate", rate)
    checks.flag("scaled", scaled)
    keep = {steps} | _kept(at, steps)
    if single:
        W, a = W[None], a[None]
    for first, second in zip(W, a, strict=True):
        weights_norm(first, second)
    found = _descend(W, a, X, y, coefficients, steps, rate, scaled, keep)
    parts = [torch.stack(part) for part in zip(*found, strict=True)]
    if not all(part.isfinite().all() for part in parts):
        if scaled:
            raise ValueError("W, a and X must give outputs that are finite; got inf or nan.")
        raise ValueError(f"rate must be small enough for plain descent to stay finite; got {rate}.")
    parts = [part[:, 0] if single else part for part in parts]
    return Path(sorted(keep), *(kind.back(part) for part in parts))


def _dimensions(value) -> int:
    try:
        return np.ndim(value)
    except ValueError:  # rows of different lengths, which are refused in due course
        return 0


def _kept(at, steps: int) -> set[int]:
    if at is None:
        return set()
    numbers = at.tolist() if hasattr(at, "tolist") else at
    if not isinstance(numbers, Iterable):
        raise ValueError(f"at must list numbers of steps or be None; got {checks.shown(at)}.")
    return {checks.count("each number in at", step, at_least=0, at_most=steps) for step in numbers}


def _activation(activation) -> list[float]:
    if hasattr(activation, "tolist"):
        activation = activation.tolist()
    if not isinstance(activation, Sequence) or len(activation) < 3:
        raise ValueError(
            "activation must list the coefficients of t^0, t^1 and so on, three at least; got "
            f"{checks.shown(activation)}."
        )
    found = [checks.finite("each number in activation", value) for value in activation]
    if found[-1] == 0:
        raise ValueError("activation must end with a coefficient other than 0; got 0.")
    return found


def _descend(W, a, X, y, coefficients, steps, rate, scaled, keep):
    """Yield the weights and the least margin after the steps to keep."""
    lengths, alpha = X.square().sum(dim=-1), len(coefficients) - 1
    for step in range(steps + 1):
        z = X @ W.mT
        values, slopes = torch.full_like(z, coefficients[-1]), torch.zeros_like(z)
        for c in reversed(coefficients[:-1]):  # Horner's rule, for σ and σ' together
            slopes = slopes * z + values
            values = values * z + c
        margins = y * (values @ a[..., None])[..., 0]
        if step in keep:
            yield W, a, margins.amin(dim=-1)
        if step == steps:
            return
        p = torch.softmax(-margins, dim=-1) if scaled else torch.exp(-margins)
        q = y * p
        first = a[..., None] * ((q[..., None] * slopes).mT @ X)
        second = (values.mT @ q[..., None])[..., 0]
        eta = torch.full_like(q[..., 0], rate)
        if scaled:
            squares = (a[:, None] * slopes).square().sum(dim=-1) * lengths
            squares = squares + values.square().sum(dim=-1)  # ‖∇Φ(x_i)‖²
            pull, norm = (
                (w.square().sum((-1, -2)) + v.square().sum(-1)).sqrt()
                for w, v in ((first, second), (W, a))
            )
            most = squares.amax(dim=-1).sqrt()
            curve = (p * squares).sum(-1) + pull * most + alpha * pull / norm
            eta = rate / curve.clamp(min=torch.finfo(curve.dtype).tiny)  # 0 at samples of 0
        W, a = W + eta[..., None, None] * first, a + eta[..., None] * second


class ActiveNeurons(NamedTuple):
    """The neurons that count, merged by direction, the strongest first.

    Attributes:
        directions: Unit vectors. Shape ``(directions, inputs)``.
        strengths: The sum of :math:`a_j \\|w_j\\|^\\alpha` along each. Shape ``(directions,)``.
        neurons: Which neurons are active. Shape ``(active,)``.
    """

    directions: Tensor
    strengths: Tensor
    neurons: Tensor


def active_neurons(
    W, a, *, degree: int = 3, share: float = 0.01, cosine: float = 0.99
) -> ActiveNeurons:
    r"""Find the neurons that count, and in how many directions they point.

    Args:
        W: First layer, a row for each neuron. Shape ``(neurons, inputs)``.
        a: Second layer. Shape ``(neurons,)``.
        degree: α, from 2.
        share: A neuron is active if its strength :math:`|a_j| \|w_j\|^\alpha` exceeds this share of
            the largest; from 0 to below 1.
        cosine: Neurons with a larger cosine, up to sign, share a direction, that of the strongest;
            from 0 to 1.

    Returns:
        Directions and strengths, of the kind of ``W``.

    Raises:
        ValueError: If shapes disagree, a number is not finite, all neurons are 0, or an argument is
            none of the above.

    Example:
        Two neurons share a direction; the third is too weak.

        >>> found = active_neurons([[2.0, 0.0], [-1.0, 0.0], [0.0, 0.1]], [1.0, -1.0, 1.0])
        >>> found.directions, found.strengths
        (array([[1., 0.]]), array([9.]))
    """
    W, a, kind = network(W, a)
    alpha = checked_degree(degree)
    share, cosine = checks.fraction("share", share), checks.fraction("cosine", cosine)
    if share == 1:
        raise ValueError("share must be below 1, or no neuron is active; got 1.")
    norms = W.norm(dim=1)
    sizes = a.abs() * norms.pow(alpha)
    if not sizes.max() > 0:
        raise ValueError("W and a must hold a neuron with weights in both layers; got none.")
    order = sizes.argsort(descending=True, stable=True)
    order = order[sizes[order] > share * sizes.max()]
    directions, strengths = [], []
    for j in order.tolist():
        u = W[j] / norms[j]
        for k, v in enumerate(directions):
            inner = float(u @ v)
            if abs(inner) > cosine:
                strengths[k] += float(a[j] * norms[j] ** alpha) * math.copysign(1, inner) ** alpha
                break
        else:
            directions.append(u)
            strengths.append(float(a[j] * norms[j] ** alpha))
    strengths = torch.tensor(strengths, dtype=torch.float64).to(W)
    found = order.cpu().numpy() if kind.array else order
    return ActiveNeurons(kind.back(torch.stack(directions)), kind.back(strengths), found)


def gram_spectrum(W, *, degree: int = 3, rank: int | None = None):
    r"""Compute the eigenvalues of the Gram matrix :math:`K_{jk} = (w_j^\top w_k)^{\alpha-1}`.

    They are the squared singular values of the matrix of weighted monomials, which is how they
    are computed: small ones are right to the unit roundoff of their *roots*.

    Args:
        W: First layer. Shape ``(neurons, inputs)``.
        degree: α, from 2.
        rank: s, the number of samples: W is taken in the span of its s leading directions. None
            takes the number of inputs.

    Returns:
        The :math:`N = \binom{s+\alpha-2}{\alpha-1}` largest, the largest first and 0 where there
        are fewer, of the kind of ``W``. Shape ``(N,)``.

    Raises:
        ValueError: If a number is not finite, or an argument is none of the above.

    Example:
        Two orthogonal neurons span two of the three monomials.

        >>> gram_spectrum([[2.0, 0.0], [0.0, 1.0]])
        array([16.,  1.,  0.])
    """
    W, kind = real("W", W, ("neurons", "inputs"))
    alpha = checked_degree(degree)
    s = W.shape[1] if rank is None else checks.count("rank", rank, at_most=W.shape[1])
    if s < W.shape[1]:
        W = W @ torch.linalg.svd(W, full_matrices=False).Vh[:s].T
    values = torch.linalg.svdvals(monomials(W, alpha - 1)).square()
    N = math.comb(s + alpha - 2, alpha - 1)
    return kind.back(torch.cat([values, values.new_zeros(N)])[:N])
