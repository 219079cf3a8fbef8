"""The page of a store in a notebook; a part of `ShardStore`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from saev_store.sources import Source
    from saev_store.store.store import ShardStore
    from saev_store.view import View


class Viewing:
    """The method of `ShardStore` that shows it."""

    def view(
        self,
        *,
        other: ShardStore | None = None,
        source: Source[object] | None = None,
        tokenizer: Callable[[int], str] | None = None,
        height_px: int = 720,
    ) -> View:
        """A running page of this store, which a notebook shows in a frame; it ends with the returned object.

        It listens on this machine only, and its address has a random token. Nothing is written. See `saev_store.view.View`.

        Args:
            other: A second store, to compare this one with.
            source: The data set that the store was recorded from, for images and texts; default: the one that the metadata name, if
                that is on this machine.
            tokenizer: Gives the text of a token id, such as `lambda i: tokenizer.decode([i])`.
            height_px: The height of the frame.

        Raises:
            MissingDependencyError: the extra `view` is not installed.
        """
        from saev_store.view import View

        return View(cast("ShardStore", self), other=other, source=source, tokenizer=tokenizer, height_px=height_px)
