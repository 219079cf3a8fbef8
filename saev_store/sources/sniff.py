"""Recognises the format of a data set from the content of its files, and opens it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from saev_store.transport import Engine, Entry, Transport

if TYPE_CHECKING:
    from saev_store.sources._source import Source

_MAGICS = {b"LLMBATCH": "llmbatch", b"MMIDIDX\0\0": "mmididx"}
#: Endings of the files that a folder is searched for, and their formats.
_ENDINGS = {".idx": "mmididx", ".batch": "llmbatch"}
_MAX_SHOWN = 8


@dataclass(frozen=True)
class Found:
    """A data set that was recognised.

    Attributes:
        format: `"llmbatch"`, `"mmididx"` or `"energon"`.
        transport: The storage that contains it.
        path: The file (for Energon the folder) to open, below the transport's root.
    """

    format: str
    transport: Transport
    path: str

    def open(self, *, damaged_ok: bool = False) -> Source[object]:
        """The data set, opened; raises as `open_source`.

        Args:
            damaged_ok: Open an Energon data set even if tars are missing; its `problems` list them.
        """
        if self.format == "llmbatch":
            from saev_store.sources.llmbatch import BatchFileReader

            return BatchFileReader(self.path, transport=self.transport)
        if self.format == "energon":
            from saev_store.sources.energon import EnergonDataset

            return EnergonDataset(self.path, transport=self.transport, damaged_ok=damaged_ok)
        from saev_store.sources.mmididx import IndexedDataset

        return IndexedDataset(self.path, transport=self.transport)


def sniff(
    url: Url,
    storage_options: Mapping[str, object] | None = None,
    *,
    engine: Engine = "auto",
    transport: Transport | None = None,
) -> Found | None:
    """The data set at an address; None if there is none of a known format. Reads a few bytes.

    An address may be the file itself, the `.bin` next to an index, a name without its ending, or a folder that contains
    exactly one data set.

    Raises:
        ArgumentError: a folder contains several data sets.
        AccessError, TransportError: the storage could not be read.
    """
    return _sniffed(*locate(url, storage_options, engine=engine, transport=transport, root_ok=True))


def _sniffed(there: Transport, name: str) -> Found | None:
    """The data set of this name below a transport, or in its root, which is ""; as `sniff`."""
    if name.endswith(".bin"):
        candidates = [f"{name.removesuffix('.bin')}.idx"]
    else:
        candidates = [name] if name.endswith(tuple(_ENDINGS)) else [name, *(name + ending for ending in _ENDINGS)]
    for candidate in candidates if name else ():
        if (kind := _format_of(there, candidate)) is not None:
            return Found(kind, there, candidate)
    folder = "" if name == ".nv-meta" else name
    for info in (".info.json", ".info.yaml"):
        if _head(there, "/".join(part for part in (folder, ".nv-meta", info) if part)) is not None:
            return Found("energon", there, folder)
    names = [entry.path for entry in _listed(there, name) if not entry.is_dir and entry.path.endswith(tuple(_ENDINGS))]
    found = [Found(kind, there, path) for path in names if (kind := _format_of(there, path)) is not None]
    if len(found) > 1:
        shown = ", ".join(each.path.rpartition("/")[2] for each in found[:_MAX_SHOWN])
        message = f"the folder holds {len(found)} data sets: {shown}{', …' if len(found) > _MAX_SHOWN else ''}"
        raise ArgumentError(message, where=full_url(there, name), remedy="Name one.")
    return found[0] if found else None


def find_source(
    url: Url,
    storage_options: Mapping[str, object] | None = None,
    *,
    engine: Engine = "auto",
    transport: Transport | None = None,
) -> Found:
    """The data set at an address, as `sniff` finds it.

    Raises:
        NotFoundError: nothing exists there.
        DocumentError: nothing of a known format is there.
        AccessError, TransportError: the storage could not be read.
    """
    there, name = locate(url, storage_options, engine=engine, transport=transport, root_ok=True)
    found = _sniffed(there, name)
    if found is not None:
        return found
    where = full_url(there, name)
    if name and _head(there, name) is None:
        try:
            there.list(name)
        except SaevStoreError as error:
            if not _absent(error):
                raise
            raise NotFoundError("there is nothing of that name", where=where) from None
    remedy = "Known are LLMBATCH (.batch), MMIDIDX (.idx next to .bin), and folders with .nv-meta (Energon)."
    raise DocumentError("there is no data set of a known format", where=where, remedy=remedy)


def open_source(
    url: Url,
    storage_options: Mapping[str, object] | None = None,
    *,
    engine: Engine = "auto",
    transport: Transport | None = None,
) -> Source[object]:
    """The data set at an address, opened, in any of the known formats.

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
    return find_source(url, storage_options, engine=engine, transport=transport).open()


def reopen(
    description: Mapping[str, object],
    storage_options: Mapping[str, object] | None = None,
    *,
    url: Url | None = None,
    engine: Engine = "auto",
    transport: Transport | None = None,
) -> Source[object]:
    """The source that `Source.describe` described, opened again; its digest is compared.

    Args:
        description: The result of `describe`, such as from a store's `metadata.data`.
        storage_options: As in `open_source`.
        engine: As in `open_source`.
        transport: As in `open_source`.
        url: The address of the data now, if they were moved.

    Raises:
        DocumentError: the description is not one.
        CorruptShardError: the data there are not those that were described.
    """
    digest, text_key = description.get("digest"), description.get("text_key", "text")
    scope = cast("dict[str, object]", digest).get("scope") if isinstance(digest, dict) else None
    address = description.get("url") if url is None else url
    if not isinstance(description.get("url"), str) or scope not in ("sampled", "full") or not isinstance(text_key, str):
        message = f"{brief(dict(description))} describes no source: it needs a 'url' and a 'digest'"
        raise DocumentError(message, where="description")
    address = cast("Url", address)
    source: Source[object]
    if description.get("format") == "images":
        from saev_store.sources.image_folder import ImageFolder

        source = ImageFolder(address, storage_options, engine=engine, transport=transport)
    elif description.get("format") == "text":
        from saev_store.sources.text_file import TextFile

        source = TextFile(address, storage_options, text_key=text_key, engine=engine, transport=transport)
    else:
        source = open_source(address, storage_options, engine=engine, transport=transport)
    if description.get("samples") is not None:
        from saev_store.sources.mmididx.samples import from_description

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


def _format_of(transport: Transport, path: str) -> str | None:
    """The format of a file: from its first bytes, or for an empty or damaged one from its name; None if there is none."""
    head = _head(transport, path)
    if head is None:
        return None
    for magic, kind in _MAGICS.items():
        if head.startswith(magic):
            return kind
    if path.endswith(".tar.idx"):  # sample offsets of a tar
        return None
    # A damaged file is opened in the format of its name, whose reader reports the damage.
    return next((kind for ending, kind in _ENDINGS.items() if path.endswith(ending)), None)


def _listed(transport: Transport, path: str) -> Sequence[Entry]:
    """The names in a folder; empty if there is none, or if the storage does not list."""
    try:
        return transport.list(path)
    except SaevStoreError as error:
        if not _absent(error):
            raise
        return []
