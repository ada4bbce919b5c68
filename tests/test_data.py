import dataclasses
import io
import math
import random
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from http.client import IncompleteRead

import numpy as np
import pytest
import torch
from conftest import absent
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.testing import assert_close

from flatbook import archives, data, registry, runtime


@pytest.fixture(autouse=True)
def no_data_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("FLATBOOK_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("FLATBOOK_SHARED", raising=False)


@pytest.fixture(scope="module")
def fashion():
    return data.load("fashion-mnist")


@pytest.fixture
def pictures(tmp_path):
    """Return a folder with ``eyepacs``: 2 classes, 4 + 1 training and 1 + 1 test images."""
    for split, counts in (("train", {"mild": 4, "none": 1}), ("val", {"mild": 1, "none": 1})):
        for label, (name, n) in enumerate(counts.items()):
            folder = tmp_path / "eyepacs" / split / name
            folder.mkdir(parents=True)
            for i in range(n):
                # Wide, with a blue left quarter that a central square leaves out.
                image = Image.new("RGB", (16, 8), (255 * label, 51 * i, 0))
                image.paste((0, 0, 255), (0, 0, 4, 8))
                image.save(folder / f"{i}.png")
    return tmp_path


def assert_well_formed(dataset, shape, sizes, classes):
    assert dataset.num_classes == classes
    for split, size in zip((dataset.train, dataset.test), sizes, strict=True):
        assert split.x.shape == (size, *shape)
        assert split.x.dtype == torch.float32
        assert split.x.is_contiguous()
        assert split.y.shape == split.indices.shape == (size,)
        assert split.y.dtype == split.indices.dtype == torch.int64
        assert len(split) == size
        assert split.y.unique().tolist() == list(range(classes))
        assert (split.indices.diff() > 0).all()


# What ships


def test_fashion_mnist_needs_nothing_but_the_package(fashion):
    assert_well_formed(fashion, (1, 28, 28), (10_000, 2_000), 10)
    assert fashion.train.y.bincount().tolist() == [1_000] * 10
    assert fashion.test.y.bincount().tolist() == [200] * 10
    assert fashion.classes[9] == "Ankle boot"
    assert (fashion.train.x.min(), fashion.train.x.max()) == (0, 1)
    assert_close(fashion.train.x * 255, (fashion.train.x * 255).round())


def test_fashion_mnist_is_the_balanced_choice_from_the_full_set(fashion, fashion_mnist_root):
    full = data.load("fashion-mnist-full", root=fashion_mnist_root)
    assert_well_formed(full, (1, 28, 28), (60_000, 10_000), 10)
    for part, whole in ((fashion.train, full.train), (fashion.test, full.test)):
        assert part.x.equal(whole.x[part.indices])
        assert part.y.equal(whole.y[part.indices])
        assert part.indices.tolist() == data.balanced_indices(whole.y, len(part)).tolist()


def test_the_subset_script_writes_the_same_bytes_every_time(repository, tmp_path):
    script = runpy.run_path(str(repository / "scripts" / "make_fashion_subset.py"))
    if not script["DEBIAN"].is_dir():
        pytest.skip(f"Debian's package dataset-fashion-mnist is not in {script['DEBIAN']}")
    outcomes = {script["build"](script["DEBIAN"], tmp_path / name) for name in ("first", "second")}
    assert outcomes == {archives.FASHION_CHECKSUM}
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


@pytest.fixture
def asset(monkeypatch, tmp_path):
    copy = tmp_path / "fashion-mnist.npz"
    copy.write_bytes((archives.ASSETS / copy.name).read_bytes())
    monkeypatch.setattr(registry, "ASSETS", tmp_path)
    return copy


def test_a_changed_pixel_is_noticed(asset):
    with np.load(asset) as archive:
        arrays = dict(archive)
    np.savez_compressed(asset, **arrays)
    data.load("fashion-mnist")  # the same arrays, packed anew
    arrays["test_images"][5, 14, 14] ^= 1
    np.savez_compressed(asset, **arrays)
    with pytest.raises(
        data.CorruptDataError, match=r"not have the checksum .* install flatbook again"
    ):
        data.load("fashion-mnist")


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "text"])
def test_a_damaged_archive_is_noticed(asset, damage):
    raw = bytearray(asset.read_bytes())
    if damage == "flipped":
        raw[len(raw) // 2] ^= 0xFF
    replacement = {
        "truncated": raw[: len(raw) // 2],
        "flipped": raw,
        "empty": b"",
        "text": b"hello",
    }
    asset.write_bytes(replacement[damage])
    with pytest.raises(
        data.CorruptDataError, match=r"fashion-mnist in .* is damaged .* install flatbook again"
    ):
        data.load("fashion-mnist")


def test_a_lost_archive_is_noticed(asset):
    asset.unlink()
    with pytest.raises(
        data.DataNotFoundError, match=r"fashion-mnist is not in .*: install flatbook"
    ):
        data.load("fashion-mnist")


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    digits, bunch = data.load("digits"), load_digits()
    assert_well_formed(digits, (1, 8, 8), (1_437, 360), 10)
    for split in (digits.train, digits.test):
        assert (split.x[:, 0] * 16).double().equal(torch.from_numpy(bunch.images[split.indices]))
        assert split.y.equal(torch.from_numpy(bunch.target[split.indices]))
    both = torch.cat([digits.train.indices, digits.test.indices]).sort().values
    assert both.equal(torch.arange(1_797))
    shares = digits.test.y.bincount() / torch.from_numpy(np.bincount(bunch.target))
    assert ((shares - 0.2).abs() < 0.01).all()


def test_checksums_are_the_same_on_every_machine(fashion):
    assert fashion.checksum.startswith("82f67f11")
    assert data.load("digits").checksum.startswith("b5e20df7")
    few = data.load("digits", n_train=50, seed=3).train
    assert few.indices[:5].tolist() == [6, 19, 146, 158, 206]


# What is beside the project


def test_cifar10_is_the_real_one(cifar10_root):
    from torchvision.datasets import CIFAR10
    from torchvision.transforms.functional import to_tensor

    cifar = data.load("cifar10", root=cifar10_root)
    assert_well_formed(cifar, (3, 32, 32), (50_000, 10_000), 10)
    assert cifar.train.y.bincount().tolist() == [5_000] * 10
    assert cifar.test.y.bincount().tolist() == [1_000] * 10
    reference = CIFAR10(cifar10_root, train=False)
    for i in (0, 4_321, 9_999):
        image, label = reference[i]
        assert cifar.test.x[i].equal(to_tensor(image))
        assert cifar.test.y[i] == label
    assert cifar.classes[6] == "frog"
    some = data.load("cifar10", root=cifar10_root, n_train=500, n_test=101, seed=4)
    assert some.train.y.bincount().tolist() == [50] * 10
    assert sorted(some.test.y.bincount().tolist()) == [10] * 9 + [11]
    assert some.train.x.equal(cifar.train.x[some.train.indices])


def test_mnist_is_the_real_one(shared_data):
    mnist = data.load("mnist", root=shared_data)
    assert_well_formed(mnist, (1, 28, 28), (60_000, 10_000), 10)
    assert mnist.train.y[:6].tolist() == [5, 0, 4, 1, 9, 2]
    assert mnist.train.y.bincount()[[1, 5]].tolist() == [6_742, 5_421]
    assert mnist.classes == tuple("0123456789")
    some = data.load("mnist", root=shared_data, n_train=1_000, n_test=100)
    assert some.train.y.bincount().tolist() == [100] * 10
    assert some.train.x.equal(mnist.train.x[some.train.indices])


def test_the_shared_folder_comes_after_the_data_folder(shared_data, monkeypatch, tmp_path):
    monkeypatch.setenv("FLATBOOK_SHARED", str(shared_data.parent))
    assert {row.name: row for row in data.catalogue()}["location30"].source == str(shared_data)
    mine = tmp_path / "data"
    mine.mkdir()
    (mine / "location30.npz").write_bytes(b"mine")
    with pytest.raises(data.CorruptDataError, match=f"location30 in {mine} is damaged"):
        data.load("location30")


def test_location30_is_bits_in_a_fixed_split(shared_data):
    location = data.load("location30", root=shared_data)
    assert_well_formed(location, (446,), (4_008, 1_002), 30)
    assert location.train.x.unique().tolist() == [0, 1]
    both = torch.cat([location.train.indices, location.test.indices]).sort().values
    assert both.equal(torch.arange(5_010))
    with np.load(shared_data / "location30.npz") as archive:
        bits = np.unpackbits(archive["features"], axis=1)[:, :446]
        for split in (location.train, location.test):
            assert split.x.numpy().astype(np.uint8).tolist() == bits[split.indices].tolist()
            assert split.y.tolist() == archive["labels"][split.indices].tolist()


def test_adult_is_the_canonical_split(shared_data):
    adult = data.load("adult", root=shared_data)
    assert_well_formed(adult, (108,), (32_561, 16_281), 2)
    assert adult.train.y.bincount().tolist() == [24_720, 7_841]
    assert adult.test.y.bincount().tolist() == [12_435, 3_846]
    assert len(adult.feature_names) == len(set(adult.feature_names)) == 108
    numbers, categories = adult.train.x[:, :6], adult.train.x[:, 6:]
    assert numbers.min(dim=0).values.tolist() == [0] * 6
    assert numbers.max(dim=0).values.tolist() == [1] * 6
    assert adult.test.x.max() > 1  # a final weight above all training rows'
    assert categories.unique().tolist() == [0, 1]
    assert (categories.sum(dim=1) == 8).all()
    # The first row: 39 years old, of ages 17 to 90, a civil servant of a state.
    first = dict(zip(adult.feature_names, adult.train.x[0].tolist(), strict=True))
    assert first["age"] == pytest.approx((39 - 17) / (90 - 17))
    assert first["workclass_State-gov"] == 1
    missing = adult.train.x[:, adult.feature_names.index("workclass_?")]
    assert missing.sum() == 1_836


def test_cifar100_subset_reads_the_sheets_it_needs(shared_data, monkeypatch):
    some = data.load("cifar100-subset", root=shared_data, n_train=100, n_test=100)
    assert_well_formed(some, (3, 32, 32), (100, 100), 100)
    assert some.classes[:2] == ("apple", "aquarium_fish")
    read = []
    tiles = archives._tiles
    monkeypatch.setattr(archives, "_tiles", lambda sheet: read.append(1) or tiles(sheet))
    again = archives.cifar100_sheets(shared_data).train.fetch(some.train.indices[:2].numpy())
    assert again.equal(some.train.x[:2])
    assert len(read) <= 2


def test_cifar100_never_returns_the_subset(shared_data):
    with pytest.raises(data.DataNotFoundError, match=r"flatbook data cifar100 --download"):
        data.load("cifar100", root=shared_data)


# Files of other sets, made small


def write_idx(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def write_mnist(root, rows):
    for split, n in zip(("train", "t10k"), rows, strict=True):
        labels = np.arange(n) % 10
        images = np.broadcast_to(labels[:, None, None] * 25, (n, 28, 28))
        write_idx(root / "MNIST" / "raw" / f"{split}-images-idx3-ubyte", images)
        write_idx(root / "MNIST" / "raw" / f"{split}-labels-idx1-ubyte", labels)


@pytest.fixture
def small_mnist(monkeypatch):
    small = dataclasses.replace(registry.SETS["mnist"], sizes=(40, 20))
    monkeypatch.setitem(registry.SETS, "mnist", small)


@pytest.mark.usefixtures("small_mnist")
def test_torchvision_files_are_read(tmp_path):
    write_mnist(tmp_path, (40, 20))
    mnist = data.load("mnist", root=tmp_path)
    assert_well_formed(mnist, (1, 28, 28), (40, 20), 10)
    assert_close(mnist.train.x[:, 0, 3, 7], mnist.train.y * 25 / 255)


@pytest.mark.usefixtures("small_mnist")
def test_download_is_asked_for_and_leaves_the_set_whole(tmp_path, monkeypatch):
    from torchvision.datasets import MNIST

    calls = []
    monkeypatch.setattr(
        MNIST,
        "download",
        lambda self: calls.append(self.root) or write_mnist(tmp_path / self.root, (40, 20)),
    )
    with pytest.raises(data.DataNotFoundError):
        data.load("mnist", root=tmp_path)
    assert not calls
    first = data.load("mnist", root=tmp_path, download=True)
    again = data.load("mnist", root=tmp_path, download=True)
    assert len(calls) == 1
    assert first.checksum == again.checksum
    assert [entry.name for entry in tmp_path.iterdir()] == ["MNIST"]


@pytest.mark.parametrize(
    "failure",
    [
        OSError("no network"),
        RuntimeError("no network"),
        IncompleteRead(b"no network", 10),
        EOFError(),
        tarfile.ReadError("no network"),
        zipfile.BadZipFile("no network"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_a_failed_download_says_so_and_leaves_nothing(tmp_path, monkeypatch, failure):
    from torchvision.datasets import CIFAR10

    def no_network(self):
        folder = tmp_path / self.root / self.base_folder
        folder.mkdir(parents=True)
        (folder / "batches.meta").write_text("half")
        raise failure

    monkeypatch.setattr(CIFAR10, "download", no_network)
    with pytest.raises(
        data.DataNotFoundError, match=f"cifar10 could not be downloaded to {tmp_path}: ..."
    ):
        data.load("cifar10", root=tmp_path, download=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("small_mnist")
@pytest.mark.parametrize(
    ("rows", "message"),
    [((39, 20), "must hold 40 training and 20 test samples; got 39 and 20"), ((40, 0), "damaged")],
)
def test_an_incomplete_set_is_noticed(tmp_path, rows, message):
    write_mnist(tmp_path, rows)
    with pytest.raises(data.CorruptDataError, match=message):
        data.load("mnist", root=tmp_path)


@pytest.mark.usefixtures("small_mnist")
def test_a_truncated_file_of_torchvision_is_noticed(tmp_path):
    write_mnist(tmp_path, (40, 20))
    path = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        data.CorruptDataError, match=r"mnist in .* damaged .* remove it, then get it"
    ):
        data.load("mnist", root=tmp_path)


def test_a_failed_md5_of_torchvision_is_noticed(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in ("batches.meta", "test_batch", *(f"data_batch_{i}" for i in range(1, 6))):
        (folder / name).write_bytes(b"not CIFAR")
    with pytest.raises(
        data.CorruptDataError, match=r"cifar10 in .* damaged .*load.'cifar10', down"
    ):
        data.load("cifar10", root=tmp_path)


def test_sheets_are_cut_row_by_row(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (500, 32, 32, 3), dtype=np.uint8)
    rows = [np.concatenate([*images[start : start + 25]], axis=1) for start in range(0, 500, 25)]
    sheet = io.BytesIO()
    Image.fromarray(np.concatenate(rows)).save(sheet, "WEBP", lossless=True)
    with zipfile.ZipFile(tmp_path / "cifar100_subset_webp_sheets.zip", "w") as archive:
        archive.writestr("classes.txt", "apple\nbear")
        for split in ("train", "test"):
            archive.writestr(f"{split}_labels.bin", bytes(500))
            archive.writestr(f"{split}_000.webp", sheet.getvalue())
    chosen = np.array([0, 1, 24, 25, 499])
    x = archives.cifar100_sheets(tmp_path).test.fetch(chosen)
    assert x.equal(torch.from_numpy(images[chosen]).permute(0, 3, 1, 2) / 255)


LOCATION = {
    "features": np.zeros((5010, 56), np.uint8),
    "n_features": 446,
    "labels": np.arange(5010) % 30,
}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"features": np.zeros((5, 1), np.uint8)}, "n_features"),
        (
            {
                "features": np.full((60, 1), 255, np.uint8),
                "n_features": 8,
                "labels": np.arange(60) // 5,
            },
            "must hold 4008 training and 1002 test samples; got 48 and 12",
        ),
        (LOCATION | {"features": np.zeros((5010, 56))}, "location30 in .* damaged"),
        (LOCATION | {"n_features": [446, 446]}, "location30 in .* damaged"),
        (LOCATION | {"n_features": -2}, "must hold the bits of n_features, -2, .* got 448 bits"),
        (LOCATION | {"n_features": 0}, "must hold the bits of n_features, 0, .* got 448 bits"),
        (
            LOCATION | {"features": np.zeros((5010, 55), np.uint8)},
            "must hold the bits of n_features, 446, filled up to whole bytes; got 440 bits a row",
        ),
        (LOCATION | {"n_features": 447}, r"must have shape \(446,\); got \(447,\)"),
        (
            LOCATION | {"labels": LOCATION["labels"] + 0.5},
            r"labels of .* must be a row of whole numbers; got float64 of shape \(5010,\)",
        ),
        (
            LOCATION | {"labels": LOCATION["labels"][:, None]},
            r"labels of .* must be a row of whole numbers; got int64 of shape \(5010, 1\)",
        ),
    ],
)
def test_a_wrong_location30_is_noticed(tmp_path, arrays, message):
    np.savez(tmp_path / "location30.npz", **arrays)
    with pytest.raises(data.CorruptDataError, match=message):
        data.load("location30", root=tmp_path)


def test_labels_out_of_range_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setitem(
        registry.SETS, "mnist", dataclasses.replace(registry.SETS["mnist"], sizes=None)
    )
    images, labels = np.zeros((3, 28, 28), np.uint8), np.array([0, 1, 10])
    names = ("train_images", "train_labels", "test_images", "test_labels")
    arrays = zip(names, (images, labels, images, labels), strict=True)
    np.savez(tmp_path / "mnist.npz", **dict(arrays))
    with pytest.raises(data.CorruptDataError, match=r"mnist in .* must lie in 0\.\.9; got 0\.\.10"):
        data.load("mnist", root=tmp_path)
    wide = np.zeros((3, 28, 29), np.uint8)
    np.savez(
        tmp_path / "mnist.npz",
        **dict(zip(names, (images, labels % 10, wide, labels % 10), strict=True)),
    )
    with pytest.raises(data.CorruptDataError, match=r"shape \(1, 28, 28\); got \(1, 28, 29\)"):
        data.load("mnist", root=tmp_path)


@pytest.mark.parametrize("empty", ["adult.data", "adult.test"])
def test_an_empty_adult_is_noticed(tmp_path, empty):
    for name in ("adult.data", "adult.test"):
        (tmp_path / name).write_text("" if name == empty else ", ".join(PERSON) + "\n")
    with pytest.raises(data.CorruptDataError, match="adult"):
        data.load("adult", root=tmp_path)


PERSON = [
    "40",
    "Private",
    "7",
    "HS",
    "9",
    "No",
    "Sales",
    "Wife",
    "A",
    "F",
    "0",
    "0",
    "40",
    "NZ",
    "<=50K",
]


def person(**changes):
    columns = {**archives.ADULT_NUMBERS, **archives.ADULT_CATEGORIES, "income": 14}
    row = list(PERSON)
    for name, value in changes.items():
        row[columns[name]] = value
    return row


def test_adult_is_scaled_by_the_training_range_and_not_clipped():
    source = archives.encode_adult(
        [person(age="20", workclass="?"), person(age="60")],
        [person(age="80", income=">50K."), person(age="0")],
    )
    names, x = source.feature_names, source.test.fetch(np.arange(2))
    assert x[:, names.index("age")].tolist() == [1.5, -0.5]
    assert x[:, names.index("hours-per-week")].tolist() == [0, 0]  # constant in training
    assert source.test.labels.tolist() == [1, 0]
    seen = source.train.fetch(np.arange(2))
    assert seen[:, names.index("workclass_?")].tolist() == [1, 0]
    assert seen[:, names.index("workclass_Private")].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (PERSON[:-1], "must have 15 fields, income last"),
        (person(income="50K"), "must have 15 fields, income last"),
        (person(age="old"), "number or category out of place: .*'old'"),
        (person(age="nan"), "rows must be finite"),
        (person(race="B"), "number or category out of place: .*unknown categories.*B"),
    ],
)
def test_adult_refuses_rows_out_of_place(row, message):
    with pytest.raises(data.CorruptDataError, match=message):
        archives.encode_adult([PERSON], [row])


def test_adult_is_read_plain_as_uci_gives_it(tmp_path, monkeypatch):
    small = dataclasses.replace(registry.SETS["adult"], sizes=(2, 1))
    monkeypatch.setitem(registry.SETS, "adult", small)
    lines = [", ".join(row) for row in (person(age="20"), person(age="60", income=">50K"))]
    (tmp_path / "adult.data").write_text("\n".join(lines) + "\n\n")
    (tmp_path / "adult.test").write_text(
        f"|1x3 Cross validator\n{', '.join(person(age='30'))}.\n\n"
    )
    adult = data.load("adult", root=tmp_path)
    assert adult.train.y.tolist() == [0, 1]
    assert adult.test.x[0, 0] == 0.25


# Folders of images


def test_images_are_scaled_and_cropped_to_the_centre(pictures):
    eyes = data.load("eyepacs", root=pictures, image_size=4)
    assert_well_formed(eyes, (3, 4, 4), (5, 2), 2)
    assert eyes.classes == ("mild", "none")
    assert eyes.train.y.tolist() == [0, 0, 0, 0, 1]
    grey = eyes.train.x.mean(dim=(2, 3))
    assert_close(grey[:, 0], torch.tensor([0.0, 0, 0, 0, 1]), atol=0.05, rtol=0)
    assert_close(grey[:, 1], torch.tensor([0.0, 0.2, 0.4, 0.6, 0]), atol=0.05, rtol=0)
    assert (eyes.train.x[:, 2, :, 1:3] < 0.3).all()  # the blue quarter is cut away
    assert data.load("eyepacs", root=pictures).train.x.shape == (5, 3, 224, 224)


def test_images_are_decoded_after_the_choice(pictures):
    kept = data.load("eyepacs", root=pictures, image_size=4, n_train=3)
    assert kept.train.y.tolist() == [0, 0, 1]
    for i in set(range(4)) - set(kept.train.indices.tolist()):
        (pictures / "eyepacs" / "train" / "mild" / f"{i}.png").write_bytes(b"damaged")
    again = data.load("eyepacs", root=pictures, image_size=4, n_train=3)
    assert again.checksum == kept.checksum
    with pytest.raises(data.CorruptDataError, match=r"mild/\d.png is not a readable image"):
        data.load("eyepacs", root=pictures, image_size=4)


def test_images_that_would_fill_the_memory_are_refused(pictures, monkeypatch):
    monkeypatch.setattr(runtime, "memory", lambda: 5 * 7 * 3 * 8 * 8 * 4 / 3 - 1)
    with pytest.raises(
        ValueError, match=r"7 samples of eyepacs, 3 × 8 × 8 each.*fewer with n_train"
    ):
        data.load("eyepacs", root=pictures, image_size=8)
    assert len(data.load("eyepacs", root=pictures, image_size=8, n_train=4).train) == 4


def test_image_folders_must_agree_on_the_classes(pictures):
    (pictures / "eyepacs" / "val" / "none").rename(pictures / "eyepacs" / "val" / "severe")
    with pytest.raises(data.CorruptDataError, match="with the same 2 classes, test/CLASS/ or val/"):
        data.load("eyepacs", root=pictures)


def test_a_test_folder_without_classes_gives_way_to_val(pictures):
    (pictures / "eyepacs" / "test" / "images").mkdir(parents=True)
    assert len(data.load("eyepacs", root=pictures, image_size=4).test) == 2
    (pictures / "eyepacs" / "test" / "images").rmdir()
    for name in ("mild", "none"):
        folder = pictures / "eyepacs" / "test" / name
        folder.mkdir()
        for i in range(3):
            Image.new("RGB", (8, 8)).save(folder / f"{i}.jpg")
    assert len(data.load("eyepacs", root=pictures, image_size=4).test) == 6


def test_an_empty_class_is_noticed(pictures):
    (pictures / "eyepacs" / "train" / "none" / "0.png").unlink()
    with pytest.raises(data.CorruptDataError, match=r"eyepacs in .* damaged .*none"):
        data.load("eyepacs", root=pictures)


# Arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"name": "minst"},
            "name must be one of fashion-mnist, .*; got 'minst'. Did you mean 'mnist'",
        ),
        ({"name": "CIFAR10"}, "Did you mean 'cifar10'"),
        ({"name": None}, "name must be one of .*; got None"),
        ({"n_train": 0}, "n_train must be a whole number from 1 to 1437; got 0"),
        ({"n_test": -5}, "n_test must be a whole number from 1 to 360; got -5"),
        ({"n_train": 10.0}, r"n_train must be a whole number .*; got 10\.0"),
        ({"n_train": True}, "n_train must be a whole number .*; got True"),
        ({"n_train": 1_438}, "n_train must be a whole number from 1 to 1437; got 1438"),
        ({"n_test": 361}, "n_test must be a whole number from 1 to 360; got 361"),
        ({"seed": -1}, "seed must be a whole number of at least 0; got -1"),
        ({"seed": "0"}, "seed must be a whole number of at least 0; got '0'"),
        ({"download": "yes"}, "download must be True or False; got 'yes'"),
        ({"root": 3}, "root must be a path to a folder; got 3"),
        ({"root": ""}, "root must be a path to a folder; got ''"),
        ({"root": __file__}, "root must be a folder; got the file .*test_data.py"),
        ({"image_size": 8}, "image_size must be None, save for tiny-imagenet, .*; got 8"),
        ({"name": "imagenet", "image_size": 0}, "image_size must be a whole number .*; got 0"),
        ({"name": "imagenet", "n_train": 0}, "n_train must be a whole number .*; got 0"),
    ],
)
def test_load_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        data.load(**{"name": "digits", **options})


