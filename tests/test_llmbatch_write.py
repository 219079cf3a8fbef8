"""What we write as LLMBATCH is byte for byte what the text says, shuffled by our order, whole or not there at all."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servers import s3_bucket  # noqa: F401 (a fixture)
from token_files import llmbatch_bytes

from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    NotFoundError,
    ReadOnlyError,
    SaevStoreError,
    StoreExistsError,
    UnsafeContentError,
)
from saev_store.formats.llmbatch import BatchFileReader, write_batch_dataset, write_batch_file
from saev_store.formats.llmbatch._buckets import Buckets
from saev_store.formats.llmbatch.manifest import parse_manifest
from saev_store.formats.llmbatch.order import RecordOrder
from saev_store.transport import MemoryTransport


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
    # Hardly any memory: everything passes through buckets on the disk.
    write_batch_dataset("c.batch", iter(records), n, batch_size, seq_len, seed, memory_nbytes=5000, transport=memory)
    write_batch_dataset(
        "d.batch", [records[: n // 2], records[n // 2 :]], None, batch_size, seq_len, seed, transport=memory
    )
    assert [memory.files[name] == truth for name in ("a.batch", "b.batch", "c.batch", "d.batch")] == [True] * 4
    reader = BatchFileReader("c.batch", transport=memory)
    numbers = reader.numbers_of(slice(None))
    assert len(set(numbers.tolist())) == len(reader)
    np.testing.assert_array_equal(reader.records(numbers), records[numbers])
    for number in set(range(n)) - set(numbers.tolist()):
        with pytest.raises(NotFoundError, match="dropped"):
            reader.record(number)


@given(n=st.integers(0, 60), batch_size=st.integers(1, 5), most=st.integers(1, 5))
def test_a_set_holds_the_same_batches(n, batch_size, most):
    records, memory = tokens(n, 30), MemoryTransport()
    write_batch_file("a.batch", records, batch_size, seed=3, transport=memory)
    write_batch_file("s.batch", records, batch_size, seed=3, max_batches_per_file=most, transport=memory)
    one, many = (BatchFileReader(name, transport=memory) for name in ("a.batch", "s.batch"))
    assert len(many.file_names) == max(1, -(-(n // batch_size) // most))
    np.testing.assert_array_equal(one.read_batches(slice(None)), many.read_batches(slice(None)))
    assert [many.read_batch(i).tolist() for i in range(many.num_batches)] == one.read_batches(slice(None)).tolist()
    numbers = many.numbers_of(slice(None))
    np.testing.assert_array_equal(many.records(numbers), records[numbers])
    for name in many.file_names:  # each is a file of its own
        assert BatchFileReader(name, transport=memory).problems == ()
    assert many.validate(deep=True).ok


@pytest.mark.parametrize("first", [None, 1, 3])
@pytest.mark.parametrize("then", [None, 1, 2])
def test_what_was_replaced_is_gone(first, then):
    """A file replaced by a set, a set by a smaller one or by a file: readers find the new data, under every name."""
    store = MemoryTransport()
    old, new = np.zeros((9, 4), np.uint32), np.ones((4, 4), np.uint32)
    write_batch_file("f/x.batch", old, 1, max_batches_per_file=first, transport=store)
    write_batch_file("f/other-00000.batch", old, 1, transport=store)
    if first == 1:  # a stranger's manifest does not make us delete other files
        store.put("f/x.batch.json", store.read("f/x.batch.json").replace(b"x-00008.batch", b"other-00000.batch"))
        store.delete("f/x-00008.batch")
    write_batch_file("f/x.batch", new, 1, max_batches_per_file=then, overwrite=True, transport=store)
    for name in ("f/x.batch", "f/x.batch.json"):
        reader = BatchFileReader(name, transport=store)
        assert reader.has_order
        assert (len(reader), set(reader.rows(slice(None)).ravel().tolist())) == (4, {1})
    files = {None: ["x.batch"], 1: [f"x-{i:05d}.batch" for i in range(4)], 2: ["x-00000.batch", "x-00001.batch"]}[then]
    expected = sorted([*files, "x.batch.json", "other-00000.batch", "other-00000.batch.json"])
    assert sorted(entry.path.removeprefix("f/") for entry in store.list("f")) == expected


@pytest.mark.parametrize("engine", ["mmap", "pread", "fsspec"])
def test_files_on_disk(tmp_path, engine):
    records = tokens(25, 40)
    path = tmp_path / "new" / "x.batch"
    write_batch_file(path, records, 4, 40, 9, engine=engine)
    assert path.read_bytes() == expected(records, 4, 9)
    assert sorted(file.name for file in path.parent.iterdir()) == ["x.batch", "x.batch.json"]
    with pytest.raises(StoreExistsError, match="overwrite"):
        write_batch_file(path, records, 4, engine=engine)
    reader = BatchFileReader(path, engine=engine)
    write_batch_file(path, records[:8], 4, 40, 9, engine=engine, overwrite=True)
    assert path.read_bytes() == expected(records[:8], 4, 9)
    del reader


def test_on_s3(s3_bucket):
    records = tokens(25, 40)
    url = f"{s3_bucket.url}/deep/x.batch"
    write_batch_dataset(
        url, records, 25, 4, 40, 9, memory_nbytes=2000, max_batches_per_file=4, storage_options=s3_bucket.options
    )
    reader = BatchFileReader(url, s3_bucket.options)
    np.testing.assert_array_equal(reader.records([3, 4]), records[[3, 4]])
    assert reader.validate(deep=True).ok


def test_memory_stays_bounded(tmp_path):
    n, seq_len = 16_000, 512
    stream = (np.full(seq_len, i, np.uint32) for i in range(n))
    tracemalloc.start()
    try:
        write_batch_dataset(tmp_path / "x.batch", stream, n, 8, seq_len, memory_nbytes=1 << 20)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # A MiB for shuffling; pieces of the stream and of the file on their way, 8 MiB and a copy.
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
    with pytest.raises(RuntimeError, match="tokenizer"):
        write_batch_dataset(tmp_path / "x.batch", stream(), None, 2, 8)

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
        (np.zeros((4, 8), np.int32), {"max_batches_per_file": 0}, "max_batches_per_file"),
        (np.zeros((4, 8), np.int32), {"max_batches_per_file": 1, "manifest": False}, "manifest"),
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
        ([], {"seq_len": None, "total_records": 0}, "seq_len"),
        ([np.zeros(8)], {"total_records": 1}, "integers"),
        ([], {"memory_nbytes": 0}, "memory_nbytes"),
    ],
)
def test_wrong_streams(stream, arguments, message):
    memory = MemoryTransport()
    with pytest.raises(ArgumentError, match=message):
        write_batch_dataset("x.batch", stream, **{"batch_size": 2, "seq_len": 8, "transport": memory, **arguments})
    assert memory.files == {}


def test_nothing_is_written_through_a_reader(tmp_path):
    class Reader:
        url, name = "nowhere://", "reader"

        def size(self, path):
            raise NotFoundError("no", where=path)

    with pytest.raises(ReadOnlyError):
        write_batch_file("x.batch", np.zeros((2, 2), int), 1, transport=Reader())


def test_a_manifest_of_another_file_is_noticed():
    memory = MemoryTransport()
    write_batch_file("a.batch", tokens(20, 8), 4, transport=memory)
    memory.put("a.batch", llmbatch_bytes(tokens(20, 8, seed=1).reshape(5, 4, 8), total=20))
    reader = BatchFileReader("a.batch", transport=memory)
    with pytest.raises(CorruptShardError, match="manifest"):
        reader.record(0)
    reader.rows(slice(None))  # places need no manifest
    assert [problem.kind for problem in reader.validate(deep=True).problems] == ["digest_mismatch"]


def test_a_set_with_a_missing_file_says_what_is_lost():
    memory = MemoryTransport()
    write_batch_file("a.batch", tokens(24, 8), 4, max_batches_per_file=2, transport=memory)
    memory.delete("a-00001.batch")
    reader = BatchFileReader("a.batch", transport=memory)
    report = reader.validate()
    assert report.lost == ((8, 16),)
    reader.read_batch(0)
    with pytest.raises(SaevStoreError, match="a-00001.batch"):
        reader.read_batch(2)
    memory.put("a-00001.batch", llmbatch_bytes(tokens(4, 8).reshape(1, 4, 8)))
    with pytest.raises(CorruptShardError, match="manifest"):
        BatchFileReader("a.batch", transport=memory).read_batch(2)


def manifest_with(**changes):
    memory = MemoryTransport()
    write_batch_file("a.batch", tokens(20, 8), 4, transport=memory)
    document = json.loads(memory.files["a.batch.json"])
    document.update(changes)
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"format": "else"}, DocumentError),
        ({"manifest_version": 2}, DocumentError),
        ({"record_order": "mersenne"}, DocumentError),
        ({"batch_size": 0}, DocumentError),
        ({"batch_size": True}, DocumentError),
        ({"seq_len": 1 << 40}, DocumentError),
        ({"seed": "1"}, DocumentError),
        ({"total_records": 10**30}, DocumentError),
        ({"total_records": 99}, DocumentError),
        ({"files": []}, DocumentError),
        ({"files": [3]}, DocumentError),
        ({"files": [{"name": "a.batch"}]}, DocumentError),
        (
            {"files": [{"name": "../a.batch", "num_batches": 5, "sampled_digest": "", "full_digest": ""}]},
            UnsafeContentError,
        ),
        (
            {"files": [{"name": "/etc/a.batch", "num_batches": 5, "sampled_digest": "", "full_digest": ""}]},
            UnsafeContentError,
        ),
        (
            {"files": [{"name": "passwd", "num_batches": 5, "sampled_digest": "", "full_digest": ""}]},
            UnsafeContentError,
        ),
    ],
)
def test_manifests_are_not_believed(changes, error):
    with pytest.raises(error):
        parse_manifest(manifest_with(**changes), where="a.batch.json")


@given(st.binary(max_size=60) | st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=5).map(
    lambda value: json.dumps(value).encode()
))  # fmt: skip
def test_whatever_a_manifest_holds_only_our_errors_come(raw):
    with pytest.raises((DocumentError, UnsafeContentError)):
        parse_manifest(raw, where="x")


def test_the_order_of_records_is_pinned():
    """A change here makes every manifest written before lie."""
    assert RecordOrder(10, 7).records(np.arange(10)).tolist() == [6, 0, 7, 2, 9, 1, 4, 8, 3, 5]
    assert RecordOrder(10**6, 7).records(np.arange(5)).tolist() == [984289, 982701, 490136, 247424, 923836]
    large = RecordOrder(10**9, 0)
    picks = np.random.default_rng(0).integers(0, 10**9, 1000)
    np.testing.assert_array_equal(large.places(large.records(picks)), picks)


@given(n=st.integers(1, 300), memory=st.integers(1, 20_000), pieces=st.integers(1, 50))
def test_buckets_put_everything_in_order(n, memory, pieces):
    order = np.random.default_rng(n).permutation(n)
    with Buckets(n, 4, memory_nbytes=memory) as buckets:
        for start in range(0, n, pieces):
            places = order[start : start + pieces]
            buckets.put(places, np.repeat(places[:, None], 4, axis=1).astype(np.uint32))
        taken = np.concatenate(list(buckets.take(7)))
    np.testing.assert_array_equal(taken, np.repeat(np.arange(n)[:, None], 4, axis=1))
