"""Writing with digests on against a plain write of the same bytes plus fsync, in turns, in one run.

    python benchmarks/writing.py [--gib 1.0] [--rounds 6] [--folder /tmp]

The goals are 0.9 of the speed or more, and at most 0.35 s of CPU more for each GiB. Rounds are best even in number: some disks write
the first GiB after a pause at another speed than the second.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from _common import CONTENT, D_MODEL, TOKENS, compare, report

from saev_store import ShardStore, new_metadata
from saev_store.documents import Metadata

BATCH = 64
BLOCK_BYTES = 8 << 20


def plain(folder: Path, metadata: Metadata, batch: np.ndarray) -> None:
    """The same files and blocks, from memory that is ready, and one fsync per file."""
    layout = metadata.layout
    block = memoryview(np.resize(batch.reshape(-1).view(np.uint8), BLOCK_BYTES))
    folder.mkdir()
    for shard_idx in range(layout.n_shards):
        fd = os.open(folder / f"plain{shard_idx}.bin", os.O_CREAT | os.O_WRONLY | os.O_EXCL)
        used = layout.used_nbytes(shard_idx)
        for start in range(0, used, BLOCK_BYTES):
            os.pwrite(fd, block[: min(BLOCK_BYTES, used - start)], start)
        os.fsync(fd)
        os.close(fd)


def ours(folder: Path, metadata: Metadata, batch: np.ndarray) -> None:
    with ShardStore.create(folder, metadata, progress=False) as writer:
        for _ in range(metadata.n_examples // BATCH):
            writer.append(batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--folder")
    args = parser.parse_args()
    n_examples = max(BATCH, int(args.gib * 2**30) // (D_MODEL * 4) // TOKENS // BATCH * BATCH)
    metadata = new_metadata(
        family="clip", ckpt="benchmark", layers=[11], content_tokens_per_example=CONTENT, cls_token=True, d_model=D_MODEL,
        n_examples=n_examples, max_tokens_per_shard=n_examples * TOKENS // 3,  # four shards, the last one short
    )  # fmt: skip
    batch = np.random.default_rng(0).standard_normal((BATCH, *metadata.layout.shape[1:]), np.float32)
    with tempfile.TemporaryDirectory(dir=args.folder) as root:
        folder = Path(root, "written")

        def clean_up() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            os.sync()

        line = compare(
            f"{args.gib:g} GiB with digests", lambda: ours(folder, metadata, batch), lambda: plain(folder, metadata, batch),
            metadata.layout.nbytes, args.rounds, ">= 0.9", against="pwrite of the same blocks, then fsync", before=clean_up,
        )  # fmt: skip
    us, them = line.cpu
    more = (us - them) * 2**30 / 1e9
    report([line], {"CPU s/GiB more": f"{more:.2f} (goal: <= 0.35)", "load": os.getloadavg()[0]})


if __name__ == "__main__":
    main()
