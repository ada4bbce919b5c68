import dataclasses
import json
import math
import os
import string
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from flatbook import provenance, runtime
from flatbook.jsonfile import plain, read_json, write_json
from flatbook.results import (
    _KINDS,
    SCALES,
    SCHEMA,
    ResultError,
    Run,
    Summary,
    load_result,
    paired_difference,
    record,
    recorded,
    results_folder,
    summarise,
)


@dataclass(frozen=True)
class Config:
    lr: float = 0.1
    widths: tuple[int, ...] = (8, 16)


def make_run(**changes) -> Run:
    parts = {
        "name": "optimizers",
        "scale": "quick",
        "config": Config(),
        "seeds": range(5),
        "values": {"SAM": {"accuracy": summarise([0.9, 0.91, 0.92])}, "note": "none"},
        "data": {"fashion-mnist": "ab" * 32},
        "packages": {"python": "3.11.7", "torch": "2.14.1"},
        "command": "make runs",
        "device": "a processor, 2 threads",
        "wall_seconds": 12.5,
        "peak_memory_mib": 512.0,
        "peak_gpu_memory_mib": None,
        "commit": "0123456789abcdef+",
        "date": "2025-11-30T08:00:00Z",
    }
    return Run(**parts | changes)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATBOOK_RESULTS", str(tmp_path))
    return tmp_path


# Summaries


def test_summary_matches_scipy():
    values = np.random.default_rng(0).normal(3, 2, size=7)
    summary = summarise(values)
    assert summary.mean == pytest.approx(values.mean(), rel=1e-15)
    assert summary.standard_error == pytest.approx(stats.sem(values), rel=1e-14)
    theirs = stats.t.interval(0.9, df=6, loc=values.mean(), scale=stats.sem(values))
    assert summary.interval(0.9) == pytest.approx(theirs, rel=1e-12)
    assert summary.values == tuple(values)


def test_interval_covers_the_mean_as_often_as_it_says():
    draws = np.random.default_rng(1).normal(size=(4000, 5))
    covered = [low <= 0 <= high for low, high in (summarise(row).interval(0.9) for row in draws)]
    error = math.sqrt(0.9 * 0.1 / len(draws))
    assert abs(np.mean(covered) - 0.9) < 4 * error


def test_pairing_sees_what_separate_intervals_hide():
    # Seeds differ by far more than methods do: only the paired interval excludes zero.
    rng = np.random.default_rng(2)
    seeds = rng.normal(scale=10, size=8)
    a, b = seeds + 1 + rng.normal(scale=0.1, size=8), seeds
    assert summarise(a).interval()[0] < summarise(b).interval()[1]
    low, high = paired_difference(a, b).interval()
    assert 0 < low < 1.2
    assert paired_difference(summarise(a), summarise(b)) == paired_difference(a, b)
    theirs = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert (low, high) == pytest.approx(tuple(theirs), rel=1e-9)


def test_one_measurement_has_no_error():
    summary = summarise(torch.tensor([0.5]))
    assert summary.mean == 0.5
    assert math.isnan(summary.standard_error)
    assert str(summary) == "0.5 (n = 1)"
    with pytest.raises(ValueError, match="at least 2 measurements; got 1"):
        summary.interval()


def test_equal_measurements_have_an_interval_of_no_width():
    assert summarise([0.3] * 5).interval() == (0.3, 0.3)


@pytest.mark.parametrize(
    "values", [[], [1.0, math.nan], [math.inf], [[1.0]], ["a"], [True, False], 3.0, None]
)
def test_summarise_refuses(values):
    with pytest.raises(
        ValueError, match=r"values must be a non-empty row of finite numbers|made of"
    ):
        summarise(values)


@pytest.mark.parametrize("level", [0, 1, -0.5, 2, math.nan, "0.9"])
def test_interval_refuses_a_level(level):
    with pytest.raises(ValueError, match="level must"):
        summarise([1.0, 2.0]).interval(level)


def test_paired_difference_refuses_unpaired():
    with pytest.raises(ValueError, match="share their seeds; got 2 and 3"):
        paired_difference([1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="a must be a non-empty row"):
        paired_difference(Summary(1.0, 0.1, 5), [1.0] * 5)


# JSON

words = st.text(string.ascii_letters + "é _", min_size=1, max_size=8)
trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=50),
    lambda inner: st.lists(inner, max_size=30) | st.dictionaries(words, inner, max_size=8),
    max_leaves=60,
)


