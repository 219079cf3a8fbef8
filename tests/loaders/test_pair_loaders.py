"""Loaders of two stores of the same tokens: the same rows of both in each batch, and every promise of a loader of one."""

from __future__ import annotations

import itertools
import json
import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_stores import Plain, plain_store
from stacked import DTYPES, Stacked, another_store, stacked_rows

from saev_store import PairSelection, ShardStore, new_metadata, pair
from saev_store.errors import ArgumentError, MissingShardError, TransportError
from saev_store.loaders import OrderedLoader, OrderedPairLoader, ShuffledLoader, ShuffledPairLoader
from saev_store.loaders._iteration import Iteration

ALONE = {OrderedPairLoader: OrderedLoader, ShuffledPairLoader: ShuffledLoader}


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Stacked, Stacked]:
    """The same rows of two stores of other layers, numbers and shards."""
    a = draw(stacked_rows(repeats=False))
    other = {"d_model": st.integers(2, 5), "dtype": st.sampled_from(list(DTYPES)), "n_layers": st.integers(1, 3)}
    return a, another_store(a, examples_per_shard=draw(st.integers(1, 8)), **{n: draw(s) for n, s in other.items()})


@st.composite
def options_of(draw: st.DrawFn, n_rows: int) -> tuple[type, int, dict[str, object]]:
    """(kind, world, options) that go together."""
    world, batch_size = draw(st.integers(1, 3)), draw(st.integers(1, 30))
    drop_last = draw(st.booleans()) or n_rows < world
    shared = {"batch_size": batch_size, "drop_last": drop_last, "n_threads": 1}
    if draw(st.booleans()):
        return OrderedPairLoader, world, shared
    fitting = [n for n in range(world, 9, world) if world * batch_size % n == 0 and (drop_last or n <= n_rows)]
    more = {
        "seed": draw(st.integers(0, 5)),
        "examples_per_block": draw(st.sampled_from([None, 1, 3])),
        "n_partitions": draw(st.sampled_from([None, *fitting])),
        **draw(st.sampled_from([{"window_blocks": 2}, {"window_blocks": 5}, {"window_bytes": 1400}, {}])),
    }
    return ShuffledPairLoader, world, {**shared, **more}


def rows_of(a: Stacked, b: Stacked) -> PairSelection:
    return PairSelection(a.selection(), b.selection())


def handed_out(a: Stacked, b: Stacked, loader) -> list[list[tuple[int, int]]]:
    """(example, token on the token axis) of the rows of each batch, whose vectors are those of both tensors."""
    found = []
    for batch in loader:
        assert list(batch) == ["act_a", "act_b", "example_idx", "token_idx"]
        example, token = batch["example_idx"], batch["token_idx"] + a.layout.n_special_tokens
        for act, case in ((batch["act_a"], a), (batch["act_b"], b)):
            truth = case.acts[example[:, None], case.layer_idx, token[:, None]].astype(case.dtype)
            assert (act.dtype, act.shape) == (truth.dtype, truth.shape)
            assert np.array_equal(act.view(np.uint8), truth.view(np.uint8))
        found.append(list(zip(example.tolist(), token.tolist(), strict=True)))
    return found


@given(pairs(), st.data())
def test_exactly_once_over_ranks(case: tuple[Stacked, Stacked], data: st.DataObject):
    a, b = case
    kind, world, options = data.draw(options_of(len(a.where)))
    ranks = []
    for rank in range(world):
        with kind(rows_of(a, b), rank=rank, world=world, **options) as loader:
            ranks.append(handed_out(a, b, loader))
            assert len(ranks[-1]) == len(loader) == loader.n_batches
            assert (loader.epoch, loader.next_batch, loader.n_samples) == (1 if len(loader) else 0, 0, len(a.where))
            assert (loader.rank, loader.world, loader.batch_size) == (rank, world, options["batch_size"])
    assert all([len(batch) for batch in mine] == [len(batch) for batch in ranks[0]] for mine in ranks)
    counts = Counter(place for batches in ranks for where in batches for place in where)
    if options["drop_last"]:
        at_once = world * options["batch_size"]
        assert sum(counts.values()) == len(a.where) // at_once * at_once
        assert max(counts.values(), default=1) == 1
    else:
        assert counts.keys() == set(a.where)
        assert sum(counts.values()) - len(a.where) < 9
        assert world > 1 or max(counts.values(), default=1) == 1


