"""What LLMBATCH and MMIDIDX files say of themselves, what closing them gives back, and each error with its place and remedy."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash
from token_files import llmbatch_bytes, mmididx_bytes

from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    NotFoundError,
    ResumeError,
    SaevStoreError,
    SelectionError,
    UnknownProtocolError,
)
from saev_store.sources.convert import documents_to_batches, samples_to_documents
from saev_store.sources.llmbatch import BatchFileReader, BatchNativeLoader, write_batch_dataset, write_batch_file
from saev_store.sources.llmbatch.order import RecordOrder
from saev_store.sources.mmididx import IndexedDataset, IndexedDatasetBuilder, TokenSamples, build_indices
from saev_store.sources.mmididx.samples import from_description
from saev_store.transport import MemoryTransport

BATCHES = llmbatch_bytes(np.arange(12, dtype=np.uint32).reshape(2, 2, 3), seed=7, total=5)
SEQUENCES = [np.arange(size, dtype=np.uint16) + 10 * size for size in (4, 0, 8, 1)]
IDX, BIN = mmididx_bytes(SEQUENCES, doc_idx=[0, 2, 4], code=8)


def batches(content: bytes = BATCHES) -> BatchFileReader:
    return BatchFileReader("a/x.batch", transport=MemoryTransport({"a/x.batch": content}))


def documents(idx: bytes = IDX, bin_: bytes = BIN, **options: object) -> IndexedDataset:
    return IndexedDataset("a/x", transport=MemoryTransport({"a/x.idx": idx, "a/x.bin": bin_}), **options)


def refused(call: Callable[[], object]) -> SaevStoreError:
    with pytest.raises(SaevStoreError) as caught:
        call()
    return caught.value


def digest(*files: bytes) -> dict[str, str]:
    """Of small files: size and bytes of each."""
    parts = b"".join(len(content).to_bytes(8, "little") + content for content in files)
    return {"algorithm": "xxh3_128", "scope": "sampled", "value": xxhash.xxh3_128_hexdigest(parts)}


# -- what is said ------------------------------------------------------------------------------------------------------


def test_descriptions_of_token_sources():
    assert batches().describe() == {
        "format": "llmbatch",
        "url": "memory://a/x.batch",
        "n_samples": 4,
        "mapping": "example i is record i, in file order: row i % batch_size of batch i // batch_size",
        "batch_size": 2,
        "seq_len": 3,
        "digest": digest(BATCHES),
    }
    described = {
        "format": "mmididx",
        "url": "memory://a/x.idx",
        "n_samples": 4,
        "mapping": "example i is sequence i",
        "dtype": "uint16",
        "digest": digest(IDX, BIN),
    }
    assert documents().describe() == described
    samples = TokenSamples(documents(), 3, num_samples=5, seed=2, documents=range(1, 4), separate_below=0.5)
    settings = {"seq_length": 3, "num_samples": 5, "seed": 2, "separate_below": 0.5, "documents": [1, 4]}
    assert samples.describe() == {
        **described,
        "n_samples": len(samples),
        "mapping": "example i is sample i, in shuffled order",
        "samples": {**settings, "random": "numpy.random.RandomState"},
    }
    picked = TokenSamples(documents(), 3, documents=[3, 0]).describe()["samples"]
    assert picked["documents"] == {"xxh3_128": xxhash.xxh3_128_hexdigest(np.array([3, 0], "<i8").tobytes())}
    for source in (batches(), documents()):
        assert source.describe(digest="full")["digest"]["scope"] == "full"


def test_cards_of_token_sources():
    assert repr(batches()).splitlines() == [
        "LLMBATCH memory://a/x.batch",
        "  batches       2 of 2 records x 3 tokens (uint32)",
        "  records       4 of 5 given to the writer",
        "  seed          7",
        "  read through  memory",
    ]
    assert repr(documents()).splitlines() == [
        "MMIDIDX memory://a/x.idx",
        "  sequences     4 in 2 documents",
        "  tokens        13 of uint16",
        "  modes         none",
        "  read through  memory",
    ]
    other = repr(documents(*mmididx_bytes(SEQUENCES, code=8, modes=[0, 1, 2, 3])))
    assert "  modes         one for each sequence" in other.splitlines()
    short = repr(documents(*mmididx_bytes(SEQUENCES, code=8, short=True)))
    assert "  sequences     4 in 4 documents, not recorded in this variant" in short.splitlines()
    samples = TokenSamples(documents(), 3, num_samples=9, documents=range(2, 4))
    assert repr(samples).splitlines() == [
        "token samples over memory://a/x.idx",
        f"  samples    {len(samples)} of 3 + 1 tokens",
        "  documents  2 of 4, in 4 epochs",
    ]


def test_problems_of_a_file_are_shown_on_its_card():
    content = llmbatch_bytes(np.zeros((2, 2, 3), np.uint32), total=99)
    reader = batches(content)
    (problem,) = reader.problems
    assert problem.message == "total_records is 99, which is 49 full batches of 2; the file has 2"
    assert (problem.where, problem.loc) == ("memory://a/x.batch", ("total_records",))
    assert problem.message in repr(reader)
    assert [found.kind for found in reader.validate().problems] == ["total_records_mismatch"]
    for total, is_right in ((3, False), (4, True), (5, True), (6, False)):
        reader = batches(llmbatch_bytes(np.zeros((2, 2, 3), np.uint32), total=total))
        assert (reader.problems == ()) == is_right
    idx, _ = mmididx_bytes(SEQUENCES, pointers=[16, 0, 0, 26], code=8)
    dataset = documents(idx, bytes(28))
    (problem,) = dataset.problems
    assert problem.message == (
        "sequences are not packed in order: number 0 begins at byte 16, and 2 bytes belong to none; each is read where its "
        "pointer says"
    )
    assert problem.loc == ("pointers", 0)
    assert [found.kind for found in dataset.validate().problems] == ["not_packed"]
    assert [found.kind for found in TokenSamples(dataset, 3).validate(deep=True, progress=False).problems] == [
        "not_packed"
    ]


def test_defaults_are_those_of_megatron():
    given = inspect.signature(TokenSamples).parameters, inspect.signature(build_indices).parameters
    assert [(each["seed"].default, each["separate_below"].default) for each in given] == [(1234, 0.80)] * 2
    assert IndexedDatasetBuilder("x", transport=MemoryTransport()).dtype == np.int32
    sizes = np.full(8, 11)
    for below in (0.80, 0.95):
        found = build_indices(sizes, np.arange(8), seq_length=4, num_samples=39, seed=1234, separate_below=below)
        default = build_indices(sizes, np.arange(8), seq_length=4, num_samples=39)
        assert (found.doc_idx.tolist() == default.doc_idx.tolist()) == (below == 0.80)
    samples = TokenSamples(documents(), 3)
    assert samples.rows(slice(None)).tolist() == TokenSamples(documents(), 3, seed=1234).rows(slice(None)).tolist()
    assert samples.n_epochs == 1


# -- reports -----------------------------------------------------------------------------------------------------------


def test_a_file_with_another_header_now_is_reported():
    memory = MemoryTransport({"x.batch": BATCHES})
    reader = BatchFileReader("x.batch", transport=memory)
    memory.put("x.batch", llmbatch_bytes(np.zeros((2, 2, 3), np.uint32), seed=8, total=5))
    report = reader.validate(deep=True, progress=False)
    (problem,) = report.problems
    assert (problem.kind, problem.where, problem.lost) == ("corrupt_shard", "memory://x.batch", ((0, 4),))
    assert "the header was Header(" in problem.message
    assert report.checked_bytes == 0


def test_a_half_that_is_gone_is_reported_with_the_other_one():
    memory = MemoryTransport({"x.idx": IDX, "x.bin": BIN})
    dataset = IndexedDataset("x", transport=memory)
    memory.delete("x.idx")
    memory.put("x.bin", BIN + b"\0\0")
    report = dataset.validate(deep=True, progress=False)
    assert [(problem.kind, problem.where, problem.lost) for problem in report.problems] == [
        ("not_found", "memory://x.idx", ((0, 4),)), ("changed_size", "memory://x.bin", ((0, 4),)),
    ]  # fmt: skip
    assert report.problems[1].message == f"it had {len(BIN)} bytes when it was opened and has {len(BIN) + 2} now"
    assert (report.checked_bytes, report.n_examples, report.n_shards) == (0, 4, 1)


def test_reports_say_what_was_read():
    report = documents().validate(deep=True, progress=False)
    assert (report.checked_bytes, report.deep, report.n_examples, report.ok) == (len(BIN), True, 4, True)
    report = documents().validate()
    assert (report.checked_bytes, report.deep, report.url) == (0, False, "memory://a/x.idx")
    assert TokenSamples(documents(), 3).validate(deep=True, progress=False).checked_bytes == len(BIN)


def test_nothing_is_lost_of_what_holds_nothing():
    """No range of examples is `0:0`."""
    idx, bin_ = mmididx_bytes([])
    memory = MemoryTransport({"x.batch": llmbatch_bytes(np.zeros((0, 2, 3))), "x.idx": idx, "x.bin": bin_})
    sources = (BatchFileReader("x.batch", transport=memory), IndexedDataset("x", transport=memory))
    memory.put("x.batch", llmbatch_bytes(np.zeros((0, 2, 4))))
    memory.delete("x.idx")
    memory.put("x.bin", b"more")
    reports = [source.validate() for source in sources]
    assert [[(each.kind, each.lost) for each in report.problems] for report in reports] == [
        [("corrupt_shard", ())], [("not_found", ()), ("changed_size", ())],
    ]  # fmt: skip


# -- closing -----------------------------------------------------------------------------------------------------------


class Closing(MemoryTransport):
    """Counts how often it was closed."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(files)
        self.n_closed = 0

    def close(self) -> None:
        self.n_closed += 1
        super().close()


