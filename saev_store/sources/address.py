"""From the address of one file to the transport of its folder and the file's name there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from saev_store.errors import ArgumentError, brief
from saev_store.transport import Engine, Transport, open_transport

Url = str | os.PathLike[str]

#: File systems of fsspec whose root is what the next link of the address names.
_ARCHIVES = frozenset({"zip", "tar", "libarchive"})


def split_address(url: Url) -> tuple[str, str]:
    """The address of the folder, and the name in it; of a chained URL, the part that names a path is split.

    Raises:
        ArgumentError: it is no address, or names no file.

    >>> split_address("s3://lab/tokens/train.idx")
    ('s3://lab/tokens', 'train.idx')
    >>> split_address("zip://a/train.batch::file:///data/all.zip")
    ('zip://a::file:///data/all.zip', 'train.batch')
    >>> split_address("/data/caches/old/..")  # relative ones are those of the working directory
    ('/data', 'caches')
    """
    text = _text(url)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ArgumentError(f"{brief(text)} is not an address: pass a path or a URL as str", where="url")
    links = _links(text)
    if text.rpartition("/")[2] in {".", "..", "~"} and "://" not in text:
        links = [os.path.abspath(os.path.expanduser(text))]
    if _is_root_of_archive(links):
        raise ArgumentError(f"{text!r} names no file, but all that is in the archive", where="url")
    at = next((i for i, link in enumerate(links) if link.partition("://")[2]), len(links) - 1)
    path, question, query = links[at].partition("?") if "://" in links[at] else (links[at], "", "")
    scheme, mark, below = path.rpartition("://")
    folder, slash, name = below.rstrip("/").rpartition("/")
    if name in {"", ".", "..", "~"}:
        raise ArgumentError(f"{text!r} names no file", where="url")
    if "://" not in text:
        try:
            os.fsencode(text)
        except UnicodeEncodeError as error:
            raise ArgumentError(f"{brief(text)} is no file name: {error.reason}", where="url") from error
    root = slash if slash and not folder else folder
    links[at] = f"{scheme}{mark}{root}{question}{query}" if root or mark else "."
    return "::".join(links), name


def locate(
    url: Url,
    storage_options: Mapping[str, object] | None,
    *,
    engine: Engine,
    transport: Transport | None,
    root_ok: bool = False,
) -> tuple[Transport, str]:
    """The transport and the path of a file below its root: the folder of `url`, or `transport`, to which `url` is relative.

    With `root_ok` the path is "" for the root of an archive, such as `zip://::all.zip`, which lies in no folder.
    """
    if transport is not None:
        if not isinstance(getattr(transport, "url", None), str):  # a reader need not have all of it
            raise ArgumentError(f"{brief(transport)} is no transport", where="transport")
        path = _text(url)
        if not isinstance(path, str) or not path:
            raise ArgumentError(f"{brief(path)} is no path below the transport", where="url")
        if storage_options is not None:
            raise ArgumentError("a transport has its options already", where="storage_options")
        return transport, path
    text = _text(url)
    if root_ok and isinstance(text, str) and _is_root_of_archive(_links(text)):
        return open_transport(text, storage_options, engine=engine), ""
    folder, name = split_address(url)
    return open_transport(folder, storage_options, engine=engine), name


def full_url(transport: Transport, path: str) -> str:
    """A file's address, safe to show.

    >>> from saev_store.transport import open_transport
    >>> full_url(open_transport("memory://x"), "a.idx")
    'memory://x/a.idx'
    """
    return address_below(transport.url, path)


def address_below(folder: str, path: str) -> str:
    """The address of what lies below a folder; of a chained URL, the part that names a path is extended.

    >>> address_below("zip://a::file:///data/all.zip", "b/x.idx")
    'zip://a/b/x.idx::file:///data/all.zip'
    >>> address_below("https://host/a?token=1", "x.idx")
    'https://host/a/x.idx?token=1'
    """
    links = _links(folder)
    at = next((i for i, link in enumerate(links) if "://" in link), 0)
    head, question, query = links[at].partition("?") if "://" in links[at] else (links[at], "", "")
    links[at] = f"{head}{'' if head.endswith('/') else '/'}{path}{question}{query}"
    return "::".join(links)


def is_within(url: str, folder: str) -> bool:
    """Whether an address of a transport is another one, or is below it. Links of a file system are followed.

    >>> is_within("s3://lab/a/x.idx", "s3://lab/a"), is_within("s3://lab/ab", "s3://lab/a")
    (True, False)
    """
    if not (url.startswith("/") and folder.startswith("/")):
        return f"{url.rstrip('/')}/".startswith(f"{folder.rstrip('/')}/")
    above, name = os.path.split(url)
    # What is replaced may be a link, and what it leads to.
    places = (Path(os.path.realpath(above), name), Path(os.path.realpath(url)))
    return any(_is_same(each, folder) for place in places for each in (place, *place.parents))


def _is_same(path: Path, other: str) -> bool:
    with contextlib.suppress(OSError):  # one of them does not exist
        return os.path.samefile(path, other)
    return False


def _links(url: str) -> list[str]:
    """The links of a chained URL; `::` in a path is a part of its name."""
    return url.split("::") if "://" in url else [url]


def _is_root_of_archive(links: list[str]) -> bool:
    """Whether these links name an archive, and nothing in it."""
    scheme, mark, path = links[0].partition("://")
    return bool(mark) and scheme in _ARCHIVES and not path.strip("/") and any(links[1:])


def _text(url: object) -> object:
    return os.fspath(cast("Url", url)) if isinstance(url, (str, os.PathLike)) else url
