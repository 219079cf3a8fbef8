"""Index expressions against NumPy itself: the same elements, the same shape, an error for what NumPy refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import component

from saev_store.core.indexing import Block, Points, parse_axis, parse_key, positions
from saev_store.errors import ArgumentError, SelectionError

SHAPE = (6, 3, 4, 5)
DENSE = np.arange(np.prod(SHAPE)).reshape(SHAPE)
#: Keys whose dimensions NumPy moves, or does not: lists with integers, ellipses and slices between and around them.
ORDERS = [
    (0, [1, 2], slice(None), ..., [0, 4]), (slice(None), slice(None), 1, ..., [0, 4]), (0, ..., [0, 4]), ([[0, 2]],),
    ([0, 2], slice(None), 1), (0, [0, 2]), (slice(None), [0, 2], 1), ([0, 2], slice(1, 3), 1, 0), (0, slice(None), [0, 2]),
    (slice(None), [0, 2], slice(None), 1), (..., [0, 2], 1), (2, slice(None), slice(None), [4]), ([0, 1], ..., 0),
    *(tuple(np.insert(np.array([slice(None), [0, 1], [2, 0], slice(1, 3)], object), at, ...)) for at in range(5)),
    (np.ones((6, 3), bool),), (slice(None), DENSE[0, ..., 0] % 2 == 0), (DENSE % 7 == 3,), (..., DENSE[0, 0] > 7), (),
]  # fmt: skip


def listed(axis: object) -> np.ndarray:
    if isinstance(axis, range):
        return np.array(list(axis), np.int64)
    assert isinstance(axis, np.ndarray)
    assert axis.dtype == np.int64
    return axis


def read(key: object) -> np.ndarray:
    """What the parsed key means, taken from a dense array."""
    request = parse_key(key, SHAPE)
    if isinstance(request, Block):
        return DENSE[np.ix_(*map(listed, request.axes))].reshape(request.shape)
    assert all(coord.dtype == np.int64 for coord in request.coords)
    if request.last is None:
        return np.broadcast_to(DENSE[request.coords], request.shape)
    return np.broadcast_to(DENSE[request.coords][..., listed(request.last)], request.shape)


@st.composite
def keys(draw: st.DrawFn) -> object:
    n_items = draw(st.integers(0, 5))
    at = draw(st.integers(0, n_items + 3))  # beyond the items: no ellipsis
    axes = [min(i if i < at else i + 4 - n_items, 3) for i in range(n_items)]
    items: list[object] = [draw(component(SHAPE[max(axis, 0)])) for axis in axes]
    if at <= n_items:
        items.insert(at, ...)
    return items[0] if len(items) == 1 and draw(st.booleans()) else tuple(items)


def outcome(function: object, *args: object) -> object:
    try:
        return function(*args)
    except IndexError:
        return "IndexError"


@given(keys())
def test_parse_key_of_any_key_selects_what_numpy_selects(key: object) -> None:
    expected, found = outcome(DENSE.__getitem__, key), outcome(read, key)
    if isinstance(found, str):
        # NumPy forgives a position out of range where the result is empty anyway; a store does not.
        assert isinstance(expected, str) or np.size(expected) == 0, (key, expected)
    else:
        assert np.shape(found) == np.shape(expected)
        np.testing.assert_array_equal(found, expected)


def test_parse_key_with_lists_keeps_numpys_order_of_dimensions() -> None:
    for key in ORDERS:
        assert parse_key(key, SHAPE).shape == DENSE[key].shape, key
        np.testing.assert_array_equal(read(key), DENSE[key])


def test_parse_key_at_the_ends_of_each_axis_counts_as_numpy() -> None:
    """n - 1 is the last position and -n the first one; the next ones are outside, and an error names the axis."""
    for axis, (n, name) in enumerate(zip(SHAPE, ("example", "layer", "token", "d_model"), strict=True)):
        for position, is_inside in ((n - 1, True), (n, False), (-n, True), (-n - 1, False)):
            for item in (position, np.int8(position), [position], np.array([[position]]), [0, position]):
                key = (*[slice(None)] * axis, item)
                if is_inside:
                    np.testing.assert_array_equal(read(key), DENSE[key])
                    continue
                with pytest.raises(SelectionError) as caught:
                    parse_key(key, SHAPE)
                assert caught.value.where == name


BAD: list[tuple[object, str]] = [
    ((0, 0, 0, 0, 0), "index"), ((..., 0, ...), "index"), ((..., ...), "index"), (None, "index"), (True, "index"),
    (np.True_, "index"), ("example", "index"), (b"0", "index"), (1.5, "index"), ([0.5], "index"), ([[0, 1], [0]], "index"),
    ([True, False], "index"), (([0, 1], [0, 1, 2]), "index"), (slice("a", None), "example"), (slice(0, 1, 0), "example"),
    (([0, 1], slice("a"), [0, 1]), "layer"), (2**70, "index"), (10**5000, "index"), ([10**5000], "index"),
    (np.array([2**64 - 1], np.uint64), "index"), (np.array([2**63], np.uint64), "index"), (object(), "index"),
    (np.array([2**63 - 1], np.uint64), "example"), ({"a": 1}, "index"), ((np.ones((6, 4), bool),), "index"),
    ((0, np.ones((3, 3), bool)), "index"), (np.ones((6, 3, 4, 5, 1), bool), "index"), ((0, 3), "layer"),
    ((..., [True] * 4), "index"), (np.array(1.0), "index"), ((0, 0, np.datetime64(0, "s")), "index"),
]  # fmt: skip


def test_parse_key_of_what_is_no_index_is_a_selection_error() -> None:
    for key, where in BAD:
        with pytest.raises(SelectionError) as caught:
            parse_key(key, SHAPE)
        assert caught.value.where == where, key
    for item in (None, True, np.array(True), 1.5, [0.5], [[0], [0, 1]], [[0, 1]], 5, -6, [5], [True] * 4):
        with pytest.raises(SelectionError) as caught:
            parse_axis(item, 5, "row")
        assert caught.value.where == "row"


def test_parse_key_over_many_rows_keeps_ranges() -> None:
    """A list and integers beside slices take the memory of the list, several lists that of the vectors of the result."""
    shape = (10**12, 3, 5, 768)
    for key in (
        slice(None),
        np.s_[::-3],
        np.s_[:, [2, 0]],
        np.s_[:, 1, [4, 0]],
        np.s_[..., [1, 2]],
        ([0, 10**12 - 1],),
    ):
        block = parse_key(key, shape)
        assert isinstance(block, Block)
        assert isinstance(block.axes[0], range) or len(block.axes[0]) == 2
        assert [axis for axis in block.axes[1:] if isinstance(axis, range) or len(axis) == 2] == list(block.axes[1:])
    points = parse_key(([0, 1], [2, 1], slice(None), slice(None)), (10**12, 3, 10**6, 10**12))
    assert isinstance(points, Points)
    assert points.shape == (2, 10**6, 10**12)
    assert sum(coord.nbytes for coord in points.coords) == 3 * 8 * 2 * 10**6
    assert points.last == range(10**12)


def test_parse_key_of_points_keeps_a_sliced_last_axis_apart() -> None:
    whole, back = range(5), range(4, -1, -2)
    for key, last in [
        (([0, 1], [0, 1]), whole), (([0, 1], [0, 1], ...), whole), (([0, 1], slice(None), [0, 1]), whole),
        (([0, 1], [0, 1], 2, slice(4, None, -2)), back), ((np.ones((6, 3), bool),), whole), (([0, 1], [0, 1], 2, 3), None),
        (([0, 1], slice(None), slice(None), [0, 1]), None), ((..., [0, 1], [0, 1]), None), ((DENSE > 7,), None),
    ]:  # fmt: skip
        request = parse_key(key, SHAPE)
        assert isinstance(request, Points)
        assert (request.last, len(request.coords)) == (last, 4 if last is None else 3)


def test_parse_axis_gives_ranges_for_slices_and_int64_for_lists() -> None:
    assert parse_axis(-1, 5, "example") == parse_axis(np.array(4), 5, "row") == range(4, 5)
    for dtype in (np.uint8, np.int8, np.int16, np.uint64, np.int64):
        assert listed(parse_axis(np.array([2, 0], dtype), 5, "row")).tolist() == [2, 0]
    for item, found in (([-1, 0], [4, 0]), ([], []), ([True, False, True, False, False], [0, 2]), (range(2), [0, 1])):
        assert listed(parse_axis(item, 5, "row")).tolist() == found
    for step in (1, -1, 2, -3, 6, -6, 2**63, -(2**64), 3 - 2**63, None):
        for bounds in ((5, None), (0, None), (None, None), (3, 3), (1, 5), (-2, -9)):
            axis = parse_axis(slice(*bounds, step), 6, "row")
            assert isinstance(axis, range)
            expected = range(6)[slice(*bounds, step)]
            assert positions(axis).tolist() == list(axis) == list(expected)
            assert axis.step == (expected.step if len(expected) > 1 else 1)


def test_positions_of_more_than_memory_holds_are_an_argument_error() -> None:
    for count in (2**50, 2**58, 2**62):
        with pytest.raises(ArgumentError) as caught:
            positions(range(count))
        assert caught.value.where == "index"
