"""The code of docs/integrations.md runs with stand-ins for the tools, and hands out what the stores hold."""

from __future__ import annotations

import argparse
import pickle
import sys
import types
from abc import ABC
from pathlib import Path

import numpy as np
import pytest
from page_blocks import page_block

torch = pytest.importorskip("torch")

from saev_store import ShardStore, new_metadata

PAGE = "integrations.md"


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
