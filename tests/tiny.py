"""A throw-away experiment for tests.

The environment tells it how to misbehave, for that reaches worker processes, unlike patches. It
leaves torch alone unless asked, so that they start at once.
"""

import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

from flatbook.experiments import Outcome
from flatbook.results import summarise
from flatbook.units import units


@dataclass(frozen=True)
class Config:
    seeds: int
    tosses: int = 1000


CONFIGS = {"quick": Config(3), "laptop": Config(5), "gpu": Config(8)}


def run(config, *, checkpoint=None, progress=False, workers=0):
    tasks = {f"seed-{seed}": (seed, config.tosses) for seed in range(config.seeds)}
    heads = units(checkpoint, tasks, toss, config=config, workers=workers, progress=progress)
    return Outcome({"heads": summarise(list(heads.values()))}, seeds=range(config.seeds))


def toss(task):
    seed, tosses = task
    if log := os.environ.get("TINY_LOG"):
        with Path(log).open("a") as file:
            file.write(f"{seed} {os.getpid()}\n")
    time.sleep(float(os.environ.get("TINY_SLEEP", "0")))
    behaviour = os.environ.get(f"TINY_{seed}")
    if behaviour == "raise":
        raise RuntimeError(f"seed {seed} failed")
    if behaviour == "value":
        raise ValueError(f"seed {seed} is unlucky.")
    if behaviour == "die":
        os._exit(1)
    if behaviour == "threads":
        import torch

        return torch.get_num_threads()
    dice = random.Random(seed)
    return sum(dice.random() < 0.5 for _ in range(tosses)) / tosses
