"""MMIDIDX data sets that other programs made are read exactly; broken ones are refused, and no number is believed."""

from __future__ import annotations

import json
import pickle
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servers import s3_bucket  # noqa: F401 (a fixture)
from token_files import CODES, DATA, malformed, mmididx_bytes, samples, truth
from transports import CountingTransport, LatencyTransport

from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    NotFoundError,
    SaevStoreError,
    SelectionError,
    TransportError,
    UnknownProtocolError,
)
from saev_store.sources.mmididx import IndexedDataset, IndexedDatasetBuilder, parse_index, split_documents
from saev_store.sources.mmididx import index as index_module
from saev_store.transport import MemoryTransport, Moves, open_transport

every_sample = pytest.mark.parametrize("folder", samples("mmididx"), ids=lambda path: path.name)


def opened(idx, bin_, **options):
    return IndexedDataset("x", transport=MemoryTransport({"x.idx": idx, "x.bin": bin_}), **options)


def same(found, expected):
    """Equal bit by bit, NaN included."""
    assert found.dtype == expected.dtype
    assert found.tobytes() == expected.tobytes()


@every_sample
@pytest.mark.parametrize("engine", ["mmap", "pread", "fsspec", "memory"])
def test_samples_read_as_their_truth(folder, engine):
    expected, arrays = truth(folder)
    if "tokens" not in arrays:  # the sample of sample indices
        arrays = {"tokens": np.arange(265, dtype=np.int32), "sizes": np.array(expected["sizes"], np.int32)}
        expected = {"dtype": "int32", "doc_idx": list(range(7)), "modes": None}
    if engine == "memory":
        dataset = opened((folder / "data.idx").read_bytes(), (folder / "data.bin").read_bytes())
    else:
        dataset = IndexedDataset(folder / "data", engine=engine)
    assert dataset.dtype.name == expected["dtype"]
    assert dataset.sizes.tolist() == arrays["sizes"].tolist()
    if "pointers" in arrays:
        assert dataset.index.pointers.tolist() == arrays["pointers"].tolist()
    if expected["doc_idx"] is not None:
        assert dataset.doc_idx.tolist() == expected["doc_idx"]
        assert dataset.index.variant == "megatron"
    else:
        assert dataset.index.variant == "fairseq"
        assert dataset.n_documents == len(dataset)
    assert (None if dataset.modes is None else dataset.modes.tolist()) == expected["modes"]
    at = 0
    every = dataset.rows(slice(None))
    for i, size in enumerate(arrays["sizes"].tolist()):
        wanted = arrays["tokens"][at : at + size]
        same(dataset[i], wanted)
        same(dataset[i - len(dataset)], wanted)
        same(every[i], wanted)
        same(dataset.get(i, 1, size - 1), wanted[1:])
        same(dataset.get(i, size), wanted[:0])
        at += size
    for document in range(dataset.n_documents):
        first, end = dataset.doc_idx[document], dataset.doc_idx[document + 1]
        same(dataset.document(document), np.concatenate(every[first:end]))
    assert dataset.problems == ()
    assert dataset.validate(deep=True).ok


@pytest.mark.parametrize("case", malformed("mmididx"), ids=lambda case: case["case"])
def test_malformed_samples_are_refused(case):
    folder = DATA / "mmididx" / case["path"]
    for engine in ("mmap", "pread", "fsspec"):
        with pytest.raises((DocumentError, CorruptShardError), match="data.idx"):
            IndexedDataset(folder / "data.idx", engine=engine)


SEQUENCES = [np.arange(size, dtype=np.int32) + 10 * size for size in (4, 0, 8, 1)]
IDX, BIN = mmididx_bytes(SEQUENCES, doc_idx=[0, 2, 2, 4])


def with_(**changes):
    return mmididx_bytes(SEQUENCES, **{"doc_idx": [0, 2, 2, 4], **changes})


