"""Converts between formats: streamed, in bounded memory, and verified by reading back.

Documents (MMIDIDX) become pre-formed batches (LLMBATCH); samples of token ids, or texts, become documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from saev_store._runtime.cluster import map_shards
from saev_store._runtime.progress import Progress
from saev_store.core.arguments import check_count
from saev_store.errors import ArgumentError, CorruptShardError
from saev_store.sources._records import Records
from saev_store.sources._source import Source, steps
from saev_store.sources._token_ids import TokenIds, Tokenizer
from saev_store.sources.address import Url
from saev_store.sources.llmbatch.header import MAX_U32
from saev_store.sources.llmbatch.reader import BatchFileReader
from saev_store.sources.llmbatch.writer import RecordOrder, write_batch_dataset
from saev_store.sources.mmididx.index import code_of
from saev_store.sources.mmididx.reader import IndexedDataset
from saev_store.sources.mmididx.writer import IndexedDatasetBuilder

if TYPE_CHECKING:
    from distributed import Client

    from saev_store.transport import Engine, Transport

_PIECE_TOKENS = 1 << 20
#: Documents that are made or read back at a time.
_BATCH = 256
#: Parts whose results are on the workers of a cluster at the same time.
_WINDOW = 256
_Range = tuple[int, int]
T = TypeVar("T")


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
        overwrite: Replace a file of that name.
        storage_options: As in `open_source`.
        engine: As in `open_source`.
        transport: As in `open_source`.
        verify: Read every record back and compare it with the source.
        client: A `distributed.Client` or the address of a scheduler, whose workers read the documents; this process writes.
        progress: Show a bar on stderr; default: when it is a terminal.

    Returns:
        The number of batches.

    Raises:
        ArgumentError: the tokens are not integers from 0 to 2^32 - 1, or a number is out of range.
        StoreExistsError: a file of that name exists, and `overwrite` is false.
        CorruptShardError: the file that was read back differs from the source.
        MissingDependencyError: `client` is an address, and distributed is not installed.
        TransportError: no scheduler answers, or the workers that had a part died, one after the other.
    """
    seq_len = check_count(seq_len, name="seq_len", most=MAX_U32)
    if source.dtype.kind not in "iu":
        raise ArgumentError(f"the documents are of {source.dtype.name}; token ids are integers", where="source")
    end_token = None if end_token is None else check_count(end_token, name="end_token", least=0, most=MAX_U32)
    pad_token = None if pad_token is None else check_count(pad_token, name="pad_token", least=0, most=MAX_U32)
    records = Records(source, seq_len, end_token, pad_token)
    ranges = list(steps(len(records), max(1, _PIECE_TOKENS // seq_len)))
    n_batches = write_batch_dataset(
        output_path, _mapped(records.of, ranges, client), len(records), batch_size, seq_len, seed,
        overwrite=overwrite, storage_options=storage_options, engine=engine, transport=transport, progress=progress,
    )  # fmt: skip
    if verify:
        with BatchFileReader(output_path, storage_options, engine=engine, transport=transport) as written:
            order = RecordOrder(written.total_records, written.seed)
            for part in ranges:
                places = order.places(np.arange(*part, dtype=np.int64))
                kept = np.flatnonzero(places < len(written))
                if not np.array_equal(written.rows(places[kept]), records.of(part)[kept]):
                    raise _differs(written.url)
    return n_batches


def samples_to_documents(
    source: Source[object],
    output_path: Url,
    tokenizer: Tokenizer | None = None,
    *,
    part: str = "txt",
    dtype: npt.DTypeLike = np.int32,
    end_token: int | None = None,
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
        part: For texts, which are UTF-8: name of the part, or a path as in a field map: `"json[caption],txt"`.
        dtype: Type of a token in the new data set.
        end_token: Append this token to every document.
        overwrite: As in `IndexedDatasetBuilder`.
        storage_options: As in `IndexedDatasetBuilder`.
        engine: As in `IndexedDatasetBuilder`.
        transport: As in `IndexedDatasetBuilder`.
        verify: Read every document back and compare its digest.
        client: A `distributed.Client` or the address of a scheduler, whose workers read and tokenize; this process writes.
        progress: Show a bar on stderr; default: when it is a terminal.

    Returns:
        The number of documents.

    Raises:
        DocumentError: a text is not UTF-8, or there is none of that name or at that path.
        ArgumentError: a sample is not token ids, or not ones that `dtype` holds. Nothing is published in these cases.
        StoreExistsError: a file of that name exists, and `overwrite` is false.
        CorruptShardError: the data set that was read back differs from the source.
        MissingDependencyError: `client` is an address, and distributed is not installed.
        TransportError: no scheduler answers, or the workers that had a part died, one after the other.
    """
    code_of(dtype)  # refuses other types
    most = int(np.iinfo(dtype).max) if np.dtype(dtype).kind in "iu" else 2**63 - 1
    end_token = None if end_token is None else check_count(end_token, name="end_token", least=0, most=most)
    ids = TokenIds(source, tokenizer, part, end_token)
    expected, found = xxhash.xxh3_128(), xxhash.xxh3_128()
    with (
        IndexedDatasetBuilder(
            output_path, dtype, overwrite=overwrite, storage_options=storage_options, engine=engine, transport=transport
        ) as builder,
        Progress(len(source), "converting", shown=progress, unit="samples") as bar,
    ):
        for documents in _mapped(ids.of, steps(len(source), _BATCH), client):
            for tokens in documents:
                builder.add_document(tokens)
                _add_document(expected, tokens.astype(builder.dtype))
            bar.advance(len(documents))
    if verify:
        with IndexedDataset(output_path, storage_options, engine=engine, transport=transport, dtype=dtype) as written:
            for documents in written.batches(_BATCH):
                for tokens in documents:
                    _add_document(found, tokens)
            if len(written) != len(source) or found.digest() != expected.digest():
                raise _differs(written.url)
    return len(source)


def _mapped(work: Callable[[_Range], T], ranges: Iterable[_Range], client: Client | str | None) -> Iterator[T]:
    """The results of `work` in order: of this thread, or of the workers of a cluster."""
    if client is None:
        yield from map(work, ranges)
        return
    left = iter(ranges)
    while window := list(islice(left, _WINDOW)):
        yield from map_shards(work, window, client)


def _add_document(digest: xxhash.xxh3_128, tokens: npt.NDArray[np.generic]) -> None:
    """Add a document to a digest: its length, so that tokens cannot move to the next document, and its tokens."""
    digest.update(len(tokens).to_bytes(8, "little"))
    digest.update(tokens.tobytes())


def _differs(where: str) -> CorruptShardError:
    return CorruptShardError("read back, the file differs from the source", where=where, remedy="Write it again.")
