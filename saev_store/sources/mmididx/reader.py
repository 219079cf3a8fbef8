"""Reads MMIDIDX: token sequences and documents, whole or in part."""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from saev_store._runtime.progress import Progress
from saev_store.core.arguments import check_flag
from saev_store.core.layout import IntArray
from saev_store.errors import CorruptShardError, NotFoundError, SaevStoreError, SelectionError, brief
from saev_store.problems import Problem
from saev_store.sources._files import CHUNK_BYTES, describe_digest, file_identity, is_resident
from saev_store.sources._source import DigestScope, Source, check_index, check_positions, steps, text_card
from saev_store.sources.address import Url, full_url, locate
from saev_store.sources.mmididx.index import HEADER_NBYTES, Index, check_header, parse_index
from saev_store.validation import Report

if TYPE_CHECKING:
    from saev_store.transport import Buffer, Engine, Transport

TokenArray: TypeAlias = npt.NDArray[np.generic]


class IndexedDataset(Source[TokenArray]):
    """An MMIDIDX data set (`.idx` and `.bin`), opened: `dataset[i]` is the i-th sequence of token ids.

    If the transport maps files, arrays are read-only views of the map and stay valid after `close`. Truncating a mapped
    file ends the process: use `engine="pread"` if that can happen. Other transports return fresh arrays, and fetch
    several sequences with few requests.

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
        self.url = full_url(self.transport, self.idx_path)
        self._asked_dtype, self._closed = dtype, False
        self._identity: tuple[object, ...] | None = None
        self._whole: TokenArray | None = None
        self.index, self.problems = self._open()
        index = self.index
        self.dtype, self.sizes, self.doc_idx, self.modes = index.dtype, index.sizes, index.doc_idx, index.modes
        self.n_documents, self.n_tokens = len(index.doc_idx) - 1, int(index.sizes.sum(dtype=np.int64))
        self._n, self._itemsize = len(index.sizes), index.dtype.itemsize

    def _open(self) -> tuple[Index, tuple[Problem, ...]]:
        """Read and check the index, and make sure that later reads of `.bin` are of the file that belongs to it."""
        transport, idx = self.transport, self.idx_path
        name, nbytes = file_identity(transport, idx), transport.size(idx)
        (head,) = transport.get_ranges(idx, starts=[0], ends=[min(nbytes, HEADER_NBYTES)])
        check_header(bytes(head), idx_nbytes=nbytes, where=self.url)
        (raw,) = transport.get_ranges(idx, starts=[0], ends=[nbytes])
        try:
            bin_nbytes = transport.size(self.bin_path)
        except NotFoundError as error:
            where = full_url(transport, self.bin_path)
            raise NotFoundError("the .bin file is missing", where=where, remedy="Copy it, too.") from error
        index, problems = parse_index(raw, bin_nbytes=bin_nbytes, where=self.url, dtype=self._asked_dtype)
        # The transport pins a file when its first bytes are read, so `.bin` is read now. A writer deletes the old index
        # before it replaces `.bin`: if the index is the same afterwards, both files belong together.
        end = bin_nbytes if is_resident(transport) else min(bin_nbytes, 1)
        (whole,) = transport.get_ranges(self.bin_path, starts=[0], ends=[end])
        (again,) = transport.get_ranges(idx, starts=[0], ends=[min(nbytes, HEADER_NBYTES)])
        versions = (transport.version(idx), transport.version(self.bin_path))
        identity = (xxhash.xxh3_128_digest(raw), bin_nbytes, *versions)
        is_other = self._identity not in {None, identity}
        if is_other or file_identity(transport, idx) != name or bytes(again) != bytes(head):
            message = "another data set has taken the place of the one that was opened"
            raise CorruptShardError(message, where=self.url, remedy="Open it again.")
        self._identity, self._closed = identity, False
        self._whole = _as_array(whole, index.dtype) if is_resident(transport) else None
        return index, problems

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), transport=self.transport, dtype=self._asked_dtype), (self.idx_path,)

    def __len__(self) -> int:
        return self._n

    def __repr__(self) -> str:
        variant = "" if self.index.variant == "megatron" else ", not recorded in this variant"
        facts = {
            "sequences": f"{self._n:,} in {self.n_documents:,} documents{variant}",
            "tokens": f"{self.n_tokens:,} of {self.dtype.name}",
            "modes": "none" if self.modes is None else "one for each sequence",
            "read through": self.transport.name,
        }
        return text_card(f"MMIDIDX {self.url}", facts, self.problems)

    # -- sequences -----------------------------------------------------------------------------------------------------

    def __getitem__(self, index: SupportsIndex) -> TokenArray:
        """A sequence: its token ids in the data set's dtype, read-only.

        Raises:
            SelectionError: there is no such sequence.
        """
        whole = self._whole
        if whole is None or type(index) is not int or not 0 <= index < self._n:
            return self.get(index)
        begin = self.index.pointers.item(index) // self._itemsize
        return whole[begin : begin + self.sizes.item(index)]  # twice as fast as `get`

    def get(self, index: SupportsIndex, offset: int = 0, length: int | None = None) -> TokenArray:
        """Part of a sequence: `length` tokens from `offset` on, to its end by default. Nothing else is read.

        Raises:
            SelectionError: there is no such sequence, or the part is not inside it.
        """
        at = check_index(index, self._n, what="sequence")
        size = self.sizes.item(at)
        offset, end = _check_part(offset, length, size, "sequence", at, where="offset", is_length=True)
        start = self.index.pointers.item(at)
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
        if self._closed:
            self._open()
        whole, itemsize = self._whole, self._itemsize
        if whole is not None:
            return [whole[start // itemsize : end // itemsize] for start, end in zip(starts, ends, strict=True)]
        parts = self.transport.get_ranges(self.bin_path, starts=starts, ends=ends)
        return [_as_array(part, self.dtype) for part in parts]

    def pieces(self) -> Iterator[TokenArray]:
        """All tokens in the order of the sequences, as read-only arrays of at most 8 MiB."""
        if any(problem.kind == "not_packed" for problem in self.problems):
            for sequence, size in enumerate(self.sizes.tolist()):
                for start, end in steps(size, CHUNK_BYTES // self._itemsize):
                    yield self.get(sequence, start, end - start)
            return
        for start, end in steps(self.index.bin_nbytes, CHUNK_BYTES):
            yield self._read([start], [end])[0]

    # -- documents -----------------------------------------------------------------------------------------------------

    def sequences_of(self, document: SupportsIndex) -> range:
        """The numbers of the sequences of a document.

        Raises:
            SelectionError: there is no such document.
        """
        position = check_index(document, self.n_documents, what="document")
        return range(self.doc_idx.item(position), self.doc_idx.item(position + 1))

    def document(self, document: SupportsIndex, start: int = 0, stop: int | None = None) -> TokenArray:
        """The tokens of a document, its sequences joined; or only tokens `start` to `stop` of it, and no others are read.

        Returns:
            A read-only view if the part is in one sequence of a mapped file, else fresh memory.

        Raises:
            SelectionError: there is no such document, or the part is not inside it.
        """
        numbers = self.sequences_of(document)
        ends = np.cumsum(self.sizes[numbers.start : numbers.stop], dtype=np.int64)
        begins = ends - self.sizes[numbers.start : numbers.stop]
        total = int(ends[-1]) if len(ends) else 0
        start, stop = _check_part(start, stop, total, "document", document, where="start")
        (touched,) = np.nonzero((begins < stop) & (ends > start))
        offsets = np.maximum(start - begins[touched], 0)
        lengths = np.minimum(ends[touched], stop) - begins[touched] - offsets
        parts = self.read_parts(touched + numbers.start, offsets, lengths)
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, self.dtype), *parts])

    # -- as a source -----------------------------------------------------------------------------------------------------

    def describe(self, *, digest: DigestScope = "sampled") -> dict[str, object]:
        """Describe the data set for `metadata.data` of a store that is recorded from it."""
        return {
            "format": self.format,
            "url": self.url,
            "n_samples": self._n,
            "mapping": "example i is sequence i",
            "dtype": self.dtype.name,
            "digest": describe_digest(self.transport, self._sized_files(), scope=digest),
        }

    def _sized_files(self) -> list[tuple[str, int]]:
        return [(self.idx_path, self.index.idx_nbytes), (self.bin_path, self.index.bin_nbytes)]

    def validate(self, *, deep: bool = False, progress: bool | None = None) -> Report:
        """Report what is wrong; a sequence counts as an example.

        Opening has checked every number of the index; `deep` reads every byte of `.bin`.
        """
        deep = check_flag(deep, name="deep")
        started, problems, checked, lowest = time.perf_counter(), list(self.problems), 0, 0
        lost = ((0, self._n),) if self._n else ()
        for path, nbytes in self._sized_files():
            where = full_url(self.transport, path)
            try:
                now = self.transport.size(path)
            except SaevStoreError as error:
                problems.append(Problem(error.kind, error.message, where=where, lost=lost))
                continue
            if now != nbytes:
                message = f"it had {nbytes:,} bytes when it was opened and has {now:,} now"
                problems.append(Problem("changed_size", message, where=where, lost=lost))
        if deep and not any(problem.severity == "error" for problem in problems):
            with Progress(self.index.bin_nbytes, "checking", shown=progress) as bar:
                for tokens in self.pieces():
                    least = tokens.min()  # reads every page of a map
                    lowest = min(lowest, int(least) if self.dtype.kind == "i" else 0)
                    checked += tokens.nbytes
                    bar.advance(tokens.nbytes)
            if lowest < 0:
                message = f"there are negative token ids, down to {lowest}, which no tokenizer gives"
                where = full_url(self.transport, self.bin_path)
                problems.append(Problem("negative_token", message, where=where, severity="info"))
        elapsed_s = time.perf_counter() - started
        return Report(self.url, self._n, 1, tuple(problems), deep, checked, elapsed_s)

    def close(self) -> None:
        """Release maps and connections; returned views stay valid, and later reads open the files again."""
        self._whole, self._closed = None, True
        self.transport.close()


def file_names(name: str) -> tuple[str, str]:
    """The names of the two files of a data set, of one of them or of their common prefix.

    >>> file_names("tokens"), file_names("tokens.bin")
    (('tokens.idx', 'tokens.bin'), ('tokens.idx', 'tokens.bin'))
    """
    prefix = name.removesuffix(".idx") if name.endswith(".idx") else name.removesuffix(".bin")
    return f"{prefix}.idx", f"{prefix}.bin"


def _as_array(data: Buffer, dtype: np.dtype[np.generic]) -> TokenArray:
    """View bytes as tokens, read-only."""
    tokens = np.frombuffer(data, dtype)
    tokens.flags.writeable = False
    return tokens


def _check_part(
    start: SupportsIndex,
    stop: SupportsIndex | None,
    size: int,
    noun: str,
    number: SupportsIndex,
    *,
    where: str,
    is_length: bool = False,
) -> tuple[int, int]:
    """The bounds of a part of `size` tokens, to their end by default; with `is_length` its length is given.

    Raises:
        SelectionError: a bound is not an integer, or the part is not inside.
    """
    try:
        low = operator.index(start)
        high = size if stop is None else operator.index(stop) + (low if is_length else 0)
    except TypeError:
        raise SelectionError(f"tokens {brief(start)} to {brief(stop)} must be integers", where=where) from None
    if not 0 <= low <= high <= size:
        message = f"tokens {brief(low)} to {brief(high)} of {noun} {brief(number)} do not exist; it has {size}"
        raise SelectionError(message, where=where)
    return low, high
