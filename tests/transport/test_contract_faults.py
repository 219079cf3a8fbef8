"""The contract of transports refuses transports with one fault each, and accepts the same transport without it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from saev_store.errors import ArgumentError, CorruptShardError, SaevStoreError, StoreExistsError, TransportError
from saev_store.testing._reading import check_bytes
from saev_store.testing.transport import FILES, UNSAFE, WriteContract
from saev_store.transport import MemoryTransport, ReadCost
from saev_store.transport.memory import MemorySink

M = MemoryTransport
Methods = dict[str, object]


def safe(path: str, otherwise: str = "metadata.json") -> str:
    """What a transport without a look at paths would take."""
    return otherwise if path in UNSAFE or ".." in path else path


def unchecked(method: str) -> Methods:
    """A method that takes any path."""
    return {method: lambda self, path, *a, **k: getattr(M, method)(self, safe(path), *a, **k)}


def ranges(change: Callable[..., object]) -> Methods:
    """`get_ranges` with its result changed: `change(parts, path, starts, ends)`."""
    return {"get_ranges": lambda self, path, *, starts, ends: change(M.get_ranges(self, path, starts=starts, ends=ends), path, starts, ends)}  # fmt: skip


def lenient(error: type[Exception], otherwise: Callable[..., object] = lambda self, path, starts, ends: []) -> Methods:
    """`get_ranges` that hides an error."""

    def get_ranges(self: M, path: str, *, starts: list[int], ends: list[int]) -> object:
        try:
            return M.get_ranges(self, path, starts=starts, ends=ends)
        except error:
            return otherwise(self, path, starts, ends)

    return {"get_ranges": get_ranges}


def filling(change: Callable[..., object]) -> Methods:
    """`readinto` by a function of (self, path, starts, buffers)."""
    return {"readinto": lambda self, path, *, starts, buffers: change(self, path, starts, buffers)}


def hiding(method: str, *errors: type[Exception], value: object = None) -> Methods:
    """A method that gives a value instead of an error."""

    def call(self: M, *args: object, **options: object) -> object:
        try:
            return getattr(M, method)(self, *args, **options)
        except errors:
            return value

    return {method: call}


def raising(method: str, error: Exception, when: Callable[..., bool]) -> Methods:
    def call(self: M, *args: object, **options: object) -> object:
        if when(self, *args, **options):
            raise error
        return getattr(M, method)(self, *args, **options)

    return {method: call}


def translating(method: str, error: type[Exception], other: type[Exception]) -> Methods:
    """A method that raises another kind of error, or one with another message."""

    def call(self: M, *args: object, **options: object) -> object:
        try:
            return getattr(M, method)(self, *args, **options)
        except error as found:
            raise other("something else") from found

    return {method: call}


def short_filling(self: M, path: str, starts: list[int], buffers: list[memoryview]) -> None:
    """Up to the end of the file, and no error where that is too early; anything is filled."""
    data = M.read(self, path)
    for start, buffer in zip(starts, buffers, strict=False):
        part = data[max(start, 0) :][: buffer.nbytes]
        with contextlib.suppress(TypeError, ValueError):
            buffer.cast("B")[: len(part)] = part


def sinks(**methods: Callable[..., object]) -> Methods:
    """`open_sink` with sinks of other methods."""
    kind = type("OtherSink", (MemorySink,), methods)

    def open_sink(self: M, path: str, *, used_nbytes: int, file_nbytes: int, resume: bool = False) -> MemorySink:
        sizes = {"used_nbytes": used_nbytes, "file_nbytes": file_nbytes}
        return kind(self._files, self._key(path), self._where(path), **sizes, resume=resume)

    return {"open_sink": open_sink}


def without_end(sink: MemorySink, **_: object) -> None:
    """A commit of what was written, without the zeros behind it."""
    files, used = sink._files, sink._used
    MemorySink.commit(sink)
    files.content[sink._key] = files.content[sink._key][:used]


def opened(self: M, path: str, change: Callable[[M, str, dict], dict], **options: object) -> MemorySink:
    return M.open_sink(self, path, **change(self, path, options))


def close_and_wipe(self: M) -> None:
    for data in vars(self).get("given", ()):
        data[:] = bytes(len(data))


def given_out(self: M, path: str, *, starts: list[int], ends: list[int]) -> list[memoryview]:
    self.given = [bytearray(part) for part in M.get_ranges(self, path, starts=starts, ends=ends)]
    return [memoryview(data).toreadonly() for data in self.given]


def remembered(self: M, path: str, *, starts: list[int], ends: list[int]) -> list[memoryview]:
    """The file as it was when it was first read."""
    kept = vars(self).setdefault("kept", {})
    data = kept.setdefault(path, M.read(self, path))
    if max(ends, default=0) > len(data):
        raise CorruptShardError("short")
    return [memoryview(data)[start:end] for start, end in zip(starts, ends, strict=True)]


def in_other_threads(self: M, path: str, *, starts: list[int], ends: list[int]) -> list[memoryview]:
    parts = M.get_ranges(self, path, starts=starts, ends=ends)
    return (
        parts if threading.current_thread() is threading.main_thread() else [memoryview(bytes(len(p))) for p in parts]
    )


def other_folder(self: M, path: str) -> M:
    return M.at(self, "") if path else M.at(self, "part")


@contextlib.contextmanager
def no_lock(self: M, path: str):
    self._key(path)
    yield


@contextlib.contextmanager
def kept_lock(self: M, path: str):
    """A lock that is never free again."""
    with M.lock(self, path):
        yield
    self.stack = contextlib.ExitStack()
    self.stack.enter_context(M.lock(self, path))


def deeper(self: M, path: str) -> M:
    """A folder of the same class."""
    found = M.at(self, path)
    found.__class__ = type(self)
    return found


def put_beside(self: M, path: str, data: bytes) -> None:
    M.put(self, path, data)
    M.put(self, f"{path}.tmp", data)


def copied(self: M, source: str, target: str) -> None:
    M.put(self, target, M.read(self, source))


#: A test of the contract -> faults, any of which it finds; with the arguments of its parameters, if it has some.
FAULTS: dict[tuple[str, tuple[object, ...]], list[Methods]] = {
    ("has_the_shape_of_a_transport", ()): [
        {"name": ""}, {"url": ""}, {"url": "memory://x/"}, {"cost": ReadCost(-1, 1)}, {"cost": ReadCost(1, 0)},
    ],
    ("reads_whole_files", ("acts000001.bin",)): [
        {"read": lambda self, path, **k: bytearray(M.read(self, path, **k))},
        {"read": lambda self, path, **k: M.read(self, path, **k)[:-1]},
        {"size": lambda self, path: M.size(self, path) + 1},
        raising("read", TransportError("full"), lambda self, path, max_bytes=None: max_bytes == 4096),
        {"read": lambda self, path, max_bytes=None: M.read(self, path)[: None if max_bytes is None else max_bytes - 1]},
    ],
    ("refuses_files_that_are_too_big", ()): [
        {"read": lambda self, path, **_: M.read(self, path)},
        {"read": lambda self, path, max_bytes: M.read(self, path)[:max_bytes]},
        {"read": lambda self, path, max_bytes: M.read(self, path, max_bytes=max_bytes)[:4095]},
        raising("read", TransportError("it is too long"), lambda self, path, max_bytes: max_bytes == 4095),
    ],
    ("ranges_are_exact_and_in_order", ()): [
        ranges(lambda parts, *_: parts[::-1]),
        ranges(lambda parts, *_: [part[:-1] for part in parts]),
        ranges(lambda parts, *_: parts[:16]),
        ranges(lambda parts, *_: parts or [b""]),
        ranges(lambda parts, path, starts, ends: [parts[starts.index(start)] for start in sorted(starts)]),
    ],
    ("ranges_may_be_empty_and_overlap", ()): [
        ranges(lambda parts, *_: [part for part in parts if len(part)]),
        ranges(lambda parts, path, *_: parts if path != "empty.bin" else []),
    ],
    ("ranges_cannot_be_written_to", ()): [
        ranges(lambda parts, *_: [bytearray(part) for part in parts]),
        ranges(lambda parts, *_: [memoryview(part).cast("b") for part in parts]),
        ranges(lambda parts, *_: [memoryview(part).cast("B", (2, 4)) for part in parts]),
        ranges(lambda parts, *_: []),
    ],
    ("ranges_outlive_the_transport", ()): [
        {"get_ranges": given_out, "close": close_and_wipe},
        {"close": lambda self: self._files.content.clear()},
        {"close": lambda self: self._files.content.update({"metadata.json": b""})},
    ],
    ("refuses_impossible_ranges", (5, 4)): [
        lenient(ArgumentError), translating("get_ranges", ArgumentError, ValueError), translating("get_ranges", ArgumentError, ArgumentError),
    ],
    ("refuses_impossible_ranges", (-5, -1)): [lenient(ArgumentError)],
    ("refuses_impossible_ranges", (-1, 5)): [
        lenient(ArgumentError), raising("get_ranges", ArgumentError("bad"), lambda self, path, starts, ends: True),
    ],
    ("refuses_starts_without_ends", ()): [
        lenient(ArgumentError), translating("get_ranges", ArgumentError, ValueError), translating("get_ranges", ArgumentError, ArgumentError),
    ],
    ("says_when_a_file_is_too_short", (100_004,)): [
        lenient(CorruptShardError),
        raising("get_ranges", CorruptShardError("short"), lambda self, path, starts, ends: True),
        raising("get_ranges", CorruptShardError("100,003 bytes", where="acts000000.bin"), lambda *_, **__: True),
        raising("get_ranges", CorruptShardError("100,004 bytes", where="acts000000.bin"), lambda *_, **__: True),
    ],
    ("an_empty_file_is_too_short_for_anything", ()): [
        lenient(CorruptShardError), translating("get_ranges", CorruptShardError, TransportError),
    ],
    ("says_what_is_not_there", ()): [
        translating("read", FileNotFoundError, TransportError), translating("size", FileNotFoundError, TransportError),
        hiding("read", FileNotFoundError, value=b""), hiding("size", FileNotFoundError, value=0), lenient(FileNotFoundError),
        {"read": lambda self, path, max_bytes=None: b"" if max_bytes else M.read(self, path)},
    ],
    **{
        ("never_leaves_its_root", (path,)): [
            unchecked("read"), unchecked("size"), unchecked("get_ranges"), unchecked("readinto"),
        ]
        for path in UNSAFE
    },
    ("fills_memory", ()): [
        filling(lambda self, path, starts, buffers: None),
        filling(lambda self, path, starts, buffers: M.readinto(self, path, starts=[s and s - 1 for s in starts], buffers=buffers)),
        filling(lambda self, path, starts, buffers: M.readinto(self, path, starts=starts[:1], buffers=buffers[:1])),
    ],
    ("fills_thousands_of_buffers", ()): [
        filling(lambda self, path, starts, buffers: M.readinto(self, path, starts=starts[:1024], buffers=buffers[:1024])),
    ],
    ("fills_memory_from_many_places", ()): [
        filling(lambda self, path, starts, buffers: M.readinto(self, path, starts=sorted(starts), buffers=buffers)),
        filling(short_filling),
        hiding("readinto", CorruptShardError), hiding("readinto", ArgumentError),
        raising("readinto", ArgumentError("negative"), lambda self, path, starts, buffers: len(starts) != len(buffers)),
    ],
    ("refuses_memory_it_cannot_fill", ()): [
        hiding("readinto", ArgumentError), hiding("readinto", CorruptShardError), filling(short_filling),
        raising("readinto", ArgumentError("no"), lambda self, path, starts, buffers: buffers[0].readonly),
        raising("readinto", ArgumentError("no"), lambda self, path, starts, buffers: not buffers[0].contiguous),
    ],
    ("lists_one_level", ()): [
        {"list": lambda self, path="": [entry for entry in M.list(self, path) if not entry.is_dir]},
        {"list": lambda self, path="": [replace(entry, size=None) for entry in M.list(self, path)]},
        {"list": lambda self, path="": [replace(entry, is_dir=False) for entry in M.list(self, path)]},
        {"list": lambda self, path="": [replace(entry, path=entry.name) for entry in M.list(self, path)]},
        {"list": lambda self, path="": M.list(self, path) if path != "part/deeper" else []},
        hiding("list", FileNotFoundError, value=[]), translating("list", FileNotFoundError, TransportError),
        {"list": lambda self, path="": M.list(self, safe(path, ""))},
    ],
    ("folders_are_roots", ()): [
        {"at": lambda self, path: M.at(self, f"{path}/x" if path else "")},
        {"at": other_folder}, {"at": lambda self, path: M.at(self, safe(path))},
        {"at": lambda self, path: M(FILES, label=f"{self._label}/{path}")},
        {"name": "outer", "at": M.at},
        {"list": lambda self, path="": M(FILES).list(path)},
        filling(lambda self, path, starts, buffers: None),
    ],
    ("pickles", ()): [
        {"__reduce__": lambda self: (M, ({},))},
        {"__reduce__": lambda self: (M, (self.files,), {"_label": "other"})},
        {"__reduce__": lambda self: (M, ({**self.files, "acts000001.bin": b""},), {"_label": self._label, "_prefix": ""})},
        {"cost": ReadCost(1, 1), "__reduce__": lambda self: (M, (self.files,), {"_label": self._label})},
        {"name": "other", "__reduce__": lambda self: (M, (self.files,), {"_label": self._label})},
    ],
    ("many_threads_read_at_once", ()): [
        {"get_ranges": in_other_threads, "readinto": lambda self, path, *, starts, buffers: None},
        {"get_ranges": in_other_threads}, {"readinto": lambda self, path, *, starts, buffers: None},
    ],
    ("put_creates_and_replaces", ()): [
        {"put": lambda self, path, data: None if path in self.files else M.put(self, path, data)},
        {"put": lambda self, path, data: M.put(self, path, bytes(data) or b"?")},
        {"put": put_beside}, {"size": lambda self, path: 3},
    ],
    ("put_is_seen_by_earlier_readers", ()): [
        {"get_ranges": remembered},
        {"get_ranges": lambda self, path, *, starts, ends: M.get_ranges(self, path, starts=starts, ends=ends) if ends != [4096] else []},
        filling(lambda self, path, starts, buffers: None),
        {"get_ranges": lambda self, path, *, starts, ends: [bytes(end - start) for start, end in zip(starts, ends, strict=True)]},
    ],
    ("create_refuses_taken_names", ()): [
        {"create": M.put}, hiding("create", StoreExistsError),
        {"create": lambda self, path, data: M.put(self, path, data) if data == b"other" else M.create(self, path, data)},
        {"create": lambda self, path, data: M.create(self, path, data) or (data == b"again" and M.put(self, path, b""))},
        {"create": lambda self, path, data: (path in self.files and M.put(self, path, b"[]")) or M.create(self, path, data)},
        raising("create", StoreExistsError("taken"), lambda self, path, data: path in self.files),
        raising("create", StoreExistsError("metadata.json"), lambda self, path, data: data == b"again"),
    ],
    ("create_has_one_winner", ()): [
        {"create": M.put},
        raising("create", StoreExistsError("taken"), lambda *_: True),
        {"create": lambda self, path, data: M.create(self, path, data) or M.put(self, path, data[:3])},
    ],
    ("deletes_files_and_folders", ()): [
        {"delete": lambda self, path: None},
        {"delete": lambda self, path: M.delete(self, path) if path in self.files or path != "part" else None},
        raising("delete", TransportError("gone"), lambda self, path: path == "acts000000.bin" and path not in self.files),
        raising("delete", TransportError("gone"), lambda self, path: path == "nowhere/at/all"),
        {"delete": lambda self, path: self._files.content.clear()},
        {"delete": lambda self, path: [M.delete(self, name) for name in self.files if name.startswith(path)]},
        {"delete": lambda self, path: [M.delete(self, name) for name in ("part.txt", path) if name.startswith(path)]},
        {"delete": lambda self, path: [M.delete(self, name) for name in ("part2", path) if name.startswith(path)]},
        {"list": lambda self, path="": [entry for entry in M.list(self) if entry.path.startswith(path)]},
    ],
    ("moves_over_other_files", ()): [
        {"move": copied}, {"move": lambda self, source, target: None if target in self.files else M.move(self, source, target)},
        hiding("move", FileNotFoundError),
        {"move": lambda self, source, target: M.move(self, source, target) if ".." not in source else None},
        {"move": lambda self, source, target: M.move(self, source, safe(target, "y"))},
        {"get_ranges": remembered},
        {"size": lambda self, path: 100_003 if path == "acts000000.bin" else M.size(self, path)},
    ],
    **{
        ("never_writes_outside_its_root", (path,)): [
            unchecked("put"), unchecked("create"), unchecked("delete"), unchecked("lock"),
            {"open_sink": lambda self, path, **k: M.open_sink(self, safe(path, "new.bin"), **k)},
            {"create": lambda self, path, data: M.put(self, safe(path), data)},
        ]
        for path in UNSAFE
    },
    ("sink_writes_a_large_file", ()): [
        sinks(commit=without_end),
        sinks(write=lambda sink, offset, buffers, done=None: MemorySink.write(sink, offset, buffers[::-1])),
        sinks(write=lambda sink, offset, buffers, done=None: MemorySink.write(sink, offset, [b if b.nbytes < 10**5 else memoryview(bytes(b.nbytes)) for b in buffers])),
        sinks(sync=lambda sink: 300_000), sinks(sync=lambda sink: MemorySink.sync(sink) // 2),
        sinks(read_back=lambda sink, start, end: b""),
        sinks(_check_open=lambda sink: None, commit=lambda sink: sink._files.content.update({sink._key: bytes(sink._buffer)})),
        sinks(commit=lambda sink: sink._files.content.update({sink._key: bytes(len(sink._buffer))})),
    ],
    ("sink_of_odd_sizes", (0, 10)): [sinks(commit=without_end)],
    ("sink_of_odd_sizes", (0, 0)): [
        sinks(commit=lambda sink, **_: MemorySink.commit(sink) if sink._file_nbytes else None),
    ],
    ("sink_refuses_holes_and_outside", ()): [
        {"open_sink": lambda self, path, *, used_nbytes, file_nbytes: M.open_sink(self, path, used_nbytes=used_nbytes, file_nbytes=max(used_nbytes, file_nbytes))},
        sinks(write=lambda sink, offset, buffers, done=None: MemorySink.write(sink, max(0, offset), buffers)),
        sinks(write=lambda sink, offset, buffers, done=None: MemorySink.write(sink, offset, [b[: max(0, 10 - offset)] for b in buffers])),
        sinks(write=lambda sink, offset, buffers, done=None: None if offset == 11 else MemorySink.write(sink, offset, buffers)),
        sinks(_check_complete=lambda sink: None),
        sinks(_prefix=lambda sink: 4 if len(sink._written) > 1 else MemorySink._prefix(sink)),
        sinks(write=lambda sink, offset, buffers, done=None: MemorySink.write(sink, offset, buffers if offset != 2 else [memoryview(b"??")])),
    ],
    ("sink_refuses_taken_names", ()): [
        {"open_sink": lambda self, path, **k: opened(self, path, lambda *_: {**k, "resume": True})},
        raising("open_sink", StoreExistsError("taken"), lambda *_, **__: True), translating("open_sink", StoreExistsError, TransportError),
        {"open_sink": lambda self, path, **k: M.put(self, path, b"") or M.open_sink(self, path, **k)},
    ],
    ("sink_resumes", ()): [
        {"open_sink": lambda self, path, **k: M.delete(self, path) or M.open_sink(self, path, **k)},
        sinks(sync=lambda sink: 3), sinks(keep=lambda sink, nbytes: None), sinks(abort=lambda sink: sink._files.open.clear()),
        sinks(commit=without_end),
    ],
    ("sink_replaces_a_damaged_file", ()): [
        sinks(commit=lambda sink: None), sinks(commit=without_end), {"get_ranges": remembered, "size": lambda self, path: len(remembered(self, path, starts=[0], ends=[4096])[0])},
    ],
    ("one_holder_of_a_lock", ()): [
        {"lock": no_lock}, {"lock": lambda self, path: self._files.held.clear() or M.lock(self, path)},
        {"lock": kept_lock},
    ],
}  # fmt: skip
CASES = [(name, arguments, methods) for (name, arguments), faults in FAULTS.items() for methods in faults]


def run(name: str, arguments: tuple[object, ...], methods: Methods) -> None:
    """One test of the contract on a transport in memory with these methods."""
    kind = type("Faulty", (MemoryTransport,), {"at": deeper} | methods) if methods else MemoryTransport
    transport = kind(FILES, label="test")
    suite, test = WriteContract(), getattr(WriteContract, f"test_{name}")
    names = test.__code__.co_varnames[1 : test.__code__.co_argcount]
    given = {"transport": transport, "writes": transport}
    test(suite, *(given[each] for each in names if each in given), *arguments)


def test_paths_that_leave_a_root_or_are_none() -> None:
    assert {*UNSAFE} >= {
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
    }
    assert {*FILES} == {"metadata.json", "acts000000.bin", "acts000001.bin", "empty.bin", "part/deeper/note.txt"}
    assert [len(FILES[path]) for path in ("acts000000.bin", "acts000001.bin", "empty.bin")] == [100_003, 4096, 0]


@pytest.mark.parametrize(("name", "arguments"), FAULTS, ids=str)
def test_a_transport_without_a_fault_passes(name: str, arguments: tuple[object, ...]) -> None:
    run(name, arguments, {})


@pytest.mark.parametrize(
    ("name", "arguments", "methods"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_transport_with_a_fault_fails(name: str, arguments: tuple[object, ...], methods: Methods) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception, SaevStoreError, ValueError)):
        run(name, arguments, methods)


def test_long_bytes_that_differ_are_told_by_their_first_difference(monkeypatch) -> None:
    """pytest compares long bytes line by line where `CI` is set, which takes minutes."""
    monkeypatch.setenv("CI", "true")
    with pytest.raises(
        pytest.fail.Exception, match="part 1: 99,999 bytes instead of 100,000; they differ from byte 50,001 on"
    ):
        check_bytes([b"", bytes(50_001) + b"x" * 49_998], [b"", bytes(100_000)])
    with pytest.raises(pytest.fail.Exception, match="0 bytes instead of 3; they differ from byte 0 on"):
        check_bytes([b""], [b"abc"])
    with pytest.raises(ValueError, match="argument 2 is longer"):
        check_bytes([], [b""])
