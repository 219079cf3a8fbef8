"""`import_cache`: what other programs have cached becomes stores, bit for bit.

The caches here are written by hand from what their programs write; those of SAELens by pyarrow, as Hugging Face's library does. The
programs' own writers are in tests/peers/test_cache_peers.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors_files import safetensors

from saev_store import ShardStore
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    NotFoundError,
    ResumeError,
    SaevStoreError,
    TransportError,
)
from saev_store.sources.caches import FORMATS, import_cache
from saev_store.sources.caches._cache import Cache, Wanted, entries_of, layer_axis
from saev_store.sources.caches._stream import check_starts
from saev_store.sources.caches.hidden_states import HiddenStatesCache
from saev_store.sources.caches.memmap import MemmapCache
from saev_store.sources.caches.npy import mapped
from saev_store.sources.caches.saelens import SaelensCache
from saev_store.transport import open_transport
from saev_store.transport.fsspec._transport import FsspecTransport

BF16 = np.dtype(ml_dtypes.bfloat16)
MODEL = {"family": "llama", "ckpt": "tiny", "progress": False}
RNG = np.random.default_rng(0)


# -- safetensors ------------------------------------------------------------------------------------------------------------


def request(n_tokens: int, dtype: np.dtype = BF16, *, n_layers: int = 2, d_model: int = 8) -> dict[str, np.ndarray]:
    return {
        "hidden_states": RNG.standard_normal((n_tokens, n_layers, d_model)).astype(dtype),
        "token_ids": RNG.integers(0, 1000, n_tokens),
    }


def requests(folder: Path, lengths: Sequence[int], dtype: np.dtype = BF16) -> list[dict[str, np.ndarray]]:
    """Files hs_0, hs_1, …; hs_10 sorts behind hs_9."""
    folder.mkdir(parents=True, exist_ok=True)
    made = [request(n, dtype) for n in lengths]
    for number, tensors in enumerate(made):
        (folder / f"hs_{number}.safetensors").write_bytes(safetensors(tensors))
    (folder / "hs_0.safetensors.lock").touch()
    return made


def assert_is_stream(store: ShardStore, acts: np.ndarray, context: int) -> None:
    """The vectors (tokens, layers, d_model) lie end to end in examples of `context` tokens, zeros at the end."""
    n, n_layers, d_model = acts.shape
    stored = store.read(dtype="stored").swapaxes(1, 2).reshape(-1, n_layers, d_model)
    assert stored.dtype == acts.dtype
    assert len(stored) == -(-n // context) * context
    assert stored[:n].tobytes() == acts.tobytes()
    assert not stored[n:].astype(np.float32).any()
    mask = store.token_arrays["mask"].reshape(-1)
    assert mask[:n].all()
    assert not mask[n:].any()
    assert store.validate(deep=True).ok


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("context", [4, 7, 64])
def test_hidden_states_become_a_stream_of_their_requests(name: str, context: int, tmp_path: Path):
    made = requests(
        tmp_path / "hs", [5, 3, 9, 1, 2, 6, 4, 8, 2, 2, 7, 3], np.dtype(BF16 if name == "bfloat16" else name)
    )
    store = import_cache(
        tmp_path / "hs", tmp_path / "out", **MODEL, layer_ids=[3, 18], context=context, max_tokens_per_shard=2 * context,
        max_block_bytes=200,
    )  # fmt: skip
    acts = np.concatenate([tensors["hidden_states"] for tensors in made])
    assert_is_stream(store, acts, context)
    assert store.layers == (2, 17)  # what enters layer 3 has left layer 2
    assert store.metadata.text == {"layout": "stream", "bos": False}
    for number, tensors in enumerate(made):
        document = store.document(number, dtype="stored")
        assert document.token_arrays["token_ids"].tolist() == tensors["token_ids"].tolist()
        assert document.token_arrays["positions"].tolist() == list(range(len(tensors["token_ids"])))
        assert document.acts.tobytes() == tensors["hidden_states"].swapaxes(0, 1).tobytes()


def test_requests_keep_the_numbers_of_their_names(tmp_path: Path):
    for number in (12, 3, 40):
        (tmp_path / f"hs_{number}.safetensors").write_bytes(safetensors(request(number)))
    store = import_cache(tmp_path, tmp_path / "out", **MODEL, layers=[1, 2], context=5)
    ids = store.token_arrays["document_ids"].reshape(-1)
    assert ids.tolist() == [3] * 3 + [12] * 12 + [40] * 40
    for name in ("a-1", "b-1"):  # twice the same number: no number
        (tmp_path / f"{name}.safetensors").write_bytes(safetensors(request(2)))
    store = import_cache(tmp_path, tmp_path / "out", **MODEL, layers=[1, 2], context=5)
    assert np.unique(store.token_arrays["document_ids"]).tolist() == [-1, 0, 1, 2, 3, 4]


def test_a_request_that_is_a_link_to_nothing_is_not_left_out(tmp_path: Path):
    requests(tmp_path, [5, 3, 9])
    (tmp_path / "hs_1.safetensors").rename(tmp_path / "elsewhere")
    (tmp_path / "hs_1.safetensors").symlink_to(tmp_path / "unmounted")
    (tmp_path / ".#hs_2.safetensors").symlink_to("user@host.1:2")  # of an editor
    with pytest.raises(NotFoundError, match="link to nothing") as refused:
        import_cache(tmp_path, tmp_path / "out", **MODEL, layers=[1, 2], context=5)
    assert refused.value.where.endswith("/hs_1.safetensors")
    assert not (tmp_path / "out").exists()
    (tmp_path / "elsewhere").rename(tmp_path / "unmounted")
    store = import_cache(tmp_path, tmp_path / "out", **MODEL, layers=[1, 2], context=5)
    assert int(store.token_arrays["mask"][...].sum()) == 17


def test_a_cache_is_imported_whose_listing_tells_no_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As those of web servers do. Its first file was called a link to nothing."""
    requests(tmp_path / "hs", [5, 3, 9])
    expected = import_cache(tmp_path / "hs", tmp_path / "near", **MODEL, layers=[1, 2], context=5)
    listed = FsspecTransport.list
    monkeypatch.setattr(
        FsspecTransport,
        "list",
        lambda self, path="": [replace(entry, size=None) for entry in listed(self, path)],
    )
    url = f"simplecache::file://{tmp_path}/hs"
    store = import_cache(url, tmp_path / "far", **MODEL, layers=[1, 2], context=5)
    np.testing.assert_array_equal(store.read(dtype="stored"), expected.read(dtype="stored"))


def test_layers_are_named_in_either_numbering(tmp_path: Path):
    requests(tmp_path / "hs", [3])

    def named(**layers: object) -> tuple[object, ...]:
        store = import_cache(tmp_path / "hs", tmp_path / "out", **MODEL, context=3, **layers)
        return store.layout.layer_keys

    assert named(layer_ids=[0, 36]) == ((0, "resid_pre"), (35, "resid_post"))
    assert named(layers=[(4, "mlp_out"), 4]) == ((4, "mlp_out"), (4, "resid_post"))
    for wrong in (
        {},
        {"layers": [1, 2], "layer_ids": [2, 3]},
        {"layers": [1]},
        {"layer_ids": ["3", 4]},
        {"layer_ids": [-1, 4]},
    ):
        with pytest.raises(ArgumentError):
            named(**wrong)


def test_a_header_may_be_long_and_numbers_lie_anywhere(tmp_path: Path):
    tensors = request(4)
    (tmp_path / "a.safetensors").write_bytes(safetensors(tensors, pad=9001))
    store = import_cache(tmp_path, tmp_path / "out", **MODEL, layers=[1, 2], context=4)
    assert_is_stream(store, tensors["hidden_states"], 4)


def _without(name: str) -> Callable[[dict], None]:
    return lambda header: header.pop(name)


