"""Conversions: documents to batches, samples to documents; against plain Python, in one process and on a cluster."""

from __future__ import annotations

import itertools
import json
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from api import MemoryTransport
from clusters import two_workers
from hypothesis import given
from hypothesis import strategies as st
from token_files import DATA
from transports import CountingTransport

from saev_store.errors import ArgumentError, CorruptShardError, DocumentError, SaevStoreError, StoreExistsError
from saev_store.sources import convert, open_source
from saev_store.sources.convert import documents_to_batches, samples_to_documents
from saev_store.sources.energon import EnergonDataset
from saev_store.sources.llmbatch import BatchFileReader, RecordOrder, write_batch_file
from saev_store.sources.mmididx import IndexedDataset, IndexedDatasetBuilder
from saev_store.transport import open_transport

TEXTS = DATA / "energon/captioning_ratio_split/dataset"


def refusal(call, *arguments, **options) -> SaevStoreError:
    with pytest.raises(SaevStoreError) as caught:
        call(*arguments, **options)
    return caught.value


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


def dataset(documents: list[list[int]], dtype: str = "int32") -> IndexedDataset:
    """Tokens counted from 1, in documents of sequences of these lengths."""
    memory, at = MemoryTransport(), 1
    with IndexedDatasetBuilder("tokens", dtype, transport=memory) as builder:
        for lengths in documents:
            builder.add_document(np.arange(at, at + sum(lengths)), lengths)
            at += sum(lengths)
    return IndexedDataset("tokens", transport=memory)


def records(source: IndexedDataset, seq_len: int, end: int | None, pad: int | None) -> list[list[int]]:
    texts = [[*source.document(i).tolist(), *([] if end is None else [end])] for i in range(source.n_documents)]
    if pad is not None:
        return [(text + [pad] * seq_len)[:seq_len] for text in texts]
    run = [token for text in texts for token in text]
    return [run[i : i + seq_len] for i in range(0, len(run) - seq_len + 1, seq_len)]


def in_order(path: str, transport) -> list[list[int]]:
    """The records of a file in the order of their source; all must be in it."""
    with BatchFileReader(path, transport=transport) as reader:
        places = RecordOrder(reader.total_records, reader.seed).places(np.arange(reader.total_records))
        return reader.rows(places).tolist()


@given(
    documents=st.lists(st.lists(st.integers(0, 12), max_size=3), max_size=6),
    seq_len=st.integers(1, 9),
    end=st.none() | st.sampled_from([0, 999]),
    pad=st.none() | st.just(7),
    piece=st.sampled_from([1, 5, 1 << 20]),
)
def test_documents_to_batches_gives_every_record(documents, seq_len, end, pad, piece):
    source, memory = dataset(documents), MemoryTransport()
    wanted = records(source, seq_len, end, pad)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "_PIECE_TOKENS", piece)
        n = documents_to_batches(
            source, "x.batch", seq_len=seq_len, batch_size=1, seed=3, end_token=end, pad_token=pad, transport=memory, progress=False,
        )  # fmt: skip
    assert (n, in_order("x.batch", memory)) == (len(wanted), wanted)


def test_documents_to_batches_reads_of_a_long_document_its_record(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "d", "int32") as builder:
        for n in (1_000_000, 3):
            builder.add_document(np.arange(n))
    counting = CountingTransport(open_transport(tmp_path, engine="pread"))
    memory, source = MemoryTransport(), IndexedDataset("d", transport=counting)
    assert documents_to_batches(source, "x.batch", seq_len=6, batch_size=1, pad_token=9, transport=memory) == 2
    assert in_order("x.batch", memory) == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 9, 9, 9]]
    assert counting.counters.bytes_read < 10_000


def test_documents_to_batches_refuses_what_makes_none(tmp_path):
    given_ = {"seq_len": 2, "batch_size": 1, "progress": False}
    for source, options, where in (
        (dataset([[2]], "float32"), {}, "source"), (dataset([[2]]), {"seq_len": 0}, "seq_len"),
        (dataset([[2]]), {"end_token": -1}, "end_token"), (dataset([[2]]), {"pad_token": 2**32}, "pad_token"),
        (dataset([[2]]), {"batch_size": 0}, "batch_size"), (dataset([[2]]), {"client": 7}, "client"),
    ):  # fmt: skip
        error = refusal(documents_to_batches, source, tmp_path / "x.batch", **{**given_, **options})
        assert (type(error), error.where) == (ArgumentError, where)
    negative = MemoryTransport()
    with IndexedDatasetBuilder("n", transport=negative) as builder:
        builder.add_document([1, -1])
    error = refusal(documents_to_batches, IndexedDataset("n", transport=negative), tmp_path / "x.batch", **given_)
    assert (type(error), error.where) == (ArgumentError, "tokens")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "x.batch").touch()
    assert type(refusal(documents_to_batches, dataset([[2]]), tmp_path / "x.batch", **given_)) is StoreExistsError
    assert documents_to_batches(dataset([[2]]), tmp_path / "x.batch", overwrite=True, **given_) == 1


def test_samples_to_documents_keeps_every_sample(tmp_path):
    write_batch_file(tmp_path / "x.batch", np.arange(24).reshape(8, 3), 2, progress=False)
    largest = MemoryTransport()
    with IndexedDatasetBuilder("x", "uint64", transport=largest) as builder:
        for tokens in ([2**64 - 1, 2**63, 1], []):  # which no signed integer holds
            builder.add_document(np.array(tokens, np.uint64))
    for source, dtype in (
        (BatchFileReader(tmp_path / "x.batch"), "uint16"),
        (IndexedDataset("x", transport=largest), "uint64"),
    ):
        for end, batch in itertools.product((None, 0, 7), (1, 3, 256)):
            memory = MemoryTransport()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(convert, "_BATCH", batch)
                n = samples_to_documents(source, "y", dtype=dtype, end_token=end, transport=memory, progress=False)
            found = IndexedDataset("y", transport=memory)
            assert (n, found.dtype) == (len(source), dtype)
            assert [each.tolist() for each in found] == [
                [*tokens.tolist(), *([] if end is None else [end])] for tokens in source
            ]


