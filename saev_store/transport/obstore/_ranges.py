"""Ranges of one object through obstore: which requests bring them, and what makes sure that all are of the same object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from saev_store.errors import SaevStoreError, TransportError
from saev_store.transport._remote import Pins, Version
from saev_store.transport._waits import task_group
from saev_store.transport.base import Buffer
from saev_store.transport.checks import Run, run_end, scatter, too_short
from saev_store.transport.obstore._client import ObstoreClient, is_beyond_the_end

if TYPE_CHECKING:
    from obstore import Bytes, ObjectMeta

#: Longer ranges are fetched in pieces of this size, side by side.
PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class RangeReader:
    """One object, and who reads it; its coroutines run in the client's loop.

    Attributes:
        client: Asks.
        pins: What objects looked like when they were first read.
        path: Its name below the client's address, under which it is pinned.
        key: Its name in the bucket.
        where: Its name for messages.
    """

    client: ObstoreClient
    pins: Pins
    path: str
    key: str
    where: str

    async def ranges(self, starts: Sequence[int], ends: Sequence[int]) -> list[Buffer]:
        """One read-only buffer for each range, side by side; empty ones cost no request."""
        ranges = list(zip(starts, ends, strict=True))
        async with task_group() as group:
            tasks = [group.create_task(self._range(start, end)) for start, end in ranges if end > start]
        found = iter(tasks)
        return [next(found).result() if end > start else b"" for start, end in ranges]

    async def piece(self, start: int, end: int, *, needed: int = 0) -> Bytes:
        """One request; `needed` is the last byte of the range that it is a piece of.

        Raises:
            CorruptShardError: the object ends before `needed`.
            TransportError: it is not the one that was read before, or the server sent something else.
        """
        import obstore

        client, where, needed = self.client, self.where, max(end, needed)

        async def get() -> Bytes:
            answer = await obstore.get_async(client.store, self.key, options={"range": (start, end)})
            self._check(answer.meta, needed=needed)
            return await answer.bytes_async()

        try:
            data = await client.slot(get)
        except SaevStoreError:
            raise
        except Exception as error:
            if is_beyond_the_end(error):
                size = (await self.head())["size"]
                if size < needed:
                    raise too_short(where, size=size, needed=needed) from None
            raise
        return self._counted(data, start, end)

    def readinto(self, runs: Sequence[Run]) -> None:
        """Fill memory from several places; waits in the caller's thread, and never writes after it has returned."""
        pieces = _pieces(runs)
        nbytes = sum(run_end(piece) - piece[0] for piece in pieces)
        try:
            self.client.call("read", self.where, lambda: self.fill(pieces), nbytes=nbytes)
        except BaseException:
            # The wait may have ended before the reads did: no piece that arrives later may be copied.
            self.client.in_loop(pieces.clear)
            raise

    def _check(self, meta: ObjectMeta, *, needed: int) -> None:
        """That an answer is of the object that was read before, and that it is long enough."""
        self.pins.check(self.path, _version(meta), where=self.where)
        if meta["size"] < needed:
            raise too_short(self.where, size=meta["size"], needed=needed)

    def _counted(self, data: Bytes, start: int, end: int) -> Bytes:
        """What came, once it is sure that it is all."""
        if len(data) != end - start:
            raise TransportError(
                f"{len(data):,} bytes came for the range {start:,}:{end:,}", where=self.where, transient=True
            )
        self.client.requests.add("get_ranges", read=len(data))
        return data

    async def fill(self, pieces: list[Run]) -> None:
        """Fetch pieces side by side and copy each into its place; `pieces` is cleared to stop the copying."""

        async def fill(number: int) -> None:
            start, end = pieces[number][0], run_end(pieces[number])
            found = await self.piece(start, end)
            if pieces:
                scatter(memoryview(found), pieces[number][1])

        async with task_group() as group:
            for number in range(len(pieces)):
                group.create_task(fill(number))

    async def head(self) -> ObjectMeta:
        """What the service says about it, asked anew each time."""
        import obstore

        self.client.requests.add("size")
        return await self.client.slot(lambda: obstore.head_async(self.client.store, self.key))

    async def _range(self, start: int, end: int) -> Buffer:
        if end - start <= PIECE_BYTES:
            return memoryview(await self.piece(start, end))
        # Memory for a long range is not taken before the file is known to be long enough.
        first = await self.piece(start, start + PIECE_BYTES, needed=end)
        size = self.pins.versions[self.path][1] or 0
        if size < end:
            raise too_short(self.where, size=size, needed=end)
        whole = bytearray(end - start)
        scatter(memoryview(first), [memoryview(whole)[: len(first)]])
        await self.fill(_pieces([(start + len(first), [memoryview(whole)[len(first) :]])]))
        return memoryview(whole).toreadonly()


def _pieces(runs: Sequence[Run]) -> list[Run]:
    """The same runs, cut into pieces of at most `PIECE_BYTES`."""
    pieces: list[Run] = []
    for begin, views in runs:
        start, room = begin, 0
        for view in views:
            rest = view
            while len(rest):
                if room == 0:
                    pieces.append((start, []))
                    room = PIECE_BYTES
                part = rest[:room]
                pieces[-1][1].append(part)
                start, room, rest = start + len(part), room - len(part), rest[len(part) :]
    return pieces


def _version(meta: ObjectMeta) -> Version:
    return meta.get("e_tag") or str(meta.get("last_modified")), meta["size"]
