"""What trainers get: rows of the loader, epoch after epoch, in the shapes that each tool asks for; checkpoints; refusals."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from row_stores import D_MODEL, N_EXAMPLES, N_TOKENS, row_store, rows_of

torch = pytest.importorskip("torch")

from saev_store import ShardStore, new_metadata, pair
from saev_store.errors import ArgumentError, NotFoundError, TransportError
from saev_store.integrations.crosscoders import layer_batches, model_batches, transcoder_batches
from saev_store.integrations.dictionary_learning import activation_buffer
from saev_store.integrations.saelens import STATE_NAME, data_provider, multi_hook_data_provider
from saev_store.loaders import Loader
from saev_store.torch import StoreLoader

BATCH, N_BATCHES = 32, 10  # of 336 rows; half a batch is dropped


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two of the same tokens."""
    return [row_store(tmp_path_factory.mktemp("tools"), seed=seed) for seed in (0, 1)]


def one(stores: list[Path], **more: object) -> StoreLoader:
    return StoreLoader(stores[0], **{"layer": 11, "batch_size": BATCH, "drop_last": True, **more})


def stacked(stores: list[Path], *layers: int) -> StoreLoader:
    return one(stores, layer=layers or (11, 5), stack_layers=True)


def two(stores: list[Path], layer_b: object = 11) -> StoreLoader:
    a, b = map(ShardStore.open, stores)
    return StoreLoader(pair(a, b).sel(layer_a=11, layer_b=layer_b), batch_size=BATCH, drop_last=True)


def taken(provider: Iterator[torch.Tensor], n: int) -> list[np.ndarray]:
    return [batch.numpy().copy() for batch in itertools.islice(provider, n)]


def dense(path: Path, position: int, rows: torch.Tensor) -> np.ndarray:
    """What a store has, by position of the layer, for the tokens that the numbers of rows are of."""
    where = rows.numpy()[:, :2].astype(int)
    return ShardStore.open(path)[:][where[:, 0], position, where[:, 1] + 1]


# -- rows --------------------------------------------------------------------------------------------------------------


def test_providers_give_the_epochs_of_the_loader_one_after_the_other(stores: list[Path]) -> None:
    loader = Loader(ShardStore.open(stores[0]).sel(layer=11, tokens="content"), batch_size=BATCH, drop_last=True)
    expected = [batch["act"].copy() for _ in range(3) for batch in loader]
    for make in (data_provider, activation_buffer):
        with make(one(stores)) as provider:
            assert iter(provider) is provider
            np.testing.assert_array_equal(taken(provider, 3 * N_BATCHES), expected)
    for n in (0, 1, 7, N_BATCHES, N_BATCHES + 1):
        provider = data_provider(one(stores))
        first = taken(provider, n)
        provider.close()  # the next batch is the one that would have come
        np.testing.assert_array_equal(first + taken(provider, N_BATCHES), expected[: n + N_BATCHES])
        provider.close()
    with data_provider(one(stores, order="stored")) as provider:
        found = [rows_of(batch) for batch in taken(provider, 2 * N_BATCHES)]
    assert found[:N_BATCHES] == found[N_BATCHES:]
    with pytest.raises(ArgumentError) as refused:
        next(data_provider(one(stores, batch_size=337)))
    assert refused.value.where == "loader"


def test_providers_after_an_error_give_the_batch_that_did_not_come(stores: list[Path]) -> None:
    class Interrupted(StoreLoader):
        """A loader whose batch number 4 does not come at the first try."""

        error: BaseException | None = None

        def __iter__(self) -> Iterator[dict]:
            for number, batch in enumerate(super().__iter__()):
                yield batch
                if number == 3 and self.error is not None:
                    error, self.error = self.error, None
                    raise error

    with data_provider(one(stores)) as provider:
        expected = taken(provider, 4 + N_BATCHES)
    for error in (OSError("the network is gone"), KeyboardInterrupt()):
        loader = Interrupted(stores[0], one(stores).options)
        loader.error = error
        with data_provider(loader) as provider:
            first = taken(provider, 4)
            with pytest.raises(type(error)):
                next(provider)
            assert provider.state_dict()["batch"] == 4
            np.testing.assert_array_equal(first + taken(provider, N_BATCHES), expected)


def test_layers_models_and_targets_are_of_the_same_tokens(stores: list[Path]) -> None:
    with layer_batches(stacked(stores)) as layers, model_batches(two(stores)) as models:
        for acts in itertools.islice(layers, 12):  # into the second epoch
            for place, position in enumerate((1, 0)):
                np.testing.assert_array_equal(acts[:, place].numpy(), dense(stores[0], position, acts[:, 0]))
        for acts in itertools.islice(models, 12):
            for place, path in enumerate(stores):
                np.testing.assert_array_equal(acts[:, place].numpy(), dense(path, 1, acts[:, 0]))
    with transcoder_batches(stacked(stores)) as layers, transcoder_batches(two(stores, layer_b=(5, 11))) as models:
        source, target = next(layers)
        np.testing.assert_array_equal(source.numpy(), dense(stores[0], 1, source))
        np.testing.assert_array_equal(target.numpy(), dense(stores[0], 0, source))
        source, target = next(models)
        np.testing.assert_array_equal(source.numpy(), dense(stores[0], 1, source))
        np.testing.assert_array_equal(target[:, 1].numpy(), dense(stores[1], 1, source))


