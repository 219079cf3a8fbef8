"""An opened store against dense NumPy and against the samples that the reference implementation wrote."""

from __future__ import annotations

import copy
import json
import math
import multiprocessing
import os
import pickle
import re
import threading
import warnings
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from api import MemoryTransport
from dense_stores import PlainStore, plain_store
from hypothesis import given
from hypothesis import strategies as st
from strategies import component
from token_stores import TokenStore, token_store
from transports import LatencyTransport
from waiting import HANG_S

from saev_store import ShardStore
from saev_store.core.layout import Layout
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    IncompleteStoreError,
    LayerNotFoundError,
    NotFoundError,
    SaevStoreError,
    SaevStoreWarning,
    SelectionError,
    TransportError,
    UnknownProtocolError,
)
from saev_store.names import CLAIM_PATH
from saev_store.store.listing import list_stores
from saev_store.transport import ReadCost, Transport
from saev_store.transport.fsspec import FsspecTransport

SAMPLES = Path(__file__).parents[1] / "data" / "saev"
ENGINES = ["mmap", "pread", "fsspec"]
VALID = sorted(path.parent for path in SAMPLES.glob("*/expected.json"))
MALFORMED = json.loads((SAMPLES / "malformed" / "manifest.json").read_text())["cases"]


class Picky(MemoryTransport):
    """Memory whose gaps have a price, so that the planner of remote reads is what runs; records its requests."""

    def __init__(self, files: dict[str, bytes], cost: ReadCost) -> None:
        super().__init__(files)
        self.cost = cost
        self.requests: list[tuple[str, int, int]] = []

    def get_ranges(self, path: str, *, starts: list[int], ends: list[int]) -> list[memoryview]:
        self.requests += [(path, start, end) for start, end in zip(starts, ends, strict=True)]
        return super().get_ranges(path, starts=starts, ends=ends)


