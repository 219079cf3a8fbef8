"""Keeps a conversion from replacing the data set that it reads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from saev_store.errors import ArgumentError
from saev_store.sources._source import Source
from saev_store.sources.address import Url, full_url, is_within, locate
from saev_store.sources.mmididx.reader import file_names
from saev_store.store.opening import exists
from saev_store.transport import Engine, Transport


def refuse_own_files(
    source: Source[object],
    output_path: Url,
    storage_options: Mapping[str, object] | None,
    *,
    engine: Engine,
    transport: Transport | None,
    is_mmididx: bool,
) -> None:
    """Refuse to replace a file of the source of a conversion.

    Args:
        source: What is converted.
        output_path: Where to.
        storage_options: As in `open_source`.
        engine: As in `open_source`.
        transport: As in `open_source`.
        is_mmididx: MMIDIDX is written, so two files; otherwise the file itself.

    Raises:
        ArgumentError: one of the files exists and is one of the source's, by whatever path or link.
    """
    there, name = locate(output_path, storage_options, engine=engine, transport=transport)
    for path in file_names(name) if is_mmididx else (name,):
        is_own = any(is_within(full_url(there, path), url) for url in _urls_of(source))
        if is_own and exists(there, path):
            raise ArgumentError(
                f"{os.fspath(output_path)!r} would replace {path}, a file of the data set that is converted",
                where="output_path",
                remedy="Name another file.",
            )


def _urls_of(source: Source[object]) -> Sequence[str]:
    """The addresses of a source's files, or of their folder."""
    prefix = source.url.removesuffix(".idx")
    return (source.url,) if prefix == source.url else (source.url, f"{prefix}.bin")
