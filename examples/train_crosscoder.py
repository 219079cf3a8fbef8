"""Train a crosscoder: one set of latents for the same token in several layers of a store.

    python examples/train_crosscoder.py STORE --layers 2 5 11 --out runs/crosscoder
    python examples/train_crosscoder.py STORE --layers 2 5 11 --out runs/crosscoder --resume
    torchrun --nproc-per-node 2 examples/train_crosscoder.py STORE --layers 2 5 11 --out runs/crosscoder

`stack_layers=True` puts the layers of a token into one row, which is one read where they lie next to each other. Each layer is
scaled by itself: norms grow with depth, and the last layer would be all of the loss. Ranks and resuming as in train_sae.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from training import Run, check_batches, decode, layer_key, options, ranks, unexplained_variance

from saev_store.torch import StoreLoader


class Crosscoder(nn.Module):
    """Encodes all layers of a token into k latents of one set, and decodes these into each layer."""

    def __init__(self, n_layers: int, d_model: int, n_latents: int, k: int) -> None:
        super().__init__()
        self.k = k
        self.bias = nn.Parameter(torch.zeros(n_layers * d_model))
        self.decoder = nn.Parameter(nn.functional.normalize(torch.randn(n_latents, n_layers * d_model), dim=1))
        self.encoder = nn.Parameter(self.decoder.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        values, latents = torch.topk(torch.relu((x.flatten(1) - self.bias) @ self.encoder.T), self.k, dim=1)
        return (decode(values, latents, self.decoder) + self.bias).view_as(x)

    @torch.no_grad()
    def normalize_decoder(self) -> None:
        """The decoder vector of a latent has length one over all layers together: what it has in each is learned."""
        self.decoder.copy_(nn.functional.normalize(self.decoder, dim=1))

    def shares(self, n_layers: int) -> Tensor:
        """Which part of a latent's decoder vector lies in each layer, (latents, layers); rows sum to one."""
        parts = self.decoder.detach().unflatten(1, (n_layers, -1)).square().sum(dim=2)
        return parts / parts.sum(dim=1, keepdim=True)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("store")
    parser.add_argument("--layers", type=layer_key, nargs="+", required=True, help="labels such as 2 5:mlp_out 11")
    args = parser.parse_args()
    with ranks() as here:
        loader = StoreLoader(
            args.store, layer=tuple(args.layers), stack_layers=True, batch_size=args.batch_size // here.world,
            drop_last=True, normalize="scale_norm_per_layer", seed=args.seed, device=here.device,
        )  # fmt: skip
        check_batches(len(loader))
        torch.manual_seed(args.seed)
        model = Crosscoder(len(args.layers), loader.d_model, args.latents, args.k).to(here.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
        run = Run(args, here, model=model, optimizer=optimizer, loader=loader)
        while not run.is_over:
            for batch in loader:
                x = batch["act"]  # (batch, layers, d_model)
                loss = unexplained_variance(x, model(x))
                optimizer.zero_grad()
                loss.backward()
                here.average(parameter.grad for parameter in model.parameters())
                optimizer.step()
                model.normalize_decoder()
                run.count(loss)
                if run.is_over:
                    break
        if here.rank == 0:
            own = model.shares(len(args.layers)).amax(dim=1) > 0.9
            print(f"{int(own.sum())} of {len(own)} latents have more than 90% of their decoder in one layer")
        loader.close()


if __name__ == "__main__":
    main()
