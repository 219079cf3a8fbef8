"""Stopping and going on: exact at every batch, twice in a row, on other numbers of ranks; refused where it makes no sense."""

from __future__ import annotations

import itertools
import json
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from plain_stores import plain_store

from saev_store import ShardStore
from saev_store.errors import ArgumentError
from saev_store.loaders import OrderedLoader, ShuffledLoader, _identity
from saev_store.transport import open_transport
from saev_store.writer import create_store
from saev_store.writer.copying import copy_store


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    plain = plain_store(tmp_path_factory.mktemp("state"), n=50, tokens=7, per_shard=9, d_model=4, labels=True)
    return ShardStore.open(plain.path).sel(layer=[2, 11], tokens="content", ignore_labels=range(60))


KINDS = {
    "ordered": (OrderedLoader, {}),
    "block": (ShuffledLoader, {"window_blocks": 3, "n_partitions": 4}),
    "groups": (ShuffledLoader, {"window_blocks": 2, "n_partitions": 2, "examples_per_block": 3}),
    "whole": (ShuffledLoader, {"window_bytes": 1 << 22}),
    "early": (ShuffledLoader, {"window_blocks": 9, "n_partitions": 2, "early_start": True}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(rows, kind, **options):
    cls, more = KINDS[kind]
    return cls(rows, **{"batch_size": 24, "n_threads": 2, **more, **options})


def acts(batches) -> list[np.ndarray]:
    return [batch["act"].copy() for batch in batches]


def same(one, two) -> bool:
    return len(one) == len(two) and all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


@every_kind
def test_a_pickled_loader_stands_where_the_loader_stands(rows, kind):
    labels = ShardStore.open(rows.reader.transport).labels
    loader = make(rows, kind, labels=labels, scale_norm=True)
    iterator = iter(loader)
    for _ in range(len(loader) - 3):
        next(iterator)
    with pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(loader)))) as sent:
        assert sent.state_dict() == loader.state_dict()
        for found, expected in zip(sent, iterator, strict=True):
            assert found.keys() == expected.keys()
            assert all(np.array_equal(found[name], expected[name]) for name in found)
    sent = pickle.loads(pickle.dumps(loader))
    assert (sent.epoch, sent.next_batch) == (1, 0)
    loader.close()


@every_kind
@pytest.mark.parametrize("drop_last", [False, True])
def test_resuming_at_every_batch_equals_continuing(rows, kind, drop_last):
    whole = acts(make(rows, kind, drop_last=drop_last))
    loader = make(rows, kind, drop_last=drop_last)
    for stop_at in range(len(whole)):
        loader.set_epoch(0)
        iterator = iter(loader)
        first = acts(next(iterator) for _ in range(stop_at))
        text = json.dumps(loader.state_dict())
        assert len(text) < 1000
        fresh = make(rows, kind, drop_last=drop_last, n_threads=3)
        fresh.load_state_dict(json.loads(text))
        assert fresh.state_dict() == json.loads(text)
        assert same(first + acts(fresh), whole)
        assert fresh.epoch == 1


@every_kind
def test_an_epoch_is_over_with_its_last_batch(rows, kind):
    """Loops that count batches, and never see the end, go on with the next epoch."""
    loader = make(rows, kind)
    expected = [acts(loader), acts(loader)]
    loader.set_epoch(0)
    for number in range(2):
        iterator = iter(loader)
        assert same(acts(next(iterator) for _ in range(len(loader))), expected[number])
        assert (loader.epoch, loader.next_batch) == (number + 1, 0)
        assert next(iterator, None) is None
        state = loader.state_dict()
        fresh = make(rows, kind)
        fresh.load_state_dict(state)
        if number == 0:
            assert same(acts(fresh), expected[1])


@every_kind
def test_twice_in_a_row_and_into_the_next_epoch(rows, kind):
    reference = make(rows, kind)
    expected = [*acts(reference), *acts(reference)]
    assert kind == "ordered" or not same(expected[: len(reference)], expected[len(reference) :])
    found: list[np.ndarray] = []
    state = None
    steps = [3, 1, 4, 5, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]
    while len(found) < len(expected):
        loader = make(rows, kind)
        if state is not None:
            loader.load_state_dict(state)
        n = steps.pop()
        while n > 0 and len(found) < len(expected):
            for batch in loader:
                found.append(batch["act"].copy())
                n -= 1
                if n == 0 or len(found) == len(expected):
                    break
        state = json.loads(json.dumps(loader.state_dict()))
        loader.close()
    assert same(found, expected)


