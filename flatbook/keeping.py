"""A folder that keeps what finished members of one ensemble answered."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from flatbook import checkpoints
from flatbook.archives import checksum
from flatbook.config import described
from flatbook.members import Answers, Plan


def identity(plan: Plan, model: nn.Module, backend: str) -> dict:
    """Return what two ensembles have in common if their logits are the same bit for bit.

    Args:
        plan: The ensemble.
        model: Its first member, untrained.
        backend: What trains it.
    """
    here = {} if backend == "dask" else {"device": plan.device}
    if backend in ("loop", "vmap"):
        here["threads"] = torch.get_num_threads()
    queries = plan.queries
    if callable(queries):
        queries = described(queries)
    elif queries is not None and not isinstance(queries, str):
        queries = ", ".join(map(described, queries))
    weights = [t.double() if t.is_floating_point() else t for t in model.state_dict().values()]
    config = plan.config.described()
    return (
        {"backend": backend, **here}
        | config
        | {
            "torch": str(torch.__version__),
            "data": checksum(plan.x, plan.y, *(() if plan.eval_x is None else (plan.eval_x,))),
            "design": checksum(plan.design),
            "model": checkpoints.layout(model),
            "layers": hashlib.sha256(repr(model).encode()).hexdigest(),
            "initial weights": checksum(*weights),
            "augment of queries": queries,
        }
    )


def keep(folder: Path, whose: dict, member: int, answers: Answers) -> None:
    """Write what a member answered; a kill at any moment leaves a whole file or none."""
    state = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in answers._asdict().items()
    }
    checkpoints.save(folder / f"member-{member:05d}.pt", whose | {"member": member}, state)


def finished(folder: Path, whose: dict) -> Iterator[tuple[int, Answers]]:
    """Yield what members answered, one file after another.

    Raises:
        CheckpointError: If a file is damaged, or of another ensemble.
    """
    for path in sorted(folder.glob("member-*.pt")):
        digits = path.stem.removeprefix("member-")
        member = int(digits) if digits.isdecimal() else None
        state = checkpoints.load(path, whose | {"member": member})
        try:
            answers = Answers(**state)
        except TypeError as error:
            raise checkpoints.damaged(path) from error
        arrays = [None if t is None else t.numpy() for t in answers[:2]]
        yield member, Answers(*arrays, answers.epochs)
