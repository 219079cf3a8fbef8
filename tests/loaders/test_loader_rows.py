"""What loaders hand out: every chosen row exactly once, the right numbers, the same order however it is read."""

from __future__ import annotations

import dataclasses
import itertools
import resource
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from api import MemoryTransport
from hypothesis import given
from hypothesis import strategies as st
from plain_stores import Plain, plain_store
from token_stores import token_store
from transports import Wrapper

from saev_store import ShardStore
from saev_store._runtime.threads import n_cores
from saev_store.core.layout import Layout
from saev_store.core.rows import row_space
from saev_store.errors import ArgumentError
from saev_store.loaders import (
    NO_LABEL,
    OrderedLoader,
    ReadArguments,
    ReadOptions,
    ShuffleArguments,
    ShuffledLoader,
    ShuffleOptions,
)
from saev_store.loaders._base import Loader
from saev_store.loaders._ring import TABLE_BYTES, BatchRing, BufferPool, HostMemory, allocate
from saev_store.loaders.quality import batch_entropy, shuffle_quality
from saev_store.order import Blocks, Partition, ShuffledOrder
from saev_store.store.reader import Reader
from saev_store.store.selection import Selection
from saev_store.transport import Counters, ReadCost


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    return plain_store(tmp_path_factory.mktemp("rows"), n=43, tokens=7, per_shard=5, labels=True, d_model=16)


@pytest.fixture(scope="module")
def store(plain: Plain) -> ShardStore:
    return ShardStore.open(plain.path)


def rows_of(
    batches: Iterable[dict], plain: Plain, store: ShardStore, layers: Sequence[int]
) -> list[tuple[int, int, int]]:
    """(example, layer, token) of what was handed out, after a comparison of every number with the truth."""
    found: list[tuple[int, int, int]] = []
    for batch in batches:
        n = len(batch["act"])
        label = batch["layer"] if len(layers) > 1 else np.full(n, layers[0])
        layer = np.array([store.layers.index(value) for value in label.tolist()], dtype=int)
        example, token = batch["example_idx"], batch["token_idx"]
        np.testing.assert_array_equal(batch["act"], plain.acts[example, layer, token + 1])
        if "token_labels" in batch:
            expected = np.where(token < 0, NO_LABEL, plain.labels[example, np.maximum(token, 0)])
            np.testing.assert_array_equal(batch["token_labels"], expected)
        found += list(zip(example.tolist(), layer.tolist(), token.tolist(), strict=True))
    return found


def dull_rows(plain: Plain, layers: list[int], tokens: str, ignore: Sequence[int] = ()) -> list[tuple[int, int, int]]:
    """The chosen rows in storage order, one by one."""
    first, stop = {"content": (0, 7), "special": (-1, 0), "all": (-1, 7)}[tokens]
    return [
        (example, layer, token)
        for example in range(len(plain.acts))
        for layer in layers
        for token in range(first, stop)
        if token < 0 or int(plain.labels[example, token]) not in ignore
    ]


LAYERS = {5: [1], (11, 2): [2, 0], "all": [0, 1, 2]}


