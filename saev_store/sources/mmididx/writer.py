"""Writes MMIDIDX; both files appear when they are complete."""

from __future__ import annotations

import array
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from saev_store._runtime.progress import Progress
from saev_store.core.arguments import check_flag
from saev_store.errors import ArgumentError, StoreExistsError, brief
from saev_store.sources._new_file import NewFile, refuse_existing
from saev_store.sources.address import Url, locate
from saev_store.sources.mmididx.index import code_of, index_header
from saev_store.sources.mmididx.reader import IndexedDataset, file_names
from saev_store.store.opening import exists
from saev_store.transport.durable import TEMP_PREFIX

if TYPE_CHECKING:
    from saev_store.transport import Engine, Transport

_MAX_I32 = 2**31 - 1


class IndexedDatasetBuilder:
    """Builds `.bin` and `.idx`: `add_document` for each document, or `add_sequence` and `end_document`, then `finalize`.

    Tokens are copied and written to the disk at once. Memory holds 4 bytes for each sequence, 8 for each document, 1 for
    each mode and a buffer; `finalize` takes 20 more for each sequence. As a context manager it finalizes at the end of the
    block, and leaves nothing behind if the block raises.

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

    >>> with IndexedDatasetBuilder("memory://lab/tokens", dtype="uint16") as builder:
    ...     builder.add_document([97, 98, 99])
    ...     builder.add_document([100])
    >>> IndexedDataset("memory://lab/tokens")[0].tolist()
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
        self._transport, name = locate(path, storage_options, engine=engine, transport=transport)
        self._idx_path, bin_path = file_names(name)
        # An object store has no lock: two writers that replace the two files could leave one file of each.
        self._overwrite = overwrite and self._transport.local_path is not None
        if not self._overwrite:
            refuse_existing(self._transport, self._idx_path)
        folder, slash, name = self._idx_path.rpartition("/")
        #: Held during publication. Where a killed builder has left it, `.bin` without an index is that builder's.
        self._lock = f"{folder}{slash}{TEMP_PREFIX}{name}.lock"
        replaces = self._overwrite or exists(self._transport, self._lock)
        self._bin: NewFile | None = NewFile(self._transport, bin_path, overwrite=replaces)
        self._sizes, self._doc_idx = array.array("i"), array.array("q", [0])
        self._modes = array.array("b") if multimodal else None

    def add_sequence(self, tokens: npt.ArrayLike, mode: int = 0) -> None:
        """Append a sequence to the current document; it may be empty.

        Args:
            tokens: One-dimensional; numbers that the builder's dtype holds exactly. Floats may be rounded.
            mode: From -128 to 127, for a multimodal data set; else 0.

        Raises:
            ArgumentError: the tokens do not fit the dtype, or there is a mode although there can be none.
        """
        self._append(self._as_tokens(tokens), None, [mode])

    def end_document(self) -> None:
        """End a document: the sequences since the last call, perhaps none."""
        self._doc_idx.append(len(self._sizes))

    def add_document(
        self, tokens: npt.ArrayLike, lengths: Sequence[int] | None = None, modes: Sequence[int] | None = None
    ) -> None:
        """Append a document.

        Args:
            tokens: All its tokens.
            lengths: Lengths of the sequences that it is cut into; one sequence by default.
            modes: One for each sequence of a multimodal data set; 0 by default.

        Raises:
            ArgumentError: lengths do not sum to the tokens, or as in `add_sequence`. Nothing was appended then.
        """
        self._append(self._as_tokens(tokens), lengths, modes)
        self.end_document()

    def _append(
        self, tokens: npt.NDArray[np.generic], lengths: Sequence[int] | None, modes: Sequence[int] | None
    ) -> None:
        """Check everything, then append sequences."""
        sizes = [len(tokens)] if lengths is None else [int(length) for length in lengths]
        if sum(sizes) != len(tokens) or min(sizes, default=0) < 0:
            raise ArgumentError(f"lengths {brief(sizes)} do not cut {len(tokens)} tokens", where="lengths")
        marks = [0] * len(sizes) if modes is None else list(modes)
        if len(marks) != len(sizes):
            raise ArgumentError(f"{len(marks)} modes came for {len(sizes)} sequences", where="modes")
        for mark in marks:
            if mark if self._modes is None else not -128 <= mark <= 127:
                rule = "only a multimodal data set has modes, from -128 to 127"
                raise ArgumentError(f"mode is {brief(mark)}; {rule}", where="mode")
        self._write(tokens)
        self._sizes.extend(sizes)
        if self._modes is not None:
            self._modes.extend(marks)

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
        self._doc_idx.frombytes((other.doc_idx[1:] + len(self._sizes)).astype(np.int64).tobytes())
        self._sizes.frombytes(other.sizes.astype(np.intc).tobytes())
        if self._modes is not None and other.modes is not None:
            self._modes.frombytes(other.modes.tobytes())

    def finalize(self) -> None:
        """Publish both files: `.bin`, then `.idx`, which readers look for. An open document is ended.

        Raises:
            ArgumentError: called a second time.
            StoreExistsError: another writer has published a data set of that name in the meantime. Its files stay.
            WriterConflictError: another process publishes a data set of that name at this moment.
        """
        if self._bin is None:
            raise ArgumentError("this data set is complete or abandoned", where="finalize")
        if self._doc_idx[-1] != len(self._sizes):
            self.end_document()
        try:
            with self._transport.lock(self._lock):
                try:
                    self._publish(self._bin)
                finally:
                    self._transport.delete(self._lock)
        finally:
            self.abort()

    def _publish(self, bin_file: NewFile) -> None:
        """Publish `.bin`, which decides between several writers, then the index; delete `.bin` if the index fails."""
        with NewFile(self._transport, self._idx_path, overwrite=self._overwrite) as index_file:
            self._write_index(index_file)
            if self._overwrite:
                bin_file.sync()  # a full disk is noticed before anything is replaced
                index_file.sync()
                self._transport.delete(self._idx_path)
            try:
                bin_file.commit()
                index_file.commit()
            except StoreExistsError:  # it is another writer's
                raise
            except BaseException:
                if not exists(self._transport, self._idx_path):  # an interrupt may come after the last step
                    self._transport.delete(bin_file.path)
                raise

    def _write_index(self, file: NewFile) -> None:
        sizes = np.array(self._sizes, "<i4")
        nbytes = sizes.astype("<i8") * self.dtype.itemsize
        file.write(index_header(self.dtype, len(sizes), len(self._doc_idx)))
        doc_idx, modes = np.array(self._doc_idx, "<i8"), np.array(self._modes or [], "i1")
        for column in (sizes, np.cumsum(nbytes) - nbytes, doc_idx, modes):
            file.write(column.tobytes())

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

    def _as_tokens(self, tokens: npt.ArrayLike) -> npt.NDArray[np.generic]:
        """The tokens as a one-dimensional array of any type, once the data set's dtype holds them."""
        try:
            found = np.asarray(tokens)
        except (TypeError, ValueError, OverflowError) as error:
            raise ArgumentError(f"tokens are {brief(tokens)}: {error}", where="tokens") from None
        if found.ndim != 1 or len(found) > _MAX_I32:
            rule = f"a sequence has one dimension of at most {_MAX_I32:,}"
            raise ArgumentError(f"the shape is {found.shape}; {rule}", where="tokens")
        if not found.size or np.can_cast(found.dtype, self.dtype, "safe"):
            return found
        if found.dtype.kind not in "iuf" or (found.dtype.kind == "f" and self.dtype.kind != "f"):
            raise ArgumentError(f"tokens are {found.dtype}; they must be {self.dtype.name}", where="tokens")
        least, most = _limits(self.dtype.name, are_floats=found.dtype.kind == "f")
        finite = found[np.isfinite(found)]
        if finite.size and not least <= finite.min().item() <= finite.max().item() <= most:
            message = f"tokens reach from {finite.min()} to {finite.max()}; {self.dtype.name} holds {least} to {most}"
            raise ArgumentError(message, where="tokens")
        return found

    def _write(self, tokens: npt.NDArray[np.generic]) -> None:
        if self._bin is None:
            raise ArgumentError("this data set is complete or abandoned", where="add")
        self._bin.write(np.ascontiguousarray(tokens, self.dtype).data)


def _limits(dtype: str, *, are_floats: bool) -> tuple[float, float]:
    """The least and the largest number that a dtype holds: any float, or exactly each integer between."""
    if np.dtype(dtype).kind != "f":
        return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    limits = np.finfo(dtype)
    most = float(limits.max) if are_floats else 2 ** (limits.nmant + 1)
    return -most, most
