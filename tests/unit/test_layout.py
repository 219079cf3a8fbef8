"""The geometry against the words of the protocol, and against dense NumPy."""

from __future__ import annotations

import pickle
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saev_store.core.layout import Layout, is_layer_pair, layer_name, shard_name, transformer_lens_name
from saev_store.errors import ArgumentError, LayerNotFoundError, SelectionError

layer_lists = st.lists(st.integers(-50, 50), min_size=1, max_size=5, unique=True).map(tuple)
small_layouts = st.builds(
    Layout,
    n_examples=st.integers(1, 40),
    layers=layer_lists,
    content_tokens_per_example=st.integers(1, 6),
    cls_token=st.booleans(),
    d_model=st.integers(1, 5),
    examples_per_shard=st.integers(1, 12),
)


@given(small_layouts)
def test_every_vector_lies_where_a_dense_tensor_cut_into_files_has_it(layout: Layout) -> None:
    dense = np.arange(np.prod(layout.shape), dtype=np.float32).reshape(layout.shape)
    step = layout.examples_per_shard
    files = {shard_name(i): dense[i * step : (i + 1) * step].tobytes() for i in range(layout.n_shards)}
    for example, layer_idx, token in np.ndindex(layout.shape[:3]):
        where = layout.locate(example, layout.layers[layer_idx], token)
        found = np.frombuffer(files[where.path][where.start : where.end], dtype="<f4")
        np.testing.assert_array_equal(found, dense[example, layer_idx, token])
        shard_idx, start = layout.locate_many(example, layer_idx, token)
        assert (shard_name(int(shard_idx)), int(start)) == (where.path, where.start)
    assert sum(map(len, files.values())) == layout.nbytes == dense.nbytes
    assert [len(files[shard_name(i)]) for i in range(layout.n_shards)] == [
        layout.used_nbytes(i) for i in range(layout.n_shards)
    ]


big = st.integers(1, 2**62)


