"""Recorded runs: what an experiment measured, and everything it was measured with.

A run lies in one small JSON file, ``book/_results/NAME.SCALE.json``. Chapters plot it, print
where it came from, and never compute it again.
"""

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from flatbook import checks
from flatbook.jsonfile import plain, read_json, write_json
from flatbook.provenance import commit, machine, package_versions, peak_memory_mib
from flatbook.summaries import Summary, is_summary, paired_difference, summarise

__all__ = [
    "SCALES",
    "SCHEMA",
    "Recording",
    "ResultError",
    "Run",
    "Summary",
    "load_result",
    "paired_difference",
    "record",
    "recorded",
    "results_folder",
    "summarise",
]

SCHEMA = 1
SCALES = ("quick", "laptop", "gpu")
"""The scales from small to large; :data:`flatbook.runtime.Scale` as a tuple, free of torch."""

_NUMBER = (int, float)
_KINDS = {
    "name": str,
    "scale": str,
    "config": dict,
    "seeds": list,
    "values": dict,
    "data": dict,
    "packages": dict,
    "command": str,
    "device": str,
    "wall_seconds": _NUMBER,
    "peak_memory_mib": (*_NUMBER, type(None)),
    "peak_gpu_memory_mib": (*_NUMBER, type(None)),
    "commit": (str, type(None)),
    "date": str,
}


class ResultError(ValueError):
    """A recorded run is missing, damaged, from another version, or cannot be recorded."""


@dataclass(frozen=True)
class Run:
    """One recorded run of an experiment.

    What it is given is turned into plain dicts, lists and numbers at once, so that a run equals
    the one read back from its file.

    Attributes:
        name: Of the experiment, such as ``"optimizers"``.
        scale: ``"quick"``, ``"laptop"`` or ``"gpu"``.
        config: The options it ran with; a dataclass or a mapping.
        seeds: The seeds it averaged over.
        values: What it measured: nested mappings and sequences of numbers and words, with
            :class:`Summary` for means.
        data: The checksum of each data set it read.
        packages: Versions, Python's included.
        command: What a reader types to run it again.
        device: The machine in words.
        wall_seconds: How long it took.
        peak_memory_mib: The largest resident memory of a single process (MiB).
        peak_gpu_memory_mib: The largest memory held by tensors on the GPU (MiB); None without one.
        commit: The commit of the package, with ``+`` if its files differed; None outside git.
        date: When it ended, in UTC.
    """

    name: str
    scale: str
    config: Mapping[str, Any]
    seeds: Sequence[int]
    values: Mapping[str, Any]
    data: Mapping[str, str]
    packages: Mapping[str, str]
    command: str
    device: str
    wall_seconds: float
    peak_memory_mib: float | None
    peak_gpu_memory_mib: float | None
    commit: str | None
    date: str

    def __post_init__(self):
        for part, kind in _KINDS.items():
            try:
                value = plain(getattr(self, part), part)
            except ValueError as error:
                raise ResultError(f"A run cannot be recorded: {error}") from error
            if not isinstance(value, kind) or isinstance(value, bool):
                kinds = kind if isinstance(kind, tuple) else (kind,)
                words = " or ".join(k.__name__ for k in kinds)
                raise ResultError(f"{part} of a run must be {words}; got {value!r:.80}.")
            object.__setattr__(self, part, value)
        _check_name(self.name)
        checks.choice("scale", self.scale, SCALES)
        if not all(type(seed) is int for seed in self.seeds):
            raise ResultError(f"seeds of a run must be whole numbers; got {self.seeds!r:.80}.")
        for part in ("data", "packages"):
            for key, value in getattr(self, part).items():
                if not isinstance(value, str):
                    raise ResultError(f"{part}.{key} of a run must be a word; got {value!r:.80}.")
        try:
            datetime.fromisoformat(self.date)
        except ValueError as error:
            raise ResultError(f"date of a run must be an ISO date; got {self.date!r}.") from error

    def save(self, path: str | os.PathLike | None = None) -> Path:
        """Write the run to its file, whole or not at all.

        Args:
            path: Where to; by default ``NAME.SCALE.json`` in :func:`results_folder`.

        Returns:
            The file.

        Raises:
            ResultError: If there is no folder for recorded runs.
            OSError: If the file cannot be written.
        """
        path = Path(path) if path else results_folder() / f"{self.name}.{self.scale}.json"
        write_json(path, {"schema": SCHEMA} | {part: getattr(self, part) for part in _KINDS})
        return path

    def summary(self, *keys: str) -> Summary:
        """Return the :class:`Summary` that lies under ``keys`` in the values.

        Args:
            *keys: One per level, such as ``"SAM", "accuracy"``.

        Raises:
            ResultError: If there is none; the message lists what there is.
        """
        value = self.values
        for depth, key in enumerate(keys):
            if not isinstance(value, dict) or key not in value:
                path = "".join(f"[{above!r}]" for above in keys[:depth])
                there = ", ".join(value) if isinstance(value, dict) else f"{value!r:.80}"
                raise ResultError(
                    f"{self.name} ({self.scale}) has no {key!r} in values{path}; it has {there}."
                )
            value = value[key]
        if not is_summary(value):
            raise ResultError(f"{'.'.join(keys) or 'values'} is not a mean with its error.")
        return Summary(**value | {"values": tuple(value.get("values", ()))})

    def provenance(self) -> str:
        """Say in one paragraph of Markdown how and where the run was made.

        Chapters print it under what they plot.
        """
        date = datetime.fromisoformat(self.date)
        parts = [f"{len(self.seeds)} seed{'s' * (len(self.seeds) != 1)}"] if self.seeds else []
        parts += [f"{name} (SHA-256 {sum_[:12]}…)" for name, sum_ in self.data.items()]
        parts += [f"{name} {version}" for name, version in self.packages.items()]
        memory = [f"{_size(self.peak_memory_mib)} of memory"] if self.peak_memory_mib else []
        if self.peak_gpu_memory_mib:
            memory.append(f"{_size(self.peak_gpu_memory_mib)} of GPU memory")
        cost = " and ".join([_duration(self.wall_seconds), *memory])
        source = "outside version control"
        if self.commit:
            source = "commit " + ", ".join(
                f"`{one[:10]}`" + " with uncommitted changes" * one.endswith("+")
                for one in self.commit.split(", ")
            )
        when = f"{date.day} {date:%B %Y}"
        made = f"{', '.join(parts)}; on {self.device}; in {cost}; {source}"
        return f"Recorded on {when} by `{self.command}`: {made}."


