"""Untrusted JSON as Python objects, and the problems that are found in them: both bounded.

JSON is strict UTF-8 without duplicate keys, limited in size. All problems of a document become one `DocumentError`.
"""

from __future__ import annotations

import json
from collections import Counter

from saev_store.core.arguments import is_list, is_mapping
from saev_store.errors import DocumentError, brief
from saev_store.problems import Problem, Severity

#: Problems kept of one document, and those that its message lists.
MAX_PROBLEMS, _MAX_IN_MESSAGE = 100, 8
#: Deeper documents are refused: Python's own limit depends on its version and its caller, and is lower for pickles.
_MAX_DEPTH = 100


def parse_json(raw: bytes, *, where: str, max_nbytes: int) -> object:
    """The Python objects that a JSON document stands for, by the rules of Python's `json`.

    A UTF-8 byte order mark is allowed, and so are NaN and Infinity, which Python's own writer emits.

    Args:
        raw: The whole file.
        where: Its name, for messages.
        max_nbytes: The most bytes that such a document may have.

    Raises:
        DocumentError: it is too large, too deep, not UTF-8, not JSON, or repeats a key.
    """
    findings = Findings(where)
    if len(raw) > max_nbytes:
        findings.add("json", f"it has {len(raw)} bytes; such a document has at most {max_nbytes}")
        raise findings.error("This is probably not a document of a store: check what was copied here.")

    def checked(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            ((repeated, _),) = Counter(key for key, _ in pairs).most_common(1)
            findings.add(
                "duplicate_key", f"the key {brief(repeated)} occurs twice in one object; readers would disagree"
            )
            raise findings.error("Remove one of the two.")
        return found

    try:
        value: object = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=checked)
    except DocumentError:
        raise
    except (ValueError, OverflowError, RecursionError) as error:  # bad UTF-8 and long numbers are ValueErrors
        findings.add("json", f"it is not JSON: {str(error)[:200]}" if raw.strip(b"\0 \t\r\n") else "it is empty")
        raise findings.error("It may be a partial copy: copy it again, or record the store again.") from None
    level = [value]
    for _ in range(_MAX_DEPTH):
        values = [[*each.values()] for each in level if is_mapping(each)] + [each for each in level if is_list(each)]
        level = [item for items in values for item in items]
    if level:
        findings.add("json", f"it is nested more than {_MAX_DEPTH} deep")
        raise findings.error("This is probably not a document of a store: check what was copied here.")
    return value


class Findings:
    """The first problems of the document `where`: errors, which `error` makes one exception of, and warnings."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.errors, self.warnings = list[Problem](), list[Problem]()

    def add(self, kind: str, message: str, *loc: str | int, severity: Severity = "error") -> None:
        """Add one problem; those beyond `MAX_PROBLEMS` are left out."""
        kept = self.errors if severity == "error" else self.warnings
        if len(kept) < MAX_PROBLEMS:
            kept.append(Problem(kind, message, where=self.where, loc=loc, severity=severity))

    def error(self, remedy: str, kind: type[DocumentError] = DocumentError) -> DocumentError:
        """One exception with every error that was added; there must be at least one."""
        message, n = "; ".join(problem.message for problem in self.errors[:_MAX_IN_MESSAGE]), len(self.errors)
        message = message if n == 1 else f"{n} problems: {message}{'; …' if n > _MAX_IN_MESSAGE else ''}"
        return kind(message, where=self.where, remedy=remedy, problems=self.errors)
