"""Edges of loaders, states, caches and staging: each promise by itself, quickly."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from api import MemoryTransport
from plain_stores import Plain, plain_store
from transports import CountingTransport, Wrapper
from waiting import HANG_S

from saev_store import SaevStoreWarning, ShardStore
from saev_store.errors import ArgumentError
from saev_store.loaders import (
    NO_LABEL,
    OrderedLoader,
    ShuffledLoader,
    stage,
    staging,
)
from saev_store.loaders.staging import Lease
from saev_store.writer import copying

NAME = "acts000000.bin"
KINDS = {"ordered": (OrderedLoader, {}), "shuffled": (ShuffledLoader, {"window_blocks": 3, "n_partitions": 2})}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def plain(tmp_path) -> Plain:
    return plain_store(tmp_path / "far", n=24, tokens=7, per_shard=5, d_model=16, labels=True)


def make(plain: Plain, kind: str, *, select: dict[str, object] | None = None, labelled: bool = False, **options):
    store = ShardStore.open(plain.path)
    cls, more = KINDS[kind]
    rows = store.sel(**(select or {"layer": 5, "tokens": "content"}))
    return cls(rows, labels=store.labels if labelled else None, **{"batch_size": 8, "n_threads": 2, **more, **options})


def acts(batches) -> list[bytes]:
    return [batch["act"].tobytes() for batch in batches]


# -- epochs and states -------------------------------------------------------------------------------------------------


@every_kind
def test_an_epoch_that_is_chosen_begins_at_its_beginning(plain, kind):
    """Also after a state was loaded, and after an iteration that was left."""
    loader = make(plain, kind)
    whole, later = acts(loader), acts(loader)
    loader.load_state_dict({**loader.state_dict(), "epoch": 1, "batch": 3})
    assert (loader.epoch, loader.next_batch) == (1, 3)
    loader.set_epoch(np.int64(0))
    assert (loader.epoch, loader.next_batch) == (0, 0)
    assert acts(loader) == whole
    iterator = iter(loader)
    next(iterator)
    assert loader.next_batch == 1
    loader.set_epoch(1)
    assert not loader.is_iterating
    assert (loader.epoch, loader.next_batch) == (1, 0)
    assert acts(loader) == later
    # A state that names an epoch of more than 63 bits could not be loaded again.
    for wrong in (-1, 2**63, True, 1.0, None, "1"):
        with pytest.raises(ArgumentError, match="epoch is"):
            loader.set_epoch(wrong)
    assert loader.epoch == 2
    loader.set_epoch(np.int64(7))
    assert loader.epoch == 7


@every_kind
def test_the_number_of_the_next_batch_follows_what_is_handed_out(plain, kind):
    loader = make(plain, kind)
    n = len(loader)
    for first in (0, 3):
        loader.load_state_dict({**loader.state_dict(), "epoch": 0, "batch": first})
        iterator = iter(loader)
        assert loader.next_batch == first
        for number in range(first, n):
            next(iterator)
            assert (loader.epoch, loader.next_batch) == ((1, 0) if number == n - 1 else (0, number + 1))
        with pytest.raises(StopIteration):
            next(iterator)
        assert (loader.epoch, loader.next_batch) == (1, 0)


@every_kind
def test_a_state_is_used_once(plain, kind):
    """The epoch after it begins at its beginning."""
    loader = make(plain, kind)
    whole = [acts(loader), acts(loader)]
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "batch": 5})
    assert acts(loader) == whole[0][5:]
    assert acts(loader) == whole[1]


@every_kind
@pytest.mark.parametrize("behind", [-1, 0, 1])
def test_a_state_at_the_last_batch(plain, kind, behind):
    loader = make(plain, kind)
    n = len(loader)
    state = {**loader.state_dict(), "batch": n + behind}
    if behind > 0:
        with pytest.raises(ArgumentError, match="batch"):
            loader.load_state_dict(state)
        return
    loader.load_state_dict(state)
    assert (loader.epoch, loader.next_batch) == ((1, 0) if behind == 0 else (0, n - 1))


@every_kind
def test_a_state_of_an_empty_epoch(plain, kind):
    loader = make(plain, kind, select={"layer": 5, "examples": []})
    for epoch in range(2):
        state = loader.state_dict()
        assert (state["epoch"], state["batch"]) == (epoch, 0)
        loader.load_state_dict(state)
        assert loader.epoch == epoch
        assert list(loader) == []


@every_kind
def test_a_loaded_state_is_the_loaders_own(plain, kind, monkeypatch):
    """What the caller does with the dict afterwards changes nothing; another number of ranks looks at it again."""
    loader = make(plain, kind, batch_size=4, world=None)
    state = {**loader.state_dict(), "batch": 2}
    loader.load_state_dict(state)
    state.clear()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for _ in range(2):
        with pytest.raises(ArgumentError, match="global_batch_size"):
            len(loader)


@every_kind
@pytest.mark.parametrize(
    "name", ["version", "kind", "rows", "n_rows", "global_batch_size", "drop_last", "epoch", "batch"]
)
def test_everything_in_a_state_counts(plain, kind, name):
    """What is missing is refused as what is wrong is."""
    loader = make(plain, kind)
    state = loader.state_dict()
    for wrong in ({**state, name: "x"}, {key: value for key, value in state.items() if key != name}):
        with pytest.raises(ArgumentError, match=name):
            loader.load_state_dict(wrong)


def test_states_tell_selections_apart(tmp_path):
    """Of any two of these, each with as many rows as the other, neither continues the other's state."""
    store = ShardStore.open(plain_store(tmp_path / "a", n=24, tokens=4, per_shard=5).path)
    longer = ShardStore.open(plain_store(tmp_path / "b", n=25, tokens=4, per_shard=5).path)
    wider = ShardStore.open(plain_store(tmp_path / "c", n=24, tokens=4, per_shard=5, d_model=16).path)
    bare = ShardStore.open(plain_store(tmp_path / "d", n=24, tokens=5, cls=False, per_shard=5).path)
    some = list(range(12))
    rows = [
        store.sel(layer=5, examples=slice(12)),
        store.sel(layer=2, examples=slice(12)),
        store.sel(layer=5, examples=slice(12, 24)),
        store.sel(layer=5, examples=slice(0, 24, 2)),
        store.sel(layer=5, examples=slice(11, None, -1)),
        store.sel(layer=5, examples=[*some[1:], 0]),
        store.sel(layer=5, examples=[*some[2:], 0, 1]),
        longer.sel(layer=5, examples=slice(12)),
        wider.sel(layer=5, examples=slice(12)),
        bare.sel(layer=5, examples=slice(12)),
    ]
    assert len({len(each) for each in rows}) == 1
    states = [OrderedLoader(each, batch_size=4).state_dict() for each in rows]
    assert len({state["rows"] for state in states}) == len(rows)


