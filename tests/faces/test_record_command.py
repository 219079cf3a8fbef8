"""`saev-store record` on a model and a tokenizer in a folder: the store, the flags, the file of options, errors, exit codes."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from kill_children import content
from tiny_models import VOCABULARY, tiny_language, tiny_vision

from saev_store import ShardStore
from saev_store.cli import main
from saev_store.record import Texts, record
from saev_store.record._recorder import Recorder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TEXTS = ["the cat sat", "on the mat and the cat sat on the mat", "cat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer, as `save_pretrained` writes them, and a corpus."""
    folder = tmp_path_factory.mktemp("model")
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


@pytest.fixture
def run(capfd, monkeypatch: pytest.MonkeyPatch):
    """The command in this process, which does not ask the hub: (exit code, standard output, standard error)."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main(["record", "--no-progress", *map(str, arguments)])
        out, err = capfd.readouterr()
        return code, out, err

    return call


def flags(folder: Path, root: Path) -> list[object]:
    return [
        "--model",
        folder,
        "--text",
        folder / "corpus.jsonl",
        "--context",
        4,
        "--layers",
        "2,0",
        "--batch-size",
        3,
        "--to",
        root,
    ]


def test_the_store_is_that_of_the_library(run, folder: Path, tmp_path: Path) -> None:
    code, out, _ = run(
        *flags(folder, tmp_path / "a"), "--hook-points", "mlp_out,resid_post", "--dtype", "bfloat16", "--json"
    )
    assert code == 0
    found = json.loads(out)
    store = ShardStore.open(found["url"])
    assert (found["shape"], found["dtype"], found["layers"]) == ([5, 4, 5, 32], "bfloat16", [2, 2, 0, 0])
    assert found["nbytes"] == store.nbytes
    assert (found["report"]["n_examples"], found["report"]["nbytes"]) == (5, store.nbytes)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    by_library = record(
        tiny_language("Qwen3Model"),
        Texts(TEXTS, tokenizer, context=4, batch_size=3),
        tmp_path / "b",
        layers=(2, 0),
        hook_points=("mlp_out", "resid_post"),
        dtype="bfloat16",
        ckpt="same",
        progress=False,
    )
    assert store[:].tobytes() == by_library[:].tobytes()
    assert store.metadata.ckpt == store.metadata.text["tokenizer"]["name"] == folder.name
    assert store.metadata.text == by_library.metadata.text | {"tokenizer": store.metadata.text["tokenizer"]}
    assert store.metadata.text["tokenizer"]["digest"] == by_library.metadata.text["tokenizer"]["digest"]
    code, out, _ = run(*flags(folder, tmp_path / "a"), "--hook-points", "mlp_out,resid_post", "--dtype", "bfloat16")
    assert (code, out.strip()) == (0, store.url)  # nothing is left to do


def test_the_last_line_says_for_whom_the_model_waited(run, folder: Path, tmp_path: Path) -> None:
    code, _, err = run(*flags(folder, tmp_path))
    assert code == 0
    line = r"recorded 5 examples \(6.4 kB\) in [\d.]+ s, [\d,.]+ examples/s, at .+; the model waited \d+ % of the time for the source and \d+ % for the writer\n"
    assert re.fullmatch(line, err)
    assert re.fullmatch(r"recorded nothing: all examples were there, at .+\n", run(*flags(folder, tmp_path))[2])


def test_ctrl_c_says_that_the_same_command_continues(run, folder: Path, tmp_path: Path, monkeypatch) -> None:
    arguments = [*flags(folder, tmp_path / "a b"), "--batch-size", 1, "--json"]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/saev-store", "record", *map(str, arguments)])
    begin, n_batches = Recorder.begin, iter(range(100))

    def interrupted(self: Recorder, *inputs: object) -> object:
        if next(n_batches) == 1:
            raise KeyboardInterrupt
        return begin(self, *inputs)

    with monkeypatch.context() as changed:
        changed.setattr(Recorder, "begin", interrupted)
        code, out, err = run(*arguments)
    assert (code, out) == (130, "")
    assert f"continue with: saev-store record --model {folder}" in err
    assert f"--to '{tmp_path}/a b' --batch-size 1 --json" in err
    code, out, _ = run(*arguments)
    assert code == 0
    assert ShardStore.open(json.loads(out)["url"]).validate(deep=True, progress=False).ok


def test_nothing_but_the_error_is_on_standard_error(run, folder: Path, tmp_path: Path) -> None:
    code, out, err = run(*flags(folder, tmp_path), "--layers", "3", "--json")
    assert (code, out, json.loads(err)["error"]["where"]) == (2, "", "--layers")
    assert transformers.utils.logging.is_progress_bar_enabled()  # as it was


def test_options_come_from_a_file_and_flags_take_precedence(run, folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "dump.toml"
    config.write_text(
        f'model = "{folder}"\ntext = "{folder}/corpus.jsonl"\nto = "{tmp_path / "a"}"\nlayers = [2, 0]\ncontext = 9\n'
        'batch_size = 3\nlayout = "stream"\nbos = "none"\nhook_points = ["resid_pre"]\n'
    )
    code, out, _ = run("--config", config, "--context", 4)
    assert code == 0
    by_flags = run(*flags(folder, tmp_path / "b"), "--layout", "stream", "--bos", "none", "--hook-points", "resid_pre")
    assert by_flags[0] == 0
    first, second = ShardStore.open(out.strip()), ShardStore.open(by_flags[1].strip())
    assert first.metadata == second.metadata
    assert first[:].tobytes() == second[:].tobytes()
    assert first.metadata.text["layout"] == "stream"


def test_token_files(run, folder: Path, tmp_path: Path) -> None:
    from saev_store.sources.mmididx import IndexedDatasetBuilder

    documents = [[3, 4, 5], [6, VOCABULARY - 1]]
    with IndexedDatasetBuilder(tmp_path / "tokens", dtype=np.uint16) as builder:
        for document in documents:
            builder.add_document(document)
    options = [
        "--model",
        folder,
        "--tokens",
        tmp_path / "tokens.idx",
        "--context",
        4,
        "--layers",
        1,
        "--to",
        tmp_path,
        "--bos",
        7,
    ]
    code, out, _ = run(*options)
    assert code == 0
    store = ShardStore.open(out.strip())
    assert store.origin(1, 1).place.token_id == VOCABULARY - 1
    assert store.metadata.data["recording"]["source"]["bos_id"] == 7


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        (["--text", "missing.jsonl"], 1, "missing.jsonl: there is no such file"),
        (["--model", "missing/model"], 1, "missing/model: it could not be loaded"),
        (["--layers", "3"], 2, "--layers: layer 3 is not a block"),
        (["--hook-points", "attn"], 2, "--hook-points: 'attn' is not a hook point"),
        (["--context", "0"], 2, "--context: context is 0"),
        (["--context", "41"], 2, "--context: a row has 41 tokens"),
        (["--bos", "first"], 2, "--bos: bos is 'first'; it must be a token id, 'tokenizer' or 'none'"),
        (["--to", "s3:/lab/shards"], 2, "--to: 's3:/lab/shards' is no URL: two slashes follow the colon. Write s3://"),
        (["--to", ""], 2, "--to: it is empty"),
        (["--to", __file__], 2, "is a file; it must be a folder"),
        (["--text", "book.txt", "--text-key", "body"], 2, "--text-key: book.txt is one text"),
        (["--tokens", "x.idx"], 2, "--text, --tokens, --images: one of the three"),
        (["--config", "missing.toml"], 1, "missing.toml: it cannot be read"),
        (["--device", "abacus"], 2, "--device: 'abacus' cannot be used"),
        (["--layout", "packed"], 2, "packed"),
        (["--attention", "foo"], 2, "--attention: 'foo' cannot be used"),
    ],
)
def test_mistakes_have_exit_codes_and_name_their_option(
    run, folder: Path, tmp_path: Path, changes: list, code: int, said: str
) -> None:
    found, _, err = run(*flags(folder, tmp_path), *changes)
    assert (found, said in err) == (code, True), err
    assert not list(tmp_path.rglob("metadata.json"))


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        (["--text", "missing.jsonl"], 1, "missing.jsonl: there is no such file"),
        (["--context", "0"], 2, "--context: context is 0"),
        (["--batch-size", "0"], 2, "--batch-size: batch_size is 0"),
        (["--layout", "stream", "--pack"], 2, "--pack: a stream is packed already"),
    ],
)
def test_what_is_wrong_without_a_model_is_refused_before_one_is_loaded(
    run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list, code: int, said: str
) -> None:
    monkeypatch.setattr("saev_store.record.load_language_model", lambda *_, **__: pytest.fail("a model was loaded"))
    found, _, err = run(*flags(folder, tmp_path), *changes)
    assert (found, said in err) == (code, True), err


def test_an_interrupt_while_the_model_loads_promises_nothing(
    run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("saev_store.record.load_language_model", interrupted)
    code, _, err = run(*flags(folder, tmp_path))
    assert (code, "kept" in err) == (130, False), err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layers = [1", "is no TOML"),
        ("layers = " + "[" * 5000 + "]" * 5000, "is no TOML"),
        ("context = 1" + "0" * 5000, "is no TOML"),
        ('layers = "1,2"', "dump.toml is '1,2'; it must be a list of integers, such as [7, 14, 21]"),
        ("layers = [1, 'x']", "dump.toml is [1, 'x']; it must be a list of integers, such as [7, 14, 21]"),
        ("layer = [1]", "dump.toml is no option; layers is one"),
        ("contxt = 4", "dump.toml is no option; context is one"),
        ("pack = 1", "dump.toml is 1; it must be true or false"),
        ("context = '4'", "dump.toml is '4'; it must be an integer"),
        ("layout = 'packed'", "dump.toml is 'packed'; it must be 'window' or 'stream'"),
        ("bos = 'foo'", "dump.toml is 'foo'; it must be a token id, 'tokenizer' or 'none'"),
        ("part = '1/2'", "dump.toml is an option of the command line only"),
        ("storage_options = {anon = true}", "dump.toml is an option of the command line only"),
        ("layers = [1]\ncontext = 4\ntext = 'x'\nto = 'y'", "--model: model is missing"),
    ],
)
def test_files_of_options_that_say_something_else(run, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "dump.toml").write_text(text)
    code, _, err = run("--config", tmp_path / "dump.toml")
    assert (code, said in err) == (2, True), err


def test_of_many_mistakes_in_a_file_some_are_told(run, tmp_path: Path) -> None:
    (tmp_path / "dump.toml").write_text("".join(f"{'x' * 5000}{i} = 1\n" for i in range(2000)) + "y1 = 2\nz1 = 3\n")
    code, _, err = run("--config", tmp_path / "dump.toml")
    assert code == 2
    assert "…" in err
    assert len(err) < 20_000
    (tmp_path / "dump.toml").write_text("".join(f"x{i} = 1\n" for i in range(200)))
    code, _, err = run("--config", tmp_path / "dump.toml")
    assert "more problems" in err
    assert len(err) < 5_000


@pytest.mark.parametrize(
    "name",
    [
        "model", "text", "tokens", "images", "processor", "image_key", "masks", "tokenizer", "attention", "device",
    ],
)  # fmt: skip
def test_an_empty_option_is_named(run, tmp_path: Path, name: str) -> None:
    """Neither the default, nor an empty address of which only the library knows."""
    of_images = name in {"images", "processor", "image_key", "masks"}
    source = {"images": "i"} if of_images else {"tokens": "t.npy", "context": 4} if name == "tokens" else {"text": "t.txt", "context": 4}  # fmt: skip
    lines = {"model": "m", "to": "y", "layers": [1]} | source
    (tmp_path / "dump.toml").write_text("\n".join(f"{key} = {value!r}" for key, value in (lines | {name: ""}).items()))
    said = f"--{name.replace('_', '-')}: {name} in {tmp_path / 'dump.toml'} is ''; it must be text that is not empty"
    code, _, err = run("--config", tmp_path / "dump.toml")
    assert (code, said in err) == (2, True), err
    (tmp_path / "dump.toml").write_text("\n".join(f"{key} = {value!r}" for key, value in lines.items()))
    code, _, err = run("--config", tmp_path / "dump.toml", f"--{name.replace('_', '-')}", "")
    assert (code, f"{name} is ''; it must be text that is not empty" in err) == (2, True), err


def test_a_flag_that_is_wrong_is_not_said_to_be_in_the_file(run, tmp_path: Path) -> None:
    (tmp_path / "dump.toml").write_text("model = 'm'\nto = 'y'\nlayers = [1]\ntext = 'x'\ncontext = 'a'\nbos = 5")
    code, _, err = run("--config", tmp_path / "dump.toml", "--bos", "foo")
    assert code == 2
    assert "bos is 'foo'; it must be a token id, 'tokenizer' or 'none'" in err
    assert f"context in {tmp_path / 'dump.toml'} is 'a'; it must be an integer" in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": 5}', "the value of 'text' is 5; it must be a text. If the text has another key, pass --text-key …."),
        ('{"body": "x"}', "the line has no text under the key 'text'; its keys are ['body']. Pass --text-key …."),
        ('["x"]', "the line is ['x']; it must be an object with a text"),
        ('{"text": x}', "the line is no JSON: Expecting value at column 10"),
    ],
)
def test_a_line_without_a_text_is_named_with_what_it_has(
    run, folder: Path, tmp_path: Path, line: str, said: str
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(f'{{"text": "the cat"}}\n{line}\n')
    code, _, err = run(*flags(folder, tmp_path / "root"), "--text", corpus)
    assert (code, err) == (1, f"error: {corpus}:2: {said}\n")


# -- folders of models that are not whole ------------------------------------------------------------------------------


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """A copy of the model's folder, to be damaged."""
    return Path(shutil.copytree(folder, tmp_path / "copied"))


