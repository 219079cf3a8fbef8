"""What `compute` of a store's dask array takes of memory and reads, and that it is dask's in everything else."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import tracemalloc
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from api import MemoryTransport
from dense_stores import PlainStore, plain_documents, plain_store
from transports import CountingTransport, LatencyTransport

from saev_store import ShardStore
from saev_store.core.layout import Layout
from saev_store.errors import ArgumentError, CorruptShardError, SaevStoreWarning

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")
xr = pytest.importorskip("xarray")

#: 34 MB, so that what Python takes beside the arrays does not count.
LARGE = Layout(550, tuple(range(3)), 15, True, 320, 100)
SMALL = Layout(7, (2, 5, 11), 4, True, 8, 3)


@pytest.fixture(autouse=True)
def chunks_that_cut_shards() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The specified chunks separate", UserWarning)
        yield


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[PlainStore, Path]:
    plain = plain_store(LARGE, labelled=True)
    folder = plain.write(tmp_path_factory.mktemp("large"))
    opened(folder)[:1].values  # noqa: B018  # imports
    return plain, folder


@pytest.fixture
def small(tmp_path: Path) -> tuple[PlainStore, ShardStore]:
    plain = plain_store(SMALL, labelled=True)
    return plain, ShardStore.open(plain.write(tmp_path))


def opened(folder: Path, **lengths: int) -> xr.DataArray:
    return xr.open_dataset(folder, engine="saev", chunks=lengths).activations


def after_labels(folder: Path) -> xr.Dataset:
    return xr.open_dataset(folder, engine="saev", chunks={"example": 20})[["labels", "activations"]]


READS: dict[str, tuple[Callable[[Path], np.ndarray], Callable[[np.ndarray], np.ndarray]]] = {
    "values": (lambda p: opened(p).values, lambda dense: dense),
    "load": (lambda p: opened(p, example=20).load().values, lambda dense: dense),
    "compute": (lambda p: opened(p, example=33).compute().values, lambda dense: dense),
    "dataset": (
        lambda p: xr.open_dataset(p, engine="saev", chunks={"example": 20}).load().activations.values,
        lambda dense: dense,
    ),
    "dataset of another order": (lambda p: after_labels(p).load().activations.values, lambda dense: dense),
    "selected, of another order": (
        lambda p: after_labels(p).isel(example=slice(10, None), layer=1).load().activations.values,
        lambda dense: dense[10:, 1],
    ),
    "one block": (lambda p: opened(p, example=-1).values, lambda dense: dense),
    "blocks of every axis": (
        lambda p: opened(p, example=77, layer=1, token=4, d_model=100).values,
        lambda dense: dense,
    ),
    "layer": (lambda p: opened(p, example=20).sel(layer=1).values, lambda dense: dense[:, 1]),
    "layer and token": (
        lambda p: opened(p, example=20).sel(layer=[2, 0], token=slice(None, 13)).values,
        lambda dense: dense[:, [2, 0], :15],
    ),
    "one after the other": (
        lambda p: opened(p, example=20)[::-1][3:, 1:][:, :, 2:].values,
        lambda dense: dense[::-1][3:, 1:][:, :, 2:],
    ),
    "examples": (
        lambda p: opened(p, example=20).isel(example=[*range(400), 7, 7]).values,
        lambda dense: dense[[*range(400), 7, 7]],
    ),
    "selected, then chunked": (
        lambda p: xr.open_dataset(p, engine="saev").activations.isel(layer=[0, 2]).chunk(example=20).values,
        lambda dense: dense[:, [0, 2]],
    ),
    "as_xarray": (
        lambda p: ShardStore.open(p).as_xarray(chunks={"example": 20}).activations.values,
        lambda dense: dense,
    ),
    "as_dask": (lambda p: ShardStore.open(p).as_dask(chunks=(30, -1, -1, -1)).compute(), lambda dense: dense),
}


def test_parts_of_a_result_count_with_their_bytes(small: tuple[PlainStore, ShardStore]):
    """The workers of a cluster spill and pause by that."""
    from dask.callbacks import Callback
    from dask.sizeof import sizeof

    plain, store = small
    sizes = dict[object, int]()
    with Callback(posttask=lambda key, part, *_: sizes.update({key: sizeof(part)})):
        found = store.as_dask(chunks=(2, 1, 5, 8)).compute(scheduler="sync")
    assert found.tobytes() == plain.dense.tobytes()
    parts = [size for key, size in sizes.items() if isinstance(key, tuple)]
    assert len(parts) == 4 * 3
    assert plain.dense.nbytes <= sum(parts) < plain.dense.nbytes + 100 * len(parts)


@pytest.mark.parametrize("scheduler", ["threads", "synchronous"])
@pytest.mark.parametrize("name", READS)
def test_the_result_and_no_more_is_allocated(name: str, scheduler: str, large: tuple[PlainStore, Path]):
    plain, folder = large
    read, expected = READS[name]
    with dask.config.set(scheduler=scheduler, num_workers=2):
        tracemalloc.start()
        try:
            found = read(folder)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.uint32), expected(plain.dense.view(np.uint32)))
    assert peak <= 1.1 * found.nbytes


@pytest.mark.parametrize("lengths", [{"layer": 1}, {"token": 9}, {"d_model": 100, "layer": 2}], ids=str)
def test_blocks_of_all_examples_are_read_in_pieces(
    lengths: dict[str, int], large: tuple[PlainStore, Path], monkeypatch: pytest.MonkeyPatch
):
    """Their places in the result are not contiguous."""
    plain, folder = large
    monkeypatch.setattr("saev_store.dask._result.PIECE_BYTES", 1 << 20)
    array = ShardStore.open(folder).as_xarray(chunks={"example": -1, **lengths}).activations
    for order in (slice(None), slice(None, None, -1)):
        selected, expected = array[order], plain.dense[order]
        with dask.config.set(scheduler="threads", num_workers=2):
            tracemalloc.start()
            try:
                found = selected.values
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
        assert peak <= 1.1 * found.nbytes


def _computed(array: da.Array) -> np.ndarray:
    return array.compute(scheduler="synchronous")


@pytest.mark.parametrize(
    "compute",
    [
        lambda array: array.compute(scheduler="synchronous", optimize_graph=False),
        lambda array: array.persist(scheduler="synchronous").compute(scheduler="synchronous"),
        lambda array: _computed(dask.optimize(array)[0]),
        lambda array: _computed(pickle.loads(pickle.dumps(array))),  # its own
        lambda array: _computed(array.rechunk((2, 1, 5, 3))),
        lambda array: _computed(array.map_blocks(np.copy)),
        lambda array: _computed(da.concatenate([array[:3], array[3:]])),
        np.asarray,
    ],
    ids=["as it is", "persisted", "optimized", "pickled", "rechunked", "mapped", "joined", "NumPy"],
)
@pytest.mark.parametrize("chunks", [(2, -1, -1, -1), -1, (3, 2, 4, 5)], ids=["examples", "one", "all axes"])
def test_other_ways_to_compute(
    chunks: object, compute: Callable[[da.Array], np.ndarray], small: tuple[PlainStore, ShardStore]
):
    plain, store = small
    found = compute(store.as_dask(chunks=chunks))
    assert (found.shape, found.tobytes()) == (plain.dense.shape, plain.dense.tobytes())


def test_in_processes(small: tuple[PlainStore, ShardStore], tmp_path: Path):
    """Memory is not shared with them."""
    plain, store = small
    array = store.as_dask(chunks=(2, -1, 4, -1))
    with dask.config.set(scheduler="processes", num_workers=2):
        whole, layer = dask.compute(array, store.as_dask(chunks=-1)[:, 1])
        assert whole.tobytes() == plain.dense.tobytes()
        assert layer.tobytes() == plain.dense[:, 1].tobytes()
        (folder,) = (path.parent for path in tmp_path.rglob("metadata.json"))
        os.truncate(folder / "acts000001.bin", 100)
        with pytest.raises(CorruptShardError, match="acts000001"):
            array.compute()


def test_with_optimizations_of_the_caller(small: tuple[PlainStore, ShardStore]):
    plain, store = small
    array = store.as_dask(chunks=(2, -1, -1, -1))
    seen: list[int] = []

    def optimize(graph: object, keys: object, **options: object) -> object:
        seen.append(1)
        return da.optimization.optimize(graph, keys, **options)

    for options in ({"array_optimize": optimize}, {"array_optimize": False}, {"optimization.fuse.active": False}):
        with dask.config.set(options):
            assert _computed(array).tobytes() == plain.dense.tobytes()
    assert seen


def test_tasks_that_run_again(small: tuple[PlainStore, ShardStore]):
    """As on clusters that lose workers: parts that were read for one result are put into another one."""
    plain, store = small

    def anew(graph: Mapping[object, object], keys: object, **_: object) -> object:
        tasks = dask._task_spec.convert_legacy_graph(graph if isinstance(graph, Mapping) else graph.__dask_graph__())

        def run(key: object) -> object:
            task = tasks[key]
            return task({needed: run(needed) for needed in task.dependencies})

        return [anew(graph, key) for key in keys] if isinstance(keys, list) else run(keys)

    array = store.as_dask(chunks=(2, -1, 4, -1))
    assert array.compute(scheduler=anew).tobytes() == plain.dense.tobytes()
    assert array[1:, 2].compute(scheduler=anew).tobytes() == plain.dense[1:, 2].tobytes()


def test_with_plugins_of_the_caller(small: tuple[PlainStore, ShardStore]):
    """One may compute every new array."""
    plain, store = small
    with dask.config.set(array_plugins=[lambda array: array.compute()]):
        found = [store.as_dask(), store.as_xarray(chunks={}).activations.data, store.as_xarray(chunks={}).labels.data]
    assert {type(array) for array in found} == {np.ndarray}
    assert found[0].tobytes() == found[1].tobytes() == plain.dense.tobytes()


def test_on_a_cluster(small: tuple[PlainStore, ShardStore]):
    distributed = pytest.importorskip("distributed")
    plain, store = small
    with (
        distributed.LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=":0") as cluster,
        distributed.Client(cluster),
    ):
        array = store.as_dask(chunks=(2, -1, -1, -1))
        assert array.compute().tobytes() == plain.dense.tobytes()
        assert array[:, 1].compute().tobytes() == plain.dense[:, 1].tobytes()
        kept = array.persist()
        kept.compute()[:] = 0
        assert kept.compute().tobytes() == plain.dense.tobytes()


def _on_workers(graph: Mapping[object, object], key: object, seed: int) -> np.ndarray:
    """Run a graph as a cluster may: what a task needs is in the memory of its worker, or comes pickled."""
    tasks = dask._task_spec.convert_legacy_graph(dict(graph))
    rng, made = random.Random(seed), {}
    for name in dask.core.toposort(tasks):
        needed = {other: made[other] for other in sorted(tasks[name].dependencies, key=str)}
        made[name] = tasks[name](
            {
                other: v if rng.random() < 0.5 else pickle.loads(pickle.dumps(v)) for other, v in needed.items()
            }  # its own
        )
    return made[key]


@pytest.mark.parametrize("chunks", [(2, -1, -1, -1), -1, (3, 2, 4, 5)], ids=["examples", "one", "all axes"])
def test_an_argument_of_a_delayed_function_on_a_cluster(chunks: object, small: tuple[PlainStore, ShardStore]):
    """dask optimizes it before the cluster gets it."""
    plain, store = small
    made = dask.delayed(np.copy)(store.as_dask(chunks=chunks))
    for seed in range(20):
        found = _on_workers(made.__dask_graph__(), made.key, seed)
        assert (found.shape, found.tobytes()) == (plain.dense.shape, plain.dense.tobytes())


def test_what_keeps_the_results_of_tasks_keeps_no_memory(small: tuple[PlainStore, ShardStore]):
    """Such as `dask.cache.Cache`, which counts the bytes of each and would not see those of a result."""
    plain, store = small
    array = store.as_dask(chunks=(2, -1, -1, -1))
    made = dask.delayed(np.asarray)(array)  # of the same keys, whenever it is computed
    kept: dict[object, object] = {}

    def use(graph: dict[object, object]) -> None:
        graph.update({key: dask._task_spec.DataNode(key, value) for key, value in kept.items() if key in graph})

    def keep(key: object, value: object, *_: object) -> None:
        if not isinstance(value, np.ndarray):
            kept[key] = value

    with dask.callbacks.Callback(start=use, posttask=keep):
        for lazy in (array, array, made, made):
            found = lazy.compute(scheduler="synchronous")
            assert found.tobytes() == plain.dense.tobytes()
            found[:] = 0
            gone = weakref.ref(found)
            del found
            assert gone() is None
    assert kept


def test_every_result_is_the_callers_own(small: tuple[PlainStore, ShardStore]):
    plain, store = small
    for array in (store.as_dask(chunks=(2, -1, -1, -1)), store.as_dask(chunks=-1)):
        kept = array.persist(scheduler="synchronous")
        for which in (array, array, kept, kept):
            found = _computed(which)
            assert found.tobytes() == plain.dense.tobytes()
            assert found.flags.writeable
            found[:] = 0


def test_an_assignment_counts(small: tuple[PlainStore, ShardStore]):
    """dask changes the array in place."""
    plain, store = small
    array = store.as_dask(chunks=(2, -1, -1, -1))
    array[1, 0] = 7
    expected = plain.dense.copy()
    expected[1, 0] = 7
    assert _computed(array).tobytes() == expected.tobytes()
    assert _computed(array[1:3]).tobytes() == expected[1:3].tobytes()
    activations = store.as_xarray(chunks={"example": 2}).activations
    activations[1, 0] = 7
    assert activations.values.tobytes() == expected.tobytes()
    assert activations[:, 0].values.tobytes() == expected[:, 0].tobytes()
    assert activations.isel(example=1).values.tobytes() == expected[1].tobytes()


@pytest.mark.parametrize("options", [{}, {"cache": False}], ids=["cached", "not cached"])
def test_an_assignment_to_what_was_chunked_counts(
    options: dict[str, bool], small: tuple[PlainStore, ShardStore], tmp_path: Path
):
    """xarray's chunks share the values of the variable that they were made of."""
    plain, _ = small
    (folder,) = (path.parent for path in tmp_path.rglob("metadata.json"))
    activations = xr.open_dataset(folder, engine="saev", **options).activations
    chunked = activations.chunk(example=2)
    layer = chunked[:, 1]
    activations[1, :2] = 7
    expected = plain.dense.copy()
    expected[1, :2] = 7
    for array in (chunked, chunked.copy(), chunked.persist()):
        assert array.values.tobytes() == expected.tobytes()
    assert layer.values.tobytes() == chunked[:, 1].values.tobytes() == expected[:, 1].tobytes()


