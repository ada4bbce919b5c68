"""Device, scale, seeding and dtype: what a run depends on besides its inputs."""

import math
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from flatbook import checks

Scale = Literal["quick", "laptop", "gpu"]


def device() -> torch.device:
    """Return where computations run.

    The variable ``FLATBOOK_DEVICE`` decides (``cpu``, ``cuda``, ``cuda:1``, ``mps``); without it,
    CUDA if there is a GPU, else Apple's MPS, else the CPU.

    Raises:
        ValueError: If ``FLATBOOK_DEVICE`` names a device this machine does not have.
    """
    wanted = os.environ.get("FLATBOOK_DEVICE")
    if wanted:
        try:
            return torch.empty(0, device=wanted).device
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise ValueError(
                f"FLATBOOK_DEVICE must name a device of this machine, such as cpu; got {wanted!r}."
            ) from error
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def scale() -> Scale:
    """Return the size of the experiments, from ``FLATBOOK_SCALE``.

    ``quick`` (the default): a chapter in a minute on two CPU cores, on data inside the package;
    ``laptop``: minutes to an hour, on CIFAR-10 and MNIST; ``gpu``: the settings of the sources.

    Raises:
        ValueError: If the variable holds anything else.
    """
    return checks.choice(
        "FLATBOOK_SCALE", os.environ.get("FLATBOOK_SCALE") or "quick", get_args(Scale)
    )


def seed_everything(seed: int) -> int:
    """Seed Python's, NumPy's and torch's global generators and return the seed.

    Functions of this package take a seed instead and leave the global generators alone; this is
    for the top of a script or notebook.

    Raises:
        ValueError: If ``seed`` is not a whole number in 0..2**32 - 1.
    """
    seed = checks.count("seed", seed, at_least=0, at_most=2**32 - 1)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 -- third-party code may draw from the global generator
    torch.manual_seed(seed)
    return seed


@contextmanager
def forked_seed(seed: int) -> Iterator[None]:
    """Seed torch's global generators inside the block and restore them after it.

    Raises:
        ValueError: If ``seed`` is not a whole number in 0..2**64 - 1.
    """
    seed = checks.count("seed", seed, at_least=0, at_most=2**64 - 1)
    devices = range(torch.cuda.device_count())
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a fresh generator, so that randomness comes in as an argument.

    Raises:
        ValueError: If ``seed`` is not a whole number in 0..2**64 - 1.
    """
    seed = checks.count("seed", seed, at_least=0, at_most=2**64 - 1)
    return torch.Generator(device).manual_seed(seed)


def widened(value: Tensor) -> Tensor:
    """Return ``value`` in float64, or float32 on a device that has no float64 (MPS)."""
    return value.to(torch.float32 if value.device.type == "mps" else torch.float64)


def memory() -> float:
    """Return the bytes of memory this machine has; infinity if the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return math.inf
