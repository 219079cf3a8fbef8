"""How fast the loaders are, next to this machine's limits and to other loaders: one store, the same batches, one table.

    python benchmarks/loaders.py [--gib N] [--rounds N] [--cold] [--reference PATH] [--only NAME|NAME] [--json]

The store has three layers of which one is read, ViT-B/16's shape, in batches of 16,384 x 768. Rounds are interleaved, and
begin with another contender each time, so that all meet the same machine; medians are shown, and where two were run in
the same rounds, the mean of the rounds' ratios with its standard error. What is in memory is read in a dozen epochs: the
first four with the start and the first touch of all memory, and without the first batch, as the others are measured; and
the rest, each a row of its own. Torch's DataLoader, MosaicML Streaming and Hugging Face
datasets take part where they are installed, and the reference project's own loaders where `--reference` names a checkout
of it (with `beartype jaxtyping orjson` installed; nothing else that it needs is used by its loaders). `--cold` asks the
kernel to forget the files before each pass. fio replays the very extents, at the depth that the loaders use, and runs
twice a round: how far it is from itself is what a ratio of this run can tell.

At the end: what it costs to begin, and to go on, in 10^6, 10^8 and 10^10 rows, over a store that is only arithmetic.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from _common import forget
from _loader_limits import Plane
from _loader_peers import (
    AT_MOST_S,
    BATCH,
    CONTENT,
    D_MODEL,
    LAYER,
    LAYERS,
    TOKENS,
    VECTOR,
    MemmapRows,
    Run,
    has_fio,
    peers,
    rate,
    rates,
)

from saev_store import ShardStore, new_metadata
from saev_store.core.layout import Layout
from saev_store.core.rows import row_space
from saev_store.documents import shards_bytes
from saev_store.loaders import Loader
from saev_store.store.reader import Reader
from saev_store.store.selection import Selection
from saev_store.transport import ReadCost

#: How the others are measured: without their first batch.
FORGIVEN = " but the first batch"
#: (ours, against, at least), by whether the files are in memory.
GOALS = {
    "page cache": (
        ("shuffled, first 4 epochs", "reference, shuffled", 20.0), (f"shuffled, first 4 epochs{FORGIVEN}", "reference, shuffled", 20.0),
        ("shuffled, later epochs", "reference, shuffled", 20.0),
        ("shuffled, first 4 epochs", "read + gather, one thread", 0.5),
        ("shuffled, later epochs", "read + gather, one thread", 0.5),
        ("ordered", "reference, ordered", 100.0), ("ordered", "preadv, 1 thread", 0.8),
        ("indexed", "memmap gather of a batch", 0.9),
    ),
    "cold": (
        ("shuffled, first epoch", "fio, direct", 0.95), ("shuffled, second epoch", "fio, direct", 0.95),
        ("fio, direct, again", "fio, direct", 0.0), ("shuffled, first epoch", "preadv, 16 threads, no read-ahead", 0.0),
        ("indexed", "memmap, row by row", 10.0),
    ),
}  # fmt: skip
#: Rounds in which slow contenders take part; the others go on.
SLOW_ROUNDS = 2


def make_store(root: str, n_bytes: int) -> str:
    """A store of normal float32, written without the package's writer, in the folders that the reference insists on."""
    n_examples = max(6 * BATCH // CONTENT, n_bytes // (len(LAYERS) * TOKENS * VECTOR))
    per_shard = -(-n_examples // 6)
    metadata = new_metadata(
        protocol="2.1", family="clip", ckpt="benchmark", layers=list(LAYERS), content_tokens_per_example=CONTENT,
        cls_token=True, d_model=D_MODEL, n_examples=n_examples, max_tokens_per_shard=per_shard * TOKENS * len(LAYERS),
    )  # fmt: skip
    folder = os.path.join(root, "saev", "shards", metadata.hash)
    os.makedirs(folder)
    layout, some = metadata.layout, np.random.default_rng(17).standard_normal(16 << 20, dtype=np.float32).tobytes()
    for shard in range(layout.n_shards):
        path = os.path.join(folder, f"acts{shard:06d}.bin")
        with open(path, "wb") as file:
            left = layout.used_nbytes(shard)
            file.writelines(some[: left - at] for at in range(0, left, len(some)))
        os.truncate(path, layout.shard_nbytes)
    documents = {"metadata.json": metadata.raw, "shards.json": shards_bytes(layout, metadata.count_key)}
    for name, raw in documents.items():
        with open(os.path.join(folder, name), "wb") as file:
            file.write(raw)
    return folder


def warm(folder: str) -> None:
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "rb") as file:
            while file.read(8 << 20):
                pass


def ours(store: ShardStore, args: argparse.Namespace) -> dict[str, Run]:
    """Loaders are made anew each time, because they look at what the files lie on when they are made."""
    rows = store.sel(layer=LAYER, tokens="content")
    window = args.window_mib << 20

    def passes(counts: dict[str, int], **options: object) -> dict[str, float]:
        found = {}
        with Loader(rows, batch_size=BATCH, **options) as loader:
            for name, n_epochs in counts.items():
                if args.cold:
                    forget(Path(store.url))
                with_start, without = rates(len(batch["act"]) for _ in range(n_epochs) for batch in loader)
                found[name] = with_start
                if name == "shuffled, first 4 epochs":
                    found[name + FORGIVEN] = without
        return found

    counts = {"first 4 epochs": 4, "later epochs": 8}
    if args.cold:
        counts = {"first epoch": 1, "second epoch": 1}

    def shuffled(name: str, **options: object) -> Run:
        named = {f"{name}, {part}": n for part, n in counts.items()}
        return lambda: passes(named, window_bytes=window, **options)

    return {
        "shuffled": shuffled("shuffled"),
        "ordered": lambda: passes({"ordered": 1 if args.cold else 8}, order="stored"),
    }


def indexed(store: ShardStore, *, cold: bool) -> dict[str, Run]:
    """Batches of random rows, against a bare gather out of a map where cached, against rows one by one where not."""
    try:
        from saev_store.torch import StoreDataset
    except ImportError:
        return {}
    # Where it is cached, all in one shard, because a bare gather out of a map can do no more.
    n = store.layout.n_examples if cold else store.layout.examples_per_shard
    picked = np.random.default_rng(1).integers(0, n * CONTENT, (1 if cold else 8, BATCH))
    example, token = np.divmod(picked, CONTENT)
    vectors = (example * len(LAYERS) + LAYERS.index(LAYER)) * TOKENS + 1 + token

    def batches() -> Iterator[int]:
        dataset = StoreDataset(store, layer=LAYER)
        for numbers in picked:
            yield len(dataset.batch(numbers)["act"])

    def one_by_one() -> Iterator[int]:
        rows = MemmapRows(store)  # made here: the kernel forgets no page that is mapped
        for number in picked[0]:
            yield len(rows[number][None])

    def gathers() -> Iterator[int]:
        flat = np.memmap(os.path.join(store.url, "acts000000.bin"), np.float32, "r").reshape(-1, D_MODEL)
        for some in vectors:
            yield len(flat[some])

    against: dict[str, Run] = {"memmap, row by row": lambda: rate(one_by_one())}
    if not cold:
        against = {"memmap gather of a batch": lambda: rate(gathers())}
    return {"indexed": lambda: rate(batches()), **against}


def limits(store: ShardStore, *, cold: bool) -> dict[str, Run]:
    plane = Plane(store)
    found: dict[str, Run] = {
        "memcpy": plane.memcpy, "first touch of memory": plane.first_touch, "gather, 1 thread": plane.gather,
        "preadv, 1 thread": plane.preadv, "preadv, 16 threads, no read-ahead": plane.random_preadv,
    }  # fmt: skip
    if has_fio():
        found["fio, direct" if cold else "fio"] = lambda: plane.fio(direct=cold)
    if has_fio() and cold:
        found["fio, direct, again"] = lambda: plane.fio(direct=True)
    return found


class Synthetic:
    """A store of any size: every vector is what its place says."""

    url, name, cost = "synthetic://", "synthetic", ReadCost(1 << 16, 1 << 20)
    is_local, local_path, check_mapped = False, None, None

    def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        del path
        return [bytes(end - start) for start, end in zip(starts, ends, strict=True)]

    def load_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int], memory: memoryview) -> list[bytes]:
        del memory
        return self.get_ranges(path, starts=starts, ends=ends)

    def size(self, path: str) -> int:
        raise NotImplementedError

    read = close = size