class CountedLock(dask.utils.SerializableLock):
    """A lock that counts."""

    n_acquired = 0

    def acquire(self, *args: object, **options: object) -> bool:
        type(self).n_acquired += 1
        return super().acquire(*args, **options)


@pytest.mark.parametrize("whole", [True, False], ids=["dataset", "variable"])
def test_a_lock_of_the_caller_is_held(whole: bool, small: tuple[PlainStore, ShardStore]):
    plain, store = small
    dataset, CountedLock.n_acquired = store.as_xarray(), 0
    chunked = (dataset if whole else dataset.variables["activations"]).chunk({"example": 1}, lock=CountedLock())
    found = chunked.activations if whole else chunked
    assert found.values.tobytes() == plain.dense.tobytes()
    assert CountedLock.n_acquired == 7


def test_positions_may_be_dask_arrays(small: tuple[PlainStore, ShardStore]):
    plain, store = small
    dataset = store.as_xarray(chunks={"example": 2})
    positions = xr.DataArray(da.from_array(np.array([3, 0, 3]), chunks=2), dims="example")
    last = positions.max()
    for lazy, dense in ((dataset.activations, plain.dense), (dataset.labels, plain.labels)):
        np.testing.assert_array_equal(lazy.drop_vars("example")[positions], dense[[3, 0, 3]])
        np.testing.assert_array_equal(lazy.drop_vars("example")[:, 0][last], dense[3, 0])
        np.testing.assert_array_equal(
            lazy.drop_vars("example")[{"example": positions.rename(example="p")}], dense[[3, 0, 3]]
        )


