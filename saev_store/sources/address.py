"""From the address of one file to the transport of its folder and the file's name there."""

from __future__ import annotations

import os
from collections.abc import Mapping

from saev_store.errors import ArgumentError, brief
from saev_store.transport import Transport, open_transport

Url = str | os.PathLike[str]


def split_address(url: Url) -> tuple[str, str]:
    """The address of the folder, and the name in it; of a chained URL, the part that names a path is split.

    >>> split_address("s3://lab/tokens/train.idx")
    ('s3://lab/tokens', 'train.idx')
    >>> split_address("zip://a/train.batch::file:///data/all.zip")
    ('zip://a::file:///data/all.zip', 'train.batch')
    >>> split_address("/data/caches/old/..")  # relative ones are those of the working directory
    ('/data', 'caches')
    """
    text = _text(url)
    links = text.split("::") if "://" in text else [text]  # `::` in a path is a part of its name
    if text.rpartition("/")[2] in {".", "..", "~"} and "://" not in text:
        links = [os.path.abspath(os.path.expanduser(text))]
    at = next((i for i, link in enumerate(links) if link.partition("://")[2]), len(links) - 1)
    path, question, query = links[at].partition("?") if "://" in links[at] else (links[at], "", "")
    scheme, mark, below = path.rpartition("://")
    folder, slash, name = below.rstrip("/").rpartition("/")
    if name in {"", ".", "..", "~"}:
        raise ArgumentError(f"{text!r} names no file", where="url")
    root = slash if slash and not folder else folder
    links[at] = f"{scheme}{mark}{root}{question}{query}" if root or mark else "."
    return "::".join(links), name


def locate(
    url: Url, storage_options: Mapping[str, object] | None, *, transport: Transport | None = None
) -> tuple[Transport, str]:
    """The transport and the path of a file below its root: the folder of `url`, or `transport`, to which `url` is relative."""
    text = _text(url)
    if transport is not None:
        return transport, text
    folder, name = split_address(text)
    return open_transport(folder, storage_options), name


def _text(url: Url) -> str:
    text = os.fspath(url) if isinstance(url, os.PathLike) else url
    if not isinstance(text, str) or not text or "\0" in text:  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
        raise ArgumentError(f"must be a path or a URL as str, got {brief(text)}", where="url")
    return text
