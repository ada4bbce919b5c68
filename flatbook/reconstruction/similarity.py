"""How alike images are: correlation, distance and structure, the larger the better or not."""

import numpy as np
from scipy.ndimage import gaussian_filter

from flatbook import checks
from flatbook.arrays import as_array, listed, returned

_SIGMA, _TRUNCATE = 1.5, 3.5  # a window of 11 × 11, as in the paper
_RADIUS = int(_SIGMA * _TRUNCATE + 0.5)


def correlation(images, others):
    r"""Correlate all pairs of images: blind to brightness and contrast, not to a negative.

    .. math:: r = \frac{\langle x - \bar x, x' - \bar x' \rangle}
        {\|x - \bar x\| \, \|x' - \bar x'\|}

    An image of one grey has no contrast and correlates with nothing: 0.

    Args:
        images: Shape ``(images, …)``.
        others: Of the same size. Shape ``(others, …)``.

    Returns:
        In [−1, 1]. Shape ``(images, others)``.

    Raises:
        ValueError: If sizes disagree or a number is not finite.

    Example:
        An image against itself brighter, its negative and another.

        >>> others = [[5.0, 7.0, 9.0], [2.0, 1.0, 0.0], [0.0, 3.0, 3.0]]
        >>> correlation([[0.0, 1.0, 2.0]], others).round(3)
        array([[ 1.   , -1.   ,  0.866]])
    """
    x, other = (standardized(part) for part in flat_pair("images", images, "others", others))
    return returned(np.clip(x @ other.T, -1, 1), images, others)


def distance(images, others):
    r"""Measure the Euclidean distance of all pairs of images.

    Args:
        images: Shape ``(images, …)``.
        others: Of the same size. Shape ``(others, …)``.

    Returns:
        In the units of a pixel. Shape ``(images, others)``.

    Raises:
        ValueError: If sizes disagree or a number is not finite.

    Example:
        >>> distance([[0.0, 0.0]], [[3.0, 4.0], [0.0, 1.0]])
        array([[5., 1.]])
    """
    from scipy.spatial.distance import cdist

    x, other = flat_pair("images", images, "others", others)
    return returned(cdist(x, other), images, others)


def ssim(images, others, *, data_range: float = 1.0):
    r"""Compute the structural similarity of images, pair by pair.

    .. math:: \operatorname{SSIM} = \operatorname{mean} \frac{(2\mu\mu' + C_1)(2\sigma_{xx'} + C_2)}
        {(\mu^2 + \mu'^2 + C_1)(\sigma^2 + \sigma'^2 + C_2)} ,
        \qquad C_1 = (0.01 L)^2, \; C_2 = (0.03 L)^2 ,

    over Gaussian windows of 11 × 11 pixels and standard deviation 1.5 that lie inside the image,
    and over channels.

    Args:
        images: At least 11 pixels high and wide. Shape ``(images, height, width)`` or ``(images,
            channels, height, width)``.
        others: As many, of the same shape.
        data_range: L, the largest less the least possible value.

    Returns:
        At most 1, which only equal images have. Shape ``(images,)``.

    Raises:
        ValueError: If shapes disagree, an image is too small or a number is not finite.

    Reference:
        Wang et al. (2004). Image quality assessment: from error visibility to structural
        similarity. IEEE Transactions on Image Processing.

    Example:
        Flat images differ in brightness only: (2 · 0.2 · 0.6 + C₁) / (0.2² + 0.6² + C₁).

        >>> dark, light = np.full((1, 12, 12), 0.2), np.full((1, 12, 12), 0.6)
        >>> ssim(dark, light).round(6), ssim(dark, dark)
        (array([0.6001]), array([1.]))
    """
    shape = ("images", *(("height", "width") if np.ndim(images) == 3 else ("c", "height", "width")))
    x = as_array("images", images, shape).astype(np.float64)
    other = as_array("others", others, x.shape).astype(np.float64)
    size = checks.positive("data_range", data_range)
    if min(x.shape[-2:]) < 2 * _RADIUS + 1:
        raise ValueError(
            f"images must be at least {2 * _RADIUS + 1} pixels high and wide; got "
            f"{x.shape[-2]} × {x.shape[-1]}."
        )

    def blur(v):
        axes = (v.ndim - 2, v.ndim - 1)
        v = gaussian_filter(v, _SIGMA, truncate=_TRUNCATE, axes=axes)
        return v[..., _RADIUS:-_RADIUS, _RADIUS:-_RADIUS]

    mean, mean_other = blur(x), blur(other)
    variance, variance_other = blur(x * x) - mean**2, blur(other * other) - mean_other**2
    covariance = blur(x * other) - mean * mean_other
    c1, c2 = (0.01 * size) ** 2, (0.03 * size) ** 2
    likeness = (2 * mean * mean_other + c1) * (2 * covariance + c2)
    likeness /= (mean**2 + mean_other**2 + c1) * (variance + variance_other + c2)
    return returned(likeness.reshape(len(x), -1).mean(axis=1), images, others)


def flat_pair(name: str, images, other_name: str, others) -> tuple[np.ndarray, np.ndarray]:
    """Return two sets of images of one shape as rows in float64."""
    shapes = []
    for label, value in ((name, images), (other_name, others)):
        shape = np.shape(listed(label, value))
        shapes.append((len(shape), shape[1:]))
    dimensions = max(shapes[0][0], 2)
    x = as_array(name, images, ("images", *(None,) * (dimensions - 1)))
    other = as_array(other_name, others, ("images", *x.shape[1:]))
    return tuple(v.reshape(len(v), -1).astype(np.float64) for v in (x, other))


def standardized(rows: np.ndarray) -> np.ndarray:
    """Return rows of mean 0 and length 1, or 0 where there is no contrast."""
    size = np.abs(rows).max(axis=1, keepdims=True)
    rows = rows / np.where(size > 0, size, 1)
    rows = rows - rows.mean(axis=1, keepdims=True)
    length = np.sqrt((rows**2).sum(axis=1, keepdims=True))
    flat = length < 1e-12 * np.sqrt(rows.shape[1])  # rounding is no contrast
    return np.where(flat, 0.0, rows / np.where(flat, 1.0, length))