def texts(source) -> list[str]:
    """The texts in the order of the source, read with the standard library's tarfile."""
    found = {}
    for path in TEXTS.rglob("*.tar"):
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, part = member.name.partition(".")
                if part == "txt":
                    found[str(path.relative_to(TEXTS)), key] = tar.extractfile(member).read().decode()
    return [found[source.raw(i).shard, source.key(i)] for i in range(len(source))]


def test_samples_to_documents_tokenizes_texts_of_energon(tmp_path):
    source = open_source(TEXTS)
    assert samples_to_documents(source, tmp_path / "a", ids, end_token=3, progress=False) == len(texts(source)) > 1
    assert [each.tolist() for each in IndexedDataset(tmp_path / "a")] == [[*ids(text), 3] for text in texts(source)]
    n = samples_to_documents(
        source, tmp_path / "a", ids, part="none,detail.json[caption]", overwrite=True, progress=False
    )
    assert [each.tolist() for each in IndexedDataset(tmp_path / "a")] == [ids(f"c{i}") for i in range(n)]
    for options, tokenizer, kind in (
        ({"part": "nothing"}, ids, DocumentError), ({"part": "jpg"}, ids, DocumentError),
        ({"part": "detail.json[i]"}, ids, DocumentError), ({"part": "detail.json[none]"}, ids, DocumentError),
        ({"part": "detail.json["}, ids, ArgumentError), ({"dtype": np.uint8, "end_token": 300}, ids, ArgumentError),
        ({"dtype": "int8"}, lambda text: [300], ArgumentError), ({"dtype": "complex64"}, ids, ArgumentError),
        ({}, lambda text: [0.5], ArgumentError), ({}, lambda text: [[1, 2]], ArgumentError), ({}, int, ArgumentError),
        ({}, lambda text: len(text) + text, ArgumentError), ({}, None, ArgumentError),
    ):  # fmt: skip
        assert type(refusal(samples_to_documents, source, tmp_path / "b", tokenizer, **options)) is kind
    error = refusal(samples_to_documents, dataset([[2]]), tmp_path / "b", ids)
    assert (type(error), error.where) == (ArgumentError, "tokenizer")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_samples_that_a_document_only_claims_take_no_memory():
    files = {path.relative_to(TEXTS).as_posix(): path.read_bytes() for path in TEXTS.rglob("*") if path.is_file()}
    info = json.loads(files[".nv-meta/.info.json"])
    info["shard_counts"] = dict.fromkeys(info["shard_counts"], 2**35)
    memory = MemoryTransport(files | {".nv-meta/.info.json": json.dumps(info).encode()})
    source = EnergonDataset("", transport=memory, damaged_ok=True)
    assert len(source) > 2**35
    tracemalloc.start()
    try:
        assert type(refusal(samples_to_documents, source, "y", ids, transport=memory)) is DocumentError
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_conversions_that_read_back_something_else_are_refused(monkeypatch):
    source, memory = dataset([[3], [4], [0], [2, 3]]), MemoryTransport()
    rows, documents = BatchFileReader.rows, IndexedDataset.rows

    def other_records(self, places):
        found = rows(self, places)
        found[np.asarray(places) == 2, -1] += 1
        return found

    def moved(self, indices):
        """All tokens together are the same run."""
        first, second, *rest = documents(self, indices)
        return (
            [first[:-1], np.concatenate([first[-1:], second]), *rest]
            if self is not source
            else documents(self, indices)
        )

    monkeypatch.setattr(BatchFileReader, "rows", other_records)
    monkeypatch.setattr(IndexedDataset, "rows", moved)
    for call, options, where in (
        (documents_to_batches, {"output_path": "x.batch", "seq_len": 2, "batch_size": 1}, "memory://x.batch"),
        (samples_to_documents, {"output_path": "y"}, "memory://y.idx"),
    ):
        options |= {"transport": memory, "progress": False, "overwrite": True}
        assert call(source, verify=False, **options) > 1
        memory = options["transport"] = MemoryTransport()
        error = refusal(call, source, **options)
        assert (type(error), error.where) == (CorruptShardError, where)


def test_conversions_on_a_cluster_write_the_same_bytes(tmp_path):
    pytest.importorskip("distributed")
    for name in ("alone", "many"):
        (tmp_path / name).mkdir()
    with IndexedDatasetBuilder(tmp_path / "c", "int32") as builder:
        for n in (7, 0, 20, 30, 11):
            builder.add_document(np.arange(n))

    def convert_all(to: Path, client) -> None:
        with IndexedDataset(tmp_path / "c") as documents, open_source(TEXTS) as samples:
            documents_to_batches(
                documents, to / "x.batch", seq_len=4, batch_size=2, end_token=9, client=client, progress=False
            )
            samples_to_documents(samples, to / "y", ids, client=client, progress=False)
            bad = refusal(samples_to_documents, samples, to / "z", lambda _: [300], dtype="uint8", client=client)
            assert (type(bad), bad.where) == (ArgumentError, "tokens")

    with two_workers() as client, pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "_PIECE_TOKENS", 8)
        patch.setattr(convert, "_BATCH", 2)
        convert_all(tmp_path / "alone", None)
        convert_all(tmp_path / "many", client)
    found, wanted = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("many", "alone")
    )
    assert found == wanted
    assert sorted(found) == ["x.batch", "y.bin", "y.idx"]
