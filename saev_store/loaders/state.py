"""States: what identifies the rows of a loader, and checks of a state before it is used."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from typing import NamedTuple, cast

import numpy as np

from saev_store.errors import ArgumentError, brief
from saev_store.order import ORDER_VERSION, Cut
from saev_store.store.selection import Selection

STATE_VERSION = 3
#: What the parts of an identity are called in an error, if they are not options.
_WORDS = {"left_out": "ignore_labels, where, mask or filters"}


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
    first, stop = space.tokens.start - n_special, space.tokens.stop - n_special
    if isinstance(chosen := space.examples, range):  # as states have always called it
        examples = f"Progression(start={chosen.start}, step={chosen.step}, count={len(chosen)})".encode()
    else:
        examples = np.asarray(chosen, dtype="<i8").tobytes()
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


class EpochPlace(NamedTuple):
    """Content of a checked state: the epoch and the number of its next batch, and the fields of `Cut` that its order depends on."""

    epoch: int
    batch: int
    order: Mapping[str, object]


def state_of(parts: Mapping[str, Selection], cut: Cut, seed: int) -> dict[str, object]:
    """Return what a loader's states have besides the place."""
    found: dict[str, object] = {
        "version": STATE_VERSION,
        "order": "stored" if cut.n_partitions is None else "shuffled",
        "n_rows": cut.n_rows,
        "global_batch_size": cut.global_batch_size,
        "drop_last": cut.drop_last,
    }
    if cut.n_partitions is not None:
        found.update(seed=seed, order_version=ORDER_VERSION, **_order_of(cut))
    identities = {side: rows_identity(rows) for side, rows in parts.items()}
    found["rows"] = {f"{side}.{name}": value for side, of in identities.items() for name, value in of.items()}
    return found


def _order_of(cut: Cut) -> dict[str, object]:
    return {"n_partitions": cut.n_partitions, "pool_batches": cut.pool_batches, "early_start": cut.early_start}


def check_state(state: Mapping[str, object], mine: Mapping[str, object], cut: Cut) -> EpochPlace:
    """Return the content of a state, after a comparison.

    Args:
        state: A state that was saved. It may come from a file.
        mine: `state_of` of this loader.
        cut: Of this loader.

    Raises:
        ArgumentError: the state is of another loader, or no loader wrote it. The message names what differs.
    """
    given, order = _mapping(state), {} if cut.n_partitions is None else _order_of(cut)
    rows, mine_rows = _mapping(given.get("rows")), _mapping(mine["rows"])
    for name in [name for name in mine if name not in order and name != "rows"]:
        compare(name, given.get(name), mine[name])
    for name, value in mine_rows.items():
        compare(name, rows.get(name), value)
    epoch, batch = _whole(given, "epoch", 0), _whole(given, "batch", 0, cut.n_batches)
    if batch == cut.n_batches > 0:  # counted by the caller
        epoch, batch = epoch + 1, 0
    if order:
        early = given.get("early_start")
        if not isinstance(early, bool):
            compare("early_start", early, cut.early_start)
        n_partitions = _whole(given, "n_partitions", 1, cut.global_batch_size)
        order = {"n_partitions": n_partitions, "pool_batches": _whole(given, "pool_batches", 1), "early_start": early}
    return EpochPlace(epoch, batch, order)


def _mapping(value: object) -> dict[str, object]:
    """Return a part of a state; an empty one if it is something else."""
    return dict(cast("Mapping[str, object]", value)) if isinstance(value, Mapping) else {}


def compare(name: str, found: object, mine: object) -> None:
    """Refuse a state in which something is not that of the loader.

    Raises:
        ArgumentError: it is not.
    """
    # An array is never equal or different as a whole, and True is not 1.
    if type(found) is type(mine) and found == mine:
        return
    side, _, part = name.rpartition(".")
    part = _WORDS.get(part, part) + (f" of {side.removeprefix('act_')}" if "_" in side else "")
    raise ArgumentError(
        f"the state was saved with {part} = {brief(found)}, but this loader has {brief(mine)}",
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
