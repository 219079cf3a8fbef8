"""Writes LLMBATCH from an array or a stream, shuffled in the order of `RecordOrder`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import IO, TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from saev_store._runtime.progress import Progress
from saev_store.core.arguments import check_count, check_flag
from saev_store.core.layout import IntArray
from saev_store.errors import ArgumentError, brief
from saev_store.order import Permutation, derive
from saev_store.sources._new_file import NewFile, refuse_existing
from saev_store.sources.address import Url, locate
from saev_store.sources.llmbatch.header import ITEMSIZE, MAX_U32, Header
from saev_store.sources.llmbatch.reader import TOKEN, TokenArray
from saev_store.transport.checks import byte_views, os_errors
from saev_store.transport.durable import write_all

if TYPE_CHECKING:
    from saev_store.transport import Engine, Transport

_PIECE_BYTES = 8 << 20
_RECORDS = 0x4C4C4D42


class RecordOrder:
    """The permutation between records of the source and their places in the file.

    It is the same on every machine and in every release, and gives the place of any single record without listing the others.

    Args:
        total_records: Records given to the writer.
        seed: The seed in the header.

    >>> order = RecordOrder(6, seed=1)
    >>> records = order.records(np.arange(6))
    >>> order.places(records).tolist()
    [0, 1, 2, 3, 4, 5]
    """

    def __init__(self, total_records: int, seed: int) -> None:
        self.total_records, self.seed = total_records, seed

    @cached_property
    def _permutation(self) -> Permutation:
        return Permutation(self.total_records, derive(_RECORDS, self.seed))

    def records(self, places: IntArray) -> IntArray:
        """Numbers in the source of the records at these places, int64."""
        return self._permutation.at(np.asarray(places, np.int64))

    def places(self, records: IntArray) -> IntArray:
        """Places of records, int64; a place beyond the file's last one means that the record was dropped."""
        return self._permutation.position_of(np.asarray(records, np.int64))


