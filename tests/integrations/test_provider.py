"""Providers give every row of every epoch once, in the loader's order, and go on exactly where they were, whatever stopped them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from row_stores import D_MODEL, row_store, rows_of

torch = pytest.importorskip("torch")

from saev_store import ShardStore, pair
from saev_store.errors import ArgumentError, NotFoundError, TransportError
from saev_store.integrations.saelens import STATE_NAME, data_provider, multi_hook_data_provider
from saev_store.loaders import Loader
from saev_store.torch import StoreLoader

BATCH, N_BATCHES = 32, 10  # of 336 rows; half a batch is dropped


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return row_store(tmp_path_factory.mktemp("provider"))


@pytest.fixture(scope="module")
def expected(store: Path) -> list[np.ndarray]:
    """The batches of three epochs, from the NumPy loader."""
    loader = Loader(ShardStore.open(store).sel(layer=11, tokens="content"), batch_size=BATCH, drop_last=True)
    return [batch["act"].copy() for _ in range(3) for batch in loader]


def make(store: Path, **more: object) -> StoreLoader:
    given: dict[str, object] = {"layer": 11, "batch_size": BATCH, "drop_last": True, **more}
    return StoreLoader(store, **given)


def taken(provider: Iterator[torch.Tensor], n: int) -> list[np.ndarray]:
    return [batch.numpy().copy() for batch in itertools.islice(provider, n)]


def same(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return len(found) == len(expected) and all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_epochs_follow_each_other_each_in_an_order_of_its_own(store: Path, expected: list[np.ndarray]):
    with data_provider(make(store)) as provider:
        assert same(taken(provider, 3 * N_BATCHES), expected)
    first, second = (rows_of(np.concatenate(expected[start : start + N_BATCHES])) for start in (0, N_BATCHES))
    assert first != second
    assert len({tuple(row) for row in first}) == BATCH * N_BATCHES  # no row twice


def test_a_state_goes_on_after_any_batch(store: Path, expected: list[np.ndarray]):
    provider = data_provider(make(store))
    for n in range(2 * N_BATCHES):
        state = json.loads(json.dumps(provider.state_dict()))
        with data_provider(make(store, n_threads=2)) as resumed:
            resumed.load_state_dict(state)
            assert same(taken(resumed, N_BATCHES), expected[n : n + N_BATCHES])
        next(provider)
    provider.close()


def test_a_state_is_loaded_in_the_middle_of_an_epoch(store: Path, expected: list[np.ndarray]):
    with data_provider(make(store)) as provider:
        state = provider.state_dict()
        taken(provider, 13)
        provider.load_state_dict(state)
        assert same(taken(provider, 3), expected[:3])


@pytest.mark.parametrize("n", [0, 1, 7, N_BATCHES, N_BATCHES + 1])
def test_a_closed_provider_goes_on(n: int, store: Path, expected: list[np.ndarray]):
    provider = data_provider(make(store))
    first = taken(provider, n)
    provider.close()
    assert same(first + taken(provider, N_BATCHES), expected[: n + N_BATCHES])
    provider.close()


class Interrupted(StoreLoader):
    """A loader whose batch number `n` does not come at the first try."""

    def __iter__(self) -> Iterator[dict]:
        for number, batch in enumerate(super().__iter__()):
            yield batch
            if number == 3 and self.error is not None:
                error, self.error = self.error, None
                raise error


@pytest.mark.parametrize("error", [OSError("the network is gone"), KeyboardInterrupt()])
def test_after_an_error_the_batch_that_did_not_come_is_next(
    error: BaseException, store: Path, expected: list[np.ndarray]
):
    loader = Interrupted(store, make(store).options)
    loader.error = error
    with data_provider(loader) as provider:
        first = taken(provider, 4)
        with pytest.raises(type(error)):
            next(provider)
        assert provider.state_dict()["batch"] == 4
        assert same(first + taken(provider, N_BATCHES), expected[: 4 + N_BATCHES])


def test_an_epoch_without_a_batch_is_refused(store: Path):
    with pytest.raises(ArgumentError, match="an epoch of the loader has no batch"):
        next(data_provider(make(store, batch_size=337)))


def test_batches_of_another_shape_are_refused(store: Path):
    with (
        data_provider(make(store, layer=(5, 11), stack_layers=True)) as provider,
        pytest.raises(ArgumentError, match=r"act is \(32, 2, 8\).*stack_layers=False"),
    ):
        next(provider)
    with multi_hook_data_provider(make(store)) as many, pytest.raises(ArgumentError, match="stack_layers=True"):
        next(many)
    pairs = StoreLoader(pair(*[ShardStore.open(store)] * 2).sel(layer_a=5, layer_b=11))
    with data_provider(pairs) as provider, pytest.raises(ArgumentError, match="no act, but"):
        next(provider)


def test_hooks_are_rows_of_the_same_tokens(store: Path):
    acts = ShardStore.open(store)[:]
    loader = make(store, layer=(11, 5), stack_layers=True)
    with multi_hook_data_provider(loader) as provider:
        batch = next(provider)
    assert list(batch) == ["blocks.11.hook_resid_post", "blocks.5.hook_resid_post"]
    for position, rows in zip((1, 0), batch.values(), strict=True):
        where = rows.numpy()[:, :2].astype(int)
        np.testing.assert_array_equal(rows.numpy(), acts[where[:, 0], position, where[:, 1] + 1])
    assert batch["blocks.11.hook_resid_post"].shape == (BATCH, D_MODEL)
    assert rows_of(batch["blocks.11.hook_resid_post"]) == rows_of(batch["blocks.5.hook_resid_post"])


def test_hooks_have_the_names_that_are_given(store: Path):
    loader = make(store, layer=(5, 11), stack_layers=True)
    with multi_hook_data_provider(loader, ["early", "late"]) as provider:
        assert list(next(provider)) == ["early", "late"]
    for names in (["one"], ["a", "a"], "ab", [1, 2]):
        with pytest.raises(ArgumentError, match="hook_names"):
            multi_hook_data_provider(loader, names)


def test_checkpoints_say_which_batch_comes_next(store: Path, expected: list[np.ndarray], tmp_path: Path):
    with data_provider(make(store)) as provider:
        taken(provider, 12)
        provider.save_to_checkpoint(checkpoint_path=None)
        provider.save_to_checkpoint(checkpoint_path=tmp_path)
        taken(provider, 5)
    with data_provider(make(store)) as resumed:
        resumed.load_from_checkpoint(tmp_path)
        assert same(taken(resumed, 4), expected[12:16])


def test_a_checkpoint_of_something_else_is_refused(store: Path, tmp_path: Path):
    with data_provider(make(store)) as provider:
        with pytest.raises(NotFoundError, match=r"save_checkpoint_fn=provider\.save_to_checkpoint"):
            provider.load_from_checkpoint(tmp_path)
        for text in ("{", "\xff", "[1]", "{}"):
            (tmp_path / STATE_NAME).write_bytes(text.encode("latin-1"))
            with pytest.raises(ArgumentError):
                provider.load_from_checkpoint(tmp_path)
        data_provider(make(store, layer=5)).save_to_checkpoint(tmp_path)
        with pytest.raises(ArgumentError, match="rows"):
            provider.load_from_checkpoint(tmp_path)


def test_a_folder_that_is_none_is_an_error_with_a_name(store: Path, tmp_path: Path):
    (tmp_path / "file").write_text("x")
    (tmp_path / STATE_NAME).mkdir()
    with data_provider(make(store)) as provider:
        for folder in (tmp_path / "none", tmp_path / "file"):
            with pytest.raises(NotFoundError, match="could not write"):
                provider.save_to_checkpoint(folder)
        with pytest.raises(TransportError, match="could not write"):
            provider.save_to_checkpoint(tmp_path)
        with pytest.raises(TransportError, match="could not read"):
            provider.load_from_checkpoint(tmp_path)


def test_ordered_loaders_are_providers_too(store: Path):
    loader = StoreLoader(store, layer=11, batch_size=BATCH, drop_last=True, order="stored")
    with data_provider(loader) as provider:
        found = [rows_of(batch) for batch in taken(provider, 2 * N_BATCHES)]
    assert found[:N_BATCHES] == found[N_BATCHES:]
    assert found[0][:8] == [[0, token] for token in range(7)] + [[1, 0]]


def test_a_checkpoint_keeps_its_state_when_writing_a_new_one_fails(store: Path, tmp_path: Path, monkeypatch):
    """As a kill would have it: half of the text is written."""
    write_text = Path.write_text

    def half(path: Path, text: str, **options: object) -> int:
        write_text(path, text[: len(text) // 2], **options)
        raise OSError("no space left on device")

    with data_provider(make(store)) as provider:
        provider.save_to_checkpoint(tmp_path)
        before = provider.state_dict()
        next(provider)
        monkeypatch.setattr(Path, "write_text", half)
        with pytest.raises(OSError, match="no space"):
            provider.save_to_checkpoint(tmp_path)
        provider.load_from_checkpoint(tmp_path)
        assert provider.state_dict() == before
