"""Stores of texts: documents come back out of streams and windows, and tokens are told with what is around them."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from api import MemoryTransport
from hypothesis import given
from hypothesis import strategies as st

from saev_store import ShardStore, new_metadata
from saev_store.errors import LayerNotFoundError, SelectionError
from saev_store.store import text as text_module
from saev_store.transport import open_transport
from saev_store.writer import create_store

ARRAYS = {"token_ids": "int32", "document_ids": "int64", "positions": "int32", "mask": "bool"}
LAYERS, D = (2, 5, 5), 3


@dataclass
class Corpus:
    """A store of texts and the truth about it: for each document its tokens as (example, token), in order."""

    url: object
    acts: np.ndarray
    arrays: dict[str, np.ndarray]
    documents: dict[int, list[int]]
    places: dict[int, list[tuple[int, int]]]
    n_special: int

    def open(self, **options: object) -> ShardStore:
        return ShardStore.open(self.url, **options)


def stream(documents: dict[int, list[int]], width: int) -> list[list[tuple[int, int, int]]]:
    """Documents end to end, cut every `width` tokens; (document, position, token id), padded with -1."""
    flat = [(key, i, token) for key, tokens in documents.items() for i, token in enumerate(tokens)]
    flat += [(-1, -1, 0)] * (-len(flat) % width)
    return [flat[first : first + width] for first in range(0, len(flat), width)]


def windows(documents: dict[int, list[int]], width: int, step: int) -> list[list[tuple[int, int, int]]]:
    """Each document in windows that begin every `step` tokens, the last one padded."""
    found = []
    for key, tokens in documents.items():
        for first in range(0, len(tokens), step):
            window = [(key, i, tokens[i]) for i in range(first, min(first + width, len(tokens)))]
            found.append(window + [(-1, -1, 0)] * (width - len(window)))
            if first + width >= len(tokens):
                break
    return found


def recorded(root: object, documents, examples, *, layout: str, dtype: str = "bfloat16", drop=(), hidden=()) -> Corpus:
    """Write examples, their tokens' vectors random; `hidden` are (document, position) that the mask hides."""
    rows = np.array(examples, dtype=np.int64)
    n, width, _ = rows.shape
    n_special = int(layout == "window")
    rng = np.random.default_rng(n)
    acts = rng.integers(0, 2**16, (n, len(LAYERS), width + n_special, D), dtype=np.uint16).view(ml_dtypes.bfloat16)
    acts = acts if dtype == "bfloat16" else rng.standard_normal(acts.shape).astype(np.float32)
    shown = np.array([[key >= 0 and (key, i) not in hidden for key, i, _ in example] for example in examples])
    arrays = {
        "token_ids": rows[..., 2].astype(np.int32), "document_ids": rows[..., 0], "positions": rows[..., 1].astype(np.int32),
        "mask": shown,
    }  # fmt: skip
    arrays = {name: values for name, values in arrays.items() if name not in drop}
    metadata = new_metadata(
        family="gpt2", ckpt="x", layers=LAYERS, hook_points=["resid_post", "attn_out", "resid_post"],
        content_tokens_per_example=width, cls_token=bool(n_special), d_model=D, n_examples=n,
        max_tokens_per_shard=2 * len(LAYERS) * (width + n_special), dtype=dtype,
        token_arrays={name: ARRAYS[name] for name in arrays}, text={"layout": layout, "bos": bool(n_special)},
    )  # fmt: skip
    transport = root if isinstance(root, MemoryTransport) else open_transport(root)
    with create_store(transport, metadata, on_nonfinite="allow", progress=False) as writer:
        writer.append(acts, **arrays)
    url = root.at(metadata.hash) if isinstance(root, MemoryTransport) else Path(root) / metadata.hash
    places: dict[int, list[tuple[int, int]]] = {}
    for key, tokens in documents.items():
        of_position: dict[int, tuple[int, int]] = {}
        for e, example in enumerate(examples):
            for t, (other, position, _) in enumerate(example):
                # By hand: of several recordings the one that is furthest into its example.
                if other == key and (position not in of_position or t > of_position[position][1]):
                    of_position[position] = (e, t)
        assert sorted(of_position) == list(range(len(tokens)))
        places[key] = [of_position[i] for i in range(len(tokens))]
    return Corpus(url, acts, arrays, documents, places, n_special)


def same_bits(found: np.ndarray, truth: np.ndarray) -> bool:
    return (found.dtype, found.shape, found.tobytes()) == (truth.dtype, truth.shape, truth.tobytes())


