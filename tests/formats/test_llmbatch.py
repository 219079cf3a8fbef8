"""LLMBATCH: files of the format's text and of another program, the loader's order and resumption, and what the writers publish."""

from __future__ import annotations

import itertools
import json
import pickle
import resource
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servers import s3_bucket  # noqa: F401 (a fixture)
from token_files import DATA, llmbatch_bytes, malformed, samples, through, truth

from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    NotFoundError,
    ResumeError,
    SaevStoreError,
    SelectionError,
    StoreExistsError,
    TransportError,
    UnknownProtocolError,
)
from saev_store.sources import open_source
from saev_store.sources.llmbatch import (
    BatchFileReader,
    BatchNativeLoader,
    Header,
    record_order,
    write_batch_dataset,
    write_batch_file,
)
from saev_store.transport import open_transport

ENGINES = ("mmap", "pread", "fsspec")


def random_batches(n: int, batch_size: int, seq_len: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, (n, batch_size, seq_len), dtype=np.uint64).astype(np.uint32)


BATCHES = random_batches(2, 3, 50)
FILE = llmbatch_bytes(BATCHES)


def put(folder: Path, content: bytes = FILE, name: str = "x") -> Path:
    path = folder / f"{name}.batch"
    path.write_bytes(content)
    return path


def numbered(folder: Path, n: int, batch_size: int = 2, seq_len: int = 3) -> Path:
    """A file whose batch i holds nothing but the number i."""
    batches = np.broadcast_to(np.arange(n, dtype=np.uint32)[:, None, None], (n, batch_size, seq_len))
    return put(folder, llmbatch_bytes(batches), f"{n}-{batch_size}-{seq_len}")


def numbers(batches) -> list[int]:
    return [int(batch[0, 0]) for batch in batches]


def refusal(call, *arguments, **options) -> SaevStoreError:
    with pytest.raises(SaevStoreError) as caught:
        call(*arguments, **options)
    return caught.value


# -- reading -----------------------------------------------------------------------------------------------------------


def test_open_files_of_another_program_gives_their_truth():
    for folder, engine in itertools.product(samples("llmbatch"), ENGINES):
        expected, arrays = truth(folder)
        reader = through(engine, BatchFileReader, folder / "data.batch")
        for name in ("batch_size", "seq_len", "num_batches", "seed", "total_records"):
            assert getattr(reader, name) == getattr(reader.header, name) == expected["header"][name]
        assert np.array_equal(reader.read_batches(slice(None)), arrays["batches"])
        assert len(reader) == expected["header"]["num_batches"] * expected["header"]["batch_size"]
        assert reader.validate(deep=True).ok


@given(n=st.integers(0, 5), batch_size=st.integers(1, 9), seq_len=st.integers(1, 2000), data=st.data())
def test_open_any_file_equals_its_batches(tmp_path_factory, n, batch_size, seq_len, data):
    batches = random_batches(n, batch_size, seq_len, seed=n)
    path = put(tmp_path_factory.getbasetemp(), llmbatch_bytes(batches))
    picks = data.draw(st.lists(st.integers(-n * batch_size, n * batch_size - 1), max_size=20)) if n else []
    for engine in ENGINES:
        reader = through(engine, BatchFileReader, path)
        assert np.array_equal(reader.read_batches(slice(None, None, -1)), batches[::-1])
        assert np.array_equal(reader.rows(picks), batches.reshape(-1, seq_len)[np.array(picks, np.int64)])
        for i in range(-n, n):
            assert np.array_equal(reader.read_batch(i), batches[i])
        assert [np.array_equal(reader[pick], batches.reshape(-1, seq_len)[pick]) for pick in picks] == [True] * len(
            picks
        )


def test_read_gives_views_of_a_map_that_outlive_close(tmp_path):
    for engine in ENGINES:
        reader = pickle.loads(pickle.dumps(through(engine, BatchFileReader, put(tmp_path))))
        alone = (reader.read_batch(1), reader.read_batch(np.int64(-1)), reader[3], reader[-1])
        assert not any(found.flags.writeable for found in alone[:2]) or engine != "mmap"
        assert reader.read_batches([1, 0]).flags.writeable
        assert reader.rows([3, 0]).flags.writeable
        assert np.shares_memory(reader.read_batch(1), reader.read_batch(1)) == (engine == "mmap")
        reader.close()
        assert np.array_equal(alone[0], BATCHES[1])
        for read in (
            lambda each: each.read_batches([0]),
            lambda each: each.rows([0, 1, 2]),
            lambda each: each.read_batch(0),
        ):
            assert np.array_equal(read(reader).reshape(3, 50), BATCHES[0])
            reader.close()


