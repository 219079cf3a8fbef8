"""The contract of transports, as test classes: subclass them for a new back end.

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

For a read-only back end subclass `ReadContract` and put `FILES` there by other means. Needs pytest.
"""

# ruff: noqa: S101
from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    NotFoundError,
    StoreExistsError,
    TransportError,
    UnsafeContentError,
    WriterConflictError,
)
from saev_store.testing._reading import FILES, UNSAFE, ReadContract, check_bytes
from saev_store.transport import Lists, Moves, Transport, Writes

__all__ = ["FILES", "ReadContract", "WriteContract"]


class WriteContract(ReadContract):
    """Writing: replacing, exclusive creation, deletion, large files, locks."""

    #: How many of 16 threads that create the same name at once may win; more than 1 if creation is not atomic.
    max_winners = 1
    #: Whether an unfinished file can be continued.
    resumes = True
    #: Whether `lock` holds.
    locks = True

    @pytest.fixture
    def writes(self, transport: Transport) -> Writes:
        """The transport, as `Writes`."""
        assert isinstance(transport, Writes)
        return transport

    def test_put_creates_and_replaces(self, transport: Transport, writes: Writes) -> None:
        for data in (b"one", b"", bytearray(b"another"), memoryview(b"last")):
            writes.put("new/folder/document.json", data)
            assert transport.read("new/folder/document.json") == bytes(data)
            assert transport.size("new/folder/document.json") == len(data)
        if isinstance(transport, Lists):
            assert [entry.path for entry in transport.list("new/folder")] == ["new/folder/document.json"]

    def test_put_is_seen_by_earlier_readers(self, transport: Transport, writes: Writes) -> None:
        assert bytes(transport.get_ranges("acts000001.bin", starts=[0], ends=[4])[0]) == FILES["acts000001.bin"][:4]
        writes.put("acts000001.bin", b"0123456789")
        assert bytes(transport.get_ranges("acts000001.bin", starts=[2], ends=[6])[0]) == b"2345"
        with pytest.raises(CorruptShardError):
            transport.get_ranges("acts000001.bin", starts=[0], ends=[4096])
        buffer = bytearray(4)
        transport.readinto("acts000001.bin", starts=[2], buffers=[memoryview(buffer)])
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

        def create(rank: int) -> bool:
            start_together.wait()
            try:
                writes.create("race/metadata.json", b"%02d" % rank * 100)
            except StoreExistsError:
                return False
            return True

        with ThreadPoolExecutor(16) as pool:
            winners = [rank for rank, has_won in enumerate(pool.map(create, range(16))) if has_won]
        assert 1 <= len(winners) <= self.max_winners
        assert transport.read("race/metadata.json") in {b"%02d" % rank * 100 for rank in winners}

    def test_deletes_files_and_folders(self, transport: Transport, writes: Writes) -> None:
        beside = ("acts000000.bin2", "part2/note.txt", "part.txt")
        for path in beside:
            writes.put(path, b"[]")
        if isinstance(transport, Lists):
            assert [entry.path for entry in transport.list("part")] == ["part/deeper"]
        writes.delete("acts000000.bin")
        writes.delete("acts000000.bin")
        writes.delete("nowhere/at/all")
        writes.delete("part")
        for path in ("acts000000.bin", "part/deeper/note.txt"):
            with pytest.raises(NotFoundError):
                transport.size(path)
        assert transport.read("metadata.json") == FILES["metadata.json"]
        for path in beside:
            assert transport.read(path) == b"[]"

    def test_deletes_nothing_but_what_is_named(self, transport: Transport, writes: Writes) -> None:
        """No name is a pattern."""
        for path in ("runs/a[12]/in/x", "runs/a[12]/y", "runs/a1/x", "runs/a*", "runs/ab"):
            writes.put(path, b"1")
        writes.delete("runs/a[12]")
        writes.delete("runs/a*")
        writes.delete("runs/[x]")
        assert transport.read("runs/a1/x") == transport.read("runs/ab") == b"1"
        for path in ("runs/a[12]/in/x", "runs/a[12]/y", "runs/a*"):
            with pytest.raises(NotFoundError):
                transport.size(path)

    def test_moves_over_other_files(self, transport: Transport) -> None:
        if not isinstance(transport, Moves):
            return  # moving is optional
        assert bytes(transport.get_ranges("acts000000.bin", starts=[0], ends=[4])[0]) == FILES["acts000000.bin"][:4]
        transport.move("acts000001.bin", "acts000000.bin")
        check_bytes(transport.get_ranges("acts000000.bin", starts=[0], ends=[4096]), [FILES["acts000001.bin"]])
        assert transport.size("acts000000.bin") == 4096
        transport.move("acts000000.bin", "part/new.bin")
        check_bytes([transport.read("part/new.bin")], [FILES["acts000001.bin"]])
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
        if self.resumes:
            assert sink.read_back(199_990, 200_010) == truth[199_990:200_010].tobytes()
        sink.commit()
        assert transport.size("new/acts000000.bin") == 400_000
        parts = transport.get_ranges("new/acts000000.bin", starts=[0], ends=[400_000])
        check_bytes(parts, [truth.tobytes() + bytes(100_000)])
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
        check_bytes([transport.read("acts000000.bin")], [FILES["acts000000.bin"]])

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
