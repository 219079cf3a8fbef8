"""Closer copies: staged layers and cached extents hand out the same rows, and damage to them never shows."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from interrupting import interrupting_deletions
from plain_stores import Plain, plain_store
from token_stores import token_store
from transports import CountingTransport

from saev_store import ShardStore
from saev_store.errors import (
    ArgumentError,
    DeadlineError,
    LayerNotFoundError,
    StoreExistsError,
    TransportError,
    WriterConflictError,
)
from saev_store.loaders import CachedTransport, OrderedLoader, ShuffledLoader, stage, stage_in_background, staging
from saev_store.loaders.staging import open_for_training
from saev_store.transport import MemoryTransport, PreadTransport, open_transport
from saev_store.writer.copying import copy_store


@pytest.fixture
def plain(tmp_path) -> Plain:
    return plain_store(tmp_path / "far", n=24, tokens=7, per_shard=5, d_model=640)


def acts(loader) -> np.ndarray:
    return np.concatenate([batch["act"] for batch in loader])


def test_a_staged_layer_continues_what_the_whole_store_began(plain, tmp_path):
    near = stage(plain.path, tmp_path / "near", layers=5)
    assert sum(path.stat().st_size for path in os.scandir(near)) < 0.5 * plain.acts.nbytes
    assert ShardStore.open(near).layers == (5,)
    options = {"batch_size": 16, "seed": 1, "window_blocks": 2}
    far = ShuffledLoader(ShardStore.open(plain.path).sel(layer=5, tokens="content"), **options)
    whole = acts(far)
    far.set_epoch(0)
    iterator = iter(far)
    first = [next(iterator)["act"] for _ in range(3)]
    loader = ShuffledLoader(ShardStore.open(near).sel(layer=5, tokens="content"), **options)
    loader.load_state_dict(far.state_dict())
    far.close()
    np.testing.assert_array_equal(np.concatenate([*first, acts(loader)]), whole)


@pytest.mark.parametrize("to", ["", "$NOTHING"])
def test_an_empty_folder_is_not_the_root_of_the_disk(plain, monkeypatch, to):
    monkeypatch.setenv("NOTHING", "")
    monkeypatch.setattr(staging, "open_transport", lambda url: pytest.fail(f"it would be staged to {url}"))
    with pytest.raises(ArgumentError, match=f"to is '{re.escape(to)}', which is empty") as refused:
        stage(plain.path, to)
    assert refused.value.where == "to"


@pytest.mark.parametrize(("tokens", "n_tokens"), [("content", 7), ("special", 2), ("all", 8)])
def test_only_the_tokens_that_are_trained_on_are_staged(plain, tmp_path, tokens, n_tokens):
    """And a state that was begun on the whole store goes on with them."""
    near = stage(plain.path, tmp_path / "near", layers=5, tokens=tokens)
    assert ShardStore.open(near).shape == (24, 1, n_tokens, 640)
    options = {"batch_size": 8, "seed": 1, "window_blocks": 2}
    far = ShuffledLoader(ShardStore.open(plain.path).sel(layer=5, tokens=tokens), **options)
    whole = list(far)
    far.set_epoch(0)
    next(iter(far))
    loader = ShuffledLoader(ShardStore.open(near).sel(layer=5, tokens=tokens), **options)
    loader.load_state_dict(far.state_dict())
    for expected, found in zip(whole[1:], loader, strict=True):
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values)


def test_several_processes_stage_once(plain, tmp_path):
    """Everybody asks, everybody gets the same copy; asking again costs nothing."""
    futures = [stage_in_background(plain.path, tmp_path / "near", layers=[2, 11]) for _ in range(3)]
    assert len({future.result(180) for future in futures}) == 1
    again = stage(plain.path, tmp_path / "near", layers=[2, 11])
    np.testing.assert_array_equal(ShardStore.open(again)[:, 1], plain.acts[:, 2])
    with pytest.raises(LayerNotFoundError):
        stage_in_background(plain.path, tmp_path / "near", layers=3).result(180)


def record_anew(plain: Plain) -> np.ndarray:
    """Other vectors under the same metadata; what they are."""
    plain.acts[:] *= 2
    for shard_idx in range(plain.n_shards):
        (np.fromfile(plain.shard(shard_idx), "<f4") * 2).tofile(plain.shard(shard_idx))
    return plain.acts


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize("layers", [5, "all"])
def test_a_new_recording_replaces_the_staged_copy(plain, tmp_path, layers, digests):
    """Also while the old copy is read; a copy that is of this recording is used again."""
    if digests:
        plain.write_digests(1 << 20)
    near = stage(plain.path, tmp_path / "near", layers=layers)
    old = ShardStore.open(near)
    before = old[:]
    expected = before.copy()
    truth = record_anew(plain)
    if digests:
        plain.write_digests(1 << 20)
    futures = [stage_in_background(plain.path, tmp_path / "near", layers=layers) for _ in range(3)]
    assert {future.result(180) for future in futures} == {near}
    np.testing.assert_array_equal(ShardStore.open(near)[:], truth if layers == "all" else truth[:, [1]])
    np.testing.assert_array_equal(before, expected)
    inode = os.stat(near).st_ino
    assert stage(plain.path, tmp_path / "near", layers=layers) == near
    assert os.stat(near).st_ino == inode
    assert not [name for name in os.listdir(tmp_path / "near") if "stale" in name]


@pytest.mark.parametrize("layers", [5, "all"])
def test_another_mask_replaces_the_staged_copy(tmp_path, layers):
    """The vectors are the same, and their files were not touched."""
    store = token_store(tmp_path / "far", dtype="float16", arrays={"mask": "bool"})
    near = stage(store.path, tmp_path / "near", layers=layers)
    mask = ~store.arrays["mask"]
    (store.path / "mask.bin").write_bytes(mask.tobytes())
    assert stage(store.path, tmp_path / "near", layers=layers) == near
    np.testing.assert_array_equal(ShardStore.open(near).token_arrays["mask"], mask)


def test_a_store_that_was_not_staged_is_never_replaced(plain, tmp_path):
    near = copy_store(plain.path, tmp_path / "near", layers=[5])
    plain.write_digests(1 << 20)
    record_anew(plain)
    plain.write_digests(1 << 20)
    found = ShardStore.open(near)[:]
    with suppress(StoreExistsError):
        stage(plain.path, tmp_path / "near", layers=5)
    np.testing.assert_array_equal(ShardStore.open(near)[:], found)


def test_waiting_for_another_process_ends_at_the_deadline(plain, tmp_path, monkeypatch):
    n_waits = []

    def wait(_seconds: float) -> None:
        n_waits.append(1)
        assert len(n_waits) < 5, "waited on"

    monkeypatch.setattr("saev_store.loaders.staging.time.sleep", wait)
    root = open_transport(tmp_path / "near")
    with root.at(plain.path.name).lock(".saev_store/locks/copy.lock"):
        with pytest.raises(DeadlineError, match="another process has been copying the store for 0 s"):
            stage(plain.path, tmp_path / "near", timeout_s=0)
        assert not n_waits
    assert ShardStore.open(stage(plain.path, tmp_path / "near", timeout_s=0)).name == plain.path.name


@pytest.mark.filterwarnings("ignore:.*the folder is named")
def test_a_cache_of_files_without_versions_is_of_one_recording(tmp_path):
    """Other metadata at the same address: what was kept of the earlier store is not read."""
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for seed in (0, 1):
        plain = plain_store(tmp_path / str(seed), d_model=640, seed=seed)
        for path in plain.path.iterdir():
            memory.pipe(f"/{tmp_path.name}/store/{path.name}", path.read_bytes())
        store = open_for_training(
            f"memory://{tmp_path.name}/store",
            None,
            layer=5,
            tokens="content",
            use_tmpdir=False,
            cache_dir=str(tmp_path / "cache"),
            cache_bytes=1 << 30,
        )
        np.testing.assert_array_equal(store[:, 1], plain.acts[:, 1])


def test_tmpdir(plain, tmp_path, monkeypatch):
    options = {"layer": 5, "tokens": "content", "use_tmpdir": True, "cache_dir": None, "cache_bytes": 1}
    monkeypatch.delenv("TMPDIR", raising=False)
    assert open_for_training(str(plain.path), None, **options).url == ShardStore.open(plain.path).url
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    assert str(tmp_path / "scratch") in open_for_training(str(plain.path), None, **options).url


def cached(plain: Plain, folder, max_bytes: int = 1 << 30):
    far = CountingTransport(PreadTransport(plain.path))
    near = CachedTransport(far, folder, max_bytes, b"key")
    return far, near, ShardStore.open(near).sel(layer=5, tokens="content")


@pytest.mark.parametrize("kind", [OrderedLoader, ShuffledLoader])
def test_a_second_epoch_reads_nothing_from_afar(plain, tmp_path, kind):
    far, near, rows = cached(plain, tmp_path / "cache")
    loader = kind(rows, batch_size=16, n_threads=3, **({"examples_per_block": 1} if kind is ShuffledLoader else {}))
    one = acts(loader)
    read = far.counters.bytes_read
    assert near.hits == 0
    loader.set_epoch(0)
    np.testing.assert_array_equal(acts(loader), one)
    assert far.counters.bytes_read == read
    assert near.hits > 0
    # Another process, later.
    far, near, rows = cached(plain, tmp_path / "cache")
    again = kind(rows, batch_size=16, n_threads=3, **({"examples_per_block": 1} if kind is ShuffledLoader else {}))
    np.testing.assert_array_equal(acts(again), one)
    assert far.counters.bytes_read < 5000  # the documents


def test_a_damaged_cache_never_shows(plain, tmp_path):
    _, _, rows = cached(plain, tmp_path / "cache")
    one = acts(OrderedLoader(rows, batch_size=16))
    for number, path in enumerate(sorted((tmp_path / "cache").rglob("acts*"))):
        if number % 3 == 0:
            os.truncate(path, path.stat().st_size // 2)
        elif number % 3 == 1:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    _, near, rows = cached(plain, tmp_path / "cache")
    np.testing.assert_array_equal(acts(OrderedLoader(rows, batch_size=16)), one)
    assert near.hits > 0
    assert near.misses > 0


def test_gaps_are_kept_as_they_are(plain, tmp_path):
    """What one reader throws away of an extent is there for the next one who wants all of it."""
    _, near, _ = cached(plain, tmp_path / "cache")
    truth = plain.shard(0).read_bytes()[100:400]
    first, last, junk = (memoryview(bytearray(100)) for _ in range(3))
    near.readinto("acts000000.bin", starts=[100, 200, 300], buffers=[first, junk, last])
    junk[:] = bytes(100)
    (whole,) = near.get_ranges("acts000000.bin", starts=[100], ends=[400])
    assert near.hits == 1
    assert bytes(whole) == truth


def test_the_budget_is_kept(plain, tmp_path):
    budget = 200_000
    _, near, rows = cached(plain, tmp_path / "cache", budget)
    loader = ShuffledLoader(rows, batch_size=16, examples_per_block=1)
    acts(loader)
    acts(loader)
    on_disk = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("acts*"))
    assert 0 < on_disk <= near.kept_bytes <= budget
    assert near.hits > 0
    assert not list((tmp_path / "cache").rglob("*.tmp"))


def most_hits(reads: list[str], capacity: int) -> int:
    """Hits of the best cache there can be: all reads are known, and what is read last of all goes, or is not kept."""
    kept: set[str] = set()
    following: dict[str, list[int]] = {}
    for at, name in reversed(list(enumerate(reads))):
        following.setdefault(name, []).append(at)
    hits = 0
    for name in reads:
        following[name].pop()
        hits += name in kept
        kept.add(name)
        if len(kept) > capacity:
            kept.remove(max(kept, key=lambda one: following[one][-1] if following[one] else len(reads)))
    return hits


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("kind", [OrderedLoader, ShuffledLoader])
def test_no_other_rule_has_more_hits(tmp_path, kind, share):
    """Also when the folder is full of what another training read."""
    plain = plain_store(tmp_path / "far", n=120, layers=(2, 5), tokens=7, per_shard=50, d_model=640)
    extent, capacity = 7 * 640 * 4 + 16, int(120 * share)
    reads: list[str] = []

    class Noted(CachedTransport):
        def get_ranges(self, path, *, starts, ends):
            reads.extend(f"{path} {start}" for start in starts)
            return super().get_ranges(path, starts=starts, ends=ends)

    near = Noted(PreadTransport(plain.path), tmp_path / "cache", capacity * extent)
    store = ShardStore.open(near)
    more = {"window_blocks": 2, "n_partitions": 1, "examples_per_block": 1} if kind is ShuffledLoader else {}
    for layer in (2, 5):
        # One thread, and one block per read, so that what happened first is known.
        loader = kind(
            store.sel(layer=layer, tokens="content"), batch_size=7, n_threads=1, read_bytes=7 * 640 * 4, **more
        )
        reads.clear()
        hits = near.hits
        for _ in range(4):
            acts(loader)
            assert near.kept_bytes <= capacity * extent
        assert len(reads) == 4 * 120
        assert near.hits - hits == most_hits(reads, capacity) == 3 * capacity


def test_several_processes_share_the_budget(plain, tmp_path):
    """Each with a transport of its own, as ranks of one machine have."""
    extent = 7 * 640 * 4 + 16
    budget = 10 * extent
    transports = [CachedTransport(PreadTransport(plain.path), tmp_path / "cache", budget, b"key") for _ in range(3)]
    options = {"batch_size": 8, "n_partitions": 4, "examples_per_block": 1}
    loaders = [
        ShuffledLoader(ShardStore.open(near).sel(layer=5, tokens="content"), seed=seed, **options)
        for seed, near in enumerate(transports)
    ]
    for _ in range(3):
        for batches in zip(*loaders, strict=True):
            del batches
        on_disk = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("acts*"))
        assert on_disk == transports[0].kept_bytes <= budget
    assert sum(near.hits for near in transports) > 0
    truth = np.sort(plain.acts[:, 1, 1:].reshape(-1, 640)[:, 0])
    np.testing.assert_array_equal(np.sort(acts(loaders[0])[:, 0]), truth)


def test_two_that_keep_the_same_extent_at_once_count_it_once(plain, tmp_path, monkeypatch):
    first, second = (CachedTransport(PreadTransport(plain.path), tmp_path / "cache", 100_000, b"key") for _ in range(2))
    reserved = first._reserved

    def and_meanwhile(*arguments):
        found = reserved(*arguments)
        second.get_ranges("acts000000.bin", starts=[0], ends=[6400])
        return found

    monkeypatch.setattr(first, "_reserved", and_meanwhile)
    first.get_ranges("acts000000.bin", starts=[0], ends=[6400])
    on_disk = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("acts*"))
    assert on_disk == first.kept_bytes == second.kept_bytes == 6416


def test_one_that_comes_while_another_keeps_an_extent_counts_it(plain, tmp_path, monkeypatch):
    """Whatever the first has done so far of keeping it, and of making room for it."""
    arguments = (PreadTransport(plain.path), tmp_path / "cache", 6416, b"key")
    first = CachedTransport(*arguments)
    steps = ["remove", "reserve", "place"]
    for step in steps:
        do = getattr(first._ledger, step)

        def and_then(*given, do=do):
            CachedTransport(*arguments)
            found = do(*given)
            CachedTransport(*arguments)
            return found

        monkeypatch.setattr(first._ledger, step, and_then)
    first.get_ranges("acts000000.bin", starts=[0], ends=[6400])
    assert first.kept_bytes == 6416
    first.get_ranges("acts000000.bin", starts=[6400], ends=[12_800])
    on_disk = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("acts*"))
    assert on_disk == first.kept_bytes == 6416
    assert (first.hits, first.misses) == (0, 2)


def test_a_folder_that_cannot_be_used_is_said(plain, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArgumentError, match="cannot be used"):
        cached(plain, tmp_path / "file")
    assert threading.active_count() >= 1


def test_all_that_says_what_to_stage_is_handed_on(plain, tmp_path, monkeypatch):
    calls = []

    def recorded(url, to, **options):
        calls.append((url, to, options))
        return str(plain.path)

    monkeypatch.setattr(staging, "stage", recorded)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    given = {"tokens": "content", "storage_options": {"region": "here"}}
    some = {"use_tmpdir": True, "cache_dir": None, "cache_bytes": 1}
    staging.open_for_training("s3://b/s", {"region": "here"}, layer=5, tokens="content", **some).close()
    assert staging.stage_in_background("s3://b/s", tmp_path, layers=(5, 2), **given).result() == str(plain.path)
    assert calls == [
        ("s3://b/s", "$TMPDIR", {"layers": 5, **given}),
        ("s3://b/s", tmp_path, {"layers": (5, 2), **given}),
    ]


@pytest.mark.parametrize("layers", [5, "all"])
@pytest.mark.parametrize("stops_at", [1, 2, 3])
def test_a_stale_copy_whose_removal_was_interrupted_is_removed(plain, tmp_path, monkeypatch, layers, stops_at):
    """Where folders cannot be renamed: its metadata goes first, and the rest file by file."""
    to = f"memory://near-{layers}-{stops_at}"
    assert len(ShardStore.open(stage(plain.path, to, layers=layers))) == 24
    truth = record_anew(plain)
    with pytest.raises(KeyboardInterrupt), interrupting_deletions(monkeypatch, stops_at) as deleted:
        stage(plain.path, to, layers=layers)
    assert deleted[0] == "metadata.json"
    found = ShardStore.open(stage(plain.path, to, layers=layers))
    np.testing.assert_array_equal(found[:], truth if layers == "all" else truth[:, [1]])


@pytest.mark.parametrize("change", ["anew", "repaired"])
def test_layers_that_were_staged_in_part_are_staged_again_of_another_recording(plain, tmp_path, monkeypatch, change):
    from saev_store.writer.copying import _layers

    def killed(*_, **__):
        raise KeyboardInterrupt

    plain.write_digests(256)
    with monkeypatch.context() as changed, pytest.raises(KeyboardInterrupt):
        changed.setattr(_layers, "check_unchanged", killed)
        stage(plain.path, tmp_path / "near", layers=5)
    truth = plain.acts[:, [1]]
    if change == "anew":
        truth = record_anew(plain)[:, [1]]
        plain.write_digests(256)
    else:
        (plain.path / "digests.json").unlink()
    np.testing.assert_array_equal(ShardStore.open(stage(plain.path, tmp_path / "near", layers=5))[:], truth)


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("layers", [5, "all"])
def test_a_folder_of_staged_copies_may_be_cleaned(plain, tmp_path, layers):
    """Without its mark a copy of an earlier recording was somebody's store, and never replaced."""
    from saev_store.writer import clean_leftovers

    near = stage(plain.path, tmp_path / "near", layers=layers)
    (leftover,) = clean_leftovers(tmp_path / "near", older_than_s=0).leftovers
    assert "of which recording" in leftover.kept_because
    truth = record_anew(plain)
    assert stage(plain.path, tmp_path / "near", layers=layers) == near
    np.testing.assert_array_equal(ShardStore.open(near)[:], truth[:, [1]] if layers == 5 else truth)


