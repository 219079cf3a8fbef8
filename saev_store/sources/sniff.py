"""Recognises the format of a data set from the content of its files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from saev_store.errors import (
    AccessError,
    ArgumentError,
    CorruptShardError,
    DocumentError,
    NotFoundError,
    SaevStoreError,
    TransportError,
    brief,
)
from saev_store.sources.address import Url, full_url, locate
from saev_store.transport import Engine, Lists, Transport

if TYPE_CHECKING:
    from saev_store.sources._source import Source

_MAGICS = {b"LLMBATCH": "llmbatch", b"MMIDIDX\0\0": "mmididx"}
#: Endings of file names that are worth a look in a folder.
_ENDINGS = (".batch", ".idx")
_MAX_SHOWN = 8


@dataclass(frozen=True)
class Found:
    """A data set that was recognised.

    Attributes:
        format: `"llmbatch"`, `"mmididx"` or `"energon"`.
        transport: Where it lies.
        path: The file (for Energon the folder) to open, below the transport's root.
    """

    format: str
    transport: Transport
    path: str


def sniff(
    url: Url,
    storage_options: Mapping[str, object] | None = None,
    *,
    engine: Engine = "auto",
    transport: Transport | None = None,
) -> Found | None:
    """The data set at an address, or None if nothing there is of a known format.

    An address may be the file itself, the `.bin` beside an index, a name without its ending, or a folder that holds
    exactly one data set. Reads a few bytes.

    Raises:
        ArgumentError: a folder holds several data sets.
        AccessError, TransportError: the storage could not be read.
    """
    there, name = locate(url, storage_options, engine=engine, transport=transport)
    for candidate in _candidates(name):
        kind = _format_of(there, candidate)
        if kind is not None:
            return Found(kind, there, candidate)
    if (folder := _prepared_folder(there, name)) is not None:
        return Found("energon", there, folder)
    return _in_folder(there, name)


def open_source(
    url: Url,
    storage_options: Mapping[str, object] | None = None,
    *,
    engine: Engine = "auto",
    transport: Transport | None = None,
) -> Source[object]:
    """The data set at an address, opened, whichever of the known formats it has.

    Args:
        url: A file, a name without its ending, or a folder with one data set: a path, any fsspec URL, or, with
            `transport`, a path below its root.
        storage_options: Options of the fsspec file system.
        engine: As in `open_transport`.
        transport: Read through this transport.

    Raises:
        NotFoundError: nothing exists there.
        DocumentError: the file is of no known format, or breaks its format's rules.
        CorruptShardError: a file is longer or shorter than it should be.

    >>> open_source(TOKENS).format
    'mmididx'
    """
    return open_found(find_source(url, storage_options, engine=engine, transport=transport))


def find_source(
    url: Url,
    storage_options: Mapping[str, object] | None = None,
    *,
    engine: Engine = "auto",
    transport: Transport | None = None,
) -> Found:
    """What `sniff` returns where it returns something.

    Raises:
        NotFoundError: nothing exists there.
        DocumentError: the file is of no known format.
    """
    found = sniff(url, storage_options, engine=engine, transport=transport)
    if found is None:
        raise _unknown(*locate(url, storage_options, engine=engine, transport=transport))
    return found


def reopen(
    description: Mapping[str, object],
    storage_options: Mapping[str, object] | None = None,
    *,
    url: Url | None = None,
    engine: Engine = "auto",
    transport: Transport | None = None,
) -> Source[object]:
    """The source that a description (of `Source.describe`) was made of, once its digest was compared.

    Args:
        description: What `describe` returned, perhaps out of a store's `metadata.data`.
        storage_options: Options of the fsspec file system.
        url: Where the data lie now, if not where they did.
        engine: As in `open_transport`.
        transport: Read through this transport.

    Raises:
        DocumentError: the description is none.
        CorruptShardError: other data lie there than were described.
    """
    address, digest = description.get("url"), description.get("digest")
    scope = cast("dict[str, object]", digest).get("scope") if isinstance(digest, dict) else None
    if not isinstance(address, str) or scope not in {"sampled", "full"}:
        raise DocumentError(
            f"{brief(dict(description))} describes no source: it needs a 'url' and a 'digest'", where="description"
        )
    source = open_source(url if url is not None else address, storage_options, engine=engine, transport=transport)
    if description.get("samples") is not None:
        from saev_store.sources.mmididx.token_samples import from_description

        source = from_description(source, description["samples"])
    split = description.get("split")
    if isinstance(split, str):
        source = source.split(split)
    now = source.describe(digest="full" if scope == "full" else "sampled")
    for name in ("format", "n_samples", "digest"):
        if now[name] != description.get(name):
            raise CorruptShardError(
                f"{name} is {brief(now[name])}, but was {brief(description.get(name))} when it was described",
                where=source.url,
                remedy="Other data lie here now; pass url= if what was described was moved.",
            )
    return source


def open_found(found: Found, *, damaged_ok: bool = False) -> Source[object]:
    """What `sniff` found, opened; as `open_source` raises.

    Args:
        found: What `sniff` returned.
        damaged_ok: Open an Energon data set even if tars are missing; its `problems` say so.
    """
    if found.format == "llmbatch":
        from saev_store.sources.llmbatch import BatchFileReader

        return BatchFileReader(found.path, transport=found.transport)
    if found.format == "energon":
        from saev_store.sources.energon import EnergonDataset

        return EnergonDataset(found.path, transport=found.transport, damaged_ok=damaged_ok)
    from saev_store.sources.mmididx import IndexedDataset

    return IndexedDataset(found.path, transport=found.transport)


def _candidates(name: str) -> Iterator[str]:
    if name.endswith(".bin"):
        yield name.removesuffix(".bin") + ".idx"
        return
    yield name
    if not name.endswith((".idx", ".batch")):
        yield name + ".idx"
        yield name + ".batch"


def _format_of(transport: Transport, path: str) -> str | None:
    """The format of a file: of its first bytes, or for an empty or damaged one of its name; None if there is none."""
    try:
        nbytes = transport.size(path)
        (head,) = transport.get_ranges(path, starts=[0], ends=[min(nbytes, 9)])
    except AccessError:
        raise
    except (NotFoundError, CorruptShardError):
        return None
    except TransportError as error:
        if error.transient:
            raise
        return None  # a folder
    for magic, kind in _MAGICS.items():
        if bytes(head[: len(magic)]) == magic:
            return kind
    if path.endswith(".tar.idx"):  # where samples of a tar file lie
        return None
    # A broken file is opened as what it should be: that reader says what is wrong.
    return {"batch": "llmbatch", "idx": "mmididx"}.get(path.rpartition(".")[2])


def _prepared_folder(transport: Transport, name: str) -> str | None:
    """The folder of an Energon data set: the one named, or the one whose `.nv-meta` is named."""
    folder = "" if name == ".nv-meta" else name
    for info in (".info.json", ".info.yaml"):
        with contextlib.suppress(NotFoundError, CorruptShardError):
            transport.size("/".join(part for part in (folder, ".nv-meta", info) if part))
            return folder
    return None


def _in_folder(transport: Transport, path: str) -> Found | None:
    if not isinstance(transport, Lists):
        return None
    names: list[str] = []
    with contextlib.suppress(NotFoundError, TransportError):
        names = [entry.path for entry in transport.list(path) if not entry.is_dir and entry.path.endswith(_ENDINGS)]
    found = [(name, kind) for name in names if (kind := _format_of(transport, name)) is not None]
    if len(found) > 1:
        shown = ", ".join(name.rpartition("/")[2] for name, _ in found[:_MAX_SHOWN])
        more = f" and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
        raise ArgumentError(
            f"the folder holds {len(found)} data sets: {shown}{more}",
            where=full_url(transport, path),
            remedy="Name one.",
        )
    return Found(found[0][1], transport, found[0][0]) if found else None


def _unknown(transport: Transport, path: str) -> SaevStoreError:
    where = full_url(transport, path)
    try:
        transport.size(path)
    except NotFoundError:
        if isinstance(transport, Lists):
            with contextlib.suppress(SaevStoreError):
                if transport.list(path):
                    return DocumentError("the folder holds no data set of a known format", where=where)
        return NotFoundError("there is nothing of that name", where=where)
    except SaevStoreError:
        return DocumentError("the folder holds no data set of a known format", where=where)
    return DocumentError(
        "the file is of no known format: neither LLMBATCH (.batch) nor MMIDIDX (.idx beside .bin)", where=where
    )
