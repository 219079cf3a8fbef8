"""`<shard>.tar.idx`: the offsets of the samples of a tar, and the end of the last one. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from saev_store.core.layout import IntArray
from saev_store.errors import DocumentError
from saev_store.problems import Problem

ITEM_NBYTES = 8
BLOCK = 512


def parse_tar_idx(raw: bytes, *, where: str, n_samples: int, tar_nbytes: int) -> IntArray:
    """The offsets, int64, one more than there are samples.

    Raises:
        DocumentError: they do not belong to a tar of that size with so many samples.

    >>> parse_tar_idx(bytes(8) + (1024).to_bytes(8, "little"), where="x", n_samples=1, tar_nbytes=10240).tolist()
    [0, 1024]
    """
    if len(raw) != (n_samples + 1) * ITEM_NBYTES:
        raise _error(f"it has {len(raw):,} bytes; {n_samples:,} samples need {(n_samples + 1) * ITEM_NBYTES:,}", where)
    offsets = np.frombuffer(raw, "<u8")
    if offsets[-1] > tar_nbytes:
        raise _error(f"its last offset is {int(offsets[-1]):,}, but the tar has {tar_nbytes:,} bytes", where)
    if n_samples and (np.any(offsets[1:] <= offsets[:-1]) or np.any(offsets % BLOCK)):
        raise _error("its offsets do not ascend in whole blocks of 512 bytes", where)
    return offsets.astype(np.int64)


def tar_idx_bytes(offsets: npt.ArrayLike) -> bytes:
    """The content of the file: little-endian uint64.

    >>> tar_idx_bytes([0, 512]).hex()
    '00000000000000000002000000000000'
    """
    return np.asarray(offsets, "<u8").tobytes()


def _error(message: str, where: str) -> DocumentError:
    return DocumentError(
        message,
        where=where,
        remedy="The tar and its index do not belong together: prepare the data set again.",
        problems=[Problem("tar_idx", message, where)],
    )
