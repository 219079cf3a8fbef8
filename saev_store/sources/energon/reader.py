"""Reads Energon data sets: samples by position, key and part, over byte ranges of the tars."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Self, SupportsIndex

import numpy.typing as npt

from saev_store._runtime.threads import ahead
from saev_store.errors import (
    CorruptShardError,
    DocumentError,
    MissingShardError,
    NotFoundError,
    SelectionError,
    brief,
)
from saev_store.names import joined_url
from saev_store.sources._files import describe_digest
from saev_store.sources._source import DigestScope, Source, check_index, check_positions
from saev_store.sources.address import Url
from saev_store.sources.energon._view import SampleView
from saev_store.sources.energon.documents import Documents, read_documents
from saev_store.sources.energon.index_sqlite import SqliteIndex, open_index
from saev_store.sources.energon.keys import DATASET_YAML, INDEX_SQLITE, INDEX_UUID, SPLIT_YAML, idx_path, split_name
from saev_store.sources.energon.samples import SAMPLE_TYPES, CrudeSample, Sample, resolve
from saev_store.sources.energon.tars import BLOCK, Part, Place, offsets_of, parse_sample, scan_shard
from saev_store.transport import Transport, open_transport

N_THREADS = 16


@dataclass(frozen=True)
class RawSample:
    """A sample as it is stored.

    Attributes:
        key: Its name in the data set.
        shard: The tar that contains it, relative to the data set.
        sample_index: Its number in that tar.
        parts: The bytes of each part, by name, in the order of the tar.
        media: Of a joined data set: for each auxiliary one the files that the sample names, by name, in that order.
    """

    key: str
    shard: str
    sample_index: int
    parts: Mapping[str, bytes] = field(repr=False)
    media: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict[str, Mapping[str, bytes]], repr=False)


class EnergonDataset(Source[RawSample]):
    """A prepared WebDataset: `dataset[i]` and `dataset.raw(key)` return stored parts, `dataset.sample(i)` decoded samples.

    As a source it has all samples of all shards, in the order of `.info.json`; `split("train")` returns those of one split,
    without excluded ones. It can be shared between threads and pickled.

    Args:
        url: The folder that contains `.nv-meta`: a path, any fsspec URL, or, with `transport`, a path below its root.
        storage_options, transport: As in `open_source`.

    Attributes:
        transport: The storage; its root is the data set's folder.
        sample_type: Name of the sample type, `"CrudeWebdataset"`, or None where `dataset.yaml` names none of Energon's.

    Raises:
        NotFoundError: the folder was not prepared.
        DocumentError: a document or the index breaks a rule.
        UnsafeContentError: a document names files outside the folder, or has tags that create objects.
    """

    format = "energon"

    def __init__(
        self, url: Url, storage_options: Mapping[str, object] | None = None, *, transport: Transport | None = None
    ) -> None:
        self.transport = open_transport(url, storage_options) if transport is None else transport.at(str(url))
        self.url = self.transport.url
        self.documents: Documents = read_documents(self.transport)
        self.index: SqliteIndex = open_index(self.transport)
        #: The split that `split` chose; None for all samples, also where a split is called "all".
        self._chosen_split: str | None = None
        self.view = SampleView(range(len(self.documents.shards)), self.documents.counts)
        self.splits: tuple[str, ...] = tuple(self.documents.splits) or ("all",)
        self.sample_type = self.documents.sample_type
        self._n_files = len(self.documents.shards)

    def __reduce__(self) -> tuple[object, ...]:
        return (_reopen, (self.transport, self._chosen_split))

    @property
    def shards(self) -> tuple[str, ...]:
        """The tars of this source, in order."""
        return tuple(self.documents.shards[int(i)] for i in self.view.shard_ids)

    def __len__(self) -> int:
        return len(self.view)

    def __getitem__(self, index: SupportsIndex) -> RawSample:
        """The sample at a position; negative ones count from the end."""
        return self.rows([check_index(index, len(self), what="sample")])[0]

    def rows(self, indices: npt.ArrayLike | slice) -> list[RawSample]:
        """Samples by position, in the order asked for; neighbours are fetched together."""
        wanted = self.view.places(check_positions(indices, len(self), what="sample"))
        ordered = sorted(set(wanted))
        by_shard = [(shard, [i for _, i in pairs]) for shard, pairs in groupby(ordered, lambda pair: pair[0])]
        n_threads = 1 if self.transport.is_local else N_THREADS  # threads pay where a request is a round trip
        samples = [sample for group in ahead(lambda each: self._fetch(*each), by_shard, n_threads) for sample in group]
        found = dict(zip(ordered, samples, strict=True))
        return [found[place] for place in wanted]

    def raw(self, sample: SupportsIndex | str) -> RawSample:
        """The sample at a position, or with a key.

        Raises:
            SelectionError: there is no such sample, or several have the key (Energon 7.0 allowed that).
        """
        return self[self.index_of(sample) if isinstance(sample, str) else sample]

    def part(self, sample: SupportsIndex | str, part: str) -> bytes:
        """The bytes of a part; otherwise as `raw`. Only it and its headers are read, except from data sets of Energon 6."""
        shard, place = self._find(sample)
        found = next((each for each in place.parts if each.name == part), None)
        if found is None:
            raise SelectionError(f"sample {brief(place.key)} has no part {brief(part)}", where="part")
        ends = {each.offset: each.offset + -(-each.nbytes // BLOCK) * BLOCK for each in place.parts}
        start = max([place.offset, *(end for offset, end in ends.items() if offset < found.offset)])
        ((_, data),) = self._read(shard, [Place(place.key, start, ends[found.offset] - start, [found])])
        return bytes(data[found.offset - start :][: found.nbytes])

    def parts(self, sample: SupportsIndex | str) -> tuple[Part, ...]:
        """Names, offsets in the tar and sizes (bytes) of a sample's parts."""
        return tuple(self._find(sample)[1].parts)

    def file(self, name: str) -> bytes:
        """A part by the name of its file in the tar, such as `"doc/000.img1.jpg"`; `NotFoundError` if there is none."""
        with contextlib.suppress(SelectionError):
            return self.part(*(split_name(name) or (name, "")))
        raise NotFoundError(f"there is no {brief(name)}", where=self.url)

    def key(self, index: SupportsIndex) -> str:
        """The key of the sample at a position."""
        return self._find(check_index(index, len(self), what="sample"))[1].key

    def index_of(self, key: str) -> int:
        """The position of a key; raises as `raw`."""
        found = self.index.find(key)
        position = self.view.position(*found[0]) if len(found) == 1 else None
        if position is None:
            raise SelectionError(f"{len(found)} samples have the key {brief(key)}, or none in the split", where="key")
        return position

    def _find(self, sample: SupportsIndex | str) -> tuple[int, Place]:
        """Shard and place of a sample of this source."""
        position = self.index_of(sample) if isinstance(sample, str) else check_index(sample, len(self), what="sample")
        ((shard, number),) = self.view.places([position])
        (place,) = self.index.samples(shard, number, number + 1)
        if not place.parts:
            ((place, _),) = self._read(shard, [place])
        return shard, place

    def _read(self, shard: int, places: Sequence[Place]) -> list[tuple[Place, memoryview]]:
        """Samples, or single parts, of one shard and their bytes; compared with the headers in the tar."""
        starts, ends = [each.offset for each in places], [each.offset + each.nbytes for each in places]
        found: list[tuple[Place, memoryview]] = []
        buffers = self.transport.get_ranges(self.documents.shards[shard], starts=starts, ends=ends)
        for place, buffer in zip(places, buffers, strict=True):
            parsed = parse_sample(buffer, offset=place.offset, where=self._where(shard))
            if len(parsed) != 1 or (parsed[0].key, place.parts or parsed[0].parts) != (place.key, parsed[0].parts):
                raise self._stale(shard, f"{brief(place.key)} is not at {place.offset:,}, where the index has it")
            found.append((parsed[0], memoryview(buffer)))
        return found

    def _fetch(self, shard: int, numbers: Sequence[int]) -> list[RawSample]:
        """Samples of one shard by their numbers, ascending."""
        places = [place for first, end in _runs(numbers) for place in self.index.samples(shard, first, end)]
        found: list[RawSample] = []
        for number, (place, data) in zip(numbers, self._read(shard, places), strict=True):
            parts = {name: bytes(data[at - place.offset :][:nbytes]) for name, at, nbytes in place.parts}
            found.append(RawSample(place.key, self.documents.shards[shard], number, parts))
        return found

    def _where(self, shard: int) -> str:
        return self.transport.where(self.documents.shards[shard])

    def _stale(self, shard: int, message: str) -> CorruptShardError:
        remedy = "The index belongs to another tar, or one of them is damaged: prepare the data set again."
        return CorruptShardError(message, where=self._where(shard), remedy=remedy)

    def sample(self, sample: SupportsIndex | str) -> Sample:
        """A sample as `dataset.yaml` describes it: one of the types in `SAMPLE_TYPES`, or `CrudeSample`.

        Raises:
            DocumentError: a part that the field map needs is missing, or does not decode.
            MissingDependencyError: images need Pillow.
        """
        return self.decode(self.raw(sample))

    def decode(self, raw: RawSample) -> Sample:
        """Stored parts, such as those of `rows`, as `sample` returns them."""
        kind, field_map = SAMPLE_TYPES.get(self.sample_type or ""), self.documents.field_map
        where = joined_url(self.url, f"{raw.shard}/{raw.key}")
        origin = {"__key__": raw.key, "__restore_key__": (self.url, raw.shard, raw.sample_index)}
        if kind is None or not field_map:
            return CrudeSample(parts=raw.parts, **origin)  # type: ignore[arg-type]  # the fields above
        values = {name: resolve(path, raw.parts, where=where) for name, path in field_map.items()}
        return kind(**origin, **values)  # type: ignore[arg-type]  # the field map was compared with the fields

    def split(self, name: str) -> Self:
        """The samples of one split, without excluded ones; `"all"` is every sample, unless a split has that name.

        Raises:
            SelectionError: there is no split of that name.
        """
        documents, chosen = self.documents, None
        view = SampleView(range(len(documents.shards)), documents.counts)
        if isinstance(name, str) and name in documents.splits:  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
            numbers = {shard: i for i, shard in enumerate(documents.shards)}
            ids = [numbers[shard] for shard in documents.splits[name]]
            excluded = {
                (shard, number)
                for path, key in documents.exclude
                if path in documents.splits[name]
                for shard, number in self.index.find(key)
                if shard == numbers[path] and number < documents.counts[shard]
            }
            chosen, view = name, SampleView(ids, documents.counts[ids], excluded)
        elif name != "all":
            raise SelectionError(f"there is no split {brief(name)}; there are {', '.join(self.splits)}", where="split")
        other = type(self).__new__(type(self))
        vars(other).update(vars(self), view=view, _chosen_split=chosen, _n_files=len(set(view.shard_ids.tolist())))
        return other

    # -- as a source -----------------------------------------------------------------------------------------------------

    def describe(self, *, digest: DigestScope = "sampled") -> dict[str, object]:
        """Describe the samples for `metadata.data` of a store that is recorded from them."""
        files: list[tuple[str, int]] = []
        uuid = ""
        with contextlib.suppress(NotFoundError):
            uuid = self.transport.read(INDEX_UUID, max_bytes=1024).decode("ascii", "replace").strip()
        for path in (SPLIT_YAML, DATASET_YAML, INDEX_SQLITE):
            with contextlib.suppress(NotFoundError):
                files.append((path, self.transport.size(path)))
        files += [(path, self.transport.size(path)) for path in dict.fromkeys(self.shards)]
        return {
            "format": self.format,
            "url": self.url,
            "split": self._chosen_split,
            "n_samples": len(self),
            "mapping": "example i is sample i of the split, in the order of its shards, without those that are excluded",
            "index_uuid": uuid,
            "sample_type": self.sample_type,
            "digest": describe_digest(self.transport, files, scope=digest),
        }

    def _checks(self, deep: bool) -> Iterator[tuple[Callable[[], int], int, int]]:
        """Compare the ends of all tars with the index; `deep`: and all headers in them."""
        for shard in sorted(set(self.view.shard_ids.tolist())):
            yield partial(self._check_shard, shard, deep=deep), *self.view.span(shard)

    def _check_shard(self, shard: int, *, deep: bool) -> int:
        """Raise an error unless a shard ends where its index does (`deep`: and has its headers); return the bytes read."""
        name, n_samples = self.documents.shards[shard], int(self.documents.counts[shard])
        try:
            nbytes = self.transport.size(name)
        except NotFoundError as error:
            raise MissingShardError(error.message, where=self._where(shard), remedy="Restore the tar.") from None
        n_found, end = self.index.last(shard)
        if n_found != n_samples or end > nbytes:
            message = (
                f"{brief(name)} has {nbytes:,} bytes, {n_samples:,} samples; the index has {end:,} and {n_found:,}"
            )
            raise DocumentError(message, where=self.transport.where(INDEX_SQLITE), remedy="Prepare the data set again.")
        behind = self.transport.get_ranges(name, starts=[end], ends=[min(end + BLOCK, nbytes)])[0] if end else b""
        if any(bytes(behind)):
            raise self._stale(shard, f"the index ends at {end:,}, and the tar has more")
        if not deep:
            return len(behind)
        found = scan_shard(self.transport, name)
        there = found.samples if self.index.has_parts else [sample._replace(parts=[]) for sample in found.samples]
        offsets = offsets_of(found)
        is_listed = len(there) == n_samples and self.index.samples(shard, 0, n_samples) == there
        if not is_listed or self.transport.read(idx_path(name), max_bytes=len(offsets)) != offsets:
            raise self._stale(shard, "its headers differ from the index")
        return nbytes

    def close(self) -> None:
        """Release the database, maps and connections; later reads open them again."""
        self.index.close()
        self.transport.close()


def _reopen(transport: Transport, split: str | None) -> EnergonDataset:
    dataset = EnergonDataset("", transport=transport)
    return dataset if split is None else dataset.split(split)


def _runs(ascending: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Half-open ranges of consecutive numbers."""
    for _, group in groupby(enumerate(ascending), lambda item: item[1] - item[0]):
        numbers = [number for _, number in group]
        yield numbers[0], numbers[-1] + 1
