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


@pytest.fixture
def acts() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((11, 2, 4, 8)).astype(np.float32)


def test_an_array_becomes_a_store_whose_address_is_printed(run, acts: np.ndarray, tmp_path: Path):
    np.save(tmp_path / "acts.npy", acts)
    command = ("import", tmp_path / "acts.npy", "--to", tmp_path / "out", "--family", "vit", "--ckpt", "tiny")
    code, out, err = run(*command, "--layers", "2:mlp_out,5")
    assert code == 0
    assert re.fullmatch(rf"imported 11 examples \(2\.8 kB\) in .+ s, .+ examples/s, at {re.escape(out)}", err)
    store = ShardStore.open(out.strip())
    assert store[...].tobytes() == acts.tobytes()
    assert store.layout.layer_keys == ((2, "mlp_out"), (5, "resid_post"))
    code, again, _ = run(*command, "--layers", "2:mlp_out,5")
    assert (code, again) == (0, out)
    code, _, err = run(*command, "--layers", "2:mlp_out,5", "--no-resume")
    assert code == 1
    assert "complete" in err
    code, out, _ = run(
        *command,
        "--layers",
        "5,6",
        "--dims",
        "example,layer,token,d_model",
        "--cls-token",
        "--dtype",
        "bfloat16",
        "--json",
    )
    document = json.loads(out)
    assert (code, document["shape"], document["dtype"]) == (0, [11, 2, 4, 8], "bfloat16")
    assert ShardStore.open(document["url"]).layout.cls_token


@pytest.mark.parametrize("kind", ["numbers", "dtype"])
def test_a_file_that_cannot_be_imported_is_named(kind: str, run, acts: np.ndarray, tmp_path: Path):
    found = {"numbers": np.where(acts > 0, acts, np.nan), "dtype": acts.astype(complex)}[kind]
    np.save(tmp_path / "acts.npy", found)
    arguments = ("--to", tmp_path / "out", "--family", "vit", "--ckpt", "tiny", "--layers", "2,5")
    code, out, err = run("import", tmp_path / "acts.npy", *arguments)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"error: {tmp_path / 'acts.npy'}: ")


def test_hidden_states_become_a_store(run, tmp_path: Path):
    acts = np.random.default_rng(0).standard_normal((5, 2, 8)).astype(np.float16)
    (tmp_path / "hs").mkdir()
    (tmp_path / "hs" / "hs_0.safetensors").write_bytes(safetensors({"hidden_states": acts, "token_ids": np.arange(5)}))
    code, out, _ = run(
        "import", tmp_path / "hs", "--to", tmp_path, "--family", "llama", "--ckpt", "tiny", "--layer-ids", "3,18",
        "--context", "5", "--max-tokens-per-shard", "10", "--dataset", "/data/text",
    )  # fmt: skip
    store = ShardStore.open(out.strip())
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
        (("--format", "npy", "--context", "-1"), 2, "error: --context: it is -1; it must be more than 0\n"),
        (("--format", "hidden-states"), 2, "--context"),
        (("--format", "saelens", "--bos-token", "1"), 2, "--bos-token"),
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
