"""The optional libraries of this room, imported when they are first needed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from saev_store.errors import MissingDependencyError

if TYPE_CHECKING:
    from types import ModuleType


def need(module: str, *, package: str, extra: str) -> ModuleType:
    """The imported module, or the extra that brings it.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{package} is not installed ({error})", where=module, remedy=f"Run: pip install 'saev-store[{extra}]'."
        ) from error
