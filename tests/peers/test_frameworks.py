"""The scripts of examples/frameworks, run as they are with the real frameworks on two ranks, interrupted and started again.

    pip install -c constraints.txt '.[frameworks,test]'
    python -m pytest tests/peers/test_frameworks.py

Only addresses, sizes and intervals in them are changed. What arrives at the model is compared with the order of one loader that
serves everybody.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lightning", reason="the frameworks are installed in .ci/nightly only")

from saev_store import ShardStore, new_metadata
from saev_store.torch import StoreLoader

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"
RANK = Path(__file__).parents[1] / "helpers" / "framework_rank.py"

#: Script -> the package that it needs besides torch.
SCRIPTS = {
    "train_ddp.py": "torch",
    "train_lightning.py": "lightning",
    "train_accelerate.py": "accelerate",
    "train_dataloader.py": "torch",
    "train_stateful_dataloader.py": "torchdata",
    "slurm.sh": "torch",
}
#: What is smaller in the tests: a batch of a rank, features, steps between checkpoints.
SMALLER = {
    "8192": "8",
    "16_384": "32",
    "% 100": "% {every}",
    "n_train_steps=100": "n_train_steps={every}",
    "devices=8": "devices=2",
}
BATCH_SIZE = 16
#: Of whose 329 rows an epoch has 20 batches of two ranks, and 9 rows more, which two ranks cannot share equally.
N_EXAMPLES, N_TOKENS, N_BATCHES = 47, 7, 21


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """47 examples of 7 content tokens; vectors begin with their example and content token."""
    metadata = new_metadata(
        family="clip", ckpt="coordinates", layers=[5, 11], content_tokens_per_example=N_TOKENS, cls_token=True, d_model=8,
        n_examples=N_EXAMPLES, max_tokens_per_shard=5 * 16,
    )  # fmt: skip
    acts = np.random.default_rng(0).standard_normal(metadata.layout.shape, dtype=np.float32)
    acts[..., 0] = np.arange(N_EXAMPLES)[:, None, None]
    acts[..., 1] = np.arange(-1, N_TOKENS)
    root = tmp_path_factory.mktemp("frameworks")
    with ShardStore.create(root, metadata, progress=False) as writer:
        writer.append(acts)
    return root / metadata.hash


@pytest.fixture(scope="module")
def expected(store: Path) -> list[list[list[int]]]:
    """The global batches of two epochs."""
    loader = StoreLoader(store, layer=11, batch_size=BATCH_SIZE, rank=0, world=1)
    batches = [
        torch.stack([batch["example_idx"], batch["token_idx"]], dim=1).tolist() for _ in range(2) for batch in loader
    ]
    half = len(batches) // 2
    epochs = [[tuple(row) for batch in part for row in batch] for part in (batches[:half], batches[half:])]
    assert epochs[0] != epochs[1]
    for rows in epochs:
        assert sorted(rows) == [(example, token) for example in range(N_EXAMPLES) for token in range(N_TOKENS)]
    return batches


def command_of(script: str, folder: Path) -> list[str]:
    """How two ranks are started here: by torchrun, or by the batch script with a stand-in for Slurm."""
    rank = [str(RANK), "train.py", str(folder)]
    if script != "slurm.sh":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *rank]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    text = (EXAMPLES / script).read_text("utf-8")
    for old, new in (("$((20000 + SLURM_JOB_ID % 20000))", str(port)), ("python train_ddp.py", f"{sys.executable} {' '.join(rank)} $N_STEPS")):  # fmt: skip
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / "job.sh").write_text(text)
    (folder / "scontrol").write_text("#!/bin/sh\necho localhost\n")
    task = 'SLURM_PROCID={0} SLURM_LOCALID={0} SLURM_NTASKS=2 "$@"'
    (folder / "srun").write_text(f"#!/bin/bash\n{task.format(1)} &\n{task.format(0)} && wait $!\n")
    for name in ("scontrol", "srun"):
        (folder / name).chmod(0o755)
    return ["bash", "job.sh"]


def run(script: str, folder: Path, n_steps: int) -> tuple[subprocess.CompletedProcess[str], list[list[list[int]]]]:
    """How the script ended, and what both ranks got in each step together."""
    for rank in range(2):
        (folder / f"rank{rank}.txt").unlink(missing_ok=True)
    command = command_of(script, folder) + ([] if script == "slurm.sh" else [str(n_steps)])
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RANK", "WORLD_SIZE"))
    }
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "N_STEPS": str(n_steps), "SLURM_JOB_ID": "7"}
    environment |= {"ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    parts = [[json.loads(line) for line in (folder / f"rank{rank}.txt").read_text().splitlines()] for rank in range(2)]
    return done, [one + two for one, two in zip(*parts, strict=True)]


def same(found: list[list[list[int]]], expected: list[list[list[int]]]) -> bool:
    """Whether steps have the rows of the loader: only in the last batch of an epoch, which is not full, rows of earlier ones come again."""
    return len(found) == len(expected) and all(
        rows == wanted if len(wanted) == BATCH_SIZE else set(map(tuple, wanted)) <= set(map(tuple, rows))
        for rows, wanted in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize(("every", "killed_at"), [(5, 8), (21, 23)], ids=["within an epoch", "at the end of an epoch"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_trains_and_continues(
    script: str, every: int, killed_at: int, store: Path, expected: list[list[list[int]]], tmp_path: Path
):
    if find_spec(SCRIPTS[script]) is None:
        pytest.skip(f"{SCRIPTS[script]} is not installed")
    text = (EXAMPLES / ("train_ddp.py" if script == "slurm.sh" else script)).read_text("utf-8")
    text = text.replace("/data/shards/941cc259", str(store))
    for old, new in SMALLER.items():
        text = text.replace(old, new.format(every=every))
    (tmp_path / "train.py").write_text(text)
    killed, first = run(script, tmp_path, killed_at)
    assert killed.returncode != 0
    assert same(first, expected[:killed_at]), killed.stderr
    done, rest = run(script, tmp_path, 0)
    assert done.returncode == 0, done.stderr
    assert same(rest, expected[every:])
    assert all(len(rows) == BATCH_SIZE for rows in rest)
    # The last checkpoint is of the end: there is nothing more to do. A Lightning that went on from the end of an epoch trains one
    # epoch too many after the last one, with a DataLoader of PyTorch as well.
    if every == N_BATCHES and script != "train_lightning.py":
        done, rest = run(script, tmp_path, 0)
        assert (done.returncode, rest) == (0, []), done.stderr


def test_every_script_is_run():
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == set(SCRIPTS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["ordered", "shuffled"])
def test_lightning_validates_tests_and_predicts(kind: str, store: Path):
    lightning = pytest.importorskip("lightning")

    class Seen(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.rows = torch.nn.Linear(8, 8), dict.fromkeys(("validation", "test", "predict"), 0)

        def training_step(self, batch: dict[str, torch.Tensor], _number: int) -> torch.Tensor:
            return self.layer(batch["act"]).square().mean()

        def validation_step(self, batch: dict[str, torch.Tensor], _number: int) -> None:
            self.rows["validation"] += len(batch["act"])

        def test_step(self, batch: dict[str, torch.Tensor], _number: int) -> None:  # noqa: PT019  # no fixture
            self.rows["test"] += len(batch["act"])

        def predict_step(self, batch: dict[str, torch.Tensor], _number: int) -> None:
            self.rows["predict"] += len(batch["act"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    def loader() -> StoreLoader:
        if kind == "ordered":
            return StoreLoader(store, layer=5, batch_size=32, order="stored")
        return StoreLoader(store, layer=5, batch_size=32)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    model, trainer = (
        Seen(),
        lightning.Trainer(max_epochs=2, num_sanity_val_steps=0, enable_checkpointing=False, **quiet),
    )
    trainer.fit(model, loader(), loader())
    trainer.test(model, loader(), verbose=False)
    trainer.predict(model, loader())
    assert model.rows == {"validation": 2 * 329, "test": 329, "predict": 329}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("limit", [None, 6])
@pytest.mark.parametrize(
    "when", [{}, {"every_n_train_steps": 7}, {"every_n_train_steps": 12}, {"every_n_train_steps": 41}]
)
def test_lightning_goes_on_from_any_checkpoint(when: dict[str, int], limit: int | None, store: Path, tmp_path: Path):
    """Also from one at the end of an epoch, which is where Lightning writes them unless it is told otherwise.

    With `limit_train_batches` each epoch of Lightning has the first batches of another epoch of the loader.
    """
    lightning = pytest.importorskip("lightning")

    class Seen(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.rows = torch.nn.Linear(8, 8), []

        def training_step(self, batch: dict[str, torch.Tensor], _number: int) -> torch.Tensor:
            self.rows.append(rows_of(batch))
            return self.layer(batch["act"]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    def rows_of(batch: dict[str, torch.Tensor]) -> list[list[int]]:
        return torch.stack([batch["example_idx"], batch["token_idx"]], dim=1).tolist()

    def train(n_epochs: int, checkpoint: Path | None) -> list[list[list[int]]]:
        model = Seen()
        loader = StoreLoader(store, layer=11, batch_size=8)
        keep = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **when)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        trainer = lightning.Trainer(max_epochs=n_epochs, callbacks=[keep], limit_train_batches=limit, **quiet)
        trainer.fit(model, loader, ckpt_path=checkpoint)
        return model.rows

    n_batches = limit or -(-N_EXAMPLES * N_TOKENS // 8)
    alone = StoreLoader(store, layer=11, batch_size=8)
    epochs = [[rows_of(batch) for batch in alone][:n_batches] for _ in range(3)]
    whole = train(3, None)
    assert whole == [rows for epoch in epochs for rows in epoch]
    for checkpoint in list(tmp_path.iterdir()):
        step = int(checkpoint.stem.removeprefix("step="))
        if step < 2 * n_batches + 5:
            assert train(3, checkpoint) == whole[step:]
