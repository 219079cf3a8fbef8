"""What the metadata say of the data set; and what the page shows without places: without addresses and absolute paths."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import cast

import numpy as np

#: A URL, a chain of them, or an absolute path; up to what cannot be part of one in a sentence. What is before `://` begins where a
#: word does: tried from every letter of a long word, it would take a time that grows with the square of the length.
_PLACE = re.compile(
    r"""(?:(?<![\w+.:-])[\w+.:-]*://|(?<![\w./:])~?/|(?<![\w./:])[A-Za-z]:\\|\\\\)[^\s'"`,;()\[\]{}<>|]*"""
)
_MOST_DEPTH = 20
#: Places of the metadata that are looked for, with blanks, in what is shown.
_MOST_PLACES = 64


def described_data(data: object) -> dict[str, object]:
    """`metadata.data` as a mapping; empty where it is something else, such as a pickle, which is not loaded."""
    if isinstance(data, str):
        try:
            data = cast("object", json.loads(data))
        except (ValueError, RecursionError):
            return {}
    return dict(cast("Mapping[str, object]", data)) if isinstance(data, Mapping) else {}


def places_in(value: object) -> tuple[str, ...]:
    """The texts in a document that are a URL or an absolute path as a whole, at most some dozen. They may have blanks.

    >>> places_in({"url": "/data/my pictures", "names": ["train", "s3://bucket/b c"]})
    ('/data/my pictures', 's3://bucket/b c')
    """
    return tuple(islice((text for text in _texts_in(value, 0) if _PLACE.match(text)), _MOST_PLACES))


def _texts_in(value: object, depth: int) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif depth < _MOST_DEPTH and isinstance(value, (Mapping, list, tuple)):
        found = cast("Mapping[object, object] | Sequence[object]", value)
        for item in found.values() if isinstance(found, Mapping) else found:
            yield from _texts_in(item, depth + 1)


def without_places(text: str, places: Iterable[str] = ()) -> str:
    """A text in which of each URL and absolute path only the last component is left.

    Args:
        text: Such as the message of an error.
        places: Addresses that are known, which may have blanks.

    >>> without_places("s3://user:pw@bucket/a/acts0.bin is short; see /home/me/notes.")
    'acts0.bin is short; see notes.'
    >>> without_places("no /data/my pictures/a.png", ["/data/my pictures"])
    'no my pictures/a.png'
    """
    known = {place.rstrip("/") for place in places}
    known |= {repr(place)[1:-1] for place in known}  # as messages quote them
    for place in sorted(filter(None, known), key=len, reverse=True):
        text = text.replace(place, _last(place))
    return _PLACE.sub(lambda match: _last(match.group()), text)


def _last(place: str) -> str:
    """The last component of a path or URL, without a query."""
    path = re.split(r"[?#]", place)[0]
    ending = path[len(path.rstrip(".:!")) :]
    name = re.split(r"[/\\]", path.rstrip(".:!/\\"))[-1]
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
