"""Writes what is imported, and compares what was written with the source before it is published."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import xxhash

from saev_store.core.dtypes import narrowed
from saev_store.core.layout import Layout, shard_name
from saev_store.documents import Metadata
from saev_store.errors import CorruptShardError, ResumeError, StoreExistsError
from saev_store.store.store import ShardStore
from saev_store.transport import Transport
from saev_store.writer._create import create_store
from saev_store.writer._digests import BLOCK_BYTES, BlockDigester, FileDigests, digest, load_digests
from saev_store.writer._inputs import NonfinitePolicy, OverflowPolicy, check_overflow, rows_as_bytes, token_rows
from saev_store.writer._leftovers import unfinished
from saev_store.writer._shard_file import read_receipts
from saev_store.writer.folder import Folder
from saev_store.writer.importing._examples import MAX_BLOCK_BYTES, Block, Examples


class ImportOptions(NamedTuple):
    """How an import is written; see `ShardStore.from_array`."""

    resume: bool | Literal["auto"] = "auto"
    verify: bool = True
    max_block_bytes: int = MAX_BLOCK_BYTES
    pad: bool | None = None
    on_nonfinite: NonfinitePolicy = "raise"
    on_overflow: OverflowPolicy = "raise"
    progress: bool | None = None


def import_examples(
    examples: Examples, root: Transport, options: ImportOptions, *, part: tuple[int, int] | None = None
) -> None:
    """Write the store of some examples, or one part of it; a finished store is compared with them.

    Args:
        examples: What is written.
        root: The folder of stores.
        options: How.
        part: (rank, world): only this part of the shards; `finalize_store` publishes.

    Raises:
        ResumeError: the source, or what an unfinished import was begun with, has changed.
        CorruptShardError: what was written is not what the source holds. Nothing is published.
        StoreExistsError: a finished store of that name holds something else, or `resume` is False.
        SaevStoreError: as for `create_store` and `ShardWriter.append`.
    """
    metadata = examples.metadata
    if part is None:  # else whoever gives the parts away looks once
        check_unchanged(root, metadata)
    writer = create_store(
        root, metadata, resume=options.resume, exist_ok=True, part=part, pad=options.pad,
        on_nonfinite=options.on_nonfinite, on_overflow=options.on_overflow, progress=options.progress,
    )  # fmt: skip
    with writer:
        if writer.complete and options.resume is False:
            raise StoreExistsError(
                "the store is complete",
                where=f"{root.url}/{metadata.hash}",
                remedy="Open it, or import without resume=False, which compares it with the source.",
            )
        first, end = writer.example_range
        kept = writer.next_example
        comparison = Comparison(root, metadata, kept, options.on_overflow, published=writer.complete)
        if writer.complete and not options.verify:
            return
        writer.verify = "digests" if options.verify else "sizes"
        for block in examples.blocks(first if options.verify else kept, end, options.max_block_bytes):
            acts = _as_accepted(block, metadata.layout, options.on_overflow)
            if options.verify:
                comparison.add(block._replace(acts=acts))
            new = max(0, kept - block.first)
            if new < len(acts):
                writer.append(acts[new:], **{name: rows[new:] for name, rows in block.token_arrays.items()})
        if not writer.complete:
            writer.checkpoint()
        comparison.finish()


def _as_accepted(block: Block, layout: Layout, on_overflow: OverflowPolicy) -> npt.NDArray[np.generic]:
    """The activations of a block as a writer takes them, which does not take float64."""
    acts = block.acts
    # To 16 bits the writer's own check follows; before it only errors are raised, which show the number as it is.
    if acts.dtype.name == "float64" and (layout.dtype == "float32" or on_overflow == "raise"):
        acts = check_overflow(acts, block.first, layout, on_overflow)
    return narrowed(acts, layout.dtype)


def check_unchanged(root: Transport, metadata: Metadata) -> None:
    """Refuse to import a source of which another state is unfinished below the root."""
    ours = _imported(metadata.data)
    if ours.get("url") is None:
        return
    for other in unfinished(root):
        try:
            theirs = _imported(cast("dict[str, object]", json.loads(other.metadata)).get("data"))
        except (ValueError, RecursionError, AttributeError):
            continue
        # Under other axes the same array has another digest.
        is_same = all(theirs.get(key) == ours.get(key) for key in ("format", "url", "dims"))
        if is_same and any(theirs.get(key) != ours.get(key) for key in ("digest", "shape", "dtype")):
            raise ResumeError(
                f"{ours['url']} has changed since the import in {other.name} was begun, which is unfinished",
                where=f"{root.url}/{other.name}",
                remedy="Throw that one away with `discard_unfinished` or `saev-store clean --older-than 0` of its folder, then import again.",
            )


def _imported(data: object) -> Mapping[str, object]:
    """What `data` of a document says about the source of an import; empty where it says nothing."""
    found = cast("dict[str, object]", data).get("imported") if isinstance(data, dict) else None
    return cast("dict[str, object]", found) if isinstance(found, dict) else {}


class Comparison:
    """Digests of the source, shard by shard, compared with what is known of the shards.

    Args:
        root: The folder of stores.
        metadata: Of the store that is written.
        kept: How many examples an earlier attempt has written. Their shards are compared as soon as they are read.
        on_overflow: What the writer does with numbers that are too large.
        published: Whether the store is finished: the digests of its files, or where it has none
            their bytes, are then compared, else the receipts of the writer.
    """

    def __init__(
        self, root: Transport, metadata: Metadata, kept: int, on_overflow: OverflowPolicy, *, published: bool
    ) -> None:
        self._folder, self._metadata, self._layout = Folder(root, metadata.hash), metadata, metadata.layout
        self._kept, self._on_overflow = kept, on_overflow
        self._store = ShardStore.open(root.at(metadata.hash)) if published else None
        digests = load_digests(root.at(metadata.hash)) if published else None
        is_ours = digests is not None and digests.block_bytes == BLOCK_BYTES
        self._digests: Mapping[str, FileDigests] = digests.files if digests is not None and is_ours else {}
        self._waiting: dict[int, _Shard] = {}
        self._begin_shard()

    def _begin_shard(self) -> None:
        self._acts, self._tokens, self._has_tokens = BlockDigester(BLOCK_BYTES), xxhash.xxh3_128(), False

    def add(self, block: Block) -> None:
        """Digest the next examples of the source."""
        layout, n = self._layout, len(block.acts)
        is_declared = self._metadata.declares_token_arrays
        rows = token_rows(block.token_arrays, self._metadata.recordable, n, layout, required=is_declared)
        acts = block.acts
        if self._on_overflow == "saturate":
            acts = check_overflow(acts, block.first, layout, "saturate")
        at, end = block.first, block.first + n
        step = max(1, BLOCK_BYTES // layout.example_nbytes)
        while at < end:
            shard_idx = at // layout.examples_per_shard
            _, shard_end = layout.example_range(shard_idx)
            until = min(end, shard_end, at + step)
            piece = slice(at - block.first, until - block.first)
            self._acts.update(rows_as_bytes(acts[piece], layout).data)
            if rows is not None:
                self._tokens.update(np.ascontiguousarray(rows[piece]).data)
                self._has_tokens = True
            at = until
            if at == shard_end:
                self._end_shard(shard_idx)

    def _end_shard(self, shard_idx: int) -> None:
        found = FileDigests(self._acts.nbytes, tuple(self._acts.digests()))
        self._waiting[shard_idx] = _Shard(found, self._tokens.hexdigest() if self._has_tokens else None)
        self._begin_shard()
        if self._layout.example_range(shard_idx)[1] <= self._kept:
            self.finish()

    def finish(self) -> None:
        """Compare the shards that were read since the last call; all of them are durable."""
        for shard_idx, found in self._waiting.items():
            if self._store is None:
                known = self._receipt(shard_idx)
            else:
                known = self._published(self._store, shard_idx, found.file)
            if found != known:
                self._refuse(shard_idx)
        self._waiting.clear()

    def _receipt(self, shard_idx: int) -> _Shard | None:
        """What the writer has recorded of a shard."""
        (receipt,) = read_receipts(self._folder, self._layout, range(shard_idx, shard_idx + 1), BLOCK_BYTES)
        return None if receipt is None else _Shard(receipt.file, receipt.tokens)

    def _published(self, store: ShardStore, shard_idx: int, expected: FileDigests) -> _Shard | None:
        """What a finished store says of a shard. Where it has no digests like ours, its bytes are read; None if they are others."""
        first, end = self._layout.example_range(shard_idx)
        arrays = [
            store.token_arrays[array.name] for array in self._metadata.recordable if array.name in store.token_arrays
        ]
        rows = [np.ascontiguousarray(values[first:end]).view(np.uint8).reshape(end - first, -1) for values in arrays]
        tokens = digest(np.ascontiguousarray(np.concatenate(rows, axis=1)).data) if rows else None
        name = shard_name(shard_idx)
        file = self._digests.get(name)
        if file is None and self._folder.first_difference(name, expected, BLOCK_BYTES) is None:
            file = expected
        return None if file is None else _Shard(file, tokens)

    def _refuse(self, shard_idx: int) -> None:
        """Raise the error for a shard that is not what the source holds."""
        first, end = self._layout.example_range(shard_idx)
        where = self._folder.where(shard_name(shard_idx))
        if self._store is not None:
            changed = "source has" if shard_name(shard_idx) in self._digests else "source or the store has"
            raise StoreExistsError(
                f"a finished store of that name is there, whose examples {first} to {end - 1} are not those of the source: the "
                f"{changed} changed since it was imported",
                where=where,
                remedy="Import to another folder, or with another `data`; verify=False opens the finished store.",
            )
        if first < self._kept:
            raise ResumeError(
                f"examples {first} to {end - 1} of the source are not what an earlier attempt has imported: the source has changed",
                where=where,
                remedy="Throw the unfinished store away with `discard_unfinished` or `saev-store clean --older-than 0` of its folder, then import again.",
            )
        raise CorruptShardError(
            f"what was written of examples {first} to {end - 1} is not what was read from the source",
            where=where,
            remedy="Do not change the source while it is imported. If it was not, suspect the memory or the disk of this machine.",
        )


class _Shard(NamedTuple):
    """What a shard holds: the digests of its vectors, and of its token rows where there are any."""

    file: FileDigests
    tokens: str | None
