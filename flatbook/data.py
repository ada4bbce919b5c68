"""Named data sets as tensors, and one small generator.

A Fashion-MNIST subset ships with the package, so that a chapter runs with no network. Larger sets
are read from a folder of the reader's; `catalogue` says which are there.
"""

import math
import os
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from flatbook import checks, registry, runtime
from flatbook.archives import CorruptDataError, DataNotFoundError, Part, checksum
from flatbook.registry import SETS, data_root

__all__ = [
    "NAMES", "CatalogueRow", "CorruptDataError", "DataNotFoundError", "Dataset", "Split",
    "balanced_indices", "catalogue", "checksum", "data_root", "gaussian_blobs", "load",
]  # fmt: skip

NAMES = tuple(SETS)


@dataclass(frozen=True, eq=False)
class Split:
    """Inputs and their classes.

    Attributes:
        x: Inputs, float32. Shape ``(samples, channels, height, width)`` or ``(samples, features)``.
        y: Class of each input, int64. Shape ``(samples,)``.
        indices: Row of each sample in the split it was drawn from, int64, ascending. Shape
            ``(samples,)``.
    """

    x: Tensor
    y: Tensor
    indices: Tensor

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training and a test split of one data set.

    Attributes:
        name: The name it was loaded by.
        train: What to learn from.
        test: What to judge by.
        num_classes: Labels lie in 0 to ``num_classes - 1``.
        classes: Their names, if known.
        feature_names: Names of a table's features, if known.
    """

    name: str
    train: Split
    test: Split
    num_classes: int
    classes: tuple[str, ...] | None = None
    feature_names: tuple[str, ...] | None = None

    @cached_property
    def checksum(self) -> str:
        """SHA-256 of the inputs and labels of both splits: the same only if every bit is."""
        return checksum(self.train.x, self.train.y, self.test.x, self.test.y)


@dataclass(frozen=True)
class CatalogueRow:
    """What is known of a data set before it is loaded.

    Attributes:
        name: What `load` calls it.
        description: What it holds, in a line.
        classes: Number of classes.
        available: Whether `load` would find it now.
        source: Where it is, or where it was looked for and how to get it.
        licence: As stated at its source.
    """

    name: str
    description: str
    classes: int
    available: bool
    source: str
    licence: str


def load(
    name: str,
    *,
    root: str | os.PathLike | None = None,
    download: bool = False,
    n_train: int | None = None,
    n_test: int | None = None,
    seed: int = 0,
    image_size: int | None = None,
) -> Dataset:
    r"""Load a data set as tensors in memory.

    Images are float32 in [0, 1], channels first; models normalise them, so an attack's budget is
    in units of the image. ``location30`` has 446 features that are 0 or 1. ``adult`` has 108: six
    numbers, scaled by the range of all training rows, which test rows may leave, then categories.

    A set is looked for in ``root``; without it in the folder that the variable ``FLATBOOK_DATA``
    names; without that in the user's cache folder (`data_root`). If it is not there and
    ``FLATBOOK_SHARED`` is set, ``$FLATBOOK_SHARED/data`` is next. ``fashion-mnist`` and ``digits``
    come with packages and need no folder.

    Args:
        name: One of `NAMES`.
        root: Folder that holds data sets.
        download: Whether to fetch a set that is nowhere, if torchvision can.
        n_train: How many training samples to keep, as equal a number of each class as there is
            (`balanced_indices`); all if None. The choice comes before images are decoded.
        n_test: The same for the test split.
        seed: Decides which samples are kept, and nothing else.
        image_size: Side in pixels of ``tiny-imagenet``, ``imagenet`` and ``eyepacs``, whose shorter
            side is scaled to it and whose centre is kept.

    Returns:
        Both splits, in the order of the files.

    Raises:
        DataNotFoundError: If the set is nowhere; it says where it was looked for and how to get it.
        CorruptDataError: If its files are damaged or incomplete.
        ValueError: If an argument is out of range, or the tensors would fill the memory.

    Example:
        >>> data = load("digits", n_train=100)
        >>> data.train.x.shape, data.train.y.bincount()
        (torch.Size([100, 1, 8, 8]), tensor([10, 10, 10, 10, 10, 10, 10, 10, 10, 10]))
    """
    entry = SETS[checks.choice("name", name, NAMES)]
    limits = entry.sizes or (None, None)  # a folder of images tells its own only when read
    for argument, n, limit in zip(("n_train", "n_test"), (n_train, n_test), limits, strict=True):
        if n is not None:
            checks.count(argument, n, at_most=limit)
    checks.count("seed", seed, at_least=0)
    checks.flag("download", download)
    options = {}
    if entry.image_size:
        size = entry.image_size if image_size is None else image_size
        options["image_size"] = checks.count("image_size", size)
    elif image_size is not None:
        sized = ", ".join(key for key in NAMES if SETS[key].image_size)
        raise ValueError(f"image_size must be None, save for {sized}; got {image_size!r}.")

    places = registry.folders(name, root)
    found = registry.find(name, places)
    if found is None and download and entry.torchvision:
        registry.download(name, places[0])
        found = registry.find(name, places)
    if found is None:
        raise DataNotFoundError(registry.absence(name, places))
    folder, read = found
    with registry.intact(name, folder):
        source = registry.verified(name, folder, read(folder, **options))
    chosen = {
        source.train: _rows(source.train, "n_train", n_train, seed),
        source.test: _rows(source.test, "n_test", n_test, seed),
    }
    registry.refuse_beyond_memory(name, sum(map(len, chosen.values())), source.train.shape)
    with registry.intact(name, folder):
        train, test = (
            Split(part.fetch(rows), *map(torch.from_numpy, (part.labels[rows], part.indices[rows])))
            for part, rows in chosen.items()
        )
    num_classes = len(source.classes) if source.classes else entry.classes
    return Dataset(name, train, test, num_classes, source.classes, source.feature_names)


def _rows(part: Part, argument: str, n: int | None, seed: int) -> np.ndarray:
    if n is None:
        return np.arange(len(part.labels))
    checks.count(argument, n, at_most=len(part.labels))
    return balanced_indices(part.labels, n, seed=seed)


def catalogue(root: str | os.PathLike | None = None) -> list[CatalogueRow]:
    """Describe every data set and say whether `load` would find it; nothing is read.

    Args:
        root: Folder that holds data sets, as in `load`.

    Returns:
        One row per set, in the order of `NAMES`.

    Raises:
        ValueError: If ``root`` is not a path to a folder.

    Example:
        >>> row = catalogue()[0]
        >>> row.name, row.classes, row.available, row.source
        ('fashion-mnist', 10, True, 'ships with flatbook')
    """
    rows = []
    for name, entry in SETS.items():
        places = registry.folders(name, root)
        found = registry.find(name, places)
        source = str(found[0]) if found else registry.absence(name, places)
        source = f"ships with {entry.within}" if found and entry.within else source
        row = name, entry.description, entry.classes, found is not None, source, entry.licence
        rows.append(CatalogueRow(*row))
    return rows


def balanced_indices(labels: np.ndarray | Tensor, n: int, *, seed: int = 0) -> np.ndarray:
    """Choose ``n`` rows, as equal a number of each class as there is.

    Rows are dealt in rounds, one of each class that has any left, the classes in a random order.
    So counts differ by at most one, save that a class that runs out gives all it has. A smaller
    choice is part of every larger one with the same seed. No global generator is touched.

    Args:
        labels: Class of each row. Shape ``(rows,)``.
        n: How many to choose.
        seed: Decides which.

    Returns:
        Row numbers, ascending. Shape ``(n,)``.

    Raises:
        ValueError: If ``labels`` has another shape, or ``n`` is not in 1 to ``rows``.

    Example:
        >>> labels = np.array([0, 0, 0, 0, 1, 1])
        >>> np.bincount(labels[balanced_indices(labels, 4)])
        array([2, 2])
        >>> np.bincount(labels[balanced_indices(labels, 5)])  # class 1 has run out
        array([3, 2])
    """
    labels = checks.tensor("labels", labels, ("rows",), floating=False).numpy(force=True)
    checks.count("n", n, at_most=len(labels))
    random = np.random.default_rng(checks.count("seed", seed, at_least=0))
    order = random.permutation(len(labels))
    _, labels, counts = np.unique(labels, return_inverse=True, return_counts=True)
    rounds = np.empty_like(order)  # how many of its class come before each row of `order`
    rounds[labels[order].argsort(kind="stable")] = np.concatenate([*map(np.arange, counts)])
    turn = random.permutation(len(counts))[labels[order]]
    return np.sort(order[np.lexsort((turn, rounds))[:n]])


def gaussian_blobs(
    n: int,
    *,
    dim: int,
    classes: int,
    separation: float,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Split:
    r"""Draw classes that are unit Gaussians, their means equally far apart.

    A sample of class c is :math:`x = \mu_c + z` with :math:`z \sim N(0, I)`. The means are the
    corners of a regular simplex around the origin, :math:`\|\mu_a - \mu_b\|` = ``separation``. The
    best classifier takes the nearest mean; for two classes it errs with probability
    :math:`\Phi(-\text{separation} / 2)`.

    Args:
        n: How many samples. Classes share them evenly, the first ones taking what is left over.
        dim: Dimensions of a sample, at least ``classes - 1``.
        classes: How many classes, at least 2.
        separation: Distance of two means, in standard deviations.
        seed: Decides the noise and the order of the samples.
        dtype: Floating-point type of ``x``.

    Returns:
        The samples, in random order. ``x`` has shape ``(n, dim)`` and is not limited to [0, 1].

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> blobs = gaussian_blobs(20_000, dim=1, classes=2, separation=2.0)
        >>> errors = (blobs.x[:, 0] < 0) != (blobs.y == 1)  # class 0 is centred on +1
        >>> bool(abs(errors.double().mean() - 0.1587) < 0.01)  # Φ(-1)
        True
    """
    from scipy.linalg import helmert

    checks.count("n", n)
    checks.count("classes", classes, at_least=2)
    checks.count("dim", dim, at_least=classes - 1)
    checks.non_negative("separation", separation)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point type of torch; got {dtype!r}.")
    # Columns of a Helmert matrix are the corners of a simplex with edges √2.
    means = torch.zeros(classes, dim, dtype=torch.float64)
    means[:, : classes - 1] = torch.from_numpy(helmert(classes).T) * separation / math.sqrt(2)
    random = runtime.generator(seed)
    y = (torch.arange(n) % classes)[torch.randperm(n, generator=random)]
    x = means[y] + torch.randn(n, dim, dtype=torch.float64, generator=random)
    return Split(x.to(dtype), y, torch.arange(n))
