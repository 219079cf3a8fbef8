"""Writes LLMBATCH from an array or a stream, shuffled in the order of `record_order`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from saev_store.core.arguments import check_count, check_flag
from saev_store.errors import ArgumentError, brief
from saev_store.order import Permutation, derive
from saev_store.sources._new_file import NewFile, refuse_existing
from saev_store.sources.address import Url, locate
from saev_store.sources.llmbatch.header import ITEMSIZE, MAX_U32, Header
from saev_store.sources.llmbatch.reader import TOKEN, TokenArray
from saev_store.transport.checks import os_errors
from saev_store.transport.durable import write_all

if TYPE_CHECKING:
    from saev_store.transport import Transport

_PIECE_BYTES = 4 << 20
_RECORDS = 0x4C4C4D42


def record_order(total_records: int, seed: int) -> Permutation:
    """The permutation between places in the file and records of the source, the same on every machine and in every release.

    A place beyond the file's last one means that the record was dropped.

    Args:
        total_records: Records given to the writer, at least 1.
        seed: The seed in the header.

    >>> order = record_order(6, seed=1)
    >>> order.position_of(order.at(np.arange(6))).tolist()
    [0, 1, 2, 3, 4, 5]
    """
    return Permutation(total_records, derive(_RECORDS, seed))


def write_batch_file(
    output_path: Url,
    tokens_array: npt.ArrayLike,
    batch_size: int,
    seed: int = 0,
    *,
    overwrite: bool = False,
    storage_options: Mapping[str, object] | None = None,
    transport: Transport | None = None,
) -> int:
    """Shuffle the records of an array, form batches, write them, and return their number.

    Records that do not fill the last batch are dropped. `tokens_array` is of integers from 0 to 2^32 - 1, shape (records, seq_len), and may
    be a memory map larger than memory. `seed`, from 0 to 2^32 - 1, is kept in the header. `output_path` ends in `.batch`; `overwrite`
    replaces a file of that name in one step. `storage_options` and `transport` are as in `open_source`.

    Raises:
        ArgumentError: the array is not of that shape, or a number is out of range. Nothing in the storage is changed.
        StoreExistsError: a file of that name exists, and `overwrite` is false.

    >>> write_batch_file("memory://lab/x.batch", np.arange(22 * 5).reshape(22, 5), 4, overwrite=True)
    5
    """
    tokens = _as_array(tokens_array)
    if tokens.ndim != 2 or tokens.shape[1] < 1:
        raise ArgumentError(f"the shape is {tokens.shape}; it must be (records, seq_len)", where="tokens_array")
    there, path = locate(output_path, storage_options, transport=transport)
    header = _checked_header(path, len(tokens), batch_size, tokens.shape[1], seed)
    order, n_records = record_order(len(tokens), header.seed), header.num_batches * header.batch_size
    n_group = max(1, _PIECE_BYTES // header.padded_batch_nbytes) * header.batch_size
    with NewFile(there, path, overwrite=check_flag(overwrite, name="overwrite")) as file:
        file.write(header.to_bytes())
        for first in range(0, n_records, n_group):
            records = order.at(np.arange(first, min(first + n_group, n_records)))
            slots = np.zeros((len(records) // header.batch_size, header.padded_batch_nbytes // ITEMSIZE), TOKEN)
            slots[:, : header.batch_size * header.seq_len] = as_tokens(tokens[records]).reshape(len(slots), -1)
            file.write(slots.data)
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
    transport: Transport | None = None,
) -> int:
    """Shuffle a stream of records globally, form batches, write them, and return their number.

    The records are collected in a temporary file in `$TMPDIR` of their size, so memory does not grow with the stream. The
    result is byte for byte that of `write_batch_file`, whose other arguments are the same.

    `tokens_iter` gives `total_records` records: arrays of shape (seq_len,), or of shape (n, seq_len) for several at once.

    Raises:
        ArgumentError: a record has another shape, more or fewer come than announced, or a number is out of range.
        StoreExistsError: a file of that name exists, and `overwrite` is false.
    """
    there, path = locate(output_path, storage_options, transport=transport)
    _checked_header(path, total_records, batch_size, seq_len, seed)
    if not check_flag(overwrite, name="overwrite"):  # before the stream is consumed
        refuse_existing(there, path)
    n = 0
    with tempfile.TemporaryFile(buffering=0) as spool:
        for item in tokens_iter:
            found = as_tokens(item)
            records = found[None] if found.ndim == 1 else found
            if records.ndim != 2 or records.shape[1] != seq_len:
                rule = f"it must be ({seq_len},), or several in a two-dimensional array"
                raise ArgumentError(f"a record of shape {found.shape} came; {rule}", where="tokens_iter")
            at, n = n, n + len(records)
            if n > total_records:
                break
            with os_errors("$TMPDIR", "collect records"):
                write_all(spool.fileno(), [memoryview(records.tobytes())], at * seq_len * ITEMSIZE)
        if n != total_records:
            raise ArgumentError(f"{total_records:,} records were announced, {n:,} came", where="total_records")
        tokens = np.memmap(spool, TOKEN, "r", shape=(n, seq_len)) if n else np.empty((0, seq_len), TOKEN)
        return write_batch_file(path, tokens, batch_size, seed, overwrite=overwrite, transport=there)


def _checked_header(path: str, total_records: int, batch_size: int, seq_len: int, seed: int) -> Header:
    """The header of a file of so many records; `ArgumentError` if a number or the file's ending breaks a rule."""
    if not path.endswith(".batch"):
        raise ArgumentError(f"{path!r} does not end in .batch", where="output_path")
    total_records = check_count(total_records, name="total_records", least=0, most=MAX_U32)
    batch_size = check_count(batch_size, name="batch_size", most=MAX_U32)
    seq_len = check_count(seq_len, name="seq_len", most=MAX_U32)
    seed = check_count(seed, name="seed", least=0, most=MAX_U32)
    return Header(batch_size, seq_len, total_records // batch_size, seed, total_records)


def _as_array(values: npt.ArrayLike) -> npt.NDArray[np.generic]:
    try:
        return np.asanyarray(values)
    except ValueError:
        raise ArgumentError("records have different lengths", where="tokens") from None


def as_tokens(values: npt.ArrayLike) -> TokenArray:
    """Token ids as uint32; `ArgumentError` if they are not integers from 0 to 2^32 - 1."""
    found = _as_array(values)
    if found.size and not (found.dtype.kind in "iu" and 0 <= found.min() <= found.max() <= MAX_U32):
        raise ArgumentError(f"token ids are {brief(values)}; they must be integers below 2^32", where="tokens")
    return found.astype(TOKEN, copy=False)