def _changed(name: str, **values: object) -> Callable[[dict], None]:
    return lambda header: header[name].update(values)


@pytest.mark.parametrize(
    ("edit", "kind", "message"),
    [
        (_without("hidden_states"), DocumentError, "no tensor 'hidden_states'"),
        (_without("token_ids"), CorruptShardError, "the file has"),
        (_changed("hidden_states", dtype="F8_E4M3"), DocumentError, "bytes in the file"),
        (_changed("hidden_states", dtype="F4"), DocumentError, "no dtype, shape and data_offsets"),
        (_changed("hidden_states", dtype="I16"), DocumentError, "it must be F32, F16 or BF16"),
        (_changed("hidden_states", shape=[6, 16]), DocumentError, "it must be F32, F16 or BF16"),
        (_changed("hidden_states", shape=[2**40, 2, 8]), DocumentError, "bytes in the file"),
        (_changed("hidden_states", shape=[2**62, 2**62, 8]), DocumentError, "bytes in the file"),
        (_changed("hidden_states", shape=[-6, 2, -8]), DocumentError, "no dtype, shape"),
        (_changed("hidden_states", shape=[True, 2, 8]), DocumentError, "no dtype, shape"),
        (_changed("hidden_states", shape=[3, 4, 8]), CorruptShardError, "3 tokens, token_ids"),
        (_changed("hidden_states", shape=[6, 1, 16]), DocumentError, "in hs_0.safetensors it is"),
        (_changed("hidden_states", data_offsets=[10**15, 10**15 + 192]), CorruptShardError, "the file has"),
        (_changed("hidden_states", data_offsets=[192, 0]), DocumentError, "bytes in the file"),
        (_changed("hidden_states", data_offsets=[0]), DocumentError, "no dtype, shape and data_offsets"),
        (_changed("hidden_states", data_offsets="all"), DocumentError, "no dtype, shape and data_offsets"),
        (_changed("token_ids", dtype="F64"), DocumentError, "token_ids is F64"),
        (lambda header: header.update(token_ids=7), DocumentError, "no dtype, shape and data_offsets"),
        (lambda header: header.update(hidden_states_scales=dict(header["token_ids"])), DocumentError, "scaled 8-bit"),
    ],
)
def test_headers_that_break_a_rule_are_refused(
    edit: Callable[[dict], None], kind: type[Exception], message: str, tmp_path: Path
):
    requests(tmp_path / "hs", [3])
    (tmp_path / "hs" / "hs_1.safetensors").write_bytes(safetensors(request(6), edit))
    with pytest.raises(kind, match=message) as caught:
        import_cache(tmp_path / "hs", tmp_path / "out", **MODEL, layers=[1, 2], context=4)
    assert isinstance(caught.value, SaevStoreError)
    assert "hs_1.safetensors" in str(caught.value.where)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("raw", "kind", "message"),
    [
        (b"", CorruptShardError, "too few for a safetensors file"),
        (b"abc", CorruptShardError, "too few for a safetensors file"),
        (struct.pack("<Q", 2**63), CorruptShardError, "said to take 9223372036854775808 bytes"),
        (struct.pack("<Q", 2**40) + b"{}", CorruptShardError, "said to take"),
        (struct.pack("<Q", 5) + b"{nope", DocumentError, "no JSON"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, DocumentError, "no JSON"),
        (struct.pack("<Q", 2) + b"[]", DocumentError, "no JSON object"),
        (struct.pack("<Q", 2) + b"{}", DocumentError, "no tensor"),
        (struct.pack("<Q", 2) + b"{}more", CorruptShardError, "the file has 14"),
        (struct.pack("<Q", 2 << 20) + b" " * (2 << 20), DocumentError, "have at most"),
        (safetensors(request(5))[:-1], CorruptShardError, "It was cut"),
    ],
)  # fmt: skip
def test_files_that_are_none_are_refused(raw: bytes, kind: type[Exception], message: str, tmp_path: Path):
    (tmp_path / "hs_0.safetensors").write_bytes(raw)
    with pytest.raises(kind, match=message):
        import_cache(tmp_path, tmp_path / "out", **MODEL, layers=[1, 2], context=4)


def test_requests_without_tokens_are_nothing_to_import(tmp_path: Path):
    requests(tmp_path / "hs", [0, 0])
    with pytest.raises(DocumentError, match="no token"):
        import_cache(tmp_path / "hs", tmp_path / "out", **MODEL, layers=[1, 2], context=4)
    (tmp_path / "hs" / "hs_2.safetensors").write_bytes(safetensors(tensors := request(5)))
    store = import_cache(tmp_path / "hs", tmp_path / "out", **MODEL, layers=[1, 2], context=4)
    assert_is_stream(store, tensors["hidden_states"], 4)
    assert store.document(2).acts.shape == (2, 5, 8)


def test_token_ids_that_no_store_holds_are_refused(tmp_path: Path):
    tensors = request(4)
    tensors["token_ids"][2] = 2**40
    (tmp_path / "hs_0.safetensors").write_bytes(safetensors(tensors))
    with pytest.raises(ArgumentError, match="token_ids holds values"):
        import_cache(tmp_path, tmp_path / "out", **MODEL, layers=[1, 2], context=4)


@pytest.mark.parametrize("context", [None, 0, -1, 2.5, True])
def test_a_context_is_needed(context: object, tmp_path: Path):
    requests(tmp_path / "hs", [3])
    with pytest.raises(ArgumentError) as caught:
        import_cache(tmp_path / "hs", tmp_path / "out", **MODEL, layers=[1, 2], context=context)
    assert caught.value.where == "context"


def test_an_interrupted_import_continues_and_a_changed_cache_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = requests(tmp_path / "hs", [5, 3, 9, 7, 6])
    options = {**MODEL, "layers": [1, 2], "context": 3, "max_tokens_per_shard": 12, "max_block_bytes": 1}
    whole = import_cache(tmp_path / "hs", tmp_path / "a", **options)
    from saev_store.writer import shard_writer

    append, n_calls = shard_writer.ShardWriter.append, []

    def failing(self: object, *args: object, **arrays: object) -> None:
        n_calls.append(1)
        if len(n_calls) == 6:
            raise KeyboardInterrupt
        append(self, *args, **arrays)

    monkeypatch.setattr(shard_writer.ShardWriter, "append", failing)
    with pytest.raises(KeyboardInterrupt):
        import_cache(tmp_path / "hs", tmp_path / "b", **options)
    path = tmp_path / "hs" / "hs_3.safetensors"
    kept = path.read_bytes()
    path.write_bytes(safetensors({**made[3], "token_ids": made[3]["token_ids"] + 1}))
    with pytest.raises(ResumeError, match="has changed since the import"):
        import_cache(tmp_path / "hs", tmp_path / "b", **options)
    path.write_bytes(kept)
    again = import_cache(tmp_path / "hs", tmp_path / "b", **options)
    for name in ("acts000000.bin", "acts000004.bin", "token_ids.bin", "metadata.json", "digests.json"):
        there = [Path(store.url.removeprefix("file://"), name).read_bytes() for store in (whole, again)]
        assert there[0] == there[1]


def test_a_cache_in_a_bucket_is_read_where_it_is():
    from saev_store.transport import Writes

    made = [request(n) for n in (5, 3, 9)]
    transport = open_transport("memory://caches/hs")
    assert isinstance(transport, Writes)
    for number, tensors in enumerate(made):
        transport.put(f"hs_{number}.safetensors", safetensors(tensors))
    store = import_cache("memory://caches/hs", "memory://caches/out", **MODEL, layers=[1, 2], context=4)
    assert_is_stream(store, np.concatenate([tensors["hidden_states"] for tensors in made]), 4)


