"""What 16 bits save: shuffled float32 rows out of a bfloat16 store against those of the float32 store of the same numbers.

    python benchmarks/sixteen_bits.py [--gib 2] [--rounds 9] [--folder DIR] [--json]

Both stores are written with NumPy alone, and run in turn in one process. `--gib` is the size of the float32 store. For the line of
a cold disk the kernel is asked to forget the files before each pass.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
from _common import Line, forget, make_store, report, seconds

from saev_store import ShardStore
from saev_store.loaders import Loader

BATCH, LAYER = 16_384, 11
#: Much less than the stores, as in real life: where a window holds everything, all is read before the first batch.
WINDOW_BYTES = 256 << 20


def check_same(folder: Path, wide_folder: Path) -> None:
    """One store has the other's numbers, rounded."""
    picked = np.s_[::97, 0, ::31]
    found, wide = (ShardStore.open(each, engine="pread").read(picked, dtype="stored") for each in (folder, wide_folder))
    np.testing.assert_array_equal(found.view(np.uint16), wide.astype(ml_dtypes.bfloat16).view(np.uint16))


def rows_per_s(folder: Path, *, cold: bool) -> float:
    """Of shuffled epochs over all content tokens, through one loader, which is made anew because it looks at what files lie on.

    What is cached is read twice before, so that the first touch of memory, which costs more than all copies, does not count.
    """
    if cold:
        forget(folder)
    rows, times = ShardStore.open(folder).sel(layer=LAYER, tokens="content", dtype="float32"), list[float]()
    with Loader(rows, batch_size=BATCH, seed=17, window_bytes=WINDOW_BYTES) as loader:
        for _ in range(2 if cold else 6):
            if cold:
                forget(folder)
            times.append(seconds(lambda: sum(len(batch["act"]) for batch in loader)))
    counted = times if cold else times[2:]
    return len(rows) * len(counted) / sum(counted)


def shuffled(folder: Path, wide_folder: Path, rounds: int, *, cold: bool) -> Line:
    rates: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for i in (0, 1) if number % 2 else (1, 0):
            rates[i].append(rows_per_s((folder, wide_folder)[i], cold=cold))
    ours, theirs = (statistics.median(each) / 1e6 for each in rates)
    where, goal = ("cold disk", ">= 1.6") if cold else ("page cache", ">= 1.0")
    return Line(f"shuffled rows, {where}", ours, theirs, "Mrow/s", "the float32 store", goal, ours / theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the float32 store")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--folder", default=None, help="where to make the stores (default: the system's temporary folder)"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        n_bytes = int(options.gib * 2**30)
        folder, wide = (
            make_store(root, n_bytes=n_bytes, n_shards=4, dtype=dtype)[0] for dtype in ("bfloat16", "float32")
        )
        check_same(folder, wide)
        lines = [
            # Before anything is mapped: pages of a live map cannot be dropped.
            shuffled(folder, wide, options.rounds, cold=True),
            shuffled(folder, wide, options.rounds, cold=False),
        ]
        facts = {"shape": ShardStore.open(folder).shape, "float32 bytes": n_bytes, "cores": os.cpu_count()}
        report(lines, facts, as_json=options.json)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
