"""List the stores one level below a folder."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from saev_store._runtime.threads import ahead
from saev_store.documents import METADATA_MAX_NBYTES, SHARDS_MAX_NBYTES, Metadata, parse_metadata, parse_shards
from saev_store.errors import NotFoundError, SaevStoreError, counted
from saev_store.names import METADATA_NAME, SHARDS_NAME, WORK_FOLDER, one_line, printable
from saev_store.transport import Transport
from saev_store.transport.durable import TEMP_PREFIX

#: Folders that are looked at side by side.
_N_THREADS = 16


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """One store found below a root.

    Attributes:
        name: Its folder, normally the content hash.
        url: What `ShardStore.open` takes.
        state: `"complete"` was published and its files have the right sizes, `"damaged"` lacks files or bytes, `"unfinished"`
            was begun and not published, `"broken"` has documents that do not open.
        metadata: The document, where it could be read.
        note: Why it is broken, or what is lost.
    """

    name: str
    url: str
    state: Literal["complete", "damaged", "unfinished", "broken"]
    metadata: Metadata | None
    note: str = ""

    def __str__(self) -> str:
        what = "" if self.metadata is None else f"  {self.metadata.ckpt}  {self.metadata.layout.shape}"
        return one_line(f"{self.name}{what}  {self.state}{self.note and ': '}{self.note}")


class StoreList(list[StoreEntry]):
    """The stores below one root, in the order of their names; prints as a table."""

    def __init__(self, root: str, entries: Iterable[StoreEntry]) -> None:
        super().__init__(entries)
        self.root = root

    def __repr__(self) -> str:
        lines = [printable(f"{counted(len(self), 'store')} in {self.root}")]
        return "\n".join([*lines, *(f"  {entry}" for entry in self)])


def list_stores(root: Transport) -> StoreList:
    """Every store one level below a root: two small documents of each folder are read, and the sizes of its files are compared."""
    names = {entry.name for entry in root.list() if entry.is_dir and not entry.name.startswith(TEMP_PREFIX)}
    if WORK_FOLDER in names:  # of unfinished stores, which may have no file yet
        with contextlib.suppress(NotFoundError):  # the last of them was just published
            names |= {entry.name for entry in root.list(WORK_FOLDER) if entry.is_dir}
    found = ahead(partial(_look, root), sorted(names - {WORK_FOLDER}), _N_THREADS)
    return StoreList(root.url, (entry for entry in found if entry is not None))


def _look(root: Transport, name: str) -> StoreEntry | None:
    from saev_store.validation import merge_ranges, quick_checks

    url, at = f"{root.url}/{name}", root.at(name)
    try:
        raw = at.read(METADATA_NAME, max_bytes=METADATA_MAX_NBYTES)
    except NotFoundError:
        return _look_unfinished(root, name, url)
    except SaevStoreError as error:
        return StoreEntry(name, url, "broken", None, str(error))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the list shows what opening warns of
            metadata = parse_metadata(raw, where=f"{url}/{METADATA_NAME}")
        index = parse_shards(at.read(SHARDS_NAME, max_bytes=SHARDS_MAX_NBYTES), metadata, where=f"{url}/{SHARDS_NAME}")
        errors = [problem for problem in quick_checks(at, metadata, index) if problem.severity == "error"]
    except SaevStoreError as error:
        return StoreEntry(name, url, "broken", None, str(error))
    if not errors:
        return StoreEntry(name, url, "complete", metadata)
    lost = merge_ranges([lost for problem in errors for lost in problem.lost])
    n_lost = sum(end - start for start, end in lost)
    note = f"{n_lost:,} of {metadata.n_examples:,} examples lost" if n_lost else errors[0].message
    return StoreEntry(name, url, "damaged", metadata, note)


def _look_unfinished(root: Transport, name: str, url: str) -> StoreEntry | None:
    note = "not published yet; create(…, resume=True) continues it"
    try:
        raw = root.read(f"{WORK_FOLDER}/{name}/{METADATA_NAME}", max_bytes=METADATA_MAX_NBYTES)
    except NotFoundError:
        try:
            root.size(f"{name}/{WORK_FOLDER}/claim.json")
        except SaevStoreError:
            return None
        return StoreEntry(name, url, "unfinished", None, "begun by an older version, which has to finish it")
    except SaevStoreError as error:
        return StoreEntry(name, url, "unfinished", None, str(error))
    try:
        return StoreEntry(name, url, "unfinished", parse_metadata(raw, where=url), note)
    except SaevStoreError:
        return StoreEntry(name, url, "unfinished", None, "its metadata cannot be read")