@given(st.tuples(big, st.integers(1, 2**20), st.integers(1, 2**20), big), st.booleans(), st.data())
def test_coordinates_are_exact_up_to_63_bits(
    sizes: tuple[int, int, int, int], cls_token: bool, data: st.DataObject
) -> None:
    n_examples, tokens, d_model, capacity = sizes
    layers = (7, -2, 0)
    try:
        layout = Layout(n_examples, layers, tokens, cls_token, d_model, capacity)
    except ArgumentError:
        padded = -(-n_examples // capacity) * capacity * 3 * (tokens + cls_token) * d_model * 4
        assert padded > 2**63 - 1
        return
    example = data.draw(st.integers(0, n_examples - 1))
    token = data.draw(st.integers(0, tokens + cls_token - 1))
    for layer_idx, layer in enumerate(layers):
        where = layout.locate(example, layer, token)
        # Section 4.2, word by word, in Python's unbounded integers.
        shard_idx, in_shard = example // capacity, example % capacity
        n_tokens = tokens + (1 if cls_token else 0)
        offset = ((in_shard * len(layers) * n_tokens) + (layer_idx * n_tokens) + token) * d_model * 4
        assert (where.path, where.start, where.end) == (f"acts{shard_idx:06d}.bin", offset, offset + 4 * d_model)
        many = layout.locate_many([example], [layer_idx], [token])
        assert (int(many[0][0]), int(many[1][0])) == (shard_idx, offset)


@given(layer_lists, st.integers(1, 300), st.booleans(), st.integers(1, 10**6), st.integers(1, 1000))
def test_capacity_is_the_budget_divided_down(
    layers: tuple[int, ...], tokens: int, cls_token: bool, budget: int, n_examples: int
) -> None:
    kwargs = {
        "n_examples": n_examples,
        "layers": layers,
        "content_tokens_per_example": tokens,
        "cls_token": cls_token,
        "d_model": 3,
        "max_tokens_per_shard": budget,
    }
    expected = int(budget / ((tokens + int(cls_token)) * len(layers)))
    if expected < 1:
        with pytest.raises(ArgumentError, match="must hold at least one example"):
            Layout.from_budget(**kwargs)
        return
    layout = Layout.from_budget(**kwargs)
    assert layout.examples_per_shard == expected
    assert sum(layout.examples_in(i) for i in range(layout.n_shards)) == n_examples
    assert layout.examples_in(layout.n_shards) == 0


def test_labels_match_literally() -> None:
    layout = Layout(3, (-2, 5), 4, True, 8, 2)
    assert [layout.layer_index(-2), layout.layer_index(np.int64(5))] == [0, 1]
    for wrong in (-1, 0, 1, True, "5", 5.0, None):
        with pytest.raises(LayerNotFoundError, match=r"holds the layers \[-2, 5\]"):
            layout.layer_index(wrong)


@pytest.mark.parametrize(
    ("example", "token"), [(-1, 0), (3, 0), (0, -1), (0, 5), (1.0, 0), (0, "0"), (True, 0), (0, None)]
)
def test_locate_refuses_what_lies_outside(example: object, token: object) -> None:
    with pytest.raises(SelectionError, match=r"must be an integer from 0 to") as caught:
        Layout(3, (5,), 4, True, 8, 2).locate(example, 5, token)
    assert caught.value.where == ("token" if type(example) is int and example == 0 else "example")


@pytest.mark.parametrize(
    "change",
    [
        {"n_examples": 0},
        {"n_examples": True},
        {"d_model": -1},
        {"d_model": 2**63},
        {"content_tokens_per_example": 0},
        {"examples_per_shard": 0},
        {"layers": ()},
        {"layers": (1, 1)},
        {"n_examples": 2**60},
        {"n_examples": 10**5000},
        {"layers": (10**5000, 10**5000)},
    ],
)
def test_impossible_geometries_are_refused(change: dict[str, object]) -> None:
    good: dict[str, object] = {
        "n_examples": 3,
        "layers": (5,),
        "content_tokens_per_example": 4,
        "cls_token": True,
        "d_model": 8,
        "examples_per_shard": 2,
    }
    with pytest.raises(ArgumentError):
        Layout(**{**good, **change})


def test_layouts_are_values() -> None:
    one, other = (Layout(3, (5,), 4, True, 8, 2) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(one)) == one


@pytest.mark.parametrize(
    ("n_examples", "d_model", "examples_per_shard", "fits"),
    [
        (1, 2**61 - 1, 1, True),
        (1, 2**61, 1, False),
        (1, 2**21, 2**40 - 1, True),  # one example, but a file at full size has 2^63 - 2^23 bytes
        (1, 2**21, 2**40, False),
        (2**40 - 1, 2**21, 1, True),
        (2**40, 2**21, 1, False),
        (3, 2**59, 2, False),  # the padded tensor has four examples
        (3, 2**59 - 1, 2, True),
    ],
)
def test_the_padded_tensor_is_below_2_to_the_63(n_examples: int, d_model: int, examples_per_shard: int, fits: bool):
    make = partial(Layout, n_examples, (0,), 1, False, d_model, examples_per_shard)
    if fits:
        layout = make()
        assert layout.n_shards * layout.shard_nbytes < 2**63
    else:
        with pytest.raises(ArgumentError):
            make()


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.uint64])
def test_coordinates_of_every_integer_type_are_exact(dtype: type) -> None:
    layout = Layout(200, tuple(range(120)), 120, False, 1 << 20, 150)
    one = layout.locate(120, 119, 118)
    arrays = [np.array([number], dtype=dtype) for number in (120, 119, 118)]
    shard_idx, start = layout.locate_many(*arrays)
    assert (shard_idx.tolist(), start.tolist()) == ([0], [one.start])
    assert (shard_idx.dtype, start.dtype) == (np.int64, np.int64)
    assert one.start == ((120 * 120 + 119) * 120 + 118) << 22
    assert one.end == one.start + (1 << 22)


def test_each_number_of_a_layout_is_an_integer_of_63_bits() -> None:
    good = {
        "n_examples": 1, "layers": (5,), "content_tokens_per_example": 1, "cls_token": False, "d_model": 1, "examples_per_shard": 1,
    }  # fmt: skip
    for field in ("n_examples", "content_tokens_per_example", "d_model", "examples_per_shard"):
        for value in (0, -1, True, 1.0, "1", None, 2**63):
            with pytest.raises(ArgumentError) as caught:
                Layout(**{**good, field: value})
            assert caught.value.where == field
        assert type(getattr(Layout(**{**good, field: np.int64(1)}), field)) is int
    assert Layout(**{**good, "content_tokens_per_example": 2**61 - 1}).nbytes == 2**63 - 4


