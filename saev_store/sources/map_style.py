"""`MapStyle`: a data set of another library, such as one of Hugging Face, as a source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, SupportsIndex

from saev_store.core.arguments import check_flag
from saev_store.errors import ArgumentError, DocumentError, SaevStoreError, TransportError, brief
from saev_store.sources._source import DigestScope, Source, check_index, check_positions, text_card

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from saev_store.validation import Report


class DataSet(Protocol):
    """What has numbered samples: a list, an array, a data set of torch or of Hugging Face."""

    def __len__(self) -> int: ...

    def __getitem__(self, sample: int, /) -> object: ...


class MapStyle(Source[object]):
    """A data set in this process as a source: `source[i]` is `data[i]`.

    It has no address, so nothing opens it again: to trace a vector, pass it on, `store.origin(7, 12, source=MapStyle(data))`.
    A data set of Hugging Face has a fingerprint, which is then compared; of others only the number of samples is.

    Args:
        data: Anything with `len()` and integer positions.

    Raises:
        ArgumentError: it has neither.

    >>> source = MapStyle(["a", "b"])
    >>> len(source), source[-1], source.describe()["class"]
    (2, 'b', 'list')
    """

    format = "map_style"
    url = ""
    problems = ()

    def __init__(self, data: DataSet) -> None:
        try:
            is_numbered = len(data) >= 0 and hasattr(data, "__getitem__")
        except Exception:  # arrays without axes have a method that raises, and other libraries raise what they like
            is_numbered = False
        if not is_numbered:
            raise ArgumentError(
                f"{brief(data)} is no map-style data set: it has no length, or no numbered samples", where="data"
            )
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        return text_card(f"Data set {type(self.data).__name__}", {"samples": f"{len(self):,}"}, ())

    def __getitem__(self, index: SupportsIndex) -> object:
        """The sample at a position.

        Raises:
            DocumentError: the data set raises an error, for example because an image does not decode.
            TransportError: it cannot read the sample.
        """
        position = check_index(index, len(self), what="sample")
        try:
            return self.data[position]
        except (SaevStoreError, MemoryError):
            raise
        except OSError as error:
            # Pillow's errors of damaged files are OSErrors without a number; those of the system have one.
            kind = DocumentError if error.errno is None else TransportError
            raise kind(f"sample {position} cannot be read: {error}", where=type(self.data).__name__) from error
        except Exception as error:
            raise DocumentError(
                f"sample {position} cannot be read: {type(error).__name__}: {error}", where=type(self.data).__name__
            ) from error

    def rows(self, indices: npt.ArrayLike | slice) -> Iterator[object]:
        """Samples by position, one after the other."""
        return map(self.__getitem__, check_positions(indices, len(self), what="sample").tolist())

    def describe(self, *, digest: DigestScope = "sampled") -> dict[str, object]:
        """The description for `metadata.data`; samples are not read, whatever `digest` says."""
        del digest
        fingerprint, split = getattr(self.data, "_fingerprint", None), getattr(self.data, "split", None)
        return {
            "format": self.format,
            "class": type(self.data).__name__,
            "n_samples": len(self),
            **({"split": str(split)} if isinstance(split, str) else {}),
            **({"fingerprint": fingerprint} if isinstance(fingerprint, str) else {}),
        }

    def validate(self, *, deep: bool = False, progress: bool | None = None) -> Report:
        """A report without problems: nothing is known of such data."""
        from saev_store.validation import Report

        del progress
        return Report(self.url, len(self), 1, (), check_flag(deep, name="deep"))

    def close(self) -> None:
        """Do nothing: the data set is the caller's."""
