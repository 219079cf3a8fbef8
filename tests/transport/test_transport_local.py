"""Local engines meet what real disks do: short, vanished and strange files, missing rights, full disks, few descriptors."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from waiting import HANG_S

from saev_store._runtime.threads import ForkSafeLock
from saev_store.errors import (
    AccessError,
    ArgumentError,
    CorruptShardError,
    DeadlineError,
    NotFoundError,
    SaevStoreWarning,
    StoreExistsError,
    TransportError,
    WriterConflictError,
)
from saev_store.names import WORK_FOLDER
from saev_store.testing._reading import follow
from saev_store.transport import MmapTransport, PreadTransport, open_transport
from saev_store.transport.checks import from_os_error
from saev_store.transport.local import transport as _local_transport
from saev_store.transport.local import write as _local_write
from saev_store.transport.local.files import DESCRIPTORS, DescriptorCache, check_regular, map_file
from saev_store.transport.local.write import lock_holder

ENGINES = (MmapTransport, PreadTransport)
engines = pytest.mark.parametrize("engine", ENGINES)


def n_descriptors(folder) -> int:
    """How many files below a folder are open in this process."""
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum(target.startswith(f"{folder}/") for target in targets)


def one(transport, path, start, end):
    (part,) = transport.get_ranges(path, starts=[start], ends=[end])
    return part


# Files that change


@engines
def test_a_file_that_got_shorter_raises(tmp_path, engine):
    (tmp_path / "a.bin").write_bytes(b"x" * 10_000)
    transport = engine(tmp_path)
    assert bytes(one(transport, "a.bin", 9_990, 10_000)) == b"x" * 10
    os.truncate(tmp_path / "a.bin", 5_000)
    for _ in range(2):
        with pytest.raises(CorruptShardError, match=r"5,000 bytes.*byte 10,000"):
            one(transport, "a.bin", 4_000, 10_000)
        with pytest.raises(CorruptShardError, match="5,000 bytes"):
            transport.readinto("a.bin", starts=[4_990], buffers=[memoryview(bytearray(20))])
    assert bytes(one(transport, "a.bin", 4_000, 5_000)) == b"x" * 1000


@engines
def test_a_file_that_got_shorter_raises_without_an_open_descriptor(tmp_path, engine):
    (tmp_path / "a.bin").write_bytes(b"x" * 10_000)
    transport = engine(tmp_path)
    one(transport, "a.bin", 0, 10_000)
    DESCRIPTORS.forget("")
    os.truncate(tmp_path / "a.bin", 100)
    with pytest.raises(CorruptShardError, match="100 bytes"):
        one(transport, "a.bin", 0, 10_000)


@engines
def test_a_file_that_grew_is_read_to_its_new_end(tmp_path, engine):
    (tmp_path / "a.bin").write_bytes(b"x" * 100)
    transport = engine(tmp_path)
    with pytest.raises(CorruptShardError):
        one(transport, "a.bin", 0, 200)
    with open(tmp_path / "a.bin", "ab") as file:
        file.write(b"y" * 100)
    assert bytes(one(transport, "a.bin", 90, 110)) == b"x" * 10 + b"y" * 10


@engines
def test_a_replaced_file_is_an_error_until_it_is_opened_again(tmp_path, engine):
    (tmp_path / "a.bin").write_bytes(b"old!")
    transport = engine(tmp_path)
    view = one(transport, "a.bin", 0, 4)
    (tmp_path / "b.bin").write_bytes(b"new!")
    os.replace(tmp_path / "b.bin", tmp_path / "a.bin")
    DESCRIPTORS.forget(str(tmp_path))
    with pytest.raises(CorruptShardError, match="taken the place"):
        one(transport, "a.bin", 0, 4)
    with pytest.raises(CorruptShardError, match="taken the place"):
        transport.readinto("a.bin", starts=[0], buffers=[memoryview(bytearray(4))])
    transport.close()
    assert bytes(one(transport, "a.bin", 0, 4)) == b"new!"
    assert bytes(view) == b"old!"


def test_a_map_of_a_replaced_file_is_refused_also_where_the_new_file_is_open(tmp_path):
    """Another reader has opened it: the descriptor is that of the new file, and the map that of the old one."""
    (tmp_path / "a.bin").write_bytes(b"old!")
    transport = MmapTransport(tmp_path)
    transport.check_mapped("a.bin", 4)
    (tmp_path / "b.bin").write_bytes(b"new!")
    os.replace(tmp_path / "b.bin", tmp_path / "a.bin")
    assert bytes(one(MmapTransport(tmp_path), "a.bin", 0, 4)) == b"new!"
    with pytest.raises(CorruptShardError, match="taken the place"):
        transport.check_mapped("a.bin", 4)


def test_a_map_whose_file_cannot_be_asked_for_its_size_is_our_error(tmp_path, monkeypatch):
    (tmp_path / "a.bin").write_bytes(b"old!")
    transport = MmapTransport(tmp_path)
    transport.check_mapped("a.bin", 4)

    def refused(*_):
        raise OSError(errno.EIO, "")

    monkeypatch.setattr(os, "lseek", refused)
    with pytest.raises(TransportError, match=r"a\.bin: could not map: .* \(EIO\)"):
        transport.check_mapped("a.bin", 4)


@engines
@pytest.mark.parametrize("same_time", [False, True])
def test_a_file_with_the_inode_number_of_the_old_one_is_another_file(tmp_path, engine, same_time):
    """File systems give the number of a deleted file to the next one; overwriting in place has the same effect."""
    path = tmp_path / "a.bin"
    path.write_bytes(b"old!")
    transport, before = engine(tmp_path), os.stat(path)
    view = bytes(one(transport, "a.bin", 0, 4))
    DESCRIPTORS.forget(str(tmp_path))  # as if others had needed the place
    if isinstance(transport, MmapTransport):
        transport._maps.clear()
    time.sleep(0.02)  # longer than a tick of the clock that file systems use
    path.write_bytes(b"new!")
    if same_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (os.stat(path).st_ino, os.stat(path).st_size) == (before.st_ino, before.st_size)
    with pytest.raises(CorruptShardError, match="taken the place"):
        one(transport, "a.bin", 0, 4)
    transport.close()
    assert (view, bytes(one(transport, "a.bin", 0, 4))) == (b"old!", b"new!")


@engines
def test_what_this_transport_replaces_itself_is_read_at_once(tmp_path, engine):
    (tmp_path / "a.bin").write_bytes(b"old!")
    (tmp_path / "b.bin").write_bytes(b"new!")
    transport = engine(tmp_path)
    assert bytes(one(transport, "a.bin", 0, 4)) == b"old!"
    transport.move("b.bin", "a.bin")
    assert bytes(one(transport, "a.bin", 0, 4)) == b"new!"


@engines
def test_what_this_transport_writes_in_its_place_is_read_when_its_descriptor_has_made_room(tmp_path, engine):
    (tmp_path / "a.bin").write_bytes(b"old!")
    os.utime(tmp_path / "a.bin", ns=(1, 1))
    transport = engine(tmp_path)
    assert bytes(one(transport, "a.bin", 0, 4)) == b"old!"
    sink = transport.open_sink("a.bin", used_nbytes=6, file_nbytes=6, resume=True)
    sink.write(0, [memoryview(b"newest")])
    sink.commit()
    DESCRIPTORS.forget(str(tmp_path))  # as if others had needed the place
    assert bytes(one(transport, "a.bin", 0, 6)) == b"newest"


@engines
def test_a_new_transport_reads_the_file_that_has_the_name_now(tmp_path, engine):
    """Descriptors are shared by all transports of this process; the old one's is open still."""
    (tmp_path / "a.bin").write_bytes(b"old!")
    old = engine(tmp_path)
    assert bytes(one(old, "a.bin", 0, 4)) == b"old!"
    (tmp_path / "b.bin").write_bytes(b"new!")
    os.replace(tmp_path / "b.bin", tmp_path / "a.bin")
    assert DESCRIPTORS.peek(str(tmp_path / "a.bin")) is not None
    assert bytes(one(engine(tmp_path), "a.bin", 0, 4)) == b"new!"


