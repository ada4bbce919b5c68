"""Which data sets there are, which files make each present, and how to get it."""

import lzma
import math
import os
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path

import numpy as np
import platformdirs

from flatbook import archives, runtime, vision
from flatbook.archives import ASSETS, CorruptDataError, DataNotFoundError, Source

# What reading a damaged file raises, here and in torchvision.
_DAMAGE = (
    AssertionError,
    EOFError,
    IndexError,
    KeyError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    lzma.LZMAError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    zlib.error,
)

# What a download that breaks off raises, or unpacking what came of it.
_BROKEN_OFF = (
    EOFError,
    HTTPException,
    OSError,
    RuntimeError,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True)
class Entry:
    """A data set that `flatbook.data.load` knows.

    Attributes:
        description: What it holds, in a line.
        licence: As stated at its source.
        classes: Number of classes, save that an image folder decides its own.
        layouts: From the files that make the set present, relative to a data folder, to the
            function that reads them from there.
        sizes: Number of training and of test samples, if fixed.
        shape: Shape of an input, if fixed.
        within: The package that ships it, if it needs no folder.
        torchvision: The class of ``torchvision.datasets`` that downloads it, if one does.
        get: What to do to get it, where nothing downloads it.
        image_size: Default side of its images in pixels, if they are scaled.
    """

    description: str
    licence: str
    classes: int
    layouts: dict[tuple[str, ...], Callable[..., Source]]
    sizes: tuple[int, int] | None = None
    shape: tuple[int, ...] | None = None
    within: str = ""
    torchvision: str = ""
    get: str = ""
    image_size: int | None = None


def _torchvision(
    kind: str, folder: str, names: str, classes: tuple[str, ...] | None = None
) -> dict:
    read = partial(vision.torchvision_set, kind=kind, classes=classes)
    return {tuple(f"{folder}/{name}" for name in names.split()): read}


def _npz(file: str, read: Callable[[Path], Source]) -> dict:
    """Read an archive of NumPy arrays whose labels are whole numbers and whose bits suffice."""

    def checked(folder: Path) -> Source:
        with np.load(folder / file) as archive:
            for name in (name for name in archive.files if name.endswith("labels")):
                labels = archive[name]
                if labels.ndim != 1 or labels.dtype.kind not in "iu":
                    raise CorruptDataError(
                        f"{name} of {folder / file} must be a row of whole numbers; got "
                        f"{labels.dtype} of shape {labels.shape}."
                    )
            if "n_features" in archive.files:  # NumPy would make up for lacking bits with zeros
                wanted, given = int(archive["n_features"]), 8 * archive["features"].shape[1]
                if not 0 < wanted <= given < wanted + 8:
                    raise CorruptDataError(
                        f"features of {folder / file} must hold the bits of n_features, {wanted}, "
                        f"filled up to whole bytes; got {given} bits a row."
                    )
        return read(folder)

    return {(file,): checked}


def _images(name: str, size: int) -> dict:
    return {
        "layouts": {(f"{name}/train",): partial(vision.image_folder, name=name)},
        "get": f"put its images in {name}/train/CLASS/ and {name}/val/CLASS/ there",
        "image_size": size,
    }


_IDX = " ".join(
    f"raw/{name}-ubyte"
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
)
_CIFAR10 = " ".join(("batches.meta", *(f"data_batch_{i}" for i in range(1, 6)), "test_batch"))
_KRIZHEVSKY = "none stated; research use with citation (Krizhevsky, 2009)"

