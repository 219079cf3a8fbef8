"""One shard while it is written, the receipt of what of it is durable, and the thread that writes."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from saev_store._runtime.abandoned import ABANDONED
from saev_store.core.layout import Layout, shard_name
from saev_store.core.token_arrays import TokenArray
from saev_store.errors import CorruptShardError, ForkError, SaevStoreError, TransportError
from saev_store.names import METADATA_NAME
from saev_store.transport import Sink
from saev_store.writer._digests import BlockDigester, FileDigests, digest, is_digest, n_blocks
from saev_store.writer.folder import Folder, Owner, receipt_path, token_rows_path

T = TypeVar("T")

VERSION = 1
#: A page: what is written from such an address needs no second copy in the kernel.
_ALIGNMENT = 4096
#: Seconds between two looks whether the thread still lives: at the end of the process the interpreter ends it.
_LOOK_S = 1.0


@dataclass(frozen=True)
class Receipt:
    """What of one shard is durable.

    Attributes:
        used_nbytes: This many leading bytes of the file; they need not end with a whole example.
        complete: The file is committed: these are all the bytes it will ever have.
        digests: One for every block of those bytes, the last one perhaps of a short block.
        tokens: The digest of the token rows of the whole examples among those bytes; None where none are recorded.
    """

    used_nbytes: int
    complete: bool
    digests: tuple[str, ...]
    tokens: str | None

    @property
    def file(self) -> FileDigests:
        """What the file holds."""
        return FileDigests(self.used_nbytes, self.digests)

    def to_bytes(self) -> bytes:
        """The document."""
        return json.dumps({"version": VERSION, **asdict(self)}).encode()


def parse_receipt(raw: bytes, layout: Layout, shard_idx: int, block_bytes: int) -> Receipt | None:
    """A receipt that agrees with the layout; None for one that does not."""
    try:
        document = cast("dict[str, object]", json.loads(raw))
        used, complete, tokens = document["used_nbytes"], document["complete"], document["tokens"]
        digests = cast("list[object]", document["digests"])
        limit = layout.used_nbytes(shard_idx)
        if (
            document["version"] == VERSION
            and isinstance(used, int)
            and 0 <= used <= limit
            and isinstance(complete, bool)
            and (used == limit or not complete)
            and len(digests) == n_blocks(used, block_bytes)
            and (tokens is None or is_digest(tokens))
            and all(is_digest(item) for item in digests)
        ):
            found = tuple(cast("list[str]", digests))
            return Receipt(used, complete, found, cast("str | None", tokens))
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def read_receipts(folder: Folder, layout: Layout, shards: Sequence[int], block_bytes: int) -> Generator[Receipt | None]:
    """The receipts of some shards, in order; None where there is none that agrees with the layout."""

    def read(shard_idx: int) -> Receipt | None:
        raw = folder.read(receipt_path(shard_idx))
        return parse_receipt(raw, layout, shard_idx, block_bytes) if raw is not None else None

    return folder.each(read, shards)


def leading_receipts(folder: Folder, layout: Layout, shards: range, block_bytes: int) -> list[Receipt]:
    """The receipts up to the first shard that is not complete, its own included."""
    receipts: list[Receipt] = []
    # Most often nothing has been written yet, which one request shows.
    for some in (shards[:1], shards[1:]):
        with closing(read_receipts(folder, layout, some, block_bytes)) as found:
            for receipt in found:
                if receipt is None:
                    return receipts
                receipts.append(receipt)
                if not receipt.complete:
                    return receipts
    return receipts


def read_token_rows(
    folder: Folder, layout: Layout, shard_idx: int, receipt: Receipt, example_nbytes: int
) -> bytes | None:
    """The token rows that a receipt stands for; None where they are not there, or are others.

    A crash between token rows and receipt leaves more of them than the receipt counts: only those are returned.
    """
    nbytes = receipt.used_nbytes // layout.example_nbytes * example_nbytes
    raw = folder.read(token_rows_path(shard_idx), max_bytes=layout.examples_in(shard_idx) * example_nbytes)
    if raw is None or len(raw) < nbytes or digest(raw[:nbytes]) != receipt.tokens:
        return None
    return bytes(raw[:nbytes])


@dataclass(frozen=True)
class ShardPlan:
    """What all shards of one writer share.

    Attributes:
        folder: The store's folder.
        layout: The geometry.
        pad: Whether the last file is as long as the others.
        block_bytes: Each digest stands for this many bytes.
        checkpoint_bytes: A checkpoint follows after this many bytes.
        owner: This attempt.
        arrays: What may be recorded for each content token. The token row of an example is the bytes of its row of each, one
            behind the other.
        looks_at: At the completion of this shard one looks whether the store was published meanwhile; None: that is known.
    """

    folder: Folder
    layout: Layout
    pad: bool
    block_bytes: int
    checkpoint_bytes: int
    owner: Owner
    arrays: tuple[TokenArray, ...]
    looks_at: int | None = None

    def check_unpublished(self) -> None:
        """Raise `WriterConflictError` if the store was published meanwhile."""
        if self.folder.read(METADATA_NAME):
            raise self.owner.superseded()

    def file_nbytes(self, shard_idx: int) -> int:
        """How long the finished file is: all shards but the last are full anyway."""
        return self.layout.shard_nbytes if self.pad else self.layout.used_nbytes(shard_idx)

    @property
    def token_row_nbytes(self) -> int:
        """Bytes of the token row of one example."""
        return sum(array.example_nbytes(self.layout) for array in self.arrays)

    def tokens_nbytes(self, nbytes: int) -> int:
        """Bytes of the token rows of the whole examples in the first `nbytes` of a shard."""
        return nbytes // self.layout.example_nbytes * self.token_row_nbytes

    def open_sink(self, shard_idx: int, *, resume: bool = False) -> Sink:
        """The file of a shard, from scratch unless `resume`."""
        return self.folder.open_sink(
            shard_name(shard_idx),
            used_nbytes=self.layout.used_nbytes(shard_idx),
            file_nbytes=self.file_nbytes(shard_idx),
            resume=resume,
        )


class ShardFile:
    """A shard that grows by consecutive pieces, and records at checkpoints what of it is durable.

    Args:
        sink: A resumed file whose first bytes were verified; None for a new file, made at the first write.
        digester: The digests of these bytes.
        tokens: Their token rows.

    Attributes:
        shard_idx: Which shard it is.
        digester: The digests of what was written so far; its `nbytes` is the length of that.
    """

    def __init__(
        self,
        plan: ShardPlan,
        shard_idx: int,
        *,
        sink: Sink | None = None,
        digester: BlockDigester | None = None,
        tokens: bytes | None = None,
    ) -> None:
        self.shard_idx = shard_idx
        self._plan = plan
        self._sink = sink
        self.digester = digester or BlockDigester(plan.block_bytes)
        self._tokens = bytearray(tokens) if tokens is not None else None
        self._durable_nbytes = self.digester.nbytes

    def add_token_rows(self, rows: bytes) -> None:
        """Add the token rows of the next examples, before their vectors."""
        if self._tokens is None:
            self._tokens = bytearray()
        self._tokens += rows

    def write(self, piece: memoryview, offset: int, done: Callable[[], object] | None = None) -> None:
        """Write the next piece of the shard, at `offset`; see `Sink.write` for `done`."""
        if offset != self.digester.nbytes:
            raise CorruptShardError(
                f"a piece for byte {offset} was about to be written at byte {self.digester.nbytes}",
                where=self._plan.folder.where(shard_name(self.shard_idx)),
                remedy="Please report this; what was written before is right, resume from it.",
            )
        if self._sink is None:
            self._sink = self._plan.open_sink(self.shard_idx)
        self.digester.update(piece)  # first: after `write` the memory may hold another block
        self._sink.write(offset, [piece], done)
        if self.digester.nbytes - self._durable_nbytes >= self._plan.checkpoint_bytes:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Make what was written durable and record it, where part of a file can be durable."""
        sink = self._sink
        if sink is None or self.digester.nbytes == self._durable_nbytes or self._plan.folder.is_far:
            return
        durable, digests = min(sink.sync(), self.digester.nbytes), self.digester.digests()
        if durable < self.digester.nbytes:
            digests = digests[: durable // self._plan.block_bytes]
            durable = len(digests) * self._plan.block_bytes
        self._plan.owner.check()
        self.record(self.receipt(durable, digests, complete=False))
        self._durable_nbytes = self.digester.nbytes

    def commit(self) -> Receipt:
        """Commit the file, which is whole; the receipt that has to be recorded."""
        sink, folder = self._sink, self._plan.folder
        if sink is None or self.digester.nbytes != self._plan.layout.used_nbytes(self.shard_idx):
            raise CorruptShardError(
                f"{self.digester.nbytes} bytes were written of {self._plan.layout.used_nbytes(self.shard_idx)}",
                where=folder.where(shard_name(self.shard_idx)),
                remedy="Please report this; what was written before is right, resume from it.",
            )
        # A writer that another one has replaced must not replace that one's shard, nor one of a published store.
        checks: list[Callable[[], object]] = [self._plan.owner.check]
        if folder.is_far:
            checks.append(sink.sync)
        if self._plan.looks_at == self.shard_idx:
            checks.append(self._plan.check_unpublished)
        folder.together(*checks)
        sink.commit()
        self._sink = None
        return self.receipt(self.digester.nbytes, self.digester.digests(), complete=True)

    def finish(self, receipts: SimpleQueue[Receipt | None], live: list[ShardFile]) -> None:
        """Commit the file, hand over its receipt, record it, and leave the list of files that are not complete."""
        receipt = self.commit()
        receipts.put(receipt)
        self.record(receipt)
        live.remove(self)

    def receipt(self, nbytes: int, digests: list[str], *, complete: bool) -> Receipt:
        """The receipt of the first `nbytes`."""
        tokens = None
        if self._tokens is not None:
            tokens = digest(self._tokens[: self._plan.tokens_nbytes(nbytes)])
        return Receipt(nbytes, complete, tuple(digests), tokens)

    def record(self, receipt: Receipt) -> None:
        """Record what is durable; token rows first, so that no receipt promises what is not there."""
        folder = self._plan.folder
        if self._tokens is not None:
            rows = bytes(self._tokens[: self._plan.tokens_nbytes(receipt.used_nbytes)])
            folder.put(token_rows_path(self.shard_idx), rows)
        folder.put(receipt_path(self.shard_idx), receipt.to_bytes())

    def abort(self) -> None:
        """Let go of the file; what the last checkpoint recorded stays."""
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.abort()


class Background:
    """Runs jobs one after the other in a thread of its own, and lends a fixed number of buffers.

    After the first error no job runs any more, and every later call raises: the first one the error itself, the others
    one that names it. An `OSError` of a job becomes a `TransportError`. The caller and the thread share only queues, which an
    interrupt cannot leave locked. A `Background` that is not closed is closed at the end of the process.

    Args:
        buffer_nbytes: Length of a buffer.
        n_buffers: How many there are; `borrow` waits for a free one.
        where: What is written, for messages.
        held: What is closed when the thread has ended.

    Attributes:
        free: Takes a buffer that is no longer needed; in any thread.
        error: What a job has raised.
    """

    def __init__(self, *, buffer_nbytes: int, n_buffers: int, where: str, held: ExitStack) -> None:
        self._buffer_nbytes, self._n_unmade, self._where, self._held = buffer_nbytes, n_buffers, where, held
        # None in these queues wakes the thread that waits: jobs have ended, or one has failed.
        self._jobs: SimpleQueue[tuple[Callable[[], None], SimpleQueue[None] | None] | None] = SimpleQueue()
        self.free: SimpleQueue[npt.NDArray[np.uint8] | None] = SimpleQueue()
        self._waited: SimpleQueue[Any] | None = None
        self._stopping = False
        self.error: BaseException | None = None
        self._error_told = False
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        ABANDONED.add(self)

    def borrow(self) -> npt.NDArray[np.uint8]:
        """A buffer; waits until one is free."""
        self._check()
        if self._n_unmade:
            self._n_unmade -= 1
            memory = np.empty(self._buffer_nbytes + _ALIGNMENT, dtype=np.uint8)
            start = -memory.ctypes.data % _ALIGNMENT
            return memory[start : start + self._buffer_nbytes]
        while (buffer := self.wait_for(self.free)) is None:
            pass
        return buffer

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job after all earlier ones."""
        self._check()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="saev-store-writer", daemon=True)
            self._thread.start()
        self._jobs.put((job, None))

    def drain(self) -> None:
        """Wait until all jobs have run."""
        self._check()
        if self._thread is not None:
            done = SimpleQueue[None]()
            self._jobs.put((lambda: None, done))
            self.wait_for(done)

    def close(self) -> None:
        """Drop the jobs that have not begun, wait for the one that has, end the thread, and close what is held.

        Never raises; nothing of it in a forked child, whose parent does it.
        """
        if os.getpid() != self._pid:
            return
        ABANDONED.remove(self)
        self._stopping = True
        self._jobs.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            with suppress(RuntimeError):  # an interrupt came before it had started: it will find nothing to do
                self._thread.join()
        self._held.close()

    def _check(self) -> None:
        """Raise what makes this unusable: a fork, an earlier error, or the end."""
        # The fork comes first, without a lock: in the child the thread that held it does not exist.
        if os.getpid() != self._pid:
            raise ForkError(
                "a writer was used in a forked child; its thread lives in the parent only",
                where=self._where,
                remedy="Create the writer in the process that writes.",
            )
        if self.error is not None:
            if not self._error_told:
                self._error_told = True
                raise self.error
            raise TransportError(
                f"this writer stopped after an earlier error ({type(self.error).__name__}: {self.error})",
                where=self._where,
                remedy="Close it, remove the cause, and resume.",
            ) from self.error
        if self._stopping:
            raise TransportError(
                "this writer is closed", where=self._where, remedy="Create a new one with resume=True."
            )

    def wait_for(self, queue: SimpleQueue[T | None]) -> T | None:
        """Wait for what a job puts into a queue."""
        self._waited = queue  # before looking for an error: one that comes later is told through it
        while True:
            self._check()
            try:
                found = queue.get(timeout=_LOOK_S)
            except Empty:
                if self._thread is None or not self._thread.is_alive():
                    self._check()
                    raise TransportError("the writer's thread has ended", where=self._where) from None
            else:
                self._check()
                return found

    def _run(self) -> None:
        while (taken := self._jobs.get()) is not None:
            job, done = taken
            if self.error is None and not self._stopping:
                try:
                    job()
                except BaseException as error:  # raised again in the thread that waits
                    told = error
                    if isinstance(error, OSError) and not isinstance(error, SaevStoreError):
                        remedy = "Remove the cause, then resume."
                        told = TransportError(f"writing failed: {error}", where=self._where, remedy=remedy)
                        told.__cause__ = error
                    self.error = told
                    if (waited := self._waited) is not None:
                        waited.put(None)
            del job, taken
            if done is not None:
                done.put(None)
