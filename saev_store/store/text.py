"""Texts in a store: the tokens of one document, out of a stream or windows, and the tokens around one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from saev_store.core.arguments import check_flag
from saev_store.core.dtypes import ReadDtype, read_dtype
from saev_store.core.layout import IntArray, check_position
from saev_store.core.rows import Layers, row_space
from saev_store.errors import SelectionError
from saev_store.store.opening import OpenedStore
from saev_store.store.reader import FloatArray
from saev_store.store.selection import prepared
from saev_store.store.token_arrays import MASK, TokenValues

#: The token arrays with the document of a token, its position in it, and its id.
DOCUMENT_IDS, POSITIONS, TOKEN_IDS = "document_ids", "positions", "token_ids"
#: Document ids are compared in pieces of this many.
_PIECE = 4 << 20


@dataclass(frozen=True, eq=False)
class TextDocument:
    """The tokens of one document, in order.

    Attributes:
        document_id: Its id in the token array `document_ids`.
        layers: Labels of the chosen layers.
        acts: Their vectors, a fresh array (layers, tokens, d_model).
        token_arrays: Name to what was recorded for the tokens, each (tokens,) and of the array's dtype.
        example_idx: The example of each token, int64 (tokens,).
        token_idx: The content token in it, int64 (tokens,).
    """

    document_id: int
    layers: tuple[int, ...]
    acts: FloatArray
    token_arrays: Mapping[str, TokenValues]
    example_idx: IntArray
    token_idx: IntArray

    def __len__(self) -> int:
        """Tokens of the document."""
        return len(self.example_idx)


@dataclass(frozen=True)
class TokenContext:
    """A token of a text, and those around it in its document.

    Attributes:
        document_id: The document; None where the store has no `document_ids`: the text is then the example.
        position: Its position in the document, as recorded; None where the store has no `positions`.
        token_id: Its id.
        before: The ids before it, nearest last.
        after: The ids after it, nearest first.
    """

    document_id: int | None
    position: int | None
    token_id: int
    before: tuple[int, ...]
    after: tuple[int, ...]


class DocumentRuns:
    """Places of the tokens of each document: runs of neighbouring content tokens, sorted by document; 24 bytes for each run.

    `ids` is the token array `document_ids`, (n_examples, content tokens).
    """

    def __init__(self, ids: TokenValues) -> None:
        self.source = ids
        flat = ids.reshape(-1)
        # One number more than a piece: that the next piece begins with another document is seen in this one.
        pieces = [flat[first : first + _PIECE + 1] for first in range(0, len(flat), _PIECE)]
        changes = [np.flatnonzero(piece[1:] != piece[:-1]) + i * _PIECE + 1 for i, piece in enumerate(pieces)]
        starts = np.concatenate([np.zeros(1, np.int64), *changes])
        order = np.argsort(flat[starts], kind="stable")
        self._ids = cast("IntArray", flat[starts][order])
        self._starts, self._ends = starts[order], np.append(starts[1:], len(flat))[order]

    def tokens_of(self, document_id: int) -> IntArray:
        """The content tokens of a document, numbered through all examples, in storage order; empty if there is none."""
        wanted = np.int64(document_id)
        some = slice(np.searchsorted(self._ids, wanted, "left"), np.searchsorted(self._ids, wanted, "right"))
        runs = zip(self._starts[some].tolist(), self._ends[some].tolist(), strict=True)
        pieces: list[IntArray] = [np.arange(start, end, dtype=np.int64) for start, end in runs]
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)


class TextReading(OpenedStore):
    """Documents and contexts of an opened store of texts; a part of `ShardStore`."""

    _runs: DocumentRuns | None = None

    def document(
        self, document_id: int, *, layer: Layers = "all", dtype: ReadDtype = "float32", masked: bool = False
    ) -> TextDocument:
        """All tokens of one document: their vectors, and what was recorded for them.

        They are in the order of `positions`; in storage order where the store has none. Where windows overlap, so that a position was
        recorded several times, the token that is furthest into its example is taken, which saw most of the text.

        Args:
            document_id: As in the token array `document_ids`; negative ids mean no document.
            layer: As in `sel`.
            dtype: Of the vectors that come out, as in `read`.
            masked: Also tokens whose `mask` is false, in stores that record one.

        Raises:
            SelectionError: the store has no `document_ids`, or no token of that document.
            LayerNotFoundError: a layer was not recorded.
            ArgumentError: `masked` is not a boolean, or there is no such dtype.
        """
        arrays, layout = self.token_arrays, self.layout
        document_id = check_position(document_id, 2**63, "document_id")
        numbers = self._document_runs().tokens_of(document_id)
        if not check_flag(masked, name="masked") and MASK in arrays:
            numbers = numbers[arrays[MASK].reshape(-1)[numbers].astype(np.bool_)]
        if not len(numbers):
            raise SelectionError(
                f"no token is of document {document_id}, or the mask hides all of them",
                where="document_id",
                remedy='`numpy.unique(store.token_arrays["document_ids"])` lists the documents.',
            )
        numbers = self._in_order(numbers)
        example, token = np.divmod(numbers, np.int64(layout.content_tokens_per_example))
        layer_idx, n = row_space(layout, layer=layer, tokens="content").layer_idx, len(numbers)
        out = prepared(None, (len(layer_idx), n, layout.d_model), read_dtype(dtype, layout.dtype))
        for position, acts in zip(layer_idx, out, strict=True):
            part = self._reader.planner.rows(example, np.full(n, position), token + layout.n_special_tokens)
            self._reader.execute([part], acts)
        return TextDocument(
            document_id, tuple(layout.layers[position] for position in layer_idx), out,
            {name: values.reshape(-1)[numbers] for name, values in arrays.items()}, example, token,
        )  # fmt: skip

    def context(self, example_idx: int, token_idx: int, *, before: int = 8, after: int = 8) -> TokenContext:
        """The document of a token, its position in it, and the token ids around it in the same document.

        Tokens that the `mask` hides are part of the text. No activations are read.

        Args:
            example_idx: Position of the example, as in the batches of loaders.
            token_idx: The content token, from 0.
            before: At most so many ids before it.
            after: At most so many ids after it.

        Raises:
            SelectionError: there is no such token, it is padding, or the store has no `token_ids`, or as a stream no
                `document_ids`.
        """
        before, after = check_position(before, 2**63, "before"), check_position(after, 2**63, "after")
        arrays, width = self.token_arrays, self.layout.content_tokens_per_example
        token_ids = self._named(TOKEN_IDS)
        first = check_position(example_idx, self.layout.n_examples, "example_idx") * width
        number = first + check_position(token_idx, width, "token_idx")
        document_id, numbers = None, np.arange(first, first + width)
        if DOCUMENT_IDS in arrays or (self.metadata.text or {}).get("layout") == "stream":
            document_id = int(self._named(DOCUMENT_IDS)[number])
            if document_id < 0:
                raise SelectionError(
                    f"token {token_idx} of example {example_idx} is padding: it is of no document", where="token_idx"
                )
            numbers = self._in_order(self._document_runs().tokens_of(document_id))
        position, at = None, int(np.searchsorted(numbers, number))
        if POSITIONS in arrays:
            positions = self._named(POSITIONS)
            position = int(positions[number])
            if document_id is not None:  # in order of positions, each once
                at = int(np.searchsorted(positions[numbers], position))
        return TokenContext(
            document_id, position, int(token_ids[number]),
            tuple(token_ids[numbers[max(0, at - before) : at]].tolist()),
            tuple(token_ids[numbers[at + 1 : at + 1 + after]].tolist()),
        )  # fmt: skip

    def _document_runs(self) -> DocumentRuns:
        self._named(DOCUMENT_IDS)
        ids = self.token_arrays[DOCUMENT_IDS]
        if self._runs is None or self._runs.source is not ids:  # arrays are read again after the store was closed
            self._runs = DocumentRuns(ids)
        return self._runs

    def _in_order(self, numbers: IntArray) -> IntArray:
        """Tokens of one document sorted by position, each position once."""
        if POSITIONS not in self.token_arrays:
            return numbers
        positions = self._named(POSITIONS)[numbers]
        order = np.lexsort((-(numbers % self.layout.content_tokens_per_example), positions))
        positions = positions[order]
        return numbers[order][np.append(True, positions[1:] != positions[:-1])]

    def _named(self, name: str) -> npt.NDArray[np.generic]:
        """A token array that texts need, flat; `SelectionError` if it was not recorded."""
        if name not in self.token_arrays:
            raise SelectionError(
                f"the store has no token array {name}; it has {list(self.token_arrays)}",
                where=name,
                remedy="Record it: new_metadata(..., token_arrays={...}), writer.append(acts, ...).",
            )
        return self.token_arrays[name].reshape(-1)
