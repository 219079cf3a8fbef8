"""Real processes, real SIGKILLs: see `kill_sources.py`, which can be run for longer."""

from __future__ import annotations

from pathlib import Path

import pytest
from kill_children import harness_result


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("where", "n_kills"), [("memory", 100), ("disk", 10)])
def test_no_kill_shows_a_reader_half_a_data_set(tmp_path: Path, where: str, n_kills: int) -> None:
    met = harness_result("kill_sources.py", where, n_kills, tmp_path=tmp_path, limit_s=300)
    assert min(met["kills"].values()) * 5 >= met["n_asked"]
    if where == "memory":  # kills that always met the same moment would show nothing
        assert set().union(*met["found"].values()) == {"None", "0", "1"}
