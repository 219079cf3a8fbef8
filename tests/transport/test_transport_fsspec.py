"""Remote places: what they do wrong, what they must not be told, and what happens in other processes."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.server
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
import zipfile
from functools import partial
from typing import ClassVar

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from processes import in_process, read_part, read_whole
from range_server import serving
from retries import clock  # noqa: F401 (a fixture)
from servers import s3_bucket  # noqa: F401 (a fixture)
from waiting import HANG_S

from saev_store.errors import (
    AccessError,
    ArgumentError,
    CorruptShardError,
    DeadlineError,
    MissingDependencyError,
    NotFoundError,
    ReadOnlyError,
    StoreExistsError,
    TransportError,
)
from saev_store.transport import open_transport
from saev_store.transport._remote import again, task_group
from saev_store.transport.fsspec._client import safe_url
from saev_store.transport.fsspec._failures import means_exists
from saev_store.transport.fsspec._ranges import get_range
from saev_store.transport.fsspec._sink import list_uploads
from saev_store.transport.fsspec._transport import FsspecTransport

# In this process threads are running when it forks: that is the very thing to be tested.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")


def one(transport, path, start, end):
    (part,) = transport.get_ranges(path, starts=[start], ends=[end])
    return part


def one_awaited(transport, path, start, end):
    async def read():
        return await transport.get_range_async(path, start=start, end=end)

    return asyncio.run(read())


both = pytest.mark.parametrize("one", [one, one_awaited])


@both
def test_a_body_that_breaks_off_is_asked_for_again(tmp_path, one):
    (tmp_path / "a.bin").write_bytes(b"0123456789")
    with serving(tmp_path) as (url, server):
        server.faults, server.counter = "truncated", 6  # of each seventh answer a half is sent
        assert one(open_transport(url), "a.bin", 2, 8) == b"234567"
        assert server.counter == 8


def test_a_document_that_breaks_off_is_asked_for_again(tmp_path, clock):
    (tmp_path / "a.json").write_bytes(b"0123456789")
    with serving(tmp_path) as (url, server):
        server.faults, server.counter = "truncated", 6
        assert open_transport(url).read("a.json", max_bytes=100) == b"0123456789"
        assert server.counter == 8


@pytest.mark.parametrize("kind", ["ClientPayloadError", "IncompleteRead", "IncompleteReadError", "ResponseStreamingError", "ReadTimeoutError", "ValueError"])  # fmt: skip
def test_what_is_asked_for_again(kind, fake, clock):
    """By the names of aiohttp, http.client, asyncio, botocore and urllib3: none of them is needed."""
    broke_off = type(kind, (ValueError if kind == "ValueError" else Exception,), {})
    answers = [
        broke_off("half of it"),
        broke_off("half of it"),
        (b"23", {"etag": '"1"', "content-range": "bytes 2-3/10"}),
    ]

    async def get(*_):
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    reading = again(lambda: get_range(get, None, "a.bin", 2, 4, where="a.bin", arrived=len), fake.client.passes)
    if kind == "ValueError":
        with pytest.raises(broke_off):
            asyncio.run(reading)
        assert len(answers) == 2
    else:
        assert asyncio.run(reading) == (b"23", ('"1"', 10))


@both
def test_a_range_of_a_web_server_that_is_busy_for_a_while_comes(tmp_path, one, clock):
    (tmp_path / "a.bin").write_bytes(b"0123456789")
    with serving(tmp_path) as (url, server):
        server.faults, server.n_busy = "busy", 7
        assert one(open_transport(url), "a.bin", 2, 8) == b"234567"
        assert server.counter == 8


@both
def test_a_web_server_that_stays_busy_is_an_error_after_the_time_for_tries(tmp_path, one, clock):
    """Not after twice that: the size of the file, which would tell that it was cut, is requested once."""
    (tmp_path / "a.bin").write_bytes(b"0123456789")
    with serving(tmp_path) as (url, server):
        server.faults, server.n_busy = "busy", 1000
        with pytest.raises(TransportError, match="503"):
            one(open_transport(url), "a.bin", 2, 8)
        assert 10 < clock.now_s() <= 15


def test_a_range_that_waits_for_a_busy_server_leaves_the_slots_to_others(fake, monkeypatch, clock):
    """All stores share them."""
    monkeypatch.setattr("saev_store.transport.fsspec._ranges.IN_FLIGHT", 1)
    done = []

    async def get(_, path, start, end, arrived):
        path = path.rpartition("/")[2]
        if path == "busy" and not done:
            raise HttpError(503)
        done.append(path)
        return bytes(end - start), {}

    async def both_at_once():
        await asyncio.gather(*(fake._requested(path, [0], [4], path, fake.client.fs()) for path in ("busy", "healthy")))

    monkeypatch.setattr(fake.client, "get", get)
    asyncio.run(both_at_once())
    assert done == ["healthy", "busy"]


def test_of_two_threads_that_create_a_file_one_wins(monkeypatch):
    """Also where the file system cannot be told to create only: it is asked and written in one turn."""
    transport = open_transport("memory://of-two-threads")
    both_have_asked = threading.Barrier(2)
    is_absent = FsspecTransport._check_absent
    outcomes = []

    def asked(self, path):
        is_absent(self, path)
        with contextlib.suppress(threading.BrokenBarrierError):
            both_have_asked.wait(0.3)

    def create(data):
        try:
            transport.create("a.json", data)
            outcomes.append(data)
        except StoreExistsError:
            outcomes.append(None)

    monkeypatch.setattr(FsspecTransport, "_check_absent", asked)
    threads = [threading.Thread(target=create, args=(data,)) for data in (b"1", b"2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert outcomes.count(None) == 1
    assert transport.read("a.json") in outcomes


@pytest.mark.parametrize(
    ("protocol", "options"), [("gs", {"consistency": "md5"}), ("gcs", {"consistency": "md5"}), ("s3", {})]
)
def test_google_is_told_to_compare_a_checksum(fake, monkeypatch, protocol, options):
    """It does not by itself; S3 does."""
    asked = []

    def ask(operation, *arguments, **options):
        asked.append((operation, options))
        return {"size": 4, "type": "file"}

    sink = fake.open_sink("a.bin", used_nbytes=4, file_nbytes=4, resume=True)
    monkeypatch.setattr(fake.client, "protocols", (protocol,))
    monkeypatch.setattr(fake.client, "ask", ask)
    sink.write(0, [memoryview(b"abcd")])
    sink.commit()
    assert [of for operation, of in asked if operation == "put_file"] == [{"nbytes": 4, **options}]


def test_an_error_says_how_often_and_how_long_it_was_tried(tmp_path, clock):
    (tmp_path / "a.bin").write_bytes(b"0123456789")
    with serving(tmp_path) as (url, server):
        server.faults, server.n_busy = "busy", 1000
        for call in (lambda transport: one(transport, "a.bin", 2, 8), lambda transport: transport.size("a.bin")):
            with pytest.raises(TransportError, match=r"503.* \(tried \d+ times in 1\d s\)$"):
                call(open_transport(url))


@both
@pytest.mark.parametrize("n_stalled", [1, 3])
def test_a_range_that_stalls_is_requested_again(tmp_path, one, n_stalled, monkeypatch):
    """A connection may die without a word."""
    monkeypatch.setattr("saev_store.transport.fsspec._ranges.READ_TIMEOUT_S", 0.2)
    (tmp_path / "a.bin").write_bytes(b"0123456789")
    with serving(tmp_path) as (url, server):
        server.faults, server.most_stalled = "stalled", n_stalled
        assert one(open_transport(url), "a.bin", 2, 8) == b"234567"
        assert server.n_stalled == n_stalled


def test_a_range_whose_bytes_keep_coming_is_not_stalled(tmp_path, monkeypatch):
    """However long it takes."""
    monkeypatch.setattr("saev_store.transport.fsspec._ranges.READ_TIMEOUT_S", 1.0)
    (tmp_path / "a.bin").write_bytes(bytes(range(256)))
    with serving(tmp_path) as (url, server):
        server.byte_s = 0.2
        assert one(open_transport(url), "a.bin", 0, 12) == bytes(range(12))
        assert server.counter == 1


def test_a_name_without_an_address_is_told_as_such():
    transport = open_transport("http://no-such-host.invalid/store")
    with pytest.raises(TransportError, match="no-such-host.*Check the host's name in the address"):
        transport.read("metadata.json")


@pytest.mark.parametrize("n_busy", [3, 1000])
def test_documents_and_sizes_of_a_web_server_that_is_busy(tmp_path, n_busy, clock):
    (tmp_path / "a.bin").write_bytes(b"0123456789")
    with serving(tmp_path) as (url, server):
        transport = open_transport(url)
        for read, found in ((lambda: transport.read("a.bin"), b"0123456789"), (lambda: transport.size("a.bin"), 10)):
            server.faults, server.n_busy, server.counter = "busy", n_busy, 0
            if n_busy == 3:
                assert read() == found
                assert server.counter >= 4
            else:
                with pytest.raises(TransportError, match="503") as caught:
                    read()
                assert caught.value.transient
                assert 5 < server.counter < 100
    assert clock.now_s() < 31


def test_a_web_server_that_is_not_there_is_told_at_once_when_a_store_is_opened(clock):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # not listening
        transport = open_transport(f"http://127.0.0.1:{taken.getsockname()[1]}/store")
        with pytest.raises(TransportError, match="Cannot connect|refused"):
            transport.read("metadata.json")
    assert clock.waits_s == []


@both
def test_a_web_server_that_starts_while_a_range_is_requested(tmp_path, one, clock):
    """As one does that was stopped in the middle of an epoch."""
    (tmp_path / "a.bin").write_bytes(b"0123456789")
    with serving(tmp_path) as (url, _):
        transport = open_transport(url)
    server = []
    with contextlib.ExitStack() as stack:
        port = int(url.rpartition(":")[2].partition("/")[0])
        clock.after[3] = lambda: server.append(stack.enter_context(serving(tmp_path, port=port)))
        assert one(transport, "a.bin", 2, 8) == b"234567"
    assert len(clock.waits_s) == 3
    assert len(server) == 1


class FakeFileSystem(AsyncFileSystem):
    """An object store that does whatever a test wants: `answers` are raised, or replace the data."""

    protocol = "fake"
    cachable = False
    content = bytes(range(256))
    answers: ClassVar[list] = []
    asked: ClassVar[list] = []

    async def _info(self, path, **kwargs):
        self.asked.append("info")
        if path.endswith("gone"):
            raise FileNotFoundError(path)
        return {"name": path, "size": len(self.content), "type": "file"}

    async def _cat_file(self, path, start=None, end=None, **kwargs):
        self.asked.append((start, end))
        answer = self.answers.pop(0) if self.answers else None
        if answer == "hang":
            await asyncio.sleep(1000)
        if isinstance(answer, BaseException):
            raise answer
        return self.content[start:end] if answer is None else answer

    async def _pipe_file(self, path, value, mode="overwrite", **kwargs):
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, BaseException):
            raise answer

    async def _put_file(self, lpath, rpath, **kwargs):
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, BaseException):
            raise answer


@pytest.fixture
def fake():
    fsspec.register_implementation("fake", FakeFileSystem, clobber=True)
    FakeFileSystem.answers, FakeFileSystem.asked = [], []
    return open_fake()


def open_fake(timeout_s=60):
    """fsspec binds the methods when it makes a file system, so patched ones need a new one."""
    return FsspecTransport("fake://bucket/base", {"token": "hush-hush"}, timeout_s=timeout_s)


class HttpError(Exception):
    def __init__(self, status, text="") -> None:
        super().__init__(text)
        self.status = status


class ClientError(Exception):
    """The shape of botocore's."""

    def __init__(self, code, status) -> None:
        super().__init__(f"An error occurred ({code}) when calling the operation")
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


