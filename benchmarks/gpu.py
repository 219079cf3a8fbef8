"""How fast shuffled rows arrive on a GPU, and whether a trainer there waits for them, beside the limits and other ways.

    python benchmarks/gpu.py [--gib N] [--rounds N] [--folder DIR] [--json]

One of three layers of a store in the page cache, ViT-B/16's shape, in batches of 16,384 x 768 float32. First nothing is done
with the batches: the limits are copies of one pinned batch, and rows picked out of the GPU's own memory. Then a sparse
autoencoder of 24,576 features takes a step with each, and is compared with the same steps over one batch that is there
already. All take turns; medians are shown. Where a way is too slow to be waited for, its first batches are measured.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
import torch
from _common import Line, report
from _loader_peers import BATCH, CONTENT, D_MODEL, LAYER, LAYERS, TOKENS, VECTOR, MemmapRows
from loaders import make_store, warm
from torch.utils.data import DataLoader, RandomSampler

from saev_store import ShardStore
from saev_store.torch import StoreLoader

DEVICE = "cuda"
D_SAE = 24_576
Batches = Callable[[], Iterator[torch.Tensor]]


class Trainer:
    """Steps of a ReLU autoencoder in TF32, as scripts take them."""

    def __init__(self) -> None:
        torch.set_float32_matmul_precision("high")
        torch.manual_seed(0)
        self._encoder = torch.nn.Linear(D_MODEL, D_SAE, device=DEVICE)
        self._decoder = torch.nn.Linear(D_SAE, D_MODEL, device=DEVICE)
        self._optimizer = torch.optim.Adam([*self._encoder.parameters(), *self._decoder.parameters()], fused=True)

    def step(self, act: torch.Tensor) -> None:
        features = torch.relu(self._encoder(act))
        loss = (self._decoder(features) - act).square().mean() + 1e-3 * features.mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def ours(url: str, n: int, window_mib: int, **options: object) -> Batches:
    """The shuffled loader, epoch after epoch; the first batch of the first one is the start."""

    def batches() -> Iterator[torch.Tensor]:
        with StoreLoader(
            url, layer=LAYER, batch_size=BATCH, drop_last=True, window_bytes=window_mib << 20, **options
        ) as loader:
            left = n
            while left > 0:
                for batch in islice(loader, left):
                    left -= 1
                    yield batch["act"]

    return batches


def on_the_device(batches: Batches) -> Batches:
    """What scripts do with the loaders of others: pin, then copy without waiting."""

    def moved() -> Iterator[torch.Tensor]:
        for act in batches():
            yield (act if act.is_pinned() else act.pin_memory()).to(DEVICE, non_blocking=True)

    return moved


def data_loader(store: ShardStore, n: int, n_workers: int) -> Batches:
    """PyTorch's own, over a map of the shards."""
    rows = MemmapRows(store)

    def batches() -> Iterator[torch.Tensor]:
        sampler = RandomSampler(rows, num_samples=n * BATCH)
        yield from DataLoader(rows, sampler=sampler, batch_size=BATCH, num_workers=n_workers, pin_memory=True)

    return batches


def gathers(store: ShardStore, n: int) -> Batches:
    """The best loop written by hand: rows of a batch picked out of the maps shard by shard."""
    rows = MemmapRows(store)
    flat = [shard.reshape(-1, D_MODEL) for shard in rows.maps]

    def batches() -> Iterator[torch.Tensor]:
        rng = np.random.default_rng(2)
        for _ in range(n):
            example, token = np.divmod(rng.integers(0, len(rows), BATCH), CONTENT)
            shard, within = np.divmod(example, rows.per_shard)
            vectors = (within * len(LAYERS) + LAYERS.index(LAYER)) * TOKENS + 1 + token
            out = np.empty((BATCH, D_MODEL), np.float32)
            for number, some in enumerate(flat):
                chosen = shard == number
                out[chosen] = some[vectors[chosen]]
            yield torch.from_numpy(out)

    return batches


