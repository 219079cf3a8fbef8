"""Object stores through obstore: the contract, what is pinned, what is never told, and other processes."""

from __future__ import annotations

import asyncio
import gc
import http.server
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextvars import copy_context
from functools import partial

import numpy as np
import pytest
from cloud_servers import gcs_xml_bucket  # noqa: F401 (a fixture)
from processes import in_process, read_part
from retries import clock  # noqa: F401 (a fixture)
from servers import s3_bucket  # noqa: F401 (a fixture)
from test_transport_contract import RangeHandler, fill_folder
from waiting import HANG_S

from saev_store._runtime.threads import Flag
from saev_store.errors import (
    AccessError,
    ArgumentError,
    CorruptShardError,
    DeadlineError,
    ForkError,
    MissingDependencyError,
    NotFoundError,
    TransportError,
)
from saev_store.testing._reading import follow
from saev_store.testing.transport import FILES, ReadContract, WriteContract
from saev_store.transport import Transport, open_transport
from saev_store.transport._remote import again, run_in_loop
from saev_store.transport.base import STOP
from saev_store.transport.obstore import part_bytes
from saev_store.transport.obstore._client import bucket_region
from saev_store.transport.obstore._options import only_obstore_understands, place_of
from saev_store.transport.obstore._transport import ObstoreTransport

obstore = pytest.importorskip("obstore")
# In this process threads are running when it forks: that is the very thing to be tested.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")


class TestS3(WriteContract):
    resumes = False
    locks = False

    @pytest.fixture
    def transport(self, s3_bucket) -> Transport:
        transport = open_transport(s3_bucket.url + "/lab/shards", s3_bucket.options, engine="obstore")
        for path, data in FILES.items():
            transport.put(path, data)
        return transport


class TestHttp(ReadContract):
    """Any web server that answers ranges, as nginx would; obstore lists only those that speak WebDAV."""

    test_lists_one_level = test_folders_are_roots = None

    @pytest.fixture
    def transport(self, tmp_path) -> Transport:
        fill_folder(tmp_path)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(RangeHandler, directory=str(tmp_path)))
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield open_transport(f"http://127.0.0.1:{server.server_port}", engine="obstore")
        server.shutdown()
        server.server_close()


def open_s3(bucket, path="", **options) -> ObstoreTransport:
    return ObstoreTransport(bucket.url + path, {**bucket.options, **options})


def one(transport, path, start, end):
    (part,) = transport.get_ranges(path, starts=[start], ends=[end])
    return part


# What the options mean

S3 = {"key": "AKID", "secret": "hush-hush"}


@pytest.mark.parametrize(
    ("url", "options", "config"),
    [
        ("s3://b/p/", S3, {"access_key_id": "AKID", "secret_access_key": "hush-hush"}),
        ("s3a://b", {"anon": True}, {"skip_signature": True}),
        ("s3://b", {"token": "t", "anon": False}, {"session_token": "t"}),
        (
            "s3://b",
            {"endpoint_url": "http://h:1", "use_listings_cache": False},
            {"endpoint": "http://h:1", "region": "us-east-1"},
        ),
        (
            "s3://b",
            {"client_kwargs": {"endpoint_url": "https://h", "region_name": "eu-west-3"}},
            {"endpoint": "https://h", "region": "eu-west-3"},
        ),
        ("s3://b", {"client_kwargs": {"aws_access_key_id": "AKID"}}, {"access_key_id": "AKID"}),
        ("s3://b", {"requester_pays": True}, {"request_payer": True}),
        (
            "s3://b",
            {"config_kwargs": {"s3": {"addressing_style": "virtual"}, "max_pool_connections": 99}},
            {"virtual_hosted_style_request": True},
        ),
        ("s3://b", {"access_key_id": "AKID", "region": "r"}, {"access_key_id": "AKID", "region": "r"}),
        ("gs://b/x", {"token": "anon"}, {"skip_signature": True}),
        ("gs://b/x", {"token": None, "project": "p"}, {}),
        ("gs://b", {"bearer_token": "x", "base_url": "http://h"}, {"bearer_token": "x", "base_url": "http://h"}),
        ("az://c/x", {"account_name": "a", "sas_token": "s"}, {"account_name": "a", "sas_key": "s"}),
        ("https://h/x", {"headers": {"Authorization": "Bearer hush-hush"}}, {}),
    ],
)
def test_options_mean_what_they_mean_to_fsspec(url, options, config, monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    place = place_of(url, options)
    assert dict(place.config) == config
    assert "hush-hush" not in repr(place)
    assert place.allow_http == any(str(value).startswith("http://") for value in config.values())


@pytest.mark.parametrize(
    ("url", "options", "named"),
    [
        ("s3://b", {"profile": "hush-hush"}, "profile"),
        ("s3://b", {"s3_additional_kwargs": {}, "session": 1}, "s3_additional_kwargs, session"),
        ("s3://b", {"config_kwargs": {"s3": {"payload": "hush-hush"}}}, "config_kwargs.s3.payload"),
        ("s3://b", {"config_kwargs": {"signature_version": "s3"}}, "signature_version"),
        ("s3://b", {"version_aware": True}, "version_aware"),
        ("gs://b", {"token": "browser"}, "token"),
        ("gs://b", {"endpoint_url": "http://h"}, "endpoint_url"),
        ("s3://b", {"client_kwargs": "hush-hush"}, "client_kwargs"),
    ],
)
def test_options_without_an_equivalent_are_named(url, options, named):
    with pytest.raises(ArgumentError, match=named) as caught:
        open_transport(url, options, engine="obstore")
    assert "hush-hush" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["memory://x", "simplecache::s3://b", "hf://x", "https://me:pw@h/x", "https://h/x?sig=1", "s3://", "/data"]
)
def test_addresses_that_obstore_does_not_serve(url):
    with pytest.raises(ArgumentError):
        open_transport(url, engine="obstore")


