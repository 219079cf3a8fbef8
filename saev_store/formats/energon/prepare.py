"""Preparing a folder of tars: `.nv-meta` and the `.tar.idx` files that make an Energon data set of it."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    NotFoundError,
    ReadOnlyError,
    SaevStoreError,
    StoreExistsError,
    brief,
)
from saev_store.formats._address import Url
from saev_store.formats._new_file import NewFile
from saev_store.formats.energon._build import build_index
from saev_store.formats.energon._open import read_documents
from saev_store.formats.energon._receipts import WORK_FOLDER, Receipt, is_current, read_receipt
from saev_store.formats.energon._scan_all import scan_all
from saev_store.formats.energon.field_map import FieldPath
from saev_store.formats.energon.keys import (
    DATASET_YAML,
    INDEX_SQLITE,
    INDEX_UUID,
    INFO_JSON,
    INFO_YAML,
    SPLIT_JSON,
    SPLIT_YAML,
    check_shard_names,
)
from saev_store.formats.energon.nvmeta import (
    definition_bytes,
    info_bytes,
    parse_info,
    parse_splits,
    split_bytes,
)
from saev_store.formats.energon.samples import CRUDE, SAMPLE_TYPES
from saev_store.formats.energon.split import deal, expand, parse_ratio
from saev_store.problems import Problem
from saev_store.transport import Engine, Lists, Moves, Transport, Writes, open_transport
from saev_store.writer._progress import Progress

SPLITS = ("train", "val", "test")
_MAX_PART_NAMES = 50
_MAX_FOLDERS = 100_000
_CHUNK_NBYTES = 32 << 20


@runtime_checkable
class _Local(Moves, Writes, Protocol):
    def resolve(self, path: str) -> str: ...


@dataclass(frozen=True)
class Prepared:
    """What `prepare` made.

    Attributes:
        url: The data set.
        shards: Its tars and how many samples each has, in the order of the index.
        n_parts: Parts of all samples.
        part_names: Names of parts that were met, at most 50.
        splits: The tars of each split.
        problems: What is odd, although the data set can be read.
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
        return "\n".join([*lines, *(f"  {problem}" for problem in self.problems)])


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
    """Index the tars below a folder, deal them out to splits, and write `.nv-meta` beside them. The tars stay as they are.

    Tars are gone through in parallel. What was found in each is kept, so an interrupted call continues when it is
    repeated; `.info.json`, which makes the folder a data set, is written last.

    Args:
        url: The folder: a path, any fsspec URL; ignored with `transport`.
        storage_options: What fsspec hands to the file system.
        split: Shares of train, val and test, such as `"8,1,1"`: whole shards, in order, none left over.
        split_parts: Instead of shares: `"train:shards/train_.*"`, a name and a regular expression that the beginning of
            a shard's path must match. `{000..099}` in it is a range.
        exclude: Leave out tars whose path has a match of this regular expression anywhere.
        sample_type: One of `SAMPLE_TYPES`, or `"CrudeWebdataset"`, which is also the default where no `dataset.yaml` is.
        field_map: Which part each field of the sample type comes from: `{"image": "jpg", "caption": "json[caption]"}`.
        num_workers: Processes (threads for remote folders); by default as many as the work is worth.
        overwrite: Prepare it again although it is prepared; without `split` and `split_parts`, its `split.yaml` stays.
        progress: None shows a bar on a terminal.
        engine: As in `open_transport`.
        transport: Read and write through this one.

    Raises:
        ArgumentError: no split is asked for, or the sample type and field map do not fit.
        NotFoundError: there is no tar.
        StoreExistsError: it is prepared already, and `overwrite` is false.
        CorruptShardError: tars are damaged or cut; `problems` names all of them. Nothing is published.
        DocumentError: two samples share a key.
        WriterConflictError: another process prepares it.
    """
    there = transport if transport is not None else open_transport(url, storage_options, engine=engine)
    if not isinstance(there, Writes) or not isinstance(there, Lists):
        raise ReadOnlyError(f"nothing can be written or listed through {there.name}", where=there.url)
    definition = _definition(sample_type, field_map)
    plan = _SplitPlan(split, split_parts)
    prepared = _exists(there, INFO_JSON) or _exists(there, INFO_YAML)
    if prepared and not overwrite:
        raise StoreExistsError("it is prepared already", where=there.url, remedy="Pass overwrite=True (--overwrite).")
    if plan.is_empty and not _exists(there, SPLIT_YAML):
        raise ArgumentError(
            "it is not said how to split it", where="split", remedy="Pass split='8,1,1' or split_parts=[...]."
        )
    shards, problems = find_tars(there, exclude=exclude)
    with there.lock(f"{WORK_FOLDER}/lock"):
        _scan(there, shards, num_workers=num_workers, progress=progress)
        facts = _Facts()
        with _built_index(there, facts.through(read_receipt(there, shard) for shard, _ in shards)) as (publish, uuid):
            counts, oddities = facts.counts, facts.problems
            info = parse_info(info_bytes(counts), where=INFO_JSON)
            splits, split_problems = plan.deal(counts)
            if splits is None:
                # Before anything is replaced: it may name shards that are gone.
                kept = there.read(SPLIT_YAML)
                splits = dict(parse_splits(kept, info, where=SPLIT_YAML).parts)
            elif _exists(there, SPLIT_JSON):
                there.delete(SPLIT_JSON)
            # From here on, until .info.json is there again, the folder is no data set.
            there.delete(INFO_JSON)
            there.delete(INFO_YAML)
            publish()
            there.put(INDEX_UUID, uuid.encode())
            if not plan.is_empty:
                there.put(SPLIT_YAML, split_bytes({name: list(found) for name, found in splits.items()}, []))
            if definition is not None:
                there.put(DATASET_YAML, definition)
            elif not _exists(there, DATASET_YAML):
                there.put(DATASET_YAML, definition_bytes(CRUDE, {}))
            there.put(INFO_JSON, info_bytes(counts))
        there.delete(WORK_FOLDER)
    documents = read_documents(there, split_config=None, dataset_config=None)
    return Prepared(
        there.url,
        counts,
        facts.n_parts,
        tuple(facts.part_names),
        splits,
        (*problems, *oddities, *split_problems, *documents.problems),
    )


