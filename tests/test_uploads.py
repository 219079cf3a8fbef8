"""Uploads that are interrupted: what has arrived is not sent again, and nothing is left over."""

from __future__ import annotations

import asyncio
import gc
import itertools
import re
import time
import traceback
import warnings
from contextlib import contextmanager
from dataclasses import replace

import fsspec.asyn
import numpy as np
import pytest
from ceph_server import ceph_bucket  # noqa: F401 (a fixture)
from cloud_servers import (
    Fault,
    Proxy,
    endpoint_option,
    gcs_json_bucket,  # noqa: F401 (a fixture)
    gcs_xml_bucket,  # noqa: F401 (a fixture)
    s3_options,
    swift_bucket,  # noqa: F401 (a fixture)
    unfinished_uploads,
)
from kill_harness_oracle import case
from servers import s3_bucket  # noqa: F401 (a fixture)
from waiting import HANG_S

from saev_store.errors import (
    ArgumentError,
    IncompleteStoreError,
    NotFoundError,
    SaevStoreError,
    SaevStoreWarning,
    TransportError,
)
from saev_store.transport import Borrows, CountingTransport, Uploads, _obstore_client, open_transport
from saev_store.transport._parts import Bookmark
from saev_store.writer import _shard_file, create_store, discard_unfinished

pytest.importorskip("obstore")

PART = 64 << 10
PLACES = {
    "moto-obstore": ("s3_bucket", "obstore"),
    "moto-fsspec": ("s3_bucket", "fsspec"),
    "swift-obstore": ("swift_bucket", "obstore"),
    "swift-fsspec": ("swift_bucket", "fsspec"),
    "ceph-obstore": ("ceph_bucket", "obstore"),
    "ceph-fsspec": ("ceph_bucket", "fsspec"),
    "gcs-obstore": ("gcs_xml_bucket", "obstore"),
    "gcs-fsspec": ("gcs_json_bucket", "fsspec"),
}
OPTIONS = {"block_bytes": 16 << 10, "on_nonfinite": "allow"}


class Place:
    """A bucket behind a proxy that counts."""

    def __init__(self, name, bucket, engine, proxy) -> None:
        self.name = name
        self.bucket, self.engine, self.proxy = bucket, engine, proxy
        self.options = {**bucket.options, endpoint_option(bucket): proxy.url}
        self.s3_options = s3_options(bucket)

    def open(self, path=""):
        return open_transport(self.bucket.url + path, self.options, engine=self.engine)

    def uploads(self):
        """What is unfinished in the whole bucket."""
        return unfinished_uploads(self.bucket)

    def parts_sent(self):
        """The numbers of the parts that were sent since the last call, in order."""
        found = [
            int(number)
            for method, path, *_ in self.proxy.log
            for number in re.findall(r"partNumber=(\d+)", path)
            if method == "PUT"
        ]
        self.proxy.log.clear()
        return sorted(found)


@pytest.fixture(params=PLACES)
def place(request, monkeypatch):
    monkeypatch.setattr("saev_store.transport._parts.PART_BYTES", PART)
    fixture, engine = PLACES[request.param]
    if request.param == "gcs-obstore":  # obstore alone does not tell what has arrived
        pytest.importorskip("gcsfs")
    bucket = request.getfixturevalue(fixture)
    with Proxy(bucket.options[endpoint_option(bucket)]) as proxy:
        yield Place(request.param, bucket, engine, proxy)


@pytest.fixture
def on_s3(place):
    """A place that speaks of multipart uploads, as Google's XML interface does, too."""
    if place.s3_options is None:
        pytest.skip("parts are objects there")
    return place


def content(place, this):
    folder = place.open("/shards").at(this.name)
    return {entry.path: folder.read(entry.path) for entry in folder.list()}


def big_case(**options):
    """Two shards of five parts and a bit each."""
    return case(n=40, per_shard=20, d_model=700, block_bytes=16 << 10, pad=False, **options)


def interrupt(place, this, n, **options):
    with pytest.raises(KeyError), create_store(place.open("/shards"), this.metadata, **OPTIONS, **options) as writer:
        for start in range(writer.next_example, n, 3):
            writer.append(*this.rows(start, min(start + 3, n)))
        raise KeyError


