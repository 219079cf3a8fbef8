"""`ShardWriter`: appends examples in order, and publishes the store when all are there."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import numpy.typing as npt

from saev_store._runtime.progress import Progress
from saev_store._runtime.threads import ABANDONED
from saev_store.errors import ArgumentError, IncompleteStoreError, SaevStoreError, StoreExistsError
from saev_store.writer._background import Background, no_threads
from saev_store.writer._claim import part_examples
from saev_store.writer._inputs import NonfinitePolicy, as_activations, as_labels, check_finite, rows_as_bytes
from saev_store.writer._publish import Written
from saev_store.writer._resume import Kept
from saev_store.writer._shard_file import Receipt, ShardFile, ShardPlan

if TYPE_CHECKING:
    from saev_store.core.layout import Layout
    from saev_store.documents import Metadata

#: Blocks between the caller and the disk, and those that are sent to a service at the same time.
_N_BUFFERS, _N_FAR_BUFFERS = 6, 8

Verify = Literal["digests", "sizes"]
#: Publishes: what to verify, and what was written.
Publish = Callable[[Verify, Written], None]


class ShardWriter:
    """Writes the examples of a store, or of one part of it, in order. Made by `create_store`.

    Use it as a context manager: leaving the block after the last example publishes the store (a single part only; with
    several, `finalize_store` does); leaving it earlier raises `IncompleteStoreError`; leaving it by an exception makes
    durable what was appended and lets the exception through. Whatever happened, the same call of `create_store` with
    `resume=True` continues after the last durable example.

    One thread may use it. `append` copies what it is given, and a thread of the writer's own hashes and writes.
    """

    def __init__(
        self,
        plan: ShardPlan,
        metadata: Metadata,
        *,
        shards: range,
        kept: Kept,
        declare_labelled: Callable[[bool], None] | None,
        publish: Publish | None,
        on_nonfinite: NonfinitePolicy,
        progress: bool | None,
        held: ExitStack,
        already_complete: bool = False,
    ) -> None:
        self._plan = plan
        self._layout = plan.layout
        self._metadata = metadata
        self._shards = shards
        self._shard_idx = kept.shard_idx
        self._file = kept.file
        self._live = [kept.file] if kept.file is not None else []  # files with an open sink, for cleaning up
        self._receipts = list(kept.receipts)
        self._offset = kept.file.nbytes if kept.file is not None else 0
        self._labelled = kept.labelled
        self._declare_labelled = declare_labelled
        self._publish = publish
        #: What is checked before publishing.
        self.verify: Verify = "sizes"
        self._on_nonfinite = on_nonfinite
        self._held = held
        self._range = part_examples(plan.layout, shards)
        self._complete = already_complete
        self._closed = already_complete
        self._torn = False
        self._last: SimpleQueue[None] = SimpleQueue()  # holds an item when the last shard is committed
        self._buffer: npt.NDArray[np.uint8] | None = None
        self._fill: int = 0  # bytes of the buffer that hold data
        self._sent: int = 0  # bytes of the buffer that a checkpoint has written already
        n_bytes = (self._range[1] - self._range[0]) * plan.layout.example_nbytes
        done = (self.next_example - self._range[0]) * plan.layout.example_nbytes
        self._progress = Progress(n_bytes, "writing", shown=False if already_complete else progress, done_nbytes=done)
        self._background = Background(
            buffer_nbytes=min(plan.block_bytes, plan.layout.shard_nbytes),
            n_buffers=_N_BUFFERS + (_N_FAR_BUFFERS if plan.folder.is_far else 0),
            where=self.url,
        )
        # A writer that is dropped without closing must not leave its thread behind, nor keep others out.
        self._ending = _Ending(self._background, self._live, self._held)
        try:
            ABANDONED.add(self._ending)
        except RuntimeError as error:
            raise no_threads(error, where=self.url) from None
        self._finalizer = weakref.finalize(self, _abandoned, self._ending)
        self._finalizer.atexit = False  # everything is closed then

    # -- where it stands -----------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Where the store is, or will be."""
        return self._plan.folder.url

    @property
    def metadata(self) -> Metadata:
        """The metadata document that publication writes."""
        return self._metadata

    @property
    def layout(self) -> Layout:
        """The geometry of the store."""
        return self._layout

    @property
    def n_examples(self) -> int:
        """How many examples the whole store promises."""
        return self._layout.n_examples

    @property
    def example_range(self) -> tuple[int, int]:
        """The half-open range of examples that this writer's part consists of; all of them without parts."""
        return self._range

    @property
    def next_example(self) -> int:
        """The index of the example that the next `append` begins with."""
        if self._closed and self._complete:
            return self._range[1]
        at = self._shard_idx * self._layout.examples_per_shard + self._offset // self._layout.example_nbytes
        return min(at, self._range[1])

    @property
    def n_written(self) -> int:
        """How many examples of this part were accepted, those of earlier, resumed attempts included."""
        return self.next_example - self._range[0]

    @property
    def complete(self) -> bool:
        """Whether this writer has nothing left to do: its part is durable, and without parts the store is published."""
        return self._complete

    def __repr__(self) -> str:
        state = "complete" if self._complete else "closed" if self._closed else "open"
        return f"<ShardWriter {self.url}: {self.n_written} of {self._range[1] - self._range[0]} examples, {state}>"

    # -- writing -------------------------------------------------------------------------------------------------------

    def append(self, acts: object, labels: object = None) -> None:
        """Add the next examples.

        Args:
            acts: (k, layers, tokens, d_model), or one example without the first axis; NumPy or torch, float32 (float16
                and bfloat16 are widened). Read before this returns; any strides and byte order.
            labels: (k, content tokens) integers from 0 to 255, for all examples of the store or for none.

        Raises:
            ArgumentError: wrong shape, dtype or values; more examples than promised. Nothing of the batch was taken.
            SaevStoreError: writing this or an earlier batch failed. Close, remove the cause, resume.
        """
        self._check_usable()
        batch = as_activations(acts, self._layout)
        k = len(batch)
        if k > self._range[1] - self.next_example:
            raise ArgumentError(
                f"{k} examples were appended at example {self.next_example}, but {self._what()} ends at {self._range[1]}",
                where="acts",
                remedy="n_examples in the metadata is a promise; write a store with more examples under other metadata.",
            )
        rows = self._checked_labels(labels, k)
        check_finite(batch, self.next_example, self._on_nonfinite)
        if k == 0:
            return
        try:
            if self._labelled is None:
                if self._declare_labelled is not None:
                    self._declare_labelled(rows is not None)
                self._labelled = rows is not None
            self._take(batch, rows)
        except BaseException:
            self._torn = True  # part of the batch may have been taken: the caller cannot know where to continue
            raise
        self._progress.advance(batch.shape[0] * self._layout.example_nbytes)

    def checkpoint(self) -> None:
        """Write what was appended so far and make it durable, where the back end can make part of a shard durable.

        Called every `checkpoint_bytes`, after every shard and on closing anyway.
        """
        self._check_usable()
        self._send_partial()
        if (file := self._file) is not None:
            self._background.submit(file.checkpoint)
        self._background.drain()

    def close(self) -> None:
        """Make durable what was appended; publish if that is all; let go of the store. Closing twice is fine.

        Raises:
            SaevStoreError: writing or publishing failed; what was durable before still is.
        """
        self._close(publish=True)

    def _close(self, *, publish: bool) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if not self._background.failed:
                if not self._torn:  # else the rest of the buffer is given up: what it holds is uncertain
                    self._send_partial()
                if (file := self._file) is not None:
                    self._background.submit(file.checkpoint)
            is_whole = publish and self.next_example == self._range[1] and not self._torn
            if is_whole and self._publish is not None and not self._background.failed:
                self._publish(self.verify, Written(self._committed, self._background.drain))
            else:
                self._background.drain()
            self._complete = is_whole
        finally:
            self._release()

    def _committed(self) -> list[Receipt]:
        """Wait until the last shard is committed; the receipts of all."""
        if self._live:  # the shard's completion checks the owner
            self._background.wait_for(self._last)
        else:
            self._plan.owner.check()
        return self._receipts

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            # The error on its way out is the one that matters; what a failing close would add is already known from it.
            with contextlib.suppress(SaevStoreError):
                self._close(publish=False)
            return
        was_closed = self._closed
        self.close()
        if not self._complete and not was_closed:
            raise IncompleteStoreError(
                f"{self.n_written} of {self._range[1] - self._range[0]} examples of {self._what()} were appended",
                where=self.url,
                remedy="Create it again with resume=True, and append the rest from its `next_example` on.",
            )

    # -- inside --------------------------------------------------------------------------------------------------------

    def _what(self) -> str:
        whole = self._range == (0, self._layout.n_examples)
        return "the store" if whole else f"the part {self._range[0]}:{self._range[1]}"

    def _check_usable(self) -> None:
        if self._complete:
            raise StoreExistsError(
                "this writer has nothing left to do: all its examples are there",
                where=self.url,
                remedy="Open the store to read it; other metadata makes another store.",
            )
        if self._closed or self._torn:
            raise ArgumentError(
                "this writer is closed" if self._closed else "an earlier append was cut short by an error",
                where=self.url,
                remedy="Create it again with resume=True and continue at its next_example.",
            )

    def _checked_labels(self, labels: object, k: int) -> npt.NDArray[np.uint8] | None:
        rows = as_labels(labels, k, self._layout) if labels is not None else None
        if k and self._labelled is not None and self._labelled != (rows is not None):
            raise ArgumentError(
                "labels are missing for these examples; earlier ones have them"
                if self._labelled
                else "labels for these examples, but earlier ones have none",
                where="labels",
                remedy="Give labels for every example of a store, or for none.",
            )
        return rows

    def _take(self, batch: npt.NDArray[np.generic], rows: npt.NDArray[np.uint8] | None) -> None:
        """Spread checked examples over shards."""
        layout, at = self._layout, 0
        while at < len(batch):
            used = layout.used_nbytes(self._shard_idx)
            n = min(len(batch) - at, (used - self._offset) // layout.example_nbytes)
            if self._file is None:
                self._file = ShardFile(self._plan, self._shard_idx)
                self._live.append(self._file)
            file = self._file
            if rows is not None:
                part = rows[at : at + n].tobytes()
                self._background.submit(partial(file.add_labels, part))
            # Views of contiguous input; anything else is made contiguous piece by piece, in bounded memory.
            step = max(1, self._plan.block_bytes // layout.example_nbytes)
            for i in range(at, at + n, step):
                self._take_bytes(rows_as_bytes(batch[i : min(i + step, at + n)]))
            at += n
            if self._offset == used:
                self._finish_shard(file)

    def _take_bytes(self, data: npt.NDArray[np.uint8]) -> None:
        """Copy bytes into block buffers, and hand over each that is full."""
        used, taken = self._layout.used_nbytes(self._shard_idx), 0
        while taken < len(data):
            if self._buffer is None:
                # After a resume the first piece only fills up a block: blocks stay aligned in the file.
                self._fill = self._sent = self._offset % self._plan.block_bytes
                self._buffer = self._background.borrow()
            block_start = self._offset - self._fill
            block_end = min(block_start + self._plan.block_bytes, used) - block_start
            n = min(len(data) - taken, block_end - self._fill)
            self._buffer[self._fill : self._fill + n] = data[taken : taken + n]
            self._fill += n
            self._offset += n
            taken += n
            if self._fill == block_end:
                # First forget the buffer, then hand it over: an interrupt in between loses a block that was not
                # promised; the other order would write a block twice.
                buffer, sent, fill = self._buffer, self._sent, self._fill
                self._buffer = None
                self._send(buffer, sent, fill, last_use=True)

    def _send(self, buffer: npt.NDArray[np.uint8], start: int, end: int, *, last_use: bool) -> None:
        if self._file is not None:
            done = partial(self._background.give_back, buffer) if last_use else None
            offset = self._offset - (end - start)
            self._background.submit(partial(self._file.write, buffer[start:end].data, offset, done))

    def _send_partial(self) -> None:
        """Write the part of the current block that is there; the block goes on to fill up afterwards."""
        if self._buffer is not None and self._fill > self._sent:
            start, self._sent = self._sent, self._fill
            self._send(self._buffer, start, self._fill, last_use=False)

    def _finish_shard(self, file: ShardFile) -> None:
        live, receipts, last, is_last = self._live, self._receipts, self._last, self._shard_idx == self._shards.stop - 1

        def job() -> None:
            receipt = file.commit()
            receipts.append(receipt)
            if is_last:
                last.put(None)
            file.record(receipt)
            live.remove(file)

        self._background.submit(job)
        self._file = None
        self._offset = 0
        self._shard_idx += 1

    def _release(self) -> None:
        if self._finalizer.detach() is not None:
            self._ending.close()
        self._progress.close()


class _Ending:
    """What has to be ended when a writer is closed, or forgotten."""

    def __init__(self, background: Background, live: list[ShardFile], held: ExitStack) -> None:
        self._background, self._live, self._held = background, live, held
        self._pid = os.getpid()

    def close(self) -> None:
        """End the thread, let go of files that are not complete, and let others in; nothing of it in a forked child."""
        if os.getpid() != self._pid:
            return
        ABANDONED.remove(self)
        self._background.stop()
        for file in self._live:
            with contextlib.suppress(SaevStoreError):
                file.abort()
        self._held.close()


def _abandoned(ending: _Ending) -> None:
    # Garbage may be found by the very thread that is to end, or that has to do what is waited for; the main one is neither.
    if threading.current_thread() is threading.main_thread():
        ending.close()
    else:
        ABANDONED.enqueue(ending)
