"""What methods of a store are given reaches the functions that do their work, under the same names."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from api import MemoryTransport
from dense_stores import plain_store

from saev_store import ShardStore, new_metadata
from saev_store.core.layout import Layout

LAYOUT = Layout(3, (2, 5), 4, True, 8, 3)
OPTIONS = {"anon": True}
METADATA = {
    "family": "f", "ckpt": "c", "layers": [3], "content_tokens_per_example": 4, "cls_token": False, "d_model": 8,
    "n_examples": 2,
}  # fmt: skip
#: Method, library that it needs, module and name of the function behind it, and what is given, no value a default.
CALLS = [
    ("as_zarr", "zarr", "saev_store.zarr", "open_view", {"chunks": (1, 1, 5, 8), "dtype": "float16"}),
    ("as_xarray", "xarray", "saev_store.xarray", "open_store", {"chunks": {"example": 2}}),
    ("as_dask", "dask", "saev_store.dask", "from_store", {"chunks": (2, 1, -1, -1)}),
    ("to_virtual_dataset", "zarr", "saev_store.export", "to_virtual_dataset", {"chunks": (1, 1, 5, 8), "base": "b"}),
    (
        "stats", "numpy", "saev_store.stats", "store_stats",
        {"sample": 2, "seed": 3, "client": "tcp://a", "refresh": True, "save": False, "progress": False},
    ),
    ("source", "numpy", "saev_store.sources.provenance", "source_of", {"url": "s3://b", "outside_ok": True}),
    (
        "view", "uvicorn", "saev_store.view", "View",
        {"other": "o", "source": "s", "tokenizer": str, "height_px": 1},
    ),
    (
        "validate", "numpy", "saev_store.validation", "validate", {"deep": True, "client": "tcp://a", "progress": False},
    ),
    ("repair", "numpy", "saev_store.writer", "open_repair", {"on_nonfinite": "allow"}),
]  # fmt: skip
#: What is given by position, of methods that take something so.
FIRST = {"source": (OPTIONS,)}


class Asked:
    """Notes what it is called with."""

    lost = ()

    def __call__(self, *arguments, **options):
        self.arguments, self.options = arguments, options
        return self


@pytest.fixture
def store(tmp_path: Path) -> ShardStore:
    return ShardStore.open(plain_store(LAYOUT).write(tmp_path))


@pytest.mark.parametrize(("method", "library", "module", "name", "given"), CALLS, ids=[call[0] for call in CALLS])
def test_what_a_method_is_given_is_handed_on(method, library, module, name, given, store, monkeypatch):
    pytest.importorskip(library)
    asked = Asked()
    monkeypatch.setattr(importlib.import_module(module), name, asked)
    first = FIRST.get(method, ())
    assert getattr(store, method)(*first, **given) is asked
    about = {"validate": store.transport, "repair": store.transport, "source": store.metadata}.get(method, store)
    # What is validated is what is there now, so another transport of the same folder looks at it.
    assert asked.arguments[0] is about or (method, asked.arguments[0].url) == ("validate", about.url)
    assert asked.arguments[-len(first) :] == first or not first
    assert {name: value for name, value in asked.options.items() if name in given} == given


def test_all_arguments_of_a_new_store_are_handed_on(monkeypatch):
    asked, root, addresses = Asked(), MemoryTransport(), []
    monkeypatch.setattr("saev_store.writer.create_store", asked)
    monkeypatch.setattr("saev_store.store.store.open_transport", lambda *given: addresses.append(given) or root)
    metadata = new_metadata(**METADATA)
    given = {
        "resume": True, "exist_ok": True, "part": (1, 2), "pad": True, "on_nonfinite": "allow",
        "on_overflow": "saturate", "progress": False,
    }  # fmt: skip
    assert ShardStore.create("s3://b/root", metadata, storage_options=OPTIONS, **given) is asked
    assert addresses == [("s3://b/root", OPTIONS)]
    assert (asked.arguments, asked.options) == ((root, metadata), given)


def test_lists_and_publishes_with_the_options_of_the_address(monkeypatch):
    addresses = []

    def open_transport(*given):
        addresses.append(given)
        return MemoryTransport()

    monkeypatch.setattr("saev_store.store.store.open_transport", open_transport)
    assert list(ShardStore.list("s3://b/root", OPTIONS)) == []
    published = Asked()
    monkeypatch.setattr("saev_store.writer.finalize_store", published)
    monkeypatch.setattr(ShardStore, "open", lambda transport: transport.url)
    metadata = new_metadata(**METADATA)
    assert ShardStore.finalize("s3://b/root", metadata, storage_options=OPTIONS) == f"memory://{metadata.hash}"
    assert published.arguments[1] is metadata
    assert addresses == [("s3://b/root", OPTIONS)] * 2


def test_the_origin_of_a_vector_is_looked_for_in_one_source(store, monkeypatch):
    opened, asked = [], Asked()
    monkeypatch.setattr("saev_store.sources.provenance.source_of", lambda *_, **__: opened.append("source") or "source")
    monkeypatch.setattr("saev_store.sources.provenance.origin_of", asked)
    assert store.origin(2, 3, source="other", neighbours=5) is asked
    assert (asked.arguments, asked.options, opened) == ((store, "other", 2, 3), {"neighbours": 5}, [])
    for example_idx in (0, 1):
        store.origin(example_idx)
        assert (asked.arguments, asked.options) == ((store, "source", example_idx, None), {"neighbours": 8})
    assert opened == ["source"]  # once
