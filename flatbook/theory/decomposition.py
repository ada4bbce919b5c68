r"""The weights of the two-layer network, split into signal learned and noise memorized.

See `flatbook.theory.signal_noise` for the model; its names come from there, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flatbook import checks

SIGNS = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
"""j of the filters of either class. Shape ``(2, 1)``."""


class Span(NamedTuple):
    """The span of signal and noise, factored: unit columns = q r."""

    q: Tensor  # (d, samples + 1), orthonormal
    r: Tensor  # (samples + 1, samples + 1), upper triangular
    norms: Tensor  # (samples + 1,), of the signal and of each noise vector
    patches: int


@dataclass(frozen=True)
class SignalNoiseData:
    r"""Samples of the signal–noise model, together with what they are made of.

    Attributes:
        x: The patches. Shape ``(samples, patches, d)``.
        y: Labels as observed, −1 or 1. Shape ``(samples,)``.
        true_y: Labels before flips, whose sign the signal has. Shape ``(samples,)``.
        flipped: Where the two differ. Shape ``(samples,)``.
        signal: :math:`\varphi`. Shape ``(d,)``.
        noise: :math:`\xi_i`, orthogonal to the signal. Shape ``(samples, d)``.
        noise_std: :math:`\sigma_p`, of each coordinate of the noise.
    """

    x: Tensor
    y: Tensor
    true_y: Tensor
    flipped: Tensor
    signal: Tensor
    noise: Tensor
    noise_std: float

    @cached_property
    def span(self) -> Span:
        """What `decompose` needs of the data, factored on first use and kept."""
        return _span(self.signal, self.noise, self.x.shape[1])


@dataclass(frozen=True)
class Decomposition:
    r"""What the filters learned, of one network or of many.

    Attributes:
        kappa: :math:`\kappa_{j,r}`, signal learned. Shape ``(..., 2, filters)``.
        zeta: :math:`\zeta_{j,r,i}`, noise memorized. Shape ``(..., 2, filters, samples)``.
        residual: Length of what the two leave over of the whole change of weights, relative to
            that change; 0 where nothing changed. A float, or shape ``(...)``.
    """

    kappa: Tensor
    zeta: Tensor
    residual: float | Tensor


Networks = nn.Module | Tensor | Sequence["nn.Module | Tensor"]


def decompose(net: Networks, net0: nn.Module | Tensor, data: SignalNoiseData) -> Decomposition:
    r"""Split the change of the filters into signal learned and noise memorized.

    Least squares on the :math:`n + 1` unit columns :math:`\varphi / \|\varphi\|` and
    :math:`\xi_i / \|\xi_i\|`, by one QR factorization, which ``data`` keeps for the next call.
    The coefficients are unique from :math:`d = n + 1` on. They leave no residual if training
    stayed in the span, which is a test only if the span is not the whole space: hence
    :math:`d > n + 1`.

    Args:
        net: The trained network, its filters, shape ``(2, filters, d)``, or many of either: a
            list, or filters with leading axes.
        net0: The network at its start, or its filters.
        data: The training set.

    Returns:
        The coefficients, in float64, and the residual.

    Raises:
        ValueError: If :math:`d \le n + 1`, shapes disagree, or noise vectors are linearly
            dependent.

    Example:
        One sample, :math:`\varphi = (2, 0, 0)` and :math:`\xi = (0, 3, 0)`. The filter of
        :math:`F_{-}` moved by :math:`(-1, 6, 0)`, so :math:`\kappa = -\langle \Delta w, \varphi
        \rangle = 2` and :math:`\zeta = 6 \cdot \|\xi\|^2 / 3`.

        >>> phi, xi = torch.tensor([2.0, 0, 0]).double(), torch.tensor([[0, 3.0, 0]]).double()
        >>> one = torch.ones(1).double()
        >>> data = SignalNoiseData(torch.stack([phi, xi[0]])[None], one, one, one < 0, phi, xi, 1.0)
        >>> start = torch.zeros(2, 1, 3).double()
        >>> end = torch.tensor([[[0, 0, 0]], [[-1.0, 6.0, 0]]]).double()
        >>> parts = decompose(end, start, data)
        >>> parts.kappa[1].tolist(), parts.zeta[1].tolist(), parts.residual
        ([2.0], [[18.0]], 0.0)
    """
    n, _, d = checks.instance("data", data, SignalNoiseData, "sample").x.shape
    if d <= n + 1:
        raise ValueError(
            f"d must exceed n + 1, or the residual is 0 for any weights; got d = {d} and n = {n}."
        )
    with torch.no_grad():
        start = _filters("net0", net0, d)
        end = _filters("net", net, d)
        if end.shape[-3:] != start.shape:
            raise ValueError(
                f"net and net0 must have equally many filters, and net0 be one network; got shapes "
                f"{tuple(end.shape)} and {tuple(start.shape)}."
            )
        change = end - start
        q, r, norms, patches = data.span
        inside = change @ q
        parts = torch.linalg.solve_triangular(r, inside.movedim(-1, 0).flatten(1), upper=True)
        parts = parts.unflatten(1, inside.shape[:-1]).movedim(0, -1) * norms
        left = torch.linalg.vector_norm(change - inside @ q.T, dim=(-3, -2, -1))
        size = torch.linalg.vector_norm(change, dim=(-3, -2, -1))
        residual = torch.where(size > 0, left / size, 0.0)
        kappa = parts[..., 0] * SIGNS
        zeta = (patches - 1) * parts[..., 1:]
    return Decomposition(kappa, zeta, residual if residual.ndim else residual.item())


def compose(kappa: Tensor, zeta: Tensor, net0: nn.Module | Tensor, data: SignalNoiseData) -> Tensor:
    r"""Rebuild the filters from what they learned: the inverse of `decompose`.

    Args:
        kappa: :math:`\kappa_{j,r}`. Shape ``(..., 2, filters)``.
        zeta: :math:`\zeta_{j,r,i}`. Shape ``(..., 2, filters, samples)``.
        net0: The network at its start, or its filters.
        data: The training set.

    Returns:
        The filters, in float64. Shape ``(..., 2, filters, d)``.

    Raises:
        ValueError: If shapes disagree.

    Example:
        >>> from flatbook.theory.signal_noise import TwoLayerCNN, sample
        >>> data = sample(3, d=8, patches=2, signal=2.0, noise=1.0)
        >>> start = TwoLayerCNN(8, filters=1)
        >>> kappa = torch.tensor([[4.0], [0.0]]).double()
        >>> end = compose(kappa, torch.zeros(2, 1, 3).double(), start, data)
        >>> change = end - start.weight.detach()  # κ φ/‖φ‖² = 4 · (2, 0, …)/4
        >>> change[0, 0].round(decimals=9).tolist()
        [2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """
    n, patches, d = checks.instance("data", data, SignalNoiseData, "sample").x.shape
    start = _filters("net0", net0, d)
    if kappa.shape[-2:] != start.shape[:2] or zeta.shape != (*kappa.shape, n):
        raise ValueError(
            f"kappa and zeta must have shapes (..., 2, {start.shape[1]}) and "
            f"(..., 2, {start.shape[1]}, {n}); got {tuple(kappa.shape)} and {tuple(zeta.shape)}."
        )
    learned = (SIGNS * kappa)[..., None] * data.signal / data.signal.square().sum()
    memorized = zeta / (patches - 1) @ (data.noise / data.noise.square().sum(1, keepdim=True))
    return start + learned + memorized


def _filters(name: str, value, d: int) -> Tensor:
    """Return filters in float64, of shape (..., 2, filters, d)."""
    if isinstance(value, list | tuple):
        return torch.stack([_filters(name, one, d) for one in value])
    if isinstance(value, nn.Module):
        value = getattr(value, "weight", None)
    if not isinstance(value, Tensor) or value.ndim < 3 or value.shape[-3::2] != (2, d):
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"{name} must be a TwoLayerCNN or filters of shape (..., 2, filters, {d}); got {got}."
        )
    return value.detach().double()


def _span(signal: Tensor, noise: Tensor, patches: int) -> Span:
    columns = torch.cat([signal[None], noise]).double()
    norms = torch.linalg.vector_norm(columns, dim=1)
    q, r = torch.linalg.qr((columns / norms[:, None]).T)
    if r.diagonal().abs().min() < len(norms) * torch.finfo(torch.float64).eps:
        raise ValueError("noise must hold linearly independent vectors; got dependent ones.")
    return Span(q, r, norms, patches)
