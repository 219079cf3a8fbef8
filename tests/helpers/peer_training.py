"""Runs where the trainers are installed: trains with the real ones, stops, goes on. TOOL STORE FOLDER

Each function writes what its trainer saw and lost, as JSON, for the test to compare. Nothing is loaded from a network.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from page_blocks import page_block, smaller

from saev_store.torch import StoreLoader

BATCH, STEPS, STOP = 32, 300, 200


def loader(store: str, **more: object) -> StoreLoader:
    return StoreLoader(store, batch_size=BATCH, drop_last=True, **more)


class Stopped(Exception):
    """The job's time is up."""


def rows_of(batch: torch.Tensor) -> list[list[int]]:
    return batch[:, :2].int().tolist()


def sae_config(checkpoints: Path | None) -> object:
    from sae_lens.config import LoggingConfig, SAETrainerConfig

    return SAETrainerConfig(
        total_training_samples=STEPS * BATCH, train_batch_size_samples=BATCH, lr=1e-3, lr_end=1e-3, device="cpu", n_checkpoints=1,
        checkpoint_path=None if checkpoints is None else str(checkpoints), save_final_checkpoint=False,
        n_batches_for_norm_estimate=15, logger=LoggingConfig(log_to_wandb=False),
    )  # fmt: skip


def new_sae(kind: str) -> object:
    from sae_lens import (
        BatchTopKTrainingSAE,
        BatchTopKTrainingSAEConfig,
        TopKTrainingSAE,
        TopKTrainingSAEConfig,
    )

    torch.manual_seed(0)
    given = {"d_in": 8, "d_sae": 32, "k": 4, "dtype": "float32", "device": "cpu"}
    if kind == "topk":
        return TopKTrainingSAE(TopKTrainingSAEConfig(**given, normalize_activations="expected_average_only_in"))
    return BatchTopKTrainingSAE(BatchTopKTrainingSAEConfig(**given))


def watched(trainer: object, stop: int | None) -> dict[str, list]:
    """What each step of a trainer gets and loses; it is stopped before step number `stop`."""
    seen: dict[str, list] = {"rows": [], "losses": []}
    step: Callable = trainer.step

    def watch(batch: torch.Tensor) -> object:
        if len(seen["rows"]) == stop:
            raise Stopped
        seen["rows"].append(rows_of(batch))
        output = step(batch)
        seen["losses"].append(output.loss.item())
        return output

    trainer.step = watch
    return seen


def saelens(store: str, folder: Path) -> dict[str, object]:
    """One run of `SAETrainer` from beginning to end, one that is stopped, and one that goes on from its checkpoint."""
    from sae_lens.training.sae_trainer import SAETrainer

    from saev_store.integrations.saelens import data_provider

    found: dict[str, object] = {}
    for kind in ("topk", "batchtopk"):
        runs = []
        for name, stop in (("whole", None), ("stopped", STOP), ("continued", None)):
            checkpoints = None if name == "whole" else folder / kind
            sae, provider = new_sae(kind), data_provider(loader(store, layer=11))
            trainer = SAETrainer(sae_config(checkpoints), sae, provider, save_checkpoint_fn=provider.save_to_checkpoint)
            if name == "continued":
                (checkpoint,) = checkpoints.iterdir()
                trainer.load_trainer_state(checkpoint)
                sae.load_weights_from_checkpoint(checkpoint)
                provider.load_from_checkpoint(checkpoint)
            seen = watched(trainer, stop)
            with contextlib.suppress(Stopped):
                trainer.fit()
            provider.close()
            runs.append(seen)
        found[kind] = runs
    return {**found, "hooks": saelens_hooks(store, folder)}


def saelens_hooks(store: str, folder: Path) -> list[dict[str, object]]:
    """The same of `MultiSAETrainer`, for two hooks, by the block of docs/integrations.md; its end goes on from a checkpoint."""
    block = smaller(
        page_block("integrations.md", "SAELens", "MultiSAETrainer"),
        {"/data/shards/941cc259": store, "batch_size=4096": f"batch_size={BATCH}"},
    )
    begin, mark, _ = block.partition("trainer.load_checkpoint")
    assert mark
    runs = []
    for name, stop in (("whole", None), ("stopped", STOP), ("continued", None)):
        names: dict[str, object] = {
            "trainer_cfg": sae_config(None if name == "whole" else folder / "hooks"),
            "saes": {"early": new_sae("topk"), "late": new_sae("batchtopk")},
        }
        if name == "continued":
            (names["checkpoint"],) = (folder / "hooks").iterdir()
        exec(block if name == "continued" else begin, names)
        trainer = names["trainer"]
        seen = {key: watched(one, stop) for key, one in trainer.trainers.items()}
        with contextlib.suppress(Stopped):
            trainer.fit()
        names["provider"].close()
        runs.append(seen)
    return runs


def dictionaries(store: str, folder: Path) -> dict[str, object]:
    """Two trainers of dictionary_learning on a store, and on batches that the test has written; an evaluation of the first."""
    import numpy as np
    from dictionary_learning.evaluation import evaluate
    from dictionary_learning.trainers.standard import StandardTrainer
    from dictionary_learning.trainers.top_k import TopKTrainer
    from dictionary_learning.training import trainSAE

    from saev_store.integrations.dictionary_learning import activation_buffer

    class Plain:
        """Batches from a file."""

        def __init__(self) -> None:
            self._batches = iter(torch.from_numpy(np.load(folder / "batches.npy")))

        def __iter__(self) -> Iterator[torch.Tensor]:
            return self

        def __next__(self) -> torch.Tensor:
            return next(self._batches).clone()

    found: dict[str, object] = {}
    for name, data in (("store", activation_buffer(loader(store, layer=11))), ("plain", Plain())):
        seen: list[dict[str, list]] = []
        trained: list[TopKTrainer | StandardTrainer] = []

        def watched_trainer(base: type, seen: list = seen, trained: list = trained) -> type:
            class Watched(base):
                def __init__(self, **given: object) -> None:
                    super().__init__(**given)
                    self.seen = {"rows": [], "losses": []}
                    seen.append(self.seen)
                    trained.append(self)

                def loss(self, x: torch.Tensor, **given: object) -> object:
                    loss = super().loss(x, **given)
                    self.seen["rows"].append((x * self.config["norm_factor"])[:, :2].round().int().tolist())
                    self.seen["losses"].append(loss.item())
                    return loss

                @property
                def config(self) -> dict:  # the package's are made anew each time, and it writes into them
                    if "_config" not in self.__dict__:
                        self._config = super().config
                    return self._config

            return Watched

        shared = {"activation_dim": 8, "dict_size": 32, "layer": 11, "lm_name": "tiny", "steps": 60, "warmup_steps": 5}
        shared |= {"device": "cpu", "lr": 1e-2, "seed": 0}
        configs = [
            {"trainer": watched_trainer(TopKTrainer), "k": 4, **shared},
            {"trainer": watched_trainer(StandardTrainer), "sparsity_warmup_steps": 10, **shared},
        ]
        trainSAE(data, configs, steps=60, device="cpu", normalize_activations=True, save_dir=str(folder / name))
        found[name] = seen
        if name == "store":
            found["norm"] = trained[0].config["norm_factor"]
            found["evaluation"] = evaluate(trained[0].ae, data, n_batches=4)
            found["config"] = json.loads((folder / "store/trainer_1/config.json").read_text())["buffer"]
            data.close()
    return found


TOOLS = {
    "saelens": saelens,
    "dictionaries": dictionaries,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    tool, store, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    (folder / "seen.json").write_text(json.dumps(TOOLS[tool](store, folder)))
