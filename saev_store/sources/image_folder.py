"""`ImageFolder`: the images below a folder, on any storage, as a source."""

from __future__ import annotations

from typing import TYPE_CHECKING, SupportsIndex

import numpy as np
import xxhash

from saev_store._runtime.threads import ahead
from saev_store.core.arguments import check_choice
from saev_store.errors import DocumentError, NotFoundError
from saev_store.sources._files import ALGORITHM, digest_files
from saev_store.sources._source import DigestScope, Source, check_index, check_positions
from saev_store.sources.address import Url, full_url
from saev_store.sources.pixels import FORMATS, decode_rgb
from saev_store.transport import Entry, Transport, open_transport

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

#: Files and folders below the root at most this deep; a link to a folder above itself would have no end.
_MAX_DEPTH = 32
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
        self,
        url: Url,
        storage_options: Mapping[str, object] | None = None,
        *,
        transport: Transport | None = None,
    ) -> None:
        self.transport = open_transport(url, storage_options) if transport is None else transport.at(str(url))
        self.url = self.transport.url
        found = sorted(_images_in(self.transport), key=lambda entry: entry.path)
        self.paths = tuple(entry.path for entry in found)
        self._n_files, self._sizes = len(found), [-1 if entry.size is None else entry.size for entry in found]
        if not found:
            remedy = f"Images are files with the endings {', '.join(sorted(FORMATS))}."
            raise NotFoundError("there is no image in the folder or below it", where=self.url, remedy=remedy)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: SupportsIndex) -> np.ndarray:
        """The image at a position, uint8 (height, width, 3), the caller's; `DocumentError` if it does not decode."""
        path = self.key(index)
        return np.array(decode_rgb(self._read(path), where=full_url(self.transport, path)))

    def raw(self, index: SupportsIndex) -> bytes:
        """The bytes of the file at a position."""
        return self._read(self.key(index))

    def _read(self, path: str) -> bytes:
        return self.transport.read(path, max_bytes=_MAX_NBYTES)

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
        check_choice(digest, ("sampled", "full"), name="digest")
        every = max(1, -(-len(self) // _N_SAMPLED)) if digest == "sampled" else 1
        hasher = xxhash.xxh3_128()
        for found in ahead(lambda path: self._digest(path, digest), self.paths[::every], _N_THREADS):
            hasher.update(found.encode())
        for path, nbytes in zip(self.paths, self._sizes, strict=True):
            hasher.update(f"{path}\0{nbytes}\0".encode())
        return {
            "format": self.format,
            "url": self.url,
            "n_samples": len(self),
            "digest": {"algorithm": ALGORITHM, "scope": digest, "value": hasher.hexdigest()},
        }

    def _digest(self, path: str, scope: DigestScope) -> str:
        return digest_files(self.transport, [(path, self.transport.size(path))], scope=scope)

    def close(self) -> None:
        """Release maps and connections."""
        self.transport.close()


def _images_in(transport: Transport, folder: str = "", depth: int = 0) -> Iterator[Entry]:
    """The images of a folder and of those below it."""
    if depth > _MAX_DEPTH:
        message = f"folders are nested more than {_MAX_DEPTH} deep: does a link lead to a folder above it?"
        raise DocumentError(message, where=full_url(transport, folder))
    for entry in transport.list(folder):
        if entry.name.startswith("."):
            continue
        if entry.is_dir:
            yield from _images_in(transport, entry.path.rstrip("/"), depth + 1)
        elif entry.name.rpartition(".")[2].lower() in FORMATS and "." in entry.name:
            yield entry