# Reading


def test_ranges_are_not_copied_and_each_is_one_request(s3_bucket):
    transport = open_s3(s3_bucket, "/root")
    transport.put("a.bin", bytes(range(256)))
    before = transport.counters
    parts = transport.get_ranges("a.bin", starts=[0, 9, 100], ends=[5, 9, 200])
    assert [type(part) for part in parts] == [memoryview, bytes, memoryview]
    after = transport.counters
    assert (after.requests - before.requests, after.bytes_read - before.bytes_read) == (2, 105)
    transport.read("a.bin", max_bytes=1000)
    transport.size("a.bin")
    assert transport.at("x").counters.operations == {"put": 1, "get_ranges": 2, "read": 1, "size": 1}


def test_long_ranges_travel_in_pieces(s3_bucket, monkeypatch):
    monkeypatch.setattr("saev_store.transport.obstore._transport.PIECE_BYTES", 1000)
    transport, truth = open_s3(s3_bucket), np.random.default_rng(0).bytes(10_500)
    transport.put("a.bin", truth)
    assert bytes(one(transport, "a.bin", 3, 10_500)) == truth[3:]
    buffers = [bytearray(n) for n in (1, 999, 1000, 1001, 0, 4000)]
    views = [memoryview(buffer) for buffer in buffers]
    transport.readinto("a.bin", starts=follow(17, views), buffers=views)
    assert b"".join(buffers) == truth[17 : 17 + 7001]
    assert transport.counters.operations["get_ranges"] == 11 + 8
    with pytest.raises(CorruptShardError, match="10,500 bytes but byte 10,501 is needed"):
        one(transport, "a.bin", 3, 10_501)


