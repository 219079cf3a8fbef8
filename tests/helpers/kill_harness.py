"""Writes stores in child processes and kills them, with SIGKILL, at random instants until each store is done.

After every kill: nothing that opens as complete unless it is right in every byte. At the end: a folder that is identical,
file by file, to what an uninterrupted write leaves. A script of its own, so that it can fork a warm, single-threaded
parent: `python tests/helpers/kill_harness.py FOLDER --kills 200 --seed 0` prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from kill_children import content, ended, in_child, killed
from kill_harness_oracle import Case, case

from saev_store.errors import IncompleteStoreError, NotFoundError, SaevStoreError
from saev_store.store import ShardStore
from saev_store.transport import open_transport
from saev_store.writer import create_store, finalize_store


def make_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    return case(
        n=int(rng.integers(9, 40)),
        per_shard=int(rng.integers(2, 9)),
        d_model=int(rng.integers(2, 60)),
        content=int(rng.integers(1, 6)),
        labelled=bool(rng.integers(2)),
        pad=bool(rng.integers(2)),
        block_bytes=int(rng.choice([64, 512, 4096])),
        seed=seed,
        protocol=("2.0", "3.0")[seed % 2],
    )


def write(root: str, this: Case, part: tuple[int, int] | None, seed: int) -> None:
    """What a child does: the same call every time, then the rest of the examples."""
    rng = np.random.default_rng(seed)
    transport = open_transport(root, engine="pread" if seed % 2 else "auto")
    with create_store(
        transport,
        this.metadata,
        resume="auto",
        exist_ok=True,
        part=part,
        pad=this.pad,
        block_bytes=this.block_bytes,
        checkpoint_bytes=4 * this.block_bytes,
        on_nonfinite="allow",
        progress=False,
    ) as writer:
        while not writer.complete and writer.next_example < writer.example_range[1]:
            start = writer.next_example
            this.append(writer, start, min(start + int(rng.integers(1, 5)), writer.example_range[1]))
            if rng.random() < 0.2:
                writer.checkpoint()
    if part is not None and part[0] == 0:
        try:
            finalize_store(transport, this.metadata)
        except IncompleteStoreError:
            os._exit(3)  # the other part is not done yet


def check_unfinished(root: str, this: Case) -> None:
    """After a kill: no store, or the whole store."""
    folder = Path(root) / this.name
    if not (folder / "metadata.json").exists():
        try:
            ShardStore.open(folder)
        except (IncompleteStoreError, NotFoundError):
            return
        raise AssertionError("a store that was never published opens")
    found = content(folder)
    this.check({name: data for name, data in found.items() if not name.startswith(".saev_store")})


def finish_one(root: str, this: Case, rng: np.random.Generator, world: int, full_s: float) -> int:
    """Kill and restart until the store is complete; returns the number of kills that met a living process."""
    n_kills, finished = 0, False
    pending = [None] if world == 1 else [(rank, world) for rank in range(world)]
    while not finished:
        # Later attempts get more time, so that every store is finished on the slowest machine too.
        delay_s = float(rng.uniform(0, full_s * (0.4 + 0.05 * n_kills)))
        seed = int(rng.integers(2**31))
        pids = [in_child(partial(write, root, this, part, seed + i)) for i, part in enumerate(pending)]
        time.sleep(delay_s)
        codes = [killed(pid) for pid in pids]
        if any(code not in (0, 3, -signal.SIGKILL) for code in codes):
            raise AssertionError(f"a child failed: {codes}")
        n_kills += sum(code == -signal.SIGKILL for code in codes)
        check_unfinished(root, this)
        finished = all(code == 0 for code in codes)
    return n_kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    n_kills = n_stores = 0
    start_s = time.monotonic()
    while n_kills < args.kills:
        seed = args.seed * 10_000 + n_stores
        this, world = make_case(seed), 2 if n_stores % 3 == 2 else 1
        reference = f"{args.folder}/reference"
        began_s = time.monotonic()
        ended(in_child(partial(write, reference, this, None, seed)))
        full_s = time.monotonic() - began_s
        root = f"{args.folder}/killed"
        n_kills += finish_one(root, this, rng, world, full_s)
        found, expected = content(Path(root) / this.name), content(Path(reference) / this.name)
        if found != expected:
            raise AssertionError(f"store {seed} differs in {sorted(set(found.items()) ^ set(expected.items()))[:3]}")
        this.check(found)
        # The children opened nothing here: a reader in this process sees the truth too.
        if not this.matches(ShardStore.open(Path(root) / this.name)):
            raise AssertionError(f"store {seed} reads wrong vectors or token arrays")
        n_stores += 1
    seconds = round(time.monotonic() - start_s, 1)
    sys.stdout.write(json.dumps({"kills": n_kills, "stores": n_stores, "seconds": seconds}) + "\n")


if __name__ == "__main__":
    try:
        main()
    except SaevStoreError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
