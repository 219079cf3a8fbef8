"""Train a TopK sparse autoencoder on a store of activations: checkpoints, exact resume, a picture of the loss.

    python examples/train_sae.py STORE --layer 11 --out runs/sae
    python examples/train_sae.py STORE --layer 11 --out runs/sae --resume
    torchrun --nproc-per-node 2 examples/train_sae.py STORE --layer 11 --out runs/sae

Runs on a GPU where there is one, else on the CPU. With several ranks the batch size counts for all of them together, so a
run may be continued on another number of ranks: the loader's state knows which rows are left.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from saev_store.torch import ShuffledConfig, ShuffledDataLoader


class TopK(nn.Module):
    """x ≈ b + D·topk(E·(x - b)), with decoder columns of length one."""

    def __init__(self, d_model: int, n_latents: int, k: int) -> None:
        super().__init__()
        self.k = k
        self.bias = nn.Parameter(torch.zeros(d_model))
        self.decoder = nn.Parameter(nn.functional.normalize(torch.randn(n_latents, d_model), dim=1))
        self.encoder = nn.Parameter(self.decoder.detach().clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, latents = torch.topk(torch.relu((x - self.bias) @ self.encoder.T), self.k, dim=1)
        return nn.functional.embedding_bag(
            latents, self.decoder, per_sample_weights=values, mode="sum"
        ) + self.bias, latents


def picture(losses: list[float], path: Path) -> None:
    """The curve as an SVG, so that no plotting library is needed."""
    top = max(losses)
    points = " ".join(
        f"{600 * i / max(len(losses) - 1, 1):.1f},{200 - 190 * loss / top:.1f}" for i, loss in enumerate(losses)
    )
    text = f"<text x='4' y='14' font-size='12'>unexplained variance: {losses[0]:.3f} to {losses[-1]:.3f}</text>"
    line = f"<polyline points='{points}' fill='none' stroke='#1f77b4' stroke-width='1.5'/>"
    path.write_text(f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 600 200'>{text}{line}</svg>\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--layer", type=int, required=True)
    parser.add_argument("--out", type=Path, default=Path("sae"))
    parser.add_argument("--batch-size", type=int, default=4096, help="rows of a step, over all ranks")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--latents", type=int, default=4096)
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    world = int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    if world > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank() if world > 1 else 0
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if cuda else "cpu"
    cfg = ShuffledConfig(
        shards=args.store, layer=args.layer, batch_size=args.batch_size // world, drop_last=True, scale_norm=True,
        seed=args.seed, device=device,
    )  # fmt: skip
    loader = ShuffledDataLoader(cfg)  # rank and world come from torch.distributed
    torch.manual_seed(args.seed)
    model = TopK(loader.d_model, args.latents, args.k).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    step, losses, checkpoint = 0, [], args.out / "checkpoint.pt"
    args.out.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        print(loader.explain(), flush=True)
    if args.resume:
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        step, losses = saved["step"], saved["losses"]

    while step < args.steps:
        for batch in loader:
            x = batch["act"]
            reconstruction, _ = model(x)
            loss = (x - reconstruction).square().sum(dim=1).mean() / (x - x.mean(dim=0)).square().sum(dim=1).mean()
            optimizer.zero_grad()
            loss.backward()
            loss = loss.detach()
            if world > 1:  # the mean over ranks: equal parts of one global batch
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= world
                dist.all_reduce(loss)
                loss /= world
            optimizer.step()
            with torch.no_grad():
                model.decoder.copy_(nn.functional.normalize(model.decoder, dim=1))
            step += 1
            losses.append(float(loss))
            if rank == 0 and (step % args.save_every == 0 or step == args.steps):
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "loader": loader.state_dict(),
                }
                torch.save({**state, "step": step, "losses": losses}, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").replace(checkpoint)
                picture(losses, args.out / "loss.svg")
                measured = loader.metrics()
                print(f"step {step}: loss {losses[-1]:.4f}, {measured.rows_per_s:,.0f} rows/s, waited {measured.waited_s:.2f} s", flush=True)  # fmt: skip
            if step == args.steps:
                break
    loader.close()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
