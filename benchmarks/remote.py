"""How fast ranges come from, and uploads go to, a bucket on this machine, against bare obstore and plain s3fs.

python benchmarks/remote.py [--mib 256] [--rounds 5] [--json]

The server is a process of its own that answers from memory, with and without 30 ms before the first byte. Needs
`saev-store[s3,fast]`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from datetime import timedelta

from _common import Line, report

from saev_store.transport import open_transport

IN_FLIGHT = 64
OBJECT_BYTES = 64 << 20


class Server(asyncio.Protocol):
    """As much of S3 as the clients here need: ranges of one object from memory, uploads that are thrown away."""

    content = memoryview(bytes(range(256)) * (OBJECT_BYTES // 256))
    latency_s = 0.0

    def connection_made(self, transport) -> None:
        self.transport, self.head, self.body_left, self.buffer = transport, "", 0, bytearray()
        transport.set_write_buffer_limits(high=1 << 27)

    def data_received(self, data: bytes) -> None:
        while data or (self.head and not self.body_left):
            if not self.head:
                self.buffer += data
                end = self.buffer.find(b"\r\n\r\n")
                if end < 0:
                    return
                self.head, data = self.buffer[:end].decode("latin-1"), bytes(self.buffer[end + 4 :])
                self.buffer.clear()
                self.body_left = int(self._header("content-length") or 0)
            taken = min(len(data), self.body_left)
            self.body_left, data = self.body_left - taken, data[taken:]
            if self.body_left:
                return
            head, self.head = self.head, ""
            loop = asyncio.get_running_loop()
            loop.call_later(self.latency_s, self.answer, head) if self.latency_s else self.answer(head)

    def _header(self, name: str, head: str | None = None) -> str | None:
        for line in (head or self.head).split("\r\n")[1:]:
            if line.lower().startswith(f"{name}:"):
                return line.partition(":")[2].strip()
        return None

    def answer(self, head: str) -> None:
        method, path = head.split(" ", 2)[:2]
        body, extra, status = memoryview(b""), "", "200 OK"
        if method in {"GET", "HEAD"}:
            start, end, wanted = 0, OBJECT_BYTES, self._header("range", head)
            if wanted:
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                start, end = int(first), min(int(last or OBJECT_BYTES) + 1, OBJECT_BYTES)
                status, extra = "206 Partial Content", f"Content-Range: bytes {start}-{end - 1}/{OBJECT_BYTES}\r\n"
            body = self.content[start:end]
        elif method == "POST" and "uploads" in path:
            body = memoryview(
                b"<InitiateMultipartUploadResult><Bucket>b</Bucket><Key>k</Key><UploadId>u</UploadId></InitiateMultipartUploadResult>"
            )
        elif method == "POST":
            body = memoryview(b'<CompleteMultipartUploadResult><ETag>"e"</ETag></CompleteMultipartUploadResult>')
        self.transport.write(
            f'HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nETag: "e"\r\n{extra}'
            "Last-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n\r\n".encode()
        )
        if method != "HEAD":
            self.transport.write(body)


def serve(port: int, latency_s: float) -> None:
    Server.latency_s = latency_s

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", port, backlog=512)
        await server.serve_forever()

    asyncio.run(run())


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def race(runs: dict[str, Callable[[], object]], nbytes: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Median (MB/s, CPU seconds per GB) of each, run in turn after one round that is not counted."""
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            cpu, start = cpu_s(), time.perf_counter()
            run()
            took_s = time.perf_counter() - start
            seen[name].append((nbytes / took_s / 1e6, (cpu_s() - cpu) / nbytes * 1e9))
    return {
        name: tuple(statistics.median(column) for column in zip(*pairs[1:], strict=True))
        for name, pairs in seen.items()
    }


