"""Tests for implementations of transports. Needs pytest."""

from __future__ import annotations

import pytest

# Failed assertions in these modules show their values, as in the tests of the user.
pytest.register_assert_rewrite("saev_store.testing.transport", "saev_store.testing._reading")
