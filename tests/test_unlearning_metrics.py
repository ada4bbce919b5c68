"""Measures of forgetting against their definitions, and what they say of known cases."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist
from scipy.stats import norm, wasserstein_distance
from torch import nn

from flatbook.membership import clopper_pearson, logit_signal, roc
from flatbook.models import build, evaluating
from flatbook.runtime import forked_seed, generator
from flatbook.unlearning import (
    accuracies,
    assess,
    by_memorization,
    compare,
    mia_correctness,
    relearning_time,
    tug_of_war,
    u_lira,
    unlearn,
    variance_entanglement,
    wasserstein_entanglement,
)

pytestmark = pytest.mark.usefixtures("one_thread")


# --- a problem in which data can only be memorized -----------------------------------------------

random = generator(0)
X = torch.randn(60, 20, generator=random)
Y = torch.where(X[:, 0] > 0, 1, 0)
Y[:15] = 1 - Y[:15]  # what is to be forgotten contradicts the rest
F, R = (X[:15], Y[:15]), (X[15:], Y[15:])
U = torch.randn(200, 20, generator=random)
TEST = U, torch.where(U[:, 0] > 0, 1, 0)


def trained(data, seed):
    with forked_seed(seed):
        model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(80):
        adam.zero_grad()
        nn.functional.cross_entropy(model(data[0]), data[1]).backward()
        adam.step()
    return model.eval()


@pytest.fixture(scope="module")
def models():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = [trained((X, Y), seed) for seed in range(10)], [trained(R, 50 + s) for s in range(10)]
    torch.set_num_threads(threads)
    return found


def signals(models):
    with torch.no_grad():
        return np.stack([logit_signal(model(F[0]), F[1]).numpy() for model in models])


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def forgotten(model):
    strong = lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9)  # noqa: E731
    options = {"epochs": 10, "alpha": 0.7, "optimizer": strong, "batch_size": 15}
    return unlearn(model, R, F, method="neg_grad", **options)


def test_neg_grad_forgets_and_the_measures_see_it(models):
    old, retrained = models[0][0], models[1][0]
    sets = {"retain": R, "forget": F, "test": TEST}
    start, goal = accuracies(old, **sets), accuracies(retrained, **sets)
    assert start["retain"] == start["forget"] == goal["retain"] == 1
    assert goal["forget"] < 0.5
    done = forgotten(old)
    end = accuracies(done.model, **sets)
    assert end["forget"] < 0.5
    assert end["retain"] > 0.8
    assert tug_of_war(goal, goal) == 1
    assert tug_of_war(end, goal) > tug_of_war(start, goal) + 0.2

    def mia(model):
        parts = [logit_signal(model(x).detach(), y) for x, y in (R, TEST, F)]
        return mia_correctness(*parts)

    assert mia(old) > 0.5
    assert mia(retrained) < 0.2
    assert mia(done.model) < 0.4


def test_relearning(models):
    old, retrained = models[0][0], models[1][0]
    never = relearning_time(old, F, accuracy=1.0)
    assert never.epochs == 0
    assert never.accuracy == (1.0,)
    before = {name: t.clone() for name, t in retrained.state_dict().items()}
    slow = relearning_time(retrained, F, accuracy=1.0, optimizer=sgd, batch_size=8)
    assert 0 < slow.epochs < math.inf
    assert len(slow.accuracy) == slow.epochs + 1
    assert slow.accuracy[-1] == 1 > max(slow.accuracy[:-1])
    assert all(torch.equal(t, before[n]) for n, t in retrained.state_dict().items())
    assert slow == relearning_time(retrained, F, accuracy=1.0, optimizer=sgd, batch_size=8)
    given_up = relearning_time(retrained, F, accuracy=1.0, max_epochs=0)
    assert given_up.epochs == math.inf
    done = forgotten(old)
    assert relearning_time(done.model, F, accuracy=1.0, optimizer=sgd, batch_size=8).epochs > 0


def area(targets, references, unlearned, retrained):
    scores = [u_lira(s, unlearned, retrained, variance="pooled") for s in (*targets, *references)]
    members = np.repeat([True, False], [targets.size, references.size])
    return roc(np.concatenate(scores), members).auc


def test_u_lira_sees_what_was_not_unlearned_and_nothing_in_retraining(models):
    kept, fresh = (signals(group) for group in models)
    assert area(kept[:5], fresh[:5], kept[5:], fresh[5:]) > 0.95
    # A method that retrains is beyond reproach: both kinds of models are of one law.
    assert 0.3 < area(fresh[:2], fresh[2:4], fresh[4:7], fresh[7:]) < 0.7


# --- tug of war and attacks, by hand ------------------------------------------------------------

shares = st.fractions(0, 1, max_denominator=50)
three = st.fixed_dictionaries(dict.fromkeys(("retain", "forget", "test"), shares))


@given(three, three)
@settings(max_examples=15)
def test_tug_of_war_is_its_formula(own, other):
    exact = Fraction(1)
    for key in own:
        exact *= 1 - abs(own[key] - other[key])
    value = tug_of_war(*({k: float(v) for k, v in acc.items()} for acc in (own, other)))
    assert value == pytest.approx(float(exact))
    assert 0 <= value <= 1


def test_tug_of_war_with_an_attack():
    own = {"retain": 1.0, "test": 1.0, "mia": 0.25}
    assert tug_of_war(own, own | {"mia": 0.5, "forget": 0.0}, forget="mia") == 0.75


def test_tug_of_war_refuses():
    full = {"retain": 1.0, "forget": 0.5, "test": 0.8}
    with pytest.raises(ValueError, match=r"^acc must have an entry 'test'; got retain, forget\.$"):
        tug_of_war({"retain": 1.0, "forget": 1.0}, full)
    with pytest.raises(ValueError, match=r"^acc_retrain must have an entry 'retain'; got 0\.5\.$"):
        tug_of_war(full, 0.5)
    with pytest.raises(
        ValueError, match=r"^acc_retrain\['forget'\] must be a number in \[0, 1\]; got 50\.$"
    ):
        tug_of_war(full, full | {"forget": 50})
    with pytest.raises(ValueError, match=r"^forget must be one of forget, mia; got 'lira'\."):
        tug_of_war(full, full, forget="lira")


def test_mia_correctness_takes_the_best_threshold():
    random = np.random.default_rng(0)
    retain, test, forget = random.normal(1, 1, 40), random.normal(0, 1, 70), random.normal(0, 1, 9)
    gaps = {t: (retain >= t).mean() - (test >= t).mean() for t in (*retain, *test)}
    best = max(gaps, key=lambda t: (round(gaps[t], 12), t))
    assert mia_correctness(retain, test, forget) == (forget >= best).mean()
    assert mia_correctness(torch.tensor(retain), torch.tensor(test), torch.tensor(retain)) > 0.5
    with pytest.raises(ValueError, match=r"^forget_signal must be finite; got inf or nan\.$"):
        mia_correctness(retain, test, [np.nan])


def test_u_lira_is_a_ratio_of_normal_densities():
    random = np.random.default_rng(0)
    seen, unseen = random.normal(2, 1, (6, 5)), random.normal(0, 2, (4, 5))
    target = random.normal(1, 1, 5)
    laws = [norm(s.mean(0), s.std(0)).logpdf(target) for s in (seen, unseen)]
    scores = u_lira(target, seen, unseen)
    np.testing.assert_allclose(scores, laws[0] - laws[1])
    assert isinstance(u_lira(torch.tensor(target), seen, unseen), torch.Tensor)
    with pytest.raises(ValueError, match=r"^design must have at least 2 models in for each point;"):
        u_lira(target, seen[:1], unseen)
    with pytest.raises(
        ValueError, match=r"^retrained_signals must have shape \(models, 5\); got \(4, 4\)\.$"
    ):
        u_lira(target, seen, unseen[:, 1:])


def test_accuracies_leave_the_model_alone():
    model = nn.Sequential(nn.Linear(20, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    found = accuracies(model, batch_size=7, a=R, b=F)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(m.training for m in model.modules())
    with evaluating(model), torch.no_grad():
        assert found["b"] == float((model(F[0]).argmax(1) == F[1]).double().mean())
    with pytest.raises(ValueError, match=r"^x of a must not be empty"):
        accuracies(model, a=(X[:0], Y[:0]))


# --- entanglement -------------------------------------------------------------------------------


def clouds(seed=0, sizes=(12, 12), width=4, shift=1.0):
    random = np.random.default_rng(seed)
    return random.normal(0, 1, (sizes[0], width)), random.normal(shift, 1, (sizes[1], width))


def test_variance_entanglement_is_its_formula():
    r, f = clouds(sizes=(9, 30))
    mu_r, mu_f = r.mean(0), f.mean(0)
    within = np.mean([np.sum((x - mu_r) ** 2) for x in r])
    within += np.mean([np.sum((x - mu_f) ** 2) for x in f])
    assert variance_entanglement(r, f) == pytest.approx(4 * within / np.sum((mu_r - mu_f) ** 2))
    mu = np.concatenate([r, f]).mean(0)
    between = (np.sum((mu_r - mu) ** 2) + np.sum((mu_f - mu) ** 2)) / 2
    assert variance_entanglement(r, f, center="pooled") == pytest.approx(within / between)
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (r, f)]
    assert variance_entanglement(r, f, normalise=True) == pytest.approx(
        variance_entanglement(*unit)
    )
    assert variance_entanglement(r, r) == math.inf
    assert variance_entanglement(f, r) == pytest.approx(variance_entanglement(r, f))


def test_only_the_midpoint_ignores_the_sizes_of_the_sets():
    r, f = clouds()
    many = np.tile(r, (20, 1))
    assert variance_entanglement(many, f) == pytest.approx(variance_entanglement(r, f))
    pooled = [variance_entanglement(a, f, center="pooled") for a in (r, many)]
    assert pooled[0] == pytest.approx(variance_entanglement(r, f))
    assert pooled[1] < 0.6 * pooled[0]


def test_wasserstein_entanglement_is_exact():
    for seed, width in ((0, 4), (1, 2)):
        r, f = clouds(seed, width=width)
        unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (r, f)]
        cost = cdist(*unit)
        pairs = linear_sum_assignment(cost)
        expected = 1 - cost[pairs].mean() / 2
        assert wasserstein_entanglement(r, f) == pytest.approx(expected, rel=1e-12)
        assert wasserstein_entanglement(torch.tensor(3 * r), f) == pytest.approx(expected)
        turn = np.linalg.qr(np.random.default_rng(1).normal(size=(width, width)))[0]
        assert wasserstein_entanglement(r @ turn, f @ turn) == pytest.approx(expected)
        assert wasserstein_entanglement(np.tile(r, (3, 1)), f) == pytest.approx(expected)


def test_wasserstein_entanglement_at_its_ends():
    r, _ = clouds()
    assert wasserstein_entanglement(r, r) == pytest.approx(1)
    assert wasserstein_entanglement(np.ones((3, 2)), -np.ones((5, 2))) == pytest.approx(0)
    behind_relu = wasserstein_entanglement(np.eye(4)[:2], np.eye(4)[2:])
    assert behind_relu == pytest.approx(1 - math.sqrt(2) / 2)
    # On a short arc the distance is nearly that on the line.
    angles = [1e-4 * np.random.default_rng(s).random(20) for s in (0, 1)]
    arcs = [np.stack([np.cos(a), np.sin(a)], axis=1) for a in angles]
    line = wasserstein_distance(*angles)
    assert 2 * (1 - wasserstein_entanglement(*arcs)) == pytest.approx(line, rel=1e-6)


def test_wasserstein_entanglement_of_a_draw():
    r, f = clouds(sizes=(80, 90))
    drawn = [wasserstein_entanglement(r, f, max_points=30, seed=s) for s in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    full = wasserstein_entanglement(r, f)
    assert wasserstein_entanglement(r, f, max_points=90) == full
    assert abs(drawn[0] - full) < 0.1


def test_entanglement_refuses():
    r, f = clouds()
    with pytest.raises(
        ValueError, match=r"^forget_features must have shape \(forgotten, 4\); got \(12, 3\)\.$"
    ):
        variance_entanglement(r, f[:, 1:])
    with pytest.raises(ValueError, match=r"^center must be one of midpoint, pooled; got 'mean'\."):
        variance_entanglement(r, f, center="mean")
    with pytest.raises(
        ValueError,
        match=r"^forget_features must have no row of zeros, which has no direction; row 1 is .*\.$",
    ):
        wasserstein_entanglement(r, np.eye(4) * [[1], [0], [1], [1]])
    with pytest.raises(ValueError, match=r"^retain_features must be finite; got inf or nan\.$"):
        wasserstein_entanglement(r * np.inf, f)


# --- report -------------------------------------------------------------------------------------


class Fixed(nn.Module):
    """Answers 1 where the input lies above a bar."""

    def __init__(self, bar):
        super().__init__()
        self.bar = bar

    def forward(self, x):
        return torch.cat([torch.zeros_like(x), x - self.bar], dim=1)


def test_report():
    x = torch.arange(20.0)[:, None]
    data = x, (x[:, 0] >= 10).long()
    sets = {"retain": data, "forget": (x[:8], data[1][:8]), "test": (x[5:], data[1][5:])}
    report = compare(Fixed(5.5), Fixed(11.5), **sets, names=("ours", "retrained"), draws=300)
    row = report.rows["retain"]
    assert row.points == 20
    assert row.accuracy == (0.8, 0.9)  # wrong on 6 to 9, and on 10 and 11
    assert row.changed == (2, 4)
    assert row.interval == (clopper_pearson(16, 20), clopper_pearson(18, 20))
    assert row.difference.value == pytest.approx(-0.1)
    low, high = row.difference.interval()
    error = math.sqrt((6 / 20 - 0.1**2) / 20)  # of a mean of -1, 0 and 1
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.2)
    assert report.rows["forget"].accuracy == (0.75, 1.0)
    own, other = ({k: r.accuracy[i] for k, r in report.rows.items()} for i in (0, 1))
    assert report.tow.value == pytest.approx(tug_of_war(own, other))
    low, high = report.tow.interval()
    assert low < report.tow.value <= high <= 1
    lines = report.table().splitlines()
    assert lines[0] == "| set | points | ours | retrained | difference |"
    assert lines[3].startswith("| forget | 8 | 75.0 [")
    assert lines[-1].startswith(f"Tug-of-war: {report.tow.value:.3f} [")
    assert str(report) == report._repr_markdown_() == report.table()


def test_report_draws_what_it_holds():
    data = torch.eye(2), torch.tensor([0, 1])
    report = compare(nn.Identity(), nn.Identity(), retain=data, forget=data, test=data)
    ax = Figure().subplots()
    drawn = report.plot(ax, colours=("#000000", "#ff0000"))
    assert len(drawn) == 2
    for model, container in enumerate(drawn):
        dots, _, (bars,) = container
        assert dots.get_xdata().tolist() == [1.0, 1.0, 1.0]
        ends = [segment[:, 0] for segment in bars.get_segments()]
        np.testing.assert_allclose(ends, [r.interval[model] for r in report.rows.values()])
    assert [t.get_text() for t in ax.get_yticklabels()] == ["retain", "forget", "test"]
    assert ax.get_xlabel() == "accuracy"
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["unlearned", "retrained"]


def test_report_refuses():
    data = torch.eye(2), torch.tensor([0, 1])
    one = data[0][:1], data[1][:1]
    with pytest.raises(
        ValueError, match=r"^forget must have at least 2 points to resample; got 1\.$"
    ):
        compare(nn.Identity(), nn.Identity(), retain=data, forget=one, test=data)
    with pytest.raises(
        ValueError, match=r"^names must be two, one for each model; got \('a',\)\.$"
    ):
        compare(nn.Identity(), nn.Identity(), retain=data, forget=data, test=data, names=("a",))
    with pytest.raises(ValueError, match=r"^second must be a torch module; got NoneType\.$"):
        compare(nn.Identity(), None, retain=data, forget=data, test=data)


# --- sets by memorization, and all measures at once ----------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.integers(3, 40), st.data())
def test_sets_by_memorization_are_the_ends_and_the_middle(points, data):
    scores = np.array(data.draw(st.lists(st.integers(0, 4), min_size=points, max_size=points)))
    ties = np.array(data.draw(st.permutations(range(points))))
    size = data.draw(st.integers(1, points // 3))
    sets = by_memorization(scores, size, ties=ties)
    rank = np.argsort(np.lexsort((ties, scores)))  # a strict order, for the ties are distinct
    assert {len(rows) for rows in sets.values()} == {size}
    assert set(rank[sets["low"]]) == set(range(size))
    assert set(rank[sets["high"]]) == set(range(points - size, points))
    middle = np.sort(rank[sets["mid"]])
    assert (np.diff(middle) == 1).all()
    assert abs(middle.mean() - (points - 1) / 2) <= 0.5
    assert all((np.diff(rows) > 0).all() for rows in sets.values())


@pytest.mark.parametrize(
    ("scores", "size", "options", "message"),
    [
        ([0.1, 0.2], 1, {}, r"size must be at most a third of the 2 points, or the sets overlap; "
         r"got 1\."),
        ([0.1, np.nan, 0.3], 1, {}, "scores must"),
        ([0.1, 0.2, 0.3], 0, {}, "size must be"),
        ([0.1, 0.2, 0.3], 1, {"ties": [0.1]}, "ties must"),
    ],
)  # fmt: skip
def test_sets_by_memorization_refuse(scores, size, options, message):
    with pytest.raises(ValueError, match=message):
        by_memorization(scores, size, **options)


def small_model():
    return build("mlp", num_classes=3, input_shape=(20,), width=16, seed=1).train()


def test_assess_is_every_measure_of_its_own():
    model = small_model()
    y = generator(3)
    sets = {
        name: (torch.rand(n, 20, generator=y), torch.randint(3, (n,), generator=y))
        for name, n in (("retain", 30), ("forget", 12), ("test", 25))
    }
    found = assess(model, **sets, batch_size=7)
    assert model.training
    assert found.accuracy == accuracies(model, **sets)
    with evaluating(model), torch.no_grad():
        signals = {name: logit_signal(model(x), own) for name, (x, own) in sets.items()}
        features = {name: model.features(x) for name, (x, _) in sets.items()}
    np.testing.assert_allclose(found.signals, signals["forget"], rtol=1e-5)
    wanted = mia_correctness(signals["retain"], signals["test"], signals["forget"])
    assert found.mia == pytest.approx(wanted)
    assert found.attacked == found.accuracy | {"mia": found.mia}
    pair = features["retain"], features["forget"]
    assert found.variance == pytest.approx(variance_entanglement(*pair), rel=1e-5)
    assert found.wasserstein == pytest.approx(wasserstein_entanglement(*pair), rel=1e-5)


def test_assess_of_dead_features_has_no_direction():
    model = small_model()
    with torch.no_grad():
        for p in model.body.parameters():
            p.fill_(-1)
    x, y = torch.rand(6, 20), torch.tensor([0, 1, 2, 0, 1, 2])
    found = assess(model, retain=(x, y), forget=(x, y), test=(x, y))
    assert math.isnan(found.wasserstein)
    assert found.accuracy["test"] == pytest.approx(1 / 3)


def test_assess_refuses_what_has_no_features():
    x, y = torch.rand(6, 20), torch.tensor([0, 1, 2, 0, 1, 2])
    sets = {"retain": (x, y), "forget": (x, y), "test": (x, y)}
    with pytest.raises(ValueError, match="must have a method features and a layer head; it has no"):
        assess(nn.Linear(20, 3), **sets)
    with pytest.raises(ValueError, match="max_points must be"):
        assess(small_model(), **sets, max_points=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": 3}, r"names must be two, one for each model; got 3\."),
        ({"names": ("a", 3)}, "names must be two"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_compare_refuses(options, message):
    model = nn.Identity()
    data = torch.eye(2), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=message):
        compare(model, model, retain=data, forget=data, test=data, **options)
