"""What we write as LLMBATCH is byte for byte what the text says, shuffled by our order, whole or not there at all."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import resource
import tracemalloc
from collections.abc import Generator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servers import s3_bucket  # noqa: F401 (a fixture)
from token_files import llmbatch_bytes

from saev_store.errors import ArgumentError, NotFoundError, ReadOnlyError, StoreExistsError, TransportError
from saev_store.sources import _new_file
from saev_store.sources._new_file import NewFile
from saev_store.sources.llmbatch import BatchFileReader, write_batch_dataset, write_batch_file
from saev_store.sources.llmbatch.order import RecordOrder
from saev_store.transport import MemoryTransport, open_transport


def tokens(n, seq_len, seed=0):
    return np.random.default_rng(seed).integers(0, 2**32, (n, seq_len), dtype=np.uint64).astype(np.uint32)


def expected(records, batch_size, seed):
    """The file, from the order and the oracle."""
    n_batches = len(records) // batch_size
    places = np.arange(n_batches * batch_size)
    shuffled = records[RecordOrder(len(records), seed).records(places)] if len(places) else records[:0]
    batches = shuffled.reshape(n_batches, batch_size, records.shape[1])
    return llmbatch_bytes(batches, seed=seed, total=len(records))


@given(n=st.integers(0, 60), batch_size=st.integers(1, 9), seq_len=st.integers(1, 1100), seed=st.integers(0, 2**32 - 1))
def test_array_and_stream_write_the_same_bytes(n, batch_size, seq_len, seed):
    records, memory = tokens(n, seq_len), MemoryTransport()
    truth = expected(records, batch_size, seed)
    assert write_batch_file("a.batch", records, batch_size, seed=seed, transport=memory) == n // batch_size
    write_batch_dataset("b.batch", iter(records), n, batch_size, seq_len, seed, transport=memory)
    halves = [records[: n // 2], records[n // 2 :]]
    write_batch_dataset("d.batch", halves, n, batch_size, seq_len, seed, transport=memory)
    assert [memory.files[name] == truth for name in ("a.batch", "b.batch", "d.batch")] == [True] * 3
    reader = BatchFileReader("b.batch", transport=memory)
    numbers = RecordOrder(n, seed).records(np.arange(len(reader)))
    assert len(set(numbers.tolist())) == len(reader)
    np.testing.assert_array_equal(reader.rows(slice(None)), records[numbers])


@pytest.mark.parametrize("engine", ["mmap", "pread", "fsspec"])
def test_files_on_disk(tmp_path, engine):
    records = tokens(25, 40)
    path = tmp_path / "new" / "x.batch"
    write_batch_file(path, records, 4, 40, 9, engine=engine)
    assert path.read_bytes() == expected(records, 4, 9)
    assert sorted(file.name for file in path.parent.iterdir()) == ["x.batch"]
    with pytest.raises(StoreExistsError, match="overwrite"):
        write_batch_file(path, records, 4, engine=engine)
    reader = BatchFileReader(path, engine=engine)
    write_batch_file(path, records[:8], 4, 40, 9, engine=engine, overwrite=True)
    assert path.read_bytes() == expected(records[:8], 4, 9)
    del reader


def test_on_s3(s3_bucket):
    records = tokens(25, 40)
    url = f"{s3_bucket.url}/deep/x.batch"
    write_batch_dataset(url, records, 25, 4, 40, 9, storage_options=s3_bucket.options)
    reader = BatchFileReader(url, s3_bucket.options)
    np.testing.assert_array_equal(reader.rows([3, 4]), records[RecordOrder(25, 9).records(np.array([3, 4]))])
    assert reader.validate(deep=True).ok


def test_memory_stays_bounded(tmp_path):
    n, seq_len = 16_000, 512
    stream = (np.full(seq_len, i, np.uint32) for i in range(n))
    tracemalloc.start()
    try:
        write_batch_dataset(tmp_path / "x.batch", stream, n, 8, seq_len)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Pieces of the stream and of the file on their way, 8 MiB and a copy.
    assert n * seq_len * 4 > 30 << 20
    assert peak < 24 << 20
    reader = BatchFileReader(tmp_path / "x.batch")
    assert np.array_equal(np.sort(reader.rows(slice(None))[:, 0]), np.arange(n))


def test_a_batch_larger_than_a_piece(tmp_path):
    records = tokens(5, 1_500_000)
    write_batch_file(tmp_path / "x.batch", records, 2)
    assert (tmp_path / "x.batch").read_bytes() == expected(records, 2, 0)


def test_an_interrupted_writer_leaves_nothing(tmp_path):
    def stream():
        yield np.zeros((5, 8), np.uint32)
        raise RuntimeError("the tokenizer died")

    with pytest.raises(RuntimeError, match="tokenizer"):
        write_batch_dataset(tmp_path / "x.batch", stream(), 10, 2, 8)
    bad = np.zeros((4, 8), np.int64)
    bad[3] = -1
    with pytest.raises(ArgumentError, match="-1"):
        write_batch_file(tmp_path / "x.batch", bad, 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("records", "arguments", "message"),
    [
        (np.zeros((4, 8), np.float32), {}, "integers"),
        (np.zeros(8, np.int32), {}, "shape"),
        (np.zeros((4, 0), np.int32), {}, "shape"),
        (np.full((4, 8), 2**32), {}, "4294967296"),
        (np.zeros((4, 8), np.int32), {"batch_size": 0}, "batch_size"),
        (np.zeros((4, 8), np.int32), {"batch_size": 2.5}, "batch_size"),
        (np.zeros((4, 8), np.int32), {"seq_len": 9}, "seq_len"),
        (np.zeros((4, 8), np.int32), {"seed": -1}, "seed"),
        (np.zeros((4, 8), np.int32), {"seed": 2**32}, "seed"),
    ],
)
def test_wrong_arguments(records, arguments, message):
    memory = MemoryTransport()
    with pytest.raises(ArgumentError, match=message):
        write_batch_file("x.batch", records, **{"batch_size": 2, "transport": memory, **arguments})
    assert memory.files == {}


@pytest.mark.parametrize(
    ("stream", "arguments", "message"),
    [
        ([np.zeros(8, int)] * 3, {"total_records": 4}, "3 records came"),
        ([np.zeros(8, int)] * 5, {"total_records": 4}, "more than the announced"),
        ([np.zeros(8, int), np.zeros(9, int)], {"total_records": 2}, "shape"),
        ([np.zeros((2, 2, 8), int)], {"total_records": 2}, "shape"),
        ([np.zeros((2, 8, 2), int)], {"total_records": 2}, r"shape \(2, 8, 2\)"),
        ([5], {"total_records": 1}, r"shape \(\)"),
        ([[]], {"total_records": 1}, r"shape \(0,\)"),
        ([np.zeros((0, 7), int)], {"total_records": 0}, r"shape \(0, 7\)"),
        ([], {"seq_len": 0, "total_records": 0}, "seq_len"),
        ([np.zeros(8)], {"total_records": 1}, "integers"),
    ],
)
def test_wrong_streams(stream, arguments, message):
    memory = MemoryTransport()
    with pytest.raises(ArgumentError, match=message) as caught:
        write_batch_dataset("x.batch", stream, **{"batch_size": 2, "seq_len": 8, "transport": memory, **arguments})
    where = {"shape": "tokens_iter", "integers": "tokens", "seq_len": "seq_len"}
    assert caught.value.where == where.get(message.partition(" ")[0], "total_records")
    assert memory.files == {}


def test_nothing_is_written_through_a_reader(tmp_path):
    class Reader:
        url, name = "nowhere://", "reader"

        def size(self, path):
            raise NotFoundError("no", where=path)

    with pytest.raises(ReadOnlyError):
        write_batch_file("x.batch", np.zeros((2, 2), int), 1, transport=Reader())


def test_replacing_leaves_what_was_there_if_a_token_is_bad(tmp_path):
    """Whole or not at all: `overwrite` deletes nothing before the new file is complete."""
    path = tmp_path / "x.batch"
    write_batch_file(path, tokens(20, 8), 4)
    before = path.read_bytes()
    bad = np.zeros((20_000, 800), np.int64)
    bad[-1, -1] = -1
    with pytest.raises(ArgumentError, match="-1"):
        write_batch_file(path, bad, 4, overwrite=True)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["x.batch"]
    BatchFileReader(path).rows(slice(None))


@pytest.mark.parametrize("engine", ["mmap", "pread", "fsspec", "memory"])
def test_of_two_writers_one_wins_and_nothing_is_replaced(tmp_path, engine):
    """Both find the name free and write; the one that publishes second is refused, and the first one's data stay."""
    memory = MemoryTransport()
    place = {"transport": memory} if engine == "memory" else {"engine": engine}
    path = "x.batch" if engine == "memory" else str(tmp_path / "x.batch")
    first, second = tokens(8, 8, seed=1), tokens(8, 8, seed=2)

    def stream():
        yield from second
        write_batch_file(path, first, 2, **place)  # another writer is quicker

    if engine == "memory":
        target = NewFile(memory, "x.batch")
    else:
        target = NewFile(open_transport(tmp_path, engine=engine), "x.batch")
    target.write(b"abc")
    with pytest.raises(StoreExistsError):
        write_batch_dataset(path, stream(), 8, 2, 8, **place)
    with pytest.raises(StoreExistsError):
        target.commit()
    target.abort()
    found = BatchFileReader(path, **place).rows(slice(None))
    np.testing.assert_array_equal(found, first[RecordOrder(8, 0).records(np.arange(8))])
    names = list(memory.files) if engine == "memory" else [file.name for file in tmp_path.iterdir()]
    assert names == ["x.batch"]


