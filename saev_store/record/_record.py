"""`record`: runs a model over a source, writes what its hook points give, and publishes the store."""

# Public arguments are checked whatever their annotation.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, cast, get_args, overload

from saev_store.core.dtypes import ITEMSIZES, StoredDtype
from saev_store.core.layout import RESID_POST
from saev_store.documents import new_metadata
from saev_store.errors import ArgumentError, brief
from saev_store.record._adapt import adapt
from saev_store.record._adapters import dtype_of, place
from saev_store.record._examples import ExampleSource, as_stored
from saev_store.record._identity import describe_recording
from saev_store.record._names import name_of
from saev_store.record._part import this_device, this_part
from saev_store.record._ranks import part_examples, write_part
from saev_store.record._recheck import KeptExamples, Recheck
from saev_store.record._recorder import Recorder
from saev_store.record._report import RecordingReport
from saev_store.transport import open_transport
from saev_store.writer import create_store
from saev_store.writer.work import Work

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence

    import torch

    from saev_store.documents import Metadata
    from saev_store.record._adapters import Adapter
    from saev_store.record._examples import Batch
    from saev_store.record._part import Part
    from saev_store.record._ranks import RecordedPart
    from saev_store.store.store import ShardStore
    from saev_store.transport import Transport
    from saev_store.writer import ShardWriter

#: Batches that are read and wait for the model.
_N_READ = 2


@overload
def record(
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
    part: None = None,
    resume: bool = True,
    exist_ok: bool = False,
    recheck: Recheck = "exact",
    on_nonfinite: Literal["raise", "warn", "allow"] = "raise",
    on_overflow: Literal["raise", "saturate"] = "raise",
    progress: bool | None = None,
    on_report: Callable[[RecordingReport], object] | None = None,
) -> ShardStore: ...
@overload
def record(
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
    part: Part,
    resume: bool = True,
    exist_ok: bool = False,
    recheck: Recheck = "exact",
    on_nonfinite: Literal["raise", "warn", "allow"] = "raise",
    on_overflow: Literal["raise", "saturate"] = "raise",
    progress: bool | None = None,
    on_report: Callable[[RecordingReport], object] | None = None,
) -> ShardStore | RecordedPart: ...
def record(
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
    resume: bool = True,
    exist_ok: bool = False,
    recheck: Recheck = "exact",
    on_nonfinite: Literal["raise", "warn", "allow"] = "raise",
    on_overflow: Literal["raise", "saturate"] = "raise",
    progress: bool | None = None,
    on_report: Callable[[RecordingReport], object] | None = None,
) -> ShardStore | RecordedPart:
    """Record a model's activations of a source, publish the store and open it.

    An interrupted call continues with the first shard that is not durable when it is made again. The result has the same bytes as an
    uninterrupted one: batches are cut at the same places, and a batch that was written in part runs as a whole again.

    A thread reads the source ahead of the model, and writing runs beside it. `estimate_recording` gives beforehand the memory
    that this takes, and what else a recording costs.

    The identity of the recording is in `data["recording"]` of the metadata, so it is part of the store's hash: digests of the
    weights and of the configuration, names of hooks that are not ours, the source with its sizes of batches and contexts, and the
    versions of torch and transformers. A model that was changed by hand is yours to name, in `data` of the source.

    Args:
        model: A transformer of `transformers`, see `adapt`, or an adapter. Put into evaluation mode while recording.
        source: `Images` or `Texts`.
        root: Directory or URL in which the store's folder is created.
        layers: Labels of the blocks to record, see `Recorder`; written into the metadata as they are given.
        hook_points: Where in each block, see `Recorder`.
        dtype: `"float32"`, `"bfloat16"` or `"float16"`; None: what the model computes in. Numbers are rounded to nearest even
            where that is narrower.
        max_tokens_per_shard: Upper bound on the vectors (tokens x layers x examples) of a shard; None: see `saev_store.new_metadata`.
        dataset: Address of the original data, for the metadata.
        family: Name of the architecture's family for the metadata; None: from the configuration.
        ckpt: Name of the weights for the metadata; None: from the configuration. Of a folder that is there, its own name without
            those above it.
        protocol: Version of the documents, see `saev_store.new_metadata`; None: the oldest that can say everything.
        device: Device of the computation, such as `"cuda"`; None: that of the model.
        storage_options: Options of the file system of `root`.
        part: `(rank, n)`, ranks from 0: record only the shards of this rank, while others record theirs. `"auto"`: as torchrun or
            Slurm has started this process; with `device="cuda"` each rank then takes a GPU of its own. None: record all of it.
            An unfinished store can be continued by any number of ranks.
        resume: Continue an unfinished store of the same metadata, or begin one; False never continues one.
        exist_ok: Open a complete store of the same metadata instead of refusing it.
        recheck: Before anything is appended to an unfinished store, its last example is computed again. `"exact"` refuses to
            continue where a bit differs, `"close"` where the difference is more than rounding; `"off"` only looks at the
            metadata.
        on_nonfinite: What to do with NaN and infinity: `"raise"`, `"warn"` or `"allow"`; the bits are kept as they are.
        on_overflow: What to do with finite numbers that become infinite in the store's dtype: refuse them, or store its largest
            finite number.
        progress: Show a bar on standard error; None: when it is a terminal.
        on_report: Called with a `RecordingReport` in this thread: after each batch, and once more after publication.

    Returns:
        The store, published. With `part`, while other ranks are not done: a `RecordedPart`. The last rank publishes the store.

    Raises:
        ArgumentError: an argument breaks a rule, the source is empty, or this model cannot run it.
        LayerNotFoundError: a label is not a block of the model.
        ResumeError: what is there was recorded in another way, or the model now gives other vectors.
        StoreExistsError, IncompleteStoreError, WriterConflictError: see `ShardStore.create`.
        MissingDependencyError: torch is not installed.
    """
    check_policies(recheck, on_overflow)
    of_ranks = this_part(part)
    recorder = prepare(
        model, source, layers, hook_points=hook_points, device=this_device(device) if part == "auto" else device
    )
    transport = open_transport(root, storage_options)
    metadata = describe(
        recorder, source, dtype=dtype, max_tokens_per_shard=max_tokens_per_shard, dataset=dataset, family=family,
        ckpt=ckpt, protocol=protocol,
    )  # fmt: skip
    report, written_s = RecordingReport(), time.perf_counter()

    def open_writer() -> ShardWriter:
        return create_store(
            transport, metadata, resume=resume, exist_ok=exist_ok, part=of_ranks, on_nonfinite=on_nonfinite,
            on_overflow=on_overflow, progress=progress,
        )  # fmt: skip

    def write(writer: ShardWriter) -> None:
        nonlocal report, written_s
        work = Work(transport, metadata)
        report = fill_missing(
            writer,
            recorder,
            source,
            part_examples(metadata.layout, of_ranks),
            store=work.store,
            work=work,
            recheck=recheck,
            saturate=on_overflow == "saturate",
            rounds=dtype is not None or protocol not in {None, "3.0"},
            on_report=on_report,
        )
        written_s = time.perf_counter()

    found = write_part(transport, metadata, of_ranks, open_writer, write)
    if on_report is not None:
        on_report(report.published_after(time.perf_counter() - written_s))
    return found


