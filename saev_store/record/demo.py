"""The demo: records photographs through a vision transformer and fables through a language model, checks both stores, draws one."""

# transformers has no types for models made from a configuration, and scikit-image none for its files.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from saev_store._runtime.optional import need
from saev_store.errors import NotFoundError
from saev_store.record._images import Images
from saev_store.record._record import record
from saev_store.record._recorder import Recorder
from saev_store.record._texts import Texts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    import torch
    from tokenizers import Tokenizer

    from saev_store.record._examples import ExampleSource
    from saev_store.record._report import RecordingReport
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
SEED, CONTEXT, VOCABULARY = 17, 64, 512


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
        NotFoundError: a photograph is not part of the installed scikit-image.
    """
    need("skimage", install="saev-store[demo]")
    need("PIL", install="saev-store[demo]")
    from PIL import Image, ImageOps

    pixels: list[npt.NDArray[np.uint8]] = []
    for name, _ in PHOTOGRAPHS[:n]:
        path = files("skimage") / "data" / name
        if not path.is_file():
            raise NotFoundError("this photograph is not part of the installed scikit-image", where=str(path))
        with path.open("rb") as file, Image.open(file) as image:
            size = (GRID[1] * tile_px, GRID[0] * tile_px)
            pixels.append(np.asarray(ImageOps.fit(image.convert("RGB"), size, Image.Resampling.LANCZOS)))
    return Photographs(np.stack(pixels), tuple(title for _, title in PHOTOGRAPHS[:n]), tile_px)


def load_fables() -> dict[str, str]:
    """Twelve fables of Aesop, retold, title to text: something to record a language model over without a download.

    >>> len(load_fables()), load_fables()["The Fox and the Grapes"].split(".")[0]
    (12, 'On a hot afternoon a fox came to a vineyard')
    """
    text = (files("saev_store.record") / "fables.txt").read_text("utf-8")
    return {
        title: fable.replace("\n", " ").strip()
        for title, _, fable in (part.partition("\n") for part in text.split("\n\n"))
    }


@dataclass(frozen=True)
class DemoResult:
    """Result of the demo.

    Attributes:
        stores: Folders of the stores of photographs and of fables.
        picture: The PNG: photographs beside maps of their patch tokens.
        pretrained: Whether the vision transformer has trained weights, not random ones.
        n_recorded: Examples that this run recorded; those of earlier runs are kept.
        problems: Problems that validation of every byte found.
        difference: Largest difference from a fresh forward pass, as a part of the largest number; 0.0 means bit for bit.
        text_equal: Whether the token ids of the second store, decoded document by document, are the fables.
        seconds: Seconds of the whole demo, imports included.
    """

    stores: tuple[str, ...]
    picture: str
    pretrained: bool
    n_recorded: int
    problems: tuple[str, ...]
    difference: float
    text_equal: bool
    seconds: float

    @property
    def ok(self) -> bool:
        """True if both stores have no problem, hold the text, and equal a fresh forward pass but for rounding."""
        return not self.problems and self.text_equal and self.difference <= 0.05

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
    """Record photographs and a text, validate both stores, compare them with fresh forward passes, and draw one.

    Running it again with the same `out` reuses finished stores and continues unfinished ones.

    Args:
        out: Folder for the stores and the picture; `./saev-demo` by default.
        device: Where the models run, such as `"cuda"`; the CPU by default.
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
    images = model or pretrained or _random("Dinov2Config", hidden_size=384, num_attention_heads=6, image_size=518, patch_size=14)  # fmt: skip
    say(f"model      {type(images).__name__}, {f'weights of {CKPT}' if pretrained else 'random weights or your own'}")
    pixels = ((photographs.tiles().astype(np.float32) / 255 - MEAN) / STD).transpose(0, 3, 1, 2)
    data = {"__class__": "Photographs", "titles": list(photographs.titles), "tile_px": tile_px, "tiles": list(GRID)}
    texts = list(load_fables().values())
    tokenizer = _tokenizer_of(texts)
    language = _random(
        "GPTNeoXConfig", vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=6, num_attention_heads=4,
        intermediate_size=512, max_position_embeddings=2 * CONTEXT,
    )  # fmt: skip
    stores: list[ShardStore] = []
    problems, difference, n_recorded = list[str](), 0.0, 0
    for network, source, labels, name in (
        (images, Images(np.ascontiguousarray(pixels), 8, data=data), layers, CKPT if pretrained else "random-vit"),
        (language.bfloat16(), Texts(texts, tokenizer, context=CONTEXT, bos=0), (0, 2, 4), "random-gpt-neox"),
    ):
        reports: list[RecordingReport] = []
        store = record(
            network, source, folder, layers=labels, ckpt=name, device=device, exist_ok=True, recheck="close",
            max_tokens_per_shard=40_000, progress=progress, on_report=reports.append,
        )  # fmt: skip
        say(f"recorded   {str(reports[-1]).removeprefix('recorded ')}\n{store!r}")
        report = store.validate(deep=True, progress=progress)
        problems += [str(problem) for problem in report.problems if problem.severity != "info"]
        difference = max(difference, _difference(store, network, source))
        say(
            f"checked    every byte: {'; '.join(problems) or 'no problems'}; a fresh forward pass differs by {difference:.3g}"
        )
        n_recorded += reports[-1].n_examples
        stores.append(store)
    decoded = [tokenizer.decode(stores[1].document(i).token_arrays["token_ids"].tolist()) for i in range(len(texts))]
    say(f"decoded    the token ids: {'the fables again' if decoded == texts else 'ANOTHER TEXT'}")
    picture = folder / f"patches-{stores[0].name[:8]}.png"
    _draw(stores[0], photographs, picture)
    say(f"picture    {picture}")
    return DemoResult(
        stores=tuple(store.url for store in stores),
        picture=str(picture),
        pretrained=pretrained is not None,
        n_recorded=n_recorded,
        problems=tuple(problems),
        difference=difference,
        text_equal=decoded == texts,
        seconds=time.perf_counter() - begun_s,
    )


