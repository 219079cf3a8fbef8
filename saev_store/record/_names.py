"""Names of models and tokenizers in the metadata. Digests identify them, so no name depends on the folders above."""

from __future__ import annotations

import os
import re

#: Folders of the hub's cache and of a trainer, whose names are ambiguous without the folders above.
_IN_CACHE = re.compile(r"models--(.+)/snapshots/[^/]+")
_OF_TRAINER = re.compile(r"[^/]+/checkpoint-[0-9]+")


def name_of(given: str) -> str:
    """The name of a folder that is there, however its path is written; anything else, such as a name on the hub, as it is given."""
    if not given or not os.path.isdir(given):
        return given
    parts = os.path.abspath(given).replace(os.sep, "/").split("/")
    if found := _IN_CACHE.fullmatch("/".join(parts[-3:])):
        return found[1].replace("--", "/")
    last_two = "/".join(parts[-2:])
    return last_two if _OF_TRAINER.fullmatch(last_two) else parts[-1] or given
