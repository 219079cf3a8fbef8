"""`record`: runs a model over a source, writes what its hook points give, and publishes the store."""

# Public arguments are checked whatever their annotation.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args, overload

import numpy as np

from saev_store.core.dtypes import ITEMSIZES, LARGEST, StoredDtype
from saev_store.core.layout import RESID_POST, shard_name
from saev_store.documents import new_metadata
from saev_store.errors import ArgumentError, ResumeError, brief
from saev_store.record._adapt import adapt
from saev_store.record._adapters import parameter_of, place
from saev_store.record._examples import ExampleSource
from saev_store.record._identity import describe_recording
from saev_store.record._part import this_device, this_part
from saev_store.record._ranks import write_part
from saev_store.record._recorder import Recorder
from saev_store.transport import open_transport
from saev_store.writer import create_store

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    import torch

    from saev_store.documents import Metadata
    from saev_store.record._adapters import Adapter
    from saev_store.record._examples import Recorded
    from saev_store.record._part import Part
    from saev_store.record._ranks import RecordedPart, RunWriter
    from saev_store.store.store import ShardStore
    from saev_store.transport import Transport
    from saev_store.writer import ShardWriter

Recheck = Literal["exact", "close", "off"]
#: With `recheck="close"`: the largest difference, as a part of the largest number.
_CLOSE = 0.01