class ReadTimeoutError(Exception):
    pass


class ClientPayloadError(Exception):
    """The shape of aiohttp's, for a body that broke off: its cause has a code that no server answered."""

    def __init__(self) -> None:
        super().__init__("Response payload is not completed")
        self.__cause__ = HttpError(400, "Not enough data to satisfy content length header")


class NoCredentialsError(Exception):
    pass


def caused_by(error, cause):
    error.__cause__ = cause
    return error


def test_a_precondition_that_fails_in_a_read_does_not_mean_that_something_exists(fake):
    """Found by the campaign: gcsfs makes the same error of every 412."""
    for call in (lambda: fake.read("a.bin"), lambda: one(fake, "a.bin", 0, 5)):
        FakeFileSystem.answers[:] = [FileExistsError("https://storage.googleapis.com/b/o")]
        with pytest.raises(TransportError) as caught:
            call()
        assert not caught.value.transient
    FakeFileSystem.answers[:] = [FileExistsError("https://storage.googleapis.com/b/o")]
    with pytest.raises(StoreExistsError):
        fake.put("a.bin", b"")


@pytest.mark.parametrize(
    ("error", "kind", "transient"),
    [
        (FileNotFoundError("x"), NotFoundError, None),
        (HttpError(404), NotFoundError, None),
        (PermissionError("x"), AccessError, None),
        (OSError("Forbidden: https://storage.googleapis.com/b/o"), AccessError, None),  # what gcsfs makes of 403
        (HttpError(401), AccessError, None),
        (HttpError(403), AccessError, None),
        (ClientError("AccessDenied", 403), AccessError, None),
        (NoCredentialsError("Unable to locate credentials"), AccessError, None),
        (TimeoutError(), DeadlineError, True),
        (ReadTimeoutError("x"), DeadlineError, True),
        (HttpError(503), TransportError, True),
        (ClientPayloadError(), TransportError, True),
        (HttpError(429), TransportError, True),
        (HttpError(501), TransportError, False),
        (HttpError(505), TransportError, False),
        (ClientError("SlowDown", 503), TransportError, True),
        (caused_by(OSError(5, "translated"), ClientError("InternalError", 500)), TransportError, True),
        (ConnectionResetError(104, "reset by peer"), TransportError, True),
        (OSError(5, "Input/output error"), TransportError, True),
        (RuntimeError("who knows"), TransportError, True),
        (HttpError(400), TransportError, False),
        (ClientError("InvalidRequest", 400), TransportError, False),
        (ValueError("odd"), TransportError, False),
        (OSError(28, "No space left on device"), TransportError, False),
        (NotImplementedError(), ReadOnlyError, None),
    ],
)
def test_errors_become_ours(fake, error, kind, transient):
    calls = [
        lambda: fake.read("a.bin"),
        lambda: one(fake, "a.bin", 0, 5),
        lambda: one_awaited(fake, "a.bin", 0, 5),
        lambda: fake.put("a.bin", b""),
    ]
    for call in calls:
        FakeFileSystem.answers[:] = [error]
        with pytest.raises(kind, match="fake://bucket/base/a.bin") as caught:
            call()
        assert type(caught.value) is kind
        assert getattr(caught.value, "transient", None) == transient


