"""The quick checks: names, sizes, links and the folder's name. Lists the folder and opens no file."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from saev_store._runtime.threads import ahead
from saev_store.core.layout import Layout, shard_name
from saev_store.core.token_arrays import LABELS, TokenArray
from saev_store.documents import Metadata, ShardsIndex, match_hash, rewriting
from saev_store.errors import NotFoundError, SaevStoreError
from saev_store.names import WORK_FOLDER
from saev_store.problems import Problem, Severity
from saev_store.transport import Entry, Transport

_SHARD_NAME = re.compile(r"^acts(\d{6,})\.bin$")
#: Concurrent size requests where the transport cannot list.
_N_THREADS = 16

State = Literal["file", "missing", "not_a_file", "unreadable"]


class Found(NamedTuple):
    """One name in a store's folder.

    Attributes:
        size: Size in bytes of the file, or of the file that a link points to; None for anything else.
        state: Whether it is a readable file.
        why: Explanation of any state but `"file"`.
        link: Target of a symbolic link, else "".
        modified_ns: When the content was last changed, in nanoseconds since 1970; None for files elsewhere.
    """

    size: int | None
    state: State = "file"
    why: str = ""
    link: str = ""
    modified_ns: int | None = None


MISSING = Found(None, "missing", "it is not there; was it purged, or not copied?")
_FOLDER = "it is a folder"
_EUID = os.geteuid() if hasattr(os, "geteuid") else -1  # Windows has no users by number


@dataclass(frozen=True, slots=True)
class Survey:
    """Names in a folder; `complete` is False if only the requested names were checked."""

    found: Mapping[str, Found]
    complete: bool


def local_folder(transport: Transport) -> str | None:
    """The folder behind a transport if it is a local one, else None.

    >>> from saev_store.transport import open_transport
    >>> local_folder(open_transport("memory://x")) is None
    True
    """
    url = transport.url.removeprefix("file://")
    return url if url.startswith("/") and "::" not in url else None


def survey(transport: Transport, names: Iterable[str]) -> Survey:
    """Survey a folder with as few requests as the transport allows.

    One `scandir` locally (a stat for each entry follows links), one listing where there is one, otherwise one size
    request for each of `names`, in parallel.

    Raises:
        SaevStoreError: the folder cannot be accessed.
    """
    folder = local_folder(transport)
    if folder is not None:
        try:
            with os.scandir(folder) as entries:
                return Survey({entry.name: _look(entry.path, entry.is_symlink()) for entry in entries}, complete=True)
        except PermissionError:
            # A folder may be searchable but not listable. Names are computed, so it can still be surveyed.
            paths = {name: os.path.join(folder, name) for name in names}
            return Survey({name: _look(path, os.path.islink(path)) for name, path in paths.items()}, complete=False)
        except OSError:
            pass
    else:
        try:
            entries = transport.list()
        except SaevStoreError:
            pass  # a bucket may allow reading without listing
        else:
            found = {entry.name: _listed(transport, entry) for entry in entries}
            if any(name in found for name in names):
                return Survey(found, complete=True)
    wanted = list(names)
    found = ahead(partial(_ask, transport), wanted, _N_THREADS)
    return Survey(dict(zip(wanted, found, strict=True)), complete=False)


def _look(path: str, is_link: bool) -> Found:
    link = os.readlink(path) if is_link else ""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        why = f"it is a symbolic link to {link!r}, where nothing is" if link else MISSING.why
        return Found(None, "missing", why, link)
    except OSError as error:
        return Found(None, "unreadable", f"its status cannot be read ({error.strerror})", link)
    if stat.S_ISDIR(status.st_mode):
        return Found(None, "not_a_file", _FOLDER, link)
    if not stat.S_ISREG(status.st_mode):
        return Found(None, "not_a_file", "it is no regular file", link)
    # Files are usually ours and readable: this saves one system call per shard.
    is_ours = status.st_uid == _EUID and status.st_mode & stat.S_IRUSR
    if not is_ours and not os.access(path, os.R_OK):
        return Found(None, "unreadable", "its permissions do not allow reading it", link)
    return Found(status.st_size, link=link, modified_ns=status.st_mtime_ns)


def _listed(transport: Transport, entry: Entry) -> Found:
    if entry.is_dir:
        return Found(None, "not_a_file", _FOLDER)
    return Found(entry.size) if entry.size is not None else _ask(transport, entry.path)


def _ask(transport: Transport, name: str) -> Found:
    try:
        return Found(transport.size(name))
    except NotFoundError:
        return MISSING
    except SaevStoreError as error:
        return Found(None, "unreadable", error.message)


# -- checks ------------------------------------------------------------------------------------------------------------


def quick_checks(
    transport: Transport, metadata: Metadata, index: ShardsIndex, *, dirname: str | None = None
) -> list[Problem]:
    """All problems that names and sizes show, including those of the documents.

    One directory scan locally, one listing remotely: 1,000 shards take a few milliseconds on a local disk.

    Args:
        transport: Rooted at the store's folder.
        metadata: What `metadata.json` says.
        index: What `shards.json` says.
        dirname: The folder's name, compared with the content hash; None skips this check.

    Returns:
        Errors, warnings and infos, in the order of the documents, then of the shards. A shard's acceptable sizes are
        exactly its used bytes (cut), the full capacity (padded), or whole examples in between; any other size is a
        problem with the examples that it makes unreadable.
    """
    return check_survey(survey_store(transport, metadata, index), metadata, index, dirname=dirname)


def survey_store(transport: Transport, metadata: Metadata, index: ShardsIndex) -> Survey:
    """Survey of the listed shards and the token arrays."""
    arrays = [array.file_name for array in metadata.recordable]
    return survey(transport, [*map(shard_name, range(index.n_listed)), *arrays])


def check_survey(seen: Survey, metadata: Metadata, index: ShardsIndex, *, dirname: str | None) -> list[Problem]:
    """`quick_checks` on an existing survey. Pure."""
    layout = metadata.layout
    problems = [*metadata.problems, *index.problems, *check_dirname(metadata, dirname)]
    problems += _check_shards(layout, index, seen)
    for array in metadata.recordable:
        found = seen.found.get(array.file_name, MISSING)
        problems += _check_token_array(layout, array, found, is_declared=metadata.declares_token_arrays)
    if seen.complete:
        problems += _check_other_names(index, seen)
    return problems


def check_dirname(metadata: Metadata, dirname: str | None) -> Iterator[Problem]:
    """A warning if no recipe of any version makes the folder's name from its document."""
    if dirname is None or match_hash(metadata, dirname) is not None:
        return
    tried = ", ".join(metadata.hashes)
    yield Problem(
        "hash_mismatch",
        f"the folder is named {dirname!r}, but no recipe ({tried}) makes that name from metadata.json; the one of its "
        f"version gives {metadata.hash}. The metadata was changed after recording, or the folder renamed: check that it "
        "describes this store",
        where="metadata.json",
        severity="warning",
    )


