"""Faults of the operating system: the n-th call of a kind fails, once or from then on."""

from __future__ import annotations

import builtins
import errno
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

#: Call -> how it fails: errors, and for writes `short`: half of the bytes are written.
KINDS: dict[str, tuple[str, ...]] = {
    "open": ("EMFILE", "EIO"),
    "write": ("ENOSPC", "EIO", "short"),
    "pwrite": ("ENOSPC", "EIO", "short"),
    "pwritev": ("ENOSPC", "EIO", "short"),
    "fsync": ("EIO",),
    "fdatasync": ("EIO",),
    "rename": ("EIO", "ENOSPC"),
    "replace": ("EIO", "ENOSPC"),
    "link": ("EIO", "ENOSPC"),
    "mkdir": ("ENOSPC",),
    "ftruncate": ("ENOSPC", "EIO"),
    "posix_fallocate": ("ENOSPC", "EIO"),
    "unlink": ("EIO",),
    "pread": ("EIO",),
    "preadv": ("EIO",),
    "fstat": ("EIO",),
    "stat": ("EIO",),
    "scandir": ("EIO",),
    "sendfile": ("EIO", "ENOSPC"),
    "copy_file_range": ("EIO", "ENOSPC"),
    # Of files of `open(…)`, `os.fdopen(…)` and `Path.write_text(…)`, which call the system in C.
    "file.open": ("EMFILE", "EIO"),
    "file.write": ("ENOSPC", "EIO", "short"),
}
_OPEN = open


class SystemFaults:
    """Counts the calls of `os` on files below a folder, and lets chosen ones fail.

    Args:
        monkeypatch: pytest's.
        below: Only calls on paths and descriptors below this folder count.
    """

    def __init__(self, monkeypatch, below: Path) -> None:
        self._below = os.path.realpath(below)
        self._lock = threading.Lock()
        self.counts: dict[str, int] = {}
        self._chosen: tuple[str, int, str, bool] | None = None
        self.fired = False
        #: No count and no fault while False.
        self.on = False
        for name in KINDS:
            if hasattr(os, name):
                monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))
        for module in (builtins, io):
            monkeypatch.setattr(module, "open", self._wrapped("file.open", self._opened))
        self._file = type("SeenFile", (io.FileIO,), {"write": self._wrapped("file.write", io.FileIO.write)})

    def _opened(
        self, path, mode="r", buffering=-1, encoding=None, errors=None, newline=None, closefd=True, opener=None
    ):
        """What `open` gives; a file for writing is one whose writes are seen."""
        if not {*"wax+"} & {*mode} or not self.on:
            return _OPEN(path, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = self._file(path, mode.replace("b", "").replace("t", ""), closefd, opener)
        if buffering == 0:
            return raw
        file = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
        return file if "b" in mode else io.TextIOWrapper(file, encoding, errors, newline)

    @contextmanager
    def failing(self, name: str, number: int, how: str, *, lasting: bool = False) -> Iterator[None]:
        """Let call `number` of a name fail, counted from 0; with `lasting` all later ones too."""
        self.counts, self._chosen, self.fired, self.on = {}, (name, number, how, lasting), False, True
        try:
            yield
        finally:
            self.on, self._chosen = False, None

    @contextmanager
    def counting(self) -> Iterator[dict[str, int]]:
        """Count calls by name."""
        self.counts, self.on = {}, True
        try:
            yield self.counts
        finally:
            self.on = False

    def _wrapped(self, name: str, real: Callable) -> Callable:
        def call(*args, **kwargs):
            if not self.on or not self._is_below(args):
                return real(*args, **kwargs)
            with self._lock:
                number = self.counts.get(name, 0)
                self.counts[name] = number + 1
                chosen = self._chosen
                fails = (
                    chosen is not None
                    and chosen[0] == name
                    and (number >= chosen[1] if chosen[3] else number == chosen[1])
                )
                self.fired |= fails
            if not fails:
                return real(*args, **kwargs)
            how = chosen[2]
            if how == "short":
                return real(args[0], _half(args[1]), *args[2:], **kwargs)
            raise OSError(getattr(errno, how), os.strerror(getattr(errno, how)))

        return call

    def _is_below(self, args: tuple) -> bool:
        for place in args[:2]:
            if isinstance(place, bool):
                continue
            if isinstance(place, int):
                try:
                    path = os.readlink(f"/proc/self/fd/{place}")
                except OSError:
                    continue
            elif isinstance(place, (str, os.PathLike)):
                path = os.path.abspath(place)
            elif isinstance(place, io.FileIO):
                path = os.path.abspath(place.name) if isinstance(place.name, (str, bytes)) else ""
            else:
                continue
            if path.startswith(self._below):
                return True
        return False


def _half(data):
    """The first half of what is to be written."""
    if isinstance(data, (list, tuple)):
        first = memoryview(data[0]).cast("B")
        return [first[: max(len(first) // 2, 1)]]
    view = memoryview(data).cast("B")
    return view[: max(len(view) // 2, 1)]
