"""Write RESULTS.md and the record that the book plots, from pytest-benchmark's JSON."""

import json
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from bench_attacks import ATTACK, CERTIFICATE
from bench_privacy import CNNS, COUNTING, INFLUENCE, LIRA, MLPS, WHOLE
from bench_reconstruction import KKT_DEEP, KKT_STEP, LARGE, MIDDLE, SMALL, SPLITTING
from bench_sharpness import CLASSES, PROBES, SAMPLES, WIDTHS
from bench_unlearning import DECOMPOSITION, EPOCHS, MAP, epoch_of

from flatbook.results import record

HERE = Path(__file__).resolve().parent
RECORD = HERE.parent / "book" / "_results" / "benchmarks.laptop.json"


KINDS = ("seconds", "relative_error", "peak_bytes")
Table = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Target:
    """A ratio of medians, and the bar it is held to; with None below, the first alone.

    ``of`` says what it is of: seconds, or errors or peak bytes.
    """

    what: str
    group: str
    above: str
    below: str | None
    bar: float
    at_least: bool = False
    of: str = "seconds"

    def measured(self, rows: dict[str, float]) -> float:
        return rows[self.above] / (1 if self.below is None else rows[self.below])

    def met(self, measured: float) -> bool:
        return measured >= self.bar if self.at_least else measured <= self.bar


SPEED, FORWARD = f"last-layer trace, m={WIDTHS[-1]}", "trace beside the forward pass"
FULL, STEP, START = "full-model trace, 20 products", "five steps, small CNN, batch 128", "start-up"
TARGETS = [
    Target(
        "last-layer trace, dense autograd Hessian / closed form",
        SPEED,
        "autograd Hessian",
        "closed form",
        300,
        at_least=True,
    ),
    Target(
        "last-layer trace / forward pass before it",
        FORWARD,
        "trace from its outputs",
        "forward pass",
        0.10,
    ),
    Target("full-model trace, flatbook / PyHessian", FULL, "flatbook", "PyHessian", 1.0),
    Target("full-model trace, flatbook / curvlinops", FULL, "flatbook", "curvlinops", 1.0),
    Target("step, SAM / plain", STEP, "flatbook SAM", "plain", 2.15),
    Target(
        "step, SAM / pytorch_optimizer's SAM", STEP, "flatbook SAM", "pytorch_optimizer SAM", 1.0
    ),
    Target("step, LookSAM (k=5) / plain", STEP, "LookSAM, k=5", "plain", 1.35),
    Target("import flatbook / import torch", START, "import flatbook", "import torch", 1.5),
    Target(
        "import flatbook and use torch / import torch",
        START,
        "import flatbook and torch",
        "import torch",
        1.5,
    ),
    Target("`flatbook --help`, seconds", START, "flatbook --help", None, 1),
    Target("PGD, flatbook / torchattacks", ATTACK, "flatbook", "torchattacks", 1.0),
    Target("PGD, flatbook / foolbox", ATTACK, "flatbook", "foolbox", 1.0),
    Target("PGD, recording the path / not", ATTACK, "flatbook, recording", "flatbook", 1.15),
    Target("certified radius of 10,000 samples, seconds", CERTIFICATE, "flatbook", None, 0.1),
    Target(
        "RMIA's counting, pairwise / flatbook",
        COUNTING,
        "pairwise",
        "flatbook",
        1000,
        at_least=True,
    ),
    Target("RMIA, pairwise / flatbook", WHOLE, "pairwise", "flatbook", 1000, at_least=True),
    Target("LiRA, flatbook / masked means", LIRA, "flatbook", "masked means", 1.0),
    Target(
        "LiRA as released, flatbook / gathered medians",
        LIRA,
        "flatbook, reference",
        "gathered medians",
        1.0,
    ),
    Target(
        "influence of 5,000 points on 1,000, 400 models, seconds", INFLUENCE, "flatbook", None, 0.3
    ),
    Target(
        "64 small CNNs, plain loop / two processes",
        CNNS,
        "plain loop",
        "joblib, 2 workers",
        1.5,
        at_least=True,
    ),
    Target("4 tiny MLPs, auto / plain loop", MLPS, "auto", "plain loop", 1.0),
    *(
        target
        for network in EPOCHS
        for target in (
            Target(
                f"epoch of NegGrad / plain over as many samples, {network}",
                epoch_of(network),
                "NegGrad",
                "plain",
                1.1,
            ),
            Target(
                f"epoch of Sharp MinMax / NegGrad, {network}",
                epoch_of(network),
                "Sharp MinMax",
                "NegGrad",
                2.2,
            ),
        )
    ),
    Target("error map of 400 problems, GD, seconds", MAP, "gradient descent", None, 30),
    Target("error map of 400 problems, SAM, seconds", MAP, "SAM", None, 30),
    Target(
        "decomposition of 100 checkpoints, d = 2,000, seconds", DECOMPOSITION, "flatbook", None, 2
    ),
    Target("recovery of 60 samples, seconds", MIDDLE, "flatbook", None, 0.4),
    Target("recovery of 100 samples, seconds", LARGE, "flatbook", None, 2.5),
    *(
        Target(
            f"recovery of {n} samples, error", group, "flatbook", None, 1e-11, of="relative_error"
        )
        for n, group in ((60, MIDDLE), (100, LARGE))
    ),
    Target(
        "recovery of 40 samples, flatbook / least squares", SMALL, "flatbook", "least squares", 1
    ),
    Target(
        "KKT loss, double backward / kernel form",
        KKT_STEP,
        "double backward",
        "kernel form",
        5,
        at_least=True,
    ),
    Target(
        "KKT loss, double backward / kernel form in a span",
        KKT_STEP,
        "double backward",
        "kernel form in a span",
        5,
        at_least=True,
    ),
    Target(
        "gradients of the KKT loss, distance of the two forms",
        KKT_STEP,
        "kernel form",
        None,
        1e-10,
        of="relative_error",
    ),
    Target("KKT loss of a deep network, flatbook / by hand", KKT_DEEP, "flatbook", "by hand", 1.2),
    Target(
        "splitting directions, Lanczos / dense matrices",
        SPLITTING,
        "Lanczos",
        "dense matrices",
        0.1,
    ),
    Target(
        "splitting directions, memory, Lanczos / dense matrices",
        SPLITTING,
        "Lanczos",
        "dense matrices",
        0.1,
        of="peak_bytes",
    ),
]


