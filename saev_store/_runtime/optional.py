"""Imports of optional libraries."""

from __future__ import annotations

import importlib

from saev_store.errors import MissingDependencyError


def need(module: str, *, install: str, where: str | None = None) -> None:
    """Import an optional library; the error names what installs it.

    Args:
        module: Name of the module.
        install: What pip has to install, such as `saev-store[xarray]`.
        where: The argument or call that needs the library; None: the module.

    Raises:
        MissingDependencyError: the library is not installed.
    """
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{error.name or module} is not installed", where=where or module, remedy=f"Run: pip install '{install}'."
        ) from error
