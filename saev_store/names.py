"""Names of files in a store's folder: those of the protocol, and those that this package adds; and how names are printed."""

from __future__ import annotations

METADATA_NAME = "metadata.json"
SHARDS_NAME = "shards.json"
LABELS_NAME = "labels.bin"
#: Added, optional: digests of the blocks of every file.
DIGESTS_NAME = "digests.json"
#: Added, only while a store is unfinished: the writer's claim, receipts and labels.
WORK_FOLDER = ".saev_store"
CLAIM_PATH = f"{WORK_FOLDER}/claim.json"


def printable(text: str) -> str:
    r"""A text that every output takes: bytes of a path that are not UTF-8, which Python keeps as halves of surrogate pairs, are escaped.

    >>> printable("/data/caf\udce9")
    '/data/caf\\udce9'
    """
    return text.encode(errors="backslashreplace").decode()
