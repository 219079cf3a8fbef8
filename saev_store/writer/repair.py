"""`RepairWriter`: records again just the shards that a published store has lost.

Each is written next to the old one and takes its place in one step when it is whole; then digests.json is brought up to date. A
kill between the two leaves a shard that digests.json does not know: damaged as before, and written again by the next repair.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, get_args

from saev_store._runtime.progress import Progress
from saev_store._runtime.threads import ahead, n_cores
from saev_store.core.arguments import check_choice, check_flag
from saev_store.core.layout import shard_name
from saev_store.core.token_arrays import LABELS, TokenArray
from saev_store.errors import (
    AccessError,
    ArgumentError,
    IncompleteStoreError,
    NotFoundError,
    ResumeError,
    SaevStoreError,
)
from saev_store.names import DIGESTS_NAME, METADATA_NAME, WORK_FOLDER
from saev_store.transport import Sink, Transport
from saev_store.writer.create import is_as_written
from saev_store.writer.digests import BLOCK_BYTES, BlockDigester, Digests, FileDigests, load_digests
from saev_store.writer.inputs import NONFINITE_POLICIES, NonfinitePolicy, OverflowPolicy
from saev_store.writer.repair_arrays import State, array_state, compare_rows, rows_in_pieces
from saev_store.writer.shard_writer import Rows, ShardWriter
from saev_store.writer.work import at, is_disk, open_sink, read

if TYPE_CHECKING:
    from saev_store.documents import Metadata


@dataclass(frozen=True)
class RepairedFile:
    """One file that is whole again.

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
    """Create a writer that takes exactly the examples of the damaged shards of a published store.

    Shards that are missing or short are found, and every shard that `lost` touches counts as damaged.

    Args:
        store_transport: The store's own folder.
        metadata: The store's document.
        lost: Half-open ranges of examples that are known to be lost, such as `Report.lost`.
        deep: Compare all shards with digests.json, where there is one.
        exact: Refuse a shard or token array with other digests than those in digests.json, before it takes its place.
        on_nonfinite: As for `create_store`.
        on_overflow: Likewise.
        progress: Show a bar; None shows one on a terminal.

    Raises:
        IncompleteStoreError: the store is not published.
        WriterConflictError: another process is repairing the store.
        DocumentError: digests.json cannot be read.
        ArgumentError: `lost` does not fit the store, or an option breaks its rule.
    """
    deep, exact = check_flag(deep, name="deep"), check_flag(exact, name="exact")
    check_choice(on_nonfinite, NONFINITE_POLICIES, name="on_nonfinite")
    check_choice(on_overflow, get_args(OverflowPolicy), name="on_overflow")
    repair = Repair(store_transport, metadata, exact=exact)
    repair.begin()
    try:
        repair.look()
        writer = RepairWriter(
            repair,
            repair.damaged_shards(lost, deep=deep, progress=progress),
            lambda: None,
            on_nonfinite=on_nonfinite,
            on_overflow=on_overflow,
            progress=progress,
        )
    except BaseException:
        repair.end()
        raise
    if not writer.missing and not writer.lost_arrays and not (writer.absent_arrays and repair.digests is None):
        writer.close()  # there is nothing to do
    return writer


