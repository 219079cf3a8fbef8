"""Validation and statistics on a dask cluster: what one process finds, also when workers are killed, which cost their task only."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from clusters import begun, n_processes, noting, two_workers
from plain_stores import Plain, plain_store

from saev_store import ShardStore
from saev_store._runtime import cluster
from saev_store._runtime.cluster import map_shards
from saev_store.cli import main
from saev_store.errors import ArgumentError, CorruptShardError, TransportError
from saev_store.stats import compute
from saev_store.validation import Report

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
@pytest.mark.parametrize("killed", [(), (0, 9)])
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
    assert list(times) == list(range(N_SHARDS + 1))  # and the labels
    assert all(times[place] >= 2 for place in killed)


@pytest.mark.parametrize("killed", [(), (1,)])
def test_statistics_are_those_of_one_process_also_when_a_worker_is_killed(
    killed: tuple[int, ...], client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compute, "_TASK_BYTES", 500)
    plain = plain_store(tmp_path / "shards", n=17)
    store = ShardStore.open(plain.path)
    alone = store.stats(save=False, progress=False)
    client.wait_for_workers(2)
    stats = store.stats(save=False, client=noting(client, tmp_path / "noted", killed=killed), progress=False)
    for name in ("mean", "std", "mean_norm", "min", "max"):
        assert np.array_equal(getattr(stats, name), getattr(alone, name))
    np.testing.assert_allclose(stats.mean, plain.acts.mean(axis=(0, 3), dtype=float), rtol=1e-12)
    assert all(begun(tmp_path / "noted")[place] >= 2 for place in killed)


def test_a_task_that_kills_every_worker_is_an_error_and_no_hang(client, damaged: Plain, monkeypatch):
    monkeypatch.setattr(client.cluster.scheduler, "allowed_failures", 0)  # each worker takes seconds to start again

    def submit(call: object, task: object, **options: object) -> object:
        from clusters import die

        return client.submit(die, task, **options)

    deadly = SimpleNamespace(asynchronous=False, submit=submit, loop=client.loop, scheduler=client.scheduler)
    with pytest.raises(TransportError):
        ShardStore.open(damaged.path).validate(deep=True, client=deadly)


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
    with pytest.raises(CorruptShardError):
        store.stats(save=False, client=client)


def test_a_client_needs_something_to_do(damaged: Plain):
    store = ShardStore.open(damaged.path)
    with pytest.raises(ArgumentError):
        store.validate(client="tcp://127.0.0.1:9")
    with pytest.raises(ArgumentError):
        store.validate(deep=True, client=7)
    with pytest.raises(ArgumentError):
        store.validate(deep=True, client=SimpleNamespace(submit=None, asynchronous=True))


def test_the_command(client, damaged: Plain, capsys: pytest.CaptureFixture[str]):
    address = client.scheduler.address
    assert main(["validate", str(damaged.path), "--deep", "--scheduler", address, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["lost"] == [list(span) for span in ShardStore.open(damaged.path).validate(deep=True).lost]
    assert main(["validate", str(damaged.path), "--scheduler", address]) == 2


def test_map_shards_with_an_address_connects_and_leaves_nothing_open(client):
    from distributed import default_client

    assert list(map_shards(abs, [-3, 1, -2], client.scheduler.address)) == [3, 1, 2]
    with pytest.raises(ValueError, match="No clients"):
        default_client()


@pytest.mark.parametrize("fails", [False, True])
def test_map_shards_that_ends_early_cancels_what_is_left(fails: bool):
    cancelled: list[int] = []

    def submit(call: object, shard: int, *, pure: bool) -> object:
        assert not pure
        return SimpleNamespace(result=lambda: call(shard), cancel=lambda: cancelled.append(shard))

    found = map_shards(
        lambda n: 6 // n, [3, 0 if fails else 1, 2, 1], SimpleNamespace(asynchronous=False, submit=submit)
    )
    assert next(found) == 2
    if fails:
        with pytest.raises(ZeroDivisionError):
            next(found)
    found.close()
    assert cancelled == ([2, 1] if fails else [1, 2, 1])


def test_a_scheduler_that_does_not_answer_is_a_transport_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cluster, "_CONNECT_TIMEOUT_S", 0.2)
    with pytest.raises(TransportError) as refused:
        list(map_shards(abs, [1], "tcp://127.0.0.1:9"))
    assert refused.value.where == "tcp://127.0.0.1:9"