def check_policies(recheck: str, on_overflow: str) -> None:
    """Refuse other values than those of `record`."""
    if recheck not in get_args(Recheck):
        raise ArgumentError(f"recheck is {brief(recheck)}; it must be 'exact', 'close' or 'off'", where="recheck")
    if on_overflow not in {"raise", "saturate"}:
        raise ArgumentError(
            f"on_overflow is {brief(on_overflow)}; it must be 'raise' or 'saturate'", where="on_overflow"
        )


def prepare(
    model: torch.nn.Module | Adapter,
    source: ExampleSource,
    layers: Sequence[int],
    *,
    hook_points: Sequence[str] = (RESID_POST,),
    device: str | None = None,
) -> Recorder:
    """The recorder of a model for a source; arguments as of `record`."""
    if not isinstance(source, ExampleSource):
        raise ArgumentError(
            f"{brief(source)} is no source of examples",
            where="source",
            remedy="Pass Images(…) or Texts(…).",
        )
    adapter = adapt(model)
    place(adapter.model, device)
    # The special token of a text is one of the tokens that the model is given, so it is not the recorder's matter.
    cls_token = source.geometry(adapter).cls_token and adapter.has_cls
    return Recorder(adapter, layers, hook_points=hook_points, cls_token=cls_token)


def describe(
    recorder: Recorder,
    source: ExampleSource,
    *,
    dtype: StoredDtype | None = None,
    max_tokens_per_shard: int | None = None,
    dataset: str | None = None,
    family: str | None = None,
    ckpt: str | None = None,
    protocol: str | None = None,
) -> Metadata:
    """The metadata of a recording; arguments as of `record`.

    Raises:
        ArgumentError: an argument breaks a rule, or nothing names the family or the weights.
    """
    adapter = recorder.adapter
    geometry, data = source.geometry(adapter), source.describe()
    if "recording" in data:
        raise ArgumentError("data has a key 'recording', which names the recording itself", where="data")
    family, ckpt = family or adapter.family, ckpt or adapter.ckpt
    for name, value in (("family", family), ("ckpt", ckpt)):
        if not value:
            raise ArgumentError(
                f"{name} is not given, and the model's configuration does not have it",
                where=name,
                remedy=f"Pass {name}=….",
            )
    if dtype is None:
        computed = str(dtype_of(adapter)).removeprefix("torch.")
        dtype = cast("StoredDtype", computed) if computed in ITEMSIZES and protocol in {None, "3.0"} else "float32"
    points = [point for _, point in recorder.axis]
    # Labels need no declaration before protocol 3.0, which is only written where something else needs it.
    is_old = dtype == "float32" and geometry.text is None and {*points} == {RESID_POST}
    return new_metadata(
        protocol=protocol,
        family=family,
        ckpt=name_of(ckpt),
        layers=[label for label, _ in recorder.axis],
        hook_points=points,
        content_tokens_per_example=geometry.content_tokens,
        cls_token=geometry.cls_token,
        d_model=adapter.d_model,
        n_examples=geometry.n_examples,
        max_tokens_per_shard=max_tokens_per_shard,
        data={**data, "recording": describe_recording(recorder, source.identity())},
        dataset=dataset,
        dtype=dtype,
        text=geometry.text,
        token_arrays=None if is_old and {*geometry.token_arrays} <= {"labels"} else geometry.token_arrays,
    )


