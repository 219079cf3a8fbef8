"""The demo's data set: photographs that are part of scikit-image, cut into tiles.

Tiles of one photograph are consecutive examples, row by row, so per-patch values can be assembled to a map of the photograph. If
two examples were swapped, the map would show it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

import numpy as np

from saev_store._runtime.optional import need
from saev_store.errors import NotFoundError

if TYPE_CHECKING:
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
