"""Ensembles against models trained one by one, and against kills, foreign folders and bad input."""

import importlib
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flatbook import crews, data, ensembles
from flatbook.checkpoints import CheckpointError
from flatbook.ensembles import balanced_design, subset_design, train_ensemble
from flatbook.members import Plan, train_member
from flatbook.models import build
from flatbook.training import DivergenceError, TrainConfig, fit
from flatbook.vectorised import obstacle

POINTS = 60
CONFIG = TrainConfig(epochs=2, batch_size=16, lr=0.05, seed=7)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("FLATBOOK_DEVICE", "cpu")


@pytest.fixture(scope="module")
def digits():
    return data.load("digits").train


@pytest.fixture
def x(digits):
    return digits.x[:POINTS]


@pytest.fixture
def y(digits):
    return digits.y[:POINTS]


def mlp(seed):
    return build("mlp", num_classes=10, in_channels=1, width=16, seed=seed)


def cnn(seed):
    return build("small-cnn", num_classes=10, in_channels=1, width=4, seed=seed)


def ragged(models, points, seed=0):
    """Draw training sets of very different sizes, one of all points and one of a single one."""
    shares = np.linspace(0, 1, models)[:, None]
    design = np.random.default_rng(seed).random((models, points)) < shares
    design[:, 3] = True
    return design


# Designs


@given(st.integers(1, 20), st.integers(1, 40), st.integers(0, 2**40))
def test_each_point_is_in_half_of_the_models(half, points, seed):
    design = balanced_design(2 * half, points, seed=seed)
    assert design.dtype == bool
    assert design.shape == (2 * half, points)
    assert (design.sum(axis=0) == half).all()
    assert np.array_equal(design, balanced_design(2 * half, points, seed=seed))


@given(st.integers(1, 20), st.integers(1, 40), st.floats(0.05, 1), st.integers(0, 2**40))
def test_each_model_has_its_share_of_the_points(models, points, share, seed):
    size = round(share * points)
    if size:
        design = subset_design(models, points, share, seed=seed)
        assert design.dtype == bool
        assert design.shape == (models, points)
        assert (design.sum(axis=1) == size).all()


def test_designs_are_uniform():
    # 20,000 draws of 2 of 4: each of the 6 pairs about as often, and no two points in step
    for columns in (balanced_design(4, 20_000).T, subset_design(20_000, 4, 0.5)):
        pairs = np.bincount(columns @ [8, 4, 2, 1], minlength=16)[[3, 5, 6, 9, 10, 12]]
        assert pairs.sum() == 20_000
        assert (((pairs - 20_000 / 6) ** 2) / (20_000 / 6)).sum() < 20.5  # χ² of 5, 1 in 1000
    assert len(np.unique(balanced_design(40, 50), axis=1).T) == 50
    assert (balanced_design(40, 50) != balanced_design(40, 50, seed=1)).any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: balanced_design(3, 4), "num_models must be even.*got 3"),
        (lambda: balanced_design(0, 4), "num_models must be a whole number of at least 2; got 0"),
        (lambda: balanced_design(2, 0), "num_points must be a whole number of at least 1"),
        (lambda: balanced_design(2, 4, seed=-1), "seed must be a whole number of at least 0"),
        (lambda: subset_design(0, 4, 0.5), "num_models must be a whole number of at least 1"),
        (lambda: subset_design(2, 4, 1.5), r"fraction must be a number in \[0, 1\]; got 1\.5"),
        (lambda: subset_design(2, 4, 0.1), "fraction must leave each model a point; got 0.1 of 4"),
    ],
)
def test_impossible_designs_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Against models trained by hand


@pytest.mark.parametrize("make", [mlp, cnn])
def test_members_are_trained_by_fit_on_their_points(make, x, y):
    design = ragged(4, POINTS)
    config = replace(CONFIG, optimizer="sam", augment="crop-flip", batch_size=50)
    got = train_ensemble(make, x, y, design, config, eval_x=x[:7].flip(3), backend="loop")
    assert got.backend == "loop"
    assert got.epochs == (2,) * 4
    assert len(set(got.seeds)) == 4
    assert torch.equal(got.design, torch.from_numpy(design))
    assert got.logits.dtype == torch.float32
    for member, (seed, row) in enumerate(zip(got.seeds, torch.from_numpy(design), strict=True)):
        model = make(seed)
        fit(model, x[row], y[row], replace(config, seed=seed))
        with torch.no_grad():
            assert torch.equal(got.logits[member], model(x))
            assert torch.equal(got.eval_logits[member], model(x[:7].flip(3)))


