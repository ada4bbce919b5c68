r"""Interpolating linear models under a curvature penalty, and attacks on them in closed form.

The data are n rows :math:`x_i` with targets :math:`y_i`, fewer than there are weights. Among all
:math:`w` with :math:`Xw = y`, training is modelled as taking the one of least
:math:`w^\top G_\eta w`, where :math:`G_\eta = I + \eta\Sigma` adds to the squared norm a penalty
on the curvature :math:`\Sigma`. Everything along this path follows from one singular value
decomposition. Let :math:`w_0` be the solution of least norm, the columns of N an orthonormal
basis of the null space of X, and :math:`\Sigma^{1/2} N = P T Q^\top` with T diagonal. With
:math:`c = P^\top \Sigma^{1/2} w_0`,

.. math::
    w_\eta = w_0 - N Q \, \frac{\eta T}{1 + \eta T^2} \, c ,
    \qquad
    \sigma^2(\eta) = \sigma^2(\infty) + \sum_i \frac{c_i^2}{(1 + \eta t_i^2)^2} .

Tensors are accepted; what comes back is NumPy in float64. Numbers are judged by the precision in
which they came: singular values below it count as zero.
"""

from typing import NamedTuple

import numpy as np
import torch
from scipy.special import ndtr

from flatbook import checks


def min_norm_interpolant(X, y, G=None) -> np.ndarray:
    r"""Find the weights that fit the data exactly and have the least G-norm.

    .. math::
        \operatorname*{argmin}_w \{ w^\top G w : Xw = y \}
        = G^{-1} X^\top (X G^{-1} X^\top)^{-1} y

    where the inverses exist. They need not: X may have dependent rows, as long as y agrees with
    them, and G may be singular. Where several solutions tie in the G-norm, the one of least
    Euclidean norm is returned, which is the limit for :math:`G + \epsilon I`,
    :math:`\epsilon \to 0`.

    Args:
        X: The samples. Shape ``(samples, weights)``.
        y: Their targets. Shape ``(samples,)``.
        G: Symmetric and positive semidefinite; None is the identity. Shape
            ``(weights, weights)``.

    Returns:
        The weights. Shape ``(weights,)``.

    Raises:
        ValueError: If no weights fit the data to half of the digits, G is not symmetric or has a
            negative eigenvalue, shapes disagree, or a number is not finite.

    Reference:
        Golub and Van Loan, *Matrix Computations*, 2013, section 6.2 (the null-space method).

    Example:
        Two equal inputs share the target; the penalty on the second moves the load to the first.

        >>> min_norm_interpolant([[1.0, 1.0]], [2.0])
        array([1., 1.])
        >>> min_norm_interpolant([[1.0, 1.0]], [2.0], np.diag([1.0, 3.0]))
        array([1.5, 0.5])
    """
    start = _solve(X, y)
    if G is None:
        return start.least
    path = _path(start, _root("G", G, len(start.least)))
    return _weights(path, np.array([np.inf]))[0]


def output_variance(w, Sigma) -> np.ndarray | float:
    r"""Compute the variance of a linear model's output on unseen inputs.

    .. math:: \sigma^2 = w^\top \Sigma w = \operatorname{Var}(w^\top x)

    if :math:`\Sigma` is the covariance of the inputs. If it is their second moment
    :math:`\mathbb{E}\,xx^\top`, so is the result that of the output, and the variance is less by
    the square of the mean.

    Args:
        w: The weights, or a row for each of several models. Shape ``(weights,)`` or
            ``(models, weights)``.
        Sigma: Symmetric and positive semidefinite. Shape ``(weights, weights)``.

    Returns:
        A number, or an array of shape ``(models,)``.

    Raises:
        ValueError: If ``Sigma`` is not symmetric or has a negative eigenvalue, shapes disagree,
            or a number is not finite.

    Example:
        >>> output_variance([1.0, 2.0], np.diag([3.0, 1.0]))
        7.0
    """
    several = getattr(w, "ndim", None) == 2 or (not hasattr(w, "ndim") and np.ndim(w) == 2)
    w, _ = _array("w", w, ("models", "weights") if several else ("weights",))
    root = _root("Sigma", Sigma, w.shape[-1])
    return _plain(np.square(w @ root.T).sum(axis=-1))  # as a sum of squares, never below zero


