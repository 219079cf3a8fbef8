"""The commands that write: `copy`, `convert`, `export`, `clean` and `demo`."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from saev_store._runtime.optional import need
from saev_store._runtime.progress import Progress as Counter
from saev_store.cli._common import (
    AsJson,
    Chunks,
    DstOptions,
    DstPairs,
    Pairs,
    Progress,
    Scheduler,
    StorageOptions,
    Url,
    check_destination,
    emit,
    emit_json,
    integers,
    layer_keys,
    naming_what_to_check,
    storage_options,
)
from saev_store.cli._ends import say_done
from saev_store.cli._tables import emit_table
from saev_store.errors import AccessError, ArgumentError
from saev_store.transport import MmapTransport, open_transport

if TYPE_CHECKING:
    from saev_store.sources.convert import Tokenizer
    from saev_store.sources.mmididx import IndexedDataset
    from saev_store.store.store import ShardStore

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_NOT_LISTED = (
    "Unfinished multipart uploads cannot be listed by this client; a life-cycle rule of the bucket removes them, see "
    "docs/cloud.md. Where s3fs is installed, --engine fsspec lists those of S3."
)


def copy(
    src: Annotated[str, typer.Argument(metavar="SRC", help="The store to copy: a path, or any fsspec URL.")],
    dst: Annotated[str, typer.Argument(metavar="DST", help="The folder in which the copy's folder is created.")],
    layers: Annotated[
        str | None,
        typer.Option(metavar="2,5:attn_out", help="Copy only these layers, by label, as a new store [default: all]."),
    ] = None,
    tokens: Annotated[
        Literal["all", "content", "special"],
        typer.Option(help="Copy only these tokens, as a new store; special: with the first content token."),
    ] = "all",
    protocol: Annotated[
        str | None,
        typer.Option(
            metavar="2.1",
            help="Rewrite the documents in this protocol version, 1.0.0, 2.0, 2.1 or 3.0; the shards stay [default: the source's].",
        ),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(
            help="Round the numbers to this dtype, as a new store, and say what that changed [default: the source's]."
        ),
    ] = None,
    on_overflow: Annotated[
        Literal["raise", "warn", "saturate"],
        typer.Option(help="With --dtype: what to do with numbers that would become infinite."),
    ] = "raise",
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Continue an unfinished copy, or refuse to.")
    ] = True,
    max_mb_per_s: Annotated[
        float | None,
        typer.Option(
            metavar="MB", help="Limit of MB (10^6 bytes) per second, reads and writes together [default: none]."
        ),
    ] = None,
    max_requests_per_s: Annotated[
        float | None,
        typer.Option(
            metavar="N", help="Limit of requests per second, to source and destination together [default: none]."
        ),
    ] = None,
    scheduler: Scheduler = None,
    as_json: AsJson = False,
    options: StorageOptions = None,
    option: Pairs = None,
    dst_options: DstOptions = None,
    dst_option: DstPairs = None,
    progress: Progress = None,
) -> None:
    """Copy a store and verify every byte; an interrupted copy continues where it stopped."""
    from saev_store.writer.copying import copy_store

    for name, limit in (("--max-mb-per-s", max_mb_per_s), ("--max-requests-per-s", max_requests_per_s)):
        if limit is not None and not limit > 0:
            raise ArgumentError(f"the limit is {limit}; it must be more than 0", where=name)
    if on_overflow != "raise" and dtype is None:
        raise ArgumentError(
            "a copy in the dtype of its source has no numbers that overflow",
            where="on_overflow",
            remedy="Pass dtype=…, or leave it out.",
        )
    target = storage_options(dst_options, dst_option, name="--dst-storage-options")
    check_destination(dst, target, where="DST", options_name="--dst-storage-options")
    url = copy_store(
        src,
        dst,
        layers=None if layers is None else layer_keys(layers, where="--layers"),
        tokens=tokens,
        protocol=protocol,
        dtype=dtype,
        on_overflow=on_overflow,
        storage_options=storage_options(options, option),
        dst_storage_options=target,
        resume=resume,
        max_mb_per_s=max_mb_per_s,
        max_requests_per_s=max_requests_per_s,
        client=scheduler,
        progress=progress,
    )
    nothing = (
        "all of it was there" if protocol is None else "its shards were there, or share their bytes with the source"
    )
    say_done("copied", "copying writing", at=url, as_json=as_json, nothing=nothing)
    if as_json:
        emit_json({"url": url} if url.rounding is None else {"url": url, "conversion": url.rounding.to_dict()})
    else:
        emit(url if url.rounding is None else f"{url}\n{url.rounding}")


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
        str | None, typer.Option(help="Integer dtype of the tokens in written documents [default: int32].")
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


def export(
    url: Url,
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="The file or folder to write; a file for kerchunk and tensorstore.")
    ],
    format: Annotated[
        Literal["kerchunk", "kerchunk-parquet", "icechunk", "tensorstore"],
        typer.Option("--format", help="Format of the references; each is for the readers of that name."),
    ] = "kerchunk",
    chunks: Chunks = None,
    template: Annotated[
        str | None, typer.Option(metavar="BASE", help="Address of the store's folder for readers [default: URL].")
    ] = None,
    append: Annotated[
        bool, typer.Option("--append", help="Append the examples to an Icechunk repository of an earlier export.")
    ] = False,
    as_json: AsJson = False,
    options: StorageOptions = None,
    option: Pairs = None,
    out_options: Annotated[
        str | None,
        typer.Option(
            "--out-storage-options", metavar="JSON", help="Options of the file system of OUT (kerchunk only)."
        ),
    ] = None,
) -> None:
    """Write references to a store's shards that other tools open without this package; no data is copied."""
    from saev_store.store.store import ShardStore

    if format == "tensorstore" and chunks is not None:
        raise ArgumentError("TensorStore reads whole shards", where="--chunks")
    if append and format != "icechunk":
        raise ArgumentError("only Icechunk repositories can be appended to", where="--append")
    shape = "auto" if chunks is None else integers(chunks, where="--chunks")
    target = storage_options(out_options, None, name="--out-storage-options")
    is_file = format in {"kerchunk", "tensorstore"}
    check_destination(out, target, where="OUT", options_name="--out-storage-options", is_file=is_file)
    with (
        ShardStore.open(url, storage_options(options, option)) as store,
        Counter(
            store.nbytes, "exporting", shown=False, unit="examples", unit_nbytes=store.layout.example_nbytes
        ) as counter,
    ):
        match format:
            case "tensorstore":
                from saev_store.export import array_names

                specs = {name: store.to_tensorstore_spec(name, base=template) for name in array_names(store)}
                _write_specs(store, out, json.dumps(specs, indent=1))
            case "icechunk":
                from saev_store.export import without_icechunk_logs

                without_icechunk_logs()
                store.to_icechunk(out, chunks=shape, base=template, append=append)
            case "kerchunk" | "kerchunk-parquet":
                kind = "parquet" if format == "kerchunk-parquet" else "json"
                store.to_kerchunk(out, format=kind, chunks=shape, base=template, storage_options=target)
        counter.advance(store.nbytes)
    say_done("exported", "exporting", at=out, as_json=as_json)
    emit_json({"out": out, "format": format}) if as_json else emit(out)


