"""Lists of numbers in the columns of an Arrow stream, as NumPy arrays. The only file that imports pyarrow, which has no types."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from saev_store.errors import CorruptShardError, DocumentError, brief
from saev_store.transport import Transport

if TYPE_CHECKING:
    import pyarrow as pa


def read_rows(
    transport: Transport, path: str, nbytes: int, columns: Mapping[str, tuple[Sequence[int], str]]
) -> Iterator[dict[str, npt.NDArray[np.generic]]]:
    """The rows of a file, one record batch after the other: for each column an array (rows, *shape).

    Arrays are views of a mapped file; one in a bucket is read whole. `columns` has the shape of an item and the dtype of its numbers.
    """
    import pyarrow as pa

    where = transport.where(path)
    try:
        (raw,) = transport.get_ranges(path, starts=[0], ends=[nbytes])
        messages = pa.ipc.MessageReader.open_stream(pa.BufferReader(raw))
        first = messages.read_next_message()
        if first.type != "schema":  # of which alone Arrow checks the fields before it follows them
            raise CorruptShardError("it does not begin with an Arrow schema", where=where)
        schema = pa.ipc.read_schema(first)
        for name in columns:
            if schema.names.count(name) != 1:
                raise DocumentError(f"it has {schema.names.count(name)} columns {name!r}; it must have 1", where=where)
        for message in messages:
            if message.type != "record batch" or _is_compressed(message.metadata.to_pybytes()):
                rule = "it has dictionaries or compressed record batches, which SAELens does not write"
                raise DocumentError(rule, where=where)
            batch = pa.ipc.read_record_batch(message, schema)
            batch.validate(full=True)
            yield {
                name: _numbers(batch.column(name), shape, dtype, name, where)
                for name, (shape, dtype) in columns.items()
            }
    except StopIteration:
        raise CorruptShardError("it is empty, not an Arrow stream", where=where) from None
    except (pa.ArrowException, OSError, UnicodeDecodeError, struct.error) as error:
        if isinstance(error, CorruptShardError):
            raise
        raise CorruptShardError(f"it is not a whole Arrow stream: {brief(str(error))}", where=where) from None


def _numbers(lists: pa.Array, shape: Sequence[int], dtype: str, name: str, where: str) -> npt.NDArray[np.generic]:
    """(rows, *shape) of nested lists of numbers."""
    import pyarrow as pa
    import pyarrow.compute as pc

    values = getattr(lists, "storage", lists)  # the library that wrote it may have registered its types
    for length in shape:
        if not isinstance(values, (pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray)):
            raise DocumentError(f"{name} has {values.type}; it must have lists", where=where)
        lengths = np.unique(pc.list_value_length(values).to_numpy(zero_copy_only=False))
        items = values.flatten()
        if values.null_count or items.null_count or lengths.tolist() not in ([], [length]):
            message = f"lists of {name} must have {length} items, none empty, not {lengths.tolist()[:4]}"
            raise CorruptShardError(message, where=where)
        values = items
    flat = values.to_numpy(zero_copy_only=False)
    if flat.dtype.name != dtype:
        raise DocumentError(f"{name} has {flat.dtype.name}; it must have {dtype}", where=where)
    return flat.reshape(-1, *shape)


def _is_compressed(metadata: bytes) -> bool:
    """Return True if the flatbuffer of a record batch has its field `compression`, which pyarrow does not show.

    Compressed buffers name their size, and pyarrow takes that memory first (Arrow columnar format, "Compression").
    """
    (message,) = struct.unpack_from("<I", metadata, 0)
    header = _field(metadata, message, 2)
    (offset,) = struct.unpack_from("<I", metadata, header)
    return _field(metadata, header + offset, 3) != 0


def _field(metadata: bytes, table: int, number: int) -> int:
    """The place of a field of a table of a flatbuffer; 0 if it has none."""
    (back,) = struct.unpack_from("<i", metadata, table)
    (nbytes,) = struct.unpack_from("<H", metadata, table - back)
    at = 4 + 2 * number
    (offset,) = struct.unpack_from("<H", metadata, table - back + at) if at < nbytes else (0,)
    return offset and table + offset