def variance_path(X, y, Sigma, etas) -> np.ndarray:
    r"""Compute the output variance of the interpolants as the curvature penalty grows.

    .. math::
        \sigma^2(\eta) = w_\eta^\top \Sigma w_\eta
        = \sigma^2(\infty) + \sum_i \frac{c_i^2}{(1 + \eta t_i^2)^2} ,

    in the notation of this module: convex and never rising, strictly falling for all
    :math:`\eta` unless :math:`N^\top \Sigma w_0 = 0`, when it is constant. The limit is the least
    variance of any interpolant, :math:`y^\top (X \Sigma^{-1} X^\top)^{-1} y` where the inverses
    exist.

    Args:
        X: The samples. Shape ``(samples, weights)``.
        y: Their targets. Shape ``(samples,)``.
        Sigma: Covariance of unseen inputs, which is also the curvature that is penalized;
            symmetric and positive semidefinite. Shape ``(weights, weights)``.
        etas: Strengths of the penalty, from 0; ``inf`` is the limit. Shape ``(strengths,)``.

    Returns:
        Shape ``(strengths,)``.

    Raises:
        ValueError: As for :func:`min_norm_interpolant`, or if a strength is negative or nan.

    Example:
        >>> variance_path([[1.0, 1.0]], [2.0], np.diag([1.0, 3.0]), [0.0, 1.0, np.inf])
        array([4.        , 3.11111111, 3.        ])
    """
    path, etas = _path_at(X, y, Sigma, etas)
    decay = 1 / (1 + etas[:, None] * path.t**2)
    return path.least_variance + decay**2 @ path.c**2


def variance_slope(X, y, Sigma, etas) -> np.ndarray:
    r"""Compute the derivative of :func:`variance_path` in the strength of the penalty.

    .. math::
        \frac{d\sigma^2}{d\eta}
        = -2\, (N^\top \Sigma w_\eta)^\top (N^\top G_\eta N)^{-1} (N^\top \Sigma w_\eta)
        = -2 \sum_i \frac{c_i^2 t_i^2}{(1 + \eta t_i^2)^3} \le 0 .

    Args:
        X: The samples. Shape ``(samples, weights)``.
        y: Their targets. Shape ``(samples,)``.
        Sigma: As for :func:`variance_path`. Shape ``(weights, weights)``.
        etas: As for :func:`variance_path`. Shape ``(strengths,)``.

    Returns:
        In variance per unit of strength, 0 at ``inf``. Shape ``(strengths,)``.

    Raises:
        ValueError: As for :func:`variance_path`.

    Example:
        Here :math:`w_\eta = (1 + t, 1 - t)` with :math:`t = \eta/(1 + 2\eta)`, and
        :math:`\sigma^2 = 4 - 4t + 4t^2`.

        >>> variance_slope([[1.0, 1.0]], [2.0], np.diag([1.0, 3.0]), [0.0, 0.5])
        array([-4. , -0.5])
    """
    path, etas = _path_at(X, y, Sigma, etas)
    decay = 1 / (1 + etas[:, None] * path.t**2)
    return -2 * decay**3 @ (path.c * path.t) ** 2


def interpolant_path(X, y, Sigma, etas) -> np.ndarray:
    r"""Find the interpolants themselves as the curvature penalty grows.

    .. math:: w_\eta = \operatorname*{argmin}_w \{ w^\top (I + \eta\Sigma) w : Xw = y \}

    Args:
        X: The samples. Shape ``(samples, weights)``.
        y: Their targets. Shape ``(samples,)``.
        Sigma: As for :func:`variance_path`. Shape ``(weights, weights)``.
        etas: As for :func:`variance_path`. Shape ``(strengths,)``.

    Returns:
        A row for each strength. Shape ``(strengths, weights)``.

    Raises:
        ValueError: As for :func:`variance_path`.

    Example:
        >>> interpolant_path([[1.0, 1.0]], [2.0], np.diag([1.0, 3.0]), [0.0, 1.0, np.inf])
        array([[1.        , 1.        ],
               [1.33333333, 0.66666667],
               [1.5       , 0.5       ]])
    """
    return _weights(*_path_at(X, y, Sigma, etas))


