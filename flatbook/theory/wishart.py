"""Signal–noise problems drawn at random, at a cost free of the dimension."""

from typing import get_args

import numpy as np
import torch

from flatbook import checks
from flatbook.theory.coordinates import Problems
from flatbook.theory.signal_noise import Activation


def sample_problems(
    n: int,
    *,
    d,
    patches,
    signal,
    noise,
    filters: int = 10,
    init=None,
    flip=0.0,
    activation: Activation = "relu",
    seed: int = 0,
) -> Problems:
    r"""Draw problems without drawing a vector: Bartlett's construction.

    The Gram matrix of N standard normal vectors in :math:`k = d - 1` dimensions, those across the
    signal, is :math:`L L^\top` with L lower triangular and independent entries,

    .. math:: L_{ii} \sim \chi_{k - i} \; (i = 0, 1, \ldots), \qquad L_{ij} \sim N(0, 1)
        \text{ for } i > j ,

    which is what Gram and Schmidt make of the vectors; rows and columns scale with
    :math:`\sigma_p` and :math:`\sigma_0`. If :math:`k < N`, L has k columns. The labels and
    :math:`\langle w^{(0)}, \varphi \rangle \sim N(0, \sigma_0^2 \|\varphi\|^2)` are independent
    of it.

    Args:
        n: Number of samples.
        d: Length of a patch, from 2. Like the next four, and ``flip``, a number or an array; they
            broadcast together and are flattened to cells.
        patches: P, from 2.
        signal: :math:`\|\varphi\|`, above 0.
        noise: :math:`\sigma_p`, above 0.
        filters: m, of each class.
        init: :math:`\sigma_0`, above 0; None takes :math:`0.1 / (\sigma_p \sqrt d)`.
        flip: Probability of a wrong label, in [0, 1].
        activation: As of `flatbook.theory.signal_noise.TwoLayerCNN`.
        seed: Of everything drawn. What a cell gets depends on the others.

    Returns:
        The problems.

    Raises:
        ValueError: If an argument is none of the above, or shapes do not broadcast.

    Reference:
        Bartlett (1933). On the theory of statistical regression. Proceedings of the Royal
        Society of Edinburgh.

    Example:
        The norm of the noise is :math:`\sigma_p \sqrt{d - 1}`, here 2 · 1000, give or take 0.1 %.

        >>> problem = sample_problems(3, d=10**6 + 1, patches=2, signal=1.0, noise=[2.0])
        >>> (problem.noise_gram[0].diagonal().sqrt() / 2000).round(decimals=2).tolist()
        [1.0, 1.0, 1.0]
    """
    n, m = checks.count("n", n), checks.count("filters", filters)
    checks.choice("activation", activation, get_args(Activation))
    given = {"d": d, "patches": patches, "signal": signal, "noise": noise, "flip": flip}
    given = _broadcast(given if init is None else given | {"init": init})
    given.setdefault("init", 0.1 / (given["noise"] * np.sqrt(given["d"])))

    random = np.random.default_rng(checks.count("seed", seed, at_least=0))
    cells, size = len(given["d"]), n + 2 * m
    freedom = given["d"][:, None] - 1 - np.arange(size)
    lower = np.tril(random.standard_normal((cells, size, size)), -1)
    diagonal = np.sqrt(random.chisquare(np.maximum(freedom, 1)))
    lower[:, np.arange(size), np.arange(size)] = diagonal
    lower *= (freedom > 0)[:, None, :]
    scale = np.repeat(np.stack([given["noise"], given["init"]]), [n, 2 * m], axis=0).T
    lower *= scale[:, :, None]

    true_y = random.choice([-1.0, 1.0], (cells, n))
    flipped = random.random((cells, n)) < given["flip"][:, None]
    response = random.standard_normal((cells, 2, m))
    response *= (given["init"] * given["signal"])[:, None, None]
    parts = lower @ lower.swapaxes(1, 2), response, np.where(flipped, -true_y, true_y), true_y
    parts = *parts, given["signal"], given["noise"], given["patches"]
    return Problems(*(torch.from_numpy(np.array(part)) for part in parts), activation)


_ALLOWED = {
    "d": ("whole numbers from 2", lambda v: (v >= 2) & (v == np.round(v))),
    "patches": ("whole numbers from 2", lambda v: (v >= 2) & (v == np.round(v))),
    "flip": ("numbers in [0, 1]", lambda v: (v >= 0) & (v <= 1)),
}
_ABOVE_ZERO = ("finite numbers above 0", lambda v: v > 0)


def _broadcast(given: dict) -> dict[str, np.ndarray]:
    """Return checked numbers of equal length, one for each cell."""
    try:
        arrays = np.broadcast_arrays(*(np.asarray(value, float) for value in given.values()))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{', '.join(given)} must hold numbers and broadcast together; got shapes "
            f"{', '.join(str(np.shape(value)) for value in given.values())}."
        ) from error
    given = {name: array.ravel() for name, array in zip(given, arrays, strict=True)}
    for name, value in given.items():
        allowed, holds = _ALLOWED.get(name, _ABOVE_ZERO)
        wrong = ~(np.isfinite(value) & holds(value))
        if wrong.any() or value.size == 0:
            got = value[wrong][0] if value.size else "none"
            raise ValueError(f"{name} must hold {allowed}; got {got}.")
    return given