SETS = {
    "fashion-mnist": Entry(
        "clothes, 28 × 28 grey: 12,000 of fashion-mnist-full, as many of each class",
        "MIT",
        10,
        {("fashion-mnist.npz",): archives.fashion_subset},
        sizes=(10_000, 2_000),
        within="flatbook",
    ),
    "fashion-mnist-full": Entry(
        "clothes, 28 × 28 grey",
        "MIT",
        10,
        _torchvision("FashionMNIST", "FashionMNIST", _IDX, archives.FASHION_CLASSES),
        sizes=(60_000, 10_000),
        shape=(1, 28, 28),
        torchvision="FashionMNIST",
    ),
    "mnist": Entry(
        "handwritten digits, 28 × 28 grey",
        "none stated",
        10,
        {
            **_torchvision("MNIST", "MNIST", _IDX, archives.DIGITS),
            **_npz("mnist.npz", archives.mnist_npz),
        },
        sizes=(60_000, 10_000),
        shape=(1, 28, 28),
        torchvision="MNIST",
    ),
    "cifar10": Entry(
        "animals and vehicles, 32 × 32 colour",
        _KRIZHEVSKY,
        10,
        _torchvision("CIFAR10", "cifar-10-batches-py", _CIFAR10),
        sizes=(50_000, 10_000),
        shape=(3, 32, 32),
        torchvision="CIFAR10",
    ),
    "cifar100": Entry(
        "animals, plants, things and scenes, 32 × 32 colour",
        _KRIZHEVSKY,
        100,
        _torchvision("CIFAR100", "cifar-100-python", "meta train test"),
        sizes=(50_000, 10_000),
        shape=(3, 32, 32),
        torchvision="CIFAR100",
    ),
    "cifar100-subset": Entry(
        "200 training and 50 test images per class of cifar100, in an order of their own",
        _KRIZHEVSKY,
        100,
        {("cifar100_subset_webp_sheets.zip",): archives.cifar100_sheets},
        sizes=(20_000, 5_000),
        get="put cifar100_subset_webp_sheets.zip there, or take a subset of your own with "
        "load('cifar100', n_train=20_000, n_test=5_000, download=True)",
    ),
    "digits": Entry(
        "handwritten digits, 8 × 8 grey",
        "BSD-3-Clause, with scikit-learn",
        10,
        {(): archives.digits},
        sizes=(1_437, 360),
        within="scikit-learn",
    ),
    "location30": Entry(
        "check-ins of 5,010 people, 446 bits each, in 30 groups",
        "none stated",
        30,
        _npz("location30.npz", archives.location30),
        sizes=(4_008, 1_002),
        shape=(446,),
        get="put location30.npz there (features: rows of numpy.packbits, n_features, labels)",
    ),
    "adult": Entry(
        "a census, 6 numbers and 102 one-hot categories each, by income",
        "CC BY 4.0, per UCI",
        2,
        {
            ("adult.data", "adult.test"): archives.adult,
            ("adult.data.xz", "adult.test.xz"): archives.adult,
        },
        sizes=(32_561, 16_281),
        get="put adult.data and adult.test of UCI's Machine Learning Repository there",
    ),
    "tiny-imagenet": Entry(
        "200 classes of ImageNet, 64 × 64 colour",
        "none stated",
        200,
        **_images("tiny-imagenet", 64),
    ),
    "imagenet": Entry(
        "ImageNet (ILSVRC 2012), 224 × 224 colour",
        "non-commercial research, on request",
        1000,
        **_images("imagenet", 224),
    ),
    "eyepacs": Entry(
        "retinas by grade of diabetic retinopathy, 224 × 224 colour",
        "rules of its Kaggle competition",
        5,
        **_images("eyepacs", 224),
    ),
}


def data_root(root: str | os.PathLike | None = None) -> Path:
    """Return the folder where data sets are kept.

    It is ``root``; without it the folder that the variable ``FLATBOOK_DATA`` names; without that
    the user's cache folder.

    Raises:
        ValueError: If ``root`` is not a path, or is a file.
    """
    if root is None:
        root = os.environ.get("FLATBOOK_DATA") or platformdirs.user_cache_path("flatbook")
    if not isinstance(root, str | os.PathLike) or not os.fspath(root):
        raise ValueError(f"root must be a path to a folder; got {root!r}.")
    folder = Path(root).expanduser()
    if folder.is_file():
        raise ValueError(f"root must be a folder; got the file {folder}.")
    return folder


