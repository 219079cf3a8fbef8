"""Train on the rows of a store with plain DistributedDataParallel; continues from its checkpoint: `torchrun --nproc-per-node 8 train_ddp.py`."""

import os
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from saev_store.torch import StoreLoader

device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
if device != "cpu":
    torch.cuda.set_device(device)
distributed.init_process_group()

loader = StoreLoader("/data/shards/941cc259", layer=11, batch_size=8192, device=device)
sae = nn.Sequential(nn.Linear(loader.d_model, 16_384), nn.ReLU(), nn.Linear(16_384, loader.d_model)).to(device)
model = DistributedDataParallel(sae)
optimizer = torch.optim.Adam(sae.parameters(), lr=1e-4)

checkpoint = Path("checkpoint.pt")
step = 0
if checkpoint.exists():
    saved = torch.load(checkpoint, map_location=device)
    sae.load_state_dict(saved["sae"])
    optimizer.load_state_dict(saved["optimizer"])
    loader.load_state_dict(saved["loader"])
    step = saved["step"]

while loader.epoch < 2:
    for batch in loader:
        loss = nn.functional.mse_loss(model(batch["act"]), batch["act"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 100 == 0 and distributed.get_rank() == 0:
            states = {"sae": sae.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
            torch.save({"step": step, **states}, "checkpoint.tmp")
            os.replace("checkpoint.tmp", checkpoint)

distributed.destroy_process_group()
