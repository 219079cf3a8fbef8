"""Open a store: read its two documents and compare local files with them. What is then known is an `OpenedStore`."""

# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from saev_store.core.arguments import check_flag
from saev_store.core.dtypes import numpy_dtype
from saev_store.core.layout import DIMS, Layout
from saev_store.core.rows import Labels
from saev_store.core.token_arrays import LABELS
from saev_store.documents import (
    METADATA_MAX_NBYTES,
    SHARDS_MAX_NBYTES,
    Metadata,
    ShardsIndex,
    new_metadata,
    parse_metadata,
    parse_shards,
)
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    IncompleteStoreError,
    MissingShardError,
    NotFoundError,
    SaevStoreError,
    SaevStoreWarning,
    outside,
)
from saev_store.names import CLAIM_PATH, LABELS_NAME, METADATA_NAME, SHARDS_NAME, WORK_FOLDER, folder_name
from saev_store.problems import Problem
from saev_store.store.card import card_html, card_rows, card_text
from saev_store.store.identity import recorded_files, recording_identity
from saev_store.store.token_arrays import TokenArrays
from saev_store.transport import Engine, LocalTransport, Transport, open_transport

if TYPE_CHECKING:
    from distributed import Client

    from saev_store.validation import Report
    from saev_store.writer import RepairWriter

_SHOWN = 8


@dataclass(frozen=True)
class Opened:
    """The parts of an opened store; picklable, as its transport is.

    Attributes:
        transport: Rooted at the store's folder.
        name: The folder's own name.
        metadata: Content of `metadata.json`.
        index: Content of `shards.json`.
        problems: Problems that were found.
        sizes_checked: Whether files were compared with the documents already (local stores).
        has_labels: Whether `labels.bin` is there; None where that is not known yet.
        readable: For damaged shards, how many leading examples can be read.
        damaged_ok: Read what is not lost, also where damage is found later.
    """

    transport: Transport
    name: str
    metadata: Metadata
    index: ShardsIndex
    problems: tuple[Problem, ...]
    sizes_checked: bool = False
    has_labels: bool | None = None
    readable: dict[int, int] = field(default_factory=dict[int, int])
    damaged_ok: bool = False


