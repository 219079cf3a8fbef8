"""Block digests, and which shards each part writes: arithmetic over bytes in memory, nothing that opens a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import xxhash

from saev_store.core.layout import Layout

ALGORITHM = "xxh3_128"
#: Length of a digest in hexadecimal digits.
DIGEST_DIGITS = 32


def digest(data: bytes | bytearray | memoryview) -> str:
    """The xxh3_128 of some bytes, in hexadecimal.

    >>> digest(b"")
    '99aa06d3014798d86001c324468d497f'
    """
    return xxhash.xxh3_128_hexdigest(data)


def n_blocks(nbytes: int, block_bytes: int) -> int:
    """How many blocks some bytes are cut into; the last one may be short.

    >>> n_blocks(17, 8), n_blocks(16, 8), n_blocks(0, 8)
    (3, 2, 0)
    """
    return -(-nbytes // block_bytes)


def block_ranges(nbytes: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """The half-open byte range of every block.

    >>> list(block_ranges(17, 8))
    [(0, 8), (8, 16), (16, 17)]
    """
    for start in range(0, nbytes, block_bytes):
        yield start, min(start + block_bytes, nbytes)


class BlockDigester:
    """The digests of a stream's consecutive blocks, fed in pieces of any size.

    Args:
        block_bytes: Length of a block.
        done: Digests of whole blocks that were fed before, by an earlier process.

    >>> digester = BlockDigester(4)
    >>> digester.update(b"abcde")
    >>> digester.nbytes, digester.digests() == [digest(b"abcd"), digest(b"e")]
    (5, True)
    """

    def __init__(self, block_bytes: int, done: Iterable[str] = ()) -> None:
        self.block_bytes = block_bytes
        self._done = list(done)
        self._state = xxhash.xxh3_128()
        self._fill = 0

    @property
    def nbytes(self) -> int:
        """How many bytes the digests stand for."""
        return len(self._done) * self.block_bytes + self._fill

    def update(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B") if not isinstance(data, memoryview) else data
        while len(view) > 0:
            piece = view[: self.block_bytes - self._fill]
            if self._fill == 0 and len(piece) == self.block_bytes:
                self._done.append(digest(piece))
            else:
                self._state.update(piece)
                self._fill += len(piece)
                if self._fill == self.block_bytes:
                    self._done.append(self._state.hexdigest())
                    self._state.reset()
                    self._fill = 0
            view = view[len(piece) :]

    def digests(self) -> list[str]:
        """One digest per block so far; the last one stands for the part of a block that has arrived."""
        return [*self._done, self._state.hexdigest()] if self._fill else list(self._done)

    def whole(self) -> list[str]:
        """The digests of the whole blocks only."""
        return list(self._done)


def part_shards(n_shards: int, rank: int, world: int) -> range:
    """The shards that one of `world` parts writes: contiguous, disjoint, together all, sizes at most one apart.

    >>> [list(part_shards(5, rank, 3)) for rank in range(3)]
    [[0], [1, 2], [3, 4]]
    """
    return range(n_shards * rank // world, n_shards * (rank + 1) // world)


def part_examples(layout: Layout, shards: range) -> tuple[int, int]:
    """The half-open range of examples that some consecutive shards hold."""
    start = min(shards.start * layout.examples_per_shard, layout.n_examples)
    return start, max(start, min(shards.stop * layout.examples_per_shard, layout.n_examples))


def lost_examples(bad: Sequence[tuple[int, int]], layout: Layout, shard_idx: int) -> list[tuple[int, int]]:
    """The half-open ranges of examples, merged and ascending, that damaged byte ranges of one shard touch.

    >>> layout = Layout(7, (2, 5, 11), 4, True, 8, 3)                    # 480 bytes an example
    >>> lost_examples([(0, 8), (470, 481)], layout, 1)
    [(3, 5)]
    """
    first, _ = layout.example_range(shard_idx)
    ranges: list[tuple[int, int]] = []
    for start, end in sorted(bad):
        low = first + start // layout.example_nbytes
        high = first + n_blocks(end, layout.example_nbytes)
        if ranges and low <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(high, ranges[-1][1]))
        elif low < high:
            ranges.append((low, high))
    return ranges
