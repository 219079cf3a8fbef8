"""The token arrays of an opened store: labels, token ids, masks and what else was recorded for each content token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from saev_store.core.layout import Layout
from saev_store.core.rows import TokenMask
from saev_store.core.token_arrays import LABELS, TokenArray
from saev_store.documents import parse_token_array_size, rewriting
from saev_store.errors import DocumentError, NotFoundError, SelectionError, TokenArrayNotFoundError, brief

if TYPE_CHECKING:
    from saev_store.documents import Metadata
    from saev_store.transport import Buffer, Transport

#: The token array whose false values hide tokens.
MASK = "mask"
#: Conditions are looked at in pieces of about this many values.
_PIECE = 4 << 20

TokenValues = npt.NDArray[np.generic]


class TokenArrays(Mapping[str, TokenValues]):
    """Name to values, each read-only, (n_examples, content tokens); read, or mapped, when they are first asked for.

    Holds what the document declares. Before protocol 3.0 no document does: there it holds `labels` if there is a
    `labels.bin`, whose size is requested when that matters.

    Attributes:
        is_declared: True if the document declares which arrays there are.
        shape: (n_examples, content tokens).
    """

    def __init__(self, transport: Transport, metadata: Metadata, has_labels: bool | None) -> None:
        self._transport, self._layout = transport, metadata.layout
        self._arrays = {array.name: array for array in metadata.recordable}
        self.is_declared = metadata.declares_token_arrays
        self.shape = (self._layout.n_examples, self._layout.content_tokens_per_example)
        self._is_there = True if self.is_declared else has_labels
        self._read: dict[str, TokenValues] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_read": {}}  # a map is pickled as all bytes of its file

    @property
    def known(self) -> tuple[TokenArray, ...] | None:
        """The arrays, if it is known without a request which there are; else None."""
        return None if self._is_there is None else self.described()

    def described(self) -> tuple[TokenArray, ...]:
        """Name and dtype of each array; nothing of them is read."""
        if self._is_there is None:
            self._is_there = find_token_array(self._transport, self._layout, LABELS)
        return tuple(self._arrays.values()) if self._is_there else ()

    def __contains__(self, name: object) -> bool:
        return name in self._arrays and bool(self.described())

    def __iter__(self) -> Iterator[str]:
        return iter([array.name for array in self.described()])

    def __len__(self) -> int:
        return len(self.described())

    def forget(self) -> None:
        """Drop what was read: what is asked for next is read again."""
        self._read.clear()

    def declared(self, name: str) -> TokenArray:
        """Name and dtype of an array, of which nothing is read; `TokenArrayNotFoundError` if there is none."""
        if name not in self:
            raise TokenArrayNotFoundError(
                f"the store has no token array {brief(name)}; it has {sorted(self)}", where=self._transport.url
            )
        return self._arrays[name]

    def __getitem__(self, name: str) -> TokenValues:
        """The values of an array: a view of the mapped file locally; a remote file is read once.

        Raises:
            TokenArrayNotFoundError: there is no such array.
            NotFoundError: its file is missing.
            DocumentError: its file has another size than the documents imply, or a bool that is neither 0 nor 1.
            CorruptShardError: the mapped file was cut since, or the file was replaced.
        """
        values = self._read.get(name)
        if values is not None:
            self._transport.check_mapped(f"{name}.bin", values.nbytes)
            return values
        array = self.declared(name)
        where = f"{self._transport.url}/{array.file_name}"
        if not find_token_array(self._transport, self._layout, array):
            raise NotFoundError(
                "the document declares this token array, but the file is missing",
                where=where,
                remedy=f"Copy it again from where it is whole, or {rewriting(array.name)}.",
            )
        (buffer,) = self._transport.get_ranges(array.file_name, starts=[0], ends=[array.nbytes(self._layout)])
        check_values(array, buffer, where=where)
        values = np.frombuffer(buffer, dtype=array.numpy_dtype).reshape(self.shape)
        values.flags.writeable = False
        self._read[name] = values
        return values


def find_token_array(transport: Transport, layout: Layout, array: TokenArray) -> bool:
    """Return True if the file of a token array is there; `DocumentError` if it has another size than the documents imply."""
    try:
        size = transport.size(array.file_name)
    except NotFoundError:
        return False
    parse_token_array_size(size, array, layout, where=f"{transport.url}/{array.file_name}")
    return True


def check_values(array: TokenArray, values: Buffer, *, where: str) -> None:
    """Raise `DocumentError` if bytes of the file `where` of a bool are neither 0 nor 1."""
    if not array.is_valid(values):
        raise DocumentError(
            "it holds bytes other than 0 and 1; a bool is one of them",
            where=where,
            remedy=f"It is of another store, or damaged: copy it again, or {rewriting(array.name)}.",
        )


def kept_tokens(arrays: TokenArrays, conditions: Sequence[tuple[str, object, str]]) -> TokenMask:
    """Which content tokens fulfil all conditions, at least one: (n_examples, content tokens).

    A condition is the name of an array, its value or values, and the argument that asks for them.
    """
    tests: list[tuple[TokenValues, TokenValues, bool]] = []
    for name, wanted, argument in conditions:
        if name not in arrays:
            raise SelectionError(f"the store has no token array {brief(name)}; it has {list(arrays)}", where=argument)
        values = arrays[name]
        tests.append((values, _choices(name, values.dtype, wanted, argument), argument == "ignore_labels"))
    shape = tests[0][0].shape  # that of a file whose size was compared
    kept = np.ones(shape, dtype=np.bool_)
    step = max(1, _PIECE // shape[1])
    for first in range(0, shape[0], step):
        some = slice(first, first + step)
        for values, choices, are_ignored in tests:
            kept[some] &= np.isin(values[some], choices, invert=are_ignored)
    return kept


def _choices(name: str, dtype: np.dtype[np.generic], wanted: object, argument: str) -> TokenValues:
    """The values that a condition names, as a vector of the array's dtype; floats are rounded as those of the array were."""
    try:
        given = np.atleast_1d(np.asarray(wanted))
    except ValueError:  # lists of unequal lengths
        given = np.array([None])
    kinds = {"b": "biu", "f": "iuf"}.get(dtype.kind, "iu")
    if given.ndim == 1 and given.dtype.kind in kinds:
        with np.errstate(over="ignore"):
            choices = given.astype(dtype)
        if dtype.kind == "f" or choices.tolist() == given.tolist():
            return choices
    raise SelectionError(
        f"{name} is asked to be {brief(wanted)}; it must be a number of {dtype.name}, or a list of them", where=argument
    )
