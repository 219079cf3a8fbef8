"""Conversions: documents to batches, samples to documents; against plain Python."""

from __future__ import annotations

import itertools
import json
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from api import MemoryTransport
from hypothesis import given
from hypothesis import strategies as st
from token_files import DATA

from saev_store.errors import ArgumentError, DocumentError, SaevStoreError, StoreExistsError
from saev_store.sources import convert, open_source
from saev_store.sources.convert import documents_to_batches, samples_to_documents
from saev_store.sources.energon import EnergonDataset
from saev_store.sources.llmbatch import BatchFileReader, record_order, write_batch_file
from saev_store.sources.mmididx import IndexedDataset, IndexedDatasetBuilder

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


def records(source: IndexedDataset, seq_len: int, end: int | None) -> list[list[int]]:
    documents = [source.rows(slice(first, last)) for first, last in itertools.pairwise(source.doc_idx)]
    ends = [] if end is None else [end]
    run = [token for sequences in documents for token in [*np.concatenate([[], *sequences]).astype(int), *ends]]
    return [run[i : i + seq_len] for i in range(0, len(run) - seq_len + 1, seq_len)]


def in_order(path: Path) -> list[list[int]]:
    """The records of a file in the order of their source; all must be in it."""
    with BatchFileReader(path) as reader:
        places = record_order(reader.total_records, reader.seed).position_of(np.arange(reader.total_records))
        return reader.rows(places).tolist()


@given(
    documents=st.lists(st.lists(st.integers(0, 12), max_size=3), max_size=6),
    seq_len=st.integers(1, 9),
    end=st.none() | st.sampled_from([0, 999]),
    piece=st.sampled_from([1, 5, 1 << 20]),
)
def test_documents_to_batches_gives_every_record(tmp_path_factory, documents, seq_len, end, piece):
    source, path = dataset(documents), tmp_path_factory.mktemp("c") / "x.batch"
    wanted = records(source, seq_len, end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "_PIECE_TOKENS", piece)
        n = documents_to_batches(source, path, seq_len=seq_len, batch_size=1, seed=3, end_token=end)
    assert (n, in_order(path)) == (len(wanted), wanted)


def test_documents_to_batches_refuses_what_makes_none(tmp_path):
    given_ = {"seq_len": 2, "batch_size": 1}
    for source, options, where in (
        (dataset([[2]]), {"seq_len": 0}, "seq_len"),
        (dataset([[2]]), {"end_token": -1}, "end_token"), (dataset([[2]]), {"batch_size": 0}, "batch_size"),
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
    write_batch_file(tmp_path / "x.batch", np.arange(24).reshape(8, 3), 2)
    largest = MemoryTransport()
    with IndexedDatasetBuilder("x", "uint64", transport=largest) as builder:
        for tokens in ([2**64 - 1, 2**63, 1], []):  # which no signed integer holds
            builder.add_document(np.array(tokens, np.uint64))
    for source, dtype in (
        (BatchFileReader(tmp_path / "x.batch"), "uint16"),
        (IndexedDataset("x", transport=largest), "uint64"),
    ):
        for end in (None, 0, 7):
            n = samples_to_documents(source, tmp_path / "y", dtype=dtype, end_token=end, overwrite=True, progress=False)
            found = IndexedDataset(tmp_path / "y")
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
        ({}, lambda text: [0.5], ArgumentError), ({}, lambda text: [[1, 2]], ArgumentError), ({}, None, ArgumentError),
    ):  # fmt: skip
        assert type(refusal(samples_to_documents, source, tmp_path / "b", tokenizer, **options)) is kind
    assert type(refusal(samples_to_documents, dataset([[2]]), tmp_path / "b", ids)) is DocumentError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_samples_that_a_document_only_claims_take_no_memory(tmp_path):
    files = {path.relative_to(TEXTS).as_posix(): path.read_bytes() for path in TEXTS.rglob("*") if path.is_file()}
    info = json.loads(files[".nv-meta/.info.json"])
    info["shard_counts"] = dict.fromkeys(info["shard_counts"], 2**35)
    memory = MemoryTransport(files | {".nv-meta/.info.json": json.dumps(info).encode()})
    source = EnergonDataset("", transport=memory)
    assert len(source) > 2**35
    tracemalloc.start()
    try:
        assert type(refusal(samples_to_documents, source, tmp_path / "y", ids)) is DocumentError
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
