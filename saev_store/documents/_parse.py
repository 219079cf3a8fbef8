# pyright: reportUnnecessaryIsInstance=false
"""Untrusted JSON as Python objects, and the problems that are found in them: both bounded.

JSON is strict UTF-8 without duplicate keys, limited in size. All problems of a document become one `DocumentError`.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Sequence
from typing import cast

from saev_store.errors import ArgumentError, DocumentError, brief, kind_of
from saev_store.problems import Problem, Severity

#: Problems kept of one document.
MAX_PROBLEMS = 100
_MAX_IN_MESSAGE = 8
#: Deeper documents are refused: Python's own limit depends on its version and its caller, and is lower for pickles.
_MAX_DEPTH = 100

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


def parse_json(raw: bytes, *, where: str, max_nbytes: int) -> object:
    """The Python objects that a JSON document stands for, by the rules of Python's `json`.

    A UTF-8 byte order mark is allowed, and so are NaN and Infinity, which Python's own writer emits. The check of a field
    decides whether it may be one.

    Args:
        raw: The whole file.
        where: Its name, for messages.
        max_nbytes: The most bytes that such a document may have.

    Raises:
        ArgumentError: `raw` is not bytes.
        DocumentError: it is too large, too deep, not UTF-8, not JSON, or repeats a key; the message has the position.
    """
    if not isinstance(raw, bytes):
        raise ArgumentError(f"it is {kind_of(raw)}; pass the bytes of the file", where=where)
    findings = Findings(where)
    if len(raw) > max_nbytes:
        findings.add("json", f"it has {len(raw)} bytes; such a document has at most {max_nbytes}")
        raise findings.error(remedy="This is probably not a document of a store: check what was copied here.")

    def checked(pairs: list[tuple[str, object]]) -> dict[str, object]:
        """An object of the document; its duplicate keys are problems."""
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    rule = "each key may occur once, or readers disagree"
                    findings.add("duplicate_key", f"the key {key[:80]!r} occurs twice in one object; {rule}")
                seen.add(key)
        return found

    try:
        value: object = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=checked)
    except (ValueError, OverflowError, RecursionError) as error:  # bad UTF-8 and long numbers are ValueErrors
        what = "it is empty" if not raw.strip(b"\0 \t\r\n") else f"it is not JSON: {brief(str(error))}"
        findings = Findings(where)
        findings.add("json", what)
        raise findings.error(
            remedy="It may be a partial copy, or its writer was stopped: copy it again, or record the store again."
        ) from None
    if _is_deep(value):
        findings.add("json", f"it is nested more than {_MAX_DEPTH} deep")
    if findings.n_errors:
        raise findings.error(remedy="Remove the value that is wrong.")
    return value


def _is_deep(value: object) -> bool:
    """Return True if there are values inside `_MAX_DEPTH` others."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            each
            for some in level
            if isinstance(some, (dict, list))
            for each in (
                cast("dict[str, object]", some).values() if isinstance(some, dict) else cast("list[object]", some)
            )
        ]
    return bool(level)


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
    """The problems of the document `where`: errors, which `error` makes one exception of, and warnings.

    Keeps the first `MAX_PROBLEMS` of each severity: the complaint about a hostile document must not take more memory than
    the document.

    Attributes:
        where: The document's name, for messages.
        n_errors: How many errors were added.
        warnings: The warnings.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.n_errors = 0
        self.warnings: list[Problem] = []
        self._errors: list[Problem] = []

    def add(self, kind: str, message: str, *, loc: tuple[str | int, ...] = (), severity: Severity = "error") -> None:
        """Add one problem; beyond `MAX_PROBLEMS` only count it."""
        kept = self._errors if severity == "error" else self.warnings
        self.n_errors += severity == "error"
        if len(kept) < MAX_PROBLEMS:
            kept.append(Problem(kind, message, where=self.where, loc=loc, severity=severity))

    @property
    def is_full(self) -> bool:
        """True if an error was left out, so that there is no need to look further."""
        return self.n_errors > MAX_PROBLEMS

    def error(self, *, remedy: str, kind: type[DocumentError] = DocumentError) -> DocumentError:
        """One exception with every error that was added; there must be at least one."""
        n, problems = self.n_errors, list(self._errors)
        message = "; ".join(f"({i}) {p.message}" for i, p in enumerate(problems[:_MAX_IN_MESSAGE], 1))
        more = f"; and {n - _MAX_IN_MESSAGE} more" if n > _MAX_IN_MESSAGE else ""
        if self.is_full:
            problems.append(Problem("more_problems", f"the first {MAX_PROBLEMS} problems are listed", where=self.where))
        message = problems[0].message if n == 1 else f"{n} problems: {message}{more}"
        return kind(message, where=self.where, remedy=remedy, problems=problems)
