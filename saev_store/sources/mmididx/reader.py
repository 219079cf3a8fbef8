"""Reads MMIDIDX: token sequences and documents, whole or in part."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, SupportsIndex, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from saev_store._runtime.progress import Progress
from saev_store.core.arguments import check_count, check_flag
from saev_store.core.layout import IntArray
from saev_store.errors import ArgumentError, CorruptShardError, NotFoundError, SaevStoreError, SelectionError, brief
from saev_store.problems import Problem
from saev_store.sources._files import CHUNK_BYTES, chunks, describe_digest, file_identity, is_resident
from saev_store.sources._source import DigestScope, Source, check_index, check_positions, steps, text_card
from saev_store.sources.address import Url, full_url, locate
from saev_store.sources.mmididx.index import HEADER_NBYTES, Index, check_header, parse_index
from saev_store.transport.fetch import fetch_ranges
from saev_store.validation import Report

if TYPE_CHECKING:
    from saev_store.transport import Buffer, Engine, Transport

TokenArray: TypeAlias = npt.NDArray[np.generic]


class IndexedDataset(Source[TokenArray]):
    """An MMIDIDX data set (`.idx` and `.bin`), opened: `dataset[i]` is the i-th sequence of token ids.

    If the transport maps files, arrays are read-only views of the map and stay valid after `close`. Truncating a mapped
    file ends the process: use `engine="pread"` where that can happen. Other transports return fresh arrays, and fetch
    several sequences with few requests.

    Args:
        path: The `.idx` file, the `.bin` file, or their common prefix: a path, any fsspec URL, or, with `transport`, a
            path below its root.
        storage_options, engine, transport: As in `open_source`.
        dtype: Type of a token; used only for the codes (6 and 7) that tools do not agree on, where the files do not
            decide.

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
        CorruptShardError: `.bin` is shorter or longer than the index says.
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
        self._asked_dtype = dtype
        self._resident, self._closed = is_resident(self.transport), False
        self._whole: TokenArray | None = None
        self._versions: tuple[str | None, str | None] | None = None
        self.index, self.problems = self._open()
        index = self.index
        self.dtype, self.sizes, self.doc_idx, self.modes = index.dtype, index.sizes, index.doc_idx, index.modes
        self.n_documents = len(index.doc_idx) - 1
        self.n_tokens = int(index.sizes.sum(dtype=np.int64))
        self._n, self._itemsize = len(index.sizes), index.dtype.itemsize

    def _open(self) -> tuple[Index, tuple[Problem, ...]]:
        """Read and check the index, and make sure that later reads of `.bin` are of the file that belongs to it."""
        transport, idx = self.transport, self.idx_path
        identity, nbytes = file_identity(transport, idx), transport.size(idx)
        (head,) = transport.get_ranges(idx, starts=[0], ends=[min(nbytes, HEADER_NBYTES)])
        check_header(head, idx_nbytes=nbytes, where=self.url)
        (raw,) = fetch_ranges(transport, idx, [0], [nbytes])
        try:
            bin_nbytes = transport.size(self.bin_path)
        except NotFoundError as error:
            raise NotFoundError(
                "the .bin file is missing",
                where=full_url(transport, self.bin_path),
                remedy="Copy it beside the .idx file.",
            ) from error
        index, problems = parse_index(raw, bin_nbytes=bin_nbytes, where=self.url, dtype=self._asked_dtype)
        # The transport pins a file when its first bytes are read, so `.bin` is read now. A writer deletes the old index
        # before it replaces `.bin`: if the index is still the same afterwards, both files belong together.
        (whole,) = transport.get_ranges(
            self.bin_path, starts=[0], ends=[bin_nbytes if self._resident else min(bin_nbytes, 1)]
        )
        (again,) = transport.get_ranges(idx, starts=[0], ends=[min(nbytes, HEADER_NBYTES)])
        versions = (transport.version(idx), transport.version(self.bin_path))
        is_other = self._versions not in {None, versions}
        if is_other or file_identity(transport, idx) != identity or bytes(again) != bytes(head):
            raise self._replaced()
        self._versions = versions
        if self._resident:
            self._whole = _as_array(whole, index.dtype)
        return index, problems

    def _reopen_if_closed(self) -> None:
        """Compare the index again after `close`, which has released the transport's pins of both files."""
        if self._closed:
            if not _is_same_index(self._open()[0], self.index):
                self._whole = None
                raise self._replaced()
            self._closed = False

    def _replaced(self) -> CorruptShardError:
        return CorruptShardError(
            "another data set has taken the place of the one that was opened", where=self.url, remedy="Open it again."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (_reopen, (type(self), self.transport, self.idx_path, self._asked_dtype))

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
        position = check_index(index, self._n, what="sequence")
        size = self.sizes.item(position)
        offset, length = _whole(offset, "offset"), None if length is None else _whole(length, "length")
        length = size - offset if length is None else length
        if not 0 <= offset <= offset + length <= size:
            raise SelectionError(
                f"tokens {brief(offset)} to {brief(offset + length)} of sequence {position} do not exist; it has {size}",
                where="offset",
            )
        return self._tokens(self.index.pointers.item(position) + offset * self._itemsize, length)

    def rows(self, indices: npt.ArrayLike | slice) -> list[TokenArray]:
        """Several sequences in the order asked for, fetched together; read-only arrays."""
        wanted = check_positions(indices, self._n, what="sequence")
        return self.read_parts(wanted, np.zeros(len(wanted), np.int64), self.sizes[wanted].astype(np.int64))

    def read_parts(self, sequences: IntArray, offsets: IntArray, lengths: IntArray) -> list[TokenArray]:
        """Parts of many sequences (int64 arrays of one length), fetched together; the caller has checked the bounds."""
        self._reopen_if_closed()
        starts = self.index.pointers[sequences] + offsets * self._itemsize
        if self._whole is not None:
            whole, begins = self._whole, starts // self._itemsize
            return [whole[begin:end] for begin, end in zip(begins.tolist(), (begins + lengths).tolist(), strict=True)]
        ends = starts + lengths * self._itemsize
        parts = fetch_ranges(self.transport, self.bin_path, starts.tolist(), ends.tolist())
        return [_as_array(part, self.dtype) for part in parts]

    def pieces(self) -> Iterator[TokenArray]:
        """All tokens in the order of the sequences, as read-only arrays of at most 8 MiB."""
        if not any(problem.kind == "not_packed" for problem in self.problems):
            self._reopen_if_closed()
            for part in chunks(self.transport, self.bin_path, self.index.bin_nbytes):
                yield _as_array(part, self.dtype)
            return
        for sequence, size in enumerate(self.sizes.tolist()):
            for start, end in steps(size, CHUNK_BYTES // self._itemsize):
                yield self.get(sequence, start, end - start)

    def _tokens(self, start: int, length: int) -> TokenArray:
        self._reopen_if_closed()
        if self._whole is not None:
            begin = start // self._itemsize
            return self._whole[begin : begin + length]
        (part,) = self.transport.get_ranges(self.bin_path, starts=[start], ends=[start + length * self._itemsize])
        return _as_array(part, self.dtype)

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

        Raises:
            SelectionError: there is no such document, or the part is not inside it.
        """
        sequences = self.sequences_of(document)
        sizes = self.sizes[sequences.start : sequences.stop].astype(np.int64)
        ends = np.cumsum(sizes)
        total = int(ends[-1]) if len(ends) else 0
        start, stop = _whole(start, "start"), total if stop is None else _whole(stop, "stop")
        if not 0 <= start <= stop <= total:
            raise SelectionError(
                f"tokens {brief(start)} to {brief(stop)} of document {brief(document)} do not exist; it has {total}",
                where="start",
            )
        begins = ends - sizes
        first = int(np.searchsorted(ends, start, side="right"))
        last = max(int(np.searchsorted(begins, stop, side="left")), first)
        offsets = np.maximum(start - begins[first:last], 0)
        lengths = np.minimum(ends[first:last], stop) - begins[first:last] - offsets
        numbers = np.arange(sequences.start + first, sequences.start + last, dtype=np.int64)
        if not len(numbers):
            return self._tokens(0, 0)
        starts = self.index.pointers[numbers] + offsets * self._itemsize
        if np.array_equal(starts[1:], starts[:-1] + lengths[:-1] * self._itemsize):
            return self._tokens(int(starts[0]), int(lengths.sum()))
        return np.concatenate(self.read_parts(numbers, offsets, lengths))

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

    def _sized_files(self) -> Sequence[tuple[str, int]]:
        return [(self.idx_path, self.index.idx_nbytes), (self.bin_path, self.index.bin_nbytes)]

    def validate(self, *, deep: bool = False, progress: bool | None = None) -> Report:
        """Report what is wrong; a sequence counts as an example.

        Opening has checked every number of the index; `deep` reads every byte of `.bin`.
        """
        deep = check_flag(deep, name="deep")
        started, problems, checked = time.perf_counter(), list(self.problems), 0
        lost = ((0, self._n),) if self._n else ()
        for path, nbytes in self._sized_files():
            where = full_url(self.transport, path)
            try:
                there = self.transport.size(path)
            except SaevStoreError as error:
                problems.append(Problem(error.kind, error.message, where=where, lost=lost))
                continue
            if there != nbytes:
                message = f"it had {nbytes:,} bytes when it was opened and has {there:,} now"
                problems.append(Problem("changed_size", message, where=where, lost=lost))
        if deep and not any(problem.severity == "error" for problem in problems):
            lowest = 0
            with Progress(self.index.bin_nbytes, "checking", shown=progress) as bar:
                for part in chunks(self.transport, self.bin_path, self.index.bin_nbytes):
                    least = np.frombuffer(part, self.dtype).min()  # reads every page of a map
                    lowest = min(lowest, int(least) if self.dtype.kind == "i" else 0)
                    checked += len(part)
                    bar.advance(len(part))
            if lowest < 0:
                message = f"there are negative token ids, down to {lowest}: no tokenizer gives those"
                where = full_url(self.transport, self.bin_path)
                problems.append(Problem("negative_token", message, where=where, severity="info"))
        elapsed_s = time.perf_counter() - started
        return Report(self.url, self._n, 1, tuple(problems), deep, checked, elapsed_s)

    def close(self) -> None:
        """Release maps and connections; returned views stay valid, and later reads open the files again."""
        self._whole, self._closed = None, True
        self.transport.close()


def _whole(value: object, name: str) -> int:
    """An integer argument; whether it is in range is for the caller to say."""
    try:
        return operator.index(cast("SupportsIndex", value))
    except TypeError:
        raise SelectionError(f"{name} is {brief(value)}; it must be an integer", where=name) from None


def file_names(name: str) -> tuple[str, str]:
    """The names of the two files of a data set, of one of them or of their common prefix.

    >>> file_names("tokens"), file_names("tokens.bin")
    (('tokens.idx', 'tokens.bin'), ('tokens.idx', 'tokens.bin'))
    """
    prefix = name.removesuffix(".idx") if name.endswith(".idx") else name.removesuffix(".bin")
    return f"{prefix}.idx", f"{prefix}.bin"


def _reopen(kind: type[IndexedDataset], transport: Transport, path: str, dtype: npt.DTypeLike | None) -> IndexedDataset:
    return kind(path, transport=transport, dtype=dtype)


def _as_array(data: Buffer, dtype: np.dtype[np.generic]) -> TokenArray:
    """View bytes as tokens, read-only."""
    tokens = np.frombuffer(data, dtype) if len(data) else np.zeros(0, dtype)
    tokens.flags.writeable = False
    return cast("TokenArray", tokens)


def _is_same_index(a: Index, b: Index) -> bool:
    same_facts = (a.dtype, a.variant, a.bin_nbytes, a.idx_nbytes) == (b.dtype, b.variant, b.bin_nbytes, b.idx_nbytes)
    same_modes = a.modes is None or b.modes is None or np.array_equal(a.modes, b.modes)
    pairs = ((a.sizes, b.sizes), (a.pointers, b.pointers), (a.doc_idx, b.doc_idx))
    return same_facts and same_modes and all(np.array_equal(left, right) for left, right in pairs)


def split_documents(n_documents: int, weights: Sequence[float]) -> list[range]:
    """Documents cut into consecutive parts in proportion to weights, such as (969, 30, 1), as Megatron cuts them.

    Every document is in exactly one part; rounding errors go to the last part that has any weight.

    Raises:
        ArgumentError: a weight is negative, or all are 0.

    >>> split_documents(10, [8, 1, 1])
    [range(0, 8), range(8, 9), range(9, 10)]
    """
    n_documents = check_count(n_documents, name="n_documents", least=0)
    refusal = ArgumentError(f"{brief(weights)} are no weights: none may be negative, one positive", where="weights")
    try:
        weights = [float(weight) for weight in weights if not isinstance(weight, str)]
        is_right = len(weights) > 0 and min(weights) >= 0 and 0 < math.fsum(weights) < math.inf
    except (TypeError, ValueError, OverflowError):
        raise refusal from None
    if not is_right:
        raise refusal
    last = max(i for i, weight in enumerate(weights) if weight > 0)
    # Shares first, then their sums, then the product: in this order the rounding errors are Megatron's as well.
    shares = np.asarray(weights, np.float64) / np.sum(np.asarray(weights, np.float64))
    ends = [round(end * n_documents) for end in accumulate(shares.tolist())]
    ends = [n_documents if i >= last else end for i, end in enumerate(ends)]
    return [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
