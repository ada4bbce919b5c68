r"""Signal learned and noise memorized by two-layer networks, in training and in unlearning.

Every study trains in the coordinates of `flatbook.theory.coordinates`, at a cost free of d, with
the rates and radii of `flatbook.theory.settings`. Each runs once a seed, on a problem of its own.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from flatbook.experiments import Outcome, gather, run_studies
from flatbook.experiments._signal_unlearning import alphas, error, panels, unlearning_settings
from flatbook.theory.coordinates import by_class, outputs
from flatbook.theory.settings import HARMFUL, STEPS, Setting, along, crossing

LABEL_STEPS = 800
"""Steps with flipped labels, which SAM never fits."""

WHEN = {"early": 60, "late": 400}
"""Steps after which memorization is compared."""


@dataclass(frozen=True)
class Config:
    """What the outcome depends on.

    Attributes:
        seeds: Problems of each study.
        u: SAM's ratio where it is not studied itself.
        dims: Values of d that thresholds are found for, at the first of ``samples``.
        samples: Values of n that thresholds are found for, at the last of ``dims``.
        map_size: Rows and columns of the phase diagram.
        map_steps: SAM's steps in it.
        strengths: Norms of the signal in which a threshold is looked for.
        ratios: Values of u in the study of memorization.
        long: Steps of the long run of SAM.
        budgets: Steps of unlearning at which thresholds of alpha are found.
        alphas: Values of alpha.
        alpha_seeds: Problems of that study, the longest.
        alpha_dims: Values of d / n they are found for; budgets over 2000 take the first and the
            last, the second value of n each second one.
        alpha_samples: Two values of n they are found for; the second up to budgets of 2000.
        unlearning: Steps of unlearning in the study of its coefficients.
        draws: For the test error.
    """

    seeds: int
    u: float
    dims: tuple[int, ...]
    samples: tuple[int, ...]
    map_size: int
    map_steps: int
    strengths: int
    ratios: int
    long: int
    budgets: tuple[int, ...]
    alphas: int
    alpha_seeds: int
    alpha_dims: tuple[int, ...]
    alpha_samples: tuple[int, ...]
    unlearning: int
    draws: int = 1000


CONFIGS = {
    "quick": Config(2, 4.0, (500, 2000), (20, 40), 5, 200, 7, 6, 400,
                    (50, 100), 9, 2, (25, 100), (20, 40), 80, draws=300),
    "laptop": Config(8, 4.0, (500, 1000, 2000, 4000, 8000, 16000, 32000), (20, 40, 80, 160),
                     20, 600, 15, 15, 2000, (100, 400, 1600, 6400), 17, 5,
                     (25, 50, 100, 200, 400), (20, 80), 400),
    "gpu": Config(50, 4.0, (500, 1000, 2000, 4000, 8000, 16000, 32000, 64000),
                  (20, 40, 80, 160, 320), 48, 6000, 25, 25, 25600,
                  (100, 400, 1600, 6400, 25600), 41, 20, (25, 50, 100, 200, 400), (20, 80),
                  400, draws=4000),
}  # fmt: skip


def run(config: Config, *, checkpoint=None, progress: bool = False, workers: int = 0) -> Outcome:
    """Run every study on every seed."""
    seeds = {name: range(config.seeds) for name in STUDIES}
    seeds["alphas"] = range(config.alpha_seeds)
    found = run_studies(
        STUDIES, seeds, config, digits=5, checkpoint=checkpoint, progress=progress, workers=workers
    )
    values = {}
    for name, parts in found.items():
        values[name] = {key: gather([part[key] for part in parts]) for key in parts[0]}
    grid = values["phase"]["maps"]
    values["phase"]["maps"] = {
        key: np.mean(maps, axis=0).round(4) for key, maps in grid.items()
    } | dict(zip(("dims", "signals"), map_axes(config), strict=True))
    return Outcome(values, seeds=range(config.seeds))


# --- standard training ------------------------------------------------------------------------


def map_axes(config: Config) -> tuple[np.ndarray, np.ndarray]:
    r"""Return d and :math:`\|\varphi\|` of the phase diagram."""
    size = config.map_size
    return np.geomspace(200, 20_000, size).round(), np.geomspace(0.5, 10, size)


def phase(config: Config, seed: int) -> dict:
    """Map the test error over d and the strength of the signal, for GD and SAM."""
    dims, signals = map_axes(config)
    maps = {"gd": [], "sam": [], "sam_loss": []}
    for row, d in enumerate(dims):
        setting = Setting(d=int(d))
        problems = setting.problems(signals, 1000 * seed + row)
        flat = setting.train(problems, STEPS, stop_loss=0.05)
        sharp = setting.train(problems, config.map_steps, config.u, stop_loss=0.05)
        maps["gd"].append(error(config, problems, flat))
        maps["sam"].append(error(config, problems, sharp))
        maps["sam_loss"].append(sharp.loss.numpy())
    return {"maps": maps}


def threshold_settings(config: Config) -> dict[str, tuple[Setting, float]]:
    """Return the settings that a threshold is found for, with the loss to stop at."""
    base = Setting(n=config.samples[0])
    large = replace(base, n=config.samples[-1], d=config.dims[-1])
    batch = config.samples[-1] // 4
    settings = {f"d-{d}": (replace(base, d=d), 0.05) for d in config.dims}
    settings |= {f"large-d-{d}": (replace(large, d=d), 0.05) for d in config.dims[-4:]}
    settings |= {f"batch-d-{d}": (replace(large, d=d, batch=batch), 0.05) for d in config.dims[-4:]}
    settings |= {f"n-{n}": (replace(large, n=n), 0.05) for n in config.samples}
    # The start's noise goes with (P - 1) s, which either stays or grows.
    for P in (2, 3, 5, 9):
        settings[f"patches-{P}"] = (replace(base, patches=P, init=0.1 / (P - 1)), 0.05)
    settings["patches-9-init"] = (replace(base, patches=9), 0.05)
    settings |= {f"noise-{s:g}": (replace(base, noise=s), 0.05) for s in (0.25, 1.0, 4.0)}
    settings |= {f"filters-{m}": (replace(base, filters=m), 0.05) for m in (5, 40)}
    settings |= {f"init-{s:g}": (replace(base, init=s), 0.05) for s in (0.01, 0.03, 0.3, 1.0)}
    return settings | {f"loss-{loss:g}": (base, loss) for loss in (0.3, 0.01)}


def thresholds(config: Config, seed: int) -> dict:
    r"""Find the :math:`\|\varphi\|` below which gradient descent overfits harmfully."""
    found = {}
    for name, (setting, loss) in threshold_settings(config).items():
        signals = np.geomspace(0.4, 2.5, config.strengths) * setting.scale()
        problems = setting.problems(signals, seed)
        at = setting.train(problems, STEPS, stop_loss=loss, seed=seed)
        where = crossing(np.log(signals), error(config, problems, at), HARMFUL)
        found[name] = np.exp(where)
    return {"gd": found}


def times(config: Config, seed: int) -> dict:
    """Follow SAM's test error over time, where the signal is weak."""
    steps = np.unique(np.geomspace(5, config.long, 24).round().astype(int)).tolist()
    settings = {
        "base": Setting(),
        "long": Setting(d=8000),
        "large": Setting(n=80, d=8000),
        "batch": Setting(n=80, d=8000, batch=20),
        "patches": Setting(patches=3, d=500),
    }
    found = {}
    for name, setting in settings.items():
        signals = np.array([0.25, 0.5, 1.0, 2.0]) * (setting.patches - 1)
        problems = setting.problems(signals, seed)
        path = list(along(setting, problems, steps, config.u))
        errors = np.array([error(config, problems, at) for at in path])
        losses = np.array([at.loss.numpy() for at in path])
        where = [crossing(np.log(steps), column, HARMFUL) for column in errors.T]
        unit = setting.d * (setting.patches - 1) ** 3 / (setting.size * signals**2)
        found[name] = {
            "time": np.exp(where),
            "unit": unit,
            "error": errors[-1],
            "loss": [
                np.interp(w, np.log(steps), row) for w, row in zip(where, losses.T, strict=True)
            ],
        }
    return found


