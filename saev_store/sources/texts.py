"""Texts as samples: JSON lines (`TextFile`), parts of Energon samples, columns of other data sets."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, SupportsIndex, cast

import xxhash

from saev_store.core.arguments import is_mapping
from saev_store.errors import ArgumentError, DocumentError, brief
from saev_store.sources._files import ALGORITHM, chunks, pinned_nbytes
from saev_store.sources._source import DigestScope, Source, check_index, check_positions
from saev_store.sources.address import Url, locate
from saev_store.sources.energon import EnergonDataset, RawSample
from saev_store.sources.energon.samples import parse_path, resolve

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

_GROUP = 256
#: Endings of the parts of an Energon sample that are text.
_ENDINGS = frozenset({"txt", "text", "transcript"})


class TextFile(Source[str]):
    """The texts of a file of JSON lines as a source: each line is an object with a text; lines without content are left out.

    The file is read once when it is opened, for its digest and to find its lines; of the texts, 24 bytes each are kept.

    Args:
        url: The file: a path or any fsspec URL.
        storage_options: As in `open_source`.
        text_key: Key of the text in the objects.

    Raises:
        NotFoundError: there is no such file.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "one.jsonl").write_text('{"text": "a cat"}')
    ...     TextFile(f"{folder}/one.jsonl")[0]
    'a cat'
    """

    format = "text"

    def __init__(
        self, url: Url, storage_options: Mapping[str, object] | None = None, *, text_key: str = "text"
    ) -> None:
        self.transport, self._path = locate(url, storage_options)
        self.url, self.text_key = self.transport.where(self._path), text_key
        self._nbytes = pinned_nbytes(self.transport, self._path)
        #: The first byte of each text, the one behind its last, and the number of its line.
        self._starts, self._ends, self._lines = array("q"), array("q"), array("q")
        # The same digest as that of `digest_files`.
        hasher = xxhash.xxh3_128(self._nbytes.to_bytes(8, "little"))
        for number, (start, line) in enumerate(self._scanned(hasher), 1):
            if line.strip():
                self._starts.append(start)
                self._ends.append(start + len(line))
                self._lines.append(number)
        self._digest = hasher.hexdigest()

    def _scanned(self, hasher: xxhash.xxh3_128) -> Iterator[tuple[int, bytes]]:
        """Digest the file, and yield the start of each line and its bytes."""
        start, begun = 0, list[bytes]()
        for chunk in chunks(self.transport, self._path, self._nbytes):
            hasher.update(chunk)
            *whole, rest = bytes(chunk).split(b"\n")
            for end in whole:
                line = b"".join([*begun, end])
                yield start, line
                start, begun = start + len(line) + 1, []
            begun.append(rest)
        yield start, b"".join(begun)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: SupportsIndex) -> str:
        """The text at a position; `DocumentError` if it is not UTF-8, or the line is not an object with a text."""
        return next(self.rows([check_index(index, len(self), what="sample")]))

    def rows(self, indices: npt.ArrayLike | slice) -> Iterator[str]:
        """Texts by position, in the order asked for; 256 are read at a time."""
        wanted: list[int] = check_positions(indices, len(self), what="sample").tolist()
        groups = (wanted[first : first + _GROUP] for first in range(0, len(wanted), _GROUP))
        return (text for group in groups for text in self._texts(group))

    def _texts(self, wanted: list[int]) -> Iterator[str]:
        starts, ends = [self._starts[i] for i in wanted], [self._ends[i] for i in wanted]
        found = self.transport.get_ranges(self._path, starts=starts, ends=ends)
        return (self._text(bytes(raw), position) for position, raw in zip(wanted, found, strict=True))

    def _text(self, raw: bytes, position: int) -> str:
        """The text of the bytes of a line."""
        where = f"{self.url}:{self._lines[position]}"
        try:
            found = cast("object", json.loads(raw.decode()))
        except (ValueError, RecursionError) as error:  # bad UTF-8 and long numbers are ValueErrors
            remedy = "Texts are JSON lines, not compressed: an object with a text in each."
            raise DocumentError(f"the line is not JSON: {error}", where=where, remedy=remedy) from None
        text = found.get(self.text_key) if is_mapping(found) else None
        if not isinstance(text, str):
            message = f"the line must be an object with a text under {self.text_key!r}, got {brief(found)}"
            raise DocumentError(message, where=where, remedy="Pass text_key=….")
        return text

    def describe(self, *, digest: DigestScope = "full") -> dict[str, object]:
        """The description for `metadata.data`; its digest is always of all bytes."""
        del digest
        return {
            "format": self.format,
            "url": self.url,
            "text_key": self.text_key,
            "n_samples": len(self),
            "digest": {"algorithm": ALGORITHM, "scope": "full", "value": self._digest},
        }

    def close(self) -> None:
        """Release maps and connections."""
        self.transport.close()


def text_of(source: Source[object] | None, sample: object, text_key: str | int, *, where: str) -> object:
    """The text of a sample, or its token ids. Texts and token ids are returned as they are.

    `text_key` is, of a sample with several parts, the name of the text: the column of a data set; the field or the part of an Energon
    sample, or a path as in a field map. The only part of text needs no name. An integer is a place in a pair such as (text, label).

    Raises:
        ArgumentError: there is no column of that name.
        DocumentError: a sample of Energon has no such part, or it does not decode.
    """
    if isinstance(sample, RawSample):
        return _part_of(source, sample, str(text_key), where=where)
    if isinstance(sample, str) or not (isinstance(sample, Mapping) or isinstance(text_key, int)):
        return sample
    try:
        return cast("Mapping[str | int, object]", sample)[text_key]
    except (KeyError, IndexError, TypeError) as error:
        message = f"{where} is {brief(cast('object', sample))}, without {brief(text_key)}"
        raise ArgumentError(message, where="text_key", remedy="Pass text_key=….") from error


def _part_of(source: Source[object] | None, sample: RawSample, text_key: str, *, where: str) -> object:
    """The text among the parts of an Energon sample, decoded."""
    field = source.documents.field_map.get(text_key) if isinstance(source, EnergonDataset) else None
    if field is None:
        texts = [name for name in sample.parts if name.rpartition(".")[2].lower() in _ENDINGS]
        name = texts[0] if text_key == "text" and text_key not in sample.parts and len(texts) == 1 else text_key
        field = ((name, ()),) if name in sample.parts else parse_path(name, where="text_key")
    found = resolve(field, sample.parts, where=where, images="bytes")
    try:
        return found.decode() if isinstance(found, bytes) else found
    except UnicodeDecodeError as error:
        raise DocumentError(f"part {brief(text_key)} is not UTF-8 ({error.reason})", where=where) from None
