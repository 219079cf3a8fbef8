"""A process that scans tars: names on standard input, one JSON line per tar on standard output.

A program rather than a fork or a pool: the caller's main module is not imported again, and its threads and clients are left
alone.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any, cast

from saev_store import errors
from saev_store.errors import SaevStoreError
from saev_store.sources.energon.tar_scan import ScannedShard, scan_shard
from saev_store.transport import open_transport


def main(root: str) -> None:
    """Scan the tars below `root` that the first line of standard input lists."""
    transport = open_transport(root)
    line = sys.stdin.readline()
    for shard in json.loads(line) if line.endswith("\n") else ():  # else the parent was killed
        answer: dict[str, object] = {}
        try:
            answer["scanned"] = dataclasses.astuple(scan_shard(transport, shard))
        except SaevStoreError as error:
            answer["error"] = [type(error).__name__, error.message, error.where, error.remedy]
        except Exception as error:
            answer["error"] = ["SaevStoreError", f"{type(error).__name__}: {error}", shard, None]
        try:
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
        except BrokenPipeError:  # the parent was killed
            os._exit(1)


def result_of(line: str) -> ScannedShard | SaevStoreError:
    """Parse a worker's answer."""
    answer = cast("dict[str, list[Any]]", json.loads(line))
    if "scanned" in answer:
        shard, nbytes, end, oddities, samples = answer["scanned"]
        return ScannedShard(shard, nbytes, end, tuple(oddities), samples)
    name, message, where, remedy = answer["error"]
    kind = getattr(errors, name, SaevStoreError)
    if not isinstance(kind, type) or not issubclass(kind, SaevStoreError):
        kind = SaevStoreError
    return kind(message, where=where, remedy=remedy)


if __name__ == "__main__":
    main(sys.argv[1])