@pytest.mark.parametrize("name", [n for n in data.NAMES if not registry.SETS[n].within])
def test_a_missing_set_says_where_it_looked_and_how_to_get_it(name, tmp_path, monkeypatch):
    monkeypatch.setenv("FLATBOOK_SHARED", str(tmp_path / "shared"))
    with pytest.raises(data.DataNotFoundError) as caught:
        data.load(name)
    assert isinstance(caught.value, FileNotFoundError)
    assert isinstance(caught.value, ValueError)
    message = str(caught.value)
    assert message.startswith(f"{name} is not in {tmp_path}/data or {tmp_path}/shared/data: ")
    assert message.endswith("or say where it is with root=FOLDER.")
    if registry.SETS[name].torchvision:
        assert f"`flatbook data {name} --download` or load({name!r}, download=True)" in message
    else:
        assert "there" in message
        with pytest.raises(data.DataNotFoundError):
            data.load(name, download=True)


def test_the_folder_is_root_then_the_variable_then_the_cache(tmp_path, monkeypatch):
    assert data.data_root() == tmp_path / "data"
    assert data.data_root(tmp_path) == tmp_path
    monkeypatch.setenv("HOME", "/home/reader")
    assert str(data.data_root("~/data")) == "/home/reader/data"
    monkeypatch.setenv("FLATBOOK_DATA", "")
    assert data.data_root().name == "flatbook"


