"""What commands say of wrong input is about options and commands, never about arguments and methods of Python."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from plain_stores import plain_store
from tiny_models import tiny_language
from token_stores import token_store

import saev_store
from saev_store import ShardStore
from saev_store.cli import main
from saev_store.cli._run import app
from saev_store.cli._wording import Wording
from saev_store.names import WORK_FOLDER
from saev_store.record._recorder import Recorder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

#: What only Python knows.
PYTHON = re.compile(r"ShardStore|\bstore\.\w|discard_unfinished|=True|=False|\w\(|resume=|\bTexts\b|\bImages\b")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer, and texts."""
    folder = tmp_path_factory.mktemp("model")
    tiny_language("Qwen3ForCausalLM").save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "cat": 1}, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    (folder / "corpus.jsonl").write_text('{"text": "cat cat cat"}\n' * 6)
    return folder


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """A command in this process, which does not ask the hub: (exit code, standard output, standard error)."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return call


def flags(folder: Path, root: Path) -> list[object]:
    return [
        "record", "--no-progress", "--model", folder, "--text", folder / "corpus.jsonl", "--context", 4, "--layers", 1,
        "--batch-size", 1, "--max-tokens-per-shard", 10, "--to", root,
    ]  # fmt: skip


def interrupted_at(monkeypatch: pytest.MonkeyPatch, n_batches: int) -> None:
    """Ctrl-C in the run of the model, after some batches."""
    begin, numbers = Recorder.begin, iter(range(1000))

    def interrupted(self: Recorder, *inputs: object) -> object:
        if next(numbers) == n_batches:
            raise KeyboardInterrupt
        return begin(self, *inputs)

    monkeypatch.setattr(Recorder, "begin", interrupted)


@pytest.fixture
def begun(run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An unfinished recording: Ctrl-C came at the last but one of its six examples."""
    with monkeypatch.context() as changed:
        interrupted_at(changed, 5)
        assert run(*flags(folder, tmp_path / "root"))[0] == 130
    (found,) = (path for path in (tmp_path / "root").iterdir() if path.name != WORK_FOLDER)
    return found


def n_durable(begun: Path) -> int:
    """Examples that the receipts of an unfinished store tell of; one has 4 vectors of 32 float32."""
    receipts = (begun.parent / WORK_FOLDER / begun.name / "receipts").iterdir()
    return sum(json.loads(path.read_text())["nbytes"] for path in receipts) // (4 * 32 * 4)


# -- remedies ----------------------------------------------------------------------------------------------------------


def remedies() -> list[str]:
    """Every remedy of the package that is one text."""
    found: list[str] = []
    for path in Path(saev_store.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "remedy" and isinstance(node.value, ast.Constant):
                found += [node.value.value] if isinstance(node.value.value, str) else []
    return found


@pytest.mark.parametrize("command", ["info", "record", "import", "copy", "convert", "prepare", "repair"])
def test_no_remedy_of_the_library_tells_users_of_commands_of_python(command: str) -> None:
    wording, found = Wording(app().commands, [command]), remedies()
    assert len(found) > 200
    told = {text: wording.remedy(text) for text in found}
    assert not {text: said for text, said in told.items() if said is not None and PYTHON.search(said)}


def test_an_argument_is_its_option_whatever_its_value() -> None:
    commands = app().commands
    for command, argument, option in (
        ("head", "layers", "--layer"), ("head", "layer", "--layer"), ("copy", "layer", "--layers"), ("copy", "layers", "--layers"),
        ("copy", "url", "SRC"), ("ls", "url", "ROOT"), ("convert", "part", "--part"), ("record", "max_tokens_per_shard", "--max-tokens-per-shard"),
        ("head", "n", "-n"), ("copy", "storage_options", "--storage-options"), ("copy", "somewhere", "somewhere"),
    ):  # fmt: skip
        assert Wording(commands, ["--debug", command, "x"]).names(argument) == option
    assert Wording(commands, ["record"]).names("text, tokens, images") == "--text, --tokens, --images"
    assert Wording(commands, ["import"]).names("metadata", "family is empty") == "--family"
    assert Wording(commands, ["import"]).names("metadata", "colour is empty") == "metadata"
    assert Wording(commands, []).names("layers") == "layers"
    assert Wording(commands, ["prepare"]).remedy("Pass overwrite=True.") == "Pass --overwrite."
    assert Wording(commands, ["record"]).remedy("Pass part='auto'.") == "Pass --part auto."
    for command in ("record", "repair"):
        said = Wording(commands, [command]).remedy("Token ids need none with bos=None, others bos=7.")
        assert said == "Token ids need none with --bos none, others --bos 7."
    assert Wording(commands, ["record"]).remedy("Begin anew with resume=False.") == "Begin anew with --no-resume."
    assert Wording(commands, ["record"]).remedy("Go on with resume=True.") == "Go on with --resume."
    assert Wording(commands, ["copy"]).remedy("Go on with resume=True.") == "Go on with --resume."
    assert Wording(commands, ["finalize"]).remedy("Go on with resume=True.") is None
    said = Wording(commands, ["info"]).remedy('Name its key, storage_options={"verify": "a.pem", "b": {"c": 1}}.')
    assert said == """Name its key, --storage-options '{"verify": "a.pem", "b": {"c": 1}}'."""


def test_what_continues_an_unfinished_recording(run, folder: Path, begun: Path) -> None:
    for command in ("info", "validate", "repair", "head", "stats"):
        code, out, err = run(command, begun)
        assert (code, out) == (1, "")
        assert err.endswith("What wrote it continues it when it is run again.\n"), err
    error = json.loads(run("info", begun, "--json")[2])["error"]
    assert error["remedy"] == "What wrote it continues it when it is run again."
    code, _, err = run(*flags(folder, begun.parent), "--no-resume")
    there = f"there is an unfinished store, with {n_durable(begun)} of 6 examples"
    continues = "Continue it with --resume, or throw it away with `saev-store clean --older-than 0` of its folder."
    assert (code, err) == (1, f"error: {begun}: {there}. {continues}\n")
    assert run(*flags(folder, begun.parent))[0] == 0


def test_a_folder_of_stores_is_told_how_to_list_them(run, tmp_path: Path) -> None:
    plain_store(tmp_path / "root")
    for command in ("info", "repair"):
        code, _, err = run(command, tmp_path / "root")
        assert (code, err.partition(". ")[2]) == (1, "Name one of them; `saev-store ls` describes them.\n")


def test_a_lost_token_array_is_recorded_again_by_the_command(run, tmp_path: Path) -> None:
    store = token_store(tmp_path / "root", arrays={"mask": "bool"})
    (store.path / "mask.bin").unlink()
    for command in ("validate", "info"):
        for out in (run(command, store.path)[1], run(command, store.path, "--json")[1]):
            assert "Copy the file again, or record it again with `saev-store repair`" in out
            assert "restore_array" not in out


def test_a_damaged_store_is_told_to_be_repaired_by_the_command(run, tmp_path: Path) -> None:
    store = plain_store(tmp_path / "root")
    store.shard(1).unlink()
    for command in ("estimate", "stats"):
        code, out, err = run(command, store.path)
        assert (code, out) == (1, "")
        assert "`saev-store repair` records what is lost again." in err
        assert not PYTHON.search(err)


def test_a_text_that_is_no_file(run, folder: Path, tmp_path: Path) -> None:
    code, _, err = run(*flags(folder, tmp_path), "--text", "the cat")
    assert code == 1
    assert err.endswith("the cat: there is no such file. If this is the text itself, write it to a file.\n")


# -- what is named -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        (["--max-tokens-per-shard", 2], 2, "--max-tokens-per-shard: max_tokens_per_shard is 2, but one example has 4"),
        (["--hook-points", "mlp_out,mlp_out"], 2, "--hook-points: 'mlp_out' is named twice. Name it once."),
        (["--hook-points", "attn"], 2, "--hook-points: 'attn' is not a hook point"),
        (["--layers", 3], 2, "--layers: layer 3 is not a block of this model, which has 3"),
        (["--layers", "1,1"], 2, "--layers: "),
        (["-o", "anon=true"], 2, "--storage-options: local files take no options"),
    ],
)  # fmt: skip
def test_the_option_is_named(run, folder: Path, tmp_path: Path, changes: list[object], code: int, said: str) -> None:
    found, out, err = run(*flags(folder, tmp_path / "root"), *changes)
    assert (found, out, err.startswith(f"error: {said}")) == (code, "", True), err
    assert not PYTHON.search(err)


