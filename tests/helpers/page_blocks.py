"""Blocks of code of the documentation, as they are there."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def page_block(page: str, heading: str, containing: str, *, language: str = "python") -> str:
    """The only block of a language below a heading of a page that has these words in it."""
    sections = re.split(r"^## ", (DOCS / page).read_text("utf-8"), flags=re.MULTILINE)
    (section,) = [text for text in sections if text.startswith(heading + "\n")]
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if containing in block]
    return found


def smaller(text: str, sizes: dict[str, str]) -> str:
    """A block with other addresses and sizes, each of which it must have."""
    for old, new in sizes.items():
        assert old in text, f"{old} is not in {text}"
        text = text.replace(old, new)
    return text