def test_an_error_of_a_layout_names_its_argument() -> None:
    hooks = ("mlp_out", "mlp_out")
    for arguments, where in (
        ((3, (1, 1), 4, True, 8, 2), "layers"), ((3, 5, 4, True, 8, 2), "layers"), ((3, "57", 4, True, 8, 2), "layers"),
        ((3, ([],), 4, True, 8, 2), "layers"), ((3, (5, 5), 4, True, 8, 3, "float32", hooks), "layers"),
        ((3, (5,), 4, True, 8, 3, "float32", hooks), "hook_points"), ((3, (5,), 4, True, 8, 3, "int8"), "dtype"),
        ((1, (0,), 1, False, 2**61, 1), "layout"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError) as caught:
            Layout(*arguments)
        assert caught.value.where == where
    with pytest.raises(ArgumentError) as caught:
        Layout.from_budget(
            n_examples=1, layers=[1, 2, 3], content_tokens_per_example=9, cls_token=True, d_model=1, max_tokens_per_shard=29,
        )  # fmt: skip
    assert caught.value.where == "max_tokens_per_shard"
    # What no budget could hold is refused by the layout itself.
    for change, where in (
        ({"layers": []}, "layers"),
        ({"content_tokens_per_example": -1}, "content_tokens_per_example"),
    ):
        arguments = {"n_examples": 1, "layers": [1], "content_tokens_per_example": 9, "cls_token": False, "d_model": 1}
        with pytest.raises(ArgumentError) as caught:
            Layout.from_budget(**{**arguments, **change}, max_tokens_per_shard=29)
        assert caught.value.where == where


def test_the_sizes_of_a_layout() -> None:
    layout = Layout(7, (2, 5, 11), 4, True, 8, 3)
    assert (layout.n_layers, layout.n_special_tokens, layout.tokens_per_example, layout.n_shards) == (3, 1, 5, 3)
    assert (layout.shape, layout.vectors_per_example) == ((7, 3, 5, 8), 15)
    assert (layout.vector_nbytes, layout.example_nbytes, layout.shard_nbytes, layout.nbytes) == (32, 480, 1440, 3360)
    assert [layout.examples_in(i) for i in range(5)] == [3, 3, 1, 0, 0]
    assert [layout.used_nbytes(i) for i in range(4)] == [1440, 1440, 480, 0]
    assert [layout.example_range(i) for i in range(3)] == [(0, 3), (3, 6), (6, 7)]
    assert Layout(7, (2,), 4, False, 8, 3).n_special_tokens == 0


def test_names_of_the_entries_of_a_layer_axis() -> None:
    assert [layer_name(key) for key in (5, -1, (5, "attn.z"))] == ["5", "-1", "5:attn.z"]
    # The names of TransformerLens's hooks: the part behind the last dot is the hook, what is before it the module.
    names = {
        5: "blocks.5.hook_resid_post",
        (0, "resid_pre"): "blocks.0.hook_resid_pre",
        (5, "attn.z"): "blocks.5.attn.hook_z",
        (2, "mlp.inner.post"): "blocks.2.mlp.inner.hook_post",
    }
    assert {key: transformer_lens_name(key) for key in names} == names


def test_what_a_pair_of_a_label_and_a_hook_point_is() -> None:
    assert is_layer_pair((3, "attn_out"))
    for layer in (3, "attn_out", None, [3, "attn_out"], (3,), (3, 4), (3, "a", "b"), ()):
        assert not is_layer_pair(layer)


def test_a_label_of_several_hook_points_names_none() -> None:
    layout = Layout(7, (2, 5, 5), 4, True, 8, 3, hook_points=("resid_post", "mlp_out", "attn_out"))
    assert [layout.layer_index(key) for key in (2, (5, "mlp_out"), (5, "attn_out"))] == [0, 1, 2]
    for layer in (5, (5, "resid_post"), (2, "mlp_out")):
        with pytest.raises(LayerNotFoundError) as caught:
            layout.layer_index(layer)
        assert caught.value.where == "layer"
