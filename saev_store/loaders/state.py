"""States: what identifies the rows of a loader, and checks of a state before it is used."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from typing import NamedTuple, cast

import numpy as np

from saev_store.core.indexing import Progression
from saev_store.errors import ArgumentError, brief, kind_of
from saev_store.order import ORDER_VERSION, Cut
from saev_store.store.selection import Selection

STATE_VERSION = 2


def rows_identity(rows: Selection) -> dict[str, object]:
    """Return what identifies rows, as small JSON: the recording, and what was chosen of it.

    Not the place of the store, its shards or dtype, nor which other layers and tokens it has: a staged copy continues a state.
    """
    space, layout, metadata = rows.space, rows.space.layout, rows.metadata
    found: dict[str, object] = {}
    if metadata is not None:
        found.update(family=metadata.family, ckpt=metadata.ckpt, dataset=metadata.dataset)
        found["data"] = _digest(json.dumps(_parsed(metadata.data), sort_keys=True, default=repr).encode())
    n_special = layout.n_special_tokens
    first, stop = space.tokens.start - n_special, space.tokens.start + space.tokens.count - n_special
    is_regular = isinstance(space.examples, Progression)
    examples = (
        repr(space.examples).encode() if is_regular else np.ascontiguousarray(space.examples, dtype="<i8").tobytes()
    )
    return {
        **found,
        "n_examples": layout.n_examples,
        "d_model": layout.d_model,
        "layers": [list(key) if isinstance(key, tuple) else key for key in rows.layer_keys],
        "stack_layers": space.stacks_layers,
        "tokens": "content" if first == 0 else "all" if stop > 0 else "special",
        "examples": _digest(examples),
        "left_out": "" if space.kept is None else _digest(np.packbits(space.kept).tobytes()),
    }


def _parsed(data: object) -> object:
    """Return `data` of a document; protocol 2.1 has the object as text, or any other text."""
    if isinstance(data, str):
        with contextlib.suppress(ValueError, RecursionError):
            return cast("object", json.loads(data))
    return data


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


#: What the parts of an identity are called in an error, if they are not options.
_WORDS = {
    "data": "data (a digest of it)",
    "examples": "examples (a digest of them)",
    "left_out": "ignore_labels, where, mask and filters (a digest of them)",
}


class Place(NamedTuple):
    """Content of a checked state: the epoch and the number of its next batch, and the fields of `Cut` that its order depends on."""

    epoch: int
    batch: int
    order: Mapping[str, object]


def state_of(parts: Mapping[str, Selection], cut: Cut, seed: int) -> dict[str, object]:
    """Return what has to be equal for a state to make sense."""
    rows = {name: rows_identity(part) for name, part in parts.items()}
    found: dict[str, object] = {
        "version": STATE_VERSION,
        "order": "stored" if cut.n_partitions is None else "shuffled",
        "rows": rows,
        "n_rows": cut.n_rows,
        "global_batch_size": cut.global_batch_size,
        "drop_last": cut.drop_last,
    }
    return found if cut.n_partitions is None else {**found, "seed": seed, "order_version": ORDER_VERSION}


def check_state(state: object, mine: Mapping[str, object], cut: Cut) -> Place:
    """Return the content of a state, after a comparison.

    Args:
        state: A state that was saved. It may come from a file.
        mine: `state_of` of this loader.
        cut: Of this loader.

    Raises:
        ArgumentError: the state is of another loader, or no loader wrote it. The message names what differs.
    """
    if not isinstance(state, Mapping):
        raise ArgumentError(f"the state is {kind_of(state)}; it must be what state_dict() returned", where="state")
    given = cast("Mapping[str, object]", state)
    for name, value in mine.items():
        if name != "rows":
            _compare(name, given.get(name), value)
    rows, mine_rows = _mapping(given.get("rows")), cast("Mapping[str, Mapping[str, object]]", mine["rows"])
    if set(rows) != set(mine_rows):
        _compare("rows of", sorted(map(str, rows)), sorted(mine_rows))
    for side, parts in mine_rows.items():
        found = _mapping(rows[side])
        which = "" if side == "act" else f" of {side.removeprefix('act_')}"
        for name, value in parts.items():
            _compare(_WORDS.get(name, name) + which, found.get(name), value)
    epoch, batch = _whole(given, "epoch", 0), _whole(given, "batch", 0, cut.n_batches)
    if batch == cut.n_batches > 0:
        epoch, batch = epoch + 1, 0
    if cut.n_partitions is None:
        return Place(epoch, batch, {})
    early = given.get("early_start")
    if not isinstance(early, bool):
        _compare("early_start", early, cut.early_start)
    n_partitions = _whole(given, "n_partitions", 1, cut.global_batch_size)
    order = {"n_partitions": n_partitions, "pool_batches": _whole(given, "pool_batches", 1), "early_start": early}
    return Place(epoch, batch, order)


def _mapping(value: object) -> Mapping[str, object]:
    """Return a part of a state; an empty one if it is something else."""
    return cast("Mapping[str, object]", value) if isinstance(value, Mapping) else {}


def _compare(name: str, found: object, mine: object) -> None:
    # An array is never equal or different as a whole, and True is not 1.
    if type(found) is type(mine) and found == mine:
        return
    raise ArgumentError(
        f"the state was saved with {name} = {brief(found)}, but this loader has {brief(mine)}",
        where="load_state_dict",
        remedy="Make the loader with the same rows and options.",
    )


def _whole(state: Mapping[str, object], name: str, low: int, high: int = 2**63 - 1) -> int:
    """Return an integer of a state.

    Raises:
        ArgumentError: it is missing, not an integer, or out of range.
    """
    value = state.get(name)
    if type(value) is not int or not low <= value <= high:
        raise ArgumentError(
            f"the state has {name} = {brief(value)}, which this loader never writes", where="load_state_dict"
        )
    return value
