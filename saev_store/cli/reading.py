"""The commands that read a store: `info`, `head`, `validate` and `stats`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

from saev_store.cli._common import (
    AsJson,
    Pairs,
    Progress,
    Scheduler,
    StorageOptions,
    Url,
    emit,
    emit_json,
    layer_keys,
    storage_options,
    told,
)
from saev_store.cli._ends import say_done
from saev_store.cli._tables import emit_card, emit_table, is_drawn
from saev_store.cli._wording import as_commands
from saev_store.core.dtypes import StoredDtype
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
    from saev_store.store.store import ShardStore
    from saev_store.validation import Report

#: What `estimate` tells of, in this order.
STORED_DTYPES: tuple[StoredDtype, ...] = get_args(StoredDtype)
_FILES = (".batch", ".idx", ".bin")
#: Values of a vector shown in the table; `--json` has all of them.
_SHOWN = 6
_MOST_ROWS = 100_000


def info(url: Url, as_json: AsJson = False, options: StorageOptions = None, option: Pairs = None) -> None:
    """Describe a store, or a data set that stores are recorded from. Opens damaged stores too."""
    from saev_store.store.card import card_rows
    from saev_store.store.store import ShardStore

    given = storage_options(options, option)
    source = source_at(url, given)
    if source is not None:
        source_info(source, as_json=as_json)
        return
    with ShardStore.open(url, given, damaged_ok=True) as store:
        if as_json:
            emit_json(describe(store))
            return
        rows = card_rows(
            store.metadata,
            store.transport,
            store.problems,
            token_arrays=store.token_arrays,
            most_problems=len(store.problems),
        )
        emit_card(f"<ShardStore {store.name}>", [(name, as_commands(text)) for name, text in rows])


def describe(store: ShardStore) -> dict[str, object]:
    """A store as plain JSON types."""
    from saev_store.core.token_arrays import LABELS, TokenArray
    from saev_store.store.sizes import sizes_by_dtype

    layout, metadata, arrays = store.layout, store.metadata, list[TokenArray]()
    with suppress(DocumentError):  # labels of a wrong size, which `problems` lists
        arrays = [store.token_arrays.declared(name) for name in store.token_arrays]
    return {
        "url": store.url,
        "name": store.name,
        "hash": metadata.hash,
        "protocol": metadata.protocol,
        "family": metadata.family,
        "ckpt": metadata.ckpt,
        "dataset": metadata.dataset,
        "dims": list(store.dims),
        "shape": list(store.shape),
        "dtype": metadata.dtype,
        "layers": list(store.layers),
        **({} if layout.hook_points is None else {"hook_points": list(layout.hook_points)}),
        "content_tokens_per_example": layout.content_tokens_per_example,
        "cls_token": layout.cls_token,
        "n_shards": layout.n_shards,
        "examples_per_shard": layout.examples_per_shard,
        "nbytes": store.nbytes,
        "nbytes_by_dtype": {dtype: size.vectors_nbytes for dtype, size in sizes_by_dtype(layout).items()},
        "token_arrays": [
            {"name": array.name, "dtype": array.dtype, "nbytes": array.nbytes(layout)} for array in arrays
        ],
        "labels": LABELS in arrays,
        "engine": store.transport.name,
        "problems": told(store.problems),
    }


def estimate(
    url: Url,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Tell of this dtype only [default: of each]."),
    ] = None,
    as_json: AsJson = False,
    options: StorageOptions = None,
    option: Pairs = None,
) -> None:
    """Say what a store takes in each dtype, and what reading all of it would cost; nothing of it is read."""
    from saev_store.store.card import human_bytes
    from saev_store.store.sizes import sizes_by_dtype
    from saev_store.store.store import ShardStore

    with ShardStore.open(url, storage_options(options, option)) as store:
        arrays = [store.token_arrays.declared(name) for name in store.token_arrays]
        sizes = sizes_by_dtype(store.layout, arrays)
        chosen: list[StoredDtype] = [name for name in STORED_DTYPES if dtype in {None, name}]
        reads = {name: store.estimate(dtype=name) for name in chosen}
    if as_json:
        found = {name: sizes[name].to_dict() | {"read": asdict(reads[name])} for name in chosen}
        emit_json({"url": store.url, "dtype": store.metadata.dtype, "dtypes": found})
        return
    rows = [
        (
            f"{name} (stored)" if name == store.metadata.dtype else name,
            human_bytes(sizes[name].vectors_nbytes),
            human_bytes(sizes[name].token_arrays_nbytes),
            str(reads[name]),
        )
        for name in chosen
    ]
    emit_table(("dtype", "vectors", "token arrays", "reading all vectors"), rows, right="vectors")


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
    with found.open(damaged_ok=True) as source:
        if not as_json:
            emit(repr(source))
            return
        try:
            described = source.describe()
        except (NotFoundError, CorruptShardError):  # a data set with a missing tar has no digest
            described = {"format": source.format, "url": source.url, "n_samples": len(source)}
        emit_json({**described, "problems": told(source.problems)})


def head(
    url: Url,
    n: Annotated[int, typer.Option("-n", min=1, max=_MOST_ROWS, help="How many vectors to show.")] = 5,
    layer: Annotated[
        str | None,
        typer.Option(
            metavar="5:attn_out", help="Label of a layer, or with its hook point [default: the first recorded]."
        ),
    ] = None,
    tokens: Annotated[
        Literal["all", "content", "special"],
        typer.Option(help="Which tokens to show: all, those of the input, or CLS and BOS."),
    ] = "all",
    token_array: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Show this token array too, such as token_ids; may be repeated."),
    ] = None,
    as_json: AsJson = False,
    options: StorageOptions = None,
    option: Pairs = None,
) -> None:
    """Show the first vectors of a layer with their example, token and norm."""
    import numpy as np

    from saev_store.loaders.columns import TokenColumns
    from saev_store.store.store import ShardStore

    wanted = None if layer is None else layer_keys(layer, where="--layer")
    if wanted is not None and len(wanted) > 1:
        raise ArgumentError(f"{layer!r} names several layers", where="--layer", remedy="Name one.")
    with ShardStore.open(url, storage_options(options, option), damaged_ok=True) as store:
        label = store.layout.layer_keys[0] if wanted is None else wanted[0]
        selection = store.sel(layer=label, tokens=tokens)
        rows = np.arange(min(n, len(selection)))
        vectors = selection.rows(rows)
        with np.errstate(invalid="ignore"):  # NaN and infinity are shown as they are
            norms = np.sqrt(np.square(vectors, dtype=np.float64).sum(axis=1))
        where = selection.coordinates(rows)
        example, token = where.example_idx.tolist(), where.token_idx.tolist()
        # Of all tokens: batches of special ones alone have no columns, but here somebody asked for these.
        every = TokenColumns([store.sel(layer=label)], token_array or (), labels=False)
        columns = every.at(where.example_idx, where.token_idx)
        recorded = [
            {key: None if t < 0 else values[row].item() for key, values in columns.items()}
            for row, t in enumerate(token)
        ]
    if as_json:
        emit_json({
            "url": store.url,
            "layer": label,
            "tokens": tokens,
            "vectors": [
                {"example_idx": e, "token_idx": t, "norm": norm, "values": values}
                | ({"token_arrays": found} if found else {})
                for e, t, found, norm, values in zip(
                    example, token, recorded, norms.tolist(), vectors.tolist(), strict=True
                )
            ],
        })  # fmt: skip
        return
    lines = [
        (
            str(e),
            "CLS" if t < 0 else str(t),
            *("-" if value is None else str(value) for value in found.values()),
            f"{norm:.4g}",
            " ".join(f"{value:.4g}" for value in values[:_SHOWN]),
        )
        for e, t, found, norm, values in zip(example, token, recorded, norms.tolist(), vectors.tolist(), strict=True)
    ]
    d_model = store.shape[3]
    shown = f"{d_model} values" if d_model <= _SHOWN else f"the first {_SHOWN} of {d_model} values"
    emit(f"layer {label} of {list(store.layout.layer_keys)}, {shown} per vector")
    emit_table(("example", "token", *columns, "norm", "values"), lines, right="example token norm")


def validate(
    url: Url,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every byte: compare digests, find rows of zeros and swapped shards.")
    ] = False,
    scheduler: Scheduler = None,
    as_json: AsJson = False,
    options: StorageOptions = None,
    option: Pairs = None,
    progress: Progress = None,
) -> None:
    """Validate a store or a data set; exit with 1 if there is an error."""
    from saev_store.store.store import ShardStore

    given = storage_options(options, option)
    source = source_at(url, given)
    if source is not None and scheduler is not None:
        raise ArgumentError(f"{url} is a data set; a cluster validates stores only", where="--scheduler")
    if source is not None:
        report = source_report(source, deep=deep, progress=progress)
    else:
        with ShardStore.open(url, given, damaged_ok=True) as store:
            report = store.validate(deep=deep, client=scheduler, progress=progress)
    if deep:
        say_done("validated", "validating checking", at=report.url, as_json=as_json, nothing="no shard is there")
    if as_json:
        emit_json({**report.to_dict(), "problems": told(report.problems)})
    else:
        _emit_report(report)
    if not report.ok:
        raise typer.Exit(1)


def _emit_report(report: Report) -> None:
    """Print the problems; in a terminal as a table."""
    text = as_commands(str(report))
    rows = [
        (
            each.severity,
            each.kind,
            each.where,
            as_commands(each.message),
            ", ".join(f"{start}:{end}" for start, end in each.lost),
        )
        for each in report.problems
    ]
    if not rows or not is_drawn():
        emit(text)
        return
    emit("\n".join(text.splitlines()[:2]))
    emit_table(("severity", "kind", "where", "problem", "lost examples"), rows)


def source_report(found: Found, *, deep: bool, progress: bool | None) -> Report:
    """What is wrong with a data set, also one that does not open."""
    from saev_store.problems import Problem
    from saev_store.sources.address import full_url
    from saev_store.validation import Report

    try:
        with found.open(damaged_ok=True) as source:
            return source.validate(deep=deep, progress=progress)
    except (DocumentError, CorruptShardError, UnsafeContentError, NotFoundError) as error:
        problems = tuple(getattr(error, "problems", ())) or (Problem(error.kind, error.message, error.where or ""),)
        return Report(full_url(found.transport, found.path), 0, 0, problems)


def stats(
    url: Url,
    sample: Annotated[
        int | None, typer.Option(metavar="N", help="Read only N examples, chosen at random [default: all].")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed that chooses the examples of a sample.")] = 0,
    scheduler: Scheduler = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Compute again what stats.json holds.")] = False,
    save: Annotated[
        bool, typer.Option("--save/--no-save", help="Keep the result in stats.json beside the store.")
    ] = True,
    as_json: AsJson = False,
    options: StorageOptions = None,
    option: Pairs = None,
    progress: Progress = None,
) -> None:
    """Show count, mean, std, mean norm, min, max, zeros, non-finite, saturated and subnormal values of each layer."""
    from saev_store.stats import STATISTICS
    from saev_store.store.store import ShardStore

    with ShardStore.open(url, storage_options(options, option)) as store:
        found = store.stats(sample=sample, seed=seed, client=scheduler, refresh=refresh, save=save, progress=progress)
    say_done("read", "stats", at=url, as_json=as_json, nothing="stats.json has it")
    if as_json:
        emit_json(found.to_dict())
    else:
        emit_table(("layer", *STATISTICS), found.rows(), right=" ".join(STATISTICS), plain=str(found))
        if is_drawn():
            emit(found.covers)
