"""Build the book: execute stale chapters, two at a time, then render the site.

Chapters are executed through jupyter-cache and Sphinx reads the cache, because Sphinx itself
would run them one after another. The cache does not notice a changed package, so it is dropped
when a digest of everything the chapters compute with changes.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import jupytext
import yaml
from jupyter_cache import get_cache
from jupyter_cache.executors.utils import create_cache_bundle
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "_build"
CACHE = BUILD / ".jupyter_cache"
STOPPED = """
A chapter stopped, so the site was not rebuilt. If an assert failed, a claim of the text no longer
holds: mend the change, or the claim and the sentence it backs."""
READER = {"name": "myst_nb_md", "type": "plugin"}
# What the chapters compute with besides their own text, and what the pages look like.
COMPUTED_FROM = ("flatbook/**/*", "requirements.*", "pyproject.toml", "book/_results/*")
RENDERED_FROM = ("book/_static/*", "book/_ext/*", "book/claims.yml", "_config.yml", "_toc.yml")


def digest(patterns: tuple[str, ...]) -> str:
    """Hash the content of files and the scale."""
    found = hashlib.sha256(os.environ.get("FLATBOOK_SCALE", "quick").encode())
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file() and path.suffix != ".pyc":
                found.update(path.relative_to(ROOT).as_posix().encode() + b"\0")
                found.update(path.read_bytes())
    return found.hexdigest()


def drop_stale() -> None:
    """Forget executed chapters, or only rendered pages, if what they depend on has changed."""
    BUILD.mkdir(exist_ok=True)
    rendered = (BUILD / "html", BUILD / ".doctrees", BUILD / "jupyter_execute")
    for name, patterns, folders in (
        ("computed", COMPUTED_FROM, (CACHE, *rendered)),
        ("rendered", RENDERED_FROM, rendered),
    ):
        stamp, now = BUILD / f".{name}", digest(patterns)
        if not stamp.exists() or stamp.read_text() != now:
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
            stamp.write_text(now)


def pages() -> list[Path]:
    """Return every page of the table of contents."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    files = [toc["root"]]
    files += [entry["file"] for part in toc["parts"] for entry in part["chapters"]]
    return [ROOT / name for name in files]


def executable(page: Path) -> bool:
    return page.suffix == ".md" and any(c.cell_type == "code" for c in jupytext.read(page).cells)


def execute(key: int, timeout: int) -> tuple[str, float, str | None]:
    """Execute one chapter and keep its outputs in the cache; return its traceback if it fails."""
    # One thread each: two chapters share two cores, and results do not depend on the machine.
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    os.environ.setdefault("FLATBOOK_PROGRESS", "0")
    cache = get_cache(CACHE)
    page = cache.get_project_notebook(key)
    client = NotebookClient(
        page.nb,
        timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(Path(page.uri).parent)}},
        record_timing=False,
        extra_arguments=["--log-level=40"],  # the kernel's remarks about its transport
    )
    start = time.perf_counter()
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        return page.uri, time.perf_counter() - start, str(error)
    seconds = time.perf_counter() - start
    bundle = create_cache_bundle(page, None, None, seconds, None)
    cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)
    return page.uri, seconds, None


def execute_all(workers: int, timeout: int) -> None:
    cache = get_cache(CACHE)
    for page in pages():
        if executable(page):
            cache.add_nb_to_project(str(page), read_data=READER)
    stale = [record.pk for record in cache.list_unexecuted()]
    if not stale:
        print("chapters: all up to date", flush=True)
        return
    print(f"chapters: executing {len(stale)}, {workers} at a time", flush=True)
    failed = []
    with ProcessPoolExecutor(workers) as pool:
        jobs = [pool.submit(execute, key, timeout) for key in stale]
        for done, job in enumerate(as_completed(jobs), 1):
            uri, seconds, error = job.result()
            name = Path(uri).relative_to(ROOT).with_suffix("").as_posix()
            verdict = "failed" if error else "ok"
            print(f"  [{done}/{len(stale)}] {name}: {verdict}, {seconds:.0f} s", flush=True)
            if error:
                failed.append(f"\n{name}\n{error}")
    if failed:
        print(*failed, sep="", file=sys.stderr)
        sys.exit(STOPPED)


def render(strict: bool) -> None:
    jupyter_book = Path(sys.executable).with_name("jupyter-book")
    command = [jupyter_book, "build", ROOT, "--quiet"]
    if strict:
        command += ["--warningiserror", "--keep-going"]
    env = os.environ | {"JUPYTERCACHE": str(CACHE)}
    if subprocess.run(command, env=env, cwd=ROOT).returncode:
        # Sphinx would not read these pages again, and the next build would pass.
        shutil.rmtree(BUILD / ".doctrees", ignore_errors=True)
        sys.exit("the book did not build: see the messages above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strict", action="store_true", help="turn warnings into errors")
    parser.add_argument("--workers", type=int, default=2, help="chapters executed at a time")
    parser.add_argument("--timeout", type=int, default=600, help="seconds a cell may take")
    options = parser.parse_args()
    start = time.perf_counter()
    drop_stale()
    execute_all(options.workers, options.timeout)
    executed = time.perf_counter()
    render(options.strict)
    end = time.perf_counter()
    print(
        f"{BUILD / 'html' / 'index.html'}\n"
        f"built in {end - start:.0f} s ({executed - start:.0f} s executing chapters)",
        flush=True,
    )


if __name__ == "__main__":
    main()
