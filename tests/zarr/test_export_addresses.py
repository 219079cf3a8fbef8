"""How an export names the folder of a store: for each kind of address, what other libraries are told. None of them is needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from dense_stores import plain_store

from saev_store import ShardStore
from saev_store.core.layout import Layout
from saev_store.errors import ArgumentError
from saev_store.export._references import references, usable_base
from saev_store.export.kerchunk import v2_documents
from saev_store.export.tensorstore import array_names, tensorstore_spec


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ShardStore:
    layout = Layout(7, (2, 5, 11), 4, True, 8, 3)
    return ShardStore.open(plain_store(layout, labelled=True, tail="cut").write(tmp_path_factory.mktemp("addresses")))


def kvstores(spec: dict) -> list[dict]:
    """The files of a spec, of each shard or token array."""
    parts = spec["layers"] if spec["driver"] == "stack" else [spec]
    return [layer["base"] for part in parts for layer in part["base"]["kvstore"]["layers"]]


@pytest.mark.parametrize(
    ("base", "named"),
    [
        ("/data/a b", {"driver": "file", "path": "/data/a b/"}),
        ("/data/a/", {"driver": "file", "path": "/data/a/"}),
        ("file:///data/a", {"driver": "file", "path": "/data/a/"}),
        ("local:///data/a", {"driver": "file", "path": "/data/a/"}),
        ("s3://lab/a/b", {"driver": "s3", "bucket": "lab", "path": "a/b/"}),
        ("s3://lab/a/b//", {"driver": "s3", "bucket": "lab", "path": "a/b/"}),
        ("s3a://lab/a", {"driver": "s3", "bucket": "lab", "path": "a/"}),
        ("s3://lab", {"driver": "s3", "bucket": "lab", "path": ""}),
        ("gs://lab/a", {"driver": "gcs", "bucket": "lab", "path": "a/"}),
        ("gcs://lab/a", {"driver": "gcs", "bucket": "lab", "path": "a/"}),
        ("http://host:8000/a", {"driver": "http", "base_url": "http://host:8000", "path": "a/"}),
        ("https://host/a/b", {"driver": "http", "base_url": "https://host", "path": "a/b/"}),
        ({"driver": "memory", "path": "x/", "more": 1}, {"driver": "memory", "more": 1, "path": "x/"}),
        ({"driver": "memory", "path": "x"}, {"driver": "memory", "path": "x/"}),
        ({"driver": "memory"}, {"driver": "memory", "path": ""}),
    ],
)
def test_addresses_as_tensorstore_names_them(store: ShardStore, base: object, named: dict) -> None:
    for array, files in (
        ("activations", ["acts000000.bin", "acts000001.bin", "acts000002.bin"]),
        ("labels", ["labels.bin"]),
    ):
        found = kvstores(tensorstore_spec(store, array, base=base))
        assert found == [{**named, "path": f"{named['path']}{name}"} for name in files]


@pytest.mark.parametrize("base", ["az://lab/a", "hdfs://host/a", "relative/a", {"path": "x"}, "{{u}}/a", "//"])
def test_addresses_that_tensorstore_does_not_have(store: ShardStore, base: object) -> None:
    with pytest.raises(ArgumentError) as caught:
        tensorstore_spec(store, base=base)
    assert caught.value.where == "base"


def test_arrays_of_a_spec(store: ShardStore) -> None:
    assert array_names(store) == ("activations", "layer", "token", "labels", "content_token")
    assert tensorstore_spec(store, "layer")["array"] == [2, 5, 11]
    assert tensorstore_spec(store, "token")["array"] == [-1, 0, 1, 2, 3]
    assert tensorstore_spec(store, "content_token")["array"] == [0, 1, 2, 3]
    with pytest.raises(ArgumentError, match="'mask' is not an array"):
        tensorstore_spec(store, "mask")
    spec = tensorstore_spec(store)
    before, tail = (part["base"] | {"transform": part.get("transform")} for part in spec["layers"])
    assert (before["metadata"]["shape"], tail["metadata"]["shape"]) == ([6, 3, 5, 8], [1, 3, 5, 8])
    assert (tail["transform"]["input_inclusive_min"], tail["transform"]["input_exclusive_max"]) == (
        [6, 0, 0, 0],
        [7, 3, 5, 8],
    )
    assert tail["transform"]["output"][0] == {"input_dimension": 0, "offset": -6}
    for part in (before, tail, tensorstore_spec(store, "labels")["base"]):
        assert (part["open"], part["assume_metadata"], part["fill_missing_data_reads"]) == (True, True, False)
    assert [layer["exact"] for layer in before["kvstore"]["layers"]] == ["c/0/0/0/0", "c/1/0/0/0"]
    assert [layer["strip_prefix"] for layer in before["kvstore"]["layers"]] == [9, 9]


@pytest.mark.parametrize(
    ("url", "base", "named"),
    [
        ("/data/a", None, "file:///data/a"), ("s3://lab/a", None, "s3://lab/a"), ("https://host/a", None, "https://host/a"),
        ("memory://lab/a", "s3://lab/a/", "s3://lab/a"), ("/data/a", "s3://lab/a///", "s3://lab/a"), ("/data/a", "", ""),
        ("/data/a", "../a", "../a"), ("memory://lab/a", None, None), ("simplecache::s3://lab/a", None, None),
        ("s3://lab/{{u}}", None, None), ("s3://lab/a", "s3://lab/{{u}}", None), ("s3://lab/a", "/", None),
    ],
)  # fmt: skip
def test_the_address_that_an_export_names(url: str, base: str | None, named: str | None) -> None:
    if named is None:
        with pytest.raises(ArgumentError) as caught:
            usable_base(SimpleNamespace(url=url), base)
        assert caught.value.where == "base"
    else:
        assert usable_base(SimpleNamespace(url=url), base) == named


@pytest.mark.parametrize("n_rows", [None, 1, 2, 3, 7])
def test_what_kerchunk_is_told_of_arrays(store: ShardStore, n_rows: int | None) -> None:
    """Labels have no fill value: xarray would take a label that equals it for NaN."""
    found = references(store, base="s3://lab/a", token_rows=None if n_rows is None else {"labels": n_rows})
    documents = v2_documents(found)
    acts, labels = documents["activations/.zarray"], documents["labels/.zarray"]
    assert (acts["shape"], acts["dtype"], acts["fill_value"]) == ([7, 3, 5, 8], "<f4", "NaN")
    assert (labels["shape"], labels["dtype"], labels["fill_value"]) == ([7, 4], "|u1", None)
    assert labels["chunks"] == [n_rows or 7, 4]
    assert documents["activations/.zattrs"] == {"_ARRAY_DIMENSIONS": ["example", "layer", "token", "d_model"]}
    assert documents["labels/.zattrs"] == {"_ARRAY_DIMENSIONS": ["example", "content_token"]}
    for name, n in (("layer", 3), ("token", 5), ("content_token", 4)):
        document = documents[f"{name}/.zarray"]
        assert (document["shape"], document["chunks"], document["dtype"], document["fill_value"]) == (
            [n],
            [n],
            "<i8",
            None,
        )
    (array,) = [one for one in found.arrays if one.name == "labels"]
    assert sorted(array.inline) == ([] if 7 % (n_rows or 7) == 0 else [7 // n_rows])


@pytest.mark.parametrize(("nbytes", "rows"), [(1, 1), (4, 1), (10, 2), (27, 6), (28, 7), (1 << 20, 7)])
def test_how_many_examples_of_labels_are_a_chunk(store: ShardStore, nbytes: int, rows: int, monkeypatch) -> None:
    """Of 4 bytes each, as many as fit, and at least one."""
    monkeypatch.setattr("saev_store.export._references._TOKEN_CHUNK_BYTES", nbytes)
    assert v2_documents(references(store, base="s3://lab/a"))["labels/.zarray"]["chunks"] == [rows, 4]
