import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
import torch

from flatbook import experiments
from flatbook.experiments import EXPERIMENTS, execute, get
from flatbook.jsonfile import read_json, write_json
from flatbook.results import SCALES, ResultError, load_result
from flatbook.units import earlier, units


@pytest.fixture(autouse=True)
def registered(tmp_path, monkeypatch):
    monkeypatch.setitem(EXPERIMENTS, "tiny", "tosses a coin")
    monkeypatch.setitem(sys.modules, "flatbook.experiments.tiny", tiny)
    (tmp_path / "book" / "_results").mkdir(parents=True)
    monkeypatch.setenv("FLATBOOK_RESULTS", str(tmp_path / "book" / "_results"))
    monkeypatch.setenv("TINY_LOG", str(tmp_path / "log"))


@pytest.fixture
def log(tmp_path):
    """Return a function that returns, and forgets, which seeds were computed."""

    def read():
        lines = (tmp_path / "log").read_text().splitlines() if (tmp_path / "log").exists() else []
        (tmp_path / "log").unlink(missing_ok=True)
        return sorted(int(line.split()[0]) for line in lines)

    return read


def folder_of(tmp_path, scale="quick"):
    return tmp_path / "_build" / "runs" / f"tiny.{scale}"


# Units of work


def test_finished_units_are_not_computed_again(tmp_path):
    seen = []

    def work(key):
        seen.append(key)
        return {"length": (len(key), float(len(key)))}

    first = units(tmp_path, ["a", "bb"], work, config={})
    second = units(tmp_path, ["bb", "ccc", "a"], work, config={})
    assert seen == ["a", "bb", "ccc"]
    assert list(second) == ["bb", "ccc", "a"]
    assert second["a"] == first["a"] == {"length": [1, 1.0]}
    assert units(None, ["a"], work, config={}) == {"a": first["a"]}
    assert units(tmp_path, [], work, config={}) == {}


def test_units_of_another_configuration_are_refused(tmp_path):
    units(tmp_path, ["a"], len, config={"lr": 0.1, "widths": [1, 2]})
    with pytest.raises(ResultError, match=r"other config \(lr was 0\.1, is now 0\.2\).*--fresh"):
        units(tmp_path, ["a"], len, config={"lr": 0.2, "widths": [1, 2]})
    with pytest.raises(ResultError, match=r"widths was \[1, 2\], is now None"):
        units(tmp_path, ["a"], len, config={"lr": 0.1})


def test_units_of_other_packages_or_machines_are_refused(tmp_path, monkeypatch):
    from flatbook import units as module

    units(tmp_path, ["a"], len, config={})
    with monkeypatch.context() as patch:
        patch.setattr(module, "package_versions", lambda: {"torch": "1.0"})
        with pytest.raises(ResultError, match="other packages"):
            units(tmp_path, ["a"], len, config={})
    monkeypatch.setattr(module, "machine", lambda workers: "an abacus")
    with pytest.raises(ResultError, match=r"a\.json was computed on .* and this is an abacus"):
        units(tmp_path, ["a"], len, config={})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", r"a\.json is damaged; delete it"),
        ("a.json", "[]", r"a\.json is damaged; delete it"),
        ("a.json", '{"device": ""}', r"a\.json is damaged; delete it"),
        ("manifest.json", "", r"manifest\.json is damaged; start afresh"),
        ("manifest.json", "[1]", r"manifest\.json is damaged; start afresh"),
        ("manifest.json", '{"seconds": 1}', r"manifest\.json is damaged; start afresh"),
    ],
)
def test_damaged_units_are_refused(tmp_path, name, content, message):
    units(tmp_path, ["a"], len, config={})
    (tmp_path / name).write_text(content)
    with pytest.raises(ResultError, match=message):
        units(tmp_path, ["a"], len, config={})


@pytest.mark.parametrize("key", ["", "a/b", "..", ".a", "a b", 3, "manifest", "é"])
def test_keys_must_be_file_names(key):
    with pytest.raises(ValueError, match="keys must be words"):
        units(None, [key], len, config={})


@pytest.mark.parametrize("keys", [["a", "a"], ["a", "A"]])
def test_keys_must_differ(keys):
    with pytest.raises(ValueError, match="keys must differ"):
        units(None, keys, len, config={})


def test_workers_must_be_a_count():
    with pytest.raises(ValueError, match="workers must be a whole number of at least 0; got -1"):
        units(None, ["a"], len, config={}, workers=-1)


