"""Metadata of a release that depend on where it is published: its addresses, and the README with links that work elsewhere.

The workflow that publishes names the repository in `SAEV_STORE_REPOSITORY`, such as `https://example.org/lab/saev_store`. Without it there
are no addresses, and the README is as it lies here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: A link or a picture whose target is a path in the repository.
_RELATIVE = re.compile(r"(!?)(\[[^\]]*\])\((?![a-z]+:|#)([^)\s]+)\)")


class Addresses(MetadataHookInterface):
    """The dynamic fields `readme` and `urls`."""

    def update(self, metadata: dict[str, object]) -> None:
        """Fill them in."""
        text = (Path(self.root) / "README.md").read_text("utf-8")
        repository = os.environ.get("SAEV_STORE_REPOSITORY", "").rstrip("/")
        if repository:
            tag = f"v{metadata['version']}"
            text = _RELATIVE.sub(
                lambda link: f"{link[1]}{link[2]}({repository}/{'raw' if link[1] else 'blob'}/{tag}/{link[3]})", text
            )
            metadata["urls"] = {
                "Source": repository,
                "Documentation": f"{repository}/blob/{tag}/docs/README.md",
                "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
