"""What a store's `digests.json` promises, as far as it fits the store. Read with suspicion, like every file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from saev_store.documents import labels_nbytes
from saev_store.errors import SaevStoreError
from saev_store.layout import ITEMSIZE, Layout, shard_name
from saev_store.names import DIGESTS_NAME, LABELS_NAME
from saev_store.problems import Problem
from saev_store.transport import Transport

#: Block length where no digests.json names another one.
DEFAULT_BLOCK_BYTES = 8 << 20
_MAX_BLOCK_BYTES = 1 << 30


@dataclass(frozen=True)
class Promised:
    """The digests of a store's files, and what is wrong with the document they come from.

    Attributes:
        block_bytes: How many bytes a digest covers; the last one of a file may cover fewer.
        files: File name to one digest per block of its used bytes; only files whose entry fits the layout.
        problems: What is wrong with the document, or that it is not there.
    """

    block_bytes: int
    files: Mapping[str, tuple[str, ...]]
    problems: tuple[Problem, ...]


def promised_digests(transport: Transport, layout: Layout) -> Promised:
    """The digests beside a store; a missing document is an info, one that cannot be used a warning."""
    from saev_store.writer import load_digests

    try:
        digests = load_digests(transport)
    except SaevStoreError as error:
        return _nothing(f"digests.json cannot be used, so contents are not compared with it: {error.message}")
    if digests is None:
        message = (
            "there is no digests.json, so a flipped bit or two exchanged shards cannot be noticed; a copy made with "
            "`saev-store copy` gets one"
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
