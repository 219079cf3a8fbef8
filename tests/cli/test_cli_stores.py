"""One scenario of each command that reads or copies stores: output, JSON keys, exit codes."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors_files import safetensors
from token_stores import token_store
from viewed_stores import store_of, structured

from saev_store import ShardStore

N, LAYERS, TOKENS, D_MODEL = 7, 3, 5, 8
DATA = Path(__file__).resolve().parents[1] / "data"


@pytest.fixture(scope="module")
def acts() -> np.ndarray:
    return structured(N, LAYERS, TOKENS, D_MODEL)


@pytest.fixture
def folder(tmp_path: Path, acts: np.ndarray) -> Path:
    labels = np.arange(N * (TOKENS - 1), dtype=np.uint8).reshape(N, TOKENS - 1)
    return store_of(tmp_path / "stores", acts, labels=labels)


def test_info_describes_a_store(run, folder, acts):
    code, out, err = run("info", folder)
    assert (code, err) == (0, "")
    assert folder.name in out
    found = run("info", folder, "--json").json
    assert set(found) == {
        "url", "name", "hash", "protocol", "family", "ckpt", "dataset", "dims", "shape", "dtype", "layers",
        "content_tokens_per_example", "cls_token", "n_shards", "examples_per_shard", "nbytes", "nbytes_by_dtype", "token_arrays",
        "labels", "engine", "problems",
    }  # fmt: skip
    assert (found["shape"], found["layers"], found["nbytes"]) == ([N, LAYERS, TOKENS, D_MODEL], [0, 1, 2], acts.nbytes)
    assert (found["name"], found["labels"], found["problems"]) == (folder.name, True, [])
    assert found["token_arrays"] == [{"name": "labels", "dtype": "uint8", "nbytes": N * (TOKENS - 1)}]
    (folder / "acts000001.bin").unlink()
    (folder / "labels.bin").write_bytes(b"x")
    found = run("info", folder, "--json").json
    assert {problem["kind"] for problem in found["problems"]} >= {"missing_shard"}
    assert found["token_arrays"] == []
    assert "acts000001.bin" in run("info", folder).out


def test_info_and_validate_describe_data_sets(run, tmp_path):
    shutil.copytree(DATA / "mmididx/core_seed_example_3_4_2_int32", tmp_path / "tokens")
    index = tmp_path / "tokens/data.idx"
    assert "3 samples" in run("info", index).out
    assert run("info", index, "--json").json["format"] == "mmididx"
    assert run("validate", index, "--json").json["ok"] is True
    assert run("validate", index, "--scheduler", "tcp://a").code == 2
    tokens = index.with_suffix(".bin")
    tokens.write_bytes(tokens.read_bytes()[:-1])
    done = run("validate", index, "--json")
    assert (done.code, done.json["ok"], len(done.json["problems"]) > 0) == (1, False, True)
    assert run("info", tmp_path / "nix.idx").code == 1
    assert run("info", tmp_path).code == 1


def test_estimate_shows_each_dtype(run, folder, acts):
    found = run("estimate", folder, "--json").json
    assert (found["url"], found["dtype"], list(found["dtypes"])) == (
        str(folder),
        "float32",
        ["float32", "bfloat16", "float16"],
    )
    for dtype, entry in found["dtypes"].items():
        assert entry["vectors_nbytes"] == acts.nbytes // (1 if dtype == "float32" else 2)
    assert found["read"]["bytes_wanted"] == acts.nbytes
    lines = run("estimate", folder).out.splitlines()
    assert [line.split()[0] for line in lines] == ["dtype", "float32", "bfloat16", "float16"]
    assert list(run("estimate", folder, "--dtype", "float16", "--json").json["dtypes"]) == ["float16"]


def test_ls_lists_stores_in_every_state(run, folder, tmp_path):
    root = folder.parent
    shutil.copytree(folder, root / ("b" * 64))
    (root / ("b" * 64) / "acts000000.bin").unlink()
    (root / "broken").mkdir()
    (root / "broken/metadata.json").write_text("{}")
    found = run("ls", root, "--json").json
    assert set(found) == {"root", "stores"}
    by_name = {entry["name"]: entry for entry in found["stores"]}
    assert (by_name[folder.name]["state"], by_name["broken"]["state"]) == ("complete", "broken")
    assert set(by_name[folder.name]) == {
        "name", "url", "state", "note", "protocol", "family", "ckpt", "shape", "layers", "nbytes",
    }  # fmt: skip
    lines = run("ls", root).out.splitlines()
    assert len(lines) == 1 + len(found["stores"])
    assert lines[0].split() == ["store", "shape", "layers", "size", "protocol", "model", "state"]
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "empty", folder):
        assert run("ls", place).code == 0
        assert run("ls", place, "--json").json["stores"] == []
    assert run("ls", tmp_path / "nix").code == 1


def test_ls_shows_how_far_unfinished_stores_are(run, tmp_path):
    from saev_store import new_metadata

    metadata = new_metadata(
        family="gpt2", ckpt="x", layers=(0,), content_tokens_per_example=4, cls_token=False, d_model=4, n_examples=8,
        max_tokens_per_shard=8,
    )  # fmt: skip
    writer = ShardStore.create(tmp_path, metadata, progress=False)
    writer.append(np.ones((4, 1, 4, 4), np.float32))
    with pytest.raises(RuntimeError, match="stop"), writer:
        raise RuntimeError("stop")
    (entry,) = run("ls", tmp_path, "--json").json["stores"]
    assert entry["state"] == "unfinished"
    assert "of 8 examples" in entry["note"]
    assert entry["note"] in run("ls", tmp_path).out


def test_head_shows_vectors_with_what_is_recorded(run, folder, acts, tmp_path):
    found = run("head", folder, "-n", 100, "--layer", 2, "--tokens", "special", "--json").json
    assert (found["url"], found["layer"], found["tokens"]) == (str(folder), 2, "special")
    assert [(row["example_idx"], row["token_idx"]) for row in found["vectors"]] == [(i, -1) for i in range(N)]
    np.testing.assert_array_equal([row["values"] for row in found["vectors"]], acts[:, 2, 0])
    np.testing.assert_allclose(
        [row["norm"] for row in found["vectors"]], np.linalg.norm(acts[:, 2, 0].astype(float), axis=1)
    )
    lines = run("head", folder, "-n", 2).out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["example", "token"], ["0", "CLS"], ["0", "0"]]
    made = token_store(tmp_path, arrays={"token_ids": "int32"})
    done = run("head", made.path, "-n", 6, "--token-array", "token_ids", "--json").json
    for row in done["vectors"]:
        at = row["example_idx"], row["token_idx"]
        assert row["token_arrays"] == {"token_ids": None if at[1] < 0 else made.arrays["token_ids"][at]}
    assert run("head", made.path, "--token-array", "token_ids").out.splitlines()[2].split()[:3] == ["0", "CLS", "-"]


def test_head_shows_numbers_that_are_not_finite_as_null(run, tmp_path):
    acts = np.ones((1, 1, 2, 8), np.float32)
    acts[0, 0, 0, :2] = np.nan, np.inf
    row = run("head", store_of(tmp_path, acts, cls=False), "-n", 1, "--json").json["vectors"][0]
    assert (row["values"][:3], row["norm"]) == ([None, None, 1], None)


def test_validate_exits_with_1_for_damage(run, folder):
    code, out, err = run("validate", folder)
    assert (code, err) == (0, "")
    assert str(folder) in out
    assert run("validate", folder, "--deep", "--no-progress", "--json").json["ok"] is True
    shard = folder / "acts000001.bin"
    shard.write_bytes(b"\1" + shard.read_bytes()[1:])
    assert run("validate", folder).code == 0
    done = run("validate", folder, "--deep", "--json")
    assert (done.code, done.json["ok"]) == (1, False)
    assert [problem["where"] for problem in done.json["problems"]] == ["acts000001.bin"]
    shard.unlink()
    assert run("validate", folder).code == 1


def test_stats_are_those_of_the_library(run, folder, acts):
    found = run("stats", folder, "--no-save", "--no-progress", "--json").json
    assert found == ShardStore.open(folder).stats(save=False, progress=False).to_dict()
    assert not (folder / "stats.json").exists()
    assert run("stats", folder, "--sample", 3, "--seed", 1).code == 0
    assert (folder / "stats.json").exists()


def test_copy_prints_the_address_of_the_copy(run, folder, tmp_path):
    code, out, _ = run("copy", folder, tmp_path / "to", "--no-progress")
    assert (code, out) == (0, f"{tmp_path / 'to' / folder.name}\n")
    for path in folder.glob("*.bin"):
        assert (tmp_path / "to" / folder.name / path.name).read_bytes() == path.read_bytes()
    part = run("copy", folder, tmp_path / "to", "--layers", "2,0", "--tokens", "content", "--json").json
    assert ShardStore.open(part["url"]).shape == (N, 2, TOKENS - 1, D_MODEL)
    half = run("copy", folder, tmp_path / "to", "--dtype", "bfloat16", "--json").json
    assert ShardStore.open(half["url"]).dtype.name == "bfloat16"
    for wrong in (("--layers", "two"), ("--layers", "99"), ("--dst-option", "x"), ("--protocol", "9")):
        assert run("copy", folder, tmp_path / "to", *wrong).code == 2, wrong


def test_import_makes_a_store_of_a_cache(run, tmp_path):
    acts = np.random.default_rng(0).standard_normal((5, 2, 8)).astype(np.float16)
    (tmp_path / "hs").mkdir()
    (tmp_path / "hs/hs_0.safetensors").write_bytes(safetensors({"hidden_states": acts, "token_ids": np.arange(5)}))
    command = (
        "import", tmp_path / "hs", "--to", tmp_path, "--family", "llama", "--ckpt", "tiny", "--layer-ids", "3,18", "--context", "5",
        "--no-progress",
    )  # fmt: skip
    code, out, _ = run(*command)
    store = ShardStore.open(out.strip())
    assert (code, store.layers) == (0, (2, 17))
    assert store.document(0, dtype="stored").acts.tobytes() == acts.swapaxes(0, 1).tobytes()
    assert run(*command, "--json").json == {"url": store.url, "shape": [1, 2, 5, 8], "dtype": "float16"}
    for wrong in (("--layers", "two"), ("--layer-ids", "two"), ("--format", "parquet"), ("--context", "0")):
        assert run(*command, *wrong).code == 2, wrong


def test_clean_removes_what_killed_writers_left(run, folder):
    hidden = folder.parent / f".{folder.name}.tmp"
    left = folder / ".acts000000.bin.saev-store-tmp-1234"
    left.write_bytes(b"x" * 10)
    done = run("clean", folder.parent, "--dry-run", "--older-than", "0", "--json")
    assert done.code == 0
    assert set(done.json) == {"url", "dry_run", "leftovers"}
    assert run("clean", folder.parent, "--older-than", "2d").code == 0
    assert left.exists() or not hidden.exists()
    assert run("clean", folder.parent, "--older-than", "0s").code == 0
    assert run("clean", folder.parent, "--older-than", "0").out == "Nothing to clean.\n"
    assert run("clean", folder.parent / "nix").code == 1
    assert ShardStore.open(folder).validate(deep=True, progress=False).ok


def test_options_of_a_file_system_reach_it(run, tmp_path):
    error = run("info", "s3://bucket/x", "-o", "anon=true", "-o", "nix_option=[1", "--json").error
    assert error["kind"] in {"argument", "transport"}
