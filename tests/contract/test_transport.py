"""What every transport promises, at every place."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate

import fsspec.asyn
import numpy as np
import pytest
from cloud_servers import Fault, Proxy
from contract_places import BUCKETS, FILES, READS, SERVED, UNSAFE, WRITES, Place, filled, n_uploads
from retries import few_tries  # noqa: F401 (a fixture)
from waiting import HANG_S, soon

from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    NotFoundError,
    ReadOnlyError,
    StoreExistsError,
    TransportError,
    UnsafeContentError,
    WriterConflictError,
)
from saev_store.transport import Transport, open_transport

BIG = FILES["acts000000.bin"]
#: The error of a file that another one has replaced since it was first read.
REPLACED = (TransportError, CorruptShardError)


@pytest.fixture(scope="module", params=READS)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A place that is only read."""
    with filled(request.param, tmp_path_factory.mktemp("place")) as found:
        yield found


@pytest.fixture(params=WRITES)
def written(request: pytest.FixtureRequest, tmp_path) -> Iterator[Place]:
    """A place of this test's own."""
    with filled(request.param, tmp_path) as found:
        yield found


def one(transport: Transport, path: str, start: int, end: int) -> bytes:
    (part,) = transport.get_ranges(path, starts=[start], ends=[end])
    return bytes(part)


def same(found: Sequence[object], truth: Sequence[object]) -> bool:
    """Whether bytes are equal; pytest explains long ones for minutes."""
    return list(map(bytes, found)) == list(map(bytes, truth))


# Reading


def test_a_transport_shows_its_root(place: Place) -> None:
    transport = place.open()
    assert transport.url == place.url
    assert place.open("part").url == transport.at("part").url
    assert transport.name == transport.at("part").name != ""
    assert transport.is_local == place.is_local
    assert transport.local_path == (place.url if place.is_local else None)
    assert transport.at("").read("metadata.json") == FILES["metadata.json"]
    assert transport.at("part").at("deeper").read("note.txt") == FILES["part/deeper/note.txt"]


def test_read_gives_whole_files_up_to_a_size(place: Place) -> None:
    transport = place.open()
    for path, truth in FILES.items():
        data = transport.read(path)
        assert type(data) is bytes and data == truth
        assert transport.size(path) == len(data)
        assert transport.read(path, max_bytes=max(1, len(data))) == data
    with pytest.raises(TransportError) as refused:
        transport.read("acts000001.bin", max_bytes=4095)
    assert "acts000001.bin" in str(refused.value.where)


def test_get_ranges_gives_exact_bytes_in_order(place: Place) -> None:
    transport, rng, n = place.open(), np.random.default_rng(2), len(BIG)
    cases: list[tuple[list[int], list[int]]] = [
        ([], []),
        ([5, 0, n, 0, 3], [5, n, n, n, 9]),  # empty, whole, and one in another
        ([9, 6, 3, 0], [12, 9, 6, 3]),  # neighbours, backwards
        ([*range(0, 5000, 100), 90_000], [*range(100, 5100, 100), 90_001]),  # neighbours, and one far away
        ([7, 7, 7], [8, 8, 9]),
    ]
    for n_ranges in (1, 2, 17, 300):
        starts = [int(start) for start in rng.integers(0, n, n_ranges)]
        cases.append((starts, [int(rng.integers(start, min(n, start + 3000) + 1)) for start in starts]))
    for starts, ends in cases:
        parts = transport.get_ranges("acts000000.bin", starts=starts, ends=ends)
        assert same(parts, [BIG[start:end] for start, end in zip(starts, ends, strict=True)]), (starts, ends)
        for part in parts:
            view = memoryview(part)
            assert view.readonly and view.format == "B" and view.ndim == 1
    assert same(transport.get_ranges("empty.bin", starts=[0], ends=[0]), [b""])


def test_ranges_outlive_their_transport(place: Place) -> None:
    parts = place.open().get_ranges("acts000000.bin", starts=[0, 50_000], ends=[8, 60_000])
    gc.collect()
    assert same([np.frombuffer(part, np.uint8) for part in parts], [BIG[:8], BIG[50_000:60_000]])