def patched(offset, data):
    return IDX[:offset] + data + IDX[offset + len(data) :], BIN


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((b"", BIN), "empty"),
        ((b"MMIDIDX", BIN), "7 bytes"),
        ((IDX[:25], BIN), "25 bytes"),
        ((IDX[:33], BIN), "33 bytes"),
        ((IDX[:-1], BIN), "cut"),
        ((IDX + b"\0", BIN), "appended"),
        ((IDX + b"\0" * 3, BIN), "partial|appended"),
        (patched(0, b"TNTIDX\0\0\0"), "begins with"),
        (patched(9, b"\2"), "version is 2"),
        (patched(17, b"\0"), "code 0"),
        (patched(17, b"\x0b"), "code 11"),
        (patched(17, b"\5"), "multiple|overlap|bytes"),
        (patched(17, b"\x08"), "\\.bin|bytes"),
        (patched(18, b"\xff" * 8), "cut"),
        (patched(26, b"\xff" * 8), "cut"),
        (patched(34, struct.pack("<i", -4)), "sizes\\[0\\] is -4"),
        (patched(34, struct.pack("<i", 2**31 - 1)), "bytes"),
        (with_(pointers=[0, 16, -16, 48]), "pointers\\[2\\] is -16"),
        (with_(pointers=[0, 4, 4, 12]), "count tokens"),
        (with_(pointers=[0, 16, 18, 48]), "no multiple"),
        (with_(pointers=[0, 16, 16, 52]), "\\.bin"),
        (with_(pointers=[0, 16, 16, 2**62]), "\\.bin"),
        (with_(pointers=[0, 16, 12, 48]), "overlap"),
        (with_(doc_idx=[0, 2, 1, 4]), "must not descend"),
        (with_(doc_idx=[0, 2, 2, 3]), "end with 4"),
        (with_(doc_idx=[0, 2, 2, 5]), "end with 4"),
        (with_(doc_idx=[1, 2, 2, 4]), "begin with 0"),
        (with_(doc_idx=[0, -1, 2, 4]), "must not descend"),
        (with_(doc_idx=[]), "doc_idx is empty"),
        ((IDX, BIN[:-1]), "\\.bin"),
        ((IDX, BIN[:-4]), "\\.bin"),
        ((IDX, BIN + b"\0\0\0\0"), "\\.bin"),
        ((IDX, b""), "\\.bin"),
    ],
)
def test_what_breaks_a_rule_is_refused_by_name(files, message):
    tracemalloc.start()
    try:
        with pytest.raises((DocumentError, CorruptShardError), match=message):
            opened(*files)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_a_missing_half_is_told():
    for files, name in (({"x.idx": IDX}, "x.bin"), ({"x.bin": BIN}, "x.idx")):
        with pytest.raises(NotFoundError, match=name):
            IndexedDataset("x.idx", transport=MemoryTransport(files))


def test_gaps_and_another_order_are_read_with_a_warning():
    bin_ = np.arange(20, dtype=np.int32).tobytes()
    idx, _ = mmididx_bytes(SEQUENCES, pointers=[48, 0, 4, 76])
    dataset = opened(idx, bin_)
    assert [dataset[i].tolist() for i in range(4)] == [[12, 13, 14, 15], [], list(range(1, 9)), [19]]
    assert [sequence.tolist() for sequence in dataset.rows([2, 0])] == [list(range(1, 9)), [12, 13, 14, 15]]
    assert dataset.document(0).tolist() == [12, 13, 14, 15]
    (problem,) = dataset.problems
    assert (problem.kind, problem.severity) == ("not_packed", "warning")


def test_a_sequence_without_tokens_overlaps_nothing_wherever_it_lies():
    """Here in the middle of the first one."""
    first, last = np.array([1, 2], np.uint16), np.array([3, 4], np.uint16)
    for pointer in (4, 6):
        idx, _ = mmididx_bytes([first, first[:0], last], pointers=[4, pointer, 0])
        dataset = opened(idx, last.tobytes() + first.tobytes())
        assert [dataset[i].tolist() for i in range(3)] == [[1, 2], [], [3, 4]]
        assert [problem.kind for problem in dataset.problems] == ["not_packed"]


