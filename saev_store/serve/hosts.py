"""Which `Host` headers a server on this machine answers."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection

_HOST = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::[0-9]*)?")


def is_known_host(header: str, names: Collection[str] = ()) -> bool:
    """Whether a `Host` header is a numeric address, `localhost`, or one of the given names.

    A web page could use a name of its own to reach a server that listens on this machine only (DNS rebinding); a numeric address
    cannot be taken over in this way.

    Args:
        header: The header, with or without a port.
        names: Further names, in small letters; `"*"` for all.

    >>> is_known_host("127.0.0.1:8000"), is_known_host("[::1]"), is_known_host("evil.example:8000")
    (True, True, False)
    """
    found = _HOST.fullmatch(header)
    name = "" if found is None else (found[1] or found[2] or "").lower()
    if "*" in names or name == "localhost" or name in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
