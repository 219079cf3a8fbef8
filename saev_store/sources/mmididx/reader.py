"""Reads MMIDIDX: token sequences and documents, whole or in part."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from saev_store._runtime.progress import Progress
from saev_store.core.layout import IntArray
from saev_store.errors import SaevStoreError, SelectionError, brief
from saev_store.problems import Problem
from saev_store.sources._files import DataFile, chunks, describe_digest
from saev_store.sources._source import DigestScope, Source, check_index, check_positions, text_card
from saev_store.sources.address import Url, locate
from saev_store.sources.mmididx.index import HEADER_NBYTES, check_header, parse_index

if TYPE_CHECKING:
    from saev_store.transport import Engine, Transport

TokenArray: TypeAlias = npt.NDArray[np.generic]


class IndexedDataset(Source[TokenArray]):
    """An MMIDIDX data set (`.idx` and `.bin`), opened: `dataset[i]` is the i-th sequence of token ids.

    If the transport maps files, arrays are read-only views of the map and stay valid after `close`. Other transports return fresh
    arrays, and fetch several sequences with few requests.

    Args:
        path: The `.idx` file, the `.bin` file, or their common prefix: a path, any fsspec URL, or, with `transport`, a
            path below its root.
        storage_options, engine, transport: As in `open_source`.
        dtype: Type of a token; used only for the codes (6 and 7) that tools do not agree on, if the files do not decide.

    Attributes:
        transport, idx_path, bin_path: The storage, and the paths of both files below its root.
        index: The checked index.
        dtype: Type of a token, little-endian.
        sizes: Tokens of each sequence, int32, read-only.
        doc_idx: First sequence of each document, and the number of sequences at the end; int64, read-only.
        modes: One int8 for each sequence of a multimodal data set, else None.
        n_documents: Number of documents; a file without documents counts each sequence as one.
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
        self,
        path: Url,
        storage_options: Mapping[str, object] | None = None,
        *,
        engine: Engine = "auto",
        transport: Transport | None = None,
        dtype: npt.DTypeLike | None = None,
    ) -> None:
        self.transport, name = locate(path, storage_options, engine=engine, transport=transport)
        self.idx_path, self.bin_path = file_names(name)
        self._idx, self._asked_dtype = DataFile(self.transport, self.idx_path), dtype
        self.url, nbytes = self._idx.url, self._idx.nbytes
        check_header(self._idx.head(HEADER_NBYTES), idx_nbytes=nbytes, where=self.url)  # before all of it is loaded
        (raw,) = self._idx.ranges([0], [nbytes])
        self._bin = DataFile(self.transport, self.bin_path)
        self.index = index = parse_index(raw, bin_nbytes=self._bin.nbytes, where=self.url, dtype=dtype)
        self.dtype, self.sizes, self.doc_idx, self.modes = index.dtype, index.sizes, index.doc_idx, index.modes
        self.n_documents, self.n_tokens = len(index.doc_idx) - 1, int(index.sizes.sum(dtype=np.int64))
        self._n, self._itemsize = len(index.sizes), index.dtype.itemsize

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), transport=self.transport, dtype=self._asked_dtype), (self.idx_path,)

    def __len__(self) -> int:
        return self._n

    def __repr__(self) -> str:
        facts = {
            "sequences": f"{self._n:,} in {self.n_documents:,} documents",
            "tokens": f"{self.n_tokens:,} of {self.dtype.name}",
            "modes": "none" if self.modes is None else "one for each sequence",
            "read through": self.transport.name,
        }
        return text_card(f"MMIDIDX {self.url}", facts, self.problems)

    def __getitem__(self, index: SupportsIndex) -> TokenArray:
        """A sequence: its token ids in the data set's dtype, read-only; `SelectionError` if there is none."""
        return self.get(index)

    def get(self, index: SupportsIndex, offset: int = 0, length: int | None = None) -> TokenArray:
        """Part of a sequence: `length` tokens from `offset` on, to its end by default. Nothing else is read.

        Raises:
            SelectionError: there is no such sequence, or the part is not inside it.
        """
        at = check_index(index, self._n, what="sequence")
        size, start = self.sizes.item(at), self.index.pointers.item(at)
        offset, end = _check_part(offset, size if length is None else _integer(offset) + _integer(length), size)
        return self._read([start + offset * self._itemsize], [start + end * self._itemsize])[0]

    def rows(self, indices: npt.ArrayLike | slice) -> list[TokenArray]:
        """Several sequences in the order asked for, fetched together; read-only arrays."""
        wanted = check_positions(indices, self._n, what="sequence")
        return self.read_parts(wanted, np.zeros(len(wanted), np.int64), self.sizes[wanted].astype(np.int64))

    def read_parts(self, sequences: IntArray, offsets: IntArray, lengths: IntArray) -> list[TokenArray]:
        """Parts of many sequences (int64 arrays of one length), fetched together; the caller has checked the bounds."""
        starts = self.index.pointers[sequences] + offsets * self._itemsize
        return self._read(starts.tolist(), (starts + lengths * self._itemsize).tolist())

    def _read(self, starts: list[int], ends: list[int]) -> list[TokenArray]:
        """The tokens of ranges of bytes of `.bin`."""
        return [np.frombuffer(part, self.dtype) for part in self._bin.ranges(starts, ends)]

    def tokens_before(self, sequences: IntArray) -> IntArray:
        """Number of tokens of all sequences before each of these, int64."""
        return self._cuts[sequences]

    @cached_property
    def _cuts(self) -> IntArray:
        """The number of tokens before each sequence, and of all; int64."""
        return np.concatenate(([0], np.cumsum(self.sizes, dtype=np.int64)))

    def read_tokens(self, starts: npt.ArrayLike, stops: npt.ArrayLike) -> TokenArray:
        """The tokens of ranges of the run of all sequences in order, one after the other; the caller has checked the bounds.

        Returns:
            A read-only view if there is one part of one sequence of a mapped file, else fresh memory.
        """
        first, last, cuts = np.asarray(starts, np.int64), np.asarray(stops, np.int64), self._cuts
        low = np.searchsorted(cuts[1:], first, side="right")
        n = np.maximum(np.searchsorted(cuts[:-1], last, side="left") - low, 0)
        which = np.repeat(np.arange(len(n)), n)
        sequences = low[which] + np.arange(len(which)) - np.repeat(np.cumsum(n) - n, n)
        begins = np.maximum(first[which], cuts[sequences])
        lengths = np.minimum(last[which], cuts[sequences + 1]) - begins
        parts = self.read_parts(sequences, begins - cuts[sequences], lengths)
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, self.dtype), *parts])

    def document(self, document: SupportsIndex, start: int = 0, stop: int | None = None) -> TokenArray:
        """The tokens of a document, its sequences joined; or only tokens `start` to `stop` of it, and no others are read.

        Returns:
            A read-only view if the part is in one sequence of a mapped file, else fresh memory.

        Raises:
            SelectionError: there is no such document, or the part is not inside it.
        """
        at = check_index(document, self.n_documents, what="document")
        first, last = self._cuts[self.doc_idx[at : at + 2]].tolist()
        start, stop = _check_part(start, last - first if stop is None else stop, last - first)
        return self.read_tokens([first + start], [first + stop])

    def describe(self, *, digest: DigestScope = "sampled") -> dict[str, object]:
        """Describe the data set for `metadata.data` of a store that is recorded from it."""
        files = [(file.path, file.nbytes) for file in (self._idx, self._bin)]
        return {
            "format": self.format,
            "url": self.url,
            "n_samples": self._n,
            "mapping": "example i is sequence i",
            "dtype": self.dtype.name,
            "digest": describe_digest(self.transport, files, scope=digest),
        }

    def _check(self, deep: bool, progress: bool | None) -> tuple[Sequence[Problem], int]:
        """Look for other files; `deep` reads every token."""
        problems = list[Problem]()
        for file in (self._idx, self._bin):
            try:
                file.check_unchanged()
            except SaevStoreError as error:
                problems.append(self._lost(error, file.url))
        if problems or not deep:
            return problems, 0
        with Progress(self._bin.nbytes, "checking", shown=progress) as bar:
            for part in chunks(self.transport, self.bin_path, self._bin.nbytes):
                np.frombuffer(part, np.uint8).max(initial=0)  # reads every page of a map
                bar.advance(len(part))
        return [], self.n_tokens * self._itemsize

    def close(self) -> None:
        """Release maps and connections; returned views stay valid, and later reads open the files again."""
        self._idx.close()
        self._bin.close()


def file_names(name: str) -> tuple[str, str]:
    """The names of the two files of a data set, of one of them or of their common prefix."""
    prefix = name.removesuffix(".idx") if name.endswith(".idx") else name.removesuffix(".bin")
    return f"{prefix}.idx", f"{prefix}.bin"


def _integer(value: SupportsIndex) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise SelectionError(f"a position must be an integer, got {brief(value)}", where="start") from None


def _check_part(start: SupportsIndex, stop: SupportsIndex, size: int) -> tuple[int, int]:
    """The bounds of a part of `size` tokens; `SelectionError` if it is not inside."""
    low, high = _integer(start), _integer(stop)
    if not 0 <= low <= high <= size:
        raise SelectionError(f"tokens {brief(low)} to {brief(high)} do not exist; there are {size:,}", where="start")
    return low, high
