"""Writing with digests on against a plain write of the same bytes plus fsync, in turns, in one run.

    python benchmarks/writing.py [--gib 1.0] [--rounds 5] [--folder /tmp]

Prints the mean of each, their ratio, and the CPU time that ours takes more for each GiB; the goals are 0.9 or more and 0.35 s or less.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable

import numpy as np

from saev_store.documents import Metadata, new_metadata
from saev_store.transport import open_transport
from saev_store.writer import create_store

BATCH = 64
BLOCK_BYTES = 8 << 20


def metadata_for(gib: float) -> Metadata:
    n_examples = max(BATCH, int(gib * 2**30) // (768 * 4) // 197 // BATCH * BATCH)
    return new_metadata(
        family="clip", ckpt="benchmark", layers=[11], content_tokens_per_example=196, cls_token=True, d_model=768,
        n_examples=n_examples, max_tokens_per_shard=n_examples * 197 // 3,  # four shards, the last one short
    )  # fmt: skip


def plain(folder: str, metadata: Metadata, batch: np.ndarray) -> None:
    """The same files and blocks, from memory that is ready, and one fsync per file."""
    layout = metadata.layout
    block = memoryview(np.resize(batch.reshape(-1).view(np.uint8), BLOCK_BYTES))
    for shard_idx in range(layout.n_shards):
        fd = os.open(f"{folder}/plain{shard_idx}.bin", os.O_CREAT | os.O_WRONLY | os.O_EXCL)
        used = layout.used_nbytes(shard_idx)
        for start in range(0, used, BLOCK_BYTES):
            os.pwrite(fd, block[: min(BLOCK_BYTES, used - start)], start)
        os.fsync(fd)
        os.close(fd)


def ours(folder: str, metadata: Metadata, batch: np.ndarray) -> None:
    with create_store(open_transport(folder), metadata, progress=False) as writer:
        for _ in range(metadata.n_examples // BATCH):
            writer.append(batch)


def timed(
    write: Callable[[str, Metadata, np.ndarray], None], parent: str, metadata: Metadata, batch: np.ndarray
) -> tuple[float, float]:
    """Seconds by the clock, and of this process's CPUs."""
    folder = tempfile.mkdtemp(dir=parent)
    try:
        os.sync()
        start, cpu = time.perf_counter(), time.process_time()
        write(folder, metadata, batch)
        return time.perf_counter() - start, time.process_time() - cpu
    finally:
        shutil.rmtree(folder)
        os.sync()


def compared(folder: str, metadata: Metadata, batch: np.ndarray, rounds: int) -> np.ndarray:
    """(us or plain, round, clock or CPU) in seconds, of an even number of rounds: who begins a round takes turns.

    Some disks write the first GiB after a pause at another speed than the second.
    """
    times = np.empty((2, rounds + rounds % 2, 2))
    timed(plain, folder, metadata, batch)  # the first one pays for growing the file system
    for number in range(times.shape[1]):
        for i in (0, 1) if number % 2 else (1, 0):
            times[i, number] = timed((ours, plain)[i], folder, metadata, batch)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    args = parser.parse_args()
    metadata = metadata_for(args.gib)
    batch = np.random.default_rng(0).normal(size=(BATCH, *metadata.layout.shape[1:])).astype(np.float32)
    times = compared(args.folder, metadata, batch, args.rounds)
    gib = metadata.layout.nbytes / 2**30
    for name, each in (("ours", times[0]), ("plain", times[1])):
        rates = ", ".join(f"{gib / s:.2f}" for s in each[:, 0])
        cpu = np.median(each[:, 1]) / gib
        print(f"{name:6} {gib / each[:, 0].mean():.2f} GiB/s, {cpu:.2f} CPU s/GiB   (each: {rates})")
    ratio = times[1, :, 0].mean() / times[0, :, 0].mean()
    more = (np.median(times[0, :, 1]) - np.median(times[1, :, 1])) / gib
    print(f"ratio  {ratio:.2f} (goal: >= 0.9), {more:.2f} CPU s/GiB more (goal: <= 0.35)")


if __name__ == "__main__":
    main()
