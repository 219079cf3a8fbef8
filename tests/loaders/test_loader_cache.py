"""Cached extents belong to one version of a file, and neither forks nor a folder that is gone stop anybody who reads."""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from plain_stores import Plain, plain_store
from servers import Bucket, s3_bucket  # noqa: F401 (one is a fixture)
from waiting import HANG_S

from saev_store import ShardStore
from saev_store.errors import ArgumentError, CorruptShardError, DeadlineError, TransportError
from saev_store.loaders import CachedTransport, OrderedLoader, cache
from saev_store.loaders._ledger import Ledger
from saev_store.transport import MemoryTransport, MmapTransport, PreadTransport, open_transport
from saev_store.transport.fsspec import _transport

NAME = "acts000000.bin"


@pytest.fixture
def plain(tmp_path) -> Plain:
    return plain_store(tmp_path / "far", n=24, tokens=7, per_shard=5, d_model=640)


def forked(work: Callable[[], object]) -> int:
    """A child's process number; it ends with 0 where `work` returned, and by a signal where that never happened."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return child


def test_a_child_that_is_forked_while_bytes_are_counted_blocks_nobody(tmp_path):
    ledger = Ledger(str(tmp_path / ".bytes"))
    waits, ends = os.pipe()
    child = ledger._locked(lambda _: forked(lambda: os.read(waits, 1)))
    try:
        with open(tmp_path / ".bytes") as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.write(ends, b"x")
        os.waitpid(child, 0)
        os.close(waits)
        os.close(ends)


def test_a_lock_of_another_process_is_not_waited_for_without_end(plain, tmp_path, monkeypatch):
    """Making a cache says who has the lock; reading goes on without keeping, and keeps again once the lock is free."""
    monkeypatch.setattr("saev_store.loaders._ledger._LOCK_WAIT_S", 0.1)
    arguments = (PreadTransport(plain.path), tmp_path / "cache", 1 << 20)
    near = CachedTransport(*arguments)
    (ledger,) = (tmp_path / "cache").rglob(".bytes")
    locked, ends = os.pipe(), os.pipe()

    def lock() -> None:
        with open(ledger) as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            os.write(locked[1], b"x")
            os.read(ends[0], 1)

    child = forked(lock)
    try:
        os.read(locked[0], 1)
        with pytest.raises(DeadlineError, match=rf"process {child} has locked the file for more than 0.1 s"):
            CachedTransport(*arguments)
        assert near.kept_bytes == 0
        assert head(near) == plain.shard(0).read_bytes()[:64]
    finally:
        os.write(ends[1], b"x")
        os.waitpid(child, 0)
        for fd in (*locked, *ends):
            os.close(fd)
    assert near.kept_bytes == 0
    assert head(near) == plain.shard(0).read_bytes()[:64]
    assert near.kept_bytes == 64 + 16


def test_a_lock_that_was_waited_for_in_vain_is_only_tried_until_it_is_free(tmp_path, monkeypatch):
    """Or each extent that cannot be kept would cost the whole wait."""
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr("saev_store.loaders._ledger.time", clock)
    path = tmp_path / ".bytes"
    path.touch()
    ledger, waited_s = Ledger(str(path)), []
    for tries in (2, 1):
        with open(path) as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            for _ in range(tries):
                with pytest.raises(DeadlineError):
                    ledger.get()
                waited_s.append(round(sum(slept)))
        assert ledger.get() == 0
    assert waited_s == [10, 10, 20]


def test_an_unlock_that_fails_leaves_no_lock_behind(tmp_path, monkeypatch):
    ledger = Ledger(str(tmp_path / ".bytes"))
    real = fcntl.flock

    def fails(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_UN:
            raise OSError(5, "injected")
        real(fd, operation)

    with monkeypatch.context() as changed:
        changed.setattr(fcntl, "flock", fails)
        with pytest.raises(OSError, match="injected"):
            ledger.get()
    assert ledger.get() == 0


def test_a_child_that_is_forked_while_room_is_made_can_read(plain, tmp_path):
    near = CachedTransport(PreadTransport(plain.path), tmp_path / "cache", 1 << 20)
    with near._lock.mutex:
        child = forked(lambda: near.get_ranges(NAME, starts=[0], ends=[64]))
    assert os.waitpid(child, 0)[1] == 0


def test_a_folder_that_is_removed_stops_nobody(plain, tmp_path):
    near = CachedTransport(PreadTransport(plain.path), tmp_path / "cache", 1 << 20)
    rows = ShardStore.open(near).sel(layer=5, tokens="content")
    expected = np.concatenate([batch["act"] for batch in OrderedLoader(rows, batch_size=16)])
    assert near.kept_bytes > 0
    shutil.rmtree(tmp_path / "cache")
    found = np.concatenate([batch["act"] for batch in OrderedLoader(rows, batch_size=16)])
    np.testing.assert_array_equal(found, expected)
    assert near.kept_bytes == 0


@pytest.mark.parametrize("failing", ["write", "rename"])
def test_an_extent_that_cannot_be_kept_gives_its_room_back(plain, tmp_path, monkeypatch, failing):
    """Such as on a disk that is full: reading goes on, and later there is room again."""
    near = CachedTransport(PreadTransport(plain.path), tmp_path / "cache", 64 + 16)
    with monkeypatch.context() as patch:
        if failing == "write":

            def opened(name, mode, **more):
                return open(os.devnull, "rb", **more) if mode == "r+b" else open(name, mode, **more)

            patch.setattr(cache, "open", opened, raising=False)
        else:
            patch.setattr(Ledger, "place", lambda *_: os.rename(tmp_path / "no", tmp_path / "where"))
        assert head(near) == plain.shard(0).read_bytes()[:64]
    assert near.kept_bytes == 0
    assert [path.name for path in tmp_path.glob("cache/*/*") if path.name != ".bytes"] == []
    for _ in range(2):
        assert head(near) == plain.shard(0).read_bytes()[:64]
    assert (near.kept_bytes, near.hits) == (80, 3)


def test_a_store_over_a_cache_travels(plain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    near = CachedTransport(PreadTransport(plain.path), "cache", 1 << 20, b"key")
    (here,) = near.get_ranges(NAME, starts=[0], ends=[64])
    monkeypatch.chdir("/")
    there = pickle.loads(pickle.dumps(near))
    assert there.get_ranges(NAME, starts=[0], ends=[64]) == [here]
    assert (there.hits, there.misses) == (1, 0)
    assert pickle.loads(pickle.dumps(ShardStore.open(near)))[3].tobytes() == plain.acts[3].tobytes()


def head(near: CachedTransport, end: int = 64) -> bytes:
    (found,) = near.get_ranges(NAME, starts=[0], ends=[end])
    into = bytearray(end)
    near.readinto(NAME, starts=[0], buffers=[memoryview(into)])
    assert bytes(into) == bytes(found)
    return bytes(into)


@pytest.mark.parametrize("engine", [MmapTransport, PreadTransport])
@pytest.mark.parametrize("how", ["another file", "in place"])
def test_a_file_that_was_written_anew_is_read_anew(tmp_path, engine, how):
    file = tmp_path / "far" / NAME
    file.parent.mkdir()
    file.write_bytes(b"a" * 64)
    os.utime(file, ns=(1, 1))

    def opened() -> CachedTransport:
        return CachedTransport(engine(file.parent), tmp_path / "cache", 1 << 20, b"the same")

    near = opened()
    assert head(near) == b"a" * 64
    if how == "in place":
        file.write_bytes(b"b" * 64)
        assert head(near) == b"b" * 64  # as without a cache
    else:
        (tmp_path / "new").write_bytes(b"b" * 64)
        os.utime(tmp_path / "new", ns=(1, 1))
        os.replace(tmp_path / "new", file)
        with pytest.raises(CorruptShardError, match="taken the place"):
            head(near)
    later = opened()
    assert head(later) == b"b" * 64
    again = opened()
    assert head(again) == b"b" * 64
    assert (again.hits, again.misses) == (2, 0)


def test_what_changes_while_it_is_read_is_not_kept(tmp_path, monkeypatch):
    file = tmp_path / "far" / NAME
    file.parent.mkdir()
    file.write_bytes(b"a" * 64)
    inner = PreadTransport(file.parent)
    near = CachedTransport(inner, tmp_path / "cache", 1 << 20)
    read = inner.get_ranges

    def and_meanwhile(*arguments, **named):
        found = read(*arguments, **named)
        os.utime(file, ns=(1, 1))
        return found

    monkeypatch.setattr(inner, "get_ranges", and_meanwhile)
    near.get_ranges(NAME, starts=[0], ends=[64])
    assert near.kept_bytes == 0
    near.get_ranges(NAME, starts=[0], ends=[64])
    assert near.kept_bytes > 0


def test_a_pipe_in_the_place_of_an_extent_is_not_waited_for(plain, tmp_path):
    arguments = (PreadTransport(plain.path), tmp_path / "cache", 1 << 20)
    right = head(CachedTransport(*arguments))
    for kept in list((tmp_path / "cache").rglob("acts*")):
        kept.unlink()
        os.mkfifo(kept)
    found = list[object]()
    reading = threading.Thread(target=lambda: found.append(head(CachedTransport(*arguments))), daemon=True)
    reading.start()
    reading.join(HANG_S)
    assert found == [right]


def test_names_with_numbers_that_nothing_has_are_none_of_extents(plain, tmp_path):
    arguments = (PreadTransport(plain.path), tmp_path / "cache", 1 << 20)
    head(CachedTransport(*arguments))
    (kept, *_) = (tmp_path / "cache").rglob("acts*")
    for name in ("acts000000.bin.99999999999999999999999-5", f"acts{'9' * 26}.bin.0-5"):
        (kept.parent / name).write_bytes(bytes(5))
    layout = ShardStore.open(plain.path).layout
    CachedTransport(*arguments).expect(lambda shard, first: first >= 0, layout)


def test_a_planted_link_is_not_written_through(tmp_path):
    """A folder that others may write to; the file behind the link is not theirs to change."""
    far = MemoryTransport({NAME: b"a" * 64})
    CachedTransport(far, tmp_path / "cache", 100).close()
    (counter,) = (tmp_path / "cache").glob("*/.bytes")
    precious = tmp_path / "precious"
    precious.write_text("a text that is longer than the number of bytes")
    counter.unlink()
    counter.symlink_to(precious)
    with pytest.raises(ArgumentError, match="cannot be used"):
        CachedTransport(far, tmp_path / "cache", 100)
    assert precious.read_text() == "a text that is longer than the number of bytes"


def test_what_another_user_has_kept_is_not_handed_out(tmp_path, monkeypatch):
    """No digest is compared: whoever made the folder would choose the vectors."""
    far = MemoryTransport({NAME: b"a" * 64})
    CachedTransport(far, tmp_path / "cache", 100).close()
    (folder,) = (tmp_path / "cache").iterdir()
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ArgumentError, match=r"belongs to user .*a folder of your own"):
        CachedTransport(far, tmp_path / "cache", 100)


@pytest.mark.parametrize(
    ("me", "owner", "is_taken"), [(7, 7, True), (7, 0, True), (0, 0, True), (0, 7, False), (7, 8, False)]
)
def test_a_folder_is_ones_own_or_the_administrators(tmp_path, monkeypatch, me, owner, is_taken):
    monkeypatch.setattr(os, "geteuid", lambda: me)
    monkeypatch.setattr(os, "getuid", lambda: 8)  # does not count
    monkeypatch.setattr(os, "lstat", lambda path: SimpleNamespace(st_uid=owner))
    with nullcontext() if is_taken else pytest.raises(ArgumentError, match=f"belongs to user {owner}"):
        CachedTransport(MemoryTransport({NAME: b"a" * 64}), tmp_path / "cache", 100)


def test_extents_of_the_version_that_is_read_stay(tmp_path):
    """Where there is no more room, what comes next is not kept."""
    file = tmp_path / "far" / NAME
    file.parent.mkdir()
    file.write_bytes(bytes(range(192)))
    for hits, misses in ((0, 3), (2, 1), (2, 1)):
        near = CachedTransport(PreadTransport(file.parent), tmp_path / "cache", 2 * 80)
        for start in (0, 64, 128):
            (found,) = near.get_ranges(NAME, starts=[start], ends=[start + 64])
            assert bytes(found) == bytes(range(start, start + 64))
        assert (near.hits, near.misses, near.kept_bytes) == (hits, misses, 160)


def test_extents_of_another_version_make_room(tmp_path):
    """Also those of releases whose names tell none."""
    file = tmp_path / "far" / NAME
    file.parent.mkdir()
    file.write_bytes(b"a" * 64)
    arguments = (PreadTransport(file.parent), tmp_path / "cache", 80)
    assert head(CachedTransport(*arguments)) == b"a" * 64
    (kept,) = (tmp_path / "cache").rglob("acts*")
    kept.rename(kept.with_name(f"{NAME}.0-64"))
    near = CachedTransport(*arguments)
    assert head(near) == b"a" * 64
    assert (near.hits, near.misses, near.kept_bytes) == (1, 1, 80)
    os.utime(file, ns=(1, 1))
    near = CachedTransport(*arguments)
    assert head(near) == b"a" * 64
    assert (near.hits, near.misses, near.kept_bytes) == (1, 1, 80)


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_an_object_that_was_replaced_is_read_anew(s3_bucket: Bucket, tmp_path, engine):
    """At the price of one byte of each file of which something is there, asked for once."""
    pytest.importorskip(engine)
    writer = open_transport(s3_bucket.url, s3_bucket.options, engine="fsspec")
    writer.put(f"x/{NAME}", b"a" * 64)

    def opened() -> CachedTransport:
        # A client of its own, as in another process.
        far = open_transport(f"{s3_bucket.url}/x", s3_bucket.options, engine=engine)
        return CachedTransport(far, tmp_path / "cache", 1 << 20, b"the same")

    def spent(near: CachedTransport, end: int) -> tuple[bytes, int, int]:
        before = near.counters
        found = head(near, end)
        after = near.counters
        return found, after.requests - before.requests, after.bytes_read - before.bytes_read

    first = opened()
    assert spent(first, 64) == (b"a" * 64, 1, 64)
    assert spent(first, 64) == (b"a" * 64, 0, 0)
    second = opened()
    assert spent(second, 64) == (b"a" * 64, 1, 1)
    assert spent(second, 64) == (b"a" * 64, 0, 0)
    assert spent(second, 32) == (b"a" * 32, 1, 32)
    writer.put(f"x/{NAME}", b"b" * 64)
    assert head(first) == b"a" * 64  # the version that it has pinned
    with pytest.raises(TransportError, match="replaced while it was being read"):
        head(first, 16)
    third = opened()
    assert spent(third, 64) == (b"b" * 64, 2, 65)
    assert spent(opened(), 64) == (b"b" * 64, 1, 1)


def test_stores_at_other_addresses_share_a_cache_folder_and_nothing_else(tmp_path):
    """Also where their metadata, which are the key, are equal, and where no versions are told."""
    for address in ("one", "two", "one", "two"):
        near = CachedTransport(MemoryTransport({NAME: address.encode()}, label=address), tmp_path, 1 << 20, b"key")
        assert head(near, 3) == address.encode()


def test_stores_of_one_address_share_nothing_where_their_keys_differ(tmp_path):
    """As after a recording of the same size anew, where no versions are told."""
    for key in (b"one", b"two", b"one"):
        near = CachedTransport(MemoryTransport({NAME: key}, label="there"), tmp_path, 1 << 20, key)
        assert head(near, 3) == key


@pytest.mark.filterwarnings("ignore:.*the folder is named 'anew'")
def test_another_recording_at_an_address_without_versions_is_read_anew(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from fsspec.implementations.memory import MemoryFileSystem

    from saev_store.torch import OrderedConfig, OrderedDataLoader

    told = MemoryFileSystem.info
    monkeypatch.setattr(
        MemoryFileSystem, "info", lambda *args, **more: {**told(*args, **more), "created": None, "modified": None}
    )
    for seed, layers in enumerate([(2, 5, 11), (2, 5, 12)]):
        plain = plain_store(tmp_path / str(seed), layers=layers, seed=seed)
        for path in plain.path.iterdir():
            MemoryFileSystem().pipe(f"/recorded/anew/{path.name}", path.read_bytes())
        config = OrderedConfig(
            shards="memory://recorded/anew", layer=5, batch_size=4, cache_dir=str(tmp_path / "cache")
        )
        with OrderedDataLoader(config) as loader:
            found = np.concatenate([batch["act"].numpy() for batch in loader])
        np.testing.assert_array_equal(found, ShardStore.open(plain.path).sel(layer=5, tokens="content")[:])
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_damaged_extent_makes_room_for_the_right_one(plain, tmp_path):
    arguments = (PreadTransport(plain.path), tmp_path / "cache", 80)  # room for one
    right = head(CachedTransport(*arguments))
    (kept,) = (tmp_path / "cache").rglob("acts*")
    damaged = bytearray(kept.read_bytes())
    damaged[3] ^= 1
    kept.write_bytes(damaged)
    assert head(CachedTransport(*arguments)) == right
    again = CachedTransport(*arguments)
    assert (head(again), again.hits, again.misses, again.kept_bytes) == (right, 2, 0, 80)  # `head` reads twice


def test_the_bytes_of_a_folder_are_counted_anew(plain, tmp_path):
    """A process that was killed leaves a wrong number; with it nothing more would be kept, or too much."""
    arguments = (PreadTransport(plain.path), tmp_path / "cache", 200)
    head(CachedTransport(*arguments))
    (ledger,) = (tmp_path / "cache").rglob(".bytes")
    for wrong in (b"0", b"1000000", b"", b"noise"):
        ledger.write_bytes(wrong)
        near = CachedTransport(*arguments)
        assert near.kept_bytes == 80
        near.get_ranges(NAME, starts=[64], ends=[128])
        near.get_ranges(NAME, starts=[128], ends=[192])  # no room: 200 bytes hold two
        assert near.kept_bytes == 160
        next(ledger.parent.glob(f"{NAME}.64-*")).unlink()


def test_files_of_killed_processes_go_and_those_of_living_ones_stay(plain, tmp_path):
    arguments = (PreadTransport(plain.path), tmp_path / "cache", 1 << 20)
    head(CachedTransport(*arguments))
    (kept,) = (tmp_path / "cache").rglob("acts*")
    young, old = (kept.with_name(f"{kept.name}.{name}.tmp") for name in ("young", "old"))
    for path in (young, old):
        path.write_bytes(bytes(100))
    hour_ago = os.stat(old).st_mtime_ns - 3_700 * 10**9
    os.utime(old, ns=(hour_ago, hour_ago))
    near = CachedTransport(*arguments)
    assert sorted(path.name for path in kept.parent.iterdir()) == sorted([".bytes", kept.name, young.name])
    assert near.kept_bytes == 180  # its owner counts on the room


@pytest.mark.parametrize("room", [-1, 0, 1])
def test_a_budget_is_used_to_its_last_byte(plain, tmp_path, room):
    near = CachedTransport(PreadTransport(plain.path), tmp_path / "cache", 2 * 80 + room)
    near.get_ranges(NAME, starts=[0, 64, 128], ends=[64, 128, 192])
    assert near.kept_bytes == (80 if room < 0 else 160)


def test_what_comes_out_of_a_cache_cannot_be_changed(plain, tmp_path):
    for _ in range(2):
        near = CachedTransport(PreadTransport(plain.path), tmp_path / "cache", 1 << 20)
        (found,) = near.get_ranges(NAME, starts=[0], ends=[64])
        assert memoryview(found).readonly
    assert near.hits == 1


def test_files_in_folders_are_kept_apart(tmp_path):
    files = {"a/x": b"one", "b/x": b"two", "x": b"six"}
    near = CachedTransport(MemoryTransport(files), tmp_path, 1 << 20)
    for _ in range(2):
        for path, content in files.items():
            (found,) = near.get_ranges(path, starts=[0], ends=[3])
            assert bytes(found) == content
    assert near.hits == near.misses == 3


def test_an_empty_range_asks_for_nothing(tmp_path):
    """Also where one byte would tell the version of a file of which something is kept."""
    files = {NAME: b"a" * 64}
    head(CachedTransport(MemoryTransport(files), tmp_path, 1 << 20))
    asked: list[tuple[list[int], list[int]]] = []

    class Far(MemoryTransport):
        def get_ranges(self, path, *, starts, ends):
            asked.append((list(starts), list(ends)))
            return super().get_ranges(path, starts=starts, ends=ends)

        def version(self, path):
            return None  # until something was read

    near = CachedTransport(Far(files), tmp_path, 1 << 20)
    assert [len(part) for part in near.get_ranges(NAME, starts=[0, 5], ends=[0, 5])] == [0, 0]
    assert all(start == end for starts, ends in asked for start, end in zip(starts, ends, strict=True))
    assert (near.hits, near.misses) == (0, 0)


def test_where_no_versions_are_told_extents_are_found_by_their_names(tmp_path, monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setattr(_transport, "_version", lambda info: None)  # as a file system that tells no time
    fsspec.filesystem("memory").pipe(f"/{tmp_path.name}/{NAME}", b"a" * 64)
    for number, far in enumerate([
        MemoryTransport({NAME: b"a" * 64}),
        open_transport(f"memory://{tmp_path.name}", engine="fsspec"),
    ]):  # fmt: skip
        for hits in (1, 2):
            near = CachedTransport(far, tmp_path / f"cache{number}", 1 << 20)
            assert head(near) == b"a" * 64
            assert near.hits == hits
            assert [path.name for path in (tmp_path / f"cache{number}").rglob("acts*")] == [f"{NAME}.0-64"]


def test_empty_ranges_are_not_kept(plain, tmp_path):
    near = CachedTransport(PreadTransport(plain.path), tmp_path / "cache", 1 << 20)
    assert [len(part) for part in near.get_ranges(NAME, starts=[5, 0, 7], ends=[5, 8, 7])] == [0, 8, 0]
    assert [len(part) for part in near.get_ranges(NAME, starts=[5], ends=[5])] == [0]
    near.readinto(NAME, starts=[], buffers=[])
    assert (near.hits, near.misses, near.kept_bytes) == (0, 1, 24)


def test_an_extent_that_two_have_kept_is_counted_once(tmp_path):
    ledger, final = Ledger(str(tmp_path / ".bytes")), str(tmp_path / "x")
    for name in "ab":
        assert ledger.reserve(str(tmp_path / name), 10, 100)
    for name in "ab":
        ledger.place(str(tmp_path / name), final)
    assert ledger.get() == os.path.getsize(final) == 10
