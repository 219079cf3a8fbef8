"""The command `docs`."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from saev_store.cli._common import AsJson, emit, emit_json
from saev_store.errors import NotFoundError


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
    address = page.resolve().as_uri()
    emit_json({"url": address}, indent=None) if as_json else emit(address)
    if show and not as_json:
        import webbrowser

        webbrowser.open(address)
