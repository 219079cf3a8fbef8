"""Inspection: what is wrong with a store, and which examples that costs.

`quick_checks` looks at names and sizes, `validate` can read every byte. Both take what an opened store is made of
(a transport, its documents), never a store, so they also work on one that does not open.
"""

from __future__ import annotations

from saev_store.inspect._digests import Promised, promised_digests
from saev_store.inspect._report import Report, merge_ranges, problem_to_dict
from saev_store.inspect._sizes import check_dirname, quick_checks
from saev_store.inspect._survey import local_folder
from saev_store.inspect._validate import validate

__all__ = [
    "Promised",
    "Report",
    "check_dirname",
    "local_folder",
    "merge_ranges",
    "problem_to_dict",
    "promised_digests",
    "quick_checks",
    "validate",
]
