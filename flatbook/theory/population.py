r"""The error of signal–noise networks on fresh samples, from a Gaussian in 2m dimensions.

A fresh :math:`\xi` meets the filters as :math:`z_{j,r} = \langle w_{j,r}, \xi \rangle`, which is
Gaussian with mean 0 and covariance

.. math::
    \Sigma = \sigma_p^2 \, W \bigl( I - \varphi\varphi^\top / \|\varphi\|^2 \bigr) W^\top ,

in the coordinates a quadratic form of the Gram matrix. Nothing else of the d dimensions is left.
"""

from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import gammainc, gammaincc
from torch import Tensor
from torch.nn.functional import softplus

from flatbook import checks
from flatbook.theory.coordinates import Problems, along_noise, responses
from flatbook.theory.decomposition import SIGNS
from flatbook.theory.signal_noise import VALUE

_DEGREE = {"relu": 1, "squared_relu": 2}  # σ(s z) = s^degree σ(z) for s ≥ 0
_BLOCK = 2**22  # numbers held at once


@dataclass(frozen=True)
class Population:
    r"""What networks do on fresh samples with clean labels. All of shape ``(..., cells)``.

    Attributes:
        error: Probability of a wrong sign; an output of 0 counts half. Where labels flip with
            probability p, observed ones are missed with :math:`p + (1 - 2p)` times this.
        error_std: Its standard error.
        loss: Mean logistic loss.
        loss_std: Its standard error.
        margin: Mean of :math:`\tilde y f`, exact.
    """

    error: Tensor
    error_std: Tensor
    loss: Tensor
    loss_std: Tensor
    margin: Tensor


def covariance(problems: Problems, kappa: Tensor, zeta: Tensor) -> Tensor:
    r"""Compute the covariance of the filters' responses to fresh noise.

    With rows C of coefficients of the :math:`\xi_i` in :math:`w - w^{(0)}` and the Gram matrix H
    of noise vectors and initial filters, :math:`\Sigma = \sigma_p^2 \, [C \; I] \, H \,
    [C \; I]^\top`.

    Args:
        problems: The cells.
        kappa: :math:`\kappa_{j,r}`, on which it does not depend. Shape ``(..., cells, 2, m)``.
        zeta: :math:`\zeta_{j,r,i}`. Shape ``(..., cells, 2, m, n)``.

    Returns:
        Filters of :math:`F_{+}` first. Shape ``(..., cells, 2m, 2m)``.

    Example:
        At the start it is :math:`\sigma_p^2` times the Gram matrix of the filters.

        >>> from flatbook.theory.wishart import sample_problems
        >>> problem = sample_problems(2, d=9, patches=2, signal=1.0, noise=3.0, filters=1)
        >>> start = torch.zeros(1, 2, 1), torch.zeros(1, 2, 1, 2)
        >>> torch.equal(covariance(problem, *start), 9 * problem.gram[:, 2:, 2:])
        True
    """
    part = along_noise(problems, zeta)
    one = torch.eye(part.shape[-2], dtype=torch.float64).expand(*part.shape[:-1], -1)
    rows = torch.cat([part.double(), one], dim=-1)
    return problems.noise[:, None, None] ** 2 * (rows @ problems.gram @ rows.mT)


def noise_root(problems: Problems, kappa: Tensor, zeta: Tensor) -> Tensor:
    r"""Return R with :math:`R^\top R = \Sigma`, which turns standard normal rows into responses.

    Args:
        problems: The cells.
        kappa: Shape ``(..., cells, 2, m)``.
        zeta: Shape ``(..., cells, 2, m, n)``.

    Returns:
        Shape ``(..., cells, 2m, 2m)``.
    """
    values, vectors = torch.linalg.eigh(covariance(problems, kappa, zeta))
    return (vectors * values.clamp(min=0).sqrt()[..., None, :]).mT


