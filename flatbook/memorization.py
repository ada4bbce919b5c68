"""What models remember: how the answer at one point depends on training on another.

Estimates from models trained on known random subsets, instead of retraining without each point.
Inputs may be NumPy arrays or torch tensors; results are tensors on the CPU if any input was a
tensor and arrays otherwise, in float64.
"""

import numpy as np
from scipy.special import entr

from flatbook import checks
from flatbook.arrays import as_array, checked_design, returned, whole

__all__ = ["buckets", "influence", "influence_entropy", "memorization"]

_ROWS = 256  # training points per matrix product, so that only the result is large


def memorization(correct, design, *, standard_error: bool = False):
    r"""Estimate how much each training point's own presence decides whether it is predicted right.

    .. math::
        \operatorname{mem}(i) = \operatorname*{mean}_{t :\, i \in S_t} 1[h_t(x_i) = y_i]
            - \operatorname*{mean}_{t :\, i \notin S_t} 1[h_t(x_i) = y_i]

    over models :math:`h_t` trained on subsets :math:`S_t`. Near 1 the label can only have been
    remembered; near 0 it follows from the other points, or was not learnt at all. It estimates
    leave-one-out memorization for training sets of the subsets' size.

    Args:
        correct: Whether each model is right at each training point; or its confidence there. Shape
            ``(models, points)``.
        design: Which model was trained on which point. Shape ``(models, points)``.
        standard_error: Return errors too, the root of :math:`s_\text{in}^2/n_\text{in} +
            s_\text{out}^2/n_\text{out}` with the sample variances. They hold for models that are
            independent given the design, and are 0 where all models on each side agree.

    Returns:
        From −1 to 1; with ``standard_error`` a pair of values and errors. Shape ``(points,)``.

    Raises:
        ValueError: If the shapes disagree, a number is not finite, or a point is in no model or in
            all of them; errors need two models on each side.

    Reference:
        Feldman and Zhang (2020). What neural networks memorize and why. NeurIPS.

    Example:
        Right in both models that saw the point, and in one of two that did not.

        >>> correct, design = np.array([[1], [1], [1], [0]]), np.array([[1], [1], [0], [0]])
        >>> memorization(correct, design)
        array([0.5])
        >>> memorization(correct, design, standard_error=True)[1]
        array([0.5])
    """
    outcome, squares = _outcomes("correct", correct, "points")
    included = checked_design(design, *outcome.shape, least=1 + bool(standard_error))
    n_in = included.sum(axis=0)
    n_out = len(included) - n_in
    total_in, total = (outcome * included).sum(axis=0), outcome.sum(axis=0)
    values = total_in / n_in - (total - total_in) / n_out
    if not standard_error:
        return returned(values, correct, design)
    squares_in = (squares * included).sum(axis=0)
    variance = _variance_of_mean(total_in, squares_in, n_in)
    variance += _variance_of_mean(total - total_in, squares.sum(axis=0) - squares_in, n_out)
    return returned(values, correct, design), returned(np.sqrt(variance), correct, design)


def influence(correct, eval_correct, design, *, standard_error: bool = False):
    r"""Estimate how much each training point helps the prediction at each evaluation point.

    .. math::
        \operatorname{infl}(i, j) = \operatorname*{mean}_{t :\, i \in S_t} 1[h_t(x'_j) = y'_j]
            - \operatorname*{mean}_{t :\, i \notin S_t} 1[h_t(x'_j) = y'_j]

    for all pairs by matrix products with the design, a few training points at a time: besides the
    result nothing of its size is built. Right or wrong is counted exactly.

    Args:
        correct: Whether each model is right at each training point; or its confidence there. Shape
            ``(models, points)``.
        eval_correct: The same at each evaluation point. None takes ``correct`` for it: the
            influence of training points on one another, whose diagonal is :func:`memorization`.
            Shape ``(models, evaluated)``.
        design: Which model was trained on which point. Shape ``(models, points)``.
        standard_error: Return errors too, as :func:`memorization` does.

    Returns:
        From −1 to 1; with ``standard_error`` a pair of values and errors. Shape
        ``(points, evaluated)``.

    Raises:
        ValueError: If the shapes disagree, a number is not finite, or a point is in no model or in
            all of them; errors need two models on each side.

    Reference:
        Feldman and Zhang (2020). What neural networks memorize and why. NeurIPS.

    Example:
        The evaluation point is right exactly where the first training point was seen.

        >>> design = np.array([[1, 1], [1, 0], [0, 1], [0, 0]])
        >>> influence(design, np.array([[1], [1], [0], [0]]), design)
        array([[1.],
               [0.]])
    """
    given = correct, eval_correct, design
    outcome, squares = _outcomes("correct", correct, "points")
    included = checked_design(design, *outcome.shape, least=1 + bool(standard_error))
    if eval_correct is not None:
        outcome, squares = _outcomes("eval_correct", eval_correct, "evaluated", len(included))
    n_in = included.sum(axis=0)[:, None]
    n_out = len(included) - n_in
    weights = np.ascontiguousarray(included.T, dtype=outcome.dtype)
    total, total_squares = outcome.sum(axis=0), squares.sum(axis=0)
    values = np.empty((len(weights), outcome.shape[1]))
    errors = np.empty_like(values) if standard_error else None
    for start in range(0, len(weights), _ROWS):
        rows = slice(start, start + _ROWS)
        total_in = weights[rows] @ outcome
        np.subtract(total_in / n_in[rows], (total - total_in) / n_out[rows], out=values[rows])
        if errors is not None:
            squares_in = total_in if squares is outcome else weights[rows] @ squares
            variance = _variance_of_mean(total_in, squares_in, n_in[rows])
            variance += _variance_of_mean(total - total_in, total_squares - squares_in, n_out[rows])
            np.sqrt(variance, out=errors[rows])
    if errors is None:
        return returned(values, *given)
    return returned(values, *given), returned(errors, *given)


