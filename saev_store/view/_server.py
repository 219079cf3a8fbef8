"""Opens what is looked at, and runs the page: until Ctrl-C, or beside a notebook."""

from __future__ import annotations

import html
import os
import secrets
import weakref
from collections.abc import Callable, Mapping
from typing import Self

from saev_store.core.arguments import check_count
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    IncompleteStoreError,
    UnsafeContentError,
    brief,
)
from saev_store.serve import listen, serve, serve_in_thread
from saev_store.sources import Source
from saev_store.store.store import ShardStore
from saev_store.view._application import application
from saev_store.view._pages import Pages
from saev_store.view._sae import read_sae
from saev_store.view._viewed import Viewed

#: The only address that the page is served at.
_LOOPBACK = "127.0.0.1"
#: Errors of a store that is there and broken: its page says what is wrong.
_BROKEN = (CorruptShardError, DocumentError, IncompleteStoreError, UnsafeContentError)


def open_pages(
    url: str | os.PathLike[str],
    storage_options: Mapping[str, object] | None = None,
    *,
    other: str | None = None,
    source_url: str | None = None,
    tokenizer: Callable[[int], str] | None = None,
    sae_url: str | os.PathLike[str] | None = None,
) -> Pages:
    """The pages of a store; of one that is broken those that say what is wrong with it.

    Args:
        url: The store's folder, as `ShardStore.open` takes it.
        storage_options: Options of its file system.
        other: The folder of a second store, opened with the same options, to compare the first one with.
        source_url: Where the data set is now that it was recorded from; default: where its metadata say, if that is on this
            machine.
        tokenizer: Gives the text of a token id.
        sae_url: The safetensors file of a sparse autoencoder whose features are shown; see `read_sae`.

    Raises:
        SaevStoreError: there is no store, or it cannot be reached; there is no such data set at `source_url`; or no such SAE.
    """
    from saev_store.store.store import ShardStore

    places = (str(os.fspath(url)),)
    try:
        store = ShardStore.open(url, storage_options, damaged_ok=True)
    except _BROKEN as error:
        return Pages(None, name=name_of(places[0]), error=error, places=places)
    source = None if source_url is None else store.source(url=source_url)
    second = None if other is None else Viewed(ShardStore.open(other, storage_options, damaged_ok=True))
    sae = None if sae_url is None else read_sae(sae_url, d_model=store.metadata.d_model)
    viewed = Viewed(store, source=source, tokenizer=tokenizer, sae=sae)
    return Pages(viewed, other=second, places=(*places, *(() if other is None else (other,))))


def name_of(url: str) -> str:
    """The last component of an address, without a query.

    >>> name_of("s3://user:pw@bucket/shards/1a2b3c4d/?versionId=7")
    '1a2b3c4d'
    """
    return url.partition("?")[0].rstrip("/").rpartition("/")[2].rpartition("@")[2] or "store"


def run(pages: Pages, *, port: int, tell: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C.

    Args:
        pages: What is answered.
        port: The port; 0 takes any free one.
        tell: Is called with the address, which has the token.

    Raises:
        ArgumentError: the port is taken or not allowed.
    """
    token = secrets.token_urlsafe(16)
    listening, address = listen(_LOOPBACK, port)
    tell(f"{address}{token}/")
    serve(application(pages, token=token), listening)


class View:
    """A running page of a store, for notebooks; it ends with this object, or with `close`.

    Attributes:
        url: The address of the page. Whoever has it, and is on this machine, can read the store.

    Args:
        store: An opened store; it must stay open.
        other: A second one, to compare it with.
        source: The data set that it was recorded from; default: where its metadata say, if that is on this machine.
        tokenizer: Gives the text of a token id, such as `lambda i: tokenizer.decode([i])`.
        sae: The safetensors file of a sparse autoencoder whose features are shown.
        height_px: The height of the frame in a notebook.
    """

    def __init__(
        self,
        store: ShardStore,
        *,
        other: ShardStore | None = None,
        source: Source[object] | None = None,
        tokenizer: Callable[[int], str] | None = None,
        sae: str | os.PathLike[str] | None = None,
        height_px: int = 720,
    ) -> None:
        if other is not None and not isinstance(other, ShardStore):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
            raise ArgumentError(f"other is {brief(other)}; it must be a ShardStore", where="other")
        if source is not None and not isinstance(source, Source):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
            raise ArgumentError(f"source is {brief(source)}; it must be a data set, of open_source(…)", where="source")
        if tokenizer is not None and not callable(tokenizer):  # pyright: ignore[reportUnnecessaryComparison]  # callers may not check types
            raise ArgumentError(f"tokenizer is {brief(tokenizer)}; it must be a function", where="tokenizer")
        self._height_px = check_count(height_px, name="height_px", most=100_000)
        found = None if sae is None else read_sae(sae, d_model=store.metadata.d_model)
        token = secrets.token_urlsafe(16)
        second = None if other is None else Viewed(other)
        pages = Pages(Viewed(store, source=source, tokenizer=tokenizer, sae=found), other=second)
        listening, address = listen(_LOOPBACK, 0)
        self.url = f"{address}{token}/"
        stop = serve_in_thread(application(pages, token=token, in_notebook=True), listening)
        try:
            # The thread refers to the application, never to this object, so the object ends when nobody refers to it.
            self._finalizer = weakref.finalize(self, stop)
        except BaseException:  # Ctrl-C: nobody gets what would stop it
            stop()
            raise

    @property
    def is_running(self) -> bool:
        """Whether the page is served."""
        return self._finalizer.alive

    def close(self) -> None:
        """Stop serving; the store stays open."""
        if (kept := self._finalizer.peek()) is not None:
            # Not by the finalizer: after an interrupt in its call it may be dead, and have stopped nothing.
            stop = kept[1]
            stop()
            self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<View {self.url if self.is_running else 'closed'}>"

    def _repr_html_(self) -> str:
        if not self.is_running:
            return "<p>This view is closed.</p>"
        url = html.escape(self.url, quote=True)
        return (
            f'<iframe src="{url}" title="saev_store: view of a store" width="100%" height="{self._height_px}" '
            f'style="border:1px solid #8888"></iframe><p><a href="{url}" target="_blank" rel="noreferrer">Open in a tab</a></p>'
        )
