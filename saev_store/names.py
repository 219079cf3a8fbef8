"""Names of files in a store's folder: those of the protocol, and those that this package adds; and how names are printed."""

from __future__ import annotations

METADATA_NAME = "metadata.json"
SHARDS_NAME = "shards.json"
LABELS_NAME = "labels.bin"
#: Added, optional: digests of the blocks of every file.
DIGESTS_NAME = "digests.json"
#: Added, only while a store is unfinished: the writer's claim, receipts and labels.
WORK_FOLDER = ".saev_store"
CLAIM_PATH = f"{WORK_FOLDER}/claim.json"


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
