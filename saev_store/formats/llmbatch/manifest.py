"""The manifest beside our LLMBATCH files: which files make a set, how records were shuffled, and their digests.

Ours, not part of the format: any other reader opens the files without it. `train.batch.json` lies beside `train.batch`, or
names the files `train-00000.batch`, … of a set.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import cast

from saev_store.documents._json import loads
from saev_store.errors import DocumentError, UnknownProtocolError, UnsafeContentError, brief
from saev_store.formats.llmbatch.header import MAX_U32, Header
from saev_store.formats.llmbatch.order import RECORD_ORDER

SUFFIX = ".json"
MAX_NBYTES = 64 << 20
_VERSION = 1


@dataclass(frozen=True)
class ManifestFile:
    """One file of a set: its name, its batches, and the xxh3_128 digests that `_digest` describes."""

    name: str
    num_batches: int
    sampled: str
    full: str


@dataclass(frozen=True)
class Manifest:
    """What was written, over all files.

    Attributes:
        batch_size: Records in a batch.
        seq_len: Tokens in a record.
        seed: Seed of the order of records.
        total_records: Records given to the writer.
        files: In order: the batches of the second file follow those of the first.
    """

    batch_size: int
    seq_len: int
    seed: int
    total_records: int
    files: tuple[ManifestFile, ...]

    @property
    def num_batches(self) -> int:
        """Batches over all files."""
        return sum(file.num_batches for file in self.files)

    def header(self, file_idx: int) -> Header:
        """The header that a file must have. In a set, a file's own `total_records` are those it holds."""
        file = self.files[file_idx]
        total = self.total_records if len(self.files) == 1 else file.num_batches * self.batch_size
        return Header(self.batch_size, self.seq_len, file.num_batches, self.seed, total)

    def to_bytes(self) -> bytes:
        """The JSON document; the same set gives the same bytes."""
        document = {
            "format": "llmbatch",
            "manifest_version": _VERSION,
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "total_records": self.total_records,
            "record_order": RECORD_ORDER,
            "digest_algorithm": "xxh3_128",
            "files": [
                {
                    "name": file.name,
                    "num_batches": file.num_batches,
                    "sampled_digest": file.sampled,
                    "full_digest": file.full,
                }
                for file in self.files
            ],
        }
        return json.dumps(document, indent=1).encode() + b"\n"


def parse_manifest(raw: bytes, *, where: str) -> Manifest:
    """The manifest in a document.

    Raises:
        DocumentError: it is no such manifest, or breaks its rules; `UnknownProtocolError` if it is newer than we are.
        UnsafeContentError: it names a file outside its folder.
    """
    document = loads(raw, where=where, max_nbytes=MAX_NBYTES)
    if not isinstance(document, dict) or document.get("format") != "llmbatch":
        raise DocumentError("this is no manifest of LLMBATCH files: its 'format' is not 'llmbatch'", where=where)
    if document.get("manifest_version") != _VERSION or document.get("record_order") != RECORD_ORDER:
        raise UnknownProtocolError(
            f"manifest_version {brief(document.get('manifest_version'))} with record_order "
            f"{brief(document.get('record_order'))} is unknown; {_VERSION} with {RECORD_ORDER!r} is read",
            where=where,
        )

    def number(of: dict[str, object], name: str, least: int, most: int = MAX_U32) -> int:
        value = of.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise DocumentError(f"{name} is {brief(value)}; it must be an integer from {least} to {most}", where=where)
        return value

    def file(entry: object) -> ManifestFile:
        if not isinstance(entry, dict):
            raise DocumentError(f"an entry of files is {brief(entry)}; it must be an object", where=where)
        entry = cast("dict[str, object]", entry)
        name, sampled, full = (entry.get(key) for key in ("name", "sampled_digest", "full_digest"))
        if not (isinstance(name, str) and isinstance(sampled, str) and isinstance(full, str)):
            raise DocumentError(f"{brief(entry)} lacks a name or a digest as text", where=where)
        if "/" in name or "\\" in name or "\0" in name or not name.endswith(".batch") or name.startswith("."):
            raise UnsafeContentError(
                f"{brief(name)} is no name of a file beside the manifest that ends in .batch", where=where
            )
        return ManifestFile(name, number(entry, "num_batches", 0, 2**50), sampled, full)

    document = cast("dict[str, object]", document)
    entries = document.get("files")
    if not isinstance(entries, list) or not entries:
        raise DocumentError(f"files is {brief(entries)}; it must be a list of at least one file", where=where)
    files = tuple(file(entry) for entry in entries)
    if len({each.name for each in files}) != len(files):
        raise DocumentError("a file is listed twice", where=where)
    manifest = Manifest(
        number(document, "batch_size", 1),
        number(document, "seq_len", 1),
        number(document, "seed", 0),
        number(document, "total_records", 0, 2**62),
        files,
    )
    if manifest.total_records // manifest.batch_size != manifest.num_batches:
        raise DocumentError(
            f"the files have {manifest.num_batches:,} batches; {manifest.total_records:,} records make "
            f"{manifest.total_records // manifest.batch_size:,} of {manifest.batch_size}",
            where=where,
        )
    return manifest
