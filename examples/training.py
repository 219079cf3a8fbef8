"""What the examples share: options, ranks, checkpoints that no kill can damage, the picture of the loss."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn


def options(description: str | None) -> argparse.ArgumentParser:
    """The options that all examples have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("run"), help="folder of the checkpoint and the picture")
    parser.add_argument("--batch-size", type=int, default=1024, help="rows of a step, over all ranks")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--latents", type=int, default=1024)
    parser.add_argument("--k", type=int, default=32, help="latents that are active for a row")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--save-every", type=int, default=100, help="steps from one checkpoint to the next")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out, if there is one")
    return parser


def layer_key(text: str) -> int | tuple[int, str]:
    """A layer as the command line has it: 5, or 5:mlp_out."""
    label, _, hook_point = text.partition(":")
    return (int(label), hook_point) if hook_point else int(label)


class Ranks(NamedTuple):
    """The place of this process among those of `torchrun`; alone, it is rank 0 of 1."""

    rank: int
    world: int
    device: str

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its mean over the ranks, which have equal parts of one batch."""
        if self.world > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)
                tensor.div_(self.world)


@contextmanager
def ranks() -> Iterator[Ranks]:
    """Join the other ranks: with a GPU each where there are GPUs, else on the CPU."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if device != "cpu" else "gloo")
    yield Ranks(rank, world, device)
    if world > 1:
        dist.destroy_process_group()


def decode(values: Tensor, latents: Tensor, decoder: Tensor) -> Tensor:
    """The sum of the active latents' decoder vectors, for each row: (batch, k), (batch, k), (latents, d) to (batch, d)."""
    return nn.functional.embedding_bag(latents, decoder, per_sample_weights=values, mode="sum")


def unexplained_variance(truth: Tensor, prediction: Tensor) -> Tensor:
    """0 for a perfect prediction, 1 for one that is no better than the mean of the batch."""
    return (truth - prediction).square().mean() / (truth - truth.mean(dim=0)).square().mean()


class Stateful(Protocol):
    """A model, an optimizer, or a loader."""

    def state_dict(self) -> Mapping[str, object]: ...
    def load_state_dict(self, state_dict: Mapping[str, object], /) -> object: ...


class Run:
    """Counts the steps, keeps their losses, and writes both, with the states of `parts`, every `--save-every` steps."""

    def __init__(self, args: argparse.Namespace, here: Ranks, **parts: Stateful) -> None:
        self.step = 0
        self._losses: list[float] = []
        self._new: list[Tensor] = []  # on the device, so that no step waits for it
        self._args, self._here, self._parts = args, here, parts
        self._checkpoint = args.out / "checkpoint.pt"
        if args.resume and self._checkpoint.exists():
            saved = torch.load(self._checkpoint, map_location=here.device, weights_only=True)
            for name, part in parts.items():
                part.load_state_dict(saved[name])
            self.step, self._losses = saved["step"], saved["losses"]

    @property
    def is_over(self) -> bool:
        return self.step >= self._args.steps

    def count(self, loss: Tensor) -> None:
        """Count a step, after the optimizer's."""
        mean = loss.detach().clone()
        self._here.average([mean])
        self._new.append(mean)
        self.step += 1
        if self.is_over or self.step % self._args.save_every == 0:
            self._losses += torch.stack(self._new).tolist()
            self._new.clear()
            if self._here.rank == 0:
                self._save()

    def _save(self) -> None:
        self._args.out.mkdir(parents=True, exist_ok=True)
        states = {name: part.state_dict() for name, part in self._parts.items()}
        new = self._checkpoint.with_suffix(".new")
        torch.save({**states, "step": self.step, "losses": self._losses}, new)
        new.replace(self._checkpoint)  # a kill leaves the old one or the new one, never half of it
        draw(self._losses, self._args.out / "loss.svg")
        print(f"step {self.step}: unexplained variance {self._losses[-1]:.4f}", flush=True)


def check_batches(n_batches: int) -> None:
    """End where an epoch has no batch: the loop over epochs would never end."""
    if not n_batches:
        sys.exit("the chosen rows do not fill a batch; choose a smaller --batch-size")


def draw(losses: list[float], path: Path) -> None:
    """The losses as an SVG, which needs no plotting library."""
    left, top, width, height, n_ticks = 70, 20, 520, 240, 5
    highest, last = max(losses), len(losses)
    bottom = top + height
    points = " ".join(
        f"{left + width * (i + 1) / last:.1f},{bottom - height * loss / highest:.1f}" for i, loss in enumerate(losses)
    )
    parts = [f"<path d='M{left} {top}V{bottom}H{left + width}' fill='none' stroke='black'/>"]
    for tick in range(n_ticks + 1):
        x, y = left + width * tick / n_ticks, bottom - height * tick / n_ticks
        parts.append(f"<text x='{x}' y='{bottom + 18}' text-anchor='middle'>{last * tick / n_ticks:g}</text>")
        parts.append(f"<text x='{left - 8}' y='{y + 4}' text-anchor='end'>{highest * tick / n_ticks:.2g}</text>")
    parts.append(f"<text x='{left + width / 2}' y='{bottom + 42}' text-anchor='middle'>step</text>")
    middle = f"18,{top + height / 2}"
    parts.append(f"<text transform='translate({middle}) rotate(-90)' text-anchor='middle'>unexplained variance</text>")
    parts.append(f"<polyline points='{points}' fill='none' stroke='#1f77b4' stroke-width='1.5'/>")
    size = f"viewBox='0 0 {left + width + 30} {bottom + 60}' font-family='sans-serif' font-size='12'"
    path.write_text(f"<svg xmlns='http://www.w3.org/2000/svg' {size}>{''.join(parts)}</svg>\n")
