"""MMIDIDX: files of real writers, every rule of the index, samples of one length, and what the builder publishes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import signal
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from kill_children import ended, in_child
from servers import s3_bucket  # noqa: F401 (a fixture)
from system_faults import SystemFaults
from token_files import CODES, DATA, malformed, mmididx_bytes, samples, through, truth
from transports import CountingTransport

from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    NotFoundError,
    ReadOnlyError,
    SaevStoreError,
    SelectionError,
    StoreExistsError,
    TransportError,
    UnknownProtocolError,
    WriterConflictError,
)
from saev_store.sources import open_source, reopen
from saev_store.sources.mmididx import (
    IndexedDataset,
    IndexedDatasetBuilder,
    TokenSamples,
    build_indices,
    build_sample_idx,
)
from saev_store.transport import open_transport

ENGINES = ("mmap", "pread", "fsspec")
#: Three documents: two sequences (one empty), none, two.
SEQUENCES = [np.arange(size, dtype=np.int32) + 10 * size for size in (4, 0, 8, 1)]
DOC_IDX = [0, 2, 2, 4]
IDX, BIN = mmididx_bytes(SEQUENCES, doc_idx=DOC_IDX)
TRUTH = json.loads((DATA / "mmididx/samples_seed_example/expected.json").read_text())


def put(folder: Path, idx: bytes = IDX, bin_: bytes = BIN, name: str = "x") -> Path:
    (folder / f"{name}.idx").write_bytes(idx)
    (folder / f"{name}.bin").write_bytes(bin_)
    return folder / name


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refusal(call, *arguments, **options) -> SaevStoreError:
    with pytest.raises(SaevStoreError) as caught:
        call(*arguments, **options)
    return caught.value


def lists(arrays) -> list[list]:
    return [array.tolist() for array in arrays]


# -- reading -----------------------------------------------------------------------------------------------------------


def test_open_files_of_real_writers_gives_their_truth():
    for folder, engine in itertools.product(samples("mmididx"), ENGINES):
        expected, arrays = truth(folder)
        if "tokens" not in arrays:  # the sample of sample indices
            arrays = {"tokens": np.arange(265, dtype=np.int32), "sizes": np.array(expected["sizes"], np.int32)}
            expected = {"dtype": "int32", "doc_idx": list(range(7)), "modes": None}
        dataset = through(engine, IndexedDataset, folder / "data")
        assert dataset.dtype.name == expected["dtype"]
        assert dataset.sizes.tolist() == arrays["sizes"].tolist()
        assert dataset.doc_idx.tolist() == (expected["doc_idx"] or list(range(len(dataset) + 1)))
        assert (None if dataset.modes is None else dataset.modes.tolist()) == expected["modes"]
        parts = np.split(arrays["tokens"], np.cumsum(arrays["sizes"])[:-1])
        for i, (found, wanted) in enumerate(zip(dataset.rows(slice(None)), parts, strict=True)):
            assert found.dtype == wanted.dtype
            assert found.tobytes() == dataset[i].tobytes() == dataset[i - len(parts)].tobytes() == wanted.tobytes()
        assert dataset.validate(deep=True, progress=False).ok


@given(
    sizes=st.lists(st.integers(0, 12), max_size=8),
    dtype=st.sampled_from(sorted(CODES)),
    kind=st.sampled_from(["plain", "short", "modes", "gaps"]),
    cuts=st.lists(st.integers(0, 8), max_size=4),
)
def test_open_any_data_set_equals_its_sequences(tmp_path_factory, sizes, dtype, kind, cuts):
    assume((sum(sizes) and kind != "gaps") or not dtype.startswith("float"))  # else nothing decides
    rng = np.random.default_rng(sum(sizes))
    itemsize = np.dtype(dtype).itemsize
    sequences = [rng.integers(0, 256, size * itemsize, dtype=np.uint8).view(dtype) for size in sizes]
    doc_idx = [0, *sorted(min(cut, len(sizes)) for cut in cuts), len(sizes)]
    modes = [i % 256 - 128 for i in range(len(sizes))] if kind == "modes" and sizes else None
    pointers = None
    if kind == "gaps":  # the last one first, and a token between any two
        ends = np.cumsum([size + 1 for size in reversed(sizes)]) * itemsize
        pointers = [int(end) - size * itemsize for end, size in zip(ends, reversed(sizes), strict=True)][::-1]
    idx, bin_ = mmididx_bytes(
        sequences, doc_idx=doc_idx, modes=modes, short=kind == "short", code=CODES[dtype], pointers=pointers
    )
    if pointers is not None:
        bin_ = b"".join(bytes(itemsize) + each.tobytes() for each in reversed(sequences))
        if not any(sizes) or sizes[0] == 0:
            ends = [at + size * itemsize for at, size in zip(pointers, sizes, strict=True) if size]
            bin_ = bin_[: max(ends, default=0)]
            assume(not any(at > len(bin_) for at in pointers))
    for engine in ("mmap", "pread"):
        dataset = through(engine, IndexedDataset, put(tmp_path_factory.getbasetemp(), idx, bin_))
        assert (None if dataset.modes is None else dataset.modes.tolist()) == modes
        assert [found.tobytes() for found in dataset.rows(slice(None))] == [each.tobytes() for each in sequences]
        bounds = list(range(len(sizes) + 1)) if kind == "short" else doc_idx
        assert dataset.doc_idx.tolist() == bounds


def test_get_of_a_part_equals_the_slice_or_is_refused(tmp_path):
    dataset = through("pread", IndexedDataset, put(tmp_path))
    for number, whole in enumerate(SEQUENCES):
        for start, stop in itertools.product(range(-1, len(whole) + 2), repeat=2):
            if 0 <= start <= stop <= len(whole):
                assert dataset.get(number, start, stop - start).tolist() == whole[start:stop].tolist()
            else:
                assert type(refusal(dataset.get, number, start, stop - start)) is ArgumentError
    for wrong in (4, -5, 1.0, "0", None, True, 10**30):
        for call in (dataset.__getitem__, dataset.get, dataset.key):
            assert type(refusal(call, wrong)) is SelectionError
    for wrong in ([4], [-5], [[0]], [0.5], ["a"]):
        assert type(refusal(dataset.rows, wrong)) is SelectionError


def test_get_of_a_part_reads_no_more_than_it(tmp_path):
    long = np.arange(500_000, dtype=np.uint16)
    folder = put(tmp_path, *mmididx_bytes([long, long], doc_idx=[0, 2])).parent
    transport = CountingTransport(open_transport(folder, engine="pread"))
    dataset = IndexedDataset("x", transport=transport)
    before = transport.counters.bytes_read
    assert dataset.get(1, 5000, 3).tolist() == [5000, 5001, 5002]
    assert transport.counters.bytes_read - before == 6


def test_arrays_are_views_of_a_map_read_only_and_outlive_close(tmp_path):
    for engine in ENGINES:
        dataset = through(engine, IndexedDataset, put(tmp_path))
        found = [dataset[0], dataset.get(0), *dataset.rows([2, 0]), dataset.sizes, dataset.doc_idx]
        assert not any(array.flags.writeable for array in found)
        assert np.shares_memory(dataset[0], dataset[0]) == (engine == "mmap")
        with dataset:
            pass
        assert found[0].tolist() == SEQUENCES[0].tolist()
        for read in (lambda each: each[2], lambda each: each.get(2), lambda each: each.rows([2])[0]):
            again = pickle.loads(pickle.dumps(dataset))
            again.close()
            assert read(again).tolist() == SEQUENCES[2].tolist()


# -- what is refused ---------------------------------------------------------------------------------------------------


def patched(offset: int, data: bytes) -> tuple[bytes, bytes]:
    return IDX[:offset] + data + IDX[offset + len(data) :], BIN


def with_(**changes) -> tuple[bytes, bytes]:
    return mmididx_bytes(SEQUENCES, **{"doc_idx": DOC_IDX, **changes})


#: (files, class, the place in the index that `problems` names).
BROKEN = [
    ((b"", BIN), DocumentError, None),
    ((b"MMIDIDX", BIN), DocumentError, None),
    ((IDX[:25], BIN), DocumentError, None),
    ((IDX[:33], BIN), DocumentError, None),
    ((IDX[:-1], BIN), DocumentError, None),
    ((IDX + b"\0", BIN), DocumentError, None),
    ((IDX + b"\0" * 3, BIN), DocumentError, None),
    (patched(0, b"TNTIDX\0\0\0"), DocumentError, None),
    (patched(9, b"\2"), UnknownProtocolError, None),
    (patched(17, b"\0"), UnknownProtocolError, None),
    (patched(17, b"\x0b"), UnknownProtocolError, None),
    (patched(17, b"\5"), CorruptShardError, None),
    (patched(17, b"\x08"), CorruptShardError, None),
    (patched(18, b"\xff" * 8), DocumentError, None),
    (patched(26, b"\xff" * 8), DocumentError, None),
    (patched(38, struct.pack("<i", -4)), DocumentError, ("negative_size", ("sizes", 1))),
    (patched(34, struct.pack("<i", 2**31 - 1)), CorruptShardError, None),
    (with_(doc_idx=[]), DocumentError, ("bad_doc_idx", ("doc_idx", 0))),
    (with_(doc_idx=[0, 2, 3]), DocumentError, ("bad_doc_idx", ("doc_idx", 0))),
    (with_(doc_idx=[0, 2, 2, 5]), DocumentError, ("bad_doc_idx", ("doc_idx", 0))),
    (with_(doc_idx=[1, 2, 2, 4]), DocumentError, ("bad_doc_idx", ("doc_idx", 0))),
    (with_(doc_idx=[0, 3, 2, 4]), DocumentError, ("bad_doc_idx", ("doc_idx", 2))),
    (with_(doc_idx=[0, -1, 2, 4]), DocumentError, ("bad_doc_idx", ("doc_idx", 1))),
    (with_(doc_idx=[0, 2**63 - 1, -2, 4]), DocumentError, ("bad_doc_idx", ("doc_idx", 2))),
    (with_(pointers=[0, 16, -16, 48]), DocumentError, ("bad_pointer", ("pointers", 2))),
    (with_(pointers=[0, 4, 4, 12]), CorruptShardError, None),
    (with_(pointers=[0, 16, 16, 46]), DocumentError, ("bad_pointer", ("pointers", 3))),
    (with_(pointers=[0, 16, 16, 52]), CorruptShardError, None),
    (with_(pointers=[0, 16, 16, 2**62]), CorruptShardError, None),
    ((with_(pointers=[36, 32, 0, 32])[0], BIN + bytes(4)), CorruptShardError, None),
    ((IDX, BIN[:-1]), CorruptShardError, None),
    ((IDX, BIN[:-4]), CorruptShardError, None),
    ((IDX, BIN + b"\0\0\0\0"), CorruptShardError, None),
    ((IDX, b""), CorruptShardError, None),
    (mmididx_bytes([np.zeros(0, np.float32)], code=6), DocumentError, None),  # nothing decides between two types
    ((mmididx_bytes([np.zeros(3, np.float32)], code=7)[0], bytes(11)), DocumentError, None),
]


def test_open_what_breaks_a_rule_is_refused_with_its_place(tmp_path):
    put(tmp_path, b"MMIDIDX\0\0" + bytes(50 << 20), b"", "large")  # is not loaded
    tracemalloc.start()
    try:
        for (idx, bin_), kind, place in BROKEN:
            error = refusal(through, "pread", IndexedDataset, put(tmp_path, idx, bin_))
            found = [(problem.kind, problem.loc) for problem in getattr(error, "problems", ())]
            assert (type(error), found) == (kind, [] if place is None else [place])
            assert error.where == f"{tmp_path}/x.idx"
        assert type(refusal(through, "pread", IndexedDataset, tmp_path / "large")) is UnknownProtocolError
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    for case, engine in itertools.product(malformed("mmididx"), ENGINES):
        error = refusal(through, engine, open_source, DATA / "mmididx" / case["path"] / "data.idx")
        assert isinstance(error, (DocumentError, CorruptShardError))
        assert error.where.endswith("data.idx")
    (tmp_path / "x.bin").unlink()
    error = refusal(IndexedDataset, tmp_path / "x.idx")
    assert (type(error), error.where) == (NotFoundError, f"{tmp_path}/x.bin")
    put(tmp_path)
    (tmp_path / "x.idx").unlink()
    assert type(refusal(IndexedDataset, tmp_path / "x.bin")) is NotFoundError


@given(
    edits=st.lists(st.tuples(st.integers(0, len(IDX) - 1), st.integers(0, 255)), max_size=6),
    length=st.just(len(IDX)) | st.integers(0, len(IDX) + 40),
    bin_length=st.just(len(BIN)) | st.integers(0, len(BIN) + 9),
)
def test_open_a_damaged_data_set_raises_only_our_errors(tmp_path_factory, edits, length, bin_length):
    idx = bytearray(IDX)
    for offset, value in edits:
        idx[offset] = value
    idx, bin_ = bytes(idx[:length]).ljust(length, b"\0"), BIN[:bin_length].ljust(bin_length, b"\0")
    try:
        dataset = through("pread", IndexedDataset, put(tmp_path_factory.getbasetemp(), idx, bin_, "y"))
    except (DocumentError, CorruptShardError):
        return
    assert [len(each) for each in dataset] == dataset.sizes.tolist()
    dataset.validate(deep=True, progress=False)


def test_open_disputed_types_are_decided_by_the_files_or_refused(tmp_path):
    for code, dtype, sizes in itertools.product((6, 7), ("float32", "float64"), ([3, 4], [5], [0, 0, 2])):
        sequences = [np.arange(size).astype(dtype) for size in sizes]
        dataset = IndexedDataset(put(tmp_path, *mmididx_bytes(sequences, code=code)))
        assert (dataset.dtype, dataset[-1].tolist()) == (np.dtype(dtype), sequences[-1].tolist())
    idx, bin_ = mmididx_bytes([np.zeros(2), np.zeros(1)], code=6, pointers=[0, 24])
    assert type(refusal(IndexedDataset, put(tmp_path, idx, bin_ + bytes(8)))) is DocumentError
    idx, bin_ = mmididx_bytes([np.zeros(2), np.zeros(1)], code=6)
    assert type(refusal(IndexedDataset, put(tmp_path, idx, bin_[:-8]))) is CorruptShardError


# -- reports and changes -----------------------------------------------------------------------------------------------


def test_validate_reads_every_byte_if_deep(tmp_path):
    dataset = through("pread", IndexedDataset, put(tmp_path))
    assert dataset.validate(deep=True, progress=False).checked_bytes == len(IDX) + len(BIN)
    assert dataset.validate().checked_bytes == 0
    (tmp_path / "x.bin").write_bytes(BIN[:-2])
    (problem,) = dataset.validate(deep=True, progress=False).problems
    assert (problem.kind, problem.where, problem.lost) == ("corrupt_shard", f"{tmp_path}/x.bin", ((0, 4),))


def test_read_after_both_files_were_replaced_gives_the_old_ones_or_an_error(tmp_path):
    wanted = [[0] * 2, [1] * 3, [2] * 4]
    for engine in ("mmap", "pread"):
        for shift in (0, 100):
            with IndexedDatasetBuilder(tmp_path / "x", "uint16", overwrite=True) as builder:
                for each in wanted:
                    builder.add_document([token + shift for token in each[:: 1 if shift == 0 else -1]])
            if shift == 0:
                dataset = through(engine, IndexedDataset, tmp_path / "x")
        for read in (lambda each: each.rows(slice(None)), list):
            with contextlib.suppress(CorruptShardError, TransportError):
                assert lists(read(dataset)) == wanted


# -- samples of one length ---------------------------------------------------------------------------------------------


def test_sample_indices_are_those_of_the_text_and_of_both_peers():
    table = [[0, 0], [1, 10], [1, 40], [2, 20], [2, 50], [3, 20], [4, 20], [4, 50], [4, 80]]
    found = build_sample_idx([20, 50, 60, 30, 100, 5], [0, 1, 2, 3, 4, 5], 30, 1, 265)
    assert (found.tolist(), found.dtype) == (table, np.int32)
    for case in TRUTH["build_sample_idx_more"]:
        found = build_sample_idx(TRUTH["sizes"], case["doc_idx"], case["seq_length"], case["num_epochs"], 265)
        assert found.tolist() == case["modalities"]
    threshold = {"megatron_core": 0.80, "modalities": 0.95}
    for case, peer, engine in itertools.product(TRUTH["full_mapping"], threshold, ENGINES):
        if "error" in case[peer]:  # this peer crashes here
            continue
        first, *_, last = case["documents"]
        assert case["documents"] == list(range(first, last + 1))
        made = TokenSamples(
            through(engine, IndexedDataset, DATA / "mmididx/samples_seed_example/data"),
            case["seq_length"],
            num_samples=case["num_samples"],
            seed=case["seed"],
            documents=range(first, last + 1),
            separate_below=threshold[peer],
        )
        for name in ("doc_idx", "sample_idx", "shuffle_idx"):
            assert getattr(made.indices, name).tolist() == case[peer][name]
        assert len(made) == case[peer]["n"]
        assert made.rows(range(len(case[peer]["samples"]))).tolist() == case[peer]["samples"]


@given(
    sizes=st.lists(st.integers(0, 25), min_size=1, max_size=8),
    num_samples=st.none() | st.integers(1, 60),
    seq_length=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
    below=st.sampled_from([0, 0.8, 0.95, 1]),
)
def test_samples_are_the_run_of_their_documents(tmp_path_factory, sizes, num_samples, seq_length, seed, below):
    assume(sum(sizes) > 1)
    ends = np.cumsum(sizes)
    sequences = [np.arange(end - size, end, dtype=np.int32) for end, size in zip(ends, sizes, strict=True)]
    dataset = IndexedDataset(put(tmp_path_factory.getbasetemp(), *mmididx_bytes(sequences), "z"))
    made = TokenSamples(dataset, seq_length, num_samples=num_samples, seed=seed, separate_below=below)
    indices = made.indices
    assert len(set(np.bincount(indices.doc_idx, minlength=len(sizes)).tolist())) == 1
    assert sorted(indices.shuffle_idx.tolist()) == list(range(len(made)))
    assert num_samples is None or len(made) >= num_samples
    run = np.concatenate([sequences[document] for document in indices.doc_idx])
    rows = made.rows(np.arange(len(made)))
    for i, row in enumerate(indices.shuffle_idx.tolist()):
        wanted = run[row * seq_length : row * seq_length + seq_length + 1].tolist()
        assert made[i].tolist() == rows[i].tolist() == wanted
    again = reopen(json.loads(json.dumps(made.describe())))
    assert np.array_equal(again.rows(slice(None)), rows)


def test_samples_with_a_wrong_argument_are_refused(tmp_path):
    dataset = IndexedDataset(put(tmp_path))
    made = TokenSamples(dataset, 3, documents=range(2, 4))
    assert [type(refusal(made.__getitem__, wrong)) for wrong in (3, -4, 1.0, "0")] == [SelectionError] * 4
    made.close()
    for wrong in (
        {"seq_length": 0}, {"seq_length": 1.5}, {"seed": -1}, {"seed": 2**32}, {"num_samples": 0}, {"num_samples": 2**48},
        {"separate_below": 1.1}, {"separate_below": -0.1}, {"documents": range(0)}, {"documents": range(5)},
        {"documents": range(-1, 2)}, {"documents": range(0, 4, 2)}, {"documents": 3}, {"documents": range(1, 2)},
        {"separate_below": "1"},
    ):  # fmt: skip
        error = refusal(TokenSamples, dataset, **{"seq_length": 3, **wrong})
        assert (type(error), error.where) == (ArgumentError, next(iter(wrong)))
    for arguments, where in (
        (([3], [0], 1, 2, 3), "doc_idx"),
        ((np.zeros(0, int), np.zeros(0, int), 1, 1, 3), "doc_idx"), (([1, 2], [0, 1], 0, 1, 3), "seq_length"),
        (([3], [0], 1, 0, 3), "num_epochs"), (([3], [0], 1, 1, 0), "tokens_per_epoch"),
    ):  # fmt: skip
        error = refusal(build_sample_idx, *arguments)
        assert (type(error), error.where) == (ArgumentError, where)
    description = TokenSamples(dataset, 3).describe()
    settings = description["samples"]
    for changed in (
        {"seed": None}, {"seq_length": "3"}, {"separate_below": "a"}, {"separate_below": 2}, {"num_samples": [1]},
        {"documents": [0]}, {"documents": [0, "4"]}, {"seed": -1}, {"documents": {"xxh3_128": "ab"}}, {"documents": [0, 4, 0]}, None,
    ):  # fmt: skip
        given_back = {**description, "samples": 3 if changed is None else {**settings, **changed}}
        assert (type(refusal(reopen, given_back)), refusal(reopen, given_back).where) == (DocumentError, "description")


def test_indices_separate_the_last_epoch_when_it_gives_little():
    sizes = np.full(100, 10)  # 99 samples of 10 tokens in an epoch, so 205 of them take three
    together = build_indices(sizes, np.arange(100), seq_length=10, num_samples=205, separate_below=0)
    separate = build_indices(sizes, np.arange(100), seq_length=10, num_samples=205, separate_below=1)
    default = build_indices(sizes, np.arange(100), seq_length=10, num_samples=205)
    assert sorted(separate.doc_idx[-100:].tolist()) == list(range(100)) != sorted(together.doc_idx[-100:].tolist())
    assert set(separate.shuffle_idx[-100:].tolist()) == set(range(199, 299))
    megatron = build_indices(sizes, np.arange(100), seq_length=10, num_samples=205, seed=1234, separate_below=0.80)
    assert default.shuffle_idx.tolist() == megatron.shuffle_idx.tolist()


# -- writing -----------------------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.lists(st.integers(0, 40), max_size=4), max_size=6),
    dtype=st.sampled_from([name for name in sorted(CODES) if "float" not in name]),
)
def test_builder_writes_the_bytes_of_the_format(tmp_path_factory, sizes, dtype):
    folder, rng = tmp_path_factory.mktemp("built"), np.random.default_rng(1)
    documents = [
        [rng.integers(0, 256, size * np.dtype(dtype).itemsize, dtype=np.uint8).view(dtype) for size in document]
        for document in sizes
    ]
    flat = [sequence for document in documents for sequence in document]
    doc_idx = [0, *np.cumsum([len(document) for document in documents], dtype=int).tolist()]
    with IndexedDatasetBuilder(folder / "a", dtype) as builder:
        for document in documents:
            whole = np.concatenate([np.zeros(0, dtype), *document])
            builder.add_document(whole, [len(sequence) for sequence in document])
    expected = mmididx_bytes(flat, doc_idx=doc_idx, code=CODES[dtype])
    assert ((folder / "a.idx").read_bytes(), (folder / "a.bin").read_bytes()) == expected


@given(
    values=st.lists(st.integers(-(2**63), 2**64 - 1) | st.integers(-300, 70_000), min_size=1, max_size=5),
    given_as=st.sampled_from(["i1", "u1", "i2", "u2", ">i4", "u4", "i8", "u8"]),
    dtype=st.sampled_from([name for name in sorted(CODES) if "float" not in name]),
)
def test_builder_holds_integers_exactly_or_refuses_them(tmp_path_factory, values, given_as, dtype):
    folder, bounds = tmp_path_factory.mktemp("held"), np.iinfo(given_as)
    tokens = np.array([value for value in values if bounds.min <= value <= bounds.max], given_as)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    with IndexedDatasetBuilder(folder / "a", dtype) as builder:
        builder.add_document([1])
        if all(low <= value <= high for value in tokens.tolist()):
            builder.add_document(tokens)
        else:
            error = refusal(builder.add_document, tokens)
            assert (type(error), error.where) == (ArgumentError, "tokens")
            tokens = tokens[:0]
            builder.add_document(tokens)
    assert lists(IndexedDataset(folder / "a")) == [[1], tokens.tolist()]


def test_builder_refuses_what_does_not_fit_and_keeps_nothing_of_it(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "x", "uint16") as builder:
        for tokens in ([1.5], [[1]], ["a"], [2**70], 3, [None], [[1], [2, 3]]):
            assert (refusal(builder.add_document, tokens).where) == "tokens"
        for lengths in ([1], [3, -1], ["2"], [None], [1.5, 0.5]):
            assert refusal(builder.add_document, [1, 2], lengths).where == "lengths"
        mine = np.array([65_535, 7], np.uint16)
        builder.add_document(mine)
        mine[:] = 0  # the caller's memory is its own again
    assert IndexedDataset(tmp_path / "x")[0].tolist() == [65_535, 7]
    for dtype in ("complex64", "S3", object, "nothing", "float32"):
        assert refusal(IndexedDatasetBuilder, tmp_path / "z", dtype).where == "dtype"
    assert names(tmp_path) == ["x.bin", "x.idx"]


def test_builder_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), IndexedDatasetBuilder(tmp_path / "x") as builder:
        builder.add_document(range(1_000_000))
        raise RuntimeError
    builder = IndexedDatasetBuilder(tmp_path / "x")
    builder.add_document([1])
    builder.abort()
    assert names(tmp_path) == []
    for call in (lambda: builder.add_document([1]), builder.finalize):
        assert type(refusal(call)) is ReadOnlyError


def test_builder_publishes_once_or_replaces(tmp_path):
    for engine in ENGINES:
        path = tmp_path / engine / "x"
        path.parent.mkdir()
        there = {"transport": open_transport(path.parent, engine=engine)}
        first, second = (IndexedDatasetBuilder("x.idx", "uint16", **there) for _ in range(2))
        first.add_document(range(65_536))
        second.add_document([7])
        assert [name for name in names(path.parent) if not name.startswith(".")] == []
        first.finalize()
        assert type(refusal(second.finalize)) is StoreExistsError
        assert type(refusal(IndexedDatasetBuilder, "x", **there)) is StoreExistsError
        assert through(engine, IndexedDataset, path)[0].tolist() == list(range(65_536))
        if engine == "fsspec":  # cannot replace two files together
            error = refusal(IndexedDatasetBuilder, "x", overwrite=True, **there)
            assert (type(error), error.where) == (StoreExistsError, f"file://{path}.idx")
        else:
            with IndexedDatasetBuilder("x", "int64", overwrite=True, **there) as builder:
                builder.add_document([2**40])
            assert through(engine, IndexedDataset, path)[0].tolist() == [2**40]
        assert names(path.parent) == ["x.bin", "x.idx"]


def test_builders_that_publish_at_once_take_turns(tmp_path, monkeypatch):
    builders = [IndexedDatasetBuilder(tmp_path / "x", overwrite=overwrite) for overwrite in (False, True)]
    for token, builder in enumerate(builders):
        builder.add_document([token])
    kind, met = type(open_transport(tmp_path)), []
    lock = kind.lock

    def second(self, path):
        if not met:
            met.append(path)
            with lock(self, path):
                met.append(refusal(builders[1].finalize))
        return lock(self, path)

    monkeypatch.setattr(kind, "lock", second)
    builders[0].finalize()
    assert type(met[1]) is WriterConflictError
    assert lists(IndexedDataset(tmp_path / "x")) == [[0]]
    assert names(tmp_path) == ["x.bin", "x.idx"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_builder_that_is_stopped_after_any_call_is_repeated(tmp_path, overwrite, how):
    def build(path: Path) -> None:
        with IndexedDatasetBuilder(path, overwrite=overwrite) as builder:
            builder.add_document([1])

    def stopped(path: Path, number: int) -> None:
        calls = itertools.count()

        def wrapped(call):
            def then_stop(*arguments, **options):
                call(*arguments, **options)
                if next(calls) == number:
                    os.kill(os.getpid(), how)

            return then_stop

        for name in ("fsync", "link", "rename", "unlink"):
            setattr(os, name, wrapped(getattr(os, name)))
        build(path)

    for number in itertools.count():
        path = tmp_path / str(number) / "x"
        path.parent.mkdir()
        if overwrite:
            put(path.parent, *mmididx_bytes([np.array([0], np.int32)]))
        code, found = ended(in_child(lambda path=path, number=number: stopped(path, number))), None
        with contextlib.suppress(NotFoundError):
            found = lists(IndexedDataset(path))
        assert found in (None, [[0]], [[1]])
        if found != [[1]]:
            build(path)
        assert lists(IndexedDataset(path)) == [[1]]
        if code == 0:
            break
    assert number > 5


def test_builder_on_a_disk_that_is_full_keeps_what_it_was_to_replace(tmp_path, monkeypatch):
    for number in range(2):
        path = put(tmp_path)
        builder = IndexedDatasetBuilder(path, "uint16", overwrite=True)
        builder.add_document([1])
        with monkeypatch.context() as patch:
            faults = SystemFaults(patch, tmp_path)
            with faults.failing("fsync", number, "EIO"):
                assert type(refusal(builder.finalize)) is TransportError
            assert faults.fired
        assert lists(IndexedDataset(path)) == [each.tolist() for each in SEQUENCES]
        assert names(tmp_path) == ["x.bin", "x.idx"]


def test_builder_whose_index_cannot_be_published_leaves_no_tokens(tmp_path):
    builder = IndexedDatasetBuilder(tmp_path / "x")
    builder.add_document([1, 2, 3])
    (tmp_path / "x.idx").write_bytes(b"another program's")
    assert type(refusal(builder.finalize)) is StoreExistsError
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"x.idx": b"another program's"}


def test_data_set_in_a_bucket_is_written_read_and_not_replaced(s3_bucket):
    url, options = f"{s3_bucket.url}/deep/x.idx", s3_bucket.options
    with IndexedDatasetBuilder(url, "uint16", storage_options=options) as builder:
        builder.add_document([1, 2, 3])
    dataset = IndexedDataset(url, options)
    assert lists(dataset) == [[1, 2, 3]]
    bucket = open_transport(f"{s3_bucket.url}/deep", options)
    for left in ("x.idx", "x.bin"):  # even if a writer that was killed has left only one of the two
        (other,) = {"x.idx", "x.bin"} - {left}
        content = bucket.read(other)
        bucket.delete(other)
        error = refusal(IndexedDatasetBuilder, url, "uint16", overwrite=True, storage_options=options)
        assert (type(error), error.where) == (StoreExistsError, f"{s3_bucket.url}/deep/{left}")
        bucket.put(other, content[::-1])
    with pytest.raises((CorruptShardError, TransportError)):
        dataset.rows([0])
