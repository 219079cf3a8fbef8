"""The file that an export is written to: where an address leads, and that no file of a store is replaced."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING

from saev_store.core.layout import shard_name
from saev_store.errors import ArgumentError, SaevStoreError
from saev_store.names import CLAIM_PATH, METADATA_NAME, SHARDS_NAME
from saev_store.sources.address import Url, full_url, is_within, split_address
from saev_store.transport import Transport, open_transport

if TYPE_CHECKING:
    from saev_store.store.store import ShardStore


def open_folder(store: ShardStore, url: Url, storage_options: Mapping[str, object] | None) -> Transport:
    """A folder that an export is written to.

    Args:
        store: The store that is exported.
        url: A path or any fsspec URL.
        storage_options: Options of its file system.

    Raises:
        AccessError: the storage cannot be written.
        ArgumentError: `url` is no address, one in the folder of a store, or the options are none of its file system.
    """
    with _naming_path():
        transport = open_transport(url, storage_options)
        target, (folder, name) = _writable(transport), split_address(url)
        refuse_stores_file(store, open_transport(folder, storage_options), name, url=url)
    refuse_stores_file(store, transport, METADATA_NAME, url=url)
    return target


def open_file(store: ShardStore, url: Url, storage_options: Mapping[str, object] | None) -> tuple[Transport, str]:
    """The folder of a file that an export is written to, and the file's name.

    Args:
        store: The store that is exported.
        url: The file: a path or any fsspec URL.
        storage_options: Options of its file system.

    Raises:
        AccessError: the storage cannot be written.
        ArgumentError: `url` names no file, or one in the folder of a store.
    """
    with _naming_path():
        folder, name = split_address(url)
        transport = open_transport(folder, storage_options)
    target = _writable(transport)
    refuse_stores_file(store, transport, name, url=url)
    return target, name


def refuse_stores_file(store: ShardStore, folder: Transport, name: str, *, url: Url, where: str = "path") -> None:
    """Refuse a file in the folder of the exported store, or of another one: writing it could replace a shard or a document.

    Args:
        store: The store that is exported.
        folder: The folder of the file.
        name: The file's name.
        url: Its address as the caller gave it.
        where: The argument that has the address.

    Raises:
        ArgumentError: the file is there, by whatever path or link.
    """
    if is_within(full_url(folder, name), store.url) or _is_store(folder):
        raise ArgumentError(
            f"{os.fspath(url)!r} is in the folder of a store, whose files no export replaces",
            where=where,
            remedy="Name a file outside the store's folder.",
        )


def _writable(transport: Transport) -> Transport:
    return transport


def _is_store(folder: Transport) -> bool:
    """Whether a folder has the documents of a store, or what a writer has begun; False too where it cannot be read."""
    return any(
        all(_is_there(folder, name) for name in names)
        for names in ((METADATA_NAME, SHARDS_NAME), (CLAIM_PATH,), (shard_name(0),))
    )


def _is_there(folder: Transport, name: str) -> bool:
    try:
        folder.size(name)
    except SaevStoreError:
        return False
    return True


@contextlib.contextmanager
def _naming_path() -> Generator[None]:
    """A block whose errors of an address name the argument `path`."""
    try:
        yield
    except ArgumentError as error:
        if error.where == "url":
            error.where = "path"
        raise
