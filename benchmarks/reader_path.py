"""Count the functions and files of the package that one operation enters: how much code a reader has to follow.

    python benchmarks/reader_path.py [--runs 3] [--only WORD] [--list]

Operations: open a store, read one vector, read one Zarr chunk, run one shuffled epoch, write a store; each in a local folder and in
a bucket (`_far_server.py`, read through obstore).

A function is one pair of file and qualified name. Lambdas and comprehensions belong to the function around them; module and
class bodies and methods that `dataclass` generates are not counted. All modules are imported before counting starts. Functions
are counted in all threads. Which waits and retries happen depends on timing, so each operation runs in `--runs` fresh processes,
and the union is reported.

Needs `saev-store[obstore]`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import os
import pkgutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import CodeType, FrameType

import numpy as np
from _far_server import serve

from saev_store import ShardStore, new_metadata

Options = dict[str, object] | None
#: 4 shards of 9.6 MB: shards exceed one part of a multipart upload, and the epoch needs more than one request.
METADATA = {
    "family": "clip", "ckpt": "reader-path", "layers": (1, 5, 11), "content_tokens_per_example": 64, "cls_token": True,
    "d_model": 1024, "n_examples": 48, "max_tokens_per_shard": 12 * 65 * 3,
}  # fmt: skip


def import_all(package: str) -> Path:
    """Import every module that the installed libraries allow; returns the package's folder."""
    top = importlib.import_module(package)
    for module in pkgutil.walk_packages(top.__path__, f"{package}."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(Exception):
                importlib.import_module(module.name)
    return Path(top.__path__[0]).resolve()


def functions(codes: set[CodeType], package: Path) -> set[tuple[str, str]]:
    """(file below the package, qualified name)."""
    found: set[tuple[str, str]] = set()
    for code in codes:
        path = Path(code.co_filename)
        if not path.is_relative_to(package) or not code.co_flags & inspect.CO_OPTIMIZED:
            continue
        parts = code.co_qualname.split(".")
        while len(parts) > 1 and parts[-1].startswith(
            "<"
        ):  # <lambda>, <listcomp>, <genexpr>, and the <locals> before them
            parts.pop()
        found.add((str(path.relative_to(package)), ".".join(parts)))
    return found


def open_store(url: str, options: Options) -> Callable[[], object]:
    return lambda: ShardStore.open(url, options)


def vector(url: str, options: Options) -> Callable[[], object]:
    store = ShardStore.open(url, options)
    return lambda: store[17, 1, 5]


def zarr_chunk(url: str, options: Options) -> Callable[[], object]:
    import zarr

    array = zarr.open_group(ShardStore.open(url, options).as_zarr(), mode="r")["activations"]
    return lambda: array[tuple(slice(0, size) for size in array.chunks)]


def shuffled_epoch(url: str, options: Options) -> Callable[[], object]:
    from saev_store.loaders import Loader

    store = ShardStore.open(url, options)

    def epoch() -> None:
        with Loader(store.sel(layer=5), batch_size=256, seed=1) as loader:
            assert sum(len(batch["act"]) for batch in loader) == 48 * 65

    return epoch


def write(root: str, metadata: dict[str, object], options: Options = None) -> None:
    acts = np.random.default_rng(1).standard_normal((8, 3, 65, 1024), np.float32)
    with ShardStore.create(root, metadata, storage_options=options) as writer:
        for _ in range(6):
            writer.append(acts)


def write_another(url: str, options: Options) -> Callable[[], object]:
    return lambda: write(url.rpartition("/")[0], METADATA | {"ckpt": f"written by {os.getpid()}"}, options)


OPERATIONS = {
    "open": open_store, "vector": vector, "zarr chunk": zarr_chunk, "shuffled epoch": shuffled_epoch, "write": write_another,
}  # fmt: skip


def measure(operation: str, url: str, options: Options) -> set[tuple[str, str]]:
    """The functions that one operation enters; in a fresh process."""
    warnings.simplefilter("ignore")
    package = import_all("saev_store")
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    run = OPERATIONS[operation](url, options)
    seen.clear()
    run()
    return functions(seen.copy(), package)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="", help="operations and places whose name contains this")
    parser.add_argument("--list", action="store_true", help="print the functions too")
    arguments = parser.parse_args()
    print(f"{'operation':24} {'functions':>9} {'files':>6}")
    with (
        tempfile.TemporaryDirectory() as root,
        serve(Path(root), 0) as endpoint,
        ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes,
    ):
        digest = new_metadata(**METADATA).hash
        options = {"key": "k", "secret": "s", "endpoint_url": endpoint}
        places = {"local": (f"{root}/b/{digest}", None), "S3": (f"s3://b/{digest}", options)}
        write(f"{root}/b", METADATA)
        for operation in OPERATIONS:
            for name, place in places.items():
                label = f"{operation}, {name}"
                if arguments.only not in label:
                    continue
                runs = [processes.submit(measure, operation, *place) for _ in range(arguments.runs)]
                found = set().union(*(run.result() for run in runs))
                print(f"{label:24} {len(found):9} {len({file for file, _ in found}):6}")
                for file, function in sorted(found) if arguments.list else ():
                    print(f"    {file}: {function}")


if __name__ == "__main__":
    main()
