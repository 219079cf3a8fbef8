"""Lists a store's folder without opening files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from saev_store.errors import NotFoundError, SaevStoreError
from saev_store.transport import Entry, Lists, Transport

#: Concurrent size requests where the transport cannot list.
_N_THREADS = 16

State = Literal["file", "missing", "not_a_file", "unreadable"]


class Found(NamedTuple):
    """One name in a store's folder.

    Attributes:
        size: Size in bytes of the file, or of the file that a link points to; None for anything else.
        state: Whether it is a readable file.
        why: Explanation of any state but `"file"`.
        link: Target of a symbolic link, else "".
    """

    size: int | None
    state: State = "file"
    why: str = ""
    link: str = ""


MISSING = Found(None, "missing", "it is not there; was it purged, or not copied?")
_FOLDER = "it is a folder"
_EUID = os.geteuid()


@dataclass(frozen=True, slots=True)
class Survey:
    """Names in a folder; `complete` is False if only the requested names were checked."""

    found: Mapping[str, Found]
    complete: bool


def local_folder(transport: Transport) -> str | None:
    """The folder behind a transport if it is a local one, else None.

    >>> from saev_store.transport import MemoryTransport
    >>> local_folder(MemoryTransport({})) is None
    True
    """
    url = transport.url.removeprefix("file://")
    return url if url.startswith("/") and "::" not in url else None


def survey(transport: Transport, names: Iterable[str]) -> Survey:
    """Survey a folder with as few requests as the transport allows.

    One `scandir` locally (a stat for each entry follows links), one listing where there is one, otherwise one size
    request for each of `names`, in parallel.

    Raises:
        SaevStoreError: the folder cannot be accessed.
    """
    folder = local_folder(transport)
    if folder is not None:
        try:
            with os.scandir(folder) as entries:
                return Survey({entry.name: _look(entry.path, entry.is_symlink()) for entry in entries}, complete=True)
        except PermissionError:
            # A folder may be searchable but not listable. Names are computed, so it can still be surveyed.
            paths = {name: os.path.join(folder, name) for name in names}
            return Survey({name: _look(path, os.path.islink(path)) for name, path in paths.items()}, complete=False)
        except OSError:
            pass
    elif isinstance(transport, Lists):
        try:
            entries = transport.list()
        except SaevStoreError:
            pass  # a bucket may allow reading without listing
        else:
            found = {entry.path.rsplit("/", 1)[-1]: _listed(transport, entry) for entry in entries}
            if any(name in found for name in names):
                return Survey(found, complete=True)
    with ThreadPoolExecutor(_N_THREADS) as pool:
        wanted = list(names)
        return Survey(dict(zip(wanted, pool.map(partial(_ask, transport), wanted), strict=True)), complete=False)


def _look(path: str, is_link: bool) -> Found:
    link = os.readlink(path) if is_link else ""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        why = f"it is a symbolic link to {link!r}, where nothing is" if link else MISSING.why
        return Found(None, "missing", why, link)
    except OSError as error:
        return Found(None, "unreadable", f"its status cannot be read ({error.strerror})", link)
    if stat.S_ISDIR(status.st_mode):
        return Found(None, "not_a_file", _FOLDER, link)
    if not stat.S_ISREG(status.st_mode):
        return Found(None, "not_a_file", "it is no regular file", link)
    # Files are usually ours and readable: this saves one system call per shard.
    is_ours = status.st_uid == _EUID and status.st_mode & stat.S_IRUSR
    if not is_ours and not os.access(path, os.R_OK):
        return Found(None, "unreadable", "its permissions do not allow reading it", link)
    return Found(status.st_size, link=link)


def _listed(transport: Transport, entry: Entry) -> Found:
    if entry.is_dir:
        return Found(None, "not_a_file", _FOLDER)
    return Found(entry.size) if entry.size is not None else _ask(transport, entry.path)


def _ask(transport: Transport, name: str) -> Found:
    try:
        return Found(transport.size(name))
    except NotFoundError:
        return MISSING
    except SaevStoreError as error:
        return Found(None, "unreadable", error.message)
