"""How long a test waits before it calls something a hang."""

from __future__ import annotations

#: Longer than anything takes on a slow machine that does other things too, shorter than pytest's own limit.
HANG_S = 240
