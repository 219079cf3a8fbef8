"""How fast shuffled rows arrive on a GPU, and whether a trainer there waits for them.

    python benchmarks/gpu.py [--gib N] [--rounds N] [--folder DIR]

One of three layers of a store in the page cache, ViT-B/16's shape, in batches of 16,384 x 768 float32. First nothing is done
with the batches, beside copies of one pinned batch. Then a sparse autoencoder of 24,576 features takes a step with each, and is
compared with the same steps over one batch that is there already. All take turns; medians are shown.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator

import torch
from _common import BATCH, D_MODEL, LAYER, VECTOR, Line, report
from loaders import make_loaded

from saev_store.torch import StoreLoader

DEVICE = "cuda"
D_SAE, N_BATCHES = 24_576, 60


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


def ours(url: str) -> Iterator[torch.Tensor]:
    """The shuffled loader, epoch after epoch; the first batch of the first one is the start."""
    with StoreLoader(url, layer=LAYER, batch_size=BATCH, drop_last=True, window_bytes=1 << 30, device=DEVICE) as loader:
        yield from itertools.islice((batch["act"] for _ in itertools.count() for batch in loader), N_BATCHES)


def pinned_copies() -> Iterator[torch.Tensor]:
    """The limit of the way to the device."""
    source = torch.randn((BATCH, D_MODEL)).pin_memory()
    for _ in range(N_BATCHES):
        yield source.to(DEVICE, non_blocking=True)


def seconds_per_batch(batches: Iterable[torch.Tensor], use: Callable[[torch.Tensor], object]) -> float:
    """Of all batches but the first two, which are the start."""
    started = 0.0
    for number, act in enumerate(batches):
        use(act)
        if number == 1:
            torch.cuda.synchronize()
            started = time.perf_counter()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / (N_BATCHES - 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=3.0, help="size of the store")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where the store is made")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as work:
        url = make_loaded(work, args.gib).url
        trainer, there = Trainer(), torch.randn((BATCH, D_MODEL), device=DEVICE)
        runs = {
            "batches": lambda: seconds_per_batch(ours(url), lambda act: act),
            "copies of a pinned batch": lambda: seconds_per_batch(pinned_copies(), lambda act: act),
            "steps": lambda: seconds_per_batch(ours(url), trainer.step),
            "steps there": lambda: seconds_per_batch([there] * N_BATCHES, trainer.step),
        }
        found: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(args.rounds):
            for name in [*runs][:: 1 if number % 2 else -1]:
                found[name].append(runs[name]())
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
    report(lines, facts)


if __name__ == "__main__":
    main()
