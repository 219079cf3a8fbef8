"""`saev-store ls`: lists the stores in a folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from saev_store._runtime.threads import ahead
from saev_store.cli._common import AsJson, Options, emit, emit_json, emit_table, storage_options
from saev_store.core.layout import layer_name
from saev_store.errors import DocumentError, SaevStoreError
from saev_store.names import METADATA_NAME, WORK_FOLDER
from saev_store.transport import Transport, open_transport

if TYPE_CHECKING:
    from saev_store.sources.energon import EnergonDataset
    from saev_store.store.listing import StoreEntry

_N_THREADS = 16
#: Parent folders of an address that are searched for a data set.
_MAX_LEVELS = 8

Root = Annotated[
    str, typer.Argument(metavar="ROOT", help="The folder that contains stores: a path, or any fsspec URL.")
]


def ls(root: Root, as_json: AsJson = False, option: Options = None) -> None:
    """List the stores in a folder, also unfinished and damaged ones; or the tars or a sample of an Energon data set."""
    from saev_store.store.card import human_bytes
    from saev_store.store.store import ShardStore

    given = storage_options(option)
    if (found := dataset_at(root, given)) is not None:
        list_parts(*found, as_json=as_json)
        return
    stores = ShardStore.list(root, given)
    transport = open_transport(root, given)
    states = list(ahead(partial(state_of, transport), stores, _N_THREADS))
    if as_json:
        described = [describe(entry, *state) for entry, state in zip(stores, states, strict=True)]
        emit_json({"root": stores.root, "stores": described})
        return
    rows: list[tuple[str, ...]] = []
    for entry, (name, note) in zip(stores, states, strict=True):
        state = f"{name}: {note}" if note else name
        if entry.metadata is None:
            rows.append((entry.name, "", "", "", "", "", state))
            continue
        layout = entry.metadata.layout
        rows.append((
            entry.name,
            " x ".join(str(n) for n in layout.shape),
            ",".join(layer_name(key) for key in layout.layer_keys),
            human_bytes(layout.nbytes),
            entry.metadata.protocol,
            entry.metadata.ckpt,
            state,
        ))  # fmt: skip
    if rows:
        emit_table(("store", "shape", "layers", "size", "protocol", "model", "state"), rows)
    elif _is_store(transport):
        emit(f"{stores.root} is a store itself; inspect it with: saev-store info {stores.root}")
    else:
        emit(f"no stores in {stores.root}")


def _is_store(transport: Transport) -> bool:
    try:
        return transport.size(METADATA_NAME) >= 0
    except SaevStoreError:
        return False


def state_of(root: Transport, entry: StoreEntry) -> tuple[str, str]:
    """State of a store and a note."""
    return entry.state, how_far(root, entry) if entry.state == "unfinished" else entry.note


def how_far(root: Transport, entry: StoreEntry) -> str:
    """Number of durable examples of an unfinished store or copy, from its writer's receipts."""
    if entry.metadata is None:
        return entry.note
    try:
        names = [found.name for found in root.list(f"{WORK_FOLDER}/{entry.name}/receipts")]
    except SaevStoreError:
        return entry.note
    layout = entry.metadata.layout  # a listing does not validate receipts
    shards = {int(name.removesuffix(".json")) for name in names if re.fullmatch(r"\d{6,18}\.json", name)}
    return f"{sum(map(layout.examples_in, shards)):,} of {layout.n_examples:,} examples"


def describe(entry: StoreEntry, state: str, note: str) -> dict[str, object]:
    """A row of the list as plain JSON types."""
    found: dict[str, object] = {"name": entry.name, "url": entry.url, "state": state, "note": note}
    if entry.metadata is not None:
        layout = entry.metadata.layout
        found |= {
            "protocol": entry.metadata.protocol,
            "family": entry.metadata.family,
            "ckpt": entry.metadata.ckpt,
            "shape": list(layout.shape),
            "layers": list(layout.layers),
            **({} if layout.hook_points is None else {"hook_points": list(layout.hook_points)}),
            "nbytes": layout.nbytes,
        }
    return found


# -- data sets ---------------------------------------------------------------------------------------------------------


def dataset_at(url: str, options: Mapping[str, object] | None) -> tuple[EnergonDataset, str] | None:
    """The data set at an address or in a parent folder, and the path within it; None if there is none."""
    from saev_store.sources.address import split_address
    from saev_store.sources.energon import EnergonDataset
    from saev_store.sources.energon.keys import INFO_JSON, INFO_YAML
    from saev_store.store.opening import exists

    inner: list[str] = []
    for _ in range(_MAX_LEVELS):
        try:
            transport = open_transport(url, options)
            if any(exists(transport, name) for name in (INFO_JSON, INFO_YAML)):
                return EnergonDataset("", transport=transport), "/".join(reversed(inner))
        except DocumentError:
            if not inner:  # in a parent folder it is not about this one
                raise
            return None
        except SaevStoreError:
            return None
        try:
            url, last = split_address(url)
        except SaevStoreError:
            return None
        inner.append(last)
    return None


def list_parts(dataset: EnergonDataset, key: str, *, as_json: bool) -> None:
    """Print the tars of a data set, or the parts of a sample."""
    if key:
        rows = [(f"{key}.{part.name}", "nbytes", part.nbytes) for part in dataset.parts(key)]
    else:
        counts = dataset.documents.counts.tolist()
        rows = [(name, "n_samples", n) for name, n in zip(dataset.documents.shards, counts, strict=True)]
    if as_json:
        emit_json({"dataset": dataset.url, "entries": [{"name": name, unit: n} for name, unit, n in rows]})
        return
    for name, _, n in rows:
        emit(f"{n:>12,}  {name}")
