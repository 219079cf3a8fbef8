"""Validation of an LLMBATCH file beyond its header."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from saev_store._runtime.progress import Progress
from saev_store.errors import CorruptShardError, SaevStoreError
from saev_store.problems import Problem
from saev_store.sources._files import chunks
from saev_store.sources.llmbatch.header import HEADER_NBYTES
from saev_store.validation import Report

if TYPE_CHECKING:
    from saev_store.sources.llmbatch.reader import BatchFileReader


def validate(reader: BatchFileReader, *, deep: bool, progress: bool | None) -> Report:
    """Implement `BatchFileReader.validate`. A file of n batches counts as n times batch_size examples."""
    started = time.perf_counter()
    problems, checked, header = list(reader.problems), 0, reader.header
    try:
        now, _ = reader.read_header()
        if now != header:
            raise CorruptShardError(f"the header was {header} when the file was opened, and is {now}", where=reader.url)
        if deep:
            with Progress(header.file_nbytes, "check", shown=progress) as bar:
                problems += _check_padding(reader, bar)
            checked = header.file_nbytes
    except SaevStoreError as error:
        lost = ((0, len(reader)),) if len(reader) else ()
        problems.append(Problem(error.kind, error.message, where=reader.url, lost=lost))
    elapsed_s = time.perf_counter() - started
    return Report(reader.url, len(reader), 1, tuple(problems), deep, checked, elapsed_s)


def _check_padding(reader: BatchFileReader, bar: Progress) -> list[Problem]:
    """Read every byte, and report the first padding byte that is not zero."""
    header, problems, start = reader.header, list[Problem](), 0
    slot, raw_nbytes = header.padded_batch_nbytes, header.raw_batch_nbytes
    for part in chunks(reader.transport, reader.path, header.file_nbytes, start=HEADER_NBYTES):
        offsets = start + np.flatnonzero(np.frombuffer(part, np.uint8))
        odd = offsets[offsets % slot >= raw_nbytes]
        if len(odd) and not problems:
            message = f"padding of batch {int(odd[0]) // slot} is not zero, at byte {HEADER_NBYTES + int(odd[0]):,}"
            problems.append(Problem("padding_not_zero", message, where=reader.url, severity="warning"))
        start += len(part)
        bar.advance(len(part))
    return problems
