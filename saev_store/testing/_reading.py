"""Tests that every reading transport has to pass; see `saev_store.testing.transport`."""

# ruff: noqa: S101
from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, takewhile

import numpy as np
import pytest

from saev_store.errors import ArgumentError, CorruptShardError, NotFoundError, TransportError, UnsafeContentError
from saev_store.names import joined_url
from saev_store.transport import Awaits, Buffer, Lists, Moves, Transport, Writes

#: Files that the transport under test has to hold.
FILES = {
    "metadata.json": b'{"protocol": "2.1"}\n',
    "acts000000.bin": np.random.default_rng(0).bytes(100_003),
    "acts000001.bin": np.random.default_rng(1).bytes(4096),
    "empty.bin": b"",
    "part/deeper/note.txt": "größer\n".encode(),
}
UNSAFE = (
    "",
    "/etc/passwd",
    "../x",
    "part/../../x",
    "part/..",
    "./metadata.json",
    "part//x",
    "part/",
    "a\0b",
    ".",
    "\ud800",
)


def follow(start: int, buffers: Sequence[memoryview]) -> list[int]:
    """Where each of several buffers begins in a file, if they follow each other there."""
    return list(accumulate((buffer.nbytes for buffer in buffers), initial=start))[:-1]


def check_bytes(found: Iterable[Buffer], truth: Iterable[Buffer]) -> None:
    """Fail where bytes differ, and name the first place that does.

    pytest shows the differences of long bytes line by line; where the variable `CI` is set, that takes minutes.
    """
    for n, (ours, theirs) in enumerate(zip(map(bytes, found), map(bytes, truth), strict=True)):
        if ours != theirs:
            same = takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))
            at = f"{sum(1 for _ in same):,}"
            pytest.fail(f"part {n}: {len(ours):,} bytes instead of {len(theirs):,}; they differ from byte {at} on")


async def awaited(transport: Awaits, path: str, start: int, end: int) -> Buffer:
    """One awaited range, for `asyncio.run`."""
    return await transport.get_range_async(path, start=start, end=end)