def ratio_settings() -> dict[str, Setting]:
    """Return the settings in which memorization is measured over u."""
    base = Setting(n=40, signal=2.0)
    changed = [{"d": 500}, {"d": 8000}, {"n": 20}, {"n": 80}, {"filters": 5}, {"filters": 40},
               {"patches": 5}, {"noise": 4.0}, {"init": 0.05}, {"init": 0.5},
               {"batch": 10}, {"batch": 20}, {"signal": 12.0}]  # fmt: skip
    named = {f"{k}-{v:g}": replace(base, **{k: v}) for c in changed for k, v in c.items()}
    # A small start, beside noise vectors that are far from orthogonal, and nearly so.
    small = {f"small-{d}": replace(base, init=0.02, d=d) for d in (2000, 80_000)}
    return {"base": base} | named | small


def ratios(config: Config, seed: int) -> dict:
    """Measure which share of GD's memorization remains under SAM, over the ratio u."""
    u = np.geomspace(0.25, 16, config.ratios)
    shares = {"u": u} | {when: {} for when in WHEN}
    for name, setting in ratio_settings().items():
        problems = setting.problems([setting.signal] * (len(u) + 1), seed)
        path = along(setting, problems, WHEN.values(), torch.from_numpy(np.r_[0, u]))
        for when, at in zip(WHEN, path, strict=True):
            own = by_class(at.zeta, problems.y)[0].mean(dim=1)
            shares[when][name] = (own[1:] / own[0]).numpy()
    return {"share": shares}


