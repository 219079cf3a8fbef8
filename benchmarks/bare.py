"""The bare peers: the simplest code that moves the same bytes. Frozen, so that a ratio means the same next year.

    python benchmarks/bare.py [--late 30] [--gbit 4] [--tls] [--mib 256] [--rounds 9] [--json]

A bucket on this machine (`_far_server.py`, a process of its own that shares the cores): ranges in memory of their own, ranges
that fill one memory, ranges that are dropped, one upload. Files in memory: a vector, rows, a scan, stat calls. `--late` answers so
many milliseconds late, `--gbit` puts client and server on one line of that speed, `--tls` puts nginx before the server.

Medians of rounds in which all runs take turns, after one round that is not counted; CPU is that of this process, without the
server's. Needs obstore; `--tls` also nginx and cryptography, `--gbit` root and iproute2.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from _far_server import on_a_line, serve, serve_tls

if TYPE_CHECKING:
    from obstore import Bytes
    from obstore.store import S3Store

IN_FLIGHT = 64
PART_BYTES = 8 << 20
SIZES = (8 << 20, 1 << 20, 256 << 10)
OBJECT_BYTES = 64 << 20
D_MODEL = 768


class Piece(NamedTuple):
    """A range of an object."""

    key: str
    start: int
    end: int


# -- the peers ------------------------------------------------------------------------------------------------------


def ranges(store: S3Store, pieces: Sequence[Piece], use: Callable[[int, Bytes, str | None], object]) -> None:
    """Get all pieces, `IN_FLIGHT` at a time; `use` takes each one's number, bytes and ETag."""
    import obstore

    async def everything() -> None:
        slots = asyncio.Semaphore(IN_FLIGHT)

        async def one(number: int, piece: Piece) -> None:
            async with slots:
                answer = await obstore.get_async(store, piece.key, options={"range": (piece.start, piece.end)})
                use(number, await answer.bytes_async(), answer.meta["e_tag"])

        await asyncio.gather(*(one(*numbered) for numbered in enumerate(pieces)))

    asyncio.run(everything())


def keep(store: S3Store, pieces: Sequence[Piece]) -> list[object]:
    """All pieces and their ETags, each in memory of its own."""
    found: list[object] = [None] * len(pieces)

    def use(number: int, data: Bytes, e_tag: str | None) -> None:
        found[number] = data, e_tag

    ranges(store, pieces, use)
    return found


def drop(store: S3Store, pieces: Sequence[Piece]) -> None:
    """Read all pieces and drop each: what a loader reads, without its window and its batches."""
    ranges(store, pieces, lambda *_: None)


def fill(store: S3Store, pieces: Sequence[Piece], memory: memoryview) -> None:
    """Copy all pieces into one memory, in their order."""
    ends = np.cumsum([piece.end - piece.start for piece in pieces]).tolist()

    def use(number: int, data: Bytes, _: str | None) -> None:
        memory[ends[number] - len(data) : ends[number]] = memoryview(data)

    ranges(store, pieces, use)


def upload(store: S3Store, data: np.ndarray) -> None:
    import obstore

    obstore.put(store, "u", data, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=8)


def open_map(path: Path) -> np.ndarray:
    """A file of float32 vectors, mapped."""
    return np.memmap(path, "<f4", "r").reshape(-1, D_MODEL)


def copy_vectors(vectors: np.ndarray, numbers: Sequence[int]) -> None:
    """One vector after the other, each as a copy."""
    for number in numbers:
        np.array(vectors[number])


def gather(maps: Sequence[np.ndarray], numbers: np.ndarray) -> np.ndarray:
    """Vectors by their numbers in equally long maps, in one array."""
    if len(maps) == 1:
        return np.asarray(maps[0][numbers])
    out = np.empty((len(numbers), D_MODEL), np.float32)
    which, local = np.divmod(numbers, len(maps[0]))
    for i, vectors in enumerate(maps):
        here = np.flatnonzero(which == i)
        out[here] = vectors[local[here]]
    return out


def scan(paths: Sequence[Path], memory: memoryview) -> None:
    """Read files from end to end through one memory."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        at = 0
        while n := os.preadv(fd, [memory], at):
            at += n
        os.close(fd)


def stats(documents: Sequence[Path], files: Sequence[str]) -> None:
    """What opening a store cannot do without: read its documents, ask each shard for its size."""
    for path in documents:
        path.read_bytes()
    for name in files:
        os.stat(name)


# -- measuring ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rate:
    """Medians of wall time and of this process's CPU time; the spread is (longest - shortest) / median wall time."""

    nbytes: int
    wall_s: float
    cpu_s: float
    spread: float

    @property
    def mb_s(self) -> float:
        return self.nbytes / self.wall_s / 1e6

    @property
    def cpu_s_gb(self) -> float:
        return self.cpu_s / self.nbytes * 1e9


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def race(runs: Mapping[str, Callable[[], object]], nbytes: int, rounds: int) -> dict[str, Rate]:
    """Every run in turn, forwards and backwards, after one round that is not counted."""
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name in list(runs)[:: 1 if number % 2 else -1]:
            gc.collect()
            cpu, start = cpu_s(), time.perf_counter()
            runs[name]()
            took = time.perf_counter() - start, cpu_s() - cpu
            if number:
                seen[name].append(took)
    found: dict[str, Rate] = {}
    for name, pairs in seen.items():
        wall, cpu = zip(*pairs, strict=True)
        middle = statistics.median(wall)
        found[name] = Rate(nbytes, middle, statistics.median(cpu), (max(wall) - min(wall)) / middle)
    return found


