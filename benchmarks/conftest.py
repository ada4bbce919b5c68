"""One process, one torch thread, the same inputs for every contender."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture
def compare(benchmark):
    """Time a function by the median of its rounds, under a group and a contender's name."""

    def compare(group, name, function, *, rounds, warmup=1):
        benchmark.group = group
        benchmark.name = name
        return benchmark.pedantic(function, rounds=rounds, warmup_rounds=warmup)

    return compare
