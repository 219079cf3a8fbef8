"""The places of the transport contract: back ends that hold the same files, put there without the package."""

from __future__ import annotations

import email.utils
import functools
import http.server
import os
import threading
import uuid
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import fsspec
import numpy as np
import pytest
from cloud_servers import Proxy, new_gcs_json_bucket, new_gcs_xml_bucket, new_swift_bucket, s3_options
from range_server import RangeServer
from servers import Bucket, new_moto_bucket

from saev_store.transport import Transport, open_transport

#: What every place holds.
FILES = {
    "metadata.json": b'{"protocol": "2.1"}\n',
    "acts000000.bin": np.random.default_rng(0).bytes(100_003),
    "acts000001.bin": np.random.default_rng(1).bytes(4096),
    "empty.bin": b"",
    "part/deeper/note.txt": "größer\n".encode(),
}
UNSAFE = ("", "/etc/passwd", "../x", "part/../../x", "part/..", "./metadata.json", "part//x", "part/", "a\0b", ".", "\ud800")  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A folder somewhere.

    Attributes:
        name: Its key in `PLACES`.
        url: Its address.
        options: The options that open it.
        engine: The engine that opens it.
        fill: Puts a file there without the package.
    """

    name: str
    url: str
    options: dict
    engine: str
    fill: Callable[[str, bytes], object]

    @property
    def is_local(self) -> bool:
        return self.engine in {"mmap", "pread"}

    @property
    def is_bucket(self) -> bool:
        return self.url.startswith(("s3://", "gs://"))

    def open(self, path: str = "", **options: object) -> Transport:
        """A new transport for a folder of the place."""
        first, chained, rest = self.url.partition("::")
        url = f"{first}/{path}{chained}{rest}" if path else self.url
        return open_transport(url, {**self.options, **options} or None, engine=self.engine)

    def through(self, proxy: Proxy) -> Transport:
        """A new transport for the place, whose requests pass the proxy."""
        if self.engine == "fsspec" and self.url.startswith("http"):
            return open_transport(proxy.url + self.url[self.url.index("/", 8) :], engine="fsspec")
        option = "base_url" if "base_url" in self.options else "endpoint_url"
        return open_transport(self.url, {**self.options, option: proxy.url}, engine=self.engine)

    @property
    def server(self) -> str:
        """The address of the server behind it."""
        return str(
            self.options.get("base_url") or self.options.get("endpoint_url") or "/".join(self.url.split("/")[:3])
        )


def _write(folder: Path, path: str, data: bytes) -> None:
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    spare = target.with_name(f"{target.name}.new")
    spare.write_bytes(data)
    os.replace(spare, target)  # another file of the same name


@contextmanager
def _folder(engine: str, folder: Path) -> Iterator[Place]:
    yield Place(engine, str(folder), {}, engine, functools.partial(_write, folder))


@contextmanager
def _file(folder: Path) -> Iterator[Place]:
    yield Place("file", f"file://{folder}", {}, "fsspec", functools.partial(_write, folder))


@contextmanager
def _bucket(name: str, engine: str, make: Callable[[], Bucket], _: Path) -> Iterator[Place]:
    bucket = make()
    url = f"{bucket.url}/lab/shards"
    options = s3_options(bucket)  # None: a server that speaks Google's interface
    protocol, given = ("gs", bucket.options) if options is None else ("s3", options)
    files = fsspec.filesystem(protocol, **given, use_listings_cache=False)
    root = url.partition("://")[2]
    yield Place(name, url, bucket.options, engine, lambda path, data: files.pipe_file(f"{root}/{path}", data))


@contextmanager
def _memory(_: Path) -> Iterator[Place]:
    files, root = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}/store"
    yield Place("memory", f"memory:/{root}", {}, "auto", lambda path, data: files.pipe_file(f"{root}/{path}", data))
    if files.exists(root):
        files.rm(root, recursive=True)


@contextmanager
def _http(folder: Path) -> Iterator[Place]:
    pytest.importorskip("aiohttp")
    server = RangeServer(("127.0.0.1", 0), functools.partial(_Ranges, directory=str(folder)))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/www"
        yield Place("http", url, {}, "fsspec", functools.partial(_write, folder / "www"))
    finally:
        server.shutdown()
        server.server_close()


class _Ranges(http.server.SimpleHTTPRequestHandler):
    """Ranges, ETags and folders, as nginx gives them."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.translate_path(self.path)
        if not os.path.isfile(path):
            super().do_HEAD() if self.command == "HEAD" else super().do_GET()
            return
        with open(path, "rb") as file:
            data, status = file.read(), os.fstat(file.fileno())
        code, size, bounds = 200, len(data), self.headers.get("Range")
        start = 0
        if bounds:
            first, _, last = bounds.removeprefix("bytes=").partition("-")
            start, code = int(first), 206
            if start >= size:
                self.send_error(416)
                return
            data = data[start : int(last or size) + 1]
        self.send_response(code)
        if bounds:
            self.send_header("Content-Range", f"bytes {start}-{start + len(data) - 1}/{size}")
        self.send_header("ETag", f'"{status.st_ino:x}-{status.st_mtime_ns:x}-{size:x}"')
        self.send_header("Last-Modified", email.utils.formatdate(status.st_mtime, usegmt=True))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@contextmanager
