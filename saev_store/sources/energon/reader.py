"""Reads Energon data sets: samples by position, key and part, over byte ranges of the tars."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self, SupportsIndex

import numpy.typing as npt

from saev_store.core.arguments import check_flag
from saev_store.errors import ArgumentError, NotFoundError, SelectionError, brief
from saev_store.names import joined_url
from saev_store.sources._files import describe_digest
from saev_store.sources._source import DigestScope, Source, check_index, check_positions, text_card
from saev_store.sources.address import Url
from saev_store.sources.energon._places import Places, RawSample, no_part
from saev_store.sources.energon._view import View
from saev_store.sources.energon.documents import Documents, read_documents
from saev_store.sources.energon.field_map import IMAGES, Images, resolve
from saev_store.sources.energon.keys import DATASET_YAML, INDEX_SQLITE, INDEX_UUID, SPLIT_YAML, split_name
from saev_store.sources.energon.samples import SAMPLE_TYPES, CrudeSample, Sample, build
from saev_store.sources.energon.tars import Part
from saev_store.sources.energon.tars import Sample as Place
from saev_store.transport import Engine, Transport, open_transport

if TYPE_CHECKING:
    from saev_store.validation import Report


class EnergonDataset(Source[RawSample]):
    """A prepared WebDataset: `dataset[i]` and `dataset.raw(key)` return stored parts, `dataset.sample(i)` decoded samples.

    As a source it has all samples of all shards, in the order of `.info.json`; `split("train")` returns those of one split,
    without excluded ones. It can be shared between threads and pickled.

    Args:
        url: The folder that contains `.nv-meta`: a path, any fsspec URL, or, with `transport`, a path below its root.
        storage_options, engine, transport: As in `open_source`.
        images: What `sample` decodes images to: uint8 (height, width, 3) for `"rgb8"`; float32 (3, height, width) from
            0 to 1, as in Energon, for `"torchrgb"`; `"bytes"` does not decode them.
        damaged_ok: Open it even if shards are missing or the index does not fit; `problems` lists what is wrong.

    Attributes:
        transport: The storage; its root is the data set's folder.
        documents: The documents in `.nv-meta`.
        places: Finds and reads samples by shard and number.
        view: The positions of this source's samples.
        sample_type: Name of the sample type, `"CrudeWebdataset"`, or None where `dataset.yaml` names none of Energon's.

    Raises:
        NotFoundError: the folder was not prepared.
        DocumentError: a document or the index breaks a rule.
        UnsafeContentError: a document names files outside the folder, or has tags that create objects.
        CorruptShardError: a shard is missing or cut.
    """

    format = "energon"

    def __init__(
        self,
        url: Url,
        storage_options: Mapping[str, object] | None = None,
        *,
        engine: Engine = "auto",
        transport: Transport | None = None,
        images: Images = "rgb8",
        damaged_ok: bool = False,
    ) -> None:
        if images not in IMAGES:
            raise ArgumentError(f"{brief(images)} is not one of {', '.join(IMAGES)}", where="images")
        if transport is None:
            self.transport = open_transport(url, storage_options, engine=engine)
        elif storage_options is not None:
            raise ArgumentError("a transport has its options already", where="storage_options")
        else:
            self.transport = transport.at(str(url))
        self.images: Images = images
        self._damaged_ok = damaged_ok
        self.url = self.transport.url
        self.documents: Documents = read_documents(self.transport)
        self.places = Places(self.transport, self.documents)
        #: The split that `split` chose; None for all samples, also where a split is called "all".
        self._chosen_split: str | None = None
        self.view = View(range(len(self.documents.shards)), self.documents.counts)
        self.splits: tuple[str, ...] = tuple(self.documents.splits) or ("all",)
        self.sample_type = self.documents.sample_type
        self._by_name = {name: i for i, name in enumerate(self.documents.shards)}
        from saev_store.sources.energon.check import check_on_open

        self.problems = (*self.documents.problems, *check_on_open(self, damaged_ok=damaged_ok))

    def __reduce__(self) -> tuple[object, ...]:
        return (_reopen, (self.transport, self.images, self._damaged_ok, self._chosen_split))

    @property
    def shards(self) -> tuple[str, ...]:
        """The tars of this source, in order."""
        return tuple(self.documents.shards[int(i)] for i in self.view.shard_ids)

    def __len__(self) -> int:
        return len(self.view)

    def __repr__(self) -> str:
        chosen = f" (split {self._chosen_split!r})" if self._chosen_split is not None else ""
        splits = (f"{name} ({len(shards):,} shards)" for name, shards in self.documents.splits.items())
        facts = {
            "samples": f"{len(self):,} in {len(self.view.shard_ids):,} shards{chosen}",
            "splits": ", ".join(splits),
            "sample type": self.sample_type or "parts as they are",
            "read through": self.transport.name,
        }
        return text_card(f"Energon {self.url}", facts, self.problems)

    # -- samples ---------------------------------------------------------------------------------------------------------

    def __getitem__(self, index: SupportsIndex) -> RawSample:
        """The sample at a position; negative ones count from the end."""
        return self.rows([check_index(index, len(self), what="sample")])[0]

    def rows(self, indices: npt.ArrayLike | slice) -> list[RawSample]:
        """Samples by position, in the order asked for; neighbours are fetched together."""
        return self.places.fetch(self.view.places(check_positions(indices, len(self), what="sample")))

    def raw(self, sample: SupportsIndex | str) -> RawSample:
        """The sample at a position, or with a key.

        Raises:
            SelectionError: there is no such sample, or several have the key.
        """
        shard, sample_index, place = self._place(sample)
        return self.places.read(shard, [(sample_index, place)])[0]

    def part(
        self, sample: SupportsIndex | str, part: str, *, start: int | None = None, end: int | None = None
    ) -> bytes:
        """The bytes of a part, or bytes `start` to `end` of it as a slice takes them.

        Where the index lists parts, only these bytes and the headers before the part are read.

        Raises:
            SelectionError: there is no such sample or part.
        """
        shard, _, place = self._place(sample)
        for found in place.parts:
            if found.name == part:
                return self.places.content(shard, place, found, start=start, end=end)
        raise no_part(place.key, part, [each.name for each in place.parts])

    def parts(self, sample: SupportsIndex | str) -> tuple[Part, ...]:
        """Names, offsets in the tar and sizes (bytes) of a sample's parts."""
        return tuple(self._place(sample)[2].parts)

    def file(self, name: str) -> bytes:
        """A part by the name of its file in the tar, such as `"doc/000.img1.jpg"`.

        Raises:
            SelectionError: there is no such file.
        """
        found = split_name(name)
        if found is None:
            raise SelectionError(f"{brief(name)} is not the name of a part: it has no dot", where="name")
        return self.part(*found)

    def key(self, index: SupportsIndex) -> str:
        """The key of the sample at a position."""
        return self._place(check_index(index, len(self), what="sample"))[2].key

    def index_of(self, key: str) -> int:
        """The position of a key.

        Raises:
            SelectionError: no sample of this source has it, or several have (Energon 7.0 allowed that).
            NotFoundError: the data set has no index of keys.
        """
        return self._position(key, *self.places.find_one(key))

    def _position(self, key: str, shard: int, sample_index: int) -> int:
        position = self.view.position(shard, sample_index)
        if position is None:
            raise SelectionError(
                f"sample {brief(key)} is not in split {self._chosen_split!r}, or excluded from it", where="key"
            )
        return position

    def _place(self, sample: SupportsIndex | str) -> tuple[int, int, Place]:
        """Shard, number and place of a sample of this source."""
        if not isinstance(sample, str):
            ((shard, sample_index),) = self.view.places([check_index(sample, len(self), what="sample")])
            return shard, sample_index, self.places.samples(shard, sample_index, sample_index + 1)[0]
        shard, sample_index = self.places.find_one(sample)
        self._position(sample, shard, sample_index)
        (place,) = self.places.samples(shard, sample_index, sample_index + 1)
        if place.key != sample:
            raise self.places.stale(shard, f"the index has {brief(sample)} there, the tar {brief(place.key)}")
        return shard, sample_index, place

    def sample(self, sample: SupportsIndex | str) -> Sample:
        """A sample as `dataset.yaml` describes it: one of the types in `SAMPLE_TYPES`, or `CrudeSample`.

        Raises:
            DocumentError: a part that the field map needs is missing, or does not decode.
            MissingDependencyError: images need Pillow.
        """
        return self.decode(self.raw(sample))

    def decode(self, raw: RawSample) -> Sample:
        """Stored parts, such as those of `rows`, as the sample type that `dataset.yaml` names; raises as `sample`."""
        kind, field_map = SAMPLE_TYPES.get(self.sample_type or ""), self.documents.field_map
        restore_key = (self.url, raw.shard, raw.sample_index)
        if kind is None or not field_map:
            return CrudeSample(__key__=raw.key, __restore_key__=restore_key, parts=raw.parts)
        where = joined_url(self.url, f"{raw.shard}/{raw.key}")
        values = {name: resolve(path, raw.parts, where=where, images=self.images) for name, path in field_map.items()}
        return build(kind, values, key=raw.key, restore_key=restore_key, where=where)

    def split(self, name: str) -> Self:
        """The samples of one split, without excluded ones; `"all"` is every sample, unless a split has that name.

        Raises:
            SelectionError: there is no split of that name.
        """
        documents, chosen = self.documents, None
        view = View(range(len(documents.shards)), documents.counts)
        if isinstance(name, str) and name in documents.splits:  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
            ids = [self._by_name[shard] for shard in documents.splits[name]]
            chosen_ids = set(ids)
            keys = [(self._by_name[shard], key) for shard, key in documents.exclude]
            excluded = [
                place
                for shard, key in keys
                if shard in chosen_ids
                for place in self.places.find(key)
                if place[0] == shard
            ]
            chosen, view = name, View(ids, documents.counts[ids], excluded)
        elif name != "all":
            raise SelectionError(
                f"there is no split {brief(name)}; there are {', '.join(map(repr, self.splits))}", where="split"
            )
        other = type(self).__new__(type(self))
        vars(other).update(vars(self), view=view, _chosen_split=chosen)
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

    def validate(self, *, deep: bool = False, progress: bool | None = None) -> Report:
        """Report what is wrong: every row of the index against the tars' sizes; `deep` reads the headers of all tars."""
        from saev_store.sources.energon.check import validate

        return validate(self, deep=check_flag(deep, name="deep"), progress=progress)

    def close(self) -> None:
        """Release the database, maps and connections; later reads open them again."""
        if self.places.index is not None:
            self.places.index.close()
        self.transport.close()


def _reopen(transport: Transport, images: Images, damaged_ok: bool, split: str | None) -> EnergonDataset:
    dataset = EnergonDataset("", transport=transport, images=images, damaged_ok=damaged_ok)
    return dataset if split is None else dataset.split(split)
