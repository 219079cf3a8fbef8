"""`RepairWriter`: records again just what a damaged store has lost.

A damaged shard is rebuilt beside the old one, from what survives and what is appended, and takes its place in one step
when it is whole. A crash at any instant leaves the old shard or the new one, and a journal that the next `open_repair`
carries out, so that digests.json always ends up telling of the file that is there.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from saev_store._runtime.progress import Progress
from saev_store.core.arguments import check_flag
from saev_store.core.layout import shard_name
from saev_store.core.token_arrays import LABELS, TokenArray
from saev_store.errors import ArgumentError, CorruptShardError, IncompleteStoreError, ResumeError, SaevStoreError
from saev_store.names import CLAIM_PATH, METADATA_NAME, WORK_FOLDER
from saev_store.transport import Sink, Transport
from saev_store.writer._digests import BLOCK_BYTES, BlockDigester, FileDigests, block_ranges
from saev_store.writer._inputs import (
    NONFINITE_POLICIES,
    NonfinitePolicy,
    OverflowPolicy,
    as_activations,
    check_finite,
    check_overflow,
    rows_as_bytes,
)
from saev_store.writer._repair_arrays import compare_rows, rows_in_pieces
from saev_store.writer._repair_files import (
    Damage,
    DamagedShard,
    Ranges,
    building_sink,
    carry_out,
    find_damage,
    finish_journal,
    size_of,
)
from saev_store.writer.folder import JOURNAL, TEMPORARY, Folder

if TYPE_CHECKING:
    from saev_store.documents import Metadata


@dataclass(frozen=True)
class RepairedFile:
    """What became of one file.

    Attributes:
        name: The file.
        examples: The half-open ranges of examples that were recorded again.
        identical: Whether the file is again what was first written; None without digests.
    """

    name: str
    examples: tuple[tuple[int, int], ...]
    identical: bool | None


def open_repair(
    store_transport: Transport,
    metadata: Metadata,
    *,
    lost: Sequence[tuple[int, int]] = (),
    deep: bool = False,
    exact: bool = False,
    on_nonfinite: NonfinitePolicy = "raise",
    on_overflow: OverflowPolicy = "raise",
    progress: bool | None = None,
) -> RepairWriter:
    """A writer that takes exactly the examples that a published store has lost.

    Finds missing and short shards by itself. In those, and in every shard that `lost` touches, the rest is checked
    against digests.json where there is one, and what does not pass counts as lost too.

    Args:
        store_transport: The store's own folder.
        metadata: The store's document.
        lost: Half-open ranges of examples that are known to be lost, such as `Report.lost`.
        deep: Check all shards against their digests.
        exact: Refuse a rebuilt file that has other digests than digests.json, before it takes its place.
        on_nonfinite: As for `create_store`.
        on_overflow: Likewise.
        progress: Show a bar; None shows one on a terminal.

    Raises:
        WriterConflictError: another process is repairing the store.
        DocumentError: digests.json cannot be read.
        ArgumentError: `lost` does not fit the store.
        ReadOnlyError: the transport cannot write.
    """
    deep, progress = check_flag(deep, name="deep"), check_flag(progress, name="progress", other=None)
    if on_nonfinite not in NONFINITE_POLICIES:
        raise ArgumentError(
            f"on_nonfinite is {on_nonfinite!r}; it must be one of {NONFINITE_POLICIES}", where="on_nonfinite"
        )
    folder = Folder(store_transport, "")
    held = ExitStack()
    try:
        held.enter_context(folder.lock("repair"))
        if not folder.exists(METADATA_NAME):
            raise IncompleteStoreError(
                "the store is not published; repair is for complete ones that were damaged later",
                where=folder.url,
                remedy="Continue it with resume=True.",
            )
        finish_journal(folder, metadata)
        store_transport.close()  # maps of files that were replaced meanwhile
        damage = find_damage(folder, metadata, lost=lost, deep=deep, progress=progress)
        writer = RepairWriter(
            folder,
            metadata,
            damage,
            exact=exact,
            on_nonfinite=on_nonfinite,
            on_overflow=on_overflow,
            progress=progress,
            held=held,
        )
        if damage.is_none:  # nobody has to close what has nothing to do
            writer.let_go()
        return writer
    except BaseException:
        held.close()
        raise


class RepairWriter:
    """Takes the lost examples of a store, in order. Made by `open_repair`; use it as a context manager.

    Attributes:
        repaired: The files that are whole again, in the order in which they became so.
    """

    def __init__(
        self,
        folder: Folder,
        metadata: Metadata,
        damage: Damage,
        *,
        exact: bool,
        on_nonfinite: NonfinitePolicy,
        on_overflow: OverflowPolicy,
        progress: bool | None,
        held: ExitStack,
    ) -> None:
        self.repaired: list[RepairedFile] = []
        self._folder = folder
        self._metadata, self._layout = metadata, metadata.layout
        self._digests = digests = damage.digests
        self._block_bytes = digests.block_bytes if digests is not None else BLOCK_BYTES
        # The examples that are still to be appended, in order.
        self._todo = deque((shard, start, end) for shard in damage.shards for start, end in shard.lost)
        self._arrays = damage.arrays
        self._exact, self._on_nonfinite, self._on_overflow = exact, on_nonfinite, on_overflow
        self._held = held
        self._sink: Sink | None = None
        self._digester = BlockDigester(self._block_bytes)
        self._closed = self._has_let_go = False
        self._failed = False
        n_lost, each = self.n_missing, self._layout.example_nbytes
        self._progress = Progress(
            n_lost * each, "repairing", shown=progress if n_lost else False, unit="examples", unit_nbytes=each
        )

    @property
    def url(self) -> str:
        """Where the store is."""
        return self._folder.url

    @property
    def missing(self) -> list[tuple[int, int]]:
        """The half-open ranges of examples that are still to be appended, in that order; empty when all are there."""
        merged: Ranges = []
        for _, start, end in self._todo:
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        return merged

    @property
    def n_missing(self) -> int:
        """How many examples are still to be appended."""
        return sum(end - start for _, start, end in self._todo)

    @property
    def labels_lost(self) -> bool:
        """Whether labels.bin is known to be missing or damaged: `restore_labels` takes them."""
        return self._arrays.get(LABELS.name) == "lost"

    @property
    def lost_arrays(self) -> list[str]:
        """The token arrays that are known to be missing or damaged: `restore_array` takes them."""
        return [name for name, state in self._arrays.items() if state == "lost"]

    @property
    def absent_arrays(self) -> list[str]:
        """The token arrays that are not there, and not known to be lost: without digests `restore_array` takes these, too."""
        return [name for name, state in self._arrays.items() if state == "absent"]

    def append(self, acts: object, labels: object = None, **token_arrays: object) -> None:
        """Add the next missing examples.

        Args:
            acts: As for `ShardWriter.append`: the examples that `missing` begins with.
            labels: Only compared with those that the store still has.
            token_arrays: Likewise, by name; none of them is needed.

        Raises:
            ArgumentError: wrong shape, dtype or values; more examples than are missing; other labels than the store's.
            CorruptShardError: what had survived changes while it is being copied.
            ResumeError: with `exact`: a file would not be what was first written. Nothing of it takes its place.
        """
        self._check_open()
        batch = as_activations(acts, self._layout)
        if len(batch) > self.n_missing:
            raise ArgumentError(
                f"{len(batch)} examples were appended, {self.n_missing} are missing",
                where="acts",
                remedy="See `missing`.",
            )
        pieces = self._next_ranges(len(batch))
        for name, values in {"labels": labels, **token_arrays}.items():
            if values is not None:
                array = self._array(name)
                compare_rows(self._folder, self._layout, array, values, pieces, state=self._arrays[name])
        checked: list[npt.NDArray[np.generic]] = []
        at = 0
        for start, end in pieces:  # before any of them is written
            part = batch[at : at + end - start]
            check_finite(part, start, self._on_nonfinite)
            checked.append(check_overflow(part, start, self._layout, self._on_overflow))
            at += end - start
        try:
            for part in checked:
                self._fill(part)
        except BaseException:
            self._failed = True
            raise

    def restore_labels(self, labels: object) -> None:
        """`restore_array("labels", labels)`."""
        self.restore_array(LABELS.name, labels)

    def restore_array(self, name: str, values: object) -> None:
        """Write a token array anew.

        Args:
            name: Of the array, such as "token_ids".
            values: (n_examples, content tokens): all of them. Or an iterator of NumPy arrays (k, content tokens) that are all
                of them one after the other.

        Raises:
            ArgumentError: the array is not lost, was never recorded, or these have another shape or other values.
            ResumeError: with `exact`: the file would not be what was first written. It stays as it is.
        """
        self._check_open()
        array = self._array(name)
        state, file_name = self._arrays[name], array.file_name
        if state == "whole":
            raise ArgumentError(f"{file_name} is whole", where=name, remedy="Repair does not change what is there.")
        if state == "absent" and self._digests is not None:
            raise ArgumentError(f"this store was written without {name}", where=name, remedy="They make another store.")
        nbytes, digester = array.nbytes(self._layout), BlockDigester(self._block_bytes)
        pieces = rows_in_pieces(array, values, self._layout)
        first = next(pieces)  # nothing is begun with values that are refused
        sink = building_sink(self._folder, file_name, used_nbytes=nbytes, file_nbytes=nbytes)
        try:
            for data in chain([first], pieces):
                sink.write(digester.nbytes, [data])
                digester.update(memoryview(data))
            promised = self._digests.files.get(file_name) if self._digests is not None else None
            self._replace(file_name, sink, digester, (), promised)
        except BaseException:
            sink.abort()
            raise
        self._arrays[name] = "whole"

    def note(self, text: str) -> None:
        """Show a few words behind the bar, where there is one."""
        self._progress.note(text)

    def close(self) -> None:
        """Let go of the store; shards that are not whole yet stay as damaged as they were. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._sink is not None:
                self._sink.abort()
            self._progress.close()
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Let go of the store and delete what only a repair under way needs."""
        if self._has_let_go:
            return
        self._has_let_go = True
        try:
            # With a claim the files of a writer are there; with a journal this repair was cut short, and the next one
            # needs it to know what digests.json has to say.
            if not self._folder.exists(CLAIM_PATH) and not self._folder.exists(JOURNAL):
                names = () if self._folder.is_far else self._folder.names() or ()
                for name in (*(name for name in names if name.startswith(TEMPORARY)), WORK_FOLDER):
                    self._folder.delete(name)
        finally:
            self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            with contextlib.suppress(SaevStoreError):
                self.close()
            return
        self.close()
        if self._todo:
            raise IncompleteStoreError(
                f"{self.n_missing} examples are still missing, from example {self.missing[0][0]} on; "
                f"{len(self.repaired)} files are whole again",
                where=self.url,
                remedy="Repair again with the rest.",
            )

    # -- inside --------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed or self._failed:
            raise ArgumentError(
                "this repair is closed" if self._closed else "an earlier call was cut short by an error",
                where=self.url,
                remedy="Open a new one: shards that became whole stay so.",
            )

    def _next_ranges(self, k: int) -> Ranges:
        """The next `k` missing examples, cut at shards."""
        pieces: Ranges = []
        for _, start, end in self._todo:
            n = min(k, end - start)
            if n == 0:
                break
            pieces.append((start, start + n))
            k -= n
        return pieces

    def _array(self, name: str) -> TokenArray:
        """The token array of a name; `ArgumentError` if the store has none of that name."""
        for array in self._metadata.recordable:
            if array.name == name:
                return array
        raise ArgumentError(
            f"the store has no token array {name}; it has {list(self._arrays)}", where=name, remedy="Leave it out."
        )

    def _fill(self, rows: npt.NDArray[np.generic]) -> None:
        """Write the next missing examples, all of one shard, and what survives before them."""
        layout, (shard, first, end) = self._layout, self._todo[0]
        name, used = shard_name(shard.shard_idx), layout.used_nbytes(shard.shard_idx)
        shard_start, _ = layout.example_range(shard.shard_idx)
        if self._sink is None:
            self._sink = building_sink(self._folder, name, used_nbytes=used, file_nbytes=self._file_nbytes(name, used))
            self._digester = BlockDigester(self._block_bytes)
        self._copy_until(self._sink, name, (first - shard_start) * layout.example_nbytes)
        step = max(1, self._block_bytes // layout.example_nbytes)
        for i in range(0, len(rows), step):
            self._write(self._sink, rows_as_bytes(rows[i : i + step], layout).data)
        self._progress.advance(len(rows) * layout.example_nbytes)
        if first + len(rows) < end:
            self._todo[0] = (shard, first + len(rows), end)
            return
        is_last = len(self._todo) == 1 or self._todo[1][0] is not shard
        if is_last:
            self._copy_until(self._sink, name, used)
            self._check_survivors(shard)
            self._replace(name, self._sink, self._digester, tuple(shard.lost), shard.promised)
            self._sink = None
        self._todo.popleft()

    def _write(self, sink: Sink, data: memoryview) -> None:
        sink.write(self._digester.nbytes, [data])
        self._digester.update(data)

    def _copy_until(self, sink: Sink, name: str, end: int) -> None:
        """Copy what survives between the last byte written and `end`."""
        while (start := self._digester.nbytes) < end:
            stop = min(end, start + self._block_bytes)
            self._write(sink, memoryview(self._folder.get_range(name, start, stop)))

    def _check_survivors(self, shard: DamagedShard) -> None:
        """Blocks without a lost example must still have their old digests."""
        if shard.promised is None:
            return
        shard_start, _ = self._layout.example_range(shard.shard_idx)
        nbytes = self._layout.example_nbytes
        gone = [((start - shard_start) * nbytes, (end - shard_start) * nbytes) for start, end in shard.lost]
        blocks = block_ranges(shard.promised.nbytes, self._block_bytes)
        for (start, end), old, new in zip(blocks, shard.promised.digests, self._digester.digests(), strict=True):
            if old != new and not any(low < end and start < high for low, high in gone):
                raise CorruptShardError(
                    f"bytes {start}:{end} changed while they were copied",
                    where=self._folder.where(shard_name(shard.shard_idx)),
                    remedy="Is the disk failing? Repair again.",
                )

    def _file_nbytes(self, name: str, used: int) -> int:
        """As long as the file was; where it is gone, as this back end would have written it."""
        size, full = size_of(self._folder, name), self._layout.shard_nbytes
        padded = size == full if size is not None and size >= used else self._folder.writes.pads
        return full if padded else used

    def _replace(
        self,
        name: str,
        sink: Sink,
        digester: BlockDigester,
        examples: tuple[tuple[int, int], ...],
        promised: FileDigests | None,
    ) -> None:
        """Put a rebuilt file in its place."""
        new = FileDigests(digester.nbytes, tuple(digester.digests()))
        if self._exact and promised is not None and promised != new:
            n_other = sum(old != now for old, now in zip(promised.digests, new.digests, strict=False))
            raise ResumeError(
                f"it would not be what was first written: {n_other} of {len(new.digests)} blocks of {self._block_bytes} bytes "
                "have other digests",
                where=self._folder.where(name),
                remedy="It stays as it was. Repair it from what it was first written from.",
            )
        try:
            carry_out(self._folder, name, new, self._block_bytes, sink)
        except BaseException:
            self._failed = True  # there is one journal: another file's would take its place
            raise
        self.repaired.append(RepairedFile(name, examples, None if promised is None else promised == new))
