"""Byte ranges of samples and parts, from `index.sqlite`, or from `.tar.idx` files and the headers in a sample."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from saev_store.core.layout import IntArray
from saev_store.errors import CorruptShardError, NotFoundError, SelectionError, brief
from saev_store.sources.address import full_url
from saev_store.sources.energon.index_sqlite import SqliteIndex
from saev_store.sources.energon.keys import idx_path
from saev_store.sources.energon.nvmeta import Info
from saev_store.sources.energon.tar_idx import ITEM_NBYTES, parse_tar_idx
from saev_store.transport import Transport


@dataclass(frozen=True, slots=True)
class PartPlace:
    """Where the content of a part lies in its shard."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SamplePlace:
    """Where a sample lies in its shard; key and parts are None where only the tar itself knows them."""

    shard: int
    sample_index: int
    offset: int
    nbytes: int
    key: str | None = None
    parts: tuple[PartPlace, ...] | None = None


class SampleLookup:
    """Looks up samples by shard and number, and by key.

    Args:
        transport: The data set's folder.
        info: Its shards.
        index: Its database, if it has one.
    """

    def __init__(self, transport: Transport, info: Info, index: SqliteIndex | None) -> None:
        self._transport, self.info, self.index = transport, info, index
        self._offsets: dict[int, IntArray] = {}
        self._lock = threading.Lock()

    def run(self, shard: int, first: int, end: int) -> list[SamplePlace]:
        """Where samples `first` to `end` of a shard lie."""
        if self.index is None or not self.index.has_parts:
            # Energon 6 has no index by shard either; its `.tar.idx` say the same.
            offsets = self._tar_idx(shard)
            return [SamplePlace(shard, i, int(offsets[i]), int(offsets[i + 1] - offsets[i])) for i in range(first, end)]
        rows = self.index.samples(shard, first, end)
        parts: list[list[PartPlace]] = [[] for _ in rows]
        for index, name, offset, nbytes in self.index.parts(shard, first, end):
            parts[index - first].append(PartPlace(name, offset, nbytes))
        return [
            SamplePlace(shard, index, offset, nbytes, key, tuple(found))
            for (index, key, offset, nbytes), found in zip(rows, parts, strict=True)
        ]

    def find(self, key: str) -> list[tuple[int, int]]:
        """(shard, sample_index) of the samples that have a key."""
        if self.index is None:
            raise NotFoundError(
                "keys cannot be looked up: the data set has no index.sqlite (it was prepared by Energon 5)",
                where=full_url(self._transport, ""),
                remedy="Run `saev-store prepare --overwrite` on it.",
            )
        found = self.index.find(key)
        for shard, sample_index in found:
            if shard >= len(self.info.shards) or sample_index >= self.info.counts[shard]:
                raise CorruptShardError(
                    f"the index has {brief(key)} in shard {shard}, sample {sample_index}, which does not exist",
                    where=self.index.where,
                    remedy="The index belongs to other tars: prepare the data set again.",
                )
        return found

    def find_one(self, key: object) -> tuple[int, int]:
        """As `find`, for a key that one sample has."""
        found = self.find(key) if isinstance(key, str) else []
        if len(found) == 1:
            return found[0]
        if not found:
            raise SelectionError(f"no sample has the key {brief(key)}", where="key")
        shards = ", ".join(brief(self.info.shards[shard]) for shard, _ in found[:4])
        raise SelectionError(
            f"{len(found)} samples have the key {brief(key)}, in {shards}", where="key", remedy="Take them by position."
        )

    def offsets(self, shard: int) -> IntArray:
        """What a shard's `.tar.idx` says: int64, one more than it has samples."""
        path, n_samples = idx_path(self.info.shards[shard]), int(self.info.counts[shard])
        where = full_url(self._transport, path)
        raw = self._transport.read(path, max_bytes=(n_samples + 1) * ITEM_NBYTES + 1)
        tar_nbytes = self._transport.size(self.info.shards[shard])
        return parse_tar_idx(raw, where=where, n_samples=n_samples, tar_nbytes=tar_nbytes)

    def _tar_idx(self, shard: int) -> IntArray:
        found = self._offsets.get(shard)
        if found is None:
            with self._lock:
                found = self._offsets[shard] = self.offsets(shard)
        return found
