"""Icechunk repositories whose chunks are ranges of the shards (virtual references), written through VirtualiZarr."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

import numpy as np

from saev_store._runtime.optional import need
from saev_store.core.arguments import check_flag
from saev_store.core.dtypes import numpy_dtype
from saev_store.core.layout import DIMS
from saev_store.errors import (
    ArgumentError,
    NotFoundError,
    SaevStoreError,
    StoreExistsError,
    WriterConflictError,
    brief,
)
from saev_store.export._references import References, check_text, references, url_parts, usable_base, warn_if_many
from saev_store.export._repository import (
    BRANCH,
    check_icechunk_types,
    check_not_forked,
    container_of,
    create_whole,
    is_begun,
    our_errors,
    storage_of,
    taken,
)
from saev_store.export.targets import refuse_stores_file
from saev_store.export.virtual import virtual_dataset
from saev_store.transport import open_transport
from saev_store.transport.checks import os_errors
from saev_store.zarr import Chunks
from saev_store.zarr.documents import ARRAY, TOKEN_DIMS, attributes_of, token_variables

if TYPE_CHECKING:
    import icechunk
    import zarr

    from saev_store.store.store import ShardStore

_NOTHING, _CREATE = "there is no repository to append to", "Create it without append=True first."
#: Labels of layers are read only if they are no more, in chunks that are no larger.
_MOST_LAYERS = 1 << 16
#: Likewise for chunks of several examples of a token array: completing one takes its memory. Those of exports have about 1 MiB.
_MOST_CHUNK_BYTES = 32 << 20
#: What is known of each store in a repository.
_PART = {"content_hash", "url", "n_examples"}
#: Attributes of stores that continue each other.
_SAME = ("family", "ckpt", "content_tokens_per_example", "cls_token", "d_model", "hook_points")


def write_icechunk(
    store: ShardStore,
    target: str | icechunk.Storage,
    *,
    chunks: Chunks = "auto",
    base: str | None = None,
    container: icechunk.VirtualChunkContainer | None = None,
    append: bool = False,
) -> str:
    """Create an Icechunk repository whose chunks are ranges of the shards, or append to one; returns the commit's id.

    Appended examples follow those of the repository; each store stays where it is. The attribute `parts` lists the stores.
    References to bfloat16 have the data type of the zarr-extensions registry, which zarr knows where this package is installed.

    Args:
        store: The opened store.
        target: A new folder, an `s3://` or `gs://` URL (credentials from the environment), or an `icechunk.Storage`. A repository
            without commits, such as one that an interrupted export has left, is taken for new.
        chunks: As in `write_kerchunk`. To append other stores later, take one example. Ignored with `append`.
        base: As in `write_kerchunk`.
        container: How Icechunk reads the shards; default: by the scheme of `base`.
        append: Append the examples to a repository that this function created. It needs the same layers, tokens, model,
            dtype and token arrays, and examples in whole chunks of `activations` so far.

    Raises:
        AccessError: the folder cannot be written or read.
        ArgumentError: `chunks` is not a legal shape, an argument is of another type, the store does not fit the repository, or Icechunk cannot read `base` or
            write to `target`.
        CorruptShardError: shards are missing or short.
        ForkError: this process was forked after an export to Icechunk.
        MissingDependencyError: icechunk or virtualizarr is not installed.
        NotFoundError: there is no repository to append to.
        StoreExistsError: the repository exists, and `append` is false; or the folder contains something else, in a bucket also
            what an interrupted creation has left.
        TransportError: Icechunk cannot write. The same call goes on where an attempt left a repository without commits.
        WriterConflictError: another process has written to the repository meanwhile.
    """
    append = check_flag(append, name="append")
    for library in ("icechunk", "virtualizarr"):
        need(library, install="saev-store[icechunk]", where="to_icechunk")

    check_text(store, base)
    if quote(usable_base(store, base), safe=":/") != usable_base(store, base):
        raise ArgumentError(
            f"{usable_base(store, base)!r} has characters that URLs escape; Icechunk finds no chunk in such a folder",
            where="base",
            remedy="Name the store by another path, such as a symbolic link.",
        )
    check_icechunk_types(target, container)
    where, is_new = str(target), False
    if isinstance(target, str) and url_parts(target, where="target").scheme in ("", "file"):
        # Icechunk creates the folder that it looks for a repository in, and panics where it cannot read it.
        folder = target.removeprefix("file://")
        above, name = os.path.split(os.path.abspath(folder))
        refuse_stores_file(store, open_transport(above), name, url=target, where="target")
        is_new = not os.path.isdir(folder)
        if is_new and os.path.lexists(folder):
            raise StoreExistsError("a file has that name", where=where, remedy="Name a new folder.")
        if not is_new:
            with os_errors(where, "list"):
                os.scandir(folder).close()
    if is_new and append:
        raise NotFoundError(_NOTHING, where=where, remedy=_CREATE)
    check_not_forked(where)
    with our_errors(where):
        return _write_to(
            store, target, where, is_new=is_new, chunks=chunks, base=base, container=container, append=append
        )


def _write_to(
    store: ShardStore,
    target: str | icechunk.Storage,
    where: str,
    *,
    is_new: bool,
    chunks: Chunks,
    base: str | None,
    container: icechunk.VirtualChunkContainer | None,
    append: bool,
) -> str:
    """What `write_icechunk` does once its arguments are checked; Icechunk's errors are as they are."""
    import icechunk

    storage = storage_of(target) if isinstance(target, str) else target
    exists = not is_new and icechunk.Repository.exists(storage)
    begun = exists and not append and is_begun(icechunk.Repository.open(storage))
    if exists and not append and not begun:
        raise StoreExistsError(
            "the repository already exists", where=where, remedy="Name a new folder, or append to it."
        )
    if append and not exists:
        raise NotFoundError(_NOTHING, where=where, remedy=_CREATE)
    before, tip = None, None
    if append:
        opened = icechunk.Repository.open(storage)
        tip = opened.lookup_branch(BRANCH)
        before = _Appended.read(opened.readonly_session(snapshot_id=tip), where)
        before.check(store, usable_base(store, base), where)
    if before:
        found = references(
            store, chunks=before.chunk, base=base, token_rows=before.token_rows, n_before=before.n_examples
        )
    else:
        found = references(store, chunks=chunks, base=base)
    warn_if_many(found, what="manifests")
    container = container or container_of(found.base)
    config = icechunk.Repository.fetch_config(storage) if exists else None
    config = config or icechunk.RepositoryConfig.default()
    config.set_virtual_chunk_container(container)
    if not exists and isinstance(target, str) and url_parts(target, where="target").scheme in ("", "file"):
        create_whole(target.removeprefix("file://"), config, where)
        exists = True
    create = icechunk.Repository.open if exists else icechunk.Repository.create
    try:
        repository = create(storage, config=config)
    except icechunk.IcechunkError as error:
        if "clean prefix" not in str(error):  # a bucket has no folder that could be created aside
            raise
        raise taken(storage, where) from error
    session = repository.writable_session(BRANCH)
    conflict = WriterConflictError(
        "another process has written to the repository meanwhile", where=where, remedy="Call again with append=True."
    )
    if tip is not None and session.snapshot_id != tip:  # what was read of the repository is not what it is appended to
        raise conflict
    repository.save_config()  # not before: it would forget the containers of the other process
    try:
        _write(found, session.store, before)
    except SaevStoreError:
        raise
    except (NotImplementedError, ValueError, OverflowError) as error:
        # Of VirtualiZarr, where the arrays of the two do not fit.
        raise ArgumentError(f"the store does not continue the repository: {brief(str(error))}", where=where) from error
    try:
        return session.commit(f"References to the shards of {found.base}")
    except icechunk.ConflictError as error:
        raise conflict from error


