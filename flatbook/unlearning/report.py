"""Two models side by side on the retained, forgotten and test data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from flatbook import checks
from flatbook.comparison import Estimate, over_points, point_resamples
from flatbook.rates import clopper_pearson
from flatbook.unlearning.metrics import SETS, right, tug_of_war
from flatbook.unlearning.sets import checked

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, eq=False)
class Row:
    """Two models on one set.

    Attributes:
        points: Samples in the set.
        accuracy: Share of right answers of the first and the second model.
        interval: Their Clopper–Pearson intervals of 95 %.
        difference: First less second, with what it is in resamples of the points.
        changed: Points that only the first and that only the second gets right.
    """

    points: int
    accuracy: tuple[float, float]
    interval: tuple[tuple[float, float], tuple[float, float]]
    difference: Estimate
    changed: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Report:
    """What `compare` found; prints as a table.

    Attributes:
        names: Of the two models.
        rows: One per set, ``"retain"``, ``"forget"`` and ``"test"``.
        tow: The `flatbook.unlearning.tug_of_war` of the first model with the second in place of the
            retrained one; it is the same the other way round.
    """

    names: tuple[str, str]
    rows: dict[str, Row]
    tow: Estimate

    def table(self) -> str:
        """Return the comparison as a Markdown table: accuracies in percent, 95 % intervals."""
        first, second = self.names
        lines = [
            f"| set | points | {first} | {second} | difference |",
            "|---|---:|---:|---:|---:|",
        ]
        for name, row in self.rows.items():
            cells = [
                f"{100 * value:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
                for value, (low, high) in zip(row.accuracy, row.interval, strict=True)
            ]
            value, low, high = (100 * v for v in row.difference.recorded())
            cells.append(f"{value:+.1f} [{low:+.1f}, {high:+.1f}]")
            lines.append(f"| {name} | {row.points} | {' | '.join(cells)} |")
        value, low, high = self.tow.recorded()
        lines += ["", f"Tug-of-war: {value:.3f} [{low:.3f}, {high:.3f}]"]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def _repr_markdown_(self) -> str:
        return self.table()

    def plot(self, ax: Axes, *, colours: Sequence[str] = ("C0", "C1")) -> list:
        """Draw the accuracies with their intervals, a row for each set.

        Args:
            ax: Where to draw; the retained set comes on top.
            colours: Of the two models; by default the first two of the style in use.

        Returns:
            One container for each model, as of ``ax.errorbar``.
        """
        drawn = []
        heights = np.arange(len(self.rows))
        for model, (colour, marker, shift) in enumerate(
            zip(colours, "os", (-0.12, 0.12), strict=True)
        ):
            values = np.array([row.accuracy[model] for row in self.rows.values()])
            ends = np.array([row.interval[model] for row in self.rows.values()])
            drawn.append(
                ax.errorbar(
                    values,
                    heights + shift,
                    xerr=np.abs(ends.T - values),
                    color=colour,
                    fmt=marker,
                    capsize=0,
                    label=self.names[model],
                )
            )
        ax.set_yticks(heights, list(self.rows))
        ax.set_ylim(len(self.rows) - 0.5, -0.5)
        ax.set_xlabel("accuracy")
        ax.grid(visible=False, axis="y")
        ax.legend(loc="best")
        return drawn


def compare(
    first: nn.Module,
    second: nn.Module,
    *,
    retain,
    forget,
    test,
    names: tuple[str, str] = ("unlearned", "retrained"),
    draws: int = 1000,
    seed: int = 0,
    batch_size: int = 512,
) -> Report:
    """Compare two models on R, F and test data.

    Both see the same points, so the interval of a difference comes from resampling points, not
    from the two separate intervals. The models are taken as they are: what another training seed
    would change is in none of the intervals. Where the two models agree on all points, that of
    the difference is a single number.

    Args:
        first: Maps inputs to logits; taken in evaluation mode and left untouched.
        second: Likewise; usually the model retrained without F.
        retain: A TensorDataset or a pair (x, y), of 2 points at least.
        forget: Likewise.
        test: Likewise.
        names: Of the two models.
        draws: Resamples of the points of each set.
        seed: Of the resamples.
        batch_size: Samples per pass.

    Raises:
        ValueError: If a set has fewer than 2 points or does not fit a model, or a number is out of
            range.

    Example:
        >>> import torch
        >>> data = torch.eye(2), torch.tensor([0, 1])
        >>> report = compare(nn.Identity(), nn.Identity(), retain=data, forget=data, test=data)
        >>> report.tow.value, report.rows["forget"].accuracy
        (1.0, (1.0, 1.0))
    """
    models = checks.module("first", first), checks.module("second", second)
    checks.count("batch_size", batch_size)
    checks.count("seed", seed, at_least=0)
    if not isinstance(names, tuple | list) or [type(name) for name in names] != [str, str]:
        raise ValueError(f"names must be two, one for each model; got {names!r}.")
    rows, estimates = {}, []
    for number, (name, data) in enumerate(zip(SETS, (retain, forget, test), strict=True)):
        flags = [
            right(model, checked(model, name, data)[0], batch_size).cpu().numpy()
            for model in models
        ]
        n = len(flags[0])
        if n < 2:
            raise ValueError(f"{name} must have at least 2 points to resample; got {n}.")
        drawn = point_resamples(n, draws=draws, seed=seed + number)  # sets are independent
        pair = [over_points(own, drawn) for own in flags]
        hits = [int(own.sum()) for own in flags]
        rows[name] = Row(
            n,
            (hits[0] / n, hits[1] / n),
            (clopper_pearson(hits[0], n), clopper_pearson(hits[1], n)),
            pair[0] - pair[1],
            (int((flags[0] & ~flags[1]).sum()), int((flags[1] & ~flags[0]).sum())),
        )
        estimates += pair

    def tow(*shares: float) -> float:
        own, other = (dict(zip(SETS, shares[i::2], strict=True)) for i in (0, 1))
        return tug_of_war(own, other)

    return Report(tuple(names), rows, Estimate.of(tow, *estimates))