def growth() -> list[dict[str, float]]:
    """Start in the middle of an epoch, and twenty batches, at 10^6, 10^8 and 10^10 rows.

    The permutation of blocks is a table at 10^6 and a cipher at the others. A file has three examples, so that each block
    of a batch lies in another one at every size; the first and the last row have files of 3,000 examples: at 10^6 rows
    that is two files in all, and a call reads many blocks.
    """
    sizes = ((10**6, 3000), (10**6, 3), (10**8, 3), (10**10, 3), (10**10, 3000))
    spaces = []
    for n_rows, per_shard in sizes:
        layout = Layout(-(-n_rows // CONTENT), LAYERS, CONTENT, True, 32, per_shard)
        spaces.append(Selection(Reader(Synthetic(), layout), row_space(layout, layer=LAYER, tokens="content")))
    times = [[_begin_and_go_on(rows) for rows in spaces] for _ in range(9)]
    found = []
    for number, rows in enumerate(spaces):
        tracemalloc.start()
        _begin_and_go_on(rows)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        names = ("start_s", "start_cpu_s", "per_batch_s", "per_batch_cpu_s")
        medians = map(statistics.median, zip(*(some[number] for some in times), strict=True))
        sizes_of = {"rows": len(rows), "files": rows.space.layout.n_shards, "memory_mib": peak / 2**20}
        found.append({**sizes_of, **dict(zip(names, medians, strict=True))})
    return found


def _begin_and_go_on(rows: Selection) -> tuple[float, float, float, float]:
    """Seconds, by the clock and of this process's CPUs, to the first batch in the middle of an epoch and for each after it."""
    clocks = (time.perf_counter, time.process_time)
    began = [clock() for clock in clocks]
    with Loader(rows, batch_size=BATCH, window_bytes=32 << 20, n_threads=4) as loader:
        loader.load_state_dict({**loader.state_dict(), "batch": len(loader) // 2})
        batches = iter(loader)
        next(batches)
        started = [clock() for clock in clocks]
        for _ in range(20):
            next(batches)
        ended = [clock() for clock in clocks]
    (start_s, start_cpu_s), (some_s, some_cpu_s) = np.subtract(started, began), np.subtract(ended, started) / 20
    return float(start_s), float(start_cpu_s), float(some_s), float(some_cpu_s)


def resident(store: ShardStore, args: argparse.Namespace) -> dict[str, float]:
    """By how much the process grows while an epoch is handed out, and what was promised, in MiB."""
    import psutil

    process, most = psutil.Process(), 0
    with Loader(store.sel(layer=LAYER, tokens="content"), window_bytes=args.window_mib << 20) as loader:
        plan, before = loader.explain(), process.memory_info().rss
        for batch in loader:
            del batch
            most = max(most, process.memory_info().rss)
    return {
        "grew_mib": (most - before) / 2**20,
        "promised_mib": 2 * plan.pool_bytes / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gib", type=float, default=None, help="size of the store; 1.5, and 6 with --cold, if not said"
    )
    parser.add_argument("--folder", default=None, help="where the store is made")
    parser.add_argument("--rounds", type=int, default=None, help="5, and 12 with --cold, if not said")
    parser.add_argument("--window-mib", type=int, default=256)
    parser.add_argument("--reference", default=None, help="a checkout of the reference project")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--only", default="", help="parts of names, separated by |")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.gib = args.gib or (6.0 if args.cold else 1.5)
    args.rounds = args.rounds or (12 if args.cold else 5)
    work = tempfile.mkdtemp(prefix="saev-store-bench", dir=args.folder)
    try:
        store = ShardStore.open(make_store(work, int(args.gib * 2**30)))
        warm(store.url)
        theirs, missing = ({}, ["other loaders: they are measured without --cold"]) if args.cold else peers(store, work, args.reference)  # fmt: skip
        runs = {**ours(store, args), **indexed(store, cold=args.cold), **limits(store, cold=args.cold), **theirs}
        runs = {name: run for name, run in runs.items() if any(part in name for part in args.only.split("|"))}
        results: dict[str, list[float]] = {}
        for number in range(args.rounds):
            first = number % max(len(runs), 1)
            for name in [*runs, *runs][first : first + len(runs)]:
                if number >= SLOW_ROUNDS and (name in theirs or "row by row" in name):
                    continue  # slow and steady
                if args.cold:
                    forget(Path(store.url))
                found = runs[name]()
                for row, value in (found if isinstance(found, dict) else {name: found}).items():
                    results.setdefault(row, []).append(value)
        grown, memory = growth(), resident(store, args)
    finally:
        shutil.rmtree(work)
    report(results, grown, memory, missing, args)


def report(
    results: dict[str, list[float]],
    grown: list[dict[str, float]],
    memory: dict[str, float],
    missing: list[str],
    args: argparse.Namespace,
) -> None:
    state = "cold" if args.cold else "page cache"
    if {"preadv, 1 thread", "gather, 1 thread"} <= results.keys():
        both = zip(results["preadv, 1 thread"], results["gather, 1 thread"], strict=True)
        results["read + gather, one thread"] = [1 / (1 / read + 1 / gather) for read, gather in both]
    found = {name: statistics.median(values) for name, values in results.items()}
    goals = []
    for ours_, against, goal in GOALS[state]:
        if not found.get(against) or ours_ not in found:
            continue
        pairs = [mine / other for mine, other in zip(results[ours_], results[against], strict=False) if other]
        whole = len(results[ours_]) == len(results[against])
        ratio = statistics.mean(pairs) if whole else found[ours_] / found[against]
        error = statistics.stdev(pairs) / len(pairs) ** 0.5 if whole and len(pairs) > 1 else None
        goals.append({"ours": ours_, "against": against, "ratio": ratio, "error": error, "rounds": len(pairs), "at_least": goal})  # fmt: skip
    if args.json:
        print(json.dumps({"state": state, "mb_per_s": found, "goals": goals, "growth": grown, "memory": memory, "missing": missing}))  # fmt: skip
        return
    load = os.getloadavg()[0]
    print(f"{state}, batches of {BATCH} x {D_MODEL}, one of {len(LAYERS)} layers, load {load:.1f}, at most {AT_MOST_S:.0f} s each\n")  # fmt: skip
    for name, value in found.items():
        print(f"{name:<46} {value:>9,.0f} MB/s {value * 1e6 / VECTOR:>12,.0f} rows/s")
    print()
    for goal in goals:
        verdict = f"goal {goal['at_least']:g}" if goal["at_least"] else ""
        verdict += "" if goal["ratio"] >= goal["at_least"] else "  MISSED"
        spread = "" if goal["error"] is None else f"+- {goal['error']:.2f}"
        print(f"{goal['ours']:>24} / {goal['against']:<34} {goal['ratio']:8.2f} {spread:8} {verdict}")
    print(f"\nmemory: {memory['grew_mib']:.0f} MiB, promised {memory['promised_mib']:.0f} MiB")
    for line in grown:
        print(
            f"{line['rows']:>14,} rows, {line['files']:>10,} files: {line['start_s'] * 1e3:.0f} ms to the first batch in the "
            f"middle ({line['start_cpu_s'] * 1e3:.0f} of CPU), {line['per_batch_s'] * 1e3:.1f} ms a batch "
            f"({line['per_batch_cpu_s'] * 1e3:.1f}), {line['memory_mib']:.1f} MiB traced"
        )
    for line in missing:
        print(f"not measured: {line}", file=sys.stderr)


if __name__ == "__main__":
    main()
