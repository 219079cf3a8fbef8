"""What the builder writes is byte for byte what the format says; both files appear together, or none."""

from __future__ import annotations

import errno
import itertools
import tempfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servers import s3_bucket  # noqa: F401 (a fixture)
from token_files import CODES, mmididx_bytes

from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    ReadOnlyError,
    StoreExistsError,
    TransportError,
    WriterConflictError,
)
from saev_store.sources._new_file import NewFile
from saev_store.sources.llmbatch import write_batch_dataset
from saev_store.sources.mmididx import IndexedDataset, IndexedDatasetBuilder
from saev_store.transport import MemoryTransport, MmapTransport, open_transport
from saev_store.transport.local.write import TEMP_PREFIX


@given(
    sizes=st.lists(st.lists(st.integers(0, 40), max_size=4), max_size=6),
    dtype=st.sampled_from(sorted(CODES)),
    modes=st.booleans(),
)
def test_the_builder_writes_the_bytes_of_the_format(sizes, dtype, modes):
    rng = np.random.default_rng(1)
    memory = MemoryTransport()
    documents = [
        [rng.integers(0, 256, size * np.dtype(dtype).itemsize, dtype=np.uint8).view(dtype) for size in document]
        for document in sizes
    ]
    flat = [sequence for document in documents for sequence in document]
    doc_idx = [0, *np.cumsum([len(document) for document in documents]).tolist()]
    marks = [i % 256 - 128 for i in range(len(flat))] if modes else None
    with IndexedDatasetBuilder("a", dtype, multimodal=modes, transport=memory) as builder:
        at = 0
        for number, document in enumerate(documents):
            mine = None if marks is None else marks[at : at + len(document)]
            at += len(document)
            if number % 2:
                joined = np.concatenate([np.zeros(0, dtype), *document])
                builder.add_document(joined, [len(sequence) for sequence in document], mine)
            else:
                for i, sequence in enumerate(document):
                    builder.add_sequence(sequence, *([] if mine is None else [mine[i]]))
                builder.end_document()
    idx, bin_ = mmididx_bytes(flat, doc_idx=doc_idx, modes=marks, code=CODES[dtype])
    assert memory.files == {"a.idx": idx, "a.bin": bin_}
    if flat:
        dataset = IndexedDataset("a", transport=memory, dtype=dtype)
        assert [sequence.tobytes() for sequence in dataset.rows(slice(None))] == [each.tobytes() for each in flat]


@given(
    first=st.lists(st.integers(0, 9), max_size=5), second=st.lists(st.integers(0, 9), max_size=5), modes=st.booleans()
)
def test_merged_data_sets_are_one_after_the_other(first, second, modes):
    memory, sequences = MemoryTransport(), []
    for name, sizes in (("a", first), ("b", second)):
        with IndexedDatasetBuilder(name, np.uint16, multimodal=modes, transport=memory) as builder:
            for size in sizes:
                sequences.append(np.arange(size, dtype=np.uint16) + len(sequences))
                builder.add_document(sequences[-1], modes=[size] if modes else None)
    with IndexedDatasetBuilder("c", np.uint16, multimodal=modes, transport=memory) as builder:
        for name in "ab":
            builder.merge(IndexedDataset(name, transport=memory))
    idx, bin_ = mmididx_bytes(
        sequences, modes=[*first, *second] if modes else None, code=8, doc_idx=list(range(len(sequences) + 1))
    )
    assert (memory.files["c.idx"], memory.files["c.bin"]) == (idx, bin_)


def test_merged_documents_of_several_sequences_keep_theirs():
    memory = MemoryTransport()
    for name, documents in (("a", [[[1], [2, 3]], [[4], [5], [6]]]), ("b", [[[7], [8]], [], [[9]]])):
        with IndexedDatasetBuilder(name, transport=memory) as builder:
            for document in documents:
                builder.add_document([*itertools.chain(*document)], [len(sequence) for sequence in document])
    with IndexedDatasetBuilder("c", transport=memory) as builder:
        builder.add_document([10, 11], [1, 1])
        for name in "ab":
            builder.merge(IndexedDataset(name, transport=memory))
    merged = IndexedDataset("c", transport=memory)
    assert merged.doc_idx.tolist() == [0, 2, 4, 7, 9, 9, 10]
    assert [merged.document(i).tolist() for i in range(6)] == [[10, 11], [1, 2, 3], [4, 5, 6], [7, 8], [], [9]]


