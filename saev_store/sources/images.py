"""Images as samples: those below a folder (`ImageFolder`), parts of Energon samples, columns of other data sets."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, SupportsIndex, TypeGuard, cast

import numpy as np
import xxhash

from saev_store._runtime.threads import ahead
from saev_store.core.arguments import is_mapping
from saev_store.errors import ArgumentError, DocumentError, NotFoundError, brief
from saev_store.names import joined_url
from saev_store.sources._files import ALGORITHM, digest_files, files_below
from saev_store.sources._source import DigestScope, Source, check_index, check_positions
from saev_store.sources.address import Url
from saev_store.sources.energon import EnergonDataset, RawSample
from saev_store.sources.energon.samples import resolve
from saev_store.sources.pixels import FORMATS, decode_rgb, opened, upright_px
from saev_store.transport import Transport, open_transport

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt
    from PIL.Image import Image as PilImage

#: The name of a column, or a place in a pair such as (image, label).
ImageKey = str | int

_MAX_NBYTES = 1 << 30
_N_THREADS = 8
#: Files whose bytes a sampled digest covers: all of a small folder, of a larger one so many that a bucket gives them in seconds.
_N_SAMPLED = 1024


class ImageFolder(Source[np.ndarray]):
    """The images below a folder, in the order of their paths: `folder[i]` is uint8 (height, width, 3).

    Files are images by their endings, such as `.jpg`, `.png` or `.webp`, in any case of letters. Names that begin with a dot are
    left out. The key of a sample is its path below the folder. How images become RGB: `saev_store.sources.pixels.to_rgb`.

    Args:
        url: The folder: a path, any fsspec URL, or, with `transport`, a path below its root.
        storage_options, transport: As in `open_source`.

    Attributes:
        transport: The storage; its root is the folder.
        paths: The path of each sample below the folder.

    Raises:
        NotFoundError: there is no such folder, or no image in it.
    """

    format = "images"

    def __init__(
        self, url: Url, storage_options: Mapping[str, object] | None = None, *, transport: Transport | None = None
    ) -> None:
        self.transport = open_transport(url, storage_options) if transport is None else transport.at(str(url))
        self.url = self.transport.url
        files = (entry for entry in files_below(self.transport) if "." in entry.name)
        found = [entry for entry in files if entry.name.rpartition(".")[2].lower() in FORMATS]
        found.sort(key=lambda entry: entry.path)
        self.paths = tuple(entry.path for entry in found)
        self._n_files, self._sizes = len(found), [-1 if entry.size is None else entry.size for entry in found]
        if not found:
            remedy = f"Images are files with the endings {', '.join(sorted(FORMATS))}."
            raise NotFoundError("there is no image in the folder or below it", where=self.url, remedy=remedy)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: SupportsIndex) -> np.ndarray:
        """The image at a position, uint8 (height, width, 3), the caller's; `DocumentError` if it does not decode."""
        return np.array(decode_rgb(self.raw(index), where=self.transport.where(self.key(index))))

    def raw(self, index: SupportsIndex) -> bytes:
        """The bytes of the file at a position."""
        return self.transport.read(self.key(index), max_bytes=_MAX_NBYTES)

    def rows(self, indices: npt.ArrayLike | slice) -> Iterator[np.ndarray]:
        """Images by position, in the order asked for; some are read and decoded ahead, in threads."""
        return ahead(self.__getitem__, check_positions(indices, len(self), what="sample").tolist(), _N_THREADS)

    def key(self, index: SupportsIndex) -> str:
        """The path of the sample at a position, below the folder."""
        return self.paths[check_index(index, len(self), what="sample")]

    def describe(self, *, digest: DigestScope = "sampled") -> dict[str, object]:
        """The description for `metadata.data`.

        `"sampled"` digests all paths and sizes, and the bytes of up to 1,024 of the files, evenly spread: each up to 1 MiB, of larger
        ones 32 pieces. In a larger folder it does not see that other files were replaced by files of the same sizes; `"full"` does.
        """
        every = max(1, -(-len(self) // _N_SAMPLED)) if digest == "sampled" else 1
        hasher = xxhash.xxh3_128()
        chosen = [[(path, self.transport.size(path))] for path in self.paths[::every]]
        for found in ahead(lambda file: digest_files(self.transport, file, scope=digest), chosen, _N_THREADS):
            hasher.update(found.encode())
        for path, nbytes in zip(self.paths, self._sizes, strict=True):
            hasher.update(f"{path}\0{nbytes}\0".encode())
        return {
            "format": self.format,
            "url": self.url,
            "n_samples": len(self),
            "digest": {"algorithm": ALGORITHM, "scope": digest, "value": hasher.hexdigest()},
        }

    def close(self) -> None:
        """Release maps and connections."""
        self.transport.close()


def image_of(source: Source[object], sample: object, image_key: ImageKey | None, *, where: str) -> object:
    """The image of a sample: the bytes of a file, an image of Pillow, or whatever array the data set has.

    `image_key` is the part or column that is the image; None: the sample, the field `image` of an Energon data set, or the only
    image among its parts.

    Raises:
        ArgumentError: several parts are images, or there is no such column.
        DocumentError: there is no image.
    """
    if isinstance(sample, RawSample):
        return _part_of(source, sample, image_key, where=where)
    if image_key is not None:
        try:
            sample = cast("Mapping[ImageKey, object]", sample)[image_key]
        except (KeyError, IndexError, TypeError) as error:
            raise ArgumentError(f"{where} is {brief(sample)}, without {image_key!r}", where="image_key") from error
    # An image of Hugging Face that is not decoded.
    raw = sample.get("bytes") if is_mapping(sample) else None
    return raw if isinstance(raw, bytes) else sample


def _part_of(source: Source[object], sample: RawSample, image_key: ImageKey | None, *, where: str) -> bytes:
    """The image among the parts of an Energon sample."""
    parts = sample.parts
    if image_key is None and isinstance(source, EnergonDataset):
        field = source.documents.field_map.get("image")
        found = None if field is None else resolve(field, parts, where=where, images="bytes")
        if isinstance(found, bytes):
            return found
    names = [name for name in parts if name.rpartition(".")[2].lower() in FORMATS]
    if image_key is not None:
        names = [name for name in parts if name == image_key]
    if len(names) > 1:
        message = f"{where} has several images: {', '.join(names)}"
        raise ArgumentError(message, where="image_key", remedy="Name the part of the image.")
    if not names:
        raise DocumentError(f"the sample has no such image; its parts are {', '.join(parts) or 'none'}", where=where)
    return parts[names[0]]


def image_px(image: object, *, where: str) -> tuple[int, int] | None:
    """(height, width) of the result of `image_of`, upright; None if that is not known. Of a file only the header is read."""
    if isinstance(image, bytes):
        with opened(image, where=where) as header:
            return upright_px(header)
    if is_pillow(image):
        return upright_px(image)
    shape = np.shape(cast("np.ndarray", image)) if hasattr(image, "shape") else ()
    if len(shape) != 3:
        return None
    # Channels are few, and last or first.
    return (shape[0], shape[1]) if shape[2] <= 4 else (shape[1], shape[2])


def is_pillow(value: object) -> TypeGuard[PilImage]:
    """Return True for an image of Pillow; does not import it."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def name_of(source: Source[object], sample_idx: int) -> str:
    """A sample as messages name it: its address, or its number in a data set that has none."""
    if isinstance(source, (ImageFolder, EnergonDataset)):
        return joined_url(source.transport.url, source.key(sample_idx))
    return f"image {sample_idx}"
