"""Converts between formats: streamed, in bounded memory, and verified by reading back.

Documents (MMIDIDX) become pre-formed batches (LLMBATCH); samples of token ids, or texts, become documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from saev_store._runtime.progress import Progress
from saev_store.core.arguments import check_count, check_flag
from saev_store.errors import ArgumentError, CorruptShardError
from saev_store.sources._convert_cluster import documents_on_cluster, samples_on_cluster
from saev_store.sources._own_files import refuse_own_files
from saev_store.sources._records import RecordsOf
from saev_store.sources._source import Source, steps
from saev_store.sources._token_ids import TokenIds, Tokenizer, add_document
from saev_store.sources.address import Url
from saev_store.sources.llmbatch.header import MAX_U32
from saev_store.sources.llmbatch.reader import BatchFileReader
from saev_store.sources.llmbatch.writer import RecordOrder, as_tokens, write_batch_dataset
from saev_store.sources.mmididx.index import code_of
from saev_store.sources.mmididx.reader import IndexedDataset
from saev_store.sources.mmididx.writer import IndexedDatasetBuilder

if TYPE_CHECKING:
    from distributed import Client

    from saev_store.transport import Engine, Transport

_PIECE_TOKENS = 1 << 20
#: Documents that are read back at a time.
_BATCH = 256
_Records = npt.NDArray[np.uint32]
_Tokens = npt.NDArray[np.generic]


def documents_to_batches(
    source: IndexedDataset,
    output_path: Url,
    *,
    seq_len: int,
    batch_size: int,
    seed: int = 0,
    end_token: int | None = None,
    pad_token: int | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, object] | None = None,
    engine: Engine = "auto",
    transport: Transport | None = None,
    verify: bool = True,
    client: Client | str | None = None,
    progress: bool | None = None,
) -> int:
    """Cut the documents of an MMIDIDX data set into records, shuffle those into batches and write them.

    By default documents are joined, and tokens at the end that fill no record are dropped. With `pad_token`, each document
    is one record.

    Args:
        source: The documents, in order; the sequences of each are joined.
        output_path: As in `write_batch_file`.
        seq_len: Tokens of a record.
        batch_size: Records in a batch.
        seed: Seed of the order of records.
        end_token: Append this token to every document; to a record that is filled by its document, nothing is appended.
        pad_token: Make one record of each document: its first `seq_len` tokens, or filled up with this token.
        overwrite: Replace a file of that name, if it is none of the source's.
        storage_options: As in `open_source`.
        engine: As in `open_source`.
        transport: As in `open_source`.
        verify: Read every record back and compare it with the source.
        client: A `distributed.Client` or the address of a scheduler: its workers make the batches and read them back, at
            addresses that mean the same to all. Called again, it continues where a call was interrupted.
        progress: Show a bar on stderr; default: when it is a terminal.

    Returns:
        The number of batches.

    Raises:
        ArgumentError: the tokens are no integers from 0 to 2^32 - 1, a number is out of range, or a file of the source
            would be replaced.
        StoreExistsError: a file of that name exists, and `overwrite` is false.
        CorruptShardError: the file that was read back differs from the source.
        IncompleteStoreError: a cluster has begun another conversion to this file.
        MissingDependencyError: `client` is an address, and distributed is not installed.
        TransportError: no scheduler answers, or the workers that had a part died, one after the other.
    """
    seq_len = check_count(seq_len, name="seq_len", most=MAX_U32)
    if check_flag(overwrite, name="overwrite"):
        refuse_own_files(source, output_path, storage_options, engine=engine, transport=transport, is_mmididx=False)
    if source.dtype.kind not in "iu":
        raise ArgumentError(f"the documents are of {source.dtype.name}; token ids are integers", where="source")
    end_token = None if end_token is None else check_count(end_token, name="end_token", least=0, most=MAX_U32)
    pad_token = None if pad_token is None else check_count(pad_token, name="pad_token", least=0, most=MAX_U32)
    if client is not None:
        return documents_on_cluster(
            client, RecordsOf(source, seq_len, end_token, pad_token), output_path, batch_size, seed, overwrite=overwrite,
            storage_options=storage_options, engine=engine, transport=transport, verify=verify, progress=progress,
        )  # fmt: skip
    ends: list[_Records] = [] if end_token is None else [np.array([end_token], np.uint32)]
    if pad_token is None:
        total = n_joined_records(source, seq_len, with_end=bool(ends))
        records = partial(_joined, source, seq_len, ends)
    else:
        total = source.n_documents
        records = partial(_padded, source, seq_len, ends, pad_token)
    n_batches = write_batch_dataset(
        output_path, records(), total, batch_size, seq_len, seed,
        overwrite=overwrite, storage_options=storage_options, engine=engine, transport=transport, progress=progress,
    )  # fmt: skip
    if verify:
        with BatchFileReader(output_path, storage_options, engine=engine, transport=transport) as written:
            order, first = RecordOrder(written.total_records, written.seed), 0
            for expected in records():
                places = order.places(np.arange(first, first + len(expected), dtype=np.int64))
                kept = np.flatnonzero(places < len(written))
                if not np.array_equal(written.rows(places[kept]), expected[kept]):
                    raise _differs(written.url)
                first += len(expected)
    return n_batches


def n_joined_records(source: IndexedDataset, seq_len: int, *, with_end: bool) -> int:
    """How many records joined documents fill, with a token after each document or without."""
    return (source.n_tokens + with_end * source.n_documents) // seq_len


def _joined(source: IndexedDataset, seq_len: int, ends: Sequence[_Records]) -> Iterator[_Records]:
    """All documents as one run of tokens, cut into records, about a million tokens at a time."""
    waiting: list[_Records] = []
    n = 0
    for document in _documents(source):
        for tokens in chain(map(as_tokens, document), ends):
            waiting.append(tokens)
            n += len(tokens)
            if n >= max(_PIECE_TOKENS, seq_len):
                run = np.concatenate(waiting)
                cut = n // seq_len * seq_len
                yield run[:cut].reshape(-1, seq_len)
                waiting, n = [run[cut:].copy()], n - cut
    if n >= seq_len:
        yield np.concatenate(waiting)[: n // seq_len * seq_len].reshape(-1, seq_len)


def _padded(source: IndexedDataset, seq_len: int, ends: Sequence[_Records], pad_token: int) -> Iterator[_Records]:
    """One record for each document, cut or filled up."""
    for document in _documents(source):
        record = np.full((1, seq_len), pad_token, np.uint32)
        n = 0
        for tokens in chain(map(as_tokens, document), ends):
            end = min(n + len(tokens), seq_len)
            record[0, n:end] = tokens[: end - n]
            n = end
            if n == seq_len:  # the rest of a long document is not read
                break
        yield record


def _documents(source: IndexedDataset) -> Iterator[Iterable[_Tokens]]:
    """The pieces of each document; the sequences of short documents are read many at a time."""
    ends = np.concatenate(([0], np.cumsum(source.sizes, dtype=np.int64)))[source.doc_idx]
    first = 0
    while first < source.n_documents:
        last = max(first + 1, int(np.searchsorted(ends, ends[first] + _PIECE_TOKENS, side="right")) - 1)
        if last == first + 1:
            cuts = steps(int(ends[last] - ends[first]), _PIECE_TOKENS)
            yield (source.document(first, start, stop) for start, stop in cuts)
        else:
            numbers = source.doc_idx[first : last + 1].tolist()
            sequences = source.rows(slice(numbers[0], numbers[-1]))
            for start, stop in pairwise(numbers):
                yield sequences[start - numbers[0] : stop - numbers[0]]
        first = last


def samples_to_documents(
    source: Source[object],
    output_path: Url,
    tokenizer: Tokenizer | None = None,
    *,
    part: str = "txt",
    dtype: npt.DTypeLike = np.int32,
    end_token: int | None = None,
    encoding: str = "utf-8",
    overwrite: bool = False,
    storage_options: Mapping[str, object] | None = None,
    engine: Engine = "auto",
    transport: Transport | None = None,
    verify: bool = True,
    client: Client | str | None = None,
    progress: bool | None = None,
) -> int:
    """Write every sample of a source as a document of an MMIDIDX data set, in the order of the source.

    Sample i becomes document i, so a store recorded from the documents is traced back to the sample by its number.

    Args:
        source: Samples that are token ids, such as the records of an LLMBATCH file, or an `EnergonDataset` with texts.
        output_path: As in `IndexedDatasetBuilder`.
        tokenizer: For texts; called once for each, such as `tokenizers.Tokenizer.from_file(...).encode(text).ids`.
        part: For texts: name of the part, or a path as in a field map: `"json[caption],txt"`.
        dtype: Type of a token in the new data set.
        end_token: Append this token to every document.
        encoding: Encoding of the texts, where `part` is a name; parts in a path are UTF-8.
        overwrite: As in `IndexedDatasetBuilder`; files of the source are not replaced.
        storage_options: As in `IndexedDatasetBuilder`.
        engine: As in `IndexedDatasetBuilder`.
        transport: As in `IndexedDatasetBuilder`.
        verify: Read every document back and compare its digest.
        client: A `distributed.Client` or the address of a scheduler: its workers make the documents and read them back, at
            addresses that mean the same to all. Called again, it continues where a call was interrupted.
        progress: Show a bar on stderr; default: when it is a terminal.

    Returns:
        The number of documents.

    Raises:
        SelectionError: a sample has no such part.
        DocumentError: a text is not in `encoding`, or there is none at that path.
        ArgumentError: a sample is not token ids, or not ones that `dtype` holds, or a file of the source would be replaced.
            Nothing is published in these cases.
        StoreExistsError: a file of that name exists, and `overwrite` is false.
        CorruptShardError: the data set that was read back differs from the source.
        IncompleteStoreError: a cluster has begun another conversion to this file.
        MissingDependencyError: `client` is an address, and distributed is not installed.
        TransportError: no scheduler answers, or the workers that had a part died, one after the other.
    """
    code_of(dtype)  # refuses other types
    most = int(np.iinfo(dtype).max) if np.dtype(dtype).kind in "iu" else 2**63 - 1
    end_token = None if end_token is None else check_count(end_token, name="end_token", least=0, most=most)
    if check_flag(overwrite, name="overwrite"):
        refuse_own_files(source, output_path, storage_options, engine=engine, transport=transport, is_mmididx=True)
    ids = TokenIds(source, tokenizer, part, encoding, end_token)
    if client is not None:
        samples_on_cluster(
            client, ids, output_path, dtype, overwrite=overwrite, storage_options=storage_options, engine=engine,
            transport=transport, verify=verify, progress=progress,
        )  # fmt: skip
        return len(source)
    expected, found = xxhash.xxh3_128(), xxhash.xxh3_128()
    with (
        IndexedDatasetBuilder(
            output_path, dtype, overwrite=overwrite, storage_options=storage_options, engine=engine, transport=transport
        ) as builder,
        Progress(len(source), "converting", shown=progress, unit="samples") as bar,
    ):
        for tokens in ids.of(0, len(source)):
            builder.add_document(tokens)
            add_document(expected, tokens.astype(builder.dtype))
            bar.advance(1)
    if verify:
        with IndexedDataset(output_path, storage_options, engine=engine, transport=transport, dtype=dtype) as written:
            for first, end in steps(len(written), _BATCH):
                for tokens in written.rows(slice(first, end)):
                    add_document(found, tokens)
            if len(written) != len(source) or found.digest() != expected.digest():
                raise _differs(written.url)
    return len(source)


def _differs(where: str) -> CorruptShardError:
    return CorruptShardError("read back, the file differs from the source", where=where, remedy="Write it again.")
