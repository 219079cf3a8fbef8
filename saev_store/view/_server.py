"""A running page: a thread of this process that listens on this machine only."""

from __future__ import annotations

import html
import secrets
import socket
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from saev_store._runtime.optional import need
from saev_store.errors import ArgumentError
from saev_store.view._viewed import Viewed

if TYPE_CHECKING:
    import uvicorn

    from saev_store.sources import Source
    from saev_store.store.store import ShardStore

_LOOPBACK = "127.0.0.1"
#: Seconds that answers may still take after `close`.
_GRACE_S = 2


class View:
    """A running page of a store; it ends with this object, or with `close`. A notebook shows it in a frame.

    Attributes:
        url: The address of the page. Whoever has it, and is on this machine, can read the store.

    Args:
        store: An opened store; it must stay open.
        other: A second one, to compare it with.
        source: The data set that it was recorded from; default: the one that its metadata name, if that is on this machine.
        tokenizer: Gives the text of a token id, such as `lambda i: tokenizer.decode([i])`.
        height_px: The height of the frame in a notebook.
        port: The port to listen on; 0 takes any free one.

    Raises:
        MissingDependencyError: the extra `view` is not installed.
        ArgumentError: the port is taken or not allowed.

    >>> from saev_store import ShardStore
    >>> with ShardStore.open(SAMPLE).view() as view:
    ...     view.url.startswith("http://127.0.0.1:")
    True
    """

    def __init__(
        self,
        store: ShardStore,
        *,
        other: ShardStore | None = None,
        source: Source[object] | None = None,
        tokenizer: Callable[[int], str] | None = None,
        height_px: int = 720,
        port: int = 0,
    ) -> None:
        for library in ("starlette", "uvicorn"):
            need(library, install="saev-store[view]", where="view")
        import uvicorn

        from saev_store.view._application import application

        token = secrets.token_urlsafe(16)
        viewed = Viewed(store, source=source, tokenizer=tokenizer)
        app = application(viewed, None if other is None else Viewed(other), token=token)
        server = uvicorn.Server(
            uvicorn.Config(
                app, lifespan="off", log_level="warning", access_log=False, timeout_graceful_shutdown=_GRACE_S
            )
        )
        listening = _listen(port)
        self.url = f"http://{_LOOPBACK}:{listening.getsockname()[1]}/{token}/"
        self._height_px = height_px
        # Neither thread nor finalizer refers to this object, so the page ends when the last reference to it is gone.
        self._thread = threading.Thread(target=_run, args=(server, listening), name="saev-store-view", daemon=True)
        self._finalizer = weakref.finalize(self, setattr, server, "should_exit", True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """True while the page is served."""
        return self._finalizer.alive

    def close(self) -> None:
        """Stop serving; the store stays open."""
        self._finalizer()
        self._thread.join(2 * _GRACE_S)

    def wait(self) -> None:
        """Block until the page is closed, or until Ctrl-C raises `KeyboardInterrupt`."""
        while self._thread.is_alive():
            self._thread.join(1)  # on Windows, Ctrl-C does not end a `join` without a time-out

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


def _listen(port: int) -> socket.socket:
    if not 0 <= port <= 65_535:
        raise ArgumentError(f"port must be from 0 to 65535, got {port}", where="port")
    try:
        listening = socket.create_server((_LOOPBACK, port))
    except OSError as error:
        raise ArgumentError(
            f"cannot listen on port {port}: {error}", where="port", remedy="Choose another port; 0 takes any free one."
        ) from error
    # Connections inherit it. Without it a small body waits up to 40 ms for the acknowledgement of its headers.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def _run(server: uvicorn.Server, listening: socket.socket) -> None:
    with listening:
        server.run(sockets=[listening])
