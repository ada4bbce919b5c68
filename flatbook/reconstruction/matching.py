"""Which guess shows which sample, and what the same score is worth without an attack.

A search returns more guesses than there are samples, in no order. Each sample is scored by the
guess that fits it best, which flatters: with many guesses something always fits a little. So a
score stands beside `baselines`, and the guesses behind it are counted, since one blur may serve
many samples.
"""

import math
from typing import Literal, NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from flatbook import checks
from flatbook.arrays import as_array, listed, returned
from flatbook.reconstruction.similarity import correlation, distance, flat_pair, standardized

Measure = Literal["correlation", "distance"]


class Matches(NamedTuple):
    """The guess that fits each sample.

    Attributes:
        guess: Its number; −1 for none. Shape ``(samples,)``.
        score: Correlation, higher is better; or Euclidean distance, lower is. The worst possible
            for none. Shape ``(samples,)``.
        distinct: How many different guesses were used.
    """

    guess: np.ndarray | Tensor
    score: np.ndarray | Tensor
    distinct: int

    def median(self) -> float:
        """Return the median score."""
        return float(np.median(np.asarray(self.score)))

    def found(self, threshold: float) -> int:
        """Count the different guesses that fit a sample to a correlation above ``threshold``.

        Example:
            Two samples share the guess 4.

            >>> Matches(np.array([4, 4, 2]), np.array([0.95, 0.92, 0.3]), 2).found(0.9)
            1
        """
        above = np.asarray(self.score) > threshold
        return len(set(np.asarray(self.guess)[above].tolist()))


def match(
    guesses,
    samples,
    *,
    measure: Measure = "correlation",
    one_to_one: bool = False,
    signed: bool = True,
) -> Matches:
    r"""Find for each sample the guess that fits it best.

    By default a guess may serve several samples. One to one, the sum of the scores is the best
    possible over all ways to give each sample a guess of its own; with fewer guesses than samples,
    some get none.

    Args:
        guesses: Shape ``(guesses, …)``.
        samples: Of the same size. Shape ``(samples, …)``.
        measure: ``"correlation"`` or ``"distance"``.
        one_to_one: Use each guess once at most.
        signed: False lets a guess count as its negative too, for attacks that cannot know the sign.

    Returns:
        Numbers and scores of the guesses, as tensors if any input was one.

    Raises:
        ValueError: If sizes disagree, a number is not finite, or an argument is none of the above.

    Reference:
        Kuhn (1955). The Hungarian method for the assignment problem. Naval Research Logistics.

    Example:
        Both samples look most like the first guess, which can serve only one of them.

        >>> guesses, samples = [[0.0], [5.0]], [[1.0], [2.0]]
        >>> match(guesses, samples, measure="distance")
        Matches(guess=array([0, 0]), score=array([1., 2.]), distinct=1)
        >>> match(guesses, samples, measure="distance", one_to_one=True)
        Matches(guess=array([0, 1]), score=array([1., 3.]), distinct=2)
    """
    checks.flag("one_to_one", one_to_one)
    table = _table(guesses, samples, measure, signed)
    if one_to_one:
        rows, columns = linear_sum_assignment(table, maximize=measure == "correlation")
        guess = np.full(table.shape[1], -1)
        guess[columns] = rows
    else:
        guess = table.argmax(axis=0) if measure == "correlation" else table.argmin(axis=0)
    worst = (-1.0 if signed else 0.0) if measure == "correlation" else np.inf
    score = np.where(guess < 0, worst, table[guess, np.arange(table.shape[1])])
    used = len(set(guess[guess >= 0].tolist()))
    given = (guesses, samples)
    return Matches(returned(guess, *given), returned(score, *given), used)