def _write_specs(store: ShardStore, path: str, text: str) -> None:
    """Write a local file, which an earlier one of that name makes room for when it is whole.

    Raises:
        AccessError: the system refuses it, or there is no such folder.
        ArgumentError: it would be in the folder of a store.
    """
    from saev_store.export.targets import refuse_stores_file

    folder, name = os.path.split(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise AccessError(
            "could not write: No such file or directory",
            where=path,
            remedy="Name a file in a local folder that exists.",
        )
    there = MmapTransport(folder)
    refuse_stores_file(store, there, name, url=path, where="OUT")
    there.put(name, text.encode())


def clean(
    url: Annotated[str, typer.Argument(metavar="URL", help="A folder of stores, or one store: a path or fsspec URL.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")] = False,
    older_than: Annotated[
        str,
        typer.Option(metavar="AGE", help="Keep what was written later than this: 90s, 30m, 12h, 2d; 0 keeps nothing."),
    ] = "1d",
    engine: Annotated[str, typer.Option(help='"auto", or "fsspec" to list unfinished uploads on S3.')] = "auto",
    as_json: AsJson = False,
    options: StorageOptions = None,
    option: Pairs = None,
) -> None:
    """Remove what killed writers left: unfinished stores, hidden and temporary files, uploads. Published files stay."""
    from saev_store.store.card import human_bytes
    from saev_store.writer import clean_leftovers

    if engine not in ("auto", "fsspec"):
        raise ArgumentError(f"{engine!r} is not an engine here", where="--engine", remedy="Use auto or fsspec.")
    older_than_s = parse_age(older_than)
    transport = open_transport(url, storage_options(options, option), engine="fsspec" if engine == "fsspec" else "auto")
    with Counter(0, "cleaning", shown=False, unit="leftovers") as counter, naming_what_to_check():
        cleaned = clean_leftovers(transport, dry_run=dry_run, older_than_s=older_than_s)
        counter.advance(sum(not leftover.kept_because for leftover in cleaned.leftovers))
    if as_json:
        emit_json({
            "url": transport.url,
            "dry_run": dry_run,
            "uploads_listed": cleaned.uploads_listed,
            "leftovers": [asdict(leftover) for leftover in cleaned.leftovers],
        })  # fmt: skip
        return
    done = "would be removed" if dry_run else "removed"
    rows = [
        (
            leftover.path or ".",
            leftover.kind,
            "" if leftover.nbytes is None else human_bytes(leftover.nbytes),
            f"kept: {leftover.kept_because}" if leftover.kept_because else done,
        )
        for leftover in cleaned.leftovers
    ]
    if rows:
        emit_table(("path", "what", "size", "state"), rows, right="size")
    else:
        emit("Nothing to clean.")
    if not dry_run:
        say_done("removed", "cleaning", at=transport.url, as_json=as_json, nothing="nothing was left over")
    if not cleaned.uploads_listed:
        emit(_NOT_LISTED)


def parse_age(text: str) -> float:
    """Seconds from a number with a unit.

    >>> parse_age("90s"), parse_age("2d"), parse_age("0")
    (90.0, 172800.0, 0.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if found is None or (not found[2] and float(found[1])):
        raise ArgumentError(f"{text!r} is not an age", where="--older-than", remedy="Write 90s, 30m, 12h or 2d.")
    return float(found[1]) * _UNITS_S.get(found[2], 1.0)


def demo(
    out: Annotated[Path, typer.Option(help="Folder in which the stores and the picture are made.")] = Path("saev-demo"),
    device: Annotated[
        str | None, typer.Option(help="Device on which the models run, such as cuda [default: cpu].")
    ] = None,
    as_json: AsJson = False,
    progress: Progress = None,
) -> None:
    """Record a vision transformer over photographs and a language model over fables, validate both stores, and plot what is in one.

    A second run with the same --out uses what is finished, and continues an interrupted recording.
    """
    from saev_store.record import run_demo

    def say(line: str) -> None:
        print(line, file=sys.stderr) if as_json else emit(line)

    try:
        result = run_demo(out, device=device, progress=progress, say=say)
    except KeyboardInterrupt:
        again = f"saev-store demo --out {shlex.quote(str(out))}"
        print(f"\nRecorded examples are kept; continue with: {again}", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        emit_json(result.to_dict())
    else:
        emit(f"finished   in {result.seconds:.0f} s; inspect them with: saev-store ls {shlex.quote(str(out))}")
    if not result.ok:
        raise typer.Exit(1)
