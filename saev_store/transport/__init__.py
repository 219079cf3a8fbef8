"""Transports read and write bytes on disks, in memory and in object stores, behind one seam.

`open_transport` chooses the back end for an address. `LimitTransport` limits the rate of any of them.
"""

from __future__ import annotations

from saev_store.transport.base import (
    FREE,
    Awaits,
    Buffer,
    CleansUploads,
    CopiesWithin,
    Counters,
    Entry,
    Lists,
    Moves,
    ReadCost,
    Sink,
    Transport,
    UnfinishedUpload,
    Writes,
)
from saev_store.transport.limit import LimitTransport, Rate
from saev_store.transport.local.mapped import MmapTransport
from saev_store.transport.local.transport import LocalTransport, PreadTransport
from saev_store.transport.memory import MemoryTransport
from saev_store.transport.open import Engine, open_transport

__all__ = [
    "FREE",
    "Awaits",
    "Buffer",
    "CleansUploads",
    "CopiesWithin",
    "Counters",
    "Engine",
    "Entry",
    "LimitTransport",
    "Lists",
    "LocalTransport",
    "MemoryTransport",
    "MmapTransport",
    "Moves",
    "PreadTransport",
    "Rate",
    "ReadCost",
    "Sink",
    "Transport",
    "UnfinishedUpload",
    "Writes",
    "open_transport",
]