@both
@pytest.mark.parametrize("answer", [b"", b"1234", b"123456", bytes(range(256)), ValueError("as data"), None])
def test_wrong_answers_are_never_data(fake, monkeypatch, answer, one):
    async def cat_ranges(self, paths, starts, ends, on_error="return", **kwargs):
        return [answer]

    monkeypatch.setattr(FakeFileSystem, "_cat_ranges", cat_ranges)
    with pytest.raises(TransportError, match=r"came for the range 10:15") as caught:
        one(open_fake(), "a.bin", 10, 15)
    assert caught.value.transient


@both
def test_a_range_beyond_the_end_is_told_from_other_failures(fake, one):
    with pytest.raises(CorruptShardError, match=r"256 bytes but byte 300"):
        one(fake, "a.bin", 250, 300)
    FakeFileSystem.answers[:] = [HttpError(416, "range not satisfiable")]
    with pytest.raises(CorruptShardError, match=r"256 bytes but byte 310"):
        one(fake, "a.bin", 300, 310)
    FakeFileSystem.answers[:] = [HttpError(416, "range not satisfiable")]
    with pytest.raises(TransportError, match="416|not satisfiable"):
        one(fake, "a.bin", 3, 10)


def test_empty_ranges_and_empty_calls_ask_nothing(fake):
    assert fake.get_ranges("a.bin", starts=[], ends=[]) == []
    assert fake.get_ranges("a.bin", starts=[5, 9], ends=[5, 9]) == [b"", b""]
    assert fake.get_ranges("a.bin", starts=[5, 9], ends=[5, 12]) == [b"", bytes([9, 10, 11])]
    assert FakeFileSystem.asked == [(9, 12)]


