"""What is to be kept and what forgotten: checked, and served in batches."""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flatbook import checks
from flatbook.arrays import signal_array
from flatbook.curvature import logits_of_one

Pair = tuple[Tensor, Tensor]


def pair(name: str, data) -> Pair:
    """Return inputs and labels of a TensorDataset, a pair, or a split of `flatbook.data`."""
    if isinstance(data, TensorDataset):
        data = data.tensors
    elif hasattr(data, "x") and hasattr(data, "y"):
        data = (data.x, data.y)
    if not isinstance(data, tuple | list) or len(data) != 2:
        got = f"{len(data)} parts" if isinstance(data, tuple | list) else type(data).__name__
        raise ValueError(
            f"{name} must be a TensorDataset of inputs and labels, or a pair (x, y); got {got}."
        )
    return tuple(data)


def checked(model: nn.Module, name: str, data, *, empty: str | None = None) -> tuple[Pair, int]:
    """Return a set in the model's precision and on its device, and the number of classes."""
    x, y = pair(name, data)
    if empty is not None and np.ndim(x) and len(x) == 0:
        raise ValueError(empty)
    x = checks.tensor(f"x of {name}", x, ("samples", *["size"] * max(np.ndim(x) - 1, 1)))
    like = next((p for p in model.parameters() if p.is_floating_point()), x)
    x = x.detach().to(like.device, like.dtype)
    classes = logits_of_one(model, x[:1], name=f"x of {name}", size=len(x)).shape[1]
    return (x, checks.labels(f"y of {name}", y, classes, samples=len(x)).to(x.device)), classes


def retain_and_forget(model: nn.Module, retain, forget) -> tuple[Pair, Pair, int]:
    """Return both sets and the number of classes.

    Raises:
        ValueError: If one is empty, they share a row, or they do not fit the model.
    """
    forget, _ = checked(
        model,
        "forget",
        forget,
        empty="forget must hold a sample; with none, there is nothing to do.",
    )
    retain, classes = checked(
        model,
        "retain",
        retain,
        empty="retain must hold a sample; with none, forget is everything: start from new weights.",
    )
    if retain[0].shape[1:] != forget[0].shape[1:]:
        raise ValueError(
            "x of forget must have samples of the shape of retain's, "
            f"{tuple(retain[0].shape[1:])}; got {tuple(forget[0].shape[1:])}."
        )
    if both := shared_rows(retain, forget):
        kept, gone = both[0]
        raise ValueError(
            "forget must share no row with retain, same x and same y; "
            f"got {len(both)}, the first as forget[{gone}] and retain[{kept}]."
        )
    return retain, forget, classes


def shared_rows(retain: Pair, forget: Pair) -> list[tuple[int, int]]:
    """Return the rows of ``forget`` that ``retain`` also has, each with its first twin there.

    Example:
        >>> x, y = torch.tensor([[1.0], [2.0], [2.0]]), torch.tensor([0, 1, 0])
        >>> shared_rows((x, y), (torch.tensor([[2.0], [3.0]]), torch.tensor([0, 0])))
        [(2, 0)]
    """
    seen: dict[bytes, int] = {}
    for row, digest in enumerate(_digests(*retain)):
        seen.setdefault(digest, row)
    rows = enumerate(_digests(*forget))
    return [(seen[digest], row) for row, digest in rows if digest in seen]


def _digests(x: Tensor, y: Tensor) -> Iterator[bytes]:
    """Yield a fingerprint of each row: equal numbers, equal fingerprints."""
    x = x.detach().flatten(1).cpu()
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    rows = (x + 0.0).contiguous().numpy()  # plus 0 turns -0 into 0
    for row, label in zip(rows, y.tolist(), strict=True):
        digest = hashlib.blake2b(row.data, digest_size=16)
        digest.update(label.to_bytes(8, "little"))
        yield digest.digest()


def by_memorization(scores, size: int, *, ties=None) -> dict[str, np.ndarray]:
    """Choose three sets to forget: what is memorized most, middling, and least.

    Points are ranked by their score. The sets are both ends of the ranking and its middle.

    Args:
        scores: Memorization of each point, such as `flatbook.memorization.memorization`. Shape
            ``(points,)``.
        size: Points in each set; the three must not overlap.
        ties: A second score that decides between equal ones, as few models leave many; None
            decides by position. Shape ``(points,)``.

    Returns:
        Positions in increasing order, under ``"high"``, ``"mid"`` and ``"low"``. Each of shape
        ``(size,)``.

    Raises:
        ValueError: If the arrays disagree, a score is not finite, or the sets would overlap.

    Reference:
        Zhao et al. (2024). What makes unlearning hard and what to do about it. NeurIPS.

    Example:
        >>> {name: rows.tolist() for name, rows in by_memorization([0.9, 0, 0.4, 0.1], 1).items()}
        {'high': [0], 'mid': [3], 'low': [1]}
    """
    scores = signal_array("scores", scores, ("points",))
    ties = np.zeros(len(scores)) if ties is None else signal_array("ties", ties, (len(scores),))
    size = checks.count("size", size)
    if 3 * size > len(scores):
        raise ValueError(
            f"size must be at most a third of the {len(scores)} points, or the sets overlap; "
            f"got {size}."
        )
    order = np.lexsort((ties, scores))
    middle = (len(order) - size) // 2
    chosen = {"high": order[-size:], "mid": order[middle : middle + size], "low": order[:size]}
    return {name: np.sort(rows) for name, rows in chosen.items()}


def batches(size: int, batch_size: int, random: torch.Generator) -> Sequence[Tensor]:
    """Return the rows 0 to ``size`` - 1 in random order, cut into batches.

    A last batch of a single row joins the one before, for BatchNorm has no variance of one.

    Example:
        >>> [len(rows) for rows in batches(9, 4, torch.Generator().manual_seed(0))]
        [4, 5]
    """
    rows = torch.randperm(size, generator=random).split(batch_size)
    if len(rows) > 1 and len(rows[-1]) == 1 < batch_size:
        rows = (*rows[:-2], torch.cat(rows[-2:]))
    return rows


def streamed(
    sets: Sequence[Pair], batch_size: int, randoms: Sequence[torch.Generator]
) -> Iterator[list[Pair]]:
    """Yield batches of all sets side by side, until the first set is through.

    That is ``zip(R, cycle(F))``: the other sets start over, in a new order, whenever they end.
    """

    def cycled(size, random):
        while True:
            yield from batches(size, batch_size, random)

    (first, *others), (random, *randoms) = sets, randoms
    rows = [batches(len(first[0]), batch_size, random)]
    rows += [cycled(len(x), r) for (x, _), r in zip(others, randoms, strict=False)]
    for chosen in zip(*rows, strict=False):
        yield [
            (x.index_select(0, r.to(x.device)), y.index_select(0, r.to(y.device)))
            for (x, y), r in zip(sets, chosen, strict=True)
        ]
