"""How fast the loaders are beside the reference project's loaders and, from a disk, beside fio: one store, the same batches.

    python benchmarks/loaders.py [--gib N] [--rounds N] [--cold] [--reference PATH] [--only NAME|NAME] [--json]

The store has three layers of which one is read, ViT-B/16's shape, in batches of 16,384 x 768. Rounds are interleaved, and
begin with another contender each time, so that all meet the same machine; medians are shown, and where two were run in
the same rounds, the mean of the rounds' ratios with its standard error. What is in memory is read in a dozen epochs: the
first four with the start and the first touch of all memory, and without the first batch, as the reference is measured; and
the rest, each a row of its own. `--reference` names a checkout of the reference project (with `beartype jaxtyping orjson`
installed; nothing else that it needs is used by its loaders). `--cold` asks the kernel to forget the files before each
pass. fio replays the very extents, at the depth that the loaders use, and runs twice a round: how far it is from itself is
what a ratio of this run can tell. The package as it was (`oracle.sh`) runs in turns with this one, started again each time.

At the end: what it costs to begin, and to go on, in 10^6, 10^8 and 10^10 rows, over a store that is only arithmetic.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from _common import AT_MOST_S, BATCH, CONTENT, D_MODEL, LAYER, LAYERS, TOKENS, VECTOR, forget, make_store
from _reference_loader import reference

from saev_store import ShardStore
from saev_store.core.layout import Layout
from saev_store.core.rows import row_space
from saev_store.loaders import Loader
from saev_store.store.reader import Reader
from saev_store.store.selection import Selection
from saev_store.transport import ReadCost

#: MB/s, or several of them by the names of their rows.
Run = Callable[[], float | dict[str, float]]
#: How the reference is measured: without its first batch.
FORGIVEN = " but the first batch"
#: (ours, against, at least), by whether the files are in memory.
GOALS = {
    "page cache": (
        ("shuffled, first 4 epochs", "reference, shuffled", 25.0), (f"shuffled, first 4 epochs{FORGIVEN}", "reference, shuffled", 25.0),
        ("shuffled, later epochs", "reference, shuffled", 25.0), ("ordered", "reference, ordered", 100.0),
    ),
    "cold": (
        ("shuffled, first epoch", "fio", 0.95), ("shuffled, second epoch", "fio", 0.95), ("fio, again", "fio", 0.0),
    ),
}  # fmt: skip
#: Reads of fio in flight; what the loaders do on flash.
DEPTH = 16
#: Rounds in which the reference takes part, which is slow and steady.
SLOW_ROUNDS = 2


def make_loaded(work: str, gib: float) -> ShardStore:
    """A store in the page cache, in the folders that the reference insists on."""
    options = {"n_shards": 6, "layers": LAYERS, "tokens": CONTENT, "d_model": D_MODEL, "protocol": "2.1"}
    folder, _ = make_store(Path(work, "saev/shards"), n_bytes=int(gib * 2**30), **options)
    warm(str(folder))
    return ShardStore.open(folder)


def warm(folder: str) -> None:
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "rb") as file:
            while file.read(8 << 20):
                pass


def rates(batches: Iterator[int]) -> tuple[float, float]:
    """MB/s from the request for the first batch on, and from that batch on, without it."""
    started = first_at = time.perf_counter()
    rows = first_rows = 0
    for n in batches:
        rows += n
        if not first_rows:
            first_at, first_rows = time.perf_counter(), n
        if time.perf_counter() - started > AT_MOST_S:
            break
    ended = time.perf_counter()
    return rows * VECTOR / 1e6 / (ended - started), (rows - first_rows) * VECTOR / 1e6 / (ended - first_at)


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


def fio(store: ShardStore) -> Run:
    """MB/s of fio over one layer's content in a random order, past the page cache."""
    layout, nbytes = store.layout, CONTENT * VECTOR
    paths = [os.path.join(store.url, f"acts{i:06d}.bin") for i in range(layout.n_shards)]
    shards, within = np.divmod(np.random.default_rng(3).permutation(layout.n_examples), layout.examples_per_shard)
    starts = ((within * len(LAYERS) + LAYERS.index(LAYER)) * TOKENS + 1) * VECTOR
    log = os.path.join(os.path.dirname(store.url.rstrip("/")), "extents.fio")
    with open(log, "w", encoding="utf-8") as file:
        file.write("fio version 2 iolog\n")
        file.writelines(f"{path} add\n{path} open\n" for path in paths)
        places = zip(shards, starts, strict=True)
        file.writelines(f"{paths[shard]} read {start} {nbytes}\n" for shard, start in places)
        file.writelines(f"{path} close\n" for path in paths)
    command = ["fio", "--name=x", f"--read_iolog={log}", f"--iodepth={DEPTH}", "--invalidate=0"]
    command += ["--output-format=json", "--direct=1", "--ioengine=libaio"]

    def run() -> float:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]["bw_bytes"] / 1e6

    return run


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
        store = make_loaded(work, args.gib)
        runs: dict[str, Run] = ours(store, args)
        if args.cold:
            runs |= {"fio": fio(store), "fio, again": fio(store)}
        elif args.reference:
            runs |= {f"reference, {kind}": reference(store, args.reference, kind) for kind in ("shuffled", "ordered")}
        runs = {name: run for name, run in runs.items() if any(part in name for part in args.only.split("|"))}
        results: dict[str, list[float]] = {}
        for number in range(args.rounds):
            first = number % max(len(runs), 1)
            for name in [*runs, *runs][first : first + len(runs)]:
                if number >= SLOW_ROUNDS and name.startswith("reference"):
                    continue
                if args.cold:
                    forget(Path(store.url))
                found = runs[name]()
                for row, value in (found if isinstance(found, dict) else {name: found}).items():
                    results.setdefault(row, []).append(value)
        grown = growth()
    finally:
        shutil.rmtree(work)
    report(results, grown, args)


def report(results: dict[str, list[float]], grown: list[dict[str, float]], args: argparse.Namespace) -> None:
    state = "cold" if args.cold else "page cache"
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
        print(json.dumps({"state": state, "mb_per_s": found, "goals": goals, "growth": grown}))  # fmt: skip
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
    print()
    for line in grown:
        print(
            f"{line['rows']:>14,} rows, {line['files']:>10,} files: {line['start_s'] * 1e3:.0f} ms to the first batch in the "
            f"middle ({line['start_cpu_s'] * 1e3:.0f} of CPU), {line['per_batch_s'] * 1e3:.1f} ms a batch "
            f"({line['per_batch_cpu_s'] * 1e3:.1f}), {line['memory_mib']:.1f} MiB traced"
        )


if __name__ == "__main__":
    main()