@pytest.mark.parametrize("renames", [True, False])
def test_killed_while_publishing_without_hard_links(tmp_path, monkeypatch, renames):
    """The name is free for the next writer, or the error says why it is not."""
    path, made = tmp_path / "x.batch", tokens(8, 8, seed=1)

    class Killed(BaseException):
        pass

    def no_links(*_):
        raise PermissionError(errno.EPERM, "no links here")

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", no_links)
        for name in ("unlink", "replace"):
            patch.setattr(os, name, killed)
        if not renames:
            patch.setattr(_new_file, "rename_exclusive", lambda old, new: False)
        with pytest.raises(Killed):
            write_batch_file(path, made, 2)
    if renames:
        np.testing.assert_array_equal(
            BatchFileReader(path).rows(slice(None)), made[RecordOrder(8, 0).records(np.arange(8))]
        )
        return
    with pytest.raises(StoreExistsError, match="an empty file of that name"):
        write_batch_file(path, made, 2)
    write_batch_file(path, made, 2, overwrite=True)
    assert len(BatchFileReader(path)) == 8


def test_the_order_of_records_is_pinned():
    """A change here makes the same records and seed give other bytes than before."""
    assert RecordOrder(10, 7).records(np.arange(10)).tolist() == [6, 0, 7, 2, 9, 1, 4, 8, 3, 5]
    assert RecordOrder(10**6, 7).records(np.arange(5)).tolist() == [984289, 982701, 490136, 247424, 923836]
    large = RecordOrder(10**9, 0)
    picks = np.random.default_rng(0).integers(0, 10**9, 1000)
    np.testing.assert_array_equal(large.places(large.records(picks)), picks)