@pytest.mark.parametrize("n", range(1, 9))
def test_indices_are_checked_to_their_end(n, monkeypatch):
    """However many entries are looked at at once; the one that is wrong is named."""
    monkeypatch.setattr(index_module, "_STRIDE", 3)
    sequences = [np.arange(2 + i % 3, dtype=np.int32) for i in range(n)]
    starts = np.cumsum([0, *map(len, sequences)]) * 4
    idx, bin_ = mmididx_bytes(sequences)
    dataset = opened(idx, bin_)
    assert dataset.problems == ()
    assert [sequence.tolist() for sequence in dataset.rows(slice(None))] == [each.tolist() for each in sequences]
    assert dataset.n_tokens == starts[-1] // 4
    for wrong in range(n):
        pointers = [*starts[:wrong], *(starts[wrong:-1] + 4)]
        (problem,) = opened(mmididx_bytes(sequences, pointers=pointers)[0], bin_ + bytes(4)).problems
        assert problem.kind == "not_packed"
        assert f"number {wrong} begins" in problem.message
        sizes = [-1 if at == wrong else len(each) for at, each in enumerate(sequences)]
        damaged = idx[:34] + np.array(sizes, "<i4").tobytes() + idx[34 + 4 * n :]
        with pytest.raises(DocumentError, match=rf"sizes\[{wrong}\] is -1"):
            opened(damaged, bin_)
        doc_idx = [*range(wrong + 1), -1, *range(wrong + 1, n + 1)]
        with pytest.raises(DocumentError, match=rf"doc_idx\[{wrong + 1}\] is -1 after {wrong}"):
            opened(*mmididx_bytes(sequences, doc_idx=doc_idx))


@pytest.mark.parametrize(("code", "dtype"), [(6, "float64"), (6, "float32"), (7, "float64"), (7, "float32")])
@pytest.mark.parametrize("sizes", [[3, 4], [5], [0, 0, 2]])
def test_disputed_codes_are_told_apart(code, dtype, sizes):
    sequences = [np.arange(size, dtype=dtype) for size in sizes]
    dataset = opened(*mmididx_bytes(sequences, code=code))
    assert dataset.dtype == dtype
    same(dataset[len(sizes) - 1], sequences[-1])
    with pytest.raises(ArgumentError, match="can mean"):
        opened(*mmididx_bytes(sequences, code=code), dtype="int32")


def test_disputed_codes_that_nothing_decides():
    files = mmididx_bytes([np.zeros(0, np.float32)], code=6)
    with pytest.raises(DocumentError, match="do not decide"):
        opened(*files)
    assert opened(*files, dtype="float32").dtype == np.float32
    files = mmididx_bytes([np.zeros(3, np.float32)], code=6)
    with pytest.raises(DocumentError, match="do not decide"):
        opened(files[0], files[1][:-1])


@given(
    sizes=st.lists(st.integers(0, 30), max_size=12),
    dtype=st.sampled_from(sorted(CODES)),
    kind=st.sampled_from(["plain", "short", "modes"]),
    data=st.data(),
)
def test_any_data_set_reads_back(sizes, dtype, kind, data):
    rng = np.random.default_rng(sum(sizes))
    sequences = [rng.integers(0, 256, size * np.dtype(dtype).itemsize, dtype=np.uint8).view(dtype) for size in sizes]
    if dtype.startswith("float") and not sum(sizes):
        return
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sizes)), max_size=4)))
    modes = [i % 256 - 128 for i in range(len(sizes))] if kind == "modes" and sizes else None
    if not sizes:
        sequences_dtype = np.dtype("int32") if dtype.startswith("float") else np.dtype(dtype)
        files = mmididx_bytes([np.zeros(0, sequences_dtype)][:0], doc_idx=[0, *cuts, 0], short=kind == "short")
    else:
        files = mmididx_bytes(sequences, doc_idx=[0, *cuts, len(sizes)], modes=modes, short=kind == "short")
    for transport in (MemoryTransport(), LatencyTransport(MemoryTransport(), 0.0, 100e6)):
        transport.put("x.idx", files[0])
        transport.put("x.bin", files[1])
        dataset = IndexedDataset("x", transport=transport)
        assert len(dataset) == len(sizes)
        assert (None if dataset.modes is None else dataset.modes.tolist()) == modes
        for found, wanted in zip(dataset.rows(slice(None)), sequences, strict=True):
            same(found, wanted)
        if kind != "short":
            assert dataset.doc_idx.tolist() == [0, *cuts, len(sizes)]
        for document in range(dataset.n_documents):
            parts = sequences[dataset.doc_idx[document] : dataset.doc_idx[document + 1]]
            whole = np.concatenate([np.zeros(0, dtype), *parts]) if parts else np.zeros(0, dataset.dtype)
            start = data.draw(st.integers(0, len(whole)))
            stop = data.draw(st.integers(start, len(whole)))
            same(dataset.document(document, start, stop), whole[start:stop])