def refusal(run, copied: Path, tmp_path: Path, *changes: object) -> str:
    """What the command says of a model that is not whole; nothing is written, and nothing but the error is printed."""
    code, out, err = run(*flags(copied, tmp_path / "root"), *changes)
    assert (code, out, err.count("\n")) == (1, "", 1), err
    assert not list((tmp_path / "root").rglob("*"))
    return err.removeprefix(f"error: {copied}: ")


@pytest.mark.parametrize("part", [0.001, 0.5])
def test_weights_that_are_cut_off_are_damaged_files(run, copied: Path, tmp_path: Path, part: float) -> None:
    whole = (copied / "model.safetensors").read_bytes()
    (copied / "model.safetensors").write_bytes(whole[: int(len(whole) * part)])
    assert refusal(run, copied, tmp_path).startswith(
        "its files are damaged, or do not belong together: Error while des"
    )


@pytest.mark.parametrize(("name", "value"), [("hidden_size", 64), ("hidden_size", "many")])
def test_a_config_of_other_weights_is_refused(run, copied: Path, tmp_path: Path, name: str, value: object) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, name: value}))
    said = refusal(run, copied, tmp_path)
    if value == 64:
        assert said == (
            f"embed_tokens.weight has the shape ({VOCABULARY}, 32) in its files, and ({VOCABULARY}, 64) according to its "
            "config.json. Check that config.json belongs to these weights.\n"
        )
    else:
        assert "its files are damaged, or do not belong together: Validation error for field 'hidden_size'" in said