def compare(endpoint: str, latency: str, nbytes: int, rounds: int) -> tuple[list[Line], dict[str, object]]:
    import obstore
    import s3fs
    from obstore.store import S3Store

    store = S3Store(
        "b", access_key_id="k", secret_access_key="s", endpoint=endpoint, region="us-east-1",
        client_options={"allow_http": True, "timeout": timedelta(seconds=120), "pool_max_idle_per_host": str(IN_FLIGHT)},
    )  # fmt: skip
    options = {"key": "k", "secret": "s", "endpoint_url": endpoint}
    transport = open_transport("s3://b", options, engine="obstore")
    plain = s3fs.S3FileSystem(**options)
    lines: list[Line] = []
    facts: dict[str, object] = {}
    for size in (8 << 20, 1 << 20):
        n = nbytes // size
        starts = [(7919 * 4096 * i) % (OBJECT_BYTES - size) for i in range(n)]
        ends = [start + size for start in starts]

        async def bare(starts: list[int] = starts, ends: list[int] = ends) -> None:
            slots = asyncio.Semaphore(IN_FLIGHT)

            async def one(start: int, end: int) -> object:
                async with slots:
                    return await (await obstore.get_async(store, "k", options={"range": (start, end)})).bytes_async()

            await asyncio.gather(*(one(start, end) for start, end in zip(starts, ends, strict=True)))

        found = race(
            {
                "ours": lambda starts=starts, ends=ends: transport.get_ranges("k", starts=starts, ends=ends),
                "bare obstore": lambda bare=bare: asyncio.run(bare()),
                "plain s3fs": lambda starts=starts, ends=ends: plain.cat_ranges(["b/k"] * len(starts), starts, ends),
            },
            n * size,
            rounds,
        )
        for against, goal in (("bare obstore", ">= 0.9"), ("plain s3fs", ">= 2")):
            ours, theirs = found["ours"][0], found[against][0]
            lines.append(
                Line(f"{n} ranges of {size >> 20} MiB, {latency}", ours, theirs, "MB/s", against, goal, ours / theirs)
            )
        facts |= {f"CPU s/GB {name} {size >> 20} MiB {latency}": round(value[1], 2) for name, value in found.items()}
    data = os.urandom(nbytes)  # zeros would be one page of memory, which nobody has to fetch

    def upload() -> None:
        sink = transport.open_sink("k", used_nbytes=nbytes, file_nbytes=nbytes, resume=True)
        try:
            for start in range(0, nbytes, 8 << 20):
                sink.write(start, [memoryview(data)[start : start + (8 << 20)]])
            sink.commit()
        except OSError as error:  # the server keeps nothing, so the length afterwards is another
            if "bytes arrived of" not in str(error):
                raise

    found = race(
        {
            "ours": upload,
            "bare": lambda: obstore.put(store, "k", data, use_multipart=True, chunk_size=8 << 20, max_concurrency=8),
        },
        nbytes,
        rounds,
    )
    ours, theirs = found["ours"][0], found["bare"][0]
    lines.append(Line(f"upload, {latency}", ours, theirs, "MB/s", "bare multipart upload", ">= 0.9", ours / theirs))
    facts |= {f"CPU s/GB upload {name} {latency}": round(value[1], 2) for name, value in found.items()}
    return lines, facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", nargs=2, metavar=("PORT", "LATENCY_S"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(int(options.serve[0]), float(options.serve[1]))
        return
    lines: list[Line] = []
    facts: dict[str, object] = {}
    for latency_s in (0.0, 0.03):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        server = subprocess.Popen([sys.executable, __file__, "--serve", str(port), str(latency_s)])
        try:
            for _ in range(100):
                try:
                    urllib.request.urlopen(
                        urllib.request.Request(f"http://127.0.0.1:{port}/b/k", method="HEAD"), timeout=5
                    )
                    break
                except OSError:
                    time.sleep(0.1)
            more, about = compare(
                f"http://127.0.0.1:{port}", f"{latency_s * 1000:.0f} ms", options.mib << 20, options.rounds
            )
            lines += more
            facts |= about
        finally:
            server.kill()
            server.wait()
    report(lines, facts, as_json=options.json)


if __name__ == "__main__":
    main()
