"""One shard while it is written: its sink, digests, labels and receipt. Used by the writer's thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from saev_store.core.layout import Layout, shard_name
from saev_store.errors import CorruptShardError, SaevStoreError, TransportError
from saev_store.transport import Sink
from saev_store.writer._blocks import BlockDigester, digest
from saev_store.writer._claim import Owner
from saev_store.writer._receipts import Receipt, write_receipt
from saev_store.writer.folder import Folder


@dataclass(frozen=True)
class ShardPlan:
    """What all shards of one writer share."""

    folder: Folder
    layout: Layout
    pad: bool
    block_bytes: int
    checkpoint_bytes: int
    owner: Owner

    def file_nbytes(self, shard_idx: int) -> int:
        """How long the finished file is: all shards but the last are full anyway."""
        return self.layout.shard_nbytes if self.pad else self.layout.used_nbytes(shard_idx)

    def new_sink(self, shard_idx: int) -> Sink:
        return self.folder.new_sink(
            shard_name(shard_idx),
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
    """A shard that grows by consecutive pieces, and records at checkpoints what of it is durable.

    Args:
        sink: A resumed file whose first bytes were verified; None for a new file, made at the first write.
        digester: The digests of these bytes.
        labels: Their labels.
    """

    def __init__(
        self,
        plan: ShardPlan,
        shard_idx: int,
        *,
        sink: Sink | None = None,
        digester: BlockDigester | None = None,
        labels: bytes | None = None,
    ) -> None:
        self.shard_idx = shard_idx
        self._plan = plan
        self._sink = sink
        self._digester = digester or BlockDigester(plan.block_bytes)
        self._labels = bytearray(labels) if labels is not None else None
        self._durable_nbytes = self._digester.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes written so far."""
        return self._digester.nbytes

    def add_labels(self, rows: bytes) -> None:
        """Add the labels of the next examples, before their vectors."""
        if self._labels is None:
            self._labels = bytearray()
        self._labels += rows

    def write(self, piece: memoryview, offset: int, done: Callable[[], object] | None = None) -> None:
        """Write the next piece of the shard; see `Sink.write` for `done`.

        Raises:
            CorruptShardError: `offset` is not where the last piece ended, which is a defect of this package.
        """
        if offset != self.nbytes:
            raise CorruptShardError(
                f"a piece for byte {offset} was about to be written at byte {self.nbytes}",
                where=self._plan.folder.where(shard_name(self.shard_idx)),
                remedy="Please report this; what was written before is right, resume from it.",
            )
        if self._sink is None:
            self._sink = self._plan.new_sink(self.shard_idx)
        self._digester.update(piece)  # first: after `write` the memory may hold another block
        self._sink.write(offset, [piece], done)
        if self.nbytes - self._durable_nbytes >= self._plan.checkpoint_bytes:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Make what was written durable and record it, where part of a file can be durable."""
        sink = self._sink
        if sink is None or self.nbytes == self._durable_nbytes or self._plan.folder.is_far:
            return
        durable = min(sink.sync(), self.nbytes)
        digests = self._digester.digests()
        if durable < self.nbytes:
            digests = self._digester.whole()[: durable // self._plan.block_bytes]
            durable = len(digests) * self._plan.block_bytes
        self._plan.owner.check()
        self._record(durable, digests, complete=False)
        self._durable_nbytes = self.nbytes

    def complete(self) -> Receipt:
        """Commit the file, which is whole, and record it."""
        sink, folder = self._sink, self._plan.folder
        if sink is None or self.nbytes != self._plan.layout.used_nbytes(self.shard_idx):
            raise CorruptShardError(
                f"{self.nbytes} bytes were written of {self._plan.layout.used_nbytes(self.shard_idx)}",
                where=folder.where(shard_name(self.shard_idx)),
                remedy="Please report this; what was written before is right, resume from it.",
            )
        # A writer that another one has replaced must not replace that one's shard.
        if folder.is_far:
            folder.together(self._plan.owner.check, sink.sync)
        else:
            self._plan.owner.check()
        sink.commit()
        self._sink = None
        return self._record(self.nbytes, self._digester.digests(), complete=True)

    def _record(self, nbytes: int, digests: list[str], *, complete: bool) -> Receipt:
        layout, labels = self._plan.layout, None
        if self._labels is not None:
            labels = bytes(self._labels[: nbytes // layout.example_nbytes * layout.content_tokens_per_example])
        receipt = Receipt(nbytes, complete, tuple(digests), digest(labels) if labels is not None else None)
        write_receipt(self._plan.folder, self.shard_idx, receipt, labels)
        return receipt

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
