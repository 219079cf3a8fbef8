"""Runs a model over the examples that a writer lacks: a thread reads ahead, and writing runs at the same time."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from saev_store.record._examples import as_stored
from saev_store.record._report import Meter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterator

    import torch

    from saev_store.record._examples import Batch, ExampleSource
    from saev_store.record._recheck import KeptExamples
    from saev_store.record._recorder import Recorder
    from saev_store.record._report import RecordingReport
    from saev_store.writer import ShardWriter

#: Batches that are read and wait for the model.
_N_READ = 2


def fill_missing(
    writer: ShardWriter,
    recorder: Recorder,
    source: ExampleSource,
    examples: range,
    there: KeptExamples,
    *,
    rounds: bool = True,
    without: Collection[str] = (),
    on_report: Callable[[RecordingReport], object] | None = None,
) -> Meter:
    """Append the missing examples to `writer`, range by range; one that is there is computed again first.

    Args:
        writer: Of the store, of some of its shards, or of what it has lost.
        recorder: Runs the model.
        source: As of `record`.
        examples: Those that will be there in the end; those of them that are not missing are there.
        there: What the store holds.
        rounds: False refuses vectors of a wider dtype than the store's, if a store can hold that.
        without: Token arrays that are not given to `writer`.
        on_report: As of `record`.

    Raises:
        ArgumentError: the source has another number of examples than the metadata, or vectors would be rounded unasked.
        ResumeError: the model gives other vectors than those that are there.
    """
    ranges = [] if writer.complete else writer.missing
    # (first that is computed, first that is missing, end)
    spans = [(some.start, some.start, some.stop) for some in ranges]
    if ranges and there.recheck != "off":
        first, end = ranges[0].start, ranges[0].stop
        if first > examples.start:  # the one before is most often of a batch that has to run anyway
            spans[0] = first - 1, first, end
        elif end < examples.stop:
            spans.insert(0, (end, end + 1, end + 1))
    meter = Meter(sum(map(len, ranges)), writer.layout.example_nbytes)
    for first, missing, end in spans:
        with recorder, closing(_read_ahead(source.batches(first, end), meter, pins=recorder.n_ahead > 0)) as batches:
            for recorded in source.assemble(_computed(recorder, batches), first):
                acts = as_stored(recorded.acts, writer.layout.dtype, rounds=rounds)
                n = min(end - recorded.first, len(acts))
                n_kept = min(max(missing - recorded.first, 0), n)
                for i in range(max(first - recorded.first, 0), n_kept if there.recheck != "off" else 0):
                    there.compare(recorded, i)
                if n_kept < n:
                    arrays = recorded.token_arrays.items()
                    with meter.waiting("writer"):
                        writer.append(
                            acts[n_kept:n], **{name: rows[n_kept:n] for name, rows in arrays if name not in without}
                        )
                    meter.n_done += n - n_kept
                writer.note(meter.report().brief)
                if on_report is not None:
                    on_report(meter.report())
                del recorded, acts  # not held while the next ones are computed
    return meter


def _read_ahead(batches: Iterator[Batch], meter: Meter, *, pins: bool) -> Generator[Batch]:
    """The batches, read by a thread ahead of the caller; an error of the source is raised in its place.

    Args:
        batches: Run in that thread.
        meter: Counts the seconds that the caller waits.
        pins: Whether inputs are put into memory from which a GPU copies them while it computes.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="saev_store-read")
    try:
        begun = deque(pool.submit(_next, batches, pins=pins) for _ in range(_N_READ))
        while True:
            with meter.waiting("source"):
                batch = begun.popleft().result()
            if batch is None:
                return
            begun.append(pool.submit(_next, batches, pins=pins))
            yield batch
            del batch  # not held while the next one is waited for
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _next(batches: Iterator[Batch], *, pins: bool) -> Batch | None:
    batch = next(batches, None)
    if batch is None or not pins:
        return batch
    import torch

    return replace(batch, inputs=tuple(torch.as_tensor(value).pin_memory() for value in batch.inputs))


def _computed(recorder: Recorder, batches: Iterator[Batch]) -> Iterator[tuple[Batch, torch.Tensor]]:
    """Batches with their vectors in the CPU's memory; a GPU runs the next batch at the same time."""
    running: deque[tuple[Batch, Callable[[], torch.Tensor]]] = deque()
    for batch in batches:
        running.append((batch, recorder.begin(*batch.inputs)))
        del batch
        if len(running) > recorder.n_ahead:
            yield _arrived(running)
    while running:
        yield _arrived(running)


def _arrived(running: deque[tuple[Batch, Callable[[], torch.Tensor]]]) -> tuple[Batch, torch.Tensor]:
    batch, vectors = running.popleft()
    return batch, vectors()


def batches_nbytes(inputs_nbytes: int, vectors_nbytes: int) -> int:
    """Bytes that the batches of a recording take at most; the writer's buffers are not counted.

    Args:
        inputs_nbytes: Of what the model is given for the largest batch.
        vectors_nbytes: Of the vectors of that batch in the dtype that the model computes in.

    >>> batches_nbytes(inputs_nbytes=5_000_000, vectors_nbytes=60_000_000)
    205000000
    """
    return (_N_READ + 3) * inputs_nbytes + 3 * vectors_nbytes