def check_document(corpus: Corpus, store: ShardStore, key: int, *, masked: bool) -> None:
    mask = corpus.arrays.get("mask")
    places = [place for place in corpus.places[key] if masked or mask is None or mask[place]]
    if not places:
        with pytest.raises(SelectionError):
            store.document(key, masked=masked)
        return
    found = store.document(key, dtype="stored", masked=masked)
    truth = np.stack([corpus.acts[e, :, t + corpus.n_special] for e, t in places], axis=1)
    assert same_bits(found.acts, truth)
    assert list(zip(found.example_idx.tolist(), found.token_idx.tolist(), strict=True)) == places
    assert (found.document_id, len(found), found.layers) == (key, len(places), (2, 5, 5))
    for name, values in corpus.arrays.items():
        assert same_bits(found.token_arrays[name], np.array([values[place] for place in places], values.dtype))


DOCUMENTS = st.lists(st.integers(1, 12), min_size=1, max_size=6).map(
    lambda sizes: {7 * i % 5 + 10 * i: list(range(100 * i, 100 * i + size)) for i, size in enumerate(sizes)}
)


@given(documents=DOCUMENTS, width=st.integers(1, 7), step=st.integers(0, 7), data=st.data(), piece=st.integers(1, 9))
def test_documents_come_back_in_order(documents, width, step, data, piece):
    """Of a stream (step 0), and of windows with and without an overlap, also in another order than that of the text."""
    examples = stream(documents, width) if not step else windows(documents, width, min(step, width))
    if step:
        examples = data.draw(st.permutations(examples))
    hidden = {(key, i) for key, tokens in documents.items() for i in range(len(tokens)) if (key + i) % 3 == 0}
    corpus = recorded(MemoryTransport(), documents, examples, layout="window" if step else "stream", hidden=hidden)
    store, whole = corpus.open(), text_module._PIECE
    text_module._PIECE = piece
    try:
        for key in documents:
            check_document(corpus, store, key, masked=False)
            check_document(corpus, store, key, masked=True)
    finally:
        text_module._PIECE = whole
    for key, tokens in documents.items():
        for i, token_id in enumerate(tokens):
            e, t = corpus.places[key][i]
            found = store.context(e, t, before=3, after=2)
            assert (found.document_id, found.position, found.token_id) == (key, i, token_id)
            assert found.before == tuple(tokens[max(0, i - 3) : i])
            assert found.after == tuple(tokens[i + 1 : i + 3])


WORDS = {3: [5, 6, 7, 8, 9, 10, 11], 0: [20], 9: [30, 31, 32, 33]}


@pytest.fixture(params=["stream", "window"])
def corpus(request, tmp_path) -> Corpus:
    examples = stream(WORDS, 5) if request.param == "stream" else windows(WORDS, 4, 3)
    return recorded(tmp_path, WORDS, examples, layout=request.param, dtype="float32")


@pytest.mark.parametrize("engine", ["mmap", "pread", "fsspec"])
def test_every_engine_gives_documents(corpus, engine):
    store = corpus.open(engine=engine)
    for key in WORDS:
        check_document(corpus, store, key, masked=True)
    store.close()
    check_document(corpus, store, 3, masked=False)


def test_layers_and_dtypes_are_those_of_sel(corpus):
    store = corpus.open()
    whole = store.document(3)
    assert len({whole, store.document(3), whole}) == 2  # by identity: arrays have no one answer
    assert whole.acts.shape == (3, 7, D)
    some = store.document(3, layer=[(5, "resid_post"), 2], dtype="bfloat16")
    assert same_bits(some.acts, whole.acts[[2, 0]].astype(ml_dtypes.bfloat16))
    assert (some.layers, store.document(3, layer=2, dtype="float64").acts.shape) == ((5, 2), (1, 7, D))
    rows = store.sel(layer=2, tokens="content", where={"document_ids": 9})
    if corpus.n_special == 0:  # no token twice
        assert same_bits(store.document(9, layer=2).acts[0], rows[:])
    with pytest.raises(LayerNotFoundError):
        store.document(3, layer=7)


def test_a_position_that_was_recorded_twice_is_the_one_that_saw_most(tmp_path):
    corpus = recorded(tmp_path, WORDS, windows(WORDS, 4, 3), layout="window")
    found = corpus.open().document(3)
    # Windows 0-3 and 3-6 of the first document: position 3 comes from the first one, where three tokens are before it.
    assert list(zip(found.example_idx.tolist(), found.token_idx.tolist(), strict=True)) == [
        (0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3),
    ]  # fmt: skip


