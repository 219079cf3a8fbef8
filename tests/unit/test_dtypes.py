"""Names of dtypes, and numbers that are converted, against `ml_dtypes` and NumPy."""

from __future__ import annotations

import sys
import types
import warnings

import ml_dtypes
import numpy as np
import pytest

from saev_store.core.dtypes import (
    FLOAT32,
    ITEMSIZES,
    LARGEST,
    are_finite,
    convert,
    converted,
    dtype_name,
    narrowed,
    numpy_dtype,
    read_dtype,
    stored_as,
)
from saev_store.errors import ArgumentError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"float32": np.dtype("<f4"), "bfloat16": BFLOAT16, "float16": np.dtype("<f2"), "float64": np.dtype("<f8")}


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("byteorder", ["little", "big"])
def test_names_are_little_endian_dtypes(name: str, byteorder: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "byteorder", byteorder)
    assert numpy_dtype(name) == DTYPES[name]
    assert numpy_dtype(name).isnative is (sys.byteorder == byteorder)
    assert name == "float64" or numpy_dtype(name).itemsize == ITEMSIZES[name]


def test_limits():
    assert LARGEST.keys() == ITEMSIZES.keys()
    for name in ITEMSIZES:
        limits = ml_dtypes.finfo(DTYPES[name])
        assert float(limits.max) == LARGEST[name] == np.float32(LARGEST[name])


@pytest.mark.parametrize("stored", ITEMSIZES)
def test_what_a_reader_may_ask_for(stored: str):
    assert read_dtype("stored", stored) == DTYPES[stored]
    for name, dtype in DTYPES.items():
        assert read_dtype(name, stored) == dtype
        assert read_dtype(dtype, stored) == dtype
    assert read_dtype(np.float16, stored) == DTYPES["float16"]


@pytest.mark.parametrize(
    "asked",
    ["int8", "float8_e4m3fn", "", "Stored", np.int32, np.dtype(">i4"), {"a": 1}, [], (2,), int, None, 4],
    ids=repr,
)
def test_what_a_reader_may_not_ask_for(asked: object):
    with pytest.raises(ArgumentError) as caught:
        read_dtype(asked, "float32")
    assert caught.value.where == "dtype"


def test_the_name_of_a_dtype():
    """That of torch by its text, without importing it."""
    torch_dtype = type("dtype", (), {"__module__": "torch", "__str__": lambda _: "torch.bfloat16"})()
    named = {
        "bfloat16": ["bfloat16", BFLOAT16, ml_dtypes.bfloat16, torch_dtype],
        "float32": [np.float32, np.dtype(">f4"), "float32"],
        "float64": [float],
        "int32": [np.int32, np.dtype("<i4")],
        "torch.bfloat16": ["torch.bfloat16"],
    }
    for name, asked in named.items():
        assert [dtype_name(one) for one in asked] == [name] * len(asked)
    assert [dtype_name(none) for none in (None, 7, 1.5, object(), (2,))] == [None] * 5


