"""The names of the reference project: values from NumPy, from files that it wrote, and from its documentation."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from plain_stores import Plain, plain_store
from token_stores import token_store

torch = pytest.importorskip("torch")

from saev_store import ShardStore
from saev_store.errors import (
    ArgumentError,
    DocumentError,
    IncompleteStoreError,
    LayerNotFoundError,
    NotFoundError,
    SaevStoreError,
    SelectionError,
    StoreExistsError,
    UnsafeContentError,
)
from saev_store.integrations import saev

#: Written by the reference project: shape (7, 3, 5, 8), with labels and a pickle in `data`.
THEIRS = Path(__file__).parents[1] / "data/saev/v2_1_head_labels_cls/store/saev/shards/941cc259"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    return plain_store(tmp_path_factory.mktemp("compat"), n=43, tokens=7, per_shard=5, labels=True, d_model=8)


def fields_of(config: type) -> dict[str, object]:
    return dataclasses.asdict(config())


def test_configs_have_the_documented_fields_and_defaults():
    nowhere = Path("$SAEV_SCRATCH/saev/shards/abcdefg")
    assert fields_of(saev.IndexedConfig) == {"shards": nowhere, "tokens": "content", "layer": -2, "debug": False}
    assert fields_of(saev.OrderedConfig) == {
        "shards": nowhere, "tokens": "content", "layer": -2, "batch_size": 16384, "batch_timeout_s": 30.0,
        "drop_last": False, "buffer_size": 64, "debug": False, "log_every_s": 30.0,
    }  # fmt: skip
    assert fields_of(saev.ShuffledConfig) == {
        "shards": nowhere, "tokens": "content", "layer": -1, "batch_size": 16384, "drop_last": False, "scale_norm": False,
        "ignore_labels": [], "n_threads": 4, "buffer_size": 64, "min_buffer_fill": 0.0, "batch_timeout_s": 30.0, "seed": 17,
        "debug": False, "log_every_s": 30.0, "use_tmpdir": False,
    }  # fmt: skip


def test_configs_keep_what_they_are_given():
    ignored = [0, 3]
    cfg = saev.ShuffledConfig(Path("/data/x"), layer=5, ignore_labels=ignored)
    assert cfg.ignore_labels is ignored
    assert dataclasses.replace(cfg, seed=4) == saev.ShuffledConfig(
        Path("/data/x"), layer=5, ignore_labels=[0, 3], seed=4
    )
    assert saev.OrderedConfig("/data/x").shards == Path("/data/x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.seed = 1
    with pytest.raises(ArgumentError, match="s3://bucket/store"):
        saev.IndexedConfig("s3://bucket/store")


def test_a_loader_refuses_values_of_its_config(plain: Plain):
    bad = ({"batch_size": 0}, {"buffer_size": 0}, {"tokens": "words"}, {"layer": "some"}, {"ignore_labels": ["a"]})
    for given in bad:
        with pytest.raises(SaevStoreError) as caught:
            saev.ShuffledDataLoader(saev.ShuffledConfig(plain.path, **{"layer": 5} | given))
        assert caught.value.where == next(iter(given))
    for given in ({"tokens": "words"}, {"layer": "some"}):
        with pytest.raises(SelectionError):
            saev.IndexedDataset(saev.IndexedConfig(plain.path, **{"layer": 5} | given))
    with pytest.raises(ArgumentError):
        saev.OrderedDataLoader(saev.OrderedConfig(plain.path, layer=5, batch_timeout_s=-1))


def test_an_ordered_config_is_made_of_a_shuffled_one():
    cfg = saev.ShuffledConfig(Path("/data/x"), layer=5, batch_size=64, seed=3, drop_last=True)
    made = saev.make_ordered_config(cfg, batch_size=7)
    assert made == saev.OrderedConfig(Path("/data/x"), layer=5, batch_size=7, drop_last=True)
    with pytest.raises(TypeError, match="seed"):
        saev.make_ordered_config(cfg, seed=3)


# -- documents ---------------------------------------------------------------------------------------------------------


def test_metadata_of_an_older_version(plain: Plain):
    md = saev.Metadata.load(plain.path)
    assert dataclasses.asdict(md) == {
        "family": "clip", "ckpt": "plain", "layers": (2, 5, 11), "content_tokens_per_example": 7, "cls_token": True,
        "d_model": 8, "n_examples": 43, "max_tokens_per_shard": 5 * 8 * 3, "data": '{"__class__":"Plain","seed":0}',
        "dataset": Path("/data/plain"), "pixel_agg": saev.PixelAgg.MAJORITY, "dtype": "float32", "protocol": "2.0",
    }  # fmt: skip
    assert (md.tokens_per_example, md.examples_per_shard, md.n_shards, md.shard_shape) == (8, 5, 9, (5, 3, 8, 8))
    assert md.hash == plain.path.name
    assert md.make_data_cfg().seed == 0
    with pytest.raises(NotFoundError):
        saev.Metadata.load(plain.path / "nothing")


def test_metadata_that_the_reference_project_wrote():
    md = saev.Metadata.load(THEIRS)
    written = json.loads((THEIRS / "metadata.json").read_text())
    values = {field.name: getattr(md, field.name) for field in dataclasses.fields(md)}
    assert values == {
        **written, "layers": tuple(written["layers"]), "dataset": Path(written["dataset"]),
        "pixel_agg": saev.PixelAgg(written["pixel_agg"]),
    }  # fmt: skip
    assert md.hash == saev.Metadata(**values).hash == "941cc259"
    assert dataclasses.replace(md, d_model=16).hash != md.hash
    with pytest.raises(UnsafeContentError, match="pickle"):
        md.make_data_cfg()
    for data in ("[1]", "3", '"text"', "null", "[" * 100_000):
        with pytest.raises(UnsafeContentError):
            dataclasses.replace(md, data=data).make_data_cfg()
    with pytest.raises(ArgumentError):
        _ = dataclasses.replace(md, max_tokens_per_shard=3).hash
    assert dataclasses.replace(md, pixel_agg="prefer-fg").pixel_agg is saev.PixelAgg.PREFER_FG


def test_shards_of_a_store(plain: Plain, tmp_path: Path):
    info = saev.ShardInfo.load(plain.path)
    expected = [saev.Shard(f"acts{i:06}.bin", 5 if i < 8 else 3) for i in range(9)]
    assert (list(info), info.shards, len(info), info[8]) == (expected, expected, 9, saev.Shard("acts000008.bin", 3))
    info.validate(plain.path)
    broken = plain_store(tmp_path)
    broken.shard(1).unlink()
    info = saev.ShardInfo.load(broken.path)  # what the list says, whatever is there
    assert [shard.name for shard in info][:2] == ["acts000000.bin", "acts000001.bin"]
    with pytest.raises(FileNotFoundError, match="acts000001"):
        info.validate(broken.path)


@pytest.mark.parametrize("layer", [5, "all"])
@pytest.mark.parametrize("tokens", ["content", "special", "all"])
def test_where_rows_lie(plain: Plain, tokens: str, layer: int | str):
    md = saev.Metadata.load(plain.path)
    index_map = saev.IndexMap(md, tokens, layer)
    layers = [1] if layer == 5 else [0, 1, 2]
    kinds = {"content": range(1, 8), "special": range(1), "all": range(8)}[tokens]
    rows = list(itertools.product(range(43), layers, kinds))
    assert len(index_map) == len(rows)
    assert index_map.layer_idx_lookup == {2: 0, 5: 1, 11: 2}
    for number, (example, position, token) in enumerate(rows):
        assert index_map.from_global(np.int64(number)) == saev.Index(
            idx=number, example_idx=example, content_token_idx=token - 1, shard_idx=example // 5,
            example_idx_in_shard=example % 5, layer_idx_in_shard=position, token_idx_in_shard=token,
        )  # fmt: skip
    for bad in (-1, len(rows)):
        with pytest.raises(IndexError):
            index_map.from_global(bad)


@pytest.mark.parametrize("tokens", ["content", "all"])
def test_where_rows_lie_without_a_special_token(tokens: str, tmp_path: Path):
    index_map = saev.IndexMap(saev.Metadata.load(plain_store(tmp_path, cls=False).path), tokens, 5)
    assert len(index_map) == 7 * 4
    found = [index_map.from_global(number) for number in range(28)]
    assert [(row.content_token_idx, row.token_idx_in_shard) for row in found] == [
        (token, token) for token in range(4)
    ] * 7
    assert [row.example_idx for row in found] == [example for example in range(7) for _ in range(4)]


def test_rows_that_are_not_there(plain: Plain, tmp_path: Path):
    with pytest.raises(LayerNotFoundError):
        saev.IndexMap(saev.Metadata.load(plain.path), "all", 3)
    bare = plain_store(tmp_path, cls=False)
    with pytest.raises(SelectionError):
        saev.IndexMap(saev.Metadata.load(bare.path), "special", 5)


@pytest.mark.parametrize("tokens", ["content", "all", "special"])
@pytest.mark.parametrize("layer", [5, "all"])
def test_where_rows_of_a_store_with_a_mask_lie(tmp_path: Path, tokens: str, layer: int | str):
    written = token_store(tmp_path)
    rows = saev.IndexedDataset(saev.IndexedConfig(written.path, tokens=tokens, layer=layer))
    assert len(rows.index_map) == len(rows) > 0
    for number in range(len(rows)):
        row, place = rows[number], rows.index_map.from_global(number)
        assert (int(row["example_idx"]), int(row["token_idx"])) == (place.example_idx, place.content_token_idx)
        vector = written.acts[place.example_idx, place.layer_idx_in_shard, place.token_idx_in_shard]
        assert row["act"].numpy().tobytes() == vector.tobytes()
    if tokens == "special":
        assert len(saev.IndexMap(rows.md, tokens, layer)) == len(rows)
    else:
        with pytest.raises(SelectionError, match="the store has a mask, which hides tokens"):
            saev.IndexMap(rows.md, tokens, layer)


# -- loaders -----------------------------------------------------------------------------------------------------------


def test_rows_by_number(plain: Plain):
    dataset = saev.IndexedDataset(saev.IndexedConfig(plain.path, layer=5))
    assert (len(dataset), dataset.d_model, dataset.md.hash) == (301, 8, plain.path.name)
    assert np.array_equal(dataset.labels_mmap, plain.labels)
    for number in (0, 8, 300):
        where = dataset.index_map.from_global(number)
        example = dataset[number]
        shard = np.memmap(plain.shard(where.shard_idx), np.float32, "r", shape=dataset.md.shard_shape)
        expected = shard[where.example_idx_in_shard, where.layer_idx_in_shard, where.token_idx_in_shard]
        assert np.array_equal(example["act"].numpy(), expected)
        assert (example["example_idx"], example["token_idx"]) == (number // 7, number % 7)
        assert example["token_label"] == plain.labels[number // 7, number % 7]
    assert [int(row["example_idx"]) for row in dataset.__getitems__([300, 0, 8, 300])] == [42, 0, 1, 42]
    batch = next(iter(torch.utils.data.DataLoader(dataset, batch_size=4)))
    assert torch.equal(batch["act"], torch.from_numpy(plain.acts[0, 1, 1:5]))
    with pytest.raises(IndexError):
        dataset[301]


def test_shuffled_batches(plain: Plain):
    loader = saev.ShuffledDataLoader(saev.ShuffledConfig(plain.path, layer=5, batch_size=32))
    assert (len(loader), loader.n_batches, loader.n_samples, loader.batch_size) == (10, 10, 301, 32)
    assert (loader.drop_last, loader.logger.name, loader.labels_mmap) == (False, "shuffled.DataLoader", None)
    assert loader.metadata == saev.Metadata.load(plain.path)
    seen = []
    for batch in loader:
        assert batch["example_idx"].dtype == batch["token_idx"].dtype == torch.int32
        assert batch["token_labels"].dtype == torch.int64
        example, token = batch["example_idx"].long(), batch["token_idx"].long()
        assert torch.equal(batch["act"], torch.from_numpy(plain.acts)[example, 1, token + 1])
        seen += zip(example.tolist(), token.tolist(), strict=True)
    assert sorted(seen) == list(itertools.product(range(43), range(7)))


def test_a_loader_shows_its_process_and_its_window(plain: Plain):
    loader = saev.ShuffledDataLoader(
        saev.ShuffledConfig(plain.path, layer=5, batch_size=32, buffer_size=8, min_buffer_fill=0.5)
    )
    assert (loader.manager_pid, loader.manager_proc, loader.reservoir) == (-1, None, None)
    iterator = iter(loader)
    next(iterator)
    assert loader.manager_proc.is_alive()
    assert loader.manager_proc.pid == loader.manager_pid > 0
    assert loader.reservoir.capacity == 256
    found = [(loader.reservoir.fill(), loader.reservoir.qsize()) for _ in iterator]
    assert all(0 <= fill < 1 and size == round(256 * fill) for fill, size in found) and found[0][0] > found[-1][0] == 0
    next(iter(loader))
    loader.shutdown()
    assert (loader.manager_pid, loader.manager_proc, loader.reservoir) == (-1, None, None)


def test_ignored_labels(plain: Plain):
    ignored = plain.labels[0, :2].tolist()
    loader = saev.ShuffledDataLoader(saev.ShuffledConfig(plain.path, layer=5, batch_size=32, ignore_labels=ignored))
    kept = np.argwhere(~np.isin(plain.labels, ignored)).tolist()
    assert loader.n_samples == len(kept)
    assert np.array_equal(loader.labels_mmap, plain.labels)
    rows = [torch.stack([batch["example_idx"], batch["token_idx"]], 1).tolist() for batch in loader]
    assert sorted(itertools.chain(*rows)) == kept


def test_ordered_batches_and_their_resuming(plain: Plain):
    cfg = saev.OrderedConfig(plain.path, layer=5, batch_size=32)
    loader = saev.OrderedDataLoader(cfg)
    assert (loader.md.n_examples, loader.logger.name, loader.cfg) == (43, "ordered.DataLoader", cfg)
    iterator = iter(loader)
    first = next(iterator)
    assert first["example_idx"].dtype == first["token_labels"].dtype == torch.int64
    assert torch.equal(first["token_labels"], torch.from_numpy(plain.labels.reshape(-1)[:32]).long())
    again = saev.OrderedDataLoader(cfg)
    again.load_state_dict(loader.state_dict())
    rest = torch.cat([batch["act"] for batch in again])
    assert torch.equal(rest, torch.from_numpy(plain.acts[:, 1, 1:].reshape(-1, 8)[32:]))


# -- recording ---------------------------------------------------------------------------------------------------------


class Blocks(torch.nn.Module):
    """Adds 1, 10, 100 to its input, one block after the other."""

    name = "blocks"

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Identity() for _ in range(3))

    def get_token_i(self, content_tokens_per_example: int) -> slice:
        return slice(None)

    def get_residuals(self) -> torch.nn.ModuleList:
        return self.blocks

    def forward(self, batch: torch.Tensor, scale: float = 1) -> torch.Tensor:
        for power, block in enumerate(self.blocks):
            batch = block(batch + scale * 10**power)
        return batch


@pytest.mark.parametrize("cls_token", [True, False])
def test_outputs_of_blocks(cls_token: bool):
    recorder = saev.RecordedTransformer(Blocks(), 4, cls_token, [2, 0])
    batch = torch.arange(2.0 * 5 * 3).reshape(2, 5, 3)
    out, acts = recorder(batch)
    assert torch.equal(out, batch + 111)
    first = 0 if cls_token else 1
    assert recorder.tokens_per_example == acts.shape[2] == 5 - first
    assert torch.equal(acts, torch.stack([batch + 111, batch + 1], dim=1)[:, :, first:])
    _, other = recorder(batch, scale=2)
    assert torch.equal(other[:, 1], (batch + 2)[:, first:])
    assert torch.equal(acts[:, 1], (batch + 1)[:, first:])  # not overwritten
    for n_content in (9, 3):  # a second special token is not left out unasked
        with pytest.raises(ArgumentError):
            saev.RecordedTransformer(Blocks(), n_content, cls_token, [1])(batch)
    recorder.reset()
    with pytest.raises(ArgumentError):
        _ = recorder.activations


class WritingBlocks(Blocks):
    """The same numbers, added in place: each block's output is written to after the block has run."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        batch = batch.clone()
        for power, block in enumerate(self.blocks):
            batch = block(batch.add_(10**power))
        return batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_that_the_model_writes_to_later(dtype: torch.dtype):
    batch = torch.arange(2.0 * 5 * 3).reshape(2, 5, 3).to(dtype)
    _, acts = saev.RecordedTransformer(WritingBlocks(), 4, True, [0, 1, 2])(batch)
    assert acts.dtype == torch.float32
    assert torch.equal(acts, torch.stack([batch + 1, batch + 11, batch + 111], dim=1).float())


