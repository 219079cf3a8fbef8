"""Requests and bytes of a read, before it is done: the plan that the read would execute is counted."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from saev_store.core.plan import Part, Runs
from saev_store.store.reader import Reader


@dataclass(frozen=True, slots=True)
class Estimate:
    """The cost of a read; `str()` is one sentence.

    Attributes:
        requests: Requests to the server; system calls and maps locally. What a client tries again by itself is extra.
        bytes_read: Bytes that travel: what is wanted, and the gaps that are cheaper to read than to leave out.
        bytes_wanted: Bytes of the result.

    >>> print(Estimate(requests=2, bytes_read=3_000_000, bytes_wanted=1_000_000))
    2 requests, 3.000 MB for 1.000 MB
    """

    requests: int
    bytes_read: int
    bytes_wanted: int

    def __str__(self) -> str:
        text = f"{self.requests:,} requests, {self.bytes_read / 1e6:,.3f} MB"
        return text if self.bytes_read <= self.bytes_wanted else f"{text} for {self.bytes_wanted / 1e6:,.3f} MB"


def count_plan(reader: Reader, plan: Iterable[Part], bytes_wanted: int) -> Estimate:
    """The requests and bytes of a plan. The size of a shard is requested once, and a shard is mapped once."""
    cost, layout = reader.transport.cost, reader.layout
    most = int(min(cost.max_request_bytes, 1 << 62))
    requests = bytes_read = 0
    sized, mapped = set[int](), set[int]()
    for part in plan:
        for step in part.steps:
            shard_idx = step.shard_idx
            if shard_idx not in sized and reader.is_unchecked(shard_idx):
                sized.add(shard_idx)
                requests += 1
            if isinstance(step, Runs) and not math.isinf(cost.max_gap_bytes):
                spans = step.spans(layout, cost)
                lengths = spans.ends - spans.starts
                requests += int((-(-lengths // most)).sum())
                bytes_read += int(lengths.sum())
            elif isinstance(step, Runs):  # a shard that could be mapped is read in runs as they are
                requests += len(step.first)
                bytes_read += len(step.first) * step.n_vectors * layout.vector_nbytes
            elif shard_idx not in mapped and (nbytes := reader.unmapped_nbytes(shard_idx)):
                mapped.add(shard_idx)
                requests += 1
                bytes_read += nbytes
    return Estimate(requests, bytes_read, bytes_wanted)
