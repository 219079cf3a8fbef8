"""How fast `validate(deep=True)` is, against plainly reading the same files; and `validate()` for many shards.

    python benchmarks/validating.py [--gib 1.0] [--folder DIR] [--rounds 3] [--json]

Rounds are interleaved, so that both sides meet the same machine; the ratio of the medians is what counts. "cold" asks the
kernel to forget the files first, so it measures the disk; "warm" measures memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np

from saev_store.documents import Metadata, new_metadata, parse_shards, shards_bytes
from saev_store.transport import open_transport
from saev_store.validation import validate

BLOCK_BYTES = 8 << 20


def make_store(folder: str, n_bytes: int, n_shards: int) -> Metadata:
    """A store of standard normal float32, written without the package's writer; returns its metadata."""
    tokens, d_model = 197, 768
    n_examples = max(n_shards, n_bytes // (tokens * d_model * 4))
    per_shard = -(-n_examples // n_shards)
    metadata = new_metadata(
        family="clip", ckpt="benchmark", layers=[11], content_tokens_per_example=tokens - 1, cls_token=True,
        d_model=d_model, n_examples=n_examples, max_tokens_per_shard=per_shard * tokens,
    )  # fmt: skip
    layout = metadata.layout
    rng = np.random.default_rng(17)
    for shard_idx in range(layout.n_shards):
        rng.standard_normal(layout.used_nbytes(shard_idx) // 4, dtype=np.float32).tofile(
            os.path.join(folder, f"acts{shard_idx:06d}.bin")
        )
    write_documents(folder, metadata)
    return metadata


def write_documents(folder: str, metadata: Metadata) -> None:
    for name, raw in (
        ("metadata.json", metadata.raw),
        ("shards.json", shards_bytes(metadata.layout, metadata.count_key)),
    ):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(raw)


def make_many(folder: str, n_shards: int) -> Metadata:
    """A store of tiny shards, for the quick checks."""
    metadata = new_metadata(
        family="clip", ckpt="benchmark", layers=[11], content_tokens_per_example=4, cls_token=False,
        d_model=8, n_examples=n_shards * 2, max_tokens_per_shard=8,
    )  # fmt: skip
    rng = np.random.default_rng(17)
    for shard_idx in range(n_shards):
        rng.standard_normal(64, dtype=np.float32).tofile(os.path.join(folder, f"acts{shard_idx:06d}.bin"))
    write_documents(folder, metadata)
    return metadata


def deep(folder: str, metadata: Metadata, *, deep: bool = True) -> None:
    transport = open_transport(folder)
    with open(os.path.join(folder, "shards.json"), "rb") as file:
        index = parse_shards(file.read(), metadata, where=folder)
    validate(transport, metadata, index, deep=deep, progress=False).raise_if_bad()
    transport.close()


def plain_read(folder: str, metadata: Metadata) -> None:
    buffer = memoryview(bytearray(BLOCK_BYTES))
    for shard_idx in range(metadata.layout.n_shards):
        fd = os.open(os.path.join(folder, f"acts{shard_idx:06d}.bin"), os.O_RDONLY)
        position = 0
        while n_read := os.preadv(fd, [buffer], position):
            position += n_read
        os.close(fd)


def forget(folder: str) -> None:
    """Write back and drop the cached pages of a folder's files."""
    for name in os.listdir(folder):
        fd = os.open(os.path.join(folder, name), os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the store")
    parser.add_argument("--folder", default=None, help="where to make it (default: the system's temporary folder)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(dir=options.folder)
    many = tempfile.mkdtemp(dir=options.folder)
    result: dict[str, float] = {}
    try:
        metadata = make_store(folder, int(options.gib * 2**30), 8)
        gigabytes = metadata.layout.nbytes / 1e9
        for state in ("cold", "warm"):
            reads, checks = [], []
            for _ in range(options.rounds):
                for times, work in ((reads, plain_read), (checks, deep)):
                    if state == "cold":
                        forget(folder)
                    times.append(timed(lambda work=work: work(folder, metadata)))
            result[f"{state}_read_gb_s"] = gigabytes / statistics.median(reads)
            result[f"{state}_deep_gb_s"] = gigabytes / statistics.median(checks)
            result[f"{state}_ratio"] = statistics.median(reads) / statistics.median(checks)
        small = make_many(many, 1000)
        result["quick_1000_shards_ms"] = 1e3 * statistics.median(
            timed(lambda: deep(many, small, deep=False)) for _ in range(5)
        )
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(many)
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:24} {value:8.2f}")


if __name__ == "__main__":
    main()
