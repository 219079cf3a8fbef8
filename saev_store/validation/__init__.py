"""Validation: finds problems of a store and the examples that each makes unreadable, also of stores that do not open."""

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
