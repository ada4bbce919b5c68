"""The studies of ``signal-noise`` that unlearn: coefficients on R and F, and thresholds of alpha.

A fifth of the samples is F. Networks start from training on all samples to a loss of 0.05, by GD
or by SAM, and descend on R and ascend on F at half the rate.
"""

from dataclasses import replace

import numpy as np
import torch

from flatbook.theory.coordinates import Problems, by_class, outputs, responses
from flatbook.theory.descent import Training
from flatbook.theory.population import evaluate, noise_root
from flatbook.theory.settings import HARMFUL, STEPS, Setting, along, crossing
from flatbook.theory.signal_noise import VALUE

WAYS = ("gd-gd", "gd-sam", "sam-gd", "sam-sam")
"""Trained by, then unlearned by."""

ALPHA = 0.8  # with which each sample of R and F weighs the same
WIDER = (16.0, 64.0, 256.0)


def unlearning_settings() -> dict[str, Setting]:
    """Return the settings of unlearning: small, larger, and larger in mini-batches."""
    large = Setting(n=80, d=8000)
    return {"base": Setting(), "large": large, "batch": replace(large, batch=20)}


def error(config, problems: Problems, at: Training) -> np.ndarray:
    """Return the test error of each cell."""
    return evaluate(problems, at.kappa, at.zeta, draws=config.draws).error.numpy()


def forgotten(n: int) -> torch.Tensor:
    """Return where F is: the first fifth."""
    return torch.arange(n) < n // 5


def starts(config, setting: Setting, problems: Problems, seed: int) -> list[Training]:
    """Return what GD and what SAM make of all samples."""
    return [setting.train(problems, STEPS, u, stop_loss=0.05, seed=seed) for u in (0.0, config.u)]


