"""Validation: finds problems of a store and the examples that each makes unreadable.

`quick_checks` compares names and sizes, `validate` can also read every byte. Both take a transport and the parsed documents,
not a store, so they work on stores that do not open.
"""

from __future__ import annotations

from saev_store.validation.deep import validate
from saev_store.validation.quick import Survey, check_dirname, check_survey, quick_checks, survey_store
from saev_store.validation.report import Report, merge_ranges

__all__ = [
    "Report",
    "Survey",
    "check_dirname",
    "check_survey",
    "merge_ranges",
    "quick_checks",
    "survey_store",
    "validate",
]
