"""Where bytes come from and go to: one small seam, many back ends.

`open_transport` finds the right one for an address; wrappers add retries, counting or latency to any of them.
"""

from __future__ import annotations

from saev_store.transport._base import (
    FREE,
    Buffer,
    CleansUploads,
    CopiesWithin,
    Counters,
    Entry,
    LendsRuns,
    Lists,
    Moves,
    Nests,
    ReadCost,
    ReadsInto,
    ReadsRuns,
    Sink,
    Transport,
    UnfinishedUpload,
    Writes,
)
from saev_store.transport._counting import CountingTransport
from saev_store.transport._latency import LatencyTransport
from saev_store.transport._limit import LimitTransport, Rate
from saev_store.transport._local import MmapTransport, PreadTransport
from saev_store.transport._memory import MemoryTransport
from saev_store.transport._open import Engine, child, open_transport
from saev_store.transport._retry import RetryTransport

__all__ = [
    "FREE",
    "Buffer",
    "CleansUploads",
    "CopiesWithin",
    "Counters",
    "CountingTransport",
    "Engine",
    "Entry",
    "LatencyTransport",
    "LendsRuns",
    "LimitTransport",
    "Lists",
    "MemoryTransport",
    "MmapTransport",
    "Moves",
    "Nests",
    "PreadTransport",
    "Rate",
    "ReadCost",
    "ReadsInto",
    "ReadsRuns",
    "RetryTransport",
    "Sink",
    "Transport",
    "UnfinishedUpload",
    "Writes",
    "child",
    "open_transport",
]
