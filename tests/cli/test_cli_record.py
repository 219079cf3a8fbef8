"""`record`, `repair`, `finalize` and `demo`: options, the TOML file, parts, JSON keys, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_models import tiny_language, tiny_vision
from viewed_stores import store_of, structured

import saev_store.record
from saev_store import ShardStore

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TEXTS = ["the cat sat", "on the mat and the cat sat on the mat", "cat"]


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer, as `save_pretrained` writes them, and a corpus."""
    folder = tmp_path_factory.mktemp("language")
    tiny_language("Qwen3ForCausalLM").save_pretrained(folder)
    words = ["<pad>", "<s>", "<unk>", "the", "cat", "sat", "on", "mat", "and"]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", unk_token="<unk>").save_pretrained(
        folder
    )
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return folder


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def options(folder: Path, root: Path) -> list[object]:
    return [
        "--model", folder, "--text", folder / "corpus.jsonl", "--context", 4, "--layers", "2,0", "--batch-size", 3, "--to", root,
        "--no-progress",
    ]  # fmt: skip


def test_record_makes_the_store_of_the_library(run, language, tmp_path):
    done = run(
        "record",
        *options(language, tmp_path / "a"),
        "--hook-points",
        "mlp_out,resid_post",
        "--dtype",
        "bfloat16",
        "--json",
    )
    assert set(done.json) == {"url", "shape", "dtype", "layers", "nbytes"}
    assert (done.json["shape"], done.json["dtype"], done.json["layers"]) == ([5, 4, 5, 32], "bfloat16", [2, 2, 0, 0])
    tokenizer = transformers.AutoTokenizer.from_pretrained(language)
    source = saev_store.record.Texts(TEXTS, tokenizer, context=4, batch_size=3)
    model = tiny_language("Qwen3Model")
    expected = saev_store.record.record(
        model,
        source,
        tmp_path / "b",
        layers=(2, 0),
        hook_points=("mlp_out", "resid_post"),
        dtype="bfloat16",
        ckpt="x",
        progress=False,
    )
    np.testing.assert_array_equal(ShardStore.open(done.json["url"])[:], expected[:])


def test_record_takes_a_file_whose_keys_options_override(run, language, tmp_path):
    (tmp_path / "r.toml").write_text(
        f"model = {json.dumps(str(language))}\ntext = {json.dumps(str(language / 'corpus.jsonl'))}\ncontext = 4\nlayers = [2, 0]\n"
        f'batch_size = 3\nto = {json.dumps(str(tmp_path / "wrong"))}\nbos = "none"\nlayout = "stream"\npack = false\n'
    )
    code, out, _ = run("record", "--config", tmp_path / "r.toml", "--to", tmp_path / "to", "--no-progress")
    assert code == 0
    store = ShardStore.open(out.strip())
    assert (store.layers, store.metadata.text["layout"], store.url.startswith(str(tmp_path / "to"))) == (
        (2, 0),
        "stream",
        True,
    )
    assert not (tmp_path / "wrong").exists()
    again = run(
        "record", "--config", tmp_path / "r.toml", "--to", tmp_path / "to", "--no-progress", "--recheck", "close"
    )
    assert (again.code, again.out) == (0, out)
    for wrong in (
        "layer = [1]",
        "config = 'x'",
        "x",
        'model = "x"\ncontext = "y"',
        'model = "x"\nlayout = "z"',
        'model = "x"\nbatch_size = 0',
    ):
        (tmp_path / "w.toml").write_text(wrong)
        assert run("record", "--config", tmp_path / "w.toml", "--to", tmp_path, "--layers", "0").code == 2, wrong
    assert run("record", "--config", tmp_path / "nix.toml").code == 1


