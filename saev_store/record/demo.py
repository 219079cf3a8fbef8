"""The demo: records photographs through a vision transformer, validates and reads the store, and draws a picture of it.

Then it records fables through a language model, see `_demo_text.py`.
`DemoResult` has what was measured.
"""

from __future__ import annotations

import errno
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from saev_store.errors import AccessError, ArgumentError
from saev_store.record._adapt import adapt
from saev_store.record._adapters import VisionAdapter, place
from saev_store.record._demo_steps import rate, say_checked, say_recorded, validate
from saev_store.record._demo_text import TextDemoResult, run_text
from saev_store.record._images import Images
from saev_store.record._photos import GRID, draw, load_photographs, patch_colours, principal_colours, stitch
from saev_store.record._record import describe, fill_missing, prepare
from saev_store.record._recorder import Recorder
from saev_store.record._report import RecordingReport
from saev_store.record._weights import load_model
from saev_store.store.store import ShardStore
from saev_store.transport import open_transport
from saev_store.writer.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    import torch

    from saev_store.record._photos import Photographs
    from saev_store.record._weights import DemoModel

BATCH_SIZE = 8
#: Number of shards; the last one is shorter.
N_SHARDS = 4
DEFAULT_OUT = Path("saev-demo")


@dataclass(frozen=True)
class DemoResult:
    """Result and measurements of the demo.

    Attributes:
        store: Folder of the store.
        picture: The PNG.
        ckpt: Name of the weights in the metadata.
        pretrained: Whether the weights were trained.
        weights: Origin of the weights, one sentence.
        n_photographs, n_examples, n_shards, nbytes: Sizes of the store.
        layers: The recorded blocks.
        shape: (example, layer, token, d_model).
        n_recorded: Examples that this run recorded; fewer than n_examples if an earlier run was interrupted.
        forward_s: Seconds in the model.
        wait_s: Seconds that the model waited for the writer, publication included.
        write_bytes_per_s: Speed of writing a second store without a model, publication included; it is removed.
        validate_s: Seconds of the deep validation.
        problems: Problems that validation found.
        read_bytes_per_s: Speed of reading from the page cache, by engine.
        engines_equal: Whether all engines read the same bytes.
        n_checked: Number of vectors compared with a fresh forward pass.
        max_abs: Largest absolute number in these vectors.
        max_abs_diff: Largest absolute difference; 0.0 means bit for bit.
        text: The same of the language model's store.
        seconds: Seconds of the whole demo, imports included.
    """

    store: str
    picture: str
    ckpt: str
    pretrained: bool
    weights: str
    n_photographs: int
    n_examples: int
    n_shards: int
    nbytes: int
    layers: tuple[int, ...]
    shape: tuple[int, ...]
    n_recorded: int
    forward_s: float
    wait_s: float
    write_bytes_per_s: float
    validate_s: float
    problems: tuple[str, ...]
    read_bytes_per_s: dict[str, float]
    engines_equal: bool
    n_checked: int
    max_abs: float
    max_abs_diff: float
    text: TextDemoResult
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether both stores have no problem and equal a fresh forward pass.

        A store of an earlier run may differ from today's forward pass in the last bits (another device, number of
        threads, release of torch); a difference above a hundredth of the largest number is an error.
        """
        is_near = self.max_abs_diff <= 0.01 * self.max_abs
        return not self.problems and self.engines_equal and is_near and self.text.ok

    def to_dict(self) -> dict[str, object]:
        """The fields and `ok`, as plain JSON types."""
        return {"ok": self.ok, **asdict(self), "text": self.text.to_dict()}


def run_demo(
    out: Path | str | None = None,
    *,
    device: str | None = None,
    model: DemoModel | None = None,
    layers: Sequence[int] = (0, 5, 11),
    n_photographs: int = 8,
    tile_px: int = 224,
    progress: bool | None = None,
    say: Callable[[str], None] = lambda _line: None,
) -> DemoResult:
    """Record, publish, validate, read, compare and draw photographs; record, validate and compare a text.

    Running it again with the same `out` reuses finished stores and continues unfinished ones.

    Args:
        out: Folder for the stores and the picture; `./saev-demo` by default.
        device: Where the models run, such as `"cuda"`; the CPU by default.
        model: A model of images to use instead of the demo's own.
        layers: Labels of its blocks to record.
        n_photographs: Number of photographs.
        tile_px: Side of an example in pixels.
        progress: Show bars on standard error; None: when it is a terminal.
        say: Called with a line of text after each step.

    Raises:
        MissingDependencyError: a library of the extra `demo` is not installed.
        AccessError: `out` cannot be created or written.
        SaevStoreError: recording or reading failed.
    """
    begun_s = time.perf_counter()
    out = writable_folder(Path(DEFAULT_OUT if out is None else out))
    photographs = load_photographs(n=n_photographs, tile_px=tile_px)
    model = load_model() if model is None else model
    say(f"model      {type(model.model).__name__}, {model.note}")
    network = model.model
    place(network, device)
    patch_px = _patch_px(network)
    examples = photographs.examples()
    say(
        f"images     {n_photographs} photographs of scikit-image, as {len(examples)} tiles of {tile_px} x {tile_px} pixels"
    )

    store, recorded = _record(network, model.ckpt, photographs, out, patch_px, layers=layers, progress=progress)
    say_recorded(store, recorded, say)
    problems, validate_s = validate(store, say, progress=progress)

    write_bytes_per_s = _write_again(store, out)
    say(
        f"written    {rate(write_bytes_per_s)} with digests, until durable and published (once more, with no model in between)"
    )

    read_bytes_per_s, engines_equal = _read_back(store)
    rates = ", ".join(f"{rate(speed)} through {engine}" for engine, speed in read_bytes_per_s.items())
    say(f"read       {rates}, from the page cache: {'the same bytes' if engines_equal else 'THE BYTES DIFFER'}")

    n_checked, max_abs, max_abs_diff = _compare(store, network, examples)
    say_checked(n_checked, max_abs_diff, "those of a fresh forward pass", say)

    picture = out / f"patches-{store.name[:8]}.png"
    picture.write_bytes(_draw(store, photographs, model, patch_px))
    say(f"picture    {picture}\n")
    text = run_text(out, device=device, progress=progress, say=say)
    return DemoResult(
        store=store.url,
        picture=str(picture),
        ckpt=model.ckpt,
        pretrained=model.pretrained,
        weights=model.note,
        n_photographs=n_photographs,
        n_examples=len(store),
        n_shards=store.layout.n_shards,
        nbytes=store.nbytes,
        layers=store.layers,
        shape=store.shape,
        n_recorded=recorded.n_examples,
        forward_s=recorded.elapsed_s - recorded.source_wait_s - recorded.writer_wait_s,
        wait_s=recorded.writer_wait_s,
        write_bytes_per_s=write_bytes_per_s,
        validate_s=validate_s,
        problems=problems,
        read_bytes_per_s=read_bytes_per_s,
        engines_equal=engines_equal,
        n_checked=n_checked,
        max_abs=max_abs,
        max_abs_diff=max_abs_diff,
        text=text,
        seconds=time.perf_counter() - begun_s,
    )


def writable_folder(folder: Path) -> Path:
    """The folder, created if it does not exist.

    Raises:
        AccessError: it cannot be created or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise AccessError(
            f"the folder cannot be created or written: {error.strerror}",
            where=str(folder),
            remedy="Choose another one.",
        ) from error
    return folder


