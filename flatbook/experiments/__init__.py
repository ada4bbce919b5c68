"""Experiments too long for a chapter: each is run once, recorded, and plotted from its record.

An experiment ``some-name`` is a module ``flatbook.experiments.some_name`` with three things
(:class:`Experiment`):

- ``Config``, a frozen dataclass of everything the outcome depends on. Its field ``seeds``, if
  there is one, is the number of seeds: the experiment averages over ``range(config.seeds)``.
- ``CONFIGS``, a mapping from every scale to a ``Config``.
- ``run(config, *, checkpoint, progress, workers)``, which returns an :class:`Outcome`. It cuts its
  work into independent pieces and hands them to :func:`flatbook.units.units`, together with the
  three options, so that it can be stopped at any time and carried on. If it trains ensembles, it
  may also take ``cluster``, the address of a Dask scheduler or None.

To add one, write the module and name it in :data:`EXPERIMENTS`.

Example, the whole of ``flatbook/experiments/coin.py``::

    @dataclass(frozen=True)
    class Config:
        seeds: int
        tosses: int

    CONFIGS = {"quick": Config(5, 100), "laptop": Config(5, 10_000), "gpu": Config(20, 10**6)}

    def run(config, *, checkpoint=None, progress=False, workers=0):
        tosses = {f"seed-{seed}": (seed, config.tosses) for seed in range(config.seeds)}
        heads = units(checkpoint, tosses, toss, config=config, workers=workers, progress=progress)
        return Outcome({"heads": summarise(list(heads.values()))}, seeds=range(config.seeds))

    def toss(task):
        seed, tosses = task
        return torch.rand(tosses, generator=generator(seed)).lt(0.5).double().mean()
"""

from __future__ import annotations

import importlib
import inspect
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flatbook import checks
from flatbook.results import SCALES, Run, record, results_folder

if TYPE_CHECKING:
    from flatbook.runtime import Scale

EXPERIMENTS: dict[str, str] = {
    "optimizers": "Six optimizers on the same images: accuracy, flatness and cost, seed by seed.",
    "robustness": "Sharpness along attacks, scaled heads, masked gradients and certificates.",
    "adversarial-training": "How far adversarial training widens the basin of clean images.",
    "privacy": "Membership attacks on SGD and the SAM family, by data, network and fit.",
    "memorization": "What SGD and SAM remember, whom it helps, and whom the attack finds.",
    "unlearning": "Eight ways to unlearn, three optimizers, three forget sets, tuned alike.",
    "unlearning-resnet": "NegGrad and Sharp MinMax on a residual network.",
    "reconstruction": "Three attacks that read training images off weights, with splitting.",
    "prompts": "A suffix that makes a language model answer wrongly, and sharpness along the way.",
    "signal-noise": "What two-layer networks learn and memorize, in training and unlearning.",
    "trained-nets": "What training leaves of polynomial networks, and which samples survive.",
}
"""The one-line description of each experiment, by name."""

_MOST_WORKERS = 8


@dataclass(frozen=True)
class Outcome:
    """What an experiment found.

    Attributes:
        values: Nested mappings and sequences of numbers, words and
            :class:`~flatbook.results.Summary`.
        seeds: The seeds it averaged over.
        data: The checksum of each data set it read, by name.
    """

    values: Mapping[str, Any]
    seeds: Sequence[int] = ()
    data: Mapping[str, str] = field(default_factory=dict)


def gather(runs: list[dict]) -> dict:
    """Turn a list of measurements into a measurement of lists, one entry a seed."""
    return {name: [run[name] for run in runs] for name in runs[0]}


def run_studies(
    studies: Mapping[str, Callable],
    seeds: Mapping[str, Sequence[int]],
    config: Any,
    *,
    digits: int,
    checkpoint=None,
    progress: bool = False,
    workers: int = 0,
) -> dict[str, list[dict]]:
    """Run studies that are each repeated over seeds, as units of work of their own.

    Args:
        studies: Functions of a module, by name; each takes the configuration and a seed.
        seeds: The seeds of each study.
        config: What the studies depend on.
        digits: Significant digits of what is kept.
        checkpoint: The folder of :func:`flatbook.units.units`.
        progress: As there.
        workers: As there.

    Returns:
        For each study what it returned, one entry a seed.
    """
    from flatbook.units import units

    tasks = {
        f"{name}-{seed}": (study, config, seed, digits)
        for name, study in studies.items()
        for seed in seeds[name]
    }
    found = units(
        checkpoint, tasks, _study, config=config, workers=workers, progress=progress, label="parts"
    )
    return {name: [found[f"{name}-{seed}"] for seed in seeds[name]] for name in studies}


def _study(task):
    study, config, seed, digits = task
    return rounded(study(config, seed), digits)