def test_the_last_number_of_a_name_is_the_document_id(tmp_path: Path):
    made = requests(tmp_path, [3, 4, 2])
    for number in range(3):
        (tmp_path / f"hs_{number}.safetensors").rename(tmp_path / f"run2_hs_{number + 7}.safetensors")
    (tmp_path / "hs_0.safetensors.lock").unlink()
    store = import_cache(tmp_path, tmp_path / "out", **MODEL, layers=[3, 4], context=4, max_tokens_per_shard=16)
    for number, tensors in enumerate(made):
        found = store.document(number + 7, dtype="stored")
        assert found.acts.tobytes() == tensors["hidden_states"].swapaxes(0, 1).tobytes()


# -- memory-mapped files ----------------------------------------------------------------------------------------------------


def memmaps(
    folder: Path, layers: Sequence[np.ndarray], shards: Sequence[int], *, dtype: str = "bfloat16", **config: object
) -> None:
    """The files of crosscoder_learning: for each layer (tokens, d_model) in shards of so many tokens."""
    for number, values in enumerate(layers):
        sub = folder / f"layer_{9 + number}_out"  # 9 before 10, although not as text
        sub.mkdir(parents=True, exist_ok=True)
        at = 0
        for shard_idx, n in enumerate(shards):
            part = values[at : at + n]
            (sub / f"shard_{shard_idx}.memmap").write_bytes(part.tobytes())
            meta = {"shape": list(part.shape), "dtype": dtype}
            (sub / f"shard_{shard_idx}.meta").write_text(json.dumps(meta))
            at += n
        document = {"shard_count": len(shards), "total_size": at, "d_model": values.shape[1], "shuffle_shards": False}
        (sub / "config.json").write_text(json.dumps(document | config))


def saved_as(path: Path, make: Callable[[Any], object]) -> None:
    torch = pytest.importorskip("torch")
    torch.save(make(torch), path)


def _pickled(pickle: bytes) -> Callable[[Path], None]:
    """A file of torch whose pickle asks for 1.75 GiB."""

    def damage(folder: Path) -> None:
        with zipfile.ZipFile(folder / "tokens.pt") as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(folder / "tokens.pt", "w") as archive:
            for name, data in parts.items():
                archive.writestr(name, pickle if name.endswith("data.pkl") else data)

    return damage


def _inflating(folder: Path) -> None:
    """A file of torch whose numbers are compressed, and become many more than there are tokens."""
    with zipfile.ZipFile(folder / "tokens.pt") as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(folder / "tokens.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in parts.items():
            archive.writestr(name, bytes(1 << 20) if name.endswith("data/0") else data)


def saved(path: Path, values: object) -> None:
    torch = pytest.importorskip("torch")
    torch.save(torch.tensor(values), path)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("pairs", [False, True])
def test_memmaps_with_ranges_become_a_stream_of_documents(pairs: bool, name: str, tmp_path: Path):
    acts = RNG.standard_normal((29, 2, 8)).astype(BF16 if name == "bfloat16" else name)
    memmaps(tmp_path / "c", [acts[:, 0], acts[:, 1]], [12, 10, 7], dtype=name)
    ids = RNG.integers(0, 1000, 29)
    saved(tmp_path / "c" / "tokens.pt", ids)
    bounds = [0, 5, 14, 20, 29]
    saved(tmp_path / "c" / "sequence_ranges.pt", list(pairwise(bounds)) if pairs else bounds)
    store = import_cache(
        tmp_path / "c",
        tmp_path / "out",
        **MODEL,
        layers=[9, 10],
        context=4,
        max_tokens_per_shard=16,
        max_block_bytes=300,
    )
    assert_is_stream(store, acts, 4)
    for number, (start, end) in enumerate(pairwise(bounds)):
        document = store.document(number, dtype="stored")
        assert document.acts.tobytes() == acts[start:end].swapaxes(0, 1).tobytes()
        assert document.token_arrays["token_ids"].tolist() == ids[start:end].tolist()


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("bounds", [
    [0, 3, 3, 10, 20], [0, 0, 20], [0, 0, 0, 4, 4, 4, 5, 20], [0, 7, 20, 20, 20], [0, 0, 20, 20], [0, 20],
])  # fmt: skip
def test_documents_of_memmaps_have_their_numbers_beside_empty_ones(bounds: list[int], pairs: bool, tmp_path: Path):
    acts = RNG.standard_normal((20, 1, 8)).astype(np.float32)
    memmaps(tmp_path / "c", [acts[:, 0]], [12, 8], dtype="float32")
    saved(tmp_path / "c" / "tokens.pt", list(range(100, 120)))
    saved(tmp_path / "c" / "sequence_ranges.pt", list(pairwise(bounds)) if pairs else bounds)
    store = import_cache(tmp_path / "c", tmp_path / "out", **MODEL, layers=[9], context=3, max_block_bytes=100)
    wanted = {number: range(start, end) for number, (start, end) in enumerate(pairwise(bounds)) if start < end}
    numbers, positions = (store.token_arrays[name][...].ravel()[:20] for name in ("document_ids", "positions"))
    assert numbers.tolist() == [number for number, tokens in wanted.items() for _ in tokens]
    assert positions.tolist() == [token - tokens[0] for tokens in wanted.values() for token in tokens]
    for number, tokens in wanted.items():
        document = store.document(number, dtype="stored")
        assert document.token_arrays["token_ids"].tolist() == [100 + token for token in tokens]
        assert document.acts.tobytes() == acts[tokens].swapaxes(0, 1).tobytes()


@pytest.mark.parametrize("name", ["tokens.pt", "sequence_ranges.pt"])
def test_a_part_of_memmaps_that_is_a_link_to_nothing_is_not_left_out(name: str, tmp_path: Path):
    memmaps(tmp_path / "c", [RNG.standard_normal((9, 8)).astype(BF16)], [9])
    saved(tmp_path / "c/tokens.pt", list(range(9)))
    saved(tmp_path / "c/sequence_ranges.pt", [0, 4, 9])
    (tmp_path / "c" / name).unlink()
    (tmp_path / "c" / name).symlink_to("nowhere")
    with pytest.raises(NotFoundError, match=f"{name}: it is a link to nothing"):
        import_cache(tmp_path / "c", tmp_path / "out", **MODEL, layers=[1], context=5)


def test_memmaps_without_ranges_have_documents_where_a_bos_token_says_so(tmp_path: Path):
    acts = RNG.standard_normal((11, 1, 8)).astype(np.float32)
    memmaps(tmp_path / "c", [acts[:, 0]], [11], dtype="torch.float32")
    saved(tmp_path / "c" / "tokens.pt", [2, 5, 5, 2, 7, 2, 1, 1, 1, 1, 2])
    store = import_cache(tmp_path / "c", tmp_path / "out", **MODEL, layers=[9], context=4, bos_token=2)
    assert [len(store.document(number)) for number in range(4)] == [3, 2, 5, 1]
    assert_is_stream(store, acts, 4)
    store = import_cache(tmp_path / "c", tmp_path / "out", **MODEL, layers=[9], context=4)
    assert sorted(store.token_arrays) == ["mask", "token_ids"]
    with pytest.raises(ArgumentError, match="the first token is not 7"):
        import_cache(tmp_path / "c", tmp_path / "out", **MODEL, layers=[9], context=4, bos_token=7)


def _write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "layer_9_out" / name).write_text(text)


def _with_another_layer(folder: Path) -> None:
    memmaps(folder / "other", [np.zeros((21, 8), BF16)], [12, 9])
    (folder / "other" / "layer_9_out").rename(folder / "layer_10_out")
    (folder / "other").rmdir()