def test_together_with_other_arrays(small: tuple[PlainStore, ShardStore]):
    """xarray refuses to compute dask arrays of several classes together."""
    plain, store = small
    dataset = store.as_xarray(chunks={"example": 2})
    dataset["first"] = dataset.activations[0] * 1
    dataset["ones"] = ("example", da.ones(7, chunks=2))
    loaded = dataset.load()
    assert loaded.activations.values.tobytes() == plain.dense.tobytes()
    assert loaded["first"].values.tobytes() == plain.dense[0].tobytes()
    np.testing.assert_array_equal(loaded.labels.values, plain.labels)


@pytest.mark.parametrize("order", sorted(set(itertools.permutations("oopp"))), ids="".join)
def test_results_come_in_the_order_of_the_arguments(order: tuple[str, ...], small: tuple[PlainStore, ShardStore]):
    """dask 2026.8 returns results in the order of groups of equal optimizers: ours, plain arrays, delayed functions."""
    plain, store = small
    array = store.as_dask(chunks=(2, -1, -1, -1))
    made = {
        "o": [(array, plain.dense), (store.as_dask(chunks=-1), plain.dense)],
        "p": [(abs(array), abs(plain.dense)), (da.zeros(7, chunks=2), np.zeros(7))],
    }
    left = {kind: iter(values) for kind, values in made.items()}
    chosen = [next(left[kind]) for kind in order if kind in left]
    with dask.config.set(scheduler="synchronous"):
        found = dask.compute(*(lazy for lazy, _ in chosen))
        last = dask.compute(*(lazy for lazy, _ in chosen), dask.delayed(lambda: 5)())
    for result in (found, last):
        for one, (_, expected) in zip(result, chosen, strict=False):
            np.testing.assert_array_equal(one, expected)
    assert last[-1] == 5