def test_a_folder_without_a_tokenizer_says_so(run, folder: Path, copied: Path, tmp_path: Path) -> None:
    """Transformers makes one of it that knows no word."""
    for path in copied.glob("tokenizer*"):
        path.unlink()
    said = refusal(run, copied, tmp_path)
    assert (
        said
        == "it has no tokenizer. Name the folder or the model that has it: --tokenizer …. Token ids need none with --bos none.\n"
    )
    assert run(*flags(copied, tmp_path / "root"), "--tokenizer", folder)[0] == 0


def test_token_ids_need_a_tokenizer_only_for_the_token_in_front_of_rows(
    run, folder: Path, copied: Path, tmp_path: Path
) -> None:
    from saev_store.sources.mmididx import IndexedDatasetBuilder

    with IndexedDatasetBuilder(tmp_path / "tokens", dtype=np.uint16) as builder:
        builder.add_document([3, 4, 5])

    def options(model: Path, *changes: object) -> list[object]:
        source = ["--tokens", tmp_path / "tokens.idx", "--context", 4, "--layers", 1]
        return ["--model", model, *source, "--to", tmp_path / "root", *changes]

    for path in copied.glob("tokenizer*"):
        path.unlink()
    for changes in ([], ["--bos", "tokenizer"]):
        code, out, err = run(*options(copied, *changes))
        assert (code, out) == (1, "")
        assert err.startswith(f"error: {copied}: it has no tokenizer. ")
        assert not list((tmp_path / "root").rglob("*"))
    for model, bos, has_bos in ((copied, "none", False), (copied, 7, True), (folder, "tokenizer", True)):
        code, out, _ = run(*options(model, "--bos", bos))
        assert code == 0
        store = ShardStore.open(out.strip())
        assert (store.metadata.text["bos"], store.metadata.cls_token) == (has_bos, has_bos)


