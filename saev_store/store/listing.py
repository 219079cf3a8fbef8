"""List the stores one level below a folder."""

from __future__ import annotations

import contextlib
import html
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, overload

from saev_store._runtime.threads import ahead
from saev_store.core.layout import layer_name
from saev_store.documents import SHARDS_MAX_NBYTES, Metadata, parse_metadata, parse_shards
from saev_store.errors import NotFoundError, SaevStoreError, counted
from saev_store.names import METADATA_NAME, SHARDS_NAME, WORK_FOLDER, one_line, printable
from saev_store.store.card import human_bytes
from saev_store.transport import Transport
from saev_store.transport.durable import TEMP_PREFIX

#: Folders that are looked at side by side.
_N_THREADS = 16

_MAX_CLAIM_BYTES = 32 << 20

State = Literal["complete", "damaged", "unfinished", "broken"]


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
    state: State
    metadata: Metadata | None
    note: str = ""

    def __str__(self) -> str:
        if self.metadata is None:
            return one_line(f"{self.name}  {self.state}: {self.note}")
        layout = self.metadata.layout
        shape = " x ".join(str(n) for n in layout.shape)
        layers = ", ".join(layer_name(key) for key in layout.layer_keys)
        state = "" if self.state == "complete" else f"  {self.state}: {self.note}"
        text = f"{self.name}  {shape}  {human_bytes(layout.nbytes)}  layers [{layers}]  {self.metadata.ckpt}{state}"
        return one_line(text)


class StoreList(Sequence[StoreEntry]):
    """The stores below one root, in the order of their names; a plain sequence that prints as a table."""

    def __init__(self, root: str, entries: Sequence[StoreEntry]) -> None:
        self.root = root
        self._entries = tuple(entries)

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> StoreEntry: ...
    @overload
    def __getitem__(self, index: slice) -> StoreList: ...
    def __getitem__(self, index: int | slice) -> StoreEntry | StoreList:
        if isinstance(index, slice):
            return StoreList(self.root, self._entries[index])
        return self._entries[index]

    def __repr__(self) -> str:
        lines = [printable(f"{counted(len(self), 'store')} in {self.root}")]
        return "\n".join([*lines, *(f"  {entry}" for entry in self._entries)])

    def _repr_html_(self) -> str:
        rows = "".join(f"<li><code>{html.escape(str(entry))}</code></li>" for entry in self._entries)
        return (
            f"<p>{counted(len(self), 'store')} in <code>{html.escape(printable(self.root))}</code></p><ul>{rows}</ul>"
        )


def list_stores(root: Transport) -> StoreList:
    """Every store one level below a root; folders that are not stores are left out, as are those that are moved aside to be deleted.

    Reads two small documents per folder and compares the sizes of its files, several folders at once. Nothing is raised
    for a single broken store.

    Raises:
        NotFoundError: there is no such root.
        TransportError: it cannot be listed.
    """
    names = {entry.name for entry in root.list() if entry.is_dir and not entry.name.startswith(TEMP_PREFIX)}
    if WORK_FOLDER in names:  # of unfinished stores, which may have no file yet
        with contextlib.suppress(NotFoundError):  # the last of them was just published
            names |= {entry.name for entry in root.list(WORK_FOLDER) if entry.is_dir}
    found = ahead(partial(_look, root), sorted(names - {WORK_FOLDER}), _N_THREADS)
    return StoreList(root.url, [entry for entry in found if entry is not None])


def _look(root: Transport, name: str) -> StoreEntry | None:
    from saev_store.validation import merge_ranges, quick_checks

    url = f"{root.url}/{name}"
    try:
        raw = root.read(f"{name}/{METADATA_NAME}", max_bytes=_MAX_CLAIM_BYTES)
    except NotFoundError:
        return _look_unfinished(root, name, url)
    except SaevStoreError as error:
        return StoreEntry(name, url, "broken", None, str(error))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the list shows what opening warns of
            metadata = parse_metadata(raw, where=f"{url}/{METADATA_NAME}")
        listed = root.read(f"{name}/{SHARDS_NAME}", max_bytes=SHARDS_MAX_NBYTES)
        index = parse_shards(listed, metadata, where=f"{url}/{SHARDS_NAME}")
        found = quick_checks(root.at(name), metadata, index)
    except SaevStoreError as error:
        is_gone = isinstance(error, NotFoundError)
        note = "metadata.json without shards.json: the dump crashed, or was purged" if is_gone else str(error)
        return StoreEntry(name, url, "broken", None, note)
    errors = [problem for problem in found if problem.severity == "error"]
    if not errors:
        return StoreEntry(name, url, "complete", metadata)
    lost = merge_ranges([lost for problem in errors for lost in problem.lost])
    n_lost = sum(end - start for start, end in lost)
    note = f"{n_lost:,} of {metadata.n_examples:,} examples lost" if n_lost else errors[0].message
    return StoreEntry(name, url, "damaged", metadata, note)


def _look_unfinished(root: Transport, name: str, url: str) -> StoreEntry | None:
    from saev_store.writer import old_claim

    note = "not published yet; create(…, resume=True) continues it"
    try:
        raw = root.read(f"{WORK_FOLDER}/{name}/{METADATA_NAME}", max_bytes=_MAX_CLAIM_BYTES)
    except NotFoundError:
        try:
            claimed = old_claim(root.at(name))
        except SaevStoreError:
            claimed = ""
        if claimed is None:
            return None
        raw, note = claimed.encode("utf-8", "surrogatepass"), "begun by an older version, which has to finish it"
    except SaevStoreError as error:
        return StoreEntry(name, url, "unfinished", None, str(error))
    try:
        return StoreEntry(name, url, "unfinished", parse_metadata(raw, where=url), note)
    except (SaevStoreError, UnicodeEncodeError):
        return StoreEntry(name, url, "unfinished", None, "its metadata cannot be read")
