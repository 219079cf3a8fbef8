"""Validation: finds problems of a store and the examples that each makes unreadable.

`quick_checks` compares names and sizes, `validate` can also read every byte. Both take a transport and the parsed documents,
not a store, so they work on stores that do not open.
"""

from __future__ import annotations

from saev_store.validation._quick import Survey, check_dirname, check_survey, local_folder, quick_checks, survey_store
from saev_store.validation._report import Report, merge_ranges, problem_to_dict
from saev_store.validation._validate import Promised, promised_digests, validate

__all__ = [
    "Promised",
    "Report",
    "Survey",
    "check_dirname",
    "check_survey",
    "local_folder",
    "merge_ranges",
    "problem_to_dict",
    "promised_digests",
    "quick_checks",
    "survey_store",
    "validate",
]