@engines
def test_a_new_file_in_the_place_of_one_that_this_transport_has_moved_away_is_read_at_once(tmp_path, engine):
    (tmp_path / "a.bin").write_bytes(b"old!")
    transport = engine(tmp_path)
    assert bytes(one(transport, "a.bin", 0, 4)) == b"old!"
    transport.move("a.bin", "b.bin")
    (tmp_path / "a.bin").write_bytes(b"new!")
    assert (bytes(one(transport, "a.bin", 0, 4)), bytes(one(transport, "b.bin", 0, 4))) == (b"new!", b"old!")


@engines
def test_files_of_a_folder_that_this_transport_has_deleted_are_read_anew(tmp_path, engine):
    transport, other = engine(tmp_path), engine(tmp_path)
    other.put("store/a.bin", b"0123")
    other.put("stores/b.bin", b"0123")
    assert (one(transport, "store/a.bin", 0, 4), one(transport, "stores/b.bin", 0, 4)) == (b"0123", b"0123")
    transport.delete("store")
    for path in ("store/a.bin", "stores/b.bin"):
        other.put(path, b"456789")
    assert one(transport, "store/a.bin", 0, 6) == b"456789"
    with pytest.raises(CorruptShardError, match="has taken the place"):
        one(transport, "stores/b.bin", 0, 6)


@engines
def test_a_vanished_file_is_not_found(tmp_path, engine):
    (tmp_path / "a.bin").write_bytes(b"x" * 10)
    transport = engine(tmp_path)
    one(transport, "a.bin", 0, 10)
    os.unlink(tmp_path / "a.bin")
    transport.close()
    for call in (lambda: one(transport, "a.bin", 0, 1), lambda: transport.read("a.bin")):
        with pytest.raises(NotFoundError, match=r"a\.bin.*No such file or directory \(ENOENT\)"):
            call()


def test_a_file_that_ends_while_it_is_read(tmp_path, monkeypatch):
    (tmp_path / "a.bin").write_bytes(b"x" * 100)
    transport = PreadTransport(tmp_path)
    monkeypatch.setattr(os, "preadv", lambda *args: 0)
    with pytest.raises(CorruptShardError, match="0 bytes but byte 50"):
        transport.readinto("a.bin", starts=[0], buffers=[memoryview(bytearray(50))])


def test_short_reads_are_continued(tmp_path, monkeypatch):
    truth = np.random.default_rng(0).bytes(5000)
    (tmp_path / "a.bin").write_bytes(truth)
    transport = PreadTransport(tmp_path)
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda fd, n, offset: pread(fd, min(n, 7), offset))
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:11]], offset))
    buffers = [bytearray(n) for n in (1, 12, 0, 100, 11, 3)]
    views = [memoryview(buffer) for buffer in buffers]
    transport.readinto("a.bin", starts=follow(3, views), buffers=views)
    assert b"".join(buffers) == truth[3 : 3 + 127]
    assert bytes(one(transport, "a.bin", 1, 4999)) == truth[1:4999]
    assert transport.read("a.bin") == truth


# Things that are not regular files


@engines
def test_refuses_what_is_no_regular_file_without_waiting(tmp_path, engine):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    os.symlink("/dev/zero", tmp_path / "device")
    server = socket.socket(socket.AF_UNIX)
    server.bind(os.path.relpath(tmp_path / "socket"))  # a socket's path may be 107 bytes long
    transport = engine(tmp_path)
    kinds = {"pipe": "a named pipe", "folder": "a folder", "device": "a device", "socket": "a socket"}
    for path, kind in kinds.items():
        for call in (
            lambda path=path: transport.read(path, max_bytes=10),
            lambda path=path: transport.size(path),
            lambda path=path: one(transport, path, 0, 1),
            lambda path=path: transport.readinto(path, starts=[0], buffers=[memoryview(bytearray(1))]),
        ):
            with pytest.raises(TransportError, match=f"this is {kind}"):
                call()
    server.close()


@engines
def test_follows_symbolic_links(tmp_path, engine):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/1234").write_bytes(b"x" * 10)
    (tmp_path / "store").mkdir()
    os.symlink("../blobs/1234", tmp_path / "store/a.bin")
    os.symlink("nowhere", tmp_path / "store/broken")
    os.symlink("loop", tmp_path / "store/loop")
    os.symlink("../blobs", tmp_path / "store/folder")
    transport = engine(tmp_path / "store")
    assert transport.size("a.bin") == 10
    assert bytes(one(transport, "a.bin", 0, 10)) == b"x" * 10
    assert transport.resolve("a.bin") == os.path.realpath(tmp_path / "blobs/1234")
    found = {entry.path: (entry.is_dir, entry.size) for entry in transport.list()}
    assert found == {"a.bin": (False, 10), "broken": (False, None), "folder": (True, None), "loop": (False, None)}
    for call in (transport.read, transport.size):
        with pytest.raises(NotFoundError, match="ELOOP"):
            call("loop")
    transport.delete("folder")
    transport.delete("a.bin")
    assert (tmp_path / "blobs/1234").exists()


@engines
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ENOTCONN])
def test_a_failing_disk_is_no_broken_link(tmp_path, monkeypatch, engine, code):
    (tmp_path / "a.bin").write_bytes(b"x")
    transport = engine(tmp_path)

    class Failing:
        name = "a.bin"

        def is_dir(self) -> bool:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "scandir", lambda _: contextlib.nullcontext([Failing()]))
    with pytest.raises(TransportError, match=f"could not list: .*{errno.errorcode[code]}"):
        transport.list()


