"""Some layers and tokens of a store, or its numbers in another dtype, as a new store."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, cast, get_args

from saev_store._runtime.cluster import connected, results
from saev_store._runtime.progress import Progress
from saev_store.core.dtypes import stored_as
from saev_store.core.indexing import Progression
from saev_store.core.layout import Layout
from saev_store.core.rows import Tokens, row_space
from saev_store.documents import Metadata
from saev_store.errors import (
    CorruptShardError,
    IncompleteStoreError,
    ResumeError,
    SaevStoreWarning,
    StoreExistsError,
    WriterConflictError,
    outside,
)
from saev_store.names import CLAIM_PATH, METADATA_NAME, WORK_FOLDER
from saev_store.store.opening import open_documents
from saev_store.store.reader import NumberArray
from saev_store.store.store import ShardStore
from saev_store.transport import Transport
from saev_store.validation import promised_digests
from saev_store.writer import create_store, load_digests
from saev_store.writer._inputs import OverflowPolicy, check_overflow
from saev_store.writer._locks import take_locks
from saev_store.writer._publish import finalize_store, published_already
from saev_store.writer.copying._finished import check_bytes, check_unchanged, identity_now
from saev_store.writer.copying._rounding import Counts, Measurement, RoundingReport, parse_report
from saev_store.writer.copying._source import Kept, batches, promises
from saev_store.writer.copying._whole import (
    PROVENANCE_NAME,
    check_space,
    damaged_since,
    delete_copy,
    has_token_arrays_of,
    other_recording,
)
from saev_store.writer.folder import Folder, check_no_foreigner

if TYPE_CHECKING:
    from distributed import Client

#: A scheduler spends some milliseconds on a part.
MAX_PARTS = 1024
_MARK = f"{WORK_FOLDER}/copy.json"
#: What is there while a finished copy is deleted, so that what is left of it is known after a kill.
_REPLACED = json.dumps({"version": 1, "replaced": True}, indent=1).encode()


def kept_tokens(store: ShardStore, tokens: Tokens) -> Progression:
    """Which tokens, by position, a copy of such tokens has."""
    kept = row_space(store.layout, tokens=tokens).tokens
    # The protocol has no store without content.
    return Progression(0, 1, kept.count + 1) if tokens == "special" else kept


def copy_layers(
    store: ShardStore,
    metadata: Metadata,
    root: Transport,
    *,
    tokens: Progression,
    on_overflow: OverflowPolicy = "raise",
    resume: bool,
    progress: bool | None,
    replace: bool = False,
) -> RoundingReport | None:
    """Write the store that `metadata` describes, with the layers of `store` that it names; see `copy_store`.

    What its dtype has changed is returned; None where it is that of `store`.
    """
    layout, converts = metadata.layout, metadata.dtype != store.metadata.dtype
    folder, was = Folder(root, metadata.hash), identity_now(store)
    _delete_rest(folder)
    if replace:
        _delete_other_recording(folder, store, metadata, tokens, progress=progress)
    mark = _begin(folder, store, on_overflow if converts else None, layout.nbytes)
    writer = create_store(
        root,
        metadata,
        resume="auto" if resume else False,
        exist_ok=resume,
        on_nonfinite="allow",  # a copy does not judge what was recorded
        on_overflow=on_overflow,
        progress=progress,
    )
    if writer.complete:
        report = _published_report(folder, store) if converts else None
        _check_published(folder, store, metadata, tokens, progress=progress)
        return report
    writer.verify = "digests"  # what is published has been read again
    measurement, kept, n_content = None, writer.next_example, layout.content_tokens_per_example
    if converts:
        measurement = Measurement(store.metadata.dtype, metadata.dtype)
    with writer:
        _check_mark(folder, mark)
        check_space(root.url, layout.nbytes - writer.next_example * layout.example_nbytes)
        promised = promises(store)
        provenance = _provenance(store, layout.layers, tokens)
        # What an earlier attempt has written is read again where it is to be measured: the report is about all of it.
        first, of = kept if measurement is None else 0, Kept.of(store, metadata, tokens)
        for start, stored in batches(store, of, promised=promised, first=first, end=layout.n_examples):
            acts = _rounded(stored, start, layout, on_overflow, measurement)
            end, new = start + len(acts), max(start, kept)
            if new < end:
                arrays = {name: values[new:end, :n_content] for name, values in store.token_arrays.items()}
                writer.append(acts[new - start :], **arrays)
        report = None
        if measurement is not None:
            report = measurement.report()
            provenance["conversion"] = report.to_dict()
        check_unchanged(store, was)
        folder.put(PROVENANCE_NAME, _provenance_bytes(provenance))
    root.close()  # a map of a shorter file must not answer for the finished one
    return report


def copy_layers_on_cluster(
    client: Client | str,
    store: ShardStore,
    metadata: Metadata,
    root: Transport,
    *,
    tokens: Progression,
    on_overflow: OverflowPolicy = "raise",
    resume: bool,
    progress: bool | None,
    replace: bool = False,
) -> RoundingReport | None:
    """What `copy_layers` does, by the workers of a cluster: each part of the shards is a task.

    The parts follow from the store alone, so that another cluster can go on where one has stopped.
    """
    layout, folder, was = metadata.layout, Folder(root, metadata.hash), identity_now(store)
    converts = metadata.dtype != store.metadata.dtype
    with connected(client) as cluster:
        _delete_rest(folder)
        if replace:
            _delete_other_recording(folder, store, metadata, tokens, progress=progress)
        mark = _begin(folder, store, on_overflow if converts else None, layout.nbytes)
        if published_already(folder, metadata):
            if not resume:
                raise StoreExistsError(
                    "the copy is there already", where=folder.url, remedy="Open it, or copy elsewhere."
                )
            report = _published_report(folder, store) if converts else None
            _check_published(folder, store, metadata, tokens, progress=progress)
            return report
        if not resume and folder.exists(CLAIM_PATH):
            raise IncompleteStoreError(
                "an unfinished copy is there", where=folder.url, remedy="Continue it with resume=True, or delete it."
            )
        check_space(root.url, layout.nbytes)
        promised = promises(store)
        world, found = min(layout.n_shards, MAX_PARTS), Counts()
        write = partial(_write_part, store.unmapped(), metadata, root, tokens, on_overflow, mark, promised is not None)
        with (
            closing(results(cluster, write, [(rank, world) for rank in range(world)])) as written,
            Progress(
                layout.nbytes, "copying", shown=progress, unit="examples", unit_nbytes=layout.example_nbytes
            ) as bar,
        ):
            for n_examples, counts in written:
                bar.advance(n_examples * layout.example_nbytes)
                found = found.with_(counts)
        check_unchanged(store, was)
        provenance, report = _provenance(store, layout.layers, tokens), None
        if converts:
            report = found.report(store.metadata.dtype, metadata.dtype)
            provenance["conversion"] = report.to_dict()
            if report.n_became_infinite:  # the warnings of workers are in their logs
                message = (
                    f"{report.n_became_infinite:,} numbers that {metadata.dtype} cannot hold recorded as infinity."
                )
                warnings.warn(message, SaevStoreWarning, stacklevel=outside())
        folder.put(PROVENANCE_NAME, _provenance_bytes(provenance))
        finalize_store(root, metadata, verify="digests", progress=progress)
    root.close()
    return report


def _write_part(
    store: ShardStore,
    metadata: Metadata,
    root: Transport,
    tokens: Progression,
    on_overflow: OverflowPolicy,
    mark: bytes,
    is_promised: bool,
    part: tuple[int, int],
) -> tuple[int, Counts]:
    """What a task does: the examples of a part, after those that an earlier attempt has written; how many it has, and what changed."""
    layout, measurement = metadata.layout, None
    writer = create_store(
        root, metadata, resume="auto", part=part, on_nonfinite="allow", on_overflow=on_overflow, progress=False
    )
    (first, end), kept = writer.example_range, writer.next_example
    if metadata.dtype != store.metadata.dtype:
        measurement = Measurement(store.metadata.dtype, metadata.dtype)
    with writer:
        if not writer.complete:
            _check_mark(Folder(root, metadata.hash), mark)
        # As in one process, all of the part is measured.
        first, of = kept if measurement is None else first, Kept.of(store, metadata, tokens)
        # Each task reads the digests: those of a large store would be sent with every task.
        promised = promised_digests(store.transport, store.layout, must_read=True) if is_promised else None
        for start, stored in batches(store, of, promised=promised, first=first, end=end):
            acts = _rounded(stored, start, layout, on_overflow, measurement)
            new, last = max(start, kept), start + len(acts)
            if new < last:
                rows = slice(new, last), slice(layout.content_tokens_per_example)
                arrays = {name: values[rows] for name, values in store.token_arrays.items()}
                writer.append(acts[new - start :], **arrays)
    return end - first, Counts() if measurement is None else measurement.counts


def _rounded(
    stored: NumberArray,
    first_example: int,
    layout: Layout,
    on_overflow: OverflowPolicy,
    measurement: Measurement | None,
) -> NumberArray:
    """What the copy holds of some examples: the same numbers, or where they are measured those of its dtype."""
    if measurement is None:
        return stored
    checked = check_overflow(stored, first_example, layout, on_overflow)
    # Layer by layer, as it was read, each array is contiguous.
    return measurement.rounded(stored.swapaxes(0, 1), checked.swapaxes(0, 1)).swapaxes(0, 1)


def _delete_other_recording(
    folder: Folder, store: ShardStore, metadata: Metadata, tokens: Progression, *, progress: bool | None
) -> None:
    """Delete a copy of another recording, finished or not, and one that is damaged."""
    mark = None
    if is_finished := folder.exists(METADATA_NAME):
        if (
            _provenance_of(folder).get("source_hash") != store.metadata.hash
        ):  # no copy: a recording, or the source itself
            return
        try:
            _check_published(folder, store, metadata, tokens, progress=progress)
        except (StoreExistsError, CorruptShardError):
            is_other = True
        else:
            is_other = False
        folder.transport.close()  # files of the same names may follow
    else:
        mark, identity = folder.read(_MARK), _identity(store)
        is_other = mark is not None and mark not in [
            _mark(identity, policy) for policy in (None, *get_args(OverflowPolicy))
        ]
    if is_other:
        with ExitStack() as held:
            take_locks(folder, held)
            if folder.exists(METADATA_NAME) != is_finished or (mark is not None and folder.read(_MARK) != mark):
                raise WriterConflictError(
                    "another process has just written here", where=folder.url, remedy="Look at its copy."
                )
            if is_finished:
                folder.put(_MARK, _REPLACED)
            delete_copy(folder, but=_MARK)
            folder.delete(WORK_FOLDER)


def _delete_rest(folder: Folder) -> None:
    """Delete what is left of a copy that a call with `replace` was deleting when it was killed."""
    if folder.read(_MARK) == _REPLACED and not folder.exists(METADATA_NAME):
        with ExitStack() as held:
            take_locks(folder, held)
            if folder.read(_MARK) == _REPLACED and not folder.exists(METADATA_NAME):
                delete_copy(folder, but=_MARK)
                folder.delete(WORK_FOLDER)


def _check_published(
    folder: Folder, store: ShardStore, metadata: Metadata, tokens: Progression, *, progress: bool | None
) -> None:
    """An error if a finished copy is damaged, or one of another recording."""
    folder.transport.close()  # a map of an earlier file must not answer for this one
    copy = ShardStore(open_documents(folder.transport.at(folder.name)))
    copy.validate(progress=progress).raise_if_bad()
    was, digests = _provenance_of(folder).get("source_digests"), load_digests(store.transport)
    now = None if digests is None else hashlib.sha256(digests.to_bytes()).hexdigest()
    is_known = was is not None and now is not None
    if is_known and was != now:
        raise other_recording(folder)
    check_bytes(folder, progress=progress)
    if is_known and _has_digests(copy):
        return
    if not (has_token_arrays_of(folder, store, metadata.layout) and _has_vectors_of(copy, store, tokens)):
        raise damaged_since(folder) if is_known else other_recording(folder)


def _has_digests(copy: ShardStore) -> bool:
    """Whether the digests of a finished copy, which it is compared with, are still there, and speak of all its files."""
    digests = load_digests(copy.transport)
    return digests is not None and digests.files.keys() >= set(copy.recorded_files())


def _has_vectors_of(copy: ShardStore, store: ShardStore, tokens: Progression) -> bool:
    """Whether a finished copy has the vectors of a store that has no digests; they are read in both places."""
    of, end = Kept.of(store, copy.metadata, tokens), copy.layout.n_examples
    for start, acts in batches(store, of, promised=None, first=0, end=end):
        copied = copy.read(slice(start, start + len(acts)), dtype="stored")
        kept = stored_as(acts, copied.dtype)
        # Numbers that are too large may have been saturated.
        if not _are_equal(kept, copied) and not _are_equal(
            stored_as(check_overflow(acts, start, copy.layout, "saturate"), copied.dtype), copied
        ):
            return False
    return True


def _are_equal(a: NumberArray, b: NumberArray) -> bool:
    """Whether two arrays have the same bits."""
    return a.tobytes() == b.tobytes()


def _provenance_of(folder: Folder) -> Mapping[str, object]:
    """What a store says of where it comes from; empty where it says nothing that can be read."""
    try:
        found = cast("object", json.loads(folder.read(PROVENANCE_NAME) or b""))
    except (ValueError, RecursionError):
        return {}
    return cast("Mapping[str, object]", found) if isinstance(found, dict) else {}


def _published_report(folder: Folder, store: ShardStore) -> RoundingReport:
    """What the provenance of a finished copy says of its dtype; an error for a store that is no copy of this one."""
    found = _provenance_of(folder)
    report = parse_report(found.get("conversion")) if found.get("source_hash") == store.metadata.hash else None
    if report is None:
        raise StoreExistsError(
            "a store of this name that is no copy of this one is there already",
            where=folder.url,
            remedy="Open it, or copy elsewhere.",
        )
    return report


def _begin(folder: Folder, store: ShardStore, on_overflow: OverflowPolicy | None, nbytes: int) -> bytes:
    """Mark the store that is to be written as a copy of this one: the mark. An error if what is unfinished there is another store."""
    identity = _identity(store)
    mark = _mark(identity, on_overflow)
    if not folder.exists(CLAIM_PATH):
        if folder.exists(METADATA_NAME):
            return mark
        check_no_foreigner(folder, folder.names())
        check_space(folder.url, nbytes)
        if folder.create(_MARK, mark) != "taken":
            return mark
        with ExitStack() as held:
            take_locks(folder, held)
            if folder.read(_MARK) != mark and not folder.exists(CLAIM_PATH):
                folder.put(_MARK, mark)  # of an attempt that came no further
    there = folder.read(_MARK)
    if there == mark or folder.exists(METADATA_NAME):
        return mark
    policies = [policy for policy in get_args(OverflowPolicy) if there == _mark(identity, policy)]
    if not policies or on_overflow is None:
        raise IncompleteStoreError(
            "an unfinished store that is no copy of this one, as it is now, is there",
            where=folder.url,
            remedy="Finish it, or discard it, or copy elsewhere.",
        )
    if policies != ["raise"]:
        raise ResumeError(
            f"the unfinished copy was begun with on_overflow={policies[0]!r}, and this call has {on_overflow!r}",
            where=folder.url,
            remedy="Continue it with the same policy, or throw it away with `discard_unfinished`.",
        )
    folder.put(_MARK, mark)  # nothing of what is there was too large
    return mark


def _check_mark(folder: Folder, mark: bytes) -> None:
    """That what a writer has begun, or goes on with, is still a copy of this store; called while it holds its lock.

    Raises:
        WriterConflictError: another process has begun a copy of another store meanwhile.
    """
    if folder.read(_MARK) != mark:
        raise WriterConflictError(
            "another process has just begun a copy of another store here", where=folder.url, remedy="Copy elsewhere."
        )


def _mark(identity: str, on_overflow: OverflowPolicy | None) -> bytes:
    """The document of an unfinished copy of a store of that identity; with a policy where the copy has another dtype."""
    policy = {} if on_overflow is None else {"on_overflow": on_overflow}
    return json.dumps({"version": 1, "copy_of": identity, **policy}, indent=1).encode()


def _identity(store: ShardStore) -> str:
    """A digest of the source's digests, or without these of its address, and of what tells whether its files were replaced."""
    digests = load_digests(store.transport)
    found = digests.to_bytes().hex() if digests is not None else [store.url, str(identity_now(store))]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def _provenance_bytes(provenance: Mapping[str, object]) -> bytes:
    return (json.dumps(provenance, indent=2) + "\n").encode()


def _provenance(store: ShardStore, layers: tuple[int, ...], tokens: Progression) -> dict[str, object]:
    """Where the copy comes from; without a time stamp, so that equal copies are equal bytes."""
    digests = load_digests(store.transport)
    return {
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