class OpenedStore:
    """The documents, geometry, problems and labels of an opened store; the base of `ShardStore`.

    Attributes:
        layout: The geometry: sizes, shards, and the place of each vector.
        metadata: The document, under canonical names whatever version wrote it; `metadata.raw` has its exact bytes.
        transport: Reads the bytes; `store.transport.name` is the engine.
        index: Content of `shards.json`.
        readable_examples: For shards that were damaged when the store was opened: how many leading examples can be read.
        problems: Problems found when the store was opened; `validate()` checks more.
        url: Where the store is, without credentials.
        name: The store's folder, normally its content hash.
        shape: (n_examples, n_layers, tokens_per_example, d_model).
        dims: Names of the axes.
        ndim: 4.
        dtype: What the shards hold: float32, bfloat16 (that of `ml_dtypes`) or float16.
        nbytes: Bytes of the tensor, padding excluded.
        layers: Labels of the recorded layers; the position of a label is its index on the layer axis.
        token_arrays: What was recorded for each content token, by name: labels, token ids, masks.
    """

    dims = DIMS
    ndim = 4

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self.transport, self.name, self.url = opened.transport, opened.name, opened.transport.url
        self.metadata, self.index, self.problems = opened.metadata, opened.index, opened.problems
        self.readable_examples: Mapping[int, int] = opened.readable
        self.layout = opened.metadata.layout
        self.dtype = numpy_dtype(self.layout.dtype)
        self.shape, self.nbytes, self.layers = self.layout.shape, self.layout.nbytes, self.layout.layers
        self.token_arrays = TokenArrays(opened.transport, opened.metadata, opened.has_labels)

    @property
    def has_labels(self) -> bool:
        """True if labels were recorded; at most the size of `labels.bin` is requested.

        Raises:
            DocumentError: it has another size than the documents imply.
        """
        return LABELS.name in self.token_arrays

    @property
    def labels(self) -> Labels | None:
        """Labels of the content tokens, uint8 (n_examples, content tokens), read-only; None where none were recorded.

        The same as `token_arrays["labels"]`.

        Raises:
            DocumentError: `labels.bin` has another size than the documents imply.
            CorruptShardError: the mapped file was cut since.
        """
        return cast("Labels", self.token_arrays[LABELS.name]) if self.has_labels else None

    def validate(
        self, *, deep: bool = False, client: Client | str | None = None, progress: bool | None = None
    ) -> Report:
        """Problems of the store and the examples that they cost; see `saev_store.validation.Report`.

        Args:
            deep: Read the bytes of all examples: digests, all-zero rows. Otherwise names and sizes only.
            client: With `deep`, a `distributed.Client` or the address of a scheduler: its workers read the shards, at the
                same address, and find what one process finds.
            progress: Show a bar on stderr; default: when it is a terminal.
        """
        from saev_store.validation import validate

        # The files that are there now, also where they are not those that were opened.
        transport = self.transport.at("") if isinstance(self.transport, LocalTransport) else self.transport
        found = validate(
            transport, self.metadata, self.index, dirname=self.name, deep=deep, client=client, progress=progress
        )
        return replace(found, recording=self._recording()) if found.lost else found

    def _recording(self) -> str:
        """Which files are there now, damaged ones included."""
        return recording_identity(self.transport, self.layout, prefer="versions")

    def recorded_files(self) -> list[str]:
        """Names of the shards and token arrays, damaged ones included."""
        metadata = self.metadata
        declared = metadata.token_arrays if metadata.declares_token_arrays else None
        return recorded_files(self.transport, self.layout, declared)

    def repair(
        self, report: Report | None = None, *, on_nonfinite: Literal["raise", "warn", "allow"] = "raise"
    ) -> RepairWriter:
        """A writer of exactly the examples that are lost, which puts them where they were.

        Args:
            report: What `validate` found in these files; default: a quick look at names and sizes.
            on_nonfinite: What to do with NaN and infinity, as in `ShardStore.create`.

        Raises:
            ArgumentError: `report` is of another store, or of files that were replaced since.
            CorruptShardError: another store is there now.
        """
        from saev_store.validation import Report
        from saev_store.writer import open_repair

        if self.transport.read(METADATA_NAME, max_bytes=METADATA_MAX_NBYTES) != self.metadata.raw:
            raise CorruptShardError(
                "another store has taken the place of the one that was opened; it would get vectors that are not its own",
                where=self.url,
                remedy="Open the one that is there, and repair that.",
            )
        found = self.validate() if report is None else report
        is_known = isinstance(found, Report) and (found.url, found.recording) == (self.url, self._recording())
        if not is_known and (not isinstance(found, Report) or found.lost):
            raise ArgumentError(
                "the report is of another store, or of files that were replaced since: examples that are not lost would be "
                "overwritten",
                where="report",
                remedy="Pass what this store's validate() gives now.",
            )
        return open_repair(self.transport, self.metadata, lost=found.lost, on_nonfinite=on_nonfinite)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OpenedStore):
            return NotImplemented
        return self.url == other.url and self.metadata.raw == other.metadata.raw

    def __hash__(self) -> int:
        return hash((self.url, self.metadata.raw))

    def _card(self) -> list[tuple[str, str]]:
        return card_rows(self.metadata, self.transport, self.problems, token_arrays=self.token_arrays)

    def __repr__(self) -> str:
        return card_text(self.name, self._card())

    def _repr_html_(self) -> str:
        return card_html(self.name, self._card())


def open_store(
    url: str | os.PathLike[str] | Transport,
    storage_options: Mapping[str, object] | None = None,
    *,
    engine: Engine = "auto",
    damaged_ok: bool = False,
) -> Opened:
    """Open the documents of a store, and compare local files with them; see `ShardStore.open` for arguments and errors.

    Warns:
        SaevStoreWarning: the folder has another name than its content implies.
    """
    from saev_store.validation import check_dirname, check_survey, survey_store

    damaged_ok = check_flag(damaged_ok, name="damaged_ok")
    transport = url if isinstance(url, Transport) else open_transport(url, storage_options, engine=engine)
    if isinstance(transport, LocalTransport) and transport.expects:
        transport = transport.at("")  # it reads for another store
    url, name = transport.url, folder_name(transport.url)
    try:
        raw = transport.read(METADATA_NAME, max_bytes=METADATA_MAX_NBYTES)
    except NotFoundError as error:
        raise _no_store_here(transport) from error
    metadata = parse_metadata(raw, where=f"{url}/{METADATA_NAME}")
    try:
        listed = transport.read(SHARDS_NAME, max_bytes=SHARDS_MAX_NBYTES)
    except NotFoundError as error:
        raise IncompleteStoreError(
            "there is a metadata.json but no shards.json: the program that wrote it stopped before its first shard was "
            "full, or the file was purged",
            where=url,
            remedy="Record it again; without shards.json it is not known which examples were written.",
        ) from error
    index = parse_shards(listed, metadata, where=f"{url}/{SHARDS_NAME}")
    has_labels = None
    if transport.is_local:
        seen = survey_store(transport, metadata, index)
        problems = check_survey(seen, metadata, index, dirname=name)
        has_labels = LABELS_NAME in seen.files
        if isinstance(transport, LocalTransport):  # from now on only these files are read
            transport.expect(seen.files)
    else:
        problems = [*metadata.problems, *check_dirname(metadata, name)]
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors and not damaged_ok:
        raise _refusal(url, errors, {array.file_name for array in metadata.recordable})
    for problem in problems:
        if problem.kind == "hash_mismatch":
            warnings.warn(f"{url}: {problem.message}", SaevStoreWarning, stacklevel=outside())
    return Opened(
        transport, name, metadata, index, tuple(problems),
        sizes_checked=transport.is_local,
        # Of a damaged store labels.bin may have a wrong size: that is found out when it is needed.
        has_labels=None if errors else has_labels,
        readable=_readable(metadata.layout, errors) if errors else {},
        damaged_ok=damaged_ok,
    )  # fmt: skip


