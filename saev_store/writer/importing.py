"""Imports: arrays, and whatever else gives examples in order, become stores."""

# pyright: reportUnnecessaryIsInstance=false
# dask has partial types: what `optimize` returns is unknown to the type checker.
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from saev_store._runtime.cluster import map_shards
from saev_store._runtime.progress import Progress
from saev_store.core.arguments import check_count, check_flag
from saev_store.core.dtypes import StoredDtype, narrowed
from saev_store.core.layout import IntArray, Layout, shard_name
from saev_store.documents import Metadata, new_metadata
from saev_store.errors import ArgumentError, IncompleteStoreError, ResumeError, StoreExistsError, brief
from saev_store.store.store import ShardStore
from saev_store.transport import Transport, open_transport
from saev_store.writer.create import create_store
from saev_store.writer.digests import BLOCK_BYTES, BlockDigester, FileDigests, load_digests
from saev_store.writer.import_arrays import ArrayExamples, Block, stored_dtype
from saev_store.writer.inputs import NonfinitePolicy, OverflowPolicy, check_overflow, rows_as_bytes, token_rows
from saev_store.writer.publish import finalize_store
from saev_store.writer.work import Work, part_shards

if TYPE_CHECKING:
    from distributed import Client

#: How much of a source is read, and kept in memory, at a time.
MAX_BLOCK_BYTES = 256 << 20
#: A scheduler spends some milliseconds on a part.
MAX_PARTS = 1024


class Examples(Protocol):
    """A source of examples in order.

    Attributes:
        metadata: That of the new store; `data["imported"]` identifies the source.
    """

    @property
    def metadata(self) -> Metadata: ...

    def blocks(self, first: int, end: int, max_block_bytes: int) -> Iterator[Block]:
        """The examples from `first` to `end`, in order, in blocks of at most so many bytes, or of one example."""
        ...


class ImportOptions(NamedTuple):
    """Options of an import; see `ShardStore.from_array`."""

    resume: bool = True
    verify: bool = True
    max_block_bytes: int = MAX_BLOCK_BYTES
    pad: bool | None = None
    on_nonfinite: NonfinitePolicy = "raise"
    on_overflow: OverflowPolicy = "raise"
    progress: bool | None = None

    def check(self) -> None:
        """Raise `ArgumentError` if an option breaks its rule."""
        check_count(self.max_block_bytes, name="max_block_bytes")
        check_flag(self.verify, name="verify")
        check_flag(self.resume, name="resume")


