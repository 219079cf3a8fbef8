"""Runs, requests, media and ranks: the arithmetic between a batch and the reads that bring it, against lists."""

from __future__ import annotations

import os
from collections import deque

import numpy as np
import pytest
from api import MemoryTransport, PreadTransport
from plain_stores import Plain, plain_store
from transports import CountingTransport, Wrapper
from waiting import soon

from saev_store import ShardStore
from saev_store.core.layout import Layout
from saev_store.core.rows import row_space
from saev_store.errors import ArgumentError, CorruptShardError, MissingShardError, TransportError
from saev_store.loaders import OrderedLoader, ShuffledLoader, _medium, _reads, batch_entropy
from saev_store.loaders._iteration import Iteration
from saev_store.loaders._metrics import Totals
from saev_store.loaders._reads import Positions, Runs, cut, runs_of_planes
from saev_store.loaders.options import ReadOptions, ShuffleOptions, rank_and_world
from saev_store.loaders.ordered import runs_of_rows
from saev_store.transport import ReadCost

LAYOUT = Layout(9, (3, 7, 11), 4, True, 8, 3)


@pytest.fixture
def plain(tmp_path) -> Plain:
    return plain_store(tmp_path / "far", n=9, d_model=16, tokens=7)


def column(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def cells(runs: Runs) -> list[tuple[int, int, int]]:
    """(shard, vector, row of the target) of every vector."""
    return [
        (shard, vector + i, place + i)
        for shard, vector, place, n, _ in zip(*(values.tolist() for values in runs), strict=True)
        for i in range(n)
    ]


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("example", "layer", "token", "count", "place", "origin", "n_runs"),
    [
        ((0, 0), (0, 1), (0, 0), (5, 5), (0, 5), None, 1),
        ((0, 1), (2, 0), (0, 0), (5, 5), (0, 5), None, 1),
        ((2, 3), (2, 0), (0, 0), (5, 5), (0, 5), None, 2),  # the next shard
        ((0, 0), (0, 1), (0, 0), (4, 5), (0, 4), None, 2),  # a token is left out
        ((0, 0), (0, 1), (0, 1), (5, 4), (0, 5), None, 2),
        ((0, 0), (0, 1), (0, 0), (5, 5), (0, 6), None, 2),  # a row of the target is left out
        ((0, 0), (0, 1), (0, 0), (5, 5), (5, 0), None, 2),
        ((0, 0), (0, 1), (0, 0), (5, 5), (0, 5), (0, 1), 2),  # of another origin
        ((0, 0, 0), (0, 1, 2), (0, 0, 0), (5, 5, 5), (0, 5, 10), (0, 0, 1), 2),
        ((0, 0), (1, 0), (0, 0), (5, 5), (0, 5), None, 2),
        ((0, 3), (0, 1), (0, 0), (5, 5), (0, 5), None, 2),  # neighbours by number, in two shards
    ],
)
def test_runs_are_joined_where_both_sides_go_on(example, layer, token, count, place, origin, n_runs):
    where = Positions(column(*example), column(*layer), column(*token))
    runs = runs_of_planes(LAYOUT, where, column(*count), column(*place), None if origin is None else column(*origin))
    assert len(runs.shard) == n_runs
    expected = [
        (e // 3, ((e % 3) * 3 + la) * 5 + t + i, p + i)
        for e, la, t, n, p in zip(example, layer, token, count, place, strict=True)
        for i in range(n)
    ]
    assert sorted(cells(runs)) == sorted(expected)


@pytest.mark.parametrize("longest", [1, 2, 3, 4, 5, 6, 100])
def test_cut_runs_are_the_same_vectors(longest: int):
    runs = Runs(column(0, 0, 2), column(0, 10, 3), column(5, 0, 20), column(5, 1, 4), column(0, 1, 2))
    found = cut(runs, longest)
    assert sorted(cells(found)) == sorted(cells(runs))
    assert int(found.n_vectors.max()) == min(longest, 5)
    assert int(found.n_vectors.min()) >= 1


@pytest.mark.parametrize("select", [{}, {"layer": 7}, {"tokens": "content"}, {"layer": [11, 3], "tokens": "special"}])
def test_rows_of_any_range(select: dict[str, object]):
    """From inside a plane to inside another one, and past the end, where the last row is repeated."""
    space = row_space(LAYOUT, **select)
    n = len(space)
    for start in (0, 1, 4, 5, n - 6, n - 1):
        for stop in {start, start + 1, start + 4, start + 5, start + 11, n - 1, n, n + 3}:
            if stop < start:
                continue
            where, runs, to = runs_of_rows(space, start, stop)
            assert to is None
            rows = [min(row, n - 1) for row in range(start, stop)]
            expected = [tuple(int(axis) for axis in space.locate(row)) for row in rows]
            assert list(zip(*(axis.tolist() for axis in where), strict=True)) == expected
            places = [((e % 3) * 3 + la) * 5 + t for e, la, t in expected]
            wanted = [(e // 3, place, row) for row, ((e, _, _), place) in enumerate(zip(expected, places, strict=True))]
            assert sorted(cells(runs), key=lambda cell: cell[2]) == wanted


# -- requests ----------------------------------------------------------------------------------------------------------


class Far(MemoryTransport):
    """Memory that is read like a bucket."""

    is_local = False
    reads_into = False

    def __init__(self, files: dict[str, bytes], gap: float) -> None:
        super().__init__(files)
        self.cost = ReadCost(gap, 1 << 20)


@pytest.mark.parametrize("at_once", [1, 2, 3, 1000])
@pytest.mark.parametrize("kind", [OrderedLoader, ShuffledLoader])
def test_however_many_requests_are_made_at_once(at_once: int, kind: type, plain: Plain, monkeypatch):
    monkeypatch.setattr(_reads, "SMALL_RUN_BYTES", 1)  # else such short runs are gathered vector by vector
    monkeypatch.setattr(_reads, "_REQUESTS_AT_ONCE", at_once)
    store = ShardStore.open(PreadTransport(plain.path))
    rows = store.sel(layer=[2, 11], tokens="content")
    found = {}
    for batch in kind(rows, batch_size=10, n_threads=2):
        for row, key in enumerate(zip(batch["example_idx"], batch["layer"], batch["token_idx"], strict=True)):
            found[key] = batch["act"][row].tobytes()
    layers = (2, 5, 11)
    assert len(found) == len(rows)
    for (example, layer, token), vector in found.items():
        assert vector == plain.acts[example, layers.index(layer), token + 1].tobytes()


@pytest.mark.parametrize("small_run_bytes", [1, _reads.SMALL_RUN_BYTES])
@pytest.mark.parametrize("engine", ["mmap", "pread"])
@pytest.mark.parametrize("kind", [OrderedLoader, ShuffledLoader])
def test_examples_that_are_left_are_read_to_the_last(
    kind: type, engine: str, small_run_bytes: int, plain: Plain, monkeypatch
):
    """In runs, and vector by vector."""
    monkeypatch.setattr(_reads, "SMALL_RUN_BYTES", small_run_bytes)
    os.truncate(plain.shard(1), 2 * plain.example_nbytes)
    store = ShardStore.open(plain.path, engine=engine, damaged_ok=True)
    for layer in ("all", 11):
        whole = store.sel(layer=layer, examples=[0, 1, 2, 3, 4, 6, 7, 8])
        batches = list(kind(whole, batch_size=9, n_threads=2))
        assert sum(len(batch["act"]) for batch in batches) == len(whole)
        with pytest.raises(CorruptShardError, match="example 5 was lost"):
            list(kind(store.sel(layer=layer, examples=[3, 4, 5]), batch_size=9, n_threads=2))


class Failing(Wrapper):
    """Fails some reads of shards."""

    def __init__(self, inner, errors: list[Exception]) -> None:
        super().__init__(inner)
        self.errors = deque(errors)

    def _around(self, operation, nbytes, call):
        if operation == "get_ranges" and self.errors and self.armed:
            raise self.errors.popleft()
        return call()

    armed = False


@pytest.mark.parametrize("n_failures", [0, 1, 3, 9])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_read_is_tried_for_a_time(n_failures: int, is_late: bool, plain: Plain, monkeypatch):
    monkeypatch.setattr(_reads, "_FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(_reads, "_RETRY_S", -1.0 if is_late else 1000.0)
    monkeypatch.setattr(_reads, "SMALL_RUN_BYTES", 1)
    files = {path.name: path.read_bytes() for path in plain.path.iterdir()}
    far = Failing(Far(files, 1 << 20), [TransportError("busy", where="x", transient=True)] * n_failures)
    with pytest.warns(match="renamed|no recipe"):
        store = ShardStore.open(far)
    _ = store[0]  # sizes are known
    rows = store.sel(layer=5, examples=[0])
    far.armed = True
    loader = OrderedLoader(rows, batch_size=100, n_threads=1)
    if n_failures < 2 or not is_late:  # once, however long the first try took
        (batch,) = loader
        assert batch["act"].tobytes() == plain.acts[0, 1].tobytes()
    else:
        with pytest.raises(TransportError, match="busy"):
            list(loader)
    assert loader.metrics().n_retries == (min(n_failures, 1) if is_late else n_failures)


@pytest.mark.parametrize("small_run_bytes", [1, _reads.SMALL_RUN_BYTES])
@pytest.mark.parametrize("kind", [OrderedLoader, ShuffledLoader])
def test_a_shard_that_is_gone_is_named_with_its_examples(kind: type, small_run_bytes: int, plain: Plain, monkeypatch):
    monkeypatch.setattr(_reads, "SMALL_RUN_BYTES", small_run_bytes)
    store = ShardStore.open(plain.path, engine="pread")
    plain.shard(1).unlink()
    with pytest.raises(MissingShardError, match="the shard of examples 3 to 5 is missing"):
        list(kind(store.sel(layer=5), batch_size=8, n_threads=1))


@pytest.mark.parametrize("order", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (0, 0, 1)])
def test_a_failure_among_reads_is_told_whatever_ends_after_it(order: tuple[int, ...]):
    """Else a batch would be handed out with rows that were never read."""
    iteration = Iteration(1, 2, Totals(32), helps=False)

    def fails() -> None:
        raise TransportError("broken", where="x")

    group = iteration.read([((lambda: None) if is_right else fails, "x") for is_right in order])
    try:
        assert soon(lambda: group.n_left == 0)
        with pytest.raises(TransportError, match="broken"):
            iteration.wait(group)
    finally:
        iteration.close()


@pytest.mark.skipif(not _medium.TAKES_ADVICE, reason="this system takes no advice")
@pytest.mark.parametrize("keeps", [True, False])
def test_pages_that_are_not_kept_are_dropped_to_the_last(keeps: bool, plain: Plain, monkeypatch):
    monkeypatch.setattr(_reads, "SMALL_RUN_BYTES", 1)
    dropped: dict[int, list[tuple[int, int]]] = {}

    def after(_: object, shard: int, starts: list[int], ends: list[int]) -> None:
        dropped.setdefault(shard, []).extend(zip(starts, ends, strict=True))

    monkeypatch.setattr(_medium.Advice, "after", after)
    rows = ShardStore.open(plain.path, engine="pread").sel(layer=5)
    for batch in OrderedLoader(rows, batch_size=9, n_threads=2, medium="flash", keep_pages=keeps):
        del batch
    if keeps:
        assert dropped == {}
        return
    plane = 8 * 16 * 4
    found = {(shard, byte) for shard, spans in dropped.items() for start, end in spans for byte in range(start, end)}
    wanted = {(e // 3, ((e % 3) * 3 + 1) * plane + byte) for e in range(9) for byte in range(plane)}
    assert wanted <= found


@pytest.mark.skipif(not _medium.TAKES_ADVICE, reason="this system takes no advice")
@pytest.mark.parametrize("leaves", ["at the end", "in the middle"])
@pytest.mark.parametrize("kind", [OrderedLoader, ShuffledLoader])
def test_others_read_as_before_once_an_iteration_has_ended(kind: type, leaves: str, plain: Plain, monkeypatch):
    said = dict[int, int]()

    def advise(fd: int, start: int, length: int, advice: int) -> None:
        if (start, length) == (0, 0):
            said[os.fstat(fd).st_ino] = advice

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(_reads, "SMALL_RUN_BYTES", 1)
    loader = kind(ShardStore.open(plain.path, engine="pread").sel(layer=5), batch_size=9, n_threads=2, medium="flash")
    batches = iter(loader)
    next(batches)
    assert set(said.values()) == {os.POSIX_FADV_RANDOM}
    if leaves == "at the end":
        list(batches)
    else:
        loader.close()
    assert set(said.values()) == {os.POSIX_FADV_NORMAL}


# -- media and ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "kind"), [(0.94, "flash"), (0.95, "cached"), (1.0, "cached"), (None, "flash")])
def test_a_store_is_cached_from_that_share_of_its_pages_on(share: float | None, kind: str, plain: Plain, monkeypatch):
    monkeypatch.setattr(_medium, "_mount", lambda _: ("ext4", "8:0"))
    monkeypatch.setattr(_medium, "_spins", lambda _: False)
    monkeypatch.setattr(_medium, "_cached_share", lambda *_: share)
    store = ShardStore.open(plain.path)
    assert _medium.medium_of(store.transport, store.layout).kind == kind
    assert (
        _medium.medium_of(CountingTransport(store.transport), store.layout).kind == kind
    )  # what is around it lies nowhere
    assert _medium.medium_of(store.transport, store.layout, "disk").kind == "disk"


@pytest.mark.parametrize(("factor", "keeps"), [(0.5, True), (1.5, True), (2.0, True), (2.01, False)])
def test_pages_of_stores_much_larger_than_memory_are_dropped(factor: float, keeps: bool, tmp_path, monkeypatch):
    memory = 1 << 20
    monkeypatch.setattr(
        _medium.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": memory // 4096}[name]
    )
    n_examples = round(factor * memory / 64)
    layout = Layout(n_examples, (0,), 1, False, 16, 1000)
    assert _medium.Advice(str(tmp_path), layout, None).drops_pages is not keeps
    for said in (True, False):
        assert _medium.Advice(str(tmp_path), layout, said).drops_pages is not said


@pytest.mark.parametrize(
    ("rank", "world", "environment", "found"),
    [
        (None, None, {}, (0, 1)), (None, 1, {}, (0, 1)), (None, 1, {"RANK": "1", "WORLD_SIZE": "2"}, (0, 1)),
        (None, None, {"RANK": "1", "WORLD_SIZE": "2"}, (1, 2)), (None, 2, {"RANK": "1", "WORLD_SIZE": "2"}, (1, 2)),
        (0, None, {"RANK": "1", "WORLD_SIZE": "2"}, (0, 2)), (2, 3, {"RANK": "1", "WORLD_SIZE": "2"}, (2, 3)),
        (0, None, {}, (0, 1)), (None, None, {"RANK": "1"}, (0, 1)), (None, None, {"WORLD_SIZE": "2"}, (0, 1)),
        (1, None, {}, None), (2, 2, {}, None), (2, None, {"RANK": "1", "WORLD_SIZE": "2"}, None), (None, 2, {}, None),
        (None, 3, {"RANK": "1", "WORLD_SIZE": "2"}, None), (None, None, {"RANK": "2", "WORLD_SIZE": "2"}, None),
        (None, None, {"RANK": "-1", "WORLD_SIZE": "2"}, None), (None, None, {"RANK": "x", "WORLD_SIZE": "2"}, None),
    ],
)  # fmt: skip
def test_ranks_are_given_or_found(rank, world, environment, found, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if found is None:
        with pytest.raises(ArgumentError):
            rank_and_world(rank, world)
    else:
        assert rank_and_world(rank, world) == found


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (ReadOptions, {"early_start": True}, "ReadOptions has no option early_start; it is one of ShuffleOptions"),
        (ShuffleOptions, {"windw_bytes": 1}, "ShuffleOptions has no option windw_bytes; is window_bytes meant?"),
        (ShuffleOptions, {"batchsize": 1, "rank": -1}, "rank is -1; .*has no option batchsize; is batch_size meant?"),
        (ReadOptions, {"xyzzy": 1}, "ReadOptions has no option xyzzy$"),
        (ReadOptions, {"drop_last": "yes"}, "drop_last is 'yes'; it must be a valid boolean"),
        (ReadOptions, {"drop_last": 1}, "drop_last is 1; it must be a valid boolean"),
        (ReadOptions, {"keep_pages": "no"}, "keep_pages is 'no'; it must be a valid boolean"),
    ],
)
def test_what_is_said_of_bad_options(kind: type, options: dict[str, object], said: str):
    with pytest.raises(ArgumentError, match=said.replace("?", r"\?")):
        kind(**options)


def test_booleans_of_numpy_are_booleans():
    assert ReadOptions(drop_last=np.True_, keep_pages=np.False_) == ReadOptions(drop_last=True, keep_pages=False)


def test_misspelled_options_show_no_value():
    """It may be a credential."""
    for name in ("storage_option", "strorage_options", "options"):
        with pytest.raises(ArgumentError) as refused:
            ReadOptions(batch_size=8, **{name: {"secret": "hunter2"}})
        assert name in str(refused.value)
        assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(("n_rows", "is_right"), [(7, False), (8, True), (9, True)])
def test_every_partition_has_a_row_where_ranks_repeat_their_last(n_rows: int, is_right: bool, tmp_path):
    plain = plain_store(tmp_path, n=n_rows, layers=(2,), tokens=1, cls=False)
    rows = ShardStore.open(plain.path).sel()
    options = {"batch_size": 4, "rank": 0, "world": 2, "n_partitions": 8}
    if is_right:
        assert len(list(ShuffledLoader(rows, **options))) == len(ShuffledLoader(rows, **options))
    else:
        with pytest.raises(ArgumentError, match="7 rows cannot be shared by 8 partitions"):
            ShuffledLoader(rows, **options)
    assert len(ShuffledLoader(rows, **options, drop_last=True)) == n_rows // 8


@pytest.mark.parametrize("batch_size", [8, 12])
def test_examples_of_a_batch_are_those_that_it_holds(batch_size: int, plain: Plain):
    loader = ShuffledLoader(ShardStore.open(plain.path).sel(layer=5), batch_size=batch_size, n_partitions=2)
    foretold = [loader.examples_of(number).tolist() for number in range(len(loader))]
    assert [batch["example_idx"].tolist() for batch in loader] == foretold
    for batch in (-1, len(loader), None, 1.5, "x", True):
        with pytest.raises(ArgumentError, match="batch"):
            loader.examples_of(batch)


@pytest.mark.parametrize("kind", [OrderedLoader, ShuffledLoader])
def test_labels_of_another_shape_or_type_are_refused(plain: Plain, kind):
    """Those with a column for special tokens, or of another store, would be wrong ones."""
    rows = ShardStore.open(plain.path).sel(layer=5, tokens="all")
    n_examples, n_tokens = rows.space.layout.n_examples, rows.space.layout.content_tokens_per_example
    for shape in (
        (n_examples, n_tokens + 1),
        (n_examples + 2, n_tokens),
        (n_examples, n_tokens - 1),
        (n_examples * n_tokens,),
    ):
        with pytest.raises(ArgumentError, match="labels"):
            kind(rows, batch_size=8, labels=np.ones(shape, np.uint8))
    for labels in (np.ones((n_examples, n_tokens), np.int64), np.ones((n_examples, n_tokens)), 5):
        with pytest.raises(ArgumentError, match="labels"):
            kind(rows, batch_size=8, labels=labels)


@pytest.mark.parametrize(
    ("indices", "n", "nats", "normalized", "coverage"),
    [
        ([0], 1, 0.0, 1.0, 1.0),
        ([0], 2, 0.0, 0.0, 0.5),
        ([0, 1], 2, np.log(2), 1.0, 1.0),
        ([0, 1], 4, np.log(2), 0.5, 0.5),
    ],
)
def test_the_entropy_of_small_batches(indices, n, nats, normalized, coverage):
    found = batch_entropy(indices, n)
    assert (found.nats, found.normalized, found.coverage) == pytest.approx((nats, normalized, coverage))
    for bad in (([], n), (indices, 0), (indices, -1)):
        with pytest.raises(ArgumentError):
            batch_entropy(*bad)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/data/x", ("xfs", "8:2")), ("/data", ("xfs", "8:2")), ("/data2/x", ("ext4", "8:0")), ("/data/fast/x", ("tmpfs", "0:5")),
        ("/data/faster", ("xfs", "8:2")), ("/with space/x", ("nfs4", "0:9")), ("/", ("ext4", "8:0")),
    ],
)  # fmt: skip
def test_the_last_and_longest_mount_of_a_path_counts(path: str, found: tuple[str, str], monkeypatch):
    lines = [
        "1 0 8:0 / / rw - ext4 /dev/sda rw",
        "2 1 8:1 / /data rw - ext4 /dev/sdb rw",
        "3 1 8:2 / /data rw shared:1 - xfs /dev/sdc rw",  # mounted over it
        "4 3 0:5 / /data/fast rw - tmpfs tmpfs rw",
        r"5 1 0:9 / /with\040space rw - nfs4 server:/x rw",
        "nonsense",
    ]
    monkeypatch.setattr(_medium.Path, "read_text", lambda *_, **__: "\n".join(lines))
    monkeypatch.setattr(_medium.os.path, "realpath", lambda given: given)
    assert _medium._mount(path) == found


def test_partitions_of_a_state_are_shared_by_all_ranks(plain: Plain):
    """Three streams divide a batch of twelve, but not two ranks."""
    rows = ShardStore.open(plain.path).sel(layer=5)
    state = ShuffledLoader(rows, batch_size=12, n_partitions=3).state_dict()
    for rank in range(2):
        loader = ShuffledLoader(rows, batch_size=6, rank=rank, world=2)
        with pytest.raises(ArgumentError, match="n_partitions = 3, which 2 rank"):
            loader.load_state_dict(state)
    three = [ShuffledLoader(rows, batch_size=4, rank=rank, world=3) for rank in range(3)]
    for loader in three:
        loader.load_state_dict(state)
    found = [next(iter(loader))["act"] for loader in three]
    whole = next(iter(ShuffledLoader(rows, batch_size=12, n_partitions=3)))["act"]
    assert np.concatenate(found).tobytes() == whole.tobytes()
    for loader in three:
        loader.close()
