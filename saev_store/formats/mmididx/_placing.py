"""Where in a run of documents samples begin: the loop behind `build_sample_idx`, a piece of documents at a time."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from saev_store._threads import n_threads, share

#: Documents that are looked at together: what is in between stays in the processor's cache.
PIECE = 1 << 16
#: Documents whose lengths are fetched together, in parts by several threads: most of the time goes into these fetches from
#: all over memory.
_BLOCK = 1 << 21
_PART = 1 << 17
_PART_BYTES = 1 << 20
_MAX_I32 = 2**31 - 1
_Int = npt.NDArray[np.signedinteger]


def place_samples(
    found: _Int,
    lengths: npt.NDArray[np.integer],
    entries: npt.NDArray[np.integer],
    step: int,
    *,
    longest: int,
    extra_token: bool,
) -> int:
    """Fill `found` with where the tokens 0, `step`, 2 `step`, … lie: (entry, offset); returns how many rows were filled.

    With `extra_token`, that is the document that has the token (empty ones have none); else the end of a document counts
    instead of the beginning of the next. The first row stays at the beginning, even if that document is empty.

    Args:
        found: Zeros, of shape (at least 1, 2).
        lengths: Tokens of each document.
        entries: Documents in order.
        step: Tokens from one sample to the next.
        longest: The largest of `lengths`.
        extra_token: As in `build_sample_idx`.
    """
    # Within a piece, 32 bits suffice as a rule.
    dtype = np.dtype(np.int32 if longest * PIECE <= _MAX_I32 - step else np.int64)
    at, before, extra, block = 0, 0, int(extra_token), lengths[:0]
    for start in range(0, len(entries), PIECE):
        if at == len(found):
            break
        if start % _BLOCK == 0:
            block = _fetched(lengths, entries[start : start + _BLOCK])
        sizes = block[start % _BLOCK :][:PIECE].astype(dtype, copy=False)
        # Where documents end, counted so that whole steps are the tokens that are looked for: a division tells how many
        # of them come before each end, and costs less than a search for each of them.
        shift = step - (at * step - before) - extra
        first, sizes[0] = sizes[0], sizes[0] + shift
        ends = np.cumsum(sizes, dtype=dtype)
        sizes[0] = first
        before += int(ends[-1]) - shift
        counts = ends // dtype.type(step)
        n = min(int(counts[-1]), len(found) - at)
        if n <= 0:
            continue
        entry = np.flatnonzero(counts[1:] != counts[:-1])
        entry += 1
        if counts[0]:
            entry = np.concatenate(([0], entry))
        if len(entry) != counts[-1]:  # some document has several of them
            entry = np.repeat(entry, np.diff(counts.take(entry), prepend=0))
        entry = entry[:n]
        offset = np.arange(1, n + 1, dtype=dtype) * dtype.type(step)
        offset += sizes.take(entry, mode="clip") - ends.take(entry, mode="clip")
        offset -= extra
        found[at : at + n, 0] = entry + start
        found[at : at + n, 1] = offset
        at += n
    found[0] = 0
    return max(at, 1)


def _fetched(lengths: npt.NDArray[np.integer], entries: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
    """The lengths of some documents, whose numbers are known to be in range."""
    found = np.empty(len(entries), lengths.dtype)

    def fetch(start: int) -> None:
        # In range already, so nothing is clipped: this mode is only several times as fast.
        lengths.take(entries[start : start + _PART], out=found[start : start + _PART], mode="clip")

    share(fetch, deque(range(0, len(entries), _PART)), n_threads(found.nbytes, part_bytes=_PART_BYTES))
    return found