def main() -> None:
    # Of a bench in several files the last counts, so that a part can be measured again.
    sources = [json.loads(Path(path).read_text())["benchmarks"] for path in sys.argv[1:]]
    benches = {(b["group"], b["name"]): b for source in sources for b in source}.values()
    tables: dict[str, Table] = {kind: defaultdict(dict) for kind in KINDS}
    for bench in benches:
        found = {"seconds": bench["stats"]["median"]} | bench["extra_info"]
        for kind, table in tables.items():
            if kind in found:
                table[bench["group"]][bench["name"]] = found[kind]
    medians, errors, peaks = (tables[kind] for kind in KINDS)

    by_width = [medians[f"last-layer trace, m={width}"] for width in WIDTHS]
    error_by_width = [errors[f"last-layer trace, m={width}"] for width in WIDTHS]
    names = list(by_width[0])
    config = {"samples": SAMPLES, "classes": CLASSES, "probes": PROBES, "threads": 1}
    with record("benchmarks", "laptop", config, command="make bench") as recording:
        recording.seeds = [0]
        recording.values = {
            "last_layer_trace": config
            | {
                "widths": list(WIDTHS),
                "seconds": {name: [row[name] for row in by_width] for name in names},
                "relative_error": {name: [row[name] for row in error_by_width] for name in names},
            },
            "medians": {group: dict(rows) for group, rows in medians.items()},
            "peak_bytes": {group: dict(rows) for group, rows in peaks.items()},
            "relative_error": {group: dict(rows) for group, rows in errors.items()},
        }
    seconds = sum(bench["stats"]["total"] for bench in benches)
    run = replace(recording.run, wall_seconds=round(seconds, 3))
    run.save(RECORD)
    (HERE / "RESULTS.md").write_text(page(tables, run.provenance()), encoding="utf-8")
    print(f"wrote {HERE / 'RESULTS.md'} and {RECORD}")


def page(tables: dict[str, Table], provenance: str) -> str:
    lines = [
        "# Timings side by side",
        "",
        "Written by `make bench`: every contender in one process on the same input, one torch",
        "thread, ratios of medians; ensembles are trained with all threads, or in processes whose",
        "start counts. The machine is shared and noisy; a ratio moves by some per cent from run to",
        "run.",
        "",
        provenance,
        "",
        "| ratio, or seconds or error where it says so | measured | target | |",
        "|---|---:|---:|---|",
    ]
    for target in TARGETS:
        measured = target.measured(tables[target.of][target.group])
        sign = "≥" if target.at_least else "≤"
        verdict = "met" if target.met(measured) else "**missed**"
        lines.append(f"| {target.what} | {measured:,.3g} | {sign} {target.bar:g} | {verdict} |")
    lines += ["", "## Medians", "", "| work | contender | median |", "|---|---|---:|"]
    for group, rows in tables["seconds"].items():
        for name, median in sorted(rows.items(), key=lambda row: row[1]):
            lines.append(f"| {group} | {name} | {median * 1e3:,.3f} ms |")
    lines += ["", "## Most memory beyond the inputs", "", "| work | contender | peak |"]
    lines.append("|---|---|---:|")
    for group, rows in tables["peak_bytes"].items():
        for name, peak in sorted(rows.items(), key=lambda row: row[1]):
            lines.append(f"| {group} | {name} | {peak / 2**20:,.1f} MiB |")
    lines += ["", "## Errors", "", "| work | contender | relative error |", "|---|---|---:|"]
    for group, rows in tables["relative_error"].items():
        for name, error in sorted(rows.items(), key=lambda row: row[1]):
            lines.append(f"| {group} | {name} | {error:.1e} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
