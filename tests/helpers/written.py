"""What tests of writing share: the calls, small cases, and what lies in a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kill_harness_oracle import Case, case

from saev_store import ShardStore
from saev_store.transport import Transport, open_transport
from saev_store.writer import RepairWriter, ShardWriter, create_store, finalize_store, open_repair
from saev_store.writer.copies import Copy
from saev_store.writer.copying import make_copy

__all__ = [
    "Case",
    "ShardWriter",
    "a_case",
    "content",
    "copy_whole",
    "create",
    "create_store",
    "files",
    "finalize_store",
    "finish",
    "open_repair",
]


#: The transport of a local folder.
LOCAL = type(open_transport("."))


def a_case(n: int = 11, per_shard: int = 3, *, pad: bool = True, **options) -> Case:
    """A small store of random bits, as a local disk holds it."""
    return case(n=n, per_shard=per_shard, block_bytes=8 << 20, pad=pad, **options)


def as_transport(root: str | os.PathLike[str] | Transport) -> Transport:
    return open_transport(root) if isinstance(root, (str, os.PathLike)) else root


def create(root, this: Case, **options) -> ShardWriter:
    """The writer of a case, without its bar; NaN is among its random bits."""
    return create_store(as_transport(root), this.metadata, **{"on_nonfinite": "allow", "progress": False, **options})


def finish(root, this: Case, batch: int = 2, **options) -> None:
    """Write all that is missing."""
    with create(root, this, **{"resume": True, "exist_ok": True, **options}) as writer:
        append_missing(writer, this, batch)


def repair(root, this: Case, **options) -> RepairWriter:
    """The repair of a case below a root; all shards are looked at."""
    store = as_transport(root).at(this.name)
    if "lost" not in options:
        report = ShardStore.open(store, damaged_ok=True).validate(deep=True, progress=False)
        if any(problem.kind == "unreadable_digests" for problem in report.problems):
            report.raise_if_bad()
        options["lost"] = report.lost
    return open_repair(store, this.metadata, **{"on_nonfinite": "allow", "progress": False, **options})


def append_missing(writer: ShardWriter, this: Case, batch: int = 2, most: int | None = None) -> None:
    """Append the examples that are missing, or the first `most` of them."""
    examples = [example for some in writer.missing for example in some][:most]
    while examples:
        n = next((i for i in range(1, batch) if i >= len(examples) or examples[i] != examples[0] + i), batch)
        this.append(writer, examples[0], min(examples[0] + n, examples[-1] + 1))
        examples = examples[n:]


def copy_whole(store, root, metadata=None, *, replace=False, client=None) -> None:
    """Copy to a transport, which may be one of a test."""
    tokens = slice(0, store.layout.tokens_per_example)
    copy = Copy(store, root, metadata or store.metadata, tokens, "raise", True)
    make_copy(copy, replaces=replace, client=client, progress=False)


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def files(root: Transport, name: str) -> dict[str, bytes]:
    """Every file directly in a folder."""
    folder = root.at(name)
    return {entry.name: bytes(folder.read(entry.name)) for entry in folder.list() if not entry.is_dir}


def cut(this: Case) -> Case:
    """The same, as a bucket holds it: without a tail of zeros."""
    return replace(this, pad=False)


@contextmanager
def holding(root, this: Case, what: str) -> Iterator[None]:
    """A block in which another process holds a lock of the work folder."""
    with as_transport(root).lock(f".saev_store/{this.name}/locks/{what}.lock"):
        yield
