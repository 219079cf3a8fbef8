"""One shard while it is written: its sink, its digests, its labels, its receipt. Runs in the writer's thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from saev_store.errors import CorruptShardError, SaevStoreError, TransportError
from saev_store.layout import Layout, shard_name
from saev_store.transport._base import Borrows, Sink, Upload
from saev_store.writer._blocks import BlockDigester, digest
from saev_store.writer._claim import Owner
from saev_store.writer._folder import Folder
from saev_store.writer._receipts import Receipt, write_receipt


@dataclass(frozen=True)
class ShardPlan:
    """What all shards of one writer have in common."""

    folder: Folder
    layout: Layout
    pad: bool
    block_bytes: int
    checkpoint_bytes: int
    owner: Owner

    def file_nbytes(self, shard_idx: int) -> int:
        """How long the finished file is: all shards but the last are full anyway."""
        return self.layout.shard_nbytes if self.pad else self.layout.used_nbytes(shard_idx)

    def new_sink(self, shard_idx: int) -> Sink | Upload:
        return self.folder.new_sink(
            shard_name(shard_idx),
            used_nbytes=self.layout.used_nbytes(shard_idx),
            file_nbytes=self.file_nbytes(shard_idx),
            block_bytes=self.block_bytes,
        )

    def continued_upload(self, shard_idx: int, bookmark: str) -> Upload | None:
        return self.folder.continued_upload(
            shard_name(shard_idx),
            bookmark,
            used_nbytes=self.layout.used_nbytes(shard_idx),
            file_nbytes=self.file_nbytes(shard_idx),
        )

    def resumed_sink(self, shard_idx: int) -> Sink:
        return self.folder.resumed_sink(
            shard_name(shard_idx),
            used_nbytes=self.layout.used_nbytes(shard_idx),
            file_nbytes=self.file_nbytes(shard_idx),
        )


class ShardFile:
    """A shard that grows by consecutive pieces, and says at checkpoints what of it is durable.

    Args:
        sink: What an interrupted writer left, already verified; None for a new file, made at the first write.
        digester: The digests of what is kept of it.
        labels: The labels of what is kept of it.
        tail: The tail that the last receipt names.
    """

    def __init__(
        self,
        plan: ShardPlan,
        shard_idx: int,
        *,
        sink: Sink | Upload | None = None,
        digester: BlockDigester | None = None,
        labels: bytes | None = None,
        tail: int = 0,
    ) -> None:
        self.shard_idx = shard_idx
        self._plan = plan
        self._sink = sink
        self._digester = digester or BlockDigester(plan.block_bytes)
        self._labels = bytearray(labels) if labels is not None else None
        self._durable_nbytes = self._digester.nbytes
        self._tail = tail

    @property
    def nbytes(self) -> int:
        """How many bytes were written so far."""
        return self._digester.nbytes

    def add_labels(self, rows: bytes) -> None:
        """The labels of the next examples; they come before the examples' vectors."""
        if self._labels is None:
            self._labels = bytearray()
        self._labels += rows

    def write(self, piece: memoryview, offset: int, done: Callable[[], object] = lambda: None) -> None:
        """The next piece of the shard; its memory may change again once `done` is called, which may be later.

        Raises:
            CorruptShardError: `offset` is not where the last piece ended (a defect of ours, caught before it does harm).
        """
        if offset != self.nbytes:
            raise CorruptShardError(
                f"a piece for byte {offset} was about to be written at byte {self.nbytes}",
                where=self._plan.folder.where(shard_name(self.shard_idx)),
                remedy="Please report this; what was written before is right, resume from it.",
            )
        if self._sink is None:
            self._plan.owner.check()
            self._sink = self._plan.new_sink(self.shard_idx)
        # Checkpoints come after whole examples: where parts of an upload cannot be read back, nothing may be half kept.
        example_nbytes = self._plan.layout.example_nbytes
        boundary = (offset + len(piece)) // example_nbytes * example_nbytes
        full = offset + len(piece) == self._plan.layout.used_nbytes(self.shard_idx)  # `complete` comes next
        if not full and boundary > offset and boundary - self._durable_nbytes >= self._plan.checkpoint_bytes:
            self._put(piece[: boundary - offset], offset)
            self.checkpoint()
            piece, offset = piece[boundary - offset :], boundary
        if isinstance(self._sink, Borrows) and len(piece):
            self._digester.update(piece)  # first: afterwards the memory may be another block's already
            self._sink.lend(offset, piece, done)
            return
        if len(piece):
            self._put(piece, offset)
        done()

    def _put(self, piece: memoryview, offset: int) -> None:
        if self._sink is not None:
            self._sink.write(offset, [piece])
            self._digester.update(piece)

    def checkpoint(self, *, last: bool = False) -> None:
        """Make what was written durable, and record it; the last time only where parts of an upload would be lost."""
        sink = self._sink
        if sink is None or self.nbytes == self._durable_nbytes:
            return
        durable, bookmark, tail = min(sink.sync(), self.nbytes), "", b""
        if isinstance(sink, Upload):
            bookmark = sink.bookmark()
            if not bookmark or (last and durable == 0):
                return
            tail = sink.read_back(durable, self.nbytes)
            durable = self.nbytes if len(tail) == self.nbytes - durable else 0
        if durable == 0:  # only `commit` makes anything durable here
            return
        if durable == self.nbytes:
            digests = self._digester.digests()
        else:
            digests = self._digester.whole()[: durable // self._plan.block_bytes]
            durable = len(digests) * self._plan.block_bytes
        self._record(durable, digests, complete=False, bookmark=bookmark, tail=tail)
        self._durable_nbytes = self.nbytes

    def complete(self) -> None:
        """The shard is whole: commit its file and record that."""
        sink = self._sink
        if sink is None or self.nbytes != self._plan.layout.used_nbytes(self.shard_idx):
            raise CorruptShardError(
                f"{self.nbytes} bytes were written of {self._plan.layout.used_nbytes(self.shard_idx)}",
                where=self._plan.folder.where(shard_name(self.shard_idx)),
                remedy="Please report this; what was written before is right, resume from it.",
            )
        self._plan.owner.check()
        if isinstance(sink, Upload):
            # Killed after the upload is completed and before that is recorded: the parts would be gone.
            self.checkpoint(last=True)
        sink.commit()
        self._sink = None
        self._record(self.nbytes, self._digester.digests(), complete=True)

    def _record(
        self, nbytes: int, digests: list[str], *, complete: bool, bookmark: str = "", tail: bytes = b""
    ) -> None:
        self._plan.owner.check()
        labels = None
        if self._labels is not None:
            rows = nbytes // self._plan.layout.example_nbytes * self._plan.layout.content_tokens_per_example
            labels = bytes(self._labels[:rows])
        which = (2 if self._tail == 1 else 1) if tail else 0
        receipt = Receipt(
            nbytes, complete, tuple(digests), digest(labels) if labels is not None else None, bookmark, which
        )
        write_receipt(self._plan.folder, self.shard_idx, receipt, labels, tail)
        self._tail = which or self._tail

    def abort(self) -> None:
        """Let go of the file; what the last checkpoint recorded stays."""
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.abort()


def guarded(job: Callable[[], None], *, where: str) -> Callable[[], None]:
    """A job whose unexpected `OSError` becomes one of our errors."""

    def run() -> None:
        try:
            job()
        except SaevStoreError:
            raise
        except OSError as error:
            raise TransportError(
                f"writing failed: {error}", where=where, remedy="Remove the cause, then resume."
            ) from error

    return run
