"""`TextFile`: the texts of a file, on any storage, as a source."""

from __future__ import annotations

import json
import re
import time
from array import array
from typing import TYPE_CHECKING, SupportsIndex, cast

import xxhash

from saev_store.core.arguments import check_flag
from saev_store.errors import ArgumentError, DocumentError, NotFoundError, SaevStoreError, brief
from saev_store.problems import Problem
from saev_store.sources._files import ALGORITHM, CHUNK_BYTES, chunks
from saev_store.sources._source import DigestScope, Source, check_index, check_positions, text_card
from saev_store.sources.address import Url, full_url, locate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from saev_store.transport import Engine, Transport
    from saev_store.validation import Report

_HEAD_NBYTES = 4096
#: How gzip, Zstandard, bzip2, xz, LZ4 and zip files begin.
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ\0", b"\x04\x22\x4d\x18", b"PK\x03\x04")
#: A JSON object that goes on in its line, and one in an array or of several lines.
_OBJECT = re.compile(rb'\s*\{[ \t]*"')
_ONE_DOCUMENT = re.compile(rb'\s*(?:\[\s*\{\s*"|\{[ \t]*[\r\n]\s*")')


class TextFile(Source[str]):
    """The texts of a UTF-8 file as a source: of JSON lines one in each line, which is an object; any other file is one text.

    JSON lines are files named `*.jsonl`, and those that begin with a JSON object whatever their name is. Lines without content are left out. The file is read once when it is opened, for its digest and to find its lines; of the texts,
    24 bytes each are kept.

    Args:
        url: The file: a path, any fsspec URL, or, with `transport`, a path below its root.
        storage_options, engine, transport: As in `open_source`.
        text_key: Key of the text in the objects of JSON lines.

    Raises:
        NotFoundError: there is no such file.
        DocumentError: it is compressed, or one JSON document of several lines.
        ArgumentError: `text_key` is given for a file that is one text.
        AccessError, TransportError: it cannot be read.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "one.jsonl").write_text('{"text": "a cat"}')
    ...     TextFile(f"{folder}/one.jsonl")[0]
    'a cat'
    """

    format = "text"
    problems = ()

    def __init__(
        self,
        url: Url,
        storage_options: Mapping[str, object] | None = None,
        *,
        text_key: str = "text",
        engine: Engine = "auto",
        transport: Transport | None = None,
    ) -> None:
        self.transport, self._path = locate(url, storage_options, engine=engine, transport=transport)
        self.url, self.text_key = full_url(self.transport, self._path), text_key
        try:
            nbytes = self.transport.size(self._path)
        except NotFoundError:
            remedy = "If this is the text itself, write it to a file. From Python pass a list of texts."
            raise NotFoundError("there is no such file", where=self.url, remedy=remedy) from None
        (head,) = self.transport.get_ranges(self._path, starts=[0], ends=[min(nbytes, _HEAD_NBYTES)])
        self._has_lines = self._look(bytes(head))
        #: The first byte of each text, the one behind its last, and the number of its line.
        self._starts, self._ends, self._lines = array("q"), array("q"), array("q")
        # The same digest as that of `digest_files`.
        hasher = xxhash.xxh3_128(nbytes.to_bytes(8, "little"))
        for number, (start, line) in enumerate(self._scanned(nbytes, hasher), 1):
            if line.strip():
                self._starts.append(start)
                self._ends.append(start + len(line))
                self._lines.append(number)
        if not self._has_lines:
            self._starts, self._ends, self._lines = array("q", [0]), array("q", [nbytes]), array("q", [1])
        self._digest = hasher.hexdigest()

    def _look(self, head: bytes) -> bool:
        """Return True for JSON lines, from the first bytes of the file; refuse what is neither these nor a text."""
        if head.startswith(_COMPRESSED):
            raise DocumentError("it is compressed; texts are read as they are", where=self.url, remedy="Decompress it.")
        is_named = self._path.endswith(".jsonl")
        if not is_named and _ONE_DOCUMENT.match(head):
            remedy = "Write one object with a text in each line."
            raise DocumentError("it is one JSON document, not a text", where=self.url, remedy=remedy)
        has_lines = is_named or _OBJECT.match(head) is not None
        if not has_lines and self.text_key != "text":
            message = f"text_key is {brief(self.text_key)}, but the file is one text, not JSON lines"
            raise ArgumentError(message, where="text_key", remedy="Leave it out.")
        return has_lines

    def __len__(self) -> int:
        return len(self._starts)

    def __repr__(self) -> str:
        facts = {"texts": f"{len(self):,}", "read through": self.transport.name}
        return text_card(f"Texts {self.url}", facts, self.problems)

    def __getitem__(self, index: SupportsIndex) -> str:
        """The text at a position.

        Raises:
            DocumentError: it is not UTF-8, or the line is no object with a text.
        """
        position = check_index(index, len(self), what="sample")
        return next(iter(self.rows([position])))

    def rows(self, indices: npt.ArrayLike | slice) -> Iterator[str]:
        """Texts by position, in the order asked for; neighbours are read together."""
        positions = check_positions(indices, len(self), what="sample")
        wanted, first = cast("list[int]", positions.tolist()), 0
        while first < len(wanted):
            end = self._run_end(wanted, first)
            start = self._starts[wanted[first]]
            (raw,) = self.transport.get_ranges(self._path, starts=[start], ends=[self._ends[wanted[end - 1]]])
            for position in wanted[first:end]:
                yield self._text(bytes(raw[self._starts[position] - start : self._ends[position] - start]), position)
            first = end

    def describe(self, *, digest: DigestScope = "full") -> dict[str, object]:
        """The description for `metadata.data`; its digest is of all bytes, whatever `digest` says."""
        del digest
        return {
            "format": self.format,
            "url": self.url,
            **({"text_key": self.text_key} if self._has_lines else {}),
            "n_samples": len(self),
            "digest": {"algorithm": ALGORITHM, "scope": "full", "value": self._digest},
        }

    def validate(self, *, deep: bool = False, progress: bool | None = None) -> Report:
        """Report texts that cannot be read; only `deep` reads them."""
        from saev_store.validation import Report

        del progress
        deep = check_flag(deep, name="deep")
        started, problems = time.perf_counter(), list[Problem]()
        for position in range(len(self) if deep else 0):
            try:
                self[position]
            except SaevStoreError as error:
                where = self._where(position)
                problems.append(Problem(error.kind, error.message, where=where, lost=((position, position + 1),)))
        checked = sum(self._ends) - sum(self._starts) if deep else 0
        return Report(self.url, len(self), 1, tuple(problems), deep, checked, time.perf_counter() - started)

    def close(self) -> None:
        """Release maps and connections."""
        self.transport.close()

    def _scanned(self, nbytes: int, hasher: xxhash.xxh3_128) -> Iterator[tuple[int, bytes]]:
        """Digests the file; gives the start of each line and its bytes."""
        start, begun = 0, list[bytes]()
        for chunk in chunks(self.transport, self._path, nbytes):
            hasher.update(chunk)
            if not self._has_lines:
                continue
            *whole, rest = bytes(chunk).split(b"\n")
            for end in whole:
                line = b"".join([*begun, end])
                yield start, line
                start, begun = start + len(line) + 1, []
            begun.append(rest)
        yield start, b"".join(begun)

    def _run_end(self, positions: list[int], first: int) -> int:
        """The end of the neighbouring texts from `first` on that are read together."""
        end, limit = first + 1, self._starts[positions[first]] + CHUNK_BYTES
        while end < len(positions) and positions[end] == positions[end - 1] + 1:
            if self._ends[positions[end]] > limit:
                break
            end += 1
        return end

    def _text(self, raw: bytes, position: int) -> str:
        """The text of the bytes of a line, or of the file."""
        try:
            decoded = raw.decode()
        except UnicodeDecodeError as error:
            raise DocumentError(f"it is not UTF-8: {error.reason}", where=self._where(position)) from None
        if not self._has_lines:
            return decoded.replace("\r\n", "\n").replace("\r", "\n")
        try:
            found = cast("object", json.loads(decoded))
        except (ValueError, RecursionError) as error:
            # A line is parsed alone, so the parser's own number of it is always 1.
            why = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            raise DocumentError(f"the line is no JSON: {why}", where=self._where(position)) from None
        if not isinstance(found, dict):
            raise DocumentError(
                f"the line is {brief(found)}; it must be an object with a text", where=self._where(position)
            )
        document = cast("dict[str, object]", found)
        text = document.get(self.text_key)
        if self.text_key in document and not isinstance(text, str):
            raise DocumentError(
                f"the value of {brief(self.text_key)} is {brief(text)}; it must be a text",
                where=self._where(position),
                remedy="If the text has another key, pass text_key=….",
            )
        if not isinstance(text, str):
            raise DocumentError(
                f"the line has no text under the key {self.text_key!r}; its keys are {brief(list(document))}",
                where=self._where(position),
                remedy="Pass text_key=….",
            )
        return text

    def _where(self, position: int) -> str:
        return f"{self.url}:{self._lines[position]}" if self._has_lines else self.url