@pytest.mark.parametrize("tokens", ["content", "special", "all"])
@pytest.mark.parametrize("layer", list(LAYERS), ids=str)
@pytest.mark.parametrize("ignore", [(), range(100)], ids=["every label", "some labels"])
@pytest.mark.parametrize("batch_size", [7, 64, 1000])
def test_every_combination_exactly_once(plain, store, layer, tokens, ignore, batch_size):
    if tokens == "special" and ignore:
        pytest.skip("special tokens have no labels")
    chosen = list(layer) if isinstance(layer, tuple) else layer
    rows = store.sel(layer=chosen, tokens=tokens, ignore_labels=list(ignore) or None)
    expected = dull_rows(plain, LAYERS[layer], tokens, ignore)
    labels = [store.layers[position] for position in LAYERS[layer]]
    n_batches = -(-len(expected) // batch_size)

    with OrderedLoader(rows, batch_size=batch_size, labels=store.labels) as loader:
        batches = list(loader)
    assert rows_of(batches, plain, store, labels) == expected
    assert [len(batch["act"]) for batch in batches[:-1]] == [batch_size] * (n_batches - 1)
    assert len(batches) == n_batches == len(loader) == loader.n_batches

    options = {"batch_size": batch_size, "labels": store.labels, "n_threads": 2}
    order = None
    for n_threads in (1, 3):
        with ShuffledLoader(rows, **{**options, "n_threads": n_threads}, window_blocks=3) as loader:
            batches = list(loader)
        found = rows_of(batches, plain, store, labels)
        assert len(found) == len(expected)
        assert set(found) == set(expected)
        assert [len(batch["act"]) for batch in batches[:-1]] == [batch_size] * (n_batches - 1)
        assert order in (None, found)
        order = found
    for more in ({"examples_per_block": 3, "window_bytes": 4000}, {"window_bytes": 6000}, {}):
        with ShuffledLoader(rows, **options, **more) as loader:
            found = rows_of(loader, plain, store, labels)
        assert len(found) == len(expected)
        assert set(found) == set(expected)


def test_the_order_is_the_pure_one(plain, store):
    rows = store.sel(layer="all", tokens="content")
    loader = ShuffledLoader(rows, batch_size=32, seed=5, window_blocks=4, n_partitions=4, n_threads=3)
    for epoch in range(3):
        order = ShuffledOrder(Blocks(rows.space), 5, epoch, 4, 4, 8)
        assert loader.epoch == epoch
        for number, batch in enumerate(loader):
            expected = [Partition(order, part).rows(number * 8, number * 8 + 8) for part in range(4)]
            block, cell = (np.concatenate(parts) for parts in zip(*expected, strict=True))
            np.testing.assert_array_equal(batch["example_idx"], block // 3)
            np.testing.assert_array_equal(batch["token_idx"], cell)


def in_memory(plain: Plain, **changed: bytes) -> MemoryTransport:
    files = {path.name: path.read_bytes() for path in plain.path.iterdir()}
    files.update({name.replace("_", "."): data for name, data in changed.items()})
    return MemoryTransport({f"{plain.path.name}/{name}": data for name, data in files.items()}).at(plain.path.name)


@given(st.data())
def test_any_examples_in_any_order(plain, store, data):
    """Lists with repeats, reversed slices and masks."""
    choice = data.draw(
        st.one_of(
            st.lists(st.integers(0, 42), min_size=1, max_size=60),
            st.sampled_from([slice(None, None, -1), slice(40, 3, -7), slice(2, 9)]),
        )
    )
    rows = store.sel(layer=[11, 5], tokens="content", examples=choice)
    order = np.arange(43)[choice].tolist()
    expected = [(example, layer, token) for example in order for layer in (2, 1) for token in range(7)]
    with OrderedLoader(rows, batch_size=10, n_threads=2) as loader:
        assert rows_of(loader, plain, store, [11, 5]) == expected
    group = data.draw(st.integers(1, 4))
    with ShuffledLoader(rows, batch_size=10, window_blocks=2, examples_per_block=group, n_threads=2) as loader:
        assert sorted(rows_of(loader, plain, store, [11, 5])) == sorted(expected)


@pytest.mark.parametrize("kind", [OrderedLoader, ShuffledLoader])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_share_the_work(plain, store, kind, world, drop_last):
    rows = store.sel(layer=5, tokens="content")  # 301 rows, 16 at a time
    whole = kind(rows, batch_size=16, drop_last=drop_last, **({"n_partitions": 8} if kind is ShuffledLoader else {}))
    expected = [batch["act"] for batch in whole]
    ranks = []
    for rank in range(world):
        options = {"n_partitions": 8, "window_bytes": 10**7} if kind is ShuffledLoader else {}
        with kind(rows, batch_size=16 // world, drop_last=drop_last, rank=rank, world=world, **options) as loader:
            assert len(loader) == len(whole) == len(expected) == (18 if drop_last else 19)
            ranks.append([batch["act"] for batch in loader])
    for number, batch in enumerate(expected):
        together = np.concatenate([rank[number] for rank in ranks])
        if number < 18:
            np.testing.assert_array_equal(together, batch)
        else:
            # 13 rows are left: all of them are there, and every rank has equally many.
            assert len({len(rank[number]) for rank in ranks}) == 1
            assert {row.tobytes() for row in together} == {row.tobytes() for row in batch}
            assert len(together) == (
                13 if world == 1 else 16 if kind is ShuffledLoader or world == 8 else -(-13 // world) * world
            )


def test_a_batch_belongs_to_whoever_holds_it(plain, store):
    """Memory is used again, but never while a batch, or a piece of one, is held."""
    rows = store.sel(layer=5, tokens="content")
    for kind, more in ((OrderedLoader, {}), (ShuffledLoader, {}), (ShuffledLoader, {"make_buffer": allocate})):
        kept, copies = [], []
        with kind(rows, batch_size=8, n_threads=2, **more) as loader:
            for number, batch in enumerate(itertools.chain(loader, loader)):
                batch["act"] += np.float32(number)  # his to write to
                held = batch["act"] if number % 3 else batch["act"][2:5].reshape(-1)[1:]
                if number % 2:
                    kept.append(held)
                    copies.append(held.copy())
        for held, copy in zip(kept, copies, strict=True):
            np.testing.assert_array_equal(held, copy)


def test_memory_is_used_again():
    made: list[int] = []

    def make(shape, dtype):
        made.append(1)
        return allocate(shape, dtype)

    pool = BufferPool((4, 3), n_kept=3, make=make)
    for _ in range(10):
        pool.get()[:2].fill(1)
    assert len(made) == 1
    held = [pool.get()[1:] for _ in range(5)]
    assert len(made) == 5
    assert len({array.ctypes.data for array in held}) == 5
    held.clear()
    pool.get()
    assert len(made) == 5


@pytest.mark.parametrize("kind", [OrderedLoader, ShuffledLoader])
def test_norms_are_scaled_alike_everywhere(store, plain, kind):
    rows = store.sel(layer=5, tokens="content")
    loader = kind(rows, batch_size=50, scale_norm=True)
    act = np.concatenate([batch["act"] for batch in loader])
    assert np.linalg.norm(act, axis=1).mean() == pytest.approx(np.sqrt(16), rel=1e-5)
    again = kind(rows, batch_size=10, scale_norm=True, rank=1, world=2)
    assert again.scale == loader.scale
    assert kind(rows).scale is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", [OrderedLoader, ShuffledLoader])
def test_the_factor_for_vectors_of_16_bits_is_not_of_16_bits(
    store: ShardStore, kind: type[OrderedLoader | ShuffledLoader], dtype: Any
) -> None:
    factor = 1.0033  # between two numbers of either dtype
    rows = store.sel(layer=5, dtype=dtype)
    with kind(rows, batch_size=50, scale_norm=factor) as scaled, kind(rows, batch_size=50) as as_read:
        for got, read in zip(scaled, as_read, strict=True):
            truth = (read["act"].astype(np.float32) * np.float32(factor)).astype(rows.dtype)
            np.testing.assert_array_equal(got["act"].view(np.uint16), truth.view(np.uint16))


def test_class_sorted_data_is_mixed():
    """A batch's effective number of classes is within 5 % of what a permutation of all rows gives."""
    n, tokens, n_classes, batch = 18_480, 16, 77, 2048
    layout = Layout(n, (0,), tokens, False, 1, 1000)
    classes = np.repeat(np.arange(n_classes), n // n_classes)
    acts = np.repeat(classes.astype("<f4"), tokens)
    files = {f"acts{i:06d}.bin": acts[i * 16_000 : (i + 1) * 16_000].tobytes() for i in range(layout.n_shards)}
    rows = Selection(Reader(MemoryTransport(files), layout), row_space(layout))
    rng = np.random.default_rng(0)
    whole = [effective(rng.permutation(acts)[:batch]) for _ in range(20)]
    # As many examples as the default window holds of ViT-B/16: a fifth of the data here.
    window = (2 << 30) // (196 * 768 * 4) * tokens * 4
    with ShuffledLoader(rows, batch_size=batch, window_bytes=window, drop_last=True) as loader:
        found = [effective(data["act"][:, 0]) for data in loader]
        quality = shuffle_quality(loader, n_batches=20)
    assert np.mean(found) > 0.95 * np.mean(whole)
    assert quality.distinct_examples == pytest.approx(quality.expected.distinct_examples, rel=0.03)
    assert 0 < quality.effective_examples <= quality.distinct_examples
    assert 0.95 < quality.entropy_share < 1.05  # a window shares out more evenly than chance


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("n_batches", [1, 2, 5, 100])
def test_quality_is_the_mean_over_the_batches_in_the_middle_of_an_epoch(n_batches: int, world: int) -> None:
    layout = Layout(40, (0,), 6, False, 1, 10)
    files = {f"acts{i:06d}.bin": bytes(10 * 6 * 4) for i in range(4)}
    rows = Selection(Reader(MemoryTransport(files), layout), row_space(layout))
    size = 12 // world
    with ShuffledLoader(rows, batch_size=size, window_blocks=7, rank=0, world=world) as loader:
        found = shuffle_quality(loader, n_batches=n_batches)
        n_full = 240 // 12
        middle = range(n_full // 4, n_full - n_full // 4)
        assert found.n_batches == min(n_batches, len(middle))
        if n_batches < len(middle):
            middle = np.unique(np.linspace(middle[0], middle[-1], n_batches).astype(int)).tolist()
        counts = [np.unique(loader.examples_of(number), return_counts=True)[1] for number in middle]
    shares = [each / size for each in counts]
    assert found.distinct_examples == pytest.approx(np.mean([len(each) for each in counts]))
    assert found.effective_examples == pytest.approx(np.mean([1 / (each**2).sum() for each in shares]))
    assert found.entropy_bits == pytest.approx(np.mean([-(each * np.log2(each)).sum() for each in shares]))


class Classes(NamedTuple):
    """Effective classes in batches of a loader, of a permutation of all rows, and as predicted."""

    found: float
    full: float
    predicted: float


def sorted_by_class(n: int, layer: int | str, counts: Sequence[int], **options: object) -> list[Classes]:
    """What batches in the middle of an epoch have of so many classes, by arithmetic.

    ViT-B/16 (197 tokens of 768 float32, three layers) over `n` images that lie in the order of their classes.
    """
    layout = Layout(n, (2, 5, 11), 196, True, 768, 3000)
    rows = Selection(Reader(Synthetic(), layout), row_space(layout, layer=layer, tokens="content"))
    with ShuffledLoader(rows, **options) as loader:
        middle = np.linspace(len(loader) // 4, 3 * len(loader) // 4, 4).astype(int).tolist()
        batches = [loader.examples_of(number) for number in middle]
        distinct = loader.explain().mixing.distinct_examples
    drawn = np.random.default_rng(0).integers(0, n, (10, len(batches[0])))
    return [
        Classes(
            float(np.mean([effective(batch * k // n) for batch in batches])),
            float(np.mean([effective(batch * k // n) for batch in drawn])),
            1 / (1 / k + (1 - 1 / k) / distinct),
        )
        for k in counts
    ]


def test_the_entropy_of_a_batch():
    rng = np.random.default_rng(0)
    even = batch_entropy(np.repeat(np.arange(50), 3), 50)
    assert (even.normalized, even.coverage) == (pytest.approx(1), 1)
    one = batch_entropy([7] * 20, 50)
    assert (one.nats, one.coverage) == (0, 0.02)
    drawn = rng.integers(0, 50, 200)
    share = np.array([np.mean(drawn == value) for value in range(50) if (drawn == value).any()])
    assert batch_entropy(drawn, 50).nats == pytest.approx(-sum(part * np.log(part) for part in share.tolist()))
    assert batch_entropy([0, 0], 1).normalized == 1
    for bad in (([], 5), ([0], 0)):
        with pytest.raises(ArgumentError, match="at least one"):
            batch_entropy(*bad)


def effective(values: np.ndarray) -> float:
    """Inverse Simpson index: how many equally frequent classes would be as mixed."""
    share = np.unique(values, return_counts=True)[1] / len(values)
    return 1 / (share**2).sum()


class Synthetic:
    """A store of any size: every vector says where it lies."""

    url, name, cost = "synthetic://", "synthetic", ReadCost(1 << 16, 1 << 20)
    is_local, local_path, reads_into, counters = False, None, False, Counters()

    def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        shard = int(path[4:10])
        return [
            np.stack(
                [np.full((end - start) // 16, shard), *np.divmod(np.arange(start // 16, end // 16), 1 << 12), np.ones((end - start) // 16)],
                axis=1,
            ).astype("<f4").tobytes()
            for start, end in zip(starts, ends, strict=True)
        ]  # fmt: skip

    def size(self, path: str) -> int:
        raise NotImplementedError

    read = close = size


def test_only_rows_of_the_window_are_in_memory(tmp_path):
    """The process grows by the budget, not by the data."""
    psutil = pytest.importorskip("psutil")
    plain = plain_store(tmp_path, n=300, layers=(1,), tokens=16, per_shard=100, d_model=1024)  # 20 MB
    rows = ShardStore.open(plain.path, engine="pread").sel(tokens="content")
    del plain
    budget, process = 4 << 20, psutil.Process()
    loader = ShuffledLoader(rows, batch_size=64, window_bytes=budget, n_threads=2)
    buffers = loader.explain().buffer_bytes
    for batch in loader:
        del batch
        break
    loader.close()
    before, most = process.memory_info().rss, 0
    for batch in loader:
        del batch
        most = max(most, process.memory_info().rss)
    # Tables for rows take 24 bytes each, and rounding a row for each block and a batch.
    assert loader.explain().window_bytes <= 1.1 * budget
    assert most - before < 1.1 * (budget + buffers) + (8 << 20)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0


def test_memory_grows_where_another_epoch_needs_more(tmp_path):
    """Long and short examples follow each other as the epoch will have it."""
    plain = plain_store(tmp_path, n=60, layers=(1,), tokens=8, per_shard=25, labels=True)
    store = ShardStore.open(plain.path)
    tokens = np.ones((60, 8), dtype=np.bool_)
    tokens[:30, 1:] = False
    loader = ShuffledLoader(
        store.sel(layer=1, tokens="content").only(tokens), batch_size=12, window_blocks=2, n_partitions=2
    )

    def needed(epoch: int) -> int:
        loader.set_epoch(epoch)
        return loader.explain().window_bytes

    least, most = min(range(20), key=needed), max(range(20), key=needed)
    assert needed(least) < needed(most)
    nbytes = []
    for epoch in (least, most, least):
        loader.set_epoch(epoch)
        assert sum(len(batch["act"]) for batch in loader) == 30 + 30 * 8
        nbytes.append(loader._ring.n_slots * 12 * (store.layout.vector_nbytes + TABLE_BYTES))
    assert nbytes[0] < needed(most) <= nbytes[1] == nbytes[2]


def test_labels_only_cost_what_is_kept(plain, store):
    """Blocks without kept rows are never read."""

    class Noted(Wrapper):
        seen: list[str] = []  # noqa: RUF012  # one list for all instances is what is wanted

        def _around(self, operation, nbytes, call):
            self.seen.append(operation)
            return call()

    labels = np.full((43, 7), 9, np.uint8)
    labels[20, 3] = 1
    labels[31, :2] = 1
    transport = Noted(in_memory(plain, labels_bin=labels.tobytes()))
    rows = ShardStore.open(transport).sel(layer=5, tokens="content", ignore_labels=[9])
    with ShuffledLoader(rows, batch_size=2) as loader:
        transport.seen.clear()
        found = rows_of(loader, plain, store, [5])
    assert sorted(found) == [(20, 1, 3), (31, 1, 0), (31, 1, 1)]
    assert len(transport.seen) <= 4


class Stalling(Wrapper):
    """Reads wait once so many bytes were asked for, until `goes_on` is set."""

    left, goes_on = 1 << 40, threading.Event()

    @property
    def cost(self):
        """Nothing is read that is not wanted."""
        return ReadCost(0, 1 << 20)

    def readinto(self, path, *, starts, buffers):
        Stalling.left -= sum(buffer.nbytes for buffer in buffers)
        if Stalling.left < 0:
            Stalling.goes_on.wait(60)
        super().readinto(path, starts=starts, buffers=buffers)

    def get_ranges(self, path, *, starts, ends):
        Stalling.left -= sum(ends) - sum(starts)
        if Stalling.left < 0:
            Stalling.goes_on.wait(60)
        return super().get_ranges(path, starts=starts, ends=ends)


class Waiting(Stalling):
    """Reads wait until they are told to go on; counts what was asked for."""

    asked, lock = 0, threading.Lock()

    def readinto(self, path, *, starts, buffers):
        Waiting.ask(sum(buffer.nbytes for buffer in buffers))
        super().readinto(path, starts=starts, buffers=buffers)

    def get_ranges(self, path, *, starts, ends):
        Waiting.ask(sum(ends) - sum(starts))
        return super().get_ranges(path, starts=starts, ends=ends)

    @staticmethod
    def ask(nbytes):
        with Waiting.lock:
            Waiting.asked += nbytes
        Stalling.goes_on.wait(60)


def settled(value) -> int:
    """A number that threads change, once it has not changed for a while."""
    seen = [-1] * 5
    while len(set(seen)) > 1 or seen[-1] <= 0:
        time.sleep(0.02)
        seen = [*seen[1:], value()]
    return seen[-1]


@pytest.mark.parametrize("window", [{"window_bytes": 1 << 20}, {"window_bytes": 1 << 30}])
def test_an_early_start_waits_for_a_few_batches(tmp_path, window):
    """Instead of half the window, or of all there is where the window holds that; the rest of the epoch is mixed as well."""
    store = ShardStore.open(plain_store(tmp_path, n=3000, tokens=7, per_shard=500, d_model=32).path)
    rows = store.sel(layer=5, tokens="content")
    late, early = (ShuffledLoader(rows, batch_size=256, early_start=start, **window) for start in (False, True))
    assert (
        ShuffledLoader(rows, early_start=np.True_, **window).state_dict()["early_start"] is True
    )  # NumPy's are booleans
    batch_bytes, whole = 256 * 32 * 4, min(window["window_bytes"], len(rows) * 32 * 4)
    assert late.explain().first_batch_bytes > whole / 3
    assert early.explain().first_batch_bytes < 4 * batch_bytes
    assert shuffle_quality(early).distinct_examples > 0.9 * shuffle_quality(late).distinct_examples
    # The window grows with what has been handed out: no example gives more than half its rows to the first batch.
    n_distinct = [len(np.unique(early.examples_of(batch))) for batch in (0, 2, 9)]
    assert n_distinct[0] > 1.5 * 256 / 7
    assert n_distinct[1] > 1.8 * n_distinct[0]
    assert n_distinct[2] > 0.9 * shuffle_quality(late).distinct_examples


@pytest.mark.parametrize("kind", [OrderedLoader, ShuffledLoader])
def test_an_empty_selection_is_an_empty_epoch(store, kind):
    rows = store.sel(layer=5, tokens="content", examples=[])
    loader: Loader = kind(rows, batch_size=4)
    assert len(loader) == 0
    assert list(loader) == []
    assert loader.epoch == 1
    assert str(loader.explain())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"n_threads": -1}, "n_threads is -1"),
        ({"prefetch_batches": 0}, "prefetch_batches is 0"),
        ({"rank": 2, "world": 2}, "rank is 2"),
        ({"batch_timeout_s": 0}, "batch_timeout_s is 0; it must be greater than 0"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"examples_per_block": 1.5}, "examples_per_block is 1.5"),
        ({"batch_timeout_s": "x"}, "batch_timeout_s is 'x'"),
        ({"scale_norm": "x"}, "scale_norm is 'x'"),
        ({"batch_size": 0, "read_bytes": -1}, "batch_size is 0.*read_bytes is -1"),
        ({"n_partitions": 512, "batch_size": 256, "rank": 0, "world": 2}, "301 rows cannot be shared"),
        ({"world": 2}, "no rank is given"),
        ({"rank": 2}, "rank is 2 in a world of 1"),
        ({"medium": "tape"}, "medium is 'tape'"),
        ({"scale_norm": -2.0}, "scale_norm is -2.0"),
        (
            {"scale_norm": 1e300},
            "scale_norm is 1e.300; .*it must be a factor that float32 holds, from 1.2e-38 to 3.4e.38",
        ),
        ({"scale_norm": 1e-300}, "scale_norm is 1e-300; .*it must be a factor that float32 holds"),
        ({"window_bytes": -5}, "window_bytes is -5"),
        ({"early_start": 1}, "early_start is 1"),
        ({"early_start": "yes"}, "early_start is 'yes'"),
        ({"n_partitions": 3, "batch_size": 8}, "n_partitions is 3"),
        ({"rank": 0, "world": 512, "batch_size": 1}, "cannot be shared"),
    ],
)
def test_bad_options_are_refused(store, options, message):
    with pytest.raises(ArgumentError, match=message):
        ShuffledLoader(store.sel(layer=5, tokens="content"), **options)


def test_more_batches_ahead_than_this_machine_has_room_for(store):
    rows, options = store.sel(layer=5, tokens="content"), {"batch_size": 64, "prefetch_batches": 10**13}
    with pytest.raises(ArgumentError, match="bytes of memory are needed") as refused:
        list(ShuffledLoader(rows, **options))
    assert refused.value.where == "window_bytes, batch_size, prefetch_batches"
    assert refused.value.remedy == "Use a smaller window, or smaller or fewer batches."
    with pytest.raises(ArgumentError, match="bytes of memory are needed") as refused:
        list(OrderedLoader(rows, batch_size=64, read_bytes=10**16))
    assert (refused.value.where, refused.value.remedy) == ("read_bytes", "Read fewer bytes at once.")
    # In storage order memory is made for the batches that there are.
    assert len(list(OrderedLoader(rows, **options))) == len(list(OrderedLoader(rows, **options, n_threads=1))) > 1


def test_ranks_come_from_the_environment(store, monkeypatch):
    """As torchrun and others set it, looked at when an iteration begins; what is given wins."""
    rows = store.sel(layer=5, tokens="content")

    def examples(loader: Loader) -> list[list[int]]:
        return [batch["example_idx"].tolist() for batch in loader]

    for kind in (OrderedLoader, ShuffledLoader):
        loader, given = kind(rows, batch_size=16), kind(rows, batch_size=16, rank=0, world=1)
        alone = examples(given)
        expected = [examples(kind(rows, batch_size=16, rank=rank, world=2)) for rank in range(2)]
        for rank in range(2):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", "2")
            loader.set_epoch(0)
            assert examples(loader) == expected[rank]
            assert (loader.rank, loader.world) == (rank, 2)
            given.set_epoch(0)
            assert examples(given) == alone
            assert kind(rows, world=2).rank == rank
        with pytest.raises(ArgumentError, match="world is 4.* 2 processes were found"):
            kind(rows, world=4)
        monkeypatch.setenv("RANK", "2")
        with pytest.raises(ArgumentError, match="RANK='2' and WORLD_SIZE='2'"):
            iter(loader)
        monkeypatch.delenv("WORLD_SIZE")
        assert kind(rows).world == 1
        monkeypatch.undo()


def test_a_value_that_breaks_several_rules_is_told_all_of_them(store):
    with pytest.raises(ArgumentError) as refused:
        OrderedLoader(store.sel(), scale_norm="x", batch_size=0)
    assert refused.value.where == "batch_size, scale_norm"
    assert refused.value.message == (
        "batch_size is 0; it must be greater than or equal to 1; "
        "scale_norm is 'x'; it must be a valid boolean, or it must be a valid number"
    )


def test_options_are_given_once(store):
    """As an object, as arguments, or both; a torch config is one."""
    rows = store.sel(layer=5, tokens="content")
    options = ShuffleOptions(batch_size=8, seed=3)
    one, two = ShuffledLoader(rows, options), ShuffledLoader(rows, batch_size=8, seed=3)
    assert one.state_dict() == two.state_dict()
    assert ShuffledLoader(rows, options, seed=4).state_dict() != one.state_dict()
    assert ReadArguments.__annotations__.keys() == {field.name for field in dataclasses.fields(ReadOptions)}
    assert ShuffleArguments.__annotations__.keys() == {field.name for field in dataclasses.fields(ShuffleOptions)}


def test_what_was_found_out_can_be_overruled(store):
    """Each choice that follows from the file system is shown, and can be made otherwise."""
    rows = store.sel(layer=5, tokens="content")
    # Copying is work for a core, and so is making batches.
    n_shuffled = min(4, max(1, n_cores() - 1))
    for kind, n_threads in ((OrderedLoader, 4), (ShuffledLoader, n_shuffled)):
        kept = {"n_threads": n_threads, "extent_bytes": 7 * 16 * 4}
        plan = kind(rows, medium="cached").explain()
        assert plan.medium == "cached"
        assert {name: getattr(plan, name) for name in kept} == kept
        assert kind(rows, medium="parallel").explain().n_threads == 16
        assert kind(rows, medium="parallel", n_threads=3).explain().n_threads == 3
    assert OrderedLoader(rows, read_bytes=128).explain().extent_bytes == 128
    assert ShuffledLoader(rows, examples_per_block=3).explain().examples_per_block == 3


def test_pages_are_kept_where_that_was_chosen(store):
    rows = store.sel(layer=5, tokens="content")
    for kind in (OrderedLoader, ShuffledLoader):
        assert kind(rows, medium="cached").explain().keeps_pages is True
        assert kind(rows, keep_pages=False).explain().keeps_pages is False
        assert "dropped" in str(kind(rows, keep_pages=False).explain())


def test_measures_add_up(plain, store):
    rows = store.sel(layer=5, tokens="content")
    loader = ShuffledLoader(rows, batch_size=16)
    assert loader.metrics().n_rows == 0
    n = sum(len(batch["act"]) for batch in loader)
    found = loader.metrics()
    assert (found.n_rows, found.n_batches) == (n, len(loader)) == (301, 19)
    assert found.bytes_read >= rows.nbytes
    assert found.rows_per_s == pytest.approx(n / found.elapsed_s)
    assert found.mb_per_s == pytest.approx(rows.nbytes / found.elapsed_s / 1e6)
    assert 0 < found.copy_s <= found.read_s
    assert 0 <= found.waited_s <= found.elapsed_s
    assert found.n_requests > 0
    assert found.n_retries == 0
    assert Path(plain.path).exists()
    assert loader.metrics() == found  # the clock stops with the epoch


def test_measures_of_an_epoch_that_was_left_stop_with_it(store):
    loader = OrderedLoader(store.sel(layer=5, tokens="content"), batch_size=16)
    batches = iter(loader)
    next(batches)
    batches.close()
    found = loader.metrics()
    assert (found.n_rows, found.n_batches) == (16, 1)
    assert loader.metrics() == found


def test_a_ring_lends_so_many_batches_and_then_gives_copies():
    """Slots that a consumer keeps are missing for reading ahead, so a few are lent; more batches have memory of their own."""
    ring = BatchRing(HostMemory, n_slots=2, n_lent=3, n_lanes=1, batch_rows=2, d_model=3)
    held = []
    for round_ in range(2):  # the second one begins while batches of the first are held
        ring.begin(10)
        for number in range(10, 20):
            assert ring.open(number + 2)
            for row in range(2):
                place = np.array([ring.first_row[number] + row])
                ring.memory.put(place, slice(None), np.full(3, 100 * round_ + number + row / 2, np.float32))
            held.append((100 * round_ + number, ring.hand_out(number, 2)))
            assert not ring.open(number + 6)
    for number, act in held:
        np.testing.assert_array_equal(act, np.float32([[number] * 3, [number + 0.5] * 3]))
    in_ring = [act for _, act in held if np.may_share_memory(act, ring.memory.lendable)]
    assert len(in_ring) == 3
    assert len({act.ctypes.data for _, act in held}) == len(held)
    del act, held, in_ring
    assert ring.open(20 + 5 - 1)


def test_a_far_store_is_read_further_ahead_and_that_is_told(store):
    """In memory that is bounded by what may be on the way, and is part of it; the order does not depend on it."""
    options = {"batch_size": 8, "window_blocks": 3, "n_partitions": 1, "n_threads": 2}
    rows = store.sel(layer=5, tokens="content")
    near = ShuffledLoader(rows, **options).explain()
    far = ShuffledLoader(rows, **options, medium="remote", examples_per_block=near.examples_per_block).explain()
    least = ShuffledLoader(
        rows, **options, medium="remote", examples_per_block=near.examples_per_block, read_bytes=1
    ).explain()
    assert near.window_bytes == far.window_bytes == least.window_bytes
    assert least.in_flight_bytes == 2
    assert 0 < far.in_flight_bytes - 2 * (8 << 20) <= 2 * far.window_bytes


@pytest.mark.parametrize("kind", [OrderedLoader, ShuffledLoader])
def test_metrics_count_each_scattered_row_of_mapped_shards(tmp_path: Path, kind: type):
    """A row that is copied out of a map is a request of its own."""
    store = ShardStore.open(token_store(tmp_path, n=60, content=16, per_shard=11).path)
    with kind(store.sel(layer=5, tokens="special"), batch_size=16) as loader:
        n_rows = sum(len(batch["act"]) for batch in loader)
        metrics = loader.metrics()
    assert (n_rows, metrics.n_requests, metrics.bytes_read) == (60, 60, 60 * store.layout.vector_nbytes)
