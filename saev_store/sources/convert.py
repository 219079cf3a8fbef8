"""From documents (MMIDIDX) to pre-formed batches (LLMBATCH) and back: streamed, in bounded memory, and verified."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from saev_store.errors import ArgumentError, CorruptShardError, DocumentError
from saev_store.sources._source import check_count
from saev_store.sources.address import Url
from saev_store.sources.llmbatch.header import MAX_U32
from saev_store.sources.llmbatch.order import RecordOrder
from saev_store.sources.llmbatch.reader import BatchFileReader
from saev_store.sources.llmbatch.writer import as_tokens, write_batch_dataset
from saev_store.sources.mmididx.reader import IndexedDataset
from saev_store.sources.mmididx.writer import IndexedDatasetBuilder

if TYPE_CHECKING:
    from saev_store.transport import Engine, Transport

_PIECE_TOKENS = 1 << 20
Records = npt.NDArray[np.uint32]


def documents_to_batches(
    source: IndexedDataset,
    output_path: Url,
    *,
    seq_len: int,
    batch_size: int,
    seed: int = 0,
    how: Literal["pack", "pad"] = "pack",
    end_token: int | None = None,
    pad_token: int | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, object] | None = None,
    engine: Engine = "auto",
    transport: Transport | None = None,
    verify: bool = True,
    progress: bool | None = None,
) -> int:
    """Cut the documents of an MMIDIDX data set into records, shuffle them into batches and write them.

    Args:
        source: The documents, in order; their sequences are joined.
        output_path: As in `write_batch_file`.
        seq_len: Tokens of a record.
        batch_size: Records in a batch.
        seed: Of the order of records.
        how: `"pack"` joins all documents and cuts the run every `seq_len` tokens, dropping the rest at the end; `"pad"`
            makes one record of each document, cut at `seq_len` or filled up with `pad_token`.
        end_token: Put this behind every document (with `"pad"`, where it fits).
        pad_token: For `"pad"`.
        overwrite: Replace files of these names.
        storage_options: Options of the fsspec file system that is written to.
        engine: As in `open_transport`.
        transport: Write through this transport.
        verify: Read every record back and compare it with the source.
        progress: Show a bar on stderr; default: when it is a terminal.

    Returns:
        The number of batches.

    Raises:
        ArgumentError: the tokens are no integers from 0 to 2^32 - 1, or a number is out of range.
        StoreExistsError: a file of that name is there, and `overwrite` is false.
        CorruptShardError: what was read back is not what was written.
    """
    seq_len = check_count(seq_len, name="seq_len", most=MAX_U32)
    if source.dtype.kind not in "iu":
        raise ArgumentError(f"the documents are of {source.dtype.name}; token ids are integers", where="source")
    if how not in {"pack", "pad"}:
        raise ArgumentError(f"how is {how!r}; it must be 'pack' or 'pad'", where="how")
    if (how == "pad") != (pad_token is not None):
        raise ArgumentError("pad_token is for how='pad', and needed there", where="pad_token")
    for name, token in (("end_token", end_token), ("pad_token", pad_token)):
        if token is not None:
            check_count(token, name=name, least=0, most=MAX_U32)

    def records() -> Iterator[Records]:
        if how == "pad":
            return _padded(source, seq_len, end_token, pad_token or 0)
        return _packed(source, seq_len, end_token)

    n_ends = source.n_documents if end_token is not None else 0
    total = source.n_documents if how == "pad" else (source.n_tokens + n_ends) // seq_len
    n_batches = write_batch_dataset(
        output_path, records(), total, batch_size, seq_len, seed,
        overwrite=overwrite, storage_options=storage_options, engine=engine, transport=transport, progress=progress,
    )  # fmt: skip
    if verify:
        with BatchFileReader(output_path, storage_options, engine=engine, transport=transport) as written:
            _compare_records(written, records())
    return n_batches


def batches_to_documents(
    source: BatchFileReader,
    output_path: Url,
    *,
    dtype: npt.DTypeLike = np.int32,
    overwrite: bool = False,
    storage_options: Mapping[str, object] | None = None,
    engine: Engine = "auto",
    transport: Transport | None = None,
    verify: bool = True,
    progress: bool | None = None,
) -> int:
    """Write every record of an LLMBATCH file as a document of an MMIDIDX data set, in file order.

    Args:
        source: The records.
        output_path: As in `IndexedDatasetBuilder`.
        dtype: Type of a token in the new data set.
        overwrite: Replace a data set of that name.
        storage_options: Options of the fsspec file system that is written to.
        engine: As in `open_transport`.
        transport: Write through this transport.
        verify: Read every document back and compare it with the source.
        progress: Show a bar on stderr; default: when it is a terminal.

    Returns:
        The number of documents.

    Raises:
        ArgumentError: `dtype` does not hold a token.
        StoreExistsError: a file of that name is there, and `overwrite` is false.
        CorruptShardError: what was read back is not what was written.
    """
    from saev_store._runtime.progress import Progress

    step = max(1, _PIECE_TOKENS // source.seq_len)
    with (
        IndexedDatasetBuilder(
            output_path, dtype, overwrite=overwrite, storage_options=storage_options, engine=engine, transport=transport
        ) as builder,
        Progress(source.nbytes, "convert", shown=progress) as bar,
    ):
        for records in source.batches(step):
            for record in records:
                builder.add_document(record)
            bar.advance(records.nbytes)
    if verify:
        with IndexedDataset(output_path, storage_options, engine=engine, transport=transport) as written:
            at = 0
            for records in source.batches(step):
                found = written.read_many(slice(at, at + len(records)))
                if len(found) != len(records) or not np.array_equal(np.stack(found), records):
                    raise _differs(written.url, at, len(records))
                at += len(records)
            if at != len(written):
                raise _differs(written.url, at, len(written) - at)
    return len(source)


def _packed(source: IndexedDataset, seq_len: int, end_token: int | None) -> Iterator[Records]:
    """All documents as one run of tokens, cut into records; what is left at the end is dropped."""
    left = np.zeros(0, np.uint32)
    for tokens in _pieces(source, end_token):
        run = np.concatenate((left, tokens)) if len(left) else tokens
        n = len(run) // seq_len
        if n:
            yield run[: n * seq_len].reshape(n, seq_len)
        left = run[n * seq_len :].copy()


def _pieces(source: IndexedDataset, end_token: int | None) -> Iterator[npt.NDArray[np.uint32]]:
    """The tokens of all documents in order, about a million at a time."""
    waiting: list[npt.NDArray[np.uint32]] = []
    n = 0
    ends = None if end_token is None else np.array([end_token], np.uint32)
    for document in _documents(source):
        for part in document:
            waiting.append(as_tokens(part))
            n += len(part)
            if n >= _PIECE_TOKENS:
                yield np.concatenate(waiting)
                waiting, n = [], 0
        if ends is not None:
            waiting.append(ends)
            n += 1
    if waiting:
        yield np.concatenate(waiting)


def _documents(source: IndexedDataset) -> Iterator[Iterator[npt.NDArray[np.generic]]]:
    """Every document as the pieces that its sequences are read in; short documents are read many at a time."""
    ends = np.concatenate(([0], np.cumsum(source.sizes, dtype=np.int64)))[source.doc_idx]
    first = 0
    while first < source.n_documents:
        last = max(first + 1, int(np.searchsorted(ends, ends[first] + _PIECE_TOKENS, side="right")) - 1)
        if last == first + 1:
            yield _long(source, first, int(ends[last] - ends[first]))
        else:
            sequences = source.read_many(slice(int(source.doc_idx[first]), int(source.doc_idx[last])))
            at = 0
            for document in range(first, last):
                n = len(source.sequences_of(document))
                yield iter(sequences[at : at + n])
                at += n
        first = last


def _long(source: IndexedDataset, document: int, n_tokens: int) -> Iterator[npt.NDArray[np.generic]]:
    for start in range(0, n_tokens, _PIECE_TOKENS):
        yield source.document(document, start, min(start + _PIECE_TOKENS, n_tokens))


def _padded(source: IndexedDataset, seq_len: int, end_token: int | None, pad_token: int) -> Iterator[Records]:
    for document in _documents(source):
        record = np.full((1, seq_len), pad_token, np.uint32)
        at = 0
        for part in document:
            tokens = as_tokens(part[: seq_len - at])
            record[0, at : at + len(tokens)] = tokens
            at += len(tokens)
            if at == seq_len:
                break
        if end_token is not None and at < seq_len:
            record[0, at] = end_token
        yield record


def _compare_records(written: BatchFileReader, records: Iterator[Records]) -> None:
    order, number = RecordOrder(written.total_records, written.seed), 0
    for expected in records:
        places = order.places(np.arange(number, number + len(expected), dtype=np.int64))
        kept = np.flatnonzero(places < len(written))
        if not np.array_equal(written.rows(places[kept]), expected[kept]):
            raise _differs(written.url, number, len(expected))
        number += len(expected)
    if number != written.total_records:
        raise DocumentError(f"it says {written.total_records:,} records were given, not {number:,}", where=written.url)


def _differs(where: str, first: int, n: int) -> CorruptShardError:
    return CorruptShardError(
        f"read back, records {first:,} to {first + n:,} are not what was written", where=where, remedy="Write it again."
    )
