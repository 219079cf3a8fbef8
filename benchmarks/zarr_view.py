"""How fast the Zarr view reads: against native Zarr with the same chunks, bare maps, NumPy loops, and over a slow link.

    python benchmarks/zarr_view.py [--gib 0.5] [--folder DIR] [--rounds 5] [--latency-ms 30] [--json]

The link is a server on this machine that waits before each answer. Both sides read it through fsspec as a web server; as a bucket
ours reads through obstore and FsspecStore through s3fs. With zarr's defaults.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import zarr
from _common import Line, make_store, race, report
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


def local(root: Path, folder: Path, rounds: int) -> list[Line]:
    store = ShardStore.open(folder)
    layout = store.layout
    maps = [
        np.memmap(folder / f"acts{i:06d}.bin", "<f4", "r", shape=(layout.examples_in(i), *layout.shape[1:]))
        for i in range(layout.n_shards)
    ]
    lines = []
    for chunks in ("auto", (1, 1, *layout.shape[2:])):
        ours = activations(store.as_zarr(chunks=chunks))
        theirs = zarr.open_array(native(root, store, ours.chunks), mode="r")
        np.testing.assert_array_equal(ours[:3], theirs[:3])
        shape = str(ours.chunks).replace(" ", "")
        for what, key in (("full scan", np.s_[:]), ("one layer", np.s_[:, 1])):
            pair = race(lambda a=ours, k=key: a[k], lambda a=theirs, k=key: a[k], rounds)
            against = "native Zarr, uncompressed, same chunks"
            lines.append(
                Line(f"{what}, chunks {shape}", pair[0] * 1e3, pair[1] * 1e3, "ms", against, "<= 1", pair[0] / pair[1])
            )
            if chunks == "auto":
                bare = functools.partial(lambda key: np.concatenate([part[key] for part in maps]), key)
                pair = race(lambda a=ours, k=key: a[k], bare, rounds)
                lines.append(
                    Line(
                        f"{what}, chunks {shape}",
                        pair[0] * 1e3,
                        pair[1] * 1e3,
                        "ms",
                        "np.memmap",
                        "",
                        pair[0] / pair[1],
                    )
                )
    ours = activations(store.as_zarr())
    tracemalloc.start()
    nbytes = ours[:].nbytes
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    lines.append(
        Line("peak memory of a full scan", peak / 2**20, nbytes / 2**20, "MiB", "the output", "<= 1.05", peak / nbytes)
    )
    return [*lines, *dask_means(store, maps, rounds)]


def dask_means(store: ShardStore, maps: list[np.memmap], rounds: int) -> list[Line]:
    def loop() -> np.ndarray:
        total = np.zeros(store.shape[1:], dtype=np.float64)
        for part in maps:
            for start in range(0, len(part), 32):
                total += part[start : start + 32].sum(axis=0, dtype=np.float64)
        return total / len(store)

    blocks, dataset = store.as_dask(), store.as_xarray(chunks={})
    np.testing.assert_allclose(blocks.mean(axis=0).compute(), loop(), atol=1e-4)
    lines = []
    for name, work in (
        ("dask mean over examples, as_dask()", lambda: blocks.mean(axis=0, dtype=np.float64).compute()),
        (
            "dask mean over examples, as_xarray()",
            lambda: dataset.activations.mean("example", dtype=np.float64, skipna=False).compute(),
        ),
    ):
        pair = race(work, loop, rounds)
        lines.append(Line(name, pair[0] * 1e3, pair[1] * 1e3, "ms", "a NumPy loop over maps", "", pair[0] / pair[1]))
    return lines


def remote(root: Path, latency_s: float, rounds: int) -> list[Line]:
    folder, _ = make_store(root / "far", n_bytes=40 * 6 * 197 * 768 * 4, n_shards=4, layers=range(6))
    local_store = ShardStore.open(folder)
    path = native(root / "far", local_store, (1, 1, *local_store.shape[2:]))
    lines = []
    with serve(root, latency_s) as server:
        places = {
            "web": (f"{server}/far", {}),
            "bucket": ("s3://far", {"key": "k", "secret": "s", "endpoint_url": server}),
        }
        for place, (url, options) in places.items():
            store = ShardStore.open(f"{url}/{folder.name}", options)
            native_store = zarr.storage.FsspecStore.from_url(
                f"{url}/{path.name}", storage_options=options, read_only=True
            )
            lines += far_lines(place, store, zarr.open_array(native_store, mode="r"), rounds)
    return lines


def far_lines(place: str, store: ShardStore, theirs: zarr.Array, rounds: int) -> list[Line]:
    against = "FsspecStore, native chunks of one layer"
    view = activations(store.as_zarr())
    keys = {"one layer of 40 x 6": np.s_[:, 3], "one vector": np.s_[17, 3, 5], "full scan": np.s_[:]}
    lines = []
    for what, key in keys.items():
        np.testing.assert_array_equal(view[key], theirs[key])
        pair = race(lambda k=key: view[k], lambda k=key: theirs[k], rounds)
        lines.append(
            Line(f"far, {place}: {what}", pair[0] * 1e3, pair[1] * 1e3, "ms", against, "<= 1", pair[0] / pair[1])
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.5, help="size of the local store")
    parser.add_argument("--folder", default=None, help="where to make it (default: the system's temporary folder)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--latency-ms", type=float, default=30.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        folder, metadata = make_store(root, n_bytes=int(options.gib * 2**30), n_shards=4, layers=(2, 5, 11))
        lines = [
            *local(root, folder, options.rounds),
            *remote(root, options.latency_ms / 1e3, options.rounds),
        ]
        facts = {
            "shape": metadata.layout.shape, "bytes": metadata.layout.nbytes, "cores": os.cpu_count(),
            "zarr": zarr.__version__, "latency_ms": options.latency_ms,
        }  # fmt: skip
        report(lines, facts, as_json=options.json)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
