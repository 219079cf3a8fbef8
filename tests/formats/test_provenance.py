"""From any vector back to its text or image."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from saev_store import ShardStore, new_metadata
from saev_store.errors import (
    ArgumentError,
    CorruptShardError,
    DocumentError,
    NotFoundError,
    SelectionError,
    UnsafeContentError,
)
from saev_store.sources import Source, open_source, recorded_from
from saev_store.sources.llmbatch import write_batch_file
from saev_store.sources.mmididx import IndexedDataset, IndexedDatasetBuilder, TokenSamples

DATA = Path(__file__).parents[1] / "data"
TEXT = DATA / "mmididx" / "core_seed_example_3_4_2_int32"
IMAGES = DATA / "energon" / "captioning_ratio_split" / "dataset"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Documents of 3, 4 and 2 tokens, where they can be moved and damaged."""
    return Path(shutil.copytree(TEXT, tmp_path / "text"))


def recorded(
    root: Path, data: dict[str, object], *, protocol: str = "2.0", n_examples: int = 2, tokens: int = 3
) -> ShardStore:
    metadata = new_metadata(
        protocol=protocol, family="clip", ckpt="tiny", layers=[0], content_tokens_per_example=tokens, cls_token=True,
        d_model=2, n_examples=n_examples, data=data,
    )  # fmt: skip
    with ShardStore.create(root, metadata) as writer:
        writer.append(np.ones((n_examples, 1, tokens + 1, 2), dtype=np.float32))
    return ShardStore.open(writer.url)


def traced(root: Path, data: dict[str, object], arrays: dict[str, list]) -> ShardStore:
    """Two examples of three tokens with token arrays of what each token is."""
    dtypes = {"document_ids": "int64", "positions": "int32", "token_ids": "int32"}
    metadata = new_metadata(
        family="gpt2", ckpt="tiny", layers=[0], content_tokens_per_example=3, cls_token=True, d_model=2, n_examples=2, data=data,
        dtype="bfloat16", token_arrays={name: dtypes[name] for name in arrays},
    )  # fmt: skip
    with ShardStore.create(root, metadata, progress=False) as writer:
        writer.append(
            np.ones((2, 1, 4, 2), dtype=np.float32), **{name: np.array(rows) for name, rows in arrays.items()}
        )
    return ShardStore.open(writer.url)


@pytest.mark.parametrize("sample", [2, 3, 4, 2**40])
def test_only_samples_that_the_source_has_are_opened(text: Path, tmp_path: Path, sample: int) -> None:
    arrays = {"document_ids": [[sample] * 3] * 2, "positions": [[0, 0, 0]] * 2}
    source = open_source(text / "data.idx")
    assert len(source) == 3
    by_token = traced(tmp_path / "a", recorded_from(source, by_token=True), arrays)
    data = {**recorded_from(source), "examples": {"first": sample - 1}}
    in_a_row = traced(tmp_path / "b", data, arrays)
    for store, example in ((by_token, 0), (in_a_row, 1)):
        if sample == 2:
            assert store.origin(example).sample_idx == 2
            continue
        with pytest.raises(DocumentError):
            store.origin(example)


def test_tokens_are_traced_by_what_the_store_records_of_them(text: Path, tmp_path: Path) -> None:
    arrays = {"document_ids": [[1, 1, 0], [2, -1, 5]], "positions": [[2, 3, 0], [1, -1, 0]]}
    store = traced(tmp_path, recorded_from(open_source(text / "data.idx"), by_token=True), arrays)
    source = open_source(text / "data.idx")
    for example, token, sample, position in ((0, 0, 1, 2), (0, 1, 1, 3), (0, 2, 0, 0), (1, 0, 2, 1)):
        origin = store.origin(example, token)
        assert (origin.sample_idx, origin.position, origin.sample.tolist()) == (
            sample,
            position,
            source[sample].tolist(),
        )
    assert store.origin(0).sample_idx == store.origin(0, -1).sample_idx == 1
    assert store.origin(0, -1).position is None
    with pytest.raises(SelectionError):
        store.origin(1, 1)
    with pytest.raises(DocumentError):
        store.origin(1, 2)


@pytest.mark.parametrize("wrong", [None, (0, 0), (0, 2), (1, 1)])
def test_a_token_that_has_another_id_now_is_of_other_data(
    text: Path, tmp_path: Path, wrong: tuple[int, int] | None
) -> None:
    source = open_source(text / "data.idx")
    arrays = {"document_ids": [[1, 1, 0], [2, 2, 0]], "positions": [[2, 3, 0], [1, 0, 1]]}
    ids = [[int(source[d][p]) for d, p in zip(*rows, strict=True)] for rows in zip(*arrays.values(), strict=True)]
    if wrong is not None:
        ids[wrong[0]][wrong[1]] += 1
    store = traced(tmp_path, recorded_from(source, by_token=True), {**arrays, "token_ids": ids})
    for example, token in ((e, t) for e in range(2) for t in range(3)):
        if (example, token) == wrong:
            with pytest.raises(CorruptShardError):
                store.origin(example, token)
        else:
            origin = store.origin(example, token)
            assert origin.sample[origin.position] == ids[example][token]


