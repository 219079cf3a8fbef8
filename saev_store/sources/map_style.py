"""`MapStyle`: a data set of another library, such as one of Hugging Face, as a source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, SupportsIndex

from saev_store.errors import ArgumentError, DocumentError, SaevStoreError, brief
from saev_store.sources._source import DigestScope, Source, check_index, check_positions

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt


class DataSet(Protocol):
    """Numbered samples: a list, an array, a data set of torch or of Hugging Face."""

    def __len__(self) -> int: ...

    def __getitem__(self, sample: int, /) -> object: ...


class MapStyle(Source[object]):
    """A data set in this process as a source: `source[i]` is `data[i]`.

    It has no address, so nothing opens it again: to trace a vector, pass it on, `store.origin(7, 12, source=MapStyle(data))`.
    A data set of Hugging Face has a fingerprint, which is then compared; of others only the number of samples is.

    Args:
        data: Anything with `len()` and integer positions; `ArgumentError` if it has neither.

    >>> source = MapStyle(["a", "b"])
    >>> len(source), source[-1], source.describe()["class"]
    (2, 'b', 'list')
    """

    format = "map_style"
    url = ""

    def __init__(self, data: DataSet) -> None:
        try:
            is_numbered = len(data) >= 0 and hasattr(data, "__getitem__")
        except Exception:  # arrays without axes have a method that raises, and other libraries raise what they like
            is_numbered = False
        if not is_numbered:
            raise ArgumentError(f"must have a length and numbered samples, got {brief(data)}", where="data")
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: SupportsIndex) -> object:
        """The sample at a position; `DocumentError` if the data set raises an error, for example because an image does not decode."""
        position = check_index(index, len(self), what="sample")
        try:
            return self.data[position]
        except (SaevStoreError, MemoryError):
            raise
        except Exception as error:
            message = f"sample {position} cannot be read: {type(error).__name__}: {error}"
            raise DocumentError(message, where=type(self.data).__name__) from error

    def rows(self, indices: npt.ArrayLike | slice) -> Iterator[object]:
        """Samples by position, one after the other."""
        return map(self.__getitem__, check_positions(indices, len(self), what="sample").tolist())

    def describe(self, *, digest: DigestScope = "sampled") -> dict[str, object]:
        """The description for `metadata.data`; samples are not read."""
        del digest
        marks = {"split": getattr(self.data, "split", None), "fingerprint": getattr(self.data, "_fingerprint", None)}
        return {
            "format": self.format,
            "class": type(self.data).__name__,
            "n_samples": len(self),
            **{name: str(mark) for name, mark in marks.items() if isinstance(mark, str)},
        }

    def close(self) -> None:
        """Do nothing: the data set is the caller's."""
