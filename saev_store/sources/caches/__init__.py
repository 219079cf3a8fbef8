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
from saev_store.sources.address import Url, locate
from saev_store.sources.caches.hidden_states import ENDING, HiddenStatesCache
from saev_store.sources.caches.saelens import INFO, STATE, SaelensCache
from saev_store.store import ShardStore
from saev_store.store.opening import as_metadata
from saev_store.transport import open_transport
from saev_store.writer.importing import MAX_BLOCK_BYTES, Block, ImportOptions, import_examples

__all__ = ["FORMATS", "import_cache"]

#: The names of the formats, and the arguments that each takes.
_TAKES = {SaelensCache.format: {"layers", "cls_token"}, HiddenStatesCache.format: {"layers", "layer_ids", "context"}}
FORMATS = tuple(_TAKES)


@dataclass(frozen=True)
class _CacheExamples:
    """A cache with the metadata of its store: the examples that are imported."""

    cache: SaelensCache | HiddenStatesCache
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
    cls_token: bool | None = None,
    dtype: StoredDtype | None = None,
    data: Mapping[str, object] | None = None,
    dataset: str | None = None,
    max_tokens_per_shard: int | None = None,
    max_block_bytes: int = MAX_BLOCK_BYTES,
    resume: bool = True,
    storage_options: Mapping[str, object] | None = None,
    dst_storage_options: Mapping[str, object] | None = None,
    pad: bool | None = None,
    on_nonfinite: Literal["raise", "warn", "allow"] = "raise",
    on_overflow: Literal["raise", "warn", "saturate"] = "raise",
    progress: bool | None = None,
) -> ShardStore:
    """Write a cache of another program as a new store below `root`, bit for bit, and open it.

    docs/importing.md describes the result of each format, and recipes for arrays and other caches. The same call continues
    after a crash. An argument that a format has no use for is refused.

    Args:
        url: The folder of the cache: a path, or any URL that fsspec supports.
        root: The folder of stores; created if need be.
        format: One of `FORMATS`; None looks at the names in the folder.
        family: The family of models, such as "gpt2".
        ckpt: The model; None if the cache names it.
        layers: Labels, or pairs (label, hook point), of the cache's layers in their order, if it does not name them.
        layer_ids: For hidden states of vLLM: the ids that it was given. Id i is what enters layer i, so its label is i - 1.
        context: For hidden states: the number of tokens of an example.
        cls_token: For SAELens: token 0 of each context is the same BOS token, for which no token id is stored.
        dtype: Of the store; None keeps that of the cache.
        data: Describes the data set; `imported` is added to it.
        dataset: The place of the data set.
        max_tokens_per_shard: Budget of vectors per shard; None chooses one, as `new_metadata`.
        max_block_bytes: Read at most so much at a time, or one example.
        resume: As in `ShardStore.from_array`.
        storage_options: For the file system of `url`.
        dst_storage_options: For that of `root`.
        pad: Write the last shard at full size, its tail zeros.
        on_nonfinite: What to do with NaN and infinity.
        on_overflow: What to do with finite numbers that become infinite in the dtype of a 16-bit store.
        progress: Show a bar on stderr; default: when it is a terminal.

    Raises:
        NotFoundError: nothing of a known format is there.
        DocumentError, CorruptShardError: a file breaks a rule of its format, or has another size than its header.
        ArgumentError: what the files do not have is not given, or does not fit.
        MissingDependencyError: the format needs a library that is not installed.
    """
    if not isinstance(family, str) or not family.strip():  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
        raise ArgumentError(f"family is {brief(family)}; it must be a name, such as gpt2", where="family")
    options = ImportOptions(resume, max_block_bytes, pad, on_nonfinite, on_overflow, progress)
    options.check()
    if format is not None:
        check_choice(format, FORMATS, name="format")
    if layers is not None and (isinstance(layers, str) or not isinstance(layers, Sequence)):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
        raise ArgumentError(f"layers is {brief(layers)}; it must be a list of labels", where="layers")
    given = {"layers": layers, "layer_ids": layer_ids, "context": context, "cls_token": cls_token}
    cache, folder = _opened(url, storage_options, format, given, dtype)
    arguments = {**cache.arguments, "family": family, "dataset": dataset, "max_tokens_per_shard": max_tokens_per_shard}
    if ckpt is None and "ckpt" not in arguments:
        raise ArgumentError("the cache does not name its model", where="ckpt", remedy="Pass ckpt=….")
    digest = {"algorithm": "xxh3_128", "scope": "sampled", "value": cache.digest()}
    imported = {"format": cache.format, "url": folder, **cache.imported, "digest": digest}
    described = {**(data or {"__class__": "Import"}), "imported": imported}
    named = {} if ckpt is None else {"ckpt": ckpt}
    metadata = as_metadata({**arguments, **named, "data": described})
    target = open_transport(root, dst_storage_options)
    import_examples(_CacheExamples(cache, metadata), target, options)
    return ShardStore.open(target.at(metadata.hash))


def _opened(
    url: Url,
    storage_options: Mapping[str, object] | None,
    format: str | None,
    given: Mapping[str, Any],
    dtype: StoredDtype | None,
) -> tuple[SaelensCache | HiddenStatesCache, str]:
    """The cache at an address, and its folder without credentials.

    Args:
        url: The address.
        storage_options: Its options.
        format: The format, if the caller names it.
        given: Arguments of which each format takes some; None if they are not given.
        dtype: Of the store.
    """
    there, name = locate(url, storage_options, engine="auto", transport=None, root_ok=True)
    folder = there.at(name)
    entries = folder.list()
    names = {entry.name for entry in entries}
    if format is None:
        is_saelens, is_hidden = {INFO, STATE} <= names, any(name.endswith(ENDING) for name in names)
        if not is_saelens and not is_hidden:
            remedy = "Known are the folders that SAELens, vLLM and speculators write. docs/importing.md has recipes for arrays."
            if ".tmp_shards" in names:
                remedy = "SAELens was ended before it joined what is in .tmp_shards: let its run finish."
            raise NotFoundError("there is no cache of a known format", where=folder.url, remedy=remedy)
        format = FORMATS[0] if is_saelens else FORMATS[1]
    for argument, value in given.items():
        if value is not None and argument not in _TAKES[format]:
            message = f"{argument} has no meaning for a cache of the format {format!r}"
            raise ArgumentError(message, where=argument, remedy="Leave it out.")
    if format == HiddenStatesCache.format and folder.name == "mmap":  # many files are many maps
        folder = open_transport(folder.url, storage_options, engine="pread")
    # Servers list no sizes, so each file of a cache is asked for its own. A broken link is an error then.
    sizes = {
        entry.name: folder.size(entry.path) if entry.size is None else entry.size
        for entry in entries
        if entry.name.endswith((ENDING, ".json", ".arrow")) and not (entry.is_dir or entry.name.startswith("."))
    }
    taken = {argument: given[argument] for argument in sorted(_TAKES[format])}
    kind = SaelensCache if format == SaelensCache.format else HiddenStatesCache
    return kind(folder, sizes, **taken, dtype=dtype), folder.url
