"""What was found in one tar: written as soon as it was gone through, so that an interrupted preparation goes on from there."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import cast

import xxhash

from saev_store.errors import DocumentError, NotFoundError
from saev_store.formats._address import full_url
from saev_store.formats.energon.keys import META, idx_path
from saev_store.formats.energon.tar_idx import tar_idx_bytes
from saev_store.formats.energon.tar_scan import Scan
from saev_store.transport import Transport, Writes

WORK_FOLDER = f"{META}/.saev_store"
VERSION = 1
MAX_RECEIPT_NBYTES = 4 << 30
_EDGE_NBYTES = 64 << 10

SampleRows = list[tuple[str, int, int, list[tuple[str, int, int]]]]
"""key, offset, nbytes, and of each part: name, offset of its content, nbytes"""


@dataclass(frozen=True)
class Receipt:
    """One tar, gone through.

    Attributes:
        shard: Its path below the data set.
        nbytes: Its size then.
        edges: Digest of its first and last bytes then.
        end: Where its last sample ends.
        oddities: What was odd about it.
        samples: Its samples.
    """

    shard: str
    nbytes: int
    edges: str
    end: int
    oddities: tuple[str, ...]
    samples: SampleRows

    def to_bytes(self) -> bytes:
        """As a file."""
        document = {"version": VERSION, **self.__dict__}
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, raw: bytes, *, where: str) -> Receipt:
        """The receipt in a file; only we write such files.

        Raises:
            DocumentError: it is none.
        """
        try:
            document = cast("dict[str, object]", json.loads(raw))
            if document.pop("version") != VERSION:
                raise ValueError("another version")
            receipt = cls(**document)  # type: ignore[arg-type] - wrong types end in the except below
            _ = [(key, offset + nbytes) for key, offset, nbytes, _ in receipt.samples]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DocumentError(f"it is no receipt: {error}", where=where) from None
        return receipt


def receipt_path(shard: str) -> str:
    """Where the receipt of a shard lies."""
    return f"{WORK_FOLDER}/receipts/{hashlib.sha256(shard.encode()).hexdigest()[:32]}.json"


def edges(transport: Transport, path: str, nbytes: int) -> str:
    """A digest of a file's beginning and end: another file of the same size has another one, as a rule."""
    at = min(_EDGE_NBYTES, nbytes)
    parts = transport.get_ranges(path, starts=[0, nbytes - at], ends=[at, nbytes])
    hasher = xxhash.xxh3_128(nbytes.to_bytes(8, "little"))
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def scan_shard(transport: Transport, shard: str) -> Receipt:
    """Go through a tar; write its `.tar.idx` and its receipt.

    Raises:
        CorruptShardError: it is damaged or cut.
    """
    scan = Scan.of(transport, shard, where=full_url(transport, shard))
    found: SampleRows = [(each.key, each.offset, each.nbytes, each.parts) for each in scan.samples()]
    nbytes = scan.file.nbytes
    # Without samples there is nothing to end: the one offset is 0, as where nothing was written yet.
    end = scan.end if found else 0
    receipt = Receipt(shard, nbytes, edges(transport, shard, nbytes), end, tuple(scan.oddities), found)
    writes = cast("Writes", transport)
    writes.put(idx_path(shard), tar_idx_bytes([*(row[1] for row in found), end]))
    writes.put(receipt_path(shard), receipt.to_bytes())
    return receipt


def read_receipt(transport: Transport, shard: str) -> Receipt:
    """The receipt of a shard.

    Raises:
        NotFoundError: there is none.
    """
    path = receipt_path(shard)
    return Receipt.from_bytes(transport.read(path, max_bytes=MAX_RECEIPT_NBYTES), where=full_url(transport, path))


def is_current(transport: Transport, shard: str) -> bool:
    """Whether a shard was gone through already, and is still the file that it was."""
    try:
        receipt = read_receipt(transport, shard)
        nbytes = transport.size(shard)
        return (
            receipt.shard == shard
            and receipt.nbytes == nbytes
            and transport.size(idx_path(shard)) == 8 * (len(receipt.samples) + 1)
            and receipt.edges == edges(transport, shard, nbytes)
        )
    except (NotFoundError, DocumentError):
        return False
