"""Recording by several processes: which shards one of them records, and who publishes the store.

A store is cut into parts of whole shards, in the same way whatever the number of processes: each shard is a part, up to
`MAX_PARTS` of them. A rank writes a run of these parts, one after the other, each with a writer of its own. So what is done is a
matter of shards: any other number of ranks can go on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from saev_store.core.arguments import check_flag
from saev_store.errors import CorruptShardError, IncompleteStoreError, NotFoundError, ResumeError, WriterConflictError
from saev_store.names import METADATA_NAME
from saev_store.record._part import starts_several
from saev_store.store.store import ShardStore
from saev_store.transport import open_transport
from saev_store.writer import unfinished
from saev_store.writer.folder import Folder, part_examples, part_shards
from saev_store.writer.parts import UnpublishedStore

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from saev_store.core.layout import Layout
    from saev_store.documents import Metadata
    from saev_store.transport import Transport
    from saev_store.writer import ShardWriter

#: Throwing a store away takes the locks of all parts at once, and each is an open file.
MAX_PARTS = 512
_MOST_SHOWN = 5

#: Opens the writer of a part; None: of the whole store.
OpenWriter = Callable[[tuple[int, int] | None], "ShardWriter"]


@dataclass(frozen=True)
class RecordedPart:
    """A part that is recorded, of a store that is not published yet because others are not.

    Attributes:
        url: Where the store will be.
        part: (rank, number of ranks) of this part.
        missing: The half-open ranges of examples that other ranks had not recorded when this one was done; empty while another
            rank publishes the store.
        ranks_left: The ranks that these examples belong to, if there are as many ranks as now.
    """

    url: str
    part: tuple[int, int]
    missing: tuple[tuple[int, int], ...]
    ranks_left: tuple[int, ...]


def write_part(
    root: Transport,
    metadata: Metadata,
    part: tuple[int, int] | None,
    open_writer: OpenWriter,
    write: Callable[[ShardWriter | RunWriter], object],
    *,
    continues: bool,
) -> ShardStore | RecordedPart:
    """Write a part of a store, or all of it, and publish the store if nothing else is missing.

    Args:
        root: The folder of stores.
        metadata: Of the store.
        part: (rank, number of ranks), or None: all of it.
        open_writer: Opens the writer of one part of the store.
        write: Appends to a writer what it lacks.
        continues: Whether an unfinished store may be continued.

    Raises:
        ResumeError: with `part`, where one process has begun the store without parts.
        WriterConflictError: another process is writing the same part.
    """
    begun = UnpublishedStore.find(root.at(metadata.hash)) if part is not None or continues else None
    try:
        if part is None and (begun is None or begun.n_parts == 1):
            with open_writer(None) as writer:
                write(writer)
        else:
            for run in _runs(metadata.layout, begun, part or (0, 1), open_writer):
                with run:
                    write(run)
        return _published(root.at(metadata.hash), metadata.layout, part)
    except WriterConflictError as error:
        if part is not None:
            error.remedy = "Let one process live that records these examples; when it has ended, the same call records what is left."
        elif starts_several():
            error.remedy = "Each process has to record a part of its own: pass part='auto'."
        raise


def _runs(
    layout: Layout, begun: UnpublishedStore | None, part: tuple[int, int], open_writer: OpenWriter
) -> Iterator[RunWriter]:
    """What a rank has to write, in order; parts that are whole are verified and left out."""
    n_parts = _n_parts(layout, begun)
    parts, untouched = part_shards(n_parts, *part), begun.untouched_parts() if begun else [True] * n_parts
    at = parts.start
    while at < parts.stop:
        writer = open_writer((at, n_parts))
        if writer.complete:  # published
            return
        if writer.next_example == writer.example_range[1]:
            writer.close()
            at += 1
            continue
        stop = at + 1
        while stop < parts.stop and untouched[stop]:
            stop += 1
        yield RunWriter(writer, open_writer, range(at, stop), n_parts, _examples_of(layout, parts[:1], n_parts)[0])
        at = stop


def _n_parts(layout: Layout, begun: UnpublishedStore | None) -> int:
    """In how many parts ranks write the shards.

    Raises:
        ResumeError: one process has begun the store without parts.
    """
    n_parts = min(layout.n_shards, MAX_PARTS) if begun is None else begun.n_parts
    if begun is not None and n_parts == 1 < layout.n_shards:
        raise ResumeError(
            "one process has begun this store without parts",
            where=begun.url,
            remedy="Let one process go on without `part`, or throw the unfinished store "
            "away with `discard_unfinished` or `saev-store clean --older-than 0` of its folder.",
        )
    return n_parts


def n_left(store_transport: Transport, layout: Layout, part: tuple[int, int] | None) -> int:
    """How many examples of a part are not there; of a store that is published, none.

    Args:
        store_transport: The folder of the store.
        layout: Of the store.
        part: (rank, number of ranks), or None: all of it.

    Raises:
        ResumeError: with `part`, where one process has begun the store without parts.
    """
    if Folder(store_transport, "").exists(METADATA_NAME):
        return 0
    begun = UnpublishedStore.find(store_transport)
    first, end = 0, layout.n_examples
    if part is not None:
        n_parts = _n_parts(layout, begun)
        first, end = _examples_of(layout, part_shards(n_parts, *part), n_parts)
    return end - first - (0 if begun is None else begun.n_durable(first, end))


def _examples_of(layout: Layout, parts: range, n_parts: int) -> tuple[int, int]:
    """The half-open range of examples of some consecutive parts, which may be none."""
    if not parts:
        return 0, 0
    first, last = (part_shards(layout.n_shards, part, n_parts) for part in (parts[0], parts[-1]))
    return part_examples(layout, range(first.start, last.stop))


def _published(store_transport: Transport, layout: Layout, part: tuple[int, int] | None) -> ShardStore | RecordedPart:
    """The store, published by this call if all parts are there; a `RecordedPart` where they are not."""
    begun = UnpublishedStore.find(store_transport)
    missing = [(0, layout.n_examples)] if begun is None else begun.missing()
    if begun is not None and not missing:
        try:
            begun.publish()
        except WriterConflictError:  # another rank publishes it
            if part is None:
                raise
    if part is None or Folder(store_transport, "").exists(METADATA_NAME):
        return ShardStore.open(store_transport)
    _, n = part
    n_parts = min(layout.n_shards, MAX_PARTS) if begun is None else begun.n_parts
    of_ranks = [_examples_of(layout, part_shards(n_parts, rank, n), n_parts) for rank in range(n)]
    left = [
        rank
        for rank, (first, end) in enumerate(of_ranks)
        if any(start < end and first < stop for start, stop in missing)
    ]
    return RecordedPart(store_transport.url, part, tuple(missing), tuple(left))


def finalize(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, object] | None = None,
    verify: bool = True,
    takeover: bool = False,
    progress: bool | None = None,
) -> ShardStore:
    """Publish a store whose parts are all recorded, and open it; a published one is only opened.

    The last rank of `record(…, part=…)` publishes the store by itself. This is for when it could not.

    Args:
        url: The folder of the store: what `RecordedPart.url` says.
        storage_options: Options of its file system.
        verify: Read every shard once more, and compare it with its digests.
        takeover: Publish although another process has begun to: in a bucket, one that has crashed cannot be told from one at work.
        progress: Show a bar on standard error; None: when it is a terminal.

    Raises:
        IncompleteStoreError: examples are missing; the message names them, and what records them.
        NotFoundError: nothing was begun there.
        CorruptShardError: a shard is not what was recorded.
        WriterConflictError: another process is publishing the store.
    """
    verify, takeover = check_flag(verify, name="verify"), check_flag(takeover, name="takeover")
    transport = open_transport(url, storage_options)
    begun = UnpublishedStore.find(transport)
    if begun is None:
        if not Folder(transport, "").exists(METADATA_NAME):
            raise _nothing_begun(transport)
        return ShardStore.open(transport)
    again = (
        "Make the call again that began it."
        if begun.n_parts == 1 < begun.metadata.layout.n_shards
        else "Make the call again that recorded it, as one process, --part 1/1, or as n of them, --part 1/n to n/n: they "
        "record what is missing, and publish. From Python part=(0, 1), or part=(0, n) to (n - 1, n)."
    )
    missing = begun.missing()
    if missing:
        n_examples = sum(end - first for first, end in missing)
        raise IncompleteStoreError(
            f"{n_examples} of {begun.metadata.n_examples} examples are not recorded, as whole shards: {_shown(missing)}",
            where=begun.url,
            remedy=again,
        )
    try:
        begun.publish(verify="digests" if verify else "sizes", takeover=takeover, progress=progress)
    except CorruptShardError as error:
        error.remedy = again
        raise
    return ShardStore.open(transport)


def _shown(ranges: Sequence[tuple[int, int]]) -> str:
    """Some ranges of examples, first and last included, as text.

    >>> _shown([(0, 8), (16, 17)])
    '0 to 7, 16'
    """
    said = [f"{first} to {end - 1}" if end - first > 1 else str(first) for first, end in ranges[:_MOST_SHOWN]]
    more = f", and {len(ranges) - _MOST_SHOWN} more ranges" if len(ranges) > _MOST_SHOWN else ""
    return ", ".join(said) + more


def _nothing_begun(transport: Transport) -> NotFoundError:
    names = [found.name for found in unfinished(transport)]
    return NotFoundError(
        "no recording was begun there" + (f"; below it are the unfinished stores {', '.join(names)}" if names else ""),
        where=transport.url,
        remedy="Name the folder of the store itself.",
    )


class RunWriter:
    """The writers of consecutive parts as one, which takes their examples in order; a context manager.

    The first part may have been begun before; nothing is there of the others.

    Attributes:
        example_range: The half-open range of examples that are there in the end. Those before `next_example` are there.
    """

    def __init__(
        self, writer: ShardWriter, open_writer: OpenWriter, parts: range, n_parts: int, first_example: int
    ) -> None:
        self._writer, self._open_writer, self._parts, self._n_parts = writer, open_writer, parts, n_parts
        layout = writer.layout
        last = part_shards(layout.n_shards, parts[-1], n_parts)
        self.example_range = first_example, part_examples(layout, last)[1]

    @property
    def url(self) -> str:
        """Where the store is, or will be."""
        return self._writer.url

    @property
    def metadata(self) -> Metadata:
        """The documents of the store."""
        return self._writer.metadata

    @property
    def layout(self) -> Layout:
        """The geometry of the store."""
        return self._writer.layout

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do."""
        return self._writer.complete and len(self._parts) == 1

    @property
    def next_example(self) -> int:
        """The index of the example that the next `append` begins with."""
        return self._writer.next_example

    def append(self, acts: torch.Tensor, **token_arrays: npt.NDArray[np.generic]) -> None:
        """Add the next examples; see `ShardWriter.append`.

        Raises:
            WriterConflictError: another process has begun one of the parts meanwhile.
        """
        at = 0
        while at < len(acts):
            # Where there is no room left, all of it: the writer says so.
            n = min(len(acts) - at, self._writer.example_range[1] - self._writer.next_example) or len(acts) - at
            rows = {name: values[at : at + n] for name, values in token_arrays.items()}
            self._writer.append(acts[at : at + n], **rows)
            at += n
            if self._writer.next_example == self._writer.example_range[1] and len(self._parts) > 1:
                self._begin_next()

    def note(self, text: str) -> None:
        """Show a few words behind the bar; see `ShardWriter.note`."""
        self._writer.note(text)

    def _begin_next(self) -> None:
        self._writer.close()
        self._parts = self._parts[1:]
        self._writer = writer = self._open_writer((self._parts[0], self._n_parts))
        if writer.complete or writer.next_example != writer.example_range[0]:
            writer.close()
            raise WriterConflictError(
                f"another process has recorded examples from {writer.example_range[0]} on since this one began",
                where=writer.url,
                remedy="",
            )

    def __enter__(self) -> Self:
        self._writer.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._writer.__exit__(kind, error, tb)