def test_readinto_fills_every_byte(place: Place) -> None:
    transport = place.open()
    floats, rest = np.zeros((10, 3), "<f4"), bytearray(70_001)
    buffers = [memoryview(floats), memoryview(b""), memoryview(bytearray(0)), memoryview(rest)]
    starts = list(accumulate((buffer.nbytes for buffer in buffers), initial=7))[:-1]
    transport.readinto("acts000000.bin", starts=starts, buffers=buffers)
    assert same([floats.tobytes() + rest], [BIG[7 : 7 + 120 + 70_001]])
    rows = np.zeros((3000, 33), np.uint8)  # more than one system call takes
    transport.readinto(
        "acts000000.bin", starts=range(3, 3 + rows.nbytes, 33), buffers=[memoryview(row) for row in rows]
    )
    assert same([rows], [BIG[3 : 3 + rows.nbytes]])
    places = {900: 400, 3: 77_000, 50_000: 50_000, 100_000: 0}
    parts = [np.zeros(nbytes, np.uint8) for nbytes in places.values()]
    transport.readinto("acts000000.bin", starts=list(places), buffers=[memoryview(part) for part in parts])
    assert same(parts, [BIG[start : start + nbytes] for start, nbytes in places.items()])
    transport.readinto("empty.bin", starts=[], buffers=[])


def test_a_range_beyond_the_end_is_a_corrupt_shard(place: Place) -> None:
    """Nothing is allocated for a length that the file does not have."""
    transport = place.open()
    for path, start, end in (
        ("acts000000.bin", 100_000, 100_004),
        ("acts000000.bin", 100_003, 100_004),
        ("acts000000.bin", 200_000, 200_001),
        ("acts000000.bin", 5, 2**62),
        ("empty.bin", 0, 1),
    ):
        for starts, ends in (([start], [end]), ([0, start], [min(10, len(FILES[path])), end])):
            with pytest.raises(CorruptShardError) as refused:
                transport.get_ranges(path, starts=starts, ends=ends)
            assert path in str(refused.value.where)
        with pytest.raises(CorruptShardError):
            transport.readinto(path, starts=[max(0, len(FILES[path]) - 1)], buffers=[memoryview(bytearray(2))])
    with pytest.raises(CorruptShardError):
        transport.readinto("acts000000.bin", starts=[0, 100_002], buffers=[memoryview(bytearray(2))] * 2)


def test_impossible_ranges_are_argument_errors(place: Place) -> None:
    transport, two = place.open(), memoryview(bytearray(2))
    for starts, ends in (([0, -1], [1, 5]), ([0, 5], [1, 4]), ([-5], [-1])):
        with pytest.raises(ArgumentError):
            transport.get_ranges("acts000000.bin", starts=starts, ends=ends)
    with pytest.raises(ArgumentError):
        transport.readinto("acts000000.bin", starts=[0, -1], buffers=[two, two])


def test_what_is_not_there_is_not_found(place: Place) -> None:
    transport = place.open()
    for call in (
        lambda: transport.read("gone.bin"),
        lambda: transport.read("gone.bin", max_bytes=10),
        lambda: transport.size("part/gone.bin"),
        lambda: transport.get_ranges("gone.bin", starts=[0], ends=[1]),
        lambda: transport.readinto("gone.bin", starts=[0], buffers=[memoryview(bytearray(1))]),
        lambda: place.open("nowhere").read("gone.bin"),
    ):
        with pytest.raises(NotFoundError) as refused:
            call()
        assert "gone.bin" in str(refused.value.where)
    with pytest.raises(NotFoundError):
        transport.list("nowhere")


