"""Lists of numbers in the columns of an Arrow stream, as NumPy arrays. The only file that imports pyarrow, which has no types."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import io
import struct
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from saev_store.errors import CorruptShardError, DocumentError, brief
from saev_store.sources.address import full_url
from saev_store.transport import Transport

if TYPE_CHECKING:
    import pyarrow as pa


class Rows:
    """Some rows of a file.

    Args:
        batch: What pyarrow has of them.
        where: The file, for messages.
    """

    def __init__(self, batch: pa.RecordBatch, where: str) -> None:
        self._batch, self._where = batch, where

    def __len__(self) -> int:
        return cast("int", self._batch.num_rows)

    def part(self, start: int, n: int) -> Rows:
        """`n` of the rows."""
        return Rows(self._batch.slice(start, n), self._where)

    def numbers(self, column: str, shape: Sequence[int], dtype: str) -> npt.NDArray[np.generic]:
        """(rows, *shape) of a column whose items are nested lists of numbers; a view of the file where that is mapped.

        Raises:
            CorruptShardError: a list has another length, or an item is empty.
            DocumentError: the items are no such lists, or have another dtype.
        """
        found = self._batch.column(column)
        values = getattr(found, "storage", found)  # where the library that wrote it has registered its types
        for length in shape:
            values = self._flat(values, length, column)
        flat = cast("npt.NDArray[np.generic]", values.to_numpy(zero_copy_only=False))
        if flat.dtype.name != dtype:
            raise DocumentError(f"{column} has {flat.dtype.name}; it must have {dtype}", where=self._where)
        return flat.reshape(-1, *shape)

    def _flat(self, lists: pa.Array, length: int, column: str) -> pa.Array:
        """The items of lists, all of which have one length."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if not isinstance(lists, (pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray)):
            raise DocumentError(f"{column} has {lists.type}; it must have lists", where=self._where)
        lengths = np.unique(pc.list_value_length(lists).to_numpy(zero_copy_only=False))
        values = lists.flatten()
        if lists.null_count or values.null_count:
            raise CorruptShardError(f"{column} has empty items", where=self._where)
        if lengths.tolist() not in ([], [length]):
            raise CorruptShardError(
                f"{column} has lists of {lengths.tolist()[:4]} items; they must have {length}", where=self._where
            )
        return values


def read_rows(transport: Transport, path: str, nbytes: int, columns: Collection[str]) -> Iterator[Rows]:
    """The rows of a file, one record batch after the other: views where the file is mapped, else in memory.

    Args:
        transport: Where the file is.
        path: Its path.
        nbytes: Its size.
        columns: What it must have.

    Raises:
        CorruptShardError: it is cut, or no Arrow stream.
        DocumentError: a column is missing, or there more than once.
    """
    import pyarrow as pa

    where = full_url(transport, path)
    if transport.name == "mmap" and nbytes:
        (mapped,) = transport.get_ranges(path, starts=[0], ends=[nbytes])
        file = pa.BufferReader(pa.py_buffer(mapped))
    else:
        file = pa.PythonFile(_Ranges(transport, path, nbytes), "r")
    try:
        messages = pa.ipc.MessageReader.open_stream(file)
        schema = pa.ipc.read_schema(messages.read_next_message())
        missing = sorted(set(columns) - set(schema.names))
        if missing:
            raise DocumentError(f"it has no column {missing[0]!r}", where=where)
        repeated = sorted(name for name in columns if schema.names.count(name) > 1)
        if repeated:
            raise DocumentError(f"it has the column {repeated[0]!r} more than once", where=where)
        for message in messages:
            if message.type != "record batch" or _is_compressed(message.metadata.to_pybytes()):
                raise DocumentError(
                    "it has dictionaries or compressed record batches, which SAELens does not write",
                    where=where,
                    remedy="Write the data set with datasets.Dataset.save_to_disk.",
                )
            batch = pa.ipc.read_record_batch(message, schema)
            batch.validate(full=True)
            yield Rows(batch, where)
    except StopIteration:
        raise CorruptShardError("it is no whole Arrow stream: it is empty", where=where) from None
    except (pa.ArrowException, OSError, UnicodeDecodeError, struct.error) as error:
        raise CorruptShardError(f"it is no whole Arrow stream: {brief(str(error))}", where=where) from None


def _is_compressed(metadata: bytes) -> bool:
    """Whether the flatbuffer of a record batch has its field `compression`, which pyarrow does not show.

    Compressed buffers say how large they become, and pyarrow takes that memory first (Arrow columnar format, "Compression").
    """
    (message,) = struct.unpack_from("<I", metadata, 0)
    header = _field(metadata, message, 2)
    (offset,) = struct.unpack_from("<I", metadata, header)
    return _field(metadata, header + offset, 3) != 0


def _field(metadata: bytes, table: int, number: int) -> int:
    """Where a field of a table of a flatbuffer is; 0 where it has none."""
    (back,) = struct.unpack_from("<i", metadata, table)
    (nbytes,) = struct.unpack_from("<H", metadata, table - back)
    at = 4 + 2 * number
    (offset,) = struct.unpack_from("<H", metadata, table - back + at) if at < nbytes else (0,)
    return offset and table + offset


class _Ranges(io.RawIOBase):
    """A file of a transport as Python has files, read in ranges."""

    def __init__(self, transport: Transport, path: str, nbytes: int) -> None:
        self._transport, self._path, self._nbytes, self._at = transport, path, nbytes, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        end = self._nbytes if size < 0 else min(self._at + size, self._nbytes)
        if self._at >= end:
            return b""
        (found,) = self._transport.get_ranges(self._path, starts=[self._at], ends=[end])
        self._at = end
        return bytes(found)