def evaluate(
    problems: Problems, kappa: Tensor, zeta: Tensor, *, draws: int = 4096, seed: int = 0
) -> Population:
    r"""Compute error, loss and margin on fresh samples.

    Let s be the part of the signal in :math:`\tilde y f`, and :math:`\tilde y N(z)` that of the
    noise. The mean of the latter over both labels is 0, so the **mean margin** is the mean of s
    alone, which is exact. Where :math:`\sigma` is homogeneous of degree q,
    :math:`N(z) = \rho^q N(z / \rho)`, and given the direction, the **error** is a tail of the
    :math:`\chi` distribution of :math:`\rho` with 2m degrees of freedom: only directions are
    drawn, and the error is accurate also where no draw errs. (For softplus it is the share of
    draws that err.) The **loss** is the mean over draws.

    Args:
        problems: The cells.
        kappa: :math:`\kappa_{j,r}`. Shape ``(..., cells, 2, m)``.
        zeta: :math:`\zeta_{j,r,i}`. Shape ``(..., cells, 2, m, n)``.
        draws: From the Gaussian; the same standard normal ones for all cells. From 2.
        seed: Of the draws.

    Returns:
        The three, and the standard errors of two.

    Raises:
        ValueError: If shapes disagree, or an argument is none of the above.

    Example:
        One filter a class that learned only signal: never wrong, with the margin
        :math:`\kappa` from the one filter that is active.

        >>> from flatbook.theory.wishart import sample_problems
        >>> problem = sample_problems(2, d=9, patches=2, signal=1.0, noise=1.0, filters=1,
        ...     init=1e-9)
        >>> fresh = evaluate(problem, torch.full((1, 2, 1), 3.0), torch.zeros(1, 2, 1, 2))
        >>> fresh.error.tolist(), fresh.margin.round(decimals=6).tolist()
        ([0.0], [3.0])
    """
    draws = checks.count("draws", draws, at_least=2)
    checks.count("seed", seed, at_least=0)
    value, m = VALUE[problems.activation], problems.filters
    a, _ = responses(problems, kappa, zeta)
    signs = SIGNS / m
    # By true label: +1, then −1. Shape (..., cells, 2).
    signal = torch.stack([y * (signs * value(y * a)).sum(dim=(-2, -1)) for y in (1, -1)], dim=-1)
    shape = signal.shape[:-1]

    roots = noise_root(problems, kappa, zeta).flatten(0, -3)
    random = np.random.default_rng(seed)
    normal = torch.from_numpy(random.standard_normal((draws, 2 * m)))
    others = (problems.patches - 1).expand(shape).reshape(-1, 1)
    size = max(1, _BLOCK // normal.numel())
    parts = []
    for root, other, s in zip(
        roots.split(size), others.split(size), signal.reshape(-1, 2).split(size), strict=True
    ):
        plus, minus = value(normal @ root).unflatten(-1, (2, m)).mean(dim=-1).unbind(dim=-1)
        noise = other * (plus - minus)
        parts.append(_statistics(s, noise, normal, _DEGREE.get(problems.activation)))
    means = (torch.cat(part).reshape(shape) for part in zip(*parts, strict=True))
    return Population(*means, margin=signal.mean(dim=-1))


def _statistics(s: Tensor, noise: Tensor, normal: Tensor, degree: int | None):
    """Return error and loss, each with its standard error, of (cells, 2) by (cells, draws)."""
    s, noise = s[..., None], torch.stack([noise, -noise], dim=1)
    margins = s + noise
    losses = softplus(-margins).mean(dim=1)
    if degree is None:
        wrong = (margins < 0).double() + (margins == 0) / 2
    else:
        half = normal.square().sum(dim=1) / 2
        wrong = _tail(s.numpy(), noise.numpy(), half.numpy(), normal.shape[1] / 2, degree)
    wrong = wrong.mean(dim=1)
    root = len(normal) ** 0.5
    return wrong.mean(1), wrong.std(1) / root, losses.mean(1), losses.std(1) / root


def _tail(s: np.ndarray, noise: np.ndarray, half: np.ndarray, m: float, degree: int) -> Tensor:
    r"""Return the chance of :math:`s + \rho^q N < 0` in the direction of each draw."""
    s, noise, half = np.broadcast_arrays(s, noise, half)
    wrong = (s < 0).astype(float)  # where the noise agrees with the signal
    crosses = s * np.sign(noise) <= 0
    s, noise, half = s[crosses], noise[crosses], half[crosses]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        # ρ²/2, which is Gamma(m), at which noise and signal cancel
        at = half * np.abs(s / noise) ** (2 / degree)
    beyond = np.where(noise < 0, s >= 0, s > 0)
    tail = np.where(beyond, gammaincc(m, at), gammainc(m, at))
    wrong[crosses] = np.where(np.isnan(at), 0.5, tail)
    return torch.from_numpy(wrong)
