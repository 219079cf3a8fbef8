"""Writes MMIDIDX; both files appear when they are complete."""

from __future__ import annotations

import array
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from saev_store.core.arguments import check_count, check_flag
from saev_store.errors import ArgumentError, StoreExistsError, brief
from saev_store.sources._new_file import NewFile, refuse_existing
from saev_store.sources.address import Url, locate
from saev_store.sources.mmididx.index import code_of, index_header
from saev_store.sources.mmididx.reader import file_names
from saev_store.store.opening import exists
from saev_store.transport.durable import TEMP_PREFIX

if TYPE_CHECKING:
    from saev_store.transport import Transport

_MAX_I32 = 2**31 - 1


class IndexedDatasetBuilder:
    """Builds `.bin` and `.idx`: `add_document` for each document, then `finalize`.

    Tokens are copied and written to the disk at once. Memory holds 4 bytes for each sequence, 8 for each document, and a buffer. As a
    context manager it finalizes at the end of the block, and leaves nothing behind if the block raises.

    Args:
        path: The `.idx` or `.bin` file, or their common prefix: a path, any fsspec URL, or, with `transport`, a path
            below its root.
        dtype: Type of a token; one of the eight integer types that the format has codes for.
        overwrite: Replace a data set of that name; for a moment there is no index. Refused in object stores, which
            cannot replace two files together.
        storage_options, transport: As in `open_source`.

    Raises:
        ArgumentError: the format has no code for `dtype`.
        StoreExistsError: one of the two files exists, and `overwrite` is false or impossible.

    >>> from saev_store.sources.mmididx import IndexedDataset
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
        overwrite: bool = False,
        storage_options: Mapping[str, object] | None = None,
        transport: Transport | None = None,
    ) -> None:
        overwrite = check_flag(overwrite, name="overwrite")
        code_of(dtype)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._transport, name = locate(path, storage_options, transport=transport)
        self._idx_path, bin_path = file_names(name)
        # An object store has no lock: two writers that replace the two files could leave one file of each.
        self._overwrite = overwrite and self._transport.local_path is not None
        if not self._overwrite:
            refuse_existing(self._transport, self._idx_path)
        folder, slash, name = self._idx_path.rpartition("/")
        #: Held during publication. Where a killed builder has left it, `.bin` without an index is that builder's.
        self._lock = f"{folder}{slash}{TEMP_PREFIX}{name}.lock"
        replaces = self._overwrite or exists(self._transport, self._lock)
        self._bin, self._is_done = NewFile(self._transport, bin_path, overwrite=replaces), False
        self._sizes, self._doc_idx = array.array("i"), array.array("q", [0])

    def add_document(self, tokens: npt.ArrayLike, lengths: Sequence[int] | None = None) -> None:
        """Append a document, cut into sequences of these lengths; one sequence by default.

        Raises:
            ArgumentError: lengths do not sum to the tokens, or these are not one-dimensional, or not integers that the dtype holds.
                Nothing was appended then.
        """
        found = token_array(tokens, self.dtype)
        sizes = [len(found)] if lengths is None else [check_count(n, name="lengths", least=0) for n in lengths]
        if sum(sizes) != len(found):
            raise ArgumentError(f"lengths {brief(sizes)} do not cut {len(found)} tokens", where="lengths")
        self._bin.write(found.data)
        self._sizes.extend(sizes)
        self._doc_idx.append(len(self._sizes))

    def finalize(self) -> None:
        """Publish both files: `.bin`, then `.idx`, which readers look for.

        Raises:
            StoreExistsError: another writer has published a data set of that name in the meantime. Its files stay.
            WriterConflictError: another process publishes a data set of that name at this moment.
        """
        try:
            with self._transport.lock(self._lock):
                try:
                    self._publish()
                finally:
                    self._transport.delete(self._lock)
        finally:
            self.abort()

    def _publish(self) -> None:
        """Publish `.bin`, which decides between several writers, then the index; delete `.bin` if the index fails."""
        sizes, doc_idx = np.array(self._sizes, "<i4"), np.array(self._doc_idx, "<i8")
        nbytes = sizes.astype("<i8") * self.dtype.itemsize
        header = index_header(self.dtype, len(sizes), len(doc_idx))
        with NewFile(self._transport, self._idx_path, overwrite=self._overwrite) as index_file:
            for part in (header, sizes, np.cumsum(nbytes) - nbytes, doc_idx):
                index_file.write(bytes(part))
            self._bin.sync()  # a full disk is noticed before anything is replaced
            index_file.sync()
            if self._overwrite:
                self._transport.delete(self._idx_path)
            try:
                self._bin.commit()
                index_file.commit()
            except StoreExistsError:  # it is another writer's
                raise
            except BaseException:
                if not exists(self._transport, self._idx_path):  # an interrupt may come after the last step
                    self._transport.delete(self._bin.path)
                raise

    def abort(self) -> None:
        """Leave nothing behind; has no effect after `finalize`."""
        self._is_done = True
        self._bin.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None and not self._is_done:
            self.finalize()
        else:
            self.abort()


def token_array(tokens: object, dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
    """Token ids as a contiguous array of a dtype, one-dimensional; `ArgumentError` if it does not hold them."""
    try:
        found = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"tokens are {brief(tokens)}: {error}", where="tokens") from None
    if found.ndim != 1 or len(found) > _MAX_I32:
        message = f"tokens are {brief(tokens)} of shape {found.shape}; a document is a list of at most {_MAX_I32:,} ids"
        raise ArgumentError(message, where="tokens", remedy="Pass token ids; texts need a tokenizer.")
    held = np.iinfo(dtype.name)
    if found.size and not (found.dtype.kind in "iu" and held.min <= found.min() <= found.max() <= held.max):
        rule = f"they must be integers from {held.min} to {held.max}"
        raise ArgumentError(f"tokens are {brief(tokens)}; {rule}", where="tokens")
    return np.ascontiguousarray(found, dtype)