@given(pairs(), st.data())
def test_the_order_is_that_of_one_store(case: tuple[Stacked, Stacked], data: st.DataObject):
    """With a window of as many blocks."""
    a, b = case
    kind, world, options = data.draw(options_of(len(a.where)))
    rank = data.draw(st.integers(0, world - 1))
    with kind(rows_of(a, b), rank=rank, world=world, **options) as loader:
        found, state = handed_out(a, b, loader), loader.state_dict()
    if kind is ShuffledPairLoader:
        options.pop("window_bytes", None)
        options |= {name: state["a"][name] for name in ("examples_per_block", "n_partitions", "window_blocks")}
    for alone in (a.selection(), b.selection(), a.one_layer()):
        with ALONE[kind](alone, rank=rank, world=world, **options) as loader:
            expected = [
                list(zip(batch["example_idx"].tolist(), (batch["token_idx"] + a.layout.n_special_tokens).tolist(), strict=True))
                for batch in loader
            ]  # fmt: skip
        assert found == expected


@given(pairs(), st.data())
def test_resuming_anywhere_on_any_ranks(case: tuple[Stacked, Stacked], data: st.DataObject):
    a, b = case
    kind, world, options = data.draw(options_of(len(a.where)))
    size, options["drop_last"] = options.pop("batch_size"), True
    others = [n for n in range(1, 5) if world * size % n == 0]
    if kind is ShuffledPairLoader:
        options["n_partitions"] = options["n_partitions"] or world
        others = [n for n in others if options["n_partitions"] % n == 0]
    now = data.draw(st.sampled_from(others))
    whole = []
    for rank in range(world):
        with kind(rows_of(a, b), rank=rank, world=world, batch_size=size, **options) as loader:
            whole.append(handed_out(a, b, itertools.chain(loader, loader)))
    with kind(rows_of(a, b), rank=0, world=world, batch_size=size, **options) as loader:
        n_batches, iterator = len(loader), iter(loader)
        stop = data.draw(st.integers(0, n_batches))
        for _ in range(stop):
            next(iterator)
        assert (loader.epoch, loader.next_batch) == ((1, 0) if stop == n_batches > 0 else (0, stop))
        text = json.dumps(loader.state_dict())
        assert len(text) < 2000
    parts = []
    for rank in range(now):
        options_now = {**options, "window_bytes": 1 << 20} if "window_bytes" in options else options
        with kind(rows_of(a, b), rank=rank, world=now, batch_size=world * size // now, **options_now) as loader:
            loader.load_state_dict(json.loads(text))
            if now == world:
                assert loader.state_dict() == json.loads(text)
            parts.append(handed_out(a, b, loader))
    n_left = n_batches if stop == n_batches else n_batches - stop
    rest = [sorted(place for rank in whole for place in rank[stop + n]) for n in range(n_left)]
    assert [sorted(place for rank in parts for place in rank[n]) for n in range(len(parts[0]))] == rest
    if now == world:
        assert parts == [rank[stop : stop + n_left] for rank in whole]


@pytest.fixture
def stores(tmp_path) -> tuple[Plain, Plain]:
    a = plain_store(tmp_path / "a", n=43, tokens=7, per_shard=9, labels=True, d_model=16)
    return a, plain_store(tmp_path / "b", n=43, tokens=7, per_shard=5, d_model=8, layers=(0, 3), cls=False, seed=1)


KINDS = [OrderedPairLoader, ShuffledPairLoader]


def opened(stores, engine="pread", **sel) -> PairSelection:
    both = pair(*(ShardStore.open(plain.path, engine=engine) for plain in stores))
    return both.sel(**{"layer_a": 5, "layer_b": (3, 0), **sel})


@pytest.mark.parametrize("kind", KINDS)
def test_a_pickled_loader_stands_where_the_loader_stands(stores, kind):
    with kind(opened(stores), batch_size=64, labels=stores[0].labels) as loader:
        iterator = iter(loader)
        next(iterator)
        with pickle.loads(pickle.dumps(loader)) as sent:
            for found, expected in zip(sent, iterator, strict=True):
                assert found.keys() == expected.keys()
                assert all(np.array_equal(found[name], expected[name]) for name in found)


def test_window_bytes_are_for_both_stores(stores):
    rows = opened(stores, layer_a="all", layer_b=3)
    for window in (8_000, 30_000):
        loader = ShuffledPairLoader(rows, batch_size=16, window_bytes=window)
        state = loader.state_dict()
        names = ("examples_per_block", "n_partitions", "window_blocks")
        assert [state["a"][name] for name in names] == [state["b"][name] for name in names]
        # A row is 192 bytes in one store and 32 in the other.
        alone = ShuffledLoader(rows.a, batch_size=16, window_bytes=window * 192 // 224)
        assert [alone.state_dict()[name] for name in names] == [state["a"][name] for name in names]
        explained = loader.explain()
        assert explained[0].window_bytes - explained[1].window_bytes == alone.explain().window_bytes * 160 // 216
        assert sum(loader.metrics()[side].n_rows for side in (0, 1)) == 0
        list(loader)
        assert [found.n_rows for found in loader.metrics()] == [len(rows)] * 2
        assert [found.cost.bytes_wanted for found in explained] == [rows.a.nbytes, rows.b.nbytes]


@pytest.mark.parametrize("kind", KINDS)
def test_each_store_has_its_scale(stores, kind):
    rows = opened(stores)
    with kind(rows, batch_size=64, scale_norm=True) as loader:
        a, b = loader.scale
        norms = [np.linalg.norm(act.astype(np.float64), axis=-1).mean() for act in rows.rows(slice(None))]
        assert (a, b) == (pytest.approx(4 / norms[0]), pytest.approx(8**0.5 / norms[1]))
        batch = next(iter(loader))
        truth = stores[0].acts[batch["example_idx"], 1, batch["token_idx"] + 1]
        np.testing.assert_allclose(batch["act_a"], truth * a, rtol=1e-6)
        again = kind(rows, batch_size=64, scale_norm=True)
        again.load_state_dict(loader.state_dict())
        assert again.scale == (a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_other_loaders_are_refused(stores, kind):
    rows, more = opened(stores), {} if kind is OrderedPairLoader else {"window_blocks": 3, "n_partitions": 2}
    loader = kind(rows, batch_size=16, **more)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    alone = ALONE[kind](rows.a, batch_size=16, **more)
    with pytest.raises(ArgumentError, match="saved with"):
        alone.load_state_dict(state)
    moved = {**state, "b": {**state["b"], "batch": 3}}
    swapped = {**state, "a": state["b"], "b": state["a"]}
    another = kind(opened(stores, layer_b=3), batch_size=16, **more).state_dict()
    larger = kind(rows, batch_size=32, **more).state_dict()
    bad = [alone.state_dict(), state["a"], moved, swapped, another, larger, {}, {**state, "a": None}, None, 3]
    bad += [{**state, "kind": "shuffled"}, {**state, "b": {**state["b"], "rows": "0" * 16}}]
    if kind is ShuffledPairLoader:
        bad += [{**state, side: {**state[side], "window_blocks": 2}} for side in ("a", "b")]
    fresh = kind(rows, batch_size=16, **more)
    fresh.load_state_dict(state)
    for wrong in bad:
        with pytest.raises(ArgumentError):
            fresh.load_state_dict(wrong)
        assert fresh.state_dict() == state, "what was refused changed nothing"
    rest = [batch["act_b"].copy() for batch in fresh]
    assert all(np.array_equal(one["act_b"], other) for one, other in zip(iterator, rest, strict=True))
    with pytest.raises(ArgumentError, match=r"Pass pair\(a, b\)"):
        kind(rows.a, batch_size=16)


@pytest.mark.parametrize("wrong", [{}, {"batch_size": 16}, 16, "options"])
@pytest.mark.parametrize("kind", KINDS)
def test_options_are_those_of_loaders_of_one_store(stores, kind, wrong):
    rows = opened(stores)
    for make in (lambda: kind(rows, wrong), lambda: ALONE[kind](rows.a, wrong)):
        with pytest.raises(ArgumentError, match=f"options is an? {type(wrong).__name__}; it must be") as caught:
            make()
        assert caught.value.where == "options"


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_that_is_gone_in_one_store(stores, kind, side):
    """The error names it; the loader stands at the batch that was not handed out, and goes on once the shard is back."""
    rows, more = opened(stores), {} if kind is OrderedPairLoader else {"seed": 3, "window_blocks": 2, "n_partitions": 1}
    with kind(rows, batch_size=16, **more) as loader:
        whole = [(batch["act_a"].copy(), batch["act_b"].copy()) for batch in loader]
    shard = stores[side].shard(stores[side].n_shards - 1)
    loader, n_seen = kind(opened(stores), batch_size=16, **more), 0
    away = shard.rename(shard.with_suffix(".away"))
    with pytest.raises(MissingShardError, match=shard.name):
        for _ in loader:
            n_seen += 1
    state = loader.state_dict()
    assert (loader.epoch, loader.next_batch) == (state["a"]["epoch"], state["a"]["batch"])
    assert (loader.epoch, loader.next_batch) == (state["b"]["epoch"], state["b"]["batch"]) == (0, n_seen)
    away.rename(shard)
    loader.load_state_dict(state)
    rest = [(batch["act_a"].copy(), batch["act_b"].copy()) for batch in loader]
    assert len(rest) == len(whole) - n_seen
    for one, other in zip(rest, whole[n_seen:], strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_are_chosen_left_and_begun_again(stores, kind):
    rows, more = opened(stores), {} if kind is OrderedPairLoader else {"window_blocks": 3}

    def acts(batches) -> list[bytes]:
        return [batch["act_a"].tobytes() + batch["act_b"].tobytes() for batch in batches]

    with kind(rows, batch_size=32, **more) as loader:
        first, second = acts(loader), acts(loader)
        assert (loader.epoch, kind is OrderedPairLoader) == (2, first == second)
        loader.set_epoch(1)
        assert acts(itertools.islice(loader, 4)) == second[:4]
        assert acts(loader) == second, "what was left begins again"
        loader.set_epoch(0)
        one = iter(loader)
        begun = acts(itertools.islice(one, 2))
        one.close()
        with pytest.raises(ArgumentError, match="closed"):
            next(one)
        assert begun + acts(loader)[2:] == first


def test_ranks_are_found_when_an_iteration_begins(stores, monkeypatch):
    """Both loaders look at them, also where the order changes with them."""
    rows = opened(stores)
    loader = ShuffledPairLoader(rows, batch_size=12)
    alone = sum(len(batch["act_a"]) for batch in loader)
    assert alone == len(rows)
    found = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "3")
        loader.set_epoch(0)
        for batch in loader:
            example, token = batch["example_idx"], batch["token_idx"]
            assert np.array_equal(batch["act_a"], stores[0].acts[example, 1, token + 1])
            assert np.array_equal(batch["act_b"], stores[1].acts[example[:, None], [1, 0], token[:, None]])
            found += zip(example.tolist(), token.tolist(), strict=True)
        state = loader.state_dict()
        assert state["a"]["n_partitions"] == state["b"]["n_partitions"]
        assert state["a"]["n_partitions"] % 3 == 0
    assert set(found) == set(itertools.product(range(43), range(7)))
    assert len(found) - len(rows) < 9


@pytest.mark.parametrize("kind", KINDS)
def test_a_last_batch_that_one_store_never_gave_is_given_again(stores, kind, monkeypatch):
    """The other one's epoch was over by then."""
    rows = opened(stores)
    loader = kind(rows, batch_size=200)

    def acts(batches) -> list[bytes]:
        return [batch["act_a"].tobytes() + batch["act_b"].tobytes() for batch in batches]

    expected = acts(loader)
    loader.set_epoch(0)
    iterator = iter(loader)
    next(iterator)

    get, calls = Iteration.get, itertools.count()

    def sometimes(*args) -> object:
        if next(calls) == 1:
            raise TransportError("it is broken", where="acts000001.bin")
        return get(*args)

    monkeypatch.setattr(Iteration, "get", sometimes)
    with pytest.raises(TransportError, match="it is broken"):
        next(iterator)
    assert (loader.epoch, loader.next_batch, loader.a.epoch) == (0, 1, 1)
    state = loader.state_dict()
    assert acts(loader) == expected
    loader.load_state_dict(state)
    assert acts(loader) == expected[1:]


@pytest.mark.parametrize("kind", KINDS)
def test_an_iteration_that_did_not_begin_loses_no_place(stores, kind, monkeypatch):
    rows = opened(stores)
    loader = kind(rows, batch_size=32)
    whole = [batch["act_a"].tobytes() for batch in loader]
    loader.set_epoch(0)
    first = list(itertools.islice(loader, 4))
    state = loader.state_dict()
    assert len(first) == state["b"]["batch"] == 4
    for begin, expected in ((state, whole[4:]), (None, whole)):
        loader.set_epoch(0)
        if begin is not None:
            loader.load_state_dict(begin)
        with monkeypatch.context() as patch:
            patch.setattr(loader.b, "_source", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                iter(loader)
        assert [batch["act_a"].tobytes() for batch in loader] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_token_arrays_of_both_stores(tmp_path, kind):
    """What both have is that of the first, as it is compared, or chosen by."""
    rng, made = np.random.default_rng(4), []
    ids = rng.integers(0, 50257, (13, 6), dtype=np.int32)
    scores = rng.standard_normal((2, 13, 6)).astype(np.float32)
    mask = rng.random((13, 6)) < 0.6
    for number, more in enumerate(({"score": scores[0]}, {"score": scores[1], "mask": mask, "layer": -ids})):
        arrays = {"token_ids": ids, **more}
        metadata = new_metadata(
            family="gpt2", ckpt=f"random/{number}", layers=(2,), content_tokens_per_example=6, cls_token=False, d_model=4,
            n_examples=13, max_tokens_per_shard=90, token_arrays={name: a.dtype.name for name, a in arrays.items()},
        )  # fmt: skip
        with ShardStore.create(tmp_path, metadata, progress=False) as writer:
            writer.append(rng.standard_normal((13, 1, 6, 4)).astype(np.float32), **arrays)
        made.append(ShardStore.open(tmp_path / metadata.hash))
    rows = pair(*made).sel(layer_a=2, layer_b=2)
    names = ["layer", "score", "token_ids", "mask"]
    seen = []
    with kind(rows, batch_size=16, token_arrays=names) as loader:
        for batch in loader:
            at = batch["example_idx"], batch["token_idx"]
            keys = {"act_a", "act_b", "example_idx", "token_idx", "tokens_layer", "score", "token_ids", "mask"}
            assert set(batch) == keys
            assert np.array_equal(batch["score"], scores[0][at])
            assert np.array_equal(batch["token_ids"], ids[at])
            assert np.array_equal(batch["tokens_layer"], -ids[at])
            assert batch["mask"].all()
            seen += zip(*(column.tolist() for column in at), strict=True)
    assert sorted(seen) == [tuple(place) for place in np.argwhere(mask).tolist()]
    with pytest.raises(ArgumentError, match="no token array 'nothing'"):
        kind(rows, token_arrays=["nothing"])


def test_states_that_are_older_than_early_starts(tmp_path):
    """They do not say how their epoch began."""
    store = ShardStore.open(plain_store(tmp_path, n=30, tokens=4).path)
    rows = pair(store, store).sel(layer_a=5, layer_b=2)

    def make():
        return ShuffledPairLoader(rows, batch_size=8, window_blocks=4, n_partitions=2)

    whole = [batch["example_idx"].tolist() for batch in make()]
    with make() as loader:
        next(iter(loader))
        state = loader.state_dict()
    for side in ("a", "b"):
        del state[side]["early_start"]
    loader = make()
    loader.load_state_dict(state)
    assert [batch["example_idx"].tolist() for batch in loader] == whole[1:]
