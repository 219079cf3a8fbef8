"""Receipts: what of each shard is durable, with its digests. The labels of a shard lie beside its receipt."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import cast

from saev_store.core.layout import Layout
from saev_store.writer._blocks import DIGEST_DIGITS, digest, n_blocks
from saev_store.writer.folder import Folder, label_part_path, receipt_path

VERSION = 1
_DIGEST = re.compile(f"[0-9a-f]{{{DIGEST_DIGITS}}}")


@dataclass(frozen=True)
class Receipt:
    """What of one shard is durable.

    Attributes:
        used_nbytes: This many leading bytes of the file; they need not end with a whole example.
        complete: The file is committed: these are all the bytes it will ever have.
        digests: One for every block of those bytes, the last one perhaps of a short block.
        labels: The digest of the labels of the whole examples among those bytes; None where none are recorded.
    """

    used_nbytes: int
    complete: bool
    digests: tuple[str, ...]
    labels: str | None

    def to_bytes(self) -> bytes:
        return json.dumps({"version": VERSION, **asdict(self)}).encode()


def parse_receipt(raw: bytes, layout: Layout, shard_idx: int, block_bytes: int) -> Receipt | None:
    """A receipt that agrees with the layout; None for one that does not, which is as good as none."""
    try:
        document = cast("dict[str, object]", json.loads(raw))
        used, complete, labels = document["used_nbytes"], document["complete"], document["labels"]
        digests = cast("list[object]", document["digests"])
        limit = layout.used_nbytes(shard_idx)
        if (
            document["version"] == VERSION
            and isinstance(used, int)
            and 0 <= used <= limit
            and isinstance(complete, bool)
            and (used == limit or not complete)
            and len(digests) == n_blocks(used, block_bytes)
            and (labels is None or _is_digest(labels))
            and all(_is_digest(item) for item in digests)
        ):
            found = tuple(cast("list[str]", digests))
            return Receipt(used, complete, found, cast("str | None", labels))
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def read_receipts(folder: Folder, layout: Layout, shards: range, block_bytes: int) -> Generator[Receipt | None]:
    """The receipts of some shards, in order; None where there is none, or one that is as good as none."""

    def read(shard_idx: int) -> Receipt | None:
        raw = folder.read_or_none(receipt_path(shard_idx))
        return parse_receipt(raw, layout, shard_idx, block_bytes) if raw is not None else None

    return folder.each(read, shards)


def leading_receipts(folder: Folder, layout: Layout, shards: range, block_bytes: int) -> list[Receipt]:
    """The receipts up to the first shard that is not complete, its own included."""
    receipts: list[Receipt] = []
    # Most often nothing has been written yet, and one request tells.
    for some in (shards[:1], shards[1:]):
        with closing(read_receipts(folder, layout, some, block_bytes)) as found:
            for receipt in found:
                if receipt is None:
                    return receipts
                receipts.append(receipt)
                if not receipt.complete:
                    return receipts
    return receipts


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def write_receipt(folder: Folder, shard_idx: int, receipt: Receipt, labels: bytes | None) -> None:
    """Record what is durable; labels first, so that no receipt promises what is not there."""
    if labels is not None:
        folder.put(label_part_path(shard_idx), labels)
    folder.put(receipt_path(shard_idx), receipt.to_bytes())


def read_label_part(folder: Folder, layout: Layout, shard_idx: int, receipt: Receipt) -> bytes | None:
    """The labels that a receipt stands for; None where they are not there, or are others.

    A crash between labels and receipt leaves more of them than the receipt knows: only its own are returned.
    """
    nbytes = receipt.used_nbytes // layout.example_nbytes * layout.content_tokens_per_example
    longest = layout.examples_in(shard_idx) * layout.content_tokens_per_example
    raw = folder.read_or_none(label_part_path(shard_idx), max_bytes=longest)
    if raw is None or len(raw) < nbytes or digest(raw[:nbytes]) != receipt.labels:
        return None
    return bytes(raw[:nbytes])