def without_icechunk_logs() -> None:
    """Switch off what Icechunk logs, which goes to standard output, in this process: what fails raises an error as well.

    Raises:
        MissingDependencyError: icechunk is not installed.
    """
    need("icechunk", install="saev-store[icechunk]", where="to_icechunk")
    import icechunk

    icechunk.set_logs_filter("off")


@dataclass(frozen=True)
class _Appended:
    """The repository that examples are appended to.

    Attributes:
        n_examples: So far.
        attributes: The group's.
        chunk: Shape of a chunk of `activations`.
        token_rows: Examples in a chunk of each token array, by name.
        dtypes: Of `activations` and the token arrays, by name.
        layers: Their labels.
    """

    n_examples: int
    attributes: Mapping[str, object]
    chunk: tuple[int, ...]
    token_rows: Mapping[str, int]
    dtypes: Mapping[str, str]
    layers: tuple[int, ...]

    @classmethod
    def read(cls, session: icechunk.Session, where: str) -> _Appended:
        import zarr

        other = ArgumentError("the repository is not an export of a store", where=where)
        try:
            group = zarr.open_group(session.store, mode="r")  # pyright: ignore[reportUnknownMemberType]  # a partial type
            arrays = dict(group.arrays())
            acts, layer = arrays[ARRAY], arrays["layer"]
        except (KeyError, FileNotFoundError, ValueError):
            raise other from None
        tokens = {name: array for name, array in arrays.items() if array.ndim == len(TOKEN_DIMS)}
        # Labels are read after their number is known; the references that are appended have the rank and the rows of these.
        fits = (
            acts.ndim == len(DIMS)
            and layer.shape == acts.shape[1:2]
            and max(*layer.shape, *layer.chunks) <= _MOST_LAYERS
        )
        parts = cast("list[object]", _parts(group.attrs))
        if not fits or not all(isinstance(part, Mapping) and part.keys() >= _PART for part in parts):
            raise other
        if any(array.shape[0] != acts.shape[0] or not _is_completed(array) for array in tokens.values()):
            raise other
        return cls(
            n_examples=acts.shape[0],
            attributes=dict(group.attrs),
            chunk=acts.chunks,
            token_rows={name: array.chunks[0] for name, array in tokens.items()},
            dtypes={name: array.dtype.name for name, array in {ARRAY: acts, **tokens}.items()},
            layers=tuple(np.asarray(layer[:]).tolist()),
        )

    def check(self, store: ShardStore, url: str, where: str) -> None:
        """Refuse a store that does not continue the repository."""
        here = attributes_of(store.metadata, url=url)
        pairs = {name: (self.attributes.get(name), here.get(name)) for name in _SAME}
        pairs["layers"] = (self.layers, store.layout.layers)
        tokens = token_variables(store.token_arrays.described())
        dtypes = {ARRAY: store.layout.dtype, **{name: array.dtype for name, array in tokens.items()}}
        for name in sorted({*self.dtypes, *dtypes}):
            pairs[name] = (self.dtypes.get(name), dtypes.get(name))
        other = [f"{name}: {a!r} in the repository, {b!r} here" for name, (a, b) in pairs.items() if a != b]
        if other:
            raise ArgumentError(f"the store does not continue the repository; {'; '.join(other)}", where=where)
        if self.n_examples % self.chunk[0]:
            raise ArgumentError(
                f"the repository ends within a chunk: {self.n_examples} examples in chunks of {self.chunk[0]}",
                where=where,
                remedy="Create it with chunks of one example.",
            )
        if any((part["content_hash"], part["url"]) == (here["content_hash"], url) for part in _parts(self.attributes)):
            raise ArgumentError(f"{url} is already in the repository", where=where)


