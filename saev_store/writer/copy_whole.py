"""A copy of a whole store, or the same under documents of another protocol version: files that are linked, or moved."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from uuid import uuid4

from saev_store._runtime.threads import ahead
from saev_store.core.layout import shard_name
from saev_store.documents import shards_bytes
from saev_store.errors import TransportError
from saev_store.names import SHARDS_NAME
from saev_store.transport import Transport
from saev_store.transport.checks import os_errors
from saev_store.transport.durable import fsync_folder, make_folders
from saev_store.writer.copies import PROVENANCE_NAME, Copy, block_bytes_of, damaged, short_file
from saev_store.writer.create import is_as_written
from saev_store.writer.digests import BLOCK_BYTES, Digests, FileDigests, block_ranges, digest, load_digests
from saev_store.writer.publish import More
from saev_store.writer.work import TEMPORARY, Receipt, Work, is_disk, open_sink, read

#: Linux's request to let a file share the blocks of another one until either is changed.
_FICLONE = 0x40049409
#: Not on this file system, not across file systems, not for files of this owner, or no more links of this file.
_NOT_HERE = {
    errno.EXDEV, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY, errno.EINVAL, errno.EMLINK,
}  # fmt: skip


@dataclass(frozen=True)
class WholeCopy(Copy):
    """All shards and token arrays of a store, byte for byte; its documents too if the metadata is the store's.

    Every block is compared with the source's digests.json while it is read, and the copy is read back and compared. With other
    documents on the same disk, the shards are clones of the source's files or, if the file system has no clones, hard links.
    """

    @property
    def work(self) -> Work:
        """The copy while it is unfinished."""
        name = self.metadata.hash if self._is_renamed else self.store.name
        return Work(self.root, self.metadata, name=name, block_bytes=block_bytes_of(self.promised))

    @property
    def _is_renamed(self) -> bool:
        return self.metadata.raw != self.store.metadata.raw

    def copy_shard(self, shard_idx: int) -> int:
        """Copy a shard; its length."""
        work, name, source = self.work, shard_name(shard_idx), self.store.transport
        used, full, size = work.layout.used_nbytes(shard_idx), work.layout.shard_nbytes, source.size(name)
        # As long as in the source, if that is a disk too; a bucket holds no zeros at the end.
        file_nbytes = used if not work.is_disk else min(size, full) if is_disk(source) else full
        with work.lock(f"{shard_idx:06d}"):
            work.check(shard_idx)
            is_there = self._is_renamed and share(source, work.store, name, file_nbytes)
            if is_there or (size == file_nbytes and work.store.copy_within(source, name, name)):
                digests = self._of_source(name, used)
            else:
                digests = self._stream(work, name, used, file_nbytes)
            work.store.close()  # a map of an earlier file must not answer for this one
            if not is_as_written(work.store, name, digests, work.block_bytes, file_nbytes):
                raise TransportError(
                    f"{name} of the copy is not what was sent",
                    where=work.url,
                    remedy="Copy again; if it happens twice, suspect the disk, the network, or the source: validate it deeply.",
                )
            work.record(shard_idx, digests.digests, {})
        return used

    def _of_source(self, name: str, nbytes: int) -> FileDigests:
        """Digests of a file of the source: those of digests.json, or those of what is read."""
        if self.promised is not None:
            return self.promised.files[name]
        digests = [digest(memoryview(self._read(name, *block))) for block in block_ranges(nbytes, BLOCK_BYTES)]
        return FileDigests(nbytes, tuple(digests))

    def _read(self, name: str, start: int, end: int) -> bytes | bytearray | memoryview:
        """A range of a file of the source."""
        self.check()
        if self.rate is not None:
            self.rate.wait(3 * (end - start), 3)  # it is also written, and read back
        return self.store.transport.get_ranges(name, starts=[start], ends=[end])[0]

    def _stream(self, work: Work, name: str, used_nbytes: int, file_nbytes: int) -> FileDigests:
        """Read a file of the source, compare it with what is promised, and write it; its digests."""
        promise = None if self.promised is None else self.promised.files[name].digests
        blocks, found = list(block_ranges(used_nbytes, work.block_bytes)), list[str]()
        sink = open_sink(work.store, name, used_nbytes=used_nbytes, file_nbytes=file_nbytes)
        n_ahead = 1 if is_disk(self.store.transport) else 4
        try:
            with closing(ahead(lambda block: self._read(name, *block), blocks, n_ahead)) as data:
                for (start, end), block in zip(blocks, data, strict=True):
                    found.append(digest(memoryview(block)))
                    if promise is not None and found[-1] != promise[len(found) - 1]:
                        raise damaged(self.store, name, start, end)
                    sink.write(start, [memoryview(block)])
            sink.commit()
        except BaseException:
            sink.abort()
            raise
        return FileDigests(used_nbytes, tuple(found))

    def others(self, work: Work, receipts: Sequence[Receipt]) -> More:  # noqa: ARG002  # as `publish` calls it
        """Copy the token arrays, and what other documents the source has."""
        files = dict[str, FileDigests]()
        for array in self.store.token_arrays.described():
            if work.is_published():  # in a bucket another process may be faster
                break
            nbytes = array.nbytes(self.store.layout)
            files[array.file_name] = self._stream(work, array.file_name, nbytes, nbytes)
        index = self.store.index
        documents = {SHARDS_NAME: index.raw}
        if self._is_renamed:
            key, trailing = self.metadata.count_key, index.trailing_empty
            documents[SHARDS_NAME] = shards_bytes(self.store.layout, key, trailing_empty=trailing)
        provenance = read(self.store.transport, PROVENANCE_NAME)
        if provenance is not None:
            documents[PROVENANCE_NAME] = provenance
        return More(files, documents)

    def fault(self) -> str:
        """Name what is wrong with a finished copy; "" if it is one of this recording, with files of the right lengths."""
        place = self.work.store
        if self._is_itself(place):
            return ""
        theirs = load_digests(place)
        if theirs is None or set(theirs.files) != set(self.store.recorded_files()):
            return "a store that is not a copy of this one is there"
        ours = self.promised
        if ours is None:  # the source is read for it
            files = {name: self._of_source(name, file.nbytes) for name, file in theirs.files.items()}
            ours = Digests(BLOCK_BYTES, files)
        return (
            short_file(place, theirs)
            if ours == theirs
            else "a copy of another recording with the same metadata is there"
        )

    def _is_itself(self, place: Transport) -> bool:
        """Return True if the copy would be the source, whose place may have several addresses: nothing of that may be deleted."""
        probe = f"{TEMPORARY}probe-{uuid4().hex}"
        place.put(probe, b"1")
        try:
            return read(self.store.transport, probe) is not None
        finally:
            place.delete(probe)


def share(source: Transport, target: Transport, name: str, nbytes: int) -> bool:
    """Let two folders of one disk share a file, as a clone or a hard link; False, with nothing done, if that is not possible.

    Args:
        source: The folder that has it.
        target: The other one.
        name: The file.
        nbytes: Length that it must have.

    Raises:
        TransportError: the disk fails.
    """
    if source.local_path is None or target.local_path is None:
        return False
    old, new = os.path.realpath(os.path.join(source.local_path, name)), os.path.join(target.local_path, name)
    with os_errors(new, "create"):
        if os.stat(old).st_size != nbytes:
            return False
        make_folders(target.local_path)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samefile(old, new):
                return True
            os.unlink(new)  # of an earlier attempt
        try:
            if not _clone(old, new):
                os.link(old, new)
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            return False
        fsync_folder(target.local_path)
    return True


def _clone(old: str, new: str) -> bool:
    """Make a durable file of the blocks of another one; False, and no file, if the system has no clones."""
    if sys.platform != "linux":
        return False
    from fcntl import ioctl

    with open(old, "rb") as source, open(new, "xb") as clone:
        try:
            ioctl(clone.fileno(), _FICLONE, source.fileno())
            os.fsync(clone.fileno())
        except OSError as error:
            os.unlink(new)
            if error.errno not in _NOT_HERE:
                raise
            return False
    return True
