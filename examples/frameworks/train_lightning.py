"""Train on the rows of a store with Lightning; continues from its checkpoint: `torchrun --nproc-per-node 8 train_lightning.py`."""

from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from saev_store.torch import StoreLoader


class Sae(lightning.LightningModule):
    def __init__(self, d_model):
        super().__init__()
        self.encode, self.decode = nn.Linear(d_model, 16_384), nn.Linear(16_384, d_model)

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.decode(self.encode(batch["act"]).relu()), batch["act"])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-4)


if __name__ == "__main__":
    loader = StoreLoader("/data/shards/941cc259", layer=11, batch_size=8192)
    every_100 = ModelCheckpoint("checkpoints", every_n_train_steps=100, save_last=True)
    trainer = lightning.Trainer(max_epochs=2, devices=8, strategy="ddp", callbacks=[every_100], logger=False)
    last = Path("checkpoints/last.ckpt")
    trainer.fit(Sae(loader.d_model), loader, ckpt_path=last if last.exists() else None)
