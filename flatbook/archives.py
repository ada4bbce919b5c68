"""Readers of the files that data sets come in, one function a format.

A reader takes a folder and returns a `Source`: labels at once, inputs only for the rows that
`Part.fetch` is asked for, so that a small subset of a large set costs little.
"""

import csv
import hashlib
import io
import lzma
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

ASSETS = Path(__file__).with_name("assets")
FASHION_CHECKSUM = "b5c4214bdf922be3c3d2e0bd77054648436869ae2a6618914f3d7124fcb44f92"
FASHION_ARRAYS = tuple(
    f"{split}_{array}" for split in ("train", "test") for array in ("images", "labels", "indices")
)
FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
DIGITS = tuple("0123456789")
ADULT_CLASSES = ("<=50K", ">50K")
ADULT_NUMBERS = {
    "age": 0, "fnlwgt": 2, "education-num": 4,
    "capital-gain": 10, "capital-loss": 11, "hours-per-week": 12,
}  # fmt: skip
ADULT_CATEGORIES = {
    "workclass": 1, "education": 3, "marital-status": 5, "occupation": 6,
    "relationship": 7, "race": 8, "sex": 9, "native-country": 13,
}  # fmt: skip
TILE = 32
ROWS, COLUMNS = 20, 25  # images on a sheet


class DataNotFoundError(FileNotFoundError, ValueError):
    """A data set is not where it was looked for; the message says how to get it."""


class CorruptDataError(ValueError):
    """The files of a data set are there but do not hold what they should."""


@dataclass(frozen=True, eq=False)
class Part:
    """One split before its inputs are read.

    Attributes:
        labels: Class of each row, int64. Shape ``(rows,)``.
        shape: Shape of one input.
        fetch: From row numbers ``(n,)`` to float32 inputs ``(n, *shape)``.
        indices: Number of each row in the set it was drawn from. Shape ``(rows,)``.
    """

    labels: np.ndarray
    shape: tuple[int, ...]
    fetch: Callable[[np.ndarray], Tensor]
    indices: np.ndarray


@dataclass(frozen=True, eq=False)
class Source:
    """Both splits before their inputs are read, and names where they are known."""

    train: Part
    test: Part
    classes: tuple[str, ...] | None = None
    feature_names: tuple[str, ...] | None = None


def checksum(*arrays: np.ndarray | Tensor) -> str:
    """Return the SHA-256 of the arrays' types, shapes and bytes, in order, as hexadecimals.

    NumPy has no bfloat16: such a tensor counts as the float32 of equal value.

    Example:
        >>> checksum(np.zeros(2)) == checksum(np.zeros(2)) != checksum(np.zeros((2, 1)))
        True
    """
    digest = hashlib.sha256()
    for array in arrays:
        if isinstance(array, Tensor):
            array = array.float() if array.dtype == torch.bfloat16 else array
            array = array.detach().cpu().numpy()
        array = np.asarray(array)
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def pixels(images: np.ndarray, labels: Sequence[int], indices: np.ndarray | None = None) -> Part:
    """Serve bytes ``(rows, height, width)`` or ``(…, channels)``, channels first, in [0, 1]."""
    if images.dtype != np.uint8 or len(images) != len(labels):
        raise CorruptDataError(
            f"images must be bytes and as many as the labels, {len(labels)}; got {len(images)} of "
            f"{images.dtype}."
        )
    images = images[..., None] if images.ndim == 3 else images
    height, width, channels = images.shape[1:]
    return part(lambda rows: _scaled(images[rows]), labels, (channels, height, width), indices)


def table(values: np.ndarray, labels: Sequence[int], indices: np.ndarray | None = None) -> Part:
    """Serve rows of finite numbers as float32, unchanged."""
    if not np.isfinite(values).all() or len(values) != len(labels):
        raise CorruptDataError(
            f"rows must be finite and as many as the labels, {len(labels)}; got {len(values)}."
        )
    return part(
        lambda rows: torch.from_numpy(values[rows]).float(), labels, values.shape[1:], indices
    )


def part(
    fetch: Callable[[np.ndarray], Tensor],
    labels: Sequence[int],
    shape: tuple[int, ...],
    indices: np.ndarray | None = None,
) -> Part:
    """Return a `Part` whose rows are numbered from 0 unless ``indices`` says otherwise."""
    labels = np.asarray(labels, dtype=np.int64)
    indices = np.arange(len(labels)) if indices is None else np.asarray(indices, dtype=np.int64)
    return Part(labels, shape, fetch, indices)


def _scaled(images: np.ndarray) -> Tensor:
    channels_first = torch.from_numpy(images).permute(0, 3, 1, 2)
    return channels_first.to(torch.float32, memory_format=torch.contiguous_format).div_(255)


def fashion_subset(folder: Path) -> Source:
    """Read the subset of Fashion-MNIST that ships with the package, and verify its checksum."""
    with np.load(folder / "fashion-mnist.npz") as archive:
        arrays = {name: archive[name] for name in FASHION_ARRAYS}
    if checksum(*arrays.values()) != FASHION_CHECKSUM:
        raise CorruptDataError(
            f"{folder / 'fashion-mnist.npz'} does not have the checksum it shipped with: "
            "install flatbook again."
        )
    parts = [*arrays.values()]
    return Source(pixels(*parts[:3]), pixels(*parts[3:]), FASHION_CLASSES)


def mnist_npz(folder: Path) -> Source:
    """Read MNIST from ``mnist.npz``, 28 × 28 bytes an image, in the original order."""
    with np.load(folder / "mnist.npz") as archive:
        train, test = (
            pixels(archive[f"{split}_images"], archive[f"{split}_labels"])
            for split in ("train", "test")
        )
    return Source(train, test, DIGITS)


