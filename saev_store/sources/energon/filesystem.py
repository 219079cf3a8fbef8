"""`energon://`: the parts of a data set as files that any tool can open by name, through fsspec."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from fsspec.spec import AbstractFileSystem

from saev_store.errors import ReadOnlyError
from saev_store.sources.energon.reader import EnergonDataset

_HERE = {None, "file", "local"}


class EnergonFileSystem(AbstractFileSystem):
    """A read-only file system: `doc/000.img1.jpg` is part `img1.jpg` of sample `doc/000`.

    `fsspec.open("energon://doc/000.json::s3://bucket/dataset")` reads a part, and so does every tool that takes addresses
    of fsspec. fsspec finds the protocol where this package is installed. It does not list.

    Args:
        fo: The data set's folder.
        target_protocol: Protocol of that folder's file system.
        target_options: Options of that file system.
    """

    protocol = "energon"
    #: fsspec must not keep instances: after a new preparation, their index is stale.
    cachable = False

    def __init__(
        self,
        fo: str = "",
        target_protocol: str | None = None,
        target_options: Mapping[str, object] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)  # pyright: ignore[reportUnknownMemberType]  # the stubs
        url = fo if target_protocol in _HERE or "://" in fo else f"{target_protocol}://{fo}"
        self.dataset = EnergonDataset(url, None if target_protocol in _HERE else target_options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """The bytes of a part, or a range of them as a slice takes it."""
        return self.dataset.file(path.removeprefix("energon://").strip("/"))[start:end]

    def _open(self, path: str, mode: str = "rb", **_: Any) -> io.BytesIO:  # pyright: ignore[reportIncompatibleMethodOverride]  # fsspec's own subclasses narrow it, too
        if mode != "rb":
            raise ReadOnlyError(f"parts are not written through this file system (mode {mode!r})", where=path)
        return io.BytesIO(self.cat_file(path))