def test_whole_numbers_of_numpy_are_taken():
    assert len(data.load("digits", n_train=np.int64(20), seed=np.uint8(1)).train) == 20


# The choice of a subset


labels_of_rows = st.lists(st.integers(0, 4), min_size=1, max_size=40)


@given(labels_of_rows, st.data(), st.integers(0, 2**32))
def test_a_balanced_choice_is_as_even_as_can_be(labels, draw, seed):
    n = draw.draw(st.integers(1, len(labels)))
    chosen = data.balanced_indices(np.array(labels), n, seed=seed)
    assert len(set(chosen.tolist())) == len(chosen) == n
    assert chosen.tolist() == sorted(chosen.tolist())
    there, kept = (
        np.bincount(labels, minlength=5),
        np.bincount(np.take(labels, chosen), minlength=5),
    )
    left = kept < there  # these classes have more to give, so none of them lags behind
    assert not left.any() or kept[left].min() >= kept.max() - 1
    if n < len(labels):
        assert set(chosen) < set(data.balanced_indices(np.array(labels), n + 1, seed=seed))


def test_every_row_may_be_chosen_and_the_seed_decides():
    labels = np.repeat([0, 1], 10)
    choices = [data.balanced_indices(labels, 2, seed=seed) for seed in range(200)]
    assert set(np.concatenate(choices)) == set(range(20))
    odd = [labels[data.balanced_indices(labels, 1, seed=seed)[0]] for seed in range(200)]
    assert 60 < sum(odd) < 140  # the class that is dealt first is drawn as well


