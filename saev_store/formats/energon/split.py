"""Names in braces, and how shards are dealt out to splits. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from itertools import product
from typing import NoReturn

from saev_store.errors import ArgumentError, DocumentError, brief

#: Names that one document may stand for.
MAX_NAMES = 1_000_000
_MAX_LENGTH = 65_536
_MAX_DEPTH = 16
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_NUMBERS = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.-?(\d{1,18}))?")
_CHARACTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.-?(\d{1,18}))?")
_NUMBER = re.compile(r"\d+", re.ASCII)
_SPECIAL = re.compile(r"[\\{}]")


@dataclass(frozen=True, slots=True)
class _Range:
    values: range
    width: int  # 0: as it comes; -1: positions in the alphabet

    def __len__(self) -> int:
        return len(self.values)

    def names(self) -> Iterator[str]:
        if self.width < 0:
            return (_LETTERS[i] for i in self.values)
        return (f"{value:0{self.width}d}" for value in self.values)


@dataclass(frozen=True, slots=True)
class _Either:
    """One of several sequences."""

    options: tuple[tuple[str | _Range | _Either, ...], ...]

    def names(self) -> Iterator[str]:
        for option in self.options:
            yield from _names(option)


_Sequence = tuple[str | _Range | _Either, ...]


def expand(pattern: str, *, where: str, max_names: int = MAX_NAMES) -> list[str]:
    r"""The names that a pattern in braces stands for, in order; they are counted before any is made.

    Braces mean what they mean to a shell: `{000..002}`, `{a..e..2}`, `{train,val}`, nested, with `\` before a character
    that stands for itself. Braces around something else are kept.

    Raises:
        DocumentError: braces do not match, or the pattern stands for more than `max_names` names.

    >>> expand("shards/{000..002}.tar", where="split.yaml")
    ['shards/000.tar', 'shards/001.tar', 'shards/002.tar']
    >>> expand("{a,b{1..2}}.tar", where="split.yaml")
    ['a.tar', 'b1.tar', 'b2.tar']
    """
    if "{" not in pattern and "}" not in pattern and "\\" not in pattern:
        return [pattern]
    if len(pattern) > _MAX_LENGTH:
        _refuse(pattern, f"has {len(pattern):,} characters; at most {_MAX_LENGTH:,} are read", where)
    parsed = _Parser(pattern, where).parse()
    n_names = _count(parsed)
    if n_names > max_names:
        _refuse(pattern, f"stands for {brief(n_names)} names; at most {max_names:,} are read", where)
    return list(_names(parsed))


def escape(name: str) -> str:
    r"""A pattern that stands for one name.

    >>> escape("a{1}.tar"), expand(escape("a{1}.tar"), where="")
    ('a\\{1\\}.tar', ['a{1}.tar'])
    """
    return _SPECIAL.sub(r"\\\g<0>", name)


def collapse(names: Sequence[str]) -> list[str]:
    """Patterns that expand to `names`, in that order: neighbours that count up in one place are written as a range.

    >>> collapse(["s/000.tar", "s/001.tar", "s/002.tar", "x.tar"])
    ['s/{000..002}.tar', 'x.tar']
    """
    patterns: list[str] = []
    at = 0
    while at < len(names):
        end, place = _run(names, at)
        patterns.append(escape(names[at]) if place is None else _as_range(names[at], names[end - 1], place))
        at = end
    return patterns


def _run(names: Sequence[str], start: int) -> tuple[int, int | None]:
    """How far names count up from `start` in the same number, and which number that is."""
    end, place = start + 1, None
    previous = _pieces(names[start])
    while end < len(names):
        current = _pieces(names[end])
        if current[0] != previous[0] or len(current[1]) != len(previous[1]):
            break
        changed = [i for i, (a, b) in enumerate(zip(previous[1], current[1], strict=True)) if a != b]
        if len(changed) != 1 or (place is not None and changed[0] != place):
            break
        a, b = previous[1][changed[0]], current[1][changed[0]]
        if len(a) != len(b) or len(a) > 18 or int(b) != int(a) + 1:
            break
        place, previous, end = changed[0], current, end + 1
    return end, place


def _pieces(name: str) -> tuple[list[str], list[str]]:
    return _NUMBER.split(name), _NUMBER.findall(name)


def _as_range(first: str, last: str, place: int) -> str:
    texts, numbers = _pieces(first)
    shown = [f"{{{number}..{_pieces(last)[1][place]}}}" if i == place else number for i, number in enumerate(numbers)]
    return "".join(escape(text) + number for text, number in zip(texts, [*shown, ""], strict=True))


class _Parser:
    """Recursive descent over one pattern, as deep as `_MAX_DEPTH`."""

    def __init__(self, pattern: str, where: str) -> None:
        self._pattern, self._where = pattern, where

    def parse(self) -> _Sequence:
        return self._sequence(self._pattern, 0)

    def _sequence(self, text: str, depth: int) -> _Sequence:
        if depth > _MAX_DEPTH:
            _refuse(self._pattern, f"nests braces more than {_MAX_DEPTH} deep", self._where)
        found: list[str | _Range | _Either] = []
        literal: list[str] = []
        at = 0
        while at < len(text):
            character = text[at]
            if character == "\\" and at + 1 < len(text):
                literal.append(text[at + 1])
                at += 2
            elif character == "{":
                end = self._closing(text, at)
                inside = self._braces(text[at + 1 : end], depth)
                if isinstance(inside, tuple):
                    found += ["".join(literal) + "{", *inside]
                    literal = ["}"]
                else:
                    found += ["".join(literal), inside]
                    literal = []
                at = end + 1
            elif character == "}":
                _refuse(self._pattern, "has braces that do not match", self._where)
            else:
                literal.append(character)
                at += 1
        found.append("".join(literal))
        return tuple(item for item in found if item != "")

    def _closing(self, text: str, start: int) -> int:
        depth, at = 0, start
        while at < len(text):
            if text[at] == "\\":
                at += 1
            elif text[at] == "{":
                depth += 1
            elif text[at] == "}":
                depth -= 1
                if not depth:
                    return at
            at += 1
        _refuse(self._pattern, "has braces that do not match", self._where)
        return None

    def _braces(self, text: str, depth: int) -> _Range | _Either | _Sequence:
        if match := _NUMBERS.fullmatch(text):
            first, last, step = match.groups()
            padded = any(end.lstrip("-").startswith("0") and end not in {"0", "-0"} for end in (first, last))
            width = max(len(first), len(last)) if padded else 0
            return _Range(_steps(int(first), int(last), step), width)
        if match := _CHARACTERS.fullmatch(text):
            first, last, step = match.groups()
            return _Range(_steps(_LETTERS.index(first), _LETTERS.index(last), step), -1)
        options = self._options(text)
        if len(options) == 1:
            return self._sequence(text, depth + 1)
        return _Either(tuple(self._sequence(option, depth + 1) for option in options))

    def _options(self, text: str) -> list[str]:
        options, depth, start, at = [], 0, 0, 0
        while at < len(text):
            if text[at] == "\\":
                at += 1
            elif text[at] == "{":
                depth += 1
            elif text[at] == "}":
                depth -= 1
            elif text[at] == "," and not depth:
                options.append(text[start:at])
                start = at + 1
            at += 1
        return [*options, text[start:]]


def _steps(first: int, last: int, step: str | None) -> range:
    by = int(step or 1) or 1
    return range(first, last + 1, by) if first <= last else range(first, last - 1, -by)


def _count(sequence: _Sequence) -> int:
    n = 1
    for item in sequence:
        if isinstance(item, _Range):
            n *= len(item)
        elif isinstance(item, _Either):
            n *= sum(_count(option) for option in item.options)
    return n


def _names(sequence: _Sequence) -> Iterator[str]:
    return map("".join, product(*((item,) if isinstance(item, str) else item.names() for item in sequence)))


def _refuse(pattern: str, rule: str, where: str) -> NoReturn:
    raise DocumentError(f"{brief(pattern)} {rule}", where=where, remedy="List the shards one by one.")


def parse_ratio(text: str) -> tuple[Fraction, ...]:
    """The shares of a split, exactly as written: `8,1,1` or `0.8,0.1,0.1`.

    Raises:
        ArgumentError: it is no list of numbers that are not negative, with at least one above zero.

    >>> [str(share) for share in parse_ratio("0.8, 0.1, 0.1")]
    ['4/5', '1/10', '1/10']
    """
    rule = "a split is written '8,1,1' or '0.8,0.1,0.1': shares of train, val and test"
    try:
        shares = [Decimal(share.strip()) for share in text.split(",")] if len(text) <= 256 else []
    except InvalidOperation:
        shares = []
    if not shares or any(not share.is_finite() or not 0 <= share < 10**9 or len(str(share)) > 30 for share in shares):
        raise ArgumentError(f"{brief(text)} is no split: {rule}", where="split")
    if not any(shares):
        raise ArgumentError(f"{brief(text)} gives no shard to anybody: {rule}", where="split")
    return tuple(Fraction(share) for share in shares)


def deal(n_shards: int, shares: Sequence[Fraction]) -> list[tuple[int, int]]:
    """Half-open runs of shards, one for each share: all are dealt, in order, as close to the shares as whole shards can be.

    Each share gets the whole part of what it is due; shards left over go to the largest remainders, earlier shares first.

    >>> deal(10, parse_ratio("7,2,1")), deal(1, parse_ratio("0.8,0.1,0.1"))
    ([(0, 7), (7, 9), (9, 10)], [(0, 1), (1, 1), (1, 1)])
    """
    due = [n_shards * share / sum(shares) for share in shares]
    counts = [int(each) for each in due]
    by_remainder = sorted(range(len(due)), key=lambda i: (counts[i] - due[i], i))
    for i in by_remainder[: n_shards - sum(counts)]:
        counts[i] += 1
    runs, start = [], 0
    for count in counts:
        runs.append((start, start + count))
        start += count
    return runs