def from_array(
    array: object,
    root: str | os.PathLike[str],
    *,
    family: str,
    ckpt: str,
    layers: Sequence[int] | IntArray | None = None,
    cls_token: bool = False,
    dims: Sequence[str] | None = None,
    dtype: StoredDtype | None = None,
    token_arrays: Mapping[str, object] | None = None,
    hook_points: Sequence[str] | None = None,
    text: Mapping[str, object] | None = None,
    data: Mapping[str, object] | None = None,
    dataset: str | os.PathLike[str] | None = None,
    max_tokens_per_shard: int | None = None,
    options: ImportOptions,
    client: Client | str | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> ShardStore:
    """Write an array as a store, block by block; see `ShardStore.from_array`."""
    options.check()
    if token_arrays is not None and not isinstance(token_arrays, Mapping):
        raise ArgumentError(f"token_arrays is {brief(token_arrays)}; it must map names to arrays", where="token_arrays")
    examples = ArrayExamples(array, dims, token_arrays or {})
    (n_examples, n_layers, n_tokens, d_model), dtypes = examples.shape, examples.token_dtypes
    if data is not None and not isinstance(data, Mapping):
        raise ArgumentError(f"data is {brief(data)}; it must be a mapping, to which `imported` is added", where="data")
    store_dtype = stored_dtype(examples.dtype, dtype)
    # Labels alone need no protocol 3.0: stores of all versions may have them.
    is_new = store_dtype != "float32" or hook_points is not None or text is not None or set(dtypes) - {"labels"}
    metadata = examples.metadata = new_metadata(
        family=family, ckpt=ckpt, layers=_labels(array, layers, n_layers), cls_token=cls_token, d_model=d_model,
        content_tokens_per_example=n_tokens - bool(cls_token), n_examples=n_examples, hook_points=hook_points,
        max_tokens_per_shard=max_tokens_per_shard, dataset=dataset, dtype=store_dtype, text=text,
        data={**(data or {"__class__": "Import"}), "imported": examples.identity()},
        token_arrays=dtypes if is_new else None,
    )  # fmt: skip
    root_transport = open_transport(root, storage_options)
    if client is None:
        import_examples(examples, root_transport, options)
    else:
        _import_on_cluster(examples, root_transport, storage_options, options, client)
    return ShardStore.open(root_transport.at(metadata.hash))


def _labels(array: object, layers: object, n_layers: int) -> Sequence[int] | IntArray:
    """The labels of the layers, given or those of an xarray array."""
    coordinates, named = getattr(array, "coords", None), None
    if isinstance(coordinates, Mapping) and "layer" in coordinates:
        named = cast("list[int]", cast("Any", coordinates["layer"]).to_numpy().reshape(-1).tolist())
    labels = cast("object", named if layers is None else layers)
    if labels is None:
        raise ArgumentError(
            "the labels of the layers are not known",
            where="layers",
            remedy="Pass one for each entry of that axis: layers=[…].",
        )
    if (
        isinstance(labels, str)
        or not isinstance(labels, (Sequence, np.ndarray))
        or len(cast("Sequence[int]", labels)) != n_layers
    ):
        raise ArgumentError(
            f"layers is {brief(cast('object', labels))}; it must be a list of {n_layers} labels", where="layers"
        )
    found = [int(label) for label in cast("Sequence[int]", labels)] if named is not None else []
    if named is not None and found != named and set(found) == set(named):
        raise ArgumentError(
            f"the layers are given as {found}; by the array's coordinate they are {named}",
            where="layers",
            remedy="Give them in that order, or not at all.",
        )
    return cast("Sequence[int]", labels)


def import_examples(
    examples: Examples, root: Transport, options: ImportOptions, *, part: tuple[int, int] | None = None
) -> None:
    """Write the store of some examples, or one part of it.

    Args:
        examples: The source.
        root: The folder of stores.
        options: How it is written. With `verify`, what an earlier call has written is compared with the source.
        part: (rank, world): only this part of the shards; `finalize_store` publishes.

    Raises:
        ResumeError: an unfinished store holds something else than the source has now.
        StoreExistsError: a finished one does, or `resume` is False.
        SaevStoreError: as for `create_store` and `ShardWriter.append`.
    """
    metadata, layout = examples.metadata, examples.metadata.layout
    writer = create_store(
        root, metadata, resume=options.resume, exist_ok=options.resume, part=part, pad=options.pad,
        on_nonfinite=options.on_nonfinite, on_overflow=options.on_overflow, progress=options.progress,
    )  # fmt: skip
    with writer:
        if options.verify:
            missing = {
                first // layout.examples_per_shard
                for some in writer.missing
                for first in some[:: layout.examples_per_shard]
            }
            shards = part_shards(layout.n_shards, *(part or (0, 1)))
            _compare(examples, Work(root, metadata), [shard for shard in shards if shard not in missing], options)
        for some in writer.missing:
            for block in examples.blocks(some.start, some.stop, options.max_block_bytes):
                writer.append(_as_accepted(block, layout, options.on_overflow), **block.token_arrays)


def _as_accepted(block: Block, layout: Layout, on_overflow: OverflowPolicy) -> npt.NDArray[np.generic]:
    """The activations of a block as a writer takes them, which does not take float64."""
    acts = block.acts
    # To 16 bits the writer's own check follows; before it only errors are raised, which show the number as it is.
    if acts.dtype.name == "float64" and (layout.dtype == "float32" or on_overflow == "raise"):
        acts = check_overflow(acts, block.first, layout, on_overflow)
    return narrowed(acts, layout.dtype)


# -- what is there already ---------------------------------------------------------------------------------------------


def _compare(examples: Examples, work: Work, shards: Sequence[int], options: ImportOptions) -> None:
    """Compare shards that are there with the source.

    Raises:
        ResumeError, StoreExistsError: they hold something else.
    """
    is_published = work.is_published()
    digests = load_digests(work.store) if is_published else None
    # Of a published store the token arrays are whole files, of an unfinished one a piece for each shard.
    streams: dict[str, BlockDigester] = {}
    for shard_idx in shards:
        if not is_published:
            streams = {}
        found = _digested(examples, shard_idx, options, streams, BLOCK_BYTES if is_published else 1 << 62)
        if is_published:
            is_same = digests is not None and digests.files.get(shard_name(shard_idx)) == found
        else:
            receipt, tokens = work.receipt(shard_idx), {name: stream.digests()[0] for name, stream in streams.items()}
            is_same = receipt is not None and (receipt.file, receipt.tokens) == (found, tokens)
        if not is_same:
            raise _other(work, shard_idx, is_published=is_published)
    for array in work.metadata.recordable if digests is not None else ():
        if (stream := streams.get(array.name)) is not None:
            whole = FileDigests(stream.nbytes, tuple(stream.digests()))
            if digests is not None and digests.files.get(array.file_name) != whole:
                raise _other(work, 0, is_published=True)


def _digested(
    examples: Examples, shard_idx: int, options: ImportOptions, streams: dict[str, BlockDigester], block_bytes: int
) -> FileDigests:
    """The digests of a shard as the source has it; its token arrays go into `streams`."""
    metadata, layout, digester = examples.metadata, examples.metadata.layout, BlockDigester(BLOCK_BYTES)
    step = max(1, BLOCK_BYTES // layout.example_nbytes)
    for block in examples.blocks(*layout.example_range(shard_idx), options.max_block_bytes):
        acts = _as_accepted(block, layout, options.on_overflow)
        if options.on_overflow == "saturate":
            acts = check_overflow(acts, block.first, layout, "saturate")
        for at in range(0, len(acts), step):
            digester.update(rows_as_bytes(acts[at : at + step], layout).data)
        for array in metadata.recordable:
            if array.name in block.token_arrays:
                given = {array.name: block.token_arrays[array.name]}
                rows = cast("npt.NDArray[np.uint8]", token_rows(given, (array,), len(acts), layout, required=True))
                streams.setdefault(array.name, BlockDigester(block_bytes)).update(
                    np.ascontiguousarray(rows).reshape(-1).data
                )
    return FileDigests(digester.nbytes, tuple(digester.digests()))


def _other(work: Work, shard_idx: int, *, is_published: bool) -> StoreExistsError | ResumeError:
    """The error for a shard that differs from the source."""
    first, end = work.layout.example_range(shard_idx)
    if is_published:
        return StoreExistsError(
            f"a finished store of that name is there, whose examples {first} to {end - 1} are not those of the source, or it has "
            "no digests",
            where=work.url,
            remedy="Import to another folder, or with another `data`; verify=False opens the finished store.",
        )
    return ResumeError(
        f"examples {first} to {end - 1} of the source are not what an earlier attempt has imported: the source has changed",
        where=work.url,
        remedy="Throw the unfinished store away with `discard_unfinished` or `saev-store clean --older-than 0` of its folder, then import again.",
    )


# -- by a cluster ------------------------------------------------------------------------------------------------------


def _import_on_cluster(
    examples: ArrayExamples,
    root: Transport,
    storage_options: Mapping[str, object] | None,
    options: ImportOptions,
    client: Client | str,
) -> None:
    """Write the store of a dask array in parts, a task of a cluster for each, and publish it.

    Raises:
        ArgumentError: the array is in the memory or in an open file of this process.
        SaevStoreError: as for `import_examples`, from any of the workers. What is durable stays.
    """
    if not examples.is_lazy:
        raise ArgumentError(
            "a cluster writes dask arrays only: others would be sent to the workers",
            where="client",
            remedy="Pass dask.array.from_zarr(…) or another array whose chunks the workers can compute.",
        )
    metadata, layout, work = examples.metadata, examples.metadata.layout, Work(root, examples.metadata)
    if work.is_published():
        import_examples(examples, root, options)
        return
    if not work.begin() and not options.resume:
        raise IncompleteStoreError(
            "there is an unfinished store", where=work.url, remedy="Continue it with resume=True, or discard it."
        )
    world = min(layout.n_shards, MAX_PARTS)
    tasks = list[tuple[ArrayExamples, tuple[int, int]]]()
    n_examples = list[int]()
    for rank in range(world):
        shards = part_shards(layout.n_shards, rank, world)
        first, end = layout.example_range(shards[0])[0], layout.example_range(shards[-1])[1]
        tasks.append((examples.part(first, end, _culled), (rank, world)))
        n_examples.append(end - first)
    # A task that is run again, because its worker was lost, goes on with its part.
    write = partial(
        _write_part,
        root=root.url,
        storage_options=storage_options,
        options=options._replace(resume=True, progress=False),
    )
    each = layout.example_nbytes
    with (
        Progress(layout.nbytes, "importing", shown=options.progress, unit="examples", unit_nbytes=each) as bar,
        closing(map_shards(write, tasks, client)) as written,
    ):
        for n, _ in zip(n_examples, written, strict=True):
            bar.advance(n * each)
    finalize_store(root, metadata)


def _write_part(
    task: tuple[ArrayExamples, tuple[int, int]],
    *,
    root: str,
    storage_options: Mapping[str, object] | None,
    options: ImportOptions,
) -> None:
    """Write a part: its examples, and which part it is."""
    examples, part = task
    import_examples(examples, open_transport(root, storage_options), options, part=part)


def _culled(array: object) -> object:
    """An array with only the tasks that it needs."""
    from dask.base import optimize

    (found,) = optimize(array)
    return found
