"""A copy of a store, or of some of its layers and tokens, or in another dtype: a new store, written shard by shard."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import numpy.typing as npt

from saev_store.core.layout import RESID_POST, shard_name
from saev_store.documents import Metadata, shards_bytes
from saev_store.errors import CorruptShardError, SaevStoreWarning, TransportError, outside
from saev_store.names import DIGESTS_NAME, SHARDS_NAME
from saev_store.store.reader import NumberArray
from saev_store.store.store import ShardStore
from saev_store.transport import Buffer, Transport
from saev_store.transport.checks import os_errors
from saev_store.transport.durable import fsync_folder, make_folders
from saev_store.writer.create import is_as_written, is_whole
from saev_store.writer.digests import BLOCK_BYTES, Digests, FileDigests, block_ranges, digest, load_digests, n_blocks
from saev_store.writer.inputs import OverflowPolicy, check_overflow
from saev_store.writer.rounding import RoundingReport, joined, parse_report, rounded
from saev_store.writer.shard_writer import ShardWriter
from saev_store.writer.work import Receipt, Work, each, read

PROVENANCE_NAME = "provenance.json"
#: How much of the source is read, and kept in memory, at a time for each shard; or one example.
_BATCH_BYTES = 32 << 20
#: Keys that equal copies have alike for their origin.
_SAME = ("source_hash", "source_digests", "source_identity", "layers", "tokens")


class Rate:
    """A limit on what all threads move together.

    Args:
        max_bytes_per_s: Bytes that are read and written.
        max_requests_per_s: Requests.
    """

    def __init__(self, max_bytes_per_s: float, max_requests_per_s: float) -> None:
        self._max_bytes_per_s, self._max_requests_per_s = max_bytes_per_s, max_requests_per_s
        self._lock, self._free_s = threading.Lock(), 0.0

    def reserve(self, nbytes: int, n_requests: int) -> float:
        """Seconds until so many bytes may move, which no others then may."""
        with self._lock:
            now_s = time.monotonic()
            needed_s = max(nbytes / self._max_bytes_per_s, n_requests / self._max_requests_per_s)
            self._free_s = max(self._free_s, now_s) + needed_s
            return self._free_s - now_s


@dataclass(frozen=True)
class Copy:
    """A copy of a store or of a part of it; picklable without a rate, before its properties are used.

    A writer whose shards come from the source: whole ones are linked, or copied by the service, where that is possible; else what
    they hold is read, compared with the source's digests, if it has some, and written.

    Attributes:
        store: The source.
        root: The folder in which the copy's folder is made.
        metadata: That of the copy.
        rate: Limit on what is moved; None for no limit.
        tokens: Positions of the tokens.
        on_overflow: Policy for numbers that are too large for the copy's dtype.
        is_whole: True if it has all vectors, in files as those of the source, and its documents if the metadata is the same.
    """

    store: ShardStore
    root: Transport
    metadata: Metadata
    rate: Rate | None
    tokens: slice
    on_overflow: OverflowPolicy
    is_whole: bool

    @cached_property
    def promised(self) -> Digests | None:
        """digests.json of the source, which lists every file; None if it has none.

        Labels that were written after the digests may be missing: what is there is taken for right.

        Raises:
            CorruptShardError: it does not list every file: the copy's own digests would call damaged vectors right.
        """
        store, layout, promised = self.store, self.store.layout, load_digests(self.store.transport)
        if promised is None:
            return None
        lengths = {shard_name(shard_idx): layout.used_nbytes(shard_idx) for shard_idx in range(layout.n_shards)}
        for array in store.token_arrays.described():
            if store.token_arrays.is_declared or array.file_name in promised.files:
                lengths[array.file_name] = array.nbytes(layout)
        for name, nbytes in lengths.items():
            if name not in promised.files or promised.files[name].nbytes != nbytes:
                raise CorruptShardError(
                    f"digests.json must list every file; {name} with {nbytes} bytes is not in it",
                    where=f"{store.url}/{DIGESTS_NAME}",
                    remedy="Delete it, and what is there now is taken for right.",
                )
        return promised

    @cached_property
    def stopped(self) -> threading.Event:
        """True as soon as the copy is given up."""
        return threading.Event()

    def pause(self, nbytes: int) -> None:
        """Wait until so many bytes may be read and written; `TransportError` if the copy is given up."""
        wait_s = 0.0 if self.rate is None else self.rate.reserve(2 * nbytes, 2 * n_blocks(nbytes, BLOCK_BYTES))
        if self.stopped.wait(wait_s):
            raise TransportError("the copy was given up", where=self.store.url)

    def check_token_arrays(self) -> None:
        """Compare the token arrays of the source with its digests; `CorruptShardError` if one differs."""
        promised = self.promised
        for array in self.store.token_arrays.described():
            name, nbytes = array.file_name, array.nbytes(self.store.layout)
            file = None if promised is None else promised.files.get(name)
            if promised and file and not is_as_written(self.store.transport, name, file, promised.block_bytes, nbytes):
                raise damaged(self.store, name, 0, nbytes)

    @property
    def work(self) -> Work:
        """The copy while it is unfinished."""
        if not self.is_whole:
            return Work(self.root, self.metadata)
        block_bytes, layout, source = self._block_bytes, self.metadata.layout, self.store.transport
        name, pad = self.metadata.hash if self._is_renamed else self.store.name, None
        if source.local_path is not None and self.root.local_path is not None:  # as long as in the source
            pad = source.size(shard_name(layout.n_shards - 1)) >= layout.shard_nbytes
        return Work(self.root, self.metadata, name=name, pad=pad, block_bytes=block_bytes)

    @property
    def _block_bytes(self) -> int:
        return BLOCK_BYTES if self.promised is None else self.promised.block_bytes

    @property
    def _is_renamed(self) -> bool:
        return self.metadata.raw != self.store.metadata.raw

    @property
    def rounds(self) -> bool:
        """True if the copy has another dtype than its source."""
        return self.metadata.dtype != self.store.metadata.dtype

    def origins(self) -> tuple[str, ...]:
        """Texts that differ for another recording, or another policy: as what this copy is begun, and what it may continue.

        What "raise" has written, all policies would have.
        """
        return tuple(f"{identity_now(self.store)} {policy}" for policy in (self.on_overflow, "raise"))

    def is_kept(self, shard_idx: int, receipt: Receipt) -> bool:
        """Return True if an earlier attempt has copied a shard, which is read again, and has counted what it changed."""
        is_counted = not self.rounds or self._counted(shard_idx) is not None
        return is_counted and is_whole(self.work, shard_idx, receipt)

    def _counted(self, shard_idx: int) -> RoundingReport | None:
        """Changes by rounding in a shard; None if they are not known."""
        try:
            return parse_report(json.loads(read(self.work.work, _report_path(shard_idx)) or b""))
        except (ValueError, RecursionError):
            return None

    # -- a shard -------------------------------------------------------------------------------------------------------

    def copy_shard(self, shard_idx: int) -> int:
        """Copy a shard; its length."""
        work, reports = self.work, list[RoundingReport]()
        first, end = work.layout.example_range(shard_idx)
        if self.is_whole and self._is_placed(work, shard_idx):
            return work.layout.used_nbytes(shard_idx)
        with ShardWriter(work, [shard_idx], lambda: None, on_nonfinite="allow", progress=False) as writer:
            for start, stored in self._batches(first, end):
                self.pause(stored.nbytes)
                acts, stop = stored, start + len(stored)
                if self.rounds:
                    policy = self.on_overflow  # "warn" warns at the end, of all
                    checked = stored if policy == "warn" else check_overflow(stored, start, work.layout, policy)
                    acts, report = rounded(stored, checked, self.metadata.dtype)
                    reports.append(report)
                    if stop == end:  # before the shard counts
                        work.work.put(_report_path(shard_idx), json.dumps(joined(reports).to_dict()).encode())
                writer.append(acts, **self._tokens(start, stop))
        return work.layout.used_nbytes(shard_idx)

    def _tokens(self, start: int, stop: int) -> dict[str, npt.NDArray[np.generic]]:
        n_content = self.metadata.layout.content_tokens_per_example
        return {name: values[start:stop, :n_content] for name, values in self.store.token_arrays.items()}

    def _is_placed(self, work: Work, shard_idx: int) -> bool:
        """Let the disk share the file of a shard, or the service copy it; False, with nothing done, if they cannot."""
        name, source, used = shard_name(shard_idx), self.store.transport, work.layout.used_nbytes(shard_idx)
        size = source.size(name)
        if size not in (used, work.layout.shard_nbytes):
            return False
        with work.lock(f"{shard_idx:06d}"):
            work.check(shard_idx)
            is_linked = self._is_renamed and link(source, work.store, name)
            if not is_linked and not work.store.copy_within(source, name, name):
                return False
            is_read = self.promised is None or not is_linked
            if is_read:
                self.pause(used)
            file = digests_of(work.store, name, used) if self.promised is None else self.promised.files[name]
            if is_read and self.promised and not is_as_written(work.store, name, file, work.block_bytes, size):
                raise TransportError(
                    f"{name} of the copy is not what was sent",
                    where=work.url,
                    remedy="Copy again; if it happens twice, suspect the service, or the source: validate it deeply.",
                )
            first, end = work.layout.example_range(shard_idx)
            tokens = {name: np.ascontiguousarray(rows).tobytes() for name, rows in self._tokens(first, end).items()}
            work.record(shard_idx, file.digests, tokens)
        return True

    def _batches(self, first: int, end: int) -> Iterator[tuple[int, NumberArray]]:
        """First example of each batch, and its activations (examples, layers, tokens, d_model) as they are stored."""
        layout, promised = self.metadata.layout, self.promised
        # Pairs also if the copy has no hook points: the source may have several of a layer.
        hook_points = layout.hook_points or (RESID_POST,) * layout.n_layers
        layers = [self.store.layout.layer_index(pair) for pair in zip(layout.layers, hook_points, strict=True)]
        step, last = max(1, _BATCH_BYTES // self.store.layout.example_nbytes), dict[tuple[int, int], Buffer]()
        for start in range(first, end, step):
            stop = min(start + step, end)
            if promised is None:
                yield start, self.store.read((slice(start, stop), layers, self.tokens), dtype="stored")
            else:
                found = self._compared(promised, start, stop, layers, last)
                yield start, found if self.is_whole else found[:, layers, self.tokens]

    def _compared(
        self, promised: Digests, start: int, stop: int, layers: Sequence[int], last: dict[tuple[int, int], Buffer]
    ) -> NumberArray:
        """(examples, layers, tokens, d_model) as they are stored, compared with digests; layers that are not kept may be anything.

        `last` keeps the last block for the next call, by its shard and number.
        """
        layout, at = self.store.layout, 0
        memory = np.empty((stop - start) * layout.example_nbytes, np.uint8)
        while start < stop:
            shard_idx, in_shard = divmod(start, layout.examples_per_shard)
            n = min(stop - start, layout.examples_in(shard_idx) - in_shard)
            nbytes = n * layout.example_nbytes
            self._fill(promised, memory[at : at + nbytes], shard_idx, in_shard * layout.example_nbytes, layers, last)
            at, start = at + nbytes, start + n
        return memory.view(self.store.dtype).reshape(-1, *layout.shape[1:])

    def _fill(
        self,
        promised: Digests,
        memory: npt.NDArray[np.uint8],
        shard_idx: int,
        offset: int,
        layers: Sequence[int],
        last: dict[tuple[int, int], Buffer],
    ) -> None:
        """Fill memory with the bytes of a shard from `offset` on: the blocks that bytes of these layers are in."""
        layout, name, block_bytes = self.store.layout, shard_name(shard_idx), promised.block_bytes
        end, used = offset + len(memory), layout.used_nbytes(shard_idx)
        layer_nbytes = layout.example_nbytes // layout.n_layers
        examples = np.arange(offset, end, layout.example_nbytes)
        firsts = (examples[:, None] + np.asarray(layers) * layer_nbytes).ravel()
        # Of each block, how many pieces of a layer are in it: begun until then, less those that have ended.
        begun, ended = (np.bincount(at // block_bytes) for at in (firsts, firsts + layer_nbytes - 1 + block_bytes))
        n_in = np.cumsum(np.pad(begun, (0, len(ended) - len(begun))) - ended)
        numbers: list[int] = np.flatnonzero(n_in).tolist()
        new = [number for number in numbers if (shard_idx, number) not in last]
        starts = [number * block_bytes for number in new]
        ends = [min(start + block_bytes, used) for start in starts]
        for number, block in zip(new, self.store.transport.get_ranges(name, starts=starts, ends=ends), strict=True):
            if digest(memoryview(block)) != promised.files[name].digests[number]:
                raise damaged(self.store, name, number * block_bytes, min((number + 1) * block_bytes, used))
            last[shard_idx, number] = block
        for number in numbers:
            block = np.frombuffer(last[shard_idx, number], np.uint8)
            start = number * block_bytes
            low, high = max(start, offset), min(start + len(block), end)
            memory[low - offset : high - offset] = block[low - start : high - start]
        for key in [key for key in last if key != (shard_idx, numbers[-1])]:
            del last[key]

    # -- the finished copy ---------------------------------------------------------------------------------------------

    def documents(self) -> Mapping[str, bytes]:
        """Small files of a whole copy: the source's; of a part where it comes from, and what its dtype has changed."""
        if self.is_whole:
            index, found = self.store.index, read(self.store.transport, PROVENANCE_NAME)
            documents = {SHARDS_NAME: index.raw} if found is None else {SHARDS_NAME: index.raw, PROVENANCE_NAME: found}
            if self._is_renamed:
                key, trailing = self.metadata.count_key, index.trailing_empty
                documents[SHARDS_NAME] = shards_bytes(self.store.layout, key, trailing_empty=trailing)
            return documents
        provenance = self.provenance()
        if self.rounds:
            counted = map(self._counted, range(self.metadata.layout.n_shards))
            report = joined(some for some in counted if some is not None)
            provenance["conversion"] = report.to_dict()
            if report.n_became_infinite:
                message = f"{report.n_became_infinite:,} numbers that {report.dtype} cannot hold recorded as infinity."
                warnings.warn(message, SaevStoreWarning, stacklevel=outside())
        return {PROVENANCE_NAME: (json.dumps(provenance, indent=2) + "\n").encode()}

    def provenance(self) -> dict[str, object]:
        """Origin of the copy; without a time stamp, so that equal copies are equal bytes."""
        promised, store = self.promised, self.store
        found: dict[str, object] = {
            "version": 1,
            "made_by": "saev_store.writer.copying",
            "source": store.url,
            "source_hash": store.metadata.hash,
            "source_digests": None if promised is None else hashlib.sha256(promised.to_bytes()).hexdigest(),
            "source_layers": list(store.layers),
            "layers": list(self.metadata.layout.layers),
            "tokens": [self.tokens.start, self.tokens.stop],
            "source_metadata": json.loads(store.metadata.raw),
        }
        return found if promised is not None else {**found, "source_identity": identity_now(store)}

    def is_made(self, theirs: Digests) -> bool:
        """Return True if a finished store with such digests is this copy. The source of a whole one is read if it has no digests."""
        if not self.is_whole:
            found, ours = provenance_of(self.work.store), self.provenance()
            return all(found.get(key) == ours.get(key) for key in _SAME) and (
                not self.rounds or self.report() is not None
            )
        if set(theirs.files) != set(self.store.recorded_files()):
            return False
        ours, source = self.promised, self.store.transport
        if ours is None:
            files = {name: digests_of(source, name, file.nbytes) for name, file in theirs.files.items()}
            ours = Digests(BLOCK_BYTES, files)
        return ours.block_bytes == theirs.block_bytes and ours.files.items() <= theirs.files.items()

    def report(self) -> RoundingReport | None:
        """Rounding report of a finished copy; None if it has none."""
        return parse_report(provenance_of(self.work.store).get("conversion"))


