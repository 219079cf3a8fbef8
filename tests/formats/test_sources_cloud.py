"""The formats in buckets, on every server that can be had here, through both clients: written, found, read, traced."""

from __future__ import annotations

import numpy as np
import pytest
from cloud_servers import gcs_json_bucket, gcs_xml_bucket, swift_bucket  # noqa: F401 (fixtures)
from energon_tars import sample_files, tar_bytes
from servers import s3_bucket  # noqa: F401 (a fixture)

from saev_store.errors import NotFoundError, StoreExistsError
from saev_store.sources import open_source, reopen
from saev_store.sources.convert import documents_to_batches
from saev_store.sources.energon import EnergonDataset
from saev_store.sources.energon.prepare import prepare
from saev_store.sources.llmbatch import BatchFileReader, BatchNativeLoader, record_order, write_batch_dataset
from saev_store.sources.mmididx import IndexedDataset, IndexedDatasetBuilder, TokenSamples
from saev_store.transport import open_transport

pytest.importorskip("obstore")

PLACES = {
    "moto-obstore": ("s3_bucket", "obstore"),
    "moto-fsspec": ("s3_bucket", "fsspec"),
    "swift-obstore": ("swift_bucket", "obstore"),
    "gcs-fsspec": ("gcs_json_bucket", "fsspec"),
}


@pytest.fixture(params=PLACES)
def place(request):
    """(url, storage_options, engine) of an empty folder in a bucket."""
    fixture, engine = PLACES[request.param]
    bucket = request.getfixturevalue(fixture)
    return f"{bucket.url}/lab/data", bucket.options, engine


def test_token_formats(place):
    url, options, engine = place
    documents = [np.arange(size) + size for size in (5, 0, 300, 1, 40)]
    there = open_transport(url, options, engine=engine)
    with IndexedDatasetBuilder("d", np.uint16, transport=there) as builder:
        for document in documents:
            builder.add_document(document)
    with pytest.raises(StoreExistsError):
        IndexedDatasetBuilder(f"{url}/d", np.uint16, storage_options=options)
    source = open_source("d", transport=there)
    assert isinstance(source, IndexedDataset)
    assert [tokens.tolist() for tokens in source.rows([2, 4, 1])] == [documents[i].tolist() for i in (2, 4, 1)]
    assert source.get(2, 100, 3).tolist() == [400, 401, 402]
    samples = TokenSamples(source, 20, num_samples=30)
    assert np.array_equal(samples.rows([3])[0], samples[3])
    n = documents_to_batches(
        source,
        f"{url}/b.batch",
        seq_len=10,
        batch_size=3,
        storage_options=options,
    )
    batches = open_source("b.batch", transport=there)
    assert isinstance(batches, BatchFileReader)
    run = np.concatenate(documents)
    for at, number in zip((0, 7), record_order(batches.total_records, 0).at(np.array([0, 7])), strict=True):
        assert batches[at].tolist() == run[number * 10 : number * 10 + 10].tolist()
    assert len(list(BatchNativeLoader(batches, output="numpy"))) == n == 11
    assert len(reopen(batches.describe(digest="full"), options)) == 33
    write_batch_dataset("s.batch", iter(np.eye(4, dtype=np.uint8)), 4, 2, 4, transport=there)
    assert BatchFileReader("s.batch", transport=there).read_batch(1).shape == (2, 4)


def test_energon(place):
    url, options, engine = place
    transport = open_transport(url, options, engine=engine)
    for shard in range(5):
        transport.put(f"shards/{shard}.tar", tar_bytes(sample_files(10 * shard, 3, folder="ü/")))
    with pytest.raises(NotFoundError):
        open_source(f"{url}/shards/none", options)
    made = prepare("", transport=transport, split="3,1,1", progress=False)
    assert (len(made), {name: len(found) for name, found in made.documents.splits.items()}) == (
        15, {"train": 3, "val": 1, "test": 1},
    )  # fmt: skip
    dataset = EnergonDataset("", transport=transport)
    assert dataset.part("ü/s00041", "txt") == b"text 41\n"
    val = dataset.split("val")
    assert [sample.key for batch in val.batches(2) for sample in batch] == [f"ü/s0003{i}" for i in range(3)]
    assert dataset.validate(deep=True, progress=False).ok
    again = reopen(val.describe(), options)
    assert again[1].parts == val[1].parts