@overload
def record(
    model: torch.nn.Module | Adapter,
    source: ExampleSource,
    root: str | os.PathLike[str],
    *,
    layers: Sequence[int],
    hook_points: Sequence[str] = (RESID_POST,),
    dtype: StoredDtype | None = None,
    max_tokens_per_shard: int = 2_400_000,
    dataset: str | None = None,
    family: str | None = None,
    ckpt: str | None = None,
    protocol: str | None = None,
    device: str | None = None,
    storage_options: Mapping[str, object] | None = None,
    part: None = None,
    resume: bool | Literal["auto"] = "auto",
    exist_ok: bool = False,
    recheck: Recheck = "exact",
    on_overflow: Literal["raise", "saturate"] = "raise",
    progress: bool | None = None,
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
    max_tokens_per_shard: int = 2_400_000,
    dataset: str | None = None,
    family: str | None = None,
    ckpt: str | None = None,
    protocol: str | None = None,
    device: str | None = None,
    storage_options: Mapping[str, object] | None = None,
    part: Part,
    resume: bool | Literal["auto"] = "auto",
    exist_ok: bool = False,
    recheck: Recheck = "exact",
    on_overflow: Literal["raise", "saturate"] = "raise",
    progress: bool | None = None,
) -> ShardStore | RecordedPart: ...
def record(
    model: torch.nn.Module | Adapter,
    source: ExampleSource,
    root: str | os.PathLike[str],
    *,
    layers: Sequence[int],
    hook_points: Sequence[str] = (RESID_POST,),
    dtype: StoredDtype | None = None,
    max_tokens_per_shard: int = 2_400_000,
    dataset: str | None = None,
    family: str | None = None,
    ckpt: str | None = None,
    protocol: str | None = None,
    device: str | None = None,
    storage_options: Mapping[str, object] | None = None,
    part: Part | None = None,
    resume: bool | Literal["auto"] = "auto",
    exist_ok: bool = False,
    recheck: Recheck = "exact",
    on_overflow: Literal["raise", "saturate"] = "raise",
    progress: bool | None = None,
) -> ShardStore | RecordedPart:
    """Record a model's activations of a source, publish the store and open it.

    An interrupted call continues after the last durable example when it is made again. The result has the same bytes as an
    uninterrupted one: batches are cut at the same places, and a batch that was written in part runs as a whole again.

    What decides the vectors is in `data["recording"]` of the metadata, so it is part of the store's hash: digests of the
    weights and of the configuration, the dtype of computation, the attention implementation, sizes of batches and contexts, the
    versions of torch and transformers.

    Args:
        model: A transformer of `transformers`, see `adapt`, or an adapter. Put into evaluation mode while recording.
        source: `Images`, `ImageBatches` or `Texts`.
        root: Directory or URL in which the store's folder is created.
        layers: Labels of the blocks to record, see `Recorder`; written into the metadata as they are given.
        hook_points: Where in each block, see `Recorder`.
        dtype: `"float32"`, `"bfloat16"` or `"float16"`; None: what the model computes in. Numbers are rounded to nearest even
            where that is narrower.
        max_tokens_per_shard: Upper bound on the vectors (tokens x layers x examples) of a shard.
        dataset: Address of the original data, for the metadata.
        family: Name of the architecture's family for the metadata; None: from the configuration.
        ckpt: Name of the weights for the metadata; None: from the configuration.
        protocol: Version of the documents, see `saev_store.new_metadata`; None: the oldest that can say everything.
        device: Device of the computation, such as `"cuda"`; None: that of the model.
        storage_options: Options of the file system of `root`.
        part: `(rank, n)`, ranks from 0: record only the shards of this rank, while others record theirs. `"auto"`: as torchrun or
            Slurm has started this process; with `device="cuda"` each rank then takes a GPU of its own. None: record all of it.
            An unfinished store can be continued by any number of ranks.
        resume: `"auto"` continues an unfinished store of the same metadata, or begins one. True refuses to begin one beside
            unfinished stores of other metadata, False never continues one.
        exist_ok: Open a complete store of the same metadata instead of refusing it.
        recheck: Before anything is appended to an unfinished store, its last example is computed again. `"exact"` refuses to
            continue where a bit differs, `"close"` where the difference is more than rounding; `"off"` only looks at the
            metadata.
        on_overflow: What to do with finite numbers that become infinite in the store's dtype: refuse them, or store its largest
            finite number.
        progress: Show a bar on standard error; None: when it is a terminal.

    Returns:
        The store, published. With `part`, while other ranks are not done: a `RecordedPart`. The last rank publishes the store.

    Raises:
        ArgumentError: an argument breaks a rule, the source is empty, or this model cannot run it.
        LayerNotFoundError: a label is not a block of the model.
        ResumeError: what is there was recorded in another way, or the model now gives other vectors.
        StoreExistsError, IncompleteStoreError, WriterConflictError: see `ShardStore.create`.
        MissingDependencyError: torch is not installed.
    """
    if recheck not in get_args(Recheck):
        raise ArgumentError(f"recheck is {brief(recheck)}; it must be 'exact', 'close' or 'off'", where="recheck")
    if on_overflow not in {"raise", "saturate"}:
        raise ArgumentError(
            f"on_overflow is {brief(on_overflow)}; it must be 'raise' or 'saturate'", where="on_overflow"
        )
    of_ranks = this_part(part)
    recorder = prepare(
        model, source, layers, hook_points=hook_points, device=this_device(device) if part == "auto" else device
    )
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
    transport = open_transport(root, storage_options)

    def open_writer(of: tuple[int, int] | None) -> ShardWriter:
        return create_store(
            transport, metadata, resume=resume, exist_ok=exist_ok, part=of, on_overflow=on_overflow, progress=progress
        )

    def write(writer: ShardWriter | RunWriter) -> None:
        saturate = on_overflow == "saturate"
        fill(writer, recorder, source, storage_options=storage_options, recheck=recheck, saturate=saturate)

    return write_part(transport, metadata, of_ranks, open_writer, write, continues=resume is not False)


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
            remedy="Pass Images(…), ImageBatches(…) or Texts(…).",
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
    max_tokens_per_shard: int = 2_400_000,
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
        dtype = _computed_dtype(adapter) if protocol in {None, "3.0"} else "float32"
    points = [point for _, point in recorder.axis]
    # Labels need no declaration before protocol 3.0, which is only written where something else needs it.
    is_old = (
        dtype == "float32"
        and geometry.text is None
        and {*points} == {RESID_POST}
        and {*geometry.token_arrays} <= {"labels"}
    )
    return new_metadata(
        protocol=protocol,
        family=family,
        ckpt=ckpt,
        layers=[label for label, _ in recorder.axis],
        hook_points=points,
        content_tokens_per_example=geometry.content_tokens,
        cls_token=geometry.cls_token,
        d_model=adapter.d_model,
        n_examples=geometry.n_examples,
        max_tokens_per_shard=max_tokens_per_shard,
        data={**data, "recording": describe_recording(recorder, geometry.identity)},
        dataset=dataset,
        dtype=dtype,
        token_arrays=None if is_old else geometry.token_arrays,
        text=geometry.text,
    )