def _zip(folder: Path) -> Iterator[Place]:
    """An archive, whose files are those of the contract."""
    with zipfile.ZipFile(folder / "store.zip", "w") as archive:
        for path, data in FILES.items():
            archive.writestr(f"shards/{path}", data)
    yield Place("zip", f"zip://shards::file://{folder}/store.zip", {}, "auto", lambda path, data: None)


#: Name -> a context manager that makes an empty place, given an empty folder.
PLACES: dict[str, Callable[[Path], object]] = {
    "mmap": functools.partial(_folder, "mmap"),
    "pread": functools.partial(_folder, "pread"),
    "obstore-s3": functools.partial(_bucket, "obstore-s3", "obstore", new_moto_bucket),
    "obstore-gs": functools.partial(_bucket, "obstore-gs", "obstore", new_gcs_xml_bucket),
    "s3fs": functools.partial(_bucket, "s3fs", "fsspec", new_moto_bucket),
    "gcsfs": functools.partial(_bucket, "gcsfs", "fsspec", new_gcs_json_bucket),
    "memory": _memory,
    "file": _file,
    "http": _http,
    "zip": _zip,
}
if os.environ.get("SAEV_STORE_SWIFT_VENV"):  # a real server, at night
    PLACES["swift-obstore"] = functools.partial(_bucket, "swift-obstore", "obstore", new_swift_bucket)
    PLACES["swift-s3fs"] = functools.partial(_bucket, "swift-s3fs", "fsspec", new_swift_bucket)

for _library, _names in {"obstore": ("obstore-s3", "obstore-gs"), "gcsfs": ("gcsfs",)}.items():
    if find_spec(_library) is None:
        for _name in _names:
            del PLACES[_name]

READS = list(PLACES)
WRITES = [name for name in PLACES if name not in {"http", "zip"}]
BUCKETS = [name for name in WRITES if name not in {"mmap", "pread", "memory", "file"}]
#: What answers through a proxy that breaks things: one of each client.
SERVED = [name for name in ("obstore-s3", "s3fs", "gcsfs", "http") if name in PLACES]


@contextmanager
def filled(name: str, folder: Path) -> Iterator[Place]:
    """A place that holds `FILES`."""
    folder.mkdir(parents=True, exist_ok=True)
    with PLACES[name](folder) as place:
        for path, data in FILES.items():
            place.fill(path, data)
        yield place


def n_uploads(place: Place) -> int:
    """Unfinished multipart uploads in a bucket on S3; 0 elsewhere."""
    if not place.url.startswith("s3://"):
        return 0
    page = fsspec.filesystem("s3", **place.options).call_s3("list_multipart_uploads", Bucket=place.url.split("/")[2])
    return len(page.get("Uploads") or [])
