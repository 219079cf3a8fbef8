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
