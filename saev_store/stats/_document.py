"""`stats.json`: statistics kept beside a store, with the identity of the recording that they were computed from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from saev_store.errors import DocumentError
from saev_store.stats._moments import Moments
from saev_store.stats._result import Stats
from saev_store.store.identity import RecordingIdentity

if TYPE_CHECKING:
    from saev_store.documents import Metadata


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

    version: Literal[1] = 1
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
    n_vectors: Counts
    mean_norm: Numbers


@dataclass(frozen=True)
class KeptStats:
    """Parsed content of the file.

    Attributes:
        stats: The statistics.
        recording: Identity of the recording that they were computed from.
        seed: Seed of the sample; None for statistics of all examples.
    """

    stats: Stats
    recording: RecordingIdentity
    seed: int | None


_COUNTS = ("n_values", "n_finite", "n_zeros", "n_vectors")
#: Values that replace null while sums are merged.
_NONE = {"mean": 0.0, "m2": 0.0, "mean_norm": 0.0, "low": np.inf, "high": -np.inf}
_ENTRY_BYTES = 256


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
        "version": 1,
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
        and (moments.n_zeros <= moments.n_finite).all()
        and (moments.n_vectors <= found.n_examples).all()
    )
    if not is_whole:
        raise DocumentError("its counts do not match this store", where=where)
    return KeptStats(Stats(layout, moments, found.n_examples), recording, found.seed)


def _sha256(metadata: Metadata) -> str:
    return hashlib.sha256(metadata.raw).hexdigest()
