"""Details of the page, each alone: edges of contexts and bounds, remedies; against tables."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors_files import safetensors
from viewed_stores import store_of, text_store, viewed

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from api import MemoryTransport

from saev_store import ShardStore
from saev_store.core.layout import Layout, shard_name
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    IncompleteStoreError,
    LayerNotFoundError,
    NotFoundError,
    SelectionError,
    UnsafeContentError,
)
from saev_store.problems import Problem
from saev_store.view import LOCAL, Budget, Pages, View, Viewed, _application, _server, application, open_pages, read_sae
from saev_store.view._answers import _provenance, shard_strip, store_answer
from saev_store.view._application import _static_files
from saev_store.view._arithmetic import cosine_rows, nearest, norms_of, principal_components
from saev_store.view._compare import compare_answer
from saev_store.view._examples import example_answer
from saev_store.view._features import feature_answer, features_answer
from saev_store.view._layers import _dimensions, root_mean_squares
from saev_store.view._pages import Query
from saev_store.view._places import places_in, plain, without_places
from saev_store.view._server import name_of
from saev_store.view._texts import context_of, texts_of
from saev_store.view._viewed import Sample


def numbers(*shape: int) -> np.ndarray:
    """Vectors (n, layers, tokens, d_model), float32."""
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def test_without_an_sae_features_are_refused_with_a_way_on(tmp_path: Path) -> None:
    one = viewed(text_store(tmp_path))
    for call in (lambda: features_answer(one, None), lambda: feature_answer(one, 0, None)):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert (caught.value.message, caught.value.where) == ("there is no SAE to show features of", "sae")
        assert caught.value.remedy == "Run `saev-store view URL --sae FILE`."


def test_where_most_dimensions_are_dead_none_stands_out() -> None:
    acts = np.zeros((4, 5), np.float32)
    acts[:, 1] = 7
    found = _dimensions(Sample(acts, np.arange(4), np.zeros(4, np.int64)))
    assert (found["median_rms"], found["outliers"], found["n_outliers"]) == (0.0, [], 0)
    assert (found["n_dead"], found["dead"], found["rms"]) == (4, [0, 2, 3, 4], [0.0, 7.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("n_more", [0, 1])
def test_the_settings_of_an_sae_have_a_mebibyte_at_most(tmp_path: Path, n_more: int) -> None:
    tensors = {"W_enc": np.ones((2, 3), np.float32), "W_dec": np.ones((3, 2), np.float32)}
    (tmp_path / "sae.safetensors").write_bytes(safetensors(tensors))
    text = json.dumps({"architecture": "topk", "k": 2})
    (tmp_path / "cfg.json").write_text(text.ljust((1 << 20) + n_more))
    if not n_more:
        assert read_sae(tmp_path / "sae.safetensors").k == 2
        return
    with pytest.raises(DocumentError, match="it has 1048577 bytes; 1048576 are read at most") as caught:
        read_sae(tmp_path / "sae.safetensors")
    assert caught.value.where == str(tmp_path / "cfg.json")


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_the_largest_activations_are_left_where_all_are_active(tmp_path: Path, k: int) -> None:
    tensors = {"W_enc": np.float32([[4, 1, 3, 2]]), "W_dec": np.ones((4, 1), np.float32)}
    (tmp_path / "sae.safetensors").write_bytes(safetensors(tensors))
    (tmp_path / "cfg.json").write_text(json.dumps({"k": k}))
    found = read_sae(tmp_path / "sae.safetensors").encode(np.float32([[1], [10]]))
    kept = [number if number > 4 - k else 0 for number in (4, 1, 3, 2)]
    assert found.tolist() == [kept, [10 * number for number in kept]]


def test_a_context_ends_with_its_example(tmp_path: Path) -> None:
    folder = text_store(tmp_path, tokens=9)
    words = [f"<{number}>" for number in ShardStore.open(folder).token_arrays["token_ids"][2].tolist()]
    one = viewed(folder, tokenizer=lambda number: f"<{number}>")
    for at in range(9):
        expected = {"before": words[max(0, at - 6) : at], "token": words[at], "after": words[at + 1 : at + 7]}
        assert context_of(one, 2, at) == expected
    assert context_of(one, 2, 9) is context_of(one, 2, -1) is None
    special = SimpleNamespace(layout=SimpleNamespace(n_special_tokens=1), arrays=one.arrays, decode=one.decode)
    assert context_of(special, 2, 0) is None
    assert context_of(special, 2, 1) == context_of(one, 2, 0)
    assert context_of(special, 2, 9) == context_of(one, 2, 8)


# -- what is said of a store -------------------------------------------------------------------------------------------


def test_where_examples_come_from_has_plain_values_without_places() -> None:
    source = {
        "url": "s3://key@bucket/a/my set", "n": 3, "share": 0.5, "bad": float("nan"), "is_new": True, "files": ["/a/b"],
        "inner": {"url": "/a/b"}, "none": None, "note": "in /home/me/x.png",
    }  # fmt: skip
    shown = {"url": "my set", "n": 3, "share": 0.5, "bad": None, "is_new": True, "note": "in x.png"}
    for data, expected in (
        ({"source": source}, {"dataset": "c d", "source": shown}),
        (json.dumps({"source": {"n": 4}}), {"dataset": "c d", "source": {"n": 4}}),
        ({"source": ["/a"]}, {"dataset": "c d"}),
        ("no JSON", {"dataset": "c d"}),
        ([1], {"dataset": "c d"}),
    ):
        metadata = SimpleNamespace(data=data, dataset="/b/c d")
        places = ("/b/c d", "s3://key@bucket/a/my set")
        one = SimpleNamespace(store=SimpleNamespace(metadata=metadata), places=places)
        assert _provenance(one) == expected
    metadata.dataset = None
    assert _provenance(one) == {"dataset": ""}


@pytest.mark.parametrize("n_shards", [3, 400, 401, 1000])
def test_a_cell_of_many_shards_shows_the_worst_of_them(n_shards: int) -> None:
    layout = Layout(n_shards, (0,), 1, False, 2, 1)
    readable = {0: 0, 1: 5} if n_shards == 3 else {200: 3, 201: 0, n_shards - 1: 3}
    gone = [Problem("missing_shard", "", shard_name(n_shards - 1)), Problem("other", "", shard_name(0))]
    one = SimpleNamespace(layout=layout, store=SimpleNamespace(readable_examples=readable, problems=gone))
    found = shard_strip(one)
    cells = found["cells"]
    assert [cell["first"] for cell in cells] == [0, *(cell["last"] + 1 for cell in cells[:-1])]
    assert (cells[-1]["last"], len(cells)) == (n_shards - 1, min(n_shards, 400))
    sizes = [cell["last"] - cell["first"] + 1 for cell in cells]
    assert max(sizes) - min(sizes) <= 1
    states = {shard: "missing" if not left or shard == n_shards - 1 else "short" for shard, left in readable.items()}
    order = ["whole", "short", "missing"]
    for cell in cells:
        inside = [states.get(shard, "whole") for shard in range(cell["first"], cell["last"] + 1)]
        assert cell["state"] == max(inside, key=order.index)
    assert (found["n"], found["n_damaged"], found["examples_per_shard"]) == (n_shards, len(readable), 1)
    assert found["nbytes"] == layout.shard_nbytes


def test_token_arrays_of_a_store_are_listed_also_where_they_are_not_read(tmp_path: Path) -> None:
    one = viewed(text_store(tmp_path))
    assert store_answer(one)["token_arrays"] == ["token_ids", "mask"]
    one._kept.clear()
    one.is_local = False
    assert store_answer(one)["token_arrays"] == ["token_ids", "mask"]
    assert "arrays" not in one._kept
    assert [name for name, _ in store_answer(one)["card"] if name in {"where", "problems"}] == []


# -- what is read ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1])
def test_similarities_do_not_outlive_a_repair_of_either_store(tmp_path: Path, which: int) -> None:
    acts = [numbers(6, 1, 3, 4), numbers(6, 1, 3, 5)]
    folders = [store_of(tmp_path / name, values) for name, values in zip("ab", acts, strict=True)]
    pages = Pages(*map(viewed, folders[:1]), other=viewed(folders[1]))
    before = pages.views["compare"](Query({"example": "4"}))["similarity"]
    assert (before["n_examples"], before) == (6, pages.views["compare"](Query({"example": "5"}))["similarity"])
    (folders[which] / shard_name(0)).unlink()
    with ShardStore.open(folders[which], damaged_ok=True).repair() as writer:
        for start, end in writer.missing:
            writer.append(acts[which][start:end] + 5)
    assert pages.views["compare"](Query({"example": "4"}))["similarity"]["n_examples"] == 3  # of the other shard


def test_whether_tokens_are_the_same_is_asked_again_of_replaced_ids(tmp_path: Path) -> None:
    a, b = text_store(tmp_path / "a"), text_store(tmp_path / "b", layers=(0,))
    pages = Pages(viewed(a), other=viewed(b))
    assert [pages.views["compare"](Query({"example": str(at)}))["why_not"] for at in (3, 4)] == ["", ""]
    ids = ShardStore.open(b).token_arrays["token_ids"] + 1
    (b / "new").write_bytes(ids.tobytes())
    (b / "new").replace(b / "token_ids.bin")
    with pytest.raises(CorruptShardError, match="another file has taken the place"):
        pages.views["compare"](Query({"example": "3"}))


def test_the_samples_of_four_layers_are_held(tmp_path: Path) -> None:
    """The one that was not asked for longest is read anew."""
    one = viewed(store_of(tmp_path, numbers(3, 6, 2, 4)))
    first = {layer: one.sample(layer) for layer in range(4)}
    assert one.sample(0) is first[0]
    one.sample(4)
    assert list(one._samples) == [2, 3, 0, 4]
    assert one.sample(2) is first[2]
    assert one.sample(1) is not first[1]
    assert list(one._samples) == [0, 4, 2, 1]


@pytest.mark.parametrize(
    ("nbytes", "n_tokens", "n_examples"), [(7, 1, 1), (16, 1, 1), (32, 2, 1), (95, 3, 1), (96, 3, 2), (10**6, 3, 5)]
)
def test_a_sample_is_as_large_as_the_budget(tmp_path: Path, nbytes: int, n_tokens: int, n_examples: int) -> None:
    """Vectors of 16 bytes, three of them in an example."""
    acts = numbers(5, 2, 3, 4)
    one = viewed(store_of(tmp_path, acts), budget=Budget(9, 9, nbytes, 0))
    found = one.sample(1)
    assert (one.n_sample_tokens, len(np.unique(found.example))) == (n_tokens, n_examples)
    np.testing.assert_array_equal(found.acts, acts[found.example, 1, found.token])
    assert found.token.tolist() == list(range(n_tokens)) * n_examples
    whole = one.whole()
    assert (whole is None) == (nbytes < 96)  # all layers of an example
    if whole is not None:
        assert len(whole[0]) == (1 if nbytes == 96 else 5)
        np.testing.assert_array_equal(whole[1], acts[whole[0]])


@pytest.mark.parametrize("n_less", [0, 1])
def test_a_token_array_is_read_up_to_the_budget(tmp_path: Path, n_less: int) -> None:
    nbytes = 9 * 30 * 4
    found, notes = viewed(text_store(tmp_path), budget=Budget(1, 1, 1 << 20, nbytes - n_less)).arrays()
    assert list(found) == (["mask"] if n_less else ["token_ids", "mask"])
    assert notes == (["token_ids is too large to be read for this page"] if n_less else [])


def test_token_arrays_that_are_damaged_are_named(tmp_path: Path) -> None:
    folder = text_store(tmp_path)
    (folder / "mask.bin").unlink()
    one = viewed(folder)
    found, notes = one.arrays()
    assert list(found) == ["token_ids"]
    assert len(notes) == 1
    assert notes[0].startswith("mask: ")
    assert example_answer(one, 0, None)["notes"]


def test_a_store_that_a_program_holds_in_memory_is_read_like_one_on_a_disk(tmp_path: Path) -> None:
    folder = store_of(tmp_path, numbers(4, 1, 3, 4))
    data = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    one = Viewed(ShardStore.open(MemoryTransport(data, label=folder.name)))
    assert (one.is_local, one.budget) == (True, LOCAL)


def test_examples_of_a_huge_store_are_chosen_from_all_of_it() -> None:
    layout = Layout(200_000, (0,), 1, False, 2, 1000)
    one = SimpleNamespace(layout=layout, store=SimpleNamespace(readable_examples={199: 500, 3: 0}))
    found = Viewed._readable(one)
    assert (found[0], found[-1]) == (0, 199_499)
    assert 64_000 < len(found) < 65_536
    assert not ((found >= 3000) & (found < 4000)).any()


@pytest.mark.parametrize(
    ("error", "said"),
    [(NotFoundError("it is away", where="x"), "it is away"), (ZeroDivisionError("secret"), "ZeroDivisionError")],
)
def test_why_there_is_no_data_set(tmp_path: Path, error: Exception, said: str) -> None:
    one, asked = viewed(text_store(tmp_path)), []

    def fails() -> None:
        asked.append(1)
        raise error

    object.__setattr__(one, "store", SimpleNamespace(source=fails))
    assert [one.source() for _ in range(2)] == [(None, said)] * 2
    assert asked == [1]


def test_what_does_not_exist_is_named_with_what_does(tmp_path: Path) -> None:
    one = viewed(store_of(tmp_path, numbers(3, 2, 4, 4)))
    for call, message, where in (
        (lambda: one.check_example(3), "example 3 does not exist; there are 0 to 2", "example"),
        (lambda: one.check_example(-1), "example -1 does not exist; there are 0 to 2", "example"),
        (lambda: one.check_token(4), "token 4 does not exist; there are 0 to 3", "token"),
        (lambda: one.layer_at("2"), "layer '2' was not recorded; there are 0, 1", "layer"),
    ):
        with pytest.raises((SelectionError, LayerNotFoundError)) as caught:
            call()
        assert (caught.value.message, caught.value.where) == (message, where)
    assert (one.check_example(2), one.check_token(3), one.layer_at("0"), one.layer_at(None)) == (2, 3, 0, 1)
    for path in Path(one.store.url).glob("acts*"):
        path.unlink()
    one = viewed(Path(one.store.url))
    with pytest.raises(CorruptShardError, match="all examples of the store are lost") as caught:
        one.sample(0)
    assert caught.value.where == one.store.name


def test_similarities_are_of_some_hundred_tokens_evenly_spread() -> None:
    acts = np.random.default_rng(0).normal(size=(300, 2, 4, 5)).astype(np.float32)
    acts[0, 0, 1, 2] = np.inf
    one = SimpleNamespace(layout=SimpleNamespace(n_special_tokens=1))
    grams = Viewed.grams(one, np.arange(300), acts)
    rows = acts[:, :, 1:].swapaxes(0, 1).reshape(2, 900, 5)[:, np.round(np.linspace(0, 899, 512)).astype(int)][:, 1:]
    assert [gram.shape for gram in grams] == [(511, 511)] * 2
    for gram, layer in zip(grams, rows.astype(np.float64), strict=True):
        centred = layer - layer.mean(axis=0)
        np.testing.assert_allclose(gram, centred @ centred.T, atol=1e-9)


# -- arithmetic --------------------------------------------------------------------------------------------------------


def test_norms_of_more_vectors_than_are_taken_at_once() -> None:
    vectors = np.random.default_rng(0).normal(size=(5, 1 << 19)).astype(np.float32)
    wide = vectors.astype(np.float64)
    np.testing.assert_allclose(norms_of(vectors), np.linalg.norm(wide, axis=1), rtol=1e-12)
    np.testing.assert_allclose(root_mean_squares(vectors), np.sqrt(np.square(wide).mean(axis=0)), rtol=1e-12)


def test_fewer_neighbours_are_found_where_fewer_may_be() -> None:
    units = np.eye(4, dtype=np.float32)
    query = np.float32([0.6, 0, 0.8, 0])
    for usable, expected in (([True, False, True, False], [2, 0]), ([False] * 4, [])):
        found, similarities = nearest(query, units, np.array(usable), 3)
        assert found.tolist() == expected
        np.testing.assert_array_equal(similarities, query[expected])


def test_rows_without_a_direction_have_no_cosine() -> None:
    sound = np.float32([[3, 4]] * 4)
    other = np.float32([[4, 3], [0, 0], [np.nan, 1], [np.inf, 1]])
    for a, b in ((sound, other), (other, sound)):
        np.testing.assert_allclose(cosine_rows(a, b), [0.96, np.nan, np.nan, np.nan], rtol=1e-6)


@pytest.mark.parametrize(("n", "d_model"), [(40, 5), (4, 9)])
def test_vectors_along_a_line_have_one_component(n: int, d_model: int) -> None:
    """What is left of the others is rounding, and no direction."""
    along = np.random.default_rng(2).normal(size=d_model)
    vectors = (np.arange(n)[:, np.newaxis] * np.round(along * 8) + 3).astype(np.float32)
    found = principal_components(vectors)
    assert (found.axes.shape, found.variance_share.tolist()) == ((1, d_model), [pytest.approx(1)])
    assert np.unique(found.colours(vectors)[:, 1:]).tolist() == [128]
    assert len(principal_components(vectors[:1]).axes) == len(principal_components(vectors[:0]).axes) == 0


def test_colours_reach_from_one_hundredth_to_the_other() -> None:
    vectors = (np.random.default_rng(1).normal(size=(400, 6)) * [9, 5, 3, 1, 1, 1]).astype(np.float32)
    found = principal_components(vectors)
    assert (found.axes[np.arange(3), np.abs(found.axes).argmax(axis=1)] > 0).all()
    places = (vectors - vectors.mean(axis=0, dtype=np.float64)) @ found.axes.T
    low, high = np.quantile(places, [0.01, 0.99], axis=0)
    np.testing.assert_allclose([found.low, found.high], [low, high])
    expected = np.round(np.clip((places - low) / (high - low), 0, 1) * 255)
    assert np.abs(found.colours(vectors).astype(int) - expected).max() <= 1


# -- places and names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "places", "expected"),
    [
        ("see C:\\Users\\me\\x.bin", (), "see x.bin"),
        ("\\\\server\\share\\y", (), "y"),
        ("https://host/a/b#part and gs://b/c?x=1#y", (), "b and c"),
        ("no 'C:\\\\a b\\\\c d' here", ("C:\\a b\\c d",), "no 'c d' here"),
        ("/a b/c d and /a b", ("/a b", "/a b/c d/"), "c d and a b"),
        ("x/y ~/z !", ("",), "x/y z !"),
        ("at s3://user:pw@bucket.", (), "at bucket."),
    ],
)
def test_of_every_place_the_last_component_is_left(text: str, places: tuple[str, ...], expected: str) -> None:
    assert without_places(text, places) == expected


@pytest.mark.parametrize("word", ["a", "a::", "a:", "/", "a:/", "s3://", "~/", "\\"])
def test_long_words_are_searched_in_linear_time(word: str) -> None:
    """Some letters for each of which all the rest is read would take days."""
    assert len(without_places(word * 1_000_000)) <= len(word) * 1_000_000
    assert without_places(f"{word * 1000} is at s3://bucket/a/b").endswith("b")


def test_places_in_deep_and_long_documents() -> None:
    assert places_in([f"/data/{number}" for number in range(70)]) == tuple(f"/data/{number}" for number in range(64))
    deep: object = "/data/deep"
    for _ in range(20):
        deep = {"a": [deep]} if isinstance(deep, str) else (deep,)
    assert places_in(deep) == ()
    assert places_in({"a": ({"b": ["s3://b/c"]}, 3), "d": "no/place"}) == ("s3://b/c",)
    numbers: object = 1.0
    for _ in range(30):
        numbers = [numbers]
    assert "None" in str(plain(numbers))
    assert plain([[1, (2, np.float32("inf"))], b"x"[:0] or None]) == [[1, [2, None]], None]


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("/a/b/", "b"),
        ("s3://key:word@bucket", "bucket"),
        ("s3://b/c?versionId=/x", "c"),
        ("", "store"),
        ("/", "store"),
        ("x", "x"),
    ],
)
def test_the_name_of_a_store_that_does_not_open(url: str, name: str) -> None:
    assert name_of(url) == name


def test_pages_without_a_store_say_why() -> None:
    error = DocumentError("/data/x is bad", where="/data/x", remedy="See /data/x.")
    pages = Pages(None, name="x", error=error, places=("/data/x",))
    assert pages.places == ("/data/x",)
    assert pages.views["store"](Query({}))["remedy"] == "See x."
    for view, parameters in (("layers", {}), ("example", {"example": "0"}), ("token", {"example": "0", "token": "1"})):
        with pytest.raises(DocumentError) as caught:
            pages.views[view](Query(parameters))
        assert caught.value is error
    with pytest.raises(DocumentError):
        pages.image(0)
    with pytest.raises(SelectionError, match="there is no store"):
        Pages(None).views["layers"](Query({}))
    with pytest.raises(ArgumentError, match="there is no second store to compare with") as caught:
        pages.views["compare"](Query({}))
    assert caught.value.where == "compare"


# -- two stores --------------------------------------------------------------------------------------------------------


def test_vectors_of_another_length_have_no_cosine_and_long_examples_are_cut(tmp_path: Path) -> None:
    a = viewed(store_of(tmp_path / "a", numbers(3, 1, 6, 4)), budget=Budget(9, 9, 3 * 16, 0))
    b = viewed(store_of(tmp_path / "b", numbers(3, 2, 6, 8)), budget=Budget(9, 9, 2 * 32, 0))
    for first, second in ((a, b), (b, a)):
        found = compare_answer(first, second, 1, None, "0")
        assert found["names"] == [first.store.name, second.store.name]
        assert found["layers_b"] == second.layer_names
        assert found["cosine"] is None
        assert [len(norms) for norms in found["norms"]] == [2, 2]  # as many as the smaller budget has room for
        assert found["similarity"] == {
            "matrix": None,
            "why_not": "one example is larger than what this page reads at once",
        }
        first._kept.clear()
    norms = np.linalg.norm(numbers(3, 1, 6, 4)[1, 0, 1:3].astype(np.float64), axis=1)
    np.testing.assert_allclose(compare_answer(a, b, 1, None, None)["norms"][0], norms)


def test_stores_of_which_too_little_is_finite_are_not_compared(tmp_path: Path) -> None:
    acts = numbers(3, 1, 3, 4)
    acts[:, 0, 1:] = np.nan
    folders = store_of(tmp_path / "a", acts), store_of(tmp_path / "b", numbers(3, 1, 3, 4))
    found = compare_answer(viewed(folders[0]), viewed(folders[1]), 0, None, None)
    assert found["similarity"] == {"matrix": None, "why_not": "some vectors are not finite"}
    assert found["norms"][0] == [None, None]
    acts[:, 0, 1:] = 1
    acts[0, 0, 1:] = np.nan
    found = compare_answer(viewed(store_of(tmp_path / "c", acts)), viewed(folders[1]), 0, None, None)
    assert found["similarity"]["why_not"] == "some vectors are not finite"


def test_layers_are_compared_over_the_smaller_of_two_samples(tmp_path: Path) -> None:
    """Vectors of other lengths: of the longer ones fewer examples fit into the budget."""
    acts = numbers(9, 1, 3, 4), numbers(9, 2, 3, 16)
    folders = [store_of(tmp_path / name, values) for name, values in zip("ab", acts, strict=True)]
    budget = Budget(9, 9, 3 * 2 * 3 * 16 * 4, 0)
    a, b = (viewed(folder, budget=budget) for folder in folders)
    assert (len(a.whole()[0]), b.whole()[0].tolist()) == (9, [0, 4, 8])
    for first, second in ((a, b), (b, a)):
        found = compare_answer(first, second, 0, None, None)["similarity"]
        assert (found["n_examples"], found["n_vectors"]) == (3, 6)


# -- texts of a data set -----------------------------------------------------------------------------------------------


def test_ids_of_a_data_set_are_those_of_each_example_from_its_place_on() -> None:
    """Without recorded ids: an example is a part of a sample."""
    samples = {0: np.arange(10, 20), 1: np.arange(30, 40)}
    asked: list[tuple] = []

    def origin(example: int, token: int | None = None, *, source: object, neighbours: int | None = None) -> object:
        assert source == "a source"
        asked.append((example, token, neighbours))
        return SimpleNamespace(sample=samples[example], place=SimpleNamespace(position=2 + example))

    kept: dict[str, object] = {}
    one = SimpleNamespace(
        arrays=lambda: ({}, []), source=lambda: ("a source", ""), decode=lambda number: f"<{number}>",
        once=lambda name, compute: kept.setdefault(name, compute()),
        layout=SimpleNamespace(content_tokens_per_example=4, n_special_tokens=0),
        store=SimpleNamespace(metadata=SimpleNamespace(data={"examples": {"by_sample": 1}}), origin=origin),
    )  # fmt: skip
    assert texts_of(one, 0, slice(0, 9)) == ["<12>", "<13>", "<14>", "<15>"]
    assert texts_of(one, 1, slice(1, 3)) == ["<34>", "<35>"]
    assert context_of(one, 1, 3) == {"before": ["<33>", "<34>", "<35>"], "token": "<36>", "after": []}
    assert asked[:2] == [(0, None, None), (0, 0, 0)]
    one.store.metadata.data = {"examples": {"by_token": 1}}
    kept.clear()
    assert texts_of(one, 0, slice(0, 9)) is None
    one.store.metadata.data = {}
    origin_of, one.store.origin = one.store.origin, raising(CorruptShardError("lost", where="x"))
    kept.clear()
    assert texts_of(one, 0, slice(0, 9)) is None
    one.store.origin = origin_of
    samples[0] = "a picture"
    kept.clear()
    assert texts_of(one, 0, slice(0, 9)) is None
    one.source = lambda: (None, "away")
    assert texts_of(one, 1, slice(0, 9)) is context_of(one, 1, 0) is None


# -- what the page is made of, and how it is opened --------------------------------------------------------------------


def test_files_of_the_page_have_their_types() -> None:
    found = _static_files()
    root = Path(_application.__file__).with_name("static")
    types = {
        "index.html": "text/html; charset=utf-8", "view.css": "text/css; charset=utf-8", "app.js": "text/javascript; charset=utf-8",
        "icon.svg": "image/svg+xml", "vendor/uPlot.min.css": "text/css; charset=utf-8",
        "vendor/uPlot.esm.js": "text/javascript; charset=utf-8", "vendor/uPlot.LICENSE": "text/plain; charset=utf-8",
    }  # fmt: skip
    for name, content_type in types.items():
        assert found[name] == ((root / name).read_bytes(), content_type)
    assert {*found} == {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("in_notebook", "frames"),
    [
        (False, "'none'"),
        (True, "'self' http://localhost:* http://127.0.0.1:* https://localhost:* vscode-webview:"),
    ],
)
def test_what_an_answer_allows(in_notebook: bool, frames: str) -> None:
    import asyncio

    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)

    async def receive() -> dict:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http", "method": "GET", "path": "/s3cr3t/", "raw_path": b"/s3cr3t/", "query_string": b"", "root_path": "",
        "headers": [(b"host", b"127.0.0.1:80")], "scheme": "http", "server": ("127.0.0.1", 80), "http_version": "1.1",
    }  # fmt: skip
    pages = SimpleNamespace(views={}, places=())
    asyncio.run(application(pages, token="s3cr3t", in_notebook=in_notebook)(scope, receive, send))
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    assert sent[0]["status"] == 200
    assert headers["content-security-policy"] == (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        f"form-action 'none'; frame-ancestors {frames}"
    )
    others = ("cross-origin-resource-policy", "referrer-policy", "x-content-type-options", "cache-control")
    assert [headers[name] for name in others] == ["same-origin", "no-referrer", "nosniff", "no-store"]


def test_both_stores_are_opened_with_the_options_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, opened, asked = text_store(tmp_path), ShardStore.open, []

    def noted(url: object, options: object = None, **named: object) -> ShardStore:
        asked.append((url, options, named))
        return opened(folder, **named)

    monkeypatch.setattr(ShardStore, "open", noted)
    pages = open_pages("memory://a/b", {"anon": True}, other="memory://c/d")
    assert asked == [
        ("memory://a/b", {"anon": True}, {"damaged_ok": True}),
        ("memory://c/d", {"anon": True}, {"damaged_ok": True}),
    ]
    assert {"memory://a/b", "memory://c/d", str(folder)} <= {*pages.places}
    for kind in (CorruptShardError, DocumentError, IncompleteStoreError, UnsafeContentError):
        monkeypatch.setattr(ShardStore, "open", raising(kind("bad", where="memory://a/b")))
        found = open_pages("memory://a/b").views["store"](Query({}))
        assert (found["name"], found["is_open"], found["problems"][0]["message"]) == ("b", False, "bad")
    monkeypatch.setattr(ShardStore, "open", raising(NotFoundError("away", where="x")))
    with pytest.raises(NotFoundError):
        open_pages("memory://a/b")


def raising(error: Exception) -> Callable[..., None]:
    def fails(*_: object, **__: object) -> None:
        raise error

    return fails


@pytest.mark.parametrize("moment", ["start", "end"])
def test_a_view_whose_start_or_end_is_interrupted_serves_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    n_stopped = 0

    def stop() -> None:
        nonlocal n_stopped
        n_stopped += 1
        if n_stopped == 1 and moment == "end":
            raise KeyboardInterrupt

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def serve(_app: object, listening: socket.socket) -> Callable[[], None]:
        listening.close()
        return stop

    monkeypatch.setattr(_server, "serve_in_thread", serve)
    store = ShardStore.open(store_of(tmp_path, numbers(4, 1, 3, 4)))
    if moment == "start":
        monkeypatch.setattr(_server, "weakref", SimpleNamespace(finalize=interrupt))
        with pytest.raises(KeyboardInterrupt):
            View(store)
        assert n_stopped == 1
        return
    view = View(store)
    with pytest.raises(KeyboardInterrupt):
        view.close()
    assert view.is_running
    view.close()
    assert not view.is_running
    view.close()
    assert n_stopped == 2
