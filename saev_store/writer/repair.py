"""`RepairWriter`: records again just the shards that a published store has lost.

Each is written next to the old one and takes its place in one step when it is whole; then digests.json is brought up to date. A
kill between the two leaves a shard that digests.json does not know: damaged as before, and written again by the next repair.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast, get_args

import numpy as np

from saev_store.core.arguments import check_choice
from saev_store.core.layout import shard_name
from saev_store.core.token_arrays import TokenArray
from saev_store.errors import AccessError, ArgumentError, NotFoundError, ResumeError, SaevStoreError, brief
from saev_store.names import DIGESTS_NAME, WORK_FOLDER
from saev_store.transport import Sink, Transport
from saev_store.writer.create import is_as_written
from saev_store.writer.digests import BLOCK_BYTES, BlockDigester, Digests, FileDigests, load_digests
from saev_store.writer.inputs import NONFINITE_POLICIES, NonfinitePolicy, OverflowPolicy, as_array, token_rows
from saev_store.writer.shard_writer import ShardWriter
from saev_store.writer.work import Target

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
        exact: Refuse a file with other digests than those in digests.json, before it takes its place.
        on_nonfinite: As for `create_store`.
        on_overflow: Likewise.
        progress: Show a bar; None shows one on a terminal.

    Raises:
        WriterConflictError: another process is repairing the store.
        DocumentError: digests.json cannot be read.
        ArgumentError: an option breaks its rule.
    """
    check_choice(on_nonfinite, NONFINITE_POLICIES, name="on_nonfinite")
    check_choice(on_overflow, get_args(OverflowPolicy), name="on_overflow")
    with ExitStack() as held:
        held.enter_context(store_transport.lock(f"{WORK_FOLDER}/locks/repair.lock"))
        held.callback(_forget, store_transport)
        repair = Repair(store_transport, metadata, exact=exact)
        writer = RepairWriter(
            repair, repair.damaged_shards(lost), bool,
            on_nonfinite=on_nonfinite, on_overflow=on_overflow, progress=progress,
        )  # fmt: skip
        repair.held = held.pop_all()
    return writer


def _forget(store: Transport) -> None:
    """Delete what only a repair under way needs, and what the caller's transport remembers of files that were replaced."""
    with suppress(SaevStoreError):
        store.delete(WORK_FOLDER)
        store.close()


