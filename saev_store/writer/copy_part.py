"""A copy of some layers and tokens of a store, or of its numbers in another dtype: a new store, written shard by shard."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from saev_store._runtime.threads import ahead
from saev_store.core.layout import RESID_POST, shard_name
from saev_store.errors import SaevStoreWarning, StoreExistsError, outside
from saev_store.store.reader import NumberArray
from saev_store.store.store import ShardStore
from saev_store.transport import Buffer
from saev_store.writer.copies import PROVENANCE_NAME, Copy, damaged, identity_now, provenance_of, short_file
from saev_store.writer.create import is_as_written
from saev_store.writer.digests import Digests, block_ranges, digest, load_digests
from saev_store.writer.inputs import OverflowPolicy, check_overflow
from saev_store.writer.publish import More, join_all
from saev_store.writer.rounding import Counts, RoundingReport, parse_counts, parse_report, rounded
from saev_store.writer.shard_writer import ShardWriter
from saev_store.writer.work import Receipt, Work, is_disk, read

#: How much of the source is read, and kept in memory, at a time; or one example.
_BATCH_BYTES = 64 << 20


@dataclass(frozen=True)
class PartCopy(Copy):
    """Some layers and tokens of each example, or all of them, in the dtype of the copy's metadata.

    If the source has digests, the blocks that these are in are read and compared with them.

    Attributes:
        tokens: Positions of the tokens.
        on_overflow: Policy for numbers that are too large for the copy's dtype.
    """

    tokens: slice
    on_overflow: OverflowPolicy

    @property
    def work(self) -> Work:
        """The copy while it is unfinished."""
        return Work(self.root, self.metadata)

    @property
    def rounds(self) -> bool:
        """True if the copy has another dtype than its source."""
        return self.metadata.dtype != self.store.metadata.dtype

    def origin(self) -> bytes:
        """Text that differs for another recording, or another policy."""
        return self._origin(self.on_overflow)

    def _origin(self, policy: str) -> bytes:
        return json.dumps([super().origin().decode(), policy if self.rounds else ""]).encode()

    def continues(self, there: bytes) -> bool:
        """Return True if what was copied with that origin is kept by this copy: also after "raise", which wrote no such number."""
        return there in (self.origin(), self._origin("raise"))

    def is_kept(self, shard_idx: int, receipt: Receipt) -> bool:
        """Return True if an earlier attempt has copied a shard, which is read again, and has counted what it changed."""
        is_counted = not self.rounds or parse_counts(read(self.work.work, _counts_path(shard_idx))) is not None
        return is_counted and super().is_kept(shard_idx, receipt)

    def copy_shard(self, shard_idx: int) -> int:
        """Write a shard of the copy; its length."""
        work, counts = self.work, Counts()
        first, end = work.layout.example_range(shard_idx)
        n_content = work.layout.content_tokens_per_example
        with ShardWriter(work, [shard_idx], lambda: None, on_nonfinite="allow", progress=False) as writer:
            for start, stored in self._batches(first, end):
                self.check()
                acts, stop = stored, start + len(stored)
                if self.rounds:
                    policy = self.on_overflow  # "warn" warns at the end, of all
                    checked = stored if policy == "warn" else check_overflow(stored, start, work.layout, policy)
                    acts, found = rounded(stored, checked, self.metadata.dtype)
                    counts = counts.with_(found)
                    if stop == end:  # before the shard counts
                        work.work.put(_counts_path(shard_idx), counts.to_bytes())
                arrays = {name: values[start:stop, :n_content] for name, values in self.store.token_arrays.items()}
                writer.append(acts, **arrays)
        return work.layout.used_nbytes(shard_idx)

    def _batches(self, first: int, end: int) -> Iterator[tuple[int, NumberArray]]:
        """First example of each batch, and its activations (examples, layers, tokens, d_model) as they are stored."""
        layout = self.work.layout
        # Pairs also if the copy has no hook points: the source may have several of a layer.
        hook_points = layout.hook_points or (RESID_POST,) * layout.n_layers
        layers = [self.store.layout.layer_index(pair) for pair in zip(layout.layers, hook_points, strict=True)]
        source = None if self.promised is None else _Compared(self.store, self.promised, layers)
        step = max(1, _BATCH_BYTES // self.store.layout.example_nbytes)
        for start in range(first, end, step):
            stop = min(start + step, end)
            if source is None:
                yield start, self.store.read((slice(start, stop), layers, self.tokens), dtype="stored")
            else:
                yield start, source.read(start, stop)[:, layers, self.tokens]

    def check_token_arrays(self) -> None:
        """Compare the token arrays of the source with its digests; `CorruptShardError` if one differs."""
        promised, source = self.promised, self.store.transport
        for array in self.store.token_arrays.described() if promised is not None else ():
            name, nbytes = array.file_name, array.nbytes(self.store.layout)
            if promised is None or not is_as_written(source, name, promised.files[name], promised.block_bytes, nbytes):
                raise damaged(self.store, name, 0, nbytes)

    # -- what is said of the copy --------------------------------------------------------------------------------------

    def others(self, work: Work, receipts: Sequence[Receipt]) -> More:
        """Join the token arrays, and say where the copy comes from and what its dtype has changed."""
        provenance = self.provenance()
        if self.rounds:
            counts = Counts()
            for shard_idx in range(len(receipts)):
                counts = counts.with_(parse_counts(read(work.work, _counts_path(shard_idx))) or Counts())
            report = counts.report(self.store.metadata.dtype, self.metadata.dtype)
            provenance["conversion"] = report.to_dict()
            if report.n_became_infinite:
                message = f"{report.n_became_infinite:,} numbers that {report.dtype} cannot hold recorded as infinity."
                warnings.warn(message, SaevStoreWarning, stacklevel=outside())
        documents = {PROVENANCE_NAME: (json.dumps(provenance, indent=2) + "\n").encode()}
        return More(join_all(work, receipts).files, documents)

    def provenance(self) -> dict[str, object]:
        """Where the copy comes from; without a time stamp, so that equal copies are equal bytes."""
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
        return found if promised is not None else {**found, "source_identity": identity_now(store).decode()}

    def fault(self) -> str:
        """Name what is wrong with a finished copy; "" if it is one of this recording, with files of the right lengths."""
        place = self.work.store
        theirs, ours = provenance_of(place), self.provenance()
        if theirs.get("source_hash") != ours["source_hash"]:
            raise StoreExistsError(
                "a store of this name that is not a copy of this one is there",
                where=place.url,
                remedy="Open it, or copy elsewhere.",
            )
        same = ("source_digests", "source_identity", "layers", "tokens")
        if any(theirs.get(key) != ours.get(key) for key in same) or (self.rounds and self.report() is None):
            return "a copy of another recording with the same metadata is there"
        digests = load_digests(place)
        return "the copy is finished, but its digests.json is gone" if digests is None else short_file(place, digests)

    def report(self) -> RoundingReport | None:
        """What a finished copy says of its dtype; None if it says nothing."""
        return parse_report(provenance_of(self.work.store).get("conversion"))


class _Compared:
    """Reads examples of the source, and compares each block that the kept layers are in; the last one is kept."""

    def __init__(self, store: ShardStore, promised: Digests, layers: Sequence[int]) -> None:
        self._store, self._promised, self._layers = store, promised, layers
        self._n_ahead = 1 if is_disk(store.transport) else 4
        self._last: tuple[int, int, Buffer] | None = None

    def read(self, start: int, stop: int) -> NumberArray:
        """(examples, layers, tokens, d_model) as they are stored; layers that are not kept may be anything."""
        layout, at = self._store.layout, 0
        memory = np.empty((stop - start) * layout.example_nbytes, np.uint8)
        while start < stop:
            shard_idx, in_shard = divmod(start, layout.examples_per_shard)
            n = min(stop - start, layout.examples_in(shard_idx) - in_shard)
            nbytes = n * layout.example_nbytes
            self._fill(memory[at : at + nbytes], shard_idx, in_shard * layout.example_nbytes)
            at, start = at + nbytes, start + n
        return memory.view(self._store.dtype).reshape(-1, *layout.shape[1:])

    def _fill(self, memory: npt.NDArray[np.uint8], shard_idx: int, offset: int) -> None:
        """Fill memory with the bytes of a shard from `offset` on, as far as they are needed."""
        layout, promised, end = self._store.layout, self._promised, offset + len(memory)
        layer_nbytes = layout.example_nbytes // layout.n_layers
        examples = np.arange(offset, end, layout.example_nbytes)
        starts = (examples[:, None] + np.asarray(self._layers) * layer_nbytes).ravel()
        name, transport = shard_name(shard_idx), self._store.transport

        def is_needed(begin: int, stop: int) -> bool:
            before = int(np.searchsorted(starts, stop))
            return before > 0 and int(starts[before - 1]) + layer_nbytes > begin

        def read(block: tuple[int, tuple[int, int]]) -> Buffer:
            number, (begin, stop) = block
            if self._last is not None and self._last[:2] == (shard_idx, number):
                return self._last[2]
            return transport.get_ranges(name, starts=[begin], ends=[stop])[0]

        blocks = enumerate(block_ranges(layout.used_nbytes(shard_idx), promised.block_bytes))
        wanted = [(i, block) for i, block in blocks if block[1] > offset and block[0] < end and is_needed(*block)]
        with closing(ahead(read, wanted, self._n_ahead)) as found:
            for (number, (begin, stop)), block in zip(wanted, found, strict=True):
                if digest(memoryview(block)) != promised.files[name].digests[number]:
                    raise damaged(self._store, name, begin, stop)
                low, high = max(begin, offset), min(stop, end)
                memory[low - offset : high - offset] = np.frombuffer(block, np.uint8)[low - begin : high - begin]
                self._last = shard_idx, number, block


def _counts_path(shard_idx: int) -> str:
    """Path, in the work folder, of what rounding has changed in a shard."""
    return f"rounding/{shard_idx:06d}.json"
