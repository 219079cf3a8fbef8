"""`energon://`: the parts of a data set as files that any tool can open by name, through fsspec."""

# fsspec has no stubs.
# pyright: reportMissingTypeStubs=false
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from saev_store.errors import NotFoundError, ReadOnlyError, SelectionError
from saev_store.sources.energon.keys import split_name
from saev_store.sources.energon.reader import EnergonDataset

_HERE = {None, "file", "local"}


class EnergonFileSystem(AbstractFileSystem):
    """A read-only file system: `doc/000.img1.jpg` is part `img1.jpg` of sample `doc/000`.

    `fsspec.open("energon://doc/000.json::s3://bucket/dataset")` opens a part, and so does every tool that takes addresses
    of fsspec. fsspec finds the protocol where this package is installed.

    Args:
        fo: The data set's folder.
        target_protocol: Protocol of that folder's file system.
        target_options: Options of that file system.
        dataset: An opened data set, instead of the three.
    """

    protocol = "energon"
    #: fsspec must not keep instances: after a new preparation, their index is stale.
    cachable = False
    root_marker = ""

    def __init__(
        self,
        fo: str = "",
        target_protocol: str | None = None,
        target_options: Mapping[str, object] | None = None,
        *,
        dataset: EnergonDataset | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)  # pyright: ignore[reportUnknownMemberType]  # the stubs
        if dataset is None:
            url = fo if target_protocol in _HERE or "://" in fo else f"{target_protocol}://{fo}"
            options = None if target_protocol in _HERE else dict(target_options or {}) or None
            dataset = EnergonDataset(url, options)
        self.dataset = dataset

    @classmethod
    def _strip_protocol(cls, path: str | list[str]) -> Any:  # noqa: ANN401 - as fsspec has it
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        return path.removeprefix("energon://").strip("/")

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """The entries of a folder, or the file itself; sorted as UTF-8."""
        path = self._strip_protocol(path)
        entry = self.info(path)
        entries = list(self.entries(path)) if entry["type"] == "directory" else [entry]
        return entries if detail else [each["name"] for each in entries]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Name, size and type of a file or folder."""
        path = self._strip_protocol(path)
        key, name = split_name(path) or ("", "")
        with contextlib.suppress(SelectionError):
            for part in self.dataset.parts(key):
                if part.name == name:
                    return {"name": path, "size": part.nbytes, "type": "file"}
        if not path or next(self.entries(path), None) is not None:
            return {"name": path, "size": 0, "type": "directory"}
        raise NotFoundError(f"there is no {path!r}", where=self.dataset.url)

    def entries(self, folder: str) -> Iterator[dict[str, Any]]:
        """The entries of a folder one by one, as `ls` returns them."""
        index = self.dataset.index
        if index is None:
            raise NotFoundError("it cannot be listed: it has no index.sqlite", where=self.dataset.url)
        start, after = len(folder) + 1 if folder else 0, ("", 0)
        while rows := index.files(folder, after):
            for key, offset, part, nbytes in rows:
                inner, slash, _ = key[start:].partition("/")
                if slash:  # continue behind all that this folder has: "0" follows "/"
                    name = key[: start + len(inner)]
                    yield {"name": name, "size": 0, "type": "directory"}
                    after = (f"{name}0", -1)
                    break
                yield {"name": f"{key}.{part}", "size": nbytes, "type": "file"}
                after = (key, offset)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """The bytes of a part, or a range of them; negative numbers count from the end."""
        path = self._strip_protocol(path)
        with contextlib.suppress(SelectionError):
            return self.dataset.part(*(split_name(path) or (path, "")), start=start, end=end)
        raise NotFoundError(f"there is no {path!r}", where=self.dataset.url)

    def _open(self, path: str, mode: str = "rb", block_size: int | str = "default", **options: Any) -> _PartFile:  # pyright: ignore[reportIncompatibleMethodOverride]  # fsspec's own subclasses narrow it, too
        if mode != "rb":
            raise ReadOnlyError(f"parts are not written through this file system (mode {mode!r})", where=path)
        return _PartFile(self, path, mode, block_size=cast("Any", block_size), **options)


class _PartFile(AbstractBufferedFile):
    """A part, read in blocks."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return cast("EnergonFileSystem", self.fs).cat_file(cast("str", self.path), start, end)
