r"""The signal–noise problem in the coordinates of its decomposition, free of the dimension.

The network sees a filter only through its responses to the signal,
:math:`a_{j,r} = \langle w_{j,r}, \varphi \rangle`, and to the noise of each sample,
:math:`b_{j,r,i} = \langle w_{j,r}, \xi_i \rangle`. With :math:`\kappa` and :math:`\zeta` of
`flatbook.theory.signal_noise`,

.. math::
    a_{j,r} = a_{j,r}^{(0)} + j \, \kappa_{j,r} , \qquad
    b_{j,r,k} = b_{j,r,k}^{(0)} + \frac{1}{P - 1} \sum_i \zeta_{j,r,i}
    \frac{\langle \xi_i, \xi_k \rangle}{\|\xi_i\|^2} ,

so that of all vectors only their inner products matter: numbers of responses to the signal, and
the Gram matrix of the n noise vectors and the 2m initial filters. `of_network` takes it from given
vectors; `flatbook.theory.wishart.sample_problems` draws it without any.

All functions work on many problems at once, the **cells** of a phase diagram, say. Cells share
numbers of samples and filters; d, strengths and labels are their own.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from flatbook import checks
from flatbook.theory.decomposition import SIGNS
from flatbook.theory.signal_noise import VALUE, Activation, SignalNoiseData, TwoLayerCNN


@dataclass(frozen=True)
class Problems:
    r"""Training sets and initial networks, by their inner products.

    Attributes:
        gram: Of the noise vectors, then of the initial filters without their part along the
            signal, those of :math:`F_{+}` first. Shape ``(cells, n + 2m, n + 2m)``.
        response: :math:`\langle w_{j,r}^{(0)}, \varphi \rangle`. Shape ``(cells, 2, m)``.
        y: Labels as observed. Shape ``(cells, n)``.
        true_y: Labels before flips. Shape ``(cells, n)``.
        signal: :math:`\|\varphi\|`. Shape ``(cells,)``.
        noise: :math:`\sigma_p`. Shape ``(cells,)``.
        patches: P. Shape ``(cells,)``.
        activation: Of the networks.
    """

    gram: Tensor
    response: Tensor
    y: Tensor
    true_y: Tensor
    signal: Tensor
    noise: Tensor
    patches: Tensor
    activation: Activation = "relu"

    def __len__(self) -> int:
        """Return the number of cells."""
        return len(self.y)

    def __getitem__(self, cells) -> "Problems":
        """Return some of the cells: a slice, indices or a mask."""
        parts = [getattr(self, part.name) for part in fields(self)[:-1]]
        return Problems(*(part[cells] for part in parts), self.activation)

    @property
    def samples(self) -> int:
        """Number n of samples."""
        return self.y.shape[1]

    @property
    def filters(self) -> int:
        """Number m of filters of each class."""
        return self.response.shape[2]

    @property
    def noise_gram(self) -> Tensor:
        r""":math:`\langle \xi_i, \xi_k \rangle`. Shape ``(cells, n, n)``."""
        return self.gram[:, : self.samples, : self.samples]

    @property
    def noise_response(self) -> Tensor:
        r""":math:`\langle w_{j,r}^{(0)}, \xi_k \rangle`. Shape ``(cells, 2, m, n)``."""
        return self.gram[:, self.samples :, : self.samples].unflatten(1, (2, self.filters))


def of_network(net0: TwoLayerCNN, data: SignalNoiseData) -> Problems:
    r"""Take the inner products of a given training set and a given network at its start.

    Training in these coordinates equals that of the network, up to rounding.

    Args:
        net0: The network at its start.
        data: The training set.

    Returns:
        One cell.

    Raises:
        ValueError: If the two differ in d.

    Example:
        >>> from flatbook.theory.signal_noise import sample
        >>> data = sample(4, d=9, patches=2, signal=3.0, noise=1.0)
        >>> problem = of_network(TwoLayerCNN(9, filters=2), data)
        >>> len(problem), problem.samples, problem.filters, tuple(problem.gram.shape)
        (1, 4, 2, (1, 8, 8))
    """
    weight = checks.module("net0", net0).weight.detach().double()
    d = data.x.shape[2]
    if weight.shape[2] != d:
        raise ValueError(f"net0 must have filters of length d = {d}; got {weight.shape[2]}.")
    norm = torch.linalg.vector_norm(data.signal)
    response = weight @ data.signal
    across = weight - response[..., None] * data.signal / norm**2
    vectors = torch.cat([data.noise, across.flatten(0, 1)])
    one = torch.ones(1, dtype=torch.float64)
    return Problems(
        (vectors @ vectors.T)[None],
        response[None],
        data.y[None],
        data.true_y[None],
        norm[None],
        data.noise_std * one,
        data.x.shape[1] * one,
        net0.activation,
    )


def responses(problems: Problems, kappa: Tensor, zeta: Tensor) -> tuple[Tensor, Tensor]:
    r"""Compute what filters answer to the signal and to the noise of each sample.

    Args:
        problems: The cells.
        kappa: :math:`\kappa_{j,r}`. Shape ``(..., cells, 2, m)``.
        zeta: :math:`\zeta_{j,r,i}`. Shape ``(..., cells, 2, m, n)``.

    Returns:
        :math:`a_{j,r}`, shape ``(..., cells, 2, m)``, and :math:`b_{j,r,k}`, shape
        ``(..., cells, 2, m, n)``.

    Raises:
        ValueError: If shapes disagree.

    Example:
        >>> from flatbook.theory.wishart import sample_problems
        >>> problem = sample_problems(3, d=20, patches=2, signal=1.0, noise=1.0, filters=2)
        >>> a, b = responses(problem, torch.ones(1, 2, 2), torch.zeros(1, 2, 2, 3))
        >>> (a - problem.response).tolist()  # the signs of the classes
        [[[1.0, 1.0], [-1.0, -1.0]]]
    """
    shape = (len(problems), 2, problems.filters, problems.samples)
    if zeta.shape[-4:] != shape or kappa.shape != zeta.shape[:-1]:
        raise ValueError(
            f"kappa and zeta must have shapes (..., {', '.join(map(str, shape[:-1]))}) and "
            f"(..., {', '.join(map(str, shape))}); got {tuple(kappa.shape)} and "
            f"{tuple(zeta.shape)}."
        )
    memorized = (along_noise(problems, zeta) @ problems.noise_gram).unflatten(
        -2, (2, problems.filters)
    )
    return problems.response + SIGNS * kappa, problems.noise_response + memorized


def along_noise(problems: Problems, zeta: Tensor) -> Tensor:
    r"""Return the coefficients of :math:`\xi_i` in the filters: those of the decomposition.

    .. math:: \frac{\zeta_{j,r,i}}{(P - 1) \, \|\xi_i\|^2}

    Args:
        problems: The cells.
        zeta: :math:`\zeta_{j,r,i}`. Shape ``(..., cells, 2, m, n)``.

    Returns:
        Filters of :math:`F_{+}` first. Shape ``(..., cells, 2m, n)``.
    """
    squares = problems.noise_gram.diagonal(dim1=1, dim2=2)
    return zeta.double().flatten(-3, -2) / ((problems.patches - 1)[:, None] * squares)[:, None]


def outputs(problems: Problems, kappa: Tensor, zeta: Tensor) -> Tensor:
    r"""Compute the networks' outputs on their training samples.

    .. math::
        f(x_i) = \frac{1}{m} \sum_{j,r} j \, \bigl[ \sigma(\tilde y_i a_{j,r})
        + (P - 1) \, \sigma(b_{j,r,i}) \bigr]

    Args:
        problems: The cells.
        kappa: :math:`\kappa_{j,r}`. Shape ``(..., cells, 2, m)``.
        zeta: :math:`\zeta_{j,r,i}`. Shape ``(..., cells, 2, m, n)``.

    Returns:
        Shape ``(..., cells, n)``. The margins are these times ``problems.y``.

    Raises:
        ValueError: If shapes disagree.

    Example:
        One filter a class. The signal, of norm 1, adds :math:`\kappa = 5` to the output where it
        is positive, and to the opposite filter's where it is negative; the start is tiny.

        >>> from flatbook.theory.wishart import sample_problems
        >>> problem = sample_problems(4, d=20, patches=2, signal=1.0, noise=1.0, filters=1,
        ...     init=1e-6)
        >>> f = outputs(problem, torch.full((1, 2, 1), 5.0), torch.zeros(1, 2, 1, 4))
        >>> (f * problem.true_y).round(decimals=3).tolist()
        [[5.0, 5.0, 5.0, 5.0]]
    """
    value = VALUE[problems.activation]
    a, b = responses(problems, kappa, zeta)
    with_signal = value(a[..., None] * problems.true_y[:, None, None])
    scores = (with_signal + (problems.patches - 1)[:, None, None, None] * value(b)).mean(dim=-2)
    return scores[..., 0, :] - scores[..., 1, :]


def by_class(zeta: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    r"""Average memorized noise over the filters of a sample's own class, and of the other.

    .. math:: \frac{1}{m} \sum_r \zeta_{y_i, r, i} , \qquad \frac{1}{m} \sum_r \zeta_{-y_i, r, i}

    Descent on the loss of sample i raises the first from 0 and lowers the second; ascent the
    reverse. An average over all filters would hide either.

    Args:
        zeta: :math:`\zeta_{j,r,i}`. Shape ``(..., 2, m, n)``.
        y: Labels as observed. Shape ``(n,)``, or ``(cells, n)`` where zeta has cells.

    Returns:
        Two tensors of shape ``(..., n)``.

    Example:
        >>> zeta = torch.tensor([[[3.0, 3.0]], [[-1.0, -1.0]]])
        >>> by_class(zeta, torch.tensor([1.0, -1.0]))
        (tensor([ 3., -1.]), tensor([-1.,  3.]))
    """
    plus, minus = zeta.mean(dim=-2).unbind(dim=-2)
    return torch.where(y > 0, plus, minus), torch.where(y > 0, minus, plus)
