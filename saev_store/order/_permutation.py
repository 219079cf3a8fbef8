"""Seeded permutations: of a few things at once by sorting random words, of very many by a cipher."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from saev_store.core.layout import IntArray

Words = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
#: A block has fewer rows than 2^24, so its permutation sorts 40 random bits, with the row's number below them.
_ROW_BITS = 24


def derive(*parts: int) -> int:
    """One 64-bit key out of several integers, such as a seed, an epoch and a purpose; any size, negative ones too.

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


def words(key: int | Words, counter: IntArray) -> Words:
    """One random 64-bit word per counter, broadcast against `key`.

    >>> words(0, np.arange(2)).tolist()  # the published first outputs of SplitMix64 from state 0
    [16294208416658607535, 7960286522194355700]
    """
    state = counter.astype(np.uint64)
    state += np.uint64(1)
    state *= np.uint64(_GAMMA)
    if isinstance(key, int):
        state += np.uint64(key)
    else:
        state = state + key
    shifted = np.empty_like(state)
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        state ^= np.right_shift(state, np.uint64(shift), out=shifted)
        state *= np.uint64(factor)
    state ^= np.right_shift(state, np.uint64(31), out=shifted)
    return state


def shuffled(key: int, n: int) -> IntArray:
    """A permutation of `0 … n - 1`: the numbers sorted by their words, by number where those are equal.

    >>> shuffled(7, 6).tolist()
    [1, 5, 0, 4, 3, 2]
    """
    return shuffled_each(np.array([key], dtype=np.uint64), np.array([n]))


def shuffled_each(keys: Words, counts: IntArray) -> IntArray:
    """Permutations of runs of numbers, one run after the other: `first + shuffled(key, count)` for each run.

    >>> shuffled_each(np.array([7, 9], np.uint64), np.array([6, 2])).tolist()
    [1, 5, 0, 4, 3, 2, 6, 7]
    """
    first = np.cumsum(counts) - counts
    number = ranges(np.zeros_like(counts), counts)
    n_bits = np.array([(n - 1).bit_length() for n in counts.tolist()], dtype=np.uint64)
    low = np.repeat((np.uint64(1) << n_bits) - np.uint64(1), counts)
    tagged = words(np.repeat(keys, counts), number)
    tagged &= ~low
    tagged |= number.view(np.uint64)
    for start, n in zip(first.tolist(), counts.tolist(), strict=True):
        tagged[start : start + n].sort()
    tagged &= low
    found = tagged.view(np.int64)
    found += np.repeat(first, counts)
    return found


def ranges(start: IntArray, count: IntArray) -> IntArray:
    """`start[i], start[i] + 1, …`, `count[i]` numbers each, one after the other.

    >>> ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    found = np.repeat(start - (np.cumsum(count) - count), count)
    found += np.arange(len(found))
    return found


def shuffled_rows(keys: Words, counts: IntArray) -> IntArray:
    """Several permutations at once: row `i` of the result begins with one of `0 … counts[i] - 1`; the rest is undefined.

    Shape (len(keys), max(counts)). Row `i` depends on `keys[i]` and `counts[i]` alone.
    """
    longest = int(counts.max(initial=0))
    number = np.arange(longest)
    word = words(keys[:, None], number[None, :])
    word >>= np.uint64(1)
    if (counts < longest).any():
        # Rows that a block does not have are sorted behind all others.
        word[number >= counts[:, None]] = np.uint64(1 << 63)
    # One plain sort: the lower bits, a row's number, make every word unique.
    low = np.uint64((1 << _ROW_BITS) - 1)
    word &= ~low
    word |= number.view(np.uint64)
    word.sort(axis=-1)
    word &= low
    return word.view(np.int64)


def _mix(word: int) -> int:
    """The finaliser of SplitMix64."""
    word &= _MASK
    word = ((word ^ (word >> 30)) * _FACTORS[0]) & _MASK
    word = ((word ^ (word >> 27)) * _FACTORS[1]) & _MASK
    return word ^ (word >> 31)


#: Up to here a permutation is a table (half a MiB) made by sorting; above it, a cipher over the positions.
TABLE_MAX = 1 << 16
_ROUNDS = 8


class Permutation:
    """Which thing stands at a position, and at which position a thing stands; both vectorised.

    Up to 65,536 things it is a table. Above, it is a balanced Feistel network over the smallest even number of bits that
    holds n, repeated until the result is below n ("cycle walking", fewer than four times on average): constant memory.

    >>> order = Permutation(7, key=17)
    >>> sorted(order.at(np.arange(7)).tolist())
    [0, 1, 2, 3, 4, 5, 6]
    >>> large = Permutation(10**12, key=17)
    >>> large.position_of(large.at(np.array([5, 10**11]))).tolist()
    [5, 100000000000]
    """

    def __init__(self, n: int, key: int) -> None:
        self.n = n
        self._table = shuffled(derive(key, 0), n) if n <= TABLE_MAX else None
        self._half_bits = np.uint64(((n - 1).bit_length() + 1) // 2)
        self._half_mask = np.uint64((1 << int(self._half_bits)) - 1)
        self._keys = [derive(key, 1 + number) for number in range(_ROUNDS)]

    def at(self, positions: IntArray) -> IntArray:
        """The things at positions from 0 to n - 1, int64."""
        if self._table is not None:
            return self._table[positions]
        return self._walk(positions, self._encipher)

    def position_of(self, things: IntArray) -> IntArray:
        """The inverse of `at`."""
        if self._table is not None:
            inverse = np.empty_like(self._table)
            inverse[self._table] = np.arange(self.n)
            return inverse[things]
        return self._walk(things, self._decipher)

    def _walk(self, numbers: IntArray, step: Callable[[Words], Words]) -> IntArray:
        """Apply a step again to each number that it took outside 0 … n - 1."""
        found = step(numbers.astype(np.uint64))
        while True:
            outside = found >= np.uint64(self.n)
            if not outside.any():
                return found.astype(np.int64)
            found[outside] = step(found[outside])

    def _encipher(self, word: Words) -> Words:
        """Eight rounds of the network."""
        left, right = word >> self._half_bits, word & self._half_mask
        for key in self._keys:
            left, right = right, left ^ (words(key, right.view(np.int64)) & self._half_mask)
        return (left << self._half_bits) | right

    def _decipher(self, word: Words) -> Words:
        """The inverse of `_encipher`."""
        left, right = word >> self._half_bits, word & self._half_mask
        for key in reversed(self._keys):
            left, right = right ^ (words(key, left.view(np.int64)) & self._half_mask), left
        return (left << self._half_bits) | right