def test_a_stale_copy_in_a_bucket_is_removed_only_while_the_lease_lasts(plain):
    """A process that was suspended in between would remove what another one has made meanwhile."""
    root = MemoryTransport()
    for name in ("metadata.json", "acts000000.bin", "acts000001.bin"):
        root.put(f"x/{name}", b"1")
    lease = SimpleNamespace(is_ours=lambda: "x/metadata.json" in root.files)
    with pytest.raises(WriterConflictError):
        staging._remove(root, "x", lease)
    assert sorted(root.files) == ["x/acts000000.bin", "x/acts000001.bin"]


def test_a_removal_in_memory_that_was_interrupted_is_finished(plain, monkeypatch):
    """There is no lease where all writers are in one process."""
    to = "memory://saev-stage-removal"
    near = stage(plain.path, to, layers=5)
    record_anew(plain)
    with monkeypatch.context() as changed, pytest.raises(KeyboardInterrupt):
        changed.setattr(staging, "_remove", interrupted)
        stage(plain.path, to, layers=5)
    open_transport(to).delete(f"{near.rpartition('/')[2]}/metadata.json")
    assert ShardStore.open(stage(plain.path, to, layers=5, timeout_s=5))[:].tobytes() == plain.acts[:, [1]].tobytes()


@pytest.mark.parametrize("layers", [5, "all"])
def test_copies_of_two_sources_with_the_same_metadata_do_not_replace_each_other(plain, tmp_path, layers):
    """Who reads the first copy would get the vectors of the second source."""
    plain.write_digests(256)
    near = stage(plain.path, tmp_path / "near", layers=layers)
    other = tmp_path / "other" / plain.path.name
    shutil.copytree(plain.path, other)
    assert stage(other, tmp_path / "near", layers=layers) == near  # of the same recording
    truth = plain.acts.copy()
    anew = Plain(other, plain.acts, plain.per_shard, plain.labels, plain.arrays)
    record_anew(anew)
    anew.write_digests(256)
    with pytest.raises(StoreExistsError, match="of another recording"):
        stage(other, tmp_path / "near", layers=layers)
    np.testing.assert_array_equal(ShardStore.open(near)[:], truth[:, [1]] if layers == 5 else truth)


