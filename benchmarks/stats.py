"""How fast a store's statistics are, against NumPy loops as one writes them by hand over `np.memmap`, in the same run.

    python benchmarks/stats.py [--gib 1.0] [--folder DIR] [--rounds 5] [--json]

`dask mean`: `store.as_dask().mean(...)` and a loop over shards that adds up sums in float64. `all statistics`:
`store.stats()` and a loop over examples that keeps sums, sums of squares, norms, extremes and counts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
from _common import Line, make_store, race, report

from saev_store import ShardStore
from saev_store.stats import STATISTICS


def shards(folder: Path, store: ShardStore) -> list[np.ndarray]:
    """Each shard as a memmap of its examples."""
    layout = store.layout
    paths = [folder / f"acts{n:06d}.bin" for n in range(layout.n_shards)]
    return [
        np.memmap(path, np.float32, "r", shape=(layout.examples_in(n), *layout.shape[1:]))
        for n, path in enumerate(paths)
    ]


def mean_loop(maps: list[np.ndarray], n_examples: int) -> np.ndarray:
    total = sum(part.sum(axis=(0, 3), dtype=np.float64) for part in maps)
    return total / (n_examples * maps[0].shape[3])


def stats_loop(maps: list[np.ndarray]) -> dict[str, np.ndarray]:
    shape = maps[0].shape[1:3]
    n_values = n_finite = n_zeros = n_saturated = n_subnormal = n_examples = 0
    limits = np.finfo(np.float32)
    sums, squares, norms = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    low, high = np.full(shape, np.inf), np.full(shape, -np.inf)
    for part in maps:
        for example in part:
            wide = example.astype(np.float64)
            energy = (wide * wide).sum(axis=-1)
            sums += wide.sum(axis=-1)
            squares += energy
            norms += np.sqrt(energy)
            np.minimum(low, example.min(axis=-1), out=low)
            np.maximum(high, example.max(axis=-1), out=high)
            n_finite = n_finite + np.isfinite(example).sum(axis=-1)
            n_zeros = n_zeros + (example == 0).sum(axis=-1)
            n_saturated = n_saturated + (np.abs(example) == limits.max).sum(axis=-1)
            n_subnormal = n_subnormal + ((example != 0) & (np.abs(example) < limits.tiny)).sum(axis=-1)
            n_values += example.shape[-1]
            n_examples += 1
    mean = sums / n_values
    return {
        "count": n_finite, "mean": mean, "std": np.sqrt(squares / n_values - mean**2), "mean_norm": norms / n_examples,
        "min": low, "max": high, "zero_fraction": n_zeros / n_values, "nonfinite_fraction": 1 - n_finite / n_values,
        "saturated_count": n_saturated, "subnormal_count": n_subnormal,
    }  # fmt: skip


def dask_mean(store: ShardStore, maps: list[np.ndarray], rounds: int) -> Line:
    def ours() -> np.ndarray:
        return store.as_dask().mean(axis=(0, 3), dtype=np.float64).compute()

    np.testing.assert_allclose(ours(), mean_loop(maps, len(store)), rtol=1e-9, atol=1e-12)
    fast, slow = race(ours, lambda: mean_loop(maps, len(store)), rounds)
    gib = store.nbytes / 2**30
    return Line("dask mean per layer and token", gib / fast, gib / slow, "GiB/s", "NumPy loop", ">= 1", slow / fast)


def all_statistics(store: ShardStore, maps: list[np.ndarray], rounds: int) -> Line:
    ours, theirs = store.stats(save=False), stats_loop(maps)
    for name in STATISTICS:
        np.testing.assert_allclose(getattr(ours, name), theirs[name], rtol=1e-6, atol=1e-9, err_msg=name)
    fast, slow = race(lambda: store.stats(save=False), lambda: stats_loop(maps), rounds)
    gib = store.nbytes / 2**30
    return Line("store.stats()", gib / fast, gib / slow, "GiB/s", "NumPy loop", ">= 1", slow / fast)


def one_worker(store: ShardStore, maps: list[np.ndarray], rounds: int) -> Line:
    import dask

    def ours() -> None:
        with dask.config.set(scheduler="synchronous"):
            store.stats(save=False)

    fast, slow = race(ours, lambda: stats_loop(maps), rounds)
    gib = store.nbytes / 2**30
    return Line("store.stats(), one thread", gib / fast, gib / slow, "GiB/s", "NumPy loop", "", slow / fast)


def peak_memory(store: ShardStore) -> Line:
    """What is allocated at once; mapped pages belong to the page cache."""
    tracemalloc.start()
    store.stats(save=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return Line(
        "store.stats(), peak memory", peak / 2**20, store.nbytes / 2**20, "MiB", "the store", "", peak / store.nbytes
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the store")
    parser.add_argument("--folder", default=None, help="where to make it (default: the system's temporary folder)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        folder, _ = make_store(root, n_bytes=int(options.gib * 2**30), n_shards=8, layers=(2, 5, 8, 11))
        store = ShardStore.open(folder)
        maps = shards(folder, store)
        lines = [
            dask_mean(store, maps, options.rounds),
            all_statistics(store, maps, options.rounds),
            one_worker(store, maps, options.rounds),
            peak_memory(store),
        ]
        report(lines, {"shape": store.shape, "bytes": store.nbytes, "cores": os.cpu_count()}, as_json=options.json)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
