"""The counting and the delaying transport of the tests, for benchmarks."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

from transports import CountingTransport, LatencyTransport  # found by the line above

__all__ = ["CountingTransport", "LatencyTransport"]