def cifar100_sheets(folder: Path) -> Source:
    """Read 200 training and 50 test images per class from ``cifar100_subset_webp_sheets.zip``.

    A sheet is a lossless WebP of 20 × 25 images; only the sheets that are asked for are decoded.
    """
    path = folder / "cifar100_subset_webp_sheets.zip"

    def sheets(split: str) -> Part:
        with zipfile.ZipFile(path) as archive:
            labels = np.frombuffer(archive.read(f"{split}_labels.bin"), np.uint8)

        def fetch(rows: np.ndarray) -> Tensor:
            images = np.empty((len(rows), TILE, TILE, 3), np.uint8)
            numbers, places = np.divmod(rows, ROWS * COLUMNS)
            with zipfile.ZipFile(path) as archive:
                for sheet in np.unique(numbers):
                    here = numbers == sheet
                    images[here] = _tiles(archive.read(f"{split}_{sheet:03d}.webp"))[places[here]]
            return _scaled(images)

        return part(fetch, labels, (3, TILE, TILE))

    with zipfile.ZipFile(path) as archive:
        classes = tuple(archive.read("classes.txt").decode().split())
    return Source(sheets("train"), sheets("test"), classes)


def _tiles(webp: bytes) -> np.ndarray:
    from PIL import Image

    sheet = np.asarray(Image.open(io.BytesIO(webp)).convert("RGB"))
    grid = sheet.reshape(ROWS, TILE, COLUMNS, TILE, 3).swapaxes(1, 2)
    return grid.reshape(ROWS * COLUMNS, TILE, TILE, 3)


def location30(folder: Path) -> Source:
    """Read the check-ins of ``location30.npz``, bits packed eight to a byte; fixed 80/20 split."""
    with np.load(folder / "location30.npz") as archive:
        bits = np.unpackbits(archive["features"], axis=1, count=int(archive["n_features"]))
        return _split(bits.astype(np.float32), archive["labels"])


def digits(folder: Path) -> Source:
    """Read scikit-learn's digits, grey levels 0 to 16; fixed 80/20 split; no ``folder`` is read."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.float32(bunch.images[:, None] / 16)
    return _split(images, bunch.target, DIGITS)


def _split(values, labels, classes=None) -> Source:
    from sklearn.model_selection import train_test_split

    rows = np.arange(len(labels))
    rows = train_test_split(rows, test_size=0.2, stratify=labels, random_state=0)
    train, test = (table(values[chosen], labels[chosen], chosen) for chosen in map(np.sort, rows))
    return Source(train, test, classes)


def adult(folder: Path) -> Source:
    """Read UCI Adult from ``adult.data`` and ``adult.test``, plain or ``.xz``."""
    return encode_adult(*(_adult_rows(folder / f"adult.{split}") for split in ("data", "test")))


def _adult_rows(path: Path) -> list[list[str]]:
    packed = path.with_name(f"{path.name}.xz")
    text = (
        path.read_text("utf-8") if path.exists() else lzma.decompress(packed.read_bytes()).decode()
    )
    lines = (line for line in text.splitlines() if line and not line.startswith("|"))
    return list(csv.reader(lines, skipinitialspace=True))


def encode_adult(train: list[list[str]], test: list[list[str]]) -> Source:
    """Turn rows of Adult, 14 attributes and the income each, into numbers.

    A number x becomes (x − min) / (max − min) with the range of the training rows, so a test row
    may leave [0, 1]. A category becomes one 0/1 feature per training value, a missing one (``?``)
    being a value of its own. The numbers come first. Class 1 earns over 50,000 dollars a year.

    Raises:
        CorruptDataError: If a row has not 15 fields, a number is none, or a category of the test
            rows or an income is unknown.

    Example:
        >>> young, old = ["20"] + ["1"] * 13 + ["<=50K"], ["40"] + ["1"] * 13 + [">50K"]
        >>> source = encode_adult([young, old], [["50"] + ["1"] * 13 + [">50K."]])
        >>> source.test.labels, source.test.fetch(np.array([0]))[0, 0], source.feature_names[6]
        (array([1]), tensor(1.5000), 'workclass_1')
    """
    from sklearn.preprocessing import MinMaxScaler, OneHotEncoder

    for row in (*train, *test):
        if len(row) != 15 or row[14].rstrip(".") not in ADULT_CLASSES:
            raise CorruptDataError(f"a row of adult must have 15 fields, income last; got {row}.")
    splits = [np.array(rows) for rows in (train, test)]
    try:
        numbers = [rows[:, [*ADULT_NUMBERS.values()]].astype(np.float64) for rows in splits]
        categories = [rows[:, [*ADULT_CATEGORIES.values()]] for rows in splits]
        scaler = MinMaxScaler().fit(numbers[0])
        encoder = OneHotEncoder(sparse_output=False).fit(categories[0])
        values = [
            np.hstack([scaler.transform(number), encoder.transform(category)])
            for number, category in zip(numbers, categories, strict=True)
        ]
    except ValueError as error:
        raise CorruptDataError(f"adult holds a number or category out of place: {error}") from error
    parts = (
        table(x.astype(np.float32), [ADULT_CLASSES.index(row[14].rstrip(".")) for row in rows])
        for x, rows in zip(values, (train, test), strict=True)
    )
    names = (*ADULT_NUMBERS, *encoder.get_feature_names_out([*ADULT_CATEGORIES]))
    return Source(*parts, ADULT_CLASSES, tuple(names))