def test_merging_what_is_not_packed():
    idx, _ = mmididx_bytes([np.zeros(2, np.int32), np.zeros(3, np.int32)], pointers=[16, 0])
    memory = MemoryTransport({"a.idx": idx, "a.bin": np.arange(6, dtype=np.int32).tobytes()})
    with IndexedDatasetBuilder("b", transport=memory) as builder:
        builder.merge(IndexedDataset("a", transport=memory))
    merged = IndexedDataset("b", transport=memory)
    assert [sequence.tolist() for sequence in merged.rows([0, 1])] == [[4, 5], [0, 1, 2]]
    assert merged.problems == ()


def test_merging_after_an_open_document():
    memory = MemoryTransport(dict(zip(("a.idx", "a.bin"), mmididx_bytes([np.arange(2, dtype=np.int32)]), strict=True)))
    with IndexedDatasetBuilder("b", transport=memory) as builder:
        builder.add_sequence([7])
        builder.merge(IndexedDataset("a", transport=memory))
    assert [IndexedDataset("b", transport=memory).document(i).tolist() for i in range(2)] == [[7], [0, 1]]


def test_a_merge_that_fails_abandons_the_data_set(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "a") as builder:
        builder.add_document(range(100))
    other = IndexedDataset(tmp_path / "a", engine="pread")
    other.close()
    (tmp_path / "a.bin").write_bytes(b"")
    builder = IndexedDatasetBuilder(tmp_path / "b")
    builder.add_document([1])
    with pytest.raises(CorruptShardError):
        builder.merge(other)
    with pytest.raises(ArgumentError, match="abandoned"):
        builder.finalize()
    assert {path.name for path in tmp_path.iterdir()} == {"a.idx", "a.bin"}


@pytest.mark.parametrize("engine", ["mmap", "pread", "fsspec"])
def test_on_disk(tmp_path, engine):
    path = tmp_path / "new" / "x"
    with IndexedDatasetBuilder(f"{path}.idx", "uint16", engine=engine) as builder:
        builder.add_document(range(65_536))
        assert list(path.parent.glob("x*")) == []
    assert sorted(file.name for file in path.parent.iterdir()) == ["x.bin", "x.idx"]
    with pytest.raises(StoreExistsError):
        IndexedDatasetBuilder(path, engine=engine)
    reader = IndexedDataset(path, engine=engine)
    assert reader[0].tolist() == list(range(65_536))
    if engine == "fsspec":  # has neither locks nor renames
        with pytest.raises(StoreExistsError, match="cannot replace two files together"):
            IndexedDatasetBuilder(path, overwrite=True, engine=engine)
        return
    with IndexedDatasetBuilder(path, "int64", overwrite=True, engine=engine) as builder:
        builder.add_document([2**40])
    assert IndexedDataset(path, engine=engine)[0].tolist() == [2**40]


def test_on_s3(s3_bucket):
    url = f"{s3_bucket.url}/deep/x.idx"
    with IndexedDatasetBuilder(url, "uint16", storage_options=s3_bucket.options) as builder:
        builder.add_document([1, 2, 3])
    assert IndexedDataset(url, s3_bucket.options)[0].tolist() == [1, 2, 3]
    # Two writers that replace the pair at once could leave the tokens of one and the index of the other.
    bucket = open_transport(f"{s3_bucket.url}/deep", s3_bucket.options)
    for left in ("x.idx", "x.bin"):  # also where a writer that was killed has left one of the two
        (other,) = {"x.idx", "x.bin"} - {left}
        content = bucket.read(other)
        bucket.delete(other)
        with pytest.raises(StoreExistsError, match="Delete both files first") as refused:
            IndexedDatasetBuilder(url, "uint16", overwrite=True, storage_options=s3_bucket.options)
        assert refused.value.where == f"{s3_bucket.url}/deep/{left}"
        bucket.put(other, content)
    with pytest.raises(StoreExistsError, match="Delete both files first"):
        IndexedDatasetBuilder(url, "uint16", overwrite=True, storage_options=s3_bucket.options)


def test_what_was_not_finished_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), IndexedDatasetBuilder(tmp_path / "x") as builder:
        builder.add_document(range(1_000_000))
        raise RuntimeError
    builder = IndexedDatasetBuilder(tmp_path / "x")
    builder.add_document([1])
    builder.abort()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ArgumentError, match="abandoned"):
        builder.add_document([1])
    with pytest.raises(ArgumentError, match="abandoned"):
        builder.finalize()


