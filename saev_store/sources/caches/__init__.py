"""Caches of activations that other programs have written, imported as stores. Nothing in them is executed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from saev_store.core.arguments import check_choice
from saev_store.core.dtypes import StoredDtype
from saev_store.core.layout import LayerKey
from saev_store.documents import Metadata
from saev_store.errors import ArgumentError, NotFoundError, brief
from saev_store.sources.address import Url, full_url, locate
from saev_store.sources.caches._cache import Cache, Wanted, check_wanted, entries_of
from saev_store.sources.caches.hidden_states import HiddenStatesCache
from saev_store.sources.caches.memmap import MemmapCache
from saev_store.sources.caches.npy import ENDING, mapped
from saev_store.sources.caches.saelens import SaelensCache
from saev_store.store import ShardStore
from saev_store.store.opening import as_metadata
from saev_store.transport import open_transport
from saev_store.writer.importing import (
    MAX_BLOCK_BYTES,
    Block,
    ImportOptions,
    check_options,
    from_array,
    import_examples,
)

__all__ = ["FORMATS", "import_cache"]

_FOLDERS: tuple[type[Cache], ...] = (SaelensCache, HiddenStatesCache, MemmapCache)
#: The names of the formats.
FORMATS = (*(kind.format for kind in _FOLDERS), "npy")


@dataclass(frozen=True)
class _CacheExamples:
    """A cache with the metadata of its store: what is imported."""

    cache: Cache
    metadata: Metadata

    def blocks(self, first: int, end: int, max_block_bytes: int) -> Iterator[Block]:
        """The examples of the cache."""
        return self.cache.blocks(first, end, max_block_bytes)


def import_cache(
    url: Url,
    root: Url,
    *,
    format: str | None = None,
    family: str,
    ckpt: str | None = None,
    layers: Sequence[LayerKey] | None = None,
    layer_ids: Sequence[int] | None = None,
    context: int | None = None,
    bos_token: int | None = None,
    cls_token: bool | None = None,
    dims: Sequence[str] | None = None,
    dtype: StoredDtype | None = None,
    data: Mapping[str, object] | None = None,
    dataset: str | None = None,
    max_tokens_per_shard: int = 2_400_000,
    max_block_bytes: int = MAX_BLOCK_BYTES,
    resume: bool | Literal["auto"] = "auto",
    verify: bool = True,
    storage_options: Mapping[str, object] | None = None,
    dst_storage_options: Mapping[str, object] | None = None,
    pad: bool | None = None,
    on_nonfinite: Literal["raise", "warn", "allow"] = "raise",
    on_overflow: Literal["raise", "warn", "saturate"] = "raise",
    progress: bool | None = None,
) -> ShardStore:
    """Write a cache of another program as a new store below `root`, bit for bit, and open it.

    docs/importing.md says what becomes of each format. The same call continues after a crash. An argument that a format has no use for
    is refused.

    Args:
        url: The folder of the cache, or a `.npy` file: a path, or any URL that fsspec supports.
        root: The folder of stores; created if need be.
        format: One of `FORMATS`; None looks at the names in the folder.
        family: The family of models, such as "gpt2".
        ckpt: The model; None where the cache names it.
        layers: Labels, or pairs (label, hook point), of the cache's layers in their order, where it does not name them.
        layer_ids: For hidden states of vLLM: the ids that it was given. Id i is what enters layer i, so its label is i - 1.
        context: How many tokens an example has, where documents lie end to end.
        bos_token: For memmaps without `sequence_ranges.pt`: the token id with which each document begins.
        cls_token: For contexts: token 0 of each is a BOS token, for which no token id is stored.
        dims: For a `.npy` file: the names of its axes, as in `ShardStore.from_array`.
        dtype: Of the store; None keeps that of the cache.
        data: Describes the data set; `imported` is added to it.
        dataset: Where the data set is.
        max_tokens_per_shard: Budget of vectors per shard.
        max_block_bytes: Read at most so much at a time, or one example.
        resume: As in `ShardStore.create`; False also refuses a finished store.
        verify: Compare the store with the cache before publishing, as in `ShardStore.from_array`.
        storage_options: For the file system of `url`.
        dst_storage_options: For that of `root`.
        pad: Write the last shard at full size, its tail zeros.
        on_nonfinite: What to do with NaN and infinity.
        on_overflow: What to do with finite numbers that become infinite in the dtype of a 16-bit store.
        progress: Show a bar on stderr; default: when it is a terminal.

    Raises:
        NotFoundError: nothing of a known format is there.
        DocumentError, CorruptShardError: a file breaks a rule of its format, or has another size than it says.
        ArgumentError: what the files do not tell is not given, or does not fit.
        MissingDependencyError: the format needs a library that is not installed.
        ResumeError: the cache has changed since an unfinished import of it was begun.
    """
    if not isinstance(family, str) or not family.strip():  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
        raise ArgumentError(
            f"it is {brief(family)}; it must be a name",
            where="family",
            remedy="Name the family of models, such as gpt2.",
        )
    check_options(max_block_bytes, verify)
    if format is not None:
        check_choice(format, FORMATS, name="format")
    if layers is not None and (isinstance(layers, str) or not isinstance(layers, Sequence)):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
        raise ArgumentError(f"layers is {brief(layers)}; it must be a list of labels", where="layers")
    wanted = Wanted(layers, layer_ids, context, bos_token, cls_token, dims, dtype)
    common: dict[str, Any] = {
        "family": family,
        "dataset": dataset,
        "max_tokens_per_shard": max_tokens_per_shard,
        **({} if ckpt is None else {"ckpt": ckpt}),
    }
    options = ImportOptions(resume, verify, max_block_bytes, pad, on_nonfinite, on_overflow, progress)
    there, name = locate(url, storage_options, engine="auto", transport=None, root_ok=format != "npy")
    if format == "npy" or (format is None and name.endswith(ENDING)):
        array = mapped(there, name, dtype)
        axis = _npy_layers(wanted)
        _check_named(common)
        return from_array(
            array, root, **common, **axis, cls_token=bool(cls_token), dims=dims, dtype=dtype, data=data,
            storage_options=dst_storage_options, **options._asdict(),
        )  # fmt: skip
    folder = there.at(name)
    if folder.name == "mmap" and format != SaelensCache.format:
        folder = open_transport(full_url(there, name), storage_options, engine="pread")
    entries = entries_of(folder)
    kind = _kind([entry.name for entry in entries], format, folder.url)
    check_wanted(kind, wanted)
    cache = kind(there.at(name) if kind is SaelensCache else folder, entries, wanted)
    arguments = {**cache.arguments(), **common}
    _check_named(arguments)
    imported = {
        "format": kind.format,
        "url": folder.url,
        "digest": {"algorithm": "xxh3_128", "scope": "sampled", "value": cache.digest()},
    }
    described = {**(data or {"__class__": "Import"}), "imported": imported}
    metadata = as_metadata({**arguments, "data": described})
    target = open_transport(root, dst_storage_options)
    import_examples(_CacheExamples(cache, metadata), target, options)
    return ShardStore.open(target.at(metadata.hash))


def _kind(names: Sequence[str], format: str | None, where: str) -> type[Cache]:
    """The format of a folder with these names, or the one that is asked for."""
    for kind in _FOLDERS:
        if format == kind.format or (format is None and kind.detect(names)):
            return kind
    raise NotFoundError(
        "there is no cache of a known format",
        where=where,
        remedy=f"Known are {', '.join(FORMATS)}: the folder as its program writes it, or one .npy file.",
    )


def _npy_layers(wanted: Wanted) -> dict[str, Any]:
    """The layer arguments of `from_array`."""
    for name in ("layer_ids", "context", "bos_token"):
        if getattr(wanted, name) is not None:
            raise ArgumentError("it says nothing about an array", where=name, remedy="Leave it out.")
    pairs = [layer if isinstance(layer, tuple) else (layer, "resid_post") for layer in wanted.layers or ()]
    return {"layers": [label for label, _ in pairs] or None, "hook_points": [point for _, point in pairs] or None}


def _check_named(arguments: Mapping[str, object]) -> None:
    if arguments.get("ckpt") is None:
        raise ArgumentError("the cache does not name its model", where="ckpt", remedy="Pass ckpt=….")
