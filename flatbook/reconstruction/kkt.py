r"""Networks with a polynomial activation, what training makes of them, and the tensor behind it.

The network is :math:`\Phi(x) = \sum_j a_j (w_j^\top x)^\alpha`, homogeneous of degree
:math:`\alpha + 1` in its weights θ = (W, a). Gradient flow on a separable task turns toward a
point that satisfies the conditions of Karush, Kuhn and Tucker (KKT) for

.. math:: \min_\theta \tfrac12 \|\theta\|^2 \quad \text{subject to} \quad y_i \Phi(x_i) \ge 1 ,

namely, with multipliers :math:`\lambda_i \ge 0`, signed :math:`b_i = \lambda_i y_i`,

.. math::
    w_j = \alpha a_j f(w_j), \qquad a_j = \langle w_j, f(w_j) \rangle, \qquad
    f(w) = \sum_i b_i (x_i^\top w)^{\alpha - 1} x_i = T(\cdot, w, \ldots, w),

where :math:`T = \sum_i b_i \, x_i^{\otimes \alpha}` is all that the network knows of the data.
Hence :math:`\|w_j\|^2 = \alpha a_j^2`, every :math:`w_j` lies in the span of the samples, and the
unit vector along it is a Z-eigenvector of T.

Tensors or arrays come in; what goes out is of the same kind.
"""

from typing import NamedTuple

from torch import Tensor

from flatbook.reconstruction.inputs import degree as checked_degree
from flatbook.reconstruction.inputs import network, real, signs, weights_norm

_LARGEST = 10**7  # entries of a dense tensor: 80 MB


def polynomial_network(W, a, X, *, degree: int = 3):
    r"""Compute the outputs :math:`\Phi(x) = \sum_j a_j (w_j^\top x)^\alpha`.

    Args:
        W: First layer, a row for each neuron. Shape ``(neurons, inputs)``.
        a: Second layer. Shape ``(neurons,)``.
        X: Samples. Shape ``(samples, inputs)``.
        degree: α, from 1.

    Returns:
        Shape ``(samples,)``.

    Raises:
        ValueError: If shapes disagree or a number is not finite.

    Example:
        Two cubes: 2 · 1³ + 1 · 2³.

        >>> polynomial_network([[1.0, 0.0], [0.0, 1.0]], [2.0, 1.0], [[1.0, 2.0]])
        array([10.])
    """
    W, a, kind = network(W, a)
    X, _ = real("X", X, ("samples", W.shape[1]), like=W)
    return kind.back(outputs(W, a, X, checked_degree(degree, at_least=1)))


def outputs(W: Tensor, a: Tensor, X: Tensor, degree: int) -> Tensor:
    """Compute the outputs of checked tensors."""
    return (X @ W.T).pow(degree) @ a


def moment_tensor(X, b, *, degree: int = 3):
    r"""Add up the outer powers of the samples, :math:`T = \sum_i b_i \, x_i^{\otimes \alpha}`.

    For small problems only: T has :math:`d^\alpha` entries. Everything else here works with the
    samples or with the weights instead.

    Args:
        X: Samples. Shape ``(samples, inputs)``.
        b: Their signed multipliers. Shape ``(samples,)``.
        degree: α, from 1.

    Returns:
        Shape ``(inputs, …, inputs)``, α times.

    Raises:
        ValueError: If shapes disagree, a number is not finite, or T has over ten million entries.

    Example:
        >>> moment_tensor([[1.0, 2.0]], [3.0], degree=2)
        array([[ 3.,  6.],
               [ 6., 12.]])
    """
    X, kind = real("X", X, ("samples", "inputs"))
    b, _ = real("b", b, (len(X),), like=X)
    order, size = checked_degree(degree, at_least=1), X.shape[1]
    if size**order > _LARGEST:
        raise ValueError(
            f"X and degree must give a tensor of at most {_LARGEST} entries; got "
            f"{size} inputs and degree {order}."
        )
    total = b[:, None] * X
    for _ in range(order - 1):
        total = (total[:, :, None] * X[:, None, :]).flatten(1)
    return kind.back(total.sum(dim=0).reshape((size,) * order))


def contraction(X, b, w, *, degree: int = 3):
    r"""Contract the tensor with a vector in all places but one.

    .. math:: f(w) = T(\cdot, w, \ldots, w) = \sum_i b_i (x_i^\top w)^{\alpha - 1} x_i

    Args:
        X: Samples. Shape ``(samples, inputs)``.
        b: Their signed multipliers. Shape ``(samples,)``.
        w: Points, a row for each. Shape ``(points, inputs)``.
        degree: α, from 2.

    Returns:
        A row for each point. Shape ``(points, inputs)``.

    Raises:
        ValueError: If shapes disagree or a number is not finite.

    Example:
        With samples along the axes, f squares each coordinate.

        >>> contraction([[1.0, 0.0], [0.0, 1.0]], [1.0, 2.0], [[3.0, 1.0]])
        array([[9., 2.]])
    """
    X, kind = real("X", X, ("samples", "inputs"))
    b, _ = real("b", b, (len(X),), like=X)
    w, _ = real("w", w, ("points", X.shape[1]), like=X)
    return kind.back(contracted(X, b, w, checked_degree(degree)))


