"""Open a store: read its two documents and compare local files with them. What is then known is an `OpenedStore`."""

from __future__ import annotations

import contextlib
import html
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple, Self, cast

import numpy as np
import numpy.typing as npt

from saev_store.core.dtypes import numpy_dtype
from saev_store.core.layout import DIMS, Layout, shard_name
from saev_store.core.token_arrays import LABELS
from saev_store.documents import (
    METADATA_MAX_NBYTES,
    SHARDS_MAX_NBYTES,
    Metadata,
    ShardsIndex,
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
from saev_store.store.card import card_rows, card_text
from saev_store.store.identity import exists, recording_identity
from saev_store.store.reader import Reader
from saev_store.store.token_arrays import TokenArrays
from saev_store.transport import LocalTransport, Transport

if TYPE_CHECKING:
    from distributed import Client

    from saev_store.validation import Report
    from saev_store.writer import RepairWriter

_SHOWN = 8


class Opened(NamedTuple):
    """The parts of an opened store, which are pickled. `has_labels` is None if that is not known yet."""

    transport: Transport
    metadata: Metadata
    shards: ShardsIndex
    problems: tuple[Problem, ...]
    has_labels: bool | None
    damaged_ok: bool


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
        self.transport, self.metadata, self.index, self.problems, has_labels, damaged_ok = opened
        self.url, self.layout = self.transport.url, self.metadata.layout
        self.name = folder_name(self.url)
        self.readable_examples: Mapping[int, int] = _readable(self.layout, self.problems)
        self.dtype = numpy_dtype(self.layout.dtype)
        self.shape, self.nbytes, self.layers = self.layout.shape, self.layout.nbytes, self.layout.layers
        self.token_arrays = TokenArrays(self.transport, self.metadata, has_labels)
        self._reader = Reader(
            self.transport, self.layout, readable=self.readable_examples, check_sizes=not self.transport.is_local,
            damaged_ok=damaged_ok,
        )  # fmt: skip

    @property
    def has_labels(self) -> bool:
        """True if labels were recorded; `DocumentError` if `labels.bin` has another size than the documents imply."""
        return LABELS.name in self.token_arrays

    @property
    def labels(self) -> npt.NDArray[np.uint8] | None:
        """`token_arrays["labels"]`, uint8 (n_examples, content tokens), read-only; None where none were recorded."""
        return cast("npt.NDArray[np.uint8]", self.token_arrays[LABELS.name]) if self.has_labels else None

    def check_wide(self) -> None:
        """Look at a shard if the documents promise very many vectors in an example, before memory is taken for them."""
        self._reader.check_large()

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
        names = [shard_name(idx) for idx in range(self.layout.n_shards)]
        if self.metadata.declares_token_arrays:
            return [*names, *(array.file_name for array in self.metadata.token_arrays)]
        return [*names, LABELS_NAME] if exists(self.transport, LABELS_NAME) else names

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
                "another store has taken the place of the one that was opened",
                where=self.url,
                remedy="Open the one that is there, and repair that.",
            )
        found = self.validate() if report is None else report
        if not isinstance(found, Report) or (  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
            found.lost and (found.url, found.recording) != (self.url, self._recording())
        ):
            raise ArgumentError(
                "the report is of another store, or of files that were replaced since",
                where="report",
                remedy="Pass what this store's validate() gives now.",
            )
        return open_repair(self.transport, self.metadata, lost=found.lost, on_nonfinite=on_nonfinite)

    def __reduce__(self) -> tuple[type[Self], tuple[Opened]]:
        return type(self), (self._opened,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpenedStore) and (self.url, self.metadata.raw) == (other.url, other.metadata.raw)

    def __hash__(self) -> int:
        return hash((self.url, self.metadata.raw))

    def __repr__(self) -> str:
        rows = card_rows(self.metadata, self.transport, self.problems, token_arrays=self.token_arrays)
        return card_text(self.name, rows)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


def open_store(transport: Transport, *, damaged_ok: bool) -> Opened:
    """Open the documents of a store, and compare local files with them; see `ShardStore.open`."""
    from saev_store.validation import check_dirname, check_survey, survey_store

    if isinstance(transport, LocalTransport):
        transport = transport.at("")  # that one may read for another store
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
            "there is a metadata.json but no shards.json: its program stopped early, or the file was purged",
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
    # Of a damaged store labels.bin may have a wrong size: that is found out when it is needed.
    return Opened(transport, metadata, index, tuple(problems), None if errors else has_labels, damaged_ok)


def _refusal(url: str, errors: Sequence[Problem], token_files: set[str]) -> SaevStoreError:
    text = "; ".join(map(str, errors[:_SHOWN])) + ("; …" if len(errors) > _SHOWN else "")
    if token_files.issuperset(problem.where for problem in errors):
        remedy = "Open with damaged_ok=True to read the vectors, and to write token arrays again."
        return DocumentError(text, where=url, remedy=remedy, problems=errors)
    gone = any(problem.kind == "missing_shard" for problem in errors)
    remedy = "store.repair() records what is lost again. Open with damaged_ok=True to read the rest."
    return (MissingShardError if gone else CorruptShardError)(text, where=url, remedy=remedy)


def _readable(layout: Layout, problems: Sequence[Problem]) -> dict[int, int]:
    """Leading examples that can still be read, for each shard that lost some."""
    readable: dict[int, int] = {}
    capacity = layout.examples_per_shard
    for start, end in (lost for problem in problems if problem.severity == "error" for lost in problem.lost):
        for shard_idx in range(start // capacity, -(-end // capacity)):
            readable[shard_idx] = min(readable.get(shard_idx, capacity), max(start - shard_idx * capacity, 0))
    return readable


def _no_store_here(transport: Transport) -> SaevStoreError:
    """The reason why there is no metadata.json: an unfinished store, or no store at all."""
    names: list[str] = []
    with contextlib.suppress(SaevStoreError):  # a transport that cannot list
        names = [entry.name for entry in transport.list()]
    folder, name = os.path.split(transport.local_path or "")
    is_begun = folder and os.path.exists(os.path.join(folder, WORK_FOLDER, name))  # even if no shard is durable
    if is_begun or exists(transport, CLAIM_PATH) or any(re.fullmatch(r"acts\d{6,}\.bin", name) for name in names):
        return IncompleteStoreError(
            "this store was never published: its writer is still running, or crashed",
            where=transport.url,
            remedy="Run its writer again: ShardStore.create(root, the same metadata, resume=True). What an older version of this package "
            "began (a folder .saev_store in it) only that version finishes; `saev-store clean` throws it away.",
        )
    return NotFoundError(
        "there is no metadata.json, so this is not a store",
        where=transport.url,
        remedy="A store is a folder <root>/<HASH>; ShardStore.list(root) describes those of a root.",
    )
