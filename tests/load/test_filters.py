"""Tokens that are left out: the first that is shown of each context, and long vectors, beside NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from saev_store import ShardStore, new_metadata, pair
from saev_store.errors import ArgumentError, SelectionError
from saev_store.loaders import Loader, filtered

N, TOKENS, D = 6, 8, 4


def write(
    root: Path, *, text: dict[str, object] | None = None, cls: bool = False, arrays: dict[str, np.ndarray] | None = None,
    layers: tuple[int, ...] = (3,), scale: np.ndarray | float = 1.0,
) -> ShardStore:  # fmt: skip
    """A store of normal vectors, in which the first number of a vector is its token; `scale` multiplies (example, content token)."""
    given = arrays or {}
    metadata = new_metadata(
        family="gpt2", ckpt="x", layers=list(layers), content_tokens_per_example=TOKENS, cls_token=cls, d_model=D, n_examples=N,
        max_tokens_per_shard=2 * (TOKENS + cls) * len(layers), text=text,
        token_arrays={name: str(values.dtype) for name, values in given.items()} or None,
    )  # fmt: skip
    acts = np.random.default_rng(0).standard_normal((N, len(layers), TOKENS + cls, D), dtype=np.float32)
    acts[:, :, int(cls) :] *= np.broadcast_to(scale, (N, TOKENS))[:, None, :, None]
    with ShardStore.create(root, metadata, progress=False, on_nonfinite="allow") as writer:
        writer.append(acts, **given)
    return ShardStore.open(str(root / metadata.hash))


def left(store: ShardStore, **options: object) -> list[tuple[int, int]]:
    """The tokens that a loader of what passes hands out."""
    rows = filtered(store.sel(layer=3, tokens="content"), **options)
    with Loader(rows, order="stored", batch_size=5) as loader:
        found = [one for b in loader for one in zip(b["example_idx"].tolist(), b["token_idx"].tolist(), strict=True)]
    assert len(found) == len(rows)
    return found


def test_remove_bos_leaves_out_the_first_shown_token_of_each_context(tmp_path: Path) -> None:
    """Padding on the left, on the right, in a stream; one example is hidden as a whole."""
    rng = np.random.default_rng(1)
    mask = np.ones((N, TOKENS), bool)
    for example, n_padding in enumerate((0, 3, 7, 8, 2, 0)):
        mask[example, :n_padding] = False
    mask[5, 6:] = False
    documents = np.sort(rng.integers(0, 9, N * TOKENS)).reshape(N, TOKENS).astype(np.int64)
    positions = np.zeros((N, TOKENS), np.int32)
    flat = positions.reshape(-1)
    for at in range(1, flat.size):
        flat[at] = 0 if documents.flat[at] != documents.flat[at - 1] else flat[at - 1] + 1
    ids = np.zeros((N, TOKENS), np.int32)
    shown = [(e, t) for e in range(N) for t in range(TOKENS) if mask[e, t]]
    everything = [(e, t) for e in range(N) for t in range(TOKENS)]

    def firsts(tokens: list[tuple[int, int]], contexts: np.ndarray) -> list[tuple[int, int]]:
        seen: set[int] = set()
        return [one for one in tokens if not (contexts[one] in seen or seen.add(contexts[one]))]

    of_example = np.repeat(np.arange(N), TOKENS).reshape(N, TOKENS)
    table = [  # text, arrays, tokens that are shown, contexts
        ({"layout": "window"}, {"mask": mask, "token_ids": ids}, shown, of_example),
        ({"layout": "window"}, {"token_ids": ids}, everything, of_example),
        (None, None, everything, of_example),
        ({"layout": "stream"}, {"document_ids": documents, "token_ids": ids}, everything, documents),
        ({"layout": "stream"}, {"document_ids": documents, "token_ids": ids, "mask": mask}, shown, documents),
        ({"layout": "stream"}, {"positions": positions, "token_ids": ids, "mask": mask}, shown, documents),
    ]
    for number, (text, arrays, tokens, contexts) in enumerate(table):
        store = write(tmp_path / str(number), text=text, arrays=arrays)
        first = firsts(tokens, contexts)
        assert left(store, remove_bos=True) == [one for one in tokens if one not in first], number


def test_remove_bos_of_a_special_token_leaves_out_nothing_more(tmp_path: Path) -> None:
    store = write(tmp_path, cls=True)
    rows = store.sel(layer=3, tokens="content")
    assert filtered(rows, remove_bos=True) is rows
    for tokens in ("all", "special"):
        with pytest.raises(SelectionError) as caught:
            filtered(store.sel(layer=3, tokens=tokens), remove_bos=True)
        assert caught.value.where == "remove_bos"
    copied = write(
        tmp_path / "copy", text={"layout": "window", "bos": True}, arrays={"token_ids": np.zeros((N, TOKENS), np.int32)}
    )
    assert len(left(copied, remove_bos=True)) == N * TOKENS
    stream = write(tmp_path / "s", text={"layout": "stream"}, arrays={"token_ids": np.zeros((N, TOKENS), np.int32)})
    with pytest.raises(SelectionError) as caught:
        filtered(stream.sel(layer=3), remove_bos=True)
    assert caught.value.where == "remove_bos"


def test_max_norm_multiple_leaves_out_tokens_of_which_a_vector_is_long(tmp_path: Path) -> None:
    scale = np.ones((N, TOKENS))
    scale[2, 3], scale[4, 0] = 100.0, np.nan
    store = write(tmp_path, layers=(3, 7), scale=scale)
    for layer in (3, (7, 3), "all"):
        rows = store.sel(layer=layer)
        found = filtered(rows, max_norm_multiple=20)
        assert {(e, t) for e in range(N) for t in range(TOKENS) if not found.kept[e, t]} == {(2, 3), (4, 0)}
        assert len(found) == len(rows) - 2 * len(rows.layers)
    both = pair(store, store)
    rows = both.sel(layer_a=3, layer_b=7)
    assert len(filtered(rows, max_norm_multiple=20)) == len(rows) - 2
    assert filtered(rows, max_norm_multiple=1e6, remove_bos=False) is not rows  # NaN is never below
    # Of what is left, the mean norm is that of the rest.
    rest = filtered(store.sel(layer=3), max_norm_multiple=20)
    assert filtered(rest, max_norm_multiple=20) is rest
    exact = np.linalg.norm(store[:, 0].astype(np.float64), axis=-1)
    finite = exact[np.isfinite(exact)]
    assert len(filtered(store.sel(layer=3), max_norm_multiple=1)) == (finite <= finite.mean()).sum()


def test_filters_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    store = write(tmp_path)
    rows, zeros = store.sel(layer=3), write(tmp_path / "zeros", scale=0.0)
    for call, where in (
        (lambda: filtered(rows, remove_bos="yes"), "remove_bos"),
        (lambda: filtered(rows, max_norm_multiple=0), "max_norm_multiple"),
        (lambda: filtered(pair(store, store)), "rows"),
        (lambda: filtered(zeros.sel(layer=3), max_norm_multiple=2), "max_norm_multiple"),
        (lambda: filtered(store, remove_bos=True), "rows"),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.where == where