def test_arrays_are_one_group(small: tuple[PlainStore, ShardStore]):
    """dask 2025.4 makes groups of equal optimizers and equal functions that join blocks."""
    array, plain = small[1].as_dask(), da.ones(7, chunks=2)
    assert len({array.__dask_optimize__, plain.__dask_optimize__}) == 1
    assert len({array.__dask_postcompute__(), plain.__dask_postcompute__()}) == 1
    assert array.__dask_postcompute__() != dask.delayed(5).__dask_postcompute__()


def test_variables_of_one_shape_are_not_exchanged(small: tuple[PlainStore, ShardStore]):
    plain, store = small
    dataset = store.as_xarray(chunks={"example": 2})
    dataset = dataset.assign(a=abs(dataset.activations), b=dataset.activations[::-1].variable, c=-dataset.activations)
    for loaded in (dataset.load(), dataset[["a", "b", "c", "activations"]].compute()):
        np.testing.assert_array_equal(loaded["a"], abs(plain.dense))
        np.testing.assert_array_equal(loaded["b"], plain.dense[::-1])
        np.testing.assert_array_equal(loaded["c"], -plain.dense)
        assert loaded.activations.values.tobytes() == plain.dense.tobytes()


@pytest.mark.parametrize(
    "results",
    [
        lambda tensor: (tensor, tensor[:, 1]),
        lambda tensor: (tensor, tensor[2:][::-1]),
        lambda tensor: (tensor[:, 1:], tensor[:, 2]),
    ],
)
def test_blocks_that_several_results_need_are_read_once(results: Callable):
    plain = plain_store(SMALL)
    # Of files in memory each is taken once, whatever is read of it: behind a latency, reads are counted.
    transport = CountingTransport(LatencyTransport(MemoryTransport(plain.files, label=plain.name), 0.0, 1e12))
    tensor = ShardStore.open(transport).as_xarray(chunks={"example": 3}).activations
    transport.reset()
    with dask.config.set(scheduler="synchronous"):
        found = dask.compute(*(result.data for result in results(tensor)))
    for one, expected in zip(found, results(plain.dense), strict=True):
        assert one.tobytes() == expected.tobytes()
    assert transport.counters.bytes_read <= plain.dense.nbytes


