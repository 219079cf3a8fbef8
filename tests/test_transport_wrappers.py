"""Counting, latency and retry: what they add, and that they take nothing away."""

from __future__ import annotations

import pickle
import threading
import time

import pytest

from saev_store.errors import (
    AccessError,
    ArgumentError,
    CorruptShardError,
    DeadlineError,
    NotFoundError,
    StoreExistsError,
    TransportError,
)
from saev_store.transport import (
    FREE,
    Counters,
    CountingTransport,
    LatencyTransport,
    Lists,
    MemoryTransport,
    MmapTransport,
    Moves,
    Nests,
    ReadCost,
    ReadsInto,
    ReadsRuns,
    RetryTransport,
    Transport,
    Writes,
)

ABILITIES = (ReadsInto, ReadsRuns, Lists, Nests, Writes, Moves)


class Least:
    """Nothing but the protocol `Transport`."""

    name, url, cost, counters = "least", "least://", FREE, Counters()

    def read(self, path, *, max_bytes=None):
        return b"0123"

    def size(self, path):
        return 4

    def get_ranges(self, path, *, starts, ends):
        return [b"0123"[start:end] for start, end in zip(starts, ends, strict=True)]

    def close(self):
        pass


class LeastWithList(Least):
    def list(self, path=""):
        return []


class Faulty(MemoryTransport):
    """Raises `faults` one after the other, before or after doing its work, then works."""

    def __init__(self, *faults, files=None, after=False):
        super().__init__(files or {"a.bin": b"0123456789"})
        self.faults, self.after, self.n_calls = list(faults), after, 0

    def _fail(self):
        self.n_calls += 1
        if self.faults and (fault := self.faults.pop(0)) is not None:
            raise fault

    def read(self, path, *, max_bytes=None):
        self._fail()
        return super().read(path, max_bytes=max_bytes)

    def get_ranges(self, path, *, starts, ends):
        self._fail()
        return super().get_ranges(path, starts=starts, ends=ends)

    def create(self, path, data):
        if not self.after:
            self._fail()
        super().create(path, data)
        if self.after:
            self._fail()


def passing(text="busy"):
    return TransportError(text, transient=True)


@pytest.fixture
def naps(monkeypatch):
    """Nobody waits in tests; what would have been waited is kept."""
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setattr("tenacity.nap.time.sleep", waited.append)
    return waited


WRAPPERS = (CountingTransport, lambda inner: LatencyTransport(inner, 0.0), RetryTransport)


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("inner", [Least(), LeastWithList(), MemoryTransport()])
def test_wrappers_can_what_the_wrapped_can(wrap, inner):
    for wrapper in (wrap(inner), wrap(wrap(inner)), pickle.loads(pickle.dumps(wrap(inner)))):
        assert isinstance(wrapper, Transport)
        for ability in ABILITIES:
            assert isinstance(wrapper, ability) == isinstance(inner, ability)
        for name in ("readinto", "list", "at", "put", "create", "delete", "open_sink", "lock", "pads", "move"):
            assert hasattr(wrapper, name) == hasattr(inner, name)


def test_wrappers_keep_their_kind_and_options():
    inner = RetryTransport(LatencyTransport(MemoryTransport({"a": b"1"}, label="x"), 0.5, 1e6), 7, 3.0, 9.0)
    wrapper = CountingTransport(inner)
    assert isinstance(wrapper, CountingTransport)
    assert wrapper.name == "counting(retry(latency(memory)))"
    assert wrapper.url == "memory://x"
    assert repr(wrapper) == "CountingTransport(RetryTransport(LatencyTransport(MemoryTransport('memory://x'))))"
    assert wrapper.inner is inner
    again = pickle.loads(pickle.dumps(wrapper))
    assert type(again) is type(wrapper)
    assert again.inner._arguments() == (7, 3.0, 9.0)
    assert again.inner.inner._arguments() == (0.5, 1e6)
    assert isinstance(again.at("folder"), CountingTransport)


# Counting


