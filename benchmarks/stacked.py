"""What rows of several layers cost: MB/s of shuffled batches with three layers in a row, against rows of one layer.

    python benchmarks/stacked.py [--gib 3] [--rounds 7] [--folder DIR] [--json]

One float32 store of three layers, written with NumPy alone. Batches of both kinds have the same number of vectors, both loaders the same
window in bytes, and they take turns in one process. Rows of one layer leave two thirds of the store unread; rows of three read
all of it. For the lines of a cold disk the kernel is asked to forget the files before each pass.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from pathlib import Path

from _common import Line, forget, make_store, report, seconds

from saev_store import ShardStore
from saev_store.loaders import Loader

LAYERS = (3, 7, 11)
#: Vectors of a batch; a multiple of the loader's eight partitions, with three layers and with one.
BATCH = 16_368
#: Much less than the store, as in real life: where a window holds everything, all is read before the first batch.
WINDOW_BYTES = 256 << 20


def bytes_per_s(folder: Path, *, stacked: bool, cold: bool) -> float:
    """Of shuffled epochs through one loader, which is made anew because it looks at what files lie on.

    What is cached is read twice before, so that the first touch of memory does not count.
    """
    if cold:
        forget(folder)
    rows = ShardStore.open(folder).sel(layer=LAYERS if stacked else LAYERS[2], tokens="content", stack_layers=stacked)
    times = list[float]()
    with Loader(
        rows, batch_size=BATCH // (len(LAYERS) if stacked else 1), seed=17, window_bytes=WINDOW_BYTES
    ) as loader:
        for _ in range(2 if cold else 6):
            if cold:
                forget(folder)
            times.append(seconds(lambda: sum(len(batch["act"]) for batch in loader)))
    counted = times if cold else times[2:]
    return rows.nbytes * len(counted) / sum(counted)


def compared(folder: Path, rounds: int, *, cold: bool) -> Line:
    rates: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for i in (0, 1) if number % 2 else (1, 0):
            rates[i].append(bytes_per_s(folder, stacked=i == 0, cold=cold))
    ours, theirs = (statistics.median(each) / 1e6 for each in rates)
    where = "cold disk" if cold else "page cache"
    return Line(f"shuffled rows of three layers, {where}", ours, theirs, "MB/s", "rows of one", ">= 0.9", ours / theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=3.0, help="size of the store")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--folder", default=None, help="where to make the store (default: the system's temporary folder)"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        n_bytes = int(options.gib * 2**30)
        folder, _ = make_store(root, n_bytes=n_bytes, n_shards=4, layers=LAYERS)
        # The cold lines come first: pages of a live map cannot be dropped.
        lines = [compared(folder, options.rounds, cold=cold) for cold in (True, False)]
        facts = {"shape": ShardStore.open(folder).shape, "bytes": n_bytes, "cores": os.cpu_count()}
        report(lines, facts, as_json=options.json)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
