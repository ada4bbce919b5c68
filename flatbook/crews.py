"""Who trains the members of an ensemble: this process, several processes, or a cluster."""

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError
from contextlib import closing

import joblib
import torch

from flatbook.members import Answers, Plan, train_member, train_member_on_one_thread
from flatbook.vectorised import fit_together

Outcomes = Iterator[tuple[int, Answers]]

_AT_ONCE = 64
_DIED = (
    "A worker process died, perhaps for want of memory; members finished before are kept if out "
    "was given: run the same again, with fewer workers."
)
_GONE = (
    "the Dask scheduler is gone; members finished before are kept if out was given: run the same "
    "again, on another cluster."
)
_PATIENCE = 10  # seconds for a scheduler to answer
_LOSSES = 3  # of all workers at once, with nothing finished in between


def in_turn(plan: Plan, members: Sequence[int]) -> Outcomes:
    """Train members here, one after another, with the threads torch has."""
    for member in members:
        yield member, train_member(plan, member)


def at_once(plan: Plan, members: Sequence[int], tick: Callable[[int], object]) -> Outcomes:
    """Train members here, 64 at a time, with `flatbook.vectorised`.

    The groups are always the same, whatever is left to do, lest sums round otherwise. After each
    epoch ``tick`` is called with how many of the members it was one of.
    """
    x, y = torch.from_numpy(plan.x), torch.from_numpy(plan.y).to(plan.device)
    for start in range(0, len(plan.design), _AT_ONCE):
        group = range(start, min(start + _AT_ONCE, len(plan.design)))
        wanted = sorted(set(group) & set(members))
        if not wanted:
            continue
        models = [plan.made(member).to(plan.device) for member in group]
        like = next(models[0].parameters())
        rows, seeds = plan.design[group.start : group.stop], plan.seeds[group.start : group.stop]
        fit_together(
            models,
            x.to(like.device, like.dtype),
            y,
            rows,
            plan.config,
            seeds,
            tick=lambda _, new=len(wanted): tick(new),
        )
        for member in wanted:
            yield member, plan.answers(models[member - start], plan.config.epochs)


def by_joblib(plan: Plan, members: Sequence[int], workers: int) -> Outcomes:
    """Train members in processes of one torch thread each; yield them as they are done.

    Arrays reach the processes as files mapped into memory, once for all members.
    """
    parent = os.getpid()
    tasks = (joblib.delayed(_work)(plan, member, parent) for member in members)
    with joblib.parallel_config("loky", n_jobs=workers, inner_max_num_threads=1):
        outcomes = joblib.Parallel(batch_size=1, return_as="generator_unordered")(tasks)
    with closing(outcomes):
        try:
            yield from outcomes
        except BrokenExecutor as error:
            raise RuntimeError(_DIED) from error


def by_dask(plan: Plan, members: Sequence[int], cluster) -> Outcomes:
    """Train members on a Dask cluster; yield them as they are done.

    The data go to each of its processes once. What a lost process was training is begun again on
    another. If all that have the data are lost at once, those that come next are given it anew.
    """
    try:
        from distributed import Client, KilledWorker, as_completed
    except ImportError as error:
        raise ImportError(
            'backend="dask" needs Dask, here and on the cluster: pip install "flatbook[cluster]".'
        ) from error
    own = not isinstance(cluster, Client)
    client = _connected(cluster) if own else cluster
    left, futures, losses = list(members), {}, 0
    try:
        while left:
            if not client.nthreads():
                warnings.warn("waiting for a worker: the cluster has none.", stacklevel=2)
                client.wait_for_workers(1)
            shared = client.scatter(plan, broadcast=True, hash=False)
            for member in left:
                future = client.submit(train_member_on_one_thread, shared, member, pure=False)
                futures[future] = member
            try:
                for future in as_completed(list(futures)):
                    answers = future.result()
                    losses = 0
                    left.remove(futures[future])
                    yield futures.pop(future), answers
                    future.release()
            except CancelledError as error:  # for want of the data, or of a scheduler
                if client.status != "running":
                    raise ConnectionError(_GONE) from error
                losses += 1
                if losses > _LOSSES:
                    raise RuntimeError(_DIED) from error
                client.cancel(list(futures))
                futures.clear()
            except KilledWorker as error:
                raise RuntimeError(_DIED) from error
    finally:
        if client.status == "running":
            client.cancel(list(futures))
        if own:
            client.close()


def _connected(cluster):
    """Return a client of a cluster, or say within seconds that there is none."""
    from distributed import Client

    try:
        if cluster == "":  # for which Dask would start a cluster of its own
            raise ValueError
        return Client(cluster, timeout=_PATIENCE)
    except (ValueError, TypeError) as error:
        raise ValueError(
            'cluster must be the address of a Dask scheduler, such as "tcp://10.0.0.1:8786"; '
            f"got {cluster!r}."
        ) from error
    except Exception as error:  # what else answers there fails in many ways
        raise ConnectionError(f"no Dask scheduler answers at {cluster}.") from error


def _work(plan: Plan, member: int, parent: int) -> tuple[int, Answers]:
    if os.getpid() != parent:
        _follow(parent)
    return member, train_member_on_one_thread(plan, member)


def _follow(parent: int) -> None:
    """End this process with its parent: a killed one cannot tell its workers to stop."""
    name = f"follow {parent}"
    if any(thread.name == name for thread in threading.enumerate()):
        return

    def follow():
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=follow, name=name, daemon=True).start()
