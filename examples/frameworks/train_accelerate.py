"""Train on the rows of a store with Accelerate; continues from its checkpoint: `accelerate launch train_accelerate.py`."""

from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from saev_store.torch import StoreLoader

accelerator = Accelerator()
device = str(accelerator.device)
loader = StoreLoader("/data/shards/941cc259", layer=11, batch_size=8192, device=device)
sae = nn.Sequential(nn.Linear(loader.d_model, 16_384), nn.ReLU(), nn.Linear(16_384, loader.d_model))
model, optimizer = accelerator.prepare(sae, torch.optim.Adam(sae.parameters(), lr=1e-4))
accelerator.register_for_checkpointing(loader)

step = 0
checkpoints = sorted(Path("checkpoints").glob("step-*"))
if checkpoints:
    accelerator.load_state(checkpoints[-1])
    step = int(checkpoints[-1].name.removeprefix("step-"))

while loader.epoch < 2:
    for batch in loader:
        loss = nn.functional.mse_loss(model(batch["act"]), batch["act"])
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            accelerator.save_state(f"checkpoints/step-{step:09d}")

accelerator.end_training()
