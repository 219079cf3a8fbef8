"""Reads LLMBATCH: batches as views, records, and the file as a source of records."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from saev_store.core.layout import IntArray
from saev_store.sources._files import FileSource, pinned_nbytes
from saev_store.sources._source import check_index, check_positions
from saev_store.sources.address import Url, locate
from saev_store.sources.llmbatch.header import HEADER_NBYTES, ITEMSIZE, parse_header

if TYPE_CHECKING:
    from saev_store.transport import Transport

TOKEN = np.dtype("<u4")
TokenArray: TypeAlias = npt.NDArray[np.uint32]


class BatchFileReader(FileSource[TokenArray]):
    """An open LLMBATCH file: `read_batch(i)` returns batches, `reader[i]` returns records in file order.

    A record is one row of a batch: `seq_len` token ids. As a source the reader counts records. If the transport maps files, batches
    are read-only views of the map and stay valid after `close`. Other arrays are fresh.

    Args:
        path: The `.batch` file: a path, any fsspec URL, or, with `transport`, a path below its root.
        storage_options, transport: As in `open_source`.

    Attributes:
        header: The checked header; its numbers are attributes, too.

    Raises:
        NotFoundError: the file does not exist.
        DocumentError: the header breaks a rule; `UnknownProtocolError` for a later version.
        CorruptShardError: the file is longer or shorter than its header requires.
    """

    format = "llmbatch"

    def __init__(
        self, path: Url, storage_options: Mapping[str, object] | None = None, *, transport: Transport | None = None
    ) -> None:
        self.transport, self._path = locate(path, storage_options, transport=transport)
        self.url, nbytes = self.transport.where(self._path), pinned_nbytes(self.transport, self._path)
        self._files = [(self._path, nbytes)]
        (head,) = self.transport.get_ranges(self._path, starts=[0], ends=[min(HEADER_NBYTES, nbytes)])
        self.header = header = parse_header(bytes(head), file_nbytes=nbytes, where=self.url)
        self.batch_size, self.seq_len, self.seed = header.batch_size, header.seq_len, header.seed
        self.num_batches, self.total_records = header.num_batches, header.total_records
        self._described = {
            "mapping": "example i is record i, in file order: row i % batch_size of batch i // batch_size",
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
        }

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), transport=self.transport), (self._path,)

    def __len__(self) -> int:
        return self.num_batches * self.batch_size

    def read_batch(self, batch_index: SupportsIndex) -> TokenArray:
        """Return a batch: uint32, shape (batch_size, seq_len); negative numbers count from the end.

        Raises:
            SelectionError: there is no such batch.
        """
        index = check_index(batch_index, self.num_batches, what="batch")
        start, shape = HEADER_NBYTES + index * self.header.padded_batch_nbytes, (self.batch_size, self.seq_len)
        end = start + self.batch_size * self.seq_len * ITEMSIZE
        (raw,) = self.transport.get_ranges(self._path, starts=[start], ends=[end])
        return np.frombuffer(raw, TOKEN).reshape(shape)

    def read_batches(self, batch_indices: npt.ArrayLike | slice) -> TokenArray:
        """Return several batches in the order asked for: uint32, shape (n, batch_size, seq_len), fresh memory."""
        wanted = check_positions(batch_indices, self.num_batches, what="batch")
        return self._fetched(wanted * self.header.padded_batch_nbytes, self.batch_size, self.seq_len)

    def __getitem__(self, index: SupportsIndex) -> TokenArray:
        """Return a record by its place in the file: uint32, shape (seq_len,)."""
        return self.rows([check_index(index, len(self), what="record")])[0]

    def rows(self, indices: npt.ArrayLike | slice) -> TokenArray:
        """Return records by their places in the file: uint32, shape (n, seq_len), fresh memory."""
        batch_idx, row = np.divmod(check_positions(indices, len(self), what="record"), np.int64(self.batch_size))
        row_nbytes = self.seq_len * ITEMSIZE
        return self._fetched(batch_idx * self.header.padded_batch_nbytes + row * row_nbytes, self.seq_len)

    def _fetched(self, starts: IntArray, *shape: int) -> TokenArray:
        """Blocks of this shape that begin so many bytes behind the header."""
        out = np.empty((len(starts), *shape), TOKEN)
        starts = HEADER_NBYTES + starts
        self.transport.readinto(self._path, starts=starts.tolist(), buffers=[part.data for part in out])
        return out
