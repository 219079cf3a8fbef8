"""Prepares a folder of tars: writes `.nv-meta` and the `.tar.idx` files of an Energon data set."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial

from saev_store._runtime.progress import Progress
from saev_store._runtime.threads import ahead, in_threads
from saev_store.errors import ArgumentError, CorruptShardError, NotFoundError, StoreExistsError
from saev_store.sources._files import files_below
from saev_store.sources._new_file import NewFile
from saev_store.sources.address import Url
from saev_store.sources.energon import documents, keys
from saev_store.sources.energon.index_sqlite import build_index
from saev_store.sources.energon.reader import N_THREADS, EnergonDataset
from saev_store.sources.energon.samples import CRUDE
from saev_store.sources.energon.tars import Shard, offsets_of, scan_shard
from saev_store.store.opening import exists
from saev_store.transport import Transport, open_transport
from saev_store.transport.durable import TEMP_PREFIX

#: The writer that `.info.json` names: the release of Energon whose files ours are equal to.
_FORMAT_VERSION = "7.4.1"
#: Contains the lock.
WORK_FOLDER = f"{keys.META}/.saev_store"


def prepare(
    url: Url,
    storage_options: Mapping[str, object] | None = None,
    *,
    split: str | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
    transport: Transport | None = None,
) -> EnergonDataset:
    """Index the tars below a folder, write `.nv-meta` next to them, and return the data set. The tars are not changed.

    Samples have raw parts, unless a `dataset.yaml` is there, which is kept.

    An interrupted call leaves a complete data set or none; repeat it.

    Args:
        url: The folder: a path, any fsspec URL; ignored with `transport`.
        storage_options: Options of the fsspec file system.
        split: Ratio of train, val and test, such as `"8,1,1"`; every tar with samples is assigned, in order. Without it,
            there must be a `split.yaml`.
        overwrite: Prepare a prepared data set again; without `split`, its `split.yaml` stays.
        progress: Show a bar on stderr; default: when it is a terminal.
        transport: Read and write through this transport.

    Raises:
        ArgumentError: no split is given.
        NotFoundError: there is no tar.
        StoreExistsError: it is prepared already, and `overwrite` is false.
        CorruptShardError: a tar is damaged or cut. Nothing is published.
        DocumentError: two samples share a key.
        WriterConflictError: another process prepares it.
    """
    there = transport if transport is not None else open_transport(url, storage_options)
    shares = documents.shares_of(split) if split is not None else None
    if shares is None and not exists(there, keys.SPLIT_YAML):
        raise ArgumentError("pass a split such as '8,1,1', or write split.yaml", where="split")
    _check_unprepared(there, overwrite=overwrite)
    tars = _find_tars(there)
    counts, offsets = dict[str, int](), dict[str, bytes]()

    def scanned() -> Iterator[Shard]:
        for shard in ahead(partial(scan_shard, there), list(tars), 1 if there.is_local else N_THREADS):
            if shard.samples and shard.end == shard.nbytes:
                message = "it has no end marker: it may have been cut between two files"
                raise CorruptShardError(
                    message, where=there.where(shard.name), remedy="Copy it again, or append 1 KiB of zeros."
                )
            counts[shard.name] = len(shard.samples)
            offsets[shard.name] = offsets_of(shard)
            bar.advance(shard.nbytes)
            yield shard

    with (
        there.lock(f"{WORK_FOLDER}/lock"),
        Progress(sum(tars.values()), "indexing", shown=progress) as bar,
        NewFile(there, keys.INDEX_SQLITE, overwrite=True) as index,
    ):
        _check_unprepared(there, overwrite=overwrite)  # finding all tars may take long
        uuid = build_index(index.temporary, scanned(), where=there.url)
        if shares is None:  # before anything is replaced: it may name shards that no longer exist
            documents.read_splits(there, list(tars))
        # Until .info.json is written again, the folder is not a data set.
        there.delete(keys.INFO_JSON)
        there.delete(keys.INFO_YAML)
        index.commit()
        in_threads(lambda tar: there.put(keys.idx_path(tar), offsets[tar]), list(tars), N_THREADS)
        there.put(keys.INDEX_UUID, uuid.encode())
        if shares is not None:
            there.delete(keys.SPLIT_JSON)
            splits = documents.deal([tar for tar, count in counts.items() if count], shares)
            there.put(keys.SPLIT_YAML, documents.split_bytes(splits))
        if not exists(there, keys.DATASET_YAML):
            there.put(keys.DATASET_YAML, f"__module__: {documents.MODULE}\n__class__: {CRUDE}\n".encode())
        info = {"energon_version": _FORMAT_VERSION, "shard_counts": counts}
        there.put(keys.INFO_JSON, json.dumps(info, indent=2, ensure_ascii=False).encode())
        for entry in there.list(keys.META):  # of killed preparations, of which none is at work: we have the lock
            if entry.name.startswith(TEMP_PREFIX):
                there.delete(entry.path)
        there.delete(WORK_FOLDER)
    return EnergonDataset("", transport=there)


def _check_unprepared(transport: Transport, *, overwrite: bool) -> None:
    if not overwrite and (exists(transport, keys.INFO_JSON) or exists(transport, keys.INFO_YAML)):
        raise StoreExistsError("it is prepared already", where=transport.url, remedy="Pass overwrite=True.")


def _find_tars(transport: Transport) -> dict[str, int]:
    """The tars below a folder with their sizes (bytes), in the order of their paths; hidden folders are left out."""
    found = {entry.path: entry.size or 0 for entry in files_below(transport) if entry.name.endswith(".tar")}
    if not found:
        raise NotFoundError("there are no tars (*.tar)", where=transport.url)
    keys.check_names(found, where="names of tars")
    return dict(sorted(found.items(), key=lambda item: item[0].split("/")))
