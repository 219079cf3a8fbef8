"""An opened store equals a dense NumPy array: any key, every engine, samples of the reference project; and it is a value."""

from __future__ import annotations

import copy
import json
import math
import multiprocessing
import pickle
import threading
import warnings
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from api import MemoryTransport
from dense_stores import PlainStore, opened, plain_store, same_bits
from hypothesis import given
from hypothesis import strategies as st
from plain_stores import plain_store as numbered_store
from strategies import component
from token_stores import token_store
from waiting import HANG_S

from saev_store import SaevStoreWarning, ShardStore
from saev_store.core.layout import Layout
from saev_store.errors import (
    ArgumentError,
    LayerNotFoundError,
    SaevStoreError,
    SaevStoreWarning,
    SelectionError,
)
from saev_store.transport import ReadCost

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
        same_bits(content[:], truth[:, layer_idx, n_special:].reshape(-1, truth.shape[3]))
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
    except (IndexError, DeprecationWarning):  # the warning: NumPy 1 where the key also selects nothing
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
        assert selection[:].shape == (0, plain.layout.d_model)
        return
    where = selection.coordinates()
    layer_idx = np.array([layers.index(label) for label in where.layer])
    dense = plain.dense[where.example_idx, layer_idx, where.token_idx + plain.layout.n_special_tokens]
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
    same_bits(selection[:], plain.dense[:, 0, plain.layout.n_special_tokens :][keep])


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


@pytest.fixture
def plain() -> PlainStore:
    return plain_store(LAYOUT, labelled=True)


class Tensor:
    """Like a tensor of torch, which calls itself an integer where it has one number, whatever its dimensions, and also where it is a mask."""

    def __init__(self, values: object) -> None:
        self._values = np.asarray(values)
        self.ndim, self.shape, self.dtype = self._values.ndim, self._values.shape, self._values.dtype

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        return self._values

    def __index__(self) -> int:
        if self._values.size != 1:
            raise TypeError("only integer tensors of a single element can be converted to an index")
        return int(self._values.reshape(()))


@pytest.mark.parametrize("values", [3, [3], [3, 1], -1, [False] * 7, [True] + [False] * 6])
def test_tensors_of_one_number_are_what_arrays_of_their_dimensions_are(
    values: object, plain: PlainStore, tmp_path: Path
):
    """A store lost the axis of a list of one, and rows had one for a number: the last of `randperm(n).split(2)` was another shape."""
    store, index = ShardStore.open(plain.write(tmp_path)), np.asarray(values)
    rows = store.sel(layer=5, tokens="special")
    same_bits(store[Tensor(values)], plain.dense[index])
    same_bits(store[:, Tensor([1])], plain.dense[:, [1]])
    same_bits(rows[Tensor(values)], plain.dense[:, 1, 0][index])


def test_masks_of_one_are_masks_and_truth_is_no_position(tmp_path: Path):
    store = ShardStore.open(plain_store(Layout(1, (2,), 4, True, 8, 1)).write(tmp_path))
    assert len(store[Tensor([False])]) == 0
    assert store.sel(layer=2, examples=Tensor([False])).shape == (0, 8)
    for item in (store, store.sel(layer=2)):
        with pytest.raises(SelectionError):
            item[Tensor(values=True)]


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_positions_of_a_vector_end_where_the_tensor_does(engine: str, plain: PlainStore, tmp_path: Path):
    store = ShardStore.open(plain.write(tmp_path), engine=engine)
    for axis, n in enumerate((7, 3, 5)):
        for at in (-n - 1, -n, -1, 0, n - 1, n, n + 1):
            key = tuple(at if other == axis else 1 for other in range(3))
            if -n <= at < n:
                same_bits(store[key], plain.dense[key])
            else:
                with pytest.raises(IndexError):
                    store[key]


def test_a_single_number_is_a_scalar_unless_memory_was_given(plain: PlainStore, tmp_path: Path):
    store = ShardStore.open(plain.write(tmp_path))
    key = (4, 1, 2, 3)
    assert type(store[key]) is np.float32
    assert store[key].tobytes() == plain.dense[key].tobytes()
    out = np.empty((), np.float32)
    assert store.read(key, out=out) is out
    assert out.tobytes() == plain.dense[key].tobytes()


