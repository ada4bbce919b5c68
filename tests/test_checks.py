import math

import numpy as np
import pytest
import torch

from flatbook import checks


def test_choice_returns_what_is_allowed():
    assert checks.choice("kind", "flat", ("flat", "poly")) == "flat"


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("cifar", "Did you mean 'cifar10'"),
        ("CIFAR-10", "Did you mean 'cifar10'"),
        ("sam", "Did you mean 'SAM'"),
        ("zzz", r"'zzz'\.$"),
        (None, r"None\.$"),
        (["SAM"], r"\['SAM'\]"),
    ],
)
def test_choice_names_what_came_and_the_nearest(value, hint):
    with pytest.raises(ValueError, match=rf"^name must be one of cifar10, SAM; got .*{hint}"):
        checks.choice("name", value, ("cifar10", "SAM"))


@pytest.mark.parametrize("check", [checks.positive, checks.non_negative, checks.fraction])
@pytest.mark.parametrize("value", [1, 0.5, np.float32(0.5), np.int64(1), np.float64(0.25)])
def test_numbers_come_back_as_floats(check, value):
    result = check("rho", value)
    assert type(result) is float
    assert result == value


@pytest.mark.parametrize("check", [checks.positive, checks.non_negative, checks.fraction])
@pytest.mark.parametrize(
    "value", [-1, -1e-300, math.nan, math.inf, 10**400, True, "1", None, 1j, [0.5]]
)
def test_numbers_out_of_range_are_refused(check, value):
    with pytest.raises(ValueError, match=r"^rho must be a .*number .*; got"):
        check("rho", value)


def test_bounds_are_where_the_messages_say():
    assert checks.non_negative("x", 0) == checks.fraction("x", 0) == 0
    assert checks.fraction("x", 1) == 1
    with pytest.raises(ValueError, match=r"above 0; got 0\."):
        checks.positive("x", 0)
    with pytest.raises(ValueError, match=r"in \[0, 1\]; got 1.001"):
        checks.fraction("x", 1.001)


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_count_returns_an_int(value):
    result = checks.count("n", value, at_least=3, at_most=3)
    assert type(result) is int
    assert result == 3


@pytest.mark.parametrize("value", [0, -1, 1.0, np.float64(2), "2", True, np.True_, None])
def test_count_refuses_what_is_not_a_whole_number_from_one(value):
    with pytest.raises(ValueError, match="n must be a whole number of at least 1; got"):
        checks.count("n", value)


def test_count_names_both_bounds():
    with pytest.raises(ValueError, match="n must be a whole number from 2 to 4; got 5"):
        checks.count("n", 5, at_least=2, at_most=4)


