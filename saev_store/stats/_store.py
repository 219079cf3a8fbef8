"""Statistics of an opened store: read from `stats.json`, or computed and kept there.

The file holds the identity of the recording that they were computed from.
"""

from __future__ import annotations

import hashlib
import json
import operator
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from saev_store.core.arguments import check_flag
from saev_store.core.layout import IntArray, Layout
from saev_store.documents import parse_json
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
from saev_store.stats._compute import compute
from saev_store.stats._moments import Moments, moments_of
from saev_store.stats._result import Stats
from saev_store.store.identity import RecordingIdentity, recording_identity
from saev_store.store.opening import OpenedStore
from saev_store.store.token_arrays import MASK
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
        client: A `distributed.Client`, or the address of a scheduler whose workers can read the store. Default:
            threads of this process.
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
    return kept or _computed(store, wanted, client=client, save=save, progress=progress)


def sampled_stats(store: ShardStore, n_examples: int, *, seed: int = 0) -> Stats:
    """Statistics of at least `n_examples` examples: those kept beside the store, or those of a sample, which are then kept."""
    wanted = _sample(store, n_examples, seed)
    kept = _kept(store, wanted, or_more=True)
    return kept or _computed(store, wanted, client=None, save=True, progress=False)


def _computed(
    store: ShardStore, sample: Sample | None, *, client: Client | str | None, save: bool, progress: bool | None
) -> Stats:
    store.check_wide()
    recording, digests = _recording(store, sample)
    moments = compute(store, _chosen(store, sample), digests=digests, client=client, progress=progress)
    stats = Stats(store.layout, moments, store.layout.n_examples if sample is None else sample.n_examples)
    if save and _is_current(store, recording):  # else files were replaced while they were read
        _keep(store, stats, sample, recording)
    return stats


def kept_stats(store: ShardStore) -> Stats | None:
    """The statistics kept beside the store, of all examples or of a sample; None where there are none that are usable.

    Computes nothing, and reads at most `stats.json`, and what tells whether files were replaced since.
    """
    try:
        kept = _read_kept(store)
    except SaevStoreError:
        return None
    return None if kept is None else kept.stats


def stats_of(layout: Layout, acts: npt.NDArray[np.float32], kept: npt.NDArray[np.bool_] | None = None) -> Stats:
    """Statistics of examples in memory.

    Args:
        layout: The geometry of the store that they are from.
        acts: Their vectors as the store gives them, float32 (example, layer, token, d_model).
        kept: Which tokens count, as `kept_vectors` gives them; None for all.
    """
    return Stats(layout, moments_of(acts, layout.dtype, kept), len(acts))


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
    kept = parse_stats(bytes(raw), store.metadata, where=where)
    return kept if kept is not None and _is_current(store, kept.recording) else None


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
_VERSION = 3


def max_nbytes(metadata: Metadata) -> int:
    """Upper bound on the length of the file for a store."""
    layout = metadata.layout
    return 4096 + _ENTRY_BYTES * layout.n_layers * layout.tokens_per_example


def stats_bytes(stats: Stats, metadata: Metadata, *, recording: RecordingIdentity, seed: int | None) -> bytes:
    """Content of the file: one row per layer, one entry per token; null where a statistic is undefined.

    Floats are written so that they read back exactly.
    """
    moments = stats.moments
    columns: dict[str, list[list[object]]] = {name: getattr(moments, name).tolist() for name in _COUNTS}
    for name in _NONE:
        has = moments.n_vectors > 0 if name == "mean_norm" else moments.n_finite > 0
        rows = zip(getattr(moments, name).tolist(), has.tolist(), strict=True)
        columns[name] = [[value if there else None for value, there in zip(*row, strict=True)] for row in rows]
    document = {
        "version": _VERSION,
        "metadata_sha256": hashlib.sha256(metadata.raw).hexdigest(),
        "recording": str(recording),
        "n_examples": stats.n_examples,
        "seed": seed,
        **columns,
    }
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()


def parse_stats(raw: bytes, metadata: Metadata, *, where: str) -> KeptStats | None:
    """Parse and check the content of the file; None for an older one, which counts other numbers.

    Raises:
        DocumentError: the file breaks a rule, or belongs to another store.
    """
    layout = metadata.layout
    contents = parse_json(raw, where=where, max_nbytes=max_nbytes(metadata))
    found = cast("dict[str, Any]", contents) if isinstance(contents, dict) else dict[str, Any]()
    # Version 2 counts tokens that the mask leaves out, so it is right where there is no mask.
    if found.get("version") == 1 or (found.get("version") == 2 and MASK in {a.name for a in metadata.token_arrays}):
        return None
    if found.get("version") not in {2, _VERSION}:
        raise DocumentError("it has no version that is known", where=where)
    if found.get("metadata_sha256") != hashlib.sha256(metadata.raw).hexdigest():
        raise DocumentError("it was computed for a store with another metadata.json", where=where)
    try:
        counts = {name: np.array(found[name]) for name in _COUNTS}
        numbers = {name: np.array(found[name], dtype=np.float64) for name in _NONE}
        recording, n_examples, seed = RecordingIdentity.parse(found["recording"]), found["n_examples"], found["seed"]
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise DocumentError(
            f"it lacks an entry, or has one of another type: {brief(str(error))}", where=where
        ) from error
    shape = (layout.n_layers, layout.tokens_per_example)
    are_numbers = isinstance(n_examples, int) and (seed is None or isinstance(seed, int)) and recording is not None
    if not are_numbers or not all(values.dtype == np.int64 and values.shape == shape for values in counts.values()):
        raise DocumentError(f"its counts must be integers of shape {shape}, (layer, token)", where=where)
    if not all(values.shape == shape for values in numbers.values()):
        raise DocumentError(f"its numbers must be of shape {shape}, (layer, token)", where=where)
    filled = {name: np.where(np.isnan(values), _NONE[name], values) for name, values in numbers.items()}
    moments = Moments(**counts, **filled)
    parts = (moments.n_zeros, moments.n_saturated, moments.n_subnormal)
    bounds = [(moments.n_finite, moments.n_values), *((part, moments.n_finite) for part in parts)]
    bounds += [(moments.n_values, n_examples * layout.d_model), (moments.n_vectors, n_examples)]
    if not 1 <= n_examples <= layout.n_examples or any(((part < 0) | (part > whole)).any() for part, whole in bounds):
        raise DocumentError("its counts do not match this store", where=where)
    return KeptStats(Stats(layout, moments, n_examples), cast("RecordingIdentity", recording), seed)