def test_weights_that_are_no_safetensors_are_named(run, copied: Path, tmp_path: Path) -> None:
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    assert "Only safetensors are read: convert pytorch_model.bin" in refusal(run, copied, tmp_path)


def test_a_model_of_images_is_not_run_on_texts(run, folder: Path, tmp_path: Path) -> None:
    tiny_vision("ViTForImageClassification").save_pretrained(tmp_path / "vit")
    code, _, err = run(*flags(folder, tmp_path), "--model", tmp_path / "vit")
    assert code == 2
    assert err.endswith(f"error: {tmp_path / 'vit'}: vit is a model of images. Record images with it: --images ….\n")


# -- repair ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(run, folder: Path, tmp_path: Path):
    """A file of options, what was recorded by it (three shards and four token arrays), and the damaged store's folder."""
    config = tmp_path / "dump.toml"
    config.write_text(
        f'model = "{folder}"\ntext = "{folder}/corpus.jsonl"\nto = "{tmp_path / "a"}"\nlayers = [2, 0]\ncontext = 4\n'
        'batch_size = 3\ndtype = "bfloat16"\nmax_tokens_per_shard = 20\n'
    )
    code, out, _ = run("--config", config)
    assert code == 0
    path = Path(out.strip())
    whole = content(path)
    (path / "acts000001.bin").unlink()
    (path / "mask.bin").write_bytes(b"?")
    return config, whole, path


