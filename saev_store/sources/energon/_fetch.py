"""Finds and fetches samples: byte ranges from `index.sqlite` or `.tar.idx`, contents checked against the tar's headers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import cast

from saev_store._runtime.threads import ahead
from saev_store.core.layout import IntArray
from saev_store.errors import CorruptShardError, NotFoundError, SelectionError, brief
from saev_store.sources.address import full_url
from saev_store.sources.energon.index_sqlite import SqliteIndex
from saev_store.sources.energon.keys import idx_path, join_name
from saev_store.sources.energon.nvmeta import Info
from saev_store.sources.energon.tar_header import BLOCK, disagreement, headers_nbytes
from saev_store.sources.energon.tar_idx import ITEM_NBYTES, parse_tar_idx
from saev_store.sources.energon.tar_scan import MAX_EXTENSION_NBYTES, Member, parse_sample
from saev_store.transport import Transport
from saev_store.transport.fetch import fetch_ranges

_N_THREADS = 16
#: The most bytes of headers before a part.
_MAX_HEADERS_NBYTES = MAX_EXTENSION_NBYTES + 8 * BLOCK


@dataclass(frozen=True, slots=True)
class PartPlace:
    """The place of a part's content in its shard; offset and size in bytes."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SamplePlace:
    """The place of a sample in its shard; key and parts are None where only the tar has them."""

    shard: int
    sample_index: int
    offset: int
    nbytes: int
    key: str | None = None
    parts: tuple[PartPlace, ...] | None = None


@dataclass(frozen=True)
class RawSample:
    """A sample as it is stored.

    Attributes:
        key: Its name in the data set.
        shard: The tar that contains it, relative to the data set.
        sample_index: Its number in that tar.
        parts: The bytes of each part, by name, in the order of the tar.
    """

    key: str
    shard: str
    sample_index: int
    parts: Mapping[str, bytes] = field(repr=False)

    def __getitem__(self, part: str) -> bytes:
        """The bytes of a part.

        Raises:
            SelectionError: the sample has no such part.
        """
        try:
            return self.parts[part]
        except KeyError:
            raise SelectionError(
                f"sample {self.key!r} has no part {brief(part)}; it has {', '.join(self.parts)}", where="part"
            ) from None