def test_a_scale_comes_from_the_state(plain):
    """Not from a sample that would be taken anew."""
    first, second = (make(plain, "ordered", scale_norm=True) for _ in range(2))
    state = first.state_dict()
    assert state["scale"] == first.scale
    second.load_state_dict({**state, "scale": 2 * state["scale"]})
    assert second.scale == 2 * first.scale
    np.testing.assert_allclose(next(iter(second))["act"], 2 * next(iter(first))["act"], rtol=1e-6)
    for loader in (first, second):
        loader.close()


@pytest.mark.parametrize("n", [1, 2, 127, 128, 129, 300])
def test_the_scale_of_few_rows_is_that_of_all_of_them(tmp_path, n):
    """Rows whose norm is known: sqrt(d_model) over the mean norm of what is sampled, here everything."""
    plain = plain_store(tmp_path, n=n, layers=(5,), tokens=1, cls=False, d_model=16, per_shard=7)
    norms = np.linalg.norm(plain.acts.reshape(-1, 16).astype(np.float64), axis=1)
    scale = OrderedLoader(ShardStore.open(plain.path).sel(), batch_size=4, scale_norm=True).scale
    assert scale == pytest.approx(4 / norms.mean(), rel=1e-12)


def test_zeros_have_no_scale(tmp_path):
    plain = plain_store(tmp_path, n=3, layers=(5,))
    plain.shard(0).write_bytes(bytes(plain.shard(0).stat().st_size))
    loader = OrderedLoader(ShardStore.open(plain.path).sel(), batch_size=4, scale_norm=True)
    with pytest.raises(ArgumentError, match="mean norm of .* is 0.0"):
        _ = loader.scale


