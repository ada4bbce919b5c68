r"""Gradient descent and SAM on signal–noise problems, in the coordinates of the decomposition.

With :math:`g_i = \partial L / \partial f_i`, the gradient of filter :math:`w_{j,r}` is

.. math::
    \nabla_{j,r} = \frac{j}{m} \Bigl[ \underbrace{\sum_i g_i \tilde y_i
    \sigma'(\tilde y_i a_{j,r})}_{A_{j,r}} \varphi + (P - 1) \sum_i
    \underbrace{g_i \, \sigma'(b_{j,r,i})}_{B_{j,r,i}} \xi_i \Bigr] ,

and its norm over all filters takes the norm of :math:`\varphi` and the Gram matrix G of the
:math:`\xi_i`. So does SAM's ascent :math:`\varepsilon = \tau \nabla / \|\nabla\|`, which shifts
:math:`b_{j,r}` by a multiple of :math:`G B_{j,r}`. A step is a few products with G for each
filter, whatever d is.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn.functional import softplus

from flatbook import checks
from flatbook.theory.coordinates import Problems
from flatbook.theory.objectives import means_over, sample_weights
from flatbook.theory.signal_noise import SLOPE, VALUE

__all__ = ["Training", "sample_weights", "train"]


@dataclass(frozen=True)
class Training:
    r"""Where training ended, and where it passed.

    Attributes:
        kappa: :math:`\kappa_{j,r}` at the end. Shape ``(cells, 2, m)``.
        zeta: :math:`\zeta_{j,r,i}` at the end. Shape ``(cells, 2, m, n)``.
        loss: Mean logistic loss at the end over the samples to fit: those not to be forgotten.
            Shape ``(cells,)``.
        steps: Steps taken. Shape ``(cells,)``.
        stopped: True where the loss to stop at was reached. Shape ``(cells,)``.
        path_steps: Steps at which the path was kept, the first and the last included; empty
            without ``every``. Shape ``(times,)``.
        path_kappa: Shape ``(times, cells, 2, m)``. A cell that stopped stays where it is.
        path_zeta: Shape ``(times, cells, 2, m, n)``.
    """

    kappa: Tensor
    zeta: Tensor
    loss: Tensor
    steps: Tensor
    stopped: Tensor
    path_steps: Tensor
    path_kappa: Tensor
    path_zeta: Tensor


def train(
    problems: Problems,
    *,
    steps: int,
    lr: float | Tensor,
    radius: float | Tensor = 0.0,
    start: tuple[Tensor, Tensor] | None = None,
    forget: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    batch_size: int | None = None,
    stop_loss: float | Tensor | None = None,
    every: int | None = None,
    seed: int = 0,
) -> Training:
    r"""Train all cells at once, by gradient descent or SAM.

    Each step is that of `torch.optim.SGD`, or of `flatbook.optim.SAM` around it, on the full
    network with the objective of `sample_weights`. Ascent on F has no minimum: with F, always
    say after how many steps the numbers were taken, or at which loss on R.

    Args:
        problems: The cells.
        steps: Most steps to take.
        lr: Learning rate, above 0. Like ``radius``, ``alpha`` and ``stop_loss`` a number, or one
            for each cell.
        radius: :math:`\tau`, SAM's radius over all filters together; 0 is gradient descent.
        start: :math:`\kappa` and :math:`\zeta` to start from, such as those of another training;
            None starts from the initial network.
        forget: True for samples to forget, the same in each cell; None is standard training.
            Shape ``(n,)``.
        alpha: Weight of the samples to retain, in [0, 1].
        batch_size: None takes full batches. Cells share the shuffles.
        stop_loss: A cell stops where its mean loss over all samples to fit is at most this.
        every: Keeps the path at each multiple of this number of steps.
        seed: Of the mini-batches.

    Returns:
        The coordinates reached.

    Raises:
        ValueError: If an argument is none of the above.

    Example:
        One sample, tiny filters, one step with the rate m: each filter that answers to the noise
        takes :math:`(P - 1)^2 \|\xi\|^2 / 2` of it, up or down by its class.

        >>> from flatbook.theory.wishart import sample_problems
        >>> problem = sample_problems(1, d=9, patches=3, signal=1.0, noise=1.0, init=1e-9, seed=2)
        >>> zeta = train(problem, steps=1, lr=10.0).zeta / problem.noise_gram
        >>> sorted(set(zeta.flatten().abs().round(decimals=6).tolist()))
        [0.0, 2.0]
    """
    n, m, cells = problems.samples, problems.filters, len(problems)
    steps = checks.count("steps", steps, at_least=0)
    every = None if every is None else checks.count("every", every)
    lr = _per_cell("lr", lr, cells, "above 0", lambda v: v > 0)
    radius = _per_cell("radius", radius, cells, "of at least 0", lambda v: v >= 0)
    alpha = _per_cell("alpha", alpha, cells, "in [0, 1]", lambda v: (v >= 0) & (v <= 1))
    level = -1.0 if stop_loss is None else stop_loss  # which no loss reaches
    level = _per_cell("stop_loss", level, cells, "above 0", lambda v: (v > 0) | (stop_loss is None))
    retain, ascend = means_over(n, max(steps, 1), forget, batch_size, seed)
    if forget is None and (alpha != 1).any():
        raise ValueError(f"alpha must be 1 where there is nothing to forget; got {alpha.min()}.")
    fit = torch.ones(n) if forget is None else (~forget).double()

    climb = bool((radius > 0).any())
    work = _working(problems, lr, radius, alpha, level, start)
    phi, xi = work.phi.clone(), work.xi.clone()
    loss, taken = torch.zeros(cells, dtype=torch.float64), torch.zeros(cells, dtype=torch.int64)
    stopped = torch.zeros(cells, dtype=torch.bool)
    path = []
    for t in range(steps + 1):
        a, b = work.responses()
        margins = work.y * work.outputs(a, b)
        losses = (softplus(-margins) @ fit.to(margins)) / fit.sum()
        done = losses <= work.level
        if t == steps or done.any():
            phi[work.cell], xi[work.cell], loss[work.cell] = work.phi, work.xi, losses
            taken[work.cell], stopped[work.cell] = t, done
        if every and (t % every == 0 or t == steps or done.all()):
            phi[work.cell], xi[work.cell] = work.phi, work.xi
            path.append((t, phi.clone(), xi.clone()))
        if t == steps or done.all():
            break
        if done.any():
            keep = ~done
            work = work.take(keep)
            a, b, margins = a[keep], b[keep], margins[keep]

        c = work.alpha[:, None] * retain[t] - (1 - work.alpha)[:, None] * ascend[t]
        A, B = work.gradient(a, b, -c * work.y * torch.sigmoid(-margins))
        if climb:
            shift_a, shift_b = work.ascent(A, B)
            a, b = a + shift_a, b + shift_b
            A, B = work.gradient(a, b, -c * work.y * torch.sigmoid(-work.y * work.outputs(a, b)))
        work = replace(
            work,
            phi=work.phi - work.lr[:, None] * A,
            xi=work.xi - work.lr[:, None, None] * B,
        )

    def named(phi, xi):
        kappa = phi * _signs(m) * problems.signal[:, None] ** 2
        squares = problems.noise_gram.diagonal(dim1=1, dim2=2)[:, None]
        zeta = xi * (problems.patches - 1)[:, None, None] * squares
        return kappa.unflatten(-1, (2, m)), zeta.unflatten(-2, (2, m))

    times = torch.tensor([t for t, _, _ in path], dtype=torch.int64)
    nothing = (torch.zeros(0, *phi.shape), torch.zeros(0, *xi.shape))
    kept = [torch.stack(part) for part in list(zip(*path, strict=True))[1:]] if path else nothing
    return Training(*named(phi, xi), loss, taken, stopped, times, *named(*kept))


@dataclass(frozen=True)
class _Working:
    """The cells that still train. Filters of both classes lie along one axis of 2m."""

    cell: Tensor  # their indices
    gram: Tensor  # (cells, n, n)
    a0: Tensor  # (cells, 2m)
    b0: Tensor  # (cells, 2m, n)
    y: Tensor
    true_y: Tensor
    square: Tensor  # ‖φ‖²
    others: Tensor  # P − 1
    lr: Tensor
    radius: Tensor
    alpha: Tensor
    level: Tensor
    phi: Tensor  # (cells, 2m), coefficients of φ in w − w0
    xi: Tensor  # (cells, 2m, n), coefficients of the ξ
    activation: str

    def take(self, keep: Tensor) -> "_Working":
        parts = {part.name: getattr(self, part.name)[keep] for part in fields(self)[:-1]}
        return _Working(**parts, activation=self.activation)

    def responses(self) -> tuple[Tensor, Tensor]:
        a = self.a0 + self.phi * self.square[:, None]
        return a, torch.baddbmm(self.b0, self.xi, self.gram)

    def outputs(self, a: Tensor, b: Tensor) -> Tensor:
        value, m = VALUE[self.activation], a.shape[1] // 2
        signs = _signs(m) / m
        signal = torch.where(
            self.true_y > 0, (value(a) @ signs)[:, None], (value(-a) @ signs)[:, None]
        )
        return signal + self.others[:, None] * (signs @ value(b))

    def gradient(self, a: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return the coefficients of φ and of each ξ in the gradient of each filter."""
        slope, m = SLOPE[self.activation], a.shape[1] // 2
        signs = _signs(m) / m
        up = (g * (self.true_y > 0)).sum(dim=1, keepdim=True)
        down = g.sum(dim=1, keepdim=True) - up
        A = signs * (slope(a) * up - slope(-a) * down)
        B = slope(b) * (self.others[:, None] * g)[:, None] * signs[:, None]
        return A, B

    def ascent(self, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
        """Return how far SAM's perturbation moves the responses."""
        shift_a, shift_b = A * self.square[:, None], B @ self.gram
        norm = ((A * shift_a).sum(dim=1) + (B * shift_b).sum(dim=(1, 2))).clamp(min=0).sqrt()
        length = torch.where(norm > 0, self.radius / norm, 0.0)
        return length[:, None] * shift_a, length[:, None, None] * shift_b


def _working(problems: Problems, lr, radius, alpha, level, start) -> _Working:
    cells, m, n = len(problems), problems.filters, problems.samples
    gram, square = problems.noise_gram.contiguous(), problems.signal**2
    if start is None:
        phi, xi = torch.zeros(cells, 2 * m), torch.zeros(cells, 2 * m, n)
    else:
        kappa, zeta = start
        if kappa.shape != (cells, 2, m) or zeta.shape != (cells, 2, m, n):
            raise ValueError(
                f"start must hold kappa and zeta of shapes {(cells, 2, m)} and {(cells, 2, m, n)}; "
                f"got {tuple(kappa.shape)} and {tuple(zeta.shape)}."
            )
        squares = gram.diagonal(dim1=1, dim2=2)[:, None]
        phi = kappa.flatten(1) * _signs(m) / square[:, None]
        xi = zeta.flatten(1, 2) / (problems.patches - 1)[:, None, None] / squares
    return _Working(
        torch.arange(cells),
        gram,
        problems.response.flatten(1),
        problems.noise_response.flatten(1, 2).contiguous(),
        problems.y,
        problems.true_y,
        square,
        problems.patches - 1,
        lr,
        radius,
        alpha,
        level,
        phi.double(),
        xi.double(),
        problems.activation,
    )


def _signs(m: int) -> Tensor:
    return torch.cat([torch.ones(m), -torch.ones(m)]).double()


def _per_cell(name: str, value, cells: int, allowed: str, holds) -> Tensor:
    try:
        given = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        given = torch.tensor(torch.nan)
    if given.shape not in ((), (cells,)) or not (given.isfinite() & holds(given)).all():
        raise ValueError(
            f"{name} must be a finite number {allowed}, or one for each of {cells} cells; got "
            f"{value!r}."
        )
    return given.expand(cells)