def test_paths_that_leave_the_root_are_refused(place: Place) -> None:
    transport, memory = place.open(), [memoryview(bytearray(1))]
    for path in UNSAFE:
        for call in (
            transport.read,
            transport.size,
            lambda path: transport.get_ranges(path, starts=[0], ends=[1]),
            lambda path: transport.readinto(path, starts=[0], buffers=memory),
            lambda path: transport.at(path or ".."),
            lambda path: transport.list(path or ".."),
            lambda path: transport.put(path, b""),
            lambda path: transport.create(path, b""),
            transport.delete,
            lambda path: transport.open_sink(path, used_nbytes=1, file_nbytes=1),
            lambda path: transport.lock(path).__enter__(),
        ):
            with pytest.raises(UnsafeContentError):
                call(path)


def test_list_gives_one_level(place: Place) -> None:
    transport = place.open()
    found = {entry.path: (entry.is_dir, entry.size) for entry in transport.list()}
    tells_sizes = place.name != "http"  # pages of web servers do not
    files = {path: (False, len(data) if tells_sizes else None) for path, data in FILES.items() if "/" not in path}
    assert found == {**files, "part": (True, None)}
    assert [entry.path for entry in transport.list("part")] == ["part/deeper"]
    assert [(entry.path, entry.name) for entry in transport.list("part/deeper")] == [
        ("part/deeper/note.txt", "note.txt")
    ]
    assert [entry.path for entry in transport.at("part").list("deeper")] == ["deeper/note.txt"]


def test_a_pickle_reads_the_same(place: Place) -> None:
    for transport in (place.open(), place.open().at("part").at("")):
        again = pickle.loads(pickle.dumps(transport))
        assert (again.url, again.name) == (transport.url, transport.name)
    assert pickle.loads(pickle.dumps(place.open())).read("acts000001.bin") == FILES["acts000001.bin"]
    assert pickle.loads(pickle.dumps(place.open().at("part"))).read("deeper/note.txt") == FILES["part/deeper/note.txt"]


def test_many_threads_read_at_once(place: Place) -> None:
    transport, together = place.open(), threading.Barrier(8)

    def read(seed: int) -> bool:
        rng = np.random.default_rng(seed)
        together.wait(HANG_S)
        right = True
        for start in map(int, rng.integers(0, 90_000, 6)):
            buffer = bytearray(3000)
            transport.readinto("acts000000.bin", starts=[start], buffers=[memoryview(buffer)])
            right &= one(transport, "acts000000.bin", start, start + 5000) == BIG[start : start + 5000]
            right &= buffer == BIG[start : start + 3000]
        return right

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(8)))


# Awaiting


def test_awaited_ranges_are_those_of_get_ranges(place: Place) -> None:
    transport = place.open()
    bounds = [(5, 5), (0, len(BIG)), (3, 9), *((start, start + 700) for start in range(0, 90_000, 1009))]

    async def read() -> list[object]:
        return await asyncio.gather(
            *(transport.get_range_async("acts000000.bin", start=start, end=end) for start, end in bounds)
        )

    truth = [BIG[start:end] for start, end in bounds]
    for _ in range(2):  # each in a loop of its own
        assert same(asyncio.run(read()), truth)
    # Next to s3fs, on its loop.
    loop = fsspec.asyn.get_loop()
    assert same(asyncio.run_coroutine_threadsafe(read(), loop).result(HANG_S), truth)
    for path, start, end, kind in (
        ("acts000000.bin", 100_000, 100_004, CorruptShardError),
        ("acts000000.bin", 5, 4, ArgumentError),
        ("gone.bin", 0, 1, NotFoundError),
        ("../x", 0, 1, UnsafeContentError),
    ):
        with pytest.raises(kind):
            asyncio.run(transport.get_range_async(path, start=start, end=end))


