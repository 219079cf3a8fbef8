"""Inspection: what is wrong with a store, and which examples that costs.

`quick_checks` looks at names and sizes, `validate` can read every byte. Both take what an opened store is made of
(a transport, its documents), never a store, so they also work on one that does not open.
"""

from __future__ import annotations

from saev_store.inspect._report import Report, merge_ranges, problem_to_dict
from saev_store.inspect._sizes import check_dirname, quick_checks
from saev_store.inspect._validate import validate

__all__ = [
    "Report",
    "check_dirname",
    "merge_ranges",
    "problem_to_dict",
    "quick_checks",
    "validate",
]
