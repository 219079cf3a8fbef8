"""Stores in buckets, on every server that can be had here, through both clients."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest
from cloud_servers import PLACES, gcs_json_bucket, gcs_xml_bucket, swift_bucket  # noqa: F401 (fixtures)
from servers import s3_bucket  # noqa: F401 (a fixture)
from waiting import HANG_S

from saev_store import ShardStore, new_metadata
from saev_store.errors import NotFoundError, SaevStoreError, StoreExistsError
from saev_store.testing.transport import FILES, WriteContract
from saev_store.transport import open_transport
from saev_store.writer import create_store

pytest.importorskip("obstore")


class Contract(WriteContract):
    resumes = False
    locks = False
    bucket = engine = ""

    @pytest.fixture
    def transport(self, request):
        bucket = request.getfixturevalue(self.bucket)
        transport = open_transport(bucket.url + "/lab/shards", bucket.options, engine=self.engine)
        for path, data in FILES.items():
            transport.put(path, data)
        return transport


class TestSwiftObstore(Contract):
    bucket, engine = PLACES["swift-obstore"]
    max_winners = 16  # Swift checks before it writes: not atomic, see docs/cloud.md


class TestSwiftFsspec(Contract):
    bucket, engine = PLACES["swift-fsspec"]
    max_winners = 16


class TestGcsObstore(Contract):
    bucket, engine = PLACES["gcs-obstore"]


class TestGcsFsspec(Contract):
    bucket, engine = PLACES["gcs-fsspec"]


@pytest.fixture(params=PLACES)
def place(request):
    """(url, storage_options, engine) of an empty folder in a bucket."""
    fixture, engine = PLACES[request.param]
    bucket = request.getfixturevalue(fixture)
    return bucket.url + "/lab/shards", bucket.options, engine


#: What is recorded for tokens in a store of protocol 3.0 here.
NEW = {"dtype": "bfloat16", "token_arrays": {"token_ids": "int32", "document_ids": "int64", "mask": "bool"}}


def small_metadata(**changes):
    fields = {
        "family": "clip",
        "ckpt": "ViT-B-32/openai",
        "layers": (3, 7),
        "content_tokens_per_example": 4,
        "cls_token": True,
        "d_model": 6,
        "n_examples": 23,
        "max_tokens_per_shard": 50,
        "data": {"__class__": "Fake"},
    }
    return new_metadata(**{**fields, **changes})


def truth_of(metadata):
    numbers = np.random.default_rng(5).standard_normal(metadata.layout.shape)
    return numbers.astype(ml_dtypes.bfloat16 if metadata.dtype == "bfloat16" else np.float32)


def arrays_of(metadata):
    """What is recorded for tokens: random bits of every dtype."""
    rng, shape = np.random.default_rng(6), (metadata.n_examples, metadata.content_tokens_per_example)
    return {array.name: rng.integers(0, 2, shape).astype(array.dtype) for array in metadata.token_arrays}


def append(writer, metadata, start, end):
    arrays = {name: values[start:end] for name, values in arrays_of(metadata).items()}
    writer.append(truth_of(metadata)[start:end], **arrays)


def holds_the_truth(store):
    return np.array_equal(store.read(dtype="stored"), truth_of(store.metadata)) and all(
        np.array_equal(store.token_arrays[name], values) for name, values in arrays_of(store.metadata).items()
    )


def write(place, metadata, **options):
    """Write the examples that `options["part"]` has to."""
    url, storage_options, engine = place
    with create_store(open_transport(url, storage_options, engine=engine), metadata, **options) as writer:
        start, end = writer.example_range
        append(writer, metadata, writer.next_example, end)
    return start, end


def reopen(place, metadata):
    url, storage_options, engine = place
    return ShardStore.open(f"{url}/{metadata.hash}", storage_options, engine=engine)


def test_a_store_in_a_bucket(place):
    metadata = small_metadata()
    write(place, metadata)
    truth, store = truth_of(metadata), reopen(place, metadata)
    assert store.transport.name.startswith(place[2])
    assert np.array_equal(store[...], truth)
    assert np.array_equal(store[[22, 0, 7], 1, 2:], truth[[22, 0, 7], 1, 2:])
    assert np.array_equal(store.sel(layer=7, tokens="content")[:], truth[:, 1, 1:].reshape(-1, 6))
    assert store.validate(deep=True).ok
    assert [entry.name for entry in open_list(place)] == [metadata.hash]
    with pytest.raises(StoreExistsError):
        write(place, metadata)


def test_large_documents_and_parts(place):
    """Of more than a megabyte, which aiohttp does not like to get raw."""
    url, storage_options, engine = place
    transport, data = open_transport(url, storage_options, engine=engine), bytes(range(256)) * 12_000
    transport.put("ä b/digests%20.json", data)
    assert transport.read("ä b/digests%20.json") == data
    sink = transport.open_sink("ä b/acts.bin", used_nbytes=len(data), file_nbytes=len(data))
    sink.write(0, [memoryview(data)])
    sink.commit()
    assert transport.read("ä b/acts.bin") == data


def open_list(place):
    from saev_store.store.listing import list_stores

    url, storage_options, engine = place
    return list_stores(open_transport(url, storage_options, engine=engine))


@pytest.mark.parametrize("kind", [{}, NEW], ids=["2.0", "3.0"])
def test_an_interrupted_writer_is_continued(place, kind):
    metadata, (url, storage_options, engine) = small_metadata(**kind), place
    with (
        pytest.raises(KeyError),
        create_store(open_transport(url, storage_options, engine=engine), metadata) as writer,
    ):
        append(writer, metadata, 0, 13)
        raise KeyError
    with pytest.raises(SaevStoreError):
        reopen(place, metadata)
    with create_store(open_transport(url, storage_options, engine=engine), metadata, resume=True) as writer:
        assert 0 <= writer.next_example <= 13
        append(writer, metadata, writer.next_example, metadata.n_examples)
    assert holds_the_truth(reopen(place, metadata))
    names = {entry.path for entry in open_transport(f"{url}/{metadata.hash}", storage_options, engine=engine).list()}
    assert ".saev_store" not in names


def test_zarr_over_a_bucket(place):
    metadata = small_metadata()
    write(place, metadata)
    import zarr

    view = reopen(place, metadata).as_zarr()
    array = zarr.open_group(view, mode="r", zarr_format=3)["activations"]
    assert np.array_equal(array[3:9], truth_of(metadata)[3:9])


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_publishers_that_race_have_one_winner(s3_bucket, engine):
    place, metadata = (s3_bucket.url + "/race", s3_bucket.options, engine), small_metadata(**NEW)
    for rank in range(2):
        write(place, metadata, part=(rank, 2))
    from saev_store.writer import finalize_store

    outcomes, start_together = [], threading.Barrier(4)

    def publish():
        transport = open_transport(place[0], place[1], engine=engine)
        start_together.wait()
        try:
            outcomes.append(finalize_store(transport, metadata))
        except SaevStoreError as error:
            outcomes.append(type(error).__name__)

    threads = [threading.Thread(target=publish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert outcomes.count(True) == 1
    assert set(outcomes) <= {True, False, "WriterConflictError"}
    assert holds_the_truth(reopen(place, metadata))


def test_a_server_that_checks_signatures_refuses_wrong_keys(swift_bucket):
    for engine in ("obstore", "fsspec"):
        options = {**swift_bucket.options, "secret": "not-the-secret"}
        with pytest.raises((SaevStoreError,)) as caught:
            open_transport(swift_bucket.url, options, engine=engine).read("x")
        assert not isinstance(caught.value, NotFoundError)
        assert caught.value.kind == "access"
        assert "not-the-secret" not in str(caught.value)
