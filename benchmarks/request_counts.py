"""How many requests and bytes each way of reading costs, per access pattern: the table of docs/zarr-view.md.

    python benchmarks/request_counts.py [--examples 40] [--markdown]

Nothing is timed: the files are zeros in memory behind the price of a link (a gap of up to 1 MiB is cheaper than a request).
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import zarr
from _transports import CountingTransport, LatencyTransport
from zarr.abc.store import Store

from saev_store import SaevStoreWarning, ShardStore, new_metadata
from saev_store.documents import Metadata, shards_bytes
from saev_store.transport import MemoryTransport

PATTERNS = {
    "one layer": np.s_[:, 3],
    "one example": np.s_[17],
    "one vector": np.s_[17, 3, 5],
    "full scan": np.s_[:],
}


class Zeros(MemoryTransport):
    """Shards that are zeros, made when they are asked for; the system gives them without touching memory."""

    def __init__(self, files: dict[str, bytes], shard_nbytes: int) -> None:
        super().__init__(files)
        self._shard_nbytes = shard_nbytes

    def size(self, path: str) -> int:
        return self._shard_nbytes if path.endswith(".bin") and path.startswith("acts") else super().size(path)

    def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> list[memoryview]:
        del path
        return [memoryview(np.zeros(end - start, dtype=np.uint8)) for start, end in zip(starts, ends, strict=True)]


def make(n_examples: int) -> Metadata:
    return new_metadata(
        family="clip", ckpt="ViT-B/16", layers=range(6), content_tokens_per_example=196, cls_token=True, d_model=768,
        n_examples=n_examples, max_tokens_per_shard=10 * 197 * 6,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=40)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    metadata = make(options.examples)
    layout = metadata.layout
    files = {"metadata.json": metadata.raw, "shards.json": shards_bytes(layout, metadata.count_key)}
    transport = CountingTransport(LatencyTransport(Zeros(files, layout.shard_nbytes), 1e-6, float(1 << 40)))
    warnings.simplefilter("ignore", SaevStoreWarning)  # what is in memory has no name
    store = ShardStore.open(transport)
    for start in range(0, len(store), layout.examples_per_shard):
        store[start, 0, 0]  # each shard's size is asked for once, when it is first touched

    def through_zarr(chunks: tuple[int, ...], *, sharded: bool) -> Callable[[object], object]:
        return zarr.open_group(store.as_zarr(chunks=chunks, sharded=sharded), mode="r")["activations"].__getitem__

    plane, example = (1, 1, 197, 768), (1, 6, 197, 768)
    ways = {
        f"Zarr, chunks {plane}": through_zarr(plane, sharded=False),
        f"Zarr, chunks {example}": through_zarr(example, sharded=False),
        f"Zarr, chunks {(10, *example[1:])}": through_zarr((10, *example[1:]), sharded=False),
    }
    if hasattr(Store, "get_ranges"):
        ways[f"Zarr, shards of {plane}"] = through_zarr(plane, sharded=True)
        ways[f"Zarr, shards of {(1, 1, 1, 768)}"] = through_zarr((1, 1, 1, 768), sharded=True)
    dask = store.as_dask()
    ways["`store[…]`"] = lambda key: store[key]
    ways["`store.as_dask()`"] = lambda key: dask[key].compute()
    rows = []
    for way, read in ways.items():
        row = [way]
        for key in PATTERNS.values():
            transport.reset()
            read(key)
            found = transport.counters
            row.append(f"{found.requests:,} / {found.bytes_read / 1e6:,.3f}")
        rows.append(row)
    head = ["requests / MB", *PATTERNS]
    if options.markdown:
        print("\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)))
        return
    print(f"shape {layout.shape}, shards of {layout.examples_per_shard} examples, zarr {zarr.__version__}")
    for row in (head, *rows):
        print(f"{row[0]:40}", *(f"{cell:>16}" for cell in row[1:]))


if __name__ == "__main__":
    main()
