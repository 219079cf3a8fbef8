# pyright: reportUnnecessaryIsInstance=false
"""Parse untrusted JSON: bounded in size and depth, strict UTF-8, no duplicate keys, `DocumentError` only."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable

from saev_store.errors import ArgumentError, DocumentError
from saev_store.problems import Problem

#: Levels of nesting a document may have. Real ones have three; the interpreter's own limit depends on the machine.
MAX_DEPTH = 64
#: Digits of one number. Beyond it, conversion to an integer takes quadratic time.
MAX_DIGITS = 4300

_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (MAX_DIGITS + 1))
_NOT_BRACKETS_OR_QUOTES = bytes(set(range(256)) - set(b'[]{}"'))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")

_REMEDY_CUT = "It may be a partial copy, or its writer was stopped: copy it again, or record the store again."


def loads(raw: bytes, *, where: str, max_nbytes: int) -> object:
    """The Python objects that a JSON document stands for.

    A UTF-8 byte order mark is tolerated, and so are NaN and Infinity: Python's own writer emits them. The reader of a
    field decides whether it may hold one.

    Args:
        raw: The whole file.
        where: Its name, for messages.
        max_nbytes: The most bytes that such a document may have.

    Raises:
        ArgumentError: `raw` is not bytes.
        DocumentError: it is too large, too deep, not UTF-8, not JSON, or repeats a key; the message has the position.
    """
    if not isinstance(raw, bytes):
        raise ArgumentError(f"it is a {type(raw).__name__}; pass the bytes of the file", where=where)
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
    if _too_deep(raw):
        raise _error(
            f"it is nested more than {MAX_DEPTH} levels deep", where, remedy="No writer makes such a document."
        )

    duplicates: list[str] = []
    parse_int = _bounded_int if _LONG_NUMBER.search(raw) else None
    try:
        value: object = json.loads(text, object_pairs_hook=_object_hook(duplicates), parse_int=parse_int)
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


def _object_hook(duplicates: list[str]) -> Callable[[list[tuple[str, object]]], dict[str, object]]:
    def hook(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs) and len(duplicates) < 100:
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen and len(duplicates) < 100:
                    duplicates.append(key)
                seen.add(key)
        return found

    return hook


def _bounded_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(digits[:20])
    return int(digits)


def _too_deep(raw: bytes) -> bool:
    """Whether a parser would nest deeper than `MAX_DEPTH`, decided without recursion and at the speed of `bytes` methods.

    Everything but brackets is removed, then innermost pairs, once per allowed level. A pair that still closes after that
    lay too deep. What is left otherwise never closes: a parser sees its leading opening brackets and stops at the first
    closing one. Brackets that close the wrong kind are a syntax error, found later, at no greater depth.
    """
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return False
    # Escaped backslashes first: what precedes a quote then escapes it. Two quotes that meet can go, too, without changing
    # what is inside a string and what is not, so most strings are gone before the rest is cut at its quotes.
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