def _check_name(name: str) -> str:
    if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name)):
        raise ResultError(
            f"name of a run must be made of letters, digits, hyphens and underscores; got {name!r}."
        )
    return name


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.0f} min" if minutes < 100 else f"{hours:.1f} h"


def _size(mib: float) -> str:
    return f"{mib:.0f} MiB" if mib < 1024 else f"{mib / 1024:.1f} GiB"


def results_folder() -> Path:
    """Return where recorded runs lie.

    The variable ``FLATBOOK_RESULTS`` decides; without it, ``book/_results`` of the nearest folder
    at or above the current one that has it; else that of the checkout the package lies in.

    Raises:
        ResultError: If there is none of these.
    """
    if chosen := os.environ.get("FLATBOOK_RESULTS"):
        return Path(chosen).expanduser()
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "book" / "_results").is_dir():
            return folder / "book" / "_results"
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "book").is_dir() and (checkout / "pyproject.toml").is_file():
        return checkout / "book" / "_results"
    raise ResultError(
        "There is no folder for recorded runs here: work inside a checkout of the book, which has "
        "book/_results, or name a folder in FLATBOOK_RESULTS."
    )


def recorded(*, folder: str | os.PathLike | None = None) -> dict[str, tuple[str, ...]]:
    """Return the scales at which each run is recorded, small ones first, by name."""
    found: dict[str, list[str]] = {}
    for path in sorted(Path(folder or results_folder()).glob("*.json")):
        name, _, scale = path.stem.rpartition(".")
        if name and scale in SCALES:
            found.setdefault(name, []).append(scale)
    return {name: tuple(sorted(scales, key=SCALES.index)) for name, scales in found.items()}


def load_result(
    name: str, scale: str | None = None, *, folder: str | os.PathLike | None = None
) -> Run:
    """Read a recorded run.

    Args:
        name: Of the experiment, such as ``"optimizers"``.
        scale: ``"quick"``, ``"laptop"`` or ``"gpu"``; by default the largest recorded.
        folder: Where to look; by default :func:`results_folder`.

    Returns:
        The run, as it was saved.

    Raises:
        ResultError: If the run is not recorded, or its file is damaged, of another version, or
            holds another run than its name says.

    Example:
        >>> load_result("no-such-experiment")
        Traceback (most recent call last):
            ...
        flatbook.results.ResultError: No run of 'no-such-experiment' is recorded in ...
    """
    _check_name(name)
    if scale is not None:
        checks.choice("scale", scale, SCALES)
    folder = Path(folder or results_folder())
    known = recorded(folder=folder)
    if name not in known:
        near = get_close_matches(name, known, n=1)
        there = f"did you mean {near[0]!r}?" if near else f"there {_listed(known)}."
        raise ResultError(f"No run of {name!r} is recorded in {folder}; {there}")
    scale = scale or known[name][-1]
    if scale not in known[name]:
        raise ResultError(
            f"{name!r} is recorded at {', '.join(known[name])}, not at {scale}; "
            f"`flatbook run {name} --scale {scale}` records it."
        )
    path = folder / f"{name}.{scale}.json"
    content = _content(path)
    try:
        run = Run(**content)
    except ValueError as error:
        raise ResultError(
            f"{path} is damaged: {str(error).rstrip('.')}; record it anew."
        ) from error
    if (run.name, run.scale) != (name, scale):
        raise ResultError(f"{path} holds the run {run.name!r} at {run.scale}: it was renamed.")
    return run


