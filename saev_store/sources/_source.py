"""What activations come from: one small protocol over formats as different as token streams and folders of images."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, Self, SupportsIndex, TypeVar, cast, runtime_checkable

import numpy as np

from saev_store.errors import ArgumentError, SelectionError, brief

if TYPE_CHECKING:
    from types import TracebackType

    import numpy.typing as npt

    from saev_store.core.layout import IntArray
    from saev_store.problems import Problem
    from saev_store.validation import Report

SampleT_co = TypeVar("SampleT_co", covariant=True)
#: How much of the data a digest has seen: everything, or the index and evenly spread pieces of the rest.
DigestScope = Literal["sampled", "full"]


@runtime_checkable
class Source(Protocol[SampleT_co]):
    """A data set opened for reading: numbered samples, each with a key, on any storage.

    `open_source` makes one from an address. Every source is a Python sequence of its samples, can be shared between
    threads, and is a context manager. What a sample is depends on the format: an array of token ids, or parts by name.

    Attributes:
        format: The format's short name, such as `"mmididx"`.
        url: Where it lies, without credentials.
        problems: What is odd about it, although it can be read.
        splits: Names that `split` takes; `("all",)` for a format that has none.
    """

    @property
    def format(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def problems(self) -> tuple[Problem, ...]: ...
    @property
    def splits(self) -> tuple[str, ...]: ...

    def __len__(self) -> int:
        """How many samples there are."""
        ...

    def __getitem__(self, index: SupportsIndex) -> SampleT_co:
        """The sample at a position; negative ones count from the end.

        Raises:
            SelectionError: there is no such position.
        """
        ...

    def key(self, index: SupportsIndex) -> str:
        """The key of the sample at a position; no two samples share one."""
        ...

    def index_of(self, key: str) -> int:
        """The position of a key: the inverse of `key`.

        Raises:
            SelectionError: no sample has that key.
        """
        ...

    def batches(self, batch_size: int, *, start: int = 0, drop_last: bool = False) -> Iterator[Iterable[SampleT_co]]:
        """Consecutive samples in order, `batch_size` at a time, read together: arrays or lists of samples.

        Args:
            batch_size: Samples in a batch; the last one may have fewer.
            start: Position of the first sample.
            drop_last: Leave out a last batch that is not full.
        """
        ...

    def split(self, name: str) -> Source[SampleT_co]:
        """The samples of one split, as a source of their own.

        Raises:
            SelectionError: there is no split of that name.
        """
        ...

    def describe(self, *, digest: DigestScope = "sampled") -> dict[str, object]:
        """What a store's `metadata.data` says about this source, in plain JSON types: enough for `reopen`.

        Args:
            digest: `"sampled"` digests the index and some pieces of the data, in time that hardly depends on its size;
                `"full"` reads every byte.
        """
        ...

    def validate(self, *, deep: bool = False, progress: bool | None = None) -> Report:
        """What is wrong with it. Opening has checked sizes, headers and indices; `deep` reads every byte."""
        ...

    def close(self) -> None:
        """Release maps and connections; using the source afterwards opens them again."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...


class NumberedSource(ABC):
    """What sources share whose samples have no names: the key of sample 7 is `"7"`, and there is one split."""

    splits: tuple[str, ...] = ("all",)

    @abstractmethod
    def __len__(self) -> int: ...

    def key(self, index: SupportsIndex) -> str:
        """The position in decimal digits."""
        return str(check_index(index, len(self), what="sample"))

    def index_of(self, key: str) -> int:
        """The position that decimal digits name.

        Raises:
            SelectionError: they are no position of this source, or not written the way `key` writes them.
        """
        if key.isascii() and key.isdigit() and len(key) <= 19 and int(key) < len(self) and str(int(key)) == key:
            return int(key)
        raise SelectionError(f"no sample has the key {brief(key)}; keys are '0' to '{len(self) - 1}'", where="key")

    def split(self, name: str) -> Self:
        """The source itself, for `"all"`.

        Raises:
            SelectionError: the name is another one.
        """
        if name != "all":
            raise SelectionError(f"there is no split {brief(name)}: this format has only 'all'", where="split")
        return self

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def check_index(index: SupportsIndex, n: int, *, what: str) -> int:
    """A position from 0 to n - 1; negative ones count from the end.

    Raises:
        SelectionError: it is no integer, or outside.

    >>> check_index(-1, 5, what="sample")
    4
    """
    try:
        position = operator.index(index)
    except TypeError:
        raise SelectionError(f"{brief(index)} is no position: {what}s are numbered", where=what) from None
    if -n <= position < n:
        return position % n
    reach = f"from 0 to {n - 1}" if n else "there, but there are none"
    raise SelectionError(f"{what} {brief(position)} does not exist; it must be {reach}", where=what)


def check_positions(wanted: npt.ArrayLike | slice, n: int, *, what: str) -> IntArray:
    """Check a slice or a list of positions; negative ones count from the end."""
    if isinstance(wanted, slice):
        try:
            return np.arange(*wanted.indices(n), dtype=np.int64)
        except (TypeError, ValueError) as error:
            raise SelectionError(f"{brief(wanted)} is no slice of {what}s: {error}", where=what) from None
    try:
        found = np.asarray(wanted)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{brief(wanted)} is no list of {what}s: {error}", where=what) from None
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise SelectionError(f"{brief(wanted)} is no list of {what}s: pass integers", where=what)
    if found.size and (int(found.min()) < -n or int(found.max()) >= n):
        raise SelectionError(f"{what}s from {int(found.min())} to {int(found.max())} of {n} do not exist", where=what)
    found = found.astype(np.int64)
    return np.where(found < 0, found + n, found)


def check_count(value: object, *, name: str, least: int = 1, most: int = 2**63 - 1) -> int:
    """An integer argument within its bounds.

    Raises:
        ArgumentError: it is no integer (booleans are none), or outside.
    """
    if not isinstance(value, bool):
        try:
            number = operator.index(cast("SupportsIndex", value))
        except TypeError:
            number = least - 1
        if least <= number <= most:
            return number
    raise ArgumentError(f"{name} is {brief(value)}; it must be an integer from {least} to {most}", where=name)


def steps(n: int, batch_size: int, *, start: int, drop_last: bool) -> Iterator[tuple[int, int]]:
    """The half-open ranges of positions that `batches` goes through.

    >>> list(steps(7, 3, start=0, drop_last=False))
    [(0, 3), (3, 6), (6, 7)]
    """
    batch_size = check_count(batch_size, name="batch_size")
    for first in range(check_count(start, name="start", least=0), n, batch_size):
        end = min(first + batch_size, n)
        if end - first == batch_size or not drop_last:
            yield first, end


def text_card(title: str, facts: Mapping[str, object], problems: Sequence[Problem]) -> str:
    """What a source's `repr` shows."""
    rows = [(name, str(value)) for name, value in facts.items()]
    rows += [("problem", _placed(problem)) for problem in problems[:5]]
    if len(problems) > 5:
        rows.append(("problems", f"{len(problems) - 5} more"))
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join([title, *(f"  {name.ljust(width)}  {value}" for name, value in rows)])


def _placed(problem: Problem) -> str:
    """What is wrong, and with which file where the words do not say so."""
    name = problem.where.rsplit("/", 1)[-1]
    return problem.message if name in problem.message else f"{name}: {problem.message}"
