"""How long a test waits before it calls something a hang."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Longer than anything takes on a slow machine that does other things too, shorter than pytest's own limit.
HANG_S = 240


def soon(is_so: Callable[[], bool]) -> bool:
    """Whether something comes to be so, which may take a while on a slow machine."""
    deadline = time.monotonic() + HANG_S
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.005)
    return is_so()
