"""A proxy that breaks things before a bucket: the bytes are right, or an error of ours comes within the time allowed."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import socket
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
from cloud_servers import Fault, Proxy, swift_bucket  # noqa: F401 (one is a fixture)
from fault_campaign import (
    ENGINES,
    READING,
    WRITING,
    Kind,
    arm,
    direct,
    read_through,
    store_through,
    through,
    uploads,
    write_through,
)
from retries import few_tries  # noqa: F401 (a fixture)
from servers import s3_bucket, s3_endpoint  # noqa: F401 (one is a fixture)
from waiting import HANG_S

from saev_store import ShardStore, new_metadata
from saev_store.errors import CorruptShardError, NotFoundError, SaevStoreError, TransportError
from saev_store.transport import open_transport
from saev_store.transport.obstore._transport import ObstoreTransport
from saev_store.writer import create_store
from saev_store.writer.copying import copy_store

pytest.importorskip("obstore")


def in_turn(kinds):
    """Each kind with one client, in turn: `fault_campaign.py` tries all with each."""
    return pytest.mark.parametrize(("kind", "engine"), [(kind, ENGINES[n % 2]) for n, kind in enumerate(kinds)])


@in_turn(READING)
def test_right_bytes_or_a_named_error_in_time(s3_bucket, kind, engine, few_tries):
    found = read_through(s3_endpoint(), s3_bucket, engine, kind, operations=6)
    assert not found.problems
    assert found.operations in {6, 3}


@in_turn(WRITING)
def test_what_is_written_is_whole_or_not_there(s3_bucket, kind, engine):
    found = write_through(s3_endpoint(), s3_bucket, engine, kind)
    assert not found.problems
    assert found.operations == 2


@pytest.mark.parametrize("protocol", ["2.0", "3.0"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["resets", "denied half-way", "the last answer is lost"])
def test_a_store_is_published_whole_or_not_at_all(s3_bucket, kind, engine, protocol):
    assert not store_through(s3_endpoint(), s3_bucket, engine, kind, protocols=[protocol]).problems


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["everything", "reset in mid-body"])
def test_a_server_that_checks_what_it_is_sent(swift_bucket, kind, engine, few_tries):
    """A few operations of a few kinds; `fault_campaign.py` has them all."""
    endpoint = swift_bucket.options["endpoint_url"]
    assert not read_through(endpoint, swift_bucket, engine, kind).problems
    if kind in WRITING:
        assert not write_through(endpoint, swift_bucket, engine, kind, operations=6).problems
        assert not store_through(endpoint, swift_bucket, engine, kind, protocols=["3.0"]).problems


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "fault", [Fault(flip_at=300, times=-1), Fault(repeat_bytes=16, times=-1)], ids=["bit", "bytes"]
)
def test_wrong_bytes_of_the_right_length_are_found_by_digests_alone(s3_bucket, fault, engine, tmp_path):
    """No protocol sums up a range. What is compared with the writer's digests tells, what is only read does not."""
    metadata = new_metadata(
        family="clip", ckpt="flips", layers=(3, 7), content_tokens_per_example=4, cls_token=True, d_model=16,
        n_examples=6, max_tokens_per_shard=30,
    )  # fmt: skip
    truth = np.random.default_rng(0).standard_normal(metadata.layout.shape).astype(np.float32)
    with create_store(direct(s3_bucket, engine), metadata) as writer:
        writer.append(truth)
    fault = dataclasses.replace(fault, path="acts")
    with through(s3_endpoint(), s3_bucket, engine, Kind((fault,)), 1) as (proxy, transport):
        arm(proxy, Kind((fault,)))
        store = ShardStore.open(transport.at(metadata.hash))
        assert store[0, 0].tobytes() != truth[0, 0].tobytes()
        report = store.validate(deep=True)
        assert not report.ok
        # s3fs refuses a whole object whose checksum, as the service keeps it, is another.
        assert {problem.kind for problem in report.problems} & {"digest_mismatch", "unreadable_shard"}
        with pytest.raises(CorruptShardError):
            options = {**s3_bucket.options, "endpoint_url": proxy.url}
            copy_store(f"{s3_bucket.url}/{metadata.hash}", tmp_path / "copy", storage_options=options)
        assert not (tmp_path / "copy" / metadata.hash / "metadata.json").exists()
    assert ShardStore.open(direct(s3_bucket, engine).at(metadata.hash)).validate(deep=True).ok


