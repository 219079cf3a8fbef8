"""Train a TopK sparse autoencoder on a store of activations: checkpoints, exact resume, a picture of the loss.

    python examples/train_sae.py STORE --layer 11 --out runs/sae
    python examples/train_sae.py STORE --layer 11 --out runs/sae --resume
    torchrun --nproc-per-node 2 examples/train_sae.py STORE --layer 11 --out runs/sae

Runs on a GPU where there is one, else on the CPU. With several ranks the batch size counts for all of them together, so a
run may be continued on another number of ranks: the loader's state knows which rows are left.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from training import Run, check_batches, decode, layer_key, options, ranks, unexplained_variance

from saev_store.torch import StoreLoader


class TopK(nn.Module):
    """x ≈ b + D·topk(E·(x - b)), with decoder vectors of length one."""

    def __init__(self, d_model: int, n_latents: int, k: int) -> None:
        super().__init__()
        self.k = k
        self.bias = nn.Parameter(torch.zeros(d_model))
        self.decoder = nn.Parameter(nn.functional.normalize(torch.randn(n_latents, d_model), dim=1))
        self.encoder = nn.Parameter(self.decoder.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        values, latents = torch.topk(torch.relu((x - self.bias) @ self.encoder.T), self.k, dim=1)
        return decode(values, latents, self.decoder) + self.bias

    @torch.no_grad()
    def normalize_decoder(self) -> None:
        self.decoder.copy_(nn.functional.normalize(self.decoder, dim=1))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("store")
    parser.add_argument("--layer", type=layer_key, required=True, help="a label such as 11, or 11:mlp_out")
    args = parser.parse_args()
    with ranks() as here:
        loader = StoreLoader(  # rank and world come from torch.distributed
            args.store, layer=args.layer, batch_size=args.batch_size // here.world, drop_last=True,
            normalize="scale_norm", seed=args.seed, device=here.device,
        )  # fmt: skip
        check_batches(len(loader))
        if here.rank == 0:
            print(loader.explain(), flush=True)
        torch.manual_seed(args.seed)
        model = TopK(loader.d_model, args.latents, args.k).to(here.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
        run = Run(args, here, model=model, optimizer=optimizer, loader=loader)
        while not run.is_over:
            for batch in loader:  # an epoch
                x = batch["act"]  # (batch, d_model)
                loss = unexplained_variance(x, model(x))
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
