"""Every spelling of metadata.json that has ever been written, one file each, found by listing this folder.

A new version of the protocol is one new file here with a `VERSION` in it. Nothing else names it: reading, writing,
hashing and the tests go through `written_versions()`.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from saev_store.documents.versions._base import WrittenVersion


@cache
def written_versions() -> tuple[WrittenVersion, ...]:
    """All versions, oldest first. The first call imports pydantic; importing the package does not."""
    modules = [
        importlib.import_module(f"{__name__}.{found.name}")
        for found in pkgutil.iter_modules(__path__)
        if not found.name.startswith("_")
    ]
    return tuple(sorted((cast("WrittenVersion", module.VERSION) for module in modules), key=lambda v: v.since))