def test_blocks_without_a_tensor_of_tokens():
    class Pair(torch.nn.Module):
        def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor]:
            return (batch,)

    model = Blocks()
    model.blocks[1] = Pair()
    with pytest.raises(ArgumentError):
        saev.RecordedTransformer(model, 4, True, [1])(torch.zeros(2, 5, 3))
    with pytest.raises(ArgumentError):
        saev.RecordedTransformer(Blocks(), 4, True, [0])(torch.zeros(5, 3))
    for layer in (3, -4):
        with pytest.raises(ArgumentError, match=f"block {layer} of a model of 3 blocks"):
            saev.RecordedTransformer(Blocks(), 4, True, [layer])


def metadata_of(n_examples: int = 7) -> saev.Metadata:
    return saev.Metadata(
        family="clip", ckpt="mine", layers=(2, 5), content_tokens_per_example=4, cls_token=True, d_model=8,
        n_examples=n_examples, max_tokens_per_shard=30, data="{}", dataset=Path("/data/mine"),
    )  # fmt: skip


def test_a_store_is_written(tmp_path: Path):
    md = metadata_of()
    acts = torch.randn(7, 2, 5, 8)
    labels = torch.arange(28, dtype=torch.uint8).reshape(7, 4)
    md.dump(tmp_path)
    assert saev.Metadata.load(tmp_path / md.hash) == md
    with saev.ShardWriter(tmp_path, md) as writer:
        assert writer.shards_dir == tmp_path / md.hash
        writer.write_batch(acts[:4], 0, labels[:4])
        md.dump(tmp_path)  # while it is written, nothing opens
        assert not (writer.shards_dir / "metadata.json").exists()
        with pytest.raises(IncompleteStoreError):
            ShardStore.open(writer.shards_dir)
        with pytest.raises(ArgumentError, match="start_idx"):
            writer.write_batch(acts[5:], 5, labels[5:])
        writer.flush()
        writer.write_batch(acts[4:], 4, labels[4:])
    store = ShardStore.open(tmp_path / md.hash)
    assert np.array_equal(store[...], acts.numpy())
    assert np.array_equal(store.labels, labels.numpy())
    assert store.metadata.protocol == "2.1"
    with pytest.raises(StoreExistsError):
        saev.ShardWriter(tmp_path, md)