def test_a_document_is_one_request_and_no_longer_than_allowed(fake):
    with pytest.raises(TransportError, match="at most 100 bytes"):
        fake.read("a.bin", max_bytes=100)
    assert FakeFileSystem.asked == [(0, 101)]
    assert fake.read("a.bin", max_bytes=256) == FakeFileSystem.content


@pytest.mark.parametrize(
    ("said", "size"),
    [("bytes 3-8/256", 256), ("bytes 3-8/*", None), ("", None), ("bytes 4-9/256", "other"), ("bytes 2-7/*", "other")],
)
def test_a_range_that_says_to_be_another_one_is_not_taken(said, size, fake):
    """A cache between us and the server may mix up answers; the length alone does not tell."""

    async def get(fs, path, start, end, arrived):
        arrived(end - start)
        return bytes(range(start, end)), {"content-range": said, "etag": "v1"}

    arrived = []

    def found():
        return asyncio.run(get_range(get, None, "a.bin", 3, 9, where="there/a.bin", arrived=arrived.append))

    if size == "other":
        with pytest.raises(TransportError, match=r"there/a\.bin: .* but bytes 3 to 9 were asked for") as caught:
            found()
        assert caught.value.transient
    else:
        assert found() == (bytes(range(3, 9)), ("v1", size))
    assert arrived == [6]


def test_unfinished_uploads_are_listed_to_the_last_page():
    """A bucket lists a thousand at a time."""
    asked = []

    class Client:
        def ask(self, *operation: str, **given: object) -> dict[str, object]:
            asked.append((operation, given))
            number = len(asked)
            keys = [f"lab/{number}/a.bin", f"lab2/{number}/a.bin"]
            page = {"Uploads": [{"Key": key, "UploadId": f"id{number}"} for key in keys], "IsTruncated": number < 3}
            return {**page, "NextKeyMarker": keys[-1], "NextUploadIdMarker": f"id{number}"}

    found = list_uploads(Client(), "bucket", "lab", folder="bucket/lab")
    assert [(upload.path, upload.upload_id) for upload in found] == [(f"{n}/a.bin", f"id{n}") for n in (1, 2, 3)]
    where = {"Bucket": "bucket", "Prefix": "lab"}
    assert {operation for operation, _ in asked} == {("call_s3", "list_multipart_uploads")}
    assert [given for _, given in asked] == [
        where,
        {**where, "KeyMarker": "lab2/1/a.bin", "UploadIdMarker": "id1"},
        {**where, "KeyMarker": "lab2/2/a.bin", "UploadIdMarker": "id2"},
    ]


def test_a_link_that_leads_to_nothing_is_no_missing_file(tmp_path):
    (tmp_path / "labels.bin").symlink_to("/nowhere/labels.bin")
    transport = open_transport(tmp_path, engine="fsspec")
    with pytest.raises(
        TransportError, match=r"labels\.bin: .*symbolic link to '/nowhere/labels\.bin', where nothing is"
    ):
        transport.size("labels.bin")
    with pytest.raises(NotFoundError):
        transport.size("acts000000.bin")


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path):
    """To open a pipe that nobody writes to, or reads from, waits for ever; the other engines of this machine refuse it, too."""
    os.mkfifo(tmp_path / "pipe")
    os.symlink("/dev/zero", tmp_path / "device")
    transport = open_transport(tmp_path, engine="fsspec")
    for path, kind in (("pipe", "a named pipe"), ("device", "a device")):
        for call in (
            lambda path=path: transport.read(path, max_bytes=10),
            lambda path=path: transport.get_ranges(path, starts=[0], ends=[1]),
            lambda path=path: transport.put(path, b"x"),
        ):
            with pytest.raises(TransportError, match=f"this is {kind}"):
                call()


def test_nothing_hangs_longer_than_its_deadline(fake):
    impatient = open_fake(timeout_s=0.2)
    calls = [
        lambda: impatient.read("a.bin", max_bytes=10),
        lambda: one(impatient, "a.bin", 0, 5),
        lambda: one_awaited(impatient, "a.bin", 0, 5),
    ]
    for call in calls:
        FakeFileSystem.answers[:] = ["hang"]
        with pytest.raises(DeadlineError, match=r"a\.bin"):
            call()


