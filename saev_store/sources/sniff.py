"""Recognises the format of a data set from the content of its files, and opens it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from saev_store.transport import Engine, Entry, Transport

if TYPE_CHECKING:
    from saev_store.sources._source import Source

_MAGICS = {b"LLMBATCH": "llmbatch", b"MMIDIDX\0\0": "mmididx"}
#: Endings of the files that a folder is searched for, and their formats.
_ENDINGS = {".idx": "mmididx", ".batch": "llmbatch"}
_INFOS = (".nv-meta/.info.json", ".nv-meta/.info.yaml")


def open_source(
    url: Url,
    storage_options: Mapping[str, object] | None = None,
    *,
    engine: Engine = "auto",
    transport: Transport | None = None,
    damaged_ok: bool = False,
) -> Source[object]:
    """The data set at an address, opened: MMIDIDX, LLMBATCH or Energon, by its content.

    Args:
        url: A file, the `.bin` next to an index, a name without its ending, or a folder with one data set: a path, any fsspec URL,
            or, with `transport`, a path below its root.
        storage_options: Options of the fsspec file system.
        engine: As in `open_transport`.
        transport: Read through this transport.
        damaged_ok: Open an Energon data set even if tars are missing; its `problems` list them.

    Raises:
        NotFoundError: no data set is there.
        DocumentError: the file is of no known format, or breaks its format's rules.
        CorruptShardError: a file is longer or shorter than it should be.
        ArgumentError: a folder contains several data sets.

    >>> open_source(TOKENS).format
    'mmididx'
    """
    there, name = locate(url, storage_options, engine=engine, transport=transport)
    if name.endswith(".bin"):
        candidates = [f"{name.removesuffix('.bin')}.idx"]
    else:
        candidates = [name] if name.endswith(tuple(_ENDINGS)) else [name, *(name + ending for ending in _ENDINGS)]
    if found := _known(there, candidates):
        return _opened(there, *found[0])
    if has_info(there, name):
        from saev_store.sources.energon import EnergonDataset

        return EnergonDataset(name, transport=there, damaged_ok=damaged_ok)
    found = _known(there, [entry.path for entry in _listed(there, name) if entry.path.endswith(tuple(_ENDINGS))])
    where = full_url(there, name)
    if len(found) > 1:
        raise ArgumentError(f"the folder holds {len(found)} data sets", where=where, remedy="Name one.")
    if found:
        return _opened(there, *found[0])
    remedy = "Known are LLMBATCH (.batch), MMIDIDX (.idx next to .bin), and folders with .nv-meta (Energon)."
    kind = NotFoundError if _head(there, name) is None else DocumentError
    raise kind("there is no data set of a known format", where=where, remedy=remedy)


def _opened(there: Transport, path: str, format: str) -> Source[object]:
    """A file, opened in its format."""
    if format == "llmbatch":
        from saev_store.sources.llmbatch import BatchFileReader

        return BatchFileReader(path, transport=there)
    from saev_store.sources.mmididx import IndexedDataset

    return IndexedDataset(path, transport=there)


def has_info(transport: Transport, folder: str) -> bool:
    """Return True for the folder of an Energon data set."""
    return any(_head(transport, f"{folder}/{info}".lstrip("/")) is not None for info in _INFOS)


def reopen(
    description: Mapping[str, object],
    storage_options: Mapping[str, object] | None = None,
    *,
    url: Url | None = None,
) -> Source[object]:
    """The source that `Source.describe` described, opened again; its digest is compared.

    Args:
        description: The result of `describe`, such as from a store's `metadata.data`.
        storage_options: As in `open_source`.
        url: The address of the data now, if they were moved.

    Raises:
        DocumentError: the description is not one.
        CorruptShardError: the data there are not those that were described.
    """
    digest, text_key, split = (description.get(name) for name in ("digest", "text_key", "split"))
    scope = cast("dict[str, object]", digest).get("scope") if isinstance(digest, dict) else None
    described_url = description.get("url")
    if not isinstance(described_url, str) or scope not in ("sampled", "full"):
        message = f"{brief(dict(description))} describes no source: it needs a 'url' and a 'digest'"
        raise DocumentError(message, where="description")
    address = described_url if url is None else url
    source: Source[object]
    if description.get("format") == "images":
        from saev_store.sources.image_folder import ImageFolder

        source = ImageFolder(address, storage_options)
    elif description.get("format") == "text":
        from saev_store.sources.text_file import TextFile

        source = TextFile(address, storage_options, text_key=text_key if isinstance(text_key, str) else "text")
    else:
        source = open_source(address, storage_options)
    if description.get("samples") is not None:
        from saev_store.sources.mmididx.samples import from_description

        source = from_description(source, description["samples"])
    if isinstance(split, str):
        source = source.split(split)
    now = source.describe(digest="full" if scope == "full" else "sampled")
    for name in ("format", "n_samples", "digest"):
        if now[name] != description.get(name):
            raise CorruptShardError(
                f"{name} is {brief(now[name])}, but was {brief(description.get(name))} when it was described",
                where=source.url,
                remedy="These are other data; pass url= if the described ones were moved.",
            )
    return source


def _absent(error: SaevStoreError) -> bool:
    """Return True if an error of a name means that no file is there; errors that may pass mean nothing."""
    is_folder = isinstance(error, TransportError) and not (isinstance(error, AccessError) or error.transient)
    return is_folder or isinstance(error, (NotFoundError, CorruptShardError))


def _head(transport: Transport, path: str) -> bytes | None:
    """The first bytes of a file; None if there is no file."""
    try:
        return bytes(transport.get_ranges(path, starts=[0], ends=[min(transport.size(path), 9)])[0])
    except SaevStoreError as error:
        if not _absent(error):
            raise
        return None


def _known(transport: Transport, paths: Sequence[str]) -> list[tuple[str, str]]:
    """The files among some names that have a known format, and these: by the first bytes, or if they are damaged by the name."""
    found = list[tuple[str, str]]()
    for path in paths:
        head = _head(transport, path)
        # A damaged file is opened in the format of its name, whose reader reports the damage; `.tar.idx` are offsets of a tar.
        named = next((kind for ending, kind in _ENDINGS.items() if path.endswith(ending)), None)
        by_name = None if path.endswith(".tar.idx") else named
        kind = next((kind for magic, kind in _MAGICS.items() if head and head.startswith(magic)), by_name)
        if head is not None and kind is not None:
            found.append((path, kind))
    return found


def _listed(transport: Transport, path: str) -> Sequence[Entry]:
    """The names in a folder; empty if there is none, or if the storage does not list."""
    try:
        return transport.list(path)
    except SaevStoreError as error:
        if not _absent(error):
            raise
        return []
