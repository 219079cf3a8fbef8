"""Names of files in a store's folder: those of the protocol, and those that this package adds."""

from __future__ import annotations

METADATA_NAME = "metadata.json"
SHARDS_NAME = "shards.json"
LABELS_NAME = "labels.bin"
#: Added, optional: digests of the blocks of every file.
DIGESTS_NAME = "digests.json"
#: Added, only while a store is unfinished: the writer's claim, receipts and labels.
WORK_FOLDER = ".saev_store"
CLAIM_PATH = f"{WORK_FOLDER}/claim.json"