def test_arrays_do_as_well_as_tensors(x, y):
    design = balanced_design(2, POINTS)
    one = train_ensemble(mlp, x, y, torch.from_numpy(design), CONFIG)
    x = x.numpy().copy()
    x.flags.writeable = False
    other = train_ensemble(mlp, x, y.numpy(), design.astype(int), CONFIG, eval_x=x[:0:-1])
    assert torch.equal(one.logits, other.logits)
    assert one.eval_logits is None
    assert other.eval_logits.shape == (2, POINTS - 1, 10)


def test_members_know_the_points_they_saw(x, y):
    """With random labels nothing but membership can make a model right."""
    labels = torch.randint(10, (POINTS,), generator=torch.Generator().manual_seed(0))
    design = balanced_design(4, POINTS)
    config = TrainConfig(epochs=120, batch_size=15, lr=0.02, weight_decay=0)

    def wide(seed):
        return build("mlp", num_classes=10, in_channels=1, width=64, seed=seed)

    got = train_ensemble(wide, x, labels, design, config, backend="vmap")
    right = got.logits.argmax(2) == labels
    assert right[got.design].float().mean() == 1
    assert right[~got.design].float().mean() < 0.25


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"momentum": 0.0, "weight_decay": 0.1},
        {"label_smoothing": 0.2, "warmup": 0.7, "schedule": "constant"},
        {"batch_size": 1000},
    ],
)
def test_training_at_once_is_training_one_by_one(x, y, change):
    """Sets of 1 to 60 points: from 1 to 8 steps an epoch, and last batches of any size."""
    design = ragged(6, POINTS)
    config = (
        replace(CONFIG, epochs=3, batch_size=8, **change)
        if "batch_size" not in change
        else (replace(CONFIG, **change))
    )
    each, once = (
        train_ensemble(
            lambda seed: mlp(seed).double(), x, y, design, config, eval_x=x[:3], backend=backend
        )
        for backend in ("loop", "vmap")
    )
    # In float64 rounding does not grow to what float32 shows.
    torch.testing.assert_close(each.logits, once.logits, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(each.eval_logits, once.eval_logits, rtol=1e-6, atol=1e-6)
    assert each.seeds == once.seeds


def test_frozen_weights_stay_when_trained_at_once(x, y):
    def make(seed):
        model = cnn(seed)
        model.body.requires_grad_(False)
        return model

    each, once = (
        train_ensemble(make, x, y, balanced_design(2, POINTS), CONFIG, backend=backend)
        for backend in ("loop", "vmap")
    )
    torch.testing.assert_close(each.logits, once.logits, rtol=1e-4, atol=1e-4)


# Processes


def test_processes_change_no_bit(x, y):
    design = balanced_design(4, POINTS)
    options = {"eval_x": x[:5], "augment": "flip", "backend": "joblib"}
    threads = torch.get_num_threads()
    here, apart = (
        train_ensemble(lambda seed: cnn(seed), x, y, design, CONFIG, workers=workers, **options)
        for workers in (1, 2)
    )
    assert torch.equal(here.logits, apart.logits)
    assert torch.equal(here.eval_logits, apart.eval_logits)
    loop = train_ensemble(cnn, x, y, design, CONFIG, **options | {"backend": "loop"})
    torch.testing.assert_close(loop.logits, here.logits, rtol=1e-3, atol=1e-3)
    assert torch.get_num_threads() == threads

    own = os.getpid()

    def deadly(seed):
        if os.getpid() != own:
            os._exit(1)
        return cnn(seed)

    with pytest.raises(RuntimeError, match=r"A worker process died.*with fewer workers"):
        train_ensemble(deadly, x, y, design, CONFIG, workers=2, **options)


SCRIPT = """
import os, sys, time
from pathlib import Path
from flatbook import data
from flatbook.ensembles import balanced_design, train_ensemble
from flatbook.models import build
from flatbook.training import TrainConfig

log = Path(sys.argv[-1] if __name__ == "__main__" else os.environ["ENSEMBLE_LOG"])

def make(seed, log=log, wait=__name__ == "__main__"):
    import os, time
    with log.open("a") as file:
        file.write(f"{seed} {os.getpid()}\\n")
    time.sleep(1.0 * wait)
    return build("small-cnn", num_classes=10, in_channels=1, width=4, seed=seed)

def train(out, workers):
    points = data.load("digits").train
    config = TrainConfig(epochs=2, batch_size=16, lr=0.05)
    return train_ensemble(make, points.x[:40], points.y[:40], balanced_design(6, 40), config,
        backend="joblib", workers=workers, out=out, progress=False)

if __name__ == "__main__":
    train(Path(sys.argv[-2]), 2)
"""


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_a_killed_run_carries_on(tmp_path, monkeypatch):
    script, out, log = tmp_path / "killed_ensemble.py", tmp_path / "out", tmp_path / "log"
    script.write_text(SCRIPT)
    process = subprocess.Popen([sys.executable, script, out, log], stderr=subprocess.PIPE)
    with process, process.stderr:
        deadline = time.monotonic() + 60
        while not any(out.glob("member-*.pt")):
            assert process.poll() is None, process.stderr.read().decode()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
    pids = {int(line.split()[1]) for line in log.read_text().splitlines()}
    assert len(pids) == 3  # two workers, besides the one that looks at the first model
    deadline = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))  # no worker outlives its parent
    finished = {int(path.stem[-5:]) for path in out.glob("member-*.pt")}
    assert 1 <= len(finished) < 6

    log.unlink()
    monkeypatch.setenv("ENSEMBLE_LOG", str(log))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("killed_ensemble")
    resumed = module.train(out, 1)
    made = [int(line.split()[0]) for line in log.read_text().splitlines()]
    missing = [resumed.seeds[member] for member in range(6) if member not in finished]
    assert made == [resumed.seeds[0], *missing]
    assert torch.equal(resumed.logits, module.train(None, 1).logits)


