"""Tokens that trainers leave out: what stays is exactly what dense NumPy says, once an epoch, in a length that is known before."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from saev_store import ShardStore, new_metadata, pair  # after the check that torch is there
from saev_store.errors import ArgumentError, SelectionError  # after the check that torch is there
from saev_store.loaders import below_norms, filtered, filtered_pair, filters  # after the check that torch is there
from saev_store.loaders.filters import mean_norms  # after the check that torch is there
from saev_store.torch import (  # after the check that torch is there
    ConfigError,
    IndexedConfig,
    IndexedDataset,
    OrderedConfig,
    OrderedDataLoader,
    OrderedPairConfig,
    OrderedPairDataLoader,
    ShuffledConfig,
    ShuffledDataLoader,
    ShuffledPairConfig,
    ShuffledPairDataLoader,
)
from saev_store.writer.copying import copy_store  # after the check that torch is there

N, LAYERS, TOKENS, D_MODEL = 23, (2, 5, 9), 6, 8


def write(
    root: Path, acts: np.ndarray, *, cls: bool = False, arrays: dict[str, np.ndarray] | None = None, **more: object
) -> Path:
    """A store of these activations (example, layer, token, d_model)."""
    n, _, tokens, d_model = acts.shape
    dtypes = {name: str(values.dtype) for name, values in (arrays or {}).items()}
    if dtypes:
        more["token_arrays"] = dtypes
    metadata = new_metadata(
        family="gpt2", ckpt="filters", layers=LAYERS, content_tokens_per_example=tokens - cls, cls_token=cls, d_model=d_model,
        n_examples=n, max_tokens_per_shard=5 * tokens * len(LAYERS), **more,
    )  # fmt: skip
    with ShardStore.create(root, metadata, progress=False, on_nonfinite="allow") as writer:
        writer.append(acts, **(arrays or {}))
    return root / metadata.hash


def long_ones(seed: int = 0, *, cls: bool = False) -> np.ndarray:
    """Normal vectors, a sixth of them ten times as long, some not finite; CLS always is long."""
    rng = np.random.default_rng(seed)
    acts = rng.standard_normal((N, len(LAYERS), TOKENS + cls, D_MODEL), dtype=np.float32)
    acts[rng.random(acts.shape[:3]) < 1 / 6] *= 10
    acts[3, 1, 2 + cls, 0], acts[7, 0, 4 + cls, 1] = np.nan, np.inf
    acts[:, :, :cls] *= 100
    return acts


def expected(acts: np.ndarray, multiple: float, layers: list[int], *, first: int) -> np.ndarray:
    """Which tokens from `first` on have no long vector in these layers, by the mean of those: a dense mask (example, token)."""
    with np.errstate(invalid="ignore"):
        norms = np.sqrt((acts[:, layers].astype(np.float64) ** 2).sum(-1))
    looked_at = np.isfinite(norms)
    looked_at[:, :, :first] = False
    means = [norms[:, i][looked_at[:, i]].mean() for i in range(len(layers))]
    return (looked_at & (norms <= multiple * np.array(means)[:, None])).all(1)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("filters"), long_ones())


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("special"), long_ones(cls=True), cls=True)


def make(kind: str, store: Path, **more: object) -> OrderedDataLoader | ShuffledDataLoader:
    given = {"shards": store, "batch_size": 7, **more}
    if kind == "ordered":
        return OrderedDataLoader(OrderedConfig(**given))
    return ShuffledDataLoader(ShuffledConfig(window_bytes=3000, **given))


def tokens_of(batches) -> list[tuple[int, ...]]:
    """(example, token) of all rows, with several layers (example, token, layer)."""
    names = ("example_idx", "token_idx", "layer")
    columns = [[batch[name].tolist() for name in names if name in batch] for batch in batches]
    return [row for batch in columns for row in zip(*batch, strict=True)]


@given(
    multiple=st.floats(0.5, 12), layers=st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True),
    kind=st.sampled_from(["ordered", "shuffled"]), stacked=st.booleans(), bos=st.booleans(), drop_last=st.booleans(),
)  # fmt: skip
def test_what_passes_comes_once_an_epoch_and_the_length_is_known_before(
    plain: Path, multiple: float, layers: list[int], kind: str, stacked: bool, bos: bool, drop_last: bool
):
    acts = long_ones()
    stays = expected(acts, multiple, layers, first=int(bos))
    labels = tuple(LAYERS[i] for i in layers)
    loader = make(
        kind, plain, layer=labels, stack_layers=stacked, remove_bos=bos, max_norm_multiple=multiple, drop_last=drop_last
    )
    truth = {
        (e, t, *([] if stacked or len(layers) == 1 else [LAYERS[i]])): acts[e, layers if stacked else i, t]
        for e, t in np.argwhere(stays).tolist() for i in layers
    }  # fmt: skip
    assert loader.n_samples == len(truth)
    n_batches = len(truth) // 7 if drop_last else -(-len(truth) // 7)
    assert len(loader) == n_batches
    with loader:
        for _ in range(2):
            found = []
            for batch in loader:
                rows = tokens_of([batch])
                assert np.array_equal(batch["act"].numpy(), np.array([truth[row] for row in rows]))
                found += rows
            assert len(found) == len(set(found)) == (7 * n_batches if drop_last else len(truth))


@pytest.mark.parametrize("kind", ["ordered", "shuffled"])
def test_ranks_share_what_passes(plain: Path, kind: str):
    stays, found = expected(long_ones(), 2.0, [1], first=0), []
    for rank in range(2):
        with make(kind, plain, layer=5, max_norm_multiple=2.0, rank=rank, world=2, drop_last=True) as loader:
            assert len(loader) == int(stays.sum()) // 14
            found += tokens_of(loader)
    assert len(found) == len(set(found)) == int(stays.sum()) // 14 * 14
    assert all(stays[row] for row in found)


@pytest.mark.parametrize("kind", ["ordered", "shuffled"])
def test_a_state_goes_on_and_is_for_the_same_filter(plain: Path, kind: str):
    def batches(loader: object) -> list:
        return [batch["act"].tolist() for batch in loader]

    some = {"layer": (9, 2), "stack_layers": True, "remove_bos": True, "max_norm_multiple": 3.0}
    whole = batches(make(kind, plain, **some))
    loader = make(kind, plain, **some)
    for _ in itertools.islice(loader, 2):
        pass
    state = json.loads(json.dumps(loader.state_dict()))
    loader.close()
    other = make(kind, plain, **some)
    other.load_state_dict(state)
    assert batches(other) == whole[2:]
    for changed in ({"remove_bos": False}, {"max_norm_multiple": 1.5}, {"max_norm_multiple": None}):
        with pytest.raises(ArgumentError, match="rows"):
            make(kind, plain, **{**some, **changed}).load_state_dict(state)


def test_a_filter_that_leaves_nothing_out_changes_nothing(plain: Path, special: Path):
    """Not the order, not the state."""
    finite = {"layer": 9, "max_norm_multiple": 1000.0}
    assert make("shuffled", plain, **finite).state_dict() == make("shuffled", plain, layer=9).state_dict()
    assert (
        make("shuffled", special, layer=9, remove_bos=True).state_dict()
        == make("shuffled", special, layer=9).state_dict()
    )


def test_where_something_is_left_out_before_the_mean_norm_is_that_of_the_rest(tmp_path: Path):
    """Padding of zeros, which a mask hides, says nothing about vectors."""
    acts = long_ones()
    mask = np.random.default_rng(1).random((N, TOKENS)) < 0.3
    acts[np.broadcast_to(~mask[:, None], acts.shape[:3])] = 0
    store = write(tmp_path, acts, arrays={"mask": mask})
    norms = np.linalg.norm(acts[:, 2].astype(np.float64), axis=-1)
    stays = mask & (norms <= 2 * norms[mask].mean())
    assert (mask & (norms <= 2 * norms.mean())).sum() < stays.sum() < mask.sum()
    assert make("ordered", store, layer=9, max_norm_multiple=2.0).n_samples == stays.sum()


def test_special_tokens_stay(special: Path):
    stays = expected(long_ones(cls=True)[:, :, 1:], 2.0, [1], first=0)
    assert make("ordered", special, layer=5, tokens="all", max_norm_multiple=2.0).n_samples == stays.sum() + N
    for tokens in ("all", "special"):
        with pytest.raises(SelectionError, match="first of each context"):
            make("ordered", special, layer=5, tokens=tokens, remove_bos=True)
    with pytest.raises(SelectionError, match="special tokens alone"):
        make("ordered", special, layer=5, tokens="special", max_norm_multiple=2.0)


def test_special_tokens_alone_have_no_tokens_to_leave_out(
    special: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also where an example has as many content tokens as special ones, and in a copy of the special tokens."""
    acts = long_ones(cls=True)[:, :, :2]
    store = write(tmp_path, acts, cls=True)
    rows = ShardStore.open(store).sel(layer=5, tokens="special")
    with pytest.raises(SelectionError, match="special tokens alone"):
        rows.only(np.zeros((N, 1), bool))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for use_tmpdir, source in itertools.product((False, True), (store, special)):
        with pytest.raises(SelectionError, match="special tokens alone"):
            make("ordered", source, layer=5, tokens="special", max_norm_multiple=2.0, use_tmpdir=use_tmpdir)
    assert len(ShardStore.open(store).sel(layer=5).only(np.zeros((N, 1), bool))) == N
    assert len(ShardStore.open(store).sel(layer=5, tokens="content").only(np.zeros((N, 1), bool))) == 0