@pytest.mark.parametrize("name", [name for name in (*SERVED, "obstore-gs") if name in READS])
def test_64_awaited_ranges_are_two_rounds_of_requests_at_most(name: str, tmp_path) -> None:
    """Answers are held back until half of the requests are there. Cancelled ones are given up."""
    with filled(name, tmp_path) as place, Proxy(place.server) as proxy:
        transport = place.through(proxy)
        one(transport, "acts000000.bin", 0, 4)
        hold = Fault(path="acts", times=-1, hold=lambda: proxy.most_busy >= 32)
        proxy.faults.append(hold)
        proxy.most_busy = 0

        async def read() -> list[object]:
            starts = range(0, 64 * 1500, 1500)
            return await asyncio.gather(
                *(transport.get_range_async("acts000000.bin", start=start, end=start + 9) for start in starts)
            )

        async def read_in_time() -> list[object]:
            return await asyncio.wait_for(read(), HANG_S)

        assert same(asyncio.run(read_in_time()), [BIG[start : start + 9] for start in range(0, 64 * 1500, 1500)])
        hold.hold = lambda: False

        async def cancel() -> None:
            task = asyncio.ensure_future(read())
            await asyncio.to_thread(soon, lambda: proxy.busy >= 8)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancel())
        assert soon(lambda: proxy.busy == 0)
        proxy.faults.clear()
        assert one(transport, "acts000000.bin", 3, 9) == BIG[3:9]


# Requests


@pytest.mark.parametrize("name", [name for name in (*SERVED, "obstore-gs") if name in READS])
def test_neighbours_are_one_request_and_distant_ranges_are_not(name: str, tmp_path) -> None:
    with filled(name, tmp_path) as place, Proxy(place.server) as proxy:
        large = bytes(4 << 20)
        place.fill("large.bin", large)
        transport = place.through(proxy)
        starts = range(0, 100_000, 100)
        rows = np.zeros((1000, 100), np.uint8)
        for call in (
            lambda: transport.get_ranges("acts000000.bin", starts=starts, ends=[start + 100 for start in starts]),
            lambda: transport.readinto("acts000000.bin", starts=starts, buffers=[memoryview(row) for row in rows]),
        ):
            proxy.log.clear()
            call()
            assert len([path for _, path, bounds, _ in proxy.log if "acts000000" in path and bounds]) <= 2
        assert same([rows], [BIG[:100_000]])
        proxy.log.clear()
        transport.get_ranges("large.bin", starts=[0, (4 << 20) - 10], ends=[10, 4 << 20])
        bounds = [re.fullmatch(r"bytes=(\d+)-(\d+)", bounds) for _, _, bounds, _ in proxy.log]
        assert 20 <= sum(int(found[2]) + 1 - int(found[1]) for found in bounds if found) <= 1 << 20


# Replaced files


@pytest.mark.usefixtures("few_tries")
def test_a_file_that_is_replaced_while_it_is_read_is_an_error_until_it_is_opened_again(written: Place) -> None:
    new = np.random.default_rng(7).bytes(len(BIG))
    transport = written.open()
    first = transport.get_ranges("acts000000.bin", starts=[0], ends=[100])
    version = transport.version("acts000000.bin")
    assert isinstance(version, str) and version
    again = written.open()
    one(again, "acts000000.bin", 5, 6)
    assert again.version("acts000000.bin") == version
    written.fill("acts000000.bin", new)
    memory = bytearray(100)
    calls = [
        lambda: transport.get_ranges("acts000000.bin", starts=[0, 5900], ends=[100, 6000]),
        lambda: (
            transport.readinto("acts000000.bin", starts=[5900], buffers=[memoryview(memory)]) or [BIG[:100], memory]
        ),
        lambda: again.get_ranges("acts000000.bin", starts=[0, 5900], ends=[100, 6000]),
    ]
    if written.is_bucket:
        travelled = pickle.loads(pickle.dumps(transport))
        calls += [
            lambda: transport.at("").get_ranges("acts000000.bin", starts=[0], ends=[100]),
            lambda: travelled.get_ranges("acts000000.bin", starts=[0], ends=[100]),
        ]
    calls.append(lambda: [asyncio.run(transport.get_range_async("acts000000.bin", start=0, end=100))])
    for call in calls:
        try:
            parts = call()
        except REPLACED as error:
            assert "acts000000.bin" in str(error.where)
        else:
            if written.is_local:  # a file that is open still is the old one
                assert same(parts, [BIG[:100], BIG[5900:6000]][: len(parts)])
                continue
            assert written.engine != "obstore"  # answers through fsspec have no version
    assert same(first, [BIG[:100]])
    fresh = written.open()
    assert one(fresh, "acts000000.bin", 0, 100) == new[:100]
    assert fresh.version("acts000000.bin") != version
    if written.is_local:
        os.truncate(f"{written.url}/acts000000.bin", 50)
    else:
        written.fill("acts000000.bin", b"short")
    with pytest.raises(REPLACED):
        one(fresh, "acts000000.bin", 0, 100)


