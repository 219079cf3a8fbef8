"""`saev-store convert`, and what `info` and `validate` do when the address is a data set instead of a store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, cast

import typer

from saev_store.cli._options import AsJson, Pairs, Progress, StorageOptions, storage_options
from saev_store.cli._output import emit, emit_json
from saev_store.errors import ArgumentError, NotFoundError, SaevStoreError

if TYPE_CHECKING:
    from saev_store.formats import Source

_FILES = (".batch", ".batch.json", ".idx", ".bin")


def source_at(url: str, options: Mapping[str, object] | None) -> Source[object] | None:
    """The data set at an address, or None where a store lies, or nothing that is known."""
    from saev_store.formats import open_source, sniff
    from saev_store.names import METADATA_NAME
    from saev_store.transport import open_transport

    if not url.endswith(_FILES):
        try:
            open_transport(url, options).size(METADATA_NAME)
            return None
        except NotFoundError:
            pass
        except SaevStoreError:
            return None
        if sniff(url, options) is None:
            return None
    return open_source(url, options)


def source_info(source: Source[object], *, as_json: bool) -> None:
    """Show what a data set holds."""
    from saev_store.inspect import problem_to_dict

    if as_json:
        emit_json({**source.describe(), "problems": [problem_to_dict(problem) for problem in source.problems]})
    else:
        emit(repr(source))


def source_validate(source: Source[object], *, deep: bool, as_json: bool, progress: bool | None) -> None:
    """Check a data set; exit with 1 if anything in it is lost or wrong."""
    report = source.validate(deep=deep, progress=progress)
    emit_json(report.to_dict()) if as_json else emit(str(report))
    if not report.ok:
        raise typer.Exit(1)


def convert(
    src: Annotated[str, typer.Argument(metavar="SRC", help="MMIDIDX documents, or LLMBATCH batches.")],
    dst: Annotated[str, typer.Argument(metavar="DST", help="A .batch file for documents, a .idx file for batches.")],
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a record. Needed for batches.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Records of a batch. Needed for batches.")] = None,
    seed: Annotated[int, typer.Option(help="Of the order of records.")] = 0,
    pad_token: Annotated[
        int | None, typer.Option(help="One record for each document, filled up with this, instead of packing them.")
    ] = None,
    end_token: Annotated[int | None, typer.Option(help="Put this behind every document.")] = None,
    max_batches_per_file: Annotated[int | None, typer.Option(help="Write a set of files.")] = None,
    memory_mib: Annotated[int, typer.Option(help="Memory for shuffling.")] = 1024,
    dtype: Annotated[str, typer.Option(help="Type of a token in the documents written.")] = "int32",
    order: Annotated[str, typer.Option(help="Of the documents written: record, file, or auto.")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files of these names.")] = False,
    verify: Annotated[bool, typer.Option(help="Read everything back and compare it.")] = True,
    as_json: AsJson = False,
    options: StorageOptions = None,
    option: Pairs = None,
    dst_options: Annotated[
        str | None, typer.Option("--dst-storage-options", metavar="JSON", help="For the destination's file system.")
    ] = None,
    dst_option: Annotated[
        list[str] | None, typer.Option("--dst-option", metavar="KEY=VALUE", help="One of those; may be repeated.")
    ] = None,
    progress: Progress = None,
) -> None:
    """Turn documents into shuffled batches, or batches into documents; streamed, and read back."""
    from saev_store.formats import open_source
    from saev_store.formats.convert import batches_to_documents, documents_to_batches
    from saev_store.formats.llmbatch import BatchFileReader
    from saev_store.formats.mmididx import IndexedDataset

    target = storage_options(dst_options, dst_option, name="--dst-storage-options")
    with open_source(src, storage_options(options, option)) as source:
        if isinstance(source, IndexedDataset):
            if seq_len is None or batch_size is None:
                raise ArgumentError("batches need both of them", where="--seq-len, --batch-size")
            n = documents_to_batches(
                source, dst, seq_len=seq_len, batch_size=batch_size, seed=seed, how="pack" if pad_token is None else "pad",
                end_token=end_token, pad_token=pad_token, memory_nbytes=memory_mib << 20,
                max_batches_per_file=max_batches_per_file, overwrite=overwrite, storage_options=target, verify=verify,
                progress=progress,
            )  # fmt: skip
            done = {"url": dst, "batches": n}
        elif isinstance(source, BatchFileReader):
            n = batches_to_documents(
                source, dst, dtype=dtype, order=cast("str", order),  # type: ignore[arg-type]
                overwrite=overwrite, storage_options=target, verify=verify, progress=progress,
            )  # fmt: skip
            done = {"url": dst, "documents": n}
        else:
            raise ArgumentError(f"{source.format} has no such conversion", where="SRC")
    emit_json(done) if as_json else emit(f"{dst}: {n:,} {'batches' if 'batches' in done else 'documents'}")
