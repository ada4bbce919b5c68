"""Checkpoints of a training run: whole or absent, and refused by any other run."""

import hashlib
import os
from pathlib import Path

import torch
from torch import Tensor, nn

from flatbook.files import atomic_write

_FORMAT = 1


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or belongs to a different run."""


def save(path: str | os.PathLike, identity: dict, state: dict) -> None:
    """Write ``state`` and whose it is; a kill at any moment leaves the previous file or this one.

    Args:
        path: The file.
        identity: What a run must have in common with this one to continue it.
        state: Tensors, numbers, strings, and lists and dicts of them.
    """
    with atomic_write(path, "wb") as file:
        torch.save({"format": _FORMAT, "identity": identity, "state": state}, file)


def load(path: str | os.PathLike, identity: dict) -> dict | None:
    """Return the state saved in ``path``, or None if there is no such file.

    Raises:
        CheckpointError: If the file is damaged, or its run differs from this one.
    """
    if not Path(path).exists():
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        whole = isinstance(content, dict) and {"format", "identity", "state"} <= content.keys()
    except Exception as error:  # torch.load raises a dozen types on damaged files
        raise CheckpointError(
            f"checkpoint {path} is damaged or no checkpoint; delete it to start afresh."
        ) from error
    if not whole or content["format"] != _FORMAT:
        raise CheckpointError(
            f"checkpoint {path} has another format than this version writes; delete it to start "
            "afresh."
        )
    saved = content["identity"]
    different = [key for key in identity | saved if identity.get(key) != saved.get(key)]
    if different:
        key = different[0]
        was, now = saved.get(key), identity.get(key)
        what = f"another {key}" if _long(was) or _long(now) else f"{key}={was!r}, not {now!r}"
        raise CheckpointError(
            f"checkpoint {path} is of a run with {what}; give a different path, or delete it to "
            "start afresh."
        )
    return content["state"]


def layout(model: nn.Module) -> str:
    """Return a fingerprint of the names, shapes and types of a model's tensors, not of values."""
    text = "; ".join(
        f"{name} {tuple(t.shape)} {t.dtype}"
        for name, t in model.state_dict().items()
        if isinstance(t, Tensor)
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _long(value: object) -> bool:
    return isinstance(value, str) and len(value) > 40