@settings(deadline=None)
@given(tree=trees)
def test_json_comes_back_as_it_went(tree, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "tree.json"
    try:
        path.write_text(json.dumps(tree))
        "".join(json.dumps(tree, ensure_ascii=False)).encode()
    except UnicodeEncodeError:  # lone surrogates are not text
        return
    write_json(path, tree)
    again = read_json(path)
    assert again == tree
    assert json.dumps(again) == json.dumps(tree)  # 1, 1.0 and True apart; -0.0 kept; order kept


def test_json_lines_are_short_and_one_number_changes_one_line(tmp_path):
    values = {f"layer {i}": [i + j / 7 for j in range(40)] for i in range(5)}
    write_json(tmp_path / "a", values)
    values["layer 3"][20] = 0.5
    write_json(tmp_path / "b", values)
    a, b = ((tmp_path / name).read_text().splitlines() for name in "ab")
    assert max(map(len, a)) <= 101
    assert sum(left != right for left, right in zip(a, b, strict=True)) == 1


def test_json_keeps_nan_and_infinities(tmp_path):
    path = tmp_path / "diverged.json"
    write_json(path, {"loss": [1.0, math.inf, -math.inf, math.nan]})
    json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(word))  # strict JSON
    loss = read_json(path)["loss"]
    assert loss[:3] == [1.0, math.inf, -math.inf]
    assert math.isnan(loss[3])


def test_plain_takes_what_experiments_return():
    value = plain(
        {
            "config": Config(),
            "array": np.arange(3, dtype=np.float32),
            "number": np.float64(0.1),
            "flag": np.bool_(True),
            "tensor": torch.eye(2, requires_grad=True),
            "scalar": torch.tensor(3),
        }
    )
    assert value == {
        "config": {"lr": 0.1, "widths": [8, 16]},
        "array": [0.0, 1.0, 2.0],
        "number": 0.1,
        "flag": True,
        "tensor": [[1.0, 0.0], [0.0, 1.0]],
        "scalar": 3,
    }
    assert type(value["number"]) is float
    assert value["flag"] is True


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": {1: 2}}, r"value\.a must have words .* got 1"),
        ({"$float": "nan"}, "without a leading"),
        ({"a": [0, {1, 2}]}, r"value\.a\[1\] must be made of .* got set"),
        (1j, "got complex"),
        (Config, "got type"),
        (object(), "got object"),
    ],
)
def test_plain_refuses(value, where):
    with pytest.raises(ValueError, match=where):
        plain(value)


def test_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "run.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="got object"):
        write_json(path, {"a": object()})
    with pytest.raises(UnicodeEncodeError):
        write_json(path, {"a": "\ud800"})
    assert read_json(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["run.json"]


# Runs


def test_run_comes_back_equal(folder):
    run = make_run()
    assert run.save() == folder / "optimizers.quick.json"
    again = load_result("optimizers", "quick")
    assert again == run
    assert again.config == {"lr": 0.1, "widths": [8, 16]}
    assert again.seeds == [0, 1, 2, 3, 4]
    assert again.summary("SAM", "accuracy") == summarise([0.9, 0.91, 0.92])


def test_every_part_of_a_run_has_a_kind():
    assert tuple(_KINDS) == tuple(part.name for part in dataclasses.fields(Run))


def test_scales_are_those_of_the_runtime():
    assert runtime.Scale.__args__ == SCALES


def test_largest_scale_is_the_default(folder):
    for scale in ("quick", "gpu", "laptop"):
        make_run(scale=scale).save()
    assert recorded() == {"optimizers": ("quick", "laptop", "gpu")}
    assert load_result("optimizers").scale == "gpu"
    (folder / "optimizers.gpu.json").unlink()
    assert load_result("optimizers").scale == "laptop"


def test_saving_elsewhere(tmp_path):
    path = make_run().save(tmp_path / "new" / "mine.json")
    assert read_json(path)["schema"] == SCHEMA


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "a/b"}, "letters, digits"),
        ({"name": "a.b"}, "letters, digits"),
        ({"name": ""}, "letters, digits"),
        ({"scale": "huge"}, "scale must be one of quick, laptop, gpu; got 'huge'"),
        ({"values": [1, 2]}, "values of a run must be dict"),
        ({"values": {"a": object()}}, r"values\.a must be made of"),
        ({"seeds": [0.5]}, "seeds of a run must be whole numbers"),
        ({"seeds": 5}, "seeds of a run must be list"),
        ({"data": {"mnist": 3}}, r"data\.mnist of a run must be a word"),
        ({"wall_seconds": None}, "wall_seconds of a run must be int or float"),
        ({"wall_seconds": True}, "wall_seconds of a run must be int or float"),
        ({"date": "yesterday"}, "date of a run must be an ISO date"),
    ],
)
def test_run_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        make_run(**changes)


