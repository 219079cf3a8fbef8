"""Prepares a folder of tars: writes `.nv-meta` and the `.tar.idx` files of an Energon data set."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from saev_store._runtime.progress import Progress
from saev_store._runtime.threads import ahead, in_threads
from saev_store.errors import ArgumentError, CorruptShardError, DocumentError, NotFoundError, StoreExistsError, brief
from saev_store.sources._new_file import NewFile
from saev_store.sources.address import Url
from saev_store.sources.energon import documents, keys
from saev_store.sources.energon.index_sqlite import build_index
from saev_store.sources.energon.reader import N_THREADS, EnergonDataset
from saev_store.sources.energon.samples import CRUDE, SAMPLE_TYPES, FieldPath, check_fields
from saev_store.sources.energon.tars import Shard, scan_shard
from saev_store.store.opening import exists
from saev_store.transport import Engine, Transport, open_transport
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
    split_parts: Sequence[str] = (),
    sample_type: str | None = None,
    field_map: Mapping[str, str] | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
    engine: Engine = "auto",
    transport: Transport | None = None,
) -> EnergonDataset:
    """Index the tars below a folder, write `.nv-meta` next to them, and return the data set. The tars are not changed.

    Nothing is replaced before all tars were read. `.info.json`, which makes the folder a data set, is deleted first and
    written last, so an interrupted call leaves a complete data set or none; repeat it.

    Args:
        url: The folder: a path, any fsspec URL; ignored with `transport`.
        storage_options: Options of the fsspec file system.
        split: Ratio of train, val and test, such as `"8,1,1"`; every tar with samples is assigned, in order.
        split_parts: Instead of shares: `"train:shards/train_.*"`, a name and a regular expression that the beginning of
            a shard's path must match.
        sample_type: One of `SAMPLE_TYPES`, or `"CrudeWebdataset"`, the default if there is no `dataset.yaml`.
        field_map: The part of each field of the sample type: `{"image": "jpg", "caption": "json[caption]"}`.
        overwrite: Prepare a prepared data set again; without `split` and `split_parts`, its `split.yaml` stays.
        progress: Show a bar on stderr; default: when it is a terminal.
        engine: As in `open_source`.
        transport: Read and write through this transport.

    Raises:
        ArgumentError: no split is given, or the sample type and field map do not fit.
        NotFoundError: there is no tar.
        StoreExistsError: it is prepared already, and `overwrite` is false.
        CorruptShardError: a tar is damaged or cut, or has no end marker. Nothing is published.
        DocumentError: two samples share a key.
        WriterConflictError: another process prepares it.
    """
    there = transport if transport is not None else open_transport(url, storage_options, engine=engine)
    definition = _definition(sample_type, field_map)
    shares = documents.shares_of(split) if split is not None else None
    patterns = documents.patterns_of(split_parts)
    if bool(shares) == bool(patterns) and (shares or not exists(there, keys.SPLIT_YAML)):
        raise ArgumentError("pass either split='8,1,1' or split_parts=…", where="split")
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
            offsets[shard.name] = np.array([*(sample.offset for sample in shard.samples), shard.end], "<u8").tobytes()
            bar.advance(shard.nbytes)
            yield shard

    with (
        there.lock(f"{WORK_FOLDER}/lock"),
        Progress(sum(tars.values()), "indexing", shown=progress) as bar,
        NewFile(there, keys.INDEX_SQLITE, overwrite=True) as index,
    ):
        _check_unprepared(there, overwrite=overwrite)  # finding all tars may take long
        uuid = build_index(index.temporary, scanned(), where=there.url)
        filled = [tar for tar, count in counts.items() if count]
        if shares is not None:
            splits = documents.deal(filled, shares)
        elif patterns:
            splits = {
                name: [tar for tar in filled if any(pattern.match(tar) for pattern in each)]
                for name, each in patterns.items()
            }
        else:  # before anything is replaced: it may name shards that no longer exist
            splits = documents.read_splits(there, list(tars))[0]
        # Until .info.json is written again, the folder is not a data set.
        there.delete(keys.INFO_JSON)
        there.delete(keys.INFO_YAML)
        index.commit()
        in_threads(lambda tar: there.put(keys.idx_path(tar), offsets[tar]), list(tars), N_THREADS)
        there.put(keys.INDEX_UUID, uuid.encode())
        if shares is not None or patterns:
            there.delete(keys.SPLIT_JSON)
            collapsed = {name: documents.collapse(each) for name, each in splits.items()}
            there.put(keys.SPLIT_YAML, documents.yaml_bytes({"split_parts": collapsed, "exclude": list[str]()}))
        if definition is not None or not exists(there, keys.DATASET_YAML):
            there.put(keys.DATASET_YAML, definition or documents.definition_bytes(CRUDE, {}))
        info = {"energon_version": _FORMAT_VERSION, "shard_counts": counts}
        there.put(keys.INFO_JSON, json.dumps(info, indent=2, ensure_ascii=False).encode())
        _delete_leftovers(there)
        there.delete(WORK_FOLDER)
    return EnergonDataset("", transport=there)


def _check_unprepared(transport: Transport, *, overwrite: bool) -> None:
    if not overwrite and (exists(transport, keys.INFO_JSON) or exists(transport, keys.INFO_YAML)):
        raise StoreExistsError("it is prepared already", where=transport.url, remedy="Pass overwrite=True.")


def _delete_leftovers(transport: Transport) -> None:
    """Delete the hidden files of killed preparations. The lock ensures that none of them is at work."""
    with contextlib.suppress(NotFoundError):
        for entry in transport.list(keys.META):
            if entry.name.startswith(TEMP_PREFIX):
                transport.delete(entry.path)


def _find_tars(transport: Transport) -> dict[str, int]:
    """The tars below a folder with their sizes (bytes), in the order of their paths; hidden folders are left out."""
    found: dict[str, int] = {}
    folders = [""]
    while folders:
        for entry in transport.list(folders.pop()):
            if entry.is_dir and not entry.name.startswith("."):
                folders.append(entry.path)
            elif entry.name.endswith(".tar") and not entry.name.startswith("."):
                found[entry.path] = entry.size or 0
    if not found:
        raise NotFoundError("there are no tars (*.tar)", where=transport.url)
    keys.check_names(found, where="names of tars")
    return dict(sorted(found.items(), key=lambda item: item[0].split("/")))


def _definition(sample_type: str | None, field_map: Mapping[str, str] | None) -> bytes | None:
    """The content of `dataset.yaml`, None if none is to be written."""
    fields = dict(field_map or {})
    if sample_type is None and not fields:
        return None
    if not isinstance(sample_type, str) or sample_type not in {*SAMPLE_TYPES, CRUDE}:
        names = ", ".join([*SAMPLE_TYPES, CRUDE])
        raise ArgumentError(f"{brief(sample_type)} is not one of {names}", where="sample_type")
    try:
        check_fields(sample_type, fields, where="field_map")
    except DocumentError as error:
        raise ArgumentError(error.message, where="field_map") from None
    for path in fields.values():
        FieldPath.parse(path, where="field_map")
    return documents.definition_bytes(sample_type, fields)