def test_where_bos_is_the_special_token_content_stays(special: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert make("ordered", special, layer=5, remove_bos=True).n_samples == N * TOKENS
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a copy of the content tokens alone
    assert make("ordered", special, layer=5, remove_bos=True, use_tmpdir=True).n_samples == N * TOKENS


@pytest.mark.parametrize(("bos", "first"), [(True, 0), (False, 1)])
def test_a_copy_of_the_content_tokens_has_no_bos(tmp_path: Path, bos: bool, first: int):
    """Where it was the special token of its source. Content that begins without BOS keeps the rule of the first token."""
    source = write(tmp_path / "source", long_ones(cls=True), cls=True, text={"layout": "window", "bos": bos})
    copy_store(source, tmp_path / "copy", tokens="content", progress=False)
    (copied,) = (tmp_path / "copy").iterdir()
    found = tokens_of(make("ordered", copied, layer=5, remove_bos=True))
    assert found == [(example, token) for example in range(N) for token in range(first, TOKENS)]


def test_in_a_stream_it_is_the_first_token_of_each_document(tmp_path: Path):
    rng = np.random.default_rng(2)
    ids = np.sort(rng.integers(0, 30, N * TOKENS)).reshape(N, TOKENS)
    positions = np.concatenate([np.arange(n) for n in np.unique(ids, return_counts=True)[1]]).reshape(N, TOKENS)
    acts, text = long_ones(), {"layout": "stream", "bos": False}
    wanted = [tuple(row) for row in np.argwhere(positions > 0).tolist()]
    for name, arrays in {
        "ids": {"document_ids": ids},
        "positions": {"positions": positions.astype(np.int32)},
    }.items():
        store = write(tmp_path / name, acts, arrays=arrays, text=text)
        assert tokens_of(make("ordered", store, layer=5, remove_bos=True)) == wanted
    store = write(tmp_path / "neither", acts, arrays={"token_ids": ids.astype(np.int32)}, text=text)
    with pytest.raises(SelectionError, match="where documents begin"):
        make("ordered", store, layer=5, remove_bos=True)


def test_a_pair_leaves_out_what_either_store_leaves_out(tmp_path: Path):
    a, b = (write(tmp_path / str(seed), long_ones(seed), data={"seed": seed}) for seed in (0, 1))
    # What the two masks leave, each by the mean norms of its own store.
    stays = expected(long_ones(0), 2.0, [0], first=1) & expected(long_ones(1), 2.0, [2, 1], first=1)
    some = {"shards_a": a, "shards_b": b, "layer_a": 2, "layer_b": (9, 5), "max_norm_multiple": 2.0, "batch_size": 7}
    for loader in (
        OrderedPairDataLoader(OrderedPairConfig(**some, remove_bos=True)),
        ShuffledPairDataLoader(ShuffledPairConfig(**some, remove_bos=True)),
    ):
        with loader:
            found = tokens_of(loader)
        assert sorted(found) == [tuple(row) for row in np.argwhere(stays).tolist()]
        assert loader.n_samples == len(found)
        with loader:
            for batch in loader:  # vectors of both are of the same tokens
                example, token = batch["example_idx"].numpy(), batch["token_idx"].numpy()
                assert np.array_equal(batch["act_a"].numpy(), long_ones(0)[example, 0, token])
                assert np.array_equal(batch["act_b"].numpy(), long_ones(1)[:, [2, 1]][example, :, token])


@pytest.mark.parametrize("side", [0, 1])
def test_a_pair_leaves_out_what_only_one_store_leaves_out(side: int, tmp_path: Path) -> None:
    acts = [np.ones((N, len(LAYERS), TOKENS, D_MODEL), np.float32) for _ in range(2)]
    acts[side][3, :, 2] = 100
    stores = [ShardStore.open(write(tmp_path / str(i), acts[i], data={"side": i})) for i in range(2)]
    rows = pair(*stores).sel(layer_a=2, layer_b=5, tokens="content")
    left = filtered_pair((stores[0], stores[1]), rows, max_norm_multiple=5.0)
    stays = np.ones((N, TOKENS), bool)
    stays[3, 2] = False
    for part in (left.a, left.b):
        assert len(part) == N * TOKENS - 1
        np.testing.assert_array_equal(part.kept, stays)


def test_random_access_has_the_same_rows(plain: Path):
    some = {"shards": plain, "layer": (5, 9), "remove_bos": True, "max_norm_multiple": 2.5}
    dataset = IndexedDataset(IndexedConfig(**some))
    batch = next(iter(OrderedDataLoader(OrderedConfig(**some, batch_size=1000))))
    assert len(dataset) == len(batch["act"])
    assert torch.equal(dataset.batch(range(len(dataset)))["act"], batch["act"])


def test_what_makes_no_sense_is_refused(plain: Path, tmp_path: Path):
    for multiple in (0, -1.0, np.inf, np.nan, "2"):
        with pytest.raises(ConfigError, match="max_norm_multiple"):
            OrderedConfig(shards=plain, max_norm_multiple=multiple)
    store = ShardStore.open(plain)
    rows = store.sel(layer=5, tokens="content")
    with pytest.raises(ArgumentError, match="max_norm_multiple"):
        filtered(store, rows, max_norm_multiple=-1)
    with pytest.raises(ArgumentError, match="remove_bos"):
        filtered(store, rows, remove_bos="no")
    zeros = write(tmp_path, np.zeros((N, 3, TOKENS, D_MODEL), np.float32), arrays={"mask": np.ones((N, TOKENS), bool)})
    with pytest.raises(ArgumentError, match="all zero"):
        make("ordered", zeros, layer=5, max_norm_multiple=2.0)
    with pytest.raises(ArgumentError, match="all zero"):
        make("ordered", zeros, layer=5, max_norm_multiple=2.0, masked=True)
    for tokens in (np.ones((N, TOKENS)), np.ones((TOKENS, N), bool), np.ones(N, bool)):
        with pytest.raises(SelectionError, match="it must be bool"):
            rows.only(tokens)
    with pytest.raises(SelectionError, match="it must be bool"):
        pair(store, store).sel(layer_a=5, layer_b=2).only(np.ones((TOKENS, N), bool))


@pytest.mark.parametrize("cls", [False, True])
def test_a_vector_stays_that_is_just_as_long_as_the_limit(cls: bool, tmp_path: Path) -> None:
    """Vectors of norm 5 and of the next larger float32: the limit of each layer is its own."""
    acts = np.zeros((2, len(LAYERS), TOKENS + cls, D_MODEL), np.float32)
    acts[..., 0], acts[..., 1] = 3, 4
    acts[0, 1, cls + 1, 0] = np.nextafter(np.float32(3), np.float32(4))
    acts[1, 0, cls + 2, 2] = 1
    store = ShardStore.open(write(tmp_path, acts, cls=cls))
    truth = np.ones((2, TOKENS), bool)
    truth[0, 1] = False
    np.testing.assert_array_equal(below_norms(store.sel(layer=5, tokens="content"), [5.0]), truth)
    truth[1, 2] = False
    np.testing.assert_array_equal(below_norms(store.sel(layer="all", tokens="content"), [5.0, 5.0, 5.0]), truth)
    np.testing.assert_array_equal(
        below_norms(store.sel(layer=(5, 2), tokens="content"), [6.0, 5.0]), truth | (np.arange(2) == 0)[:, None]
    )
    assert not below_norms(store.sel(layer=9, tokens="content"), [np.nextafter(5.0, 0)]).any()
    for limit in (-5.0, np.nan):
        with pytest.raises(ArgumentError, match="a number of at least 0 for each of 1 chosen layers"):
            below_norms(store.sel(layer=9, tokens="content"), [limit])
    assert below_norms(store.sel(layer=9, tokens="content", examples=[1]), [4.0]).tolist() == [
        [True] * TOKENS,
        [False] * TOKENS,
    ]


@pytest.mark.parametrize("rows_at_once", [1, 2, 5])
def test_every_piece_of_the_vectors_is_told_by_its_own_examples(
    rows_at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some tokens are read at a time, of two layers; pieces end within an example and at its end."""
    acts = np.ones((N, len(LAYERS), TOKENS, D_MODEL), np.float32)
    truth = np.ones((N, TOKENS), bool)
    for layer, example, token in ((0, 0, 1), (1, 1, 0), (0, N - 2, TOKENS - 1), (1, N - 1, 2)):
        acts[example, layer, token, 3] = 100
        truth[example, token] = False
    rows = ShardStore.open(write(tmp_path, acts)).sel(layer=LAYERS[:2], tokens="content", examples=[N - 1, 0, N - 2])
    truth[1] = True  # of an example that is not chosen
    monkeypatch.setattr(filters, "_PIECE_BYTES", rows_at_once * 2 * D_MODEL * 4)
    np.testing.assert_array_equal(below_norms(rows, [50.0, 50.0]), truth)


def test_rows_of_which_nothing_is_left_out_are_the_same_object(plain: Path) -> None:
    """They are read faster, and a state of them goes on."""
    store = ShardStore.open(plain)
    rows = store.sel(layer=9, tokens="content")  # all of them are finite
    assert filtered(store, rows) is rows
    assert filtered(store, rows, max_norm_multiple=1e6) is rows
    assert filtered(store, rows, max_norm_multiple=2.0) is not rows
    both = pair(store, store).sel(layer_a=9, layer_b=9)
    assert filtered_pair((store, store), both) is both
    assert filtered_pair((store, store), both, max_norm_multiple=1e6) is both
    assert filtered_pair((store, store), both, max_norm_multiple=2.0) is not both


def test_what_was_left_out_before_is_not_left_out_again(plain: Path) -> None:
    """Neither tokens that are hidden, nor examples that are not chosen, make another selection of the same rows."""
    store = ShardStore.open(plain)
    every = store.sel(layer=5, tokens="content")
    some = filtered(store, every, remove_bos=True, max_norm_multiple=2.0)  # also without what is not finite
    assert 0 < len(some) < len(every)
    assert filtered(store, some, remove_bos=True) is some
    assert filtered(store, some, max_norm_multiple=1e6) is some
    short = below_norms(every, [2 * mean_norms(store, every)[0]]).all(axis=1)
    chosen = store.sel(layer=5, tokens="content", examples=np.flatnonzero(short))
    assert 0 < chosen.space.n_examples < N
    assert filtered(store, chosen, max_norm_multiple=2.0) is chosen


@pytest.mark.parametrize("stacked", [False, True])
def test_mean_norms_are_those_of_the_rows_that_are_left(plain: Path, stacked: bool) -> None:
    """Fewer than are sampled, so the mean is that of all of them, layer by layer."""
    store, left = ShardStore.open(plain), np.random.default_rng(5).random((N, TOKENS)) < 0.6
    rows = store.sel(layer=(5, 9), tokens="content", stack_layers=stacked).only(left)
    norms = np.linalg.norm(long_ones()[:, 1:].astype(np.float64), axis=-1)
    truth = [norms[:, layer][left & np.isfinite(norms[:, layer])].mean() for layer in range(2)]
    np.testing.assert_allclose(mean_norms(store, rows), truth, rtol=1e-6)


def test_rows_that_are_left_out_change_nothing_else(tmp_path: Path):
    store = ShardStore.open(write(tmp_path, long_ones()))
    rows = store.sel(layer=(5, 2), tokens="content", dtype="float64", stack_layers=True)
    left = rows.only(np.ones_like(rows.kept))
    assert left.metadata is rows.metadata is store.metadata
    assert left.token_arrays is rows.token_arrays is store.token_arrays
    assert left.reader is rows.reader
    assert (left.dtype, left.shape, left.layer_keys) == (rows.dtype, rows.shape, rows.layer_keys)
