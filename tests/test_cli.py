import re
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import tiny
from typer.testing import CliRunner

import flatbook
from flatbook import cli, experiments
from flatbook.jsonfile import read_json
from flatbook.results import SCALES, load_result
from flatbook.training import DivergenceError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setitem(experiments.EXPERIMENTS, "tiny", "tosses a coin")
    monkeypatch.setitem(sys.modules, "flatbook.experiments.tiny", tiny)
    monkeypatch.setenv("FLATBOOK_RESULTS", str(tmp_path / "results"))
    monkeypatch.setenv("FLATBOOK_DEVICE", "cpu")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("FLATBOOK_PROGRESS", raising=False)
    return tmp_path / "results"


def call(*arguments, code=0):
    """Run the command and return what it prints, out and error streams together."""
    done = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert done.exit_code == code, done.output
    if code:
        assert "Traceback" not in done.output
    return done.output


def error(*arguments):
    """Return the sentence of a refusal, the last line of all."""
    text = call(*arguments, code=2).splitlines()[-1]
    assert text.startswith("Error: ")
    assert text.endswith((".", "?"))
    return text


def test_help_names_every_command():
    text = call("--help")
    for command in ("list", "run", "data"):
        assert re.search(rf"\b{command}\b", text)
        assert "--help" in call(command, "--help")
    assert all(scale in call("run", "--help") for scale in SCALES)


def test_version():
    assert call("--version") == f"flatbook {flatbook.__version__}\n"


def test_command_is_installed():
    (script,) = entry_points(group="console_scripts", name="flatbook")
    assert script.load() is cli.app


def test_list_says_what_is_recorded(folder):
    assert re.search(r"tiny +tosses a coin +– +– +–", call("list"))
    call("run", "tiny", "--workers", 0, "--seeds", 2)
    date = load_result("tiny", folder=folder).date[:10]
    assert re.search(rf"tiny +tosses a coin +{date} +– +–", call("list"))


def test_list_survives_damage_and_homelessness(folder, monkeypatch, tmp_path):
    folder.mkdir()
    (folder / "tiny.gpu.json").write_text("{")
    text = call("list")
    assert re.search(r"tiny +tosses a coin +– +– +unreadable", text)
    assert "tiny.gpu.json is not valid JSON" in text.replace("\n", "")

    from flatbook import results

    monkeypatch.delenv("FLATBOOK_RESULTS")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(results, "__file__", str(tmp_path / "x" / "flatbook" / "results.py"))
    text = call("list")
    assert re.search(r"tiny +tosses a coin +– +– +–", text)
    assert "FLATBOOK_RESULTS" in text


def test_run_shows_progress_and_records(folder):
    text = call("run", "tiny", "--scale", "laptop", "--workers", 0)
    run = load_result("tiny", "laptop", folder=folder)
    assert "5/5" in text
    assert re.search(rf"heads +{re.escape(str(run.summary('heads')))}", text)
    assert run.provenance() in text
    assert f"Written to {folder / 'tiny.laptop.json'}" in text


def test_run_without_progress(folder, monkeypatch):
    monkeypatch.setenv("FLATBOOK_PROGRESS", "0")
    assert "3/3" not in call("run", "tiny", "--workers", 0)


def test_run_elsewhere(folder, tmp_path):
    text = call("run", "tiny", "--seeds", 2, "--workers", 0, "--out", tmp_path / "mine.json")
    assert f"Written to {tmp_path / 'mine.json'}" in text
    assert read_json(tmp_path / "mine.json")["config"]["seeds"] == 2
    assert not folder.exists()


def test_run_resumes_unless_told_not_to(folder, monkeypatch):
    monkeypatch.setenv("TINY_2", "value")
    assert error("run", "tiny", "--workers", 0) == "Error: seed 2 is unlucky."
    monkeypatch.delenv("TINY_2")
    refusal = error("run", "tiny", "--workers", 0, "--seeds", 4)
    assert "holds unfinished work with other config (seeds was 3, is now 4)" in refusal
    assert "3/3" in call("run", "tiny", "--workers", 0)
    call("run", "tiny", "--workers", 0, "--seeds", 4, "--fresh")
    assert load_result("tiny", folder=folder).config["seeds"] == 4


