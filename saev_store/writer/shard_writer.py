"""`ShardWriter`: appends examples in order, and publishes the store when all are there."""

from __future__ import annotations

import contextlib
import threading
import weakref
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from saev_store._runtime.abandoned import ABANDONED
from saev_store._runtime.progress import Progress
from saev_store.core.arguments import check_count
from saev_store.errors import ArgumentError, IncompleteStoreError, SaevStoreError, StoreExistsError
from saev_store.names import printable
from saev_store.writer._inputs import (
    NonfinitePolicy,
    OverflowPolicy,
    as_activations,
    check_finite,
    check_overflow,
    rows_as_bytes,
    token_rows,
)
from saev_store.writer._publish import Verify, Written, publish
from saev_store.writer._reorder import MAX_REORDER_BYTES, ReorderBuffer
from saev_store.writer._resume import Kept
from saev_store.writer._shard_file import Background, Receipt, ShardFile, ShardPlan
from saev_store.writer.folder import LABELLED, Claim, part_examples

if TYPE_CHECKING:
    from saev_store.documents import Metadata

#: Blocks between the caller and the disk, and those that are sent to a service at the same time.
_N_BUFFERS, _N_FAR_BUFFERS = 6, 8


class ShardWriter:
    """Writes the examples of a store, or of one part of it, in order. Made by `create_store`.

    Use it as a context manager: leaving the block after the last example publishes the store (a single part only; with
    several, `finalize_store` does); leaving it earlier raises `IncompleteStoreError`; leaving it by an exception makes
    durable what was appended and lets the exception through. Whatever happened, the same call of `create_store` with
    `resume=True` continues after the last durable example.

    One thread may use it. `append` copies what it is given, and a thread of the writer's own hashes and writes.

    Attributes:
        url: Where the store is, or will be.
        metadata: The metadata document that publication writes.
        layout: The geometry of the store.
        n_examples: How many examples the whole store promises.
        example_range: The half-open range of examples that this writer's part consists of; all of them without parts.
        verify: What is checked before publishing: `"sizes"`, or `"digests"`, which reads every shard again.
        complete: Whether nothing is left to do: the part is durable, and without parts the store is published.
    """

    def __init__(
        self,
        plan: ShardPlan,
        metadata: Metadata,
        claim: Claim,
        kept: Kept,
        *,
        shards: range,
        takeover: bool,
        complete: bool,
        on_nonfinite: NonfinitePolicy,
        on_overflow: OverflowPolicy,
        progress: bool | None,
        held: ExitStack,
    ) -> None:
        layout = plan.layout
        self.url = plan.folder.url
        self.metadata, self.layout, self.n_examples = metadata, layout, layout.n_examples
        self.example_range = part_examples(layout, shards)
        self.verify: Verify = "sizes"
        self.complete = self._closed = complete
        self._plan, self._claim, self._takeover = plan, claim, takeover
        self._on_nonfinite, self._on_overflow = on_nonfinite, on_overflow
        self._shard_idx, self._file, self._has_tokens = kept.shard_idx, kept.file, kept.has_tokens
        self._live = [kept.file] if kept.file is not None else []  # files that are not complete
        held.callback(_abort_all, self._live)
        self._offset = kept.file.digester.nbytes if kept.file is not None else 0
        self._receipts, self._n_finished = list(kept.receipts), 0
        self._finished: SimpleQueue[Receipt | None] = SimpleQueue()  # the receipts of shards that were completed here
        self._torn = self._abandoned = False
        self._max_reorder_bytes = MAX_REORDER_BYTES
        #: What `write` holds, from its first call on.
        self._reorder: ReorderBuffer | None = None
        self._buffer: npt.NDArray[np.uint8] | None = None
        self._fill: int = 0  # bytes of the buffer that hold data
        self._sent: int = 0  # bytes of the buffer that a checkpoint has written already
        start, end = self.example_range
        self._shown = progress
        self._progress = Progress(
            (end - start) * layout.example_nbytes,
            "writing",
            shown=False if complete else progress,
            done=(self.next_example - start) * layout.example_nbytes,
            unit="examples",
            unit_nbytes=layout.example_nbytes,
        )
        self._background = Background(
            buffer_nbytes=min(plan.block_bytes, layout.shard_nbytes),
            n_buffers=_N_BUFFERS + (_N_FAR_BUFFERS if plan.folder.is_far else 0),
            where=self.url,
            held=held,
        )
        # A writer that is dropped without closing must not leave its thread behind, nor keep others out.
        self._finalizer = weakref.finalize(self, _close_abandoned, self._background)
        self._finalizer.atexit = False  # everything is closed then

    # -- where it stands -----------------------------------------------------------------------------------------------

    @property
    def next_example(self) -> int:
        """The index of the example that the next `append` begins with."""
        _, end = self.example_range
        if self._closed and self.complete:
            return end
        at = self._shard_idx * self.layout.examples_per_shard + self._offset // self.layout.example_nbytes
        return min(at, end)

    @property
    def n_written(self) -> int:
        """How many examples of this part were accepted, those of earlier, resumed attempts included."""
        return self.next_example - self.example_range[0]

    @property
    def max_reorder_bytes(self) -> int:
        """How many bytes `write` may hold of examples that wait for an earlier one; 1 GiB, and may be changed."""
        return self._max_reorder_bytes

    @max_reorder_bytes.setter
    def max_reorder_bytes(self, nbytes: int) -> None:
        self._max_reorder_bytes = check_count(nbytes, name="max_reorder_bytes", least=0)

    def __repr__(self) -> str:
        state = "complete" if self.complete else "closed" if self._closed else "open"
        n_examples = self.example_range[1] - self.example_range[0]
        return printable(f"<ShardWriter {self.url}: {self.n_written} of {n_examples} examples, {state}>")

    # -- writing -------------------------------------------------------------------------------------------------------

    def append(self, acts: object, labels: object = None, **token_arrays: object) -> None:
        """Add the next examples.

        Args:
            acts: (k, layers, tokens, d_model), or one example without the first axis; NumPy or torch, float32, bfloat16 or
                float16. Or a mapping with (k, tokens, d_model) for each layer, named 5, (5, "attn_out") or
                "blocks.5.hook_attn_out"; it is copied into one array first. What is of the store's dtype is written bit for bit, other numbers are widened exactly or rounded to
                nearest even. Read before this returns; any strides and byte order.
            labels: (k, content tokens) integers from 0 to 255, for all examples of the store or for none.
            token_arrays: Protocol 3.0: (k, content tokens) for each token array that the metadata declares, by name.

        Raises:
            ArgumentError: wrong shape, dtype or values; more examples than promised. Nothing of the batch was taken.
            SaevStoreError: writing this or an earlier batch failed. Close, remove the cause, resume.
        """
        self._check_usable()
        if self._reorder:
            raise ArgumentError(
                f"{len(self._reorder)} examples wait for example {self.next_example}",
                where="acts",
                remedy="Give that one to `write`; `append` is for when nothing waits.",
            )
        batch, rows = self._checked(acts, labels, token_arrays, self.next_example)
        if len(batch):
            self._accept(batch, rows)

    def write(self, example: int, acts: object, labels: object = None, **token_arrays: object) -> None:
        """Add one example, in any order: it is appended when all examples before it have come.

        Until then a copy of it is held in memory, in the store's dtype, and is not durable: after a crash, and after
        closing with an example missing, `next_example` of the resumed writer is the first one to write again.

        Args:
            example: Its position in the store, from `next_example` to the end of `example_range`.
            acts: (layers, tokens, d_model), or (1, layers, tokens, d_model), or a mapping of layers, as for `append`.
            labels: (content tokens,) or (1, content tokens), as for `append`.
            token_arrays: Likewise, by name.

        Raises:
            ArgumentError: the example was written before or is not of this part; more than `max_reorder_bytes` would be
                held, and the message names the example that is missing; or as for `append`. Nothing was taken.
            SaevStoreError: as for `append`.
        """
        self._check_usable()
        if self._reorder is None:
            self._reorder = ReorderBuffer(self.layout)
        reorder = self._reorder
        position = reorder.check(example, self.example_range, self.next_example)
        batch, rows = self._checked(acts, labels, token_arrays, position)
        if len(batch) != 1:
            raise ArgumentError(f"acts holds {len(batch)} examples; `write` takes one", where="acts")
        if position > self.next_example:
            reorder.hold(position, batch, rows, next_example=self.next_example, max_nbytes=self._max_reorder_bytes)
            return
        self._accept(batch, rows)
        while (held := reorder.take(self.next_example)) is not None:
            self._accept(*held)

    def note(self, text: str) -> None:
        """Show a few words behind the bar, where there is one."""
        self._progress.note(text)

    def checkpoint(self) -> None:
        """Write what was appended so far and make it durable, where the back end can make part of a shard durable.

        Called every `checkpoint_bytes`, after every shard and on closing anyway.
        """
        self._check_usable()
        self._begin_checkpoint()
        self._background.drain()

    def close(self) -> None:
        """Make durable what was appended; publish if that is all; let go of the store. Closing twice is fine.

        Raises:
            SaevStoreError: writing or publishing failed; what was durable before still is.
        """
        if self._closed:
            return
        self._closed = True
        background = self._background
        try:
            if background.error is None:
                self._begin_checkpoint()
            is_whole = self.next_example == self.example_range[1] and not self._torn and not self._abandoned
            if is_whole and self._claim.options.world == 1 and background.error is None:
                publish(
                    self._plan.folder,
                    self.metadata,
                    self._claim,
                    verify=self.verify,
                    takeover=self._takeover,
                    progress=self._shown,
                    written=Written(self._committed, background.drain),
                )
            else:
                background.drain()
            self.complete = is_whole
        finally:
            if self._finalizer.detach() is not None:
                background.close()
            self._progress.close()
            self._reorder = None

    def _committed(self) -> list[Receipt]:
        """The receipts of all shards, when the last one is committed."""
        if not self._n_finished:  # else the commit has checked that
            self._plan.owner.check()
        receipts = self._receipts
        while self._n_finished:
            if (receipt := self._background.wait_for(self._finished)) is not None:
                receipts.append(receipt)
                self._n_finished -= 1
        return receipts

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            # The error on its way out is the one that matters.
            self._abandoned = True
            with contextlib.suppress(SaevStoreError):
                self.close()
            return
        was_closed, n_waiting = self._closed, len(self._reorder or ())
        self.close()
        if not self.complete and not was_closed:
            waiting = f", {n_waiting} more wait for example {self.next_example} and are not kept" if n_waiting else ""
            raise IncompleteStoreError(
                f"{self.n_written} of {self.example_range[1] - self.example_range[0]} examples of {self._what()} were appended"
                f"{waiting}",
                where=self.url,
                remedy="Create it again with resume=True, and append the rest from its `next_example` on.",
            )

    # -- inside --------------------------------------------------------------------------------------------------------

    def _what(self) -> str:
        whole = self.example_range == (0, self.layout.n_examples)
        return "the store" if whole else f"the part {self.example_range[0]}:{self.example_range[1]}"

    def _check_usable(self) -> None:
        if self.complete:
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

    def _begin_checkpoint(self) -> None:
        """Hand over what the buffer holds, and have it made durable."""
        if not self._torn:  # else what the buffer holds is uncertain
            self._send(self._buffer, last_use=False)
        if (file := self._file) is not None:
            self._background.submit(file.checkpoint)

    def _declare_labelled(self, *, labelled: bool) -> None:
        """Say for all parts whether the store has labels; `ArgumentError` if another part has said otherwise."""
        if self._plan.folder.create(LABELLED, b"true" if labelled else b"false") == "taken":
            raise ArgumentError(
                f"this part has {'labels' if labelled else 'no labels'}, another one has {'none' if labelled else 'some'}",
                where="labels",
                remedy="Give labels for every example of a store, or for none.",
            )

    def _checked(
        self, acts: object, labels: object, token_arrays: dict[str, object], first_example: int
    ) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.uint8] | None]:
        """The activations and token rows of the examples from `first_example` on, as they may be accepted."""
        batch = as_activations(acts, self.layout)
        k = len(batch)
        if k > self.example_range[1] - first_example:
            raise ArgumentError(
                f"{k} examples were appended at example {first_example}, but {self._what()} ends at {self.example_range[1]}",
                where="acts",
                remedy="n_examples in the metadata is a promise; write a store with more examples under other metadata.",
            )
        given = {"labels": labels, **token_arrays} if labels is not None else token_arrays
        is_declared = self.metadata.declares_token_arrays
        rows = None
        if given or is_declared:
            rows = token_rows(given, self._plan.arrays, k, self.layout, required=is_declared)
        has_tokens = self._has_tokens
        if has_tokens is None and self._reorder is not None:
            has_tokens = self._reorder.has_tokens
        if k and has_tokens is not None and has_tokens != (rows is not None):
            raise ArgumentError(
                "labels are missing for these examples; earlier ones have them"
                if has_tokens
                else "labels for these examples, but earlier ones have none",
                where="labels",
                remedy="Give labels for every example of a store, or for none.",
            )
        check_finite(batch, first_example, self._on_nonfinite)
        if batch.dtype.name != self.layout.dtype:
            batch = check_overflow(batch, first_example, self.layout, self._on_overflow)
        return batch, rows

    def _accept(self, batch: npt.NDArray[np.generic], rows: npt.NDArray[np.uint8] | None) -> None:
        """Take checked examples, the next ones."""
        # Until all of the batch is taken: after an error the caller cannot know where to continue, and a thread that closes the
        # writer meanwhile must not send a buffer that is being filled.
        self._torn = True
        if self._has_tokens is None:
            if self._claim.options.world > 1 and not self.metadata.declares_token_arrays:  # all parts have to agree
                self._declare_labelled(labelled=rows is not None)
            self._has_tokens = rows is not None
        self._take(batch, rows)
        self._torn = False
        self._progress.advance(batch.shape[0] * self.layout.example_nbytes)

    def _take(self, batch: npt.NDArray[np.generic], rows: npt.NDArray[np.uint8] | None) -> None:
        """Spread checked examples over shards."""
        layout, at = self.layout, 0
        while at < len(batch):
            used = layout.used_nbytes(self._shard_idx)
            n = min(len(batch) - at, (used - self._offset) // layout.example_nbytes)
            if self._file is None:
                self._file = ShardFile(self._plan, self._shard_idx)
                self._live.append(self._file)
            file = self._file
            if rows is not None:
                part = rows[at : at + n].tobytes()
                self._background.submit(partial(file.add_token_rows, part))
            # Views of contiguous input; anything else is made contiguous piece by piece, in bounded memory.
            step = max(1, self._plan.block_bytes // layout.example_nbytes)
            for i in range(at, at + n, step):
                self._take_bytes(rows_as_bytes(batch[i : min(i + step, at + n)], layout))
            at += n
            if self._offset == used:
                self._background.submit(partial(file.finish, self._finished, self._live))
                self._file, self._offset = None, 0
                self._shard_idx += 1
                self._n_finished += 1

    def _take_bytes(self, data: npt.NDArray[np.uint8]) -> None:
        """Copy bytes into block buffers, and hand over each that is full."""
        used, taken = self.layout.used_nbytes(self._shard_idx), 0
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
                # The buffer is let go of first: an interrupt in between loses a block that was not promised, while the
                # other order would write a block twice.
                buffer, self._buffer = self._buffer, None
                self._send(buffer, last_use=True)

    def _send(self, buffer: npt.NDArray[np.uint8] | None, *, last_use: bool) -> None:
        """Write what of a block was not written yet; the block goes on to fill up, unless this is its `last_use`."""
        start, end = self._sent, self._fill
        self._sent = end
        if buffer is not None and start < end and self._file is not None:
            done = partial(self._background.free.put, buffer) if last_use else None
            offset = self._offset - (end - start)
            self._background.submit(partial(self._file.write, buffer[start:end].data, offset, done))


def _abort_all(live: list[ShardFile]) -> None:
    """Let go of the files that are not complete."""
    for file in live:
        with contextlib.suppress(SaevStoreError):
            file.abort()


def _close_abandoned(background: Background) -> None:
    """Close what a writer that was garbage-collected has left."""
    # The collector may run in the thread that is to end, or in one that does what is waited for; the main one is neither.
    if threading.current_thread() is threading.main_thread():
        background.close()
    else:
        ABANDONED.enqueue(background)
