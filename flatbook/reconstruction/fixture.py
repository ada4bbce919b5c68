r"""Networks that meet the KKT conditions exactly, made from orthonormal samples.

With orthonormal samples the tensor is diagonal and its Z-eigenvectors are known: for each set A
of samples, :math:`f(v) = \mu v` asks for :math:`b_i (x_i^\top v)^{\alpha-2} = \mu` on A. With
:math:`q = 2/(\alpha - 2)`,

.. math::
    \mu_A = \Bigl( \sum_{i \in A} |b_i|^{-q} \Bigr)^{-1/q}, \qquad
    v_A = \sum_{i \in A} s_i \Bigl( \frac{\mu_A}{|b_i|} \Bigr)^{q/2} x_i, \qquad
    \rho_A = (\sqrt\alpha \, \mu_A)^{-1/(\alpha-1)},

and the neuron is :math:`w_A = \rho_A v_A`, :math:`a_A = \pm \rho_A / \sqrt\alpha`. For odd α the
signs are :math:`s_i = \operatorname{sign} b_i`, so there is one neuron for each set. For even α
the samples of A share a label, which is the sign of :math:`a_A`, and the :math:`s_i` are free: a
neuron for each choice, up to a common sign.

The weights determine f if they take :math:`N = \binom{n+\alpha-2}{\alpha-1}` independent values
of monomials. Between two samples the ratio of the coordinates of a neuron is fixed up to sign by
:math:`b_i / b_j`, so these neurons can tell apart one monomial in both for odd α and two for even
α, where there are :math:`\alpha - 2`. Hence **orthonormal samples can meet the rank condition
only for α = 3, and for α = 4 if all labels agree**; for n = 1 always.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import root
from torch import Tensor

from flatbook import checks
from flatbook.reconstruction.inputs import degree as checked_degree
from flatbook.reconstruction.inputs import real, signs


class KKTNetwork(NamedTuple):
    """A two-layer polynomial network with the data whose KKT point it is.

    Attributes:
        W: First layer. Shape ``(neurons, inputs)``.
        a: Second layer. Shape ``(neurons,)``.
        X: Samples. Shape ``(samples, inputs)``.
        y: Labels, −1 and 1. Shape ``(samples,)``.
        multipliers: λ, above 0; the signed ones are ``multipliers * y``. Shape ``(samples,)``.
    """

    W: Tensor
    a: Tensor
    X: Tensor
    y: Tensor
    multipliers: Tensor


def exact_kkt(
    n: int,
    *,
    d: int | None = None,
    labels=None,
    X=None,
    seed: int = 0,
    degree: int = 3,
    subsets: Iterable[Sequence[int]] | None = None,
) -> KKTNetwork:
    r"""Make a network that meets the KKT conditions of orthonormal samples to machine precision.

    With the default of one neuron for each sample and each pair, the cubic network has
    :math:`n(n+1)/2` neurons, just enough for `recover`, and equal multipliers,

    .. math:: \lambda_i^2 = \frac{1 + (n-1)/\sqrt2}{3\sqrt3} .

    With other sets of samples, or a higher degree, the multipliers that make all margins 1 are
    found by Newton's method.

    Args:
        n: Number of samples.
        d: Length of a sample, from n; None takes n.
        labels: −1 and 1; None draws them. Shape ``(samples,)``.
        X: Orthonormal rows to use; None draws them. Shape ``(samples, d)``.
        seed: Of labels and samples.
        degree: α, from 3.
        subsets: The sets of samples that get a neuron (one for each choice of signs if the degree
            is even), each sample in one set at least. None takes all sets of up to
            :math:`\alpha - 1` samples; for even degrees, of one label.

    Returns:
        Network and data: tensors in float64, or of the kind of ``X`` if given. Every margin
        :math:`y_i \Phi(x_i)` is 1.

    Raises:
        ValueError: If an argument is none of the above.
        RuntimeError: If Newton's method finds no multipliers for ``subsets``.

    Example:
        Two samples along the axes: a neuron for each, and one between them.

        >>> network = exact_kkt(2, X=[[1.0, 0.0], [0.0, 1.0]], labels=[1, 1])
        >>> network.W.round(4)
        array([[1.0036, 0.    ],
               [0.    , 1.0036],
               [0.844 , 0.844 ]])
        >>> ((network.X @ network.W.T) ** 3 @ network.a).round(12)  # the margins
        array([1., 1.])
        >>> exact_kkt(20, d=784).W.shape
        torch.Size([210, 784])
    """
    n, alpha = checks.count("n", n), checked_degree(degree, at_least=3)
    d = n if d is None and X is None else d
    if d is not None:
        checks.count("d", d, at_least=n)
    random = np.random.default_rng(checks.count("seed", seed, at_least=0))
    drawn = torch.from_numpy(random.choice([-1.0, 1.0], size=n))
    if X is None:
        X, kind = real("X", torch.from_numpy(random.normal(size=(n, d))), (n, d))
        X = torch.linalg.qr(X.T).Q.T.contiguous()
    else:
        X, kind = real("X", X, (n, "d" if d is None else d))
        skew = float((X @ X.T - torch.eye(n).to(X)).abs().max())
        if skew > 100 * n * kind.eps:
            raise ValueError(
                "X must have orthonormal rows; got inner products that are off by up to "
                f"{skew:.2g}."
            )
    y = drawn.to(X) if labels is None else signs("labels", labels, n, like=X)
    members = _members(subsets, y, alpha)
    directions, beta, mu = _solve(members, y.cpu().numpy(), alpha)
    rho = (np.sqrt(alpha) * np.abs(mu)) ** (-1 / (alpha - 1))
    W = torch.from_numpy(rho[:, None] * directions).to(X) @ X
    a = torch.from_numpy(rho * np.sign(mu) / np.sqrt(alpha)).to(X)
    multipliers = torch.from_numpy(beta).to(X)
    return KKTNetwork(*(kind.back(t) for t in (W, a, X, y, multipliers)))


def _members(subsets, y: Tensor, alpha: int) -> np.ndarray:
    """Return a row of −1, 0 and 1 for each neuron: the signs of the samples it is made of."""
    labels, n = y.cpu().numpy(), len(y)
    if subsets is None:
        sizes = range(1, min(alpha - 1, n) + 1)
        subsets = [s for size in sizes for s in itertools.combinations(range(n), size)]
        if alpha % 2 == 0:
            subsets = [s for s in subsets if len({labels[i] for i in s}) == 1]
    else:
        if not isinstance(subsets, Iterable):
            raise ValueError(
                f"subsets must be sets of samples or None; got {type(subsets).__name__}."
            )
        subsets = [_subset(s, labels, alpha) for s in subsets]
        missing = sorted(set(range(n)).difference(*subsets))
        if missing:
            raise ValueError(
                f"subsets must hold each sample once at least; sample {missing[0]} is in none."
            )
    rows = []
    for subset in subsets:
        tails = itertools.product((1, -1), repeat=len(subset) - 1) if alpha % 2 == 0 else [()]
        for tail in tails:
            row = np.zeros(n)
            row[list(subset)] = (1, *tail) if alpha % 2 == 0 else labels[list(subset)]
            rows.append(row)
    return np.stack(rows)


def _subset(subset, labels, alpha: int) -> list[int]:
    if not isinstance(subset, Iterable):
        raise ValueError(f"subsets must hold sets of samples; got {checks.shown(subset)}.")
    found = [
        checks.count("each number in subsets", i, at_least=0, at_most=len(labels) - 1)
        for i in subset
    ]
    if not found or len(set(found)) < len(found):
        raise ValueError(f"subsets must hold sets of samples that are not empty; got {found}.")
    if alpha % 2 == 0 and len({labels[i] for i in found}) > 1:
        raise ValueError(
            "subsets must not mix labels if the degree is even, since no such neuron exists; got "
            f"{found}."
        )
    return found


def _solve(members: np.ndarray, y: np.ndarray, alpha: int):
    """Return unit coordinates of the neurons, the multipliers and the Z-eigenvalues."""
    inside, q = np.abs(members), 2 / (alpha - 2)

    def parts(t):  # with t = log λ
        share = inside * np.exp(-q * t)
        total = share.sum(axis=1)
        share /= total[:, None]  # squares of the coordinates
        mu = total ** (-1 / q)
        # ρ^(α+1) / √α, a neuron's output along its own direction
        gain = (np.sqrt(alpha) * mu) ** (-(alpha + 1) / (alpha - 1)) / np.sqrt(alpha)
        return share, mu, gain

    def equations(t):
        share, _, gain = parts(t)
        return np.log(gain @ share ** (alpha / 2))

    def slopes(t):
        share, _, gain = parts(t)
        power = gain[:, None] * share ** (alpha / 2)
        # d log share_i / dt_k = -q (δ_ik - share_k); d log gain / dt_k = -(α+1)/(α-1) share_k
        weight = (alpha / 2) * q - (alpha + 1) / (alpha - 1)
        matrix = power.T @ share * weight - np.diag(power.sum(axis=0)) * (alpha / 2) * q
        return matrix / power.sum(axis=0)[:, None]

    # The margins scale with the power -(α+1)/(α-1) of the multipliers: exact if all are alike.
    start = equations(np.zeros(len(y))) * (alpha - 1) / (alpha + 1)
    found = root(equations, start, jac=slopes, tol=1e-13)
    t = found.x
    for _ in range(3):  # to the last digit
        t = t - np.linalg.solve(slopes(t), equations(t))
    if not np.abs(equations(t)).max() < 1e-10:
        raise RuntimeError("no multipliers were found that make all margins 1 with these subsets")
    share, mu, _ = parts(t)
    sign = np.ones(len(mu)) if alpha % 2 else y[inside.argmax(axis=1)]
    return members * np.sqrt(share), np.exp(t), sign * mu
