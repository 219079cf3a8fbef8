"""A read-only HTTP server of the Zarr view, for Zarr clients in other languages and in browsers.

`saev-store serve URL` runs it; `application` can be mounted in another ASGI server.
"""

from __future__ import annotations

from saev_store.serve._application import application
from saev_store.serve._server import listen, serve, serve_in_thread
from saev_store.serve.hosts import is_known_host

__all__ = ["application", "is_known_host", "listen", "serve", "serve_in_thread"]
