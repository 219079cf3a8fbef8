"""`copy_store`: copies a store from any address to any other, checked; or a part of it, or in another dtype, as a new store."""

# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self, get_args

from saev_store.core.arguments import check_choice, check_flag, check_number
from saev_store.core.dtypes import StoredDtype
from saev_store.core.layout import LayerKey
from saev_store.core.rows import Tokens, row_space
from saev_store.documents import Metadata
from saev_store.errors import ArgumentError, brief
from saev_store.store.store import ShardStore
from saev_store.transport import open_transport
from saev_store.writer.copies import Rate, make_copy
from saev_store.writer.copy_metadata import in_dtype, in_protocol, part_of
from saev_store.writer.copy_part import PartCopy
from saev_store.writer.copy_whole import WholeCopy
from saev_store.writer.inputs import OverflowPolicy
from saev_store.writer.rounding import RoundingReport, unchanged

if TYPE_CHECKING:
    from distributed import Client

Url = str | os.PathLike[str]


class Copied(str):
    """The address of a copy.

    Attributes:
        rounding: What the copy's dtype has changed; None where no dtype was asked for.

    >>> Copied("/scratch/shards/1a2b3c4d").rounding is None
    True
    """

    __slots__ = ("rounding",)

    rounding: RoundingReport | None

    def __new__(cls, url: str, rounding: RoundingReport | None = None) -> Self:
        copied = super().__new__(cls, url)
        copied.rounding = rounding
        return copied


def copy_store(
    src: Url,
    dst: Url,
    *,
    layers: Sequence[LayerKey] | None = None,
    tokens: Tokens = "all",
    protocol: str | None = None,
    dtype: StoredDtype | None = None,
    on_overflow: OverflowPolicy = "raise",
    storage_options: Mapping[str, object] | None = None,
    dst_storage_options: Mapping[str, object] | None = None,
    resume: bool = True,
    replace: bool = False,
    max_mb_per_s: float | None = None,
    max_requests_per_s: float | None = None,
    client: Client | str | None = None,
    progress: bool | None = None,
) -> Copied:
    """Copy a store below `dst`, and return the address of the complete, checked copy.

    Without `layers`, `tokens` and `dtype` the copy has the same folder name, documents and vectors, byte for byte. Every block is
    digested while it is read, compared with the source's digests.json if there is one, read back from the copy and compared. The
    copy always has a digests.json. Zeros that pad the last shard are a hole on this machine, and absent in buckets.

    With `layers` or `tokens` the copy is a new store that holds only these layers, in the order of the source, and only these
    tokens, with a hash of its own and a `provenance.json` that names its origin. If the source has a digests.json, the blocks that
    they are in are compared. The protocol has no store without content, so `tokens="special"` includes the first content token.

    With `protocol` the documents are written as those of that protocol version, so the folder has another name. Keys that the
    version does not know are left out. On one disk the shards are clones of the source's files or, if the file system has no
    clones, hard links, and are not read.

    With `dtype` a new store of that dtype is written: as protocol 2.0 if that can say everything, else as 3.0. Numbers are rounded
    to nearest even. `rounding` of the result, which is also `conversion` in the copy's `provenance.json`, has what that changed;
    it is the same however often the copy was interrupted.

    `metadata.json` comes last, so a partial copy never opens. After an interruption the same call continues: whole shards are
    read again and kept, the others copied.

    Args:
        src: The store to copy, a path or URL.
        dst: The folder in which the copy's folder `<HASH>` is made; naming that folder itself is fine, too.
        layers: Labels of the layers to keep, or pairs (label, hook point); None is all of them.
        tokens: `"content"` leaves special tokens out; `"special"` keeps them and the first content token.
        protocol: "1.0.0", "2.0" or "2.1"; None keeps the source's. Programs that insist on the keys of 2.1 read "2.1" only.
        dtype: "bfloat16", "float16" or "float32"; None keeps the source's.
        on_overflow: What to do with finite numbers that become infinite in `dtype`: "raise", "warn" and store infinity, or
            "saturate" at its largest finite number. A copy is continued with the same policy; after "raise" with any.
        storage_options: For the source's file system.
        dst_storage_options: For the destination's file system.
        resume: Continue an unfinished copy, and accept a finished one; False refuses both.
        replace: Delete a copy that is damaged, or of an earlier recording with the same metadata, and copy again; False refuses.
        max_mb_per_s: Limit of megabytes (10**6 bytes) per second that a copy of all vectors moves, read and written together.
        max_requests_per_s: Limit of its requests per second, to both places together.
        client: A `distributed.Client` or the address of a scheduler: its workers copy the shards, one for each task. Without
            limits; both addresses must mean the same to all workers.
        progress: A bar on standard error; None shows it on a terminal.

    Raises:
        NotFoundError, DocumentError, CorruptShardError: the source is not a whole store, or does not match its digests.
        LayerNotFoundError, SelectionError: it does not hold one of `layers`, or has no such tokens.
        StoreExistsError: another store, a copy of another recording (unless `replace`), or with `resume=False` this one is there.
        IncompleteStoreError: `resume` is False and there is an unfinished copy; or an unfinished store of something else.
        WriterConflictError: another process is copying to there.
        ArgumentError: a limit is not positive, or there is a client and a limit; the source's metadata cannot be written in that
            protocol; there is no such dtype, or it cannot hold a number and `on_overflow` is "raise".
        MissingDependencyError: `client` is an address, and distributed is not installed.
        TransportError: bytes could not be moved, or did not arrive as they were sent; or files of the source were replaced.
    """
    resume, replace = check_flag(resume, name="resume"), check_flag(replace, name="replace")
    progress = check_flag(progress, name="progress", other=None)
    check_choice(on_overflow, get_args(OverflowPolicy), name="on_overflow")
    rate = _rate(max_mb_per_s, max_requests_per_s, client)
    with ShardStore.open(src, storage_options) as store:
        store.validate().raise_if_bad()  # the sizes of a remote store have not been looked at by opening it
        target = target_of(store, dst, layers, tokens, protocol, dtype)
        root, rounding = open_transport(target.root, dst_storage_options), None
        if target.is_whole:
            copy = WholeCopy(store, root, target.metadata, rate)
            make_copy(copy, resume=resume, replaces=replace, client=client, progress=progress)
        else:
            copy = PartCopy(store, root, target.metadata, rate, target.tokens, on_overflow)
            copy.check_token_arrays()
            make_copy(copy, resume=resume, replaces=replace, client=client, progress=progress)
            rounding = copy.report()
        if dtype is not None and rounding is None:
            layout = target.metadata.layout
            rounding = unchanged(dtype, layout.n_examples * layout.vectors_per_example)
    return Copied(target.url if root.local_path is None else root.at(target.name).url, rounding)