def opened(transport: Transport, **kwargs: object) -> ShardStore:
    """A store held in memory has no name to compare its hash with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaevStoreWarning)
        return ShardStore.open(transport, **kwargs)


def same_bits(found: object, expected: np.ndarray) -> None:
    array = np.asarray(found)
    assert array.dtype == np.float32
    assert array.shape == expected.shape
    assert array.tobytes() == expected.tobytes()


# -- samples -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [*ENGINES])
@pytest.mark.parametrize("sample", VALID, ids=lambda path: path.name)
def test_peer_written_stores_equal_their_truth_bit_for_bit(sample: Path, engine: str) -> None:
    expected = json.loads((sample / "expected.json").read_text())
    folder = sample / expected["store"]
    if engine == "memory":
        store = opened(MemoryTransport({file.name: file.read_bytes() for file in folder.iterdir()}))
    else:
        store = ShardStore.open(folder, engine=engine)
    truth = np.load(sample / "acts.npy")
    same_bits(store[...], truth)
    for example, layer_idx, token in np.ndindex(truth.shape[:3]):
        same_bits(store[example, layer_idx, token], truth[example, layer_idx, token])
    n_special = store.layout.n_special_tokens
    for layer_idx, layer in enumerate(store.layers):
        content = store.sel(layer=layer, tokens="content")
        same_bits(content.as_numpy(), truth[:, layer_idx, n_special:].reshape(-1, truth.shape[3]))
    if (sample / "labels.npy").exists():
        np.testing.assert_array_equal(store.labels, np.load(sample / "labels.npy"))
    else:
        assert store.labels is None
    assert engine == "memory" or not [problem for problem in store.problems if problem.severity == "error"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", MALFORMED, ids=lambda case: case["case"])
def test_malformed_samples_are_refused_or_reported(
    case: dict[str, str], engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = SAMPLES / "malformed" / case["case"] / case["store"]
    monkeypatch.chdir(tmp_path)  # where the hostile pickle would leave its mark
    refused = ""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            store = ShardStore.open(folder, engine=engine)
            assert store[...].shape == store.shape
        except SaevStoreError as error:
            refused = str(error)
    if case["expect"] == "error":
        assert str(folder) in refused
    else:
        assert not refused
        assert (case["expect"] == "error_or_warning") == any(w.category is SaevStoreWarning for w in told)
    assert list(tmp_path.iterdir()) == []
    if case["case"] == "unknown_protocol":
        assert any("breaking" in str(warning.message).lower() for warning in told)


# -- random layouts, any key, every transport --------------------------------------------------------------------------

layouts = st.builds(
    Layout,
    n_examples=st.integers(1, 9),
    layers=st.lists(st.integers(-3, 12), min_size=1, max_size=3, unique=True).map(tuple),
    content_tokens_per_example=st.integers(1, 4),
    cls_token=st.booleans(),
    d_model=st.integers(1, 4),
    examples_per_shard=st.integers(1, 5),
)
stores = st.builds(
    plain_store,
    layouts,
    seed=st.integers(0, 5),
    tail=st.sampled_from(["padded", "cut"]),
    empty_trailer=st.booleans(),
    labelled=st.just(True),
)
costs = st.one_of(
    st.just(ReadCost(math.inf, math.inf)),
    st.builds(ReadCost, st.sampled_from([0, 4, 16, 64, 400]), st.sampled_from([1, 16, 48, 200, 10**6])),
)


@given(stores, costs, st.data())
def test_any_key_reads_what_numpy_reads(plain: PlainStore, cost: ReadCost, data: st.DataObject) -> None:
    store = opened(Picky(plain.files, cost))
    n_items = data.draw(st.integers(0, 4))
    key = tuple(data.draw(component(n)) for n in plain.dense.shape[:n_items])
    try:
        expected = plain.dense[key]
    except IndexError:
        with pytest.raises(SelectionError):
            store[key]
        return
    same_bits(store[key], expected)
    out = np.empty(expected.shape, dtype=np.float32)
    assert store.read(key, out=out) is out
    same_bits(out, expected)


@given(stores, costs, st.data())
def test_any_selection_reads_what_a_dense_gather_reads(plain: PlainStore, cost: ReadCost, data: st.DataObject) -> None:
    store = opened(Picky(plain.files, cost))
    layers = plain.layout.layers
    selection = store.sel(
        layer=data.draw(
            st.one_of(
                st.sampled_from(layers), st.just("all"), st.lists(st.sampled_from(layers), min_size=1, unique=True)
            )
        ),
        tokens=data.draw(st.sampled_from(["content", "all", *(["special"] if plain.layout.cls_token else [])])),
        examples=data.draw(st.one_of(st.none(), st.lists(st.integers(0, plain.layout.n_examples - 1), max_size=6))),
        ignore_labels=None,
    )
    if len(selection) == 0:
        assert selection.as_numpy().shape == (0, plain.layout.d_model)
        return
    where = selection.coordinates()
    layer_idx = np.array([layers.index(label) for label in where.layer])
    dense = plain.dense[where.example_idx, layer_idx, where.token_idx + plain.layout.n_special_tokens]
    same_bits(selection.as_numpy(), dense)
    same_bits(selection.rows(slice(None)), dense)
    rows = data.draw(st.lists(st.integers(-len(selection), len(selection) - 1), max_size=8))
    same_bits(selection[rows], dense[np.array(rows, dtype=int)])
    same_bits(selection[-1], dense[-1])
    same_bits(np.array(list(selection)), dense)


@given(stores, st.lists(st.integers(0, 3), min_size=1, max_size=2))
def test_ignored_labels_leave_exactly_the_others(plain: PlainStore, ignore: list[int]) -> None:
    store = opened(MemoryTransport(plain.files))
    assert plain.labels is not None
    selection = store.sel(layer=plain.layout.layers[0], tokens="content", ignore_labels=ignore)
    keep = ~np.isin(plain.labels, ignore)
    assert len(selection) == keep.sum()
    same_bits(selection.as_numpy(), plain.dense[:, 0, plain.layout.n_special_tokens :][keep])


LAYOUT = Layout(7, (2, 5, 11), 4, True, 8, 3)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("tail", ["padded", "cut"])
@pytest.mark.parametrize(
    "key", [..., 3, (slice(1, 6), 1), ([6, 0], slice(None), [1, 1]), (slice(None, None, -2), -1, 0, 3)]
)
def test_every_engine_on_real_files(engine: str, tail: str, key: object, tmp_path: Path) -> None:
    plain = plain_store(LAYOUT, tail=tail)
    store = ShardStore.open(plain.write(tmp_path), engine=engine)
    same_bits(store[key], plain.dense[key])


def test_large_contiguous_reads_take_the_direct_way(tmp_path: Path) -> None:
    layout = Layout(9, (0, 1, 2), 40, True, 1024, 4)
    plain = plain_store(layout)
    store = ShardStore.open(plain.write(tmp_path))
    for key in (
        ...,
        slice(2, 9),
        (slice(1, 8), 1),
        (slice(None, None, 2), slice(1, 3)),
        (slice(0, 4), 2, slice(1, 39)),
    ):
        same_bits(store[key], plain.dense[key])


# -- what is read ------------------------------------------------------------------------------------------------------


# -- views -------------------------------------------------------------------------------------------------------------


def test_views_share_the_map_and_are_read_only(tmp_path: Path) -> None:
    plain = plain_store(LAYOUT)
    store = ShardStore.open(plain.write(tmp_path))
    view = store.as_numpy((slice(3, 6), 1), copy=False)
    same_bits(view, plain.dense[3:6, 1])
    assert np.shares_memory(view, store.as_numpy((slice(3, 6), 1), copy=False))
    assert not view.flags.writeable
    one = store.sel(layer=5, tokens="content", examples=4).as_numpy(copy=False)
    assert np.shares_memory(one, view)
    same_bits(one, plain.dense[4, 1, 1:])
    assert not np.shares_memory(store.as_numpy((slice(3, 6), 1), copy=True), view)
    assert store[3:6, 1].flags.writeable
    store.close()
    same_bits(view, plain.dense[3:6, 1])  # a view outlives its store
    same_bits(store[0], plain.dense[0])  # and a closed store opens again


@pytest.mark.parametrize("key", [slice(2, 4), ([3, 4],), ...])
def test_what_is_no_view_says_so(key: object, tmp_path: Path) -> None:
    store = ShardStore.open(plain_store(LAYOUT).write(tmp_path))
    with pytest.raises(ArgumentError, match="copy=False"):
        store.as_numpy(key, copy=False)
    with pytest.raises(ArgumentError, match="copy=False"):
        store.sel(layer=5).as_numpy(copy=False)
    assert store.as_numpy(key).shape == store[key].shape


@pytest.mark.parametrize(
    "out",
    [
        np.empty((4, 8), dtype=np.float64),
        np.empty((5, 8), dtype=np.float32),
        np.empty((8, 4), dtype=np.float32).T,
        [[0.0]],
    ],
)
def test_memory_that_does_not_fit_is_refused(out: object) -> None:
    store = opened(MemoryTransport(plain_store(LAYOUT).files))
    with pytest.raises(ArgumentError, match="out is"):
        store.read((0, 0, slice(1, 5)), out=out)


# -- processes and threads ---------------------------------------------------------------------------------------------


def _answer(store: ShardStore, queue: object) -> None:
    queue.put((store[4, 1].tobytes(), store.sel(layer=5)[[3, 1]].tobytes()))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_stores_work_in_other_processes(engine: str, method: str, tmp_path: Path) -> None:
    plain = plain_store(LAYOUT)
    store = ShardStore.open(plain.write(tmp_path), engine=engine)
    same_bits(store[4], plain.dense[4])
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of fork beside threads; that is the point
        process = context.Process(target=_answer, args=(store, queue), daemon=True)
        process.start()
    process.join(HANG_S)
    assert process.exitcode == 0
    one, two = queue.get()
    assert one == plain.dense[4, 1].tobytes()
    assert two == plain.dense[:, 1].reshape(-1, 8)[[3, 1]].tobytes()


@pytest.mark.parametrize("engine", ["mmap", "pread", "fsspec"])
def test_a_pickled_selection_has_the_same_rows(tmp_path: Path, engine: Literal["mmap", "pread", "fsspec"]) -> None:
    made = token_store(tmp_path)
    store = ShardStore.open(made.path, engine=engine)
    for rows in (store.sel(layer=2), store.sel(layer=(5, 2), tokens="content", where={"act": 3}, stack_layers=True)):
        again = pickle.loads(pickle.dumps(rows))
        assert again.shape == rows.shape
        assert again[:].tobytes() == rows[:].tobytes()
        assert again[:3].tobytes() == copy.deepcopy(rows)[:3].tobytes()


def test_a_pickle_reopens_and_equals(tmp_path: Path) -> None:
    store = ShardStore.open(plain_store(LAYOUT).write(tmp_path))
    again = pickle.loads(pickle.dumps(store))
    assert again == store
    assert hash(again) == hash(store)
    assert store != "a store"
    same_bits(again[5], store[5])


def test_threads_share_a_store(tmp_path: Path) -> None:
    plain = plain_store(Layout(40, (0, 1), 3, True, 4, 3))
    store = ShardStore.open(plain.write(tmp_path))
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(200):
            example = int(rng.integers(40))
            if store[example].tobytes() != plain.dense[example].tobytes():
                wrong.append(example)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert wrong == []


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("damage", ["missing", "short"])
def test_what_is_lost_is_never_read_and_the_rest_is_right(engine: str, damage: str, tmp_path: Path) -> None:
    plain = plain_store(LAYOUT)
    folder = plain.write(tmp_path)
    shard = folder / "acts000001.bin"
    if damage == "missing":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:500])
    lost = {3, 4, 5} if damage == "missing" else {4, 5}
    with pytest.raises(CorruptShardError, match=r"acts000001.bin.*damaged_ok"):
        store = ShardStore.open(folder, engine=engine)
        store[3]  # far away, sizes are looked at when a shard is first read
    store = ShardStore.open(folder, engine=engine, damaged_ok=True)
    for example in range(7):
        if example in lost:
            with pytest.raises(CorruptShardError, match=r"acts000001\.bin"):
                store[example]
            with pytest.raises(CorruptShardError):
                store[example, 0, 0]
            with pytest.raises(CorruptShardError):
                store.sel(layer=2, tokens="all", examples=[example]).as_numpy()
        else:
            same_bits(store[example], plain.dense[example])
            same_bits(store[example, 2, 1], plain.dense[example, 2, 1])
    with pytest.raises(CorruptShardError):
        store[...]


def test_a_shard_that_vanishes_after_opening(tmp_path: Path) -> None:
    folder = plain_store(LAYOUT).write(tmp_path)
    store = ShardStore.open(folder)
    (folder / "acts000001.bin").unlink()
    with pytest.raises(CorruptShardError, match=r"acts000001\.bin"):
        store[3:6]


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_a_shard_that_is_replaced_is_never_mixed_with_what_was_there(engine: str, tmp_path: Path) -> None:
    layout = Layout(8, (0,), 64, False, 1024, 4)  # large enough for direct reads
    plain = plain_store(layout)
    folder = plain.write(tmp_path)
    store = ShardStore.open(folder, engine=engine)
    same_bits(store[:4], plain.dense[:4])
    other = plain_store(layout, seed=1)
    (folder / "new").write_bytes(other.files["acts000000.bin"])
    (folder / "new").replace(folder / "acts000000.bin")
    for key in (slice(0, 4), (1, 0, 3), (slice(0, 4), 0, 5)):
        try:
            found = store[key]
        except (CorruptShardError, TransportError) as error:
            assert re.search("taken the place|replaced", str(error))
        else:
            same_bits(found, plain.dense[key])
    fresh = ShardStore.open(folder, engine=engine)
    same_bits(fresh[:4], other.dense[:4])
    same_bits(fresh[1, 0, 3], other.dense[1, 0, 3])


@pytest.mark.parametrize("engine", ["mmap", "pread"])
@pytest.mark.parametrize("touched", [0, 5])
def test_shards_of_two_recordings_are_never_mixed(engine: str, touched: int, tmp_path: Path) -> None:
    """Some shards were read before the store was recorded anew, the others were not."""
    plain = plain_store(LAYOUT)
    folder = plain.write(tmp_path)
    store = ShardStore.open(folder, engine=engine)
    same_bits(store[touched], plain.dense[touched])
    for name, content in plain_store(LAYOUT, seed=1).files.items():
        if name.startswith("acts"):
            (folder / "new").write_bytes(content)
            (folder / "new").replace(folder / name)
    for key in (slice(None), slice(0, 3), slice(3, 7), touched):
        try:
            found = store[key]
        except CorruptShardError as error:
            assert "taken the place" in str(error)
        else:
            same_bits(found, plain.dense[key])


def recorded_anew(path: Path, root: Path) -> TokenStore:
    """Another recording under the names of the first one, each file in one step."""
    other = token_store(root, seed=1)
    for file in other.path.glob("*.bin"):
        file.replace(path / file.name)
    return other


@pytest.mark.parametrize("engine", ["mmap", "pread"])
@pytest.mark.parametrize("first", ["mask", "acts"])
def test_token_arrays_and_shards_of_two_recordings_are_never_mixed(engine: str, first: str, tmp_path: Path) -> None:
    """The mask was read before the store was recorded anew and the shards were not, or the other way round."""
    made = token_store(tmp_path / "a")
    store = ShardStore.open(made.path, engine=engine)
    rows = store.sel(layer=2, masked=first == "acts")
    if first == "acts":
        store[:]
    recorded_anew(made.path, tmp_path / "b")
    with pytest.raises(CorruptShardError, match="taken the place"):
        rows[:] if first == "mask" else store.token_arrays["score"]


@pytest.mark.parametrize("engine", ["mmap", "pread", "fsspec"])
def test_a_pickled_selection_of_another_mask_is_an_error(engine: str, tmp_path: Path) -> None:
    made = token_store(tmp_path / "a")
    rows = ShardStore.open(made.path, engine=engine).sel(layer=2)
    sent = pickle.dumps(rows)
    again = pickle.dumps(pickle.loads(sent))
    recorded_anew(made.path, tmp_path / "b")
    for data in (sent, again):
        with pytest.raises(CorruptShardError, match=r"mask\.bin: .*Select the rows again"):
            pickle.loads(data)


def test_token_arrays_of_files_that_were_replaced_are_an_error(tmp_path: Path) -> None:
    """Also where the client reads a file of this machine without pinning it."""
    made = token_store(tmp_path / "a")
    store = ShardStore.open(made.path, engine="fsspec")
    assert store.token_arrays["token_ids"].tobytes() == made.arrays["token_ids"].tobytes()
    other = recorded_anew(made.path, tmp_path / "b")
    with pytest.raises(CorruptShardError, match="token_ids"):
        _ = store.token_arrays["token_ids"]
    store.close()
    assert store.token_arrays["token_ids"].tobytes() == other.arrays["token_ids"].tobytes()


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_a_pickled_selection_holds_no_vectors(engine: str, tmp_path: Path) -> None:
    """Nor tokens: what is read is not copied along, however much of it was mapped."""
    made = token_store(tmp_path, n=400, d_model=64, per_shard=200)
    store = ShardStore.open(made.path, engine=engine)
    rows = store.sel(layer=2, tokens="all", masked=True)
    before = len(pickle.dumps(rows))
    rows[:], store.token_arrays["token_ids"]
    assert len(pickle.dumps(rows)) < before + 1000


def test_labels_of_a_wrong_size_are_an_error(tmp_path: Path) -> None:
    folder = plain_store(LAYOUT, labelled=True).write(tmp_path)
    (folder / "labels.bin").write_bytes(bytes(27))
    with pytest.raises(DocumentError, match=r"labels\.bin"):
        ShardStore.open(folder)
    store = ShardStore.open(folder, engine="fsspec")
    with pytest.raises(DocumentError, match="27 bytes"):
        _ = store.labels


# -- finding stores ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "claim",
    [
        '{"metadata": ' + "[" * 100_000 + "]" * 100_000 + "}", "[" * 100_000, "[]", '{"metadata": 3}', "{}", "",
        r'{"metadata": "\ud800"}', '{"metadata": "{}"}', "1" * 10_000,
    ],
    ids=range(9),
)  # fmt: skip
def test_a_claim_that_cannot_be_read_is_one_entry_of_the_list(claim: str, tmp_path: Path) -> None:
    complete = plain_store(LAYOUT).write(tmp_path)
    hidden = tmp_path / "crashed" / CLAIM_PATH
    hidden.parent.mkdir(parents=True)
    hidden.write_text(claim)
    found = {entry.name: (entry.state, entry.note) for entry in ShardStore.list(tmp_path)}
    assert found == {complete.name: ("complete", ""), "crashed": ("unfinished", "its metadata cannot be read")}


@pytest.mark.parametrize(
    ("nbytes", "state", "note"),
    [
        (None, "damaged", "2 of 7 examples lost"),
        (0, "damaged", "2 of 7 examples lost"),
        (2 * 480 - 1, "damaged", "1 of 7 examples lost"),
        (2 * 480, "complete", ""),
    ],
)
def test_a_list_tells_which_stores_are_damaged(nbytes: int | None, state: str, note: str, tmp_path: Path) -> None:
    layout = Layout(7, (2, 5, 11), 4, True, 8, 5)
    folder = plain_store(layout, tail="cut").write(tmp_path)
    shard = folder / "acts000001.bin"
    assert shard.stat().st_size == 2 * layout.example_nbytes == 2 * 480
    if nbytes is None:
        shard.unlink()
    else:
        os.truncate(shard, nbytes)
    (entry,) = ShardStore.list(tmp_path)
    assert (entry.state, entry.note) == (state, note)
    far = MemoryTransport({f"{folder.name}/{file.name}": file.read_bytes() for file in folder.iterdir()}, label="x")
    assert [(entry.state, entry.note) for entry in list_stores(LatencyTransport(far, 0.0, 1e12))] == [(state, note)]


def test_a_list_says_what_is_damaged_where_no_example_is_lost(tmp_path: Path) -> None:
    folder = plain_store(LAYOUT, labelled=True).write(tmp_path)
    os.truncate(folder / "labels.bin", 5)
    (entry,) = ShardStore.list(tmp_path)
    assert entry.state == "damaged"
    assert "labels.bin" in entry.note
    assert "examples lost" not in entry.note


def test_a_root_lists_its_stores(tmp_path: Path) -> None:
    one, two = plain_store(LAYOUT, seed=1).write(tmp_path), plain_store(LAYOUT, seed=2).write(tmp_path)
    (tmp_path / "notes").mkdir()
    crashed = plain_store(LAYOUT, seed=3).write(tmp_path)
    (crashed / "shards.json").unlink()
    broken = plain_store(LAYOUT, seed=4).write(tmp_path)
    (broken / "metadata.json").write_text("{")
    found = ShardStore.list(tmp_path)
    assert {entry.name: entry.state for entry in found} == {
        one.name: "complete",
        two.name: "complete",
        crashed.name: "broken",
        broken.name: "broken",
    }
    assert [entry.name for entry in found] == sorted(entry.name for entry in found)
    assert one.name in repr(found)
    assert found[:2].root == found.root
    assert "<script>" not in found._repr_html_()
    with pytest.raises(NotFoundError, match=one.name):
        ShardStore.open(tmp_path)
    with pytest.raises(IncompleteStoreError, match=r"shards\.json"):
        ShardStore.open(crashed)
    with pytest.raises(DocumentError, match=r"metadata\.json"):
        ShardStore.open(broken)


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_there(engine: str, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no store"):
        ShardStore.open(tmp_path, engine=engine)
    with pytest.raises(NotFoundError):
        ShardStore.open(tmp_path / "nowhere", engine=engine)
    with pytest.raises(NotFoundError):
        ShardStore.list(tmp_path / "nowhere")


# -- how it shows itself -----------------------------------------------------------------------------------------------


def test_cards_tell_and_escape(tmp_path: Path) -> None:
    plain = plain_store(LAYOUT, labelled=True)
    metadata = json.loads(plain.files["metadata.json"])
    metadata["vit_ckpt"] = "<script>alert(1)</script>"
    plain.files["metadata.json"] = json.dumps(metadata).encode()
    with pytest.warns(SaevStoreWarning, match="no recipe|content hash"):
        store = ShardStore.open(plain.write(tmp_path))
    text, page = repr(store), store._repr_html_()
    for words in (
        "example 7 x layer 3",
        "4 content + CLS",
        "2, 5, 11",
        "yes (labels.bin)",
        "1.0.0",
        "saev-store copy --protocol 2.1",
        "mmap",
        "renamed",
    ):
        assert words in text
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize(("labelled", "says"), [(True, "yes (labels.bin)"), (False, "none")])
def test_a_far_store_says_nothing_of_labels_before_they_were_looked_for(labelled: bool, says: str) -> None:
    """The card makes no request."""
    far = FsspecTransport(f"memory://labels-{labelled}")
    for name, data in plain_store(LAYOUT, labelled=labelled).files.items():
        far.put(name, data)
    store = opened(far)
    before = far.counters
    (line,) = (line for line in str(store).splitlines() if line.split()[0] == "labels")
    assert line.split(maxsplit=1)[1] == "not looked for yet"
    assert far.counters == before
    assert store.has_labels is labelled
    (line,) = (line for line in str(store).splitlines() if line.split()[0] == "labels")
    assert line.split(maxsplit=1)[1] == says


def test_plain_facts() -> None:
    store = opened(MemoryTransport(plain_store(LAYOUT).files))
    assert (store.shape, store.ndim, len(store), store.nbytes) == ((7, 3, 5, 8), 4, 7, 7 * 3 * 5 * 8 * 4)
    assert store.dims == ("example", "layer", "token", "d_model")
    assert store.dtype == np.float32
    assert np.asarray(store).shape == store.shape
    assert len(list(store)) == 7
    assert "84 rows" in repr(store.sel(tokens="content"))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda store: store[7], SelectionError),
        (lambda store: store["layer"], SelectionError),
        (lambda store: store.sel(layer=3), LayerNotFoundError),
        (lambda store: store.sel(tokens="cls"), SelectionError),
        (lambda store: store.sel(layer=5)[0, 1], SelectionError),
        (lambda store: store.sel(layer=5)[1000], SelectionError),
        (lambda store: store.sel(ignore_labels=[1]), SelectionError),
    ],
)
def test_bad_requests_are_our_errors(call: object, error: type[Exception]) -> None:
    store = opened(MemoryTransport(plain_store(LAYOUT).files))
    with pytest.raises(error):
        call(store)


@pytest.mark.parametrize("url", [None, 3, b"bytes", "", "nosuch://x/y", "a\0b"])
def test_bad_addresses_are_our_errors(url: object) -> None:
    with pytest.raises(SaevStoreError):
        ShardStore.open(url)


def test_breaking_changes_warn_and_refuse() -> None:
    files = plain_store(LAYOUT).files
    files["metadata.json"] = files["metadata.json"].replace(b'"1.0.0"', b'"3.0"')
    with pytest.warns(SaevStoreWarning, match="(?i)breaking"), pytest.raises(UnknownProtocolError):
        ShardStore.open(MemoryTransport(files))


def test_a_result_larger_than_memory_is_an_error() -> None:
    files = plain_store(Layout(1, (0,), 1, False, 4, 1)).files
    metadata = json.loads(files["metadata.json"])
    metadata.update(n_imgs=2**40, max_patches_per_shard=2**40)
    files["metadata.json"] = json.dumps(metadata).encode()
    files["shards.json"] = json.dumps([{"name": "acts000000.bin", "n_imgs": 2**40}]).encode()

    class Remote(MemoryTransport):
        is_local = False

    store = opened(Remote(files))
    with pytest.raises(SaevStoreError):
        store[...]