def test_record_of_images_makes_a_store_with_its_grid(run, tmp_path):
    image = pytest.importorskip("PIL.Image")
    tiny_vision("ViTForImageClassification").save_pretrained(tmp_path / "model")
    transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "model")
    (tmp_path / "images").mkdir()
    for number in range(3):
        image.fromarray(np.full((40, 50, 3), 40 * number, np.uint8)).save(tmp_path / f"images/{number}.png")
    bad = tmp_path / "images/3.png"
    bad.write_bytes(b"nothing")
    command = (
        "record", "--model", tmp_path / "model", "--images", tmp_path / "images", "--layers", "0,-1", "--to", tmp_path, "--batch-size",
        "2", "--no-progress",
    )  # fmt: skip
    assert run(*command).code == 1
    bad.unlink()
    found = run(*command, "--json").json
    assert found["shape"][:2] == [3, 2]
    assert "patches" in ShardStore.open(found["url"]).metadata.data["content"]
    assert run(*command, "--context", 5).code == 2


def test_record_refuses_options_without_meaning(run, language, tmp_path):
    given = options(language, tmp_path)
    for wrong in (
        given[2:], [*given[:2], *given[4:]], [*given, "--tokens", "x"], [*given, "--processor", "x"], [*given[:4], *given[6:]],
        [*given, "--part", "5/4"], [*given, "--part", "x"], [*given, "--layers", "x"],
        [*given[:6], *given[8:]],
    ):  # fmt: skip
        assert run("record", *wrong).code == 2, wrong
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_record_dry_run_shows_what_it_takes(run, language, tmp_path, monkeypatch):
    found = run("record", *options(language, tmp_path / "x"), "--dry-run", "--json")
    assert found.code == 0
    assert {"nbytes", "fits"} <= set(found.json)
    assert run("record", *options(language, tmp_path / "x"), "--dry-run").code == 0
    assert not (tmp_path / "x").exists()
    estimate = SimpleNamespace(fits=False, to_dict=dict)
    monkeypatch.setattr(saev_store.record, "estimate_recording", lambda *_, **__: estimate)
    assert run("record", *options(language, tmp_path / "x"), "--dry-run").code == 1


def test_parts_are_published_by_the_last_and_by_finalize(run, language, tmp_path):
    given = [*options(language, tmp_path), "--max-tokens-per-shard", 20]
    found = run("record", *given, "--part", "1/2", "--json")
    assert found.code == 0
    assert set(found.json) == {"url", "published", "part", "examples_left"}
    assert (found.json["published"], found.json["part"]) == (False, "1/2")
    code, out, err = run("record", *given, "--part", "1/2")
    assert (code, out, "not recorded yet" in err) == (0, f"{found.json['url']}\n", True)
    assert run("finalize", found.json["url"]).code == 1
    assert run("record", *given, "--part", "2/2").code == 0
    done = run("finalize", found.json["url"], "--json")
    assert done.json == {"url": found.json["url"], "published": True, "shape": [5, 2, 5, 32]}
    assert run("finalize", found.json["url"]).out == f"{found.json['url']}\n"


def test_repair_records_again_what_is_lost(run, language, tmp_path):
    given = options(language, tmp_path)
    url = run("record", *given).out.strip()
    shard = Path(url) / "acts000000.bin"
    before = shard.read_bytes()
    shard.unlink()
    model = [*given[:6], *given[8:10], "--no-progress"]
    done = run("repair", url, *model, "--json")
    assert (done.code, shard.read_bytes()) == (0, before)
    assert run("repair", url, *model, "--recheck", "close").code == 0
    assert run("repair", url).code == 2
    other = store_of(tmp_path / "other", structured(3, 1, 4, 8))
    assert run("repair", other, "--json").error["kind"] == "resume"
    assert run("repair", tmp_path / "nix").code == 1


def test_demo_prints_its_steps(run, tmp_path, monkeypatch):
    results = [SimpleNamespace(ok=ok, seconds=3.0, to_dict=lambda: {"ok": True}) for ok in (True, True, False)]

    def run_demo(out: Path, *, device: str | None, progress: bool | None, say: object) -> SimpleNamespace:
        assert (out, device, progress) == (tmp_path, "cpu", False)
        say("a step")
        return results.pop(0)

    monkeypatch.setattr(saev_store.record, "run_demo", run_demo)
    command = ("demo", "--out", tmp_path, "--device", "cpu", "--no-progress")
    code, out, _ = run(*command)
    assert (code, out.splitlines()[0], len(out.splitlines())) == (0, "a step", 2)
    assert run(*command, "--json") == (0, '{\n  "ok": true\n}\n', "a step\n")
    assert run(*command).code == 1
