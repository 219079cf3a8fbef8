"""Reads MMIDIDX: token sequences and documents, whole or in part."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from saev_store.core.arguments import check_count
from saev_store.core.layout import IntArray
from saev_store.sources._files import FileSource, pinned_nbytes
from saev_store.sources._source import check_index, check_positions
from saev_store.sources.address import Url, locate
from saev_store.sources.mmididx.index import HEADER_NBYTES, check_header, parse_index

if TYPE_CHECKING:
    from saev_store.transport import Transport

TokenArray: TypeAlias = npt.NDArray[np.generic]


class IndexedDataset(FileSource[TokenArray]):
    """An MMIDIDX data set (`.idx` and `.bin`), opened: `dataset[i]` is the i-th sequence of token ids.

    If the transport maps files, arrays are read-only views of the map and stay valid after `close`. Other transports return fresh
    arrays, and fetch several sequences with few requests.

    Args:
        path: The `.idx` file, the `.bin` file, or their common prefix: a path, any fsspec URL, or, with `transport`, a
            path below its root.
        storage_options, transport: As in `open_source`.

    Attributes:
        dtype: Type of a token, little-endian.
        sizes: Tokens of each sequence, int32, read-only.
        pointers: First byte of each sequence in `.bin`, int64, read-only.
        doc_idx: First sequence of each document, and the number of sequences at the end; int64, read-only. Document d is
            `rows(slice(*doc_idx[d : d + 2]))`. If the file has no documents, each sequence counts as one.
        modes: One int8 for each sequence of a multimodal data set, else None.
        n_tokens: Tokens of all sequences.

    Raises:
        NotFoundError: one of the two files is missing.
        DocumentError: the index breaks a rule; `UnknownProtocolError` if it is of a later version or an unknown dtype.
        CorruptShardError: `.bin` is shorter or longer than the index requires.

    >>> dataset = IndexedDataset(TOKENS)
    >>> len(dataset), dataset[1].tolist(), dataset.get(1, 2, 1).tolist()
    (3, [100, 101, 102, 103], [102])
    """

    format = "mmididx"

    def __init__(
        self, path: Url, storage_options: Mapping[str, object] | None = None, *, transport: Transport | None = None
    ) -> None:
        self.transport, name = locate(path, storage_options, transport=transport)
        idx_path, self._path = file_names(name)
        self.url, nbytes = self.transport.where(idx_path), pinned_nbytes(self.transport, idx_path)
        (head,) = self.transport.get_ranges(idx_path, starts=[0], ends=[min(HEADER_NBYTES, nbytes)])
        check_header(bytes(head), idx_nbytes=nbytes, where=self.url)  # before all of it is loaded
        (raw,) = self.transport.get_ranges(idx_path, starts=[0], ends=[nbytes])
        bin_nbytes = pinned_nbytes(self.transport, self._path)
        self._files = [(idx_path, nbytes), (self._path, bin_nbytes)]
        index = parse_index(memoryview(raw).cast("B"), bin_nbytes=bin_nbytes, where=self.url)
        self.dtype, self.sizes, self.pointers, self.doc_idx, self.modes = index
        self.n_tokens = int(self.sizes.sum(dtype=np.int64))
        self._described = {"mapping": "example i is sequence i", "dtype": self.dtype.name}

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), transport=self.transport), (self._path,)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: SupportsIndex) -> TokenArray:
        """A sequence: its token ids in the data set's dtype, read-only; `SelectionError` if there is none."""
        return self.get(index)

    def get(self, index: SupportsIndex, offset: int = 0, length: int | None = None) -> TokenArray:
        """Part of a sequence: `length` tokens from `offset` on, to its end by default; `ArgumentError` if it is not inside."""
        at = check_index(index, len(self), what="sequence")
        left = self.sizes.item(at) - check_count(offset, name="offset", least=0, most=self.sizes.item(at))
        n = left if length is None else check_count(length, name="length", least=0, most=left)
        return self.read_parts(*(np.array([each], np.int64) for each in (at, offset, n)))[0]

    def rows(self, indices: npt.ArrayLike | slice) -> list[TokenArray]:
        """Several sequences in the order asked for, fetched together; read-only arrays."""
        wanted = check_positions(indices, len(self), what="sequence")
        return self.read_parts(wanted, np.zeros(len(wanted), np.int64), self.sizes[wanted].astype(np.int64))

    def read_parts(self, sequences: IntArray, offsets: IntArray, lengths: IntArray) -> list[TokenArray]:
        """Parts of many sequences (int64 arrays of one length), fetched together; the caller has checked the bounds."""
        starts = self.pointers[sequences] + offsets * self.dtype.itemsize
        ends = starts + lengths * self.dtype.itemsize
        parts = self.transport.get_ranges(self._path, starts=starts.tolist(), ends=ends.tolist())
        return [np.frombuffer(part, self.dtype) for part in parts]

    @cached_property
    def cuts(self) -> IntArray:
        """The number of tokens before each sequence, and of all; int64."""
        return np.concatenate(([0], np.cumsum(self.sizes, dtype=np.int64)))

    def read_tokens(self, start: int, stop: int) -> TokenArray:
        """A range of the run of all sequences in order, fresh memory; the caller has checked the bounds."""
        first, last = np.searchsorted(self.cuts[1:], start, side="right"), np.searchsorted(self.cuts[:-1], stop)
        sequences = np.arange(first, last)
        begins = np.maximum(start, self.cuts[sequences])
        lengths = np.minimum(stop, self.cuts[sequences + 1]) - begins
        parts = self.read_parts(sequences, begins - self.cuts[sequences], lengths)
        return np.concatenate([np.zeros(0, self.dtype), *parts])


def file_names(name: str) -> tuple[str, str]:
    """The names of the two files of a data set, of one of them or of their common prefix."""
    prefix = name.removesuffix(".idx") if name.endswith(".idx") else name.removesuffix(".bin")
    return f"{prefix}.idx", f"{prefix}.bin"
