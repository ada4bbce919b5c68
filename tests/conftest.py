"""Fixtures shared by the tests: the repository, and real data where there is some."""

import os
import runpy
from pathlib import Path
from typing import NoReturn

import pytest
from filelock import FileLock
from hypothesis import settings

REPOSITORY = Path(__file__).resolve().parents[1]

settings.register_profile("flatbook", deadline=None)  # a busy machine is no failure
settings.load_profile("flatbook")


def shared_folder() -> Path:
    return Path(os.environ.get("FLATBOOK_SHARED") or REPOSITORY.parent / "shared")


def absent(reason: str) -> NoReturn:
    """Skip for want of data; on CI that is a failure where the shared folder exists."""
    if os.environ.get("CI") == "true" and shared_folder().is_dir():
        pytest.fail(f"{reason}, yet {shared_folder()} exists")
    pytest.skip(reason)


def _prepared(set_name: str, *arguments, otherwise) -> Path:
    root = REPOSITORY / "_build" / "data"
    root.mkdir(parents=True, exist_ok=True)
    prepare = runpy.run_path(str(REPOSITORY / "scripts" / "prepare_data.py"))
    with FileLock(root / ".lock"):  # workers of pytest-xdist share the folder
        outcome = prepare[f"prepare_{set_name}"](root, *arguments)
    if outcome.startswith("skipped"):
        otherwise(f"{set_name} is not ready: {outcome}")
    return root


@pytest.fixture
def one_thread():
    """Compute with one torch thread, whose sums are the same on every machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of MNIST, Location-30, Adult and the CIFAR-100 subset."""
    folder = shared_folder() / "data"
    if not folder.is_dir():
        absent(f"there is no {folder} (FLATBOOK_SHARED)")
    return folder


@pytest.fixture(scope="session")
def cifar10_root() -> Path:
    """Return a data folder with real CIFAR-10, restored once."""
    return _prepared("cifar10", shared_folder(), otherwise=absent)


@pytest.fixture(scope="session")
def fashion_mnist_root() -> Path:
    """Return a data folder with all of Fashion-MNIST, unpacked once."""
    return _prepared("fashion_mnist", otherwise=pytest.skip)
