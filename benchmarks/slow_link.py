"""How long a loader takes to its first batches over a slow link, against the time that their bytes take.

    python benchmarks/slow_link.py [--mb-per-s 30] [--mib 900] [--batches 8] [--json]

The store lies in memory. All reads share one line, byte by byte, as they would on a network; nothing else is simulated. The limit is
what `explain()` says that the first batch waits for, divided by the speed of the line.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from _common import Line, make_store, report

from saev_store import ShardStore
from saev_store.loaders import OrderedLoader, ShuffledLoader
from saev_store.loaders._base import Loader
from saev_store.transport import Buffer, open_transport
from saev_store.transport.limit import Wrapper

BATCH, N_THREADS, WINDOW_BYTES, STEP_BYTES = 4096, 64, 512 << 20, 64 << 10


def slow_line(bytes_per_s: float) -> type[Wrapper]:
    """A transport whose reads share a line. Each call makes a line: reads that a closed loader left behind are not on the next one."""
    line = threading.Lock()

    def take(nbytes: int) -> None:
        while nbytes > 0:
            with line:
                time.sleep(min(nbytes, STEP_BYTES) / bytes_per_s)
            nbytes -= STEP_BYTES

    class SlowLine(Wrapper):
        def readinto(self, path: str, *, starts: Sequence[int], buffers: Sequence[memoryview]) -> None:
            take(sum(buffer.nbytes for buffer in buffers))
            super().readinto(path, starts=starts, buffers=buffers)

        def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
            take(sum(ends) - sum(starts))
            return super().get_ranges(path, starts=starts, ends=ends)

    return SlowLine


def first_batches(loader: Loader, n: int) -> list[float]:
    """Seconds to each batch."""
    found = list[float]()
    with loader:
        start, batches = time.perf_counter(), iter(loader)
        for _ in range(n):
            next(batches)
            found.append(time.perf_counter() - start)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb-per-s", type=float, default=30.0)
    parser.add_argument("--mib", type=int, default=900)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    bytes_per_s = arguments.mb_per_s * 1e6
    ways = {
        "storage order": OrderedLoader,
        "shuffled": lambda rows, **options: ShuffledLoader(rows, window_bytes=WINDOW_BYTES, **options),
        "shuffled, early_start": lambda rows, **options: ShuffledLoader(
            rows, window_bytes=WINDOW_BYTES, early_start=True, **options
        ),
    }
    lines = list[Line]()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        folder, _ = make_store(Path(root), n_bytes=arguments.mib << 20, n_shards=4)
        for what, make in ways.items():
            rows = ShardStore.open(slow_line(bytes_per_s)(open_transport(folder, engine="pread"))).sel(tokens="content")
            loader = make(rows, batch_size=BATCH, medium="remote", n_threads=N_THREADS)
            limit_s = loader.explain().first_batch_bytes / bytes_per_s
            found = first_batches(loader, arguments.batches)
            lines.append(
                Line(f"{what}: first batch", found[0], limit_s, "s", "its bytes", "<= 1.2", found[0] / limit_s)
            )
            if not arguments.json:
                print(f"{what}: seconds to batches 0, 1, …:", *(f"{second:.1f}" for second in found))
    facts = {"MB/s": arguments.mb_per_s, "batch": f"{BATCH} x 768", "window": f"{WINDOW_BYTES >> 20} MiB"}
    report(lines, facts, as_json=arguments.json)


if __name__ == "__main__":
    main()