def test_a_cancelled_wait_cancels_the_request(fake, monkeypatch):
    begun, ended = threading.Event(), threading.Event()

    async def hang(self, paths, starts, ends, **kwargs):
        begun.set()
        try:
            await asyncio.sleep(1000)
        finally:
            ended.set()

    monkeypatch.setattr(FakeFileSystem, "_cat_ranges", hang)
    transport = open_fake()

    async def read_and_cancel():
        task = asyncio.create_task(transport.get_range_async("a.bin", start=0, end=5))
        assert await asyncio.to_thread(begun.wait, HANG_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(read_and_cancel())
    assert ended.wait(HANG_S)


def test_awaited_ranges_are_of_the_version_that_was_read_first(tmp_path):
    """Of a web server, whose answers have ETags."""
    tags = iter(["one", "one", "two"])

    class Tagged(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            data = b"0123456789"[3:7]
            self.send_response(206)
            self.send_header("Content-Range", "bytes 3-6/10")
            self.send_header("ETag", next(tags))
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_HEAD(self):
            self.send_response(200)
            self.send_header("Content-Length", "10")
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Tagged) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        transport = open_transport(f"http://127.0.0.1:{server.server_port}")
        assert one(transport, "a.bin", 3, 7) == one_awaited(transport, "a.bin", 3, 7) == b"3456"
        assert transport.counters.operations["get_ranges"] == 2
        with pytest.raises(TransportError, match="replaced while it was being read"):
            one_awaited(transport, "a.bin", 3, 7)
        server.shutdown()


class Digits(http.server.BaseHTTPRequestHandler):
    """Every file has the bytes 0 to 9."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        self.answer(206, b"0123456789"[first : last + 1], {})

    def answer(self, status, data, headers):
        self.send_response(status)
        for header in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def answering(handler):
    """The address of a server whose requests such a handler answers."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@both
@pytest.mark.parametrize("name", [None, "Accept-Encoding", "accept-encoding"])
def test_ranges_of_a_server_that_compresses(one, name):
    """nginx with `gzip_types application/octet-stream` sends all of the file, compressed, to who takes that."""

    class Compressing(Digits):
        def do_GET(self):
            if "gzip" not in ",".join(self.headers.get_all("Accept-Encoding", ["gzip"])):
                super().do_GET()
                return
            self.answer(200, gzip.compress(b"0123456789"), {"Content-Encoding": "gzip"})

    options = {"headers": {"X-Token": "1"} | ({name: "gzip"} if name else {})}
    with answering(Compressing) as url:
        assert one(open_transport(url, options), "a.bin", 3, 7) == b"3456"


@pytest.mark.parametrize(
    ("links", "names"),
    [
        (
            ["../", "in/", "a.bin", "/lab/b.bin", "{lab}/c.bin", "{lab}/in/"],
            ["a.bin", "b.bin", "c.bin", "in/"],
        ),  # nginx
        (["?C=N;O=D", "/", "a.bin", "a%20b.bin"], ["a%20b.bin", "a.bin"]),  # Apache
        (["./../", "./in/", "./a.bin", "https://example.com/http-server"], ["a.bin", "in/"]),  # http-server
        (["/", "/lab&#47;", "&#47;", "&#47;lab&#47;in&#47;", "&#47;lab&#47;a.bin"], ["a.bin", "in/"]),  # serve
        (["#top", "mailto:me@example.com", "javascript:up()", "in/deeper/a.bin", "/other/b.bin", "a.bin"], ["a.bin"]),
    ],
)
def test_what_pages_of_web_servers_list(links, names):
    """What is directly in the folder, whatever else the page leads to."""

    class Page(Digits):
        def do_GET(self):
            page = "".join(f'<a href="{link}">x</a>' for link in links).replace("{lab}", lab).encode()
            self.answer(200, page, {"Content-Type": "text/html"})

    with answering(Page) as url:
        lab = f"{url}/lab"
        found = open_transport(lab).list()
        assert [f"{entry.path}{'/' * entry.is_dir}" for entry in found] == names
        found = open_transport(url).list("lab")
        assert [f"{entry.path}{'/' * entry.is_dir}" for entry in found] == [f"lab/{name}" for name in names]


def test_a_document_without_an_end_is_not_read_on():
    """Whatever was asked for, the server goes on sending; no more than was asked for is kept."""
    sent, is_left = [], threading.Event()

    class Endless(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            try:
                while len(sent) < 1000:
                    self.wfile.write(bytes(1 << 20))
                    sent.append(1 << 20)
            except OSError:
                is_left.set()

        def log_message(self, *args):
            pass

    with answering(Endless) as url:
        with pytest.raises(TransportError, match="at most 100 bytes are read at once"):
            open_transport(url).read("a.json", max_bytes=100)
        assert is_left.wait(HANG_S)
        assert len(sent) < 100


@pytest.mark.parametrize(("max_bytes", "fits"), [(9, False), (10, True), (11, True), (None, True)])
def test_documents_of_a_server_without_ranges(tmp_path, max_bytes, fits):
    (tmp_path / "a.json").write_bytes(b"0123456789")
    (tmp_path / "empty.json").write_bytes(b"")

    class Whole(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Whole, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        transport = open_transport(f"http://127.0.0.1:{server.server_port}")
        if fits:
            assert transport.read("a.json", max_bytes=max_bytes) == b"0123456789"
        else:
            with pytest.raises(TransportError, match="at most 9 bytes"):
                transport.read("a.json", max_bytes=max_bytes)
        assert transport.read("empty.json", max_bytes=max_bytes) == b""
        with pytest.raises(NotFoundError):
            transport.read("gone.json", max_bytes=max_bytes)
        server.shutdown()


def test_no_connection_outlives_the_loop_that_awaits(tmp_path):
    """Also of a loop that ended without shutting its generators down; a loop that goes on keeps its connections."""
    closed = []

    class Watched(Digits):
        def finish(self):
            super().finish()
            closed.append(self.client_address)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Watched) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        transport = open_transport(f"http://127.0.0.1:{server.server_port}")

        async def several():
            waits = [transport.get_range_async("a.bin", start=start, end=start + 2) for start in range(5)]
            return b"".join(await asyncio.gather(*waits))

        async def twice():
            both = await several(), await several()
            assert not closed
            return both

        expected = b"0112233445"
        assert asyncio.run(twice()) == (expected, expected)
        deadline = time.monotonic() + HANG_S
        while len(closed) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(closed) == 5
        assert not transport.client._in_loops
        loop = asyncio.new_event_loop()
        assert loop.run_until_complete(several()) == expected
        loop.run_until_complete(transport.client._in_loops[loop][0]._session.close())  # else Python warns
        loop.close()
        assert asyncio.run(several()) == expected
        assert not transport.client._in_loops
        server.shutdown()


def test_a_child_that_goes_on_with_the_loop_of_its_parent_makes_connections_of_its_own():
    """What both write into one connection and read from it would be answers to each other's requests."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Digits) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        transport = open_transport(f"http://127.0.0.1:{server.server_port}")
        loop = asyncio.new_event_loop()

        def file_system():
            assert loop.run_until_complete(transport.get_range_async("a.bin", start=3, end=7)) == b"3456"
            return transport.client._in_loops[loop][0]

        ours = file_system()
        assert file_system() is ours
        child = os.fork()
        if child == 0:
            is_new = False
            with contextlib.suppress(BaseException):
                is_new = file_system() is not ours
            os._exit(0 if is_new else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert file_system() is ours
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
        server.shutdown()


def test_sizes_that_the_server_does_not_tell(fake, monkeypatch):
    async def info(self, path, **kwargs):
        return {"name": path, "size": None, "type": "file"}

    monkeypatch.setattr(FakeFileSystem, "_info", info)
    with pytest.raises(TransportError, match="does not tell the size"):
        open_fake().size("a.bin")


def test_an_upload_that_arrives_short_is_an_error(fake):
    sink = fake.open_sink("gone", used_nbytes=10, file_nbytes=10, resume=True)
    sink.write(0, [memoryview(b"0123456789")])
    with pytest.raises(NotFoundError):
        sink.commit()
    sink.abort()
    sink = fake.open_sink("there", used_nbytes=10, file_nbytes=10, resume=True)
    sink.write(0, [memoryview(b"0123456789")])
    with pytest.raises(TransportError, match="256 bytes arrived of 10"):
        sink.commit()
    FakeFileSystem.answers[:] = [HttpError(503)]
    with pytest.raises(TransportError, match="503|upload"):
        sink.commit()
    sink.abort()
    with pytest.raises(TransportError, match="aborted already"):
        sink.commit()


def test_a_killed_process_leaves_no_temporary_file(fake, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sink = fake.open_sink("gone", used_nbytes=10, file_nbytes=10)
    assert os.listdir(tmp_path) == []
    sink.abort()


def test_a_full_temporary_folder_is_known_at_once(fake, monkeypatch):
    def full(fd, nbytes):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("saev_store.transport.fsspec._sink.preallocate", full)
    with pytest.raises(TransportError, match="ENOSPC"):
        fake.open_sink("gone", used_nbytes=10, file_nbytes=10)


@pytest.mark.parametrize(
    ("error", "exists"),
    [
        (FileExistsError("x"), True),
        (HttpError(412), True),
        (OSError(22, "At least one of the pre-conditions you specified did not hold"), True),
        (caused_by(OSError(22, "x"), ClientError("PreconditionFailed", 412)), True),
        (OSError(22, "Invalid argument"), False),
        (HttpError(503), False),
    ],
)
def test_knows_what_a_failed_creation_means(fake, error, exists):
    assert means_exists(error) == exists
    FakeFileSystem.answers[:] = [error]
    with pytest.raises(StoreExistsError if exists else TransportError):
        fake.create("a.bin", b"")


# Secrets


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/path/", "s3://bucket/path"),
        ("https://me:pass@host/x?sig=abc#f", "https://host/x"),
        ("simplecache::https://me:pa@ss@host/x?sig=abc", "simplecache::https://host/x"),
        ("zip://in@side::s3://key:secret@bucket/a.zip", "zip://in@side::s3://bucket/a.zip"),
        ("memory://", "memory://"),
        ("file:///a@b/c?d", "file:///a@b/c?d"),
    ],
)
def test_urls_are_shown_without_secrets(url, shown):
    assert safe_url(url) == shown


def test_no_error_tells_a_secret(fake):
    FakeFileSystem.answers[:] = [
        RuntimeError("GET https://me:pass@host/x?X-Signature=abcdef failed for token hush-hush")
    ]
    with pytest.raises(TransportError) as caught:
        fake.read("a.bin")
    shown = "".join(traceback.format_exception(caught.value)) + repr(fake) + str(fake) + fake.url
    for secret in ("hush-hush", "pass@", "abcdef"):
        assert secret not in shown
    assert "RuntimeError: GET https://host/x failed for token ***" in str(caught.value)


def test_harmless_causes_are_kept(fake):
    FakeFileSystem.answers[:] = [RuntimeError("the network is down")]
    with pytest.raises(TransportError) as caught:
        fake.read("a.bin")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_wrong_options_are_an_argument_error_without_their_values():
    with pytest.raises(ArgumentError, match="storage_options") as caught:
        open_transport("zip://x::memory://y", {"memory": {"fo": "hush-hush"}, "zip": {"mode": "sideways"}})
    assert "hush-hush" not in str(caught.value)


@pytest.mark.parametrize("url", ["nonsense://x", "simplecache::nonsense://x"])
def test_unknown_protocols(url):
    with pytest.raises(MissingDependencyError, match="install the package"):
        open_transport(url)


@pytest.mark.parametrize(("url", "extra"), [("s3://b", "s3"), ("gs://b/x", "gcs"), ("simplecache::gcs://b", "gcs")])
def test_missing_packages_are_named(monkeypatch, url, extra):
    def missing(*args, **kwargs):
        raise ImportError("Install something")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(MissingDependencyError, match=rf"pip install 'saev_store\[{extra}\]'"):
        open_transport(url, engine="fsspec")


# Real servers


def test_s3_reads_and_writes_with_the_fewest_requests(s3_bucket, monkeypatch):
    import s3fs

    transport = open_transport(s3_bucket.url + "/root", s3_bucket.options, engine="fsspec")
    transport.put("a.bin", bytes(range(256)))
    asked = []
    real = s3fs.S3FileSystem._call_s3

    async def spy(self, method, *args, **kwargs):
        asked.append(method)
        return await real(self, method, *args, **kwargs)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", spy)
    transport.read("a.bin")
    transport.read("a.bin", max_bytes=1000)
    assert asked == ["get_object"] * 2
    transport.get_ranges("a.bin", starts=[0, 9, 100], ends=[5, 9, 200])
    assert asked == ["get_object"] * 4
    transport.size("a.bin")
    assert asked == ["get_object"] * 4 + ["head_object"]


def test_s3_sizes_are_never_stale(s3_bucket):
    transport = open_transport(s3_bucket.url, s3_bucket.options, engine="fsspec")
    transport.put("a/b.bin", b"1234")
    assert [entry.size for entry in transport.list("a")] == [4]
    assert transport.size("a/b.bin") == 4
    other = fsspec.filesystem("s3", skip_instance_cache=True, **s3_bucket.options)
    other.pipe_file(f"{s3_bucket.url}/a/b.bin", b"123456")
    other.pipe_file(f"{s3_bucket.url}/a/c.bin", b"1")
    assert [(entry.path, entry.size) for entry in transport.list("a")] == [("a/b.bin", 6), ("a/c.bin", 1)]
    assert transport.size("a/b.bin") == 6
    with pytest.raises(CorruptShardError, match="6 bytes"):
        one(transport, "a/b.bin", 0, 7)


def test_s3_reads_the_version_that_the_address_names(s3_bucket):
    s3fs = pytest.importorskip("s3fs")
    options = {**s3_bucket.options, "version_aware": True}
    fs = s3fs.S3FileSystem(**options)
    fs.make_bucket_versioned(s3_bucket.url.removeprefix("s3://"))
    path = f"{s3_bucket.url}/lab/x.bin"
    for content in (b"the first", b"the one that came later"):
        fs.pipe_file(path, content)
    newest, first = (version["VersionId"] for version in fs.object_version_info(path))
    for version, content in ((first, b"the first"), (newest, b"the one that came later")):
        transport = open_transport(f"{s3_bucket.url}/lab?versionId={version}", options, engine="fsspec")
        assert transport.size("x.bin") == len(content)
        parts = transport.get_ranges("x.bin", starts=[0, 4], ends=[4, 9])
        assert b"".join(map(bytes, parts)) == content[:9]


def test_s3_uploads_in_parts(s3_bucket):
    transport = open_transport(s3_bucket.url, s3_bucket.options, engine="fsspec")
    nbytes = 12 << 20
    sink = transport.open_sink("big.bin", used_nbytes=nbytes - 5, file_nbytes=nbytes)
    sink.write(0, [memoryview(b"0123456789abcdef" * (nbytes // 16))[: nbytes - 5]])
    sink.commit()
    assert transport.size("big.bin") == nbytes
    assert bytes(one(transport, "big.bin", nbytes - 8, nbytes)) == b"89a" + bytes(5)


def test_s3_without_the_right_to_look(s3_bucket):
    transport = open_transport(f"{s3_bucket.url}-that-is-not-there/x", s3_bucket.options, engine="fsspec")
    with pytest.raises(NotFoundError, match="that-is-not-there"):
        transport.read("metadata.json")
    shown = repr(transport) + str(transport.url)
    assert "very-secret-key" not in shown


def test_only_one_service_with_the_same_credentials_copies_within():
    """It would look for the source in the wrong place, or with rights that are not the source's."""
    pytest.importorskip("s3fs")

    def down(url="s3://bucket/from", *, key="a", port=9):
        client_kwargs = {"endpoint_url": f"http://127.0.0.1:{port}"}
        options = {
            "key": key,
            "secret": "b",
            "client_kwargs": client_kwargs,
            "config_kwargs": {"retries": {"max_attempts": 0}},
        }
        transport = open_transport(url, options, engine="fsspec")
        transport.client.fs()
        return transport

    to = down("s3://bucket/to")
    for other in (down(key="c"), down(port=10)):
        assert to.copy_within(other, "acts.bin", "acts.bin") is False
    without_options = open_transport("s3://bucket/to", engine="fsspec")
    without_options.client.fs()
    assert without_options.copy_within(open_transport("memory://from"), "acts.bin", "acts.bin") is False
    for not_copying in (open_transport("memory://to"), open_transport("simplecache::s3://bucket/to")):
        assert not_copying.copy_within(not_copying, "acts.bin", "acts.bin") is False
    with pytest.raises(TransportError):
        to.copy_within(down(), "acts.bin", "acts.bin")


@pytest.mark.parametrize("protocol", ["s3", "s3a", "gs", "gcs"])
def test_services_copy_within_under_each_of_their_names(protocol: str, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("s3fs" if protocol.startswith("s3") else "gcsfs")
    options = {"key": "a", "secret": "b"} if protocol.startswith("s3") else {"token": "anon"}
    transport = open_transport(f"{protocol}://bucket/x", options, engine="fsspec")
    asked: list[tuple[object, ...]] = []

    def ask(*what: object, **_: object) -> dict[str, object]:
        asked.append(what)
        return {"size": 5, "type": "file"}

    monkeypatch.setattr(transport.client, "ask", ask)
    assert transport.copy_within(transport.at("from"), "acts.bin", "to/acts.bin")
    assert asked == [("info", "bucket/x/from/acts.bin"), ("cp_file", "bucket/x/from/acts.bin", "bucket/x/to/acts.bin")]


def test_a_server_that_is_down_is_a_transport_error():
    pytest.importorskip("aiohttp")
    transport = open_transport("http://127.0.0.1:9/x")
    with pytest.raises(TransportError) as caught:
        transport.read("metadata.json", max_bytes=100)
    assert caught.value.transient


def test_s3_in_a_child_that_forks_in_the_middle_of_reads(s3_bucket):
    transport = open_transport(s3_bucket.url, s3_bucket.options, engine="fsspec")
    transport.put("a.bin", b"0123456789")
    stop, found = threading.Event(), set()

    def read():
        while not stop.is_set():
            found.add(read_part(transport))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            assert in_process("fork", transport) == b"34560"
    finally:
        stop.set()
        for thread in threads:
            thread.join(HANG_S)
    assert found == {b"34560"}


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_http_in_other_processes(tmp_path, method):
    pytest.importorskip("aiohttp")
    (tmp_path / "a.bin").write_bytes(b"0123456789")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        transport = open_transport(f"http://127.0.0.1:{server.server_port}/?token=hush-hush")
        assert "hush" not in transport.url
        with pytest.raises(
            TransportError,
            match=r"sends the whole file, or several parts, where bytes 3 to 7 were .* Use a web server that answers range requests",
        ):
            read_part(transport)  # this server knows no ranges
        assert in_process(method, transport, read_whole) == b"0123456789"
    finally:
        server.shutdown()
        server.server_close()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args) -> None:
        pass


def test_zip_in_other_processes(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("in/a.bin", b"0123456789")
    transport = open_transport(f"zip://in::file://{tmp_path}/a.zip")
    assert read_part(transport) == b"34560"
    for method in ("fork", "spawn"):
        assert in_process(method, transport) == b"34560"


def test_a_zip_that_is_not_there(tmp_path):
    with pytest.raises(NotFoundError):
        open_transport(f"zip://::file://{tmp_path}/nothing.zip")
    (tmp_path / "bad.zip").write_bytes(b"no archive")
    with pytest.raises(TransportError, match="BadZipFile"):
        open_transport(f"zip://::file://{tmp_path}/bad.zip")


def test_places_that_cannot_be_written_to(tmp_path):
    pytest.importorskip("aiohttp")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("in/a.bin", b"0123456789")
    for url in (f"zip://in::file://{tmp_path}/a.zip", "http://127.0.0.1:9"):
        transport = open_transport(url)
        for call in (lambda t=transport: t.put("b", b"1"), lambda t=transport: t.delete("a.bin")):
            with pytest.raises((ReadOnlyError, TransportError)):
                call()


@pytest.mark.parametrize("kind", ["zip", "deflated", "memory", "dir", "file"])
def test_threads_and_transports_on_one_file_do_not_disturb_each_other(tmp_path, kind):
    """Members of an archive share the archive's position, and files in fsspec's memory are one shared object."""
    truth = bytes(range(256)) * 100
    method = zipfile.ZIP_DEFLATED if kind == "deflated" else zipfile.ZIP_STORED
    with zipfile.ZipFile(tmp_path / "a.zip", "w", method) as archive:
        archive.writestr("a.bin", truth)
    (tmp_path / "a.bin").write_bytes(truth)
    fsspec.filesystem("memory").pipe_file(f"{tmp_path}/a.bin", truth)
    archived = f"zip://::file://{tmp_path}/a.zip"
    url = {"memory": f"memory:/{tmp_path}", "file": f"file://{tmp_path}", "dir": f"dir::{archived}"}.get(kind, archived)
    transports, errors = [open_transport(url, engine="fsspec") for _ in range(2)], []

    def read(seed):
        try:
            for n in range(20):
                starts = [(seed * 7919 + n * 104_729 + k * 1299) % 20_000 for k in range(20)]
                parts = transports[seed % 2].get_ranges("a.bin", starts=starts, ends=[start + 3000 for start in starts])
                assert parts == [truth[start : start + 3000] for start in starts]
                assert transports[seed % 2].read("a.bin") == truth
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
    finally:
        sys.setswitchinterval(before)
    assert not errors


def test_the_first_error_of_a_group_keeps_its_cause_and_is_in_no_circle():
    """Its cause has the HTTP status. A pickler that follows contexts never ended: the group contains the error."""
    reason, error = ValueError("status 429"), OSError("throttled")

    async def fails():
        raise error from reason

    async def group_of_two():
        async with task_group() as group:
            group.create_task(asyncio.sleep(HANG_S))
            group.create_task(fails())

    with pytest.raises(OSError, match="throttled") as caught:
        asyncio.run(group_of_two())
    assert caught.value is error
    assert error.__cause__ is reason
    assert error.__context__ is None


def test_an_old_file_that_is_read_while_the_new_one_is_written_is_forgotten(tmp_path):
    transport = FsspecTransport(f"memory://{tmp_path.name}-pins")
    transport.put("a.bin", b"old")
    sink = transport.open_sink("a.bin", used_nbytes=4, file_nbytes=4, resume=True)
    assert transport.get_ranges("a.bin", starts=[0], ends=[3]) == [b"old"]
    sink.write(0, [memoryview(b"anew")])
    sink.commit()
    assert transport.get_ranges("a.bin", starts=[0], ends=[4]) == [b"anew"]


@both
def test_a_range_that_took_too_long_is_told_without_another_request(fake, one, monkeypatch):
    """The size of the file would take as long."""

    async def too_late(*_, **__):
        raise TimeoutError

    monkeypatch.setattr(fake, "_requested", too_late)
    monkeypatch.setattr(fake, "_size", lambda *_, **__: pytest.fail("asked for the size"))
    with pytest.raises(DeadlineError):
        one(fake, "a.bin", 2, 8)


def test_a_document_of_a_server_that_does_not_answer_is_asked_for_once(fake, monkeypatch):
    """Google's client takes a minute to give up; only a refused range may be one of an empty file."""
    asked = []

    def ask(operation, *_, **__):
        asked.append(operation)
        raise ConnectionError("no route")

    monkeypatch.setattr(fake.client, "ask", ask)
    with pytest.raises(TransportError, match="no route"):
        fake.read("metadata.json", max_bytes=10)
    assert asked == ["cat_file"]