class ReadContract:
    """Reading: whole files, sizes, ranges, filling memory, listing, folders, pickles, threads."""

    #: Whether `list` returns sizes; web servers do not report them.
    lists_sizes = True

    @pytest.fixture
    def transport(self) -> Iterator[Transport]:
        """The transport under test, holding `FILES`; each suite that derives from this contract has its own."""
        raise NotImplementedError("a suite must define the fixture `transport`")

    def test_has_the_shape_of_a_transport(self, transport: Transport) -> None:
        assert isinstance(transport, Transport)
        assert transport.name
        assert transport.url
        assert not transport.url.endswith("/") or transport.url.endswith("://")
        assert transport.cost.max_gap_bytes >= 0
        assert transport.cost.max_request_bytes > 0

    @pytest.mark.parametrize("path", FILES)
    def test_reads_whole_files(self, transport: Transport, path: str) -> None:
        data = transport.read(path)
        assert type(data) is bytes
        check_bytes([data], [FILES[path]])
        assert transport.size(path) == len(data)
        check_bytes([transport.read(path, max_bytes=max(1, len(data)))], [data])

    def test_refuses_files_that_are_too_big(self, transport: Transport) -> None:
        with pytest.raises(TransportError, match="at most 4,095 bytes"):
            transport.read("acts000001.bin", max_bytes=4095)
        assert len(transport.read("acts000001.bin", max_bytes=4096)) == 4096

    def test_ranges_are_exact_and_in_order(self, transport: Transport) -> None:
        rng = np.random.default_rng(2)
        truth = FILES["acts000000.bin"]
        for n_ranges in (0, 1, 2, 17):
            starts = [int(start) for start in rng.integers(0, len(truth), n_ranges)]
            ends = [int(rng.integers(start, len(truth) + 1)) for start in starts]
            parts = transport.get_ranges("acts000000.bin", starts=starts, ends=ends)
            check_bytes(parts, [truth[a:b] for a, b in zip(starts, ends, strict=True)])

    def test_ranges_may_be_empty_and_overlap(self, transport: Transport) -> None:
        truth, n = FILES["acts000000.bin"], len(FILES["acts000000.bin"])
        parts = transport.get_ranges("acts000000.bin", starts=[5, 0, n, 0, 3], ends=[5, n, n, n, 9])
        check_bytes(parts, [b"", truth, b"", truth, truth[3:9]])
        assert [bytes(part) for part in transport.get_ranges("empty.bin", starts=[0], ends=[0])] == [b""]

    def test_ranges_cannot_be_written_to(self, transport: Transport) -> None:
        (part,) = transport.get_ranges("acts000000.bin", starts=[0], ends=[8])
        assert memoryview(part).readonly
        assert memoryview(part).format == "B"
        assert memoryview(part).ndim == 1

    def test_ranges_outlive_the_transport(self, transport: Transport) -> None:
        parts = transport.get_ranges("acts000000.bin", starts=[0, 50_000], ends=[8, 60_000])
        array = np.frombuffer(parts[1], np.uint8)
        transport.close()
        check_bytes([array.tobytes()], [FILES["acts000000.bin"][50_000:60_000]])
        assert transport.read("metadata.json") == FILES["metadata.json"]  # reopened

    @pytest.mark.parametrize(("start", "end"), [(-1, 5), (5, 4), (-5, -1)])
    def test_refuses_impossible_ranges(self, transport: Transport, start: int, end: int) -> None:
        with pytest.raises(ArgumentError, match="negative or backwards"):
            transport.get_ranges("acts000000.bin", starts=[0, start], ends=[1, end])

    def test_refuses_starts_without_ends(self, transport: Transport) -> None:
        with pytest.raises(ArgumentError, match="2 starts but 1 ends"):
            transport.get_ranges("acts000000.bin", starts=[0, 1], ends=[1])

    @pytest.mark.parametrize("end", [100_004, 200_000, 2**62])
    def test_says_when_a_file_is_too_short(self, transport: Transport, end: int) -> None:
        with pytest.raises(CorruptShardError, match=r"acts000000.bin.*100,003 bytes") as caught:
            transport.get_ranges("acts000000.bin", starts=[0, 100_000], ends=[10, end])
        assert f"{end:,}" in str(caught.value)

    def test_an_empty_file_is_too_short_for_anything(self, transport: Transport) -> None:
        with pytest.raises(CorruptShardError):
            transport.get_ranges("empty.bin", starts=[0], ends=[1])

    def test_says_what_is_not_there(self, transport: Transport) -> None:
        calls: list[Callable[[], object]] = [
            lambda: transport.read("gone.bin"),
            lambda: transport.read("gone.bin", max_bytes=10),
            lambda: transport.size("part/gone.bin"),
            lambda: transport.get_ranges("gone.bin", starts=[0], ends=[1]),
        ]
        for call in calls:
            with pytest.raises(NotFoundError, match=r"gone\.bin"):
                call()

    def test_awaited_ranges_are_those_of_get_ranges(self, transport: Transport) -> None:
        if not isinstance(transport, Awaits):
            return  # to be awaited is optional
        truth = FILES["acts000000.bin"]
        bounds = [(5, 5), (0, len(truth)), (3, 9), *((start, start + 700) for start in range(0, 90_000, 1009))]

        async def read() -> list[Buffer]:
            waits = [transport.get_range_async("acts000000.bin", start=start, end=end) for start, end in bounds]
            return await asyncio.gather(*waits)

        for _ in range(2):  # each in a loop of its own
            check_bytes(asyncio.run(read()), [truth[start:end] for start, end in bounds])
        kinds: list[tuple[str, int, int, type[Exception]]] = [
            ("acts000000.bin", 100_000, 100_004, CorruptShardError),
            ("acts000000.bin", 5, 4, ArgumentError),
            ("gone.bin", 0, 1, NotFoundError),
            ("../x", 0, 1, UnsafeContentError),
        ]
        for path, start, end, kind in kinds:
            with pytest.raises(kind):
                asyncio.run(awaited(transport, path, start, end))

    @pytest.mark.parametrize("path", UNSAFE)
    def test_never_leaves_its_root(self, transport: Transport, path: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: transport.read(path),
            lambda: transport.size(path),
            lambda: transport.get_ranges(path, starts=[0], ends=[1]),
            lambda: transport.readinto(path, starts=[0], buffers=[memoryview(bytearray(1))]),
        ]
        for call in calls:
            with pytest.raises(UnsafeContentError):
                call()

    def test_fills_memory(self, transport: Transport) -> None:
        floats, rest = np.zeros((10, 3), "<f4"), bytearray(70_001)
        buffers = [memoryview(floats), memoryview(b""), memoryview(bytearray(0)), memoryview(rest)]
        transport.readinto("acts000000.bin", starts=follow(7, buffers), buffers=buffers)
        check_bytes([floats.tobytes() + rest], [FILES["acts000000.bin"][7 : 7 + 120 + 70_001]])
        transport.readinto("empty.bin", starts=[], buffers=[])

    def test_fills_thousands_of_buffers(self, transport: Transport) -> None:
        rows = np.zeros((3000, 33), np.uint8)
        buffers = [memoryview(row) for row in rows]
        transport.readinto("acts000000.bin", starts=follow(3, buffers), buffers=buffers)
        check_bytes([rows.tobytes()], [FILES["acts000000.bin"][3 : 3 + rows.nbytes]])

    def test_fills_memory_from_many_places(self, transport: Transport) -> None:
        starts, data = [900, 3, 3, 50_000, 100_000], FILES["acts000000.bin"]
        rows = [np.zeros(nbytes, np.uint8) for nbytes in (400, 1, 77_000, 50_000, 0)]
        transport.readinto("acts000000.bin", starts=starts, buffers=[memoryview(row) for row in rows])
        check_bytes(
            [row.tobytes() for row in rows],
            [data[start : start + len(row)] for start, row in zip(starts, rows, strict=True)],
        )
        transport.readinto("empty.bin", starts=[], buffers=[])
        with pytest.raises(CorruptShardError):
            transport.readinto("acts000000.bin", starts=[0, 100_002], buffers=[memoryview(bytearray(2))] * 2)
        with pytest.raises(ArgumentError, match="negative"):
            transport.readinto("acts000000.bin", starts=[0, -1], buffers=[memoryview(bytearray(2))] * 2)
        with pytest.raises(ArgumentError, match="each range needs both"):
            transport.readinto("acts000000.bin", starts=[0], buffers=[])

    def test_refuses_memory_it_cannot_fill(self, transport: Transport) -> None:
        for buffer in (memoryview(b"12345"), memoryview(np.zeros((4, 4), np.uint8)[:, ::2])):
            with pytest.raises(ArgumentError, match=r"read-only|plain memory"):
                transport.readinto("acts000000.bin", starts=[0], buffers=[buffer])
        with pytest.raises(CorruptShardError):
            transport.readinto("acts000000.bin", starts=[100_000], buffers=[memoryview(bytearray(4))])

    def test_lists_one_level(self, transport: Transport) -> None:
        if not isinstance(transport, Lists):
            pytest.skip("does not list")
        found = {entry.path: (entry.is_dir, entry.size) for entry in transport.list()}
        sizes = {path: len(data) for path, data in FILES.items() if "/" not in path}
        expected = {path: (False, size if self.lists_sizes else None) for path, size in sizes.items()}
        assert found == {**expected, "part": (True, None)}
        assert [entry.path for entry in transport.list("part")] == ["part/deeper"]
        assert [entry.path for entry in transport.list("part/deeper")] == ["part/deeper/note.txt"]
        with pytest.raises(NotFoundError):
            transport.list("nowhere")
        with pytest.raises(UnsafeContentError):
            transport.list("..")

    def test_folders_are_roots(self, transport: Transport) -> None:
        part = transport.at("part")
        assert part.url == joined_url(transport.url, "part")
        assert part.name == transport.name
        note = FILES["part/deeper/note.txt"]
        assert part.read("deeper/note.txt") == note
        assert part.at("deeper").read("note.txt") == note
        assert transport.at("").read("metadata.json") == FILES["metadata.json"]
        with pytest.raises(UnsafeContentError):
            transport.at("../elsewhere")
        if isinstance(part, Lists):
            assert [entry.path for entry in part.list()] == ["deeper"]
            assert [entry.path for entry in part.list("deeper")] == ["deeper/note.txt"]
        buffer = bytearray(3)
        part.readinto("deeper/note.txt", starts=[1], buffers=[memoryview(buffer)])
        assert bytes(buffer) == note[1:4]

    def test_pickles(self, transport: Transport) -> None:
        again: Transport = pickle.loads(pickle.dumps(transport))  # noqa: S301  # what was pickled a moment ago
        assert (again.url, again.name, again.cost) == (transport.url, transport.name, transport.cost)
        check_bytes([again.read("acts000001.bin")], [FILES["acts000001.bin"]])
        for kind in (Lists, Writes, Moves):
            assert isinstance(again, kind) == isinstance(transport, kind)
        part: Transport = pickle.loads(pickle.dumps(transport.at("part")))  # noqa: S301  # what was pickled a moment ago
        assert part.read("deeper/note.txt") == FILES["part/deeper/note.txt"]

    def test_many_threads_read_at_once(self, transport: Transport) -> None:
        truth = FILES["acts000000.bin"]
        start_together = threading.Barrier(8)

        def read(seed: int) -> None:
            rng = np.random.default_rng(seed)
            start_together.wait()
            for _ in range(6):
                start = int(rng.integers(0, 90_000))
                (part,) = transport.get_ranges("acts000000.bin", starts=[start], ends=[start + 5000])
                check_bytes([part], [truth[start : start + 5000]])
                buffer = bytearray(3000)
                transport.readinto("acts000000.bin", starts=[start], buffers=[memoryview(buffer)])
                check_bytes([buffer], [truth[start : start + 3000]])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(read, range(8)))
