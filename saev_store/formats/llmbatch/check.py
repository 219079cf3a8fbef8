"""What can be wrong with LLMBATCH files beyond their headers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from saev_store.errors import CorruptShardError, NotFoundError, SaevStoreError
from saev_store.formats._address import full_url
from saev_store.formats._digest import CHUNK_BYTES, digest_files
from saev_store.formats._source import DigestScope
from saev_store.formats.llmbatch._files import read_header, read_manifest
from saev_store.formats.llmbatch.header import HEADER_NBYTES, Header
from saev_store.formats.llmbatch.manifest import SUFFIX, Manifest
from saev_store.inspect import Report
from saev_store.problems import Problem
from saev_store.writer._progress import Progress

if TYPE_CHECKING:
    from saev_store.formats.llmbatch.reader import BatchFileReader


def check_digest(reader: BatchFileReader, manifest: Manifest, *, scope: DigestScope) -> None:
    """Compare files with the digests of their manifest.

    Raises:
        CorruptShardError: a file is not the one that the manifest was written for.
    """
    files = reader.sized_files()
    for file_idx, entry in enumerate(manifest.files):
        there = files[file_idx] if file_idx < len(files) else None
        if there is None or there[1] != manifest.header(file_idx).file_nbytes:
            found = "missing"
        else:
            found = digest_files(reader.transport, [there], scope=scope)
        if found != (entry.sampled if scope == "sampled" else entry.full):
            raise CorruptShardError(
                f"the manifest beside it was written for another file ({scope} digest {found})",
                where=reader.url,
                remedy="Restore the file, or delete the manifest: records by place do not need it.",
            )


def validate(reader: BatchFileReader, *, deep: bool, progress: bool | None) -> Report:
    """What `BatchFileReader.validate` returns. A file of n batches counts as n times batch_size examples."""
    started = time.perf_counter()
    problems, checked = list(reader.problems), 0
    manifest = _manifest(reader, problems)
    files = reader.sized_files()
    with Progress(sum(nbytes for _, nbytes in files) if deep else 0, "check", shown=progress if deep else False) as bar:
        first = 0
        for file_idx, (name, _) in enumerate(files):
            where, promised = full_url(reader.transport, name), None
            if manifest is not None and file_idx < len(manifest.files):
                promised = manifest.header(file_idx)
            try:
                header, _ = read_header(reader.transport, name)
                if promised is not None and header != promised:
                    problems.append(
                        Problem(
                            "manifest_mismatch", f"the header is {header}, the manifest says {promised}", where=where
                        )
                    )
                if deep:
                    full = _read_all(reader, name, header, where, problems, bar)
                    checked += header.file_nbytes
                    if manifest is not None and promised is not None and full != manifest.files[file_idx].full:
                        message = f"its digest is {full}, the manifest says {manifest.files[file_idx].full}"
                        problems.append(
                            Problem("digest_mismatch", message, where=where, lost=_span(reader, promised, first))
                        )
            except SaevStoreError as error:
                lost = _span(reader, promised, first) if promised is not None else ()
                problems.append(Problem(error.kind, error.message, where=where, lost=lost))
            first += promised.num_records if promised is not None else 0
    return Report(
        reader.url,
        len(reader),
        len(files),
        tuple(problems),
        deep=deep,
        checked_bytes=checked,
        elapsed_s=time.perf_counter() - started,
    )


def _span(reader: BatchFileReader, header: Header, first: int) -> tuple[tuple[int, int], ...]:
    return ((first, min(first + header.num_records, len(reader))),)


def _manifest(reader: BatchFileReader, problems: list[Problem]) -> Manifest | None:
    path = reader.path if reader.path.endswith(SUFFIX) else reader.path + SUFFIX
    try:
        return read_manifest(reader.transport, path)
    except NotFoundError:
        return None
    except SaevStoreError as error:
        problems.append(Problem("bad_manifest", error.message, where=error.where or path, severity="warning"))
        return None


def _read_all(
    reader: BatchFileReader, name: str, header: Header, where: str, problems: list[Problem], bar: Progress
) -> str:
    """Look at every byte of a file: its full digest, and a finding for the first padding that is not zero."""
    hasher = xxhash.xxh3_128(header.file_nbytes.to_bytes(8, "little"))
    (raw,) = reader.transport.get_ranges(name, starts=[0], ends=[HEADER_NBYTES])
    hasher.update(raw)
    slot, raw_nbytes = header.padded_batch_nbytes, header.raw_batch_nbytes
    told = slot == raw_nbytes
    for start in range(HEADER_NBYTES, header.file_nbytes, CHUNK_BYTES):
        end = min(start + CHUNK_BYTES, header.file_nbytes)
        (part,) = reader.transport.get_ranges(name, starts=[start], ends=[end])
        hasher.update(part)
        bar.advance(len(part))
        if told:
            continue
        odd = np.flatnonzero(np.frombuffer(part, np.uint8))
        offset = start - HEADER_NBYTES + odd
        odd = offset[offset % slot >= raw_nbytes]
        if len(odd):
            message = f"padding of batch {int(odd[0]) // slot} is not zero, at byte {HEADER_NBYTES + int(odd[0]):,}"
            problems.append(Problem("padding_not_zero", message, where=where, severity="warning"))
            told = True
    return hasher.hexdigest()
