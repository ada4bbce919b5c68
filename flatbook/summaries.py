"""Means over seeds, their errors, and what the two allow one to say."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flatbook import checks
from flatbook.jsonfile import plain


@dataclass(frozen=True)
class Summary:
    """Mean and standard error of repeated measurements.

    Attributes:
        mean: Their mean.
        standard_error: Sample standard deviation over the square root of ``n``; nan if ``n`` is 1.
        n: How many there are.
        values: The measurements themselves, in the order of the seeds; may be empty.
    """

    mean: float
    standard_error: float
    n: int
    values: tuple[float, ...] = ()

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        r"""Return Student's t interval for the mean, :math:`\bar x \pm t_{n-1}\, s/\sqrt n`.

        It covers the true mean with probability ``level`` when the measurements are independent
        and normal. Intervals that overlap do not show that two means agree: compare paired seeds
        with :func:`paired_difference`.

        Args:
            level: Coverage, between 0 and 1.

        Returns:
            The lower and the upper end.

        Raises:
            ValueError: If ``level`` is not strictly inside (0, 1), or ``n`` is 1.

        Example:
            With two values, Student's t is Cauchy's law and its 75 % point is 1.

            >>> low, high = summarise([1.0, 3.0]).interval(level=0.5)
            >>> print(f"{low:.6f} {high:.6f}")
            1.000000 3.000000
        """
        from scipy.special import stdtrit

        if not 0 < checks.fraction("level", level) < 1:
            raise ValueError(f"level must lie strictly between 0 and 1; got {level}.")
        if self.n < 2:
            raise ValueError(f"An interval needs at least 2 measurements; got {self.n}.")
        half = float(stdtrit(self.n - 1, (1 + level) / 2)) * self.standard_error
        return self.mean - half, self.mean + half

    def __str__(self) -> str:
        """Write the mean and half its 95 % interval, to the two digits that the interval allows."""
        if self.n < 2:
            return f"{self.mean:.4g} (n = 1)"
        half = self.interval()[1] - self.mean
        if not (math.isfinite(half) and half > 0):
            return f"{self.mean:.6g} ± {half:.2g} (n = {self.n})"
        digits = 1 - math.floor(math.log10(half))
        if not 0 <= digits <= 6:
            return f"{self.mean:.4g} ± {half:.2g} (n = {self.n})"
        return f"{self.mean:.{digits}f} ± {half:.{digits}f} (n = {self.n})"


def summarise(values: Sequence[float]) -> Summary:
    r"""Return the mean and standard error of independent measurements.

    With the sample variance :math:`s^2 = \frac{1}{n-1}\sum_i (x_i - \bar x)^2` the standard
    error is :math:`s/\sqrt n`.

    Args:
        values: One finite number per seed; a sequence, array or tensor. Shape ``(seeds,)``.

    Raises:
        ValueError: If ``values`` is empty, not one-dimensional, or holds nan or an infinity: a
            diverged seed is a finding of its own and must not vanish in a mean.

    Example:
        >>> summarise([1.0, 2.0, 3.0])
        Summary(mean=2.0, standard_error=0.577350269189..., n=3, values=(1.0, 2.0, 3.0))
        >>> print(summarise([0.91, 0.92, 0.93]))
        0.920 ± 0.025 (n = 3)
    """
    values = _measurements("values", values)
    n = len(values)
    error = statistics.stdev(values) / math.sqrt(n) if n > 1 else math.nan
    return Summary(statistics.fmean(values), error, n, values)


def paired_difference(a: Sequence[float] | Summary, b: Sequence[float] | Summary) -> Summary:
    r"""Summarise the differences :math:`a_i - b_i` of measurements that share their seeds.

    Pairing removes what the two have in common, such as initial weights and the order of the
    data; its t interval is usually far narrower than the two separate ones.

    Args:
        a: Measurements, or a :class:`Summary` that holds them. Shape ``(seeds,)``.
        b: The same seeds in the same order.

    Returns:
        The summary of the differences; its :meth:`~Summary.interval` is the paired t interval.

    Raises:
        ValueError: If the lengths differ, or a summary does not hold its measurements.

    Example:
        Seeds that differ by 10 and methods that differ by exactly 1:

        >>> paired_difference([11.0, 21.0, 31.0], [10.0, 20.0, 30.0]).interval()
        (1.0, 1.0)
    """
    a, b = (
        _measurements(name, given.values if isinstance(given, Summary) else given)
        for name, given in (("a", a), ("b", b))
    )
    if len(a) != len(b):
        raise ValueError(f"a and b must share their seeds; got {len(a)} and {len(b)} values.")
    return summarise([left - right for left, right in zip(a, b, strict=True)])


def is_summary(value: Any) -> bool:
    """Return whether ``value``, read from a run, is a :class:`Summary` written as a mapping."""
    needed = {"mean", "standard_error", "n"}
    if not (isinstance(value, dict) and needed <= value.keys() <= needed | {"values"}):
        return False
    n, values = value["n"], value.get("values", ())
    return (
        type(n) is int
        and n >= 1
        and isinstance(values, list | tuple)
        and len(values) in (0, n)
        and all(type(x) in (int, float) for x in (value["mean"], value["standard_error"], *values))
        and not value["standard_error"] < 0
    )


def _measurements(name: str, values) -> tuple[float, ...]:
    values = plain(values, name)
    numbers = isinstance(values, list) and all(type(value) in (int, float) for value in values)
    if not (numbers and values and all(math.isfinite(value) for value in values)):
        raise ValueError(f"{name} must be a non-empty row of finite numbers; got {values!r:.80}.")
    return tuple(float(value) for value in values)
