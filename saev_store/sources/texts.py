"""The text of a sample, whatever the source: a file, a part of an Energon sample, a column of a data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from saev_store.errors import ArgumentError, DocumentError, brief
from saev_store.sources.energon import EnergonDataset, RawSample
from saev_store.sources.energon.samples import FieldPath, resolve

if TYPE_CHECKING:
    from saev_store.sources._source import Source

#: Endings of the parts of a sample that are text.
_ENDINGS = frozenset({"txt", "text", "transcript"})
_DEFAULT = "text"


def text_of(source: Source[object] | None, sample: object, text_key: str | int, *, where: str) -> object:
    """The text of a sample, or its token ids.

    Args:
        source: The data set of the sample; None for any other iterable.
        sample: One of its samples. Texts and token ids are returned as they are.
        text_key: Of a sample with several parts the name of the text: the column of a data set; the field or the part of an
            Energon sample, or a path as in a field map. The only part of text needs no name. An integer is a place in a pair
            such as (text, label).
        where: For messages.

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
        name = texts[0] if text_key == _DEFAULT and text_key not in sample.parts and len(texts) == 1 else text_key
        field = FieldPath(((name, ()),)) if name in sample.parts else FieldPath.parse(name, where="text_key")
    found = resolve(field, sample.parts, where=where, images="bytes")
    try:
        return found.decode() if isinstance(found, bytes) else found
    except UnicodeDecodeError as error:
        raise DocumentError(f"part {brief(text_key)} is not UTF-8 ({error.reason})", where=where) from None
