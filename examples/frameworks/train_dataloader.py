"""Train on the rows of a store with PyTorch's DataLoader; continues from its checkpoint: `torchrun --nproc-per-node 8 train_dataloader.py`."""

import os
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from saev_store.torch import StoreLoader


def main():
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    if device != "cpu":
        torch.cuda.set_device(device)
    distributed.init_process_group()
    loader = StoreLoader("/data/shards/941cc259", layer=11, batch_size=8192)
    batches = DataLoader(loader.as_iterable_dataset(), batch_size=None, num_workers=1, pin_memory=device != "cpu")
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
        at = loader.state_dict()
        for batch in batches:
            act = batch["act"].to(device, non_blocking=True)
            loss = nn.functional.mse_loss(model(act), act)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            at["batch"] += 1
            if step % 100 == 0 and distributed.get_rank() == 0:
                states = {"sae": sae.state_dict(), "optimizer": optimizer.state_dict(), "loader": at}
                torch.save({"step": step, **states}, "checkpoint.tmp")
                os.replace("checkpoint.tmp", checkpoint)
        loader.set_epoch(loader.epoch + 1)

    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