def folders(name: str, root: str | os.PathLike | None = None) -> list[Path]:
    """Return where to look for a set: the data folder, then ``$FLATBOOK_SHARED/data`` if set."""
    home = data_root(root)
    if SETS[name].within:
        return [ASSETS]
    shared = os.environ.get("FLATBOOK_SHARED")
    return [home, Path(shared).expanduser() / "data"] if shared else [home]


def find(name: str, places: list[Path]) -> tuple[Path, Callable[..., Source]] | None:
    """Return the first place that has all files of a set, and their reader; None if none has."""
    for place in places:
        for wanted, read in SETS[name].layouts.items():
            if all(os.path.exists(place / file) for file in wanted):
                return place, read
    return None


def absence(name: str, places: list[Path]) -> str:
    """Return a sentence on where a set was looked for and how to get it."""
    return f"{name} is not in {' or '.join(map(str, places))}: {_advice(name)}."


def _advice(name: str) -> str:
    entry = SETS[name]
    if entry.within:
        return f"install {entry.within} again"
    command = f"get it with `flatbook data {name} --download` or load({name!r}, download=True)"
    return f"{entry.get or command}, or say where it is with root=FOLDER"


def download(name: str, folder: Path) -> None:
    """Download a set that torchvision knows; it is whole or absent afterwards.

    Raises:
        DataNotFoundError: If the download fails.
    """
    wanted = next(iter(SETS[name].layouts))
    try:
        vision.download(folder, SETS[name].torchvision, Path(wanted[0]).parts[0])
    except _BROKEN_OFF as error:
        reason = str(error).rstrip(".") or type(error).__name__
        raise DataNotFoundError(f"{name} could not be downloaded to {folder}: {reason}.") from error


@contextmanager
def intact(name: str, folder: Path) -> Iterator[None]:
    """Report whatever a damaged file raises as `CorruptDataError`, with the way to mend it."""
    try:
        yield
    except (CorruptDataError, PermissionError):
        raise
    except _DAMAGE as error:
        mend = _advice(name) if SETS[name].within else f"remove it, then {_advice(name)}"
        reason = str(error).rstrip(".") or type(error).__name__
        raise CorruptDataError(
            f"{name} in {folder} is damaged or incomplete ({reason}): {mend}."
        ) from error


def verified(name: str, folder: Path, source: Source) -> Source:
    """Return ``source`` if its samples are as many and as large as they should be, and labelled.

    Raises:
        CorruptDataError: If it has not.
    """
    wanted = SETS[name].sizes
    sizes = len(source.train.labels), len(source.test.labels)
    if wanted and sizes != wanted:
        raise CorruptDataError(
            f"{name} in {folder} must hold {wanted[0]} training and {wanted[1]} test samples; "
            f"got {sizes[0]} and {sizes[1]}."
        )
    shape = SETS[name].shape
    for split in (source.train, source.test):
        if shape and split.shape != shape:
            raise CorruptDataError(
                f"inputs of {name} in {folder} must have shape {shape}; got {split.shape}."
            )
    classes = len(source.classes) if source.classes else SETS[name].classes
    for split in (source.train, source.test):
        low, high = split.labels.min(), split.labels.max()
        if low < 0 or high >= classes:
            raise CorruptDataError(
                f"labels of {name} in {folder} must lie in 0..{classes - 1}; got {low}..{high}."
            )
    return source


def refuse_beyond_memory(name: str, samples: int, shape: tuple[int, ...]) -> None:
    """Raise a ValueError if reading so many inputs of a shape would fill the machine's memory."""
    # Bytes and floats of an image are held together for a moment: 1 + 4 per number.
    needed, held = 5 * samples * math.prod(shape), runtime.memory()
    if needed > 0.75 * held:
        raise ValueError(
            f"{samples} samples of {name}, {' × '.join(map(str, shape))} each, need "
            f"{needed / 2**30:.1f} GiB and this machine has {held / 2**30:.1f}: ask for fewer with "
            "n_train and n_test."
        )