def test_the_callers_memory_may_be_used_again():
    memory, tokens = MemoryTransport(), np.zeros(3, np.int32)
    with IndexedDatasetBuilder("x", transport=memory) as builder:
        for i in range(3):
            tokens[:] = i
            builder.add_document(tokens)
    assert IndexedDataset("x", transport=memory).document(2).tolist() == [2, 2, 2]


def test_what_does_not_fit_is_refused_and_nothing_of_it_kept():
    memory = MemoryTransport()
    with IndexedDatasetBuilder("x", "uint16", transport=memory) as builder:
        for tokens in ([65_536], [-1], [1.5], [[1]], ["a"], [2**70], 3, [None]):
            with pytest.raises(ArgumentError):
                builder.add_document(tokens)
        for lengths, modes in (([1], None), ([3, -1], None), ([1, 1], [0]), ([2], [1])):
            with pytest.raises(ArgumentError):
                builder.add_document([1, 2], lengths, modes)
        with pytest.raises(ArgumentError):
            builder.add_sequence([1], mode=1)
        builder.add_document([65_535])
    assert IndexedDataset("x", transport=memory).rows(slice(None))[0].tolist() == [65_535]
    with IndexedDatasetBuilder("f", "float32", transport=memory) as builder:
        for tokens in ([1e300], [0.0, -3.5e38], [float("inf"), 1e39], [10**40 + 0.5]):
            with pytest.raises(ArgumentError, match="beyond the largest number of float32"):
                builder.add_document(tokens)
        builder.add_document([3.4e38, float("-inf"), float("nan")])
    assert str(IndexedDataset("f", transport=memory).document(0).tolist()) == "[3.3999999521443642e+38, -inf, nan]"
    with (
        pytest.raises(ArgumentError, match="mode is 128"),
        IndexedDatasetBuilder("y", multimodal=True, transport=memory) as builder,
    ):
        builder.add_sequence([1], mode=128)
    for dtype in ("complex64", "S3", object, "nothing"):
        with pytest.raises(ArgumentError):
            IndexedDatasetBuilder("z", dtype, transport=memory)
    assert set(memory.files) == {"f.idx", "f.bin", "x.idx", "x.bin"}


@pytest.mark.parametrize(("dtype", "most"), [("float32", 2**24), ("float64", 2**53)])
@pytest.mark.parametrize("given_as", ["int64", "uint64"])
def test_integers_that_no_float_holds_exactly_are_refused(dtype, most, given_as):
    """They were rounded to the next float: another token."""
    memory = MemoryTransport()
    tokens = np.array([0, most - 1, most], given_as)
    if given_as == "int64":
        tokens = np.concatenate((tokens, -tokens))
    with IndexedDatasetBuilder("x", dtype, transport=memory) as builder:
        builder.add_document(tokens)
        for wrong in [[most + 1], [0, most + 3], [2**63 - 1]] + ([[-most - 1]] if given_as == "int64" else []):
            with pytest.raises(ArgumentError, match=f"{dtype} holds every integer from -{most} to {most}") as caught:
                builder.add_document(np.array(wrong, given_as))
            assert caught.value.where == "tokens"
    found = IndexedDataset("x", transport=memory)
    assert [each.tolist() for each in found] == [tokens.tolist()]


def test_merging_needs_the_same_kind():
    memory = MemoryTransport()
    for name, dtype, modes in (("a", "uint16", False), ("b", "int32", False), ("c", "uint16", True)):
        with IndexedDatasetBuilder(name, dtype, multimodal=modes, transport=memory) as builder:
            builder.add_document([1])
    builder = IndexedDatasetBuilder("d", "uint16", transport=memory)
    for name in "bc":
        with pytest.raises(ArgumentError):
            builder.merge(IndexedDataset(name, transport=memory))
    builder.abort()


def test_an_unended_document_is_ended():
    memory = MemoryTransport()
    with IndexedDatasetBuilder("x", transport=memory) as builder:
        builder.add_sequence([1])
        builder.add_sequence([])
    assert IndexedDataset("x", transport=memory).doc_idx.tolist() == [0, 2]
    assert "2 sequences" in repr(builder)


