"""Copies between buckets: made by the service itself where it can, slower than a limit where one is set."""

from __future__ import annotations

import re
import uuid

import pytest
from cloud_servers import Proxy, gcs_json_bucket, swift_bucket  # noqa: F401 (two are fixtures)
from kill_harness_oracle import case
from servers import s3_bucket  # noqa: F401 (a fixture)

from saev_store import ShardStore
from saev_store.errors import ArgumentError, CorruptShardError
from saev_store.transport import open_transport
from saev_store.writer import create_store
from saev_store.writer.copying import _limit as limit_module
from saev_store.writer.copying import copy_store

pytest.importorskip("obstore")
PLACES = {
    "moto-obstore": ("s3_bucket", "obstore"),
    "moto-fsspec": ("s3_bucket", "fsspec"),
    "swift-obstore": ("swift_bucket", "obstore"),
    "gcs-fsspec": ("gcs_json_bucket", "fsspec"),
}


class Place:
    def __init__(self, bucket, engine, proxy) -> None:
        self.url, self.proxy, self.engine = bucket.url, proxy, engine
        # Profiles are what obstore does not read: with one named, the package chooses fsspec by itself.
        self.options = {**bucket.options, "endpoint_url": proxy.url}
        if engine == "fsspec" and self.url.startswith("s3"):
            self.options["default_block_size"] = 5 << 20
        self.copied: list[str] = []
        proxy.change = self.remember

    def remember(self, path, names):
        if "x-amz-copy-source" in names or "/rewriteTo/" in path:
            self.copied.append(path)
        return path

    def moved(self):
        """The requests for shards since the last call: (methods of those for the source, of those for the copy)."""
        shards = [
            (method, path)
            for method, path, *_ in self.proxy.log
            if re.search(r"acts\d+\.bin", path) and not (method == "PUT" and path in self.copied)
        ]
        self.proxy.log.clear()
        return (
            {method for method, path in shards if "/from" in path or "%2Ffrom" in path} - {"HEAD"},
            {method for method, path in shards if "/to" in path or "%2Fto" in path} - {"HEAD"},
        )


@pytest.fixture(params=PLACES)
def place(request, monkeypatch):
    fixture, engine = PLACES[request.param]
    bucket = request.getfixturevalue(fixture)
    if engine == "fsspec":
        monkeypatch.setattr("saev_store.transport.open._obstore_fits", lambda *_: False)
    with Proxy(bucket.options["endpoint_url"]) as proxy:
        yield Place(bucket, engine, proxy)


def written(place, folder="from", **options):
    this = case(n=9, per_shard=4, d_model=50, pad=False, **options)
    transport = open_transport(f"{place.url}/{folder}", place.options)
    with create_store(transport, this.metadata, block_bytes=1024, on_nonfinite="allow") as writer:
        this.append(writer, 0, 9)
    return this


def content(transport):
    return {entry.path: transport.read(entry.path) for entry in transport.list() if not entry.is_dir}


@pytest.mark.parametrize("protocol", ["2.0", "3.0"])
def test_the_service_copies_by_itself(place, protocol):
    this = written(place, protocol=protocol)
    place.moved()
    url = copy_store(
        f"{place.url}/from/{this.name}",
        f"{place.url}/to",
        storage_options=place.options,
        dst_storage_options=place.options,
    )
    of_source, of_copy = place.moved()
    assert len(place.copied) >= 3
    if place.url.startswith("s3"):
        assert (of_source, of_copy) == (set(), {"GET"})  # only to compare the copy with the digests
    found = content(open_transport(url, place.options))
    assert found == content(open_transport(f"{place.url}/from", place.options).at(this.name))
    assert ShardStore.open(url, place.options).validate(deep=True).ok


