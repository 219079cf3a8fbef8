"""Some layers and tokens of a store, as a new store."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence

import numpy as np

from saev_store.core.indexing import Progression
from saev_store.core.layout import shard_name
from saev_store.core.rows import Tokens, row_space
from saev_store.documents import Metadata
from saev_store.errors import IncompleteStoreError, NotFoundError
from saev_store.names import CLAIM_PATH, METADATA_NAME, WORK_FOLDER
from saev_store.store.opening import open_documents
from saev_store.store.store import ShardStore
from saev_store.transport import Transport
from saev_store.transport.local.transport import LocalTransport
from saev_store.writer import create_store, load_digests
from saev_store.writer.copying._whole import PROVENANCE_NAME, check_space, delete_copy, other_recording
from saev_store.writer.folder import Folder

#: How much is read, and kept in memory, at a time.
_BATCH_BYTES = 64 << 20
_MARK = f"{WORK_FOLDER}/copy.json"


def kept_tokens(store: ShardStore, tokens: Tokens) -> Progression:
    """Which tokens, by position, a copy of such tokens has."""
    kept = row_space(store.layout, tokens=tokens).tokens
    # The protocol has no store without content.
    return Progression(0, 1, kept.count + 1) if tokens == "special" else kept


def part_of(metadata: Metadata, layer_idx: Sequence[int], tokens: Progression) -> Metadata:
    """What describes a copy of these layers and tokens."""
    layout = metadata.layout
    changes: dict[str, object] = {"layers": [layout.layers[position] for position in layer_idx]}
    if layout.hook_points is not None:
        changes["hook_points"] = [layout.hook_points[position] for position in layer_idx]
    if tokens.count < layout.tokens_per_example:
        has_special = tokens.start == 0 and layout.cls_token
        changes["cls_token"] = has_special
        changes["content_tokens_per_example"] = tokens.count - has_special
    return metadata.replace(**changes)


def copy_layers(
    store: ShardStore,
    metadata: Metadata,
    root: Transport,
    *,
    tokens: Progression,
    resume: bool,
    progress: bool | None,
    replace: bool = False,
) -> None:
    """Write the store that `metadata` describes, with the layers of `store` that it names; see `copy_store`."""
    layout = metadata.layout
    positions = [store.layout.layer_index(layer) for layer in layout.layer_keys]
    folder = Folder(root, metadata.hash)
    if replace and _is_of_other_recording(folder, store):
        with folder.lock("copy"):
            delete_copy(folder)
            folder.delete(WORK_FOLDER)
    _begin(folder, store)
    writer = create_store(
        root,
        metadata,
        resume="auto" if resume else False,
        exist_ok=resume,
        on_nonfinite="allow",  # a copy does not judge what was recorded
        progress=progress,
    )
    if writer.complete:
        ShardStore(open_documents(root.at(metadata.hash))).validate(progress=progress).raise_if_bad()
        if _is_of_other_recording(folder, store):
            raise other_recording(folder)
        return
    writer.verify = "digests"  # what is published has been read again
    check_space(root.url, layout.nbytes - writer.next_example * layout.example_nbytes)
    step = max(1, _BATCH_BYTES // layout.example_nbytes)
    with writer:
        if load_digests(store.transport) is not None:  # else the copy's digests would call damaged vectors right
            store.validate(deep=True, progress=progress).raise_if_bad()
        folder.put(PROVENANCE_NAME, _provenance(store, layout.layers, tokens))
        for start in range(writer.next_example, layout.n_examples, step):
            end = min(start + step, layout.n_examples)
            batch = np.empty((len(positions), end - start, *layout.shape[2:]), dtype=store.dtype)
            for into, layer_idx in zip(batch, positions, strict=True):
                store.read(
                    (slice(start, end), layer_idx, slice(tokens.start, tokens.start + tokens.count)),
                    dtype="stored",
                    out=into,
                )
            n_content = layout.content_tokens_per_example
            arrays = {name: values[start:end, :n_content] for name, values in store.token_arrays.items()}
            writer.append(batch.swapaxes(0, 1), **arrays)
    root.close()  # a map of a shorter file must not answer for the finished one


def _begin(folder: Folder, store: ShardStore) -> None:
    """Mark the store that is to be written as a copy of this one; an error if what is unfinished there is another store."""
    mark = _mark(store)
    if not folder.exists(CLAIM_PATH):
        if folder.exists(METADATA_NAME) or folder.create(_MARK, mark) != "taken":
            return
        if folder.read(_MARK) != mark and not folder.exists(CLAIM_PATH):
            folder.put(_MARK, mark)  # of an attempt that came no further
    if folder.read(_MARK) != mark and not folder.exists(METADATA_NAME):
        raise IncompleteStoreError(
            "an unfinished store that is no copy of this one, as it is now, is there",
            where=folder.url,
            remedy="Finish it, or discard it, or copy elsewhere.",
        )


def _is_of_other_recording(folder: Folder, store: ShardStore) -> bool:
    """Whether a copy, finished or not, was made of another recording than this one, as far as both tell."""
    if not folder.exists(METADATA_NAME):
        mark = folder.read(_MARK)
        return mark is not None and mark != _mark(store)
    raw, digests = folder.read(PROVENANCE_NAME), load_digests(store.transport)
    try:
        was = json.loads(raw)["source_digests"] if raw is not None else None
    except (ValueError, KeyError, TypeError, RecursionError):
        was = None
    return was is not None and digests is not None and was != hashlib.sha256(digests.to_bytes()).hexdigest()


def _mark(store: ShardStore) -> bytes:
    """The document of an unfinished copy: the source's digests, or without these its address, file sizes and times."""
    digests = load_digests(store.transport)
    found: list[object] = [store.url if digests is None else digests.to_bytes().hex()]
    if digests is None:
        for shard_idx in range(store.index.n_listed):
            name = shard_name(shard_idx)
            with contextlib.suppress(NotFoundError):
                found.append((name, store.transport.size(name)))
            if isinstance(store.transport, LocalTransport):
                with contextlib.suppress(OSError):
                    status = os.stat(store.transport.resolve(name))
                    found.append((status.st_ino, status.st_mtime_ns))
    identity = hashlib.sha256(json.dumps(found).encode()).hexdigest()
    return json.dumps({"version": 1, "copy_of": identity}, indent=1).encode()


def _provenance(store: ShardStore, layers: tuple[int, ...], tokens: Progression) -> bytes:
    """Where the copy comes from; without a time stamp, so that equal copies are equal bytes."""
    digests = load_digests(store.transport)
    document = {
        "version": 1,
        "made_by": "saev_store.writer.copying",
        "source": store.url,
        "source_hash": store.metadata.hash,
        "source_digests": None if digests is None else hashlib.sha256(digests.to_bytes()).hexdigest(),
        "source_layers": list(store.layers),
        "layers": list(layers),
        "tokens": [tokens.start, tokens.start + tokens.count],
        "source_metadata": json.loads(store.metadata.raw),
    }
    return (json.dumps(document, indent=2) + "\n").encode()
