"""Imports of optional libraries."""

from __future__ import annotations

import importlib

from saev_store.errors import MissingDependencyError


def need(module: str, *, install: str, where: str | None = None) -> None:
    """Import an optional library for `where`, or raise a `MissingDependencyError` that names what pip has to install."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{error.name or module} is not installed", where=where or module, remedy=f"Run: pip install '{install}'."
        ) from error
