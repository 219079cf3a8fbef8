"""Each error of the integrations with its place and remedy; what they close; names and defaults of what they hand out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from row_stores import D_MODEL, N_EXAMPLES, N_TOKENS, row_store

torch = pytest.importorskip("torch")

from saev_store import ShardStore, pair  # after the check that torch is there
from saev_store.errors import ArgumentError, SaevStoreError  # after the check that torch is there
from saev_store.integrations._provider import Provider, rows_of  # after the check that torch is there
from saev_store.integrations.crosscoders import PairedActivations, layer_batches  # after the check that torch is there
from saev_store.integrations.dictionary_learning import activation_buffer  # after the check that torch is there
from saev_store.integrations.saelens import (  # after the check that torch is there
    STATE_NAME,
    by_hook,
    data_provider,
    multi_hook_data_provider,
    names_of,
    use_store,
)
from saev_store.torch import StoreLoader


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return row_store(tmp_path_factory.mktemp("errors"))


def refused(call: Callable[[], object]) -> SaevStoreError:
    with pytest.raises(SaevStoreError) as caught:
        call()
    return caught.value


class Loader:
    """Batches that are given, and what is done with the loader."""

    def __init__(self, *batches: dict[str, Any]) -> None:
        self.batches, self.done, self.at = batches, list[str](), 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.done.append("iter")
        for number, batch in enumerate(self.batches, 1):
            self.at = number
            yield batch

    def state_dict(self) -> dict[str, object]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.done.append(f"load {state['at']}")

    def close(self) -> None:
        self.done.append("close")


def batch(*shape: int) -> dict[str, Any]:
    return {"act": torch.arange(int(np.prod(shape))).reshape(shape)}


def test_a_provider_closes_its_loader_where_it_stands():
    loader = Loader(batch(2, 3), batch(2, 3))
    with Provider(loader, rows_of) as provider:
        assert loader.done == []
        assert iter(provider) is provider
        next(provider)
    assert loader.done == ["iter", "load 1", "close"]
    provider.close()  # nothing is begun: only the loader is closed
    assert loader.done[3:] == ["close"]
    next(provider)
    provider.load_state_dict({"at": 7})
    assert loader.done[4:] == ["iter", "load 7"]
    provider.close()
    assert loader.done[6:] == ["close"]
    assert provider.loader is loader
    assert provider.state_dict() == {"at": 1}


def test_batches_close_their_loader(path: Path, monkeypatch: pytest.MonkeyPatch):
    closed: list[object] = []
    close = StoreLoader.close
    monkeypatch.setattr(StoreLoader, "close", lambda self: (closed.append(self), close(self))[1])
    makers: list[Callable[[StoreLoader], Any]] = [data_provider, activation_buffer]
    for make in makers:
        loader = StoreLoader(path, layer=5, batch_size=8)
        with make(loader) as found:
            next(iter(found))
            assert loader not in closed
        assert closed[-1] is loader
    assert len(closed) >= 2


@pytest.mark.parametrize(
    ("given", "stacked", "message", "remedy"),
    [
        (batch(4, 3), True, "act is (4, 3); it must be (batch, layers, d_model)", "Make the loader with stack_layers=True."),
        (batch(4, 2, 3), False, "act is (4, 2, 3); it must be (batch, d_model)", "Make the loader with stack_layers=False."),
        ({"act_a": 1}, False, "the loader's batches have no act, but ['act_a']", "Use a loader of one store."),
    ],
)  # fmt: skip
def test_batches_of_another_shape(given: dict, stacked: bool, message: str, remedy: str):
    error = refused(lambda: rows_of(given, stacked=stacked))
    assert (type(error), error.where, error.message, error.remedy) == (ArgumentError, "loader", message, remedy)
    error = refused(lambda: rows_of(given, "act_b"))
    assert (error.message, error.remedy) == (
        f"the loader's batches have no act_b, but {list(given)}",
        "Use a loader of two stores.",
    )


def test_an_epoch_without_batches():
    loader = Loader()
    error = refused(lambda: next(Provider(loader, rows_of)))
    assert (error.where, error.remedy) == ("loader", "Choose more rows, a smaller batch_size, or drop_last=False.")
    assert loader.done == ["iter", "iter"]


@pytest.mark.parametrize(
    ("names", "keys", "found"),
    [
        (None, (5, (7, "mlp_out")), ("blocks.5.hook_resid_post", "blocks.7.hook_mlp_out")), (["a", "b"], (5, 7), ("a", "b")), (("a",), (5,), ("a",)),
        (["a"], (5, 7), None), (["a", "b", "c"], (5, 7), None), (["a", "a"], (5, 7), None), ("ab", (5, 7), None), ([1, 2], (5, 7), None), ([], (5,), None),
    ],
)  # fmt: skip
def test_names_of_hooks(names: Any, keys: Any, found: tuple[str, ...] | None):
    if found is not None:
        assert names_of(keys, names) == found
    else:
        assert refused(lambda: names_of(keys, names)).where == "hook_names"


def test_layers_by_hook_are_views():
    rows = batch(4, 2, 3)
    found = by_hook(rows, ["x", "y"])
    assert list(found) == ["x", "y"]
    assert torch.equal(found["y"], rows["act"][:, 1])
    assert found["y"].untyped_storage().data_ptr() == rows["act"].untyped_storage().data_ptr()


def test_the_order_of_layers_is_that_of_the_loader(path: Path):
    for layers in ((5, 11), (11, 5)):

        def made(layers: tuple[int, int] = layers) -> StoreLoader:
            return StoreLoader(path, layer=layers, stack_layers=True, batch_size=8)

        with (
            layer_batches(made()) as batches,
            multi_hook_data_provider(made()) as hooks,
        ):
            acts, named = next(batches), next(hooks)
            names = [f"blocks.{layer}.hook_resid_post" for layer in layers]
            assert acts[0, :, 2].tolist() == [(5, 11).index(layer) for layer in layers]
            assert list(named) == names
            for at, name in enumerate(names):
                assert torch.equal(named[name], acts[:, at])


def test_checkpoints_that_are_none_say_what_to_do(path: Path, tmp_path: Path):
    with data_provider(StoreLoader(path, layer=5, batch_size=8)) as provider:
        error = refused(lambda: provider.save_to_checkpoint(tmp_path / "nowhere"))
        assert error.where == str(tmp_path / "nowhere" / STATE_NAME)
        error = refused(lambda: provider.load_from_checkpoint(tmp_path))
        assert error.where == str(tmp_path / "saev_store_provider.json")
        assert error.message == "the checkpoint does not say which batch comes next"
        (tmp_path / STATE_NAME).write_text("{")
        error = refused(lambda: provider.load_from_checkpoint(str(tmp_path)))
        assert (type(error), error.where, error.remedy) == (
            ArgumentError,
            str(tmp_path / STATE_NAME),
            "Use another checkpoint.",
        )
        provider.save_to_checkpoint(str(tmp_path))
        assert [file.name for file in tmp_path.iterdir()] == [STATE_NAME]
        provider.load_from_checkpoint(str(tmp_path))


def test_stores_that_do_not_fit_saelens(path: Path):
    store = ShardStore.open(path)
    given = {
        "hook_name": "blocks.5.hook_resid_post",
        "context_size": N_TOKENS,
        "d_in": D_MODEL,
        "device": "cpu",
        "dtype": torch.float32,
    }
    for changed, where, message in (
        ({"hook_name": "x"}, "activations", "no layer of the store is 'x'; they are ['blocks.5.hook_resid_post', 'blocks.11.hook_resid_post']"),
        ({"context_size": 6}, "activations", "context_size and d_in are (6, 8); those of the store are (7, 8)"),
        ({"d_in": 9}, "activations", "context_size and d_in are (7, 9); those of the store are (7, 8)"),
    ):  # fmt: skip
        into = SimpleNamespace(**(given | changed), current_row_idx=3)
        error = refused(lambda into=into: use_store(into, store))
        assert (type(error), error.where, error.message) == (ArgumentError, where, message)
        assert into.current_row_idx == 3
    into = SimpleNamespace(**given, current_row_idx=3)
    use_store(into, store)
    assert (into.current_row_idx, len(into.cached_activation_dataset)) == (0, N_EXAMPLES)
    assert into.cached_activation_dataset.column_names == ["blocks.5.hook_resid_post"]


def test_errors_of_crosscoders(path: Path):
    store = ShardStore.open(path)
    error = refused(lambda: PairedActivations(pair(store, store).sel(layer_a="all", layer_b=5)))
    assert (error.where, "of one layer of each store" in error.message) == ("rows", True)


def test_what_dictionary_learning_is_told_of_other_settings(path: Path):
    """None of them the default."""
    given = {
        "layer": (11, 5),
        "batch_size": 4,
        "dtype": "float16",
        "tokens": "all",
        "normalize": "scale_norm",
        "seed": 3,
    }
    loader = StoreLoader(path, **given)
    with activation_buffer(loader) as buffer:
        told = buffer.config
    assert {name: told[name] for name in ("dtype", "tokens", "normalize", "seed", "out_batch_size")} == {
        "dtype": "float16", "tokens": "all", "normalize": "scale_norm", "seed": 3, "out_batch_size": 4,
    }  # fmt: skip
    assert told["layers"] == ["11", "5"]
    assert told["scale"] == loader.scale != 1
    assert told["device"] == "cpu"


@pytest.mark.parametrize("wrong", [None, 5, "x", [1], StoreLoader], ids=str)
@pytest.mark.parametrize(
    "call",
    [
        data_provider, multi_hook_data_provider, activation_buffer, layer_batches,
    ],
    ids=["data_provider", "multi_hook_data_provider", "activation_buffer", "layer_batches"],
)  # fmt: skip
def test_what_is_no_loader(call: Callable[[object], object], wrong: object) -> None:
    found = refused(lambda: call(wrong))
    assert (type(found), found.where) == (ArgumentError, "loader")


def test_what_is_no_loader_of_one_store(path: Path) -> None:
    store = ShardStore.open(path)
    loader = StoreLoader(pair(store, store).sel(layer_a=5, layer_b=5), batch_size=4)
    for call in (multi_hook_data_provider, activation_buffer):
        found = refused(lambda call=call: call(loader))
        assert (type(found), found.where) == (ArgumentError, "loader")


@pytest.mark.parametrize("names", [5, [1, 2], 1.5], ids=str)
def test_names_of_hooks_are_a_list_of_texts(path: Path, names: object) -> None:
    loader = StoreLoader(path, layer=(5, 11), batch_size=4, stack_layers=True)
    found = refused(lambda: multi_hook_data_provider(loader, names))
    assert (type(found), found.where) == (ArgumentError, "hook_names")


@pytest.mark.parametrize("wrong", [5, 1.5, b"x"])
def test_what_is_no_path_of_a_checkpoint(path: Path, wrong: object) -> None:
    provider = data_provider(StoreLoader(path, layer=5, batch_size=4))
    for call in (provider.save_to_checkpoint, provider.load_from_checkpoint):
        assert refused(lambda call=call: call(wrong)).where == "checkpoint_path"


def test_use_store_says_which_of_its_arguments_is_wrong(path: Path) -> None:
    store = ShardStore.open(path)
    assert refused(lambda: use_store(SimpleNamespace(hook_name="x"), str(path))).where == "store"
    assert refused(lambda: use_store(store, store)).where == "activations"