@contextlib.contextmanager
def files_up_to(nbytes: int) -> Generator[None]:
    """A block in which files of this process grow to so many bytes and no further."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("nbytes", [0, 100])
def test_a_temporary_folder_that_is_full_is_told_by_our_error(tmp_path, nbytes):
    with files_up_to(nbytes), pytest.raises(TransportError, match=r"could not collect records: .*\(EFBIG\)"):
        write_batch_dataset(tmp_path / "x.batch", iter(np.zeros((50, 8), np.uint32)), 50, 2, 8, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_folder_whose_files_cannot_be_mapped_is_told_by_our_error(tmp_path, monkeypatch):
    def failing(*_: object, **__: object):
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    monkeypatch.setattr(np, "memmap", failing)
    with pytest.raises(TransportError, match=r"could not map the records: .*\(ENODEV\)"):
        write_batch_dataset(tmp_path / "x.batch", iter(np.zeros((5, 8), np.uint32)), 5, 2, 8, progress=False)


def test_a_collected_file_that_cannot_be_read_again_is_told_by_our_error():
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    memory = MemoryTransport()
    with (
        pytest.raises(TransportError, match=r"could not read: .*\(EIO\)") as told,
        NewFile(memory, "x.bin") as file,
    ):
        # A disk that fails here.
        file._publish = lambda _, publish=file._publish: publish(Failing(b"x" * 10))
        file.commit()
    assert told.value.where == file.temporary
    assert not os.path.exists(file.temporary)
    assert memory.list() == []
