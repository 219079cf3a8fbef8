"""What shows a store as a page in a notebook; a part of `ShardStore`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from saev_store.sources import Source
    from saev_store.store.store import ShardStore
    from saev_store.view import View


class Viewing:
    """What `ShardStore` has for looking at it."""

    def view(
        self,
        *,
        other: ShardStore | None = None,
        source: Source[object] | None = None,
        tokenizer: Callable[[int], str] | None = None,
        sae: str | os.PathLike[str] | None = None,
        height_px: int = 720,
    ) -> View:
        """A running page of this store, which a notebook shows in a frame; it ends with the returned object.

        It listens on this machine only, and its address has a random token. Nothing is written. See `saev_store.view.View`.

        Args:
            other: A second store, to compare this one with.
            source: The data set that the store was recorded from, for images and texts; default: where the metadata say, if
                that is on this machine.
            tokenizer: Gives the text of a token id, such as `lambda i: tokenizer.decode([i])`.
            sae: The safetensors file of a sparse autoencoder whose features are shown.
            height_px: The height of the frame.

        Raises:
            MissingDependencyError: the extra `view` is not installed.
            SaevStoreError: there is no such SAE, or it takes vectors of another length.
        """
        from saev_store._runtime.optional import need

        for library in ("starlette", "uvicorn"):
            need(library, install="saev-store[view]", where="view")
        from saev_store.view import View

        return View(
            cast("ShardStore", self), other=other, source=source, tokenizer=tokenizer, sae=sae, height_px=height_px
        )
