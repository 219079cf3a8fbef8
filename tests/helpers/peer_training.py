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


def transfer(store: str, folder: Path) -> dict[str, object]:
    """Samples of hs-connectors: out of files, as its own backend reads them, and out of a store that was imported from these."""
    import argparse

    import numpy as np
    from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer
    from safetensors.torch import save_file
    from torch.utils.data import DataLoader

    from saev_store.cli import main

    del store
    states = folder / "hidden_states"
    states.mkdir()
    torch.manual_seed(0)
    for number, n_tokens in {0: 5, 1: 12, 3: 1, 10: 30, 11: 7}.items():
        sample = {
            "hidden_states": torch.randn(n_tokens, 3, 8).bfloat16(),
            "token_ids": torch.randint(0, 50_000, (n_tokens,)),
        }
        save_file(sample, str(states / f"hs_{number}.safetensors"))
    command = page_block("integrations.md", "hs-connectors", "saev-store import", language="console").strip()
    places = {"/data/hidden_states": str(states), "/data/shards": str(folder / "stores")}
    assert main(smaller(command, places).removeprefix("$ saev-store ").split()) == 0
    (imported,) = (folder / "stores").iterdir()
    exec(page_block("integrations.md", "hs-connectors", "register()"), {})
    parser, samples = argparse.ArgumentParser(), {}
    for name in ("file", "saev_store"):
        HiddenStatesBackend.registry[name].add_train_args(parser)
    args = parser.parse_args(["--saev-store", str(imported)])
    for name in ("file", "saev_store"):
        backend = HiddenStatesBackend.registry[name].from_train_args(args, str(folder))
        assert isinstance(backend, HiddenStatesTransfer)
        # Two processes, as speculators' data sets are read.
        numbers = DataLoader(
            range(13), batch_size=1, num_workers=2, collate_fn=lambda some, of=backend: of.get_cached(some[0])
        )
        samples[name] = list(numbers)
    both = list(zip(samples["file"], samples["saev_store"], strict=True))
    return {
        "missing": [[one is None, other is None] for one, other in both],
        "same": [
            torch.equal(one[key], other[key]) and one[key].dtype == other[key].dtype
            for one, other in both if one is not None for key in ("hidden_states", "token_ids")
        ],
        "shapes": [list(np.shape(one["hidden_states"])) for one, _ in both if one is not None],
    }  # fmt: skip


def cached(store: str, folder: Path) -> dict[str, object]:
    """What two `ActivationsStore`s of SAELens give: one reads a cache that SAELens has written, one a store that was imported from it."""
    import warnings

    from datasets import Dataset
    from peer_caches import CONTEXT, D_MODEL, HOOK
    from peer_caches import saelens as write_cache
    from sae_lens.training.activations_store import ActivationsStore
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    from saev_store.sources.caches import import_cache

    del store
    write_cache(folder, "float32")
    imported = import_cache(str(folder / "cache"), str(folder / "stores"), family="gpt2", ckpt="tiny")
    sizes = {
        "n_layers": 1,
        "d_model": D_MODEL,
        "n_ctx": CONTEXT,
        "d_head": 8,
        "n_heads": 2,
        "d_mlp": 32,
        "d_vocab": 100,
    }
    model = HookedTransformer(HookedTransformerConfig(**sizes, act_fn="gelu", device="cpu"))
    shared = {
        "model": model, "streaming": False, "hook_name": HOOK, "hook_head_index": None, "context_size": CONTEXT, "d_in": D_MODEL,
        "n_batches_in_buffer": 4, "total_training_tokens": 1000, "store_batch_size_prompts": 5, "train_batch_size_tokens": 16,
        "prepend_bos": False, "normalize_activations": "none", "device": torch.device("cpu"), "dtype": "float32",
        "exclude_special_tokens": torch.tensor([3, 50, 51]),
    }  # fmt: skip
    texts = Dataset.from_dict({"tokens": [[1] * CONTEXT] * 4})
    given: dict[str, list] = {}
    for name in ("cache", "store"):
        path = str(folder / "cache") if name == "cache" else None
        activations = ActivationsStore(dataset=None if path else texts, cached_activations_path=path, **shared)
        if name == "store":
            block = page_block("integrations.md", "SAELens", "use_store(activations_store")
            exec(smaller(block, {"/data/shards/941cc259": imported.url}), {"activations_store": activations})
        batches = []
        for _ in range(6):  # of 24 contexts, five at a time: more than an epoch
            acts, ids = activations.get_raw_llm_batch()
            batches.append([acts.tolist(), ids.tolist()])
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a new epoch begins
            mixed = [next(activations).tolist() for _ in range(20)]
        given[name] = [batches, mixed]
    return {"same": given["cache"] == given["store"], "raw": [len(acts) for acts, _ in given["store"][0]]}


def llamascopium(store: str, folder: Path) -> list[dict[str, list]]:
    """One run of Llamascopium's `Trainer` from beginning to end, one that ends early, and one that goes on from its checkpoint."""
    from llamascopium import SAEConfig, SparseAutoEncoder
    from llamascopium.trainer import Trainer, TrainerConfig

    from saev_store.integrations.llamascopium import activation_stream

    hook = "blocks.11.hook_resid_post"
    checkpoint = folder / "checkpoints" / f"step_{STOP}"
    runs = []
    for name in ("whole", "stopped", "continued"):
        stream = activation_stream(loader(store, layer=11), n_batches=STOP if name == "stopped" else None)
        if name == "continued":
            sae = SparseAutoEncoder.from_pretrained(str(checkpoint))
            trainer = Trainer.from_checkpoint(sae, str(checkpoint))
            stream.load_state_dict(json.loads((checkpoint / "stream.json").read_text()))
        else:
            given = {"hook_point_in": hook, "hook_point_out": hook, "d_model": 8, "expansion_factor": 4, "top_k": 4}
            given |= {"act_fn": "topk", "norm_activation": "batch-wise", "device": "cpu", "dtype": torch.float32}
            sae = SparseAutoEncoder(SAEConfig(**given))
            torch.manual_seed(0)
            for parameter in sae.parameters():
                torch.nn.init.normal_(parameter, std=0.3)
            trainer = Trainer(
                TrainerConfig(
                    total_training_tokens=STEPS * BATCH, lr=1e-2, lr_scheduler_name="constant", initial_k=4, k_warmup_steps=0,
                    n_checkpoints=0, skip_metrics_calculation=True, exp_result_path=str(folder / name),
                )
            )  # fmt: skip
        seen: dict[str, list] = {"rows": [], "losses": []}
        step, normalize = trainer._training_step, sae.normalize_activations

        def watched(sae: object, batch: dict, seen: dict = seen, step: Callable = step) -> dict:
            output = step(sae, batch)
            seen["losses"].append(output["loss"].item())
            return output

        def as_given(batch: dict, seen: dict = seen, normalize: Callable = normalize) -> dict:
            seen["rows"].append(rows_of(batch[hook]))
            return normalize(batch)

        trainer._training_step, sae.normalize_activations = watched, as_given
        trainer.fit(sae, stream)
        if name == "stopped":
            trainer.save_checkpoint(sae, folder)
            (checkpoint / "stream.json").write_text(json.dumps(stream.state_dict()))
        stream.close()
        runs.append(seen)
    return runs


TOOLS = {
    "saelens": saelens,
    "dictionaries": dictionaries,
    "transfer": transfer,
    "cached": cached,
    "llamascopium": llamascopium,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    tool, store, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    (folder / "seen.json").write_text(json.dumps(TOOLS[tool](store, folder)))