def test_pieces_read_what_the_store_reads(monkeypatch: pytest.MonkeyPatch):
    plain = plain_store(SMALL)
    transport = CountingTransport(LatencyTransport(MemoryTransport(plain.files, label=plain.name), 0.0, 1e12))
    store = ShardStore.open(transport)
    array = store.as_xarray(chunks={"example": -1, "layer": 2}).activations
    assert store[:].tobytes() == plain.dense.tobytes()
    monkeypatch.setattr("saev_store.dask._result.PIECE_BYTES", 1)
    for examples in (slice(None), slice(None, None, -3), [5, 0, 5, 4, 5]):
        transport.reset()
        blocks = [store[examples, part] for part in (slice(2), slice(2, 3))]
        expected = transport.counters.bytes_read
        transport.reset()
        found = array.isel(example=examples).values
        assert found.tobytes() == np.concatenate(blocks, axis=1).tobytes()
        assert transport.counters.bytes_read == expected


@pytest.mark.parametrize("scheduler", ["threads", "synchronous"])
def test_a_shard_that_is_cut_is_an_error(scheduler: str, small: tuple[PlainStore, ShardStore], tmp_path: Path):
    _, store = small
    array = store.as_dask(chunks=(2, -1, -1, -1))
    _computed(array)
    (folder,) = (path.parent for path in tmp_path.rglob("metadata.json"))
    os.truncate(folder / "acts000001.bin", 100)
    with pytest.raises(CorruptShardError, match="acts000001"):
        array.compute(scheduler=scheduler)


def test_more_than_the_machine_has_is_refused():
    """The shape of a store is a number from a file."""
    files = plain_documents(Layout(10**9, (2, 5, 11), 4, True, 8_000, 10**8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaevStoreWarning)
        store = ShardStore.open(LatencyTransport(MemoryTransport(files), 0.0, 1e12))
    with pytest.raises((ArgumentError, CorruptShardError)):
        _computed(store.as_dask(chunks=-1))


def test_the_graph_and_names_are_dasks(small: tuple[PlainStore, ShardStore]):
    _, store = small
    array = store.as_dask(chunks=(2, -1, -1, -1))
    assert type(array) is da.Array
    assert array.__dask_keys__()[0][0][0][0] == (array.name, 0, 0, 0, 0)
    dataset = store.as_xarray(chunks={"example": 2})
    assert type(dataset.activations.data) is da.Array
    assert type(dataset.activations.isel(layer=0).data) is da.Array
