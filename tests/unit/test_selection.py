"""Row spaces against a dull enumeration: count, order, coordinates, for every layer x tokens x examples x labels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saev_store.core.layout import Layout
from saev_store.core.rows import row_space
from saev_store.core.token_arrays import DTYPES, NONE, shown_names
from saev_store.errors import LayerNotFoundError, SelectionError

LAYERS = (11, -2, 5)


@st.composite
def selections(draw: st.DrawFn) -> tuple[Layout, dict[str, object], np.ndarray, list[tuple[int, int, int]]]:
    n_examples, n_content = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    layout = Layout(n_examples, LAYERS, n_content, draw(st.booleans()), 2, draw(st.integers(1, 4)))
    layer = draw(
        st.one_of(
            st.sampled_from(LAYERS),
            st.just("all"),
            st.lists(st.sampled_from(LAYERS), min_size=1, max_size=3, unique=True),
        )
    )
    tokens = draw(st.sampled_from(["content", "special", "all"] if layout.cls_token else ["content", "all"]))
    positions = np.arange(n_examples)
    examples = draw(
        st.one_of(
            st.none(),
            st.integers(-n_examples, n_examples - 1),
            st.builds(slice, st.integers(-9, 9), st.integers(-9, 9), st.sampled_from([None, 1, 2, -1, -3])),
            st.lists(st.integers(-n_examples, n_examples - 1), max_size=7),
            st.lists(st.booleans(), min_size=n_examples, max_size=n_examples).map(np.array),
        )
    )
    ignore = draw(st.one_of(st.none(), st.lists(st.integers(0, 3), max_size=3)))
    if tokens == "special":
        ignore = None
    labels = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 4, (n_examples, n_content), dtype=np.uint8)

    chosen = positions if examples is None else np.atleast_1d(positions[examples])
    labelled = LAYERS if layer == "all" else layer if isinstance(layer, list) else [layer]
    n_special = int(layout.cls_token)
    rows = [
        (int(example), label, token - n_special if token >= n_special else -1)
        for example in chosen
        for label in labelled
        for token in range(layout.tokens_per_example)
        if (tokens == "all" or (token < n_special) == (tokens == "special"))
        and not (ignore and token >= n_special and labels[example, token - n_special] in ignore)
    ]
    kept = ~np.isin(labels, ignore) if ignore else None
    kwargs = {"layer": layer, "tokens": tokens, "examples": examples, "kept": kept}
    return layout, kwargs, labels, rows


@given(selections(), st.randoms(use_true_random=False))
def test_rows_equal_the_dull_enumeration(
    case: tuple[Layout, dict[str, object], np.ndarray, list[tuple[int, int, int]]], random: object
) -> None:
    layout, kwargs, _, rows = case
    space = row_space(layout, **kwargs)
    assert len(space) == len(rows)
    picks = list(range(len(rows))) + [random.randrange(len(rows)) for _ in range(5) if rows]
    found = space.coordinates(np.array(picks, dtype=np.int64))
    assert list(zip(*(column.tolist() for column in found), strict=True)) == [rows[pick] for pick in picks]


def test_a_huge_space_is_counted_without_memory() -> None:
    layout = Layout(2**40, (3,), 256, True, 16, 1000)
    space = row_space(layout, layer=3, tokens="content", examples=slice(None, None, 2))
    assert len(space) == 2**39 * 256
    last = space.coordinates(len(space) - 1)
    assert [int(value) for value in last] == [2**40 - 2, 3, 255]


@pytest.mark.parametrize("ignored", [None, [1]])
def test_locate_of_rows_of_any_shape_and_type(ignored: list[int] | None) -> None:
    layout = Layout(10, (4, 2), 3, True, 2, 4)
    labels = np.random.default_rng(0).integers(0, 3, (10, 3), dtype=np.uint8)
    kept = None if ignored is None else labels != 1
    space = row_space(layout, examples=[7, 2, 9, 2], kept=kept)
    flat = [column.tolist() for column in space.locate(np.arange(len(space)))]
    for rows in (3, [3, 0], [[3], [1]], np.array([[0, 5, 2]], dtype=np.uint8), np.int16(4), []):
        at = np.asarray(rows, dtype=np.int64)
        for column, expected in zip(space.locate(rows), flat, strict=True):
            assert (column.dtype, column.shape) == (np.int64, at.shape)
            assert column.tolist() == np.array(expected)[at].tolist()
    none = row_space(layout, examples=[], kept=kept)
    assert (len(none), none.n_examples, none.locate([])[0].tolist()) == (0, 0, [])


def test_row_space_takes_layers_in_any_sequence_and_tokens_by_kind() -> None:
    layout = Layout(4, (-2, 5, 9), 3, True, 2, 2)
    assert (len(row_space(layout)), len(row_space(layout, stack_layers=True))) == (4 * 3 * 4, 4 * 4)
    for layers in ([9, -2], (9, -2), np.array([9, -2]), range(9, -3, -11)):
        assert row_space(layout, layer=layers).layer_idx == (2, 0)
    for layer in (5, np.int64(5), np.array(5)):
        assert row_space(layout, layer=layer).layer_idx == (1,)
    for tokens, found in (("content", (1, 3)), ("special", (0, 1)), ("all", (0, 4))):
        assert row_space(layout, tokens=tokens).tokens == range(found[0], found[0] + found[1])


BAD: list[tuple[dict[str, object], type[Exception], str]] = [
    ({"layer": 4}, LayerNotFoundError, "layer"),
    ({"layer": 5.0}, LayerNotFoundError, "layer"),
    ({"layer": np.array(5.0)}, LayerNotFoundError, "layer"),
    ({"layer": "last"}, SelectionError, "layer"),
    ({"layer": ([],)}, LayerNotFoundError, "layer"),
    ({"layer": []}, SelectionError, "layer"),
    ({"layer": [5, 5]}, SelectionError, "layer"),
    ({"tokens": "cls"}, SelectionError, "tokens"),
    ({"tokens": ["content"]}, SelectionError, "tokens"),
    ({"tokens": "special"}, SelectionError, "tokens"),
    ({"examples": 4}, SelectionError, "example"),
    ({"examples": [[0]]}, SelectionError, "example"),
    ({"examples": [True]}, SelectionError, "example"),
]


def test_row_space_of_what_the_store_does_not_hold_is_an_error() -> None:
    for kwargs, error, where in BAD:
        with pytest.raises(error) as caught:
            row_space(Layout(4, (-2, 5), 3, False, 2, 2), **kwargs)
        assert caught.value.where == where, kwargs
    with pytest.raises(SelectionError) as caught:
        row_space(Layout(4, (-2, 5), 3, True, 2, 2), tokens="special", kept=np.ones((4, 3), np.bool_))
    assert caught.value.where == "tokens"


NAMES = st.sets(st.sampled_from(["a", "b", "tokens_a", "tokens_b", "tokens_tokens_a", "tokens_tokens_b"]))


@given(names=NAMES, taken=NAMES)
def test_token_arrays_beside_other_names_have_names_of_their_own(names: set[str], taken: set[str]) -> None:
    shown = shown_names(sorted(names), taken)
    assert shown.keys() == names
    assert len(set(shown.values())) == len(names)
    assert not taken & set(shown.values())
    for name, value in shown.items():
        assert value.endswith(name)
        assert set(value.removesuffix(name).split("tokens_")) == {""}
        assert (value == name) == (name not in taken)


def test_none_is_a_number_of_the_dtype() -> None:
    assert {name: repr(NONE[name]) for name in DTYPES} == {
        "bool": "False", "uint8": "255", "int32": "-1", "int64": "-1", "float32": "nan"
    }  # fmt: skip
