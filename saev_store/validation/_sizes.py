"""Checks of names, sizes, links and the folder's name; no file content is read."""

from __future__ import annotations

import re
from collections.abc import Iterator

from saev_store.core.layout import Layout, shard_name
from saev_store.documents import Metadata, ShardsIndex, labels_nbytes, match_hash
from saev_store.names import LABELS_NAME, WORK_FOLDER
from saev_store.problems import Problem, Severity
from saev_store.transport import Transport
from saev_store.validation._survey import MISSING, Found, Survey, survey

_SHARD_LIKE = re.compile(r"^acts[-_ ]?\d")
_SHARD_NAME = re.compile(r"^acts(\d{6,})\.bin$")


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
    return check_survey(survey_store(transport, index), metadata, index, dirname=dirname)


def survey_store(transport: Transport, index: ShardsIndex) -> Survey:
    """Survey of the listed shards and the labels."""
    return survey(transport, [*map(shard_name, range(index.n_listed)), LABELS_NAME])


def check_survey(seen: Survey, metadata: Metadata, index: ShardsIndex, *, dirname: str | None) -> list[Problem]:
    """`quick_checks` on an existing survey. Pure."""
    layout = metadata.layout
    problems = [*metadata.problems, *index.problems, *check_dirname(metadata, dirname)]
    problems += _check_shards(layout, index, seen)
    problems += _check_labels(layout, seen.found.get(LABELS_NAME))
    if seen.complete:
        problems += _check_other_names(layout, index, seen)
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
    if found.size > full or (found.size - used) % row:
        return Problem(
            "trailing_bytes",
            f"{name} has {found.size:,} bytes: {(found.size - used) % row} of those after its {end - start} examples are "
            f"no whole row of {row:,} bytes; all vectors are in place, but bytes were appended to "
            "the file",
            where=name,
            severity="warning",
        )
    return None


def _check_labels(layout: Layout, found: Found | None) -> Iterator[Problem]:
    if found is None or found == MISSING:
        return  # labels are optional
    if found.size is None:
        yield Problem("unreadable_labels", f"{LABELS_NAME} cannot be read: {found.why}", where=LABELS_NAME)
        return
    if found.link:
        yield Problem(
            "symlinked_labels",
            f"{LABELS_NAME} is a symbolic link to {found.link!r}",
            where=LABELS_NAME,
            severity="info",
        )
    expected = labels_nbytes(layout)
    if found.size != expected:
        yield Problem(
            "labels_size",
            f"{LABELS_NAME} has {found.size:,} bytes; {layout.n_examples:,} examples of {layout.content_tokens_per_example:,} "
            f"content tokens take {expected:,}. Vectors are readable, labels are not",
            where=LABELS_NAME,
        )


def _check_other_names(layout: Layout, index: ShardsIndex, seen: Survey) -> Iterator[Problem]:
    missing = [i for i in range(layout.n_shards) if shard_name(i) not in seen.found]
    for name in sorted(seen.found):
        found = seen.found[name]
        if name == WORK_FOLDER:
            yield Problem(
                "leftover_work_folder",
                f"the hidden folder {WORK_FOLDER} of a writer is still there; the store is published, so the folder is "
                "not needed, unless a repair is running",
                where=WORK_FOLDER,
                severity="info",
            )
        if not _SHARD_LIKE.match(name):
            continue
        number = _SHARD_NAME.match(name)
        if number and name == shard_name(int(number[1])):
            if int(number[1]) >= index.n_listed:
                yield Problem(
                    "unlisted_shard",
                    f"{name} is there, but shards.json lists only {index.n_listed} shards; it is not read",
                    where=name,
                    severity="warning",
                )
            continue
        twins = [i for i in missing if found.size in (layout.used_nbytes(i), layout.shard_nbytes)]
        guess = f"; it has the size of {shard_name(twins[0])}, which is missing" if len(twins) == 1 else ""
        yield Problem(
            "misnamed_shard",
            f"{name!r} looks like a shard, but shards are named like {shard_name(0)}; it is not read{guess}",
            where=name,
            severity="warning",
        )
