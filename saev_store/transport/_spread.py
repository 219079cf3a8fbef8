"""Large local reads spread over the cores: one thread copies from the page cache slower than memory can deliver.

Threads live for one call (starting one costs some 50 us, a part of 4 MiB takes ten times as long), so there is nothing
to shut down, to inherit through `fork`, or to leak.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence

from saev_store.transport._checks import too_short

_IOV_MAX = min(1024, os.sysconf("SC_IOV_MAX")) if hasattr(os, "sysconf") else 16
#: What one thread reads at a time; less is not worth a thread.
PART_BYTES = 4 << 20
#: More threads than this do not read faster from one memory.
_MAX_THREADS = 8


def n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def preadv_spread(fd: int, runs: Sequence[tuple[int, list[memoryview]]], *, nbytes: int, where: str, end: int) -> None:
    """Fill memory from a file with several threads.

    Args:
        fd: The file.
        runs: Where each run begins in the file, and the pieces of memory (bytes, none empty) that it fills in order.
        nbytes: The sum of all.
        where: The file's name for messages.
        end: The last byte that is needed, for messages.

    Raises:
        OSError: the system cannot read.
        CorruptShardError: the file ends before `end`.
    """
    n_threads = min(nbytes // PART_BYTES, n_cores(), _MAX_THREADS)
    if n_threads < 2:
        for at, views in runs:
            preadv_all(fd, views, at, where=where, end=end)
        return
    parts = deque(_parts(runs))
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while parts:
                for at, views in parts.popleft():
                    preadv_all(fd, views, at, where=where, end=end)
        except IndexError:  # another thread took the last part
            return
        except BaseException as error:  # raised again by the thread that asked
            errors.append(error)
            parts.clear()

    helpers = [threading.Thread(target=work, name="saev-store-read", daemon=True) for _ in range(n_threads - 1)]
    try:
        started = [helper for helper in helpers if _start(helper)]
        work()
        for helper in started:
            helper.join()
    finally:
        parts.clear()  # after a Ctrl-C the helpers end with the part they are reading
    if errors:
        raise errors[0]


def preadv_all(fd: int, views: list[memoryview], start: int, *, where: str, end: int) -> None:
    """Fill `views` in this thread, however short the system's answers are."""
    position, first = start, 0
    while first < len(views):
        n_read = os.preadv(fd, views[first : first + _IOV_MAX], position)
        if n_read == 0:
            raise too_short(where, size=position, needed=end)
        position += n_read
        while first < len(views) and n_read >= views[first].nbytes:
            n_read -= views[first].nbytes
            first += 1
        if n_read:
            views[first] = views[first][n_read:]


def _parts(runs: Sequence[tuple[int, list[memoryview]]]) -> list[list[tuple[int, list[memoryview]]]]:
    """The same runs cut and bundled into parts of `PART_BYTES`."""
    parts: list[list[tuple[int, list[memoryview]]]] = []
    room = 0
    for start, views in runs:
        position, fresh = start, True
        for view in views:
            done = 0
            while done < view.nbytes:
                if room == 0:
                    parts.append([])
                    room, fresh = PART_BYTES, True
                if fresh:
                    parts[-1].append((position, []))
                    fresh = False
                piece = view[done : done + room]
                parts[-1][-1][1].append(piece)
                done += piece.nbytes
                room -= piece.nbytes
                position += piece.nbytes
    return parts


def _start(thread: threading.Thread) -> bool:
    try:
        thread.start()
    except RuntimeError:  # no more threads, or the interpreter is ending: fewer do it as well
        return False
    return True