def fill_missing(
    writer: ShardWriter,
    recorder: Recorder,
    source: ExampleSource,
    examples: range,
    *,
    store: Transport,
    work: Work | None,
    recheck: Recheck,
    saturate: bool,
    rounds: bool = True,
    without: Collection[str] = (),
    on_report: Callable[[RecordingReport], object] | None = None,
) -> RecordingReport:
    """Append the missing examples to `writer`, range by range; one that is there is computed again first.

    Args:
        writer: Of the store, of some of its shards, or of what it has lost.
        recorder: Runs the model.
        source: As of `record`.
        examples: Those that will be there in the end; those of them that are not missing are there.
        store: The folder of the store.
        work: The unfinished store; None if a published one is repaired, which compares token arrays itself.
        recheck: As of `record`.
        saturate: As `writer` was made.
        rounds: False refuses vectors of a wider dtype than the store's, if a store can hold that.
        without: Token arrays that are not given to `writer`.
        on_report: As of `record`.

    Raises:
        ArgumentError: the source has another number of examples than the metadata, or vectors would be rounded unasked.
        ResumeError: the model gives other vectors than those that are there.
    """
    ranges = [] if writer.complete else writer.missing
    spans = [(some.start, some.start, some.stop) for some in ranges]
    if ranges and recheck != "off":
        first, end = ranges[0].start, ranges[0].stop
        if first > examples.start:  # the one before is most often of a batch that has to run anyway
            spans[0] = first - 1, first, end
        elif end < examples.stop:
            spans.insert(0, (end, end + 1, end + 1))
    kept = KeptExamples(store, work, writer.layout, saturate=saturate)
    report, n_left = RecordingReport(), sum(map(len, ranges))
    for span in spans:
        report = _fill(
            writer, recorder, source, span, kept, n_left - report.n_examples, recheck=recheck, rounds=rounds, without=without,
            before=report, on_report=on_report,
        )  # fmt: skip
    return report


def _fill(
    writer: ShardWriter,
    recorder: Recorder,
    source: ExampleSource,
    span: tuple[int, int, int],
    there: KeptExamples,
    n_left: int,
    *,
    recheck: Recheck,
    rounds: bool,
    without: Collection[str],
    before: RecordingReport,
    on_report: Callable[[RecordingReport], object] | None,
) -> RecordingReport:
    """Append the examples of `span`, (first that is computed, first that is missing, end)."""
    first, kept, end = span
    n_appended, waits_s, began_s = 0, [0.0, 0.0], time.perf_counter()
    stored = cast("StoredDtype", writer.layout.dtype)

    def report() -> RecordingReport:
        elapsed_s, nbytes = time.perf_counter() - began_s, n_appended * writer.layout.example_nbytes
        return RecordingReport(n_appended, n_left - n_appended, nbytes, elapsed_s, *waits_s).following(before)

    with recorder, closing(_read_ahead(source.batches(first, end), waits_s, pins=recorder.n_ahead > 0)) as batches:
        for recorded in source.assemble(_computed(recorder, batches), first):
            acts = as_stored(recorded.acts, stored, rounds=rounds)
            n = min(end - recorded.first, len(acts))
            n_kept = min(max(kept - recorded.first, 0), n)
            if recheck != "off":
                for i in range(max(first - recorded.first, 0), n_kept):
                    there.compare(recorded, i, recheck)
            if n_kept < n:
                put_s = time.perf_counter()
                arrays = recorded.token_arrays.items()
                writer.append(acts[n_kept:n], **{name: rows[n_kept:n] for name, rows in arrays if name not in without})
                waits_s[1] += time.perf_counter() - put_s
                n_appended += n - n_kept
            writer.note(report().brief)
            if on_report is not None:
                on_report(report())
            del recorded, acts  # not held while the next ones are computed
    return report()


def _read_ahead(batches: Iterator[Batch], waits_s: list[float], *, pins: bool) -> Generator[Batch]:
    """The batches, read by a thread ahead of the caller; an error of the source is raised in its place.

    Args:
        batches: Run in that thread.
        waits_s: The seconds that the caller waits are added to the first number.
        pins: Whether inputs are put into memory from which a GPU copies them beside its work.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="saev_store-read")
    try:
        begun = deque(pool.submit(_next, batches, pins=pins) for _ in range(_N_READ))
        while True:
            began_s = time.perf_counter()
            batch = begun.popleft().result()
            waits_s[0] += time.perf_counter() - began_s
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
