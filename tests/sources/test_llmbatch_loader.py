"""Every batch once in an epoch, in an order that is a function of seed and epoch alone, and that can be continued."""

from __future__ import annotations

import itertools
import json
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_files import llmbatch_bytes
from transports import CountingTransport, LatencyTransport

from saev_store.errors import ArgumentError, CorruptShardError, ResumeError
from saev_store.sources.llmbatch import BatchFileReader, BatchNativeLoader, write_batch_file
from saev_store.sources.llmbatch.order import block_order, epoch_batches
from saev_store.transport import MemoryTransport, open_transport
from saev_store.transport.limit import Wrapper


def reader_of(n, batch_size=2, seq_len=3):
    """Batch i holds nothing but the number i."""
    batches = np.broadcast_to(np.arange(n, dtype=np.uint32)[:, None, None], (n, batch_size, seq_len))
    return BatchFileReader("x.batch", transport=MemoryTransport({"x.batch": llmbatch_bytes(batches)}))


def numbers(loader):
    return [int(batch[0, 0]) for batch in loader]


@given(n=st.integers(0, 40), block=st.integers(1, 50), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 1000))
def test_an_epoch_is_a_shuffle_of_blocks(n, block, seed, epoch):
    order = epoch_batches(n, block_size=block, shuffle=True, seed=seed, epoch=epoch).tolist()
    assert sorted(order) == list(range(n))
    runs = [list(run) for _, run in itertools.groupby(order, key=lambda batch: batch // block)]
    assert len(runs) == -(-n // block)
    assert all(run == list(range(run[0], run[0] + len(run))) for run in runs)
    assert epoch_batches(n, block_size=block, shuffle=False, seed=seed, epoch=epoch).tolist() == list(range(n))


@given(n=st.integers(2, 30), seed=st.integers(0, 2**32), epoch=st.integers(0, 1000))
def test_neighbouring_epochs_differ(n, seed, epoch):
    orders = [tuple(block_order(n, seed=seed, epoch=epoch + i).tolist()) for i in range(n)]
    assert len(set(orders)) == n


def test_every_order_of_three_blocks_comes_up():
    seen = {tuple(block_order(3, seed=seed, epoch=epoch).tolist()) for seed in range(10) for epoch in range(10)}
    assert len(seen) == 6


def test_the_order_of_blocks_is_pinned():
    """A change here makes every saved state lie: then BLOCK_ORDER needs a new name."""
    assert block_order(8, seed=42, epoch=3).tolist() == [2, 5, 7, 0, 3, 1, 6, 4]


def test_tensors_and_arrays():
    torch = pytest.importorskip("torch")
    reader = reader_of(5)
    tensors, arrays = list(BatchNativeLoader(reader, 2)), list(BatchNativeLoader(reader, 2, output="numpy"))
    assert all(tensor.dtype == torch.int64 and tensor.shape == (2, 3) for tensor in tensors)
    assert all(array.dtype == np.uint32 for array in arrays)
    np.testing.assert_array_equal(np.stack(arrays), torch.stack(tensors).numpy())


@given(n=st.integers(0, 30), world=st.integers(1, 6), block=st.integers(1, 8), drop=st.booleans())
def test_ranks_share_an_epoch(n, world, block, drop):
    reader = reader_of(n)
    loaders = [
        BatchNativeLoader(reader, block, output="numpy", rank=rank, world_size=world, drop_last=drop)
        for rank in range(world)
    ]
    parts = [numbers(loader) for loader in loaders]
    assert {len(part) for part in parts} == {len(loaders[0])}
    together = [batch for part in parts for batch in part]
    if drop:
        assert len(set(together)) == len(together) == n // world * world
    else:
        assert set(together) == set(range(n))
        assert len(together) - n < world


@given(
    n=st.integers(1, 20), stop=st.integers(1, 25), world=st.integers(1, 3), then=st.integers(1, 4), drop=st.booleans()
)
def test_another_number_of_ranks_goes_on_where_the_first_stopped(n, stop, world, then, drop):
    """Stopped after any batch, the last included: what comes next is what would have come, shared by other ranks."""

    def make(rank, world):
        return BatchNativeLoader(reader_of(n), 3, output="numpy", epoch=4, rank=rank, world_size=world, drop_last=drop)

    order = numbers(make(0, 1))
    first = [make(rank, world) for rank in range(world)]
    stop = min(stop, len(first[0]))
    seen = [[int(batch[0, 0]) for batch in itertools.islice(iter(loader), stop)] for loader in first]
    states = [json.loads(json.dumps(loader.state_dict())) for loader in first]
    assert all(state == states[0] for state in states)
    handed_out = [batch for step in zip(*seen, strict=True) for batch in step]
    wanted = [order[i % n] for i in range(len(handed_out))]
    assert handed_out == wanted
    second = [make(rank, then) for rank in range(then)]
    for loader in second:
        loader.load_state_dict(states[0])
    rest = [numbers(loader) for loader in second]
    together = [batch for step in zip(*rest, strict=True) for batch in step]
    if second[0].epoch == 5 and states[0]["epoch"] == 4:  # the first went on in epoch 4
        left = order[len(handed_out) :]
        assert together[: len(left)] == left[: len(together)]
        assert abs(len(together) - len(left)) < then
    else:  # epoch 4 was over, or had too few batches left for so many ranks
        assert stop == len(first[0]) or n - len(handed_out) < then


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("position", range(6))
def test_where_too_little_is_left_for_all_ranks_the_next_epoch_begins(position, drop_last):
    """Of five batches; three ranks leave out two at most, or repeat some from the beginning of the order."""
    options = {"output": "numpy", "epoch": 4, "drop_last": drop_last}
    alone = BatchNativeLoader(reader_of(5), 1, **options)
    order = {epoch: numbers(BatchNativeLoader(reader_of(5), 1, **{**options, "epoch": epoch})) for epoch in (4, 5)}
    state = {**alone.state_dict(), "position": position}
    found = []
    for rank in range(3):
        loader = BatchNativeLoader(reader_of(5), 1, rank=rank, world_size=3, **options)
        loader.load_state_dict(state)
        is_over = position > 2 if drop_last else position == 5
        assert loader.epoch == (5 if is_over else 4)
        first = 0 if is_over else position
        n_steps = (5 - first) // 3 if drop_last else -(-(5 - first) // 3)
        mine = numbers(loader)
        assert mine == [order[loader.epoch - 1][(first + rank + 3 * step) % 5] for step in range(n_steps)]
        found.append(mine)
    assert len({len(mine) for mine in found}) == 1


def test_a_position_is_used_once():
    """An iteration that was left begins anew at the beginning of its epoch."""
    loader = BatchNativeLoader(reader_of(7), 2, output="numpy", epoch=1)
    whole = numbers(BatchNativeLoader(reader_of(7), 2, output="numpy", epoch=1))
    loader.load_state_dict({**loader.state_dict(), "position": 3})
    assert [int(batch[0, 0]) for batch in itertools.islice(loader, 2)] == whole[3:5]
    assert loader.state_dict()["position"] == 5
    assert [int(batch[0, 0]) for batch in itertools.islice(loader, 2)] == whole[:2]
    assert loader.state_dict()["position"] == 2
    assert numbers(loader) == whole


@pytest.mark.parametrize(
    ("name", "value"),
    [("block_size", 3), ("shuffle", False), ("seed", 1), ("drop_last", False), ("num_batches", 8), ("seq_len", 4), ("batch_size", 1)],
)  # fmt: skip
def test_everything_that_decides_the_order_is_in_a_state(name, value):
    shape = {"n": 7, "batch_size": 2, "seq_len": 3}
    options = {"block_size": 2, "shuffle": True, "seed": 42, "drop_last": True}
    state = BatchNativeLoader(reader_of(**shape), output="numpy", **options).state_dict()
    changed = {**shape, "n": value} if name == "num_batches" else {**shape, **({name: value} if name in shape else {})}
    other = BatchNativeLoader(
        reader_of(**changed), output="numpy", **(options | ({name: value} if name in options else {}))
    )
    with pytest.raises(ResumeError, match=rf"{name} is|digest is"):
        other.load_state_dict(state)
    with pytest.raises(ResumeError, match=f"{name} is"):
        other.load_state_dict({key: found for key, found in other.state_dict().items() if key != name})
    with pytest.raises(ResumeError, match=f"{name} is"):
        other.load_state_dict({**other.state_dict(), name: state[name]})


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_batches_as_arrays_cannot_be_changed(tmp_path, engine):
    """Wherever they are; as tensors they are the caller's own."""
    (tmp_path / "x.batch").write_bytes(reader_of(5).transport.read("x.batch"))
    with BatchNativeLoader(tmp_path / "x.batch", 2, output="numpy", engine=engine) as loader:
        assert not any(batch.flags.writeable for batch in loader)
        assert not loader.reader.read_batch(np.int64(1)).flags.writeable
        assert not loader.reader[1].flags.writeable
        assert loader.reader.read_batches([1]).flags.writeable


def test_an_epoch_is_over_with_its_last_batch():
    """Counted when the batch is handed out: loops that stop at `len` never see StopIteration."""
    loader = BatchNativeLoader(reader_of(6), 2, output="numpy")
    batches = iter(loader)
    first = [int(next(batches)[0, 0]) for _ in range(len(loader))]
    state = loader.state_dict()
    assert (state["epoch"], state["position"], loader.epoch) == (1, 0, 1)
    second = numbers(loader)
    again = BatchNativeLoader(reader_of(6), 2, output="numpy")
    again.load_state_dict(state)
    assert numbers(again) == second != first
    assert (again.epoch, loader.epoch) == (2, 2)
    loader.set_epoch(0)
    assert numbers(loader) == first


def test_the_loop_of_the_specification_keeps_a_loaded_position():
    """`set_epoch` comes first in each epoch, also in the one that was interrupted."""
    loader = BatchNativeLoader(reader_of(6), 2, output="numpy", epoch=1)
    batches = iter(loader)
    seen = [int(next(batches)[0, 0]) for _ in range(2)]
    resumed = BatchNativeLoader(reader_of(6), 2, output="numpy")
    resumed.load_state_dict(loader.state_dict())
    rest = []
    for epoch in range(resumed.epoch, 3):
        resumed.set_epoch(epoch)
        rest.append(numbers(resumed))
    whole = [numbers(BatchNativeLoader(reader_of(6), 2, output="numpy", epoch=epoch)) for epoch in (1, 2)]
    assert [seen + rest[0], rest[1]] == whole
    resumed.set_epoch(1)  # nothing is loaded any more: from its beginning
    assert numbers(resumed) == whole[0]
    for epoch in (0, 2):  # another one than that of the state
        resumed.load_state_dict(loader.state_dict())
        resumed.set_epoch(epoch)
        assert (resumed.epoch, resumed.state_dict()["position"]) == (epoch, 0)
        assert numbers(resumed) == numbers(BatchNativeLoader(reader_of(6), 2, output="numpy", epoch=epoch))


@pytest.mark.parametrize("then", ["iterate", "set_epoch", "load_state_dict"])
def test_an_iteration_that_was_overtaken_is_over(then):
    """No batch comes from two iterations, and the state is that of the newer one."""
    loader = BatchNativeLoader(reader_of(7), block_size=2, output="numpy")
    later, older = 3, iter(loader)
    next(older)
    if then == "iterate":
        newer = iter(loader)
        next(newer)
    elif then == "set_epoch":
        loader.set_epoch(later)
    else:
        loader.load_state_dict({**loader.state_dict(), "epoch": later, "position": 5})
    state = loader.state_dict()
    with pytest.raises(ArgumentError, match="was closed"):
        next(older)
    assert loader.state_dict() == state
    assert loader.epoch == (0 if then == "iterate" else later)


def test_an_epoch_may_be_chosen_with_the_last_batch():
    """Nothing is left then that could come from two iterations."""
    loader = BatchNativeLoader(reader_of(3), block_size=2, output="numpy")
    found = []
    for batch in loader:
        found.append(int(batch[0, 0]))
        if len(found) == len(loader):
            loader.set_epoch(5)
    assert sorted(found) == [0, 1, 2]
    assert loader.epoch == 5


def test_a_state_of_another_file_of_the_same_shape_is_refused():
    loaders = [
        BatchNativeLoader(
            BatchFileReader("x.batch", transport=MemoryTransport({"x.batch": llmbatch_bytes(batches)})),
            output="numpy",
        )
        for batches in (np.zeros((4, 2, 3), np.uint32), np.ones((4, 2, 3), np.uint32))
    ]
    with pytest.raises(ResumeError, match="digest"):
        loaders[1].load_state_dict(loaders[0].state_dict())


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"block_size": 3},
        {"num_batches": 7},
        {"shuffle": False},
        {"shuffle": 1},
        {"version": 1},
        {"order": "x"},
        {"position": -1},
        {"position": 7},
        {"position": True},
        {"position": "1"},
        {"epoch": -1},
        {"epoch": None},
        {"seq_len": 4},
    ],
)
def test_a_state_of_something_else_is_refused(change):
    loader = BatchNativeLoader(reader_of(6), 2, output="numpy")
    with pytest.raises(ResumeError, match=next(iter(change))):
        loader.load_state_dict({**loader.state_dict(), **change})
    with pytest.raises(ResumeError):
        loader.load_state_dict({})


