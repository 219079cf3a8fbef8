"""Runs a model over the examples that a writer lacks: a thread reads ahead, and writing runs at the same time."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from saev_store.core.dtypes import ITEMSIZES
from saev_store.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterator

    import torch

    from saev_store.record._examples import Batch, ExampleSource
    from saev_store.record._recheck import KeptExamples
    from saev_store.record._recorder import Recorder
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
) -> None:
    """Append the missing examples of `examples`, range by range; one that is there is computed again first.

    Without `rounds` vectors of a wider dtype than the store's are refused; token arrays of `without` are not given to `writer`.
    """
    ranges = [] if writer.complete else writer.missing
    # (first that is computed, first that is missing, end)
    spans = [(some.start, some.start, some.stop) for some in ranges]
    if ranges and ranges[0].start > examples.start:  # the one before is most often of a batch that has to run anyway
        spans[0] = ranges[0].start - 1, ranges[0].start, ranges[0].stop
    elif ranges and ranges[0].stop < examples.stop:
        end = ranges[0].stop
        spans.insert(0, (end, end + 1, end + 1))
    for first, missing, end in spans:
        with recorder, closing(computed(recorder, source.batches(first, end))) as batches:
            for recorded in source.assemble(batches, first):
                acts = _as_stored(recorded.acts, writer.layout.dtype, rounds=rounds)
                n = min(end - recorded.first, len(acts))
                n_kept = min(max(missing - recorded.first, 0), n)
                for i in range(max(first - recorded.first, 0), n_kept):
                    there.compare(recorded, i)
                if n_kept < n:
                    arrays = recorded.token_arrays.items()
                    writer.append(
                        acts[n_kept:n], **{name: rows[n_kept:n] for name, rows in arrays if name not in without}
                    )
                del recorded, acts  # not held while the next ones are computed


def computed(recorder: Recorder, batches: Iterator[Batch]) -> Generator[tuple[Batch, torch.Tensor]]:
    """Batches with their vectors in the CPU's memory. A thread reads ahead; a GPU runs the next batch at the same time."""
    running: deque[tuple[Batch, Callable[[], torch.Tensor]]] = deque()
    with closing(_read_ahead(batches, pins=recorder.n_ahead > 0)) as read:
        for batch in read:
            running.append((batch, recorder.begin(*batch.inputs)))
            del batch
            if len(running) > recorder.n_ahead:
                yield _arrived(running)
        while running:
            yield _arrived(running)


def _read_ahead(batches: Iterator[Batch], *, pins: bool) -> Generator[Batch]:
    """The batches, read by a thread; with `pins` inputs are put into memory from which a GPU copies while it computes."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="saev_store-read")
    try:
        begun = deque(pool.submit(_next, batches, pins=pins) for _ in range(_N_READ))
        while (batch := begun.popleft().result()) is not None:
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


def _arrived(running: deque[tuple[Batch, Callable[[], torch.Tensor]]]) -> tuple[Batch, torch.Tensor]:
    batch, vectors = running.popleft()
    return batch, vectors()


def _as_stored(acts: torch.Tensor, stored: str, *, rounds: bool) -> torch.Tensor:
    """The vectors in a dtype that a writer takes, which rounds them to that of its store."""
    name = str(acts.dtype).removeprefix("torch.")
    if not rounds and (name == "float64" or (name in ITEMSIZES and stored not in {name, "float32"})):
        keep = "" if name == "float64" else f'Pass dtype="{name}" to keep them. '
        message = f"the store would be {stored}, but these vectors are {name}, and would be rounded"
        raise ArgumentError(message, where="dtype", remedy=f'{keep}dtype="{stored}" rounds them.')
    return acts.float() if name == "float64" else acts
