"""Streams for Llamascopium: the loader's batches under its keys; each iteration begins at the same batch, which a state chooses."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from row_stores import D_MODEL, row_store, rows_of

torch = pytest.importorskip("torch")

from saev_store import ShardStore
from saev_store.errors import ArgumentError
from saev_store.integrations.llamascopium import activation_stream
from saev_store.loaders import Loader
from saev_store.torch import StoreLoader

BATCH = 32
HOOK = "blocks.11.hook_resid_post"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return row_store(tmp_path_factory.mktemp("stream"))


@pytest.fixture(scope="module")
def expected(store: Path) -> list[np.ndarray]:
    """The batches of two epochs, from the NumPy loader."""
    loader = Loader(ShardStore.open(store).sel(layer=11, tokens="content"), batch_size=BATCH, drop_last=True)
    return [batch["act"].copy() for _ in range(2) for batch in loader]


def make(store: Path, layer: object = 11, **more: object) -> StoreLoader:
    return StoreLoader(store, layer=layer, batch_size=BATCH, drop_last=True, **more)


def test_every_iteration_begins_with_the_same_batch(store: Path, expected: list[np.ndarray]):
    """The trainer looks at the first batch, then iterates anew: nothing is lost."""
    with activation_stream(make(store)) as stream:
        for n in (1, 3, 20):
            found = [batch[HOOK].numpy() for batch in itertools.islice(iter(stream), n)]
            np.testing.assert_array_equal(found, expected[:n])


def test_a_stream_of_some_batches_ends_and_is_continued(store: Path, expected: list[np.ndarray]):
    with activation_stream(make(store), n_batches=13) as stream:
        assert len(list(stream)) == 13
        state = json.loads(json.dumps(stream.state_dict()))
    with activation_stream(make(store), n_batches=5) as stream:
        stream.load_state_dict(state)
        for _ in range(2):
            np.testing.assert_array_equal([batch[HOOK].numpy() for batch in stream], expected[13:18])


def test_tokens_are_positions_and_the_mask_is_true(store: Path):
    with activation_stream(make(store)) as stream:
        batch = next(iter(stream))
    assert batch["tokens"].dtype == torch.int64
    assert batch["tokens"].tolist() == [token for _, token in rows_of(batch[HOOK].numpy())]
    assert batch["mask"].dtype == torch.bool
    assert batch["mask"].all()
    assert batch["mask"].shape == (BATCH,)


def test_tokens_are_ids_where_the_loader_has_them(tmp_path: Path):
    store = row_store(tmp_path, protocol="3.0", token_arrays={"token_ids": "int32"})
    with activation_stream(make(store, token_arrays=("token_ids",))) as stream:
        batch = next(iter(stream))
    assert batch["tokens"].tolist() == [7 * example + token for example, token in rows_of(batch[HOOK].numpy())]


def test_stacked_layers_have_their_names(store: Path):
    with activation_stream(make(store, (5, 11), stack_layers=True), ["in", "out"]) as stream:
        batch = next(iter(stream))
    assert list(batch) == ["in", "out", "tokens", "mask"]
    assert batch["out"].shape == (BATCH, D_MODEL)
    assert rows_of(batch["in"].numpy()) == rows_of(batch["out"].numpy())
    assert set(batch["in"][:, 2].tolist()) == {0}
    assert set(batch["out"][:, 2].tolist()) == {1}


@pytest.mark.parametrize(
    ("layer", "more", "message"),
    [
        ((5, 11), {}, "in one row"),
        (11, {"hook_points": ["a", "b"]}, "a different name for each"),
        (11, {"n_batches": 0}, "n_batches is 0"),
        (11, {"n_batches": 2.5}, "n_batches is 2.5"),
    ],
)
def test_what_is_refused(layer: object, more: dict, message: str, store: Path):
    with pytest.raises(ArgumentError, match=message):
        activation_stream(make(store, layer), **more)


def test_a_state_of_other_batches_is_refused(store: Path):
    with activation_stream(make(store)) as stream, activation_stream(make(store, seed=3)) as other:
        with pytest.raises(ArgumentError, match="seed"):
            stream.load_state_dict(other.state_dict())
        assert len(list(itertools.islice(iter(stream), 2))) == 2  # as it was