def _content(path: Path) -> dict[str, Any]:
    """Return the parts of the run in ``path``, after checking that all and only they are there."""
    try:
        content = read_json(path)
    except ValueError as error:
        raise ResultError(f"{str(error).rstrip('.')}; record it anew.") from error
    except OSError as error:
        raise ResultError(f"{path} cannot be read: {error.strerror}.") from error
    schema = content.pop("schema", None) if isinstance(content, dict) else None
    if type(schema) is not int:
        raise ResultError(f"{path} is not a recorded run: it has no schema number; record it anew.")
    if schema != SCHEMA:
        age, cure = ("newer", "update flatbook") if schema > SCHEMA else ("older", "record it anew")
        raise ResultError(
            f"{path} was written by a version of flatbook that is {age} (schema {schema}, this "
            f"one reads {SCHEMA}); {cure}."
        )
    missing = ", ".join(part for part in _KINDS if part not in content)
    if missing:
        raise ResultError(f"{path} lacks {missing}; record it anew.")
    unknown = ", ".join(part for part in content if part not in _KINDS)
    if unknown:
        raise ResultError(f"{path} has parts that no run has, {unknown}; record it anew.")
    return content


def _listed(known: Mapping[str, object]) -> str:
    if not known:
        return "is nothing yet"
    return ("is " if len(known) == 1 else "are ") + ", ".join(known)


@dataclass
class Recording:
    """What the block of :func:`record` fills in.

    Attributes:
        values: What was measured; to be set in the block.
        seeds: The seeds.
        data: The checksum of each data set.
        run: The finished run, once the block has ended.
    """

    values: Mapping[str, Any] | None = None
    seeds: Sequence[int] = ()
    data: Mapping[str, str] = field(default_factory=dict)
    run: Run | None = None


@contextmanager
def record(
    name: str,
    scale: str,
    config: Any,
    *,
    seeds: Sequence[int] = (),
    data: Mapping[str, str] | None = None,
    command: str | None = None,
    workers: int = 0,
) -> Iterator[Recording]:
    """Time the block, measure its memory, and make a :class:`Run` of what it measured.

    Nothing is written: call :meth:`Run.save`. If the block raises, there is no run.

    Args:
        name: Of the experiment.
        scale: ``"quick"``, ``"laptop"`` or ``"gpu"``.
        config: The options, as a dataclass or a mapping.
        seeds: The seeds; may be set in the block instead.
        data: The checksum of each data set; may be set in the block instead.
        command: What runs it again; by default ``flatbook run NAME --scale SCALE``.
        workers: How many processes the block uses besides this one.

    Yields:
        A :class:`Recording`, whose ``values`` the block sets.

    Raises:
        ResultError: If the block sets no values, or something that JSON cannot hold.

    Example:
        >>> with record("coin", "quick", {"tosses": 2}, seeds=[0, 1]) as recording:
        ...     recording.values = {"heads": summarise([0.0, 1.0])}
        >>> recording.run.summary("heads").mean
        0.5
    """
    import torch

    from flatbook import runtime

    _check_name(name)
    checks.choice("scale", scale, SCALES)
    config = plain(config, "config")
    # The code that runs is the code loaded now, whatever is edited meanwhile.
    begun = {"device": machine(workers=workers), "commit": commit(), "packages": package_versions()}
    device = runtime.device()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    recording = Recording(seeds=seeds, data=data or {})
    start = time.perf_counter()
    yield recording
    if on_gpu:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    if recording.values is None:
        raise ResultError(f"The block that records {name} must set the recording's values.")
    recording.run = Run(
        name=name,
        scale=scale,
        config=config,
        seeds=recording.seeds,
        values=recording.values,
        data=recording.data,
        command=command or f"flatbook run {name} --scale {scale}",
        wall_seconds=round(seconds, 3),
        peak_memory_mib=peak_memory_mib(),
        peak_gpu_memory_mib=(
            round(torch.cuda.max_memory_allocated(device) / 2**20, 1) if on_gpu else None
        ),
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **begun,
    )