@given(
    edits=st.lists(st.tuples(st.integers(0, len(IDX) - 1), st.integers(0, 255)), max_size=6),
    length=st.just(len(IDX)) | st.integers(0, len(IDX) + 40),
    bin_length=st.just(len(BIN)) | st.integers(0, len(BIN) + 9),
)
def test_whatever_an_index_holds_only_our_errors_come(edits, length, bin_length):
    idx = bytearray(IDX)
    for offset, value in edits:
        idx[offset] = value
    idx = bytes(idx[:length].ljust(length, b"\0"))
    try:
        dataset = opened(idx, BIN[:bin_length].ljust(bin_length, b"\0"))
    except (DocumentError, CorruptShardError):
        return
    for i, size in enumerate(dataset.sizes.tolist()):
        assert len(dataset[i]) == size
    for document in range(min(dataset.n_documents, 100)):
        dataset.document(document)
    dataset.validate(deep=True)


@given(st.binary(max_size=120))
def test_noise_is_no_index(noise):
    with pytest.raises(DocumentError):
        parse_index(noise, bin_nbytes=0, where="x")


def test_a_part_of_a_long_document_costs_no_more_than_itself(tmp_path):
    sequences = [np.arange(200_000, dtype=np.uint16), np.arange(300_000, dtype=np.uint16)]
    idx, bin_ = mmididx_bytes(sequences, doc_idx=[0, 2])
    (tmp_path / "x.idx").write_bytes(idx)
    (tmp_path / "x.bin").write_bytes(bin_)
    counting = CountingTransport(open_transport(tmp_path, engine="pread"))
    dataset = IndexedDataset("x.idx", transport=counting)
    counting.reset()
    same(dataset.document(0, 199_990, 200_010), np.concatenate(sequences)[199_990:200_010])
    same(dataset.get(1, 5000, 3), sequences[1][5000:5003])
    assert (counting.counters.requests, counting.counters.bytes_read) == (2, 46)


def test_scattered_sequences_are_fetched_together():
    sequences = [np.full(100, i, np.int32) for i in range(1000)]
    idx, bin_ = mmididx_bytes(sequences)
    counting = CountingTransport(LatencyTransport(MemoryTransport({"x.idx": idx, "x.bin": bin_}), 0.0, 10e3))
    dataset = IndexedDataset("x", transport=counting)
    counting.reset()
    found = dataset.rows([999, 5, 6, 7, 5])
    assert [int(sequence[0]) for sequence in found] == [999, 5, 6, 7, 5]
    assert counting.counters.operations == {"get_ranges": 1}
    assert counting.counters.requests == 2


def test_a_file_that_is_no_index_is_not_loaded():
    counting = CountingTransport(MemoryTransport({"x.idx": b"MMIDIDX\0\0" + bytes(10_000_000), "x.bin": b""}))
    with pytest.raises(DocumentError):
        IndexedDataset("x", transport=counting)
    assert counting.counters.bytes_read < 100


@pytest.mark.parametrize("wrong", [4, -5, 1.0, "0", None, 10**30])
def test_wrong_numbers(wrong):
    dataset = opened(IDX, BIN)
    for call in (dataset.__getitem__, dataset.get, dataset.key):
        with pytest.raises(SelectionError):
            call(wrong)
    with pytest.raises(SelectionError):
        dataset.document(wrong if wrong != 4 else 3)


def test_wrong_parts():
    dataset = opened(IDX, BIN)
    for part in ((0, 5), (0, -1), (0, 3, 2), (0, 0, 5), (0, 2, -1)):
        with pytest.raises(SelectionError):
            dataset.get(*part)
    for part in ((0, 5), (0, -1), (0, 3, 2), (0, 0, 5), (1, 0, 1)):
        with pytest.raises(SelectionError):
            dataset.document(*part)
    for wanted in ([4], [-5], [[0]], [0.5], ["a"]):
        with pytest.raises(SelectionError):
            dataset.rows(wanted)
    assert dataset.modes is None


def test_a_data_set_can_be_pickled_and_closed(tmp_path):
    (tmp_path / "x.idx").write_bytes(IDX)
    (tmp_path / "x.bin").write_bytes(BIN)
    dataset = pickle.loads(pickle.dumps(IndexedDataset(tmp_path / "x.bin")))
    view = dataset[2]
    dataset.close()
    same(view, SEQUENCES[2])
    same(dataset[2], SEQUENCES[2])


