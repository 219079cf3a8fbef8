"""Files on this machine, mapped into memory.

A map costs no copy, but the kernel can only report trouble with a signal. The size is therefore checked before each
range is handed out, so that a file that was cut raises; a file that is cut (or a network disk that fails) *while* a view
is being read still ends the process with SIGBUS. Use `engine="pread"` where files may be cut under you.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from saev_store.errors import SaevStoreError, TransportError
from saev_store.transport.base import FREE, Buffer
from saev_store.transport.checks import RequestCounter, check_ranges, from_os_error, os_errors, too_short
from saev_store.transport.local.files import DESCRIPTORS, map_file, positions
from saev_store.transport.local.transport import LocalTransport

#: Maps kept for the next call; the system allows about 65,000. Views keep theirs alive whatever happens here.
_MAX_MAPS = 8192


class _Mapped(NamedTuple):
    where: str
    view: memoryview
    nbytes: int
    inode: tuple[int, int]


def _size_now(mapped: _Mapped) -> int:
    """The size of the file behind a map, or -1 if another file has its name by now."""
    file = DESCRIPTORS.peek(mapped.where)
    if file is not None and file.inode == mapped.inode:
        return file.size()
    status = os.stat(mapped.where)
    return status.st_size if (status.st_dev, status.st_ino) == mapped.inode else -1


class MmapTransport(LocalTransport):
    """Ranges are views of the mapped file: nothing is copied, nothing is read until it is looked at."""

    name = "mmap"
    cost = FREE

    def __init__(self, root: str | os.PathLike[str], *, requests: RequestCounter | None = None) -> None:
        super().__init__(root, requests=requests)
        self._maps: dict[str, _Mapped] = {}

    def get_ranges(self, path: str, *, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Buffer]:
        """One read-only view per range; each keeps the map alive, also after `close`."""
        try:
            mapped = self._maps.get(path)
            if mapped is None or _size_now(mapped) != mapped.nbytes:
                mapped = self._map(path)
        except SaevStoreError:
            raise
        except OSError as error:  # as in `os_errors`, which would be a third of this call's price
            raise from_os_error(error, where=self._where(path), doing="map") from error
        view = mapped.view
        if len(starts) == 1 == len(ends) and 0 <= starts[0] <= ends[0] <= mapped.nbytes:
            self._requests.add("get_ranges", read=ends[0] - starts[0], requests=ends[0] > starts[0])
            return [view[starts[0] : ends[0]]]
        if check_ranges(mapped.where, starts, ends) > mapped.nbytes:
            raise too_short(mapped.where, size=mapped.nbytes, needed=max(ends))
        self._requests.add_ranges(starts, ends)
        return [view[start:end] for start, end in zip(starts, ends, strict=True)]

    def check_mapped(self, path: str, nbytes: int) -> None:
        """Compare the file behind a map with its size now, before bytes are copied out of the map.

        Raises:
            CorruptShardError: the file was cut to less than `nbytes`, or another one has taken its place.
        """
        mapped = self._maps.get(path)
        if mapped is not None:
            file = DESCRIPTORS.peek(mapped.where)
            # The shortest way first: it is on the path of every vector.
            try:
                if (
                    file is not None
                    and file.inode == mapped.inode
                    and positions.lseek(file.fd, 0, os.SEEK_END) >= nbytes
                ):
                    return
            except OSError as error:
                raise from_os_error(error, where=mapped.where, doing="map") from error
        where = self._where(path)
        with os_errors(where, "map"):
            if mapped is None or _size_now(mapped) != mapped.nbytes:
                mapped = self._map(path)
        if mapped.nbytes < nbytes:
            raise too_short(where, size=mapped.nbytes, needed=nbytes)

    def _map(self, path: str) -> _Mapped:
        where = self._where(path)
        file = self._open(path, where)
        size = file.size()
        try:
            view = map_file(file.fd, size)
        except OSError as error:
            raise TransportError(
                f"the file ({size:,} bytes) could not be mapped: {error.strerror}",
                where=where,
                remedy='Open the store with engine="pread".',
            ) from error
        if len(self._maps) >= _MAX_MAPS:
            self._maps = {}
        mapped = self._maps[path] = _Mapped(where, view, size, file.inode)
        return mapped

    def close(self) -> None:
        """Forget all maps and descriptors; maps live as long as views of them."""
        self._maps = {}
        super().close()