def vote(guesses, samples, *, ratio: float = 1.1):
    r"""Average for each sample the guesses that fit it nearly as well as the best.

    Guesses are scaled to mean 0 and length 1, where :math:`\|g - x\|^2 = 2 (1 - r)` with their
    correlation r, and all within ``ratio`` times the least distance are averaged. It takes the
    samples to do so: the result is a view of the guesses for the eye, not what an attacker has.

    Args:
        guesses: Shape ``(guesses, …)``.
        samples: Of the same size. Shape ``(samples, …)``.
        ratio: From 1, which takes the best alone.

    Returns:
        A mean of 0 and a length of 1 each, or 0 where the guess has no contrast. Shape
        ``(samples, …)``.

    Raises:
        ValueError: If sizes disagree, a number is not finite, or ``ratio`` is below 1.

    Reference:
        Haim et al. (2022). Reconstructing training data from trained neural networks. NeurIPS.

    Example:
        Two guesses err to either side of the sample, and their mean is right.

        >>> x = np.array([[1.0, 0.0, -1.0]])
        >>> guesses = np.array([[1.0, 0.2, -1.2], [1.2, -0.2, -1.0], [0.0, 1.0, -1.0]])
        >>> vote(guesses, x).round(4)
        array([[ 0.7071,  0.    , -0.7071]])
    """
    if checks.positive("ratio", ratio) < 1:
        raise ValueError(f"ratio must be at least 1; got {ratio}.")
    rows, targets = flat_pair("guesses", guesses, "samples", samples)
    shape = as_array("samples", samples, (None,) * max(np.ndim(samples), 2)).shape
    gap = np.sqrt(2 * np.clip(1 - correlation(rows, targets), 0, None))
    near = gap <= ratio * gap.min(axis=0) + 1e-12
    rows = standardized(rows)
    mean = (near.T @ rows) / near.sum(axis=0)[:, None]
    return returned(standardized(mean).reshape(shape), guesses, samples)


def baselines(
    guesses,
    samples,
    *,
    rows=None,
    held_out=None,
    placebo=None,
    measure: Measure = "correlation",
    signed: bool = True,
) -> dict[str, Matches]:
    r"""Score an attack beside what needs no attack.

    - ``"attack"``: the guesses against the samples.
    - ``"rows"``: the rows of the first layer in place of guesses: anyone who has the weights has
      these.
    - ``"held out"``: images that were not trained on in place of guesses: what knowing the kind of
      data is worth. More images score higher, so take as many as there are guesses.
    - ``"placebo"``: the guesses against images that were not trained on in place of the samples:
      what is found where nothing is to be found.

    Args:
        guesses: Shape ``(guesses, …)``.
        samples: Of the same size. Shape ``(samples, …)``.
        rows: Shape ``(neurons, …)``.
        held_out: Shape ``(images, …)``.
        placebo: As many as samples, for a score of the same kind. Shape ``(samples, …)``.
        measure: As for `match`.
        signed: As for `match`. The rows count with either sign in any case, since a neuron does.

    Returns:
        The matches of each by name, those that were given.

    Raises:
        ValueError: As for `match`, or if the placebo has another number of images.

    Example:
        >>> samples, guesses = np.eye(3), np.eye(3) + 0.1
        >>> table = baselines(guesses, samples, rows=-np.eye(3), held_out=np.eye(3)[:1])
        >>> {name: round(found.median(), 2) for name, found in table.items()}
        {'attack': 1.0, 'rows': 1.0, 'held out': -0.5}
    """
    options = {"measure": measure, "signed": signed}
    table = {"attack": match(guesses, samples, **options)}
    if rows is not None:
        shape = np.shape(samples)
        if hasattr(rows, "reshape") and math.prod(np.shape(rows)) % math.prod(shape[1:]) == 0:
            rows = rows.reshape(-1, *shape[1:])
        table["rows"] = match(rows, samples, measure=measure, signed=False)
    if held_out is not None:
        table["held out"] = match(held_out, samples, **options)
    if placebo is not None:
        wanted, got = np.shape(samples)[0], np.shape(listed("placebo", placebo))[:1]
        if got != (wanted,):
            came = got[0] if got else type(placebo).__name__
            raise ValueError(f"placebo must hold as many images as samples, {wanted}; got {came}.")
        table["placebo"] = match(guesses, placebo, **options)
    return table


def _table(guesses, samples, measure, signed) -> np.ndarray:
    checks.choice("measure", measure, ("correlation", "distance"))
    checks.flag("signed", signed)
    pair = flat_pair("guesses", guesses, "samples", samples)
    if measure == "correlation":
        table = correlation(*pair)
        return table if signed else np.abs(table)
    table = distance(*pair)
    return table if signed else np.minimum(table, distance(-pair[0], pair[1]))