def pinned_copies(n: int) -> Batches:
    """The limit of the way to the device."""
    source = torch.randn((BATCH, D_MODEL)).pin_memory()

    def batches() -> Iterator[torch.Tensor]:
        for _ in range(n):
            yield source.to(DEVICE, non_blocking=True)

    return batches


def picked_there(n: int) -> Batches:
    """The limit of a window on the device."""
    rows = torch.randn((256 << 20) // VECTOR, D_MODEL, device=DEVICE)
    index = torch.randint(0, len(rows), (n, BATCH), device=DEVICE)

    def batches() -> Iterator[torch.Tensor]:
        for some in index:
            yield rows[some]

    return batches


def seconds_per_batch(batches: Batches, use: Callable[[torch.Tensor], object]) -> float:
    """Of all batches but the first two, which are the start."""
    n, started = 0, 0.0
    for act in batches():
        use(act)
        n += 1
        if n == 2:
            torch.cuda.synchronize()
            started = time.perf_counter()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / (n - 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=3.0, help="size of the store")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--window-mib", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="of PyTorch's DataLoader")
    parser.add_argument("--folder", default=None, help="where the store is made")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    work = tempfile.mkdtemp(prefix="saev-store-bench", dir=args.folder)
    try:
        store = ShardStore.open(make_store(work, int(args.gib * 2**30)))
        warm(store.url)
        n, window = args.batches, args.window_mib
        ways: dict[str, Batches] = {
            "ours, batches copied": ours(store.url, n, window, device=DEVICE),
            "ours, window there": ours(store.url, n, window, device=DEVICE, window_device=DEVICE),
            "ours, copied by the script": on_the_device(ours(store.url, n, window)),
            "gather out of maps, pin, copy": on_the_device(gathers(store, 8)),
            f"DataLoader, {args.workers} workers": on_the_device(data_loader(store, 8 * args.workers, args.workers)),
            "copies of a pinned batch": pinned_copies(n),
            "rows picked there": picked_there(n),
        }
        trainer, there = Trainer(), torch.randn((BATCH, D_MODEL), device=DEVICE)
        found: dict[str, list[float]] = {}
        trained = [name for name in ways if name.startswith("ours") or "gather" in name]
        for number in range(args.rounds):
            order = [*ways][number % len(ways) :] + [*ways][: number % len(ways)]
            for name in order:
                found.setdefault(name, []).append(seconds_per_batch(ways[name], lambda act: act))
            for name in trained:
                found.setdefault(f"train: {name}", []).append(seconds_per_batch(ways[name], trainer.step))
            found.setdefault("train: there", []).append(
                seconds_per_batch(lambda: iter([there] * args.batches), trainer.step)
            )
    finally:
        shutil.rmtree(work)
    middle = {name: statistics.median(values) for name, values in found.items()}
    nbytes = BATCH * VECTOR / 1e9

    def rates(what: str, against: str, goal: str = "") -> Line:
        return Line(
            what, nbytes / middle[what], nbytes / middle[against], "GB/s", against, goal, middle[against] / middle[what]
        )

    limit, gather, loader = "copies of a pinned batch", "gather out of maps, pin, copy", [*ways][4]
    lines = [rates(what, against) for what in [*ways][:3] for against in (limit, gather, loader)]
    lines.append(rates("ours, window there", "rows picked there"))
    lines += [
        Line(f"train: {name}", 1 / middle[f"train: {name}"], 1 / middle["train: there"], "step/s", "a batch that is there", ">= 0.95" if "ours, b" in name else "", middle["train: there"] / middle[f"train: {name}"])
        for name in trained
    ]  # fmt: skip
    facts = {
        "device": torch.cuda.get_device_name(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
    }
    report(lines, facts, as_json=args.json)


if __name__ == "__main__":
    main()
