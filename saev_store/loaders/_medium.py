"""What the shards lie on, which decides how they are read, and what the system is told about it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from saev_store.core.layout import Layout, shard_name
from saev_store.errors import SaevStoreError
from saev_store.transport import Transport
from saev_store.transport.files import DESCRIPTORS

#: `memory`: a dict or tmpfs; `cached`: a disk whose pages are in memory now; `flash`, `disk`: a local device, by whether
#: it spins; `parallel`: a network or parallel file system; `remote`: behind a client, such as an object store.
Kind = Literal["memory", "cached", "flash", "disk", "parallel", "remote"]

#: Kinds on which a fault on a map of a shard waits for a disk, which then reads far more than what was wanted.
WAITING = ("flash", "disk", "parallel")

_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_PARALLEL = {
    "lustre", "gpfs", "beegfs", "nfs", "nfs4", "ceph", "cifs", "smb3", "glusterfs", "pvfs2", "panfs", "afs", "9p",
    "virtiofs", "wekafs", "daos",
}  # fmt: skip
#: Pages looked at to decide whether a store is in the page cache.
_N_PROBES = 64
_CACHED_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Medium:
    """What was found, and how.

    Attributes:
        kind: See `Kind`.
        reason: One sentence for people.
        path: The store's folder, if its shards are files of this machine.
    """

    kind: Kind
    reason: str
    path: str | None = None


def layers_of(transport: Transport) -> list[Transport]:
    """A transport and those that it is around, such as behind a cache. The last one moves the bytes."""
    found = [transport]
    while (inner := getattr(found[-1], "inner", None)) is not None:
        found.append(inner)
    return found


def medium_of(transport: Transport, layout: Layout, said: Kind | None = None) -> Medium:
    """What a store's shards lie on, or what is said; never raises, never reads more than a few pages."""
    innermost = layers_of(transport)[-1]
    path = innermost.local_path
    if path is not None and not os.path.isdir(path):
        path = None
    if said is not None:
        return Medium(said, "as was said", path)
    if not innermost.is_local:
        return Medium("remote", f"{innermost.name} is a client of something else")
    if path is None:
        return Medium("memory", f"{innermost.name} holds its files in this process")
    file_system, device = _mount(path)
    if file_system in _IN_MEMORY:
        return Medium("memory", f"{file_system} is memory", path)
    share = _cached_share(path, layout)
    if share is not None and share >= _CACHED_SHARE:
        return Medium("cached", f"{share:.0%} of the pages looked at are in memory ({file_system})", path)
    if file_system in _PARALLEL or file_system.startswith("fuse"):
        return Medium("parallel", f"{file_system} is reached over a network", path)
    spins = _spins(device)
    if spins:
        return Medium("disk", f"{file_system} on a device that spins", path)
    how = "does not spin" if spins is False else "does not say whether it spins"
    return Medium("flash", f"{file_system} on a device that {how}", path)


def _mount(path: str) -> tuple[str, str]:
    """(file system, major:minor) of the mount that holds a path, as Linux tells; ("unknown", "") elsewhere."""
    real, best = os.path.realpath(path), ("unknown", "", -1)
    try:
        lines = Path("/proc/self/mountinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return best[:2]
    for line in lines:
        fields = line.split(" ")
        if "-" not in fields or len(fields) < 10:
            continue
        point = fields[4].encode().decode("unicode_escape", errors="replace")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best[2]:
            best = (fields[fields.index("-") + 1], fields[2], len(point))
    return best[:2]


def _spins(device: str) -> bool | None:
    """Whether a device says that it spins; virtual disks say so whatever lies below them, and are not believed."""
    if any(name in os.path.realpath(f"/sys/dev/block/{device}") for name in ("/virtio", "/vbd-", "/vmbus")):
        return None
    for name in (f"/sys/dev/block/{device}/queue/rotational", f"/sys/dev/block/{device}/../queue/rotational"):
        try:
            return Path(name).read_text("ascii").strip() == "1"
        except OSError:
            continue
    return None


def _cached_share(path: str, layout: Layout) -> float | None:
    """How many of some evenly spread pages can be read without waiting; None where the system cannot tell."""
    if not hasattr(os, "RWF_NOWAIT"):
        return None
    found, page = 0, bytearray(4096)
    for probe in range(_N_PROBES):
        example = (2 * probe + 1) * layout.n_examples // (2 * _N_PROBES)
        shard, within = divmod(example, layout.examples_per_shard)
        try:
            fd = os.open(os.path.join(path, shard_name(shard)), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            found += os.preadv(fd, [page], within * layout.example_nbytes // 4096 * 4096, os.RWF_NOWAIT) > 0
        except BlockingIOError:
            pass
        except OSError:
            return None
        finally:
            with contextlib.suppress(OSError):
                os.close(fd)
    return found / _N_PROBES


#: From this many times the machine's memory on, what was read is dropped: keeping it would only push out other things.
_MUCH_LARGER = 2


class Advice:
    """Advises the system that a local store's shards are read in extents far apart, until it is closed.

    Without it, read-ahead fetches the neighbouring layers as well: on a cold disk about half of the speed.

    Args:
        folder: Where the shards are.
        layout: Their geometry.
        keep_pages: Whether what was read stays in the page cache; None: unless the store is much larger than memory.

    Attributes:
        drops_pages: Whether pages are to be dropped once they were read, by `after`.
    """

    def __init__(self, folder: str, layout: Layout, keep_pages: bool | None) -> None:
        self._folder = folder
        self._advised: dict[int, int] = {}
        if keep_pages is None:
            memory_nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            keep_pages = layout.nbytes <= _MUCH_LARGER * memory_nbytes
        self.drops_pages = not keep_pages

    def before(self, shard: int) -> None:
        """A shard is about to be read; costs nothing once it is known."""
        path = os.path.join(self._folder, shard_name(shard))
        file = DESCRIPTORS.peek(path)
        if file is None:
            # What cannot be opened is said by the read itself.
            with contextlib.suppress(OSError, SaevStoreError):
                file = DESCRIPTORS.open(path)
        if file is not None and self._advised.get(shard) != id(file):
            self._advised[shard] = id(file)
            os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_RANDOM)

    def soon(self, shard: int, starts: list[int], ends: list[int]) -> None:
        """Small extents are about to be read, one after the other: the system begins with all of them at once."""
        with contextlib.suppress(OSError):  # a file system that does not know how
            self._advise(shard, starts, ends, os.POSIX_FADV_WILLNEED)

    def after(self, shard: int, starts: list[int], ends: list[int]) -> None:
        """Extents were read, and their pages are not wanted any more."""
        self._advise(shard, starts, ends, os.POSIX_FADV_DONTNEED)

    def _advise(self, shard: int, starts: list[int], ends: list[int], what: int) -> None:
        """Advise about extents of an open shard."""
        if (file := DESCRIPTORS.peek(os.path.join(self._folder, shard_name(shard)))) is not None:
            for start, end in zip(starts, ends, strict=True):
                os.posix_fadvise(file.fd, start, end - start, what)

    def close(self) -> None:
        """Take the advice back: other users of the same open files read as before."""
        for shard in list(self._advised):  # a thread that hangs in a read may come back now
            file = DESCRIPTORS.peek(os.path.join(self._folder, shard_name(shard)))
            if file is not None:
                os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_NORMAL)
        self._advised.clear()


#: Whether the system takes advice.
TAKES_ADVICE = hasattr(os, "posix_fadvise")
