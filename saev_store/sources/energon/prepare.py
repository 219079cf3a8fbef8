"""Prepares a folder of tars: writes `.nv-meta` and the `.tar.idx` files of an Energon data set."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from saev_store._runtime.progress import Progress
from saev_store._runtime.threads import ahead, share
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    NotFoundError,
    ReadOnlyError,
    SaevStoreError,
    StoreExistsError,
    TransportError,
    brief,
)
from saev_store.names import printable
from saev_store.problems import Problem
from saev_store.sources._files import file_identity
from saev_store.sources._new_file import NewFile
from saev_store.sources.address import Url
from saev_store.sources.energon._build import build_index
from saev_store.sources.energon._open import read_documents
from saev_store.sources.energon._scan_all import scan_all
from saev_store.sources.energon.field_map import FieldPath
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
from saev_store.sources.energon.nvmeta import (
    definition_bytes,
    info_bytes,
    parse_info,
    parse_splits,
    split_bytes,
)
from saev_store.sources.energon.samples import CRUDE, SAMPLE_TYPES
from saev_store.sources.energon.split import SplitPlan, compiled
from saev_store.sources.energon.tar_idx import tar_idx_bytes
from saev_store.sources.energon.tar_scan import ScannedShard
from saev_store.transport import Engine, Lists, Transport, Writes, open_transport
from saev_store.transport.local.write import TEMP_PREFIX
from saev_store.validation import local_folder

#: Contains the lock.
WORK_FOLDER = f"{META}/.saev_store"
_N_THREADS = 16
_MAX_PART_NAMES = 50
_MAX_FOLDERS = 100_000


@dataclass(frozen=True)
class Prepared:
    """A data set that `prepare` has written.

    Attributes:
        url: Its address, without credentials.
        shards: Its tars and the number of samples of each, in the order of the index.
        n_parts: Number of parts of all samples.
        part_names: Names of parts, at most 50.
        splits: The tars of each split.
        problems: Warnings about the data set.
    """

    url: str
    shards: Mapping[str, int]
    n_parts: int
    part_names: tuple[str, ...]
    splits: Mapping[str, tuple[str, ...]]
    problems: tuple[Problem, ...]

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
    if not isinstance(getattr(there, "url", None), str):  # callers may not check types
        raise ArgumentError(f"{brief(there)} is no transport", where="transport")
    if not isinstance(there, Writes) or not isinstance(there, Lists):
        raise ReadOnlyError(f"nothing can be written or listed through {there.name}", where=there.url)
    definition = _definition(sample_type, field_map)
    plan = SplitPlan(split, split_parts)
    _check_unprepared(there, overwrite=overwrite)
    if plan.is_empty and not _exists(there, SPLIT_YAML):
        raise ArgumentError(
            "it is not said how to split it", where="split", remedy="Pass split='8,1,1' or split_parts=…."
        )
    shards, problems = find_tars(there, exclude=exclude)
    with there.lock(f"{WORK_FOLDER}/lock"):
        _check_unprepared(there, overwrite=overwrite)  # to find all tars may take long
        _delete_leftovers(there)
        before = {shard: file_identity(there, shard) for shard, _ in shards}
        facts = _Facts(there.url, len(shards))
        with (
            Progress(sum(nbytes for _, nbytes in shards), "indexing", shown=progress) as bar,
            NewFile(there, INDEX_SQLITE, overwrite=True) as index,
        ):
            scanned = facts.checked(scan_all(there, list(before), num_workers=num_workers), bar)
            uuid = build_index(index.temporary, scanned, where=there.url)
            counts = facts.counts
            info = parse_info(info_bytes(counts), where=INFO_JSON)
            splits, split_problems = plan.assign(counts)
            if splits is None:
                # Before anything is replaced: it may name shards that no longer exist.
                splits = dict(parse_splits(there.read(SPLIT_YAML), info, where=SPLIT_YAML).parts)
            if changed := _changed(there, before):
                raise CorruptShardError(
                    f"{brief(changed[0])} was changed while it was indexed", where=there.url, remedy="Prepare again."
                )
            # Until .info.json is written again, the folder is no data set.
            there.delete(INFO_JSON)
            there.delete(INFO_YAML)
            index.commit()
            share(
                lambda tar: there.put(idx_path(tar), tar_idx_bytes(facts.offsets[tar])),
                deque(facts.offsets),
                _N_THREADS,
            )
            there.put(INDEX_UUID, uuid.encode())
            if not plan.is_empty:
                there.delete(SPLIT_JSON)
                there.put(SPLIT_YAML, split_bytes({name: list(found) for name, found in splits.items()}, []))
            if definition is not None:
                there.put(DATASET_YAML, definition)
            elif not _exists(there, DATASET_YAML):
                there.put(DATASET_YAML, definition_bytes(CRUDE, {}))
            there.put(INFO_JSON, info_bytes(counts))
        there.delete(WORK_FOLDER)
    documents = read_documents(there)
    return Prepared(
        there.url,
        counts,
        facts.n_parts,
        tuple(facts.part_names),
        splits,
        (*problems, *facts.problems, *split_problems, *documents.problems),
    )


def _check_unprepared(transport: Transport, *, overwrite: bool) -> None:
    if not overwrite and (_exists(transport, INFO_JSON) or _exists(transport, INFO_YAML)):
        raise StoreExistsError("it is prepared already", where=transport.url, remedy="Pass overwrite=True.")


def _changed(transport: Transport, before: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The tars that are others now: by their size and times on this machine, elsewhere by the version that was scanned."""

    def is_other(shard: str) -> bool:
        try:
            if local_folder(transport) is None:
                transport.get_ranges(shard, starts=[0], ends=[1])  # of the version that is pinned since the first read
        except (CorruptShardError, NotFoundError):
            return True
        except TransportError as error:
            if error.transient:
                raise
            return True
        return file_identity(transport, shard) != before[shard]

    answers = zip(before, ahead(is_other, before, 1 if transport.is_local else _N_THREADS), strict=True)
    return [shard for shard, is_changed in answers if is_changed]


