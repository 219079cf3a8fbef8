"""Polylithic data sets: samples of a primary data set with the files that they name in auxiliary ones; metadata sets."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Self, SupportsIndex, cast

import numpy.typing as npt
from pydantic import Field

from saev_store._runtime.threads import ahead
from saev_store.errors import ArgumentError, DocumentError, SelectionError, UnsafeContentError, brief
from saev_store.names import joined_url
from saev_store.sources._source import DigestScope, Source
from saev_store.sources.address import Url, locate, split_address
from saev_store.sources.energon.documents import MAX_YAML_NBYTES, MODULE, Document, load_yaml
from saev_store.sources.energon.keys import check_names
from saev_store.sources.energon.reader import N_THREADS, EnergonDataset, RawSample
from saev_store.sources.energon.samples import parse_path, resolve
from saev_store.transport import Transport, open_transport


class JoinedDataset(Source[RawSample]):
    """A primary data set joined with auxiliary ones by the names of files: its samples have `media`.

    Args:
        primary: Samples whose parts contain names of files. Positions and splits are those of this data set.
        auxiliary: The data sets with the files, or transports of folders of files, by names of your choice.
        names: For each of them, the origin of the file names in a primary sample: `"json[image]"`, a text or a list of
            texts, with alternatives after commas. A sample without it names no files.

    Raises:
        ArgumentError: `names` and `auxiliary` have different keys.

    ```python
    joined = JoinedDataset(EnergonDataset("texts"), {"images": EnergonDataset("images")}, names={"images": "json[image]"})
    joined[0].media["images"]  # {"000.jpg": b"..."}
    ```
    """

    format = "energon"

    def __init__(
        self, primary: EnergonDataset, auxiliary: Mapping[str, EnergonDataset | Transport], *, names: Mapping[str, str]
    ) -> None:
        if set(names) != set(auxiliary):
            raise ArgumentError(f"names are given for {list(names)}, data sets for {list(auxiliary)}", where="names")
        self.primary, self.auxiliary = primary, dict(auxiliary)
        self.url, self.splits = primary.url, primary.splits
        self._names = dict(names)
        self._paths = {name: parse_path(path, where="names") for name, path in names.items()}

    def __len__(self) -> int:
        return len(self.primary)

    def __getitem__(self, index: SupportsIndex) -> RawSample:
        """The sample at a position with its files; `NotFoundError`, `UnsafeContentError` or `DocumentError` for a wrong name."""
        return self._joined([self.primary[index]])[0]

    def rows(self, indices: npt.ArrayLike | slice) -> list[RawSample]:
        """Samples by position with their files, fetched together; a file that several samples name is fetched once."""
        return self._joined(self.primary.rows(indices))

    def key(self, index: SupportsIndex) -> str:
        """The key of the sample at a position."""
        return self.primary.key(index)

    def split(self, name: str) -> Self:
        """The samples of one split of the primary data set, with the same auxiliary data sets."""
        return type(self)(self.primary.split(name), self.auxiliary, names=self._names)

    def _joined(self, samples: list[RawSample]) -> list[RawSample]:
        wanted = [{name: self._named(sample, name) for name in self.auxiliary} for sample in samples]
        todo = list(dict.fromkeys((name, file) for each in wanted for name, files in each.items() for file in files))
        contents = dict(zip(todo, ahead(self._file, todo, N_THREADS), strict=True))
        return [
            replace(sample, media={name: {file: contents[name, file] for file in each[name]} for name in each})
            for sample, each in zip(samples, wanted, strict=True)
        ]

    def _named(self, sample: RawSample, auxiliary: str) -> list[str]:
        """The files of an auxiliary data set that a sample names."""
        where = joined_url(self.url, f"{sample.shard}/{sample.key}")
        value = resolve(self._paths[auxiliary], sample.parts, where=where, images="bytes", is_optional=True)
        names = cast("list[object]", value if isinstance(value, list) else [] if value is None else [value])
        texts = [name.strip() for name in names if isinstance(name, str)]
        if len(texts) != len(names):
            raise DocumentError(f"{brief(names)} are not names of files", where=where)
        check_names(texts, where=where)
        return texts

    def _file(self, wanted: tuple[str, str]) -> bytes:
        auxiliary, name = wanted
        files = self.auxiliary[auxiliary]
        return files.read(name) if isinstance(files, Transport) else files.file(name)

    def describe(self, *, digest: DigestScope = "sampled") -> dict[str, object]:
        """Describe the primary data set, as which `reopen` opens it."""
        return self.primary.describe(digest=digest)

    def close(self) -> None:
        """Release the maps and connections of all data sets; later reads open them again."""
        for each in (self.primary, *self.auxiliary.values()):
            each.close()


# -- metadata sets -----------------------------------------------------------------------------------------------------

_FOLDER = re.compile(r"filesystem(?:\+([A-Za-z][A-Za-z0-9+.-]*))?://")


class _JoinedSplit(Document):
    path: str
    split_part: str | None = None
    aux: dict[str, str] | None = None
    #: Ways to combine several primary data sets, or to take a part of one: refused.
    blend: None = None
    blend_epochized: None = None
    join: None = None
    dataset_config: None = None
    split_config: None = None
    subset: None = None


class _Metadataset(Document):
    module: str = Field(alias="__module__", pattern=f"^{re.escape(MODULE)}")
    name: str = Field(alias="__class__", pattern="^MetadatasetV2$")
    splits: dict[str, _JoinedSplit]


def open_metadataset(
    url: Url,
    split: str = "train",
    storage_options: Mapping[str, object] | None = None,
    *,
    names: Mapping[str, str],
    outside_ok: bool = False,
) -> JoinedDataset:
    """The primary data set of a split of a metadata set (`MetadatasetV2`), joined with the auxiliary ones that `names` lists.

    Args:
        url: The YAML document: a path, or any fsspec URL. Addresses in it are relative to its folder.
        split: A split of the metadata set.
        storage_options: Options of the file systems of the document and of all data sets that it names.
        names: As in `JoinedDataset`, for some of the auxiliary data sets.
        outside_ok: Allow addresses outside the document's folder: absolute ones, URLs, and those with `..`.

    Raises:
        SelectionError: there is no such split.
        ArgumentError: `names` lists auxiliary data sets that the split does not have.
        UnsafeContentError: an address is outside the folder, and `outside_ok` is false; or the document has tags.
        DocumentError: it is not such a document, or a split combines several primary data sets: open those one by one.
    """
    transport, name = locate(url, storage_options)
    where, folder = transport.where(name), split_address(os.fspath(url))[0]
    splits = load_yaml(_Metadataset, transport.read(name, max_bytes=MAX_YAML_NBYTES), where=where).splits
    if split not in splits:
        raise SelectionError(f"there is no split {brief(split)}; there are {', '.join(splits)}", where="split")
    given = splits[split]

    def address_of(text: str) -> str:
        """An address of the document, relative to its folder, in full."""
        if not text or "\0" in text:
            raise DocumentError(f"{brief(text)} is not a path", where=where)
        is_absolute = "://" in text or "::" in text or text.startswith("/")
        if (is_absolute or ".." in text.split("/")) and not outside_ok:
            remedy = "Pass outside_ok=True if you trust the document."
            raise UnsafeContentError(f"{brief(text)} is not below the document's folder", where=where, remedy=remedy)
        relative = "/".join(part for part in text.split("/") if part not in {"", "."})
        return text if is_absolute else joined_url(folder, relative) if relative else folder

    auxiliary: dict[str, EnergonDataset | Transport] = {}
    for name in names:
        text = (given.aux or {}).get(name)
        if text is None:
            raise ArgumentError(f"split {brief(split)} has no auxiliary data set {brief(name)}", where="names")
        if (scheme := _FOLDER.match(text)) is None:
            auxiliary[name] = EnergonDataset(address_of(text), storage_options)
        else:  # the folder's own address: without the word `filesystem`
            below = text[scheme.end() :]
            address = address_of(f"{scheme[1]}://{below}" if scheme[1] else below)
            auxiliary[name] = open_transport(address, storage_options)
    primary = EnergonDataset(address_of(given.path), storage_options).split(given.split_part or split)
    return JoinedDataset(primary, auxiliary, names=names)
