"""Train a BatchTopK sparse autoencoder with SAELens's trainer on a store: checkpoints, exact resume, a picture of the loss.

    python examples/train_batchtopk_saelens.py STORE --layer 11 --out runs/batchtopk
    python examples/train_batchtopk_saelens.py STORE --layer 11 --out runs/batchtopk --resume
    torchrun --nproc-per-node 2 examples/train_batchtopk_saelens.py STORE --layer 11 --out runs/batchtopk

Needs `pip install sae-lens`. SAELens writes checkpoints and, at the end, `final_…`, which `SAE.load_from_disk` reads. Its trainer knows
nothing of ranks: here they get the same gradient and threshold. Each rank chooses its latents over its own part of the batch, and clips
its own gradient, so two ranks do not train exactly as one does.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
import torch.distributed as dist
from sae_lens import BatchTopKTrainingSAE, BatchTopKTrainingSAEConfig
from sae_lens.config import LoggingConfig, SAETrainerConfig
from sae_lens.saes.sae import TrainStepOutput
from sae_lens.training.sae_trainer import SAETrainer
from torch import Tensor
from training import Ranks, check_batches, draw, layer_key, options, ranks, unexplained_variance

from saev_store.integrations.saelens import STATE_NAME, data_provider
from saev_store.torch import StoreLoader

LOSSES_NAME = "losses.json"


class Trainer(SAETrainer[BatchTopKTrainingSAE, BatchTopKTrainingSAEConfig]):
    """SAELens's trainer, on several ranks, which keeps the loss of every step."""

    here: Ranks
    losses: list[float]

    def step(self, batch: Tensor) -> TrainStepOutput:
        output = super().step(batch)
        loss = unexplained_variance(output.sae_in, output.sae_out).detach()
        self.here.average([loss])
        self.losses.append(float(loss))
        return output

    def average(self, *_: object) -> None:
        """Before the optimizer's step: the same gradients, threshold and dead latents on all ranks."""
        self.here.average(parameter.grad for parameter in self.sae.parameters())
        self.here.average([self.sae.topk_threshold])
        if self.here.world > 1:
            dist.all_reduce(self.n_forward_passes_since_fired, dist.ReduceOp.MIN)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("store")
    parser.add_argument("--layer", type=layer_key, required=True, help="a label such as 11, or 11:mlp_out")
    args = parser.parse_args()
    with ranks() as here:
        batch_size = args.batch_size // here.world
        loader = StoreLoader(
                args.store, layer=args.layer, batch_size=batch_size, drop_last=True, normalize="scale_norm",
                seed=args.seed, device=here.device,
            )  # fmt: skip
        check_batches(len(loader))
        torch.manual_seed(args.seed)
        provider = data_provider(loader)
        given = {"d_in": loader.d_model, "d_sae": args.latents, "k": args.k, "device": here.device}
        sae = BatchTopKTrainingSAE(BatchTopKTrainingSAEConfig(**given))
        cfg = SAETrainerConfig(
            total_training_samples=args.steps * batch_size,
            train_batch_size_samples=batch_size,
            lr=args.lr,
            lr_end=args.lr,
            device=here.device,
            n_checkpoints=math.ceil(args.steps / args.save_every) - 1,
            checkpoint_path=str(args.out) if here.rank == 0 else None,
            save_final_checkpoint=True,
            logger=LoggingConfig(log_to_wandb=False),
        )

        def save(checkpoint_path: Path | None) -> None:
            """Complete a checkpoint: the provider's file comes last, so a checkpoint without it is half of one."""
            if checkpoint_path is not None:
                Path(checkpoint_path, LOSSES_NAME).write_text(json.dumps(trainer.losses))
                provider.save_to_checkpoint(checkpoint_path)
                draw(trainer.losses, args.out / "loss.svg")

        trainer = Trainer(cfg, sae, provider, save_checkpoint_fn=save)
        trainer.here, trainer.losses = here, []
        trainer.optimizer.register_step_pre_hook(trainer.average)
        newest = max(args.out.glob(f"[0-9]*/{STATE_NAME}"), key=lambda path: int(path.parent.name), default=None)
        if args.resume and newest is not None:
            trainer.load_trainer_state(newest.parent)
            sae.load_weights_from_checkpoint(newest.parent)
            provider.load_from_checkpoint(newest.parent)
            trainer.losses = json.loads((newest.parent / LOSSES_NAME).read_text())
        trainer.fit()
        provider.close()
        if here.rank == 0:
            print(f"step {len(trainer.losses)}: unexplained variance {trainer.losses[-1]:.4f}")


if __name__ == "__main__":
    main()
