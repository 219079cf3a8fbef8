"""A recording does not depend on how the path of its model is written, or on where the folder lies: digests tell which model it is."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from kill_children import content
from tiny_models import tiny_language

from saev_store import ShardStore
from saev_store.cli import main
from saev_store.errors import ResumeError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from saev_store.record import Texts, _names, load_language_model, repair  # after the check that torch is there
from saev_store.record._names import name_of  # after the check that torch is there
from saev_store.record._recorder import Recorder  # after the check that torch is there


@pytest.fixture
def place(tmp_path: Path, capfd, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a model and its tokenizer in `model`, and a corpus."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    tiny_language("Qwen3ForCausalLM").save_pretrained("model")
    save_tokenizer("model", ["the", "cat", "sat"])
    Path("corpus.jsonl").write_text("".join(json.dumps({"text": "the cat sat " * n}) + "\n" for n in (1, 3, 2)))
    capfd.readouterr()
    return tmp_path


def save_tokenizer(folder: str, words: list[str]) -> None:
    ids = {word: i for i, word in enumerate(["<pad>", "<s>", "<unk>", *words])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", unk_token="<unk>")
    made.save_pretrained(folder)


def options(model: object, place: Path) -> list[object]:
    return ["--model", model, "--text", place / "corpus.jsonl", "--context", 4, "--no-progress"]


def recorded(capfd, model: object, place: Path) -> Path:
    """The folder of the store that the command has recorded or found."""
    more = ["--to", "out", "--layers", "2,0", "--max-tokens-per-shard", 20]
    assert main(["record", *map(str, [*options(model, place), *more])]) == 0
    return Path(capfd.readouterr().out.strip())


SPELLINGS = ["./model", "model/", "../{name}/model", "{place}/model", "{place}/../{name}/./model"]


def spelled(spelling: str, place: Path) -> str:
    return spelling.format(place=place, name=place.name)


def test_a_recording_is_found_however_the_path_is_written(capfd, place: Path, monkeypatch: pytest.MonkeyPatch):
    path = recorded(capfd, "model", place)
    said = ShardStore.open(path).metadata
    assert (said.ckpt, said.text["tokenizer"]["name"]) == ("model", "model")
    monkeypatch.setattr(Recorder, "begin", None)  # the model does not run again
    assert {recorded(capfd, spelled(spelling, place), place) for spelling in SPELLINGS} == {path}
    shutil.move("model", "elsewhere/model")
    assert recorded(capfd, "elsewhere/model", place) == path


@pytest.mark.parametrize("text", ["./corpus.jsonl", ".//corpus.jsonl", "model/../corpus.jsonl"])
def test_a_recording_is_found_however_the_path_of_its_texts_is_written(
    capfd, place: Path, monkeypatch: pytest.MonkeyPatch, text: str
):
    def run(text: str) -> Path:
        options = [
            "--model",
            "model",
            "--text",
            text,
            "--context",
            "4",
            "--to",
            "out",
            "--layers",
            "0",
            "--no-progress",
        ]
        assert main(["record", *options]) == 0
        return Path(capfd.readouterr().out.strip())

    path = run("corpus.jsonl")
    assert ShardStore.open(path).metadata.dataset == "corpus.jsonl"
    monkeypatch.setattr(Recorder, "begin", None)  # the model does not run again
    assert run(text) == path


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_repair_takes_the_folder_however_its_path_is_written(capfd, place: Path, spelling: str):
    path = recorded(capfd, "model", place)
    before = content(path)
    (path / "acts000001.bin").unlink()
    assert main(["repair", *map(str, [path, *options(spelled(spelling, place), place)])]) == 0
    assert content(path) == before


def test_a_repair_takes_an_equal_model_under_any_name_and_no_other_tokenizer(capfd, place: Path):
    path = recorded(capfd, "model", place)
    before = content(path)
    (path / "acts000001.bin").unlink()
    shutil.copytree("model", "other")
    save_tokenizer("other", ["cat", "the", "sat"])
    assert main(["repair", *map(str, [path, *options("other", place)])]) == 1
    assert "text.tokenizer.digest is '" in capfd.readouterr().err
    shutil.move("model", "renamed")
    model, tokenizer = load_language_model("renamed", progress=False)
    texts = Texts(place / "corpus.jsonl", tokenizer, context=4)
    with pytest.raises(ResumeError, match="ckpt is 'model' there, 'renamed' in this call"):
        repair(model, texts, path, ckpt="renamed")
    assert [file.identical for file in repair(model, texts, path).files] == [True]
    assert content(path) == before


@pytest.mark.parametrize("is_finished", [True, False])
def test_what_was_recorded_under_whole_paths_is_found_by_them(
    capfd, place: Path, monkeypatch: pytest.MonkeyPatch, is_finished: bool
):
    """As earlier versions did, which took every name as it was given."""
    with monkeypatch.context() as patched:
        patched.setattr(_names, "name_of", lambda given: given)
        path = recorded(capfd, place / "model", place)
        assert ShardStore.open(path).metadata.ckpt == f"{place}/model"
    if not is_finished:
        before = content(path)
        with monkeypatch.context() as patched:
            patched.setattr(_names, "name_of", lambda given: given)
            patched.setattr(Recorder, "begin", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            shutil.rmtree(path)
            model = str(place / "model")
            arguments = ["--to", "out", "--layers", "2,0", "--max-tokens-per-shard", "20"]
            assert main(["record", *map(str, options(model, place)), *arguments]) == 130
        capfd.readouterr()
        assert recorded(capfd, place / "model", place) == path
        assert content(path) == before
    else:
        monkeypatch.setattr(Recorder, "begin", None)
        assert recorded(capfd, place / "model", place) == path
    assert len(os.listdir("out")) == 1


def test_names_of_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for folder in (
        "org/model",
        "runs/a/checkpoint-500",
        "hub/models--org--name/snapshots/1f2e",
        "checkpoint-x",
        "odd/snapshots/1f",
    ):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    wanted = {
        "org/model": "model",
        "org/model/": "model",
        "org/../org/model": "model",
        "runs/a/checkpoint-500": "a/checkpoint-500",
        "hub/models--org--name/snapshots/1f2e": "org/name",
        "odd/snapshots/1f": "1f",
        "checkpoint-x": "checkpoint-x",
        ".": tmp_path.name,
        "/": "/",
        "": "",
        "gpt2": "gpt2",
        "org/other": "org/other",
    }
    assert {given: name_of(given) for given in wanted} == wanted
    monkeypatch.chdir(tmp_path / "runs/a/checkpoint-500")
    assert name_of(".") == "a/checkpoint-500"