def _rate(max_mb_per_s: object, max_requests_per_s: object, client: object) -> Rate | None:
    """The limit of a copy; None if there is none."""
    if max_mb_per_s is None and max_requests_per_s is None:
        return None
    if client is not None:
        raise ArgumentError(
            "there are a client and a limit, which each worker would count by itself",
            where="client",
            remedy="Copy without a limit, with fewer workers; or without a client.",
        )
    most = float("inf")
    return Rate(
        most if max_mb_per_s is None else 1e6 * check_number(max_mb_per_s, name="max_mb_per_s"),
        most if max_requests_per_s is None else check_number(max_requests_per_s, name="max_requests_per_s"),
    )


class Target(NamedTuple):
    """The place and the content of a copy.

    Attributes:
        root: The folder in which its folder is made.
        name: That folder.
        metadata: Its document.
        tokens: Its tokens, by position.
        is_whole: True if it has all vectors, in files as those of the source.
    """

    root: str
    name: str
    metadata: Metadata
    tokens: slice
    is_whole: bool

    @property
    def url(self) -> str:
        """The copy's address."""
        return f"{self.root.rstrip('/')}/{self.name}"


def target_of(
    store: ShardStore,
    dst: Url,
    layers: Sequence[LayerKey] | None,
    tokens: Tokens,
    protocol: str | None = None,
    dtype: str | None = None,
) -> Target:
    """The place and the content of the copy that `copy_store` makes when it is called like this.

    Raises:
        ArgumentError, LayerNotFoundError, SelectionError: see `copy_store`.
    """
    if not isinstance(dst, (str, os.PathLike)) or not os.fspath(dst):
        raise ArgumentError(f"dst is {brief(dst)}; it must be a path or a URL", where="dst")
    if protocol is not None and not isinstance(protocol, str):
        raise ArgumentError(f"protocol is {brief(protocol)}; it must be a version such as '2.0'", where="protocol")
    layout = store.layout
    kept = row_space(layout, tokens=tokens).tokens
    n_kept = kept.count + (tokens == "special")  # the protocol has no store without content
    chosen = tuple(range(layout.n_layers))
    if layers is not None:
        if not isinstance(layers, Sequence) or isinstance(layers, str):
            raise ArgumentError(f"layers is {brief(layers)}; it must be a list of layers", where="layers")
        chosen = tuple(sorted({layout.layer_index(layer) for layer in layers}))
        if not chosen:
            remedy = f"Choose some of {list(layout.layer_keys)}."
            raise ArgumentError("no layer is left to copy", where="layers", remedy=remedy)
    is_whole = len(chosen) == layout.n_layers and n_kept == layout.tokens_per_example
    metadata = store.metadata if is_whole else part_of(store.metadata, chosen, kept.start, n_kept)
    if dtype is not None and dtype != metadata.dtype:
        arrays = {name: store.token_arrays.declared(name).dtype for name in store.token_arrays}
        metadata, is_whole = in_dtype(metadata, dtype, protocol=protocol, token_arrays=arrays), False
    elif protocol is not None:
        metadata = in_protocol(metadata, protocol)
    name = store.name if metadata is store.metadata else metadata.hash
    root = os.fspath(dst).rstrip("/") or "/"
    head, slash, tail = root.rpartition("/")
    if tail == name:  # the copy itself is named, not the folder above it
        root = head or slash or "."
    return Target(root, name, metadata, slice(kept.start, kept.start + n_kept), is_whole)
