"""`Report`: the result of a validation; prints, pickles, converts to JSON and can be raised."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from saev_store.errors import CorruptShardError, counted
from saev_store.names import printable
from saev_store.problems import Problem, Severity

#: The order in which problems are shown.
_RANK: dict[Severity, int] = {"error": 0, "warning": 1, "info": 2}
_COLOURS: dict[Severity, str] = {"error": "#c62828", "warning": "#b26a00", "info": "#546e7a"}
#: Problems listed in an exception's message and in a notebook; `problems` holds all of them.
_MAX_SHOWN = 20

Ranges = tuple[tuple[int, int], ...]


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same ranges, ascending, merged where they touch, without empty ones.

    >>> merge_ranges([(5, 9), (0, 2), (2, 3), (8, 11), (4, 4)])
    ((0, 3), (5, 11))
    """
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
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
        shown = "\n".join(f"  {problem}" for problem in errors[:_MAX_SHOWN])
        more = f"\n  … and {len(errors) - _MAX_SHOWN} more" if len(errors) > _MAX_SHOWN else ""
        raise CorruptShardError(
            f"{counted(len(errors), 'error')}, {self.n_lost:,} of {self.n_examples:,} examples are lost:\n{shown}{more}",
            where=self.url,
            remedy="Restore the files named, or record the lost examples again with `repair`."
            if self.lost
            else "Restore the files named.",
            problems=self.problems,
        )

    def to_dict(self) -> dict[str, object]:
        """Plain types for `json.dumps`, as `saev-store validate --json` prints them."""
        return {
            "url": self.url,
            "ok": self.ok,
            "deep": self.deep,
            "n_examples": self.n_examples,
            "n_shards": self.n_shards,
            "n_lost": self.n_lost,
            "lost": [list(span) for span in self.lost],
            "checked_bytes": self.checked_bytes,
            "elapsed_s": round(self.elapsed_s, 6),
            "problems": [asdict(problem) for problem in self.problems],
        }

    def _headline(self) -> str:
        infos = len(self.problems) - len(self.errors) - len(self.warnings)
        counts = [
            counted(n, noun)
            for n, noun in ((len(self.errors), "error"), (len(self.warnings), "warning"), (infos, "remark"))
            if n
        ]
        return ("ok" if self.ok else "NOT OK") + (": " + ", ".join(counts) if counts else "")

    def _facts(self) -> str:
        depth = (
            f"{self.checked_bytes:,} bytes checked in {self.elapsed_s:.2f} s" if self.deep else "names and sizes only"
        )
        lost = f"; {self.n_lost:,} lost" if self.n_lost else ""
        return f"{counted(self.n_examples, 'example')} in {counted(self.n_shards, 'shard')}, {depth}{lost}"

    def __str__(self) -> str:
        lines = [f"{self.url}: {self._headline()}", f"  {self._facts()}"]
        lines += [f"  {problem}" for problem in self.problems]
        return printable("\n".join(lines))

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td style='color:{_COLOURS[problem.severity]}'>{problem.severity}</td>"
            f"<td><code>{html.escape(problem.kind)}</code></td><td>{html.escape(problem.where)}</td>"
            f"<td style='text-align:left'>{html.escape(problem.message)}</td>"
            f"<td>{html.escape(', '.join(f'{start}:{end}' for start, end in problem.lost[:8]))}"
            f"{' …' if len(problem.lost) > 8 else ''}</td></tr>"
            for problem in self.problems[:_MAX_SHOWN]
        )
        hidden = len(self.problems) - _MAX_SHOWN
        more = f"<p>… and {hidden} more in <code>.problems</code></p>" if hidden > 0 else ""
        head = "<tr><th></th><th>kind</th><th>where</th><th>what</th><th>lost examples</th></tr>"
        table = f"<table>{head}{rows}</table>{more}" if rows else ""
        colour = "#2e7d32" if self.ok else _COLOURS["error"]
        return printable(
            f"<div><b style='color:{colour}'>{html.escape(self._headline())}</b> "
            f"<code>{html.escape(self.url)}</code><br>{html.escape(self._facts())}{table}</div>"
        )
