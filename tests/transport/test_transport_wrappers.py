"""Counting, latency and retry: what they add, and that they take nothing away."""

from __future__ import annotations

import pickle
import threading
import time

import pytest
from transports import CountingTransport, LatencyTransport

from saev_store.errors import (
    ArgumentError,
    NotFoundError,
)
from saev_store.transport import (
    FREE,
    Counters,
    LimitTransport,
    Lists,
    MemoryTransport,
    Moves,
    Rate,
    ReadCost,
    Transport,
    UnfinishedUpload,
    Writes,
)

ABILITIES = (Lists, Writes, Moves)


class Least:
    """Nothing but the protocol `Transport`."""

    name, url, cost, counters = "least", "least://", FREE, Counters()
    is_local, local_path, reads_into = False, None, False

    def at(self, path):
        return self

    def version(self, path):
        return ""

    def read(self, path, *, max_bytes=None):
        return b"0123"

    def size(self, path):
        return 4

    def get_ranges(self, path, *, starts, ends):
        return [b"0123"[start:end] for start, end in zip(starts, ends, strict=True)]

    def readinto(self, path, *, starts, buffers):
        for start, buffer in zip(starts, buffers, strict=True):
            buffer[:] = b"0123"[start : start + len(buffer)]

    def close(self):
        pass


class LeastWithList(Least):
    def list(self, path=""):
        return []


@pytest.fixture
def naps(monkeypatch):
    """Tests do not wait; what would have been waited is kept."""
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    return waited


WRAPPERS = (CountingTransport, lambda inner: LatencyTransport(inner, 0.0), lambda inner: LimitTransport(inner, Rate()))


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("inner", [Least(), LeastWithList(), MemoryTransport()])
def test_wrappers_can_what_the_wrapped_can(wrap, inner):
    for wrapper in (wrap(inner), wrap(wrap(inner)), pickle.loads(pickle.dumps(wrap(inner)))):
        assert isinstance(wrapper, Transport)
        for ability in ABILITIES:
            assert isinstance(wrapper, ability) == isinstance(inner, ability)
        for name in ("list", "put", "create", "delete", "open_sink", "lock", "pads", "move"):
            assert hasattr(wrapper, name) == hasattr(inner, name)


@pytest.mark.parametrize("limit", [0, 0.0, -1, float("nan")])
@pytest.mark.parametrize("name", ["bytes_per_s", "requests_per_s"])
def test_a_rate_at_which_nothing_ends_is_refused(name, limit):
    with pytest.raises(ArgumentError, match=f"{name} is .*; it must be a number of more than 0"):
        Rate(**{name: limit})


def test_wrappers_keep_their_kind_and_options():
    rate = Rate(1e9, 7)
    inner = LimitTransport(LatencyTransport(MemoryTransport({"a": b"1"}, label="x"), 0.5, 1e6), rate)
    wrapper = CountingTransport(inner)
    assert isinstance(wrapper, CountingTransport)
    assert wrapper.name == "counting(limit(latency(memory)))"
    assert wrapper.url == "memory://x"
    assert repr(wrapper) == "CountingTransport(LimitTransport(LatencyTransport(MemoryTransport('memory://x'))))"
    assert wrapper.inner is inner
    again = pickle.loads(pickle.dumps(wrapper))
    assert type(again) is type(wrapper)
    assert again.inner._arguments()[0]._limits == (1e9, 7)
    assert again.inner.inner._arguments() == (0.5, 1e6)
    assert isinstance(again.at("folder"), CountingTransport)


class Noted:
    """Every ability, also of sinks: notes what it is asked, and answers with the name of the call."""

    name, url, cost, counters = "noted", "noted://", FREE, Counters()
    is_local, local_path, reads_into, pads = True, "/noted", False, True

    def __init__(self):
        self.asked = []

    def open_sink(self, path, **sizes):
        self.asked.append(("open_sink", (path,), sizes))
        return self

    def at(self, path):
        below = Noted()
        below.asked, below.url = self.asked, f"{self.url}{path}"
        return below


def _noting(name):
    def ask(self, *arguments, **options):
        self.asked.append((name, arguments, options))
        return [name.encode()] if name == "get_ranges" else name.encode()

    return ask


#: Calls of a transport and of a sink: what is given by position and by name.
CALLS = {
    "read": (("a",), {"max_bytes": 5}),
    "size": (("a",), {}),
    "get_ranges": (("a",), {"starts": [1, 7], "ends": [4, 9]}),
    "readinto": (("a",), {"starts": [3], "buffers": [memoryview(bytearray(2))]}),
    "version": (("a",), {}),
    "check_mapped": (("a", 12), {}),
    "close": ((), {}),
    "list": (("a",), {}),
    "put": (("a", b"12"), {}),
    "create": (("a", b"12"), {}),
    "delete": (("a",), {}),
    "lock": (("a",), {}),
    "list_uploads": (("a",), {}),
    "abort_upload": ((UnfinishedUpload("a", "1", None),), {}),
    "move": (("a", "b"), {}),
}
SINK_CALLS = {
    "write": ((3, [memoryview(b"12")], print), {}),
    "sync": ((), {}),
    "keep": ((7,), {}),
    "read_back": ((2, 9), {}),
    "commit": ((), {"check_size": False}),
    "abort": ((), {}),
}
for name in {**CALLS, **SINK_CALLS, "copy_within": ()}:
    setattr(Noted, name, _noting(name))


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_wrapper_hands_on_all_that_it_is_given(wrap):
    inner = Noted()
    wrapper = wrap(inner)
    for name, (arguments, options) in CALLS.items():
        getattr(wrapper, name)(*arguments, **options)
        assert inner.asked.pop() == (name, arguments, options)
    sizes = {"used_nbytes": 3, "file_nbytes": 5, "resume": True}
    sink = wrapper.open_sink("a", **sizes)
    assert inner.asked.pop() == ("open_sink", ("a",), sizes)
    for name, (arguments, options) in SINK_CALLS.items():
        getattr(sink, name)(*arguments, **options)
        assert inner.asked.pop() == (name, arguments, options)
    sink.commit()
    assert inner.asked.pop() == ("commit", (), {"check_size": True})
    other = MemoryTransport()
    wrapper.copy_within(wrap(wrap(other)), "a", "b")  # of what is wrapped, however often
    assert inner.asked == [("copy_within", (other, "a", "b"), {})]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_wrapper_is_not_near_and_is_otherwise_as_what_it_wraps(wrap):
    wrapper = wrap(Noted())
    assert wrapper.is_local is False  # it may wait
    assert (wrapper.local_path, wrapper.reads_into, wrapper.pads, wrapper.cost) == ("/noted", False, True, FREE)
    assert (wrapper.at("a").url, wrapper.at("a").name) == ("noted://a", wrapper.name)