def test_run_interrupted(folder, monkeypatch):
    def interrupted(task):
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny, "toss", interrupted)
    text = call("run", "tiny", "--workers", 0, code=130)
    assert "Stopped. The same command carries on from here." in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tinny"], "got 'tinny'. Did you mean 'tiny'?"),
        (["tiny", "--scale", "laptob"], "got 'laptob'. Did you mean 'laptop'?"),
        (["tiny", "--seeds", 0], "seeds must be a whole number of at least 1; got 0."),
        (["tiny", "--workers", -1], "workers must be a whole number of at least 0; got -1."),
        (
            ["tiny", "--device", "abacus"],
            "--device must name a device of this machine, such as cpu; ",
        ),
        (["tiny", "--out", "/proc/x.json"], "/proc/"),
        (["tiny", "--cluster", "tcp://x:1"], "cluster cannot be used: tiny runs on one machine."),
    ],
)
def test_run_refuses(folder, monkeypatch, arguments, message):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: True)  # with Dask or without
    assert message in error("run", *arguments)
    assert not folder.exists() or not any(folder.iterdir())


def test_run_where_nothing_can_be_written(folder, tmp_path):
    path = tmp_path / f"{'x' * 250}.json"  # the name of the record would do, that of a probe not
    assert f"{path.name}: cannot be written: " in error("run", "tiny", "--out", path)


def test_run_into_a_file(folder, tmp_path):
    (tmp_path / "file").write_text("")
    assert "file: " in error("run", "tiny", "--out", tmp_path / "file" / "x.json")


def test_run_that_diverges_says_so(folder, monkeypatch):
    def diverges(task):
        raise DivergenceError("the mean loss", 3, 0.5)

    monkeypatch.setattr(tiny, "toss", diverges)
    text = error("run", "tiny", "--workers", 0)
    assert text.startswith("Error: training diverged: the mean loss is not finite in epoch 3")


def test_run_with_a_bug_shows_where(folder, monkeypatch):
    monkeypatch.setenv("TINY_0", "raise")
    done = CliRunner().invoke(cli.app, ["run", "tiny", "--workers", "0"])
    assert isinstance(done.exception, RuntimeError)


def test_run_on_a_cluster_needs_dask(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    refusal = error("run", "tiny", "--cluster", "tcp://127.0.0.1:1")
    assert refusal == 'Error: --cluster needs Dask: pip install "flatbook[cluster]".'
    assert not folder.exists()


@pytest.fixture
def small_privacy(folder, monkeypatch):
    from flatbook.experiments import privacy

    pool = privacy.Pool("digits", 40, "small-cnn", 4, lr=0.05, batch_size=16)
    cells = tuple(privacy.Cell("digits", name, None, 1, 6) for name in ("sgd", "sam"))
    config = privacy.Config({"digits": pool}, cells, n_eval=20, draws=5)
    monkeypatch.setattr(privacy, "CONFIGS", {"quick": config})
    return folder


@pytest.mark.filterwarnings("ignore")  # Dask's own
def test_run_on_a_cluster_gives_the_same_values(small_privacy):
    distributed = pytest.importorskip("distributed")
    call("run", "privacy", "--workers", 0)
    here = load_result("privacy", folder=small_privacy)
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None
    ) as cluster:
        address = cluster.scheduler_address
        text = call("run", "privacy", "--workers", 0, "--cluster", address)
    there = load_result("privacy", folder=small_privacy)
    assert "6 models (dask): 100%" in text
    assert there.values == here.values
    assert there.config == here.config
    assert there.command == "flatbook run privacy --scale quick --cluster ADDRESS"
    assert there.device == f"{here.device}, and a Dask cluster"
    assert "Dask" not in here.provenance()


@pytest.mark.filterwarnings("ignore")  # Dask's own
def test_run_on_no_cluster_says_so_at_once(small_privacy, monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setattr("flatbook.crews._PATIENCE", 1)
    refusal = error("run", "privacy", "--workers", 0, "--cluster", "tcp://127.0.0.1:1")
    assert refusal == "Error: no Dask scheduler answers at tcp://127.0.0.1:1."
    refusal = error("run", "privacy", "--workers", 0, "--cluster", "somewhere")
    assert refusal.startswith("Error: cluster must be the address of a Dask scheduler")


def test_data_lists_every_set(folder, tmp_path):
    from flatbook.data import NAMES

    text = call("data", "--root", tmp_path)
    for name in NAMES:
        assert name in text
    assert re.search(r"digits .* ships with scikit-learn", text)
    assert re.search(r"cifar10 .* not here", text)


def test_data_loads_one(folder):
    from flatbook.data import load

    text = call("data", "digits")
    assert re.search(r"train +1437 × 1 × 8 × 8, from 0 to 1", text)
    assert load("digits").checksum in text


def test_data_refuses(folder, tmp_path):
    assert "Did you mean 'cifar10'?" in error("data", "cifar-10")
    assert str(tmp_path) in error("data", "cifar10", "--root", tmp_path)
    assert "needs the name" in error("data", "--download")


def test_module_runs_as_a_script():
    done = subprocess.run(
        [sys.executable, "-m", "flatbook.cli", "run", "nothing"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"Error: experiment must be one of .*; got 'nothing'\..*\n", done.stderr)