def open_through(proxy, bucket, engine):
    options = {**bucket.options, "endpoint_url": proxy.url}
    assert engine == "obstore"
    return ObstoreTransport(bucket.url, options, timeout_s=1.5)


def outcome(call):
    """(result, error); any other exception than ours is a failure of the test."""
    try:
        return call(), None
    except SaevStoreError as error:
        return None, error


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("uploads", Fault(status=500, times=-1)),
        ("partNumber=2", Fault(status=403, code="AccessDenied", times=-1)),
        ("partNumber=1", Fault(status=500, times=-1)),
        ("", Fault(method="POST", path="uploadId", status=403, times=-1)),
    ],
)
def test_an_upload_that_fails_leaves_nothing_behind(s3_bucket, path, fault):
    fault = Fault(**{**vars(fault), "path": path or fault.path})
    with Proxy(s3_endpoint(), [fault]) as proxy:
        transport = open_through(proxy, s3_bucket, "obstore")
        sink = transport.open_sink("big.bin", used_nbytes=20 << 20, file_nbytes=20 << 20, resume=True)

        def upload():
            for start in range(0, 20 << 20, 4 << 20):
                sink.write(start, [memoryview(bytes(4 << 20))])
            sink.commit()

        _, error = outcome(upload)
        assert error is not None
        # Also where nobody aborts it: its parts cost money.
        with pytest.raises(TransportError, match="aborted"):
            sink.sync()
        with pytest.raises(NotFoundError):
            ObstoreTransport(s3_bucket.url, s3_bucket.options).size("big.bin")
        assert uploads(s3_bucket) == 0
        sink.abort()


def test_a_slow_part_does_not_hold_an_upload_up_for_ever(s3_bucket):
    with Proxy(s3_endpoint(), [Fault(path="partNumber=1", delay_s=30, times=-1)]) as proxy:
        transport = open_through(proxy, s3_bucket, "obstore")
        sink = transport.open_sink("big.bin", used_nbytes=9 << 20, file_nbytes=9 << 20, resume=True)
        start = time.monotonic()
        with pytest.raises(SaevStoreError):
            sink.write(0, [memoryview(bytes(9 << 20))])
            sink.commit()
        assert time.monotonic() - start < 60


def test_a_proxy_that_ends_leaves_no_connection_open():
    """A warning of one would fail whichever test is running when its garbage is collected."""
    left, stop = [], threading.Event()
    hook, sys.unraisablehook = sys.unraisablehook, left.append

    def connect(port):
        clients = []
        while not stop.is_set() and len(clients) < 200:
            client = socket.socket()
            clients.append(client)
            with contextlib.suppress(OSError):
                client.connect(("127.0.0.1", port))
                client.send(b"GET /x HTTP/1.1\r\n\r\n")
        for client in clients:
            client.close()

    try:
        with socket.create_server(("127.0.0.1", 0)) as upstream:
            for _ in range(10):
                with Proxy(f"http://127.0.0.1:{upstream.getsockname()[1]}") as proxy:
                    thread = threading.Thread(target=connect, args=[int(proxy.url.rpartition(":")[2])])
                    thread.start()
                    while not proxy.open_now and thread.is_alive():
                        time.sleep(0.001)
                stop.set()
                thread.join(HANG_S)
                stop.clear()
                gc.collect()
    finally:
        sys.unraisablehook = hook
    assert not left


