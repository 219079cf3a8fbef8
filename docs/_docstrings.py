"""Fences the examples of docstrings for the documentation site: without, Markdown takes `>>>` for quotations.

An extension of Griffe, named in mkdocs.yml.
"""

from __future__ import annotations

import re

import griffe

_FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
#: From a prompt to the next blank line.
_EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)


class FencedExamples(griffe.Extension):
    """Puts the examples of every docstring into blocks of code."""

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        """Change the docstrings of a package that was loaded."""
        self._fence(pkg)

    def _fence(self, at: griffe.Object) -> None:
        if at.docstring is not None:
            parts = _FENCE.split(at.docstring.value)
            fenced = (part if part.startswith("```") else _EXAMPLE.sub(r"```pycon\n\g<0>\n```", part) for part in parts)
            at.docstring.value = "".join(fenced)
        for member in at.members.values():
            if isinstance(member, griffe.Object):  # an alias is another's
                self._fence(member)
