"""Where in a run of documents samples begin: the loop behind `build_sample_idx`, a piece of documents at a time."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: Documents that are looked at together: what is in between stays in the processor's cache.
PIECE = 1 << 15
#: From so many pieces on, a second thread is worth its start.
_WORTH_A_THREAD = 16
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
    place = _Place(found, lengths, entries, step, int(extra_token), dtype)
    n = len(entries)
    # The second thread first adds up what comes before its share, so it gets less.
    cut = n * 4 // 7 // PIECE * PIECE if n >= _WORTH_A_THREAD * PIECE and _n_cores() > 1 else n
    if cut == n:
        end = place.run(0, n, 0)
    else:
        with ThreadPoolExecutor(1) as pool:
            rest = pool.submit(lambda: place.run(cut, n, place.n_tokens(0, cut)))
            place.run(0, cut, 0)
            end = rest.result()
    found[0] = 0
    return max(end, 1)


@dataclass(frozen=True)
class _Place:
    found: _Int
    lengths: npt.NDArray[np.integer]
    entries: npt.NDArray[np.integer]
    step: int
    #: 1 where a sample needs the first token of the next one, else 0.
    extra: int
    dtype: np.dtype[np.signedinteger]

    def sizes(self, start: int, stop: int) -> _Int:
        """Tokens of the documents of some entries."""
        # In range already, so nothing is clipped: this mode is only several times as fast.
        return self.lengths.take(self.entries[start:stop], mode="clip").astype(self.dtype, copy=False)

    def n_tokens(self, start: int, stop: int) -> int:
        """Tokens of a run of entries."""
        return sum(int(self.sizes(at, min(at + PIECE, stop)).sum(dtype=np.int64)) for at in range(start, stop, PIECE))

    def run(self, start: int, stop: int, before: int) -> int:
        """Place the samples that begin in a run of entries with `before` tokens before it; the row behind the last one."""
        # The first row that this run may have.
        at = 0 if start == 0 else (before + self.step - self.extra) // self.step
        for first_entry in range(start, stop, PIECE):
            if at >= len(self.found):
                break
            sizes = self.sizes(first_entry, min(first_entry + PIECE, stop))
            # Where documents end, counted so that whole steps are the tokens that are looked for: a division tells how
            # many of them come before each end, and costs less than a search for each of them.
            shift = self.step - (at * self.step - before) - self.extra
            first, sizes[0] = sizes[0], sizes[0] + shift
            ends = np.cumsum(sizes, dtype=self.dtype)
            sizes[0] = first
            before += int(ends[-1]) - shift
            counts = ends // self.dtype.type(self.step)
            n = min(int(counts[-1]), len(self.found) - at)
            if n <= 0:
                continue
            entry = np.flatnonzero(counts[1:] != counts[:-1])
            entry += 1
            if counts[0]:
                entry = np.concatenate(([0], entry))
            if len(entry) != counts[-1]:  # some document has several of them
                entry = np.repeat(entry, np.diff(counts.take(entry), prepend=0))
            entry = entry[:n]
            offset = np.arange(1, n + 1, dtype=self.dtype) * self.dtype.type(self.step)
            offset += sizes.take(entry, mode="clip") - ends.take(entry, mode="clip")
            offset -= self.extra
            self.found[at : at + n, 0] = entry + first_entry
            self.found[at : at + n, 1] = offset
            at += n
        return min(at, len(self.found))


def _n_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
