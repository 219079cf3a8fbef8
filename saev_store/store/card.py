"""The card of a store, for terminals and notebooks, made without IO from what is known."""

from __future__ import annotations

import html
from collections.abc import Sequence

from saev_store.core.layout import layer_name
from saev_store.documents import WRITABLE_VERSIONS, Metadata
from saev_store.names import one_line, printable
from saev_store.problems import Problem
from saev_store.store.token_arrays import TokenArrays
from saev_store.transport import Transport

_SHOWN_PROBLEMS = 5


def human_bytes(nbytes: int) -> str:
    """A number of bytes as text, in powers of 1024.

    >>> human_bytes(723_000_000_000)
    '673.3 GiB'
    """
    if nbytes < 1024:
        return f"{nbytes} B"
    size, unit = nbytes / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB", "PiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}"


def card_rows(
    metadata: Metadata,
    transport: Transport,
    problems: Sequence[Problem],
    *,
    token_arrays: TokenArrays,
) -> list[tuple[str, str]]:
    """The lines of the card as (name, text); nothing is requested for it."""
    layout = metadata.layout
    arrays = token_arrays.known
    tokens = "not looked for yet" if arrays is None else ", ".join(f"{a.name} ({a.dtype})" for a in arrays) or "none"
    example, layer, token, d_model = layout.shape
    special = f" ({layout.content_tokens_per_example} content + CLS)" if layout.cls_token else " (content)"
    last = layout.examples_in(layout.n_shards - 1)
    tail = "" if last == layout.examples_per_shard else f", {last:,} in the last"
    rows = [
        ("where", transport.url),
        ("model", f"{metadata.family} {metadata.ckpt}"),
        ("shape", f"example {example:,} x layer {layer} x token {token}{special} x d_model {d_model}"),
        ("layers", ", ".join(layer_name(key) for key in layout.layer_keys)),
        ("bytes", f"{human_bytes(layout.nbytes)} of {metadata.dtype}"),
        ("shards", f"{layout.n_shards:,} of {layout.examples_per_shard:,} examples{tail}"),
        ("tokens", tokens),
        ("protocol", f"{metadata.protocol}, read through {transport.name}"),
    ]
    if metadata.version is not WRITABLE_VERSIONS["2.1"]:
        rows.append(("", "the reference project's code reads 2.1 only: saev-store copy --protocol 2.1"))
    if metadata.dataset:
        rows.insert(2, ("dataset", metadata.dataset))
    shown = [f"{problem.severity}: {problem.message}" for problem in problems[:_SHOWN_PROBLEMS]]
    if len(problems) > _SHOWN_PROBLEMS:
        shown.append(f"… and {len(problems) - _SHOWN_PROBLEMS} more in store.problems")
    rows += [("problems" if number == 0 else "", text) for number, text in enumerate(shown or ["none known"])]
    return rows


def card_text(name: str, rows: Sequence[tuple[str, str]]) -> str:
    """The card for a terminal."""
    width = max(len(key) for key, _ in rows)
    return "\n".join([f"<ShardStore {one_line(name)}>", *(f"  {key:<{width}}  {one_line(text)}" for key, text in rows)])


def card_html(name: str, rows: Sequence[tuple[str, str]]) -> str:
    """The card for a notebook; everything that comes from a file is escaped."""
    cells = "".join(
        f"<tr><th style='text-align:left;padding-right:1em'>{html.escape(key)}</th>"
        f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
        for key, text in rows
    )
    return printable(f"<div><strong>ShardStore</strong> <code>{html.escape(name)}</code><table>{cells}</table></div>")
