"""The command `convert`: token files of one format from samples of another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from saev_store._runtime.optional import need
from saev_store.cli._common import (
    AsJson,
    DstOptions,
    DstPairs,
    Pairs,
    Progress,
    Scheduler,
    StorageOptions,
    check_destination,
    emit,
    emit_json,
    storage_options,
)
from saev_store.cli._ends import say_done
from saev_store.errors import ArgumentError

if TYPE_CHECKING:
    from saev_store.sources.convert import Tokenizer
    from saev_store.sources.mmididx import IndexedDataset


def convert(
    src: Annotated[
        str, typer.Argument(metavar="SRC", help="MMIDIDX documents, LLMBATCH batches, or an Energon data set's texts.")
    ],
    dst: Annotated[
        str, typer.Argument(metavar="DST", help="A .batch file for documents, a .idx file for batches and texts.")
    ],
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens of a record, such as 2048. Needed to write batches.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Records of a batch, such as 8. Needed to write batches.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Integer that decides the order of records in batches.")] = 0,
    pad_token: Annotated[
        int | None,
        typer.Option(help="Write one record per document, padded with this token id, instead of joining documents."),
    ] = None,
    end_token: Annotated[int | None, typer.Option(help="Token id to append to every document [default: none].")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of the tokens in written documents, such as uint16 [default: int32].")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="FILE", help="For texts: a tokenizer.json, or 'bytes' for UTF-8 bytes.")
    ] = None,
    part: Annotated[str, typer.Option(help="Part of a sample that holds its text: txt, or json[caption].")] = "txt",
    split: Annotated[
        str, typer.Option(help="Convert the samples of this split, such as train; all converts every one.")
    ] = "all",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that exist at DST.")] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify/--no-verify", help="Read the result back and compare it with the source, or do not."),
    ] = True,
    scheduler: Scheduler = None,
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
    check_destination(dst, target, where="DST", options_name="--dst-storage-options", is_file=True)
    with open_source(src, storage_options(options, option)) as source:
        if isinstance(source, IndexedDataset):
            if seq_len is None or batch_size is None:
                raise ArgumentError("both options are needed to write batches", where="--seq-len, --batch-size")
            _refuse_unused(
                "documents become batches",
                {"--dtype": dtype, "--tokenizer": tokenizer, "--part": part != "txt", "--split": split != "all"},
            )
            _check_fills_a_batch(
                source, seq_len, batch_size, with_end=end_token is not None, is_padded=pad_token is not None
            )
            n = documents_to_batches(
                source, dst, seq_len=seq_len, batch_size=batch_size, seed=seed, end_token=end_token, pad_token=pad_token,
                overwrite=overwrite, storage_options=target, verify=verify, client=scheduler,
                progress=progress,
            )  # fmt: skip
            done, titles = {"url": dst, "batches": n}, "writing converting"
        else:
            if any(option is not None for option in (seq_len, batch_size, pad_token)):
                where = "--seq-len, --batch-size, --pad-token"
                raise ArgumentError("only documents become batches; these options are of no use here", where=where)
            is_text = isinstance(source, EnergonDataset)
            if not is_text:
                _refuse_unused("the source has tokens, not texts", {"--tokenizer": tokenizer, "--part": part != "txt"})
            n = samples_to_documents(
                source.split(split), dst, _tokenizer(tokenizer) if is_text else None, part=part, dtype=dtype or "int32",
                end_token=end_token, overwrite=overwrite, storage_options=target, verify=verify, client=scheduler,
                progress=progress,
            )  # fmt: skip
            done, titles = {"url": dst, "documents": n}, "converting"
    nothing = "all of it was there" if n else "the source has no samples"
    say_done("converted", titles, at=dst, as_json=as_json, nothing=nothing)
    emit_json(done) if as_json else emit(f"{dst}: {n:,} {'batches' if 'batches' in done else 'documents'}")


def _refuse_unused(why: str, given: Mapping[str, object]) -> None:
    """Refuse options that say nothing about this conversion."""
    if unused := [name for name, value in given.items() if value]:
        raise ArgumentError(f"{why}; there is no use for this here", where=", ".join(unused), remedy="Leave it out.")


def _check_fills_a_batch(
    source: IndexedDataset, seq_len: int, batch_size: int, *, with_end: bool, is_padded: bool
) -> None:
    """Refuse documents of which nothing would be left in the file."""
    from saev_store.sources.convert import n_joined_records

    n = source.n_documents if is_padded else n_joined_records(source, max(seq_len, 1), with_end=with_end)
    if n < batch_size:
        raise ArgumentError(
            f"the documents make {n:,} records of {seq_len:,} tokens, which fill no batch of {batch_size:,}",
            where="--seq-len, --batch-size",
            remedy="Choose a smaller batch, or shorter records.",
        )


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
