"""As much of S3 as benchmarks need, as cheap as this machine can serve it: the cores are shared with the client.

    python benchmarks/_far_server.py SOCKET_FD FOLDER LATENCY_S

`serve` starts it, `serve_tls` starts nginx before it, and `on_a_line` limits what passes between them and the client. Objects are
files below the folder, and what is uploaded: documents are kept, large bodies are dropped inside the kernel and only their lengths
are remembered. Nothing is checked, neither signatures nor checksums.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: Longer bodies are dropped.
_KEPT_BYTES = 1 << 20


@dataclass
class Request:
    """One request; `body` holds nothing where `length` is more than is kept."""

    method: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    length: int
    body: bytes


@dataclass
class Answer:
    """One answer; the body is `body`, or a range of the file `fd`."""

    status: str = "200 OK"
    body: bytes = b""
    extra: str = ""
    fd: int = -1
    start: int = 0
    size: int = -1


class Server:
    """One thread for each connection; the kernel does what takes long, without the GIL."""

    def __init__(self, folder: Path, latency_s: float) -> None:
        self._folder, self._latency_s = folder, latency_s
        self._files: dict[str, tuple[int, int]] = {}
        self._objects: dict[str, tuple[int, bytes]] = {}
        #: Bytes of each multipart upload.
        self._uploads: collections.Counter[str] = collections.Counter()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def serve(self, listener: socket.socket) -> None:
        """Until the process is killed."""
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        scratch, buffer = bytearray(_KEPT_BYTES), b""
        try:
            while True:
                while (end := buffer.find(b"\r\n\r\n")) < 0:
                    if not (more := connection.recv(65536)):
                        return
                    buffer += more
                first, *lines = buffer[:end].decode("latin-1").split("\r\n")
                buffer = buffer[end + 4 :]
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                length = int(headers.get("content-length", 0))
                if "expect" in headers:
                    connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                kept = length <= _KEPT_BYTES
                body, buffer = buffer[:length], buffer[length:]
                left = length - len(body)
                while left:
                    # MSG_TRUNC: the kernel throws the bytes away instead of copying them.
                    n = connection.recv_into(scratch, min(left, len(scratch)), 0 if kept else socket.MSG_TRUNC)
                    if not n:
                        return
                    left -= n
                    body += scratch[:n] if kept else b""
                method, target = first.split(" ")[:2]
                path, _, query = target.partition("?")
                known = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
                key = urllib.parse.unquote(path)
                request = Request(method, key, known, headers, length, body if kept else b"")
                if self._latency_s:
                    time.sleep(self._latency_s)
                self._send(connection, self._answer(request), with_body=method != "HEAD")
        except OSError:
            return
        finally:
            connection.close()

    def _send(self, connection: socket.socket, answer: Answer, *, with_body: bool) -> None:
        size = len(answer.body) if answer.size < 0 else answer.size
        head = (
            f'HTTP/1.1 {answer.status}\r\nContent-Length: {size}\r\nETag: "e"\r\n{answer.extra}'
            "Last-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n\r\n"
        ).encode()
        with_file = with_body and answer.fd >= 0
        connection.sendall(head + (answer.body if with_body else b""), socket.MSG_MORE if with_file else 0)
        at, end = answer.start, answer.start + size
        while with_file and at < end:
            at += os.sendfile(connection.fileno(), answer.fd, at, end - at)

    def _answer(self, request: Request) -> Answer:
        query, key = request.query, request.key
        if request.method in {"GET", "HEAD"}:
            return self._listing(key, query) if "list-type" in query else self._object(request)
        with self._lock:
            if "uploads" in query:
                return _xml("InitiateMultipartUploadResult", f"<UploadId>{next(self._numbers)}</UploadId>")
            if "partNumber" in query:
                self._uploads[query["uploadId"]] += request.length
                return Answer()
            if "uploadId" in query:
                self._objects[key] = self._uploads.pop(query["uploadId"]), b""
                return _xml("CompleteMultipartUploadResult", '<ETag>"e"</ETag>')
            if "delete" in query:
                gone = [name.partition("<")[0] for name in request.body.decode().split("<Key>")[1:]]
                for name in gone:
                    self._objects.pop(f"{key.rstrip('/')}/{name}", None)
                return _xml("DeleteResult", "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in gone))
            if request.headers.get("if-none-match") == "*" and key in self._objects:
                return Answer("412 Precondition Failed", b"<Error><Code>PreconditionFailed</Code></Error>")
            self._objects[key] = request.length, request.body
            return Answer()

    def _listing(self, key: str, query: dict[str, str]) -> Answer:
        prefix = f"{key.rstrip('/')}/{query.get('prefix', '')}"
        with self._lock:
            found = {name: size for name, (size, _) in self._objects.items() if name.startswith(prefix)}
        folders, listed, n_before = set[str](), "", len(key.rstrip("/")) + 1
        for name, size in sorted(found.items()):
            below, deeper, _ = name[len(prefix) :].partition(query.get("delimiter") or "\0")
            if deeper:
                folders.add((prefix + below + deeper)[n_before:])
            else:
                listed += (
                    f"<Contents><Key>{name[n_before:]}</Key><Size>{size}</Size>"
                    "<LastModified>2015-10-21T07:28:00.000Z</LastModified></Contents>"
                )
        listed += "".join(f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>" for name in sorted(folders))
        return _xml("ListBucketResult", "<IsTruncated>false</IsTruncated>" + listed)

    def _object(self, request: Request) -> Answer:
        key = request.key
        with self._lock:
            if key in self._objects:
                size, content = self._objects[key]
                return Answer(body=content, size=size if request.method == "HEAD" else -1)
            if key not in self._files:
                try:
                    fd = os.open(self._folder / key.lstrip("/"), os.O_RDONLY)
                except OSError:
                    return Answer("404 Not Found", b"<Error><Code>NoSuchKey</Code></Error>")
                self._files[key] = fd, os.fstat(fd).st_size
            fd, whole = self._files[key]
        if not (wanted := request.headers.get("range")):
            return Answer(fd=fd, size=whole)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or whole) + 1, whole)
        extra = f"Content-Range: bytes {start}-{end - 1}/{whole}\r\n"
        return Answer("206 Partial Content", extra=extra, fd=fd, start=start, size=end - start)


def _xml(name: str, inside: str) -> Answer:
    return Answer(body=f'<?xml version="1.0" encoding="UTF-8"?><{name}>{inside}</{name}>'.encode())


@contextlib.contextmanager
def serve(folder: Path, latency_s: float) -> Iterator[str]:
    """The server of a folder, in a process of its own; yields its address."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        fd = listener.fileno()
        server = subprocess.Popen([sys.executable, __file__, str(fd), str(folder), str(latency_s)], pass_fds=[fd])
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.terminate()
            server.wait()