@pytest.mark.parametrize("kind", ["ordered", "block", "whole"])
def test_other_numbers_of_ranks_continue(rows, kind):
    whole = acts(make(rows, kind, drop_last=True))
    done, state = 0, None
    for world, n in ((1, 3), (4, 2), (2, 5), (1, 2)):
        ranks = [
            make(rows, kind, drop_last=True, batch_size=24 // world, rank=rank, world=world) for rank in range(world)
        ]
        states = []
        parts = []
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
            iterator = iter(loader)
            parts.append(acts(next(iterator) for _ in range(n)))
            states.append(loader.state_dict())
            loader.close()
        assert all(one == states[0] for one in states)
        state = states[0]
        for number in range(n):
            np.testing.assert_array_equal(np.concatenate([part[number] for part in parts]), whole[done + number])
        done += n


@pytest.mark.parametrize("kind", ["ordered", "block", "whole"])
def test_every_batch_continues_on_every_number_of_ranks(rows, kind):
    """Stopped after any batch on one, two or four ranks, continued on any other number of them."""
    more = {"drop_last": True, **({"n_partitions": 4} if kind == "whole" else {})}
    whole = acts(make(rows, kind, **more))

    def ranks(world: int) -> list:
        return [make(rows, kind, batch_size=24 // world, rank=rank, world=world, **more) for rank in range(world)]

    for number, (before, after) in enumerate(itertools.permutations((1, 2, 4), 2)):
        begun = ranks(before)
        iterators = [iter(loader) for loader in begun]
        for stop_at in range(len(whole)):
            states = [loader.state_dict() for loader in begun]
            assert all(state == states[0] for state in states)
            if stop_at % 6 == number:  # every batch, and every pair at several of them
                continued = ranks(after)
                for loader in continued:
                    loader.load_state_dict(states[0])
                parts = [acts(loader) for loader in continued]
                assert same([np.concatenate(part) for part in zip(*parts, strict=True)], whole[stop_at:])
            assert same([np.concatenate([next(one)["act"] for one in iterators])], whole[stop_at : stop_at + 1])
        for loader in begun:
            loader.close()


def test_the_order_comes_from_the_state(rows):
    """A loader made with another window continues the order that was begun, if it has the memory."""
    first = ShuffledLoader(rows, batch_size=24, window_bytes=6000, seed=3)
    whole = acts(ShuffledLoader(rows, batch_size=24, window_bytes=6000, seed=3))
    iterator = iter(first)
    next(iterator)
    second = ShuffledLoader(rows, batch_size=24, window_bytes=1 << 20, seed=3)
    second.load_state_dict(first.state_dict())
    assert same(acts(second), whole[1:])
    small = ShuffledLoader(rows, batch_size=24, window_bytes=500, seed=3)
    with pytest.raises(ArgumentError, match="window_bytes=") as refused:
        small.load_state_dict(first.state_dict())
    needed = int(str(refused.value).rstrip(".").split("window_bytes=")[1])
    third = ShuffledLoader(rows, batch_size=24, window_bytes=needed, seed=3)
    third.load_state_dict(first.state_dict())
    assert same(acts(third), whole[1:])
    first.close()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 4}, "seed"),
        ({"batch_size": 12}, "global_batch_size"),
        ({"drop_last": True}, "drop_last"),
        ({"kind": OrderedLoader}, "kind"),
    ],
)
def test_mismatches_are_refused(rows, changed, message):
    state = ShuffledLoader(rows, batch_size=24, seed=3).state_dict()
    options = {"batch_size": 24, "seed": 3, **changed}
    kind = options.pop("kind", ShuffledLoader)
    if kind is OrderedLoader:
        options.pop("seed")
    with pytest.raises(ArgumentError, match=message):
        kind(rows, **options).load_state_dict(state)


def test_a_scaled_state_is_for_loaders_that_scale(rows):
    """And the other way round; a loader that has refused a state goes on as it was."""
    plain, scaled = (OrderedLoader(rows, batch_size=24, scale_norm=scale) for scale in (False, 2.0))
    for loader, other, what in ((plain, scaled, "does not scale"), (scaled, plain, "scales")):
        before = loader.state_dict()
        with pytest.raises(ArgumentError, match=f"but this loader {what}"):
            loader.load_state_dict(other.state_dict())
        assert loader.state_dict() == before
    assert plain.scale is None
    np.testing.assert_array_equal(acts(scaled)[0], 2 * acts(plain)[0])


@pytest.mark.parametrize(
    "damage",
    [
        {"batch": -1}, {"batch": 10**9}, {"batch": "3"}, {"epoch": None}, {"epoch": True}, {"window_blocks": 0},
        {"n_partitions": 5}, {"examples_per_block": 2**30}, {"early_start": 1}, {"early_start": None}, {"order_version": 2}, {"version": 99}, {"rows": "0" * 16},
    ],
)  # fmt: skip
def test_damaged_states_are_refused(rows, damage):
    loader = ShuffledLoader(rows, batch_size=24)
    before = loader.state_dict()
    with pytest.raises(ArgumentError, match=next(iter(damage))):
        loader.load_state_dict({**before, **damage})
    with pytest.raises(ArgumentError, match="must be what"):
        loader.load_state_dict([1])
    assert loader.state_dict() == before