@given(
    values=st.lists(st.integers(-(2**63), 2**64 - 1) | st.integers(-300, 70_000), min_size=1, max_size=5),
    given_as=st.sampled_from(["i1", "u1", "i2", "u2", ">i4", "u4", "i8", "u8"]),
    dtype=st.sampled_from([name for name in sorted(CODES) if np.dtype(name).kind in "iu"]),
)
def test_integers_of_any_type_are_held_exactly_or_refused(values, given_as, dtype):
    tokens = np.array(
        [value for value in values if np.iinfo(given_as).min <= value <= np.iinfo(given_as).max], given_as
    )
    fits = all(np.iinfo(dtype).min <= value <= np.iinfo(dtype).max for value in tokens.tolist())
    memory = MemoryTransport()
    with IndexedDatasetBuilder("a", dtype, transport=memory) as builder:
        builder.add_document([1])
        if fits:
            builder.add_document(tokens)
        else:
            with pytest.raises(ArgumentError, match="tokens reach from"):
                builder.add_document(tokens)
    found = IndexedDataset("a", transport=memory, dtype=dtype).rows(slice(None))
    assert [each.tolist() for each in found] == [[1], tokens.tolist()] if fits else [[1]]


@pytest.mark.parametrize("engine", ["pread", "fsspec"])
def test_the_callers_memory_is_its_own_again(tmp_path, engine):
    """Documents shorter, as long as, and longer than what is collected before a write."""
    sizes, mine = [7, 2**18 - 7, 1, 2**18, 0, 2**18 + 1, 3], np.empty(2**18 + 1, np.int32)
    with IndexedDatasetBuilder(tmp_path / "x", np.int32, engine=engine) as builder:
        for i, size in enumerate(sizes):
            mine[:size] = np.arange(size) + i
            builder.add_document(mine[:size])
            mine[:] = -1
    found = IndexedDataset(tmp_path / "x").rows(slice(None))
    assert all(
        np.array_equal(each, np.arange(size) + i) for i, (size, each) in enumerate(zip(sizes, found, strict=True))
    )


@pytest.mark.parametrize("engine", ["mmap", "pread", "fsspec", "memory"])
def test_of_two_builders_the_second_is_refused_and_leaves_the_first_as_it_is(tmp_path, engine):
    """Both found the name free; neither file of the one that is published first is replaced by the other's."""
    memory = MemoryTransport()
    place = {"transport": memory} if engine == "memory" else {"engine": engine}
    path = "x" if engine == "memory" else str(tmp_path / "x")
    first, second = (IndexedDatasetBuilder(path, **place) for _ in range(2))
    first.add_document([1, 2, 3])
    second.add_document([7, 8, 9])
    first.finalize()
    with pytest.raises(StoreExistsError):
        second.finalize()
    assert IndexedDataset(path, **place)[0].tolist() == [1, 2, 3]
    names = list(memory.files) if engine == "memory" else [file.name for file in tmp_path.iterdir()]
    assert sorted(names) == ["x.bin", "x.idx"]


def test_tokens_whose_index_could_not_be_published_do_not_stay(tmp_path, monkeypatch):
    builder = IndexedDatasetBuilder(tmp_path / "x")
    builder.add_document([1, 2, 3])
    commit = NewFile.commit

    def taken(self):
        if self.path == "x.idx":
            (tmp_path / "x.idx").write_bytes(b"another program's")
        commit(self)

    monkeypatch.setattr(NewFile, "commit", taken)
    with pytest.raises(StoreExistsError):
        builder.finalize()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"x.idx": b"another program's"}


def test_tokens_that_have_replaced_others_stay_where_their_index_could_not_be_published(tmp_path, monkeypatch):
    """The others are gone by then."""
    for dtype, name in (("uint8", "x"), ("uint8", "y")):
        with IndexedDatasetBuilder(tmp_path / name, dtype) as builder:
            builder.add_document([1, 2] if name == "x" else [7, 8, 9])
    commit = NewFile.commit

    def failing(self):
        if self.path == "x.idx":
            raise OSError(28, "no space left")
        commit(self)

    builder = IndexedDatasetBuilder(tmp_path / "x", "uint8", overwrite=True)
    builder.add_document([7, 8, 9])
    with monkeypatch.context() as patched, pytest.raises(OSError, match="no space left"):
        patched.setattr(NewFile, "commit", failing)
        builder.finalize()
    assert (tmp_path / "x.bin").read_bytes() == (tmp_path / "y.bin").read_bytes() == bytes([7, 8, 9])
    assert not (tmp_path / "x.idx").exists()
    with IndexedDatasetBuilder(tmp_path / "x", "uint8", overwrite=True) as builder:
        builder.add_document([5])
    assert IndexedDataset(tmp_path / "x")[0].tolist() == [5]