def numbers(dtype: np.dtype) -> np.ndarray:
    """All bit patterns of 16 bits, or of 32 bits some near each of those of bfloat16: halves of its last place, and NaNs."""
    if dtype.itemsize == 2:
        return np.arange(1 << 16, dtype=np.uint16).view(dtype).reshape(256, 256)
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    found = (upper | np.array([0, 1, 0x1000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).view(np.float32)
    with np.errstate(all="ignore"):
        return found if dtype == FLOAT32 else found.astype(dtype)


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_numbers_are_rounded_to_nearest_even(source: str, target: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    given = numbers(DTYPES[source])
    with np.errstate(all="ignore"):
        expected = given.astype(DTYPES[target])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = converted(given, DTYPES[target])
        assert found.dtype == DTYPES[target]
        assert found.tobytes() == expected.tobytes()
        assert (found is given) is (source == target)
        stored = stored_as(given, DTYPES[target])
        assert stored.dtype == DTYPES[target]
        assert stored.tobytes() == expected.tobytes()
        assert (stored is given) is (source == target)
        strided = np.zeros((given.shape[0], 2 * given.shape[1]), DTYPES[target])
        convert(given[::-1], strided[:, ::2])
    assert strided[:, ::2].tobytes() == expected[::-1].tobytes()
    assert not strided[:, 1::2].any()


class Tensor:
    """As much of a tensor as `convert` uses; counts copies."""

    n_copies = 0

    def __init__(self, array: np.ndarray) -> None:
        assert min(array.strides) > 0  # torch has no others, also of an axis of one position
        self.array = array

    def copy_(self, other: Tensor) -> None:
        Tensor.n_copies += 1
        np.copyto(self.array, other.array)


def test_torch_widens_float16_where_it_may(monkeypatch: pytest.MonkeyPatch):
    """Contiguous memory that may be written: torch warns of other memory, or does not take it."""
    torch = types.ModuleType("torch")
    torch.from_numpy = Tensor  # pyright: ignore[reportAttributeAccessIssue]  # a module of its own
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(Tensor, "n_copies", 0)
    given, out = numbers(DTYPES["float16"])[:4], np.zeros((4, 256), np.float32)
    convert(given, out)
    assert Tensor.n_copies == 1
    expected = given.astype(np.float32)
    assert stored_as(given, FLOAT32).tobytes() == expected.tobytes()
    assert Tensor.n_copies == 1  # what is stored does not depend on torch
    assert out.tobytes() == expected.tobytes()
    backwards, target = given.copy()[::-4], np.zeros((4, 256), np.float32)[::-4]
    convert(backwards, target)
    assert Tensor.n_copies == 2
    assert target.tobytes() == backwards.astype(np.float32).tobytes()
    fixed, wide = given.copy(), np.zeros((4, 512), np.float32)
    fixed.flags.writeable = False
    for source, target in (
        (fixed, np.zeros((4, 256), np.float32)),
        (given, wide[:, ::2]),
        (np.repeat(given, 2, axis=1)[:, ::2], np.zeros((4, 256), np.float32)),
    ):
        convert(source, target)
        assert target.tobytes() == expected.tobytes()
    for source, dtype in ((given, np.float64), (expected, np.float16), (expected, BFLOAT16)):
        with np.errstate(all="ignore"):
            assert converted(source, np.dtype(dtype)).tobytes() == source.astype(dtype).tobytes()
    assert Tensor.n_copies == 2


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_one_number_that_is_not_finite_is_found(name: str):
    """Each of all bit patterns by itself, and at each place among finite ones."""
    every = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(all="ignore"):
        expected = np.isfinite(every.view(DTYPES[name]))
    assert [are_finite(bits, name) for bits in every.reshape(-1, 1)] == expected.tolist()
    finite, others = every[expected], every[~expected]
    assert are_finite(finite, name)
    assert are_finite(finite[:0], name)
    assert are_finite(np.empty((3, 0), np.uint16), name)
    for place in range(12):
        some = np.resize(finite, (3, 2, 2))
        some.reshape(-1)[place] = others[place * 20]
        assert not are_finite(some, name)
        assert not are_finite(some[:, ::-1], name)


def rounded_once(numbers: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The nearest number of 16 bits, of two equally near ones the even one: by comparing with all of them."""
    bits = np.arange(1 << 15, dtype=np.uint16)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values = bits.view(dtype).astype(np.float64)
    values = values[np.isfinite(values)]
    middles = (values[:-1] + values[1:]) / 2  # exact
    size = np.abs(numbers)
    low, high = (np.searchsorted(middles, size, side=side) for side in ("left", "right"))
    return np.where(low % 2 == 0, low, high).astype(np.uint16) | np.signbit(numbers).astype(np.uint16) << 15


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_float64_on_its_way_to_16_bits_is_rounded_once(name: str):
    """Near the middle of two numbers of 16 bits, where a first rounding to float32 would decide."""
    values = np.arange(0x0001, 0x7B00, 997, dtype=np.uint16).view(DTYPES[name]).astype(np.float64)
    following = np.arange(0x0002, 0x7B01, 997, dtype=np.uint16).view(DTYPES[name]).astype(np.float64)
    middle = (values + following) / 2
    size = np.concatenate([values, middle, middle * (1 - 2**-40), middle * (1 + 2**-40)])
    given = np.stack([size, -size])
    assert (given.astype(np.float32).astype(DTYPES[name]).view(np.uint16) != rounded_once(given, DTYPES[name])).any()
    found = narrowed(given, name)
    assert found.dtype == np.float32
    assert np.array_equal(found.astype(DTYPES[name]).view(np.uint16), rounded_once(given, DTYPES[name]))
    assert narrowed(given[:, ::2], name).tobytes() == found[:, ::2].tobytes()


def test_dtypes_of_torch_are_understood():
    torch = pytest.importorskip("torch")
    assert read_dtype(torch.bfloat16, "float32") == BFLOAT16
    assert read_dtype(torch.float64, "float32") == np.float64
    for asked in (torch.int32, torch.float8_e4m3fn, torch.device("cpu"), torch.zeros(1)):
        with pytest.raises(ArgumentError):
            read_dtype(asked, "float32")
