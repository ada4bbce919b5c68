"""Files and folders that are either whole or absent."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def atomic_write(path: str | os.PathLike, mode: str = "w") -> Iterator[IO]:
    """Write a file that readers see complete or not at all.

    Writes a temporary neighbour and renames it over ``path`` on success; a crash, an exception
    or a kill leaves the old content. Creates missing folders. Text is UTF-8.

    Args:
        path: The file to write.
        mode: ``"w"`` for text or ``"wb"`` for bytes.

    Yields:
        The open file.

    Raises:
        ValueError: If ``mode`` is neither.

    Example:
        >>> folder = Path(tempfile.mkdtemp())
        >>> with atomic_write(folder / "note.txt") as file:
        ...     _ = file.write("whole")
        >>> (folder / "note.txt").read_text()
        'whole'
    """
    if mode not in ("w", "wb"):
        raise ValueError(f"mode must be 'w' or 'wb'; got {mode!r}.")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files private; give them the rights an ordinary open would.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def atomic_folder(path: str | os.PathLike) -> Iterator[Path]:
    """Build a folder that readers see complete or not at all.

    Yields an empty staging folder beside ``path``, in which to build a folder of the same name. On
    success that one takes the place of ``path``, and of what was there; on an exception, or if
    nothing was built, ``path`` stays as it was. A kill can leave the staging folder behind, and if
    it falls between two renames ``path`` absent, but never in part. Creates missing parents.

    Args:
        path: The folder to build.

    Yields:
        The staging folder.

    Raises:
        FileNotFoundError: If no folder named ``path.name`` was built.

    Example:
        >>> home = Path(tempfile.mkdtemp())
        >>> with atomic_folder(home / "images") as staging:
        ...     (staging / "images").mkdir()
        ...     _ = (staging / "images" / "cat.txt").write_text("meow")
        >>> [entry.name for entry in home.rglob("*")]
        ['images', 'cat.txt']
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=path.parent, prefix=f".{path.name}.", suffix=".part"
    ) as staging:
        yield Path(staging)
        built = Path(staging, path.name)
        if not built.is_dir():
            raise FileNotFoundError(
                f"{path} was not built: its staging folder holds no {path.name}."
            )
        if path.exists():
            os.replace(path, Path(staging, f"{path.name}.old"))
        os.replace(built, path)
