"""`record`: runs a model over a source, writes what its hook points give, and publishes the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict, cast, get_args, overload

from saev_store.core.arguments import check_choice
from saev_store.core.dtypes import ITEMSIZES, StoredDtype
from saev_store.core.layout import RESID_POST
from saev_store.documents import new_metadata
from saev_store.errors import ArgumentError, brief
from saev_store.record._adapt import adapt
from saev_store.record._adapters import dtype_of
from saev_store.record._examples import ExampleSource
from saev_store.record._fill import fill_missing
from saev_store.record._identity import describe_recording, name_of
from saev_store.record._part import RecordedPart, missing_examples, part_examples
from saev_store.record._recheck import KeptExamples, Recheck
from saev_store.record._recorder import Recorder
from saev_store.store.store import ShardStore
from saev_store.transport import open_transport
from saev_store.writer import create_store
from saev_store.writer.create import check_part
from saev_store.writer.publish import publish
from saev_store.writer.work import Work

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence
    from typing import Unpack

    import torch

    from saev_store.documents import Metadata
    from saev_store.record._adapters import Adapter
    from saev_store.record._part import Part
    from saev_store.writer.inputs import NonfinitePolicy


class PlanOptions(TypedDict, total=False):
    """Options of `record` that decide what is recorded; it has their meanings and defaults."""

    hook_points: Sequence[str]
    dtype: StoredDtype | None
    max_tokens_per_shard: int | None
    dataset: str | None
    family: str | None
    ckpt: str | None
    protocol: str | None
    device: str | None


class RecordOptions(PlanOptions, total=False):
    """All options of `record` but `layers` and `part`."""

    storage_options: Mapping[str, object] | None
    resume: bool
    exist_ok: bool
    recheck: Recheck
    on_nonfinite: NonfinitePolicy
    on_overflow: Literal["raise", "saturate"]
    progress: bool | None


@overload
def record(
    model: torch.nn.Module | Adapter,
    source: ExampleSource,
    root: str | os.PathLike[str],
    *,
    layers: Sequence[int],
    part: None = None,
    **options: Unpack[RecordOptions],
) -> ShardStore: ...
@overload
def record(
    model: torch.nn.Module | Adapter,
    source: ExampleSource,
    root: str | os.PathLike[str],
    *,
    layers: Sequence[int],
    part: Part | None,
    **options: Unpack[RecordOptions],
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
    part: Part | None = None,
    device: str | None = None,
    storage_options: Mapping[str, object] | None = None,
    resume: bool = True,
    exist_ok: bool = False,
    recheck: Recheck = "exact",
    on_nonfinite: NonfinitePolicy = "raise",
    on_overflow: Literal["raise", "saturate"] = "raise",
    progress: bool | None = None,
) -> ShardStore | RecordedPart:
    """Record a model's activations of a source, publish the store and open it.

    An interrupted call continues with the first shard that is not durable when it is made again. The result has the same bytes as an
    uninterrupted one: batches are cut at the same places, and a batch that was written in part runs as a whole again.

    The identity of the recording is in `data["recording"]` of the metadata, so it is part of the store's hash: digests of the
    weights and of the configuration, names of hooks that are not ours, the source with its sizes of batches and contexts, and the
    versions of torch and transformers. A model that was changed by hand, and samples in memory, are yours to name: in `data` of the
    source, or as `ckpt`.

    Args:
        model: A transformer of `transformers`, see `adapt`, or an adapter. Put into evaluation mode while recording.
        source: `Images` or `Texts`.
        root: Directory or URL in which the store's folder is created.
        layers: Labels of the blocks to record, see `Recorder`; written into the metadata as they are given.
        hook_points: Where in each block, see `Recorder`.
        dtype: `"float32"`, `"bfloat16"` or `"float16"`; None: what the model computes in. Numbers are rounded to nearest even
            if that is narrower.
        max_tokens_per_shard: Upper bound on the vectors (tokens x layers x examples) of a shard; None: see `saev_store.new_metadata`.
        dataset: Address of the original data, for the metadata.
        family: Name of the architecture's family for the metadata; None: from the configuration.
        ckpt: Name of the weights for the metadata; None: from the configuration. Of a folder that is there, its own name without
            those above it.
        protocol: Version of the documents, see `saev_store.new_metadata`; None: the oldest that has all of this.
        part: `(rank, n)`, ranks from 0: record only the shards of this rank, while others record theirs; any number of them may
            continue.
        device: Device of the computation, such as `"cuda"`; None: that of the model.
        storage_options: Options of the file system of `root`.
        resume: Continue an unfinished store of the same metadata, or begin one; False never continues one.
        exist_ok: Open a complete store of the same metadata instead of refusing it. Samples in memory are not part of them.
        recheck: Before anything is appended to an unfinished store, its last example is computed again. `"exact"` refuses to
            continue if a bit differs, `"close"` if the difference is more than rounding.
        on_nonfinite: What to do with NaN and infinity: `"raise"`, `"warn"` or `"allow"`; the bits are kept as they are.
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
    check_choice(recheck, get_args(Recheck), name="recheck")
    of_ranks = None if part is None else check_part(part)
    recorder, metadata = plan(
        model, source, layers, hook_points=hook_points, dtype=dtype, max_tokens_per_shard=max_tokens_per_shard, dataset=dataset,
        family=family, ckpt=ckpt, protocol=protocol, device=device,
    )  # fmt: skip
    transport = open_transport(root, storage_options)
    work = Work(transport, metadata)
    there = KeptExamples(work.store, metadata.layout, recheck, saturate=on_overflow == "saturate", work=work)
    rounds = dtype is not None or protocol not in {None, "3.0"}
    with create_store(
        transport, metadata, resume=resume, exist_ok=exist_ok, part=of_ranks, on_nonfinite=on_nonfinite, on_overflow=on_overflow,
        progress=progress,
    ) as writer:  # fmt: skip
        fill_missing(writer, recorder, source, part_examples(work, of_ranks), there, rounds=rounds)
    missing = missing_examples(work)
    if of_ranks is not None and missing:
        return RecordedPart(work.url, of_ranks, tuple(missing))
    publish(work)
    return ShardStore.open(work.store)


