"""The texts of tokens: their ids, the words of a tokenizer, and the tokens around one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from saev_store.errors import SaevStoreError
from saev_store.sources.places import ids_of
from saev_store.store.text import TOKEN_IDS
from saev_store.view._answers import Answer

if TYPE_CHECKING:
    from saev_store.view._viewed import Viewed

#: Tokens of context on each side.
_CONTEXT = 6


def texts_of(viewed: Viewed, example: int, content: slice) -> list[str] | None:
    """The texts of some content tokens of an example, or their ids as texts; None for an example without token ids."""
    ids = _token_ids(viewed, example)
    return None if ids is None else [_text(viewed, token_id) for token_id in ids[content].tolist()]


def context_of(viewed: Viewed, example: int, token: int) -> Answer | None:
    """A token of a text between those around it in its example."""
    ids = _token_ids(viewed, example)
    at = token - viewed.layout.n_special_tokens
    if ids is None or not 0 <= at < len(ids):
        return None
    pieces = ids[max(0, at - _CONTEXT) : at], ids[at : at + 1], ids[at + 1 : at + 1 + _CONTEXT]
    before, this, after = ([_text(viewed, token_id) for token_id in piece.tolist()] for piece in pieces)
    return {"before": before, "token": this[0], "after": after}


def _text(viewed: Viewed, token_id: int) -> str:
    """The text of a token id; the number where there is no tokenizer."""
    if viewed.decode is None or token_id < 0:
        return str(token_id)
    try:
        return str(viewed.decode(token_id))
    except Exception:  # the tokenizer is a foreign library, or of another vocabulary
        return str(token_id)


def _token_ids(viewed: Viewed, example: int) -> np.ndarray | None:
    """Token ids of the content tokens of an example: recorded ones, else those of its sample in the data set."""
    arrays, _ = viewed.arrays()
    if TOKEN_IDS in arrays:
        return arrays[TOKEN_IDS][example]
    source, _ = viewed.source()
    if source is None:
        return None
    return viewed.once(f"ids {example}", lambda: _ids_in_source(viewed, example))


def _ids_in_source(viewed: Viewed, example: int) -> np.ndarray | None:
    """The ids of an example that is one sample of the data set, or a part of one."""
    source, _ = viewed.source()
    examples = viewed.described.get("examples")
    if isinstance(examples, dict) and "by_token" in examples:  # several samples in one example
        return None
    try:
        origin = viewed.store.origin(example, 0, source=source)
    except SaevStoreError:
        return None
    ids = ids_of(origin.sample)
    if ids is None:
        return None
    first = origin.position or 0
    return ids[first : first + viewed.layout.content_tokens_per_example]
