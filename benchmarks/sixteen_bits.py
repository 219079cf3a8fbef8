"""What 16 bits save: a bfloat16 store against the float32 store of the same numbers, and against bare casts and writes.

    python benchmarks/sixteen_bits.py [--gib 2] [--rounds 9] [--folder DIR] [--json]

Both stores are written with NumPy alone, and both sides of a comparison run in turn in one process. Loaders give float32 from both
stores; "stored" is without the conversion. `--gib` is the size of the float32 store. For the lines of a cold disk the kernel is asked
to forget the files before each pass.
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
import writing
from _common import Line, forget, make_store, race, report, seconds

from saev_store import ShardStore
from saev_store.core.dtypes import ReadDtype
from saev_store.loaders import Loader

BATCH, LAYER, SCAN_EXAMPLES = 16_384, 11, 64
#: Much less than the stores, as in real life: where a window holds everything, all is read before the first batch.
WINDOW_BYTES = 256 << 20


def check_same(folder: Path, wide_folder: Path) -> None:
    """One store has the other's numbers, rounded."""
    picked = np.s_[::97, 0, ::31]
    found, wide = (ShardStore.open(each, engine="pread").read(picked, dtype="stored") for each in (folder, wide_folder))
    np.testing.assert_array_equal(found.view(np.uint16), wide.astype(ml_dtypes.bfloat16).view(np.uint16))


def rows_per_s(folder: Path, dtype: ReadDtype, *, cold: bool) -> float:
    """Of shuffled epochs over all content tokens, through one loader, which is made anew because it looks at what files lie on.

    What is cached is read twice before, so that the first touch of memory, which costs more than all copies, does not count.
    """
    if cold:
        forget(folder)
    rows, times = ShardStore.open(folder).sel(layer=LAYER, tokens="content", dtype=dtype), list[float]()
    with Loader(rows, batch_size=BATCH, seed=17, window_bytes=WINDOW_BYTES) as loader:
        for _ in range(2 if cold else 6):
            if cold:
                forget(folder)
            times.append(seconds(lambda: sum(len(batch["act"]) for batch in loader)))
    counted = times if cold else times[2:]
    return len(rows) * len(counted) / sum(counted)


def shuffled(folder: Path, wide_folder: Path, rounds: int, dtype: ReadDtype, *, cold: bool) -> Line:
    rates: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for i in (0, 1) if number % 2 else (1, 0):
            rates[i].append(rows_per_s((folder, wide_folder)[i], (dtype, "float32")[i], cold=cold))
    ours, theirs = (statistics.median(each) / 1e6 for each in rates)
    where, given = "cold disk" if cold else "page cache", "" if dtype == "float32" else ", stored dtype"
    goal = "" if given else ">= 1.6" if cold else ">= 1.0"
    return Line(f"shuffled rows, {where}{given}", ours, theirs, "Mrow/s", "the float32 store", goal, ours / theirs)


def full_scan(folder: Path, rounds: int) -> Line:
    """All vectors as float32, in pieces into the same memory; theirs from a bare map with the cast of `ml_dtypes`."""
    store = ShardStore.open(folder)
    layout, out = store.layout, np.empty((SCAN_EXAMPLES, *store.shape[1:]), dtype=np.float32)
    shards = [
        np.memmap(folder / f"acts{i:06d}.bin", np.uint16, "r", shape=(layout.examples_in(i), *layout.shape[1:])).view(
            ml_dtypes.bfloat16
        )
        for i in range(layout.n_shards)
    ]

    def ours() -> None:
        for start in range(0, len(store), SCAN_EXAMPLES):
            store.read(slice(start, start + SCAN_EXAMPLES), out=out[: min(SCAN_EXAMPLES, len(store) - start)])

    def theirs() -> None:
        for shard in shards:
            for start in range(0, len(shard), SCAN_EXAMPLES):
                some = shard[start : start + SCAN_EXAMPLES]
                np.copyto(out[: len(some)], some, casting="unsafe")

    a, b = race(ours, theirs, rounds)
    size = store.nbytes / 1e9
    return Line(
        "full scan to float32, page cache", size / a, size / b, "GB/s", "ml_dtypes' cast of a map", ">= 0.8", b / a
    )


def written(folder: str, gib: float, rounds: int, given: str) -> Line:
    """Batches of a dtype into a bfloat16 store; theirs is a plain write of the same bytes and fsync."""
    metadata = writing.metadata_for(gib, "bfloat16")
    batch = np.random.default_rng(0).normal(size=(writing.BATCH, *metadata.layout.shape[1:])).astype(np.float32)
    if given == "bfloat16":
        batch = batch.astype(ml_dtypes.bfloat16)
    ours, theirs = map(statistics.mean, writing.compared(folder, metadata, batch, rounds))
    size, goal = metadata.layout.nbytes / 1e9, ">= 0.9" if given == "bfloat16" else ""
    return Line(f"writing {given} batches", size / ours, size / theirs, "GB/s", "write + fsync", goal, theirs / ours)


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
            *(shuffled(folder, wide, options.rounds, dtype, cold=True) for dtype in ("float32", "stored")),
            *(shuffled(folder, wide, options.rounds, dtype, cold=False) for dtype in ("float32", "stored")),
            full_scan(folder, options.rounds),
            *(written(str(root), options.gib / 2, options.rounds, given) for given in ("bfloat16", "float32")),
        ]
        facts = {"shape": ShardStore.open(folder).shape, "float32 bytes": n_bytes, "cores": os.cpu_count()}
        report(lines, facts, as_json=options.json)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
