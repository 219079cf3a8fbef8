"""The commands that read: `info`, `estimate`, `head`, `validate`, `stats`, `view` and `docs`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

from saev_store.cli._common import (
    AsJson,
    Options,
    Progress,
    Scheduler,
    Url,
    emit,
    emit_json,
    emit_table,
    layer_keys,
    load_tokenizer,
    problem_dicts,
    storage_options,
)
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
    from saev_store.sources import Source
    from saev_store.store.store import ShardStore

_FILES = (".batch", ".idx", ".bin")
#: Values of a vector shown in the table; `--json` has all of them.
_SHOWN = 6
_MOST_ROWS = 100_000


def info(url: Url, as_json: AsJson = False, option: Options = None) -> None:
    """Describe a store, or a data set that stores are recorded from. Opens damaged stores too."""
    from saev_store.store.card import card_rows, card_text
    from saev_store.store.store import ShardStore

    given = storage_options(option)
    source = _source_at(url, given)
    if source is not None:
        with source:
            _source_info(source, as_json=as_json)
        return
    with ShardStore.open(url, given, damaged_ok=True) as store:
        if as_json:
            emit_json(_describe(store))
            return
        rows = card_rows(store.metadata, store.transport, store.problems, token_arrays=store.token_arrays)
        emit(card_text(store.name, rows))


def _describe(store: ShardStore) -> dict[str, object]:
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
        "problems": problem_dicts(store.problems),
    }


def estimate(
    url: Url,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Show this dtype only [default: each]."),
    ] = None,
    as_json: AsJson = False,
    option: Options = None,
) -> None:
    """Show the size of a store in each dtype, and the requests of reading all of it; no vector is read."""
    from saev_store.store.card import human_bytes
    from saev_store.store.sizes import sizes_by_dtype
    from saev_store.store.store import ShardStore

    with ShardStore.open(url, storage_options(option)) as store:
        arrays = [store.token_arrays.declared(name) for name in store.token_arrays]
        sizes = sizes_by_dtype(store.layout, arrays)
        chosen: list[StoredDtype] = [name for name in get_args(StoredDtype) if dtype in {None, name}]
        read = store.estimate()
    if as_json:
        found = {name: sizes[name].to_dict() for name in chosen}
        emit_json({"url": store.url, "dtype": store.metadata.dtype, "dtypes": found, "read": asdict(read)})
        return
    rows = [
        (
            f"{name} (stored)" if name == store.metadata.dtype else name,
            human_bytes(sizes[name].vectors_nbytes),
            human_bytes(sizes[name].token_arrays_nbytes),
            str(read) if name == store.metadata.dtype else "",
        )
        for name in chosen
    ]
    emit_table(("dtype", "vectors", "token arrays", "reading all vectors"), rows)


def _source_at(url: str, options: Mapping[str, object] | None) -> Source[object] | None:
    """The data set at an address, opened; None if there may be a store.

    Raises:
        SaevStoreError: a data set does not open, or the name is that of a data set's file, which is missing.
    """
    from saev_store.names import METADATA_NAME
    from saev_store.sources import open_source
    from saev_store.transport import open_transport

    is_named = url.endswith(_FILES)
    try:
        if not is_named:
            open_transport(url, options).size(METADATA_NAME)
            return None
    except NotFoundError:
        pass
    except SaevStoreError:
        return None
    try:
        return open_source(url, options)
    except NotFoundError:
        if is_named:
            raise
        return None


def _source_info(source: Source[object], *, as_json: bool) -> None:
    """Describe a data set."""
    if not as_json:
        emit(repr(source))
        return
    try:
        described = source.describe()
    except (NotFoundError, CorruptShardError):  # a data set with a missing tar has no digest
        described = {"format": source.format, "url": source.url, "n_samples": len(source)}
    emit_json(described)


def head(
    url: Url,
    n: Annotated[int, typer.Option("-n", min=1, max=_MOST_ROWS, help="Number of vectors to show.")] = 5,
    layer: Annotated[
        str | None,
        typer.Option(
            metavar="5:attn_out", help="Label of a layer, or with its hook point [default: the first recorded]."
        ),
    ] = None,
    tokens: Annotated[
        Literal["all", "content", "special"],
        typer.Option(help="Tokens to show: all, those of the input, or CLS and BOS."),
    ] = "all",
    token_array: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Show this token array too, such as token_ids; may be repeated."),
    ] = None,
    as_json: AsJson = False,
    option: Options = None,
) -> None:
    """Show the first vectors of a layer with their example, token and norm."""
    import numpy as np

    from saev_store.loaders.reads import TokenColumns
    from saev_store.store.store import ShardStore

    wanted = None if layer is None else layer_keys(layer, where="--layer")
    if wanted is not None and len(wanted) > 1:
        raise ArgumentError(f"{layer!r} names several layers", where="--layer", remedy="Name one.")
    with ShardStore.open(url, storage_options(option), damaged_ok=True) as store:
        label = store.layout.layer_keys[0] if wanted is None else wanted[0]
        selection = store.sel(layer=label, tokens=tokens)
        rows = np.arange(min(n, len(selection)))
        vectors = selection.rows(rows)
        with np.errstate(invalid="ignore"):  # NaN and infinity are shown as they are
            norms = np.sqrt(np.square(vectors, dtype=np.float64).sum(axis=1))
        where = selection.coordinates(rows)
        # Of all tokens: special ones alone have no columns.
        every = TokenColumns([store.sel(layer=label)], token_array or (), labels=False)
        columns = every.at(where.example_idx, where.token_idx)
    found, lines = list[dict[str, object]](), list[list[str]]()
    for row, (example, token) in enumerate(zip(where.example_idx.tolist(), where.token_idx.tolist(), strict=True)):
        arrays = {name: None if token < 0 else values[row].item() for name, values in columns.items()}
        found.append({"example_idx": example, "token_idx": token, "norm": norms[row].item()})
        found[-1] |= {"values": vectors[row].tolist()} | ({"token_arrays": arrays} if arrays else {})
        lines.append([
            str(example),
            "CLS" if token < 0 else str(token),
            *("-" if value is None else str(value) for value in arrays.values()),
            f"{norms[row]:.4g}",
            " ".join(f"{value:.4g}" for value in vectors[row, :_SHOWN]),
        ])  # fmt: skip
    if as_json:
        emit_json({"url": store.url, "layer": label, "tokens": tokens, "vectors": found})
        return
    emit(f"layer {label} of {list(store.layout.layer_keys)}, up to {_SHOWN} of {store.shape[3]} values per vector")
    emit_table(("example", "token", *columns, "norm", "values"), lines)


def validate(
    url: Url,
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte: compare digests, find rows of zeros.")] = False,
    scheduler: Scheduler = None,
    as_json: AsJson = False,
    option: Options = None,
    progress: Progress = None,
) -> None:
    """Validate a store or a data set; exit with 1 if there is an error."""
    from saev_store.problems import Problem
    from saev_store.store.store import ShardStore
    from saev_store.validation import Report

    given = storage_options(option)
    try:
        source = _source_at(url, given)
    except (DocumentError, CorruptShardError, UnsafeContentError, NotFoundError) as error:
        problems = tuple(getattr(error, "problems", ())) or (Problem(error.kind, error.message, error.where or ""),)
        report = Report(error.where or url, 0, 0, problems)
    else:
        if source is not None:
            if scheduler is not None:
                raise ArgumentError(f"{url} is a data set; a cluster validates stores only", where="--scheduler")
            with source:
                report = source.validate(deep=deep, progress=progress)
        else:
            with ShardStore.open(url, given, damaged_ok=True) as store:
                report = store.validate(deep=deep, client=scheduler, progress=progress)
    emit_json(report.to_dict()) if as_json else emit(str(report))
    if not report.ok:
        raise typer.Exit(1)


def stats(
    url: Url,
    sample: Annotated[
        int | None, typer.Option(metavar="N", help="Read only N examples, chosen at random [default: all].")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed that chooses the examples of a sample.")] = 0,
    scheduler: Scheduler = None,
    save: Annotated[
        bool, typer.Option("--save/--no-save", help="Keep the result in stats.json beside the store.")
    ] = True,
    as_json: AsJson = False,
    option: Options = None,
    progress: Progress = None,
) -> None:
    """Show count, mean, std, mean norm, min, max, zeros and non-finite values of each layer."""
    from saev_store.store.store import ShardStore

    with ShardStore.open(url, storage_options(option)) as store:
        found = store.stats(sample=sample, seed=seed, client=scheduler, save=save, progress=progress)
    emit_json(found.to_dict()) if as_json else emit(str(found))


def view(
    url: Url,
    other: Annotated[
        str | None, typer.Argument(metavar="[OTHER]", help="A second store, to compare the first one with.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port of this machine to listen on; 0 takes any free one.")] = 0,
    source: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where the data set is now that the store was recorded from."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="FILE", help="For stores of texts: a tokenizer.json, to show words for ids.")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the web browser.")] = False,
    as_json: AsJson = False,
    option: Options = None,
) -> None:
    """Show a store on a local web page, until Ctrl-C: card, layers, examples, tokens and their neighbours. Writes nothing."""
    from saev_store.store.store import ShardStore
    from saev_store.view import View

    given = storage_options(option)
    store = ShardStore.open(url, given, damaged_ok=True)
    second = None if other is None else ShardStore.open(other, given, damaged_ok=True)
    data = None if source is None else store.source(url=source)
    with View(store, other=second, source=data, tokenizer=_decoder(tokenizer), port=port) as page:
        _show(page.url, as_json=as_json, show=show)
        with suppress(KeyboardInterrupt):
            page.wait()


def docs(
    show: Annotated[bool, typer.Option("--open/--no-open", help="Open the pages in the web browser.")] = True,
    as_json: AsJson = False,
) -> None:
    """Open the documentation that is installed with this package, and print its address. With --json only print it."""
    page = Path(str(files("saev_store"))) / "_site" / "index.html"
    if not page.is_file():
        raise NotFoundError(
            "the documentation was not built for this installation",
            where="docs",
            remedy="In a clone of the repository: pip install '.[docs]' && mkdocs build --strict && pip install .",
        )
    _show(page.resolve().as_uri(), as_json=as_json, show=show and not as_json)


def _show(address: str, *, as_json: bool, show: bool) -> None:
    """Print an address, and open it in the web browser."""
    import webbrowser

    emit_json({"url": address}, indent=None) if as_json else emit(address)
    if show:
        webbrowser.open(address)


def _decoder(name: str | None) -> Callable[[int], str] | None:
    """A function from a token id to its text, of a file of the tokenizers library."""
    if name is None:
        return None
    loaded = load_tokenizer(name)
    return lambda token_id: loaded.decode([token_id], skip_special_tokens=False)