def test_labels_may_be_any_whole_numbers_in_any_array():
    labels = torch.tensor([-7, 10**12, -7, 10**12])
    assert sorted(labels[data.balanced_indices(labels, 2)].tolist()) == [-7, 10**12]


@pytest.mark.parametrize(
    ("labels", "n", "message"),
    [
        ([0, 1], 3, "n must be a whole number from 1 to 2; got 3"),
        ([0, 1], 0, "n must be a whole number from 1 to 2; got 0"),
        ([[0, 1]], 1, r"labels must have shape \(rows\); got \(1, 2\)"),
        ([], 1, r"labels must not be empty"),
    ],
)
def test_a_balanced_choice_refuses(labels, n, message):
    with pytest.raises(ValueError, match=message):
        data.balanced_indices(np.array(labels), n)


def test_no_global_generator_is_touched():
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    data.load("digits", n_train=100, n_test=100, seed=5)
    data.gaussian_blobs(10, dim=3, classes=2, separation=1.0, seed=5)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    assert after[:2] == before[:2]
    assert after[2].equal(before[2])


# Checksums


def test_a_checksum_changes_with_every_bit_type_and_shape(fashion):
    base = np.array([[0.0, 1.0]])
    variants = [base, base.T, base.astype(np.float32), base + 1e-16, -base, np.array([[1.0, 0.0]])]
    assert len({data.checksum(variant) for variant in variants}) == len(variants)
    assert data.checksum(base) == data.checksum(torch.from_numpy(base).requires_grad_())
    assert data.checksum(base[:, ::-1]) == data.checksum(base[:, ::-1].copy())
    assert data.checksum(base, base) != data.checksum(np.vstack([base, base]))
    changed = dataclasses.replace(
        fashion, test=dataclasses.replace(fashion.test, y=1 - fashion.test.y)
    )
    assert changed.checksum != fashion.checksum


