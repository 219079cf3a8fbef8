"""Tokens that trainers leave out: the first of each context, and those whose vectors are much longer than the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from saev_store._runtime.threads import ahead, n_cores
from saev_store.core.arguments import check_flag, check_number
from saev_store.errors import ArgumentError, SelectionError, kind_of
from saev_store.loaders.sample import samples_by_layer
from saev_store.store.pair import PairSelection
from saev_store.store.selection import Selection
from saev_store.store.text import DOCUMENT_IDS, POSITIONS
from saev_store.store.token_arrays import MASK, TokenArrays

#: Vectors whose norms are computed at once take about this many bytes, float32.
_PIECE_BYTES = 8 << 20

TokenMask = npt.NDArray[np.bool_]
R = TypeVar("R", Selection, PairSelection)


def filtered(rows: R, *, remove_bos: bool = False, max_norm_multiple: float | None = None) -> R:
    """Return the same rows without tokens that trainers leave out; of a pair, without those that are left out of either.

    What is kept is known when this returns: lengths are exact, every loader takes the result, and a state is for the same tokens. Special
    tokens are kept.

    Args:
        rows: `store.sel(…)`, or `pair(a, b).sel(…)`.
        remove_bos: Leave out the first token of each context: of each example, or in a stream (`text["layout"]`) of each document. Tokens that
            the `mask` hides do not count. If the store has a special token, that is the first, and no content token is left out.
        max_norm_multiple: Leave out tokens with a vector in one of the chosen layers that is longer than so many mean norms of its layer, or
            not finite. The mean norm is that of a fixed, seeded sample of `rows`. The chosen layers are read once, now.

    Raises:
        SelectionError: special tokens are chosen; or the store does not record where documents begin, which `remove_bos` needs.
        ArgumentError: the multiple is not a positive number, or a mean norm is zero.
        CorruptShardError: a shard is missing or short.

    >>> from saev_store import ShardStore
    >>> from saev_store.loaders import filtered
    >>> store = ShardStore.open(SAMPLE)
    >>> rows = store.sel(layer=5, tokens="content", ignore_labels=[0])
    >>> len(rows), len(filtered(rows, max_norm_multiple=1.0))
    (28, 14)
    """
    check_flag(remove_bos, name="remove_bos")
    multiple = None if max_norm_multiple is None else check_number(max_norm_multiple, name="max_norm_multiple")
    if isinstance(rows, PairSelection):
        a, b = _filtered(rows.a, remove_bos, multiple), _filtered(rows.b, remove_bos, multiple)
        return rows if a is rows.a and b is rows.b else PairSelection(a.only(b.kept), b.only(a.kept))
    if not isinstance(rows, Selection):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
        raise ArgumentError(f"rows is {kind_of(rows)}", where="rows", remedy="Pass store.sel(…).")
    return _filtered(rows, remove_bos, multiple)


def _filtered(rows: Selection, remove_bos: bool, multiple: float | None) -> Selection:
    if remove_bos:
        rows = _only(rows, _behind_bos(rows))
    if multiple is not None:
        rows = _only(rows, _below(rows, np.square([multiple * norm for norm in _mean_norms(rows)])))
    return rows


def _only(rows: Selection, stays: TokenMask) -> Selection:
    """Return the rows without some tokens; the rows themselves if nothing more is left out, which are read faster."""
    left = rows.only(stays)
    return rows if len(left) == len(rows) else left


def _behind_bos(rows: Selection) -> TokenMask:
    """Return which content tokens are not the first of their context: bool (n_examples, content tokens)."""
    arrays, stays = rows.token_arrays, np.ones(rows.kept.shape, np.bool_)
    text = (None if rows.metadata is None else rows.metadata.text) or {}
    is_stream = text.get("layout") == "stream"
    if rows.space.layout.n_special_tokens:
        if rows.space.tokens.start == 0:
            raise SelectionError(
                "the special token is the first of each context", where="remove_bos", remedy="Choose tokens='content'."
            )
        return stays
    if text.get("bos") and not is_stream:
        return stays  # a copy without special tokens has no BOS
    shown = arrays[MASK] if arrays is not None and MASK in arrays else stays
    if not is_stream:
        stays[np.arange(len(stays)), shown.argmax(axis=1)] = False
        return stays
    places = np.flatnonzero(shown)
    context = np.cumsum(_document_starts(arrays).reshape(-1))[places]
    stays.reshape(-1)[places[np.diff(context, prepend=-1) != 0]] = False
    return stays


def _document_starts(arrays: TokenArrays | None) -> TokenMask:
    """Return which tokens of a stream begin a document: bool (n_examples, content tokens)."""
    if arrays is not None and POSITIONS in arrays:
        return arrays[POSITIONS] == 0
    if arrays is None or DOCUMENT_IDS not in arrays:
        raise SelectionError(
            "the store does not record where documents begin: it has neither positions nor document_ids",
            where="remove_bos",
            remedy="Record one of these token arrays, or pass tokens of your own to rows.only.",
        )
    ids = arrays[DOCUMENT_IDS].reshape(-1)
    return np.diff(ids, prepend=ids[0] - 1) != 0


def _mean_norms(rows: Selection) -> list[float]:
    """Return the mean L2 norm of the finite vectors of each chosen layer, of a seeded sample of at most 8,192."""
    found = list[float]()
    for key, sample in zip(rows.layer_keys, samples_by_layer(rows), strict=True):
        norms = np.linalg.norm(sample, axis=1)
        norms = norms[np.isfinite(norms)]
        if not norms.any():
            raise ArgumentError(
                f"the vectors of layer {key} are all zero, or none of them is finite", where="max_norm_multiple"
            )
        found.append(float(norms.mean()))
    return found


def _below(rows: Selection, squared: npt.NDArray[np.float64]) -> TokenMask:
    """Return which content tokens have no vector whose squared norm is above that of its layer; of examples that are not chosen all."""
    layout = rows.space.layout
    tokens = range(layout.n_special_tokens, layout.tokens_per_example)
    space = replace(rows.space, tokens=tokens, kept=None, stacks_layers=True)
    every, stays = Selection(rows.reader, space), np.ones(rows.kept.shape, np.bool_)
    step = max(1, _PIECE_BYTES // (4 * space.vectors_per_row * layout.d_model))

    def below(first: int) -> TokenMask:
        """Return which of some rows are below the limits."""
        vectors = every.rows(slice(first, first + step)).astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            return (np.vecdot(vectors, vectors) <= squared).all(axis=1)

    starts = range(0, len(space), step)
    for first, found in zip(starts, ahead(below, starts, n_cores()), strict=True):
        ordinal, token = np.divmod(np.arange(first, first + len(found)), np.int64(len(tokens)))
        stays[space.example(ordinal), token] = found
    return stays
