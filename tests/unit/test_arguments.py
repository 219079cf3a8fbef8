"""Checks of arguments that every room has: what is taken, and as what."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from saev_store.core.arguments import check_choice, check_count, check_flag, check_number
from saev_store.core.token_arrays import TokenArray
from saev_store.errors import ArgumentError


def all_refused(check: Callable[..., object], *values: object, **options: object) -> None:
    for value in values:
        with pytest.raises(ArgumentError) as caught:
            check(value, name="here", **options)
        assert caught.value.where == "here"


def test_check_number_takes_real_numbers_of_more_than_zero() -> None:
    for value in (3, 3.0, np.float32(3), np.int8(3), np.uint64(3), 5e-324, math.inf, 10**300):
        found = check_number(value, name="here")
        assert (type(found), found) == (float, float(value))
    assert check_number(-0.0, name="here", zero_ok=True) == 0
    wrong = (-1, -5e-324, math.nan, -math.inf, True, np.True_, "3", None, 3j, 10**400, [3])
    all_refused(check_number, *wrong, 0, 0.0, np.int64(0))
    all_refused(check_number, *wrong, zero_ok=True)


def test_check_choice_takes_one_of_the_texts() -> None:
    check_choice("two", ("one", "two"), name="here")
    for value in ("three", "", "on", 1, None, ["one"], b"one", ("one", "two")):
        with pytest.raises(ArgumentError):
            check_choice(value, ("one", "two"), name="here")


def test_check_flag_takes_booleans_and_none() -> None:
    for value in (True, np.True_, False, np.False_):
        assert check_flag(value, name="here") is check_flag(value, name="here", other=None) is bool(value)
    assert check_flag(None, name="here", other=None) is None
    all_refused(check_flag, 0, 1, "no", None, 1.0, np.array([True, False]))
    all_refused(check_flag, 0, "no", np.zeros(0), other=None)


def test_check_count_takes_integers_within_bounds() -> None:
    for value in (1, np.int32(1), 2**63 - 1):
        found = check_count(value, name="here")
        assert (type(found), found) == (int, int(value))
    all_refused(check_count, 0, -1, 2**63, True, 1.0, "1", None)
    assert [check_count(value, name="here", least=-2, most=3) for value in (-2, 0, 3)] == [-2, 0, 3]
    all_refused(check_count, -3, 4, "0", least=-2, most=3)


def test_token_arrays_of_bools_hold_zero_and_one_and_others_any_bits() -> None:
    mask = TokenArray("mask", "bool")
    for valid in (b"", b"\0", b"\1", b"\0\1\1", bytearray(b"\1"), memoryview(b"\0\1")):
        assert mask.is_valid(valid)
    for wrong in (b"\2", b"\xff", b"\0\1\2", b"\2\0"):
        assert not mask.is_valid(wrong)
        assert TokenArray("group", "uint8").is_valid(wrong)
        assert TokenArray("score", "float32").is_valid(wrong * 4)


def test_token_arrays_have_names_and_dtypes_of_the_protocol() -> None:
    assert TokenArray("a" * 64, "bool").file_name == "a" * 64 + ".bin"
    for name, dtype in (("a" * 65, "bool"), ("x", "float64"), ("x", "int16"), ("x", "")):
        with pytest.raises(ArgumentError) as caught:
            TokenArray(name, dtype)
        assert caught.value.where == "token_arrays"
