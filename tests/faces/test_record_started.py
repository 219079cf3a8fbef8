"""`--part`, `part="auto"`, and `saev-store finalize`: processes that torchrun and Slurm start, and simulated ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kill_children import content
from tiny_models import tiny_language

from saev_store import ShardStore
from saev_store.cli import main
from saev_store.errors import ArgumentError
from saev_store.record import _part

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_ARRAY_TASK_ID",
    "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX", "SLURM_ARRAY_TASK_STEP",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def array(task: int, first: int, last: int, count: int, step: int = 1) -> dict[str, object]:
    """What Slurm tells a task of an array."""
    return {
        "SLURM_ARRAY_TASK_ID": task, "SLURM_ARRAY_TASK_COUNT": count, "SLURM_ARRAY_TASK_MIN": first,
        "SLURM_ARRAY_TASK_MAX": last, "SLURM_ARRAY_TASK_STEP": step,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": 1, "WORLD_SIZE": 2}, (1, 2)),
        ({"RANK": 1}, (0, 1)),
        ({"SLURM_PROCID": 3, "SLURM_NTASKS": 4}, (3, 4)),
        ({"SLURM_PROCID": 0, "SLURM_NTASKS": 1}, (0, 1)),
        ({"SLURM_PROCID": 0, "SLURM_NTASKS": 2, "RANK": 5, "WORLD_SIZE": 8}, (5, 8)),  # torchrun on two nodes
        (array(1, 1, 16, 16), (0, 16)),
        (array(16, 1, 16, 16), (15, 16)),
        (array(0, 0, 7, 8), (0, 8)),
        (array(20, 0, 30, 4, step=10), (2, 4)),
        (array(3, 3, 3, 1), (0, 1)),  # one task that was started again: it goes on with whatever is left
        (array(2, 1, 3, 3) | {"SLURM_PROCID": 1, "SLURM_NTASKS": 4}, (5, 12)),
        (array(3, 1, 3, 3) | {"RANK": 1, "WORLD_SIZE": 2, "SLURM_PROCID": 0, "SLURM_NTASKS": 1}, (5, 6)),
    ],
)
def test_auto_is_as_the_process_was_started(
    variables: dict[str, object], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    assert _part.this_part("auto") == expected
    assert _part.this_part(None) is None  # nothing is taken from the environment unasked


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": 2, "WORLD_SIZE": 2}, "RANK=2 and WORLD_SIZE=2"),
        ({"RANK": "x", "WORLD_SIZE": 2}, "RANK='x'"),
        ({"SLURM_PROCID": 0, "SLURM_NTASKS": "2(x3)"}, "SLURM_NTASKS='2"),
        (array(5, 1, 9, 3), "numbers have gaps"),  # --array=1,5,9
        (array(2, 1, 9, 3, step=4), "numbers have gaps"),
        *(
            (array(task, 1, 5, 3), "numbers have gaps") for task in (1, 2, 5)
        ),  # --array=1,2,5: also those before the gap
        (array(0, 0, 20, 2, step=4), "numbers have gaps"),
        (array(4, 0, 4, 3, step=4), "numbers have gaps"),
        ({"SLURM_ARRAY_TASK_ID": 1, "SLURM_ARRAY_TASK_COUNT": 4}, "nothing of SLURM_ARRAY_TASK_MIN"),
    ],
)
def test_environments_that_contradict_themselves(
    variables: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ArgumentError) as refused:
        _part.this_part("auto")
    assert said in str(refused.value)
    assert refused.value.where == "part"


@pytest.mark.parametrize(
    ("device", "variables", "n_gpus", "expected"),
    [
        ("cuda", {"LOCAL_RANK": 3}, 8, "cuda:3"),
        ("cuda", {"SLURM_LOCALID": 3}, 1, "cuda:0"),  # Slurm shows each task its own
        ("cuda", {}, 8, "cuda"),
        ("cuda:1", {"LOCAL_RANK": 3}, 8, "cuda:1"),
        ("cpu", {"LOCAL_RANK": 3}, 8, "cpu"),
        (None, {"LOCAL_RANK": 3}, 8, None),
    ],
)
def test_each_rank_has_a_gpu(
    device: str, variables: dict, n_gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    assert _part.this_device(device) == expected


# -- the command -------------------------------------------------------------------------------------------------------


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
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", unk_token="<unk>")
    fast.save_pretrained(folder)
    (folder / "corpus.jsonl").write_text(
        "".join(json.dumps({"text": "the cat sat on the mat " * n}) + "\n" for n in range(1, 9))
    )
    return folder


def flags(folder: Path, root: Path) -> list[str]:
    """Two examples in a shard."""
    found = [
        "record", "--no-progress", "--model", folder, "--text", folder / "corpus.jsonl", "--context", 4, "--layers", "2,0",
        "--batch-size", 3, "--dtype", "bfloat16", "--max-tokens-per-shard", 20, "--to", root,
    ]  # fmt: skip
    return list(map(str, found))


@pytest.fixture
def run(capfd, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main(list(map(str, arguments)))
        out, err = capfd.readouterr()
        return code, out, err

    return call


def test_parts_on_the_command_line(run, folder: Path, tmp_path: Path) -> None:
    assert run(*flags(folder, tmp_path / "alone"))[0] == 0
    code, out, err = run(*flags(folder, tmp_path / "parts"), "--part", "2/3")
    url = out.strip()
    assert (code, Path(url).parent) == (0, tmp_path / "parts")
    assert "part 2/3 is recorded; not recorded yet: --part 1/3, 3/3" in err
    code, out, err = run("finalize", url)
    assert (code, out) == (1, "")
    assert "examples are not recorded" in err
    assert "--part" in err
    code, out, _ = run(*flags(folder, tmp_path / "parts"), "--part", "1/3", "--json")
    found = json.loads(out)
    assert (code, found["url"], found["published"], found["parts_left"]) == (0, url, False, ["3/3"])
    ((first, end),) = found["examples_left"]
    assert run(*flags(folder, tmp_path / "parts"), "--part", "1/2")[0] == 0
    code, out, err = run(*flags(folder, tmp_path / "parts"), "--part", "2/2", "--json")
    found = json.loads(out)
    assert (code, found["url"]) == (0, url)
    assert (found["shape"][0], err) == (end, "")
    assert 0 < first < end
    assert content(tmp_path / "parts") == content(tmp_path / "alone")
    assert json.loads(run("finalize", url, "--json")[1])["published"]  # fine, if there is nothing left to do


@pytest.mark.parametrize("part", ["0/3", "4/3", "3", "a/b", "1/0", "-1/2", ""])
def test_parts_that_are_none_on_the_command_line(run, folder: Path, tmp_path: Path, part: str) -> None:
    code, _, err = run(*flags(folder, tmp_path), f"--part={part}")
    assert (code, f"--part: {part!r} is not a part" in err) == (2, True), err


def test_a_slurm_array(run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(*flags(folder, tmp_path / "alone"))[0] == 0
    for task in (3, 1, 2):
        for name, value in array(task, 1, 3, 3).items():
            monkeypatch.setenv(name, str(value))
        code, out, err = run(*flags(folder, tmp_path / "parts"), "--part", "auto")
        assert code == 0
        assert (f"part {task}/3 is recorded" in err) == (task != 2)
    assert content(tmp_path / "parts") == content(tmp_path / "alone")
    assert ShardStore.open(out.strip()).validate(deep=True, progress=False).ok


def test_torchrun(folder: Path, tmp_path: Path) -> None:
    """Two processes of torchrun at once; one thread each, as it sets them, also where one process is alone.

    Four interpreters that load torch take more than three seconds.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    def started(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    started("saev_store", *flags(folder, tmp_path / "alone"))
    launched = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "saev_store"]
    out = started(*launched, *flags(folder, tmp_path / "parts"), "--part", "auto")
    assert len(set(out.split())) == 1  # both print where the store is
    assert content(tmp_path / "parts") == content(tmp_path / "alone")
