"""`energon://`: the parts of a data set as files that any tool can open by name, through fsspec."""

# fsspec has no stubs.
# pyright: reportMissingTypeStubs=false
from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

from fsspec.spec import AbstractFileSystem

from saev_store.errors import DocumentError, NotFoundError, ReadOnlyError
from saev_store.sources.energon.reader import EnergonDataset

_HERE = {None, "file", "local"}
#: Samples that a listing takes from the index at once.
_PAGE = 1_000


class EnergonFileSystem(AbstractFileSystem):
    """A read-only file system: `doc/000.img1.jpg` is part `img1.jpg` of sample `doc/000`.

    `fsspec.open("energon://doc/000.json::s3://bucket/dataset")` reads a part, and so does every tool that takes addresses
    of fsspec. fsspec finds the protocol where this package is installed. Listing goes through the whole index.

    Args:
        fo: The data set's folder.
        target_protocol: Protocol of that folder's file system.
        target_options: Options of that file system.
        dataset: An opened data set, instead of the three.
    """

    protocol = "energon"
    #: fsspec must not keep instances: after a new preparation, their index is stale.
    cachable = False

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
            dataset = EnergonDataset(url, None if target_protocol in _HERE else dict(target_options or {}) or None)
        self.dataset = dataset

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """The entries of a folder, or the file itself, in the order of the index."""
        path = path.removeprefix("energon://").strip("/")
        found = {entry["name"]: entry for entry in self._entries(path)}
        if path and not found:
            raise NotFoundError(f"there is no {path!r}", where=self.dataset.url)
        return list(found.values() if detail else found)

    def _entries(self, path: str) -> Iterator[dict[str, Any]]:
        """The entries of a folder; the same subfolder may be among them several times."""
        index, start = self.dataset.index, len(path) + 1 if path else 0
        if not index.has_parts:
            raise DocumentError("it does not list parts, which Energon 6 did not index", where=index.where)
        for shard, n in enumerate(self.dataset.documents.counts.tolist()):
            places = (each for i in range(0, n, _PAGE) for each in index.samples(shard, i, min(i + _PAGE, n)))
            for name, part in ((f"{place.key}.{part.name}", part) for place in places for part in place.parts):
                if not path or name == path or name.startswith(f"{path}/"):
                    inner, slash, _ = name[start:].partition("/")
                    if slash:
                        yield {"name": name[:start] + inner, "size": 0, "type": "directory"}
                    else:
                        yield {"name": name, "size": part.nbytes, "type": "file"}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """The bytes of a part, or a range of them as a slice takes it."""
        return self.dataset.file(path.removeprefix("energon://").strip("/"))[start:end]

    def _open(self, path: str, mode: str = "rb", **_: Any) -> io.BytesIO:  # pyright: ignore[reportIncompatibleMethodOverride]  # fsspec's own subclasses narrow it, too
        if mode != "rb":
            raise ReadOnlyError(f"parts are not written through this file system (mode {mode!r})", where=path)
        return io.BytesIO(self.cat_file(path))
