"""What recording costs beside the model: examples/s of `record` against a bare loop of the model.

    python benchmarks/recording.py [--rounds 3] [--batches 6] [--only WORD] [--device cuda] [--folder DIR] [--json]

Models have full shapes and random weights: ViT-B/16 (86M) over JPEG files in memory, three of twelve blocks in float32; a language
model of 160M (the shape of Pythia) over windows of 512 token ids. The bare loop runs the same batches, which are ready in memory, without hooks. Both
take turns. Ours counts from the first batch to the published store.

With `--device cuda` the first two run on a GPU: float32 and bfloat16 models, pixels that are decoded already, and batches of a
GPU's size. Beside the model alone they are compared with writing the same bytes to the same folder.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from _common import Line, report, seconds
from PIL import Image
from transformers import GPTNeoXConfig, GPTNeoXModel, ViTConfig, ViTModel

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


def run_bare(model: torch.nn.Module, batches: Sequence[Batch] | Iterator[Batch]) -> None:
    """The model alone, where it is."""
    names = ("pixel_values",) if isinstance(model, ViTModel) else ("input_ids", "attention_mask")
    parameter = next(model.parameters())
    with torch.inference_mode():
        for batch in batches:
            given = dict(
                zip(names, (torch.as_tensor(value).to(parameter.device) for value in batch.inputs), strict=True)
            )
            if "attention_mask" in given:
                given |= {"attention_mask": given["attention_mask"].long(), "use_cache": False}
            else:
                given["pixel_values"] = given["pixel_values"].to(parameter.dtype)
            model(**given)
    if parameter.is_cuda:
        torch.cuda.synchronize()


def run_recorded(model: torch.nn.Module, source: ExampleSource, folder: Path) -> tuple[float, int]:
    """Seconds of a recording and bytes of its vectors; the store is removed."""
    with tempfile.TemporaryDirectory(dir=folder) as root:
        began_s = time.perf_counter()
        store = record(model, source, root, layers=(3, 7, 11), ckpt="benchmark", progress=False)
        return time.perf_counter() - began_s, store.nbytes


def every_batch(source: ExampleSource, model: torch.nn.Module) -> Iterator[Batch]:
    """All batches of a source."""
    return source.batches(0, source.geometry(adapt(model)).n_examples)


def on_a_gpu(device: str, folder: Path, rounds: int, n_batches: int) -> list[Line]:
    """Both models, in two dtypes, beside the model alone and beside writing the same bytes."""
    lines = list[Line]()
    pixels = np.random.default_rng(5).standard_normal((64 * n_batches, 3, 224, 224), dtype=np.float32)
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        lines += compared(f"ViT-B/16, {name}", vit().to(device, dtype), Images(pixels, 64), folder, rounds)
        lines += compared(
            f"160M LM, {name}", language_model().to(device, dtype), texts(16 * n_batches, batch_size=16), folder, rounds
        )
    return lines


def seconds_of_writing(nbytes: int, folder: Path) -> float:
    """How long the file system takes for so many bytes in one file, flushed."""
    some = np.random.default_rng(1).bytes(64 << 20)

    def write() -> None:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            for _ in range(-(-nbytes // len(some))):
                file.write(some)
            os.fsync(file.fileno())

    return seconds(write) * nbytes / (-(-nbytes // len(some)) * len(some))


def compared(name: str, model: torch.nn.Module, source: ExampleSource, folder: Path, rounds: int) -> list[Line]:
    ready = list(every_batch(source, model))
    ours, bare, nbytes = list[float](), list[float](), 0
    run_bare(model, ready[:3])
    for number in range(rounds):
        for is_ours in (True, False) if number % 2 else (False, True):
            if is_ours:
                elapsed_s, nbytes = run_recorded(model, source, folder)
                ours.append(elapsed_s)
            else:
                bare.append(seconds(lambda: run_bare(model, ready)))
    n = sum(len(np.asarray(batch.inputs[0])) for batch in ready)
    rate, bare_rate = n / statistics.median(ours), n / statistics.median(bare)
    lines = list[Line]()
    if next(model.parameters()).is_cuda:
        written_s = statistics.median(seconds_of_writing(nbytes, folder) for _ in range(rounds))
        lines = [
            Line(f"{name}, recorded", rate, n / written_s, "rows/s", "writing as many bytes", "", rate * written_s / n)
        ]
    return [
        Line(f"{name}, recorded", rate, bare_rate, "rows/s", "the model alone", ">= 0.95", rate / bare_rate),
        *lines,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument(
        "--only",
        choices=[
            "vit",
            "language",
        ],
    )
    parser.add_argument("--device", default="cpu", help="cuda: the models on a GPU")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    facts = {"load": os.getloadavg()[0], "threads": torch.get_num_threads(), "torch": torch.__version__}
    lines = list[Line]()
    if args.device != "cpu":
        facts["device"] = torch.cuda.get_device_name(args.device)
        report(on_a_gpu(args.device, args.folder, args.rounds, args.batches), facts, as_json=args.json)
        return
    if args.only in {None, "vit"}:
        lines += compared("ViT-B/16", vit(), Images(Photographs(8 * args.batches), 8), args.folder, args.rounds)
    if args.only in {None, "language"}:
        lines += compared("160M language model", language_model(), texts(4 * args.batches), args.folder, args.rounds)
    report(lines, facts, as_json=args.json)


if __name__ == "__main__":
    main()