def plan(
    model: torch.nn.Module | Adapter,
    source: ExampleSource,
    layers: Sequence[int],
    *,
    hook_points: Sequence[str] = (RESID_POST,),
    dtype: StoredDtype | None = None,
    max_tokens_per_shard: int | None = None,
    dataset: str | None = None,
    family: str | None = None,
    ckpt: str | None = None,
    protocol: str | None = None,
    device: str | None = None,
) -> tuple[Recorder, Metadata]:
    """The recorder of a model for a source, and the metadata of the recording; arguments and errors as of `record`."""
    if not isinstance(source, ExampleSource):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
        raise ArgumentError(
            f"{brief(source)} is not a source of examples", where="source", remedy="Pass Images(…) or Texts(…)."
        )
    adapter = adapt(model)
    try:
        _ = device is None or adapter.model.to(device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ArgumentError(f"{device!r} cannot be used: {error}", where="device") from error
    geometry = source.geometry(adapter)
    # The special token of a text is one of the tokens that the model is given, so it is not the recorder's matter.
    cls_token = geometry.cls_token and adapter.has_cls
    recorder = Recorder(adapter, layers, hook_points=hook_points, cls_token=cls_token)
    family, ckpt = family or adapter.family, ckpt or adapter.ckpt
    for name, value in (("family", family), ("ckpt", ckpt)):
        if not value:
            message = f"{name} is not given, and the model's configuration does not have it"
            raise ArgumentError(message, where=name, remedy=f"Pass {name}=….")
    if dtype is None:
        computed = str(dtype_of(adapter)).removeprefix("torch.")
        dtype = cast("StoredDtype", computed) if computed in ITEMSIZES and protocol in {None, "3.0"} else "float32"
    points = [point for _, point in recorder.axis]
    # Labels need no declaration before protocol 3.0, which is only written if something else needs it.
    is_old = dtype == "float32" and geometry.text is None and {*points} == {RESID_POST}
    return recorder, new_metadata(
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
        data={**source.describe(), "recording": describe_recording(recorder, source.identity())},
        dataset=dataset,
        dtype=dtype,
        text=geometry.text,
        token_arrays=None if is_old and {*geometry.token_arrays} <= {"labels"} else geometry.token_arrays,
    )