def _cut(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-2])


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (_cut("layer_9_out/shard_1.memmap"), CorruptShardError, "it has 158 bytes; 10 vectors"),
        (_write("shard_1.meta", '{"shape": [1000000000000, 8], "dtype": "bfloat16"}'), CorruptShardError, "1000000000000 vectors"),
        (_write("shard_1.meta", '{"shape": [10, 7], "dtype": "bfloat16"}'), DocumentError, r"must be \[tokens, 8\]"),
        (_write("shard_1.meta", '{"shape": 10, "dtype": "bfloat16"}'), DocumentError, "must be"),
        (_write("shard_1.meta", '{"shape": [10, 8], "dtype": "int8"}'), DocumentError, "dtype is 'int8'"),
        (_write("shard_1.meta", "nothing"), DocumentError, "no JSON"),
        (_write("config.json", "[1]"), DocumentError, "no JSON object"),
        (_write("config.json", '{"shard_count": 3, "total_size": 22, "d_model": 8}'), NotFoundError, "shard_2.memmap is missing"),
        (_write("config.json", '{"shard_count": 1e9, "total_size": 22, "d_model": 8}'), DocumentError, "shard_count is"),
        (_write("config.json", '{"shard_count": 2, "total_size": 23, "d_model": 8}'), DocumentError, "total_size is 23"),
        (
            _write("config.json", '{"shard_count": 2, "total_size": 22, "d_model": 8, "shuffle_shards": true}'),
            DocumentError, "were shuffled",
        ),
        (lambda folder: (folder / "layer_9_out" / "shard_0.meta").unlink(), NotFoundError, "shard_0.meta"),
        (_with_another_layer, DocumentError, "layer_10_out has 21 tokens"),
        (lambda folder: saved(folder / "tokens.pt", list(range(21))), CorruptShardError, "for 22 vectors"),
        (lambda folder: saved(folder / "tokens.pt", [[i] for i in range(22)]), CorruptShardError, r"shape \(22, 1\), for 22 vectors"),
        (lambda folder: saved(folder / "tokens.pt", list(range(23))), DocumentError, "no tensor of integers, one for each token"),
        (lambda folder: saved(folder / "tokens.pt", [0.5] * 22), DocumentError, "no tensor of integers"),
        (lambda folder: saved_as(folder / "tokens.pt", lambda torch: torch.arange(22).to_sparse()), DocumentError, "no tensor of integers"),
        (lambda folder: saved_as(folder / "tokens.pt", lambda torch: torch.arange(22, device="meta")), DocumentError, "no tensor of integers"),
        (lambda folder: saved_as(folder / "tokens.pt", lambda torch: torch.arange(22) * 1j), DocumentError, "no tensor of integers"),
        (lambda folder: saved_as(folder / "tokens.pt", lambda torch: torch.arange(22).to_sparse()[None]), DocumentError, "no tensor of integers"),
        (lambda folder: saved_as(folder / "tokens.pt", lambda torch: torch.ones(22, dtype=torch.bool)), DocumentError, "no tensor of integers"),
        (lambda folder: (folder / "tokens.pt").write_bytes(b"no"), DocumentError, "no archive of torch"),
        (_pickled(b"c__builtin__\nbytearray\nJ\x00\x00\x00\x70\x85R."), DocumentError, "names '__builtin__ bytearray"),
        (_pickled(b"ctorch.storage\nUntypedStorage\nJ\x00\x00\x00\x70\x85R."), DocumentError, "names 'torch.storage UntypedStorage"),
        (_pickled(b"\x80\x04\x8c\x08builtins\x8c\x09bytearray\x93J\x00\x00\x00\x70\x85R."), DocumentError, "STACK_GLOBAL"),
        (_inflating, DocumentError, "parts are larger than the file"),
        (lambda folder: (folder / "tokens.pt").write_bytes(bytes(1 << 20)), CorruptShardError, "too many for 22 numbers"),
        (lambda folder: saved(folder / "sequence_ranges.pt", [0, 5, 21]), CorruptShardError, "does not end with 22"),
        (lambda folder: saved(folder / "sequence_ranges.pt", [1, 22]), ArgumentError, "do not cover"),
        (lambda folder: saved(folder / "sequence_ranges.pt", [0, 9, 5, 22]), ArgumentError, "do not cover"),
        (lambda folder: saved(folder / "sequence_ranges.pt", [[0, 5], [6, 22]]), CorruptShardError, "do not cover"),
        (lambda folder: saved(folder / "sequence_ranges.pt", [[[0]]]), CorruptShardError, "does not end"),
    ],
)  # fmt: skip
def test_memmaps_that_break_a_rule_are_refused(
    damage: Callable[[Path], object], kind: type[Exception], message: str, tmp_path: Path
):
    folder = tmp_path / "c"
    memmaps(folder, [np.ones((22, 8), BF16)] * 1, [12, 10])
    saved(folder / "tokens.pt", list(range(22)))
    damage(folder)
    n_layers = len(list(folder.glob("layer_*")))
    with pytest.raises(kind, match=message):
        import_cache(folder, tmp_path / "out", **MODEL, layers=list(range(n_layers)), context=4)
    assert not list((tmp_path / "out").glob("*/metadata.json"))


@pytest.mark.parametrize(
    "make",
    [
        lambda torch: torch.arange(22), lambda torch: torch.arange(44)[::2], lambda torch: torch.arange(100)[50:72],
        lambda torch: torch.nn.Parameter(torch.arange(22), requires_grad=False), lambda torch: torch.arange(22).short(),
        lambda torch: torch.arange(22)._neg_view(), lambda torch: torch.tensor(7).expand(22), lambda torch: torch.arange(22).byte(),
    ],
)  # fmt: skip
def test_tensors_of_every_kind_are_the_tokens(make: Callable[[Any], Any], tmp_path: Path):
    torch = pytest.importorskip("torch")
    memmaps(tmp_path / "c", [np.ones((22, 8), BF16)], [22])
    saved_as(tmp_path / "c" / "tokens.pt", make)
    store = import_cache(tmp_path / "c", tmp_path / "out", **MODEL, layers=[0], context=11)
    assert store.token_arrays["token_ids"].reshape(-1).tolist() == make(torch).resolve_neg().tolist()


