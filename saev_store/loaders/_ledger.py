"""The ledger of a cache: how many bytes the files of its folder have, for all processes of a machine."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import TypeVar

from saev_store.errors import DeadlineError

T = TypeVar("T")

#: How long to wait for the lock, which is held for microseconds, and how often to look.
_LOCK_WAIT_S, _LOCK_POLL_S = 10.0, 0.01


class Ledger:
    """The bytes of a folder's files, counted in a file of their own that all processes of a machine lock.

    Files come, go and get their names under the lock: the number is always that of the files. A process that is killed in
    between leaves it wrong until the next `recount`.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        self._path, self._wait_s = path, _LOCK_WAIT_S

    def _locked(self, step: Callable[[int], T]) -> T:
        """What `step` gives for the open file, which is locked meanwhile.

        No context: an interrupt at the first line of leaving one would keep the lock until nobody has the error.

        Raises:
            DeadlineError: another process keeps the lock; the message names it. After that one try is made, without waiting.
        """
        import fcntl  # not on Windows, where `CachedTransport` refuses its folder

        # A link that somebody has planted would have the file elsewhere overwritten.
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            self._lock(fd)
            try:
                return step(fd)
            finally:
                # Closing is not enough: a child that was forked meanwhile has the descriptor too, and the lock with it.
                fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)

    def _lock(self, fd: int) -> None:
        """Lock the open file, or raise `DeadlineError`."""
        import fcntl

        deadline = time.monotonic() + self._wait_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(_LOCK_POLL_S)
                    continue
            else:
                self._wait_s = _LOCK_WAIT_S
                return
            waited_s, self._wait_s = self._wait_s, 0.0
            raise DeadlineError(
                f"{_lock_holder(fd)} has locked the file for more than {waited_s:g} s",
                where=self._path,
                remedy="End that process, or use another cache_dir.",
            )

    @staticmethod
    def _number(fd: int) -> int:
        """The number in the open file."""
        raw = os.pread(fd, 32, 0).strip()
        return int(raw) if raw.isdigit() else 0

    @staticmethod
    def _set(fd: int, number: int) -> None:
        """Write the number to the open file."""
        os.pwrite(fd, b"%-20d" % max(number, 0), 0)

    def get(self) -> int:
        """The number."""
        return self._locked(self._number)

    def recount(self, count: Callable[[], int]) -> None:
        """Count anew, while no file comes or goes."""
        self._locked(lambda fd: self._set(fd, count()))

    def reserve(self, path: str, nbytes: int, limit: int) -> bool:
        """Create a file of that many zeros, unless the number would be above a limit then."""

        def create(fd: int) -> bool:
            before = self._number(fd)
            if before + nbytes > limit:
                return False
            try:
                self._set(fd, before + nbytes)
                with open(path, "xb") as file:
                    file.truncate(nbytes)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                self._set(fd, before)
                raise
            return True

        return self._locked(create)

    def place(self, temporary: str, final: str) -> None:
        """Rename a file to its name; a file of that name, kept by another process meanwhile, is replaced."""

        def rename(fd: int) -> None:
            there = os.path.getsize(final) if os.path.exists(final) else 0
            os.replace(temporary, final)
            self._set(fd, self._number(fd) - there)

        self._locked(rename)

    def remove(self, path: str) -> None:
        """Delete a file; fine if there is none."""

        def delete(fd: int) -> None:
            with contextlib.suppress(FileNotFoundError):
                size = os.path.getsize(path)
                os.unlink(path)
                self._set(fd, self._number(fd) - size)

        self._locked(delete)


def _lock_holder(fd: int) -> str:
    """The process that has locked an open file, from the system."""
    with contextlib.suppress(OSError, IndexError):
        inode = f":{os.fstat(fd).st_ino}"
        with open("/proc/locks", encoding="ascii") as locks:
            for fields in map(str.split, locks):
                if fields[1] == "FLOCK" and fields[5].endswith(inode):
                    return f"process {fields[4]}"
    return "another process"
