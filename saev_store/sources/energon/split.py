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


def escape(name: str) -> str:
    r"""A pattern that stands for one name.

    >>> escape("a{1}.tar"), expand(escape("a{1}.tar"), where="")
    ('a\\{1\\}.tar', ['a{1}.tar'])
    """
    return _SPECIAL.sub(r"\\\g<0>", name)


def collapse(names: Sequence[str]) -> list[str]:
    """Patterns that expand to `names`, in that order: names whose last number counts up become a range.

    >>> collapse(["s/000.tar", "s/001.tar", "s/002.tar", "x.tar"])
    ['s/{000..002}.tar', 'x.tar']
    """
    runs: list[list[tuple[str, str, str]]] = []
    for name in names:
        match = _LAST_NUMBER.fullmatch(name)
        head, number, tail = match.group(1, 2, 3) if match else (name, "", "")
        before = runs[-1][-1] if runs else ("", "", "")
        is_next = number and before[1] and (before[0], before[2]) == (head, tail) and int(number) == int(before[1]) + 1
        if is_next and len(number) == len(before[1]):
            runs[-1].append((head, number, tail))
        else:
            runs.append([(head, number, tail)])
    patterns: list[str] = []
    for run in runs:
        head, number, tail = run[0]
        numbers = number if len(run) == 1 else f"{{{number}..{run[-1][1]}}}"
        patterns.append(escape(head) + numbers + escape(tail))
    return patterns


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


class SplitPlan:
    """The splits that the caller of `prepare` asks for, by ratio or by patterns of paths; neither is an empty plan.

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
        if isinstance(split_parts, str) or not isinstance(split_parts, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
            raise ArgumentError(f"{brief(split_parts)} is not a list of patterns", where="split_parts")
        self._patterns: dict[str, list[re.Pattern[str]]] = {}
        for item in split_parts:
            name, _, pattern = item.partition(":") if isinstance(item, str) else ("", "", "")  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not check types
            if not name or not pattern:
                raise ArgumentError(f"{brief(item)} is not written 'train:shards/train_.*'", where="split_parts")
            patterns = expand(pattern, where="split_parts") if _BRACES.search(pattern) else [pattern]
            self._patterns.setdefault(name, []).extend(compiled(each, "split_parts") for each in patterns)
        self.is_empty = self._shares is None and not self._patterns

    def assign(self, counts: Mapping[str, int]) -> tuple[dict[str, tuple[str, ...]], list[Problem]]:
        """The shards of each split, and warnings; shards without samples are in no split."""
        shards = [shard for shard, count in counts.items() if count]
        if self._shares is not None:
            runs = deal(len(shards), self._shares)
            return {name: tuple(shards[a:b]) for name, (a, b) in zip(SPLITS, runs, strict=True)}, []
        found = {
            name: tuple(shard for shard in shards if any(pattern.match(shard) for pattern in patterns))
            for name, patterns in self._patterns.items()
        }
        problems: list[Problem] = []
        for shard in shards:
            names = [name for name, chosen in found.items() if shard in chosen]
            if not names:
                problems.append(Problem("in_no_split", "it is in no split", shard, severity="warning"))
            elif len(names) > 1:
                problems.append(Problem("split_overlap", f"it is in {' and '.join(names)}", shard, severity="warning"))
        for name, chosen in found.items():
            if not chosen:
                message = f"split {name!r} has no shards: no path matches"
                problems.append(Problem("empty_split", message, SPLIT_YAML, severity="warning"))
        return found, problems


def compiled(pattern: str, where: str) -> re.Pattern[str]:
    """Compile a regular expression of the caller.

    Raises:
        ArgumentError: it is not one.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ArgumentError(f"{brief(pattern)} is not a regular expression: {error}", where=where) from None
