"""Notebooks as pages of the documentation site: their text, code and kept outputs."""

from __future__ import annotations

import base64
import json
from pathlib import Path

#: In this order in the navigation.
NAMES = ("quick_start", "analysis", "text")
_PICTURES = {"image/jpeg": "jpeg", "image/png": "png"}


def page_of(notebook: Path) -> tuple[str, dict[str, bytes]]:
    """The Markdown of a notebook, and its pictures by file name. Of HTML, which has styles of its own, the plain text is taken."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads(notebook.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", "")})
            kind = next((kind for kind in _PICTURES if kind in data), None)
            if kind is None:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
                continue
            name = f"{notebook.stem}-{len(pictures)}.{_PICTURES[kind]}"
            pictures[name] = base64.b64decode("".join(data[kind]))
            parts.append(f'<img src="{name}" alt="Figure {len(pictures)}: what the code above draws">')
    return "\n\n".join(parts) + "\n", pictures
