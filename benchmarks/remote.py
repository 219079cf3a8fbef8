"""How fast ranges and batches come from, and uploads go to, a bucket on this machine, against bare obstore and plain s3fs.

    python benchmarks/remote.py [--mib 256] [--rounds 9] [--only WORD …] [--tls] [--json]

The server (`_far_server.py`) is a process of its own that shares the cores with the client; it sends files by `sendfile` and
drops uploads in the kernel, which is as fast as nginx or faster. It answers at once, and 30 ms late. With `--tls` nginx
stands before it with a certificate that is made for the run, and which every client trusts; it sends files itself where the
answer is not to be late. Beside each rate stand the CPU seconds per GB of the client's process, the server's not included:
what remains when the server is another machine. With `--tls` the connections that each epoch of the loader opened follow.

What is raced, in turn, medians of the rounds after one that is not counted:

* ranges: 64 in flight, each in memory of its own. The bare loop learns every object's version (`get_async`), as we must to
  tell a replaced object; one that does not want to know (`get_range_async`) stands beside it, without a goal.
* shuffled loader: an epoch, in batches of 4,096, of a store twice as large as the window, against our own ranges of
  8 MiB of the same files. Beside it what a loader that gathers batches from a window cannot do without: requests of the size of its extents, a
  copy into the window, a gather of as many rows, all at once and in no order.
* upload: parts of 8 MiB, eight in flight. Our sink takes memory that is lent to it, as the writer does; "copying" is the same
  with memory that the caller wants back. The writer copies what it is given, makes block digests and receipts, and publishes.

Needs `saev-store[s3,obstore]`; `--tls` also nginx, and cryptography.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import resource
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
from _common import make_store

from saev_store import ShardStore, new_metadata
from saev_store.loaders import ShuffledLoader
from saev_store.transport import open_transport

IN_FLIGHT = 64
PART_BYTES = 8 << 20
OBJECT_BYTES = 64 << 20
BATCH_ROWS = 4096


@dataclass(frozen=True)
class Rate:
    """Median MB/s and CPU seconds of this process for each GB; the spread is (highest - lowest) / median MB/s."""

    mb_s: float
    cpu_s_gb: float
    spread: float


@dataclass(frozen=True)
class Row:
    """One comparison."""

    what: str
    latency_ms: int
    ours: Rate
    against: str
    theirs: Rate
    goal: float | None
    connections: list[int] | None = None

    @property
    def ratio(self) -> float:
        return self.ours.mb_s / self.theirs.mb_s


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def race(runs: dict[str, Callable[[], object]], nbytes: int, rounds: int) -> dict[str, Rate]:
    """Every run in turn, forwards and backwards, after one round that is not counted."""
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name in list(runs)[:: 1 if number % 2 else -1]:
            gc.collect()
            cpu, start = cpu_s(), time.perf_counter()
            runs[name]()
            took_s = time.perf_counter() - start
            if number:
                seen[name].append((nbytes / took_s / 1e6, (cpu_s() - cpu) / nbytes * 1e9))
    found: dict[str, Rate] = {}
    for name, pairs in seen.items():
        rates, cpu = zip(*pairs, strict=True)
        middle = statistics.median(rates)
        found[name] = Rate(middle, statistics.median(cpu), (max(rates) - min(rates)) / middle)
    return found


class Place:
    """A bucket `b` of one server, and each client's way to it."""

    def __init__(self, endpoint: str, latency_ms: int, authority: Path | None = None) -> None:
        import s3fs
        from obstore.store import S3Store

        self.latency_ms, self._endpoint, self._authority = latency_ms, endpoint, authority
        trusted = {} if authority is None else {"verify": str(authority)}
        self.options = {"key": "k", "secret": "s", "endpoint_url": endpoint, "client_kwargs": trusted}
        root = {} if authority is None else {"root_certificate": authority.read_text()}
        self.store = S3Store(
            "b", access_key_id="k", secret_access_key="s", endpoint=endpoint, region="us-east-1",
            client_options={
                "allow_http": True, "timeout": timedelta(seconds=120), "pool_max_idle_per_host": str(IN_FLIGHT),
                **root,
            },
        )  # fmt: skip
        self.ours = open_transport("s3://b", self.options, engine="obstore")
        self.s3fs = s3fs.S3FileSystem(**self.options)

    def n_connections(self) -> int | None:
        """Connections that the server has accepted so far; None without TLS, where they are not counted."""
        if self._authority is None:
            return None
        context = ssl.create_default_context(cafile=self._authority)
        with urllib.request.urlopen(f"{self._endpoint}/connections", context=context) as answer:
            return int(answer.read().split()[7])


