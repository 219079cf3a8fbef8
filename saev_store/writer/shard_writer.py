"""`ShardWriter`: appends the examples of the shards that are missing, and publishes the store when all are there."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from queue import LifoQueue
from types import TracebackType
from typing import Self, SupportsIndex, cast

import numpy as np
import numpy.typing as npt

from saev_store._runtime.progress import Progress
from saev_store.core.arguments import BOOLEANS, check_number
from saev_store.core.dtypes import numpy_dtype, stored_as
from saev_store.errors import (
    ArgumentError,
    IncompleteStoreError,
    SaevStoreError,
    StoreExistsError,
    TransportError,
    brief,
)
from saev_store.transport import Sink
from saev_store.writer.digests import digest
from saev_store.writer.inputs import (
    NonfinitePolicy,
    OverflowPolicy,
    as_activations,
    check_finite,
    check_overflow,
    rows_as_bytes,
    token_rows,
)
from saev_store.writer.work import Target

Rows = npt.NDArray[np.uint8] | None
#: Blocks between the caller and the file, and threads that write them. A shard that becomes durable delays no other.
_N_BLOCKS, _N_THREADS = 6, 2
#: To a bucket: so many shards are sent at once.
_N_FAR_BLOCKS, _N_FAR_THREADS = 14, 8


class ShardFile:
    """A shard that grows block by block, and counts when it is whole. Its calls come one after the other, in any thread."""

    def __init__(self, target: Target, shard_idx: int) -> None:
        self._target, self._shard_idx = target, shard_idx
        self._held = ExitStack()
        self._sink: Sink | None = None
        self._digests: list[str] = []
        self._nbytes = 0
        self._failed = False
        if not target.is_disk:
            return
        self._held.enter_context(target.lock(f"{shard_idx:06d}"))
        try:
            target.check(shard_idx)
        except BaseException:
            self.abort()
            raise

    def write(self, block: memoryview, tokens: Mapping[str, bytes] | None = None) -> None:
        """Write the next block; with the last one, and the values of token arrays, the shard becomes durable and is recorded."""
        if self._failed:
            raise TransportError("an earlier block of this shard was not written", where=self._target.url)
        try:
            sink = self._sink = self._sink or self._target.open_shard(self._shard_idx)
            self._digests.append(digest(block))  # first: the block is in the cache
            sink.write([block])
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


class ShardWriter:
    """Writes the examples that are missing of a store, or of one part of it, in order.

    Made by `ShardStore.create` and `ShardStore.repair`; use it as a context manager. Leaving the block after the last example
    publishes the store (of a part, `ShardStore.finalize` does). Leaving it earlier raises `IncompleteStoreError`, and leaving
    it by an exception lets that through. In any case the shards that are whole stay, and the same call with `resume=True`
    continues with the others.

    One thread may use it. `append` copies what it is given; threads of the writer digest and write.

    Attributes:
        url: Where the store is, or will be.
        metadata: Its document.
        layout: Its geometry.
        complete: Whether nothing is left to do.
        max_reorder_bytes: How many bytes `write` may hold of examples that wait for an earlier one.
    """

    _remedy = "Create it again with resume=True, and append its `missing` examples."

    def __init__(
        self,
        target: Target,
        shards: Sequence[int],
        complete: Callable[[], object],
        *,
        has_tokens: bool | None = None,
        on_nonfinite: NonfinitePolicy = "raise",
        on_overflow: OverflowPolicy = "raise",
        progress: bool | None = None,
    ) -> None:
        layout = target.layout
        self.url, self.metadata, self.layout = target.url, target.metadata, layout
        self.complete = self._closed = self._torn = False
        self.max_reorder_bytes = 1 << 30
        self._target, self._publish, self._has_tokens = target, complete, has_tokens
        self._on_nonfinite, self._on_overflow = on_nonfinite, on_overflow
        self._shards = list(shards)
        self._at: int = 0
        self._example = 0
        self._n_left = sum(map(layout.examples_in, self._shards))
        self._held: dict[int, tuple[npt.NDArray[np.generic], Rows]] = {}
        # The block that is filled, and those that are free: the last one freed, still in the cache, comes first.
        n_blocks, n_threads = (_N_BLOCKS, _N_THREADS) if target.is_disk else (_N_FAR_BLOCKS, _N_FAR_THREADS)
        self._free = LifoQueue[npt.NDArray[np.uint8] | None]()
        for _ in range(n_blocks):
            self._free.put(None)
        self._block: npt.NDArray[np.uint8] | None = None
        self._fill = self._taken = 0
        self._rows: list[npt.NDArray[np.uint8]] = []
        self._threads = ThreadPoolExecutor(n_threads, "saev-store-writer")
        self._pending: deque[Future[None]] = deque()
        self._last: Future[None] | None = None
        self._file: ShardFile | None = None
        if self._shards and target.is_disk:  # a second writer gets its error at once
            self._file = ShardFile(target, self._shards[0])
        self._progress = Progress(self._n_left, "writing", shown=progress if self._n_left else False, unit="examples")

    # -- what is missing -----------------------------------------------------------------------------------------------

    @property
    def missing(self) -> list[range]:
        """The examples that are still to be appended, in this order; neighbours are one range."""
        found: list[range] = []
        for shard_idx in self._shards[self._at :]:
            start, end = self.layout.example_range(shard_idx)
            if found and found[-1].stop == start:
                start = found.pop().start
            found.append(range(start, end))
        return [range(found[0].start + self._example, found[0].stop), *found[1:]] if found else []

    @property
    def next_example(self) -> int:
        """The example that the next `append` begins with; behind the last one of the store where none is missing."""
        if self._at == len(self._shards):
            return self.layout.n_examples
        return self._shards[self._at] * self.layout.examples_per_shard + self._example

    # -- writing -------------------------------------------------------------------------------------------------------

    def append(self, acts: object, labels: object = None, **token_arrays: object) -> None:
        """Add the next examples.

        Args:
            acts: (k, layers, tokens, d_model), or one example without the first axis; NumPy or torch, of a dtype that a store
                may hold, of any strides and byte order. What has the store's dtype is written bit for bit, other numbers are widened
                exactly or rounded to nearest even. Copied before this returns.
            labels: (k, content tokens) integers from 0 to 255, for all examples of the store or for none.
            token_arrays: Protocol 3.0: (k, content tokens) for each token array that the metadata declares, by name.

        Raises:
            ArgumentError: wrong shape, dtype or values; more examples than are missing. Nothing of the batch was taken.
            SaevStoreError: writing this or an earlier batch failed. Close, remove the cause, resume.
        """
        self._check_usable()
        if self._held:
            raise ArgumentError(
                f"examples of `write` wait for example {self.next_example}; give it to `write`", where="acts"
            )
        self._accept(*self._checked(acts, labels, token_arrays, self.next_example))

    def write(self, example: int, acts: object, labels: object = None, **token_arrays: object) -> None:
        """Add one example, in any order: it is appended when all missing ones before it have come.

        Until then a copy is held in memory, in the store's dtype.

        Args:
            example: Its position in the store, one of `missing`.
            acts: (layers, tokens, d_model), or with a first axis of 1, as for `append`.
            labels: (content tokens,).
            token_arrays: Likewise, by name.

        Raises:
            ArgumentError: the example is not missing; or more than `max_reorder_bytes` would be held, and the message names the
                example that all wait for; or as for `append`. Nothing was taken.
            SaevStoreError: as for `append`.
        """
        self._check_usable()
        position = self._position(example)
        batch, rows = self._checked(acts, labels, token_arrays, position)
        if len(batch) != 1:
            raise ArgumentError(f"acts holds {len(batch)} examples; `write` takes one", where="acts")
        if position > self.next_example:
            self._hold(position, batch, rows)
            return
        self._accept(batch, rows)
        while (held := self._held.pop(self.next_example, None)) is not None:
            self._accept(*held)

    def close(self) -> None:
        """Wait until all whole shards are durable; publish if those are all; let go of the store. Closing twice is fine.

        Raises:
            SaevStoreError: writing or publishing failed; what was durable before still is.
        """
        if self._closed:
            return
        self._closed = True
        try:
            wait(self._pending)
            self._check_pending()
            if not self._n_left and not self._torn:
                self._publish()
                self.complete = True
        finally:
            self._threads.shutdown(cancel_futures=True)
            if self._file is not None:
                self._file.abort()
            self._held.clear()
            self._progress.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self._torn = True
            with suppress(SaevStoreError):  # the error on its way out is the one that matters
                self.close()
            return
        was_closed = self._closed
        self.close()
        if not self.complete and not was_closed:
            raise IncompleteStoreError(
                f"{self._n_left} examples are missing, from example {self.next_example} on",
                where=self.url,
                remedy=self._remedy,
            )

    # -- checks --------------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self.complete:
            raise StoreExistsError("no example is missing", where=self.url, remedy="Open the store to read it.")
        if self._closed or self._torn:
            raise ArgumentError(
                "this writer is closed" if self._closed else "an earlier call was cut short by an error",
                where=self.url,
                remedy=self._remedy,
            )

    def _position(self, example: object) -> int:
        """The position of an example that is missing."""
        try:
            position = -1 if isinstance(example, BOOLEANS) else operator.index(cast("SupportsIndex", example))
        except TypeError:
            position = -1
        is_left = self.next_example <= position < self.layout.n_examples and position not in self._held
        if not is_left or position // self.layout.examples_per_shard not in self._shards[self._at :]:
            raise ArgumentError(
                f"example is {brief(example)}; it must be an integer, one of the missing examples, given once",
                where="example",
                remedy=f"The first one that is missing is {self.next_example}." if self._n_left else "None is missing.",
            )
        return position

    def _checked(
        self, acts: object, labels: object, token_arrays: dict[str, object], first_example: int
    ) -> tuple[npt.NDArray[np.generic], Rows]:
        """The activations and token rows of the examples from `first_example` on, as they may be accepted."""
        batch, arrays = as_activations(acts, self.layout), self._target.arrays
        if len(batch) > self._n_left:
            raise ArgumentError(
                f"{len(batch)} examples were appended; n_examples in the metadata is a promise: {self._n_left} are missing",
                where="acts",
            )
        required = bool(arrays) and self.metadata.declares_token_arrays
        rows = token_rows({"labels": labels, **token_arrays}, arrays, len(batch), self.layout, required=required)
        if self._has_tokens not in (None, rows is not None) and len(batch):
            raise ArgumentError(
                "labels are given for some examples and not for others; give them for all, or for none", where="labels"
            )
        check_finite(batch, first_example, self._on_nonfinite)
        return check_overflow(batch, first_example, self.layout, self._on_overflow), rows

    # -- examples into shards ------------------------------------------------------------------------------------------

    def _hold(self, position: int, batch: npt.NDArray[np.generic], rows: Rows) -> None:
        """Copy a checked example that waits for earlier ones."""
        each = self.layout.example_nbytes + (0 if rows is None else rows.nbytes)
        if (len(self._held) + 1) * each > check_number(self.max_reorder_bytes, name="max_reorder_bytes"):
            raise ArgumentError(
                f"example {self.next_example} is missing, and keeping {position} exceeds {self.max_reorder_bytes:,} bytes",
                where="example",
                remedy=f"Write example {self.next_example}, then this one again; or raise the writer's max_reorder_bytes.",
            )
        kept = stored_as(batch, numpy_dtype(self.layout.dtype))
        self._held[position] = batch.copy() if kept is batch else kept, None if rows is None else rows.copy()
        self._has_tokens = rows is not None

    def _accept(self, batch: npt.NDArray[np.generic], rows: Rows) -> None:
        """Take checked examples, the next ones."""
        if not len(batch):
            return
        self._torn = True  # until all of the batch is taken: after an error the position is not known
        self._has_tokens = rows is not None
        layout, at = self.layout, 0
        step = max(1, self._target.block_bytes // layout.example_nbytes)
        while at < len(batch):
            shard_idx = self._shards[self._at]
            file = self._file = self._file or ShardFile(self._target, shard_idx)
            n = min(len(batch) - at, layout.examples_in(shard_idx) - self._example)
            if rows is not None:
                self._rows.append(rows[at : at + n].copy())
            # Views of contiguous input; anything else is made contiguous piece by piece, in bounded memory.
            for i in range(at, at + n, step):
                self._take(file, rows_as_bytes(batch[i : min(i + step, at + n)], layout), layout.used_nbytes(shard_idx))
            at, self._example, self._n_left = at + n, self._example + n, self._n_left - n
            if self._example == layout.examples_in(shard_idx):
                self._at, self._example, self._file, self._taken = self._at + 1, 0, None, 0
        self._progress.advance(len(batch))
        self._torn = False

    def _take(self, file: ShardFile, data: npt.NDArray[np.uint8], used_nbytes: int) -> None:
        """Copy bytes of the shard into blocks, and hand over each that is full."""
        start = 0
        while start < len(data):
            block = self._block
            if block is None:
                self._check_pending()
                free, self._fill = self._free.get(), 0
                nbytes = min(self._target.block_bytes, self.layout.shard_nbytes)
                block = np.empty(nbytes, np.uint8) if free is None else free
            n = min(len(data) - start, len(block) - self._fill)
            block[self._fill : self._fill + n] = data[start : start + n]
            start, self._fill, self._taken = start + n, self._fill + n, self._taken + n
            is_last = self._taken == used_nbytes
            self._block = None if is_last or self._fill == len(block) else block
            if self._block is None:
                self._hand_over(file, block, self._token_files() if is_last else None)

    def _hand_over(self, file: ShardFile, block: npt.NDArray[np.uint8], tokens: dict[str, bytes] | None) -> None:
        """Let a thread write a block, behind the one before it; behind the last one the shard is made durable."""
        previous, fill = self._last, self._fill

        def run() -> None:
            try:
                if previous is not None:
                    wait([previous])  # it was begun before, so this ends
                file.write(block[:fill].data, tokens)
            finally:
                self._free.put(block)

        future = self._threads.submit(run)
        self._pending.append(future)
        self._last = future if tokens is None else None

    def _token_files(self) -> dict[str, bytes]:
        """Values recorded for the tokens of the shard, by token array."""
        rows, self._rows = self._rows, []
        first, found = 0, dict[str, bytes]()
        for array in self._target.arrays if rows else ():
            width = array.example_nbytes(self.layout)
            found[array.name] = b"".join(row[:, first : first + width].tobytes() for row in rows)
            first += width
        return found

    def _check_pending(self) -> None:
        """Raise what a thread has raised."""
        while self._pending and self._pending[0].done():
            try:
                self._pending.popleft().result()
            except BaseException:
                self._torn = True
                raise
