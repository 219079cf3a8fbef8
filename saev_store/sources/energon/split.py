"""Splits: names in braces, and how shards are assigned to splits by ratio or by patterns. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from itertools import product
from typing import NoReturn

from saev_store.errors import ArgumentError, DocumentError, brief
from saev_store.problems import Problem
from saev_store.sources.energon.keys import SPLIT_YAML

SPLITS = ("train", "val", "test")

#: Limit of the characters of all names of a document.
MAX_EXPANDED_CHARACTERS = 64 << 20
#: Characters that are counted for each name besides its own.
NAME_OVERHEAD = 64
_MAX_PATTERN_CHARACTERS = 65_536
_TOKEN = re.compile(r"\\(.)|\{([^{}\\]*)\}|([{}])|([^{}\\]+|\\)", re.DOTALL)
_RANGE = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.-?(\d{1,18}))?", re.ASCII)
_NUMBER = re.compile(r"\d+", re.ASCII)
_SPECIAL = re.compile(r"[\\{}]")
_BRACES = re.compile(r"\{[^{}]*\.\.[^{}]*\}")


def expand(pattern: str, *, where: str, max_characters: int = MAX_EXPANDED_CHARACTERS) -> list[str]:
    r"""The names that a pattern in braces stands for, in order; they are counted before any is created.

    Braces contain ranges of numbers or alternatives: `{000..002}`, `{0..9..3}`, `{train,val}`. A `\` escapes the next
    character. Braces around anything else are kept.

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
    """The values that braces around a text stand for, and their format."""
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
    """Patterns that expand to `names`, in that order: consecutive numbers in one place become a range.

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
    """The end of the run of names from `start` that count up in one number, and which number that is."""
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
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
        raise ArgumentError(f"{brief(text)} is no split: {rule}", where="split")
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
    """Half-open runs of shards, one for each share: all shards, in order, as close to the shares as whole shards can be.

    Each share gets its quota rounded down; the remaining shards go to the largest remainders, earlier shares first.

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


class SplitPlan:
    """The splits that the caller of `prepare` asks for, by ratio or by patterns of paths.

    Args:
        split: Ratio of train, val and test, such as `"8,1,1"`.
        split_parts: Instead of a ratio: names and regular expressions, such as `"train:shards/train_.*"`.

    Raises:
        ArgumentError: both are given, or one is not written like that.
    """

    def __init__(self, split: str | None, split_parts: Sequence[str]) -> None:
        if split is not None and split_parts:
            raise ArgumentError("shares and patterns cannot both be given", where="split")
        self._shares = parse_ratio(split) if split is not None else None
        if self._shares is not None and len(self._shares) != len(SPLITS):
            raise ArgumentError(
                f"{brief(split)} has {len(self._shares)} shares; train, val and test need 3", where="split"
            )
        if isinstance(split_parts, str) or not isinstance(split_parts, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
            raise ArgumentError(f"{brief(split_parts)} is no list of patterns", where="split_parts")
        self._patterns: dict[str, list[re.Pattern[str]]] = {}
        for item in split_parts:
            name, colon, pattern = item.partition(":") if isinstance(item, str) else ("", "", "")  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
            if not name or not colon or not pattern:
                raise ArgumentError(f"{brief(item)} is not written 'train:shards/train_.*'", where="split_parts")
            patterns = expand(pattern, where="split_parts") if _BRACES.search(pattern) else [pattern]
            self._patterns.setdefault(name, []).extend(compiled(each, "split_parts") for each in patterns)

        self.is_empty = self._shares is None and not self._patterns

    def assign(self, counts: Mapping[str, int]) -> tuple[dict[str, tuple[str, ...]] | None, list[Problem]]:
        """The shards of each split, and warnings; shards without samples are in no split. None for an empty plan."""
        shards = [shard for shard, count in counts.items() if count]
        if self._shares is not None:
            runs = deal(len(shards), self._shares)
            return {name: tuple(shards[a:b]) for name, (a, b) in zip(SPLITS, runs, strict=True)}, []
        if not self._patterns:
            return None, []
        found = {
            name: tuple(shard for shard in shards if any(pattern.match(shard) for pattern in patterns))
            for name, patterns in self._patterns.items()
        }
        odd: list[tuple[str, str, str]] = []
        for shard in shards:
            names = [name for name, those in found.items() if shard in those]
            if len(names) != 1:
                message = f"it is in {' and '.join(names)}" if names else "it is in no split"
                odd.append(("split_overlap" if names else "in_no_split", message, shard))
        for name, those in found.items():
            if not those:
                odd.append(("empty_split", f"split {name!r} has no shards: no path matches", SPLIT_YAML))
        return found, [Problem(*facts, severity="warning") for facts in odd]


def compiled(pattern: str, where: str) -> re.Pattern[str]:
    """Compile a regular expression of the caller."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ArgumentError(f"{brief(pattern)} is no regular expression: {error}", where=where) from None
