"""Examples that came before an earlier one: held in memory, in bounds, until that one is there."""

from __future__ import annotations

import operator
from typing import NamedTuple, SupportsIndex, cast

import numpy as np
import numpy.typing as npt

from saev_store.core.dtypes import numpy_dtype, stored_as
from saev_store.core.layout import Layout
from saev_store.errors import ArgumentError, brief

#: As many bytes are held by default.
MAX_REORDER_BYTES = 1 << 30

#: `True` is an integer to Python, but no position.
_BOOLEANS: tuple[type[object], ...] = (bool, np.bool_)


class Held(NamedTuple):
    """One example that waits.

    Attributes:
        acts: Its activations, (1, layers, tokens, d_model), in the store's dtype; nobody else's memory.
        token_rows: Its token row, (1, bytes), or None.
    """

    acts: npt.NDArray[np.generic]
    token_rows: npt.NDArray[np.uint8] | None


class ReorderBuffer:
    """Holds checked examples by their position. `ShardWriter.write` fills it and appends what it gives."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._held: dict[int, Held] = {}
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def has_tokens(self) -> bool | None:
        """Whether what is held has token rows; None where nothing is held."""
        return next((held.token_rows is not None for held in self._held.values()), None)

    def check(self, example: object, example_range: tuple[int, int], next_example: int) -> int:
        """The position of an example, which is new and in the range that is written.

        Raises:
            ArgumentError: it is none, or the example was given before.
        """
        try:
            position = -1 if isinstance(example, _BOOLEANS) else operator.index(cast("SupportsIndex", example))
        except TypeError:
            position = -1
        start, end = example_range
        missing = f"the first one that is missing is {next_example}" if next_example < end else "none is missing"
        if position in self._held or start <= position < next_example:
            raise ArgumentError(
                f"example {position} was written before",
                where="example",
                remedy=f"Write each example once; {missing}.",
            )
        if not next_example <= position < end:
            which = f"from {next_example} to {end - 1}" if next_example < end else "that is missing, and none is"
            raise ArgumentError(f"example is {brief(example)}; it must be an integer {which}", where="example")
        return position

    def hold(
        self,
        example: int,
        acts: npt.NDArray[np.generic],
        token_rows: npt.NDArray[np.uint8] | None,
        *,
        next_example: int,
        max_nbytes: int,
    ) -> None:
        """Copy a checked example that waits for `next_example`.

        Raises:
            ArgumentError: more than `max_nbytes` would be held.
        """
        nbytes = self._layout.example_nbytes + (0 if token_rows is None else token_rows.nbytes)
        if self._nbytes + nbytes > max_nbytes:
            raise ArgumentError(
                f"example {next_example} has not come, and the {len(self)} examples that wait for it take {self._nbytes:,} of "
                f"{max_nbytes:,} bytes: there is no room for example {example}",
                where="example",
                remedy=f"Write example {next_example}, then this one again; or raise the writer's max_reorder_bytes.",
            )
        kept = stored_as(acts, numpy_dtype(self._layout.dtype))
        self._held[example] = Held(
            acts.copy() if kept is acts else kept, None if token_rows is None else token_rows.copy()
        )
        self._nbytes += nbytes

    def take(self, example: int) -> Held | None:
        """What is held of an example, which is let go of; None where it has not come."""
        held = self._held.pop(example, None)
        if held is not None:
            self._nbytes -= self._layout.example_nbytes + (0 if held.token_rows is None else held.token_rows.nbytes)
        return held