def test_arrays_of_the_store_are_of_the_type_that_was_asked_for(plain: PlainStore, tmp_path: Path):
    layout = Layout(3, (2,), 4, False, 8, 3)
    one = plain_store(layout)
    store = ShardStore.open(one.write(tmp_path))
    with np.errstate(all="ignore"):
        assert store.__array__(np.dtype(np.float64)).dtype == np.float64
        assert np.asarray(store, dtype=np.float64).dtype == np.float64
    assert np.shares_memory(np.asarray(store), store.as_numpy(copy=False))
    fresh = store.__array__(copy=True)
    assert fresh.flags.writeable
    assert not np.shares_memory(fresh, store.as_numpy(copy=False))
    with pytest.raises(ArgumentError):
        ShardStore.open(plain.write(tmp_path)).__array__(copy=False)
    assert np.shares_memory(np.array(store, dtype=np.float32, copy=False), store.as_numpy(copy=False))


@pytest.mark.parametrize(
    "key",
    [np.s_[:: 10**25], np.s_[:: 10**25, [0, 1]], np.s_[[0, 1], :, :: 10**25], np.s_[:: 10**25, [0, 1], [0, 2]], np.s_[:, :, :: -(10**25)]],
    ids=str,
)  # fmt: skip
def test_steps_of_more_than_64_bits(tmp_path: Path, key: object):
    plain = numbered_store(tmp_path)
    store = ShardStore.open(plain.path)
    assert np.array_equal(store[key], plain.acts[key])
    assert store.estimate(key).bytes_wanted == plain.acts[key].nbytes
    rows = store.sel(layer=5)
    assert np.array_equal(rows[:: 10**25], rows[:1])
    assert np.array_equal(
        store.sel(layer=5, examples=slice(None, None, 10**25))[:], store.sel(layer=5, examples=[0])[:]
    )


def test_views_share_the_map_and_are_read_only(tmp_path: Path) -> None:
    plain = plain_store(LAYOUT)
    store = ShardStore.open(plain.write(tmp_path))
    view = store.as_numpy((slice(3, 6), 1), copy=False)
    same_bits(view, plain.dense[3:6, 1])
    assert np.shares_memory(view, store.as_numpy((slice(3, 6), 1), copy=False))
    assert not view.flags.writeable
    assert not np.shares_memory(store.as_numpy((slice(3, 6), 1), copy=True), view)
    assert store[3:6, 1].flags.writeable
    store.close()
    same_bits(view, plain.dense[3:6, 1])  # a view outlives its store
    same_bits(store[0], plain.dense[0])  # and a closed store opens again


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
    with pytest.raises(ArgumentError):
        store.read((0, 0, slice(1, 5)), out=out)


def test_memory_that_may_not_be_written_is_refused(plain: PlainStore, tmp_path: Path):
    store = ShardStore.open(plain.write(tmp_path))
    out = np.empty((5, 8), np.float32)
    out.flags.writeable = False
    with pytest.raises(ArgumentError):
        store.read((0, 0), out=out)
    with pytest.raises(ArgumentError):
        store.sel(layer=2).rows(slice(5), out=out)


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_a_vector_is_fresh_memory(engine: str, plain: PlainStore, tmp_path: Path):
    """The first one of a shard, and those that come once it is mapped."""
    store = ShardStore.open(plain.write(tmp_path), engine=engine)
    for _ in range(2):
        vector = store[4, 1, 2]
        assert vector.flags.writeable
        assert vector.tobytes() == plain.dense[4, 1, 2].tobytes()
        vector[:] = 0
    if engine == "mmap":
        mapped = store.as_numpy(np.s_[3:6], copy=False)
        assert not np.shares_memory(store[4, 1, 2], mapped)


def _answer(store: ShardStore, queue: object) -> None:
    queue.put((store[4, 1].tobytes(), store.sel(layer=5)[[3, 1]].tobytes()))


@pytest.mark.parametrize(
    ("engine", "method"),  # clients of fsspec end at a fork
    [
        (engine, method)
        for engine in ENGINES
        for method in ("fork", "spawn", "forkserver")
        if (engine, method) != ("fsspec", "fork")
    ],
)
def test_stores_work_in_other_processes(engine: str, method: str, tmp_path: Path) -> None:
    if (engine, method) == ("fsspec", "fork"):
        pytest.skip("a ForkError, in test_transport_processes.py")
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


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_a_pickled_selection_holds_no_vectors(engine: str, tmp_path: Path) -> None:
    """Nor tokens: what is read is not copied along, however much of it was mapped."""
    made = token_store(tmp_path, n=400, d_model=64, per_shard=200)
    store = ShardStore.open(made.path, engine=engine)
    rows = store.sel(layer=2, tokens="all", masked=True)
    before = len(pickle.dumps(rows))
    rows[:], store.token_arrays["token_ids"]
    assert len(pickle.dumps(rows)) < before + 1000


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
