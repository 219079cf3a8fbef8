"""Statistics of an opened store: read from `stats.json`, or computed and kept there.

The file holds the identity of the recording that they were computed from.
"""

from __future__ import annotations

import hashlib
import json
import operator
import warnings
from contextlib import suppress
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from saev_store.core.arguments import check_flag
from saev_store.core.layout import IntArray, Layout
from saev_store.errors import (
    AccessError,
    ArgumentError,
    DocumentError,
    NotFoundError,
    ReadOnlyError,
    SaevStoreError,
    SaevStoreWarning,
    brief,
    outside,
)
from saev_store.stats._compute import compute, plan, work_on
from saev_store.stats._moments import Moments, merge, moments_of
from saev_store.stats._result import Stats
from saev_store.store.identity import RecordingIdentity, recording_identity
from saev_store.store.opening import OpenedStore
from saev_store.transport import Writes
from saev_store.validation import Promised, local_folder, promised_digests

if TYPE_CHECKING:
    import numpy.typing as npt
    from distributed import Client

    from saev_store.documents import Metadata
    from saev_store.store.store import ShardStore

STATS_NAME = "stats.json"


class Sample(NamedTuple):
    """A sample of examples: how many, and the seed that chooses them."""

    n_examples: int
    seed: int


def store_stats(
    store: ShardStore,
    *,
    sample: int | None = None,
    seed: int = 0,
    client: Client | str | None = None,
    refresh: bool = False,
    save: bool = True,
    progress: bool | None = None,
) -> Stats:
    """Statistics of a store for each layer and token position: those kept beside it, or computed now.

    Computed in float64 by threads or by a dask cluster, which hold some tens of MiB each. They are kept beside the store as
    `stats.json`, if that can be written, and read from there the next time.

    Args:
        store: The opened store.
        sample: Read only this number of examples, drawn without repeats; kept statistics of all examples are preferred.
        seed: Seed of the sample.
        client: A `distributed.Client`, or the address of a scheduler whose workers can read the store. Default: the
            active client, if there is one, else threads of this process.
        refresh: Compute again, also if statistics are kept.
        save: Keep the result beside the store.
        progress: Show a bar on stderr; default: when it is a terminal.

    Raises:
        ArgumentError: `store` is no opened store, the sample is not a positive integer, an option is no boolean, or the client is asynchronous.
        CorruptShardError: a shard is missing, short, or differs from its digests.
        MissingDependencyError: `client` is an address, and distributed is not installed.
        TransportError: no scheduler answers.

    Warns:
        SaevStoreWarning: the kept statistics are broken or belong to another store; they are replaced.
    """
    if not isinstance(store, OpenedStore):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
        raise ArgumentError(f"store is {brief(store)}; it must be a ShardStore", where="store")
    refresh, save = check_flag(refresh, name="refresh"), check_flag(save, name="save")
    progress = check_flag(progress, name="progress", other=None)
    wanted = None if sample is None else _sample(store, sample, seed)
    kept = None if refresh else _kept(store, wanted)
    if kept is not None:
        return kept
    store.check_wide()
    recording, digests = _recording(store, wanted)
    moments = compute(store, _chosen(store, wanted), digests=digests, client=client, progress=progress)
    return _result(store, moments, wanted, recording, save=save)


def sampled_stats(store: ShardStore, n_examples: int, *, seed: int = 0) -> Stats:
    """Statistics of at least `n_examples` examples: those kept beside the store, or those of a sample.

    Computed in this thread, so suited to small samples. The result is kept beside the store.
    """
    wanted = _sample(store, n_examples, seed)
    kept = _kept(store, wanted, or_more=True)
    if kept is not None:
        return kept
    store.check_wide()
    recording, digests = _recording(store, wanted)
    unmapped = store.unmapped()
    works = plan(store.layout, _chosen(store, wanted))
    moments = reduce(merge, (work_on(unmapped, (work, digests)) for work in works))
    return _result(store, moments, wanted, recording, save=True)


def kept_stats(store: ShardStore) -> Stats | None:
    """The statistics kept beside the store, of all examples or of a sample; None where there are none that are usable.

    Computes nothing, and reads at most `stats.json`, and what tells whether files were replaced since.
    """
    try:
        kept = _read_kept(store)
    except SaevStoreError:
        return None
    return None if kept is None else kept.stats


def stats_of(layout: Layout, acts: npt.NDArray[np.float32]) -> Stats:
    """Statistics of examples in memory.

    Args:
        layout: The geometry of the store that they are from.
        acts: Their vectors as the store gives them, float32 (example, layer, token, d_model).
    """
    return Stats(layout, moments_of(acts, layout.dtype), len(acts))