@pytest.mark.parametrize(
    "arguments",
    [
        {"block_size": 0},
        {"block_size": "8"},
        {"seed": -1},
        {"epoch": -1},
        {"rank": 1},
        {"rank": -1},
        {"world_size": 0},
        {"world_size": 2**32},
        {"output": "list"},
    ],
)
def test_wrong_arguments(arguments):
    with pytest.raises(ArgumentError):
        BatchNativeLoader(reader_of(3), **arguments)


@pytest.mark.parametrize("engine", ["pread", "fsspec"])
def test_fetched_batches_are_the_mapped_ones(tmp_path, engine):
    records = np.random.default_rng(0).integers(0, 2**31, (70, 900))
    write_batch_file(tmp_path / "x.batch", records, 3)
    for epoch in range(3):
        mapped = BatchNativeLoader(tmp_path / "x.batch", 4, epoch=epoch, output="numpy")
        with BatchNativeLoader(tmp_path / "x.batch", 4, epoch=epoch, output="numpy", engine=engine) as fetched:
            np.testing.assert_array_equal(np.stack(list(fetched)), np.stack(list(mapped)))


def test_far_away_a_block_is_one_request(tmp_path):
    records = np.random.default_rng(0).integers(0, 2**31, (160, 500))
    write_batch_file(tmp_path / "x.batch", records, 4)
    counting = CountingTransport(LatencyTransport(open_transport(tmp_path, engine="pread"), 0.0, 100e6))
    reader = BatchFileReader("x.batch", transport=counting)
    counting.reset()
    assert len(list(BatchNativeLoader(reader, 10, output="numpy"))) == 40
    assert counting.counters.requests <= 4  # blocks that happen to be neighbours travel together