def test_closing_gives_back_the_connections():
    transport = Closing({"x.batch": BATCHES, "x.idx": IDX, "x.bin": BIN})
    for n, source in enumerate(
        (BatchFileReader("x.batch", transport=transport), IndexedDataset("x", transport=transport)), 1
    ):
        with source:
            assert transport.n_closed == n - 1
        assert transport.n_closed == n
    with TokenSamples(IndexedDataset("x", transport=transport), 3):
        pass
    assert transport.n_closed == 3
    reader = BatchFileReader("x.batch", transport=transport)
    with BatchNativeLoader(reader, output="numpy"):
        pass
    assert transport.n_closed == 3  # the reader is the caller's


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_a_loader_closes_what_it_has_opened(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "x.batch").write_bytes(BATCHES)
    closed: list[BatchFileReader] = []
    close = BatchFileReader.close
    monkeypatch.setattr(BatchFileReader, "close", lambda reader: (closed.append(reader), close(reader)))
    with BatchNativeLoader(tmp_path / "x.batch", output="numpy", engine=engine) as loader:
        assert len(list(loader)) == 2
    assert closed == [loader.reader]


def test_what_is_mapped_is_mapped_again(tmp_path: Path):
    """After closing, batches and sequences are views of the file once more."""
    for name, content in (("x.batch", BATCHES), ("x.idx", IDX), ("x.bin", BIN)):
        (tmp_path / name).write_bytes(content)
    reader, dataset = BatchFileReader(tmp_path / "x.batch"), IndexedDataset(tmp_path / "x")
    for _ in range(2):
        assert np.shares_memory(reader.rows([0]), reader.rows([0])) is False
        assert np.shares_memory(reader.read_batch(np.int64(0)), reader.read_batch(0))
        assert np.shares_memory(dataset.get(0), dataset[0])
        reader.close()
        dataset.close()
        assert reader.read_batches([1]).tolist() == [[[6, 7, 8], [9, 10, 11]]]
        assert [found.tolist() for found in dataset.rows([3])] == [[10]]


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_other_tokens_of_the_same_sizes_are_noticed_after_closing(engine: str, tmp_path: Path):
    """The index is the same, byte for byte."""
    for name, content in (("x.idx", IDX), ("x.bin", BIN), ("y.bin", bytes(len(BIN)))):
        (tmp_path / name).write_bytes(content)
    dataset = IndexedDataset(tmp_path / "x", engine=engine)
    dataset.close()
    assert dataset[0].tolist() == SEQUENCES[0].tolist()
    dataset.close()
    (tmp_path / "y.bin").replace(tmp_path / "x.bin")
    for read in (lambda: dataset[0], lambda: dataset.rows([0, 2]), lambda: dataset.document(0)):
        error = refused(read)
        assert type(error) is CorruptShardError
        assert (error.where, error.remedy) == (f"{tmp_path}/x.idx", "Open it again.")


