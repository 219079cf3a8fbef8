"""Fetching samples of shards: what is read together, and whether it is what the index says it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import cast

from saev_store.errors import CorruptShardError, SelectionError, brief
from saev_store.sources.address import full_url
from saev_store.sources.energon._places import PartPlace, SampleLookup, SamplePlace
from saev_store.sources.energon.keys import join_name
from saev_store.sources.energon.tar_header import BLOCK, disagreement, headers_nbytes
from saev_store.sources.energon.tar_scan import MAX_EXTENSION_NBYTES, parse_sample
from saev_store.transport import Buffer, Transport
from saev_store.transport.fetch import fetch_ranges

_N_THREADS = 16
#: Extension headers are at most so long.
_MAX_HEADERS_NBYTES = MAX_EXTENSION_NBYTES + 8 * BLOCK


@dataclass(frozen=True)
class RawSample:
    """A sample as it is stored.

    Attributes:
        key: Its name in the data set.
        shard: The tar it lies in, relative to the data set.
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
    """Reads samples at known places.

    Args:
        transport: The data set's folder.
        places: Where samples lie.
    """

    def __init__(self, transport: Transport, places: SampleLookup) -> None:
        self._transport, self._places = transport, places
        self._shards = places.info.shards
        self._by_name = {name: i for i, name in enumerate(self._shards)}

    def fetch(self, wanted: list[tuple[int, int]]) -> list[RawSample]:
        """Samples by (shard, sample_index), in the order asked for; neighbours are fetched together."""
        places: dict[tuple[int, int], SamplePlace] = {}
        ordered = sorted(set(wanted))
        at = 0
        while at < len(ordered):
            end = at + 1
            while end < len(ordered) and ordered[end] == (ordered[at][0], ordered[at][1] + end - at):
                end += 1
            shard, first = ordered[at]
            places.update(zip(ordered[at:end], self._places.run(shard, first, first + end - at), strict=True))
            at = end
        by_shard: dict[int, list[SamplePlace]] = {}
        for (shard, _), place in places.items():
            by_shard.setdefault(shard, []).append(place)
        found: dict[tuple[int, int], RawSample] = {}
        groups = list(by_shard.values())
        for samples in self._map(groups):
            found.update({(self._by_name[each.shard], each.sample_index): each for each in samples})
        return [found[place] for place in wanted]

    def _map(self, groups: list[list[SamplePlace]]) -> Iterator[list[RawSample]]:
        """One read per shard, at once where each costs a round trip."""
        if len(groups) < 2 or self._transport.is_local:
            yield from map(self.read, groups)
            return
        with ThreadPoolExecutor(min(_N_THREADS, len(groups))) as pool:
            yield from pool.map(self.read, groups)

    def read(self, places: list[SamplePlace]) -> list[RawSample]:
        """Samples of one shard, ascending, of which the parts that their places name."""
        shard = self._shards[places[0].shard]
        starts: list[int] = []
        ends: list[int] = []
        for place in places:
            if place.parts is None:
                starts.append(place.offset)
                ends.append(place.offset + place.nbytes)
            for part in place.parts or ():
                starts.append(self._headers_start(place.shard, cast("str", place.key), part))
                ends.append(part.offset + part.nbytes)
        fetched = fetch_ranges(self._transport, shard, starts, ends)
        pieces = iter(fetched)
        samples: list[RawSample] = []
        for place in places:
            if place.parts is None:
                data = memoryview(next(pieces))
                members = parse_sample(data, where=self.where(place.shard))
                if not members or any(each.key != members[0].key for each in members):
                    raise self.stale(place.shard, f"sample {place.sample_index} is not where its .tar.idx says")
                parts = {
                    each.part: bytes(data[each.content_offset : each.content_offset + each.content_nbytes])
                    for each in members
                }
                samples.append(RawSample(members[0].key, shard, place.sample_index, parts))
                continue
            key = cast("str", place.key)
            parts = {part.name: self._content(place.shard, key, part, next(pieces)) for part in place.parts}
            samples.append(RawSample(key, shard, place.sample_index, parts))
        return samples

    def content(
        self, shard: int, key: str, part: PartPlace, *, start: int | None = None, end: int | None = None
    ) -> bytes:
        """Return bytes `start` to `end` of a part, as a slice would take them; the headers are fetched with them."""
        first, last, _ = slice(start, end).indices(part.nbytes)
        headers = self._headers_start(shard, key, part)
        begin, stop = part.offset + first, part.offset + max(first, last)
        starts, ends = ([headers], [stop]) if first == 0 else ([headers, begin], [part.offset, stop])
        pieces = self._transport.get_ranges(self._shards[shard], starts=starts, ends=ends)
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
        if odd is not None and part.offset - start > len(headers):  # perhaps they are longer than expected
            (longer,) = self._transport.get_ranges(self._shards[shard], starts=[start], ends=[part.offset])
            odd = disagreement(longer, name=name, nbytes=part.nbytes)
        if odd is not None:
            raise self.stale(shard, f"the index has {brief(name)} at {part.offset:,}, but {odd}")

    def _content(self, shard: int, key: str, part: PartPlace, data: Buffer) -> bytes:
        view = memoryview(data)
        n_headers = len(view) - part.nbytes
        self._check_headers(shard, key, part, view[:n_headers])
        return bytes(view[n_headers:])

    def where(self, shard: int) -> str:
        """A shard's address, safe to show."""
        return full_url(self._transport, self._shards[shard])

    def stale(self, shard: int, message: str) -> CorruptShardError:
        """Make the error for a tar that is not the one that was indexed."""
        return CorruptShardError(
            message,
            where=self.where(shard),
            remedy="The index belongs to another tar, or one of them is damaged: prepare the data set again.",
        )
