"""Train a transcoder: what goes into a part of a model predicts, through sparse latents, what comes out of it.

    python examples/train_transcoder.py STORE STORE --source 5:resid_mid --target 5:mlp_out --out runs/transcoder
    python examples/train_transcoder.py STORE STORE --source 5:resid_mid --target 5:mlp_out --out runs/transcoder --resume
    torchrun --nproc-per-node 2 examples/train_transcoder.py STORE OTHER --source 11 --target 11 --out runs/transcoder

Source and target are layers of two stores of the same tokens, which may be one store. The loader is that of `saev_store.pair`: it
refuses stores of other tokens, and reads both in one order. Ranks and resuming as in train_sae.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from training import Run, check_batches, decode, layer_key, options, ranks, unexplained_variance

from saev_store import ShardStore, pair
from saev_store.torch import StoreLoader


class Transcoder(nn.Module):
    """y ≈ c + D·topk(E·(x - b)), with decoder vectors of length one."""

    def __init__(self, d_source: int, d_target: int, n_latents: int, k: int) -> None:
        super().__init__()
        self.k = k
        self.source_bias = nn.Parameter(torch.zeros(d_source))
        self.target_bias = nn.Parameter(torch.zeros(d_target))
        self.encoder = nn.Parameter(nn.functional.normalize(torch.randn(n_latents, d_source), dim=1))
        self.decoder = nn.Parameter(nn.functional.normalize(torch.randn(n_latents, d_target), dim=1))

    def forward(self, source: Tensor) -> Tensor:
        active = torch.relu((source - self.source_bias) @ self.encoder.T)
        values, latents = torch.topk(active, self.k, dim=1)
        return decode(values, latents, self.decoder) + self.target_bias

    @torch.no_grad()
    def normalize_decoder(self) -> None:
        self.decoder.copy_(nn.functional.normalize(self.decoder, dim=1))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("source_store")
    parser.add_argument("target_store")
    parser.add_argument("--source", type=layer_key, required=True, help="a label such as 5, or 5:resid_mid")
    parser.add_argument("--target", type=layer_key, required=True, help="a label such as 5, or 5:mlp_out")
    args = parser.parse_args()
    with ranks() as here:
        stores = ShardStore.open(args.source_store), ShardStore.open(args.target_store)
        loader = StoreLoader(
            pair(*stores).sel(layer_a=args.source, layer_b=args.target), batch_size=args.batch_size // here.world, drop_last=True, normalize="center_and_scale_norm", seed=args.seed,
            device=here.device,
        )  # fmt: skip
        check_batches(len(loader))
        if here.rank == 0:
            print(loader.explain(), flush=True)
        torch.manual_seed(args.seed)
        model = Transcoder(*(store.layout.d_model for store in stores), args.latents, args.k).to(here.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
        run = Run(args, here, model=model, optimizer=optimizer, loader=loader)
        while not run.is_over:
            for batch in loader:
                source, target = batch["act_a"], batch["act_b"]  # (batch, d_model) of each store
                loss = unexplained_variance(target, model(source))
                optimizer.zero_grad()
                loss.backward()
                here.average(parameter.grad for parameter in model.parameters())
                optimizer.step()
                model.normalize_decoder()
                run.count(loss)
                if run.is_over:
                    break
        loader.close()


if __name__ == "__main__":
    main()