@engines
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.EACCES, AccessError),
        (errno.EPERM, AccessError),
        (errno.EIO, TransportError),
        (errno.ESTALE, TransportError),
        (errno.ETIMEDOUT, DeadlineError),
        (errno.ENAMETOOLONG, TransportError),
    ],
)
def test_errors_of_the_system_keep_their_name(tmp_path, monkeypatch, engine, code, kind):
    (tmp_path / "a.bin").write_bytes(b"x" * 10)
    transport = engine(tmp_path)

    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    for function in ("open", "stat", "scandir"):
        monkeypatch.setattr(os, function, fail)
    for call in (
        lambda: transport.read("a.bin"),
        lambda: transport.size("a.bin"),
        lambda: one(transport, "a.bin", 0, 1),
        lambda: transport.readinto("a.bin", starts=[0], buffers=[memoryview(bytearray(1))]),
        transport.list,
    ):
        with pytest.raises(kind, match=errno.errorcode[code]) as caught:
            call()
        assert caught.value.kind == kind.kind
        assert str(tmp_path) in str(caught.value)
        assert isinstance(caught.value.__cause__, OSError)


def test_errors_while_reading(tmp_path, monkeypatch):
    (tmp_path / "a.bin").write_bytes(b"x" * 10)
    transport = PreadTransport(tmp_path)

    def fail(*args):
        raise OSError(errno.EIO, "bad disk")

    monkeypatch.setattr(os, "pread", fail)
    monkeypatch.setattr(os, "preadv", fail)
    for call in (
        lambda: transport.read("a.bin"),
        lambda: one(transport, "a.bin", 0, 1),
        lambda: transport.readinto("a.bin", starts=[0], buffers=[memoryview(bytearray(1))]),
    ):
        with pytest.raises(TransportError, match="EIO") as caught:
            call()
        assert caught.value.transient
        assert pickle.loads(pickle.dumps(caught.value)).transient


@pytest.mark.parametrize("call", ["get_ranges", "readinto"])
def test_a_stale_handle_goes_away_with_the_read_that_it_has_failed(tmp_path, monkeypatch, call):
    """Of a network file system: the file is there, only the descriptor is not valid any more."""
    (tmp_path / "a.bin").write_bytes(b"0123456789")
    transport = PreadTransport(tmp_path)
    assert one(transport, "a.bin", 0, 4) == b"0123"
    stale = DESCRIPTORS.peek(str(tmp_path / "a.bin"))
    pread, preadv = os.pread, os.preadv

    def check(fd):
        if fd == stale.fd:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "pread", lambda fd, *args: check(fd) or pread(fd, *args))
    monkeypatch.setattr(os, "preadv", lambda fd, *args: check(fd) or preadv(fd, *args))

    def read():
        buffer = bytearray(4)
        if call == "get_ranges":
            return one(transport, "a.bin", 3, 7)
        transport.readinto("a.bin", starts=[3], buffers=[memoryview(buffer)])
        return buffer

    with pytest.raises(TransportError, match="ESTALE"):
        read()
    assert read() == b"3456"


def test_a_map_that_the_system_refuses_names_the_way_out(tmp_path, monkeypatch):
    (tmp_path / "a.bin").write_bytes(b"x" * 10)

    def fail(fd, nbytes):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("saev_store.transport.local.mapped.map_file", fail)
    with pytest.raises(TransportError, match='engine="pread"'):
        one(MmapTransport(tmp_path), "a.bin", 0, 1)


def test_the_system_really_refuses_a_map_of_a_pipe():
    reader, writer = os.pipe()
    with pytest.raises(OSError, match="No such device"):
        map_file(reader, 10)
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("root", ["", "a\0b", b"/tmp", "/tmp/\ud800"])
def test_refuses_roots_that_cannot_be(root):
    for engine in ENGINES:
        with pytest.raises(ArgumentError):
            engine(root)


@engines
def test_a_root_may_be_relative_and_need_not_exist(tmp_path, monkeypatch, engine):
    monkeypatch.chdir(tmp_path)
    transport = engine("not/yet")
    assert transport.url == str(tmp_path / "not/yet")
    with pytest.raises(NotFoundError):
        transport.read("x")
    with pytest.raises(NotFoundError):
        transport.list()
    monkeypatch.chdir("/")
    transport.put("x", b"1")
    assert (tmp_path / "not/yet/x").read_bytes() == b"1"


@engines
def test_names_with_anything_in_them(tmp_path, engine):
    root = tmp_path / "with space, %20, #?*'\"é\nnew"
    root.mkdir()
    transport = engine(root)
    for name in ("a b.bin", "100%.bin", "#1?x=y.bin", "日本.bin", "new\nline", "..hidden", "\udcff.bin", "C:\\x"):
        transport.put(name, name.encode("utf-8", "surrogateescape"))
        assert transport.read(name) == name.encode("utf-8", "surrogateescape")
        assert name in [entry.path for entry in transport.list()]


# Descriptors and maps


def test_maps_hold_no_descriptors_and_go_with_their_views(tmp_path):
    for index in range(300):
        (tmp_path / f"{index}.bin").write_bytes(b"%04d" % index * 2000)
    transport = MmapTransport(tmp_path)
    views = [one(transport, f"{index}.bin", 4000, 4004) for index in range(300)]
    assert 0 < n_descriptors(tmp_path) <= 128
    transport.close()
    assert n_descriptors(tmp_path) == 0
    assert [bytes(view) for view in views] == [b"%04d" % index for index in range(300)]

    def n_maps() -> int:
        with open("/proc/self/maps") as maps:
            return sum(str(tmp_path) in line for line in maps)

    assert n_maps() == 300
    array = np.frombuffer(views[7], np.uint8)
    del views
    gc.collect()
    assert n_maps() == 1
    assert array.tobytes() == b"0007"
    del array
    gc.collect()
    assert n_maps() == 0


def test_so_many_maps_are_kept_and_no_more(tmp_path, monkeypatch):
    """The system allows a process about 65,000; every one more is an error."""
    monkeypatch.setattr("saev_store.transport.local.mapped._MAX_MAPS", 4)
    transport = MmapTransport(tmp_path)
    for index in range(11):
        (tmp_path / f"{index}.bin").write_bytes(b"%04d" % index * 2000)
        assert bytes(one(transport, f"{index}.bin", 4000, 4004)) == b"%04d" % index
        gc.collect()
        with open("/proc/self/maps") as maps:
            assert sum(str(tmp_path) in line for line in maps) <= 4
    assert bytes(one(transport, "3.bin", 0, 4)) == b"0003"


