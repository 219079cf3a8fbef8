"""Polylithic data sets: samples of a primary data set with the media files that they name in auxiliary ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self, SupportsIndex, cast

import numpy.typing as npt

from saev_store._runtime.threads import ahead
from saev_store.errors import ArgumentError, DocumentError, NotFoundError, SelectionError, UnsafeContentError, brief
from saev_store.names import joined_url
from saev_store.sources._source import DigestScope, Source
from saev_store.sources.address import Url
from saev_store.sources.energon.field_map import FieldPath, resolve
from saev_store.sources.energon.keys import is_safe_path
from saev_store.sources.energon.reader import EnergonDataset, RawSample
from saev_store.transport import Engine, Transport, open_transport
from saev_store.validation import Report

_N_THREADS = 16


class FolderFiles:
    """Single files in a folder, by their paths below it.

    Args:
        url: The folder: a path, or any fsspec URL; ignored with `transport`.
        storage_options, engine, transport: As in `open_source`.
    """

    def __init__(
        self,
        url: Url,
        storage_options: Mapping[str, object] | None = None,
        *,
        engine: Engine = "auto",
        transport: Transport | None = None,
    ) -> None:
        self.transport = transport if transport is not None else open_transport(url, storage_options, engine=engine)

    def file(self, name: str) -> bytes:
        """The content of a file.

        Raises:
            NotFoundError: there is no such file.
            UnsafeContentError: the name leaves the folder.
        """
        if not is_safe_path(name):
            raise UnsafeContentError(f"{brief(name)} names a file outside the folder", where=self.transport.url)
        return self.transport.read(name)

    def close(self) -> None:
        """Release maps and connections; later reads open the files again."""
        self.transport.close()


@dataclass(frozen=True)
class JoinedSample:
    """A sample of the primary data set with the files that it names.

    Attributes:
        sample: The parts of the primary data set.
        media: For each auxiliary data set, contents by name, in the order in which the sample names them.
    """

    sample: RawSample
    media: Mapping[str, Mapping[str, bytes]] = field(repr=False)


class JoinedDataset(Source[JoinedSample]):
    """A primary data set joined with auxiliary ones by the names of files.

    Positions, keys and splits are those of the primary data set, which `describe` and `validate` are about.

    Args:
        primary: Samples whose parts contain names of files.
        auxiliary: The data sets with the files, by names of your choice.
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
        self,
        primary: EnergonDataset,
        auxiliary: Mapping[str, EnergonDataset | FolderFiles],
        *,
        names: Mapping[str, str],
    ) -> None:
        if set(names) != set(auxiliary):
            raise ArgumentError(
                f"names are given for {', '.join(names) or 'nothing'}, auxiliary data sets are "
                f"{', '.join(auxiliary) or 'none'}",
                where="names",
            )
        self.primary, self.auxiliary = primary, dict(auxiliary)
        self.url, self.problems, self.splits = primary.url, primary.problems, primary.splits
        self._names = dict(names)
        self._paths = {name: FieldPath.parse(path, where=f"names[{name!r}]") for name, path in names.items()}

    def __len__(self) -> int:
        return len(self.primary)

    def __getitem__(self, index: SupportsIndex) -> JoinedSample:
        """The sample at a position, with its files; negative positions count from the end.

        Raises:
            NotFoundError: a file that it names does not exist.
            DocumentError: a name is not a text.
        """
        return self._join([self.primary[index]])[0]

    def joined(self, key: str) -> JoinedSample:
        """The sample with a key, with its files; raises as `EnergonDataset.raw` and reading by position."""
        return self._join([self.primary.raw(key)])[0]

    def rows(self, indices: npt.ArrayLike | slice) -> list[JoinedSample]:
        """Samples by position with their files, fetched together; a file that several samples name is fetched once."""
        return self._join(self.primary.rows(indices))

    def key(self, index: SupportsIndex) -> str:
        """The key of the sample at a position."""
        return self.primary.key(index)

    def index_of(self, key: str) -> int:
        """The position of a key; raises as `EnergonDataset.index_of`."""
        return self.primary.index_of(key)

    def split(self, name: str) -> Self:
        """The samples of one split of the primary data set, with the same auxiliary data sets."""
        return type(self)(self.primary.split(name), self.auxiliary, names=self._names)

    def names(self, sample: RawSample, auxiliary: str) -> list[str]:
        """The files of an auxiliary data set that a sample names.

        Raises:
            DocumentError: a name is not a text.
        """
        where = joined_url(self.url, f"{sample.shard}/{sample.key}")
        try:
            value = resolve(self._paths[auxiliary], sample.parts, where=where, images="bytes")
        except DocumentError as error:
            if error.problems:  # the part exists, and does not decode
                raise
            return []
        if isinstance(value, str):
            return [value.strip()]
        names: object = [] if value is None else value
        texts = (
            [item for item in cast("list[object]", names) if isinstance(item, str)] if isinstance(names, list) else []
        )
        if texts != names:
            raise DocumentError(f"{brief(value)} is neither a file name nor a list of them", where=where)
        return texts

    def _join(self, samples: list[RawSample]) -> list[JoinedSample]:
        wanted = [{name: self.names(sample, name) for name in self.auxiliary} for sample in samples]
        todo = list(dict.fromkeys((name, file) for each in wanted for name, files in each.items() for file in files))
        # Threads shorten round trips, and cost time where there are none.
        n_threads = 1 if all(each.transport.is_local for each in self.auxiliary.values()) else _N_THREADS
        contents = dict(zip(todo, ahead(self._file, todo, n_threads), strict=True))
        return [
            JoinedSample(sample, {name: {file: contents[name, file] for file in files} for name, files in each.items()})
            for sample, each in zip(samples, wanted, strict=True)
        ]

    def _file(self, wanted: tuple[str, str]) -> bytes:
        auxiliary, name = wanted
        try:
            return self.auxiliary[auxiliary].file(name)
        except (SelectionError, NotFoundError) as error:
            message = f"{auxiliary!r} has no file {brief(name)}: {error.message}"
            raise NotFoundError(message, where=error.where) from None

    def describe(self, *, digest: DigestScope = "sampled") -> dict[str, object]:
        """Describe the primary data set, as which `reopen` opens it."""
        return self.primary.describe(digest=digest)

    def validate(self, *, deep: bool = False, progress: bool | None = None) -> Report:
        """Report what is wrong with the primary data set."""
        return self.primary.validate(deep=deep, progress=progress)

    def close(self) -> None:
        """Release the maps and connections of all data sets; later reads open them again."""
        for each in (self.primary, *self.auxiliary.values()):
            each.close()