def test_padding_that_another_tool_has_uploaded_is_not_copied_by_the_service(place):
    """The service would copy it; where the copy lies, nothing is padded."""
    this = written(place)
    url = f"{place.url}/from/{this.name}"
    source, layout = open_transport(url, place.options), this.metadata.layout
    last = f"acts{layout.n_shards - 1:06}.bin"
    used = source.read(last)
    source.put(last, used + bytes(layout.shard_nbytes - len(used)))
    copied = copy_store(url, f"{place.url}/to", storage_options=place.options, dst_storage_options=place.options)
    assert open_transport(copied, place.options).read(last) == used
    assert ShardStore.open(copied, place.options).validate(deep=True).ok


def test_a_source_without_digests_is_read_to_compare(place):
    this = written(place)
    source = open_transport(f"{place.url}/from/{this.name}", place.options)
    source.delete("digests.json")
    url = copy_store(
        f"{place.url}/from/{this.name}",
        f"{place.url}/to",
        storage_options=place.options,
        dst_storage_options=place.options,
    )
    assert len(place.copied) >= 3
    assert "digests.json" in content(open_transport(url, place.options))
    assert ShardStore.open(url, place.options).validate(deep=True).ok


def test_a_damaged_source_is_named(place):
    this = written(place)
    source = open_transport(f"{place.url}/from/{this.name}", place.options)
    damaged = bytearray(source.read("acts000001.bin"))
    damaged[1500] ^= 1
    source.put("acts000001.bin", bytes(damaged))
    with pytest.raises(CorruptShardError, match="block 1 of the source"):
        copy_store(
            f"{place.url}/from/{this.name}",
            f"{place.url}/to",
            storage_options=place.options,
            dst_storage_options=place.options,
        )


def test_other_credentials_copy_through_this_machine(s3_bucket):
    with Proxy(s3_bucket.options["endpoint_url"]) as proxy:
        place = Place(s3_bucket, "obstore", proxy)
        this = written(place)
        place.moved()
        url = copy_store(
            f"{place.url}/from/{this.name}",
            f"{place.url}/to",
            storage_options=place.options,
            dst_storage_options={**place.options, "key": "SOMEBODYELSE"},
        )
        assert place.moved() == ({"GET"}, {"PUT", "GET"})
        assert place.copied == []
        assert ShardStore.open(url, place.options).validate(deep=True).ok


def test_from_one_bucket_to_another(place):
    if "gs://" in place.url:
        pytest.skip("one bucket is enough there")
    import s3fs

    name = f"other-{uuid.uuid4().hex[:12]}"
    s3fs.S3FileSystem(**place.options).mkdir(name)
    this = written(place, protocol="3.0")
    url = copy_store(
        f"{place.url}/from/{this.name}",
        f"s3://{name}/to",
        storage_options=place.options,
        dst_storage_options=place.options,
    )
    if place.engine == "fsspec":  # obstore copies within one bucket only: elsewhere this machine does
        assert len(place.copied) >= 3
    assert ShardStore.open(url, place.options).validate(deep=True).ok


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only by sleeping."""

    class Clock:
        now = 0.0

        def monotonic(self):
            return self.now

        def sleep(self, seconds):
            self.now += seconds

    found = Clock()
    monkeypatch.setattr(limit_module, "time", found)
    return found


def test_a_copy_keeps_to_its_limit(s3_bucket, clock, tmp_path):
    place = type("Here", (), {"url": s3_bucket.url, "options": s3_bucket.options})
    this = written(place)
    url = copy_store(
        f"{place.url}/from/{this.name}", tmp_path, storage_options=place.options, max_mb_per_s=0.001, progress=False
    )
    # Each byte is read, written and read back.
    assert clock.now >= 3 * this.acts.nbytes / 1000 * 0.9
    before = clock.now
    assert ShardStore.open(url).validate(deep=True).ok
    assert clock.now == before


@pytest.mark.parametrize("limits", [{"max_mb_per_s": 0}, {"max_mb_per_s": -1}, {"max_requests_per_s": 0}])
def test_a_limit_that_is_none_is_refused(tmp_path, limits):
    with pytest.raises(ArgumentError, match="more than 0"):
        copy_store(tmp_path / "x", tmp_path / "y", **limits)
