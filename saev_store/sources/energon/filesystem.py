"""`energon://`: the parts of a data set as files that any tool can open by name, through fsspec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from saev_store.errors import NotFoundError, ReadOnlyError
from saev_store.sources.energon.keys import split_name
from saev_store.sources.energon.reader import EnergonDataset
from saev_store.sources.energon.tree import Node, children, node

_HERE = {None, "file", "local"}


class EnergonFileSystem(AbstractFileSystem):
    """Read-only: `doc/000.img1.jpg` is part `img1.jpg` of sample `doc/000`.

    `fsspec.open("energon://doc/000.json::s3://bucket/dataset")` opens a part; pandas, Pillow and others take such
    addresses where they take fsspec's. The protocol is known wherever this package is installed.

    Args:
        fo: The data set's folder.
        target_protocol: Of that folder's file system.
        target_options: For that file system.
        dataset: An opened data set, instead of the three; its splits do not matter here.
    """

    protocol = "energon"
    #: fsspec must not keep an instance beyond its use: after a new preparation, its index would be stale.
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
        """What lies directly in a folder, or the file itself."""
        path = self._strip_protocol(path)
        found = node(self.dataset, path)
        shown = [_entry(each) for each in (children(self.dataset, path) if found.is_dir else [found])]
        return shown if detail else [each["name"] for each in shown]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Name, size and type of a file or folder."""
        return _entry(node(self.dataset, self._strip_protocol(path)))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """The bytes of a part, or a range of them; negative numbers count from the end."""
        path = self._strip_protocol(path)
        found = split_name(path)
        if found is None or len(self.dataset.places.find(found[0])) != 1:
            raise NotFoundError(f"there is no {path!r}", where=self.dataset.url)
        if start is None and end is None:
            return self.dataset.part(*found)
        return self.dataset.part_range(*found, start=start, end=end)

    def _open(self, path: str, mode: str = "rb", block_size: int | str = "default", **options: Any) -> _PartFile:  # pyright: ignore[reportIncompatibleMethodOverride]  # fsspec's own subclasses narrow it, too
        if mode != "rb":
            raise ReadOnlyError(f"parts are not written through this file system (mode {mode!r})", where=path)
        return _PartFile(self, path, mode, block_size=cast("Any", block_size), **options)


class _PartFile(AbstractBufferedFile):
    """A part, read in blocks: a long video is not loaded whole."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return cast("EnergonFileSystem", self.fs).cat_file(cast("str", self.path), start, end)


def _entry(found: Node) -> dict[str, Any]:
    if found.nbytes is None:
        return {"name": found.path, "size": 0, "type": "directory"}
    return {"name": found.path, "size": found.nbytes, "type": "file"}


def register() -> None:
    """Make `energon://` known to fsspec, where this package is used without being installed."""
    import fsspec

    fsspec.register_implementation("energon", EnergonFileSystem, clobber=True)  # pyright: ignore[reportUnknownMemberType]  # the stubs
