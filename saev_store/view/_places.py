"""Removes places from what the page shows: addresses and absolute paths, but for their last component."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np

#: A URL, a chain of them, or an absolute path; up to what cannot be part of one in a sentence.
_PLACE = re.compile(r"""(?:[A-Za-z][\w+.-]*::)*(?:[A-Za-z][\w+.-]*://|(?<![\w./:])~?/)[^\s'"`,;()\[\]{}<>|]*""")
_MOST_DEPTH = 20


def without_places(text: str, places: Iterable[str] = ()) -> str:
    """A text in which of each URL and absolute path only the last component is left.

    Args:
        text: Such as the message of an error.
        places: Addresses that are known, which may have blanks.

    >>> without_places("s3://user:pw@bucket/a/acts0.bin is short; see /home/me/notes.")
    'acts0.bin is short; see notes.'
    """
    known = {place.rstrip("/") for place in places}
    for place in sorted(filter(None, known), key=len, reverse=True):
        text = text.replace(place, _last(place))
    return _PLACE.sub(lambda match: _last(match.group()), text)


def _last(place: str) -> str:
    """The last component of a path or URL, without a query."""
    path = re.split(r"[?#]", place)[0]
    ending = path[len(path.rstrip(".:!")) :]
    name = path.rstrip(".:!/").rpartition("/")[2]
    return f"{name.rpartition('@')[2]}{ending}"


def plain(value: object, depth: int = 0) -> object:
    """A value as JSON has it: arrays as lists, numbers that are not finite as null."""
    if depth > _MOST_DEPTH:
        return None
    if isinstance(value, np.ndarray):
        return plain(cast("object", value.tolist()), depth + 1)
    if isinstance(value, np.generic):
        return plain(cast("object", value.item()), depth + 1)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain(item, depth + 1) for name, item in cast("Mapping[object, object]", value).items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item, depth + 1) for item in cast("Sequence[object]", value)]
    return value