def test_negative_token_ids_are_remarked():
    dataset = opened(*mmididx_bytes([np.array([1, -7], np.int32)]))
    (problem,) = dataset.validate(deep=True).problems
    assert (problem.kind, problem.severity) == ("negative_token", "info")


def test_a_file_that_changed_is_noticed():
    memory = MemoryTransport({"x.idx": IDX, "x.bin": BIN})
    dataset = IndexedDataset("x", transport=memory)
    memory.put("x.bin", BIN[:-4])
    report = dataset.validate(deep=True)
    assert [problem.kind for problem in report.problems] == ["changed_size"]
    assert report.lost == ((0, 4),)


@given(n=st.integers(0, 1000), weights=st.lists(st.integers(0, 1000), min_size=1, max_size=4))
def test_splits_cover_everything_once(n, weights):
    if not sum(weights):
        with pytest.raises(ArgumentError):
            split_documents(n, weights)
        return
    parts = split_documents(n, weights)
    assert [i for part in parts for i in part] == list(range(n))
    for part, weight in zip(parts, weights, strict=True):
        assert abs(len(part) - n * weight / sum(weights)) <= 1


def test_splits_are_rounded_as_megatron_rounds_them():
    """13.5 documents: the sum of the shares is a little less than 0.9 there, so it is 13."""
    assert split_documents(15, [7, 2, 1]) == [range(10), range(10, 13), range(13, 15)]


def test_unknown_types_say_which_are_known():
    with pytest.raises(UnknownProtocolError, match="1 to 10"):
        opened(*mmididx_bytes(SEQUENCES, code=99))
    with pytest.raises(SaevStoreError, match="no dtype"):
        opened(IDX, BIN, dtype="tokens")


def test_samples_are_what_their_manifest_says():
    assert {case["case"] for case in malformed("mmididx")} >= {"idx_empty", "dtype_0", "pointers_in_elements"}
    assert json.loads((DATA / "mmididx/core_multimodal_modes/expected.json").read_text())["writer"].startswith(
        "megatron"
    )


def _replaced(place, token):
    if not isinstance(place, Moves):
        place.delete("x.idx")
        place.delete("x.bin")
    with IndexedDatasetBuilder("x", "uint16", overwrite=True, transport=place) as builder:
        for i in range(3):
            builder.add_document([token + i] * (4 - i if token else i + 2))


@pytest.mark.parametrize("engine", ["mmap", "pread", "memory", "memory://"])
@pytest.mark.parametrize("closed", [False, True])
def test_an_old_index_never_meets_new_tokens(tmp_path, engine, closed):
    """Both files are replaced after opening: what was opened is read, or reading is an error."""
    writing = reading = MemoryTransport()
    if engine == "memory://":
        writing, reading = (open_transport(f"memory://pairs-{tmp_path.name}") for _ in range(2))
    elif engine != "memory":
        writing, reading = open_transport(tmp_path), open_transport(tmp_path, engine=engine)
    _replaced(writing, 0)
    dataset = IndexedDataset("x", transport=reading)
    wanted = [[0] * 2, [1] * 3, [2] * 4]
    _replaced(writing, 100)
    if closed:
        dataset.close()
    for read in (lambda: dataset.rows(slice(None)), lambda: [dataset[i] for i in range(3)]):
        try:
            found = [tokens.tolist() for tokens in read()]
        except (CorruptShardError, TransportError) as error:
            assert engine in {"pread", "memory://"} or closed
            assert "replaced" in str(error) or "taken the place" in str(error)
            continue
        assert found == wanted
    if closed:
        with pytest.raises(CorruptShardError, match="taken the place"):
            dataset.document(0)


@pytest.mark.parametrize("engine", ["pread", "mmap", "fsspec"])
def test_files_that_are_replaced_while_they_are_opened(tmp_path, monkeypatch, engine):
    """By others of the same sizes and headers; a map goes on showing the old index, and fsspec pins no file."""
    _replaced(open_transport(tmp_path), 0)
    transport = open_transport(tmp_path, engine=engine)
    kind = type(transport)
    real = kind.size

    def size(self, path):
        if path == "x.bin":  # the index is read already
            monkeypatch.undo()
            _replaced(open_transport(tmp_path), 100)
        return real(self, path)

    monkeypatch.setattr(kind, "size", size)
    with pytest.raises((CorruptShardError, DocumentError)):
        IndexedDataset("x", transport=transport)


