"""What of a real folder is sure to survive a power cut: only what was flushed, under names that were flushed.

Unlike `sim_disk`, this looks at the calls that the package makes to the operating system.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

Inode = tuple[int, int]


class PowerCut:
    """Remembers what each `fsync` and `fdatasync` makes durable: the bytes of a file, or the names in a folder.

    Args:
        monkeypatch: pytest's.
        root: An existing folder. What is in it now is durable.

    Attributes:
        named: Called before a file gets a name by `replace`, `rename` or `link`: the new path below the root, and the bytes of
            the file. That they are durable then has been asserted.
    """

    def __init__(self, monkeypatch, root: Path) -> None:
        self._root = Path(os.path.realpath(root))
        self._lock = threading.RLock()
        self._bytes: dict[Inode, bytes] = {}
        self._names: dict[Inode, dict[str, Inode]] = {}
        #: Descriptors that keep inode numbers from being used again.
        self._held: list[int] = []
        self.named: Callable[[str, bytes], object] = lambda path, content: None
        for folder, _, names in os.walk(self._root):
            for path in (folder, *(os.path.join(folder, name) for name in names)):
                self._flushed(path)
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._flushing(getattr(os, name)))
        for name in ("replace", "rename", "link"):
            monkeypatch.setattr(os, name, self._naming(getattr(os, name)))

    def close(self) -> None:
        """Let go of the inodes."""
        while self._held:
            os.close(self._held.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def survivors(self) -> dict[str, bytes]:
        """The files that a power cut now leaves for sure, by path; one that was never flushed is empty."""
        with self._lock:
            return dict(self._below(_inode(os.stat(self._root)), ""))

    def _below(self, folder: Inode, prefix: str):
        for name, inode in self._names.get(folder, {}).items():
            if inode in self._names:
                yield from self._below(inode, f"{prefix}{name}/")
            elif inode in self._bytes:
                yield prefix + name, self._bytes[inode]
            else:
                yield prefix + name, b""

    def _flushed(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY)
        status = os.fstat(fd)
        with self._lock:
            self._held.append(fd)
            if stat.S_ISDIR(status.st_mode):
                self._names[_inode(status)] = {item.name: (status.st_dev, item.inode()) for item in os.scandir(fd)}
            else:
                self._bytes[_inode(status)] = os.pread(fd, status.st_size, 0)

    def _flushing(self, real: Callable) -> Callable:
        def call(fd):
            real(fd)
            if os.path.realpath(f"/proc/self/fd/{fd}").startswith(str(self._root)):
                self._flushed(f"/proc/self/fd/{fd}")

        return call

    def _naming(self, real: Callable) -> Callable:
        def call(old, new, *args, **kwargs):
            path = os.path.relpath(new, self._root)
            if os.path.isfile(old) and not path.startswith(".."):
                content = Path(old).read_bytes()
                with self._lock:
                    assert self._bytes.get(_inode(os.stat(old))) == content, f"{path} gets bytes that are not durable"
                self.named(path, content)
            return real(old, new, *args, **kwargs)

        return call


def _inode(status: os.stat_result) -> Inode:
    return status.st_dev, status.st_ino
