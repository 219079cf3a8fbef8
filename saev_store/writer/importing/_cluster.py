"""Imports of dask arrays by a cluster: each task writes one part of the store, and computes what it needs for that."""

# dask has partial types: what `optimize` returns is unknown to the type checker.
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from saev_store._runtime.cluster import connected, results
from saev_store._runtime.progress import Progress
from saev_store.errors import ArgumentError, IncompleteStoreError
from saev_store.names import CLAIM_PATH
from saev_store.transport import open_transport
from saev_store.writer._publish import finalize_store, published_already
from saev_store.writer.folder import Folder, part_examples, part_shards
from saev_store.writer.importing._arrays import ArrayExamples
from saev_store.writer.importing._write import ImportOptions, check_unchanged, import_examples

if TYPE_CHECKING:
    from distributed import Client

#: A scheduler spends some milliseconds on a part.
MAX_PARTS = 1024


def import_on_cluster(
    examples: ArrayExamples,
    root: str,
    storage_options: Mapping[str, object] | None,
    options: ImportOptions,
    client: Client | str,
) -> None:
    """Write the store of a dask array in parts, one task for each, and publish it.

    The parts follow from the store alone, so that another cluster can go on where one has stopped.

    Args:
        examples: Of an array of dask, or of xarray with one inside.
        root: The folder of stores, at an address that means the same to all workers.
        storage_options: For its file system.
        options: How the parts are written.
        client: Of the cluster, or the address of its scheduler.

    Raises:
        ArgumentError: the array is in the memory or in an open file of this process, or the client is asynchronous.
        TransportError: no scheduler answers, or the workers that had a part died, one after the other.
        SaevStoreError: as for `import_examples`, from any of the workers. What is durable stays.
    """
    if not examples.is_lazy:
        raise ArgumentError(
            "a cluster writes dask arrays only: others would be sent to the workers",
            where="client",
            remedy="Pass dask.array.from_zarr(…) or another array whose chunks the workers can compute.",
        )
    metadata, transport = examples.metadata, open_transport(root, storage_options)
    layout, folder = metadata.layout, Folder(transport, metadata.hash)
    if published_already(folder, metadata):
        import_examples(examples, transport, options)
        return
    if options.resume is False and folder.exists(CLAIM_PATH):
        raise IncompleteStoreError(
            "there is an unfinished store", where=folder.url, remedy='Continue it with resume="auto", or discard it.'
        )
    check_unchanged(transport, metadata)
    # A task that is run again, because its worker was lost, goes on with its part.
    of_part = options._replace(resume=options.resume or "auto", progress=False)
    world = min(layout.n_shards, MAX_PARTS)
    parts = [part_examples(layout, part_shards(layout.n_shards, rank, world)) for rank in range(world)]
    write = partial(_write_part, root=transport.url, storage_options=storage_options, options=of_part)
    tasks = ((_culled(examples, *part), (rank, world)) for rank, part in enumerate(parts))
    with (
        connected(client) as cluster,
        closing(results(cluster, write, tasks)) as written,
        Progress(
            layout.nbytes, "importing", shown=options.progress, unit="examples", unit_nbytes=layout.example_nbytes
        ) as bar,
    ):
        for (first, end), _ in zip(parts, written, strict=True):
            bar.advance((end - first) * layout.example_nbytes)
    finalize_store(transport, metadata, verify="digests" if options.verify else "sizes", progress=options.progress)


def _write_part(
    task: tuple[ArrayExamples, tuple[int, int]],
    *,
    root: str,
    storage_options: Mapping[str, object] | None,
    options: ImportOptions,
) -> None:
    """What a task does: the examples of a part, and which part it is."""
    examples, part = task
    import_examples(examples, open_transport(root, storage_options), options, part=part)


def _culled(examples: ArrayExamples, first: int, end: int) -> ArrayExamples:
    """Some examples, with only the tasks that they need."""
    from dask.base import optimize

    def culled(array: object) -> object:
        (found,) = optimize(array)
        return found

    return examples.part(first, end, culled)
