"""Build flatbook/assets/fashion-mnist.npz from the files of Fashion-MNIST.

    python scripts/make_fashion_subset.py [FOLDER] [--out FILE]

FOLDER holds the four .gz files as published; Debian's package dataset-fashion-mnist puts them in
/usr/share/datasets/fashion-mnist. The rows are those of flatbook.data.load("fashion-mnist-full",
n_train=10_000, n_test=2_000). Every run on one machine writes the same bytes; the printed checksum
is of the arrays, so it is the same on every machine, and flatbook verifies it on each load.
"""

import argparse
import gzip
from pathlib import Path

import numpy as np

from flatbook import archives
from flatbook.data import balanced_indices
from flatbook.files import atomic_write

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
SIZES = {"train": 10_000, "t10k": 2_000}


def subset(folder: Path) -> dict[str, np.ndarray]:
    def read(file: str, header: int) -> np.ndarray:
        return np.frombuffer(gzip.decompress((folder / file).read_bytes()), np.uint8, offset=header)

    arrays = []
    for split, n in SIZES.items():
        images = read(f"{split}-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)
        labels = read(f"{split}-labels-idx1-ubyte.gz", 8)
        indices = balanced_indices(labels, n)
        arrays += [images[indices], labels[indices], indices.astype(np.uint16)]
    return dict(zip(archives.FASHION_ARRAYS, arrays, strict=True))


def build(folder: Path, out: Path) -> str:
    arrays = subset(folder)
    with atomic_write(out, "wb") as file:
        np.savez_compressed(file, **arrays)  # dates its members 1980, whenever it runs
    return archives.checksum(*arrays.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=DEBIAN)
    parser.add_argument("--out", type=Path, default=archives.ASSETS / "fashion-mnist.npz")
    options = parser.parse_args()
    found = build(options.folder, options.out)
    same = "as recorded" if found == archives.FASHION_CHECKSUM else "NOT archives.FASHION_CHECKSUM"
    print(f"{options.out}: {options.out.stat().st_size:,} bytes, checksum {found}, {same}")
