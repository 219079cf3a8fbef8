"""The quick checks: names, sizes and the folder's name. Lists the folder and opens no file."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from saev_store._runtime.threads import ahead
from saev_store.core.layout import Layout, shard_name
from saev_store.core.token_arrays import LABELS, TokenArray
from saev_store.documents import Metadata, ShardsIndex, match_hash, rewriting
from saev_store.errors import NotFoundError, SaevStoreError
from saev_store.problems import Problem, Severity
from saev_store.transport import Transport

#: Concurrent size requests where the transport cannot list.
_N_THREADS = 16
_NOT_THERE = ("missing", "it is not there; was it purged, or not copied?")
_NO_FILE = (-1, 0)


@dataclass(frozen=True, slots=True)
class Survey:
    """Names in a store's folder.

    Attributes:
        files: Size in bytes of each readable file, and the time (ns since 1970) of its last change, 0 if it is not on this
            machine; by name.
        others: For other names: missing, not_a_file or unreadable, and an explanation.
    """

    files: Mapping[str, tuple[int, int]]
    others: Mapping[str, tuple[str, str]]


def survey(transport: Transport, names: Sequence[str]) -> Survey:
    """Survey a folder: a stat for each name locally, else one listing, and a request for each size that it does not have."""
    if transport.local_path is not None and os.path.isdir(transport.local_path):
        return _look(transport.local_path, names)
    sizes: dict[str, int | None] = dict.fromkeys(names)
    others: dict[str, tuple[str, str]] = {}
    with contextlib.suppress(SaevStoreError):  # a bucket may allow reading without listing
        entries = transport.list()
        if not sizes.keys().isdisjoint(entry.name for entry in entries):
            sizes = {entry.name: entry.size for entry in entries if not entry.is_dir}
            others = {entry.name: ("not_a_file", "it is a folder") for entry in entries if entry.is_dir}
    unknown = [name for name, size in sizes.items() if size is None]
    files = {name: (size, 0) for name, size in sizes.items() if size is not None}
    for name, found in zip(unknown, ahead(partial(_ask, transport), unknown, _N_THREADS), strict=True):
        if isinstance(found, int):
            files[name] = found, 0
        elif found is not None:
            others[name] = found
    return Survey(files, others)


def _look(folder: str, names: Sequence[str]) -> Survey:
    """Survey of files of this machine, in the order of their names, which is the fastest."""
    files: dict[str, tuple[int, int]] = {}
    others: dict[str, tuple[str, str]] = {}
    for name in names:
        path = f"{folder}/{name}"
        try:
            status = os.stat(path)
        except FileNotFoundError:
            if os.path.islink(path):
                others[name] = "missing", "it is a broken link"
        except OSError as error:
            others[name] = "unreadable", f"its status cannot be read ({error.strerror})"
        else:
            if stat.S_ISREG(status.st_mode):
                files[name] = status.st_size, status.st_mtime_ns
            else:
                others[name] = "not_a_file", "it is a folder, or another thing that is not a regular file"
    return Survey(files, others)


def _ask(transport: Transport, name: str) -> int | tuple[str, str] | None:
    try:
        return transport.size(name)
    except NotFoundError:
        return None
    except SaevStoreError as error:
        return "unreadable", error.message


def quick_checks(
    transport: Transport, metadata: Metadata, index: ShardsIndex, *, dirname: str | None = None
) -> list[Problem]:
    """All problems that names and sizes show, including those of the documents; `dirname` is compared with the content hash."""
    return check_survey(survey_store(transport, metadata, index), metadata, index, dirname=dirname)


def survey_store(transport: Transport, metadata: Metadata, index: ShardsIndex) -> Survey:
    """Survey of the listed shards and the token arrays."""
    arrays = [array.file_name for array in metadata.recordable]
    return survey(transport, [*index.names, *arrays])


def check_survey(seen: Survey, metadata: Metadata, index: ShardsIndex, *, dirname: str | None) -> list[Problem]:
    """`quick_checks` on an existing survey."""
    layout = metadata.layout
    problems = [*metadata.problems, *check_dirname(metadata, dirname)]
    for shard_idx, name in enumerate(index.names):
        size, _ = seen.files.get(name, _NO_FILE)
        # Nearly all shards are full: only the others are worth a closer look.
        if size != layout.shard_nbytes and (problem := _check_shard(layout, shard_idx, size, seen)) is not None:
            problems.append(problem)
    for array in metadata.recordable:
        problems += _check_token_array(layout, array, seen, is_declared=metadata.declares_token_arrays)
    return problems


def check_dirname(metadata: Metadata, dirname: str | None) -> Iterator[Problem]:
    """A warning if no recipe of any version makes the folder's name from its document."""
    if dirname is None or match_hash(metadata, dirname) is not None:
        return
    message = (
        f"the folder is named {dirname!r}, but no recipe makes that name from metadata.json; the one of its version gives "
        f"{metadata.hash}. The metadata was changed, or the folder renamed: check that it describes this store"
    )
    yield Problem("hash_mismatch", message, where="metadata.json", severity="warning")


def _check_shard(layout: Layout, shard_idx: int, size: int, seen: Survey) -> Problem | None:
    """The problem of a shard by its size, which is negative if it is not a readable file."""
    name = shard_name(shard_idx)
    start, end = layout.example_range(shard_idx)
    lost = ((start, end),) if start < end else ()
    severity: Severity = "error" if lost else "warning"  # a trailing shard without examples costs nothing
    used, full, row = layout.used_nbytes(shard_idx), layout.shard_nbytes, layout.example_nbytes
    if size < 0:
        state, why = seen.others.get(name, _NOT_THERE)
        if state == "missing" and not lost:
            return None
        kind, message = state if state == "not_a_file" else f"{state}_shard", f"cannot be read: {why}"
    elif size < used:
        kind, kept = "short_shard", size // row
        message, lost = f"has {size:,} bytes, but its examples take {used:,}", ((start + kept, end),)
    elif size >= full + row:
        kind = "oversized_shard"
        message = (
            f"has {size:,} bytes, but a full shard is {full:,} ({layout.examples_per_shard} examples); it was written with "
            "another capacity than metadata.json implies, so its vectors may belong to other examples"
        )
    elif (size - used) % row:
        kind, severity, lost = "trailing_bytes", "warning", ()
        message = f"has {size:,} bytes; those after its examples are not whole rows of {row:,} bytes. All vectors are in place"
    else:
        return None
    return Problem(kind, f"{name} {message}", where=name, severity=severity, lost=lost)


def _check_token_array(layout: Layout, array: TokenArray, seen: Survey, *, is_declared: bool) -> Iterator[Problem]:
    name = array.file_name
    if name not in seen.files and name not in seen.others and not is_declared:
        return  # labels of older stores are optional
    what, expected = token_array_kind(array), array.nbytes(layout)
    size, _ = seen.files.get(name, _NO_FILE)
    if size == expected:
        return
    state, why = seen.others.get(name, _NOT_THERE)
    kind = f"{what}_size" if size >= 0 else f"missing_{what}" if state == "missing" else f"unreadable_{what}"
    message = f"has {size:,} bytes; they must be {expected:,}" if size >= 0 else f"cannot be read: {why}"
    yield Problem(kind, f"{name} {message}. {token_array_remedy(array)}", where=name)


def token_array_remedy(array: TokenArray) -> str:
    """Advice on a token array that is lost, for messages."""
    return f"Vectors are readable, {array.name} are not. Copy the file again, or {rewriting(array.name)}"


def token_array_kind(array: TokenArray) -> str:
    """The word for a token array in kinds of problems."""
    return "labels" if array == LABELS else "token_array"
