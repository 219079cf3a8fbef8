"""`Report`: the result of a validation; prints, pickles, converts to JSON and can be raised."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from saev_store.errors import CorruptShardError, counted
from saev_store.names import printable
from saev_store.problems import Problem, Severity

#: The order in which problems are shown.
_RANK: dict[Severity, int] = {"error": 0, "warning": 1, "info": 2}
#: Problems listed in an exception's message; `problems` holds all of them.
_MAX_SHOWN = 20

Ranges = tuple[tuple[int, int], ...]


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same ranges, ascending, merged if they touch, without empty ones."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(span for span in ranges if span[0] < span[1]):
        low, high = merged.pop() if merged and start <= merged[-1][1] else (start, end)
        merged.append((low, max(high, end)))
    return tuple(merged)


@dataclass(frozen=True)
class Report:
    """Result of `validate`: the problems of a store and the examples that they make unreadable. Does no IO.

    Attributes:
        url: Address of the store, without credentials.
        n_examples: Examples according to the documents.
        n_shards: Shards according to the documents.
        problems: All problems, errors first.
        deep: Whether bytes were read; else only names and sizes were compared.
        checked_bytes: Bytes read and checked.
        elapsed_s: Seconds that the validation took.
        recording: Identity of the files that were looked at, if examples are lost; `repair` refuses other files.
    """

    url: str
    n_examples: int
    n_shards: int
    problems: tuple[Problem, ...]
    deep: bool = False
    checked_bytes: int = 0
    elapsed_s: float = 0.0
    recording: str | None = None

    def __post_init__(self) -> None:
        ordered = sorted(self.problems, key=lambda problem: _RANK[problem.severity])
        object.__setattr__(self, "problems", tuple(ordered))

    @property
    def ok(self) -> bool:
        """True if no problem is an error; there may be warnings and infos."""
        return not self.errors

    @property
    def errors(self) -> tuple[Problem, ...]:
        return tuple(problem for problem in self.problems if problem.severity == "error")

    @property
    def warnings(self) -> tuple[Problem, ...]:
        return tuple(problem for problem in self.problems if problem.severity == "warning")

    @property
    def lost(self) -> Ranges:
        """Half-open ranges of examples that cannot be trusted, merged and ascending; `repair` takes these."""
        return merge_ranges(span for problem in self.problems for span in problem.lost)

    @property
    def n_lost(self) -> int:
        """Number of examples in `lost`."""
        return sum(end - start for start, end in self.lost)

    def raise_if_bad(self) -> None:
        """Raise an error unless `ok`.

        Raises:
            CorruptShardError: there is at least one error; the message lists the first ones, `problems` has all.
        """
        errors = self.errors
        if not errors:
            return
        shown = "".join(f"\n  {problem}" for problem in errors[:_MAX_SHOWN])
        raise CorruptShardError(
            f"{counted(len(errors), 'error')}, {self.n_lost:,} of {self.n_examples:,} examples are lost:{shown}",
            where=self.url,
            remedy="Restore the files named, or record lost examples again with `repair`.",
            problems=self.problems,
        )

    def to_dict(self) -> dict[str, object]:
        """Plain types for `json.dumps`, as `saev-store validate --json` prints them."""
        return {"ok": self.ok, "n_lost": self.n_lost, "lost": [list(span) for span in self.lost], **asdict(self)}

    def __str__(self) -> str:
        checked = f"{self.checked_bytes:,} bytes checked" if self.deep else "names and sizes only"
        lost = f"; {self.n_lost:,} lost" if self.n_lost else ""
        of = f"{counted(self.n_examples, 'example')} in {counted(self.n_shards, 'shard')}"
        head = f"{self.url}: {'ok' if self.ok else 'NOT OK'}: {of}, {checked}{lost}"
        return printable("\n".join([head, *(f"  {problem}" for problem in self.problems)]))
