"""Conversions by the workers of a cluster: each writes parts of the file beside it, and this process joins them.

The parts follow from the source and the options alone, so that another cluster can go on where one has stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from saev_store._runtime.optional import need
from saev_store._runtime.progress import Progress
from saev_store.errors import ArgumentError
from saev_store.sources import _converted_parts as parts
from saev_store.sources._converted_parts import Place, Receipt, part_ranges, place_of
from saev_store.sources._files import chunks
from saev_store.sources._new_file import NewFile, refuse_existing
from saev_store.sources._records import RecordsOf
from saev_store.sources._source import steps
from saev_store.sources._token_ids import TokenIds, add_document
from saev_store.sources.address import Url, full_url, locate
from saev_store.sources.llmbatch.header import Header
from saev_store.sources.llmbatch.writer import RecordOrder, checked_header, slots_of
from saev_store.sources.mmididx.reader import IndexedDataset, file_names
from saev_store.sources.mmididx.writer import IndexedDatasetBuilder
from saev_store.transport import Transport

if TYPE_CHECKING:
    from distributed import Client

    from saev_store.transport import Engine

#: Samples of a part, of which the last ones have up to one less.
_PART_SAMPLES = 4096
#: Bytes of a part of a file of batches, at least one batch.
_PART_BYTES = 64 << 20
#: Documents, and bytes of batches, in memory at a time.
_BATCH = 256
_PIECE_BYTES = 8 << 20


def samples_on_cluster(
    client: Client | str,
    ids: TokenIds,
    output_path: Url,
    dtype: npt.DTypeLike,
    *,
    overwrite: bool,
    storage_options: Mapping[str, object] | None,
    engine: Engine,
    transport: Transport | None,
    verify: bool,
    progress: bool | None,
) -> None:
    """What `samples_to_documents` does, by the workers of a cluster.

    Raises:
        SaevStoreError: see `samples_to_documents`, from any of the workers. Finished parts stay.
    """
    there, path = locate(output_path, storage_options, engine=engine, transport=transport)
    # Refuses at once what it would refuse when the parts are there.
    IndexedDatasetBuilder(path, dtype, overwrite=overwrite, transport=there).abort()
    kind = np.dtype(dtype).newbyteorder("<")
    place, n = place_of(there, file_names(path)[1]), len(ids.source)
    ranges = part_ranges(n, -(-n // _PART_SAMPLES))
    conversion = {
        "source": ids.source.describe(),
        "tokenizer": None if ids.tokenizer is None else _pickled_digest(ids.tokenizer),
        "part": ids.part,
        "encoding": ids.encoding,
        "end_token": ids.end_token,
        "dtype": kind.name,
        "parts": ranges,
    }
    with parts.begun(place, conversion):
        with Progress(n, "converting", shown=progress, unit="samples") as bar:
            receipts = parts.written_parts(client, place, partial(_write_documents, ids, kind.name), ranges, bar)
        with IndexedDatasetBuilder(path, dtype, overwrite=overwrite, transport=there) as builder:
            for receipt in receipts:
                with IndexedDataset(place.part_path(receipt), transport=there, dtype=dtype) as part:
                    builder.merge(part, progress=False)
        if verify:
            with Progress(n, "verifying", shown=progress, unit="samples") as bar:
                read = partial(_digest_of_documents, there, path, kind.name)
                where = full_url(there, file_names(path)[0])
                parts.check_read_back(client, read, ranges, receipts, where=where, bar=bar, place=place)


def documents_on_cluster(
    client: Client | str,
    records: RecordsOf,
    output_path: Url,
    batch_size: int,
    seed: int,
    *,
    overwrite: bool,
    storage_options: Mapping[str, object] | None,
    engine: Engine,
    transport: Transport | None,
    verify: bool,
    progress: bool | None,
) -> int:
    """What `documents_to_batches` does, by the workers of a cluster, which read the records of their batches from the documents.

    Raises:
        SaevStoreError: see `documents_to_batches`, from any of the workers. Finished parts stay.
    """
    there, path = locate(output_path, storage_options, engine=engine, transport=transport)
    header = checked_header(path, len(records), batch_size, records.seq_len, seed)
    if not overwrite:
        refuse_existing(there, path)
    place, slot = place_of(there, path), header.padded_batch_nbytes
    ranges = part_ranges(header.num_batches, -(-header.num_batches // max(1, _PART_BYTES // slot)))
    conversion = {
        "source": records.source.describe(),
        "end_token": records.end_token,
        "pad_token": records.pad_token,
        "header": header.to_bytes().hex(),
        "parts": ranges,
    }
    with parts.begun(place, conversion):
        with Progress(header.num_batches, "converting", shown=progress, unit="batches") as bar:
            receipts = parts.written_parts(client, place, partial(_write_batches, records, header), ranges, bar)
        with NewFile(there, path, overwrite=overwrite) as file:
            file.write(header.to_bytes())
            for receipt in receipts:
                for chunk in chunks(there, place.part_path(receipt), receipt.nbytes):
                    file.write(chunk)
            file.commit()
        if verify:
            with Progress(header.num_batches, "verifying", shown=progress, unit="batches") as bar:
                read = partial(_digest_of_batches, there, path, header)
                where = full_url(there, path)
                parts.check_read_back(client, read, ranges, receipts, where=where, bar=bar, place=place)
    return header.num_batches


# -- what tasks do --------------------------------------------------------------------------------------------------------


def _write_documents(ids: TokenIds, dtype: str, place: Place, task: tuple[int, tuple[int, int]]) -> Receipt:
    """Write the documents of a part as a data set of their own; its receipt."""
    part_idx, (first, end) = task
    name, digest = place.new_name(part_idx), xxhash.xxh3_128()
    with IndexedDatasetBuilder(f"{place.folder}/{name}", dtype, transport=place.transport) as builder:
        for tokens in ids.of(first, end):
            builder.add_document(tokens)
            add_document(digest, tokens.astype(builder.dtype))
    receipt = Receipt(name, 0, digest.hexdigest())
    place.put_receipt(part_idx, receipt)
    return receipt


def _write_batches(records: RecordsOf, header: Header, place: Place, task: tuple[int, tuple[int, int]]) -> Receipt:
    """Write the batches of a part, as they are in the file; its receipt."""
    part_idx, (first, end) = task
    name, digest, nbytes = place.new_name(part_idx), xxhash.xxh3_128(), 0
    order = RecordOrder(header.total_records, header.seed)
    with NewFile(place.transport, f"{place.folder}/{name}") as file:
        for low, high in steps(end, max(1, _PIECE_BYTES // header.padded_batch_nbytes), start=first):
            slots = slots_of(header, low, high, lambda places: records.at(order.records(places)))
            file.write(slots.data)
            digest.update(slots.data)
            nbytes += slots.nbytes
        file.commit()
    receipt = Receipt(name, nbytes, digest.hexdigest())
    place.put_receipt(part_idx, receipt)
    return receipt


def _digest_of_documents(transport: Transport, path: str, dtype: str, documents: tuple[int, int]) -> str:
    """The digest of a range of documents, read back."""
    digest = xxhash.xxh3_128()
    with IndexedDataset(path, transport=transport, dtype=dtype) as written:
        for first, end in steps(documents[1], _BATCH, start=documents[0]):
            for tokens in written.rows(slice(first, end)):
                add_document(digest, tokens)
    return digest.hexdigest()


def _digest_of_batches(transport: Transport, path: str, header: Header, batches: tuple[int, int]) -> str:
    """The digest of the bytes of a range of batches, read back."""
    digest, slot, base = xxhash.xxh3_128(), header.padded_batch_nbytes, len(header.to_bytes())
    first, end = (base + batch * slot for batch in batches)
    for chunk in chunks(transport, path, end, start=first):
        digest.update(chunk)
    return digest.hexdigest()


def _pickled_digest(tokenizer: object) -> str:
    """What tells a tokenizer from others: the digest of what is sent to the workers."""
    need("cloudpickle", install="distributed", where="client")
    import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(tokenizer)  # pyright: ignore[reportUnknownMemberType]  # partial types
    except Exception as error:  # whatever an object's own methods raise
        raise ArgumentError(f"the tokenizer cannot be sent to workers: {error}", where="tokenizer") from error
    return xxhash.xxh3_128_hexdigest(pickled)
