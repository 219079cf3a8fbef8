"""From an address to a transport."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Literal, get_args
from urllib.parse import unquote

from saev_store.core.arguments import check_choice
from saev_store.errors import ArgumentError, brief, kind_of
from saev_store.transport.base import Transport
from saev_store.transport.local import LocalTransport, local_root

Engine = Literal["auto", "mmap", "pread", "fsspec", "obstore"]
#: The package through which fsspec reaches an object store.
_CLIENTS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}


def open_transport(
    url: str | os.PathLike[str], storage_options: Mapping[str, object] | None = None, *, engine: Engine = "auto"
) -> Transport:
    """The transport whose root is `url`; nothing is read yet, so the root need not exist.

    Args:
        url: A path (`~` is expanded), a `file://` URL or any fsspec URL, chained ones included.
        storage_options: As fsspec's file systems take them. They win over the environment.
        engine: `"auto"` maps local files; for `s3://` and `gs://` it uses obstore if that is installed, knows all the options and
            finds what fsspec would find; fsspec for the rest. `"mmap"`, `"pread"`, `"fsspec"` and `"obstore"` choose one.

    Raises:
        ArgumentError: `url` is not an address, `engine` is unknown, or a local engine is requested for a remote address.
        MissingDependencyError: no installed package serves the address; names the extra to install.

    >>> open_transport("/data/shards").name
    'mmap'
    """
    check_choice(engine, get_args(Engine), name="engine")
    options: Mapping[str, object] = {} if storage_options is None else storage_options
    if not isinstance(options, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers without a type checker
        raise ArgumentError(f"must be a mapping, got {kind_of(options)}", where="storage_options")
    text = os.fspath(url) if isinstance(url, os.PathLike) else url
    if not isinstance(text, str) or not text or "\0" in text:  # pyright: ignore[reportUnnecessaryIsInstance]  # as above
        raise ArgumentError(f"must be a path or a URL as str, got {brief(text)}", where="url")
    path = _local_path(text)
    if path is None and engine == "obstore":
        from saev_store.transport.obstore import ObstoreTransport

        return ObstoreTransport(text, options)
    if path is None and engine == "auto" and (found := _through_obstore(text, options)) is not None:
        return found
    if engine == "fsspec" or (engine == "auto" and path is None):
        from saev_store.transport.fsspec import FsspecTransport

        return FsspecTransport(text if path is None else f"file://{local_root(path)}", options)
    if path is None or engine == "obstore":
        raise ArgumentError(f"engine {engine!r} does not serve this address", where="url", remedy='Use engine="auto".')
    if options:
        raise ArgumentError("local files take no options", where="storage_options")
    return LocalTransport(path, use_mmap=engine != "pread")


def _through_obstore(url: str, options: Mapping[str, object]) -> Transport | None:
    """A transport through obstore if it does what fsspec's client would, with the same end point and credentials."""
    client = _CLIENTS.get(url.partition("://")[0])
    if client is None or find_spec("obstore") is None:
        return None
    from saev_store.transport.obstore import ObstoreTransport, resolves_alike

    with suppress(ArgumentError):
        made = ObstoreTransport(url, options)
        if resolves_alike(made.place) or find_spec(client) is None:
            return made
    return None


def _local_path(url: str) -> str | None:
    scheme, separator, rest = url.partition("://")
    if not separator:
        return os.path.expanduser(url)
    return unquote(rest.removeprefix("localhost")) if scheme in {"file", "local"} else None
