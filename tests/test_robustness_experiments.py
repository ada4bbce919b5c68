"""The recorded experiments on robustness: their summaries against plain loops, and tiny runs."""

import dataclasses
import math
import statistics

import pytest
import torch
from torch.nn.functional import cross_entropy

from flatbook import experiments
from flatbook.adversarial import Walk, detect, pgd
from flatbook.experiments import adversarial_training, execute, robustness
from flatbook.experiments.adversarial_training import Adversary, basin
from flatbook.experiments.robustness import OFFSETS, Network, aligned, along, quantiles
from flatbook.models import build
from flatbook.runtime import generator
from flatbook.sharpness import hessian_trace

pytestmark = pytest.mark.usefixtures("one_thread")


def rand(*shape, seed=0):
    return torch.rand(shape, generator=generator(seed), dtype=torch.float64)


def plain_quantiles(values, points=(0.25, 0.5, 0.75)):
    """Interpolate between neighbours in order."""
    ordered, found = sorted(values), []
    for point in points:
        place = point * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        found.append(ordered[low] + (place - low) * (ordered[high] - ordered[low]))
    return pytest.approx(found, rel=1e-4)


def test_quantiles_interpolate():
    values = 1e-30 * rand(17)
    assert quantiles(values, robustness.SPREAD) == plain_quantiles(
        values.tolist(), (0.05, 0.25, 0.5, 0.75, 0.95)
    )
    assert quantiles(torch.tensor([3]), (0.25, 0.5)) == [3.0, 3.0]
    assert quantiles(values[:0], (0.5,)) is None
    assert quantiles(torch.tensor([1 / 3]).float(), (0.5,)) == [0.33333]


def test_gather_turns_runs_into_lists():
    runs = [{"a": 1, "b": [2]}, {"a": 3, "b": None}]
    assert robustness.gather(runs) == {"a": [1, 3], "b": [[2], None]}


def test_aligned_curves_are_those_of_a_plain_loop():
    values = rand(9, 40)
    flipped = torch.randint(-1, 9, (40,), generator=generator(1))
    for fewest in (1, 4, 20):
        found = aligned(values, flipped, fewest=fewest)
        assert len(found) == len(OFFSETS)
        for offset, row in zip(OFFSETS, found, strict=True):
            chosen = [
                values[flip + offset, i].item()
                for i, flip in enumerate(flipped.tolist())
                if flip >= 0 and 0 <= flip + offset < 9
            ]
            if len(chosen) < fewest:
                assert row is None
            else:
                assert row == plain_quantiles(chosen)
        assert any(row is not None for row in found)


def walked(samples, steps=12, seed=0):
    """Return a walk whose inputs go wrong, come back, start out wrong or never leave."""
    predicted = (rand(steps, samples, seed=seed + 2) < 0.12).cumsum(dim=0) % 3
    y = (rand(samples, seed=seed + 3) < 0.2).long()
    return Walk(
        loss=rand(steps, samples, seed=seed),
        sharpness=rand(steps, samples, seed=seed + 1).exp(),
        doubt=rand(steps, samples, seed=seed + 4) / 2,
        predicted=predicted,
        right=predicted == y,
    )


def test_a_walk_is_summed_up_as_by_a_plain_loop():
    seen = walked(200)
    found = along(seen)
    rows = []
    for i in range(200):
        if not seen.right[0, i]:
            continue
        sharpness = seen.sharpness[:, i].tolist()
        wrong = [t for t in range(12) if not seen.right[t, i]]
        rows.append(
            {
                "flip": wrong[0] if wrong else None,
                "peak": sharpness.index(max(sharpness)),
                "sharpness": sharpness,
                "doubt": seen.doubt[:, i].tolist(),
                "loss": seen.loss[:, i].tolist(),
            }
        )
    gone = [row for row in rows if row["flip"] is not None]
    assert 30 < len(gone) < len(rows) < 200  # every case occurs
    assert found["right"] == len(rows)
    # Named for the end, it counts whatever was ever wrong.
    assert found["wrong_at_end"] == pytest.approx(len(gone) / len(rows))
    assert found["flip_step"] == plain_quantiles([row["flip"] for row in gone])

    def share(truth):
        return pytest.approx(statistics.mean(map(bool, truth)))

    def ratios(above, below):
        return plain_quantiles([above(row["sharpness"]) / below(row["sharpness"]) for row in gone])

    def first(curve):
        return curve[0]

    def last(curve):
        return curve[-1]

    assert found["peak_at_boundary"] == share(
        row["peak"] in (row["flip"], row["flip"] - 1) for row in gone
    )
    assert found["peak_before_end"] == share(row["peak"] < 11 for row in gone)
    assert found["peak_over_start"] == ratios(max, first)
    assert found["end_over_peak"] == ratios(last, max)
    assert found["end_over_start"] == ratios(last, first)
    assert found["end_flatter_than_start"] == share(
        row["sharpness"][-1] < row["sharpness"][0] for row in gone
    )
    assert found["start_sharpness"] == plain_quantiles([row["sharpness"][0] for row in gone])
    assert found["start_doubt"] == plain_quantiles([row["doubt"][0] for row in gone])
    assert found["end_doubt"] == plain_quantiles([row["doubt"][-1] for row in gone])
    for name in ("loss", "sharpness", "doubt"):
        for t in range(12):
            assert found["by_step"][name][t] == plain_quantiles([row[name][t] for row in rows])
    accuracy = [seen.right[t].double().mean().item() for t in range(12)]
    assert found["by_step"]["accuracy"] == pytest.approx(accuracy)
    for name in ("sharpness", "doubt"):
        for offset, got in zip(OFFSETS, found["by_offset"][name], strict=True):
            chosen = [
                row[name][row["flip"] + offset] for row in gone if 0 <= row["flip"] + offset < 12
            ]
            assert got == (plain_quantiles(chosen) if len(chosen) >= 20 else None)
    assert list(found["detection"]) == ["1", "2", "3", "5", "10", "flip"]
    clean = torch.tensor([row["sharpness"][0] for row in rows])
    for stop, got in found["detection"].items():
        moved = [
            row["sharpness"][
                (11 if row["flip"] is None else row["flip"]) if stop == "flip" else int(stop)
            ]
            for row in rows
        ]
        expected = detect(clean.double(), torch.tensor(moved).double())
        assert got == {"accuracies": list(expected.accuracies), "auc": expected.auc}