def find_tars(transport: Lists, *, exclude: str | None = None) -> tuple[list[tuple[str, int]], list[Problem]]:
    """The tars below a folder, as (path, nbytes), in the order of their paths; hidden folders are left out.

    Raises:
        NotFoundError: there is none.
        ArgumentError: `exclude` is no regular expression.
    """
    pattern = _regex(exclude, "exclude") if exclude else None
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
            name = entry.path.rpartition("/")[2]
            if entry.is_dir:
                if not name.startswith("."):
                    folders.append(entry.path)
            elif name.endswith((".tgz", ".tar.gz", ".tar.zst", ".tar.bz2", ".tar.xz")):
                message = "it is compressed, so its parts have no byte ranges: it is left out"
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


def _scan(there: Transport, shards: list[tuple[str, int]], *, num_workers: int | None, progress: bool | None) -> None:
    todo = [item for item in shards if not is_current(there, item[0])]
    total = sum(nbytes for _, nbytes in shards)
    skipped = total - sum(nbytes for _, nbytes in todo)
    with Progress(total, "index", shown=progress, done_nbytes=skipped) as bar:
        errors = scan_all(there, todo, num_workers=num_workers, done=bar.advance)
    if errors:
        problems = [Problem(error.kind, error.message, error.where or "") for error in errors]
        shown = "; ".join(f"{error.where}: {error.message}" for error in errors[:8])
        more = f"; and {len(errors) - 8} more" if len(errors) > 8 else ""
        raise CorruptShardError(
            f"{len(errors)} of {len(shards)} tars cannot be indexed: {shown}{more}",
            where=there.url,
            remedy="Restore them or leave them out with `exclude`, then prepare again: what was read is kept.",
            problems=problems,
        )


