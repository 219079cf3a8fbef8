"""What is imported: examples in order, with the metadata of the store that they become."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from saev_store.documents import Metadata

#: How much of a source is read, and kept in memory, at a time.
MAX_BLOCK_BYTES = 256 << 20


class Block(NamedTuple):
    """Consecutive examples.

    Attributes:
        first: The position of the first one.
        acts: (k, layers, tokens, d_model), of a dtype that a store may hold, or float64.
        token_arrays: (k, content tokens) for each token array, by name.
    """

    first: int
    acts: npt.NDArray[np.generic]
    token_arrays: Mapping[str, npt.NDArray[np.generic]]


class Examples(Protocol):
    """What can be imported.

    Attributes:
        metadata: That of the new store; `data["imported"]` identifies the source.
    """

    @property
    def metadata(self) -> Metadata: ...

    def blocks(self, first: int, end: int, max_block_bytes: int) -> Iterator[Block]:
        """The examples from `first` to `end`, in order, in blocks of at most so many bytes, or of one example."""
        ...
