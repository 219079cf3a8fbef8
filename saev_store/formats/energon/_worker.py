"""A process that goes through tars: names on standard input, one JSON line per tar on standard output.

A program of its own rather than a fork or a pool: the caller's main module is not imported again, its threads and
clients are left alone, and what was found travels in the receipts.
"""

from __future__ import annotations

import json
import os
import sys

from saev_store import errors
from saev_store.errors import SaevStoreError
from saev_store.formats.energon._receipts import scan_shard
from saev_store.transport import open_transport


def main(root: str) -> None:
    """Go through the tars named on standard input, below `root`, until it ends."""
    transport = open_transport(root)
    for line in sys.stdin:
        shard = json.loads(line)
        answer: dict[str, object] = {"shard": shard}
        try:
            scan_shard(transport, shard)
        except SaevStoreError as error:
            answer["error"] = [type(error).__name__, error.message, error.where, error.remedy]
        except Exception as error:
            answer["error"] = ["SaevStoreError", f"{type(error).__name__}: {error}", shard, None]
        try:
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
        except BrokenPipeError:  # whoever asked was killed; the receipt is kept
            os._exit(1)


def rebuild(error: list[str]) -> SaevStoreError:
    """The error that a worker met."""
    name, message, where, remedy = error
    kind = getattr(errors, name, SaevStoreError)
    if not isinstance(kind, type) or not issubclass(kind, SaevStoreError):
        kind = SaevStoreError
    return kind(message, where=where, remedy=remedy)


if __name__ == "__main__":
    main(sys.argv[1])
