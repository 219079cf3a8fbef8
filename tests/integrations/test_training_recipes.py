"""The code of docs/integrations.md runs with stand-ins for the tools, and hands out what the stores hold."""

from __future__ import annotations

import argparse
import itertools
import json
import pickle
import sys
import types
from abc import ABC
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from page_blocks import page_block, smaller
from row_stores import row_store, rows_of

torch = pytest.importorskip("torch")

from saev_store import ShardStore, new_metadata
from saev_store.integrations.saelens import multi_hook_data_provider
from saev_store.torch import StoreLoader

PAGE, BATCH = "integrations.md", 32


class Trainer:
    """What Llamascopium's trainer does with a stream: it looks at the first batch, then iterates anew."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def fit(self, sae: object, stream: Any) -> None:
        first = next(iter(stream))
        self.seen += list(stream)
        assert all(torch.equal(first[name], self.seen[0][name]) for name in first)


def test_a_stream_for_llamascopium_gives_every_batch_once_and_goes_on(tmp_path: Path):
    path = row_store(tmp_path, protocol="3.0", token_arrays={"token_ids": "int32"})
    hooks = ["blocks.5.hook_resid_post", "blocks.11.hook_resid_post"]
    options = {"layer": (5, 11), "stack_layers": True, "batch_size": BATCH, "drop_last": True}
    names: dict[str, Any] = {"sae": None, "trainer": Trainer()}
    exec(page_block(PAGE, "Llamascopium", "class ActivationStream"), names)
    script = page_block(PAGE, "Llamascopium", "trainer.fit")
    exec(
        smaller(script, {"/data/shards/941cc259": str(path), "4096": str(BATCH), "n_batches=100": "n_batches=13"}),
        names,
    )
    loader = StoreLoader(path, token_arrays=("token_ids",), **options)
    stream = names["ActivationStream"](loader, hooks)
    stream.state = json.loads(json.dumps(names["state"]))
    for _ in range(2):  # each iteration begins at the state
        rest = list(itertools.islice(stream, 5))
    with multi_hook_data_provider(StoreLoader(path, **options)) as provider:
        wanted = list(itertools.islice(provider, 18))  # of two epochs
    seen = names["trainer"].seen
    assert len(seen) == 13
    for batch, expected in zip([*seen, *rest], wanted, strict=True):
        assert [*batch] == [*hooks, "tokens", "mask"]
        assert all(torch.equal(batch[hook], expected[hook]) for hook in hooks)
        assert batch["tokens"].dtype == torch.int64 and batch["mask"].dtype == torch.bool
        assert batch["mask"].shape == (BATCH,) and batch["mask"].all()
    rows = rows_of(seen[0][hooks[0]].numpy())
    assert seen[0]["tokens"].tolist() == [token for _, token in rows]
    rows = rows_of(rest[0][hooks[0]].numpy())
    assert rest[0]["tokens"].tolist() == [7 * example + token for example, token in rows]
    names["loader"].close()
    loader.close()


def test_sources_and_targets_for_crosslayer_coding_are_of_the_same_tokens(tmp_path: Path):
    metadata = new_metadata(
        family="gpt2", ckpt="tiny", layers=(0, 0, 1, 1, 2, 2), hook_points=("resid_mid", "mlp_out") * 3, d_model=8,
        content_tokens_per_example=4, cls_token=False, n_examples=20, max_tokens_per_shard=7 * 24,
    )  # fmt: skip
    acts = np.random.default_rng(0).standard_normal(metadata.layout.shape, np.float32)
    acts[..., 0] = np.arange(80).reshape(20, 1, 4)  # the row
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(acts)
    names: dict[str, Any] = {}
    places = {"/data/shards/5cd93f10": str(tmp_path / metadata.hash), "range(12)": "range(3)", "4096": str(BATCH)}
    exec(smaller(page_block(PAGE, "crosslayer-coding", "def get_batch"), places), names)
    seen = []
    for _ in range(2):
        sources, targets = names["get_batch"]()
        assert [*sources] == [*targets] == [0, 1, 2]
        rows = sources[0][:, 0].numpy().astype(int)
        seen += rows.tolist()
        for found, first in ((sources, 0), (targets, 1)):
            for label, values in found.items():
                np.testing.assert_array_equal(values, acts[rows // 4, 2 * label + first, rows % 4])
    assert len(set(seen)) == 2 * BATCH
    names["batches"].close()


def test_a_transfer_for_hs_connectors_gives_documents_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ids, lengths = (0, 3, 4, 9), (5, 1, 8, 6)
    metadata = new_metadata(
        family="qwen", ckpt="random", layers=(1, 7), d_model=8, content_tokens_per_example=4, cls_token=False, n_examples=5,
        dtype="bfloat16", text={"layout": "stream", "bos": False},
        token_arrays={"token_ids": "int32", "document_ids": "int64", "positions": "int32"},
    )  # fmt: skip
    acts = torch.randn(20, 2, 8).bfloat16()
    with ShardStore.create(tmp_path, metadata, progress=False) as writer:
        writer.append(
            acts.reshape(5, 4, 2, 8).swapaxes(1, 2),
            token_ids=np.arange(20).reshape(5, 4),
            document_ids=np.repeat(ids, lengths).reshape(5, 4),
            positions=np.concatenate([np.arange(length) for length in lengths]).reshape(5, 4),
        )
    backends, transfers = type("HiddenStatesBackend", (), {"registry": {}}), type("HiddenStatesTransfer", (ABC,), {})
    stand_in = types.SimpleNamespace(HiddenStatesBackend=backends, HiddenStatesTransfer=transfers)
    monkeypatch.setitem(sys.modules, "hs_connectors", stand_in)
    module = types.ModuleType("recipe_of_hs_connectors")  # a module, for pickle to find the class
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(page_block(PAGE, "hs-connectors", "HiddenStatesBackend.registry"), vars(module))
    backend = backends.registry["saev_store"]
    parser = argparse.ArgumentParser()
    backend.add_train_args(parser)
    for given, data in (([], str(tmp_path / metadata.hash)), (["--saev-store", str(tmp_path / metadata.hash)], "none")):
        transfer = pickle.loads(pickle.dumps(backend.from_train_args(parser.parse_args(given), data)))
        assert isinstance(transfer, transfers)
        transfer.setup()
        transfer.delete("handle")
        with pytest.raises(NotImplementedError):
            transfer.get_generated({})
        ends = np.cumsum(lengths)
        for number in range(11):
            sample = transfer.get_cached(number)
            if number not in ids:
                assert sample is None
                continue
            end = int(ends[ids.index(number)])
            some = slice(end - lengths[ids.index(number)], end)
            assert torch.equal(sample["hidden_states"], acts[some])
            assert sample["token_ids"].dtype == torch.int64
            assert sample["token_ids"].tolist() == list(range(some.start, some.stop))
