"""Every engine and every wrapper keeps the contract that `saev_store.testing.transport` ships."""

from __future__ import annotations

import http.server
import pickle
import threading
import uuid
import zipfile
from functools import partial

import fsspec
import pytest
from range_server import RangeServer
from servers import s3_bucket  # noqa: F401 (a fixture)
from transports import CountingTransport, LatencyTransport
from web_server import nginx

from saev_store.errors import NotFoundError, TransportError, WriterConflictError
from saev_store.testing.transport import FILES, ReadContract, WriteContract
from saev_store.transport import Counters, LimitTransport, MemoryTransport, Rate, Transport, open_transport


def fill_folder(folder) -> None:
    for path, data in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


@pytest.fixture
def folder(tmp_path):
    fill_folder(tmp_path / "root")
    return tmp_path / "root"


class TestMmap(WriteContract):
    @pytest.fixture
    def transport(self, folder) -> Transport:
        return open_transport(folder)


class TestPread(WriteContract):
    @pytest.fixture
    def transport(self, folder) -> Transport:
        return open_transport(f"file://{folder}", engine="pread")


class TestMemory(WriteContract):
    @pytest.fixture
    def transport(self) -> Transport:
        return MemoryTransport(FILES, label="test")

    @pytest.mark.parametrize("meanwhile", ["committed", "deleted", "resumed"])
    def test_a_sink_whose_file_is_not_its_own_any_more_commits_nothing(self, transport, writes, meanwhile):
        sink = writes.open_sink("acts.bin", used_nbytes=1, file_nbytes=1)
        sink.write(0, [memoryview(b"x")])
        if meanwhile == "committed":
            sink.commit()
            writes.delete("acts.bin")
        elif meanwhile == "deleted":
            writes.delete("acts.bin")
        else:
            writes.open_sink("acts.bin", used_nbytes=1, file_nbytes=1, resume=True)
        with pytest.raises(TransportError, match="committed, deleted or resumed meanwhile"):
            sink.commit()
        with pytest.raises(NotFoundError):
            transport.size("acts.bin")

    def test_a_root_without_files_is_there_and_empty(self):
        transport = MemoryTransport()
        assert (transport.list(), transport.files, transport.url, transport.pads) == ([], {}, "memory://", False)
        transport.put("a/b.bin", b"12")
        transport.delete("a")
        assert transport.list() == []
        with pytest.raises(NotFoundError, match="there is no such folder"):
            transport.list("a")

    def test_what_is_read_back_ends_with_what_is_used(self, transport):
        sink = transport.open_sink("acts.bin", used_nbytes=4, file_nbytes=9)
        sink.write(0, [memoryview(b"1234")])
        assert [sink.read_back(1, 3), sink.read_back(1, 9), sink.read_back(4, 9)] == [b"23", b"234", b""]

    def test_a_lock_is_free_again_after_an_error(self, transport):
        for _ in range(2):
            with pytest.raises(KeyError), transport.lock("a.lock"):
                with (
                    pytest.raises(WriterConflictError, match="another thread is writing here"),
                    transport.lock("a.lock"),
                ):
                    pass
                with transport.lock("b.lock"), transport.at("a").lock("a.lock"):
                    raise KeyError

    def test_a_pickle_is_a_copy_of_its_own_root_below_the_same_folder(self, transport):
        below = transport.at("folder")
        below.put("a.bin", b"1")
        copy = pickle.loads(pickle.dumps(below))
        copy.put("a.bin", b"22")
        assert (below.read("a.bin"), copy.read("a.bin"), copy.url) == (b"1", b"22", below.url)
        assert copy.counters.requests == 2  # its own


class TestFsspecFile(WriteContract):
    resumes = False
    locks = False

    @pytest.fixture
    def transport(self, folder) -> Transport:
        return open_transport(folder, engine="fsspec")


class TestFsspecMemory(WriteContract):
    resumes = False
    locks = False

    @pytest.fixture
    def transport(self) -> Transport:
        root = f"memory://{uuid.uuid4().hex}/store"
        files = fsspec.filesystem("memory")
        for path, data in FILES.items():
            files.pipe_file(f"{root}/{path}", data)
        yield open_transport(root)
        files.rm(root.rpartition("/")[0], recursive=True)


class TestS3(WriteContract):
    resumes = False
    locks = False

    @pytest.fixture
    def transport(self, s3_bucket) -> Transport:
        transport = open_transport(s3_bucket.url + "/lab/shards", s3_bucket.options, engine="fsspec")
        for path, data in FILES.items():
            transport.put(path, data)
        return transport


class TestCachedS3(ReadContract):
    @pytest.fixture
    def transport(self, s3_bucket, tmp_path) -> Transport:
        far = open_transport(s3_bucket.url + "/lab", s3_bucket.options, engine="fsspec")
        for path, data in FILES.items():
            far.put(path, data)
        options = {"s3": s3_bucket.options, "simplecache": {"cache_storage": str(tmp_path / "cache")}}
        return open_transport(f"simplecache::{s3_bucket.url}/lab", options)


