"""Finds and fetches samples: byte ranges from `index.sqlite` or `.tar.idx`, contents compared with the tar's headers."""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from saev_store._runtime.threads import ahead
from saev_store.core.layout import IntArray
from saev_store.errors import CorruptShardError, NotFoundError, SelectionError, brief
from saev_store.sources._files import chunks
from saev_store.sources.energon.documents import Documents
from saev_store.sources.energon.index_sqlite import SqliteIndex
from saev_store.sources.energon.keys import INDEX_SQLITE
from saev_store.sources.energon.tars import BLOCK, Part, Sample, is_header_of, parse_sample, read_tar_idx
from saev_store.transport import Transport
from saev_store.transport.checks import os_errors

N_THREADS = 16


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
        if part not in self.parts:
            raise no_part(self.key, part, self.parts)
        return self.parts[part]


def no_part(key: str, part: str, names: Iterable[str]) -> SelectionError:
    """The error for a part that a sample does not have."""
    return SelectionError(f"sample {key!r} has no part {brief(part)}; it has {', '.join(names)}", where="part")


class Places:
    """Finds samples by shard and number or by key, and reads them; may be shared between threads.

    Args:
        transport: The data set's folder.
        documents: Its documents.

    Attributes:
        index: Its database; None for a data set without one.
    """

    def __init__(self, transport: Transport, documents: Documents) -> None:
        self.transport, self.documents = transport, documents
        self.index: SqliteIndex | None = None
        with contextlib.suppress(NotFoundError):
            self.index = _open_index(transport)
        self._offsets: dict[int, IntArray] = {}

    # -- places --------------------------------------------------------------------------------------------------------

    def lists_parts(self) -> SqliteIndex | None:
        """The database if it lists parts. Otherwise a sample's range is in `.tar.idx`, its key and parts are in the tar."""
        return self.index if self.index is not None and self.index.has_parts else None

    def samples(self, shard: int, first: int, end: int) -> list[Sample]:
        """Samples `first` to `end` of a shard; where only the tar has their keys and parts, the range is fetched."""
        if (index := self.lists_parts()) is not None:
            return index.samples(shard, first, end)
        offsets = self.offsets(shard)[first : end + 1].tolist()
        name, where = self.documents.shards[shard], self.where(shard)
        ranges = self.transport.get_ranges(name, starts=offsets[:-1], ends=offsets[1:])
        found = [parse_sample(data, offset=offset, where=where) for data, offset in zip(ranges, offsets, strict=False)]
        if any(len(samples) != 1 for samples in found):
            raise self.stale(shard, f"a sample of {first} to {end - 1} is not at the place in its .tar.idx")
        return [sample for (sample,) in found]

    def offsets(self, shard: int) -> IntArray:
        """The content of a shard's `.tar.idx`, read once."""
        if shard not in self._offsets:
            n_samples = int(self.documents.counts[shard])
            self._offsets[shard] = read_tar_idx(self.transport, self.documents.shards[shard], n_samples)
        return self._offsets[shard]

    def find(self, key: str) -> list[tuple[int, int]]:
        """(shard, sample_index) of all samples that have a key.

        Raises:
            NotFoundError: the data set has no index of keys.
            CorruptShardError: the index names samples that do not exist.
        """
        if self.index is None:
            raise NotFoundError(
                "keys cannot be looked up: the data set has no index.sqlite (it was prepared by Energon 5)",
                where=self.transport.url,
                remedy="Run `saev-store prepare --overwrite` on it.",
            )
        found = self.index.find(key)
        for shard, sample_index in found:
            if shard >= len(self.documents.shards) or sample_index >= self.documents.counts[shard]:
                raise CorruptShardError(
                    f"the index has {brief(key)} in shard {shard}, sample {sample_index}, which does not exist",
                    where=self.index.where,
                    remedy="The index belongs to other tars: prepare the data set again.",
                )
        return found

    def find_one(self, key: str) -> tuple[int, int]:
        """(shard, sample_index) of the only sample that has a key; raises as `find`.

        Raises:
            SelectionError: no sample has it, or several have.
        """
        found = self.find(key)
        if len(found) == 1:
            return found[0]
        if not found:
            raise SelectionError(f"no sample has the key {brief(key)}", where="key")
        shards = ", ".join(brief(self.documents.shards[shard]) for shard, _ in found[:4])
        raise SelectionError(
            f"{len(found)} samples have the key {brief(key)}, in {shards}", where="key", remedy="Take them by position."
        )

    # -- contents ------------------------------------------------------------------------------------------------------

    def fetch(self, wanted: Sequence[tuple[int, int]]) -> list[RawSample]:
        """Samples by (shard, sample_index), in the order asked for; neighbours are fetched together."""
        by_shard = [
            (shard, [i for _, i in pairs]) for shard, pairs in groupby(sorted(set(wanted)), lambda pair: pair[0])
        ]
        n_threads = 1 if self.transport.is_local else N_THREADS  # threads pay where a request is a round trip
        groups = ahead(self._fetch_shard, by_shard, n_threads)
        found = {
            (shard, sample.sample_index): sample
            for (shard, _), group in zip(by_shard, groups, strict=True) for sample in group
        }  # fmt: skip
        return [found[pair] for pair in wanted]

    def _fetch_shard(self, wanted: tuple[int, list[int]]) -> list[RawSample]:
        shard, numbers = wanted
        samples = [sample for first, end in _runs(numbers) for sample in self.samples(shard, first, end)]
        return self.read(shard, list(zip(numbers, samples, strict=True)))

    def read(self, shard: int, samples: Sequence[tuple[int, Sample]]) -> list[RawSample]:
        """Samples of one shard, by number and place; every header is compared with the index.

        Raises:
            CorruptShardError: the tar has something else there.
        """
        name, starts = self.documents.shards[shard], [sample.offset for _, sample in samples]
        ends = [max(part.offset + part.nbytes for part in sample.parts) for _, sample in samples]
        found: list[RawSample] = []
        buffers = self.transport.get_ranges(name, starts=starts, ends=ends)
        for (sample_index, sample), buffer in zip(samples, buffers, strict=True):
            data, parts, before = memoryview(buffer), dict[str, bytes](), 0
            for part in sample.parts:
                start = part.offset - sample.offset
                self._check_headers(shard, sample.key, part, data[before:start])
                parts[part.name] = bytes(data[start : start + part.nbytes])
                before = start + -(-part.nbytes // BLOCK) * BLOCK
            found.append(RawSample(sample.key, name, sample_index, parts))
        return found

    def content(self, shard: int, sample: Sample, part: Part, *, start: int | None, end: int | None) -> bytes:
        """Bytes `start` to `end` of a part, as a slice takes them; the headers before the part are fetched and compared."""
        first, last, _ = slice(start, end).indices(part.nbytes)
        before = [each.offset + -(-each.nbytes // BLOCK) * BLOCK for each in sample.parts if each.offset < part.offset]
        starts = [max([sample.offset, *before]), part.offset + first]
        ends = [part.offset, part.offset + max(first, last)]
        headers, data = self.transport.get_ranges(self.documents.shards[shard], starts=starts, ends=ends)
        self._check_headers(shard, sample.key, part, memoryview(headers))
        return bytes(data)

    def _check_headers(self, shard: int, key: str, part: Part, headers: memoryview) -> None:
        name = f"{key}.{part.name}"
        if not is_header_of(headers, name=name, nbytes=part.nbytes):
            raise self.stale(
                shard, f"the index has {brief(name)} of {part.nbytes:,} bytes at {part.offset:,}, the tar does not"
            )

    def where(self, shard: int) -> str:
        """A shard's address, safe to show."""
        return self.transport.where(self.documents.shards[shard])

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
    for _, group in groupby(enumerate(ascending), lambda item: item[1] - item[0]):
        numbers = [number for _, number in group]
        yield numbers[0], numbers[-1] + 1


def _open_index(transport: Transport) -> SqliteIndex:
    """Open the database of a data set; a remote one is fetched whole, to a temporary file.

    Raises:
        NotFoundError: there is none.
        DocumentError: it is not a database.
    """
    where, nbytes = transport.where(INDEX_SQLITE), transport.size(INDEX_SQLITE)
    if transport.local_path is not None:
        return SqliteIndex(f"{transport.local_path}/{INDEX_SQLITE}", where=where)
    with os_errors("$TMPDIR", "write"):
        descriptor, path = tempfile.mkstemp(prefix="saev-store-index-", suffix=".sqlite")
    try:
        with os_errors(path, "write"), os.fdopen(descriptor, "wb") as file:  # closing writes the rest
            for chunk in chunks(transport, INDEX_SQLITE, nbytes):
                file.write(chunk)
        index = SqliteIndex(path, where=where)
    except BaseException:
        os.unlink(path)
        raise
    weakref.finalize(index, _remove, path)
    return index


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
