"""Documents of any length, end to end, as examples of one length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from saev_store.core.layout import IntArray
from saev_store.errors import ArgumentError
from saev_store.writer.importing import Block

#: What stands at padding, which is of no document.
_NONE = -1


class Tokens(Protocol):
    """The tokens of a cache, numbered from 0 through all its documents.

    Attributes:
        n_tokens: How many there are.
        n_layers: How many vectors each has.
        d_model: Their length.
        dtype: The dtype of their numbers.
        starts: The first token of each document, ascending, that of the next one where it is empty; None where documents are not known.
        document_ids: The number of each document.
        has_ids: Whether token ids are known.
    """

    @property
    def n_tokens(self) -> int: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def d_model(self) -> int: ...
    @property
    def dtype(self) -> np.dtype[np.generic]: ...
    @property
    def starts(self) -> IntArray | None: ...
    @property
    def document_ids(self) -> IntArray: ...
    @property
    def has_ids(self) -> bool: ...

    def acts(self, first: int, end: int) -> npt.NDArray[np.generic]:
        """The vectors of some tokens, (end - first, layers, d_model)."""
        ...

    def ids(self, first: int, end: int) -> npt.NDArray[np.generic]:
        """The ids of some tokens."""
        ...


def stream_arguments(tokens: Tokens, context: int) -> dict[str, object]:
    """The arguments of `new_metadata` for tokens that are cut into examples of `context` tokens."""
    arrays = {"mask": "bool"}
    if tokens.has_ids:
        arrays |= {"token_ids": "int32"}
    if tokens.starts is not None:
        arrays |= {"document_ids": "int64", "positions": "int32"}
    return {
        "content_tokens_per_example": context,
        "cls_token": False,
        "d_model": tokens.d_model,
        "n_examples": -(-tokens.n_tokens // context),
        "token_arrays": arrays,
        "text": {"layout": "stream", "bos": False} if tokens.starts is not None else None,
    }


def stream_blocks(tokens: Tokens, context: int, first: int, end: int, max_block_bytes: int) -> Iterator[Block]:
    """The examples from `first` to `end`; the last one of all may be filled up with zeros, whose `mask` is false."""
    most = max(1, max_block_bytes // (context * tokens.n_layers * tokens.d_model * tokens.dtype.itemsize))
    for start in range(first, end, most):
        stop = min(start + most, end)
        low, high = start * context, min(stop * context, tokens.n_tokens)
        n_padding, shape = stop * context - high, (stop - start, context)
        acts = tokens.acts(low, high)
        arrays: dict[str, npt.NDArray[np.generic]] = {"mask": np.ones(high - low, np.bool_)}
        if tokens.has_ids:
            arrays["token_ids"] = tokens.ids(low, high)
        if tokens.starts is not None:
            numbers = np.arange(low, high)
            documents = np.searchsorted(tokens.starts, numbers, side="right") - 1
            arrays |= {"document_ids": tokens.document_ids[documents], "positions": numbers - tokens.starts[documents]}
        if n_padding:
            acts = np.concatenate([acts, np.zeros((n_padding, *acts.shape[1:]), acts.dtype)])
            for name, values in arrays.items():
                padding = np.full(n_padding, False if name == "mask" else _NONE, values.dtype)
                arrays[name] = np.concatenate([values, padding])
        examples = acts.reshape(*shape, tokens.n_layers, tokens.d_model).swapaxes(1, 2)
        yield Block(start, examples, {name: values.reshape(shape) for name, values in arrays.items()})


def check_starts(starts: IntArray, n_tokens: int, *, where: str) -> None:
    """Refuse starts of documents that do not cover all tokens. Documents may be empty: of equal starts the last one has the tokens.

    Raises:
        ArgumentError: they do not begin with 0, do not ascend, or go beyond the tokens.
    """
    if len(starts) == 0 or starts[0] != 0 or (np.diff(starts) < 0).any() or starts[-1] > n_tokens:
        raise ArgumentError(f"the documents do not cover the {n_tokens} tokens in order", where=where)