def test_a_larger_window_is_continued_with_less_read_ahead(tmp_path):
    plain = plain_store(tmp_path, n=2000, tokens=7, per_shard=100, d_model=256)
    rows = ShardStore.open(plain.path).sel(layer=2, tokens="content")
    options, budget = {"batch_size": 24, "n_partitions": 4, "examples_per_block": 2}, 6 << 20
    here = ShuffledLoader(rows, window_bytes=budget, **options)
    usual = here.state_dict()["window_blocks"]
    there = ShuffledLoader(rows, window_blocks=usual + 1, window_bytes=budget, **options)
    assert there.explain().window_bytes > here.explain().window_bytes
    assert here.explain().window_bytes < 1.1 * budget  # with tables, and what is rounded
    whole = acts(there)
    there.set_epoch(0)
    iterator = iter(there)
    first = acts(next(iterator) for _ in range(20))
    here.load_state_dict(there.state_dict())
    assert here.explain().window_bytes < 1.1 * budget
    assert same(first + acts(here), whole)


@pytest.mark.parametrize("early", [False, True])
def test_a_state_says_how_its_epoch_began(rows, early):
    """A loader that begins otherwise goes on with the epoch of the state. States that do not say it are of loaders without the option."""
    options = {"batch_size": 24, "window_blocks": 9, "n_partitions": 2}
    there = ShuffledLoader(rows, early_start=early, **options)
    whole = acts(there)
    there.set_epoch(0)
    iterator = iter(there)
    first = acts(next(iterator) for _ in range(3))
    state = there.state_dict()
    assert state["early_start"] is early
    here = ShuffledLoader(rows, early_start=not early, **options)
    assert not same(acts(here), whole)
    here.load_state_dict(state)
    assert same(first + acts(here), whole)
    if not early:
        del state["early_start"]
        here = ShuffledLoader(rows, early_start=True, **options)
        here.load_state_dict(state)
        assert same(first + acts(here), whole)


def test_memory_for_the_whole_store_is_enough_for_any_state_of_it(tmp_path):
    rows = ShardStore.open(plain_store(tmp_path, n=400, tokens=16, per_shard=100, d_model=8).path).sel(
        layer=2, tokens="content"
    )
    options = {"batch_size": 1024, "window_bytes": int(len(rows) * 32 * 1.1)}
    there = ShuffledLoader(rows, early_start=True, **options)
    here = ShuffledLoader(rows, **options)
    here.load_state_dict(there.state_dict())
    assert same(acts(here), acts(there))


def test_loading_ends_an_iteration_under_way(rows):
    loader = make(rows, "block")
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    next(iterator)
    loader.load_state_dict(state)
    with pytest.raises(ArgumentError, match="Call iter"):
        next(iterator)
    assert len(acts(loader)) == len(loader) - 1


def test_epochs(rows):
    loader = make(rows, "block", drop_last=True)
    zero, one = acts(loader), acts(loader)
    assert loader.epoch == 2
    loader.set_epoch(0)
    assert same(acts(loader), zero)
    assert same(acts(loader), one)
    for batch in loader:  # left early: the next iteration begins the same epoch again
        del batch
        break
    assert loader.epoch == 2
    two = acts(loader)
    loader.set_epoch(2)
    assert same(acts(loader), two)
    for bad in (-1, 1.5, True):
        with pytest.raises(ArgumentError, match="epoch"):
            loader.set_epoch(bad)


@pytest.mark.parametrize(
    "change", [{"ckpt": "another"}, {"family": "siglip"}, {"data": {"__class__": "Plain", "seed": 1}}]
)
def test_rows_of_another_recording_do_not_continue(tmp_path, change):
    """Of equal shape: the order would go on, over other vectors."""
    plain = plain_store(tmp_path / "one", n=20)
    store = ShardStore.open(plain.path)
    metadata = store.metadata.replace(**change)
    with create_store(open_transport(tmp_path / "two"), metadata, progress=False) as writer:
        writer.append(plain.acts)
    other = ShardStore.open(tmp_path / "two" / metadata.hash)
    for kind in (OrderedLoader, ShuffledLoader):
        state = kind(store.sel(layer=5), batch_size=4).state_dict()
        with pytest.raises(ArgumentError, match="rows"):
            kind(other.sel(layer=5), batch_size=4).load_state_dict(state)


