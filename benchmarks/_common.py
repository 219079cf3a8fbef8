"""What every benchmark needs: a store made without our writer, interleaved timing, one table."""

from __future__ import annotations

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
class Line:
    """One comparison: us against something, in the same run, medians of interleaved rounds."""

    what: str
    ours: float
    theirs: float
    unit: str
    against: str
    goal: str
    #: Ours divided by theirs where less is better, theirs divided by ours where more is.
    ratio: float


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


def race(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Median seconds of both, run in turn after one round that is not counted."""
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(rounds + 1)][1:]
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


def forget(folder: Path) -> None:
    """Write back and drop the cached pages of a folder's files: the next read meets the disk."""
    for name in os.listdir(folder):
        fd = os.open(folder / name, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def report(lines: Sequence[Line], facts: Mapping[str, object], *, as_json: bool) -> None:
    """Print all comparisons as one table, or as JSON."""
    if as_json:
        print(json.dumps({"facts": dict(facts), "lines": [asdict(line) for line in lines]}))
        return
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print(f"{'what':44} {'ours':>10} {'theirs':>10} unit   {'ratio':>6}  goal      against")
    for line in lines:
        print(
            f"{line.what:44} {line.ours:10.3f} {line.theirs:10.3f} {line.unit:6} {line.ratio:6.2f}  "
            f"{line.goal:9} {line.against}"
        )
