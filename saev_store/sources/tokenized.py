"""The texts of an Energon data set as documents of token ids (MMIDIDX), through any tokenizer: streamed and verified."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from saev_store.errors import ArgumentError, CorruptShardError, DocumentError, brief
from saev_store.sources._source import check_count
from saev_store.sources.address import Url
from saev_store.sources.mmididx.reader import IndexedDataset
from saev_store.sources.mmididx.writer import IndexedDatasetBuilder

if TYPE_CHECKING:
    from saev_store.sources.energon import EnergonDataset
    from saev_store.transport import Engine, Transport

#: Turns one text into token ids.
Tokenizer = Callable[[str], Sequence[int] | npt.NDArray[np.integer]]
#: Samples that are held at a time, and sequences that are read back at a time.
_BATCH = 256


def texts_to_documents(
    source: EnergonDataset,
    output_path: Url,
    tokenizer: Tokenizer,
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
    progress: bool | None = None,
) -> int:
    """Write the text part of every sample as one document, in the order of the source.

    Sample i becomes document i, so a store recorded from the documents is traced back to the sample by its number.

    Args:
        source: The samples.
        output_path: As in `IndexedDatasetBuilder`.
        tokenizer: Called once for each text, such as `tokenizers.Tokenizer.from_file(...).encode(text).ids`.
        part: Name of the part that holds the text, or a path as in a field map: `"json[caption],txt"`.
        dtype: Type of a token in the new data set.
        end_token: Put this behind every document.
        encoding: Of the text's bytes, where `part` is a name; texts inside JSON are UTF-8.
        overwrite: Replace a data set of that name.
        storage_options: Options of the fsspec file system that is written to.
        engine: As in `open_transport`.
        transport: Write through this transport.
        verify: Read every document back and compare its digest with that of what the tokenizer gave.
        progress: Show a bar on stderr; default: when it is a terminal.

    Returns:
        The number of documents.

    Raises:
        SelectionError: a sample has no such part.
        DocumentError: a text is not in `encoding`, or there is none at that path.
        ArgumentError: the tokenizer gave something that `dtype` does not hold. Nothing is published in all these cases.
        StoreExistsError: a file of that name is there, and `overwrite` is false.
        CorruptShardError: what was read back is not what was written.
    """
    from saev_store._runtime.progress import Progress

    ends = [] if end_token is None else [check_count(end_token, name="end_token", least=0)]
    written, tokens_dtype = xxhash.xxh3_128(), np.dtype(dtype).newbyteorder("<")
    with (
        IndexedDatasetBuilder(
            output_path, dtype, overwrite=overwrite, storage_options=storage_options, engine=engine, transport=transport
        ) as builder,
        Progress(len(source), "tokenize", shown=progress) as bar,
    ):
        for text in _texts(source, part, encoding):
            tokens = np.concatenate((np.asarray(_ids(tokenizer, text)), np.asarray(ends, np.int64))).astype(np.int64)
            builder.add_document(tokens)
            _digest(written, tokens.astype(tokens_dtype))
            bar.advance(1)
    if verify:
        found = xxhash.xxh3_128()
        with IndexedDataset(output_path, storage_options, engine=engine, transport=transport) as documents:
            for start in range(0, len(documents), _BATCH):
                for tokens in documents.read_many(slice(start, start + _BATCH)):
                    _digest(found, np.asarray(tokens).astype(tokens_dtype))
            if len(documents) != len(source) or found.digest() != written.digest():
                raise CorruptShardError(
                    "read back, the documents are not what was written", where=documents.url, remedy="Write it again."
                )
    return len(source)


def _texts(source: EnergonDataset, part: str, encoding: str) -> Iterator[str]:
    from saev_store.sources.energon.field_map import FieldPath, resolve

    path = FieldPath.parse(part, where="part") if {"[", ","} & set(part) else None
    for batch in source.batches(_BATCH):
        for sample in batch:
            if path is not None:
                where = f"{source.url}/{sample.shard}/{sample.key}"
                text = resolve(path, sample.parts, where=where, images="bytes")
                if not isinstance(text, str):
                    raise DocumentError(f"{part!r} is {brief(text)}, which is no text", where=where)
                yield text
                continue
            raw = sample[part]
            try:
                yield raw.decode(encoding)
            except (UnicodeDecodeError, LookupError) as error:
                raise DocumentError(
                    f"part {part!r} of sample {sample.key!r} is no text in {encoding!r} ({error})",
                    where=f"{source.url}/{sample.shard}",
                    remedy="Name the part that holds text, and its encoding.",
                ) from error


def _ids(tokenizer: Tokenizer, text: str) -> npt.NDArray[np.int64]:
    try:
        ids = np.asarray(tokenizer(text))
    except (ValueError, TypeError) as error:
        raise ArgumentError(
            f"the tokenizer failed on a text of {len(text)} characters: {error}", where="tokenizer"
        ) from error
    if ids.size == 0:
        return np.zeros(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ArgumentError(
            f"the tokenizer gave {ids.dtype} of shape {ids.shape}; it must give a list of integers", where="tokenizer"
        )
    return ids.astype(np.int64)


def _digest(digest: xxhash.xxh3_128, tokens: npt.NDArray[np.generic]) -> None:
    """The length goes in as well, so that tokens cannot move from one document to the next."""
    digest.update(len(tokens).to_bytes(8, "little"))
    digest.update(tokens.tobytes())