def test_thousands_of_shards_under_a_low_limit(tmp_path):
    script = """
        import resource, sys
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[2])))
        from saev_store.transport import open_transport
        root, views = sys.argv[1], []
        for index in range(4096):
            open(f"{root}/{index}.bin", "wb").write(b"%08d" % index)
        for engine in ("mmap", "pread"):
            transport = open_transport(root, engine=engine)
            for index in range(4096):
                views += transport.get_ranges(f"{index}.bin", starts=[0], ends=[8])
                buffer = bytearray(4)
                transport.readinto(f"{index}.bin", starts=[4], buffers=[memoryview(buffer)])
                assert buffer == (b"%08d" % index)[4:]
        assert [bytes(view) for view in views] == [b"%08d" % index for index in range(4096)] * 2
        print("fine")
    """
    for limit in (1024, 40):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), str(tmp_path), str(limit)],
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert (done.stdout, done.stderr) == ("fine\n", "")


def test_too_few_descriptors_is_an_error_with_a_remedy(tmp_path, monkeypatch):
    (tmp_path / "a.bin").write_bytes(b"x")

    def fail(*args):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(TransportError, match="ulimit -n"):
        one(MmapTransport(tmp_path), "a.bin", 0, 1)


def test_close_spares_other_roots(tmp_path):
    for name in ("store", "store2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.bin").write_bytes(b"x")
        PreadTransport(tmp_path / name).get_ranges("a.bin", starts=[0], ends=[1])
    PreadTransport(tmp_path / "store").close()
    assert DESCRIPTORS.peek(str(tmp_path / "store/a.bin")) is None
    assert DESCRIPTORS.peek(str(tmp_path / "store2/a.bin")) is not None


@engines
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_works_in_other_processes(tmp_path, engine, method):
    (tmp_path / "a.bin").write_bytes(b"0123456789")
    transport = engine(tmp_path)
    assert bytes(one(transport, "a.bin", 3, 5)) == b"34"
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        found = pool.starmap_async(read_in_child, [(transport, start) for start in range(8)]).get(60)
    assert found == [b"0123456789"[start : start + 2] * 2 for start in range(8)]


def read_in_child(transport, start):
    buffer = bytearray(2)
    transport.readinto("a.bin", starts=[start], buffers=[memoryview(buffer)])
    return bytes(one(transport, "a.bin", start, start + 2)) + buffer


def test_readers_survive_eviction_and_closing_by_others(tmp_path):
    for index in range(300):
        (tmp_path / f"{index}.bin").write_bytes(b"%04d" % index * 100)
    transport, errors, stop = PreadTransport(tmp_path), [], threading.Event()

    def read(seed):
        rng = np.random.default_rng(seed)
        try:
            for index in rng.integers(0, 300, 400):
                assert bytes(one(transport, f"{index}.bin", 40, 48)) == b"%04d" % index * 2
        except BaseException as error:
            errors.append(error)

    def close():
        while not stop.is_set():
            transport.close()

    closer = threading.Thread(target=close)
    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in (closer, *readers):
        thread.start()
    for thread in readers:
        thread.join()
    stop.set()
    closer.join()
    assert not errors


# Writing


@engines
def test_put_leaves_the_old_content_when_it_fails(tmp_path, monkeypatch, engine):
    transport = engine(tmp_path)
    transport.put("a.json", b"old")

    def fail(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(TransportError, match="ENOSPC") as caught:
        transport.put("a.json", b"new")
    # Whether something is kept that could be resumed depends on the caller: nothing is of an export.
    assert caught.value.remedy == "Free space, or raise the quota, and call again."
    with pytest.raises(TransportError, match="ENOSPC"):
        transport.create("b.json", b"new")
    assert os.listdir(tmp_path) == ["a.json"]
    assert transport.read("a.json") == b"old"


def test_a_file_beyond_what_the_file_system_holds_is_no_lack_of_space(tmp_path, monkeypatch):
    def fail(fd, nbytes):
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "ftruncate", fail)
    with pytest.raises(TransportError, match=r"could not pad it to 4,611,686,018,427,387,904 bytes") as caught:
        PreadTransport(tmp_path).open_sink("acts000000.bin", used_nbytes=8, file_nbytes=2**62)
    assert "max_tokens_per_shard" in (caught.value.remedy or "")
    assert "pad=False" in (caught.value.remedy or "")
    assert os.listdir(tmp_path) == []


@engines
def test_the_bound_of_a_document_holds_for_what_is_read(tmp_path, engine):
    """Virtual files report no size, and files grow while they are read."""
    transport = engine("/proc/self")
    whole = transport.read("status")
    assert transport.size("status") == 0 < len(whole)
    with pytest.raises(TransportError, match="at most 10 bytes"):
        transport.read("status", max_bytes=10)
    (tmp_path / "a.json").write_bytes(b"0123456789")
    local = engine(tmp_path)
    assert local.read("a.json", max_bytes=10) == b"0123456789"
    with pytest.raises(TransportError, match="10 bytes, but at most 9"):
        local.read("a.json", max_bytes=9)


def test_put_is_never_seen_half_done(tmp_path):
    transport, stop, seen = MmapTransport(tmp_path), threading.Event(), set()
    contents = {letter * 20_000 for letter in (b"a", b"b", b"c")}
    transport.put("a.json", b"a" * 20_000)

    def look():
        reader = PreadTransport(tmp_path)
        while not stop.is_set():
            seen.add(reader.read("a.json"))

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(20):
        for content in contents:
            transport.put("a.json", content)
    stop.set()
    thread.join()
    assert seen <= contents


def test_created_files_have_the_usual_permissions(tmp_path):
    transport = MmapTransport(tmp_path)
    mask = os.umask(0o027)
    try:
        transport.put("put", b"")
        transport.create("create", b"")
        transport.open_sink("sink", used_nbytes=0, file_nbytes=0).commit()
    finally:
        os.umask(mask)
    assert {stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in ("put", "create", "sink")} == {0o640}


