"""Validation and statistics on a dask cluster: what one process finds, also when workers are killed, which cost their task only."""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import numpy as np
import pytest
from clusters import begun, n_processes, noting, receiving, two_workers
from plain_stores import Plain, plain_store
from waiting import HANG_S

from saev_store import ShardStore
from saev_store._runtime import cluster as _cluster
from saev_store._runtime.cluster import connected
from saev_store.cli import main
from saev_store.errors import ArgumentError, TransportError
from saev_store.stats import _compute
from saev_store.validation import Report, _validate

pytest.importorskip("distributed")

N_SHARDS = 17


@pytest.fixture(scope="module")
def client():
    with two_workers() as client:
        yield client


@pytest.fixture
def damaged(tmp_path: Path) -> Plain:
    """17 shards: one with a changed block, one with an infinite number, two swapped, one that was never written."""
    plain = plain_store(tmp_path / "shards", n=50, labels=True)
    plain.write_digests(256)
    acts = [bytearray(plain.shard(i).read_bytes()) for i in range(5)]
    acts[0][700] ^= 1
    acts[1][0:4] = np.array([np.inf], "<f4").tobytes()
    acts[2], acts[3] = acts[3], acts[2]
    acts[4][:] = bytes(len(acts[4]))
    for i, data in enumerate(acts):
        plain.shard(i).write_bytes(data)
    return plain


def found(report: Report) -> Report:
    return replace(report, elapsed_s=0.0)


@pytest.mark.slow  # workers that were killed start again
@pytest.mark.parametrize("killed", [(), (12,), (0, 9)])
def test_workers_find_what_one_process_finds_also_when_some_are_killed(
    killed: tuple[int, ...], client, damaged: Plain, tmp_path: Path
):
    store = ShardStore.open(damaged.path)
    alone = store.validate(deep=True, progress=False)
    assert {problem.kind for problem in alone.problems} >= {"digest_mismatch", "non_finite"}
    client.wait_for_workers(2)
    report = store.validate(deep=True, client=noting(client, tmp_path / "noted", killed=killed), progress=False)
    assert found(report) == found(alone)
    assert n_processes(tmp_path / "noted") >= 2
    times = begun(tmp_path / "noted")
    assert list(times) == list(range(N_SHARDS))
    assert all(times[place] >= 2 for place in killed)


def test_a_killed_worker_costs_nothing_that_was_found_before(damaged: Plain, tmp_path: Path, monkeypatch):
    store, folder = ShardStore.open(damaged.path), tmp_path / "noted"
    receiving(monkeypatch, _validate, folder)
    with two_workers() as client:  # of which none was killed before
        store.validate(deep=True, client=noting(client, folder, killed=(12,), n_received=9), progress=False)
    times = begun(folder)
    assert times[12] == 2
    # Nine had arrived, in whatever order the two workers were.
    assert list(times.values()).count(1) >= 9


def test_the_bar_counts_all_bytes(client, damaged: Plain, monkeypatch: pytest.MonkeyPatch):
    advanced: list[int] = []
    monkeypatch.setattr(_validate.Progress, "advance", lambda self, nbytes: advanced.append(nbytes))
    ShardStore.open(damaged.path).validate(deep=True, client=client)
    assert sum(advanced) == N_SHARDS * damaged.shard_nbytes