def _record(
    network: torch.nn.Module,
    ckpt: str,
    photographs: Photographs,
    out: Path,
    patch_px: int,
    *,
    layers: Sequence[int],
    progress: bool | None,
) -> tuple[ShardStore, RecordingReport]:
    """The published store, and what was recorded; publication is counted."""
    examples = photographs.examples()
    source = Images(
        examples,
        BATCH_SIZE,
        labels=photographs.luminance_steps(patch_px),
        data={
            "__class__": "Photographs",
            "titles": list(photographs.titles),
            "tile_px": photographs.tile_px,
            "tiles": list(GRID),
            "labels": "mean luminance of the patch in eight equal steps, 0 is dark",
        },
    )
    recorder = prepare(network, source, layers)
    geometry = source.geometry(recorder.adapter)
    # One example more than a quarter: the last shard is short, as in real stores.
    examples_per_shard = len(examples) // N_SHARDS + 1
    metadata = describe(
        recorder,
        source,
        max_tokens_per_shard=examples_per_shard * (geometry.content_tokens + int(geometry.cls_token)) * len(layers),
        ckpt=ckpt,
        dataset="skimage/data",
    )
    work = Work(open_transport(out), metadata)
    with ShardStore.create(out, metadata, resume=True, exist_ok=True, progress=progress) as writer:
        filled = fill_missing(
            writer,
            recorder,
            source,
            range(metadata.n_examples),
            store=work.store,
            work=work,
            recheck="close",
            saturate=False,
        )
        begun_s = time.perf_counter()
    published = filled.published_after(time.perf_counter() - begun_s)
    return ShardStore.open(out / metadata.hash), published


