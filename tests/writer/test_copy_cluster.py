"""`copy_store(…, client=)`: the workers of a dask cluster copy one store; the files are those that one process copies."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from clusters import CREDENTIALS, begun, fail, n_processes, noting, receiving, two_workers
from plain_stores import Plain, plain_store
from servers import s3_bucket  # noqa: F401  (a fixture)

from saev_store import ShardStore
from saev_store._runtime import progress
from saev_store.cli import main
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    IncompleteStoreError,
    ResumeError,
    SaevStoreWarning,
    StoreExistsError,
    TransportError,
)
from saev_store.transport import open_transport
from saev_store.writer.copying import _layers, _whole, copy_store

pytest.importorskip("distributed")

N_SHARDS = 9
N_FILES = N_SHARDS + 1  # labels.bin


@pytest.fixture(scope="module")
def client():
    with two_workers() as client:
        client.wait_for_workers(2)
        yield client


@pytest.fixture
def plain(tmp_path: Path) -> Plain:
    found = plain_store(tmp_path / "from", n=25, labels=True)
    found.write_digests(256)
    return found


def contents(folder: Path | str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.mark.slow  # workers that were killed start again
@pytest.mark.parametrize("killed", [(), (4,), (0, 5)])
def test_workers_copy_what_one_process_copies_also_when_some_are_killed(
    killed: tuple[int, ...], client, plain: Plain, tmp_path: Path
):
    alone = copy_store(plain.path, tmp_path / "alone", progress=False)
    client.wait_for_workers(2)
    noted = noting(client, tmp_path / "noted", killed=killed)
    copied = copy_store(plain.path, tmp_path / "many", client=noted, progress=False)
    assert contents(copied) == contents(alone)
    assert {**contents(copied), "digests.json": b""} == {**contents(plain.path), "digests.json": b""}
    assert n_processes(tmp_path / "noted") >= 2
    assert list(begun(tmp_path / "noted")) == list(range(N_FILES))
    assert ShardStore.open(copied).validate(deep=True, client=client).ok
    # The same call has nothing to do.
    assert (
        copy_store(plain.path, tmp_path / "many", client=noting(client, tmp_path / "again"), progress=False) == copied
    )
    assert begun(tmp_path / "again") == {}


@pytest.mark.parametrize("shown", [False, None])
def test_the_bar_counts_the_examples_of_all_workers(
    shown: bool | None, client, plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
):
    monkeypatch.setattr(progress, "shows_lines_anew", lambda: True)
    with progress.counting():
        copy_store(plain.path, tmp_path, layers=[5], client=client, progress=shown)
        copying = [bar for bar in progress.counted_so_far() if bar.title == "copying"]
    assert [(bar.unit, bar.n) for bar in copying] == [("examples", 25)]
    assert ("%|" in capfd.readouterr().err) is (shown is None)


def test_a_killed_worker_costs_its_file_only(plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "noted"
    receiving(monkeypatch, _whole, folder)
    with two_workers() as client:  # of which none was killed before
        noted = noting(client, folder, killed=(6,), n_received=4)
        copy_store(plain.path, tmp_path / "to", client=noted, progress=False)
    times = begun(folder)
    assert times[6] == 2
    assert list(times.values()).count(1) >= 4  # that had arrived, in whatever order


@pytest.mark.slow  # workers that were killed start again
@pytest.mark.parametrize("killed", [(), (1,), (0, 3)])
def test_workers_write_layers_and_tokens_as_one_process_does(
    killed: tuple[int, ...], client, plain: Plain, tmp_path: Path
):
    given = {"layers": [11, 2], "tokens": "content", "progress": False}
    alone = copy_store(plain.path, tmp_path / "alone", **given)
    client.wait_for_workers(2)
    noted = noting(client, tmp_path / "noted", killed=killed)
    copied = copy_store(plain.path, tmp_path / "many", client=noted, **given)
    assert contents(copied) == contents(alone)
    times = begun(tmp_path / "noted")
    assert list(times) == list(range(5))  # five shards of five examples
    assert all(times[place] >= 2 for place in killed)
    np.testing.assert_array_equal(ShardStore.open(copied)[...], plain.acts[:, [0, 2], 1:])
    np.testing.assert_array_equal(ShardStore.open(copied).labels, plain.labels)
    # The same call compares; resume=False refuses.
    assert copy_store(plain.path, tmp_path / "many", client=client, **given) == copied
    with pytest.raises(StoreExistsError):
        copy_store(plain.path, tmp_path / "many", client=client, resume=False, **given)


def test_layers_that_rot_before_they_are_published_are_not(
    client, plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """All of it is read again: the workers have told what they wrote, not what is there."""
    is_unchanged = _layers.check_unchanged

    def rotting(*arguments: object) -> None:
        is_unchanged(*arguments)
        (shard,) = (tmp_path / "to").glob("*/acts000001.bin")
        data = bytearray(shard.read_bytes())
        data[7] ^= 1
        shard.write_bytes(data)

    monkeypatch.setattr(_layers, "check_unchanged", rotting)
    with pytest.raises(CorruptShardError, match="acts000001"):
        copy_store(plain.path, tmp_path / "to", layers=[5], client=client, progress=False)
    assert not list((tmp_path / "to").glob("*/metadata.json"))


def test_layers_that_a_cluster_has_begun_are_continued_by_a_cluster(client, plain: Plain, tmp_path: Path):
    given = {"layers": [5], "progress": False}
    alone = copy_store(plain.path, tmp_path / "alone", **given)
    to = tmp_path / "to" / Path(alone).name
    written: dict[str, int] = {}

    def submit(call: object, task: object, **options: object) -> object:
        """The last part fails when the others are done."""
        if task != (2, 3):
            future = client.submit(call, task, **options)
            future.result()
            return future
        written.update({path.name: path.stat().st_mtime_ns for path in to.glob("acts*.bin")})
        return client.submit(fail, task, **options)

    losing = SimpleNamespace(asynchronous=False, submit=submit, loop=client.loop)
    with pytest.raises(TransportError, match="no route"):
        copy_store(plain.path, tmp_path / "to", client=losing, **given)
    assert len(written) == 2
    assert not (to / "metadata.json").exists()
    with pytest.raises(IncompleteStoreError):
        copy_store(plain.path, tmp_path / "to", client=client, resume=False, **given)
    with pytest.raises(ResumeError):  # one process has other parts
        copy_store(plain.path, tmp_path / "to", **given)
    assert copy_store(plain.path, tmp_path / "to", client=client, **given) == str(to)
    assert {name: (to / name).stat().st_mtime_ns for name in written} == written
    names = [path.name for path in to.glob("acts*.bin")]
    assert len(names) == 3
    assert {name: contents(to)[name] for name in names} == {name: contents(alone)[name] for name in names}


@pytest.mark.slow  # workers that were killed start again
@pytest.mark.parametrize("killed", [(), (1, 3)])
def test_workers_round_as_one_process_does(killed: tuple[int, ...], client, plain: Plain, tmp_path: Path):
    given = {"layers": [11, 2], "dtype": "bfloat16", "progress": False}
    alone = copy_store(plain.path, tmp_path / "alone", **given)
    assert alone.rounding is not None
    assert 0 < alone.rounding.mean_rel_error < 2**-8
    client.wait_for_workers(2)
    noted = noting(client, tmp_path / "noted", killed=killed)
    copied = copy_store(plain.path, tmp_path / "many", client=noted, **given)
    assert contents(copied) == contents(alone)  # with the report in provenance.json
    assert copied.rounding == alone.rounding
    times = begun(tmp_path / "noted")
    assert len(times) > 3
    assert all(times[place] >= 2 for place in killed)
    assert copy_store(plain.path, tmp_path / "many", client=client, **given).rounding == alone.rounding


def test_rounding_that_was_interrupted_is_continued_with_the_same_report(client, plain: Plain, tmp_path: Path):
    given = {"dtype": "float16", "progress": False}
    alone = copy_store(plain.path, tmp_path / "alone", **given)
    n_parts = len(list(Path(alone).glob("acts*.bin")))
    assert n_parts > 1

    def submit(call: object, task: object, **options: object) -> object:
        """The last part fails when the others are done."""
        if task != (n_parts - 1, n_parts):
            future = client.submit(call, task, **options)
            future.result()
            return future
        return client.submit(fail, task, **options)

    with pytest.raises(TransportError, match="no route"):
        losing = SimpleNamespace(asynchronous=False, submit=submit, loop=client.loop)
        copy_store(plain.path, tmp_path / "to", client=losing, **given)
    with pytest.raises(IncompleteStoreError):
        copy_store(plain.path, tmp_path / "to", client=client, resume=False, **given)
    copied = copy_store(plain.path, tmp_path / "to", client=client, **given)
    assert contents(copied) == contents(alone)
    assert copied.rounding == alone.rounding


def test_numbers_that_are_too_large_for_a_dtype(client, plain: Plain, tmp_path: Path):
    """As in one process they are refused, made infinite with a warning, or the largest number."""
    raw = np.fromfile(plain.shard(3), "<f4")
    raw[5] = 1e5
    raw.tofile(plain.shard(3))
    plain.path.joinpath("digests.json").unlink()
    given = {"dtype": "float16", "progress": False}
    with pytest.raises(ArgumentError, match="float16 cannot hold"):
        copy_store(plain.path, tmp_path / "to", client=client, **given)
    for policy in ("warn", "saturate"):
        found = []
        for more in ({}, {"client": client}):
            to = tmp_path / f"{policy}{len(found)}"
            if policy == "warn":
                with pytest.warns(SaevStoreWarning, match="recorded as infinity"):
                    found.append(copy_store(plain.path, to, on_overflow=policy, **given, **more))
            else:
                found.append(copy_store(plain.path, to, on_overflow=policy, **given, **more))
        alone, many = found
        assert contents(many) == contents(alone)
        assert many.rounding == alone.rounding
        assert many.rounding.n_became_infinite == (policy == "warn")


def test_documents_of_another_version_come_with_files_of_the_workers(client, plain: Plain, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(_whole, "share", lambda *_: False)  # as across disks
    alone = copy_store(plain.path, tmp_path / "alone", protocol="2.1", progress=False)
    many = copy_store(plain.path, tmp_path / "many", protocol="2.1", client=client, progress=False)
    assert contents(many) == contents(alone)


def test_what_a_worker_refuses_is_raised_here_and_the_rest_is_continued(client, plain: Plain, tmp_path: Path):
    right = plain.shard(5).read_bytes()
    plain.shard(5).write_bytes(bytes(len(right)))
    with pytest.raises(CorruptShardError, match=r"acts000005\.bin: block 0 of the source"):
        copy_store(plain.path, tmp_path / "to", client=client, progress=False)
    with pytest.raises(IncompleteStoreError):
        ShardStore.open(tmp_path / "to" / plain.path.name)
    plain.shard(5).write_bytes(right)
    with pytest.raises(IncompleteStoreError):
        copy_store(plain.path, tmp_path / "to", client=client, resume=False, progress=False)
    # Begun by a cluster, continued by one process.
    copied = copy_store(plain.path, tmp_path / "to", progress=False)
    assert contents(copied) == contents(copy_store(plain.path, tmp_path / "alone", progress=False))


def test_to_a_bucket_with_credentials_of_the_workers(client, plain: Plain, s3_bucket, tmp_path: Path, monkeypatch):
    """Credentials do not travel to workers: each process has them of its own."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    options = {"endpoint_url": s3_bucket.options["endpoint_url"]}
    copied = copy_store(plain.path, s3_bucket.url, dst_storage_options=options, client=client, progress=False)
    transport = open_transport(copied, options)
    for name, data in contents(copy_store(plain.path, tmp_path / "alone", progress=False)).items():
        found = bytes(transport.read(name))
        assert found == data[: len(found)]  # a bucket has no padding
        assert not any(data[len(found) :])


def test_an_address_that_only_this_process_knows_is_found_out(client, plain: Plain):
    with pytest.raises(TransportError, match="it is not there"):
        copy_store(plain.path, "memory://copies", client=client, progress=False)
    with pytest.raises(IncompleteStoreError):
        ShardStore.open(f"memory://copies/{plain.path.name}")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"layers": [5], "client": 7}, "client is 7"),
        ({"max_mb_per_s": 5}, "a limit"),
        ({"client": 7}, "client is 7"),
        ({"client": SimpleNamespace(submit=None, asynchronous=True)}, "asynchronous"),
    ],
)
def test_what_a_cluster_does_not_do(more: dict, message: str, plain: Plain, tmp_path: Path):
    given = {"client": "tcp://127.0.0.1:9", "progress": False, **more}
    with pytest.raises(ArgumentError, match=message):
        copy_store(plain.path, tmp_path / "to", **given)


def test_the_command(client, plain: Plain, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["copy", str(plain.path), str(tmp_path / "to"), "--scheduler", client.scheduler.address]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "to" / plain.path.name)
    assert ShardStore.open(tmp_path / "to" / plain.path.name).validate(deep=True).ok