def test_counts_requests_and_bytes():
    transport = CountingTransport(MemoryTransport({"a.bin": b"0123456789"}))
    assert transport.counters == Counters()
    transport.read("a.bin")
    transport.size("a.bin")
    transport.get_ranges("a.bin", starts=[0, 5, 7], ends=[3, 5, 9])
    transport.readinto("a.bin", start=0, buffers=[memoryview(bytearray(4))])
    transport.list()
    transport.put("b", b"123")
    transport.create("c", b"12345")
    transport.delete("b")
    sink = transport.open_sink("d", used_nbytes=6, file_nbytes=8)
    sink.write(0, [memoryview(b"123"), memoryview(b"456")])
    sink.sync()
    sink.read_back(0, 2)
    sink.commit()
    with pytest.raises(NotFoundError):
        transport.read("nothing")
    assert transport.counters == Counters(
        requests=15,
        bytes_read=10 + 5 + 4 + 2,
        bytes_written=3 + 5 + 6,
        operations={
            "read": 2, "size": 1, "get_ranges": 1, "readinto": 1, "list": 1, "put": 1, "create": 1, "delete": 1,
            "open_sink": 1, "sink.write": 1, "sink.sync": 1, "sink.read_back": 1, "sink.commit": 1,
        },
    )  # fmt: skip
    assert pickle.loads(pickle.dumps(transport.counters)) == transport.counters
    transport.reset()
    assert transport.counters == Counters()


def test_counts_together_what_is_opened_below():
    transport = CountingTransport(MemoryTransport({"a/b": b"12"}))
    transport.at("a").read("b")
    assert transport.counters.requests == transport.at("a").counters.requests == 1


def test_counts_exactly_with_many_threads():
    transport = CountingTransport(MemoryTransport({"a.bin": b"0123456789"}))

    def read():
        for _ in range(500):
            transport.get_ranges("a.bin", starts=[1, 2], ends=[4, 2])

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert transport.counters == Counters(4000, 12_000, 0, {"get_ranges": 4000})


# Latency


def test_latency_waits_once_per_operation_and_for_bytes(naps):
    transport = LatencyTransport(MemoryTransport({"a.bin": bytes(100)}), 0.5, bytes_per_s=50)
    transport.get_ranges("a.bin", starts=[0, 50], ends=[10, 65])
    transport.read("a.bin")
    transport.size("a.bin")
    transport.put("b", bytes(10))
    assert naps == [1.0, 2.5, 0.5, 0.7]
    assert transport.cost == ReadCost(25.0, FREE.max_request_bytes)
    assert LatencyTransport(MemoryTransport(), 0.5).cost == FREE


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(-1, None), (float("nan"), None), (0, 0), (0, -5)])
def test_latency_refuses_impossible_numbers(latency_s, bytes_per_s):
    with pytest.raises(ArgumentError):
        LatencyTransport(MemoryTransport(), latency_s, bytes_per_s)


# Retry


def test_retries_what_passes(naps):
    inner = Faulty(passing(), DeadlineError("slow", transient=True), passing())
    assert RetryTransport(inner).read("a.bin") == b"0123456789"
    assert inner.n_calls == 4
    assert len(naps) == 3
    assert all(0 <= nap <= 10 for nap in naps)


@pytest.mark.parametrize(
    "fault",
    [
        TransportError("full"),
        NotFoundError("x"),
        AccessError("x"),
        DeadlineError("total"),
        ArgumentError("x"),
        KeyError(),
    ],
)
def test_does_not_retry_what_stays(naps, fault):
    inner = Faulty(fault)
    with pytest.raises(type(fault)) as caught:
        RetryTransport(inner).read("a.bin")
    assert caught.value is fault
    assert (inner.n_calls, naps) == (1, [])


def test_gives_up_with_the_last_error(naps):
    inner = Faulty(*[passing(f"busy {n}") for n in range(9)])
    with pytest.raises(TransportError, match="busy 2") as caught:
        RetryTransport(inner, attempts=3).read("a.bin")
    assert type(caught.value) is TransportError
    assert inner.n_calls == 3
    assert caught.value.__cause__ is None


def test_reads_a_short_file_once_more(naps):
    assert RetryTransport(Faulty(CorruptShardError("short"))).read("a.bin") == b"0123456789"
    inner = Faulty(passing(), CorruptShardError("short"), passing(), CorruptShardError("still short"))
    with pytest.raises(CorruptShardError, match="still short"):
        RetryTransport(inner).get_ranges("a.bin", starts=[0], ends=[1])
    assert inner.n_calls == 4


