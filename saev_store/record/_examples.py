"""Sources of examples as recording sees them: their geometry, batches for the model, and examples of the vectors that come back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

    from saev_store.record._adapters import Adapter

#: Numbers for each content token, by the name of the token array.
TokenArrays: TypeAlias = Mapping[str, npt.NDArray[np.generic]]


@dataclass(frozen=True)
class Geometry:
    """The sizes of the examples that a source makes for a model, and their description in the metadata."""

    n_examples: int
    content_tokens: int
    #: Whether token 0 of an example is a special one.
    cls_token: bool
    #: Name and dtype of what is recorded for each content token.
    token_arrays: Mapping[str, str]
    #: The cut of texts, for the metadata; None for other data.
    text: Mapping[str, object] | None = None


@dataclass(frozen=True)
class Batch:
    """Rows that the model runs at once."""

    #: The arguments of `Recorder.__call__`: arrays or tensors.
    inputs: tuple[object, ...]
    #: The position of its first row: which example it is, or which token of the text, as the source counts.
    first: int
    #: For each token of the batch that is recorded, as the source keeps it.
    token_arrays: TokenArrays


@dataclass(frozen=True)
class Recorded:
    """Examples with their vectors (examples, layers, tokens, d_model) and token arrays (examples, content tokens); `first` is in the store."""

    first: int
    acts: torch.Tensor
    token_arrays: TokenArrays


class ExampleSource(ABC):
    """Examples for a model: batches of its input, and how its vectors become examples of a store."""

    @abstractmethod
    def geometry(self, adapter: Adapter) -> Geometry:
        """The sizes of the examples for this model; `ArgumentError` if it cannot run the source."""

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """The description of the source for `metadata.data`, in plain JSON types."""

    @abstractmethod
    def identity(self) -> dict[str, object]:
        """The rest of the source that decides which vectors come out, such as the batch size."""

    @abstractmethod
    def batches(self, start: int, end: int) -> Iterator[Batch]:
        """The batches that the examples `start` to `end - 1` need, always cut at the same places."""

    @abstractmethod
    def assemble(self, computed: Iterable[tuple[Batch, torch.Tensor]], start: int) -> Iterator[Recorded]:
        """Examples, in order and from `start` or from an earlier one on, of the batches of `batches(start, …)` and their vectors."""
