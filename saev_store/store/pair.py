"""Two stores of the same tokens: `pair` checks that they are, and selections take the same rows of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from saev_store.core.dtypes import ReadDtype
from saev_store.core.rows import Coordinates, Layers, TokenMask, Tokens, are_several
from saev_store.errors import ArgumentError, SelectionError, kind_of
from saev_store.store.reader import FloatArray
from saev_store.store.selection import Selection
from saev_store.store.store import ShardStore

#: Token arrays that identify the tokens of a store.
_SAME = ("token_ids", "document_ids")
#: Token arrays are compared in pieces of about this many values.
_PIECE = 4 << 20


class PairRows(NamedTuple):
    """The same rows of two stores, each (n, d_model), or (n, layers, d_model) where several layers were chosen."""

    act_a: FloatArray
    act_b: FloatArray


class PairSelection:
    """The same rows of two stores: what `pair(…).sel(…)` returns.

    Row i of `a` and row i of `b` are of the same example and the same token. Rows are by example, in it by token.

    Attributes:
        a, b: The rows of each store; `selection.a.layers` has their layers.
    """

    def __init__(self, a: Selection, b: Selection) -> None:
        self.a, self.b = a, b

    def __len__(self) -> int:
        return len(self.a)

    def only(self, tokens: TokenMask) -> PairSelection:
        """The same rows without those of some content tokens; see `Selection.only`."""
        return PairSelection(self.a.only(tokens), self.b.only(tokens))

    def rows(self, rows: object) -> PairRows:
        """The vectors of many rows of both stores, in the order given; see `Selection.rows`."""
        return PairRows(self.a.rows(rows), self.b.rows(rows))

    def coordinates(self, rows: object = slice(None)) -> Coordinates:
        """Example and content token of rows, which are those of both stores, and layer labels of `a`."""
        return self.a.coordinates(rows)

    def __repr__(self) -> str:
        return f"<PairSelection of {self.a!r} and {self.b!r}>"


class StorePair(NamedTuple):
    """Two stores of the same tokens; made by `pair`."""

    a: ShardStore
    b: ShardStore

    def sel(
        self, *, layer_a: Layers, layer_b: Layers, tokens: Tokens = "content", examples: object = None,
        ignore_labels: Sequence[int] | None = None, where: Mapping[str, object] | None = None, masked: bool = False,
        dtype: ReadDtype = "float32",
    ) -> PairSelection:  # fmt: skip
        """The same rows of both stores, chosen by label as in `ShardStore.sel`.

        Args:
            layer_a: Which layer of `a`: a label gives rows (d_model,); several of them, or `"all"`, are stacked in a row (layers,
                d_model).
            layer_b: The same of `b`.
            tokens: `"content"`, `"special"` (CLS) or `"all"`.
            examples: Positions: all by default, else an integer, slice, list or boolean mask.
            ignore_labels: Leave out content tokens that carry one of these labels in `a`.
            where: Only content tokens whose token arrays in `a` have these values.
            masked: Choose also content tokens whose `mask` is false in one of the stores.
            dtype: Of the vectors that come out.

        Raises:
            LayerNotFoundError, SelectionError: one of the stores does not hold this.
        """
        a = self.a.sel(
            layer=layer_a, tokens=tokens, examples=examples, ignore_labels=ignore_labels, where=where, masked=masked,
            dtype=dtype, stack_layers=are_several(layer_a),
        )  # fmt: skip
        b = self.b.sel(
            layer=layer_b, tokens=tokens, examples=examples, masked=masked, dtype=dtype,
            stack_layers=are_several(layer_b),
        )  # fmt: skip
        if len(a.space.tokens) != len(b.space.tokens):
            raise SelectionError(
                "only one of the stores has a special token (CLS)", where="tokens", remedy="Use tokens='content'."
            )
        if a.space.kept is None and b.space.kept is None:
            return PairSelection(a, b)
        return PairSelection(a.only(b.kept), b.only(a.kept))


def pair(a: ShardStore, b: ShardStore) -> StorePair:
    """Two stores of the same tokens, such as of two models or of two places in one model, to select the same rows of both.

    The layers and `d_model` may differ, and so may the protocol, the dtype and the shards. `token_ids` and `document_ids` are
    read and compared where both stores have them.

    Raises:
        ArgumentError: the stores are of other examples or tokens; the message names what differs.

    >>> from saev_store import ShardStore, pair
    >>> store = ShardStore.open(SAMPLE)
    >>> rows = pair(store, store).sel(layer_a=5, layer_b=(2, 11))
    >>> found = rows.rows([0, 27])
    >>> found.act_a.shape, found.act_b.shape
    ((2, 8), (2, 2, 8))
    """
    for name, store in (("a", a), ("b", b)):
        if not isinstance(store, ShardStore):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
            raise ArgumentError(f"{name} is {kind_of(store)}; it must be a ShardStore", where=name)
    different = next(_differences(a, b), None)
    if different:
        raise ArgumentError(
            f"{a.url} and {b.url} are not of the same tokens: {different}",
            where="pair",
            remedy="Record both from the same data, in the same order.",
        )
    return StorePair(a, b)


def _differences(a: ShardStore, b: ShardStore) -> Iterator[str]:
    """The numbers of examples and tokens, and the first token of each token array that both stores have, if they differ."""
    for name in ("n_examples", "content_tokens_per_example"):
        if (one := getattr(a.layout, name)) != (other := getattr(b.layout, name)):
            yield f"{name} is {one} and {other}"
    step = max(1, _PIECE // a.layout.content_tokens_per_example)
    for name in _SAME:
        if name not in a.token_arrays or name not in b.token_arrays:
            continue
        first, second = a.token_arrays[name], b.token_arrays[name]
        for start in range(0, len(first), step):
            differs = np.argwhere(first[start : start + step] != second[start : start + step])
            if len(differs):
                yield f"{name} of example {start + differs[0, 0]}, content token {differs[0, 1]} differs"
