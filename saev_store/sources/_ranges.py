"""Whether a file is memory, or has to be fetched."""

from __future__ import annotations

import math

from saev_store.transport import Transport


def is_resident(transport: Transport) -> bool:
    """Whether ranges are views of memory: a whole file is one array, and nothing is fetched."""
    return math.isinf(transport.cost.max_gap_bytes) and math.isinf(transport.cost.max_request_bytes)