class Repair(Target):
    """The repair of one store; `held` keeps other repairs out."""

    def __init__(self, store: Transport, metadata: Metadata, *, exact: bool) -> None:
        super().__init__(store.at(""), metadata, BLOCK_BYTES)
        self.arrays = ()
        self.held, self.repaired = ExitStack(), list[RepairedFile]()
        self._exact, self._mutex = exact, threading.Lock()
        self.digests = load_digests(self.store)
        if self.digests is not None:
            self.block_bytes = self.digests.block_bytes
        self.lost_arrays = [array.name for array in metadata.recordable if self._is_lost(array)]

    def _is_lost(self, array: TokenArray) -> bool:
        name, nbytes = array.file_name, array.nbytes(self.layout)
        size, promised = self._size(name), self._promised(name, nbytes)
        if not size:  # before protocol 3.0 only digests.json has whether there were labels
            return self.metadata.declares_token_arrays or promised is not None
        is_right = promised is None or is_as_written(self.store, name, promised, self.block_bytes, nbytes)
        return size != nbytes or not is_right

    def damaged_shards(self, lost: Sequence[tuple[int, int]]) -> list[int]:
        """The shards that are missing, short, or known to be damaged; ascending."""
        layout, found = self.layout, set[int]()
        for start, end in lost:
            found.update(range(start // layout.examples_per_shard, -(-end // layout.examples_per_shard)))
        found.update(i for i in range(layout.n_shards) if self._size(shard_name(i)) < layout.used_nbytes(i))
        return sorted(found)

    def _size(self, name: str) -> int:
        try:
            return self.store.size(name)
        except (AccessError, NotFoundError):  # also a link to where one may not look
            return 0

    def _promised(self, name: str, nbytes: int) -> FileDigests | None:
        """The entry of a file in digests.json, if it is of that length."""
        found = None if self.digests is None else self.digests.files.get(name)
        return found if found is not None and found.nbytes == nbytes else None

    def open_shard(self, shard_idx: int) -> Sink:
        """The new file of a shard, as long as this place would have it."""
        used = self.layout.used_nbytes(shard_idx)
        return self.open_file(shard_name(shard_idx), used, self.layout.shard_nbytes if self.is_disk else used)

    def open_file(self, name: str, used_nbytes: int, file_nbytes: int) -> Sink:
        """The new version of a file; on a disk next to the old one, in a bucket it appears when it is committed."""
        path = self._building(name)
        return self.store.open_sink(path, used_nbytes=used_nbytes, file_nbytes=file_nbytes, replace=True)

    def _building(self, name: str) -> str:
        return f"{WORK_FOLDER}/repair/{name}" if self.is_disk else name

    def finish_shard(self, shard_idx: int, sink: Sink, digests: Sequence[str], tokens: Mapping[str, bytes]) -> None:  # noqa: ARG002  # as `Target` has it
        """Put the new file of a shard in its place."""
        written = FileDigests(self.layout.used_nbytes(shard_idx), tuple(digests))
        self.replace(shard_name(shard_idx), sink, written, (self.layout.example_range(shard_idx),))

    def replace(self, name: str, sink: Sink, written: FileDigests, examples: tuple[tuple[int, int], ...]) -> None:
        """Put a new file in its place, and its digests into digests.json, if there is one."""
        promised = self._promised(name, written.nbytes)
        if self._exact and promised not in (None, written):
            message = "it would not be what was first written: its digests are others. It stays as it was"
            raise ResumeError(message, where=f"{self.url}/{name}")
        with self._mutex:  # another shard's thread changes digests.json too
            sink.commit()
            if self.is_disk:
                self.store.move(self._building(name), name)
            if self.digests is not None and self.digests.files.get(name) != written:
                self.digests = Digests(self.block_bytes, {**self.digests.files, name: written})
                self.store.put(DIGESTS_NAME, self.digests.to_bytes())
            self.repaired.append(RepairedFile(name, examples, None if promised is None else promised == written))


class RepairWriter(ShardWriter):
    """Takes the vectors of the damaged shards of a store, in order; made by `open_repair`.

    A `ShardWriter` whose shards take their places one by one. Token arrays are written as a whole, by `restore_array`.
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
        return list(self._target.lost_arrays)

    def restore_array(self, name: str, values: object) -> None:
        """Write a token array again.

        Args:
            name: Of the array, such as "token_ids".
            values: (n_examples, content tokens): all of them. Or an iterator of NumPy arrays (k, content tokens) that are all
                of them one after the other.

        Raises:
            ArgumentError: the store has no such array, or these have another shape or other values.
        """
        self._check_usable()
        target, n_examples, at = self._target, self.layout.n_examples, 0
        array = next((array for array in self.metadata.recordable if array.name == name), None)
        if array is None:
            raise ArgumentError(f"the store has no token array {brief(name)}", where="name", remedy="Leave it out.")
        digester, nbytes = BlockDigester(target.block_bytes), array.nbytes(self.layout)
        sink = target.open_file(array.file_name, nbytes, nbytes)
        try:
            pieces = cast("Iterator[object]", values if isinstance(values, Iterator) else iter([values]))
            for some in map(partial(as_array, where=name), pieces):
                n = min(len(np.atleast_1d(some)), n_examples - at)
                rows = token_rows({name: some}, (array,), n, self.layout, required=True)
                data, at = np.ascontiguousarray(rows).reshape(-1).data, at + n
                sink.write([data])
                digester.update(data)
            if at < n_examples:
                raise ArgumentError(f"{name} was given for {at} of {n_examples} examples; give it for all", where=name)
            target.replace(array.file_name, sink, FileDigests(nbytes, tuple(digester.digests())), ())
        finally:
            sink.abort()
        target.lost_arrays = [lost for lost in target.lost_arrays if lost != name]

    def close(self) -> None:
        """Wait for the shards that are whole, and let go of the store; the others stay as damaged as they were."""
        with self._target.held:
            super().close()