def write_batch_file(
    output_path: Url,
    tokens_array: npt.ArrayLike,
    batch_size: int,
    seq_len: int | None = None,
    seed: int = 0,
    *,
    overwrite: bool = False,
    storage_options: Mapping[str, object] | None = None,
    engine: Engine = "auto",
    transport: Transport | None = None,
    progress: bool | None = None,
) -> int:
    """Shuffle the records of an array, form batches, write them, and return their number.

    Records that do not fill the last batch are dropped. `tokens_array` is of integers from 0 to 2^32 - 1, shape (records, seq_len), and may
    be a memory map larger than memory. `seed`, from 0 to 2^32 - 1, is kept in the header. `output_path` ends in `.batch`; `overwrite`
    replaces a file of that name in one step. `storage_options`, `engine` and `transport` are as in `open_source`.

    Raises:
        ArgumentError: the array is not of that shape, or a number is out of range. Nothing in the storage is changed.
        StoreExistsError: a file of that name exists, and `overwrite` is false.

    >>> write_batch_file("memory://lab/x.batch", np.arange(22 * 5).reshape(22, 5), 4, overwrite=True)
    5
    """
    tokens = _as_array(tokens_array, "tokens_array")
    if tokens.ndim != 2 or tokens.shape[1] < 1:
        raise ArgumentError(f"the shape is {tokens.shape}; it must be (records, seq_len)", where="tokens_array")
    if seq_len is not None and seq_len != tokens.shape[1]:
        raise ArgumentError(f"seq_len is {brief(seq_len)}, but records have {tokens.shape[1]} tokens", where="seq_len")
    overwrite = check_flag(overwrite, name="overwrite")
    there, path = locate(output_path, storage_options, engine=engine, transport=transport)
    header = _checked_header(path, len(tokens), batch_size, tokens.shape[1], seed)
    order, n_group = RecordOrder(len(tokens), header.seed), max(1, _PIECE_BYTES // header.padded_batch_nbytes)
    with (
        Progress(header.file_nbytes, "writing", shown=progress) as bar,
        NewFile(there, path, overwrite=overwrite) as file,
    ):
        file.write(header.to_bytes())
        for first in range(0, header.num_batches, n_group):
            end = min(first + n_group, header.num_batches)
            places = np.arange(first * header.batch_size, end * header.batch_size, dtype=np.int64)
            slots = np.zeros((end - first, header.padded_batch_nbytes), np.uint8)
            records = as_tokens(tokens[order.records(places)])
            slots[:, : header.raw_batch_nbytes].view(TOKEN)[:] = records.reshape(end - first, -1)
            file.write(slots.data)
            bar.advance(slots.nbytes)
            del slots, records  # before the next ones are made
        file.commit()
    return header.num_batches


def write_batch_dataset(
    output_path: Url,
    tokens_iter: Iterable[npt.ArrayLike],
    total_records: int,
    batch_size: int,
    seq_len: int,
    seed: int = 0,
    *,
    overwrite: bool = False,
    storage_options: Mapping[str, object] | None = None,
    engine: Engine = "auto",
    transport: Transport | None = None,
    progress: bool | None = None,
) -> int:
    """Shuffle a stream of records globally, form batches, write them, and return their number.

    The records are collected in a temporary file in `$TMPDIR` of their size, so memory does not grow with the stream. The
    result is byte for byte that of `write_batch_file`, whose other arguments are the same.

    `tokens_iter` gives `total_records` records: arrays of shape (seq_len,), or of shape (n, seq_len) for several at once.

    Raises:
        ArgumentError: a record has another shape, more or fewer come than announced, or a number is out of range.
        StoreExistsError: a file of that name exists, and `overwrite` is false.
    """
    there, path = locate(output_path, storage_options, engine=engine, transport=transport)
    header = _checked_header(path, total_records, batch_size, seq_len, seed)
    if not check_flag(overwrite, name="overwrite"):  # before the stream is consumed
        refuse_existing(there, path)
    shape = (header.total_records, header.seq_len)
    with tempfile.TemporaryFile(buffering=0) as spool:
        _collect(tokens_iter, spool, header)
        tokens = np.memmap(spool, TOKEN, "r", shape=shape) if header.total_records else np.empty(shape, TOKEN)
        return write_batch_file(
            path, tokens, batch_size, seed=seed, overwrite=overwrite, transport=there, progress=progress
        )


def _checked_header(path: str, total_records: int, batch_size: int, seq_len: int, seed: int) -> Header:
    """The header of a file of so many records; `ArgumentError` if a number or the file's ending breaks a rule."""
    if not path.endswith(".batch"):
        raise ArgumentError(f"{path!r} does not end in .batch", where="output_path")
    total_records = check_count(total_records, name="total_records", least=0, most=MAX_U32)
    batch_size = check_count(batch_size, name="batch_size", most=MAX_U32)
    seq_len = check_count(seq_len, name="seq_len", most=MAX_U32)
    seed = check_count(seed, name="seed", least=0, most=MAX_U32)
    return Header(batch_size, seq_len, total_records // batch_size, seed, total_records)


def _as_array(values: npt.ArrayLike, where: str) -> npt.NDArray[np.generic]:
    try:
        return np.asanyarray(values)
    except ValueError:  # lists of unequal lengths
        raise ArgumentError("records have different lengths", where=where) from None


def as_tokens(values: npt.ArrayLike) -> TokenArray:
    """Token ids as uint32.

    Raises:
        ArgumentError: they are not integers, or some are outside 0 to 2^32 - 1.
    """
    found = np.asarray(values)
    if found.dtype.kind not in "iu" and found.size:
        raise ArgumentError(f"token ids are {found.dtype}; they must be integers", where="tokens")
    if found.size and not np.can_cast(found.dtype, TOKEN, "safe"):
        low, high = int(found.min()), int(found.max())
        if low < 0 or high > MAX_U32:
            raise ArgumentError(f"token ids reach from {low} to {high}; uint32 holds 0 to {MAX_U32}", where="tokens")
    return found.astype(TOKEN, copy=False)


def _collect(items: Iterable[npt.ArrayLike], spool: IO[bytes], header: Header) -> None:
    """Check records, and write them one after the other."""
    n, total, seq_len = 0, header.total_records, header.seq_len
    for item in items:
        found = _as_array(item, "tokens_iter")
        records = found[None] if found.ndim == 1 else found
        if records.ndim != 2 or records.shape[1] != seq_len:
            rule = f"it must be ({seq_len},), or several in a two-dimensional array"
            raise ArgumentError(f"a record of shape {found.shape} came; {rule}", where="tokens_iter")
        at, n = n, n + len(records)
        if n > total:
            break
        parts = byte_views([np.ascontiguousarray(as_tokens(records)).data], writable=False)
        with os_errors("$TMPDIR", "collect records"):
            write_all(spool.fileno(), parts, at * seq_len * ITEMSIZE)
    if n != total:
        raise ArgumentError(f"{total:,} records were announced, {n:,} came", where="total_records")