def test_a_failing_read_reaches_the_consumer_and_leaves_no_thread(tmp_path):
    records = np.zeros((40, 5000), np.int32)
    write_batch_file(tmp_path / "x.batch", records, 4)
    loader = BatchNativeLoader(tmp_path / "x.batch", 1, output="numpy", engine="pread")
    before = threading.active_count()
    with open(tmp_path / "x.batch", "r+b") as file:
        file.truncate(100_000)
    with pytest.raises(CorruptShardError):
        list(loader)
    assert threading.active_count() == before


def test_a_consumer_that_leaves_leaves_no_thread(tmp_path):
    write_batch_file(tmp_path / "x.batch", np.zeros((40, 5000), np.int32), 4)
    before = threading.active_count()
    batches = iter(BatchNativeLoader(tmp_path / "x.batch", 2, output="numpy", engine="pread"))
    next(batches)
    batches.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("nbytes", [1, 4096, 3 * 4096, 7 * 4096 + 1])
def test_batches_that_are_fetched_in_groups_are_all_there(tmp_path, monkeypatch, nbytes):
    """Ten batches of one page, in groups of one, one, three and seven."""
    monkeypatch.setattr("saev_store.sources.llmbatch.loader._GROUP_BYTES", nbytes)
    write_batch_file(tmp_path / "x.batch", np.arange(40).reshape(20, 2), 2)
    mapped = [batch.tolist() for batch in BatchNativeLoader(tmp_path / "x.batch", 3, output="numpy")]
    assert sorted(np.array(mapped).reshape(-1).tolist()) == list(range(40))
    with BatchNativeLoader(tmp_path / "x.batch", 3, output="numpy", engine="pread") as fetched:
        assert [batch.tolist() for batch in fetched] == mapped


