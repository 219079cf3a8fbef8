"""Writes MMIDIDX; both files appear when they are complete."""

from __future__ import annotations

import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from saev_store._runtime.progress import Progress
from saev_store.core.arguments import check_flag
from saev_store.errors import ArgumentError, SaevStoreError, brief
from saev_store.names import printable
from saev_store.sources._new_file import NewFile, refuse_existing
from saev_store.sources.address import Url, full_url, locate
from saev_store.sources.mmididx.index import code_of, index_header
from saev_store.sources.mmididx.reader import IndexedDataset, file_names
from saev_store.transport import Moves, Writes
from saev_store.transport.local.write import TEMP_PREFIX

if TYPE_CHECKING:
    from saev_store.transport import Engine, Transport

_MAX_I32 = 2**31 - 1
#: Entries of the index that are written at once.
_STRIDE = 1 << 18


class IndexedDatasetBuilder:
    """Builds `.bin` and `.idx`: `add_document` for each document, or `add_sequence` and `end_document`, then `finalize`.

    Tokens are copied and written to the disk at once. Memory holds 4 bytes for each sequence, 8 for each document, 1 for
    each mode and a buffer. As a context manager it finalizes at the end of the block, and leaves nothing behind if the block
    raises.

    Args:
        path: The `.idx` or `.bin` file, or their common prefix: a path, any fsspec URL, or, with `transport`, a path
            below its root.
        dtype: Type of a token; one of the ten that the format has codes for.
        multimodal: Each sequence has a mode.
        overwrite: Replace a data set of that name; for a moment there is no index. Refused in object stores, which
            cannot replace two files together.
        storage_options, engine, transport: As in `open_source`.

    Raises:
        ArgumentError: the format has no code for `dtype`.
        StoreExistsError: one of the two files exists, and `overwrite` is false or impossible.

    >>> from saev_store.transport import MemoryTransport
    >>> memory = MemoryTransport()
    >>> with IndexedDatasetBuilder("tokens", dtype="uint16", transport=memory) as builder:
    ...     builder.add_document([97, 98, 99])
    ...     builder.add_document([100])
    >>> from saev_store.sources.mmididx import IndexedDataset
    >>> IndexedDataset("tokens", transport=memory)[0].tolist()
    [97, 98, 99]
    """

    def __init__(
        self,
        path: Url,
        dtype: npt.DTypeLike = np.int32,
        *,
        multimodal: bool = False,
        overwrite: bool = False,
        storage_options: Mapping[str, object] | None = None,
        engine: Engine = "auto",
        transport: Transport | None = None,
    ) -> None:
        overwrite, multimodal = check_flag(overwrite, name="overwrite"), check_flag(multimodal, name="multimodal")
        code_of(dtype)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        limits = np.iinfo(self.dtype.name) if self.dtype.kind in "iu" else None
        self._limits = None if limits is None else (int(limits.min), int(limits.max))
        self._transport, name = locate(path, storage_options, engine=engine, transport=transport)
        self._idx_path, self._bin_path = file_names(name)
        # An object store has no lock: two writers that replace the two files could leave one file of each.
        self._overwrite = overwrite and isinstance(self._transport, Moves)
        if not self._overwrite:
            remedy = "Delete both files first: this storage cannot replace two files together." if overwrite else None
            refuse_existing(self._transport, self._idx_path, remedy=remedy)
            refuse_existing(self._transport, self._bin_path, remedy=remedy)
        self._bin: NewFile | None = NewFile(self._transport, self._bin_path, overwrite=self._overwrite)
        self._sizes = array.array("i")
        self._doc_idx = array.array("q", [0])
        self._modes = array.array("b") if multimodal else None

    def add_sequence(self, tokens: npt.ArrayLike, mode: int = 0) -> None:
        """Append a sequence to the current document; it may be empty.

        Args:
            tokens: One-dimensional; numbers that the builder's dtype holds exactly.
            mode: From -128 to 127, for a multimodal data set; else 0.

        Raises:
            ArgumentError: the tokens do not fit the dtype, or there is a mode where there can be none.
        """
        self._check_mode(mode)
        self._append(self._as_tokens(tokens))
        if self._modes is not None:
            self._modes.append(mode)

    def end_document(self) -> None:
        """End a document: the sequences since the last call, perhaps none."""
        self._doc_idx.append(len(self._sizes))

    def add_document(
        self,
        tokens: npt.ArrayLike,
        lengths: Sequence[int] | None = None,
        modes: Sequence[int] | None = None,
    ) -> None:
        """Append a document.

        Args:
            tokens: All its tokens.
            lengths: Lengths of the sequences that it is cut into; one sequence by default.
            modes: One for each sequence of a multimodal data set; 0 by default.

        Raises:
            ArgumentError: lengths do not sum to the tokens, or as in `add_sequence`. Nothing was appended then.
        """
        found = self._as_tokens(tokens)
        sizes = [len(found)] if lengths is None else [int(length) for length in lengths]
        if sum(sizes) != len(found) or min(sizes, default=0) < 0:
            raise ArgumentError(f"lengths {brief(sizes)} do not cut {len(found)} tokens", where="lengths")
        marks = [0] * len(sizes) if modes is None else list(modes)
        if len(marks) != len(sizes):
            raise ArgumentError(f"{len(marks)} modes came for {len(sizes)} sequences", where="modes")
        for mark in marks:
            self._check_mode(mark)
        at = 0
        for size, mark in zip(sizes, marks, strict=True):
            self._append(found[at : at + size])
            at += size
            if self._modes is not None:
                self._modes.append(mark)
        self.end_document()

    def merge(self, other: IndexedDataset, *, progress: bool | None = None) -> None:
        """Append all documents of another data set, with its sequences and modes; streamed. An open document is ended.

        If reading `other` fails, this data set is abandoned.

        Args:
            other: The data set to append.
            progress: Show a bar on stderr; default: when it is a terminal.

        Raises:
            ArgumentError: it has another dtype, or only one of the two has modes. Nothing was appended then.
        """
        if other.dtype != self.dtype:
            raise ArgumentError(f"its tokens are {other.dtype.name}, those here {self.dtype.name}", where="other")
        if len(other) and (other.modes is None) != (self._modes is None):
            raise ArgumentError("only one of the two data sets has modes", where="other")
        if self._doc_idx[-1] != len(self._sizes):
            self.end_document()
        try:
            with Progress(other.n_tokens, "merging", shown=progress, unit="tokens") as bar:
                for tokens in other.pieces():
                    self._write(tokens)
                    bar.advance(len(tokens))
        except BaseException:
            self.abort()
            raise
        doc_idx = other.doc_idx[1:].astype(np.int64) + len(self._sizes)
        self._doc_idx.frombytes(doc_idx.tobytes())
        self._sizes.frombytes(other.sizes.astype(np.intc).tobytes())
        if self._modes is not None and other.modes is not None:
            self._modes.frombytes(other.modes.tobytes())

    def finalize(self) -> None:
        """Publish both files: `.bin`, then `.idx`, which readers look for. An open document is ended.

        Raises:
            ArgumentError: called a second time.
            StoreExistsError: another writer has published a data set of that name meanwhile. Its files stay as they are.
            WriterConflictError: another process publishes a data set of that name at this moment.
        """
        if self._bin is None:
            raise ArgumentError("this data set is complete or abandoned", where="finalize")
        if self._doc_idx[-1] != len(self._sizes):
            self.end_document()
        try:
            transport = self._bin.transport
            folder, slash, name = self._idx_path.rpartition("/")
            lock = f"{folder}{slash}{TEMP_PREFIX}{name}.lock"
            with transport.lock(lock):
                if self._overwrite:
                    transport.delete(self._idx_path)
                try:
                    self._publish(self._bin)
                finally:
                    try:
                        self._delete_lock(lock)
                    except BaseException:  # Ctrl-C
                        self._delete_lock(lock)
                        raise
        finally:
            self.abort()

    def _delete_lock(self, lock: str) -> None:
        if isinstance(self._transport, Writes):
            with suppress(SaevStoreError):  # it does no harm
                self._transport.delete(lock)

    def _publish(self, bin_file: NewFile) -> None:
        """Publish `.bin`, which decides between several writers, then the index; delete `.bin` if the index fails."""
        with NewFile(self._transport, self._idx_path) as index_file:
            for piece in self._index():
                index_file.write(piece)
            try:
                bin_file.commit()
                index_file.commit()
            except BaseException:
                if not self._overwrite:
                    bin_file.retract()
                raise

    def _index(self) -> Iterator[memoryview]:
        sizes = np.frombuffer(self._sizes, np.intc) if self._sizes else np.zeros(0, np.intc)
        yield memoryview(index_header(self.dtype, len(sizes), len(self._doc_idx)))
        for start in range(0, len(sizes), _STRIDE):
            yield memoryview(sizes[start : start + _STRIDE].astype("<i4").tobytes())
        end = 0
        for start in range(0, len(sizes), _STRIDE):
            nbytes = sizes[start : start + _STRIDE].astype(np.int64) * self.dtype.itemsize
            ends = end + np.cumsum(nbytes)
            yield memoryview((ends - nbytes).astype("<i8").tobytes())
            end = int(ends[-1])
        yield memoryview(np.frombuffer(self._doc_idx, np.int64).astype("<i8").tobytes())
        if self._modes:
            yield memoryview(self._modes.tobytes())

    def abort(self) -> None:
        """Leave nothing behind; has no effect after `finalize`."""
        file, self._bin = self._bin, None
        if file is not None:
            file.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None and self._bin is not None:
            self.finalize()
        else:
            self.abort()

    def _check_mode(self, mode: int) -> None:
        if mode if self._modes is None else not -128 <= mode <= 127:
            rule = "it must be from -128 to 127" if self._modes is not None else "only a multimodal data set has modes"
            raise ArgumentError(f"mode is {brief(mode)}; {rule}", where="mode")

    def _as_tokens(self, tokens: npt.ArrayLike) -> npt.NDArray[np.generic]:
        """The tokens as a one-dimensional array of any type, once the data set's dtype holds them exactly."""
        try:
            found = np.asarray(tokens)
        except (TypeError, ValueError, OverflowError) as error:
            raise ArgumentError(f"{brief(tokens)} are no tokens: {error}", where="tokens") from None
        if found.ndim != 1 or len(found) > _MAX_I32:
            raise ArgumentError(
                f"the shape is {found.shape}; a sequence has one dimension of at most {_MAX_I32:,}", where="tokens"
            )
        if found.dtype == self.dtype or not found.size:
            return found
        if found.dtype.kind not in "iuf" or (found.dtype.kind == "f" and self.dtype.kind != "f"):
            raise ArgumentError(f"tokens are {found.dtype}; they must be {self.dtype.name}", where="tokens")
        if self.dtype.kind == "f" and self.dtype.itemsize < found.dtype.itemsize:
            with np.errstate(over="ignore"):
                is_lost = np.isfinite(found) & ~np.isfinite(found.astype(self.dtype))
            if is_lost.any():
                raise ArgumentError(
                    f"{found[is_lost][0]} is beyond the largest number of {self.dtype.name}, "
                    f"{np.finfo(self.dtype.name).max}",
                    where="tokens",
                    remedy="Write a data set of float64.",
                )
        if self.dtype.kind == "f" and found.dtype.kind != "f":
            low, high, most = int(found.min()), int(found.max()), 2 ** (np.finfo(self.dtype.name).nmant + 1)
            if low < -most or high > most:
                raise ArgumentError(
                    f"tokens reach from {low} to {high}; {self.dtype.name} holds every integer from -{most} to {most}",
                    where="tokens",
                )
        # The bitwise or of all tokens is an upper bound; it takes one pass where the two extremes take two.
        if self._limits is not None and not 0 <= np.bitwise_or.reduce(found) <= self._limits[1]:
            low, high = int(found.min()), int(found.max())
            if low < self._limits[0] or high > self._limits[1]:
                raise ArgumentError(
                    f"tokens reach from {low} to {high}; {self.dtype.name} holds {self._limits[0]} to {self._limits[1]}",
                    where="tokens",
                )
        return found

    def _append(self, tokens: npt.NDArray[np.generic]) -> None:
        self._write(tokens)
        self._sizes.append(len(tokens))

    def _write(self, tokens: npt.NDArray[np.generic]) -> None:
        if self._bin is None:
            raise ArgumentError("this data set is complete or abandoned", where="add")
        if len(tokens):
            self._bin.write(np.ascontiguousarray(tokens, self.dtype).data)

    def __repr__(self) -> str:
        where = full_url(self._transport, self._idx_path)
        return printable(f"{type(self).__name__}({where}: {len(self._sizes):,} sequences of {self.dtype.name} so far)")