def test_hooks_are_named_views_of_the_layers_in_the_order_of_the_loader(stores: list[Path]) -> None:
    for layers in ((11, 5), (5, 11)):
        with multi_hook_data_provider(stacked(stores, *layers)) as provider:
            batch = next(provider)
        assert list(batch) == [f"blocks.{layer}.hook_resid_post" for layer in layers]
        for layer, rows in zip(layers, batch.values(), strict=True):
            assert rows.shape == (BATCH, D_MODEL)
            np.testing.assert_array_equal(rows.numpy(), dense(stores[0], (5, 11).index(layer), rows))
        assert len({rows.untyped_storage().data_ptr() for rows in batch.values()}) == 1
    with multi_hook_data_provider(stacked(stores), ["early", "late"]) as provider:
        assert list(next(provider)) == ["early", "late"]
    for names in (["one"], ["a", "a"], ["a", "b", "c"]):
        with pytest.raises(ArgumentError) as refused:
            multi_hook_data_provider(stacked(stores), names)
        assert refused.value.where == "hook_names"


def test_batches_of_another_shape_are_refused(stores: list[Path], tmp_path: Path) -> None:
    metadata = new_metadata(
        family="gpt2", ckpt="narrow", layers=(11,), content_tokens_per_example=N_TOKENS, cls_token=True, d_model=6,
        n_examples=N_EXAMPLES,
    )  # fmt: skip
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(torch.zeros(metadata.layout.shape))
    narrow = [stores[0], tmp_path / metadata.hash]
    cases: list[tuple[Callable[[Any], Any], Any]] = [
        (data_provider, stacked(stores)),
        (data_provider, two(stores)),
        (multi_hook_data_provider, one(stores)),
        (layer_batches, one(stores)),
        (model_batches, stacked(stores)),
        (model_batches, two(stores, layer_b=(5, 11))),
        (model_batches, two(narrow)),
        (transcoder_batches, stacked(stores, 5)),
        (data_provider, stores[0]),
        (activation_buffer, two(stores)),
        (multi_hook_data_provider, two(stores)),
    ]
    for make, loader in cases:
        with pytest.raises(ArgumentError) as refused:
            next(make(loader))
        assert refused.value.where == "loader"
    with transcoder_batches(two(narrow)) as batches:
        assert [tuple(rows.shape) for rows in next(batches)] == [(BATCH, D_MODEL), (BATCH, 6)]


def test_buffers_describe_their_loader(stores: list[Path]) -> None:
    loader = one(stores, layer=(11, 5), seed=41, dtype="float16", tokens="all", normalize="scale_norm")
    with activation_buffer(loader) as buffer:
        assert buffer.config == {
            "d_submodule": D_MODEL, "out_batch_size": BATCH, "device": "cpu", "store": ShardStore.open(stores[0]).url,
            "layers": ["11", "5"], "tokens": "all", "dtype": "float16", "n_samples": 2 * N_EXAMPLES * (N_TOKENS + 1),
            "scale": loader.scale, "normalize": "scale_norm", "seed": 41,
        }  # fmt: skip
    with activation_buffer(one(stores, order="stored")) as buffer:
        assert buffer.config["seed"] is None


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_checkpoints_keep_which_batch_comes_next(
    stores: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with data_provider(one(stores)) as provider:
        expected = taken(provider, 16)
    with data_provider(one(stores)) as provider:
        taken(provider, 12)
        provider.save_to_checkpoint(checkpoint_path=None)
        provider.save_to_checkpoint(checkpoint_path=tmp_path)
        assert [file.name for file in tmp_path.iterdir()] == [STATE_NAME]
        taken(provider, 1)
        write_text = Path.write_text

        def half(path: Path, text: str, **options: object) -> int:
            write_text(path, text[: len(text) // 2], **options)
            raise OSError("no space left on device")  # as a kill would have it

        monkeypatch.setattr(Path, "write_text", half)
        with pytest.raises(OSError, match="no space"):
            provider.save_to_checkpoint(tmp_path)
        monkeypatch.undo()
    with data_provider(one(stores)) as resumed:
        resumed.load_from_checkpoint(str(tmp_path))
        np.testing.assert_array_equal(taken(resumed, 4), expected[12:])


def test_checkpoints_that_are_none_are_refused(stores: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder" / STATE_NAME).mkdir(parents=True)
    with data_provider(one(stores)) as provider:
        for folder, error in (("none", NotFoundError), ("file", NotFoundError), ("folder", TransportError)):
            with pytest.raises(error):
                provider.save_to_checkpoint(tmp_path / folder)
        with pytest.raises(TransportError):
            provider.load_from_checkpoint(tmp_path / "folder")
        with pytest.raises(NotFoundError) as missing:
            provider.load_from_checkpoint(tmp_path)
        assert missing.value.where == str(tmp_path / STATE_NAME)
        for text in (b"{", b"\xff", b"[1]", b"{}"):
            (tmp_path / STATE_NAME).write_bytes(text)
            with pytest.raises(ArgumentError):
                provider.load_from_checkpoint(tmp_path)
        data_provider(one(stores, layer=5)).save_to_checkpoint(tmp_path)
        with pytest.raises(ArgumentError):
            provider.load_from_checkpoint(tmp_path)
