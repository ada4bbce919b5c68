"""Long work cut into units that are computed once: kept, skipped after a kill, run side by side."""

import multiprocessing
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatbook import checks
from flatbook.jsonfile import plain, read_json, write_json
from flatbook.provenance import commit, machine, package_versions
from flatbook.results import ResultError

_MANIFEST = "manifest.json"
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def units(
    folder: str | os.PathLike | None,
    keys: Sequence[str] | Mapping[str, Any],
    work: Callable[[Any], Any],
    *,
    config: Any,
    workers: int = 0,
    progress: bool = False,
    label: str = "units",
) -> dict[str, Any]:
    """Run each unit of work once and return what they returned.

    The result of each is written to ``folder/KEY.json`` as soon as it is there. A second call, in
    this process or after a kill, computes only what is missing. A result comes back as its JSON
    (tuples as lists, tensors as nested lists), fresh or not, so an interrupted run and an
    undisturbed one return the same.

    Units must not depend on each other: each takes its randomness from a seed of its own. Then
    results do not depend on ``workers`` either, as long as that is not 0: processes compute with
    one torch thread each, while 0 uses all of torch's threads, whose sums round differently.

    Args:
        folder: Where results are kept; None keeps nothing.
        keys: A name for each unit; or a mapping from names to what ``work`` is given.
        work: Computes one unit, from its name or what the mapping says. With ``workers`` it must
            be importable, not a lambda or a function of a notebook.
        config: The options that results depend on, as a dataclass or mapping. ``folder`` takes
            only the units of one configuration.
        workers: How many processes; 0 computes here, one unit after another.
        progress: Whether to show how many units are done and the time left.
        label: What the progress bar calls them.

    Returns:
        The results by name, in the order of ``keys``.

    Raises:
        ValueError: If a name is repeated or cannot be the name of a file.
        ResultError: If ``folder`` holds units of another configuration, of other package versions
            or from another machine, or a damaged one; or if a worker process dies.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> units(folder, ["a", "bb"], len, config={})
        {'a': 1, 'bb': 2}
        >>> units(folder, ["bb", "ccc"], print, config={})  # computes only the missing one
        ccc
        {'bb': 2, 'ccc': None}
    """
    tasks = dict(keys) if isinstance(keys, Mapping) else {key: key for key in keys}
    _check_keys(tasks, len(keys))
    checks.count("workers", workers, at_least=0)
    device = machine(workers=min(workers, 1))
    done: dict[str, Any] = {}
    if folder is not None:
        folder = Path(folder)
        manifest = _claim(folder, config)
        done = {key: _kept(folder, key, device) for key in tasks if _path(folder, key).exists()}
    missing = {key: task for key, task in tasks.items() if key not in done}
    if not missing:
        return {key: done[key] for key in tasks}

    computed = _in_processes(missing, work, workers) if workers else _here(missing, work)
    mark = time.perf_counter()
    # Closing stops the processes at once if a result cannot be kept.
    with closing(computed), _bar(len(tasks), len(done), label, progress) as bar:
        for key, value in computed:
            done[key] = plain(value, f"the result of unit {key}")
            if folder is not None:
                now = time.perf_counter()
                manifest["seconds"] = round(manifest["seconds"] + now - mark, 3)
                mark = now
                # The time first: no unit is ever kept whose time a kill in between has lost.
                write_json(folder / _MANIFEST, manifest)
                write_json(_path(folder, key), {"device": device, "value": done[key]})
            bar.update()
    return {key: done[key] for key in tasks}


@dataclass(frozen=True)
class Session:
    """What earlier, interrupted sessions left in a folder of units.

    Attributes:
        seconds: The time that went into its finished units.
        commits: The commits of the package that computed them.
    """

    seconds: float = 0.0
    commits: tuple[str, ...] = ()


def earlier(folder: str | os.PathLike) -> Session:
    """Return what earlier sessions left in ``folder``: nothing, if it holds no units.

    Raises:
        ResultError: If the folder's record is damaged.
    """
    path = Path(folder, _MANIFEST)
    if not path.exists():
        return Session()
    manifest = _manifest(path)
    return Session(manifest["seconds"], tuple(manifest["commits"]))


def _check_keys(tasks: Mapping[str, Any], given: int) -> None:
    for key in tasks:
        if not (isinstance(key, str) and _KEY.fullmatch(key)) or f"{key}.json" == _MANIFEST:
            raise ValueError(
                "keys must be words of letters, digits, dots, hyphens and underscores, other than "
                f"'manifest'; got {key!r}."
            )
    # Some file systems do not tell A from a.
    if len({key.lower() for key in tasks}) < given:
        raise ValueError("keys must differ, in more than upper and lower case; got one twice.")