def test_what_arrives_of_a_piece_is_counted_before_the_piece_is_whole():
    """A loader tells a slow line from a stalled one by these counts."""
    truth, counted = np.random.default_rng(0).bytes(5 << 20), threading.Event()

    class Slow(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(206)
            self.send_header("Content-Length", str(len(truth)))
            self.send_header("Content-Range", f"bytes 0-{len(truth) - 1}/{len(truth)}")
            self.send_header("ETag", '"1"')
            self.end_headers()
            self.wfile.write(truth[: 3 << 20])
            assert counted.wait(HANG_S)
            self.wfile.write(truth[3 << 20 :])

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        transport = ObstoreTransport(f"http://127.0.0.1:{server.server_port}")
        found = []
        reading = threading.Thread(target=lambda: found.append(one(transport, "a.bin", 0, len(truth))))
        reading.start()
        deadline = time.monotonic() + HANG_S
        while transport.counters.bytes_read < 1 << 20 and time.monotonic() < deadline:
            time.sleep(0.01)
        arrived = transport.counters
        counted.set()
        reading.join(HANG_S)
        server.shutdown()
    assert 1 << 20 <= arrived.bytes_read <= 3 << 20
    assert bytes(found[0]) == truth
    assert transport.counters.operations["get_ranges"] == 1
    assert transport.counters.bytes_read == len(truth)


@pytest.mark.parametrize("new", [b"x" * 256, b"x" * 300])
def test_an_object_that_is_replaced_is_an_error_never_a_mixture(s3_bucket, new):
    transport, other = open_s3(s3_bucket), open_s3(s3_bucket)
    other.put("a/b.bin", bytes(range(256)))
    assert bytes(one(transport, "a/b.bin", 0, 4)) == bytes(range(4))
    other.put("a/b.bin", new)
    for read in (
        lambda: one(transport, "a/b.bin", 4, 8),
        lambda: transport.at("a").readinto("b.bin", starts=[0], buffers=[memoryview(bytearray(4))]),
    ):
        with pytest.raises(
            TransportError, match=r"a/b\.bin: the object was replaced while it was being read"
        ) as caught:
            read()
        assert not caught.value.transient
    assert transport.read("a/b.bin") == new  # a whole object is no mixture
    transport.close()
    assert bytes(one(transport, "a/b.bin", 4, 8)) == b"xxxx"
    transport.put("a/b.bin", b"our own bytes")
    assert bytes(one(transport, "a/b.bin", 0, 3)) == b"our"


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_the_placeholder_of_a_folder_is_no_file_in_it(s3_bucket, engine):
    """Consoles and other tools make an empty object for a folder."""
    import s3fs

    files = s3fs.S3FileSystem(**s3_bucket.options)
    for key in ("store/", "store/a.bin", "store/below/", "store/below/b.bin"):
        files.call_s3("put_object", Bucket=s3_bucket.url.removeprefix("s3://"), Key=key, Body=b"x" * key.endswith("n"))
    transport = open_transport(s3_bucket.url, s3_bucket.options, engine=engine)
    for listed in (transport.list("store"), transport.at("store").list()):
        assert [(entry.name, entry.is_dir, entry.size) for entry in listed] == [
            ("a.bin", False, 1),
            ("below", True, None),
        ]


def test_documents_that_are_too_long_do_not_travel(s3_bucket):
    transport = open_s3(s3_bucket)
    transport.put("a.bin", bytes(1 << 20))
    before = transport.counters.bytes_read
    with pytest.raises(TransportError, match="at most 10 bytes"):
        transport.read("a.bin", max_bytes=10)
    assert transport.counters.bytes_read == before


# Writing


def uploads(bucket):
    import s3fs

    files = s3fs.S3FileSystem(**bucket.options)
    return files.call_s3("list_multipart_uploads", Bucket=bucket.url.removeprefix("s3://")).get("Uploads") or []


def test_parts_leave_while_the_next_are_written(s3_bucket):
    transport, truth = open_s3(s3_bucket), np.random.default_rng(0).bytes(21 << 20)
    sink = transport.open_sink("big.bin", used_nbytes=len(truth), file_nbytes=len(truth) + 1000)
    for start in range(0, len(truth), 3 << 20):
        sink.write(start, [memoryview(truth)[start : start + (3 << 20)]])
    assert len(uploads(s3_bucket)) == 1
    with pytest.raises(TransportError, match="sent already"):
        sink.write(5, [memoryview(b"1")])
    with pytest.raises(TransportError, match="sent already"):  # its first bytes; the last ones are not
        sink.write((8 << 20) - 5, [memoryview(bytes(len(truth) - (8 << 20) + 5))])
    with pytest.raises(NotFoundError):
        transport.size("big.bin")
    sink.commit()
    assert transport.read("big.bin") == truth + bytes(1000)
    assert uploads(s3_bucket) == []
    assert transport.counters.bytes_written == len(truth) + 1000


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (2, 1, 0, 3), (3, 0, 2, 1)])
def test_whole_parts_may_come_in_any_order(s3_bucket, order):
    """Each is given back once, and only the next one is sent from where it lies."""
    n = part_bytes(0)
    transport, truth = open_s3(s3_bucket), np.random.default_rng(0).bytes(3 * n + 1000)
    sink = transport.open_sink("big.bin", used_nbytes=len(truth), file_nbytes=len(truth))
    given_back = []
    for part in order:
        buffer = memoryview(truth)[part * n : (part + 1) * n]
        sink.write(part * n, [buffer], lambda part=part: given_back.append(part))
    sink.commit()
    assert transport.read("big.bin") == truth
    assert sorted(given_back) == [0, 1, 2, 3]


@pytest.mark.parametrize(("most", "n_parts"), [(9_000, 3), (2, 2)])
def test_a_long_file_has_longer_parts_rather_than_more_than_a_service_takes(s3_bucket, monkeypatch, most, n_parts):
    monkeypatch.setattr("saev_store.transport.obstore._sink._MOST_PARTS", most)
    transport = open_s3(s3_bucket)
    sink = transport.open_sink("big.bin", used_nbytes=20 << 20, file_nbytes=20 << 20)
    sink.write(0, [memoryview(bytes(20 << 20))])
    sink.commit()
    assert transport.size("big.bin") == 20 << 20
    assert transport.counters.operations["sink.write"] == n_parts


