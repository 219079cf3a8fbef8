"""A copy of a store, or of some of its layers and tokens, or in another dtype: a new store, written shard by shard."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import numpy.typing as npt

from saev_store.core.layout import RESID_POST, shard_name
from saev_store.documents import Metadata, shards_bytes
from saev_store.errors import CorruptShardError, TransportError
from saev_store.names import DIGESTS_NAME, SHARDS_NAME
from saev_store.store.identity import recording_identity
from saev_store.store.reader import NumberArray
from saev_store.store.store import ShardStore
from saev_store.transport import Transport
from saev_store.transport.durable import fsync_folder, make_folders
from saev_store.writer.create import is_as_written
from saev_store.writer.digests import BLOCK_BYTES, Digests, digest, load_digests
from saev_store.writer.inputs import OverflowPolicy
from saev_store.writer.shard_writer import ShardWriter
from saev_store.writer.work import Work, read

PROVENANCE_NAME = "provenance.json"
#: How much of the source is read, and kept in memory, at a time for each shard; or one block or example.
_BATCH_BYTES = 32 << 20


def identity(store: ShardStore) -> str:
    """Text that differs if files of a source were replaced."""
    return recording_identity(store.transport, store.layout, files=store.recorded_files())


@dataclass(frozen=True)
class Copy:
    """A copy of a store or of a part of it, in a folder of stores; picklable before its properties are used.

    `is_whole` if it has all vectors, in files as those of the source, and its documents if the metadata is the same.
    """

    store: ShardStore
    root: Transport
    metadata: Metadata
    tokens: slice
    on_overflow: OverflowPolicy
    is_whole: bool

    @cached_property
    def promised(self) -> Digests | None:
        """digests.json of the source; None if it has none. Labels that were written after it may be missing.

        If it does not list every file it is refused: the copy's own digests would call damaged vectors right.
        """
        store, layout, promised = self.store, self.store.layout, load_digests(self.store.transport)
        if promised is None:
            return None
        for name, nbytes in ((shard_name(idx), layout.used_nbytes(idx)) for idx in range(layout.n_shards)):
            if name not in promised.files or promised.files[name].nbytes != nbytes:
                raise CorruptShardError(
                    f"digests.json must list every shard; {name} with {nbytes} bytes is not in it",
                    where=f"{store.url}/{DIGESTS_NAME}",
                    remedy="Delete it, and what is there now is taken for right.",
                )
        return promised

    @cached_property
    def stopped(self) -> threading.Event:
        """True as soon as the copy is given up."""
        return threading.Event()

    @property
    def work(self) -> Work:
        """The store that is written, with blocks as those of the source."""
        name = self.metadata.hash if self._is_renamed else self.store.name
        return Work(self.root, self.metadata, name=name, block_bytes=self._block_bytes)

    @property
    def _block_bytes(self) -> int:
        return BLOCK_BYTES if self.promised is None else self.promised.block_bytes

    @property
    def _is_renamed(self) -> bool:
        return self.metadata.raw != self.store.metadata.raw

    def check_token_arrays(self) -> None:
        """Compare the token arrays of the source with its digests; `CorruptShardError` if one differs."""
        promised = self.promised
        for array in self.store.token_arrays.described():
            name, nbytes = array.file_name, array.nbytes(self.store.layout)
            file = None if promised is None else promised.files.get(name)
            if promised is None or file is None:
                continue
            is_right = is_as_written(self.store.transport, name, file, promised.block_bytes, nbytes)
            if file.nbytes != nbytes or not is_right:
                raise self._damaged(name, 0, nbytes)

    # -- a shard -------------------------------------------------------------------------------------------------------

    def copy_shard(self, shard_idx: int) -> int:
        """Copy a shard; its length."""
        work = self.work
        first, end = work.layout.example_range(shard_idx)
        if not self._is_linked(work, shard_idx):
            policy = self.on_overflow
            with ShardWriter(
                work, [shard_idx], bool, on_nonfinite="allow", on_overflow=policy, progress=False
            ) as writer:
                for acts in self._examples(first, end):
                    writer.append(acts, **self._tokens(first, first + len(acts)))
                    first += len(acts)
        return work.layout.used_nbytes(shard_idx)

    def _tokens(self, start: int, stop: int) -> dict[str, npt.NDArray[np.generic]]:
        n_content = self.metadata.layout.content_tokens_per_example
        return {name: values[start:stop, :n_content] for name, values in self.store.token_arrays.items()}

    def _is_linked(self, work: Work, shard_idx: int) -> bool:
        """Share the file of a shard by a hard link, if only the documents differ; False if the system cannot."""
        name, source, layout = shard_name(shard_idx), self.store.transport, work.layout
        promised = self.promised if self.is_whole and self._is_renamed else None
        if promised is None or source.size(name) not in {layout.used_nbytes(shard_idx), layout.shard_nbytes}:
            return False
        old, new = source.local_path, work.store.local_path
        if old is None or new is None:
            return False
        with work.lock(f"{shard_idx:06d}"):
            work.check(shard_idx)
            work.store.delete(name)  # of an earlier attempt
            try:
                make_folders(new)
                os.link(os.path.realpath(f"{old}/{name}"), f"{new}/{name}")
                fsync_folder(new)
            except OSError:  # not on this file system, not across file systems, not files of this owner: it is copied
                return False
            tokens = self._tokens(*layout.example_range(shard_idx))
            raw = {array: np.ascontiguousarray(rows).tobytes() for array, rows in tokens.items()}
            work.record(shard_idx, promised.files[name].digests, raw)
        return True

    def _examples(self, first: int, end: int) -> Iterator[NumberArray]:
        """Activations of the source, (examples, layers, tokens, d_model) as they are stored; the parts that are copied."""
        source, layout = self.store.layout, self.metadata.layout
        # Pairs also if the copy has no hook points: the source may have several of a layer.
        hook_points = layout.hook_points or (RESID_POST,) * layout.n_layers
        layers = [source.layer_index(pair) for pair in zip(layout.layers, hook_points, strict=True)]
        while first < end:
            shard_idx, in_shard = divmod(first, source.examples_per_shard)
            n = min(end - first, source.examples_in(shard_idx) - in_shard)
            left = np.empty(0, np.uint8)
            start = in_shard * source.example_nbytes
            for blocks in self._blocks(shard_idx, start, start + n * source.example_nbytes):
                data = np.concatenate([left, *blocks])
                found, left = np.split(data, [len(data) // source.example_nbytes * source.example_nbytes])
                acts = cast("NumberArray", found.view(self.store.dtype).reshape(-1, *source.shape[1:]))
                if len(acts):
                    yield acts if self.is_whole else acts[:, layers, self.tokens]
            first += n

    def _blocks(self, shard_idx: int, start: int, end: int) -> Iterator[list[npt.NDArray[np.uint8]]]:
        """The bytes from `start` to `end` of a shard, some blocks at a time, each compared with its digest if there is one."""
        name, used, block_bytes = shard_name(shard_idx), self.store.layout.used_nbytes(shard_idx), self._block_bytes
        n_blocks = max(1, _BATCH_BYTES // block_bytes)
        for low in range(start // block_bytes * block_bytes, end, n_blocks * block_bytes):
            if self.stopped.is_set():
                raise TransportError("the copy was given up", where=self.store.url)
            starts = range(low, min(low + n_blocks * block_bytes, end), block_bytes)
            ends = [min(at + block_bytes, used) for at in starts]
            found = list[npt.NDArray[np.uint8]]()
            for at, block in zip(starts, self.store.transport.get_ranges(name, starts=starts, ends=ends), strict=True):
                expected = None if self.promised is None else self.promised.files[name].digests[at // block_bytes]
                if expected not in (None, digest(memoryview(block))):
                    raise self._damaged(name, at, at + len(block))
                found.append(np.frombuffer(block, np.uint8)[max(start - at, 0) : end - at])
            yield found

    def _damaged(self, name: str, start: int, end: int) -> CorruptShardError:
        return CorruptShardError(
            f"bytes {start}:{end} of the source differ from its digests.json",
            where=f"{self.store.url}/{name}",
            remedy="Run `saev-store validate --deep` on the source; repair it first.",
        )

    # -- the finished copy ---------------------------------------------------------------------------------------------

    def documents(self) -> Mapping[str, bytes]:
        """Small files of a whole copy: the source's; of a part where it comes from."""
        if not self.is_whole:
            return {PROVENANCE_NAME: (json.dumps(self.provenance(), indent=2) + "\n").encode()}
        index, there = self.store.index, read(self.store.transport, PROVENANCE_NAME)
        raw = index.raw
        if self._is_renamed:
            raw = shards_bytes(self.store.layout, self.metadata.count_key, trailing_empty=index.trailing_empty)
        return {SHARDS_NAME: raw} if there is None else {SHARDS_NAME: raw, PROVENANCE_NAME: there}

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
        return found if promised is not None else {**found, "source_identity": identity(store)}

    def is_made(self, theirs: Digests) -> bool:
        """Return True if a finished store with such digests is this copy. The source of a whole one is read if it has no digests."""
        if not self.is_whole:
            return read(self.work.store, PROVENANCE_NAME) == self.documents()[PROVENANCE_NAME]
        if set(theirs.files) != set(self.store.recorded_files()):
            return False
        source, promised = self.store.transport, self.promised
        if promised is not None:
            return promised.block_bytes == theirs.block_bytes and promised.files.items() <= theirs.files.items()
        return all(
            is_as_written(source, name, file, theirs.block_bytes, source.size(name))
            for name, file in theirs.files.items()
        )
