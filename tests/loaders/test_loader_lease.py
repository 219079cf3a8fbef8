"""Staging into a place without locks: one does it, the others wait, and go on where it ends."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from api import MemoryTransport
from plain_stores import plain_store
from waiting import HANG_S

from saev_store import ShardStore
from saev_store.errors import NotFoundError, TransportError
from saev_store.loaders import stage, staging
from saev_store.loaders.staging import Lease
from saev_store.writer import copying

PATH = "lease.json"


@pytest.fixture(autouse=True)
def no_beats(monkeypatch):
    monkeypatch.setattr(staging, "BEAT_S", 3600.0)


def test_one_at_a_time():
    place = MemoryTransport()
    first, second = Lease(place, PATH), Lease(place, PATH)
    with first as ours, second as theirs:
        assert (ours, theirs) == (True, False)
    with second as theirs, first as ours:
        assert (ours, theirs) == (False, True)
    assert place.list() == []


def test_who_shows_no_sign_of_life_is_succeeded(monkeypatch):
    monkeypatch.setattr(staging, "PATIENCE", 1)  # and up to as many again: none
    place = MemoryTransport()
    place.put(PATH, b"crashed")
    lease = Lease(place, PATH)
    for sign in (b"alive", b"alive and well"):
        with lease as ours:
            assert not ours
        place.put(PATH, sign)
    with lease as ours:
        assert not ours
    with lease as ours:
        assert ours
    assert place.list() == []


def test_who_shows_a_sign_of_life_now_and_then_is_never_succeeded(monkeypatch):
    """Looks that find no change count only if they follow each other."""
    monkeypatch.setattr(staging, "PATIENCE", 2)
    place = MemoryTransport()
    lease = Lease(place, PATH)
    for sign in range(8):
        place.put(PATH, b"%d" % sign)
        for _ in range(2):
            with lease as ours:
                assert not ours
    assert place.read(PATH) == b"7"


def test_signs_of_life_until_somebody_else_has_taken_over(monkeypatch):
    monkeypatch.setattr(staging, "BEAT_S", 0.001)
    seen, changed = set(), threading.Event()

    class Noted(MemoryTransport):
        def put(self, path, data):
            super().put(path, data)
            seen.add(bytes(data))
            if len(seen) == 3:
                changed.set()

    place = Noted()
    with Lease(place, PATH) as ours:
        assert ours
        assert changed.wait(HANG_S)
        beating = next(thread for thread in threading.enumerate() if thread.name == "saev-lease")
        for _ in range(2000):  # a beat that was just under way is put over it
            place.put(PATH, b"another's")
            beating.join(0.01)
            if not beating.is_alive():
                break
        assert not beating.is_alive()
        place.put(PATH, b"another's")
    assert place.read(PATH) == b"another's"


def test_a_lost_answer_is_no_defeat():
    class Loses(MemoryTransport):
        def create(self, path, data):
            super().create(path, data)
            raise TransportError("the answer was lost", where=path, transient=True)

    with Lease(Loses(), PATH) as ours:
        assert ours


def test_where_creating_is_not_atomic_the_last_one_counts():
    class Swift(MemoryTransport):
        def create(self, path, data):
            super().create(path, data)
            self.put(path, b"another's")

    place = Swift()
    with Lease(place, PATH) as ours:
        assert not ours
    assert place.read(PATH) == b"another's"


class Bucket(MemoryTransport):
    """Without locks; nothing is uploaded before everybody has looked whether somebody is at work."""

    is_local = False

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n, self.looked, self.all_looked = n, set(), threading.Event()
        self.begun: list[str] = []

    def read(self, path, *, max_bytes=None):
        if "stage-" in path:
            self.looked.add(threading.get_ident())
            if len(self.looked) >= self.n:
                self.all_looked.set()
        return super().read(path, max_bytes=max_bytes)

    def open_sink(self, path, **options):
        assert self.all_looked.wait(HANG_S)
        self.begun.append(path.rpartition("/")[2])
        return super().open_sink(path, **options)

    def create(self, path, data):
        super().create(path, data)
        if path.endswith("/claim.json"):
            self.begun.append("claim")


@pytest.fixture
def bucket(monkeypatch):
    """In place of `bucket://near`; every look follows at once."""
    bucket, real = Bucket(3), staging.open_transport

    def opened(url, options=None, **more):
        return bucket if str(url).startswith("bucket://") else real(url, options, **more)

    monkeypatch.setattr(staging, "open_transport", opened)
    monkeypatch.setattr(copying, "open_transport", opened)
    monkeypatch.setattr(staging, "_POLL_S", 0.001)
    monkeypatch.setattr(staging, "PATIENCE", 1 << 40)
    return bucket


@pytest.mark.parametrize("layers", [[2, 11], "all"])
def test_several_stage_into_a_bucket_and_one_works(tmp_path, bucket, layers):
    """They used to take over one another again and again."""
    plain = plain_store(tmp_path / "far", n=24, tokens=7, per_shard=5, d_model=64)
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(stage, plain.path, "bucket://near", layers=layers) for _ in range(3)]
        (address,) = {future.result(HANG_S) for future in futures}
    assert bucket.begun.count("claim") == 1
    shards = [name for name in bucket.begun if name.startswith("acts")]
    assert len(shards) == len(set(shards)) >= 4
    assert copies_in(bucket) == [address.rpartition("/")[2]]
    store = ShardStore.open(bucket.at(address.rpartition("/")[2]))
    np.testing.assert_array_equal(store[:], plain.acts[:, [0, 2]] if layers != "all" else plain.acts)


def test_a_stager_that_crashed_is_succeeded(tmp_path, bucket, monkeypatch):
    monkeypatch.setattr(staging, "PATIENCE", 5)
    bucket.all_looked.set()
    plain = plain_store(tmp_path / "far", n=24, tokens=7, per_shard=5, d_model=64)
    with ShardStore.open(plain.path) as store:
        name = copying.target_of(store, "bucket://near", [5], "all").name
    bucket.put(f"{staging.TEMPORARY}stage-{name}", b"crashed")
    assert stage(plain.path, "bucket://near", layers=5) == f"bucket://near/{name}"
    np.testing.assert_array_equal(ShardStore.open(bucket.at(name))[:, 0], plain.acts[:, 1])
    assert copies_in(bucket) == [name]


@pytest.mark.parametrize("layers", [5, "all"])
def test_a_new_recording_replaces_the_copy_in_a_bucket(tmp_path, bucket, layers):
    bucket.all_looked.set()
    plain = plain_store(tmp_path / "far", n=24, tokens=7, per_shard=5, d_model=64)
    for factor in (1, 2):
        for shard_idx in range(plain.n_shards):
            (np.fromfile(plain.shard(shard_idx), "<f4") * factor).tofile(plain.shard(shard_idx))
        address = stage(plain.path, "bucket://near", layers=layers)
        (name,) = copies_in(bucket)
        assert address == f"bucket://near/{name}"
        found = ShardStore.open(bucket.at(name))[:]
        np.testing.assert_array_equal(found, factor * (plain.acts if layers == "all" else plain.acts[:, [1]]))


def test_a_copy_in_a_bucket_that_is_half_removed_is_no_store(tmp_path, bucket, monkeypatch):
    bucket.all_looked.set()
    plain = plain_store(tmp_path / "far", n=24, tokens=7, per_shard=5, d_model=64)
    name = stage(plain.path, "bucket://near", layers=5).rpartition("/")[2]
    delete = Bucket.delete

    def broken(self: Bucket, path: str) -> None:
        if path.endswith("acts000001.bin"):
            raise TransportError("the connection is gone", where=path)
        delete(self, path)

    monkeypatch.setattr(Bucket, "delete", broken)
    (np.fromfile(plain.shard(0), "<f4") * 2).tofile(plain.shard(0))
    with pytest.raises(TransportError, match="the connection is gone"):
        stage(plain.path, "bucket://near", layers=5)
    with pytest.raises(NotFoundError):
        ShardStore.open(bucket.at(name))


def copies_in(bucket: Bucket) -> list[str]:
    """All that lies in a bucket, but for the notes of which recording the copies are."""
    return [entry.path for entry in bucket.list() if not entry.path.startswith(f"{staging.TEMPORARY}staged-")]