def _is_completed(array: zarr.Array[Any]) -> bool:
    """Whether a chunk of a token array may be completed."""
    return array.chunks[0] == 1 or math.prod(array.chunks) * array.dtype.itemsize <= _MOST_CHUNK_BYTES


def _parts(attributes: Mapping[str, object]) -> list[Mapping[str, object]]:
    """The stores in a repository."""
    known = attributes.get("parts")
    if isinstance(known, list):
        return cast("list[Mapping[str, object]]", known)
    return [{name: attributes.get(name) for name in ("content_hash", "url", "n_examples")}]


def _write(found: References, target: icechunk.IcechunkStore, before: _Appended | None) -> None:
    import zarr
    from virtualizarr.writers.icechunk import virtual_dataset_to_icechunk

    if before:
        for array in found.arrays:  # which may differ in length: some examples of token arrays complete a chunk
            if array.head:
                end = before.n_examples + array.n_in_head
                values = np.frombuffer(array.head, numpy_dtype(array.data_type)).reshape(-1, *array.shape[1:])
                opened = zarr.open_array(target, path=array.name, mode="r+")  # pyright: ignore[reportUnknownMemberType]  # a partial type
                opened.resize((end, *array.shape[1:]))
                opened[before.n_examples : end] = values
            if array.n_chunks:
                dataset = virtual_dataset(replace(found, arrays=(array,), coordinates={}))
                virtual_dataset_to_icechunk(dataset, target, append_dim="example")
        parts = [*_parts(before.attributes), *_parts(found.attributes)]
        n_examples = before.n_examples + cast("int", found.attributes["n_examples"])
        group = zarr.open_group(target, mode="r+")  # pyright: ignore[reportUnknownMemberType]  # a partial type
        group.attrs.update({"parts": parts, "n_examples": n_examples})  # pyright: ignore[reportCallIssue, reportArgumentType]  # JSON
    else:
        virtual_dataset_to_icechunk(virtual_dataset(found), target)
    for array in found.arrays:
        first = before.n_examples + array.n_in_head if before else 0
        for number, data in array.inline.items():
            # A short chunk is copied into the repository.
            starts = [int(at) * n for at, n in zip(np.unravel_index(number, array.counts), array.chunk, strict=True)]
            ends = [min(at + n, full) for at, n, full in zip(starts, array.chunk, array.shape, strict=True)]
            values = np.frombuffer(data, numpy_dtype(array.data_type)).reshape(array.chunk)
            here = tuple(slice(b - a) for a, b in zip(starts, ends, strict=True))
            there = tuple(slice(a, b) for a, b in zip(starts, ends, strict=True))
            there = (slice(first + starts[0], first + ends[0]), *there[1:])
            opened = zarr.open_array(target, path=array.name, mode="r+")  # pyright: ignore[reportUnknownMemberType]  # a partial type
            opened[there] = values[here]