def test_members_read_large_data_from_files_mapped_into_memory(tmp_path, x, y):
    """Such arrays, which cannot be written to, are what joblib hands to its processes."""
    path = tmp_path / "x.npy"
    np.save(path, x.numpy())
    given = {"y": y.numpy(), "design": balanced_design(2, POINTS), "seeds": (5, 6)}
    given |= {"config": CONFIG, "device": "cpu", "queries": "flip"}
    mapped = Plan(cnn, np.load(path, mmap_mode="r"), **given)
    plain = Plan(cnn, x.numpy(), **given)
    assert not mapped.x.flags.writeable
    np.testing.assert_array_equal(train_member(mapped, 1).logits, train_member(plain, 1).logits)


def test_half_precision_is_taken(x, y):
    design = balanced_design(2, POINTS)
    half = train_ensemble(mlp, x.bfloat16(), y, design, CONFIG)  # exact, for these are sixteenths
    assert torch.equal(half.logits, train_ensemble(mlp, x, y, design, CONFIG).logits)


# A folder that keeps what is finished


def counted(make):
    """Return ``make`` and a list of the seeds it is called with."""
    seeds = []

    def counting(seed):
        seeds.append(seed)
        return make(seed)

    return counting, seeds


@pytest.mark.parametrize("backend", ["loop", "joblib", "vmap"])
def test_only_what_is_missing_is_trained(tmp_path, x, y, backend, monkeypatch):
    monkeypatch.setattr(crews, "_AT_ONCE", 2)
    make, seeds = counted(mlp)
    design = balanced_design(6, POINTS)
    options = {"backend": backend, "workers": 1, "eval_x": x[:4]}
    plain = train_ensemble(make, x, y, design, CONFIG, **options)
    first = train_ensemble(make, x, y, design, CONFIG, out=tmp_path, **options)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"member-{member:05d}.pt" for member in range(6)]
    for member in (1, 4):
        (tmp_path / names[member]).unlink()
    seeds.clear()
    again = train_ensemble(make, x, y, design, CONFIG, out=tmp_path, **options)
    at_once = {"vmap": (0, 1, 4, 5)}.get(backend, (1, 4))
    assert seeds == [first.seeds[member] for member in (0, *at_once)]
    seeds.clear()
    whole = train_ensemble(make, x, y, design, CONFIG, out=tmp_path, **options)
    assert seeds == [first.seeds[0]]  # which tells whether the folder is that of this ensemble
    for got in (first, again, whole):
        assert torch.equal(got.logits, plain.logits)
        assert torch.equal(got.eval_logits, plain.eval_logits)
        assert got.epochs == plain.epochs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": replace(CONFIG, lr=0.1)}, r"a run with lr=0\.05, not 0\.1; give a different"),
        ({"config": replace(CONFIG, seed=8)}, "a run with seed=7, not 8"),
        ({"design": balanced_design(4, POINTS, seed=1)}, "a run with another design"),
        ({"make_model": cnn}, "a run with another model"),
        ({"make_model": lambda seed: mlp(seed + 1)}, "a run with another initial weights"),
        ({"backend": "vmap"}, "a run with backend='loop', not 'vmap'"),
        ({"augment": "flip"}, "a run with augment of queries=None, not 'flip'"),
        ({"eval_x": np.zeros((1, 1, 8, 8), np.float32)}, "a run with another data"),
    ],
)
def test_another_ensemble_is_refused(tmp_path, x, y, change, message):
    given = {"make_model": mlp, "design": balanced_design(4, POINTS), "config": CONFIG}
    given |= {"x": x, "y": y, "backend": "loop", "out": tmp_path}
    train_ensemble(**given)
    (tmp_path / "member-00000.pt").unlink()  # any of those left will tell
    with pytest.raises(CheckpointError, match=message):
        train_ensemble(**given | change)