def test_unknown_name_suggests_the_nearest(folder):
    with pytest.raises(
        ResultError, match=r"'optimisers' is recorded in .*; there is nothing yet\."
    ):
        load_result("optimisers")
    make_run().save()
    with pytest.raises(ResultError, match=r"did you mean 'optimizers'\?"):
        load_result("optimisers")
    with pytest.raises(ResultError, match=r"there is optimizers\."):
        load_result("zzz")
    with pytest.raises(ResultError, match=r"recorded at quick, not at gpu; `flatbook run optim"):
        load_result("optimizers", "gpu")
    with pytest.raises(ResultError, match="name of a run must be made of"):
        load_result("../optimizers")
    with pytest.raises(ValueError, match=r"got 'quik'\. Did you mean 'quick'\?"):
        load_result("optimizers", "quik")


def test_missing_folder_is_an_empty_one(monkeypatch, tmp_path):
    monkeypatch.setenv("FLATBOOK_RESULTS", str(tmp_path / "nowhere"))
    with pytest.raises(ResultError, match="nowhere; there is nothing yet"):
        load_result("optimizers")


def damaged(folder, change):
    path = make_run().save()
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("schema"), "it has no schema number"),
        (lambda c: c.update(schema="1"), "it has no schema number"),
        (lambda c: c.update(schema=0), r"older \(schema 0, this one reads 1\); record it anew"),
        (lambda c: c.update(schema=2), r"newer \(schema 2, this one reads 1\); update flatbook"),
        (lambda c: (c.pop("seeds"), c.pop("date")), "lacks seeds, date; record it anew"),
        (lambda c: c.update(extra=1), "parts that no run has, extra"),
        (lambda c: c.update(name="other"), "holds the run 'other' at quick: it was renamed"),
        (lambda c: c.update(scale="gpu"), "holds the run 'optimizers' at gpu: it was renamed"),
        (lambda c: c.update(values=3), "damaged: values of a run must be dict"),
        (lambda c: c.update(wall_seconds="long"), "damaged: wall_seconds"),
    ],
)
def test_damaged_run(folder, change, message):
    damaged(folder, change)
    with pytest.raises(ResultError, match=message):
        load_result("optimizers")


def test_every_truncation_is_noticed(folder):
    path = make_run().save()
    whole = path.read_bytes()
    for length in range(len(whole) - 1):  # the last byte only ends the line
        path.write_bytes(whole[:length])
        with pytest.raises(ResultError, match="not valid JSON, cut off or damaged"):
            load_result("optimizers")


@pytest.mark.parametrize(
    "content",
    [b"", b"null", b"[]", b"\xff\xfe", b'{"schema": NaN}', b'{"a": {"$float": "x"}}', b"[" * 10**5],
    ids=range(7),
)
def test_nonsense_is_refused(folder, content):
    (folder / "optimizers.quick.json").write_bytes(content)
    with pytest.raises(ResultError, match=r"optimizers\.quick\.json is not"):
        load_result("optimizers")


def test_folder_in_place_of_a_file(folder):
    (folder / "optimizers.quick.json").mkdir()
    with pytest.raises(ResultError, match="cannot be read: Is a directory"):
        load_result("optimizers")


def test_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        make_run().save(tmp_path / "file" / "run.json")


def test_summary_says_what_there_is():
    run = make_run()
    with pytest.raises(ResultError, match=r"no 'ASAM' in values; it has SAM, note"):
        run.summary("ASAM", "accuracy")
    with pytest.raises(ResultError, match=r"no 'loss' in values\['SAM'\]; it has accuracy"):
        run.summary("SAM", "loss")
    with pytest.raises(ResultError, match=r"no 'x' in values\['note'\]; it has 'none'"):
        run.summary("note", "x")
    with pytest.raises(ResultError, match=r"SAM is not a mean"):
        run.summary("SAM")


@pytest.mark.parametrize(
    "nonsense",
    [
        {"mean": "x"},
        {"mean": None},
        {"mean": True},
        {"standard_error": [0.1]},
        {"standard_error": -0.1},
        {"n": 2.0},
        {"n": 0},
        {"values": 3},
        {"values": [0.1]},
        {"values": [0.1, "b"]},
    ],
)
def test_a_summary_of_nonsense_is_none(nonsense):
    sound = {"mean": 0.5, "standard_error": 0.1, "n": 2, "values": [0.4, 0.6]}
    assert make_run(values={"a": sound}).summary("a").n == 2
    with pytest.raises(ResultError, match="a is not a mean with its error"):
        make_run(values={"a": sound | nonsense}).summary("a")