def threshold_fpr(mean, std, *, threshold=1.0) -> np.ndarray | float:
    r"""Compute the share of non-members that an attack by one threshold takes for members.

    .. math:: \Pr[ N(\mu, \sigma^2) \ge t ] = \Phi\Bigl( -\frac{t - \mu}{\sigma} \Bigr)

    Members of an interpolated training set have margin 1, so at t = 1 every member is found, and
    the advantage of the attack is one minus this number.

    Args:
        mean: Of the non-members' margins. Any shape that broadcasts with the others.
        std: Their standard deviation, from 0. It is not the root of the second moment.
        threshold: From which margin on the attack says "member".

    Returns:
        Between 0 and 1; a number if all arguments are.

    Raises:
        ValueError: If a standard deviation is negative, or a number is not finite.

    Example:
        >>> threshold_fpr(1.0, 0.3)
        0.5
        >>> round(threshold_fpr(0.0, 1.0), 6)
        0.158655
    """
    mean, std = _numbers("mean", mean), _numbers("std", std, at_least_zero=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        z = (mean - _numbers("threshold", threshold)) / std
    return _plain(ndtr(np.where(np.isnan(z), np.inf, z)))  # no spread, and on the threshold


def likelihood_ratio_advantage(gap, std, noise) -> np.ndarray | float:
    r"""Compute the advantage of the best attack on one Gaussian output.

    Members give :math:`N(y, \tau^2)` and non-members :math:`N(\mu, \sigma^2)`. No test has a larger
    difference of true and false positive rate than that of the likelihood ratio against 1, and
    it is the total variation of the two laws,

    .. math::
        \int (p - q)^+ = \Phi\Bigl(\frac{u_2}{\tau}\Bigr) - \Phi\Bigl(\frac{u_1}{\tau}\Bigr)
        - \Phi\Bigl(\frac{u_2 - g}{\sigma}\Bigr) + \Phi\Bigl(\frac{u_1 - g}{\sigma}\Bigr) ,
        \qquad g = |y - \mu| ,

    for :math:`\sigma > \tau`, where :math:`u_1 < u_2` are the signed distances from y, toward
    :math:`\mu`, at which the densities p and q cross. It is 1 if :math:`\tau = 0 < \sigma`, and
    not monotone in :math:`\sigma`: for small :math:`\tau` it is least near :math:`\sigma = g`.

    Args:
        gap: Distance g of the two means. Any shape that broadcasts with the others.
        std: Standard deviation :math:`\sigma` of the non-members, from 0.
        noise: Standard deviation :math:`\tau` of the members, from 0.

    Returns:
        Between 0 and 1; a number if all arguments are.

    Raises:
        ValueError: If a standard deviation is negative, or a number is not finite.

    Reference:
        Neyman and Pearson, On the problem of the most efficient tests of statistical hypotheses,
        1933.

    Example:
        Equal spreads whose means lie two standard deviations apart: :math:`2\Phi(1) - 1`.

        >>> round(likelihood_ratio_advantage(2.0, 1.0, 1.0), 6)
        0.682689
        >>> likelihood_ratio_advantage(0.3, 1.0, 0.0)
        1.0
    """
    gap = np.abs(_numbers("gap", gap))
    std = _numbers("std", std, at_least_zero=True)
    noise = _numbers("noise", noise, at_least_zero=True)
    gap, wide, narrow = np.broadcast_arrays(gap, np.maximum(std, noise), np.minimum(std, noise))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        # Only ratios matter. With u = s v, in units of the wider law, the densities cross where
        # (1 - s²) v² + 2 s g v = g² - 2 log s; solved so that nothing cancels, also at s = 1.
        g, s = np.minimum(gap / wide, 1e100), narrow / wide
        same = (g == 0) & (s == 1) | (wide == 0) & (gap == 0)
        square = g**2 - 2 * np.log(s)
        low = -(s * g + np.sqrt(g**2 - 2 * (1 - s) * (1 + s) * np.log(s)))
        v1, v2 = low / ((1 - s) * (1 + s)), -square / low
        value = ndtr(v2) - ndtr(v1) - ndtr(s * v2 - g) + ndtr(s * v1 - g)
    value = np.where((narrow == 0) | (s == 0), 1.0, value)  # s may underflow
    return _plain(np.where(same, 0.0, np.clip(value, 0.0, 1.0)))


class _Start(NamedTuple):
    """What X and y say: the solution of least norm, and what they leave open."""

    least: np.ndarray
    null: np.ndarray  # orthonormal columns
    noise: float  # how far the columns may be off


class _Path(NamedTuple):
    start: _Start
    c: np.ndarray
    t: np.ndarray
    directions: np.ndarray  # a column for each t
    least_variance: float


def _solve(X, y) -> _Start:
    X, x_unit = _array("X", X, ("samples", "weights"))
    y, y_unit = _array("y", y, (len(X),))
    u, s, vt = np.linalg.svd(X, full_matrices=True)
    size = max(X.shape)
    rank = int((s > s[0] * size * x_unit).sum())
    least = vt[:rank].T @ ((u[:, :rank].T @ y) / s[:rank])
    missed = np.linalg.norm(u[:, rank:].T @ y)
    if missed > np.sqrt(max(x_unit, y_unit)) * np.linalg.norm(y):  # agree to half of the digits
        raise ValueError(
            f"X and y must agree, so that some w gives X w = y; got X of shape {X.shape} and rank "
            f"{rank}, whose range y misses by {missed:.2g}."
        )
    worst = s[0] / s[rank - 1] if rank else 1.0
    return _Start(least, vt[rank:].T, size * worst * np.finfo(float).eps)


def _path(start: _Start, root: np.ndarray) -> _Path:
    p, t, qt = np.linalg.svd(root @ start.null, full_matrices=False)
    # What the root sees of the other directions is rounding: they stay where they are.
    seen = t > np.linalg.norm(root) * start.noise
    p, t, directions = p[:, seen], t[seen], start.null @ qt[seen].T
    output = root @ start.least
    c = p.T @ output
    return _Path(start, c, t, directions, float(np.square(output - p @ c).sum()))


def _path_at(X, y, Sigma, etas) -> tuple[_Path, np.ndarray]:
    start = _solve(X, y)
    path = _path(start, _root("Sigma", Sigma, len(start.least)))
    etas = _numbers("etas", etas, finite=False)
    if etas.ndim != 1 or etas.size == 0 or not (etas >= 0).all():
        raise ValueError(
            f"etas must be a non-empty row of numbers of at least 0, inf included; got {etas}."
        )
    return path, etas


def _weights(path: _Path, etas: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        steps = path.c * path.t / (1 / etas[:, None] + path.t**2)
    return path.start.least - steps @ path.directions.T


def _root(name: str, value, order: int) -> np.ndarray:
    """Return R with R.T @ R = value, a row for each eigenvalue that is not 0."""
    matrix, unit = _array(name, value, (order, order))
    largest = np.abs(matrix).max()
    if np.abs(matrix - matrix.T).max() > 10 * order * unit * largest:
        raise ValueError(
            f"{name} must be symmetric; got entries that differ from their mirror image by up to "
            f"{np.abs(matrix - matrix.T).max():.2g}."
        )
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    zero = order * unit * np.abs(values).max()
    if values[0] < -zero:
        raise ValueError(
            f"{name} must be positive semidefinite; got the eigenvalue {values[0]:.3g}."
        )
    kept = values > zero
    return np.sqrt(values[kept])[:, None] * vectors[:, kept].T


def _array(name: str, value, shape) -> tuple[np.ndarray, float]:
    """Return ``value`` in float64, and the unit roundoff of the precision in which it came."""
    if not hasattr(value, "dtype"):
        try:
            value = np.asarray(value)  # Python's numbers are doubles, which torch would round
        except ValueError:  # rows of different lengths
            value = np.asarray(value, dtype=object)
    given = checks.tensor(name, value, shape, floating=False)
    if given.is_complex() or given.dtype == torch.bool:
        raise ValueError(f"{name} must hold real numbers; got {given.dtype}.")
    unit = torch.finfo(given.dtype if given.is_floating_point() else torch.float64).eps
    return checks.tensor(name, given.detach().double(), shape).numpy(force=True), unit


def _numbers(name: str, value, *, at_least_zero=False, finite=True) -> np.ndarray:
    value = value.numpy(force=True) if isinstance(value, torch.Tensor) else value
    try:
        array = np.asarray(value, dtype=float)
    except (TypeError, ValueError) as error:
        kind = type(value).__name__
        raise ValueError(f"{name} must hold real numbers; got {kind}.") from error
    if finite and not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite; got inf or nan.")
    if at_least_zero and (array < 0).any():
        raise ValueError(f"{name} must be at least 0; got {array.min()}.")
    return array


def _plain(array: np.ndarray) -> np.ndarray | float:
    return array if np.ndim(array) else float(array)