class Bucket(NamedTuple):
    """The bucket `b`: obstore's client, and the options with which fsspec reaches the same."""

    store: S3Store
    options: dict[str, object]


@contextlib.contextmanager
def bucket(folder: Path, line: argparse.Namespace) -> Iterator[Bucket]:
    """A bucket `b` whose objects are the files of `folder/b`, behind the line that the command asks for."""
    from obstore.store import S3Store

    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(serve(folder, line.late / 1000))
        client: dict[str, object] = {
            "allow_http": True, "timeout": timedelta(seconds=120), "pool_max_idle_per_host": str(IN_FLIGHT),
        }  # fmt: skip
        options: dict[str, object] = {"key": "k", "secret": "s"}
        if line.tls:
            sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
            from tls import make_certificates

            certificates = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            authority = Path(make_certificates(certificates).authority)
            endpoint = stack.enter_context(serve_tls(folder, endpoint, certificates, late=line.late > 0))
            client["root_certificate"] = authority.read_text()
            options["client_kwargs"] = {"verify": str(authority)}
        store = S3Store(
            "b", access_key_id="k", secret_access_key="s", endpoint=endpoint, region="us-east-1", client_options=client
        )
        yield Bucket(store, {**options, "endpoint_url": endpoint})


def line_arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that this benchmark and `transports.py` share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mib", type=int, default=256, help="what ranges read and uploads move; one memory is twice as large"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--late", type=float, default=0, metavar="MS", help="latency of each answer")
    parser.add_argument("--gbit", type=float, default=0, help="a line of so many Gbit/s for all connections together")
    parser.add_argument("--tls", action="store_true", help="through nginx, with a certificate made for the run")
    parser.add_argument("--json", action="store_true")
    return parser


def scattered(nbytes: int, size: int) -> list[Piece]:
    """Ranges of the object `k` that together have `nbytes`."""
    starts = [(7919 * 4096 * i) % (OBJECT_BYTES - size) for i in range(nbytes // size)]
    return [Piece("k", start, start + size) for start in starts]


def whole(files: Mapping[str, int], size: int = PART_BYTES) -> list[Piece]:
    """Ranges that cover objects of these sizes."""
    return [
        Piece(key, start, min(start + size, nbytes))
        for key, nbytes in files.items()
        for start in range(0, nbytes, size)
    ]


def main() -> None:
    options = line_arguments(__doc__).parse_args()
    on_a_line(options.gbit)
    nbytes, found = options.mib << 20, dict[str, Rate]()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as root:
        (folder := Path(root, "b")).mkdir()
        rng = np.random.default_rng(17)
        rng.standard_normal(OBJECT_BYTES // 4, np.float32).tofile(folder / "k")
        for name in "0123":
            rng.standard_normal((OBJECT_BYTES // 4 // D_MODEL, D_MODEL), np.float32).tofile(folder / name)
        shards = [folder / name for name in "0123"]
        sizes = {path.name: path.stat().st_size for path in shards}
        everything = whole(sizes) * max(1, 2 * nbytes // sum(sizes.values()))
        memory = memoryview(np.ones(sum(piece.end - piece.start for piece in everything), np.uint8))
        with bucket(Path(root), options) as place:
            for size in SIZES:
                pieces = scattered(nbytes, size)
                name = f"ranges of {size >> 10} KiB"
                found |= race({name: lambda pieces=pieces: keep(place.store, pieces)}, nbytes, options.rounds)
            runs = {
                "ranges that fill one memory": lambda: fill(place.store, everything, memory),
                "ranges of 8192 KiB, dropped": lambda: drop(place.store, everything),
            }
            found |= race(runs, len(memory), options.rounds)
            data = np.frombuffer(os.urandom(nbytes), np.uint8)
            found |= race({"upload": lambda: upload(place.store, data)}, nbytes, options.rounds)
        maps, numbers = [open_map(path) for path in shards], rng.integers(0, 4 * len(open_map(shards[0])), 16_384)
        one, size = numbers % len(maps[0]), len(numbers) * D_MODEL * 4
        found |= race({"one vector, 16,384 times": lambda: copy_vectors(maps[0], one.tolist())}, size, options.rounds)
        found |= race({"16,384 rows of one map": lambda: gather(maps[:1], one)}, size, options.rounds)
        found |= race({"16,384 rows of 4 maps": lambda: gather(maps, numbers)}, size, options.rounds)
        buffer = memoryview(np.ones(16 * 197 * D_MODEL * 4, np.uint8))
        found |= race({"scan": lambda: scan(shards, buffer)}, sum(sizes.values()), options.rounds)
    if options.json:
        print(json.dumps({name: asdict(rate) for name, rate in found.items()}))
        return
    print(f"{options.late:g} ms, line {options.gbit or 'loopback'}, TLS {options.tls}, load {os.getloadavg()[0]:.1f}")
    print(f"{'what':30} {'MB/s':>7} {'CPU s/GB':>9} {'spread':>7}")
    for name, rate in found.items():
        print(f"{name:30} {rate.mb_s:7.0f} {rate.cpu_s_gb:9.2f} {rate.spread:7.0%}")


if __name__ == "__main__":
    main()
