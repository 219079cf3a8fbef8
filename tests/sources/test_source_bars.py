"""Bars of data sets: each counts up to its end, in its unit, and is shown as the caller says."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import pytest
from api import MemoryTransport
from energon_tars import sample_files, tar_bytes

from saev_store.sources.energon import EnergonDataset, check
from saev_store.sources.energon import prepare as prepare_module

#: (what, total, unit, shown, sum of the steps)
Bar = list[Any]


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    made: list[Bar] = []

    class Counted:
        def __init__(self, total: int, what: str, *, shown: bool | None = None, unit: str = "bytes") -> None:
            self.bar: Bar = [what, total, unit, shown, 0]
            made.append(self.bar)

        def advance(self, n: int) -> None:
            self.bar[-1] += n

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    for module in (check, prepare_module):
        monkeypatch.setattr(module, "Progress", Counted)
    return made


@pytest.mark.parametrize("shown", [None, True, False])
def test_bars_of_energon_data_sets(shown: bool | None, bars: list[Bar], tmp_path: Path):
    tars = {f"{name}.tar": tar_bytes(sample_files(10 * n, n + 1)) for n, name in enumerate("abc")}
    transport, nbytes = MemoryTransport(tars), sum(map(len, tars.values()))
    prepare_module.prepare("", transport=transport, split="1,1,1", progress=shown)
    assert bars == [["indexing", nbytes, "bytes", shown, nbytes]]
    bars.clear()
    dataset = EnergonDataset("", transport=transport)
    dataset.validate(deep=True, progress=shown)
    dataset.split("val").validate(progress=shown)
    assert bars == [["checking", 3, "tars", shown, 3], ["checking", 1, "tars", shown, 1]]
