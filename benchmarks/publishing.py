"""How long finalizing and resuming a store of many shards takes far away: requests, seconds, and how many waits that is.

    python benchmarks/publishing.py [--shards 100] [--latency-ms 30] [--rounds 3]

The server is that of `bare.py`. Two parts with labels are written, then published; of another store one part is written and
taken up again. Shards are tiny: only round trips are measured. "waits" are seconds divided by the latency, so at least what
has to be asked one after the other.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from _far_server import serve

from saev_store.documents import Metadata, new_metadata
from saev_store.transport import Transport, open_transport
from saev_store.writer import create_store, finalize_store

_TOKENS, _D_MODEL = 4, 8


def make(n_shards: int, seed: int) -> Metadata:
    return new_metadata(
        family="clip", ckpt=f"benchmark/{seed}", layers=[0], content_tokens_per_example=_TOKENS, cls_token=False,
        d_model=_D_MODEL, n_examples=2 * n_shards, max_tokens_per_shard=2 * _TOKENS,
    )  # fmt: skip


def write_part(transport: Transport, metadata: Metadata, rank: int) -> None:
    with create_store(transport, metadata, part=(rank, 2), progress=False) as writer:
        acts = np.zeros((writer.n_missing, 1, _TOKENS, _D_MODEL), np.float32)
        writer.append(acts, labels=np.zeros((writer.n_missing, _TOKENS), np.uint8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=100)
    parser.add_argument("--latency-ms", type=float, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    latency_s = args.latency_ms / 1000
    found: dict[str, list[tuple[int, float]]] = {"finalize": [], "resume a part": []}
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder), latency_s) as url:
        options = {"key": "k", "secret": "s", "endpoint_url": url}
        transport = open_transport("s3://bench/shards", options, engine="obstore")

        def measure(what: str, metadata: Metadata) -> None:
            before, began = transport.counters.requests, time.perf_counter()
            if what == "finalize":
                finalize_store(transport, metadata)
            else:
                create_store(transport, metadata, part=(0, 2), resume=True, progress=False).close()
            found[what].append((transport.counters.requests - before, time.perf_counter() - began))

        for seed in range(args.rounds):
            metadata = make(args.shards, seed)
            write_part(transport, metadata, 0)
            measure("resume a part", metadata)
            write_part(transport, metadata, 1)
            measure("finalize", metadata)
    for what, rounds in found.items():
        seconds = statistics.median(s for _, s in rounds)
        print(
            f"{what:14} {args.shards} shards: {rounds[0][0]} requests, {seconds:.2f} s "
            f"({min(s for _, s in rounds):.2f} to {max(s for _, s in rounds):.2f}), {seconds / latency_s:.0f} waits"
        )


if __name__ == "__main__":
    main()