def test_places_that_are_no_folders(tmp_path: Path):
    md, file = metadata_of(), tmp_path / "file"
    file.touch()
    for call in (md.dump, lambda place: saev.ShardWriter(place, md)):
        with pytest.raises(NotFoundError, match="file"):
            call(file)


def test_labels_of_a_store_that_has_none(tmp_path: Path):
    md = metadata_of()
    with saev.ShardWriter(tmp_path, md) as writer:
        writer.write_batch(torch.zeros(7, 2, 5, 8), 0)
    labels = saev.LabelsWriter(writer.shards_dir, md)
    labels.flush()
    assert not labels.has_written
    assert not labels.labels_path.exists()
    labels.write_batch(torch.full((3, 4), 9, dtype=torch.uint8), 2)
    labels.write_batch(np.full((1, 4), 8, dtype=np.uint8), 6)
    with pytest.raises(ArgumentError):
        labels.flush()  # 0 is a label
    assert not labels.labels_path.exists()
    labels.write_batch(np.zeros((2, 4), np.uint8), 0)
    labels.write_batch(np.zeros((1, 4), np.uint8), 5)
    labels.flush()
    assert ShardStore.open(writer.shards_dir).labels.tolist() == [[0] * 4] * 2 + [[9] * 4] * 3 + [[0] * 4] + [[8] * 4]
    before = labels.labels.copy()
    for wrong, start in (
        (np.zeros((1, 5), np.uint8), 0),
        (np.zeros((1, 4), np.int64), 0),
        (np.zeros((2, 4), np.uint8), 6),
    ):
        with pytest.raises(ArgumentError, match="labels of shape"):
            labels.write_batch(wrong, start)
    # -2 is the last but one by Python's rules: no example has such a number.
    for start in (-1, -2, 1.5, "a", True):
        with pytest.raises(ArgumentError, match="start_idx"):
            labels.write_batch(np.zeros((1, 4), np.uint8), start)
    assert np.array_equal(labels.labels, before)
    labels.write_batch(np.full((1, 4), 1, dtype=np.uint8), 0)
    with pytest.raises(StoreExistsError):
        labels.flush()


