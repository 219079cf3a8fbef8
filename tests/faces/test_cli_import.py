"""`saev-store import` on the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors_files import safetensors

from saev_store import ShardStore
from saev_store.sources import caches


def test_hidden_states_become_a_store(run, tmp_path: Path):
    acts = np.random.default_rng(0).standard_normal((5, 2, 8)).astype(np.float16)
    (tmp_path / "hs").mkdir()
    (tmp_path / "hs" / "hs_0.safetensors").write_bytes(safetensors({"hidden_states": acts, "token_ids": np.arange(5)}))
    command = (
        "import", tmp_path / "hs", "--to", tmp_path, "--family", "llama", "--ckpt", "tiny", "--layer-ids", "3,18",
        "--context", "5", "--max-tokens-per-shard", "10", "--dataset", "/data/text",
    )  # fmt: skip
    code, out, err = run(*command)
    assert re.fullmatch(rf"imported 1 example \(.+\) in .+, at {re.escape(out)}", err)
    store = ShardStore.open(out.strip())
    assert run(*command)[:2] == (0, out)
    assert run(*command, "--no-resume")[0] == 1
    assert json.loads(run(*command, "--json")[1])["shape"] == [1, 2, 5, 8]
    assert (code, store.layers, store.metadata.dataset) == (0, (2, 17), "/data/text")
    assert store.document(0, dtype="stored").acts.tobytes() == acts.swapaxes(0, 1).tobytes()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 1, "no cache of a known format"),
        (("--format", "parquet"), 2, "'parquet'"),
        (("--layers", "two"), 2, "--layers"),
        (("--layer-ids", "two"), 2, "--layer-ids"),
        (("--format", "hidden-states", "--context", "0"), 2, "error: --context: it is 0; it must be more than 0\n"),
        (("--format", "hidden-states"), 2, "--context"),
        (("--format", "saelens", "--layer-ids", "1"), 2, "--layer-ids"),
    ],
)
def test_mistakes_name_the_option(arguments: tuple[str, ...], code: int, message: str, run, tmp_path: Path):
    found, out, err = run("import", tmp_path, "--to", tmp_path, "--family", "f", "--ckpt", "c", *arguments)
    assert (found, out) == (code, "")
    assert message in err


def test_ctrl_c_says_that_the_same_command_continues(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(caches, "import_cache", interrupted)
    code, _, err = run("import", tmp_path, "--to", tmp_path, "--family", "f")
    assert (code, err) == (130, "interrupted; the same command continues\n")