def _report_path(shard_idx: int) -> str:
    """Path, in the work folder, of what rounding has changed in a shard."""
    return f"rounding/{shard_idx:06d}.json"


def provenance_of(place: Transport) -> dict[str, object]:
    """Content of provenance.json; empty if there is none, or something else."""
    try:
        found = cast("object", json.loads(read(place, PROVENANCE_NAME) or b""))
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, object]", found) if isinstance(found, dict) else {}


def digests_of(place: Transport, name: str, nbytes: int) -> FileDigests:
    """Digests of the blocks of a file."""
    blocks = block_ranges(nbytes, BLOCK_BYTES)
    return FileDigests(
        nbytes, tuple(digest(memoryview(place.get_ranges(name, starts=[i], ends=[j])[0])) for i, j in blocks)
    )


def identity_now(store: ShardStore) -> str:
    """Text that differs if files of a source were replaced: of its digests, or of sizes and versions. Links do not change it."""
    promised = load_digests(store.transport)
    if promised is not None:
        return digest(promised.to_bytes())
    found = each(store.transport, store.transport.stat, store.recorded_files())
    return f"versions:{digest(json.dumps(found).encode())}"


def damaged(store: ShardStore, name: str, start: int, end: int) -> CorruptShardError:
    """The error for a block of the source that differs from its digest."""
    return CorruptShardError(
        f"bytes {start}:{end} of the source differ from its digests.json",
        where=f"{store.url}/{name}",
        remedy="Run `saev-store validate --deep` on the source; repair it first.",
    )


def link(source: Transport, target: Transport, name: str) -> bool:
    """Let two folders of one disk share a file by a hard link; False if that is not possible."""
    if source.local_path is None or target.local_path is None:
        return False
    old, new = os.path.realpath(os.path.join(source.local_path, name)), os.path.join(target.local_path, name)
    with os_errors(new, "create"):
        make_folders(target.local_path)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samefile(old, new):
                return True
            os.unlink(new)  # of an earlier attempt
        try:
            os.link(old, new)
        except OSError:  # not on this file system, not across file systems, not files of this owner: it is copied
            return False
        fsync_folder(target.local_path)
    return True
