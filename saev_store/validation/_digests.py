"""The digests in a store's `digests.json`, as far as they match the store's geometry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from saev_store.core.layout import ITEMSIZE, Layout, shard_name
from saev_store.documents import labels_nbytes
from saev_store.errors import DocumentError, SaevStoreError
from saev_store.names import DIGESTS_NAME, LABELS_NAME
from saev_store.problems import Problem
from saev_store.transport import Transport

#: Block length where no digests.json defines one.
DEFAULT_BLOCK_BYTES = 8 << 20
_MAX_BLOCK_BYTES = 1 << 30


@dataclass(frozen=True)
class Promised:
    """The digests of a store's files, and the problems of `digests.json`.

    Attributes:
        block_bytes: How many bytes a digest covers; the last one of a file may cover fewer.
        files: File name -> one digest per block of its used bytes; only files whose entry matches the layout.
        problems: Problems of the document, including its absence.
    """

    block_bytes: int
    files: Mapping[str, tuple[str, ...]]
    problems: tuple[Problem, ...]


def promised_digests(transport: Transport, layout: Layout) -> Promised:
    """The digests of a store. A missing document is an info, an invalid one a warning, an unreadable one an error."""
    from saev_store.writer import load_digests

    try:
        digests = load_digests(transport)
    except DocumentError as error:
        return _nothing(f"digests.json cannot be used, so contents are not compared with it: {error.message}")
    except SaevStoreError as error:
        message = f"digests.json cannot be read, so contents were not compared with it: {error.message}"
        return Promised(DEFAULT_BLOCK_BYTES, {}, (Problem("unreadable_digests", message, where=DIGESTS_NAME),))
    if digests is None:
        message = (
            "there is no digests.json, so changed bits and exchanged shards cannot be detected; `saev-store copy` "
            "makes a copy that has one"
        )
        return Promised(
            DEFAULT_BLOCK_BYTES, {}, (Problem("digests_absent", message, where=DIGESTS_NAME, severity="info"),)
        )
    if digests.block_bytes % ITEMSIZE or digests.block_bytes > _MAX_BLOCK_BYTES:
        return _nothing(f"block_bytes is {digests.block_bytes}; it must be a multiple of {ITEMSIZE}, at most 1 GiB")
    expected = {shard_name(shard_idx): layout.used_nbytes(shard_idx) for shard_idx in range(layout.n_shards)}
    expected[LABELS_NAME] = labels_nbytes(layout)
    files: dict[str, tuple[str, ...]] = {}
    problems: list[Problem] = []
    for name, nbytes in expected.items():
        entry = digests.files.get(name)
        if entry is not None and entry.nbytes == nbytes:
            files[name] = entry.digests
        elif entry is not None or name != LABELS_NAME:
            what = "has no entry" if entry is None else f"has {entry.nbytes} bytes, metadata.json implies {nbytes}"
            message = f"{name} {what} in digests.json; its contents are not compared"
            problems.append(
                Problem("digests_document", message, where=DIGESTS_NAME, loc=("files", name), severity="warning")
            )
    return Promised(digests.block_bytes, files, tuple(problems))


def _nothing(message: str) -> Promised:
    return Promised(
        DEFAULT_BLOCK_BYTES, {}, (Problem("digests_document", message, where=DIGESTS_NAME, severity="warning"),)
    )
