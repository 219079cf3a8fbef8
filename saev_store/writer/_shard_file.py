"""One shard while it is written: its sink, its digests, its labels, its receipt. Runs in the writer's thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from saev_store.errors import CorruptShardError, SaevStoreError, TransportError
from saev_store.layout import Layout, shard_name
from saev_store.transport._base import Sink
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
    """A shard that grows by consecutive pieces, and says at checkpoints what of it is durable.

    Args:
        sink: What an interrupted writer left, already verified; None for a new file, made at the first write.
        digester: The digests of what is kept of it.
        labels: The labels of what is kept of it.
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
        """How many bytes were written so far."""
        return self._digester.nbytes

    def add_labels(self, rows: bytes) -> None:
        """The labels of the next examples; they come before the examples' vectors."""
        if self._labels is None:
            self._labels = bytearray()
        self._labels += rows

    def write(self, piece: memoryview, offset: int) -> None:
        """The next piece of the shard.

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
        self._sink.write(offset, [piece])
        self._digester.update(piece)
        full = self.nbytes == self._plan.layout.used_nbytes(self.shard_idx)  # `complete` comes next
        if not full and self.nbytes - self._durable_nbytes >= self._plan.checkpoint_bytes:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Make what was written durable, and record it."""
        if self._sink is None or self.nbytes == self._durable_nbytes:
            return
        durable = min(self._sink.sync(), self.nbytes)
        if durable == 0:  # only `commit` makes anything durable here
            return
        if durable == self.nbytes:
            digests = self._digester.digests()
        else:
            digests = self._digester.whole()[: durable // self._plan.block_bytes]
            durable = len(digests) * self._plan.block_bytes
        self._record(durable, digests, complete=False)
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
        sink.commit()
        self._sink = None
        self._record(self.nbytes, self._digester.digests(), complete=True)

    def _record(self, nbytes: int, digests: list[str], *, complete: bool) -> None:
        self._plan.owner.check()
        labels = None
        if self._labels is not None:
            rows = nbytes // self._plan.layout.example_nbytes * self._plan.layout.content_tokens_per_example
            labels = bytes(self._labels[:rows])
        receipt = Receipt(nbytes, complete, tuple(digests), digest(labels) if labels is not None else None)
        write_receipt(self._plan.folder, self.shard_idx, receipt, labels)

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
