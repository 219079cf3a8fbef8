"""shards.json: which shards there are, and how many examples each one holds; and the sizes of token arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, cast

import numpy as np

from saev_store.core.layout import IntArray, Layout, shard_name
from saev_store.core.token_arrays import LABELS, TokenArray
from saev_store.documents._parse import Findings, key_list, parse_json, shown
from saev_store.documents.versions import COUNT_KEYS
from saev_store.documents.writing import SHARDS_MAX_NBYTES, SHORTEST_ENTRY_NBYTES, shards_bytes
from saev_store.errors import DocumentError, UnsafeContentError
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
        count_key: The key under which they count examples.
        layout: The layout that they agree with.
        raw: The exact bytes of the file.
        problems: Warnings; a list with an error is never made.
    """

    n_listed: int
    count_key: str
    layout: Layout
    raw: bytes = field(repr=False)
    problems: tuple[Problem, ...] = ()

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
        DocumentError: it is not a list of entries, or their names, order, counts or sum do not follow from the metadata;
            all problems are in `problems`.
    """
    layout = meta.layout
    # Nearly all files are as writers make them; the length bounds what is composed for a number that was not checked.
    if layout.n_shards * SHORTEST_ENTRY_NBYTES <= len(raw) and raw == shards_bytes(layout, meta.count_key):
        return ShardsIndex(layout.n_shards, meta.count_key, layout, raw)
    max_nbytes = min(SHARDS_MAX_NBYTES, _SLACK_NBYTES + layout.n_shards * _LONGEST_ENTRY_NBYTES)
    contents = parse_json(raw, where=where, max_nbytes=max_nbytes)
    findings = Findings(where)
    if not isinstance(contents, list):
        findings.add("wrong_type", f"it is {shown(contents)}; it must be an array of shards")
        raise findings.error(remedy="Check that this is the shards.json of a store.")
    entries = cast("list[dict[str, object]]", contents)
    key = _count_key(entries)
    _find_irregular(entries, key, findings)
    if findings.n_errors:
        raise findings.error(remedy="Copy the file again from where the store was recorded.")
    values = [cast("int", entry[key]) for entry in entries]
    # All shards are full but the last one, which holds the rest; after it follow zeros. As many as are listed: the number of
    # shards comes from the metadata, unchecked.
    expected = [layout.examples_in(i) for i in range(len(values))]
    if len(values) < layout.n_shards or values != expected:
        _find_bad_counts(values, key, expected, layout, findings)
        raise findings.error(
            remedy="metadata.json and shards.json must be of the same recording: copy both again from where it was made."
        )
    if key != meta.count_key:
        findings.add(
            "count_key",
            f'the counts are called "{key}"; beside metadata of {meta.version.title} writers call them "{meta.count_key}"',
            severity="warning",
        )
    return ShardsIndex(len(values), key, layout, raw, tuple(findings.warnings))


def _count_key(entries: Sequence[object]) -> str:
    """The count key of the first entry that has one; the newest when none has."""
    for entry in entries:
        found = cast("dict[str, object]", entry) if isinstance(entry, dict) else {}
        for key in COUNT_KEYS:
            if key in found:
                return key
    return COUNT_KEYS[-1]


def _find_irregular(entries: Sequence[object], key: str, findings: Findings) -> None:
    """Add an error for each way in which an entry is malformed.

    Raises:
        UnsafeContentError: a name leaves the folder.
    """
    if not entries:
        findings.add("no_shards", "it lists no shards; it must list at least one")
    for i, entry in enumerate(entries):
        if findings.is_full:
            break
        if not isinstance(entry, dict):
            findings.add("wrong_type", f"entry {i} is {shown(entry)}; it must be an object", loc=(i,))
            continue
        shard = cast("dict[str, object]", entry)
        if shard.get("name") != shard_name(i):
            _find_bad_name(shard, i, findings)
        found = [count_key for count_key in COUNT_KEYS if count_key in shard]
        if not found:
            findings.add("missing_key", f'entry {i} has no count; it must have "{key}"', loc=(i, key))
        elif found != [key]:
            findings.add(
                "mixed_spellings",
                f'entry {i} has {key_list(found)}; all entries of a file have one key for counts, here "{key}"',
                loc=(i, found[-1]),
            )
        elif type(shard[key]) is not int:
            findings.add(
                "wrong_value", f'entry {i}: "{key}" is {shown(shard[key])}; it must be an integer', loc=(i, key)
            )


def _find_bad_name(shard: Mapping[str, object], i: int, findings: Findings) -> None:
    """Add an error for the name of an entry, which is not that of its shard."""
    if "name" not in shard:
        findings.add("missing_key", f'entry {i} has no "name"; it must be "{shard_name(i)}"', loc=(i, "name"))
        return
    name = shard["name"]
    if isinstance(name, str) and (name in {".", ".."} or any(mark in name for mark in "/\\\0:")):
        raise UnsafeContentError(
            f'entry {i}: "name" is {shown(name)}, which leads out of the folder of the store; it must be '
            f'"{shard_name(i)}"',
            where=findings.where,
            remedy="Do not trust this store: no known writer makes such names.",
        )
    findings.add(
        "wrong_name",
        f'entry {i}: "name" is {shown(name)}; shards are listed in order, each once, so it must be "{shard_name(i)}"',
        loc=(i, "name"),
    )


def _find_bad_counts(values: list[int], key: str, expected: list[int], layout: Layout, findings: Findings) -> None:
    """Add an error for each count that does not follow from the layout, and for a wrong sum."""
    n_listed, n_shards, capacity = len(values), layout.n_shards, layout.examples_per_shard
    wrong = [i for i, (value, right) in enumerate(zip(values, expected, strict=False)) if value != right]
    for i in wrong:
        if findings.is_full:
            break
        if not -(2**63) <= values[i] < 2**63:
            message = f'entry {i}: "{key}" is {shown(values[i])}; it must fit into 63 bits'
            findings.add("wrong_value", message, loc=(i, key))
            continue
        rule = (
            f"by the metadata it holds {expected[i]} of {layout.n_examples}, {capacity} in each shard but the last one"
        )
        findings.add("wrong_count", f"entry {i} counts {values[i]} examples; {rule}", loc=(i,))
    if n_listed < n_shards:
        findings.add(
            "too_few_shards", f"it lists {n_listed} shards; {layout.n_examples} examples need {n_shards} of {capacity}"
        )
    total = sum(values)
    if total != layout.n_examples:
        findings.add("wrong_sum", f"its counts sum to {total}; the metadata has {layout.n_examples} examples")


def parse_token_array_size(
    nbytes: int, array: TokenArray, layout: Layout, *, where: str, is_declared: bool = False
) -> tuple[int, int]:
    """The shape (n_examples, content tokens) of a token array, from the size of its file alone.

    Args:
        nbytes: Size of the file, in bytes.
        array: Which one it is.
        layout: The layout of its store.
        where: The file's name, for messages.
        is_declared: Whether the document declares the array, so that the store does not open without it.

    Raises:
        DocumentError: the size is not the one that the layout demands.

    >>> parse_token_array_size(28, LABELS, Layout(7, (2, 5, 11), 4, True, 8, 3), where="labels.bin")
    (7, 4)
    """
    expected, itemsize = array.nbytes(layout), array.numpy_dtype.itemsize
    shape = (layout.n_examples, layout.content_tokens_per_example)
    if nbytes == expected:
        return shape
    message = (
        f"it has {nbytes} bytes; {shape[0]} examples x {shape[1]} content tokens of {itemsize} bytes are {expected}"
    )
    other = rewriting(array.name) if is_declared else f"remove it to read the store without {array.name}"
    problem = Problem("labels_size" if array == LABELS else "token_array_size", message, where)
    remedy = f"It is cut off or of another store: copy it again, or {other}."
    raise DocumentError(message, where=where, remedy=remedy, problems=[problem])


def rewriting(name: str) -> str:
    """Advice on writing a lost token array again, for remedies."""
    return f'write it anew with store.repair().restore_array("{name}", ...)'