def test_tokens_cannot_be_traced_by_arrays_that_are_not_there(text: Path, tmp_path: Path) -> None:
    data = recorded_from(open_source(text / "data.idx"), by_token=True)
    store = traced(tmp_path, data, {"document_ids": [[0, 0, 0], [1, 1, 1]]})
    with pytest.raises(DocumentError):
        store.origin(0, 0)
    for other in ({"first_token": 0}, {"patches": (1, 1), "image_px": (2, 2)}):
        with pytest.raises(ArgumentError):
            recorded_from(open_source(text / "data.idx"), by_token=True, **other)


@pytest.mark.parametrize("protocol", ["1.0.0", "2.0", "2.1"])
def test_a_token_in_its_sample(text: Path, tmp_path: Path, protocol: str) -> None:
    source = open_source(text / "data.idx")
    truth = [np.asarray(source[i]).tolist() for i in range(len(source))]
    store = recorded(tmp_path / "root", recorded_from(source, first_token=0), protocol=protocol)
    for example in range(2):
        for token in range(3):
            origin = store.origin(example, token)
            assert (origin.sample_idx, origin.key, origin.position) == (example, str(example), token)
            assert origin.sample.tolist() == truth[example]
    assert store.origin(0, -1).position is None
    assert np.asarray(store.origin(-1).sample).tolist() == truth[1]
    assert store.source().format == "mmididx"


def test_examples_that_are_other_samples(text: Path, tmp_path: Path) -> None:
    source = open_source(text / "data.idx")
    data = {**recorded_from(source, first_token=1), "examples": {"samples": [2, 0]}}
    chosen = recorded(tmp_path / "a", data, tokens=2)
    assert [chosen.origin(example).sample_idx for example in range(2)] == [2, 0]
    assert chosen.origin(1, 0).position == 1
    with pytest.raises(SelectionError):
        chosen.origin(0, 1)
    data = {**recorded_from(source, first_token=0), "examples": {"first": 1}}
    shifted = recorded(tmp_path / "b", data, tokens=2)
    assert [shifted.origin(example).sample_idx for example in range(2)] == [1, 2]
    data = {**recorded_from(source, first_token=0), "examples": {"first": 0, "skipped": [1]}}
    skipping = recorded(tmp_path / "c", data, tokens=2)
    assert [skipping.origin(example).sample_idx for example in range(2)] == [0, 2]


def batches(folder: Path) -> Source[object]:
    write_batch_file(folder / "x.batch", np.arange(60).reshape(12, 5), batch_size=2, seed=3)
    return open_source(folder / "x.batch")


def samples_of_one_length(folder: Path) -> Source[object]:
    with IndexedDatasetBuilder(folder / "d", np.uint16) as builder:
        for size in (9, 0, 30, 1, 25):
            builder.add_document(np.arange(size) + 100 * size)
    return TokenSamples(IndexedDataset(folder / "d"), 4, num_samples=40, seed=7, documents=range(1, 5))


@pytest.mark.parametrize("make", [batches, samples_of_one_length])
def test_every_kind_of_token_source(tmp_path: Path, make: Callable[[Path], Source[object]]) -> None:
    source = make(tmp_path)
    store = recorded(tmp_path / "root", recorded_from(source, first_token=0), n_examples=len(source), tokens=5)
    again = store.source()
    assert (again.format, len(again)) == (source.format, len(source))
    for example in range(len(source)):
        truth = np.asarray(source[example]).tolist()
        for token in (0, 3, 4):
            origin = store.origin(example, token, source=again)
            assert (origin.position, np.asarray(origin.sample).tolist()) == (token, truth)


def test_the_images_of_a_split(tmp_path: Path) -> None:
    """Samples that are left out of the split do not count, and adding a tar elsewhere is noticed."""
    folder = Path(shutil.copytree(IMAGES, tmp_path / "images"))
    (folder / ".nv-meta/split.yaml").write_text(
        "split_parts:\n  train: ['shards/shard_00{0..1}.tar']\nexclude: [shards/shard_000.tar/sample_0000]\n"
    )
    source = open_source(folder).split("train")
    store = recorded(tmp_path / "root", recorded_from(source, patches=(1, 3), image_px=(14, 42)), n_examples=3)
    assert [store.origin(example, 2).key for example in range(3)] == ["sample_0001", "sample_0002", "sample_0003"]
    (folder / ".nv-meta/split.yaml").write_text("split_parts:\n  train: ['shards/shard_00{0..1}.tar']\nexclude: []\n")
    with pytest.raises(CorruptShardError):
        store.source()


