"""Names in braces, and how shards are dealt out to splits. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from itertools import product
from typing import NoReturn

from saev_store.errors import ArgumentError, DocumentError, brief

#: Characters of all names that one document may stand for.
MAX_EXPANDED_CHARACTERS = 64 << 20
#: A name counts as so many characters more than it has.
NAME_OVERHEAD = 64
_MAX_PATTERN_CHARACTERS = 65_536
_TOKEN = re.compile(r"\\(.)|\{([^{}\\]*)\}|([{}])|([^{}\\]+|\\)", re.DOTALL)
_RANGE = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.-?(\d{1,18}))?", re.ASCII)
_NUMBER = re.compile(r"\d+", re.ASCII)
_SPECIAL = re.compile(r"[\\{}]")


def expand(pattern: str, *, where: str, max_characters: int = MAX_EXPANDED_CHARACTERS) -> list[str]:
    r"""Return the names that a pattern in braces stands for, in order; they are counted before any is made.

    Braces are ranges of numbers and alternatives: `{000..002}`, `{0..9..3}`, `{train,val}`. A `\` stands before a character
    that stands for itself. Braces around something else are kept.

    >>> expand("shards/{000..002}.tar", where="split.yaml")
    ['shards/000.tar', 'shards/001.tar', 'shards/002.tar']
    """
    if len(pattern) > _MAX_PATTERN_CHARACTERS:
        _refuse(pattern, f"has {len(pattern):,} characters; at most {_MAX_PATTERN_CHARACTERS:,} are read", where)
    choices: list[tuple[Sequence[object], str]] = []
    for escaped, inside, brace, text in _TOKEN.findall(pattern):
        if brace:
            _refuse(pattern, "has braces that do not match, or are nested too deep", where)
        choices.append(([escaped or text], "") if escaped or text else _choices(inside))
    n_names, most = math.prod(len(values) for values, _ in choices), max_characters // (len(pattern) + NAME_OVERHEAD)
    if n_names > most:
        _refuse(pattern, f"stands for {brief(n_names)} names; at most {most:,} are read", where)
    return list(map("".join, product(*([format(value, spec) for value in values] for values, spec in choices))))


def _choices(inside: str) -> tuple[Sequence[object], str]:
    """What braces around a text stand for, and how the values are formatted."""
    match = _RANGE.fullmatch(inside)
    if match is None:
        return (inside.split(",") if "," in inside else [f"{{{inside}}}"]), ""
    first, last, step = match.groups()
    start, stop, by = int(first), int(last), int(step or 1) or 1
    numbers = range(start, stop + 1, by) if start <= stop else range(start, stop - 1, -by)
    is_padded = any(end.lstrip("-").startswith("0") and end not in {"0", "-0"} for end in (first, last))
    return numbers, f"0{max(len(first), len(last))}d" if is_padded else "d"


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


def _refuse(pattern: str, rule: str, where: str) -> NoReturn:
    raise DocumentError(f"{brief(pattern)} {rule}", where=where, remedy="List the shards one by one.")


def parse_ratio(text: str) -> tuple[Fraction, ...]:
    """The shares of a split, exactly as written: `8,1,1` or `0.8,0.1,0.1`.

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
        raise ArgumentError(f"{brief(text)} gives no shard to any split: {rule}", where="split")
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
    runs, start = list[tuple[int, int]](), 0
    for count in counts:
        runs.append((start, start + count))
        start += count
    return runs
