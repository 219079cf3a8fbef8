"""How fast a local store opens and reads, against bare NumPy and bare system calls on the same files.

python benchmarks/reading.py [--gib 1.0] [--folder DIR] [--rounds 9] [--json]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from _common import Line, forget, make_store, race, report, seconds

from saev_store import ShardStore

SCAN_EXAMPLES = 16


def bare_maps(folder: Path, store: ShardStore) -> list[np.memmap]:
    layout = store.layout
    return [
        np.memmap(folder / f"acts{i:06d}.bin", "<f4", "r", shape=(layout.examples_in(i), *layout.shape[1:]))
        for i in range(layout.n_shards)
    ]


def one_vector(store: ShardStore, maps: list[np.memmap], rounds: int) -> Line:
    capacity, (_, n_layers, n_tokens, _) = store.layout.examples_per_shard, store.shape
    keys = [(i * 7 % capacity, i % n_layers, i * 31 % n_tokens) for i in range(20_000)]
    bare = maps[0]
    ours, theirs = race(lambda: [store[key] for key in keys], lambda: [bare[key] for key in keys], rounds)
    scale = 1e6 / len(keys)
    return Line("one vector", ours * scale, theirs * scale, "us", "np.memmap index (a view)", "<= 5", ours / theirs)


def random_rows(store: ShardStore, maps: list[np.memmap], rounds: int, *, one_shard: bool) -> Line:
    layer = store.layers[1]
    rows = store.sel(
        layer=layer, tokens="content", examples=slice(store.layout.examples_per_shard) if one_shard else None
    )
    picks = np.random.default_rng(3).integers(0, len(rows), 16_384)
    example, layer_idx, token = rows.space.locate(picks)
    shard, local = np.divmod(example, store.layout.examples_per_shard)

    def bare() -> np.ndarray:
        if one_shard:
            return maps[0][local, layer_idx, token]
        out = np.empty((len(picks), store.shape[3]), dtype=np.float32)
        for i, bare_map in enumerate(maps):
            here = np.flatnonzero(shard == i)
            out[here] = bare_map[local[here], layer_idx[here], token[here]]
        return out

    np.testing.assert_array_equal(rows.rows(picks), bare())
    ours, theirs = race(lambda: rows.rows(picks), bare, rounds)
    where = "in one shard" if one_shard else f"over {len(maps)} shards"
    return Line(
        f"16,384 random rows {where}", ours * 1e3, theirs * 1e3, "ms", "np.memmap gather", "<= 1.2", ours / theirs
    )


def full_scan(store: ShardStore, folder: Path, rounds: int, *, cold: bool) -> list[Line]:
    out = np.empty((SCAN_EXAMPLES, *store.shape[1:]), dtype=np.float32)
    memory = memoryview(out.reshape(-1).view(np.uint8))

    def ours() -> None:
        for start in range(0, len(store), SCAN_EXAMPLES):
            key = slice(start, start + SCAN_EXAMPLES)
            store.read(key, out=out[: min(SCAN_EXAMPLES, len(store) - start)])

    def bare() -> None:
        for shard_idx in range(store.layout.n_shards):
            fd = os.open(folder / f"acts{shard_idx:06d}.bin", os.O_RDONLY)
            at, end = 0, store.layout.used_nbytes(shard_idx)
            while at < end:
                at += os.preadv(fd, [memory[: min(len(memory), end - at)]], at)
            os.close(fd)

    # In turn who goes first: a virtual disk serves the second one from another cache. The bare reads run twice a round: how
    # far those two are apart is what a ratio of this run can tell.
    runners, times = [ours, bare, bare], ([], [], [])
    for number in range(rounds):
        turn = [(number + i) % 3 for i in range(3)][:: -1 if number // 3 % 2 else 1]
        for i in turn:
            if cold:
                forget(folder)
            times[i].append(seconds(runners[i]))
    a, b, again = map(statistics.median, times)
    both = statistics.median(times[1] + times[2])
    state = "cold" if cold else "page cache"
    size = store.nbytes / 1e9
    return [
        Line(f"full scan, {state}", size / a, size / both, "GB/s", "preadv into a buffer", ">= 0.95", both / a),
        Line("  the noise: preadv", size / b, size / again, "GB/s", "the same preadv", "", again / b),
    ]


def one_layer(store: ShardStore, maps: list[np.memmap], rounds: int) -> Line:
    ours, theirs = race(lambda: store[:, 1], lambda: np.concatenate([bare[:, 1] for bare in maps]), rounds)
    size = store.nbytes / store.shape[1] / 1e9
    return Line("one layer of all examples", size / ours, size / theirs, "GB/s", "np.memmap slices", "", theirs / ours)


def opening(root: Path, rounds: int) -> list[Line]:
    folder, _ = make_store(root, n_bytes=1000 * 4 * 5 * 8, n_shards=1000, tokens=4, d_model=8)

    def bare() -> None:
        for name in ("metadata.json", "shards.json"):
            (folder / name).read_bytes()
        for i in range(1000):
            os.stat(folder / f"acts{i:06d}.bin")

    ours, theirs = race(lambda: ShardStore.open(folder), bare, rounds)
    return [
        Line("opening 1,000 shards", ours * 1e3, theirs * 1e3, "ms", "two reads and 1,000 stats", "", ours / theirs)
    ]


def importing(rounds: int) -> Line:
    # An installed package is compiled; without this a shell that forbids writing bytecode would compile it each time.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def start(code: str) -> float:
        return seconds(lambda: subprocess.run([sys.executable, "-c", code], check=True, env=environment))

    start("import saev_store")
    pairs = [(start("import saev_store"), start("import numpy, pydantic")) for _ in range(rounds)]
    base = statistics.median(start("pass") for _ in range(rounds))
    ours, theirs = (statistics.median(pair[i] for pair in pairs) - base for i in range(2))
    return Line(
        "import saev_store", ours * 1e3, theirs * 1e3, "ms", "import numpy, pydantic", "< 200 ms", ours / theirs
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the store")
    parser.add_argument("--folder", default=None, help="where to make it (default: the system's temporary folder)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        folder, _ = make_store(root, n_bytes=int(options.gib * 2**30), n_shards=4, layers=(2, 5, 11))
        store = ShardStore.open(folder)
        # Before anything is mapped: pages of a live map cannot be dropped, and the disk would not be met.
        cold = full_scan(store, folder, 4 * options.rounds, cold=True)
        warm = full_scan(store, folder, options.rounds, cold=False)
        maps = bare_maps(folder, store)
        lines = [
            *opening(root, options.rounds),
            one_vector(store, maps, options.rounds),
            random_rows(store, maps, options.rounds, one_shard=True),
            random_rows(store, maps, options.rounds, one_shard=False),
            *warm,
            *cold,
            one_layer(store, maps, options.rounds),
            importing(options.rounds),
        ]
        report(lines, {"shape": store.shape, "bytes": store.nbytes, "cores": os.cpu_count()}, as_json=options.json)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
