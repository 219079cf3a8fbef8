"""What can be wrong with an MMIDIDX data set beyond what opening it has checked."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from saev_store._runtime.progress import Progress
from saev_store.errors import SaevStoreError
from saev_store.problems import Problem
from saev_store.sources._digest import CHUNK_BYTES
from saev_store.sources.address import full_url
from saev_store.validation import Report

if TYPE_CHECKING:
    from saev_store.sources.mmididx.reader import IndexedDataset


def validate(dataset: IndexedDataset, *, deep: bool, progress: bool | None) -> Report:
    """What `IndexedDataset.validate` returns; a sequence counts as an example."""
    started = time.perf_counter()
    problems, checked = list(dataset.problems), 0
    transport, where = dataset.transport, full_url(dataset.transport, dataset.bin_path)
    for path, nbytes in dataset.sized_files():
        try:
            there = transport.size(path)
        except SaevStoreError as error:
            problems.append(Problem(error.kind, error.message, where=full_url(transport, path), lost=_all(dataset)))
            continue
        if there != nbytes:
            message = f"it had {nbytes:,} bytes when it was opened and has {there:,} now"
            problems.append(Problem("changed_size", message, where=full_url(transport, path), lost=_all(dataset)))
    if deep and not any(problem.severity == "error" for problem in problems):
        nbytes = dataset.index.bin_nbytes
        signed = dataset.dtype.kind == "i"
        lowest = 0
        with Progress(nbytes, "check", shown=progress) as bar:
            for start in range(0, nbytes, CHUNK_BYTES):
                (part,) = transport.get_ranges(
                    dataset.bin_path, starts=[start], ends=[min(start + CHUNK_BYTES, nbytes)]
                )
                if signed:
                    lowest = min(lowest, int(np.frombuffer(part, dataset.dtype).min()))
                else:
                    np.frombuffer(part, np.uint8).max()  # touches every page
                checked += len(part)
                bar.advance(len(part))
        if lowest < 0:
            message = f"there are negative token ids, down to {lowest}: no tokenizer gives those"
            problems.append(Problem("negative_token", message, where=where, severity="info"))
    return Report(
        dataset.url,
        len(dataset),
        1,
        tuple(problems),
        deep=deep,
        checked_bytes=checked,
        elapsed_s=time.perf_counter() - started,
    )


def _all(dataset: IndexedDataset) -> tuple[tuple[int, int], ...]:
    return ((0, len(dataset)),)
