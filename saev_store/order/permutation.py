"""Seeded permutations: small ones by sorting random words, of very many things by a cipher."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from saev_store.core.layout import IntArray

Words = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
#: Up to here a permutation of blocks is a table of half a MiB. A table of 5 * 10^7 blocks takes 400 MB and seven seconds of sorting.
TABLE_MAX = 1 << 16
_ROUNDS = 8


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
