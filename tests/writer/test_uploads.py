"""Uploads: an interrupted shard is aborted and sent again, whole shards are kept."""

from __future__ import annotations

import contextlib
import re
import time
import traceback

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

from saev_store.errors import NotFoundError, SaevStoreError, SaevStoreWarning, StoreExistsError, TransportError
from saev_store.transport import open_transport
from saev_store.writer import create_store, discard_unfinished

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
    monkeypatch.setattr("saev_store.transport.obstore.REQUEST_BYTES", PART)
    fixture, engine = PLACES[request.param]
    bucket = request.getfixturevalue(fixture)
    with Proxy(bucket.options[endpoint_option(bucket)]) as proxy:
        yield Place(request.param, bucket, engine, proxy)


@pytest.fixture
def on_s3(place):
    """A place with multipart uploads, which Google's XML interface has too."""
    if place.s3_options is None:
        pytest.skip("no multipart uploads there")
    return place


def content(place, this):
    folder = place.open("/shards").at(this.name)
    return {entry.path: folder.read(entry.path) for entry in folder.list()}


def big_case(**options):
    """Two shards of five parts and a bit each."""
    d_model = 1400 if options.get("protocol") == "3.0" else 700  # as many bytes
    return case(n=40, per_shard=20, d_model=d_model, block_bytes=16 << 10, pad=False, **options)


def interrupt(place, this, n, **options):
    with pytest.raises(KeyError), create_store(place.open("/shards"), this.metadata, **OPTIONS, **options) as writer:
        for start in range(writer.next_example, n, 3):
            this.append(writer, start, min(start + 3, n))
        raise KeyError


@pytest.mark.parametrize("kind", [{"labelled": True}, {"labelled": False}, {"protocol": "3.0"}], ids=str)
def test_an_interrupted_shard_is_sent_again_and_whole_ones_are_kept(place, kind):
    this = big_case(**kind)
    interrupt(place, this, 35)
    assert place.uploads() == []
    place.proxy.log.clear()
    with create_store(place.open("/shards"), this.metadata, resume=True, **OPTIONS) as writer:
        assert writer.next_example == 20
        this.append(writer, 20, 40)
    sent = [path for method, path, *_ in place.proxy.log if method in {"PUT", "POST"}]
    assert not any("acts000000.bin" in path and "receipts" not in path for path in sent)
    this.check(content(place, this))
    assert place.uploads() == []


def test_a_writer_is_interrupted_often(place):
    this = big_case(protocol="3.0")
    for n in (1, 7, 20, 39) if "swift" not in place.name else (8, 39):
        interrupt(place, this, n, resume="auto", checkpoint_bytes=100_000)
    with create_store(place.open("/shards"), this.metadata, resume=True, **OPTIONS) as writer:
        assert writer.next_example == 20
        this.append(writer, 20, 40)
    this.check(content(place, this))
    assert place.uploads() == []


def test_a_whole_shard_of_another_size_is_not_kept(place):
    this = big_case()
    interrupt(place, this, 35)
    folder = place.open("/shards").at(this.name)
    folder.put("acts000000.bin", folder.read("acts000000.bin")[:-1])
    with pytest.warns(SaevStoreWarning, match="not what was written"):
        writer = create_store(place.open("/shards"), this.metadata, resume=True, **OPTIONS)
    with writer:
        assert writer.next_example == 0
        this.append(writer, 0, 40)
    this.check(content(place, this))


def test_what_is_discarded_leaves_nothing(place):
    this = big_case()
    interrupt(place, this, 35)
    discard_unfinished(place.open("/shards"), this.metadata)
    assert place.uploads() == []
    with pytest.raises(NotFoundError):
        place.open("/shards").list()


