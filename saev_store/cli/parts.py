"""`saev-store ls DATASET[/FOLDER]`: lists the samples of an Energon data set as folders and files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from saev_store.cli._output import emit, emit_json
from saev_store.errors import NotFoundError, SaevStoreError

if TYPE_CHECKING:
    from saev_store.sources.energon import EnergonDataset

#: Parent folders of an address that are searched for a data set.
_MAX_LEVELS = 8


def dataset_at(url: str, options: Mapping[str, object] | None) -> tuple[EnergonDataset, str] | None:
    """The data set at an address or in a parent folder, and the path within it; None if there is none."""
    from saev_store.sources.address import split_address
    from saev_store.sources.energon import EnergonDataset
    from saev_store.sources.energon.keys import INFO_JSON, INFO_YAML
    from saev_store.transport import open_transport

    inner: list[str] = []
    for _ in range(_MAX_LEVELS):
        try:
            transport = open_transport(url, options)
            for name in (INFO_JSON, INFO_YAML):
                try:
                    transport.size(name)
                except NotFoundError:
                    continue
                return EnergonDataset("", transport=transport, damaged_ok=True), "/".join(reversed(inner))
            url, last = split_address(url)
        except SaevStoreError:
            return None
        inner.append(last)
    return None


def list_parts(dataset: EnergonDataset, folder: str, *, as_json: bool) -> None:
    """Print the entries of a folder of a data set, or the parts of a sample."""
    from saev_store.sources.energon.tree import Node, children, node

    try:
        found = node(dataset, folder)
        nodes = children(dataset, folder) if found.is_dir else iter([found])
    except NotFoundError:
        # The key of a sample, without a part.
        if len(dataset.places.find(folder)) != 1:
            raise
        nodes = iter([Node(f"{folder}.{part.name}", part.nbytes) for part in dataset.parts(folder)])
    if as_json:
        emit_json({"dataset": dataset.url, "entries": [{"name": each.path, "nbytes": each.nbytes} for each in nodes]})
        return
    for each in nodes:
        emit(f"{each.path}/" if each.nbytes is None else f"{each.nbytes:>12,}  {each.path}")