def rounded(value, digits: int):
    """Return nested numbers with so many significant digits; anything else as it is.

    Example:
        >>> rounded({"a": (0.123456, 7), "b": "word"}, 3)
        {'a': [0.123, 7], 'b': 'word'}
    """
    if isinstance(value, dict):
        return {key: rounded(inner, digits) for key, inner in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [rounded(inner, digits) for inner in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


class Experiment(Protocol):
    """What the module of an experiment offers; see the top of this page."""

    CONFIGS: Mapping[Scale, Any]

    def run(self, config: Any, *, checkpoint: Path | None, progress: bool, workers: int) -> Outcome:
        """Compute the outcome, keeping finished pieces in the folder ``checkpoint``."""


def get(name: str) -> Experiment:
    """Return the module of an experiment.

    Args:
        name: One of :data:`EXPERIMENTS`.

    Raises:
        ValueError: If there is no such experiment; the message names the nearest.
    """
    checks.choice("experiment", name, EXPERIMENTS)
    return importlib.import_module(f"flatbook.experiments.{name.replace('-', '_')}")


def execute(
    name: str,
    scale: Scale = "quick",
    *,
    seeds: int | None = None,
    out: str | os.PathLike | None = None,
    fresh: bool = False,
    workers: int | None = None,
    cluster: str | None = None,
    progress: bool = False,
) -> Run:
    """Run an experiment, or carry on one that was stopped, and record it.

    Finished pieces of work wait in a folder beside the record (:func:`checkpoint_folder`) until
    the record is written. The wall time in the record includes that of earlier sessions.

    Args:
        name: One of :data:`EXPERIMENTS`.
        scale: ``"quick"``, ``"laptop"`` or ``"gpu"``.
        seeds: How many seeds, instead of the number in the experiment's configuration.
        out: The file, or existing folder, for the record; by default
            :func:`~flatbook.results.results_folder`.
        fresh: Whether to discard what a stopped run has left instead of carrying on.
        workers: How many processes, see :func:`flatbook.units.units`. By default none on a GPU,
            and otherwise one for each CPU core, but at most 8.
        cluster: The address of a Dask scheduler whose workers train the ensembles, such as
            ``"tcp://10.0.0.1:8786"``; None trains them here. The record says that there was one,
            not its address, which will be another the next time.
        progress: Whether to show how far it is and the time left.

    Returns:
        The run, which is also saved.

    Raises:
        ValueError: If there is no such experiment or scale, or it has no seeds to change or no
            use for a cluster.
        ResultError: If what a stopped run has left does not fit this one.
        OSError: If the record could not be written; this is tried before the work. Or if no
            scheduler answers at ``cluster``.
        ImportError: If a cluster is asked for and Dask is not installed.
    """
    from flatbook.units import earlier

    experiment = get(name)
    config = experiment.CONFIGS[checks.choice("scale", scale, SCALES)]
    if seeds is not None:
        checks.count("seeds", seeds)
        if "seeds" not in (option.name for option in fields(config)):
            raise ValueError(f"seeds cannot be chosen: {name} has none.")
        config = replace(config, seeds=seeds)
    workers = (
        _default_workers() if workers is None else checks.count("workers", workers, at_least=0)
    )
    options = {}
    if cluster is not None:
        if "cluster" not in inspect.signature(experiment.run).parameters:
            raise ValueError(f"cluster cannot be used: {name} runs on one machine.")
        options["cluster"] = cluster
    path = destination(name, scale, out)
    _check_writable(path)
    checkpoint = checkpoint_folder(name, scale, out)
    if fresh and checkpoint.exists():
        shutil.rmtree(checkpoint)
    before = earlier(checkpoint)
    command = f"flatbook run {name} --scale {scale}"
    command += "" if seeds is None else f" --seeds {seeds}"
    command += "" if cluster is None else " --cluster ADDRESS"
    with record(name, scale, config, command=command, workers=workers) as recording:
        outcome = experiment.run(
            config, checkpoint=checkpoint, progress=progress, workers=workers, **options
        )
        recording.values = outcome.values
        recording.seeds, recording.data = outcome.seeds, outcome.data
    run = recording.run
    commits = dict.fromkeys([*before.commits, run.commit or "untracked"])
    run = replace(
        run,
        wall_seconds=round(run.wall_seconds + before.seconds, 3),
        commit=None if list(commits) == ["untracked"] else ", ".join(commits),
        device=run.device if cluster is None else f"{run.device}, and a Dask cluster",
    )
    run.save(path)
    shutil.rmtree(checkpoint, ignore_errors=True)
    return run


def destination(name: str, scale: Scale, out: str | os.PathLike | None = None) -> Path:
    """Return the file that :func:`execute` writes."""
    path = results_folder() if out is None else Path(out)
    return path / f"{name}.{scale}.json" if out is None or path.is_dir() else path


def checkpoint_folder(name: str, scale: Scale, out: str | os.PathLike | None = None) -> Path:
    """Return where :func:`execute` keeps finished pieces of work.

    This is ``_build/runs/NAME.SCALE`` of the checkout if the record goes to its ``book/_results``,
    and otherwise the hidden folder ``.NAME.SCALE.run`` beside the record.
    """
    folder = destination(name, scale, out).parent.absolute()
    if folder.parts[-2:] == ("book", "_results"):
        return folder.parents[1] / "_build" / "runs" / f"{name}.{scale}"
    return folder / f".{name}.{scale}.run"


def _check_writable(path: Path) -> None:
    """Raise OSError now rather than after hours of work."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder.")
    path.parent.mkdir(parents=True, exist_ok=True)
    probe = path.with_name(f".{path.name}.probe")
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:  # it names the file that was asked for, not the probe
        raise OSError(error.errno, f"cannot be written: {error.strerror}", str(path)) from error


def _default_workers() -> int:
    from flatbook import runtime

    if runtime.device().type != "cpu":
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cores or 1, _MOST_WORKERS)
