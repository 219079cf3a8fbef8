"""`estimate_recording`: what a recording will take, from a run of the model over a few examples. Nothing is written."""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from saev_store._runtime.progress import human_seconds
from saev_store.core.arguments import check_count
from saev_store.core.token_arrays import LABELS
from saev_store.errors import counted
from saev_store.record._fill import batches_nbytes
from saev_store.record._part import missing_examples, this_part
from saev_store.record._record import plan
from saev_store.store.card import human_bytes
from saev_store.transport import open_transport
from saev_store.writer import writing_requests
from saev_store.writer.work import Work

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Unpack

    import torch

    from saev_store.record._adapters import Adapter
    from saev_store.record._examples import Batch, ExampleSource
    from saev_store.record._part import Part
    from saev_store.record._record import PlanOptions
    from saev_store.record._recorder import Recorder


@dataclass(frozen=True, slots=True)
class RecordingEstimate:
    """Costs of a recording; `str()` is a few lines.

    Attributes:
        name: The store's folder below the root.
        n_examples: Examples of the store.
        n_shards: Its shards.
        nbytes: Bytes of its vectors and token arrays; small documents are not counted.
        n_requests: PUT and POST requests to a bucket, see `writing_requests`; None for a disk.
        n_left: Examples that are not there of what was asked for; what is there of a recording is kept.
        n_measured: Examples that the model ran.
        model_s: Seconds of the model for those that are left, at the measured speed.
        source_s: Seconds of the source for them, at the same time as the model.
        memory_nbytes: Bytes that the batches of the recording take at most, see `batches_nbytes`.
        free_nbytes: Free bytes of the disk; None for a bucket.
    """

    name: str
    n_examples: int
    n_shards: int
    nbytes: int
    n_requests: int | None
    n_left: int
    n_measured: int
    model_s: float
    source_s: float
    memory_nbytes: int
    free_nbytes: int | None

    @property
    def needed_nbytes(self) -> int:
        """Bytes of the examples that are left."""
        return self.nbytes * self.n_left // self.n_examples

    @property
    def seconds(self) -> float:
        """Seconds for the examples that are left: the slower of source and model decides, unless the disk or the network is slower still."""
        return max(self.model_s, self.source_s)

    @property
    def fits(self) -> bool | None:
        """True if the disk has room for what is left; None for a bucket."""
        return None if self.free_nbytes is None else self.needed_nbytes <= self.free_nbytes

    def to_dict(self) -> dict[str, object]:
        """The attributes and what follows from them, as plain JSON types."""
        return {**asdict(self), "needed_nbytes": self.needed_nbytes, "seconds": self.seconds, "fits": self.fits}

    def __str__(self) -> str:
        steps = (
            f"{human_seconds(self.model_s)} in the model, {human_seconds(self.source_s)} in the source at the same time"
        )
        lines = [
            f"store      {self.name}",
            f"size       {counted(self.n_examples, 'example')}, {human_bytes(self.nbytes)} in {counted(self.n_shards, 'shard')}",
            f"left       {counted(self.n_left, 'example')} to record, {human_bytes(self.needed_nbytes)}",
            f"time       {human_seconds(self.seconds)}: {steps}; measured with {counted(self.n_measured, 'example')}",
            f"memory     {human_bytes(self.memory_nbytes)} for batches",
        ]
        if self.n_requests is not None:
            lines.append(f"requests   {self.n_requests:,} that write")
        if self.free_nbytes is not None:
            lines.append(
                f"disk       {human_bytes(self.free_nbytes)} free: {'it fits' if self.fits else 'IT DOES NOT FIT'}"
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
    n_examples: int = 32,
    **options: Unpack[PlanOptions],
) -> RecordingEstimate:
    """Estimate what `record` with the same arguments will take. Nothing is written below `root`.

    The model runs the batches of the first examples. The speed of the disk is not measured.

    Args:
        model: As of `record`.
        source: As of `record`.
        root: As of `record`.
        layers: As of `record`.
        storage_options: As of `record`.
        part: As of `record`.
        n_examples: Examples to run at least, if there are so many. The first batch is not counted if there is another one: it
            takes longer.
        options: `hook_points`, `dtype`, `max_tokens_per_shard`, `dataset`, `family`, `ckpt`, `protocol` and `device`, as of `record`.

    Raises:
        ArgumentError, LayerNotFoundError, MissingDependencyError: as of `record`.
        AccessError: the root cannot be looked at.
    """
    check_count(n_examples, name="n_examples")
    of_ranks = this_part(part)
    recorder, metadata = plan(model, source, layers, **options)
    transport = open_transport(root, storage_options)
    layout, arrays = metadata.layout, metadata.token_arrays
    if not metadata.declares_token_arrays and LABELS.name in source.geometry(recorder.adapter).token_arrays:
        arrays = (LABELS,)
    n_left = sum(end - first for first, end in missing_examples(Work(transport, metadata), of_ranks))
    measured, n_measured = _Measured(recorder, source.batches(0, layout.n_examples)), list[int]()
    with recorder:
        for recorded in source.assemble(measured, 0):
            n_measured.append(len(recorded.acts) + sum(n_measured[-1:]))
            if n_measured[-1] >= n_examples:
                break
    skip = int(len(measured.model_s) > 1 and n_measured[-1] > n_measured[0])  # the first batch takes longer
    per_s = n_left / (n_measured[-1] - n_measured[0] * skip)
    folder = transport.local_path
    return RecordingEstimate(
        name=metadata.hash,
        n_examples=layout.n_examples,
        n_shards=layout.n_shards,
        nbytes=layout.nbytes + sum(array.nbytes(layout) for array in arrays),
        n_requests=writing_requests(layout, arrays) if folder is None else None,
        n_left=n_left,
        n_measured=n_measured[-1],
        model_s=sum(measured.model_s[skip:]) * per_s,
        source_s=sum(measured.source_s[skip:]) * per_s,
        memory_nbytes=batches_nbytes(measured.inputs_nbytes, measured.vectors_nbytes),
        free_nbytes=None if folder is None else _free_nbytes(Path(folder)),
    )


class _Measured:
    """Batches with their vectors, one step after the other; the times of each, and the bytes of the largest one."""

    def __init__(self, recorder: Recorder, batches: Iterator[Batch]) -> None:
        self._recorder, self._batches = recorder, batches
        self.source_s, self.model_s = list[float](), list[float]()
        self.inputs_nbytes = self.vectors_nbytes = 0

    def __iter__(self) -> Iterator[tuple[Batch, torch.Tensor]]:
        began_s = time.perf_counter()
        for batch in self._batches:
            read_s = time.perf_counter()
            acts = self._recorder(*batch.inputs)
            self.source_s.append(read_s - began_s)
            self.model_s.append(time.perf_counter() - read_s)
            self.inputs_nbytes = max(self.inputs_nbytes, sum(int(getattr(x, "nbytes", 0)) for x in batch.inputs))
            self.vectors_nbytes = max(self.vectors_nbytes, acts.nbytes)
            yield batch, acts
            began_s = time.perf_counter()


def _free_nbytes(folder: Path) -> int:
    """Free bytes of the disk that a folder is on, or will be."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free