@pytest.mark.parametrize("labelled", [True, False])
def test_a_writer_goes_on_within_a_shard(place, labelled):
    this = big_case(labelled=labelled)
    interrupt(place, this, 15)
    assert len(place.uploads()) >= 1
    first = place.parts_sent()
    with create_store(place.open("/shards"), this.metadata, resume=True, **OPTIONS) as writer:
        assert writer.next_example == 15
        writer.append(*this.rows(15, 20))
        writer.checkpoint()
        second = place.parts_sent()
        writer.append(*this.rows(20, 40))
    if place.s3_options is not None:
        assert first == [1, 2, 3]
        assert second == [4, 5, 6]
    this.check(content(place, this))
    assert place.uploads() == []


def test_a_writer_is_interrupted_often(place):
    this = big_case()
    for n in (1, 7, 19, 20, 39) if "swift" not in place.name else (8, 39):
        interrupt(place, this, n, resume="auto", checkpoint_bytes=100_000)
    with create_store(place.open("/shards"), this.metadata, resume=True, **OPTIONS) as writer:
        assert writer.next_example == 39
        writer.append(*this.rows(39, 40))
    this.check(content(place, this))
    assert place.uploads() == []


def test_what_is_discarded_leaves_no_upload(place):
    this = big_case()
    interrupt(place, this, 15)
    discard_unfinished(place.open("/shards"), this.metadata)
    assert place.uploads() == []
    interrupt(place, this, 16)
    with create_store(place.open("/shards"), this.metadata, resume=True, **OPTIONS) as writer:
        assert writer.next_example == 16
        writer.append(*this.rows(16, 40))
    this.check(content(place, this))


def started(place, truth, *, n_parts, promised):
    """An upload whose process was killed: `n_parts` have arrived, and `promised` of them before the last promise."""
    transport = place.open()
    sink = transport.open_upload("a.bin", used_nbytes=len(truth), file_nbytes=len(truth), block_bytes=PART)
    sink.write(0, [memoryview(truth)[: promised * PART]])
    assert sink.sync() == promised * PART
    bookmark = sink.bookmark()
    sink.write(promised * PART, [memoryview(truth)[promised * PART : n_parts * PART]])
    assert sink.sync() == n_parts * PART
    sink.abort()
    place.parts_sent()
    return bookmark