class SampleReader:
    """Finds samples by shard and number or by key, and reads them; may be shared between threads.

    Args:
        transport: The data set's folder.
        info: Its shards.
        index: Its database; None for a data set without one.
    """

    def __init__(self, transport: Transport, info: Info, index: SqliteIndex | None) -> None:
        self._transport, self.info, self.index = transport, info, index
        self._offsets: dict[int, IntArray] = {}
        self._lock = threading.Lock()

    # -- places --------------------------------------------------------------------------------------------------------

    def run(self, shard: int, first: int, end: int) -> list[SamplePlace]:
        """Places of samples `first` to `end` of a shard."""
        if self.index is None or not self.index.has_parts:
            # Energon 6 has no index by shard either; its `.tar.idx` files say the same.
            with self._lock:
                if shard not in self._offsets:
                    self._offsets[shard] = self.offsets(shard)
            offsets = self._offsets[shard][first : end + 1].tolist()
            return [
                SamplePlace(shard, first + i, offset, offsets[i + 1] - offset) for i, offset in enumerate(offsets[:-1])
            ]
        rows = self.index.samples(shard, first, end)
        parts: list[list[PartPlace]] = [[] for _ in rows]
        for index, name, offset, nbytes in self.index.parts(shard, first, end):
            parts[index - first].append(PartPlace(name, offset, nbytes))
        return [
            SamplePlace(shard, index, offset, nbytes, key, tuple(found))
            for (index, key, offset, nbytes), found in zip(rows, parts, strict=True)
        ]

    def find(self, key: str) -> list[tuple[int, int]]:
        """(shard, sample_index) of all samples that have a key.

        Raises:
            NotFoundError: the data set has no index of keys.
            CorruptShardError: the index names samples that do not exist.
        """
        if self.index is None:
            raise NotFoundError(
                "keys cannot be looked up: the data set has no index.sqlite (it was prepared by Energon 5)",
                where=self._transport.url,
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

    def find_one(self, key: str) -> tuple[int, int]:
        """(shard, sample_index) of the only sample that has a key.

        Raises:
            SelectionError: no sample has it, or several have.
        """
        found = self.find(key)
        if len(found) == 1:
            return found[0]
        if not found:
            raise SelectionError(f"no sample has the key {brief(key)}", where="key")
        shards = ", ".join(brief(self.info.shards[shard]) for shard, _ in found[:4])
        raise SelectionError(
            f"{len(found)} samples have the key {brief(key)}, in {shards}", where="key", remedy="Take them by position."
        )

    def offsets(self, shard: int) -> IntArray:
        """The content of a shard's `.tar.idx`: int64, one more than it has samples."""
        path, n_samples = idx_path(self.info.shards[shard]), int(self.info.counts[shard])
        raw = self._transport.read(path, max_bytes=(n_samples + 1) * ITEM_NBYTES + 1)
        tar_nbytes = self._transport.size(self.info.shards[shard])
        return parse_tar_idx(raw, where=full_url(self._transport, path), n_samples=n_samples, tar_nbytes=tar_nbytes)

    # -- contents ------------------------------------------------------------------------------------------------------

    def fetch(self, wanted: Sequence[tuple[int, int]]) -> list[RawSample]:
        """Samples by (shard, sample_index), in the order asked for; consecutive ones are fetched together."""
        groups = [
            [place for first, end in _runs([index for _, index in pairs]) for place in self.run(shard, first, end)]
            for shard, pairs in groupby(sorted(set(wanted)), key=lambda pair: pair[0])
        ]
        found = {
            (group[0].shard, sample.sample_index): sample
            for group, samples in zip(groups, self._read_groups(groups), strict=True)
            for sample in samples
        }
        return [found[pair] for pair in wanted]

    def _read_groups(self, groups: list[list[SamplePlace]]) -> Iterator[list[RawSample]]:
        """One read for each shard; reads that cost a round trip run concurrently."""
        if len(groups) < 2 or self._transport.is_local:
            yield from map(self.read, groups)
            return
        yield from ahead(self.read, groups, _N_THREADS)

    def read(self, places: list[SamplePlace]) -> list[RawSample]:
        """Samples of one shard."""
        shard = self.info.shards[places[0].shard]
        starts: list[int] = []
        ends: list[int] = []
        for place in places:
            if place.parts is None:
                starts.append(place.offset)
                ends.append(place.offset + place.nbytes)
            for part in place.parts or ():
                starts.append(self._headers_start(place.shard, cast("str", place.key), part))
                ends.append(part.offset + part.nbytes)
        pieces = map(memoryview, fetch_ranges(self._transport, shard, starts, ends))
        samples: list[RawSample] = []
        for place in places:
            if place.parts is None:
                data = next(pieces)
                members = self._members(place, data)
                key, parts = members[0].key, {
                    each.part: bytes(data[each.content_offset : each.content_offset + each.content_nbytes])
                    for each in members
                }  # fmt: skip
            else:
                key, parts = cast("str", place.key), dict[str, bytes]()
                for part in place.parts:
                    data = next(pieces)
                    n_headers = len(data) - part.nbytes
                    self._check_headers(place.shard, key, part, data[:n_headers])
                    parts[part.name] = bytes(data[n_headers:])
            samples.append(RawSample(key, shard, place.sample_index, parts))
        return samples

    def listed(self, place: SamplePlace) -> tuple[str, tuple[PartPlace, ...]]:
        """The key and the parts of a sample, which are in its tar where the index has neither."""
        if place.key is not None and place.parts is not None:
            return place.key, place.parts
        shard = self.info.shards[place.shard]
        (data,) = self._transport.get_ranges(shard, starts=[place.offset], ends=[place.offset + place.nbytes])
        members = self._members(place, memoryview(data))
        return members[0].key, tuple(
            PartPlace(each.part, place.offset + each.content_offset, each.content_nbytes) for each in members
        )

    def _members(self, place: SamplePlace, data: memoryview) -> list[Member]:
        """The members in the byte range of a sample; `CorruptShardError` if they are not those of one sample."""
        members = parse_sample(data, where=self.where(place.shard))
        if not members or any(each.key != members[0].key for each in members):
            raise self.stale(place.shard, f"sample {place.sample_index} is not where its .tar.idx says")
        return members

    def content(
        self, shard: int, key: str, part: PartPlace, *, start: int | None = None, end: int | None = None
    ) -> bytes:
        """Bytes `start` to `end` of a part, as a slice takes them; its headers are fetched with them and checked."""
        first, last, _ = slice(start, end).indices(part.nbytes)
        headers = self._headers_start(shard, key, part)
        begin, stop = part.offset + first, part.offset + max(first, last)
        starts, ends = ([headers], [stop]) if first == 0 else ([headers, begin], [part.offset, stop])
        pieces = self._transport.get_ranges(self.info.shards[shard], starts=starts, ends=ends)
        data = memoryview(pieces[0])
        n_headers = part.offset - headers
        self._check_headers(shard, key, part, data[:n_headers])
        return bytes(data[n_headers:] if first == 0 else pieces[1])

    def _headers_start(self, shard: int, key: str, part: PartPlace) -> int:
        if part.offset < BLOCK:
            raise CorruptShardError(f"part {brief(part.name)} begins inside its header", where=self.where(shard))
        return max(part.offset % BLOCK, part.offset - headers_nbytes(join_name(key, part.name), part.nbytes))

    def _check_headers(self, shard: int, key: str, part: PartPlace, headers: memoryview) -> None:
        name = join_name(key, part.name)
        odd = disagreement(headers, name=name, nbytes=part.nbytes)
        start = max(part.offset % BLOCK, part.offset - _MAX_HEADERS_NBYTES)
        if odd is not None and part.offset - start > len(headers):  # they may be longer than expected
            (longer,) = self._transport.get_ranges(self.info.shards[shard], starts=[start], ends=[part.offset])
            odd = disagreement(longer, name=name, nbytes=part.nbytes)
        if odd is not None:
            raise self.stale(shard, f"the index has {brief(name)} at {part.offset:,}, but {odd}")

    def where(self, shard: int) -> str:
        """A shard's address, safe to show."""
        return full_url(self._transport, self.info.shards[shard])

    def stale(self, shard: int, message: str) -> CorruptShardError:
        """The error for a tar that is not the one that was indexed."""
        return CorruptShardError(
            message,
            where=self.where(shard),
            remedy="The index belongs to another tar, or one of them is damaged: prepare the data set again.",
        )


def _runs(ascending: list[int]) -> Iterator[tuple[int, int]]:
    """Half-open ranges of consecutive numbers.

    >>> list(_runs([1, 2, 3, 7]))
    [(1, 4), (7, 8)]
    """
    first = end = ascending[0]
    for number in ascending:
        if number != end:
            yield first, end
            first = number
        end = number + 1
    yield first, end
