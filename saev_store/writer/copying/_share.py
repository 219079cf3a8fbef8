"""Files that two stores on one disk share: clones, or hard links."""

from __future__ import annotations

import contextlib
import errno
import os
import sys

from saev_store.transport import Transport
from saev_store.transport.checks import os_errors
from saev_store.transport.durable import fsync_folder
from saev_store.writer.folder import Folder

#: Linux's request to let a file share the blocks of another one until either is changed.
_FICLONE = 0x40049409
#: Not on this file system, not across file systems, not for files of this owner, or no more links of this file.
_NOT_HERE = {
    errno.EXDEV,
    errno.EPERM,
    errno.EACCES,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.ENOTTY,
    errno.EINVAL,
    errno.EMLINK,
}


def share(source: Transport, folder: Folder, name: str, nbytes: int) -> bool:
    """Make a file of a folder one with a store's file of the same name; False, and nothing done, where that is not possible.

    Args:
        source: The store's transport.
        folder: The other folder.
        name: The file.
        nbytes: How long it has to be there.

    Raises:
        TransportError: the disk fails.
    """
    if source.local_path is None or folder.transport.local_path is None:
        return False
    old = os.path.realpath(os.path.join(source.local_path, name))
    new = os.path.join(folder.transport.local_path, folder.path(name))
    with os_errors(new, "create"):
        if os.stat(old).st_size != nbytes:
            return False
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
        fsync_folder(os.path.dirname(new))
    return True


def _clone(old: str, new: str) -> bool:
    """A new file with the blocks of an old one, made durable; False, and no file, where the system has no clones."""
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