def test_another_data_set_of_as_many_sequences_that_comes_meanwhile_is_noticed():
    """Where nothing tells one file from another of its size, at least the headers are compared."""

    class Replaced(MemoryTransport):
        is_armed = False

        def size(self, path: str) -> int:
            nbytes = super().size(path)
            if path == "x.bin" and self.is_armed:
                self.is_armed = False
                for name, content in other.files.items():
                    self.put(name, content)
            return nbytes

    other, transport = MemoryTransport(), Replaced()
    for place, dtype in ((other, "int32"), (transport, "uint16")):
        with IndexedDatasetBuilder("x", dtype, transport=place) as builder:
            for i in range(3):
                builder.add_document([i] * 4)
    assert other.size("x.idx") == transport.size("x.idx")
    transport.is_armed = True
    with pytest.raises(CorruptShardError, match="taken the place"):
        IndexedDataset("x", transport=transport)
    assert IndexedDataset("x", transport=transport).dtype == np.int32


def test_objects_that_are_replaced_after_opening(s3_bucket):
    writing, reading = (open_transport(s3_bucket.url, s3_bucket.options) for _ in range(2))
    _replaced(writing, 0)
    dataset = IndexedDataset("x", transport=reading)
    _replaced(writing, 100)
    with pytest.raises((CorruptShardError, TransportError), match="replaced"):
        dataset.rows([0, 2])


@pytest.mark.parametrize(
    ("files", "kind", "loc", "message"),
    [
        (patched(38, struct.pack("<i", -2)), "negative_size", ("sizes", 1), "sizes[1] is -2; a sequence has at least 0 tokens"),
        (with_(doc_idx=[]), "bad_doc_idx", ("doc_idx", 0), "doc_idx is empty; it must begin with 0 and end with 4"),
        (with_(doc_idx=[0, 2, 3]), "bad_doc_idx", ("doc_idx", 0), "doc_idx is 0 … 3; it must begin with 0 and end with 4"),
        (with_(doc_idx=[0, 3, 2, 4]), "bad_doc_idx", ("doc_idx", 2), "doc_idx[2] is 2 after 3; it must not descend"),
        (with_(pointers=[0, 16, -1, 48]), "negative_pointer", ("pointers", 2), "pointers[2] is -1"),
        (with_(pointers=[0, 4, 4, 12]), "pointers_in_elements", ("pointers", 1), "pointers count tokens (pointers[1] is 4); they must count bytes"),
        (with_(pointers=[0, 16, 16, 46]), "unaligned_pointer", ("pointers", 3), "pointers[3] is 46, no multiple of the 4 bytes of a token"),
        (with_(pointers=[0, 16, 12, 48]), "overlapping_sequences", ("pointers", 2), "sequences 0 and 2 overlap: they begin at bytes 0 and 12"),
    ],
)  # fmt: skip
def test_the_number_that_is_wrong_is_located(files, kind, loc, message):
    with pytest.raises(DocumentError) as caught:
        opened(*files)
    (problem,) = caught.value.problems
    assert (problem.kind, problem.loc, problem.message, problem.where) == (kind, loc, message, "memory://x.idx")
    assert (caught.value.message, caught.value.where) == (message, "memory://x.idx")


def test_an_index_with_other_lengths_is_another_one():
    """Of sequences that begin where they did, in storage that tells no versions."""
    sequences = [np.arange(2, dtype=np.int32), np.arange(2, dtype=np.int32)]
    idx, _ = mmididx_bytes(sequences, pointers=[0, 16])
    transport = MemoryTransport({"x.idx": idx, "x.bin": np.arange(6, dtype=np.int32).tobytes()})
    dataset = IndexedDataset("x", transport=transport)
    dataset.close()
    assert dataset[0].tolist() == [0, 1]
    dataset.close()
    transport.put("x.idx", mmididx_bytes([np.arange(3, dtype=np.int32), sequences[1]], pointers=[0, 16])[0])
    with pytest.raises(CorruptShardError):
        dataset.get(0)
