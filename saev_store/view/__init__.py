"""A local page that shows a store: its card, layers, examples, tokens and their neighbours.

`saev-store view URL` runs it, `store.view()` shows it in a notebook. Needs the extra `view`.
"""

from __future__ import annotations

from saev_store.view._application import application
from saev_store.view._pages import Pages
from saev_store.view._sae import Sae, read_sae
from saev_store.view._server import View, open_pages, run
from saev_store.view._viewed import LOCAL, REMOTE, Budget, Viewed

__all__ = [
    "LOCAL",
    "REMOTE",
    "Budget",
    "Pages",
    "Sae",
    "View",
    "Viewed",
    "application",
    "open_pages",
    "read_sae",
    "run",
]