def test_a_file_of_an_old_torch_says_so(tmp_path: Path):
    torch = pytest.importorskip("torch")
    memmaps(tmp_path / "c", [np.ones((22, 8), BF16)], [22])
    torch.save(torch.arange(22), tmp_path / "c" / "tokens.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(DocumentError, match=r"written by torch before 1\.6") as caught:
        import_cache(tmp_path / "c", tmp_path / "out", **MODEL, layers=[0], context=11)
    assert caught.value.remedy == "Write it with torch.save(tensor, path)."


def test_a_torch_file_is_not_executed(tmp_path: Path):
    torch = pytest.importorskip("torch")

    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    memmaps(tmp_path / "c", [np.ones((22, 8), BF16)], [22])
    torch.save(Evil(), tmp_path / "c" / "tokens.pt")
    with pytest.raises(DocumentError, match="its pickle names .*PosixPath"):
        import_cache(tmp_path / "c", tmp_path / "out", **MODEL, layers=[9], context=4)
    assert not (tmp_path / "executed").exists()


def test_the_folder_of_one_layer_is_not_the_cache(tmp_path: Path):
    memmaps(tmp_path / "c", [np.ones((22, 8), BF16)], [22])
    with pytest.raises(ArgumentError, match="the folder of one layer"):
        import_cache(tmp_path / "c" / "layer_9_out", tmp_path / "out", **MODEL, layers=[9], context=4)
    store = import_cache(tmp_path / "c", tmp_path / "out", **MODEL, layers=[9], context=4, format="memmap")
    assert list(store.token_arrays) == ["mask"]


# -- Arrow ------------------------------------------------------------------------------------------------------------------


def arrow(
    folder: Path,
    columns: dict[str, np.ndarray],
    files: Sequence[int],
    *,
    rows_in_batch: int = 3,
    claim: dict | None = None,
) -> None:
    """What Hugging Face's library saves of such columns, in files of so many rows."""
    pa = pytest.importorskip("pyarrow")

    folder.mkdir(parents=True, exist_ok=True)
    features, at, names = {}, 0, []
    for name, values in columns.items():
        kind = {"_type": "Array2D", "shape": list(values.shape[1:]), "dtype": values.dtype.name}
        features[name] = kind if values.ndim == 3 else {"_type": "List", "length": values.shape[1]}
    for number, n in enumerate(files):
        names.append(f"data-{number:05d}-of-{len(files):05d}.arrow")
        arrays = {name: pa.array([list(row) for row in values[at : at + n]]) for name, values in columns.items()}
        table = pa.table(arrays)
        with pa.OSFile(str(folder / names[-1]), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=rows_in_batch)
        at += n
    (folder / "dataset_info.json").write_text(json.dumps({"features": features | (claim or {})}))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


HOOK, ARROW = "blocks.3.hook_resid_post", "data-00000-of-00001.arrow"


def cached(n: int = 11, name: str = "float32") -> dict[str, np.ndarray]:
    return {
        HOOK: RNG.standard_normal((n, 4, 8)).astype(name),
        "token_ids": RNG.integers(0, 1000, (n, 4)).astype(np.int32),
    }


@pytest.mark.parametrize("url", ["disk", "memory"])
@pytest.mark.parametrize("name", ["float32", "float16"])
def test_a_saelens_cache_becomes_a_store_of_its_contexts(name: str, url: str, tmp_path: Path):
    columns = cached(name=name)
    columns["blocks.5.attn.hook_z"] = RNG.standard_normal((11, 4, 8)).astype(name)
    arrow(tmp_path / "c", columns, [6, 5])
    src: str | Path = tmp_path / "c"
    if url == "memory":
        src = f"memory://arrow/{name}"
        for path in (tmp_path / "c").iterdir():
            open_transport(src).put(path.name, path.read_bytes())
    store = import_cache(src, tmp_path / "out", **MODEL, max_tokens_per_shard=16, max_block_bytes=1)
    assert store.layout.layer_keys == ((3, "resid_post"), (5, "attn.z"))
    expected = np.stack([columns[HOOK], columns["blocks.5.attn.hook_z"]], axis=1)
    assert store.read(dtype="stored").tobytes() == expected.tobytes()
    np.testing.assert_array_equal(store.token_arrays["token_ids"], columns["token_ids"])
    assert store.metadata.text == {"layout": "window", "bos": False}


def test_a_bos_token_of_each_context_is_the_special_token(tmp_path: Path):
    columns = cached()
    arrow(tmp_path / "c", columns, [11])
    store = import_cache(tmp_path / "c", tmp_path / "out", **MODEL, cls_token=True)
    assert store.shape == (11, 1, 4, 8)
    assert store[...].tobytes() == columns[HOOK].tobytes()
    np.testing.assert_array_equal(store.token_arrays["token_ids"], columns["token_ids"][:, 1:])


def test_hooks_of_other_names_need_layers_and_the_model_may_be_told(tmp_path: Path):
    columns = {"model.layers.7": cached()[HOOK]}
    arrow(tmp_path / "c", columns, [11])
    options = {"family": "llama", "progress": False}
    with pytest.raises(ArgumentError, match="does not say which"):
        import_cache(tmp_path / "c", tmp_path / "out", **options, ckpt="tiny")
    with pytest.raises(ArgumentError, match="does not name its model"):
        import_cache(tmp_path / "c", tmp_path / "out", **options, layers=[7])
    (tmp_path / "c" / "cache_activations_runner_cfg.json").write_text('{"model_name": "gpt2-small"}')
    store = import_cache(tmp_path / "c", tmp_path / "out", **options, layers=[7])
    assert (store.metadata.ckpt, store.metadata.protocol, store.layers) == ("gpt2-small", "2.0", (7,))
    store = import_cache(tmp_path / "c", tmp_path / "out", **options, layers=[7], ckpt="finetuned")
    assert store.metadata.ckpt == "finetuned"


@pytest.mark.parametrize("config", [{"model_name": 3}, {"model_name": None}, {}, []])
def test_a_model_without_a_name_has_to_be_told(config: object, tmp_path: Path):
    arrow(tmp_path / "c", cached(), [11])
    (tmp_path / "c" / "cache_activations_runner_cfg.json").write_text(json.dumps(config))
    with pytest.raises(ArgumentError, match="does not name its model"):
        import_cache(tmp_path / "c", tmp_path / "out", family="llama", progress=False)


def test_one_hook_of_another_name_suffices_that_layers_are_needed(tmp_path: Path):
    columns = cached()
    columns["model.layers.7"] = columns[HOOK] + 1
    arrow(tmp_path / "c", columns, [11])
    with pytest.raises(ArgumentError, match="the cache has 2 layers and does not say which"):
        import_cache(tmp_path / "c", tmp_path / "out", **MODEL)
    store = import_cache(tmp_path / "c", tmp_path / "out", **MODEL, layers=[3, 7])
    assert store.layers == (3, 7)
    assert store.read(dtype="stored").tobytes() == np.stack([columns[HOOK], columns[HOOK] + 1], axis=1).tobytes()


def _ragged(column: str) -> Callable[[Path], None]:
    """One row of a column lacks its last item."""

    def damage(folder: Path) -> None:
        pa = pytest.importorskip("pyarrow")
        rows = {name: [list(row) for row in values] for name, values in cached().items()}
        rows[column][7].pop()
        table = pa.table(rows)
        with pa.OSFile(str(folder / ARROW), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)

    return damage


def _inflated(size: int) -> Callable[[Path], None]:
    """Compressed numbers of which one piece is said to have `size` bytes."""

    def damage(folder: Path) -> None:
        pa = pytest.importorskip("pyarrow")
        table = pa.table({name: [list(row) for row in values] for name, values in cached().items()})
        sink, options = pa.BufferOutputStream(), pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
            writer.write_table(table)
        raw, numbers = sink.getvalue().to_pybytes(), struct.pack("<q", 11 * 4 * 8 * 4)
        assert raw.count(numbers) == 1
        (folder / ARROW).write_bytes(raw.replace(numbers, struct.pack("<q", size)))

    return damage


def _info(**changes: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        document = json.loads((folder / "dataset_info.json").read_text())
        document["features"][HOOK] |= changes
        (folder / "dataset_info.json").write_text(json.dumps(document))

    return damage


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (_ragged("token_ids"), CorruptShardError, r"token_ids has lists of \[3, 4\] items"),
        (_ragged(HOOK), CorruptShardError, r"has lists of \[3, 4\] items"),
        (_inflated(2**62), DocumentError, "compressed record batches"),
        (_inflated(2**30), DocumentError, "compressed record batches"),
        (_inflated(11 * 4 * 8 * 4), DocumentError, "compressed record batches"),
        (_info(shape=[4, 9]), CorruptShardError, "they must have 9"),
        (_info(shape=[4, 2**40]), DocumentError, "has shape"),
        (_info(shape=[4, 2**30]), CorruptShardError, "they must have"),
        (_info(shape=[0, 8]), DocumentError, "has shape"),
        (_info(shape="4x8"), DocumentError, "has shape"),
        (_info(dtype="float16"), DocumentError, "it must have float16"),
        (_info(dtype="int8"), DocumentError, "dtype 'int8'"),
        (_info(dtype=["float32"]), DocumentError, r"dtype \['float32'\]"),
        (_info(_type="Value"), DocumentError, "no column of activations"),
        (lambda folder: (folder / ARROW).unlink(), CorruptShardError, "is missing"),
        (lambda folder: (folder / ARROW).write_bytes(b""), CorruptShardError, "no whole Arrow stream"),
        (lambda folder: (folder / ARROW).write_bytes(b"x" * 999), CorruptShardError, "no whole Arrow stream"),
        (lambda folder: (folder / ARROW).write_bytes((folder / ARROW).read_bytes()[:-700]), CorruptShardError, "no whole Arrow stream"),
        (lambda folder: (folder / "state.json").write_text("{}"), DocumentError, "_data_files must list"),
        (lambda folder: (folder / "state.json").write_text("["), DocumentError, "no JSON"),
        (
            lambda folder: (folder / "state.json").write_text('{"_data_files": [{"filename": "../../etc/x.arrow"}]}'),
            DocumentError, "no name of an Arrow file",
        ),
        (lambda folder: arrow(folder, {"token_ids": cached()["token_ids"]}, [11], claim={
            HOOK: {"_type": "Array2D", "shape": [4, 8], "dtype": "float32"}}), DocumentError, "no column 'blocks"),
        (lambda folder: arrow(folder, {HOOK: cached()[HOOK]}, [11], claim={"token_ids": {"_type": "List"}}), DocumentError, "no column 'token_ids'"),
    ],
)  # fmt: skip
def test_saelens_caches_that_break_a_rule_are_refused(
    damage: Callable[[Path], None], kind: type[Exception], message: str, tmp_path: Path
):
    arrow(tmp_path / "c", cached(), [11])
    damage(tmp_path / "c")
    with pytest.raises(kind, match=message):
        import_cache(tmp_path / "c", tmp_path / "out", **MODEL)
    assert not list((tmp_path / "out").glob("*/metadata.json"))


