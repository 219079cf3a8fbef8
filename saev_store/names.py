"""The names that the protocol fixes inside a store's folder, and those that we add beside them."""

from __future__ import annotations

METADATA_NAME = "metadata.json"
SHARDS_NAME = "shards.json"
LABELS_NAME = "labels.bin"
#: Ours, optional: digests of the blocks of every file, left by our writer.
DIGESTS_NAME = "digests.json"
#: Ours, only while a store is unfinished: the writer's claim, receipts and labels.
WORK_FOLDER = ".saev_store"
CLAIM_PATH = f"{WORK_FOLDER}/claim.json"
