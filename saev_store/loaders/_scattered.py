"""Scattered rows from a disk, many at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from saev_store.core.layout import IntArray
from saev_store.loaders._advice import advice_for
from saev_store.loaders._batch_coordinates import Positions
from saev_store.loaders._medium import Medium
from saev_store.loaders._metrics import ReadTotals
from saev_store.loaders._reads import ArrayTarget, Reads
from saev_store.loaders._runs import runs_of_planes
from saev_store.store.reader import FloatArray
from saev_store.store.selection import Selection

#: What a task reads. A disk of this machine is told of 128 vectors at a time; a file system over a network may not listen to
#: that, so there each thread waits for one.
_TASK_BYTES = {"flash": 1 << 20, "disk": 1 << 20, "parallel": 256 << 10}


class ScatteredReads:
    """Reads scattered rows of a selection, each with a read of its own, without read-ahead.

    Args:
        rows: The selection.
        medium: What its shards lie on.
    """

    def __init__(self, rows: Selection, medium: Medium) -> None:
        self._space = rows.space
        self._advice = advice_for(medium.path, rows.space.layout, keep_pages=True)
        self._reads = Reads(
            rows.reader,
            ReadTotals(),
            threading.Event(),
            task_bytes=_TASK_BYTES.get(medium.kind, 1 << 20),
            advice=self._advice,
            waits=True,
        )

    def tasks(self, picked: IntArray, out: FloatArray) -> list[Callable[[], None]]:
        """Tasks that together fill `out` (n, d_model) with the rows `picked` (n,)."""
        where = Positions(*self._space.locate(picked))
        place = np.arange(len(picked), dtype=np.int64)
        runs = runs_of_planes(self._space.layout, where, np.ones_like(place), place)
        return [task for task, _ in self._reads.tasks(runs, ArrayTarget(out))]

    def close(self) -> None:
        """Take back what the system was told."""
        if self._advice is not None:
            self._advice.close()