def test_a_pickle_keeps_the_dtype_that_was_asked_for(tmp_path: Path):
    idx, bin_ = mmididx_bytes([np.zeros(0, np.float32)], code=6)
    (tmp_path / "x.idx").write_bytes(idx)
    (tmp_path / "x.bin").write_bytes(bin_)
    for dtype in ("float32", "float64"):
        assert pickle.loads(pickle.dumps(IndexedDataset(tmp_path / "x", dtype=dtype))).dtype == dtype


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "float32", np.float32])
def test_a_dtype_is_asked_for_in_either_byte_order(dtype: object):
    """Files are little-endian; on this machine `>` is the other one."""
    dataset = documents(*mmididx_bytes([np.array([1.5, -2], np.float32)], code=7), dtype=dtype)
    assert (dataset.dtype, dataset[0].tolist()) == (np.dtype("<f4"), [1.5, -2])


# -- errors ------------------------------------------------------------------------------------------------------------


def changed(raw: bytes, offset: int, data: bytes) -> bytes:
    return raw[:offset] + data + raw[offset + len(data) :]


@pytest.mark.parametrize(
    ("content", "kind", "message", "remedy"),
    [
        (b"", DocumentError, "the file is empty", None),
        (BATCHES[:50], DocumentError, "the file has 50 bytes; the header alone has 4,096", "It was cut: copy it again."),
        (changed(BATCHES, 8, b"\2"), UnknownProtocolError, "version is 2; only 1 is known", None),
        (changed(BATCHES, 28, b"\3"), UnknownProtocolError, "dtype is 3; only 0 (uint32) is known", None),
        (changed(BATCHES, 40, b"\7"), DocumentError, "reserved byte 40 is 7; bytes 40 to 4095 must be 0", None),
        (
            changed(BATCHES, 12, bytes(4)), DocumentError, "batch_size is 0; it must be at least 1", None,
        ),
        (
            BATCHES[:-1], CorruptShardError,
            "the file has 12,287 bytes; 2 batches of 4,096 bytes after the header make 12,288", "It was cut: copy it again.",
        ),
        (
            BATCHES + b"\0", CorruptShardError,
            "the file has 12,289 bytes; 2 batches of 4,096 bytes after the header make 12,288",
            "Bytes were appended, or the header belongs to another file: copy it again.",
        ),
    ],
)  # fmt: skip
def test_errors_of_batch_files(content: bytes, kind: type[Exception], message: str, remedy: str | None):
    error = refused(lambda: batches(content))
    assert (type(error), error.message, error.where, error.remedy) == (kind, message, "memory://a/x.batch", remedy)


