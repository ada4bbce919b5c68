"""The multipliers under which given samples explain given weights best."""

import math
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor, nn

from flatbook import checks
from flatbook.reconstruction.inputs import degree as checked_degree
from flatbook.reconstruction.inputs import in_span, network, real, signs, weights_norm


class Multipliers(NamedTuple):
    """The best multipliers of at least 0.

    Attributes:
        values: λ. Shape ``(samples,)``.
        residual: Distance of the weights from the sum of gradients, relative to their norm.
    """

    values: Tensor
    residual: float


def fit_multipliers(W, a, X, y, *, degree: int = 3) -> Multipliers:
    r"""Find the multipliers under which samples explain a polynomial network best.

    .. math:: \min_{\lambda \ge 0} \Bigl\| \theta - \sum_i \lambda_i y_i \nabla_\theta
        \Phi(x_i) \Bigr\|

    which is a least-squares problem with bounds: convex, solved exactly by active sets.

    Args:
        W: First layer. Shape ``(neurons, inputs)``.
        a: Second layer. Shape ``(neurons,)``.
        X: Samples. Shape ``(samples, inputs)``.
        y: Labels, −1 and 1. Shape ``(samples,)``.
        degree: α, from 2.

    Returns:
        The multipliers, of the kind of ``W``, and the relative residual.

    Raises:
        ValueError: If shapes disagree, a number is not finite, a label is neither −1 nor 1, or all
            weights are 0.

    Reference:
        Lawson and Hanson (1974). Solving least squares problems. Prentice-Hall.

    Example:
        The neuron of `kkt_residual`, whose multiplier is 1/√3.

        >>> fit_multipliers([[1.0]], [3**-0.5], [[1.0]], [1.0]).values.round(6)
        array([0.57735])
        >>> fit_multipliers([[1.0]], [3**-0.5], [[1.0]], [-1.0])  # the wrong label
        Multipliers(values=array([0.]), residual=1.0)
    """
    W, a, kind = network(W, a)
    X, _ = real("X", X, ("samples", W.shape[1]), like=W)
    y = signs("y", y, len(X), like=W)
    alpha = checked_degree(degree)
    size = weights_norm(W, a, name="the weights")
    inside, coordinates, outside = in_span(W, X)
    inner = W @ X.T
    first = (alpha * a[:, None] * inner.pow(alpha - 1))[:, None, :] * coordinates
    columns = y * torch.cat([first.flatten(0, 1), inner.pow(alpha)])
    target = torch.cat([inside.flatten(), a])
    values, missed = nonnegative_fit(columns, target)
    return Multipliers(kind.back(values), math.hypot(missed, outside) / size)


def model_multipliers(model: nn.Module, X, y) -> Multipliers:
    r"""Find the multipliers under which samples explain the weights of any model best.

    As `fit_multipliers`, with the gradients that autograd gives: at a kink of a ReLU, its
    derivative is 0. `flatbook.reconstruction.relu_multipliers` takes the best of all derivatives.

    Args:
        model: Returns one number for each sample. Its parameters that require a gradient are θ.
        X: Samples, of the precision of the model. Shape ``(samples, …)``.
        y: Labels, −1 and 1. Shape ``(samples,)``.

    Returns:
        The multipliers, of the kind of ``X``, and the relative residual.

    Raises:
        ValueError: If the model does not return one number for each sample, or an argument is none
            of the above.

    Example:
        A linear model, whose weights are the sum of 2 · (1, 0) and −1 · (0, 1).

        >>> model = nn.Linear(2, 1, bias=False)
        >>> model.weight.data = torch.tensor([[2.0, -1.0]])
        >>> found = model_multipliers(model, torch.eye(2), torch.tensor([1.0, -1.0]))
        >>> found.values.tolist(), round(found.residual, 6)
        ([2.0, 1.0], 0.0)
    """
    checks.module("model", model)
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError("model must have parameters that require a gradient; got none.")
    like = next(iter(trained.values()))
    shape = ("samples", *(None for _ in np.shape(X)[1:])) if np.ndim(X) > 1 else ("samples", "…")
    X, kind = real("X", X, shape)
    y = signs("y", y, len(X), like=X)
    X = X.to(like.device, like.dtype)
    theta = torch.cat([p.flatten() for p in trained.values()]).double()
    size = weights_norm(theta, name="the weights")
    rows = [sample_gradient(model, trained, x).double() for x in X]
    columns = torch.stack(rows, dim=1) * y.to(theta.device)
    values, missed = nonnegative_fit(columns, theta)
    return Multipliers(kind.back(values), missed / size)


def sample_gradient(model: nn.Module, trained: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return the gradient of the model's output at one sample, all parameters in a row."""

    def output(parameters):
        value = torch.func.functional_call(model, parameters, (x[None],))
        if value.numel() != 1:
            raise ValueError(
                "model must return one number for each sample; got an output of shape "
                f"{tuple(value.shape)} for one."
            )
        return value.sum()

    gradients = torch.func.grad(output)(trained)
    return torch.cat([gradients[name].flatten() for name in trained])


def nonnegative_fit(columns: Tensor, target: Tensor) -> tuple[Tensor, float]:
    """Return the coefficients of at least 0 that bring columns nearest to a target, and the gap."""
    # The solver works on the triangle, a square as small as the number of columns.
    frame, triangle = torch.linalg.qr(columns)
    values, _ = nnls(triangle.cpu().numpy(), (frame.T @ target).cpu().numpy())
    values = torch.from_numpy(values).to(columns)
    return values, float((target - columns @ values).norm())
