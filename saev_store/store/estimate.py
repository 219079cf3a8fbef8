"""Requests and bytes of a read, before it is done: the plan that the read would execute is counted."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from saev_store.core.coalesce import coalesce
from saev_store.core.plan import MappedBox, PlanPart, Runs
from saev_store.store.reader import Reader


@dataclass(frozen=True, slots=True)
class Estimate:
    """The cost of a read; `str()` is one sentence.

    Attributes:
        requests: Requests to the server; parts of a shard that is mapped. What a client tries again by itself is extra.
        bytes_read: Bytes that travel: what is wanted, and the gaps that are cheaper to read than to leave out.
        bytes_wanted: Bytes of the result.
    """

    requests: int
    bytes_read: int
    bytes_wanted: int

    def __str__(self) -> str:
        return f"{self.requests:,} requests, {self.bytes_read / 1e6:,.3f} MB for {self.bytes_wanted / 1e6:,.3f} MB"


def count_plan(reader: Reader, plan: Iterable[PlanPart], bytes_wanted: int) -> Estimate:
    """The requests and bytes of a plan."""
    cost, v = reader.transport.cost, reader.layout.vector_nbytes
    most = int(min(cost.max_request_bytes, 1 << 62))
    requests = bytes_read = 0
    sized = set[int]()
    reader.check_large(bytes_wanted // v)
    for part in plan:
        for step in part.steps:
            shard_idx = step.shard_idx
            if not reader.is_unchecked(shard_idx):
                reader.check(shard_idx, step.highest)  # so that a plan of what is lost ends
            elif shard_idx not in sized:
                sized.add(shard_idx)
                requests += 1
            if isinstance(step, Runs) and not math.isinf(cost.max_gap_bytes):
                starts = np.sort(step.first) * v
                spans = coalesce(
                    starts, starts + step.n_vectors * v,
                    max_gap_bytes=cost.max_gap_bytes, max_request_bytes=cost.max_request_bytes,
                )  # fmt: skip
                lengths = spans.ends - spans.starts
                requests += int((-(-lengths // most)).sum())
                bytes_read += int(lengths.sum())
            else:  # of a map
                requests += 1
                is_box = isinstance(step, MappedBox)
                bytes_read += v * (math.prod(map(len, step.axes[:3])) if is_box else len(step.first) * step.n_vectors)
    return Estimate(requests, bytes_read, bytes_wanted)