def contracted(X: Tensor, b: Tensor, w: Tensor, degree: int) -> Tensor:
    """Compute f of the rows of w, of checked tensors."""
    return (b * (w @ X.T).pow(degree - 1)) @ X


def kkt_residual(W, a, X, b, *, degree: int = 3) -> float:
    r"""Measure how far weights are from the sum of gradients that KKT asks for.

    .. math::
        \frac{\|\theta - \sum_i b_i \nabla_\theta \Phi(x_i)\|}{\|\theta\|} , \qquad
        \|\theta - \ldots\|^2 = \sum_j \|w_j - \alpha a_j f(w_j)\|^2
        + (a_j - \langle w_j, f(w_j) \rangle)^2

    It is 0 at a KKT point and 1 if the samples explain nothing. A small value does not prove that
    the samples are the true ones: other data may explain the weights as well.

    Args:
        W: First layer. Shape ``(neurons, inputs)``.
        a: Second layer. Shape ``(neurons,)``.
        X: Samples. Shape ``(samples, inputs)``.
        b: Signed multipliers :math:`\lambda_i y_i`. Shape ``(samples,)``.
        degree: α, from 2.

    Returns:
        At least 0.

    Raises:
        ValueError: If shapes disagree, a number is not finite, or all weights are 0.

    Reference:
        Lyu and Li (2020). Gradient descent maximizes the margin of homogeneous neural networks.
        ICLR.

    Example:
        One sample and its neuron: w = 3a b w² and a = b w³ hold for a = w/√3, b w² = 1/√3.

        >>> kkt_residual([[1.0]], [3**-0.5], [[1.0]], [3**-0.5]) < 1e-15
        True
        >>> kkt_residual([[1.0]], [3**-0.5], [[1.0]], [0.0])
        1.0
    """
    W, a, _ = network(W, a)
    X, _ = real("X", X, ("samples", W.shape[1]), like=W)
    b, _ = real("b", b, (len(X),), like=W)
    return stationarity(W, a, X, b, checked_degree(degree))


def stationarity(W: Tensor, a: Tensor, X: Tensor, b: Tensor, degree: int) -> float:
    """Compute the residual of checked tensors."""
    size = weights_norm(W, a)
    f = contracted(X, b, W, degree)
    first = (W - degree * a[:, None] * f).square().sum()
    second = (a - (W * f).sum(dim=1)).square().sum()
    return float((first + second).sqrt()) / size


class KKTConditions(NamedTuple):
    """By how much each of the four KKT conditions is missed; all are 0 at a KKT point.

    Attributes:
        stationarity: As `kkt_residual`, relative to the norm of the weights.
        primal: How far the worst margin lies below 1.
        dual: How far the least multiplier lies below 0.
        slackness: The largest :math:`|\\lambda_i (y_i \\Phi(x_i) - 1)|`.
    """

    stationarity: float
    primal: float
    dual: float
    slackness: float


def kkt_conditions(W, a, X, y, multipliers, *, degree: int = 3) -> KKTConditions:
    r"""Measure by how much a network misses each KKT condition.

    Stationarity, primal feasibility :math:`y_i \Phi(x_i) \ge 1`, dual feasibility
    :math:`\lambda_i \ge 0`, and complementary slackness
    :math:`\lambda_i (y_i \Phi(x_i) - 1) = 0`.

    Args:
        W: First layer. Shape ``(neurons, inputs)``.
        a: Second layer. Shape ``(neurons,)``.
        X: Samples. Shape ``(samples, inputs)``.
        y: Labels, −1 and 1. Shape ``(samples,)``.
        multipliers: λ. Shape ``(samples,)``.
        degree: α, from 2.

    Returns:
        Four numbers of at least 0.

    Raises:
        ValueError: If shapes disagree, a number is not finite, a label is neither −1 nor 1, or all
            weights are 0.

    Example:
        A margin of 1/√3 where 1 is due, so slackness is missed by λ times the rest.

        >>> found = kkt_conditions([[1.0]], [3**-0.5], [[1.0]], [1.0], [3**-0.5])
        >>> [round(value, 4) for value in found]
        [0.0, 0.4226, 0.0, 0.244]
    """
    W, a, _ = network(W, a)
    X, _ = real("X", X, ("samples", W.shape[1]), like=W)
    y = signs("y", y, len(X), like=W)
    multipliers, _ = real("multipliers", multipliers, (len(X),), like=W)
    alpha = checked_degree(degree)
    missing = 1 - y * outputs(W, a, X, alpha)
    return KKTConditions(
        stationarity(W, a, X, multipliers * y, alpha),
        max(0.0, float(missing.max())),
        max(0.0, -float(multipliers.min())),
        float((multipliers * missing).abs().max()),
    )
