"""Base class of data sets that activations are recorded from, and the checks of positions and counts that they share."""

from __future__ import annotations

import operator
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Generic, Literal, Self, SupportsIndex, TypeVar

import numpy as np

from saev_store._runtime.progress import Progress
from saev_store.core.arguments import check_count, check_flag
from saev_store.errors import SaevStoreError, SelectionError, brief
from saev_store.names import one_line
from saev_store.problems import Problem

if TYPE_CHECKING:
    from types import TracebackType

    import numpy.typing as npt

    from saev_store.core.layout import IntArray
    from saev_store.validation import Report

SampleT_co = TypeVar("SampleT_co", covariant=True)
#: The bytes that a digest covers: all, or the index and evenly spread pieces of the rest.
DigestScope = Literal["sampled", "full"]


class Source(ABC, Generic[SampleT_co]):
    """A data set opened for reading: numbered samples, each with a key, on any storage.

    `open_source` opens one. A source is a Python sequence of its samples and a context manager, and can be shared between
    threads. The format decides what a sample is: an array of token ids, or parts by name. By default the key of a sample
    is its position in decimal digits, and there is one split, `"all"`.

    Attributes:
        format: The format's short name, such as `"mmididx"`.
        url: Its address, without credentials.
        splits: Names that `split` takes.
    """

    format: str
    url: str
    splits: tuple[str, ...] = ("all",)
    _n_files = 1

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def __getitem__(self, index: SupportsIndex) -> SampleT_co:
        """The sample at a position; negative ones count from the end; `SelectionError` if there is none."""

    @abstractmethod
    def rows(self, indices: npt.ArrayLike | slice) -> Iterable[SampleT_co]:
        """Several samples by position, in the order asked for, fetched together; `SelectionError` as of `[]`."""

    def batches(self, batch_size: int) -> Iterator[Iterable[SampleT_co]]:
        """Consecutive samples, `batch_size` at a time, each batch as `rows` returns it."""
        for first, end in steps(len(self), batch_size):
            yield self.rows(slice(first, end))

    def key(self, index: SupportsIndex) -> str:
        """The key of the sample at a position; no two samples share one."""
        return str(check_index(index, len(self), what="sample"))

    def split(self, name: str) -> Self:
        """The samples of one split, as a source of their own; `SelectionError` if there is none of that name."""
        if name != "all":
            raise SelectionError(f"there is no split {brief(name)}: this format has only 'all'", where="split")
        return self

    @abstractmethod
    def describe(self, *, digest: DigestScope = "sampled") -> dict[str, object]:
        """The description of this source for a store's `metadata.data`, in plain JSON types: enough for `reopen`.

        Args:
            digest: `"sampled"` digests the index and some pieces of the data, in time that hardly depends on its size;
                `"full"` reads every byte.
        """

    def validate(self, *, deep: bool = False, progress: bool | None = None) -> Report:
        """Report problems. Opening has checked documents, headers and indices; `deep` reads every sample."""
        from saev_store.validation import Report

        deep, started = check_flag(deep, name="deep"), time.perf_counter()
        problems, checked_nbytes = list[Problem](), 0
        with Progress(len(self), "checking", shown=progress, unit="samples") as bar:
            for check, first, end in self._checks(deep):
                try:
                    checked_nbytes += check()
                except SaevStoreError as error:
                    lost = ((first, end),) if first < end else ()
                    problems.append(Problem(error.kind, error.message, where=error.where or self.url, lost=lost))
                bar.advance(end - first)
        took_s = time.perf_counter() - started
        return Report(self.url, len(self), self._n_files, tuple(problems), deep, checked_nbytes, took_s)

    def _checks(self, deep: bool) -> Iterator[tuple[Callable[[], int], int, int]]:
        """Calls that return the bytes checked or raise an error, which loses samples `first` to `end`: (call, first, end)."""
        for position in range(len(self) if deep else 0):
            yield partial(self._check_sample, position), position, position + 1

    def _check_sample(self, position: int) -> int:
        self[position]
        return 0  # its bytes are not known

    @abstractmethod
    def close(self) -> None:
        """Release maps and connections; returned views stay valid, and later reads open the files again."""

    def __repr__(self) -> str:
        return one_line(f"{type(self).__name__} {self.url}: {len(self):,} samples")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def check_index(index: SupportsIndex, n: int, *, what: str) -> int:
    """A position from 0 to n - 1; negative ones count from the end; `SelectionError` for others, and for booleans."""
    try:
        position = operator.index(index)
    except TypeError:
        position = n
    if isinstance(index, bool) or not -n <= position < n:
        raise SelectionError(f"{what} must be an integer below {n:,}, got {brief(index)}", where=what)
    return position % n


def check_positions(wanted: npt.ArrayLike | slice, n: int, *, what: str) -> IntArray:
    """Positions of a slice or a list, int64; negative ones count from the end; `SelectionError` as of `check_index`."""
    try:
        if isinstance(wanted, slice):
            return np.arange(*wanted.indices(n), dtype=np.int64)
        found = np.asarray(wanted)
    except (TypeError, ValueError) as error:
        raise SelectionError(f"{what}s must be integers or a slice, got {brief(wanted)}: {error}", where=what) from None
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise SelectionError(f"{what}s must be a list of integers, got {brief(wanted)}", where=what)
    if found.size and (int(found.min()) < -n or int(found.max()) >= n):
        raise SelectionError(f"{what}s from {int(found.min())} to {int(found.max())} of {n} do not exist", where=what)
    found = found.astype(np.int64)
    return np.where(found < 0, found + n, found)


def steps(n: int, batch_size: int) -> Iterator[tuple[int, int]]:
    """The half-open ranges of positions of consecutive batches."""
    batch_size = check_count(batch_size, name="batch_size")
    for first in range(0, n, batch_size):
        yield first, min(first + batch_size, n)
