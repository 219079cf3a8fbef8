"""Prepares a folder of tars: writes `.nv-meta` and the `.tar.idx` files of an Energon data set."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from saev_store._runtime.progress import Progress
from saev_store._runtime.threads import ahead, in_threads, n_cores
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    NotFoundError,
    SaevStoreError,
    StoreExistsError,
    brief,
)
from saev_store.names import printable
from saev_store.problems import Problem
from saev_store.sources._new_file import NewFile
from saev_store.sources.address import Url
from saev_store.sources.energon.documents import (
    definition_bytes,
    info_bytes,
    read_documents,
    read_splits,
    split_bytes,
)
from saev_store.sources.energon.field_map import FieldPath
from saev_store.sources.energon.index_sqlite import build_index
from saev_store.sources.energon.keys import (
    DATASET_YAML,
    INDEX_SQLITE,
    INDEX_UUID,
    INFO_JSON,
    INFO_YAML,
    META,
    SPLIT_JSON,
    SPLIT_YAML,
    check_shard_names,
    idx_path,
)
from saev_store.sources.energon.samples import CRUDE, SAMPLE_TYPES
from saev_store.sources.energon.split import SPLITS, compiled, deal, match_patterns, parse_patterns, parse_ratio
from saev_store.sources.energon.tars import Part, Sample, Shard, scan_shard, tar_idx_bytes
from saev_store.store.opening import exists
from saev_store.transport import Engine, Transport, open_transport
from saev_store.transport.durable import TEMP_PREFIX

#: Contains the lock.
WORK_FOLDER = f"{META}/.saev_store"
_N_THREADS = 16
#: Below this, starting processes costs more time than it saves.
_WORTH_PROCESSES_S = 1.5
#: Tars that a process reads before it ends.
_CHUNK = 32
_MAX_PART_NAMES = 50
_COMPRESSED = (".tgz", ".tar.gz", ".tar.zst", ".tar.bz2", ".tar.xz")


@dataclass
class Prepared:
    """A data set that `prepare` has written.

    Attributes:
        url: Its address, without credentials.
        shards: Its tars and the number of samples of each, in the order of the index.
        n_parts: Number of parts of all samples.
        part_names: Names of parts, the first 50.
        splits: The tars of each split.
        problems: Warnings about the data set.
    """

    url: str
    shards: dict[str, int] = field(default_factory=dict[str, int])
    n_parts: int = 0
    part_names: list[str] = field(default_factory=list[str])
    splits: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    problems: list[Problem] = field(default_factory=list[Problem])

    @property
    def n_samples(self) -> int:
        """Samples of all shards."""
        return sum(self.shards.values())

    def __str__(self) -> str:
        lines = [
            f"{self.url}: {self.n_samples:,} samples, {self.n_parts:,} parts in {len(self.shards):,} shards",
            f"  parts: {', '.join(self.part_names)}",
        ]
        for name, shards in self.splits.items():
            lines.append(f"  {name}: {sum(self.shards[shard] for shard in shards):,} samples in {len(shards):,} shards")
        return printable("\n".join([*lines, *(f"  {problem}" for problem in self.problems)]))


def prepare(
    url: Url,
    storage_options: Mapping[str, object] | None = None,
    *,
    split: str | None = None,
    split_parts: Sequence[str] = (),
    exclude: str | None = None,
    sample_type: str | None = None,
    field_map: Mapping[str, str] | None = None,
    num_workers: int | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
    engine: Engine = "auto",
    transport: Transport | None = None,
) -> Prepared:
    """Index the tars below a folder, assign them to splits, and write `.nv-meta` beside them. The tars are not changed.

    Tars are read in parallel. Nothing is replaced before all of them were read. `.info.json`, which makes the folder a data
    set, is deleted first and written last, so an interrupted call leaves a complete data set or none; repeat it.

    Args:
        url: The folder: a path, any fsspec URL; ignored with `transport`.
        storage_options: Options of the fsspec file system.
        split: Ratio of train, val and test, such as `"8,1,1"`; every shard is assigned, in order.
        split_parts: Instead of shares: `"train:shards/train_.*"`, a name and a regular expression that the beginning of
            a shard's path must match. `{000..099}` in it is a range.
        exclude: Leave out tars whose path has a match of this regular expression anywhere.
        sample_type: One of `SAMPLE_TYPES`, or `"CrudeWebdataset"`, the default if there is no `dataset.yaml`.
        field_map: The part of each field of the sample type: `{"image": "jpg", "caption": "json[caption]"}`.
        num_workers: Number of processes (threads for remote folders); by default as many as the work is worth.
        overwrite: Prepare a prepared data set again; without `split` and `split_parts`, its `split.yaml` stays.
        progress: Show a bar on stderr; default: when it is a terminal.
        engine: As in `open_transport`.
        transport: Read and write through this transport.

    Raises:
        ArgumentError: no split is given, or the sample type and field map do not fit.
        NotFoundError: there is no tar.
        StoreExistsError: it is prepared already, and `overwrite` is false.
        CorruptShardError: tars are damaged or cut; `problems` lists all of them. Nothing is published.
        DocumentError: two samples share a key.
        WriterConflictError: another process prepares it.
    """
    there = transport if transport is not None else open_transport(url, storage_options, engine=engine)
    definition = _definition(sample_type, field_map)
    if split is not None and split_parts:
        raise ArgumentError("shares and patterns cannot both be given", where="split")
    shares = parse_ratio(split) if split is not None else None
    patterns = parse_patterns(split_parts)
    _check_unprepared(there, overwrite=overwrite)
    if shares is None and not patterns and not exists(there, SPLIT_YAML):
        raise ArgumentError("no split is given", where="split", remedy="Pass split='8,1,1' or split_parts=….")
    tars, problems = _find_tars(there, exclude=exclude)
    made, offsets = Prepared(there.url, problems=problems), dict[str, bytes]()
    with there.lock(f"{WORK_FOLDER}/lock"):
        _check_unprepared(there, overwrite=overwrite)  # finding all tars may take long
        _delete_leftovers(there)
        with (
            Progress(sum(tars.values()), "indexing", shown=progress) as bar,
            NewFile(there, INDEX_SQLITE, overwrite=True) as index,
        ):
            scanned = _counted(_scan_all(there, list(tars), num_workers=num_workers), made, offsets, bar)
            uuid = build_index(index.temporary, scanned, where=there.url)
            filled = [tar for tar, count in made.shards.items() if count]
            if shares is not None:
                runs = deal(len(filled), shares)
                made.splits = {name: filled[a:b] for name, (a, b) in zip(SPLITS, runs, strict=True)}
            elif patterns:
                made.splits, more = match_patterns(filled, patterns)
                made.problems += more
            else:  # before anything is replaced: it may name shards that no longer exist
                made.splits = read_splits(there, list(tars))[0]
            # Until .info.json is written again, the folder is not a data set.
            there.delete(INFO_JSON)
            there.delete(INFO_YAML)
            for ending in ("-wal", "-shm", "-journal"):  # of the index before: SQLite would apply them to the new one
                there.delete(INDEX_SQLITE + ending)
            index.commit()
            in_threads(lambda tar: there.put(idx_path(tar), offsets[tar]), list(tars), _N_THREADS)
            there.put(INDEX_UUID, uuid.encode())
            if shares is not None or patterns:
                there.delete(SPLIT_JSON)
                there.put(SPLIT_YAML, split_bytes(made.splits))
            if definition is not None or not exists(there, DATASET_YAML):
                there.put(DATASET_YAML, definition or definition_bytes(CRUDE, {}))
            there.put(INFO_JSON, info_bytes(made.shards))
        there.delete(WORK_FOLDER)
    made.problems += read_documents(there).problems
    return made


def _check_unprepared(transport: Transport, *, overwrite: bool) -> None:
    if not overwrite and (exists(transport, INFO_JSON) or exists(transport, INFO_YAML)):
        raise StoreExistsError("it is prepared already", where=transport.url, remedy="Pass overwrite=True.")


def _delete_leftovers(transport: Transport) -> None:
    """Delete the hidden files of killed preparations. The lock ensures that none of them is at work."""
    with contextlib.suppress(NotFoundError):
        for entry in transport.list(META):
            if entry.name.startswith(TEMP_PREFIX):
                transport.delete(entry.path)


def _find_tars(transport: Transport, *, exclude: str | None) -> tuple[dict[str, int], list[Problem]]:
    """The tars below a folder with their sizes (bytes), in the order of their paths; hidden folders are left out.

    Raises:
        NotFoundError: there is none.
        ArgumentError: `exclude` is not a regular expression.
    """
    pattern = compiled(exclude, "exclude") if exclude else None
    found: dict[str, int] = {}
    problems: list[Problem] = []
    folders = [""]
    while folders:
        for entry in transport.list(folders.pop()):
            if entry.name.startswith("."):
                continue
            if entry.is_dir:
                folders.append(entry.path)
            elif entry.name.endswith(_COMPRESSED):
                message = "it is compressed, so its parts have no byte ranges: it is skipped"
                problems.append(Problem("compressed_tar", message, entry.path, severity="warning"))
            elif entry.name.endswith(".tar") and not (pattern and pattern.search(entry.path)):
                found[entry.path] = entry.size or 0
    if not found:
        left = " that `exclude` leaves" if exclude else ""
        raise NotFoundError(f"there are no tars (*.tar){left}", where=transport.url)
    check_shard_names(found, where="names of tars")
    return dict(sorted(found.items(), key=lambda item: item[0].split("/"))), problems


def _counted(
    results: Iterable[Shard | SaevStoreError], made: Prepared, offsets: dict[str, bytes], bar: Progress
) -> Iterator[Shard]:
    """Yield scanned shards, and add to `made` and `offsets` what is known of each; all are tried even if some are damaged.

    Raises:
        CorruptShardError: after the last one, if some are damaged.
    """
    errors: list[SaevStoreError] = []
    for shard in results:
        if isinstance(shard, SaevStoreError):
            errors.append(shard)
            continue
        made.shards[shard.name] = len(shard.samples)
        offsets[shard.name] = tar_idx_bytes([*(sample.offset for sample in shard.samples), shard.end])
        for oddity in shard.oddities:
            made.problems.append(Problem("odd_tar", oddity, shard.name, severity="warning"))
        if not shard.samples:
            message = "it has no samples, so it is in no split"
            made.problems.append(Problem("empty_shard", message, shard.name, severity="warning"))
        made.n_parts += sum(len(sample.parts) for sample in shard.samples)
        names = dict.fromkeys([*made.part_names, *(part.name for sample in shard.samples for part in sample.parts)])
        made.part_names = list(names)[:_MAX_PART_NAMES]
        bar.advance(shard.nbytes)
        yield shard
    if errors:
        shown = "; ".join(f"{error.where}: {error.message}" for error in errors[:8])
        raise CorruptShardError(
            f"{len(errors)} tars cannot be indexed: {shown}{'; …' if len(errors) > 8 else ''}",
            where=made.url,
            remedy="Restore them or leave them out with `exclude`, then prepare again.",
            problems=[Problem(error.kind, error.message, error.where or "") for error in errors],
        )


def _definition(sample_type: str | None, field_map: Mapping[str, str] | None) -> bytes | None:
    """The content of `dataset.yaml`, None if none is to be written."""
    fields = dict(field_map or {})
    if sample_type is None or sample_type == CRUDE:
        if fields:
            raise ArgumentError("a field map needs a sample type with fields", where="field_map")
        return definition_bytes(CRUDE, {}) if sample_type else None
    if not isinstance(sample_type, str) or sample_type not in SAMPLE_TYPES:  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
        names = ", ".join([*SAMPLE_TYPES, CRUDE])
        raise ArgumentError(f"{brief(sample_type)} is not one of {names}", where="sample_type")
    try:
        SAMPLE_TYPES[sample_type].check_fields(fields, where="field_map")
        for name, path in fields.items():
            FieldPath.parse(path, where=name)
    except SaevStoreError as error:
        raise ArgumentError(error.message, where="field_map", remedy=error.remedy) from None
    return definition_bytes(sample_type, fields)


# -- reading all tars --------------------------------------------------------------------------------------------------


def _scan_all(there: Transport, tars: list[str], *, num_workers: int | None) -> Iterator[Shard | SaevStoreError]:
    """Scan tars in parallel, in processes on this machine, otherwise in threads; in order, with an error for a damaged one."""
    if not there.is_local:
        yield from ahead(partial(_scan, there), tars, num_workers or _N_THREADS)
        return
    if num_workers is None:  # the first tar shows how long the others will take
        started_s = time.perf_counter()
        yield _scan(there, tars[0])
        tars = tars[1:]
        num_workers = n_cores() if (time.perf_counter() - started_s) * len(tars) > _WORTH_PROCESSES_S else 1
    if num_workers < 2 or there.local_path is None:
        yield from (_scan(there, tar) for tar in tars)
        return
    size = max(1, min(_CHUNK, -(-len(tars) // num_workers)))
    chunks = [tars[first : first + size] for first in range(0, len(tars), size)]
    for scanned in ahead(partial(_scan_in_process, there), chunks, num_workers):
        yield from scanned


def _scan(there: Transport, tar: str) -> Shard | SaevStoreError:
    try:
        return scan_shard(there, tar)
    except SaevStoreError as error:
        return error


def _scan_in_process(there: Transport, tars: list[str]) -> list[Shard | SaevStoreError]:
    """Scan tars in another process; if that ends too early, in this one.

    A program does not import the caller's main module again, as a pool of processes does, and does not copy its threads, as a
    fork does.
    """
    program = f"import sys; sys.path[:] = {sys.path!r}; import {__name__} as m; m.scan_for_parent()"
    done = subprocess.run(  # noqa: S603 - this interpreter, and this module
        [sys.executable, "-c", program],
        input=json.dumps([there.local_path, *tars]),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        return [_scan(there, tar) for tar in tars]
    found: list[Shard | SaevStoreError] = []
    for tar, answer in zip(tars, json.loads(done.stdout), strict=True):
        if answer is None:  # it is damaged: the error is made here
            found.append(_scan(there, tar))
        else:
            name, nbytes, rows, end, oddities = answer
            samples = [Sample(key, at, n, [Part(*part) for part in parts]) for key, at, n, parts in rows]
            found.append(Shard(name, nbytes, samples, end, oddities))
    return found


def scan_for_parent() -> None:
    """Scan the tars that standard input lists, and write what was found to standard output, null for a damaged one."""
    root, *tars = json.load(sys.stdin)
    there = open_transport(root)
    scanned = (_scan(there, tar) for tar in tars)
    sys.stdout.write(json.dumps([shard if isinstance(shard, Shard) else None for shard in scanned]))