def test_two_that_replace_do_it_one_after_the_other(tmp_path):
    for token in (1, 2):
        with IndexedDatasetBuilder(tmp_path / "x", overwrite=True) as builder:
            builder.add_document([token])
    waiting = IndexedDatasetBuilder(tmp_path / "x", overwrite=True)
    waiting.add_document([3])
    lock = f"{TEMP_PREFIX}x.idx.lock"
    with open_transport(tmp_path).lock(lock), pytest.raises(WriterConflictError):
        waiting.finalize()
    assert IndexedDataset(tmp_path / "x")[0].tolist() == [2]
    assert sorted(file.name for file in tmp_path.iterdir() if file.name != lock) == ["x.bin", "x.idx"]


@pytest.mark.parametrize("failing", range(4))
def test_a_document_is_not_added_again_after_a_failed_write(tmp_path, failing, monkeypatch):
    """Some of its sequences are there already, and a piece of one may be: nothing of them is published."""
    document, lengths = np.arange(60_000, dtype=np.uint16), [20_000, 20_000, 20_000]
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        builder.add_document(document, lengths)
        file = builder._bin._file

        class Failing:
            """The file, of which one write puts down a part and then finds the disk full."""

            n = 0

            def __getattr__(self, name):
                return getattr(file, name)

            def write(self, data):
                self.n += 1
                if self.n == failing + 1:
                    file.write(data[: len(data) // 2])
                    raise OSError(errno.ENOSPC, "no space left on device")
                return file.write(data)

        builder._bin._file = Failing()
        if failing == 3:  # all writes succeed
            builder.add_document(document, lengths)
        else:
            with pytest.raises(TransportError, match="from its start: nothing of it was kept"):
                builder.add_document(document, lengths)
            with pytest.raises(ReadOnlyError, match="complete or abandoned"):
                builder.add_document(document, lengths)
            with pytest.raises(ReadOnlyError):
                builder.finalize()
            assert not list(tmp_path.iterdir())
            return
    assert [sequence.tolist() for sequence in IndexedDataset(tmp_path / "x")] == [
        document[at : at + 20_000].tolist() for at in (0, 20_000, 40_000) * 2
    ]


def test_a_builder_that_replaces_and_one_that_must_not_take_turns(tmp_path, monkeypatch):
    """Otherwise the tokens of one got the index of the other, or went with its failure."""
    replacing, other = IndexedDatasetBuilder(tmp_path / "x", overwrite=True), IndexedDatasetBuilder(tmp_path / "x")
    replacing.add_document([1, 2, 3])
    other.add_document([7, 8, 9])
    commit, refused = NewFile.commit, []

    def both(self):
        commit(self)
        if not refused:
            refused.append(True)
            with pytest.raises(WriterConflictError):
                replacing.finalize()

    monkeypatch.setattr(NewFile, "commit", both)
    other.finalize()
    assert refused
    assert IndexedDataset(tmp_path / "x")[0].tolist() == [7, 8, 9]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.bin", "x.idx"]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_hidden_name_that_could_not_be_deleted_leaves_no_half_of_a_data_set(tmp_path, monkeypatch, number):
    """A file has its name by then: it loses it again, so that the same call may be repeated. A lock that stays does no harm."""
    builder, deleted, plainly = IndexedDatasetBuilder(tmp_path / "x"), [], MmapTransport.delete

    def delete(self, path):
        if TEMP_PREFIX in path:
            deleted.append(path)
            if len(deleted) == number + 1:
                raise TransportError("could not delete: EIO", where=path)
        plainly(self, path)

    builder.add_document([1, 2, 3])
    with monkeypatch.context() as changed:
        changed.setattr(MmapTransport, "delete", delete)
        if number == 2:
            assert not builder.finalize()
        else:
            with pytest.raises(TransportError):
                builder.finalize()
    assert len(deleted) > number
    left = sorted(file.name for file in tmp_path.iterdir() if not file.name.startswith(TEMP_PREFIX))
    assert left == (["x.bin", "x.idx"] if number == 2 else [])
    if number < 2:
        with IndexedDatasetBuilder(tmp_path / "x") as again:
            again.add_document([1, 2, 3])
    assert IndexedDataset(tmp_path / "x")[0].tolist() == [1, 2, 3]


def test_without_a_folder_for_temporary_files_nothing_raw_comes_out(monkeypatch):
    """Where all are read-only."""

    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(TransportError, match="no folder for temporary files can be written"):
        IndexedDatasetBuilder("x", transport=MemoryTransport())
    with pytest.raises(TransportError, match="no folder for temporary files can be written"):
        write_batch_dataset("x.batch", iter([np.zeros(5, np.uint32)]), 1, 1, 5, 1, transport=MemoryTransport())
