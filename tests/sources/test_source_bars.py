"""Bars of data sets: each counts up to its end, in its unit, and is shown as the caller says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from energon_tars import sample_files, tar_bytes

from saev_store.sources import convert
from saev_store.sources.energon import EnergonDataset, check
from saev_store.sources.energon import prepare as prepare_module
from saev_store.sources.llmbatch import BatchFileReader, write_batch_dataset, write_batch_file
from saev_store.sources.llmbatch import reader as batch_reader
from saev_store.sources.llmbatch import writer as batch_writer
from saev_store.sources.mmididx import IndexedDataset, IndexedDatasetBuilder, TokenSamples
from saev_store.sources.mmididx import reader as document_reader
from saev_store.sources.mmididx import writer as document_writer
from saev_store.transport import MemoryTransport

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

    for module in (batch_reader, batch_writer, document_reader, document_writer, convert, check, prepare_module):
        monkeypatch.setattr(module, "Progress", Counted)
    return made


def memory() -> MemoryTransport:
    """A data set of each format: five records of three tokens, documents of 4, 0 and 2 tokens."""
    transport = MemoryTransport()
    write_batch_file("x.batch", np.arange(15).reshape(5, 3), 2, transport=transport)
    with IndexedDatasetBuilder("x", np.uint16, transport=transport) as builder:
        for n in (4, 0, 2):
            builder.add_document(np.arange(n))
    return transport


def merged(transport: MemoryTransport, shown: bool | None) -> None:
    with IndexedDatasetBuilder("y", np.uint16, transport=transport) as builder:
        builder.merge(IndexedDataset("x", transport=transport), progress=shown)


@pytest.mark.parametrize("shown", [None, True, False])
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda m, p: write_batch_file("y.batch", np.zeros((5, 3), int), 2, transport=m, progress=p), [("writing", 3 * 4096, "bytes", 3 * 4096)]),
        (
            lambda m, p: write_batch_dataset("y.batch", np.zeros((5, 3), int), 5, 2, 3, transport=m, progress=p),
            [("collecting", 60, "bytes", 60), ("writing", 3 * 4096, "bytes", 3 * 4096)],
        ),
        (lambda m, p: BatchFileReader("x.batch", transport=m).validate(deep=True, progress=p), [("checking", 3 * 4096, "bytes", 3 * 4096)]),
        (lambda m, p: IndexedDataset("x", transport=m).validate(deep=True, progress=p), [("checking", 12, "bytes", 12)]),
        (lambda m, p: TokenSamples(IndexedDataset("x", transport=m), 2).validate(deep=True, progress=p), [("checking", 12, "bytes", 12)]),
        (merged, [("merging", 6, "tokens", 6)]),
        (
            lambda m, p: convert.samples_to_documents(BatchFileReader("x.batch", transport=m), "y", transport=m, progress=p),
            [("converting", 4, "samples", 4)],
        ),
        (
            lambda m, p: convert.documents_to_batches(IndexedDataset("x", transport=m), "y.batch", seq_len=2, batch_size=1, transport=m, progress=p),
            [("collecting", 24, "bytes", 24), ("writing", 4 * 4096, "bytes", 4 * 4096)],
        ),
    ],
)  # fmt: skip
def test_bars_of_token_sources(
    call: Callable[[MemoryTransport, bool | None], object], expected: list, shown: bool | None, bars: list[Bar]
):
    transport = memory()
    bars.clear()
    call(transport, shown)
    assert bars == [[what, total, unit, shown, n] for what, total, unit, n in expected]
    assert all(bar[3] is shown for bar in bars)


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
