"""Recognises the format of a data set from the content of its files, and opens it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from saev_store.errors import AccessError, CorruptShardError, DocumentError, NotFoundError, TransportError, brief
from saev_store.sources.address import Url, locate
from saev_store.transport import Transport, open_transport

if TYPE_CHECKING:
    from saev_store.sources._source import Source

_MAGICS = {b"LLMBATCH": "llmbatch", b"MMIDIDX\0\0": "mmididx"}
_ENDINGS = {".idx": "mmididx", ".batch": "llmbatch"}
_INFOS = (".nv-meta/.info.json", ".nv-meta/.info.yaml")


def open_source(
    url: Url, storage_options: Mapping[str, object] | None = None, *, transport: Transport | None = None
) -> Source[object]:
    """The data set at an address, opened: MMIDIDX, LLMBATCH or Energon, by its content.

    Args:
        url: A file, the `.bin` next to an index, a name without its ending, or the folder of an Energon data set: a path, any fsspec
            URL, or, with `transport`, a path below its root.
        storage_options: Options of the fsspec file system.
        transport: Read through this transport, such as `open_transport(folder, engine="pread")`.

    Raises:
        NotFoundError: no data set is there.
        DocumentError: the file is of no known format, or breaks its format's rules.
        CorruptShardError: a file is longer or shorter than it should be.

    >>> open_source(TOKENS).format
    'mmididx'
    """
    there, name = locate(url, storage_options, transport=transport)
    candidates = [name, *(name + ending for ending in _ENDINGS)]
    if name.endswith((".bin", *_ENDINGS)):
        candidates = [name.removesuffix(".bin") + ".idx" if name.endswith(".bin") else name]
    for path in candidates:
        kind = _format_of(there, path)
        if kind == "llmbatch":
            from saev_store.sources.llmbatch import BatchFileReader

            return BatchFileReader(path, transport=there)
        if kind == "mmididx":
            from saev_store.sources.mmididx import IndexedDataset

            return IndexedDataset(path, transport=there)
    if _has_info(there, name):
        from saev_store.sources.energon import EnergonDataset

        return EnergonDataset(name, transport=there)
    remedy = "Known are LLMBATCH (.batch), MMIDIDX (.idx next to .bin), and folders with .nv-meta (Energon)."
    error = NotFoundError if _head(there, name) is None else DocumentError
    raise error("no data set of a known format is here", where=there.where(name), remedy=remedy)


def open_images(url: Url, storage_options: Mapping[str, object] | None = None) -> Source[object]:
    """The images at an address: an Energon data set, or else a folder of images; raises as these."""
    from saev_store.sources.energon import EnergonDataset
    from saev_store.sources.images import ImageFolder

    transport = open_transport(url, storage_options)
    return (EnergonDataset if _has_info(transport, "") else ImageFolder)("", transport=transport)


def _has_info(transport: Transport, folder: str) -> bool:
    """Return True for the folder of an Energon data set."""
    return any(_head(transport, f"{folder}/{info}".lstrip("/")) is not None for info in _INFOS)


def reopen(
    description: Mapping[str, object], storage_options: Mapping[str, object] | None = None, *, url: Url | None = None
) -> Source[object]:
    """The source that `Source.describe` described, opened again; its digest is compared.

    `url` is the address of the data now, if they were moved.

    Raises:
        DocumentError: the description is not one.
        CorruptShardError: the data there are not those that were described.
    """
    digest, text_key, split = (description.get(name) for name in ("digest", "text_key", "split"))
    scope = cast("dict[str, object]", digest).get("scope") if isinstance(digest, dict) else None
    described_url = description.get("url")
    if not isinstance(described_url, str) or not isinstance(scope, str) or scope not in ("sampled", "full"):
        message = f"{brief(dict(description))} describes no source: it needs a 'url' and a 'digest'"
        raise DocumentError(message, where="description")
    address = described_url if url is None else url
    source: Source[object]
    match description.get("format"):
        case "images":
            from saev_store.sources.images import ImageFolder

            source = ImageFolder(address, storage_options)
        case "text":
            from saev_store.sources.texts import TextFile

            source = TextFile(address, storage_options, text_key=text_key if isinstance(text_key, str) else "text")
        case _:
            source = open_source(address, storage_options)
    if description.get("samples") is not None:
        from saev_store.sources.mmididx.samples import from_description

        source = from_description(source, description["samples"])
    if isinstance(split, str):
        source = source.split(split)
    now = source.describe(digest="full" if scope == "full" else "sampled")
    for name in ("format", "n_samples", "digest"):
        if now[name] != description.get(name):
            raise other_data(name, now[name], description.get(name), where=source.url)
    return source


def other_data(name: str, now: object, then: object, *, where: str) -> CorruptShardError:
    """The error for a source that is not the one that was described."""
    remedy = "Pass the data set that was recorded, or its address now as url=."
    return CorruptShardError(f"{name} is {brief(now)}, but was {brief(then)}", where=where, remedy=remedy)


def _head(transport: Transport, path: str) -> bytes | None:
    """The first bytes of a file; None for a missing file or a folder. Errors that may pass are raised."""
    try:
        return bytes(transport.get_ranges(path, starts=[0], ends=[min(transport.size(path), 9)])[0])
    except (NotFoundError, CorruptShardError):
        return None
    except TransportError as error:  # a folder
        if isinstance(error, AccessError) or error.transient:
            raise
        return None


def _format_of(transport: Transport, path: str) -> str | None:
    """The format of a file by its first bytes; of a damaged one by its name, so that the reader of that format reports the damage."""
    head = _head(transport, path)
    if head is None:
        return None
    name = "" if path.endswith(".tar.idx") else path  # which has offsets in a tar
    by_name = next((kind for ending, kind in _ENDINGS.items() if name.endswith(ending)), None)
    return next((kind for magic, kind in _MAGICS.items() if head.startswith(magic)), by_name)