@pytest.mark.parametrize("to", ["", "$EMPTY", "${EMPTY}", "$EMPTY/x", "${EMPTY}/", None, 3], ids=repr)
def test_a_folder_to_stage_in_is_no_empty_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: object):
    """What stands behind it would begin at the root of the disk."""
    monkeypatch.setenv("EMPTY", "")
    with pytest.raises(ArgumentError, match="must be a folder or an address") as refused:
        stage(plain_store(tmp_path).path, to)
    assert refused.value.where == "to"


@pytest.mark.parametrize("by", ["clean", "stage"])
def test_an_older_copy_that_was_moved_aside_before_a_kill_goes(plain, tmp_path, monkeypatch, by):
    from saev_store.writer import clean_leftovers

    to = tmp_path / "near"
    stage(plain.path, to)
    truth = record_anew(plain)

    def killed(*_: object, **__: object):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", killed)
        stage(plain.path, to)
    (aside,) = (path for path in to.iterdir() if path.is_dir())
    assert list(ShardStore.list(to)) == []  # what is to be deleted is no store
    if by == "clean":
        found = {each.path: each.nbytes for each in clean_leftovers(to, older_than_s=0).leftovers}
        assert found[aside.name] > plain.acts.nbytes
    near = ShardStore.open(stage(plain.path, to))
    np.testing.assert_array_equal(near[...], truth)
    assert [path for path in to.iterdir() if path.is_dir()] == [to / Path(near.url).name]


def test_an_older_copy_that_cannot_be_moved_aside_is_told_by_our_error(plain, tmp_path, monkeypatch):
    near = stage(plain.path, tmp_path / "near")
    truth = record_anew(plain)
    rename = os.rename

    def failing(old, new):
        if "/near/" in os.fspath(old) and os.path.isdir(old):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(old, new)

    with (
        monkeypatch.context() as patch,
        pytest.raises(TransportError, match=r"could not move aside: .* \(EIO\)") as told,
    ):
        patch.setattr(os, "rename", failing)
        stage(plain.path, tmp_path / "near")
    assert told.value.where == near
    np.testing.assert_array_equal(ShardStore.open(stage(plain.path, tmp_path / "near"))[...], truth)


def test_an_older_copy_that_cannot_be_deleted_whole_is_left_to_the_next_call(plain, tmp_path, monkeypatch):
    stage(plain.path, tmp_path / "near")
    truth = record_anew(plain)

    def failing(*_: object, **__: object):  # `ignore_errors` does not cover that the folder's status cannot be read
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(shutil, "rmtree", failing)
    np.testing.assert_array_equal(ShardStore.open(stage(plain.path, tmp_path / "near"))[...], truth)
