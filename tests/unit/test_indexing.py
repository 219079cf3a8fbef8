"""Index expressions against NumPy itself: the same elements, the same shape, an IndexError where NumPy has one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import component

from saev_store.core.indexing import Block, Points, Progression, outer_block, parse_axis, parse_key
from saev_store.errors import ArgumentError, SelectionError

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


@st.composite
def outer_keys(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[object, ...]:
    """An integer, a slice or a list for each axis."""

    def item(n: int) -> st.SearchStrategy[object]:
        listed = st.lists(st.integers(-n, n - 1), max_size=4).map(lambda values: np.array(values, np.int64))
        return st.one_of(st.slices(n), st.integers(-n, n - 1), listed) if n else st.slices(n)

    return tuple(draw(item(n)) for n in shape)


def taken(dense: np.ndarray, key: tuple[object, ...]) -> np.ndarray:
    """The outer product of a key in NumPy, one axis after the other, last axis first."""
    for axis in reversed(range(len(key))):
        dense = dense[(slice(None),) * axis + (key[axis],)]
    return dense


@given(st.data())
def test_a_part_of_a_part_is_a_part(data: st.DataObject) -> None:
    """Three selections, each of the result of the one before."""
    dense, block = DENSE, outer_block((slice(None),) * 4, SHAPE)
    for _ in range(3):
        key = data.draw(outer_keys(dense.shape))
        block, dense = block.narrowed(outer_block(key, dense.shape)), taken(dense, key)
    axes = [axis.positions() if isinstance(axis, Progression) else axis for axis in block.axes]
    assert block.shape == dense.shape
    np.testing.assert_array_equal(DENSE[np.ix_(*axes)].reshape(block.shape), dense)


@pytest.mark.parametrize("axes", [(0, 1), (1, 2), (0, 1, 2), (2, 3), (0, 1, 2, 3)])
def test_masks_over_several_axes(axes: tuple[int, ...]) -> None:
    shape = tuple(SHAPE[axis] for axis in axes)
    mask = np.random.default_rng(1).random(shape) < 0.4
    key = (*[slice(None)] * axes[0], mask)
    np.testing.assert_array_equal(read(key), DENSE[key])


@pytest.mark.parametrize("at", range(5))
def test_an_ellipsis_over_nothing_separates_only_lists_on_both_sides(at: int) -> None:
    """In front of the first list and behind the last one it is as if it were not there."""
    for key in ([slice(None), [0, 1], [0, 1], 0], [slice(None), [0, 1], [2, 0], slice(1, 3)], [[3, 1], 0, 2, [0, 1]]):
        key.insert(at, ...)
        expected = DENSE[tuple(key)]
        assert parse_key(tuple(key), SHAPE).shape == expected.shape
        np.testing.assert_array_equal(read(tuple(key)), expected)


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


@pytest.mark.parametrize(
    ("key", "last"),
    [
        (([0, 1], [0, 1]), Progression(0, 1, 5)),
        (([0, 1], [0, 1], ...), Progression(0, 1, 5)),
        (([0, 1], slice(None), [0, 1]), Progression(0, 1, 5)),
        (([0, 1], [0, 1], 2, slice(4, None, -2)), Progression(4, -2, 3)),
        ((np.ones((6, 3), bool),), Progression(0, 1, 5)),
        (([0, 1], [0, 1], 2, 3), None),
        (([0, 1], slice(None), slice(None), [0, 1]), None),
        ((..., [0, 1], [0, 1]), None),
        ((DENSE > 7,), None),
    ],
)
def test_a_sliced_last_axis_is_kept_apart(key: object, last: Progression | None) -> None:
    """Whole vectors are read for it; the coordinates are those of the other axes."""
    request = parse_key(key, SHAPE)
    assert isinstance(request, Points)
    assert (request.last, len(request.coords)) == (last, 4 if last is None else 3)
    assert {coord.dtype for coord in request.coords} == {np.dtype(np.int64)}
    np.testing.assert_array_equal(read(key), DENSE[key])


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint64, np.int64])
def test_positions_of_every_integer_type_are_64_bits_wide(dtype: type) -> None:
    for axis in (parse_axis(np.array([2, 0], dtype=dtype), 5, "example"), parse_axis([], 5, "example")):
        assert isinstance(axis, np.ndarray)
        assert axis.dtype == np.int64
    block = parse_key((np.array([2, 0], dtype=dtype),), SHAPE)
    assert isinstance(block, Block)
    assert block.axes[0].dtype == np.int64
    if dtype is np.uint64:
        for value, is_one in ((2**63 - 1, False), (2**63, False), (4, True)):
            if is_one:
                assert parse_axis(np.array([value], dtype=dtype), 5, "example").tolist() == [4]
            else:
                words = "out of range" if value < 2**63 else "positions are integers"
                with pytest.raises(SelectionError, match=words):
                    parse_axis(np.array([value], dtype=dtype), 5, "example")


@pytest.mark.parametrize(
    ("position", "n", "held"),
    [(7, 5, "5 positions, from -5 to 4"), (-6, 5, "5 positions, from -5 to 4"), (0, 0, "no positions")],
)
def test_an_error_names_the_positions_that_there_are(position: int, n: int, held: str) -> None:
    for item in (position, [position]):
        with pytest.raises(SelectionError) as caught:
            parse_axis(item, n, "layer")
        assert caught.value.message == f"layer {position} is out of range; the axis has {held}"
        assert caught.value.where == "layer"


@pytest.mark.parametrize(
    ("key", "where", "words"),
    [
        ((0, 0, [0, 9]), "token", "token 9 is out of range"),
        ((0, 0, 0, 5), "d_model", "d_model 5 is out of range"),
        (([0, 1], 3, [0, 1]), "layer", "layer 3 is out of range"),
        (([0, 1], slice("a", None), [0, 1]), "layer", "not a slice of integers"),
        (
            (0, 0, 0, 0, 0),
            "index",
            r"5 indices for an array of 4 dimensions \('example', 'layer', 'token', 'd_model'\)",
        ),
        ((..., 0, ...), "index", "only one ellipsis"),
        (None, "index", "None cannot index"),
        ((np.ones((6, 4), bool),), "index", r"mask of shape \(6, 4\) does not fit \('example', 'layer'\)"),
        ((0, np.ones((3, 3), bool)), "index", r"does not fit \('layer', 'token'\) of shape \(3, 4\)"),
        (([0, 1], [0, 1, 2]), "index", r"the shapes \(2,\), \(3,\) do not broadcast"),
    ],
)
def test_an_error_names_the_axis(key: object, where: str, words: str) -> None:
    with pytest.raises(SelectionError, match=words) as caught:
        parse_key(key, SHAPE)
    assert caught.value.where == where


def test_arrays_of_other_dimensions_name_their_axes_by_number() -> None:
    with pytest.raises(SelectionError, match=r"axis 1 9 is out of range"):
        parse_key((0, [9]), (3, 4))
    with pytest.raises(SelectionError, match=r"3 indices for an array of 2 dimensions \('axis 0', 'axis 1'\)"):
        parse_key((0, 0, 0), (3, 4))
    with pytest.raises(SelectionError, match="axis 9 is out of range"):
        parse_key((0, 9), (3, 4))


@pytest.mark.parametrize("progression", [Progression(5, -2, 3), Progression(1, 2, 3), Progression(4, 1, 1)])
def test_the_ends_of_a_progression(progression: Progression) -> None:
    positions = [progression.start + i * progression.step for i in range(progression.count)]
    assert progression.positions().tolist() == positions
    assert (progression.lowest, progression.highest) == (min(positions), max(positions))
    assert parse_axis(progression, 6, "example") is progression


@pytest.mark.parametrize("step", [6, -6, 2**63, -(2**64), 3 - 2**63])
@pytest.mark.parametrize("bounds", [(5, None), (0, None), (None, None), (3, 3), (0, 0)])
def test_steps_of_any_size(step: int, bounds: tuple[int | None, int | None]) -> None:
    """Python's slices take them; the step of fewer than two positions says nothing, and is 1."""
    chosen = slice(*bounds, step)
    found = parse_axis(chosen, 6, "example")
    assert found.step == 1
    assert found.positions().tolist() == list(range(6))[chosen]
    assert found.positions().dtype == np.int64