def test_read_a_wrong_number_is_refused(tmp_path):
    reader = BatchFileReader(put(tmp_path))
    for wrong in (2, -3, 1.0, "0", None, slice(0, 1), [0], 10**30):
        assert type(refusal(reader.read_batch, wrong)) is SelectionError
    for wrong in ([0, 2], [-3], [[0]], [0.5], ["a"], slice("a", None), [True, False], 0):
        assert isinstance(refusal(reader.read_batches, wrong), SelectionError | ArgumentError)
    assert type(refusal(reader.__getitem__, 6)) is SelectionError
    assert type(refusal(BatchFileReader(put(tmp_path, Header(2, 2**28, 0).to_bytes())).read_batch, 0)) is SelectionError


def test_batches_as_tensors_own_their_memory(tmp_path):
    torch = pytest.importorskip("torch")
    for _ in range(2):
        (first, _) = BatchNativeLoader(BatchFileReader(put(tmp_path)), shuffle=False)
        assert (first.dtype, first.shape) == (torch.int64, (3, 50))
        assert np.array_equal(first.numpy(), BATCHES[0])
        first[:] = 0


# -- what is refused ---------------------------------------------------------------------------------------------------


def changed(offset: int, data: bytes) -> bytes:
    return FILE[:offset] + data + FILE[offset + len(data) :]


#: (content, class)
BROKEN = [
    (b"", DocumentError),
    (b"LLMB", DocumentError),
    (FILE[:39], DocumentError),
    (FILE[:4095], DocumentError),
    (FILE[:4096], CorruptShardError),
    (FILE[:-1], CorruptShardError),
    (FILE + b"\0", CorruptShardError),
    (FILE + b"\0" * 4096, CorruptShardError),
    (changed(0, b"LLMCHNK\0"), DocumentError),
    (changed(8, b"\0"), UnknownProtocolError),
    (changed(28, b"\1"), UnknownProtocolError),
    (changed(12, b"\0\0\0\0"), DocumentError),
    (changed(12, b"\0" * 8), DocumentError),
    (changed(4095, b"\1"), DocumentError),
    (changed(20, b"\xff" * 8), CorruptShardError),
    (changed(20, (2**52).to_bytes(8, "little")), CorruptShardError),
    (changed(12, b"\xff" * 8), DocumentError),  # a batch of more than 2^63 bytes
    (Header(2**31, 2**30, 0).to_bytes(), DocumentError),
    (Header(2**32 - 1, 2**29 + 1, 0).to_bytes(), DocumentError),
]


def test_open_what_breaks_a_rule_is_refused_with_its_place(tmp_path):
    tracemalloc.start()
    try:
        for content, kind in BROKEN:
            error = refusal(through, "pread", BatchFileReader, put(tmp_path, content))
            assert (type(error), error.where) == (kind, f"{tmp_path}/x.batch")
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    for case, engine in itertools.product(malformed("llmbatch"), ENGINES):
        error = refusal(through, engine, open_source, DATA / "llmbatch" / case["path"] / "data.batch")
        assert isinstance(error, (DocumentError, CorruptShardError))
        assert error.where.endswith("data.batch")
    for header in (Header(2**31, 2**30 - 1, 0), Header(2**32 - 1, 2**29, 0)):  # the largest batches
        assert BatchFileReader(put(tmp_path, header.to_bytes(), "large")).header == header
    error = refusal(BatchFileReader, tmp_path / "none.batch")
    assert (type(error), error.where) == (NotFoundError, f"{tmp_path}/none.batch")


@given(
    edits=st.lists(st.tuples(st.integers(0, 60) | st.integers(0, len(FILE) - 1), st.integers(0, 255)), max_size=6),
    length=st.just(len(FILE)) | st.integers(0, len(FILE) + 5000),
)
def test_open_a_damaged_file_raises_only_our_errors(tmp_path_factory, edits, length):
    content = bytearray(FILE)
    for offset, value in edits:
        content[offset] = value
    content = bytes(content[:length].ljust(length, b"\0"))
    try:
        reader = through("pread", BatchFileReader, put(tmp_path_factory.getbasetemp(), content))
    except (DocumentError, CorruptShardError):
        return
    for i in range(reader.num_batches):
        assert reader.read_batch(i).shape == (reader.batch_size, reader.seq_len)
    reader.validate(deep=True)


