"""Reads that several threads share give the file's bytes, or the first thread's error, and leave no thread behind."""

from __future__ import annotations

import errno
import os
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saev_store._runtime import threads as _threads
from saev_store.errors import CorruptShardError, TransportError
from saev_store.testing._reading import follow
from saev_store.transport import MmapTransport
from saev_store.transport.checks import cut_runs
from saev_store.transport.local import _spread

FILE = np.random.default_rng(5).integers(0, 256, 100_000, dtype=np.uint8).tobytes()


@pytest.fixture
def spread(tmp_path, monkeypatch):
    """A file below a transport that shares out parts of 1,000 bytes among five threads, wherever the tests run."""
    monkeypatch.setattr(_spread, "PART_BYTES", 1000)
    monkeypatch.setattr(_spread, "WORTH_BYTES", 1000)
    monkeypatch.setattr(_threads, "n_cores", lambda: 5)
    (tmp_path / "acts000000.bin").write_bytes(FILE)
    transport = MmapTransport(tmp_path)
    yield transport
    transport.close()
    for thread in threading.enumerate():
        if thread.name == "saev-store-copy":
            thread.join(5)
            assert not thread.is_alive()


def read(transport, start, sizes):
    memory = [bytearray(size) for size in sizes]
    buffers = [memoryview(piece) for piece in memory]
    transport.readinto("acts000000.bin", starts=follow(start, buffers), buffers=buffers)
    return b"".join(memory)


@given(st.lists(st.tuples(st.integers(0, 2**62), st.lists(st.integers(1, 40_000_000), max_size=4)), max_size=8))
def test_parts_are_the_same_bytes_in_order(drawn):
    runs = [(start, [memoryview(np.broadcast_to(np.uint8(0), size)) for size in sizes]) for start, sizes in drawn]
    wanted = [(start, sum(sizes)) for start, sizes in drawn if sizes]
    found, filled = [], []
    for part in cut_runs(runs, _spread.PART_BYTES):
        filled.append(sum(view.nbytes for _, views in part for view in views))
        for start, views in part:
            nbytes = sum(view.nbytes for view in views)
            if found and found[-1][0] + found[-1][1] == start and found[-1] != wanted[len(found) - 1]:
                found[-1] = (found[-1][0], found[-1][1] + nbytes)
            else:
                found.append((start, nbytes))
    assert found == wanted
    assert all(nbytes == _spread.PART_BYTES for nbytes in filled[:-1])


@pytest.mark.parametrize("sizes", [[100_000], [99_999, 1], [1] * 3000, [1000, 2000, 500, 7000], [33_333, 0, 20_000]])
def test_gives_the_bytes(spread, sizes):
    for _ in range(20):
        assert read(spread, 0, sizes) == FILE[: sum(sizes)]
        assert read(spread, 123, [size for size in sizes if size < 99_000]) in FILE


def test_many_places_at_once(spread):
    starts, sizes = [5, 90_000, 40, 40, 70_000], [30_000, 10, 999, 1001, 30_000]
    memory = [bytearray(size) for size in sizes]
    spread.readinto("acts000000.bin", starts=starts, buffers=[memoryview(piece) for piece in memory])
    assert memory == [FILE[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def test_really_uses_several_threads(spread, monkeypatch):
    together, real = threading.Barrier(5), os.preadv

    def slow(fd, views, offset, *flags):
        together.wait(20)  # only five threads at once get past this
        return real(fd, views, offset, *flags)

    monkeypatch.setattr(os, "preadv", slow)
    assert read(spread, 0, [10_000]) == FILE[:10_000]


def test_short_answers_are_continued(spread, monkeypatch):
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset, *flags: real(fd, [views[0][:77]], offset, *flags))
    assert read(spread, 5, [20_000, 30_000]) == FILE[5:50_005]


@pytest.mark.parametrize("where", [0, 17_000, 49_000])
def test_an_error_of_any_part_is_the_error_of_the_read(spread, monkeypatch, where):
    real = os.preadv

    def broken(fd, views, offset, *flags):
        if offset == where:
            raise OSError(errno.EIO, "")
        return real(fd, views, offset, *flags)

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(TransportError, match=r"acts000000\.bin: could not read: .*EIO"):
        read(spread, 0, [50_000])


def test_a_file_that_ends_under_the_threads(spread, monkeypatch):
    real = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, views, offset, *flags: 0 if offset >= 30_000 else real(fd, views, offset, *flags)
    )
    with pytest.raises(CorruptShardError, match=r"has 3\d,000 bytes but byte 50,000 is needed"):
        read(spread, 0, [50_000])


@given(st.lists(st.booleans(), min_size=100, max_size=100), st.integers(0, 1000))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
def test_what_is_not_in_memory_is_read_in_as_few_requests_as_can_be(spread, cached, start):
    """The kernel is made to say which thousands of bytes it holds."""
    real, plain = os.preadv, []

    def preadv(fd, views, offset, flags=0):
        if not flags:
            plain.append((offset, sum(view.nbytes for view in views)))
            return real(fd, views, offset)
        first = offset // 1000
        behind = next((place for place in range(first, 100) if not cached[place]), 100) * 1000
        if behind <= offset:
            raise BlockingIOError(errno.EAGAIN, "")
        return real(fd, [views[0][: behind - offset]], offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        assert read(spread, start, [50_000, 40_000]) == FILE[start : start + 90_000]
    assert len(plain) <= 6  # at most one hole for each thread, and what is behind them


@pytest.mark.parametrize("n_told", [0, 1, 2])
def test_a_file_system_that_cannot_tell_what_is_in_memory(spread, n_told, monkeypatch):
    """From the first byte on, or after a part of what each thread wanted."""
    real, told = os.preadv, dict[int, int]()

    def preadv(fd, views, offset, flags=0):
        if not flags:
            return real(fd, views, offset)
        n = told.get(offset, 0)
        if n == n_told:
            raise OSError(errno.EOPNOTSUPP, "")
        n_read = real(fd, [views[0][:7]], offset)
        told[offset + n_read] = n + 1
        return n_read

    monkeypatch.setattr(os, "preadv", preadv)
    assert read(spread, 5, [50_000]) == FILE[5:50_005]


@pytest.mark.parametrize("every", [1, 3, 7, 1000])
def test_short_places_of_which_some_are_not_in_memory(spread, every, monkeypatch):
    """Many places are one part, and a place that waits for the disk is followed by others, which must not be left out."""
    real, starts = os.preadv, list(range(40, 90_000, 300))

    def preadv(fd, views, offset, flags=0):
        if flags and (offset - 40) // 300 % every == every - 1:
            raise BlockingIOError(errno.EAGAIN, "")
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    for _ in range(3):  # also after reads that had to wait
        memory = [bytearray(100) for _ in starts]
        spread.readinto("acts000000.bin", starts=starts, buffers=[memoryview(piece) for piece in memory])
        assert memory == [FILE[start : start + 100] for start in starts]


def test_a_system_without_threads_to_spare(spread, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert read(spread, 0, [50_000]) == FILE[:50_000]


def test_ctrl_c_is_not_swallowed_and_stops_the_others(spread, monkeypatch):
    real, main, came, reads = os.preadv, threading.main_thread(), threading.Event(), []

    def interrupted(fd, views, offset, *flags):
        if threading.current_thread() is main:
            came.set()
            raise KeyboardInterrupt
        assert came.wait(20)
        reads.append(offset)
        return real(fd, views, offset, *flags)

    monkeypatch.setattr(os, "preadv", interrupted)
    with pytest.raises(KeyboardInterrupt):
        read(spread, 0, [100_000])
    assert len(reads) < 20
