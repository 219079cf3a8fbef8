"""Reads exports as somebody would who has never heard of this package: a script, run with a list of jobs as JSON.

    python export_reader.py '[{"format": "kerchunk", "out": "…", "truth": "….npz", …}]'

Prints, for each job, what was wrong: an empty list, or names of arrays and the first error.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from importlib.abc import MetaPathFinder

import numpy as np


class Blocker(MetaPathFinder):
    """Importing the package is an error, however it is tried."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] == "saev_store":
            raise ImportError("saev_store is blocked")


sys.meta_path.insert(0, Blocker())


def forget_entry_points():
    """Where the package is installed, newer zarr would load its data type; somebody without the package has no such entry."""
    import zarr.dtype

    pending = zarr.dtype.data_type_registry._lazy_load_list
    pending[:] = [entry for entry in pending if not entry.value.startswith("saev_store.")]


def kerchunk_zarr(job):
    import fsspec
    import zarr

    fs = fsspec.filesystem("reference", fo=job["out"], asynchronous=True, **job.get("reference", {}))
    group = zarr.open_group(zarr.storage.FsspecStore(fs, read_only=True, path=""), mode="r", zarr_format=2)
    return {name: array[...] for name, array in group.arrays()}


def kerchunk_xarray(job):
    import fsspec
    import xarray as xr

    # What `engine="kerchunk"` does, without having to install kerchunk.
    fs = fsspec.filesystem("reference", fo=job["out"], asynchronous=True, **job.get("reference", {}))
    import zarr

    found = xr.open_zarr(zarr.storage.FsspecStore(fs, read_only=True, path=""), chunks=None, zarr_format=2)
    assert found.activations.dims == ("example", "layer", "token", "d_model")
    assert set(found.coords) >= {"layer", "token"}
    return {name: variable.values for name, variable in found.variables.items()}


def icechunk(job):
    import icechunk as ic
    import xarray as xr

    storage = ic.local_filesystem_storage(job["out"])
    config = ic.Repository.fetch_config(storage)
    allowed = getattr(ic, "LocalFileSystemAccess", None) or getattr(ic.credentials, "LocalFileSystemAccess", None)
    if "credentials" in job:
        allowed = ic.s3_credentials(**job["credentials"])
    prefixes = dict.fromkeys(config.virtual_chunk_containers, allowed)
    if "credentials" in job:
        prefixes = ic.containers_credentials(prefixes)
    session = ic.Repository.open(storage, authorize_virtual_chunk_access=prefixes).readonly_session("main")
    found = xr.open_zarr(session.store, consolidated=False, chunks=None)
    assert found.activations.dims == ("example", "layer", "token", "d_model")
    return {name: variable.values for name, variable in found.variables.items()}


def tensorstore(job):
    import tensorstore as ts

    with open(job["out"], encoding="utf-8") as file:
        specs = json.load(file)
    arrays = {name: ts.open(spec, read=True).result() for name, spec in specs.items()}
    assert arrays["activations"].domain.labels == ("example", "layer", "token", "d_model")
    return {name: array.read().result() for name, array in arrays.items()}


READERS = {
    "kerchunk": [kerchunk_zarr, kerchunk_xarray],
    "kerchunk-parquet": [kerchunk_zarr, kerchunk_xarray],
    "icechunk": [icechunk],
    "tensorstore": [tensorstore],
}


def wrong(job) -> list[str]:
    """What does not hold for one export."""
    truth = dict(np.load(job["truth"]))
    problems = []
    for read in READERS[job["format"]]:
        try:
            found = read(job)
        except Exception as error:
            problems.append(f"{read.__name__}: {type(error).__name__}: {error} <- {error.__cause__}")
            continue
        if found.keys() != truth.keys():
            problems.append(f"{read.__name__}: {sorted(found)} instead of {sorted(truth)}")
        for name in found.keys() & truth.keys():
            # Not array_equal: the truth has NaNs.
            same = found[name].dtype == truth[name].dtype and found[name].shape == truth[name].shape
            if not same or not np.array_equal(found[name], truth[name], equal_nan=truth[name].dtype.kind == "f"):
                problems.append(f"{read.__name__}: {name} differs: {found[name].dtype} {found[name].shape}")
    return problems


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    forget_entry_points()
    sys.stdout.write(json.dumps([wrong(job) for job in json.loads(sys.argv[1])]) + "\n")
    sys.stdout.flush()
    # Without the interpreter's teardown: threads of icechunk 2.3.0 are still running then, and end about one run in 200
    # of this script by SIGSEGV after everything was read, judged and printed (this package is not loaded here).
    os._exit(0)