NGINX = """
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; keepalive_requests 1000000; client_max_body_size 0;
  client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2; fastcgi_temp_path {folder}/t3;
  uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5;
  upstream far {{ server {far}; keepalive 128; }}
  server {{
    listen 127.0.0.1:{port} ssl backlog=512;
    ssl_certificate {folder}/server.pem; ssl_certificate_key {folder}/key.pem;
    location / {{
      proxy_pass http://far; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_set_header Host $host;
      proxy_buffering off; proxy_request_buffering off;
    }}
  }}
}}
"""


@contextlib.contextmanager
def serve_tls(upstream: str, certificates: Path) -> Iterator[str]:
    """Nginx before the far server; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = certificates / f"nginx{port}.conf"
    config.write_text(NGINX.format(folder=certificates, far=upstream.removeprefix("http://"), port=port))
    server = subprocess.Popen(["nginx", "-c", str(config)])
    try:
        while server.poll() is None:
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            time.sleep(0.05)
        else:
            raise SystemExit("nginx does not start")
        yield f"https://localhost:{port}"
    finally:
        server.terminate()  # nginx ends its worker
        server.wait()


def on_a_line(gbit: float) -> None:
    """Run this script again in a network namespace whose loopback has a token bucket; nothing, if it runs there already.

    One bucket for all connections: a limit per connection is no limit. Needs root, and `ip` and `tc` of iproute2.
    """
    if not gbit or os.environ.get("SAEV_STORE_GBIT") == str(gbit):
        return
    script = 'ip link set lo up && tc qdisc add dev lo root tbf rate "$0"gbit burst 2mb limit 64mb && exec "$@"'
    command = ["unshare", "--net", "bash", "-c", script, str(gbit), sys.executable, *sys.argv]
    os.execvpe("unshare", command, {**os.environ, "SAEV_STORE_GBIT": str(gbit)})


if __name__ == "__main__":
    Server(Path(sys.argv[2]), float(sys.argv[3])).serve(socket.socket(fileno=int(sys.argv[1])))
