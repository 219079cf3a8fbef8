"""Pools: what they are made of, and where each of their rows goes.

The blocks of an epoch are permuted, or stay in storage order. Their rows are cut into `n_partitions` equal streams, and each stream
into shares of batches. A pool is a run of batches: its rows are permuted within each stream. In storage order nothing is permuted, and
ranks take equal parts of each batch instead of streams. Small permutations sort random words; those of very many things are a cipher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from saev_store.core.layout import IntArray
from saev_store.core.rows import RowSpace
from saev_store.errors import ArgumentError

Words = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
#: Up to here a permutation of blocks is a table of half a MiB. A table of 5 * 10^7 blocks takes 400 MB and seven seconds of sorting.
TABLE_MAX = 1 << 16
_ROUNDS = 8
#: Changes if the same arguments would give another order. It is part of every state.
ORDER_VERSION = 2
_BLOCKS, _ROWS = 1, 2
#: Blocks whose sizes are looked up at once.
_N_AT_ONCE = 1 << 20
#: With an early start, the first pool of an epoch is this fraction of a full one. Each next one is twice as large.
_FIRST_FRACTION = 32


@dataclass(frozen=True)
class Cut:
    """The sizes of an epoch: batches, pools, ranks. All closed forms.

    Args:
        n_rows: Rows of an epoch, over all ranks.
        batch_size: Rows of a full batch of one rank.
        world: Number of ranks.
        drop_last: Leave out the last batch if it is not full.
        n_partitions: Streams of a shuffled order; None for storage order.
        pool_batches: Batches of a full pool.
        early_start: Let the pools grow at the start of an epoch.

    Attributes:
        global_batch_size: Rows of a full batch over all ranks.
        n_batches: Batches of an epoch, the same on every rank.
        n_samples: Rows of an epoch over all ranks, each counted once.
        fills_up: True if streams that are one row short repeat a row, so that all ranks have batches of equal sizes.
        pool_starts: First batch of each pool, and the number of batches: int64 (pools + 1,).

    Raises:
        ArgumentError: `n_partitions` does not divide what it must, or there are fewer rows than partitions.

    >>> cut = Cut(100, batch_size=4, world=2, drop_last=False, n_partitions=4, pool_batches=8, early_start=True)
    >>> cut.n_batches, cut.pool_starts.tolist()
    (13, [0, 1, 3, 7, 13])
    """

    n_rows: int
    batch_size: int
    world: int
    drop_last: bool
    n_partitions: int | None
    pool_batches: int
    early_start: bool
    global_batch_size: int = field(init=False)
    n_batches: int = field(init=False)
    n_samples: int = field(init=False)
    fills_up: bool = field(init=False)
    pool_starts: IntArray = field(init=False, compare=False)

    def __post_init__(self) -> None:
        whole, parts = self.batch_size * self.world, self.n_partitions
        n_batches = self.n_rows // whole if self.drop_last else -(-self.n_rows // whole)
        n_samples = n_batches * whole if self.drop_last else self.n_rows
        fills_up = self.world > 1 and not self.drop_last
        if parts is not None and (parts < 1 or whole % parts or parts % self.world):
            raise ArgumentError(
                f"n_partitions is {parts}; it must divide the global batch of {whole} rows and be a multiple of the "
                f"{self.world} rank(s)",
                where="n_partitions",
                remedy="Choose another n_partitions, batch_size or number of ranks.",
            )
        if parts is not None and fills_up and 0 < self.n_rows < parts:
            raise ArgumentError(
                f"{self.n_rows} rows cannot be shared by {parts} partitions on {self.world} ranks without drop_last",
                where="n_partitions",
            )

        full = max(1, min(self.pool_batches, n_batches))
        growing, size, start = list[int](), -(-full // _FIRST_FRACTION), 0
        while self.early_start and size < full and start + size < n_batches:
            growing.append(start)
            start += size
            size = min(2 * size, full)
        rest = np.arange(start, max(n_batches, 1), full, dtype=np.int64)
        starts = np.concatenate((growing, rest, [n_batches])).astype(np.int64)
        self.__dict__.update(
            global_batch_size=whole, n_batches=n_batches, n_samples=n_samples, fills_up=fills_up, pool_starts=starts
        )


@dataclass(frozen=True, eq=False)
class Pool:
    """A run of batches of one rank: the pieces of blocks that are read for it, and the slot of each row in its memory.

    A block is one layer, or all stacked layers, of one example. Blocks are numbered by chosen example, then by layer. Each `batch_size`
    slots are a batch.

    Attributes:
        first_batch: Number of its first batch in the epoch.
        n_batches: Number of its batches.
        ordinal: Chosen example of each piece: int64 (pieces,).
        layer: Layer of each piece, counted among the chosen ones, 0 with stacked layers: int64 (pieces,).
        counts: Rows of each piece: int64 (pieces,).
        cell: Token of each row within its block, piece after piece: int64 (rows,).
        slot: Slot of each row, piece after piece: int64 (rows,). A row that fills up occurs again, with another slot.
        in_order: True if `slot` counts from 0.
    """

    first_batch: int
    n_batches: int
    ordinal: IntArray
    layer: IntArray
    counts: IntArray
    cell: IntArray
    slot: IntArray
    in_order: bool

    def by_slot(self, of_row: IntArray) -> IntArray:
        """Return a value of each row in the order of the slots, fresh."""
        found = np.empty(len(self.slot), np.int64)
        found[self.slot] = of_row
        return found


class Epoch:
    """The pools of one epoch.

    Args:
        space: The chosen rows.
        cut: Sizes of batches and pools.
        seed: Any integer.
        epoch: Number of the epoch. Each has an order of its own.

    >>> from saev_store.core.layout import Layout
    >>> from saev_store.core.rows import row_space
    >>> rows = row_space(Layout(7, (2, 5), 4, True, 8, 3), layer=5, tokens="content")
    >>> cut = Cut(len(rows), 8, 1, False, n_partitions=1, pool_batches=2, early_start=False)
    >>> pool = Epoch(rows, cut, seed=17, epoch=0).pool(1, rank=0)
    >>> pool.first_batch, pool.n_batches, pool.ordinal.tolist()
    (2, 2, [2, 0, 5])
    """

    def __init__(self, space: RowSpace, cut: Cut, seed: int, epoch: int) -> None:
        self.space, self.cut, self._key = space, cut, (seed, epoch, ORDER_VERSION)
        self.n_blocks = space.n_examples * space.rows_per_token
        is_shuffled = cut.n_partitions is not None and self.n_blocks
        #: Blocks at positions of the epoch.
        self._blocks_at = Permutation(self.n_blocks, derive(*self._key, _BLOCKS)).at if is_shuffled else np.asarray
        #: Rows before each block in the order of the epoch, if some blocks have fewer than others.
        self._ends: IntArray | None = None
        if space.ends is not None:
            of_layer = np.diff(space.ends, prepend=0) // space.rows_per_token
            self._ends = np.zeros(self.n_blocks + 1, dtype=np.int64)
            for start in range(0, self.n_blocks, _N_AT_ONCE):
                stop = min(start + _N_AT_ONCE, self.n_blocks)
                self._ends[start + 1 : stop + 1] = of_layer[
                    self._blocks_at(np.arange(start, stop)) // space.rows_per_token
                ]
            np.cumsum(self._ends, out=self._ends)

    def pool(self, number: int, rank: int) -> Pool:
        """Return a pool of a rank, by its number."""
        cut = self.cut
        b0, b1 = int(cut.pool_starts[number]), int(cut.pool_starts[number + 1])
        runs = list(self._stored_runs(b0, b1, rank) if cut.n_partitions is None else self._streams(number, rank))
        found = [(np.zeros(0, np.int64),) * 4]
        for lo, hi, slots in runs:
            if hi > lo:
                found.append((*self._pieces(lo, hi), slots[: hi - lo]))
            if (n_fill := len(slots) - (hi - lo)) > 0:
                block, _, cell = self._pieces(hi - 1, hi)
                found.append((block, np.array([n_fill]), cell.repeat(n_fill), slots[hi - lo :]))
        block, counts, cell, slot = map(np.concatenate, zip(*found, strict=True))
        ordinal, layer = np.divmod(block[counts > 0], np.int64(self.space.rows_per_token))
        return Pool(b0, b1 - b0, ordinal, layer, counts[counts > 0], cell, slot, cut.n_partitions is None)

    def _pieces(self, lo: int, hi: int) -> tuple[IntArray, IntArray, IntArray]:
        """Return what the rows `lo` to `hi` of the epoch are made of, row after row; `hi` is more than `lo`.

        Returns:
            Numbers of the blocks (pieces,), rows of each piece (pieces,), and the token of each row within its block (rows,).
        """
        ends, n_tokens = self._ends, len(self.space.tokens)
        if ends is None:
            first, last = lo // n_tokens, (hi - 1) // n_tokens + 1
            ends = np.arange(first, last + 1) * n_tokens
        else:
            first, last = (int(np.searchsorted(ends, row, side="right")) - 1 for row in (lo, hi - 1))
            ends, last = ends[first : last + 2], last + 1
        number = self._blocks_at(np.arange(first, last))
        if self._ends is None:
            cell = np.tile(np.arange(n_tokens, dtype=np.int64), len(number))
        else:
            stays = np.ones((len(number), n_tokens), dtype=np.bool_)
            if self.space.kept is not None:
                example = self.space.example(number // self.space.rows_per_token)
                stays[:, self.space.n_special :] = self.space.kept[example]
            cell = np.nonzero(stays)[1]
        return number, np.diff(np.clip(ends, lo, hi)), cell[lo - ends[0] : hi - ends[0]]

    def _stored_runs(self, b0: int, b1: int, rank: int) -> Iterator[tuple[int, int, IntArray]]:
        """Yield the rows `lo` to `hi` of each batch and their slots; more slots than rows repeat row `hi - 1`."""
        cut, at = self.cut, 0
        whole = cut.global_batch_size
        if cut.world == 1 and b1 > b0:
            lo, hi = b0 * whole, min(b1 * whole, cut.n_rows)
            yield lo, hi, np.arange(hi - lo, dtype=np.int64)
            return
        for batch in range(b0, b1):
            each = -(-min(whole, cut.n_rows - batch * whole) // cut.world)
            lo = min(batch * whole + rank * each, cut.n_rows)
            yield lo, min(lo + each, cut.n_rows), np.arange(at, at + each, dtype=np.int64)
            at += each

    def _streams(self, number: int, rank: int) -> Iterator[tuple[int, int, IntArray]]:
        """Yield the rows `lo` to `hi` of each stream of a rank and their slots; more slots than rows repeat row `hi - 1`."""
        cut, parts = self.cut, self.cut.n_partitions or 1
        b0, b1 = int(cut.pool_starts[number]), int(cut.pool_starts[number + 1])
        each, share = parts // cut.world, cut.global_batch_size // parts
        batches = np.arange(b1 - b0, dtype=np.int64)[:, None] * cut.batch_size
        to_last = (cut.n_batches - 1 - b0) * share
        place = 0  # of the stream in the epoch's last batch, which may not be full
        for stream in range(each):
            part = rank * each + stream
            first, end = part * cut.n_rows // parts, (part + 1) * cut.n_rows // parts
            lo, hi = (min(first + batch * share, end) for batch in (b0, b1))
            n = n_slots = hi - lo
            if cut.fills_up:
                n_slots = max(n, min(-(-cut.n_rows // parts) - b0 * share, (b1 - b0) * share))
            slots = (batches + np.arange(stream * share, (stream + 1) * share)).reshape(-1)[:n_slots]
            slots[to_last:] += place - stream * share
            place += max(n_slots - to_last, 0)
            # The row that comes at place j of the stream is row `order[j]` of the pool.
            by_row = slots.copy()
            by_row[permutation(n, derive(*self._key, _ROWS, part, number))] = slots[:n]
            yield lo, hi, by_row


def derive(*parts: int) -> int:
    """Derive a 64-bit key from several integers of any size and sign, such as a seed, an epoch and a purpose.

    >>> derive(17, 0) == derive(17, 0), derive(17, 0) == derive(0, 17)
    (True, False)
    """
    key = len(parts)
    for part in parts:
        rest, negative = (~part, 1) if part < 0 else (part, 0)
        key = _mix(key ^ negative)
        while True:
            key = _mix((key ^ (rest & _MASK)) + _GAMMA)
            rest >>= 64
            if not rest:
                break
    return key


def permutation(n: int, key: int) -> IntArray:
    """Return a permutation of `0 … n - 1`, int64, by sorting raw words of Philox. NumPy keeps the streams of its bit generators.

    >>> permutation(6, 17).tolist()
    [4, 3, 2, 0, 1, 5]
    """
    words = np.random.Philox(key=key).random_raw(n)
    # The low bits are the number itself. They make the words distinct, so that every sort gives the same result.
    low = np.uint64((1 << max(n - 1, 1).bit_length()) - 1)
    words &= ~low
    words |= np.arange(n, dtype=np.uint64)
    words.sort()
    words &= low
    return words.view(np.int64)


class Permutation:
    """A permutation of n things in constant memory, evaluated at any positions.

    Up to 65,536 things it is a table. Above, it is a balanced Feistel network over the smallest even number of bits that holds n,
    repeated until the result is below n ("cycle walking", fewer than four times on average).

    >>> order = Permutation(7, key=17)
    >>> sorted(order.at(np.arange(7)).tolist())
    [0, 1, 2, 3, 4, 5, 6]
    >>> large = Permutation(10**12, key=17)
    >>> large.position_of(large.at(np.array([5, 10**11]))).tolist()
    [5, 100000000000]
    """

    def __init__(self, n: int, key: int) -> None:
        self.n = n
        self._table = permutation(n, key) if n <= TABLE_MAX else None
        self._half_bits = np.uint64(((n - 1).bit_length() + 1) // 2)
        self._half_mask = np.uint64((1 << int(self._half_bits)) - 1)
        self._keys = [np.uint64(derive(key, number)) for number in range(_ROUNDS)]

    def at(self, positions: IntArray) -> IntArray:
        """Return the things at positions from 0 to n - 1, int64."""
        if self._table is not None:
            return self._table[positions]
        return self._walk(positions, self._encipher)

    def position_of(self, things: IntArray) -> IntArray:
        """Return the positions of things, int64: the inverse of `at`."""
        if self._table is not None:
            return np.argsort(self._table)[things]
        return self._walk(things, self._decipher)

    def _walk(self, numbers: IntArray, step: Callable[[Words], Words]) -> IntArray:
        """Apply a step again to each number that it took outside of 0 to n - 1."""
        found = step(numbers.astype(np.uint64))
        while True:
            outside = found >= np.uint64(self.n)
            if not outside.any():
                return found.view(np.int64)
            found[outside] = step(found[outside])

    def _encipher(self, word: Words) -> Words:
        left, right = word >> self._half_bits, word & self._half_mask
        for key in self._keys:
            left, right = right, left ^ (_scrambled(key, right) & self._half_mask)
        return (left << self._half_bits) | right

    def _decipher(self, word: Words) -> Words:
        left, right = word >> self._half_bits, word & self._half_mask
        for key in reversed(self._keys):
            left, right = right ^ (_scrambled(key, left) & self._half_mask), left
        return (left << self._half_bits) | right


def _scrambled(key: np.uint64, counter: Words) -> Words:
    """Return a word of SplitMix64 for each counter."""
    state = (counter + np.uint64(1)) * np.uint64(_GAMMA)
    state += key
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        state ^= state >> np.uint64(shift)
        state *= np.uint64(factor)
    state ^= state >> np.uint64(31)
    return state


def _mix(word: int) -> int:
    """Finalise a word as SplitMix64 does."""
    word &= _MASK
    word = ((word ^ (word >> 30)) * _FACTORS[0]) & _MASK
    word = ((word ^ (word >> 27)) * _FACTORS[1]) & _MASK
    return word ^ (word >> 31)
