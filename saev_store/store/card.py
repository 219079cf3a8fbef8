"""The card of a store, for terminals and notebooks, made without IO from what is known."""

from __future__ import annotations

from collections.abc import Sequence

from saev_store.core.layout import layer_name
from saev_store.documents import WRITABLE_VERSIONS, Metadata
from saev_store.names import one_line
from saev_store.problems import Problem
from saev_store.store.token_arrays import TokenArrays
from saev_store.transport import Transport

_SHOWN_PROBLEMS = 5


def human_bytes(nbytes: int) -> str:
    """A number of bytes as text, in powers of 1024, such as "673.3 GiB"."""
    power = min(max(nbytes.bit_length() - 1, 0) // 10, 5)
    return f"{nbytes / 1024**power:.1f} {'KMGTP'[power - 1]}iB" if power else f"{nbytes} B"


def card_rows(
    metadata: Metadata, transport: Transport, problems: Sequence[Problem], *, token_arrays: TokenArrays
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
    shown = [f"{problem.severity}: {problem.message}" for problem in problems[:_SHOWN_PROBLEMS]] or ["none known"]
    if len(problems) > _SHOWN_PROBLEMS:
        shown.append("… and more in store.problems")
    return [*rows, ("problems", shown[0]), *(("", text) for text in shown[1:])]


def card_text(name: str, rows: Sequence[tuple[str, str]]) -> str:
    """The card for a terminal."""
    width = max(len(key) for key, _ in rows)
    return "\n".join([f"<ShardStore {one_line(name)}>", *(f"  {key:<{width}}  {one_line(text)}" for key, text in rows)])
