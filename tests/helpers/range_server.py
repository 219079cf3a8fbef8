"""A server of files by range that fails on purpose: what remote loaders meet."""

from __future__ import annotations

import contextlib
import http.server
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path


class FlakyServer(http.server.BaseHTTPRequestHandler):
    """Files by range; answers 503, or less than it promised, every now and then.

    Attributes:
        faults: "503" or "truncated" now and then; "busy" until `counter` is above `n_busy`; "stalled" in the middle of a body.
        n_stalled: Answers that stalled, up to `most_stalled`.
        byte_s: Seconds between two bytes.
        n_left: Of these, how many clients have gone.
    """

    root, faults, counter, n_busy, n_stalled, n_left = "", "", 0, 0, 0, 0
    most_stalled, byte_s = 1 << 30, 0.0
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes: the second would wait for 40 ms

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        cls = type(self)
        cls.counter += 1
        path = os.path.join(self.root, os.path.basename(self.path.partition("?")[0]))
        if not os.path.exists(path):
            self.send_error(404)
            return
        if cls.faults == "busy" and cls.counter <= cls.n_busy:
            self.send_error(503)
            return
        if cls.faults == "503" and body and cls.counter % 5 == 0:
            self.send_error(503)
            return
        with open(path, "rb") as file:
            data = file.read()
        size, asked = len(data), self.headers.get("Range")
        if asked:
            start, end = asked.removeprefix("bytes=").split("-")
            data = data[int(start) : int(end) + 1 if end else size]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{int(start) + len(data) - 1}/{size}")
        else:
            self.send_response(200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body and cls.faults == "truncated" and cls.counter % 7 == 0:
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
        elif cls.faults == "stalled" and cls.n_stalled < cls.most_stalled:
            self.wfile.write(data[: len(data) // 2 if body else 0])
            cls.n_stalled += 1
            with contextlib.suppress(OSError):
                self.connection.recv(1)  # nothing, once the client has gone
            cls.n_left += 1
            self.close_connection = True
        elif body and cls.byte_s:
            for number in range(len(data)):
                time.sleep(cls.byte_s)
                self.wfile.write(data[number : number + 1])
        elif body:
            self.wfile.write(data)

    def log_message(self, *args):
        pass


class RangeServer(http.server.ThreadingHTTPServer):
    # The system drops connections beyond it, and each is tried again after 1, 3, 7, … seconds. The default is 5.
    request_queue_size = 256


@contextlib.contextmanager
def serving(folder: Path, *, port: int = 0) -> Iterator[tuple[str, type[FlakyServer]]]:
    """The address of a folder, and the class whose `faults` say how it fails."""
    handler = type("Handler", (FlakyServer,), {"root": str(folder)})
    server = RangeServer(("127.0.0.1", port), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/{folder.name}", handler
    finally:
        server.shutdown()
        server.server_close()
