"""Train on the rows of a store with torchdata's StatefulDataLoader; continues from its checkpoint: `torchrun --nproc-per-node 8 train_stateful_dataloader.py`."""

import os
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader

from saev_store.torch import StoreLoader


def main():
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    if device != "cpu":
        torch.cuda.set_device(device)
    distributed.init_process_group()
    loader = StoreLoader("/data/shards/941cc259", layer=11, batch_size=8192)
    batches = StatefulDataLoader(
        loader.as_iterable_dataset(),
        batch_size=None,
        num_workers=1,
        persistent_workers=True,
        pin_memory=device != "cpu",
    )
    sae = nn.Sequential(nn.Linear(loader.d_model, 16_384), nn.ReLU(), nn.Linear(16_384, loader.d_model)).to(device)
    model = DistributedDataParallel(sae)
    optimizer = torch.optim.Adam(sae.parameters(), lr=1e-4)

    checkpoint = Path("checkpoint.pt")
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=False)
        sae.load_state_dict(saved["sae"])
        optimizer.load_state_dict(saved["optimizer"])
        batches.load_state_dict(saved["batches"])
        step = saved["step"]

    while step < 2 * len(loader):
        for batch in batches:
            act = batch["act"].to(device, non_blocking=True)
            loss = nn.functional.mse_loss(model(act), act)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 100 == 0 and distributed.get_rank() == 0:
                states = {"sae": sae.state_dict(), "optimizer": optimizer.state_dict(), "batches": batches.state_dict()}
                torch.save({"step": step, **states}, "checkpoint.tmp")
                os.replace("checkpoint.tmp", checkpoint)

    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
