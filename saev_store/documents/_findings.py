"""What a check has found so far: every problem of a document, bounded, and then one exception."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

from saev_store.errors import DocumentError
from saev_store.problems import Problem, Severity

#: Problems kept of one document; a list of a million wrong numbers is summed up beyond that.
MAX_PROBLEMS = 100
_MAX_IN_MESSAGE = 8

_short = reprlib.Repr()
_short.maxstring = 80
_short.maxother = 80
_short.maxlong = 40

_JSON_NAMES: dict[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a number with a fraction or exponent",
    str: "a string",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


def shown(value: object) -> str:
    """A value as a message shows it: bounded in length, with the name of its JSON type.

    >>> shown("7"), shown(True), shown(10**5000)
    ("'7' (a string)", 'True (a boolean)', 'an integer of 16610 bits')
    """
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if value is None:
        return "null"
    return f"{_short.repr(value)} ({_JSON_NAMES.get(type(value), type(value).__name__)})"


def key_list(keys: Sequence[str]) -> str:
    """Keys as a message shows them, the first few of many.

    >>> key_list(["n_imgs", "d_vit"])
    '"n_imgs", "d_vit"'
    """
    text = ", ".join(f'"{key[:60]}"' for key in keys[:12])
    return f"{text} and {len(keys) - 12} more" if len(keys) > 12 else text


class Findings:
    """Problems of the document `where`, collected until `raise_if_bad` is called.

    Keeps the first `MAX_PROBLEMS` of each severity and counts the rest, so that a hostile document cannot make us
    allocate more for the complaint than it takes itself.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self._kept: dict[Severity, list[Problem]] = {"error": [], "warning": [], "info": []}
        self._counted: dict[Severity, int] = {"error": 0, "warning": 0, "info": 0}
        self._unchecked = ""

    def add(self, kind: str, message: str, *, loc: tuple[str | int, ...] = (), severity: Severity = "error") -> None:
        """Remember one problem; beyond `MAX_PROBLEMS` only its number."""
        self._counted[severity] += 1
        if len(self._kept[severity]) < MAX_PROBLEMS:
            self._kept[severity].append(Problem(kind, message, where=self.where, loc=loc, severity=severity))

    @property
    def is_full(self) -> bool:
        """Whether further errors would only be counted: time to stop looking."""
        return self._counted["error"] >= MAX_PROBLEMS

    def stop(self, n: int, what: str) -> None:
        """Note that `n` things were not looked at any more."""
        self._unchecked = f"; {n} more {what} were not looked at"

    @property
    def n_errors(self) -> int:
        return self._counted["error"]

    @property
    def warnings(self) -> tuple[Problem, ...]:
        return tuple(self._kept["warning"])

    def raise_if_bad(self, *, remedy: str | None = None, error: type[DocumentError] = DocumentError) -> None:
        """One exception with every problem, or nothing.

        Raises:
            DocumentError: there is at least one problem of severity "error".
        """
        n = self._counted["error"]
        if not n:
            return
        problems = list(self._kept["error"])
        if n > len(problems) or self._unchecked:
            more = f"and {n - len(problems)} more" if n > len(problems) else f"the first {n} problems are listed"
            problems.append(Problem("more_problems", more + self._unchecked, where=self.where))
        if n == 1:
            message = problems[0].message
        else:
            listed = "; ".join(f"({i}) {p.message}" for i, p in enumerate(problems[:_MAX_IN_MESSAGE], 1))
            more = f"; and {n - _MAX_IN_MESSAGE} more" if n > _MAX_IN_MESSAGE else ""
            message = f"{n} problems: {listed}{more}{self._unchecked}"
        raise error(message, where=self.where, remedy=remedy, problems=problems)
