r"""What gradient descent leaves of polynomial networks, and what the weights still tell.

Each study runs once a seed, on data of its own, in coordinates of the span of the samples, which
full-batch training never leaves.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from flatbook.experiments import Outcome, gather, run_studies
from flatbook.reconstruction.eigenvectors import find_z_eigenvectors
from flatbook.reconstruction.fixture import exact_kkt
from flatbook.reconstruction.interpolation import monomial_count
from flatbook.reconstruction.kkt import polynomial_network
from flatbook.reconstruction.matching import match
from flatbook.reconstruction.minima import norm_cost, one_neuron
from flatbook.reconstruction.multipliers import fit_multipliers
from flatbook.reconstruction.survivors import coverage, isolation, power_modes, weighted_kkt
from flatbook.reconstruction.tensor import recover
from flatbook.reconstruction.trained import (
    active_neurons,
    gram_spectrum,
    train_polynomial,
)
from flatbook.runtime import generator

KINDS = ("orthonormal", "gaussian")
ACTIVATIONS = {
    "cubic": (0.0, 0.0, 0.0, 1.0),
    "square-0.3": (0.0, 0.0, 0.3, 1.0),
    "square-1": (0.0, 0.0, 1.0, 1.0),
    "linear-0.3": (0.0, 0.3, 0.0, 1.0),
    "linear-1": (0.0, 1.0, 0.0, 1.0),
}
SPECTRA = {
    "equal": (1.0,) * 12,
    # Six alike between three weaker and three stronger ones that stand alone
    "isolated": (0.4, 0.55, 0.75, *(1.0,) * 6, 1.35, 1.8, 2.4),
}
START = 1e-4
"""Share of its size at which an exact network is released."""


@dataclass(frozen=True)
class Config:
    """What the outcome depends on.

    Attributes:
        seeds: Data sets of each study.
        survivor_seeds: Of the study of survivors, which is quick.
        samples: Values of n.
        widths: Values of m.
        scales: Standard deviations of the initial weights; those of the first layer are divided by
            the root of the inputs.
        steps: Of training.
        nudges: Relative sizes of the push away from an exact network.
        release_steps: Of training after it.
        long: Steps of training with activations that are not homogeneous.
        variables: Values of n for which Z-eigenvectors are counted.
        ratios: Inputs over samples for it.
        draws: Instances a seed.
        shares: Shares of the neurons kept.
    """

    seeds: int
    survivor_seeds: int
    samples: tuple[int, ...]
    widths: tuple[int, ...]
    scales: tuple[float, ...]
    steps: int
    nudges: tuple[float, ...]
    release_steps: int
    long: int
    variables: tuple[int, ...]
    ratios: tuple[int, ...]
    draws: int
    shares: tuple[float, ...]


CONFIGS = {
    "quick": Config(2, 3, (3, 5), (30,), (1e-3, 0.1), 1000, (0.0, 1e-6), 600, 1000, (2, 3),
                    (1, 4), 5, (0.3, 0.6, 1.0)),
    "laptop": Config(10, 40, (3, 5, 8), (60, 200), (1e-3, 1e-2, 1e-1, 1.0), 20_000,
                     (0.0, 1e-8, 1e-6, 1e-4), 4000, 60_000, (2, 3, 4, 5), (1, 2, 4, 16, 64), 20,
                     (0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0)),
    "gpu": Config(40, 200, (3, 5, 8, 12), (60, 200, 1000), (1e-3, 1e-2, 1e-1, 1.0), 100_000,
                  (0.0, 1e-8, 1e-6, 1e-4), 20_000, 1_000_000, (2, 3, 4, 5, 6),
                  (1, 2, 4, 16, 64), 50, (0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0)),
}  # fmt: skip


def run(config: Config, *, checkpoint=None, progress: bool = False, workers: int = 0) -> Outcome:
    """Run every study on every seed."""
    seeds = {name: range(config.seeds) for name in STUDIES}
    seeds["survivors"] = range(config.survivor_seeds)
    found = run_studies(
        STUDIES, seeds, config, digits=4, checkpoint=checkpoint, progress=progress, workers=workers
    )
    values = {}
    for name, parts in found.items():
        values[name] = {
            key: gather([part[key] for part in parts])
            if isinstance(parts[0][key], dict)
            else [part[key] for part in parts]
            for key in parts[0]
        }
    return Outcome(values, seeds=range(config.seeds))


# --- data and errors --------------------------------------------------------------------------


def draw(kind: str, n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return unit samples in coordinates of their span, and labels.

    Gaussian ones have twice as many inputs as there are samples.
    """
    random = generator(seed)
    X = torch.randn(n, 2 * n, generator=random, dtype=torch.float64)
    X = torch.linalg.qr(X.T).R.T if kind == "gaussian" else torch.eye(n, dtype=torch.float64)
    y = torch.randint(0, 2, (n,), generator=random).double() * 2 - 1
    return X / X.norm(dim=1, keepdim=True), y