def test_a_result_must_be_plain(tmp_path):
    with pytest.raises(ValueError, match="the result of unit a must be made of"):
        units(tmp_path, ["a"], lambda key: object(), config={})
    assert not (tmp_path / "a.json").exists()


def test_time_of_finished_units_adds_up(tmp_path):
    units(tmp_path, ["a", "b"], lambda key: time.sleep(0.05), config={})
    first = earlier(tmp_path)
    units(tmp_path, ["a", "b", "c"], lambda key: time.sleep(0.05), config={})
    assert 0.099 < first.seconds < earlier(tmp_path).seconds - 0.049 < 1
    assert earlier(tmp_path / "nothing").seconds == 0


def test_progress_is_shown(capsys):
    units(None, ["a", "b"], len, config={}, progress=True, label="lengths")
    assert "lengths: 100%" in capsys.readouterr().err
    units(None, ["a", "b"], len, config={})
    assert capsys.readouterr().err == ""


# Experiments


def test_example_of_the_page_runs():
    page = experiments.__doc__
    source = page[page.index("    @dataclass") :]
    source = "\n".join(line.removeprefix("    ") for line in source.splitlines())
    from flatbook.results import summarise
    from flatbook.runtime import generator

    names = {
        "dataclass": dataclasses.dataclass,
        "units": units,
        "Outcome": experiments.Outcome,
        "summarise": summarise,
        "generator": generator,
        "torch": torch,
        "__name__": __name__,
    }
    exec(source, names)
    assert set(names["CONFIGS"]) == set(SCALES)
    heads = names["run"](names["CONFIGS"]["quick"]).values["heads"]
    assert heads.n == 5
    assert 0.3 < heads.mean < 0.7


def test_modules_are_registered_and_keep_the_contract():
    folder = Path(experiments.__file__).parent
    modules = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")}
    names = [name for name in EXPERIMENTS if name != "tiny"]
    assert modules == {name.replace("-", "_") for name in names}
    for name in names:
        module = get(name)
        assert list(module.CONFIGS) == list(SCALES)
        for config in module.CONFIGS.values():
            assert isinstance(config, module.Config)
            assert type(config).__dataclass_params__.frozen
        assert callable(module.run)
        assert 10 < len(EXPERIMENTS[name]) < 100


def test_execute_records(tmp_path, log):
    run = execute("tiny", workers=0)
    assert load_result("tiny", "quick") == run
    assert run.config == {"seeds": 3, "tosses": 1000}
    assert run.seeds == [0, 1, 2]
    assert run.summary("heads").n == 3
    assert log() == [0, 1, 2]
    assert not folder_of(tmp_path).exists()  # nothing stale for the next run
    execute("tiny", workers=0)
    assert log() == [0, 1, 2]


def test_processes_change_nothing(tmp_path, log):
    runs = [execute("tiny", "quick", workers=workers) for workers in (0, 1, 2)]
    assert runs[0].values == runs[1].values == runs[2].values
    assert "2 × 1 thread" in runs[2].device
    pids = [line.split()[1] for line in (tmp_path / "log").read_text().splitlines()]
    assert set(pids[:3]) == {str(os.getpid())}
    assert str(os.getpid()) not in pids[3:]
    assert log() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_process_computes_with_one_thread(monkeypatch):
    monkeypatch.setenv("TINY_0", "threads")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert units(None, {"a": (0, 0)}, tiny.toss, config={}, workers=1) == {"a": 1}


def test_seeds_and_destination_can_be_chosen(tmp_path):
    run = execute("tiny", "laptop", seeds=2, out=tmp_path / "new" / "mine.json", workers=0)
    assert run.command == "flatbook run tiny --scale laptop --seeds 2"
    assert run.config["seeds"] == run.summary("heads").n == 2
    assert read_json(tmp_path / "new" / "mine.json")["name"] == "tiny"
    execute("tiny", "laptop", seeds=2, out=tmp_path / "new", workers=0)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "mine.json",
        "tiny.laptop.json",
    ]


def test_bad_requests_are_refused_before_the_work(tmp_path, log, monkeypatch):
    with pytest.raises(ValueError, match=r"got 'tinny'\. Did you mean 'tiny'\?"):
        execute("tinny")
    with pytest.raises(ValueError, match="scale must be one of quick, laptop, gpu"):
        execute("tiny", "huge")
    with pytest.raises(ValueError, match="seeds must be a whole number of at least 1; got 0"):
        execute("tiny", seeds=0)
    with pytest.raises(ValueError, match="workers must be a whole number of at least 0"):
        execute("tiny", workers=-1)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        execute("tiny", out=tmp_path / "file" / "x.json")
    with pytest.raises(OSError, match="/proc/"):  # where not even root may write
        execute("tiny", out="/proc/x.json")
    seedless = dataclasses.make_dataclass("Seedless", ["tosses"], frozen=True)
    monkeypatch.setattr(tiny, "CONFIGS", {"quick": seedless(3)})
    with pytest.raises(ValueError, match="seeds cannot be chosen: tiny has none"):
        execute("tiny", seeds=2)
    assert log() == []