@pytest.mark.parametrize("nbytes", [0, 1, 9000 * (8 << 20), 9000 * (8 << 20) + 1, 9000 * (9 << 20) - 1, 48 << 40])
def test_no_length_takes_more_parts_than_allowed(nbytes):
    assert -(-nbytes // part_bytes(nbytes)) <= 9000
    assert part_bytes(nbytes) >= 8 << 20


@pytest.mark.parametrize("step", [8 << 20, 3 << 20, 20 << 20])
def test_memory_may_be_used_again_when_a_write_returns(s3_bucket, step):
    transport, truth = open_s3(s3_bucket), np.random.default_rng(0).bytes(21 << 20)
    sink = transport.open_sink("big.bin", used_nbytes=len(truth), file_nbytes=len(truth))
    memory = bytearray(step)
    for start in range(0, len(truth), step):
        part = truth[start : start + step]
        memory[: len(part)] = part
        sink.write(start, [memoryview(memory)[: len(part)]])
        memory[:] = b"x" * step
    sink.commit()
    assert transport.read("big.bin") == truth


@pytest.mark.parametrize("how", ["abort", "forget"])
def test_an_upload_that_is_given_up_leaves_nothing(s3_bucket, how):
    transport = open_s3(s3_bucket)
    sink = transport.open_sink("big.bin", used_nbytes=30 << 20, file_nbytes=30 << 20)
    sink.write(0, [memoryview(bytes(18 << 20))])
    assert len(uploads(s3_bucket)) == 1
    if how == "abort":
        sink.abort()
        sink.abort()
        with pytest.raises(TransportError, match="aborted"):
            sink.write(18 << 20, [memoryview(b"1")])
    del sink
    gc.collect()
    deadline = time.monotonic() + HANG_S  # who forgets a sink does not wait for what becomes of it
    while how == "forget" and uploads(s3_bucket) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert uploads(s3_bucket) == []
    with pytest.raises(NotFoundError):
        transport.size("big.bin")


def test_what_is_far_ahead_of_a_gap_is_refused(s3_bucket, monkeypatch):
    monkeypatch.setattr("saev_store.transport.obstore._sink._AHEAD_BYTES", 1000)
    sink = open_s3(s3_bucket).open_sink("a.bin", used_nbytes=5000, file_nbytes=5000)
    sink.write(900, [memoryview(bytes(500))])
    with pytest.raises(ArgumentError, match="ahead of byte 0, which is still missing"):
        sink.write(2000, [memoryview(b"1")])


@pytest.mark.parametrize("nbytes", [0, 10, 17 << 20])
def test_an_upload_that_arrives_with_another_length_is_an_error(s3_bucket, monkeypatch, nbytes):
    async def head(*_: object) -> dict[str, int]:
        return {"size": 256}

    sink = open_s3(s3_bucket).open_sink("a.bin", used_nbytes=nbytes, file_nbytes=nbytes)
    sink.write(0, [memoryview(bytes(nbytes))])
    monkeypatch.setattr(obstore, "head_async", head)
    with pytest.raises(TransportError, match=f"256 bytes arrived of {nbytes:,}"):
        sink.commit()


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_more_bytes_may_take_more_time(s3_bucket, monkeypatch, engine):
    """A second for each MiB, so that a slow line ends nothing that still comes in."""
    limits_s: list[float] = []

    def limited(work, loop, *, limit_s):
        limits_s.append(limit_s)
        return run_in_loop(work, loop, limit_s=limit_s)

    monkeypatch.setattr(f"saev_store.transport.{engine}._client.run_in_loop", limited)
    transport, memory = open_transport(s3_bucket.url, s3_bucket.options, engine=engine), bytearray(3 << 20)
    for call in (
        lambda: transport.put("a.bin", memory),
        lambda: transport.get_ranges("a.bin", starts=[0, 2 << 20], ends=[2 << 20, 3 << 20]),
        lambda: transport.readinto("a.bin", starts=[0], buffers=[memoryview(memory)]),
        lambda: transport.create("b.bin", memory),
    ):
        limits_s.clear()
        call()
        assert max(limits_s) == 60 + 3
    limits_s.clear()
    assert transport.size("a.bin") == 3 << 20
    assert limits_s == [60]


@pytest.mark.parametrize("moment", ["waiting", "submitting", "before it began"])
def test_ctrl_c_cancels_what_is_waited_for(monkeypatch, moment):
    """A request that went on could change the object after another writer has."""
    loop, began, cancelled = asyncio.new_event_loop(), threading.Event(), threading.Event()
    thread, submit = threading.Thread(target=loop.run_forever), loop.call_soon_threadsafe
    main = threading.main_thread().ident

    async def work():
        began.set()
        if moment == "waiting":
            await asyncio.sleep(0.05)  # until the other thread waits
            signal.pthread_kill(main, signal.SIGINT)
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def interrupted(*args):
        """Ctrl-C behind the line that hands the work to the loop."""
        monkeypatch.undo()
        if moment == "before it began":
            submit(released.wait)
        submit(*args)
        assert moment == "before it began" or began.wait(HANG_S)
        raise KeyboardInterrupt

    released = threading.Event()
    if moment != "waiting":
        monkeypatch.setattr(loop, "call_soon_threadsafe", interrupted)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            run_in_loop(work, loop, limit_s=1000)
        released.set()
        if moment == "before it began":
            later = threading.Event()
            for _ in range(3):  # steps of the loop
                later.clear()
                loop.call_soon_threadsafe(later.set)
                assert later.wait(HANG_S)
            assert not began.is_set()
        else:
            assert cancelled.wait(HANG_S)
    finally:
        released.set()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(HANG_S)
        loop.close()


def test_what_fails_while_nobody_wants_it_is_not_reported(caplog: pytest.LogCaptureFixture):
    """asyncio logs errors of tasks that nobody looks at."""
    loop, stop = asyncio.new_event_loop(), Flag()
    thread = threading.Thread(target=loop.run_forever)
    ended = threading.Event()

    async def work() -> None:
        try:
            stop.set()
            await asyncio.sleep(1000)
        finally:
            ended.set()
            raise ConnectionResetError("closed")  # as clients do while they clean up

    token = STOP.set(stop)
    thread.start()
    try:
        with pytest.raises(TransportError):
            run_in_loop(work, loop, limit_s=1000)
        assert ended.wait(HANG_S)
    finally:
        STOP.reset(token)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(HANG_S)
        gc.collect()
        loop.close()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("moment", ["before", "while waiting", "never"])
def test_a_request_that_is_not_wanted_any_more_is_cancelled(moment):
    loop, stop, cancelled, n_begun = asyncio.new_event_loop(), Flag(), threading.Event(), 0
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def work() -> str:
        nonlocal n_begun
        n_begun += 1
        if moment == "while waiting":
            stop.set()
        try:
            await asyncio.sleep(0 if moment == "never" else 1000)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return "done"

    def read() -> str:
        STOP.set(stop)
        if moment == "before":
            stop.set()
        return run_in_loop(work, loop, limit_s=1000)

    try:
        if moment == "never":
            assert copy_context().run(read) == "done"
        else:
            with pytest.raises(TransportError, match="not wanted any more") as caught:
                copy_context().run(read)
            assert not caught.value.transient
            assert n_begun == (moment == "while waiting")
            if moment != "before":
                assert cancelled.wait(HANG_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(HANG_S)
        loop.close()


@pytest.mark.parametrize(("for_s", "n_most"), [(0.01, 1), (0.1, 2), (1.0, 8), (15.0, 20)])
def test_tries_end_after_their_time(clock, for_s, n_most):
    """The last failure is the one that is told; waits grow; what does not pass is not tried again."""
    n_left, n_tries = 1000, 0

    async def work() -> str:
        nonlocal n_tries
        n_tries += 1
        if n_tries <= n_left:
            raise TimeoutError(f"try {n_tries}")
        return "done"

    with pytest.raises(TimeoutError) as caught:
        asyncio.run(again(work, lambda _: True, for_s=for_s))
    assert str(caught.value) == f"try {n_tries}"
    assert len(clock.waits_s) == n_tries - 1
    assert 1 <= n_tries <= n_most
    assert for_s - 3.2 < sum(clock.waits_s) <= for_s
    for number, wait_s in enumerate(clock.waits_s):
        most_s = min(0.1 * 2**number, 3.0)
        assert most_s / 2 <= wait_s <= most_s
    n_left, n_tries = n_tries - 1, 0
    assert asyncio.run(again(work, lambda _: True, for_s=1000.0)) == "done"
    n_tries = 0
    with pytest.raises(TimeoutError, match="try 1"):
        n_left = 5
        asyncio.run(again(work, lambda _: False, for_s=1000.0))


def test_time_is_counted_from_the_first_failure(clock):
    """A range that broke off after a long time is requested again."""
    n_tries = 0

    async def work() -> str:
        nonlocal n_tries
        n_tries += 1
        if n_tries == 1:
            clock.waits_s.append(100.0)
            raise TimeoutError
        return "done"

    assert asyncio.run(again(work, lambda _: True, for_s=1.0)) == "done"


@pytest.mark.parametrize("request_of", ["range", "size"])  # a size is requested when a shard is first read
@pytest.mark.parametrize(
    ("n_busy", "text"),
    [
        (9, "503 Slow Down"),
        (1, "404 Gone"),
        (1, "error sending request"),
        (1, "Generic S3 error: Requested 2..8, got 9..15"),
    ],
)
def test_what_is_read_is_requested_again_from_a_service_that_is_busy(
    s3_bucket, monkeypatch, clock, request_of, n_busy, text
):
    transport, n_tries = open_s3(s3_bucket), 0
    transport.put("a.bin", b"0123456789")
    name = "get_async" if request_of == "range" else "head_async"
    answer = getattr(obstore, name)

    async def busy(*arguments: object, **options: object) -> object:
        nonlocal n_tries
        n_tries += 1
        if n_tries <= n_busy:
            status = f"Server returned non-2xx status code: {text}" if text[0].isdigit() else text
            raise obstore.exceptions.GenericError(status)
        return await answer(*arguments, **options)

    def read() -> object:
        return transport.size("a.bin") if request_of == "size" else bytes(one(transport, "a.bin", 2, 8))

    monkeypatch.setattr(obstore, name, busy)
    if "404" in text or "got" in text:
        with pytest.raises(NotFoundError if "404" in text else TransportError):
            read()
        assert n_tries == 1
    else:
        assert read() == (10 if request_of == "size" else b"234567")
        assert n_tries == n_busy + 1


@pytest.mark.parametrize(("status", "is_repeated"), [(409, True), (500, False)])
def test_a_creation_is_tried_again_while_the_service_has_not_decided(
    s3_bucket, monkeypatch, clock, status, is_repeated
):
    tries = []

    async def busy(*_: object, **__: object) -> None:
        tries.append(1)
        raise obstore.exceptions.GenericError(f"Server returned non-2xx status code: {status} Conflict")

    monkeypatch.setattr(obstore, "put_async", busy)
    with pytest.raises(TransportError) as caught:
        open_s3(s3_bucket).create("a.json", b"{}")
    assert caught.value.transient
    assert len(tries) == len(clock.waits_s) + 1
    assert (len(tries) > 3) == is_repeated
    assert sum(clock.waits_s) <= 1.5


# Errors


def test_errors_become_ours_and_tell_no_secrets(s3_bucket):
    transport = open_s3(s3_bucket, key="AKIDTESTKEY", secret="very-secret-key")
    with pytest.raises(NotFoundError, match="nothing.bin") as gone:
        transport.read("nothing.bin")
    with pytest.raises(NotFoundError):
        open_transport(f"{s3_bucket.url}-not-there/x", s3_bucket.options, engine="obstore").list()
    down = ObstoreTransport("s3://b", {**s3_bucket.options, "endpoint_url": "http://127.0.0.1:9"}, timeout_s=0.5)
    with pytest.raises(TransportError) as refused:
        down.read("x")
    assert refused.value.transient
    for caught in (gone, refused):
        shown = "".join(traceback.format_exception(caught.value)) + repr(transport) + transport.url
        assert "very-secret-key" not in shown
        assert "AKIDTESTKEY" not in shown


@pytest.mark.parametrize(
    ("text", "kind", "transient"),
    [
        ("Server returned non-2xx status code: 403 Forbidden: <Error><Code>AccessDenied</Code>", AccessError, None),
        ("Server returned non-2xx status code: 400 Bad: <Error><Code>ExpiredToken</Code>", AccessError, None),
        ("Server returned non-2xx status code: 403 Bad: <Error><Code>RequestTimeTooSkewed</Code>", AccessError, None),
        ("Server returned non-2xx status code: 503 Slow Down: <Error><Code>SlowDown</Code>", TransportError, True),
        ("Server returned non-2xx status code: 429 Too Many Requests: ", TransportError, True),
        ("Server returned non-2xx status code: 409 Conflict: ", TransportError, True),
        ("Server returned non-2xx status code: 301 Moved: ", TransportError, False),
        ("HTTP error: error sending request: operation timed out", DeadlineError, True),
        # Its word for the limit of retries is no time-out.
        (
            "Generic HTTP error: Error performing HEAD http://h/a in 1.7s, after 6 retries, max_retries: 6, retry_timeout: 60s  - Server returned non-2xx status code: 503 Slow: ",
            TransportError,
            True,
        ),
        ("HTTP error: request or response body error", TransportError, True),
        ("Server returned non-2xx status code: 401 Unauthorized: ", AccessError, None),
        ("Server returned non-2xx status code: 404 Not Found: ", NotFoundError, None),
        ("Server returned non-2xx status code: 408 Slow: ", TransportError, True),
        ("Server returned non-2xx status code: 500 Internal: ", TransportError, True),
        ("Server returned non-2xx status code: 499 Odd: ", TransportError, False),
        ("Server returned non-2xx status code: 501 Not Implemented: ", TransportError, False),
        ("Server returned non-2xx status code: 505 Other Version: ", TransportError, False),
        ("Server returned non-2xx status code: 412 Precondition Failed: ", TransportError, False),
        ("Server returned non-2xx status code: 400 Bad: <Error><Code>InvalidAccessKeyId</Code>", AccessError, None),
        ("Server returned non-2xx status code: 400 Bad: <Error><Code>InvalidToken</Code>", AccessError, None),
        ("Server returned non-2xx status code: 400 Bad: <Error><Code>SignatureDoesNotMatch</Code>", AccessError, None),
        ("Server returned non-2xx status code: 400 Bad: <Error><Code>TokenRefreshRequired</Code>", AccessError, None),
        ("Server returned non-2xx status code: 400 Bad: <Error><Code>Other</Code>", TransportError, False),
    ],
)
def test_what_answers_mean(text, kind, transient):
    from obstore.exceptions import GenericError

    client = ObstoreTransport("s3://b", {**S3, "region": "r"}).client
    head = "Generic S3 error: Error performing GET https://h/b/k?X-Amz-Signature=abcdef in 3ms - "
    error = client.translate(
        GenericError(head + text + "<StringToSign>hush-hush</StringToSign>"), doing="read", where="w"
    )
    assert type(error) is kind
    assert getattr(error, "transient", None) == transient
    assert "hush" not in str(error)
    assert "abcdef" not in str(error)


@pytest.mark.parametrize(
    ("answer", "is_of_region"),
    [
        *((f"Server returned non-2xx status code: {status} Moved: ", True) for status in (301, 307, 308, 400)),
        *((f"Server returned non-2xx status code: {status} No: ", False) for status in (302, 405, 500)),
        ("Received redirect without LOCATION, this normally indicates an incorrectly configured region", True),
        ("HTTP error: request or response body error", False),
    ],
)
def test_which_answers_are_of_another_region(answer, is_of_region):
    from obstore.exceptions import GenericError

    for url, options in (("s3://b", {**S3, "region": "r"}), ("gs://b", {"skip_signature": True})):
        error = ObstoreTransport(url, options).client.translate(GenericError(answer), doing="read", where="w")
        assert isinstance(error, TransportError)
        assert ("region" in (error.remedy or "")) == (is_of_region and url == "s3://b")
        assert not (is_of_region and error.transient)


@pytest.mark.parametrize(
    "given", [{"headers": {"X-Asked": "by me"}}, {"client_kwargs": {"headers": {"X-Asked": "by me"}}}]
)
def test_headers_of_the_options_are_sent(given):
    seen = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append(self.headers["X-Asked"])
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        assert ObstoreTransport(f"http://127.0.0.1:{server.server_port}", given).read("a.json") == b"{}"
        server.shutdown()
    assert seen == ["by me"]


def test_the_region_is_requested_where_no_option_names_it():
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(403)
            self.send_header("x-amz-bucket-region", "eu-north-1")
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        assert bucket_region("b", endpoint=f"http://127.0.0.1:{server.server_port}") == "eu-north-1"
        server.shutdown()
    assert bucket_region("b", endpoint="http://127.0.0.1:9") is None


# Other processes


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_other_processes_get_the_right_bytes(s3_bucket, method, engine):
    transport = open_transport(s3_bucket.url, s3_bucket.options, engine=engine)
    transport.put("a.bin", b"0123456789")
    assert read_part(transport) == b"34560"
    assert in_process(method, transport) == b"34560"
    assert read_part(transport) == b"34560"
    assert read_part(pickle.loads(pickle.dumps(transport))) == b"34560"


def test_a_forked_child_refuses_an_object_that_was_replaced(s3_bucket):
    """The version that the parent has read is the one that its child reads, through another client."""
    transport = open_s3(s3_bucket)
    transport.put("a.bin", b"0123456789")
    assert read_part(transport) == b"34560"
    open_s3(s3_bucket).put("a.bin", b"abcdefghij")
    error = in_process("fork", transport)
    assert isinstance(error, TransportError)
    assert "replaced while it was being read" in str(error)


def test_a_forked_child_without_fsspec_is_told_so_at_once(s3_bucket, monkeypatch):
    transport = open_s3(s3_bucket)
    transport.put("a.bin", b"0123456789")

    def missing(*args, **kwargs):
        raise ImportError("Install s3fs")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    error = in_process("fork", transport)
    assert isinstance(error, ForkError)
    assert "spawn" in str(error)


def test_a_forked_child_writes_nothing(s3_bucket):
    """fsspec only reads there: one client writes to an address."""
    transport = open_s3(s3_bucket)
    transport.put("a.bin", b"0123456789")
    for write in (_put, _create, _delete, _open_sink):
        error = in_process("fork", transport, write)
        assert isinstance(error, ForkError), write
        assert "spawn" in str(error)
    assert [entry.path for entry in transport.list()] == ["a.bin"]
    assert transport.read("a.bin") == b"0123456789"


def _put(transport):
    transport.put("a.bin", b"changed")


def _create(transport):
    transport.create("b.bin", b"new")


def _delete(transport):
    transport.delete("a.bin")


def _open_sink(transport):
    transport.open_sink("c.bin", used_nbytes=3, file_nbytes=3)


def test_what_fsspec_would_read_from_another_server(monkeypatch):
    options = {"key": "k", "secret": "s", "unsigned_payload": True}
    assert only_obstore_understands(place_of("s3://b", options), options) == ["unsigned_payload"]
    monkeypatch.setenv("AWS_ENDPOINT", "https://minio:9000")
    assert only_obstore_understands(place_of("s3://b", {}), {}) == ["AWS_ENDPOINT"]
    named = {"endpoint_url": "https://minio:9000"}
    assert only_obstore_understands(place_of("s3://b", named), named) == []


def test_an_address_of_ipv6_is_no_chain_of_addresses():
    place = place_of("http://[::1]:9000/x", {})
    assert (place.kind, place.bucket, place.prefix) == ("http", "http://[::1]:9000", "x")
    with pytest.raises(ArgumentError):
        place_of("simplecache::http://[::1]:9000/x", {})


def test_fsspec_takes_over_only_with_options_that_it_understands(gcs_xml_bucket):
    """gcsfs would take `bearer_token` without a word, and look for credentials elsewhere."""
    transport = ObstoreTransport(gcs_xml_bucket.url, gcs_xml_bucket.options)
    transport.put("a.bin", b"0123456789")
    error = in_process("fork", transport)
    assert isinstance(error, ForkError)
    assert "base_url, bearer_token" in str(error)


def test_a_pickle_holds_no_credentials(s3_bucket):
    transport = open_s3(s3_bucket, "/x", secret="very-secret-key")
    transport.put("a.bin", b"0123456789")
    data = pickle.dumps(transport.at("y"))
    assert b"very-secret-key" not in data
    assert b"AKIDTESTKEY" not in data
    assert pickle.loads(data).url == s3_bucket.url + "/x/y"
    # The same bytes in a process that was never told: a named error.
    script = (
        "import pickle, sys\nfrom saev_store.errors import AccessError\n"
        "transport = pickle.loads(pickle.dumps(pickle.load(sys.stdin.buffer)))\n"
        "try:\n    transport.read('a.bin')\nexcept AccessError as error:\n    print(error)"
    )
    told = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True, timeout=HANG_S, check=True)
    assert b"credentials do not travel in a pickle" in told.stdout


def test_works_where_a_loop_is_running(s3_bucket):
    transport = open_s3(s3_bucket)
    transport.put("a.bin", b"0123456789")

    async def in_a_notebook():
        return read_part(transport)

    assert asyncio.run(in_a_notebook()) == b"34560"


# Chosen by itself


@pytest.mark.parametrize(
    ("url", "options", "environment", "name"),
    [
        ("s3://b/x", S3, {}, "obstore:s3"),
        ("s3://b/x", {"anon": True}, {}, "obstore:s3"),
        ("s3://b/x", {}, {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}, "obstore:s3"),
        ("s3://b/x", {}, {}, "fsspec:s3"),  # a profile, a role: s3fs finds more
        ("s3://b/x", {}, {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_PROFILE": "p"}, "fsspec:s3"),
        ("s3://b/x", {**S3, "s3_additional_kwargs": {}}, {}, "fsspec:s3"),
        ("simplecache::s3://b/x", {"s3": S3}, {}, "fsspec:simplecache::s3"),
        ("gs://b/x", {"token": "anon"}, {}, "obstore:gs"),
        ("gs://b/x", {"token": "anon"}, {"STORAGE_EMULATOR_HOST": "http://127.0.0.1:9"}, "fsspec:gs"),
        ("gcs://b/x", {"token": "anon"}, {"STORAGE_EMULATOR_HOST": "http://127.0.0.1:9"}, "fsspec:gcs"),
        ("gs://b/x", {"token": "anon", "endpoint_url": "http://127.0.0.1:9"}, {}, "fsspec:gs"),
        ("http://127.0.0.1:9/x", {}, {}, "fsspec:http"),  # obstore cannot list what web servers show
        ("az://b/x", {"account_name": "a", "account_key": "a2V5"}, {}, "obstore:az"),
        ("abfs://b/x", {"account_name": "a", "anon": True}, {}, "obstore:az"),
    ],
)
def test_auto_takes_obstore_where_it_can_do_everything(url, options, environment, name, monkeypatch):
    for variable in [variable for variable in os.environ if variable.startswith(("AWS_", "GOOGLE_", "STORAGE_"))]:
        monkeypatch.delenv(variable)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    if name in {"fsspec:gs", "fsspec:gcs"}:
        pytest.importorskip("gcsfs")
    assert open_transport(url, options).name == name


def test_auto_takes_obstore_where_fsspec_has_no_client(monkeypatch):
    for variable in [variable for variable in os.environ if variable.startswith("AWS_")]:
        monkeypatch.delenv(variable)
    found = "saev_store.transport.open.find_spec"
    monkeypatch.setattr(found, lambda name: None if name == "s3fs" else object())
    assert open_transport("s3://b/x").name == "obstore:s3"


def test_without_obstore_its_engine_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'saev_store\[obstore\]'") as refused:
        open_transport("s3://b/x", S3, engine="obstore")
    assert refused.value.where == "s3://b/x"


# Reading into memory


@pytest.mark.parametrize("ends_by", ["time-out", "Ctrl-C"])
def test_nothing_is_written_to_memory_after_readinto_has_returned(s3_bucket, monkeypatch, ends_by):
    import obstore

    open_s3(s3_bucket).put("a.bin", b"x" * 100)
    transport = open_s3(s3_bucket)
    began, may_go_on, get = threading.Event(), threading.Event(), obstore.get_async

    async def late(*args, **kwargs):
        began.set()
        await asyncio.get_running_loop().run_in_executor(None, may_go_on.wait, HANG_S)
        return await get(*args, **kwargs)

    monkeypatch.setattr(obstore, "get_async", late)
    memory = bytearray(50)
    buffers = [memoryview(memory)[:30], memoryview(memory)[30:]]
    if ends_by == "time-out":
        transport.client.timeout_s = 0.2
        with pytest.raises(DeadlineError) as caught:
            transport.readinto("a.bin", starts=[0, 70], buffers=buffers)
        assert caught.value.transient
    else:

        def interrupt(work, loop, *, limit_s):
            asyncio.run_coroutine_threadsafe(work(), loop)
            assert began.wait(HANG_S)
            raise KeyboardInterrupt

        with monkeypatch.context() as changed, pytest.raises(KeyboardInterrupt):
            changed.setattr("saev_store.transport.obstore._client.run_in_loop", interrupt)
            transport.readinto("a.bin", starts=[0, 70], buffers=buffers)
    monkeypatch.setattr(obstore, "get_async", get)
    transport.client.timeout_s = HANG_S
    may_go_on.set()
    # What is asked later does not wait for what was given up, and comes after it.
    transport.readinto("a.bin", starts=[0], buffers=[memoryview(memory)[:10]])
    assert memory == b"x" * 10 + bytes(40)


def test_ranges_of_readinto_are_pieces_of_one_object(s3_bucket, monkeypatch):
    monkeypatch.setattr("saev_store.transport.obstore._transport.PIECE_BYTES", 1000)
    transport, truth = open_s3(s3_bucket), np.random.default_rng(0).bytes(10_500)
    transport.put("a.bin", truth)
    memory = bytearray(2600)
    buffers = [memoryview(memory)[:2500], memoryview(memory)[2500:2500], memoryview(memory)[2500:]]
    transport.readinto("a.bin", starts=[17, 3, 10_400], buffers=buffers)
    assert memory == truth[17:2517] + truth[10_400:]
    assert transport.counters.operations["get_ranges"] == 4
    with pytest.raises(CorruptShardError, match="10,500 bytes but byte 10,501 is needed"):
        transport.readinto("a.bin", starts=[0, 10_401], buffers=buffers[::2])
    with pytest.raises(ArgumentError, match="2 starts but 1 buffers"):
        transport.readinto("a.bin", starts=[0, 1], buffers=buffers[:1])
