"""Count the functions and files of the package that one operation enters: how much code a reader has to follow.

    python benchmarks/reader_path.py [--root CHECKOUT] [--runs 3] [--only WORD] [--list] [--json]

Operations: open a store, read one vector, read one Zarr chunk, run one shuffled epoch, write a store; each on a local folder and
in an S3 bucket (moto's server in this process, read through obstore). `--root` names the checkout whose package is measured; it
is put in front of `PYTHONPATH` of the child processes. Only public names are used, so the script runs on old checkouts too.

A function is one pair of file and qualified name. Lambdas and comprehensions belong to the function around them; module and
class bodies and methods that `dataclass` generates are not counted. All modules are imported before counting starts. Functions
are counted in all threads. Which waits and retries happen depends on timing, so each operation runs in `--runs` fresh processes,
and the union is reported.

Needs `saev-store[s3,obstore]` (`fast` in early checkouts) and `moto[s3,server]`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import logging
import os
import pkgutil
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

BUCKET = "reader-path"
OPERATIONS = ("open", "vector", "zarr chunk", "shuffled epoch", "write")
PLACES = ("local", "S3")
#: 4 shards of 9.6 MB: shards exceed one part of a multipart upload, and the epoch needs more than one request.
METADATA = {
    "family": "clip", "ckpt": "reader-path", "layers": (1, 5, 11), "content_tokens_per_example": 64, "cls_token": True,
    "d_model": 1024, "n_examples": 48, "max_tokens_per_shard": 12 * 65 * 3,
}  # fmt: skip


class Profile:
    """The functions of one package that were entered while `counting()`, in all threads started after `install()`."""

    def __init__(self, package: Path) -> None:
        self._prefix = f"{package}{os.sep}"
        self._on = False
        self._seen: set[CodeType] = set()

    def install(self) -> None:
        threading.setprofile(self._call)
        sys.setprofile(self._call)

    def _call(self, frame: FrameType, event: str, _: object) -> None:
        if self._on and event == "call":
            self._seen.add(frame.f_code)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        self._on = True
        try:
            yield
        finally:
            self._on = False

    def functions(self) -> set[tuple[str, str]]:
        """(file below the package, qualified name)."""
        found: set[tuple[str, str]] = set()
        for code in set(self._seen):
            if not code.co_filename.startswith(self._prefix) or not code.co_flags & inspect.CO_OPTIMIZED:
                continue
            parts = code.co_qualname.split(".")
            while parts[-1].startswith("<"):  # <lambda>, <listcomp>, <genexpr>, and the <locals> before them
                parts.pop()
                if not parts:
                    break
            found.add((code.co_filename.removeprefix(self._prefix), ".".join(parts) or code.co_qualname))
        return found


def import_all(package: str) -> Path:
    """Import every module that the installed libraries allow; returns the package's folder."""
    top = importlib.import_module(package)
    for module in pkgutil.walk_packages(top.__path__, f"{package}."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(Exception):
                importlib.import_module(module.name)
    return Path(top.__path__[0]).resolve()


def rows(n_examples: int) -> object:
    import numpy as np

    return np.random.default_rng(n_examples).standard_normal((n_examples, 3, 65, 1024), dtype=np.float32)


def write(root: str, options: dict[str, str] | None, *, ckpt: str) -> None:
    from saev_store import ShardStore

    with ShardStore.create(root, METADATA | {"ckpt": ckpt}, storage_options=options) as writer:
        for _ in range(6):
            writer.append(rows(8))


def measure(operation: str, root: str, options: dict[str, str] | None) -> set[tuple[str, str]]:
    """Run in a fresh process: the functions that one operation enters."""
    package = import_all("saev_store")
    profile = Profile(package)
    profile.install()
    from saev_store import ShardStore, new_metadata

    if operation == "write":
        with profile.counting():
            write(root, options, ckpt=f"written by {os.getpid()}")
        return profile.functions()
    url = f"{root}/{new_metadata(**METADATA).hash}"
    if operation == "open":
        with profile.counting():
            ShardStore.open(url, options)
        return profile.functions()
    store = ShardStore.open(url, options)
    if operation == "vector":
        with profile.counting():
            assert store[17, 1, 5].shape == (1024,)
    elif operation == "zarr chunk":
        import zarr

        array = zarr.open_group(store.as_zarr(), mode="r")["activations"]
        chunk = tuple(slice(0, size) for size in array.chunks)
        with profile.counting():
            assert array[chunk].shape == array.chunks
    elif operation == "shuffled epoch":
        from saev_store.loaders import Loader

        with profile.counting(), Loader(store.sel(layer=5), batch_size=256, seed=1) as loader:
            assert sum(len(batch["act"]) for batch in loader) == 48 * 65
    return profile.functions()


@contextlib.contextmanager
def bucket() -> Iterator[dict[str, str]]:
    """An S3 server with an empty bucket; yields the storage options for it."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else one line for each request
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    os.environ |= {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_DEFAULT_REGION": "us-east-1"}
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=BUCKET)
    try:
        yield {"key": "k", "secret": "s", "endpoint_url": endpoint}
    finally:
        server.stop()


def in_child(root: Path, operation: str, place: str, options: dict[str, str] | None) -> set[tuple[str, str]]:
    """The functions that one operation enters in a process of its own, with the package of the checkout `root`."""
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH", ""))))
    answer = subprocess.run(
        [sys.executable, "-P", __file__, "--child", json.dumps([operation, place, options])],
        env={**os.environ, "PYTHONPATH": path}, cwd=root, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    return {(file, name) for file, name in json.loads(answer.splitlines()[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="checkout to measure")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="", help="operations and places whose name contains this")
    parser.add_argument("--list", action="store_true", help="print the functions too")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        warnings.simplefilter("ignore")
        operation, root, options = json.loads(arguments.child)
        found = (
            write(root, options, ckpt=METADATA["ckpt"]) if operation == "prepare" else measure(operation, root, options)
        )
        print(json.dumps(sorted(found or ())))
        return
    root = arguments.root.resolve()
    results: dict[str, set[tuple[str, str]]] = {}
    with tempfile.TemporaryDirectory() as folder, bucket() as options:
        places = {"local": (folder, None), "S3": (f"s3://{BUCKET}", options)}
        for place in places.values():
            in_child(root, "prepare", *place)
        for operation in OPERATIONS:
            for name, place in places.items():
                label = f"{operation}, {name}"
                if arguments.only in label:
                    results[label] = set().union(*(in_child(root, operation, *place) for _ in range(arguments.runs)))
    if arguments.json:
        print(json.dumps({label: sorted(found) for label, found in results.items()}))
        return
    print(f"{'operation':24} {'functions':>9} {'files':>6}")
    for label, found in results.items():
        print(f"{label:24} {len(found):9} {len({file for file, _ in found}):6}")
        for file, name in sorted(found) if arguments.list else ():
            print(f"    {file}: {name}")


if __name__ == "__main__":
    main()
