"""One shard while it is written, and the receipt that records what of it is durable."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import cast

from saev_store.core.layout import Layout, shard_name
from saev_store.errors import CorruptShardError
from saev_store.transport import Sink
from saev_store.writer._claim import Owner
from saev_store.writer._digests import BlockDigester, digest, is_digest, n_blocks
from saev_store.writer.folder import Folder, label_part_path, receipt_path

VERSION = 1


@dataclass(frozen=True)
class Receipt:
    """What of one shard is durable.

    Attributes:
        used_nbytes: This many leading bytes of the file; they need not end with a whole example.
        complete: The file is committed: these are all the bytes it will ever have.
        digests: One for every block of those bytes, the last one perhaps of a short block.
        labels: The digest of the labels of the whole examples among those bytes; None where none are recorded.
    """

    used_nbytes: int
    complete: bool
    digests: tuple[str, ...]
    labels: str | None

    def to_bytes(self) -> bytes:
        return json.dumps({"version": VERSION, **asdict(self)}).encode()


def parse_receipt(raw: bytes, layout: Layout, shard_idx: int, block_bytes: int) -> Receipt | None:
    """A receipt that agrees with the layout; None for one that does not, which is as good as none."""
    try:
        document = cast("dict[str, object]", json.loads(raw))
        used, complete, labels = document["used_nbytes"], document["complete"], document["labels"]
        digests = cast("list[object]", document["digests"])
        limit = layout.used_nbytes(shard_idx)
        if (
            document["version"] == VERSION
            and isinstance(used, int)
            and 0 <= used <= limit
            and isinstance(complete, bool)
            and (used == limit or not complete)
            and len(digests) == n_blocks(used, block_bytes)
            and (labels is None or is_digest(labels))
            and all(is_digest(item) for item in digests)
        ):
            found = tuple(cast("list[str]", digests))
            return Receipt(used, complete, found, cast("str | None", labels))
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def read_receipts(folder: Folder, layout: Layout, shards: range, block_bytes: int) -> Generator[Receipt | None]:
    """The receipts of some shards, in order; None where there is none, or one that is as good as none."""

    def read(shard_idx: int) -> Receipt | None:
        raw = folder.read_or_none(receipt_path(shard_idx))
        return parse_receipt(raw, layout, shard_idx, block_bytes) if raw is not None else None

    return folder.each(read, shards)


def leading_receipts(folder: Folder, layout: Layout, shards: range, block_bytes: int) -> list[Receipt]:
    """The receipts up to the first shard that is not complete, its own included."""
    receipts: list[Receipt] = []
    # Most often nothing has been written yet, and one request tells.
    for some in (shards[:1], shards[1:]):
        with closing(read_receipts(folder, layout, some, block_bytes)) as found:
            for receipt in found:
                if receipt is None:
                    return receipts
                receipts.append(receipt)
                if not receipt.complete:
                    return receipts
    return receipts


def read_label_part(folder: Folder, layout: Layout, shard_idx: int, receipt: Receipt) -> bytes | None:
    """The labels that a receipt stands for; None where they are not there, or are others.

    A crash between labels and receipt leaves more of them than the receipt knows: only its own are returned.
    """
    nbytes = receipt.used_nbytes // layout.example_nbytes * layout.content_tokens_per_example
    longest = layout.examples_in(shard_idx) * layout.content_tokens_per_example
    raw = folder.read_or_none(label_part_path(shard_idx), max_bytes=longest)
    if raw is None or len(raw) < nbytes or digest(raw[:nbytes]) != receipt.labels:
        return None
    return bytes(raw[:nbytes])


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
            self._sink = self._plan.open_sink(self.shard_idx)
        self._digester.update(piece)  # first: after `write` the memory may hold another block
        self._sink.write(offset, [piece], done)
        if self.nbytes - self._durable_nbytes >= self._plan.checkpoint_bytes:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Make what was written durable and record it, where part of a file can be durable."""
        sink = self._sink
        if sink is None or self.nbytes == self._durable_nbytes or self._plan.folder.is_far:
            return
        durable, digests = min(sink.sync(), self.nbytes), self._digester.digests()
        if durable < self.nbytes:
            digests = digests[: durable // self._plan.block_bytes]
            durable = len(digests) * self._plan.block_bytes
        self._plan.owner.check()
        self.record(self._receipt(durable, digests, complete=False))
        self._durable_nbytes = self.nbytes

    def commit(self) -> Receipt:
        """Commit the file, which is whole; the receipt that has to be recorded."""
        sink, folder = self._sink, self._plan.folder
        if sink is None or self.nbytes != self._plan.layout.used_nbytes(self.shard_idx):
            raise CorruptShardError(
                f"{self.nbytes} bytes were written of {self._plan.layout.used_nbytes(self.shard_idx)}",
                where=folder.where(shard_name(self.shard_idx)),
                remedy="Please report this; what was written before is right, resume from it.",
            )
        # A writer that another one has replaced must not replace that one's shard.
        folder.together(self._plan.owner.check, *([sink.sync] if folder.is_far else []))
        sink.commit(check_size=False)  # publication and resuming compare it
        self._sink = None
        return self._receipt(self.nbytes, self._digester.digests(), complete=True)

    def _receipt(self, nbytes: int, digests: list[str], *, complete: bool) -> Receipt:
        labels = self._labels_of(nbytes)
        return Receipt(nbytes, complete, tuple(digests), digest(labels) if labels is not None else None)

    def _labels_of(self, nbytes: int) -> bytes | None:
        layout = self._plan.layout
        if self._labels is None:
            return None
        return bytes(self._labels[: nbytes // layout.example_nbytes * layout.content_tokens_per_example])

    def record(self, receipt: Receipt) -> None:
        """Record what is durable; labels first, so that no receipt promises what is not there."""
        labels = self._labels_of(receipt.used_nbytes)
        if labels is not None:
            self._plan.folder.put(label_part_path(self.shard_idx), labels)
        self._plan.folder.put(receipt_path(self.shard_idx), receipt.to_bytes())

    def abort(self) -> None:
        """Let go of the file; what the last checkpoint recorded stays."""
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.abort()