def test_tensor_takes_arrays_as_they_come():
    values = np.arange(6.0).reshape(2, 3)
    frozen = values.copy()
    frozen.flags.writeable = False
    expected = torch.from_numpy(values)
    assert checks.tensor("x", values, ("rows", 3)).equal(expected)
    assert checks.tensor("x", values.tolist(), (2, None)).double().equal(expected)
    assert checks.tensor("x", values[::-1], ("rows", 3)).equal(expected.flip(0))
    assert checks.tensor("x", frozen, ("rows", 3)).equal(expected)
    assert checks.tensor("x", expected, ("rows", 3)) is expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("abc", "x must be a tensor or array of numbers; got str"),
        (None, "x must be a tensor or array of numbers; got NoneType"),
        ([[1.0], [1.0, 2.0]], "x must be a tensor or array of numbers; got list"),
        (np.array([object()]), "x must be .*; got an array of object, which torch lacks"),
        (np.zeros(2, ">f4"), "x must be .*; got an array of >f4, which torch lacks"),
        (torch.zeros(3), r"x must have shape \(rows, 3\); got \(3,\)"),
        (torch.zeros(2, 4), r"x must have shape \(rows, 3\); got \(2, 4\)"),
        (torch.zeros(0, 3), r"x must not be empty; got shape \(0, 3\)"),
        (
            torch.zeros(2, 3, dtype=torch.int64),
            "x must hold floating-point numbers; got torch.int64",
        ),
        (torch.zeros(2, 3, dtype=torch.cfloat), "x must hold floating-point numbers"),
        (torch.full((2, 3), torch.nan), "x must be finite; got inf or nan"),
        (torch.full((2, 3), torch.inf), "x must be finite; got inf or nan"),
        (torch.tensor([[torch.inf, 0, -torch.inf]]), "x must be finite; got inf or nan"),
    ],
)
def test_tensor_refuses(value, message):
    with pytest.raises(ValueError, match=message):
        checks.tensor("x", value, ("rows", 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_tensor_takes_finite_numbers_whose_sum_is_not(dtype):
    value = torch.full((2, 3), torch.finfo(dtype).max, dtype=dtype)
    assert checks.tensor("x", value, ("rows", 3)) is value


def test_tensor_writes_a_free_dimension_as_any():
    with pytest.raises(ValueError, match=r"shape \(any, 3\)"):
        checks.tensor("x", torch.zeros(3), (None, 3))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_labels_come_back_as_int64(dtype):
    result = checks.labels("y", np.array([0, 2, 1], dtype=dtype), 3, samples=3)
    assert result.dtype == torch.int64
    assert result.tolist() == [0, 2, 1]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([0, 3], r"y must lie in 0\.\.2, one label per sample; got 0\.\.3"),
        ([-1, 2], r"y must lie in 0\.\.2, one label per sample; got -1\.\.2"),
        ([0.0, 1.0], "y must hold whole numbers; got torch.float32"),
        ([True, False], "y must hold whole numbers; got torch.bool"),
        ([0, 1, 2], r"y must have shape \(2\); got \(3,\)"),
        ([[0, 1]], r"y must have shape \(2\); got \(1, 2\)"),
    ],
)
def test_labels_refuse(value, message):
    with pytest.raises(ValueError, match=message):
        checks.labels("y", value, 3, samples=2)


def test_a_module_is_one_and_not_its_class():
    layer = torch.nn.Linear(1, 1)
    assert checks.module("model", layer) is layer
    with pytest.raises(ValueError, match="model must be a torch module; got the class Linear"):
        checks.module("model", torch.nn.Linear)
    with pytest.raises(ValueError, match="model must be a torch module; got NoneType"):
        checks.module("model", None)


def test_labels_refuse_none_at_all():
    with pytest.raises(ValueError, match="y must not be empty"):
        checks.labels("y", torch.zeros(0, dtype=torch.int64), 3)


def test_instance():
    assert checks.instance("n", 3, int, "len") == 3
    with pytest.raises(ValueError, match=r"^n must be what len returns, int; got str\.$"):
        checks.instance("n", "3", int, "len")


def test_words():
    assert checks.words("w", ("a", "b"), ("a", "b", "c")) == ["a", "b"]
    with pytest.raises(ValueError, match=r"^w must be a list of a, b; got str\.$"):
        checks.words("w", "a", ("a", "b"))
    with pytest.raises(ValueError, match=r"^w must be one of a, b; got 3\.$"):
        checks.words("w", ["a", 3], ("a", "b"))
    with pytest.raises(ValueError, match=r"^w must not repeat itself; got a, a\.$"):
        checks.words("w", ["a", "a"], ("a", "b"))


def test_finite_and_values_on_one_line():
    assert checks.finite("x", -2) == -2.0
    with pytest.raises(ValueError, match=r"^x must be a finite number; got inf\.$"):
        checks.finite("x", math.inf)
    with pytest.raises(
        ValueError, match=r"^n must be a whole number of at least 1; got .*\.$"
    ) as e:
        checks.count("n", np.zeros((3, 3)))
    assert "\n" not in str(e.value)
