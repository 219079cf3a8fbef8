"""The command `view`."""

from __future__ import annotations

import webbrowser
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated

import typer

from saev_store._runtime.optional import need
from saev_store.cli._common import AsJson, Pairs, StorageOptions, Url, emit, emit_json, storage_options
from saev_store.errors import ArgumentError
from saev_store.store.store import ShardStore
from saev_store.view import View


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
    options: StorageOptions = None,
    option: Pairs = None,
) -> None:
    """Show a store on a local web page, until Ctrl-C: card, layers, examples, tokens and their neighbours. Writes nothing."""
    opened, read_options = None, storage_options(options, option)
    store = ShardStore.open(url, read_options, damaged_ok=True)
    if other is not None:
        opened = ShardStore.open(other, read_options, damaged_ok=True)
    data = None if source is None else store.source(url=source)
    with View(store, other=opened, source=data, tokenizer=_decoder(tokenizer), port=port) as page:
        emit_json({"url": page.url}, indent=None) if as_json else emit(page.url)
        if show:
            webbrowser.open(page.url)
        with suppress(KeyboardInterrupt):
            page.wait()


def _decoder(name: str | None) -> Callable[[int], str] | None:
    """A function from a token id to its text, of a file of the tokenizers library."""
    if name is None:
        return None
    need("tokenizers", install="saev-store[energon]", where=name)
    from tokenizers import Tokenizer

    try:
        loaded = Tokenizer.from_file(name)
    except Exception as error:  # the library raises nothing narrower
        raise ArgumentError(f"not a tokenizer ({error})", where="--tokenizer") from None
    return lambda token_id: loaded.decode([token_id], skip_special_tokens=False)