def test_another_activation_is_refused(tmp_path, x, y):
    def make(activation):
        return lambda seed: nn.Sequential(
            nn.Flatten(), nn.Linear(64, 8), activation(), nn.Linear(8, 10)
        )

    design = balanced_design(2, POINTS)
    train_ensemble(make(nn.ReLU), x, y, design, CONFIG, out=tmp_path)
    with pytest.raises(CheckpointError, match="a run with another layers"):
        train_ensemble(make(nn.Tanh), x, y, design, CONFIG, out=tmp_path)


def test_damaged_files_are_refused(tmp_path, x, y):
    design = balanced_design(2, POINTS)
    train_ensemble(mlp, x, y, design, CONFIG, out=tmp_path)
    path = tmp_path / "member-00001.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"member-00001\.pt is damaged"):
        train_ensemble(mlp, x, y, design, CONFIG, out=tmp_path)


# Seeds


def test_a_model_that_ignores_its_seed_is_seeded_all_the_same(x, y):
    def make(seed):  # lazy, too: its weights are drawn with the first input
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(10))

    before = torch.get_rng_state()
    once, again, vectorised = (
        train_ensemble(make, x, y, balanced_design(2, POINTS), CONFIG, backend=backend)
        for backend in ("loop", "loop", "vmap")
    )
    assert torch.equal(once.logits, again.logits)
    assert not torch.equal(once.logits[0], once.logits[1])
    torch.testing.assert_close(once.logits, vectorised.logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(before, torch.get_rng_state())


# Queries


def test_views_are_asked_about(x, y):
    design = balanced_design(2, POINTS)

    def several(inputs):
        return torch.stack((inputs, inputs.flip(3), 0 * inputs), dim=1)

    plain, flip, function, functions = (
        train_ensemble(cnn, x, y, design, CONFIG, eval_x=x[:4], augment=augment, backend="loop")
        for augment in (None, "flip", several, [torch.clone, lambda v: v.flip(3)])
    )
    assert flip.logits.shape == (2, POINTS, 2, 10)
    assert flip.eval_logits.shape == (2, 4, 2, 10)
    assert function.logits.shape == (2, POINTS, 3, 10)
    assert torch.equal(flip.logits, functions.logits)
    torch.testing.assert_close(flip.logits, function.logits[:, :, :2])
    torch.testing.assert_close(flip.logits[:, :, 0], plain.logits)
    torch.testing.assert_close(flip.eval_logits, flip.logits[:, :4])
    assert (flip.logits[:, :, 0] - flip.logits[:, :, 1]).abs().max() > 0.01
    assert (function.logits[:, :, 2] == function.logits[:, :1, 2]).all()


def test_random_views_are_the_same_for_all_models(x, y):
    seen = []

    def noisy(inputs):
        seen.append(inputs + torch.rand(inputs.shape))
        return seen[-1][:, None]

    train_ensemble(mlp, x, y, balanced_design(2, POINTS), CONFIG, augment=noisy, backend="loop")
    first, second = (views for views in seen if len(views) == POINTS)
    assert torch.equal(first, second)


# What is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"make_model": mlp(0)}, "make_model must be a function of a seed .*; got Classifier"),
        ({"make_model": 3}, "make_model must be a function of a seed .*; got int"),
        ({"make_model": lambda seed: seed}, r"make_model\(seed\) must be a torch module; got int"),
        ({"make_model": lambda seed: nn.Linear(64, 10)}, "64"),
        ({"x": torch.zeros(0, 64)}, "x must not be empty"),
        ({"x": torch.zeros(POINTS, 1, 8, 8) / 0}, "x must be finite"),
        ({"x": torch.zeros(POINTS, 1, 8, 8, dtype=torch.uint8)}, "x must hold floating-point"),
        ({"y": torch.zeros(3, dtype=torch.long)}, r"y must have shape \(60\); got \(3,\)"),
        ({"y": torch.full((POINTS,), 10)}, r"y must lie in 0\.\.9, one label per sample; got 10"),
        ({"design": np.ones((2, 5), bool)}, r"design must have shape \(models, 60\); got \(2, 5\)"),
        ({"design": np.full((2, POINTS), 2)}, "design must hold True and False"),
        ({"design": np.arange(3)[:, None] != np.ones(POINTS)}, "a point to train on; model 1 has"),
        ({"config": {"epochs": 1}}, "config must be a TrainConfig; got dict"),
        ({"eval_x": torch.zeros(2, 1, 9, 9)}, r"eval_x must hold inputs like x, \(1, 8, 8\) each"),
        ({"backend": "jobib"}, r"backend must be one of auto.*Did you mean 'joblib'\?"),
        ({"backend": "dask"}, "cluster must be the address of a Dask scheduler.*got None"),
        ({"backend": "loop", "cluster": "tcp://x"}, 'cluster is for backend="dask"; got backend='),
        ({"workers": 0}, "workers must be a whole number of at least 1; got 0"),
        ({"augment": "mirror"}, "augment must be one of flip; got 'mirror'"),
        ({"augment": 3}, "augment must be 'flip', a function of inputs, or a sequence"),
        ({"augment": []}, "augment must be 'flip', a function of inputs, or a sequence"),
        ({"augment": lambda v: v}, r"augment must return views of shape \(points, queries, 1, 8"),
        ({"augment": [lambda v: v[:, 0]]}, r"must return views of shape \(points, 1, 8, 8\); got"),
        ({"augment": "flip", "x": torch.zeros(POINTS, 64)}, "needs images, four axes"),
    ],
)
def test_bad_input_is_refused(x, y, change, message):
    given = {"make_model": mlp, "x": x, "y": y, "design": balanced_design(2, POINTS)}
    given |= {"config": CONFIG} | change
    with pytest.raises(ValueError, match=message):
        train_ensemble(**given)


