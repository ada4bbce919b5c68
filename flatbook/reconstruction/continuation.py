r"""From orthonormal samples to others, on the path of exact KKT networks between them.

Each neuron is an isolated solution of :math:`g(w) = w - \alpha \, p(w) f(w) = 0`, with
:math:`p(w) = \langle w, f(w) \rangle` for its second layer, and the multipliers are those that
make all margins 1. As the samples move, Newton's method follows both, until a neuron meets
another: in a **fold** the pair turns complex, in a **pitchfork** three become one. The Jacobian
of g is singular there and its determinant would change sign beyond, which ends the path. The
Jacobian of all neurons is made of one block for each,

.. math:: I - \alpha^2 f f^\top - \alpha (\alpha - 1) \, p \, T(\cdot, \cdot, w, \ldots, w),

and the multipliers tie them together, so a step costs a small system for each neuron and one of
the size of the samples.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flatbook import checks
from flatbook.reconstruction.fixture import KKTNetwork, exact_kkt
from flatbook.reconstruction.inputs import degree as checked_degree
from flatbook.reconstruction.inputs import real, signs
from flatbook.reconstruction.kkt import contracted

_NEWTON = 12  # iterations before a step counts as too long
_TURN = 0.3  # by which no neuron may move in one step, relative to its length
_EXACT = 1e-12


class Continuation(NamedTuple):
    """How far the exact network could be followed.

    Attributes:
        network: The exact KKT network of the samples at ``reached``.
        reached: Share of the way from the orthonormal samples to those given; 1 is all of it.
        steps: Number of steps taken.
        distance: Least singular value of a neuron's Jacobian; near 0 where neurons meet.
    """

    network: KKTNetwork
    reached: float
    steps: int
    distance: float


class _State(NamedTuple):
    W: Tensor
    b: Tensor


def continue_kkt(
    X,
    y,
    *,
    degree: int = 3,
    subsets=None,
    least_step: float = 1e-4,
    max_steps: int = 1000,
) -> Continuation:
    r"""Make an exact KKT network for independent samples, as far as its neurons live.

    The path starts at the nearest orthonormal rows, scaled, and runs straight to ``X``,

    .. math:: X(t) = (1 - t) \, r \, (X X^\top)^{-1/2} X + t X ,
        \qquad r^2 = \tfrac1n \|X\|_F^2 .

    Args:
        X: Independent samples. Shape ``(samples, inputs)``.
        y: Labels, −1 and 1. Shape ``(samples,)``.
        degree: α, from 3.
        subsets: Which neurons, as for `exact_kkt`.
        least_step: The path ends where not even such a share of it can be gone at once.
        max_steps: Or after so many steps.

    Returns:
        The network for :math:`X(t)` at the largest t reached, of the kind of ``X``.

    Raises:
        ValueError: If the samples are dependent, or an argument is none of the above.

    Reference:
        Allgower and Georg (2003). Introduction to numerical continuation methods. SIAM.

    Example:
        Two samples 80 degrees apart still have three real neurons.

        >>> end = continue_kkt([[1.0, 0.0], [0.17364818, 0.98480775]], [1, 1])
        >>> end.reached, end.network.W.shape
        (1.0, (3, 2))
    """
    X, kind = real("X", X, ("samples", "inputs"))
    y = signs("y", y, len(X), like=X)
    alpha = checked_degree(degree, at_least=3)
    least_step = checks.positive("least_step", least_step)
    max_steps = checks.count("max_steps", max_steps)
    left, values, basis = torch.linalg.svd(X, full_matrices=False)
    if len(values) < len(X) or values[-1] <= max(X.shape) * kind.eps * values[0]:
        rank = int((values > max(X.shape) * kind.eps * values[0]).sum())
        raise ValueError(f"X must have independent rows; got {len(X)} rows of rank {rank}.")
    size = float(values.square().mean().sqrt())
    start, end = left, left * (values / size)  # in coordinates of their span
    first = exact_kkt(len(X), X=start, labels=y, degree=alpha, subsets=subsets)
    state, before = _State(first.W, first.multipliers * y), None
    side, apart = _side(state, start, alpha), _apart(state)
    t, step, steps, last = 0.0, 0.1, 0, 0.0
    while t < 1 and steps < max_steps and step >= least_step:
        goal = min(1.0, t + step)
        guess = state if before is None else _ahead(before, state, (goal - t) / (t - last))
        samples = (1 - goal) * start + goal * end
        found = _correct(guess, samples, y, alpha)
        if (
            found is None
            or _moved(state, found) > _TURN
            or (found.b * y <= 0).any()
            or (_side(found, samples, alpha) != side).any()
            or (apart & ~_apart(found)).any()
        ):
            step = (goal - t) / 2
            continue
        before, state, last, t = state, found, t, goal
        step, steps = 1.5 * step, steps + 1
    samples = (1 - t) * start + t * end
    blocks = _system(state, samples, alpha)[1]
    distance = float(torch.linalg.svdvals(blocks)[:, -1].min())
    # A common length r of the samples scales all weights by r^(-α/(α+1)).
    scale = size ** (-alpha / (alpha + 1))
    W = scale * state.W
    a = scale * (state.W * contracted(samples, state.b, state.W, alpha)).sum(dim=1)
    multipliers = state.b * y * scale ** (1 - alpha) * size**-alpha
    parts = (W @ basis, a, size * samples @ basis, y, multipliers)
    return Continuation(KKTNetwork(*(kind.back(v) for v in parts)), t, steps, distance)


def _ahead(before: _State, now: _State, ratio: float) -> _State:
    return _State(*(n + ratio * (n - b) for b, n in zip(before, now, strict=True)))


def _moved(old: _State, new: _State) -> float:
    return float(((new.W - old.W).norm(dim=1) / old.W.norm(dim=1)).max())


def _side(state: _State, X: Tensor, alpha: int) -> Tensor:
    return torch.linalg.slogdet(_system(state, X, alpha)[1]).sign


def _apart(state: _State) -> Tensor:
    U = state.W / state.W.norm(dim=1, keepdim=True)
    return (U @ U.T).abs() < 1 - 1e-9


def _system(state: _State, X: Tensor, alpha: int):
    """Return g, its blocks in w, its slopes in b, and the outer powers of the inner products."""
    W, b = state
    inner = W @ X.T
    f = (b * inner.pow(alpha - 1)) @ X
    p = (W * f).sum(dim=1)
    eye = torch.eye(X.shape[1]).to(X)
    slices = torch.einsum("si,ns,sk->nik", X, b * inner.pow(alpha - 2), X)
    blocks = eye - alpha**2 * f[:, :, None] * f[:, None, :]
    blocks = blocks - alpha * (alpha - 1) * p[:, None, None] * slices
    powers = inner.pow(alpha)
    slopes = f[:, :, None] * powers[:, None, :]
    slopes = slopes + p[:, None, None] * (inner.pow(alpha - 1)[:, :, None] * X).mT
    return W - alpha * p[:, None] * f, blocks, -alpha * slopes, powers


def _correct(state: _State, X: Tensor, y: Tensor, alpha: int) -> _State | None:
    """Run Newton's method; return None where it does not converge."""
    best = torch.inf
    for _ in range(_NEWTON):
        g, blocks, slopes, powers = _system(state, X, alpha)
        p = powers @ state.b
        h = powers.T @ p - y  # both sides times the label
        size = float(torch.maximum(g.abs().max(), h.abs().max()))
        if size < _EXACT and size >= best / 2:  # as exact as rounding lets it be
            return state
        if not size < 1e3:
            return None
        best = min(best, size)
        solved, failed = torch.linalg.solve_ex(blocks, torch.cat([slopes, g[:, :, None]], dim=2))
        if failed.any() or not solved.isfinite().all():
            return None
        # The margins' slopes in w are minus those of g in b: what is left is symmetric.
        pulled = torch.einsum("nik,nil->kl", slopes, solved)
        matrix = pulled[:, :-1] + powers.T @ powers
        step, failed = torch.linalg.solve_ex(matrix, -h - pulled[:, -1])
        if failed:
            return None
        state = _State(state.W - solved[:, :, -1] - solved[:, :, :-1] @ step, state.b + step)
    return state if best < _EXACT else None
