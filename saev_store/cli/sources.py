"""`saev-store convert`, and `info` and `validate` for data sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from saev_store._runtime.optional import need
from saev_store.cli._options import AsJson, Pairs, Progress, StorageOptions, storage_options
from saev_store.cli._output import emit, emit_json
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    NotFoundError,
    SaevStoreError,
    UnsafeContentError,
)

if TYPE_CHECKING:
    from saev_store.sources.sniff import Found
    from saev_store.sources.tokenized import Tokenizer

_FILES = (".batch", ".batch.json", ".idx", ".bin")


def source_at(url: str, options: Mapping[str, object] | None) -> Found | None:
    """The data set at an address, not opened; None for a store and for unknown formats.

    Raises:
        NotFoundError, DocumentError: the name is that of a data set's file, but the file is missing or invalid.
    """
    from saev_store.names import METADATA_NAME
    from saev_store.sources.sniff import find_source, sniff
    from saev_store.transport import open_transport

    if url.endswith(_FILES):
        return find_source(url, options)
    try:
        open_transport(url, options).size(METADATA_NAME)
        return None
    except NotFoundError:
        return sniff(url, options)
    except SaevStoreError:
        return None


def source_info(found: Found, *, as_json: bool) -> None:
    """Describe a data set."""
    from saev_store.sources.sniff import open_found
    from saev_store.validation import problem_to_dict

    with open_found(found, damaged_ok=True) as source:
        if not as_json:
            emit(repr(source))
            return
        problems = [problem_to_dict(problem) for problem in source.problems]
        try:
            described = source.describe()
        except (NotFoundError, CorruptShardError):  # a data set with a missing tar has no digest
            described = {"format": source.format, "url": source.url, "n_samples": len(source)}
        emit_json({**described, "problems": problems})


def source_validate(found: Found, *, deep: bool, as_json: bool, progress: bool | None) -> None:
    """Validate a data set, also one that does not open; exit with 1 if there is an error."""
    from saev_store.problems import Problem
    from saev_store.sources.address import full_url
    from saev_store.sources.sniff import open_found
    from saev_store.validation import Report

    try:
        with open_found(found, damaged_ok=True) as source:
            report = source.validate(deep=deep, progress=progress)
    except (DocumentError, CorruptShardError, UnsafeContentError, NotFoundError) as error:
        problems = tuple(getattr(error, "problems", ())) or (Problem(error.kind, error.message, error.where or ""),)
        report = Report(full_url(found.transport, found.path), 0, 0, problems)
    emit_json(report.to_dict()) if as_json else emit(str(report))
    if not report.ok:
        raise typer.Exit(1)


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
        typer.Option(help="Write one record per document, padded with this token, instead of packing documents."),
    ] = None,
    end_token: Annotated[int | None, typer.Option(help="Token to append to every document.")] = None,
    memory_mib: Annotated[int, typer.Option(help="Memory for shuffling, in MiB.")] = 1024,
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
    dst_options: Annotated[
        str | None,
        typer.Option("--dst-storage-options", metavar="JSON", help="Options of the destination's file system."),
    ] = None,
    dst_option: Annotated[
        list[str] | None,
        typer.Option(
            "--dst-option", metavar="KEY=VALUE", help="One option of the destination's file system; may be repeated."
        ),
    ] = None,
    progress: Progress = None,
) -> None:
    """Convert documents into shuffled batches, or batches or texts into documents; verified by reading back."""
    from saev_store.sources import open_source
    from saev_store.sources.convert import batches_to_documents, documents_to_batches
    from saev_store.sources.energon import EnergonDataset
    from saev_store.sources.llmbatch import BatchFileReader
    from saev_store.sources.mmididx import IndexedDataset
    from saev_store.sources.tokenized import texts_to_documents

    target = storage_options(dst_options, dst_option, name="--dst-storage-options")
    with open_source(src, storage_options(options, option)) as source:
        if isinstance(source, IndexedDataset):
            if seq_len is None or batch_size is None:
                raise ArgumentError("both options are needed to write batches", where="--seq-len, --batch-size")
            n = documents_to_batches(
                source, dst, seq_len=seq_len, batch_size=batch_size, seed=seed, how="pack" if pad_token is None else "pad",
                end_token=end_token, pad_token=pad_token, memory_nbytes=memory_mib << 20, overwrite=overwrite,
                storage_options=target, verify=verify, progress=progress,
            )  # fmt: skip
            done = {"url": dst, "batches": n}
        elif isinstance(source, BatchFileReader):
            n = batches_to_documents(
                source, dst, dtype=dtype, overwrite=overwrite, storage_options=target, verify=verify, progress=progress,
            )  # fmt: skip
            done = {"url": dst, "documents": n}
        elif isinstance(source, EnergonDataset):
            n = texts_to_documents(
                source.split(split), dst, _tokenizer(tokenizer), part=part, dtype=dtype, end_token=end_token,
                overwrite=overwrite, storage_options=target, verify=verify, progress=progress,
            )  # fmt: skip
            done = {"url": dst, "documents": n}
        else:
            raise ArgumentError(f"data sets of format {source.format} cannot be converted", where="SRC")
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