# Counting


def test_counts_requests_and_bytes():
    transport = CountingTransport(MemoryTransport({"a.bin": b"0123456789"}))
    assert transport.counters == Counters()
    transport.read("a.bin")
    transport.size("a.bin")
    transport.get_ranges("a.bin", starts=[0, 5, 7], ends=[3, 5, 9])
    transport.readinto("a.bin", starts=[0], buffers=[memoryview(bytearray(4))])
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


# Limits


def test_a_limit_counts_bytes_or_requests_whichever_takes_longer(naps, monkeypatch):
    """At 1000 bytes and 10 requests in a second; a part of a file is sent when enough was written."""
    monkeypatch.setattr(time, "monotonic", lambda: sum(naps))
    rate = Rate(1000, 10)
    transport = LimitTransport(MemoryTransport({"a.bin": bytes(500)}), rate)
    memory = memoryview(bytearray(200))
    sinks = [transport.open_sink("d.bin", used_nbytes=40, file_nbytes=40)]
    calls = {
        "size": (lambda: transport.size("a.bin"), 0.1),
        "read": (lambda: transport.read("a.bin"), 0.5),
        "get_ranges": (lambda: transport.get_ranges("a.bin", starts=[0, 9, 90], ends=[30, 9, 110]), 0.2),
        "get_ranges, long": (lambda: transport.get_ranges("a.bin", starts=[0, 90], ends=[300, 100]), 0.31),
        "get_ranges, empty": (lambda: transport.get_ranges("a.bin", starts=[9], ends=[9]), 0.0),
        "readinto": (lambda: transport.readinto("a.bin", starts=[0], buffers=[memory]), 0.2),
        "list": (transport.list, 0.1),
        "put": (lambda: transport.put("b.bin", bytes(300)), 0.3),
        "create": (lambda: transport.create("c.bin", bytes(20)), 0.1),
        "delete": (lambda: transport.delete("b.bin"), 0.1),
        "open_sink": (lambda: sinks.append(transport.open_sink("e.bin", used_nbytes=0, file_nbytes=0)), 0.1),
        "write": (lambda: sinks[0].write(0, [memory[:40]]), 0.04),
        "sync": (sinks[0].sync, 0.1),
        "read_back": (lambda: sinks[0].read_back(0, 40), 0.1),
        "commit": (sinks[0].commit, 0.1),
    }
    rate.take(0, 0)
    for name, (call, cost_s) in calls.items():
        naps[:] = [1.0]
        rate.take(0, 0)
        call()
        before_s = sum(naps)
        rate.take(0, 0)
        assert sum(naps) - before_s == pytest.approx(cost_s), name


def test_what_waits_takes_its_share_before_what_comes_next(naps, monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: sum(naps))
    rate, begun = Rate(requests_per_s=10), list[float]()
    for _ in range(5):
        rate.take(0, 1)
        begun.append(sum(naps))
    assert begun == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])


def test_pieces_of_a_long_range_are_requests_each(naps, monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: sum(naps))
    rate = Rate(requests_per_s=1)
    transport = LimitTransport(MemoryTransport({"a.bin": bytes(16 << 20)}), rate)
    for nbytes, n_requests in ((1, 1), (8 << 20, 1), ((8 << 20) + 1, 2), (16 << 20, 2)):
        before_s = sum(naps)
        transport.get_ranges("a.bin", starts=[0], ends=[nbytes])
        rate.take(0, 0)
        assert sum(naps) - before_s == pytest.approx(n_requests)


def test_what_is_written_counts_as_requests_of_a_fixed_length(naps, monkeypatch):
    """A client sends what several writes give it at once."""
    monkeypatch.setattr(time, "monotonic", lambda: sum(naps))
    rate = Rate(requests_per_s=1)
    sink = LimitTransport(MemoryTransport(), rate).open_sink("a.bin", used_nbytes=12 << 20, file_nbytes=12 << 20)
    rate.take(0, 0)
    for offset, nbytes, n_requests in ((0, 2 << 20, 0.25), (2 << 20, 10 << 20, 1.25)):
        before_s = sum(naps)
        sink.write(offset, [memoryview(bytes(nbytes))])
        rate.take(0, 0)
        assert sum(naps) - before_s == pytest.approx(n_requests)
