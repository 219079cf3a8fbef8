"""The command `view`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from saev_store._runtime.optional import need
from saev_store.cli._common import AsJson, Pairs, StorageOptions, Url, emit, emit_json, storage_options
from saev_store.errors import ArgumentError


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
    sae: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Show the features of a sparse autoencoder: a safetensors file."),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the web browser.")] = False,
    as_json: AsJson = False,
    options: StorageOptions = None,
    option: Pairs = None,
) -> None:
    """Show a store on a local web page, until Ctrl-C: card, layers, examples, tokens and their neighbours. Writes nothing."""
    for library in ("starlette", "uvicorn"):
        need(library, install="saev-store[view]", where="view")
    from saev_store.view import open_pages, run

    def tell(address: str) -> None:
        emit_json({"url": address}, indent=None) if as_json else emit(address)
        if show:
            import webbrowser

            webbrowser.open(address)

    if sae == "":
        raise ArgumentError("it is empty: pass the path or URL of a safetensors file", where="--sae")
    pages = open_pages(
        url,
        storage_options(options, option),
        other=other,
        source_url=source,
        tokenizer=_decoder(tokenizer),
        sae_url=sae,
    )
    run(pages, port=port, tell=tell)


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
