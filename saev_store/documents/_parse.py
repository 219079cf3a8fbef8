# pyright: reportUnnecessaryIsInstance=false
"""Untrusted JSON as Python objects, and the problems that are found in them: both bounded.

JSON is strict UTF-8 without duplicate keys, limited in size and depth. All problems of a document become one `DocumentError`.
"""

from __future__ import annotations

import json
import re
import reprlib
import sys
from collections.abc import Sequence

from saev_store.errors import ArgumentError, DocumentError, kind_of
from saev_store.problems import Problem, Severity

#: Levels of nesting a document may have. Real ones have three; the interpreter's own limit depends on the machine.
MAX_DEPTH = 64
#: Digits of one number. Beyond it, conversion to an integer takes quadratic time.
MAX_DIGITS = 4300

_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (MAX_DIGITS + 1))
_NOT_BRACKETS_OR_QUOTES = bytes(set(range(256)) - set(b'[]{}"'))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")

_REMEDY_CUT = "It may be a partial copy, or its writer was stopped: copy it again, or record the store again."

#: Problems kept of one document; the others are only counted.
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


def parse_json(raw: bytes, *, where: str, max_nbytes: int) -> object:
    """The Python objects that a JSON document stands for.

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
    if len(raw) > max_nbytes:
        raise _error(
            f"it has {len(raw)} bytes; such a document has at most {max_nbytes}",
            where,
            remedy="This is probably no document of a store: check what was copied here.",
        )
    if not raw.strip(b"\0 \t\r\n"):
        what = f"it holds nothing but {len(raw)} zero bytes" if b"\0" in raw else "it is empty"
        raise _error(f"{what}; it must be JSON", where, remedy=_REMEDY_CUT)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise _error(
            f"byte {exc.start} ({raw[exc.start]:#04x}) is not UTF-8 ({exc.reason}); the document must be UTF-8",
            where,
            remedy="If an editor saved it in another encoding, save it as UTF-8.",
        ) from None
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _too_deep(raw):
        raise _error(
            f"it is nested more than {MAX_DEPTH} levels deep", where, remedy="No writer makes such a document."
        )

    duplicates: list[str] = []

    def checked(pairs: list[tuple[str, object]]) -> dict[str, object]:
        """An object of the document; its duplicate keys are noted."""
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen and len(duplicates) < MAX_PROBLEMS:
                    duplicates.append(key)
                seen.add(key)
        return found

    parse_int = _bounded_int if _LONG_NUMBER.search(raw) else None
    try:
        value: object = json.loads(text, object_pairs_hook=checked, parse_int=parse_int)
    except json.JSONDecodeError as exc:
        cut = exc.pos >= len(text.rstrip())
        raise _error(
            f"it is not JSON: {exc.msg} at line {exc.lineno}, column {exc.colno} (character {exc.pos} of {len(text)})"
            + ("; it looks cut off" if cut else ""),
            where,
            remedy=_REMEDY_CUT,
        ) from None
    except RecursionError:
        raise _error("it is nested too deeply", where, remedy="No writer makes such a document.") from None
    except ValueError:
        limit = min(MAX_DIGITS, sys.get_int_max_str_digits() or MAX_DIGITS)
        raise _error(f"it holds a number of more than {limit} digits", where, remedy="No writer does that.") from None
    if duplicates:
        problems = [
            Problem("duplicate_key", f"the key {key[:80]!r} occurs twice in one object", where) for key in duplicates
        ]
        raise DocumentError(
            "; ".join(problem.message for problem in problems[:8]) + "; each key may occur once, or readers disagree",
            where=where,
            remedy="Remove the value that is wrong.",
            problems=problems,
        )
    return value


def _error(message: str, where: str, *, remedy: str) -> DocumentError:
    return DocumentError(message, where=where, remedy=remedy, problems=[Problem("json", message, where)])


def _bounded_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(digits[:20])
    return int(digits)


def _too_deep(raw: bytes) -> bool:
    """Whether a parser would nest deeper than `MAX_DEPTH`, decided without recursion and at the speed of `bytes` methods.

    Removes all but the brackets, then the innermost pairs, once for each allowed level. A pair that is left after that was
    too deep. Other brackets that are left are never closed: a parser reads the leading opening ones and stops at the first
    closing one. Brackets that close the wrong kind are a syntax error, which is found later, at no greater depth.
    """
    # Escaped backslashes go first: a backslash that is left before a quote escapes it. Two adjacent quotes can go as well:
    # what is inside a string stays inside. Most strings are gone before the rest is cut at its quotes.
    unescaped = raw.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in raw else raw
    marks = unescaped.translate(_ONE_KIND, _NOT_BRACKETS_OR_QUOTES).replace(b'""', b"")
    brackets = b"".join(marks.split(b'"')[::2])
    for _ in range(MAX_DEPTH):
        left = brackets.replace(b"[]", b"")
        if len(left) == len(brackets):
            break
        brackets = left
    head = brackets[: MAX_DEPTH + 1]
    return b"[]" in brackets or (len(head) > MAX_DEPTH and b"]" not in head)


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

    Keeps the first `MAX_PROBLEMS` of each severity and counts the other errors: the complaint about a hostile document must
    not take more memory than the document.

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
        self._unchecked = ""

    def add(self, kind: str, message: str, *, loc: tuple[str | int, ...] = (), severity: Severity = "error") -> None:
        """Add one problem; beyond `MAX_PROBLEMS` only count it."""
        kept = self._errors if severity == "error" else self.warnings
        self.n_errors += severity == "error"
        if len(kept) < MAX_PROBLEMS:
            kept.append(Problem(kind, message, where=self.where, loc=loc, severity=severity))

    def is_full(self, n_left: int, what: str) -> bool:
        """Whether further errors would only be counted; the error then says that `n_left` things were not looked at."""
        if self.n_errors < MAX_PROBLEMS:
            return False
        self._unchecked = f"; {n_left} more {what} were not looked at"
        return True

    def error(self, *, remedy: str, kind: type[DocumentError] = DocumentError) -> DocumentError:
        """One exception with every error that was added; there must be at least one."""
        n, problems = self.n_errors, list(self._errors)
        if n > len(problems) or self._unchecked:
            more = f"and {n - len(problems)} more" if n > len(problems) else f"the first {n} problems are listed"
            problems.append(Problem("more_problems", more + self._unchecked, where=self.where))
        if n == 1:
            message = problems[0].message
        else:
            listed = "; ".join(f"({i}) {p.message}" for i, p in enumerate(problems[:_MAX_IN_MESSAGE], 1))
            more = f"; and {n - _MAX_IN_MESSAGE} more" if n > _MAX_IN_MESSAGE else ""
            message = f"{n} problems: {listed}{more}{self._unchecked}"
        return kind(message, where=self.where, remedy=remedy, problems=problems)
