"""`estimate_recording`: what a recording will take, from a run of the model over a few examples. Nothing is written."""

from __future__ import annotations

import shutil
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from saev_store.record._fill import computed
from saev_store.record._part import missing_examples
from saev_store.record._record import plan
from saev_store.store.card import human_bytes
from saev_store.transport import open_transport
from saev_store.writer.create import check_part
from saev_store.writer.work import Work

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence
    from typing import Unpack

    import torch

    from saev_store.record._adapters import Adapter
    from saev_store.record._examples import ExampleSource
    from saev_store.record._part import Part
    from saev_store.record._record import PlanOptions

#: Examples that the model runs at least, if there are so many.
_N_MEASURED = 32


@dataclass(frozen=True, slots=True)
class RecordingEstimate:
    """Costs of a recording; `str()` is a few lines.

    Attributes:
        name: The store's folder below the root.
        n_examples: Examples of the store.
        n_shards: Its shards.
        nbytes: Bytes of its vectors and declared token arrays.
        n_left: Examples that are not there of what was asked for; what is there of a recording is kept.
        needed_nbytes: Bytes of the examples that are left.
        seconds: Seconds of the model and the source for them; the disk or the network may be slower still.
        free_nbytes: Free bytes of the disk; None for a bucket.
    """

    name: str
    n_examples: int
    n_shards: int
    nbytes: int
    n_left: int
    needed_nbytes: int
    seconds: float
    free_nbytes: int | None

    @property
    def fits(self) -> bool | None:
        """True if the disk has room for what is left; None for a bucket."""
        return None if self.free_nbytes is None else self.needed_nbytes <= self.free_nbytes

    def to_dict(self) -> dict[str, object]:
        """The attributes and `fits`, as plain JSON types."""
        return {**asdict(self), "fits": self.fits}

    def __str__(self) -> str:
        lines = [
            f"store      {self.name}",
            f"size       {self.n_examples:,} examples, {human_bytes(self.nbytes)} in {self.n_shards:,} shards",
            f"left       {self.n_left:,} examples to record, {human_bytes(self.needed_nbytes)}",
            f"time       {timedelta(seconds=round(self.seconds))}",
        ]
        if self.free_nbytes is not None:
            lines.append(
                f"disk       {human_bytes(self.free_nbytes)} free: it {'fits' if self.fits else 'DOES NOT FIT'}"
            )
        return "\n".join(lines)


def estimate_recording(
    model: torch.nn.Module | Adapter,
    source: ExampleSource,
    root: str | os.PathLike[str],
    *,
    layers: Sequence[int],
    storage_options: Mapping[str, object] | None = None,
    part: Part | None = None,
    **options: Unpack[PlanOptions],
) -> RecordingEstimate:
    """Predict what `record` with these arguments will take. The model runs over the first 32 examples; nothing is written.

    Arguments and errors are those of `record`; `options` are `hook_points`, `dtype`, `max_tokens_per_shard`, `dataset`, `family`,
    `ckpt`, `protocol` and `device`.
    """
    of_ranks = None if part is None else check_part(part)
    recorder, metadata = plan(model, source, layers, **options)
    transport = open_transport(root, storage_options)
    layout = metadata.layout
    nbytes = layout.nbytes + sum(array.nbytes(layout) for array in metadata.token_arrays)
    n_left = sum(end - first for first, end in missing_examples(Work(transport, metadata), of_ranks))
    times = [(0, time.perf_counter())]  # examples that are there, and when
    with recorder, closing(computed(recorder, source.batches(0, layout.n_examples))) as batches:
        for recorded in source.assemble(batches, 0):
            times.append((recorded.first + len(recorded.acts), time.perf_counter()))
            if times[-1][0] >= _N_MEASURED:
                break
    (n_first, begun_s), (n_last, ended_s) = times[len(times) > 2], times[-1]  # the first batch takes longer
    free_nbytes = None
    if transport.local_path is not None:
        folder = Path(transport.local_path).absolute()
        free_nbytes = shutil.disk_usage(next(filter(Path.exists, (folder, *folder.parents)))).free
    return RecordingEstimate(
        name=metadata.hash,
        n_examples=layout.n_examples,
        n_shards=layout.n_shards,
        nbytes=nbytes,
        n_left=n_left,
        needed_nbytes=nbytes * n_left // layout.n_examples,
        seconds=(ended_s - begun_s) / (n_last - n_first) * n_left,
        free_nbytes=free_nbytes,
    )