def _delete_leftovers(transport: Transport) -> None:
    """Delete what killed preparations left under hidden names. The lock says that none of them is alive."""
    if isinstance(transport, Lists) and isinstance(transport, Writes):
        with contextlib.suppress(NotFoundError):
            for entry in transport.list(META):
                if entry.name.startswith(TEMP_PREFIX):
                    transport.delete(entry.path)


def find_tars(transport: Lists, *, exclude: str | None = None) -> tuple[list[tuple[str, int]], list[Problem]]:
    """The tars below a folder, as (path, nbytes), in the order of their paths; hidden folders are left out.

    Raises:
        NotFoundError: there is none.
        ArgumentError: `exclude` is no regular expression.
    """
    pattern = compiled(exclude, "exclude") if exclude else None
    found: list[tuple[str, int]] = []
    problems: list[Problem] = []
    folders = [""]
    for n_folders in range(_MAX_FOLDERS + 1):
        if not folders:
            break
        if n_folders == _MAX_FOLDERS:
            raise ArgumentError(
                f"there are more than {_MAX_FOLDERS:,} folders below it", where=str(getattr(transport, "url", ""))
            )
        for entry in transport.list(folders.pop()):
            name = entry.name
            if entry.is_dir:
                if not name.startswith("."):
                    folders.append(entry.path)
            elif name.endswith((".tgz", ".tar.gz", ".tar.zst", ".tar.bz2", ".tar.xz")):
                message = "it is compressed, so its parts have no byte ranges: it is skipped"
                problems.append(Problem("compressed_tar", message, entry.path, severity="warning"))
            elif name.endswith(".tar") and not name.startswith(".") and not (pattern and pattern.search(entry.path)):
                found.append((entry.path, entry.size or 0))
    if not found:
        raise NotFoundError(
            "there are no tars (*.tar)" + (" that `exclude` leaves" if exclude else ""),
            where=str(getattr(transport, "url", "")),
        )
    found.sort(key=lambda item: item[0].split("/"))
    check_shard_names((path for path, _ in found), where="names of tars")
    return found, problems


class _Facts:
    """Facts about scanned shards, collected while they are written to the index."""

    def __init__(self, url: str, n_shards: int) -> None:
        self._url, self._n_shards = url, n_shards
        self.counts: dict[str, int] = {}
        self.offsets: dict[str, npt.NDArray[np.int64]] = {}
        self.n_parts = 0
        self.part_names: dict[str, None] = {}
        self.problems: list[Problem] = []

    def checked(self, results: Iterable[ScannedShard | SaevStoreError], bar: Progress) -> Iterator[ScannedShard]:
        """Yield scanned shards; all are tried even if some are damaged.

        Raises:
            CorruptShardError: after the last one, if some are damaged.
        """
        errors: list[SaevStoreError] = []
        for result in results:
            if isinstance(result, SaevStoreError):
                errors.append(result)
                continue
            self._collect(result)
            bar.advance(result.nbytes)
            yield result
        if errors:
            problems = [Problem(error.kind, error.message, error.where or "") for error in errors]
            shown = "; ".join(f"{error.where}: {error.message}" for error in errors[:8])
            more = f"; and {len(errors) - 8} more" if len(errors) > 8 else ""
            raise CorruptShardError(
                f"{len(errors)} of {self._n_shards} tars cannot be indexed: {shown}{more}",
                where=self._url,
                remedy="Restore them or leave them out with `exclude`, then prepare again.",
                problems=problems,
            )

    def _collect(self, scanned: ScannedShard) -> None:
        self.counts[scanned.shard] = len(scanned.samples)
        self.offsets[scanned.shard] = np.array([*(row[1] for row in scanned.samples), scanned.end], np.int64)
        for oddity in scanned.oddities:
            self.problems.append(Problem("odd_tar", oddity, scanned.shard, severity="warning"))
        if not scanned.samples:
            message = "it has no samples, so it is in no split"
            self.problems.append(Problem("empty_shard", message, scanned.shard, severity="warning"))
        for _, _, _, parts in scanned.samples:
            self.n_parts += len(parts)
            if len(self.part_names) < _MAX_PART_NAMES:
                self.part_names.update((name, None) for name, _, _ in parts)


def _definition(sample_type: str | None, field_map: Mapping[str, str] | None) -> bytes | None:
    """The content of `dataset.yaml`, None if none is to be written."""
    if sample_type is None:
        if field_map:
            raise ArgumentError("a field map needs a sample type", where="field_map")
        return None
    if sample_type == CRUDE:
        if field_map:
            raise ArgumentError(f"{CRUDE} has parts as they are, and takes no field map", where="field_map")
        return definition_bytes(CRUDE, {})
    if not isinstance(sample_type, str) or sample_type not in SAMPLE_TYPES:  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
        raise ArgumentError(f"{brief(sample_type)} is none of {', '.join(SAMPLE_TYPES)}, {CRUDE}", where="sample_type")
    field_map = dict(field_map or {})
    try:
        SAMPLE_TYPES[sample_type].check_fields(field_map, where="field_map")
        for name, path in field_map.items():
            FieldPath.parse(path, where=name)
    except SaevStoreError as error:
        raise ArgumentError(error.message, where="field_map", remedy=error.remedy) from None
    return definition_bytes(sample_type, field_map)


def _exists(transport: Transport, path: str) -> bool:
    try:
        return transport.size(path) >= 0
    except NotFoundError:
        return False
