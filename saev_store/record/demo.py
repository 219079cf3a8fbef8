"""The demo: records photographs through a vision transformer, checks the store, and draws it."""

# transformers has no types for models made from a configuration, and scikit-image none for its files.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from saev_store._runtime.optional import need
from saev_store.record._images import Images
from saev_store.record._record import record
from saev_store.record._recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    import torch

    from saev_store.store.store import ShardStore

#: (file in skimage/data, title): only files that every wheel contains, so that nothing is downloaded.
PHOTOGRAPHS = (
    ("chelsea.png", "Chelsea the cat"),
    ("astronaut.png", "Eileen Collins"),
    ("coffee.png", "A cup of coffee"),
    ("retina.jpg", "Retina"),
    ("rocket.jpg", "Falcon 9 on its pad"),
    ("motorcycle_left.png", "Motorcycle"),
    ("hubble_deep_field.jpg", "Hubble deep field"),
    ("camera.png", "Cameraman"),
)
#: Tiles of a photograph: rows, columns.
GRID = (2, 3)
#: Mean and standard deviation of the channels (ImageNet), which such models were trained with.
MEAN, STD = np.array((0.485, 0.456, 0.406), np.float32), np.array((0.229, 0.224, 0.225), np.float32)
CKPT = "facebook/dinov2-small"


@dataclass(frozen=True)
class Photographs:
    """Photographs of equal size.

    Attributes:
        pixels: (photograph, height, width, 3) uint8; `GRID` tiles of `tile_px` x `tile_px`.
        titles: Title of each photograph.
        tile_px: Side of a tile in pixels.
    """

    pixels: npt.NDArray[np.uint8]
    titles: tuple[str, ...]
    tile_px: int

    def tiles(self) -> npt.NDArray[np.uint8]:
        """(example, tile_px, tile_px, 3): photograph by photograph, the tiles of one row by row."""
        n, (rows, columns), px = len(self.pixels), GRID, self.tile_px
        cut = self.pixels.reshape(n, rows, px, columns, px, 3).transpose(0, 1, 3, 2, 4, 5)
        return cut.reshape(n * rows * columns, px, px, 3)


def load_photographs(*, n: int = len(PHOTOGRAPHS), tile_px: int = 224) -> Photographs:
    """The first `n` photographs of scikit-image, scaled and centred onto `GRID` tiles of `tile_px` pixels.

    Raises:
        MissingDependencyError: scikit-image or Pillow is not installed.
    """
    need("skimage", install="saev-store[demo]")
    need("PIL", install="saev-store[demo]")
    from PIL import Image, ImageOps

    pixels: list[npt.NDArray[np.uint8]] = []
    for name, _ in PHOTOGRAPHS[:n]:
        with (files("skimage") / "data" / name).open("rb") as file, Image.open(file) as image:
            size = (GRID[1] * tile_px, GRID[0] * tile_px)
            pixels.append(np.asarray(ImageOps.fit(image.convert("RGB"), size, Image.Resampling.LANCZOS)))
    return Photographs(np.stack(pixels), tuple(title for _, title in PHOTOGRAPHS[:n]), tile_px)


def load_fables() -> dict[str, str]:
    """Twelve fables of Aesop, retold, title to text: something to record a language model over without a download.

    >>> len(load_fables()), load_fables()["The Fox and the Grapes"].split(".")[0]
    (12, 'On a hot afternoon a fox came to a vineyard')
    """
    parts = (files("saev_store.record") / "fables.txt").read_text("utf-8").split("\n\n")
    return {title: fable.replace("\n", " ").strip() for title, _, fable in (part.partition("\n") for part in parts)}


@dataclass(frozen=True)
class DemoResult:
    """Result of the demo.

    Attributes:
        store: Folder of the store.
        picture: The PNG: photographs beside maps of their patch tokens.
        pretrained: Whether the model has trained weights, not random ones.
        problems: Problems that validation of every byte found.
        difference: Largest difference from a fresh forward pass, as a part of the largest number; 0.0 means bit for bit.
        seconds: Seconds of the whole demo, imports included.
    """

    store: str
    picture: str
    pretrained: bool
    problems: tuple[str, ...]
    difference: float
    seconds: float

    @property
    def ok(self) -> bool:
        """True if the store has no problem, and equals a fresh forward pass but for rounding."""
        return not self.problems and self.difference <= 0.05

    def to_dict(self) -> dict[str, object]:
        """The attributes and `ok`, as plain JSON types."""
        return {"ok": self.ok, **asdict(self)}


