"""What sharing a loader saves: rows per second of several loops that share one, against as many loops with loaders of their own.

    python benchmarks/share.py [--gib 8] [--consumers 4] [--rounds 5] [--one-order] [--folder DIR] [--json]

One float32 store of one layer, written with NumPy alone. Each loop looks at one number of each batch, so reading decides. The kernel is
asked to forget the files before each pass, and loaders drop the pages that they have read, as they do of stores much larger than
memory: else the first of the loops would read for the others. For the same reason loops with loaders of their own have orders of their own, as
jobs that begin at different times have; `--one-order` gives them the same. Together they have the same memory for windows as the one.

The second line is of as many processes that begin together, with one order and pages that are kept: the first to need a page reads it for
all. It is compared with one such process.

Needs torch, and a folder on the disk that is measured.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path

from _common import Line, forget, make_store, report, seconds

from saev_store import ShardStore
from saev_store.torch import Consumer, ExampleBatch, StoreLoader

BATCH = 16_384
WINDOW_BYTES = 1 << 30


def loader_of(folder: Path, window_bytes: int, seed: int = 0) -> StoreLoader:
    return StoreLoader(folder, layer=11, batch_size=BATCH, window_bytes=window_bytes, seed=seed)


def rows_of(batches: Iterable[ExampleBatch]) -> int:
    """Rows of an epoch, of which each batch was looked at."""
    return sum(len(batch["act"]) for batch in batches if float(batch["act"][0, 0]) < 1e9)


def shared(folder: Path, n: int) -> int:
    """Rows that all loops together get out of one loader."""

    def loop(consumer: Consumer) -> int:
        with consumer:
            return rows_of(consumer)

    with loader_of(folder, WINDOW_BYTES).share(n) as loops, ThreadPoolExecutor(n) as pool:
        return sum(pool.map(loop, loops))


def alone(folder: Path, n: int, *, one_order: bool) -> int:
    """Rows that all loops together get out of loaders of their own."""
    loaders = [loader_of(folder, WINDOW_BYTES // n, 0 if one_order else number) for number in range(n)]
    with ThreadPoolExecutor(n) as pool:
        found = sum(pool.map(rows_of, loaders))
    for loader in loaders:
        loader.close()
    return found


def in_process(folder: Path, window_bytes: int, start: Barrier) -> None:
    """An epoch from the moment on when all processes are ready."""
    with loader_of(folder, window_bytes) as loader:
        start.wait()
        rows_of(loader)


def seconds_of_processes(folder: Path, n: int) -> float:
    """How long so many processes take for an epoch each."""
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(n + 1)
    started = [context.Process(target=in_process, args=(folder, WINDOW_BYTES // n, start)) for _ in range(n)]
    for process in started:
        process.start()
    start.wait()
    return seconds(lambda: [process.join() for process in started])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=8.0, help="size of the store")
    parser.add_argument("--consumers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one-order", action="store_true", help="the same order for loaders of their own")
    parser.add_argument(
        "--folder", default=None, help="where to make the store (default: the system's temporary folder)"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    root, n = Path(tempfile.mkdtemp(dir=options.folder)), options.consumers
    try:
        folder, _ = make_store(root, n_bytes=int(options.gib * 2**30), n_shards=4)
        rates: tuple[list[float], list[float]] = ([], [])
        found: list[int] = []
        for number in range(options.rounds):
            works = (0, shared), (1, partial(alone, one_order=options.one_order))
            for i, work in works if number % 2 else reversed(works):
                forget(folder)
                found = []
                took = seconds(lambda work=work, found=found: found.append(work(folder, n)))
                rates[i].append(found[0] / took)
        ours, theirs = (statistics.median(each) / 1e3 for each in rates)
        what = f"rows of {n} loops that share a loader, cold disk"
        lines = [Line(what, ours, theirs, "1000/s", f"{n} loaders", ">= 3.5", ours / theirs)]
        taken: dict[int, list[float]] = {1: [], n: []}
        for _ in range(options.rounds):
            for count, times in taken.items():
                forget(folder)
                times.append(seconds_of_processes(folder, count))
        rows = found[0] / n / 1e3
        one, several = (count * rows / statistics.median(times) for count, times in taken.items())
        lines.append(Line(f"rows of {n} processes, cold disk", several, one, "1000/s", "1 process", "", several / one))
        report(lines, {"shape": ShardStore.open(folder).shape, "cores": os.cpu_count()}, as_json=options.json)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
