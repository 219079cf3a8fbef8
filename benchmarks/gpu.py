"""How fast shuffled rows arrive on a GPU, and whether a trainer there waits for them.

    python benchmarks/gpu.py [--gib N] [--rounds N] [--folder DIR] [--json]

One of three layers of a store in the page cache, ViT-B/16's shape, in batches of 16,384 x 768 float32. First nothing is done
with the batches, beside copies of one pinned batch. Then a sparse autoencoder of 24,576 features takes a step with each, and is
compared with the same steps over one batch that is there already. All take turns; medians are shown.
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

import torch
from _common import BATCH, D_MODEL, LAYER, VECTOR, Line, report
from loaders import make_loaded

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


def pinned_copies(n: int) -> Batches:
    """The limit of the way to the device."""
    source = torch.randn((BATCH, D_MODEL)).pin_memory()

    def batches() -> Iterator[torch.Tensor]:
        for _ in range(n):
            yield source.to(DEVICE, non_blocking=True)

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
    parser.add_argument("--folder", default=None, help="where the store is made")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    work = tempfile.mkdtemp(prefix="saev-store-bench", dir=args.folder)
    try:
        store = make_loaded(work, args.gib)
        ways = {
            "batches": ours(store.url, args.batches, args.window_mib, device=DEVICE),
            "copies of a pinned batch": pinned_copies(args.batches),
        }
        trainer, there = Trainer(), torch.randn((BATCH, D_MODEL), device=DEVICE)
        found: dict[str, list[float]] = {}
        for number in range(args.rounds):
            for name in [*ways][:: 1 if number % 2 else -1]:
                found.setdefault(name, []).append(seconds_per_batch(ways[name], lambda act: act))
            for name, batches in (("steps", ways["batches"]), ("steps there", lambda: iter([there] * args.batches))):
                found.setdefault(name, []).append(seconds_per_batch(batches, trainer.step))
    finally:
        shutil.rmtree(work)
    each_s = {name: statistics.median(values) for name, values in found.items()}

    def line(what: str, against: str, size: float, unit: str, goal: str) -> Line:
        ours_s, theirs_s = each_s[what], each_s[against]
        return Line(what, size / ours_s, size / theirs_s, unit, against, goal, theirs_s / ours_s)

    lines = [
        line("batches", "copies of a pinned batch", BATCH * VECTOR / 1e9, "GB/s", "30 GB/s"),
        line("steps", "steps there", 1, "step/s", ">= 0.97"),
    ]
    facts = {
        "device": torch.cuda.get_device_name(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
    }
    report(lines, facts, as_json=args.json)


if __name__ == "__main__":
    main()
