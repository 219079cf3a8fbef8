"""What every transport has to do, as test classes: subclass them for a new back end.

```python
from saev_store.testing.transport import FILES, WriteContract

class TestMine(WriteContract):
    @pytest.fixture
    def transport(self):
        transport = MyTransport(...)
        for path, data in FILES.items():
            transport.put(path, data)
        return transport
```

A back end that only reads takes `ReadContract` and brings `FILES` there by its own means. Needs pytest.
"""

# ruff: noqa: S101
from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    NotFoundError,
    SaevStoreError,
    StoreExistsError,
    TransportError,
    UnsafeContentError,
    WriterConflictError,
)
from saev_store.transport import Lists, Moves, Nests, ReadsInto, ReadsRuns, Transport, Writes

#: What lies in the transport that a contract is tried on.
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


class ReadContract:
    """Reading: whole files, sizes, ranges, filling memory, listing, folders, pickles, threads."""

    #: Whether `list` knows sizes; web servers do not tell.
    lists_sizes = True

    @pytest.fixture
    def transport(self) -> Iterator[Transport]:
        """The transport under test, holding `FILES`."""
        raise NotImplementedError

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
        assert data == FILES[path]
        assert transport.size(path) == len(data)
        assert transport.read(path, max_bytes=max(1, len(data))) == data

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
            assert [bytes(part) for part in parts] == [truth[a:b] for a, b in zip(starts, ends, strict=True)]

    def test_ranges_may_be_empty_and_overlap(self, transport: Transport) -> None:
        truth, n = FILES["acts000000.bin"], len(FILES["acts000000.bin"])
        parts = transport.get_ranges("acts000000.bin", starts=[5, 0, n, 0, 3], ends=[5, n, n, n, 9])
        assert [bytes(part) for part in parts] == [b"", truth, b"", truth, truth[3:9]]
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
        assert array.tobytes() == FILES["acts000000.bin"][50_000:60_000]
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

    @pytest.mark.parametrize("path", UNSAFE)
    def test_never_leaves_its_root(self, transport: Transport, path: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: transport.read(path),
            lambda: transport.size(path),
            lambda: transport.get_ranges(path, starts=[0], ends=[1]),
        ]
        if isinstance(transport, ReadsInto):
            calls.append(lambda: transport.readinto(path, start=0, buffers=[memoryview(bytearray(1))]))
        for call in calls:
            with pytest.raises(UnsafeContentError):
                call()

    def test_fills_memory(self, transport: Transport) -> None:
        if not isinstance(transport, ReadsInto):
            pytest.skip("does not fill memory")
        floats, rest = np.zeros((10, 3), "<f4"), bytearray(70_001)
        buffers = [memoryview(floats), memoryview(b""), memoryview(bytearray(0)), memoryview(rest)]
        transport.readinto("acts000000.bin", start=7, buffers=buffers)
        assert floats.tobytes() + rest == FILES["acts000000.bin"][7 : 7 + 120 + 70_001]
        transport.readinto("empty.bin", start=0, buffers=[])

    def test_fills_thousands_of_buffers(self, transport: Transport) -> None:
        if not isinstance(transport, ReadsInto):
            pytest.skip("does not fill memory")
        rows = np.zeros((3000, 33), np.uint8)
        transport.readinto("acts000000.bin", start=3, buffers=[memoryview(row) for row in rows])
        assert rows.tobytes() == FILES["acts000000.bin"][3 : 3 + rows.nbytes]

    def test_fills_memory_from_many_places(self, transport: Transport) -> None:
        if not isinstance(transport, ReadsRuns):
            pytest.skip("does not read runs")
        starts, data = [900, 3, 3, 50_000, 100_000], FILES["acts000000.bin"]
        rows = [np.zeros(nbytes, np.uint8) for nbytes in (400, 1, 77_000, 50_000, 0)]
        transport.read_runs("acts000000.bin", starts=starts, buffers=[memoryview(row) for row in rows])
        for start, row in zip(starts, rows, strict=True):
            assert row.tobytes() == data[start : start + len(row)]
        transport.read_runs("empty.bin", starts=[], buffers=[])
        with pytest.raises(CorruptShardError):
            transport.read_runs("acts000000.bin", starts=[0, 100_002], buffers=[memoryview(bytearray(2))] * 2)
        with pytest.raises(ArgumentError, match="negative"):
            transport.read_runs("acts000000.bin", starts=[0, -1], buffers=[memoryview(bytearray(2))] * 2)
        with pytest.raises(ArgumentError, match="each range needs both"):
            transport.read_runs("acts000000.bin", starts=[0], buffers=[])

    def test_refuses_memory_it_cannot_fill(self, transport: Transport) -> None:
        if not isinstance(transport, ReadsInto):
            pytest.skip("does not fill memory")
        for buffer in (memoryview(b"12345"), memoryview(np.zeros((4, 4), np.uint8)[:, ::2])):
            with pytest.raises(ArgumentError, match=r"read-only|plain memory"):
                transport.readinto("acts000000.bin", start=0, buffers=[buffer])
        with pytest.raises(CorruptShardError):
            transport.readinto("acts000000.bin", start=100_000, buffers=[memoryview(bytearray(4))])

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
        if not isinstance(transport, Nests):
            pytest.skip("has no folders")
        part = transport.at("part")
        assert part.url == f"{transport.url.rstrip('/')}/part"
        assert part.name == transport.name
        note = FILES["part/deeper/note.txt"]
        assert part.read("deeper/note.txt") == note
        assert isinstance(part, Nests)
        assert part.at("deeper").read("note.txt") == note
        assert transport.at("").read("metadata.json") == FILES["metadata.json"]
        with pytest.raises(UnsafeContentError):
            transport.at("../elsewhere")
        if isinstance(part, Lists):
            assert [entry.path for entry in part.list()] == ["deeper"]
            assert [entry.path for entry in part.list("deeper")] == ["deeper/note.txt"]
        if isinstance(part, ReadsInto):
            buffer = bytearray(3)
            part.readinto("deeper/note.txt", start=1, buffers=[memoryview(buffer)])
            assert bytes(buffer) == note[1:4]

    def test_pickles(self, transport: Transport) -> None:
        again: Transport = pickle.loads(pickle.dumps(transport))  # noqa: S301  # what was pickled a moment ago
        assert (again.url, again.name, again.cost) == (transport.url, transport.name, transport.cost)
        assert again.read("acts000001.bin") == FILES["acts000001.bin"]
        for kind in (ReadsInto, ReadsRuns, Lists, Writes, Moves, Nests):
            assert isinstance(again, kind) == isinstance(transport, kind)
        if isinstance(transport, Nests):
            part: Transport = pickle.loads(pickle.dumps(transport.at("part")))  # noqa: S301  # what was pickled a moment ago
            assert part.read("deeper/note.txt") == FILES["part/deeper/note.txt"]

    def test_many_threads_read_at_once(self, transport: Transport) -> None:
        truth, errors = FILES["acts000000.bin"], list[BaseException]()
        start_together = threading.Barrier(8)

        def read(seed: int) -> None:
            rng = np.random.default_rng(seed)
            try:
                start_together.wait()
                for _ in range(6):
                    start = int(rng.integers(0, 90_000))
                    (part,) = transport.get_ranges("acts000000.bin", starts=[start], ends=[start + 5000])
                    assert bytes(part) == truth[start : start + 5000]
                    if isinstance(transport, ReadsInto):
                        buffer = bytearray(3000)
                        transport.readinto("acts000000.bin", start=start, buffers=[memoryview(buffer)])
                        assert buffer == truth[start : start + 3000]
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(200)
        assert not errors