def influence_entropy(influence, labels, eval_labels):
    r"""Measure over how many training points of its class the influence on a point is spread.

    .. math::
        I_j = -\sum_i p_{ij} \log p_{ij}, \qquad
        p_{ij} = \frac{|\operatorname{infl}(i, j)|}{\sum_{i'} |\operatorname{infl}(i', j)|}

    over the n training points i with the label of j. Low entropy means that few points matter: j is
    atypical. The greatest value, log n, is also given to a point that nothing influences: all
    models are right there, or all wrong. Noise in the estimates spreads influence, so entropies of
    few models are too high.

    Args:
        influence: From :func:`influence`. Shape ``(points, evaluated)``.
        labels: Classes of the training points. Shape ``(points,)``.
        eval_labels: Classes of the evaluation points. Shape ``(evaluated,)``.

    Returns:
        In nats, from 0 to log n. Shape ``(evaluated,)``.

    Raises:
        ValueError: If the shapes disagree, a number is not finite, or the class of an evaluation
            point has no training points.

    Example:
        One point decides the first evaluation point, two the second.

        >>> table = np.array([[0.8, 0.3], [0.0, -0.3], [0.5, 0.5]])
        >>> influence_entropy(table, np.array([0, 0, 1]), np.array([0, 0])) / np.log(2)
        array([0., 1.])
    """
    table = as_array("influence", influence, ("points", "evaluated"))
    own = whole("labels", labels, (table.shape[0],))
    theirs = whole("eval_labels", eval_labels, (table.shape[1],))
    entropy = np.empty(len(theirs))
    for c in np.unique(theirs):
        rows, columns = np.flatnonzero(own == c), np.flatnonzero(theirs == c)
        if not len(rows):
            raise ValueError(f"labels must hold each class of eval_labels; got no {c}.")
        strength = np.abs(table[np.ix_(rows, columns)].astype(np.float64))
        strength[:, ~strength.any(axis=0)] = 1
        entropy[columns] = entr(strength / strength.sum(axis=0)).sum(axis=0)
    return returned(entropy, influence, labels, eval_labels)


def buckets(values, k: int = 5):
    """Sort numbers into k buckets of equal size; bucket 1 holds the least.

    If k does not divide their number, the first buckets hold one more. Equal values go by position,
    so they may end up in different buckets.

    Args:
        values: Finite numbers, such as :func:`influence_entropy`. Shape ``(points,)``.
        k: How many, at most one a point.

    Returns:
        The bucket of each point, from 1 to k. Shape ``(points,)``.

    Raises:
        ValueError: If a number is not finite or k is out of range.

    Example:
        >>> buckets([0.3, 0.1, 0.5, 0.2], 2)
        array([2, 1, 2, 1])
    """
    numbers = as_array("values", values, ("points",))
    k = checks.count("k", k, at_most=len(numbers))
    bucket = np.empty(len(numbers), dtype=np.int64)
    places = np.array_split(np.argsort(numbers, kind="stable"), k)
    for number, place in enumerate(places, start=1):
        bucket[place] = number
    return returned(bucket, values)


def _outcomes(name, value, points, models="models"):
    """Return outcomes and their squares.

    Right or wrong stays in float32, which counts exactly below 2²⁴ models and multiplies fast; for
    confidences the mean is taken out, lest variances cancel.
    """
    outcome = as_array(name, value, (models, points))
    if ((outcome == 0) | (outcome == 1)).all():
        outcome = outcome.astype(np.float32)
        return outcome, outcome
    outcome = outcome.astype(np.float64)
    outcome -= outcome.mean(axis=0)
    return outcome, outcome**2


def _variance_of_mean(total, squares, n):
    """Return the unbiased estimate of the variance of a mean of n numbers."""
    return np.maximum(squares - total.astype(np.float64) ** 2 / n, 0) / (n * (n - 1))
