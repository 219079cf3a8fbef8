"""Waits for services that do not come back, shortened."""

from __future__ import annotations

import pytest

from saev_store.transport import _remote


@pytest.fixture
def few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy service is asked again for a second only."""
    monkeypatch.setattr(_remote, "RETRY_S", 1.0)


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer of which nothing comes any more is given up soon."""
    monkeypatch.setattr(_remote, "READ_TIMEOUT_S", 1.5)