BOTH = "One of the two files was cut, or belongs to another data set: copy both again."


@pytest.mark.parametrize(
    ("files", "kind", "message", "remedy"),
    [
        ((IDX[:25], BIN), DocumentError, "the index has 25 bytes; its header alone has 26", None),
        ((changed(IDX, 9, b"\2"), BIN), UnknownProtocolError, "version is 2; only 1 is known", None),
        ((changed(IDX, 17, b"\x0b"), BIN), UnknownProtocolError, "dtype code 11 is unknown; 1 to 10 are read", None),
        (
            (IDX[:-1], BIN), DocumentError,
            "the index has 105 bytes; 4 sequences take 106 bytes with 3 entries of doc_idx (110 with modes), or 74 without doc_idx",
            "It was cut, or bytes were appended: copy it again.",
        ),
        ((IDX, BIN[:-2]), CorruptShardError, "the .bin file has 24 bytes; 13 tokens of 2 bytes make 26", BOTH),
        ((IDX, BIN + b"\0"), CorruptShardError, "the .bin file has 27 bytes; 13 tokens of 2 bytes make 26", BOTH),
        (
            (mmididx_bytes(SEQUENCES, pointers=[0, 8, 8, 26], code=8)[0], BIN), CorruptShardError,
            "sequence 3 has 1 tokens at byte 26; .bin has 26 bytes", BOTH,
        ),
        (
            (mmididx_bytes(SEQUENCES, pointers=[8, 8, 16, 0], code=8)[0], bytes(40)), CorruptShardError,
            "the .bin file has 40 bytes, but the last sequence ends at 32", None,
        ),
        (
            (mmididx_bytes(SEQUENCES, pointers=[2, 8, 8, 24], code=8)[0], BIN), DocumentError,
            "sequences 0 and 2 overlap: they begin at bytes 2 and 8", None,
        ),
        (
            (mmididx_bytes(SEQUENCES, pointers=[0, 4, 4, 12], code=8)[0], BIN), DocumentError,
            "pointers count tokens (pointers[1] is 4); they must count bytes", None,
        ),
        (
            (mmididx_bytes([np.zeros(0, np.float32)], code=6)), DocumentError,
            "dtype code 6 means float64 to some tools and float32 to others, and 0 tokens in a .bin of 0 bytes do not decide",
            "From Python, open it with dtype='float64' or dtype='float32'.",
        ),
    ],
)  # fmt: skip
def test_errors_of_indices(files: tuple[bytes, bytes], kind: type[Exception], message: str, remedy: str | None):
    error = refused(lambda: documents(*files))
    assert (type(error), error.message, error.where, error.remedy) == (kind, message, "memory://a/x.idx", remedy)