def test_gives_up_when_time_is_up(naps, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    class Slow(Faulty):
        def _fail(self):
            now[0] += 4.0
            super()._fail()

    inner = Slow(*[passing(f"busy {n}") for n in range(9)])
    with pytest.raises(DeadlineError, match=r"read did not succeed within 10 s \(3 attempts\).*busy 2") as caught:
        RetryTransport(inner, attempts=9, max_wait_s=0.0, total_timeout_s=10).read("a.bin")
    assert not caught.value.transient
    assert isinstance(caught.value.__cause__, TransportError)
    assert inner.n_calls == 3


def test_recognises_its_own_creation_when_the_answer_was_lost(naps):
    inner = Faulty(passing("connection lost"), after=True)
    RetryTransport(inner).create("metadata.json", b"{}")
    assert inner.files["metadata.json"] == b"{}"


def test_recognises_the_creation_of_others(naps):
    taken = {"metadata.json": b"{}"}
    with pytest.raises(StoreExistsError):  # the same bytes, but there before us
        RetryTransport(Faulty(files=taken)).create("metadata.json", b"{}")
    for theirs in (b"[]", b"longer than ours"):
        inner = Faulty(passing(), files={"metadata.json": theirs})
        with pytest.raises(StoreExistsError):
            RetryTransport(inner).create("metadata.json", b"{}")


def test_retries_parts_of_a_sink(naps, monkeypatch):
    inner = MemoryTransport()
    sink = RetryTransport(inner).open_sink("a", used_nbytes=3, file_nbytes=3)
    faults, real = [passing(), passing()], sink._inner.write

    def write(offset, buffers):
        if faults:
            raise faults.pop()
        real(offset, buffers)

    monkeypatch.setattr(sink._inner, "write", write)
    sink.write(0, [memoryview(b"123")])
    sink.commit()
    assert inner.read("a") == b"123"


class AnswersLost(CountingTransport):
    """Does its work, but the first answer of one kind does not arrive."""

    def __init__(self, inner, lost):
        super().__init__(inner)
        self.lost = [lost]

    def _around(self, operation, nbytes, call):
        found = super()._around(operation, nbytes, call)
        if operation in self.lost:
            self.lost.remove(operation)
            raise passing("answer lost")
        return found


def test_recognises_its_own_move_when_the_answer_was_lost(naps):
    inner = MemoryTransport({"old": b"12345", "new": b"123"})
    RetryTransport(AnswersLost(inner, "move")).move("old", "new")
    assert inner.files == {"new": b"12345"}
    assert len(naps) == 1


def test_a_move_of_what_others_have_taken_is_an_error(naps):
    class Taken(MemoryTransport):
        def move(self, source, target):
            if source in self.files:
                self.delete(source)
                raise passing()
            super().move(source, target)

    for files in ({"old": b"12345", "new": b"123"}, {"old": b"12345"}):
        with pytest.raises(NotFoundError):
            RetryTransport(Taken(files)).move("old", "new")
    inner = CountingTransport(MemoryTransport({"new": b"123"}))
    with pytest.raises(NotFoundError):  # never there
        RetryTransport(inner).move("old", "new")
    assert len(naps) == 2


@pytest.mark.parametrize("kind", [MemoryTransport, MmapTransport])
def test_a_commit_that_cannot_be_repeated_says_how_it_failed_first(naps, tmp_path, kind):
    inner = MmapTransport(tmp_path) if kind is MmapTransport else MemoryTransport()
    sink = RetryTransport(AnswersLost(inner, "sink.commit")).open_sink("a", used_nbytes=3, file_nbytes=3)
    sink.write(0, [memoryview(b"123")])
    with pytest.raises(TransportError, match="answer lost") as caught:
        sink.commit()
    assert "already" in str(caught.value.__cause__) or "is committed" in str(caught.value.__cause__)
    assert inner.read("a") == b"123"


@pytest.mark.parametrize("options", [{"attempts": 0}, {"max_wait_s": -1}, {"total_timeout_s": 0}])
def test_retry_refuses_impossible_numbers(options):
    with pytest.raises(ArgumentError):
        RetryTransport(MemoryTransport(), **options)
