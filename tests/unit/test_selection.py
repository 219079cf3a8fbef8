"""Row spaces against a dull enumeration: count, order, coordinates, for every layer x tokens x examples x labels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saev_store.core.indexing import Progression
from saev_store.core.layout import Layout
from saev_store.core.rows import keeping, row_space
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
    kwargs = {"layer": layer, "tokens": tokens, "examples": examples, "ignore_labels": ignore, "labels": labels}
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


LAYOUT = Layout(4, (-2, 5), 3, False, 2, 2)


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"layer": 4}, LayerNotFoundError, r"layer 4 was not recorded; the store holds the layers \[-2, 5\]"),
        ({"layer": "last"}, SelectionError, "'last'; it must be a label"),
        ({"layer": []}, SelectionError, "no layer was chosen"),
        ({"layer": [5, 5]}, SelectionError, "names a layer twice"),
        ({"layer": 5.0}, LayerNotFoundError, "5.0 was not recorded"),
        ({"tokens": "cls"}, SelectionError, "'cls'; it must be"),
        ({"tokens": ["content"]}, SelectionError, "it must be"),
        ({"tokens": "special"}, SelectionError, "no special tokens"),
        ({"examples": 4}, SelectionError, "example 4 is out of range"),
        ({"examples": [[0]]}, SelectionError, "2 dimensions"),
        ({"ignore_labels": [0]}, SelectionError, "no labels.bin"),
        ({"ignore_labels": [256]}, SelectionError, "from 0 to 255"),
        ({"ignore_labels": ["sky"]}, SelectionError, "from 0 to 255"),
    ],
)
def test_what_the_store_does_not_hold_is_an_error(
    kwargs: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        row_space(LAYOUT, **kwargs)


@pytest.mark.parametrize("chunk", [1, 2, 3, 8, 9, 10, 11, 30, 31])
@pytest.mark.parametrize("examples", [None, slice(2, 9), slice(9, 1, -2), slice(1, None, 3), [8, 0, 8, 3]])
def test_labels_are_counted_in_pieces(chunk: int, examples: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten examples of three content tokens: pieces of one example, of some, of nearly all, of all."""
    monkeypatch.setattr("saev_store.core.rows.COUNT_CHUNK_BYTES", chunk)
    layout = Layout(10, (4, 2), 3, True, 2, 4)
    labels = np.random.default_rng(0).integers(0, 3, (10, 3), dtype=np.uint8)
    rows = row_space(layout, examples=examples, ignore_labels=[1], labels=labels)
    chosen = np.arange(10)[slice(None) if examples is None else examples]
    expected = [
        (int(example), layer, token)
        for example in chosen
        for layer in (4, 2)
        for token in (-1, 0, 1, 2)
        if token < 0 or labels[example, token] != 1
    ]
    assert [tuple(map(int, row)) for row in zip(*rows.coordinates(np.arange(len(rows))), strict=True)] == expected


@pytest.mark.parametrize(("label", "is_one"), [(-1, False), (0, True), (255, True), (256, False)])
def test_labels_are_from_0_to_255(label: int, is_one: bool) -> None:
    layout = Layout(2, (0,), 2, False, 2, 2)
    labels = np.array([[0, 255], [255, 7]], dtype=np.uint8)
    if is_one:
        rows = row_space(layout, ignore_labels=[label], labels=labels)
        assert len(rows) == np.count_nonzero(labels != label)
        assert len(row_space(layout, ignore_labels=[0, label], labels=labels)) == 4 - len({0, label}) - (label == 255)
    else:
        for wrong in ([label], [7, label], np.array([label])):
            with pytest.raises(SelectionError, match="integers from 0 to 255"):
                row_space(layout, ignore_labels=wrong, labels=labels)


@pytest.mark.parametrize("ignored", [None, [1]])
def test_rows_of_any_shape_and_type(ignored: list[int] | None) -> None:
    layout = Layout(10, (4, 2), 3, True, 2, 4)
    labels = np.random.default_rng(0).integers(0, 3, (10, 3), dtype=np.uint8)
    space = row_space(layout, examples=[7, 2, 9, 2], ignore_labels=ignored, labels=labels)
    flat = [column.tolist() for column in space.locate(np.arange(len(space)))]
    for rows in (3, [3, 0], [[3], [1]], np.array([[0, 5, 2]], dtype=np.uint8), np.int16(4), []):
        found = space.locate(rows)
        at = np.asarray(rows, dtype=np.int64)
        for column, expected in zip(found, flat, strict=True):
            assert column.dtype == np.int64
            assert column.shape == at.shape
            assert column.tolist() == np.array(expected)[at].tolist()
        coordinates = space.coordinates(rows)
        assert {array.dtype for array in coordinates} == {np.dtype(np.int64)}
        assert [array.shape for array in coordinates] == [at.shape] * 3


