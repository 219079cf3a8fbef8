"""The Zarr view over plain HTTP, read-only: for Zarr clients in other languages and in browsers.

`saev-store serve URL` is the way in; `application` is what it runs, to be mounted elsewhere.
"""

from __future__ import annotations

from saev_store.serve._application import application
from saev_store.serve._server import listen, serve

__all__ = ["application", "listen", "serve"]