@every_kind
def test_iterating_again_ends_the_iteration_before(plain, kind):
    """And begins at the beginning of the epoch, however far the other one was."""
    loader = make(plain, kind)
    whole = acts(loader)
    loader.set_epoch(0)
    first = iter(loader)
    for _ in range(3):
        next(first)
    second = iter(loader)
    assert loader.next_batch == 0
    with pytest.raises(ArgumentError, match="closed"):
        next(first)
    assert acts(second) == whole


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forked children here")
@every_kind
def test_a_forked_child_makes_no_batches(plain, kind):
    loader = make(plain, kind)
    iterator = iter(loader)
    next(iterator)
    assert loader.is_iterating
    child = os.fork()
    if child == 0:
        os._exit(0 if not loader.is_iterating else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    loader.close()
    assert not loader.is_iterating


def test_a_loader_that_refused_a_state_is_as_it_was(tmp_path):
    """Its order, and the memory that it plans for."""
    store = ShardStore.open(plain_store(tmp_path, n=400, tokens=7, per_shard=50, d_model=64).path)
    rows = store.sel(layer=5, tokens="content")
    options = {"batch_size": 28, "seed": 3, "n_partitions": 1}
    large = ShuffledLoader(rows, window_blocks=300, **options)
    small = ShuffledLoader(rows, window_bytes=120_000, **options)
    before, plan, whole = small.state_dict(), small.explain(), acts(small)
    for changed in ({}, {"n_partitions": 3}, {"examples_per_block": 0}, {"window_blocks": 0}):
        with pytest.raises(ArgumentError):
            small.load_state_dict({**large.state_dict(), **changed})
        assert small.state_dict() == {**before, "epoch": 1}
        small.set_epoch(0)
        assert small.explain().window_bytes == plan.window_bytes
        assert acts(small) == whole


# -- batches -----------------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("layers", [[5], [2, 11], [11, 2, 5]])
@pytest.mark.parametrize("tokens", ["content", "special", "all"])
def test_what_comes_with_the_vectors(plain, kind, layers, tokens):
    loader = make(plain, kind, select={"layer": layers, "tokens": tokens}, labelled=True)
    labels = (2, 5, 11)
    n_rows = 0
    for batch in loader:
        assert ("layer" in batch) == (len(layers) > 1)
        assert ("token_labels" in batch) == (tokens != "special")
        layer = batch.get("layer", np.full(len(batch["act"]), layers[0]))
        for row, (example, label, token) in enumerate(
            zip(batch["example_idx"], layer, batch["token_idx"], strict=True)
        ):
            assert label in layers
            assert batch["act"][row].tobytes() == plain.acts[example, labels.index(label), token + 1].tobytes()
            if tokens != "special":
                expected = NO_LABEL if token < 0 else plain.labels[example, token]
                assert batch["token_labels"][row] == expected
        n_rows += len(layer)
    assert n_rows == loader.n_samples


@every_kind
def test_options_of_reading_are_used(plain, kind):
    loader = make(plain, kind, n_threads=3, read_bytes=1 << 10, prefetch_batches=5)
    assert loader.explain().n_threads == loader.n_threads == 3
    for prefetch in (1, 2, 5):
        loader = make(plain, kind, prefetch_batches=prefetch)
        iterator = iter(loader)
        next(iterator)
        deadline = time.monotonic() + HANG_S
        while loader.metrics().batches_ready < prefetch:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert loader.metrics().batches_ready == prefetch
        loader.close()
    usual = make(plain, kind, prefetch_batches=None)
    assert usual.explain().buffer_bytes == make(plain, kind, prefetch_batches=2).explain().buffer_bytes


@every_kind
def test_closing_gives_back_all_memory(plain, kind):
    """Batches that are held stay as they are; a loader that was closed makes the same ones anew."""
    loader = make(plain, kind)
    whole = acts(loader)
    loader.set_epoch(0)
    iterator = iter(loader)
    held = [next(iterator) for _ in range(2)]
    loader.close()
    assert not loader.is_iterating
    assert getattr(loader, "_pool", None) is None
    assert getattr(loader, "_ring", None) is None
    assert not loader._scratch
    loader.set_epoch(0)
    assert acts(loader) == whole
    assert acts(held) == whole[:2]


# -- the cache ---------------------------------------------------------------------------------------------------------


# -- staging -----------------------------------------------------------------------------------------------------------


def test_patience_differs_from_process_to_process():
    """From that many looks on, to below twice as many, so that usually one of several takes the lease."""
    found = {Lease(MemoryTransport(), "x")._patience for _ in range(300)}
    assert staging.PATIENCE <= min(found) < staging.PATIENCE + 10
    assert 2 * staging.PATIENCE - 10 <= max(found) < 2 * staging.PATIENCE


def test_a_lease_that_another_process_has_taken_is_left_to_it(monkeypatch):
    monkeypatch.setattr(staging, "BEAT_S", 3600.0)
    place = MemoryTransport()
    with Lease(place, "x") as ours:
        assert ours
        place.put("x", b"another's")
    assert place.read("x") == b"another's"


def test_looks_that_find_a_change_begin_anew(monkeypatch):
    """So many looks in a row, and not altogether."""
    monkeypatch.setattr(staging, "BEAT_S", 3600.0)
    monkeypatch.setattr(staging.secrets, "randbelow", lambda _: 0)
    monkeypatch.setattr(staging, "PATIENCE", 3)
    place, looks = MemoryTransport(), []
    lease = Lease(place, "x")
    for content in (b"1", b"1", b"1", b"2", b"2", b"2", b"2"):
        place.put("x", content)
        with lease as ours:
            looks.append(ours)
    assert looks == [False] * 6 + [True]


def test_a_copy_in_a_bucket_goes_with_its_metadata_first():
    """A reader that comes meanwhile finds no store, and not one with holes."""
    deleted: list[str] = []

    class Bucket(MemoryTransport):
        is_local = False

        def delete(self, path: str) -> None:
            deleted.append(path)
            super().delete(path)

    place = Bucket({f"copy/{name}": b"x" for name in ("acts000000.bin", "labels.bin", "metadata.json", "shards.json")})
    staging._remove(place, "copy", None)
    assert deleted[0].endswith("metadata.json")
    assert place.list() == []


def test_a_copy_that_another_process_has_replaced_meanwhile_stays(plain, tmp_path, monkeypatch):
    """Two see that the copy is of an old recording; the second gets the lease when the first is done."""
    bucket, opened = MemoryTransport(), staging.open_transport
    bucket.is_local = False

    def there(url, options=None, **more):
        return bucket if str(url).startswith("bucket://") else opened(url, options, **more)

    monkeypatch.setattr(staging, "open_transport", there)
    monkeypatch.setattr(copying, "open_transport", there)
    monkeypatch.setattr(staging, "_POLL_S", 0.001)
    name = stage(plain.path, "bucket://near", layers=5).rpartition("/")[2]
    np.multiply(plain.acts, 2, out=plain.acts)
    for shard in range(plain.n_shards):
        (np.fromfile(plain.shard(shard), "<f4") * 2).tofile(plain.shard(shard))
    removed: list[str] = []
    remove, enter = staging._remove, Lease.__enter__

    def noted(root, name: str, lease: Lease | None) -> None:
        removed.append(name)
        remove(root, name, lease)

    def after_another(lease: Lease) -> bool:
        monkeypatch.setattr(Lease, "__enter__", enter)
        stage(plain.path, "bucket://near", layers=5)
        return enter(lease)

    monkeypatch.setattr(staging, "_remove", noted)
    monkeypatch.setattr(Lease, "__enter__", after_another)
    stage(plain.path, "bucket://near", layers=5)
    assert removed == [name]
    assert ShardStore.open(bucket.at(name))[:].tobytes() == plain.acts[:, [1]].tobytes()


def test_only_who_has_the_lease_replaces_a_copy_on_a_disk(plain, tmp_path, monkeypatch):
    """Making one needs none: a lock of the system, which ends with its process, guards that."""
    entered: list[int] = []
    enter = Lease.__enter__

    def noted(lease: Lease) -> bool:
        entered.append(1)
        return enter(lease)

    monkeypatch.setattr(Lease, "__enter__", noted)
    for n_leases, factor in ((0, 1), (0, 1), (1, 2), (1, 1)):
        for shard in range(plain.n_shards if factor > 1 else 0):
            (np.fromfile(plain.shard(shard), "<f4") * factor).tofile(plain.shard(shard))
        near = stage(plain.path, tmp_path / "near", layers=5)
        assert len(entered) == n_leases
    assert ShardStore.open(near)[:].tobytes() == (2 * plain.acts[:, [1]]).tobytes()


# -- transports around others ------------------------------------------------------------------------------------------


class Waits(Wrapper):
    """A transport around another one, as a rate limit is."""

    def _around(self, operation, nbytes, call):
        return call()


def test_memory_behind_a_limit_is_waited_for(plain):
    """What makes batches then leaves reading to the threads, which may be waiting."""
    files = {path.name: path.read_bytes() for path in plain.path.iterdir()}
    with pytest.warns(SaevStoreWarning):
        direct = ShardStore.open(MemoryTransport(files))
    with pytest.warns(SaevStoreWarning):
        limited = ShardStore.open(Waits(CountingTransport(MemoryTransport(files))))
    for store, copies in ((direct, True), (limited, False)):
        loader = OrderedLoader(store.sel(layer=5), batch_size=8)
        assert loader._reads_are_copies is copies
        assert b"".join(acts(loader)) == plain.acts[:, 1].tobytes()