def as_metadata(metadata: object) -> Metadata:
    """The metadata of a new store, from a document or from a mapping of arguments.

    Raises:
        ArgumentError: it is neither a document nor a mapping of the arguments of `new_metadata`.
    """
    if isinstance(metadata, Metadata):
        return metadata
    if not isinstance(metadata, Mapping):
        raise ArgumentError(
            f"is of type {type(metadata).__name__}; it must come from saev_store.new_metadata(...) or be a mapping of its "
            "arguments",
            where="metadata",
        )
    try:
        return new_metadata(**cast("dict[str, Any]", metadata))
    except TypeError as error:  # a name that new_metadata does not know, or one that it needs
        raise ArgumentError(str(error).replace("new_metadata()", "it"), where="metadata") from error


def _refusal(url: str, errors: Sequence[Problem], token_files: set[str]) -> SaevStoreError:
    shown = "; ".join(str(problem) for problem in errors[:_SHOWN])
    more = f"; and {len(errors) - _SHOWN} more" if len(errors) > _SHOWN else ""
    if token_files.issuperset(problem.where for problem in errors):
        return DocumentError(
            f"{shown}{more}",
            where=url,
            remedy="Open with damaged_ok=True to read the vectors, and to write token arrays anew.",
            problems=errors,
        )
    gone = any(problem.kind == "missing_shard" for problem in errors)
    return (MissingShardError if gone else CorruptShardError)(
        f"{shown}{more}",
        where=url,
        remedy="store.repair() records what is lost again. Open with damaged_ok=True to read the rest.",
    )


def _readable(layout: Layout, errors: Sequence[Problem]) -> dict[int, int]:
    """Leading examples that can still be read, for each shard that lost some."""
    readable: dict[int, int] = {}
    for problem in errors:
        for start, end in problem.lost:
            for shard_idx in range(start // layout.examples_per_shard, -(-end // layout.examples_per_shard)):
                first, _ = layout.example_range(shard_idx)
                readable[shard_idx] = min(readable.get(shard_idx, layout.examples_per_shard), max(start - first, 0))
    return readable


def exists(transport: Transport, path: str) -> bool:
    """Return True if there is a file of that name."""
    try:
        transport.size(path)
    except NotFoundError:
        return False
    return True


def _has_work_folder(path: str | None) -> bool:
    """Return True if a store of this machine was begun, even if no shard of it is durable."""
    return path is not None and os.path.exists(os.path.join(os.path.dirname(path), WORK_FOLDER, os.path.basename(path)))


def _no_store_here(transport: Transport) -> SaevStoreError:
    """The reason why there is no metadata.json: an unfinished store, a root of stores, or no store at all."""
    names: list[str] = []
    with contextlib.suppress(SaevStoreError):  # a transport that cannot list
        names = [entry.name for entry in transport.list()]
    if WORK_FOLDER in names and exists(transport, CLAIM_PATH):
        return IncompleteStoreError(
            "this store was begun by an older version of this package, and never published; its format is not continued",
            where=transport.url,
            remedy="Finish it with that version, or throw it away: `saev-store clean`.",
        )
    if _has_work_folder(transport.local_path) or any(re.fullmatch(r"acts\d{6,}\.bin", name) for name in names):
        return IncompleteStoreError(
            "this store was never published: its writer is still running, or crashed",
            where=transport.url,
            remedy="What wrote it continues it when it is run again. From Python: ShardStore.create(root, the same metadata, "
            "resume=True).",
        )
    from saev_store.store.listing import list_stores

    found: list[str] = []
    with contextlib.suppress(SaevStoreError):  # a transport that cannot list
        found = [entry.name for entry in list_stores(transport)]
    if found:
        shown = ", ".join(found[:_SHOWN]) + (f", … {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
        return NotFoundError(
            f"this is not a store but a folder that holds {len(found)}: {shown}",
            where=transport.url,
            remedy="Name one of them; ShardStore.list(root) describes them.",
        )
    path = transport.local_path
    return NotFoundError(
        "there is no such folder"
        if path is not None and not os.path.exists(path)
        else "there is no metadata.json, so this is not a store",
        where=transport.url,
        remedy="A store is a folder <root>/<HASH> with metadata.json, shards.json and acts000000.bin.",
    )
