"""Splits: names in braces, and the splits that a caller of `prepare` asks for. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import product
from typing import NoReturn

from saev_store.errors import ArgumentError, DocumentError, brief
from saev_store.problems import Problem
from saev_store.sources.energon.keys import SPLIT_YAML

SPLITS = ("train", "val", "test")
#: Limit of the characters of all names of a document; each name counts 64 more.
MAX_EXPANDED_CHARACTERS = 64 << 20
_MAX_PATTERN_CHARACTERS = 65_536
_TOKEN = re.compile(r"\\(.)|\{([^{}\\]*)\}|([{}])|([^{}\\]+|\\)", re.DOTALL)
_RANGE = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.-?(\d{1,18}))?", re.ASCII)
_LAST_NUMBER = re.compile(r"(.*?)(\d{1,18})(\D*)", re.ASCII | re.DOTALL)
_BRACES = re.compile(r"\{-?\d+\.\.", re.ASCII)
_SPECIAL = re.compile(r"[\\{}]")
_SHARE = re.compile(r"\d{1,9}(?:\.\d{0,9})?", re.ASCII)


def expand(pattern: str, *, where: str, max_characters: int = MAX_EXPANDED_CHARACTERS) -> list[str]:
    r"""The names that a pattern in braces stands for, in order; they are counted before any is made.

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
            _refuse(pattern, "has braces that do not match, or are nested", where)
        choices.append(([escaped or text], "") if escaped or text else _choices(inside))
    n_names, limit = math.prod(len(values) for values, _ in choices), max_characters // (len(pattern) + 64)
    if n_names > limit:
        _refuse(pattern, f"stands for {brief(n_names)} names; at most {limit:,} are read", where)
    return ["".join(each) for each in product(*([format(value, spec) for value in values] for values, spec in choices))]


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


def _refuse(pattern: str, rule: str, where: str) -> NoReturn:
    raise DocumentError(f"{brief(pattern)} {rule}", where=where, remedy="List the shards one by one.")


def collapse(names: Sequence[str]) -> list[str]:
    r"""Patterns that expand to `names`, in that order: names whose last number counts up become a range.

    >>> collapse(["s/000.tar", "s/001.tar", "s/002.tar", "x{1}.tar"])
    ['s/{000..002}.tar', 'x\\{1\\}.tar']
    """
    patterns: list[str] = []
    head, tail, first, last = "", "", "", ""
    for name in names:
        match = _LAST_NUMBER.fullmatch(name)
        is_next = match is not None and last and match.group(1, 3) == (head, tail)
        if match is not None and is_next and len(match[2]) == len(last) and int(match[2]) == int(last) + 1:
            last = match[2]
            patterns[-1] = f"{_escape(head)}{{{first}..{last}}}{_escape(tail)}"
        else:
            head, first, tail = match.group(1, 2, 3) if match else (name, "", "")
            last = first
            patterns.append(_escape(name))
    return patterns


def _escape(name: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", name)


def parse_ratio(text: str) -> tuple[Fraction, ...]:
    """The shares of train, val and test, exactly as written: `8,1,1` or `0.8,0.1,0.1`.

    >>> [str(share) for share in parse_ratio("0.8, 0.1, 0.1")]
    ['4/5', '1/10', '1/10']
    """
    parts = [part.strip() for part in text.split(",")] if isinstance(text, str) and len(text) < 256 else []  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
    if len(parts) != len(SPLITS) or not all(map(_SHARE.fullmatch, parts)) or not any(map(Fraction, parts)):
        raise ArgumentError(
            f"{brief(text)} is not a split: write '8,1,1' or '0.8,0.1,0.1', shares of train, val and test",
            where="split",
        )
    return tuple(map(Fraction, parts))


def deal(n_shards: int, shares: Sequence[Fraction]) -> list[tuple[int, int]]:
    """Half-open runs of shards, one for each share: all shards, in order, as close to the shares as whole shards can be.

    Each share gets its quota rounded down; the remaining shards go to the largest remainders, earlier shares first.

    >>> deal(10, parse_ratio("7,2,1")), deal(1, parse_ratio("0.8,0.1,0.1"))
    ([(0, 7), (7, 9), (9, 10)], [(0, 1), (1, 1), (1, 1)])
    """
    quotas = [n_shards * share / sum(shares) for share in shares]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: counts[i] - quotas[i])
    for i in by_remainder[: n_shards - sum(counts)]:
        counts[i] += 1
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [(end - count, end) for end, count in zip(ends, counts, strict=True)]


def parse_patterns(split_parts: Sequence[str]) -> dict[str, list[re.Pattern[str]]]:
    """The regular expressions of each split, from texts such as `"train:shards/train_.*"`; `{00..09}` in one is a range.

    Raises:
        ArgumentError: one is not written like that.
    """
    if isinstance(split_parts, str) or not isinstance(split_parts, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
        raise ArgumentError(f"{brief(split_parts)} is not a list of patterns", where="split_parts")
    found: dict[str, list[re.Pattern[str]]] = {}
    for item in split_parts:
        name, _, pattern = item.partition(":") if isinstance(item, str) else ("", "", "")  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
        if not name or not pattern:
            raise ArgumentError(f"{brief(item)} is not written 'train:shards/train_.*'", where="split_parts")
        patterns = expand(pattern, where="split_parts") if _BRACES.search(pattern) else [pattern]
        found.setdefault(name, []).extend(compiled(each, "split_parts") for each in patterns)
    return found


def compiled(pattern: str, where: str) -> re.Pattern[str]:
    """Compile a regular expression of the caller.

    Raises:
        ArgumentError: it is not one.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ArgumentError(f"{brief(pattern)} is not a regular expression: {error}", where=where) from None


def match_patterns(
    shards: Sequence[str], patterns: Mapping[str, Sequence[re.Pattern[str]]]
) -> tuple[dict[str, list[str]], list[Problem]]:
    """The shards whose path begins with a pattern of each split, and warnings."""
    splits: dict[str, list[str]] = {name: [] for name in patterns}
    problems: list[Problem] = []
    for shard in shards:
        names = [name for name, each in patterns.items() if any(pattern.match(shard) for pattern in each)]
        for name in names:
            splits[name].append(shard)
        if len(names) != 1:
            kind = "split_overlap" if names else "in_no_split"
            message = f"it is in {' and '.join(names) or 'no split'}"
            problems.append(Problem(kind, message, shard, severity="warning"))
    for name in (name for name, chosen in splits.items() if not chosen):
        message = f"split {name!r} has no shards: no path matches"
        problems.append(Problem("empty_split", message, SPLIT_YAML, severity="warning"))
    return splits, problems
