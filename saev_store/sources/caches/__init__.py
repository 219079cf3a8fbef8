"""Caches of activations that other programs have written, imported as stores. Nothing in them is executed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from saev_store.core.arguments import check_count
from saev_store.core.dtypes import StoredDtype
from saev_store.core.layout import RESID_POST, LayerKey
from saev_store.documents.metadata import as_metadata
from saev_store.errors import ArgumentError, NotFoundError, brief
from saev_store.sources.address import Url, locate
from saev_store.sources.caches.hidden_states import ENDING, HiddenStatesCache
from saev_store.sources.caches.saelens import INFO, STATE, SaelensCache
from saev_store.store import ShardStore
from saev_store.transport import open_transport
from saev_store.writer.importing import ImportOptions, import_examples, stored_dtype

__all__ = ["import_cache"]


def import_cache(
    url: Url,
    root: Url,
    *,
    family: str,
    ckpt: str | None = None,
    layers: Sequence[LayerKey] | None = None,
    layer_ids: Sequence[int] | None = None,
    context: int | None = None,
    cls_token: bool | None = None,
    dtype: StoredDtype | None = None,
    max_tokens_per_shard: int | None = None,
    storage_options: Mapping[str, object] | None = None,
    dst_storage_options: Mapping[str, object] | None = None,
    on_nonfinite: Literal["raise", "warn", "allow"] = "raise",
    progress: bool | None = None,
) -> ShardStore:
    """Write a cache of SAELens, vLLM or speculators as a new store below `root`, bit for bit, and open it.

    docs/writing.md describes the result of each format. The same call continues after a crash. An argument that a
    format has no use for is refused.

    Args:
        url: The folder of the cache: a path, or any URL that fsspec supports.
        root: The folder of stores; created if need be.
        family: The family of models, such as "gpt2".
        ckpt: The model; None if the cache names it.
        layers: Labels, or pairs (label, hook point), of the cache's layers in their order, if it does not name them.
        layer_ids: For hidden states of vLLM: the ids that it was given. Id i is what enters layer i, so its label is i - 1.
        context: For hidden states: the number of tokens of an example.
        cls_token: For SAELens: token 0 of each context is the same BOS token, for which no token id is stored.
        dtype: Of the store; None keeps that of the cache.
        max_tokens_per_shard: Budget of vectors per shard; None chooses one, as `new_metadata`.
        storage_options: For the file system of `url`.
        dst_storage_options: For that of `root`.
        on_nonfinite: What to do with NaN and infinity.
        progress: Show a bar on stderr; default: when it is a terminal.

    Raises:
        NotFoundError: nothing of a known format is there.
        DocumentError, CorruptShardError: a file breaks a rule of its format, or has another size than its header.
        ArgumentError: what the files do not have is not given, or does not fit.
        MissingDependencyError: the format needs a library that is not installed.
    """
    options = ImportOptions(on_nonfinite=on_nonfinite, progress=progress)
    for argument, given in (("layers", layers), ("layer_ids", layer_ids)):
        is_list = given is None or (isinstance(given, Sequence) and not isinstance(given, str))  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
        if not is_list or any(isinstance(each, tuple) and len(each) != 2 for each in given or ()):
            raise ArgumentError(f"{argument} is {brief(given)}; it must be a list of labels", where=argument)
    there, name = locate(url, storage_options)
    folder = there.at(name)
    entries = folder.list()
    names = {entry.name for entry in entries}
    # Servers list no sizes, so each file of a cache is asked for its own. A broken link is an error then.
    sizes = {
        entry.name: folder.size(entry.path) if entry.size is None else entry.size
        for entry in entries
        if entry.name.endswith((ENDING, ".json", ".arrow")) and not (entry.is_dir or entry.name.startswith("."))
    }
    if {INFO, STATE} <= names:
        unused: dict[str, object] = {"layer_ids": layer_ids, "context": context}
        cache = SaelensCache(folder, sizes, bool(cls_token))
    elif any(name.endswith(ENDING) for name in sizes):
        unused = {"cls_token": cls_token}
        cache = HiddenStatesCache(folder, sizes, context)
    else:
        remedy = "Known are the folders that SAELens, vLLM and speculators write, complete."
        raise NotFoundError("there is no cache of a known format", where=folder.url, remedy=remedy)
    if argument := next((name for name, value in unused.items() if value is not None), None):
        message = f"{argument} has no meaning for a cache of the format {cache.format!r}"
        raise ArgumentError(message, where=argument, remedy="Leave it out.")
    described = {**cache.arguments, **({} if ckpt is None else {"ckpt": ckpt})}
    if "ckpt" not in described:
        raise ArgumentError("the cache does not name its model", where="ckpt", remedy="Pass ckpt=….")
    axis = cache.axis if layers is None and cache.axis else _layer_axis(layers, layer_ids, cache.n_layers, cache.hooks)
    digest = {"algorithm": "xxh3_128", "scope": "sampled", "value": cache.digest}
    imported = {"format": cache.format, "url": folder.url, **cache.imported, "digest": digest}
    cache.metadata = as_metadata({
        **described, **axis, "family": family, "max_tokens_per_shard": max_tokens_per_shard,
        "dtype": stored_dtype(cache.dtype, dtype), "data": {"__class__": "Import", "imported": imported},
    })  # fmt: skip
    target = open_transport(root, dst_storage_options)
    import_examples(cache, target, options)
    return ShardStore.open(target.at(cache.metadata.hash))


def _layer_axis(
    layers: Sequence[LayerKey] | None,
    layer_ids: Sequence[int] | None,
    n_layers: int,
    names: Sequence[str],
) -> dict[str, object]:
    """`layers` and `hook_points` of a cache that does not have them; numbers in `names` must come in the order that is given."""
    if (layers is None) == (layer_ids is None):
        raise ArgumentError(
            f"the {n_layers} layers of the cache are not named",
            where="layers",
            remedy="Pass layers=…, as labels of blocks, or layer_ids=…, as vLLM was given them: one of the two.",
        )
    pairs = [layer if isinstance(layer, tuple) else (layer, RESID_POST) for layer in layers or ()]
    # vLLM numbers the points between layers: the hidden states of id i enter layer i, so they are what layer i - 1 has left.
    for number in layer_ids or ():
        check_count(number, name="layer_ids", least=0)
        pairs.append((number - 1, RESID_POST) if number else (0, "resid_pre"))
    if len(pairs) != n_layers:
        raise ArgumentError(f"{len(pairs)} layers are named; the cache has {n_layers}", where="layers")
    labels = [label for label, _ in pairs]
    numbers = [re.findall("[0-9]{1,9}", name) for name in names]
    for column in zip(*numbers, strict=True) if len({*map(len, numbers)}) == 1 else ():
        found = [int(number) for number in column]
        if found != labels and sorted(found) == sorted(labels):
            message = f"the layers are given as {labels}; by their names they are {found}"
            raise ArgumentError(message, where="layers", remedy="Give them in that order.")
    return {"layers": labels, "hook_points": [hook_point for _, hook_point in pairs]}
