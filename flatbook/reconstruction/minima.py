r"""Local minima of the norm of polynomial networks: why training leaves few neurons.

Where :math:`\Phi(\theta; x) = \sum_j a_j (w_j^\top x)^\alpha` separates the samples, gradient flow
on the exponential loss turns toward a KKT point of

.. math:: \min_\theta \tfrac12 \|\theta\|^2 \quad \text{subject to} \quad y_i \Phi(x_i) \ge 1 .

Which one matters. Scale each neuron, weights of both layers, by :math:`s_j^{1/(\alpha+1)}`: the
outputs are *linear* in s, the norm :math:`\frac12 \sum_j s_j^{2/(\alpha+1)} \|\theta_j\|^2` is
strictly *concave*, and a strictly concave function on a polyhedron has its local minima at
vertices. There no more of the :math:`s_j` are above 0 than samples are at the margin. Hence

- **a local minimum has at most as many neurons as samples at the margin** (`prune_neurons` goes
  there), while `flatbook.reconstruction.recover` needs :math:`\binom{n+\alpha-2}{\alpha-1}`,
  which is more for every n from 2;
- **one neuron in the direction of the support vector machine is a local minimum** (`one_neuron`),
  whose weights hold a single vector of the data.
"""

import numpy as np
import torch
from scipy.optimize import nnls

from flatbook.reconstruction.fixture import KKTNetwork
from flatbook.reconstruction.inputs import degree as checked_degree
from flatbook.reconstruction.inputs import network, real, signs, weights_norm
from flatbook.reconstruction.multipliers import fit_multipliers


def norm_cost(strength, *, degree: int = 3):
    r"""Compute what a neuron of given strength costs at least.

    .. math:: \min \bigl\{ \tfrac12 (\|w\|^2 + a^2) : a \|w\|^\alpha = c \bigr\}
        = \tfrac{\alpha+1}{2} \, \alpha^{-\alpha/(\alpha+1)} \, |c|^{2/(\alpha+1)} ,

    concave in :math:`|c|`: one strong neuron is cheaper than several that add up to it.

    Args:
        strength: c, of either sign. Shape ``(neurons,)``.
        degree: α, from 1.

    Returns:
        At least 0, of the kind of ``strength``. Shape ``(neurons,)``.

    Raises:
        ValueError: If a number is not finite, or an argument is none of the above.

    Example:
        For cubes, sixteen times the strength costs four times as much.

        >>> norm_cost([1.0, 16.0]).round(4)
        array([0.8774, 3.5095])
    """
    c, kind = real("strength", strength, ("neurons",))
    alpha = checked_degree(degree, at_least=1)
    factor = (alpha + 1) / 2 * alpha ** (-alpha / (alpha + 1))
    return kind.back(factor * c.abs().pow(2 / (alpha + 1)))


def prune_neurons(W, a, X, *, degree: int = 3):
    r"""Remove neurons at equal outputs and at no greater norm, until as many as samples are left.

    With neuron j scaled by :math:`s_j^{1/(\alpha+1)}` the outputs are :math:`\sum_j s_j
    \varphi_j(x_i)`. While there are more neurons than samples, some :math:`v \ne 0` has
    :math:`\sum_j v_j \varphi_j(x_i) = 0`. Along :math:`s = 1 + t v` the norm is concave, so one of
    the two ways does not raise it; we go that way until the first neuron has gone. Downhill there
    is such an end, since the norm would rise along a :math:`v \ge 0`.

    Args:
        W: First layer. Shape ``(neurons, inputs)``.
        a: Second layer. Shape ``(neurons,)``.
        X: Samples. Shape ``(samples, inputs)``.
        degree: α, from 1.

    Returns:
        W and a of the neurons that are left, scaled, of the kind of ``W``.

    Raises:
        ValueError: If shapes disagree, a number is not finite, or all weights are 0.

    Reference:
        Carathéodory (1911). Über den Variabilitätsbereich der Fourier'schen Konstanten von
        positiven harmonischen Funktionen. Rendiconti del Circolo Matematico di Palermo.

    Example:
        Three neurons that separate two samples; fewer can do so for less.

        >>> from flatbook.reconstruction import exact_kkt
        >>> net = exact_kkt(2, seed=1)
        >>> W, a = prune_neurons(net.W, net.a, net.X)
        >>> len(a) <= 2, bool(a.square().sum() < net.a.square().sum())
        (True, True)
    """
    W, a, kind = network(W, a)
    X, _ = real("X", X, ("samples", W.shape[1]), like=W)
    alpha = checked_degree(degree, at_least=1)
    weights_norm(W, a)
    while len(a) > len(X):
        parts = (X @ W.T).pow(alpha) * a
        v = torch.linalg.svd(parts, full_matrices=True).Vh[-1]
        slope = float((W.square().sum(dim=1) + a.square()) @ v)
        v = -v if slope > 0 or (slope == 0 and not (v < 0).any()) else v
        reach = torch.where(v < 0, -1 / v, torch.inf)
        s = (1 + reach.min() * v).clamp(min=0)
        s[int(reach.argmin())] = 0  # which rounding may leave above
        kept = s > 1e-14  # others that go at the same time are left at rounding error
        scale = s[kept].pow(1 / (alpha + 1))
        W, a = scale[:, None] * W[kept], scale * a[kept]
    return kind.back(W), kind.back(a)


