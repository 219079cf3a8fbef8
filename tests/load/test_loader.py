"""Batches beside dense NumPy: every row exactly once, states, ranks, kept batches, over selections, dtypes and masks."""

from __future__ import annotations

import functools
import gc
import json
import os
import pickle
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from multiprocessing.context import set_spawning_popen
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from token_stores import ARRAYS, TokenStore, token_store

from saev_store import ShardStore, new_metadata, pair
from saev_store.errors import ArgumentError, CorruptShardError, DeadlineError, MissingShardError
from saev_store.loaders import Batch, Loader, LoaderOptions
from saev_store.store.selection import Selection

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float64": np.float64}
Rows = list[tuple[int, ...]]


@functools.cache
def store_of(
    dtype: str = "float32", seed: int = 0, layers: tuple[int, ...] = (2, 5, 7), arrays: tuple[str, ...] = tuple(ARRAYS)
) -> tuple[TokenStore, ShardStore]:
    """A store of random bits in shards of 3 examples; one for all tests."""
    declared = {name: ARRAYS[name] for name in arrays}
    root = Path(tempfile.mkdtemp(prefix="saev-load-"))
    made = token_store(root, dtype=dtype, n=13, layers=layers, content=5, per_shard=3, seed=seed, arrays=declared)
    return made, ShardStore.open(str(made.path))


def kept_of(made: TokenStore, sel: dict[str, object]) -> Rows:
    """(example, layer, token) of the rows of a selection, found one by one; the layer is -1 where layers are stacked."""
    examples = np.arange(13)[sel.get("examples", slice(None))].tolist()
    tokens = {"content": range(5), "special": [-1], "all": range(-1, 5)}[sel.get("tokens", "content")]
    wanted = [2, 5, 7] if sel["layer"] == "all" else np.atleast_1d(sel["layer"]).tolist()
    layers = [-1] if sel.get("stack_layers") else wanted

    def stays(e: int, t: int) -> bool:
        if t < 0:
            return True
        labels = int(made.arrays["labels"][e, t])
        mask = sel.get("mask_of", made).arrays["mask"]
        return bool(sel.get("masked") or mask[e, t]) and labels not in (sel.get("ignore_labels") or ())

    return [(e, layer, t) for e in examples for layer in layers for t in tokens if stays(e, t)]


def bits(values: np.ndarray) -> bytes:
    return np.ascontiguousarray(values).tobytes()


def check(made: TokenStore, sel: dict[str, object], batch: Batch, dtype: str, name: str = "act") -> Rows:
    """Compare a batch with the store, bit by bit; where its rows come from."""
    example, token = batch["example_idx"], batch["token_idx"]
    wanted = [2, 5, 7] if sel["layer"] == "all" else np.atleast_1d(sel["layer"]).tolist()
    if sel.get("stack_layers"):
        layer = np.full(len(example), -1)
        expected = made.acts[example[:, None], [[2, 5, 7].index(one) for one in wanted], token[:, None] + 1]
    else:
        layer = batch["layer"] if len(wanted) > 1 else np.full(len(example), wanted[0])
        expected = made.acts[example, [[2, 5, 7].index(one) for one in layer.tolist()], token + 1]
    with np.errstate(over="ignore", invalid="ignore"):
        expected = expected.astype(DTYPES[dtype])
    assert batch[name].dtype == expected.dtype and batch[name].shape == expected.shape
    if made.acts.dtype == expected.dtype:
        assert bits(batch[name]) == bits(expected)
    else:
        with np.errstate(invalid="ignore"):  # signalling NaNs become quiet
            np.testing.assert_array_equal(batch[name].astype(np.float64), expected.astype(np.float64))
    for key, column in batch.items():
        if key not in {name, "act_a", "act_b", "example_idx", "token_idx", "layer"}:
            array = "labels" if key == "token_labels" else key
            np.testing.assert_array_equal(column, made.column(array, example, token))
            assert column.dtype == made.arrays[array].dtype
    return [tuple(one) for one in zip(example.tolist(), layer.tolist(), token.tolist(), strict=True)]


