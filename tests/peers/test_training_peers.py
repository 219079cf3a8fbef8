"""The trainers that people use, the real ones, over our stores: every row in its order, and an exact continuation.

Runs where `SAEV_STORE_CACHES_PYTHON` names an interpreter with them, and with what this package needs, in an environment of its own:

    pip install torch sae-lens nnsight zstandard . && pip install --no-deps dictionary-learning

dictionary_learning asks for a version of nnsight that works with no recent torch, but only names a class of it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from page_blocks import page_block, smaller
from row_stores import row_store, rows_of
from sparse_stores import sparse_store

from saev_store import ShardStore
from saev_store.loaders import Loader

PEER = os.environ.get("SAEV_STORE_CACHES_PYTHON")
ROOT = Path(__file__).parents[2]
BATCH, STEPS, STOP, SAVED = 32, 300, 200, 151
#: What is smaller in the tests than in the scripts of the page: a batch, features, steps and their warm-up.
SMALLER = {
    "4096": "32", "16_384": "32", "k=32": "k=4", '"k": 32': '"k": 4', "20_000": "60", "1000": "10", "2000": "20",
}  # fmt: skip

pytestmark = [
    pytest.mark.skipif(not PEER, reason="SAEV_STORE_CACHES_PYTHON names no interpreter with the trainers"),
    pytest.mark.slow,  # the trainers take seconds to be imported
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return row_store(tmp_path_factory.mktemp("training"))


@pytest.fixture(scope="module")
def batches(store: Path) -> list[np.ndarray]:
    """The first 400 batches of layer 11, from the NumPy loader."""
    loader = Loader(ShardStore.open(store).sel(layer=11, tokens="content"), batch_size=BATCH, drop_last=True)
    return [batch["act"].copy() for _ in range(40) for batch in loader]


def started(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """The end of a script in the trainers' environment."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    environment |= {"WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [str(PEER), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, cwd=folder)