# The catalogue


def test_the_catalogue_lists_every_set_and_whether_it_is_there(tmp_path):
    write_mnist(tmp_path, (1, 1))
    rows = {row.name: row for row in data.catalogue(tmp_path)}
    assert tuple(rows) == data.NAMES
    assert {name for name, row in rows.items() if row.available} == {
        "fashion-mnist", "digits", "mnist",
    }  # fmt: skip
    assert rows["mnist"].source == str(tmp_path)
    assert rows["digits"].source == "ships with scikit-learn"
    assert rows["cifar10"].source.startswith(f"cifar10 is not in {tmp_path}: get it with")
    for row in rows.values():
        assert row.description
        assert row.licence
        assert row.classes >= 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        rows["mnist"].available = False


def test_the_catalogue_reads_and_imports_nothing():
    code = (
        "import sys, flatbook.data as d; d.catalogue(); d.load('fashion-mnist'); "
        "sys.exit(bool({'sklearn', 'torchvision', 'scipy', 'PIL'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_catalogue_refuses_a_file_as_its_root():
    with pytest.raises(ValueError, match="root must be a folder; got the file"):
        data.catalogue(__file__)


# Gaussian blobs


@pytest.mark.parametrize(("dim", "classes"), [(1, 2), (5, 2), (3, 4), (10, 10)])
def test_means_of_blobs_are_equally_far_apart(dim, classes):
    def blobs(separation):
        return data.gaussian_blobs(
            3 * classes + 1, dim=dim, classes=classes, separation=separation, seed=2,
            dtype=torch.float64,
        )  # fmt: skip

    apart, together = blobs(3.0), blobs(0.0)
    assert apart.y.equal(together.y)
    assert sorted(apart.y.bincount().tolist()) == [3] * (classes - 1) + [4]
    shifts = apart.x - together.x
    means = torch.stack([shifts[apart.y == c].mean(dim=0) for c in range(classes)])
    distances = torch.pdist(means)
    assert_close(distances, torch.full_like(distances, 3.0))
    assert_close(means.mean(dim=0), torch.zeros(dim, dtype=torch.float64))


def test_the_nearest_mean_errs_as_often_as_theory_says():
    blobs = data.gaussian_blobs(40_000, dim=3, classes=2, separation=2.0, seed=1)
    error = ((blobs.x[:, 0] < 0) != (blobs.y == 1)).double().mean()
    expected = 0.5 * math.erfc(1 / math.sqrt(2))
    assert abs(error - expected) < 4 * math.sqrt(expected * (1 - expected) / 40_000)
    assert_close(blobs.x[:, 1:].std(dim=0), torch.ones(2), atol=0.02, rtol=0)
    assert blobs.x.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n must be a whole number of at least 1; got 0"),
        ({"classes": 1}, "classes must be a whole number of at least 2; got 1"),
        ({"classes": 5}, "dim must be a whole number of at least 4; got 3"),
        ({"separation": -1.0}, "separation must be a finite number of at least 0; got -1"),
        ({"separation": math.nan}, "separation must be a finite number of at least 0; got nan"),
        ({"seed": -1}, "seed must be a whole number from 0"),
        ({"dtype": torch.int64}, "dtype must be a floating-point type of torch; got torch.int64"),
        ({"dtype": "float32"}, "dtype must be a floating-point type of torch; got 'float32'"),
    ],
)
def test_blobs_refuse(options, message):
    arguments = {"n": 10, "dim": 3, "classes": 3, "separation": 1.0, **options}
    with pytest.raises(ValueError, match=message):
        data.gaussian_blobs(arguments.pop("n"), **arguments)