def _path(folder: Path, key: str) -> Path:
    return folder / f"{key}.json"


def _claim(folder: Path, config: Any) -> dict[str, Any]:
    """Return the folder's manifest, after checking that its units are of this configuration."""
    path = folder / _MANIFEST
    now = {"config": plain(config, "config"), "packages": package_versions()}
    manifest = now | {"seconds": 0.0, "commits": []}
    if path.exists():
        manifest = _manifest(path)
        for part, value in now.items():
            if manifest[part] != value:
                raise ResultError(
                    f"{folder} holds unfinished work with other {part} "
                    f"({_difference(manifest[part], value)}): finish it with those, or start "
                    "afresh (--fresh)."
                )
    version = commit() or "untracked"
    if version not in manifest["commits"]:
        manifest["commits"].append(version)
    write_json(path, manifest)
    return manifest


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = read_json(path)
        sound = isinstance(manifest["seconds"], float) and isinstance(manifest["commits"], list)
        sound &= isinstance(manifest["packages"], dict) and "config" in manifest
    except (ValueError, TypeError, KeyError) as error:
        raise ResultError(f"{path} is damaged; start afresh (--fresh).") from error
    if not sound:
        raise ResultError(f"{path} is damaged; start afresh (--fresh).")
    return manifest


def _kept(folder: Path, key: str, device: str) -> Any:
    path = _path(folder, key)
    try:
        unit = read_json(path)
        made, value = unit["device"], unit["value"]
    except (ValueError, TypeError, KeyError) as error:
        raise ResultError(f"{path} is damaged; delete it, or start afresh (--fresh).") from error
    if made != device:
        raise ResultError(
            f"{path} was computed on {made}, and this is {device}: continue there, or start afresh "
            "(--fresh)."
        )
    return value


def _difference(old: Any, new: Any, where: str = "") -> str:
    """Name the first place where two plain values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *new]:
            if old.get(key) != new.get(key):
                return _difference(old.get(key), new.get(key), f"{where}.{key}".lstrip("."))
    return f"{where or 'all'} was {old!r:.60}, is now {new!r:.60}"


def _here(tasks: Mapping[str, Any], work: Callable) -> Generator[tuple[str, Any], None, None]:
    for key, task in tasks.items():
        yield key, work(task)


def _in_processes(
    tasks: Mapping[str, Any], work: Callable, workers: int
) -> Generator[tuple[str, Any], None, None]:
    """Yield results as they come; let what runs finish before raising what one unit raised."""
    # Started afresh rather than forked: a fork of a process with torch's threads can hang.
    context = multiprocessing.get_context("spawn")
    before = set(multiprocessing.active_children())
    failure = None
    with ProcessPoolExecutor(min(workers, len(tasks)), context, _start_worker) as pool:
        futures = {pool.submit(work, task): key for key, task in tasks.items()}
        try:
            for future in as_completed(futures):
                if future.cancelled():
                    continue
                if (error := future.exception()) is None:
                    yield futures[future], future.result()
                elif failure is None:
                    failure = error
                    failure.add_note(f"This was unit {futures[future]}.")
                    for other in futures:
                        other.cancel()
        except BaseException:  # an interrupt, or the caller has stopped
            pool.shutdown(wait=False, cancel_futures=True)
            for child in set(multiprocessing.active_children()) - before:
                child.terminate()
            raise
    if isinstance(failure, BrokenProcessPool):
        raise ResultError(
            "A worker process died, perhaps for want of memory; what is finished is kept: run the "
            "same again, with fewer workers."
        ) from failure
    if failure is not None:
        raise failure


def _start_worker() -> None:
    # Read when torch is imported, by the first unit; told besides where it already is.
    for library in ("OMP", "MKL", "OPENBLAS"):
        os.environ[f"{library}_NUM_THREADS"] = "1"
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    parent = multiprocessing.parent_process()

    def follow():
        parent.join()
        os._exit(1)

    # A killed parent cannot tell its workers to stop, and they would wait for work for ever.
    threading.Thread(target=follow, daemon=True).start()


def _bar(total: int, done: int, label: str, progress: bool):
    from tqdm.auto import tqdm

    return tqdm(total=total, initial=done, desc=label, unit="unit", disable=not progress)
