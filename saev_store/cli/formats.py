"""The commands of other formats: `convert` and `prepare`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from saev_store.cli._common import (
    AsJson,
    DstOptions,
    Options,
    Progress,
    emit,
    emit_json,
    load_tokenizer,
    storage_options,
)
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
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens of a record, such as 2048. Needed to write batches.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Records of a batch, such as 8. Needed to write batches.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Integer that decides the order of records in batches.")] = 0,
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
    as_json: AsJson = False,
    option: Options = None,
    dst_option: DstOptions = None,
    progress: Progress = None,
) -> None:
    """Convert documents into shuffled batches, or batches or texts into documents."""
    from saev_store.sources import open_source
    from saev_store.sources.convert import documents_to_batches, samples_to_documents
    from saev_store.sources.energon import EnergonDataset
    from saev_store.sources.mmididx import IndexedDataset

    given = {
        "--seq-len": seq_len, "--batch-size": batch_size,
        "--dtype": dtype, "--tokenizer": tokenizer, "--part": part if part != "txt" else None,
        "--split": split if split != "all" else None,
    }  # fmt: skip
    target = storage_options(dst_option, where="--dst-option")
    with open_source(src, storage_options(option)) as source:
        if isinstance(source, IndexedDataset):
            if seq_len is None or batch_size is None:
                raise ArgumentError("both options are needed to write batches", where="--seq-len, --batch-size")
            _refuse_unused(given, "--dtype", "--tokenizer", "--part", "--split")
            n = documents_to_batches(
                source, dst, seq_len=seq_len, batch_size=batch_size, seed=seed, end_token=end_token,
                overwrite=overwrite, storage_options=target,
            )  # fmt: skip
            unit = "batches"
        else:
            _refuse_unused(given, "--seq-len", "--batch-size")
            encode = None
            if isinstance(source, EnergonDataset):
                encode = _tokenizer(tokenizer)
            else:
                _refuse_unused(given, "--tokenizer", "--part")
            n = samples_to_documents(
                source.split(split), dst, encode, part=part, dtype=dtype or "int32", end_token=end_token,
                overwrite=overwrite, storage_options=target, progress=progress,
            )  # fmt: skip
            unit = "documents"
    emit_json({"url": dst, unit: n}) if as_json else emit(f"{dst}: {n:,} {unit}")


def _refuse_unused(given: Mapping[str, object], *names: str) -> None:
    """Refuse options that mean nothing for this conversion."""
    if unused := [name for name in names if given[name] is not None]:
        raise ArgumentError("this conversion does not use it", where=", ".join(unused), remedy="Leave it out.")


def _tokenizer(name: str | None) -> Tokenizer:
    """A function from text to token ids: from a file of the tokenizers library, or UTF-8 bytes."""
    if name is None:
        raise ArgumentError(
            "converting texts needs a tokenizer", where="--tokenizer", remedy="Name a tokenizer.json, or 'bytes'."
        )
    if name == "bytes":
        return lambda text: list(text.encode())
    loaded = load_tokenizer(name)
    return lambda text: loaded.encode(text).ids


def prepare(
    path: Annotated[str, typer.Argument(metavar="PATH", help="The folder of tars: a path, or any fsspec URL.")],
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            "--split-ratio",
            metavar="N,N,N",
            help="Ratio of train, val and test, such as 8,1,1. Needed, unless there is a split.yaml.",
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Prepare the data set again; without a split, split.yaml is kept."),
    ] = False,
    force_overwrite: Annotated[
        bool,
        typer.Option("--force-overwrite", hidden=True, help="The name that Energon's own command has for --overwrite."),
    ] = False,
    as_json: AsJson = False,
    option: Options = None,
    progress: Progress = None,
) -> None:
    """Index and split tars, and write .nv-meta next to them: an Energon data set. The tars are not changed."""
    from saev_store.sources.energon.prepare import prepare as prepare_folder

    made = prepare_folder(
        path,
        storage_options=storage_options(option),
        split=split,
        overwrite=overwrite or force_overwrite,
        progress=progress,
    )
    if not as_json:
        emit(repr(made))
        return
    emit_json({
        "url": made.url,
        "n_samples": len(made),
        "shards": dict(zip(made.shards, made.documents.counts.tolist(), strict=True)),
        "splits": {name: list(shards) for name, shards in made.documents.splits.items()},
    })  # fmt: skip