# -- .npy, and what is none of these ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["C", "F"])
def test_an_npy_file_becomes_a_store(order: str, tmp_path: Path):
    acts = RNG.standard_normal((11, 2, 4, 8)).astype(np.float32)
    np.save(tmp_path / "acts.npy", np.asarray(acts, order=order))
    store = import_cache(tmp_path / "acts.npy", tmp_path / "out", **MODEL, layers=[(3, "mlp_out"), (3, "resid_post")])
    assert store[...].tobytes() == acts.tobytes()
    assert store.layout.layer_keys == ((3, "mlp_out"), (3, "resid_post"))
    store = import_cache(
        tmp_path / "acts.npy", tmp_path / "out", **MODEL, layers=[5, 6], dims=["token", "layer", "example", "d_model"]
    )
    assert store[...].tobytes() == acts.swapaxes(0, 2).tobytes()


def test_bfloat16_as_numpy_saves_it(tmp_path: Path):
    acts = RNG.standard_normal((11, 4, 8)).astype(BF16)
    for name, values in (("v2", acts), ("int16", acts.view(np.int16))):
        np.save(tmp_path / f"{name}.npy", values)
        store = import_cache(tmp_path / f"{name}.npy", tmp_path / "out", **MODEL, layers=[5], dtype="bfloat16")
        assert store.read(dtype="stored").tobytes() == acts.tobytes()
        with pytest.raises(ArgumentError, match="(?i)bits of bfloat16"):
            import_cache(tmp_path / f"{name}.npy", tmp_path / "out", **MODEL, layers=[5])


def _npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


@pytest.mark.parametrize(
    ("raw", "kind", "message"),
    [
        (b"", DocumentError, "no .npy file"),
        (b"\x93NUMPY\x01\x00\xff\xff{", DocumentError, "no .npy file"),
        (_npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 8)}"), CorruptShardError, "the file has"),
        (_npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 8)}", bytes(65)), CorruptShardError, "the file has"),
        (_npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 8)}", bytes(63)), CorruptShardError, "the file has"),
        (_npy("{'descr': '|O', 'fortran_order': False, 'shape': (2, 8)}", b"cos\nsystem\n"), DocumentError, "Python objects"),
        (_npy("{'descr': '<f4', 'fortran_order': False, 'shape': (0, 8)}"), DocumentError, "is empty"),
        (b"\x93NUMPY\x01\xff" + _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2)}", bytes(8))[8:], DocumentError, "version"),
        (_npy("__import__('os').abort()"), DocumentError, "no .npy file"),
        (_npy("{'descr': '<f4', 'fortran_order': False, 'shape': (True, 16)}", bytes(64)), DocumentError, "tells of shape"),
        (_npy(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({'9' * 4200}, {'9' * 4200})}}"), DocumentError, "tells of shape"),
        (_npy(f"{{'descr': '<f4', 'fortran_order': False, 'shape': (-0x{'f' * 9000}, 8)}}"), DocumentError, "tells of shape"),
        (_npy(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({'1,' * 65})}}", bytes(4)), DocumentError, "tells of shape"),
        (_npy("{'descr': '|V0', 'fortran_order': False, 'shape': (5, 8)}"), DocumentError, "have no bytes"),
        (b"\x93NUMPY\x02\x00\xf0\xff\xff\xffx", DocumentError, "no .npy file"),
    ],
)  # fmt: skip
def test_npy_files_that_are_none_are_refused(raw: bytes, kind: type[Exception], message: str, tmp_path: Path):
    (tmp_path / "acts.npy").write_bytes(raw)
    with pytest.raises(kind, match=message):
        import_cache(tmp_path / "acts.npy", tmp_path / "out", **MODEL, layers=[5])


def test_a_pipe_is_no_npy_file(tmp_path: Path):
    """Opening it would wait for its writer."""
    os.mkfifo(tmp_path / "acts.npy")
    with pytest.raises(TransportError, match="this is a named pipe"):
        import_cache(tmp_path / "acts.npy", tmp_path / "out", **MODEL, layers=[5])


def test_no_memory_is_taken_for_a_header_that_is_not_there(tmp_path: Path):
    (tmp_path / "acts.npy").write_bytes(b"\x93NUMPY\x02\x00\xf0\xff\xff\x3fx")  # of a gibibyte
    tracemalloc.start()
    with pytest.raises(DocumentError):
        import_cache(tmp_path / "acts.npy", tmp_path / "out", **MODEL, layers=[5])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


def test_an_npy_file_that_is_cut_while_it_is_imported(tmp_path: Path):
    """Reading on in its map would end the process."""
    np.save(tmp_path / "acts.npy", np.ones((64, 1, 4, 512), np.float32))
    examples = mapped(open_transport(tmp_path), "acts.npy", None)
    assert examples[(slice(0, 2),)].shape == (2, 1, 4, 512)
    os.truncate(tmp_path / "acts.npy", 4096)
    with pytest.raises(CorruptShardError, match=r"acts\.npy: it was cut from 524,416 to 4,096 bytes"):
        examples[(slice(32, 34),)]


def test_an_npy_file_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    np.save(tmp_path / "acts.npy", np.ones((2, 4, 8), np.float32))
    monkeypatch.setattr("builtins.open", lambda *_, **__: os.open(tmp_path / "none" / "x", os.O_RDONLY))
    with pytest.raises(NotFoundError, match="could not open"):
        mapped(open_transport(tmp_path), "acts.npy", None)


def test_an_npy_file_of_a_server_is_refused(tmp_path: Path):
    open_transport("memory://npy").put("acts.npy", b"")
    with pytest.raises(ArgumentError, match="on this machine"):
        import_cache("memory://npy/acts.npy", tmp_path, **MODEL, layers=[5])


