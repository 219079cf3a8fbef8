"""The commands that write stores of others, or delete the remains of killed writers: `copy`, `import` and `clean`."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Annotated, Literal

import typer

from saev_store.cli._common import (
    AsJson,
    DstOptions,
    Options,
    Progress,
    Scheduler,
    emit,
    emit_json,
    emit_table,
    integers,
    layer_keys,
    storage_options,
)
from saev_store.errors import ArgumentError
from saev_store.transport import open_transport

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


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
        typer.Option(help="Round the numbers to this dtype, as a new store [default: the source's]."),
    ] = None,
    on_overflow: Annotated[
        Literal["raise", "saturate"],
        typer.Option(help="With --dtype: what to do with numbers that would become infinite."),
    ] = "raise",
    scheduler: Scheduler = None,
    as_json: AsJson = False,
    option: Options = None,
    dst_option: DstOptions = None,
    progress: Progress = None,
) -> None:
    """Copy a store and verify every byte; an interrupted copy continues where it stopped."""
    from saev_store.writer import copy_store

    url = copy_store(
        src,
        dst,
        layers=None if layers is None else layer_keys(layers, where="--layers"),
        tokens=tokens,
        protocol=protocol,
        dtype=dtype,
        on_overflow=on_overflow,
        storage_options=storage_options(option),
        dst_storage_options=storage_options(dst_option, where="--dst-option"),
        client=scheduler,
        progress=progress,
    )
    if as_json:
        emit_json({"url": url})
    else:
        emit(url)


def import_(
    url: Annotated[str, typer.Argument(metavar="URL", help="The folder of a cache: a path, or any fsspec URL.")],
    to: Annotated[str, typer.Option(metavar="ROOT", help="The folder in which the store's folder is created.")],
    family: Annotated[str, typer.Option(help="The family of models, such as gpt2; it is part of the metadata.")],
    ckpt: Annotated[
        str | None, typer.Option(help="The checkpoint, such as gpt2-small [default: as the cache names it].")
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(metavar="2,5:attn_out", help="Layers of the cache, in its order, if it does not name them."),
    ] = None,
    layer_ids: Annotated[
        str | None,
        typer.Option(metavar="3,18,36", help="Layers of hidden states, as ids of vLLM: id i is layer i - 1."),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of an example, such as 512, where documents lie end to end.")
    ] = None,
    cls_token: Annotated[
        bool | None, typer.Option("--cls-token/--no-cls-token", help="Token 0 of each context is a CLS or BOS token.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(
            metavar="DTYPE", help="Round the numbers to float32, bfloat16 or float16 [default: as in the cache]."
        ),
    ] = None,
    max_tokens_per_shard: Annotated[
        int | None, typer.Option(help="The most vectors of a shard [default: at least 32 shards, each up to 1 GiB].")
    ] = None,
    on_nonfinite: Annotated[
        Literal["raise", "warn", "allow"], typer.Option(help="What to do with NaN and infinity.")
    ] = "raise",
    as_json: AsJson = False,
    option: Options = None,
    dst_option: DstOptions = None,
    progress: Progress = None,
) -> None:
    """Write the cache of another program as a store, bit for bit; an interrupted import continues where it stopped.

    Caches of SAELens, and hidden states of vLLM and speculators.
    """
    from saev_store.sources.caches import import_cache

    store = import_cache(
        url, to, family=family, ckpt=ckpt,
        layers=None if layers is None else layer_keys(layers, where="--layers"),
        layer_ids=None if layer_ids is None else integers(layer_ids, where="--layer-ids"),
        context=context, cls_token=cls_token, dtype=dtype, max_tokens_per_shard=max_tokens_per_shard,
        storage_options=storage_options(option),
        dst_storage_options=storage_options(dst_option, where="--dst-option"),
        on_nonfinite=on_nonfinite, progress=progress,
    )  # fmt: skip
    with store:
        if as_json:
            emit_json({"url": store.url, "shape": list(store.shape), "dtype": store.dtype.name})
        else:
            emit(store.url)


def clean(
    url: Annotated[str, typer.Argument(metavar="URL", help="A folder of stores, or one store: a path or fsspec URL.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")] = False,
    older_than: Annotated[
        str,
        typer.Option(metavar="AGE", help="Keep what was written later than this: 90s, 30m, 12h, 2d; 0 keeps nothing."),
    ] = "1d",
    as_json: AsJson = False,
    option: Options = None,
) -> None:
    """Remove what killed writers left: unfinished stores, hidden and temporary files. Published files stay."""
    from saev_store import writer
    from saev_store.store.card import human_bytes

    older_than_s = parse_age(older_than)
    transport = open_transport(url, storage_options(option))
    cleaned = writer.clean(transport, dry_run=dry_run, older_than_s=older_than_s)
    if as_json:
        emit_json({
            "url": transport.url,
            "dry_run": dry_run,
            "leftovers": [asdict(leftover) for leftover in cleaned],
        })  # fmt: skip
        return
    done = "would be removed" if dry_run else "removed"
    rows = [
        (
            leftover.path or ".",
            leftover.kind,
            human_bytes(leftover.nbytes),
            f"kept: {leftover.kept_because}" if leftover.kept_because else done,
        )
        for leftover in cleaned
    ]
    if rows:
        emit_table(("path", "what", "size", "state"), rows)
    else:
        emit("Nothing to clean.")


def parse_age(text: str) -> float:
    """Seconds from a number with a unit.

    >>> parse_age("90s"), parse_age("2d"), parse_age("0")
    (90.0, 172800.0, 0.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if found is None or (not found[2] and float(found[1])):
        raise ArgumentError(f"{text!r} is not an age", where="--older-than", remedy="Write 90s, 30m, 12h or 2d.")
    return float(found[1]) * _UNITS_S.get(found[2], 1.0)