TRUTH = bytes(range(256)) * (6 * PART // 256) + b"the end"


def sink_of(place, path="a.bin", *, resume=False, n_zeros=0, folder=""):
    return place.open(folder).open_sink(path, used_nbytes=len(TRUTH), file_nbytes=len(TRUTH) + n_zeros, resume=resume)


def test_a_sink_replaces_what_is_there_when_it_is_committed_and_only_if_asked(place):
    place.open().put("a.bin", b"old")
    with pytest.raises(StoreExistsError):
        sink_of(place)
    sink = sink_of(place, resume=True)
    sink.write(0, [memoryview(TRUTH)])
    assert sink.sync() == 0
    assert place.open().read("a.bin") == b"old"
    sink.commit()
    assert place.open().read("a.bin") == TRUTH


def test_every_part_carries_a_checksum(on_s3):
    if on_s3.name == "gcs-obstore":
        pytest.skip("obstore sends Google none: only TLS protects the bytes there")
    seen = []

    def remember(path, names):
        if "a.bin" in path:
            seen.append(dict(names))
        return path

    on_s3.proxy.change = remember
    sink = sink_of(on_s3)
    sink.write(0, [memoryview(TRUTH)])
    sink.commit()
    bodies = [names for names in seen if int(names.get("content-length", 0)) >= PART]
    assert bodies
    for names in bodies:
        signed = re.fullmatch(r"[0-9a-f]{64}", names.get("x-amz-content-sha256", ""))
        sums = {"x-amz-trailer", "content-md5"} | {name for name in names if name.startswith("x-amz-checksum-")}
        assert signed or sums & set(names)


@pytest.mark.parametrize("place", ["moto-obstore", "gcs-obstore"], indirect=True)
def test_a_part_that_fails_aborts_the_upload(place):
    this = big_case()
    place.proxy.faults.append(Fault(method="PUT", path="partNumber=4", status=403, code="AccessDenied", times=-1))
    with (
        pytest.raises(SaevStoreError),
        create_store(place.open("/shards"), this.metadata, resume="auto", **OPTIONS) as writer,
    ):
        this.append(writer, 0, 40)
    place.proxy.faults.clear()
    assert place.uploads() == []
    with create_store(place.open("/shards"), this.metadata, resume=True, **OPTIONS) as writer:
        assert writer.next_example == 0
        this.append(writer, 0, 40)
    this.check(content(place, this))


def eventually(condition):
    """Views of memory are released a moment after the part is sent."""
    for _ in range(1000):
        if condition():
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("place", ["moto-obstore"], indirect=True)
def test_memory_is_given_back_after_an_error(place):
    sink = place.open("/lent").open_sink("acts.bin", used_nbytes=40 * PART, file_nbytes=40 * PART)
    place.proxy.faults.append(Fault(method="PUT", status=403, code="AccessDenied", times=-1))
    lent, back = 0, []
    with pytest.raises(SaevStoreError):
        for number in range(40):
            lent += 1
            sink.write(number * PART, [memoryview(bytes(PART))], lambda number=number: back.append(number))
        sink.commit()
    del sink
    assert eventually(lambda: len(back) >= lent - 1)  # the last one may have met a closed sink


#: Servers that answer quickly are enough for what is about refusals and failures.
QUICK = pytest.mark.parametrize("place", ["moto-obstore", "moto-fsspec", "gcs-obstore"], indirect=True)


@pytest.mark.parametrize("n_zeros", [1, 5 * PART, 6 * PART - 7])
@QUICK
def test_zeros_at_the_end_are_sent(place, n_zeros):
    for n in range(2):  # the second one uses memory again
        sink = sink_of(place, f"{n}.bin", n_zeros=n_zeros)
        for start in range(0, len(TRUTH), PART):
            sink.write(start, [memoryview(TRUTH)[start : start + PART]])
        sink.commit()
    transport = place.open()
    assert transport.read("0.bin") == transport.read("1.bin") == TRUTH + bytes(n_zeros)


@QUICK
def test_a_lost_answer_to_the_beginning_of_an_upload(on_s3):
    """The client begins it once more, or says so: one upload stays for `clean`."""
    this = big_case()
    on_s3.proxy.faults.append(Fault(method="POST", path=r"\?uploads", lose_answer=True))
    with contextlib.suppress(TransportError), create_store(on_s3.open("/shards"), this.metadata, **OPTIONS) as writer:
        this.append(writer, 0, 40)
    with create_store(on_s3.open("/shards"), this.metadata, resume="auto", exist_ok=True, **OPTIONS) as writer:
        if not writer.complete:
            this.append(writer, writer.next_example, 40)
    this.check(content(on_s3, this))


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
    sink = sink_of(on_s3, "sub/f.bin", folder="/deep/er")
    on_s3.proxy.faults += [Fault(method=m, status=400, code="Oops", echo=True, times=-1) for m in ("PUT", "POST")]
    with pytest.raises(SaevStoreError) as caught:
        sink.write(0, [memoryview(TRUTH)])
        sink.commit()
    shown = "".join(traceback.format_exception(caught.value))
    assert f"{on_s3.bucket.url}/deep/er/sub/f.bin" in shown
    assert not any(secret in shown for secret in ("very-secret", "testing", "lab-secret"))


@pytest.mark.parametrize("place", ["moto-fsspec"], indirect=True)
def test_unfinished_uploads_are_listed_and_aborted(place):
    import s3fs

    files, bucket = s3fs.S3FileSystem(**place.s3_options), place.bucket.url.partition("://")[2]
    for key in ("store/a.bin", "store/deep/b.bin", "store2/a.bin"):
        files.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
    transport = place.open("/store")
    found = transport.list_uploads()
    assert [upload.path for upload in found] == ["a.bin", "deep/b.bin"]
    assert all(upload.begun_s > 0 for upload in found)  # moto calls them all as old as S3's manual
    assert [upload.path for upload in transport.list_uploads("deep")] == ["deep/b.bin"]
    for upload in found:
        transport.abort_upload(upload)
    transport.abort_upload(found[0])
    assert [upload["Key"] for upload in place.uploads()] == ["store2/a.bin"]
