"""Positions of samples in some shards, without excluded samples. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from saev_store.core.layout import IntArray


class SampleView:
    """The samples of some shards in order, without excluded ones, which are (shard, sample_index); a shard may occur twice."""

    def __init__(
        self, shard_ids: Sequence[int], counts: Sequence[int] | IntArray, left_out: Iterable[tuple[int, int]] = ()
    ) -> None:
        self.shard_ids = np.asarray(shard_ids, np.int64)
        self._ends = np.cumsum(np.asarray(counts, np.int64))
        self._slots: dict[int, list[int]] = {}
        for slot, shard in enumerate(self.shard_ids.tolist()):
            self._slots.setdefault(shard, []).append(slot)
        holes = [self._start(slot) + index for shard, index in left_out for slot in self._slots.get(shard, ())]
        self._holes = np.unique(np.asarray(holes, np.int64))
        self._before_hole = self._holes - np.arange(len(self._holes))

    def __len__(self) -> int:
        return (int(self._ends[-1]) if len(self._ends) else 0) - len(self._holes)

    def _start(self, slot: int) -> int:
        return int(self._ends[slot - 1]) if slot else 0

    def places(self, positions: Sequence[int] | IntArray) -> list[tuple[int, int]]:
        """(shard, sample_index) of valid positions."""
        wanted = np.asarray(positions, np.int64)
        raw = wanted + np.searchsorted(self._before_hole, wanted, side="right")
        slots = np.searchsorted(self._ends, raw, side="right")
        starts = np.concatenate(([0], self._ends))[slots]
        return list(zip(self.shard_ids[slots].tolist(), (raw - starts).tolist(), strict=True))

    def position(self, shard: int, sample_index: int) -> int | None:
        """The position of a sample; None if it is not in this view."""
        for slot in self._slots.get(shard, ()):
            raw = self._start(slot) + sample_index
            if raw >= self._ends[slot]:
                return None
            hole = int(np.searchsorted(self._holes, raw))
            if hole < len(self._holes) and self._holes[hole] == raw:
                return None
            return raw - hole
        return None

    def span(self, shard: int) -> tuple[int, int]:
        """Half-open range of positions of the samples of a shard that is in this view."""
        slot = self._slots[shard][0]
        before = [int(np.searchsorted(self._holes, raw)) for raw in (self._start(slot), int(self._ends[slot]))]
        return self._start(slot) - before[0], int(self._ends[slot]) - before[1]