class _Facts:
    """What goes by on the way from the receipts to the index."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.n_parts = 0
        self.part_names: dict[str, None] = {}
        self.problems: list[Problem] = []

    def through(self, receipts: Iterable[Receipt]) -> Iterator[Receipt]:
        for receipt in receipts:
            self.counts[receipt.shard] = len(receipt.samples)
            for oddity in receipt.oddities:
                self.problems.append(Problem("odd_tar", oddity, receipt.shard, severity="warning"))
            if not receipt.samples:
                message = "it has no samples: no split has it"
                self.problems.append(Problem("empty_shard", message, receipt.shard, severity="warning"))
            for _, _, _, parts in receipt.samples:
                self.n_parts += len(parts)
                if len(self.part_names) < _MAX_PART_NAMES:
                    self.part_names.update((name, None) for name, _, _ in parts)
            yield receipt


class _SplitPlan:
    """How shards are to be dealt out."""

    def __init__(self, split: str | None, split_parts: Sequence[str]) -> None:
        if split is not None and split_parts:
            raise ArgumentError("shares and patterns cannot both be given", where="split")
        self._shares = parse_ratio(split) if split is not None else None
        if self._shares is not None and len(self._shares) != len(SPLITS):
            raise ArgumentError(
                f"{brief(split)} has {len(self._shares)} shares; train, val and test need 3", where="split"
            )
        self._patterns: dict[str, list[re.Pattern[str]]] = {}
        for item in split_parts:
            name, colon, pattern = item.partition(":")
            if not name or not colon or not pattern:
                raise ArgumentError(f"{brief(item)} is not written 'train:shards/train_.*'", where="split_parts")
            patterns = expand(pattern, where="split_parts") if _RANGE.search(pattern) else [pattern]
            self._patterns.setdefault(name, []).extend(_regex(each, "split_parts") for each in patterns)

    @property
    def is_empty(self) -> bool:
        """Whether a `split.yaml` that is there stays."""
        return self._shares is None and not self._patterns

    def deal(self, counts: Mapping[str, int]) -> tuple[dict[str, tuple[str, ...]] | None, list[Problem]]:
        """The shards of each split; those without samples go to none."""
        shards = [shard for shard, count in counts.items() if count]
        if self._shares is not None:
            runs = deal(len(shards), self._shares)
            return {name: tuple(shards[a:b]) for name, (a, b) in zip(SPLITS, runs, strict=True)}, []
        if not self._patterns:
            return None, []
        found = {
            name: tuple(shard for shard in shards if any(pattern.match(shard) for pattern in patterns))
            for name, patterns in self._patterns.items()
        }
        problems: list[Problem] = []

        def add(kind: str, message: str, where: str) -> None:
            problems.append(Problem(kind, message, where, severity="warning"))

        for shard in shards:
            names = [name for name, those in found.items() if shard in those]
            if len(names) != 1:
                told = f"it is in {' and '.join(names)}" if names else "it is in no split"
                add("split_overlap" if names else "in_no_split", told, shard)
        for name, those in found.items():
            if not those:
                add("empty_split", f"split {name!r} has no shards: no path matches", SPLIT_YAML)
        return found, problems


_RANGE = re.compile(r"\{[^{}]*\.\.[^{}]*\}")


def _definition(sample_type: str | None, field_map: Mapping[str, str] | None) -> bytes | None:
    """`dataset.yaml`, if one is to be written."""
    if sample_type is None:
        if field_map:
            raise ArgumentError("a field map needs a sample type", where="field_map")
        return None
    if sample_type == CRUDE:
        if field_map:
            raise ArgumentError(f"{CRUDE} has parts as they are, and takes no field map", where="field_map")
        return definition_bytes(CRUDE, {})
    if sample_type not in SAMPLE_TYPES:
        raise ArgumentError(f"{brief(sample_type)} is none of {', '.join(SAMPLE_TYPES)}, {CRUDE}", where="sample_type")
    field_map = dict(field_map or {})
    try:
        SAMPLE_TYPES[sample_type].check_fields(field_map, where="field_map")
        for name, path in field_map.items():
            FieldPath.parse(path, where=name)
    except SaevStoreError as error:
        raise ArgumentError(error.message, where="field_map", remedy=error.remedy) from None
    return definition_bytes(sample_type, field_map)


class _Publish(Protocol):
    def __call__(self) -> None: ...


@contextlib.contextmanager
def _built_index(there: Transport, receipts: Iterable[Receipt]) -> Iterator[tuple[_Publish, str]]:
    """A database beside its final place, and what moves it there; where files do not move, one that is uploaded."""
    if isinstance(there, _Local):
        path = f"{WORK_FOLDER}/index.sqlite"
        there.delete(path)
        uuid = build_index(there.resolve(path), receipts, where=there.url)
        yield lambda: there.move(path, INDEX_SQLITE), uuid
        return
    with tempfile.TemporaryDirectory(prefix="saev-store-prepare-") as folder:
        local = os.path.join(folder, "index.sqlite")
        uuid = build_index(local, receipts, where=there.url)

        def upload() -> None:
            with (
                open(local, "rb") as file,
                NewFile(there, INDEX_SQLITE, nbytes=os.path.getsize(local), overwrite=True) as new,
            ):
                while data := file.read(_CHUNK_NBYTES):
                    new.write(data)
                new.commit()

        yield upload, uuid


def _regex(pattern: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ArgumentError(f"{brief(pattern)} is no regular expression: {error}", where=where) from None


def _exists(transport: Transport, path: str) -> bool:
    try:
        return transport.size(path) >= 0
    except NotFoundError:
        return False