@pytest.mark.parametrize(
    ("change", "layers", "said"),
    [
        ({"optimizer": "sam"}, [], "optimizer='sam'"),
        ({"precision": "bfloat16"}, [], "precision='bfloat16'"),
        ({"augment": "crop-flip"}, [], "augment='crop-flip'"),
        ({"stop_at_interpolation": True}, [], "stop_at_interpolation=True"),
        ({}, [nn.BatchNorm1d(64)], "a layer BatchNorm1d"),
        ({}, [nn.Dropout()], "a layer Dropout"),
    ],
)
def test_what_cannot_be_trained_at_once_is_refused(x, y, change, layers, said):
    def make(seed):
        return nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, 10))

    config = replace(CONFIG, **change)
    assert obstacle(make(0), config) == said
    with pytest.raises(ValueError, match=f'backend="vmap" cannot train .* with {said}'):
        train_ensemble(make, x, y, balanced_design(2, POINTS), config, backend="vmap")
    got = train_ensemble(make, x, y, balanced_design(2, POINTS), config)
    assert got.backend == "loop"


@pytest.mark.parametrize("backend", ["loop", "joblib", "vmap"])
def test_divergence_is_told_with_its_model(x, y, backend):
    config = replace(CONFIG, lr=1e30)
    with pytest.raises(DivergenceError, match="not finite in epoch 1") as caught:
        train_ensemble(mlp, x, y, balanced_design(2, POINTS), config, backend=backend, workers=1)
    sent = pickle.loads(pickle.dumps(caught.value))  # as from one process to another
    assert sent.__notes__[0].startswith(("This was member 0", "This was model 0"))


# What is fastest