class WriteContract(ReadContract):
    """Writing: replacing, exclusive creation, deletion, large files, locks."""

    #: How many of 16 threads that create the same name at once may win; more than 1 where a back end cannot decide.
    max_winners = 1
    #: Whether an unfinished file can be continued.
    resumes = True
    #: Whether `lock` holds.
    locks = True

    @pytest.fixture
    def writes(self, transport: Transport) -> Writes:
        """The same transport, as one that writes."""
        assert isinstance(transport, Writes)
        return transport

    def test_put_creates_and_replaces(self, transport: Transport, writes: Writes) -> None:
        for data in (b"one", b"", bytearray(b"another"), memoryview(b"last")):
            writes.put("new/folder/document.json", data)
            assert transport.read("new/folder/document.json") == bytes(data)
            assert transport.size("new/folder/document.json") == len(data)
        if isinstance(transport, Lists):
            assert [entry.path for entry in transport.list("new/folder")] == ["new/folder/document.json"]

    def test_put_is_seen_by_those_who_have_read_before(self, transport: Transport, writes: Writes) -> None:
        assert bytes(transport.get_ranges("acts000001.bin", starts=[0], ends=[4])[0]) == FILES["acts000001.bin"][:4]
        writes.put("acts000001.bin", b"0123456789")
        assert bytes(transport.get_ranges("acts000001.bin", starts=[2], ends=[6])[0]) == b"2345"
        with pytest.raises(CorruptShardError):
            transport.get_ranges("acts000001.bin", starts=[0], ends=[4096])
        if isinstance(transport, ReadsInto):
            buffer = bytearray(4)
            transport.readinto("acts000001.bin", start=2, buffers=[memoryview(buffer)])
            assert buffer == b"2345"

    def test_create_refuses_taken_names(self, transport: Transport, writes: Writes) -> None:
        writes.create("store/metadata.json", b"{}")
        for data in (b"{}", b"other"):
            with pytest.raises(StoreExistsError, match=r"metadata\.json"):
                writes.create("store/metadata.json", data)
        assert transport.read("store/metadata.json") == b"{}"
        writes.delete("store/metadata.json")
        writes.create("store/metadata.json", b"again")
        assert transport.read("store/metadata.json") == b"again"

    def test_create_has_one_winner(self, transport: Transport, writes: Writes) -> None:
        start_together = threading.Barrier(16)
        outcomes: list[tuple[int, str]] = []

        def create(rank: int) -> None:
            start_together.wait()
            try:
                writes.create("race/metadata.json", b"%02d" % rank * 100)
                outcomes.append((rank, "won"))
            except SaevStoreError as error:
                outcomes.append((rank, type(error).__name__))

        threads = [threading.Thread(target=create, args=(rank,)) for rank in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(200)
        winners = [rank for rank, outcome in outcomes if outcome == "won"]
        assert 1 <= len(winners) <= self.max_winners
        assert {outcome for _, outcome in outcomes} == {"won", "StoreExistsError"}
        assert transport.read("race/metadata.json") in {b"%02d" % rank * 100 for rank in winners}

    def test_deletes_files_and_folders(self, transport: Transport, writes: Writes) -> None:
        writes.delete("acts000000.bin")
        writes.delete("acts000000.bin")
        writes.delete("nowhere/at/all")
        writes.delete("part")
        for path in ("acts000000.bin", "part/deeper/note.txt"):
            with pytest.raises(NotFoundError):
                transport.size(path)
        assert transport.read("metadata.json") == FILES["metadata.json"]

    def test_moves_over_other_files(self, transport: Transport) -> None:
        if not isinstance(transport, Moves):
            return  # nothing is promised
        assert bytes(transport.get_ranges("acts000000.bin", starts=[0], ends=[4])[0]) == FILES["acts000000.bin"][:4]
        transport.move("acts000001.bin", "acts000000.bin")
        assert bytes(transport.get_ranges("acts000000.bin", starts=[0], ends=[4096])[0]) == FILES["acts000001.bin"]
        assert transport.size("acts000000.bin") == 4096
        transport.move("acts000000.bin", "part/new.bin")
        assert transport.read("part/new.bin") == FILES["acts000001.bin"]
        for path in ("acts000000.bin", "acts000001.bin"):
            with pytest.raises(NotFoundError):
                transport.read(path)
        with pytest.raises(NotFoundError):
            transport.move("acts000000.bin", "elsewhere.bin")
        for source, target in (("../x", "y"), ("empty.bin", "../y")):
            with pytest.raises(UnsafeContentError):
                transport.move(source, target)

    @pytest.mark.parametrize("path", UNSAFE)
    def test_never_writes_outside_its_root(self, writes: Writes, path: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: writes.put(path, b""),
            lambda: writes.create(path, b""),
            lambda: writes.delete(path),
            lambda: writes.open_sink(path, used_nbytes=1, file_nbytes=1),
            lambda: writes.lock(path).__enter__(),
        ]
        for call in calls:
            with pytest.raises(UnsafeContentError):
                call()

    def test_sink_writes_a_large_file(self, transport: Transport, writes: Writes) -> None:
        truth = np.random.default_rng(3).integers(0, 256, 300_000, np.uint8)
        sink = writes.open_sink("new/acts000000.bin", used_nbytes=300_000, file_nbytes=400_000)
        sink.write(200_000, [memoryview(truth[200_000:])])
        assert sink.sync() == 0
        sink.write(0, [memoryview(row) for row in truth[:120_000].reshape(1200, 100)])
        assert sink.sync() in {0, 120_000}
        sink.write(120_000, [memoryview(truth[120_000:200_000].view("<f4").reshape(100, 200)), memoryview(b"")])
        assert sink.sync() in {0, 300_000}
        assert sink.read_back(199_990, 200_010) == truth[199_990:200_010].tobytes()
        sink.commit()
        assert transport.size("new/acts000000.bin") == 400_000
        (part,) = transport.get_ranges("new/acts000000.bin", starts=[0], ends=[400_000])
        assert bytes(part) == truth.tobytes() + bytes(100_000)
        with pytest.raises(TransportError, match="committed"):
            sink.write(0, [memoryview(b"x")])

    @pytest.mark.parametrize(("used", "size"), [(0, 0), (0, 10), (10, 10)])
    def test_sink_of_odd_sizes(self, transport: Transport, writes: Writes, used: int, size: int) -> None:
        sink = writes.open_sink("odd.bin", used_nbytes=used, file_nbytes=size)
        sink.write(0, [memoryview(b"x" * used)])
        sink.commit()
        assert transport.read("odd.bin") == b"x" * used + bytes(size - used)

    def test_sink_refuses_holes_and_outside(self, transport: Transport, writes: Writes) -> None:
        with pytest.raises(ArgumentError):
            writes.open_sink("acts.bin", used_nbytes=10, file_nbytes=9)
        sink = writes.open_sink("acts.bin", used_nbytes=10, file_nbytes=20)
        for offset, data in ((-1, b"x"), (5, b"123456"), (11, b"")):
            with pytest.raises(ArgumentError, match="outside"):
                sink.write(offset, [memoryview(data)])
        sink.write(0, [memoryview(b"123")])
        sink.write(4, [memoryview(b"567890")])
        with pytest.raises(ArgumentError, match="only the first 3 of 10 bytes"):
            sink.commit()
        sink.write(2, [memoryview(b"34")])
        sink.commit()
        assert transport.read("acts.bin") == b"1234567890" + bytes(10)

    def test_sink_refuses_taken_names(self, transport: Transport, writes: Writes) -> None:
        with pytest.raises(StoreExistsError, match=r"acts000000\.bin"):
            writes.open_sink("acts000000.bin", used_nbytes=3, file_nbytes=3)
        assert transport.read("acts000000.bin") == FILES["acts000000.bin"]

    def test_sink_resumes(self, transport: Transport, writes: Writes) -> None:
        first = writes.open_sink("acts.bin", used_nbytes=10, file_nbytes=16)
        first.write(0, [memoryview(b"01234")])
        durable = first.sync()
        first.abort()
        again = writes.open_sink("acts.bin", used_nbytes=10, file_nbytes=16, resume=True)
        assert again.read_back(0, durable) == b"01234"[:durable]
        if self.resumes:
            assert durable == 5
            again.keep(3)  # what was verified
            again.write(3, [memoryview(b"3456789")])
            assert again.sync() == 10
        else:
            assert (durable, again.read_back(0, 10)) == (0, b"")
            again.write(0, [memoryview(b"0123456789")])
        again.commit()
        assert transport.read("acts.bin") == b"0123456789" + bytes(6)

    def test_sink_replaces_a_damaged_file(self, transport: Transport, writes: Writes) -> None:
        assert transport.size("acts000001.bin") == 4096
        sink = writes.open_sink("acts000001.bin", used_nbytes=100, file_nbytes=200, resume=True)
        sink.write(0, [memoryview(b"x" * 100)])
        sink.commit()
        assert transport.read("acts000001.bin") == b"x" * 100 + bytes(100)
        assert bytes(transport.get_ranges("acts000001.bin", starts=[99], ends=[101])[0]) == b"x\0"

    def test_one_holder_of_a_lock(self, writes: Writes) -> None:
        with writes.lock("hidden/lock"):
            if self.locks:
                with pytest.raises(WriterConflictError), writes.lock("hidden/lock"):
                    pass
        with writes.lock("hidden/lock"):
            pass