def start(m: int, n: int, scale: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random weights; those of different scales are multiples of each other."""
    random = generator(10_000 + seed)
    W = torch.randn(m, n, generator=random, dtype=torch.float64) / n**0.5
    return scale * W, scale * torch.randn(m, generator=random, dtype=torch.float64)


def direction_errors(guesses, X) -> np.ndarray:
    """Return the distance of each sample's direction from the nearest guess, up to sign."""
    if len(guesses) == 0:
        return np.full(len(X), math.sqrt(2))
    guesses, X = (np.asarray(v) / np.linalg.norm(v, axis=1, keepdims=True) for v in (guesses, X))
    return match(guesses, X, measure="distance", signed=False).score


def attack(W, a, X, neurons) -> tuple[np.ndarray, float]:
    """Return the errors of the better of two attempts to recover samples from weights, and its KKT
    residual: from the active neurons alone, and from all neurons with the number of samples known.
    """
    attempts = []
    for V, b, rank in ((W[neurons], a[neurons], None), (W, a, min(len(X), len(W)))):
        found = recover(V, b, rank=rank, tolerance=1e-3 if rank is None else None, force=True)
        attempts.append((direction_errors(found.X, X), found.residual))
    return min(attempts, key=lambda attempt: float(np.median(attempt[0])))


# --- studies ----------------------------------------------------------------------------------


def rank(config: Config, seed: int) -> dict:
    """Train networks and look at what is left: neurons, directions, spectrum, samples."""
    values = {}
    for n in config.samples:
        exact = exact_kkt(n, X=torch.eye(n, dtype=torch.float64), seed=seed)
        spectrum = gram_spectrum(exact.W)
        values[f"exact-{n}"] = {
            "error": float(direction_errors(recover(exact.W, exact.a).X, exact.X).max()),
            "spectrum": float(spectrum[-1] / spectrum[0]),
        }
        for m in config.widths:
            cases = [(kind, scale) for kind in KINDS for scale in config.scales]
            data = [draw(kind, n, seed) for kind, _ in cases]
            weights = [start(m, n, scale, seed) for _, scale in cases]
            X, y = (torch.stack(part) for part in zip(*data, strict=True))
            W, a = (torch.stack(part) for part in zip(*weights, strict=True))
            at = [config.steps // 100, config.steps // 10]
            path = train_polynomial(W, a, X, y, steps=config.steps, at=at)
            for k, (kind, scale) in enumerate(cases):
                found = report(path.W[-1, k], path.a[-1, k], X[k], y[k], seed)
                found["along"] = [
                    len(active_neurons(V[k], b[k]).directions)
                    for V, b in zip(path.W, path.a, strict=True)
                ]
                values[f"{kind}-{n}-{m}-{scale:g}"] = found
    return values


def report(W, a, X, y, seed: int) -> dict:
    """Describe a trained network beside its data."""
    n = len(X)
    margins = y * polynomial_network(W, a, X)
    margin = float(margins.min())
    active = active_neurons(W, a)
    neurons = active.neurons
    spectrum = gram_spectrum(W, rank=n)
    errors, residual = attack(W, a, X, neurons)
    svm = one_neuron(X, y)
    fitted = fit_multipliers(W, a, X, y)
    of_active = fit_multipliers(W[neurons], a[neurons], X, y)
    chance = torch.randn(n, n, generator=generator(20_000 + seed), dtype=torch.float64)
    cost = float(W[neurons].square().sum() + a[neurons].square().sum()) / max(margin, 1e-9) ** 0.5
    return {
        "margin": margin,
        "tight": int((margins < 1.05 * margin).sum()),
        "neurons": len(neurons),
        "directions": len(active.directions),
        "rank": int(torch.linalg.matrix_rank(active.directions, rtol=0.05)),
        "spectrum": float(spectrum[-1] / spectrum[0]),
        "residual": fitted.residual,
        "active_residual": of_active.residual,
        "error": errors,
        "recovered_residual": residual,
        "rows": direction_errors(active.directions, X),
        "chance": direction_errors(chance, X),
        "multipliers": of_active.values / of_active.values.max(),
        "svm": float((active.directions[0] @ svm.W[0]).abs() / svm.W[0].norm()),
        "cost": cost / (2 * float(norm_cost(svm.a * svm.W.norm(dim=1) ** 3)[0])),
    }


def instability(config: Config, seed: int) -> dict:
    """Release exact networks of full rank, small and pushed a little, and follow them."""
    at = np.unique(np.geomspace(5, config.release_steps, 40).round().astype(int)).tolist()
    values = {}
    for n in config.samples:
        exact = exact_kkt(n, X=torch.eye(n, dtype=torch.float64), seed=seed)
        theta = torch.cat([exact.W, exact.a[:, None]], dim=1)
        push = torch.randn(*theta.shape, generator=generator(seed), dtype=torch.float64)
        push = push * theta.norm() / push.norm()
        pushed = torch.stack([START * (theta + nudge * push) for nudge in config.nudges])
        path = train_polynomial(
            pushed[..., :-1].contiguous(), pushed[..., -1].contiguous(), exact.X, exact.y,
            steps=config.release_steps, at=at, rate=0.1,
        )  # fmt: skip
        along = torch.cat([path.W, path.a[..., None]], dim=-1).flatten(2)
        norms = along.norm(dim=2)
        away = (along / norms[..., None] - theta.flatten() / theta.norm()).norm(dim=2)
        for k, nudge in enumerate(config.nudges):
            W, a = path.W[-1, k], path.a[-1, k]
            spectrum = gram_spectrum(W)
            active = active_neurons(W, a)
            values[f"{n}-{nudge:g}"] = {
                "growth": norms[:, k] / norms[0, k],
                "distance": away[:, k],
                "margin": path.margins[:, k],
                "directions": len(active.directions),
                "spectrum": float(spectrum[-1] / spectrum[0]),
                "error": attack(W, a, exact.X, active.neurons)[0],
            }
    return values


def homogenise(config: Config, seed: int) -> dict:
    """Follow the KKT residual of the leading power along training."""
    n, m = 5, 40
    at = np.unique(np.geomspace(100, config.long, 24).round().astype(int)).tolist()
    X, y = draw("gaussian", n, seed)
    W, a = start(m, n, 1e-2, seed)
    values = {}
    for name, activation in ACTIVATIONS.items():
        path = train_polynomial(
            W, a, X, y, activation=activation, steps=config.long, at=at, rate=1.0
        )
        residuals = []
        for V, b in zip(path.W, path.a, strict=True):
            neurons = active_neurons(V, b).neurons
            residuals.append(fit_multipliers(V[neurons], b[neurons], X, y).residual)
        sizes = (path.W.square().sum(dim=(1, 2)) + path.a.square().sum(dim=1)).sqrt()
        values[name] = {
            "steps": path.steps,
            "margin": path.margins,
            "norm": sizes,
            "residual": residuals,
            "all_residual": fit_multipliers(path.W[-1], path.a[-1], X, y).residual,
            "directions": len(active_neurons(path.W[-1], path.a[-1]).directions),
        }
    return values


def eigenvectors(config: Config, seed: int) -> dict:
    """Count the real Z-eigenvectors of random tensors."""
    values = {}
    for n in config.variables:
        values[f"orthonormal-{n}"] = [
            len(find_z_eigenvectors(torch.eye(n, dtype=torch.float64), torch.ones(n).double()))
        ]
        for ratio in config.ratios:
            random = generator(1000 * seed + 10 * n)
            counts = []
            for draw_ in range(config.draws):
                X = torch.randn(n, ratio * n, generator=random, dtype=torch.float64)
                X = X / X.norm(dim=1, keepdim=True)
                b = torch.ones(n, dtype=torch.float64)
                counts.append(len(find_z_eigenvectors(X, b, starts=400, seed=draw_)))
            values[f"{ratio}-{n}"] = counts
        values[f"needed-{n}"] = monomial_count(n, 2)
    return values


def survivors(config: Config, seed: int) -> dict:
    """Remove neurons from exact networks and see which samples come back."""
    values = {}
    for name, spectrum in SPECTRA.items():
        n = len(spectrum)
        total = n * (n + 1) // 2
        random = np.random.default_rng(seed)
        strengths = random.permutation(spectrum)
        order = random.permutation(total)
        for share in config.shares:
            while True:  # each sample must be in a neuron
                kept = order[: round(share * total)]
                try:
                    net = weighted_kkt(strengths, neurons=kept, seed=seed)
                    break
                except ValueError:
                    order = random.permutation(total)
            values[f"{name}-{share:g}"] = _survivors(net, strengths, seed)
    return values


def _survivors(net, strengths, seed: int) -> dict:
    n = len(strengths)
    found = {
        "slices": recover(net.W, net.a, rank=n, force=True).X,
        "symmetric": recover(net.W, net.a, rank=n, force=True, symmetric=True).X,
        "power": power_modes(net.W, net.a, n).directions,
        "symmetric_power": power_modes(net.W, net.a, n, symmetric=True).directions,
        "rows": net.W,
        "chance": np.random.default_rng(seed).normal(size=(n, n)),
    }
    return {key: direction_errors(guesses, net.X) for key, guesses in found.items()} | {
        "strength": strengths,
        "isolation": isolation(strengths),
        "coverage": coverage(net.W, net.X),
    }


STUDIES = {
    "rank": rank,
    "instability": instability,
    "homogenise": homogenise,
    "eigenvectors": eigenvectors,
    "survivors": survivors,
}