def test_validate_reads_every_byte_if_deep(tmp_path):
    reader = through("pread", BatchFileReader, put(tmp_path))
    quick, deep = reader.validate(), reader.validate(deep=True)
    assert (quick.checked_bytes, deep.checked_bytes, deep.n_examples) == (0, len(FILE), 6)
    put(tmp_path, FILE[:5000])
    (problem,) = reader.validate(deep=True).problems
    assert (problem.kind, problem.lost) == ("corrupt_shard", ((0, 6),))


# -- the loader --------------------------------------------------------------------------------------------------------


@given(n=st.integers(0, 40), block=st.integers(1, 50), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 1000))
def test_order_of_an_epoch_is_a_shuffle_of_blocks(tmp_path_factory, n, block, seed, epoch):
    reader = BatchFileReader(numbered(tmp_path_factory.getbasetemp(), n))
    loader = BatchNativeLoader(reader, block, seed=seed, epoch=epoch, output="numpy")
    order = loader.order().tolist()
    assert sorted(order) == list(range(n))
    runs = [list(run) for _, run in itertools.groupby(order, key=lambda batch: batch // block)]
    assert len(runs) == -(-n // block)
    assert all(run == list(range(run[0], run[0] + len(run))) for run in runs)
    assert numbers(loader) == order
    plain = BatchNativeLoader(reader, block, shuffle=False, seed=seed, epoch=epoch, output="numpy")
    assert plain.order().tolist() == list(range(n))


def test_orders_of_as_many_epochs_as_blocks_all_differ(tmp_path):
    for n in (2, 3, 17):
        reader = BatchFileReader(numbered(tmp_path, n))
        for seed, first in itertools.product(range(5), (0, 1, 500)):
            orders = [
                tuple(BatchNativeLoader(reader, 1, seed=seed, epoch=first + i, output="numpy").order())
                for i in range(n)
            ]
            assert len(set(orders)) == n


def test_orders_are_pinned(tmp_path):
    """A change here makes saved states and files of the same seed differ from those of before."""
    loader = BatchNativeLoader(BatchFileReader(numbered(tmp_path, 5)), 1, seed=42, output="numpy")
    assert loader.order().tolist() == [1, 0, 4, 2, 3]
    loader.set_epoch(1)
    assert loader.order().tolist() == [2, 4, 3, 1, 0]
    assert record_order(10, 7).at(np.arange(10)).tolist() == [8, 5, 2, 7, 1, 9, 3, 4, 6, 0]
    assert record_order(10**6, 7).at(np.arange(5)).tolist() == [31264, 878178, 307595, 89253, 882912]
    large, picks = record_order(10**9, 0), np.random.default_rng(0).integers(0, 10**9, 1000)
    assert np.array_equal(large.position_of(large.at(picks)), picks)


@given(n=st.integers(0, 30), world=st.integers(1, 6), block=st.integers(1, 8))
def test_ranks_share_an_epoch(tmp_path_factory, n, world, block):
    reader = BatchFileReader(numbered(tmp_path_factory.getbasetemp(), n))
    loaders = [BatchNativeLoader(reader, block, output="numpy", rank=rank, world_size=world) for rank in range(world)]
    parts = [numbers(loader) for loader in loaders]
    assert {len(part) for part in parts} == {len(loaders[0])}
    together = [batch for step in zip(*parts, strict=True) for batch in step]
    order = BatchNativeLoader(reader, block, output="numpy").order().tolist()
    assert together == order[: n // world * world]


@given(n=st.integers(1, 20), stop=st.integers(1, 25), world=st.integers(1, 3), then=st.integers(1, 4))
def test_load_state_dict_continues_with_any_number_of_ranks(tmp_path_factory, n, stop, world, then):
    """Stopped after any batch, the last included: what comes next is what would have come, shared by other ranks."""
    reader = BatchFileReader(numbered(tmp_path_factory.getbasetemp(), n))

    def make(rank, world):
        return BatchNativeLoader(reader, 3, output="numpy", epoch=4, rank=rank, world_size=world)

    order = numbers(make(0, 1))
    first = [make(rank, world) for rank in range(world)]
    stop = min(stop, len(first[0]))
    seen = [numbers(itertools.islice(iter(loader), stop)) for loader in first]
    states = [json.loads(json.dumps(loader.state_dict())) for loader in first]
    assert all(state == states[0] for state in states)
    handed_out = [batch for step in zip(*seen, strict=True) for batch in step]
    assert handed_out == [order[i % n] for i in range(len(handed_out))]
    second = [make(rank, then) for rank in range(then)]
    for loader in second:
        loader.load_state_dict(states[0])
    went_on = second[0].epoch == 4
    together = [batch for step in zip(*(numbers(loader) for loader in second), strict=True) for batch in step]
    if went_on:
        left = order[len(handed_out) :]
        assert together[: len(left)] == left[: len(together)]
        assert abs(len(together) - len(left)) < then
    else:  # epoch 4 was over, or had too few batches left for so many ranks
        assert stop == len(first[0]) or n - len(handed_out) < then


def test_iteration_that_is_left_counts_for_nothing(tmp_path):
    reader = BatchFileReader(numbered(tmp_path, 7))
    whole = numbers(BatchNativeLoader(reader, 2, output="numpy", epoch=1))
    loader = BatchNativeLoader(reader, 2, output="numpy", epoch=1)
    loader.load_state_dict({**loader.state_dict(), "position": 3})
    for wanted in (whole[3:5], whole[:2]):  # a position is used once
        assert numbers(itertools.islice(loader, 2)) == wanted
    assert loader.state_dict()["position"] == 2
    loader.set_epoch(1)
    assert numbers(loader) == whole


def test_epoch_is_over_with_its_last_batch(tmp_path):
    """Loops that stop at `len` never see StopIteration."""
    reader = BatchFileReader(numbered(tmp_path, 6))
    orders = [numbers(BatchNativeLoader(reader, 2, output="numpy", epoch=epoch)) for epoch in range(3)]
    loader = BatchNativeLoader(reader, 2, output="numpy")
    batches = iter(loader)
    assert numbers(next(batches) for _ in range(len(loader))) == orders[0]
    state = loader.state_dict()
    assert (state["epoch"], state["position"], loader.epoch) == (1, 0, 1)
    again = BatchNativeLoader(reader, 2, output="numpy")
    again.load_state_dict(state)
    assert (numbers(again), numbers(loader)) == (orders[1], orders[1])
    # The loop of the format's text calls `set_epoch` in each epoch, also in the one that was interrupted.
    loader.set_epoch(1)
    seen = numbers(itertools.islice(loader, 2))
    again.load_state_dict(loader.state_dict())
    rest = []
    for epoch in range(again.epoch, 3):
        again.set_epoch(epoch)
        rest.append(numbers(again))
    assert [seen + rest[0], rest[1]] == orders[1:]
    again.load_state_dict(loader.state_dict())
    again.set_epoch(2)  # another one than that of the state
    assert again.state_dict()["position"] == 0


def test_load_state_dict_of_something_else_is_refused(tmp_path):
    loader = BatchNativeLoader(BatchFileReader(numbered(tmp_path, 6)), 2, output="numpy")
    state = loader.state_dict()
    for change in (
        {"seed": 1}, {"block_size": 3}, {"shuffle": False}, {"order": "x"}, {"digest": "0"}, {"position": -1}, {"position": 7},
        {"position": True}, {"position": "1"}, {"epoch": -1}, {"epoch": None},
    ):  # fmt: skip
        for wrong in (
            {**state, **change},
            {name: value for name, value in state.items() if name not in change},
            [],
            None,
        ):
            error = refusal(loader.load_state_dict, wrong)
            assert (type(error), error.where) == (ResumeError, "state")
    assert loader.state_dict() == state
    same_shape = BatchFileReader(put(tmp_path, llmbatch_bytes(np.zeros((6, 2, 3), np.uint32))))
    assert type(refusal(BatchNativeLoader(same_shape, 2, output="numpy").load_state_dict, state)) is ResumeError
    for wrong in (
        {"block_size": 0}, {"block_size": "8"}, {"seed": -1}, {"seed": 2**64}, {"epoch": -1}, {"rank": 1}, {"rank": -1},
        {"world_size": 0}, {"world_size": 2**32}, {"output": "list"},
    ):  # fmt: skip
        error = refusal(BatchNativeLoader, same_shape, **wrong)
        assert (type(error), error.where) == (ArgumentError, next(iter(wrong)))


def test_batches_that_are_fetched_are_those_of_a_map_and_leave_no_thread(tmp_path):
    records = np.arange(60 * 65_536, dtype=np.uint32).reshape(60, 65_536)
    path = tmp_path / "x.batch"
    write_batch_file(path, records, 1)
    for engine in ("fsspec", "pread"):
        fetched = BatchNativeLoader(through(engine, BatchFileReader, path), 4, output="numpy")
        mapped = BatchNativeLoader(path, 4, output="numpy")
        for found, wanted in zip(fetched, mapped, strict=True):
            assert np.array_equal(found, wanted)
    before = set(threading.enumerate())
    left = iter(BatchNativeLoader(through("pread", BatchFileReader, path), 4, output="numpy"))
    next(left)
    left.close()
    loader = BatchNativeLoader(through("pread", BatchFileReader, path), 1, output="numpy")
    with open(path, "r+b") as file:
        file.truncate(1_000_000)
    assert type(refusal(list, loader)) is CorruptShardError
    for thread in set(threading.enumerate()) - before:  # what was being read is read to its end
        thread.join(20)
        assert not thread.is_alive()


# -- writing -----------------------------------------------------------------------------------------------------------


def expected(records: np.ndarray, batch_size: int, seed: int) -> bytes:
    """The file, from the order and the oracle."""
    n_batches = len(records) // batch_size
    shuffled = records[record_order(len(records), seed).at(np.arange(n_batches * batch_size))]
    return llmbatch_bytes(shuffled.reshape(n_batches, batch_size, records.shape[1]), seed=seed, total=len(records))


@given(n=st.integers(1, 60), batch_size=st.integers(1, 9), seq_len=st.integers(1, 1100), seed=st.integers(0, 2**32 - 1))
def test_array_and_stream_write_the_same_bytes(tmp_path_factory, n, batch_size, seq_len, seed):
    folder, records = tmp_path_factory.mktemp("written"), random_batches(1, n, seq_len)[0]
    wide = records.astype(np.int64)

    def stream():
        mine = np.zeros(seq_len, np.int64)
        for record in wide:
            mine[:] = record  # one array again and again
            yield mine

    n_batches = write_batch_file(folder / "a.batch", wide, batch_size, seed=seed)
    assert n_batches == n // batch_size
    write_batch_dataset(folder / "b.batch", stream(), n, batch_size, seq_len, seed)
    halves = [records[: n // 2], records[n // 2 :]]
    write_batch_dataset(folder / "c.batch", halves, n, batch_size, seq_len, seed)
    assert [path.read_bytes() == expected(records, batch_size, seed) for path in folder.iterdir()] == [True] * 3


def test_writers_keep_memory_bounded(tmp_path):
    n, seq_len = 16_000, 512
    tracemalloc.start()
    try:
        stream = (np.full(seq_len, i, np.uint32) for i in range(n))
        write_batch_dataset(tmp_path / "x.batch", stream, n, 8, seq_len)
        assert tracemalloc.get_traced_memory()[1] < 24 << 20 < n * seq_len * 4
    finally:
        tracemalloc.stop()
    reader = BatchFileReader(tmp_path / "x.batch")
    assert np.array_equal(np.sort(reader.rows(slice(None))[:, 0]), np.arange(n))
    large = random_batches(1, 5, 1_500_000)[0]  # a batch has more bytes than are written at a time
    write_batch_file(tmp_path / "y.batch", large, 2)
    assert (tmp_path / "y.batch").read_bytes() == expected(large, 2, 0)


def test_writers_refuse_wrong_arguments_and_write_nothing(tmp_path):
    path, array = tmp_path / "x.batch", np.zeros((4, 8), int)
    for records, wrong, where in (
        (array.astype(float), {}, "tokens"), (array[0], {}, "tokens_array"), (array[:, :0], {}, "tokens_array"),
        ([[1], [2, 3]], {}, "tokens"), (array + 2**32, {}, "tokens"), (array - 1, {}, "tokens"),
        (array, {"batch_size": 0}, "batch_size"), (array, {"batch_size": 2.5}, "batch_size"),
        (array, {"seed": -1}, "seed"), (array, {"seed": 2**32}, "seed"),
    ):  # fmt: skip
        error = refusal(write_batch_file, path, records, **{"batch_size": 2, **wrong})
        assert (type(error), error.where) == (ArgumentError, where)
    record = np.zeros(8, int)
    for stream, wrong, where in (
        ([record] * 3, {"total_records": 4}, "total_records"), ([record] * 5, {"total_records": 4}, "total_records"),
        ([record, record[1:]], {"total_records": 2}, "tokens_iter"), ([np.zeros((2, 2, 8), int)], {}, "tokens_iter"),
        ([np.zeros((2, 8, 2), int)], {}, "tokens_iter"), ([5], {}, "tokens_iter"), ([[]], {}, "tokens_iter"),
        ([np.zeros((0, 7), int)], {"total_records": 0}, "tokens_iter"), ([], {"seq_len": 0}, "seq_len"),
        ([record.astype(float)], {}, "tokens"), ([[[1], [2, 3]]], {}, "tokens"),
    ):  # fmt: skip
        options = {"total_records": 1, "batch_size": 2, "seq_len": 8, **wrong}
        error = refusal(write_batch_dataset, path, stream, **options)
        assert (type(error), error.where) == (ArgumentError, where)
    assert refusal(write_batch_file, tmp_path / "x.bat", array, 2).where == "output_path"

    def dying():
        yield np.zeros((5, 8), np.uint32)
        raise RuntimeError("the tokenizer died")

    with pytest.raises(RuntimeError, match="tokenizer"):
        write_batch_dataset(path, dying(), 10, 2, 8)
    assert list(tmp_path.iterdir()) == []
    largest = np.full((2, 2), 2**32 - 1, np.uint64)
    write_batch_file(path, largest, 1)
    assert np.array_equal(BatchFileReader(path).rows(slice(None)), largest)


def test_writers_publish_once_or_replace(tmp_path):
    first, second = random_batches(2, 8, 8)
    asked = []

    def stream(there):
        asked.append(there)
        yield from second
        write_batch_file("x.batch", first, 2, transport=there)  # another writer is quicker

    for engine in ENGINES:
        path = tmp_path / engine / "x.batch"
        path.parent.mkdir()
        there = open_transport(path.parent, engine=engine)
        options = {"transport": there}
        error = refusal(write_batch_dataset, "x.batch", stream(there), 8, 2, 8, **options)
        assert type(error) is StoreExistsError
        for write in (write_batch_file, write_batch_dataset):
            arguments = (second, 2) if write is write_batch_file else (stream(there), 8, 2, 8)
            assert type(refusal(write, "x.batch", *arguments, **options)) is StoreExistsError
        assert path.read_bytes() == expected(first, 2, 0)
        bad = np.zeros((20_000, 800), np.int64)
        bad[-1, -1] = -1
        assert type(refusal(write_batch_file, "x.batch", bad, 4, overwrite=True, **options)) is ArgumentError
        assert path.read_bytes() == expected(first, 2, 0)
        write_batch_file("x.batch", second, 2, overwrite=True, **options)
        assert path.read_bytes() == expected(second, 2, 0)
        assert [each.name for each in path.parent.iterdir()] == ["x.batch"]
    assert len(asked) == len(ENGINES)  # no stream was begun for a name that is taken


def test_writer_on_a_full_disk_raises_our_error(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        stream = iter(np.zeros((50, 8), np.uint32))
        error = refusal(write_batch_dataset, tmp_path / "x.batch", stream, 50, 2, 8)
        other = refusal(write_batch_file, tmp_path / "x.batch", np.zeros((50, 8), int), 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (type(error), type(other)) == (TransportError, TransportError)
    assert list(tmp_path.iterdir()) == []


def test_file_in_a_bucket_is_written_and_read(s3_bucket):
    records, url = random_batches(1, 25, 40)[0], f"{s3_bucket.url}/deep/x.batch"
    write_batch_dataset(url, records, 25, 4, 40, 9, storage_options=s3_bucket.options)
    loader = BatchNativeLoader(BatchFileReader(url, s3_bucket.options), 2, output="numpy")
    order = loader.order()
    found = np.stack(list(loader)).reshape(-1, 40)
    wanted = records[record_order(25, 9).at(np.arange(24))].reshape(6, 4, 40)[order].reshape(-1, 40)
    assert np.array_equal(found, wanted)
    assert BatchFileReader(url, s3_bucket.options).validate(deep=True).ok