@st.composite
def selections(draw: st.DrawFn) -> dict[str, object]:
    sel: dict[str, object] = {
        "layer": draw(st.sampled_from([5, (7, 2), "all"])),
        "tokens": draw(st.sampled_from(["content", "special", "all"])),
        "stack_layers": draw(st.booleans()),
    }
    if draw(st.booleans()):
        sel["examples"] = draw(st.sampled_from([slice(None, None, -2), slice(3, 4), [12, 0, 5], slice(0, 0)]))
    if sel["tokens"] != "special":
        sel["masked"] = draw(st.booleans())
        sel["ignore_labels"] = draw(st.sampled_from([None, tuple(range(0, 256, 2))]))
    return sel


@given(
    selections(), st.sampled_from(["float32", "bfloat16", "float16"]), st.sampled_from(list(DTYPES)),
    st.sampled_from(["shuffled", "stored"]), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.booleans(), st.integers(1, 5000),
    st.booleans(), st.sampled_from(["mmap", "pread"]),
)  # fmt: skip
def test_loader_over_any_selection_gives_each_row_once(
    sel: dict[str, object], stored: str, dtype: str, order: str, world: int, share: int, drop_last: bool, window: int,
    early: bool, engine: str,
) -> None:  # fmt: skip
    made, _ = store_of(stored)
    store = ShardStore.open(str(made.path), engine=engine)
    rows, expected = store.sel(**sel, dtype=dtype), kept_of(made, sel)
    assert len(rows) == len(expected)
    names = () if sel["tokens"] == "special" else ("score", "document_ids")
    if order == "shuffled" and world > 1 and not drop_last and 0 < len(rows) < 4:
        return
    n_partitions = 4 if order == "shuffled" else None
    seen: list[Rows] = []
    for rank in range(world):
        options = LoaderOptions(
            batch_size=4 * share // world, order=order, rank=rank, world=world, drop_last=drop_last, window_bytes=window,
            early_start=early, n_partitions=n_partitions, token_arrays=names, labels=True, n_threads=2,
        )  # fmt: skip
        with Loader(rows, options) as loader:
            batches = [check(made, sel, batch, dtype) for batch in loader]
            assert len(batches) == len(loader)
            assert loader.epoch == (1 if batches else 0)
        seen.append([row for batch in batches for row in batch])
    counts = Counter(row for part in seen for row in part)
    whole, n = 4 * share, len(expected)
    assert len({len(part) for part in seen}) == 1
    assert loader.n_samples == (n // whole * whole if drop_last else n)
    if drop_last or order == "stored" or world == 1:
        assert set(counts) <= set(expected)
        assert len(counts) == len({*expected}) * bool(n) if not drop_last else True
    truth = Counter(expected)
    if not drop_last:
        assert set(counts) == set(truth)
        repeated = sum((counts - truth).values())
        assert not (truth - counts) and repeated < max(1, whole)
        assert world > 1 or repeated == 0
    else:
        assert not (counts - truth) and sum(counts.values()) == n // whole * whole
    if order == "stored" and world == 1:
        assert seen[0] == expected[: loader.n_samples]


@given(
    st.sampled_from(["shuffled", "stored"]), st.sampled_from([5, (7, 2)]), st.sampled_from([5, "all"]), st.booleans()
)
@settings(max_examples=20)
def test_loader_of_a_pair_gives_the_same_rows_of_both(
    order: str, layer_a: object, layer_b: object, masked: bool
) -> None:
    """Both stores mask other tokens; what stays in both is loaded, and arrays are those of the first store."""
    (one, a), (other, b) = store_of("float32", 0), store_of("bfloat16", 1, arrays=("score", "mask"))
    rows = pair(a, b).sel(layer_a=layer_a, layer_b=layer_b, masked=masked, tokens="all")
    seen: Rows = []
    options = {
        "order": order,
        "batch_size": 8,
        "window_bytes": 1000,
        "token_arrays": ("token_ids", "score"),
        "labels": True,
    }
    with Loader(rows, **options) as loader:
        for batch in loader:
            for made, layer, name, dtype in ((one, layer_a, "act_a", "float32"), (other, layer_b, "act_b", "float32")):
                sel = {"layer": layer, "stack_layers": isinstance(layer, (tuple, str))}
                mine = {
                    key: batch[key] for key in batch if key.startswith(("act", "example", "token_idx")) or made is one
                }
                found = check(made, sel, mine, dtype, name)
            seen += found
        saved = loader.state_dict()
    assert len(seen) == len(rows)
    sel = {"layer": 5, "tokens": "all", "masked": masked}
    expected = {(e, t) for e, _, t in kept_of(one, sel)} & {
        (e, t) for e, _, t in kept_of(one, sel | {"mask_of": other})
    }
    assert sorted((e, t) for e, _, t in seen) == sorted(expected)
    assert len(json.dumps(saved)) < 2048
    for others in (pair(a, b).sel(layer_a=layer_a, layer_b=2, masked=masked, tokens="all"), rows.a):
        with pytest.raises(ArgumentError):
            Loader(others, **options).load_state_dict(saved)


class Runs(RuleBasedStateMachine):
    """A run is left, continued, continued on other ranks; its batches stay those of a run that was never left."""

    @initialize(
        order=st.sampled_from(["shuffled", "stored"]), sel=selections(), dtype=st.sampled_from(["float32", "bfloat16"]),
        window=st.integers(1, 3000), drop_last=st.booleans(),
    )  # fmt: skip
    def begin(self, order: str, sel: dict[str, object], dtype: str, window: int, drop_last: bool) -> None:
        self.made, store = store_of(dtype)
        self.sel, self.rows = sel, store.sel(**sel)
        if len(self.rows) < 8:
            self.rows, self.sel = (
                store.sel(layer=5, tokens="content", masked=True),
                {"layer": 5, "tokens": "content", "masked": True},
            )
        self.options = {"order": order, "drop_last": drop_last, "seed": 3, "token_arrays": ("score",)}
        self.options["n_partitions"] = 4 if order == "shuffled" else None
        self.window = window
        self.expected: dict[int, list[Counter[tuple[int, ...]]]] = {}
        self.kept: list[tuple[np.ndarray, bytes]] = []
        self.state: dict[str, object] | None = None
        self.make(1, None)

    def make(self, world: int, state: dict[str, object] | None) -> None:
        # A rank of a smaller world holds more of the window.
        options = {**self.options, "batch_size": 8 // world, "window_bytes": self.window if state is None else 10**6}
        self.loaders = [Loader(self.rows, rank=rank, world=world, **options) for rank in range(world)]
        for loader in self.loaders:
            if state is not None:
                loader.load_state_dict(state)
        self.iterators = [iter(loader) for loader in self.loaders]

    def truth(self, epoch: int) -> list[Counter[tuple[int, ...]]]:
        """The rows of each global batch, from a run of one rank that is never left."""
        if epoch not in self.expected:
            loader = Loader(self.rows, batch_size=8, rank=0, world=1, window_bytes=self.window, **self.options)
            loader.set_epoch(epoch)
            self.expected[epoch] = [Counter(check(self.made, self.sel, batch, "float32")) for batch in loader]
            total = sum(self.expected[epoch], Counter())
            everything = Counter(kept_of(self.made, self.sel))
            assert total == everything if not self.options["drop_last"] else not (total - everything)
        return self.expected[epoch]

    @rule(n=st.integers(1, 4), keeps=st.booleans())
    def take(self, n: int, keeps: bool) -> None:
        n_batches = len(self.loaders[0])
        for _ in range(n):
            batches = [next(iterator, None) for iterator in self.iterators]
            if batches[0] is None:
                assert batches == [None] * len(batches)
                self.iterators = [iter(loader) for loader in self.loaders]
                continue
            found = Counter(row for batch in batches for row in check(self.made, self.sel, batch, "float32"))
            # An iteration begins with its first batch.
            epoch, number = divmod(self.loaders[0].epoch * n_batches + self.loaders[0].place[1] - 1, n_batches)
            wanted = self.truth(epoch)[number]
            assert not (wanted - found)
            if found != wanted:  # ranks have equally many rows: some are repeated in the last batch
                assert len(batches) > 1 and number + 1 == len(self.loaders[0])
            if keeps:
                act = batches[-1]["act"][:1]
                self.kept.append((act, bits(act)))

    @rule()
    def leave(self) -> None:
        for loader, iterator in zip(self.loaders, self.iterators, strict=True):
            epoch, left = loader.epoch, iterator
            self.iterators = []
            del left
            assert loader.epoch == epoch
        self.iterators = [iter(loader) for loader in self.loaders]

    @rule()
    def save(self) -> None:
        states = [loader.state_dict() for loader in self.loaders]
        self.state = json.loads(json.dumps(states[0]))
        assert all(state == states[0] for state in states)

    @precondition(lambda self: self.state is not None)
    @rule(world=st.sampled_from([1, 2, 4]))
    def go_on(self, world: int) -> None:
        self.make(world, self.state)
        assert self.loaders[0].epoch * len(self.loaders[0]) + self.loaders[0].place[1] == (
            self.state["epoch"] * len(self.loaders[0]) + self.state["batch"]
        )

    @rule()
    def pickles(self) -> None:
        """A pickle stands where the loader stands; it goes on there in a new iteration."""
        self.loaders = [pickle.loads(pickle.dumps(loader)) for loader in self.loaders]
        self.iterators = [iter(loader) for loader in self.loaders]

    @invariant()
    def kept_batches_keep_their_values(self) -> None:
        for act, values in getattr(self, "kept", []):
            assert bits(act) == values


TestRuns = Runs.TestCase
TestRuns.settings = settings(max_examples=25, stateful_step_count=20)


def small(order: str = "shuffled", **options: object) -> Loader:
    """A loader of 65 rows in batches of 2, and pools of two batches."""
    _, store = store_of()
    return Loader(
        store.sel(layer=5, tokens="content", masked=True),
        order=order,
        batch_size=2,
        window_bytes=256,
        n_partitions=None,
        **options,
    )


def test_batches_of_many_pools_keep_their_values_however_they_are_kept() -> None:
    """Slices, views and memoryviews of each batch of an epoch equal its rows at the end, with and without the garbage collector."""
    made, _ = store_of()
    gc.disable()
    try:
        for order in ("shuffled", "stored"):
            kept = []
            with small(order) as loader:
                for number, batch in enumerate(loader):
                    act = batch["act"]
                    part = [act, act[1:], act.reshape(-1)[3:], act.view(np.uint8), memoryview(act), act.T][number % 6]
                    kept.append((part, bits(np.asarray(part)), check(made, {"layer": 5}, batch, "float32")))
                    del batch, act, part
            assert len(kept) == 33 and loader.epoch == 1
            assert all(bits(np.asarray(part)) == values for part, values, _ in kept)
            assert sorted(row for *_, rows in kept for row in rows) == sorted(
                kept_of(made, {"layer": 5, "tokens": "content", "masked": True})
            )
    finally:
        gc.enable()


def test_memory_of_pools_is_used_again_and_bounded() -> None:
    """Two pools where batches are let go, three where some are kept, in any number of epochs."""
    for keeps, most in ((False, 2), (True, 3)):
        made: list[int] = []

        def make(nbytes: int, made: list[int] = made) -> np.ndarray:
            made.append(nbytes)
            return np.empty(nbytes, np.uint8)

        _, store = store_of()
        loader = Loader(
            store.sel(layer=5, tokens="content", masked=True),
            batch_size=2,
            window_bytes=6 * 2 * 32,
            make_memory=make,
            early_start=False,
        )
        kept = []
        for _ in range(5):
            for batch in loader:
                if keeps:
                    kept.append(batch["act"][0])
        assert made == [3 * 2 * 32] * most
        assert loader.explain().pool_bytes == made[0]
        del batch


def test_batches_are_views_of_a_pool_unless_some_are_kept() -> None:
    with small() as loader:
        bases = set()
        for batch in loader:
            bases.add(id(batch["act"].base))
            assert batch["act"].flags.writeable
        del batch
        kept = [batch["act"] for batch in loader]
    assert sum(act.base is None for act in kept) > len(kept) // 2


def test_loader_without_memory_is_an_error_of_the_window() -> None:
    def none(nbytes: int) -> np.ndarray:
        raise MemoryError

    loader = Loader(store_of()[1].sel(layer=5, tokens="content", masked=True), batch_size=2, make_memory=none)
    with pytest.raises(ArgumentError) as caught:
        next(iter(loader))
    assert caught.value.where == "window_bytes"
    assert not loader.is_iterating


def test_epochs_have_orders_of_their_own_that_do_not_depend_on_reading() -> None:
    def order(**options: object) -> list[list[int]]:
        with small(**options) as loader:
            return [batch["example_idx"].tolist() for _ in range(2) for batch in loader]

    first = order()
    assert first == order(n_threads=1) == order(n_threads=7)
    assert first[:33] != first[33:]
    assert order(seed=1) != first
    loader = small()
    loader.set_epoch(1)
    assert [batch["example_idx"].tolist() for batch in loader] == first[33:]
    assert loader.epoch == 2


def test_loader_that_was_left_has_the_same_batches_again() -> None:
    for order in ("shuffled", "stored"):
        loader = small(order)
        for n in (1, 3, 32):
            batches = iter(loader)
            found = [next(batches)["example_idx"].tolist() for _ in range(n)]
            assert loader.place[1] == n and loader.state_dict()["batch"] == n
            again = iter(loader)
            assert [next(again)["example_idx"].tolist() for _ in range(n)] == found
            assert loader.epoch == 0
            with pytest.raises(ArgumentError) as caught:
                next(batches)
            assert caught.value.where == "iter(loader)"
        loader.close()
        with pytest.raises(ArgumentError):
            next(again)
        assert len(list(loader)) == 33


def test_state_that_is_not_of_this_loader_is_refused() -> None:
    """Nothing changes then."""
    _, store = store_of()
    base = {"layer": 5, "tokens": "content", "masked": True}
    options = {"batch_size": 4, "order": "shuffled", "n_partitions": 2, "window_bytes": 512}
    good = Loader(store.sel(**base), **options).state_dict()
    assert len(json.dumps(good)) < 1024
    for sel, changed in (
        ({"layer": 2}, {}), ({"layer": (5, 2), "stack_layers": True}, {}), ({"tokens": "all"}, {}), ({"masked": False}, {}),
        ({"examples": slice(0, 12)}, {}), ({"examples": slice(None, None, -1)}, {}), ({}, {"batch_size": 8}), ({}, {"drop_last": True}),
        ({}, {"order": "stored", "n_partitions": None}), ({}, {"seed": 18}),
    ):  # fmt: skip
        loader = Loader(store.sel(**(base | sel)), **(options | changed))
        with pytest.raises(ArgumentError) as caught:
            loader.load_state_dict(good)
        assert caught.value.where == "load_state_dict" and loader.place == (0, 0)
    with pytest.raises(ArgumentError):
        Loader(store_of("float32", 1)[1].sel(**base), **options).load_state_dict(good)
    other_set = store.sel(**base)
    object.__setattr__(other_set.metadata, "dataset", "another")
    try:
        with pytest.raises(ArgumentError):
            Loader(other_set, **options).load_state_dict(good)
    finally:
        object.__setattr__(other_set.metadata, "dataset", "")
    loader = Loader(store.sel(**base), **options)
    bad: list[object] = [None, [], 3, {}]
    for name in good:
        bad += [{key: value for key, value in good.items() if key != name}]
        bad += [{**good, name: value} for value in (np.arange(3), None)]
    for name in ("epoch", "batch", "pool_batches", "n_partitions"):
        bad += [{**good, name: value} for value in (-1, 1.0, True, "1", 2**70)]
    bad += [{**good, "batch": 18}, {**good, "n_partitions": 3}, {**good, "early_start": 1}, {**good, "pool_batches": 0}]
    for state in bad:
        with pytest.raises(ArgumentError):
            loader.load_state_dict(state)
        assert loader.state_dict() == good
    loader.load_state_dict(good)
    loader.load_state_dict({**good, "batch": 17})  # of a caller who counts batches
    assert loader.place == (1, 0)


def test_state_with_larger_pools_names_the_window_that_it_needs() -> None:
    _, store = store_of()
    rows = store.sel(layer=5, tokens="content", masked=True)
    state = Loader(rows, batch_size=4, window_bytes=8 * 4 * 32, n_partitions=2).state_dict()
    with pytest.raises(ArgumentError) as caught:
        Loader(rows, batch_size=4, window_bytes=4 * 4 * 32, n_partitions=2).load_state_dict(state)
    assert caught.value.remedy is not None and str(8 * 4 * 32) in caught.value.remedy
    large = Loader(rows, batch_size=4, window_bytes=10**6, n_partitions=1)
    large.load_state_dict(state)
    small_one = Loader(rows, batch_size=4, window_bytes=8 * 4 * 32, n_partitions=2)
    assert [b["example_idx"].tolist() for b in large] == [b["example_idx"].tolist() for b in small_one]


def test_loader_with_options_out_of_range_is_refused() -> None:
    rows = store_of()[1].sel(layer=5, tokens="content", masked=True)
    for name, values in {
        "batch_size": (0, 1.5, True, None), "order": ("random", 3), "seed": (1.5, None), "window_bytes": (0, None),
        "early_start": (1, None), "n_partitions": (0, 3), "drop_last": ("no",), "rank": (-1, 1), "world": (0,),
        "token_arrays": ("token_ids", (3,), ("nothing",)), "labels": (1,), "n_threads": (0,), "batch_timeout_s": (0, "1"),
    }.items():  # fmt: skip
        for value in values:
            with pytest.raises(ArgumentError) as caught:
                Loader(rows, **{"batch_size": 4, name: value})
            assert name in caught.value.where, (name, value)
    with pytest.raises(ArgumentError):
        Loader(rows.rows([0]), batch_size=2)
    with pytest.raises(ArgumentError):
        small().set_epoch(-1)


def test_ranks_are_those_of_the_environment_when_an_iteration_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    _, store = store_of()
    loader = Loader(store.sel(layer=5, tokens="content", masked=True), batch_size=4, window_bytes=512)
    assert (loader.rank, loader.world, len(loader)) == (0, 1, 17)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (loader.rank, loader.world, len(loader)) == (1, 2, 9)
    batches = iter(loader)
    next(batches)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (loader.rank, loader.world) == (1, 2)
    assert len(list(batches)) == 8
    monkeypatch.setenv("RANK", "9")
    for bad in (lambda: next(iter(loader)), lambda: len(loader)):
        with pytest.raises(ArgumentError) as caught:
            bad()
        assert caught.value.where == "RANK"
    monkeypatch.delenv("RANK")
    assert loader.world == 1
    for options in ({"world": 2}, {"rank": 1}):
        with pytest.raises(ArgumentError):
            Loader(loader.rows, **options)


def test_loader_that_a_spawned_process_gets_keeps_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = Loader(store_of()[1].sel(layer=5, tokens="content", masked=True), batch_size=4)
    set_spawning_popen(object())
    try:
        raw = pickle.dumps(loader)
    finally:
        set_spawning_popen(None)
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    again = pickle.loads(raw)
    assert (again.rank, again.world, len(again)) == (1, 2, 9)


def test_state_follows_ranks_that_are_known_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state is loaded before torch.distributed is initialised; the partitions of the state stay."""
    _, store = store_of()
    rows = store.sel(layer=5, tokens="content", masked=True)
    state = Loader(rows, batch_size=8, n_partitions=4).state_dict()
    loader = Loader(rows, batch_size=8)
    loader.load_state_dict(state)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ArgumentError):
        next(iter(loader))


def test_shard_that_is_missing_or_short_is_an_error_of_its_batch(tmp_path: Path) -> None:
    """The store was opened although it is damaged; examples that are left can be chosen."""
    made = token_store(tmp_path, n=13, content=5, per_shard=3)
    path = made.path / "acts000002.bin"
    for damage, kind in ((lambda: os.truncate(path, 100), CorruptShardError), (path.unlink, MissingShardError)):
        damage()
        store = ShardStore.open(str(made.path), damaged_ok=True)
        for order in ("shuffled", "stored"):
            loader = Loader(store.sel(layer=5, tokens="content", masked=True), order=order, batch_size=2)
            with pytest.raises(CorruptShardError) as caught:
                list(loader)
            assert "acts000002.bin" in caught.value.where and issubclass(kind, CorruptShardError)
            assert not loader.is_iterating and loader.epoch == 0
            left = store.sel(layer=5, tokens="content", masked=True, examples=[0, 1, 2, 12])
            assert sum(len(batch["act"]) for batch in Loader(left, order=order, batch_size=2)) == 20


def test_loader_of_a_lost_file_names_it(tmp_path: Path) -> None:
    """The store was open when its shard went."""
    made = token_store(tmp_path, n=13, content=5, per_shard=3)
    store = ShardStore.open(str(made.path))
    loader = Loader(store.sel(layer=5, tokens="content", masked=True), batch_size=2)
    (made.path / "acts000001.bin").unlink()
    with pytest.raises(MissingShardError) as caught:
        list(loader)
    assert "acts000001.bin" in caught.value.where


class Hanging:
    """A transport whose reads wait, until they are let go."""

    def __init__(self, below: object) -> None:
        self.below, self.go, self.asked = below, threading.Event(), threading.Event()
        self.go.set()

    def __getattr__(self, name: str) -> object:
        return getattr(self.below, name)

    def load_ranges(self, path: str, **parts: object) -> object:
        self.asked.set()
        self.go.wait(60)
        return self.below.load_ranges(path, **parts)

    def readinto(self, path: str, **parts: object) -> None:
        self.asked.set()
        self.go.wait(60)
        self.below.readinto(path, **parts)


def hanging_rows(tmp_path: Path) -> tuple[Selection, Hanging]:
    made = token_store(tmp_path, n=13, content=5, per_shard=3)
    rows = ShardStore.open(str(made.path)).sel(layer=5, tokens="content", masked=True)
    rows.reader.transport = transport = Hanging(rows.reader.transport)
    return rows, transport


def test_read_that_hangs_is_a_deadline_and_its_memory_is_not_used_again(tmp_path: Path) -> None:
    rows, transport = hanging_rows(tmp_path)
    loader = Loader(rows, batch_size=2, window_bytes=128, batch_timeout_s=0.3, n_threads=2, order="stored")
    expected = [bits(batch["act"]) for batch in loader]
    transport.go.clear()
    for _ in range(3):  # three pools are taken by reads that hang
        with pytest.raises(DeadlineError):
            next(iter(loader))
    transport.go.set()
    assert [bits(batch["act"]) for batch in loader] == expected


class Cutting(Hanging):
    """A transport whose shards are cut when their first range was read."""

    def load_ranges(self, path: str, **parts: object) -> Iterator[object]:
        for found in self.below.load_ranges(path, **parts):
            yield found
            os.truncate(self.below.where(path), 0)


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_loader_shard_cut_while_it_is_read_is_an_error(tmp_path: Path, engine: str) -> None:
    made = token_store(tmp_path, n=13, content=5, per_shard=3)
    rows = ShardStore.open(str(made.path), engine=engine).sel(layer=5, tokens="content", masked=True)
    rows.reader.transport = Cutting(rows.reader.transport)
    with Loader(rows, batch_size=30) as loader, pytest.raises(CorruptShardError):
        list(loader)


def test_close_ends_an_iteration_that_waits(tmp_path: Path) -> None:
    rows, transport = hanging_rows(tmp_path)
    loader = Loader(rows, batch_size=2, window_bytes=128)
    transport.go.clear()
    batches, errors = iter(loader), []

    def take() -> None:
        try:
            next(batches)
        except ArgumentError as error:
            errors.append(error)

    waiting = threading.Thread(target=take)
    waiting.start()
    assert transport.asked.wait(30)
    loader.close()
    waiting.join(30)
    transport.go.set()
    assert [error.where for error in errors] == ["iter(loader)"]


def test_threads_end_with_the_iterator() -> None:
    loader = small()
    batches = iter(loader)
    next(batches)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("saev-store-loader")]
    assert threads
    del batches
    gc.collect()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads) and not loader.is_iterating
    with small() as other:
        next(iter(other))
    assert not other.is_iterating


def test_explain_counts_what_is_read() -> None:
    _, store = store_of("bfloat16")
    rows = store.sel(layer=(5, 2), tokens="content", masked=True)
    told = Loader(rows, batch_size=13, window_bytes=13 * 64 * 8).explain()
    assert (told.n_rows, told.n_batches, told.bytes_read, told.n_reads) == (130, 10, 130 * 16, 26)
    assert told.pool_bytes == 13 * 4 * 32 and told.first_batch_bytes == 13 * 16 and told.mixing is not None
    assert "n_batches: 10" in str(told)
    stored = Loader(rows, batch_size=13, order="stored", rank=1, world=2).explain()
    assert stored.mixing is None and stored.bytes_read == 65 * 16 and str(stored)


def test_loader_of_nothing_has_no_batches() -> None:
    rows = store_of()[1].sel(layer=5, examples=slice(0, 0))
    for order in ("shuffled", "stored"):
        loader = Loader(rows, order=order, batch_size=4)
        assert list(loader) == [] and len(loader) == 0 and loader.epoch == 0
        assert loader.explain().first_batch_bytes == 0


def test_long_examples_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are longer than a task, and gaps that are larger than what is read along."""
    made = token_store(tmp_path, n=5, content=40_000, per_shard=2, d_model=64, arrays={"mask": "bool"})
    store = ShardStore.open(str(made.path))
    keep = np.zeros((5, 40_000), bool)
    keep[:, ::300], keep[:, 20_000:20_100] = True, True
    for rows in (store.sel(layer=2, masked=True).only(keep), store.sel(layer=(5, 2), masked=True, stack_layers=True)):
        for order in ("shuffled", "stored"):
            n = 0
            for batch in Loader(rows, order=order, batch_size=4096, window_bytes=64 << 20):
                layers = [1, 0] if len(rows.shape) == 3 else 0
                shape = (slice(None), None) if len(rows.shape) == 3 else slice(None)
                expected = made.acts[batch["example_idx"][shape], layers, batch["token_idx"][shape] + 1]
                assert bits(batch["act"]) == bits(expected)
                n += len(batch["act"])
            assert n == len(rows)


def test_loader_without_maps_reads_to_its_place(tmp_path: Path) -> None:
    """Whole blocks straight to the pool in storage order, others through memory of their own; a missing shard is named."""
    made = token_store(tmp_path, n=13, content=5, per_shard=3, layers=(2, 5, 7))
    store = ShardStore.open(str(made.path), engine="pread")
    for layer, order in ((5, "stored"), (5, "shuffled"), ((7, 2), "stored")):
        sel = {"layer": layer, "masked": True}
        with Loader(store.sel(tokens="content", **sel), batch_size=7, order=order) as loader:
            rows = [row for batch in loader for row in check(made, sel, batch, "float32")]
        assert sorted(rows) == sorted(kept_of(made, sel))
        if layer == 5:
            assert (rows == kept_of(made, sel)) == (order == "stored")
    (made.path / "acts000002.bin").unlink()
    store = ShardStore.open(str(made.path), engine="pread", damaged_ok=True)
    for order in ("stored", "shuffled"):
        assert len(list(Loader(store.sel(layer=5, examples=slice(3)), batch_size=2, order=order))) > 0
        with pytest.raises(CorruptShardError) as caught:
            list(Loader(store.sel(layer=5), batch_size=7, order=order))
        assert "acts000002.bin" in str(caught.value.where)


def test_layers_with_hook_points_are_numbered(tmp_path: Path) -> None:
    metadata = new_metadata(
        family="x", ckpt="x", layers=[5, 5], hook_points=["resid_pre", "resid_post"], content_tokens_per_example=2, cls_token=False,
        d_model=4, n_examples=3, max_tokens_per_shard=4,
    )  # fmt: skip
    acts = np.random.default_rng(0).standard_normal((3, 2, 2, 4), dtype=np.float32)
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(acts)
    rows = ShardStore.open(str(tmp_path / metadata.hash)).sel(layer=[(5, "resid_post"), (5, "resid_pre")])
    with Loader(rows, batch_size=5) as loader:
        for batch in loader:
            assert set(batch["layer"].tolist()) == {5}
            expected = acts[batch["example_idx"], 1 - batch["layer_key_idx"], batch["token_idx"]]
            np.testing.assert_array_equal(batch["act"], expected)
        assert loader.rows.layer_keys == ((5, "resid_post"), (5, "resid_pre"))


def test_fill_is_the_share_of_the_pool_that_is_left() -> None:
    with small("stored") as loader:
        assert loader.fill == 0.0
        fills = [loader.fill for _ in loader]
    assert set(fills) == {0.0, 0.5} and fills[-1] == 0.0
