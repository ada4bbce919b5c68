"""Checkpoints of a training run: whole or absent, and refused by any other run."""

import hashlib
import os
import zipfile
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
        # torch.load does not compare the checksums of its archive: a flipped bit would pass.
        with zipfile.ZipFile(path) as archive:
            if spoilt := archive.testzip():
                raise zipfile.BadZipFile(f"{spoilt} does not have its checksum")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises a dozen types on damaged files
        raise damaged(path) from error
    kinds = {"format": int, "identity": dict, "state": dict}
    whole = isinstance(content, dict) and all(
        isinstance(content.get(key), kind) for key, kind in kinds.items()
    )
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


def damaged(path: str | os.PathLike) -> CheckpointError:
    """Return the error to raise for a file that does not hold what it should."""
    return CheckpointError(
        f"checkpoint {path} is damaged or no checkpoint; delete it to start afresh."
    )


def layout(model: nn.Module) -> str:
    """Return a fingerprint of a model's tensors but for their values.

    Names, shapes and types count, and which parameters are frozen.
    """
    named = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, p in named if not p.requires_grad}
    text = "; ".join(
        f"{name} {tuple(t.shape)} {t.dtype}{' frozen' * (name in frozen)}"
        for name, t in model.state_dict().items()
        if isinstance(t, Tensor)
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _long(value: object) -> bool:
    return isinstance(value, str) and len(value) > 40