def test_a_file_that_is_no_array_is_refused(tmp_path: Path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("{}")
    with pytest.raises(NotFoundError, match=r"corpus.jsonl: there is no cache of a known format"):
        import_cache(path, tmp_path / "stores", **MODEL, layers=[5])
    assert not (tmp_path / "stores").exists()


def test_what_is_no_cache_is_refused(tmp_path: Path):
    (tmp_path / "readme.txt").touch()
    with pytest.raises(NotFoundError, match="no cache of a known format"):
        import_cache(tmp_path, tmp_path / "out", **MODEL)
    with pytest.raises(NotFoundError):
        import_cache(tmp_path / "nothing", tmp_path / "out", **MODEL)
    with pytest.raises(ArgumentError, match="format is 'parquet'"):
        import_cache(tmp_path, tmp_path / "out", **MODEL, format="parquet")
    with pytest.raises(DocumentError, match="holds no .safetensors file"):
        import_cache(tmp_path, tmp_path / "out", **MODEL, format="hidden-states", context=4, layers=[1])
    assert FORMATS == ("saelens", "hidden-states", "memmap", "npy")


def test_arguments_that_say_nothing_about_a_format_are_refused(tmp_path: Path):
    requests(tmp_path / "hs", [3])
    with pytest.raises(ArgumentError, match="bos_token says nothing"):
        import_cache(tmp_path / "hs", tmp_path / "out", **MODEL, context=4, layers=[1, 2], bos_token=1)
    np.save(tmp_path / "acts.npy", np.zeros((2, 4, 8), np.float32))
    with pytest.raises(ArgumentError, match="says nothing about an array"):
        import_cache(tmp_path / "acts.npy", tmp_path / "out", **MODEL, context=4, layers=[1])


# -- any damage -----------------------------------------------------------------------------------------------------------------


def test_caches_with_random_damage_are_refused_by_name_or_imported(tmp_path: Path):
    """Bytes of one file are changed or removed: there is a store, or one of our errors."""
    rng = random.Random(0)
    whole = tmp_path / "whole"
    requests(whole / "hidden-states", [3, 5, 2])
    memmaps(whole / "memmap", [np.ones((22, 8), BF16)] * 2, [12, 10])
    if find_spec("torch"):
        saved(whole / "memmap" / "tokens.pt", list(range(22)))
        saved(whole / "memmap" / "sequence_ranges.pt", [0, 5, 22])
    arguments: dict[str, dict] = {name: {"layers": [1, 2], "context": 4} for name in ("hidden-states", "memmap")}
    if find_spec("pyarrow"):
        arrow(whole / "saelens", cached(), [6, 5])
        arguments["saelens"] = {}
    np.save(whole / "acts.npy", np.ones((5, 2, 4, 8), np.float32))
    arguments["acts.npy"] = {"layers": [1, 2]}
    files = [path for path in sorted(whole.rglob("*")) if path.is_file() and path.stat().st_size]
    n_refused = 0
    for number in range(300):
        path = rng.choice(files)
        kept = path.read_bytes()
        raw = bytearray(kept)
        for _ in range(rng.choice([1, 1, 2, 5])):
            at = rng.randrange(min(len(raw), rng.choice([40, 300, 1 << 20])))
            change = rng.choice([b"", b"0", b"9", b"-", b"e", b"[", b"}", b'"', b",", bytes([rng.randrange(256)])])
            raw[at : at + rng.choice([1, 1, 8])] = change
        path.write_bytes(raw or b"x")
        name = path.relative_to(whole).parts[0]
        try:
            import_cache(whole / name, f"memory://damage/{number}", **MODEL, **arguments[name], on_nonfinite="allow")
        except SaevStoreError:
            n_refused += 1
        path.write_bytes(kept)
    assert 100 < n_refused < 300


# -- parts ------------------------------------------------------------------------------------------------------------------


def opened(kind: type[Cache], folder: Path, **wanted: object) -> Cache:
    transport = open_transport(folder)
    return kind(transport, entries_of(transport), Wanted(**wanted))


def caches(folder: Path) -> Iterator[tuple[Cache, int]]:
    """A cache of each format, and how many examples it has."""
    requests(folder / "hs", [5, 0, 3, 9, 1, 2])
    yield opened(HiddenStatesCache, folder / "hs", layers=[1, 2], context=3), 7
    acts = RNG.standard_normal((22, 2, 8)).astype(BF16)
    memmaps(folder / "memmap", [acts[:, 0], acts[:, 1]], [12, 3, 7])
    saved(folder / "memmap" / "tokens.pt", list(range(22)))
    saved(folder / "memmap" / "sequence_ranges.pt", [0, 5, 5, 22])
    yield opened(MemmapCache, folder / "memmap", layers=[9, 10], context=4), 6
    arrow(folder / "saelens", cached(11), [7, 4], rows_in_batch=3)
    yield opened(SaelensCache, folder / "saelens"), 11


def test_any_part_of_a_cache_is_that_part_of_the_whole(tmp_path: Path):
    """What workers and resumed imports ask for: some examples, in blocks of any size, and no others."""
    for cache, n in caches(tmp_path):
        assert cache.arguments()["n_examples"] == n
        (whole,) = joined(cache, 0, n, 1 << 30)
        for first in range(n):
            for end in range(first + 1, n + 1):
                for max_block_bytes in (1, 300, 1 << 30):
                    (part,) = joined(cache, first, end, max_block_bytes)
                    assert [values.shape[0] for values in part] == [end - first] * len(part)
                    for some, every in zip(part, whole, strict=True):
                        assert some.tobytes() == every[first:end].tobytes()


def joined(cache: Cache, first: int, end: int, max_block_bytes: int) -> Iterator[list[np.ndarray]]:
    """The vectors and token arrays of some examples, whose blocks follow each other."""
    at, pieces = first, []
    for block in cache.blocks(first, end, max_block_bytes):
        assert block.first == at
        at += len(block.acts)
        pieces.append([block.acts, *(block.token_arrays[name] for name in sorted(block.token_arrays))])
    assert at == end
    yield [np.concatenate(parts) for parts in zip(*pieces, strict=True)]


@pytest.mark.parametrize("starts", [[], [1], [0, 3, 2], [0, 10], [-1, 0]])
def test_documents_that_do_not_cover_the_tokens(starts: list[int]):
    with pytest.raises(ArgumentError, match="do not cover the 9 tokens in order"):
        check_starts(np.array(starts, np.int64), 9, where="x")


def test_ids_of_vllm_count_what_enters_a_layer():
    found = layer_axis(Wanted(layer_ids=(0, 1, 2, 36)), 4, where="x")
    assert found == {"layers": [0, 0, 1, 35], "hook_points": ["resid_pre", *["resid_post"] * 3]}
    named = layer_axis(Wanted(layers=(4, (4, "mlp_out"))), 2, where="x")
    assert named == {"layers": [4, 4], "hook_points": ["resid_post", "mlp_out"]}


@pytest.mark.parametrize("name", ["layer_{}_out", "gpt2_layer_{}_out", "Llama-3.2-1B_model.layers.{}_out", "{}"])
def test_layers_of_memmaps_come_in_the_order_of_the_numbers_that_differ(tmp_path: Path, name: str):
    acts = RNG.standard_normal((8, 2, 8)).astype(np.float32)
    memmaps(tmp_path / "c", [acts[:, 0], acts[:, 1]], [8], dtype="float32")
    for number in (9, 10):
        (tmp_path / f"c/layer_{number}_out").rename(tmp_path / "c" / name.format(number))
    saved(tmp_path / "c" / "tokens.pt", np.arange(8))
    options = {**MODEL, "context": 4, "max_tokens_per_shard": 16}
    with pytest.raises(ArgumentError, match=r"given as \[10, 9\]; by their names they are \[9, 10\]"):
        import_cache(tmp_path / "c", tmp_path / "out", layers=[10, 9], **options)
    store = import_cache(tmp_path / "c", tmp_path / "out", layers=[9, 10], **options)
    for position, layer in enumerate((9, 10)):
        assert np.array_equal(store.sel(layer=layer)[:], acts[:, position])


def test_numbers_in_names_that_are_no_labels_say_nothing_of_the_order():
    for names in (["a_1", "b_2"], ["a1", "b"], ["x", "y"], []):
        assert layer_axis(Wanted(layers=(7, 3)), 2, where="x", names=names)["layers"] == [7, 3]
    with pytest.raises(ArgumentError) as refused:
        layer_axis(Wanted(layer_ids=(7, 3)), 2, where="x", names=["m1_3", "m1_7"])
    assert refused.value.where == "layer_ids"


@pytest.mark.parametrize("ranges", [[[0, 5], [5, 21]], [[0, 5], [5, 23]], [[0, 22], [22, 23]], [[0, 9], [8, 22]]])
def test_ranges_of_documents_end_with_the_tokens(ranges: list[list[int]], tmp_path: Path):
    acts = RNG.standard_normal((22, 8)).astype(BF16)
    memmaps(tmp_path, [acts], [22])
    saved(tmp_path / "sequence_ranges.pt", ranges)
    with pytest.raises(CorruptShardError, match="do not cover the 22 tokens"):
        opened(MemmapCache, tmp_path, layers=[9], context=4)


def test_the_digest_of_a_cache_is_of_all_its_files(tmp_path: Path):
    """Of small files every byte counts; of many requests some bytes, and the names, sizes and headers of all."""
    for number, (cache, _) in enumerate(caches(tmp_path / "whole")):
        assert cache.digest() == cache.digest()
        again = [found for found, _ in caches(tmp_path / f"again{number}")][number]
        assert again.digest() != cache.digest()  # other random numbers
    requests(tmp_path / "many", [2] * 40)
    options = {"layers": [1, 2], "context": 2}
    before = opened(HiddenStatesCache, tmp_path / "many", **options).digest()
    for name in ("hs_0", "hs_39"):
        path = tmp_path / "many" / f"{name}.safetensors"
        raw = path.read_bytes()
        path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        assert opened(HiddenStatesCache, tmp_path / "many", **options).digest() != before
        path.write_bytes(raw)
    assert opened(HiddenStatesCache, tmp_path / "many", **options).digest() == before
    (tmp_path / "many" / "hs_17.safetensors").rename(tmp_path / "many" / "hs_40.safetensors")
    assert opened(HiddenStatesCache, tmp_path / "many", **options).digest() != before


def test_every_file_of_a_small_cache_is_in_its_digest(tmp_path: Path):
    """`state.json` and the documents of shards only name what is in the digest."""
    kinds = {
        "saelens": lambda folder: opened(SaelensCache, folder),
        "memmap": lambda folder: opened(MemmapCache, folder, layers=[9, 10], context=4),
        "hs": lambda folder: opened(HiddenStatesCache, folder, layers=[1, 2], context=3),
    }
    for _ in caches(tmp_path):
        pass
    for name, open_again in kinds.items():
        before, n_files = open_again(tmp_path / name).digest(), 0
        for path in sorted((tmp_path / name).rglob("*")):
            if path.suffix not in {".arrow", ".memmap", ".safetensors", ".pt"} and path.name != "dataset_info.json":
                continue
            raw, n_files = path.read_bytes(), n_files + 1
            # White space behind a document and a tensor of torch, else a number.
            at = len(raw) // 2 if path.suffix == ".arrow" else len(raw) - 1
            grows = path.suffix in {".json", ".pt"}
            path.write_bytes(raw + b" " if grows else raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
            with contextlib.suppress(SaevStoreError):  # the byte may be one of a length
                assert open_again(tmp_path / name).digest() != before, path
            path.write_bytes(raw)
        assert open_again(tmp_path / name).digest() == before
        assert n_files == {"saelens": 3, "memmap": 8, "hs": 6}[name]


@pytest.mark.parametrize("cls_token", [False, True])
def test_a_saelens_cache_says_whether_its_contexts_begin_with_a_bos_token(cls_token: bool, tmp_path: Path):
    """What `remove_bos` of the loaders goes by."""
    arrow(tmp_path / "c", cached(), [11])
    store = import_cache(tmp_path / "c", tmp_path / "out", **MODEL, cls_token=cls_token)
    text = store.metadata.text
    assert text is not None
    assert (text["layout"], text["bos"]) == ("window", cls_token)
    assert (store.layout.content_tokens_per_example, store.layout.n_special_tokens) == (4 - cls_token, int(cls_token))


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint64])
def test_integers_that_are_not_two_bytes_are_no_bits_of_bfloat16(dtype: type[np.generic], tmp_path: Path):
    np.save(tmp_path / "a.npy", np.ones((3, 4, 8), dtype))
    with pytest.raises(SaevStoreError):
        import_cache(tmp_path / "a.npy", tmp_path / "out", **MODEL, layers=[5], dtype="bfloat16")
    assert not list((tmp_path / "out").glob("*/metadata.json"))