def run_demo(
    out: Path | str | None = None,
    *,
    device: str | None = None,
    model: torch.nn.Module | None = None,
    layers: Sequence[int] = (0, 5, 11),
    n_photographs: int = len(PHOTOGRAPHS),
    tile_px: int = 224,
    progress: bool | None = None,
    say: Callable[[str], None] = lambda _line: None,
) -> DemoResult:
    """Record photographs, validate the store, compare it with a fresh forward pass, and draw it.

    Running it again with the same `out` reuses a finished store and continues an unfinished one.

    Args:
        out: Folder for the store and the picture; `./saev-demo` by default.
        device: Where the model runs, such as `"cuda"`; the CPU by default.
        model: A model of images of square patches to use instead of DINOv2 ViT-S/14.
        layers: Labels of its blocks to record.
        n_photographs: Number of photographs.
        tile_px: Side of an example in pixels.
        progress: Show bars on standard error; None: when it is a terminal.
        say: Called with a line of text after each step.

    Raises:
        MissingDependencyError: a library of the extra `demo` is not installed.
        SaevStoreError: recording or reading failed, or `out` cannot be created.
    """
    begun_s, folder = time.perf_counter(), Path("saev-demo" if out is None else out)
    photographs = load_photographs(n=n_photographs, tile_px=tile_px)
    pretrained = _pretrained() if model is None else None
    network = model or pretrained or _random()
    say(f"model      {type(network).__name__}, {f'weights of {CKPT}' if pretrained else 'random weights or your own'}")
    pixels = ((photographs.tiles().astype(np.float32) / 255 - MEAN) / STD).transpose(0, 3, 1, 2)
    data = {"__class__": "Photographs", "titles": list(photographs.titles), "tile_px": tile_px, "tiles": list(GRID)}
    source = Images(np.ascontiguousarray(pixels), 8, data=data)
    store = record(
        network, source, folder, layers=layers, ckpt=CKPT if pretrained else "random-vit", device=device, exist_ok=True,
        recheck="close", max_tokens_per_shard=40_000, progress=progress,
    )  # fmt: skip
    say(f"recorded   {store!r}")
    report = store.validate(deep=True, progress=progress)
    problems = tuple(str(problem) for problem in report.problems if problem.severity != "info")
    difference = _difference(store, network, source)
    say(f"checked    {'; '.join(problems) or 'every byte'}; a fresh forward pass differs by {difference:.3g}")
    picture = folder / f"patches-{store.name[:8]}.png"
    _draw(store, photographs, picture)
    say(f"picture    {picture}")
    seconds = time.perf_counter() - begun_s
    return DemoResult(store.url, str(picture), pretrained is not None, problems, difference, seconds)


def _pretrained() -> torch.nn.Module | None:
    """DINOv2 ViT-S/14 from the hub's cache; None if it is not there."""
    need("transformers", install="saev-store[demo]")
    from transformers import Dinov2Model

    with suppress(OSError, ValueError):
        return Dinov2Model.from_pretrained(CKPT, local_files_only=True, use_safetensors=True)
    return None


def _random() -> torch.nn.Module:
    """The same model with seeded random weights; torch's random state is not changed."""
    import torch
    from transformers import Dinov2Config, Dinov2Model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(17)
        return Dinov2Model(Dinov2Config(hidden_size=384, num_attention_heads=6, image_size=518, patch_size=14)).eval()


def _difference(store: ShardStore, model: torch.nn.Module, source: Images) -> float:
    """The largest difference of a store from a fresh forward pass, as a part of the largest number."""
    largest = worst = 0.0
    with Recorder(model, store.layers) as recorder:
        for batch in source.batches(0, len(store)):
            fresh = recorder(*batch.inputs).float().numpy()
            worst = max(worst, float(np.abs(fresh - store[batch.first : batch.first + len(fresh)]).max()))
            largest = max(largest, float(np.abs(fresh).max()))
    return worst / largest


def _draw(store: ShardStore, photographs: Photographs, to: Path) -> None:
    """A PNG: a row for each photograph, with its map of each layer: the first three principal components of patches as colours."""
    from PIL import Image

    (rows, columns), (n, height, width, _) = GRID, photographs.pixels.shape
    cells = [photographs.pixels]
    for layer in store.layers:
        tokens = store.sel(layer=layer, tokens="content")[:].reshape(len(store), -1, store.shape[-1])  # fmt: skip
        # Untrained position embeddings are large and the same in every image.
        flat = (tokens - tokens.mean(axis=0, keepdims=True)).reshape(-1, tokens.shape[-1])
        scores = flat @ np.linalg.eigh(flat.T @ flat)[1][:, :-4:-1]
        low, high = np.percentile(scores, (1, 99), axis=0)
        unit = np.clip((scores - low) / np.maximum(high - low, 1e-12), 0, 1)
        side = round(tokens.shape[1] ** 0.5)
        tiles = unit.reshape(n, rows, columns, side, side, 3).transpose(0, 1, 3, 2, 4, 5)
        small = (tiles.reshape(n, rows * side, columns * side, 3) * 255).astype(np.uint8)
        cells.append(np.stack([np.asarray(Image.fromarray(each).resize((width, height))) for each in small]))
    grid = np.concatenate(cells, axis=2).reshape(n * height, -1, 3)
    Image.fromarray(grid).resize((grid.shape[1] // 2, grid.shape[0] // 2)).save(to)