@dataclass(frozen=True)
class Filled:
    """Counts and times of a recording.

    Attributes:
        n_recorded: Examples that this call recorded; the others were recorded before.
        compute_s: Seconds of reading the source and running the model.
        append_s: Seconds in `ShardWriter.append`.
    """

    n_recorded: int
    compute_s: float
    append_s: float


def fill(
    writer: ShardWriter | RunWriter,
    recorder: Recorder,
    source: ExampleSource,
    *,
    storage_options: Mapping[str, object] | None = None,
    recheck: Recheck = "exact",
    saturate: bool = False,
) -> Filled:
    """Append the missing examples to `writer`; arguments as of `record`, `saturate` as `writer` was made.

    Raises:
        ArgumentError: the source has another number of examples than the metadata.
        ResumeError: the model gives other vectors than those that are there.
    """
    kept, (first, end) = writer.next_example, writer.example_range
    if writer.complete or (kept == end and recheck == "off"):
        return Filled(0, 0.0, 0.0)
    # The last kept example is computed again. It is most often of a batch that has to run anyway.
    start = max(kept - (recheck != "off"), first)
    there = _Kept(writer, storage_options, saturate=saturate)
    compute_s = append_s = 0.0
    with recorder:
        examples = source.assemble(((batch, recorder(*batch.inputs)) for batch in source.batches(start)), start)
        begun_s = time.perf_counter()
        for recorded in examples:
            computed_s = time.perf_counter()
            n = min(end - recorded.first, len(recorded.acts))
            n_kept = min(max(kept - recorded.first, 0), n)
            if recheck != "off":
                for i in range(max(first - recorded.first, 0), n_kept):
                    there.compare(recorded, i, recheck)
            if n_kept < n:
                arrays = {name: values[n_kept:n] for name, values in recorded.token_arrays.items()}
                writer.append(recorded.acts[n_kept:n], **arrays)
            compute_s += computed_s - begun_s
            begun_s = time.perf_counter()
            append_s += begun_s - computed_s
            if recorded.first + n == end < writer.layout.n_examples:
                break
    return Filled(writer.next_example - kept, compute_s, append_s)


class _Kept:
    """The examples that an unfinished store holds."""

    def __init__(
        self, writer: ShardWriter | RunWriter, storage_options: Mapping[str, object] | None, *, saturate: bool
    ) -> None:
        self._writer, self._storage_options, self._saturate = writer, storage_options, saturate
        self._transport: Transport | None = None

    def compare(self, recorded: Recorded, i: int, recheck: Recheck) -> None:
        """Check that example `i` of `recorded` is what is there; `ResumeError` if it is not."""
        import torch

        layout, example = self._writer.layout, recorded.first + i
        fresh, largest = recorded.acts[i], LARGEST[layout.dtype]
        if self._saturate:
            fresh = torch.where(fresh.isfinite(), fresh.clamp(-largest, largest), fresh)
        fresh = fresh.to(getattr(torch, layout.dtype)).contiguous()
        there = torch.frombuffer(bytearray(self._read(example)), dtype=fresh.dtype).reshape(fresh.shape)
        if torch.equal(fresh.view(torch.uint8), there.view(torch.uint8)):
            return
        difference = (fresh.double() - there.double()).abs().max().item()
        if recheck == "close" and difference <= _CLOSE * there.double().abs().max().item():
            return
        n_other = int((fresh != there).sum())
        raise ResumeError(
            f"example {example} is not what the model gives now: {n_other} of {fresh.numel()} numbers differ, by up to "
            f"{difference:.3g}",
            where=self._writer.url,
            remedy="Continue on a machine like the first one and with as many threads. If only rounding differs, "
            'recheck="close" continues; else throw the store away with `discard_unfinished`.',
        )

    def _read(self, example: int) -> bytes:
        """The bytes of an example, all layers."""
        if self._transport is None:
            self._transport = open_transport(self._writer.url, self._storage_options)
        layout = self._writer.layout
        shard, row = divmod(example, layout.examples_per_shard)
        start = row * layout.example_nbytes
        (found,) = self._transport.get_ranges(shard_name(shard), starts=[start], ends=[start + layout.example_nbytes])
        return bytes(np.asarray(found))


def _computed_dtype(adapter: Adapter) -> StoredDtype:
    """The dtype of the model's parameters where a store may hold it, else float32."""
    name = str(parameter_of(adapter.model).dtype).removeprefix("torch.")
    return cast("StoredDtype", name) if name in ITEMSIZES else "float32"