def speed(config: Config, seed: int) -> dict:
    """Compare the signal that SAM and GD learn, at equal steps and at equal loss."""
    signals = np.array([1.0, 2.0, 4.0, 6.0, 9.0, 12.0])
    found = {}
    for name, setting in {"base": Setting(), "large": Setting(n=80, d=8000),
                          "batch": Setting(n=80, d=8000, batch=20)}.items():  # fmt: skip
        problems = setting.problems(signals, seed)
        ends = {"signals": signals, "predicted": 1 + setting.d / setting.n / signals**2}
        for when, options in {"first": {"steps": 1}, "steps": {"steps": 50},
                              "loss": {"steps": 4 * STEPS, "stop_loss": 0.3}}.items():  # fmt: skip
            flat, sharp = (
                setting.train(problems, u=u, seed=seed, **options) for u in (0.0, config.u)
            )
            ends[when] = (sharp.kappa.mean(dim=(1, 2)) / flat.kappa.mean(dim=(1, 2))).numpy()
        found[name] = ends
    return found


def labels(config: Config, seed: int) -> dict:
    """Flip a tenth of the labels and see which optimizer fits them."""
    found = {}
    for name, setting in unlearning_settings().items():
        problems = setting.problems([setting.signal], seed, flip=0.1)
        flipped = (problems.y != problems.true_y)[0]
        for optimizer, u in (("gd", 0.0), ("sam", config.u), ("sam-8", 8.0)):
            at = setting.train(problems, LABEL_STEPS, u, seed=seed)
            fits = (outputs(problems, at.kappa, at.zeta) * problems.y > 0)[0]
            found[f"{name}-{optimizer}"] = {
                "flipped": int(flipped.sum()),
                "fitted": int((fits & flipped).sum()),
                "error": error(config, problems, at)[0],
            }
    return found


STUDIES = {
    "phase": phase,
    "thresholds": thresholds,
    "times": times,
    "ratios": ratios,
    "speed": speed,
    "labels": labels,
    "panels": panels,
    "alphas": alphas,
}