def test_without_positions_documents_are_in_storage_order(tmp_path):
    corpus = recorded(tmp_path, WORDS, stream(WORDS, 5), layout="stream", drop=("positions", "mask"))
    store = corpus.open()
    for key in WORDS:
        check_document(corpus, store, key, masked=False)
    found = store.context(1, 0, before=2, after=100)
    assert (found.document_id, found.position, found.token_id) == (3, None, 10)
    assert (found.before, found.after) == ((8, 9), (11,))


def test_without_documents_a_window_is_the_text(tmp_path):
    corpus = recorded(tmp_path, WORDS, windows(WORDS, 4, 4), layout="window", drop=("document_ids",))
    found = corpus.open().context(1, 1, before=5)
    assert (found.document_id, found.position, found.token_id) == (None, 5, 10)
    assert (found.before, found.after) == ((9,), (11, 0))  # what pads it cannot be told apart
    with pytest.raises(SelectionError):
        corpus.open().document(3)


def test_errors_name_the_array_and_the_remedy(tmp_path):
    bare = recorded(tmp_path, WORDS, stream(WORDS, 5), layout="stream", drop=("document_ids", "token_ids")).open()
    for name, call in (("document_ids", lambda: bare.document(3)), ("token_ids", lambda: bare.context(0, 0))):
        with pytest.raises(SelectionError) as caught:
            call()
        assert caught.value.where == name
    stream_store = recorded(tmp_path, WORDS, stream(WORDS, 5), layout="stream", drop=("document_ids",)).open()
    with pytest.raises(SelectionError):  # an example is not a text there
        stream_store.context(0, 0)


def test_what_is_not_there_is_refused(corpus):
    store = corpus.open()

    def refused(where: str, call: object, *args: object, **options: object) -> None:
        with pytest.raises(SelectionError) as caught:
            call(*args, **options)
        assert caught.value.where == where

    for junk in (1, -1, 2**63, 10**5000, True, 1.0, "3", None, [3], np.array([3, 9])):
        refused("document_id", store.document, junk)
    assert len(store.document(np.int64(3))) == 7
    for junk in (99, -1, 1.0, True, None, "0", [0], slice(1)):
        refused("example_idx", store.context, junk, 0)
        refused("token_idx", store.context, 0, junk)
        if junk != 99:
            refused("before", store.context, 0, 0, before=junk)
            refused("after", store.context, 0, 0, after=junk)
    refused("token_idx", store.context, 2, 4 if corpus.n_special == 0 else 3)  # padding


def test_documents_of_a_long_stream_take_little_memory():
    """Runs are kept, not tokens, and the file of ids is read in pieces."""
    n, width, length = 2000, 500, 1000
    ids = np.repeat(np.arange(n * width // length), length).reshape(n, width)
    runs = text_module.DocumentRuns(ids)
    whole, text_module._PIECE = text_module._PIECE, 1 << 12
    tracemalloc.start()
    try:
        runs = text_module.DocumentRuns(ids)
        assert runs.tokens_of(17).tolist() == list(range(17_000, 18_000))
        assert tracemalloc.get_traced_memory()[1] < 400_000
    finally:
        tracemalloc.stop()
        text_module._PIECE = whole


def test_a_store_without_token_arrays_says_so(tmp_path):
    metadata = new_metadata(
        family="clip", ckpt="x", layers=[1], content_tokens_per_example=2, cls_token=False, d_model=2, n_examples=1,
    )  # fmt: skip
    with create_store(memory := MemoryTransport(), metadata, progress=False) as writer:
        writer.append(np.ones((1, 1, 2, 2), np.float32))
    store = ShardStore.open(memory.at(metadata.hash))
    with pytest.raises(SelectionError):
        store.document(0)


def test_a_store_that_is_opened_again_has_its_own_documents(tmp_path: Path):
    """Recorded anew, the same documents are cut otherwise; opened anew, the store has those that are there now."""
    first = recorded(
        tmp_path / "a", {1: [5, 6, 7], 2: [8, 9, 4]}, stream({1: [5, 6, 7], 2: [8, 9, 4]}, 3), layout="stream"
    )
    other = {1: [5], 2: [6, 7, 8, 9, 4]}
    second = recorded(tmp_path / "b", other, stream(other, 3), layout="stream")
    assert Path(str(first.url)).name == Path(str(second.url)).name
    store = first.open()
    check_document(first, store, 1, masked=True)
    for file in Path(str(second.url)).glob("*.bin"):
        file.replace(Path(str(first.url)) / file.name)
    store = first.open()
    for key in other:
        check_document(second, store, key, masked=True)
    assert store.context(0, 1, before=2, after=2).document_id == 2