def one_neuron(X, y, *, degree: int = 3) -> KKTNetwork:
    r"""Make the KKT network that is a linear support vector machine in disguise.

    For odd α a neuron :math:`a (w^\top x)^\alpha` has margins :math:`a (y_i w^\top x_i)^\alpha`,
    so the shortest w is :math:`a^{-1/\alpha} u` with the hard-margin direction
    :math:`u = \arg\min \{ \|u\| : y_i u^\top x_i \ge 1 \}`, and the best a has :math:`\|w\|^2 =
    \alpha a^2`. Any number of further neurons may be added at 0: a small one of size ε costs
    :math:`\varepsilon^2` and moves the margins by :math:`\varepsilon^{\alpha+1}`, so this stays a
    strict local minimum up to signs.

    Args:
        X: Samples that a plane through 0 separates. Shape ``(samples, inputs)``.
        y: Labels, −1 and 1. Shape ``(samples,)``.
        degree: α, odd, from 3.

    Returns:
        A network with one neuron, of the kind of ``X``; multipliers are above 0 at support vectors
        alone.

    Raises:
        ValueError: If no plane separates the samples, the degree is even, or an argument is none of
            the above.

    Reference:
        Lawson and Hanson (1974). Solving least squares problems. Prentice-Hall.

    Example:
        >>> net = one_neuron([[1.0, 0.0], [0.0, 1.0]], [1.0, -1.0])
        >>> (net.W / net.a[:, None]).round(4), ((net.X @ net.W.T) ** 3 @ net.a).round(4)
        (array([[ 1.2247, -1.2247]]), array([ 1., -1.]))
    """
    X, kind = real("X", X, ("samples", "inputs"))
    y = signs("y", y, len(X), like=X)
    alpha = checked_degree(degree, at_least=3)
    if alpha % 2 == 0:
        raise ValueError(f"degree must be odd, or margins have no sign; got {alpha}.")
    # Least distance programming: the residual of a problem with bounds is the direction. It has
    # a scale of its own, so samples are taken at length 1 at most.
    size = X.norm(dim=1).max().clamp(min=torch.finfo(X.dtype).tiny)
    rows = torch.cat([(y[:, None] * X / size).T, torch.ones(1, len(X)).to(X)]).cpu().numpy()
    goal = np.zeros(len(rows))
    goal[-1] = 1.0
    missed = goal - rows @ nnls(rows, goal)[0]
    if missed[-1] < 1e-12:
        raise ValueError("X must be separated by a plane through 0, by its labels y; none does.")
    u = torch.from_numpy(-missed[:-1] / missed[-1]).to(X)
    margins = y * (X @ u)
    u = u / margins.min()
    tight = margins < (1 + 1e-9) * margins.min()  # others explain w as well, and have none
    a = float((u.square().sum() / alpha).pow(alpha / (2 * alpha + 2)))
    W, a = a ** (-1 / alpha) * u[None], torch.tensor([a], dtype=torch.float64).to(X)
    multipliers = torch.zeros_like(y)
    multipliers[tight] = fit_multipliers(W, a, X[tight], y[tight], degree=alpha).values
    return KKTNetwork(*(kind.back(part) for part in (W, a, X, y, multipliers)))
