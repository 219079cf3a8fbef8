"""Samples of a store of texts are the documents' vectors and ids, also in other processes. The package itself: test_training_peers.py."""

from __future__ import annotations

import argparse
import pickle
import sys
import types
from abc import ABC
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from token_stores import token_store

from saev_store import ShardStore, new_metadata  # after the check that torch is there
from saev_store.errors import (  # after the check that torch is there
    ArgumentError,
    LayerNotFoundError,
    MissingDependencyError,
    NotFoundError,
    SelectionError,
)
from saev_store.integrations.hs_connectors import StoreBackend, StoreTransfer, register  # after the check

IDS, LENGTHS, CONTEXT, D_MODEL = (0, 3, 4, 9), (5, 1, 8, 6), 4, 8


def acts_of() -> np.ndarray:
    """(tokens, layers, d_model)."""
    return np.random.default_rng(0).standard_normal((sum(LENGTHS), 3, D_MODEL)).astype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of several lengths, end to end, with numbers that are not all there."""
    n, root = sum(LENGTHS), tmp_path_factory.mktemp("transfer")
    metadata = new_metadata(
        family="qwen", ckpt="random", layers=(7, 1, 1), hook_points=("resid_post", "resid_post", "mlp_out"), d_model=D_MODEL,
        content_tokens_per_example=CONTEXT, cls_token=False, n_examples=n // CONTEXT, max_tokens_per_shard=36, dtype="bfloat16",
        token_arrays={"token_ids": "int32", "document_ids": "int64", "positions": "int32"}, text={"layout": "stream", "bos": False},
    )  # fmt: skip
    with ShardStore.create(root, metadata, progress=False) as writer:
        writer.append(
            acts_of().reshape(-1, CONTEXT, 3, D_MODEL).swapaxes(1, 2),
            token_ids=np.arange(n).reshape(-1, CONTEXT),
            document_ids=np.repeat(IDS, LENGTHS).reshape(-1, CONTEXT),
            positions=np.concatenate([np.arange(length) for length in LENGTHS]).reshape(-1, CONTEXT),
        )
    return root / metadata.hash


def check(transfer: StoreTransfer, layers: list[int]) -> None:
    ends = np.cumsum(LENGTHS)
    for number in (*range(-1, 12), 2**70):
        sample = transfer.get_cached(number)
        if number not in IDS:
            assert sample is None
            continue
        some = slice(ends[IDS.index(number)] - LENGTHS[IDS.index(number)], ends[IDS.index(number)])
        assert sample.keys() == {"hidden_states", "token_ids"}
        assert sample["hidden_states"].dtype == torch.bfloat16 and sample["hidden_states"].is_contiguous()
        assert np.array_equal(sample["hidden_states"].float().numpy(), acts_of()[some][:, layers].astype(np.float32))
        assert sample["token_ids"].dtype == torch.int64
        assert sample["token_ids"].tolist() == list(range(some.start, some.stop))


def parsed(store: Path, *given: str) -> StoreTransfer:
    parser = argparse.ArgumentParser()
    StoreBackend.add_train_args(parser)
    StoreBackend.add_launch_args(parser)
    return StoreBackend.from_train_args(parser.parse_args(given), str(store))


def test_a_sample_is_a_document_with_all_layers_or_some(store: Path):
    check(StoreTransfer(str(store)), [0, 1, 2])
    check(parsed(store), [0, 1, 2])
    check(parsed(Path("nowhere"), "--saev-store", str(store)), [0, 1, 2])
    check(parsed(store, "--saev-store-layers", "1:mlp_out", "7:resid_post"), [2, 0])


def test_a_transfer_is_pickled_before_and_after_it_was_used(store: Path):
    transfer = StoreTransfer(str(store), layers=[(1, "resid_post")])
    for _ in range(2):
        check(pickle.loads(pickle.dumps(transfer)), [1])
        transfer.setup()


@pytest.mark.parametrize("number", ["1", 1.5, None, True, [1]])
def test_the_number_of_a_sample_is_an_integer(store: Path, number: object):
    """None means that there is no such sample."""
    with pytest.raises(ArgumentError, match="file_idx is .*; it must be an integer"):
        StoreTransfer(str(store)).get_cached(number)


def test_labels_may_be_negative(tmp_path: Path):
    written = token_store(tmp_path, layers=(-2, -1), arrays={"token_ids": "int32", "document_ids": "int64"})
    assert parsed(written.path, "--saev-store-layers", "-1")._opened().layers == (-2, -1)


def test_what_a_store_cannot_do_is_an_error(store: Path, tmp_path: Path):
    with pytest.raises(ArgumentError, match="generated"):
        StoreTransfer(str(store)).get_generated({"hidden_states_path": "/tmp/hs"})
    with pytest.raises(ArgumentError, match="server"):
        StoreBackend.build_kv_transfer_config(argparse.Namespace())
    StoreTransfer(str(store)).delete("handle")
    with pytest.raises(NotFoundError):
        StoreTransfer(str(tmp_path / "nix")).setup()
    with pytest.raises(LayerNotFoundError):
        StoreTransfer(str(store), layers=[(2, "mlp_out")]).setup()
    for layer in ("x", "5:", "--2", "-", "5.0", "²", ":mlp_out"):
        with pytest.raises(ArgumentError, match="not a layer"):
            parsed(store, f"--saev-store-layers={layer}")
    metadata = new_metadata(
        family="gpt2",
        ckpt="images",
        layers=(1,),
        content_tokens_per_example=2,
        cls_token=False,
        d_model=4,
        n_examples=1,
    )
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(np.zeros((1, 1, 2, 4), np.float32))
    with pytest.raises(SelectionError, match="document_ids"):
        StoreTransfer(str(tmp_path / metadata.hash)).get_cached(0)


def test_registering_is_done_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "hs_connectors", None)
    with pytest.raises(MissingDependencyError, match="hs_connectors"):
        register()
    backends, transfers = type("HiddenStatesBackend", (), {"registry": {}}), type("HiddenStatesTransfer", (ABC,), {})
    module = types.SimpleNamespace(HiddenStatesBackend=backends, HiddenStatesTransfer=transfers)
    monkeypatch.setitem(sys.modules, "hs_connectors", module)
    assert register() is register() is backends.registry["saev_store"]
    assert isinstance(StoreTransfer("anywhere"), transfers)
    backends.registry["saev_store"] = object
    with pytest.raises(ArgumentError, match="another backend"):
        register()
