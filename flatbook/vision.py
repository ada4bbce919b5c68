"""Data sets that torchvision reads: its own, and folders of images."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flatbook.archives import CorruptDataError, Part, Source, part, pixels
from flatbook.files import atomic_folder


def torchvision_set(folder: Path, kind: str, *, classes: tuple[str, ...] | None = None) -> Source:
    """Read what ``torchvision.datasets.KIND(folder)`` reads and verifies."""
    from torchvision import datasets

    splits = [getattr(datasets, kind)(folder, train=train) for train in (True, False)]
    train, test = (pixels(np.asarray(split.data), split.targets) for split in splits)
    return Source(train, test, classes or tuple(splits[0].classes))


def download(folder: Path, kind: str, content: str) -> None:
    """Download ``torchvision.datasets.KIND`` so that ``folder / content`` is whole or absent."""
    from torchvision import datasets

    with atomic_folder(folder / content) as staging:
        getattr(datasets, kind)(staging, download=True)


def image_folder(folder: Path, name: str, *, image_size: int) -> Source:
    """Read ``folder/name/{train,test|val}/CLASS/*.jpg``, scaled and cropped to squares.

    The shorter side becomes ``image_size`` pixels and the centre is kept. Images are decoded only
    when fetched.
    """
    home = folder / name
    classes = _subfolders(home / "train")
    held_out = [s for s in ("test", "val") if classes and _subfolders(home / s) == classes]
    if not held_out:
        raise CorruptDataError(
            f"{home} must hold train/CLASS/ and, with the same {len(classes)} classes, test/CLASS/ "
            "or val/CLASS/."
        )
    train, test = (_image_part(home / split, image_size) for split in ("train", held_out[0]))
    return Source(train, test, tuple(classes))


def _subfolders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.glob("*/"))


def _image_part(folder: Path, size: int) -> Part:
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import functional

    listing = ImageFolder(folder)

    def decode(row: int) -> Tensor:
        path, _ = listing.samples[row]
        try:
            image = listing.loader(path)
        except OSError as error:
            raise CorruptDataError(f"{path} is not a readable image: {error}.") from error
        return functional.pil_to_tensor(
            functional.center_crop(functional.resize(image, size), size)
        )

    def fetch(rows: np.ndarray) -> Tensor:
        images = torch.empty(len(rows), 3, size, size)
        with ThreadPoolExecutor() as pool:
            for place, image in enumerate(pool.map(decode, rows)):
                images[place] = image
        return images.div_(255)

    return part(fetch, listing.targets, (3, size, size))
