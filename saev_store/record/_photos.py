"""The demo's photographs, which are part of scikit-image, and its picture: principal components of their patch tokens as colours.

Tiles of one photograph are consecutive examples, row by row, so per-patch values can be assembled to a map of the photograph. If
two examples were swapped, the map would show it.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

import numpy as np

from saev_store._runtime.optional import need
from saev_store.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

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
#: Labels of patches: mean luminance in this many equal steps.
N_LUMINANCE_STEPS = 8
#: Mean and standard deviation of the channels (ImageNet), which such models were trained with.
MEAN = np.array((0.485, 0.456, 0.406), dtype=np.float32)
STD = np.array((0.229, 0.224, 0.225), dtype=np.float32)
CELL_PX = (420, 280)
MARGIN_PX = 28
GAP_PX = 10
INK = (28, 30, 36)
FAINT_INK = (110, 114, 124)
PAPER = (252, 251, 248)


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

    def examples(self) -> npt.NDArray[np.float32]:
        """(example, 3, tile_px, tile_px): the tiles as model input: channels first, normalised."""
        normal = (self.tiles().astype(np.float32) / 255 - MEAN) / STD
        return np.ascontiguousarray(normal.transpose(0, 3, 1, 2), dtype=np.float32)

    def luminance_steps(self, patch_px: int) -> npt.NDArray[np.uint8]:
        """(example, patch) labels from 0, dark, to `N_LUMINANCE_STEPS - 1`, bright; patches in row-major order."""
        weights = np.array((0.2126, 0.7152, 0.0722), dtype=np.float32)
        tiles = self.tiles()
        side = self.tile_px // patch_px
        light = (tiles @ weights).reshape(len(tiles), side, patch_px, side, patch_px).mean(axis=(2, 4)) / 256
        return (light * N_LUMINANCE_STEPS).astype(np.uint8).reshape(len(tiles), side * side)


def load_photographs(*, n: int = len(PHOTOGRAPHS), tile_px: int = 224) -> Photographs:
    """The first `n` photographs, scaled and centred onto `GRID` tiles of `tile_px` pixels.

    Raises:
        MissingDependencyError: scikit-image or Pillow is not installed.
        NotFoundError: a photograph is not part of the installed scikit-image.
    """
    need("skimage", install="saev-store[demo]")
    need("PIL", install="saev-store[demo]")
    from PIL import Image, ImageOps

    size = (GRID[1] * tile_px, GRID[0] * tile_px)
    folder = files("skimage") / "data"
    pixels: list[npt.NDArray[np.uint8]] = []
    for name, _ in PHOTOGRAPHS[:n]:
        path = folder / name
        if not path.is_file():
            raise NotFoundError("this photograph is not part of the installed scikit-image", where=str(path))
        with path.open("rb") as file, Image.open(file) as image:
            pixels.append(np.asarray(ImageOps.fit(image.convert("RGB"), size, Image.Resampling.LANCZOS)))
    return Photographs(np.stack(pixels), tuple(title for _, title in PHOTOGRAPHS[:n]), tile_px)


def principal_colours(tokens: npt.NDArray[np.float32], colours: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """(example, patch, 3) in 0 to 1: the first three principal components of patch tokens, as red, green and blue.

    The mean of each position over the examples is subtracted first: untrained position embeddings are large and the same in every
    image. The sign of a component is arbitrary; it is chosen so that the component grows with the same channel of the photograph,
    which keeps the layers comparable.

    Args:
        tokens: (example, patch, d_model) of one layer.
        colours: (example, patch, 3) mean colour of each patch, used for the signs.
    """
    centred = tokens - tokens.mean(axis=0, keepdims=True, dtype=np.float64)
    flat = centred.reshape(-1, tokens.shape[-1])
    _, vectors = np.linalg.eigh(flat.T @ flat)
    scores = flat @ vectors[:, :-4:-1]
    channels = colours.reshape(-1, 3)
    scores *= np.where((scores * (channels - channels.mean(axis=0))).sum(axis=0) < 0, -1.0, 1.0)
    low, high = np.percentile(scores, (1, 99), axis=0)
    unit = np.clip((scores - low) / np.maximum(high - low, 1e-12), 0, 1)
    return unit.astype(np.float32).reshape(*tokens.shape[:2], 3)


def stitch(maps: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """(photograph, rows, columns, 3) from (example, patch, 3): the tiles of each photograph assembled."""
    rows, columns = GRID
    side = round(maps.shape[1] ** 0.5)
    tiles = maps.reshape(-1, rows, columns, side, side, 3).transpose(0, 1, 3, 2, 4, 5)
    return tiles.reshape(-1, rows * side, columns * side, 3)


def patch_colours(photographs: Photographs, patch_px: int) -> npt.NDArray[np.float32]:
    """(example, patch, 3) in 0 to 1: the mean colour of each patch."""
    tiles = photographs.tiles().astype(np.float32) / 255
    side = photographs.tile_px // patch_px
    return (
        tiles.reshape(len(tiles), side, patch_px, side, patch_px, 3)
        .mean(axis=(2, 4))
        .reshape(len(tiles), side * side, 3)
    )


def draw(
    photographs: Photographs,
    maps: Mapping[int, npt.NDArray[np.float32]],
    *,
    title: str,
    captions: Sequence[str],
    n_rows: int = 4,
) -> bytes:
    """A PNG with one row per photograph: the photograph and its map of each layer.

    Args:
        photographs: The recorded photographs.
        maps: By layer, (photograph, rows, columns, 3) in 0 to 1, see `stitch`.
        title: One line above.
        captions: Lines below.
        n_rows: Number of photographs to show.

    Raises:
        MissingDependencyError: Pillow is not installed.
    """
    need("PIL", install="saev-store[demo]")
    from PIL import Image, ImageDraw, ImageFont

    n_rows = min(n_rows, len(photographs.pixels))
    width_px, height_px = CELL_PX
    top_px, line_px = MARGIN_PX + 84, 26
    bottom_px = MARGIN_PX + 6 + line_px * len(captions)
    canvas = Image.new(
        "RGB",
        (
            2 * MARGIN_PX + (1 + len(maps)) * (width_px + GAP_PX) - GAP_PX,
            top_px + n_rows * (height_px + GAP_PX) + bottom_px,
        ),
        PAPER,
    )
    pen = ImageDraw.Draw(canvas)
    pen.text((MARGIN_PX, MARGIN_PX - 8), title, fill=INK, font=ImageFont.load_default(30))
    heads = ["photograph", *(f"layer {layer}" for layer in maps)]
    for column, head in enumerate(heads):
        pen.text(
            (MARGIN_PX + column * (width_px + GAP_PX), top_px - 32),
            head,
            fill=FAINT_INK,
            font=ImageFont.load_default(20),
        )
    for row in range(n_rows):
        cells = [photographs.pixels[row], *((layer_maps[row] * 255).astype(np.uint8) for layer_maps in maps.values())]
        for column, cell in enumerate(cells):
            scaled = Image.fromarray(cell).resize(CELL_PX, Image.Resampling.BICUBIC)
            canvas.paste(scaled, (MARGIN_PX + column * (width_px + GAP_PX), top_px + row * (height_px + GAP_PX)))
    for line, caption in enumerate(captions):
        at = (MARGIN_PX, canvas.height - bottom_px + 4 + line * line_px)
        pen.text(at, caption, fill=FAINT_INK, font=ImageFont.load_default(18))
    png = io.BytesIO()
    canvas.save(png, "PNG")
    return png.getvalue()
