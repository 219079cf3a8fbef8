"""`estimate_recording`: what a recording will take, from a run of the model over a few examples. Nothing is written."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from saev_store._runtime.progress import human_seconds
from saev_store.core.arguments import check_count
from saev_store.core.layout import RESID_POST
from saev_store.core.token_arrays import LABELS
from saev_store.errors import counted
from saev_store.record._part import this_part
from saev_store.record._ranks import n_left
from saev_store.record._record import batches_nbytes, describe, prepare
from saev_store.store.card import human_bytes
from saev_store.transport import open_transport
from saev_store.writer import writing_requests

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    import torch

    from saev_store.core.dtypes import StoredDtype
    from saev_store.record._adapters import Adapter
    from saev_store.record._examples import Batch, ExampleSource
    from saev_store.record._part import Part
    from saev_store.record._recorder import Recorder


@dataclass(frozen=True, slots=True)
class RecordingEstimate:
    """What a recording will take; `str()` is a few lines.

    Attributes:
        name: The store's folder below the root.
        n_examples: Examples of the store.
        n_shards: Its shards.
        vectors_nbytes: Bytes of its vectors.
        token_arrays_nbytes: Bytes of its token arrays.
        n_requests: PUT and POST requests to a bucket, see `writing_requests`; None for a disk.
        part: The part that was asked for, (rank, number of ranks); None: all of it.
        n_left: Examples of it that are not there; what is there of a recording is kept.
        n_measured: Examples that the model ran.
        model_s: Seconds of the model for those that are left, at the measured speed.
        source_s: Seconds of the source for them, beside the model.
        memory_nbytes: Bytes that the batches of the recording take at most, see `batches_nbytes`.
        there_nbytes: Bytes that an earlier call has put on the disk already; 0 for a bucket.
        free_nbytes: Free bytes of the disk; None for a bucket.
    """

    name: str
    n_examples: int
    n_shards: int
    vectors_nbytes: int
    token_arrays_nbytes: int
    n_requests: int | None
    part: tuple[int, int] | None
    n_left: int
    n_measured: int
    model_s: float
    source_s: float
    memory_nbytes: int
    there_nbytes: int
    free_nbytes: int | None

    @property
    def nbytes(self) -> int:
        """Bytes of the store; small documents are not counted."""
        return self.vectors_nbytes + self.token_arrays_nbytes

    @property
    def needed_nbytes(self) -> int:
        """Bytes that are still missing on the disk. Until publication, token arrays are there twice."""
        return max(0, self.vectors_nbytes + 2 * self.token_arrays_nbytes - self.there_nbytes)

    @property
    def seconds(self) -> float:
        """Seconds for the examples that are left: the slower of source and model decides, unless the disk or the network is slower still."""
        return max(self.model_s, self.source_s)

    @property
    def fits(self) -> bool | None:
        """Whether the disk has room for it; None for a bucket."""
        return None if self.free_nbytes is None else self.needed_nbytes <= self.free_nbytes

    def to_dict(self) -> dict[str, object]:
        """The attributes and what follows from them, as plain JSON types."""
        return {
            **asdict(self),
            "nbytes": self.nbytes,
            "needed_nbytes": self.needed_nbytes,
            "seconds": self.seconds,
            "fits": self.fits,
        }

    def __str__(self) -> str:
        steps = f"{human_seconds(self.model_s)} in the model, beside it {human_seconds(self.source_s)} in the source"
        lines = [
            f"store      {self.name}",
            f"size       {counted(self.n_examples, 'example')}, {human_bytes(self.nbytes)} in {counted(self.n_shards, 'shard')}",
            *self._left(),
            f"time       {human_seconds(self.seconds)}: {steps}; measured with {counted(self.n_measured, 'example')}",
            f"memory     {human_bytes(self.memory_nbytes)} for batches",
        ]
        if self.n_requests is not None:
            lines.append(f"requests   {self.n_requests:,} that write")
        if self.free_nbytes is not None:
            verdict = "it fits" if self.fits else "IT DOES NOT FIT"
            lines.append(
                f"disk       {human_bytes(self.needed_nbytes)} needed, {human_bytes(self.free_nbytes)} free: {verdict}"
            )
        return "\n".join(lines)

    def _left(self) -> list[str]:
        """A line where it is not all examples that would be recorded."""
        if self.part is None and self.n_left == self.n_examples:
            return []
        left = f"{counted(self.n_left, 'example')} to record" if self.n_left else "nothing to record: it is there"
        return [f"left       {left}" if self.part is None else f"part {self.part[0] + 1}/{self.part[1]}   {left}"]


def estimate_recording(
    model: torch.nn.Module | Adapter,
    source: ExampleSource,
    root: str | os.PathLike[str],
    *,
    layers: Sequence[int],
    hook_points: Sequence[str] = (RESID_POST,),
    dtype: StoredDtype | None = None,
    max_tokens_per_shard: int | None = None,
    dataset: str | None = None,
    family: str | None = None,
    ckpt: str | None = None,
    protocol: str | None = None,
    device: str | None = None,
    storage_options: Mapping[str, object] | None = None,
    part: Part | None = None,
    n_examples: int = 32,
) -> RecordingEstimate:
    """Say what `record` with the same arguments will take. Nothing is written below `root`.

    The model runs the batches of the first examples. The speed of the disk is not measured.

    Args:
        model: As of `record`.
        source: As of `record`.
        root: As of `record`.
        layers: As of `record`.
        hook_points: As of `record`.
        dtype: As of `record`.
        max_tokens_per_shard: As of `record`.
        dataset: As of `record`.
        family: As of `record`.
        ckpt: As of `record`.
        protocol: As of `record`.
        device: As of `record`.
        storage_options: As of `record`.
        part: As of `record`.
        n_examples: How many examples to run at least, if there are so many. The first batch is not counted if there is another
            one: it takes longer.

    Raises:
        ArgumentError, LayerNotFoundError, MissingDependencyError: as of `record`.
        AccessError: the root cannot be looked at.
    """
    check_count(n_examples, name="n_examples")
    of_ranks = this_part(part)
    recorder = prepare(model, source, layers, hook_points=hook_points, device=device)
    transport = open_transport(root, storage_options)
    metadata = describe(
        recorder,
        source,
        dtype=dtype,
        max_tokens_per_shard=max_tokens_per_shard,
        dataset=dataset,
        family=family,
        ckpt=ckpt,
        protocol=protocol,
    )
    layout = metadata.layout
    arrays = metadata.token_arrays
    if not metadata.declares_token_arrays and LABELS.name in source.geometry(recorder.adapter).token_arrays:
        arrays = (LABELS,)
    left = n_left(transport, metadata, of_ranks)
    measured = _measure(recorder, source, n_examples, layout.n_examples)
    folder = transport.local_path
    return RecordingEstimate(
        name=metadata.hash,
        n_examples=layout.n_examples,
        n_shards=layout.n_shards,
        vectors_nbytes=layout.nbytes,
        token_arrays_nbytes=sum(array.nbytes(layout) for array in arrays),
        n_requests=writing_requests(layout, arrays) if folder is None else None,
        part=of_ranks,
        n_left=left,
        n_measured=measured.n_examples[-1],
        model_s=measured.per_example_s(measured.model_s) * left,
        source_s=measured.per_example_s(measured.source_s) * left,
        memory_nbytes=batches_nbytes(measured.inputs_nbytes, measured.vectors_nbytes),
        there_nbytes=0 if folder is None else _used_nbytes(Path(folder, metadata.hash)),
        free_nbytes=None if folder is None else _free_nbytes(Path(folder)),
    )


class _Measured:
    """Times of a few batches, and the bytes of the largest one."""

    def __init__(self) -> None:
        self.source_s, self.model_s, self.n_examples = list[float](), list[float](), list[int]()
        self.inputs_nbytes = self.vectors_nbytes = 0

    def computed(self, recorder: Recorder, batches: Iterator[Batch]) -> Generator[tuple[Batch, torch.Tensor]]:
        """Batches with their vectors, one step after the other."""
        while True:
            began_s = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                return
            read_s = time.perf_counter()
            acts = recorder(*batch.inputs)
            self.source_s.append(read_s - began_s)
            self.model_s.append(time.perf_counter() - read_s)
            self.inputs_nbytes = max(self.inputs_nbytes, sum(int(getattr(x, "nbytes", 0)) for x in batch.inputs))
            self.vectors_nbytes = max(self.vectors_nbytes, acts.nbytes)
            yield batch, acts

    def per_example_s(self, times_s: list[float]) -> float:
        """Seconds for an example; the first batch does not count if there is another one, since it takes longer."""
        later = [n for n in self.n_examples if n > self.n_examples[0]]
        skip = int(bool(later))
        n = self.n_examples[-1] - self.n_examples[0] * skip
        return sum(times_s[skip:]) / max(1, n)


def _measure(recorder: Recorder, source: ExampleSource, n_examples: int, n_all: int) -> _Measured:
    """Run the first batches of a source of `n_all` examples until they make `n_examples`."""
    measured, n_done = _Measured(), 0
    with recorder, closing(measured.computed(recorder, source.batches(0, n_all))) as computed:
        for recorded in source.assemble(computed, 0):
            n_done += len(recorded.acts)
            measured.n_examples.append(n_done)
            if n_done >= n_examples:
                break
    return measured


def _used_nbytes(folder: Path) -> int:
    """Bytes that the files of a folder take on the disk; 0 where there is none."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                status = os.lstat(os.path.join(parent, name))
                total += getattr(status, "st_blocks", -(-status.st_size // 512)) * 512
    return total


def _free_nbytes(folder: Path) -> int:
    """Free bytes of the disk that a folder is on, or will be."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free
