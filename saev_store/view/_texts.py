"""The texts of tokens: their ids, the words of a tokenizer, and the tokens around one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from saev_store.errors import SaevStoreError
from saev_store.sources.places import ids_of
from saev_store.store.text import TOKEN_IDS
from saev_store.view._answers import Answer
from saev_store.view._places import described_data

if TYPE_CHECKING:
    from saev_store.view._viewed import Viewed

#: Tokens of context on each side.
_CONTEXT = 6


def texts_of(viewed: Viewed, example: int, content: slice) -> list[str] | None:
    """The text of some content tokens of an example, or their ids as text; None for what is no text."""
    ids = _token_ids(viewed, example)
    if ids is None:
        return None
    return [text_of(viewed, int(token_id)) for token_id in ids[content].tolist()]


def text_of(viewed: Viewed, token_id: int) -> str:
    """The text of a token id; the number where there is no tokenizer."""
    if viewed.decode is None or token_id < 0:
        return str(token_id)
    try:
        found = viewed.decode(token_id)
    except Exception:  # the tokenizer is a foreign library, or of another vocabulary
        return str(token_id)
    return found if isinstance(found, str) else str(token_id)  # pyright: ignore[reportUnnecessaryIsInstance]  # nobody checks what it gives


def context_of(viewed: Viewed, example: int, token: int) -> Answer | None:
    """A token of a text between those around it in its example."""
    ids = _token_ids(viewed, example)
    at = token - viewed.layout.n_special_tokens
    if ids is None or not 0 <= at < len(ids):
        return None
    pieces = [ids[max(0, at - _CONTEXT) : at], ids[at : at + 1], ids[at + 1 : at + 1 + _CONTEXT]]
    before, this, after = ([text_of(viewed, int(token_id)) for token_id in piece.tolist()] for piece in pieces)
    return {"before": before, "token": this[0], "after": after}


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
    """The ids of an example that is one sample of the data set, or the beginning of one."""
    source, _ = viewed.source()
    examples = described_data(viewed.store.metadata.data).get("examples")
    if isinstance(examples, dict) and "by_token" in examples:  # several samples in one example
        return None
    try:
        origin = viewed.store.origin(example, source=source)
        ids = ids_of(origin.sample)
        if ids is None:
            return None
        place = viewed.store.origin(example, 0, source=source, neighbours=0).place
    except SaevStoreError:
        return None
    first = getattr(place, "position", 0)
    return ids[first : first + viewed.layout.content_tokens_per_example]