@pytest.mark.parametrize("samples", [1, 3])
def test_few_or_no_right_answers_are_no_failure(samples):
    seen = walked(samples)
    for right in (seen.right, torch.zeros_like(seen.right), torch.ones_like(seen.right)):
        found = along(dataclasses.replace(seen, right=right))
        assert found["detection"]["1"] is None
        assert found["right"] == right[0].sum()
    assert found["flip_step"] is None
    assert found["wrong_at_end"] == 0


# Adversarial training


def fashion_network():
    model = build("small-cnn", num_classes=3, in_channels=1, width=4, seed=1).eval().double()
    with torch.no_grad():
        model.head.weight.mul_(8)
    x = rand(30, 1, 8, 8)
    y = model(x).argmax(dim=1)
    y[:4] = (y[:4] + 1) % 3
    return model, x, y


def test_a_basin_is_measured_as_by_a_plain_loop():
    model, x, y = fashion_network()
    found = basin(model, x, y)
    path = pgd(model, x, y, norm="l2", epsilon=0.5, step_size=0.01, steps=50, record=True).path
    widths, flips, traces = [], [], []
    with torch.no_grad():
        for i in range(30):
            logits = model(path[:, i])
            traces.append(hessian_trace(model.features(x[i : i + 1]), logits[:1]).item())
            if logits[0].argmax() != y[i]:
                continue
            loss = cross_entropy(logits, y[i].expand(51), reduction="none").tolist()
            wrong = logits.argmax(dim=1) != y[i]
            widths.append(next((t for t in range(51) if loss[t] - loss[0] > 0.1), 51))
            flips.append(next((t for t in range(51) if wrong[t]), 51))
    assert len(widths) == 26
    assert len(set(widths)) > 1
    assert 51 in flips
    assert found["basin_width"] == plain_quantiles(widths)
    assert found["flip_step"] == plain_quantiles(flips)
    assert found["basin_beyond"] == pytest.approx(widths.count(51) / 26)
    assert found["flip_beyond"] == pytest.approx(flips.count(51) / 26)
    assert found["trace"] == plain_quantiles(traces)
    assert found["mean_trace"] == pytest.approx(statistics.mean(traces))
    assert [len(found[f"{name}_by_step"]) for name in ("rise", "sharpness", "accuracy")] == [51] * 3
    assert found["rise_by_step"][0] == [0, 0, 0]
    assert found["accuracy_by_step"][0] == pytest.approx(26 / 30)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_adversary_attacks_a_batch_in_the_ball(precision):
    model, x, y = fashion_network()
    model, x = model.float(), x.float()
    with torch.no_grad():
        attacked = Adversary(precision, epsilon=0.1, step_size=0.03, steps=5)(model, x, y)
        loss, before = (cross_entropy(model(batch), y) for batch in (attacked, x))
    assert attacked.dtype == torch.float32
    assert not attacked.requires_grad
    assert (attacked - x).abs().max() <= 0.1
    assert attacked.min() >= 0
    assert attacked.max() <= 1
    assert loss > before + 0.1
    assert (Adversary("float32").epsilon, Adversary("float32").step_size) == (8 / 255, 2 / 255)


# Runs

