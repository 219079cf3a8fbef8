"""`saev-store convert`: converts between the formats of data sets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from saev_store._runtime.optional import need
from saev_store.cli._options import AsJson, DstOptions, DstPairs, Pairs, Progress, StorageOptions, storage_options
from saev_store.cli._output import emit, emit_json
from saev_store.errors import ArgumentError

if TYPE_CHECKING:
    from saev_store.sources.convert import Tokenizer


def convert(
    src: Annotated[
        str, typer.Argument(metavar="SRC", help="MMIDIDX documents, LLMBATCH batches, or an Energon data set's texts.")
    ],
    dst: Annotated[
        str, typer.Argument(metavar="DST", help="A .batch file for documents, a .idx file for batches and texts.")
    ],
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a record. Needed for batches.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Records of a batch. Needed for batches.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the order of records.")] = 0,
    pad_token: Annotated[
        int | None,
        typer.Option(help="Write one record per document, padded with this token, instead of joining documents."),
    ] = None,
    end_token: Annotated[int | None, typer.Option(help="Token to append to every document.")] = None,
    dtype: Annotated[str, typer.Option(help="Type of tokens in the written documents.")] = "int32",
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="For texts: a tokenizer.json, or 'bytes' for UTF-8 bytes."),
    ] = None,
    part: Annotated[str, typer.Option(help="Part of a sample that holds its text: txt, or json[caption].")] = "txt",
    split: Annotated[str, typer.Option(help="Convert the samples of this split.")] = "all",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
    verify: Annotated[bool, typer.Option(help="Read the result back and compare it.")] = True,
    as_json: AsJson = False,
    options: StorageOptions = None,
    option: Pairs = None,
    dst_options: DstOptions = None,
    dst_option: DstPairs = None,
    progress: Progress = None,
) -> None:
    """Convert documents into shuffled batches, or batches or texts into documents; verified by reading back."""
    from saev_store.sources import open_source
    from saev_store.sources.convert import documents_to_batches, samples_to_documents
    from saev_store.sources.energon import EnergonDataset
    from saev_store.sources.mmididx import IndexedDataset

    target = storage_options(dst_options, dst_option, name="--dst-storage-options")
    with open_source(src, storage_options(options, option)) as source:
        if isinstance(source, IndexedDataset):
            if seq_len is None or batch_size is None:
                raise ArgumentError("both options are needed to write batches", where="--seq-len, --batch-size")
            n = documents_to_batches(
                source, dst, seq_len=seq_len, batch_size=batch_size, seed=seed, end_token=end_token, pad_token=pad_token,
                overwrite=overwrite, storage_options=target, verify=verify, progress=progress,
            )  # fmt: skip
            done = {"url": dst, "batches": n}
        else:
            is_text = isinstance(source, EnergonDataset)
            n = samples_to_documents(
                source.split(split), dst, _tokenizer(tokenizer) if is_text else None, part=part, dtype=dtype,
                end_token=end_token, overwrite=overwrite, storage_options=target, verify=verify, progress=progress,
            )  # fmt: skip
            done = {"url": dst, "documents": n}
    emit_json(done) if as_json else emit(f"{dst}: {n:,} {'batches' if 'batches' in done else 'documents'}")


def _tokenizer(name: str | None) -> Tokenizer:
    """A function from text to token ids: from a file of the tokenizers library, or UTF-8 bytes."""
    if name is None:
        raise ArgumentError(
            "converting texts needs a tokenizer", where="--tokenizer", remedy="Name a tokenizer.json, or 'bytes'."
        )
    if name == "bytes":
        return lambda text: list(text.encode())
    need("tokenizers", install="saev-store[energon]", where=name)
    from tokenizers import Tokenizer as Loaded

    try:
        loaded = Loaded.from_file(name)
    except Exception as error:  # the library raises nothing narrower
        raise ArgumentError(f"not a tokenizer ({error})", where=name) from None
    return lambda text: loaded.encode(text).ids