def _write_again(store: ShardStore, out: Path) -> float:
    """Bytes per second of writing the store's activations a second time, to a temporary folder."""
    acts, labels = store[:], store.labels
    with tempfile.TemporaryDirectory(prefix=".write-again-", dir=out) as scratch:
        begun_s = time.perf_counter()
        with ShardStore.create(scratch, store.metadata, progress=False) as writer:
            for start in range(0, len(acts), BATCH_SIZE):
                batch = slice(start, start + BATCH_SIZE)
                writer.append(acts[batch], labels=None if labels is None else labels[batch])
        return store.nbytes / (time.perf_counter() - begun_s)


def _read_back(store: ShardStore) -> tuple[dict[str, float], bool]:
    """Bytes per second by engine, and whether the engines agree on every byte; a shard's examples at a time."""
    step = store.layout.examples_per_shard
    out = {engine: np.empty((step, *store.shape[1:]), np.float32) for engine in ("mmap", "fsspec")}
    stores = {engine: ShardStore.open(store.url, engine=engine) for engine in ("mmap", "fsspec")}
    seconds = dict.fromkeys(stores, 0.0)
    equal = True
    for start in range(0, len(store), step):
        n = min(step, len(store) - start)
        for engine, opened in stores.items():
            begun_s = time.perf_counter()
            opened.read(slice(start, start + n), out=out[engine][:n])
            seconds[engine] += time.perf_counter() - begun_s
        equal &= np.array_equal(out["mmap"][:n].view(np.uint32), out["fsspec"][:n].view(np.uint32))
    return {engine: store.nbytes / seconds[engine] for engine in stores}, equal


def _compare(
    store: ShardStore, network: torch.nn.Module, examples: npt.NDArray[np.float32]
) -> tuple[int, float, float]:
    """Compare the first and last batch with a fresh forward pass: number of vectors, largest number, largest difference."""
    # Batches have the shape of the recording: with another shape the matrix product adds in another order.
    n_checked, largest, worst = 0, 0.0, 0.0
    images = Images(examples, BATCH_SIZE)
    last = (len(examples) - 1) // BATCH_SIZE * BATCH_SIZE
    with Recorder(network, store.layers, cls_token=store.layout.cls_token) as recorder:
        for start in sorted({0, last}):
            batch = next(images.batches(start, start + 1))
            fresh = recorder(*batch.inputs).float().numpy()
            kept = store[batch.first : batch.first + len(fresh)]
            worst = max(worst, float(np.abs(fresh - kept).max()))
            largest = max(largest, float(np.abs(fresh).max()))
            n_checked += len(fresh) * store.layout.vectors_per_example
    return n_checked, largest, worst


def _patch_px(network: torch.nn.Module) -> int:
    """The side of a patch in pixels; `ArgumentError` for a model of texts."""
    adapter = adapt(network)
    if not isinstance(adapter, VisionAdapter):
        raise ArgumentError(f"{type(network).__name__} is no model of images", where="model")
    return adapter.patch_px[0]


def _draw(store: ShardStore, photographs: Photographs, model: DemoModel, patch_px: int) -> bytes:
    """The PNG of the vectors in the store."""
    colours = patch_colours(photographs, patch_px)
    maps: dict[int, npt.NDArray[np.float32]] = {}
    for layer in store.layers:
        tokens = store.sel(layer=layer, tokens="content")[:].reshape(len(store), -1, store.shape[-1])
        maps[layer] = stitch(principal_colours(tokens, colours))
    n_patches = store.layout.n_examples * store.layout.content_tokens_per_example
    how = (
        f"First three principal components of a layer's {n_patches:,} patch tokens as red, green and blue, less the mean "
        "of each position."
    )
    meaning = (
        "Seams between tiles show what attention mixes over a whole tile."
        if model.pretrained
        else "Untrained weights know no cats: light, colour and edges remain, and attention tints whole tiles."
    )
    return draw(
        photographs,
        maps,
        title=f"Patch tokens of {model.title}, read back from the store",
        captions=[how, f"Each map is put together from {GRID[0]} x {GRID[1]} examples of the store. {meaning}"],
    )