def test_map_prefix_is_a_view_that_check_mapped_compares_until_the_file_is_replaced(tmp_path) -> None:
    with filled("mmap", tmp_path) as place, filled("pread", tmp_path) as other:
        assert other.open().map_prefix("acts000000.bin", 10) is None
        transport = place.open()
        for nbytes in (0, 10, len(BIG)):
            view = transport.map_prefix("acts000000.bin", nbytes)
            assert view.readonly and bytes(view) == BIG[:nbytes]
            transport.check_mapped("acts000000.bin", nbytes)
        for call in (transport.map_prefix, transport.check_mapped):
            with pytest.raises(CorruptShardError):
                call("acts000000.bin", len(BIG) + 1)
        version = transport.version("acts000000.bin")
        assert place.open().version("acts000000.bin") == version == transport.stat("acts000000.bin").version
        place.fill("acts000000.bin", BIG[::-1])
        for call in (transport.map_prefix, place.open().check_mapped):
            with suppress(CorruptShardError):  # or the old file goes on
                call("acts000000.bin", 10)
        assert bytes(view) == BIG
        transport.close()
        assert bytes(transport.map_prefix("acts000000.bin", 10)) == BIG[::-1][:10]
        assert transport.version("acts000000.bin") != version


def test_a_transport_that_expects_files_reads_no_others(tmp_path) -> None:
    with filled("mmap", tmp_path) as place:
        transport, status = place.open(), os.stat(f"{place.url}/acts000000.bin")
        transport.expect({"acts000000.bin": (status.st_size, status.st_mtime_ns)})
        for is_changed in (False, True):
            for each in (transport.unmapped(), pickle.loads(pickle.dumps(transport))):
                if not is_changed:
                    assert one(each, "acts000000.bin", 3, 9) == BIG[3:9]
                    continue
                for _ in range(2):
                    with pytest.raises(CorruptShardError):
                        one(each, "acts000000.bin", 3, 9)
                    each.close()
            place.fill("acts000000.bin", BIG)


def test_a_file_that_is_opened_again_is_the_first_one_or_an_error(tmp_path) -> None:
    """Of hundreds of files only some stay open."""
    with filled("pread", tmp_path) as place:
        transport = place.open()
        one(transport, "acts000000.bin", 0, 9)
        place.fill("acts000000.bin", BIG[::-1])
        for n in range(200):
            os.link(f"{place.url}/acts000001.bin", f"{place.url}/{n}.bin")
            assert one(transport, f"{n}.bin", 0, 9) == FILES["acts000001.bin"][:9]
        with pytest.raises(CorruptShardError):
            one(transport, "acts000000.bin", 0, 9)


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_a_device_in_the_place_of_a_file_is_refused(engine: str, tmp_path) -> None:
    (tmp_path / "metadata.json").symlink_to("/dev/zero")
    transport = open_transport(tmp_path, engine=engine)
    for read in (transport.read, transport.stat, transport.version, lambda path: one(transport, path, 0, 1)):
        with pytest.raises(TransportError):
            read("metadata.json")


@pytest.mark.parametrize("below", ["link", "link/folder"])
def test_nothing_is_written_below_a_link_that_leads_nowhere(below: str, tmp_path) -> None:
    """Such as to a disk that is not mounted."""
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    transport = open_transport(tmp_path / below)
    for write in (
        lambda: transport.put("x", b""),
        lambda: transport.create("x", b""),
        lambda: transport.open_sink("x", used_nbytes=0, file_nbytes=0),
        lambda: transport.lock("x").__enter__(),
    ):
        with pytest.raises(NotFoundError):
            write()


