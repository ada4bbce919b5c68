import random

import numpy as np
import pytest
import torch

from flatbook import runtime


def test_device_follows_the_variable(monkeypatch):
    monkeypatch.setenv("FLATBOOK_DEVICE", "cpu")
    assert runtime.device() == torch.device("cpu")


def test_device_without_the_variable_is_one_that_computes(monkeypatch):
    monkeypatch.delenv("FLATBOOK_DEVICE", raising=False)
    assert torch.ones(2, device=runtime.device()).sum() == 2
    assert (runtime.device().type == "cuda") == torch.cuda.is_available()


@pytest.mark.parametrize("name", ["abacus", "cuda:99", "cpu:x"])
def test_device_refuses_what_the_machine_lacks(monkeypatch, name):
    monkeypatch.setenv("FLATBOOK_DEVICE", name)
    with pytest.raises(ValueError, match=f"FLATBOOK_DEVICE must name a device .* got '{name}'"):
        runtime.device()


@pytest.mark.parametrize(
    ("value", "expected"), [(None, "quick"), ("", "quick"), ("laptop", "laptop"), ("gpu", "gpu")]
)
def test_scale_follows_the_variable(monkeypatch, value, expected):
    if value is None:
        monkeypatch.delenv("FLATBOOK_SCALE", raising=False)
    else:
        monkeypatch.setenv("FLATBOOK_SCALE", value)
    assert runtime.scale() == expected


def test_scale_refuses_an_unknown_one(monkeypatch):
    monkeypatch.setenv("FLATBOOK_SCALE", "Laptop")
    with pytest.raises(ValueError, match=r"FLATBOOK_SCALE must be one of quick.*mean 'laptop'"):
        runtime.scale()


def draws():
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


@pytest.fixture
def global_generators():
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])


@pytest.mark.usefixtures("global_generators")
def test_seed_everything_repeats_all_three_generators():
    assert runtime.seed_everything(7) == 7
    first = draws()
    runtime.seed_everything(7)
    assert draws() == first
    runtime.seed_everything(8)
    assert all(a != b for a, b in zip(draws(), first, strict=True))


@pytest.mark.parametrize("seed", [-1, 2**32, 0.5, "1", None, True])
def test_seed_everything_refuses(seed):
    with pytest.raises(ValueError, match="seed must be a whole number from 0 to 4294967295; got"):
        runtime.seed_everything(seed)


def test_forked_seed_repeats_inside_and_leaves_no_trace_outside():
    before = torch.get_rng_state()
    with runtime.forked_seed(3):
        inside = torch.rand(4)
    assert torch.get_rng_state().equal(before)
    with runtime.forked_seed(3):
        assert torch.rand(4).equal(inside)


def test_forked_seed_restores_after_an_exception():
    before = torch.get_rng_state()

    def failing():
        with runtime.forked_seed(3):
            torch.rand(4)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert torch.get_rng_state().equal(before)


def test_generator_repeats_and_leaves_the_global_one_alone():
    before = torch.get_rng_state()
    first, again, other = (torch.rand(3, generator=runtime.generator(s)) for s in (5, 5, 6))
    assert first.equal(again)
    assert not first.equal(other)
    assert torch.get_rng_state().equal(before)


def test_the_largest_seed_is_taken():
    largest = 2**64 - 1
    first = torch.rand(3, generator=runtime.generator(largest))
    with runtime.forked_seed(largest):
        assert torch.rand(3).equal(first)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, None])
def test_seeds_of_torch_are_bounded(seed):
    with pytest.raises(
        ValueError, match="seed must be a whole number from 0 to 1844674407370955161"
    ):
        runtime.generator(seed)
    with pytest.raises(ValueError, match="seed must be a whole number"), runtime.forked_seed(seed):
        pass


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_widened_is_float64_and_exact(dtype):
    value = torch.tensor([0.1, -3.0], dtype=dtype)
    wide = runtime.widened(value)
    assert wide.dtype == torch.float64
    assert wide.to(dtype).equal(value)


def test_memory_is_that_of_a_machine_that_holds_torch():
    assert runtime.memory() > 2**28