# What is around it


def test_absent_data_skip_save_on_ci_beside_the_shared_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FLATBOOK_SHARED", str(tmp_path))
    monkeypatch.setenv("CI", "false")
    with pytest.raises(pytest.skip.Exception, match="no data"):
        absent("no data")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=f"no data, yet {tmp_path} exists"):
        absent("no data")
    monkeypatch.setenv("FLATBOOK_SHARED", str(tmp_path / "nowhere"))
    with pytest.raises(pytest.skip.Exception, match="no data"):
        absent("no data")


def test_prepare_data_says_what_it_skips_and_repeats_itself(repository, tmp_path, monkeypatch):
    prepare = runpy.run_path(str(repository / "scripts" / "prepare_data.py"))
    assert "skipped" in prepare["prepare_cifar10"](tmp_path / "root", tmp_path)
    assert "skipped" in prepare["prepare_fashion_mnist"](tmp_path / "root", tmp_path)
    assert not (tmp_path / "root").exists()


def test_the_wheel_carries_the_images_and_their_licence(repository, tmp_path):
    from setuptools import __version__

    if int(__version__.split(".")[0]) < 77:
        pytest.skip(f"building needs setuptools 77, this is {__version__}")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repository / name, source)
    shutil.copytree(repository / "flatbook", source / "flatbook")
    command = [sys.executable, "-m", "pip", "wheel", source, "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "--quiet", "--wheel-dir", tmp_path]
    subprocess.run(command, check=True)
    [wheel] = tmp_path.glob("flatbook-*.whl")
    assert wheel.stat().st_size < 6_000_000
    with zipfile.ZipFile(wheel) as archive:
        packed = archive.read("flatbook/assets/fashion-mnist.npz")
        notice = archive.read("flatbook/assets/LICENSE-fashion-mnist.txt").decode()
        assert any(n.endswith("licenses/LICENSE") for n in archive.namelist())
    assert packed == (archives.ASSETS / "fashion-mnist.npz").read_bytes()
    assert "Copyright (c) 2017 Zalando SE" in notice
