"""What every benchmark needs: a store made without our writer, interleaved timing, one table."""

from __future__ import annotations

import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from saev_store.core.dtypes import StoredDtype, numpy_dtype
from saev_store.documents import Metadata, new_metadata, shards_bytes

#: What the loaders read: one of three layers of ViT-B/16, in batches of so many vectors.
BATCH, D_MODEL, CONTENT, TOKENS, LAYERS, LAYER = 16_384, 768, 196, 197, (2, 5, 11), 5
VECTOR = D_MODEL * 4
#: Nobody's epoch is waited for longer.
AT_MOST_S = 15.0


@dataclass(frozen=True)
class Rate:
    """Median seconds by the clock and of this process's CPUs; the spread is (longest - shortest) / median by the clock."""

    wall_s: float
    cpu_s: float
    spread: float


@dataclass(frozen=True)
class Line:
    """One comparison: us against something, in the same run, medians of interleaved rounds."""

    what: str
    ours: float
    theirs: float
    unit: str
    against: str
    goal: str
    #: Of speed, or of time where the goal is an upper limit.
    ratio: float
    #: CPU seconds for each GB: ours and theirs.
    cpu: tuple[float, float] | None = None
    cpu_goal: str = ""
    spread: float = 0.0


def make_store(
    root: Path, *, n_bytes: int, n_shards: int, layers: Sequence[int] = (11,), tokens: int = 196, d_model: int = 768,
    dtype: StoredDtype = "float32", protocol: str | None = None,
) -> tuple[Path, Metadata]:  # fmt: skip
    """A store of standard normal numbers with CLS, written with NumPy alone; returns its folder and document.

    `n_bytes` are those of float32: of another dtype it has the same numbers, rounded.
    """
    per_example = (tokens + 1) * d_model * 4 * len(layers)
    n_examples = max(n_shards, n_bytes // per_example)
    capacity = -(-n_examples // n_shards)
    metadata = new_metadata(
        family="clip", ckpt="benchmark", layers=list(layers), content_tokens_per_example=tokens, cls_token=True,
        d_model=d_model, n_examples=n_examples, max_tokens_per_shard=capacity * (tokens + 1) * len(layers), dtype=dtype,
        protocol=protocol,
    )  # fmt: skip
    folder = root / metadata.hash
    folder.mkdir(parents=True)
    layout, rng = metadata.layout, np.random.default_rng(17)
    for shard_idx in range(layout.n_shards):
        path = folder / f"acts{shard_idx:06d}.bin"
        n_numbers = layout.used_nbytes(shard_idx) // layout.itemsize
        rng.standard_normal(n_numbers, dtype=np.float32).astype(numpy_dtype(dtype), copy=False).tofile(path)
        os.truncate(path, layout.shard_nbytes)
    (folder / "metadata.json").write_bytes(metadata.raw)
    (folder / "shards.json").write_bytes(shards_bytes(layout, metadata.count_key))
    return folder, metadata


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def race(
    runs: Mapping[str, Callable[[], object]], rounds: int, before: Callable[[], object] = gc.collect
) -> list[Rate]:
    """Every run in turn, forwards and backwards, after one round that is not counted; `before` each one, unmeasured."""
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name in list(runs)[:: 1 if number % 2 else -1]:
            before()
            cpu_s, started = time.process_time(), time.perf_counter()
            runs[name]()
            took = time.perf_counter() - started, time.process_time() - cpu_s
            if number:
                seen[name].append(took)
    found = list[Rate]()
    for pairs in seen.values():
        wall, cpu = zip(*pairs, strict=True)
        middle = statistics.median(wall)
        found.append(Rate(middle, statistics.median(cpu), (max(wall) - min(wall)) / middle))
    return found


def compare(
    what: str, ours: Callable[[], object], theirs: Callable[[], object], nbytes: int, rounds: int, goal: str = "",
    cpu_goal: str = "", *, against: str = "the bare peer", before: Callable[[], object] = gc.collect,
) -> Line:  # fmt: skip
    """Both move `nbytes`; rates in MB/s."""
    us, them = race({"ours": ours, "theirs": theirs}, rounds, before)
    ratio = us.wall_s / them.wall_s if goal.startswith("<=") else them.wall_s / us.wall_s
    cpu = us.cpu_s / nbytes * 1e9, them.cpu_s / nbytes * 1e9
    rates = nbytes / us.wall_s / 1e6, nbytes / them.wall_s / 1e6
    return Line(what, *rates, "MB/s", against, goal, ratio, cpu, cpu_goal, max(us.spread, them.spread))


def forget(folder: Path) -> None:
    """Write back and drop the cached pages of a folder's files: the next read meets the disk."""
    for name in os.listdir(folder):
        fd = os.open(folder / name, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def report(lines: Sequence[Line], facts: Mapping[str, object], *, as_json: bool = False) -> None:
    """Print all comparisons as one table, or as JSON."""
    if as_json:
        print(json.dumps({"facts": dict(facts), "lines": [asdict(line) for line in lines]}))
        return
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print(
        f"{'what':44} {'ours':>9} {'theirs':>9} unit   {'ratio':>5} {'goal':>7} {'CPU s/GB':>9} {'theirs':>6} {'ratio':>5} {'goal':>6} spread against"
    )
    for line in lines:
        text = f"{line.what:44} {line.ours:9.4g} {line.theirs:9.4g} {line.unit:6} {line.ratio:5.2f} {line.goal:>7} "
        if line.cpu:
            ours, theirs = line.cpu
            text += f"{ours:9.2f} {theirs:6.2f} {ours / theirs:5.2f} {line.cpu_goal:>6} {line.spread:6.0%} "
        print(text + line.against)
