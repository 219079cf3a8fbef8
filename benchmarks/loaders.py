"""How fast the loaders are, next to this machine's limits and to other loaders, on one store and the same batches.

    python benchmarks/loaders.py [--gib 1.0] [--folder DIR] [--rounds 3] [--reference PATH] [--cold] [--json]

The store has three layers of which one is read: ViT-B/16's shape, batches of 16,384 x 768. Rounds are interleaved, so that
all contenders meet the same machine; medians are shown. `--reference` names a checkout of the reference project, whose own
shuffled and ordered loaders are then measured as well (its source is imported from there, with everything it needs).
`--cold` asks the kernel to forget the files before each round; the limit is then the same extents at the same depth by
`fio`, or by plain threads where fio is not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from saev_store import ShardStore
from saev_store.documents import new_metadata, shards_bytes
from saev_store.loaders import OrderedLoader, ShuffledLoader

BATCH, D_MODEL, CONTENT, TOKENS, LAYERS, LAYER = 16_384, 768, 196, 197, (2, 5, 11), 5
VECTOR = D_MODEL * 4


def make_store(root: str, n_bytes: int) -> str:
    """A store of normal float32, written without the package's writer; returns its folder."""
    n_examples = max(64, n_bytes // (len(LAYERS) * TOKENS * VECTOR))
    per_shard = -(-n_examples // 6)
    metadata = new_metadata(
        family="clip", ckpt="benchmark", layers=list(LAYERS), content_tokens_per_example=CONTENT, cls_token=True,
        d_model=D_MODEL, n_examples=n_examples, max_tokens_per_shard=per_shard * TOKENS * len(LAYERS),
    )  # fmt: skip
    folder = os.path.join(root, metadata.hash)
    os.makedirs(folder)
    rng = np.random.default_rng(17)
    layout = metadata.layout
    for shard in range(layout.n_shards):
        values = rng.standard_normal(layout.used_nbytes(shard) // 4, dtype=np.float32)
        values.tofile(os.path.join(folder, f"acts{shard:06d}.bin"))
    for name, raw in (
        ("metadata.json", metadata.to_bytes()),
        ("shards.json", shards_bytes(layout, metadata.count_key)),
    ):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(raw)
    return folder


def forget(folder: str) -> None:
    """Write back and drop the cached pages of a folder's files."""
    for name in os.listdir(folder):
        fd = os.open(os.path.join(folder, name), os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def warm(folder: str) -> None:
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "rb") as file:
            while file.read(8 << 20):
                pass


class Plane:
    """The extents of one layer's content, and memory for a number of them: what the limits are measured with."""

    def __init__(self, store: ShardStore) -> None:
        self.store, layout = store, store.layout
        self.n = layout.n_examples
        self.fds = [os.open(os.path.join(store.url, f"acts{i:06d}.bin"), os.O_RDONLY) for i in range(layout.n_shards)]
        self.nbytes = CONTENT * VECTOR
        self.n_slots = min(self.n, (256 << 20) // self.nbytes)
        self.pool = np.zeros((self.n_slots * CONTENT, D_MODEL), np.float32)
        self.raw = memoryview(self.pool).cast("B")
        self.out = np.zeros((BATCH, D_MODEL), np.float32)

    def read(self, example: int) -> None:
        shard, within = divmod(example, self.store.layout.examples_per_shard)
        start = ((within * len(LAYERS) + LAYERS.index(LAYER)) * TOKENS + 1) * VECTOR
        at = example % self.n_slots * self.nbytes
        os.preadv(self.fds[shard], [self.raw[at : at + self.nbytes]], start)

    def preadv(self, n_threads: int = 1) -> float:
        """MB/s of reading all extents into memory that is already there."""

        def some(first: int) -> None:
            for example in range(first, self.n, n_threads):
                self.read(example)

        threads = [threading.Thread(target=some, args=(first,)) for first in range(n_threads)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.n * self.nbytes / 1e6 / (time.perf_counter() - started)

    def gather(self) -> float:
        """MB/s of `np.take` into memory that is already there, one thread."""
        rows = np.random.default_rng(0).integers(0, len(self.pool), (8, BATCH))
        started = time.perf_counter()
        for some in rows:
            np.take(self.pool, some, axis=0, out=self.out, mode="clip")
        return rows.size * VECTOR / 1e6 / (time.perf_counter() - started)

    def memcpy(self) -> float:
        """MB/s of copying one large array to another."""
        half = len(self.pool) // 2
        started = time.perf_counter()
        for _ in range(4):
            np.copyto(self.pool[:half], self.pool[half : 2 * half])
        return 4 * half * VECTOR / 1e6 / (time.perf_counter() - started)

    def fio(self, depth: int) -> float | None:
        """MB/s of fio with random extents of the same size, or None where it is not installed."""
        if shutil.which("fio") is None:
            return None
        done = subprocess.run(
            ["fio", "--name=x", f"--filename={self.store.url}/acts000000.bin", "--rw=randread", f"--bs={self.nbytes}",
             "--direct=1", f"--iodepth={depth}", "--ioengine=libaio", "--runtime=5", "--time_based", "--output-format=json"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return json.loads(done.stdout)["jobs"][0]["read"]["bw"] * 1024 / 1e6


def rate(batches: Iterator[int], at_most_s: float) -> float:
    """MB/s of batches, given by their numbers of rows, from the first request on."""
    started, rows = time.perf_counter(), 0
    for n in batches:
        rows += n
        if time.perf_counter() - started > at_most_s:
            break
    return rows * VECTOR / 1e6 / (time.perf_counter() - started)


def epochs(make: Callable[[], Iterator[int]], n_epochs: int) -> Iterator[int]:
    for _ in range(n_epochs):
        yield from make()


class MemmapRows:
    """What people write first: one vector by number, from a map."""

    def __init__(self, store: ShardStore) -> None:
        layout = store.layout
        shape = (layout.examples_per_shard, len(LAYERS), TOKENS, D_MODEL)
        self.n, self.per_shard = layout.n_examples * CONTENT, layout.examples_per_shard
        self.maps = []
        for i in range(layout.n_shards):
            shape = (layout.examples_in(i), *shape[1:])
            self.maps.append(np.memmap(os.path.join(store.url, f"acts{i:06d}.bin"), np.float32, "r", shape=shape))

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> np.ndarray:
        example, token = divmod(int(i), CONTENT)
        shard, within = divmod(example, self.per_shard)
        return np.array(self.maps[shard][within, LAYERS.index(LAYER), token + 1])


def contenders(store: ShardStore, args: argparse.Namespace, plane: Plane) -> dict[str, Callable[[], float]]:
    rows = store.sel(layer=LAYER, tokens="content")
    window = args.window_mib << 20
    shuffled, by_rows = (
        ShuffledLoader(rows, window_bytes=window),
        ShuffledLoader(rows, window_bytes=window, slots="row"),
    )
    ordered = OrderedLoader(rows)
    n_epochs = 1 if args.cold else 4
    found: dict[str, Callable[[], float]] = {
        "limit: memcpy": plane.memcpy,
        "limit: preadv, 1 thread": plane.preadv,
        "limit: gather, 1 thread": plane.gather,
        "limit: preadv, 16 threads": lambda: plane.preadv(16),
        "ours: shuffled": lambda: rate(epochs(lambda: (len(b["act"]) for b in shuffled), n_epochs), 60),
        "ours: shuffled, row slots": lambda: rate(epochs(lambda: (len(b["act"]) for b in by_rows), n_epochs), 60),
        "ours: ordered": lambda: rate(epochs(lambda: (len(b["act"]) for b in ordered), n_epochs), 60),
    }
    if args.cold and shutil.which("fio"):
        found["limit: fio, depth 16"] = lambda: plane.fio(16) or 0.0
    memmap = MemmapRows(store)
    picked = np.random.default_rng(1).integers(0, len(memmap), BATCH)
    if not args.cold:
        flat = np.memmap(os.path.join(store.url, "acts000000.bin"), np.float32, "r").reshape(-1, D_MODEL)
        example, token = np.divmod(
            np.random.default_rng(1).integers(0, store.layout.examples_per_shard * CONTENT, BATCH), CONTENT
        )
        vectors = (example * len(LAYERS) + LAYERS.index(LAYER)) * TOKENS + 1 + token
        found["limit: memmap gather of a batch"] = lambda: rate((len(flat[vectors]) for _ in range(8)), 20)
    try:
        from torch.utils.data import DataLoader, RandomSampler
    except ImportError:
        return found
    from saev_store.torch import IndexedConfig, IndexedDataset

    dataset = IndexedDataset(IndexedConfig(shards=store.url, layer=LAYER))
    some = [np.random.default_rng(i).integers(0, len(dataset), BATCH) for i in range(1 if args.cold else 8)]
    found["ours: indexed batches"] = lambda: rate((len(dataset.batch(part)["act"]) for part in some), 30)
    found["memmap, row by row"] = lambda: rate(
        (len(np.stack([memmap[i] for i in picked[:4096]])) for _ in range(1)), 30
    )
    for n_workers in (0, 2):
        options = {"batch_size": BATCH, "num_workers": n_workers}

        def torch_epoch(options: dict = options) -> float:
            loader = DataLoader(memmap, sampler=RandomSampler(memmap, num_samples=3 * BATCH), **options)
            return rate((len(batch) for batch in loader), 20)

        found[f"torch DataLoader over memmap, {n_workers} workers"] = torch_epoch
    return {**found, **others(store, args)}


def others(store: ShardStore, args: argparse.Namespace) -> dict[str, Callable[[], float]]:
    """MosaicML Streaming and Hugging Face datasets, where they are installed: the same vectors in their own formats."""
    found: dict[str, Callable[[], float]] = {}
    n = min(store.layout.n_examples, 200)
    vectors = store[:n, LAYERS.index(LAYER), 1:].reshape(-1, D_MODEL)
    try:
        from streaming import MDSWriter, StreamingDataset
        from torch.utils.data import DataLoader

        folder = os.path.join(args.work, "mds")
        with MDSWriter(out=folder, columns={"act": f"ndarray:float32:{D_MODEL}"}) as out:
            for vector in vectors:
                out.write({"act": vector})

        def mosaic() -> float:
            dataset = StreamingDataset(local=folder, shuffle=True, batch_size=BATCH)
            return rate((len(batch["act"]) for batch in DataLoader(dataset, batch_size=BATCH)), 20)

        found["MosaicML Streaming"] = mosaic
    except ImportError:
        pass
    try:
        from datasets import Dataset

        table = Dataset.from_dict({"act": list(vectors)}).with_format("numpy")

        def hugging() -> float:
            return rate((len(batch["act"]) for batch in table.shuffle(seed=1).iter(BATCH)), 20)

        found["Hugging Face datasets"] = hugging
    except ImportError:
        pass
    if args.reference:
        found.update(reference(store, args.reference))
    return found


def reference(store: ShardStore, checkout: str) -> dict[str, Callable[[], float]]:
    """The reference project's loaders, run as its own code in a process of its own."""
    script = (
        "import sys, time, json, pathlib\n"
        "sys.path.insert(0, sys.argv[1] + '/src')\n"
        "from saev.data import ShuffledConfig, ShuffledDataLoader, OrderedConfig, OrderedDataLoader\n"
        "def run():\n"
        "    kind = {'shuffled': (ShuffledConfig, ShuffledDataLoader), 'ordered': (OrderedConfig, OrderedDataLoader)}[sys.argv[3]]\n"
        "    loader = kind[1](kind[0](shards=pathlib.Path(sys.argv[2]), layer=int(sys.argv[4]), batch_size=16384))\n"
        "    rows, started = 0, time.perf_counter()\n"
        "    for batch in loader:\n"
        "        rows += len(batch['act'])\n"
        "        if time.perf_counter() - started > 15: break\n"
        "    print('RATE', rows / (time.perf_counter() - started))\n"
        "if __name__ == '__main__': run()\n"
    )

    def measured(kind: str) -> float:
        path = os.path.join(tempfile.gettempdir(), "saev_reference_run.py")
        with open(path, "w", encoding="utf-8") as file:
            file.write(script)
        done = subprocess.run(
            [sys.executable, path, checkout, store.url, kind, str(LAYER)],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("RATE ")]
        if not lines:
            print(done.stderr[-2000:], file=sys.stderr)
        return float(lines[0].split()[1]) * VECTOR / 1e6 if lines else 0.0

    return {f"reference: {kind}": (lambda kind=kind: measured(kind)) for kind in ("shuffled", "ordered")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window-mib", type=int, default=256)
    parser.add_argument("--reference", default=None)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--only", default="", help="parts of names, separated by |")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.work = tempfile.mkdtemp(prefix="saev-store-bench", dir=args.folder)
    try:
        store = ShardStore.open(make_store(args.work, int(args.gib * 2**30)))
        warm(store.url)
        plane = Plane(store)
        results: dict[str, list[float]] = {}
        runs = {
            name: run
            for name, run in contenders(store, args, plane).items()
            if any(part in name for part in args.only.split("|"))
        }
        for _ in range(args.rounds):
            for name, run in runs.items():
                if args.cold:
                    forget(store.url)
                results.setdefault(name, []).append(run())
    finally:
        shutil.rmtree(args.work)
    report({name: statistics.median(values) for name, values in results.items()}, args)


def report(found: dict[str, float], args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps(found))
        return
    print(f"{'cold' if args.cold else 'page cache'}, batches of {BATCH} x {D_MODEL}, one of {len(LAYERS)} layers\n")
    for name, value in found.items():
        print(f"{name:<42} {value:>9,.0f} MB/s {value * 1e6 / VECTOR:>12,.0f} rows/s")
    print()
    serial = None
    if {"limit: preadv, 1 thread", "limit: gather, 1 thread"} <= found.keys():
        serial = 1 / (1 / found["limit: preadv, 1 thread"] + 1 / found["limit: gather, 1 thread"])
    for ours, against in (
        ("ours: shuffled", "reference: shuffled"), ("ours: ordered", "reference: ordered"),
        ("ours: shuffled", "torch DataLoader over memmap, 0 workers"), ("ours: shuffled", "torch DataLoader over memmap, 2 workers"),
        ("ours: shuffled", "MosaicML Streaming"), ("ours: shuffled", "Hugging Face datasets"),
        ("ours: shuffled", "limit: preadv, 16 threads"), ("ours: shuffled", "limit: fio, depth 16"),
        ("ours: ordered", "limit: preadv, 1 thread"), ("ours: indexed batches", "limit: memmap gather of a batch"),
        ("ours: indexed batches", "memmap, row by row"),
    ):  # fmt: skip
        if found.get(against) and ours in found:
            print(f"{ours} / {against:<42} {found[ours] / found[against]:8.2f}")
    if serial and "ours: shuffled" in found:
        print(f"ours: shuffled / (read + gather), one thread              {found['ours: shuffled'] / serial:8.2f}")


if __name__ == "__main__":
    main()
