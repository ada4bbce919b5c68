"""The command ``flatbook``: what can be run, what has been recorded, and the data sets."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

import flatbook
from flatbook import checks, experiments, results, summaries

app = typer.Typer(
    help="Flat minima, measured: run the book's experiments and look after its data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@contextmanager
def _plainly() -> Iterator[None]:
    """Turn bad input, unusable files and a training that diverges into one sentence."""
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _diverged(error):
            raise
        text = str(error)
        if isinstance(error, OSError) and error.strerror:
            text = ": ".join(filter(None, (error.filename, error.strerror))) + "."
        typer.secho(f"Error: {text}", fg=typer.colors.RED, err=True)
        raise typer.Exit(2) from error


def _diverged(error: RuntimeError) -> bool:
    from flatbook.training import DivergenceError  # slow to import, unless it has happened

    return isinstance(error, DivergenceError)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flatbook {flatbook.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Take the options that stand before a command."""


@app.command("list")
def list_() -> None:
    """List the experiments, and when each was recorded at each scale."""
    with _plainly():
        table = _table("experiment", "what it measures", *results.SCALES)
        try:
            folder, note = results.results_folder(), ""
        except results.ResultError as error:
            folder, note = None, str(error)
        recorded = results.recorded(folder=folder) if folder else {}
        for name, about in experiments.EXPERIMENTS.items():
            dates = []
            for scale in results.SCALES:
                date = "–"
                if scale in recorded.get(name, ()):
                    try:
                        date = results.load_result(name, scale, folder=folder).date[:10]
                    except results.ResultError as error:
                        date, note = "unreadable", str(error)
                dates.append(date)
            table.add_row(name, about, *dates)
        _print(table)
        if note:
            typer.echo(note)


@app.command()
def run(
    name: Annotated[str, typer.Argument(help="The experiment; see `flatbook list`.")],
    scale: Annotated[
        str,
        typer.Option(
            help="quick: a minute on two cores; laptop: up to an hour; gpu: as in the papers.",
            metavar="quick|laptop|gpu",
        ),
    ] = "quick",
    seeds: Annotated[
        int | None, typer.Option(help="How many seeds, instead of the experiment's own number.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write the record, instead of book/_results.", metavar="PATH"),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--fresh", help="Carry on what a stopped run has finished, or discard it."
        ),
    ] = True,
    workers: Annotated[
        int | None,
        typer.Option(help="Processes side by side; without it one per core, and none on a GPU."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Such as cpu, cuda, cuda:1, mps; without it the fastest there is."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Train ensembles on the Dask cluster whose scheduler has this address.",
            metavar="tcp://HOST:PORT",
        ),
    ] = None,
) -> None:
    """Run an experiment and record it.

    A run can be stopped at any time: the same command carries it on.
    """
    with _plainly():
        # Before anything slow is imported.
        checks.choice("experiment", name, experiments.EXPERIMENTS)
        checks.choice("scale", scale, results.SCALES)
        path = experiments.destination(name, scale, out)
        if cluster is not None and importlib.util.find_spec("distributed") is None:
            raise ValueError('--cluster needs Dask: pip install "flatbook[cluster]".')
        if device is not None:
            _use(device)
        try:
            done = experiments.execute(
                name,
                scale,
                seeds=seeds,
                out=out,
                fresh=not resume,
                workers=workers,
                cluster=cluster,
                progress=os.environ.get("FLATBOOK_PROGRESS") != "0",
            )
        except KeyboardInterrupt as error:
            typer.secho("\nStopped. The same command carries on from here.", err=True)
            raise typer.Exit(130) from error
        rows = list(_rows(done.values))
        if rows:
            table = _table("value", "mean ± half its 95 % interval")
            for row in rows:
                table.add_row(*row)
            _print(table)
        typer.echo(done.provenance())
        typer.echo(f"Written to {path}")


@app.command()
def data(
    name: Annotated[
        str | None, typer.Argument(help="The data set to load; without it, all are listed.")
    ] = None,
    download: Annotated[
        bool, typer.Option("--download", help="Download it if it is not there.")
    ] = False,
    root: Annotated[
        Path | None,
        typer.Option(help="The folder of data sets, instead of FLATBOOK_DATA.", metavar="PATH"),
    ] = None,
) -> None:
    """List the data sets, or load one and print its shape and checksum."""
    with _plainly():
        from flatbook.data import catalogue, load

        if name is None:
            if download:
                raise ValueError("--download needs the name of a data set.")
            table = _table("data set", "what it is", "classes", "where")
            for row in catalogue(root=root):
                where = str(row.source) if row.available else "not here"
                table.add_row(row.name, row.description, str(row.classes), where)
            _print(table)
            typer.echo("`flatbook data NAME` loads one, or says how to get it.")
            return
        loaded = load(name, root=root, download=download)
        for split in ("train", "test"):
            x = getattr(loaded, split).x
            shape = " × ".join(str(size) for size in x.shape)
            typer.echo(f"{split:<9} {shape}, from {x.min():g} to {x.max():g}")
        typer.echo(f"classes   {loaded.num_classes}")
        typer.echo(f"SHA-256   {loaded.checksum}")


def _use(device: str) -> None:
    from flatbook import runtime

    os.environ["FLATBOOK_DEVICE"] = device  # worker processes read it, too
    try:
        runtime.device()
    except ValueError as error:
        raise ValueError(
            f"--device must name a device of this machine, such as cpu; got {device!r}."
        ) from error


def _rows(values: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the wording of every mean among nested values."""
    if summaries.is_summary(values):
        yield path, str(summaries.Summary(values["mean"], values["standard_error"], values["n"]))
    elif isinstance(values, dict):
        for key, inner in values.items():
            yield from _rows(inner, f"{path}.{key}".lstrip("."))


def _table(*columns: str):
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _print(table) -> None:
    from rich.console import Console

    Console().print(table)


if __name__ == "__main__":
    app()
