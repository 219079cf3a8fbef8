"""The bare peers of `transports.py`: the simplest code that moves the same bytes. Frozen, so that a ratio means the same next year."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from _common import D_MODEL

if TYPE_CHECKING:
    from obstore import Bytes
    from obstore.store import S3Store

IN_FLIGHT = 64
PART_BYTES = 8 << 20


class Piece(NamedTuple):
    """A range of an object."""

    key: str
    start: int
    end: int


def ranges(store: S3Store, pieces: Sequence[Piece], use: Callable[[int, Bytes, str | None], object]) -> None:
    """Get all pieces, `IN_FLIGHT` at a time; `use` takes each one's number, bytes and ETag."""
    import obstore

    async def everything() -> None:
        slots = asyncio.Semaphore(IN_FLIGHT)

        async def one(number: int, piece: Piece) -> None:
            async with slots:
                answer = await obstore.get_async(store, piece.key, options={"range": (piece.start, piece.end)})
                use(number, await answer.bytes_async(), answer.meta["e_tag"])

        await asyncio.gather(*(one(*numbered) for numbered in enumerate(pieces)))

    asyncio.run(everything())


def keep(store: S3Store, pieces: Sequence[Piece]) -> list[object]:
    """All pieces and their ETags, each in memory of its own."""
    found: list[object] = [None] * len(pieces)

    def use(number: int, data: Bytes, e_tag: str | None) -> None:
        found[number] = data, e_tag

    ranges(store, pieces, use)
    return found


def drop(store: S3Store, pieces: Sequence[Piece]) -> None:
    """Read all pieces and drop each: what a loader reads, without its window and its batches."""
    ranges(store, pieces, lambda *_: None)


def fill(store: S3Store, pieces: Sequence[Piece], memory: memoryview) -> None:
    """Copy all pieces into one memory, in their order."""
    ends = np.cumsum([piece.end - piece.start for piece in pieces]).tolist()

    def use(number: int, data: Bytes, _: str | None) -> None:
        memory[ends[number] - len(data) : ends[number]] = memoryview(data)

    ranges(store, pieces, use)


def upload(store: S3Store, data: np.ndarray) -> None:
    import obstore

    obstore.put(store, "u", data, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=8)


def open_map(path: Path) -> np.ndarray:
    """A file of float32 vectors, mapped."""
    return np.memmap(path, "<f4", "r").reshape(-1, D_MODEL)


def copy_vectors(vectors: np.ndarray, numbers: Sequence[int]) -> None:
    """One vector after the other, each as a copy."""
    for number in numbers:
        np.array(vectors[number])


def gather(maps: Sequence[np.ndarray], numbers: np.ndarray) -> np.ndarray:
    """Vectors by their numbers in equally long maps, in one array."""
    if len(maps) == 1:
        return np.asarray(maps[0][numbers])
    out = np.empty((len(numbers), D_MODEL), np.float32)
    which, local = np.divmod(numbers, len(maps[0]))
    for i, vectors in enumerate(maps):
        here = np.flatnonzero(which == i)
        out[here] = vectors[local[here]]
    return out


def scan(paths: Sequence[Path], memory: memoryview) -> None:
    """Read files from end to end through one memory."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        at = 0
        while n := os.preadv(fd, [memory], at):
            at += n
        os.close(fd)


def stats(documents: Sequence[Path], files: Sequence[str]) -> None:
    """What opening a store cannot do without: read its documents, ask each shard for its size."""
    for path in documents:
        path.read_bytes()
    for name in files:
        os.stat(name)


def whole(files: Mapping[str, int], size: int = PART_BYTES) -> list[Piece]:
    """Ranges that cover objects of these sizes."""
    return [
        Piece(key, start, min(start + size, nbytes))
        for key, nbytes in files.items()
        for start in range(0, nbytes, size)
    ]
