"""Index expressions against NumPy itself: the same elements, the same shape, an IndexError where NumPy has one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import component

from saev_store.core.indexing import Block, Progression, parse_axis, parse_key
from saev_store.errors import SelectionError

SHAPE = (6, 3, 4, 5)
DENSE = np.arange(np.prod(SHAPE)).reshape(SHAPE)


def read(key: object) -> np.ndarray:
    """What the parsed key means, taken from a dense array."""
    request = parse_key(key, SHAPE)
    if isinstance(request, Block):
        axes = [axis.positions() if isinstance(axis, Progression) else axis for axis in request.axes]
        return DENSE[np.ix_(*axes)].reshape(request.shape)
    if request.last is None:
        return np.broadcast_to(DENSE[request.coords], request.shape)
    return np.broadcast_to(DENSE[request.coords][..., request.last.positions()], request.shape)


@st.composite
def keys(draw: st.DrawFn) -> object:
    n_items = draw(st.integers(0, 5))
    at = draw(st.integers(0, n_items + 3))  # beyond the items: no ellipsis
    axes = [min(i if i < at else i + 4 - n_items, 3) for i in range(n_items)]
    items: list[object] = [draw(component(SHAPE[max(axis, 0)])) for axis in axes]
    if at <= n_items:
        items.insert(at, ...)
    if len(items) == 1 and draw(st.booleans()):
        return items[0]
    return tuple(items)


def outcome(function: object, *args: object) -> object:
    try:
        return function(*args)
    except IndexError:
        return "IndexError"


@given(keys())
def test_any_key_means_what_numpy_means(key: object) -> None:
    expected, found = outcome(DENSE.__getitem__, key), outcome(read, key)
    if isinstance(found, str):
        # NumPy forgives a position out of range where the result is empty anyway; we do not.
        assert isinstance(expected, str) or np.size(expected) == 0, (key, expected)
    else:
        assert np.shape(found) == np.shape(expected)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("axes", [(0, 1), (1, 2), (0, 1, 2), (2, 3), (0, 1, 2, 3)])
def test_masks_over_several_axes(axes: tuple[int, ...]) -> None:
    shape = tuple(SHAPE[axis] for axis in axes)
    mask = np.random.default_rng(1).random(shape) < 0.4
    key = (*[slice(None)] * axes[0], mask)
    np.testing.assert_array_equal(read(key), DENSE[key])


def test_an_ellipsis_over_nothing_still_separates_lists() -> None:
    key = (0, [1, 2], slice(None), ..., [0, 4])
    np.testing.assert_array_equal(read(key), DENSE[key])
    key = (slice(None), slice(None), 1, ..., [0, 4])
    assert read(key).shape == DENSE[key].shape
    np.testing.assert_array_equal(read(key), DENSE[key])


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (6, "example 6 is out of range"),
        ((0, -4), "layer -4 is out of range"),
        ((0, 0, [0, 9]), "token 9 is out of range"),
        ((0, 0, 0, 0, 0), "5 indices for an array of 4"),
        ((..., 0, ...), "only one ellipsis"),
        (None, "None cannot index"),
        (True, "True cannot index"),
        ("example", "'example' cannot index"),
        (1.5, "positions are integers"),
        ([0.5], "positions are integers"),
        ([[0, 1], [0]], "not a list of positions"),
        ([True, False], r"mask of shape \(2,\) does not fit"),
        (([0, 1], [0, 1, 2]), "do not broadcast"),
        (slice("a", None), "not a slice of integers"),
        (slice(0, 1, 0), "not a slice of integers"),
        (2**70, "out of range"),
        pytest.param(10**5000, "an integer of 16610 bits is out of range", id="a long integer"),
        pytest.param([10**5000], "positions are integers", id="a list of one"),
        (np.array([2**64 - 1], dtype=np.uint64), "positions are integers"),
        (object(), "positions are integers"),
        ({"a": 1}, "positions are integers"),
    ],
)
def test_bad_keys_name_the_value_and_the_rule(key: object, words: str) -> None:
    with pytest.raises(SelectionError, match=words):
        parse_key(key, SHAPE)


def test_one_axis_alone() -> None:
    assert parse_axis(-1, 5, "example") == Progression(4, 1, 1)
    assert parse_axis([-1, 0], 5, "example").tolist() == [4, 0]
    assert parse_axis(np.array([True, False, True]), 3, "example").tolist() == [0, 2]
    with pytest.raises(SelectionError, match="has 2 dimensions"):
        parse_axis([[0, 1]], 5, "example")


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("kind", [int, "list", "array", "with others"])
def test_positions_at_the_ends_of_an_axis(axis: int, offset: int, kind: object) -> None:
    """n - 1 is the last one, n is none; -n is the first one, -n - 1 is none."""
    n = SHAPE[axis]
    for position, is_inside in ((n + offset, offset < 0), (-n + offset, offset >= 0)):
        item: object = {int: position, "list": [position], "array": np.array([[position]])}.get(kind, [0, position])
        key = (*[slice(None)] * axis, item)
        if is_inside:
            np.testing.assert_array_equal(read(key), DENSE[key])
        else:
            with pytest.raises(SelectionError, match=f"{position} is out of range; the axis has {n} positions"):
                parse_key(key, SHAPE)
