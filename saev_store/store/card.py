"""The card of a store, for terminals and notebooks, made without IO from what is known."""

from __future__ import annotations

import html
from collections.abc import Sequence

from saev_store.core.layout import RESID_POST, Layout, layer_name
from saev_store.core.token_arrays import LABELS
from saev_store.documents import WRITABLE_VERSIONS, Metadata
from saev_store.names import one_line, printable
from saev_store.problems import Problem
from saev_store.store.sizes import sizes_by_dtype
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


def _as_reference(metadata: Metadata) -> str:
    """How the store becomes one of protocol 2.1, or what that cannot hold."""
    if not metadata.declares_token_arrays:
        return ": saev-store copy --protocol 2.1"
    arrays = [array.name for array in metadata.token_arrays]
    beyond = [
        what
        for what, is_there in (
            ("hook points", set(metadata.hook_points or ()) - {RESID_POST}),
            ("token arrays", set(arrays) - {LABELS.name} or (arrays and metadata.dtype == "float32")),
            ("texts", metadata.text is not None),
        )
        if is_there
    ]
    if beyond:
        return f", which has no {' or '.join(beyond)}"
    return f": saev-store copy{'' if metadata.dtype == 'float32' else ' --dtype float32'} --protocol 2.1"


def card_rows(
    metadata: Metadata,
    transport: Transport,
    problems: Sequence[Problem],
    *,
    token_arrays: TokenArrays,
    most_problems: int = _SHOWN_PROBLEMS,
) -> list[tuple[str, str]]:
    """The lines of the card as (name, text); nothing is requested for it."""
    layout = metadata.layout
    arrays = [token_arrays.declared(name) for name in token_arrays.known]
    tokens = ", ".join(f"{array.name} ({array.dtype})" for array in arrays)
    if metadata.declares_token_arrays and arrays:
        tokens += f": {human_bytes(sum(array.nbytes(layout) for array in arrays))}"
    labels = "yes (labels.bin)" if tokens else "none" if token_arrays.is_known else "not looked for yet"
    example, layer, token, d_model = layout.shape
    special = f" ({layout.content_tokens_per_example} content + CLS)" if layout.cls_token else " (content)"
    last = layout.examples_in(layout.n_shards - 1)
    tail = "" if last == layout.examples_per_shard else f", {last:,} in the last"
    rows = [
        ("where", transport.url),
        ("model", f"{metadata.family} {metadata.ckpt}"),
        ("shape", f"example {example:,} x layer {layer} x token {token}{special} x d_model {d_model}"),
        ("layers", ", ".join(layer_name(key) for key in layout.layer_keys)),
        ("bytes", f"{human_bytes(layout.nbytes)} of {metadata.dtype} ({_in_other_dtypes(layout)})"),
        ("shards", f"{layout.n_shards:,} of {layout.examples_per_shard:,} examples{tail}"),
        ("tokens", tokens or "none") if metadata.declares_token_arrays else ("labels", labels),
        ("protocol", f"{metadata.protocol}, read through {transport.name}"),
    ]
    if metadata.version is not WRITABLE_VERSIONS["2.1"]:
        rows.append(("", f"the reference project's code reads 2.1 only{_as_reference(metadata)}"))
    if metadata.dataset:
        rows.insert(2, ("dataset", metadata.dataset))
    shown = [f"{problem.severity}: {problem.message}" for problem in problems[:most_problems]]
    if len(problems) > most_problems:
        shown.append(f"… and {len(problems) - most_problems} more in store.problems")
    rows += [("problems" if number == 0 else "", text) for number, text in enumerate(shown or ["none known"])]
    return rows


def _in_other_dtypes(layout: Layout) -> str:
    """What the vectors take in the dtypes that the store does not have."""
    others: dict[int, list[str]] = {}
    for dtype, size in sizes_by_dtype(layout).items():
        if dtype != layout.dtype:
            others.setdefault(size.vectors_nbytes, []).append(dtype)
    return ", ".join(f"{human_bytes(nbytes)} as {' or '.join(names)}" for nbytes, names in others.items())


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