def _recording(store: ShardStore, sample: Sample | None) -> tuple[RecordingIdentity, Promised | None]:
    """The identity of the recording, and the digests to compare all bytes with; None if they are not compared."""
    # Comparing costs little where the bytes are local; elsewhere, and for a sample, whole blocks would have to be read for it.
    transport, layout = store.transport, store.layout
    recording = recording_identity(transport, layout, prefer="versions")
    if sample is None and local_folder(transport) is not None:
        by_digests = recording_identity(transport, layout)
        promised = promised_digests(transport, layout, must_read=True)
        # It may have been deleted in between.
        if by_digests.kind == "digests" and promised.files:
            return by_digests, promised
    return recording, None


def _result(
    store: ShardStore, moments: Moments, sample: Sample | None, recording: RecordingIdentity, *, save: bool
) -> Stats:
    stats = Stats(store.layout, moments, store.layout.n_examples if sample is None else sample.n_examples)
    if save and _is_current(store, recording):  # else files were replaced while they were read
        _keep(store, stats, sample, recording)
    return stats


def _is_current(store: ShardStore, recording: RecordingIdentity) -> bool:
    prefer = "digests" if recording.kind == "digests" else "versions"
    return recording == recording_identity(store.transport, store.layout, prefer=prefer)


def _sample(store: ShardStore, sample: int, seed: int) -> Sample | None:
    """The checked arguments; None where the sample is the whole store."""
    try:
        n_examples, seed = operator.index(sample), operator.index(seed)
    except TypeError:
        raise ArgumentError(
            f"sample is {sample!r} and seed is {seed!r}; both must be integers", where="sample, seed"
        ) from None
    if n_examples < 1 or seed < 0:
        raise ArgumentError(
            f"sample is {n_examples} and seed is {seed}; they must be at least 1 and 0", where="sample, seed"
        )
    return None if n_examples >= store.layout.n_examples else Sample(n_examples, seed)


def _chosen(store: ShardStore, sample: Sample | None) -> IntArray | None:
    """The examples of a sample, ascending, so that neighbours share a request; None for all examples."""
    if sample is None:
        return None
    drawn = np.random.default_rng(sample.seed).choice(
        store.layout.n_examples, sample.n_examples, replace=False, shuffle=False
    )
    return np.sort(drawn).astype(np.int64)


def _read_kept(store: ShardStore) -> KeptStats | None:
    """The statistics kept beside the store; None where there are none, older ones, or those of another recording."""
    where = f"{store.url}/{STATS_NAME}"
    try:
        raw = store.transport.read(STATS_NAME, max_bytes=max_nbytes(store.metadata))
    except NotFoundError:
        return None
    if bytes(raw[: len(_OLDER)]) == _OLDER:
        return None
    kept = parse_stats(raw, store.metadata, where=where)
    return kept if _is_current(store, kept.recording) else None


def _kept(store: ShardStore, wanted: Sample | None, *, or_more: bool = False) -> Stats | None:
    """Statistics kept beside the store that answer the request: those of all examples answer for any sample."""
    try:
        kept = _read_kept(store)
    except SaevStoreError as error:
        said = str(error).removesuffix(".")
        warnings.warn(f"{said}. The statistics are computed again", SaevStoreWarning, stacklevel=outside())
        return None
    if kept is None:
        return None
    stats = kept.stats
    if not stats.is_sample or (or_more and wanted is not None and stats.n_examples >= wanted.n_examples):
        return stats
    return stats if wanted == Sample(stats.n_examples, -1 if kept.seed is None else kept.seed) else None


def _keep(store: ShardStore, stats: Stats, sample: Sample | None, recording: RecordingIdentity) -> None:
    """Keep statistics beside the store, if that can be written; a sample never replaces those of all examples."""
    transport = store.transport
    if not isinstance(transport, Writes):
        return
    if sample is not None:
        with suppress(SaevStoreError):
            kept = _read_kept(store)
            if kept is not None and not kept.stats.is_sample:
                return
    seed = None if sample is None else sample.seed
    try:
        transport.put(STATS_NAME, stats_bytes(stats, store.metadata, recording=recording, seed=seed))
    except (AccessError, ReadOnlyError):
        return  # statistics of a read-only store are not kept
    except SaevStoreError as error:
        warnings.warn(
            f"{STATS_NAME} could not be written beside the store: {error}", SaevStoreWarning, stacklevel=outside()
        )


# -- stats.json --------------------------------------------------------------------------------------------------------


def _rectangular(rows: list[list[object]]) -> list[list[object]]:
    if len({len(row) for row in rows}) > 1:
        raise ValueError("the rows have different lengths")
    return rows