@pytest.mark.parametrize(
    ("name", "text"), [("corpus.jsonl", '{"text": ""}\n'), ("corpus.txt", ""), ("corpus.jsonl", "")]
)
def test_of_texts_without_a_token_the_file_is_named(run, folder: Path, tmp_path: Path, name: str, text: str) -> None:
    corpus = tmp_path / name
    corpus.write_text(text)
    code, _, err = run(*flags(folder, tmp_path / "root"), "--text", corpus)
    assert (code, err) == (2, f"error: {corpus}: there is not a single token in the documents\n")


@pytest.mark.parametrize("command", ["head", "copy"])
def test_a_layer_that_is_not_there_is_wrong_usage(run, tmp_path: Path, command: str) -> None:
    store = plain_store(tmp_path / "root")
    given = (
        ["head", store.path, "--layer", 3]
        if command == "head"
        else ["copy", store.path, tmp_path / "to", "--layers", 3]
    )
    code, out, err = run(*given)
    assert (code, out) == (2, "")
    assert re.match(r"error: --layers?: .*\[2, 5, 11\]", err)


# -- dry runs ----------------------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_is_there(run, folder: Path, begun: Path) -> None:
    dry = [*flags(folder, begun.parent), "--dry-run"]
    found = json.loads(run(*dry, "--json")[1])
    left = 6 - n_durable(begun)
    assert (found["n_examples"], found["n_left"], found["part"]) == (6, left, None)
    assert f"left       {left} example{'s' if left > 1 else ''} to record" in run(*dry)[1]
    code, _, err = run(*dry, "--part", "1/2")
    assert (code, "one process has begun this store without parts" in err) == (1, True)
    assert run(*flags(folder, begun.parent))[0] == 0
    assert "left       nothing to record: it is there" in run(*dry)[1]
    found = json.loads(run(*dry, "--json")[1])
    assert (found["n_left"], found["seconds"]) == (0, 0)
    assert ShardStore.open(begun).validate(deep=True, progress=False).ok


def test_a_dry_run_is_that_of_its_part(run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dry = [*flags(folder, tmp_path / "root"), "--dry-run"]
    code, out, _ = run(*dry, "--part", "2/3")
    assert (code, "part 2/3   2 examples to record" in out) == (0, True)
    assert "left" not in run(*dry)[1]
    assert run(*flags(folder, tmp_path / "root"), "--part", "2/3")[0] == 0
    assert "part 2/3   nothing to record: it is there" in run(*dry, "--part", "2/3")[1]
    assert "left       4 examples to record" in run(*dry)[1]
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, out, err = run(*dry, "--part", "auto")
    assert (code, out) == (2, "")
    assert err.startswith("error: --part: the environment says RANK=5 and WORLD_SIZE=2"), err


# -- other commands ----------------------------------------------------------------------------------------------------