def _check_shards(layout: Layout, index: ShardsIndex, seen: Survey) -> Iterator[Problem]:
    names = [shard_name(shard_idx) for shard_idx in range(index.n_listed)]
    if layout.n_shards > 1 and all(seen.found.get(name, MISSING).state == "missing" for name in names):
        yield Problem(
            "all_shards_missing",
            f"none of the {layout.n_shards} shards is there, only the documents; was the folder purged or only partly "
            "copied?",
            where=shard_name(0),
            lost=((0, layout.n_examples),),
        )
        return
    for shard_idx, name in enumerate(names):
        found = seen.found.get(name, MISSING)
        if found.link:
            yield Problem(
                "symlinked_shard", f"{name} is a symbolic link to {found.link!r}", where=name, severity="info"
            )
        problem = _check_size(layout, shard_idx, found)
        if problem is not None:
            yield problem


def _check_size(layout: Layout, shard_idx: int, found: Found) -> Problem | None:
    name = shard_name(shard_idx)
    start, end = layout.example_range(shard_idx)
    lost = ((start, end),) if start < end else ()
    severity: Severity = "error" if lost else "warning"  # a trailing shard without examples costs nothing
    if found.state == "missing" and not lost:
        return Problem(
            "missing_empty_shard",
            f"{name} is listed with no examples and is not there; nothing is lost, but a reader that maps every "
            "listed file fails",
            where=name,
            severity="info",
        )
    if found.size is None:
        kind = {"missing": "missing_shard", "not_a_file": "not_a_file"}.get(found.state, "unreadable_shard")
        return Problem(kind, f"{name} cannot be read: {found.why}", where=name, severity=severity, lost=lost)
    used, full, row = layout.used_nbytes(shard_idx), layout.shard_nbytes, layout.example_nbytes
    if found.size < used:
        kept = found.size // row
        return Problem(
            "short_shard",
            f"{name} has {found.size:,} bytes, but its {end - start} examples take {used:,}; "
            + (f"the first {kept} are whole" if kept else "not one is whole"),
            where=name,
            lost=((start + kept, end),),
        )
    if found.size >= full + row:
        return Problem(
            "oversized_shard",
            f"{name} has {found.size:,} bytes, but a full shard is {full:,} ({layout.examples_per_shard} examples); it "
            "was written with another capacity than metadata.json implies, so its vectors may belong to other examples",
            where=name,
            severity=severity,
            lost=lost,
        )
    if (found.size - used) % row:
        return Problem(
            "trailing_bytes",
            f"{name} has {found.size:,} bytes: {(found.size - used) % row} of those after its {end - start} examples are "
            f"no whole row of {row:,} bytes; all vectors are in place, but bytes were appended to "
            "the file, or cut from the zeros at its end",
            where=name,
            severity="warning",
        )
    return None


