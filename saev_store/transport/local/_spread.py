"""Large local reads with several threads: one thread copies from the page cache slower than memory allows.

A disk is read fastest in one stream of large requests. So the threads read what is in memory already; when one of them
would have to wait for the disk, one thread reads the rest.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Sequence

from saev_store._runtime.threads import n_threads, share
from saev_store.transport.checks import Run, cut_runs, too_short
from saev_store.transport.local.files import IOV_MAX, behind, positions

#: What a read must have for each thread.
WORTH_BYTES = 3 << 20
#: What one thread reads at a time: less than its whole share, so that a thread without a core delays the others little.
PART_BYTES = 2 << 20
#: Linux: read what is in memory, and return less rather than wait for a disk.
_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)


class SpreadReader:
    """Fills memory from files with several threads; shared by all threads that read through one transport."""

    # Asking the page cache for nothing costs a cold scan some percent. The more reads in a row had to wait for the
    # disk, the more are read without asking, up to 16. The counts are hints: threads may miss each other's.
    _n_waited = _n_unasked = 0

    def fill(self, fd: int, runs: Sequence[Run], *, nbytes: int, where: str, end: int) -> None:
        """Fill memory from a file.

        Args:
            fd: The file.
            runs: What to fill from where.
            nbytes: The sum of all.
            where: The file's name for messages.
            end: The last byte that is needed, for messages.

        Raises:
            OSError: the system cannot read.
            CorruptShardError: the file ends before `end`.
        """
        n, left = n_threads(nbytes, part_bytes=WORTH_BYTES), list(runs)
        if n > 1 and self._n_unasked > 0:
            self._n_unasked -= 1
        elif n > 1:
            if self._n_waited:
                left = _read_cached(fd, runs, where=where, end=end)
            else:
                left = _share_out(fd, runs, n, where=where, end=end)
            self._n_waited = self._n_waited + 1 if left else 0
            self._n_unasked = 1 << min(self._n_waited, 4) if left else 0
        for at, views in left:
            preadv_all(fd, views, at, where=where, end=end)


def _share_out(fd: int, runs: Sequence[Run], n: int, *, where: str, end: int) -> list[Run]:
    """Read with several threads what is in memory; gives what is left to read, in order."""
    parts, left = deque(cut_runs(runs, PART_BYTES)), list[Run]()

    def work(part: list[Run]) -> None:
        if rest := _read_cached(fd, part, where=where, end=end):
            left.extend(rest)
            with contextlib.suppress(IndexError):
                while True:
                    left.extend(parts.popleft())

    share(work, parts, n)
    return _joined(left)


def preadv_all(fd: int, views: list[memoryview], position: int, *, where: str, end: int) -> None:
    """Fill `views` in this thread, however short the system's answers are."""
    while views:
        n_read = positions.preadv(fd, views[:IOV_MAX], position)
        if n_read == 0:
            raise too_short(where, size=position, needed=end)
        position += n_read
        views = behind(views, n_read)


def _read_cached(fd: int, part: Sequence[Run], *, where: str, end: int) -> list[Run]:
    """Read what is in memory; gives what is left to read, in order."""
    for number, (start, views) in enumerate(part):
        position, left = start, views
        while left:
            try:
                n_read = positions.preadv(fd, left[:IOV_MAX], position, _NOWAIT)
            except BlockingIOError:
                n_read = 0
            except OSError:  # a file system that cannot tell; other errors come again, and are raised
                preadv_all(fd, left, position, where=where, end=end)
                break
            if n_read == 0:
                return [(position, left), *part[number + 1 :]]
            position += n_read
            left = behind(left, n_read)
    return []


def _joined(runs: list[Run]) -> list[Run]:
    """Runs in the order of the file, those that touch made one."""
    joined: list[Run] = []
    end = -1
    for start, views in sorted(runs, key=lambda run: run[0]):
        if start == end:
            joined[-1][1].extend(views)
        else:
            joined.append((start, list(views)))
            end = start
        end += sum(view.nbytes for view in views)
    return joined
