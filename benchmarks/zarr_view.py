"""How fast the Zarr view reads: against native Zarr with the same chunks, here and over a slow link.

    python benchmarks/zarr_view.py [--gib 0.5] [--rounds 5]

The link is a server on this machine that waits 30 ms before each answer. Both sides read it through fsspec as a web server; as a
bucket ours reads through obstore and FsspecStore through s3fs. With zarr's defaults.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import zarr
from _common import D_MODEL, LAYERS, TOKENS, Line, compare, make_store, report
from _far_server import serve

from saev_store import ShardStore
from saev_store.zarr import ZarrView


def activations(view: ZarrView) -> zarr.Array:
    return zarr.open_group(view, mode="r")["activations"]


def native(root: Path, store: ShardStore, chunks: tuple[int, ...]) -> Path:
    """The same array as zarr-python writes it: uncompressed, the same chunks."""
    path = root / f"native-{'-'.join(map(str, chunks))}.zarr"
    array = zarr.create_array(path, shape=store.shape, chunks=chunks, dtype="float32", compressors=None, fill_value=0)
    array[:] = store[:]
    return path


def compared(
    what: str, ours: zarr.Array, theirs: zarr.Array, key: object, against: str, rounds: int, goal: str
) -> Line:
    found = ours[key]
    np.testing.assert_array_equal(found, theirs[key])
    return compare(what, lambda: ours[key], lambda: theirs[key], found.nbytes, rounds, goal, against=against)


def local(root: Path, folder: Path, rounds: int) -> Iterator[Line]:
    store = ShardStore.open(folder)
    for chunks in ("auto", (1, 1, *store.shape[2:])):
        ours = activations(store.as_zarr(chunks=chunks))
        theirs = zarr.open_array(native(root, store, ours.chunks), mode="r")
        shape = str(ours.chunks).replace(" ", "")
        for what, key in (("full scan", np.s_[:]), ("one layer", np.s_[:, 1])):
            against = "native Zarr, uncompressed, same chunks"
            yield compared(f"{what}, chunks {shape}", ours, theirs, key, against, rounds, "<= 1")


def remote(root: Path, rounds: int) -> Iterator[Line]:
    folder, _ = make_store(root, n_bytes=40 * 6 * TOKENS * D_MODEL * 4, n_shards=4, layers=range(6))
    local_store = ShardStore.open(folder)
    path = native(root, local_store, (1, 1, *local_store.shape[2:]))
    keys = {"one layer of 40 x 6": np.s_[:, 3], "one vector": np.s_[17, 3, 5], "full scan": np.s_[:]}
    with serve(root.parent, 0.03) as server:
        places = {
            "web": (f"{server}/{root.name}", {}),
            "bucket": (f"s3://{root.name}", {"key": "k", "secret": "s", "endpoint_url": server}),
        }
        for place, (url, options) in places.items():
            store = ShardStore.open(f"{url}/{folder.name}", options)
            native_store = zarr.storage.FsspecStore.from_url(
                f"{url}/{path.name}", storage_options=options, read_only=True
            )
            view, theirs = activations(store.as_zarr()), zarr.open_array(native_store, mode="r")
            for what, key in keys.items():
                against = "FsspecStore, native chunks of one layer"
                yield compared(f"far, {place}: {what}", view, theirs, key, against, rounds, "<= 1.05")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.5, help="size of the local store")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        folder, metadata = make_store(root, n_bytes=int(options.gib * 2**30), n_shards=4, layers=LAYERS)
        lines = [*local(root, folder, options.rounds), *remote(root / "far", options.rounds)]
    facts = {"shape": metadata.layout.shape, "cores": os.cpu_count(), "zarr": zarr.__version__}
    report(lines, facts)


if __name__ == "__main__":
    main()