@pytest.fixture
def repaired(capfd, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main(["repair", "--no-progress", *map(str, arguments)])
        out, err = capfd.readouterr()
        return code, out, err

    return call


def test_repair_takes_the_file_of_the_recording(repaired, damaged) -> None:
    config, whole, path = damaged
    assert len([name for name in whole if name.startswith("acts")]) == 3
    code, out, err = repaired(path, "--config", config)
    assert (code, out) == (
        0,
        "mask.bin: written anew; the bytes of before\nacts000001.bin: examples 2 to 3; the bytes of before\n",
    )
    assert re.fullmatch(rf"repaired 2 examples \(.+\) in [\d.]+ s, .+ examples/s, at {re.escape(str(path))}\n", err)
    assert content(path) == whole
    code, out, err = repaired(path, "--config", config)
    assert (code, out) == (0, "nothing is lost: no file was changed\n")
    assert err == f"repaired nothing: nothing is lost, at {path}\n"


def test_repair_takes_flags_and_asks_the_store_for_the_rest(repaired, damaged, folder: Path) -> None:
    _, whole, path = damaged
    flags = ["--model", folder, "--text", folder / "corpus.jsonl", "--context", 4, "--batch-size", 3]
    code, out, err = repaired(path, *flags, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "url": str(path),
        "files": [
            {"name": "mask.bin", "examples": [], "identical": True},
            {"name": "acts000001.bin", "examples": [[2, 4]], "identical": True},
        ],
    }
    assert content(path) == whole


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        (["--layers", "0,2"], 1, "layers is [2, 0] there, [0, 2] in this call"),
        (["--dtype", "float32"], 1, "dtype is 'bfloat16' there, 'float32' in this call"),
        (["--hook-points", "mlp_out"], 1, "hook_points"),
        (["--batch-size", 2], 1, "data.recording.source.batch_size is 3 there, 2 in this call"),
        (["--bos", "none"], 1, "text.bos is True there, False in this call"),
        (["--context", 0], 2, "--context: context is 0"),
        (["--recheck", "maybe"], 2, "maybe"),
        (["--to", "elsewhere"], 2, "--to"),
        (["--config", "missing.toml"], 1, "missing.toml: it cannot be read"),
    ],
)
def test_repair_refuses_what_was_not_recorded_so(repaired, damaged, changes: list, code: int, said: str) -> None:
    config, _, path = damaged
    before = content(path)
    found, out, err = repaired(path, "--config", config, *changes)
    assert (found, out, said in err) == (code, "", True), err
    assert content(path) == before


def test_repair_of_nothing(repaired, damaged, tmp_path: Path) -> None:
    config, _, path = damaged
    code, _, err = repaired(tmp_path / "nothing", "--config", config)
    assert (code, "nothing" in err) == (1, True)
    code, _, err = repaired(path)
    assert (code, "--model: model is missing" in err) == (2, True), err
