"""One shard while it is written: its lock, its file, and the digests of its blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import TYPE_CHECKING

from saev_store.errors import SaevStoreError, TransportError
from saev_store.transport import Sink, Transport
from saev_store.writer.digests import digest

if TYPE_CHECKING:
    from saev_store.documents import Metadata


class Target(ABC):
    """Purpose of written shards: a new store, the repair of one, a comparison with one.

    Args:
        store: The folder of the store.
        metadata: Its document.
        block_bytes: Length of a block, which has one digest.

    Attributes:
        url: The address of the store.
        layout: Its geometry.
        is_disk: Whether there are locks and renames, as on this machine; in a bucket a file appears when it is complete.
    """

    def __init__(self, store: Transport, metadata: Metadata, block_bytes: int) -> None:
        self.store, self.metadata, self.block_bytes = store, metadata, block_bytes
        self.url, self.layout, self.is_disk = store.url, metadata.layout, store.local_path is not None

    def lock(self, what: str) -> AbstractContextManager[object]:  # noqa: ARG002  # for targets that others may write
        """Hold a lock; `WriterConflictError` if another process does."""
        return nullcontext()

    def check(self, shard_idx: int) -> None:  # noqa: B027  # likewise
        """Look, under the lock of a shard, whether it still has to be written; `WriterConflictError` if not."""

    @abstractmethod
    def open_shard(self, shard_idx: int) -> Sink:
        """The file of a shard."""

    @abstractmethod
    def finish_shard(self, shard_idx: int, sink: Sink, digests: Sequence[str], tokens: Mapping[str, bytes]) -> None:
        """Commit the file of a shard, and record it with what belongs to its tokens."""


class ShardFile:
    """A shard that grows block by block, and counts when it is whole.

    Its calls come one after the other, in any thread. After an error nothing of it counts.
    """

    def __init__(self, target: Target, shard_idx: int) -> None:
        self._target, self._shard_idx = target, shard_idx
        self._held = ExitStack()
        self._sink: Sink | None = None
        self._digests: list[str] = []
        self._nbytes = 0
        self._failed = False

    def claim(self) -> None:
        """Take the lock, and look whether the shard still has to be written.

        Raises:
            WriterConflictError: another process writes it, or has written it.
        """
        self._held.enter_context(self._target.lock(f"{self._shard_idx:06d}"))
        try:
            self._target.check(self._shard_idx)
        except BaseException:
            self.abort()
            raise

    def write(self, block: memoryview, tokens: Mapping[str, bytes] | None = None) -> None:
        """Write the next block; all but the last one are whole.

        Args:
            block: Its bytes, which may be changed afterwards.
            tokens: With the last block: what was recorded for the tokens of the shard, by token array. The shard is then made
                durable, and recorded.
        """
        if self._failed:
            raise TransportError("an earlier block of this shard was not written", where=self._target.url)
        try:
            sink = self._sink = self._sink or self._target.open_shard(self._shard_idx)
            self._digests.append(digest(block))  # first: the block is in the cache
            sink.write(self._nbytes, [block])
            self._nbytes += len(block)
            if tokens is None:
                return
            self._target.finish_shard(self._shard_idx, sink, self._digests, tokens)
        except BaseException:
            self.abort()
            raise
        self._held.close()

    def abort(self) -> None:
        """Let go of the file and the lock; what is not whole does not count."""
        self._failed = True
        with self._held, suppress(SaevStoreError):
            if self._sink is not None:
                self._sink.abort()
