"""Tokens that trainers leave out: the first of each context, and those whose vectors are much longer than the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from saev_store._runtime.threads import ahead, n_cores
from saev_store.core.arguments import check_flag, check_number
from saev_store.core.indexing import Progression
from saev_store.errors import ArgumentError, SelectionError, brief, kind_of
from saev_store.loaders._identity import sampled_rows
from saev_store.stats import store_stats
from saev_store.store.pair import PairSelection
from saev_store.store.selection import Selection
from saev_store.store.store import ShardStore
from saev_store.store.text import DOCUMENT_IDS, POSITIONS

#: Vectors whose norms are computed at once take about this many bytes, float32.
_PIECE_BYTES = 8 << 20

TokenMask = npt.NDArray[np.bool_]


def filtered(
    store: ShardStore, rows: Selection, *, remove_bos: bool = False, max_norm_multiple: float | None = None
) -> Selection:
    """The same rows without tokens that trainers leave out.

    What stays is known when this returns: lengths are exact, every loader takes the result, in its own order, and a state is for
    the same tokens. Special tokens stay.

    Args:
        store: The store of the rows.
        rows: `store.sel(…)`.
        remove_bos: Leave out the first token of each context; see `behind_bos`.
        max_norm_multiple: Leave out tokens whose vectors are longer than so many mean norms; see `below_norms`. The mean norm of each
            layer is that of the statistics of the store, which are computed and kept beside it if need be; where something was left out
            of `rows` before, that of a seeded sample of `rows`. The chosen layers are read once for it, now.

    Raises:
        SelectionError: special tokens are chosen; or the store does not record where documents begin, which `remove_bos` needs.
        ArgumentError: the multiple is not a positive number, or a mean norm is zero.
        CorruptShardError: a shard is missing, short, or differs from its digests.
    """
    if check_flag(remove_bos, name="remove_bos"):
        rows = _only(rows, behind_bos(rows))
    if max_norm_multiple is not None:
        multiple = check_number(max_norm_multiple, name="max_norm_multiple")
        rows = _only(rows, below_norms(rows, [multiple * norm for norm in mean_norms(store, rows)]))
    return rows


def _only(rows: Selection, stays: TokenMask) -> Selection:
    """The rows themselves where nothing more is left out: they are read faster, and a state of them goes on."""
    left = rows.only(stays)
    return rows if len(left) == len(rows) else left


def filtered_pair(
    stores: tuple[ShardStore, ShardStore],
    rows: PairSelection,
    *,
    remove_bos: bool = False,
    max_norm_multiple: float | None = None,
) -> PairSelection:
    """The same rows of two stores, without tokens that `filtered` leaves out of either."""
    a, b = (
        filtered(store, part, remove_bos=remove_bos, max_norm_multiple=max_norm_multiple)
        for store, part in zip(stores, (rows.a, rows.b), strict=True)
    )
    if a is rows.a and b is rows.b:
        return rows
    return PairSelection(a.only(b.kept), b.only(a.kept))


def behind_bos(rows: Selection) -> TokenMask:
    """Which content tokens are not the first of their context: bool (n_examples, content tokens), for `rows.only`.

    The first of a context is the example's special token, where there is one: then no content token is. Else it is content token 0, and
    in a stream of documents (`text["layout"]`) the first token of each document.

    Raises:
        SelectionError: special tokens are chosen, which cannot be left out one by one; or it is a stream that has neither `positions`
            nor `document_ids`.
    """
    _check_rows(rows)
    space, layout, arrays = rows.space, rows.space.layout, rows.token_arrays
    text = None if rows.metadata is None else rows.metadata.text
    stays = np.ones_like(rows.kept)
    if layout.n_special_tokens:
        if space.tokens.start == 0:
            raise SelectionError(
                "the special token is the first of each context", where="remove_bos", remedy="Choose tokens='content'."
            )
        return stays
    if (text or {}).get("layout") != "stream":
        stays[:, 0] = bool((text or {}).get("bos"))  # a copy without special tokens has no BOS either
        return stays
    if arrays is not None and POSITIONS in arrays:
        return arrays[POSITIONS] != 0
    if arrays is None or DOCUMENT_IDS not in arrays:
        raise SelectionError(
            "the store does not say where documents begin: it has neither positions nor document_ids",
            where="remove_bos",
            remedy="Record one of these token arrays, or pass tokens of your own to rows.only.",
        )
    ids, flat = arrays[DOCUMENT_IDS].reshape(-1), stays.reshape(-1)
    flat[0] = False
    np.equal(ids[1:], ids[:-1], out=flat[1:])
    return stays


def _check_rows(rows: Selection) -> None:
    if not isinstance(rows, Selection):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
        raise ArgumentError(f"rows is {kind_of(rows)}", where="rows", remedy="Pass store.sel(…).")


def mean_norms(store: ShardStore, rows: Selection) -> list[float]:
    """The mean L2 norm of the vectors of each chosen layer, without those that are not finite.

    By the statistics of the store; where something was left out of `rows`, or the store has lost examples, by a seeded sample of at most
    8,192 of them.

    Raises:
        ArgumentError: all of these vectors are zero, or none is finite.
        CorruptShardError: a shard is missing, short, or differs from its digests.
    """
    space = rows.space
    if space.ends is None and not store.readable_examples:
        stats = store_stats(store)
        found = [stats.mean_norm_of(key, "content") for key in rows.layer_keys]
    else:
        ends, found = space.ends, list[float]()
        ends = None if ends is None else ends // space.rows_per_token  # of one layer
        for layer in space.layer_idx:
            part = replace(space, layer_idx=(layer,), ends=ends, stacks_layers=False)
            norms = np.linalg.norm(sampled_rows(Selection(rows.reader, part)), axis=1)
            norms = norms[np.isfinite(norms)]
            found.append(float(norms.mean()) if len(norms) else 0.0)
    for key, norm in zip(rows.layer_keys, found, strict=True):
        if not norm > 0:
            raise ArgumentError(
                f"the vectors of layer {key} are all zero, or none of them is finite",
                where="max_norm_multiple",
                remedy="Leave out this layer, or max_norm_multiple.",
            )
    return found


def below_norms(rows: Selection, limits: Sequence[float]) -> TokenMask:
    """Which content tokens have no vector, among the chosen layers, whose L2 norm is above a limit, NaN or infinite.

    All vectors of the chosen layers and examples are read, by some threads, a few MiB at a time.

    Args:
        rows: The layers and examples; of examples that are not chosen all tokens are true.
        limits: The largest norm of each chosen layer, in their order.

    Returns:
        bool (n_examples, content tokens), for `rows.only`.

    Raises:
        ArgumentError: there is not one limit of at least 0 for each chosen layer.
        CorruptShardError: a shard is missing or short.

    >>> from saev_store import ShardStore
    >>> from saev_store.loaders import below_norms
    >>> rows = ShardStore.open(SAMPLE).sel(layer=5, tokens="content")
    >>> len(rows), len(rows.only(below_norms(rows, [1600.0])))
    (28, 20)
    """
    _check_rows(rows)
    try:
        largest = np.asarray(limits, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        largest = np.zeros(0)
    if largest.shape != (len(rows.space.layer_idx),) or not np.all(largest >= 0):
        raise ArgumentError(
            f"limits is {brief(limits)}; it must be a number of at least 0 for each of {len(rows.space.layer_idx)} chosen layers",
            where="limits",
        )
    squared = np.square(largest)
    layout = rows.space.layout
    tokens = Progression(layout.n_special_tokens, 1, layout.content_tokens_per_example)
    space = replace(rows.space, tokens=tokens, ends=None, labels=None, kept=None, condition=b"", stacks_layers=True)
    every = Selection(rows.reader, space)
    stays = np.ones_like(rows.kept)
    step = max(1, _PIECE_BYTES // (4 * space.vectors_per_row * layout.d_model))

    def below(first: int) -> TokenMask:
        """Of some rows."""
        vectors = every.rows(slice(first, first + step)).astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            return (np.vecdot(vectors, vectors) <= squared).all(axis=1)

    starts = range(0, len(space), step)
    for first, found in zip(starts, ahead(below, starts, n_cores()), strict=True):
        ordinal, token = np.divmod(np.arange(first, first + len(found)), np.int64(tokens.count))
        stays[space.example(ordinal), token] = found
    return stays
