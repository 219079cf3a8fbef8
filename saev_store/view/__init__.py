"""A local page that shows a store: its card, layers, examples, tokens and their neighbours, or two stores side by side.

`saev-store view URL` runs it, `store.view()` shows it in a notebook. Needs the extra `view`.
"""

from __future__ import annotations

from saev_store.view._server import View

__all__ = ["View"]
