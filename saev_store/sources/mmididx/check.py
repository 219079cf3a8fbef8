"""Validation of an MMIDIDX data set beyond what opening it has checked."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from saev_store._runtime.progress import Progress
from saev_store.errors import SaevStoreError
from saev_store.problems import Problem
from saev_store.sources._files import chunks
from saev_store.sources.address import full_url
from saev_store.validation import Report

if TYPE_CHECKING:
    from saev_store.sources.mmididx.reader import IndexedDataset


def validate(dataset: IndexedDataset, *, deep: bool, progress: bool | None) -> Report:
    """Implement `IndexedDataset.validate`; a sequence counts as an example."""
    started = time.perf_counter()
    problems, checked = list(dataset.problems), 0
    lost = ((0, len(dataset)),)
    transport, where = dataset.transport, full_url(dataset.transport, dataset.bin_path)
    for path, nbytes in dataset.sized_files():
        try:
            there = transport.size(path)
        except SaevStoreError as error:
            problems.append(Problem(error.kind, error.message, where=full_url(transport, path), lost=lost))
            continue
        if there != nbytes:
            message = f"it had {nbytes:,} bytes when it was opened and has {there:,} now"
            problems.append(Problem("changed_size", message, where=full_url(transport, path), lost=lost))
    if deep and not any(problem.severity == "error" for problem in problems):
        lowest = 0
        with Progress(dataset.index.bin_nbytes, "check", shown=progress) as bar:
            for part in chunks(transport, dataset.bin_path, dataset.index.bin_nbytes):
                least = np.frombuffer(part, dataset.dtype).min()  # reads every page of a map
                lowest = min(lowest, int(least) if dataset.dtype.kind == "i" else 0)
                checked += len(part)
                bar.advance(len(part))
        if lowest < 0:
            message = f"there are negative token ids, down to {lowest}: no tokenizer gives those"
            problems.append(Problem("negative_token", message, where=where, severity="info"))
    elapsed_s = time.perf_counter() - started
    return Report(dataset.url, len(dataset), 1, tuple(problems), deep, checked, elapsed_s)