def test_a_task_has_several_shards_where_there_are_many(client, damaged: Plain, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(_cluster, "MAX_TASKS", 4)  # of four or five shards
    store = ShardStore.open(damaged.path)
    report = store.validate(deep=True, client=noting(client, tmp_path / "noted"), progress=False)
    assert found(report) == found(store.validate(deep=True, progress=False))
    assert list(begun(tmp_path / "noted")) == [0, 1, 2, 3]


@pytest.mark.parametrize("killed", [(), (1,)])
def test_statistics_are_those_of_one_process_also_when_a_worker_is_killed(
    killed: tuple[int, ...], client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_compute, "_TASK_BYTES", 500)
    plain = plain_store(tmp_path / "shards", n=17)
    store = ShardStore.open(plain.path)
    alone = store.stats(save=False, progress=False)
    client.wait_for_workers(2)
    stats = store.stats(save=False, client=noting(client, tmp_path / "noted", killed=killed), progress=False)
    for name in ("mean", "std", "mean_norm", "min", "max"):
        assert np.array_equal(getattr(stats, name), getattr(alone, name))
    np.testing.assert_allclose(stats.mean, plain.acts.mean(axis=(0, 3), dtype=float), rtol=1e-12)
    assert all(begun(tmp_path / "noted")[place] >= 2 for place in killed)


def test_statistics_are_made_by_the_active_client_where_none_is_named(client, tmp_path: Path, monkeypatch):
    import distributed

    plain = plain_store(tmp_path / "shards", n=5)
    monkeypatch.setattr(distributed, "default_client", lambda: noting(client, tmp_path / "noted"))
    stats = ShardStore.open(plain.path).stats(save=False, progress=False)
    np.testing.assert_allclose(stats.mean, plain.acts.mean(axis=(0, 3), dtype=float), rtol=1e-12)
    assert begun(tmp_path / "noted") == {0: 1}


@pytest.mark.slow  # four workers start and die
@pytest.mark.parametrize("call", ["stats", "validate"])
@pytest.mark.parametrize("given", ["address", "client", "worker_client"])
def test_a_call_with_a_client_inside_a_task_does_not_wait_for_its_own_thread(call: str, given: str, tmp_path: Path):
    """One worker with one thread, which the task has."""
    from distributed import Client, LocalCluster, get_client, worker_client

    path = plain_store(tmp_path / "shards", n=12, per_shard=3).path

    def work(address: str) -> object:
        store = ShardStore.open(path)

        def ask(client: object) -> object:
            if call == "stats":
                return store.stats(client=client, refresh=True).n_examples
            return store.validate(deep=True, client=client, progress=False).ok

        if given == "address":
            return ask(address)
        if given == "client":
            return ask(get_client())
        with worker_client() as client:
            return ask(client)

    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        futures = [client.submit(work, cluster.scheduler_address, pure=False) for _ in range(2)]
        assert client.gather(futures, asynchronous=False) == ([12, 12] if call == "stats" else [True, True])


def test_calls_inside_calls_leave_their_thread_once(client):
    """Also in tasks that have no thread of their own, such as coroutines."""

    def nested() -> str:
        with _cluster._seceded(), _cluster._seceded():
            return "done"

    async def coroutine() -> str:
        return nested()

    assert client.submit(nested, pure=False).result(HANG_S) == "done"
    assert client.submit(coroutine, pure=False).result(HANG_S) == "done"
    assert nested() == "done"


#: Of two tasks in threads of this process: events cannot be sent.
TURNS = SimpleNamespace()


def asks(address: str, *, fails: bool) -> bool:
    with suppress(KeyError), connected(address):
        assert TURNS.begun.wait(HANG_S)
        TURNS.left.set()
        if fails:
            raise KeyError
    return TURNS.ended.is_set()


def takes_its_place() -> None:
    TURNS.begun.set()
    assert TURNS.left.wait(HANG_S)
    time.sleep(0.2)  # in which the other one would go on
    TURNS.ended.set()


@pytest.mark.parametrize("fails", [False, True])
def test_after_a_call_in_a_task_the_worker_has_no_more_threads_at_work_than_before(fails: bool):
    """The task goes on when the one that took its place has ended."""
    from distributed import Client, LocalCluster

    TURNS.begun, TURNS.left, TURNS.ended = threading.Event(), threading.Event(), threading.Event()
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        first = client.submit(asks, cluster.scheduler_address, fails=fails, pure=False)
        other = client.submit(takes_its_place, pure=False)
        assert client.gather([first, other], asynchronous=False) == [True, None]


def test_a_task_that_kills_every_worker_is_an_error_and_no_hang(client, damaged: Plain):
    def submit(call: object, task: object, **options: object) -> object:
        from clusters import die

        return client.submit(die, task, **options)

    deadly = SimpleNamespace(asynchronous=False, submit=submit, loop=client.loop, scheduler=client.scheduler)
    with pytest.raises(TransportError, match="workers that had a task died"):
        ShardStore.open(damaged.path).validate(deep=True, client=deadly)


def test_a_cluster_without_workers_is_an_error_after_a_while(damaged: Plain):
    import dask
    import distributed

    with (
        distributed.LocalCluster(n_workers=0, dashboard_address=":0") as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        store = ShardStore.open(damaged.path)
        with (
            dask.config.set({"distributed.scheduler.no-workers-timeout": "200 ms"}),
            pytest.raises(TransportError, match=r"no worker for 0\.2 s") as refused,
        ):
            store.validate(deep=True, client=client)
        assert "NO_WORKERS_TIMEOUT" in str(refused.value)
    # The scheduler may have the same rule, and be the first to say so.
    with (
        dask.config.set({"distributed.scheduler.no-workers-timeout": "100 ms"}),
        distributed.LocalCluster(n_workers=0, dashboard_address=":0") as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
        pytest.raises(TransportError, match=r"no worker for 0\.1 s"),
    ):
        store.stats(client=client, save=False)


def test_workers_that_come_later_are_waited_for(damaged: Plain):
    import distributed

    def submit(call: object, task: object, **options: object) -> object:
        future = client.submit(call, task, **options)
        cluster.scale(1)  # the first task is there before the first worker
        return future

    with (
        distributed.LocalCluster(n_workers=0, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        later = SimpleNamespace(asynchronous=False, submit=submit, loop=client.loop, scheduler=client.scheduler)
        store = ShardStore.open(damaged.path)
        assert found(store.validate(deep=True, client=later)) == found(store.validate(deep=True, progress=False))


def test_an_error_of_a_worker_is_raised_here(client, tmp_path: Path):
    """A shard that is gone by the time that a worker reads it is a finding; statistics of it are an error."""
    plain = plain_store(tmp_path)
    store = ShardStore.open(plain.path)
    plain.shard(1).unlink()
    assert "unreadable_shard" not in {p.kind for p in store.validate(deep=True, client=client).problems}
    with pytest.raises(_compute.CorruptShardError):
        store.stats(save=False, client=client)


def test_a_client_needs_something_to_do(damaged: Plain):
    store = ShardStore.open(damaged.path)
    with pytest.raises(ArgumentError, match="nothing for its workers"):
        store.validate(client="tcp://127.0.0.1:9")
    with pytest.raises(ArgumentError, match="client is 7"):
        store.validate(deep=True, client=7)
    with pytest.raises(ArgumentError, match="asynchronous"):
        store.validate(deep=True, client=SimpleNamespace(submit=None, asynchronous=True))


def test_the_command(client, damaged: Plain, capsys: pytest.CaptureFixture[str]):
    address = client.scheduler.address
    assert main(["validate", str(damaged.path), "--deep", "--scheduler", address, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["lost"] == [list(span) for span in ShardStore.open(damaged.path).validate(deep=True).lost]
    assert main(["validate", str(damaged.path), "--scheduler", address]) == 2


class FakeClient:
    """A client that notes how it was made, and whether it was closed."""

    made: list[FakeClient]
    asynchronous = False

    def __init__(self, address: str, **options: object) -> None:
        self.address, self.options, self.n_closed = address, options, 0
        self.made.append(self)

    def submit(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.n_closed += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    import distributed

    monkeypatch.setattr(FakeClient, "made", [], raising=False)
    monkeypatch.setattr(distributed, "Client", FakeClient)
    return FakeClient


def test_a_client_that_is_made_for_an_address_is_closed_and_nobody_elses_default(fake: type[FakeClient]):
    with _cluster.connected("tcp://host:8786") as client:
        assert client.n_closed == 0
    assert fake.made == [client]
    assert (client.address, client.n_closed) == ("tcp://host:8786", 1)
    assert client.options == {"timeout": 10, "set_as_default": False}
    with pytest.raises(KeyError), _cluster.connected("tcp://other:1") as client:
        raise KeyError
    assert client.n_closed == 1


def test_a_client_that_is_given_stays_open(fake: type[FakeClient]):
    given = fake("tcp://mine")
    with _cluster.connected(given) as client:
        assert client is given
    assert given.n_closed == 0
    given.asynchronous = True
    with pytest.raises(ArgumentError, match="the client is asynchronous") as caught, _cluster.connected(given):
        pass
    assert (caught.value.where, caught.value.remedy) == ("client", "Pass its scheduler's address instead.")
    with (
        pytest.raises(ArgumentError, match="client is 7; it must be a distributed.Client") as caught,
        _cluster.connected(7),
    ):
        pass
    assert caught.value.where == "client"


@pytest.mark.parametrize("error", [OSError("timed out"), ValueError("no such protocol")])
def test_an_address_where_no_scheduler_answers(monkeypatch: pytest.MonkeyPatch, error: Exception):
    import distributed

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(distributed, "Client", refuse)
    with pytest.raises(TransportError) as caught, _cluster.connected("tcp://host:1"):
        pass
    assert (caught.value.message, caught.value.where) == (f"no dask scheduler answers: {error}", "tcp://host:1")


@pytest.mark.parametrize(("is_task", "is_async", "has_client", "found"), [
    (False, False, True, True), (True, False, True, False), (False, True, True, False), (False, False, False, False),
])  # fmt: skip
def test_the_active_client(
    monkeypatch: pytest.MonkeyPatch, *, is_task: bool, is_async: bool, has_client: bool, found: bool
):
    import distributed

    def answer(value: object, *, is_there: bool):
        def call() -> object:
            if not is_there:
                raise ValueError("none")
            return value

        return call

    client = SimpleNamespace(asynchronous=is_async)
    monkeypatch.setattr(distributed, "get_worker", answer(object(), is_there=is_task))
    monkeypatch.setattr(distributed, "default_client", answer(client, is_there=has_client))
    assert _cluster.active_client() is (client if found else None)
    monkeypatch.delitem(sys.modules, "distributed")
    assert _cluster.active_client() is None


@pytest.mark.parametrize("n", [0, 1, 6, 7, 8, 13, 14, 15, 40])
def test_parts_of_a_list_differ_by_one_at_most(monkeypatch: pytest.MonkeyPatch, n: int):
    monkeypatch.setattr(_cluster, "MAX_TASKS", 7)
    parts = _cluster.equal_parts(range(n))
    assert [item for part in parts for item in part] == list(range(n))
    assert len(parts) == min(n, 7)
    lengths = {len(part) for part in parts}
    assert not lengths or max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(("said", "seconds"), [(None, 600.0), ("30 s", 30.0), ("2 hours", 7200.0), (5, 5.0)])
def test_how_long_tasks_wait_for_workers(said: object, seconds: float):
    import dask

    with dask.config.set({"distributed.scheduler.no-workers-timeout": said}):
        assert _cluster._no_workers_timeout_s() == seconds
        error = _cluster._no_workers()
    assert error.message == f"the cluster had no worker for {seconds:,g} s, so nothing was done"
    assert error.where == "client"
    assert "NO_WORKERS_TIMEOUT='12 hours'" in error.remedy


@pytest.mark.parametrize("broken", [False, True])
def test_the_wait_for_workers_begins_anew_with_each_that_comes(monkeypatch: pytest.MonkeyPatch, broken: bool):
    """By a clock that goes on by 0.03 s at each look, and a patience of 0.04 s; a scheduler that does not answer says nothing of workers."""
    cancelled, looks, now = threading.Event(), list[int | None](), iter(np.arange(100) * 0.03)
    answers = iter([2, 1, 1, 0, None if broken else 1, 0, 0, 1, 1])

    class Client:
        def scheduler_info(self, *, n_workers: int) -> dict[str, object]:
            assert n_workers
            looks.append(next(answers))
            if looks[-1] is None:
                raise OSError
            return {"workers": {number: {} for number in range(looks[-1])}}

        def cancel(self, futures: list[object]) -> None:
            assert futures == [future]
            cancelled.set()

    class Future:
        client = Client()

    future = Future()
    monkeypatch.setattr(_cluster, "_no_workers_timeout_s", lambda: 0.04)
    monkeypatch.setattr(_cluster, "time", SimpleNamespace(monotonic=lambda: next(now)))
    watch = _cluster._NoWorkers()
    watch.begin({future: 0})
    assert cancelled.wait(HANG_S)
    watch.close()
    assert watch.gave_up
    assert looks == [2, 1, 1, 0, None if broken else 1, 0, 0]


@pytest.mark.parametrize("ends_with", ["an error", "being closed"])
def test_tasks_that_are_left_are_cancelled(monkeypatch: pytest.MonkeyPatch, ends_with: str):
    """Whoever keeps the error keeps them alive; they would go on with what nobody wants."""
    import distributed

    cancelled, futures, before = list[int](), list[object](), set(threading.enumerate())

    class Client:
        loop = None

        def submit(self, call: object, task: int, *, pure: bool) -> object:
            assert not pure
            future = SimpleFuture(task)
            futures.append(future)
            return future

        def scheduler_info(self, *, n_workers: int) -> dict[str, object]:
            return {"workers": {n_workers: {}}}

    class SimpleFuture:
        def __init__(self, task: int) -> None:
            self.task, self.client = task, client

        def cancelled(self) -> bool:
            return False

        def cancel(self) -> None:
            cancelled.append(self.task)

    def as_completed(some: list[SimpleFuture], loop: object, *, with_results: bool):
        assert with_results
        yield some[0], "first"
        raise ValueError("of the second task")

    client = Client()
    monkeypatch.setattr(distributed, "as_completed", as_completed)
    found = _cluster.results(client, print, range(4))
    assert next(found) == "first"
    if ends_with == "an error":
        with pytest.raises(ValueError, match="of the second task"):
            next(found)
    found.close()
    assert (cancelled, len(futures)) == ([1, 2, 3], 4)
    watching = set(threading.enumerate()) - before
    for thread in watching:
        thread.join(HANG_S)
    assert not any(thread.is_alive() for thread in watching)


@pytest.mark.parametrize("address", ["bad", "", "foo://host:1", "tcp://host"])
def test_an_address_that_none_can_have_is_not_tried(address: str):
    """A client tries it for twenty seconds."""
    with pytest.raises(ArgumentError, match="no address of a scheduler"), _cluster.connected(address):
        pass
