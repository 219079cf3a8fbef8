"""labels.bin: one byte for each content token of each example, without a header."""

from __future__ import annotations

from saev_store.core.layout import Layout
from saev_store.errors import DocumentError
from saev_store.problems import Problem


def labels_nbytes(layout: Layout) -> int:
    """The exact size of a labels.bin, in bytes (docs/protocol.md, section 5).

    >>> labels_nbytes(Layout(7, (2, 5, 11), 4, True, 8, 3))
    28
    """
    return layout.n_examples * layout.content_tokens_per_example


def parse_labels_size(nbytes: int, layout: Layout, *, where: str = "labels.bin") -> tuple[int, int]:
    """The shape (n_examples, content tokens) of the uint8 labels, from the size of the file alone.

    Args:
        nbytes: Size of the file, in bytes.
        layout: The layout of its store.
        where: The file's name, for messages.

    Raises:
        DocumentError: the size is not the one that the layout demands.

    >>> parse_labels_size(28, Layout(7, (2, 5, 11), 4, True, 8, 3))
    (7, 4)
    """
    expected = labels_nbytes(layout)
    shape = (layout.n_examples, layout.content_tokens_per_example)
    if nbytes == expected:
        return shape
    message = f"it has {nbytes} bytes; {shape[0]} examples x {shape[1]} content tokens of one byte are {expected}"
    if layout.cls_token and nbytes == layout.n_examples * layout.tokens_per_example:
        message += ", while this size has a column for CLS, which has no label"
        remedy = "Write it again without the first column."
    elif layout.n_layers > 1 and nbytes == expected * layout.n_layers:
        message += ", while this size repeats the labels for every layer"
        remedy = "Write them once for each example."
    elif nbytes < expected:
        remedy = "It is cut off or of another store: copy it again, or remove it to read the store without labels."
    else:
        remedy = "It is of another store, or not of one byte each: replace it, or remove it."
    raise DocumentError(message, where=where, remedy=remedy, problems=[Problem("labels_size", message, where)])
