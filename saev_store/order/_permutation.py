"""A seeded permutation of n things that can be asked about any single one, however large n is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from saev_store.core.layout import IntArray
from saev_store.order._words import Words, derive, shuffled, words

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
        self._half_bits = np.uint64((max(n - 1, 1).bit_length() + 1) // 2)
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
            inverse[self._table] = np.arange(self.n, dtype=np.int64)
            return inverse[things]
        return self._walk(things, self._decipher)

    def _walk(self, numbers: IntArray, step: Callable[[Words], Words]) -> IntArray:
        found = step(numbers.astype(np.uint64))
        while True:
            outside = found >= np.uint64(self.n)
            if not outside.any():
                return found.astype(np.int64)
            found[outside] = step(found[outside])

    def _encipher(self, word: Words) -> Words:
        left, right = word >> self._half_bits, word & self._half_mask
        for key in self._keys:
            left, right = right, left ^ (words(key, right.view(np.int64)) & self._half_mask)
        return (left << self._half_bits) | right

    def _decipher(self, word: Words) -> Words:
        left, right = word >> self._half_bits, word & self._half_mask
        for key in reversed(self._keys):
            left, right = right ^ (words(key, left.view(np.int64)) & self._half_mask), left
        return (left << self._half_bits) | right
