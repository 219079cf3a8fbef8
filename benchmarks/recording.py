"""What recording costs beside the model: `record` against a bare loop of the model over the same batches.

    python benchmarks/recording.py [--rounds 3] [--batches 6] [--only vit] [--device cuda] [--folder DIR]

Models have full shapes and random weights: ViT-B/16 (86M) over JPEG files in memory, three of twelve blocks in float32; a language
model of 160M (the shape of Pythia) over windows of 512 token ids. The bare loop has its batches ready in memory and no hooks. Ours
counts from the first batch to the published store. Rates are those of the recorded vectors.

With `--device cuda` both run on a GPU: float32 and bfloat16 models, pixels that are decoded already, and batches of a GPU's size.
There they are also compared with writing the same bytes to the same folder.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from _common import Line, compare, report
from PIL import Image
from transformers import GPTNeoXConfig, GPTNeoXModel, ViTConfig, ViTModel

from saev_store import ShardStore
from saev_store.record import Images, Texts, adapt, record
from saev_store.record._examples import Batch, ExampleSource


class Photographs:
    """Noise as JPEG files in memory, decoded and normalised when asked for."""

    def __init__(self, n: int) -> None:
        rng = np.random.default_rng(5)
        self._files = list[bytes]()
        for _ in range(n):
            coarse = Image.fromarray(rng.integers(0, 256, (14, 14, 3), np.uint8)).resize((224, 224))
            file = io.BytesIO()
            coarse.save(file, "JPEG")
            self._files.append(file.getvalue())

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, example: int) -> np.ndarray:
        pixels = np.asarray(Image.open(io.BytesIO(self._files[example])), np.float32)
        return np.ascontiguousarray((pixels / 127.5 - 1).transpose(2, 0, 1))


def vit() -> ViTModel:
    torch.manual_seed(3)
    return ViTModel(ViTConfig(), add_pooling_layer=False).eval()


def language_model() -> GPTNeoXModel:
    torch.manual_seed(3)
    config = GPTNeoXConfig(
        vocab_size=50304, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072
    )
    return GPTNeoXModel(config).eval()


def texts(n_rows: int, batch_size: int = 4) -> Texts:
    ids = np.random.default_rng(7).integers(0, 50304, (n_rows, 512))
    return Texts(list(ids), context=512, batch_size=batch_size)


def run_bare(model: torch.nn.Module, batches: Sequence[Batch]) -> None:
    """The model alone, where it is."""
    parameter = next(model.parameters())
    with torch.inference_mode():
        for batch in batches:
            first, *mask = (torch.as_tensor(value).to(parameter.device) for value in batch.inputs)
            if mask:
                model(input_ids=first, attention_mask=mask[0].long(), use_cache=False)
            else:
                model(pixel_values=first.to(parameter.dtype))
    if parameter.is_cuda:
        torch.cuda.synchronize()


def write_plainly(block: memoryview, nbytes: int, folder: Path) -> None:
    """So many bytes in one file, flushed."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for start in range(0, nbytes, len(block)):
            file.write(block[: nbytes - start])
        os.fsync(file.fileno())


def compared(name: str, model: torch.nn.Module, source: ExampleSource, parent: Path, rounds: int) -> Iterator[Line]:
    ready = list(source.batches(0, source.geometry(adapt(model)).n_examples))
    with tempfile.TemporaryDirectory(dir=parent) as root:
        folder = Path(root, "recorded")

        def recorded() -> ShardStore:
            return record(model, source, folder, layers=(3, 7, 11), ckpt="benchmark", progress=False)

        def clean_up() -> None:
            shutil.rmtree(folder, ignore_errors=True)

        nbytes, block = recorded().nbytes, memoryview(np.random.default_rng(1).bytes(64 << 20))
        alone, plain = (lambda: run_bare(model, ready)), (lambda: write_plainly(block, nbytes, parent))
        peers = [("the model alone", alone, ">= 0.95")]
        if next(model.parameters()).is_cuda:
            peers += [("writing as many bytes", plain, "")]
        for against, run, goal in peers:
            yield compare(f"{name}, recorded", recorded, run, nbytes, rounds, goal, against=against, before=clean_up)


def on_a_gpu(device: str, folder: Path, rounds: int, n_batches: int) -> Iterator[Line]:
    """Both models, in two dtypes."""
    pixels = np.random.default_rng(5).standard_normal((64 * n_batches, 3, 224, 224), dtype=np.float32)
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        yield from compared(f"ViT-B/16, {name}", vit().to(device, dtype), Images(pixels, 64), folder, rounds)
        model = language_model().to(device, dtype)
        yield from compared(f"160M LM, {name}", model, texts(16 * n_batches, batch_size=16), folder, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--only", choices=["vit", "language"])
    parser.add_argument("--device", default="cpu", help="cuda: the models on a GPU")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    facts = {"load": os.getloadavg()[0], "threads": torch.get_num_threads(), "torch": torch.__version__}
    lines = list[Line]()
    if args.device != "cpu":
        facts["device"] = torch.cuda.get_device_name(args.device)
        lines += on_a_gpu(args.device, args.folder, args.rounds, args.batches)
    else:
        if args.only != "language":
            lines += compared("ViT-B/16", vit(), Images(Photographs(8 * args.batches), 8), args.folder, args.rounds)
        if args.only != "vit":
            source = texts(4 * args.batches)
            lines += compared("160M language model", language_model(), source, args.folder, args.rounds)
    report(lines, facts)


if __name__ == "__main__":
    main()
