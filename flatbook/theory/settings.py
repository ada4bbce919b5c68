r"""Settings of the signal–noise experiments: a problem, a rate, a radius, and thresholds.

The rate is :math:`\eta = \frac m2 / \max((P-1)^2 \sigma_p^2 d / B, \|\varphi\|^2)`, so that a step
changes the margin of a sample by at most one half; filters start with :math:`\sigma_0 = s /
(\sigma_p \sqrt d)`; SAM's radius is :math:`\tau = u \, \sigma_0 \sqrt{m B}`. B is the number of
samples in full batches.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from flatbook import checks
from flatbook.arrays import as_array
from flatbook.theory.coordinates import Problems
from flatbook.theory.descent import Training, train
from flatbook.theory.wishart import sample_problems

HARMFUL = 0.1
"""The test error from which overfitting counts as harmful."""

STEPS = 6000
"""Steps at most where training stops at a loss."""


@dataclass(frozen=True)
class Setting:
    r"""A problem and how it is trained.

    Attributes:
        n: Samples.
        d: Length of a patch.
        signal: :math:`\|\varphi\|`.
        patches: P.
        noise: :math:`\sigma_p`.
        filters: m.
        init: s, from which :math:`\sigma_0 = s / (\sigma_p \sqrt d)`.
        batch: B; None is full batches.
    """

    n: int = 20
    d: int = 2000
    signal: float = 6.0
    patches: int = 2
    noise: float = 1.0
    filters: int = 10
    init: float = 0.1
    batch: int | None = None

    @property
    def size(self) -> int:
        """Samples in a batch."""
        return self.batch or self.n

    def scale(self) -> float:
        r"""Return :math:`d^{1/4} n^{-1/4} (P - 1) \sigma_p`, the unit of thresholds."""
        return (self.d / self.n) ** 0.25 * (self.patches - 1) * self.noise

    def rate(self, signal=None):
        r""":math:`\eta` for one :math:`\|\varphi\|` or several."""
        signal = self.signal if signal is None else signal
        noise = (self.patches - 1) ** 2 * self.noise**2 * self.d / self.size
        return 0.5 * self.filters / np.maximum(noise, np.square(signal))

    def radius(self, u):
        r""":math:`\tau` at a ratio, or at several."""
        return u * self.init / self.noise * (self.filters * self.size / self.d) ** 0.5

    def problems(self, signals, seed: int, *, flip: float = 0.0) -> Problems:
        r"""Draw one problem, and return it with signals of several norms."""
        signals = torch.as_tensor(signals, dtype=torch.float64).reshape(-1)
        one = sample_problems(
            self.n,
            d=[self.d],
            patches=self.patches,
            signal=1.0,
            noise=self.noise,
            filters=self.filters,
            init=self.init / self.noise / self.d**0.5,
            flip=flip,
            seed=seed,
        )
        cells = one[torch.zeros(len(signals), dtype=torch.int64)]
        response = cells.response * signals[:, None, None]
        return replace(cells, signal=signals, response=response)

    def train(self, problems: Problems, steps: int, u=0.0, *, slower: float = 1.0, **options):
        """Train by gradient descent, or by SAM at a ratio or several."""
        lr = slower * torch.as_tensor(self.rate(problems.signal.numpy()))
        radius = self.radius(u)
        return train(problems, steps=steps, lr=lr, radius=radius, batch_size=self.batch, **options)


def crossing(x, values, level: float) -> float:
    """Return where a falling curve is last above a level, interpolated; nan if it never crosses.

    Args:
        x: Ascending. Shape ``(points,)``.
        values: Of the curve. Shape ``(points,)``.
        level: To cross.

    Raises:
        ValueError: If the arrays are empty or disagree, or a number is not finite.

    Example:
        >>> crossing([0.0, 1.0, 2.0], [0.5, 0.3, 0.1], 0.2)
        1.5
    """
    x = as_array("x", x, ("points",)).astype(np.float64)
    values = as_array("values", values, (len(x),)).astype(np.float64)
    level = checks.finite("level", level)
    above = np.flatnonzero(values > level)
    if len(above) == 0 or above[-1] == len(x) - 1:
        return float("nan")
    i = above[-1]
    return float(x[i] + (x[i + 1] - x[i]) * (values[i] - level) / (values[i] - values[i + 1]))


def along(setting: Setting, problems: Problems, budgets, u=0.0, **options) -> Iterator[Training]:
    """Train on and on, and yield what is reached at each of some ascending budgets."""
    start, before = options.pop("start", None), 0
    for budget in budgets:
        at = setting.train(problems, budget - before, u, start=start, seed=budget, **options)
        start, before = (at.kappa, at.zeta), budget
        yield at
