"""Sources of examples as recording sees them: their geometry, batches for the model, and examples of the vectors that come back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from saev_store.core.dtypes import ITEMSIZES
from saev_store.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from saev_store.record._adapters import Adapter

#: Numbers for each content token, by the name of the token array.
TokenArrays: TypeAlias = Mapping[str, npt.NDArray[np.generic]]


@dataclass(frozen=True)
class Geometry:
    """The sizes of the examples that a source makes for a model, and their description in the metadata.

    Attributes:
        n_examples: Number of examples.
        content_tokens: Content tokens of an example.
        cls_token: Whether token 0 of an example is a special one.
        token_arrays: Name and dtype of what is recorded for each content token.
        text: The cut of texts, for the metadata; None for other data.
    """

    n_examples: int
    content_tokens: int
    cls_token: bool
    token_arrays: Mapping[str, str]
    text: Mapping[str, object] | None = None


@dataclass(frozen=True)
class Batch:
    """Rows that the model runs at once.

    Attributes:
        inputs: The arguments of `Recorder.__call__`: arrays or tensors.
        first: The position of its first row: which example it is, or which token of the text, as the source counts.
        token_arrays: For each token of the batch that is recorded, as the source keeps it.
    """

    inputs: tuple[object, ...]
    first: int
    token_arrays: TokenArrays


@dataclass(frozen=True)
class Recorded:
    """Examples with their vectors.

    Attributes:
        first: The position of the first of them in the store.
        acts: (examples, layers, tokens, d_model).
        token_arrays: (examples, content tokens) by name.
    """

    first: int
    acts: torch.Tensor
    token_arrays: TokenArrays


class ExampleSource(ABC):
    """Source of the examples of a recording: `Images` or `Texts`."""

    @abstractmethod
    def geometry(self, adapter: Adapter) -> Geometry:
        """The sizes of the examples for this model.

        Raises:
            ArgumentError: the source is empty, or this model cannot run it.
        """

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """The description of the source for `metadata.data`, in plain JSON types."""

    @abstractmethod
    def identity(self) -> dict[str, object]:
        """The rest of the source that decides which vectors come out, such as the batch size; may read all data."""

    @abstractmethod
    def batches(self, start: int, end: int) -> Iterator[Batch]:
        """The batches that the examples `start` to `end - 1` need, always cut at the same places."""

    @abstractmethod
    def assemble(self, computed: Iterable[tuple[Batch, torch.Tensor]], start: int) -> Iterator[Recorded]:
        """Examples, in order and from `start` or from an earlier one on, of batches and their vectors.

        Args:
            computed: The batches of `batches(start, …)`, each with (rows, layers, tokens, d_model).
            start: As of `batches`.
        """


def as_stored(acts: torch.Tensor, stored: str, *, rounds: bool) -> torch.Tensor:
    """The vectors in a dtype that a writer takes, which rounds them to that of its store.

    Without `rounds` nothing is rounded that the model computes in another dtype than its parameters have.

    Raises:
        ArgumentError: a store can hold the numbers as they are, or no store can.
    """
    name = str(acts.dtype).removeprefix("torch.")
    if not rounds and (name == "float64" or (name in ITEMSIZES and stored not in {name, "float32"})):
        keep = "no store holds them as they are" if name == "float64" else f'Pass dtype="{name}" to keep them'
        raise ArgumentError(
            f"the store would be {stored}, but these vectors are {name}, and would be rounded",
            where="dtype",
            remedy=f'{keep}; dtype="{stored}" rounds them.',
        )
    return acts.float() if name == "float64" else acts