def test_provenance_says_all():
    text = make_run(commit="a" * 40, peak_gpu_memory_mib=2048.0, wall_seconds=7300).provenance()
    for part in (
        "30 November 2025",
        "by `make runs`:",
        "5 seeds",
        "fashion-mnist (SHA-256 abababababab…)",
        "python 3.11.7",
        "torch 2.14.1",
        "a processor, 2 threads",
        "2.0 h and 512 MiB of memory and 2.0 GiB of GPU memory",
        "commit `aaaaaaaaaa`",
    ):
        assert part in text
    assert "uncommitted" not in text
    assert "`0123456789` with uncommitted changes" in make_run().provenance()
    assert "outside version control" in make_run(commit=None).provenance()


# Where records lie


def test_results_folder_is_the_nearest_above(tmp_path, monkeypatch):
    monkeypatch.delenv("FLATBOOK_RESULTS", raising=False)
    (tmp_path / "book" / "_results").mkdir(parents=True)
    (tmp_path / "book" / "flatness").mkdir()
    monkeypatch.chdir(tmp_path / "book" / "flatness")
    assert results_folder() == tmp_path / "book" / "_results"
    monkeypatch.setenv("FLATBOOK_RESULTS", "~/records")
    assert results_folder() == (tmp_path / "x").home() / "records"


def test_results_folder_of_the_checkout_or_an_error(tmp_path, monkeypatch):
    from flatbook import results

    monkeypatch.delenv("FLATBOOK_RESULTS", raising=False)
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "site" / "flatbook" / "results.py"
    monkeypatch.setattr(results, "__file__", str(package))
    with pytest.raises(ResultError, match="name a folder in FLATBOOK_RESULTS"):
        results_folder()
    (tmp_path / "site" / "book").mkdir(parents=True)
    (tmp_path / "site" / "pyproject.toml").write_text("")
    assert results_folder() == tmp_path / "site" / "book" / "_results"


# Recording


def test_record_measures():
    held = []
    with record("coin", "quick", Config(), seeds=[3], data={"none": "0"}) as recording:
        before = provenance.peak_memory_mib()
        held.append(np.ones((2**20 * 64) // 8))  # 64 MiB
        recording.values = {"x": 1}
    run = recording.run
    assert (run.name, run.scale, run.seeds, run.data) == ("coin", "quick", [3], {"none": "0"})
    assert run.peak_memory_mib >= before > 10
    assert 0 < run.wall_seconds < 60
    assert run.packages["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert run.device == provenance.machine()
    assert run.command == "flatbook run coin --scale quick"
    assert run.date.endswith("Z")


def test_memory_of_a_child_process_counts():
    # In a process of its own, which is small: this one may have been larger than the child.
    child = "x = bytearray(200 * 2**20)"
    code = f"""
import subprocess, sys
from flatbook.provenance import peak_memory_mib
before = peak_memory_mib()
subprocess.run([sys.executable, "-c", {child!r}], check=True)
print(before < 150 and 200 < peak_memory_mib() < 300)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


def test_record_without_values_or_with_an_error():
    with (
        pytest.raises(ResultError, match="must set the recording's values"),
        record("coin", "quick", {}),
    ):
        pass
    with pytest.raises(RuntimeError, match="mine"), record("coin", "quick", {}) as recording:
        raise RuntimeError("mine")
    assert recording.run is None
    with (
        pytest.raises(ValueError, match="scale must be one of"),
        record("coin", "huge", {}),
    ):
        pytest.fail("the block must not run")


def git(folder, *command):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *identity, *command], cwd=folder, check=True, capture_output=True)


def test_commit_of_the_package(tmp_path, monkeypatch):
    package = tmp_path / "flatbook"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(provenance, "__file__", str(package / "provenance.py"))
    assert provenance.commit() is None
    git(tmp_path, "init", "-q")
    assert provenance.commit() is None  # in a repository, but not of it
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    clean = provenance.commit()
    assert len(clean) == 40
    (tmp_path / "README.md").write_text("elsewhere")
    assert provenance.commit() == clean
    (package / "new.py").write_text("")
    assert provenance.commit() == clean + "+"


def test_machine_in_words():
    assert f"{torch.get_num_threads()} thread" in provenance.machine()
    assert "3 × 1 thread" in provenance.machine(workers=3)