class TestZip(ReadContract):
    @pytest.fixture
    def transport(self, tmp_path) -> Transport:
        with zipfile.ZipFile(tmp_path / "store.zip", "w") as archive:
            for path, data in FILES.items():
                archive.writestr(f"shards/{path}", data)
        return open_transport(f"zip://shards::file://{tmp_path}/store.zip")


class TestHttp(ReadContract):
    """A server that lists folders and answers ranges, as nginx would."""

    lists_sizes = False

    @pytest.fixture
    def transport(self, folder) -> Transport:
        pytest.importorskip("aiohttp")
        server = RangeServer(("127.0.0.1", 0), partial(RangeHandler, directory=str(folder)))
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield open_transport(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
        server.server_close()

    def test_bytes_that_came_are_counted(self, transport):
        path = max(FILES, key=lambda name: len(FILES[name]))
        before = transport.counters.bytes_read
        transport.get_ranges(path, starts=[0, 3, 5], ends=[2, 3, 9])
        assert transport.counters.bytes_read - before == 6


class TestNginx(ReadContract):
    """A real one."""

    lists_sizes = False

    @pytest.fixture
    def transport(self, folder, tmp_path) -> Transport:
        pytest.importorskip("aiohttp")
        with nginx(folder, tmp_path / "nginx") as url:
            yield open_transport(url)


class RangeHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args) -> None:
        pass

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        path = self.translate_path(self.path)
        try:
            with open(path, "rb") as file:
                data = file.read()
        except (IsADirectoryError, FileNotFoundError):
            super().do_GET()
            return
        status, start = 200, 0
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or len(data)) + 1, len(data))
            if start >= len(data):
                self.send_error(416)
                return
            status, whole, data = 206, len(data), data[start:end]
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{start + len(data) - 1}/{whole}")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class TestCounting(WriteContract):
    @pytest.fixture
    def transport(self, folder) -> Transport:
        return CountingTransport(open_transport(folder))


class TestNestedWrappers(WriteContract):
    @pytest.fixture
    def transport(self, folder) -> Transport:
        inner = LatencyTransport(open_transport(folder, engine="pread"), 0.0, bytes_per_s=1e12)
        return CountingTransport(LimitTransport(inner, Rate()))


class TestWrapperOfReader(ReadContract):
    # What the least transport cannot do is not asked of a wrapper around it.
    test_lists_one_level = None

    @pytest.fixture
    def transport(self, folder) -> Transport:
        return CountingTransport(OnlyReads(str(folder)))


class OnlyReads:
    """The smallest transport that satisfies the protocol."""

    name = "least"

    def __init__(self, root: str) -> None:
        self._inner = open_transport(root)
        self.url, self.cost, self.counters = self._inner.url, self._inner.cost, self._inner.counters
        self.read, self.size = self._inner.read, self._inner.size
        self.get_ranges, self.close = self._inner.get_ranges, self._inner.close
        self.readinto, self.reads_into = self._inner.readinto, self._inner.reads_into
        self.is_local, self.local_path = self._inner.is_local, self._inner.local_path
        self.version = self._inner.version

    def at(self, path: str) -> OnlyReads:
        return OnlyReads(self._inner.at(path).url)

    def __reduce__(self):
        return (OnlyReads, (self.url,))


@pytest.mark.parametrize(
    ("engine", "own"),
    [
        ("memory", {"get_ranges": 4, "size": 1, "sink.write": 6}),
        ("mmap", {"get_ranges": 3, "readinto": 1, "size": 1, "sink.write": 6}),
        ("pread", {"get_ranges": 3, "readinto": 1, "size": 1, "sink.write": 6}),
        ("fsspec", {"get_ranges": 4, "size": 4, "sink.write": 8}),  # it looks before creating, and after uploading
    ],
)
def test_what_was_requested_is_counted(tmp_path, engine, own):
    """Each range that has bytes is a request; places below count together with those above."""
    transport = MemoryTransport() if engine == "memory" else open_transport(tmp_path, engine=engine)
    below = transport.at("x")
    transport.put("x/a.bin", bytes(10))
    below.create("b.bin", bytes(4))
    below.size("a.bin")
    transport.read("x/a.bin")
    below.get_ranges("a.bin", starts=[0, 5, 7], ends=[3, 5, 9])
    below.get_ranges("a.bin", starts=[2], ends=[4])
    below.get_ranges("a.bin", starts=[2], ends=[2])
    below.readinto("a.bin", starts=[0], buffers=[memoryview(bytearray(4))])
    transport.list()
    below.delete("b.bin")
    sink = transport.open_sink("c.bin", used_nbytes=6, file_nbytes=8)
    sink.write(0, [memoryview(b"123456")])
    sink.commit()
    sent, counts = own["sink.write"], {**own, "sink.write": 1}
    operations = {"put": 1, "create": 1, "read": 1, "list": 1, "delete": 1, **counts}
    expected = Counters(sum(operations.values()), 10 + 5 + 2 + 4, 10 + 4 + sent, operations)
    assert transport.counters == below.counters == expected
