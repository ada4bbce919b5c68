r"""Which samples survive where the neurons are too few to determine the tensor.

Take an exact cubic network of orthonormal samples and remove neurons. The map of least norm that
fits the rest is known: with the projection P onto the span of the kept :math:`u_j u_j^\top`,

.. math:: \hat f(w) = \sum_i b_i x_i \, \langle P(x_i x_i^\top), w w^\top \rangle ,

since each coordinate of f is fitted by itself. So :math:`\hat f` misses the share
:math:`1 - c_i` of the square of sample i's part, with the **coverage** :math:`c_i =
\|P(x_i x_i^\top)\|^2 / \|x_i x_i^\top\|^2` (`coverage`). The spectrum of the tensor enters only
through the directions of the neurons. Against it stands the conjecture that samples with
spectrally isolated modes survive, for which `isolation` is one precise meaning, and `weighted_kkt`
makes networks of any spectrum.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from flatbook import checks
from flatbook.reconstruction.fixture import KKTNetwork
from flatbook.reconstruction.inputs import degree as checked_degree
from flatbook.reconstruction.inputs import network, real, signs
from flatbook.reconstruction.interpolation import fit_map, monomials
from flatbook.reconstruction.symmetric import fit_symmetric
from flatbook.runtime import generator


def weighted_kkt(strengths, *, neurons=None, labels=None, seed: int = 0) -> KKTNetwork:
    r"""Make an exact cubic KKT network whose tensor has the singular values wanted.

    As `flatbook.reconstruction.exact_kkt`, a neuron for each of n orthogonal samples and each pair,
    but the strengths :math:`\beta_i = \lambda_i \|x_i\|^3` are given, and the lengths of the
    samples are those that make all margins 1.

    Args:
        strengths: β, above 0: the singular values of the tensor, flattened to a matrix. Shape
            ``(samples,)``.
        neurons: Numbers of those to keep of the :math:`n(n+1)/2`, in the order of `exact_kkt`:
            samples first, then pairs; each sample in one at least. None keeps all. All margins are
            1 in any case.
        labels: −1 and 1; None draws them. Shape ``(samples,)``.
        seed: Of labels and directions.

    Returns:
        The network and its data, of the kind of ``strengths``.

    Raises:
        ValueError: If a strength is not above 0, a label is neither −1 nor 1, or a sample has no
            neuron.

    Example:
        >>> from flatbook.reconstruction import kkt_conditions
        >>> net = weighted_kkt([1.0, 2.0, 4.0], neurons=[0, 1, 5])
        >>> net.W.shape, max(kkt_conditions(*net)) < 1e-12
        ((3, 3), True)
    """
    beta, kind = real("strengths", strengths, ("samples",))
    if not (beta > 0).all():
        raise ValueError(f"strengths must be above 0; got {float(beta.min()):g}.")
    n, random = len(beta), generator(checks.count("seed", seed, at_least=0))
    frame = torch.linalg.qr(torch.randn(n, n, generator=random, dtype=torch.float64)).Q.to(beta)
    drawn = torch.randint(0, 2, (n,), generator=random).to(beta) * 2 - 1
    y = drawn if labels is None else signs("labels", labels, n, like=beta)
    pairs = torch.combinations(torch.arange(n))
    members = torch.eye(n).to(beta)
    if n > 1:
        members = torch.cat([members, members[pairs[:, 0]] + members[pairs[:, 1]]])
    if neurons is not None:
        members = members[_kept(neurons, len(members))]
        if not members.any(dim=0).all():
            lonely = int((~members.any(dim=0)).int().argmax())
            raise ValueError(f"neurons must hold each sample once at least; {lonely} is in none.")
    inverse = members / beta
    mu = inverse.norm(dim=1).reciprocal()
    rho = (3**0.5 * mu).rsqrt()
    W = (rho * mu)[:, None] * inverse * y  # in coordinates of the samples' directions
    a = rho / 3**0.5
    lengths = (y * (W.pow(3).T @ a)).pow(-1 / 3)  # a margin goes with the cube of the length
    X = lengths[:, None] * frame
    parts = (W @ frame, a, X, y, beta / lengths.pow(3))
    return KKTNetwork(*(kind.back(part) for part in parts))


def _kept(neurons, total: int) -> list[int]:
    numbers = neurons.tolist() if hasattr(neurons, "tolist") else neurons
    if not isinstance(numbers, Iterable):
        raise ValueError(
            f"neurons must list numbers of neurons or be None; got {checks.shown(neurons)}."
        )
    return [
        checks.count("each number in neurons", j, at_least=0, at_most=total - 1) for j in numbers
    ]


def coverage(W, X, *, degree: int = 3):
    r"""Measure how much of each sample's monomials the neurons span.

    .. math:: c_i = \frac{\|P\, x_i^{\otimes(\alpha-1)}\|^2}{\|x_i^{\otimes(\alpha-1)}\|^2}

    with the projection P onto the span of the :math:`w_j^{\otimes(\alpha-1)}`. It is 1 for all
    samples in the span of W if the Gram matrix has full rank.

    Args:
        W: First layer, neurons that count alone. Shape ``(neurons, inputs)``.
        X: Samples. Shape ``(samples, inputs)``.
        degree: α, from 2.

    Returns:
        From 0 to 1, of the kind of ``W``. Shape ``(samples,)``.

    Raises:
        ValueError: If shapes disagree, a number is not finite, or a row is 0.

    Example:
        The first sample has its own neuron, and the diagonal holds a quarter of the second.

        >>> coverage([[1.0, 0.0], [1.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]]).round(4)
        array([1.    , 0.3333])
    """
    W, kind = real("W", W, ("neurons", "inputs"))
    X, _ = real("X", X, ("samples", W.shape[1]), like=W)
    power = checked_degree(degree) - 1
    units = []
    for name, rows in (("W", W), ("X", X)):
        norms = rows.norm(dim=1, keepdim=True)
        if not norms.all():
            lonely = int((norms[:, 0] == 0).int().argmax())
            raise ValueError(f"{name} must have no row of zeros; row {lonely} is one.")
        units.append(monomials(rows / norms, power))
    _, values, basis = torch.linalg.svd(units[0], full_matrices=False)
    basis = basis[values > 1e-10 * values[0]]
    return kind.back((units[1] @ basis.T).square().sum(dim=1).clamp(max=1.0))


def isolation(strengths):
    r"""Measure how far each singular value lies from the nearest other, relative to the largest.

    .. math:: \min_{k \ne i} \frac{|\beta_i - \beta_k|}{\max_k \beta_k}

    Perturbation theory bounds the error of a singular vector by the noise over this gap.

    Args:
        strengths: Singular values, of at least 0; two or more. Shape ``(samples,)``.

    Returns:
        From 0 to 1, of the kind of ``strengths``. Shape ``(samples,)``.

    Raises:
        ValueError: If a number is below 0 or not finite, or there are fewer than two.

    Reference:
        Wedin (1972). Perturbation bounds in connection with singular value decomposition. BIT.

    Example:
        >>> isolation([1.0, 2.0, 4.0])
        array([0.25, 0.25, 0.5 ])
    """
    beta, kind = real("strengths", strengths, ("samples",))
    if len(beta) < 2:
        raise ValueError("strengths must hold two numbers or more; got 1.")
    if not (beta >= 0).all():
        raise ValueError(f"strengths must be at least 0; got {float(beta.min()):g}.")
    if not beta.max() > 0:
        raise ValueError("strengths must not all be 0; got zeros only.")
    gaps = (beta[:, None] - beta[None, :]).abs()
    gaps.fill_diagonal_(torch.inf)
    return kind.back(gaps.amin(dim=1) / beta.max())


class Modes(NamedTuple):
    """Modes of the map that was fitted to the weights, in the order in which they were found.

    Attributes:
        directions: Unit vectors. Shape ``(modes, inputs)``.
        values: :math:`\\langle u, f(u) \\rangle`, without the modes before. Shape ``(modes,)``.
    """

    directions: Tensor
    values: Tensor


def power_modes(
    W,
    a,
    modes: int,
    *,
    symmetric: bool = False,
    starts: int = 50,
    steps: int = 50,
    seed: int = 0,
) -> Modes:
    r"""Find the modes of a cubic network's tensor by the tensor power method with deflation.

    With orthogonal samples :math:`u \leftarrow f(u) / \|f(u)\|` converges to a sample from almost
    every start, and nearly does so if the map is fitted to too few neurons and its error is small
    against the mode's value. The strongest end is kept, :math:`\langle u, f(u) \rangle (u^\top w)^2
    u` is taken off, and so on. It is what the conjecture on isolated modes suggests.

    Args:
        W: First layer, neurons that count alone. Shape ``(neurons, inputs)``.
        a: Second layer. Shape ``(neurons,)``.
        modes: How many to look for, at most as many as inputs.
        symmetric: Fit the symmetric tensor of least norm instead of the map.
        starts: Random points to start from, for each mode.
        steps: Iterations.
        seed: Of the starts.

    Returns:
        The modes, of the kind of ``W``.

    Raises:
        ValueError: If shapes disagree, a number is not finite, a neuron is 0, or an argument is
            none of the above.

    Reference:
        Anandkumar et al. (2014). Tensor decompositions for learning latent variable models. Journal
        of Machine Learning Research.

    Example:
        >>> import numpy as np
        >>> from flatbook.reconstruction import exact_kkt
        >>> net = exact_kkt(3, X=np.eye(3), labels=[1, 1, 1])
        >>> power_modes(net.W, net.a, 3).directions.max(axis=1).round(6)
        array([1., 1., 1.])
    """
    W, a, kind = network(W, a)
    norms = W.norm(dim=1)
    if not (norms > 0).all() or not (a != 0).all():
        raise ValueError("W and a must hold no neuron of zeros; got one.")
    points, mu = W / norms[:, None], 1 / (3 * norms * a)
    fit = fit_symmetric if checks.flag("symmetric", symmetric) else fit_map
    fitted = fit(points, mu[:, None] * points, 2, kind.eps)
    random = generator(checks.count("seed", seed, at_least=0))
    shape = (checks.count("starts", starts), W.shape[1])
    found, values = W[:0], a[:0]
    for _ in range(checks.count("modes", modes, at_most=W.shape[1])):
        u = torch.randn(*shape, generator=random, dtype=torch.float64).to(W)
        u = u / u.norm(dim=1, keepdim=True)
        for _ in range(checks.count("steps", steps)):
            u = _deflated(fitted, found, values, u)
            u = u / u.norm(dim=1, keepdim=True).clamp(min=1e-300)
        reached = (u * _deflated(fitted, found, values, u)).sum(dim=1)
        best = int(reached.argmax())
        found = torch.cat([found, u[best : best + 1]])
        values = torch.cat([values, reached[best : best + 1]])
    return Modes(kind.back(found), kind.back(values))


def _deflated(fitted, found: Tensor, values: Tensor, u: Tensor) -> Tensor:
    return fitted.values(u) - (values * (u @ found.T).square()) @ found
