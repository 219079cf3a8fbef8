"""The quick checks: names, sizes and the folder's name. Lists the folder and opens no file."""

from __future__ import annotations

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
_EUID = os.geteuid() if hasattr(os, "geteuid") else -1  # Windows has no users by number
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
    """Survey a folder with as few requests as the transport allows.

    A stat for each name locally, one listing where there is one, otherwise one size request for each of `names`, in parallel.

    Raises:
        SaevStoreError: the folder cannot be accessed.
    """
    if transport.local_path is not None and os.path.isdir(transport.local_path):
        return _look(transport.local_path, names)
    sizes: dict[str, int | None] = dict.fromkeys(names)
    others: dict[str, tuple[str, str]] = {}
    try:
        entries = transport.list()
    except SaevStoreError:
        pass  # a bucket may allow reading without listing
    else:
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
            mode = status.st_mode
            if not stat.S_ISREG(mode):
                others[name] = "not_a_file", "it is a folder, or another thing that is not a regular file"
            # Files are usually ours and readable: this saves one system call per shard.
            elif (mode & stat.S_IRUSR and status.st_uid == _EUID) or os.access(path, os.R_OK):
                files[name] = status.st_size, status.st_mtime_ns
            else:
                others[name] = "unreadable", "its permissions do not allow reading it"
    return Survey(files, others)


def _ask(transport: Transport, name: str) -> int | tuple[str, str] | None:
    try:
        return transport.size(name)
    except NotFoundError:
        return None
    except SaevStoreError as error:
        return "unreadable", error.message


# -- checks ------------------------------------------------------------------------------------------------------------


def quick_checks(
    transport: Transport, metadata: Metadata, index: ShardsIndex, *, dirname: str | None = None
) -> list[Problem]:
    """All problems that names and sizes show, including those of the documents.

    One stat for each file locally, one listing remotely: 1,000 shards take a few milliseconds on a local disk.

    Args:
        transport: Rooted at the store's folder.
        metadata: The parsed `metadata.json`.
        index: The parsed `shards.json`.
        dirname: The folder's name, compared with the content hash; None skips this check.

    Returns:
        Errors, warnings and infos, in the order of the documents, then of the shards. A shard's acceptable sizes are
        exactly its used bytes (cut), the full capacity (padded), or whole examples in between; any other size is a
        problem with the examples that it makes unreadable.
    """
    return check_survey(survey_store(transport, metadata, index), metadata, index, dirname=dirname)


def survey_store(transport: Transport, metadata: Metadata, index: ShardsIndex) -> Survey:
    """Survey of the listed shards, the token arrays, and the shard behind the last one."""
    arrays = [array.file_name for array in metadata.recordable]
    return survey(transport, [*index.names, *arrays, shard_name(index.n_listed)])


def check_survey(seen: Survey, metadata: Metadata, index: ShardsIndex, *, dirname: str | None) -> list[Problem]:
    """`quick_checks` on an existing survey. Pure."""
    layout = metadata.layout
    problems = [*metadata.problems, *check_dirname(metadata, dirname)]
    for shard_idx, name in enumerate(index.names):
        size, _ = seen.files.get(name, _NO_FILE)
        # Nearly all shards are full: only the others are worth a closer look.
        if size != layout.shard_nbytes and (problem := _check_shard(layout, shard_idx, size, seen)) is not None:
            problems.append(problem)
    for array in metadata.recordable:
        problems += _check_token_array(layout, array, seen, is_declared=metadata.declares_token_arrays)
    if (unlisted := shard_name(index.n_listed)) in seen.files:
        message = f"{unlisted} is there, but shards.json lists only {index.n_listed} shards; it is not read"
        problems.append(Problem("unlisted_shard", message, where=unlisted, severity="warning"))
    return problems


def check_dirname(metadata: Metadata, dirname: str | None) -> Iterator[Problem]:
    """A warning if no recipe of any version makes the folder's name from its document."""
    if dirname is None or match_hash(metadata, dirname) is not None:
        return
    yield Problem(
        "hash_mismatch",
        f"the folder is named {dirname!r}, but no recipe makes that name from metadata.json; the one of its "
        f"version gives {metadata.hash}. The metadata was changed after recording, or the folder renamed: check that it "
        "describes this store",
        where="metadata.json",
        severity="warning",
    )


def _check_shard(layout: Layout, shard_idx: int, size: int, seen: Survey) -> Problem | None:
    """The problem of a shard by its size, which is negative if it is not a readable file."""
    name = shard_name(shard_idx)
    start, end = layout.example_range(shard_idx)
    lost = ((start, end),) if start < end else ()
    severity: Severity = "error" if lost else "warning"  # a trailing shard without examples costs nothing
    if size < 0:
        state, why = seen.others.get(name, _NOT_THERE)
        if state == "missing" and not lost:
            return None
        kind = state if state == "not_a_file" else f"{state}_shard"
        return Problem(kind, f"{name} cannot be read: {why}", where=name, severity=severity, lost=lost)
    used, full, row = layout.used_nbytes(shard_idx), layout.shard_nbytes, layout.example_nbytes
    if size < used:
        kept = size // row
        return Problem(
            "short_shard",
            f"{name} has {size:,} bytes, but its {end - start} examples take {used:,}; the first {kept} are whole",
            where=name,
            lost=((start + kept, end),),
        )
    if size >= full + row:
        return Problem(
            "oversized_shard",
            f"{name} has {size:,} bytes, but a full shard is {full:,} ({layout.examples_per_shard} examples); it "
            "was written with another capacity than metadata.json implies, so its vectors may belong to other examples",
            where=name,
            severity=severity,
            lost=lost,
        )
    if (size - used) % row:
        return Problem(
            "trailing_bytes",
            f"{name} has {size:,} bytes: {(size - used) % row} of those after its {end - start} examples are not a whole row "
            f"of {row:,} bytes; all vectors are in place, but bytes were appended to the file, or cut from the zeros at its end",
            where=name,
            severity="warning",
        )
    return None


def _check_token_array(layout: Layout, array: TokenArray, seen: Survey, *, is_declared: bool) -> Iterator[Problem]:
    name = array.file_name
    if name not in seen.files and name not in seen.others and not is_declared:
        return  # labels of older stores are optional
    what, expected = token_array_kind(array), array.nbytes(layout)
    remedy = f"Vectors are readable, {array.name} are not. Copy the file again, or {rewriting(array.name)}"
    if name in seen.files:
        size, _ = seen.files[name]
        if size != expected:
            message = (
                f"{name} has {size:,} bytes; {layout.n_examples:,} examples of {layout.content_tokens_per_example:,} content "
                f"tokens of {array.dtype} take {expected:,}. {remedy}"
            )
            yield Problem(f"{what}_size", message, where=name)
    else:
        state, why = seen.others.get(name, _NOT_THERE)
        kind = "missing" if state == "missing" else "unreadable"
        yield Problem(f"{kind}_{what}", f"{name} cannot be read: {why}. {remedy}", where=name)


def token_array_kind(array: TokenArray) -> str:
    """The word for a token array in kinds of problems."""
    return "labels" if array == LABELS else "token_array"
