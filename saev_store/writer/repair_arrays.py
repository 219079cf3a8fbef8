"""Token arrays in a repair: the bytes of one that is restored, and whether those of some examples are the store's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import numpy.typing as npt

from saev_store.core.token_arrays import LABELS, TokenArray
from saev_store.errors import ArgumentError, NotFoundError
from saev_store.writer.create import is_as_written
from saev_store.writer.digests import BLOCK_BYTES, Digests, block_ranges
from saev_store.writer.inputs import token_rows

if TYPE_CHECKING:
    from saev_store.core.layout import Layout
    from saev_store.documents import Metadata
    from saev_store.transport import Transport

#: `"absent"`: it was never recorded, as far as is known.
State = Literal["whole", "absent", "lost"]


def array_state(store: Transport, metadata: Metadata, array: TokenArray, digests: Digests | None) -> State:
    """Look at the file of a token array: its size, and its digests or, without these, the values of a bool."""
    name, nbytes = array.file_name, array.nbytes(metadata.layout)
    promised = digests.files.get(name) if digests is not None else None
    try:
        size = store.size(name)
    except NotFoundError:
        return "lost" if promised is not None or metadata.declares_token_arrays else "absent"
    if size != nbytes:
        return "lost"
    if digests is not None and promised is not None and promised.nbytes == nbytes:
        return "whole" if is_as_written(store, name, promised, digests.block_bytes, nbytes) else "lost"
    for start, end in block_ranges(nbytes, BLOCK_BYTES) if array.dtype == "bool" else ():
        if not array.is_valid(bytes(store.get_ranges(name, starts=[start], ends=[end])[0])):
            return "lost"
    return "whole"


def bytes_of(array: TokenArray, values: object, n_examples: int, layout: Layout) -> npt.NDArray[np.uint8]:
    """The bytes of the values of some examples, (n_examples, bytes); `ArgumentError` for another shape or other values."""
    rows = token_rows({array.name: values}, (array,), n_examples, layout, required=True)
    return cast("npt.NDArray[np.uint8]", rows)


def rows_in_pieces(array: TokenArray, values: object, layout: Layout) -> Iterator[memoryview]:
    """The bytes of all values of a token array: in one piece, or in those of an iterator.

    Raises:
        ArgumentError: they have another shape or other values, or there are too few or too many of them.
    """
    if not isinstance(values, Iterator):
        yield bytes_of(array, values, layout.n_examples, layout).reshape(-1).data
        return
    at = 0
    for piece in cast("Iterator[npt.NDArray[np.generic]]", values):
        n = min(len(piece), layout.n_examples - at)
        yield bytes_of(array, piece, n, layout).reshape(-1).data
        at += n
    if at < layout.n_examples:
        raise ArgumentError(
            f"{array.name} was given for {at} examples; the store has {layout.n_examples}",
            where=array.name,
            remedy="Give it for all of them.",
        )


def compare_rows(
    store: Transport, layout: Layout, array: TokenArray, values: object, examples: Sequence[range], state: State
) -> None:
    """Check that the values of some examples are what the store still has.

    Raises:
        ArgumentError: the store has other values, or none.
    """
    if state != "whole":
        restore = "restore_labels" if array == LABELS else "restore_array"
        raise ArgumentError(
            f"{array.file_name} is {state}: there is nothing to compare these with",
            where=array.name,
            remedy="Leave them out." if state == "absent" else f"Give all of them to `{restore}`.",
        )
    rows, width, at = bytes_of(array, values, sum(map(len, examples)), layout), array.example_nbytes(layout), 0
    for some in examples:
        (found,) = store.get_ranges(array.file_name, starts=[some.start * width], ends=[some.stop * width])
        same = (np.frombuffer(found, np.uint8).reshape(-1, width) == rows[at : at + len(some)]).all(axis=1)
        if not same.all():
            raise ArgumentError(
                f"the {array.name} of example {some[int(np.argmin(same))]} are others than the store's",
                where=array.name,
                remedy="These are most likely other examples than the missing ones.",
            )
        at += len(some)
