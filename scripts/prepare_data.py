"""Make a data folder that flatbook.data.load and torchvision read, without a download.

    python scripts/prepare_data.py [ROOT]

ROOT is $FLATBOOK_DATA, or _build/data, unless given. CIFAR-10 is restored from the image sheets in
$FLATBOOK_SHARED/data (../shared, where that exists), Fashion-MNIST unpacked from the files of
Debian's package dataset-fashion-mnist. What is there already stays; one line is printed per set.
"""

import argparse
import gzip
import os
import shutil
import subprocess
import sys
from pathlib import Path

from flatbook.files import atomic_folder

REPOSITORY = Path(__file__).resolve().parents[1]
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
IDX = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")


def shared_folder() -> Path:
    return Path(os.environ.get("FLATBOOK_SHARED") or REPOSITORY.parent / "shared")


def default_root() -> Path:
    return Path(os.environ.get("FLATBOOK_DATA") or REPOSITORY / "_build" / "data")


def prepare_cifar10(root: Path, shared: Path) -> str:
    from torchvision.datasets import CIFAR10

    try:
        CIFAR10(root, train=False)  # verifies every file's md5
    except RuntimeError:
        sheets = shared / "data" / "cifar10_webp_sheets.zip"
        restore = shared / "tools" / "restore_cifar10.py"
        if not (sheets.exists() and restore.exists()):
            return f"skipped, {sheets} or {restore} is not there"
        with atomic_folder(root / CIFAR10.base_folder) as staging:
            command = [sys.executable, restore, sheets, staging]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            CIFAR10(staging, train=False)
        return f"restored from {sheets}"
    return "was there"


def prepare_fashion_mnist(root: Path, debian: Path = DEBIAN) -> str:
    raw = root / "FashionMNIST" / "raw"
    if all((raw / f"{name}-ubyte").exists() for name in IDX):
        return "was there"
    packed = [debian / f"{name}-ubyte.gz" for name in IDX]
    if not all(file.exists() for file in packed):
        return f"skipped, Debian's package dataset-fashion-mnist is not in {debian}"
    with atomic_folder(root / "FashionMNIST") as staging:
        folder = staging / "FashionMNIST" / "raw"
        folder.mkdir(parents=True)
        for file in packed:
            with gzip.open(file) as source, open(folder / file.stem, "wb") as target:
                shutil.copyfileobj(source, target)
    return f"unpacked from {debian}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("root", nargs="?", type=Path, default=default_root())
    root = parser.parse_args().root.expanduser()
    print(f"cifar10: {prepare_cifar10(root, shared_folder())}", flush=True)
    print(f"fashion-mnist-full: {prepare_fashion_mnist(root)}", flush=True)
