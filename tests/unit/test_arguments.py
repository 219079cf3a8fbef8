"""Checks of arguments that every room has: what is taken, and as what."""

from __future__ import annotations

import math

import numpy as np
import pytest

from saev_store.core.arguments import check_choice, check_count, check_flag, check_number
from saev_store.core.token_arrays import TokenArray
from saev_store.errors import ArgumentError


def refused(message: str):
    return pytest.raises(ArgumentError, match=rf"^here: here is .*; it must be {message}$")


@pytest.mark.parametrize("value", [3, 3.0, np.float32(3), np.int8(3), np.uint64(3)])
@pytest.mark.parametrize("zero_ok", [False, True])
def test_numbers_are_floats(value: object, zero_ok: bool):
    found = check_number(value, name="here", zero_ok=zero_ok)
    assert (type(found), found) == (float, 3.0)


def test_small_and_large_numbers():
    for value in (5e-324, 0.5, 1, math.inf, 10**300):
        assert check_number(value, name="here") == float(value)
    for zero in (0, 0.0, -0.0, np.int64(0)):
        assert check_number(zero, name="here", zero_ok=True) == 0
        with refused("a number of more than 0"):
            check_number(zero, name="here")


@pytest.mark.parametrize(
    "value", [-1, -5e-324, math.nan, -math.inf, True, np.True_, "3", None, 3j, 10**400, [3]], ids=repr
)
def test_what_is_no_number(value: object):
    with refused("a number of more than 0"):
        check_number(value, name="here")
    with refused("a number of at least 0"):
        check_number(value, name="here", zero_ok=True)


def test_choices():
    for choice in ("one", "two"):
        check_choice(choice, ("one", "two"), name="here")
    for value in ("three", "", "on", 1, None, ["one"], b"one", ("one", "two")):
        with refused("'one' or 'two'"):
            check_choice(value, ("one", "two"), name="here")


@pytest.mark.parametrize("value", [True, np.True_, False, np.False_])
def test_booleans(value: object):
    assert check_flag(value, name="here") is bool(value)
    assert check_flag(value, name="here", other=None) is bool(value)


def test_what_is_no_boolean():
    assert check_flag("auto", name="here", other="auto") == "auto"
    assert check_flag(None, name="here", other=None) is None
    for value in (0, 1, "no", None, 1.0):
        with refused("True or False"):
            check_flag(value, name="here")
    for value in (0, "no", "Auto", None):
        with refused("True, False or 'auto'"):
            check_flag(value, name="here", other="auto")


def test_counts():
    for value in (1, np.int32(1), 2**63 - 1):
        found = check_count(value, name="here")
        assert (type(found), found) == (int, int(value))
    for value in (0, -1, 2**63, True, 1.0, "1", None):
        with refused(rf"an integer from 1 to {2**63 - 1}"):
            check_count(value, name="here")
    assert [check_count(value, name="here", least=-2, most=3) for value in (-2, 0, 3)] == [-2, 0, 3]
    for value in (-3, 4, "0"):
        with refused("an integer from -2 to 3"):
            check_count(value, name="here", least=-2, most=3)


def test_which_bytes_are_values_of_an_array():
    """Booleans are 0 or 1; all others take any bits."""
    mask = TokenArray("mask", "bool")
    for valid in (b"", b"\0", b"\1", b"\0\1\1", bytearray(b"\1"), memoryview(b"\0\1")):
        assert mask.is_valid(valid)
    for wrong in (b"\2", b"\xff", b"\0\1\2", b"\2\0"):
        assert not mask.is_valid(wrong)
        assert TokenArray("group", "uint8").is_valid(wrong)
        assert TokenArray("score", "float32").is_valid(wrong * 4)


def test_an_array_is_no_boolean():
    for value in (np.array([True, False]), np.zeros(0)):
        with refused("True, False or None"):
            check_flag(value, name="here", other=None)


def test_names_and_dtypes_of_token_arrays_end_where_the_rule_does():
    assert TokenArray("a" * 64, "bool").file_name == "a" * 64 + ".bin"
    for name, dtype in (("a" * 65, "bool"), ("x", "float64"), ("x", "int16"), ("x", "")):
        with pytest.raises(ArgumentError) as caught:
            TokenArray(name, dtype)
        assert caught.value.where == "token_arrays"