def test_a_patch_has_a_box(tmp_path: Path) -> None:
    source = open_source(IMAGES)
    store = recorded(tmp_path, recorded_from(source, patches=(2, 3), image_px=(28, 42)), tokens=6)
    origin = store.origin(1, 4)
    assert (origin.key, origin.box) == (source.key(1), None)  # how the input was made is not known
    assert store.origin(1, -1).box is None


def test_a_source_that_moved_or_changed(text: Path, tmp_path: Path) -> None:
    store = recorded(tmp_path / "root", recorded_from(open_source(text / "data.idx"), first_token=0))
    text.rename(tmp_path / "moved")
    with pytest.raises(NotFoundError):
        store.source()
    moved = store.source(url=tmp_path / "moved" / "data.idx")
    assert store.origin(0, 0, source=moved).sample_idx == 0
    bin_file = tmp_path / "moved" / "data.bin"
    raw = bytearray(bin_file.read_bytes())
    raw[0] ^= 1
    bin_file.write_bytes(raw)
    with pytest.raises(CorruptShardError):
        store.source(url=tmp_path / "moved" / "data.idx")


@pytest.mark.parametrize(
    "change",
    [
        {"source": None},
        {"source": {"url": 3}},
        {"examples": None},
        {"examples": {"first": "0"}},
        {"examples": {"first": 100}},
        {"examples": {"samples": [0]}},
        {"content": {}},
        {"content": {"patches": {"grid": [0, 1], "image_px": [1, 1]}}},
        {"content": {"patches": {"grid": [1, 1], "image_px": [8, 8]}}},
        {"content": {"tokens": {"first": True}}},
        {"content": {"tokens": {}}},
        {"content": {"tokens": {"first": None}}},  # the store has a special token: is it the sample's first?
    ],
)
def test_descriptions_that_make_no_sense_are_refused(text: Path, tmp_path: Path, change: dict[str, object]) -> None:
    data = {**recorded_from(open_source(text / "data.idx")), **change}
    store = recorded(tmp_path / "root", json.loads(json.dumps(data)))
    with pytest.raises(DocumentError):
        store.origin(1, 1)


def test_a_store_that_names_no_source(tmp_path: Path) -> None:
    store = recorded(tmp_path, {"__class__": "ImageFolder"})
    with pytest.raises(DocumentError):
        store.source()
    peer = ShardStore.open(DATA / "saev/v2_1_head_labels_cls/store/saev/shards/941cc259")  # its data are a pickle
    with pytest.raises(DocumentError):
        peer.origin(0, 0)


def test_bad_arguments(text: Path, tmp_path: Path) -> None:
    source = open_source(text / "data.idx")
    for kwargs in (
        {"first_token": -1},
        {"patches": (2, 2)},
        {"patches": (3, 3), "image_px": (28, 28)},
        {"patches": (0, 3), "image_px": (28, 28)},
    ):
        with pytest.raises(ArgumentError):
            recorded_from(source, **kwargs)
    store = recorded(tmp_path / "root", recorded_from(source))
    for where in ((2, 0), (0, 3), (0, -2)):
        with pytest.raises(SelectionError):
            store.origin(*where)


def test_a_special_token_is_never_counted_by_guess(text: Path, tmp_path: Path) -> None:
    """BOS is stored as the special token: content token 0 is the second token of the sample, if that begins with BOS."""
    source = open_source(text / "data.idx")
    for first_token in (0, 1):
        data = recorded_from(source, first_token=first_token)
        assert recorded(tmp_path / str(first_token), data, n_examples=1).origin(0, 0).position == first_token
    with pytest.raises(DocumentError):
        recorded(tmp_path / "unsaid", recorded_from(source)).origin(0, 0)


@pytest.mark.parametrize("url", ["http://169.254.169.254/x.idx", "s3://lab/x", "simplecache::http://host/x.idx"])
def test_a_store_does_not_decide_where_requests_go(tmp_path: Path, url: str) -> None:
    data = {"source": {"url": url, "digest": {"scope": "full"}}, "examples": {"first": 0}, "content": {}}
    store = recorded(tmp_path / "root", data)
    for ask in (store.source, lambda: store.origin(0, 0)):
        with pytest.raises(UnsafeContentError):
            ask()


def test_a_server_that_is_allowed_is_asked(text: Path, tmp_path: Path) -> None:
    address = f"simplecache::file://{text}/data.idx"
    data = recorded_from(open_source(address), first_token=0)
    store = recorded(tmp_path / "root", data)
    with pytest.raises(UnsafeContentError):
        store.source()
    assert len(store.source(outside_ok=True)) == 3
    assert len(store.source(url=text / "data.idx")) == 3