def test_auto_chooses(x, y):
    def chosen(make, config=CONFIG, workers=2, models=16):
        plan, model, _ = ensembles._planned(
            make, x, y, balanced_design(models, POINTS), config, None, None
        )
        return ensembles._chosen("auto", None, model, plan, workers)

    long = replace(CONFIG, epochs=2000)
    assert chosen(mlp) == chosen(mlp, long) == "vmap"
    assert chosen(cnn) == chosen(cnn, long, workers=1) == "loop"
    assert chosen(cnn, long) == "joblib"
    assert chosen(mlp, replace(CONFIG, optimizer="sam")) == "loop"
    wide = build("mlp", num_classes=10, in_channels=1, width=512)
    assert chosen(lambda seed: wide, long) == "joblib"


def test_progress_counts_epochs(x, y, capsys):
    for backend in ("loop", "vmap"):
        train_ensemble(
            mlp, x, y, balanced_design(2, POINTS), CONFIG, backend=backend, progress=True
        )
        shown = capsys.readouterr().err
        assert f"2 models ({backend}): 100%" in shown
        assert "4/4" in shown


# A cluster


def test_without_dask_the_way_to_it_is_told(x, y, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ImportError, match=r'pip install "flatbook\[cluster\]"'):
        train_ensemble(mlp, x, y, balanced_design(2, POINTS), CONFIG, cluster="tcp://127.0.0.1:1")


@pytest.mark.filterwarnings("ignore")  # Dask's own
def test_a_cluster_that_loses_a_worker_gives_the_same_logits(tmp_path, x, y):
    distributed = pytest.importorskip("distributed")
    log = tmp_path / "log"
    own = os.getpid()

    def make(seed):
        import time

        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        if os.getpid() != own:
            time.sleep(0.3)
            if len(set(log.read_text().split())) == 3 and not (tmp_path / "killed").exists():
                (tmp_path / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return build("small-cnn", num_classes=10, in_channels=1, width=4, seed=seed)

    design = balanced_design(6, POINTS)
    expected = train_ensemble(make, x, y, design, CONFIG, backend="joblib", workers=1)
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None
    ) as cluster:
        got = train_ensemble(
            make, x, y, design, CONFIG, cluster=cluster.scheduler_address, out=tmp_path / "out"
        )
    assert got.backend == "dask"
    assert (tmp_path / "killed").exists()
    assert torch.equal(got.logits, expected.logits)
    # All is finished, so nothing is asked of a cluster that is gone.
    again = train_ensemble(
        make, x, y, design, CONFIG, cluster="tcp://127.0.0.1:1", out=tmp_path / "out"
    )
    assert torch.equal(again.logits, expected.logits)


@pytest.mark.filterwarnings("ignore")  # Dask's own
def test_a_cluster_that_loses_all_its_workers_is_given_the_data_anew(tmp_path, x, y):
    distributed = pytest.importorskip("distributed")
    import dask

    own = os.getpid()

    def make(seed):
        if os.getpid() != own and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return mlp(seed)

    design = balanced_design(4, POINTS)
    patience = dask.config.set({"distributed.deploy.lost-worker-timeout": "10 minutes"})
    with (
        patience,  # a busy machine takes longer to start the worker again than Dask waits for it
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=1, dashboard_address=None
        ) as cluster,
    ):
        got = train_ensemble(make, x, y, design, CONFIG, cluster=cluster)
    assert (tmp_path / "killed").exists()
    expected = train_ensemble(mlp, x, y, design, CONFIG, backend="joblib", workers=1)
    assert torch.equal(got.logits, expected.logits)


@pytest.mark.filterwarnings("ignore")  # Dask's own
@pytest.mark.parametrize(
    ("cluster", "kind", "message"),
    [
        ("tcp://127.0.0.1:1", OSError, r"^no Dask scheduler answers at tcp://127\.0\.0\.1:1\.$"),
        ("", ValueError, "^cluster must be the address of a Dask scheduler, such as .*; got ''"),
        (
            "http://10.0.0.1:80",
            ValueError,
            "^cluster must be the address.*; got 'http://10.0.0.1:8",
        ),
    ],
)
def test_a_cluster_that_is_not_there_is_refused(x, y, monkeypatch, cluster, kind, message):
    pytest.importorskip("distributed")
    monkeypatch.setattr(crews, "_PATIENCE", 1)
    with pytest.raises(kind, match=message):
        train_ensemble(mlp, x, y, balanced_design(2, POINTS), CONFIG, cluster=cluster)