def test_a_failure_keeps_what_is_finished(tmp_path, log, monkeypatch):
    undisturbed = execute("tiny", workers=0)
    log()
    monkeypatch.setenv("TINY_1", "raise")
    with pytest.raises(RuntimeError, match="seed 1 failed"):
        execute("tiny", workers=0)
    assert log() == [0, 1]
    assert sorted(path.name for path in folder_of(tmp_path).iterdir()) == [
        "manifest.json",
        "seed-0.json",
    ]
    monkeypatch.delenv("TINY_1")
    resumed = execute("tiny", workers=0)
    assert log() == [1, 2]
    assert resumed.values == undisturbed.values


def test_fresh_discards_what_is_finished(log, monkeypatch):
    monkeypatch.setenv("TINY_2", "raise")
    with pytest.raises(RuntimeError):
        execute("tiny", workers=0)
    monkeypatch.delenv("TINY_2")
    log()
    with pytest.raises(ResultError, match=r"seeds was 3, is now 4\): finish it with those"):
        execute("tiny", seeds=4, workers=0)
    execute("tiny", seeds=4, workers=0, fresh=True)
    assert log() == [0, 1, 2, 3]


def test_wall_time_and_commits_of_all_sessions_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("TINY_2", "raise")
    with pytest.raises(RuntimeError):
        execute("tiny", workers=0)
    manifest = read_json(folder_of(tmp_path) / "manifest.json")
    manifest |= {"seconds": 1000.0, "commits": ["a" * 40]}
    write_json(folder_of(tmp_path) / "manifest.json", manifest)
    monkeypatch.delenv("TINY_2")
    run = execute("tiny", workers=0)
    assert 1000 < run.wall_seconds < 1060
    assert run.commit.startswith("a" * 40)
    assert "commit `aaaaaaaaaa`" in run.provenance()


def test_a_failure_in_a_process_is_the_unit_s_own(tmp_path, log, monkeypatch):
    monkeypatch.setenv("TINY_1", "value")
    with pytest.raises(ValueError, match=r"seed 1 is unlucky\.") as caught:
        execute("tiny", workers=1)
    assert caught.value.__notes__ == ["This was unit seed-1."]
    assert (folder_of(tmp_path) / "seed-0.json").exists()


def test_a_dying_process_is_explained(monkeypatch):
    monkeypatch.setenv("TINY_1", "die")
    with pytest.raises(ResultError, match="A worker process died"):
        execute("tiny", workers=1)


def started(tmp_path, workers):
    """Start a run in a process of its own and wait until it has finished a unit."""
    code = f"""
import sys
sys.path.insert(0, {str(Path(tiny.__file__).parent)!r})
import tiny
from flatbook import experiments
experiments.EXPERIMENTS["tiny"] = "tosses a coin"
sys.modules["flatbook.experiments.tiny"] = tiny
if __name__ == "__main__":
    experiments.execute("tiny", "laptop", workers={workers})
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    environment = os.environ | {"TINY_SLEEP": "2"}
    process = subprocess.Popen(
        [sys.executable, script],
        env=environment,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # A job started in the background of a shell ignores interrupts, and so would this one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    for _ in range(600):
        if any(folder_of(tmp_path, "laptop").glob("seed-*.json")):
            return process
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.05)
    pytest.fail("no unit was finished in 30 s")


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # An orphan that nobody waits for is dead all the same.
    return " Z " not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["kill", "interrupt"])
def test_a_killed_run_carries_on(tmp_path, log, how):
    process = started(tmp_path, workers=2)
    process.send_signal(how)
    with process.stderr:
        process.wait(timeout=20)
    pids = {int(line.split()[1]) for line in (tmp_path / "log").read_text().splitlines()}
    log()
    finished = list(folder_of(tmp_path, "laptop").glob("seed-*.json"))
    assert 1 <= len(finished) < 5
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)  # no worker outlives its parent
    resumed = execute("tiny", "laptop", workers=2)
    assert len(log()) == 5 - len(finished)
    assert resumed.values == execute("tiny", "laptop", workers=0).values
    assert resumed.wall_seconds > 0.5  # the killed session's finished units included
