"""Objectives of training and unlearning, as weights of the samples."""

import torch
from torch import Tensor

from flatbook import checks
from flatbook.runtime import generator


def sample_weights(
    n: int,
    steps: int,
    *,
    forget: Tensor | None = None,
    alpha: float = 1.0,
    batch_size: int | None = None,
    seed: int = 0,
) -> Tensor:
    r"""Write an objective as a weight for each sample, step by step.

    .. math::
        L = \sum_i c_i \log(1 + e^{-y_i f_i})
        = \alpha \, L(\mathcal{R}) - (1 - \alpha) \, L(\mathcal{F}) ,

    where both losses are means and R, the samples to retain, are all that are not in F. Without
    F, this is the mean over all samples; with :math:`\alpha = 1` it is retraining on R. In
    mini-batches each mean is over a batch of its own, in shuffled passes without replacement;
    F starts over as often as R needs it. What is left at the end of a pass is dropped.

    Args:
        n: Number of samples.
        steps: Number of steps.
        forget: True in F, which is neither empty nor everything; None is no F. Shape ``(n,)``.
        alpha: Weight of R, in [0, 1]; 1 without F.
        batch_size: B, at most the size of R; batches of F hold as many, or all of F. None takes
            full batches.
        seed: Of the shuffles.

    Returns:
        :math:`c_i` at each step. Shape ``(steps, n)``.

    Raises:
        ValueError: If an argument is none of the above.

    Example:
        >>> forget = torch.tensor([False, False, True])
        >>> sample_weights(3, 1, forget=forget, alpha=0.5).tolist()
        [[0.25, 0.25, -0.5]]
    """
    alpha = checks.fraction("alpha", alpha)
    retain, ascend = means_over(n, steps, forget, batch_size, seed)
    if forget is None and alpha != 1:
        raise ValueError(f"alpha must be 1 where there is nothing to forget; got {alpha}.")
    return alpha * retain - (1 - alpha) * ascend


def means_over(
    n: int, steps: int, forget: Tensor | None, batch_size: int | None, seed: int
) -> tuple[Tensor, Tensor]:
    """Return the two means of `sample_weights`, over R and over F, each of shape (steps, n)."""
    n, steps = checks.count("n", n), checks.count("steps", steps)
    if forget is None:
        forget = torch.zeros(n, dtype=torch.bool)
    elif forget.dtype != torch.bool or forget.shape != (n,) or forget.all() or not forget.any():
        raise ValueError(
            f"forget must hold {n} booleans, some True and some False; got {forget.dtype} of shape "
            f"{tuple(forget.shape)} with {int(forget.sum())} True."
        )
    retained, forgotten = (~forget).nonzero()[:, 0], forget.nonzero()[:, 0]
    if batch_size is not None:
        checks.count("batch_size", batch_size, at_most=len(retained))
    random = generator(seed)
    return tuple(_batches(rows, n, steps, batch_size, random) for rows in (retained, forgotten))


def _batches(rows: Tensor, n: int, steps: int, size: int | None, random) -> Tensor:
    weights = torch.zeros(n, dtype=torch.float64)
    if size is None or size >= len(rows):
        weights[rows] = 1 / max(len(rows), 1)
        return weights.expand(steps, n)
    passes = -(-steps // (len(rows) // size))
    order = [
        rows[torch.randperm(len(rows), generator=random)][: len(rows) // size * size]
        for _ in range(passes)
    ]
    chosen = torch.cat(order).reshape(-1, size)[:steps]
    return torch.zeros(steps, n, dtype=torch.float64).scatter_(1, chosen, 1 / size)
