"""Polylithic data sets: samples of a primary data set with the media that they name, out of auxiliary ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, SupportsIndex

from saev_store.errors import ArgumentError, DocumentError, NotFoundError, SelectionError, UnsafeContentError, brief
from saev_store.sources.address import Url, full_url
from saev_store.sources.energon._yaml import as_list
from saev_store.sources.energon.field_map import FieldPath, resolve
from saev_store.sources.energon.keys import is_safe_path
from saev_store.sources.energon.reader import EnergonDataset, RawSample
from saev_store.transport import Engine, Transport, open_transport

#: Files that one sample may name.
MAX_NAMES = 10_000
MAX_FILE_NBYTES = 1 << 40
_N_THREADS = 16


class MediaFiles(Protocol):
    """Files by name: an `EnergonDataset`, a `FolderFiles`, or another object with this method."""

    def file(self, name: str) -> bytes:
        """The content of a file.

        Raises:
            SelectionError, NotFoundError: there is no such file.
        """
        ...


class FolderFiles:
    """Single files in a folder, by their names below it.

    Args:
        url: The folder: a path, or any fsspec URL.
        storage_options: Options of the fsspec file system.
        engine: As in `open_transport`.
        transport: Read through this transport; `url` is ignored.
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
        return self.transport.read(name, max_bytes=MAX_FILE_NBYTES)


@dataclass(frozen=True)
class JoinedSample:
    """A sample of the primary data set, and the files that it names.

    Attributes:
        sample: The primary one's parts.
        media: For each auxiliary data set, contents by name, in the order in which the sample names them.
    """

    sample: RawSample
    media: Mapping[str, Mapping[str, bytes]] = field(repr=False)


class JoinedDataset:
    """A primary data set joined with auxiliary ones by file names.

    Args:
        primary: Samples whose parts hold names of files.
        auxiliary: Where files lie, by a name of your choice.
        names: For each of them, where the primary sample names its files: `"json[image]"`, a text or a list of texts;
            alternatives by commas. Where a sample has none of it, it names none.

    ```python
    joined = JoinedDataset(EnergonDataset("texts"), {"images": EnergonDataset("images")}, names={"images": "json[image]"})
    joined[0].media["images"]  # {"000.jpg": b"..."}
    ```
    """

    def __init__(
        self, primary: EnergonDataset, auxiliary: Mapping[str, MediaFiles], *, names: Mapping[str, str]
    ) -> None:
        if set(names) != set(auxiliary):
            raise ArgumentError(
                f"names are given for {', '.join(names) or 'nothing'}, auxiliary data sets are "
                f"{', '.join(auxiliary) or 'none'}",
                where="names",
            )
        self.primary, self.auxiliary = primary, dict(auxiliary)
        self._paths = {name: FieldPath.parse(path, where=f"names[{name!r}]") for name, path in names.items()}

    def __len__(self) -> int:
        return len(self.primary)

    def __getitem__(self, index: SupportsIndex) -> JoinedSample:
        """The sample at a position, with its files.

        Raises:
            NotFoundError: a file that it names does not exist.
            DocumentError: what should be a name is none.
        """
        return self._join([self.primary[index]])[0]

    def joined(self, key: str) -> JoinedSample:
        """The sample of a key, with its files."""
        return self._join([self.primary.raw(key)])[0]

    def batches(self, batch_size: int, *, start: int = 0, drop_last: bool = False) -> Iterator[list[JoinedSample]]:
        """Consecutive samples with their files, `batch_size` at a time."""
        for batch in self.primary.batches(batch_size, start=start, drop_last=drop_last):
            yield self._join(batch)

    def names(self, sample: RawSample, auxiliary: str) -> list[str]:
        """The files of an auxiliary data set that a sample names.

        Raises:
            DocumentError: what should be a name is none.
        """
        where = full_url(self.primary.transport, f"{sample.shard}/{sample.key}")
        path = self._paths[auxiliary]
        try:
            value = resolve(path, sample.parts, where=where, images="bytes")
        except DocumentError as error:
            if error.problems:  # a part that is there does not decode
                raise
            return []
        if isinstance(value, str):
            return [value.strip()]
        found = [] if value is None else as_list(value)
        texts = [item for item in found or () if isinstance(item, str)]
        if found is None or len(texts) != len(found) or len(texts) > MAX_NAMES:
            raise DocumentError(f"{brief(value)} is no name of a file, and no list of up to {MAX_NAMES:,}", where=where)
        return texts

    def _join(self, samples: list[RawSample]) -> list[JoinedSample]:
        wanted = [{name: self.names(sample, name) for name in self.auxiliary} for sample in samples]
        todo = [(name, file) for each in wanted for name, files in each.items() for file in files]
        todo = list(dict.fromkeys(todo))
        far = not self.primary.transport.is_local
        if far and len(todo) > 1:
            with ThreadPoolExecutor(min(_N_THREADS, len(todo))) as pool:
                contents = dict(zip(todo, pool.map(self._file, todo), strict=True))
        else:
            contents = {each: self._file(each) for each in todo}
        return [
            JoinedSample(
                sample, {name: {file: contents[name, file] for file in files} for name, files in named.items()}
            )
            for sample, named in zip(samples, wanted, strict=True)
        ]

    def _file(self, wanted: tuple[str, str]) -> bytes:
        auxiliary, name = wanted
        try:
            return self.auxiliary[auxiliary].file(name)
        except (SelectionError, NotFoundError) as error:
            raise NotFoundError(
                f"{auxiliary!r} has no file {brief(name)}: {error.message}", where=error.where
            ) from None