class Repair:
    """The repair of one store, as its shards see it (a `Target`).

    Attributes:
        digests: Content of digests.json; None if there is none.
        arrays: The state of each token array.
        repaired: The files that are whole again.
    """

    def __init__(self, store: Transport, metadata: Metadata, *, exact: bool) -> None:
        self.store = at(store, "")
        self.metadata, self.layout, self.url = metadata, metadata.layout, store.url
        self.is_disk, self.block_bytes = is_disk(store), BLOCK_BYTES
        self.digests: Digests | None = None
        self.arrays: dict[str, State] = {}
        self.repaired: list[RepairedFile] = []
        self._opened, self._exact = store, exact
        self._held, self._mutex = ExitStack(), threading.Lock()

    def begin(self) -> None:
        """Keep other repairs out; `WriterConflictError` if there is one."""
        self._held.enter_context(self.store.lock(f"{WORK_FOLDER}/locks/repair.lock"))

    def look(self) -> None:
        """Look at digests.json and the token arrays."""
        if read(self.store, METADATA_NAME) is None:
            raise IncompleteStoreError(
                "the store is not published; repair is for complete ones that were damaged later",
                where=self.url,
                remedy="Continue it with resume=True.",
            )
        self.digests = load_digests(self.store)
        if self.digests is not None:
            self.block_bytes = self.digests.block_bytes
        for array in self.metadata.recordable:
            self.arrays[array.name] = array_state(self.store, self.metadata, array, self.digests)

    def end(self) -> None:
        """Delete what only a repair under way needs, and let others in."""
        with self._held, suppress(SaevStoreError):
            self.store.delete(WORK_FOLDER)
            self._opened.close()  # what it remembers of files that were replaced

    def damaged_shards(self, lost: Sequence[tuple[int, int]], *, deep: bool, progress: bool | None) -> list[int]:
        """The shards that are missing, short, known to be damaged, or (with `deep`) different from digests.json; ascending."""
        layout, found = self.layout, set[int]()
        for start, end in lost:
            if not 0 <= start <= end <= layout.n_examples:
                raise ArgumentError(
                    f"the range {start}:{end} is not within the {layout.n_examples} examples of the store", where="lost"
                )
            found.update(
                range(start // layout.examples_per_shard, -(-end // layout.examples_per_shard)) if start < end else ()
            )
        whole: list[tuple[str, FileDigests]] = []
        for shard_idx in range(layout.n_shards):
            promised = self._promised(shard_name(shard_idx), layout.used_nbytes(shard_idx))
            if self._size(shard_name(shard_idx)) < layout.used_nbytes(shard_idx):
                found.add(shard_idx)
            elif deep and promised is not None and shard_idx not in found:
                whole.append((shard_name(shard_idx), promised))
        total = sum(promised.nbytes for _, promised in whole)
        with Progress(total, "checking", shown=progress if total else False) as bar:
            answers = ahead(lambda item: self._is_as_written(*item), whole, n_cores() if self.is_disk else 16)
            for (name, promised), is_right in zip(whole, answers, strict=True):
                bar.advance(promised.nbytes)
                if not is_right:
                    found.add(int(name[4:-4]))
        return sorted(found)

    def _size(self, name: str) -> int:
        try:
            return self.store.size(name)
        except (AccessError, NotFoundError):  # also a link to where one may not look
            return 0

    def _is_as_written(self, name: str, promised: FileDigests) -> bool:
        return is_as_written(self.store, name, promised, self.block_bytes, self._size(name))

    def _promised(self, name: str, nbytes: int) -> FileDigests | None:
        """The entry of a file in digests.json, if it is of that length."""
        found = None if self.digests is None else self.digests.files.get(name)
        return found if found is not None and found.nbytes == nbytes else None

    # -- a shard, as `ShardFile` writes it -----------------------------------------------------------------------------

    def lock(self, what: str) -> AbstractContextManager[object]:  # noqa: ARG002  # as `Target` has it
        """Nothing: the whole repair holds a lock."""
        return nullcontext()

    def check(self, shard_idx: int) -> None:
        """Nothing: no other process repairs."""

    def open_shard(self, shard_idx: int) -> Sink:
        """The new file of a shard, as long as the old one was; a lost one as this place would have it."""
        name, used, full = shard_name(shard_idx), self.layout.used_nbytes(shard_idx), self.layout.shard_nbytes
        size = self._size(name)
        is_padded = size == full if size >= used else self.is_disk
        return self.open_file(name, used, full if is_padded else used)

    def open_file(self, name: str, used_nbytes: int, file_nbytes: int) -> Sink:
        """The new version of a file; on a disk next to the old one, in a bucket it appears when it is committed."""
        return open_sink(self.store, self._building(name), used_nbytes=used_nbytes, file_nbytes=file_nbytes)

    def _building(self, name: str) -> str:
        return f"{WORK_FOLDER}/repair/{name}" if self.is_disk else name

    def finish_shard(self, shard_idx: int, sink: Sink, digests: Sequence[str], tokens: Mapping[str, bytes]) -> None:  # noqa: ARG002  # likewise
        """Put the new file of a shard in its place."""
        written = FileDigests(self.layout.used_nbytes(shard_idx), tuple(digests))
        self.replace(shard_name(shard_idx), sink, written, (self.layout.example_range(shard_idx),))

    def replace(self, name: str, sink: Sink, written: FileDigests, examples: tuple[tuple[int, int], ...]) -> None:
        """Put a new file in its place, and its digests into digests.json, if there is one.

        Raises:
            ResumeError: it has to be exact, and is not what was first written. The old file stays.
        """
        promised = self._promised(name, written.nbytes)
        if self._exact and promised not in (None, written):
            raise ResumeError(
                "it would not be what was first written: its digests are others",
                where=f"{self.url}/{name}",
                remedy="It stays as it was. Repair it from what it was first written from.",
            )
        with self._mutex:  # another shard's thread changes digests.json too
            sink.commit()
            if self.is_disk:
                self.store.move(self._building(name), name)
            if self.digests is not None and self.digests.files.get(name) != written:
                self.digests = Digests(self.block_bytes, {**self.digests.files, name: written})
                self.store.put(DIGESTS_NAME, self.digests.to_bytes())
            self.repaired.append(RepairedFile(name, examples, None if promised is None else promised == written))


class RepairWriter(ShardWriter):
    """Takes the examples of the damaged shards of a store, in order; made by `open_repair`.

    A `ShardWriter` whose shards take their places one by one. Token arrays that `append` is given are compared with those of
    the store; none is needed. Those that are lost as a whole are taken by `restore_array`.
    """

    _target: Repair
    _remedy = "Repair again: shards that became whole stay so."

    @property
    def repaired(self) -> list[RepairedFile]:
        """The files that are whole again, in the order in which they became so."""
        return list(self._target.repaired)

    @property
    def lost_arrays(self) -> list[str]:
        """The token arrays that are known to be missing or damaged: `restore_array` takes them."""
        return [name for name, state in self._target.arrays.items() if state == "lost"]

    @property
    def absent_arrays(self) -> list[str]:
        """The token arrays that are not there, and not known to be lost: without digests `restore_array` takes these, too."""
        return [name for name, state in self._target.arrays.items() if state == "absent"]

    def restore_labels(self, labels: object) -> None:
        """`restore_array("labels", labels)`."""
        self.restore_array(LABELS.name, labels)

    def restore_array(self, name: str, values: object) -> None:
        """Write a token array that is lost.

        Args:
            name: Of the array, such as "token_ids".
            values: (n_examples, content tokens): all of them. Or an iterator of NumPy arrays (k, content tokens) that are all
                of them one after the other.

        Raises:
            ArgumentError: the array is not lost, was never recorded, or these have another shape or other values.
            ResumeError: with `exact`: the file would not be what was first written. It stays as it is.
        """
        self._check_usable()
        target, array = self._target, self._array(name)
        state = target.arrays[name]
        if state == "whole" or (state == "absent" and target.digests is not None):
            raise ArgumentError(
                f"{array.file_name} is {state}", where=name, remedy="Repair writes what is lost, and nothing else."
            )
        pieces, nbytes = rows_in_pieces(array, values, self.layout), array.nbytes(self.layout)
        first, digester = (
            next(pieces),
            BlockDigester(target.block_bytes),
        )  # nothing is begun with values that are refused
        sink = target.open_file(array.file_name, nbytes, nbytes)
        try:
            for data in chain([first], pieces):
                sink.write(digester.nbytes, [data])
                digester.update(data)
            target.replace(array.file_name, sink, FileDigests(nbytes, tuple(digester.digests())), ())
        except BaseException:
            sink.abort()
            raise
        target.arrays[name] = "whole"

    def close(self) -> None:
        """Wait for the shards that are whole, and let go of the store; the others stay as damaged as they were."""
        try:
            super().close()
        finally:
            self._target.end()

    def _token_rows(self, given: dict[str, object], n: int, first_example: int) -> Rows:
        """Nothing is recorded; what is given has to be what the store has."""
        examples, left = list[range](), n
        for some in self.missing:
            if left and some.stop > first_example:
                start = max(some.start, first_example)
                examples.append(range(start, min(some.stop, start + left)))
                left -= len(examples[-1])
        for name, values in given.items():
            if values is not None:
                array = self._array(name)
                compare_rows(self._target.store, self.layout, array, values, examples, self._target.arrays[name])

    def _array(self, name: str) -> TokenArray:
        """The token array of a name; `ArgumentError` if the store has none of that name."""
        for array in self.metadata.recordable:
            if array.name == name:
                return array
        raise ArgumentError(
            f"the store has no token array {name}; it has {list(self._target.arrays)}",
            where=name,
            remedy="Leave it out.",
        )