def test_nothing_is_left_open(s3_bucket):
    """Threads and connections do not grow with the number of failed reads."""
    ObstoreTransport(s3_bucket.url, s3_bucket.options).put("acts.bin", bytes(1000))
    with Proxy(s3_endpoint(), [Fault(reset_at=10, times=-1, probability=0.3)]) as proxy:
        transport = open_through(proxy, s3_bucket, "obstore")
        seen = []
        for _ in range(3):
            for n in range(20):
                outcome(lambda n=n: transport.get_ranges("acts.bin", starts=[n], ends=[n + 100]))
            seen.append((threading.active_count(), proxy.open_now))
        assert seen[2][0] <= seen[0][0] + 2
        assert seen[2][1] <= 64


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("nbytes", [1000, 9 << 20], ids=["one request", "parts"])
def test_a_commit_that_failed_is_tried_again_with_the_same_bytes(s3_bucket, engine, nbytes):
    """Found by the campaign: the second attempt sent zeros."""
    truth = np.random.default_rng(0).bytes(nbytes)
    with through(s3_endpoint(), s3_bucket, engine, Kind(), 1) as (proxy, transport):
        sink = transport.open_sink("acts.bin", used_nbytes=nbytes, file_nbytes=nbytes, resume=True)
        sink.write(0, [memoryview(truth)])
        proxy.faults[:] = [Fault(path="acts", lose_request=True, times=-1)]
        with pytest.raises(SaevStoreError):
            sink.commit()
        proxy.faults.clear()
        try:
            sink.commit()
        except SaevStoreError:  # it may also have given up
            with pytest.raises(NotFoundError):
                direct(s3_bucket).size("acts.bin")
        else:
            assert direct(s3_bucket).read("acts.bin") == truth


def far(proxy, bucket, engine):
    return open_transport(bucket.url, {**bucket.options, "endpoint_url": proxy.url}, engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (500, "InternalError")])
def test_a_size_is_asked_for_again_while_the_service_is_busy(s3_bucket, engine, status, code):
    """The answer to HEAD has no body, so s3fs sees no code, and gives up after one more try."""
    direct(s3_bucket).put("acts.bin", bytes(1000))
    with Proxy(s3_endpoint(), [Fault(method="HEAD", status=status, code=code, times=5)]) as proxy:
        assert far(proxy, s3_bucket, engine).size("acts.bin") == 1000


@pytest.mark.parametrize("engine", ENGINES)
def test_a_size_that_is_not_told_is_an_error_in_time(s3_bucket, engine, few_tries):
    direct(s3_bucket).put("acts.bin", bytes(1000))
    with Proxy(s3_endpoint(), [Fault(method="HEAD", status=503, code="SlowDown", times=-1)]) as proxy:
        with pytest.raises(TransportError) as refused:
            far(proxy, s3_bucket, engine).size("acts.bin")
        assert refused.value.transient


def said_of_a_bucket_elsewhere(url, options, engine):
    transport, said = open_transport(url, options, engine=engine), []
    for call in (
        lambda: transport.get_ranges("a.bin", starts=[0], ends=[3]),
        lambda: transport.read("a.bin"),
        lambda: transport.size("a.bin"),
        lambda: transport.put("a.bin", b"x"),
    ):
        with pytest.raises(TransportError) as caught:
            call()
        said.append((str(caught.value), caught.value.transient))
    return said


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_a_bucket_that_is_somewhere_else(s3_bucket, engine):
    """What is said is what to do. In a process of its own: s3fs's client goes on asking until Python's stack is full, and
    leaves requests that are not awaited."""
    with (
        Proxy(s3_endpoint(), [Fault(status=301, code="PermanentRedirect", times=-1)]) as proxy,
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other,
    ):
        options = {**s3_bucket.options, "endpoint_url": proxy.url}
        said = other.submit(said_of_a_bucket_elsewhere, s3_bucket.url, options, engine).result(HANG_S)
    assert len(said) == 4
    for message, transient in said:
        assert "region" in message
        assert "recursion" not in message
        assert not transient
