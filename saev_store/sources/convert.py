"""Converts between formats, streamed, in bounded memory; the same call writes the same bytes.

Documents (MMIDIDX) become pre-formed batches (LLMBATCH); samples of token ids, or texts, become documents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from saev_store._runtime.progress import Progress
from saev_store.core.arguments import check_count
from saev_store.core.layout import IntArray
from saev_store.errors import ArgumentError, DocumentError, brief
from saev_store.sources._source import Source, steps
from saev_store.sources.address import Url
from saev_store.sources.energon import RawSample
from saev_store.sources.llmbatch.header import MAX_U32
from saev_store.sources.llmbatch.writer import as_tokens, write_batch_dataset
from saev_store.sources.mmididx.reader import IndexedDataset
from saev_store.sources.mmididx.writer import IndexedDatasetBuilder, token_array
from saev_store.sources.texts import text_of

_PIECE_TOKENS = 1 << 20
_BATCH = 256
#: Turns one text into token ids.
Tokenizer = Callable[[str], Sequence[int] | npt.NDArray[np.integer]]


def documents_to_batches(
    source: IndexedDataset,
    output_path: Url,
    *,
    seq_len: int,
    batch_size: int,
    seed: int = 0,
    end_token: int | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, object] | None = None,
) -> int:
    """Join the documents of an MMIDIDX data set, cut them into records, shuffle those into batches, and return the number of these.

    Args:
        source: The documents, in order. Tokens at the end that fill no record are dropped.
        output_path: As in `write_batch_file`.
        overwrite: Replace a file of that name.
        storage_options: As in `open_source`.
        seq_len: Tokens of a record.
        batch_size: Records in a batch.
        seed: Seed of the order of records.
        end_token: Append this token to every document.

    Raises:
        ArgumentError: the tokens are not integers from 0 to 2^32 - 1, or a number is out of range.
        StoreExistsError: a file of that name exists, and `overwrite` is false.
    """
    seq_len = check_count(seq_len, name="seq_len", most=MAX_U32)
    if source.dtype.kind not in "iu":
        raise ArgumentError(f"the documents are of {source.dtype.name}; token ids are integers", where="source")
    ends = source.cuts[source.doc_idx[1:]]
    n_tokens = source.n_tokens
    if end_token is not None:
        end_token = check_count(end_token, name="end_token", least=0, most=MAX_U32)
        n_tokens += len(ends)
    n_records = n_tokens // seq_len
    pieces = (
        _joined(source, ends, end_token, low * seq_len, high * seq_len).reshape(-1, seq_len)
        for low, high in steps(n_records, max(1, _PIECE_TOKENS // seq_len))
    )
    return write_batch_dataset(
        output_path, pieces, n_records, batch_size, seq_len, seed,
        overwrite=overwrite, storage_options=storage_options,
    )  # fmt: skip


def _joined(
    source: IndexedDataset, ends: IntArray, end_token: int | None, first: int, last: int
) -> npt.NDArray[np.uint32]:
    """Tokens `first` to `last - 1` of all documents end to end, each with its end token."""
    if end_token is None:
        return as_tokens(source.read_tokens(first, last))
    n_before, n_until = np.searchsorted(ends + np.arange(len(ends)), [first, last]).tolist()
    tokens = as_tokens(source.read_tokens(first - n_before, last - n_until))
    return np.insert(tokens, ends[n_before:n_until] - (first - n_before), end_token)


def samples_to_documents(
    source: Source[object],
    output_path: Url,
    tokenizer: Tokenizer | None = None,
    *,
    part: str = "txt",
    dtype: npt.DTypeLike = "int32",
    end_token: int | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, object] | None = None,
    progress: bool | None = None,
) -> int:
    """Write samples of token ids, or texts, as the documents of an MMIDIDX data set, in order, and return their number.

    Args:
        source: The samples, such as the records of an LLMBATCH file, or an `EnergonDataset` with texts.
        output_path: As in `IndexedDatasetBuilder`.
        overwrite: As there.
        storage_options: As there.
        tokenizer: For texts; called once for each, such as `tokenizers.Tokenizer.from_file(...).encode(text).ids`.
        part: For texts: name of the part, or a path as in a field map: `"json[caption],txt"`.
        dtype: Type of a token in the new data set.
        end_token: Append this token to every document.
        progress: Show a bar on stderr; default: when it is a terminal.

    Raises:
        DocumentError: a text is not UTF-8, or there is none of that name or at that path.
        ArgumentError: a sample is not token ids, or not ones that `dtype` holds. Nothing is published in these cases.
        StoreExistsError: a file of that name exists, and `overwrite` is false.
    """
    end_token = None if end_token is None else check_count(end_token, name="end_token", least=0, most=MAX_U32)
    with (
        IndexedDatasetBuilder(output_path, dtype, overwrite=overwrite, storage_options=storage_options) as builder,
        Progress(len(source), "converting", shown=progress, unit="samples") as bar,
    ):
        end = [] if end_token is None else [token_array([end_token], builder.dtype)]
        for sample in (sample for batch in source.batches(_BATCH) for sample in batch):
            tokens = sample if tokenizer is None else tokenizer(_text(source, sample, part))
            builder.add_document(np.concatenate([token_array(tokens, builder.dtype), *end]))
            bar.advance(1)
    return len(source)


def _text(source: Source[object], sample: object, part: str) -> str:
    """The text of a sample."""
    where = f"{source.url}/{sample.shard}/{sample.key}" if isinstance(sample, RawSample) else source.url
    text = text_of(source, sample, part, where=where)
    if not isinstance(text, str):
        raise DocumentError(f"{part!r} must be a text, got {brief(text)}", where=where)
    return text