_Count = Annotated[int, Field(ge=0, lt=2**63)]
Counts = Annotated[list[list[_Count]], AfterValidator(_rectangular)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Numbers = Annotated[list[list[Finite | None]], AfterValidator(_rectangular)]


class StatsDocument(BaseModel):
    """Content of the file: one row per layer, one entry per token; null where a statistic is undefined."""

    model_config = ConfigDict(strict=True, extra="forbid")

    version: Literal[2]
    metadata_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    recording: Annotated[str, Field(max_length=100)]
    n_examples: Annotated[int, Field(ge=1, lt=2**63)]
    seed: int | None
    n_values: Counts
    n_finite: Counts
    mean: Numbers
    m2: Numbers
    low: Numbers
    high: Numbers
    n_zeros: Counts
    n_saturated: Counts
    n_subnormal: Counts
    n_vectors: Counts
    mean_norm: Numbers


class KeptStats(NamedTuple):
    """Parsed content of the file.

    Attributes:
        stats: The statistics.
        recording: Identity of the recording that they were computed from.
        seed: Seed of the sample; None for statistics of all examples.
    """

    stats: Stats
    recording: RecordingIdentity
    seed: int | None


_COUNTS = ("n_values", "n_finite", "n_zeros", "n_saturated", "n_subnormal", "n_vectors")
#: Values that replace null while sums are merged.
_NONE = {"mean": 0.0, "m2": 0.0, "mean_norm": 0.0, "low": np.inf, "high": -np.inf}
_ENTRY_BYTES = 320
#: How a file begins that does not count saturated and subnormal numbers.
_OLDER = b'{"version":1,'


def max_nbytes(metadata: Metadata) -> int:
    """Upper bound on the length of the file for a store."""
    layout = metadata.layout
    return 4096 + _ENTRY_BYTES * layout.n_layers * layout.tokens_per_example


def stats_bytes(stats: Stats, metadata: Metadata, *, recording: RecordingIdentity, seed: int | None) -> bytes:
    """Content of the file; floats are written so that they read back exactly."""
    moments = stats.moments
    columns: dict[str, list[list[object]]] = {name: getattr(moments, name).tolist() for name in _COUNTS}
    for name in _NONE:
        has = moments.n_vectors > 0 if name == "mean_norm" else moments.n_finite > 0
        values = getattr(moments, name).tolist()
        columns[name] = [
            [value if there else None for value, there in zip(*rows, strict=True)]
            for rows in zip(values, has.tolist(), strict=True)
        ]
    document = {
        "version": 2,
        "metadata_sha256": _sha256(metadata),
        "recording": str(recording),
        "n_examples": stats.n_examples,
        "seed": seed,
        **columns,
    }
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()


def parse_stats(raw: bytes, metadata: Metadata, *, where: str) -> KeptStats:
    """Parse and check the content of the file.

    Raises:
        DocumentError: the file breaks a rule, or belongs to another store.
    """
    try:
        found = StatsDocument.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise DocumentError(f"{place or 'it'}: {first['msg']}", where=where) from error
    layout = metadata.layout
    if found.metadata_sha256 != _sha256(metadata):
        raise DocumentError("it was computed for a store with another metadata.json", where=where)
    recording = RecordingIdentity.parse(found.recording)
    if recording is None:
        raise DocumentError(f"recording: {found.recording!r} is not a recording identity", where=where)
    shape = (layout.n_layers, layout.tokens_per_example)
    counts = {name: np.array(getattr(found, name), dtype=np.int64) for name in _COUNTS}
    numbers = {
        name: np.array([[none if v is None else v for v in row] for row in getattr(found, name)], dtype=np.float64)
        for name, none in _NONE.items()
    }
    wrong = [name for name, values in [*counts.items(), *numbers.items()] if values.shape != shape]
    if wrong:
        raise DocumentError(f"{', '.join(wrong)}: not of shape {shape}, (layer, token)", where=where)
    moments = Moments(**counts, **numbers)  # pyright: ignore[reportArgumentType]  # each array has the type of its field
    is_whole = found.n_examples <= layout.n_examples and bool(
        (moments.n_values == found.n_examples * layout.d_model).all()
        and (moments.n_finite <= moments.n_values).all()
        and all(
            (some <= moments.n_finite).all() for some in (moments.n_zeros, moments.n_saturated, moments.n_subnormal)
        )
        and (moments.n_vectors <= found.n_examples).all()
    )
    if not is_whole:
        raise DocumentError("its counts do not match this store", where=where)
    return KeptStats(Stats(layout, moments, found.n_examples), recording, found.seed)


def _sha256(metadata: Metadata) -> str:
    return hashlib.sha256(metadata.raw).hexdigest()
