"""From an address to a transport."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Literal, cast, get_args
from urllib.parse import unquote

from saev_store.errors import ArgumentError, brief, kind_of
from saev_store.transport.base import Transport
from saev_store.transport.local.mapped import MmapTransport
from saev_store.transport.local.transport import PreadTransport, local_root
from saev_store.transport.memory import MemoryTransport

Engine = Literal["auto", "mmap", "pread", "fsspec", "memory", "obstore"]
_LOCAL = ("file://", "local://")
#: Object stores, and the package through which fsspec reaches each.
_OBJECT_STORES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}


def open_transport(
    url: str | os.PathLike[str], storage_options: Mapping[str, object] | None = None, *, engine: Engine = "auto"
) -> Transport:
    """The transport whose root is `url`; nothing is read yet, so the root need not exist.

    Args:
        url: A path (`~` is expanded), a `file://` URL or any fsspec URL, chained ones included.
        storage_options: As fsspec's file systems take them: credentials, end points, …
        engine: `"auto"` maps local files, uses obstore for `s3://`, `gs://` and `az://` where it is installed, knows all the
            options and would find the same credentials, and fsspec for the rest. `"mmap"`, `"pread"`, `"fsspec"` and
            `"obstore"` choose one engine. `"memory"` gives an empty `MemoryTransport` with `url` as its label.

    Raises:
        ArgumentError: `url` is no address, `engine` is unknown, or a local engine is asked for a remote address.
        MissingDependencyError: no installed package serves the address; names the extra to install.

    >>> open_transport("/data/shards").name
    'mmap'
    """
    if engine not in get_args(Engine):
        raise ArgumentError(
            f"{brief(engine)} is not an engine: choose one of {', '.join(get_args(Engine))}", where="engine"
        )
    if not isinstance(url, (str, os.PathLike)):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers without a type checker
        raise ArgumentError(f"{kind_of(url)} is not an address: pass a path or a URL as str", where="url")
    if storage_options is not None and not isinstance(storage_options, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers without a type checker
        raise ArgumentError(f"{kind_of(storage_options)} is not a mapping of options", where="storage_options")
    text = cast("object", os.fspath(url))
    if not isinstance(text, str) or not text or "\0" in text:
        raise ArgumentError(f"{text!r} is not an address: pass a path or a URL as str", where="url")
    scheme, separator, rest = text.partition("://")
    if separator and "::" not in scheme:  # neither client knows schemes in capitals
        text = f"{scheme.lower()}://{rest}"
    if engine == "memory":
        return MemoryTransport(label=text.removeprefix("memory://").strip("/"))
    path = _local_path(text)
    if path is None and (engine == "obstore" or (engine == "auto" and _obstore_fits(text, storage_options or {}))):
        from saev_store.transport.obstore._transport import ObstoreTransport

        return ObstoreTransport(text, storage_options)
    if engine == "fsspec" or (engine == "auto" and path is None):
        from saev_store.transport.fsspec._transport import FsspecTransport

        return FsspecTransport(text if path is None else f"file://{local_root(path)}", storage_options)
    if path is None:
        raise ArgumentError(f"engine {engine!r} reads local files only", where="url", remedy='Use engine="auto".')
    if engine == "obstore":
        raise ArgumentError("engine 'obstore' is for object stores only", where="url", remedy='Use engine="auto".')
    if storage_options:
        raise ArgumentError(
            f"local files take no options, but got {', '.join(sorted(map(str, storage_options)))}",
            where="storage_options",
        )
    return PreadTransport(path) if engine == "pread" else MmapTransport(path)


def _obstore_fits(url: str, options: Mapping[str, object]) -> bool:
    """Whether obstore can do all that fsspec's client would, with the same options and credentials."""
    scheme = url.partition("://")[0]
    if scheme not in _OBJECT_STORES or find_spec("obstore") is None:
        return False
    if scheme in {"gs", "gcs"} and os.environ.get("STORAGE_EMULATOR_HOST"):
        return False  # emulators speak the other one of Google's two interfaces
    from saev_store.transport.obstore._options import finds_credentials, place_of

    try:
        return finds_credentials(place_of(url, options)) or find_spec(_OBJECT_STORES[scheme]) is None
    except ArgumentError:
        return False


def _local_path(url: str) -> str | None:
    if "::" in url and "://" in url:
        return None
    for scheme in _LOCAL:
        if url.startswith(scheme):
            path = url[len(scheme) :]
            return unquote(path.removeprefix("localhost")) if path.startswith(("/", "localhost/")) else path
    return None if "://" in url else os.path.expanduser(url)