TINY = {
    "robustness": robustness.Config(
        ("fashion-mnist", "digits"),
        (
            Network("small-cnn", 4, {"fashion-mnist": 15, "digits": 15}),
            Network("mlp", 8, {"fashion-mnist": 10, "digits": 10}),
        ),
        300,
        n_attack=24,
        n_slow=12,
        n_referee=0,
        seeds=2,
        path_steps=6,
        scales=(1, 5),
        masks=(1, 1000),
        queries=4,
        batch_size=32,
        lr=0.1,
        precision="float32",
    ),
    "adversarial-training": adversarial_training.Config(
        "fashion-mnist",
        300,
        30,
        "small-cnn",
        4,
        epochs=8,
        seeds=2,
        batch_size=32,
        precision="float32",
    ),
}


@pytest.fixture(params=TINY)
def tiny_run(request, monkeypatch, tmp_path):
    module = experiments.get(request.param)
    monkeypatch.setattr(module, "CONFIGS", {"quick": TINY[request.param]})
    (tmp_path / "results").mkdir()
    monkeypatch.setenv("FLATBOOK_RESULTS", str(tmp_path / "results"))
    return request.param, module


WORK = {
    "robustness": ("train", "scale_head", "unmask", "follow", "certify"),
    "adversarial-training": ("measure",),
}
UNITS = {"robustness": 8 + 2 + 2 + 8 + 4, "adversarial-training": 4}


def test_a_run_that_was_stopped_ends_with_the_same_record(tiny_run, monkeypatch, tmp_path):
    name, module = tiny_run
    done = []

    def counted(work, limit):
        def count(task):
            if len(done) == limit:
                raise KeyboardInterrupt
            done.append((work.__name__, task[1:-1]))
            return work(task)

        return count

    real = {work: getattr(module, work) for work in WORK[name]}

    def launch(limit):
        done.clear()
        for work, function in real.items():
            monkeypatch.setattr(module, work, counted(function, limit))
        return execute(name, workers=0, out=tmp_path / "run.json")

    whole = launch(None)
    assert len(done) == UNITS[name]
    assert not list(tmp_path.glob(".*run"))  # weights and units are gone
    stops = {"robustness": (3, 9, 6), "adversarial-training": (1, 2, 0)}[name]
    for limit in stops:
        with pytest.raises(KeyboardInterrupt):
            launch(limit)
    resumed = launch(None)
    assert len(done) == UNITS[name] - sum(stops)
    assert repr(resumed.values) == repr(whole.values)  # nan, which is no number, included
    assert resumed.seeds == [0, 1]
    check = {"robustness": robust_values, "adversarial-training": training_values}[name]
    check(whole.values)


def robust_values(values):
    pairs = {"fashion-mnist": ["small-cnn", "mlp"], "digits": ["small-cnn", "mlp"]}
    for stage in ("training", "paths"):
        assert {data: list(rows) for data, rows in values[stage].items()} == pairs
    for stage in ("scaling", "masking"):
        assert {data: list(rows) for data, rows in values[stage].items()} == {
            "fashion-mnist": ["small-cnn"]
        }
    assert "referee" not in values
    trained = values["training"]["fashion-mnist"]["small-cnn"]
    assert all(len(row) == 2 for row in trained.values())
    assert min(trained["test_accuracy"]) > 0.4  # it learnt something
    masking = values["masking"]["fashion-mnist"]["small-cnn"]
    assert list(masking) == ["1", "1000"]
    for plain, hidden in zip(masking["1"], masking["1000"], strict=True):
        assert (plain["clean"], plain["transfer"]) == (hidden["clean"], hidden["transfer"])
        assert plain["zero_gradient_share"] < hidden["zero_gradient_share"]
        assert plain["ce"] == plain["transfer"] <= hidden["ce"]
        assert plain["random_search_few"] <= plain["clean_few"]
    walks = values["paths"]["fashion-mnist"]["small-cnn"]
    assert [len(walk["by_step"]["loss"]) for walk in walks["linf"]] == [7, 7]
    assert [len(walk["by_step"]["loss"]) for walk in walks["l2"]] == [11, 11]
    second = values["paths"]["digits"]["mlp"]
    assert list(second) == ["linf"]
    assert len(second["linf"][0]["by_step"]["loss"]) == 4
    for curve in (walk["by_step"]["loss"] for walk in walks["linf"]):
        medians = [quartiles[1] for quartiles in curve]
        assert medians[-1] > medians[0]  # the attack climbs
    certificates = values["certificates"]["fashion-mnist"]["mlp"]
    assert certificates["never_violated"] == [True, True]
    for bound, stretch in zip(
        certificates["lipschitz_bound"], certificates["largest_stretch"], strict=True
    ):
        assert 0 < stretch < bound


def training_values(values):
    assert list(values) == ["clean", "adversarial"]
    for twin in values.values():
        assert all(len(row) == 2 for row in twin.values())
        assert len(twin["rise_by_step"][0]) == 51
    assert min(values["clean"]["test_accuracy"]) > 0.3
    assert values["clean"]["test_loss"] != values["adversarial"]["test_loss"]
    # Twins start alike and see the same batches; seeds do not.
    assert values["clean"]["test_loss"][0] != values["clean"]["test_loss"][1]