def run(arguments: list[str], folder: Path) -> str:
    """What a script in the trainers' environment prints."""
    done = started(arguments, folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def trained(tool: str, store: Path, folder: Path) -> dict:
    """What the trainers of a tool saw and lost."""
    run([str(ROOT / "tests/helpers/peer_training.py"), tool, str(store), str(folder)], folder)
    return json.loads((folder / "seen.json").read_text())


def check_continued(whole: dict, stopped: dict, continued: dict) -> None:
    """The run that goes on from the checkpoint sees and loses what the one does that was never stopped."""
    for key in ("rows", "losses"):
        assert len(whole[key]) == STEPS
        assert stopped[key] == whole[key][:STOP]
        assert continued[key] == whole[key][SAVED:]
    assert np.mean(whole["losses"][-10:]) < np.mean(whole["losses"][:10]) / 2


@pytest.fixture(scope="module")
def saelens(store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    return trained("saelens", store, tmp_path_factory.mktemp("saelens"))


def test_saelens_goes_on_exactly(saelens: dict, batches: list[np.ndarray]):
    for kind, n_for_norm in (("topk", 15), ("batchtopk", 0)):
        check_continued(*saelens[kind])
        expected = [rows_of(batch) for batch in batches[n_for_norm : n_for_norm + STEPS]]
        assert saelens[kind][0]["rows"] == expected


def test_saelens_trains_several_hooks_on_the_same_tokens(saelens: dict):
    runs = saelens["hooks"]
    for name in ("early", "late"):
        check_continued(*(run[name] for run in runs))
    assert runs[0]["early"]["rows"] == runs[0]["late"]["rows"]
    assert runs[0]["early"]["losses"] != runs[0]["late"]["losses"]


def test_dictionary_learning_trains_two_dictionaries_at_once(store: Path, batches: list[np.ndarray], tmp_path: Path):
    np.save(tmp_path / "batches.npy", np.stack(batches))
    found = trained("dictionaries", store, tmp_path)
    assert found["store"] == found["plain"]
    for seen in found["store"]:
        assert seen["rows"] == [rows_of(batch) for batch in batches[102:162]]
        assert np.mean(seen["losses"][-5:]) < np.mean(seen["losses"][:5])
    norm = math.sqrt(np.mean([(batch.astype(float) ** 2).sum(axis=1).mean() for batch in batches[:101]]))
    assert found["norm"] == pytest.approx(norm, rel=1e-6)
    assert 0 < found["evaluation"]["frac_variance_explained"] <= 1
    assert found["evaluation"]["l0"] == 4
    assert found["config"] == {
        "d_submodule": 8, "out_batch_size": BATCH, "device": "cpu", "store": ShardStore.open(store).url, "layers": ["11"],
        "tokens": "content", "dtype": "float32", "n_samples": 320, "scale": None, "normalize": None, "seed": 17,
    }  # fmt: skip


def script(heading: str, containing: str, store: Path) -> str:
    """A script of docs/integrations.md, with this store and smaller sizes."""
    text = page_block("integrations.md", heading, containing)
    for old, new in SMALLER.items():
        text = text.replace(old, new)
    return smaller(text, {"/data/shards/941cc259": str(store)})


def test_the_page_s_script_for_saelens_goes_on(store: Path, tmp_path: Path):
    (tmp_path / "train.py").write_text(script("SAELens", "BatchTopKTrainingSAE(", store))
    run(["train.py"], tmp_path)
    last = tmp_path / f"checkpoints/final_{STEPS * BATCH}"
    weights = (last / "sae_weights.safetensors").read_bytes()
    newest = max((tmp_path / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    shutil.rmtree(last)
    shutil.rmtree(newest)
    run(["train.py"], tmp_path)
    assert (last / "sae_weights.safetensors").read_bytes() == weights


def test_the_page_s_script_for_dictionary_learning_runs(store: Path, tmp_path: Path):
    (tmp_path / "train.py").write_text(script("dictionary_learning", "trainSAE(", store))
    assert -1 < float(run(["train.py"], tmp_path).split()[-1]) <= 1
    assert json.loads((tmp_path / "dictionaries/trainer_1/config.json").read_text())["buffer"]["layers"] == ["11"]


EXAMPLE = str(ROOT / "examples/train_batchtopk_saelens.py")
OPTIONS = [
    "--layer",
    "11",
    "--batch-size",
    "32",
    "--latents",
    "32",
    "--k",
    "4",
    "--lr",
    "0.01",
    "--steps",
    "30",
    "--save-every",
    "8",
]
PROCESS = str(ROOT / "tests/helpers/example_process.py")


def example(store: Path, folder: Path, *, n_checkpoints: int, ranks: int = 1, resume: bool = False) -> list[float]:
    """The losses of examples/train_batchtopk_saelens.py, on several ranks if need be; killed in the checkpoint after so many."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", "localhost:0"]
    command = [PROCESS, EXAMPLE, str(n_checkpoints), str(store), *OPTIONS, "--out", "run", *["--resume"] * resume]
    folder.mkdir(exist_ok=True)
    done = started([*launcher * (ranks > 1), *command], folder)
    assert done.returncode == (0 if n_checkpoints < 0 else -signal.SIGKILL), done.stderr
    newest = max((folder / "run").glob("*/losses.json"), key=lambda path: int(path.parent.name.removeprefix("final_")))
    return json.loads(newest.read_text())


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sparse_store(tmp_path_factory.mktemp("sparse"))


@pytest.fixture(scope="module")
def whole_example(sparse: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """The losses of a run that was not stopped, and its folder."""
    folder = tmp_path_factory.mktemp("example")
    losses = example(sparse, folder, n_checkpoints=-1)
    assert len(losses) == 30
    assert np.mean(losses[-5:]) < np.mean(losses[:3])
    return losses, folder / "run"


def test_the_example_for_saelens_goes_on_exactly_after_a_kill(whole_example: tuple, sparse: Path, tmp_path: Path):
    losses, whole = whole_example
    assert example(sparse, tmp_path, n_checkpoints=2) == losses[: 2 * 8]
    assert example(sparse, tmp_path, n_checkpoints=-1, resume=True) == losses
    weights = f"final_{30 * BATCH}/sae_weights.safetensors"
    assert (tmp_path / "run" / weights).read_bytes() == (whole / weights).read_bytes()
    picture = (tmp_path / "run/loss.svg").read_text()
    assert picture == (whole / "loss.svg").read_text()
    assert ">step<" in picture


def test_the_example_for_saelens_trains_on_two_ranks(whole_example: tuple, sparse: Path, tmp_path: Path):
    """Half a batch each, and the same latents for a step: nearly the losses of one rank."""
    losses = example(sparse, tmp_path, n_checkpoints=-1, ranks=2)
    assert losses == pytest.approx(whole_example[0], rel=0.2)
