"""How many requests of a writer wait for each other: counted on a clock that only requests move, never timed."""

from __future__ import annotations

from queue import SimpleQueue

import numpy as np
import pytest
from kill_harness_disk import Disk
from kill_harness_oracle import case

from saev_store.errors import IncompleteStoreError
from saev_store.writer import create_store, finalize_store, shard_writer

OPTIONS = {"pad": False, "block_bytes": 256, "on_nonfinite": "allow", "progress": False}


class Clock:
    """The time in requests; what runs side by side begins at the same time, and the latest end counts."""

    now = 0

    def side_by_side(self, works):
        begun, ends = self.now, [self.now]
        for work in works:
            self.now = begun
            work()
            ends.append(self.now)
        self.now = max(ends)

    def share(self, work, parts, _n):
        self.side_by_side([lambda part=part: work(part) for part in parts])

    def ahead(self, ask, items, _n):
        answers = []
        self.side_by_side([lambda item=item: answers.append(ask(item)) for item in items])
        yield from answers


class Timed(Disk):
    """An object store, each of whose requests takes one tick of a clock.

    A file `in_parts` is a multipart upload: begun, then its last part, then completed. Otherwise it is one request.
    """

    def __init__(self, clock, *, in_parts: bool = True) -> None:
        super().__init__(posix=False)
        self.clock, self.in_parts, self.n_requests = clock, in_parts, 0

    def _tick(self, n=1):
        self.clock.now += n
        self.n_requests += n

    def step(self, what):
        super().step(what)
        kind = what.split()[0]
        if kind == "commit":
            self._tick(2 if self.in_parts else 1)
        elif kind in {"put", "create"} or (kind == "write" and what.endswith(" 0") and self.in_parts):
            self._tick()

    def size_asked(self, path):
        self._tick()

    def delete(self, path):
        self._tick(2)  # a listing, then all at once
        super().delete(path)

    def read(self, path, *, max_bytes=None):
        self._tick()
        return super().read(path)

    def size(self, path):
        self._tick()
        return super().size(path)

    def list(self, path=""):
        self._tick()
        return super().list(path)


@pytest.fixture
def clock(monkeypatch):
    """A clock; the writer's thread is another time line of it."""
    clock = Clock()
    monkeypatch.setattr("saev_store.writer.folder.share", clock.share)
    monkeypatch.setattr("saev_store.writer.folder.ahead", clock.ahead)

    class Background:
        error = None

        def __init__(self, *, buffer_nbytes, held, **_):
            self.buffer_nbytes, self.held, self.now, self.free = buffer_nbytes, held, 0, SimpleQueue()

        def borrow(self):
            return np.empty(self.buffer_nbytes, np.uint8)

        def submit(self, job):
            caller, clock.now = clock.now, max(self.now, clock.now)
            job()
            self.now, clock.now = clock.now, caller

        def drain(self):
            clock.now = max(self.now, clock.now)

        def wait_for(self, queue):
            put_at, receipt = queue.get()
            clock.now = max(put_at, clock.now)
            return receipt

        def close(self):
            self.held.close()

    class Queue(SimpleQueue):
        def put(self, receipt):
            super().put((clock.now, receipt))

    monkeypatch.setattr(shard_writer, "SimpleQueue", Queue)
    monkeypatch.setattr(shard_writer, "Background", Background)
    return clock


@pytest.mark.parametrize(("in_parts", "n_waits"), [(False, 9), (True, 11)])
def test_a_small_store_waits_few_times(clock, in_parts, n_waits):
    """A bare upload waits once, or three times in parts. Before it: look, claim; then check the owner; after it: publish."""
    this = case(n=4, per_shard=4, labelled=False, pad=False, block_bytes=256)
    bucket = Timed(clock, in_parts=in_parts)
    with create_store(bucket, this.metadata, **OPTIONS) as writer:
        assert clock.now == 2
        writer.append(this.acts)
        assert clock.now == 2  # the thread sends
    this.check(bucket.content(this.name))
    assert clock.now == n_waits


def test_more_shards_add_only_what_their_uploads_take(clock):
    this, bucket = case(n=16, per_shard=4, labelled=False, pad=False, block_bytes=256), Timed(clock)
    with create_store(bucket, this.metadata, **OPTIONS) as writer:
        writer.append(this.acts)
    this.check(bucket.content(this.name))
    assert clock.now == 11 + 3 * 5  # begin, check the owner, last part, complete, receipt


def test_publishing_parts_does_not_wait_for_each_shard(clock):
    waits = {}
    for n in (8, 64):
        this, bucket = case(n=n, per_shard=4, labelled=False, pad=False, block_bytes=256), Timed(clock)
        for rank in range(2):
            with create_store(bucket, this.metadata, part=(rank, 2), **OPTIONS) as writer:
                writer.append(this.acts[slice(*writer.example_range)])
        begun = clock.now
        assert finalize_store(bucket, this.metadata)
        waits[n] = clock.now - begun
        this.check(bucket.content(this.name))
    assert waits[8] == waits[64]


def test_a_resume_waits_no_longer_for_many_shards(clock):
    waits = {}
    for n in (12, 68):
        this, bucket = case(n=n, per_shard=4, labelled=False, pad=False, block_bytes=256), Timed(clock)
        with pytest.raises(IncompleteStoreError), create_store(bucket, this.metadata, **OPTIONS) as writer:
            writer.append(this.acts[: n - 2])
        begun = clock.now
        writer = create_store(bucket, this.metadata, resume=True, verify="sizes", **OPTIONS)
        waits[n] = clock.now - begun
        assert writer.next_example == n - 4
        writer.append(this.acts[n - 4 :])
        writer.close()
        this.check(bucket.content(this.name))
    assert waits[12] == waits[68]
