"""Loaders of rows of several layers keep all promises: each row once, the order of one layer, ranks, resuming, memory, cost."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter

import ml_dtypes
import numpy as np
import pytest
from api import MemoryTransport
from hypothesis import given
from hypothesis import strategies as st
from plain_stores import Plain, plain_store
from stacked import Stacked, stacked_rows

from saev_store import ShardStore, new_metadata
from saev_store.core.layout import Layout
from saev_store.core.rows import row_space
from saev_store.errors import ArgumentError
from saev_store.loaders import OrderedLoader, ShuffledLoader, shuffle_quality
from saev_store.loaders._ring import HostMemory
from saev_store.loaders._shuffled_batches import vectors_of_rows
from saev_store.order import Blocks
from saev_store.store.reader import Reader
from saev_store.store.selection import Selection
from saev_store.transport import ReadCost

KINDS = [OrderedLoader, ShuffledLoader]


class Far(MemoryTransport):
    """Memory that is read like a bucket; gaps of up to 300 bytes are cheaper than a request."""

    is_local = reads_into = False
    cost = ReadCost(300, 1 << 20)


class FarByOneVector(Far):
    """Gaps of one vector of 128 numbers are cheaper than a request, too."""

    cost = ReadCost(600, 1 << 20)


@st.composite
def options_of(draw: st.DrawFn, n_rows: int) -> tuple[type, int, dict[str, object]]:
    """(kind, world, options) that go together."""
    world, batch_size = draw(st.integers(1, 3)), draw(st.integers(1, 30))
    drop_last = draw(st.booleans()) or n_rows < world
    shared = {"batch_size": batch_size, "drop_last": drop_last, "n_threads": 2}
    if draw(st.booleans()):
        return OrderedLoader, world, shared
    fitting = [n for n in range(world, 9, world) if world * batch_size % n == 0 and (drop_last or n <= n_rows)]
    more = {
        "seed": draw(st.integers(0, 5)),
        "examples_per_block": draw(st.sampled_from([None, 1, 3])),
        "n_partitions": draw(st.sampled_from([None, *fitting])),
        **draw(st.sampled_from([{"window_blocks": 2}, {"window_blocks": 5}, {"window_bytes": 700}, {}])),
        "early_start": draw(st.booleans()),
    }
    return ShuffledLoader, world, {**shared, **more}


def handed_out(loader) -> list[tuple[np.ndarray, list[tuple[int, int]]]]:
    """Of each batch, `act` and the (example, token on the token axis) of its rows."""
    n_special = loader._space.layout.n_special_tokens
    found = []
    for batch in loader:
        assert set(batch) == {"act", "example_idx", "token_idx"}
        token = batch["token_idx"] + n_special
        found.append((batch["act"].copy(), list(zip(batch["example_idx"].tolist(), token.tolist(), strict=True))))
    return found


def assert_rows(case: Stacked, batches) -> None:
    """Every batch holds what the tensor has where the batch says."""
    for act, where in batches:
        rows = [case.acts[example, case.layer_idx, token] for example, token in where]
        truth = np.stack(rows).astype(case.dtype)
        assert (act.dtype, act.shape) == (truth.dtype, truth.shape)
        assert np.array_equal(act.view(np.uint8), truth.view(np.uint8))


@given(stacked_rows(repeats=False), st.sampled_from([MemoryTransport, Far]), st.data())
def test_exactly_once_over_ranks(case: Stacked, transport: type, data: st.DataObject):
    kind, world, options = data.draw(options_of(len(case.where)))
    ranks = []
    for rank in range(world):
        with kind(case.selection(transport), rank=rank, world=world, **options) as loader:
            ranks.append(handed_out(loader))
            assert len(ranks[-1]) == len(loader)
    for batches in ranks:
        assert_rows(case, batches)
        assert [len(act) for act, _ in batches] == [len(act) for act, _ in ranks[0]]
    counts = Counter(place for batches in ranks for _, where in batches for place in where)
    if options["drop_last"]:
        at_once = world * options["batch_size"]
        assert sum(counts.values()) == len(case.where) // at_once * at_once
        assert max(counts.values(), default=1) == 1
        assert counts.keys() <= set(case.where)
    else:
        assert counts.keys() == set(case.where)
        assert world > 1 or max(counts.values(), default=1) == 1
        assert sum(counts.values()) - len(case.where) < 9
    if world == 1 and kind is OrderedLoader:
        assert [place for _, where in ranks[0] for place in where] == case.where[: sum(counts.values())]


@given(stacked_rows(repeats=False), st.data())
def test_the_order_is_that_of_one_layer(case: Stacked, data: st.DataObject):
    """With a window of as many blocks, every layer by itself has the same tokens in the same batches."""
    kind, world, options = data.draw(options_of(len(case.where)))
    if kind is ShuffledLoader:
        options.pop("window_bytes", None)
        with kind(case.selection(), world=world, rank=0, **options) as loader:
            state = loader.state_dict()
        options |= {name: state[name] for name in ("examples_per_block", "n_partitions", "window_blocks")}
    rank = data.draw(st.integers(0, world - 1))
    with kind(case.selection(), world=world, rank=rank, **options) as loader:
        stacked = handed_out(loader)
    with kind(case.one_layer(), world=world, rank=rank, **options) as loader:
        alone = handed_out(loader)
    assert [where for _, where in stacked] == [where for _, where in alone]
    for (act, _), (one, _) in zip(stacked, alone, strict=True):
        assert np.array_equal(act[:, 0].view(np.uint8), one.view(np.uint8))


@given(stacked_rows(repeats=False), st.data())
def test_resuming_anywhere_on_any_ranks(case: Stacked, data: st.DataObject):
    kind, world, options = data.draw(options_of(len(case.where)))
    size = options.pop("batch_size")
    others = [n for n in range(1, 5) if world * size % n == 0]
    if kind is ShuffledLoader:
        options["n_partitions"] = options["n_partitions"] or world
        others = [n for n in others if options["n_partitions"] % n == 0]
    now = data.draw(st.sampled_from(others))
    options["drop_last"] = True  # ranks are filled up with other rows on other numbers of ranks
    first = kind(case.selection(), rank=0, world=world, batch_size=size, **options)
    n_batches = len(first)
    stop = data.draw(st.integers(0, n_batches))
    with first:
        iterator = iter(first)
        for _ in range(stop):
            next(iterator)
        state = json.loads(json.dumps(first.state_dict()))
    parts, whole = [], []
    for rank in range(now):
        with kind(case.selection(), rank=rank, world=now, batch_size=world * size // now, **options) as loader:
            loader.load_state_dict(state)
            parts.append(handed_out(loader))
    for rank in range(world):
        with kind(case.selection(), rank=rank, world=world, batch_size=size, **options) as loader:
            if stop == n_batches > 0:
                loader.set_epoch(1)
            whole.append(handed_out(loader)[stop if stop < n_batches else 0 :])
    rest = [[where for rank in whole for where in rank[n][1]] for n in range(len(whole[0]))]
    assert [sorted(where for rank in parts for where in rank[n][1]) for n in range(len(parts[0]))] == list(
        map(sorted, rest)
    )
    if now == world:
        assert [where for rank in parts for _, where in rank] == [where for rank in whole for _, where in rank]
    for batches in parts:
        assert_rows(case, batches)


@given(stacked_rows(), st.integers(1, 4))
def test_a_cache_knows_the_extents_of_all_stacked_layers(case: Stacked, group: int):
    """From an example and a layer to the block that they are read with."""
    blocks = Blocks(case.space, group)
    n_layers, wanted = case.layout.n_layers, {example for example, _ in case.where}
    example, layer = np.divmod(np.arange(case.layout.n_examples * n_layers), n_layers)
    found = blocks.numbers_of(example, layer)
    for nth, number in enumerate(found.tolist()):
        is_wanted = int(example[nth]) in wanted and int(layer[nth]) in case.layer_idx
        assert (number >= 0) >= is_wanted
        if int(layer[nth]) not in case.layer_idx:
            assert number == -1
        elif number >= 0:
            place = blocks.places(np.array([number]))
            held = blocks.space.example(place.first + np.arange(int(place.n_examples[0])))
            assert int(example[nth]) in held.tolist()


def golden(kind: type, **options) -> str:
    """Digest of the (example, token) of all rows of two epochs."""
    layout = Layout(31, (2, 5, 11), 6, True, 2, 7)
    files = {f"acts{i:06d}.bin": bytes(7 * layout.example_nbytes) for i in range(5)}
    labels = (np.arange(31 * 6, dtype=np.uint8) % 5).reshape(31, 6) if options.pop("labels", False) else None
    space = row_space(
        layout, layer=options.pop("layer"), tokens="content", stack_layers=options.pop("stack_layers", True),
        labels=labels, ignore_labels=None if labels is None else [1, 3],
    )  # fmt: skip
    digest = hashlib.sha256()
    with kind(Selection(Reader(MemoryTransport(files), layout), space), batch_size=16, **options) as loader:
        for batch in itertools.chain(loader, loader):
            digest.update(np.stack([batch["example_idx"], batch["token_idx"]]).astype("<i8").tobytes())
    return digest.hexdigest()[:16]


GOLDEN = {
    "ordered": (OrderedLoader, {}, "9adc1391b81374d4"),
    "a window": (ShuffledLoader, {"window_blocks": 3, "n_partitions": 4}, "b376d08be13b5ff2"),
    "groups": (
        ShuffledLoader,
        {"window_blocks": 2, "n_partitions": 2, "examples_per_block": 3, "seed": 5},
        "12cb6bb3c5021708",
    ),
    "all at once": (ShuffledLoader, {"window_blocks": 99, "n_partitions": 1}, "fa9c2f620b700d06"),
    "labels": (ShuffledLoader, {"window_blocks": 3, "n_partitions": 4, "labels": True}, "d1f79c7165c1bcbd"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_orders_of_stacked_rows(name):
    """Never to be changed; they are those of one layer, however many are stacked."""
    kind, options, expected = GOLDEN[name]
    assert golden(kind, layer=(11, 2), **options) == expected
    assert golden(kind, layer="all", **options) == expected
    assert golden(kind, layer=5, stack_layers=False, **options) == expected


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Plain:
    return plain_store(tmp_path_factory.mktemp("stacked"), n=43, tokens=7, per_shard=9, labels=True, d_model=16)


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_stacked_rows_are_their_own(plain, kind):
    store = ShardStore.open(plain.path)
    made = {
        stack: kind(store.sel(layer=layer, tokens="content", stack_layers=stack == "stacked"), batch_size=16)
        for stack, layer in (("stacked", 5), ("alone", 5))
    }
    made["other order"] = kind(store.sel(layer=(2, 5), tokens="content", stack_layers=True), batch_size=16)
    made["this order"] = kind(store.sel(layer=(5, 2), tokens="content", stack_layers=True), batch_size=16)
    for (one, loader), (other, giver) in itertools.permutations(made.items(), 2):
        assert loader.n_samples == giver.n_samples, "only what a row holds differs"
        with pytest.raises(ArgumentError, match="saved with rows"):
            loader.load_state_dict(giver.state_dict())
        assert one != other
    for loader in made.values():
        loader.load_state_dict(loader.state_dict())
        loader.close()


@pytest.mark.parametrize("dtype", ["float32", "stored", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_sixteen_bits_masks_and_hook_points(tmp_path, kind, dtype):
    rng = np.random.default_rng(1)
    metadata = new_metadata(
        family="gpt2", ckpt="random", layers=(2, 5, 5), hook_points=["resid_post", "attn_out", "resid_post"],
        content_tokens_per_example=6, cls_token=True, d_model=4, n_examples=13, max_tokens_per_shard=90,
        dtype="bfloat16", token_arrays={"labels": "uint8", "mask": "bool"},
    )  # fmt: skip
    acts = rng.standard_normal((13, 3, 7, 4)).astype(ml_dtypes.bfloat16)
    labels, mask = rng.integers(0, 3, (13, 6)).astype(np.uint8), rng.integers(0, 2, (13, 6)).astype(bool)
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(acts, labels=labels, mask=mask)
    store = ShardStore.open(tmp_path / metadata.hash, engine="pread")
    layer = [(5, "resid_post"), 2, (5, "attn_out")]
    truth = acts if dtype == "stored" else acts.astype(dtype)
    for keep, conditions in ((mask, {}), (labels == 1, {"where": {"labels": 1}, "masked": True})):
        seen = []
        rows = store.sel(layer=layer, tokens="content", stack_layers=True, dtype=dtype, **conditions)
        with kind(rows, batch_size=8, token_arrays=["labels"]) as loader:
            for batch in loader:
                example, token = batch["example_idx"], batch["token_idx"]
                assert np.array_equal(batch["labels"], labels[example, token])
                expected = truth[example[:, None], [2, 0, 1], token[:, None] + 1]
                assert (batch["act"].dtype, batch["act"].shape) == (expected.dtype, expected.shape)
                assert np.array_equal(batch["act"].view(np.uint8), expected.view(np.uint8))
                seen += zip(example.tolist(), token.tolist(), strict=True)
        assert sorted(seen) == [tuple(place) for place in np.argwhere(keep).tolist()]


def test_a_row_counts_with_all_its_layers(plain):
    """A window of so many bytes holds a third of the rows where these have three layers; nothing else is different."""
    store, made = ShardStore.open(plain.path, engine="pread"), []

    def make(n_rows: int, d_model: int) -> HostMemory:
        made.append(n_rows * d_model * 4)
        return HostMemory(n_rows, d_model)

    options = {"batch_size": 16, "memory": make, "medium": "flash"}
    for window in (5_000, 9_000, 20_000):
        one = ShuffledLoader(store.sel(layer=5, tokens="content"), window_bytes=window, **options)
        three = ShuffledLoader(
            store.sel(layer="all", tokens="content", stack_layers=True), window_bytes=3 * window, **options
        )
        names = ("examples_per_block", "n_partitions", "window_blocks")
        assert [one.state_dict()[name] for name in names] == [three.state_dict()[name] for name in names]
        tables = 24 * 16
        rows = one.explain().window_bytes // (16 * 16 * 4 + tables)
        assert three.explain().window_bytes == rows * (16 * 3 * 16 * 4 + tables)
        assert three.explain().buffer_bytes == 3 * one.explain().buffer_bytes
        assert three.explain().mixing == one.explain().mixing
        list(one), list(three)
        assert made[-1] == 3 * made[-2]
        assert three.explain().cost.bytes_wanted == 3 * one.explain().cost.bytes_wanted
        metrics, other = three.metrics(), one.metrics()
        assert metrics.n_rows == other.n_rows == 43 * 7
        assert metrics.mb_per_s * metrics.elapsed_s == pytest.approx(43 * 7 * 3 * 64 / 1e6)


def test_mixing_is_as_predicted():
    layout = Layout(4000, (0, 1), 16, False, 1, 4000)
    rows = Selection(Reader(MemoryTransport({}), layout), row_space(layout, stack_layers=True))
    with ShuffledLoader(rows, batch_size=512, window_bytes=16 * 4 * 2 * 700, medium="memory") as loader:
        quality = shuffle_quality(loader, n_batches=20)
    assert quality.distinct_examples == pytest.approx(quality.expected.distinct_examples, rel=0.03)
    assert quality.distinct_examples < 0.95 * quality.expected.full_shuffle


def test_places_of_vectors_are_not_limited_to_32_bits():
    rows = np.array([2**31 - 1, 5, 0, 2**30], dtype=np.int32)
    found = vectors_of_rows(rows, 2, 3)
    examples = ([2**31 - 1, 5], [0, 2**30])
    assert found.tolist() == [row * 3 + layer for example in examples for layer in range(3) for row in example]
    assert vectors_of_rows(rows, 2, 1).tolist() == rows.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_the_scale_is_one_for_all_layers(plain, kind):
    rows = ShardStore.open(plain.path).sel(layer=(2, 11), tokens="content", stack_layers=True)
    norms = np.linalg.norm(plain.acts[:, [0, 2], 1:].astype(np.float64), axis=-1)
    with kind(rows, batch_size=64, scale_norm=True) as loader:
        assert loader.scale == pytest.approx(4 / norms.mean())
        for batch in loader:
            truth = plain.acts[batch["example_idx"][:, None], [0, 2], batch["token_idx"][:, None] + 1]
            np.testing.assert_allclose(batch["act"], truth * loader.scale, rtol=1e-6)
