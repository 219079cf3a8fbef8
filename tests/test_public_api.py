"""The front door is pinned: a name that comes or goes does so on purpose."""

from __future__ import annotations

import importlib

import pytest

PUBLIC = {
    "saev_store": [
        "Layout",
        "Metadata",
        "Problem",
        "SaevStoreError",
        "SaevStoreWarning",
        "Selection",
        "ShardStore",
        "__version__",
        "new_metadata",
    ],
}


@pytest.mark.parametrize(("module", "names"), PUBLIC.items())
def test_exactly_these_names_are_public(module: str, names: list[str]):
    assert sorted(importlib.import_module(module).__all__) == sorted(names)


@pytest.mark.parametrize("module", [*PUBLIC, "saev_store.documents", "saev_store.transport", "saev_store.inspect"])
def test_every_public_name_is_there_once(module: str):
    room = importlib.import_module(module)
    assert len(set(room.__all__)) == len(room.__all__)
    assert not [name for name in room.__all__ if not hasattr(room, name)]


def test_a_star_import_brings_no_private_name():
    names: dict[str, object] = {}
    exec("from saev_store import *", names)
    assert set(names) - {"__builtins__"} == set(PUBLIC["saev_store"])
