"""shards.json: which shards there are, and how many examples each one holds; and the sizes of token arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from saev_store.core.arguments import is_list, is_mapping
from saev_store.core.layout import IntArray, Layout, shard_name
from saev_store.core.token_arrays import LABELS, TokenArray
from saev_store.documents._parse import MAX_PROBLEMS, Findings, parse_json
from saev_store.documents.versions import COUNT_KEYS
from saev_store.documents.writing import SHARDS_MAX_NBYTES, SHORTEST_ENTRY_NBYTES, shards_bytes
from saev_store.errors import DocumentError, UnsafeContentError, brief
from saev_store.problems import Problem

if TYPE_CHECKING:
    from saev_store.documents.metadata import Metadata

#: What an entry may take, and all entries that the metadata does not ask for: the metadata bounds the list beside it.
_LONGEST_ENTRY_NBYTES = 1024
_SLACK_NBYTES = 64 * 2**10


@dataclass(frozen=True, eq=False)
class ShardsIndex:
    """A shards.json that agrees with the metadata beside it.

    Attributes:
        n_listed: Entries in the file, empty ones included.
        layout: The layout that they agree with.
        raw: The exact bytes of the file.
    """

    n_listed: int
    layout: Layout
    raw: bytes = field(repr=False)

    @property
    def counts(self) -> IntArray:
        """Examples in each listed shard, int64 (n_listed,)."""
        return np.array(list(map(self.layout.examples_in, range(self.n_listed))), dtype=np.int64)

    @property
    def trailing_empty(self) -> bool:
        """True if shards without a single example follow the last one, as the reference writer leaves them."""
        return self.n_listed > self.layout.n_shards

    @cached_property
    def names(self) -> tuple[str, ...]:
        """File names of the listed shards: computed, never read from the file."""
        return tuple(map(shard_name, range(self.n_listed)))


def parse_shards(raw: bytes, meta: Metadata, *, where: str) -> ShardsIndex:
    """The index that a shards.json holds, checked against the layout of its metadata.

    Args:
        raw: The whole file.
        meta: The metadata beside it.
        where: The file's name, for messages.

    Raises:
        UnsafeContentError: a name leaves the folder of the store.
        DocumentError: it is not a list of entries, or their names, order or counts do not follow from the metadata;
            all problems are in `problems`.
    """
    layout, findings = meta.layout, Findings(where)
    # Nearly all files are as writers make them; the length bounds what is composed for a number that was not checked.
    if layout.n_shards * SHORTEST_ENTRY_NBYTES <= len(raw) and raw == shards_bytes(layout, meta.count_key):
        return ShardsIndex(layout.n_shards, layout, raw)
    max_nbytes = min(SHARDS_MAX_NBYTES, _SLACK_NBYTES + layout.n_shards * _LONGEST_ENTRY_NBYTES)
    entries = parse_json(raw, where=where, max_nbytes=max_nbytes)
    if not is_list(entries):
        findings.add("wrong_type", f"it is {brief(entries)}; it must be an array of shards")
        raise findings.error("Check that this is the shards.json of a store.")
    first = entries[0] if entries and is_mapping(entries[0]) else ()
    key = next((key for key in COUNT_KEYS if key in first), meta.count_key)
    for i, entry in enumerate(entries):
        if len(findings.errors) == MAX_PROBLEMS:
            break
        _check_entry(i, entry, key, layout, findings)
    if len(entries) < layout.n_shards:
        message = f"it lists {len(entries)} shards; {layout.n_examples} examples need {layout.n_shards}"
        findings.add("too_few_shards", f"{message} of {layout.examples_per_shard}")
    if findings.errors:
        raise findings.error(
            "metadata.json and shards.json must be of the same recording: copy both again from where it was made."
        )
    return ShardsIndex(len(entries), layout, raw)


def _check_entry(i: int, entry: object, key: str, layout: Layout, findings: Findings) -> None:
    """Add an error for each way in which an entry does not follow from the layout; `UnsafeContentError` for a path."""
    if not is_mapping(entry):
        findings.add("wrong_type", f"entry {i} is {brief(entry)}; it must be an object", i)
        return
    name, count, expected = entry.get("name"), entry.get(key), layout.examples_in(i)
    if isinstance(name, str) and (name in {".", ".."} or any(mark in name for mark in "/\\\0:")):
        raise UnsafeContentError(
            f'entry {i}: "name" is {brief(name)}, which leads out of the folder; it must be "{shard_name(i)}"',
            where=findings.where,
            remedy="Do not trust this store: no known writer makes such names.",
        )
    if name != shard_name(i):
        message = f'entry {i}: "name" is {brief(name)}; shards are listed in order, so it must be "{shard_name(i)}"'
        findings.add("wrong_name", message, i, "name")
    if len(entry.keys() & set(COUNT_KEYS)) > 1:
        findings.add("mixed_spellings", f'entry {i} has several counts; all entries have one, here "{key}"', i, key)
    elif type(count) is not int:
        findings.add("wrong_value", f'entry {i}: "{key}" is {brief(count)}; it must be an integer', i, key)
    elif count != expected:
        rule = f"by the metadata it holds {expected} of {layout.n_examples}"
        findings.add("wrong_count", f'entry {i}: "{key}" is {brief(count)}; {rule}', i)


def parse_token_array_size(nbytes: int, array: TokenArray, layout: Layout, *, where: str) -> None:
    """Compare the size of a token array's file with the layout of its store.

    Raises:
        DocumentError: the size is not the one that the layout demands.
    """
    expected = array.nbytes(layout)
    if nbytes != expected:
        shape = f"{layout.n_examples} examples x {layout.content_tokens_per_example} content tokens"
        message = f"it has {nbytes} bytes; {shape} of {array.numpy_dtype.itemsize} bytes are {expected}"
        problem = Problem("labels_size" if array == LABELS else "token_array_size", message, where)
        remedy = f"It is cut off or of another store: copy it again, or {rewriting(array.name)}."
        raise DocumentError(message, where=where, remedy=remedy, problems=[problem])


def rewriting(name: str) -> str:
    """Advice on writing a lost token array again, for remedies."""
    return f'write it again with store.repair().restore_array("{name}", ...)'
