"""How `prepare` deals shards out to splits: by shares, or by patterns of their paths."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from saev_store.errors import ArgumentError, brief
from saev_store.problems import Problem
from saev_store.sources.energon.keys import SPLIT_YAML
from saev_store.sources.energon.split import deal, expand, parse_ratio

SPLITS = ("train", "val", "test")
_RANGE = re.compile(r"\{[^{}]*\.\.[^{}]*\}")


class SplitPlan:
    """The splits that the caller of `prepare` asks for."""

    def __init__(self, split: str | None, split_parts: Sequence[str]) -> None:
        if split is not None and split_parts:
            raise ArgumentError("shares and patterns cannot both be given", where="split")
        self._shares = parse_ratio(split) if split is not None else None
        if self._shares is not None and len(self._shares) != len(SPLITS):
            raise ArgumentError(
                f"{brief(split)} has {len(self._shares)} shares; train, val and test need 3", where="split"
            )
        self._patterns: dict[str, list[re.Pattern[str]]] = {}
        for item in split_parts:
            name, colon, pattern = item.partition(":")
            if not name or not colon or not pattern:
                raise ArgumentError(f"{brief(item)} is not written 'train:shards/train_.*'", where="split_parts")
            patterns = expand(pattern, where="split_parts") if _RANGE.search(pattern) else [pattern]
            self._patterns.setdefault(name, []).extend(compiled(each, "split_parts") for each in patterns)

    @property
    def is_empty(self) -> bool:
        """Whether a `split.yaml` that is there stays."""
        return self._shares is None and not self._patterns

    def deal(self, counts: Mapping[str, int]) -> tuple[dict[str, tuple[str, ...]] | None, list[Problem]]:
        """The shards of each split; those without samples go to none."""
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
        problems: list[Problem] = []

        def add(kind: str, message: str, where: str) -> None:
            problems.append(Problem(kind, message, where, severity="warning"))

        for shard in shards:
            names = [name for name, those in found.items() if shard in those]
            if len(names) != 1:
                message = f"it is in {' and '.join(names)}" if names else "it is in no split"
                add("split_overlap" if names else "in_no_split", message, shard)
        for name, those in found.items():
            if not those:
                add("empty_split", f"split {name!r} has no shards: no path matches", SPLIT_YAML)
        return found, problems


def compiled(pattern: str, where: str) -> re.Pattern[str]:
    """Compile a regular expression of the caller."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ArgumentError(f"{brief(pattern)} is no regular expression: {error}", where=where) from None