def joined(runs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the coordinates of several runs, as a start for their cells side by side."""
    return torch.cat([at.kappa for at in runs]), torch.cat([at.zeta for at in runs])


def fresh_margins(problems: Problems, kappa, zeta, draws: int, seed: int = 0) -> np.ndarray:
    r"""Draw margins of fresh samples. Shape ``(draws, ...)``, before the shape of the cells.

    Args:
        problems: The cells.
        kappa: Shape ``(..., cells, 2, m)``.
        zeta: Shape ``(..., cells, 2, m, n)``.
        draws: How many samples.
        seed: Of noise and labels.
    """
    value, m = VALUE[problems.activation], problems.filters
    random = np.random.default_rng(seed)
    label = torch.from_numpy(random.choice([-1.0, 1.0], draws))
    normal = torch.from_numpy(random.standard_normal((draws, 2 * m)))
    roots = noise_root(problems, kappa, zeta)
    z = torch.einsum("bk,...kl->b...l", normal, roots).unflatten(-1, (2, m))
    a, _ = responses(problems, kappa, zeta)
    label = label.reshape(-1, *[1] * a.ndim)
    others = (problems.patches - 1)[:, None, None]
    scores = (value(label * a) + others * value(z)).mean(dim=-1)
    return (label[..., 0, 0] * (scores[..., 0] - scores[..., 1])).numpy()


def described(config, problems: Problems, forget, kappa, zeta) -> dict[str, np.ndarray]:
    """Describe what networks do on R, on F and on fresh samples. Each of shape ``(..., cells)``."""
    margins = outputs(problems, kappa, zeta) * problems.y
    population = evaluate(problems, kappa, zeta, draws=config.draws)
    fresh = fresh_margins(problems, kappa, zeta, config.draws)
    beats = (margins[..., forget].numpy()[None] > fresh[..., None]).mean(axis=(0, -1))
    found = {
        "error": population.error,
        "test_margin": population.margin,
        "retain_margin": margins[..., ~forget].mean(-1),
        "forget_margin": margins[..., forget].mean(-1),
        "retain_right": (margins[..., ~forget] > 0).double().mean(-1),
        "forget_right": (margins[..., forget] > 0).double().mean(-1),
        "auc": torch.from_numpy(beats),
    }
    found["gap"] = found["forget_margin"] - found["test_margin"]
    return {name: value.numpy() for name, value in found.items()}


def changed(problems: Problems, forget, zeta, zeta0) -> dict[str, np.ndarray]:
    """Average the change of memorized noise over samples and the filters of either class."""
    own, other = by_class(zeta - zeta0, problems.y)
    return {
        "retain_own": own[..., ~forget].mean(-1).numpy(),
        "forget_own": own[..., forget].mean(-1).numpy(),
        "forget_opposite": other[..., forget].mean(-1).numpy(),
        "retain_opposite": other[..., ~forget].mean(-1).numpy(),
    }


def panels(config, seed: int) -> dict:
    """Follow both coefficients, and what they do, through unlearning by GD and by SAM."""
    found = {}
    for name, setting in unlearning_settings().items():
        problems = setting.problems([setting.signal] * (len(WAYS) + len(WIDER)), seed)
        forget = forgotten(setting.n)
        flat, sharp = starts(config, setting, problems[[0]], seed)
        start = joined([flat, flat, sharp, sharp] + [flat] * len(WIDER))
        u = torch.tensor([0.0, config.u, 0.0, config.u, *WIDER])
        steps = config.unlearning * setting.n // setting.size  # as many passes
        run = setting.train(
            problems,
            steps,
            u,
            slower=0.5,
            start=start,
            forget=forget,
            alpha=ALPHA,
            every=steps // 40,
            seed=seed,
        )
        path = described(config, problems, forget, run.path_kappa, run.path_zeta)
        path |= changed(problems, forget, run.path_zeta, start[1])
        ways = WAYS + tuple(f"gd-sam-{u:g}" for u in WIDER)
        found[name] = {"steps": run.path_steps[::5]} | {
            way: _way(path, run.path_steps.numpy(), cell) for cell, way in enumerate(ways)
        }
        again = [
            setting.train(problems[[0]], STEPS, u, stop_loss=0.05, forget=forget, seed=seed)
            for u in (0.0, config.u)
        ]
        end = described(config, problems[[0, 0]], forget, *joined(again))
        found[name]["retrained"] = {
            optimizer: {key: value[cell] for key, value in end.items()}
            for cell, optimizer in enumerate(("gd", "sam"))
        }
    return found


def _way(path: dict, steps: np.ndarray, cell: int) -> dict:
    """Return one cell's path, at each fifth time, and what it was where the gap closed."""
    own = {key: values[:, cell] for key, values in path.items()}
    when = crossing(steps, own["gap"], 0.0)
    closed = {key: np.interp(when, steps, values) for key, values in own.items()}
    return {
        "path": {key: values[::5] for key, values in own.items()},
        "closed": closed | {"steps": when},
    }


def alpha_grid(config) -> np.ndarray:
    """Return values of alpha, closer and closer to 1."""
    close = config.alphas // 3
    wide = np.linspace(0.05, 0.9, config.alphas - close - 1, endpoint=False)
    return np.r_[wide, 1 - np.geomspace(0.1, 1e-3, close), 1.0]


def alphas(config, seed: int) -> dict:
    """Find the least alpha from which on the test error stays small, at each budget of steps."""
    grid = torch.from_numpy(alpha_grid(config))
    first, second = config.alpha_samples
    short = [budget for budget in config.budgets if budget <= 2000]
    found = {}
    for ratio in config.alpha_dims:
        ends = ratio in (config.alpha_dims[0], config.alpha_dims[-1])
        budgets = config.budgets if ends else short
        setting = Setting(n=first, d=first * ratio)
        found[f"{first}-{ratio}"] = _least(config, setting, grid, budgets, seed)
    for ratio in config.alpha_dims[::2]:
        setting = Setting(n=second, d=second * ratio)
        found[f"{second}-{ratio}"] = _least(config, setting, grid, short, seed)
    middle = config.alpha_dims[len(config.alpha_dims) // 2]
    batch = Setting(n=second, d=second * middle, batch=second // 4)
    found["batch"] = _least(
        config, batch, grid, [4 * budget for budget in short if budget <= 500], seed
    )
    return found


def _least(config, setting: Setting, grid, budgets, seed: int) -> dict:
    problems = setting.problems([setting.signal] * len(grid), seed)
    forget = forgotten(setting.n)
    found = {"budgets": budgets}
    for name, first in zip(
        ("gd", "sam"), starts(config, setting, problems[[0]], seed), strict=True
    ):
        start = joined([first] * len(grid))
        u = 0.0 if name == "gd" else config.u
        options = {"slower": 0.5, "forget": forget, "alpha": grid, "start": start}
        path = along(setting, problems, budgets, u, **options)
        errors = [error(config, problems, at) for at in path]
        found[name] = [_from(grid.numpy(), values) for values in errors]
    return found


def _from(grid: np.ndarray, errors: np.ndarray) -> float:
    """Return the alpha from which on errors are small: the grid's least where all are."""
    return grid[0] if (errors <= HARMFUL).all() else crossing(grid, errors, HARMFUL)
