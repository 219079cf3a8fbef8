"""Lazy imports of the optional libraries of this package."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from saev_store.errors import MissingDependencyError

if TYPE_CHECKING:
    from types import ModuleType


def need(module: str, *, package: str, extra: str) -> ModuleType:
    """Import a module; the error names the extra that installs it.

    Raises:
        MissingDependencyError: the module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{package} is not installed ({error})", where=module, remedy=f"Run: pip install 'saev-store[{extra}]'."
        ) from error