def _pretrained(timeout_s: float = 4.0) -> torch.nn.Module | None:
    """DINOv2 ViT-S/14 from the local cache, else from the hub; None where it does not answer in time."""
    need("transformers", install="saev-store[demo]")
    import huggingface_hub
    from transformers import Dinov2Model

    answered = threading.Event()

    def ask() -> None:  # the client's own time-out does not cover name resolution
        with suppress(Exception):
            huggingface_hub.model_info(CKPT, timeout=timeout_s)
            answered.set()

    with suppress(OSError, ValueError):
        return Dinov2Model.from_pretrained(CKPT, local_files_only=True, use_safetensors=True)
    threading.Thread(target=ask, daemon=True).start()
    if not huggingface_hub.constants.HF_HUB_OFFLINE and answered.wait(timeout_s):
        with suppress(OSError, ValueError):
            return Dinov2Model.from_pretrained(CKPT, use_safetensors=True)
    return None


def _random(config: str, **sizes: int) -> torch.nn.Module:
    """A model of this class of configuration with seeded random weights; torch's random state is not changed."""
    import torch
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return transformers.AutoModel.from_config(getattr(transformers, config)(**sizes)).eval()


def _tokenizer_of(texts: list[str]) -> Tokenizer:
    """Byte pairs of these texts, and BOS with the id 0: every text is its tokens put together."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<bos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _difference(store: ShardStore, model: torch.nn.Module, source: ExampleSource) -> float:
    """The largest difference of a store from a fresh forward pass, as a part of the largest number."""
    largest = worst = 0.0
    with Recorder(model, store.layers) as recorder:
        computed = ((batch, recorder(*batch.inputs)) for batch in source.batches(0, len(store)))
        for found in source.assemble(computed, 0):
            fresh = found.acts.float().numpy()
            worst = max(worst, float(np.abs(fresh - store[found.first : found.first + len(fresh)]).max()))
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