def test_a_missing_half_says_where_and_what_to_do():
    error = refused(lambda: IndexedDataset("a/x.idx", transport=MemoryTransport({"a/x.idx": IDX})))
    assert (type(error), error.message) == (NotFoundError, "the .bin file is missing")
    assert (error.where, error.remedy) == ("memory://a/x.bin", "Copy it beside the .idx file.")


@pytest.mark.parametrize(
    ("call", "kind", "where", "message"),
    [
        (lambda: documents().get(0, 2, 3), SelectionError, "offset", "tokens 2 to 5 of sequence 0 do not exist; it has 4"),
        (lambda: documents().document(1, 0, 10), SelectionError, "start", "tokens 0 to 10 of document 1 do not exist; it has 9"),
        (lambda: documents().sequences_of(2), SelectionError, "document", "document 2 does not exist; it must be from 0 to 1"),
        (lambda: batches().read_batch(2), SelectionError, "batch", "batch 2 does not exist; it must be from 0 to 1"),
        (lambda: batches()[4], SelectionError, "record", "record 4 does not exist; it must be from 0 to 3"),
        (lambda: documents(dtype="int32"), ArgumentError, "dtype", "dtype code 8 can mean uint16, not int32"),
        (lambda: documents(dtype="complex64"), ArgumentError, "dtype", "complex64 has no code in this format: float32, float64, int16, int32, int64, int8, uint16, uint32, uint64, uint8 do"),
        (lambda: BatchNativeLoader(batches(), output="list"), ArgumentError, "output", "output is 'list'; it must be 'torch' or 'numpy'"),
        (lambda: BatchNativeLoader(batches()).set_epoch(-1), ArgumentError, "epoch", "epoch is -1"),
        (lambda: BatchNativeLoader(batches(), rank=2, world_size=2), ArgumentError, "rank", "rank is 2; it must be an integer from 0 to 1"),
        (lambda: BatchNativeLoader(batches(), seed=2**64), ArgumentError, "seed", "it must be an integer from 0 to 18446744073709551615"),
        (lambda: write_batch_file("x.bat", np.zeros((2, 2), int), 1, transport=MemoryTransport()), ArgumentError, "output_path", "'x.bat' does not end in .batch"),
        (lambda: write_batch_file("x.batch", np.zeros((2, 2), int), 1, 3, transport=MemoryTransport()), ArgumentError, "seq_len", "seq_len is 3, but records have 2 tokens"),
        (lambda: write_batch_file("x.batch", np.zeros(2, int), 1, transport=MemoryTransport()), ArgumentError, "tokens_array", "the shape is (2,); it must be (records, seq_len)"),
        (lambda: write_batch_file("x.batch", np.zeros((2, 2)), 1, transport=MemoryTransport()), ArgumentError, "tokens", "token ids are float64; they must be integers"),
        (lambda: write_batch_dataset("x.batch", [[1, 2]], 2, 1, 2, transport=MemoryTransport()), ArgumentError, "total_records", "1 records came, 2 were announced"),
        (lambda: write_batch_dataset("x.batch", [[1, 2, 3]], 2, 1, 2, transport=MemoryTransport()), ArgumentError, "tokens_iter", "a record of shape (3,) came; it must be (2,), or several in a two-dimensional array"),
        (lambda: build_indices(np.array([5]), np.arange(1), seq_length=2, num_samples=2**48), ArgumentError, "num_samples", "which is beyond reason"),
        (lambda: build_indices(np.array([5]), np.arange(1), seq_length=2, separate_below=-0.1), ArgumentError, "separate_below", "separate_below is -0.1; it must be from 0 to 1"),
        (lambda: documents_to_batches(documents(*mmididx_bytes([np.zeros(4, np.float32)])), "x.batch", seq_len=2, batch_size=1), ArgumentError, "source", "the documents are of float32; token ids are integers"),
        (lambda: samples_to_documents(documents(), "y", end_token=-1, transport=MemoryTransport()), ArgumentError, "end_token", "end_token is -1"),
        (lambda: samples_to_documents(documents(), "y", lambda text: [1], transport=MemoryTransport()), ArgumentError, "tokenizer", "a tokenizer is for texts; samples of format mmididx are not"),
    ],
)  # fmt: skip
def test_errors_of_arguments(call: Callable[[], object], kind: type[Exception], where: str, message: str):
    error = refused(call)
    assert (type(error), error.where) == (kind, where)
    assert message in error.message


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_is_below_the_number_of_ranks(rank: int):
    loader = BatchNativeLoader(batches(), output="numpy", rank=rank, world_size=3)
    assert loader.order().tolist() == []
    whole = BatchNativeLoader(batches(), 1, output="numpy", seed=5)
    assert whole.order().tolist() == [int(batch[0, 0]) // 6 for batch in whole]
    half = BatchNativeLoader(batches(), 1, output="numpy", seed=5, rank=rank % 2, world_size=2)
    half.set_epoch(0)
    assert (
        half.order().tolist()
        == BatchNativeLoader(batches(), 1, output="numpy", seed=5).order()[rank % 2 :][:1].tolist()
    )


@pytest.mark.parametrize("name", ["version", "order", "digest", "num_batches", "batch_size", "seq_len", "drop_last"])
def test_a_state_names_what_is_other_there(name: str):
    loader = BatchNativeLoader(batches(), output="numpy")
    error = refused(lambda: loader.load_state_dict({**loader.state_dict(), name: "odd"}))
    assert (type(error), error.where) == (ResumeError, "state")
    assert error.message.startswith(f"{name} is 'odd' in the state, but ")
    error = refused(lambda: loader.load_state_dict({**loader.state_dict(), "position": 3}))
    assert error.message == "position is 3; it must be from 0 to 2"


def test_a_description_of_chosen_documents_says_what_to_do():
    samples = TokenSamples(documents(), 3, documents=[3, 0])
    error = refused(lambda: from_description(documents(), samples.describe()["samples"]))
    assert (type(error), error.where) == (DocumentError, "description")
    assert error.remedy == "Make TokenSamples with documents= as then."


@pytest.mark.parametrize(
    ("name", "value"),
    [("separate_below", "a"), ("separate_below", None), ("separate_below", 2), ("seed", None), ("seq_length", "3"), ("num_samples", [1])],
)  # fmt: skip
def test_settings_of_samples_that_are_none_are_faults_of_the_description(name: str, value: object):
    settings = TokenSamples(documents(), 3).describe()["samples"]
    assert len(from_description(documents(), settings)) == 4
    error = refused(lambda: from_description(documents(), {**settings, name: value}))
    assert (type(error), error.where) == (DocumentError, "description")


# -- writing -----------------------------------------------------------------------------------------------------------


def test_a_data_set_that_was_replaced_leaves_no_lock(tmp_path: Path):
    for token in (1, 2):
        with IndexedDatasetBuilder(tmp_path / "d" / "x", overwrite=True) as builder:
            builder.add_document([token])
        assert sorted(path.name for path in (tmp_path / "d").iterdir()) == ["x.bin", "x.idx"]
    assert IndexedDataset(tmp_path / "d" / "x")[0].tolist() == [2]


def test_conversions_replace_files_where_they_may():
    memory = MemoryTransport()
    options = {"seq_len": 2, "batch_size": 1, "transport": memory, "progress": False}
    assert documents_to_batches(documents(), "y.batch", **options) == 6
    before = memory.files
    error = refused(lambda: documents_to_batches(documents(), "y.batch", **options))
    assert (error.message, error.remedy) == ("a file of that name exists already", "Pass overwrite=True.")
    assert memory.files == before
    assert documents_to_batches(documents(), "y.batch", seed=4, overwrite=True, **options) == 6
    written = BatchFileReader("y.batch", transport=memory)
    run = np.concatenate(SEQUENCES)[:12].reshape(6, 2)
    assert written.rows(slice(None)).tolist() == run[RecordOrder(6, 4).records(np.arange(6))].tolist()
    samples_to_documents(documents(), "z", transport=memory, progress=False)
    assert refused(lambda: samples_to_documents(documents(), "z", transport=memory)).where == "memory://z.idx"
