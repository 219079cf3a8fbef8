"""A clock for requests that are tried again: its waits take no time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from saev_store.transport import _remote


class Clock:
    """Records the waits of `again`, and adds them to the time that it sees.

    Attributes:
        waits_s: All waits so far.
        after: Called in the wait of that number, counted from 1.
    """

    def __init__(self) -> None:
        self.waits_s: list[float] = []
        self.after: dict[int, Callable[[], object]] = {}

    async def sleep(self, wait_s: float) -> None:
        """Let others go on, without taking time."""
        await asyncio.sleep(0)
        self.waits_s.append(wait_s)
        self.after.get(len(self.waits_s), bool)()

    def now_s(self) -> float:
        """Seconds since the beginning."""
        return sum(self.waits_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Waits between tries take no time, and time passes by them alone."""
    found = Clock()
    monkeypatch.setattr(_remote, "_sleep", found.sleep)
    monkeypatch.setattr(_remote, "_now_s", found.now_s)
    return found


@pytest.fixture
def few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not pass is tried again for a short time only."""
    monkeypatch.setattr(_remote, "RETRY_S", 0.5)