def test_a_link_that_leads_nowhere_is_listed_without_a_size(tmp_path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert [(entry.name, entry.is_dir, entry.size) for entry in open_transport(tmp_path).list()] == [
        ("link", False, None)
    ]


def test_what_a_transport_changes_itself_it_reads(written: Place) -> None:
    transport = written.open()
    assert one(transport, "acts000001.bin", 0, 4) == FILES["acts000001.bin"][:4]
    transport.put("acts000001.bin", b"0123456789")
    assert one(transport, "acts000001.bin", 2, 6) == b"2345"
    with pytest.raises(CorruptShardError):
        one(transport, "acts000001.bin", 0, 4096)
    transport.delete("acts000001.bin")
    transport.create("acts000001.bin", b"abcdefghij")
    assert one(transport, "acts000001.bin", 2, 6) == b"cdef"
    transport.delete("acts000001.bin")
    sink = transport.open_sink("acts000001.bin", used_nbytes=4, file_nbytes=6)
    sink.write([memoryview(b"wxyz")])
    sink.commit()
    assert one(transport, "acts000001.bin", 2, 6) == b"yz\0\0"


# Writing


def test_put_creates_and_replaces(written: Place) -> None:
    transport, reader = written.open(), written.open()
    for data in (b"one", b"", bytearray(b"another"), memoryview(b"last")):
        transport.put("new/folder/document.json", data)
        assert reader.read("new/folder/document.json") == bytes(data)
        assert reader.size("new/folder/document.json") == len(data)
    assert [entry.path for entry in reader.list("new/folder")] == ["new/folder/document.json"]


def test_create_refuses_names_that_are_taken(written: Place) -> None:
    transport = written.open()
    transport.create("store/metadata.json", b"{}")
    for data in (b"{}", b"other"):
        with pytest.raises(StoreExistsError) as refused:
            written.open().create("store/metadata.json", data)
        assert "metadata.json" in str(refused.value.where)
    assert transport.read("store/metadata.json") == b"{}"
    transport.delete("store/metadata.json")
    transport.create("store/metadata.json", b"again")
    assert transport.read("store/metadata.json") == b"again"
    assert [entry.name for entry in transport.list("store")] == ["metadata.json"]


def test_create_has_one_winner(written: Place) -> None:
    if written.name.startswith("swift"):
        pytest.skip("Swift's conditional create is not atomic: docs/cloud.md")
    transport, together = written.open(), threading.Barrier(16)

    def create(rank: int) -> bool:
        together.wait(HANG_S)
        try:
            transport.create("race/metadata.json", b"%02d" % rank * 100)
        except StoreExistsError:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        winners = [rank for rank, has_won in enumerate(pool.map(create, range(16))) if has_won]
    assert len(winners) == 1
    assert transport.read("race/metadata.json") == b"%02d" % winners[0] * 100


def test_delete_takes_a_file_or_a_folder_and_nothing_else(written: Place) -> None:
    """No name is a pattern."""
    transport = written.open()
    others = ("acts000000.bin2", "part2/note.txt", "part.txt", "runs/a1/x", "runs/ab")
    gone = ("runs/a[12]/in/x", "runs/a[12]/y", "runs/a*", "acts000000.bin", "part/deeper/note.txt")
    for path in {*others, *gone} - FILES.keys():
        transport.put(path, b"1")
    for path in ("acts000000.bin", "acts000000.bin", "nowhere/at/all", "part", "runs/a[12]", "runs/a*", "runs/[x]"):
        transport.delete(path)
    for path in gone:
        with pytest.raises(NotFoundError):
            transport.size(path)
    for path in others:
        assert transport.read(path) == b"1"
    assert transport.read("metadata.json") == FILES["metadata.json"]


def test_a_sink_writes_a_large_file_from_its_first_byte_to_its_last(written: Place) -> None:
    """Longer than two parts of an upload, and with zeros behind what is used. Memory is used again at once."""
    truth = np.random.default_rng(3).integers(0, 256, 20_000_000, np.uint8)
    used, size = truth.nbytes, truth.nbytes + 1_000_003
    transport = written.open()
    sink = transport.open_sink("new/acts000000.bin", used_nbytes=used, file_nbytes=size)
    if not written.is_local:
        with pytest.raises(NotFoundError):
            transport.size("new/acts000000.bin")
    sink.write([memoryview(row) for row in truth[:120_000].reshape(1200, 100)])
    sink.write([memoryview(truth[120_000:200_000].view("<f4").reshape(100, 200)), memoryview(b"")])
    block = np.zeros(3 << 20, np.uint8)
    for start in range(200_000, used, 3 << 20):
        part = block[: used - start]
        part[:] = truth[start : start + len(part)]
        sink.write([memoryview(part)])
        part[:] = 0
    sink.commit()
    assert transport.size("new/acts000000.bin") == size
    assert one(transport, "new/acts000000.bin", 0, size) == truth.tobytes() + bytes(1_000_003)


def test_a_sink_writes_files_of_odd_sizes(written: Place) -> None:
    for used, size in ((0, 0), (0, 10), (10, 10)):
        transport = written.open(f"{used}-{size}")
        sink = transport.open_sink("odd.bin", used_nbytes=used, file_nbytes=size)
        sink.write([memoryview(b"x" * used)])
        sink.commit()
        assert transport.read("odd.bin") == b"x" * used + bytes(size - used)


def test_a_sink_refuses_holes_and_names_that_are_taken(written: Place) -> None:
    transport = written.open()
    with pytest.raises(StoreExistsError):
        transport.open_sink("acts000000.bin", used_nbytes=3, file_nbytes=3)
    sink = transport.open_sink("acts.bin", used_nbytes=10, file_nbytes=20)
    sink.write([memoryview(b"123")])
    with pytest.raises(ArgumentError):
        sink.commit()
    sink.write([memoryview(b"4567890")])
    sink.commit()
    assert transport.read("acts.bin") == b"1234567890" + bytes(10)
    assert same([transport.read("acts000000.bin")], [BIG])


@pytest.mark.parametrize("name", BUCKETS)
def test_an_aborted_upload_leaves_nothing(name: str, tmp_path) -> None:
    with filled(name, tmp_path) as place:
        transport = place.open()
        sink = transport.open_sink("new.bin", used_nbytes=20 << 20, file_nbytes=20 << 20)
        for _ in range(3):
            sink.write([memoryview(bytes(1 << 22))])
        sink.abort()
        with pytest.raises(NotFoundError):
            transport.size("new.bin")
        assert n_uploads(place) == 0


def test_only_folders_of_this_machine_rename(written: Place) -> None:
    transport = written.open()
    if not written.is_local:
        with pytest.raises(ReadOnlyError):
            transport.move("acts000001.bin", "acts000000.bin")
        return
    assert one(transport, "acts000000.bin", 0, 4) == BIG[:4]
    transport.move("acts000001.bin", "acts000000.bin")
    assert one(transport, "acts000000.bin", 0, 4096) == FILES["acts000001.bin"]
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
    assert transport.read("empty.bin") == b""


def test_a_lock_has_one_holder_on_this_machine_and_is_nothing_elsewhere(written: Place) -> None:
    transport, other = written.open(), written.open()
    with transport.lock("hidden/lock"):
        if written.is_local:
            with pytest.raises(WriterConflictError), other.lock("hidden/lock"):
                pass
    with pytest.raises(KeyError), other.lock("hidden/lock"):
        raise KeyError
    with transport.lock("hidden/lock"), transport.lock("hidden/other"):
        pass


def test_reads_with_gaps_and_bytes_that_are_wanted_twice_fill_each_buffer(place: Place) -> None:
    """Also where the gaps are as long as what is wanted twice."""
    transport, truth = place.open(), FILES["acts000000.bin"]
    starts = [0, 0, 20, 200, 210, 190]
    buffers = [bytearray(10) for _ in starts]
    transport.readinto("acts000000.bin", starts=starts, buffers=list(map(memoryview, buffers)))
    assert buffers == [truth[start : start + 10] for start in starts]
