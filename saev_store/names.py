"""Names of files in a store's folder: those of the protocol, and those that this package adds; how names are printed, and names in addresses."""

from __future__ import annotations

import re

METADATA_NAME = "metadata.json"
SHARDS_NAME = "shards.json"
LABELS_NAME = "labels.bin"
#: Added, optional: digests of the blocks of every file.
DIGESTS_NAME = "digests.json"
#: Added, only while a store is unfinished: the writer's claim, receipts and labels.
WORK_FOLDER = ".saev_store"
CLAIM_PATH = f"{WORK_FOLDER}/claim.json"

#: Not within the brackets of an IPv6 address.
_BETWEEN_LINKS = re.compile(r"::(?![^\[]*\])")

#: Control characters, which a terminal takes for commands, as they are printed; but tabs and ends of lines.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def printable(text: str) -> str:
    r"""A text that every output takes and no terminal obeys.

    Escaped are bytes of a path that are not UTF-8, which Python keeps as halves of surrogate pairs, and control characters.

    >>> printable("/data/caf\udce9"), printable("red\x1b[31m")
    ('/data/caf\\udce9', 'red\\x1b[31m')
    """
    return text.encode(errors="backslashreplace").decode().translate(_CONTROLS)


def one_line(text: str) -> str:
    r"""A printable text without ends of lines.

    >>> one_line("a\nb")
    'a\\nb'
    """
    return printable(text).replace("\n", "\\n")


def joined_url(url: str, path: str) -> str:
    """The address of what is below another one; of a chain the first link with a place of its own leads there.

    >>> joined_url("s3://bucket/a", "b/c"), joined_url("zip://a::/x.zip", "b"), joined_url("simplecache::http://host", "b")
    ('s3://bucket/a/b/c', 'zip://a/b::/x.zip', 'simplecache::http://host/b')
    >>> joined_url("http://[::1]:8000/a", "b")
    'http://[::1]:8000/a/b'
    """
    if not path:
        return url
    before, link, after = _place(url)
    return f"{before}{link}{'' if link.endswith('/') else '/'}{path}{after}"


def folder_name(url: str) -> str:
    """The name of the folder that an address leads to; of the first folder of an archive that of the archive.

    >>> folder_name("s3://bucket/a/b/"), folder_name("zip://a::/x.zip"), folder_name("zip://::/a/b.zip")
    ('b', 'a', 'b')
    """
    _, link, after = _place(url)
    if after and not link.partition("://")[2].strip("/"):
        return re.sub(r"\.(zip|tar(\.\w+)?|tgz)$", "", folder_name(after.removeprefix("::")), flags=re.IGNORECASE)
    return link.rstrip("/").rsplit("/", 1)[-1]


def _place(url: str) -> tuple[str, str, str]:
    """A chained address: what comes before the first link with a place, that link, and what follows. Caches have no place."""
    if "://" not in url:
        return "", url, ""
    links = _BETWEEN_LINKS.split(url)
    at = next((at for at, link in enumerate(links) if "://" in link), len(links) - 1)
    before, after = links[:at], links[at + 1 :]
    return "".join(f"{link}::" for link in before), links[at], "".join(f"::{link}" for link in after)