def test_rows_in_another_version_of_the_protocol_continue(tmp_path):
    plain = plain_store(tmp_path / "one", n=20)
    state = ShuffledLoader(ShardStore.open(plain.path).sel(layer=5), batch_size=4).state_dict()
    copy = copy_store(plain.path, tmp_path / "two", protocol="2.1", progress=False)
    ShuffledLoader(ShardStore.open(copy).sel(layer=5), batch_size=4).load_state_dict(state)


def test_a_text_that_is_a_deep_object_has_an_identity():
    """At some depth such a text can be parsed, but not written again one level deeper."""
    for depth in range(800, 1001):
        text = "[" * depth + "]" * depth
        assert text.encode() in _identity._recorded(SimpleNamespace(family="c", ckpt="c", data=text))


def test_the_same_rows_elsewhere_continue(tmp_path):
    """A state knows what was chosen, not where it lies: a copied store continues it, another store does not."""
    one = plain_store(tmp_path / "one", n=20)
    two = plain_store(tmp_path / "two", n=20)
    other = plain_store(tmp_path / "other", n=21)
    state = ShuffledLoader(ShardStore.open(one.path).sel(layer=5), batch_size=4).state_dict()
    ShuffledLoader(ShardStore.open(two.path).sel(layer=5), batch_size=4).load_state_dict(state)
    for rows in (ShardStore.open(other.path).sel(layer=5), ShardStore.open(two.path).sel(layer=2)):
        with pytest.raises(ArgumentError, match="rows"):
            ShuffledLoader(rows, batch_size=4).load_state_dict(state)


@pytest.mark.parametrize(("batch_size", "n_partitions"), [(10, 2), (30, 2), (150, 2), (20, 4)])
def test_a_last_batch_of_repeated_rows_alone_is_continued_with(tmp_path, batch_size, n_partitions):
    """A rank whose rows end with a full batch repeats its last one, where the other rank has one more: also without that batch."""
    plain = plain_store(tmp_path, n=43, layers=(1,), tokens=7, per_shard=9)
    rows = ShardStore.open(plain.path).sel(layer=1, tokens="content")
    assert len(rows) == 2 * 150 + 1
    for rank in (0, 1):
        options = {
            "batch_size": batch_size, "window_blocks": 2, "n_partitions": n_partitions, "rank": rank, "world": 2, "n_threads": 2,
        }  # fmt: skip
        loader = ShuffledLoader(rows, **options)
        whole = [(batch["act"].copy(), batch["example_idx"].copy()) for batch in loader]
        assert [len(act) for act, _ in whole[:-1]] == [batch_size] * (150 // batch_size)
        for stop_at in range(len(whole)):
            loader.set_epoch(0)
            state = {**loader.state_dict(), "batch": stop_at}
            fresh = ShuffledLoader(rows, **options)
            fresh.load_state_dict(state)
            found = [(batch["act"].copy(), batch["example_idx"].copy()) for batch in fresh]
            assert same([act for act, _ in found], [act for act, _ in whole[stop_at:]])
            assert same([example for _, example in found], [example for _, example in whole[stop_at:]])


@pytest.mark.parametrize("scale", [0.0, -0.0, -2.0, float("inf"), float("nan"), 2, "2.0"])
def test_a_state_with_a_scale_that_no_loader_has_is_refused(rows, scale):
    loader = OrderedLoader(rows, batch_size=24, scale_norm=2.0)
    with pytest.raises(ArgumentError, match="scale"):
        loader.load_state_dict({**loader.state_dict(), "scale": scale})
    assert loader.scale == 2.0


@pytest.mark.parametrize("kind", [OrderedLoader, ShuffledLoader])
def test_a_state_is_of_the_tokens_that_are_left_not_of_their_number(kind, tmp_path):
    """Each selection leaves out one token, another one."""
    store = ShardStore.open(plain_store(tmp_path, n=12, tokens=4).path)
    masks = np.ones((2, 12, 4), bool)
    masks[0, 3, 1] = masks[1, 3, 2] = False
    one, other = (kind(store.sel(layer=5, tokens="content").only(mask), batch_size=8) for mask in masks)
    assert len(one) == len(other)
    with pytest.raises(ArgumentError, match="saved with rows"):
        other.load_state_dict(one.state_dict())


@pytest.mark.parametrize("kind", [OrderedLoader, ShuffledLoader])
def test_a_state_is_of_the_labels_that_are_left_not_of_their_number(kind, tmp_path):
    plain = plain_store(tmp_path, n=12, tokens=4, labels=True)
    np.tile(np.arange(4, dtype=np.uint8), (12, 1)).tofile(plain.path / "labels.bin")  # as many of each
    store = ShardStore.open(plain.path)
    one, other = (kind(store.sel(layer=5, tokens="content", ignore_labels=[label]), batch_size=8) for label in (1, 2))
    assert len(one) == len(other)
    with pytest.raises(ArgumentError, match="saved with rows"):
        other.load_state_dict(one.state_dict())