TRUTH = bytes(range(256)) * (6 * PART // 256) + b"the end"


def test_parts_that_arrived_after_the_last_promise_are_known_by_their_content(on_s3):
    bookmark = started(on_s3, TRUTH, n_parts=5, promised=2)
    changed = TRUTH[: 3 * PART] + b"X" + TRUTH[3 * PART + 1 :]
    sink = on_s3.open().open_upload(
        "a.bin", used_nbytes=len(TRUTH), file_nbytes=len(TRUTH), block_bytes=PART, bookmark=bookmark
    )
    assert sink.vouched_nbytes == 2 * PART
    with pytest.raises(ArgumentError):
        sink.keep(3 * PART)
    sink.keep(2 * PART)
    sink.write(2 * PART, [memoryview(changed)[2 * PART :]])
    sink.commit()
    assert on_s3.parts_sent() == [4, 6, 7]  # part 4 is another one; 6 and 7 had not arrived
    assert on_s3.open().read("a.bin") == changed
    assert on_s3.uploads() == []


def test_a_part_that_is_another_one_is_not_kept(on_s3):
    bookmark = started(on_s3, TRUTH, n_parts=3, promised=3)
    import s3fs

    (upload,) = on_s3.uploads()
    s3fs.S3FileSystem(**on_s3.s3_options).call_s3(
        "upload_part",
        Bucket=on_s3.bucket.url.partition("://")[2],
        Key="a.bin",
        UploadId=upload["UploadId"],
        PartNumber=2,
        Body=bytes(PART),
    )
    sink = on_s3.open().open_upload(
        "a.bin", used_nbytes=len(TRUTH), file_nbytes=len(TRUTH), block_bytes=PART, bookmark=bookmark
    )
    assert sink.vouched_nbytes == 0
    sink.write(0, [memoryview(TRUTH)])
    sink.commit()
    assert on_s3.parts_sent() == [2, 4, 5, 6, 7]
    assert on_s3.open().read("a.bin") == TRUTH


def test_killed_after_the_upload_was_completed(place):
    transport = place.open()
    sink = transport.open_upload("a.bin", used_nbytes=len(TRUTH), file_nbytes=len(TRUTH), block_bytes=PART)
    sink.write(0, [memoryview(TRUTH)])
    sink.sync()
    bookmark = sink.bookmark()
    sink.commit()
    place.parts_sent()
    again = place.open().open_upload(
        "a.bin", used_nbytes=len(TRUTH), file_nbytes=len(TRUTH), block_bytes=PART, bookmark=bookmark
    )
    assert again.vouched_nbytes == len(TRUTH)
    again.keep(len(TRUTH))
    again.commit()
    assert place.parts_sent() == []
    transport.put("a.bin", b"another one")
    other = place.open().open_upload(
        "a.bin", used_nbytes=len(TRUTH), file_nbytes=len(TRUTH), block_bytes=PART, bookmark=bookmark
    )
    assert other.vouched_nbytes == 0


def test_an_upload_that_somebody_gave_up_is_a_named_error(on_s3):
    transport = on_s3.open()
    sink = transport.open_upload("a.bin", used_nbytes=len(TRUTH), file_nbytes=len(TRUTH), block_bytes=PART)
    sink.write(0, [memoryview(TRUTH)[: 2 * PART]])
    sink.sync()
    assert on_s3.open().drop_uploads("") == 1
    if on_s3.name == "gcs-obstore":  # what Google answers; moto answers 500, which is tried again for half a minute
        on_s3.proxy.faults.append(Fault(path="uploadId=", status=404, code="NoSuchUpload", times=-1))
    with pytest.raises((TransportError, NotFoundError)):
        for start in range(2 * PART, len(TRUTH), PART):
            sink.write(start, [memoryview(TRUTH)[start : start + PART]])
        sink.commit()
    sink.abort()
    with pytest.raises(NotFoundError):
        on_s3.open().size("a.bin")


def test_only_uploads_below_a_folder_are_dropped(place):
    sinks = []
    for path in ("store/a.bin", "store/ab.bin", "store2/a.bin"):
        sink = place.open().open_upload(path, used_nbytes=len(TRUTH), file_nbytes=len(TRUTH), block_bytes=PART)
        sink.write(0, [memoryview(TRUTH)[: 2 * PART]])
        sink.sync()
        sinks.append(sink)
    assert place.open().drop_uploads("store/a.bin") == 1
    assert place.open().drop_uploads("store") == 1
    assert place.open("/store2").drop_uploads("") == 1
    assert place.uploads() == []
    for sink in sinks:
        sink.abort()


def test_wrapped_uploads_continue(place):
    transport = CountingTransport(place.open())
    assert isinstance(transport, Uploads)
    sink = transport.open_upload("a.bin", used_nbytes=len(TRUTH), file_nbytes=len(TRUTH), block_bytes=PART)
    sink.write(0, [memoryview(TRUTH)[: 3 * PART + 5]])
    assert (sink.sync(), sink.vouched_nbytes) == (3 * PART, 0)
    bookmark, tail = sink.bookmark(), sink.read_back(3 * PART, 3 * PART + 5)
    sink.abort()
    again = transport.open_upload(
        "a.bin", used_nbytes=len(TRUTH), file_nbytes=len(TRUTH), block_bytes=PART, bookmark=bookmark
    )
    again.keep(again.vouched_nbytes)
    again.write(3 * PART, [memoryview(tail), memoryview(TRUTH)[3 * PART + 5 :]])
    again.commit()
    assert transport.read("a.bin") == TRUTH


@pytest.mark.parametrize("text", ["", "{}", "[", "null", '{"upload": 1}', "[" * 100_000, '{"part_bytes": -1}'])
def test_a_bookmark_that_is_none_is_no_bookmark(text):
    assert Bookmark.parse(text) is None


def test_every_part_carries_a_checksum(on_s3):
    seen = []

    def remember(path, names):
        if "partNumber=" in path:
            seen.append(dict(names))
        return path

    on_s3.proxy.change = remember
    started(on_s3, TRUTH, n_parts=4, promised=1)
    assert len(seen) >= 4
    for names in seen:
        signed = re.fullmatch(r"[0-9a-f]{64}", names.get("x-amz-content-sha256", ""))
        sums = {"x-amz-trailer", "content-md5"} | {name for name in names if name.startswith("x-amz-checksum-")}
        assert signed or sums & set(names)


@pytest.mark.parametrize("fixture", ["s3_bucket", "gcs_xml_bucket"])
def test_without_a_listing_a_shard_starts_over(request, fixture, monkeypatch):
    """Only s3fs and gcsfs list what has arrived: without them, obstore's uploads are sent again from the start of the shard."""
    monkeypatch.setattr("saev_store.transport._parts.PART_BYTES", PART)
    monkeypatch.setattr("saev_store.transport._obstore_uploads.find_spec", lambda name: None)
    this, bucket = big_case(), request.getfixturevalue(fixture)
    transport = open_transport(bucket.url, bucket.options, engine="obstore")
    with pytest.raises(IncompleteStoreError), create_store(transport, this.metadata, **OPTIONS) as writer:
        writer.append(*this.rows(0, 35))
    with create_store(transport, this.metadata, resume=True, **OPTIONS) as writer:
        assert writer.next_example == 20
        writer.append(*this.rows(20, 40))
    folder = transport.at(this.name)
    this.check({entry.path: folder.read(entry.path) for entry in folder.list()})


def test_who_may_not_list_uploads_writes_all_the_same(on_s3):
    """Permissions to write and to list uploads are granted one by one."""
    on_s3.proxy.faults.append(Fault(method="GET", path=r"\?uploads", status=403, code="AccessDenied", times=-1))
    this = big_case()
    interrupt(on_s3, this, 15)
    assert on_s3.open().drop_uploads("") == 0
    with create_store(on_s3.open("/shards"), this.metadata, resume=True, **OPTIONS) as writer:
        # obstore does not tell the names of its uploads, and nobody else may.
        assert writer.next_example == (15 if on_s3.engine == "fsspec" or on_s3.name == "gcs-obstore" else 0)
        writer.append(*this.rows(writer.next_example, 40))
    this.check(content(on_s3, this))
    assert on_s3.uploads() == []


def test_a_part_that_fails_can_be_sent_by_the_next_process(on_s3):
    this = big_case()
    interrupt(on_s3, this, 8)
    on_s3.proxy.faults.append(Fault(method="PUT", path="partNumber=4", status=403, code="AccessDenied", times=-1))
    with (
        pytest.raises(SaevStoreError),
        create_store(on_s3.open("/shards"), this.metadata, resume=True, **OPTIONS) as writer,
    ):
        writer.append(*this.rows(8, 40))
    on_s3.proxy.faults.clear()
    with create_store(on_s3.open("/shards"), this.metadata, resume=True, **OPTIONS) as writer:
        assert writer.next_example >= 8
        writer.append(*this.rows(writer.next_example, 40))
    this.check(content(on_s3, this))
    assert on_s3.uploads() == []


def eventually(condition):
    """Views of memory are dropped a moment after the part has left."""
    for _ in range(1000):
        if condition():
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("place", ["moto-obstore"], indirect=True)
def test_lent_memory_is_given_back_when_it_has_left(place):
    transport, truth = place.open("/lent"), np.random.default_rng(5).bytes(7 * PART + 100)
    sink = transport.open_upload("acts.bin", used_nbytes=len(truth), file_nbytes=len(truth), block_bytes=1)
    assert isinstance(sink, Borrows)
    back = set()

    def lend(start, end):
        buffer = bytearray(truth[start:end])

        def done():
            buffer[:] = bytes(len(buffer))  # whoever gets memory back may change it
            back.add(start)

        sink.lend(start, memoryview(buffer), done)

    bounds = [0, PART, 2 * PART]
    bounds += [2 * PART + 10, 3 * PART]  # no part of its own: copied
    bounds += [4 * PART, 5 * PART + 1, 6 * PART, 7 * PART, len(truth)]
    for start, end in itertools.pairwise(bounds):
        if start == 6 * PART:  # ahead of a gap, which is filled afterwards
            continue
        lend(start, end)
    lend(6 * PART, 7 * PART)
    sink.commit()
    assert transport.read("acts.bin") == truth
    assert eventually(lambda: back == set(bounds[:-1]))
    assert place.parts_sent() == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("place", ["moto-obstore"], indirect=True)
def test_lent_memory_is_given_back_after_an_error(place):
    sink = place.open("/lent").open_upload("acts.bin", used_nbytes=40 * PART, file_nbytes=40 * PART, block_bytes=1)
    place.proxy.faults.append(Fault(method="PUT", status=403, code="AccessDenied", times=-1))
    lent, back = 0, []
    with pytest.raises(SaevStoreError):
        for number in range(40):
            lent += 1
            sink.lend(number * PART, memoryview(bytes(PART)), lambda number=number: back.append(number))
        sink.commit()
    del sink
    assert eventually(lambda: len(back) >= lent - 1)  # the last one may have met a closed sink


@contextmanager
def a_warning_at_most():
    """Where a shard may have to start over, which is told."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaevStoreWarning)
        yield


#: Servers that answer quickly are enough for what is about refusals and failures.
QUICK = pytest.mark.parametrize("place", ["moto-obstore", "moto-fsspec", "gcs-obstore"], indirect=True)
REFUSED = Fault(method="GET", path=r"\?uploads", status=403, code="AccessDenied")


@pytest.mark.parametrize(
    "fault",
    [
        Fault(method="PUT", path="partNumber=3", status=403, code="AccessDenied", times=-1),
        Fault(method="GET", path=r"\?uploads", status=400, code="Oops"),
        Fault(method="GET", path=r"\?uploads", status=403, code="ExpiredToken"),
        Fault(method="GET", path=r"\?uploads", status=501, times=-1),
    ],
    ids=["part", "bad", "denied", "always"],
)
@QUICK
def test_what_was_promised_stays_when_the_next_promise_fails(on_s3, fault):
    """Its receipt is written, and names that upload."""
    this = big_case()
    with (
        pytest.raises((SaevStoreError, KeyError)),
        create_store(on_s3.open("/shards"), this.metadata, **OPTIONS) as writer,
    ):
        writer.append(*this.rows(0, 10))
        writer.checkpoint()
        on_s3.proxy.faults.append(replace(fault))
        writer.append(*this.rows(10, 15))
        writer.checkpoint()
        raise KeyError
    on_s3.proxy.faults.clear()
    with create_store(on_s3.open("/shards"), this.metadata, resume=True, **OPTIONS) as writer:
        assert writer.next_example >= 10
        writer.append(*this.rows(writer.next_example, 40))
    this.check(content(on_s3, this))
    assert on_s3.uploads() == []


@QUICK
def test_an_old_writer_leaves_the_upload_to_the_one_that_went_on(on_s3):
    bookmark, truth = "", memoryview(TRUTH)
    options = {"used_nbytes": len(TRUTH), "file_nbytes": len(TRUTH), "block_bytes": PART}
    old = on_s3.open().open_upload("a.bin", **options)
    old.write(0, [truth[: 2 * PART]])
    old.sync()
    bookmark = old.bookmark()
    new = on_s3.open().open_upload("a.bin", bookmark=bookmark, **options)
    new.keep(new.vouched_nbytes)
    new.write(2 * PART, [truth[2 * PART : 4 * PART]])
    new.sync()
    on_s3.proxy.faults.append(replace(REFUSED))
    old.sync()
    old.abort()
    new.write(4 * PART, [truth[4 * PART :]])
    new.commit()
    assert on_s3.open().read("a.bin") == TRUTH


@pytest.mark.parametrize(("d_model", "block_bytes"), [(4096, 64 << 10), (1024, 16 << 10), (5 * 1024, 16 << 10)])
@pytest.mark.parametrize("place", ["moto-obstore", "gcs-obstore"], indirect=True)
def test_a_shard_that_was_completed_before_its_receipt(place, d_model, block_bytes, monkeypatch):
    """Its last promise could not be listed, so the receipt is an older one of the same upload: the shard starts over."""
    this = case(n=16, per_shard=8, cls=False, content=2, d_model=d_model, block_bytes=block_bytes, pad=False)
    options = {**OPTIONS, "block_bytes": block_bytes}
    plainly = _shard_file.write_receipt

    def killed(folder, shard_idx, receipt, *args, **kwargs):
        if receipt.complete:
            raise KeyError
        plainly(folder, shard_idx, receipt, *args, **kwargs)

    with (
        monkeypatch.context() as changed,
        pytest.raises(KeyError),
        create_store(place.open("/shards"), this.metadata, **options) as writer,
    ):
        writer.append(*this.rows(0, 3))
        writer.checkpoint()
        place.proxy.faults.append(replace(REFUSED, times=-1))
        changed.setattr(_shard_file, "write_receipt", killed)
        writer.append(*this.rows(3, 8))
        writer.checkpoint()
    place.proxy.faults.clear()
    with a_warning_at_most(), create_store(place.open("/shards"), this.metadata, resume=True, **options) as writer:
        writer.append(*this.rows(writer.next_example, 16))
    this.check(content(place, this))


@QUICK
def test_a_complete_object_is_not_replaced_by_a_part_of_it(on_s3):
    bookmark, options = "", {"used_nbytes": len(TRUTH), "file_nbytes": len(TRUTH), "block_bytes": PART}
    sink = on_s3.open().open_upload("a.bin", **options)
    sink.write(0, [memoryview(TRUTH)[: 2 * PART]])
    sink.sync()
    bookmark = sink.bookmark()
    sink.write(2 * PART, [memoryview(TRUTH)[2 * PART :]])
    sink.commit()
    again = on_s3.open().open_upload("a.bin", bookmark=bookmark, **options)
    with pytest.raises(ArgumentError, match="is complete"):
        again.keep(2 * PART)
    again.abort()
    assert on_s3.open().read("a.bin") == TRUTH


@QUICK
def test_one_refused_listing_is_not_remembered(on_s3):
    this = big_case()
    sink = on_s3.open(f"/shards/{this.name}").open_upload(
        "acts000000.bin", used_nbytes=len(TRUTH), file_nbytes=len(TRUTH), block_bytes=PART
    )
    sink.write(0, [memoryview(TRUTH)[: 2 * PART]])
    sink.sync()
    on_s3.proxy.faults.append(replace(REFUSED))
    with create_store(on_s3.open("/shards"), this.metadata, **OPTIONS) as writer:
        writer.append(*this.rows(0, 40))
    assert on_s3.uploads() == []
    sink.abort()


@pytest.mark.parametrize("nbytes", [len(TRUTH), 3 * PART])
@QUICK
def test_a_commit_is_tried_again_when_all_parts_have_left(on_s3, nbytes):
    if on_s3.engine == "obstore" and on_s3.name != "gcs-obstore":
        pytest.skip("obstore gives an upload up that failed; another sink begins anew")
    transport = on_s3.open()
    sink = transport.open_upload("a.bin", used_nbytes=nbytes, file_nbytes=nbytes, block_bytes=PART)
    sink.write(0, [memoryview(TRUTH)[:nbytes]])
    on_s3.proxy.faults.append(Fault(method="POST", path="uploadId=", status=400, times=1))
    with pytest.raises(TransportError):
        sink.commit()
    sink.commit()
    assert transport.read("a.bin") == TRUTH[:nbytes]


@pytest.mark.parametrize("n_zeros", [1, 5 * PART, 6 * PART - 7])
@QUICK
def test_zeros_at_the_end_are_sent_and_not_kept_in_memory(place, n_zeros):
    """Many of them are one object, which is nobody's buffer afterwards."""
    transport = place.open()
    for n in range(2):
        sink = transport.open_upload(
            f"{n}.bin", used_nbytes=len(TRUTH), file_nbytes=len(TRUTH) + n_zeros, block_bytes=PART
        )
        for start in range(0, len(TRUTH), PART):
            sink.write(start, [memoryview(TRUTH)[start : start + PART]])
        rest = sink._rest()
        assert len({id(part) for part in rest}) <= 3
        assert sum(map(len, rest)) == len(TRUTH) + n_zeros - sink._sent
        del rest
        sink.commit()
    assert transport.read("0.bin") == transport.read("1.bin") == TRUTH + bytes(n_zeros)


@QUICK
def test_a_forgotten_sink_holds_up_nobody(on_s3):
    """Its last reference may end in the thread that has to do what it would wait for."""
    transport = on_s3.open()
    sink = transport.open_upload("a.bin", used_nbytes=len(TRUTH), file_nbytes=len(TRUTH), block_bytes=PART)
    sink.write(0, [memoryview(TRUTH)[:PART]])
    on_s3.proxy.latency_s = 0.3
    sink.write(PART, [memoryview(TRUTH)[PART : 4 * PART]])
    kept = [sink]
    kept.append(kept)
    del sink, kept
    found = []

    async def collect():
        found.append(gc.collect())

    loops = [fsspec.asyn.get_loop()] if on_s3.engine == "fsspec" or on_s3.name == "gcs-obstore" else []
    loops += [_obstore_client._loop.loop] if on_s3.engine == "obstore" else []
    for loop in loops:
        asyncio.run_coroutine_threadsafe(collect(), loop).result(HANG_S)
    on_s3.proxy.latency_s = 0
    assert eventually(lambda: on_s3.uploads() == [])
    assert transport.list() == []


@pytest.mark.parametrize(
    "fault",
    [
        Fault(method="GET", path="uploadId=", status=403, code="AccessDenied", times=-1),
        Fault(method="DELETE", path="uploadId=", status=403, code="AccessDenied", times=-1),
    ],
    ids=["parts", "giving up"],
)
@QUICK
def test_who_may_not_list_parts_or_give_up_uploads_writes_all_the_same(on_s3, fault):
    this = big_case()
    on_s3.proxy.faults.append(fault)
    interrupt(on_s3, this, 15)
    on_s3.open("/shards").drop_uploads("another")
    with a_warning_at_most(), create_store(on_s3.open("/shards"), this.metadata, resume=True, **OPTIONS) as writer:
        writer.append(*this.rows(writer.next_example, 40))
    this.check(content(on_s3, this))


@QUICK
def test_a_lost_answer_to_the_beginning_of_an_upload(on_s3):
    """The client begins it once more, and two are listed."""
    this = big_case()
    on_s3.proxy.faults.append(Fault(method="POST", path=r"\?uploads", lose_answer=True))
    interrupt(on_s3, this, 15)
    with create_store(on_s3.open("/shards"), this.metadata, resume=True, **OPTIONS) as writer:
        assert writer.next_example == 15
        writer.append(*this.rows(15, 40))
    this.check(content(on_s3, this))
    assert on_s3.uploads() == []


@QUICK
def test_what_was_read_before_it_was_committed_is_read_anew_afterwards(on_s3):
    transport = on_s3.open()
    transport.put("a.bin", b"old" * 10)
    sink = transport.open_sink("a.bin", used_nbytes=len(TRUTH), file_nbytes=len(TRUTH), resume=True)
    sink.write(0, [memoryview(TRUTH)])
    assert bytes(transport.get_ranges("a.bin", starts=[0], ends=[3])[0]) == b"old"
    sink.commit()
    assert bytes(transport.get_ranges("a.bin", starts=[0], ends=[len(TRUTH)])[0]) == TRUTH


@QUICK
def test_errors_name_the_whole_address_and_no_secret(on_s3):
    sink = on_s3.open("/deep/er").open_upload(
        "sub/f.bin", used_nbytes=len(TRUTH), file_nbytes=len(TRUTH), block_bytes=PART
    )
    on_s3.proxy.faults += [Fault(method=m, status=400, code="Oops", echo=True, times=-1) for m in ("PUT", "POST")]
    with pytest.raises(SaevStoreError) as caught:
        sink.write(0, [memoryview(TRUTH)])
        sink.commit()
    shown = "".join(traceback.format_exception(caught.value))
    assert f"{on_s3.bucket.url}/deep/er/sub/f.bin" in shown
    assert not any(secret in shown for secret in ("very-secret", "testing", "lab-secret"))