@pytest.mark.parametrize("column", [HOOK, "token_ids"])
@pytest.mark.parametrize("level", ["row", "number"])
def test_a_row_that_is_empty_is_refused(column: str, level: str, tmp_path: Path):
    pa = pytest.importorskip("pyarrow")
    arrow(tmp_path / "c", cached(), [11])
    rows = {name: values.tolist() for name, values in cached().items()}
    types = {
        HOOK: pa.list_(pa.list_(pa.float32())),
        "token_ids": pa.list_(pa.int32()),
    }
    if level == "row":
        rows[column][7] = None
    elif column == HOOK:
        rows[column][7][3][5] = None
    else:
        rows[column][7][3] = None
    table = pa.table({name: pa.array(values, types[name]) for name, values in rows.items()})
    with pa.OSFile(str(tmp_path / "c" / ARROW), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(SaevStoreError, match=f"{column}|rows"):
        import_cache(tmp_path / "c", tmp_path / "out", **MODEL)


@pytest.mark.parametrize("said", ["torch.float16", "float16"])
def test_a_dtype_may_be_written_as_torch_writes_it(said: str, tmp_path: Path):
    acts = RNG.standard_normal((12, 8)).astype(np.float16)
    memmaps(tmp_path / "c", [acts], [5, 7], dtype=said)
    saved(tmp_path / "c" / "tokens.pt", list(range(12)))
    store = import_cache(tmp_path / "c", tmp_path / "out", **MODEL, layers=[3], context=4)
    assert store.read(dtype="stored").tobytes() == acts.tobytes()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_token_ids_of_requests_may_have_either_width(dtype: type[np.generic], tmp_path: Path):
    tensors = request(6)
    tensors["token_ids"] = np.arange(6).astype(dtype)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "hs_0.safetensors").write_bytes(safetensors(tensors))
    store = import_cache(tmp_path / "c", tmp_path / "out", **MODEL, layers=[1, 2], context=3)
    assert np.asarray(store.token_arrays["token_ids"][:]).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_other_token_ids_make_another_digest(tmp_path: Path):
    """The vectors are the same: a resumed import would mix the ids of two caches."""
    memmaps(tmp_path / "c", [RNG.standard_normal((12, 8)).astype(np.float16)], [12], dtype="float16")
    digests: set[str] = set()
    for ids in (range(12), range(1, 13)):
        saved(tmp_path / "c" / "tokens.pt", list(ids))
        digests.add(opened(MemmapCache, tmp_path / "c", layers=[3], context=4).digest())
    assert len(digests) == 2


@pytest.mark.parametrize("name", [HOOK, "token_ids"])
@pytest.mark.parametrize("url", ["disk", "memory"])
def test_an_arrow_file_with_a_column_twice_is_refused(name: str, url: str, tmp_path: Path):
    pa = pytest.importorskip("pyarrow")
    fsspec = pytest.importorskip("fsspec")
    arrow(tmp_path / "c", cached(), [11])
    raw = (tmp_path / "c" / ARROW).read_bytes()
    table = pa.ipc.open_stream(raw).read_all()
    twice = table.append_column(name, table.column(name))
    with pa.OSFile(str(tmp_path / "c" / ARROW), "wb") as sink, pa.ipc.new_stream(sink, twice.schema) as writer:
        writer.write_table(twice)
    source: object = tmp_path / "c"
    if url == "memory":
        source = f"memory://{tmp_path}/c"
        fsspec.filesystem("memory").put(f"{tmp_path}/c/", f"{tmp_path}/c/", recursive=True)
    with pytest.raises(DocumentError, match=f"{ARROW}: it has the column '{name}' more than once"):
        import_cache(source, tmp_path / "out", **MODEL)