@pytest.mark.parametrize("count", [2**58, 2**62])
def test_more_positions_than_memory_holds(count: int) -> None:
    with pytest.raises(ArgumentError) as caught:
        Progression(0, 1, count).positions()
    assert caught.value.where == "index"


def test_blocks_and_points_pass_as_they_are() -> None:
    block, points = parse_key(0, SHAPE), parse_key(([0, 1], [0, 1]), SHAPE)
    assert parse_key(block, SHAPE) is block
    assert parse_key(points, SHAPE) is points
    assert isinstance(block, Block)
    assert (block.full_shape, block.shape, block.dropped) == ((1, 3, 4, 5), (3, 4, 5), (True, False, False, False))


def test_one_list_is_a_block_where_numpy_leaves_it_in_place() -> None:
    """Also beside an integer behind a slice, if the list comes first: NumPy then puts its dimension in front, where it is."""
    for key in (
        ([0, 2], slice(None), 1),
        ([0, 2],),
        (0, [0, 2]),
        (slice(None), [0, 2], 1),
        ([0, 2], slice(1, 3), 1, 0),
    ):
        assert isinstance(parse_key(key, SHAPE), Block)
        np.testing.assert_array_equal(read(key), DENSE[key])
    for key in ((slice(None), [0, 2], slice(None), 1), (0, slice(None), [0, 2]), (0, ..., [0, 4]), ([[0, 2]],)):
        assert isinstance(parse_key(key, SHAPE), Points)
        np.testing.assert_array_equal(read(key), DENSE[key])


def test_a_lone_truth_value_is_no_mask_and_an_error_names_its_axis() -> None:
    for item in (None, True, np.array(True), 1.5, [0.5], [[0], [0, 1]]):
        with pytest.raises(SelectionError) as caught:
            parse_axis(item, 5, "layer")
        assert caught.value.where == "layer"


@pytest.mark.parametrize("index", [range(10**15), np.broadcast_to(np.int8(0), 10**15)], ids=["range", "array"])
def test_there_is_no_memory_for_so_many_positions(index: object) -> None:
    for parse in (lambda: parse_key(index, SHAPE), lambda: parse_axis(index, 6, "row")):
        with pytest.raises(ArgumentError, match="1,000,000,000,000,000 positions need"):
            parse()
