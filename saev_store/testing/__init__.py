"""Tests to run against your own code: what a transport has to do. Needs pytest."""

from __future__ import annotations

import pytest

# A failed assertion in a shipped contract should show its values, as in a test of one's own.
pytest.register_assert_rewrite("saev_store.testing.transport", "saev_store.testing._reading")