def _check_token_array(layout: Layout, array: TokenArray, found: Found, *, is_declared: bool) -> Iterator[Problem]:
    name, what = array.file_name, token_array_kind(array)
    if found == MISSING:
        if is_declared:  # labels of older stores are optional
            message = f"{name} is missing. Vectors are readable, {array.name} are not. Copy the file again, or {rewriting(array.name)}"
            yield Problem(f"missing_{what}", message, where=name)
        return
    if found.size is None:
        yield Problem(f"unreadable_{what}", f"{name} cannot be read: {found.why}", where=name)
        return
    if found.link:
        yield Problem(f"symlinked_{what}", f"{name} is a symbolic link to {found.link!r}", where=name, severity="info")
    expected = array.nbytes(layout)
    if found.size != expected:
        each = "" if array == LABELS else f" of {array.dtype}"
        yield Problem(
            f"{what}_size",
            f"{name} has {found.size:,} bytes; {layout.n_examples:,} examples of {layout.content_tokens_per_example:,} "
            f"content tokens{each} take {expected:,}. Vectors are readable, {array.name} are not. "
            f"Copy the file again, or {rewriting(array.name)}",
            where=name,
        )


def token_array_kind(array: TokenArray) -> str:
    """What codes of problems call a token array."""
    return "labels" if array == LABELS else "token_array"


def _check_other_names(index: ShardsIndex, seen: Survey) -> Iterator[Problem]:
    for name in sorted(seen.found):
        if name == WORK_FOLDER:
            yield Problem(
                "leftover_work_folder",
                f"the hidden folder {WORK_FOLDER} of a writer is still there; the store is published, so the folder is "
                "not needed, unless a repair is running",
                where=WORK_FOLDER,
                severity="info",
            )
        number = _SHARD_NAME.match(name)
        if number and name == shard_name(int(number[1])) and int(number[1]) >= index.n_listed:
            yield Problem(
                "unlisted_shard",
                f"{name} is there, but shards.json lists only {index.n_listed} shards; it is not read",
                where=name,
                severity="warning",
            )