@pytest.mark.parametrize("renames", [True, False])
@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV])
def test_create_where_links_are_impossible(tmp_path, monkeypatch, code, renames):
    """A system may also have no rename that replaces nothing."""

    def fail(*args):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", fail)
    if not renames:
        monkeypatch.setattr(_local_write, "rename_exclusive", lambda old, new: False)
    transport = MmapTransport(tmp_path)
    transport.create("a/b.json", b"first")
    with pytest.raises(StoreExistsError):
        transport.create("a/b.json", b"second")
    assert transport.read("a/b.json") == b"first"
    assert os.listdir(tmp_path / "a") == ["b.json"]


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EIO])
def test_create_where_neither_links_nor_exclusive_renames_are_possible(tmp_path, monkeypatch, code):
    """A failure of the disk is none of these."""

    def no_link(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    class NoRename:
        @staticmethod
        def renameat2(*_: object) -> int:
            ctypes.set_errno(code)
            return -1

    monkeypatch.setattr(os, "link", no_link)
    monkeypatch.setattr(_local_write, "LIBC", NoRename())
    transport = MmapTransport(tmp_path)
    if code == errno.EIO:
        with pytest.raises(TransportError, match="EIO"):
            transport.create("b.json", b"first")
        assert os.listdir(tmp_path) == []
        return
    transport.create("b.json", b"first")
    with pytest.raises(StoreExistsError):
        transport.create("b.json", b"second")
    assert transport.read("b.json") == b"first"
    assert os.listdir(tmp_path) == ["b.json"]


def test_create_has_one_winner_among_processes(tmp_path):
    context = multiprocessing.get_context("spawn")
    with context.Pool(4) as pool:
        outcomes = pool.starmap_async(create_in_child, [(str(tmp_path), n) for n in range(40)], chunksize=1).get(90)
    for name in range(10):
        winners = [who for what, who, won in outcomes if what == name and won]
        assert len(winners) == 1
        assert (tmp_path / str(name)).read_text() == winners[0]


def create_in_child(root, number):
    who = f"{number} in {os.getpid()}"
    try:
        MmapTransport(root).create(str(number % 10), who.encode())
    except StoreExistsError:
        return number % 10, who, False
    return number % 10, who, True


def test_a_file_in_the_way_of_a_folder(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    transport = MmapTransport(tmp_path)
    for call in (
        lambda: transport.put("a/b", b""),
        lambda: transport.create("a/b", b""),
        lambda: transport.open_sink("a/b", used_nbytes=1, file_nbytes=1),
        lambda: transport.lock("a/b").__enter__(),
    ):
        with pytest.raises((NotFoundError, StoreExistsError), match=r"ENOTDIR|EEXIST"):
            call()
    with pytest.raises(TransportError, match="EISDIR|ENOTEMPTY"):
        MmapTransport(tmp_path.parent).put(tmp_path.name, b"")


def test_a_read_only_place_is_an_access_error(tmp_path, monkeypatch):
    real = os.open

    def fail(path, flags, *args, **kwargs):
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", fail)
    transport = MmapTransport(tmp_path)
    for call in (
        lambda: transport.put("b", b""),
        lambda: transport.create("b", b""),
        lambda: transport.open_sink("b", used_nbytes=1, file_nbytes=1),
        lambda: transport.lock("b").__enter__(),
    ):
        with pytest.raises(AccessError, match="EROFS"):
            call()


# Sinks


def test_a_sink_reserves_what_it_will_write_and_nothing_more(tmp_path):
    sink = MmapTransport(tmp_path).open_sink("a.bin", used_nbytes=1 << 20, file_nbytes=1 << 40)
    status = os.stat(tmp_path / "a.bin")
    assert status.st_size == 1 << 40
    assert 1 << 20 <= status.st_blocks * 512 < 2 << 20
    sink.abort()


def test_a_full_disk_is_known_before_anything_is_written(tmp_path, monkeypatch):
    def full(fd, nbytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("saev_store.transport.local.write.preallocate", full)
    transport = MmapTransport(tmp_path)
    with pytest.raises(TransportError, match=r"reserve 10 bytes.*ENOSPC.*Free space"):
        transport.open_sink("a.bin", used_nbytes=10, file_nbytes=10)
    assert not os.listdir(tmp_path)
    (tmp_path / "kept.bin").write_bytes(b"12345")
    with pytest.raises(TransportError, match="ENOSPC"):
        transport.open_sink("kept.bin", used_nbytes=10, file_nbytes=10, resume=True)
    assert (tmp_path / "kept.bin").read_bytes() == b"12345"


def test_a_really_full_disk(tmp_path):
    free = os.statvfs(tmp_path)
    too_much = free.f_bavail * free.f_frsize * 2
    with pytest.raises(TransportError, match="ENOSPC"):
        MmapTransport(tmp_path).open_sink("a.bin", used_nbytes=too_much, file_nbytes=too_much)
    assert not os.listdir(tmp_path)


#: What systems say of a call that a file system does not have.
UNSUPPORTED = [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV]


@pytest.mark.parametrize("code", [None, *UNSUPPORTED])
def test_places_that_cannot_reserve_space(tmp_path, monkeypatch, code):
    class NoFallocate:
        pass

    if code is not None:

        class NoFallocate:
            @staticmethod
            def fallocate(*args):
                ctypes.set_errno(code)
                return -1

    monkeypatch.setattr(_local_write, "LIBC", NoFallocate())
    transport = MmapTransport(tmp_path)
    sink = transport.open_sink("a.bin", used_nbytes=10, file_nbytes=20)
    sink.write(0, [memoryview(b"0123456789")])
    sink.commit()
    assert (tmp_path / "a.bin").read_bytes() == b"0123456789" + bytes(10)
    free = os.statvfs(tmp_path)
    too_much = free.f_bavail * free.f_frsize * 2
    with pytest.raises(TransportError, match="ENOSPC"):
        transport.open_sink("b.bin", used_nbytes=too_much, file_nbytes=too_much)


def test_what_a_resumed_file_has_needs_no_room(tmp_path, monkeypatch):
    """On a disk that has just become full."""
    size = 1 << 20
    sink = MmapTransport(tmp_path).open_sink("a.bin", used_nbytes=size, file_nbytes=size)
    sink.write(0, [memoryview(b"1" * size)])
    sink.abort()
    full = SimpleNamespace(f_blocks=1 << 20, f_bavail=0, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda fd: full)
    MmapTransport(tmp_path).open_sink("a.bin", used_nbytes=size, file_nbytes=size, resume=True).abort()
    with pytest.raises(TransportError, match="ENOSPC"):
        MmapTransport(tmp_path).open_sink("a.bin", used_nbytes=size + 1, file_nbytes=size + 1, resume=True)


def test_short_writes_are_continued(tmp_path, monkeypatch):
    pwritev = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, views, offset: pwritev(fd, [views[0][:7]], offset))
    truth = np.random.default_rng(0).integers(0, 255, 1000, np.uint8)
    transport = MmapTransport(tmp_path)
    sink = transport.open_sink("a.bin", used_nbytes=1000, file_nbytes=1000)
    sink.write(0, [memoryview(truth[:14]), memoryview(truth[14:20]), memoryview(truth[20:])])
    sink.commit()
    transport.put("b.bin", truth.tobytes())
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes() == truth.tobytes()


def test_thousands_of_buffers_are_written(tmp_path):
    rows = np.random.default_rng(0).integers(0, 255, (3000, 5), np.uint8)
    sink = MmapTransport(tmp_path).open_sink("a.bin", used_nbytes=15_000, file_nbytes=15_000)
    sink.write(0, [memoryview(row) for row in rows])
    sink.commit()
    assert (tmp_path / "a.bin").read_bytes() == rows.tobytes()


def test_errors_while_writing(tmp_path, monkeypatch):
    sink = MmapTransport(tmp_path).open_sink("a.bin", used_nbytes=10, file_nbytes=10)
    sink.write(0, [memoryview(b"0123456789")])

    def fail(*args):
        raise OSError(errno.EIO, "bad disk")

    for function, call in (
        ("pwritev", lambda: sink.write(0, [memoryview(b"1")])),
        ("fdatasync", sink.sync),
        ("pread", lambda: sink.read_back(0, 1)),
        ("fsync", sink.commit),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, fail)
            with pytest.raises(TransportError, match=r"a\.bin.*EIO"):
                call()
    sink.commit()  # what failed may be tried again
    assert (tmp_path / "a.bin").read_bytes() == b"0123456789"


def test_sync_promises_only_what_was_written_without_a_gap(tmp_path):
    sink = MmapTransport(tmp_path).open_sink("a.bin", used_nbytes=100, file_nbytes=100)
    rng = np.random.default_rng(0)
    written = np.zeros(100, bool)
    for start in rng.permutation(np.arange(0, 100, 5)):
        sink.write(int(start), [memoryview(b"x" * 5)])
        written[start : start + 5] = True
        assert sink.sync() == (100 if written.all() else int(np.argmin(written)))
    sink.abort()


@pytest.mark.parametrize("n_missing", [1, 2])
def test_a_file_without_its_last_bytes_is_not_committed(tmp_path, n_missing):
    sink = MmapTransport(tmp_path).open_sink("a.bin", used_nbytes=10, file_nbytes=10)
    sink.write(0, [memoryview(b"0123456789")[: 10 - n_missing]])
    with pytest.raises(ArgumentError, match=f"only the first {10 - n_missing} of 10 bytes"):
        sink.commit()
    sink.write(10 - n_missing, [memoryview(b"0123456789")[10 - n_missing :]])
    sink.commit()


def test_a_resumed_sink_cuts_what_is_too_long(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"x" * 1000)
    transport = MmapTransport(tmp_path)
    sink = transport.open_sink("a.bin", used_nbytes=10, file_nbytes=20, resume=True)
    assert sink.read_back(5, 900) == b"x" * 5
    with pytest.raises(ArgumentError):
        sink.read_back(5, 4)
    with pytest.raises(ArgumentError):
        sink.keep(11)
    sink.keep(10)
    sink.commit()
    assert (tmp_path / "a.bin").read_bytes() == b"x" * 10 + bytes(10)


def test_a_new_sink_does_not_follow_links_but_a_resumed_one_does(tmp_path):
    (tmp_path / "elsewhere").write_bytes(b"0123")
    os.symlink("elsewhere", tmp_path / "a.bin")
    os.symlink("nowhere", tmp_path / "broken.bin")
    transport = MmapTransport(tmp_path)
    for name in ("a.bin", "broken.bin"):
        with pytest.raises(StoreExistsError):
            transport.open_sink(name, used_nbytes=4, file_nbytes=4)
    sink = transport.open_sink("a.bin", used_nbytes=4, file_nbytes=4, resume=True)
    sink.keep(4)
    sink.commit()
    assert os.path.islink(tmp_path / "a.bin")
    assert not (tmp_path / "nowhere").exists()


def test_a_sink_on_something_strange(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TransportError, match="a named pipe"):
        MmapTransport(tmp_path).open_sink("pipe", used_nbytes=4, file_nbytes=4, resume=True)


def test_what_is_written_during_a_flush_is_not_counted_as_flushed(tmp_path, monkeypatch):
    name = "fdatasync" if hasattr(os, "fdatasync") else "fsync"
    flush = getattr(os, name)
    sink = open_transport(tmp_path).open_sink("a.bin", used_nbytes=9, file_nbytes=9)
    sink.write(0, [memoryview(b"abc")])

    def late(fd: int) -> None:
        flush(fd)
        sink.write(3, [memoryview(b"def")])

    with monkeypatch.context() as patch:
        patch.setattr(os, name, late)
        assert sink.sync() == 3
    assert sink.sync() == 6
    sink.abort()


@pytest.mark.parametrize(
    ("code", "passes"),
    [
        *((getattr(errno, name), True) for name in (
            "EAGAIN", "ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTUNREACH", "EINTR", "EIO", "ENETUNREACH", "EPIPE",
            "ESTALE", "ETIMEDOUT",
        )),
        *((getattr(errno, name), False) for name in ("ENOSPC", "EDQUOT", "EFBIG", "EMFILE", "EINVAL", "ENAMETOOLONG")),
    ],
)  # fmt: skip
def test_failures_that_may_pass_say_so(code: int, passes: bool):
    """Loaders try these again."""
    error = from_os_error(OSError(code, ""), where="a.bin", doing="read")
    assert isinstance(error, TransportError)
    assert error.transient is passes


def test_a_killed_writer_leaves_what_it_has_synced(tmp_path):
    script = """
        import os, signal, sys
        from saev_store.transport import open_transport
        sink = open_transport(sys.argv[1]).open_sink("a.bin", used_nbytes=10, file_nbytes=20)
        sink.write(0, [memoryview(b"01234")])
        assert sink.sync() == 5
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], timeout=HANG_S, check=False)
    assert done.returncode == -signal.SIGKILL
    sink = open_transport(tmp_path).open_sink("a.bin", used_nbytes=10, file_nbytes=20, resume=True)
    assert sink.read_back(0, 10) == b"01234" + bytes(5)
    sink.keep(5)
    sink.write(5, [memoryview(b"56789")])
    sink.commit()
    assert (tmp_path / "a.bin").read_bytes() == b"0123456789" + bytes(10)


@pytest.mark.parametrize("found_nbytes", [9, 10, 11, 20, 30])
def test_what_a_longer_file_held_behind_its_last_vector_is_zero_after_a_resume(tmp_path, found_nbytes):
    (tmp_path / "a.bin").write_bytes(b"x" * found_nbytes)
    sink = open_transport(tmp_path).open_sink("a.bin", used_nbytes=10, file_nbytes=20, resume=True)
    sink.write(0, [memoryview(b"0123456789")])
    sink.commit()
    assert (tmp_path / "a.bin").read_bytes() == b"0123456789" + bytes(10)


# Locks


HOLDER = """
    import os, sys, time
    from saev_store.transport import open_transport
    with open_transport(sys.argv[1]).lock("hidden/lock"):
        if len(sys.argv) > 2 and os.fork() == 0:
            os.write(1, b"the child runs\\n")  # and so has let go of what it inherited
            time.sleep(100)
        os.write(1, f"{os.getpid()}\\n".encode())
        time.sleep(100)
"""


@pytest.mark.parametrize("with_child", [False, True])
def test_a_lock_dies_with_its_process_even_if_that_has_forked(tmp_path, with_child):
    arguments = [str(tmp_path), *(["fork"] if with_child else [])]
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDER), *arguments],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        said = {process.stdout.readline().strip() for _ in range(1 + with_child)}
        assert said == {str(process.pid), *(["the child runs"] if with_child else [])}
        transport = open_transport(tmp_path)
        with pytest.raises(WriterConflictError, match=f"process {process.pid} on"), transport.lock("hidden/lock"):
            pass
        process.kill()
        process.wait(30)
        with transport.lock("hidden/lock"):
            pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.wait(30)


def test_a_deleted_lock_file_does_not_split_the_lock(tmp_path):
    transport = MmapTransport(tmp_path)
    with transport.lock("lock"):
        os.unlink(tmp_path / "lock")
        with transport.lock("lock"), pytest.raises(WriterConflictError), transport.lock("lock"):
            pass


def test_a_lock_on_a_file_that_was_replaced_meanwhile_is_taken_again(tmp_path, monkeypatch):
    transport, real = MmapTransport(tmp_path), fcntl.flock
    calls = []

    def replace_then_lock(fd, how):
        if not calls:
            os.unlink(tmp_path / "lock")
        calls.append(fd)
        return real(fd, how)

    monkeypatch.setattr(fcntl, "flock", replace_then_lock)
    with transport.lock("lock"), pytest.raises(WriterConflictError), transport.lock("lock"):
        pass
    assert len(calls) == 3


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_a_place_without_locks_warns(tmp_path, monkeypatch, code):
    def fail(fd, how):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.warns(SaevStoreWarning, match="no locks"), MmapTransport(tmp_path).lock("lock"):
        pass


def test_os_errors_without_a_number():
    assert isinstance(from_os_error(FileNotFoundError("x"), where="a", doing="read"), NotFoundError)
    assert isinstance(from_os_error(TimeoutError("x"), where="a", doing="read"), DeadlineError)
    assert str(from_os_error(OSError("odd"), where="a", doing="read")) == "a: could not read: odd (OSError)"


def test_a_reservation_that_the_system_refuses(tmp_path, monkeypatch):
    """Quotas are not seen in the free space."""

    class Quota:
        @staticmethod
        def fallocate(*args):
            ctypes.set_errno(errno.EDQUOT)
            return -1

    monkeypatch.setattr(_local_write, "LIBC", Quota())
    with pytest.raises(TransportError, match=r"EDQUOT.*quota"):
        MmapTransport(tmp_path).open_sink("a.bin", used_nbytes=10, file_nbytes=10)
    assert not os.listdir(tmp_path)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_lock_held_by_another_thread_is_free_in_a_forked_child():
    lock = ForkSafeLock()
    with lock.mutex:
        child = os.fork()
        if child == 0:
            with lock.mutex:
                os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


_WITHOUT = """
import ctypes, os, sys

# Loaded before the functions are gone: these are not what is tested.
import concurrent.futures, multiprocessing, socket, subprocess, tempfile, uuid
import numpy, pydantic

for name in ("fdatasync", "posix_fallocate", "posix_fadvise", "sched_getaffinity", "RWF_NOWAIT"):
    delattr(os, name)
real = ctypes.CDLL

class LibC(real):
    def __getattr__(self, name):
        if name in ("fallocate", "renameat2"):
            raise AttributeError(name)
        return super().__getattr__(name)

ctypes.CDLL = LibC

from saev_store.transport import open_transport

for engine in ("mmap", "pread"):
    transport = open_transport(sys.argv[1], engine=engine)
    assert transport.read("a.bin") == bytes(range(100))
    assert [bytes(part) for part in transport.get_ranges("a.bin", starts=[3, 90], ends=[7, 100])] == [
        bytes(range(3, 7)), bytes(range(90, 100)),
    ]
    memory = bytearray(20)
    views = [memoryview(memory)[:5], memoryview(memory)[5:12], memoryview(memory)[12:]]
    transport.readinto("a.bin", starts=[10, 15, 60], buffers=views)
    assert memory == bytes(range(10, 22)) + bytes(range(60, 68))
    transport.close()
    sink = transport.open_sink(f"{engine}.bin", used_nbytes=3, file_nbytes=5)
    sink.write(0, [memoryview(b"123")])
    assert sink.sync() == 3
    sink.commit()
    assert transport.read(f"{engine}.bin") == b"123\\0\\0"
print("fine")
"""


def test_nothing_that_only_linux_has_is_needed(tmp_path):
    """macOS, as far as taking its missing functions away shows it."""
    (tmp_path / "a.bin").write_bytes(bytes(range(100)))
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT, str(tmp_path)], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert (done.stdout, done.stderr) == ("fine\n", "")


def test_no_more_descriptors_are_kept_than_said(tmp_path):
    cache, names = DescriptorCache(2), [str(tmp_path / name) for name in "abc"]
    for name in names:
        Path(name).write_bytes(b"1")
        cache.open(name)
    assert [cache.peek(name) is not None for name in names] == [False, True, True]


@pytest.mark.parametrize("kind", [MmapTransport, PreadTransport])
def test_a_shard_that_was_never_read_is_refused_each_time_once_the_last_one_was_replaced(tmp_path, kind):
    for name in ("acts000000.bin", "acts000001.bin"):
        (tmp_path / name).write_bytes(b"old")
    transport = kind(tmp_path)
    transport.get_ranges("acts000000.bin", starts=[0], ends=[3])
    for name in ("acts000000.bin", "acts000001.bin"):
        (tmp_path / "new").write_bytes(b"new")
        (tmp_path / "new").replace(tmp_path / name)
    for _ in range(2):
        with pytest.raises(CorruptShardError, match="others may be of another recording too"):
            transport.get_ranges("acts000001.bin", starts=[0], ends=[3])
    transport.close()
    assert bytes(transport.get_ranges("acts000001.bin", starts=[0], ends=[3])[0]) == b"new"


@pytest.mark.parametrize("kind", [MmapTransport, PreadTransport])
def test_a_shard_is_refused_where_the_last_one_has_the_inode_number_of_the_old_one(tmp_path, kind):
    """Overwriting in place has the same effect as the number of a deleted file that the next one gets."""
    for name in ("acts000000.bin", "acts000001.bin"):
        (tmp_path / name).write_bytes(b"old")
    transport = kind(tmp_path)
    transport.get_ranges("acts000000.bin", starts=[0], ends=[3])
    DESCRIPTORS.forget(str(tmp_path))  # as if others had needed the place
    time.sleep(0.02)  # longer than a tick of the clock that file systems use
    for name in ("acts000000.bin", "acts000001.bin"):
        (tmp_path / name).write_bytes(b"new")
    with pytest.raises(CorruptShardError, match="others may be of another recording too"):
        transport.get_ranges("acts000001.bin", starts=[0], ends=[3])


@pytest.mark.parametrize("replaced", ["mask.bin", "token_ids.bin", "acts000000.bin"])
@pytest.mark.parametrize("kind", [MmapTransport, PreadTransport])
def test_a_shard_is_refused_where_any_file_that_was_read_before_is_another_one(tmp_path, kind, replaced):
    """Whatever was read in between: a shard belongs to each of the token arrays and to the shard before it."""
    names = ["token_ids.bin", "mask.bin", "acts000000.bin", "acts000001.bin"]
    for name in names:
        (tmp_path / name).write_bytes(b"old")
    transport = kind(tmp_path)
    for name in names[:-1]:
        transport.get_ranges(name, starts=[0], ends=[3])
    (tmp_path / "new").write_bytes(b"new")
    (tmp_path / "new").replace(tmp_path / replaced)
    with pytest.raises(CorruptShardError, match="others may be of another recording too") as caught:
        transport.get_ranges("acts000001.bin", starts=[0], ends=[3])
    assert str(caught.value.where).endswith(replaced)


@pytest.mark.parametrize("kind", [MmapTransport, PreadTransport])
def test_a_token_array_is_refused_where_the_shard_that_was_read_is_another_one(tmp_path, kind):
    for name in ("acts000000.bin", "mask.bin"):
        (tmp_path / name).write_bytes(b"old")
    transport = kind(tmp_path)
    transport.get_ranges("acts000000.bin", starts=[0], ends=[3])
    (tmp_path / "new").write_bytes(b"new")
    (tmp_path / "new").replace(tmp_path / "acts000000.bin")
    with pytest.raises(CorruptShardError, match=r"acts000000\.bin: .*others may be of another recording too"):
        transport.get_ranges("mask.bin", starts=[0], ends=[3])


@pytest.mark.parametrize("kind", [MmapTransport, PreadTransport])
def test_other_permissions_of_an_open_shard_are_no_other_shard(tmp_path, kind):
    for name in ("acts000000.bin", "acts000001.bin"):
        (tmp_path / name).write_bytes(b"old")
    transport = kind(tmp_path)
    transport.get_ranges("acts000000.bin", starts=[0], ends=[3])
    (tmp_path / "acts000000.bin").chmod(0o400)
    assert bytes(transport.get_ranges("acts000001.bin", starts=[0], ends=[3])[0]) == b"old"


def test_a_hidden_folder_that_cannot_be_deleted_keeps_its_name(tmp_path, monkeypatch):
    """It is moved aside to be deleted, and must be found again by who cleans up."""

    def refuse(path):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    hidden = tmp_path / "store" / WORK_FOLDER
    hidden.mkdir(parents=True)
    (hidden / "writer.json").write_bytes(b"{}")
    transport = MmapTransport(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(_local_transport.shutil, "rmtree", refuse)
        with pytest.raises(TransportError, match="EBUSY"):
            transport.delete(f"store/{WORK_FOLDER}")
    assert [path.name for path in (tmp_path / "store").iterdir()] == [WORK_FOLDER]
    assert (hidden / "writer.json").read_bytes() == b"{}"
    transport.delete(f"store/{WORK_FOLDER}")
    assert list((tmp_path / "store").iterdir()) == []


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        (stat.S_IFDIR, "a folder"), (stat.S_IFIFO, "a named pipe"), (stat.S_IFSOCK, "a socket"), (stat.S_IFCHR, "a device"),
        (stat.S_IFBLK, "a device"), (stat.S_IFLNK, "something else"),
    ],
)  # fmt: skip
def test_what_is_no_file_is_named(mode: int, kind: str):
    with pytest.raises(TransportError, match=f"^a.bin: this is {kind}, but a regular file is needed"):
        check_regular(mode | 0o644, where="a.bin")
    check_regular(stat.S_IFREG, where="a.bin")


@pytest.mark.parametrize(
    ("text", "holder"), [("", "another process"), (f"process 7 on {'b' * 150}\n", f"process 7 on {'b' * 150}")]
)
def test_who_holds_a_lock_is_told_also_before_it_has_written_its_name(text: str, holder: str, tmp_path: Path):
    (tmp_path / "a.lock").write_text(text)
    transport = MmapTransport(tmp_path)
    with open(tmp_path / "a.lock", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(WriterConflictError, match=f"{holder} is writing here"), transport.lock("a.lock"):
            pass
        assert lock_holder(str(tmp_path / "a.lock")) == holder
    assert lock_holder(str(tmp_path / "a.lock")) == lock_holder(str(tmp_path / "none")) == ""
    with transport.lock("a.lock"):
        assert (tmp_path / "a.lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"


def test_a_file_that_cannot_be_created_leaves_nothing_where_there_are_no_links(tmp_path: Path, monkeypatch):
    """It is written under its own name there, and half of it would look like a file."""
    real, calls = _local_write.write_all, []

    def no_link(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    def fill(fd: int, views: list[memoryview], offset: int) -> None:
        calls.append(fd)
        if len(calls) < 2:  # the temporary file
            return real(fd, views, offset)
        real(fd, [views[0][:2]], offset)
        raise OSError(errno.ENOSPC, "the disk is full")

    monkeypatch.setattr(os, "link", no_link)
    monkeypatch.setattr(_local_write, "rename_exclusive", lambda *_: False)
    monkeypatch.setattr(_local_write, "write_all", fill)
    transport = MmapTransport(tmp_path)
    with pytest.raises(TransportError, match="could not create: .*ENOSPC"):
        transport.create("a.json", b"0123")
    assert len(calls) == 2
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(_local_write, "write_all", real)
    transport.create("a.json", b"0123")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("a.json", b"0123")]
    with pytest.raises(StoreExistsError):
        transport.create("a.json", b"4")


def test_a_folder_that_is_removed_while_a_lock_makes_it_is_made_again(tmp_path, monkeypatch):
    make, n_calls = _local_write.make_folders, 0

    def fails_once(where):
        nonlocal n_calls
        n_calls += 1
        if n_calls == 1:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        make(where)

    monkeypatch.setattr(_local_write, "make_folders", fails_once)
    with open_transport(str(tmp_path)).lock("a/b/lock"):
        assert (tmp_path / "a/b/lock").exists()