def test_the_first_batch_does_not_wait_for_large_fetches(tmp_path):
    """Groups of 1, 2, 4, 8 and 16 MiB, and then of 16."""
    asked = []

    class Noting(Wrapper):
        def get_ranges(self, path, *, starts, ends):
            asked.append(sum(ends) - sum(starts))
            return super().get_ranges(path, starts=starts, ends=ends)

    n, nbytes = 200, 1 << 18
    write_batch_file(tmp_path / "x.batch", np.zeros((n, nbytes // 4), np.int32), 1)
    reader = BatchFileReader("x.batch", transport=Noting(open_transport(tmp_path, engine="pread")))
    asked.clear()
    assert sum(1 for _ in BatchNativeLoader(reader, shuffle=False, output="numpy")) == n
    assert sorted(asked) == [1 << 20, *(size << 20 for size in (2, 3, 4, 8, 16, 16))]


def test_a_file_is_opened_with_the_options_of_the_caller(tmp_path, monkeypatch):
    """Credentials, for example."""
    write_batch_file(tmp_path / "x.batch", np.arange(12).reshape(6, 2), 2)
    opened = []

    def noted(url, options=None, *, engine="auto"):
        opened.append((url, options, engine))
        return open_transport(tmp_path)

    monkeypatch.setattr("saev_store.sources.address.open_transport", noted)
    given = {"storage_options": {"key": "k"}, "engine": "pread"}
    with BatchNativeLoader("s3://b/x.batch", output="numpy", **given) as loader:
        assert len(list(loader)) == 3
    assert opened == [("s3://b", {"key": "k"}, "pread")]