def bare(place: Place, key: str, starts: list[int], size: int, *, versions: bool) -> None:
    """The plain loop over obstore."""
    import obstore

    async def everything() -> None:
        slots = asyncio.Semaphore(IN_FLIGHT)

        async def one(start: int) -> object:
            async with slots:
                if not versions:
                    return await obstore.get_range_async(place.store, key, start=start, end=start + size)
                answer = await obstore.get_async(place.store, key, options={"range": (start, start + size)})
                return await answer.bytes_async()

        await asyncio.gather(*map(one, starts))  # no result: asyncio.run would make a text of it

    asyncio.run(everything())


def ranges(place: Place, nbytes: int, rounds: int) -> list[Row]:
    rows: list[Row] = []
    for size in (8 << 20, 1 << 20):
        n = nbytes // size
        starts = [(7919 * 4096 * i) % (OBJECT_BYTES - size) for i in range(n)]
        ends = [start + size for start in starts]
        found = race(
            {
                "ours": lambda starts=starts, ends=ends: place.ours.get_ranges("k", starts=starts, ends=ends),
                "bare obstore": lambda starts=starts, size=size: bare(place, "k", starts, size, versions=True),
                "bare, blind": lambda starts=starts, size=size: bare(place, "k", starts, size, versions=False),
                "plain s3fs": lambda starts=starts, ends=ends: place.s3fs.cat_ranges(
                    ["b/k"] * len(starts), starts, ends
                ),
            },
            n * size,
            rounds,
        )
        for against, goal in (("bare obstore", 0.9), ("bare, blind", None), ("plain s3fs", 2.0)):
            what = f"{n} ranges of {size >> 20} MiB"
            rows.append(Row(what, place.latency_ms, found["ours"], against, found[against], goal))
    return rows


