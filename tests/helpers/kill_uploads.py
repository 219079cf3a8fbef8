"""Writes stores to a bucket in child processes and kills them, with SIGKILL, at random instants until each is done.

After every kill: nothing opens as complete unless it is right in every byte. At the end: a folder that is identical, file
by file, to what an uninterrupted write leaves, and no upload that `clean` does not remove. A script of its own, so that it can fork a warm,
single-threaded parent that never speaks to the server itself:
`python tests/helpers/kill_uploads.py BUCKET OPTIONS ENGINE --behind OPTIONS --kills 50` prints one line of JSON; OPTIONS are JSON, too,
the second ones s3fs's for the same bucket, or null.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

# What the children need is imported once, here; nothing is opened.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # it would ask what no stand-in answers
import obstore  # noqa: F401 (warms the children)
import s3fs
from kill_children import ended, killed
from kill_children import in_child as strict_child
from kill_harness_oracle import Case, case

with contextlib.suppress(ImportError):
    import gcsfs  # noqa: F401 (the same)

import saev_store.transport.fsspec
import saev_store.transport.obstore  # noqa: F401 (warms the children)
from saev_store.errors import IncompleteStoreError, NotFoundError
from saev_store.store import ShardStore
from saev_store.transport import obstore as _sink
from saev_store.transport import open_transport
from saev_store.writer import clean_leftovers, create_store

BLOCK_BYTES = 16 << 10
#: A part that was not kept is told in a warning.
in_child = partial(strict_child, on_warning="ignore")


def make_case(seed: int) -> Case:
    """Two or three shards of two to six parts each."""
    rng = np.random.default_rng(seed)
    per_shard, protocol = int(rng.integers(8, 24)), ("2.0", "3.0")[seed % 2]
    return case(
        n=int(per_shard * rng.uniform(1.2, 2.8)),
        per_shard=per_shard,
        d_model=700 if protocol == "2.0" else 1400,  # as many bytes
        labelled=bool(rng.integers(2)),
        pad=False,
        block_bytes=BLOCK_BYTES,
        seed=seed,
        protocol=protocol,
    )


def write(url: str, options: dict, engine: str, this: Case, seed: int) -> None:
    """What a child does: the same call every time, then the rest of the examples."""
    rng = np.random.default_rng(seed)
    with create_store(
        open_transport(url, options, engine=engine),
        this.metadata,
        resume="auto",
        exist_ok=True,
        block_bytes=BLOCK_BYTES,
        checkpoint_bytes=8 * BLOCK_BYTES,
        on_nonfinite="allow",
        progress=False,
    ) as writer:
        while not writer.complete and writer.next_example < writer.example_range[1]:
            start = writer.next_example
            this.append(writer, start, min(start + int(rng.integers(1, 5)), writer.example_range[1]))


def check_now(url: str, options: dict, engine: str, this: Case) -> None:
    """No store, or the whole store."""
    try:
        ShardStore.open(f"{url}/{this.name}", options, engine=engine)
    except (IncompleteStoreError, NotFoundError):
        return
    check_done(url, options, engine, this)


def check_done(url: str, options: dict, engine: str, this: Case) -> None:
    """The store is there, bit for bit."""
    folder = open_transport(url, options, engine=engine).at(this.name)
    names = [entry.path for entry in folder.list() if not entry.is_dir]
    this.check({name: folder.read(name) for name in names})


def check_clean(url: str, options: dict, behind: dict | None) -> None:
    """Nothing hidden is left, and what killed uploads left `clean` removes."""
    root = open_transport(url, options)
    hidden = [entry.path for entry in root.list() if entry.is_dir and ".saev_store" in str(root.at(entry.path).list())]
    if hidden:
        raise AssertionError(f"left over: {hidden}")
    if behind is None:  # uploads cannot be listed there
        return
    bucket = url.partition("://")[2]
    clean_leftovers(open_transport(f"s3://{bucket}", behind, engine="fsspec"), older_than_s=0)
    files, left = s3fs.S3FileSystem(**behind), list[object]()
    for _ in range(50):  # Swift lists what was aborted a little longer
        left = files.call_s3("list_multipart_uploads", Bucket=bucket).get("Uploads") or []
        if not left:
            return
        time.sleep(0.1)
    raise AssertionError(f"left over: {left}")


def wait(pid: int, *, doing: str) -> None:
    if ended(pid):
        raise AssertionError(f"{doing} failed, see above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bucket")
    parser.add_argument("options", type=json.loads)
    parser.add_argument("engine")
    parser.add_argument("--behind", type=json.loads, required=True)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    _sink.REQUEST_BYTES = 4 * BLOCK_BYTES  # many parts, quick ones
    url, options = args.bucket, args.options
    rng = np.random.default_rng(args.seed)
    begun_s, n_kills, n_stores = time.monotonic(), 0, 0
    this = make_case(args.seed * 10_000)
    # How long it takes undisturbed decides at what instants it is killed.
    wait(in_child(lambda: write(f"{url}/undisturbed", options, args.engine, this, 0)), doing="writing")
    # On a busy machine the first write is no measure; later attempts get more time anyway.
    full_s = min(time.monotonic() - begun_s, 5.0)
    while n_kills < args.kills:
        this = make_case(args.seed * 10_000 + n_stores)
        n_stores += 1
        n_tries = 0
        while True:
            pid = in_child(lambda this=this, n=n_tries: write(url, options, args.engine, this, n))
            # Later attempts get more time, so that every store is finished on the slowest machine too.
            time.sleep(float(rng.uniform(0.1, 1.0)) * full_s * (0.6 + 0.1 * n_tries))
            code = killed(pid)
            if code not in (0, -signal.SIGKILL):
                raise AssertionError(f"a child failed: {code}")
            n_tries += 1
            if code == 0:
                break
            n_kills += 1
            if n_kills % 5 == 0:
                wait(
                    in_child(lambda this=this: check_now(url, options, args.engine, this)), doing="looking after a kill"
                )
        wait(in_child(lambda this=this: check_done(url, options, args.engine, this)), doing="checking")
        wait(in_child(lambda: check_clean(url, options, args.behind)), doing="looking for what is left over")
    found = {"kills": n_kills, "stores": n_stores, "seconds": round(time.monotonic() - begun_s, 1)}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
