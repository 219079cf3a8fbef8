"""Junk into every public call: one of our errors comes out, whatever the junk is, and its message can be printed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from api import MemoryTransport

from saev_store import SaevStoreError, ShardStore, new_metadata, pair
from saev_store.errors import ArgumentError
from saev_store.loaders import Loader, filtered, stage
from saev_store.record import Images, Texts
from saev_store.sources import MapStyle, open_source, reopen
from saev_store.sources.caches import import_cache
from saev_store.sources.energon.prepare import prepare
from saev_store.sources.mmididx import IndexedDataset, IndexedDatasetBuilder
from saev_store.writer import clean, copy_store, create_store

SAMPLE = Path(__file__).parents[1] / "data/saev/v2_1_head_labels_cls/store/saev/shards/941cc259"
METADATA: dict[str, object] = {
    "family": "clip", "ckpt": "x", "layers": [2, 5], "content_tokens_per_example": 4, "cls_token": True, "d_model": 8,
    "n_examples": 7, "max_tokens_per_shard": 30,
}  # fmt: skip
MODEL = {"family": "clip", "ckpt": "x", "layers": [2]}
JUNK: dict[str, object] = {
    "None": None, "True": True, "minus one": -1, "nil": 0, "one": 1, "long": 2**70, "endless": 10**5000, "fraction": 1.5,
    "nan": float("nan"), "word": "x", "no word": "", "bytes": b"x", "list": [], "list of None": [None], "list of words": ["a"],
    "ragged": [[1], [2, 3]], "dict": {}, "odd dict": {1: 2}, "tuple": (), "object": object(), "floats": np.array([1.5]),
    "words": np.array(["a"]), "slice": slice(None), "square": [[1, 2], [3, 4]], "date": np.datetime64("2020"), "call": print,
    "surrogate": "\ud800", "ellipsis": ..., "range": range(3), "set": {1, 2}, "0-d array": np.array(7), "2-d array": np.array([[7]]),
    "two numbers": np.array([1, 2]),
}  # fmt: skip

JUNK["list of itself"] = LOOP = []
LOOP.append(LOOP)


def write_early(max_reorder_bytes: object) -> None:
    """An example that waits for an earlier one, with a limit of memory for it."""
    with create_store(MemoryTransport(), new_metadata(**METADATA)) as writer:
        writer.max_reorder_bytes = max_reorder_bytes
        writer.write(3, np.zeros((2, 5, 8), np.float32))


def append_mask(root: Path, mask: object) -> None:
    with ShardStore.create(root, {**METADATA, "token_arrays": {"mask": "bool"}}, resume=True) as writer:
        writer.append(np.zeros((1, 2, 5, 8), np.float32), mask=mask)


def loaded(loader: Loader, **changed: object) -> None:
    loader.load_state_dict({**loader.state_dict(), **changed})


def calls(root: Path) -> dict[str, Callable[[object], object]]:
    store = ShardStore.open(SAMPLE)
    rows = store.sel()

    def append(acts: object, labels: object = None) -> None:
        with ShardStore.create(root, METADATA, resume=True) as writer:
            writer.append(acts, labels=labels)

    found: dict[str, Callable[[object], object]] = {
        "open": ShardStore.open,
        "storage_options": lambda junk: ShardStore.open(SAMPLE, junk),
        "engine": lambda junk: ShardStore.open(SAMPLE, engine=junk),
        "list": ShardStore.list,
        "concat": ShardStore.concat,
        "loader rows": Loader,
        "repair report": lambda junk: None if junk is None else store.repair(junk),
        "copy layers": lambda junk: copy_store(SAMPLE, root / "copy", layers=junk, progress=False),
        "index": lambda junk: store[junk],
        "second index": lambda junk: store[0, junk],
        "two indices": lambda junk: store[0, 0, junk, junk],
        "out": lambda junk: store.read(0, out=junk),
        "layer": lambda junk: store.sel(layer=junk),
        "layer of a pair": lambda junk: pair(store, store).sel(layer_a=2, layer_b=junk),
        "tokens": lambda junk: store.sel(tokens=junk),
        "examples": lambda junk: store.sel(examples=junk),
        "ignore_labels": lambda junk: store.sel(ignore_labels=junk),
        "where": lambda junk: store.sel(where=junk),
        "value of where": lambda junk: store.sel(where={"labels": junk}),
        "dtype": lambda junk: store.sel(dtype=junk),
        "document": store.document,
        "context": lambda junk: store.context(junk, junk),
        "dtype of read": lambda junk: store.read(0, dtype=junk),
        "rows": rows.rows,
        "row": lambda junk: rows[junk],
        "coordinates": rows.coordinates,
        "locate": lambda junk: store.layout.locate(junk, 2, junk),
        "origin": lambda junk: store.origin(junk, 0),
        "create": lambda junk: ShardStore.create(root, junk),
        "part": lambda junk: ShardStore.create(root, METADATA, part=junk, resume=True).close(),
        "resume": lambda junk: ShardStore.create(root, METADATA, resume=junk).close(),
        "on_nonfinite": lambda junk: ShardStore.create(root, METADATA, on_nonfinite=junk).close(),
        "append": append,
        "labels": lambda junk: append(np.zeros((1, 2, 5, 8), np.float32), junk),
        "token array": lambda junk: append_mask(root, junk),
        "metadata layers with hook points": lambda junk: new_metadata(
            **{**METADATA, "layers": junk}, hook_points=["attn_out"]
        ),
        "max_reorder_bytes": write_early,
        "part of one number": lambda junk: ShardStore.create(root, METADATA, part=(junk, junk), resume=True).close(),
        "copy dtype": lambda junk: copy_store(SAMPLE, root / "copied", dtype=junk, progress=False),
        "copy protocol": lambda junk: copy_store(SAMPLE, root / "copied", protocol=junk, progress=False),
        "copy dst": lambda junk: copy_store(SAMPLE, junk, progress=False),
        "stage timeout_s": lambda junk: stage(SAMPLE, root / "staged", timeout_s=junk),
        "stage layers": lambda junk: stage(SAMPLE, root / "staged", layers=junk),
        "on_overflow": lambda junk: ShardStore.create(root, METADATA, on_overflow=junk).close(),
        "where of a pair": lambda junk: pair(store, store).sel(layer_a=2, layer_b=2, where=junk),
        "tokens that stay": rows.only,
        "options of a loader": lambda junk: Loader(rows, junk, order="stored"),
        "state": lambda junk: Loader(rows, batch_size=2, order="stored").load_state_dict(junk),
        "rows of a state": lambda junk: loaded(Loader(rows, batch_size=2, order="stored"), rows=junk),
        "batch of a state": lambda junk: loaded(Loader(rows, batch_size=2, order="stored"), batch=junk),
        "rows of a filter": filtered,
        "chunks of Zarr": lambda junk: store.as_zarr(chunks=junk),
        "layers of a layout": lambda junk: replace(store.layout, layers=junk),
        "hook points of a layout": lambda junk: replace(store.layout, hook_points=junk),
        "address of a source": open_source,
        "scope of a description": lambda junk: reopen({"url": str(root), "digest": {"scope": junk}}),
        "split": lambda junk: prepare(root, split=junk),
        "dtype of tokens": lambda junk: IndexedDatasetBuilder(root / "mm", junk).abort(),
        "family of a cache": lambda junk: import_cache(root, root / "to", family=junk),
        "layers of a cache": lambda junk: import_cache(root, root / "to", family="x", layers=junk),
        "data set": MapStyle,
        "texts": lambda junk: None if isinstance(junk, str) else Texts(junk, context=4),
        "images": lambda junk: None if isinstance(junk, str) else Images(junk),
        "dtype of an array": lambda junk: ShardStore.from_array(
            np.ones((1, 1, 1, 1), np.float32), root / "to", **MODEL, dtype=junk
        ),
    }
    for name in [
        *METADATA,
        "protocol",
        "data",
        "dataset",
        "pixel_agg",
        "extra",
        "dtype",
        "hook_points",
        "token_arrays",
        "text",
    ]:
        found[f"metadata {name}"] = lambda junk, name=name: new_metadata(**{**METADATA, name: junk})
    return found


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK)
def test_junk_meets_our_errors_only(junk: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, call in calls(tmp_path / "root").items():
        try:
            call(junk)  # what makes sense may work
        except SaevStoreError as error:
            assert str(error), name


def test_flags_and_limits_take_no_text_and_name_the_argument(tmp_path: Path) -> None:
    """ "no" would count as true, and replace files."""
    store, to = ShardStore.open(SAMPLE), tmp_path / "to"
    flags: dict[str, Callable[[object], object]] = {
        "masked": lambda flag: store.sel(masked=flag),
        "damaged_ok": lambda flag: ShardStore.open(SAMPLE, damaged_ok=flag),
        "deep": lambda flag: store.validate(deep=flag),
        "resume": lambda flag: ShardStore.create(to, METADATA, resume=flag),
        "replace": lambda flag: copy_store(SAMPLE, to, replace=flag, progress=False),
        "overwrite": lambda flag: IndexedDatasetBuilder(to, overwrite=flag),
        "dry_run": lambda flag: clean(tmp_path, dry_run=flag),
        "timeout_s": lambda value: stage(SAMPLE, to, timeout_s=value),
    }
    for name, call in flags.items():
        for junk in ("no", -1, [True], np.array([True, False])):
            with pytest.raises(ArgumentError) as caught:
                call(junk)
            assert caught.value.where == name
    assert not list(tmp_path.iterdir())
    assert store.sel(stack_layers=np.True_).shape == store.sel(stack_layers=True).shape


def test_parts_of_a_corpus_are_integers(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        builder.add_document(np.arange(7, dtype=np.uint16))
    corpus = IndexedDataset(tmp_path / "x")
    for name, junk in JUNK.items():
        for call in (
            lambda junk: corpus.get(0, junk),
            lambda junk: corpus.get(0, 0, junk),
            lambda junk: corpus[junk],
        ):
            try:
                call(junk)
            except SaevStoreError as error:
                assert str(error), name
    assert corpus.get(0, np.int64(2), np.array(3)).tolist() == [2, 3, 4]
