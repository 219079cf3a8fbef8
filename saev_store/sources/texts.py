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


def text_of(source: Source[object] | None, sample: object, text_key: str | int, *, where: str) -> object:
    """The text of a sample, or its token ids.

    Args:
        source: The data set of the sample; None for any other iterable.
        sample: One of its samples. Texts and token ids are returned as they are.
        text_key: Of a sample with several parts the name of the text: the column of a data set; the field or the part of an
            Energon sample, whose only part of text needs no name. An integer is a place in a pair such as (text, label).
        where: For messages.

    Raises:
        ArgumentError: there is no part of that name.
        DocumentError: a sample of Energon has no text, or it does not decode.
    """
    if isinstance(sample, RawSample):
        return _part_of(source, sample, str(text_key), where=where)
    if isinstance(sample, str) or not (isinstance(sample, Mapping) or isinstance(text_key, int)):
        return sample
    try:
        return cast("Mapping[str | int, object]", sample)[text_key]
    except (KeyError, IndexError, TypeError) as error:
        names = list(cast("Mapping[str, object]", sample)) if isinstance(sample, Mapping) else type(sample).__name__
        raise ArgumentError(
            f"{where} has no {brief(text_key)}; it has {brief(names)}", where="text_key", remedy="Pass text_key=…."
        ) from error


def _part_of(source: Source[object] | None, sample: RawSample, text_key: str, *, where: str) -> object:
    """The text among the parts of an Energon sample, decoded."""
    parts = sample.parts
    field = None
    if isinstance(source, EnergonDataset):
        field = source.documents.field_map.get(text_key)
    if field is None:
        texts = [name for name in parts if name.rpartition(".")[2].lower() in _ENDINGS]
        if text_key in parts:
            name = text_key
        elif len(texts) == 1:
            name = texts[0]
        else:
            raise DocumentError(
                f"the sample has {'several texts' if texts else 'no text'}; its parts are {', '.join(parts) or 'none'}",
                where=where,
                remedy="Name the part or the field with text_key=….",
            )
        field = FieldPath(((name, ()),))
    return resolve(field, parts, where=where, images="bytes")
