"""What of a store in parts is written, and its publication, for processes that know only where it is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Self

from saev_store.documents import Metadata, parse_metadata
from saev_store.names import CLAIM_PATH, METADATA_NAME
from saev_store.transport import Transport
from saev_store.writer._publish import Verify, publish, published_already
from saev_store.writer._shard_file import read_receipts
from saev_store.writer.folder import Claim, Folder, part_examples, part_shards, read_claim


@dataclass(frozen=True)
class UnpublishedStore:
    """A store that was begun, and is not published.

    Attributes:
        metadata: The document that publication writes.
        n_parts: In how many parts its shards are written.
    """

    metadata: Metadata
    n_parts: int
    _folder: Folder
    _claim: Claim

    @property
    def url(self) -> str:
        """Where the store will be."""
        return self._folder.url

    @classmethod
    def find(cls, store_transport: Transport) -> Self | None:
        """The one in this folder; None where nothing was begun, or where a published store is.

        Raises:
            IncompleteStoreError: this version does not understand what was begun there.
            DocumentError: it was begun with a document that breaks rules.
        """
        folder = Folder(store_transport, "")
        claim = read_claim(folder)
        if claim is None or folder.read(METADATA_NAME):
            return None
        raw = claim.metadata.encode("utf-8", "surrogateescape")
        return cls(parse_metadata(raw, where=folder.where(CLAIM_PATH)), claim.options.world, folder, claim)

    def untouched_parts(self) -> Sequence[bool]:
        """Of each part, whether nothing of it is durable."""
        layout = self.metadata.layout
        first = [part_shards(layout.n_shards, rank, self.n_parts)[:1] for rank in range(self.n_parts)]
        shards = [shard_idx for shards in first for shard_idx in shards]
        with closing(read_receipts(self._folder, layout, shards, self._claim.options.block_bytes)) as receipts:
            found = iter([receipt is None for receipt in receipts])
        return [next(found) if shards else True for shards in first]

    def missing(self) -> list[tuple[int, int]]:
        """The half-open ranges of the examples whose shards are not whole; ascending, merged.

        Empty also where the store was published meanwhile.
        """
        layout, found = self.metadata.layout, list[tuple[int, int]]()
        shards = range(layout.n_shards)
        with closing(read_receipts(self._folder, layout, shards, self._claim.options.block_bytes)) as receipts:
            for shard_idx, receipt in zip(shards, receipts, strict=True):
                if receipt is not None and receipt.complete:
                    continue
                first, end = part_examples(layout, range(shard_idx, shard_idx + 1))
                if found and found[-1][1] == first:
                    first, _ = found.pop()
                found.append((first, end))
        # Publication deletes the receipts after it has written the document.
        return [] if found and published_already(self._folder, self.metadata) else found

    def n_durable(self, first: int, end: int) -> int:
        """How many of the examples `first` to `end - 1` survive a crash."""
        layout, n = self.metadata.layout, 0
        shards = range(first // layout.examples_per_shard, -(-end // layout.examples_per_shard))
        with closing(read_receipts(self._folder, layout, shards, self._claim.options.block_bytes)) as receipts:
            for shard_idx, receipt in zip(shards, receipts, strict=True):
                start, _ = part_examples(layout, range(shard_idx, shard_idx + 1))
                kept = 0 if receipt is None else receipt.used_nbytes // layout.example_nbytes
                n += max(0, min(start + kept, end) - max(start, first))
        return n

    def publish(self, *, verify: Verify = "sizes", takeover: bool = False, progress: bool | None = None) -> bool:
        """Publish the store, all of whose parts are written; see `finalize_store` for arguments and errors."""
        if published_already(self._folder, self.metadata):
            return False
        return publish(self._folder, self.metadata, self._claim, verify=verify, takeover=takeover, progress=progress)