def loader(place: Place, folder: Path, nbytes: int, rounds: int) -> list[Row]:
    store = ShardStore.open(f"s3://b/{folder.name}", storage_options=place.options, engine="obstore")
    layout = store.layout
    names = {path.name: path.stat().st_size for path in folder.glob("acts*.bin")}
    total = sum(names.values())

    def scan() -> None:
        transport = place.ours.at(folder.name)
        for name, size in names.items():
            starts = list(range(0, size, PART_BYTES))
            transport.get_ranges(name, starts=starts, ends=[min(start + PART_BYTES, size) for start in starts])

    shuffled = ShuffledLoader(store.sel(tokens="all"), batch_size=BATCH_ROWS, window_bytes=nbytes // 2)
    extent = shuffled.explain().extent_bytes
    window = np.zeros((nbytes // 2 // extent, extent // 4), np.float32)
    vectors = window.reshape(-1, layout.d_model)
    batches = np.zeros((4, BATCH_ROWS, layout.d_model), np.float32)
    picks = np.random.default_rng(17).integers(0, len(vectors), (16, BATCH_ROWS))

    def two_copies() -> None:
        """The loader's requests, each copied into a window, and as many rows gathered from it; no step waits for another."""
        transport, slots = place.ours.at(folder.name), itertools.cycle(window)
        with ThreadPoolExecutor(shuffled.n_threads) as pool:
            reads = [
                pool.submit(
                    transport.readinto,
                    name,
                    starts=[start],
                    buffers=[memoryview(slot)[: (min(start + extent, size) - start) // 4]],
                )
                for name, size in names.items()
                for start, slot in zip(range(0, size, extent), slots, strict=False)
            ]
            for number in range(total // batches[0].nbytes):
                np.take(vectors, picks[number % 16], axis=0, out=batches[number % 4], mode="clip")
            for read in reads:
                read.result()

    opened: list[int] = []

    def epoch() -> None:
        before = place.n_connections()
        n_rows = sum(len(batch["act"]) for batch in shuffled)
        after = place.n_connections()
        if before is not None and after is not None:
            opened.append(after - before - 1)  # without the one that asks
        if n_rows * layout.vector_nbytes != total:
            raise SystemExit(f"the epoch had {n_rows} rows")

    with shuffled:
        found = race({"ours": epoch, "ranges": scan, "two copies": two_copies}, total, rounds)
    return [
        Row(
            "shuffled loader",
            place.latency_ms,
            found["ours"],
            "our ranges, same files",
            found["ranges"],
            0.85 if opened else 0.6,
            opened[1:] or None,
        ),
        Row(
            "shuffled loader",
            place.latency_ms,
            found["ours"],
            "its requests, copied and gathered",
            found["two copies"],
            None,
        ),
        Row(
            "requests, copied and gathered", place.latency_ms, found["two copies"], "our ranges", found["ranges"], None
        ),
    ]


def uploads(place: Place, nbytes: int, rounds: int) -> list[Row]:
    import obstore

    data = np.frombuffer(os.urandom(nbytes), np.uint8)  # zeros would be one page of memory, which no read has to fetch
    view = memoryview(data)
    n_examples = nbytes // (197 * 768 * 4)
    acts = data[: n_examples * 197 * 768 * 4].view("<f4").reshape(n_examples, 1, 197, 768)
    attempts = iter(range(1 << 30))

    def sink(*, lent: bool) -> None:
        sink = place.ours.open_sink("u", used_nbytes=nbytes, file_nbytes=nbytes, resume=True)
        for start in range(0, nbytes, PART_BYTES):
            sink.write(start, [view[start : start + PART_BYTES]], (lambda: None) if lent else None)
        sink.commit()

    def writer() -> None:
        metadata = new_metadata(
            family="clip", ckpt=f"benchmark {next(attempts)}", layers=[11], content_tokens_per_example=196, cls_token=True,
            d_model=768, n_examples=n_examples, max_tokens_per_shard=n_examples * 197,
        )  # fmt: skip
        with ShardStore.create(
            f"s3://b/w{place.latency_ms}", metadata, storage_options=place.options, on_nonfinite="allow", progress=False
        ) as writer:
            for start in range(0, n_examples, 64):
                writer.append(acts[start : start + 64])

    def multipart() -> None:
        obstore.put(place.store, "u", data, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=8)

    found = race(
        {"sink": lambda: sink(lent=True), "copying": lambda: sink(lent=False), "writer": writer, "bare": multipart},
        nbytes,
        rounds,
    )
    return [
        Row(
            f"upload of {nbytes >> 20} MiB, {name}",
            place.latency_ms,
            found[name],
            "bare multipart",
            found["bare"],
            goal,
        )
        for name, goal in (("sink", 0.9), ("copying", None), ("writer", None))
    ]


PARTS = ("ranges", "loader", "uploads")


def serve(folder: Path, latency_s: float) -> tuple[subprocess.Popen[bytes], str]:
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        fd = listener.fileno()
        command = [
            sys.executable,
            str(Path(__file__).with_name("_far_server.py")),
            str(fd),
            str(folder),
            str(latency_s),
        ]
        return subprocess.Popen(command, pass_fds=[fd]), f"http://127.0.0.1:{listener.getsockname()[1]}"


NGINX = """
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000; client_max_body_size 0;
  client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2; fastcgi_temp_path {folder}/t3;
  uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5;
  upstream far {{ server {far}; keepalive 128; }}
  server {{
    listen 127.0.0.1:{port} ssl backlog=512; root {root};
    ssl_certificate {folder}/server.pem; ssl_certificate_key {folder}/key.pem;
    location = /connections {{ stub_status; }}
    location / {{ {files} }}
    location @far {{
      proxy_pass http://far; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_set_header Host $host;
      proxy_buffering off; proxy_request_buffering off;
    }}
  }}
}}
"""


def serve_tls(root: Path, upstream: str, certificates: Path, *, late: bool) -> tuple[subprocess.Popen[bytes], str]:
    """Nginx before the far server; it sends files itself where answers are not late."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    far = upstream.removeprefix("http://")
    files = "try_files /nothing @far;" if late else "try_files $uri @far;"
    config = certificates / f"nginx{port}.conf"
    config.write_text(NGINX.format(folder=certificates, far=far, port=port, root=root, files=files))
    server = subprocess.Popen(["nginx", "-c", str(config)])
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.05)
            if server.poll() is not None:
                raise SystemExit("nginx does not start") from None
        else:
            return server, f"https://localhost:{port}"


def show(rows: list[Row]) -> None:
    print(
        f"{'what':30} {'late':>5} {'MB/s':>6} {'theirs':>6} {'ratio':>6} {'goal':>7} {'CPU s/GB':>9} {'theirs':>6}  against"
    )
    for row in rows:
        goal = "" if row.goal is None else f">= {row.goal:g}"
        print(
            f"{row.what:30} {row.latency_ms:2} ms {row.ours.mb_s:6.0f} {row.theirs.mb_s:6.0f} {row.ratio:6.2f} {goal:>7} "
            f"{row.ours.cpu_s_gb:9.2f} {row.theirs.cpu_s_gb:6.2f}  {row.against}"
        )
        if row.connections is not None:
            print(f"{'':30} connections opened by each epoch: {', '.join(map(str, row.connections))}")
    print(
        f"largest spread of one rate: {max(max(row.ours.spread, row.theirs.spread) for row in rows):.0%} of its median"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mib", type=int, default=256, help="what ranges read; uploads move twice, the loader four times as much"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--late", nargs="*", type=int, choices=(0, 30), default=[0, 30], metavar="MS")
    parser.add_argument("--tls", action="store_true", help="through nginx, with a certificate made for the run")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    nbytes = options.mib << 20
    rows: list[Row] = []
    in_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=in_memory) as folder, tempfile.TemporaryDirectory() as certificates:
        authority = None
        if options.tls:
            sys.path.insert(0, str(Path(__file__).parent.parent / "tests/helpers"))
            from tls import make_certificates

            authority = Path(make_certificates(Path(certificates)).authority)
            os.chmod(folder, 0o755)  # nginx's worker is another user where root starts it
        bucket = Path(folder) / "b"
        bucket.mkdir()
        (bucket / "k").write_bytes(os.urandom(OBJECT_BYTES))
        store = Path(folder)
        if "loader" in options.only:
            store, _ = make_store(bucket, n_bytes=4 * nbytes, n_shards=4)
        for latency_ms in options.late:
            server, endpoint = serve(Path(folder), latency_ms / 1000)
            front: subprocess.Popen[bytes] | None = None
            try:
                if authority is not None:
                    front, endpoint = serve_tls(Path(folder), endpoint, Path(certificates), late=latency_ms > 0)
                place = Place(endpoint, latency_ms, authority)
                if "ranges" in options.only:
                    rows += ranges(place, nbytes, options.rounds)
                if "loader" in options.only:
                    rows += loader(place, store, 4 * nbytes, options.rounds)
                if "uploads" in options.only:
                    rows += uploads(place, 2 * nbytes, options.rounds)
            finally:
                for process in (front, server):
                    if process is not None:
                        process.terminate()  # nginx ends its worker
                        process.wait()
    if options.json:
        print(json.dumps([{**asdict(row), "ratio": row.ratio} for row in rows]))
    else:
        print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
        show(rows)


if __name__ == "__main__":
    main()