@pytest.mark.parametrize("background", [0, 2])
@pytest.mark.parametrize("pixel_agg", saev.PixelAgg)
def test_labels_of_pixels(pixel_agg: saev.PixelAgg, background: int):
    rng = np.random.default_rng(0)
    seg = rng.integers(0, 3, (6, 8)).astype(np.uint8)
    seg[:2, :2] = background
    expected = []
    for top, left in itertools.product(range(0, 6, 2), range(0, 8, 2)):
        pixels = seg[top : top + 2, left : left + 2].reshape(-1).tolist()
        if pixel_agg is saev.PixelAgg.PREFER_FG:
            pixels = [pixel for pixel in pixels if pixel != background] or pixels
        expected.append(min(sorted(set(pixels)), key=lambda pixel: -pixels.count(pixel)))
    found = saev.pixel_to_patch_labels(seg, 12, 2, pixel_agg, background)
    assert found.dtype == torch.uint8
    assert found.tolist() == expected
    for bad in ((seg, 11, 2), (seg, 12, 3), (seg[None], 12, 2), (seg, 0, 2)):
        with pytest.raises(ArgumentError):
            saev.pixel_to_patch_labels(*bad)
    with pytest.raises(ArgumentError):
        saev.pixel_to_patch_labels(seg, 12, 2, max_classes=2)
    assert torch.equal(saev.pixel_to_patch_labels(seg, 12, 2, pixel_agg.value, background), found)
    assert torch.equal(saev.pixel_to_patch_labels(seg.astype(np.float64), 12, 2, pixel_agg, background), found)


@pytest.mark.parametrize("label", [256, -1, 1.5, np.nan, np.inf])
def test_labels_of_pixels_that_no_byte_holds(label: float):
    seg = np.zeros((4, 4), np.float64 if isinstance(label, float) else np.int32)
    seg[3, 1] = label
    for given in (seg, torch.from_numpy(seg)):
        with pytest.raises(ArgumentError):
            saev.pixel_to_patch_labels(given, 4, 2)


def test_a_way_to_aggregate_that_the_reference_project_does_not_know_is_told(tmp_path):
    """`ShardStore` opens it: the protocol has any text there."""
    plain = plain_store(tmp_path)
    document = json.loads((plain.path / "metadata.json").read_text())
    (plain.path / "metadata.json").write_text(json.dumps({**document, "pixel_agg": "max"}))
    with pytest.raises(DocumentError, match="pixel_agg"):
        saev.Metadata.load(plain.path)