@pytest.mark.parametrize("ignored", [None, [], (), [1], np.array([], dtype=np.int64)])
def test_the_sizes_of_a_space(ignored: object) -> None:
    layout = Layout(10, (4, 2), 3, True, 2, 4)
    labels = np.arange(30, dtype=np.uint8).reshape(10, 3) % 3
    space = row_space(layout, layer=[2], tokens="all", examples=slice(1, 8, 2), ignore_labels=ignored, labels=labels)
    assert (space.n_examples, space.rows_per_example, space.layer_idx) == (4, 4, (1,))
    n_ignored = 4 if isinstance(ignored, list) and ignored else 0
    assert (space.n_rows, len(space)) == (16 - n_ignored, 16 - n_ignored)
    assert (space.ends is None) == (ignored is None or (isinstance(ignored, (list, tuple)) and not ignored))
    if space.ends is not None:
        assert space.ends.dtype == np.int64
        assert space.ends.tolist() == np.cumsum([4 - (n_ignored > 0)] * 4).tolist()
        assert space.labels is labels
        assert space.kept is not None
        assert np.flatnonzero(~space.kept).tolist() == list(ignored)
    none = row_space(layout, examples=[], ignore_labels=[1], labels=labels)
    assert (len(none), none.n_examples, none.n_rows) == (0, 0, 0)
    assert none.locate([])[0].tolist() == []
    assert len(row_space(layout, tokens="special", examples=[3, 3])) == 4
    assert row_space(layout, tokens="content").tokens == Progression(1, 1, 3)
    assert row_space(layout, tokens="special").tokens == Progression(0, 1, 1)
    assert row_space(layout, tokens="all").tokens == Progression(0, 1, 4)
    assert row_space(Layout(2, (1,), 3, False, 2, 4), tokens="content").tokens == Progression(0, 1, 3)


def test_layers_in_any_sequence() -> None:
    layout = Layout(4, (-2, 5, 9), 3, False, 2, 2)
    assert row_space(layout).layer_idx == (0, 1, 2)
    for layers in ([9, -2], (9, -2), np.array([9, -2]), range(9, -3, -11)):
        assert row_space(layout, layer=layers).layer_idx == (2, 0)
    assert row_space(layout, layer=np.int64(5)).layer_idx == (1,)


@pytest.mark.parametrize(
    ("kwargs", "where", "remedy"),
    [
        ({"layer": "last"}, "layer", None),
        ({"layer": []}, "layer", None),
        ({"layer": [5, 5]}, "layer", None),
        ({"tokens": "cls"}, "tokens", None),
        ({"tokens": "special"}, "tokens", "Use tokens='content'."),
        ({"examples": 4}, "example", None),
        ({"examples": [True]}, "example", None),
        ({"ignore_labels": [0]}, "ignore_labels", "Drop ignore_labels."),
        ({"ignore_labels": [256]}, "ignore_labels", None),
        ({"ignore_labels": [[0], [0, 1]]}, "ignore_labels", None),
        ({"ignore_labels": [[0, 1]]}, "ignore_labels", None),
        ({"ignore_labels": [0.5]}, "ignore_labels", None),
        ({"ignore_labels": [True]}, "ignore_labels", None),
    ],
)
def test_an_error_names_the_argument(kwargs: dict[str, object], where: str, remedy: str | None) -> None:
    with pytest.raises(SelectionError) as caught:
        row_space(LAYOUT, **kwargs)
    assert (caught.value.where, caught.value.remedy or None) == (where, remedy)
    special = Layout(4, (-2, 5), 3, True, 2, 2)
    with pytest.raises(SelectionError, match="special tokens have no labels to ignore") as caught:
        row_space(special, tokens="special", ignore_labels=[0])
    assert (caught.value.where, caught.value.remedy) == ("ignore_labels", "Drop one of the two.")


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


def test_what_stands_for_none_is_a_number_of_the_dtype() -> None:
    assert {name: repr(NONE[name]) for name in DTYPES} == {
        "bool": "False", "uint8": "255", "int32": "-1", "int64": "-1", "float32": "nan"
    }  # fmt: skip


def test_one_layer_may_be_an_array_without_axes():
    layout = Layout(7, (2, 5, 11), 4, True, 8, 3)
    assert row_space(layout, layer=np.array(5)).layer_idx == (1,)
    with pytest.raises(LayerNotFoundError, match="was not recorded"):
        row_space(layout, layer=np.array(5.0))


def test_a_condition_on_rows_is_a_part_of_what_they_are():
    layout = Layout(3, (2, 5), 2, True, 8, 3)
    labels, kept = np.zeros((3, 2), np.uint8), np.ones(256, np.bool_)
    space = row_space(layout, tokens="content")
    assert keeping(space, labels, kept).condition == b""
    assert keeping(space, labels, kept, b"of the mask").condition == b"of the mask"


def test_a_layer_that_is_named_twice_is_told_by_its_label() -> None:
    layout = Layout(7, (2, 5, 11), 4, True, 8, 3)
    with pytest.raises(SelectionError) as caught:
        row_space(layout, layer=[11, 5, 11])
    assert caught.value.message == "layers [11, 5, 11] names a layer twice"


def test_spaces_are_compared_as_objects() -> None:
    """Not by their arrays, whose comparison has no truth value."""
    one, other = (row_space(Layout(7, (2, 5, 11), 4, True, 8, 3), examples=[1, 2]) for _ in range(2))
    assert one != other
    assert len({one, other, one}) == 2
